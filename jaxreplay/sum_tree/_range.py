"""A sum tree restricted to a run of consecutive leaves, such as the newest.

The run starts at any leaf and wraps around after the last one. A node keeps its sum if all of its leaves are in the
run, and has sum 0 if none is. Each level has at most two other nodes, which contain the ends of the run. Their sums are
recomputed from the leaves up, O(fanout * log(capacity)) in all. No sum is a difference of two prefix sums, so short
runs are as exact as the tree.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from jaxreplay._common import ring, xla
from jaxreplay.sum_tree import _levels


@struct.dataclass
class Restricted:
    """A tree whose `total`, `minimum` and draws cover only a run of its leaves; `sum_tree.restrict` makes one.

    Attributes:
      tree: the `SumTree`.
      start: int32 [], first leaf of the run.
      size: int32 [], number of leaves in the run, at most the capacity.
      ends: int32 [2] per level, from the roots down: the nodes of the run's first leaf and of the leaf after the run.
      sums: float32 [2] per level, sums of these nodes over the run.
      minima: float32 [2] per level, their smallest positive leaves in the run; None if the tree has no minima.
    """

    tree: Any
    start: jax.Array
    size: jax.Array
    ends: tuple[jax.Array, ...]
    sums: tuple[jax.Array, ...]
    minima: tuple[jax.Array, ...] | None

    @property
    def capacity(self) -> int:
        return self.tree.capacity


def restrict(tree: Any, start: jax.Array, size: jax.Array) -> Restricted:
    """Restrict a tree to `size` leaves from `start` on."""
    ends = [jnp.stack([start, ring.wrap_excess(start + size, tree.capacity)])]
    for _ in tree.sums[1:]:
        ends.insert(0, jax.lax.div(ends[0], jnp.int32(tree.fanout)))
    bare = Restricted(tree, start, size, tuple(ends), (), None)
    sums = _sums_at_ends(bare, tree.sums, jnp.add, 0.0)
    minima = None if tree.minima is None else _sums_at_ends(bare, tree.minima, jnp.minimum, _levels.NONE)
    return dataclasses.replace(bare, sums=sums, minima=minima)


def patches(restricted: Restricted, values: tuple[jax.Array, ...], empty: float) -> list[Callable[..., jax.Array]]:
    """Functions, one per level from the roots down, that return the values of nodes in the run.

    They take nodes, float32 [B, num_siblings], and the index of the first node in each row, int32 [B]. `values` are the
    values of the nodes at the run's ends. `empty` is the value of a node without a leaf in the run.
    """
    return [functools.partial(_patch, restricted, level, values[level], empty) for level in range(len(values))]


def _patch(
    restricted: Restricted, level: int, values: jax.Array, empty: float, rows: jax.Array, first: Any
) -> jax.Array:
    ends, height = restricted.ends[level], len(restricted.ends) - 1 - level
    node = jnp.reshape(first, (-1, 1)) + jnp.arange(rows.shape[-1], dtype=jnp.int32)[None]
    offset = node * restricted.tree.fanout**height - restricted.start
    rows = jnp.where(ring.wrap_negative(offset, restricted.capacity) < restricted.size, rows, empty)
    rows = jnp.where(node == ends[0], values[0], rows)
    return jnp.where(node == ends[1], values[1], rows)


def _sums_at_ends(
    restricted: Restricted, levels: _levels.Levels, combine: _levels.Combine, empty: float
) -> _levels.Levels:
    fanout, ends = restricted.tree.fanout, restricted.ends
    leaves = _levels.at(levels[-1], ends[-1]).get(mode="promise_in_bounds", wrap_negative_indices=False)
    inside = jnp.stack([restricted.size > 0, restricted.size == restricted.capacity])
    values = [jnp.where(inside, leaves, empty)]
    for level in range(len(levels) - 1, 0, -1):
        rows = _levels.read_rows(levels[level], ends[level - 1], fanout)
        rows = _patch(restricted, level, values[0], empty, rows, ends[level - 1] * fanout)
        (value,) = xla.materialize(_levels.fold(rows, combine, fanout >= _levels.WIDE))
        values.insert(0, value)
    return tuple(values)
