"""Replay buffers written in JAX behind one interface, and the programs made of them."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from harness import LoopProgram, ScanProgram
from jax import lax
from settings import SEQUENCE_LENGTH, SEQUENCE_PERIOD, Setting

import jaxreplay as jr

ALPHA, BETA = 0.6, 0.4


@dataclasses.dataclass(frozen=True)
class Buffer:
    """A buffer's functions.

    Attributes:
      init: () -> state.
      add: (state, items [*added, ...]) -> state.
      sample: (state, key) -> state, items [B, ...], handles, weights [B].
      update: (state, handles, td_errors [B]) -> state.
      added: leading axes of what a step adds.
      fill: leading axes of what is added at a time while filling, and how many times.
      shardings: how what is added and what is drawn lie on several devices, or None.
    """

    init: Callable
    add: Callable
    sample: Callable
    update: Callable
    added: tuple[int, ...]
    fill: tuple[tuple[int, ...], int]
    shardings: tuple[jax.sharding.Sharding, jax.sharding.Sharding] | None = None

    def full(self, setting: Setting) -> Any:
        """State with as many items as it has room for, made in place."""
        leading, times = self.fill

        @functools.partial(jax.jit, donate_argnums=0)
        def fill(state, items):
            return lax.fori_loop(0, times, lambda _, state: self.add(state, items), state)

        return fill(jax.jit(self.init)(), setting.batch(*leading, seed=1))

    def td_errors(self, items: Any, batch_size: int) -> jax.Array:
        """Float32 [B], positive; stands in for the learner."""
        return jnp.mean(items["reward"].reshape(batch_size, -1), axis=1)


def jaxreplay(setting: Setting, sampler: Any = None, mesh: jax.sharding.Mesh | None = None) -> Buffer:
    """The buffer itself; with a mesh, `Sharded`."""
    if sampler is None:
        sampler = jr.Prioritized(alpha=ALPHA, beta=BETA)
    buffer = jr.ReplayBuffer(capacity=setting.capacity, sampler=sampler)
    return _jaxreplay(setting, buffer, (setting.num_added,), setting.fill(), mesh)


def jaxreplay_sequences(setting: Setting, mesh: jax.sharding.Mesh | None = None) -> Buffer:
    buffer = jr.SequenceBuffer(
        length=setting.capacity // setting.num_added * SEQUENCE_PERIOD,
        num_envs=setting.num_added,
        sequence_length=SEQUENCE_LENGTH,
        stride=SEQUENCE_PERIOD,
        sampler=jr.Prioritized(alpha=ALPHA, beta=BETA),
    )
    added = (SEQUENCE_PERIOD, setting.num_added)
    return _jaxreplay(setting, buffer, added, (added, setting.capacity // setting.num_added), mesh)


def _jaxreplay(
    setting: Setting,
    buffer: Any,
    added: tuple[int, ...],
    fill: tuple[tuple[int, ...], int],
    mesh: jax.sharding.Mesh | None,
) -> Buffer:
    shardings = None
    if mesh is not None:
        buffer = jr.Sharded(buffer=buffer, mesh=mesh)
        shardings = buffer.items_sharding, buffer.state_sharding

    def sample(state, key):
        sample = buffer.sample(state, key, setting.batch_size)
        return state, sample.items, sample.indices, sample.weights

    example = (1,) * len(added[:-1]) + added[-1:]
    return Buffer(
        init=lambda: buffer.init(setting.batch(*example)),
        add=buffer.add,
        sample=sample,
        update=buffer.update,
        added=added,
        fill=fill,
        shardings=shardings,
    )


def flashbax_device() -> str:
    return {"cpu": "cpu", "tpu": "tpu"}.get(jax.default_backend(), "gpu")


def _flashbax(setting: Setting, buffer: Any, **kwargs: Any) -> Buffer:
    """A flashbax buffer; where it is prioritised, weights are computed from its probabilities."""

    def sample(state, key):
        sample = buffer.sample(state, key)
        if not hasattr(sample, "probabilities"):
            return state, sample.experience, None, jnp.ones(setting.batch_size)
        weights = jr.importance_weights(sample.probabilities, setting.capacity, BETA)
        return state, sample.experience, sample.indices, weights

    def update(state, handles, td_errors):
        return state if handles is None else buffer.set_priorities(state, handles, td_errors + 1e-6)

    return Buffer(
        init=lambda: buffer.init(jax.tree.map(lambda x: jnp.asarray(x)[0], setting.batch(1))),
        add=buffer.add,
        sample=sample,
        update=update,
        **kwargs,
    )


def flashbax_item_buffer(capacity: int, batch_size: int, uniform: bool = False, device: str | None = None) -> Any:
    """flashbax's item buffer itself."""
    import flashbax

    sizes = {"max_length": capacity, "min_length": 1, "sample_batch_size": batch_size, "add_batches": True}
    if uniform:
        return flashbax.make_item_buffer(**sizes)
    device = device or flashbax_device()
    return flashbax.make_prioritised_item_buffer(**sizes, priority_exponent=ALPHA, device=device)


def flashbax_trajectory_buffer(
    num_envs: int, batch_size: int, length: int, sequence_length: int, period: int = 1, alpha: float | None = None
) -> Any:
    """flashbax's trajectory buffer itself, prioritised if there is an alpha."""
    import flashbax

    sizes = {
        "add_batch_size": num_envs,
        "sample_batch_size": batch_size,
        "sample_sequence_length": sequence_length,
        "period": period,
        "min_length_time_axis": sequence_length,
        "max_length_time_axis": length,
    }
    if alpha is None:
        return flashbax.make_trajectory_buffer(**sizes)
    device = flashbax_device()
    return flashbax.make_prioritised_trajectory_buffer(**sizes, priority_exponent=alpha, device=device)


def flashbax_item(setting: Setting, uniform: bool = False) -> Buffer:
    buffer = flashbax_item_buffer(setting.capacity, setting.batch_size, uniform)
    return _flashbax(setting, buffer, added=(setting.num_added,), fill=setting.fill())


def flashbax_trajectory(setting: Setting) -> Buffer:
    streams = setting.capacity // setting.num_added
    sizes = setting.num_added, setting.batch_size, streams * SEQUENCE_PERIOD, SEQUENCE_LENGTH, SEQUENCE_PERIOD
    added = (setting.num_added, SEQUENCE_PERIOD)
    return _flashbax(setting, flashbax_trajectory_buffer(*sizes, alpha=ALPHA), added=added, fill=(added, streams))


def brax_uniform(setting: Setting) -> Buffer:
    from brax.training.replay_buffers import UniformSamplingQueue

    item = jax.tree.map(lambda x: jnp.asarray(x)[0], setting.batch(1))
    queue = UniformSamplingQueue(setting.capacity, item, setting.batch_size)

    def sample(state, key):
        state, items = queue.sample_internal(state)
        return state, items, None, jnp.ones(setting.batch_size)

    init = functools.partial(queue.init, jax.random.key(0))
    added, fill = (setting.num_added,), setting.fill()
    return Buffer(init, queue.insert_internal, sample, lambda state, *_: state, added, fill)


def cumulative_sums(setting: Setting) -> Buffer:
    """No tree: a draw makes the cumulative sum of all priorities, and searches it."""

    def add(state, items):
        storage, priorities, cursor = state
        at = (cursor + jnp.arange(items["reward"].size)) % setting.capacity
        storage = jax.tree.map(lambda x, new: x.at[at].set(new), storage, items)
        return storage, priorities.at[at].set(1.0), (cursor + at.size) % setting.capacity

    def sample(state, key):
        sums = jnp.cumsum(state[1])
        strata = jnp.arange(setting.batch_size) + jax.random.uniform(key, (setting.batch_size,))
        slots = jnp.searchsorted(sums, strata * (sums[-1] / setting.batch_size), side="right")
        slots = jnp.minimum(slots, setting.capacity - 1)
        weights = jr.importance_weights(state[1][slots] / sums[-1], setting.capacity, BETA)
        return state, jax.tree.map(lambda x: x[slots], state[0]), slots, weights

    def update(state, slots, td_errors):
        return state[0], state[1].at[slots].set((td_errors + 1e-6) ** ALPHA), state[2]

    def init():
        return zeros_of(setting.batch(setting.capacity)), jnp.zeros(setting.capacity), jnp.int32(0)

    return Buffer(init, add, sample, update, (setting.num_added,), setting.fill())


def many(state: Any, setting: Setting) -> Any:
    """`setting.seeds` states if more than one."""
    if setting.seeds == 1:
        return state
    return jax.tree.map(lambda x: jnp.repeat(x[None], setting.seeds, axis=0), state)


def whole_step(buffer: Buffer, setting: Setting, ordered: bool = False) -> Callable:
    """`step(carry, key)`: add E, sample B with weights, gather, update; vmapped if there are seeds.

    The gathered batch and its weights stay in the carry: they are written once a step, as a learner would have them,
    and cannot be optimised away. What is added comes from memory too. TD errors depend on the items alone, as those of
    an agent do. With `ordered` they depend on the weights too, so that the tree is read before it is written.
    """

    def step(state, added, key):
        state = buffer.add(state, added)
        state, items, handles, weights = buffer.sample(state, key)
        td_errors = buffer.td_errors(items, setting.batch_size)
        td_errors = td_errors * weights if ordered else td_errors
        return buffer.update(state, handles, td_errors), (items, weights)

    def carry_step(carry, key):
        state, added, _ = carry
        if setting.seeds > 1:
            state, drawn = jax.vmap(step, (0, None, 0))(state, added, jax.random.split(key, setting.seeds))
        else:
            state, drawn = step(state, added, key)
        return state, added, drawn

    return carry_step


def scan_program(make: Callable[[Setting], Buffer], setting: Setting, ordered: bool = False) -> ScanProgram:
    """A `whole_step` of a full buffer in a scan."""
    buffer = make(setting)
    step = whole_step(buffer, setting, ordered)
    state = jax.jit(lambda state: many(state, setting))(buffer.full(setting))
    added = jax.tree.map(jnp.asarray, setting.batch(*buffer.added))
    drawn = zeros_of(jax.eval_shape(step, (state, added, None), jax.random.key(0))[2])
    if buffer.shardings:
        added, drawn = jax.device_put((added, drawn), buffer.shardings)
    return ScanProgram(step, (state, added, drawn))


def zeros_of(spec: Any) -> Any:
    return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), spec)


def eager_program(make: Callable[[Setting], Buffer], setting: Setting, jitted: bool) -> LoopProgram:
    """The four calls from Python, waiting for the device once a step; `jitted` wraps those of a plain library."""
    buffer = make(setting)
    add, sample, update = buffer.add, buffer.sample, buffer.update
    if jitted:
        add, update = jax.jit(add, donate_argnums=0), jax.jit(update, donate_argnums=0)
        sample = jax.jit(lambda state, key: buffer.sample(state, key)[1:])
    learn = jax.jit(lambda items: buffer.td_errors(items, setting.batch_size))
    keys = iter(jax.random.split(jax.random.key(0), 100_000))
    state, added = buffer.full(setting), setting.batch(*buffer.added)

    def step():
        nonlocal state
        state = add(state, added)
        items, handles, _ = sample(state, next(keys))[-3:]
        state = jax.block_until_ready(update(state, handles, learn(items)))

    return LoopProgram(step)
