"""What shards of a buffer share, and what they do not: two of them, under `jax.vmap`."""

import jax
import numpy as np
import pytest
from helpers import over_devices, rejects

import jaxreplay as jr
from jaxreplay import sum_tree
from jaxreplay.buffers._shards import part_of, unnormalized

KEY = jax.random.key(0)


def at(tree, k):
    return jax.tree.map(lambda x: np.asarray(x)[k], tree)


def shards(sampler, count=(4, 4)):
    """A shard's configuration, and two states, with TD errors 1 and 4 if there are priorities."""
    part = part_of(jr.ReplayBuffer(capacity=16, donate=False, sampler=sampler), 2, "shards")
    state = jax.tree.map(lambda x: np.stack([x, x]), jax.device_get(part.init(np.zeros(4))))
    mask = np.arange(4) < np.array(count)[:, None]
    errors = np.ones((2, 4), np.float32) * [[1], [4]] if isinstance(part.sampler, jr.Prioritized) else None
    add = jax.jit(jax.vmap(lambda s, m, e: part.add(s, np.zeros(4), mask=m, td_errors=e), axis_name="shards"))
    return part, add(state, mask, errors)


@pytest.mark.parametrize("max_priority", ["ever", "stored"])
def test_a_new_item_is_as_likely_in_all_shards(max_priority):
    """As likely as an item with the largest TD error of all shards, whether an addition or an update gave it."""
    part, state = shards(jr.Prioritized(alpha=1.0, epsilon=0.0, max_priority=max_priority))

    def then(state, names):
        one = part.add(state, np.zeros(1))
        return one, part.add(part.update(one, names, np.full(1, 9.0, np.float32)), np.zeros(1))

    one, two = jax.jit(jax.vmap(then, axis_name="shards"))(state, np.array([[0], [-1]], np.int32))
    leaves = [np.stack([sum_tree.leaves(at(x.sampler.tree, k)) for k in range(2)]) for x in (one, two)]
    np.testing.assert_allclose(leaves[0][:, :5], [[1, 1, 1, 1, 4], [4, 4, 4, 4, 4]])
    np.testing.assert_allclose(leaves[1][:, :6], [[9, 1, 1, 1, 4, 9], [4, 4, 4, 4, 4, 9]])


@pytest.mark.parametrize("replacement", [True, False])
def test_each_shard_draws_by_its_own_key_and_a_row_weighs_what_its_shard_holds(replacement):
    part, state = shards(jr.Uniform(replacement=replacement), (4, 2))
    draw = jax.jit(jax.vmap(lambda s: part.sample(s, KEY, 4), axis_name="shards"))
    sample = jax.device_get(draw(state))
    assert np.sum(sample.indices >= 0, axis=1).tolist() == ([4, 4] if replacement else [4, 2])
    np.testing.assert_allclose(sample.probabilities[:, 0], [1 / 8, 1 / 4])
    # 6 items in 8 rows, or in the 6 rows that hold one.
    np.testing.assert_allclose(sample.weights[:, 0], [4 / 3, 2 / 3 if replacement else 4 / 3], rtol=1e-6)
    _, even = shards(part.sampler)
    first, second = jax.device_get(draw(even)).indices
    assert np.any(first != second - even.ring.period)


def test_a_capacity_that_has_no_parts_is_refused():
    rejects("capacity=5: must be a multiple of 2, the number of shards", part_of, jr.ReplayBuffer(capacity=5), 2)


def test_normalization_is_left_out_in_the_shards_too():
    whole = jr.ReplayBuffer(capacity=16, sampler=jr.Prioritized())
    for buffer, of in ((whole, lambda x: x), (over_devices(whole, 2), lambda x: x.buffer)):
        assert of(buffer).sampler.normalize == "batch"
        assert of(unnormalized(buffer)).sampler.normalize is None
