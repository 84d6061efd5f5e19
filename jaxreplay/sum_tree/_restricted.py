"""Restricted: a sum tree of which only a run of the leaves counts."""

import dataclasses
import functools
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from flax import struct

from jaxreplay._common import ring, shown, xla
from jaxreplay.sum_tree import _levels
from jaxreplay.sum_tree._levels import NONE

if TYPE_CHECKING:
    from jaxreplay.sum_tree._tree import SumTree


@struct.dataclass
class Restricted(shown.Shown):
    """A tree whose `total`, `minimum` and draws cover only a run of its leaves; `restrict` makes one.

    The run starts at any leaf and wraps around after the last one. A node keeps its sum if all of its leaves are in the
    run, and has sum 0 if none is. Each level has at most two other nodes, which contain the ends of the run. Their sums
    are recomputed from the leaves up, O(fanout * log(capacity)) in all. No sum is a difference of two prefix sums, so
    short runs are as exact as the tree.

    Attributes:
      tree: the `SumTree`.
      start: int32 [], first leaf of the run.
      size: int32 [], number of leaves in the run, at most the capacity.
      ends: int32 [2] per level, from the roots down: the nodes of the run's first leaf and of the leaf after the run.
      sums: float32 [2] per level, sums of these nodes over the run.
      minima: float32 [2] per level, their smallest positive leaves in the run; None if the tree has no minima.
    """

    tree: "SumTree"
    start: jax.Array
    size: jax.Array
    ends: tuple[jax.Array, ...]
    sums: tuple[jax.Array, ...]
    minima: tuple[jax.Array, ...] | None


@jax.jit
def restrict(tree: "SumTree", start: jax.Array, size: jax.Array) -> Restricted:
    """Restrict the tree to a run of its leaves: draws, `total` and `minimum` cover only the run.

    Draws are as exact as from a tree of these leaves alone. Costs O(fanout * log(capacity)).

    Args:
      tree: the tree.
      start: int32 [], first leaf of the run, which wraps around to leaf 0.
      size: int32 [], number of leaves in the run, 0 to the capacity.

    Examples:
      >>> tree = jr.sum_tree.init(4)
      >>> tree = jr.sum_tree.update(tree, np.arange(4), np.array([1.0, 2.0, 3.0, 4.0]))
      >>> run = jr.sum_tree.restrict(tree, start=3, size=2)  # leaves 3 and 0
      >>> float(jr.sum_tree.total(run))
      5.0
    """
    ends = [jnp.stack([start, ring.wrap_excess(start + size, tree.capacity)])]
    for _ in tree.sums[1:]:
        ends.insert(0, jax.lax.div(ends[0], jnp.int32(tree.fanout)))
    bare = Restricted(tree, start, size, tuple(ends), (), None)
    minima = None if tree.minima is None else _sums_at_ends(bare, tree.minima, jnp.minimum, NONE)
    return dataclasses.replace(bare, sums=_sums_at_ends(bare, tree.sums, jnp.add, 0.0), minima=minima)


def _patch(restricted: Restricted, level: int, values: jax.Array, empty: float, rows: Any, first: Any) -> jax.Array:
    """Values in the run of the nodes `rows` of a level, float32 [B, num_siblings].

    `values` are the values of the nodes at the run's ends. `empty` is the value of a node without a leaf in the run.
    `first` is the index of the first node in each row, int32 [B].
    """
    ends, height = restricted.ends[level], len(restricted.ends) - 1 - level
    node = jnp.reshape(first, (-1, 1)) + jnp.arange(rows.shape[-1], dtype=jnp.int32)[None]
    offset = node * restricted.tree.fanout**height - restricted.start
    rows = jnp.where(ring.wrap_negative(offset, restricted.tree.capacity) < restricted.size, rows, empty)
    rows = jnp.where(node == ends[0], values[0], rows)
    return jnp.where(node == ends[1], values[1], rows)


def _fade(tree: "SumTree", height: int, empty: float, rows: Any, first: Any) -> jax.Array:
    """Values of the nodes `rows` of a level relative to the newest leaf of all; arguments as of `_patch`."""
    if tree.fading is None:
        return rows
    fading, width = tree.fading, tree.fanout**height
    if rows.shape[-1] == tree.fanout and width * tree.fanout <= tree.capacity and jnp.ndim(first):  # siblings
        parent = jax.lax.div(first, jnp.int32(tree.fanout))
        factor = fading.factor(fading.ages(parent[:, None], width * tree.fanout))
        return fading.faded(rows, factor * fading.factors(parent, height, tree.fanout), empty)
    node = jnp.reshape(first, (-1, 1)) + jnp.arange(rows.shape[-1], dtype=jnp.int32)[None]
    return fading.faded(rows, fading.factor(fading.ages(node, width)), empty)


def _sums_at_ends(run: Restricted, levels: _levels.Levels, combine: _levels.Combine, empty: float) -> _levels.Levels:
    fanout, ends = run.tree.fanout, run.ends
    leaves = _levels.at(levels[-1], ends[-1]).get(mode="promise_in_bounds", wrap_negative_indices=False)
    inside = jnp.stack([run.size > 0, run.size == run.tree.capacity])
    leaves = _fade(run.tree, 0, empty, leaves[:, None], ends[-1])[:, 0]
    values = [jnp.where(inside, leaves, empty)]
    for level in range(len(levels) - 1, 0, -1):
        rows = _levels.read_rows(levels[level], ends[level - 1], fanout)
        rows = _fade(run.tree, len(levels) - 1 - level, empty, rows, ends[level - 1] * fanout)
        rows = _patch(run, level, values[0], empty, rows, ends[level - 1] * fanout)
        (value,) = xla.materialize(_levels.fold(rows, combine, fanout >= _levels.WIDE))
        values.insert(0, value)
    return tuple(values)


def in_run(tree: "SumTree | Restricted", name: str, empty: float) -> tuple["SumTree", jax.Array, list[Any]]:
    """The tree, the roots of its levels `name` as they count in a draw, and the patches of the levels below."""
    run = tree if isinstance(tree, Restricted) else None
    tree = tree.tree if isinstance(tree, Restricted) else tree
    roots, *lower = getattr(tree, name)
    if run is None and tree.fading is None:
        return tree, roots, []

    def patch(level: int, rows: Any, first: Any) -> jax.Array:
        rows = _fade(tree, len(lower) - level, empty, rows, first)
        return rows if run is None else _patch(run, level, getattr(run, name)[level], empty, rows, first)

    patches = [functools.partial(patch, level) for level in range(1, len(lower) + 1)]
    return tree, patch(0, roots.reshape(1, -1), 0).reshape(roots.shape), patches
