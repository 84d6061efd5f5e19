"""Who may write and read a checkpoint at the same time, what fails, and which bits are noticed."""

import concurrent.futures
import dataclasses
import errno
import fcntl
import functools
import itertools
import logging
import os
import resource
import shutil
import threading
import zlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checkpoint_runs import assert_same, numbers_in, save_several
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import jaxreplay as jr
from jaxreplay.checkpoint import _files, _leaves, _processes
from jaxreplay.checkpoint._checkpoint import open_saved

pytestmark = pytest.mark.versions
X64 = jax.config.jax_enable_x64
WITHIN = 120  # seconds; what takes longer hangs


def full(number):
    return {"a": jnp.full((500, 7), number, jnp.int32), "b": jnp.full(3, number, jnp.int8)}


def in_threads(*functions):
    """What the functions return or raise, each called in a thread of its own, all at the same time."""
    together = threading.Barrier(len(functions), timeout=WITHIN)

    def call(function):
        together.wait()
        try:
            return function()
        except Exception as error:
            return error

    executor = concurrent.futures.ThreadPoolExecutor(len(functions))
    try:
        return [future.result(WITHIN) for future in [executor.submit(call, x) for x in functions]]
    finally:
        executor.shutdown(wait=False, cancel_futures=True)


def entries(path):
    return sorted(os.listdir(path))


# --- threads


@pytest.mark.parametrize("wait", [True, False])
def test_threads_that_save_to_two_paths_at_once(tmp_path, wait):
    def save(name, numbers):
        for number in numbers:
            jr.save(tmp_path / name, name, full(number), wait=wait)()

    found = in_threads(*(functools.partial(save, f"run{i}", range(i, 20 + i, 4)) for i in range(4)))
    assert found == [None] * 4
    for i in range(4):
        assert_same(jr.restore(tmp_path / f"run{i}", f"run{i}"), full(16 + i))
        assert entries(tmp_path / f"run{i}") == ["checkpoint_4"]


def test_threads_that_save_to_one_path_take_turns_and_readers_see_whole_states(tmp_path):
    jr.save(tmp_path, None, full(0))
    seen, done = [], threading.Event()

    def save(first):
        finishes = [jr.save(tmp_path, None, full(number), wait=number % 2 == 0) for number in range(first, first + 8)]
        for finish in finishes:
            finish()

    def read():
        while not done.is_set():
            seen.append(numbers_in(jr.restore(tmp_path, None)))

    def save_all():
        try:
            assert in_threads(*(functools.partial(save, first) for first in (10, 20, 30))) == [None] * 3
        finally:
            done.set()

    assert in_threads(save_all, read) == [None] * 2
    assert seen
    assert all(len(numbers) == 1 for numbers in seen)
    assert entries(tmp_path) == ["checkpoint_24"]
    (last,) = numbers_in(jr.restore(tmp_path, None))
    assert last in {*range(10, 18), *range(20, 28), *range(30, 38)}


def test_saving_beside_a_state_in_use(tmp_path):
    """In a thread: what was given, or an error where that was donated too early. In the background: what was given."""
    buffer = jr.ReplayBuffer(capacity=4096)
    state = buffer.init(jnp.zeros((1, 16), jnp.int32))
    outcomes, finishes = [], []

    def in_a_thread(state, path):
        try:
            jr.save(path, buffer, state)
        except ValueError as error:
            return str(error)

    with concurrent.futures.ThreadPoolExecutor(4) as threads:
        for i in range(12):
            outcomes.append(threads.submit(in_a_thread, state, tmp_path / f"thread{i}"))
            finishes.append(jr.save(tmp_path / f"background{i}", buffer, state, wait=False))
            state = buffer.add(state, jnp.full((4096, 16), i + 1, jnp.int32))
    for i, (outcome, finish) in enumerate(zip(outcomes, finishes, strict=True)):
        finish()
        assert numbers_in(jr.restore(tmp_path / f"background{i}", buffer).storage) == {i}
        if (refused := outcome.result()) is None:
            assert numbers_in(jr.restore(tmp_path / f"thread{i}", buffer).storage) == {i}
        else:
            assert "was donated to an earlier call" in refused
            assert not (tmp_path / f"thread{i}").exists() or entries(tmp_path / f"thread{i}") == []
    assert numbers_in(state.storage) == {12}


def test_a_saved_state_is_still_donated_in_place(tmp_path):
    buffer = jr.ReplayBuffer(capacity=4096)
    rows = jnp.ones((4096, 16))
    state = buffer.add(buffer.init(rows), rows)
    for wait in (True, False):
        place = state.storage.unsafe_buffer_pointer()
        finish = jr.save(tmp_path, buffer, state, wait=wait)
        state = buffer.add(state, rows)
        assert state.storage.unsafe_buffer_pointer() == place
        finish()


@pytest.mark.slow
def test_processes_that_save_to_one_path_take_turns(tmp_path, children):
    started = []
    for first in (100, 200):
        process = children.Process(target=save_several, args=(tmp_path, first, 20))
        process.start()
        started.append(process)
    seen = []
    while any(process.is_alive() for process in started):
        try:
            seen.append(numbers_in(jr.restore(tmp_path, None)))
        except FileNotFoundError:
            assert seen == []
    assert [process.exitcode for process in started] == [0, 0]
    assert len(set(map(tuple, seen))) > 3
    assert all(len(numbers) == 1 for numbers in seen)
    assert entries(tmp_path) == ["checkpoint_39"]
    assert numbers_in(jr.restore(tmp_path, None)) in ({119}, {219})


# --- what fails, and what was left over


@pytest.mark.parametrize("below", [("file", "run"), ("n" * 300,), ("file",)])
@pytest.mark.parametrize("wait", [True, False])
def test_a_folder_that_cannot_be_made_is_an_error_at_once(tmp_path, below, wait):
    (tmp_path / "file").write_text("text")
    before = {*threading.enumerate()}  # some of an earlier test may be about to end
    with pytest.raises(OSError, match=r"file|nnn"):
        jr.save(tmp_path.joinpath(*below), None, full(1), wait=wait)
    assert {*threading.enumerate()} <= before
    assert entries(tmp_path) == ["file"]


def refuse(*_, **__):
    raise OSError(errno.EROFS, "Read-only file system")


@pytest.mark.parametrize("name", ["mkdir", "rename"])
def test_a_write_that_fails_leaves_the_previous_checkpoint_and_nothing_else(tmp_path, name):
    jr.save(tmp_path, None, full(1))
    for wait in (True, False):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(os, name, refuse)
            with pytest.raises(OSError, match="Read-only"):
                jr.save(tmp_path, None, full(2), wait=wait)()
        assert entries(tmp_path) == ["checkpoint_0"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "rename", refuse)
        finish = jr.save(tmp_path, None, full(2), wait=False)
        for _ in range(2):
            with pytest.raises(OSError, match="Read-only"):
                finish()
    assert_same(jr.restore(tmp_path, None), full(1))
    jr.save(tmp_path, None, full(3))
    assert_same(jr.restore(tmp_path, None), full(3))
    assert entries(tmp_path) == ["checkpoint_1"]


@pytest.mark.parametrize("wait", [True, False])
def test_arrays_that_cannot_be_written_leave_the_previous_checkpoint_and_no_filter_of_logs(tmp_path, wait):
    first, second = (
        jnp.full(3000, number) for number in (1, 2)
    )  # of several the others would meet a closed event loop
    jr.save(tmp_path, None, first)
    limits, filters = resource.getrlimit(resource.RLIMIT_FSIZE), [*logging.getLogger("absl").filters]
    resource.setrlimit(resource.RLIMIT_FSIZE, (5000, limits[1]))  # as with a full disk: the manifest still fits
    try:
        with pytest.raises(OSError, match="File too large"):
            jr.save(tmp_path, None, second, wait=wait)()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert logging.getLogger("absl").filters == filters
    assert entries(tmp_path) == ["checkpoint_0"]
    assert_same(jr.restore(tmp_path, None), first)


def test_saving_and_restoring_log_no_warning(tmp_path, caplog):
    jr.save(tmp_path, None, full(1))
    jr.save(tmp_path, None, full(2), wait=False)()
    assert_same(jr.restore(tmp_path, None), full(2))
    logging.getLogger("absl").warning("another")
    assert [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING] == ["another"]


def test_what_others_left_is_deleted_and_what_is_not_ours_is_not(tmp_path):
    for name in ("checkpoint_7.orbax-checkpoint-tmp", "checkpoint_x", "other"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "arrays_0").write_text("text")
    (tmp_path / "writing").write_text("")  # of a process that was killed
    with pytest.raises(FileNotFoundError, match="no complete checkpoint"):
        jr.restore(tmp_path, None)
    jr.save(tmp_path, None, full(1))
    assert entries(tmp_path) == ["checkpoint_0", "checkpoint_x", "other"]
    shutil.copytree(tmp_path / "checkpoint_0", tmp_path / "checkpoint_10")
    shutil.copytree(tmp_path / "checkpoint_0", tmp_path / "checkpoint_9")  # whose deletion was cut short
    shutil.rmtree(tmp_path / "checkpoint_9" / "manifest")
    assert_same(jr.restore(tmp_path, None), full(1))
    jr.save(tmp_path, None, full(2))
    assert entries(tmp_path) == ["checkpoint_11", "checkpoint_x", "other"]
    assert_same(jr.restore(tmp_path, None), full(2))


def test_a_file_system_without_locks(tmp_path, monkeypatch):
    monkeypatch.setattr(fcntl, "flock", refuse)
    jr.save(tmp_path, None, full(1))
    assert_same(jr.restore(tmp_path, None), full(1))
    assert entries(tmp_path) == ["checkpoint_0"]


def test_a_url_is_no_folder():
    for call in (lambda: jr.save("gs://bucket/run", None, full(1)), lambda: jr.restore("gs://bucket/run", None)):
        with pytest.raises(ValueError, match="gs://bucket/run: is a URL; a checkpoint is a folder of a file system"):
            call()


@pytest.mark.parametrize("when", [0, 1])  # it is to read the manifest, or the arrays
def test_a_checkpoint_that_is_replaced_while_it_is_read(tmp_path, monkeypatch, when):
    jr.save(tmp_path, None, full(1))
    load, calls = _files.load, itertools.count()

    def replace_once(*arguments):
        if next(calls) == when:
            jr.save(tmp_path, None, full(2))
        return load(*arguments)

    monkeypatch.setattr(_files, "load", replace_once)
    assert_same(jr.restore(tmp_path, None), full(2))
    assert next(calls) == when + 4


# --- several processes of one program, played by threads


@pytest.fixture
def two(monkeypatch):
    """A function that calls another in two threads, each of which is a process to the checkpoint; what comes of it."""
    local, told, together = threading.local(), {}, threading.Barrier(2, timeout=WITHIN)

    def gather(numbers):
        told[local.index] = np.array(numbers, np.uint32)
        together.wait()
        found = np.stack([told[0], told[1]])
        together.wait()
        return found

    def call(function):
        def as_process(index):
            local.index = index
            return function(index)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(_processes, "gather", gather)
            patch.setattr(jax, "process_count", lambda: 2)
            patch.setattr(jax, "process_index", lambda: local.index)
            return in_threads(*(functools.partial(as_process, index) for index in range(2)))

    return call


DIFFER = {
    "another leaf": (
        lambda i: (None, {"a": jnp.zeros(2), "b": jnp.array([0, i])}),
        r"leaf \['b'\]: differs between processes",
    ),
    "the first leaf": (
        lambda i: (None, {"a": jnp.array([i, 0]), "b": jnp.zeros(1)}),
        r"leaf \['a'\]: differs between proc",
    ),
    "a number": (lambda i: (None, {"a": i}), "buffer or state: the structure differs"),
    "a dtype": (lambda i: (None, {"a": jnp.zeros(1, [jnp.int8, jnp.uint8][i])}), "the structure differs"),
    "a configuration": (lambda i: (i, {"a": jnp.zeros(1)}), "the structure differs"),
    "leaves": (lambda i: (None, [jnp.zeros(1)] * (i + 1)), "the structure differs"),
}


@pytest.mark.parametrize("name", DIFFER)
def test_processes_with_different_states_are_refused_before_anything_is_written(tmp_path, two, name):
    make, message = DIFFER[name]
    found = two(lambda index: jr.save(tmp_path / "run", *make(index)))
    for error in found:
        assert isinstance(error, ValueError)
        with pytest.raises(ValueError, match=message):
            raise error
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("name", ["makedirs", "listdir"])
def test_where_the_first_process_fails_all_do(tmp_path, two, monkeypatch, name):
    jr.save(tmp_path, None, full(1))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, name, refuse)
        call = jr.restore if name == "listdir" else functools.partial(jr.save, state=full(2))
        first, second = two(lambda index: call(tmp_path, None))
    assert "Read-only" in str(first)
    assert "the first process could not" in str(second)
    assert isinstance(second, OSError)
    assert entries(tmp_path) == ["checkpoint_0"]
    assert_same(jr.restore(tmp_path, None), full(1))


def test_processes_with_nothing_to_restore(tmp_path, two):
    assert [type(error) for error in two(lambda index: jr.restore(tmp_path, None))] == [FileNotFoundError] * 2


# --- where arrays lie


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
    for config in ({"one": one, "other": other}, [other, {"b": meshes[0]}], {"other": {"x": meshes[1], "y": one}}):
        jr.save(tmp_path, config, state)
        if isinstance(config, dict):
            config = dict(reversed(config.items()))  # the order of a dict does not matter
        restored = jr.restore(tmp_path, config)
        assert_same(restored, state)
        third = restored.pop("third")
        assert third.sharding.device_set == {jax.devices()[0]}  # on no mesh of the configuration
        where = {key: value for key, value in state.items() if key != "third"}
        assert jax.tree.map(lambda leaf: leaf.sharding, restored) == jax.tree.map(lambda leaf: leaf.sharding, where)
    moved = {"one": other, "other": one}  # as in a program that has other devices
    jr.save(tmp_path, {"one": one, "other": other}, state)
    restored = jr.restore(tmp_path, moved)
    assert restored["one"].storage.sharding == state["other"].storage.sharding
    assert restored["params"].sharding == on(meshes[0])


def test_copies_are_written_once_and_each_part_by_itself(tmp_path):
    mesh = Mesh(np.array(jax.devices("cpu")[:4]).reshape(2, 2), ("x", "y"))
    x = np.arange(48, dtype=np.int16).reshape(4, 12)
    specs = {"a": ((), 1), "b": (("x",), 2), "c": ((None, ("x", "y")), 4), "d": (("y", "x"), 4)}
    state = {name: jax.device_put(x, on(mesh, *spec)) for name, (spec, _) in specs.items()}
    jr.save(tmp_path, mesh, state)
    content, read = open_saved(tmp_path)
    for i, (_, count) in enumerate(specs.values()):
        assert len(content["leaves"][i]["parts"]) == count
        files = [file for file in (tmp_path / "checkpoint_0" / "arrays" / str(i)).iterdir() if file.name != ".zarray"]
        assert [file.stat().st_size for file in files] == [x.nbytes // count] * count
        np.testing.assert_array_equal(read(i), x)
    restored = jr.restore(tmp_path, mesh)
    assert_same(restored, state)
    assert jax.tree.map(lambda leaf: leaf.sharding, restored) == jax.tree.map(lambda leaf: leaf.sharding, state)


# --- bits


DTYPES = ["bool", "int4", "uint4", "int8", "uint8", "float8_e4m3fn", "float8_e5m2", "int16", "uint16", "float16"]
DTYPES += ["bfloat16", "int32", "uint32", "float32", "complex64", *(["int64", "float64", "complex128"] if X64 else [])]


def flipped(content, at):
    return content[:at] + bytes([content[at] ^ 1 << at % 8]) + content[at + 1 :]


@pytest.mark.parametrize("chunk", [5, 2**24])
def test_any_byte_that_is_flipped_is_noticed_and_named(tmp_path, monkeypatch, chunk):
    monkeypatch.setattr(_leaves, "CHUNK", chunk)
    rng = np.random.default_rng(0)
    state = {f"{dtype}{n}": jnp.asarray(rng.integers(0, 2, n)).astype(dtype) for dtype in DTYPES for n in (1, 3, 7)}
    state |= {"key": jax.random.key(0), "nothing": jnp.zeros((0, 3))}
    jr.save(tmp_path, None, state)
    assert_same(jr.restore(tmp_path, None), state)
    content, read = open_saved(tmp_path)
    checked = 0
    for i, record in enumerate(content["leaves"]):
        if 0 in record["shape"]:
            continue
        file = tmp_path / "checkpoint_0" / "arrays" / str(i) / "0"
        good = file.read_bytes()
        shape, dtype = _leaves.stored_type(record)
        _leaves.check_bits(record, np.frombuffer(good, dtype).reshape(shape))
        for at in range(len(good)):
            with pytest.raises(ValueError, match="differs from its saved bits"):
                _leaves.check_bits(record, np.frombuffer(flipped(good, at), dtype).reshape(shape))
            checked += 1
        file.write_bytes(flipped(good, len(good) - 1))
        name = record["path"][2:-2]
        message = "is damaged" if name.startswith("bool") else rf"leaf ..{name}.. differs from its saved bits"
        with pytest.raises(ValueError, match=message):
            read(i)
        file.write_bytes(good)
    assert checked > 390


def test_bytes_beyond_one_chunk_are_checked():
    x = np.arange(_leaves.CHUNK // 4 + 3, dtype=np.int32)
    assert _leaves.checksum(x) == zlib.crc32(x.tobytes())


def test_a_mesh_with_other_types_of_axes_is_the_same_place(tmp_path):
    mesh = Mesh(np.array(jax.devices("cpu")[:2]), ("data",))
    config = jr.Sharded(buffer=jr.ReplayBuffer(capacity=4), mesh=mesh)
    explicit = jax.make_mesh((2,), ("data",), (jax.sharding.AxisType.Explicit,), devices=jax.devices("cpu")[:2])
    jr.save(tmp_path, config, jax.device_put(np.arange(4), on(explicit, "data")))
    restored = jr.restore(tmp_path, dataclasses.replace(config))
    assert restored.sharding == on(mesh, "data")
