"""Recent: the law of its draws at any size and power; in buffers, and by age, the twins tell it."""

import jax
import numpy as np
import oracles
import pytest
import seeds
from helpers import over_devices, rarely, rejects
from scipy import stats

import jaxreplay as jr
from jaxreplay._common.ring import Live

DRAWS = 2**17
draw = jax.jit(lambda sampler, *arguments: sampler.sample(*arguments), static_argnums=(0, 3))


def drawn_ranks(power, size, older=0, draws=DRAWS):
    """Ranks among the live items, and their probabilities."""
    sampler = jr.Recent(power=power)
    live = Live(np.int32(0), np.int32(size), np.int32(older), capacity=2**29)
    found = draw(sampler, sampler.init(2**29), seeds.key("recent", size, older), draws, live)
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


# Powers, sizes, and how many items are older than the live ones.
LAWS = [(1.0, 7, 0), (2.0, 1000, 0), (0.3, 100, 900), (10.0, 2**20, 0), (0, 5, 0)]
RARE = [(1.0, 1, 0), (1.0, 50_000, 0), (0.5, 3, 0), (3.0, 300, 2**24), (30.0, 50, 0), (300.0, 50, 7), (0, 1000, 0)]
RARE += [(300.0, 2**20, 0), (1e4, 1000, 0), (1e6, 40, 2), (1e6, 2**22, 2**20), (1.0, 2**24 + 5, 0), (2.5, 2**27, 0)]


@pytest.mark.law
@pytest.mark.parametrize(("power", "size", "older"), [*LAWS, *map(rarely, RARE)])
def test_law(power, size, older):
    ranks, probabilities = drawn_ranks(power, size, older)
    law = oracles.recent_law(size, power, older)
    assert ranks.min() >= 0
    assert ranks.max() < size
    np.testing.assert_allclose(probabilities, law[ranks], rtol=5e-6)
    assert p_value(ranks, law) > 1e-4
    for modulus in (16, 7) if size > 2**23 else ():  # a float32 has no odd numbers there
        assert stats.chisquare(np.bincount(ranks % modulus, minlength=modulus)).pvalue > 1e-4
    first, second = (ranks > np.median(ranks)).reshape(-1, 2).T
    pairs = np.bincount(2 * first + second, minlength=4).reshape(2, 2)
    assert pairs.sum(0).min() == 0 or stats.chi2_contingency(pairs).pvalue > 1e-4  # rows know nothing of each other


@pytest.mark.law
@pytest.mark.parametrize("power", [1.0, *map(rarely, [0.0, 0.3])])
def test_the_newest_and_the_oldest_of_very_many_have_the_law(power):
    """Items have few steps of a float32, or of 32 bits, each."""
    size = 2**29
    ranks, _ = drawn_ranks(power, 64, size - 64)
    assert p_value(ranks, oracles.recent_law(64, power, size - 64)) > 1e-4
    steps = size - 1 - drawn_ranks(power, size, draws=2**20)[0]
    steps = steps[steps < 2**14] % 8
    assert stats.chisquare(np.bincount(steps, minlength=8)).pvalue > 1e-4


@pytest.mark.parametrize("normalize", [None, "batch"])
def test_weights_over_shards_of_different_sizes(normalize):
    """Half of 64 draws are from a shard of three items, half from one of seven; N and the largest weight are of all."""
    sampler, ids = jr.Recent(power=1.0, normalize=normalize), np.arange(24)
    buffer = over_devices(jr.ReplayBuffer(capacity=24, sampler=sampler, donate=False), 2)
    state = buffer.add(buffer.init(ids), ids, mask=(ids >= 9) & (ids < 19))
    np.testing.assert_array_equal(buffer.sample(state, jax.random.key(0), 64).weights, 1)
    sample = jax.device_get(buffer.sample(state, jax.random.key(0), 64, beta=0.7))
    law = np.concatenate([np.zeros(9), oracles.recent_law(3, 1.0) / 2, oracles.recent_law(7, 1.0) / 2])
    np.testing.assert_allclose(sample.probabilities, law[sample.items], rtol=1e-5)
    expected = (10 * law[sample.items]) ** -0.7
    if normalize == "batch":
        assert expected[:32].max() < expected.max()  # the largest weight is of the second shard
        expected /= expected.max()
    np.testing.assert_allclose(sample.weights, expected, rtol=1e-5)


@pytest.mark.versions
def test_errors():
    rejects(r"power=-1: must be a number in \[0, 1e\+06\]; 1 is usual, 0 is uniform", jr.Recent, power=-1)
    rejects("power=nan", jr.Recent, power=float("nan"))
    rejects(r"beta=2: must be a number in \[0, 1\]", jr.Recent, power=1, beta=2)
    rejects('normalize=.global.: must be "batch" or None', jr.Recent, power=1, normalize="global")
    message = r"Recent\(power=1.*a ReservoirBuffer keeps no order; use a ReplayBuffer"
    rejects(message, jr.ReservoirBuffer, capacity=4, sampler=jr.Recent(power=1))
