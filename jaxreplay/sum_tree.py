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
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from jaxreplay import _levels, _restricted
from jaxreplay._common import checks
from jaxreplay._common.checks import check_integer
from jaxreplay._common.random import random_bits
from jaxreplay._common.xla import after, materialize
from jaxreplay._restricted import Restricted

# Measured on a CPU, and compiled for the others: tests/benchmarks/README.md.
DEFAULT_FANOUTS = {"cpu": 8, "tpu": 128}
DEFAULT_FANOUT = 64  # of all other backends
MAX_CAPACITY = 2**29
NONE = float(np.finfo(np.float32).max)  # the minimum of no leaves: finite, as jax_debug_infs wants what programs return


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
        return self.fanout > _levels.WIDE


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
    shapes = [_levels.shape(size, fanout) for size in _levels.sizes(capacity, fanout)]
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
        for size in reversed(_levels.sizes(tree.capacity, fanout)):
            if levels:
                nodes = _levels.fold(levels[0].reshape(*leading, -1, fanout), combine, fanout >= _levels.WIDE)
            padding = [(0, 0)] * len(leading) + [(0, size - nodes.shape[-1])]
            nodes = jnp.pad(nodes, padding, constant_values=empty)
            levels.insert(0, nodes.reshape(*leading, *_levels.shape(size, fanout)))
        return tuple(levels)

    minima = None if tree.minima is None else built(_leaves(tree, tree.minima), jnp.minimum, NONE)
    return SumTree(built(leaves(tree), jnp.add, 0.0), minima, tree.capacity, fanout)


@functools.partial(jax.jit, inline=True)
def total(tree: SumTree | Restricted) -> jax.Array:
    """Sum of the leaves, float32 []."""
    tree, roots, _ = _sums(tree)
    return _fold_roots(tree, roots, jnp.add)


@functools.partial(jax.jit, inline=True)
def minimum(tree: SumTree | Restricted) -> jax.Array:
    """Smallest positive leaf, float32 []; inf when there is none.

    Raises:
      ValueError: the tree was made without `track_minimum=True`.
    """
    if tree.minima is None:
        raise ValueError("track_minimum=False: this tree keeps no minimum; make it with init(..., track_minimum=True).")
    whole, roots = (tree, tree.minima[0]) if isinstance(tree, SumTree) else (tree.tree, tree.tree.minima[0])
    if isinstance(tree, Restricted):
        roots = _restricted.patches(tree, tree.minima, NONE)[0](roots, 0).reshape(roots.shape)
    smallest = _fold_roots(whole, roots, jnp.minimum)
    return jnp.where(smallest < NONE, smallest, jnp.inf)


@jax.jit
def get(tree: SumTree, indices: jax.Array) -> jax.Array:
    """Values of the leaves `indices` (int [...]), float32 [...]; 0 for an index outside [0, capacity).

    Raises:
      ValueError: `indices` are no integers.
    """
    indices = _as_indices(indices)
    inside = (indices >= 0) & (indices < tree.capacity)
    found = _levels.at(tree.sums[-1], jnp.where(inside, indices, 0)).get(
        mode="promise_in_bounds", wrap_negative_indices=False
    )
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
        lowest, last = _levels.last_occurrence(sums[-1], target, values, tree.fanout)
        sums = (*sums[:-1], lowest)
        target = jnp.where(last, target, nowhere)
    sums = _levels.ascend(sums, target, values, leaf, tree.fanout, jnp.add)
    minima = tree.minima
    if minima is not None:
        values = jnp.where(values > 0, values, NONE)
        minima = _levels.ascend(minima, target, values, leaf, tree.fanout, jnp.minimum)
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
    leaf, _, _ = _levels.descend(below, _levels.choose_root(roots, jnp.maximum(prefix, 0.0).reshape(-1)), tree.fanout)
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
def sample_with(tree: SumTree | Restricted, bits: Any, *, stratified: bool = False) -> tuple[jax.Array, jax.Array]:
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
    tree, roots, patches = _sums(tree)
    below = tree.sums[1:]
    half = len(below) // 2
    node, rest, value = _levels.descend(below[:half], _levels.choose_root(roots, prefix), tree.fanout, patches[:half])
    if below:
        offset = prefix - rest  # the mass to the left of the node
        low, high = jnp.maximum(low - offset, 0.0), jnp.minimum(high - offset, value)
        rest = low + fine * jnp.maximum(high - low, 0.0)
        node, _, value = _levels.descend(below[half:], (node, rest, value), tree.fanout, patches[half:])
    return node, value


@jax.jit
def restrict(tree: SumTree, start: jax.Array, size: jax.Array) -> Restricted:
    """The tree for draws from a run of its leaves alone, with the `total` and the `minimum` of that run.

    Draws are as exact as from a tree that holds the run and nothing else. Costs O(fanout * log(capacity)).

    Args:
      tree: the tree.
      start: int32 [], the run's first leaf; the run goes on at leaf 0 behind the last one.
      size: int32 [], its number of leaves, 0 to the capacity.
    """
    return _restricted.restrict(tree, start, size, NONE)


def _sums(tree: SumTree | Restricted) -> tuple[SumTree, jax.Array, list[Any]]:
    """The tree, the roots that count, and what sets the nodes of each level below them to what they count for."""
    if isinstance(tree, SumTree):
        return tree, tree.sums[0], []
    patches = _restricted.patches(tree, tree.sums, 0.0)
    roots = tree.tree.sums[0]
    return tree.tree, patches[0](roots, 0).reshape(roots.shape), patches[1:]


def _as_indices(indices: Any) -> jax.Array:
    indices = checks.as_int32(indices)
    if indices.dtype != jnp.int32:
        raise ValueError(f"indices: got {checks.type_text(indices.dtype, indices.shape)}, expected integers.")
    return jnp.asarray(indices)


def _fold_roots(tree: SumTree, roots: jax.Array, combine: Callable[[jax.Array, jax.Array], jax.Array]) -> jax.Array:
    folded = _levels.fold(roots, combine, tree.is_wide)
    return folded[..., 0] if tree.is_wide else folded
