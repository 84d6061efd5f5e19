"""States, `like` and configurations: what comes back bit for bit, and what is refused by name."""

import collections
import dataclasses
import functools
import os
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import seeds
from checkpoint_runs import Custom, Flax, Pair, assert_same
from flax.core import FrozenDict
from flax.training.train_state import TrainState
from helpers import check_tree, leaves_of, rarely, rejects
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import jaxreplay as jr
from jaxreplay import sum_tree
from jaxreplay._common import devices
from jaxreplay.checkpoint import _leaves

pytestmark = pytest.mark.versions
X64 = jax.config.jax_enable_x64


@functools.partial(jax.tree_util.register_dataclass, data_fields=["x"], meta_fields=["size"])
@dataclasses.dataclass
class Registered:
    size: int
    x: object


def noise(tree):
    """A tree of these shapes with random bits everywhere."""
    rng = seeds.rng(0)

    def leaf_noise(leaf):
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            data = leaf_noise(jax.eval_shape(jax.random.key_data, leaf))
            return jax.random.wrap_key_data(data, impl="rbg" if "rbg" in str(leaf.dtype) else "threefry2x32")
        if leaf.dtype == bool:
            return jax.device_put(rng.integers(0, 2, leaf.shape).astype(bool))
        raw = rng.bytes(leaf.size * leaf.dtype.itemsize)
        return jax.device_put(np.frombuffer(raw, leaf.dtype).reshape(leaf.shape))

    return jax.tree.map(leaf_noise, tree)


def items(*leading):
    """Shapes of items of every kind of structure and dtype that one may have."""

    def of(dtype, *shape):
        return jax.ShapeDtypeStruct((*leading, *shape), dtype)

    S, reward = {"frame": of(np.uint8, 2, 2), "half": of(jnp.bfloat16)}, of(np.float32)
    return {
        "batch": jr.TransitionBatch(S=S, A=of(np.int8), logP=None, Rn=reward, In=reward, S_next=S),
        "pair": Pair(of(bool), [of(np.float32, 0), ()]),
        "flax": Flax(of(jnp.float8_e4m3fn), "name"),
        "registered": Registered(3, [of(jnp.asarray(0).dtype), of(np.float16), None]),
        "key": of(jax.random.key(0).dtype),
        "rbg": of(jax.random.key(0, impl="rbg").dtype),
    }


GLOBAL = jr.Prioritized(normalize="global")


@pytest.mark.parametrize("sampler", [*map(rarely, [jr.Uniform(), jr.Prioritized()]), GLOBAL])
@pytest.mark.parametrize("kind", ["replay", "any", "inside", *map(rarely, ["reservoir", "episodes"])])
def test_states_of_buffers_come_back_bit_for_bit(tmp_path, kind, sampler):
    of_items = {"replay": jr.ReplayBuffer, "reservoir": jr.ReservoirBuffer}
    if kind in of_items:
        buffer, rows = of_items[kind](capacity=6, sampler=sampler), items(2)
    else:
        settings = {"length": 6, "num_envs": 2, "sequence_length": 3, "windows": kind, "sampler": sampler}
        buffer, rows = jr.SequenceBuffer(**settings, hindsight=kind == "inside", gaps=kind != "any"), items(1, 2)
    one = jax.eval_shape(lambda: buffer.init(rows))
    for shapes in (one, jax.tree.map(lambda x: jax.ShapeDtypeStruct((3, *x.shape), x.dtype), one)):  # also of lanes
        state = noise(shapes)
        jr.save(tmp_path, buffer, state)
        assert_same(jr.restore(tmp_path, buffer, state), state)


@pytest.mark.parametrize(("backend", "fanout"), [("gpu", 64), rarely(("tpu", 128))])
def test_states_of_another_backend_come_back_in_this_one_s_layout(tmp_path, monkeypatch, backend, fanout):
    buffer = jr.ReplayBuffer(capacity=150, sampler=GLOBAL, donate=False)
    pools = jr.DifficultyPools(tasks_per_env=(150,), easy_threshold=0.9, donate=False)
    small = jr.ReplayBuffer(capacity=5, sampler=jr.Prioritized())  # its leaves have the same shapes in each layout
    config, rows = {"replay": buffer, "pools": pools, "small": small, "there": small}, np.arange(150, dtype=np.float32)
    replay, key = buffer.add(buffer.init(rows), rows), jax.random.key(0)
    replay = buffer.update(replay, np.arange(150), seeds.rng(0).exponential(size=150))
    like = {"replay": replay, "pools": pools.init(), "small": small.init(rows), "tree": sum_tree.init(150, fanout=8)}
    like["there"] = like["small"].on_this_backend(backend)
    jr.save(tmp_path / "run", config, like)
    monkeypatch.setattr(devices, "backend_of", lambda arrays=(): backend)
    found = jr.restore(tmp_path / "run", config, like)
    assert found["replay"].sampler.tree.fanout == found["pools"].normal.fanout == fanout
    assert found["small"].sampler.tree.fanout == fanout
    assert found["tree"].fanout == 8  # as its user has made it
    assert_same(jr.restore(tmp_path / "run", config, found), found)  # from two layouts
    handles, td_errors = np.array([3], np.int32), np.array([9.0], np.float32)
    for change in (lambda state: state, lambda state: buffer.update(state, handles, td_errors)):
        restored, saved = change(found["replay"]), change(replay)
        check_tree(restored.sampler.tree)
        leaves = leaves_of(saved.sampler.tree)
        np.testing.assert_array_equal(leaves_of(restored.sampler.tree), leaves)
        drawn = buffer.sample(restored, key, 64)
        np.testing.assert_allclose(drawn.probabilities, leaves[drawn.indices] / leaves.sum(), rtol=1e-5)
    np.testing.assert_array_equal(*(pools.sample(x, key, 20)[0] for x in (found["pools"], pools.init())))


def test_all_of_a_run_comes_back_bit_for_bit(tmp_path, monkeypatch):
    config = {
        "tracers": (jr.NStep(n=2, gamma=0.9, num_envs=2), jr.MonteCarlo(gamma=0.5, max_length=3, num_envs=2)),
        "pools": jr.DifficultyPools(tasks_per_env=(4, 3), env_ratios=(1, 2.5), env_names=("a", "b")),
        "tasks": jr.Tasks(num_tasks=5),
        "levels": jr.Levels(capacity=4),
        "autoreset": jr.NextStepAutoreset(env_step=noise),
        "settings": [1, 0.1, None, "text", np.float32(0.3), float("inf"), float("nan"), jnp.dtype("bfloat16")],
    }
    x, no = np.zeros(2, np.float32), np.zeros(2, bool)
    step = x, np.zeros(2, int), x, no, no, x
    layer = {"w": np.zeros((3, 2), np.float32), "b": np.zeros(2, jnp.bfloat16)}
    params = {"layer": [layer], "scale": np.zeros((), np.float32)}
    optimizer = optax.chain(optax.clip(1.0), optax.adam(optax.linear_schedule(1e-3, 0.0, 10)))
    parts = optax.multi_transform({"a": optimizer, "b": optax.set_to_zero()}, {"layer": "a", "scale": "b"})
    dtypes = ["bool", "int4", "uint4", "float8_e5m2", "complex64", "uint32", *(["uint64", "float64"] if X64 else [])]

    def arrays():
        return {
            "tracers": [tracer.init(*step) for tracer in config["tracers"]],
            **{name: config[name].init() for name in ("pools", "tasks")},
            "levels": config["levels"].init({"walls": no}),
            "autoreset": config["autoreset"].init(Pair(x, None), np.zeros(3, np.float32)),
            "params": params,
            "optimizer": optimizer.init(params),
            "parts": parts.init(params),
            "train": TrainState.create(apply_fn=noise, params=params, tx=optimizer),
            "custom": [Custom(x, 3)],
            "default": collections.defaultdict(list, a=no),
            "frozen": FrozenDict({"b": params, "a": [x[:1]]}),
            "ordered": collections.OrderedDict(b=x[:1], a=FrozenDict()),
            "key": jax.random.key(0),
            "empty": [{}, (), None, np.zeros((0, 3), np.uint8), np.zeros((2, 0), jnp.float8_e4m3fn)],
        }

    state = noise(jax.eval_shape(arrays)) | {
        "dtypes": [jax.device_put(np.arange(-2, 6).astype(dtype)) for dtype in map(jnp.dtype, dtypes)],
        "numbers": {3: 5, 1: 0.1, 2: True, 4: 2 - 1j, 5: float("nan")},
        "weak": [jnp.asarray(2.5), jnp.asarray(3), jnp.broadcast_to(jnp.asarray(1.5), (2, 2))],
        "numpy": [np.arange(3, dtype=np.int8), np.float32(0.1)],
        "special": jnp.array([jnp.nan, -0.0, jnp.inf, 1e-42]),
    }
    monkeypatch.chdir(tmp_path)
    for path in (tmp_path / "run", os.path.join("deep", "relative")):
        jr.save(path, config, state)
        restored = jr.restore(str(path), config, state)
        assert_same(restored, state)
        assert [x.weak_type for x in restored["weak"]] == [True, True, True]
        assert not restored["special"].weak_type


def test_traced_values_are_refused(tmp_path):
    save = jax.jit(lambda x: jr.save(tmp_path / "run", None, {"a": x}))
    rejects(r"leaf \['a'\]: is traced; .* outside of jit, scan and vmap", save, np.ones(2, np.float32))


def test_dtypes_that_jax_would_change_are_refused(tmp_path):
    state = {"a": np.arange(3, dtype=np.float64)}
    try:
        jax.config.update("jax_enable_x64", True)
        jr.save(tmp_path, None, state)
        assert_same(jr.restore(tmp_path, None, state), state)
        jax.config.update("jax_enable_x64", False)
        for call in (jr.restore, jr.save):
            rejects(r"leaf \['a'\]: has dtype float64.*set jax_enable_x64", call, tmp_path, None, state)
        like = {"a": np.zeros(3, np.float32)}
        rejects(r"like\['a'\]: saved float64\[3\], given float32\[3\]", jr.restore, tmp_path, None, like)
    finally:
        jax.config.update("jax_enable_x64", X64)


def test_threads_that_are_the_first_to_read_arrays_get_each_part_once():
    """JAX, asked for the shards by two threads at once, lists some twice, or not yet all."""
    cpus, interval = jax.devices("cpu"), sys.getswitchinterval()
    num_parts, sharding = len(cpus), NamedSharding(Mesh(np.array(cpus), ("data",)), PartitionSpec("data"))
    make = jax.jit(lambda x: [x + k for k in range(16)], out_shardings=[sharding] * 16)
    expected = [[((slice(k, k + 1),), k + i) for k in range(num_parts)] for i in range(16)]
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(2) as threads:
            for _ in range(100):
                arrays, barrier = make(np.arange(num_parts)), threading.Barrier(2)

                def parts(arrays=arrays, barrier=barrier):
                    barrier.wait()
                    return [_leaves.pack(x, copies=False).parts for x in arrays]

                for task in [threads.submit(parts) for _ in range(2)]:
                    found = [[(region, int(x[0])) for region, x in its] for its in task.result()]
                    assert [sorted(its, key=str) for its in found] == [sorted(its, key=str) for its in expected]
    finally:
        sys.setswitchinterval(interval)


def test_sharded_arrays_come_back_sharded(tmp_path):
    """Copies are written once, and each part by itself."""
    mesh = Mesh(np.array(jax.devices("cpu")[:4]).reshape(2, 2), ("data", "model"))
    values = {"x": np.arange(96, dtype=np.float32).reshape(4, 12, 2), "k": jax.random.split(jax.random.key(0), 8)}
    both = "data", "model"
    specs = {"x": [("data",), (None, "model"), (None, both), (), both[::-1]], "k": [("model",), ()], "f8": [("data",)]}
    values["f8"] = values["x"].astype(jnp.float8_e4m3fn)
    state = {
        f"{name}{i}": jax.device_put(values[name], NamedSharding(mesh, PartitionSpec(*spec)))
        for name, chosen in specs.items()
        for i, spec in enumerate(chosen)
    }
    state["weak"] = jax.device_put(jnp.asarray(2.5), NamedSharding(mesh, PartitionSpec()))
    state["alone"] = jnp.arange(3)
    jr.save(tmp_path, None, state)
    folders = [tmp_path / "checkpoint_0" / "arrays" / str(sorted(state).index(f"x{i}")) for i in range(5)]
    assert [len(os.listdir(folder)) - 1 for folder in folders] == [2, 2, 4, 1, 4]  # and .zarray
    for like in (state, jax.eval_shape(lambda: state)):
        restored = jr.restore(tmp_path, None, like)
        assert_same(restored, state)
        assert [name for name in state if getattr(restored[name], "weak_type", False)] == ["weak"]
        if like is state:
            assert [name for name in state if restored[name].sharding != state[name].sharding] == []
    # Not bound to a device.
    np.testing.assert_array_equal(jax.jit(lambda x, y: x + y[1])(restored["x0"], restored["alone"]), values["x"] + 1)
    other = Mesh(np.array(jax.devices("cpu")[:3]), ("any",))
    shardings = {"x0": NamedSharding(other, PartitionSpec(None, "any")), "x3": NamedSharding(other, PartitionSpec())}
    for name, sharding in shardings.items():
        like[name] = jax.ShapeDtypeStruct(state[name].shape, state[name].dtype, sharding=sharding)
    restored = jr.restore(tmp_path, None, like)
    assert_same(restored, state)
    assert {name: restored[name].sharding for name in shardings} == shardings


def test_arrays_are_committed_as_those_of_like_are(tmp_path):
    free = {"x": jnp.ones(4), "y": jnp.zeros((), jnp.int32)}
    jr.save(tmp_path, None, free)
    for like in (free, jax.device_put(free, jax.devices()[1])):
        for name, x in jr.restore(tmp_path, None, like).items():
            assert (x.committed, x.devices()) == (like[name].committed, like[name].devices())
