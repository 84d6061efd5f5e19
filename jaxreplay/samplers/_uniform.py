"""Uniform: every stored item is equally likely."""

from typing import Any

import jax
import jax.numpy as jnp

from jaxreplay import sum_tree
from jaxreplay._common import checks, random, ring
from jaxreplay.samplers._base import Sampler
from jaxreplay.samplers._weights import uniform_slots

MOST_DISTINCT = 2**23  # counts up to this are exact in a float32 tree, with room for a half


@checks.config
class Uniform(Sampler[None]):
    """Uniform sampling: every stored item is equally likely.

    All weights are 1. `update` changes nothing.

    In a sharded buffer, weights correct for unequal shards: (items in the shard / items in all shards) * (rows of the
    batch / rows of the shard that hold an item). The weighted distribution is uniform over the items of all shards.

    Attributes:
      replacement: draw with replacement. If False, the items of a batch are distinct, so it has at most as many rows as
        the buffer has slots. Rows beyond the number of items have handle -1, probability 0 and weight 0.

    Examples:
      >>> buffer = jr.ReplayBuffer(capacity=4, sampler=jr.Uniform(replacement=False))
      >>> items = np.array([10, 20, 30, 40])
      >>> state = buffer.add(buffer.init(items), items)
      >>> sorted(buffer.sample(state, jax.random.key(0), batch_size=4).items.tolist())
      [10, 20, 30, 40]
    """

    replacement: bool = checks.field(checks.check_bool, "whether to draw with replacement", default=True)

    fills_rows = property(lambda self: self.replacement)
    is_distinct = property(lambda self: not self.replacement)

    def sample(self, state: None, key: jax.Array, batch_size: int, live: ring.Live) -> tuple[jax.Array, jax.Array]:
        probability = jnp.where(live.size > 0, 1.0 / jnp.maximum(live.size, 1).astype(jnp.float32), 0.0)
        probability = jnp.full(batch_size, probability)
        if self.replacement:
            return uniform_slots(random.random_bits(key, batch_size), live), probability
        rows = jnp.arange(batch_size, dtype=jnp.int32)
        exists = rows < live.size
        rank = random.permuted(key, jnp.where(exists, rows, 0), live.size)
        if live.unspent is None:
            slots = live.slots(rank)
        elif live.capacity > MOST_DISTINCT:
            found = f"{live.capacity} slots, at most {MOST_DISTINCT}"
            raise ValueError(f"max_uses, replacement=False: {found}; draw with replacement.")
        else:
            slots = sum_tree.find(live.unspent, rank.astype(jnp.float32) + 0.5)
        return slots, jnp.where(exists, probability, 0.0)

    def weights(self, state: None, probabilities: jax.Array, live: ring.Live, *, beta: Any = None) -> jax.Array:
        weight = jnp.ones((), jnp.float32)
        if live.axis_name is not None:
            # Items times rows / rows that hold an item. Without replacement no more rows than items hold one.
            share = live.size if self.replacement else jnp.maximum(live.size, probabilities.size)
            share *= ring.num_shards(live.axis_name)
            weight = share.astype(jnp.float32) / jnp.maximum(live.total(), 1).astype(jnp.float32)
        return jnp.where(probabilities > 0, weight, 0.0)
