"""Checks of rejax and of the ports, in numbers, with rejax's own code: what each gets right and wrong.

gymnax 0.0.9 has one `done`, so rejax treats a time limit as termination: its DQN learns values of 3.5 to 3.8 where all
values are 10. The ports keep the final observation and ask the environment for true termination, and they learn 10.
Only rows at a time limit are wrong. Their next observation belongs to the next episode, which does no harm, since rejax
does not bootstrap from it. A review of its ring and its draw found no error.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from gymnax.environments import environment, spaces
from rejax_adapter import make

LIMIT, STEPS, NUM_ENVS, GAMMA = 5, 40, 2, 0.9
PHASES = 10


@struct.dataclass
class State:
    time: jax.Array
    phase: jax.Array


class Clock(environment.Environment):
    """A clock of 10 hours that starts at any hour. Each step is rewarded with 1; only the time limit ends an episode.

    So the value of each hour is 1 / (1 - gamma).
    """

    default_params = environment.EnvParams(max_steps_in_episode=LIMIT)

    def step_env(self, key: Any, state: State, action: Any, params: Any) -> tuple:
        state = State(state.time + 1, (state.phase + 1) % PHASES)
        return self.get_obs(state), state, jnp.float32(1.0), self.is_terminal(state, params), {}

    def reset_env(self, key: Any, params: Any) -> tuple:
        state = State(jnp.int32(0), jax.random.randint(key, (), 0, PHASES))
        return self.get_obs(state), state

    def get_obs(self, state: State, params: Any = None, key: Any = None) -> jax.Array:
        return jax.nn.one_hot(state.phase, PHASES)

    def is_terminal(self, state: State, params: Any) -> jax.Array:
        return state.time >= params.max_steps_in_episode

    def action_space(self, params: Any) -> spaces.Discrete:
        return spaces.Discrete(2)

    def observation_space(self, params: Any) -> spaces.Box:
        return spaces.Box(0.0, 1.0, (PHASES,))


def collected(algorithm: Any, *extra: Any) -> list[Any]:
    """Rows that the algorithm's own code adds to its buffer in STEPS steps: leaves [STEPS, NUM_ENVS, ...]."""
    algo = make(algorithm, Clock(), Clock.default_params, num_envs=NUM_ENVS, buffer_size=64, gamma=GAMMA)
    _, found = jax.lax.scan(
        lambda ts, _: algo.collect_transitions(ts, *extra), algo.init_state(jax.random.key(0)), length=STEPS
    )
    return [np.asarray(leaf) for leaf in found]


def time_limits(original: Any, port: Any, *extra: Any) -> dict[str, list[str]]:
    """Checks of the time limit and of next observations."""
    limit = np.zeros((STEPS, NUM_ENVS), bool)
    limit[LIMIT - 1 :: LIMIT] = True
    found = []
    for algorithm in (original, port):
        obs, _, _, done, *_, next_obs = collected(algorithm, *extra)
        stray = np.any(next_obs != np.roll(obs, 1, axis=-1), axis=-1)  # not the next hour
        found.append((done.astype(bool) & limit, stray & limit, stray & ~limit))
    whats = {
        "time limits that the learner treats as terminations": limit,
        "rows at a time limit with a wrong next observation": limit,
        "other rows with a wrong next observation, or one of another environment": ~limit,
    }
    pairs = zip(whats.items(), *found, strict=True)
    return {what: [f"{x.sum()} of {among.sum()}" for x in wrong] for (what, among), *wrong in pairs}


def values(original: Any, port: Any) -> dict[str, list[str]]:
    """A check of the values that the agents learn on the clock."""

    def learned(algorithm: Any) -> str:
        sizes = {"num_envs": NUM_ENVS, "batch_size": 64, "buffer_size": 2_000, "fill_buffer": 100, "num_epochs": 5}
        times = {"total_timesteps": 6_000, "eval_freq": 6_000, "skip_initial_evaluation": True}
        settings = {"gamma": GAMMA, "learning_rate": 1e-3, "polyak": 0.95, **sizes, **times}
        algo = make(algorithm, Clock(), Clock.default_params, **settings)
        ts, _ = jax.jit(algo.train)(jax.random.key(0))
        found = algo.agent.apply(ts.q_ts.params, jnp.eye(PHASES)).max(axis=1)
        return f"{found.min():.2f} to {found.max():.2f}"

    what = f"learned values under a time limit of {LIMIT} steps, all {1 / (1 - GAMMA):.0f} if correct"
    return {what: [learned(original), learned(port)]}
