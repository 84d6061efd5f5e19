"""Collectives over the shards of a buffer: `axis_name` is the mapped axis over them, None without shards."""

from typing import Any

import jax
from jax import lax


def index(axis_name: str | None) -> jax.Array | int:
    """Index of this shard, int32 []."""
    return 0 if axis_name is None else lax.axis_index(axis_name)


def count(axis_name: str | None) -> int:
    """Number of shards."""
    return 1 if axis_name is None else lax.axis_size(axis_name)


def total(x: Any, axis_name: str | None) -> Any:
    """Sum of x over all shards."""
    return x if axis_name is None else lax.psum(x, axis_name)


def largest(x: jax.Array, axis_name: str | None) -> jax.Array:
    """Maximum of x over all shards."""
    return x if axis_name is None else lax.pmax(x, axis_name)


def smallest(x: jax.Array, axis_name: str | None) -> jax.Array:
    """Minimum of x over all shards."""
    return x if axis_name is None else lax.pmin(x, axis_name)
