"""What is written: priorities at insertion, handles of what was added, values written back, rollouts."""

import dataclasses

import chex
import jax
import numpy as np
import pytest
from helpers import items, over_devices, rejects

import jaxreplay as jr


def ids(first, *shape):
    return items(first + np.arange(np.prod(shape), dtype=np.int32).reshape(shape))


def test_parts_of_a_transition_batch_are_written():
    x = np.arange(4, dtype=np.float32)
    batch = jr.TransitionBatch(S={"a": x, "b": x}, A=x, logP=None, Rn=x, In=x, S_next={"a": x, "b": x})
    buffer = jr.ReplayBuffer(capacity=4)
    state = buffer.add(buffer.init(batch), batch)
    none = jax.tree.map(lambda _: None, batch)
    values = dataclasses.replace(none, S={"a": -x, "b": None}, S_next=None, Rn=2 * x)
    state = buffer.set(state, np.arange(4), values)
    found = buffer.get(state, np.arange(4))
    np.testing.assert_array_equal(found.S["a"], -x)
    np.testing.assert_array_equal(found.Rn, 2 * x)
    for leaf in (found.S["b"], found.S_next["a"], found.S_next["b"], found.In, found.A):
        np.testing.assert_array_equal(leaf, x)


@pytest.mark.parametrize("num_shards", [0, 2])
def test_a_rollout_is_inserted_in_order_of_time(num_shards):
    flat, rollouts = (jr.ReplayBuffer(capacity=24, sampler=jr.Prioritized(), axes=axes) for axes in (1, 2))
    if num_shards:
        flat, rollouts = (over_devices(buffer, num_shards) for buffer in (flat, rollouts))
    batch = ids(0, 3, 4)
    mask = np.arange(12).reshape(3, 4) % 5 > 0
    td_errors = np.where(mask, np.arange(12.0).reshape(3, 4), np.nan).astype(np.float32)
    shards = max(num_shards, 1)

    def in_order(x):  # by shard, then by time
        return np.concatenate([part.reshape(12 // shards, *x.shape[2:]) for part in np.split(x, shards, axis=1)])

    one = rollouts.add(rollouts.init(batch), batch, mask=mask, td_errors=td_errors)
    two = flat.init(jax.tree.map(in_order, batch))
    two = flat.add(two, jax.tree.map(in_order, batch), mask=in_order(mask), td_errors=in_order(td_errors))
    chex.assert_trees_all_equal(jax.device_get(one), jax.device_get(two))


@pytest.mark.versions
def test_wrong_arguments():
    replay = jr.ReplayBuffer(capacity=8, donate=False)
    state = replay.add(replay.init(ids(0, 4)), ids(0, 4))
    rollouts = jr.ReplayBuffer(capacity=8, axes=2, donate=False)
    sequences = jr.SequenceBuffer(length=8, num_envs=3, sequence_length=2, stride=2, donate=False)
    stepped = sequences.init(ids(0, 1, 3))
    four = np.arange(4)
    rejects('max_priority=\'newest\': must be "ever" or "stored"', jr.Prioritized, max_priority="newest")
    rejects("max_priority=-1: must be a finite number of at least 0", jr.Prioritized, max_priority=-1)
    rejects("floor=-1: must be a finite number of at least 0", jr.Prioritized, floor=-1)
    rejects("axes=3: must be an integer from 1 to 2", jr.ReplayBuffer, capacity=8, axes=3)
    rejects("a rollout needs 2 leading axes", rollouts.init, items(np.zeros(4)))
    rejects("batch of 12 items: expected 1 to capacity=8", rollouts.add, rollouts.init(ids(0, 1, 4)), ids(0, 3, 4))
    rejects(r"td_errors: got float.*\[3\], expected float\[4\]", replay.add, state, ids(0, 4), td_errors=np.ones(3))
    rejects(r"td_errors: got bool\[4\]", replay.add, state, ids(0, 4), td_errors=np.ones(4, bool))
    reservoir, key = jr.ReservoirBuffer(capacity=8, donate=False), jax.random.key(0)
    empty, few = reservoir.init(ids(0, 4)), {"td_errors": np.ones(3)}
    rejects(r"td_errors: got float.*\[3\], expected float\[4\]", reservoir.add, empty, ids(0, 4), key, **few)
    steps = ids(0, 4, 3)
    rejects(r"td_errors: got .* expected float\[2, 3\]", sequences.add, stepped, steps, td_errors=np.ones((4, 3)))
    rejects("n=0: must be an integer from 1", replay.newest, state, 0)
    values, none = {"id": four.astype(np.int32), "x": None}, {"id": None, "x": None}
    for wrong, message in (
        ({"id": four, "y": four}, "wrong structure"),
        (values | {"y": None}, "wrong structure"),
        (none, "values: all are None"),
        (values | {"id": four[:3].astype(np.int32)}, r"leaf \['id'\]: got int32\[3\]"),
        (values | {"id": four.astype(np.float32)}, r"leaf \['id'\]: got float32\[4\]"),
    ):
        rejects(message, replay.set, state, four, wrong)
    rejects("indices: got float", replay.set, state, np.ones(4), none)
    rejects(r"mask: got bool\[3\], expected bool\[4\]", replay.set, state, four, values, mask=np.ones(3, bool))
