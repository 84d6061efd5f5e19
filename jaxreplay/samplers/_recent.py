"""Recent: draws newer items more often; the probability halves with each half-life of the age.

**Draw.** With u uniform in [0, 1), r = log(2) / half_life and n ages, the age is floor(-log(1 - u (1 - e^(-n r))) / r),
or near the other end by 1 - u: both are precise where they are small.

**Precision.** A float32 near n has too few bits to name an age. So the age is computed to a relative precision of
2^-22, and then moved by a uniform number of up to 2^-13 of itself. The probability changes by that distance in
half-lives squared, which is below the rounding of float32, and no age is left out.
"""

import dataclasses
import math
from typing import Any, ClassVar, Literal

import jax
import jax.numpy as jnp

from jaxreplay._common import checks, random, ring, xla
from jaxreplay.samplers._base import Sampler
from jaxreplay.samplers._weights import weights_of

SHORTEST = 2.0**-20  # with a shorter half-life only the newest are ever drawn


@checks.config
class Recent(Sampler[None]):
    """Draws newer items more often: the probability of an item is in proportion to 2^(-age / half_life).

    A draw costs O(batch_size) and stores nothing per item. The ages are truncated geometric, after arXiv:2605.10236.
    Related: ERE (Wang and Ross 2019, Boosting Soft Actor-Critic: Emphasizing Recent Experience without Forgetting the
    Past, section 4), which draws uniformly from fewer and fewer of the newest; for that, use `Uniform` and
    `sample(max_age=)`.

    The age is `Sample.age`. In a `Sharded` `ReplayBuffer` of D shards this is D times the number of later insertions
    into the item's shard. In a `SequenceBuffer` it is the number of later sequences of the stream. With windows
    "inside" or "episodes", or with `gaps`, streams have different numbers of drawable sequences, and the age that fades
    is the number of later drawable sequences of all streams, divided by the number of streams (of the shard);
    `Sample.age` counts the stream's sequences that may not be drawn too. With `max_age` the distribution is restricted
    to the younger items. A `ReservoirBuffer` keeps no order and rejects this sampler, and so does a buffer with
    `max_uses`. `update` changes nothing.

    Attributes:
      half_life: age at which an item is half as likely as the newest, at least 2^-20. Far below 1 only the newest are
        drawn; far above the buffer's size, all equally often. Items older than 64 half-lives are never drawn.
      beta: exponent of the weights (N P)^-beta, in [0, 1]. The default, 0, keeps the emphasis, as ERE does: all weights
        are 1. With 1 the emphasis is on which items are seen, but the weighted mean estimates the mean over all items.
        `sample` can override it.
      normalize: divide the weights by the largest of the "batch", or not at all (None).

    Examples:
      >>> buffer = jr.ReplayBuffer(capacity=4, sampler=jr.Recent(half_life=1.0))
      >>> items = np.array([10, 20, 30, 40])
      >>> state = buffer.add(buffer.init(items), items)
      >>> sample = buffer.sample(state, jax.random.key(0), batch_size=8)
      >>> # 40 is drawn twice as often as 30, and eight times as often as 10.
      >>> bool(jnp.allclose(sample.probabilities, 2.0 ** (sample.items / 10 - 1) / 15))
      True
    """

    half_life: float = checks.field(checks.check_number, SHORTEST, math.inf, "an age, such as half of the capacity")
    beta: float = checks.field(checks.check_number, 0, 1, "sample(beta=) takes a traced one", default=0.0)
    normalize: Literal["batch"] | None = checks.choice("batch", None)
    takes_spent: ClassVar[bool] = False
    _ages: tuple[int, float] = dataclasses.field(default=(1, 1.0), repr=False)
    fills_rows = by_age = property(lambda _: True)

    def sample(self, state: None, key: jax.Array, batch_size: int, live: ring.Live) -> tuple[jax.Array, jax.Array]:
        first, second = (words.reshape(2, batch_size) for words in random.random_bits(key, 2 * batch_size))
        streams, step = self._ages
        rate = min(max(math.log(2) * step / self.half_life, 2.0**-64), 2.0**10)  # beyond, float32 cannot tell
        size = jnp.maximum(live.size // streams, 1)
        count = size.astype(jnp.float32)
        rest, span = jnp.exp(-rate * count), -jnp.expm1(-rate * count)  # the mass behind the oldest, and up to it
        newer, older = _unit(first[0], second[0]), _unit(~first[0], ~second[0])  # sum to 1; a small one is precise
        part = span * newer
        place = jnp.where(part < 0.5, jnp.log1p(-part), jnp.log(rest + span * older)) / -rate
        moved = place * 2.0**-12 * ((second[1] >> 8).astype(jnp.float32) * 2.0**-24 - 0.5)
        whole = jnp.floor(place)  # and the rest apart, as a float32 has no room for both
        age = whole.astype(jnp.int32) + jnp.floor(place - whole + moved).astype(jnp.int32)
        age = jnp.clip(jnp.where(age >= size, 2 * size - 1 - age, age), 0, size - 1)  # mirrored at the end
        (age,) = xla.materialize(age)
        share = jnp.exp(-rate * age.astype(jnp.float32)) * -jnp.expm1(jnp.float32(-rate)) / (span * streams)
        stream = random.random_integers((first[1], second[1]), jnp.int32(streams)) if streams > 1 else 0
        return live.slots((size - 1 - age) * streams + stream), jnp.where(live.size > 0, share, 0.0)

    def weights(self, state: None, probabilities: jax.Array, live: ring.Live, *, beta: Any = None) -> jax.Array:
        beta, shares = self.beta if beta is None else beta, probabilities / ring.num_shards(live.axis_name)
        return weights_of(shares, live.total(), beta, self.normalize, None, live.axis_name)


def _unit(high: jax.Array, low: jax.Array) -> jax.Array:
    """Uniform numbers in (0, 1], float32, from 64 bits; small ones are as precise as large ones."""
    return (high.astype(jnp.float32) + (low.astype(jnp.float32) + 0.5) * 2.0**-32) * 2.0**-32
