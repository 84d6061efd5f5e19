"""Levels: prioritized level replay. A buffer of environment levels, drawn by score and staleness."""

import dataclasses
import math
from typing import Any, ClassVar, Literal

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax.scipy.special import entr

from jaxreplay import sum_tree
from jaxreplay._common import calls, checks, duplicates, layouts, random, ring, shown, xla

LARGEST_SCORE = 1e30  # of a "proportional" draw; larger scores, also infinite ones, count as this


@struct.dataclass
class LevelsState(layouts.BackendState):
    """State of `jaxreplay.Levels`, N slots.

    Attributes:
      levels: the stored levels, a pytree of arrays [N, ...]; laid out in rows on a TPU, where `Levels.get` reads them.
      scores: float32 [N]; -inf in empty slots.
      last: int32 [N], number of insertions and draws, in all, up to and with the level's own latest.
      size: int32 [], number of stored levels; they are in slots 0 to size - 1.
      count: int32 [], number of insertions (also of levels that were not stored) and draws; saturates at 2**31 - 1.
      rejected: int32 [], scores that were NaN; saturates at 2**31 - 1.

    Examples:
      >>> state = levels.init({"walls": np.zeros((2, 2), bool)})
      >>> isinstance(state, jr.curricula.LevelsState), state.levels["walls"].shape
      (True, (3, 2, 2))
    """

    levels: Any  # [N, ...]
    scores: jax.Array  # [N]
    last: jax.Array  # [N]
    size: jax.Array  # []
    count: jax.Array  # []
    rejected: jax.Array  # []
    _layouts: ClassVar = {"levels": lambda x, state, backend: layouts.on_backend(x, 1, np.ndim(state.size), backend)}

    def _contents(self) -> tuple[str, dict[str, Any]]:
        return shown.held(self.size, self.scores.shape[-1], "levels")[0], vars(self)


@checks.config
class Levels(metaclass=shown.Kind):
    """Keeps the levels with the highest scores, and draws them by score and staleness (prioritized level replay).

    A level is any pytree of arrays, such as the walls of a maze, or a seed. Source: Jiang, Grefenstette and
    Rocktäschel 2021 (Prioritized Level Replay, section 3); with a capacity: Jiang et al. 2021 (Replay-Guided
    Adversarial Environment Design), which trains on replayed levels only (robust PLR); and Parker-Holder et al. 2022
    (ACCEL), which inserts edited levels.

    P(i) = (1 - staleness) P_S(i) + staleness P_C(i). P_S is proportional to h_i^(1 / temperature), where h is the
    score, or 1 / rank by score. P_C is proportional to the number of insertions and draws since the level's latest.

    All methods raise a `ValueError` for an argument that is not as described, or for a state of another configuration.

    Attributes:
      capacity: N, 1 to 2**24.
      prioritization: h, "rank" or "proportional". A rank needs a sort of all scores in each draw; it does not depend on
        the scale of the scores. Negative scores count as 0 if "proportional".
      temperature: exponents are 1 / temperature.
      staleness: the weight of staleness, 0 to 1.
      replay_probability: of `replay`.
      min_filled: fraction of the capacity that must be filled before `replay` returns True.
      donate: donate the state when `insert`, `update` or `sample` is called eagerly.

    Examples:
      >>> levels = jr.Levels(capacity=2, staleness=0.0, min_filled=0.5)
      >>> state, scores = levels.init(0), np.array([0.5, 0.1, 0.3])
      >>> state, slots = levels.insert(state, np.array([7, 8, 9]), scores)
      >>> slots.tolist(), state.levels.tolist()  # 8 had the lowest score
      ([0, -1, 1], [7, 9])
    """

    capacity: int = checks.field(checks.check_integer, 1, 2**24, "the number of levels")
    prioritization: Literal["rank", "proportional"] = checks.choice("rank", "proportional")
    temperature: float = checks.field(checks.check_number, 1e-2, 1e6, "0.1 is usual with ranks", default=0.1)
    staleness: float = checks.field(checks.check_number, 0, 1, "the weight of staleness in a draw", default=0.1)
    replay_probability: float = checks.field(checks.check_number, 0, 1, "0.5 is usual", default=0.5)
    min_filled: float = checks.field(checks.check_number, 0, 1, "the fraction of the capacity", default=1.0)
    donate: bool = checks.field(checks.check_bool, "donate the state of eager calls", default=True)

    def init(self, level: Any) -> LevelsState:
        """State that holds no levels.

        Args:
          level: a level, or a pytree of `jax.ShapeDtypeStruct`; only shapes and dtypes are read.

        Examples:
          >>> int(levels.init(np.zeros(3)).size)
          0
        """
        return LevelsState(
            levels=layouts.zeros(checks.as_spec(level), (self.capacity,), 0),
            scores=xla.full((self.capacity,), -jnp.inf, jnp.float32),
            last=xla.full((self.capacity,), 0, jnp.int32),
            size=xla.full((), 0, jnp.int32),
            count=xla.full((), 0, jnp.int32),
            rejected=xla.full((), 0, jnp.int32),
        )

    @calls.method(donates=True)
    def insert(
        self, state: LevelsState, levels: Any, scores: jax.Array, *, mask: jax.Array | None = None
    ) -> tuple[LevelsState, jax.Array]:
        """Insert levels; of these and the stored ones, those with the highest scores are kept.

        Of equal scores a stored one stays, then that of an earlier row. New levels that are kept take the empty slots,
        then those of the lowest scores, in order of their rows. Levels are not compared with each other: one that is
        inserted twice is stored twice.

        Args:
          state: donated when called eagerly (unless `donate=False`).
          levels: a batch of levels, [B, ...].
          scores: number [B]; NaN and -inf are not inserted.
          mask: bool [B], True for rows that exist; None for all.

        Returns:
          the state; and int32 [B], the slot where each level is now, -1 if it is not stored.

        Examples:
          >>> state, scores = levels.init(0), np.array([0.1, 0.2, 0.3, 0.4])
          >>> state, slots = levels.insert(state, np.array([5, 6, 7, 8]), scores)
          >>> slots.tolist(), state.levels.tolist()  # 5 had the lowest score
          ([-1, 0, 1, 2], [6, 7, 8])
        """
        levels = checks.as_arrays(levels)
        (batch_size,) = checks.leading_axes(levels, 1, "levels, with a leading axis [B]")
        if batch_size == 0:
            raise ValueError("batch of 0 levels: expected 1 or more; to insert none, mask all rows.")
        checks.check_like(levels, layouts.stored_spec(state.levels), 1, 1, "the buffer")
        scores, mask = _check_rows(scores, mask, batch_size, "level")
        now = ring.saturating_add(state.count, jnp.cumsum(mask, dtype=jnp.int32))
        count = min(self.capacity, batch_size)
        best, row = jax.lax.top_k(jnp.where(mask & ~jnp.isnan(scores), scores, -jnp.inf), count)
        lowest, slots = jax.lax.top_k(-state.scores, count)  # empty slots, of score -inf, come first
        row = jnp.sort(jnp.where(best > -lowest, row, batch_size))  # the best new level against the lowest, and so on
        is_kept = row < batch_size
        target = jnp.where(is_kept, slots, self.capacity + jnp.arange(count, dtype=jnp.int32))  # all different
        state = dataclasses.replace(
            state,
            levels=layouts.write(state.levels, target, jax.tree.map(lambda x: x[row], levels)),
            scores=state.scores.at[target].set(scores[row], mode="drop"),
            last=state.last.at[target].set(now[row], mode="drop"),
            size=state.size + jnp.sum(is_kept & (slots >= state.size), dtype=jnp.int32),
            count=now[-1],
            rejected=ring.saturating_add(state.rejected, jnp.sum(mask & jnp.isnan(scores), dtype=jnp.int32)),
        )
        stored = jnp.full(batch_size, -1, jnp.int32)
        return state, stored.at[row].set(slots, mode="drop")

    @calls.method(donates=True)
    def update(
        self, state: LevelsState, slots: jax.Array, scores: jax.Array, *, mask: jax.Array | None = None
    ) -> LevelsState:
        """Set the scores of levels, such as those that were drawn and played.

        Args:
          state: donated when called eagerly (unless `donate=False`).
          slots: int [B]; those without a level are ignored. The last occurrence of a repeated slot counts.
          scores: number [B]; NaN is ignored, and counted.
          mask: bool [B], True for rows that exist; None for all.

        Examples:
          >>> state, _ = levels.insert(levels.init(0), np.array([5, 6]), np.array([0.25, 1.0]))
          >>> levels.update(state, np.array([1, 1]), np.array([0.5, 0.75])).scores.tolist()
          [0.25, 0.75, -inf]
        """
        scores, mask = _check_rows(scores, mask, slots.size, "slot")
        mask &= (slots >= 0) & (slots < state.size)
        is_nan = jnp.isnan(scores)
        target = jnp.where(mask & ~is_nan, slots, self.capacity)
        target = jnp.where(duplicates.last_of_each(target), target, self.capacity)
        return dataclasses.replace(
            state,
            scores=state.scores.at[target].set(scores, mode="drop"),
            rejected=ring.saturating_add(state.rejected, jnp.sum(mask & is_nan, dtype=jnp.int32)),
        )

    def sample(self, state: LevelsState, key: jax.Array, n: int) -> tuple[LevelsState, jax.Array, Any]:
        """Draw levels independently, with replacement, and note the time of the draw.

        Args:
          state: donated when called eagerly (unless `donate=False`).
          key: a PRNG key.
          n: number of draws.

        Returns:
          the state; slots, int32 [n], -1 if no level is stored; and the levels, [n, ...].

        Raises:
          ValueError: no level is stored and the call is eager. It waits for the device to check this; under `jit` slots
            are -1.

        Examples:
          >>> state, _ = levels.insert(levels.init(0), np.array([5, 6]), np.array([0.0, 0.2]))
          >>> state, slots, drawn = levels.sample(state, key, 3)
          >>> slots.tolist(), drawn.tolist()  # the level of score 0 is not drawn
          ([1, 1, 1], [6, 6, 6])
        """
        self._check_state(state)
        n = checks.check_integer("n", n, 1, 2**24, "the number of draws")
        xla.explain_donated(state, None)
        if not xla.is_traced(state.size) and not xla.on_host(state.size).any():
            raise ValueError("cannot sample from an empty set of levels; insert some first.")
        return self._sample(state, key, n)

    @calls.method(num_rows="n", donates=True)
    def _sample(self, state: LevelsState, key: jax.Array, n: int) -> tuple[LevelsState, jax.Array, Any]:
        slots, _ = sum_tree.sample_with(sum_tree.of_leaves(self.probabilities(state)), random.random_bits(key, n))
        now = ring.saturating_add(state.count, jnp.arange(1, n + 1, dtype=jnp.int32))
        state = dataclasses.replace(state, last=state.last.at[slots].max(now), count=now[-1])
        return state, jnp.where(state.size > 0, slots, -1), layouts.read(state.levels, slots)

    @calls.method()
    def get(self, state: LevelsState, slots: jax.Array) -> Any:
        """Levels in `slots`, int [B], as leaves [B, ...]; arbitrary for slots without a level.

        Examples:
          >>> state, slots = levels.insert(levels.init(0), np.array([5, 6]), np.array([0.1, 0.2]))
          >>> levels.get(state, slots[::-1]).tolist()
          [6, 5]
        """
        return layouts.read(state.levels, jnp.clip(slots, 0, self.capacity - 1))

    @calls.method()
    def replay(self, state: LevelsState, key: jax.Array) -> jax.Array:
        """True if stored levels are to be replayed now, bool []: with `replay_probability`, once enough are stored.

        Examples:
          >>> bool(levels.replay(levels.init(0), key))
          False
        """
        least = math.ceil(round(self.min_filled * self.capacity, 6))  # 7 of 25 for 0.28, in spite of rounding
        return (state.size >= max(least, 1)) & (jax.random.uniform(key) < self.replay_probability)

    @calls.method()
    def probabilities(self, state: LevelsState) -> jax.Array:
        """Probability of each slot in a draw, float32 [N]; all 0 if no level is stored.

        Examples:
          >>> state, _ = levels.insert(levels.init(0), np.array([5, 6]), np.array([0.5, 1.5]))
          >>> levels.probabilities(state).tolist()
          [0.25, 0.75, 0.0]
        """
        filled = jnp.arange(self.capacity, dtype=jnp.int32) < state.size

        def normalized(weights: jax.Array) -> jax.Array:
            """Weights over their sum; evenly over the stored levels if all are 0."""
            weights = jnp.where(filled, weights, 0.0)
            weights = jnp.where(jnp.sum(weights) > 0, weights, filled.astype(jnp.float32))
            return weights / jnp.maximum(jnp.sum(weights), 2.0**-126)

        if self.prioritization == "rank":
            by_score = jnp.argsort(jnp.where(filled, -state.scores, jnp.inf), stable=True)
            rank = jnp.arange(1, self.capacity + 1, dtype=jnp.int32)
            h = 1.0 / jnp.zeros_like(rank).at[by_score].set(rank).astype(jnp.float32)
        else:
            scores = jnp.where(filled, jnp.clip(state.scores, 0.0, LARGEST_SCORE), 0.0)
            largest = jnp.max(scores)
            h = scores / jnp.where(largest > 0, largest, 1.0)
        stale = (state.count - state.last).astype(jnp.float32)
        return (1 - self.staleness) * normalized(h ** (1 / self.temperature)) + self.staleness * normalized(stale)

    @calls.method()
    def metrics(self, state: LevelsState) -> dict[str, jax.Array]:
        """Numbers of a state for logging, float32 [] by name.

        `filled`: fraction of the capacity. `score` and `max_score`: mean and largest score of the stored levels, 0 if
        there are none. `perplexity`: exp(entropy) of a draw over the number of stored levels.

        Examples:
          >>> state, _ = levels.insert(levels.init(0), np.array([5, 6]), np.array([0.5, 1.5]))
          >>> float(levels.metrics(state)["score"])
          1.0
        """
        count = jnp.maximum(state.size, 1).astype(jnp.float32)
        return {
            "filled": state.size.astype(jnp.float32) / self.capacity,
            "score": jnp.sum(state.scores, where=jnp.arange(self.capacity, dtype=jnp.int32) < state.size) / count,
            "max_score": jnp.where(state.size > 0, jnp.max(state.scores), 0.0),
            "perplexity": jnp.exp(jnp.sum(entr(self.probabilities(state)))) / count,
        }

    def _check_state(self, state: LevelsState) -> None:
        """Raise a `ValueError` if `state` is for another capacity."""
        checks.check_state(self, state, LevelsState)
        if np.shape(state.scores) != (self.capacity,):
            raise ValueError(f"capacity={self.capacity}: this state has {[*np.shape(state.scores)]}; vmap a stack.")


def _check_rows(scores: Any, mask: Any, size: int, row: str) -> tuple[jax.Array, jax.Array]:
    """Scores, float32, and mask of `size` rows."""
    scores = checks.as_float(scores).astype(jnp.float32)
    if scores.shape != (size,):
        raise ValueError(f"scores: got shape {list(scores.shape)}, expected [{size}], one for each {row}.")
    return scores, checks.check_mask(jnp.ones(size, bool) if mask is None else mask, (size,))
