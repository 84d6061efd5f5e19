"""Sum tree: a discrete distribution over `capacity` leaves that is cheap to update and to sample.

This is the tree of Schaul et al. 2016 (Prioritized Experience Replay, appendix B.2.1) with a static fan-out and no
stored differences. After leaves are written, every node above them is recomputed as the sum of its children. The sums
therefore never drift, and a bad leaf leaves no trace once it is overwritten.

There are at most `fanout` roots (four times as many with fan-out 64, the default on a GPU), and every node above the
leaves has `fanout` children. Nodes are stored in order, so siblings are contiguous, and index arithmetic finds parents
and children. Each level is a separate array, and leaves keep their natural order.

The levels are unrolled: a loop over them was measured (tests/benchmarks/README.md, "A loop over the levels").

All functions are pure, jitted, and work under `jax.jit`, `lax.scan` and `jax.vmap`. `update`, `find` and `sample` cost
O(batch * fanout * log(capacity)).
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from jaxreplay._common import checks, devices, random, ring, shown, xla
from jaxreplay.sum_tree import _levels
from jaxreplay.sum_tree._fading import Fading
from jaxreplay.sum_tree._levels import NONE
from jaxreplay.sum_tree._restricted import Restricted, in_run

# Measured on a CPU, estimated from compiled programs on the others: tests/benchmarks/README.md.
DEFAULT_FANOUTS = {"cpu": 8, "tpu": 128}  # 64 on all other backends


@struct.dataclass
class SumTree(shown.Shown):
    """The nodes of a sum tree; `init` makes one.

    Attributes:
      sums: levels from the roots to the leaves, float32 [num_nodes] each. In a wide tree siblings form the rows of a
        matrix [rows, fanout] (the roots [1, num_roots]). Every level below the roots is padded with 0 to a multiple of
        the fan-out.
      minima: None, or levels of the same shapes: each node's smallest positive leaf, or the largest float32 if it has
        none.
      capacity: number of leaves (static).
      fanout: children per node (static).
      maxima: None, or levels of the same shapes, without the leaves: each node's largest leaf.
      fading: None, or ages of the leaves, by which sums and minima fade (`jaxreplay.sum_tree._fading`).

    Examples:
      >>> tree = jr.sum_tree.init(4)
      >>> tree = jr.sum_tree.update(tree, np.arange(4), np.array([1.0, 2.0, 3.0, 4.0]))
      >>> float(jr.sum_tree.total(tree)), jr.sum_tree.leaves(tree).tolist()
      (10.0, [1.0, 2.0, 3.0, 4.0])
    """

    sums: tuple[jax.Array, ...]
    minima: tuple[jax.Array, ...] | None
    capacity: int = struct.field(pytree_node=False)
    fanout: int = struct.field(pytree_node=False)
    maxima: tuple[jax.Array, ...] | None = None
    fading: Fading | None = None


def default_fanout(backend: str | None = None, /) -> int:
    """Best fan-out on a backend; None for that of `jax.default_device`, or JAX's default backend.

    Examples:
      >>> [jr.sum_tree.default_fanout(backend) for backend in ("cpu", "gpu", "tpu")]
      [8, 64, 128]
    """
    return DEFAULT_FANOUTS.get(backend or devices.backend_of(), 64)


def chosen_fanout(fanout: int | None, arrays: Any = ()) -> int:
    """`fanout`, checked; by default the best on the devices of `arrays`."""
    fanout = default_fanout(devices.backend_of(arrays)) if fanout is None else fanout
    return checks.check_integer("fanout", fanout, 2, 1024, "the number of children of a node")


def init(
    capacity: int, *, fanout: int | None = None, track_minimum: bool = False, track_maximum: bool = False
) -> SumTree:
    """A tree of `capacity` leaves, all 0.

    Args:
      capacity: number of leaves, 1 to 2**29.
      fanout: children per node, 2 to 1024; None for `default_fanout()`.
      track_minimum: also keep the smallest positive leaf, for `minimum`.
      track_maximum: also keep the largest leaf, for `maximum`.

    Raises:
      ValueError: `capacity` or `fanout` is out of range.

    Examples:
      >>> tree = jr.sum_tree.init(100, fanout=8)
      >>> # 100 leaves and padding; 13 nodes and padding; 2 roots.
      >>> [level.size for level in tree.sums]
      [2, 16, 104]
    """
    capacity = checks.check_integer("capacity", capacity, 1, ring.MAX_CAPACITY, "the number of leaves")
    fanout = chosen_fanout(fanout)
    shapes = [_levels.shape(size, fanout) for size in _levels.sizes(capacity, fanout)]
    sums = tuple(xla.full(shape, 0, jnp.float32) for shape in shapes)
    minima = tuple(xla.full(shape, NONE, jnp.float32) for shape in shapes) if track_minimum else None
    maxima = tuple(xla.full(shape, 0, jnp.float32) for shape in shapes[:-1]) if track_maximum else None
    return SumTree(sums, minima, capacity, fanout, maxima)


def leaves(tree: SumTree) -> jax.Array:
    """All leaves in order, float32 [capacity]; [..., capacity] if the levels have leading axes.

    Examples:
      >>> tree = jr.sum_tree.init(4)
      >>> tree = jr.sum_tree.update(tree, np.array([3, 1]), np.array([5.0, 7.0]))
      >>> jr.sum_tree.leaves(tree).tolist()
      [0.0, 7.0, 0.0, 5.0]
    """
    lowest = tree.sums[-1]
    lowest = lowest.reshape(*lowest.shape[:-2], -1) if tree.fanout > _levels.WIDE else lowest
    return lowest[..., : tree.capacity]


@functools.partial(jax.jit, inline=True)
def total(tree: SumTree | Restricted) -> jax.Array:
    """Sum of the leaves, float32 [].

    Examples:
      >>> tree = jr.sum_tree.init(4)
      >>> tree = jr.sum_tree.update(tree, np.array([3, 1]), np.array([5.0, 7.0]))
      >>> float(jr.sum_tree.total(tree))
      12.0
    """
    tree, roots, _ = in_run(tree, "sums", 0.0)
    return _levels.fold_roots(roots, jnp.add, tree.fanout)


@functools.partial(jax.jit, inline=True)
def minimum(tree: SumTree | Restricted) -> jax.Array:
    """Smallest positive leaf, float32 []; inf if there is none.

    Raises:
      ValueError: the tree does not track its minimum.

    Examples:
      >>> tree = jr.sum_tree.init(4, track_minimum=True)
      >>> tree = jr.sum_tree.update(tree, np.array([3, 1]), np.array([5.0, 7.0]))
      >>> float(jr.sum_tree.minimum(tree))  # leaves of value 0 do not count
      5.0
    """
    if tree.minima is None:
        raise ValueError("track_minimum=False: this tree keeps no minimum; make it with init(..., track_minimum=True).")
    tree, roots, _ = in_run(tree, "minima", NONE)
    smallest = _levels.fold_roots(roots, jnp.minimum, tree.fanout)
    return jnp.where(smallest < NONE, smallest, jnp.inf)


@functools.partial(jax.jit, inline=True)
def maximum(tree: SumTree) -> jax.Array:
    """Largest leaf, float32 [].

    Raises:
      ValueError: the tree does not track its maximum.

    Examples:
      >>> tree = jr.sum_tree.init(4, track_maximum=True)
      >>> tree = jr.sum_tree.update(tree, np.array([3, 1]), np.array([5.0, 7.0]))
      >>> float(jr.sum_tree.maximum(tree))
      7.0
    """
    if tree.maxima is None:
        raise ValueError("track_maximum=False: this tree keeps no maximum; make it with init(..., track_maximum=True).")
    return _levels.fold_roots((*tree.maxima, tree.sums[-1])[0], jnp.maximum, tree.fanout)


@xla.copies_numpy
@jax.jit
def get(tree: SumTree, indices: jax.Array) -> jax.Array:
    """Values of the leaves `indices` (int [...]), float32 [...]; 0 for an index outside [0, capacity).

    Raises:
      ValueError: `indices` are not integers.

    Examples:
      >>> tree = jr.sum_tree.init(4)
      >>> tree = jr.sum_tree.update(tree, np.array([3, 1]), np.array([5.0, 7.0]))
      >>> jr.sum_tree.get(tree, np.array([1, 9])).tolist()  # there is no leaf 9
      [7.0, 0.0]
    """
    indices = checks.check_indices(indices, num_axes=None)
    inside = (indices >= 0) & (indices < tree.capacity)
    leaf = _levels.at(tree.sums[-1], jnp.where(inside, indices, 0))
    return jnp.where(inside, leaf.get(mode="promise_in_bounds", wrap_negative_indices=False), 0.0)


@xla.copies_numpy
@functools.partial(jax.jit, static_argnames="unique_indices")
def update(
    tree: SumTree, indices: jax.Array, values: jax.Array, *, mask: jax.Array | None = None, unique_indices: bool = False
) -> SumTree:
    """Set leaves and recompute the sums above them.

    If an index occurs more than once, its last occurrence wins, on every backend and in every run.

    Args:
      tree: the tree.
      indices: int [B]; an index outside [0, capacity) is ignored.
      values: float [B], not negative. Anything else, such as NaN, is stored as infinity, and the total is infinite
        until that leaf is overwritten.
      mask: bool [B]; rows where it is False are ignored.
      unique_indices: promise that no index occurs twice, which saves the search for the last occurrence.

    Raises:
      ValueError: `indices` are not integers, `mask` is not bool [B], or more than 2**24 rows may repeat indices.

    Examples:
      >>> tree = jr.sum_tree.init(4)
      >>> tree = jr.sum_tree.update(tree, np.array([2, 2]), np.array([jnp.nan, 1.0]))
      >>> float(jr.sum_tree.total(tree))  # the last occurrence of leaf 2
      1.0
    """
    indices = checks.check_indices(indices, num_axes=None)
    values = jnp.broadcast_to(jnp.asarray(values, jnp.float32), indices.shape)
    values = jnp.where(values >= 0, values, jnp.inf)
    written = (indices >= 0) & (indices < tree.capacity)
    if mask is not None:
        written &= checks.check_mask(mask, indices.shape)
    # The roots depend on the whole previous update, so all its reads come before this write.
    bare = dataclasses.replace(tree, fading=None)
    extremes = [() if tree.minima is None else minimum(bare), () if tree.maxima is None else maximum(tree)]
    indices = xla.after(indices, total(bare), extremes)
    sums, nowhere = tree.sums, tree.sums[-1].size
    target, values = xla.materialize(jnp.where(written, indices, nowhere), values)
    # Rows that write nothing ascend from the first leaf; recomputing an unchanged sum is harmless.
    leaf = jnp.where(target < nowhere, target, 0)
    if not unique_indices:
        lowest, last = _levels.last_writes(sums[-1], target, values, tree.fanout)
        sums = (*sums[:-1], lowest)
        target = jnp.where(last, target, nowhere)
    sums = _levels.ascend(sums, target, values, leaf, tree.fanout, jnp.add, tree.fading)
    minima, maxima = tree.minima, tree.maxima
    if minima is not None:
        values = jnp.where(values > 0, values, NONE)
        minima = _levels.ascend(minima, target, values, leaf, tree.fanout, jnp.minimum, tree.fading)
    if maxima is not None:
        maxima = _levels.ascend((*maxima, sums[-1]), None, values, leaf, tree.fanout, jnp.maximum)[:-1]
    return dataclasses.replace(tree, sums=sums, minima=minima, maxima=maxima)


@xla.copies_numpy
@jax.jit
def find(tree: SumTree | Restricted, prefix: jax.Array) -> jax.Array:
    """First leaf whose inclusive cumulative sum exceeds `prefix`.

    While the total is positive, a leaf of value 0 is never found, despite rounding. A prefix below 0 finds the first
    positive leaf, and one at or above the total finds the last.

    Args:
      tree: the tree, restricted or not.
      prefix: float [...], in [0, total).

    Returns:
      int32 [...].

    Examples:
      >>> tree = jr.sum_tree.init(4)
      >>> tree = jr.sum_tree.update(tree, np.arange(4), np.array([1.0, 2.0, 3.0, 4.0]))
      >>> jr.sum_tree.find(tree, np.array([0.0, 0.5, 1.0, 2.5, 3.0, 7.0])).tolist()
      [0, 0, 1, 1, 2, 3]
    """
    prefix = jnp.asarray(prefix, jnp.float32)
    tree, roots, patches = in_run(tree, "sums", 0.0)
    root = _levels.choose_root(roots, jnp.maximum(prefix, 0.0).reshape(-1))
    leaf, _, _ = _levels.descend(tree.sums[1:], root, tree.fanout, patches)
    return leaf.reshape(prefix.shape)


@functools.partial(jax.jit, static_argnames=("batch_size", "stratified"))
def sample(tree: SumTree, key: jax.Array, batch_size: int, *, stratified: bool = False) -> tuple[jax.Array, jax.Array]:
    """Draw leaves in proportion to their values, with replacement.

    The probability of leaf i is leaf_i / total to within 2^-21, the error of sums and prefixes in float32 (if
    stratified, the mean probability over the batch). If some leaves are millions of times larger than others, the small
    ones may be drawn several times too often, or never. With 2^24 equal leaves, each is drawn at the right frequency to
    within 0.1%.

    Args:
      tree: the tree; the probabilities hold if its total is positive and finite.
      key: a PRNG key.
      batch_size: number of draws.
      stratified: draw once from each of `batch_size` equal parts of [0, total) (Schaul et al. 2016, appendix B.2.1)
        instead of independently.

    Returns:
      the indices of the leaves, int32 [batch_size], in ascending order of the strata if stratified; and their values,
      float32 [batch_size].

    Examples:
      >>> tree = jr.sum_tree.init(4)
      >>> tree = jr.sum_tree.update(tree, np.array([3, 1]), np.array([1.0, 3.0]))
      >>> indices, values = jr.sum_tree.sample(tree, jax.random.key(0), 4, stratified=True)
      >>> indices.tolist(), values.tolist()  # leaf 1 has three quarters of the total
      ([1, 1, 1, 3], [3.0, 3.0, 3.0, 1.0])
    """
    return sample_with(tree, random.random_bits(key, batch_size), stratified=stratified)


@functools.partial(jax.jit, static_argnames="stratified")
def sample_with(tree: SumTree | Restricted, bits: Any, *, stratified: bool = False) -> tuple[jax.Array, jax.Array]:
    """`sample` with random bits, two uint32 [batch_size], instead of a key.

    One float32 uniform has 24 bits, too few to distinguish the leaves of a large tree. So a second uniform is drawn
    halfway down, conditional on the node and the stratum reached.

    With total 8 and batch size 2, row 1 has the stratum from 4 to 8. A uniform of 0.25 gives the prefix 5. If that is
    in a node of value 3 with 4 before it, the row's part of the node is from 4 - 4 = 0 to min(8 - 4, 3) = 3, in which
    the second uniform chooses.

    Examples:
      >>> tree = jr.sum_tree.init(4)
      >>> tree = jr.sum_tree.update(tree, np.array([3, 1]), np.array([1.0, 3.0]))
      >>> # Uniforms 0, a half, and almost 1.
      >>> bits = np.array([[0, 2**31, 2**32 - 1]] * 2, jnp.uint32)
      >>> jr.sum_tree.sample_with(tree, tuple(bits))[0].tolist()
      [1, 1, 3]
    """
    coarse, fine = ((words >> 8).astype(jnp.float32) * 2.0**-24 for words in bits)
    mass, batch_size = total(tree), coarse.size
    low, high = jnp.zeros_like(coarse), jnp.full_like(coarse, mass)
    if stratified:
        stratum = jnp.arange(batch_size, dtype=jnp.float32)
        low, high = mass * (stratum / batch_size), mass * ((stratum + 1) / batch_size)
    # Computed once, so that the index of a leaf and its value come from the same rounding of the prefix.
    (prefix,) = xla.materialize(low + coarse * (high - low))
    tree, roots, patches = in_run(tree, "sums", 0.0)
    lower_levels = tree.sums[1:]
    half = len(lower_levels) // 2
    root = _levels.choose_root(roots, prefix)
    node, rest, value = _levels.descend(lower_levels[:half], root, tree.fanout, patches[:half])
    if lower_levels:
        offset = prefix - rest  # the mass to the left of the node
        low, high = jnp.maximum(low - offset, 0.0), jnp.minimum(high - offset, value)
        (rest,) = xla.materialize(low + fine * jnp.maximum(high - low, 0.0))
        node, _, value = _levels.descend(lower_levels[half:], (node, rest, value), tree.fanout, patches[half:])
    return node, value


def of_leaves(leaves: jax.Array, *, fanout: int | None = None, track_minimum: bool = False) -> SumTree:
    """A tree of these leaves: bit for bit `init`, then `update` of all leaves, in one pass.

    Args:
      leaves: number [capacity], not negative. Anything else, such as NaN, is stored as infinity.
      fanout: children per node, 2 to 1024; None for the best on the devices of `leaves`.
      track_minimum: also keep the smallest positive leaf, for `minimum`.

    Raises:
      ValueError: `leaves` are not a vector of 1 to 2**29 entries, or `fanout` is out of range.

    Examples:
      >>> tree = jr.sum_tree.of_leaves(np.array([1.0, 2.0, 3.0, 4.0]))
      >>> float(jr.sum_tree.total(tree)), jr.sum_tree.leaves(tree).tolist()
      (10.0, [1.0, 2.0, 3.0, 4.0])
    """
    return _of_leaves(leaves, chosen_fanout(fanout, leaves), track_minimum)


@xla.copies_numpy
@functools.partial(jax.jit, static_argnums=(1, 2))
def _of_leaves(leaves: jax.Array, fanout: int, track_minimum: bool) -> SumTree:
    leaves = jnp.asarray(leaves, jnp.float32)
    if leaves.ndim != 1 or not 1 <= leaves.size <= ring.MAX_CAPACITY:
        raise ValueError(f"leaves: got shape {list(leaves.shape)}, expected a vector of 1 to {ring.MAX_CAPACITY}.")
    leaves = jnp.where(leaves >= 0, leaves, jnp.inf)
    return _built(leaves, fanout, track_minimum, False, None)


@functools.partial(jax.jit, static_argnums=(1, 2, 3))
def _built(leaves: jax.Array, fanout: int, track_minimum: bool, track_maximum: bool, fading: Any) -> SumTree:
    """A tree of leaves [..., capacity]."""
    capacity = leaves.shape[-1]
    build = functools.partial(_levels.build, capacity=capacity, fanout=fanout, fading=fading)
    positive = jnp.where(leaves > 0, leaves, NONE)
    minima = build(positive, combine=jnp.minimum, empty=NONE) if track_minimum else None
    maxima = build(leaves, combine=jnp.maximum, empty=0.0, fading=None)[:-1] if track_maximum else None
    return SumTree(build(leaves, combine=jnp.add, empty=0.0), minima, capacity, fanout, maxima, fading)


def of_rows(empty: SumTree, leaves: np.ndarray) -> SumTree:
    """Trees like `empty`, one for each row of `leaves` [D, capacity], as one with NumPy arrays [D, ...]."""
    trees = [update(empty, np.arange(row.size), row, unique_indices=True) for row in leaves]
    return jax.tree.map(lambda *x: np.stack(x), *trees)


def with_fanout(tree: SumTree, fanout: int | None = None) -> SumTree:
    """Rebuild a tree with another fan-out; None for the best on its devices.

    The levels may have leading axes, as in a stack of trees. Costs O(capacity).

    Examples:
      >>> tree = jr.sum_tree.with_fanout(jr.sum_tree.init(300, fanout=8), 64)
      >>> [level.size for level in tree.sums]
      [5, 320]
    """
    fanout = chosen_fanout(fanout, tree)
    tracks = tree.minima is not None, tree.maxima is not None
    return tree if fanout == tree.fanout else _built(leaves(tree), fanout, *tracks, tree.fading)


def emptied(tree: SumTree) -> SumTree:
    """An empty tree like `tree`, written in its place where XLA can."""
    sums, maxima = jax.tree.map(lambda x: jnp.minimum(x, 0.0), (tree.sums, tree.maxima))
    minima = jax.tree.map(lambda x: jnp.maximum(x, NONE), tree.minima)
    return dataclasses.replace(tree, sums=sums, minima=minima, maxima=maxima)


def on_backend(trees: Any, state: Any, backend: str) -> Any:
    """For `jaxreplay._common.layouts.BackendState`: a pytree whose trees have the best fan-out on a backend."""

    def converted(x: Any) -> Any:
        return with_fanout(x, default_fanout(backend)) if isinstance(x, SumTree) else x

    return jax.tree.map(converted, trees, is_leaf=lambda x: isinstance(x, SumTree))
