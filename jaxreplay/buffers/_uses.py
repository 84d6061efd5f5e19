"""Uses of a buffer's items, and the items that may still be drawn.

A draw leaves the state unchanged, so uses are counted where drawn items come back, in `update`: once per row of the
batch that names the item, even if its TD error is rejected.
"""

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import struct

from jaxreplay import sum_tree
from jaxreplay._common import layouts, ring, xla
from jaxreplay.sum_tree._whole import on_backend

MOST = 2**30  # a count grows beyond this by less than one batch


@struct.dataclass
class Uses(layouts.BackendState):
    """Uses of a buffer's items, with `count_updates` or `max_uses`.

    Attributes:
      of_slots: int32 [num_slots], update rows since the item in each slot was inserted; saturates after 2**30.
      late: int32 [], update rows ignored because their item was no longer stored; saturates at 2**31 - 1.
      unspent: sum tree with leaf 1 for each slot that may be drawn; None without `max_uses`.
    """

    of_slots: jax.Array  # [num_slots]
    late: jax.Array  # []
    unspent: sum_tree.SumTree | None
    _layouts: ClassVar = {"unspent": on_backend}


def init(buffer: Any) -> Uses | None:
    if not buffer.count_updates and buffer.max_uses is None:
        return None
    unspent = None if buffer.max_uses is None else sum_tree.init(buffer._num_slots)
    return Uses(xla.full((buffer._num_slots,), 0, jnp.int32), xla.full((), 0, jnp.int32), unspent)


def insert(uses: Uses | None, slots: jax.Array, drawable: jax.Array) -> Uses | None:
    """Uses after writes to `slots` (int32 [B], distinct where in range)."""
    if uses is None:
        return None
    of_slots = uses.of_slots.at[slots].set(0, mode="drop", unique_indices=True, wrap_negative_indices=False)
    unspent = uses.unspent
    if unspent is not None:
        unspent = sum_tree.update(unspent, slots, drawable.astype(jnp.float32), unique_indices=True)
    return Uses(of_slots, uses.late, unspent)


def update(uses: Uses | None, slots: jax.Array, max_uses: int | None) -> tuple[Uses | None, jax.Array | None]:
    """Uses after an update of `slots` (int32 [B]): -1 for a row without an item, the number of slots for a late row.

    Returns:
      uses; and True for rows whose item is spent, bool [B], None without `max_uses`.
    """
    if uses is None:
        return None, None
    capacity = uses.of_slots.shape[0]
    late = jnp.sum(slots >= capacity, dtype=jnp.int32)
    inside = (slots >= 0) & (slots < capacity)
    before = uses.of_slots.at[jnp.where(inside, slots, 0)].get(mode="promise_in_bounds", wrap_negative_indices=False)
    more = (before < MOST).astype(jnp.int32)
    target = jnp.where(inside, slots, capacity)
    of_slots = uses.of_slots.at[target].add(more, mode="drop", wrap_negative_indices=False)
    unspent, spent = uses.unspent, None
    if unspent is not None and max_uses is not None:
        spent = of_slots.at[slots].get(mode="fill", fill_value=0, wrap_negative_indices=False) >= max_uses
        # All rows write 0, so a repeated slot has one result.
        unspent = sum_tree.update(unspent, slots, jnp.zeros(slots.shape), mask=spent)
    return Uses(of_slots, ring.saturating_add(uses.late, late), unspent), spent


def live(uses: Uses | None, of: ring.Live, is_restricted: bool) -> ring.Live:
    """`of`, with the tree of the slots that are not spent; `size` counts these."""
    if uses is None or uses.unspent is None:
        return of
    unspent = sum_tree.restrict(uses.unspent, of.start, of.size) if is_restricted else uses.unspent
    return dataclasses.replace(of, size=sum_tree.total(unspent).astype(jnp.int32), unspent=unspent)


def number(uses: Uses | None, size: jax.Array) -> jax.Array:
    """Number of slots that may be drawn, int32 []: `size` without a bound on uses."""
    return size if uses is None or uses.unspent is None else sum_tree.total(uses.unspent).astype(jnp.int32)


def is_unspent(uses: Uses | None, slots: jax.Array) -> Any:
    """True for `slots` (int32 [B], in range) whose items are not spent."""
    return True if uses is None or uses.unspent is None else sum_tree.get(uses.unspent, slots) > 0
