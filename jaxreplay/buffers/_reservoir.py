"""ReservoirBuffer: a uniform sample of all items ever added.

**Distribution.** Vitter 1985 (Random Sampling with a Reservoir, algorithm R): the first `capacity` items fill slots in
order. After that the k-th item draws j, uniform in [0, k), and takes slot j if it exists. A batch draws the j of all
its rows at once; if several rows draw the same slot, the last one gets it. Rows added one by one leave the same items.

**Precision.** The number of items has 64 bits and saturates at 2^64 - 1. j is k times a fraction of 64 random bits. So
each slot is drawn with a probability that differs from 1 / k by at most 2^-64. After 10^12 items that is a relative
error of 2^-24.

**Handles.** The items of a slot have the handles slot, slot + capacity, slot + 2 * capacity, ... modulo the period of
a ring (`jaxreplay._common.ring`). An old handle names a later item only after its slot was overwritten period /
capacity times, which is at least 10^9 / capacity. While N items are added, a slot is overwritten ln(N / capacity) times
on average. With a capacity of 2^24 that is 28 times in 2^64 items, and 96 handles in a row differ (48 in a mixture of
two); so up to there no handle names another item. After `clear` items fill slots from the next empty one on, not from
slot 0, so that all slots are overwritten equally often.
"""

from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import struct

from jaxreplay._common import calls, checks, layouts, random, ring, xla
from jaxreplay.buffers._replay import ItemBuffer
from jaxreplay.buffers._state import State


@struct.dataclass(kw_only=True)
class ReservoirState(State):
    """State of a `ReservoirBuffer`.

    Attributes:
      storage: the items, leaves [capacity, ...] as the backend wants them (`jaxreplay._common.layouts`).
      ring: the fill: `size` slots hold an item, and the next empty one is `inserted` modulo the capacity.
      sampler: the sampler's state.
      uses: of the items (`jaxreplay.buffers._uses`); None without `count_updates` and `max_uses`.
      handles: int32 [capacity], the last handle of each slot; -1 if it never had one. Slots out of `ring.live()` are
        empty.
      count: uint32 [2], number of items ever added: `count[0] * 2**32 + count[1]`; saturates at `2**64 - 1`.

    Examples:
      >>> reservoir = jr.ReservoirBuffer(capacity=4)
      >>> reservoir.add(reservoir.init(items), items, key).count.tolist()
      [0, 3]
    """

    handles: jax.Array  # [capacity]
    count: jax.Array  # [2]


@checks.config
class ReservoirBuffer(ItemBuffer[ReservoirState]):
    """Keeps a uniform sample, without replacement, of all items ever added (Vitter 1985, algorithm R).

    Each of N items is stored with probability min(1, capacity / N), and each set of `capacity` items with the same
    probability. It remembers the whole run, while a `ReplayBuffer` keeps the newest items. Fictitious self-play learns
    an average policy from it (Heinrich and Silver 2016, arXiv:1603.01121, section 3). An item's slot says nothing about
    its age.

    Configuration, state, donation and errors are as for `ReplayBuffer`.

    `Sharded` cuts it into reservoirs of equal capacity, each a sample of its own items. With masks, shards may have
    seen different numbers of items. A reservoir keeps no order: `Sample.age` is -1, and `sample` takes no `max_age`.
    `migrate` does not take it.

    Attributes:
      capacity: number of items kept, 1 to 2**29.
      sampler: the sampling distribution over stored items, `Uniform()` or `Prioritized(...)`.
      count_updates, max_uses, donate: as for `ReplayBuffer`.

    Examples:
      >>> reservoir = jr.ReservoirBuffer(capacity=4)
      >>> state = reservoir.init(items)
      >>> for number, new_key in enumerate(jax.random.split(key, 50)):
      ...     state = reservoir.add(state, items + 100 * number, new_key)
      >>> # A ring would hold the last four.
      >>> max(reservoir.get(state, reservoir.handles(state, np.arange(4))).tolist()) < 4900
      True
    """

    _state_kind: ClassVar[type] = ReservoirState
    _keeps_order: ClassVar[bool] = False

    def _empty(self, spec: Any) -> Any:
        handles, count = xla.full((self.capacity,), -1, jnp.int32), xla.full((2,), 0, jnp.uint32)
        return super()._empty(spec) | {"handles": handles, "count": count}

    @calls.method(rows=("items", "mask", "td_errors"), is_batch=True, donates=True)
    def add(
        self,
        state: ReservoirState,
        items: Any,
        key: jax.Array,
        *,
        mask: jax.Array | None = None,
        td_errors: jax.Array | None = None,
    ) -> ReservoirState:
        """Add a batch; any part of it may be stored.

        Args:
          state: donated when called eagerly (see the class).
          items: pytree [B, ...] with the structure, item shapes and dtypes given to `init`; 1 <= B <= 2**29; B may
            exceed the capacity.
          key: a PRNG key, a new one for each call: it chooses the items that are stored, and their slots.
          mask: bool [B], True for rows to add and count; None for all. Rows of a `TransitionBatch` that are not `valid`
            are not added either.
          td_errors: as in `ReplayBuffer.add`.


        Examples:
          >>> reservoir = jr.ReservoirBuffer(capacity=2)
          >>> state = reservoir.add(reservoir.init(items), items, key)  # a new key for each call
          >>> int(reservoir.size(state)), state.count.tolist()  # stored, and ever added
          (2, [0, 3])
        """
        most, rule = ring.MAX_CAPACITY, f"{ring.MAX_CAPACITY}; to add none, mask all rows"
        items, batch_size, mask, td_errors = self._check_batch(state, items, mask, td_errors, most, rule)
        key = self._own_key(key)
        number = jnp.arange(1, batch_size + 1, dtype=jnp.int32) if mask is None else jnp.cumsum(mask, dtype=jnp.int32)
        fill = state.ring.after(items)
        slots = _draw_slots(fill, state.count, number, key)
        handles, slots = self._claim(state, slots if mask is None else jnp.where(mask, slots, self.capacity))
        return ReservoirState(
            storage=layouts.write(state.storage, slots, items),
            ring=fill.advance(jnp.minimum(number[-1], self.capacity - fill.size)),
            **self._insert(state, slots, jnp.ones(batch_size, bool), td_errors),
            handles=handles,
            count=jnp.stack(_plus(state.count, number[-1])),
        )

    def _claim(self, state: ReservoirState, slots: jax.Array) -> tuple[jax.Array, jax.Array]:
        """All handles, with new ones in `slots` [B]; and `slots`, `capacity` for a row whose slot a later row takes.

        The handles to be overwritten serve as scratch space. Each row writes a number below all handles, lower for
        later rows, by a minimum, which gives one result in any order.
        """
        old = state.handles.at[slots].get(mode="fill", fill_value=-1, wrap_negative_indices=False)
        new = jnp.where(old < 0, slots, old + self.capacity)
        new = jnp.where(new < state.ring.period, new, slots)
        # The use of `old` orders its read before this write; otherwise XLA would copy the handles.
        number = jnp.minimum(old, -2 - jnp.arange(slots.size, dtype=jnp.int32))
        scratch = state.handles.at[slots].min(number, mode="drop", wrap_negative_indices=False)
        lowest = scratch.at[slots].get(mode="fill", wrap_negative_indices=False)
        slots = jnp.where(lowest == number, slots, self.capacity)
        handles = scratch.at[slots].set(new, mode="drop", unique_indices=True, wrap_negative_indices=False)
        return handles, slots

    def _own_handles(self, state: ReservoirState, slots: jax.Array) -> jax.Array:
        handles = xla.read_once(state.handles.at[slots].get(mode="promise_in_bounds", wrap_negative_indices=False))
        # `clear` keeps the handles of what was there.
        handles = jnp.where(state.ring.ages(slots) < state.ring.size, handles, -1)
        return jax.lax.rem(handles, jnp.int32(state.ring.period))  # -1 stays

    def _emptied(self, state: ReservoirState) -> dict[str, Any]:
        return super()._emptied(state) | {"count": jnp.minimum(state.count, 0)}

    def _own_slots(self, state: ReservoirState, handles: jax.Array) -> jax.Array:
        slots = jax.lax.rem(jnp.maximum(handles, 0), jnp.int32(self.capacity))
        return jnp.where((handles >= 0) & (self._own_handles(state, slots) == handles), slots, self.capacity)

    def _ages(self, state: ReservoirState, slots: jax.Array) -> jax.Array:
        return jnp.full(slots.shape, -1, jnp.int32)

    def _read(self, state: ReservoirState, slots: jax.Array, fill: bool) -> tuple[Any, None]:
        if not fill:
            # Orders the read of the handles before any use of the items; otherwise XLA would copy the handles for an
            # `add` that follows.
            slots = xla.after(slots, self._own_handles(state, slots))
        return layouts.read(state.storage, slots, fill=fill), None


def _draw_slots(fill: ring.Ring, count: jax.Array, number: jax.Array, key: jax.Array) -> jax.Array:
    """Slots that algorithm R gives new items, int32 [B]; `capacity` for an item that is not stored.

    Args:
      fill: the ring before.
      count: uint32 [2], number of items ever added before.
      number: int32 [B], number of each new item, from 1.
      key: a PRNG key.
    """
    upper, lower = random.random_integers64(random.random_bits(key, number.size), _plus(count, number))
    drawn = jnp.where((upper == 0) & (lower < fill.capacity), lower, fill.capacity).astype(jnp.int32)
    next_empty = ring.wrap_excess(fill.inserted % fill.capacity + number - 1, fill.capacity)
    return jnp.where(fill.size + number - 1 < fill.capacity, next_empty, drawn)


def _plus(count: jax.Array, more: jax.Array) -> tuple[jax.Array, jax.Array]:
    """`count` (uint32 [2]) + `more` (int32 [...], not negative), as two uint32 [...]; saturates at 2^64 - 1."""
    lower = count[1] + more.astype(jnp.uint32)
    upper = count[0] + (lower < count[1]).astype(jnp.uint32)
    too_large = upper < count[0]
    most = jnp.uint32(2**32 - 1)
    return jnp.where(too_large, most, upper), jnp.where(too_large, most, lower)
