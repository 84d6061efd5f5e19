"""Random integers with enough bits for large buffers, and a keyed permutation of as many.

The permutation is pseudorandom and is evaluated entry by entry: a pass over a buffer needs no array of its size. It is
the swap-or-not cipher of Hoang, Morris and Rogaway 2012 (An Enciphering Scheme Based on a Card Shuffle, section 1),
which works on [0, size) for any size. A Feistel network works on a slightly larger range and re-enciphers values
outside of [0, size): a loop of unknown length, for which a GPU waits.
"""

import jax
import jax.numpy as jnp
from jax.extend.random import threefry2x32_p

from jaxreplay._common import checks

ROUNDS = 48  # of the permutation
Words = tuple[jax.Array, jax.Array]  # the upper and lower halves of 64 bits, uint32


def random_bits(key: jax.Array, size: int) -> Words:
    """64 random bits for each of `size` draws, two uint32 [size].

    `jax.random.bits` computes 64 bits for every 32 that it returns. This function returns all of them, which halves the
    work. As in JAX, the two words of a key are the key of the Threefry cipher. A key of another kind is first converted
    to two random words. For `rbg` and `unsafe_rbg` keys, these words differ under `jax.vmap`.
    """
    checks.check_key(key)
    if jax.config.jax_debug_key_reuse:  # pyright: ignore[reportAttributeAccessIssue]
        jax.random.bits(key)  # counts as a use of the key; reading `key_data` does not
    words = jax.random.key_data(key)
    if words.shape != (2,):
        words = jax.random.bits(key, (2,), jnp.uint32)
    count = jnp.arange(size, dtype=jnp.uint32)
    return tuple(threefry2x32_p.bind(words[0], words[1], count, count + jnp.uint32(size)))


def random_integers(bits: Words, bound: jax.Array) -> jax.Array:
    """Integers in [0, bound), int32 [size]: `bits` (two uint32 [size]) as a fraction times `bound` (1 to 2^31 - 1).

    The probability of each integer is 1 / bound to within 2^-64.
    """
    bound = bound.astype(jnp.uint32)
    low = bits[0] * bound  # modulo 2^32
    carry = (low + _high_product(bits[1], bound) < low).astype(jnp.uint32)
    return (_high_product(bits[0], bound) + carry).astype(jnp.int32)


def random_integers64(bits: Words, bound: Words) -> Words:
    """Integers in [0, bound) as from `random_integers`, for a bound of up to 64 bits.

    Integers are pairs of uint32 [size], upper half first. The probability of each is 1 / bound to within 2^-64.
    """
    high, low = bound
    _, carry = _sum(_high_product(bits[1], low), bits[1] * high, bits[0] * low)
    lower, carry = _sum(bits[0] * high, _high_product(bits[1], high), _high_product(bits[0], low), carry)
    return _high_product(bits[0], high) + carry, lower


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
    bits = random_bits(key, ROUNDS)
    # The second words matter for one pivot in 2^32 / size only.
    pivots = random_integers(bits, size).astype(jnp.uint32)
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


def _sum(first: jax.Array, *others: jax.Array) -> tuple[jax.Array, jax.Array]:
    """A sum of uint32 modulo 2^32, and the number of carries."""
    carry = jnp.zeros_like(first)
    for x in others:
        first = first + x
        carry += (first < x).astype(jnp.uint32)
    return first, carry


def _high_product(x: jax.Array, y: jax.Array) -> jax.Array:
    """The upper 32 of the 64 bits of x * y, all uint32."""
    x_low, x_high, y_low, y_high = x & 0xFFFF, x >> 16, y & 0xFFFF, y >> 16
    middle = x_high * y_low + (x_low * y_low >> 16)
    return x_high * y_high + (middle >> 16) + ((middle & 0xFFFF) + x_low * y_high >> 16)
