"""Live slots of a state, their ages and probabilities, for `diagnostics` and reports.

States have leaves [D, ...]: D stacked shards, each a state of the buffer `part`.
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
    """Facts about all slots. The last three are None if the sampler has no priorities.

    Attributes:
      live: bool, True if the slot may be drawn.
      ages: int32, `Sample.age`; arbitrary if the slot is not live.
      leaves: float32, p^alpha.
      law: float32, probabilities. All non-empty shards have equal mass.
      top_masses: probability of the most probable 1% and 10% of the items, float32 [] by name.
    """

    live: Any  # [D, num_slots]
    ages: Any  # [D, num_slots]
    leaves: Any = None  # [D, num_slots]
    law: Any = None  # [D, num_slots]
    top_masses: Any = None


@functools.partial(jax.jit, static_argnums=0, inline=True)
def of_items(part: Any, state: Any) -> Items:
    """Facts about all slots, in O(N log N); the state need not have a storage."""
    slots = jnp.arange(part._num_slots, dtype=jnp.int32)

    def of_shard(state: Any) -> tuple[jax.Array, jax.Array]:
        of = part._live(state)
        return ring.wrap_negative(slots - of.start, part._num_slots) < of.size, part._ages(state, slots)

    live, ages = jax.vmap(of_shard, axis_name=part._axis_name)(state)
    if not isinstance(state.sampler, PrioritizedState):
        return Items(live, ages)
    leaves, total = sum_tree.leaves(state.sampler.tree), totals(state.sampler)
    sizes, weighted = state.ring.size.astype(jnp.float32), total > 0
    filled = jnp.maximum(jnp.sum(sizes > 0, dtype=jnp.float32), 1.0)
    unspent = None if state.uses is None else state.uses.unspent
    number, evenly = (sizes, 1.0) if unspent is None else (jax.vmap(sum_tree.total)(unspent), sum_tree.leaves(unspent))
    scale = jnp.where(weighted, total, jnp.maximum(number, 1.0)) * filled
    law = jnp.where(live, jnp.where(weighted[:, None], leaves, evenly) / scale[:, None], 0.0)
    in_order, rank = descending(law), jnp.arange(law.size, dtype=jnp.float32)
    masses = {name: jnp.sum(in_order * jnp.clip(top * jnp.sum(sizes) - rank, 0.0, 1.0)) for name, top in TOPS.items()}
    return Items(live, ages, leaves, law, masses)


def totals(sampler: PrioritizedState) -> jax.Array:
    """Sum of p^alpha in each shard, float32 [D]."""
    return jax.vmap(sum_tree.total)(sampler.tree)


def descending(x: jax.Array) -> jax.Array:
    """All numbers in descending order."""
    return -jnp.sort(-x.reshape(-1))
