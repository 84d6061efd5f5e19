"""Any buffer as a list of shards: a buffer that is not `Sharded` is a single shard.

All distinctions between sharded and plain buffers are made here.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import NamedSharding


class Shards(NamedTuple):
    """A buffer as its shards.

    Attributes:
      whole: the wrapped buffer, whose sizes count all shards.
      part: the configuration of one shard.
      num_shards: D.
      sharding: of a state's leaves [D, ...]; None for a buffer that is not `Sharded`, whose leaves have no axis [D].
    """

    whole: Any
    part: Any
    num_shards: int
    sharding: NamedSharding | None

    def stacked(self, state: Any) -> Any:
        """The state with leaves [D, ...]."""
        return state if self.sharding else _stacked(state)

    def part_spec(self, state: Any) -> Any:
        """Shapes and dtypes of one shard's part of a state."""
        if self.sharding is None:
            return state
        return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), state)

    def smallest_batch(self, items: Any, num_axes: int) -> Any:
        """Shapes and dtypes of the smallest batch that `init` takes, of items with `num_axes` leading axes."""
        leading = (*[1] * (self.whole._batch_axes - 1), getattr(self.whole, "num_envs", self.num_shards))
        return jax.tree.map(lambda x: jax.ShapeDtypeStruct(leading + x.shape[num_axes:], x.dtype), items)

    def place(self, x: np.ndarray) -> jax.Array:
        """A host array [D, ...] as a leaf of a state."""
        if self.sharding is None:
            return jax.device_put(x[0])
        return jax.make_array_from_callback(x.shape, self.sharding, lambda index: x[index])


@jax.jit
def _stacked(state: Any) -> Any:
    return jax.tree.map(lambda x: x[None], state)


def shards_of(buffer: Any) -> Shards:
    """The shards of a buffer, `Sharded` or not."""
    if not getattr(buffer, "is_sharded", False):
        return Shards(buffer, buffer, 1, None)
    sharded: Any = buffer
    return Shards(sharded.buffer, sharded._part, sharded.num_shards, sharded.state_sharding)


def whole_of(buffer: Any) -> Any:
    """The buffer wrapped by a `Sharded`; other values are returned unchanged."""
    return shards_of(buffer).whole


def room(buffer: Any) -> int:
    """Number of items that a buffer, or all sources of a mixture, can hold."""
    return sum(whole_of(source).num_slots for source in getattr(buffer, "buffers", (buffer,)))


@functools.cache
def part_of(buffer: Any, num_shards: int, axis_name: str | None = None) -> Any:
    """The configuration of one of `num_shards` shards; a `ValueError` if the buffer's size is not a multiple of it."""
    name = buffer._storage_axes[-1]
    size = getattr(buffer, name)
    if size % num_shards:
        raise ValueError(f"{name}={size}: must be a multiple of {num_shards}, the number of shards.")
    return dataclasses.replace(buffer, **{name: size // num_shards}, _axis_name=axis_name, _num_shards=num_shards)
