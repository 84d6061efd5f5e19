import collections
import dataclasses
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import mesh, over_devices, rarely, rejects
from jax.sharding import Mesh

import jaxreplay as jr
from jaxreplay import sum_tree
from jaxreplay._common import devices
from jaxreplay.inspection import _memory

GUIDES = pathlib.Path(__file__).parents[2] / ".docs/pages/guides"
GUIDE, OF_MANY = ((GUIDES / f"{name}.md").read_text() for name in ("sequences", "many_environments"))
# Argument sizes of programs that XLA compiled for a TPU v5e: bytes of arrays of these shapes, by dtype.
ON_TPU = {
    "bool": ":512 70x128:9216",
    "uint8": "5:512 128:512 300:512 5000:5120 10000:10240 8x0x2:0 1x128:512 3x128:512 9x128:2048 33x128:5120"
    " 64x128:8192 3x33x128:15360",
    "int32": ":512 1:512 8:512 1x3:512 4x1:512 2x5000:40960 4x5000:81920",
    "uint32": "20x2:1024 1000x2:8192 1000x4x2:32768",
    "float32": "64:512 200:1024 600:4096 1000:4096 5000:20480 3x128:2048 9x128:8192 12x128:8192 64x128:32768 1x64:512"
    " 17x64:12288 130x5:8192 3x9x128:18432 3x2x5:3072 8x64x128:262144",
    "bfloat16": "700:2048 5x128:2048 33x128:10240",
    "complex64": "100x128:106496",
}


def struct(dtype, *shape):
    return jax.ShapeDtypeStruct(shape, dtype)


def transitions(*leading, size=5):
    return {
        "obs": struct("float32", *leading, size),
        "key": jax.eval_shape(lambda: jax.random.split(jax.random.key(0), leading)),
        "half": struct("bfloat16", *leading, 3),
        "done": struct("bool", *leading),
    }


PER = jr.Prioritized()
SOURCES = jr.ReplayBuffer(capacity=10), jr.ReplayBuffer(capacity=90, sampler=PER)
WINDOWS = jr.SequenceBuffer(length=40, num_envs=3, sequence_length=4, windows="inside", sampler=PER)
CASES = {
    "uniform": (jr.ReplayBuffer(capacity=300), transitions(4)),
    "prioritized": (jr.ReplayBuffer(capacity=5000, sampler=jr.Prioritized(normalize="global")), transitions(4)),
    "reservoir": (jr.ReservoirBuffer(capacity=70, sampler=jr.Prioritized(max_priority="stored")), transitions(4)),
    "windows": (WINDOWS, transitions(1, 3)),
    "mixture": (jr.Mixture(buffers=SOURCES), transitions(4)),
    "pools": (jr.DifficultyPools(tasks_per_env=(70, 50)), None),
}


def init(buffer, items):
    """`init`, traced anew."""
    return type(buffer).init.__wrapped__(buffer) if items is None else buffer.init(items)


def test_bytes_of_arrays_are_those_of_compiled_programs():
    for dtype, shapes in ON_TPU.items():
        for axes, size in (text.split(":") for text in shapes.split()):
            x = np.zeros([int(n) for n in axes.split("x") if n], dtype)
            assert _memory.device_bytes(x.shape, x.itemsize, "tpu") == int(size), (dtype, axes)
            assert _memory.device_bytes(x.shape, x.itemsize, "gpu") == x.nbytes


@pytest.mark.parametrize("case", [rarely(case) if case in ("mixture", "pools") else case for case in CASES])
def test_what_is_told_is_what_init_makes(case, monkeypatch):
    buffer, items = CASES[case]
    found = jr.memory(buffer, items)
    state = init(buffer, items)
    assert found.total == sum(x.nbytes for x in jax.tree.leaves(state))
    assert (found.backend, found.num_devices) == (jax.default_backend(), 1)
    # What another backend makes, of other trees and rows, is told without it.
    told = {backend: jr.memory(buffer, items, backend=backend) for backend in ("gpu", "cuda", "tpu")}
    for backend in ("gpu", "tpu"):
        with monkeypatch.context() as patch:
            patch.setattr(devices, "backend_of", lambda arrays=(), backend=backend: backend)
            made = jax.tree.leaves(jax.eval_shape(lambda: init(buffer, items)))
        raw = [jax.eval_shape(jax.random.key_data, x) if "key" in str(x.dtype) else x for x in made]
        assert told[backend].total == sum(_memory.device_bytes(x.shape, x.dtype.itemsize, backend) for x in raw)
    assert told["cuda"] == told["gpu"]


def test_parts_and_their_table():
    buffer, items = CASES["prioritized"]
    found = jr.memory(buffer, items, backend="gpu")
    assert found.leaves == {"['done']": 5_000, "['half']": 30_000, "['key']": 40_000, "['obs']": 100_000}
    assert (found.stored["['obs']"].shape, found.stored["['half']"].dtype) == ((5000, 5), jnp.bfloat16)
    assert found.tree == 2 * 4 * (2 * 64 + 79 * 64)  # sums and minima, of 79 and 5,000 nodes and padding
    assert found.total == sum(found.leaves.values()) + found.tree + found.other
    assert repr(found) == str(found)
    first, *_, trees, other, last = lines = str(found).splitlines()
    assert first.split() == ["gpu,", "1", "device", "bytes"]
    assert [trees.split(), other.split()] == [["sum", "trees", f"{found.tree:,}"], ["other", f"{found.other:,}"]]
    assert last.split() == ["total", "217", "kB", "216,504"]
    assert "['half']       bfloat16[5000, 3]   30,000" in lines
    assert len({len(line) for line in lines}) == 1
    mixed = jr.memory(*CASES["mixture"])
    assert next(iter(mixed.leaves)) == "buffers[0]['done']"
    alone = [jr.memory(buffer, transitions(1)) for buffer in CASES["mixture"][0].buffers]
    assert mixed.total == sum(found.total for found in alone)
    assert mixed.tree == alone[1].tree > 0 == alone[0].tree
    rejects("tree", setattr, found, "tree", 0, error=dataclasses.FrozenInstanceError)


def test_a_tree_whose_fanout_was_asked_for_keeps_it():
    class Narrow(jr.Uniform):
        def init(self, capacity):
            return sum_tree.init(capacity, fanout=2)

    found = [jr.memory(jr.ReplayBuffer(capacity=64, sampler=Narrow()), FRAMES, backend=name) for name in ("cpu", "gpu")]
    assert [x.tree for x in found] == [4 * (2 + 4 + 8 + 16 + 32 + 64)] * 2


def test_shards_take_their_parts():
    """On every device of the mesh, also along an axis over which the shards are replicated."""
    whole = jr.SequenceBuffer(length=8, num_envs=6, sequence_length=3, sampler=jr.Prioritized())
    items = transitions(1, 6)
    two_axes = Mesh(np.array(jax.devices("cpu")).reshape(4, 2), ("data", "seed"))
    for of_mesh, axis, num_devices in ((mesh(2), "data", 2), (two_axes, "seed", 8)):
        sharded = jr.Sharded(buffer=whole, mesh=of_mesh, axis=axis)
        found = jr.memory(sharded, items)
        held = collections.Counter()
        for leaf in jax.tree.leaves(sharded.init(items)):
            for shard in leaf.addressable_shards:
                held[shard.device] += shard.data.nbytes
        assert set(held.values()) == {found.total}
        assert found.num_devices == len(held) == num_devices
        assert found.stored["['obs']"].shape == (8, 3, 5)
        assert f"{num_devices} devices, each" in str(found)
        mixed = jr.Mixture(buffers=(sharded, dataclasses.replace(whole, num_envs=2)))
        assert jr.memory(mixed, items).num_devices == num_devices
    sharded = over_devices(jr.ReplayBuffer(capacity=2100, sampler=jr.Prioritized()), 2)
    told = jr.memory(sharded, struct("float32", 4), backend="tpu").tree
    levels = jax.tree.leaves(jax.eval_shape(lambda: jr.sum_tree.init(1050, fanout=128)))
    stacked = sum(_memory.device_bytes((1, *x.shape), 4, "tpu") for x in levels)  # with a shard's leading axis
    assert told == stacked != sum(_memory.device_bytes(x.shape, 4, "tpu") for x in levels)
    rejects("must be a multiple of 2", jr.memory, over_devices(jr.ReplayBuffer(capacity=4), 2), transitions(3))


FRAMES = {"obs": struct("uint8", 8, 84, 84, 4), "action": struct("int32", 8)}


@pytest.mark.versions
def test_running_out_of_memory_gives_the_bytes_and_the_way_to_see_them():
    """More is asked for than any system can address."""
    count = 2**24
    large = jr.ReplayBuffer(capacity=count)
    for bad, leading in (
        (jr.ReservoirBuffer(capacity=count), (1,)),
        (jr.SequenceBuffer(length=count, num_envs=1, sequence_length=2), (1, 1)),
        (over_devices(large, 1), (1,)),
        (jr.Mixture(buffers=(jr.ReplayBuffer(capacity=1), large)), (1,)),  # the other takes 40 MB
    ):
        items = {"x": struct("float32", *leading, 10**7)}
        with pytest.raises(ValueError, match=rf"{4 * 10**7 * count} bytes.*jr\.memory\(buffer, items\)") as error:
            bad.init(items)
        assert "RESOURCE_EXHAUSTED" in str(error.value.__cause__)
        jax.eval_shape(bad.init, items)  # nothing is allocated


def test_arguments():
    buffer = jr.ReplayBuffer(capacity=4)
    rejects(r"buffer=Uniform\(\): must be a buffer", jr.memory, jr.Uniform(), FRAMES)
    rejects("must be a buffer", jr.memory, jr.ReplayBuffer, FRAMES)
    swapped = buffer.init(jnp.zeros((2, 9)))
    rejects(r"^buffer=ReplayState\(. of . items, .{1,60}: must be", jr.memory, swapped, FRAMES)  # in one line
    rejects("backend='h100': must be one of cpu, gpu, cuda", jr.memory, buffer, FRAMES, backend="h100")
    rejects(r"items: must be as ReplayBuffer\.init takes them", jr.memory, buffer)
    rejects(r"items: must be as DifficultyPools\.init takes them; None", jr.memory, CASES["pools"][0], FRAMES)


def rows(*leading, **leaves):
    """Items of leaves of these dtypes and shapes, in words."""
    words = {name: text.split() for name, text in leaves.items()}
    return {name: struct(dtype, *leading, *map(int, shape)) for name, (dtype, *shape) in words.items()}


STEP = dict.fromkeys(("terminated", "truncated", "step"), "bool") | {"reward": "float32"}
FRAME = STEP | {"frame": "uint8 84 84", "action": "int32"}
STACK = {"S": "uint8 84 84 4", "A": "int32", "Rn": "float32", "In": "float32", "S_next": "uint8 84 84 4"}
LARGE, SEQUENCES = (jr.ReplayBuffer(capacity=capacity, sampler=PER) for capacity in (10**6, 25_000))
STREAMS = {"length": 20_000, "num_envs": 50, "sequence_length": 7}
TABLE = {
    "`SequenceBuffer`, single frames": (jr.SequenceBuffer(**STREAMS, sampler=PER), rows(1, 50, **FRAME)),
    "`ReplayBuffer`, 3-step transitions of stacks of 4": (LARGE, rows(1, **STACK)),
    "`ReplayBuffer`, sequences of 80 steps, one every 40": (SEQUENCES, rows(1, 80, **FRAME)),
}


@pytest.mark.parametrize("row", TABLE)
def test_the_guide_has_these_bytes(row):
    sizes = [_memory.short(jr.memory(*TABLE[row], backend=backend).total) for backend in ("gpu", "tpu")]
    line = next(line for line in GUIDE.splitlines() if line.startswith(f"| {row}"))
    assert [cell.strip() for cell in line.split("|")[2:4]] == sizes


def of_many(kind, dtype, num_envs):
    """A buffer for 1,024 rows of each of many environments, and the rows."""
    leaves = {"actor": f"{dtype} 100", "critic": f"{dtype} 150"}
    row = STEP | {"reward": dtype, "action": f"{dtype} 30"} | leaves
    if kind == "steps":
        return jr.SequenceBuffer(length=1024, num_envs=num_envs, sequence_length=4), rows(1, num_envs, **row)
    row |= {f"next_{name}": text for name, text in leaves.items()}
    return jr.ReplayBuffer(capacity=1024 * num_envs), rows(num_envs, **row)


@pytest.mark.parametrize("backend", ["gpu", "tpu"])
@pytest.mark.parametrize(
    ("row", "kind", "dtype"),
    [("steps in b", "steps", "bfloat16"), ("steps in f", "steps", "float32"), ("transitions", "", "float32")],
)
def test_the_guide_to_many_environments_has_these_bytes(row, kind, dtype, backend):
    line = next(line for line in OF_MANY.splitlines() if line.startswith(f"| {row}"))
    made = [of_many(kind, dtype, num_envs) for num_envs in (1_024, 4_096, 8_192)]
    sizes = [_memory.short(jr.memory(*x, backend=backend).total) for x in made]
    assert [cell.strip() for cell in line.split("|")[2:5]] == sizes
