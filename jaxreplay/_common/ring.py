"""Arithmetic of a ring of slots: write position, live range and handles.

Insertions are numbered 0, 1, 2, ... modulo the ring's period, the largest multiple of the capacity that leaves room
for int32 sums. The number is the item's handle. The period is a multiple of the capacity, so `handle % capacity` is the
slot even after the numbers wrap. A handle is reused only after `period` insertions, at least 10^9. The shards of a
buffer share the int32 range: their periods are shorter, and the handles of ring k start at k * period.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import struct
from jax import lax

from jaxreplay._common import xla

MAX_CAPACITY = 2**29


@struct.dataclass
class Ring:
    """Cursor and fill of a ring.

    Attributes:
      inserted: int32 [], handle of the next insertion.
      size: int32 [], number of filled slots.
      period: number of distinct handles (static).
    """

    inserted: jax.Array  # []
    size: jax.Array  # []
    period: int = struct.field(pytree_node=False)


class Live(NamedTuple):
    """Slots that may be drawn: `size` slots from `start` on, modulo the capacity.

    Attributes:
      start: int32 [], the first slot.
      size: int32 [], number of slots.
      older: int32 [], number of slots that `max_age` leaves out, which hold older items. Only set for a sampler with
        `by_age` (see `jaxreplay.samplers._protocol`).
      unspent: with a buffer's `max_uses` a sum tree, leaf 1 for each slot that may be drawn. `size` counts them; other
        slots of the range may not be drawn.

    Examples:
      >>> live = jr.samplers.Live(start=jnp.int32(3), size=jnp.int32(2))
      >>> live.slots(jnp.array([0, 1]), capacity=4).tolist()
      [3, 0]
    """

    start: jax.Array
    size: jax.Array
    older: jax.Array | int = 0
    unspent: Any = None

    def slots(self, positions: jax.Array, capacity: int) -> jax.Array:
        """Slots at `positions` (int32 [B], in [0, size)) of this range, int32 [B].

        Examples:
          >>> live = jr.samplers.Live(start=jnp.int32(0), size=jnp.int32(4))
          >>> live.slots(jnp.array([2]), capacity=4).tolist()
          [2]
        """
        return wrap_excess(self.start + positions, capacity)


def wrap_negative(x: jax.Array, n: int) -> jax.Array:
    """`x` modulo `n` for int32 `x` in [-n, n); a comparison costs less than a division."""
    return jnp.where(x < 0, x + n, x)


def wrap_excess(x: jax.Array, n: int) -> jax.Array:
    """`x` modulo `n` for int32 `x` in [0, 2 n)."""
    return jnp.where(x >= n, x - n, x)


def init(capacity: int, num_rings: int = 1) -> Ring:
    """An empty ring, one of `num_rings` rings with distinct handles."""
    period = (2**31 - 1 - capacity) // num_rings // capacity * capacity
    return Ring(inserted=xla.full((), 0, jnp.int32), size=xla.full((), 0, jnp.int32), period=period)


def first_handle(ring: Ring, axis_name: str | None) -> jax.Array | int:
    """First handle of this shard's ring, one of the rings along a mapped axis; 0 without shards."""
    return 0 if axis_name is None else lax.axis_index(axis_name) * ring.period


def num_shards(axis_name: str | None) -> int:
    """Number of shards along a mapped axis; 1 without one."""
    return 1 if axis_name is None else lax.axis_size(axis_name)


def reduced(collective: Callable[..., Any], x: Any, axis_name: str | None) -> Any:
    """x reduced over all shards by a collective such as `lax.psum`."""
    return x if axis_name is None else collective(x, axis_name)


def after(ring: Ring, *others: Any) -> Ring:
    """The same ring; writes to its slots are ordered after all reads that `others` depend on."""
    return dataclasses.replace(ring, inserted=xla.after(ring.inserted, *others))


def live(ring: Ring) -> Live:
    """All stored slots."""
    return Live(start=jnp.zeros_like(ring.size), size=ring.size)


def newest(ring: Ring, count: jax.Array, capacity: int) -> Live:
    """Slots of the newest `count` insertions (int32 [], clipped to [0, size])."""
    size = jnp.clip(count, 0, ring.size)
    return Live(start=wrap_negative(ring.inserted % capacity - size, capacity), size=size)


def next_slots(ring: Ring, mask: jax.Array | None, batch_size: int, capacity: int) -> tuple[jax.Array, jax.Array]:
    """Slots for the insertion of a batch, in order.

    Returns:
      slots, int32 [B], `capacity` (out of range) where the mask is False; and the number of insertions, int32 [].
    """
    rows = jnp.arange(batch_size, dtype=jnp.int32)
    count = jnp.asarray(batch_size, jnp.int32)
    if mask is not None:
        rows = jnp.cumsum(mask, dtype=jnp.int32) - 1
        count = rows[-1] + 1
    slots = wrap_excess(ring.inserted % capacity + rows, capacity)
    return slots if mask is None else jnp.where(mask, slots, capacity), count


def advance(ring: Ring, count: jax.Array, capacity: int) -> Ring:
    """The ring after `count` insertions, at most its period."""
    room = ring.period - count
    inserted = jnp.where(ring.inserted >= room, ring.inserted - room, ring.inserted + count)
    # Otherwise a GPU computes them again from the ring before, of which it would keep a copy.
    inserted, size = xla.read_once((inserted, jnp.minimum(ring.size + count, capacity)))
    return Ring(inserted=inserted, size=size, period=ring.period)


def ages(ring: Ring, slots: jax.Array, capacity: int) -> jax.Array:
    """Ages of `slots` (int32 [B], in range): number of later insertions, int32 [B]; 0 for the newest."""
    return wrap_negative(ring.inserted % capacity - 1 - slots, capacity)


def handles(ring: Ring, slots: jax.Array, capacity: int) -> jax.Array:
    """Handles of the items in `slots` (int32 [B], in range), int32 [B]; -1 for empty slots."""
    age = ages(ring, slots, capacity)
    return jnp.where(age < ring.size, wrap_negative(ring.inserted - 1 - age, ring.period), -1)


def slots(ring: Ring, handles: jax.Array, capacity: int) -> jax.Array:
    """Slots of `handles` (int32 [B]), int32 [B]; `capacity` if the item is no longer stored."""
    age = wrap_negative(ring.inserted - 1 - handles, ring.period)
    stored = (handles >= 0) & (handles < ring.period) & (age < ring.size)
    return jnp.where(stored, wrap_negative(ring.inserted % capacity - 1 - age, capacity), capacity)


@functools.partial(jax.jit, static_argnums=1)
def at_least(count: jax.Array, bound: int) -> jax.Array:
    """`count` (int32 [...]) >= `bound`; `bound` is static, so it is not transferred at each call."""
    return count >= bound


def saturating_add(count: jax.Array, more: jax.Array | int) -> jax.Array:
    """min(`count` + `more`, 2**31 - 1) of non-negative int32 numbers."""
    return count + jnp.minimum(more, 2**31 - 1 - count)
