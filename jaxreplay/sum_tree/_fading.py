"""Fading: the leaves of a sum tree lose half of their mass with each half-life of their age.

A draw takes leaf i in proportion to leaf_i 2^(-age_i / half_life), and nothing is rewritten as leaves age. Leaves are
stored as they are. A node stores the faded sum of its leaves relative to the newest of them: with children c of ages
a_c, the age of a node being that of its newest leaf, it is the sum of value_c 2^(-(a_c - a) / half_life).

Leaves are written in a ring. If the newest leaf moves from n to m, the ages of all leaves but those between n and m
grow alike. So a node without any of these keeps its value, and the ascent from the leaves that were written recomputes
all others. A draw multiplies the values of siblings by their own 2^(-age / half_life), level by level. No exponent is
positive, so nothing overflows, however long the run.
"""

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from jaxreplay.sum_tree._levels import NONE

LEAST = 2.0**-126  # the smallest float32 that no backend takes for 0


@struct.dataclass
class Fading:
    """Ages of the leaves of a tree, and how they count.

    Leaves are written in order, `streams` of one age at a time, and the first follows the last.

    Attributes:
      newest: int32 [], the newest leaf.
      half_life: float32 [], the age at which half of a leaf's mass is left, at least 2^-20.
      capacity: number of leaves, a multiple of `streams` (static).
      streams: number of consecutive leaves of one age (static).

    Examples:
      >>> tree = jr.samplers.Prioritized(half_life=2.0).init(4).tree
      >>> int(tree.fading.newest), float(tree.fading.half_life)  # the next leaf is the first
      (3, 2.0)
    """

    newest: jax.Array  # []
    half_life: jax.Array  # []
    capacity: int = struct.field(pytree_node=False)
    streams: int = struct.field(pytree_node=False)

    def ages(self, node: jax.Array, width: int = 1) -> jax.Array:
        """Ages of the newest leaf of each `node` (int32 [..., K, N]), whose leaves are `width` in number."""
        newest, first = self.newest[..., None, None], node * width
        last = jnp.minimum(first + (width - 1), self.capacity - 1)
        is_older = first > newest  # than leaf 0, as the ring has wrapped
        slot = jnp.where(is_older, last, jnp.minimum(last, newest))
        newest, slot = ((x if self.streams == 1 else jax.lax.div(x, jnp.int32(self.streams))) for x in (newest, slot))
        return newest - slot + jnp.where(is_older, self.capacity // self.streams, 0)

    def factor(self, ages: jax.Array) -> jax.Array:
        """2^(-ages / half_life), float32, for ages int32 [..., K, N]."""
        return jnp.exp2(ages.astype(jnp.float32) * (-1 / self.half_life)[..., None, None])

    def faded(self, values: jax.Array, factor: jax.Array, empty: float = 0.0) -> jax.Array:
        """`values` (float32 [..., K, N]) times `factor`. If `empty` is `NONE` they are minima and stay positive."""
        found = values * factor
        return jnp.where(values < NONE, jnp.maximum(found, LEAST), NONE) if empty else found

    def factors(self, parent: jax.Array, height: int, fanout: int) -> jax.Array:
        """Factors of the children of each `parent` [K] relative to its newest leaf, float32 [..., K, fanout]."""
        width, stacked = fanout**height, (None,) * self.newest.ndim

        def exact(parent: jax.Array) -> jax.Array:
            child = parent[..., None] * fanout + jnp.arange(fanout, dtype=jnp.int32)[(None,) * parent.ndim]
            return self.factor(self.ages(child, width) - self.ages(parent[..., None], width * fanout))

        def by_row(parent: jax.Array) -> jax.Array:
            """Most parents have the same factors, which a CPU computes once."""
            row = (np.arange(1, fanout + 1, dtype=np.int32) * width - 1) // self.streams
            factor = self.factor((row[-1:] - row)[(*stacked, None)])
            last = jnp.full_like(self.newest, self.capacity - 1)
            for leaf in (self.newest, *[last] * (self.capacity % (width * fanout) > 0)):
                one = jax.lax.div(leaf, np.int32(width * fanout))[..., None]
                factor = jnp.where(parent[..., None] == one[..., None], exact(one), factor)
            return factor

        is_aligned = width * fanout % self.streams == 0
        return jax.lax.platform_dependent(parent[stacked], cpu=by_row if is_aligned else exact, default=exact)
