"""A keyed pseudorandom permutation, evaluated entry by entry: a pass over a buffer needs no array of its size.

The permutation is the swap-or-not cipher of Hoang, Morris and Rogaway 2012 (An Enciphering Scheme Based on a Card
Shuffle, section 1), which works on [0, size) for any size. A Feistel network works on a slightly larger range and
re-enciphers values outside of [0, size): a loop of unknown length, for which a GPU waits.
"""

import jax
import jax.numpy as jnp

from jaxreplay._common import random

ROUNDS = 48


def permuted(key: jax.Array, positions: jax.Array, size: jax.Array) -> jax.Array:
    """Entries of a keyed pseudorandom permutation of 0..size-1.

    The same key and size give the same permutation bit for bit, whichever positions are requested together. The one
    exception are `rbg` and `unsafe_rbg` keys, which give another permutation under `jax.vmap`. The cost per entry does
    not depend on the size.

    Each round pairs a number x with k - x mod size for a random k, and swaps each pair with probability 1/2. A share of
    2^-48 of the numbers is therefore never moved. With independent decisions, the permutation of up to 7 numbers would
    be within 2e-10 of uniform (total variation, computed exactly). The decisions are the top bits of a 32-bit mix. The
    permutation is meant for statistics and can be predicted by an adversary.

    Args:
      key: a PRNG key.
      positions: int32 [...], clipped to [0, size).
      size: int32 [], 0 to 2^31 - 1, may be traced; 0 counts as 1.

    Returns:
      int32 in [0, size), shape of `positions`; distinct for distinct positions.
    """
    size = jnp.maximum(size, 1)
    bits = random.random_bits(key, ROUNDS)
    # The second words matter for one pivot in 2^32 / size only.
    pivots = random.random_integers(bits, size).astype(jnp.uint32)
    numbers = jnp.clip(positions, 0, size - 1).astype(jnp.uint32)
    modulus = size.astype(jnp.uint32)

    def swap_or_not(numbers: jax.Array, words: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, None]:
        pivot, word = words
        partners = pivot - numbers
        partners = jnp.minimum(partners, partners + modulus)  # a negative difference wrapped around
        x = jnp.maximum(numbers, partners) ^ word
        # The part of Wellons' lowbias32 that makes the top bit depend on all bits of x.
        x = (x ^ (x >> 16)) * jnp.uint32(0x21F0AAAD)
        decisions = (x ^ (x >> 15)) * jnp.uint32(0x735A2D97)
        return jnp.where(decisions.astype(jnp.int32) < 0, partners, numbers), None

    # A loop would be two kernels per round on a GPU, and as much slower on a TPU.
    return jax.lax.scan(swap_or_not, numbers, (pivots, bits[1]), unroll=True)[0].astype(jnp.int32)
