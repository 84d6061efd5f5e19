"""Configurations as JSON, and the differences between two of them.

A configuration is a frozen dataclass, or a dict, list, tuple or NamedTuple of them. A callable is described by its name
only, and a mesh by its axis sizes. `donate` does not affect the state and is omitted.
"""

import dataclasses
import enum
from collections.abc import Iterator
from typing import Any, NamedTuple, TypeGuard

import jax
import numpy as np

from jaxreplay.checkpoint._names import stable_name


class Difference(NamedTuple):
    """A field that differs, both values as text, and the outermost buffer (else configuration) with that field."""

    where: str
    saved: str
    given: str
    owner: Any


def describe(config: Any, where: str = "buffer") -> Any:
    """JSON that describes a configuration.

    Raises:
      ValueError: a value cannot be recorded; the message names the field.
    """
    if isinstance(config, np.bool_ | np.number):
        config = config.item()
    if config is None or type(config) in (bool, int, float, str):
        return config
    if isinstance(config, enum.Enum):
        return {"name": f"{_name(type(config))}.{config.name}"}
    if isinstance(config, np.dtype):
        return {"dtype": config.name}
    if isinstance(config, jax.sharding.Mesh):
        return {"mesh": dict(config.shape)}
    if isinstance(config, list | tuple) and not _is_named_tuple(config):
        return [describe(x, f"{where}[{i}]") for i, x in enumerate(config)]
    if isinstance(config, dict) or _is_named_tuple(config) or _is_config(config):
        fields = {name: describe(x, _join(where, config, name)) for name, x in _fields(config).items()}
        return {"type": _name(type(config)), "fields": fields}
    if callable(config):
        function = getattr(config, "func", config)  # of a functools.partial
        return {"name": _name(function if hasattr(function, "__qualname__") else type(function))}
    raise ValueError(
        f"{where}: got a {type(config).__qualname__}, which cannot be recorded; expected a configuration, a plain "
        "value, or a dict, list or tuple of these."
    )


def check(described: Any) -> None:
    """Raise a `ValueError` if JSON does not describe a configuration."""
    todo = [described]
    while todo:
        match todo.pop():
            case None | bool() | int() | float() | str() | {"name": str()} | {"dtype": str()} | {"mesh": {}}:
                pass
            case [*children]:
                todo += children
            case {"type": str(), "fields": {**children}}:
                todo += children.values()
            case other:
                raise ValueError(f"{str(other)[:40]} is not the description of a configuration")


def differences(saved: Any, given: Any, where: str = "buffer", owner: Any = None) -> Iterator[Difference]:
    """Differences between the configuration `given` and the description `saved`."""
    described = describe(given, where)
    if isinstance(saved, dict) and "name" in saved:
        saved = {"name": stable_name(saved["name"])}
    if isinstance(described, list) and isinstance(saved, list) and len(saved) == len(described):
        for i, (x, y) in enumerate(zip(saved, given, strict=True)):
            yield from differences(x, y, f"{where}[{i}]", owner)
    elif _is_typed(saved) and _is_typed(described) and stable_name(saved["type"]) == described["type"]:
        if _is_config(given) and not is_buffer(owner) and (owner is None or is_buffer(given)):
            owner = given
        fields, defaults = _fields(given), _defaults(given)
        for name in [*fields, *(name for name in saved["fields"] if name not in fields)]:
            inner = _join(where, given, name)
            if name not in fields:
                yield Difference(inner, _text(saved["fields"][name]), "nothing", owner)
            elif name in saved["fields"] or name in defaults:  # fields added since then had their defaults
                value = saved["fields"][name] if name in saved["fields"] else describe(defaults[name], inner)
                yield from differences(value, fields[name], inner, owner)
            else:
                yield Difference(inner, "nothing", _text(described["fields"][name]), owner)
    elif saved != described and repr(saved) != repr(described):  # repr: NaN is not equal to itself
        yield Difference(where, _text(saved), _text(described), owner)


def is_buffer(config: Any) -> bool:
    """True if `migrate`, or `remap` and `recycle`, can convert states of `config` to another configuration."""
    return hasattr(config, "can_sample") or hasattr(config, "remap")


def meshes(config: Any, where: str = "buffer") -> Iterator[tuple[str, jax.sharding.Mesh]]:
    """All meshes in a configuration, with the names of their fields."""
    if isinstance(config, jax.sharding.Mesh):
        yield where, config
    elif isinstance(config, dict) or _is_named_tuple(config) or _is_config(config):
        for name, value in _fields(config).items():
            yield from meshes(value, _join(where, config, name))
    elif isinstance(config, list | tuple):
        for i, value in enumerate(config):
            yield from meshes(value, f"{where}[{i}]")


def _is_config(config: Any) -> bool:
    return dataclasses.is_dataclass(config) and not isinstance(config, type)


def _is_named_tuple(config: Any) -> bool:
    return isinstance(config, tuple) and hasattr(config, "_fields")


def _is_typed(described: Any) -> TypeGuard[dict[str, Any]]:
    return isinstance(described, dict) and "fields" in described


def _fields(config: Any) -> dict[str, Any]:
    """Fields that describe a configuration, by name."""
    if isinstance(config, dict):
        return {str(key): value for key, value in config.items()}
    if _is_named_tuple(config):
        return config._asdict()
    names = [field.name for field in dataclasses.fields(config) if field.compare]
    return {name: getattr(config, name) for name in names if name != "donate" and not name.startswith("_")}


def _defaults(config: Any) -> dict[str, Any]:
    """Default values of fields, by name."""
    if isinstance(config, dict):
        return {}
    if _is_named_tuple(config):
        return config._field_defaults
    fields = dataclasses.fields(config)
    return {field.name: field.default for field in fields if field.default is not dataclasses.MISSING}


def _join(where: str, config: Any, name: str) -> str:
    """Path of a field for messages."""
    return f"{where}[{name!r}]" if isinstance(config, dict) else f"{where}.{name}"


def _name(named: Any) -> str:
    """Dotted name of a class or function."""
    return stable_name(f"{named.__module__}.{named.__qualname__}")


def _text(described: Any) -> str:
    """A description as text for messages."""
    if not isinstance(described, dict):
        return repr(described)
    (kind, value), *_ = described.items()
    return value.rpartition(".")[2] if kind == "type" else str(value)
