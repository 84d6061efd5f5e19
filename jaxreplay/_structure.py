"""The Python structure of a pytree as JSON, from which it can be made again without an example.

A node is a list that starts with its kind: ["none"], ["leaf", number], ["value", a Python number], ["dict", [[key,
node], ...]], ["list", [node, ...]], ["tuple", [node, ...]], ["namedtuple", class, {field: node}] (in format 1 a list by
position), or ["dataclass", class, {field: node}, {static field: value}]. Classes are named "module:qualname".
"""

import dataclasses
import functools
import importlib
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

REMEDY = (
    "a checkpoint can hold dicts, lists, tuples, NamedTuples and dataclasses registered as pytrees (such as "
    "flax.struct.dataclass) that are importable; save the arrays in one of these, and make the rest anew"
)


def record(tree: Any) -> tuple[list, list[tuple[str, Any]]]:
    """JSON of the structure of `tree`, and its arrays, each with its path as text.

    Raises:
      ValueError: a node or leaf that cannot be recorded; the message names it.
    """
    leaves = []

    def visit(node: Any, path: tuple) -> list:
        def children(pairs):
            return [visit(child, (*path, key)) for key, child in pairs]

        cls, name = type(node), jax.tree_util.keystr(path) or "<root>"
        if node is None:
            return ["none"]
        if cls is dict:
            if not all(type(key) is str for key in node) and not all(type(key) is int for key in node):
                raise ValueError(f"{name}: a dict with keys {list(node)}; a checkpoint holds those with str or int.")
            return ["dict", [[key, visit(x, (*path, jax.tree_util.DictKey(key)))] for key, x in node.items()]]
        if cls is list or cls is tuple:
            return [cls.__name__, children((jax.tree_util.SequenceKey(i), x) for i, x in enumerate(node))]
        if _is_named_tuple(cls):
            pairs = [(jax.tree_util.GetAttrKey(field), getattr(node, field)) for field in cls._fields]
            return ["namedtuple", _class_name(cls, name), dict(zip(cls._fields, children(pairs), strict=True))]
        if isinstance(node, jax.Array | np.ndarray | np.generic):
            leaves.append((name, node))
            return ["leaf", len(leaves) - 1]
        if cls in (bool, int, float):
            return ["value", node]
        pairs, treedef = jax.tree_util.tree_flatten_with_path(node, is_leaf=lambda x: x is not node)
        if treedef == jax.tree.structure(0):
            raise ValueError(f"{name}: got a {cls.__qualname__}, expected an array; {REMEDY}.")
        fields = [getattr(keys[0], "name", "") for keys, _ in pairs]
        if not dataclasses.is_dataclass(cls) or "" in fields:
            raise ValueError(f"{name}: a node of type {cls.__qualname__} cannot be recorded; {REMEDY}.")
        recorded = _class_name(cls, name)
        statics = {
            field.name: _value(getattr(node, field.name), f"{name}.{field.name}")
            for field in dataclasses.fields(cls)
            if field.init and field.name not in fields
        }
        nodes = dict(zip(fields, children((keys[0], child) for keys, child in pairs), strict=True))
        again = _make(cls, dict(zip(fields, [child for _, child in pairs], strict=True)), statics)
        if again is None or jax.tree.structure(again, is_leaf=lambda x: x is not again) != treedef:
            raise ValueError(f"{name}: a {cls.__qualname__} made again from its fields is not the same; {REMEDY}.")
        return ["dataclass", recorded, nodes, statics]

    return visit(tree, ()), leaves


def rebuild(structure: list, leaves: Sequence[Any]) -> Any:
    """The pytree of a recorded structure.

    Raises:
      ValueError: a class that cannot be imported, or is no NamedTuple or dataclass.
    """
    kind, *rest = structure
    if kind == "none":
        return None
    if kind == "leaf":
        return leaves[rest[0]]
    if kind == "value":
        return rest[0]
    if kind == "dict":
        return {key: rebuild(node, leaves) for key, node in rest[0]}
    if kind in ("list", "tuple"):
        nodes = [rebuild(node, leaves) for node in rest[0]]
        return nodes if kind == "list" else tuple(nodes)
    cls = _find_class(rest[0])
    if kind == "namedtuple" and _is_named_tuple(cls):
        fields = _fields(cls, rest[1])
        if set(fields) == set(cls._fields):
            return cls(*[rebuild(fields[field], leaves) for field in cls._fields])
    if kind == "dataclass" and dataclasses.is_dataclass(cls):
        made = _make(cls, {field: rebuild(node, leaves) for field, node in rest[1].items()}, rest[2])
        if made is not None:
            return made
    raise ValueError(f"{rest[0]}: is not the {kind} that it was when saved; use the version of its module from then.")


def _fields(cls: Any, recorded: dict[str, list] | list[list]) -> dict[Any, list]:
    """The fields of a NamedTuple; those of format 1 have its names if they are as many."""
    if isinstance(recorded, dict):
        return recorded
    names = getattr(cls, "_fields", ())
    return dict(zip(names if len(names) == len(recorded) else range(len(recorded)), recorded, strict=True))


def _is_named_tuple(cls: Any) -> bool:
    return isinstance(cls, type) and issubclass(cls, tuple) and hasattr(cls, "_fields")


def _make(cls: Any, children: dict[str, Any], statics: dict[str, Any]) -> Any:
    """An instance, or None where the class does not take these fields."""
    try:
        return cls(**children, **{field: _from_value(value) for field, value in statics.items()})
    except (TypeError, ValueError):
        return None


def _class_name(cls: type, where: str) -> str:
    name = f"{cls.__module__}:{cls.__qualname__}"
    try:
        found = _find_class(name)
    except ValueError:
        found = None
    if found is not cls:
        raise ValueError(f"{where}: {name} cannot be imported, so that it could not be restored; {REMEDY}.")
    return name


def _find_class(name: str) -> Any:
    module, _, qualname = name.partition(":")
    try:
        return functools.reduce(getattr, qualname.split("."), importlib.import_module(module))
    except (ImportError, AttributeError) as error:
        raise ValueError(f"{name}: a class of the saved state cannot be imported: {error}.") from error


def _value(value: Any, where: str) -> Any:
    """A static field's value as JSON; a tuple as a list."""
    if isinstance(value, np.bool_ | np.number):
        value = value.item()
    if value is None or type(value) in (bool, int, float, str):
        return value
    if type(value) is tuple:
        return [_value(x, where) for x in value]
    if isinstance(value, np.dtype) and jax.numpy.dtype(value.name) == value:
        return {"dtype": value.name}
    raise ValueError(f"{where}: a static field that is a {type(value).__qualname__} cannot be recorded; {REMEDY}.")


def _from_value(value: Any) -> Any:
    if isinstance(value, list):
        return tuple(map(_from_value, value))
    return jax.numpy.dtype(value["dtype"]) if isinstance(value, dict) else value
