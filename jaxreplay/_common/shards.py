"""Collectives over the shards of a buffer: `axis_name` is the mapped axis over them, None without shards."""

from collections.abc import Callable
from typing import Any

import jax
from jax import lax


def index(axis_name: str | None) -> jax.Array | int:
    """Index of this shard, int32 []."""
    return 0 if axis_name is None else lax.axis_index(axis_name)


def count(axis_name: str | None) -> int:
    """Number of shards."""
    return 1 if axis_name is None else lax.axis_size(axis_name)


def reduced(collective: Callable[..., Any], x: Any, axis_name: str | None) -> Any:
    """x reduced over all shards by a collective such as `lax.psum`."""
    return x if axis_name is None else collective(x, axis_name)
