"""Recordings: what is loaded is what was added, whatever happened to those who recorded it."""

import contextlib
import enum
import errno
import functools
import io
import itertools
import json
import os
import pathlib
import random
import shutil
import signal
import subprocess
import sys
import time
import tracemalloc
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import seeds
from faults import LONG, OPENS, Child, Fails, check_durable, damaged, full_disk, hooked, in_time, recorded, refuse, tree
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


def check_numbered(steps, least=0, first=0):
    """They are rows `first`, `first` + 1, ... of `numbered`, to `least` at least; an end more where it was resumed."""
    rows, ends = numbered(first, len(steps.ends))
    assert all(np.array_equal(steps.rows[name], rows[name]) for name in rows)
    assert not (ends & ~steps.ends).any()
    assert first + len(ends) >= least
    return first + len(ends)


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
    assert all(len(part["ends"]) for part in parts[1:])
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
    shutil.rmtree(parts[1])
    rejects(str(parts[1]), jr.datasets.load, tmp_path)


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
    for name, content in (("notes.txt", "mine"), ("part_0", '{"a": 1}')):
        (tmp_path / name).mkdir()
        (tmp_path / name / name).write_text(content)
        for call in (jr.datasets.Recorder, jr.datasets.load):
            rejects("holds no recording", call, tmp_path / name)
        assert os.listdir(tmp_path / name) == [name]
    rejects("holds no recording", jr.datasets.load, tmp_path / "nothing")
    rejects("notes.txt", jr.datasets.Recorder, tmp_path / "notes.txt" / "notes.txt", error=NotADirectoryError)


def repeat(call):
    """Call until no `OSError` comes; the errors."""
    refused = []
    while True:
        try:
            call()
        except OSError as error:
            refused.append(error)
        else:
            return refused


@pytest.mark.parametrize(("number", "more"), [(errno.EMFILE, 20), rarely((errno.EACCES, 0)), rarely((errno.ENOSPC, 5))])
def test_a_call_that_fails_adds_nothing_and_the_next_one_all(tmp_path, number, more):
    """The call of the system and `more` after it fail, in the background too. Each `add` is repeated."""
    record(tmp_path / "old", numbered(0, 10))
    refused = []
    for first in itertools.count():
        path, fails, recorder = tmp_path / str(first), Fails(number, first, more), contextlib.nullcontext()
        shutil.copytree(tmp_path / "old", path)
        with hooked(path, fails, [*OPENS, (os, "mkdir"), (os, "rename")]), contextlib.suppress(OSError):
            recorder = jr.datasets.Recorder(path, part_bytes=20_000)
            for at in range(10, 50, 8):
                refused += repeat(functools.partial(recorder.add, *numbered(at, 8)))
            refused += repeat(recorder.flush)
            assert check_numbered(jr.datasets.load(path)) == 50
        with recorder:
            pass
        length = check_numbered(jr.datasets.load(path), least=10)
        record(path, numbered(length, 5))
        assert check_numbered(jr.datasets.load(path)) == length + 5
        if not fails.has_failed:
            break
    assert first > 30
    assert {error.errno for error in refused} == {number}
    assert len(refused) > (10 if more else 5)  # in the background one is not heard


def test_a_full_disk(tmp_path):
    path = tmp_path / "run"
    record(path, numbered(0, 100))
    recorder = jr.datasets.Recorder(path)
    recorder.add(*numbered(100, 1_000))
    with full_disk(2**20):
        for call in (recorder.flush, recorder.flush, lambda: recorder.add(*numbered(1_100, 1)), recorder.__exit__):
            rejects("run: cannot record: .*File too large", call, error=OSError)
    assert os.listdir(path) == ["part_00000000"]
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


def record_for_ever(path, first, connection):
    """Record rows of growing time; tell how many were added, and how many `flush` has made durable."""
    interruptible()
    rng, length = random.Random(), check_numbered(jr.datasets.load(path, start=first), first=first)
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
    path, rng, torn, first = tmp_path / "run", random.Random(0), 0, 1

    def check(least):
        return check_numbered(jr.datasets.load(path, start=first), least, first)  # all that the child has recorded

    record(path, numbered(0, 1))
    for number in [signal.SIGKILL, signal.SIGINT] * each:
        child = Child(children, record_for_ever, path, first)
        child.wait("durable", 1)
        until = time.monotonic() + 0.3 * rng.random()
        while time.monotonic() < until:
            check(child.last["durable"])
            child.read()
        os.kill(child.process.pid, number)
        assert child.ended() == (-number if number == signal.SIGKILL else 0), "it does not end"
        length = check(child.last["durable" if number == signal.SIGKILL else "added"])
        assert length <= max(child.last["begun"], child.last["durable"])
        torn, first = torn + (path / "part.new").exists(), length
    assert check_numbered(jr.datasets.load(path)) == length
    assert torn or each < 10


def test_a_recording_without_streams(tmp_path):
    with jr.datasets.Recorder(tmp_path / "run") as recorder:
        recorder.add({"x": np.zeros((3, 0))}, np.zeros((3, 0), bool))
    assert jr.datasets.load(tmp_path / "run").ends.shape == (3, 0)


def test_threads_record_whole_calls_in_one_piece(tmp_path):
    """Rows are numbered within their call, and all leaves of a row are of one call."""

    def add(thread):
        for call in range(thread * 1_000, thread * 1_000 + 300):
            calls = np.full((1 + call % 7, 1), call)
            recorder.add({"call": calls, "row": np.arange(len(calls))[:, None], "again": -calls}, calls < 0)

    with in_time(), jr.datasets.Recorder(tmp_path, part_bytes=999) as recorder, ThreadPoolExecutor(3) as pool:
        [*pool.map(add, range(3))]
    rows = {name: x[:, 0].tolist() for name, x in jr.datasets.load(tmp_path).rows.items()}
    began = [i for i, row in enumerate(rows["row"]) if row == 0]
    calls = [rows["call"][i] for i in began]
    assert sorted(calls) == [x for x in range(3_000) if x % 1_000 < 300]
    assert rows["call"] == [-x for x in rows["again"]] == [call for call in calls for _ in range(1 + call % 7)]
    assert rows["row"] == [row for call in calls for row in range(1 + call % 7)]
    assert calls != sorted(calls)


def test_a_folder_that_is_another_one_is_left_alone(tmp_path):
    recorder = jr.datasets.Recorder(tmp_path / "run")
    recorder.add(*numbered(0, 10))
    shutil.rmtree(tmp_path / "run")
    rejects("run: cannot record", recorder.flush, error=FileNotFoundError)
    record(tmp_path / "run", numbered(0, 20))
    (tmp_path / "run" / "part.new").mkdir()
    before = tree(tmp_path)
    for call in (recorder.flush, lambda: recorder.add(*numbered(10, 1)), recorder.__exit__):
        rejects("the folder is another one now; make a new recorder", call, error=FileNotFoundError)
    assert tree(tmp_path) == before


def test_where_nothing_can_be_written_there_is_no_recorder(tmp_path):
    record(tmp_path, numbered(0, 10))
    before = tree(tmp_path)
    for calls in ([(os, "mkdir")], [(io, "FileIO")]):
        with hooked(tmp_path, refuse, calls):
            rejects(f"{tmp_path}: cannot record: .*Read-only", jr.datasets.Recorder, tmp_path, error=OSError)
    assert tree(tmp_path) == before


def test_names_of_leaves_are_names_of_files(tmp_path):
    """Also where many are long and alike, or differ by case alone."""
    names = ["A", "a", "../a", "..", "", "b/c", "b.c", "b\\c", "ends", "\u6f22" * 90]
    names += [f"{'x' * 300}{i}" for i in range(20)]
    x = np.arange(3)[:, None]
    record(tmp_path, ({name: x + i for i, name in enumerate(names)}, x < 0))
    found = {name: int(x[0, 0]) for name, x in jr.datasets.load(tmp_path).rows.items()}
    assert found == {name: i for i, name in enumerate(names)}
    files = [x.name.lower() for x in tmp_path.glob("part_*/*")]
    assert len({*files}) == len(files) == len(names) + 2


def test_a_part_costs_the_same_however_many_there_are(tmp_path):
    """Of a recording of many parts, few files are read for a few rows."""
    with jr.datasets.Recorder(tmp_path) as recorder:
        for at in range(60):
            recorder.add(*numbered(at, 1))
            recorder.flush()
    sizes = [len((tmp_path / f"part_{i:08}" / "description.json").read_bytes()) for i in (1, 59)]
    assert sizes[1] - sizes[0] <= len("59") * 2
    opens = []
    with hooked(tmp_path, lambda _, path: opens.append(path), OPENS[:1]):
        assert jr.datasets.load(tmp_path, start=30, stop=32).rows["time"][:, 0].tolist() == [30, 31]
    assert len(opens) < 25


@pytest.mark.parametrize("end", ["", "1 / 0", rarely("raise SystemExit(3)")])
def test_a_program_that_ends_without_the_block_has_recorded_all(tmp_path, end):
    program = f"""if True:
        import jax, sys, numpy as np, jaxreplay as jr
        recorder = jr.datasets.Recorder(sys.argv[1], part_bytes=500)
        x = np.arange(100)[:, None]
        recorder.add({{"x": x}}, x < 0)
        {end}"""
    subprocess.run([sys.executable, "-c", program, tmp_path], capture_output=True, timeout=LONG)
    assert jr.datasets.load(tmp_path).rows["x"][:, 0].tolist() == [*range(100)]


def end_without_a_block(path, _):
    kept = globals()["kept"] = jr.datasets.Recorder(path)
    kept.add(*numbered(0, 10))


def test_a_process_that_ends_without_the_block_has_recorded_all(tmp_path, children):
    assert Child(children, end_without_a_block, tmp_path).ended() == 0
    assert check_numbered(jr.datasets.load(tmp_path)) == 10


def test_a_recorder_that_is_forgotten_has_recorded_all(tmp_path):
    for at in range(0, 60, 20):
        jr.datasets.Recorder(tmp_path, part_bytes=5_000).add(*numbered(at, 20))
    assert check_numbered(jr.datasets.load(tmp_path)) == 60


def fork_inside(path, _):
    """The child cannot use the recorder. It neither unlocks the folder, nor keeps it locked after the block."""
    with jr.datasets.Recorder(path) as recorder:
        recorder.add(*numbered(0, 10))
        theirs, ours = os.pipe()
        child = os.fork()
        if child == 0:
            for call in (lambda: recorder.add(*numbered(10, 1)), recorder.flush):
                rejects("its recorder was forked", call, error=RuntimeError)
            recorder.__exit__()
            os.write(ours, b"done")
            signal.pause()
        os.close(ours)
        assert os.read(theirs, 4) == b"done"
        rejects("another recorder writes to it", jr.datasets.Recorder, path)
        recorder.add(*numbered(10, 5))
    record(path, numbered(15, 5))
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)


def test_a_recorder_belongs_to_its_process(tmp_path, children):
    assert Child(children, fork_inside, tmp_path).ended() == 0
    assert check_numbered(jr.datasets.load(tmp_path)) == 20


def test_a_first_add_that_fails_leaves_the_recorder_as_new(tmp_path):
    x, ends, deleted = np.zeros((3, 1)), np.zeros((3, 1), bool), jnp.zeros((3, 1))
    deleted.delete()
    with jr.datasets.Recorder(tmp_path) as recorder:
        for key in (np.int64(1), float("inf"), frozenset("a"), enum.Enum("Kind", "A").A, (1, np.int64(2))):
            rejects(r"leaf \['a'\]\[.*\]: its keys cannot", recorder.add, {"a": {key: x}, "b": x}, ends)
        rejects(r"leaf \['a'\]: .*sort", recorder.add, {"a": {1: x, "b": x}, "b": x}, ends)
        rejects(r"leaf \['b'\]: .*key", recorder.add, {"a": x, "b": jax.random.split(jax.random.key(0), (3, 1))}, ends)
        rejects(r"leaf \['a'\]: .*deleted", recorder.add, {"a": deleted}, ends)
        recorder.add({("a", 1): x[:0]}, ends[:0])
    steps = jr.datasets.load(tmp_path)
    assert bits(steps.rows) == bits({("a", 1): x[:0]})
    record(tmp_path, ({("a", 1): x}, ends))
    assert bits(jr.datasets.load(tmp_path)) == bits(jr.datasets.Steps({("a", 1): x}, ends))


def test_each_byte_counts(tmp_path):
    x = np.arange(4)[:, None]
    record(tmp_path, ({"x": x}, x < 0))
    files = [x for x in tmp_path.rglob("*") if x.is_file()]
    for file in files:
        content = file.read_bytes()
        for at in range(len(content)):
            file.write_bytes(content[:at] + bytes([content[at] ^ 1 << at % 8]) + content[at + 1 :])
            rejects("part_00000000", jr.datasets.load, tmp_path)
        file.write_bytes(content)
    assert len(files) == 3


@pytest.mark.parametrize("kind", [os.mkdir, os.mkfifo, lambda path: os.symlink(f"{path}.old", path)])
@pytest.mark.parametrize("name", ["", "description.json", "again.npy"])
def test_what_is_no_file_or_folder_is_not_read(tmp_path, kind, name):
    record(tmp_path, numbered(0, 10))
    path = tmp_path / "part_00000000" / name
    os.rename(path, f"{path}.old")
    kind(path)
    rejects("part_00000000", jr.datasets.load, tmp_path)


DEEP = 10**5
HOSTILE = {
    "recording": [2, None],
    "rows": ["(" * DEEP, "[" * 90 + "]" * 90, "-" * DEEP + "1", "print()", "{[]: 'time'}", "['time']", "{", 5],
    "first": [-1, 10**9, 2**63, 0.0, "0", None],
    "length": [-1, 11, 2**62, 10.0, "10", None],
    "types.time": [["O", [3]], ["V8", [3]], ["i4,i4", [3]], ["int64", [2**62]], ["int64", [-3]], ["no", [3]], 7],
    "types.ends": [["bool", []], ["bool", [2**60]], ["bool", ["3"]], ["uint8", [4]]],
    "files.time": [[2**60, 1], [368.0, 1], [368], [368, "1"], None, "ab"],
    "more": [1],
}


def test_descriptions_of_strangers(tmp_path):
    """They are refused in little memory, and nothing is written outside of a recording."""
    record(tmp_path / "run", numbered(0, 10))
    part = str(tmp_path / "run" / "part_00000000")
    content = files.description(part)
    changed = [
        json.loads(json.dumps(content).replace("time", name)) for name in ("../time", "/time", "a/b", "\\u0000", "")
    ]
    for place, values in HOSTILE.items():
        outer, _, inner = place.partition(".")
        changed += [content | {outer: content[outer] | {inner: x} if inner else x} for x in values]
    changed += [{name: content[name] for name in content if name != missing} for missing in content]
    changed += [b"[" * DEEP, b"\xff", b"{}", b"null"]
    tracemalloc.start()
    for one in changed:
        if isinstance(one, bytes):
            pathlib.Path(part, "description.json").write_bytes(one)
        else:
            files.describe(part, one)
        before = tree(tmp_path)
        for call in (jr.datasets.load, jr.datasets.Recorder):
            if not (call is jr.datasets.Recorder and one == content | {"first": 10**9}):
                rejects(part, call, tmp_path / "run")
        assert tree(tmp_path) == before
    assert tracemalloc.get_traced_memory()[1] < 5e7
    tracemalloc.stop()
    assert len(changed) > 50
