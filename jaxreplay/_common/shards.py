"""What one shard of a buffer knows of the others, by the name of the mapped axis over them; None for a buffer alone."""

from typing import Any

import jax
from jax import lax


def index(axis_name: str | None) -> jax.Array | int:
    """Which shard this is, int32 []."""
    return 0 if axis_name is None else lax.axis_index(axis_name)


def count(axis_name: str | None) -> int:
    """The number of shards."""
    return 1 if axis_name is None else lax.axis_size(axis_name)


def total(x: Any, axis_name: str | None) -> Any:
    """The sum of x over all shards."""
    return x if axis_name is None else lax.psum(x, axis_name)


def largest(x: jax.Array, axis_name: str | None) -> jax.Array:
    """The maximum of x over all shards."""
    return x if axis_name is None else lax.pmax(x, axis_name)


def smallest(x: jax.Array, axis_name: str | None) -> jax.Array:
    """The minimum of x over all shards."""
    return x if axis_name is None else lax.pmin(x, axis_name)
