"""Prioritized: proportional prioritization, P(i) proportional to priority^alpha."""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp

from jaxreplay import sum_tree
from jaxreplay._common import checks, xla
from jaxreplay.samplers._by_priority import ByPriority
from jaxreplay.samplers._index import Index
from jaxreplay.samplers._recent import SHORTEST
from jaxreplay.sum_tree._fading import Fading

_optional_number = checks.optional(checks.check_number)


@dataclasses.dataclass(frozen=True)
class FadingIndex(Index):
    """A sum tree whose masses are the leaves times 2^(-age / half_life)."""

    half_life: float
    ages: tuple[int, float] = (1, 1.0)  # slots of one age, and the step to the next

    def init(self, capacity: int, **tracks: bool) -> sum_tree.SumTree:
        half_life = xla.full((), self.half_life / self.ages[1], jnp.float32)
        arrays = xla.full((), capacity - 1, jnp.int32), half_life
        return dataclasses.replace(super().init(capacity, **tracks), fading=Fading(*arrays, capacity, self.ages[0]))

    def advance(self, state: Any, slots: jax.Array, is_item: jax.Array) -> Any:
        fading = state.tree.fading
        new = is_item & (slots >= 0) & (slots < fading.capacity)
        last = jnp.max(jnp.where(new, jnp.arange(slots.size, dtype=jnp.int32), -1))
        fading = dataclasses.replace(fading, newest=jnp.where(last >= 0, slots[last], fading.newest))
        return dataclasses.replace(state.tree, fading=fading)

    def masses(self, state: Any) -> jax.Array:
        fading, leaves = state.tree.fading, sum_tree.leaves(state.tree)
        slots = jnp.arange(leaves.size, dtype=jnp.int32)[None]
        return fading.faded(leaves[None], fading.factor(fading.ages(slots)))[0]

    def _sums(self, state: Any) -> Any:
        return state.tree


@checks.config
class Prioritized(ByPriority):
    """Proportional prioritization, after Schaul et al. 2016 (Prioritized Experience Replay, sections 3.3 and 3.4).

    An item is drawn with probability P(i) = p_i^alpha / sum_j p_j^alpha (in float32, see `jaxreplay.sum_tree.sample`),
    where p = max(|td_error|, floor) + epsilon is its priority. A new item gets the priority of its initial TD error, or
    `max_priority` if that is unknown. The weight of a draw is (N P(i))^-beta.

    LAP (Fujimoto et al. 2020, An Equivalence between Loss Functions and Non-Uniform Sampling in Experience Replay,
    section 4.1) is `Prioritized(alpha=0.4, beta=0.0, epsilon=0.0, floor=1.0, max_priority="stored")` with a Huber loss.

    `sample` can override beta. `alpha`, `epsilon` and `floor` are the first values of arrays of the state, which
    `state.sampler.replace(alpha=alpha)` changes before the first `add`. So each lane of `jax.vmap` may have its own.

    A non-finite TD error only increments the state's counter `rejected`. Positive p^alpha are clipped to
    [2^-63, 2^63 / capacity], so that no sum overflows. If every p is 0, sampling is uniform and all weights are 1. A p
    counts as 0 if it is negative or NaN, and p^alpha as the least if alpha is NaN, as a replaced setting may be;
    `jaxreplay.diagnostics` tells.

    Attributes:
      alpha: exponent of the priorities, at least 0; 0 draws uniformly.
      beta: exponent of the weights in [0, 1], or an `optax.Schedule` of the number of `update` calls so far, an
        int32 [], such as `optax.linear_schedule(0.4, 1.0, 200_000)`; its result is clipped. A call that names no stored
        item, as in a step without a draw, does not count.
      epsilon: added to |td_error|, at least 0.
      floor: lower bound of |td_error|, at least 0.
      max_priority: priority of new items, before alpha. "ever" is the running maximum, which starts at 1 and never
        falls. "stored" is the maximum over stored items (1 if none is above 0) and costs a tree of maxima. A number
        is used as it is.
      normalize: divide the weights by the largest of the "batch", by the largest of any stored item ("global"), or not
        at all (None).
      stratified: draw once from each of batch_size equal parts of the total priority, instead of independently. The
        rows of the batch are then in slot order: permute them (`jax.random.permutation`) before a split into
        minibatches, or each minibatch comes from one part of the buffer.
      half_life: None, or the age at which an item is drawn half as often: P(i) is in proportion to p_i^alpha 2^(-age_i
        / half_life), at least 2^-20, also in weights and with `max_age`. Ages are as for `Recent`. Nothing is rewritten
        as items age, and priorities stay as they are. An item with less than 2^-60 of the mass that it had as the
        newest may never be drawn (`diagnostics` counts such items); if nothing younger has a priority, sampling is
        uniform. With `normalize="global"` the smallest mass counts as 2^-126 at least.
        `state.sampler.tree.fading.half_life` is an array of the state, which a sweep may replace before the first
        `add`. `migrate` takes that of the new configuration. `max_priority="stored"` is before fading.
        `ReservoirBuffer` rejects it.

    Examples:
      >>> buffer = jr.ReplayBuffer(capacity=4, sampler=jr.Prioritized(epsilon=0.0))
      >>> items = np.array([10, 20, 30, 40])
      >>> td_errors = np.array([0.0, 0.0, -2.0, 0.0])
      >>> state = buffer.add(buffer.init(items), items, td_errors=td_errors)
      >>> buffer.sample(state, jax.random.key(0), batch_size=4).items.tolist()
      [30, 30, 30, 30]
    """

    half_life: float | None = checks.field(_optional_number, SHORTEST, math.inf, "or None", default=None)
    _ages: tuple[int, float] = dataclasses.field(default=(1, 1.0), repr=False)
    by_age = property(lambda self: self.half_life is not None)
    index = property(lambda self: FadingIndex(self.half_life, self._ages) if self.half_life else Index())
