"""Recent: draws newer items more often, by a power of their rank.

**Distribution.** The integral of the power: rank k, from 1 for the oldest of N items, has probability
(k^q - (k - 1)^q) / N^q with q = power + 1.

**Draw.** With u uniform in [0, 1) the age is floor(N (1 - (1 - u)^(1/q))). `max_age` restricts u.

**Precision.** A float32 near N has too few bits to name an item. So the age, or near the oldest item the rank, is
computed to a relative precision of 2^-22, and then moved by a uniform number of up to 2^-13 of itself. The probability
changes by that distance squared, which is far below the rounding of float32, and no item is left out.
"""

from typing import Any, ClassVar, Literal

import jax
import jax.numpy as jnp

from jaxreplay._common import checks, random, ring, xla
from jaxreplay.samplers._base import Sampler
from jaxreplay.samplers._weights import weights_of


@checks.config
class Recent(Sampler[None]):
    """Draws newer items more often, about in proportion to rank^power, with rank 1 for the oldest of N items.

    Rank k has the probability (k^q - (k - 1)^q) / N^q with q = power + 1, the integral of the power. A draw costs
    O(batch_size) and stores nothing per item. Related: ERE (Wang and Ross 2019, Boosting Soft Actor-Critic:
    Emphasizing Recent Experience without Forgetting the Past, section 4), which draws uniformly from fewer and fewer of
    the newest; for that, use `Uniform` and `sample(max_age=)`.

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
      >>> items = np.array([10, 20, 30, 40])
      >>> state = buffer.add(buffer.init(items), items)
      >>> sample = buffer.sample(state, jax.random.key(0), batch_size=8)
      >>> # The newest, 40, has seven times the probability of the oldest.
      >>> bool(jnp.allclose(sample.probabilities, (sample.items / 5 - 1) / 16))
      True
    """

    power: float = checks.field(checks.check_number, 0, 10**6, "1 is usual, 0 is uniform")
    beta: float = checks.field(checks.check_number, 0, 1, "sample(beta=) takes a traced one", default=0.0)
    normalize: Literal["batch"] | None = checks.field(checks.check_choice, "batch", None, default="batch")
    by_age: ClassVar[bool] = True
    fills_rows = property(lambda _: True)

    def init(self, capacity: int) -> None:
        return None

    def sample(self, state: None, key: jax.Array, batch_size: int, live: ring.Live) -> tuple[jax.Array, jax.Array]:
        first, second = (words.reshape(2, batch_size) for words in random.random_bits(key, 2 * batch_size))
        size = jnp.maximum(live.size, 1)
        newest, exponent = jnp.maximum(live.older + live.size, 1), self.power + 1.0  # the largest k
        count, log_rest = newest.astype(jnp.float32), exponent * _log_rest(size, newest)
        rest, span = jnp.exp(log_rest), -jnp.expm1(log_rest)  # the shares of older items and of live ones
        newer, older = _unit(first[0], second[0]), _unit(~first[0], ~second[0])  # sum to 1; a small one is precise
        age = -count * jnp.expm1(jnp.log1p(-span * newer) / exponent)
        is_old = age >= count / 2
        place = jnp.where(is_old, count * jnp.exp(jnp.log(rest + span * older) / exponent), age)
        moved = place * 2.0**-12 * ((second[1] >> 8).astype(jnp.float32) * 2.0**-24 - 0.5)
        whole = jnp.floor(place)  # and the rest apart, as a float32 has no room for both
        place = whole.astype(jnp.int32) + jnp.floor(place - whole + moved).astype(jnp.int32)
        age = jnp.where(is_old, newest - 1 - place, place)
        age = jnp.clip(jnp.where(age >= size, 2 * size - 1 - age, age), 0, size - 1)  # mirrored at the end
        (age,) = xla.materialize(age)
        # The quotient of both terms of k^q - (k - 1)^q.
        ratio = jnp.log1p(-1.0 / (newest - age).astype(jnp.float32))
        share = -jnp.exp(exponent * _log_rest(age, newest)) * jnp.expm1(exponent * ratio) / span
        return live.slots(size - 1 - age), jnp.where(live.size > 0, share, 0.0)

    def weights(self, state: None, probabilities: jax.Array, live: ring.Live, *, beta: Any = None) -> jax.Array:
        beta, shares = self.beta if beta is None else beta, probabilities / ring.num_shards(live.axis_name)
        return weights_of(shares, live.total(), beta, self.normalize, None, live.axis_name)


def _unit(high: jax.Array, low: jax.Array) -> jax.Array:
    """Uniform numbers in [0, 1], float32, from 64 bits; small ones are as precise as large ones."""
    return (high.astype(jnp.float32) + low.astype(jnp.float32) * 2.0**-32) * 2.0**-32


def _log_rest(part: jax.Array, whole: jax.Array) -> jax.Array:
    """log((whole - part) / whole) for int32 0 <= part <= whole, float32, to float precision for all parts."""
    size = whole.astype(jnp.float32)
    few = jnp.log1p(-(part.astype(jnp.float32) / size))
    return jnp.where(part < whole // 2, few, jnp.log((whole - part).astype(jnp.float32) / size))
