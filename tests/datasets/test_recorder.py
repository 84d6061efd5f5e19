"""Recordings: what is loaded is what was added, whatever happened to those who recorded it."""

import contextlib
import errno
import itertools
import os
import random
import shutil
import signal
import time
import tracemalloc

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import seeds
from faults import Child, Fails, check_durable, damaged, full_disk, hooked, recorded
from helpers import interruptible, rarely, rejects

import jaxreplay as jr
from jaxreplay._common import files

ENVS = 3


def batch(rng, length):
    """Rows of all kinds of leaves and nodes, on the host and on a device."""
    bits, numbers = rng.integers(0, 256, (length, ENVS, 4), np.uint8), rng.normal(size=(length, ENVS, 2))
    rows = {
        "observation": {0: bits[..., None], 1: jax.device_put(numbers.astype(jnp.bfloat16))},
        "narrow": (*map(bits.view, (np.int8, jnp.float8_e4m3fn, jnp.float8_e5m2)), [(bits % 16).astype(jnp.uint4)]),
        "int4": jax.device_put((bits % 16).astype(np.int8).astype(jnp.int4)),
        "named": jr.datasets.Steps(numbers, [{}, None]),
        "a/b": [numbers > 0, numbers.astype(np.float16), (numbers + 1j).astype(np.complex64)],
        "ends": np.zeros((length, ENVS, 0), np.int32),
    }
    return rows, rng.random((length, ENVS)) < 0.2


def numbered(first, length):
    """Rows that say their time."""
    time = np.broadcast_to(np.arange(first, first + length)[:, None], (length, ENVS))
    return {"time": time, "again": np.repeat(time[..., None], 50, -1)}, time % 7 == 6


def record(folder, *adds, **named):
    with jr.datasets.Recorder(folder, **named) as recorder:
        for rows, ends in adds:
            recorder.add(rows, ends)


def check_numbered(steps, least=0):
    """They are rows 0, 1, 2, ... of `numbered`, and at least so many; an end more where it was resumed."""
    length = len(steps.ends)
    rows, ends = numbered(0, length)
    assert all(np.array_equal(steps.rows[name], rows[name]) for name in rows)
    assert not (ends & ~steps.ends).any()
    assert length >= least
    return length


def bits(tree):
    return jax.tree.structure(tree), [(x.shape, str(x.dtype), x.tobytes()) for x in jax.tree.leaves(tree)]


@pytest.mark.parametrize("part_bytes", [1, 2_000, 2**26])
def test_what_was_added_is_loaded_bit_for_bit(tmp_path, part_bytes):
    """Also by NumPy alone: it has no bfloat16, and no ends where recorders began."""
    rng, path, adds = seeds.rng("recorder", part_bytes), tmp_path / "run", []
    every = rng.integers(0, 6 if part_bytes == 1 else 30, (3, 6))
    for lengths in every:
        with jr.datasets.Recorder(path, part_bytes=part_bytes) as recorder:
            for length in lengths:
                rows, ends = batch(rng, length)
                adds.append(jax.tree.map(np.array, (rows, ends)))
                recorder.add(rows, jax.device_put(ends))
                jax.tree.map(lambda x: isinstance(x, np.ndarray) and x.fill(0), rows)  # the caller's again
                if length % 4 == 1:
                    recorder.flush()
                    assert len(jr.datasets.load(path).ends) == sum(len(x[1]) for x in adds)
    rows, ends = jax.tree.map(lambda *x: np.concatenate(x), *adds)
    parts = [{x.stem: np.load(x) for x in part.glob("*.npy")} for part in sorted(path.glob("part_*"))]
    for name, x in {"ends": ends, "observation.1": rows["observation"][1].view(np.uint16)}.items():
        assert np.array_equal(np.concatenate([part[name] for part in parts]), x)
    assert all(sum(x.nbytes for x in part.values()) <= part_bytes or len(part["ends"]) == 1 for part in parts)
    resumed = every.sum(1).cumsum()
    ends[resumed[:-1] - 1] = True
    expected = jr.datasets.Steps(rows | {"named": rows["named"]._asdict()}, ends)
    assert bits(jr.datasets.load(path)) == bits(expected)
    places = np.sort([*resumed, *rng.integers(0, resumed[-1] + 1, 4)])
    for start, stop in itertools.combinations_with_replacement(places, 2):
        part = jr.datasets.load(path, start=start, stop=stop)
        assert bits(part) == bits(jax.tree.map(lambda x, a=start, b=stop: x[a:b], expected))


def test_only_the_rows_that_are_asked_for_are_in_memory(tmp_path):
    rows, ends = {"x": np.zeros((1_000, 1, 1_000), np.float32)}, np.zeros((1_000, 1), bool)
    record(tmp_path, *[(rows, ends)] * 8, part_bytes=2**23)
    for number in (0, 3):
        shutil.rmtree(tmp_path / f"part_{number:08}")
    tracemalloc.start()
    steps = jr.datasets.load(tmp_path, start=2_200, stop=6_000)
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert most < 1.1 * steps.rows["x"].nbytes


def test_damage_is_named_and_other_parts_are_read(tmp_path):
    (tmp_path / "part.new").mkdir()  # left by a recorder that was killed in its first part
    record(tmp_path, numbered(0, 50), part_bytes=10_000)
    parts = sorted(tmp_path.glob("part_*"))
    for part in (parts[1], parts[-1]):
        first = sum(len(np.load(x / "ends.npy")) for x in parts if x < part)
        for _ in damaged(part / "again.npy"):
            rejects(str(part / "again.npy"), jr.datasets.load, tmp_path)
            check_numbered(jr.datasets.load(tmp_path, stop=first), least=first)
    shutil.rmtree(part)
    rejects(str(part), jr.datasets.load, tmp_path)


def test_what_is_refused_leaves_everything_as_it_was(tmp_path):
    record(tmp_path / "run", numbered(0, 10))
    rows, ends = numbered(10, 5)
    with jr.datasets.Recorder(tmp_path / "run") as recorder:
        rejects("another recorder writes to it", jr.datasets.Recorder, tmp_path / "run")
        rejects(r"leaf \['again'\]: got float32\[3, 50\]", recorder.add, jax.tree.map(np.float32, rows), ends)
        rejects(r"leaf \['again'\]: got int64\[2, 50\]", recorder.add, *jax.tree.map(lambda x: x[:, :2], (rows, ends)))
        rejects(r"missing \['again'\]", recorder.add, {"time": rows["time"]}, ends)
        rejects(r"unexpected \['more'\]", recorder.add, rows | {"more": ends}, ends)
        rejects(r"ends: got bool\[4, 3\]", recorder.add, rows, ends[1:])
        rejects(r"ends: got int64\[5, 3\]", recorder.add, rows, ends.astype(np.int64))
        rejects("leading axes", recorder.add, rows | {"time": rows["time"][1:]}, ends)
        rejects("got <U1", recorder.add, rows | {"time": np.full((5, ENVS), "a")}, ends)
        recorder.add(rows, ends)
    rejects("block has ended", recorder.add, rows, ends)
    rejects("block has ended", recorder.flush)
    assert check_numbered(jr.datasets.load(tmp_path / "run")) == 15
    rejects("stop=16: must be an integer from 0 to 15", jr.datasets.load, tmp_path / "run", stop=16)
    rejects("is a URL", jr.datasets.Recorder, "gs://bucket/run")
    for name, content in (("notes.txt", "mine"), ("description.json", '{"a": 1}')):
        (tmp_path / name).mkdir()
        (tmp_path / name / name).write_text(content)
        for call in (jr.datasets.Recorder, jr.datasets.load):
            rejects("holds no recording|of another program", call, tmp_path / name)
        assert os.listdir(tmp_path / name) == [name]
    rejects("holds no recording", jr.datasets.load, tmp_path / "nothing")
    rejects("notes.txt", jr.datasets.Recorder, tmp_path / "notes.txt" / "notes.txt", error=NotADirectoryError)


@pytest.mark.parametrize("number", [errno.EACCES, rarely(errno.EMFILE), rarely(errno.ENOSPC)])
def test_an_error_at_each_call_of_a_recorder(tmp_path, number):
    """The block raises it; what was there before remains, and the next recorder goes on."""
    record(tmp_path / "old", numbered(0, 10))
    for first in range(100):
        path, fails, raised = tmp_path / str(first), Fails(number, first), None
        shutil.copytree(tmp_path / "old", path)
        try:
            with hooked(path, fails):
                record(path, numbered(10, 5), numbered(15, 5), part_bytes=5_000)
        except OSError as error:
            raised = error
        if not fails.has_failed and raised is None:
            break
        length = check_numbered(jr.datasets.load(path), least=10)
        assert length == 20 if raised is None else raised.errno == number
        record(path, numbered(length, 5))
        assert check_numbered(jr.datasets.load(path)) == length + 5
    assert first > 10


def test_a_full_disk(tmp_path):
    path = tmp_path / "run"
    record(path, numbered(0, 100))
    recorder = jr.datasets.Recorder(path)
    recorder.add(*numbered(100, 1_000))
    with full_disk(2**20):
        for call in (recorder.flush, recorder.flush, lambda: recorder.add(*numbered(1_100, 1)), recorder.__exit__):
            rejects("run: cannot record: .*File too large", call, error=OSError)
    assert sorted(os.listdir(path)) == ["description.json", "part_00000000"]
    assert check_numbered(jr.datasets.load(path)) == 100
    record(path, numbered(100, 500))
    assert check_numbered(jr.datasets.load(path)) == 600


def test_a_part_is_durable_before_it_gets_its_name(tmp_path, monkeypatch):
    path, events = tmp_path / "deep" / "run", recorded(monkeypatch)
    record(path, numbered(0, 20), part_bytes=5_000)
    monkeypatch.undo()
    named, parts = check_durable(events, str(path), "part.new"), sorted(map(str, path.glob("part_*")))
    assert [events[i][2] for i in named] == parts
    assert len(parts) > 2
    moved = [("replace", f"{part}/description.json", f"{path}/description.json") for part in parts]
    assert [events[i + 2][:3] for i in named] == moved


def record_for_ever(path, connection):
    """Record rows of growing time; tell how many were added, and how many `flush` has made durable."""
    interruptible()
    rng, length = random.Random(), check_numbered(jr.datasets.load(path))
    with contextlib.suppress(KeyboardInterrupt), jr.datasets.Recorder(path, part_bytes=20_000) as recorder:
        while True:
            connection.send(("durable", length))
            for count in rng.choices(range(1, 40), k=rng.randrange(20)):
                connection.send(("begun", length + count))
                recorder.add(*numbered(length, count))
                length += count
                connection.send(("added", length))
            recorder.flush()


@pytest.mark.parametrize("each", [2, rarely(100)])
def test_recorders_that_are_killed_at_random_moments(tmp_path, children, each):
    """Finished parts are whole. After Ctrl-C all added rows are there, also those of the interrupted call."""
    path, rng, torn = tmp_path / "run", random.Random(0), 0
    record(path, numbered(0, 1))
    for number in [signal.SIGKILL, signal.SIGINT] * each:
        child = Child(children, record_for_ever, path)
        child.wait("durable", 1)
        until = time.monotonic() + 0.3 * rng.random()
        while time.monotonic() < until:
            check_numbered(jr.datasets.load(path), least=child.last["durable"])
            child.read()
        os.kill(child.process.pid, number)
        assert child.ended() == (-number if number == signal.SIGKILL else 0), "it does not end"
        least = child.last["durable" if number == signal.SIGKILL else "added"]
        assert check_numbered(jr.datasets.load(path), least) <= max(child.last["begun"], child.last["durable"])
        torn += (path / "part.new").exists()
        files.description(str(path))
    assert torn or each < 10


def test_a_recording_without_streams(tmp_path):
    with jr.datasets.Recorder(tmp_path / "run") as recorder:
        recorder.add({"x": np.zeros((3, 0))}, np.zeros((3, 0), bool))
    assert jr.datasets.load(tmp_path / "run").ends.shape == (3, 0)
