"""Scores of levels: estimates of an agent's regret, from its rollouts in them."""

import jax
import jax.numpy as jnp

from jaxreplay._common.checks import as_float, type_text


def positive_value_loss(advantages: jax.Array, ends: jax.Array) -> jax.Array:
    """Mean over the finished episodes of the mean of max(advantage, 0) over their steps, float32 [B].

    Source: Jiang et al. 2021 (Replay-Guided Adversarial Environment Design, section 3.2), with generalized advantages.

    Args:
      advantages: number [T, B], of T steps in each of B levels.
      ends: bool [T, B], True for the last step of an episode.

    Returns:
      -inf for levels without a finished episode, which `Levels.insert` does not store.

    Raises:
      ValueError: other shapes.

    Examples:
      >>> ends = jnp.array([[False], [True], [True], [False]])
      >>> jr.scores.positive_value_loss(
      ...     jnp.array([[1.0], [-3.0], [2.0], [9.0]]), ends
      ... ).tolist()  # (0.5 + 2) / 2
      [1.25]
    """
    return _mean_of_episodes(jnp.maximum(_checked("advantages", advantages, ends), 0.0), ends)


def max_monte_carlo(values: jax.Array, ends: jax.Array, max_returns: jax.Array) -> jax.Array:
    """Mean over the finished episodes of the mean of (largest return - value) over their steps, float32 [B].

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
      >>> ends = jnp.array([[False], [True]])
      >>> jr.scores.max_monte_carlo(
      ...     jnp.array([[0.5], [0.75]]), ends, jnp.array([1.0])
      ... ).tolist()
      [0.375]
    """
    values = _checked("values", values, ends)
    largest = as_float(max_returns).astype(jnp.float32)
    if largest.shape != values.shape[1:]:
        raise ValueError(f"max_returns: got shape {list(largest.shape)}, expected {list(values.shape[1:])}.")
    return _mean_of_episodes(largest[None] - values, ends)


def _checked(name: str, numbers: jax.Array, ends: jax.Array) -> jax.Array:
    numbers, shape = as_float(numbers).astype(jnp.float32), jnp.shape(ends)
    if numbers.ndim != 2 or numbers.shape != shape or jnp.asarray(ends).dtype != jnp.bool_:
        raise ValueError(
            f"{name}: got {type_text(numbers.dtype, numbers.shape)} with ends of shape {list(shape)}, expected both "
            "[T, B], and bool ends."
        )
    return numbers


def _mean_of_episodes(numbers: jax.Array, ends: jax.Array) -> jax.Array:
    """Mean over finished episodes of their mean number, float32 [B]; -inf where there are none."""
    ends = jnp.asarray(ends).astype(jnp.int32)
    number = jnp.cumsum(ends, axis=0, dtype=jnp.int32) - ends  # of a step's episode
    level = jnp.broadcast_to(jnp.arange(ends.shape[1], dtype=jnp.int32), ends.shape)

    def sums(x: jax.Array) -> jax.Array:
        return jnp.zeros_like(numbers).at[number, level].add(x)

    num_finished = jnp.sum(ends, axis=0, dtype=jnp.int32)
    finished = jnp.arange(ends.shape[0], dtype=jnp.int32)[:, None] < num_finished[None]
    means = jnp.where(finished, sums(numbers) / jnp.maximum(sums(jnp.ones_like(numbers)), 1.0), 0.0)
    count = jnp.sum(finished, axis=0, dtype=jnp.int32)
    return jnp.where(count > 0, jnp.sum(means, axis=0) / jnp.maximum(count, 1).astype(jnp.float32), -jnp.inf)
