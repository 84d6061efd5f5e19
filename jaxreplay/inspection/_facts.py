"""Facts about the items and the draws of a state, for `diagnostics` and `plot`.

States have leaves [D, ...]: D stacked shards, each a state of the buffer `part`.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxreplay import sum_tree
from jaxreplay._common import checks, ring
from jaxreplay.buffers import Sample, _base, _shards, _uses
from jaxreplay.curricula import DifficultyPools, Levels, Tasks
from jaxreplay.wrappers import Mixture

TOPS = {"top_1pct_mass": 0.01, "top_10pct_mass": 0.1}


class Items(NamedTuple):
    """Facts about all slots. The last two are None if the sampler has no priorities.

    Attributes:
      live: bool, True if the slot may be drawn.
      ages: int32, `Sample.age`; arbitrary if the slot is not live.
      priorities: float32, before alpha.
      sums: float32 [] by name: probability of the most probable 1% and 10% of the items; with ages that count, how
        many items with a priority are never drawn.
    """

    live: Any  # [D, num_slots]
    ages: Any  # [D, num_slots]
    priorities: Any = None  # [D, num_slots]
    sums: Any = None


def of_items(part: Any, state: Any) -> Items:
    """Facts about all slots, in O(N log N); the state need not have a storage."""
    slots = jnp.arange(part.num_slots, dtype=jnp.int32)

    def of_shard(state: Any) -> tuple[Any, ...]:
        every, sampler = state.ring.live(), part.sampler
        live = ring.wrap_negative(slots - every.start, part.num_slots) < every.size
        return live, part._ages(state, slots), sampler.masses(state.sampler), sampler.priorities(state.sampler, slots)

    live, ages, masses, priorities = jax.vmap(of_shard, axis_name=part._axis_name)(state)
    if masses is None:
        return Items(live, ages)
    total, number = jnp.sum(masses, axis=1), drawable(state)
    weighted = total > 0
    evenly = 1.0 if state.uses is None or state.uses.unspent is None else sum_tree.leaves(state.uses.unspent)
    filled = jnp.maximum(jnp.sum(number > 0, dtype=jnp.float32), 1.0)
    # Probabilities; all non-empty shards have equal mass.
    scale = jnp.where(weighted, total, jnp.maximum(number, 1.0)) * filled
    law = jnp.where(live, jnp.where(weighted[:, None], masses, evenly) / scale[:, None], 0.0)
    in_order, rank = jnp.sort(law, axis=None)[::-1], jnp.arange(law.size, dtype=jnp.float32)
    count = jnp.sum(sizes(state))
    tops = {name: jnp.sum(in_order * jnp.clip(top * count - rank, 0.0, 1.0)) for name, top in TOPS.items()}
    if part.sampler.by_age:
        tops["stored/faded"] = jnp.sum((law < 2.0**-60 * in_order[0]) & (priorities > 0) & live, dtype=jnp.float32)
    return Items(live, ages, priorities, tops)


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


def curve(shards: _shards.Shards, state: Any, sample: Sample) -> tuple[jax.Array, ...]:
    """Share of the items and their share of the draws, the most probable first, float32 [B + 1] each; O(B log B).

    The rows of `sample` are grouped by shard.
    """
    drawn, num_shards, total = sample.indices >= 0, shards.num_shards, jnp.sum(sizes(state))
    filled = jnp.sum(drawable(state) > 0, dtype=jnp.float32)
    # Rows of an empty shard draw nothing. The rows of the others cover all items, and each of them has equal mass.
    mass = shares_of_draws(drawn, num_shards, filled)
    probability, mass = jax.lax.sort((sample.probabilities, mass), num_keys=1)
    items = mass / jnp.where(probability > 0, probability, 1.0)
    items *= filled / (jnp.maximum(total, 1.0) * num_shards)
    return tuple(jnp.pad(jnp.cumsum(column[::-1]), (1, 0)) for column in (items, mass))


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
