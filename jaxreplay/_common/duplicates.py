"""Repeated numbers in a batch: the last row of each counts, whatever the order of a scatter."""

import jax
import jax.numpy as jnp

ALL_PAIRS = 512  # batches of up to this many rows compare all pairs


def last_by_pairs(numbers: jax.Array) -> jax.Array:
    """True for the last row of each number (int32 [B]), bool [B]. Compares all pairs in one kernel."""
    row = jnp.arange(numbers.size, dtype=jnp.int32)
    return ~jnp.any((numbers[None, :] == numbers[:, None]) & (row[None, :] > row[:, None]), axis=1)


def last_of_each(numbers: jax.Array) -> jax.Array:
    """`last_by_pairs` for batches of any size; many rows are sorted instead."""
    if numbers.size <= ALL_PAIRS:
        return last_by_pairs(numbers)
    in_order, row = jax.lax.sort((numbers, jnp.arange(numbers.size, dtype=jnp.int32)), num_keys=2)
    ends_run = jnp.concatenate([in_order[1:] != in_order[:-1], jnp.ones(1, bool)])
    return jnp.zeros(numbers.size, bool).at[row].set(ends_run, unique_indices=True)
