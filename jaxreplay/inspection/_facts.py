"""What of a state may be drawn, how old it is, and how probable: for `diagnostics` and for reports.

A state has leaves [D, ...], as those of D shards are stacked, and each of these is a state of the buffer `part`.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxreplay import sum_tree
from jaxreplay._common import ring
from jaxreplay.samplers import PrioritizedState

TOPS = {"top_1pct_mass": 0.01, "top_10pct_mass": 0.1}


class Items(NamedTuple):
    """Facts of all slots; None where the sampler has no priorities.

    Attributes:
      live: bool, whether the slot holds what may be drawn.
      ages: int32, `Sample.age`; any where the slot is not live.
      leaves: float32, p^alpha.
      law: float32, the probability. All shards that hold anything are drawn from equally.
      top_masses: by name, float32 [], the probability of the most probable 1% and 10% of the items.
    """

    live: Any  # [D, num_slots]
    ages: Any  # [D, num_slots]
    leaves: Any = None  # [D, num_slots]
    law: Any = None  # [D, num_slots]
    top_masses: Any = None


@functools.partial(jax.jit, static_argnums=0, inline=True)
def of_items(part: Any, state: Any) -> Items:
    """All of it, in O(N log N); the state need not have a storage."""
    slots = jnp.arange(part._num_slots, dtype=jnp.int32)

    def of_shard(state: Any) -> tuple[jax.Array, jax.Array]:
        start, size = part._live(state)
        return ring.wrap_negative(slots - start, part._num_slots) < size, part._ages(state, slots)

    live, ages = jax.vmap(of_shard, axis_name=part._axis_name)(state)
    if not isinstance(state.sampler, PrioritizedState):
        return Items(live, ages)
    leaves, total = sum_tree.leaves(state.sampler.tree), totals(state.sampler)
    sizes, weighted = state.ring.size.astype(jnp.float32), total > 0
    filled = jnp.maximum(jnp.sum(sizes > 0, dtype=jnp.float32), 1.0)
    scale = jnp.where(weighted, total, jnp.maximum(sizes, 1.0)) * filled
    law = jnp.where(live, jnp.where(weighted[:, None], leaves, 1.0) / scale[:, None], 0.0)
    in_order, rank = descending(law), jnp.arange(law.size, dtype=jnp.float32)
    masses = {name: jnp.sum(in_order * jnp.clip(top * jnp.sum(sizes) - rank, 0.0, 1.0)) for name, top in TOPS.items()}
    return Items(live, ages, leaves, law, masses)


def totals(sampler: PrioritizedState) -> jax.Array:
    """Sum of p^alpha in each shard, float32 [D]."""
    return jax.vmap(sum_tree.total)(sampler.tree)


def descending(x: jax.Array) -> jax.Array:
    """All numbers, the largest first."""
    return -jnp.sort(-x.reshape(-1))
