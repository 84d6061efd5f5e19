"""Draws of a part of what is stored: the newest, those of one episode, each once."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest
import seeds
from helpers import items, over_devices, rarely, rejects, tree_of
from scipy.stats import chisquare

import jaxreplay as jr
from jaxreplay import sum_tree


def tagged(first, *shape):
    return items(first + np.arange(np.prod(shape)).reshape(shape))


def replay(sampler, num_added):
    """A buffer, and its state after items 0, 1, ... were added by eights."""
    buffer = jr.ReplayBuffer(capacity=24, sampler=sampler, donate=False)
    state = buffer.init(tagged(0, 8))
    for first in range(0, num_added, 8):
        state = buffer.add(state, tagged(first, 8), mask=first + np.arange(8) < num_added)
    return buffer, state


@pytest.mark.law
@pytest.mark.parametrize("power", [16, rarely(24)])
def test_short_runs_of_large_trees_are_exact(power):
    """As differences of prefix sums these would be noise: what is left out is 10^6 times as heavy."""
    capacity, size, start = 2**power, 1000, 2**power - 300
    leaves, ways = np.full(capacity, 1e6, np.float32), (False, True)
    run = (start + np.arange(size)) % capacity
    leaves[run] = seeds.rng(0).lognormal(size=size)

    @jax.jit
    def draw(tree, start, size, key):
        tree = sum_tree.restrict(tree, start, size)
        return sum_tree.total(tree), [sum_tree.sample(tree, key, 150_000, stratified=way)[0] for way in ways]

    total, found = jax.device_get(draw(tree_of(leaves), np.int32(start), np.int32(size), seeds.key(0)))
    mass = leaves[run].sum(dtype=np.float64)
    np.testing.assert_allclose(total, mass, rtol=1e-6)
    for stratified, draws in zip(ways, found, strict=True):
        counts = np.bincount((draws - start) % capacity, minlength=size)
        assert len(counts) == size
        assert chisquare(counts, 150_000 * leaves[run] / mass).pvalue > (1e-4 if not stratified else 0.5)


@pytest.mark.law
@pytest.mark.parametrize("windows", ["inside", "episodes", "gaps"])
def test_law_of_windows_in_episodes(windows):
    """Each window that may be drawn is equally likely, also where some were overwritten; so is each young one.

    There are so many that the search for the young ones has two rounds.
    """
    windows, gaps = ("any", True) if windows == "gaps" else (windows, False)
    buffer = jr.SequenceBuffer(length=80, num_envs=3, sequence_length=4, windows=windows, gaps=gaps)
    twin = oracles.SequenceTwin(80, 3, 4, 1, windows, gaps)
    rng, state = seeds.rng(0), buffer.init(tagged(0, 1, 3))
    for t in range(0, 175, 5):
        ids, ends = tagged(3 * t, 5, 3), rng.permutation(15).reshape(5, 3) < 3
        drawable = rng.permutation(15).reshape(5, 3) >= 2 if gaps else None
        state = buffer.add(state, ids, ends=ends, drawable=drawable)
        twin.store(ids["id"], ends, drawable=drawable)
    for max_age in (12, 10_000):
        drawn = jax.device_get(buffer.sample(state, seeds.key(max_age), 30_000, max_age=max_age))
        found, counts = np.unique(drawn.items["id"], axis=0, return_counts=True)
        young = sorted(twin.sequence(handle) for handle in twin.handles if twin.age(handle) < max_age)
        assert found.tolist() == young
        assert len(young) > 5
        assert chisquare(counts).pvalue > 1e-4


@pytest.mark.law
def test_draws_without_replacement_are_distinct_and_every_set_is_equally_likely():
    """Of a batch, and of the last batch of an epoch."""
    buffer, state = replay(jr.Uniform(replacement=False), 30)
    keys = jax.random.split(seeds.key(0), 65_000)
    draws = jax.jit(jax.vmap(lambda key: (buffer.sample(state, key, 3), buffer.epoch(state, key, 3, step=7))))(keys)
    for drawn in jax.device_get(draws):
        ids = drawn.items["id"] - 6
        assert np.all((ids[:, 0] != ids[:, 1]) & (ids[:, 0] != ids[:, 2]) & (ids[:, 1] != ids[:, 2]))
        for one, other in ((0, 1), (1, 2), (0, 2)):
            counts = np.bincount(ids[:, one] * 24 + ids[:, other], minlength=24 * 24).reshape(24, 24)
            assert chisquare(counts[~np.eye(24, dtype=bool)]).pvalue > 1e-4
        np.testing.assert_array_equal(drawn.weights, 1.0)
        np.testing.assert_allclose(drawn.probabilities, 1 / 24, rtol=1e-6)


@jax.jit
def slowly(number, matrix):
    """The same number, most of a second later."""
    x = jax.lax.fori_loop(0, 300, lambda _, x: x @ matrix, matrix)
    return number + (x[0, 0] > 5).astype(jnp.int32)


def test_an_eager_draw_does_not_wait_for_the_size():
    """An empty buffer is an error if its size is there, as `init` leaves it; else its rows have no item."""
    buffer, key, matrix = jr.ReplayBuffer(capacity=4, donate=False), jax.random.key(0), np.zeros((512, 512), np.float32)
    mixture = jr.Mixture(buffers=(buffer, buffer))
    empty = buffer.init(tagged(0, 8))
    calls = {
        "empty buffer": lambda state: buffer.sample(state, key, 4),
        "empty buffer;": lambda state: buffer.epoch(state, key, 4, step=0),
        "empty buffers": lambda state: mixture.sample((state, state), key, 4),
    }
    for message, call in calls.items():
        rejects(message, call, empty)  # compiles it
        size = slowly(empty.ring.size, matrix)
        drawn = call(empty.replace(ring=empty.ring.replace(size=size)))
        assert not size.is_ready()
        np.testing.assert_array_equal(drawn.indices, [-1] * 4)
        np.testing.assert_array_equal(drawn.weights, [0] * 4)


@pytest.mark.versions
def test_wrong_arguments():
    buffer, state = replay(jr.Prioritized(), 10)
    key = jax.random.key(0)
    sequence = functools.partial(jr.SequenceBuffer, length=8, num_envs=2, sequence_length=2)
    rejects("replacement=0: must be True or False", jr.Uniform, replacement=0)
    for stratified in ("systematic", None, 2):
        rejects("stratified=.*: must be True or False", jr.Prioritized, stratified=stratified)
    rejects('windows=\'whole\': must be "any", "cut", "inside" or "episodes"', sequence, windows="whole")
    rejects('stride=2: must be 1 with windows="episodes"', sequence, windows="episodes", stride=2)
    rejects("max_age=0: must be an integer from 1", buffer.sample, state, key, 4, max_age=0)
    rejects(r"max_age=2\.5: must be an integer", buffer.sample, state, key, 4, max_age=2.5)
    rejects(r"max_age: got int32\[2\]", buffer.sample, state, key, 4, max_age=jnp.asarray(np.ones(2, np.int32)))
    rejects(r"max_age: got float32\[\]", buffer.sample, state, key, 4, max_age=jnp.asarray(np.float32(2)))
    rejects("step=-1: must be an integer from 0", buffer.epoch, state, key, 4, step=-1)
    rejects(r"step: got int32\[3\]", buffer.epoch, state, key, 4, step=jnp.asarray(np.zeros(3, np.int32)))
    rejects("batch_size=0: must be an integer from 1", buffer.epoch, state, key, 0, step=0)
    rejects("batch_size=0: must be an integer from 1", buffer.num_batches, state, 0)
    rejects("cannot sample from an empty buffer", buffer.epoch, buffer.init(tagged(0, 8)), key, 4, step=0)
    sharded = over_devices(buffer, 2)
    state = jax.eval_shape(sharded.init, tagged(0, 8))
    rejects("batch_size=3: must be a multiple", jax.eval_shape, lambda s: sharded.epoch(s, key, 3, step=0), state)
