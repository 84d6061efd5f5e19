"""Texts of states and batches for people: counts and types, in at most six lines and without a wait."""

import abc
import collections
import math
import textwrap
from typing import Any

import jax
import jax.core

from jaxreplay._common import checks, foreign_names, xla

HIDDEN = "__annotations__", "__dataclass_fields__", "__dataclass_params__", "__match_args__"
LINES = textwrap.TextWrapper(100, "", "  ", break_on_hyphens=False, max_lines=6, placeholder=" ...)")


class Kind(abc.ABCMeta):
    """Class of the classes whose `help` does not end with what a dataclass keeps of its fields."""

    def __dir__(cls) -> list[str]:
        return [x for x in super().__dir__() if x not in HIDDEN]


class Shown(metaclass=Kind):
    """Base of pytrees with a short `repr`, as their dataclass would write all numbers; and errors of unknown names."""

    locals()["__getattr__"] = foreign_names.missing  # in this way type checkers still find names that do not exist

    def __init_subclass__(cls) -> None:
        cls.__repr__ = _text  # a dataclass keeps a method of the class itself

    def _contents(self) -> tuple[str, dict[str, Any]]:
        """The contents in words, and the parts by name."""
        return "", vars(self)


def held(size: Any, capacity: int, noun: str) -> tuple[str, int]:
    """`size` (int32 [...]) in words, by shard and lane, "?" if that needs a wait; and the number of its axes."""
    count = "?"
    if size.size and _is_here(size):
        found = xla.on_host(size)
        count = " to ".join(f"{x:,}" for x in sorted({int(found.min()), int(found.max())}))
    spec = getattr(getattr(size, "sharding", None), "spec", ())
    axes = [f"{n:,} {'shards' if any(spec[i : i + 1]) else 'lanes'}" for i, n in enumerate(size.shape)]
    return f"{count} of {capacity:,} {noun}" + " in each of " * bool(axes) + " of ".join(axes), len(axes)


def short(num_bytes: float) -> str:
    """Bytes with three digits, such as 28.3 GB; a GB is 10^9 bytes."""
    for unit, size in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if num_bytes >= size:
            return f"{num_bytes / size:#.3g}".rstrip(".") + f" {unit}"
    return f"{num_bytes} bytes"


def _is_here(x: Any) -> bool:
    """True if an array's values are known without waiting for a device."""
    if isinstance(x, jax.core.Tracer | jax.ShapeDtypeStruct) or getattr(x, "is_deleted", bool)():
        return False
    return getattr(x, "is_fully_addressable", True) and getattr(x, "is_ready", lambda: True)()


def _array(x: Any) -> tuple[str, int] | None:
    """Type and bytes of an array, or of what stands for one; None for other objects."""
    try:
        return checks.type_text(x), math.prod(x.shape) * x.dtype.itemsize
    except (AttributeError, TypeError):
        return None


def _text(self: Any) -> str:
    """The `repr` of a `Shown`."""
    leaves = jax.tree.leaves([*vars(self).values()])
    is_traced = any(isinstance(x, jax.core.Tracer) for x in leaves)
    note = " (traced)" * is_traced or " (donated)" * any(getattr(x, "is_deleted", bool)() for x in leaves)
    try:
        words, parts = self._contents()
    except Exception:  # JAX, and its users, also put other objects where the arrays belong
        words, parts = "", vars(self)
    size = short(sum(found[1] for found in map(_array, leaves) if found)) + note
    parts, listed = collections.OrderedDict(parts), []  # JAX would sort the keys of a dict
    for path, x in jax.tree_util.tree_leaves_with_path(parts, lambda x: isinstance(x, Shown) or _array(x) is not None):
        name = jax.tree_util.keystr(path, simple=True, separator=".").strip(".") or "items"
        kind = found[0] if (found := _array(x)) else type(x).__name__ if isinstance(x, Shown) else checks.brief(x)
        listed.append(f"{name} {kind}".replace(" ", "\xa0"))  # stays in one line
    text = f"{type(self).__name__}({f'{words}, ' * bool(words)}{size}; {', '.join(listed)})"
    return "\n".join(LINES.wrap(text)).replace("\xa0", " ")
