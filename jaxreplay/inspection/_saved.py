"""States as trees for reports, with live arrays or with arrays of a checkpoint that are read on demand."""

import dataclasses
import math
import os
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxreplay._common import layouts
from jaxreplay._common.layouts import Bits, Rows
from jaxreplay.checkpoint import _leaves, _structure
from jaxreplay.checkpoint._checkpoint import open_saved
from jaxreplay.checkpoint._names import own_class


@dataclasses.dataclass(frozen=True)
class Leaf:
    """An array of a state: its type, and a function that reads it."""

    shape: tuple[int, ...]
    dtype: str
    nbytes: int
    read: Callable[[], np.ndarray]


@dataclasses.dataclass(frozen=True)
class Saved:
    """A state with its configuration.

    Attributes:
      title: title of the report.
      facts: facts about the checkpoint as text, by name.
      config: description of the configuration, as made by `jaxreplay.checkpoint`.
      state: dicts, lists, tuples and states of this package, with `Leaf` in place of arrays.
    """

    title: str
    facts: dict[str, str]
    config: Any
    state: Any


def from_checkpoint(path: str | os.PathLike) -> Saved:
    """The newest complete checkpoint at `path`. Needs no configuration and reads no array.

    Raises:
      FileNotFoundError: there is no complete checkpoint.
      ValueError: the checkpoint is damaged or has a newer format.
    """
    content, read = open_saved(path)
    leaves = [_leaf(i, record, read) for i, record in enumerate(content["leaves"])]
    facts = {
        "written by": f"jaxreplay {content['library']} (format {content['format']})",
        "arrays": f"{len(leaves)}",
        "bytes": f"{sum(leaf.nbytes for leaf in leaves):,}",
    }
    return Saved(os.fspath(path), facts, content["buffer"], _visit(content["structure"], leaves))


def from_state(state: Any) -> Any:
    """A live state, with `Leaf` in place of arrays."""

    def leaf(x: Any) -> Leaf:
        shape, dtype = jnp.shape(x), jnp.result_type(x) if not hasattr(x, "dtype") else x.dtype
        is_key = jnp.issubdtype(dtype, jax.dtypes.prng_key)
        nbytes = jax.eval_shape(jax.random.key_data, x) if is_key else np.empty((0,), dtype)
        nbytes = nbytes.size * nbytes.dtype.itemsize if is_key else int(np.prod(shape)) * nbytes.itemsize
        return Leaf(tuple(shape), str(dtype), int(nbytes), lambda: np.asarray(x))

    return jax.tree.map(leaf, state)


def values(leaf: Any) -> np.ndarray:
    """Numbers of a stored leaf as they were added, [*leading, *item]."""
    if isinstance(leaf, Bits):
        bits = jnp.asarray(values(leaf.bits))
        return np.asarray(layouts.from_bits(bits, jnp.dtype(leaf.dtype)).astype(jnp.float32))
    if isinstance(leaf, Rows):
        return np.asarray(layouts.as_it_is(Rows(jnp.asarray(leaf.rows.read()), leaf.leading, leaf.item)))
    return leaf.read()


def shape_of(leaf: Any) -> tuple[tuple[int, ...], str, int]:
    """Shape, dtype and bytes of a stored leaf."""
    if isinstance(leaf, Bits):
        shape, _, nbytes = shape_of(leaf.bits)
        return shape, str(jnp.dtype(leaf.dtype)), nbytes
    if isinstance(leaf, Rows):
        stacked = leaf.rows.shape[:-2]
        return (*stacked, *leaf.leading, *leaf.item), leaf.rows.dtype, leaf.rows.nbytes
    return leaf.shape, leaf.dtype, leaf.nbytes


def is_leaf(x: Any) -> bool:
    """True if `x` represents one array."""
    return isinstance(x, Leaf | Bits | Rows)


def items_of(tree: Any, path: str = "") -> list[tuple[str, Any]]:
    """Leaves of a tree with their paths."""
    if is_leaf(tree):
        return [(path or "items", tree)]
    if isinstance(tree, dict):
        children = {str(key): child for key, child in tree.items()}
    elif isinstance(tree, tuple | list):
        names = getattr(tree, "_fields", range(len(tree)))
        children = {str(name): child for name, child in zip(names, tree, strict=True)}
    elif dataclasses.is_dataclass(tree):
        children = {field.name: getattr(tree, field.name) for field in dataclasses.fields(tree)}
    else:
        return []
    return [x for name, child in children.items() for x in items_of(child, f"{path}.{name}" if path else name)]


def _leaf(i: int, record: dict[str, Any], read: Callable[[int], np.ndarray]) -> Leaf:
    shape, dtype = _leaves.stored_type(record)

    def value() -> np.ndarray:
        array = read(i)
        return array if array.dtype.isbuiltin == 1 else array.astype(np.float32)

    return Leaf(tuple(record["shape"]), record["dtype"], math.prod(shape) * dtype.itemsize, value)


def _visit(node: list, leaves: list[Leaf]) -> Any:
    """The tree of a recorded structure, with states of this package as such and nodes of other classes as dicts."""
    kind, *rest = node
    if kind in ("none", "value"):
        return rest[0] if rest else None
    if kind == "leaf":
        return leaves[rest[0]]
    if kind in ("list", "tuple"):
        children = [_visit(child, leaves) for child in rest[0]]
        return children if kind == "list" else tuple(children)
    if kind in ("namedtuple", "dataclass", "other"):
        children = {key.strip(".[]'"): _visit(child, leaves) for key, child in rest[1].items()}
        cls = own_class(rest[0]) if kind == "dataclass" else None
        if cls is None:
            return children
        if (made := _structure.make(cls, children, rest[2])) is None:
            raise ValueError(f"{rest[0]}: its fields have changed since it was saved; use the version that saved it.")
        return made
    return {key: _visit(child, leaves) for key, child in rest[0]}  # a dict of some kind
