"""Saves that are cut off: by signals, errors and power cuts. A complete checkpoint is always there."""

import collections
import contextlib
import io
import itertools
import os
import random
import signal
import sys
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checkpoint_runs import assert_same, filled, numbers_in
from faults import LONG, WITHIN, Child, check_durable, in_time, recorded, refuse
from helpers import interruptible, rarely

import jaxreplay as jr
from jaxreplay.checkpoint import _arrays, _files
from jaxreplay.checkpoint._writing import Writing

pytestmark = pytest.mark.versions
LIKE = filled(0)


def save_until_signalled(path, connection):
    """Save states of growing numbers, and tell of each save when it begins, returns, and is on the disk."""
    sys.stderr = io.StringIO()  # of the error by which it ends
    interruptible()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    for number in itertools.count():
        connection.send(("begin", number))
        finish = jr.save(path, None, filled(number % 128), step=number, wait=number % 2 > 0, keep=2)
        connection.send(("returned", number))
        finish()
        connection.send(("end", number))


def restored(path):
    (number,) = numbers_in(jr.restore(path, None, LIKE))
    return number


@pytest.mark.parametrize("each", [1, rarely(40)])
def test_a_program_that_is_ended_at_any_moment_leaves_a_complete_checkpoint(tmp_path, children, each):
    """Also the save that had begun, unless it was killed: it is completed, and then the program ends."""
    rng, seen, path = random.Random(0), collections.Counter(), tmp_path / "run"
    for number in [signal.SIGKILL, signal.SIGINT, signal.SIGTERM] * each:
        saving = Child(children, save_until_signalled, path)
        saving.wait("end", 1)
        started = time.monotonic()
        saving.wait("end", 3)
        time.sleep((time.monotonic() - started) * rng.random())
        os.kill(saving.process.pid, number)
        assert saving.ended() == (-number if number == signal.SIGKILL else 1), "it does not end"
        last, found = saving.last, restored(path)
        assert last["end" if number == signal.SIGKILL else "returned"] % 128 <= found <= last["begin"] % 128
        assert len(_files.numbers(path)) in (2, 3)
        seen["left over"] += bool(_files.numbers(path, _files.PART))
        seen["unfinished"] += last["end"] < last["begin"]
        jr.save(path, None, filled(found), keep=2)
        assert [*path.glob("*.part/arrays*")] == [], "a later save has not deleted it"
        assert len(_files.numbers(path)) == 2
    assert seen["unfinished"] > each // 2
    assert seen["left over"] > 0 or each < 10, seen


def test_a_save_after_an_interrupted_one_is_the_newest(tmp_path, monkeypatch):
    """Also where the writer of the interrupted one is slow to begin, such as on a busy machine."""
    begin, pauses = _files.begin, iter([0.5])
    monkeypatch.setattr(_files, "begin", lambda *arguments: (time.sleep(next(pauses, 0)), begin(*arguments))[1])
    with pytest.raises(pytest.fail.Exception), in_time(0.1):
        jr.save(tmp_path, None, filled(1), keep=2)
    jr.save(tmp_path, None, filled(2), keep=2)
    wait_for_writers()
    assert restored(tmp_path) == 2
    assert len(_files.numbers(tmp_path)) == 2


def wait_for_writers():
    for thread in threading.enumerate():
        if isinstance(thread, Writing):
            assert thread.ended.wait(LONG)


def interrupted(call, at, where=f"{os.sep}checkpoint{os.sep}_"):
    """Call a function, with an interrupt at the moment `at` of this thread in files of this name; True if it came."""
    moments, previous = itertools.count(), sys.gettrace()

    def trace(frame, event, _):
        if where in frame.f_code.co_filename:
            if next(moments) == at:
                signal.raise_signal(signal.SIGUSR1)
            return trace

    try:
        signal.signal(signal.SIGUSR1, signal.default_int_handler)
        sys.settrace(trace)
        call()
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(previous)
        signal.signal(signal.SIGUSR1, signal.SIG_DFL)
    return False


@pytest.mark.filterwarnings("ignore:unclosed file")  # of an interrupt between two lines
@pytest.mark.parametrize("step", [29, rarely(5)])
@pytest.mark.parametrize("wait", [True, False])
def test_an_interrupt_at_any_moment_of_save(tmp_path, wait, step):
    jr.save(tmp_path, None, LIKE)
    # Each empty folder that is left adds moments to all later saves: those after the 660th are the same again.
    for at in (*range(random.Random(0).randrange(step), 660, step), 10**6):
        number = at % 100 + 1
        was_interrupted = interrupted(lambda number=number: jr.save(tmp_path, None, filled(number), wait=wait)(), at)
        wait_for_writers()
        assert restored(tmp_path) in ((0, number) if was_interrupted else (number,)), at
        jr.save(tmp_path, None, LIKE, wait=wait)()
        assert restored(tmp_path) == 0
    assert not was_interrupted
    assert [*tmp_path.glob("*.part/arrays*")] == [], "a later save has not deleted it"


@pytest.mark.parametrize("fails", [False, True])
def test_an_interrupt_leaves_no_lock_held_without_which_the_writer_does_not_end(tmp_path, monkeypatch, fails):
    write, was_interrupted, at, returned = refuse if fails else _arrays.write, True, -1, threading.Event()
    # The save has returned before it fails, also on a busy machine, and `finish` waits.
    monkeypatch.setattr(_arrays, "write", lambda *x: (returned.wait(), time.sleep(0.01), write(*x))[-1])
    while was_interrupted:
        returned.clear()
        finish, at, was_interrupted = jr.save(tmp_path, None, LIKE, wait=False), at + 1, False
        returned.set()
        with contextlib.suppress(OSError):
            was_interrupted = interrupted(finish, at, threading.__file__)
        for event in (finish.__self__.ended, finish.__self__._reported):
            is_free = event._cond.acquire(timeout=WITHIN)
            event._cond.release()
            assert is_free, f"the lock is still held after an interrupt at {at}"
        with contextlib.suppress(OSError):
            finish()  # its error is given to somebody
    assert at > 20


X = np.arange(2**22, dtype=np.int32)


def end_while_saving(path, is_first, connection):
    """Begin saves, and end by an error; and later with a save that fails."""
    sys.stderr = path.with_name("told").open("w")
    if is_first:
        for number in range(2):
            jr.save(path, None, {"x": X + number, "n": number}, wait=False)
        raise RuntimeError("of the training")
    os.rename = refuse
    jr.save(path, None, 1, wait=False)
    sys.exit(3)


def test_a_save_that_has_begun_is_completed_or_its_error_told_when_the_program_ends(tmp_path, children):
    path, told = tmp_path / "run", tmp_path / "told"
    assert Child(children, end_while_saving, path, True).ended() == 1
    assert told.read_text().rstrip().endswith("RuntimeError: of the training")
    assert told.read_text().count("Traceback") == 1
    assert Child(children, end_while_saving, path, False).ended() == 3
    assert "Read-only file system" in told.read_text()
    assert str(path) in told.read_text()
    assert jr.restore(path, None, {"x": X, "n": 0})["n"] == 1
    assert len(os.listdir(path)) == 1


def test_all_of_a_checkpoint_is_durable_before_an_older_one_is_touched(tmp_path, monkeypatch):
    """Else a power cut could leave neither: files and folders may reach the disk in any order until they are synced."""
    path = str(tmp_path / "deep" / "run")
    state, events = LIKE | {"key": jax.random.key(0), "n": 5, "weak": jnp.asarray(2.5)}, recorded(monkeypatch)
    for _ in range(3):
        jr.save(path, None, state)
    monkeypatch.undo()
    named = check_durable(events, path, _files.PART)
    assert [events[i][2] for i in named] == [os.path.join(path, f"checkpoint_{n}") for n in range(3)]
    assert all(len(events[i][3]) > 10 for i in named)
    for name, where, *_ in events[: named[0] + 2]:
        is_own = where.startswith(events[named[0]][1])
        assert is_own or name in ("fsync", "rename", "replace"), "an older one goes first"
    gone = [where for name, where, *_ in events if name in ("unlink", "rmdir") and "checkpoint_0" in where]
    assert gone[-2:] == [f"{path}/checkpoint_0.part/description.json", f"{path}/checkpoint_0.part"]
    assert_same(jr.restore(path, None, state), state)
