"""Minibatches of a draw, and systematic draws."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import seeds
from helpers import rarely
from scipy.stats import chisquare
from test_draws import PER, SAMPLERS, replay, tagged

import jaxreplay as jr
from jaxreplay import sum_tree

SYSTEMATIC = PER(stratified="systematic")


def sequences():
    buffer = jr.SequenceBuffer(length=12, num_envs=2, sequence_length=3, sampler=PER(), donate=False)
    return buffer, buffer.add(buffer.init(tagged(0, 3, 2)), tagged(0, 12, 2))


def mixture(sampler, weights="own"):
    buffer, state, _ = replay(sampler, 21)
    other, other_state, _ = replay(sampler, 40, capacity=16)
    return jr.Mixture(buffers=(buffer, other), shares=(0.75, 0.25), weights=weights), (state, other_state)


CASES = {
    "stratified": lambda: replay(PER(), 21)[:2],
    "systematic": lambda: replay(SYSTEMATIC, 21)[:2],
    "distinct": lambda: replay(SAMPLERS["distinct"], 21)[:2],
    "sequences": sequences,
    "shards": lambda: replay(PER(), 40, 4)[:2],
    "mixture": lambda: mixture(PER()),
}


@pytest.mark.parametrize(
    "case", ["systematic", "mixture", *map(rarely, ["shards", "stratified", "distinct", "sequences"])]
)
def test_minibatches_are_the_rows_of_one_draw(case):
    """Eager, jitted and under vmap; no row is lost, and each group of rows gives one to each minibatch."""
    buffer, state = CASES[case]()
    key, shards = seeds.key(0), getattr(buffer, "num_shards", 1)
    whole = buffer.sample(state, key, 32, beta=0.0)
    parts = buffer.sample(state, key, 32, beta=0.0, minibatches=4)
    chex.assert_tree_shape_prefix(parts, (4, 8))
    names = np.asarray(parts.indices)
    groups = np.asarray(whole.indices).reshape(-1, 4)  # of successive rows, also where the parts of shards begin
    assert len({tuple(row) for row in names.tolist()}) > 1 or case == "distinct"
    np.testing.assert_array_equal(np.sort(names.T, axis=1), np.sort(groups, axis=1))
    assert np.any(groups != names.T)
    row_of = {int(name): row for row, name in enumerate(np.asarray(whole.indices))}
    rows = np.array([row_of[int(name)] for name in names.reshape(-1)])
    flat = jax.tree.map(lambda x: np.asarray(x).reshape(32, *x.shape[2:]), parts)
    chex.assert_trees_all_equal(flat, jax.tree.map(lambda x: np.asarray(x)[rows], whole))
    assert 32 % (4 * shards) == 0
    draw = functools.partial(buffer.sample, batch_size=32, beta=0.0, minibatches=4)
    chex.assert_trees_all_equal(jax.jit(draw)(state, key), parts)
    if shards == 1:
        keys = jnp.stack([key, seeds.key(1)])
        mapped = jax.jit(jax.vmap(draw, in_axes=(None, 0)))(state, keys)
        chex.assert_trees_all_equal(jax.tree.map(lambda x: x[0], mapped), parts)


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
    draw = jax.jit(lambda keys: jax.lax.map(lambda key: buffer.sample(state, key, 32, minibatches=4), keys))
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


@pytest.mark.parametrize("normalize", ["batch", None])
def test_joint_weights_of_a_mixture_are_those_of_each_minibatch(normalize):
    buffers, state = mixture(PER(normalize=normalize), "joint")
    key = seeds.key(4)
    parts = buffers.sample(state, key, 32, minibatches=2)
    if normalize == "batch":
        np.testing.assert_array_equal(parts.weights.max(axis=1), 1)
    else:
        whole = buffers.sample(state, key, 32)
        np.testing.assert_allclose(np.sort(parts.weights.reshape(-1)), np.sort(whole.weights), rtol=1e-6)
    with pytest.raises(
        ValueError, match=r"rows of buffers\[0\]=24: must be a multiple of 16, the number of minibatches"
    ):
        buffers.sample(state, key, 32, minibatches=16)


def test_updates_take_minibatches_one_by_one():
    """Each names rows of the same shards and sources as a batch of its size."""
    for buffer, state in (replay(PER(), 40, 4)[:2], mixture(PER())):
        sample = buffer.sample(state, seeds.key(5), 64, minibatches=2)
        for names in sample.indices:
            state = buffer.update(state, names, jnp.full(32, 50.0))
            np.testing.assert_allclose(buffer.priorities(state, names), 50.01, rtol=1e-5)


@pytest.mark.parametrize(("batch_size", "minibatches"), [(32, 5), (32, 0), (32, 64), (32, 2.0)])
def test_wrong_numbers_of_minibatches_are_errors(batch_size, minibatches):
    buffer, state, _ = replay(PER(), 21)
    with pytest.raises(ValueError, match="minibatches"):
        buffer.sample(state, seeds.key(0), batch_size, minibatches=minibatches)
    sharded, state, _ = replay(PER(), 40, 4)
    with pytest.raises(ValueError, match="rows of a shard=8: must be a multiple of 16, the number of minibatches"):
        sharded.sample(state, seeds.key(0), 32, minibatches=16)


def test_shards_of_a_systematic_draw_have_one_offset():
    buffer, state, _ = replay(SYSTEMATIC, 40, 4)
    for seed in range(5):
        names = np.asarray(buffer.sample(state, seeds.key(seed), 32).indices).reshape(4, 8)
        for k in range(4):
            tree = jax.tree.map(lambda x, k=k: x[k], state.sampler.tree)
            slots, _ = sum_tree.sample(tree, seeds.key(seed), 8, stratified="systematic")
            np.testing.assert_array_equal(names[k] - k * state.ring.period, buffer_handles(buffer, state, k, slots))
    independent = replay(PER(), 40, 4)
    names = np.asarray(independent[0].sample(independent[1], seeds.key(0), 32).indices).reshape(4, 8)
    assert len({tuple(row % independent[1].ring.period) for row in names}) > 1


def buffer_handles(buffer, state, k, slots):
    """Handles within shard `k` of its `slots`."""
    rows = jnp.zeros((4, 8), jnp.int32).at[k].set(slots).reshape(-1)
    return np.asarray(buffer.handles(state, rows)).reshape(4, 8)[k] - k * state.ring.period


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
    with pytest.raises(ValueError, match=r'stratified=.*: must be True, False or "systematic"'):
        jr.Prioritized(stratified=stratified)
