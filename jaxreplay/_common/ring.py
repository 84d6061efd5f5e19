"""Arithmetic of a ring of slots: write position, live range and handles.

Insertions are numbered 0, 1, 2, ... modulo the ring's period, the largest multiple of the capacity by 2^j or 3 * 2^j
that leaves room for int32 sums. The number is the item's handle. The period is a multiple of the capacity, so `handle %
capacity` is the slot even after the numbers wrap. A handle is reused only after `period` insertions, at least 10^9. The
shards of a buffer share the int32 range: their periods are shorter, and the handles of ring k start at k * period.
Sources of a mixture share it too: `Ring.named` makes their handles, modulo a divisor of the period.
"""

import dataclasses
import functools
from typing import Any, Self

import jax
import jax.numpy as jnp
from flax import struct

from jaxreplay._common import shown, xla

MAX_CAPACITY = 2**29


@struct.dataclass
class Live(shown.Shown):
    """Slots that may be drawn: `size` slots from `start` on, modulo the capacity.

    Attributes:
      start: int32 [], the first slot.
      size: int32 [], number of slots.
      unspent: with a buffer's `max_uses` a sum tree, leaf 1 for each slot that may be drawn. `size` counts them; other
        slots of the range may not be drawn.
      capacity: number of all slots (static).
      axis_name: mapped axis over D shards (static); None without shards. An item's probability in the whole batch is
        1/D of its probability in its shard.

    Examples:
      >>> live = jr.samplers.Live(start=jnp.int32(3), size=jnp.int32(2), capacity=4)
      >>> live.slots(np.array([0, 1])).tolist()
      [3, 0]
    """

    start: jax.Array
    size: jax.Array
    unspent: Any = None
    capacity: int = struct.field(pytree_node=False, kw_only=True)
    axis_name: str | None = struct.field(pytree_node=False, kw_only=True, default=None)

    def total(self) -> jax.Array:
        """Number of slots of all shards that may be drawn, int32 [].

        Examples:
          >>> int(state.ring.live().total())
          3
        """
        return self.size if self.axis_name is None else jax.lax.psum(self.size, self.axis_name)

    def slots(self, positions: jax.Array) -> jax.Array:
        """Slots at `positions` (int32 [B], in [0, size)) of this range, int32 [B].

        Examples:
          >>> state.ring.live().slots(np.array([2])).tolist()
          [2]
        """
        return wrap_excess(self.start + positions, self.capacity)


@struct.dataclass
class Ring(shown.Shown):
    """Cursor and fill of a ring of slots.

    Attributes:
      inserted: int32 [], handle of the next insertion.
      size: int32 [], number of filled slots.
      capacity: number of slots (static).
      period: number of distinct handles (static).
    """

    inserted: jax.Array  # []
    size: jax.Array  # []
    capacity: int = struct.field(pytree_node=False)
    period: int = struct.field(pytree_node=False)

    def named(self, num_names: int) -> Self:
        """The same ring with a period of at most 2^31 / `num_names`, for at most MAX_CAPACITY / `num_names` slots."""
        # It is 2^j or 3 * 2^j capacities, always more than 2, so each half is whole: handle % capacity stays the slot.
        # The result divides the old period, so it also counts on where the old numbers wrap.
        period = self.period
        while period * num_names > 2**31:
            period //= 2
        return dataclasses.replace(self, period=period)

    def after(self, *others: Any) -> Self:
        """The same ring; writes to its slots are ordered after all reads that `others` depend on."""
        return dataclasses.replace(self, inserted=xla.after(self.inserted, *others))

    def live(self) -> Live:
        """All stored slots, the oldest first."""
        return self.newest(self.size)

    def newest(self, count: jax.Array) -> Live:
        """Slots of the newest `count` insertions (int32 [], clipped to [0, size])."""
        size = jnp.clip(count, 0, self.size)
        return Live(wrap_negative(self.inserted % self.capacity - size, self.capacity), size, capacity=self.capacity)

    def next_slots(self, mask: jax.Array | None, batch_size: int) -> tuple[jax.Array, jax.Array]:
        """Slots for the insertion of a batch, in order.

        Returns:
          slots, int32 [B], the capacity (out of range) where the mask is False; and the number of insertions, int32 [].
        """
        rows = jnp.arange(batch_size, dtype=jnp.int32)
        count = jnp.asarray(batch_size, jnp.int32)
        if mask is not None:
            rows = jnp.cumsum(mask, dtype=jnp.int32) - 1
            count = rows[-1] + 1
        slots = wrap_excess(self.inserted % self.capacity + rows, self.capacity)
        return slots if mask is None else jnp.where(mask, slots, self.capacity), count

    def advance(self, count: jax.Array) -> Self:
        """The ring after `count` insertions, at most its period."""
        room = self.period - count
        inserted = jnp.where(self.inserted >= room, self.inserted - room, self.inserted + count)
        # Otherwise a GPU computes them again from the ring before, of which it would keep a copy.
        inserted, size = xla.read_once((inserted, jnp.minimum(self.size + count, self.capacity)))
        return dataclasses.replace(self, inserted=inserted, size=size)

    def emptied(self) -> Self:
        """The ring without items; the next one has the handle that it would have had."""
        # Not a constant, which an eager `jax.vmap` would not map, so that the donated size would have no use.
        return dataclasses.replace(self, size=jnp.minimum(self.size, 0))

    def ages(self, slots: jax.Array) -> jax.Array:
        """Ages of `slots` (int32 [B], in range): number of later insertions, int32 [B]; 0 for the newest."""
        return wrap_negative(self.inserted % self.capacity - 1 - slots, self.capacity)

    def handles(self, slots: jax.Array) -> jax.Array:
        """Handles of the items in `slots` (int32 [B], in range), int32 [B]; -1 if empty."""
        age = self.ages(slots)
        handles = wrap_negative(self.inserted % self.period - 1 - age, self.period)
        return jnp.where(age < self.size, handles, -1)

    def slots(self, handles: jax.Array) -> jax.Array:
        """Slots of `handles` (int32 [B]), int32 [B]; the capacity if the item is not stored."""
        age = wrap_negative(self.inserted % self.period - 1 - handles, self.period)
        stored = (handles >= 0) & (handles < self.period) & (age < self.size)
        return jnp.where(stored, wrap_negative(self.inserted % self.capacity - 1 - age, self.capacity), self.capacity)


def wrap_negative(x: jax.Array, n: int) -> jax.Array:
    """`x` modulo `n` for int32 `x` in [-n, n); a comparison costs less than a division."""
    return jnp.where(x < 0, x + n, x)


def wrap_excess(x: jax.Array, n: int) -> jax.Array:
    """`x` modulo `n` for int32 `x` in [0, 2 n)."""
    return jnp.where(x >= n, x - n, x)


def init(capacity: int, num_rings: int = 1) -> Ring:
    """An empty ring, one of `num_rings` rings with distinct handles."""
    most = (2**31 - 1 - capacity) // num_rings // capacity
    power = 1 << most.bit_length() - 1
    period = capacity * max(x for x in (power, power // 2 * 3) if x <= most)
    return Ring(inserted=xla.full((), 0, jnp.int32), size=xla.full((), 0, jnp.int32), capacity=capacity, period=period)


def num_shards(axis_name: str | None) -> int:
    """Number of shards along a mapped axis; 1 without one."""
    return 1 if axis_name is None else jax.lax.axis_size(axis_name)


@functools.partial(jax.jit, static_argnums=1)
def at_least(count: jax.Array, bound: int) -> jax.Array:
    """`count` (int32 [...]) >= `bound`; `bound` is static, so it is not transferred at each call."""
    return count >= bound


def saturating_add(count: jax.Array, more: jax.Array | int) -> jax.Array:
    """min(`count` + `more`, 2**31 - 1) of non-negative int32 numbers."""
    return count + jnp.minimum(more, 2**31 - 1 - count)
