"""Importance weights that undo the bias of a non-uniform draw."""

from typing import Literal

import jax
import jax.numpy as jnp

from jaxreplay._common import shards
from jaxreplay._common.xla import on_copies

Normalize = Literal["batch", "global"] | None


@on_copies
def importance_weights(
    probabilities: jax.Array,
    size: jax.Array | int,
    beta: jax.Array | float,
    *,
    normalize: Normalize = "batch",
    min_probability: jax.Array | float | None = None,
    axis_name: str | None = None,
) -> jax.Array:
    """Weights (N P)^-beta of a draw, computed in log space (Schaul et al. 2016, section 3.4).

    With beta = 1 and `normalize=None` a weighted mean over draws estimates the plain mean over all items without bias.

    Args:
      probabilities: float [B], probability of each drawn item; 0 marks a row that holds no item.
      size: int [], N, the number of items drawn from.
      beta: float [], 0 (no correction) to 1 (full correction).
      normalize: "batch" divides by the batch's largest weight, which becomes exactly 1. "global" divides by the largest
        weight that any item can have, that of `min_probability`. None does not divide.
      min_probability: float [], the smallest positive probability of any item; only "global" needs it.
      axis_name: a mapped axis (of `jax.shard_map` or `jax.vmap`) along which the batch is split; these rows are one
        part. The weights are divided by the largest of all parts, and `size` is that of the whole.

    Returns:
      float32 [B]; 0 where the probability is 0.

    Raises:
      ValueError: `normalize` is none of the three, or "global" comes without `min_probability`.

    Examples:
      >>> weights = jr.importance_weights(jnp.array([0.5, 0.25, 0.0]), size=4, beta=1.0)
      >>> [round(weight, 3) for weight in weights.tolist()]  # the last row is without an item
      [0.5, 1.0, 0.0]
    """
    if normalize not in ("batch", "global", None):
        raise ValueError(f'normalize={normalize!r}: expected "batch", "global" or None.')
    probabilities = jnp.asarray(probabilities, jnp.float32)
    drawn = probabilities > 0
    log_probability = jnp.log(jnp.where(drawn, probabilities, 1.0))
    if normalize == "global":
        if min_probability is None:
            raise ValueError('min_probability=None: normalize="global" divides by its weight; give it.')
        log_reference = jnp.log(jnp.asarray(min_probability, jnp.float32))
    elif normalize == "batch":
        log_reference = jnp.min(jnp.where(drawn, log_probability, jnp.inf))
    else:
        log_reference = -jnp.log(jnp.maximum(jnp.asarray(size, jnp.float32), 1.0))
    if normalize is not None:
        log_reference = shards.smallest(log_reference, axis_name)
    exponent = -jnp.asarray(beta, jnp.float32) * jnp.where(drawn, log_probability - log_reference, 0.0)
    return jnp.where(drawn, jnp.exp(exponent), 0.0)


@on_copies
def effective_sample_size(weights: jax.Array) -> jax.Array:
    """Number of equally weighted draws worth as much as these: (sum w)^2 / sum w^2 (Kish 1965, section 11.7).

    Args:
      weights: float [..., B], not negative.

    Returns:
      float32 [...], between 1 and B; 0 where all weights are 0.

    Examples:
      >>> float(jr.effective_sample_size(jnp.array([1.0, 1.0, 0.0, 0.0])))
      2.0
    """
    weights = jnp.asarray(weights, jnp.float32)
    largest = jnp.max(weights, axis=-1, keepdims=True)
    scaled = weights / jnp.where(largest > 0, largest, 1.0)
    squares = jnp.sum(scaled**2, axis=-1)
    return jnp.sum(scaled, axis=-1) ** 2 / jnp.where(squares > 0, squares, 1.0)
