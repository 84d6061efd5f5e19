"""A buffer that was cleared is empty, and no handle from before names what is added then."""

import chex
import jax
import numpy as np
import pytest
from helpers import at, items, no_ends, numbers, over_devices, rarely, stack, types

import jaxreplay as jr

KEY, PER = jax.random.key(0), jr.Prioritized(alpha=0.7, normalize="global")
STREAMS = {"length": 7, "num_envs": 2, "sequence_length": 2}
BUFFERS = {
    "replay": jr.ReplayBuffer(capacity=12, sampler=PER, max_uses=2),
    "reservoir": jr.ReservoirBuffer(capacity=6),
    "sequence": jr.SequenceBuffer(**STREAMS, sampler=PER, hindsight=True),
    "inside": jr.SequenceBuffer(**STREAMS, windows="inside"),
    "shards": over_devices(jr.ReplayBuffer(capacity=12, sampler=PER), 2),
}


def rows(name, first):
    ids = first + numbers(0, 8)
    return items(ids.reshape(4, 2) if name in ("sequence", "inside") else ids)


def added(name, state, first):
    buffer, its = BUFFERS[name], rows(name, first)
    return buffer.add(state, its, *([KEY] if name == "reservoir" else []), **no_ends(buffer, its))


@pytest.mark.parametrize("name", ["replay", "reservoir", "sequence", *map(rarely, ["inside", "shards"])])
def test_no_handle_from_before_names_a_new_item(name):
    """Eagerly, where the storage stays in its place; and in a scan over seeds, with the same result."""
    buffer = BUFFERS[name]
    state = buffer.init(rows(name, 1))
    seen, expected = [], set()
    for first in (1, 9, 17):
        state = added(name, state, first)
        drawn = buffer.sample(state, jax.random.key(first), 16)
        state = buffer.update(state, drawn.indices, np.ones(16, np.float32))
        handles = np.unique(drawn.indices[drawn.indices >= 0])
        assert not expected & {*handles.tolist()}
        expected |= {*handles.tolist()}
        assert np.asarray(buffer.get(state, drawn.indices)["id"]).min() >= first
        before, places = types(state), [x.unsafe_buffer_pointer() for x in storage(state)]
        cleared = buffer.clear(state)
        assert all(x.is_deleted() for x in jax.tree.leaves(state))
        assert (types(cleared), [x.unsafe_buffer_pointer() for x in storage(cleared)]) == (before, places)
        state = cleared
        assert bool(buffer.is_empty(state))
        assert not np.any(buffer.get(state, drawn.indices)["id"])
        seen.append(jax.device_get(state))

    def step(state, first):
        state = added(name, state, first)
        drawn = buffer.sample(state, jax.random.key(first), 16)
        state = buffer.clear(buffer.update(state, drawn.indices, np.ones(16, np.float32)))
        return state, state

    def run(state):
        return jax.lax.scan(step, state, np.array([1, 9, 17]))[1]

    first = jax.device_get(buffer.init(rows(name, 1)))
    emptied = jax.vmap(buffer.clear)(jax.tree.map(jax.numpy.asarray, stack(seen[-1], seen[-1])))  # donates all, eagerly
    assert not np.any(jax.vmap(buffer.size)(emptied))
    found = jax.device_get(jax.jit(jax.vmap(run))(stack(first, first)))
    for number, state in enumerate(seen):
        chex.assert_trees_all_equal(jax.tree.leaves(at(at(found, 1), number)), jax.tree.leaves(state))


def storage(state):
    return [part.data for x in jax.tree.leaves(state.storage) for part in x.addressable_shards]


def test_wrappers_clear_too():
    """All sources of a mixture, what threads share, and what is bound."""
    mixture = jr.Mixture(buffers=(BUFFERS["replay"], jr.ReservoirBuffer(capacity=4)))
    its = rows("replay", 1)
    state = mixture.add(mixture.init(its), 0, its)
    shared = jr.Shared(mixture, mixture.add(state, 1, its, KEY))
    assert shared.size() == 12
    shared.clear()
    assert shared.size() == 0
    shared.add(0, its)
    with shared.state() as cell:
        bound = jr.bind(mixture, cell.state)
        assert bound.get(np.arange(6, 14, dtype=np.int32))["id"][:2].tolist() == [0, 0]
        assert len(bound) == 8
        bound = bound.clear()
        assert (type(bound.state), len(bound)) == (tuple, 0)
        cell.state = bound.state


def test_slots_are_numbered_up_to_their_number():
    """Of a shard in each, and of as many starts as a stream holds."""
    found = {name: buffer.num_slots for name, buffer in BUFFERS.items()}
    assert found == {"replay": 12, "reservoir": 6, "sequence": 12, "inside": 12, "shards": 6}
    state = added("shards", BUFFERS["shards"].init(rows("shards", 1)), 1)
    assert BUFFERS["shards"].slots(state, np.array([-1, -1])).tolist() == [6, 6]  # no item
