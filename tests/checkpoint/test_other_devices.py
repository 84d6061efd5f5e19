"""`restore` onto another number of devices gives what `migrate` gives, wherever a buffer is in the configuration."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import seeds
from checkpoint_runs import assert_same
from helpers import no_ends, over_devices, rarely, rejects
from jax.sharding import Mesh

import jaxreplay as jr
from jaxreplay._common import devices

pytestmark = pytest.mark.versions
PER = jr.Prioritized(alpha=0.7, normalize="global")
REPLAY = jr.ReplayBuffer(capacity=40, axes=2, sampler=PER, count_updates=True, donate=False)
SEQUENCE = jr.SequenceBuffer(
    length=9, num_envs=8, sequence_length=3, windows="inside", hindsight=True, sampler=PER, donate=False
)
SPENT = jr.ReplayBuffer(capacity=16, max_uses=2, donate=False)


LEADING = {REPLAY: (2, 8), SEQUENCE: (1, 8), SPENT: (8,)}  # axes of a batch


def items(first, *leading):
    ids = np.int32(first) + np.arange(np.prod(leading), dtype=np.int32).reshape(leading)
    return {"id": ids, "half": ids.astype(jnp.bfloat16), "frame": np.stack([ids, ids], -1).astype(np.uint8)}


def filled(buffer):
    """A state that has lost its first items, with priorities of some of the others."""
    leading, rng = LEADING[getattr(buffer, "buffer", buffer)], seeds.rng(0)
    state = buffer.init(items(0, *leading))
    for t in range(7):
        rows = items(np.prod(leading) * t, *leading)
        state = buffer.add(state, rows, **no_ends(buffer, rows))
    handles = np.asarray(buffer.newest(state, 8))
    return buffer.update(state, handles, rng.exponential(size=8).astype(np.float32))


def for_each(function, buffers, *others):
    return jax.tree.map(function, buffers, *others, is_leaf=lambda x: hasattr(x, "sample"))


def buffers(count):
    """Buffers with `count` shards in dicts, lists and tuples, one of which is never sharded."""
    replay, sequence, spent = (over_devices(x, count) for x in (REPLAY, SEQUENCE, SPENT))
    return {"mixed": (replay, SPENT, spent), "others": [sequence, {"first": replay}]}


def configuration(count):
    """These buffers, some in a mixture, and a plain value."""
    mixture = jr.Mixture(buffers=buffers(count)["mixed"], shares=(0.5, 0.25, 0.25))
    return buffers(count) | {"mixed": mixture, "n": 1}


@functools.cache
def saved(count):
    return for_each(filled, buffers(count))


@pytest.mark.parametrize(("before", "after"), [(8, 4), *map(rarely, [(4, 0), (4, 8), (8, 2), (0, 4), (2, 1), (1, 0)])])
def test_it_equals_migrate_bit_for_bit(tmp_path, before, after):
    others = {"step": 5, "params": jax.device_put(np.arange(3, dtype=np.float32))}
    state = saved(before) | others
    jr.save(tmp_path, configuration(before), state)

    def migrated(old, state, new):
        return state if old == new else jr.migrate(old, state, new)

    expected = for_each(migrated, buffers(before), saved(before), buffers(after)) | others
    found = jr.restore(tmp_path, configuration(after), jax.eval_shape(lambda: expected))
    assert_same(found, expected)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert getattr(a, "sharding", None) == getattr(b, "sharding", None)
    assert_same(jr.restore(tmp_path, configuration(before), state), state)


@pytest.mark.parametrize(
    ("buffer", "was", "backend"),
    [
        *((SEQUENCE, "cpu", "tpu"), (REPLAY, "tpu", "tpu")),
        *(rarely((REPLAY, *case)) for case in (("cpu", "tpu"), ("cpu", "gpu"), ("tpu", "cpu"))),
    ],
)
def test_it_equals_migrate_in_the_layout_of_another_backend(tmp_path, monkeypatch, buffer, was, backend):
    old, new = over_devices(buffer, 8), over_devices(buffer, 4)
    state = jax.jit(lambda x: x.on_this_backend(was))(filled(old))
    jr.save(tmp_path, old, state)
    monkeypatch.setattr(devices, "backend_of", lambda arrays=(): backend)
    expected = jr.migrate(old, jax.jit(lambda x: x.on_this_backend())(state), new)
    assert jax.tree.structure(expected) == jax.tree.structure(expected.on_this_backend())
    assert_same(jr.restore(tmp_path, new, jax.eval_shape(lambda: expected)), expected)


def test_a_mesh_of_other_devices_and_names_or_none_is_the_same_configuration(tmp_path):
    first, whole = over_devices(REPLAY, 4), REPLAY
    other = jr.Sharded(buffer=REPLAY, mesh=Mesh(np.array(jax.devices("cpu")[4:]), ("other",)), axis="other")
    state = jr.migrate(over_devices(REPLAY, 8), saved(8)["others"][1]["first"], first)
    states = {first: state, other: jax.device_put(state, other.state_sharding), whole: jr.migrate(first, state, whole)}
    for old, new in ((first, other), (other, first), (whole, other), (other, whole)):
        state = states[old]
        jr.save(tmp_path, {"replay": old}, {"replay": state})
        expected = jr.migrate(old, state, new) if whole in (old, new) else state
        like = {"replay": jax.eval_shape(lambda x=expected: x)}
        found = jr.restore(tmp_path, {"replay": new}, like)["replay"]
        assert_same(found, expected)
        assert found.ring.size.sharding.device_set == new.init(items(0, 2, 8)).ring.size.sharding.device_set
    ends = [REPLAY.add(x, items(200, 2, 8)) for x in (found, expected)]  # they go on alike
    drawn = [REPLAY.sample(x, jax.random.key(0), 8) for x in ends]
    jax.tree.map(np.testing.assert_array_equal, *drawn)
    # Of two meshes each gets its own arrays; the order of a dict does not matter.
    two = {"one": states[first], "other": states[other]}
    jr.save(tmp_path, {"one": first, "other": other}, two)
    for like in (two, jax.eval_shape(lambda: two)):
        found = jr.restore(tmp_path, {"other": other, "one": first}, like)
        assert_same(found, two)
        assert jax.tree.map(lambda x: x.sharding, found) == jax.tree.map(lambda x: x.sharding, two)


class Other(jr.Prioritized):
    """A sampler of somebody else, who changed it and did not say how its state is converted."""

    def masses(self, state):
        return super().masses(state)


def test_what_cannot_be_moved_is_refused_by_name(tmp_path):
    def replay(capacity, sampler, count):
        return over_devices(jr.ReplayBuffer(capacity=capacity, sampler=sampler), count)

    saved = replay(8, Other(), 4)
    jr.save(tmp_path, saved, saved.init(items(0, 8)))
    for config, message in (
        (replay(8, Other(), 2), r"sampler=Other\(\): cannot convert its state.*number of devices"),
        (replay(16, Other(), 2), r"config\.capacity: saved 8, given 16"),
        (replay(8, jr.Uniform(), 2), r"config\.sampler: saved .*Other', given 'jaxreplay.Uniform'"),
    ):
        rejects(message, jr.restore, tmp_path, config, jax.eval_shape(config.init, items(0, 8)))
