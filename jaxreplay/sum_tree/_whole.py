"""Trees that are made of all their leaves at once."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxreplay._common import ring, xla
from jaxreplay.sum_tree import _levels, _tree
from jaxreplay.sum_tree._tree import NONE, SumTree, default_fanout


def of_leaves(leaves: jax.Array, *, fanout: int | None = None) -> SumTree:
    """A tree of these leaves: bit for bit `init`, then `update` of all leaves, in one pass.

    Args:
      leaves: number [capacity], not negative. Anything else, such as NaN, is stored as infinity.
      fanout: children per node, 2 to 1024; None for the best on the devices of `leaves`.

    Raises:
      ValueError: `leaves` are not a vector of 1 to 2**29 entries, or `fanout` is out of range.

    Examples:
      >>> tree = jr.sum_tree.of_leaves(jnp.array([1.0, 2.0, 3.0, 4.0]))
      >>> float(jr.sum_tree.total(tree)), jr.sum_tree.leaves(tree).tolist()
      (10.0, [1.0, 2.0, 3.0, 4.0])
    """
    return _of_leaves(leaves, _tree.chosen_fanout(fanout, leaves))


@xla.copies_numpy
@functools.partial(jax.jit, static_argnames="fanout")
def _of_leaves(leaves: jax.Array, fanout: int) -> SumTree:
    leaves = jnp.asarray(leaves, jnp.float32)
    if leaves.ndim != 1 or not 1 <= leaves.size <= ring.MAX_CAPACITY:
        rule = f"a vector of 1 to {ring.MAX_CAPACITY} numbers"
        raise ValueError(f"leaves: got shape {list(leaves.shape)}, expected {rule}.")
    leaves = jnp.where(leaves >= 0, leaves, jnp.inf)
    return SumTree(_levels.build(leaves, leaves.size, fanout, jnp.add, 0.0), None, leaves.size, fanout)


def of_rows(empty: SumTree, leaves: np.ndarray) -> SumTree:
    """Trees like `empty`, one for each row of `leaves` [D, capacity], as one with NumPy arrays [D, ...]."""
    trees = [_tree.update(empty, np.arange(row.size), row, unique_indices=True) for row in leaves]
    return jax.tree.map(lambda *x: np.stack(x), *trees)


def with_fanout(tree: SumTree, fanout: int | None = None) -> SumTree:
    """Rebuild a tree with another fan-out; None for the best on its devices.

    The levels may have leading axes, as in a stack of trees. Costs O(capacity).

    Examples:
      >>> tree = jr.sum_tree.with_fanout(jr.sum_tree.init(300, fanout=8), 64)
      >>> [level.size for level in tree.sums]
      [5, 320]
    """
    fanout = _tree.chosen_fanout(fanout, tree)
    return tree if fanout == tree.fanout else _with_fanout(tree, fanout)


def emptied(tree: SumTree) -> SumTree:
    """An empty tree like `tree`, written in its place where XLA can."""
    sums, maxima = jax.tree.map(lambda x: jnp.minimum(x, 0.0), (tree.sums, tree.maxima))
    minima = jax.tree.map(lambda x: jnp.maximum(x, NONE), tree.minima)
    return SumTree(sums, minima, tree.capacity, tree.fanout, maxima)


def on_backend(tree: SumTree | None, state: Any, backend: str) -> SumTree | None:
    """For `jaxreplay._common.layouts.BackendState`: a tree, if there is one, with the best fan-out on a backend."""
    return tree and with_fanout(tree, default_fanout(backend))


@functools.partial(jax.jit, static_argnames="fanout")
def _with_fanout(tree: SumTree, fanout: int) -> SumTree:
    def build_levels(nodes: jax.Array, combine: _levels.Combine, empty: float) -> _levels.Levels:
        return _levels.build(nodes, tree.capacity, fanout, combine, empty)

    minima = None if tree.minima is None else build_levels(_tree.lowest(tree, tree.minima), jnp.minimum, NONE)
    maxima = None if tree.maxima is None else build_levels(_tree.leaves(tree), jnp.maximum, 0.0)[:-1]
    return SumTree(build_levels(_tree.leaves(tree), jnp.add, 0.0), minima, tree.capacity, fanout, maxima)
