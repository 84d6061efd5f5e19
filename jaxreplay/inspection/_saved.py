"""States for reports: trees of arrays, live or in a checkpoint, which are read on demand."""

import dataclasses
import math
import os
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxreplay._common import layouts
from jaxreplay._common.layouts import Bits
from jaxreplay.checkpoint import _leaves, _structure
from jaxreplay.checkpoint._checkpoint import open_saved
from jaxreplay.checkpoint._names import own_class


@dataclasses.dataclass(frozen=True)
class Leaf:
    """An array of a checkpoint; `np.asarray` reads it."""

    shape: tuple[int, ...]
    dtype: str
    nbytes: int
    read: Callable[[], np.ndarray]

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return self.read()


class Saved(NamedTuple):
    """A state with its configuration.

    Attributes:
      title: title of the report.
      facts: facts about the checkpoint as text, by name.
      config: description of the configuration, as made by `jaxreplay.checkpoint`.
      state: a live state; or dicts, lists, tuples and states of this package, with `Leaf` in place of arrays.
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
    config = content.get("reported", content["buffer"])
    return Saved(os.fspath(path), facts, config, _tree(content["structure"], leaves))


def leaves_of(tree: Any) -> dict[str, Any]:
    """Stored leaves by path, such as "S.frame"; "items" for a single leaf."""
    found = jax.tree_util.tree_leaves_with_path(tree, is_leaf=layouts.is_leaf)
    named = {jax.tree_util.keystr(path, simple=True, separator=".") or "items": leaf for path, leaf in found}
    return {path: leaf for path, leaf in named.items() if hasattr(leaf, "shape")}


def num_bytes(tree: Any) -> int:
    """Bytes of all arrays."""
    return sum(x.nbytes for x in jax.tree.leaves(tree) if hasattr(x, "nbytes"))


def values(leaf: Any) -> np.ndarray:
    """Numbers of a stored leaf as they were added, [*leading, *item]."""
    plain = layouts.as_it_is(jax.tree.map(np.asarray, leaf))
    if isinstance(plain, Bits):
        plain = layouts.from_bits(jnp.asarray(plain.bits), plain.dtype).astype(jnp.float32)
    return np.asarray(plain)


def _leaf(i: int, record: dict[str, Any], read: Callable[[int], np.ndarray]) -> Leaf:
    shape, dtype = _leaves.stored_type(record)

    def value() -> np.ndarray:
        array = read(i)
        return array if array.dtype.isbuiltin == 1 else array.astype(np.float32)

    return Leaf(tuple(record["shape"]), record["dtype"], math.prod(shape) * dtype.itemsize, value)


def _tree(node: list, leaves: list[Leaf]) -> Any:
    """The tree of a recorded structure, with states of this package as such and nodes of other classes as dicts."""
    kind, *rest = node
    if kind in ("none", "value"):
        return rest[0] if rest else None
    if kind == "leaf":
        return leaves[rest[0]]
    if kind in ("list", "tuple"):
        children = [_tree(child, leaves) for child in rest[0]]
        return children if kind == "list" else tuple(children)
    pairs = rest[0] if kind in _structure.DICTS else [(key.strip(".[]'"), child) for key, child in rest[1].items()]
    children = {key: _tree(child, leaves) for key, child in pairs}
    cls = own_class(rest[0]) if kind == "dataclass" else None
    if cls is None:
        return children
    if (made := _structure.make(cls, children, rest[2])) is None:
        raise ValueError(f"{rest[0]}: its fields have changed since it was saved; use the version that saved it.")
    return made
