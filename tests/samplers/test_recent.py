"""Recent: the law of its draws at any size and power, in every buffer that keeps an order."""

import jax
import numpy as np
import oracles
import pytest
import seeds
from helpers import numbers, over_devices, rarely, rejects
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


@pytest.mark.law
@pytest.mark.parametrize("num_shards", [1, rarely(2)])
def test_law_in_a_replay_buffer_and_of_its_newest_items(num_shards):
    """Ranks are of the whole shard also where `max_age` leaves out the older items."""
    buffer = jr.ReplayBuffer(capacity=24, sampler=jr.Recent(power=1.5, beta=1.0, normalize=None))
    buffer = over_devices(buffer, 2) if num_shards == 2 else buffer
    state = buffer.init(numbers(0, 8))
    for first in range(0, 40, 8):
        state = buffer.add(state, numbers(first, 8))
    shard = np.arange(40) % 8 // 4 if num_shards == 2 else np.zeros(40, int)
    for max_age in (None, 8, 1000):
        law = np.zeros(40)
        for k in range(num_shards):
            ids = np.flatnonzero(shard == k)[-24 // num_shards :]
            young = ids if max_age is None else ids[-min(max_age // num_shards, len(ids)) :]
            law[young] = oracles.recent_law(len(young), 1.5, len(ids) - len(young)) / num_shards
        sample = jax.tree.map(np.asarray, buffer.sample(state, seeds.key(0), DRAWS, max_age=max_age))
        assert stats.chisquare(np.bincount(sample.items, minlength=40)[law > 0], law[law > 0] * DRAWS).pvalue > 1e-4
        np.testing.assert_allclose(sample.probabilities, law[sample.items], rtol=5e-6)
        np.testing.assert_allclose(sample.weights, 1 / (np.sum(law > 0) * law[sample.items]), rtol=1e-5)
        np.testing.assert_allclose(sample.weights @ sample.items / DRAWS, np.flatnonzero(law).mean(), rtol=0.02)


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


@pytest.mark.law
@pytest.mark.parametrize("windows", ["any", *map(rarely, ["cut", "inside", "episodes"])])
def test_law_of_sequences(windows):
    """By the order in which they were completed."""
    buffer = jr.SequenceBuffer(length=9, num_envs=2, sequence_length=3, windows=windows, sampler=jr.Recent(power=2.0))
    state, step = buffer.init(np.zeros((1, 2), np.int32)), jax.jit(buffer.add)
    for t in range(14):
        ends = np.array([[t % 5 == 4, t % 4 == 3]])
        state = step(state, 2 * t + np.arange(2, dtype=np.int32)[None], ends=ends)
    handles = np.asarray(buffer.newest(state, buffer.size(state)))
    law = oracles.recent_law(len(handles), 2.0)
    sample = jax.device_get(buffer.sample(state, seeds.key(0), 2**15))
    rank = np.searchsorted(handles, sample.indices)
    np.testing.assert_array_equal(handles[rank], sample.indices)
    assert stats.chisquare(np.bincount(rank, minlength=len(law)), law * 2**15).pvalue > 1e-4
    assert np.all(np.diff(np.asarray(buffer.get(state, handles))[:, -1] // 2) >= 0)  # in order of time


@pytest.mark.versions
def test_errors():
    rejects(r"power=-1: must be a number in \[0, 1e\+06\]; 1 is usual, 0 is uniform", jr.Recent, power=-1)
    rejects("power=nan", jr.Recent, power=float("nan"))
    rejects(r"beta=2: must be a number in \[0, 1\]", jr.Recent, power=1, beta=2)
    rejects('normalize=.global.: must be "batch" or None', jr.Recent, power=1, normalize="global")
    message = r"Recent\(power=1.*a ReservoirBuffer keeps no order; use a ReplayBuffer"
    rejects(message, jr.ReservoirBuffer, capacity=4, sampler=jr.Recent(power=1))
