"""Scores: how often a task should be drawn, from its successes, its trials and its age.

A score is a plain function `(successes, trials, age) -> float32 [B]`. `successes` and `trials` are float32 [B] and
include the prior, so `successes / trials` is the mean of the Beta posterior of the task's success rate. `age` is
int32 [B], the number of updates since the task's latest group: 0 if the latest update had one. A task without a group
has the age of a task whose only group was in the first update.

Scores of levels, `positive_value_loss` and `max_monte_carlo`, are estimates of an agent's regret, from its rollouts in
them.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxreplay._common import checks, shown, xla

Score = Callable[[jax.Array, jax.Array, jax.Array], Any]
ROUNDS = 6  # of proposals for a Gamma variate: all are rejected less often than once in 10^7


def learnability(successes: jax.Array, trials: jax.Array, age: jax.Array) -> jax.Array:
    """p (1 - p), where p is the success rate: largest for tasks that are solved half of the time.

    It is the variance of a rollout's reward, after Foster and Foerster 2025 (Learning to Reason at the Frontier of
    Learnability, section 3) and Rutherford et al. 2024 (No Regrets, section 4).

    Examples:
      >>> jr.scores.learnability(np.array([1.0, 2.0, 3.0]), np.array([4.0]), 0).tolist()
      [0.1875, 0.25, 0.1875]
    """
    p = successes / trials
    return p * (1 - p)


def uncertainty(successes: jax.Array, trials: jax.Array, age: jax.Array) -> jax.Array:
    """Standard deviation of the success rate's Beta posterior: large for tasks with few trials.

    With a successes and b failures, prior included, it is sqrt(a b / ((a + b)^2 (a + b + 1))).

    Examples:
      >>> one, four = jr.scores.uncertainty(np.array([1.0, 4.0]), np.array([2.0, 8.0]), 0)
      >>> bool(one > four)  # the same rate, from fewer trials
      True
    """
    p = successes / trials
    return jnp.sqrt(p * (1 - p) / (trials + 1))


def failure(successes: jax.Array, trials: jax.Array, age: jax.Array) -> jax.Array:
    """1 - p, where p is the success rate: tasks that fail more often are drawn more often.

    `Tasks(exploration=)` keeps draws of tasks that are always solved.

    Examples:
      >>> jr.scores.failure(np.array([1.0, 2.0, 4.0]), np.array([4.0]), 0).tolist()
      [0.75, 0.5, 0.0]
    """
    return 1 - successes / trials


def pools(thresholds: Sequence[float] = (0.1, 0.9), weights: Sequence[float] = (0.2, 1.0, 0.1)) -> Score:
    """Make a score that is a step function of the success rate p, such as a weight for each pool of tasks.

    Args:
      thresholds: K success rates, in ascending order.
      weights: K + 1 scores: of p below the first threshold, then from each threshold on. A rate exactly at a threshold
        has the weight above it; rates and thresholds are rounded to float32 first.

    Raises:
      ValueError: the thresholds are not ascending in [0, 1], or the weights not one more, or one is negative.

    Examples:
      >>> score = jr.scores.pools()  # hard tasks, those between, and easy ones
      >>> found = score(np.array([0.0, 0.1, 0.8, 0.9]), np.array([1.0]), 0)
      >>> [round(x, 2) for x in found.tolist()]
      [0.2, 1.0, 1.0, 0.1]
    """
    return _Pools(thresholds=tuple(thresholds), weights=tuple(weights))


def success_band(hard: float, easy: float, *, inside: float = 1.0, outside: float = 0.0) -> Score:
    """Make a score of two values: `inside` if hard < p < easy, else `outside`, where p is the success rate.

    Raises:
      ValueError: not 0 <= hard < easy <= 1, or a score is negative.

    Examples:
      >>> score = jr.scores.success_band(0.2, 0.8, outside=0.0)
      >>> score(np.array([0.5, 1.0, 1.9]), np.array([2.0]), 0).tolist()
      [1.0, 1.0, 0.0]
    """
    if not 0 <= hard < easy <= 1:
        raise ValueError(f"hard={hard}, easy={easy}: must be success rates, 0 <= hard < easy <= 1.")
    above = np.nextafter(np.float32(hard), np.float32(2))  # the first rate that is more
    return pools((float(above), easy), (outside, inside, outside))


def _check_numbers(name: str, values: tuple[float, ...], most: float, remedy: str) -> tuple[float, ...]:
    return tuple(float(checks.check_number(f"{name}[{i}]", x, 0, most, remedy)) for i, x in enumerate(values))


@checks.config
class _Pools:
    thresholds: tuple[float, ...] = checks.field(_check_numbers, 1, "a success rate")
    weights: tuple[float, ...] = checks.field(_check_numbers, 1e6, "a score")

    def _check_fields(self) -> None:
        if [*self.thresholds] != sorted({*self.thresholds}) or len(self.weights) != len(self.thresholds) + 1:
            rule = "thresholds must be ascending, and weights one more"
            raise ValueError(f"thresholds={self.thresholds}, weights={self.weights}: {rule}.")

    def __call__(self, successes: jax.Array, trials: jax.Array, age: jax.Array) -> jax.Array:
        p, (first, *others) = successes / trials, self.weights
        score = jnp.full_like(p, first)
        for threshold, weight in zip(self.thresholds, others, strict=True):
            score = jnp.where(p >= threshold, weight, score)
        return score


@checks.config
class Thompson(metaclass=shown.Kind):
    """Thompson sampling: draws the best of some random tasks, by success rates drawn from their posteriors.

    For each draw, `candidates` tasks are drawn uniformly, and a success rate of each from its Beta posterior. The task
    whose rate has the highest `score` is chosen. Tasks with few trials have wide posteriors, so they are explored
    (Thompson 1933, On the Likelihood that One Unknown Probability Exceeds Another). Costs O(candidates) per draw.

    Attributes:
      candidates: number of tasks that compete for a draw.
      score: of a success rate; called with the rate as `successes` and `trials` 1.

    Examples:
      >>> tasks = jr.Tasks(num_tasks=4, score=jr.scores.Thompson(candidates=8))
      >>> tasks.sample(tasks.init(), key, 3)[0].shape
      (3,)
    """

    candidates: int = checks.field(checks.check_integer, 1, 2**16, "tasks that compete for a draw", default=16)
    score: Score = learnability

    def __call__(self, successes: jax.Array, trials: jax.Array, age: jax.Array) -> jax.Array:
        """1, so that candidates are drawn uniformly."""
        return jnp.ones_like(successes)

    def winner(self, key: jax.Array, successes: jax.Array, trials: jax.Array, age: jax.Array) -> jax.Array:
        """Column of the chosen candidate in each row, int32 [n], from counts [n, candidates].

        Examples:
          >>> tried, solved = np.full((1, 2), 1e4), np.array([[10.0, 5e3]])
          >>> jr.scores.thompson.winner(key, solved, tried, 0).tolist()
          [1]
        """
        rates = _beta_variates(key, successes, trials - successes)
        return jnp.argmax(self.score(rates, jnp.ones_like(rates), age), axis=1).astype(jnp.int32)


thompson = Thompson()
"""`Thompson` with 16 candidates, scored by `learnability`."""


def positive_value_loss(advantages: jax.Array, ends: jax.Array) -> jax.Array:
    """Regret estimate: the mean over finished episodes of the mean of max(advantage, 0) over their steps, float32 [B].

    Source: Jiang et al. 2021 (Replay-Guided Adversarial Environment Design, section 3.2), with generalized advantages.

    Args:
      advantages: number [T, B], of T steps in each of B levels.
      ends: bool [T, B], True for the last step of an episode.

    Returns:
      -inf for levels without a finished episode, which `Levels.insert` does not store.

    Raises:
      ValueError: other shapes.

    Examples:
      >>> advantages = np.array([[1.0], [-3.0], [2.0], [9.0]])
      >>> ends = np.array([[False], [True], [True], [False]])
      >>> jr.scores.positive_value_loss(advantages, ends).tolist()  # (0.5 + 2) / 2
      [1.25]
    """
    return _mean_of_episodes(jnp.maximum(_checked("advantages", advantages, ends), 0.0), ends)


def max_monte_carlo(values: jax.Array, ends: jax.Array, max_returns: jax.Array) -> jax.Array:
    """Regret estimate: as `positive_value_loss`, with (largest return - value) in place of advantages, float32 [B].

    Source: Jiang et al. 2021 (Replay-Guided Adversarial Environment Design, section 3.2). It does not depend on the
    agent's present policy as much as `positive_value_loss`.

    Args:
      values: number [T, B], the agent's values of the states.
      ends: bool [T, B], True for the last step of an episode.
      max_returns: number [B], the largest return ever reached in each level.

    Returns:
      -inf for levels without a finished episode, which `Levels.insert` does not store.

    Raises:
      ValueError: other shapes.

    Examples:
      >>> ends = np.array([[False], [True]])
      >>> jr.scores.max_monte_carlo(np.array([[0.5], [0.75]]), ends, np.array([1.0])).tolist()
      [0.375]
    """
    values = _checked("values", values, ends)
    largest = checks.as_float(max_returns).astype(jnp.float32)
    if largest.shape != values.shape[1:]:
        raise ValueError(f"max_returns: got shape {list(largest.shape)}, expected {list(values.shape[1:])}.")
    return _mean_of_episodes(largest[None] - values, ends)


@functools.partial(jax.jit, inline=True)
def _beta_variates(key: jax.Array, a: jax.Array, b: jax.Array) -> jax.Array:
    """Random rates with Beta(a, b) distributions, float32 of the shape of `a` and `b`; no loop.

    A Beta variate is x / (x + y) for Gamma variates x and y with shapes a and b. These are drawn by the method of
    Marsaglia and Tsang 2000 (A Simple Method for Generating Gamma Variables) with a fixed number of proposals. For
    small shapes neither fits in a float32, so the rate is computed from their logarithms. It is 0 or 1 where float32
    has no nearer number; rates below 2^-126 may be 0.
    """
    x, y = _log_gamma_variates(key, jnp.stack([a, b]))
    ratio = jnp.exp(-jnp.abs(x - y))  # of the smaller variate to the larger
    rate = ratio / (1 + ratio)
    return jnp.where(x > y, 1 - rate, rate)


def _log_gamma_variates(key: jax.Array, shape: jax.Array) -> jax.Array:
    normal_key, accept_key, small_key = jax.random.split(key, 3)
    d = jnp.where(shape < 1, shape + 1, shape)[None] - 1 / 3  # section 6 of the paper, for shapes below 1
    normal = jax.random.normal(normal_key, (ROUNDS, *shape.shape), jnp.float32)
    uniform = jax.random.uniform(accept_key, normal.shape, jnp.float32)
    v = (1 + normal / jnp.sqrt(9 * d)) ** 3
    positive = jnp.maximum(v, 1e-30)
    accepted = (v > 0) & (jnp.log(uniform) < normal**2 / 2 + d * (1 - positive + jnp.log(positive)))
    first = jnp.argmax(accepted, axis=0, keepdims=True)  # the first proposal, if none is accepted
    found = jnp.log(d * jnp.take_along_axis(positive, first, axis=0))[0]
    # A shape of 0, where rounding lost a small prior, is a very small one.
    small = jax.random.exponential(small_key, shape.shape, jnp.float32) / jnp.maximum(shape, 1e-30)
    return jnp.where(shape < 1, found - small, found)


def _checked(name: str, numbers: jax.Array, ends: jax.Array) -> jax.Array:
    x, shape = checks.as_float(numbers).astype(jnp.float32), jnp.shape(ends)
    if x.ndim != 2 or x.shape != shape or jnp.asarray(ends).dtype != jnp.bool_:
        raise ValueError(f"{name}: got {checks.type_text(x)} with ends {[*shape]}, expected both [T, B], bool ends.")
    return x


@xla.copies_numpy
@functools.partial(jax.jit, inline=True)
def _mean_of_episodes(numbers: jax.Array, ends: jax.Array) -> jax.Array:
    """Mean over finished episodes of their mean number, float32 [B]; -inf where there are none."""
    ends = jnp.asarray(ends).astype(jnp.int32)
    number = jnp.cumsum(ends, axis=0, dtype=jnp.int32) - ends  # of a step's episode

    def sums(x: jax.Array) -> jax.Array:
        return jnp.zeros_like(numbers).at[number, jnp.arange(ends.shape[1], dtype=jnp.int32)].add(x)

    finished = jnp.arange(ends.shape[0], dtype=jnp.int32)[:, None] < jnp.sum(ends, axis=0, dtype=jnp.int32)[None]
    means = jnp.where(finished, sums(numbers) / jnp.maximum(sums(jnp.ones_like(numbers)), 1.0), 0.0)
    count = jnp.sum(finished, axis=0, dtype=jnp.int32)
    return jnp.where(count > 0, jnp.sum(means, axis=0) / jnp.maximum(count, 1).astype(jnp.float32), -jnp.inf)
