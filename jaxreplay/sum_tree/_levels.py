"""Levels of a sum tree: their shapes, the ascent after a write, and the descent to a leaf.

A level is an array of nodes, [num_nodes]. In a wide tree it is a matrix whose rows are siblings, which suits a TPU.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxreplay._common import duplicates, xla

WIDE = 64  # from this fan-out on, siblings are reduced in one operation; above it, levels are matrices
GROUPS = 4  # groups of siblings that are roots of a tree of fan-out WIDE, searched in one kernel
DENSE = 4  # a level with at most this many parents per row of the batch is recomputed whole; measured
FEW = 256  # and one with at most this many parents at all
NONE = float(np.finfo(np.float32).max)  # the minimum of no leaves; finite, so it passes jax_debug_infs

Levels = tuple[jax.Array, ...]
Combine = Callable[[jax.Array, jax.Array], jax.Array]
Found = tuple[jax.Array, jax.Array, jax.Array]  # [B]: nodes, int32; remaining prefixes; node values


def shape(size: int, fanout: int) -> tuple[int, ...]:
    """Shape of a level of `size` nodes."""
    return (-(-size // fanout), min(size, fanout)) if fanout > WIDE else (size,)


def sizes(capacity: int, fanout: int) -> list[int]:
    """Padded number of nodes in each level, from the roots down.

    With fan-out WIDE, which suits a GPU, there may be several groups of roots, each as wide as siblings. A GPU then
    draws and updates in one kernel less than with the sums of these groups as another level.
    """
    nodes = [capacity]
    while nodes[0] > (GROUPS * fanout if fanout == WIDE else fanout):
        nodes.insert(0, -(-nodes[0] // fanout))
    roots = nodes[0] if nodes[0] <= fanout else -(-nodes[0] // fanout) * fanout
    return [roots, *(parents * fanout for parents in nodes[:-1])]


def build(nodes: jax.Array, capacity: int, fanout: int, combine: Combine, empty: float, fading: Any) -> Levels:
    """Levels from the roots to the leaves `nodes` [..., capacity]; `empty` is the value of no leaves."""
    levels, leading = [], nodes.shape[:-1]
    for height, size in enumerate(reversed(sizes(capacity, fanout)), -1):
        if levels:
            nodes = _parents(levels[0].reshape(*leading, -1, fanout), None, combine, fading, height)
        nodes = jnp.pad(nodes, [(0, 0)] * len(leading) + [(0, size - nodes.shape[-1])], constant_values=empty)
        levels.insert(0, nodes.reshape(*leading, *shape(size, fanout)))
    return tuple(levels)


def _parents(rows: jax.Array, node: jax.Array | None, combine: Combine, fading: Any, height: int) -> jax.Array:
    """Values of the parents `node` [K], by default all in order, of siblings `rows` [..., K, fanout] at `height`."""
    if fading is not None:
        node = jnp.arange(rows.shape[-2], dtype=jnp.int32) if node is None else node
        factor = fading.factors(node, height, rows.shape[-1])
        rows = fading.faded(rows, factor, 0.0 if combine is jnp.add else NONE)
    return fold(rows, combine, rows.shape[-1] >= WIDE)


def fold(x: jax.Array, combine: Combine, at_once: bool) -> jax.Array:
    """Reduce the last axis, in one operation if `at_once`, else pairwise.

    Pairwise, the rounding error is O(log size), and the result is the same on every backend, bit for bit.
    """
    if at_once:
        reduce = jnp.sum if combine is jnp.add else jnp.min if combine is jnp.minimum else jnp.max
        return reduce(x, axis=-1)
    columns = [x[..., i] for i in range(x.shape[-1])]
    while len(columns) > 1:
        half = len(columns) // 2
        columns = [combine(columns[i], columns[half + i]) for i in range(half)] + columns[2 * half :]
    return columns[0]


def fold_roots(roots: jax.Array, combine: Combine, fanout: int) -> jax.Array:
    """Combine all roots, float32 []."""
    if fanout > WIDE:
        roots = fold(roots, combine, True)
    elif roots.shape[-1] > WIDE:
        roots = fold(roots.reshape(*roots.shape[:-1], -1, WIDE), combine, True)
    return fold(roots, combine, False)


def at(nodes: jax.Array, index: jax.Array) -> Any:
    """`nodes.at[index]` for nodes `index` [B] of a level."""
    if nodes.ndim == 1:
        return nodes.at[index]
    return nodes.at[jax.lax.div(index, jnp.int32(nodes.shape[1])), jax.lax.rem(index, jnp.int32(nodes.shape[1]))]


@functools.partial(jax.jit, static_argnames="fanout")
def read_rows(nodes: jax.Array, row: jax.Array, fanout: int) -> jax.Array:
    """Siblings in each `row` [B] of a level, float32 [B, fanout]."""
    if nodes.ndim == 2:
        return nodes.at[row].get(mode="promise_in_bounds", wrap_negative_indices=False)
    numbers = jax.lax.GatherDimensionNumbers(offset_dims=(1,), collapsed_slice_dims=(), start_index_map=(0,))
    mode = jax.lax.GatherScatterMode.PROMISE_IN_BOUNDS
    return jax.lax.gather(nodes, (row * fanout)[:, None], numbers, (fanout,), mode=mode)


def ascend(
    levels: Levels, target: Any, values: jax.Array, node: jax.Array, fanout: int, combine: Combine, fading: Any = None
) -> Levels:
    """Write `values` [B] to leaves `target` [B], or none, and recompute all ancestors of leaves `node` [B]."""
    *above, lowest = levels
    if target is not None:
        lowest = at(lowest, target).set(values, mode="drop", unique_indices=True, wrap_negative_indices=False)
    done = [lowest]
    for height, parents in enumerate(reversed(above)):
        children = done[0]
        node = xla.compute_once(_parents_of, node, fanout=fanout)
        if children.size // fanout <= max(DENSE * node.size, FEW):
            static = {"fanout": fanout, "combine": combine, "height": height}
            parents = xla.compute_once(_recomputed, parents, children, fading, **static)
        else:
            value = xla.compute_once(read_rows, children, node, fanout=fanout)
            value = _parents(value, node, combine, fading, height)
            parents = at(parents, node).set(value, mode="promise_in_bounds", wrap_negative_indices=False)
        done.insert(0, parents)
    return tuple(done)


@functools.partial(jax.jit, static_argnames="fanout")
def _parents_of(node: jax.Array, *, fanout: int) -> jax.Array:
    return jax.lax.div(node, jnp.int32(fanout))


@functools.partial(jax.jit, static_argnames=("fanout", "combine", "height"))
def _recomputed(
    parents: jax.Array, children: jax.Array, fading: Any, *, fanout: int, combine: Combine, height: int
) -> jax.Array:
    """A level, recomputed whole from the level below it; its padding stays."""
    num_parents = children.size // fanout
    value = _parents(children.reshape(num_parents, fanout), None, combine, fading, height)
    return jnp.concatenate([value, parents.reshape(-1)[num_parents:]]).reshape(parents.shape)


def descend(levels: Sequence[jax.Array], found: Found, fanout: int, patches: Sequence[Any] = ()) -> Found:
    """Descend from the nodes `found` through the `levels` below them, along each remaining prefix.

    `patches` is empty, or has a function for each level. It takes siblings [B, fanout] and the index of the first in
    each row [B], and returns their values in a restricted or fading tree.

    The results of a level are materialized together, so that every read of the tree precedes any write that depends on
    one of them. Otherwise XLA would copy the tree.
    """
    for level, nodes in enumerate(levels):
        node, prefix, _ = found
        rows = read_rows(nodes, node, fanout)
        if patches:
            rows = patches[level](rows, node * fanout)
        if nodes.ndim == 2:
            child, prefix, value = choose_in_rows(rows, prefix)
        else:
            child, prefix, value = choose([rows[:, i] for i in range(fanout)], prefix)
        found = xla.materialize(node * fanout + child, prefix, value)
    return found


def choose_root(roots: jax.Array, prefix: jax.Array) -> Found:
    """Find the root that each `prefix` [B] falls in."""
    if roots.ndim == 2:
        return choose_in_rows(jnp.broadcast_to(roots, (prefix.size, roots.size)), prefix)
    group_sums = roots if roots.size <= WIDE else fold(roots.reshape(-1, WIDE), jnp.add, True)
    found = choose([group_sums[i] for i in range(group_sums.size)], prefix)
    if roots.size <= WIDE:
        return xla.materialize(*found)
    group, prefix, _ = found
    children = [roots[i] for i in range(WIDE)]
    # Selected instead of gathered, which would be another kernel.
    for number in range(1, group_sums.size):
        children = [jnp.where(group == number, roots[number * WIDE + i], x) for i, x in enumerate(children)]
    child, prefix, value = choose(children, prefix)
    return group * WIDE + child, prefix, value


def choose_in_rows(rows: jax.Array, prefix: jax.Array) -> Found:
    """`choose` by the cumulative sums of `rows` [B, num_children].

    One reduction finds the child of lowest rank, its value and the sum of the children before it. Positive children
    whose cumulative sum exceeds the prefix rank first, from the left. The other positive children follow, from the
    right. Children of value 0 rank last.

    Children 1, 0, 2 have the sums 1, 1, 3. With prefix 1.5 child 2 ranks 2, as 3 exceeds it. Child 0 ranks 2 * 3 - 0 =
    6, and child 1, of value 0, ranks 3 * 3 + 1 = 10. So child 2 is found, with 1 before it, and 0.5 remains.
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
    _, child, before, value = jax.lax.reduce(operands, empty, lower, (1,))
    return child, jnp.maximum(prefix - before, 0.0), value


def choose(children: list[jax.Array], prefix: jax.Array) -> Found:
    """Find the child that `prefix` (float32 [B], not negative) falls in, by bisection.

    `children` are the values in order, float32 [B] or []. A child of value 0 is chosen only if all are 0.
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


def last_writes(leaves: jax.Array, target: jax.Array, values: jax.Array, fanout: int) -> tuple[jax.Array, jax.Array]:
    """The leaves, possibly used as scratch space; and True for the last row of each `target`, bool [B].

    If only these rows are written, the order of a scatter does not matter. For a small batch of a wide tree, one kernel
    compares all pairs. Otherwise the leaves that are about to be overwritten serve as scratch space: a scatter-minimum
    writes negative numbers to them, lower for later rows, and its result does not depend on the order. This needs
    neither a sort nor O(capacity) scratch space.

    If rows 0 and 2 name leaf 5, they write -1 and -3 there, and -3 stays. Row 2 then finds its own number, row 0 not.
    """
    rows = target.shape[0]
    if rows > 2**24:
        raise ValueError(f"batch of {rows} rows: at most {2**24} rows may repeat indices; update in parts.")
    if fanout >= WIDE and rows <= duplicates.ALL_PAIRS:
        return leaves, duplicates.last_by_pairs(target)
    # No value is negative, so the minimum does not depend on the values. They make XLA place this write after all
    # reads that they were computed from; otherwise it would copy the leaves.
    number = jnp.minimum(values, -1.0 - jnp.arange(rows, dtype=jnp.float32))
    leaves = at(leaves, target).min(number, mode="drop", wrap_negative_indices=False)
    return leaves, at(leaves, target).get(mode="fill", fill_value=0.0, wrap_negative_indices=False) == number
