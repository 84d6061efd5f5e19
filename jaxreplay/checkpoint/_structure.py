"""The Python structure of a pytree as JSON, and its inverse.

A node is a list that starts with its kind: ["none"], ["leaf", number], ["value", a Python number], ["dict", [[key,
node], ...]] (or "OrderedDict" or "FrozenDict"), ["list", [node, ...]], ["tuple", [node, ...]], ["namedtuple", class,
{field: node}], or ["dataclass", class, {field: node}, {static field: value}]. `jaxreplay.checkpoint._names` names the
classes.

Any other node is rebuilt from a template: ["other", qualname, {key: node}, {static field: value}], with the keys of its
paths. Only static fields with plain values are recorded. The auxiliary data of a node that is not a dataclass counts as
a static field.
"""

import collections
import contextlib
import dataclasses
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from flax.core import FrozenDict

from jaxreplay._common import checks, layouts
from jaxreplay._common.layouts import Rows
from jaxreplay.checkpoint import _leaves
from jaxreplay.checkpoint._names import allowed_class, class_name, own_class
from jaxreplay.sum_tree import SumTree, _levels
from jaxreplay.sum_tree._tree import MAX_CAPACITY

DICTS = {cls.__name__: cls for cls in (dict, collections.OrderedDict, FrozenDict)}
NUMBERS = {cls.__name__: cls for cls in (bool, int, float)}
MAX_DEPTH = 100  # of nested nodes


class Flat(NamedTuple):
    """One level of a pytree: its children by key (as in path text), its class, and the treedef that rebuilds it."""

    children: dict[str, Any]
    cls: type
    treedef: Any


def record(tree: Any) -> tuple[list, list[tuple[str, Any]]]:
    """JSON of the structure of `tree`, and its arrays with their paths as text.

    Raises:
      ValueError: a node or leaf cannot be recorded; the message names it.
    """
    leaves = []

    def visit(node: Any, path: str, depth: int) -> list:
        cls, name = type(node), path or "<root>"
        if depth > MAX_DEPTH:
            raise ValueError(
                f"{name}: nested more than {MAX_DEPTH} levels deep, the limit of a checkpoint; flatten the state."
            )
        if node is None:
            return ["none"]
        if isinstance(node, jax.Array | np.ndarray | np.generic):
            leaves.append((name, node))
            return ["leaf", len(leaves) - 1]
        if cls in NUMBERS.values():
            return ["value", node]
        if cls in DICTS.values() and not any(all(type(key) is kind for key in node) for kind in (str, int)):
            raise ValueError(f"{name}: a dict with keys {list(node)}; use only str keys or only int keys.")
        flat = _flatten(node, name)
        nodes = {key: visit(child, path + key, depth + 1) for key, child in flat.children.items()}
        if cls in DICTS.values():
            return [cls.__name__, [[key, nodes[_key_text(key)]] for key in node]]
        if cls is list or cls is tuple:
            return [cls.__name__, list(nodes.values())]
        fields = {key.removeprefix("."): child for key, child in nodes.items()}
        recorded = class_name(cls)
        if recorded and _is_named_tuple(cls) and fields.keys() == set(cls._fields):  # no custom registration
            return ["namedtuple", recorded, fields]
        statics, all_plain = _statics(node, flat)
        if recorded and dataclasses.is_dataclass(cls) and all_plain:
            again = make(cls, dict(zip(fields, flat.children.values(), strict=True)), statics)
            if again is not None and _flatten(again, name).treedef == flat.treedef:
                return ["dataclass", recorded, fields, statics]
        return ["other", cls.__qualname__, nodes, statics]

    return visit(tree, "", 0), leaves


def check(structure: Any, num_leaves: int) -> None:
    """Raise a `ValueError` if JSON is not a structure with this many leaves."""
    todo, numbers = [(structure, 0)], []
    while todo:
        node, depth = todo.pop()
        match node:
            case ["none"] | ["value", bool() | int() | float()]:
                children = []
            case ["leaf", int(number)]:
                numbers.append(number)
                children = []
            case ["list" | "tuple", [*children]]:
                pass
            case [str(kind), [*pairs]] if kind in DICTS and all(map(_is_pair, pairs)):
                children = [child for _, child in pairs]
            case ["dataclass", "jaxreplay:SumTree" | "jaxreplay:Rows", _, _] if not _has_sizes(*node[1:]):
                raise ValueError(f"{str(node)[:40]} has no sizes")
            case ["namedtuple", str(), {**fields}] | ["dataclass" | "other", str(), {**fields}, {}]:
                children = [*fields.values()]
            case _:
                raise ValueError(f"{str(node)[:40]} is not a node")
        if depth > MAX_DEPTH:
            raise ValueError(f"its structure is nested more than {MAX_DEPTH} levels deep")
        todo += [(child, depth + 1) for child in children]
    if sorted(numbers) != [*range(num_leaves)]:
        raise ValueError(f"its nodes do not contain each of {num_leaves} leaves exactly once")


def match(structure: list, records: Sequence[dict[str, Any]], like: Any) -> dict[str, Flat]:
    """Template nodes of `like` by path: NamedTuples, dataclasses and "other" nodes.

    `like` may be None or lack children, except in "other" nodes, which must be complete.

    Raises:
      ValueError: `like` lacks an "other" node or differs from the saved structure; the message names the node.
    """
    found = {}

    def visit(node: list, like: Any, path: str, complete: bool) -> None:
        kind, *rest = node
        children, given = _children(node), {}
        if like is not None or complete:
            saved, got = _saved_text(node, records), _text(like)
            if saved != got and not _is_number_like(saved, got) and not _is_number_like(got, saved):
                raise _unlike(path, saved, got)
            if isinstance(like, Rows | SumTree) or _is_saved(node, Rows, SumTree):
                return  # its layout depends on the backend
            if kind not in ("none", "leaf", "value"):
                flat = _flatten(like, path)
                given = flat.children
                if kind in ("namedtuple", "dataclass", "other"):
                    found[path] = flat
                if kind in ("dataclass", "other"):
                    statics, _ = _statics(like, flat)
                    for field, value in rest[2].items():
                        got = repr(statics[field]) if field in statics else "no plain value"
                        if repr(value) != got:
                            raise _unlike(f"{path}, static {field}", repr(value), got)
        elif kind == "other":
            raise ValueError(
                f"like: must have a {rest[0]} at {path or '<root>'}, because a checkpoint holds little more than its "
                "arrays; build it as for the saved state (arrays or jax.ShapeDtypeStruct)."
            )
        complete = complete or kind == "other"
        for key in children | given:
            if key not in children or (complete and key not in given):
                saved = _saved_text(children[key], records) if key in children else "nothing"
                raise _unlike(path + key, saved, _text(given[key]) if key in given else "nothing")
            visit(children[key], given.get(key), path + key, complete)

    visit(structure, like, "", False)
    return found


def classes(structure: list, nodes: Mapping[str, Flat], allow: Iterable[Any]) -> dict[str, type]:
    """Classes of NamedTuples and dataclasses by path: from this package, the `nodes` from `match`, or `allow`.

    Raises:
      ValueError: another class is named; the message says what to pass for it.
    """
    found, refused = {}, {}

    def visit(node: list, path: str) -> None:
        if node[0] in ("namedtuple", "dataclass"):
            cls = own_class(node[1]) or (nodes[path].cls if path in nodes else allowed_class(node[1], allow))
            if cls is None:
                refused[path] = node[1]
            found[path] = cls
        for key, child in _children(node).items():
            visit(child, path + key)

    visit(structure, "")
    if refused:
        listed = [f"{name.replace(':', '.')} at {path or '<root>'}" for path, name in refused.items()]
        more = f" (and {len(listed) - 5} more)" if len(listed) > 5 else ""
        modules = sorted({name.partition(":")[0].partition(".")[0] for name in refused.values()})
        raise ValueError(
            f"{'; '.join(listed[:5])}{more}: restore builds no objects of classes named only by the file. Pass like= "
            "with a new node at the same place, such as optimizer.init(params) or buffer.init(items); or, to use the "
            f"values from the file, allow=({', '.join(modules)},) after importing these modules."
        )
    return found


def rebuild(structure: list, leaves: Sequence[Any], nodes: Mapping[str, Flat], classes: Mapping[str, type]) -> Any:
    """The pytree of a recorded structure, with the `nodes` from `match` and their `classes`.

    Raises:
      ValueError: the definition of a NamedTuple or dataclass has changed.
    """

    def visit(node: list, path: str) -> Any:
        kind, *rest = node
        if kind == "none":
            return None
        if kind == "leaf":
            return leaves[rest[0]]
        if kind == "value":
            return rest[0]
        children = {key: visit(child, path + key) for key, child in _children(node).items()}
        if kind in DICTS:
            made = dict(zip([key for key, _ in rest[0]], children.values(), strict=True))
            return FrozenDict.tree_unflatten(tuple(made), made.values()) if kind == "FrozenDict" else DICTS[kind](made)
        if kind in ("list", "tuple"):
            return [*children.values()] if kind == "list" else tuple(children.values())
        if kind == "other":
            return jax.tree.unflatten(nodes[path].treedef, [children[key] for key in nodes[path].children])
        cls, fields = classes[path], {key.removeprefix("."): child for key, child in children.items()}
        if kind == "namedtuple" and _is_named_tuple(cls) and set(fields) == set(cls._fields):
            return cls(**fields)
        if kind == "dataclass" and dataclasses.is_dataclass(cls):
            made = make(cls, fields, rest[2])
            if made is not None:  # the saved layout may be of another backend
                try:
                    return made.on_this_backend() if hasattr(made, "on_this_backend") else made
                except (AttributeError, TypeError):  # inconsistent parts
                    pass
        raise ValueError(f"{rest[0]}: is no longer the saved {kind}; use the version of its module that saved it.")

    return visit(structure, "")


def _flatten(node: Any, where: str) -> Flat:
    """One level of a pytree."""
    pairs, treedef = jax.tree_util.tree_flatten_with_path(node, is_leaf=lambda x: x is not node)
    if treedef == jax.tree.structure(0):
        raise ValueError(
            f"{where}: got a {type(node).__qualname__}, expected an array, a Python number or a node of a pytree; save "
            "the arrays only, and rebuild the rest."
        )
    children = {jax.tree_util.keystr(path): child for path, child in pairs}
    if len(children) < len(pairs):
        raise ValueError(f"{where}: two children of a {type(node).__qualname__} have the same key; give each its own.")
    return Flat(children, type(node), treedef)


def _children(node: list) -> dict[str, list]:
    """Children of a recorded node by key."""
    kind, *rest = node
    if kind in DICTS:
        return {_key_text(key): child for key, child in rest[0]}
    if kind in ("list", "tuple"):
        return {f"[{i}]": child for i, child in enumerate(rest[0])}
    if kind in ("namedtuple", "dataclass"):
        return {f".{field}": child for field, child in rest[1].items()}
    return rest[1] if kind == "other" else {}


def _key_text(key: str | int) -> str:
    """Text of a dict key in a path."""
    return jax.tree_util.keystr((jax.tree_util.DictKey(key),))


def _saved_text(node: list, records: Sequence[dict[str, Any]]) -> str:
    """Type of a recorded node as text, as from `_text`."""
    kind, *rest = node
    if kind == "leaf":
        return _text(_leaves.as_spec(records[rest[0]]))
    if kind in ("none", "value"):
        return _text(rest[0] if rest else None)
    if _is_saved(node, Rows):
        rows = _leaves.as_spec(records[rest[1]["rows"][1]])
        return _text(Rows(rows, tuple(rest[2]["leading"]), tuple(rest[2]["item"])))
    if _is_saved(node, SumTree):
        return f"SumTree of {rest[2]['capacity']}"
    if kind in (*DICTS, "list", "tuple"):
        return kind
    cls = own_class(rest[0])
    return cls.__qualname__ if cls else rest[0].rpartition(":")[2]


def _text(node: Any) -> str:
    """Type of a node as text for messages."""
    if isinstance(node, jax.Array | np.ndarray | np.generic | jax.ShapeDtypeStruct):
        return checks.type_text(node.dtype, node.shape)
    if isinstance(node, Rows):
        return checks.type_text(node.dtype, node.shape)
    if isinstance(node, SumTree):
        return f"SumTree of {node.capacity}"
    return "None" if node is None else type(node).__qualname__


def _is_saved(node: list, *classes: type) -> bool:
    """True if `node` records a dataclass among `classes`."""
    return node[0] == "dataclass" and own_class(node[1]) in classes


def _is_number_like(number: str, other: str) -> bool:
    """True if `number` is the text of a Python number type and `other` that of a matching scalar array."""
    return number in NUMBERS and re.fullmatch(rf"{number}\d*\[\]", other) is not None


def _unlike(path: str, saved: str, given: str) -> ValueError:
    return ValueError(f"like{path}: saved {saved}, given {given}; build it as for the saved state, or omit it.")


def _is_named_tuple(cls: Any) -> bool:
    return isinstance(cls, type) and issubclass(cls, tuple) and hasattr(cls, "_fields")


def _is_pair(pair: Any) -> bool:
    """True if JSON is a pair of a dict key and a node."""
    return isinstance(pair, list) and len(pair) == 2 and isinstance(pair[0], str | int)


def _has_sizes(name: str, fields: Any, statics: Any) -> bool:
    """True if a recorded `SumTree` or `Rows` has the static sizes that `_fits` compares."""
    match fields, statics:
        case {"sums": ["tuple", _]}, {"capacity": int(capacity), "fanout": int(fanout)}:
            return name == "jaxreplay:SumTree" and 0 < capacity <= MAX_CAPACITY and 2 <= fanout <= 1024
        case {"rows": ["leaf", _]}, {"leading": [*leading], "item": [*item]}:
            return name == "jaxreplay:Rows" and all(type(size) is int and size >= 0 for size in leading + item)
    return False


def _fits(made: Any) -> bool:
    """True if the arrays of a `SumTree` or `Rows` match its static sizes, from which other arrays are allocated."""
    if isinstance(made, SumTree):
        shapes = [_levels.shape(size, made.fanout) for size in _levels.sizes(made.capacity, made.fanout)]
        pairs = zip(map(np.shape, made.sums), shapes, strict=True)
        return all(found[max(len(found) - len(shape), 0) :] == shape for found, shape in pairs)
    if isinstance(made, Rows):
        return made.rows.shape[-2:] == (layouts._num_rows(made.leading, made.item, made.dtype), layouts.LANES)
    return True


def make(cls: Any, children: dict[str, Any], statics: dict[str, Any]) -> Any:
    """An instance of the class, or None if the fields do not fit."""
    try:
        made = cls(**children, **{field: _from_value(value) for field, value in statics.items()})
        return made if _fits(made) else None
    except (AttributeError, KeyError, TypeError, ValueError):
        return None


def _statics(node: Any, flat: Flat) -> tuple[dict[str, Any], bool]:
    """Static fields of a node with plain values, as JSON by name; and True if all of them are plain."""
    if dataclasses.is_dataclass(node) and all(key.startswith(".") for key in flat.children):
        fields = [field.name for field in dataclasses.fields(node) if field.init]
        statics = {name: getattr(node, name) for name in fields if f".{name}" not in flat.children}
    else:
        statics = {"data": flat.treedef.node_data()[1]}
    values = {}
    for name, value in statics.items():
        with contextlib.suppress(TypeError):
            values[name] = _value(value)
    return values, len(values) == len(statics)


def _value(value: Any) -> Any:
    """A plain value as JSON; a tuple becomes a list.

    Raises:
      TypeError: the value is not plain.
    """
    if isinstance(value, np.bool_ | np.number):
        value = value.item()
    if value is None or type(value) in (bool, int, float, str):
        return value
    if type(value) is tuple:
        return [_value(x) for x in value]
    if isinstance(value, np.dtype) and jax.numpy.dtype(value.name) == value:
        return {"dtype": value.name}
    raise TypeError(f"{type(value).__qualname__} cannot be recorded")


def _from_value(value: Any) -> Any:
    """The inverse of `_value`."""
    if isinstance(value, list):
        return tuple(map(_from_value, value))
    return jax.numpy.dtype(value["dtype"]) if isinstance(value, dict) else value
