"""Sum tree: a discrete distribution over `capacity` leaves that is cheap to change and to sample.

The tree of Schaul et al. 2016 (Prioritized Experience Replay, appendix B.2.1) with a static fan-out and no
stored differences: after leaves are written, every node above them becomes the sum of its children. The sums
therefore never drift, and a bad leaf that is overwritten leaves no trace.

Nodes lie in one array, level by level from the root, so that parent and children are found by arithmetic alone and
the `fanout` children of a node are contiguous: with fan-out k the root is node k - 1, the parent of node j is
j // k + k - 2, and the children of node j start at k * (j - k + 2). Leaves keep their natural order. Fan-out 2 is
the usual one-indexed heap.

All functions are pure, jitted, and work under `jax.jit`, `lax.scan` and `jax.vmap`; `update` costs
O(batch * fanout * log(capacity)), as do `find` and `sample`.
"""

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import struct
from jax import lax

from jaxreplay._arguments import check_integer

DEFAULT_FANOUT = 8  # measured: tests/benchmarks/fanout.py
MAX_CAPACITY = 2**29  # node numbers are int32


@struct.dataclass
class SumTree:
    """The nodes of a sum tree; make one with `init`.

    The root is kept twice, among the nodes and by itself: XLA would read it off the nodes again wherever it is used,
    and copies the whole array if one of those places comes after the next write.

    Attributes:
      nodes: float32 [num_nodes], every node's sum; see the module's text for their order.
      root: float32 [], the root's sum.
      minima: None, or float32 [num_nodes], every node's smallest positive leaf (inf where there is none).
      root_minimum: None, or float32 [], the root's.
      capacity: number of leaves (static).
      fanout: children per node (static).
    """

    nodes: jax.Array  # [num_nodes]
    root: jax.Array  # []
    minima: jax.Array | None  # [num_nodes]
    root_minimum: jax.Array | None  # []
    capacity: int = struct.field(pytree_node=False)
    fanout: int = struct.field(pytree_node=False)


def init(capacity: int, *, fanout: int = DEFAULT_FANOUT, track_minimum: bool = False) -> SumTree:
    """A tree of `capacity` leaves, all 0.

    Args:
      capacity: number of leaves, 1 to 2**29.
      fanout: children per node, 2 to 1024.
      track_minimum: also keep the smallest positive leaf, for `minimum`.

    Raises:
      ValueError: `capacity` or `fanout` is out of range.
    """
    check_integer("capacity", capacity, 1, MAX_CAPACITY, "the number of leaves")
    check_integer("fanout", fanout, 2, 1024, "the number of children of a node")
    num_nodes = _first_leaf(capacity, fanout) + -(-capacity // fanout) * fanout
    return SumTree(
        nodes=jnp.zeros(num_nodes, jnp.float32),
        root=jnp.zeros((), jnp.float32),
        minima=jnp.full(num_nodes, jnp.inf, jnp.float32) if track_minimum else None,
        root_minimum=jnp.full((), jnp.inf, jnp.float32) if track_minimum else None,
        capacity=capacity,
        fanout=fanout,
    )


def total(tree: SumTree) -> jax.Array:
    """Sum of the leaves, float32 []."""
    return tree.root


def minimum(tree: SumTree) -> jax.Array:
    """Smallest positive leaf, float32 []; inf when there is none.

    Raises:
      ValueError: the tree was made without `track_minimum=True`.
    """
    if tree.root_minimum is None:
        raise ValueError("track_minimum=False: this tree keeps no minimum; make it with init(..., track_minimum=True).")
    return tree.root_minimum


@jax.jit
def get(tree: SumTree, indices: jax.Array) -> jax.Array:
    """Values of the leaves `indices` (int [...]), float32 [...]; 0 for an index outside [0, capacity)."""
    indices = jnp.asarray(indices, jnp.int32)
    inside = (indices >= 0) & (indices < tree.capacity)
    leaf = _first_leaf(tree.capacity, tree.fanout) + jnp.where(inside, indices, 0)
    return jnp.where(inside, tree.nodes.at[leaf].get(mode="promise_in_bounds"), 0.0)


@functools.partial(jax.jit, static_argnames="unique_indices")
def update(
    tree: SumTree,
    indices: jax.Array,
    values: jax.Array,
    mask: jax.Array | None = None,
    *,
    unique_indices: bool = False,
) -> SumTree:
    """Set leaves and recompute the sums above them.

    Where an index occurs more than once the last occurrence wins, on every backend and in every run.

    Args:
      tree: the tree.
      indices: int [B]; an index outside [0, capacity) is ignored.
      values: float [B], not negative. A NaN or an infinity makes the sums above it NaN or infinite until it is
        overwritten, and leaves no trace then.
      mask: bool [B]; rows where it is False are ignored.
      unique_indices: promise that no index occurs twice, which saves the search for the last occurrence.

    Raises:
      ValueError: more than 2**24 rows that may repeat.
    """
    capacity, fanout = tree.capacity, tree.fanout
    indices = jnp.asarray(indices, jnp.int32)
    values = jnp.broadcast_to(jnp.asarray(values, jnp.float32), indices.shape)
    written = (indices >= 0) & (indices < capacity)
    if mask is not None:
        written &= mask
    first_leaf = _first_leaf(capacity, fanout)
    leaf = jnp.where(written, first_leaf + indices, tree.nodes.size)
    nodes = tree.nodes
    if not unique_indices:
        nodes, values = _last_occurrence_wins(nodes, leaf, values)
    nodes = nodes.at[leaf].set(values, mode="drop", unique_indices=unique_indices)
    # Rows that were not written climb from the first leaf: recomputing a sum that has not changed is harmless.
    start = jnp.where(written, leaf, first_leaf)
    depth = _depth(capacity, fanout)
    nodes, root = _ascend(nodes, start, fanout, depth, jnp.add)
    minima, root_minimum = tree.minima, tree.root_minimum
    if minima is not None:
        minima = minima.at[leaf].set(jnp.where(values > 0, values, jnp.inf), mode="drop")
        minima, root_minimum = _ascend(minima, start, fanout, depth, jnp.minimum)
    return dataclasses.replace(tree, nodes=nodes, root=root, minima=minima, root_minimum=root_minimum)


@jax.jit
def find(tree: SumTree, prefix: jax.Array) -> jax.Array:
    """First leaf whose inclusive cumulative sum exceeds `prefix`.

    As long as the total is positive the leaf returned is never 0, whatever rounding does: a prefix below 0 finds the
    first positive leaf, one at or above the total the last.

    Args:
      tree: the tree.
      prefix: float [...], in [0, total).

    Returns:
      int32 [...].
    """
    prefix = jnp.asarray(prefix, jnp.float32)
    flat = prefix.reshape(-1)
    root = jnp.full(flat.shape, tree.fanout - 1, jnp.int32)
    leaf, _, _ = _descend(tree, root, flat, _depth(tree.capacity, tree.fanout))
    return _leaf_index(tree, leaf).reshape(prefix.shape)


@functools.partial(jax.jit, static_argnames=("batch_size", "stratified"))
def sample(tree: SumTree, key: jax.Array, batch_size: int, *, stratified: bool = False) -> tuple[jax.Array, jax.Array]:
    """Draw leaves in proportion to their values, with replacement.

    One float32 uniform has 24 bits, too few to tell the leaves of a large tree apart; so the draw is made anew,
    conditional on the node and the stratum reached, half way down.

    Args:
      tree: the tree; its total must be positive and finite for the law to hold.
      key: a PRNG key.
      batch_size: number of draws.
      stratified: draw once from each of `batch_size` equal parts of [0, total) (Schaul et al. 2016, appendix B.2.1)
        instead of independently.

    Returns:
      the leaves' indices, int32 [batch_size], in ascending order of the strata if stratified; and their values,
      float32 [batch_size].
    """
    mass, depth = total(tree), _depth(tree.capacity, tree.fanout)
    coarse, fine = jax.random.uniform(key, (2, batch_size), jnp.float32)
    if stratified:
        edges = mass * (jnp.arange(batch_size + 1, dtype=jnp.float32) / batch_size)
        low, high = edges[:-1], edges[1:]
    else:
        low, high = jnp.zeros_like(coarse), jnp.full_like(coarse, mass)
    prefix = low + coarse * (high - low)
    root = jnp.full((batch_size,), tree.fanout - 1, jnp.int32)
    node, rest, value = _descend(tree, root, prefix, (depth + 1) // 2)
    if depth > 1:
        offset = prefix - rest  # the mass to the left of the node
        low, high = jnp.maximum(low - offset, 0.0), jnp.minimum(high - offset, value)
        rest = low + fine * jnp.maximum(high - low, 0.0)
        node, _, value = _descend(tree, node, rest, depth // 2)
    return _leaf_index(tree, node), value


def _depth(capacity: int, fanout: int) -> int:
    """Levels below the root."""
    depth = 1
    while fanout**depth < capacity:
        depth += 1
    return depth


def _first_leaf(capacity: int, fanout: int) -> int:
    """Number of the node that is leaf 0."""
    node = fanout - 1
    for _ in range(_depth(capacity, fanout)):
        node = fanout * (node - fanout + 2)
    return node


def _leaf_index(tree: SumTree, node: jax.Array) -> jax.Array:
    # The upper bound matters only to a tree of total 0, where the descent goes astray.
    return jnp.clip(node - _first_leaf(tree.capacity, tree.fanout), 0, tree.capacity - 1)


def _read_rows(nodes: jax.Array, row: jax.Array, fanout: int) -> jax.Array:
    """The contiguous siblings of row [B], float32 [B, fanout]."""
    numbers = lax.GatherDimensionNumbers(offset_dims=(1,), collapsed_slice_dims=(), start_index_map=(0,))
    mode = lax.GatherScatterMode.PROMISE_IN_BOUNDS
    return lax.gather(nodes, (row * fanout)[:, None], numbers, (fanout,), mode=mode)


def _fold(x: jax.Array, combine: Callable[[jax.Array, jax.Array], jax.Array]) -> jax.Array:
    """Pairwise reduction of the last axis: a rounding error of O(log), and the same bits in every program."""
    while x.shape[-1] > 1:
        half = x.shape[-1] // 2
        pairs = combine(x[..., :half], x[..., half : 2 * half])
        x = jnp.concatenate([pairs, x[..., 2 * half :]], axis=-1) if x.shape[-1] % 2 else pairs
    return x[..., 0]


def _ascend(nodes: jax.Array, node: jax.Array, fanout: int, depth: int, combine) -> tuple[jax.Array, jax.Array]:
    """Recompute every ancestor of `node` [B] from its children; also returns the root's value, float32 []."""

    def level(_, carry):
        nodes, node, _ = carry
        row = node // fanout
        parent = row + fanout - 2
        value = _fold(_read_rows(nodes, row, fanout), combine)
        return nodes.at[parent].set(value, mode="promise_in_bounds"), parent, value

    nodes, _, value = lax.fori_loop(0, depth, level, (nodes, node, jnp.zeros(node.shape, nodes.dtype)))
    return nodes, value[0]


def _descend(tree: SumTree, node: jax.Array, prefix: jax.Array, levels: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """`levels` steps down from `node` [B].

    Returns:
      the nodes reached, what is left of the prefix there, and the nodes' values. All reads of the tree happen inside
      the loop, so that they come before any write that depends on its results.
    """
    fanout = tree.fanout

    def level(_, carry):
        node, prefix, _ = carry
        row = node - fanout + 2
        children = _read_rows(tree.nodes, row, fanout)
        below = jnp.zeros_like(prefix)  # cumulative sum before the child at hand
        chosen, chosen_below, chosen_value = jnp.zeros_like(node), jnp.zeros_like(prefix), jnp.zeros_like(prefix)
        found = jnp.zeros(node.shape, bool)
        for child in range(fanout):
            value = children[:, child]
            # Until one is found the last positive child stands in, for a prefix that rounding put past the end.
            take = (value > 0) & ~found
            chosen = jnp.where(take, child, chosen)
            chosen_below = jnp.where(take, below, chosen_below)
            chosen_value = jnp.where(take, value, chosen_value)
            below = below + value
            found |= take & (below > prefix)
        return row * fanout + chosen, jnp.maximum(prefix - chosen_below, 0.0), chosen_value

    return lax.fori_loop(0, levels, level, (node, prefix, jnp.zeros_like(prefix)))


def _last_occurrence_wins(nodes: jax.Array, leaf: jax.Array, values: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Give every row of one leaf the value of the last such row, so that the order of a scatter does not matter.

    The leaves themselves serve as scratch space (they are about to be overwritten): row numbers are combined there by
    a maximum, which has one result in any order. Neither a sort nor O(capacity) scratch is needed.
    """
    rows = leaf.shape[0]
    if rows > 2**24:
        raise ValueError(f"batch of {rows} rows: at most {2**24} rows may repeat indices; update in parts.")
    # Any negative number does. That it is computed from the values makes whatever they were read from the tree for come
    # before this write; otherwise XLA would copy the tree.
    nodes = nodes.at[leaf].set(jnp.where(values > 0, -2.0, -1.0), mode="drop")
    nodes = nodes.at[leaf].max(jnp.arange(rows, dtype=jnp.float32), mode="drop")
    last = nodes.at[leaf].get(mode="fill", fill_value=0.0).astype(jnp.int32)
    return nodes, values.at[last].get(mode="promise_in_bounds")
