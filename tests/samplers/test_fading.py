"""Draws by age: the law of 2^20 of them, of items and of sequences that are stored over several laps of the ring."""

import functools

import jax
import numpy as np
import pytest
import seeds
from helpers import check_tree, rarely
from scipy import stats

import jaxreplay as jr

DRAWS = 2**20
SAMPLERS = {
    "recent": jr.Recent,
    "prioritized": functools.partial(jr.Prioritized, alpha=0.6, epsilon=0.0, max_priority=11.0, stratified=False),
}
# Half-life, steps that are stored at once (of so many streams), additions, steps of an addition, max_age.
CASES = {
    "laps": (10.0, 64, 1, 16, 21, None),
    "streams": (3.0, 20, 3, 9, 8, 11),
    "few": (7.0, 64, 1, 5, 10, None),
    "short": (0.5, 64, 1, 7, 20, None),
    "shorter": (0.15, 64, 1, 7, 20, None),
    "long": (1e7, 300, 1, 7, 101, None),
    "levels": (150.0, 1000, 1, 5, 500, None),
    "young": (100.0, 1000, 1, 5, 500, 333),
    "all streams": (0.8, 40, 5, 9, 11, None),
    "long of streams": (1e5, 70, 4, 30, 7, 50),
}
FIRST = ("laps", "streams")


@functools.partial(jax.jit, static_argnums=(0, 2))
def drawn(buffer, state, max_age, keys):
    def draw(_, key):
        sample = buffer.sample(state, key, DRAWS // 8, max_age=max_age)
        return None, (sample.items.reshape(DRAWS // 8, -1)[:, 0], sample.age, sample.probabilities)

    return [x.reshape(-1) for x in jax.lax.scan(draw, None, keys)[1]]


def expected(half_life, length, streams, num_steps, max_age, errors, alpha):
    """The law of each item that was ever complete; `errors` has NaN for new items, of priority 11."""
    overlap = 3 if streams > 1 else 0
    newest = num_steps - 1 - overlap
    age = newest - np.arange(num_steps * streams) // streams
    is_drawable = (age >= 0) & (age < min(length, num_steps) - overlap) & (age < (max_age or np.inf))
    leaves = np.where(np.isnan(errors), 11.0, errors) ** alpha
    law = np.where(is_drawable, leaves * np.exp2(-np.maximum(age, 0) / half_life), 0)
    return age, law / law.sum()


def deviations(found, law):
    """In standard deviations, of items of which ten draws or more are expected, and of all others together."""
    often = DRAWS * law >= 10
    found, law = ([*x[often], x[~often].sum()] for x in (found, law))
    if law[-1] * DRAWS < 1e-3:
        assert found.pop() == 0, "an item is drawn that should not be"
        law.pop()
    found, law = np.array(found), np.array(law) / sum(law)
    if len(law) > 1:
        assert stats.chisquare(found, law * DRAWS).pvalue > 1e-4
    return (found - DRAWS * law) / np.sqrt(np.maximum(DRAWS * law * (1 - law), 1e-6))


@pytest.mark.law
@pytest.mark.parametrize("case", [x if x in FIRST else rarely(x) for x in CASES])
@pytest.mark.parametrize("kind", SAMPLERS)
def test_law(kind, case):
    half_life, length, streams, size, times, max_age = CASES[case]
    sampler = SAMPLERS[kind](half_life=half_life)
    buffer = jr.ReplayBuffer(capacity=length, sampler=sampler, donate=False)
    if streams > 1:
        buffer = jr.SequenceBuffer(length=length, num_envs=streams, sequence_length=4, sampler=sampler, donate=False)
    shape = (size, streams) if streams > 1 else (size,)
    errors = np.full(size * times * streams, np.nan)
    state = buffer.init(np.zeros(shape, np.int32))
    for t in range(times):
        state = buffer.add(state, np.arange(size * streams, dtype=np.int32).reshape(shape) + t * size * streams)
        if times - length // size - 1 <= t < times - 1:
            handles = buffer.newest(state, size * streams // 2)
            ids = np.asarray(buffer.get(state, handles)).reshape(len(handles), -1)[:, 0]
            errors[ids] = 1 + ids * 7 % 11
            state = buffer.update(state, handles, errors[ids].astype(np.float32))
    ages, law = expected(half_life, length, streams, size * times, max_age, errors, getattr(sampler, "alpha", 0))
    ids, age, probabilities = jax.device_get(drawn(buffer, state, max_age, jax.random.split(seeds.key(kind, case), 8)))
    np.testing.assert_array_equal(age, ages[ids])
    np.testing.assert_allclose(probabilities, law[ids], rtol=2e-5)
    largest = np.abs(deviations(np.bincount(ids, minlength=len(law)), law)).max()
    assert largest < 5


def test_the_newest_is_the_last_item_that_is_inserted():
    """No emptied slot, and none out of range."""
    sampler = jr.Prioritized(half_life=1.0)
    for slots, is_item, newest in (([0, 1, 2], [1, 1, 0], 1), ([0, 1, 4, -1], [1] * 4, 1), ([2], [0], 3)):
        state = sampler.insert(sampler.init(4), np.int32(slots), np.array(is_item, bool))
        assert state.tree.fading.newest == newest
        check_tree(state.tree)
