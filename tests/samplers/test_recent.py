"""Recent: the law of its draws at any size and half-life; in buffers, and by age, the twins tell it."""

import jax
import numpy as np
import oracles
import pytest
import seeds
from helpers import over_devices, rarely, rejects
from scipy import stats

import jaxreplay as jr
from jaxreplay._common.ring import Live
from jaxreplay.samplers import _recent

DRAWS = 2**17
draw = jax.jit(lambda sampler, *arguments: sampler.sample(*arguments), static_argnums=(0, 3))


def drawn_ranks(half_life, size, draws=DRAWS):
    """Ranks among the items, 0 for the oldest, and their probabilities."""
    sampler = jr.Recent(half_life=half_life)
    live = Live(np.int32(0), np.int32(size), capacity=2**29)
    found = draw(sampler, sampler.init(2**29), seeds.key("recent", size), draws, live)
    return [np.asarray(x) for x in found]


def p_value(ranks, law, most=500):
    """Of a chi-square test; many ranks are grouped to about equal probabilities."""
    bins = np.minimum(np.cumsum(law) * most, most - 1).astype(int) if len(law) > most else np.arange(len(law))
    expected = np.bincount(bins, law) * len(ranks)
    counts = np.bincount(bins[ranks], minlength=len(expected))
    rare = expected < 5
    expected, counts = ([*x[~rare], *([x[rare].sum()] if rare.any() else [])] for x in (expected, counts))
    if expected[-1] < 1e-2 and counts[-1] == 0:
        expected, counts = expected[:-1], counts[:-1]
    return 1.0 if len(counts) == 1 else stats.chisquare(counts, np.array(expected) / sum(expected) * sum(counts)).pvalue


# Half-lives and sizes.
LAWS = [(1.0, 7), (3.0, 1000), (1e5, 2**20), (1e300, 1000)]
RARE = [(1.0, 1), (0.05, 50), (0.3, 100), (2.0**-20, 3), (40.0, 50_000), (1e6, 300), (1e12, 5), (1e4, 2**24 + 5)]
RARE += [(2.0**22, 2**24), (1e8, 2**27), (1e12, 2**25)]


@pytest.mark.law
@pytest.mark.parametrize(("half_life", "size"), [*LAWS, *map(rarely, RARE)])
def test_law(half_life, size):
    ranks, probabilities = drawn_ranks(half_life, size)
    law = oracles.recent_law(size, half_life)
    assert ranks.min() >= 0
    assert ranks.max() < size
    np.testing.assert_allclose(probabilities, law[ranks], rtol=5e-6)
    assert p_value(ranks, law) > 1e-4
    for modulus in (16, 7) if size > 2**23 and half_life > 2**20 else ():  # a float32 has no odd numbers there
        assert stats.chisquare(np.bincount(ranks % modulus, minlength=modulus)).pvalue > 1e-4
    first, second = (ranks > np.median(ranks)).reshape(-1, 2).T
    pairs = np.bincount(2 * first + second, minlength=4).reshape(2, 2)
    assert pairs.sum(0).min() == 0 or stats.chi2_contingency(pairs).pvalue > 1e-4  # rows know nothing of each other


@pytest.mark.law
def test_the_newest_and_the_oldest_of_very_many_have_the_law():
    """Items have few steps of a float32, or of 32 bits, each."""
    size = 2**29
    ages = size - 1 - drawn_ranks(1e12, size, draws=2**21)[0]
    for near in (ages, size - 1 - ages):
        near = near[near < 2**20]
        assert len(near) > 2**11
        assert stats.chisquare(np.bincount(near % 8, minlength=8)).pvalue > 1e-4
        assert stats.chisquare(np.bincount(near >> 17, minlength=8)).pvalue > 1e-4


def test_an_age_that_few_draws_have_is_as_precise(monkeypatch):
    """By random bits of which the first 40 are ones: a float32 has no such number below 1."""
    words = np.array([[2**32 - 1, 0], [2**32 - int(2**23.5), 2**31]], np.uint32)
    monkeypatch.setattr(_recent.random, "random_bits", lambda *_: words)
    sampler, live = jr.Recent(half_life=1.0), Live(np.int32(0), np.int32(1000), capacity=1000)
    slots, _ = sampler.sample(None, None, 1, live)
    assert slots.tolist() == [999 - 40]


@pytest.mark.parametrize("normalize", [None, "batch"])
def test_weights_over_shards_of_different_sizes(normalize):
    """Half of 64 draws are from a shard of three items, half from one of seven; N and the largest weight are of all."""
    sampler, ids = jr.Recent(half_life=4.0, normalize=normalize), np.arange(24)
    buffer = over_devices(jr.ReplayBuffer(capacity=24, sampler=sampler, donate=False), 2)
    state = buffer.add(buffer.init(ids), ids, mask=(ids >= 9) & (ids < 19))
    np.testing.assert_array_equal(buffer.sample(state, jax.random.key(0), 64).weights, 1)
    sample = jax.device_get(buffer.sample(state, jax.random.key(0), 64, beta=0.7))
    law = np.concatenate([np.zeros(9), oracles.recent_law(3, 2.0) / 2, oracles.recent_law(7, 2.0) / 2])
    np.testing.assert_allclose(sample.probabilities, law[sample.items], rtol=1e-5)
    expected = (10 * law[sample.items]) ** -0.7
    if normalize == "batch":
        assert expected[:32].max() < expected.max()  # the largest weight is of the second shard
        expected /= expected.max()
    np.testing.assert_allclose(sample.weights, expected, rtol=1e-5)


@pytest.mark.versions
def test_errors():
    rejects("half_life=0: must be a finite number of at least 9.*an age, such as half of", jr.Recent, half_life=0)
    rejects("half_life=nan", jr.Recent, half_life=float("nan"))
    rejects("half_life=-1: must be a finite number of at least 9.*or None", jr.Prioritized, half_life=-1)
    rejects(r"beta=2: must be a number in \[0, 1\]", jr.Recent, half_life=1, beta=2)
    rejects('normalize=.global.: must be "batch" or None', jr.Recent, half_life=1, normalize="global")
    for sampler in (jr.Recent(half_life=1), jr.Prioritized(half_life=1)):
        message = r"\(half_life=1.*a ReservoirBuffer keeps no order; use a ReplayBuffer"
        rejects(message, jr.ReservoirBuffer, capacity=4, sampler=sampler)
