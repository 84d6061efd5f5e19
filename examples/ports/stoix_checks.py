"""Checks of Stoix's Rainbow and of the ports, in numbers, with Stoix's own code.

Stoix sums 5 discounted rewards but multiplies the next value by gamma, not by gamma^5. It treats time limits as
terminations. So no draw of 5 steps has the right target, except up to a termination. `Traced` stores 5-step transitions
with their discount.

On CartPole the original breaks down in 7 of 8 seeds, after which its episodes last 6 steps. In seed 0, update 1,292
draws a slot that was never stored, with probability 0. The weight of that draw is infinite, so the loss and all
parameters become NaN. With only the buffer replaced, no seed breaks down. The likely cause is that flashbax adds
differences to its sums, whose rounding errors add up. The sums of jaxreplay are recomputed, and no item of priority 0
is drawn.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from stoa.core_wrappers.wrapper import WrapperState
from stoa.env_types import StepType, TimeStep
from stoa.environment import Environment
from stoa.spaces import BoundedArraySpace, DiscreteSpace

HOURS, LIMIT, N, GAMMA, DRAWS = 10, 8, 5, 0.9, 512


class Clock(Environment):
    """A clock that starts at any hour; each step is rewarded with 1. An episode may end at midnight."""

    def __init__(self, ends: bool):
        self.ends = ends

    def reset(self, key: jax.Array, params: Any = None) -> tuple[Any, TimeStep]:
        hour = jax.random.randint(key, (), 0, HOURS)
        return WrapperState(hour), self._timestep(hour, StepType.FIRST, 0.0)

    def step(self, state: Any, action: jax.Array, params: Any = None) -> tuple[Any, TimeStep]:
        hour = (state.base_env_state + 1) % HOURS
        kind = jnp.where(self.ends & (hour == 0), StepType.TERMINATED, StepType.MID)
        return WrapperState(hour), self._timestep(hour, kind, 1.0)

    def _timestep(self, hour: jax.Array, kind: Any, reward: float) -> TimeStep:
        kind = jnp.asarray(kind, jnp.int8)
        discount = 1.0 - (kind == StepType.TERMINATED)
        view = jax.nn.one_hot(hour, HOURS)
        return TimeStep(step_type=kind, reward=jnp.float32(reward), discount=discount, observation=view, extras={})

    def observation_space(self, params: Any = None) -> BoundedArraySpace:
        return BoundedArraySpace(shape=(HOURS,), dtype=jnp.float32, minimum=0.0, maximum=1.0)

    def action_space(self, params: Any = None) -> DiscreteSpace:
        return DiscreteSpace(num_values=2, dtype=jnp.int32)

    def state_space(self, params: Any = None) -> Any:
        raise NotImplementedError  # abstract in the interface; no training asks for it

    def render(self, *args: Any) -> Any:
        raise NotImplementedError  # likewise


def targets(program: Callable, name: str) -> dict[str, tuple[int, int]]:
    """Right targets among 512 draws, and the number of draws, for each kind of end."""
    found: list[Any] = []

    def watch(*parts: jax.Array) -> None:
        jax.debug.callback(lambda *x: found.append([np.array(each) for each in x]), *parts)

    settings = {"total_batch_size": DRAWS, "epochs": 1, "gamma": GAMMA, "warmup_steps": 400, "n_step": N}
    learn, _, state = program(
        name=name, seed=0, updates=1, calls=1, watch=watch, env=Clock(True), limit=LIMIT, **settings
    )
    jax.block_until_ready(learn(state))
    jax.effects_barrier()
    obs, reward, discount = (x.reshape(DRAWS, -1).squeeze() for x in found[0])
    sums = (1 - GAMMA ** np.arange(1, N + 1)) / (1 - GAMMA)
    steps = 1 + np.abs(reward[:, None] - sums).argmin(axis=1)
    assert np.abs(reward - sums[steps - 1]).max() < 1e-5, "a sum that is not of 1 to 5 rewards"
    midnight = np.argmax(obs, axis=1) + steps == HOURS
    right = np.abs(discount - np.where(midnight, 0, GAMMA**steps)) < 1e-6
    # A window of 5 steps without a termination may end at the time limit too, where nothing changes.
    kinds = {"termination": midnight, "limit": ~midnight & (steps < N), "none": ~midnight & (steps == N)}
    return {kind: (int(right[among].sum()), int(among.sum())) for kind, among in kinds.items()}


def value(program: Callable, name: str) -> str:
    """The mean learned value of the clock that only the time limit stops."""
    settings = {"gamma": GAMMA, "vmax": 50.0, "q_lr": 2e-3, "tau": 0.05, "total_batch_size": 64}
    learn, network, state = program(name=name, seed=0, updates=400, calls=1, env=Clock(False), limit=LIMIT, **settings)
    state = jax.block_until_ready(learn(state)).learner_state
    params = jax.tree.map(lambda x: x[0, 0], state.params.online)
    noise = {"noise": jax.random.key(0)}
    return f"{float(jnp.mean(network.apply(params, jnp.eye(HOURS), rngs=noise).preferences)):.1f}"


def check(program: Callable, names: list[str]) -> list[dict[str, str]]:
    """The results of both versions, by name."""
    found = {name: targets(program, name) for name in names}
    values = {name: value(program, name) for name in names}

    def row(what: str, of: Callable[[str], str]) -> dict[str, str]:
        ports = ", ".join(f"{name}: {of(name)}" for name in names[1:])
        return {"what": what, "original": of(names[0]), "port": ports}

    kinds = {
        "none": f"draws of {N} steps that bootstrap with gamma^{N}, among {DRAWS} draws",
        "limit": f"draws of m < {N} steps to the time limit that bootstrap with gamma^m",
        "termination": "draws up to a termination that do not bootstrap",
    }
    rows = [row(what, lambda name, kind=kind: "{} of {}".format(*found[name][kind])) for kind, what in kinds.items()]
    what = f"mean learned value of a clock under a time limit of {LIMIT} steps, {1 / (1 - GAMMA):.0f} if correct"
    return [*rows, row(what, values.get)]
