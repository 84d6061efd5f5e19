"""Configurations as JSON, and the differences between two of them.

A configuration is a frozen dataclass, or a dict, list, tuple or NamedTuple of them. A callable is described by its name
only, and a mesh by its axis sizes. `donate` does not affect the state and is omitted.
"""

import copy
import dataclasses
import enum
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxreplay._common.checks import settle
from jaxreplay.buffers._shards import whole_of, with_whole
from jaxreplay.checkpoint._names import dotted_name
from jaxreplay.samplers import Prioritized, PrioritizedState
from jaxreplay.wrappers import Mixture


class Difference(NamedTuple):
    """A field that differs, both values as text, and advice for the outermost configuration that has any."""

    where: str
    saved: str
    given: str
    advice: str


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
        return {"name": f"{dotted_name(type(config))}.{config.name}"}
    if isinstance(config, np.dtype):
        return {"dtype": config.name}
    if isinstance(config, jax.sharding.Mesh):
        return {"mesh": dict(config.shape)}
    if (fields := _fields(config)) is not None:
        described = {name: describe(x, _join(where, config, name)) for name, x in fields.items()}
        return [*described.values()] if _is_list(config) else {"type": dotted_name(type(config)), "fields": described}
    if callable(config):
        function = getattr(config, "func", config)  # of a functools.partial
        return {"name": dotted_name(function if hasattr(function, "__qualname__") else type(function))}
    raise ValueError(
        f"{where}: got a {type(config).__qualname__}, which cannot be recorded; expected a configuration, a plain "
        "value, or a dict, list or tuple of these."
    )


def with_numbers(config: Any, state: Any) -> Any:
    """A configuration with values from its state instead of schedules and first values; for reports."""
    if isinstance(config, dict):
        known = state if isinstance(state, dict) else {}
        return {key: with_numbers(x, known[key]) if key in known else x for key, x in config.items()}
    if _is_list(config) and isinstance(state, list | tuple):
        return [with_numbers(x, y) for x, y in zip(config, state, strict=False)]
    if isinstance(config, Mixture):
        return dataclasses.replace(config, buffers=with_numbers(config.buffers, state))
    whole = whole_of(config)
    sampler, of_sampler = getattr(whole, "sampler", None), getattr(state, "sampler", None)
    numbers = {}
    if isinstance(sampler, Prioritized) and isinstance(of_sampler, PrioritizedState):
        for name in ("alpha", "epsilon", "floor"):
            values = np.unique(_local(getattr(of_sampler, name)))
            if values.tolist() != [np.float32(getattr(sampler, name))]:
                numbers[name] = float(values[0]) if values.size == 1 else None  # lanes of jax.vmap may differ
    updates = getattr(of_sampler, "updates", None)
    if callable(getattr(sampler, "beta", None)) and updates is not None:
        numbers["beta"] = float(np.max(np.asarray(sampler.beta(_local(updates)))))  # pyright: ignore
    if not numbers:
        return config
    sampler = copy.copy(sampler)
    settle(sampler, **numbers)
    return with_whole(config, dataclasses.replace(whole, sampler=sampler))  # pyright: ignore


def _local(x: Any) -> Any:
    """An array [D] with the same number for all shards, or a part of it that this process holds."""
    return x.addressable_shards[0].data if isinstance(x, jax.Array) and not x.is_fully_addressable else x


def check(described: Any) -> None:
    """Raise a `ValueError` if JSON does not describe a configuration."""
    match described:
        case None | bool() | int() | float() | str() | {"name": str()} | {"dtype": str()} | {"mesh": {}}:
            pass
        case [*_] | {"type": str(), "fields": {}}:
            for child in _split(described)[1].values():
                check(child)
        case _:
            raise ValueError(f"{str(described)[:40]} is not the description of a configuration")


def differences(saved: Any, given: Any, where: str = "buffer", advice: str = "") -> Iterator[Difference]:
    """Differences between the configuration `given` and the description `saved`."""
    described, fields = describe(given, where), _fields(given) or {}
    kind, old = _split(saved)
    own_kind, new = _split(described)
    if kind != own_kind or kind is None:
        if saved != described and repr(saved) != repr(described):  # repr: NaN is not equal to itself
            yield Difference(where, _text(saved), _text(described), advice)
        return
    advice, defaults = advice or _advice(given), _defaults(given)
    for name in new | old:
        inner = _join(where, given, name)
        if name not in new:
            yield Difference(inner, _text(old[name]), "nothing", advice)
        elif name in old or name in defaults:  # fields added since then had their defaults
            value = old[name] if name in old else describe(defaults[name], inner)
            yield from differences(value, fields[name], inner, advice)
        else:
            yield Difference(inner, "nothing", _text(new[name]), advice)


def meshes(config: Any, where: str = "buffer") -> Iterator[tuple[str, jax.sharding.Mesh]]:
    """All meshes in a configuration, with the names of their fields."""
    if isinstance(config, jax.sharding.Mesh):
        yield where, config
    for name, value in (_fields(config) or {}).items():
        yield from meshes(value, _join(where, config, name))


def _advice(config: Any) -> str:
    """Advice for a message: how to convert the state of `config` to another configuration."""
    if hasattr(config, "remap"):
        return ", then use remap or recycle of the new one"
    if hasattr(config, "can_sample"):
        return ", then use jr.migrate(old_buffer, state, new_buffer)"
    return ""


def _is_list(config: Any) -> bool:
    return isinstance(config, list | tuple) and not hasattr(config, "_fields")


def _fields(config: Any) -> dict[Any, Any] | None:
    """Parts that describe a configuration, by name or number; None if it has none."""
    if _is_list(config):
        return dict(enumerate(config))
    if isinstance(config, dict):
        return {str(key): value for key, value in config.items()}
    if hasattr(config, "_asdict"):
        return config._asdict()
    if not dataclasses.is_dataclass(config) or isinstance(config, type):
        return None
    names = [field.name for field in dataclasses.fields(config) if field.compare]
    return {name: getattr(config, name) for name in names if name != "donate" and not name.startswith("_")}


def _defaults(config: Any) -> dict[str, Any]:
    """Default values of fields, by name."""
    if not dataclasses.is_dataclass(config):
        return getattr(config, "_field_defaults", {})
    fields = dataclasses.fields(config)
    return {field.name: field.default for field in fields if field.default is not dataclasses.MISSING}


def _join(where: str, config: Any, name: str | int) -> str:
    """Path of a field for messages."""
    return f"{where}[{name!r}]" if isinstance(config, dict) or _is_list(config) else f"{where}.{name}"


def _split(described: Any) -> tuple[Any, dict[Any, Any]]:
    """Length or type of a description that has parts, and these; None and none if it has no parts."""
    if isinstance(described, list):
        return len(described), dict(enumerate(described))
    if isinstance(described, dict) and "fields" in described:
        return described["type"], described["fields"]
    return None, {}


def _text(described: Any) -> str:
    """A description as text for messages."""
    if not isinstance(described, dict):
        return repr(described)
    (kind, value), *_ = described.items()
    return value.rpartition(".")[2] if kind == "type" else str(value)
