"""Minibatches of a draw, and systematic draws."""

import functools

import chex
import jax
import numpy as np
import pytest
import seeds
from helpers import at, rarely, rejects, stack
from scipy.stats import chisquare
from test_draws import PER, SAMPLERS, replay, tagged

import jaxreplay as jr
from jaxreplay import sum_tree

SYSTEMATIC = PER(stratified="systematic")


CASES = {
    "stratified": lambda: replay(PER(), 21)[:2],
    "systematic": lambda: replay(SYSTEMATIC, 21)[:2],
    "sequences": lambda: sequences(),
    "shards": lambda: replay(PER(), 40, 4)[:2],
    "mixture": lambda: mixture(),
}


def sequences():
    buffer = jr.SequenceBuffer(length=12, num_envs=2, sequence_length=3, sampler=PER(), donate=False)
    return buffer, buffer.add(buffer.init(tagged(0, 3, 2)), tagged(0, 12, 2))


def mixture():
    buffer, state, _ = replay(PER(), 21)
    other, other_state, _ = replay(PER(), 40, capacity=16)
    return jr.Mixture(buffers=(buffer, other), shares=(0.75, 0.25), weights="joint"), (state, other_state)


def minibatches(buffer, state, key, k, batch_size):
    return jax.vmap(lambda key: buffer.sample(state, key, batch_size))(jax.random.split(key, k))


@pytest.mark.parametrize("case", ["systematic", "mixture", "shards", *map(rarely, ["stratified", "sequences"])])
def test_minibatches_are_draws_with_keys_of_their_own(case):
    buffer, state = CASES[case]()
    draw = functools.partial(minibatches, buffer, state, k=4, batch_size=8)
    drawn = jax.jit(draw)(seeds.key(0))
    alone = [buffer.sample(state, key, 8) for key in jax.random.split(seeds.key(0), 4)]
    chex.assert_trees_all_equal(drawn, stack(*alone))
    np.testing.assert_array_equal(np.asarray(drawn.weights).max(axis=1), 1)


@pytest.mark.law
@pytest.mark.parametrize(
    ("sampler", "num_shards"),
    [("stratified", 0), ("systematic", 2), *map(rarely, [("systematic", 0), ("independent", 0), ("stratified", 4)])],
)
def test_each_minibatch_is_a_fair_sample(sampler, num_shards):
    sampler = SYSTEMATIC if sampler == "systematic" else SAMPLERS[sampler]
    buffer, state, leaf = replay(sampler, 24, num_shards)
    shards = max(num_shards, 1)
    shard = np.arange(24) % 8 // (8 // shards)
    law = leaf / np.array([leaf[shard == k].sum() for k in range(shards)])[shard] / shards
    draw = jax.jit(lambda keys: jax.lax.map(lambda key: minibatches(buffer, state, key, 4, 8), keys))
    sample = jax.device_get(draw(jax.random.split(seeds.key(3), 2000)))
    np.testing.assert_allclose(sample.weights.max(axis=-1), 1, rtol=0 if sampler.normalize else 10)
    for part in range(4):
        found = np.bincount(sample.items["id"][:, part].reshape(-1), minlength=24)
        assert chisquare(found, law * found.sum()).pvalue > 1e-4
    position = np.asarray([np.bincount(sample.items["id"][:, :, t].reshape(-1), minlength=24) for t in range(8)])
    assert np.all(position.sum(axis=0) > 0)
    if sampler.stratified:  # rows of a minibatch come from parts of the total, in order
        order = sample.indices % state.ring.period
        assert np.mean(np.diff(order.reshape(-1, shards, 8 // shards), axis=-1) >= 0) == 1


def test_shards_of_a_systematic_draw_have_one_offset():
    buffer, state, _ = replay(SYSTEMATIC, 40, 4)
    for seed in range(5):
        names = np.asarray(buffer.sample(state, seeds.key(seed), 32).indices).reshape(4, 8)
        for k in range(4):
            tree = at(state.sampler.tree, k)
            slots, _ = sum_tree.sample(tree, seeds.key(seed), 8, stratified="systematic")
            np.testing.assert_array_equal(names[k] - k * state.ring.period, buffer_handles(buffer, state, k, slots))
    independent = replay(PER(), 40, 4)
    names = np.asarray(independent[0].sample(independent[1], seeds.key(0), 32).indices).reshape(4, 8)
    assert len({tuple(row % independent[1].ring.period) for row in names}) > 1


def buffer_handles(buffer, state, k, slots):
    """Handles within shard `k` of its `slots`."""
    rows = np.zeros((4, 8), np.int32)
    rows[k] = slots
    return np.asarray(buffer.handles(state, rows.reshape(-1))).reshape(4, 8)[k] - k * state.ring.period


@pytest.mark.parametrize("alpha", [0.0, rarely(1.0)])
def test_the_weighted_mean_of_systematic_draws_is_unbiased(alpha):
    """With equal priorities it varies less than that of independent draws.

    Items in order of time are a trend. For a trend stratified draws vary least (Cochran 1977, Sampling Techniques,
    section 8.4).
    """
    variance = {}
    for kind in (False, True, "systematic"):
        sampler = jr.Prioritized(alpha=alpha, beta=1.0, normalize=None, stratified=kind, epsilon=0.01)
        buffer, state, _ = replay(sampler, 24)
        draw = jax.jit(jax.vmap(lambda key, b=buffer, s=state: b.sample(s, key, 16)))
        sample = jax.device_get(draw(jax.random.split(seeds.key(6), 4000)))
        means = np.mean(sample.weights * np.asarray(sample.items["id"], np.float64), axis=1)
        assert abs(means.mean() - 11.5) < 4 * means.std() / np.sqrt(len(means))
        variance[kind] = means.var()
    if alpha == 0:
        assert variance[True] < variance["systematic"] < variance[False] / 5


@pytest.mark.parametrize("stratified", ["sytematic", None, 2])
def test_other_kinds_of_strata_are_errors(stratified):
    rejects(r'stratified=.*: must be True, False or "systematic"', jr.Prioritized, stratified=stratified)
