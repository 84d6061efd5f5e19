import collections
import dataclasses
import functools
import json
import os
import pathlib
import random
import shutil
import signal
import subprocess
import sys
import time
from typing import Any, NamedTuple

import chex
import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import seeds
from checkpoint_runs import (
    FILLED,
    advance,
    assert_same,
    begin,
    digest,
    filled,
    numbers_in,
    rewrite_manifest,
    runs,
    save_for_ever,
)
from flax.core import FrozenDict
from flax.training.train_state import TrainState
from helpers import check_tree, leaves_of, rarely
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import jaxreplay as jr
from jaxreplay import checkpoint, sum_tree
from jaxreplay._common import devices

pytestmark = pytest.mark.versions
X64 = jax.config.jax_enable_x64
HERE = sys.modules[__name__]
ONE = np.ones(1, np.int8)
ALWAYS = (
    "sequences, sharded",
    "pools",
    "windows inside, gaps, hindsight",
    "mixture with a reservoir",
)  # of the runs; the others: slow


class Pair(NamedTuple):
    first: Any
    second: Any


@chex.dataclass
class Chex:
    x: Any
    y: Any


@flax.struct.dataclass
class Flax:
    x: Any
    name: str = flax.struct.field(pytree_node=False)
    settings: tuple = flax.struct.field(pytree_node=False, default=(1, 0.1, None, True, ("a", np.dtype("int8"))))


@functools.partial(jax.tree_util.register_dataclass, data_fields=["x"], meta_fields=["size"])
@dataclasses.dataclass
class Registered:
    size: int
    x: Any


@flax.struct.dataclass
class WithFunction:
    x: Any
    function: Any = flax.struct.field(pytree_node=False)


@jax.tree_util.register_pytree_node_class
class Custom:
    def __init__(self, x, size):
        self.x, self.size = x, size

    def tree_flatten(self):
        return (self.x,), self.size

    @classmethod
    def tree_unflatten(cls, size, children):
        return cls(*children, size)


class Twins(Custom):
    """Its children have the same key."""


jax.tree_util.register_pytree_with_keys(
    Twins, lambda node: ([(jax.tree_util.GetAttrKey("x"), node.x)] * 2, None), lambda _, children: Twins(children[0], 0)
)


class Named(NamedTuple):
    x: Any
    name: str


jax.tree_util.register_pytree_node(Named, lambda node: ((node.x,), node.name), lambda name, x: Named(*x, name))


def noise(tree, seed=0):
    """The same tree with random bits everywhere."""
    rng = seeds.rng(seed)

    def leaf_noise(leaf):
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            data = jax.eval_shape(jax.random.key_data, leaf)
            return jax.random.wrap_key_data(leaf_noise(data), impl=jax.random.key_impl(leaf))
        if leaf.dtype == bool:
            return jnp.asarray(rng.integers(0, 2, leaf.shape), bool)
        raw = rng.bytes(leaf.size * leaf.dtype.itemsize)
        return jnp.asarray(np.frombuffer(raw, leaf.dtype).reshape(leaf.shape))

    return jax.tree.map(leaf_noise, tree)


def chex_works():
    """Whether its dataclasses can be flattened: old versions ask JAX for what it no longer has."""
    try:
        return len(jax.tree.leaves(Chex(x=0, y=None))) == 1
    except AttributeError:
        return False


def items(*leading):
    """Of every kind of structure and dtype that an item may have."""
    size = int(np.prod(leading))
    S = {"frame": jnp.zeros((*leading, 2, 2), jnp.uint8), "half": jnp.zeros(leading, jnp.bfloat16)}
    reward = jnp.zeros(leading)
    batch = jr.TransitionBatch(S=S, A=jnp.zeros(leading, jnp.int8), logP=None, Rn=reward, In=reward, S_next=S)
    return {
        "batch": batch,
        "pair": Pair(jnp.zeros(leading, bool), [jnp.zeros((*leading, 0)), ()]),
        "flax": Flax(jnp.zeros(leading, jnp.float8_e4m3fn), "name"),
        "chex": Chex(x=jnp.zeros(leading, jnp.float16), y=None) if chex_works() else (),
        "registered": Registered(3, jnp.zeros(leading, int)),
        "key": jax.random.split(jax.random.key(0), size).reshape(leading),
        "rbg": jax.random.split(jax.random.key(0, impl="rbg"), size).reshape(leading),
    }


SAMPLERS = {"uniform": jr.Uniform(), "prioritized": jr.Prioritized(), "global": jr.Prioritized(normalize="global")}


@pytest.mark.parametrize("sampler", [*map(rarely, ["uniform", "prioritized"]), "global"])
@pytest.mark.parametrize("kind", ["replay", "any", "inside", rarely("episodes")])
def test_states_of_buffers_come_back_bit_for_bit(tmp_path, kind, sampler):
    if kind == "replay":
        buffer = jr.ReplayBuffer(capacity=6, sampler=SAMPLERS[sampler])
        state = buffer.init(items(2))
    else:
        settings = {"length": 6, "num_envs": 2, "sequence_length": 3, "hindsight": kind == "inside"}
        buffer = jr.SequenceBuffer(**settings, sampler=SAMPLERS[sampler], windows=kind)
        state = buffer.init(items(1, 2))
    state = noise(state)
    jr.save(tmp_path / "run", buffer, state)
    assert_same(jr.restore(tmp_path / "run", buffer, allow=HERE), state)


@pytest.mark.parametrize(("backend", "fanout"), [rarely(("gpu", 64)), rarely(("tpu", 128))])
def test_states_of_another_backend_come_back_in_this_one_s_layout(tmp_path, monkeypatch, backend, fanout):
    buffer = jr.ReplayBuffer(capacity=150, sampler=jr.Prioritized(normalize="global"), donate=False)
    pools = jr.DifficultyPools(tasks_per_env=(150,), easy_threshold=0.9, donate=False)
    config, rows = {"replay": buffer, "pools": pools}, items(150)
    replay, key = buffer.add(buffer.init(rows), rows), jax.random.key(0)
    replay = buffer.update(replay, np.arange(150), seeds.rng(0).exponential(size=150))
    own = sum_tree.init(150, fanout=8)
    jr.save(tmp_path / "run", config, {"replay": replay, "pools": pools.init(), "tree": own})
    monkeypatch.setattr(devices, "backend_of", lambda arrays=(): backend)
    found = jr.restore(tmp_path / "run", config, allow=HERE)
    assert list(found) == ["replay", "pools", "tree"]
    assert found["replay"].sampler.tree.fanout == found["pools"].normal.fanout == fanout
    assert found["tree"].fanout == 8  # as its user has made it
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
        "autoreset": jr.NextStepAutoreset(env_step=noise),
        "settings": [1, 0.1, None, "text", np.float32(0.3), float("inf"), float("nan"), jnp.dtype("bfloat16")],
    }
    step = (jnp.zeros(2), jnp.zeros(2, int), jnp.zeros(2), jnp.zeros(2, bool), jnp.zeros(2, bool), jnp.zeros(2))
    params = {"layer": [{"w": jnp.zeros((3, 2)), "b": jnp.zeros(2, jnp.bfloat16)}], "scale": jnp.zeros(())}
    optimizer = optax.chain(optax.clip(1.0), optax.adam(optax.linear_schedule(1e-3, 0.0, 10)))
    parts = optax.multi_transform({"a": optimizer, "b": optax.set_to_zero()}, {"layer": "a", "scale": "b"})
    dtypes = ["bool", "int4", "uint4", "float8_e5m2", "complex64", "uint32", *(["uint64", "float64"] if X64 else [])]
    arrays = {
        "tracers": [tracer.init(*step) for tracer in config["tracers"]],
        "pools": config["pools"].init(),
        "autoreset": config["autoreset"].init(Pair(jnp.zeros(2), None), jnp.zeros(3)),
        "params": params,
        "optimizer": optimizer.init(params),
        "parts": jax.eval_shape(parts.init, params),
        "frozen": FrozenDict({"b": params, "a": [jnp.zeros(1)]}),
        "ordered": collections.OrderedDict(b=jnp.zeros(1), a=FrozenDict()),
        "key": jax.random.key(0),
        "empty": [{}, (), None, jnp.zeros((0, 3), jnp.uint8), jnp.zeros((2, 0), jnp.float8_e4m3fn)],
    }
    state = noise(arrays) | {
        "dtypes": [jnp.arange(-2, 6).astype(dtype) for dtype in dtypes],
        "numbers": {3: 5, 1: 0.1, 2: True},
        "weak": [jnp.asarray(2.5), jnp.asarray(3), jnp.broadcast_to(jnp.asarray(1.5), (2, 2))],
        "numpy": [np.arange(3, dtype=np.int8), np.float32(0.1)],
        "special": jnp.array([jnp.nan, -0.0, jnp.inf, 1e-42]),
    }
    monkeypatch.chdir(tmp_path)
    for path in (tmp_path / "run", os.path.join("deep", "relative")):
        jr.save(path, config, state)
        restored = jr.restore(str(path), config, allow=(optax, HERE))
        assert_same(restored, state)
        assert [x.weak_type for x in restored["weak"]] == [True, True, True]
        assert not restored["special"].weak_type


def test_a_state_without_values_comes_back(tmp_path):
    state = {"nothing": (), "empty": jnp.zeros((0, 3), jnp.int8)}
    jr.save(tmp_path, None, state)
    assert_same(jr.restore(tmp_path, None), state)


@pytest.mark.parametrize("always", [rarely(True), rarely(False)])
def test_runs_resumed_in_another_process_end_as_if_not_interrupted(tmp_path, always):
    """One test of several runs, for one other process; in passing: what it imports, and its logs."""
    chosen = {name: run for name, run in runs().items() if (name in ALWAYS) == always}
    ends, halves = {}, {}
    for name, run in chosen.items():
        carry = advance(name, begin(run))
        halves[name] = digest(carry)
        jr.save(tmp_path / name, run.config, carry)
        ends[name] = digest(advance(name, carry))
    tests, package = pathlib.Path(__file__).parents[1], pathlib.Path(jr.__file__).parents[1]
    path = [str(package), str(tests), os.environ.get("PYTHONPATH", "")]
    child = subprocess.run(
        [sys.executable, pathlib.Path(__file__).with_name("checkpoint_runs.py"), tmp_path],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, path))},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert child.returncode == 0, child.stderr
    found = json.loads(child.stdout)
    assert found["digests"] == ends
    assert all(halves[name] != ends[name] for name in ends)
    assert found["imported"] == []
    assert "absl" not in child.stderr
    assert "Warning" not in child.stderr


@pytest.mark.slow
def test_killed_at_any_moment_leaves_the_old_checkpoint_or_the_new_one(tmp_path, children):
    rng = random.Random(0)
    seen = collections.Counter()
    number, path = 0, tmp_path / "run"
    kills = 20
    for kill in range(kills):
        ours, theirs = children.Pipe(duplex=False)
        process = children.Process(target=save_for_ever, args=(path, number, theirs))
        process.start()
        theirs.close()
        times = [(ours.recv(), time.monotonic()) for _ in range(5)]  # two saves, and the beginning of the third
        duration = times[3][1] - times[2][1]
        time.sleep(duration * (kill + rng.random()) * 1.2 / kills)
        os.kill(process.pid, signal.SIGKILL)
        process.join()
        events = [event for event, _ in times]
        try:
            while True:
                events.append(ours.recv())
        except EOFError:
            pass
        begun, ended = (max(n for what, n in events if what == kind) for kind in ("begin", "end"))
        entries = os.listdir(path)
        seen["unfinished"] += begun > ended
        seen["left over"] += any("tmp" in entry for entry in entries)
        (restored,) = numbers_in(jr.restore(path, FILLED))
        assert ended <= restored <= begun
        seen["new"] += restored > ended
        number = begun + 1
        jr.save(path, FILLED, filled(number))
        assert len(os.listdir(path)) == 1
        assert numbers_in(jr.restore(path, FILLED)) == {number}
        number += 1
    assert seen["unfinished"] >= kills // 2
    assert seen["left over"] >= 3, seen


def damaged_files(path):
    return sorted(file for file in path.rglob("*") if file.is_file())


def test_damage_is_an_error_and_never_a_wrong_state(tmp_path):
    buffer = jr.ReplayBuffer(capacity=2000)
    state = noise(buffer.init({"x": jnp.zeros((1, 2), jnp.uint8), "y": jnp.zeros(1)}))
    good, copy = tmp_path / "good", tmp_path / "copy"
    jr.save(good, buffer, state)
    outcomes = collections.defaultdict(list)

    def flipped(fifths, content):
        at = len(content) * fifths // 5
        return content[:at] + bytes([content[at] ^ 1 << fifths]) + content[at + 1 :] if content else b"x"

    damages = [lambda content: content[: len(content) // 2], lambda content: b"", lambda content: None]
    damages += [functools.partial(flipped, fifths) for fifths in range(1, 5)]
    shutil.copytree(good, copy)
    for file in damaged_files(copy):
        content = file.read_bytes()
        for damage in damages:
            changed = damage(content)
            if changed is None:
                file.unlink()
            else:
                file.write_bytes(changed)
            try:
                assert_same(jr.restore(copy, buffer), state)
                outcomes[file].append("right")
            except (ValueError, FileNotFoundError) as error:
                outcomes[file].append(str(error))
            file.write_bytes(content)
    (manifest,) = (file for file in outcomes if file.name == "data.json")
    data = max(outcomes, key=lambda file: file.stat().st_size)
    assert data.stat().st_size > 4000  # random bits, which do not compress
    for file in (manifest, data):
        assert all("is damaged" in outcome for outcome in outcomes[file])
    # A bit of the values themselves: only the checksum tells, and says where.
    assert any("leaf .storage['" in outcome and "differs from its saved bits" in outcome for outcome in outcomes[data])
    jr.save(copy, buffer, state)
    assert_same(jr.restore(copy, buffer), state)


def test_what_is_damaged_does_not_stand_in_the_way_of_the_next_checkpoint(tmp_path):
    jr.save(tmp_path, None, jnp.arange(3))
    for file in damaged_files(tmp_path):
        file.write_bytes(b"")
    jr.save(tmp_path, None, jnp.arange(4))
    assert_same(jr.restore(tmp_path, None), jnp.arange(4))
    assert len(os.listdir(tmp_path)) == 1


def set_fields(monkeypatch, *names):
    """The class `Pair` has these fields from now on."""
    monkeypatch.setattr(sys.modules[__name__], "Pair", collections.namedtuple("Pair", names))


OTHER_FIELDS = [("first", "other"), ("first",), (), ("first", "added", "second")]


def test_namedtuples_are_restored_by_name(tmp_path, monkeypatch):
    jr.save(tmp_path, Pair(1, 2), Pair(ONE, None))
    set_fields(monkeypatch, "second", "first")
    assert_same(jr.restore(tmp_path, Pair(first=1, second=2), allow=HERE), Pair(first=ONE, second=None))
    with pytest.raises(ValueError, match=r"buffer\.second: saved 2, given 1; buffer\.first: saved 1, given 2"):
        jr.restore(tmp_path, Pair(1, 2))
    jr.save(tmp_path, None, Pair(ONE, None))
    for names in OTHER_FIELDS:
        set_fields(monkeypatch, *names)
        with pytest.raises(ValueError, match=r"Pair: is no longer the saved namedtuple"):
            jr.restore(tmp_path, None, allow=HERE)


def test_versions(tmp_path):
    jr.save(tmp_path, jr.Uniform(), {"x": Pair(jnp.arange(2), None)})
    rewrite_manifest(tmp_path, lambda content: content["buffer"]["fields"].clear())
    assert_same(jr.restore(tmp_path, jr.Uniform(), allow=Pair), {"x": Pair(jnp.arange(2), None)})
    rewrite_manifest(tmp_path, lambda content: content.update(format=checkpoint._manifest.FORMAT + 1, library="9.0"))
    with pytest.raises(ValueError, match=r"has format 2, written by jaxreplay 9.0; this version reads format 1; use"):
        jr.restore(tmp_path, jr.Uniform())


def test_nothing_to_restore(tmp_path):
    for path in (tmp_path, tmp_path / "missing"):
        with pytest.raises(FileNotFoundError, match="no complete checkpoint there"):
            jr.restore(path, None)


def schedule(count):
    return 0.5


@dataclasses.dataclass(frozen=True)
class Settings:
    """A configuration that got a new field."""

    alpha: float = 0.1
    added: str = "default"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Agent:
    """A configuration that has a buffer."""

    buffer: Any


def with_sampler(**settings):
    return jr.ReplayBuffer(capacity=4, sampler=jr.Prioritized(**settings))


POOLS = jr.DifficultyPools(tasks_per_env=(4,))
CHANGES = {
    "field": (with_sampler(), with_sampler(alpha=0.7), r"buffer\.sampler\.alpha: saved 0\.6, given 0\.7.*jr\.migrate"),
    "last bit": (with_sampler(alpha=0.6), with_sampler(alpha=np.nextafter(0.6, 1)), r"saved 0\.6, given 0\.60000000"),
    "type": (
        with_sampler(),
        jr.ReplayBuffer(capacity=4),
        r"buffer\.sampler: saved Prioritized, given Uniform.*jr",
    ),
    "schedule": (with_sampler(beta=schedule), with_sampler(beta=noise), r"beta: saved \w+\.schedule, given \w+\.noise"),
    "constant": (with_sampler(beta=schedule), with_sampler(), r"beta: saved \w+\.schedule, given 0\.4"),
    "pools": (
        POOLS,
        dataclasses.replace(POOLS, easy_threshold=1),
        r"easy_threshold: saved None, given 1.*remap",
    ),
    "length": (POOLS, jr.DifficultyPools(tasks_per_env=(4, 2)), r"tasks_per_env: saved \[4\], given \[4, 2\]"),
    "entry": (POOLS, jr.DifficultyPools(tasks_per_env=(5,)), r"tasks_per_env\[0\]: saved 4, given 5"),
    "inner": (
        Agent(buffer=with_sampler()),
        Agent(buffer=with_sampler(alpha=0.7)),
        r"buffer\.buffer\.sampler\.alpha: saved 0\.6, given 0\.7.*jr\.migrate",
    ),
    "root": (POOLS, jr.NStep(n=1, gamma=1), r"buffer: saved DifficultyPools, given NStep\. .* saved configuration\.$"),
    "nested": ({"a": [POOLS, 1]}, {"a": [POOLS, 2]}, r"buffer\['a'\]\[1\]: saved 1, given 2\. .* configuration\.$"),
    "more": ({"a": 1}, {"a": 1, "b": 2}, r"buffer\['b'\]: saved nothing, given 2"),
    "fewer": ({"a": 1, "b": 2}, {"a": 1}, r"buffer\['b'\]: saved 2, given nothing"),
    "many": (list(range(9)), list(range(1, 10)), r"\[4\]: saved 4, given 5 \(and 4 more\)"),
    "both": (with_sampler(), jr.ReplayBuffer(capacity=5), r"capacity: saved 4, given 5; buffer\.sampler: saved Prior"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_another_configuration_is_refused_by_field(tmp_path, name):
    saved, given, message = CHANGES[name]
    jr.save(tmp_path, saved, jnp.arange(2))
    with pytest.raises(ValueError, match=message):
        jr.restore(tmp_path, given)
    assert_same(jr.restore(tmp_path, saved), jnp.arange(2))


def test_donation_does_not_matter_and_a_new_field_has_its_default(tmp_path):
    buffer = jr.ReplayBuffer(capacity=4, donate=True)
    jr.save(tmp_path, [buffer, Settings()], jnp.arange(2))
    buffer = dataclasses.replace(buffer, donate=False)
    jr.restore(tmp_path, [buffer, Settings()])
    rewrite_manifest(tmp_path, lambda content: content["buffer"][1]["fields"].pop("added"))
    jr.restore(tmp_path, [buffer, Settings()])
    with pytest.raises(ValueError, match=r"buffer\[1\]\.added: saved 'default', given 'other'"):
        jr.restore(tmp_path, [buffer, Settings(added="other")])


def local_class():
    class Local(NamedTuple):
        x: Any

    return Local


REFUSED = {
    "keys": (None, {"a": {True: ONE}}, r"\['a'\]: a dict with keys \[True\]"),
    "twins": (None, {"a": [Twins(ONE, 0)]}, r"\['a'\]\[0\]: two children of a Twins have the same key"),
    "text": (None, {"a": "text"}, r"\['a'\]: got a str, expected an array"),
    "text in a node": (None, {"a": Custom("text", 0)}, r"\['a'\]\[<flat index 0>\]: got a str, expected an array"),
    "objects": (None, {"a": np.array([None])}, r"leaf \['a'\]: has dtype object, which JAX would not keep"),
    "configuration": ({"a": [object()]}, ONE, r"buffer\['a'\]\[0\]: got a object, which cannot be recorded"),
    "array": (dataclasses.make_dataclass("Settings", ["scale"])(ONE), ONE, r"buffer\.scale: got a ndarray"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_recorded_is_refused_before_anything_is_written(tmp_path, name):
    config, state, message = REFUSED[name]
    with pytest.raises(ValueError, match=message):
        jr.save(tmp_path / "run", config, state)
    assert not (tmp_path / "run").exists()


def train_state():
    variables = {"w": jnp.zeros((2, 3), jnp.float32), "b": [jnp.zeros(3, jnp.float32)]}
    return TrainState.create(apply_fn=noise, params=FrozenDict(variables), tx=OPTIMIZER)


OPTIMIZER = optax.inject_hyperparams(optax.adam)(learning_rate=1e-3)
Local = local_class()
OTHERS = {
    "train": jax.eval_shape(train_state),
    "function": WithFunction(jax.ShapeDtypeStruct((1,), jnp.int8), noise),
    "custom": [Custom(jax.random.wrap_key_data(np.zeros((2, 2), np.uint32)), 3)],
    "named": Named(jax.ShapeDtypeStruct((1,), jnp.int8), "name"),
    "local": Local({"y": jax.ShapeDtypeStruct((), jnp.float32), "z": None}),
    "default": collections.defaultdict(list, a=jax.ShapeDtypeStruct((2,), bool)),
}


@pytest.fixture(scope="module")
def others(tmp_path_factory):
    """A checkpoint with nodes that are made from those given to `restore`, and its state."""
    path = tmp_path_factory.mktemp("others")
    state = noise(OTHERS) | {"pair": Pair(jnp.arange(2), 5)}
    jr.save(path, None, state)
    return path, state


def test_other_nodes_are_made_from_those_given(tmp_path, others):
    path, state = others
    assert_same(jr.restore(path, None, like=OTHERS, allow=Pair), state)
    assert_same(jr.restore(path, None, like=state), state)
    assert_same(jr.restore(path, None, like=OTHERS | {"pair": None}, allow=[HERE]), state)
    step = state["train"].replace(step=5)
    for saved, like in ((step, OTHERS["train"]), (state["train"], step)):
        jr.save(tmp_path, None, saved)
        restored = jr.restore(tmp_path, None, like=like)
        assert_same(restored, saved)
        assert restored.apply_fn is noise
        assert restored.tx is OPTIMIZER


def with_entry(key, change):
    return lambda like: like | {key: change(like[key])}


UNLIKE = {
    "nothing": (lambda like: None, r"like: must have a Custom at \['custom'\]\[0\].*build it as .*ShapeDtypeStruct"),
    "no entry": (
        lambda like: {key: like[key] for key in like if key != "train"},
        r"like: must have a TrainState at \['train'\], because a checkpoint holds",
    ),
    "kind": (lambda like: [like], r"like: saved dict, given list; build it as for the saved state"),
    "unknown": (lambda like: like | {"b": ONE}, r"like\['b'\]: saved nothing, given int8\[1\]"),
    "class": (with_entry("custom", lambda x: [Pair(x, x)]), r"like\['custom'\]\[0\]: saved Custom, given Pair"),
    "array": (with_entry("train", lambda x: ONE), r"like\['train'\]: saved TrainState, given int8\[1\]"),
    "dict": (
        with_entry("train", lambda x: x.replace(params=dict(x.params))),
        r"like\['train'\]\.params: saved FrozenDict, given dict",
    ),
    "shape": (
        with_entry("train", lambda x: x.replace(params=x.params.copy({"w": np.zeros((2, 4), np.float32)}))),
        r"like\['train'\]\.params\['w'\]: saved float32\[2, 3\], given float32\[2, 4\]",
    ),
    "dtype": (
        with_entry("function", lambda x: x.replace(x=np.zeros(1, np.uint8))),
        r"like\['function'\]\.x: saved int8\[1\], given uint8\[1\]",
    ),
    "number": (with_entry("function", lambda x: x.replace(x=1)), r"\.x: saved int8\[1\], given int;"),
    "number for a number": (lambda like: like | {"pair": Pair(None, 0.5)}, r"pair'\]\.second: saved int, given float"),
    "key": (
        with_entry("custom", lambda x: [Custom(jax.random.wrap_key_data(np.zeros((2, 4), np.uint32), impl="rbg"), 3)]),
        r"saved key<fry>\[2\], given key<rbg>\[2\]",
    ),
    "fewer": (
        with_entry("train", lambda x: x.replace(params=x.params.pop("b")[0])),
        r"like\['train'\]\.params\['b'\]: saved list, given nothing",
    ),
    "more": (
        with_entry("train", lambda x: x.replace(params=x.params.copy({"c": ONE}))),
        r"like\['train'\]\.params\['c'\]: saved nothing, given int8\[1\]",
    ),
    "None": (with_entry("function", lambda x: x.replace(x=None)), r"\.x: saved int8\[1\], given None"),
    "not None": (with_entry("local", lambda x: Local(x.x | {"z": 0})), r"\.x\['z'\]: saved None, given int"),
    "static": (with_entry("custom", lambda x: [Custom(x[0].x, 4)]), r"\[0\], static data: saved 3, given 4"),
    "name": (with_entry("named", lambda x: Named(x.x, "b")), r"\['named'\], static data: saved 'name', given 'b'"),
    "static, not plain": (
        with_entry("custom", lambda x: [Custom(x[0].x, noise)]),
        r"\[0\], static data: saved 3, given no plain value",
    ),
}


@pytest.mark.parametrize("name", UNLIKE)
def test_nodes_unlike_the_saved_ones_are_refused_by_path(others, name):
    change, message = UNLIKE[name]
    with pytest.raises(ValueError, match=message):
        jr.restore(others[0], None, like=change(OTHERS))


def test_static_fields_that_are_plain_agree_beside_a_function(tmp_path):
    state = Flax(jnp.arange(2), name="a", settings=(1, noise))
    jr.save(tmp_path, None, state)
    assert_same(jr.restore(tmp_path, None, like=state), state)
    with pytest.raises(ValueError, match=r"like, static name: saved 'a', given 'b'"):
        jr.restore(tmp_path, None, like=state.replace(name="b"))


def test_traced_values_are_refused(tmp_path):
    with pytest.raises(ValueError, match=r"leaf \['a'\]: is traced; .* outside of jit, scan and vmap"):
        jax.jit(lambda x: jr.save(tmp_path / "run", None, {"a": x}))(jnp.ones(2))


def test_dtypes_that_jax_would_change_are_refused(tmp_path):
    state = {"a": np.arange(3, dtype=np.float64)}
    try:
        jax.config.update("jax_enable_x64", True)
        jr.save(tmp_path, None, state)
        assert_same(jr.restore(tmp_path, None), state)
        jax.config.update("jax_enable_x64", False)
        for call in (lambda: jr.restore(tmp_path, None), lambda: jr.save(tmp_path, None, state)):
            with pytest.raises(ValueError, match=r"leaf \['a'\]: has dtype float64.*set jax_enable_x64"):
                call()
    finally:
        jax.config.update("jax_enable_x64", X64)


def test_without_waiting_the_state_may_be_donated_at_once(tmp_path):
    buffer = jr.ReplayBuffer(capacity=2**18)
    ones = {"x": jnp.ones((2**18, 4), jnp.float32), "n": jnp.arange(2**18)}
    state = buffer.add(buffer.init(ones), ones)
    expected = jax.tree.map(lambda leaf: np.array(leaf), state)
    finish = jr.save(tmp_path, buffer, state, wait=False)
    for value in range(2, 5):
        state = buffer.add(state, {"x": jnp.full((2**18, 4), value, jnp.float32), "n": -ones["n"]})
    jax.block_until_ready(state)
    finish()
    finish()
    assert_same(jr.restore(tmp_path, buffer), expected)
    jr.save(tmp_path, buffer, state)()
    assert_same(jr.restore(tmp_path, buffer), state)


def test_a_path_that_cannot_be_a_folder_is_an_error(tmp_path):
    (tmp_path / "file").write_text("text")
    with pytest.raises(OSError, match="file"):
        jr.save(tmp_path / "file" / "run", None, ONE)
    with pytest.raises(FileNotFoundError, match="no complete checkpoint"):
        jr.restore(tmp_path / "file", None)


def test_sharded_arrays_come_back_sharded(tmp_path):
    mesh = Mesh(np.array(jax.devices("cpu")[:4]).reshape(2, 2), ("data", "model"))
    values = {"x": np.arange(48.0, dtype=np.float32).reshape(4, 6, 2), "k": jax.random.split(jax.random.key(0), 8)}
    specs = {"x": [("data",), (None, "model"), (("data", "model"),), ()], "k": [("model",), ()]}
    state = {
        f"{name}{i}": jax.device_put(values[name], NamedSharding(mesh, PartitionSpec(*spec)))
        for name, chosen in specs.items()
        for i, spec in enumerate(chosen)
    } | {"f8": jax.device_put(values["x"].astype(jnp.float8_e4m3fn), NamedSharding(mesh, PartitionSpec("data")))}
    state["weak"] = jax.device_put(jnp.asarray(2.5), NamedSharding(mesh, PartitionSpec()))
    state["alone"] = jnp.arange(3)
    config = jr.Sharded(buffer=jr.ReplayBuffer(capacity=24), mesh=mesh)
    jr.save(tmp_path, config, state)
    restored = jr.restore(tmp_path, config)
    assert_same(restored, state)
    assert [name for name in state if restored[name].sharding != state[name].sharding] == []
    assert [name for name in state if getattr(restored[name], "weak_type", False)] == ["weak"]
    # Not bound to a device.
    np.testing.assert_array_equal(jax.jit(lambda x, y: x + y[1])(restored["x0"], restored["alone"]), values["x"] + 1)
    other = dataclasses.replace(config, mesh=Mesh(mesh.devices.reshape(4), ("data",)))
    with pytest.raises(ValueError, match=r"mesh: saved \{'data': 2, 'model': 2\}, given \{'data': 4\}.*jr\.migrate"):
        jr.restore(tmp_path, other)
