"""Sum tree: a discrete distribution over `capacity` leaves that is cheap to change and to sample.

The tree of Schaul et al. 2016 (Prioritized Experience Replay, appendix B.2.1) with a static fan-out and no
stored differences: after leaves are written, every node above them becomes the sum of its children. The sums
therefore never drift, and a bad leaf that is overwritten leaves no trace.

There are at most `fanout` roots, and every level below has `fanout` children for each node of the level above, in
order, so that parent and children are found by arithmetic alone and siblings are contiguous. Each level is an array of
its own, and leaves keep their natural order.

The levels are unrolled, where a `lax.fori_loop` over levels of one array would be shorter. With 2^20 leaves and 256 of
them drawn and written, the loop takes 35 kernels in place of 12 on an H100 and 76,000 estimated cycles in place of
48,000 on a TPU v5e, as compiled for them: every pass counts, slices its levels' offsets, and computes rows of levels
small enough to be recomputed as a whole. On a CPU it takes up to five times as long.

All functions are pure, jitted, and work under `jax.jit`, `lax.scan` and `jax.vmap`; `update` costs
O(batch * fanout * log(capacity)), as do `find` and `sample`.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import lax

from jaxreplay._common import checks
from jaxreplay._common.checks import check_integer
from jaxreplay._common.random import random_bits
from jaxreplay._common.xla import after, materialize

# Measured on a CPU, and compiled for the others: tests/benchmarks/README.md.
DEFAULT_FANOUTS = {"cpu": 8, "tpu": 128}
DEFAULT_FANOUT = 64  # of all other backends
WIDE = 64  # nodes of as many children are added up at once; of more they are rows of a matrix, as a TPU wants it
MAX_CAPACITY = 2**29
NONE = float(np.finfo(np.float32).max)  # the minimum of no leaves: finite, as jax_debug_infs wants what programs return
ALL_PAIRS = 512  # rows of a batch that are compared with each other for repeated indices
DENSE = 4  # a level of at most so many nodes a row of the batch is recomputed as a whole; measured


Found = tuple[jax.Array, jax.Array, jax.Array]  # nodes, int32 [B]; what is left of the prefix there; their values


@struct.dataclass
class SumTree:
    """The nodes of a sum tree; make one with `init`.

    Attributes:
      sums: the levels from the roots to the leaves, float32 [num_nodes] each, or of a wide tree [rows, fanout] with
        siblings in a row (the roots [1, num_roots]); every level below the roots is padded with 0 to a multiple of the
        fan-out.
      minima: None, or the same with every node's smallest positive leaf in place of the sum, and the largest float32
        where there is none.
      capacity: number of leaves (static).
      fanout: children per node (static).
    """

    sums: tuple[jax.Array, ...]
    minima: tuple[jax.Array, ...] | None
    capacity: int = struct.field(pytree_node=False)
    fanout: int = struct.field(pytree_node=False)

    @property
    def is_wide(self) -> bool:
        """Whether siblings lie in a row of a matrix."""
        return self.fanout > WIDE


def default_fanout() -> int:
    """The fan-out that suits the default backend of JAX."""
    return DEFAULT_FANOUTS.get(jax.default_backend(), DEFAULT_FANOUT)


def init(capacity: int, *, fanout: int | None = None, track_minimum: bool = False) -> SumTree:
    """A tree of `capacity` leaves, all 0.

    Args:
      capacity: number of leaves, 1 to 2**29.
      fanout: children per node, 2 to 1024; None for what suits the backend.
      track_minimum: also keep the smallest positive leaf, for `minimum`.

    Raises:
      ValueError: `capacity` or `fanout` is out of range.
    """
    capacity = check_integer("capacity", capacity, 1, MAX_CAPACITY, "the number of leaves")
    fanout = default_fanout() if fanout is None else fanout
    fanout = check_integer("fanout", fanout, 2, 1024, "the number of children of a node")
    shapes = [_shape(size, fanout) for size in _sizes(capacity, fanout)]
    sums = tuple(jnp.zeros(shape, jnp.float32) for shape in shapes)
    minima = tuple(jnp.full(shape, NONE, jnp.float32) for shape in shapes) if track_minimum else None
    return SumTree(sums, minima, capacity, fanout)


def leaves(tree: SumTree) -> jax.Array:
    """All leaves in order, float32 [capacity]; [..., capacity] where the levels have leading axes."""
    return _leaves(tree, tree.sums)


def _leaves(tree: SumTree, levels: tuple[jax.Array, ...]) -> jax.Array:
    lowest = levels[-1]
    lowest = lowest.reshape(*lowest.shape[:-2], -1) if tree.is_wide else lowest
    return lowest[..., : tree.capacity]


def with_fanout(tree: SumTree, fanout: int | None = None) -> SumTree:
    """The same leaves in a tree of another fan-out; None for what suits the backend.

    The levels may have leading axes, as in a stack of trees. Costs O(capacity).
    """
    fanout = default_fanout() if fanout is None else fanout
    return tree if fanout == tree.fanout else _with_fanout(tree, fanout)


@functools.partial(jax.jit, static_argnames="fanout")
def _with_fanout(tree: SumTree, fanout: int) -> SumTree:
    def built(nodes: jax.Array, combine: Callable[[jax.Array, jax.Array], jax.Array], empty: float):
        levels, leading = [], nodes.shape[:-1]
        for size in reversed(_sizes(tree.capacity, fanout)):
            if levels:
                nodes = _fold(levels[0].reshape(*leading, -1, fanout), combine, fanout >= WIDE)
            padding = [(0, 0)] * len(leading) + [(0, size - nodes.shape[-1])]
            nodes = jnp.pad(nodes, padding, constant_values=empty)
            levels.insert(0, nodes.reshape(*leading, *_shape(size, fanout)))
        return tuple(levels)

    minima = None if tree.minima is None else built(_leaves(tree, tree.minima), jnp.minimum, NONE)
    return SumTree(built(leaves(tree), jnp.add, 0.0), minima, tree.capacity, fanout)


@functools.partial(jax.jit, inline=True)
def total(tree: SumTree) -> jax.Array:
    """Sum of the leaves, float32 []."""
    return _fold_roots(tree, tree.sums[0], jnp.add)


@functools.partial(jax.jit, inline=True)
def minimum(tree: SumTree) -> jax.Array:
    """Smallest positive leaf, float32 []; inf when there is none.

    Raises:
      ValueError: the tree was made without `track_minimum=True`.
    """
    if tree.minima is None:
        raise ValueError("track_minimum=False: this tree keeps no minimum; make it with init(..., track_minimum=True).")
    smallest = _fold_roots(tree, tree.minima[0], jnp.minimum)
    return jnp.where(smallest < NONE, smallest, jnp.inf)


@jax.jit
def get(tree: SumTree, indices: jax.Array) -> jax.Array:
    """Values of the leaves `indices` (int [...]), float32 [...]; 0 for an index outside [0, capacity).

    Raises:
      ValueError: `indices` are no integers.
    """
    indices = _as_indices(indices)
    inside = (indices >= 0) & (indices < tree.capacity)
    found = _at(tree.sums[-1], jnp.where(inside, indices, 0)).get(mode="promise_in_bounds", wrap_negative_indices=False)
    return jnp.where(inside, found, 0.0)


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
      values: float [B], not negative. Anything else, such as NaN, is stored as infinity: the total is infinite until
        it is overwritten, and no trace is left then.
      mask: bool [B]; rows where it is False are ignored.
      unique_indices: promise that no index occurs twice, which saves the search for the last occurrence.

    Raises:
      ValueError: `indices` are no integers, `mask` is not bool [B], or more than 2**24 rows that may repeat.
    """
    indices = _as_indices(indices)
    values = jnp.broadcast_to(jnp.asarray(values, jnp.float32), indices.shape)
    values = jnp.where(values >= 0, values, jnp.inf)
    written = (indices >= 0) & (indices < tree.capacity)
    if mask is not None:
        written &= checks.check_mask(mask, indices.shape)
    # The last update of the tree reads it before this one writes it.
    indices = after(indices, total(tree), () if tree.minima is None else minimum(tree))
    sums, nowhere = tree.sums, tree.sums[-1].size
    target, values = materialize(jnp.where(written, indices, nowhere), values)
    # Rows that were not written climb from the first leaf: recomputing a sum that has not changed is harmless.
    leaf = jnp.where(target < nowhere, target, 0)
    if not unique_indices:
        lowest, last = _last_occurrence(sums[-1], target, values, tree.fanout)
        sums = (*sums[:-1], lowest)
        target = jnp.where(last, target, nowhere)
    sums = _ascend(sums, target, values, leaf, tree.fanout, jnp.add)
    minima = tree.minima
    if minima is not None:
        values = jnp.where(values > 0, values, NONE)
        minima = _ascend(minima, target, values, leaf, tree.fanout, jnp.minimum)
    return dataclasses.replace(tree, sums=sums, minima=minima)


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
    roots, *below = tree.sums
    leaf, _, _ = _descend(below, _choose_root(roots, jnp.maximum(prefix, 0.0).reshape(-1)), tree.fanout)
    return leaf.reshape(prefix.shape)


@functools.partial(jax.jit, static_argnames=("batch_size", "stratified"))
def sample(tree: SumTree, key: jax.Array, batch_size: int, *, stratified: bool = False) -> tuple[jax.Array, jax.Array]:
    """Draw leaves in proportion to their values, with replacement.

    The probability of leaf i is leaf_i / total to within 2^-22, the error of sums and prefixes in float32 (stratified:
    the mean over the batch). So where some leaves are millions of times as large as others, the small ones may come
    several times too often, or never. 2^24 equal leaves come within 0.1% of as often as they should.

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
    return sample_with(tree, random_bits(key, batch_size), stratified=stratified)


@functools.partial(jax.jit, static_argnames="stratified")
def sample_with(tree: SumTree, bits: Any, *, stratified: bool = False) -> tuple[jax.Array, jax.Array]:
    """`sample` with random bits, two of uint32 [batch_size], in place of a key.

    One float32 uniform has 24 bits, too few to tell the leaves of a large tree apart; so the draw is made anew,
    conditional on the node and the stratum reached, half way down.
    """
    coarse, fine = ((words >> 8).astype(jnp.float32) * 2.0**-24 for words in bits)
    mass, batch_size = total(tree), coarse.size
    if stratified:
        stratum = jnp.arange(batch_size, dtype=jnp.float32)
        low, high = mass * (stratum / batch_size), mass * ((stratum + 1) / batch_size)
    else:
        low, high = jnp.zeros_like(coarse), jnp.full_like(coarse, mass)
    prefix = low + coarse * (high - low)
    roots, *below = tree.sums
    half = len(below) // 2
    node, rest, value = _descend(below[:half], _choose_root(roots, prefix), tree.fanout)
    if below:
        offset = prefix - rest  # the mass to the left of the node
        low, high = jnp.maximum(low - offset, 0.0), jnp.minimum(high - offset, value)
        rest = low + fine * jnp.maximum(high - low, 0.0)
        node, _, value = _descend(below[half:], (node, rest, value), tree.fanout)
    return node, value


def _as_indices(indices: Any) -> jax.Array:
    indices = checks.as_int32(indices)
    if indices.dtype != jnp.int32:
        raise ValueError(f"indices: got {checks.describe(indices.dtype, indices.shape)}, expected integers.")
    return jnp.asarray(indices)


def _shape(size: int, fanout: int) -> tuple[int, ...]:
    """Of a level of so many nodes."""
    return (-(-size // fanout), min(size, fanout)) if fanout > WIDE else (size,)


def _sizes(capacity: int, fanout: int) -> list[int]:
    """Sizes of the levels, from the roots on."""
    nodes = [capacity]
    while nodes[0] > fanout:
        nodes.insert(0, -(-nodes[0] // fanout))
    return [nodes[0], *(parents * fanout for parents in nodes[:-1])]


def _fold(x: jax.Array, combine: Callable[[jax.Array, jax.Array], jax.Array], at_once: bool) -> jax.Array:
    """The last axis reduced, if not at once by pairs: with a rounding error of O(log), and the same bits everywhere."""
    if at_once:
        return jnp.sum(x, axis=-1) if combine is jnp.add else jnp.min(x, axis=-1)
    while x.shape[-1] > 1:
        half = x.shape[-1] // 2
        pairs = combine(x[..., :half], x[..., half : 2 * half])
        x = jnp.concatenate([pairs, x[..., 2 * half :]], axis=-1) if x.shape[-1] % 2 else pairs
    return x[..., 0]


def _fold_roots(tree: SumTree, roots: jax.Array, combine: Callable[[jax.Array, jax.Array], jax.Array]) -> jax.Array:
    folded = _fold(roots, combine, tree.is_wide)
    return folded[..., 0] if tree.is_wide else folded


def _at(nodes: jax.Array, index: jax.Array) -> Any:
    """`nodes.at` of the nodes `index` of a level."""
    if nodes.ndim == 1:
        return nodes.at[index]
    return nodes.at[lax.div(index, jnp.int32(nodes.shape[1])), lax.rem(index, jnp.int32(nodes.shape[1]))]


def _read_rows(nodes: jax.Array, row: jax.Array, fanout: int) -> jax.Array:
    """The contiguous siblings of row [B], float32 [B, fanout]."""
    if nodes.ndim == 2:
        return nodes.at[row].get(mode="promise_in_bounds", wrap_negative_indices=False)
    numbers = lax.GatherDimensionNumbers(offset_dims=(1,), collapsed_slice_dims=(), start_index_map=(0,))
    mode = lax.GatherScatterMode.PROMISE_IN_BOUNDS
    return lax.gather(nodes, (row * fanout)[:, None], numbers, (fanout,), mode=mode)


def _ascend(
    levels: tuple[jax.Array, ...],
    target: jax.Array,
    values: jax.Array,
    node: jax.Array,
    fanout: int,
    combine: Callable[[jax.Array, jax.Array], jax.Array],
) -> tuple[jax.Array, ...]:
    """`levels` with `values` [B] at `target` [B] of the leaves, and all ancestors of leaves `node` [B] recomputed."""
    *above, lowest = levels
    written = _at(lowest, target).set(values, mode="drop", unique_indices=True, wrap_negative_indices=False)
    done, sparse = [written], True  # so far
    for parents in reversed(above):
        children, node = done[0], lax.div(node, jnp.int32(fanout))
        num_parents = children.size // fanout
        if num_parents <= DENSE * node.size:
            value = _fold(children.reshape(num_parents, fanout), combine, fanout >= WIDE)
            rest = parents.reshape(-1)[num_parents:]  # it is padding
            parents = jnp.concatenate([value, rest]).reshape(parents.shape)
            if sparse:
                (parents,), sparse = materialize(parents), False
        else:
            value = _fold(_read_rows(children, node, fanout), combine, fanout >= WIDE)
            parents = _at(parents, node).set(value, mode="promise_in_bounds", wrap_negative_indices=False)
        done.insert(0, parents)
    return tuple(done)


def _descend(levels: Sequence[jax.Array], found: Found, fanout: int) -> Found:
    """Follow what is left of the prefixes from the nodes `found` down the levels below them.

    All that is found at a level is materialized together, so that every read of the tree comes before any write that
    depends on one of them; otherwise XLA would copy the tree.
    """
    for nodes in levels:
        node, prefix, _ = found
        rows = _read_rows(nodes, node, fanout)
        if nodes.ndim == 2:
            child, prefix, value = _choose_in_rows(rows, prefix)
        else:
            child, prefix, value = _choose([rows[:, i] for i in range(fanout)], prefix)
        found = materialize(node * fanout + child, prefix, value)
    return found


def _choose_root(roots: jax.Array, prefix: jax.Array) -> Found:
    if roots.ndim == 2:
        return materialize(*_choose_in_rows(jnp.broadcast_to(roots, (prefix.size, roots.size)), prefix))
    return materialize(*_choose([roots[i] for i in range(roots.size)], prefix))


def _choose_in_rows(rows: jax.Array, prefix: jax.Array) -> Found:
    """`_choose` by the cumulative sums of rows [B, num_children].

    One reduction finds the child of the lowest rank, with what is before it and in it: first the children that the
    prefix falls in or before, in order, then those before it from the right, and last those of value 0.
    """
    size = rows.shape[1]
    number = np.arange(size, dtype=np.int32)
    sums = jnp.cumsum(rows, axis=1)
    rank = jnp.where(sums > prefix[:, None], number, 2 * size - number)
    rank = jnp.where(rows > 0, rank, 3 * size + number)

    def lower(x: Any, y: Any) -> Any:
        return [jnp.where(x[0] < y[0], a, b) for a, b in zip(x, y, strict=True)]

    operands = (rank, jnp.broadcast_to(number, rows.shape), sums - rows, rows)
    empty = (np.int32(4 * size), np.int32(0), np.float32(0), np.float32(0))
    _, child, before, value = lax.reduce(operands, empty, lower, (1,))
    return child, jnp.maximum(prefix - before, 0.0), value


def _choose(children: list[jax.Array], prefix: jax.Array) -> Found:
    """The one of `children` (values in order, float32 [B] or []) in which `prefix` (float32 [B], not negative) falls.

    It is found by halving, and is never one of value 0 where there is another.
    """
    chosen = jnp.zeros(prefix.shape, jnp.int32)
    while len(children) > 1:
        half = 1 << ((len(children) - 1).bit_length() - 1)
        left, right = children[:half], children[half:]
        left_sum, right_sum = functools.reduce(jnp.add, left), functools.reduce(jnp.add, right)
        go_right = ~(prefix < left_sum) & (right_sum > 0)
        chosen = 2 * chosen + go_right.astype(jnp.int32)
        prefix = jnp.where(go_right, prefix - left_sum, prefix)
        right = right + [jnp.zeros_like(left_sum)] * (half - len(right))
        children = [jnp.where(go_right, b, a) for a, b in zip(left, right, strict=True)]
    return chosen, prefix, jnp.broadcast_to(children[0], prefix.shape)


def _last_occurrence(
    leaves: jax.Array, target: jax.Array, values: jax.Array, fanout: int
) -> tuple[jax.Array, jax.Array]:
    """Which rows are the last of their `target`, bool [B], so that the order of a scatter does not matter.

    A small batch of a wide tree is compared with itself, which is one kernel. Otherwise the leaves themselves serve as
    scratch space (they are about to be overwritten): numbers below any leaf's, lower for later rows, are combined there
    by a minimum, which has one result in any order. Neither a sort nor O(capacity) scratch is needed.
    """
    rows = target.shape[0]
    if rows > 2**24:
        raise ValueError(f"batch of {rows} rows: at most {2**24} rows may repeat indices; update in parts.")
    if fanout >= WIDE and rows <= ALL_PAIRS:
        row = jnp.arange(rows, dtype=jnp.int32)
        later = row[None, :] > row[:, None]
        return leaves, ~jnp.any((target[None, :] == target[:, None]) & later, axis=1)
    # The values are never less. That they are looked at makes whatever they were read from the tree for come before
    # this write; otherwise XLA would copy the leaves.
    number = jnp.minimum(values, -1.0 - jnp.arange(rows, dtype=jnp.float32))
    leaves = _at(leaves, target).min(number, mode="drop", wrap_negative_indices=False)
    seen = _at(leaves, target).get(mode="fill", fill_value=0.0, wrap_negative_indices=False)
    return leaves, seen == number
