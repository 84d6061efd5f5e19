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


STREAMS = {"length": 8, "num_envs": 4, "sequence_length": 2, "donate": False}


@pytest.mark.parametrize("num_shards", [1, 2, 4])
@pytest.mark.parametrize(
    "whole",
    [jr.ReplayBuffer(capacity=12, donate=False), *(jr.SequenceBuffer(**STREAMS, gaps=x) for x in (False, True))],
)
def test_items_that_are_younger_are_drawn_and_no_others(whole, num_shards):
    """Ages of draws are those of all items that are below the limit, for every limit, also where it has no D parts."""
    buffer = over_devices(whole, num_shards)
    rows = (
        numbers(0, 8) if isinstance(whole, jr.ReplayBuffer) and whole.num_slots == 12 else numbers(0, 32).reshape(8, 4)
    )
    state = buffer.add(buffer.init(rows), rows)
    drawn = jax.jit(jax.vmap(lambda most: buffer.sample(state, jax.random.key(0), 512, max_age=most).age))
    every = {*np.asarray(buffer.sample(state, jax.random.key(0), 512).age).tolist()}
    assert len(every) > 1
    for most, ages in zip(range(1, 10), np.asarray(drawn(np.arange(1, 10))), strict=True):
        assert {*ages.tolist()} == {age for age in every if age < most}, most


def test_a_capacity_that_has_no_parts_is_refused():
    rejects("capacity=5: must be a multiple of 2, the number of shards", part_of, jr.ReplayBuffer(capacity=5), 2)


def test_normalization_is_left_out_in_the_shards_too():
    whole = jr.ReplayBuffer(capacity=16, sampler=jr.Prioritized())
    for buffer, of in ((whole, lambda x: x), (over_devices(whole, 2), lambda x: x.buffer)):
        assert of(buffer).sampler.normalize == "batch"
        assert of(unnormalized(buffer)).sampler.normalize is None
