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
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from flax.core import FrozenDict

from jaxreplay._common import checks, layouts
from jaxreplay._common.layouts import Rows
from jaxreplay.checkpoint import _leaves
from jaxreplay.checkpoint._description import describe
from jaxreplay.checkpoint._names import CLASSES, allowed_class, class_name, own_class
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
        todo += [(child, depth + 1) for child in _children(node).values()]
        if depth > MAX_DEPTH:
            raise ValueError(f"its structure is nested more than {MAX_DEPTH} levels deep")
        if node[0] == "leaf":
            numbers.append(node[1])
    if sorted(numbers) != [*range(num_leaves)]:
        raise ValueError(f"its nodes do not contain each of {num_leaves} leaves exactly once")


def plan(structure: list, records: Sequence[dict[str, Any]], like: Any, allow: Iterable[Any]) -> Callable[[Any], Any]:
    """A function that rebuilds a pytree from its leaves; builds nothing itself.

    Classes come from this package, from the nodes of `like`, or from `allow`. `like` may be None or lack children,
    except in "other" nodes, which must be complete.

    Raises:
      ValueError: `like` lacks an "other" node or differs from the saved structure, or another class is named; the
        message says what to pass. From the returned function: the definition of a class has changed.
    """
    refused = {}

    def visit(node: list, like: Any, path: str, complete: bool) -> Callable[[Any], Any]:
        kind, *rest = node
        if kind == "other" and like is None and not complete:
            raise ValueError(
                f"like: must have a {rest[0]} at {path or '<root>'}, because a checkpoint holds little more than its "
                "arrays; build it as for the saved state (arrays or jax.ShapeDtypeStruct)."
            )
        flat = _matched(node, records, like, path) if like is not None or complete else None
        complete = kind == "other" or (complete and flat is not None)
        children, given = _children(node), flat.children if flat else {}
        for key in children | given:
            if key not in children and given[key] is None and kind == "dataclass" and own_class(rest[0]):
                continue  # a field that is newer than the file
            if key not in children or (complete and key not in given):
                saved = _saved_text(children[key], records) if key in children else "nothing"
                raise _unlike(path + key, saved, _text(given[key]) if key in given else "nothing")
        cls = None
        if kind in ("namedtuple", "dataclass"):
            cls = own_class(rest[0]) or (flat.cls if flat else allowed_class(rest[0], allow))
            if cls is None:
                refused[path] = rest[0]
        builds = {key: visit(child, given.get(key), path + key, complete) for key, child in children.items()}
        if kind == "leaf":
            return lambda leaves: leaves[rest[0]]
        return lambda leaves: _build(node, {key: build(leaves) for key, build in builds.items()}, cls, flat)

    build = visit(structure, like, "", False)
    if refused:
        listed = [f"{name.replace(':', '.')} at {path or '<root>'}" for path, name in refused.items()]
        more = f" (and {len(listed) - 5} more)" if len(listed) > 5 else ""
        modules = sorted({name.partition(":")[0].partition(".")[0] for name in refused.values()})
        raise ValueError(
            f"{'; '.join(listed[:5])}{more}: restore builds no objects of classes named only by the file. Pass like= "
            "with a new node at the same place, such as optimizer.init(params) or buffer.init(items); or, to use the "
            f"values from the file, allow=({', '.join(modules)},) after importing these modules."
        )
    return build


def _matched(node: list, records: Sequence[dict[str, Any]], like: Any, path: str) -> Flat | None:
    """The node `like` of a saved node; None for nodes without children, and for those laid out by backend.

    Raises:
      ValueError: they differ; the message names the node.
    """
    saved, got = _saved_text(node, records), _text(like)
    if saved != got and not _is_number_like(saved, got) and not _is_number_like(got, saved):
        raise _unlike(path, saved, got)
    if isinstance(like, Rows | SumTree) or _is_saved(node, Rows, SumTree) or node[0] in ("none", "leaf", "value"):
        return None
    flat = _flatten(like, path)
    if node[0] in ("dataclass", "other"):
        statics, _ = _statics(like, flat)
        for field, value in node[3].items():
            got = repr(statics[field]) if field in statics else "no plain value"
            if repr(value) != got:
                raise _unlike(f"{path}, static {field}", repr(value), got)
    return flat


def _build(node: list, children: dict[str, Any], cls: Any, flat: Flat | None) -> Any:
    """The object that a node records, from its children by key, its class and its node of `like`, if any.

    Raises:
      ValueError: the definition of a NamedTuple or dataclass has changed, or its parts are of other classes.
    """
    kind, *rest = node
    if kind in ("none", "value"):
        return rest[0] if rest else None
    if kind in DICTS:
        made = dict(zip([key for key, _ in rest[0]], children.values(), strict=True))
        return FrozenDict.tree_unflatten(tuple(made), made.values()) if kind == "FrozenDict" else DICTS[kind](made)
    if kind in ("list", "tuple"):
        return [*children.values()] if kind == "list" else tuple(children.values())
    if kind == "other":
        assert flat is not None
        return jax.tree.unflatten(flat.treedef, [children[key] for key in flat.children])
    fields = {key.removeprefix("."): child for key, child in children.items()}
    if kind == "namedtuple" and _is_named_tuple(cls) and set(fields) == set(cls._fields):
        return cls(**fields)
    if kind == "dataclass" and dataclasses.is_dataclass(cls):
        made = make(cls, fields, rest[2])
        if made is not None and (own_class(rest[0]) is None or _has_parts(made)):
            return made.on_this_backend() if isinstance(made, layouts.BackendState) else made
    raise ValueError(f"{rest[0]}: is no longer the saved {kind}; use the version of its module that saved it.")


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


def _children(node: Any) -> dict[str, Any]:
    """Children of a recorded node by key.

    Raises:
      ValueError: JSON is not a node.
    """
    match node:
        case ["none"] | ["leaf", int()] | ["value", bool() | int() | float()]:
            return {}
        case ["list" | "tuple", [*children]]:
            return {f"[{i}]": child for i, child in enumerate(children)}
        case [str(kind), [*pairs]] if kind in DICTS and all(map(_is_pair, pairs)):
            return {_key_text(key): child for key, child in pairs}
        case ["dataclass", "jaxreplay:SumTree" | "jaxreplay:Rows", _, _] if not _has_sizes(*node[1:]):
            raise ValueError(f"{str(node)[:40]} has no sizes")
        case ["namedtuple", str(), {**fields}] | ["dataclass", str(), {**fields}, {}]:
            return {f".{field}": child for field, child in fields.items()}
        case ["other", str(), {**children}, {}]:
            return children
    raise ValueError(f"{str(node)[:40]} is not a node")


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
    return kind if kind in (*DICTS, "list", "tuple") else rest[0].rpartition(":")[2]


def _text(node: Any) -> str:
    """Type of a node as text for messages."""
    if isinstance(node, jax.Array | np.ndarray | np.generic | jax.ShapeDtypeStruct | Rows):
        return checks.type_text(node.dtype, node.shape)
    if isinstance(node, SumTree):
        return f"SumTree of {node.capacity}"
    return "None" if node is None else (class_name(type(node)) or type(node).__qualname__).rpartition(":")[2]


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


def _has_parts(state: Any) -> bool:
    """True if each field of a state that is annotated as an array or another state holds one."""

    def fits(kind: Any, value: Any) -> bool:
        if kind in CLASSES.values():
            return isinstance(value, kind)
        return kind is not jax.Array or jax.tree_util.all_leaves([value])

    return all(fits(field.type, getattr(state, field.name)) for field in dataclasses.fields(state))


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
        with contextlib.suppress(ValueError):
            if _is_plain(described := describe(value)):
                values[name] = described
    return values, len(values) == len(statics)


def _is_plain(described: Any) -> bool:
    """True if the description of a value is all of it."""
    if isinstance(described, list):
        return all(map(_is_plain, described))
    return not isinstance(described, dict) or "dtype" in described


def _from_value(value: Any) -> Any:
    """The value with a plain description; a list of values is a tuple."""
    if isinstance(value, list):
        return tuple(map(_from_value, value))
    return jax.numpy.dtype(value["dtype"]) if isinstance(value, dict) else value
