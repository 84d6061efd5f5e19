"""max_uses: an item that was updated so often is no longer drawn.

A draw leaves the state unchanged, so uses are counted where drawn items come back, in `update`: once per row of the
batch that names the item, even if its TD error is rejected. A sum tree, `unspent`, has a leaf 1 for each slot whose
item may be drawn, and 0 for the others. It counts drawable items, also within `max_age`, and `Uniform` draws from it.
"""

from typing import Any

import jax
import jax.numpy as jnp

from jaxreplay import sum_tree
from jaxreplay._common.checks import check_integer
from jaxreplay.samplers import _update_counts
from jaxreplay.samplers._update_counts import UpdateCounts


def check_max_uses(max_uses: Any) -> int | None:
    """`max_uses` as a Python integer, or None; a `ValueError` if it is neither."""
    if max_uses is None:
        return None
    return check_integer("max_uses", max_uses, 1, _update_counts.MOST, "a number of updates, or None for no bound")


def insert(unspent: sum_tree.SumTree | None, slots: jax.Array, drawable: jax.Array) -> sum_tree.SumTree | None:
    """`unspent` after writes to `slots` (int32 [B], distinct where in range)."""
    if unspent is None:
        return None
    return sum_tree.update(unspent, slots, drawable.astype(jnp.float32), unique_indices=True)


def update(
    unspent: sum_tree.SumTree, counts: UpdateCounts, slots: jax.Array, mask: jax.Array, max_uses: int
) -> tuple[sum_tree.SumTree, UpdateCounts, jax.Array]:
    """`unspent` and `counts` after an update of `slots` [B], and True for rows whose item is spent, bool [B]."""
    capacity = counts.of_slots.shape[0]
    slots = jnp.where(mask | (slots >= capacity), slots, -1)  # a late row is counted as late
    after: Any = _update_counts.update(counts, slots)
    uses = after.of_slots.at[slots].get(mode="fill", fill_value=0, wrap_negative_indices=False)
    spent = uses >= max_uses
    # All rows write 0, so a repeated slot has one result.
    return sum_tree.update(unspent, slots, jnp.zeros(slots.shape), mask=spent), after, spent


def number(unspent: Any, size: jax.Array) -> jax.Array:
    """Number of slots that may be drawn, int32 []: `size` without a bound on uses."""
    return size if unspent is None else sum_tree.total(unspent).astype(jnp.int32)
