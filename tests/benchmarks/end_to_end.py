"""(e) The DQN of examples/agents/dqn.py, with jaxreplay's buffer and with flashbax's: time and returns."""

import dataclasses
import functools
import pathlib
import sys
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import struct
from harness import percentiles
from jax_buffers import flashbax_item_buffer

import jaxreplay as jr

STUDIES = pathlib.Path(__file__).parents[2] / "examples/studies"
POINTS = 101  # of a learning curve


@struct.dataclass
class FlashbaxState:
    """A flashbax state and the number of updates, int32 [], which the schedule of beta needs."""

    buffer: Any
    updates: jax.Array


@dataclasses.dataclass(frozen=True)
class FlashbaxBuffer:
    """flashbax's prioritised item buffer with the methods of `jr.ReplayBuffer` that the example uses.

    It has no masked add, so `mask` is ignored: the n - 1 empty steps at the start of training are stored as well. Its
    batch size is static, so `sample` takes no other than the one given here.
    """

    capacity: int
    batch_size: int
    beta: Any
    epsilon: float = 1e-6

    @property
    def _buffer(self) -> Any:
        return flashbax_item_buffer(self.capacity, self.batch_size)

    def init(self, items: Any) -> FlashbaxState:
        item = jax.tree.map(lambda x: jnp.zeros(x.shape[1:], x.dtype), items.replace(valid=None))
        return FlashbaxState(self._buffer.init(item), jnp.int32(0))

    def add(self, state: FlashbaxState, items: Any) -> FlashbaxState:
        return state.replace(buffer=self._buffer.add(state.buffer, items.replace(valid=None)))

    def sample(self, state: FlashbaxState, key: jax.Array, batch_size: int) -> jr.Sample:
        assert batch_size == self.batch_size
        drawn = self._buffer.sample(state.buffer, key)
        weights = jr.importance_weights(drawn.probabilities, self.capacity, self.beta(state.updates))
        return jr.Sample(drawn.experience, drawn.indices, drawn.probabilities, weights)

    def update(self, state: FlashbaxState, indices: jax.Array, td_errors: jax.Array) -> FlashbaxState:
        priorities = jnp.abs(td_errors) + self.epsilon
        return FlashbaxState(self._buffer.set_priorities(state.buffer, indices, priorities), state.updates + 1)


def train(dqn: Any, keys: jax.Array) -> jax.Array:
    """The return of each episode at its last step, and NaN elsewhere, [steps, seeds, num_envs]."""
    act = jax.vmap(dqn.act, in_axes=(0, None))
    states, first = jax.lax.scan(lambda x, _: act(x, 1.0), jax.vmap(dqn.init)(keys), length=dqn.WARMUP)
    _, returns = jax.lax.scan(jax.vmap(dqn.step, in_axes=(0, None)), states, jnp.arange(dqn.STEPS))
    return jnp.concatenate([first, returns])


def learning_curves(returns: np.ndarray, last_episodes: int) -> tuple[np.ndarray, np.ndarray]:
    """Environment steps of a seed [POINTS], and the mean return of its last episodes at each [seeds, POINTS]."""
    steps, seeds, num_envs = returns.shape
    times, curves = np.linspace(0, steps, POINTS), np.full((seeds, POINTS), np.nan)
    for seed in range(seeds):
        ended, envs = np.nonzero(~np.isnan(returns[:, seed]))
        episodes = returns[ended, seed, envs]
        for point, count in enumerate(np.searchsorted(ended, times)):
            if count:
                curves[seed, point] = episodes[max(0, count - last_episodes) : count].mean()
    return times * num_envs, curves


def run(smoke: bool, with_flashbax: bool) -> dict[str, Any]:
    """Train in turn with each buffer; seconds a training, returns by seed, and learning curves."""
    sys.path.append(str(STUDIES))
    try:
        import experiment
        import gymnax  # noqa: F401 (the agent's environment)
    except ImportError as error:
        return {"skipped": f"{error.name} is not installed"}
    seeds, pairs, steps = (2, 1, 50) if smoke else (8, 3, 15_500)
    sizes = {"WARMUP, STEPS, INTERVAL": (100, steps, steps // 50)}
    agents = {name: experiment.agent("dqn", **sizes) for name in ("jaxreplay", "flashbax")[: 1 + with_flashbax]}
    if with_flashbax:
        dqn = agents["flashbax"]
        dqn.buffer = FlashbaxBuffer(dqn.CAPACITY, dqn.BATCH, optax.linear_schedule(0.4, 1.0, steps))

    keys = jax.random.split(jax.random.key(0), seeds)
    result, compiled, seconds = {}, {}, {name: [] for name in agents}
    for name, dqn in agents.items():
        started = time.perf_counter()
        compiled[name] = jax.jit(functools.partial(train, dqn)).lower(keys).compile()
        result[name] = {"compile_s": round(time.perf_counter() - started, 2)}
    for _ in range(pairs):
        for name, trained in compiled.items():
            started = time.perf_counter()
            returns = np.asarray(trained(keys))
            seconds[name].append(time.perf_counter() - started)
            env_steps, curves = learning_curves(returns, agents[name].LAST)
            result[name]["curves"] = np.round(np.nan_to_num(curves), 1).tolist()
    for name, of_name in result.items():
        final = np.array(of_name["curves"])[:, -1]
        of_name["seconds"] = percentiles(seconds[name])
        of_name["ratio"] = percentiles(np.array(seconds[name]) / np.array(seconds["jaxreplay"]))
        of_name["mean_return"] = round(float(final.mean()), 1)
        of_name["interval"] = [round(float(x), 1) for x in experiment.interval(final)]
    return {"seeds": seeds, "pairs": pairs, "env_steps": env_steps.tolist(), "libraries": result}
