import jax
import jax.numpy as jnp
import numpy as np
import pytest
import seeds
from twins import bits_of

from jaxreplay._common.random import random_bits, random_integers, random_integers64

# The tests of permutations take both as they are, not jitted.
some_integers = jax.jit(random_integers)
products = jax.jit(lambda *words: random_integers64(words[:2], words[2:]))


@pytest.mark.parametrize("make", [jax.random.key, jax.random.PRNGKey, lambda seed: jax.random.key(seed, impl="rbg")])
def test_bits_of_every_kind_of_key(make):
    seed = int(seeds.rng(0).integers(2**31 - 1))
    bits = np.asarray(random_bits(make(seed), 1000))
    assert bits.shape == (2, 1000)
    assert bits.dtype == np.uint32
    assert len(np.unique(bits)) > 1990
    ones = np.unpackbits(bits.view(np.uint8)).mean()
    assert abs(ones - 0.5) < 0.01
    assert not np.any(bits == np.asarray(random_bits(make(seed + 1), 1000)))
    np.testing.assert_array_equal(bits, random_bits(make(seed), 1000))


def test_bits_are_those_that_jax_draws_without_counters_of_64_bits():
    key = seeds.key(7)
    with jax.threefry_partitionable(False):
        expected = jax.random.bits(key, (2 * 501,), jnp.uint32)
    np.testing.assert_array_equal(np.concatenate(bits_of(key, 501)), expected)


def test_random_integers_are_the_fraction_times_the_bound():
    rng = seeds.rng(0)
    bits = rng.integers(0, 2**32, (2, 4000), np.uint32)
    bits[:, :4] = [[0, 0, 2**32 - 1, 2**32 - 1], [0, 2**32 - 1, 0, 2**32 - 1]]
    for bound in (1, 2, 3, 1000, 2**20, 2**24 + 1, 2**29, 2**31 - 1):
        expected = [((int(high) << 32 | int(low)) * bound) >> 64 for high, low in bits.T]
        np.testing.assert_array_equal(some_integers(bits, np.int32(bound)), expected)


def test_words_of_64_bits_are_multiplied_as_integers_are():
    words = seeds.rng(0).integers(0, 2**32, (4, 1000), np.uint32)
    edges = np.array([0, 1, 2**16, 2**31, 2**32 - 1], np.uint32)
    words[:, :625] = np.stack(np.meshgrid(*[edges] * 4), axis=-1).reshape(625, 4).T
    pairs = jax.device_get(products(*words)), words[:2], words[2:]
    found, x, y = ([int(a) << 32 | int(b) for a, b in zip(*pair, strict=True)] for pair in pairs)
    assert found == [a * b >> 64 for a, b in zip(x, y, strict=True)]
