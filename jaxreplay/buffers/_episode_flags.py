"""Flags of the rows of a `SequenceBuffer`: ends of episodes, and rows that are not drawable.

Without `gaps` the flag is a bool, True for the last row of an episode. With `gaps` it is 0, 1 (last of its episode) or
GAP (not drawable). A gap is an episode by itself: the row before it is the last of its episode, and the row after it
starts one.
"""

import jax
import jax.numpy as jnp

GAP = 2


def flags_of(ends: jax.Array, drawable: jax.Array | None) -> jax.Array:
    """Flags with gaps, uint8 [T, num_envs], from `ends` and `drawable`, bool [T, num_envs] (None: all rows)."""
    flags = ends.astype(jnp.uint8)
    return flags if drawable is None else jnp.where(drawable, flags, jnp.uint8(GAP))


def is_end(flags: jax.Array) -> jax.Array:
    """True if the next row is of another episode, bool [...]."""
    return flags if flags.dtype == jnp.bool_ else flags > 0


def is_gap(flags: jax.Array) -> jax.Array:
    """True if the row is not drawable, bool [...]."""
    return jnp.zeros(flags.shape, bool) if flags.dtype == jnp.bool_ else flags == GAP


def in_first_episode(flags: jax.Array) -> jax.Array:
    """True for steps of sequences [B, L] in the episode of the first row, bool [B, L]."""
    end = is_end(flags)
    return (jnp.cumsum(end, axis=1, dtype=jnp.int32) == end.astype(jnp.int32)) & ~is_gap(flags)
