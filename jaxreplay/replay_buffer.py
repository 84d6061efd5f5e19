"""ReplayBuffer: a ring of independent items."""

import dataclasses
from typing import Any

import jax
import jax.core
import jax.numpy as jnp
from flax import struct

from jaxreplay import _items, ring
from jaxreplay._arguments import check_integer
from jaxreplay._xla import materialize
from jaxreplay.samplers import Sampler, Uniform
from jaxreplay.transition_batch import TransitionBatch


@struct.dataclass
class ReplayState:
    """State of a `ReplayBuffer`.

    Attributes:
      storage: the items, leaves [capacity, ...] (narrow floats as their bits, see `jaxreplay._items.Bits`).
      ring: cursor and fill.
      sampler: the sampler's state.
    """

    storage: Any  # [capacity, ...]
    ring: ring.Ring
    sampler: Any


@struct.dataclass
class Sample:
    """A batch of draws.

    Attributes:
      items: leaves [batch, ...].
      indices: int32 [batch], the items' handles, to be given back to `update`; -1 where the buffer was empty.
      probabilities: float32 [batch], with which each item was drawn; 0 where the buffer was empty.
      weights: float32 [batch], importance-sampling weights; 0 where the buffer was empty.
    """

    items: Any  # [batch, ...]
    indices: jax.Array  # [batch]
    probabilities: jax.Array  # [batch]
    weights: jax.Array  # [batch]


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReplayBuffer:
    """Replay of independent items; the oldest is overwritten first.

    The configuration is static and hashable; all arrays live in the `ReplayState` that the methods take and return.
    Called eagerly, `add` and `update` donate the state they are given: the storage is changed in place and the old
    state must not be used again. Inside an outer `jax.jit` they are plain pure functions.

    Attributes:
      capacity: number of items kept, 1 to 2**29.
      sampler: the law of the draw, `Uniform()` or `Prioritized(...)`.
      donate: donate the state when `add` or `update` is called eagerly.
    """

    capacity: int
    sampler: Sampler = Uniform()
    donate: bool = True

    def __post_init__(self):
        check_integer("capacity", self.capacity, 1, ring.MAX_CAPACITY, "the number of items kept")

    def init(self, items: Any) -> ReplayState:
        """An empty buffer for items like these.

        Args:
          items: pytree [B, ...] of arrays or `jax.ShapeDtypeStruct`, as `add` will take them; values are ignored.

        Raises:
          ValueError: no leaves, or leaves whose batch axes differ.
        """
        spec = _items.as_spec(items)
        _items.leading_axes(spec, 1, "a batch of items")
        return ReplayState(
            storage=_items.zeros(spec, (self.capacity,), 1),
            ring=ring.init(),
            sampler=self.sampler.init(self.capacity),
        )

    def add(self, state: ReplayState, items: Any, mask: jax.Array | None = None) -> ReplayState:
        """Insert a batch in order, overwriting the oldest items once the buffer is full.

        Args:
          state: donated when called eagerly (see the class).
          items: pytree [B, ...] with the structure, item shapes and dtypes given to `init`; 1 <= B <= capacity.
          mask: bool [B]; only rows where it is True are inserted.

        Raises:
          ValueError: wrong structure, shape, dtype or batch size; the message names the leaf.
        """
        return (_add_donating if self.donate else _add)(self, state, items, mask)

    def sample(self, state: ReplayState, key: jax.Array, batch_size: int, beta: Any = None) -> Sample:
        """Draw items with replacement.

        Where the items are a `TransitionBatch`, its `W` is multiplied by the weights (or is the weights, if it was
        None) and its `idx` is the handles.

        Args:
          state: unchanged.
          key: a PRNG key.
          batch_size: number of draws.
          beta: exponent of the importance weights, instead of the sampler's; a float, or a traced float [].

        Raises:
          ValueError: `batch_size` is not a positive integer; or the buffer is empty and the call is eager (which waits
            for the buffer's size; under `jit` an empty buffer gives weights and probabilities 0 and indices -1).
        """
        check_integer("batch_size", batch_size, 1, ring.MAX_CAPACITY, "the number of draws")
        drawn = _sample(self, state, key, batch_size, beta)
        size = state.ring.size  # read after the draw is under way, so that it need not wait for this
        if not isinstance(size, jax.core.Tracer) and int(size) == 0:
            raise ValueError("cannot sample from an empty buffer; add items first (see can_sample).")
        return drawn

    def update(self, state: ReplayState, indices: jax.Array, td_errors: jax.Array) -> ReplayState:
        """Tell the sampler the TD errors of items that were drawn. `Uniform` ignores them.

        Args:
          state: donated when called eagerly (see the class).
          indices: int [B], handles from `Sample.indices`. One whose item has been overwritten since is ignored. Of a
            handle that occurs more than once the last occurrence counts.
          td_errors: float [B], signed or not.

        Raises:
          ValueError: shapes or dtypes other than these.
        """
        return (_update_donating if self.donate else _update)(self, state, indices, td_errors)

    def get(self, state: ReplayState, indices: jax.Array) -> Any:
        """Items [B, ...] named by the handles `indices` (int [B]); zeros for items no longer stored.

        Raises:
          ValueError: `indices` is not a vector of integers.
        """
        return _get(self, state, indices)

    def size(self, state: ReplayState) -> jax.Array:
        """Number of items stored, int32 []."""
        return state.ring.size

    def is_empty(self, state: ReplayState) -> jax.Array:
        """Whether nothing is stored, bool []."""
        return state.ring.size == 0

    def is_full(self, state: ReplayState) -> jax.Array:
        """Whether the next insertion overwrites, bool []."""
        return state.ring.size == self.capacity

    def can_sample(self, state: ReplayState, batch_size: int = 1) -> jax.Array:
        """Whether at least `batch_size` items are stored, bool []."""
        return state.ring.size >= batch_size


def _check_state(buffer: ReplayBuffer, state: ReplayState) -> None:
    found = jax.tree.leaves(state.storage)[0].shape[0]
    if state.ring.size.shape != () or found != buffer.capacity:
        raise ValueError(
            f"capacity={buffer.capacity}: this state has a leading axis of {found}; use the buffer that made it, "
            "and jax.vmap for a stack of states."
        )


def _check_indices(indices: Any) -> jax.Array:
    indices = jnp.asarray(indices)
    if indices.ndim != 1 or not jnp.issubdtype(indices.dtype, jnp.integer):
        raise ValueError(
            f"indices: got {_items.describe(indices.dtype, indices.shape)}, expected a vector of integers "
            "(Sample.indices)."
        )
    return indices.astype(jnp.int32)


# Arguments are checked while these are traced, so that calls of a kind seen before do not pay for it.


def _add_impl(buffer: ReplayBuffer, state: ReplayState, items: Any, mask: jax.Array | None) -> ReplayState:
    _check_state(buffer, state)
    items = _items.as_arrays(items)
    (batch_size,) = _items.leading_axes(items, 1, "a batch of items")
    _items.check_like(items, _items.stored_spec(state.storage), 1, 1, "the buffer")
    if not 1 <= batch_size <= buffer.capacity:
        raise ValueError(
            f"batch of {batch_size} items: expected 1 to capacity={buffer.capacity}; add it in parts, or raise "
            "the capacity."
        )
    if mask is not None:
        mask = _items.check_mask(mask, (batch_size,))
    slots, count = ring.next_slots(state.ring, mask, batch_size, buffer.capacity)
    return ReplayState(
        storage=_items.write(state.storage, slots, items),
        ring=ring.advance(state.ring, count, buffer.capacity),
        sampler=buffer.sampler.insert(state.sampler, slots, jnp.ones(batch_size, bool)),
    )


def _sample_impl(buffer: ReplayBuffer, state: ReplayState, key: jax.Array, batch_size: int, beta: Any) -> Sample:
    _check_state(buffer, state)
    slots, probabilities = materialize(*buffer.sampler.sample(state.sampler, key, batch_size, ring.live(state.ring)))
    weights = buffer.sampler.weights(state.sampler, probabilities, state.ring.size, beta)
    indices = ring.handles(state.ring, slots, buffer.capacity)
    items = _items.read(state.storage, slots)
    if isinstance(items, TransitionBatch):
        W = weights if items.W is None else items.W * weights
        items = dataclasses.replace(items, W=W, idx=indices)
    return Sample(items, indices, probabilities, weights)


def _update_impl(buffer: ReplayBuffer, state: ReplayState, indices: jax.Array, td_errors: jax.Array) -> ReplayState:
    _check_state(buffer, state)
    indices, td_errors = _check_indices(indices), jnp.asarray(td_errors)
    if td_errors.shape != indices.shape or not jnp.issubdtype(td_errors.dtype, jnp.number):
        raise ValueError(
            f"td_errors: got {_items.describe(td_errors.dtype, td_errors.shape)}, expected one number for each of "
            f"the {indices.shape[0]} indices."
        )
    slots = ring.slots(state.ring, indices, buffer.capacity)
    stored = slots < buffer.capacity
    sampler = buffer.sampler.update(state.sampler, slots, td_errors, stored)
    return dataclasses.replace(state, sampler=sampler)


def _get_impl(buffer: ReplayBuffer, state: ReplayState, indices: jax.Array) -> Any:
    _check_state(buffer, state)
    slots = ring.slots(state.ring, _check_indices(indices), buffer.capacity)
    return _items.read(state.storage, slots, fill=True)


# keep_unused: a leaf that is replaced without being read is donated like the others.
_add = jax.jit(_add_impl, static_argnums=0)
_add_donating = jax.jit(_add_impl, static_argnums=0, donate_argnums=1, keep_unused=True)
_sample = jax.jit(_sample_impl, static_argnums=(0, 3))
_update = jax.jit(_update_impl, static_argnums=0)
_update_donating = jax.jit(_update_impl, static_argnums=0, donate_argnums=1, keep_unused=True)
_get = jax.jit(_get_impl, static_argnums=0)
