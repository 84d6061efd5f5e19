"""Uniform draws, and importance weights, which correct the bias of other draws."""

import functools
from typing import Any, Literal

import jax
import jax.core
import jax.numpy as jnp
import numpy as np

from jaxreplay import sum_tree
from jaxreplay._common import checks, random, ring, xla

Normalize = Literal["batch", "global"] | None


def uniform_slots(bits: tuple[jax.Array, jax.Array], live: ring.Live) -> jax.Array:
    """Uniform draws from the live slots, int32 [B], from `bits` (two uint32 [B])."""
    if live.unspent is not None:
        return sum_tree.sample_with(live.unspent, bits)[0]
    return live.slots(random.random_integers(bits, jnp.maximum(live.size, 1)))


@xla.copies_numpy
def importance_weights(
    probabilities: jax.Array,
    size: jax.Array | int,
    beta: jax.Array | float,
    *,
    normalize: Normalize = "batch",
    min_probability: jax.Array | float | None = None,
    axis_name: str | None = None,
) -> jax.Array:
    """Importance weights (N P)^-beta, computed in log space (Schaul et al. 2016, section 3.4).

    With beta = 1 and `normalize=None`, the weighted mean over draws is an unbiased estimate of the mean over all items.

    Args:
      probabilities: float [B], probability of each drawn item; 0 marks a row without an item.
      size: int [], N, the number of items drawn from.
      beta: float [], 0 (no correction) to 1 (full correction). A traced one is clipped to that; NaN counts as 1.
      normalize: "batch" divides by the largest weight of the batch, which becomes exactly 1. "global" divides by the
        largest weight of any item, that of `min_probability`. None does not normalize.
      min_probability: float [], the smallest positive probability of any item; required by "global" only.
      axis_name: mapped axis (of `jax.shard_map` or `jax.vmap`) over which the batch is split. The maximum is over
        the whole batch, and `size` is global.

    Returns:
      float32 [B]; 0 where the probability is 0.

    Raises:
      ValueError: `probabilities`, `size` or `beta` is known and out of range, `normalize` is not one of the three, or
        `min_probability` is missing for "global".

    Examples:
      >>> weights = jr.importance_weights(np.array([0.5, 0.25, 0.0]), size=4, beta=1.0)
      >>> [round(weight, 3) for weight in weights.tolist()]  # the last row has no item
      [0.5, 1.0, 0.0]
    """
    checks.check_choice("normalize", normalize, "batch", "global", None)
    probabilities, is_known = _checked("probabilities", probabilities, 1)
    if is_known:
        checks.check_integer("size", size, 0, 2**31 - 1, "the number of items drawn from", traced=None)
    if is_known or (isinstance(beta, int | float) and not 0 <= beta <= 1):
        checks.check_number("beta", beta, 0, 1, "1 corrects in full", traced=None)
    if normalize == "global" and min_probability is None:
        raise ValueError('min_probability=None: normalize="global" requires it.')
    return weights_of(probabilities, size, beta, normalize, min_probability, axis_name)


def weights_of(
    probabilities: jax.Array, size: Any, beta: Any, normalize: Normalize, min_probability: Any, axis_name: str | None
) -> jax.Array:
    """`importance_weights` of checked arguments."""
    beta = jnp.asarray(beta, jnp.float32)
    beta = jnp.where(beta <= 1, jnp.maximum(beta, 0.0), 1.0)
    probabilities = probabilities.astype(jnp.float32)
    drawn = probabilities > 0
    log_probability = jnp.log(jnp.where(drawn, probabilities, 1.0))
    if normalize == "global":
        log_reference = jnp.log(jnp.asarray(min_probability, jnp.float32))
    elif normalize == "batch":
        log_reference = jnp.min(jnp.where(drawn, log_probability, jnp.inf))
    else:
        log_reference = -jnp.log(jnp.maximum(jnp.asarray(size, jnp.float32), 1.0))
    if normalize is not None and axis_name is not None:
        log_reference = jax.lax.pmin(log_reference, axis_name)
    return jnp.where(drawn, jnp.exp(-beta * jnp.where(drawn, log_probability - log_reference, 0.0)), 0.0)


@xla.copies_numpy
def effective_sample_size(weights: jax.Array) -> jax.Array:
    """Effective sample size (sum w)^2 / sum w^2 of weighted draws (Kish 1965, section 11.7).

    Args:
      weights: float [..., B], non-negative.

    Returns:
      float32 [...], between 1 and B; 0 where all weights are 0.

    Raises:
      ValueError: `weights` are no numbers, or are known and one is negative or NaN. The call waits for known ones.

    Examples:
      >>> float(jr.effective_sample_size(np.array([1.0, 1.0, 0.0, 0.0])))
      2.0
    """
    return _effective_sample_size(_checked("weights", weights, np.inf)[0])


def _checked(name: str, x: Any, most: float) -> tuple[jax.Array, bool]:
    """`x` as an array [..., B], and True if it is known: then no number may be negative, NaN, or above `most`."""
    expected = "numbers, float [..., B]"
    x = checks.as_real(name, x, expected)
    if not x.ndim or not x.size:
        raise ValueError(f"{name}: got {checks.type_text(x)}, expected {expected}, B at least 1.")
    is_known = not isinstance(x, jax.core.Tracer) and x.is_fully_addressable
    if is_known and not np.all((xla.on_host(x) >= 0) & (xla.on_host(x) <= most * 1.001)):  # they are rounded
        above = ", or above 1" if most == 1 else ""
        raise ValueError(f"{name}={checks.brief(x)}: must not be negative or NaN{above}; give those of a draw.")
    return x, is_known


@functools.partial(jax.jit, inline=True)
def _effective_sample_size(weights: jax.Array) -> jax.Array:
    weights = jnp.asarray(weights, jnp.float32)
    largest = jnp.max(weights, axis=-1, keepdims=True)
    scaled = weights / jnp.where(largest > 0, largest, 1.0)
    squares = jnp.sum(scaled**2, axis=-1)
    return jnp.sum(scaled, axis=-1) ** 2 / jnp.where(squares > 0, squares, 1.0)
