"""What shards of a buffer do not share; what they do, the contract of samplers and the twins tell."""

import jax
import numpy as np
import pytest
from helpers import numbers, over_devices, rejects

import jaxreplay as jr
from jaxreplay.buffers._shards import part_of, unnormalized


@pytest.mark.parametrize("sampler", [jr.Uniform(), jr.Uniform(replacement=False), jr.Prioritized()])
def test_each_shard_draws_by_its_own_key(sampler):
    """Two shards, under `jax.vmap`."""
    part = part_of(jr.ReplayBuffer(capacity=16, sampler=sampler), 2, "shards")

    def drawn(ids):
        return part.sample(part.add(part.init(ids), ids), jax.random.key(0), 3).items

    first, second = np.asarray(jax.jit(jax.vmap(drawn, axis_name="shards"))(np.stack([numbers(0, 8)] * 2)))
    assert np.any(first != second)


def test_a_capacity_that_has_no_parts_is_refused():
    rejects("capacity=5: must be a multiple of 2, the number of shards", part_of, jr.ReplayBuffer(capacity=5), 2)


def test_normalization_is_left_out_in_the_shards_too():
    whole = jr.ReplayBuffer(capacity=16, sampler=jr.Prioritized())
    for buffer, of in ((whole, lambda x: x), (over_devices(whole, 2), lambda x: x.buffer)):
        assert of(buffer).sampler.normalize == "batch"
        assert of(unnormalized(buffer)).sampler.normalize is None
