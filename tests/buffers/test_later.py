"""Later steps of an episode."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest
import seeds
from helpers import over_devices, rarely, rejects
from scipy.stats import chisquare

import jaxreplay as jr
from jaxreplay.buffers import _episodes


def rows(first, num_steps):
    """Rows of two environments that say where they are: 10 * time + environment + 1."""
    return 10 * np.arange(first, first + num_steps, dtype=np.int32)[:, None] + np.arange(1, 3, dtype=np.int32)


@pytest.fixture(scope="module")
def long():
    """A buffer with overwritten rows, its state, handles of three sequences, and how many later rows each has."""
    buffer = jr.SequenceBuffer(length=80, num_envs=2, sequence_length=2, hindsight=True, donate=False)
    twin, rng = oracles.SequenceTwin(80, 2, 2, 1), seeds.rng(0)
    state = buffer.init(rows(0, 1))
    for first in range(0, 150, 30):
        new, ends = rows(first, 30), rng.random((30, 2)) < 0.02
        twin.store(new, ends)
        state = buffer.add(state, new, ends=ends)
    handles = buffer.newest(state, 158)
    places = np.asarray(buffer.get(state, handles))[:, 0] - 1
    most = np.array([twin.num_later(place // 10, place % 10) for place in places])
    chosen = [int(np.argmax(most == count)) for count in (1, 5, max(most))]
    assert max(most) > 20
    return buffer, state, np.asarray(handles)[chosen], most[chosen]


@pytest.mark.law
@pytest.mark.parametrize(("law", "gamma"), [("uniform", 0.9), ("geometric", 0.8), ("geometric", 0.9999)])
def test_law(long, law, gamma):
    buffer, state, handles, most = long
    _, steps = buffer.later(state, seeds.key(1), np.repeat(handles, 8_000), law=law, gamma=np.float32(gamma))
    for found, count in zip(np.asarray(steps).reshape(3, -1), most, strict=True):
        observed = np.bincount(found, minlength=count + 1)[1:]
        assert observed.sum() == 8_000
        assert len(observed) == count
        expected = 8_000 * oracles.later_law(law, count, gamma)
        # The test's law is that of large counts: cells that expect few, the last of a law that falls, are one.
        own = max(1, np.sum(expected >= 10) - 1)
        observed, expected = (np.append(x[:own], x[own:].sum()) for x in (observed, expected))
        if count > 1:
            assert min(expected) >= 10
            assert chisquare(observed, expected).pvalue > 1e-3


GAMMAS = (0.0, 0.5, 0.99, 0.9999, 1 - 1e-6, 1 - 1e-9, 1.0)


@pytest.mark.law
@pytest.mark.parametrize("count", [1, 2, 1000, rarely(3000), rarely(2**20)])
def test_geometric_law_is_exact(count):
    """Of evenly spaced words each number gets its share, to a word; of two digits, with some noise."""
    buffer = jr.SequenceBuffer(length=2, num_envs=1, sequence_length=1, hindsight=True)
    num_digits, num_words = 1 + (count > _episodes.DIGIT), 2**17
    words = (np.arange(num_words, dtype=np.uint32) * np.uint32(2**32 // num_words) + np.uint32(2**14))[None]
    words[0, [0, -1]] = 0, 2**32 - 1  # in float32 the last is 1, and would give `count`
    if num_digits == 2:
        low = seeds.rng(0).permutation(words[0])
        words = np.stack([words[0], low])
    geometric = jax.jit(_episodes.geometric)
    for gamma in GAMMAS:
        log_gamma = np.float32(_episodes.checked(buffer, None, None, "geometric", gamma)[-1])
        found = np.asarray(geometric(words, np.full(num_words, count, np.int32), log_gamma))
        assert found.min() >= 0
        assert found.max() < count
        law = num_words * oracles.later_law("geometric", count, gamma)
        if num_digits == 1:
            assert np.abs(np.bincount(found, minlength=count) - law).max() < 1.3
        else:  # in bins of about equal mass
            bins = np.minimum(50 * np.cumsum(law) / num_words, 49).astype(int)
            expected, observed = np.bincount(bins, law), np.bincount(bins[found], minlength=bins[-1] + 1)
            kept = expected > 10
            assert observed[~kept].sum() <= 10 * np.sum(~kept) + 50
            np.testing.assert_allclose(observed[kept], expected[kept], atol=5 * np.sqrt(expected[kept].max()))


@pytest.mark.parametrize(("length", "num_words"), [(2**10, 1), (2**10 + 1, 2), (2**20, 2), (2**20 + 1, 3)])
def test_a_word_for_every_10_bits_of_the_length(monkeypatch, length, num_words):
    """Only the last word tells 1024 neighbours apart, all of the same probability: each comes once."""
    block = min(length, 2**10)
    last = np.arange(block, dtype=np.uint32) * np.uint32(2**32 // block) + np.uint32(2**20)

    def random_bits(key, size):
        words = [np.full(block, 2**31, np.uint32)] * (num_words - 1) + [last]
        rows = jnp.concatenate(words + [last] * (2 * size // block - num_words))
        return rows[:size], rows[size:]

    monkeypatch.setattr(_episodes.random, "random_bits", random_bits)
    count = np.full(block, length - length % 2**10, np.int32)
    draw = jax.jit(lambda key, count: _episodes.draw(key, count, "geometric", -1e-20, length))
    steps = np.asarray(draw(jax.random.key(0), count))
    np.testing.assert_array_equal(np.sort(steps - steps.min()), np.arange(block))
    assert len({step // 2**10 for step in steps - 1}) == 1


@pytest.mark.versions
def test_wrong_arguments(long):
    buffer, state, handles, _ = long
    plain, flagged = (
        jr.SequenceBuffer(length=80, num_envs=2, sequence_length=2, windows=windows) for windows in ("any", "cut")
    )
    items, key = jr.ReplayBuffer(capacity=4), jax.random.key(0)
    rejects("hindsight=1: must be True", jr.SequenceBuffer, length=4, num_envs=1, sequence_length=2, hindsight=1)
    rejects("`later` needs a SequenceBuffer with hindsight=True", plain.later, state, key, handles)
    rejects("`later` needs a SequenceBuffer with hindsight=True", flagged.later, state, key, handles)
    rejects("buffer=ReplayBuffer.* with hindsight=True", over_devices(items, 1).later, state, key, handles)
    rejects("this state is of a buffer without it", buffer.later, plain.init(rows(0, 1)), key, handles)
    later = functools.partial(buffer.later, state, key)
    rejects('law=\'first\': must be "uniform", "geometric" or', later, handles, law="first")
    for gamma in (1.5, jnp.float32(1.5)):
        message = r"gamma=.*1\.5.*: must be a number in \[0, 1\]; it is a discount"
        rejects(message, later, handles, law="geometric", gamma=gamma)
    rejects(r"gamma: got float32\[3\], expected one", later, handles, law="geometric", gamma=np.ones(3, np.float32))
    rejects(r"indices: got float32\[3\], expected a vector of integers", later, handles.astype(np.float32))
    rejects("new_buffer.hindsight=True: must be as", jr.migrate, plain, plain.init(rows(0, 1)), buffer)
