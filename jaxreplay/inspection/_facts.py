"""Facts about a state and its draws, for `diagnostics` and `plot`.

States have leaves [D, ...]: D stacked shards, each a state of the buffer `part`.
"""

from typing import Any

import jax
import jax.numpy as jnp

from jaxreplay._common import checks
from jaxreplay.buffers import Sample, _base, _shards, _uses
from jaxreplay.curricula import DifficultyPools, Levels, Tasks
from jaxreplay.wrappers import Mixture


def check_buffer(buffer: Any) -> None:
    if not isinstance(_shards.whole_of(buffer), _base.Buffer | Mixture | DifficultyPools | Tasks | Levels):
        raise ValueError(f"buffer={checks.brief(buffer)}: must be a buffer or a curriculum of jaxreplay.")


def draw(buffer: Any, state: Any, key: jax.Array, batch_size: int) -> Sample:
    """A batch without its items, of at least `batch_size` rows, or as many as can be drawn."""
    shards = _shards.shards_of(buffer).num_shards
    for source, share in zip(getattr(buffer, "buffers", (buffer,)), getattr(buffer, "shares", (1,)), strict=True):
        if _shards.whole_of(source).sampler.is_distinct:
            batch_size = min(batch_size, max(int(_shards.room(source) / share), 1))
    return without_items(buffer.sample(state, key, -(-batch_size // shards) * shards))


def without_items(sample: Sample) -> Sample:
    """A batch without its items and transitions, which are not needed."""
    return Sample(None, sample.indices, sample.probabilities, sample.weights, None, sample.age)


def priorities_at(shards: _shards.Shards, state: Any, probabilities: jax.Array) -> jax.Array | None:
    """Priorities of items drawn with `probabilities`, in the whole batch and grouped by shard; None if unknown."""
    of_shards = probabilities.reshape(shards.num_shards, -1) * shards.num_shards
    priorities = jax.vmap(shards.whole.sampler.priorities_at)(state.sampler, of_shards)
    return None if priorities is None else priorities.reshape(-1)


def sizes(state: Any) -> jax.Array:
    """Stored items in each shard, float32 [D]."""
    return state.ring.size.astype(jnp.float32)


def drawable(state: Any) -> jax.Array:
    """Items in each shard that may be drawn, float32 [D]."""
    return jax.vmap(_uses.num_drawable)(state.uses, state.ring.size).astype(jnp.float32)


def shares_of_draws(drawn: jax.Array, num_shards: int, filled: jax.Array) -> jax.Array:
    """Share of the draws of each row that is `drawn` (bool [B], by shard); each of `filled` shards has equal mass."""
    held = jnp.sum(drawn.reshape(num_shards, -1), axis=1, dtype=jnp.int32).astype(jnp.float32)
    return jnp.where(drawn, 1.0 / jnp.repeat(jnp.maximum(held, 1.0) * filled, drawn.size // num_shards), 0.0)
