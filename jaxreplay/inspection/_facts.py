"""What of a state may be drawn, how old it is, and how probable.

`diagnostics` asks within a program, reports on the host. A state has leaves [D, ...], as the shards of a buffer are
stacked, and each shard is a `part`.
"""

from typing import Any

import jax
import jax.numpy as jnp

from jaxreplay import sum_tree
from jaxreplay._common import ring

TOPS = {"top_1pct_mass": 0.01, "top_10pct_mass": 0.1}


def live(part: Any, state: Any) -> jax.Array:
    """Which slots hold what may be drawn, bool [D, num_slots]."""

    def of_shard(state: Any) -> jax.Array:
        start, size = part._live(state)
        offset = jnp.arange(part._num_slots, dtype=jnp.int32) - start
        return ring.wrap_negative(offset, part._num_slots) < size

    return jax.vmap(of_shard)(state)


def ages(part: Any, state: Any) -> jax.Array:
    """`Sample.age` of what lies in each slot, int32 [D, num_slots]."""
    slots = jnp.arange(part._num_slots, dtype=jnp.int32)
    return jax.vmap(lambda state: part._ages(state, slots), axis_name=part._axis_name)(state)


def totals(sampler: Any) -> jax.Array:
    """Sum of p^alpha in each shard, float32 [D], by the state of a `Prioritized`."""
    return jax.vmap(sum_tree.total)(sampler.tree)


def law(sampler: Any, live: jax.Array) -> jax.Array:
    """The probability of each slot, float32 [D, num_slots]; every shard that is not empty is drawn from equally."""
    sizes, total = jnp.sum(live, axis=1, dtype=jnp.float32), totals(sampler)
    weighted = total > 0
    scale = jnp.where(weighted, total, jnp.maximum(sizes, 1.0)) * jnp.maximum(
        jnp.sum(sizes > 0, dtype=jnp.float32), 1.0
    )
    shares = jnp.where(weighted[:, None], sum_tree.leaves(sampler.tree), 1.0)
    return jnp.where(live, shares / scale[:, None], 0.0)


def top_masses(law: jax.Array, size: jax.Array) -> dict[str, jax.Array]:
    """Probability of the most probable parts of `size` items, by name, float32 []."""
    in_order = descending(law)
    rank = jnp.arange(law.size, dtype=jnp.float32)
    return {name: jnp.sum(in_order * jnp.clip(part * size - rank, 0.0, 1.0)) for name, part in TOPS.items()}


def descending(x: jax.Array) -> jax.Array:
    """All numbers, the largest first, [...]."""
    return -jnp.sort(-x.reshape(-1))
