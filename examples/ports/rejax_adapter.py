"""Adapters of rejax 0.1.3 and gymnax 0.0.9 for `rejax_dqn.py` and `rejax_sac.py`, and their training functions."""

from collections.abc import Callable
from typing import Any

import jax
import measure
from flax import struct
from gymnax.wrappers.purerl import GymnaxWrapper
from rejax.algos.algorithm import register_init
from rejax.buffers import ReplayBuffer
from rejax.compat import create

import jaxreplay as jr

CAPACITIES = (50_000, 1_000_000, 131_072)  # the last is rejax's default
SIZES = "{buffer_size:,} items, {total_timesteps:,} steps"
LAST = 4  # a seed's return is the mean of this many evaluations
NEVER = 2**31 - 1


class Replay(struct.PyTreeNode):
    """A buffer and its state in one object, with the two methods that rejax calls."""

    buffer: jr.ReplayBuffer = struct.field(pytree_node=False)
    state: jr.buffers.ReplayState

    def extend(self, batch: Any) -> "Replay":
        return self.replace(state=self.buffer.add(self.state, batch))

    def sample(self, num: int, rng: jax.Array) -> Any:
        return self.buffer.sample(self.state, rng, num).items


class OnReplayBuffer:
    """A mixin for an algorithm of rejax: its replay is a `jr.ReplayBuffer` with the same sampling distribution."""

    @register_init
    def initialize_replay_buffer(self, rng: jax.Array) -> dict[str, Any]:
        buffer = jr.ReplayBuffer(capacity=self.buffer_size, sampler=jr.Uniform(replacement=False))
        like = jax.eval_shape(lambda: ReplayBuffer.empty(1, self.obs_space, self.action_space))
        return {"replay_buffer": Replay(buffer, buffer.init(like.data))}


class Ended(struct.PyTreeNode):
    """The state of an environment, and the outcome of its last step."""

    env: Any
    obs: jax.Array
    terminated: jax.Array | bool = False
    truncated: jax.Array | bool = False


class KeepsEnds(GymnaxWrapper):
    """Keeps what gymnax 0.0.9 does not return: the final observation, and whether an end is only a time limit."""

    def __deepcopy__(self, memo: dict) -> "KeepsEnds":  # rejax makes a copy, and the base class fails
        return self

    def reset(self, key: jax.Array, params: Any) -> tuple[jax.Array, Ended]:
        obs, state = self._env.reset(key, params)
        return obs, Ended(state, obs)

    def step(self, key: jax.Array, ended: Ended, action: jax.Array, params: Any) -> tuple:
        obs, state, reward, done, info = self._env.step(key, ended.env, action, params)
        final_obs, final, *_ = self._env.step_env(jax.random.split(key)[0], ended.env, action, params)
        terminated = self._env.is_terminal(final, params.replace(max_steps_in_episode=NEVER))
        return obs, Ended(state, final_obs, terminated, done & ~terminated), reward, done, info


def make(algorithm: Any, env: Any, params: Any, **settings: Any) -> Any:
    """An algorithm of rejax, or a port of one, with its environment in `KeepsEnds`."""
    env = env if algorithm.__module__.startswith("rejax.") else KeepsEnds(env)
    return algorithm.create(env=env, env_params=params, **settings)


def run(
    name: str,
    original: Any,
    ports: dict[str, tuple[Any, int]],
    env: str,
    settings: dict[str, Any],
    short: dict[str, Any],
    check: Callable[[], dict],
) -> None:
    """The main program of `rejax_dqn.py` and `rejax_sac.py`; `short` replaces some of the settings in short runs."""

    def trainer(algorithm: Any, settings: dict[str, Any]) -> Callable:
        algo = make(algorithm, *create(env), **settings)
        return jax.vmap(lambda key: algo.train(key)[1][1][-LAST:].mean())  # of evaluations with 128 episodes each

    tasks, speeds = (env, f"{env}, {SIZES}"), [{**short, "buffer_size": capacity} for capacity in CAPACITIES]
    how = measure.programs(original, ports, trainer, tasks, settings, short, speeds)
    args, packages = measure.parser(f"rejax's {name}").parse(), ("rejax", "gymnax", "flax", "optax")
    measure.run(args, f"rejax {name}", packages, check=check, **how)
