"""The levels of a sum tree: their shapes, the ascent after leaves were written, and the descent to a leaf.

A level is an array of nodes, [num_nodes]; of a wide tree a matrix with the siblings in a row, as a TPU wants it.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxreplay._common.xla import materialize

WIDE = 64  # nodes of as many children are added up at once; of more they are rows of a matrix, as a TPU wants it
ALL_PAIRS = 512  # rows of a batch that are compared with each other for repeated indices
DENSE = 4  # a level of at most so many nodes a row of the batch is recomputed as a whole; measured

Found = tuple[jax.Array, jax.Array, jax.Array]  # nodes, int32 [B]; what is left of the prefix there; their values


def shape(size: int, fanout: int) -> tuple[int, ...]:
    """Of a level of so many nodes."""
    return (-(-size // fanout), min(size, fanout)) if fanout > WIDE else (size,)


def sizes(capacity: int, fanout: int) -> list[int]:
    """Sizes of the levels, from the roots on."""
    nodes = [capacity]
    while nodes[0] > fanout:
        nodes.insert(0, -(-nodes[0] // fanout))
    return [nodes[0], *(parents * fanout for parents in nodes[:-1])]


def fold(x: jax.Array, combine: Callable[[jax.Array, jax.Array], jax.Array], at_once: bool) -> jax.Array:
    """The last axis reduced, if not at once by pairs: with a rounding error of O(log), and the same bits everywhere."""
    if at_once:
        return jnp.sum(x, axis=-1) if combine is jnp.add else jnp.min(x, axis=-1)
    while x.shape[-1] > 1:
        half = x.shape[-1] // 2
        pairs = combine(x[..., :half], x[..., half : 2 * half])
        x = jnp.concatenate([pairs, x[..., 2 * half :]], axis=-1) if x.shape[-1] % 2 else pairs
    return x[..., 0]


def at(nodes: jax.Array, index: jax.Array) -> Any:
    """`nodes.at` of the nodes `index` of a level."""
    if nodes.ndim == 1:
        return nodes.at[index]
    return nodes.at[lax.div(index, jnp.int32(nodes.shape[1])), lax.rem(index, jnp.int32(nodes.shape[1]))]


def read_rows(nodes: jax.Array, row: jax.Array, fanout: int) -> jax.Array:
    """The contiguous siblings of row [B], float32 [B, fanout]."""
    if nodes.ndim == 2:
        return nodes.at[row].get(mode="promise_in_bounds", wrap_negative_indices=False)
    numbers = lax.GatherDimensionNumbers(offset_dims=(1,), collapsed_slice_dims=(), start_index_map=(0,))
    mode = lax.GatherScatterMode.PROMISE_IN_BOUNDS
    return lax.gather(nodes, (row * fanout)[:, None], numbers, (fanout,), mode=mode)


def ascend(
    levels: tuple[jax.Array, ...],
    target: jax.Array,
    values: jax.Array,
    node: jax.Array,
    fanout: int,
    combine: Callable[[jax.Array, jax.Array], jax.Array],
) -> tuple[jax.Array, ...]:
    """`levels` with `values` [B] at `target` [B] of the leaves, and all ancestors of leaves `node` [B] recomputed."""
    *above, lowest = levels
    written = at(lowest, target).set(values, mode="drop", unique_indices=True, wrap_negative_indices=False)
    done, sparse = [written], True  # so far
    for parents in reversed(above):
        children, node = done[0], lax.div(node, jnp.int32(fanout))
        num_parents = children.size // fanout
        if num_parents <= DENSE * node.size:
            value = fold(children.reshape(num_parents, fanout), combine, fanout >= WIDE)
            rest = parents.reshape(-1)[num_parents:]  # it is padding
            parents = jnp.concatenate([value, rest]).reshape(parents.shape)
            if sparse:
                (parents,), sparse = materialize(parents), False
        else:
            value = fold(read_rows(children, node, fanout), combine, fanout >= WIDE)
            parents = at(parents, node).set(value, mode="promise_in_bounds", wrap_negative_indices=False)
        done.insert(0, parents)
    return tuple(done)


def descend(levels: Sequence[jax.Array], found: Found, fanout: int, patches: Sequence[Any] = ()) -> Found:
    """Follow what is left of the prefixes from the nodes `found` down the levels below them.

    `patches` are functions that set siblings [B, fanout] to what they count for, given the number of the first of them.

    All that is found at a level is materialized together, so that every read of the tree comes before any write that
    depends on one of them; otherwise XLA would copy the tree.
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
        found = materialize(node * fanout + child, prefix, value)
    return found


def choose_root(roots: jax.Array, prefix: jax.Array) -> Found:
    if roots.ndim == 2:
        return materialize(*choose_in_rows(jnp.broadcast_to(roots, (prefix.size, roots.size)), prefix))
    return materialize(*choose([roots[i] for i in range(roots.size)], prefix))


def choose_in_rows(rows: jax.Array, prefix: jax.Array) -> Found:
    """`choose` by the cumulative sums of rows [B, num_children].

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


def choose(children: list[jax.Array], prefix: jax.Array) -> Found:
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


def last_occurrence(
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
    leaves = at(leaves, target).min(number, mode="drop", wrap_negative_indices=False)
    seen = at(leaves, target).get(mode="fill", fill_value=0.0, wrap_negative_indices=False)
    return leaves, seen == number
