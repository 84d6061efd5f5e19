import functools
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest
import seeds
from helpers import rarely, run_for_long, run_once
from jax import lax
from scipy import stats
from twins import bits_of

from jaxreplay._common.random import ROUNDS, permuted

LEAST = 1e-6  # that any p-value may be
SMALL = (2, 3, 4, 5, 6)
LARGER = (7, 8, 12, 16)
LARGE = (2**20, 1_000_003)
NUM_KEYS, CHUNK = 100_000, 10_000


def orders(keys, sizes):
    """Orders [K, S, max(sizes)] for each of the keys and sizes; what is behind an order's end is of no meaning."""
    places = np.arange(max(sizes), dtype=np.int32)
    sizes = jnp.array(sizes, jnp.int32)
    return jax.vmap(lambda key: jax.vmap(lambda size: permuted(key, places, size))(sizes))(keys)


@functools.cache
def long_orders(seed):
    """Of three keys and each of the large sizes: {size: int [3, size]}; the key, the next, and one folded from it."""
    first = int(seeds.rng(seed).integers(2**31 - 1))

    @run_for_long
    def draw(first):
        key = jax.random.key(first)
        return orders(jnp.stack([key, jax.random.key(first + 1), jax.random.fold_in(key, 0)]), LARGE)

    found = np.asarray(draw(np.uint32(first))).astype(np.int64)
    return {size: found[:, i, :size] for i, size in enumerate(LARGE)}


@functools.cache
def short_orders(kind, sizes):
    """Orders of many keys in a row: {size: int [NUM_KEYS, size]}."""
    make = {"key": jax.random.key, "fold_in": functools.partial(jax.random.fold_in, seeds.key(1))}[kind]
    first = seeds.rng(kind).integers(2**31, dtype=np.uint32)
    numbers = (first + np.arange(NUM_KEYS, dtype=np.uint32)).reshape(-1, CHUNK)
    draw = run_for_long(lambda part: orders(jax.vmap(make)(part), sizes))
    parts = [np.asarray(draw(part)) for part in numbers]
    all_sizes = np.concatenate(parts).astype(np.int64)
    return {size: all_sizes[:, i, :size] for i, size in enumerate(sizes)}


def p_value(values, num_bins):
    """Of the hypothesis that each of `num_bins` values is equally likely."""
    counts = np.bincount(values, minlength=num_bins)
    assert len(counts) == num_bins
    return stats.chisquare(counts).pvalue


def ranks(orders):
    """Numbers in [0, size!) of the orders [K, size], the same for the same order."""
    size = orders.shape[1]
    later_smaller = np.stack([(orders[:, i + 1 :] < orders[:, i : i + 1]).sum(axis=1) for i in range(size)])
    return later_smaller.T @ np.array([math.factorial(size - 1 - i) for i in range(size)])


def words_of(key):
    """The two words of each round, uint32 [ROUNDS] both."""
    return [np.asarray(words) for words in bits_of(key, ROUNDS)]


def twin(key, size):
    return oracles.permutation(words_of(key), size)


def test_equals_the_twin():
    key, sizes = jax.random.key(5), (*range(1, 65), 100)
    found = np.asarray(run_for_long(lambda key: orders(key[None], sizes))(key))[0]
    for numbers, size in zip(found, sizes, strict=True):
        np.testing.assert_array_equal(numbers[:size], twin(key, size))


def test_half_of_all_decisions_swap_and_0_is_none_of_them():
    """Numbers that the first round mixes to 0: as many as random places would meet in 2^32."""
    size, met = 2**31 - 1, 0
    for key in jax.random.split(jax.random.key(0), 20):
        (high, *_), (low, *_) = words = [x.tolist() for x in words_of(key)]
        pivot = ((high << 32 | words[1][0]) * size) >> 64
        if (pivot - low) % size <= low < size:  # it is the larger of its pair
            found = run_once(permuted)(key, np.array([low], np.int32), np.int32(size))
            assert found.tolist() == oracles.permutation(words_of(key), size, [low])
            met += 1
    assert met > 2


@pytest.mark.parametrize("size", [2**29, 2**31 - 1])
def test_the_largest_sizes(size):
    places = seeds.rng(0).choice(size, 100_000, replace=False).astype(np.int32)
    places[:2] = [0, size - 1]
    numbers = np.asarray(run_for_long(permuted)(seeds.key(4), places, np.int32(size)))
    assert numbers.min() >= 0
    assert numbers.max() < size
    assert len(np.unique(numbers)) == len(np.unique(places))
    assert p_value(numbers.astype(np.int64) * 100 // size, 100) > LEAST


def test_places_beyond_the_size_and_no_size():
    places = np.array([-(2**31), -1, 0, 4, 5, 2**31 - 1], np.int32)
    ask = run_once(permuted)
    numbers = ask(jax.random.key(0), places, np.int32(5))
    inside = ask(jax.random.key(0), np.array([0, 0, 0, 4, 4, 4], np.int32), np.int32(5))
    np.testing.assert_array_equal(numbers, inside)
    for size in (0, 1):
        np.testing.assert_array_equal(ask(jax.random.key(0), places, np.int32(size)), np.zeros(6))


@pytest.mark.parametrize("make", [jax.random.key, jax.random.PRNGKey, functools.partial(jax.random.key, impl="rbg")])
def test_every_kind_of_key_and_way_to_ask(make):
    """For all places, for one, and for some after the others."""
    size, places = np.int32(1000), np.arange(1000, dtype=np.int32)

    @run_once
    def ask(key):
        batches = places.reshape(20, 2, 25)
        scanned = lax.scan(lambda size, some: (size, permuted(key, some, size)), size, batches)[1]
        return permuted(key, places, size), permuted(key, np.int32(17), size), scanned.reshape(-1)

    with jax.numpy_rank_promotion("raise"), jax.numpy_dtype_promotion("strict"):
        numbers, one, scanned = jax.device_get(ask(make(0)))
    assert numbers.dtype == np.int32
    np.testing.assert_array_equal(np.sort(numbers), places)
    assert one == numbers[17]
    np.testing.assert_array_equal(scanned, numbers)
    assert np.mean(np.asarray(ask(make(1))[0]) == numbers) < 0.02


def test_mapped_over_keys_places_and_sizes():
    keys, sizes = jax.random.split(jax.random.key(0), 20), np.resize([5, 60, 70], 20).astype(np.int32)
    places = np.minimum(np.arange(20, dtype=np.int32)[:, None] + np.arange(5, dtype=np.int32), sizes[:, None] - 1)
    mapped = np.asarray(run_once(jax.vmap(permuted))(keys, places, sizes))
    for found, key, size, its_places in zip(mapped, keys, sizes, places, strict=True):
        np.testing.assert_array_equal(found, np.array(twin(key, int(size)))[its_places])


@pytest.mark.hlo
@pytest.mark.parametrize("platform", ["cuda", "tpu"])
def test_no_loop_on_an_accelerator(platform):
    arguments = (jax.random.key(0), np.zeros(256, np.int32), np.int32(9))
    lowered = jax.jit(permuted).trace(*arguments).lower(lowering_platforms=(platform,))
    assert "stablehlo.while" not in lowered.as_text()


@pytest.mark.law
@pytest.mark.parametrize("size", [2, 3, 4, 5, rarely(6), rarely(7)])
def test_rounds_are_enough(size):
    assert oracles.swap_or_not_distance(size, ROUNDS) < 2e-10


@pytest.mark.law
@pytest.mark.parametrize("size", [*SMALL, *map(rarely, LARGER)])
@pytest.mark.parametrize("kind", ["key", rarely("fold_in")])
def test_law_of_short_orders(kind, size):
    """Of one and of two numbers, of whole orders, and of the orders of neighbouring keys."""
    found = short_orders(kind, SMALL if size in SMALL else LARGER)[size]
    for place in range(size):
        assert p_value(found[:, place], size) > LEAST
    for first, second in itertools.combinations(range(size), 2):
        # Of the numbers other than the first one: which is it.
        others = found[:, second] - (found[:, second] > found[:, first])
        assert p_value(found[:, first] * (size - 1) + others, size * (size - 1)) > LEAST
    number, count = ranks(found), math.factorial(size)
    if size <= 6:
        assert p_value(number, count) > LEAST
    for distance in (1, 256) if size <= 4 else ():
        blocks = number[: NUM_KEYS // 512 * 512].reshape(-1, 2, distance)
        assert p_value((blocks[:, 0] * count + blocks[:, 1]).reshape(-1), count**2) > LEAST


def cells(x, y, size, parts=16):
    """Of which of parts x parts equal parts of [0, size)^2 each pair is."""
    return x * parts // size * parts + y * parts // size


def evenness(values, size):
    """Two-sided p-value of the number of coincidences among `size` values in [0, size)."""
    counts = np.bincount(values, minlength=size)
    above = stats.chi2.sf(np.sum((counts - 1.0) ** 2), size - 1)
    return 2 * min(above, 1 - above)


@pytest.mark.law
@pytest.mark.parametrize("size", [LARGE[0], *map(rarely, LARGE[1:])])
@pytest.mark.parametrize("seed", [0, *map(rarely, range(1, 10))])
def test_law_of_a_long_order(seed, size):
    """Neighbours, batches one after the other, where a number is, orders of other keys: none tells of another."""
    (numbers, *all_others), places = long_orders(seed)[size], np.arange(size)
    for order in (numbers, *all_others):
        np.testing.assert_array_equal(np.sort(order), places)
    assert p_value(cells(numbers, places, size), 256) > LEAST
    assert evenness((numbers - places) % size, size) > LEAST
    assert evenness((numbers + places) % size, size) > LEAST
    for distance in (1, 2, 256):
        later = np.roll(numbers, -distance)
        assert p_value(cells(numbers, later, size), 256) > LEAST
        assert p_value((later - numbers) % size * 256 // size, 256) > LEAST
        assert evenness((later - numbers) % size, size) > LEAST
        assert evenness((later + numbers) % size, size) > LEAST
    batches = numbers[: 200 * 4096].reshape(200, 4096)
    for batch in batches[::20]:
        assert p_value(batch * 64 // size, 64) > LEAST
    for others in all_others:
        assert p_value(cells(numbers, others, size), 256) > LEAST
        assert evenness((numbers - others) % size, size) > LEAST
