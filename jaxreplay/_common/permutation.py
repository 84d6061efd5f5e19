"""A random order of the numbers below a bound, one place at a time: a pass over a buffer needs no array of its size.

The order is the cipher swap-or-not of Hoang, Morris and Rogaway 2012 (An Enciphering Scheme Based on a Card Shuffle,
section 1), which works on [0, size) for any size. A Feistel network works on a somewhat larger range, and what falls
outside is enciphered again: a loop of unknown length, for which a GPU waits.
"""

import jax
import jax.numpy as jnp
from jax import lax

from jaxreplay._common.random import random_bits, random_integers

ROUNDS = 48


def permuted(key: jax.Array, positions: jax.Array, size: jax.Array) -> jax.Array:
    """The numbers at some places of the order of 0 to size - 1 that a key stands for.

    The same key and size give the same order, bit for bit, whatever the places asked for together; only under
    `jax.vmap` does an `rbg` or `unsafe_rbg` key give another one than alone. Each place costs as much, and as many
    rounds, at every size.

    In each round a number x is paired with k - x mod size, k random, and every pair is swapped or not. A number leaves
    a round as it came with probability 1/2, so that a share of 2^-48 is never moved. Were the decisions independent,
    the order of up to 7 numbers would be within 2e-10 of a uniform one (total variation, computed exactly). They
    are the top bit of a mix of 32 bits. The order is for statistics: someone who wants to foretell it can.

    Args:
      key: a PRNG key.
      positions: int32 [...], places in [0, size). One beyond counts as the nearest of them.
      size: int32 [], 0 to 2^31 - 1, which may be traced. 0 counts as 1.

    Returns:
      int32, as `positions`; distinct in [0, size) where the places are.
    """
    size = jnp.maximum(size, 1)
    bits = random_bits(key, ROUNDS)
    pivots = random_integers(bits, size).astype(jnp.uint32)  # by the first words alone, but for one in 2^32 / size
    numbers = jnp.clip(positions, 0, size - 1).astype(jnp.uint32)
    modulus = size.astype(jnp.uint32)

    def swap_or_not(numbers: jax.Array, words: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, None]:
        pivot, word = words
        partners = pivot - numbers
        partners = jnp.minimum(partners, partners + modulus)  # one below 0 has become larger than both
        decisions = _mixed(jnp.maximum(numbers, partners) ^ word)
        return jnp.where(decisions.astype(jnp.int32) < 0, partners, numbers), None

    # As a loop it would be two kernels a round on a GPU, and so much slower on a TPU.
    return lax.scan(swap_or_not, numbers, (pivots, bits[1]), unroll=True)[0].astype(jnp.int32)


def _mixed(x: jax.Array) -> jax.Array:
    """A bijection of uint32 whose top bit depends on all bits of `x`: what that bit needs of Wellons' lowbias32."""
    x = (x ^ (x >> 16)) * jnp.uint32(0x21F0AAAD)
    return (x ^ (x >> 15)) * jnp.uint32(0x735A2D97)
