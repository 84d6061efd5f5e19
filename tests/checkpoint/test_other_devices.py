"""`restore` onto another number of devices gives what `migrate` gives, wherever a buffer is in the configuration."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import seeds
from checkpoint_runs import assert_same
from helpers import no_ends, over_devices, rarely
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import jaxreplay as jr
from jaxreplay._common import devices

pytestmark = pytest.mark.versions
PER = jr.Prioritized(alpha=0.7, normalize="global")
REPLAY = jr.ReplayBuffer(capacity=40, axes=2, sampler=PER, count_updates=True, donate=False)
SEQUENCE = jr.SequenceBuffer(length=9, num_envs=8, sequence_length=3, windows="inside", sampler=PER, donate=False)
SPENT = jr.ReplayBuffer(capacity=16, max_uses=2, donate=False)


def sharded(buffer, count):
    return over_devices(buffer, count) if count else buffer


def items(first, *leading):
    ids = np.int32(first) + np.arange(np.prod(leading), dtype=np.int32).reshape(leading)
    return {"id": ids, "half": ids.astype(jnp.bfloat16), "frame": np.stack([ids, ids], -1).astype(np.uint8)}


def filled(buffer, *leading):
    """A state that has lost its first items, with priorities of some of the others."""
    state, rng = buffer.init(items(0, *leading)), seeds.rng(0)
    for t in range(7):
        rows = items(np.prod(leading) * t, *leading)
        state = buffer.add(state, rows, **no_ends(buffer, rows))
    handles = np.asarray(buffer.newest(state, 8))
    return buffer.update(state, handles, rng.exponential(size=8).astype(np.float32))


def configuration(count):
    """Buffers with `count` shards in dicts, lists and a mixture, the states' leading axes, and a plain value."""
    replay, sequence, spent = (sharded(x, count) for x in (REPLAY, SEQUENCE, SPENT))
    mixture = jr.Mixture(buffers=(replay, SPENT, spent), shares=(0.5, 0.25, 0.25))
    return {"mixed": mixture, "others": [sequence, {"first": replay, "n": 1}]}


def states(config):
    mixed = config["mixed"].buffers
    return {
        "mixed": (filled(mixed[0], 2, 8), *(filled(buffer, 8) for buffer in mixed[1:])),
        "others": [filled(config["others"][0], 1, 8), {"first": filled(config["others"][1]["first"], 2, 8)}],
        "step": 5,
        "params": jax.device_put(np.arange(3, dtype=np.float32)),
    }


def migrated(old, state, new):
    mixed = [jr.migrate(*x) for x in zip(old["mixed"].buffers, state["mixed"], new["mixed"].buffers, strict=True)]
    (old_sequence, old_first), (new_sequence, new_first) = old["others"], new["others"]
    sequence, first = state["others"]
    sequence = jr.migrate(old_sequence, sequence, new_sequence)
    first = {"first": jr.migrate(old_first["first"], first["first"], new_first["first"])}
    plain = 1  # of the mixture, whose buffer of one device is as it was
    mixed[plain] = state["mixed"][plain]
    return state | {"mixed": tuple(mixed), "others": [sequence, first]}


@functools.cache
def saved(count):
    return states(configuration(count))


@pytest.mark.parametrize(
    "counts", [(8, 4), *map(rarely, [((4, 0),), ((4, 8),), ((8, 2),), ((0, 4),), ((2, 1),), ((1, 0),)])]
)
def test_it_equals_migrate_bit_for_bit(tmp_path, counts):
    old, new = map(configuration, counts)
    jr.save(tmp_path, old, saved(counts[0]))
    expected = migrated(old, saved(counts[0]), new)
    found = jr.restore(tmp_path, new, jax.eval_shape(lambda: expected))
    assert_same(found, expected)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert getattr(a, "sharding", None) == getattr(b, "sharding", None)
    assert_same(jr.restore(tmp_path, old, saved(counts[0])), saved(counts[0]))


@pytest.mark.parametrize("backend", ["tpu", rarely("gpu")])
def test_it_equals_migrate_in_the_layout_of_another_backend(tmp_path, monkeypatch, backend):
    old, new = over_devices(REPLAY, 8), over_devices(REPLAY, 4)
    state = saved(8)["others"][1]["first"]
    jr.save(tmp_path, old, state)
    monkeypatch.setattr(devices, "backend_of", lambda arrays=(): backend)
    expected = jr.migrate(old, state.on_this_backend(), new)
    assert_same(jr.restore(tmp_path, new, jax.eval_shape(lambda: expected)), expected)


def test_a_mesh_of_other_devices_and_names_or_none_is_the_same_configuration(tmp_path):
    chosen = np.array(jax.devices("cpu"))
    others = [
        over_devices(REPLAY, 4),
        jr.Sharded(buffer=REPLAY, mesh=Mesh(chosen[4:], ("other",)), axis="other"),
        REPLAY,
    ]
    for number, old in enumerate(others):
        state = filled(old, 2, 8)
        jr.save(tmp_path / str(number), {"replay": old}, {"replay": state})
        for new in others:
            same = getattr(new, "num_shards", 0) == getattr(old, "num_shards", 0)
            expected = state if same else jr.migrate(old, state, new)
            like = {"replay": jax.eval_shape(lambda x=expected: x)}
            found = jr.restore(tmp_path / str(number), {"replay": new}, like)["replay"]
            assert_same(found, expected)
            assert found.ring.size.sharding.device_set == new.init(items(0, 2, 8)).ring.size.sharding.device_set
    ends = [REPLAY.add(x, items(200, 2, 8)) for x in (found, expected)]  # they go on alike
    drawn = [REPLAY.sample(x, jax.random.key(0), 8) for x in ends]
    jax.tree.map(np.testing.assert_array_equal, *drawn)


class Other(jr.Prioritized):
    """A sampler of somebody else, who did not say how its state is converted."""


def test_what_cannot_be_moved_is_refused_by_name(tmp_path):
    old, new = (over_devices(jr.ReplayBuffer(capacity=8, sampler=Other(), donate=False), n) for n in (4, 2))
    state = filled(old, 8)
    jr.save(tmp_path, old, state)
    assert_same(jr.restore(tmp_path, old, state), state)
    with pytest.raises(ValueError, match=r"sampler=Other\(\): cannot convert its state.*number of devices"):
        jr.restore(tmp_path, new, new.init(items(0, 8)))
    for config, message in (
        (over_devices(jr.ReplayBuffer(capacity=16, sampler=Other()), 2), r"config\.capacity: saved 8, given 16"),
        (over_devices(jr.ReplayBuffer(capacity=8), 2), r"config\.sampler: saved .*Other', given 'jaxreplay.Uniform'"),
    ):
        with pytest.raises(ValueError, match=message):
            jr.restore(tmp_path, config, config.init(items(0, 8)))


def on(mesh, *spec):
    return NamedSharding(mesh, PartitionSpec(*spec))


def test_arrays_on_two_meshes_come_back_each_on_its_own(tmp_path):
    devices = np.array(jax.devices("cpu")[:8])
    meshes = [Mesh(devices[:4], ("data",)), Mesh(devices[4:], ("data",))]
    elsewhere = Mesh(devices[[0, 1, 4, 5]], ("data",))
    buffer = jr.ReplayBuffer(capacity=8)
    one, other = (jr.Sharded(buffer=buffer, mesh=mesh) for mesh in meshes)
    x = jnp.arange(8.0)
    state = {
        "one": one.add(one.init(x), x),
        "other": other.add(other.init(x), x),
        "params": jax.device_put(x, on(meshes[1])),
        "third": jax.device_put(x, on(elsewhere, "data")),
    }
    config, shapes = {"one": one, "other": other}, jax.eval_shape(lambda: state)
    jr.save(tmp_path, config, state)
    for like in (state, shapes):
        restored = jr.restore(tmp_path, dict(reversed(config.items())), like)  # the order of a dict does not matter
        assert_same(restored, state)
        for name in state if like is state else config:
            assert jax.tree.map(lambda x: x.sharding, restored[name]) == jax.tree.map(lambda x: x.sharding, state[name])
    moved = {"one": other, "other": one}  # as in a program that has other devices
    restored = jr.restore(tmp_path, moved, shapes)
    assert_same(restored, state)
    assert restored["one"].storage.sharding == state["other"].storage.sharding
    assert restored["params"].sharding.device_set == {jax.devices()[0]}


def test_copies_are_written_once_and_each_part_by_itself(tmp_path):
    mesh = Mesh(np.array(jax.devices("cpu")[:4]).reshape(2, 2), ("x", "y"))
    x = np.arange(48, dtype=np.int16).reshape(4, 12)
    specs = {"a": ((), 1), "b": (("x",), 2), "c": ((None, ("x", "y")), 4), "d": (("y", "x"), 4)}
    state = {name: jax.device_put(x, on(mesh, *spec)) for name, (spec, _) in specs.items()}
    jr.save(tmp_path, mesh, state)
    folder = tmp_path / "checkpoint_0" / "arrays"
    for i, (_, count) in enumerate(specs.values()):
        files = [file for file in (folder / str(i)).iterdir() if file.name != ".zarray"]
        assert len(files) == count
    restored = jr.restore(tmp_path, mesh, state)
    assert_same(restored, state)
    assert jax.tree.map(lambda leaf: leaf.sharding, restored) == jax.tree.map(lambda leaf: leaf.sharding, state)
