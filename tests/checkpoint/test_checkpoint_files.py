"""Who may write and read a checkpoint at the same time, what fails, and which bits are noticed."""

import concurrent.futures
import fcntl
import functools
import multiprocessing.pool
import os
import re
import shutil
import threading
import zlib

import jax
import numpy as np
import pytest
from checkpoint_runs import assert_same, filled, numbers_in
from faults import LONG, check_save, damaged, refuse, tree
from helpers import rejects

import jaxreplay as jr
from jaxreplay._common import files
from jaxreplay.checkpoint import _arrays, _files, _processes

pytestmark = pytest.mark.versions


def in_threads(*functions):
    """What the functions return or raise, each called in a thread of its own."""

    def call(function):
        try:
            return function()
        except Exception as error:
            return error

    with multiprocessing.pool.ThreadPool(len(functions)) as threads:
        return threads.map_async(call, functions, chunksize=1).get(LONG)


def entries(path):
    return sorted(os.listdir(path))


# --- threads


def test_threads_that_save_to_one_path_take_turns_and_readers_see_whole_states(tmp_path):
    jr.save(tmp_path, None, filled(0))
    seen, ended = [], []

    def save(first):
        try:
            for finish in [jr.save(tmp_path, None, filled(first + i), wait=i % 2 == 0) for i in range(8)]:
                finish()
        finally:
            ended.append(first)

    def read():
        while not seen or len(ended) < 3:
            seen.append(numbers_in(jr.restore(tmp_path, None, filled(0))))

    assert in_threads(read, *(functools.partial(save, first) for first in (10, 20, 30))) == [None] * 4
    assert {*map(len, seen)} == {1}
    (name,) = entries(tmp_path)  # a number is left out where a writer took a folder that another had just made
    assert 24 <= int(name.removeprefix("checkpoint_")) < 48
    assert numbers_in(jr.restore(tmp_path, None, filled(0))) < {17, 27, 37}


def test_saving_beside_a_state_in_use(tmp_path):
    """In a thread: what was given, or an error where that was donated too early. In the background: what was given.

    A saved state is still donated in place.
    """
    buffer = jr.ReplayBuffer(capacity=4096)
    state, outcomes, finishes = buffer.init(np.zeros((1, 16), np.int32)), [], []
    with concurrent.futures.ThreadPoolExecutor(4) as threads:
        for i in range(12):
            outcomes.append(threads.submit(jr.save, tmp_path / f"thread{i}", buffer, state))
            finishes.append(jr.save(tmp_path / f"background{i}", buffer, state, wait=False))
            state = buffer.add(state, rows := np.full((4096, 16), i + 1, np.int32))
    for i, (outcome, finish) in enumerate(zip(outcomes, finishes, strict=True)):
        finish()
        assert numbers_in(jr.restore(tmp_path / f"background{i}", buffer, state).storage) == {i}
        if outcome.exception() is None:
            assert numbers_in(jr.restore(tmp_path / f"thread{i}", buffer, state).storage) == {i}
        else:
            rejects("was donated to an earlier call", outcome.result)
            assert [*tmp_path.glob(f"thread{i}/*")] == []
    assert numbers_in(state.storage) == {12}
    for wait in (True, False):
        place = state.storage.unsafe_buffer_pointer()
        finish = jr.save(tmp_path / "place", buffer, state, wait=wait)
        state = buffer.add(state, rows)
        assert state.storage.unsafe_buffer_pointer() == place
        finish()


# --- what fails, and what was left over


@pytest.mark.parametrize("below", [("file", "run"), ("n" * 300,), ("file",)])
@pytest.mark.parametrize("wait", [True, False])
def test_a_folder_that_cannot_be_made_is_an_error_at_once(tmp_path, below, wait):
    (tmp_path / "file").write_text("text")
    before = {*threading.enumerate()}  # some of an earlier test may be about to end
    rejects("file|nnn", jr.save, tmp_path.joinpath(*below), None, filled(1), wait=wait, error=OSError)
    assert {*threading.enumerate()} <= before
    assert entries(tmp_path) == ["file"]


def test_a_failure_that_has_no_number_is_told_without_one(tmp_path, monkeypatch):
    monkeypatch.setattr(_arrays, "write", lambda *_: 1 / 0)
    message = rf"^{tmp_path}: cannot write a checkpoint: ZeroDivisionError"
    rejects(message, jr.save, tmp_path, None, filled(1), error=OSError)


def test_which_folders_are_checkpoints(tmp_path):
    others = (2**31, "9" * 40, "01", "007", "", "-1", "+3", "3_0", " 3", "3\n", "\u0663", "3.parts", "03.part")
    for name in (0, 9, 10, 2**31 - 1, *others, "2.part", f"{2**31}.part"):
        (tmp_path / f"checkpoint_{name}").mkdir()
    (tmp_path / "a_checkpoint_5").mkdir()
    assert _files.numbers(str(tmp_path)) == [2**31 - 1, 10, 9, 0]
    assert _files.numbers(str(tmp_path), _files.PART) == [2]
    full_folder = tmp_path / "full"
    (full_folder / f"checkpoint_{2**31 - 1}").mkdir(parents=True)
    rejects("is the last; move the checkpoints to another folder", jr.save, full_folder, None, filled(1), error=OSError)


def test_chunks_are_small_in_every_shape():
    for shape, chunk in (((10, 2**22), (1, 2**22)), ((2, 3 * 2**22), (1, 2**22)), ((2**23,), (2**22,))):
        assert _arrays.chunks_of(shape, np.dtype("uint8"), shape).chunk == chunk, shape
    for size in (6, 2**22 + 4, 2 * 4_194_319, 6 * 2**22):  # of two shards; the third is a prime, in one chunk
        (chunk,) = _arrays.chunks_of((2 * size,), np.dtype("uint8"), (size,)).chunk
        assert size % chunk == 0
        assert chunk <= 2**22 or size == 2 * 4_194_319


OURS = ("", "description.json.new arrays/0/.zarray arrays/12/0.1 arrays/12/10", "description.json notes.txt")
OF_OTHERS = ("description.json.old", "descriptionxjson.new", "arrays/0/.zarray notes.txt", "deep/arrays/0/0")
OF_OTHERS += ("arrays/x/0", "arrays/0/0/0", "arrays/0/c", "arrays/0/.zattrs", "arrays/0/xzarray")


@pytest.mark.parametrize("names", [*OURS, *OF_OTHERS])
def test_which_files_a_save_has_left(tmp_path, names):
    for name in names.split():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    assert _files._is_ours(str(tmp_path)) == (names in OURS)
    rejects("gone", _files._is_ours, str(tmp_path / "gone"), error=FileNotFoundError)  # it does not count as empty


def test_nothing_is_read_of_a_file_that_is_only_checked(tmp_path):
    (tmp_path / "file").write_bytes(b"abcdef")
    files.read_into(str(tmp_path / "file"), 6, zlib.crc32(b"abcdef"), 2, bytearray())


def test_what_is_not_ours_is_never_deleted(tmp_path):
    """Nor restored: folders of other programs, and half a checkpoint without its description."""
    names = "1001", "1002.part", "x", "7.orbax-checkpoint-tmp"
    for folder in (*(tmp_path / f"checkpoint_{name}" for name in names), tmp_path / "other"):
        (folder / "arrays").mkdir(parents=True)
        (folder / "arrays" / "0").write_text("text")
    (tmp_path / "checkpoint_1001" / "description.json").write_text('{"sha256": 0, "content": {}}')
    for name in ("checkpoint_3", "description.json"):
        (tmp_path / name).write_text("text")
    others, before = {*entries(tmp_path)}, tree(tmp_path)
    for number in range(3):
        check_save(tmp_path, filled(number))
    assert before.items() <= tree(tmp_path).items()
    assert {*entries(tmp_path)} - others == {"checkpoint_1005"}


def before_first_call(patch, module, name, happens):
    """Let something happen before the first call of a function; a list that is empty from then."""
    call, left = getattr(module, name), [happens]

    def patched(*arguments, **named):
        if left:
            left.pop()()
        return call(*arguments, **named)

    patch.setattr(module, name, patched)
    return left


def test_a_number_that_another_writer_has_completed_meanwhile(tmp_path, monkeypatch):
    jr.save(tmp_path, None, filled(0))
    copy = functools.partial(shutil.copytree, tmp_path / "checkpoint_0", tmp_path / "checkpoint_1")
    before_first_call(monkeypatch, os, "mkdir", copy)
    check_save(tmp_path, filled(2), keep=3)
    assert entries(tmp_path) == ["checkpoint_0", "checkpoint_1", "checkpoint_2"]


def test_a_folder_that_another_writer_deletes_before_it_is_locked(tmp_path, monkeypatch):
    before_first_call(monkeypatch, fcntl, "flock", lambda: os.rmdir(tmp_path / "checkpoint_0.part"))
    check_save(tmp_path, filled(1))
    assert entries(tmp_path) == ["checkpoint_1"]


def test_the_newest_ones_are_kept_and_found_by_step(tmp_path):
    for number in range(5):
        jr.save(tmp_path, None, filled(number), step=10 * number, keep=3)
    assert entries(tmp_path) == ["checkpoint_2", "checkpoint_3", "checkpoint_4"]
    restore = functools.partial(jr.restore, tmp_path, None, filled(0))
    for number in (2, 3, 4):
        assert_same(restore(step=10 * number), filled(number))
    rejects("no complete checkpoint of step 10 there", restore, step=10, error=FileNotFoundError)
    check_save(tmp_path, filled(7), step=20, keep=3)  # of a run that has gone back
    assert_same(restore(step=20), filled(7))
    jr.save(tmp_path, None, filled(8))
    assert entries(tmp_path) == ["checkpoint_6"]
    rejects("step 20", restore, step=20, error=FileNotFoundError)


# --- damage


def test_damage_is_named_and_never_gives_a_wrong_state(tmp_path):
    """The checkpoint before is restored, if there is one."""
    rng, sizes = np.random.default_rng(0), (0, 1, 10, 2)  # in the order of their names
    states = [{str(i): jax.device_put(rng.integers(0, 99, (i, 40), np.uint8)) for i in sizes} for _ in range(2)]
    for step, one in enumerate(states):
        jr.save(tmp_path, None, one, step=step, keep=2)
    ways, restore = 0, functools.partial(jr.restore, tmp_path, None, states[0])
    for file in sorted(file for file in (tmp_path / "checkpoint_1").rglob("*") if file.is_file()):
        for _ in damaged(file):
            message = r"checkpoint_1: the checkpoint is damaged: .* use a copy of it\. Restored '.*checkpoint_0'\."
            with pytest.warns(UserWarning, match=message) as found:
                restored = restore()
            assert len(found) == 1
            assert_same(restored, states[0])
            if ways % 10 == 0:  # of this step there is no other
                rejects("is damaged|no complete checkpoint", restore, step=1, error=(ValueError, FileNotFoundError))
            ways += 1
    assert ways == 14 * (1 + 2 * 3)  # of the description, and of the files of three arrays
    assert_same(restore(), states[1])


@pytest.mark.parametrize("part", ["description.json", "arrays"])
def test_a_half_copied_checkpoint_is_named_and_does_not_stand_in_the_way(tmp_path, part):
    jr.save(tmp_path, None, filled(1))
    (tmp_path / "checkpoint_0" / part).rename(tmp_path / part)
    rejects("checkpoint_0: the checkpoint is damaged", jr.restore, tmp_path, None, filled(0))
    check_save(tmp_path, filled(2), keep=2**31 - 1)


def test_a_file_system_without_locks(tmp_path, monkeypatch):
    monkeypatch.setattr(fcntl, "flock", refuse)
    check_save(tmp_path, filled(1))
    assert entries(tmp_path) == ["checkpoint_0"]


def test_a_url_is_no_folder():
    message = "gs://bucket/run: is a URL; a checkpoint is a folder of a file system"
    for call in (jr.save, jr.restore):
        rejects(message, call, "gs://bucket/run", None, filled(1))


@pytest.mark.parametrize(("module", "name"), [(_files, "description"), (_arrays, "load"), (_files, "read")])
def test_a_checkpoint_that_is_replaced_while_it_is_read(tmp_path, monkeypatch, module, name):
    jr.save(tmp_path, None, filled(1))
    left = before_first_call(monkeypatch, module, name, lambda: jr.save(tmp_path, None, filled(2)))
    assert_same(jr.restore(tmp_path, None, filled(0)), filled(2))
    assert not left


# --- several processes of one program, played by threads


def two(function):
    """What comes of a function in two threads, each of which is a process to the checkpoint and gives its index."""
    local, told, together = threading.local(), {}, threading.Barrier(2, timeout=LONG)

    def gather(numbers):
        told[local.index] = np.array(numbers, np.uint32)
        together.wait()
        found = np.stack([told[0], told[1]])
        together.wait()
        return found

    def as_process(index):
        local.index = index
        return function(index)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_processes, "gather", gather)
        patch.setattr(jax, "process_count", lambda: 2)
        patch.setattr(jax, "process_index", lambda: local.index)
        return in_threads(*(functools.partial(as_process, index) for index in range(2)))


ONE, STRUCTURE = np.zeros(1, np.int8), "config or state: the structure differs between"
DIFFER = {  # configuration and state of a process
    "another leaf": (lambda i: (None, {"a": ONE, "b": ONE + i}), r"leaf \['b'\]: differs between processes"),
    "the first leaf": (lambda i: (None, {"a": ONE + i, "b": ONE}), r"leaf \['a'\]: differs between"),
    "a number": (lambda i: (None, {"a": i}), STRUCTURE),
    "a dtype": (lambda i: (None, {"a": ONE.astype([np.int8, np.uint8][i])}), STRUCTURE),
    "a configuration": (lambda i: (i, {"a": ONE}), STRUCTURE),
    "leaves": (lambda i: (None, [ONE] * (i + 1)), STRUCTURE),
}


@pytest.mark.parametrize(("make", "message"), DIFFER.values(), ids=DIFFER)
def test_processes_with_different_states_are_refused_before_anything_is_written(tmp_path, make, message):
    for error in two(lambda index: jr.save(tmp_path / "run", *make(index))):
        assert isinstance(error, ValueError)
        assert re.search(message, str(error))
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(("name", "call"), [("mkdir", jr.save), ("listdir", jr.restore)])
def test_where_the_first_process_fails_all_do(tmp_path, name, call):
    jr.save(tmp_path, None, filled(1))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, name, refuse)
        first, second = two(lambda index: call(tmp_path, None, filled(2)))
    assert "Read-only" in str(first)
    assert "the first process could not" in str(second)
    assert isinstance(second, OSError)
    assert entries(tmp_path) == ["checkpoint_0"]
    assert_same(jr.restore(tmp_path, None, filled(0)), filled(1))


def test_processes_with_nothing_to_restore(tmp_path):
    assert {*map(type, two(lambda _: jr.restore(tmp_path, None, filled(1))))} == {FileNotFoundError}


def test_a_description_that_is_too_large_is_not_written_and_what_is_no_file_is_closed(tmp_path, monkeypatch):
    rejects("too large a description; begin another folder", files.describe, tmp_path, {"x": 1}, 9, error=OSError)
    assert not entries(tmp_path)
    close, closed = os.close, []
    monkeypatch.setattr(os, "close", lambda number: closed.append(number) or close(number))
    rejects("is not a file", files.opened, tmp_path)
    assert closed
