"""Configurations as plain values by field, and the differences between two of them.

A configuration is a frozen dataclass, or a dict, list, tuple or NamedTuple of them. A callable is described by its name
only. `Sharded` is described like the buffer in it. Meshes, and `donate`, do not affect what is stored, and are omitted.
"""

import dataclasses
import enum
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

from jaxreplay.buffers._shards import whole_of


def fields(config: Any, where: str = "config", is_default: bool = False) -> Iterator[tuple[str, Any, bool]]:
    """All fields of a configuration, also of those in it: name, value as JSON, and True if it has its default.

    A `ValueError` names a field that cannot be recorded.
    """
    whole = whole_of(config)
    if isinstance(whole, jax.sharding.Mesh):
        return
    if (parts := children(whole)) is None:
        yield where, _plain(whole, where), is_default
        return
    declared = dataclasses.fields(whole) if dataclasses.is_dataclass(whole) else ()
    defaults = {f".{x.name}": x.default for x in declared if x.default is not dataclasses.MISSING}
    if not isinstance(whole, dict | list | tuple) or hasattr(whole, "_fields"):
        yield where, _name_of(type(whole)), is_default
    for name, value in parts.items():
        yield from fields(value, where + name, is_default or (name in defaults and value == defaults[name]))


def differences(saved: dict[str, Any], config: Any) -> list[str]:
    """Fields of `config` that differ from those that were saved. A field that is newer than those had its default."""
    every, found = [*fields(config)], []
    given = {where: value for where, value, _ in every}
    saved = saved | {where: value for where, value, is_default in every if is_default and where not in saved}
    for where in {**saved, **given}:
        was, now = (repr(x[where]) if where in x else "nothing" for x in (saved, given))
        # 1 and 1.0 are equal, and two NaN have one text.
        if was != now and not (where in saved and where in given and saved[where] == given[where]):
            found.append(f"{where}: saved {was}, given {now}")
    return found


def children(config: Any) -> dict[str, Any] | None:
    """Parts of a configuration, by what selects them, such as ".sampler" or "[0]"; None if it has none."""
    if hasattr(config, "_asdict"):
        return {f".{name}": value for name, value in config._asdict().items()}
    if isinstance(config, list | tuple):
        config = dict(enumerate(config))
    if isinstance(config, dict):
        return {f"[{key!r}]": value for key, value in config.items()}
    if not dataclasses.is_dataclass(config) or isinstance(config, type):
        return None
    names = [x.name for x in dataclasses.fields(config) if x.compare and not x.name.startswith("_")]
    return {f".{name}": getattr(config, name) for name in names if name != "donate"}


def _plain(value: Any, where: str) -> Any:
    if isinstance(value, np.bool_ | np.number):
        value = value.item()
    if value is None or type(value) in (bool, int, float, str):
        return value
    if isinstance(value, enum.Enum):
        return f"{_name_of(type(value))}.{value.name}"
    if isinstance(value, np.dtype):
        return value.name
    if not callable(value):
        raise ValueError(f"{where}: got a {type(value).__qualname__}, which cannot be recorded; give plain values.")
    function = getattr(value, "func", value)  # of a functools.partial
    return _name_of(function if hasattr(function, "__qualname__") else type(function))


def _name_of(x: Any) -> str:
    """Dotted name of a class or function; where it lies within this package does not matter."""
    package = x.__module__.partition(".")[0] if x.__module__.startswith("jaxreplay") else x.__module__
    return f"{package}.{x.__qualname__}"
