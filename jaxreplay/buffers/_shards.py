"""Any buffer as its shards: one that is not `Sharded` is a single shard.

Code that serves both asks here which of them it has, and nowhere else.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from jaxreplay._common.meshes import OnMesh


class Shards(NamedTuple):
    """A buffer as its shards.

    Attributes:
      whole: the buffer without `Sharded`, which counts all shards.
      part: the buffer that each shard is.
      num_shards: D.
      sharding: of the leaves [D, ...] of a state; None for a buffer alone, whose states have no such axis.
    """

    whole: Any
    part: Any
    num_shards: int
    sharding: NamedSharding | None

    def stacked(self, state: Any) -> Any:
        """Leaves [D, ...] of a state."""
        return state if self.sharding else jax.tree.map(lambda x: x[None], state)

    def part_spec(self, state: Any) -> Any:
        """Shapes and dtypes of one shard's leaves of a state."""
        if self.sharding is None:
            return state
        return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), state)

    def place(self, x: np.ndarray) -> jax.Array:
        """A leaf [D, ...] on the host as that of a state."""
        if self.sharding is None:
            return jnp.asarray(x[0])
        return jax.make_array_from_callback(x.shape, self.sharding, lambda index: x[index])


def shards_of(buffer: Any) -> Shards:
    """A buffer, or `Sharded` of one, as its shards."""
    if not isinstance(buffer, OnMesh):
        return Shards(buffer, buffer, 1, None)
    sharded: Any = buffer
    return Shards(sharded.buffer, sharded._part, sharded.num_shards, sharded.state_sharding)


def whole_of(buffer: Any) -> Any:
    """The buffer that a `Sharded` cuts; any other as it is."""
    return shards_of(buffer).whole


def with_whole(buffer: Any, whole: Any) -> Any:
    """`whole`, sharded as `buffer` is."""
    config: Any = buffer
    return dataclasses.replace(config, buffer=whole) if isinstance(buffer, OnMesh) else whole


@functools.cache
def part_of(buffer: Any, num_shards: int, axis_name: str | None = None) -> Any:
    """The buffer that each of `num_shards` shards of `buffer` is.

    Raises:
      ValueError: it cannot be cut evenly.
    """
    name = buffer._storage_axes[-1]
    size = getattr(buffer, name)
    if size % num_shards:
        raise ValueError(f"{name}={size}: must be a multiple of {num_shards}, the number of shards.")
    return dataclasses.replace(buffer, **{name: size // num_shards}, _axis_name=axis_name)
