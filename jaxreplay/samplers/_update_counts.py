"""UpdateCounts: number of updates of each item, and of updates that came too late.

`sample` leaves the state unchanged, so draws cannot be counted. `update` is counted instead: once per row of the batch,
even if the row's TD error is rejected.
"""

import dataclasses

import jax
import jax.numpy as jnp
from flax import struct

from jaxreplay._common.ring import saturating_add

MOST = 2**30  # a count grows beyond this by less than one batch


@struct.dataclass
class UpdateCounts:
    """Counts of a sampler with `count_updates=True`.

    Attributes:
      of_slots: int32 [capacity], update rows since the item in each slot was inserted; saturates after 2**30.
      late: int32 [], update rows ignored because their item was no longer stored; saturates at 2**31 - 1.
    """

    of_slots: jax.Array  # [capacity]
    late: jax.Array  # []


def init(capacity: int) -> UpdateCounts:
    return UpdateCounts(of_slots=jnp.zeros(capacity, jnp.int32), late=jnp.zeros((), jnp.int32))


def insert(counts: UpdateCounts | None, slots: jax.Array) -> UpdateCounts | None:
    """Counts after writes to `slots` (int32 [B], distinct where in range)."""
    if counts is None:
        return None
    of_slots = counts.of_slots.at[slots].set(0, mode="drop", unique_indices=True, wrap_negative_indices=False)
    return dataclasses.replace(counts, of_slots=of_slots)


def update(counts: UpdateCounts | None, slots: jax.Array) -> UpdateCounts | None:
    """Counts after an update of `slots` (int32 [B]): -1 for a row without an item, the capacity for a late row.

    Repeated items are counted once per row.
    """
    if counts is None:
        return None
    capacity = counts.of_slots.shape[0]
    late = jnp.sum(slots >= capacity, dtype=jnp.int32)
    inside = (slots >= 0) & (slots < capacity)
    before = counts.of_slots.at[jnp.where(inside, slots, 0)].get(mode="promise_in_bounds", wrap_negative_indices=False)
    more = (before < MOST).astype(jnp.int32)
    target = jnp.where(inside, slots, capacity)
    return UpdateCounts(
        of_slots=counts.of_slots.at[target].add(more, mode="drop", wrap_negative_indices=False),
        late=saturating_add(counts.late, late),
    )
