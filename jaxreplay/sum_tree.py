"""Sum tree: a discrete distribution over `capacity` leaves that is cheap to change and to sample.

The tree of Schaul et al. 2016 (Prioritized Experience Replay, appendix B.2.1) with a static fan-out and no
stored differences: after leaves are written, every node above them becomes the sum of its children. The sums
therefore never drift, and a bad leaf that is overwritten leaves no trace.

There are at most `fanout` roots, and every level below them has `fanout` children for each node of the level above, in
order, so that parent and children are found by arithmetic alone and siblings are contiguous. Leaves keep their natural
order. The levels lie in three arrays: the roots; the upper levels; and the two lowest levels, which hold nearly all
nodes. (XLA:CPU splits every operation on an array over 0.5 MB among threads, which takes longer than the operation
itself; so most of them are kept on the small arrays.)

All functions are pure, jitted, and work under `jax.jit`, `lax.scan` and `jax.vmap`; `update` costs
O(batch * fanout * log(capacity)), as do `find` and `sample`.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import struct
from jax import lax

from jaxreplay._arguments import check_integer
from jaxreplay._random import random_bits
from jaxreplay._xla import materialize

DEFAULT_FANOUT = 8  # measured: tests/benchmarks/README.md
MAX_CAPACITY = 2**29
DENSE = 8  # a level of at most so many nodes a row of the batch is recomputed as a whole; measured


@struct.dataclass
class SumTree:
    """The nodes of a sum tree; make one with `init`.

    Attributes:
      sums: float32 [num_nodes] each: the roots, the upper levels (if there are any), the two lowest levels; the leaves
        are at the end of the last.
      minima: None, or the same with every node's smallest positive leaf, inf where there is none, in place of the sum.
      capacity: number of leaves (static).
      fanout: children per node (static).
    """

    sums: tuple[jax.Array, ...]
    minima: tuple[jax.Array, ...] | None
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
    levels = _levels(capacity, fanout)

    sizes = {level.array: level.start + level.size for level in levels}.values()
    sums = tuple(jnp.zeros(size, jnp.float32) for size in sizes)
    minima = tuple(jnp.full(size, jnp.inf, jnp.float32) for size in sizes) if track_minimum else None
    return SumTree(sums, minima, capacity, fanout)


def total(tree: SumTree) -> jax.Array:
    """Sum of the leaves, float32 []."""
    return _fold(tree.sums[0], jnp.add)


def minimum(tree: SumTree) -> jax.Array:
    """Smallest positive leaf, float32 []; inf when there is none.

    Raises:
      ValueError: the tree was made without `track_minimum=True`.
    """
    if tree.minima is None:
        raise ValueError("track_minimum=False: this tree keeps no minimum; make it with init(..., track_minimum=True).")
    return _fold(tree.minima[0], jnp.minimum)


@jax.jit
def get(tree: SumTree, indices: jax.Array) -> jax.Array:
    """Values of the leaves `indices` (int [...]), float32 [...]; 0 for an index outside [0, capacity)."""
    indices = jnp.asarray(indices, jnp.int32)
    inside = (indices >= 0) & (indices < tree.capacity)
    node = _levels(tree.capacity, tree.fanout)[-1].start + jnp.where(inside, indices, 0)
    return jnp.where(inside, tree.sums[-1].at[node].get(mode="promise_in_bounds"), 0.0)


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
      ValueError: more than 2**24 rows that may repeat.
    """
    indices = jnp.asarray(indices, jnp.int32)
    values = jnp.broadcast_to(jnp.asarray(values, jnp.float32), indices.shape)
    values = jnp.where(values >= 0, values, jnp.inf)
    written = (indices >= 0) & (indices < tree.capacity)
    if mask is not None:
        written &= mask
    indices, values, written = materialize(indices, values, written)
    sums, levels = tree.sums, _levels(tree.capacity, tree.fanout)
    target = jnp.where(written, levels[-1].start + indices, sums[-1].size)
    if not unique_indices:
        lower, last = _last_occurrence(sums[-1], target, values)
        sums = (*sums[:-1], lower)
        target = jnp.where(last, target, lower.size)
    # Rows that were not written climb from the first leaf: recomputing a sum that has not changed is harmless.
    leaf = jnp.where(written, indices, 0)
    sums = _ascend(levels, sums, target, values, leaf, tree.fanout, jnp.add)
    minima = tree.minima
    if minima is not None:
        values = jnp.where(values > 0, values, jnp.inf)
        # The minimum is never negative. That it is looked at makes the reads of the last update come before the writes
        # of this one; otherwise XLA would copy the minima.
        target = jnp.where(minimum(tree) < 0, 0, target)
        minima = _ascend(levels, minima, target, values, leaf, tree.fanout, jnp.minimum)
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
    num_levels = len(_levels(tree.capacity, tree.fanout))
    leaf, _, _ = _descend(tree, 0, num_levels, None, jnp.maximum(prefix, 0.0).reshape(-1))
    return leaf.reshape(prefix.shape)


@functools.partial(jax.jit, static_argnames=("batch_size", "stratified"))
def sample(tree: SumTree, key: jax.Array, batch_size: int, *, stratified: bool = False) -> tuple[jax.Array, jax.Array]:
    """Draw leaves in proportion to their values, with replacement.

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
def sample_with(tree: SumTree, bits: jax.Array, *, stratified: bool = False) -> tuple[jax.Array, jax.Array]:
    """`sample` with random bits, uint32 [2, batch_size], in place of a key.

    One float32 uniform has 24 bits, too few to tell the leaves of a large tree apart; so the draw is made anew,
    conditional on the node and the stratum reached, half way down.
    """
    mass, num_levels, batch_size = total(tree), len(_levels(tree.capacity, tree.fanout)), bits.shape[1]
    coarse, fine = (bits >> 8).astype(jnp.float32) * 2.0**-24
    if stratified:
        edges = mass * (jnp.arange(batch_size + 1, dtype=jnp.float32) / batch_size)
        low, high = edges[:-1], edges[1:]
    else:
        low, high = jnp.zeros_like(coarse), jnp.full_like(coarse, mass)
    prefix = low + coarse * (high - low)
    half = (num_levels + 1) // 2
    node, rest, value = _descend(tree, 0, half, None, prefix)
    if half < num_levels:
        offset = prefix - rest  # the mass to the left of the node
        low, high = jnp.maximum(low - offset, 0.0), jnp.minimum(high - offset, value)
        rest = low + fine * jnp.maximum(high - low, 0.0)
        node, _, value = _descend(tree, half, num_levels, node, rest)
    return node, value


class _Level(NamedTuple):
    """Where a level lies: nodes `start` to `start + size` of an array, of which the first `used` have leaves below."""

    array: int
    start: int
    size: int
    used: int


def _levels(capacity: int, fanout: int) -> list[_Level]:
    """The levels from the roots to the leaves."""
    used = [capacity]
    while used[0] > fanout:
        used.insert(0, -(-used[0] // fanout))
    levels, size = [], used[0]
    for depth, count in enumerate(used):
        low = depth >= len(used) - 2
        array = 0 if depth == 0 else 2 if low and len(used) > 3 else 1
        start = levels[-1].start + levels[-1].size if levels and levels[-1].array == array else 0
        if depth == len(used) - 1:
            size = count if depth == 0 else used[-2] * fanout
        levels.append(_Level(array, start, size, count))
        size *= fanout
    return levels


def _fold(x: jax.Array, combine: Callable[[jax.Array, jax.Array], jax.Array]) -> jax.Array:
    """Pairwise reduction of the last axis: a rounding error of O(log), and the same bits in every program."""
    while x.shape[-1] > 1:
        half = x.shape[-1] // 2
        pairs = combine(x[..., :half], x[..., half : 2 * half])
        x = jnp.concatenate([pairs, x[..., 2 * half :]], axis=-1) if x.shape[-1] % 2 else pairs
    return x[..., 0]


def _read_rows(array: jax.Array, row: jax.Array, fanout: int) -> jax.Array:
    """The contiguous siblings of row [B], float32 [B, fanout]."""
    numbers = lax.GatherDimensionNumbers(offset_dims=(1,), collapsed_slice_dims=(), start_index_map=(0,))
    mode = lax.GatherScatterMode.PROMISE_IN_BOUNDS
    return lax.gather(array, (row * fanout)[:, None], numbers, (fanout,), mode=mode)


def _ascend(
    levels: list[_Level],
    arrays: tuple[jax.Array, ...],
    target: jax.Array,
    values: jax.Array,
    node: jax.Array,
    fanout: int,
    combine: Callable[[jax.Array, jax.Array], jax.Array],
) -> tuple[jax.Array, ...]:
    """`arrays` with `values` [B] at `target` [B] of the last, and every ancestor of the leaves `node` [B] recomputed."""
    *done, lower = arrays
    done.append(lower.at[target].set(values, mode="drop", unique_indices=True))
    dense = None  # the nodes in use of a level that has been recomputed as a whole
    for level, below in zip(levels[-2::-1], levels[:0:-1], strict=True):
        node, parents = node // fanout, done[level.array]
        if level.used > DENSE * node.size:
            value = _fold(_read_rows(done[below.array], below.start // fanout + node, fanout), combine)
            done[level.array] = parents.at[level.start + node].set(value, mode="promise_in_bounds")
            continue
        if dense is None:
            children = lax.slice(done[below.array], (below.start,), (below.start + level.used * fanout,))
            # The array is not read after this, only written.
            (dense,) = materialize(_fold(children.reshape(level.used, fanout), combine))
        else:
            padding = jnp.full(level.used * fanout - below.used, 0.0 if combine is jnp.add else jnp.inf, jnp.float32)
            dense = _fold(jnp.concatenate([dense, padding]).reshape(level.used, fanout), combine)
        done[level.array] = lax.dynamic_update_slice(parents, dense, (level.start,))
    return tuple(done)


def _descend(
    tree: SumTree, first: int, stop: int, node: jax.Array | None, prefix: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Follow `prefix` [B], float32 and not negative, down the levels from `first` to before `stop`.

    The levels that share an array are one loop: the tree is read inside of loops only, so that the reads come before
    any write that depends on what was found; otherwise XLA would copy the tree.

    Args:
      node: int32 [B], where to begin: numbers within the level above `first`; None above the roots.

    Returns:
      the nodes reached, numbers within their level; what is left of the prefix there; and the nodes' values.
    """
    fanout, levels = tree.fanout, _levels(tree.capacity, tree.fanout)
    value = prefix
    if node is None:
        node, prefix, value = _choose([tree.sums[0][i] for i in range(levels[0].size)], prefix)
        first = 1
    for array in sorted({level.array for level in levels[first:stop]}):
        group = [level for level in levels[first:stop] if level.array == array]
        num_parents = next(level for level in levels if level.array == array).size // fanout

        def down(_, carry, nodes=tree.sums[array], num_parents=num_parents):
            row, prefix, _ = carry
            rows = _read_rows(nodes, row, fanout)
            child, prefix, value = _choose([rows[:, i] for i in range(fanout)], prefix)
            return row * fanout + child + num_parents, prefix, value

        row = group[0].start // fanout + node
        row, prefix, value = lax.fori_loop(0, len(group), down, (row, prefix, value))
        node = row - num_parents - group[-1].start
    return node, prefix, value


def _choose(children: list[jax.Array], prefix: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The child in which `prefix` [B] falls, by halving: never one of value 0 where there is another.

    Args:
      children: values of the children in order, float32 [B] or [] each.
      prefix: float32 [B], not negative.

    Returns:
      the child's number, int32 [B]; what is left of the prefix; and the child's value.
    """
    chosen = jnp.zeros(prefix.shape, jnp.int32)
    while len(children) > 1:
        half = 1 << ((len(children) - 1).bit_length() - 1)
        left, right = children[:half], children[half:]
        left_sum, right_sum = functools.reduce(jnp.add, left), functools.reduce(jnp.add, right)
        go_right = ~(prefix < left_sum) & (right_sum > 0)
        chosen = 2 * chosen + go_right
        prefix = jnp.where(go_right, prefix - left_sum, prefix)
        right = right + [jnp.zeros_like(left_sum)] * (half - len(right))
        children = [jnp.where(go_right, b, a) for a, b in zip(left, right, strict=True)]
    return chosen, prefix, jnp.broadcast_to(children[0], prefix.shape)


def _last_occurrence(leaves: jax.Array, target: jax.Array, values: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Which rows are the last of their `target`, bool [B], so that the order of a scatter does not matter.

    The leaves themselves serve as scratch space (they are about to be overwritten): numbers below any leaf's, lower for
    later rows, are combined there by a minimum, which has one result in any order. Neither a sort nor O(capacity) scratch
    is needed.
    """
    rows = target.shape[0]
    if rows > 2**24:
        raise ValueError(f"batch of {rows} rows: at most {2**24} rows may repeat indices; update in parts.")
    # The values are never less. That they are looked at makes whatever they were read from the tree for come before this
    # write; otherwise XLA would copy the leaves.
    number = jnp.minimum(values, -1.0 - jnp.arange(rows, dtype=jnp.float32))
    leaves = leaves.at[target].min(number, mode="drop")
    return leaves, leaves.at[target].get(mode="fill", fill_value=0.0) == number
