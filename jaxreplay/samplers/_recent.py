"""Recent: newer items more often, by a power of their rank.

**Distribution.** Rank k, from 1 for the oldest of N items, has probability k^power / sum of j^power over all ranks j.

**Draw.** The ranks are divided into CELLS runs, the oldest first, of increasing probability. A proposal is a cell, then
a rank in it, uniform. The cell has the probability of its size times the largest weight in it, so a proposal is
accepted with its own weight over that largest one. Rounding moves the bounds of the cells, which are integers, but not
the distribution: any bounds give the exact one. Fewer than 2% of the proposals are rejected. All ROUNDS proposals of a
row are made at once, and the first accepted one counts, so the cost does not depend on the draws. If all are rejected,
which happens to one row in 10^5, the row is drawn by the inverse of the continuous distribution function.

**Normalizer.** The weights of the W ranks of a cell are summed by the two-point Gauss rule of W equally spaced points,
whose nodes are sqrt((W^2 - 1) / 12) from their mean. It is exact for cubics, and for W = 1 and 2.
"""

import dataclasses
from typing import Any, ClassVar, Literal

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import lax

from jaxreplay._common import shards
from jaxreplay._common.checks import check_number, keywords_only, settle
from jaxreplay._common.random import random_bits, random_integers_and_rest
from jaxreplay._common.ring import Live
from jaxreplay._common.xla import materialize
from jaxreplay.samplers._protocol import Sampler
from jaxreplay.samplers._weights import importance_weights

CELLS, ROUNDS = 128, 3
# Share of the items that is newer than each bound of the cells. The cells of old items are small, as their weights vary
# most.
NEWER = (1.0 - (np.arange(CELLS + 1) / CELLS) ** 3).astype(np.float32)


@struct.dataclass
class RecentState:
    """State of `Recent`.

    Attributes:
      capacity: number of slots (static).

    Examples:
      >>> state = jr.Recent(power=1.0).init(4)
      >>> isinstance(state, jr.samplers.RecentState), state.capacity
      (True, 4)
    """

    capacity: int = struct.field(pytree_node=False)


@keywords_only
@dataclasses.dataclass(frozen=True, kw_only=True)
class Recent(Sampler[RecentState]):
    """Newer items more often, in proportion to ((rank + 1) / size)^power, with rank 0 for the oldest of size items.

    A draw costs O(batch_size) and stores nothing per item. The distribution holds to within 2^-18 in float32, at any
    size. Its relative is ERE (Wang and Ross 2019, Boosting Soft Actor-Critic: Emphasizing Recent Experience without
    Forgetting the Past, section 4), which draws uniformly from fewer and fewer of the newest items; for that, use
    `Uniform` and `sample(max_age=)`.

    The rank is the order of insertion. In a `SequenceBuffer` it is the order in which the drawable sequences were
    completed; of those that one row completes, later streams are newer. In a `Sharded` buffer it is the rank within the
    shard. With `max_age`, ranks count all items, and the distribution is restricted to the younger ones. A
    `ReservoirBuffer` keeps no order and rejects this sampler. `update` changes nothing.

    Attributes:
      power: exponent of the rank, from 0 (uniform) to 10**6. With 1, the newest item is twice as likely as the median.
      beta: exponent of the weights (N P)^-beta, in [0, 1]. The default, 0, keeps the emphasis, as ERE does: all weights
        are 1. With 1 the emphasis is on which items are seen, but the weighted mean estimates the mean over all items.
        `sample` can override it.
      normalize: divide the weights by the largest of the "batch", or not at all (None).

    Examples:
      >>> buffer = jr.ReplayBuffer(capacity=4, sampler=jr.Recent(power=1.0))
      >>> items = jnp.array([10, 20, 30, 40])
      >>> state = buffer.add(buffer.init(items), items)
      >>> sample = buffer.sample(state, jax.random.key(0), batch_size=8)
      >>> # The newest, 40, has four times the probability of the oldest.
      >>> bool(jnp.allclose(sample.probabilities, sample.items / 100))
      True
    """

    power: float
    beta: float = 0.0
    normalize: Literal["batch"] | None = "batch"
    by_age: ClassVar[bool] = True

    def __post_init__(self):
        power = check_number("power", self.power, 0, 10**6, "1 is usual, 0 is uniform")
        beta = check_number("beta", self.beta, 0, 1, "sample(beta=) takes a traced one")
        settle(self, power=power, beta=beta)
        if self.normalize not in ("batch", None):
            raise ValueError(f'normalize={self.normalize!r}: must be "batch" or None.')

    def init(self, capacity: int) -> RecentState:
        return RecentState(capacity)

    def insert(
        self,
        state: RecentState,
        slots: jax.Array,
        drawable: jax.Array,
        *,
        td_errors: jax.Array | None = None,
        axis_name: str | None = None,
    ) -> RecentState:
        return state

    def sample(self, state: RecentState, key: jax.Array, batch_size: int, live: Live) -> tuple[jax.Array, jax.Array]:
        bits = [words.reshape(2, ROUNDS, batch_size) for words in random_bits(key, 2 * ROUNDS * batch_size)]
        newest = jnp.maximum(live.older + live.size, 1)  # the largest k
        bounds, cumulative, mass = self._cells(live.size, newest)
        proposed, accepted = self._propose(bits, bounds, cumulative, newest)
        size = jnp.maximum(live.size, 1)
        age = jnp.minimum(self._age(size, newest, _below_one(bits[1][0, -1])), size - 1)
        for k in reversed(range(ROUNDS)):
            age = jnp.where(accepted[k], proposed[k], age)
        (age,) = materialize(age)
        probabilities = jnp.where(live.size > 0, self._weight(age, newest) / mass, 0.0)
        return live.slots(size - 1 - age, state.capacity), probabilities

    def restrict(self, state: RecentState, live: Live) -> RecentState:
        return state

    def weights(
        self,
        state: RecentState,
        probabilities: jax.Array,
        size: jax.Array,
        *,
        beta: Any = None,
        axis_name: str | None = None,
    ) -> jax.Array:
        return importance_weights(
            probabilities / shards.count(axis_name),
            shards.total(size, axis_name),
            self.beta if beta is None else beta,
            normalize=self.normalize,
            axis_name=axis_name,
        )

    def priorities(self, state: RecentState, slots: jax.Array) -> jax.Array:
        return jnp.ones(slots.shape, jnp.float32)

    def update(
        self,
        state: RecentState,
        slots: jax.Array,
        td_errors: jax.Array,
        mask: jax.Array,
        *,
        axis_name: str | None = None,
    ) -> RecentState:
        return state

    def _weight(self, age: jax.Array, newest: jax.Array) -> jax.Array:
        """(k / newest)^power of the rank k = newest - age, float32."""
        return jnp.exp(self.power * _log_rest(age, newest))

    def _age(self, size: jax.Array, newest: jax.Array, newer: Any) -> jax.Array:
        """Age below which the continuous distribution has the share `newer` (float32 [...]) of its mass, int32."""
        exponent = self.power + 1.0
        span = -jnp.expm1(exponent * _log_rest(size, newest))
        age = -newest.astype(jnp.float32) * jnp.expm1(jnp.log1p(-span * newer) / exponent)
        return jnp.clip(age.astype(jnp.int32), 0, size)

    def _cells(self, size: jax.Array, newest: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Bounds of the cells, proposals and normalizer.

        Returns:
          ages that bound the cells, int32 [CELLS + 1], descending; cumulative masses of the proposals, float32 [CELLS];
          and the sum of all weights, float32 [].
        """
        # With a large power or few items, the newest have a cell each.
        inner = jnp.clip(self._age(size, newest, NEWER[1:-1]), np.arange(CELLS - 1, 0, -1, dtype=np.int32), size)
        bounds = jnp.concatenate([size[None], inner, jnp.zeros_like(size)[None]])
        (bounds,) = materialize(lax.cummin(bounds))
        first, width = bounds[1:], bounds[:-1] - bounds[1:]
        largest = jnp.where(width > 0, self._weight(first, newest), 0.0)
        count = width.astype(jnp.float32)
        middle, spread = (count - 1) / 2, jnp.sqrt(jnp.maximum((count + 1) * (count - 1), 0.0) / 12)
        rest = jnp.maximum(newest - first, 1).astype(jnp.float32)
        nodes = [jnp.exp(self.power * jnp.log1p(-(middle + x) / rest)) for x in (spread, -spread)]
        mass = jnp.sum(jnp.where(width > 0, largest * count * (nodes[0] + nodes[1]) / 2, 0.0))
        return bounds, jnp.cumsum(largest * count), jnp.maximum(mass, 2.0**-63)

    def _propose(
        self, bits: list[jax.Array], bounds: jax.Array, cumulative: jax.Array, newest: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """Proposed ages, int32 [ROUNDS, B], and True if accepted, bool [ROUNDS, B]."""
        total = cumulative[-1]
        prefix = jnp.minimum(_unit(bits[0][0]) * total, total * np.float32(1 - 2.0**-24))
        cell = jnp.sum(cumulative[None, None] <= prefix[..., None], axis=-1, dtype=jnp.int32)
        cell = jnp.minimum(cell, CELLS - 1)  # nothing is live
        (cell,) = materialize(cell)
        first, end = (bounds.at[cell + k].get(mode="promise_in_bounds") for k in (1, 0))
        offset, rest = random_integers_and_rest((bits[0][1], bits[1][1]), jnp.maximum(end - first, 1))
        chance = jnp.exp(self.power * _log_rest(offset, newest - first))
        return first + offset, _below_one(rest) < chance


def _unit(words: jax.Array) -> jax.Array:
    """Uniform numbers in [0, 1], float32, from uint32; small ones have 32 bits."""
    return words.astype(jnp.float32) * 2.0**-32


def _below_one(words: jax.Array) -> jax.Array:
    """Uniform numbers in [0, 1), float32, from uint32."""
    return (words >> 8).astype(jnp.float32) * 2.0**-24


def _log_rest(part: jax.Array, whole: jax.Array) -> jax.Array:
    """log((whole - part) / whole) for int32 0 <= part <= whole, float32, to float precision for all parts."""
    size = whole.astype(jnp.float32)
    few = jnp.log1p(-(part.astype(jnp.float32) / size))
    return jnp.where(part < whole // 2, few, jnp.log((whole - part).astype(jnp.float32) / size))
