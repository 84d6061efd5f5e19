"""Counts of how often items came back to `update`, and the items that may still be drawn.

A draw leaves the state unchanged, so uses are counted where drawn items come back, in `update`: once per row of the
batch that names the item, even if its TD error is rejected.
"""

import dataclasses
from typing import Any, ClassVar, Self

import jax
import jax.numpy as jnp
from flax import struct

from jaxreplay import sum_tree
from jaxreplay._common import layouts, ring, xla
from jaxreplay.sum_tree._tree import emptied, on_backend

MOST = 2**30  # a count grows beyond this by less than one batch


@struct.dataclass
class Uses(layouts.BackendState):
    """Counts of the uses of a buffer's items, with `count_updates` or `max_uses`.

    Attributes:
      of_slots: int32 [num_slots], update rows since the item in each slot was inserted; saturates after 2**30.
      late: int32 [], update rows ignored because their item was no longer stored; saturates at 2**31 - 1.
      unspent: sum tree with leaf 1 for each slot that may be drawn; None without `max_uses`.
    """

    of_slots: jax.Array  # [num_slots]
    late: jax.Array  # []
    unspent: sum_tree.SumTree | None
    _layouts: ClassVar = {"unspent": on_backend}

    def insert(self, slots: jax.Array, drawable: jax.Array) -> Self:
        """Uses after writes to `slots` (int32 [B], distinct where in range)."""
        of_slots = self.of_slots.at[slots].set(0, mode="drop", unique_indices=True, wrap_negative_indices=False)
        unspent = self.unspent
        if unspent is not None:
            unspent = sum_tree.update(unspent, slots, drawable.astype(jnp.float32), unique_indices=True)
        return dataclasses.replace(self, of_slots=of_slots, unspent=unspent)

    def cleared(self) -> Self:
        """Uses of no items."""
        unspent = self.unspent and emptied(self.unspent)
        return dataclasses.replace(self, of_slots=jnp.minimum(self.of_slots, 0), unspent=unspent)

    def update(self, slots: jax.Array, max_uses: int | None) -> tuple[Self, jax.Array | None]:
        """Uses after an update of `slots` (int32 [B]): -1 for a row without an item, the number of slots if late.

        Returns:
          uses; and True for rows whose item is spent, bool [B], None without `max_uses`.
        """
        capacity = self.of_slots.shape[0]
        at_slots = self.of_slots.at[slots]
        before = at_slots.get(mode="fill", wrap_negative_indices=False)
        more = (before < MOST).astype(jnp.int32)
        of_slots = at_slots.add(more, mode="drop", wrap_negative_indices=False)
        unspent, spent = self.unspent, None
        if unspent is not None and max_uses is not None:
            spent = of_slots.at[slots].get(mode="fill", wrap_negative_indices=False) >= max_uses
            # All rows write 0, so a repeated slot has one result.
            unspent = sum_tree.update(unspent, slots, jnp.zeros(slots.shape), mask=spent)
        late = ring.saturating_add(self.late, jnp.sum(slots >= capacity, dtype=jnp.int32))
        return dataclasses.replace(self, of_slots=of_slots, late=late, unspent=unspent), spent

    def live(self, every: ring.Live, is_restricted: bool) -> ring.Live:
        """`every`, with the tree of the slots that are not spent; `size` counts these."""
        if self.unspent is None:
            return every
        unspent = sum_tree.restrict(self.unspent, every.start, every.size) if is_restricted else self.unspent
        return dataclasses.replace(every, size=sum_tree.total(unspent).astype(jnp.int32), unspent=unspent)


def init(buffer: Any) -> Uses | None:
    if not buffer.count_updates and buffer.max_uses is None:
        return None
    unspent = None if buffer.max_uses is None else sum_tree.init(buffer.num_slots)
    return Uses(xla.full((buffer.num_slots,), 0, jnp.int32), xla.full((), 0, jnp.int32), unspent)


def num_drawable(uses: Uses | None, size: jax.Array) -> jax.Array:
    """Number of slots that may be drawn, int32 []: `size` without a bound on uses."""
    return size if uses is None or uses.unspent is None else sum_tree.total(uses.unspent).astype(jnp.int32)


def is_unspent(uses: Uses | None, slots: jax.Array) -> Any:
    """True for `slots` (int32 [B], in range) whose items are not spent."""
    return True if uses is None or uses.unspent is None else sum_tree.get(uses.unspent, slots) > 0
