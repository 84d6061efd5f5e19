"""A Shared by itself: what its calls do, wait for and raise."""

import concurrent.futures
import contextlib
import os
import subprocess
import sys
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import items, numbers, over_devices, rarely, rejects

import jaxreplay as jr
from jaxreplay.wrappers import _turns

SOON, LONG = 0.05, 20  # seconds: to see that a call waits, and to give up
KEY = jax.random.key(0)


@pytest.fixture(autouse=True)
def no_second_look(monkeypatch):
    """A thread that is not woken waits for ever."""
    monkeypatch.setattr(_turns, "LOOK_AGAIN", 10 * LONG)


def batch(first=0, count=4):
    """So many rows, numbered from `first`."""
    return items(numbers(first, count))


def replay(capacity=16, **settings):
    buffer = jr.ReplayBuffer(capacity=capacity, sampler=jr.Prioritized(alpha=1.0, epsilon=0.0), **settings)
    return buffer, buffer.init(batch())


def shared_replay(**settings):
    return jr.Shared(*replay(), **settings)


@contextlib.contextmanager
def thread(function, *arguments):
    """A thread that runs during the block, and ends soon after; its future."""
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        future = pool.submit(function, *arguments)
        yield future
        concurrent.futures.wait([future], LONG)
        assert future.done()


@contextlib.contextmanager
def held(block):
    """Another thread is in a block during this one."""
    entered, leave = threading.Event(), threading.Event()

    def hold():
        with block:
            entered.set()
            assert leave.wait(LONG)

    with thread(hold) as holder:
        assert entered.wait(LONG)
        try:
            yield
        finally:
            leave.set()
    holder.result()  # an error if it left by itself, as this block took too long


def waits(future):
    time.sleep(SOON)
    return not future.done()


@contextlib.contextmanager
def waiting_draw(shared, count=4):
    """A draw of another thread, which waits when the block begins; it has drawn when the block has ended."""
    with thread(shared.sample, KEY, count) as drawn:
        assert waits(drawn)
        yield drawn
    assert isinstance(drawn.result(), jr.Sample)
    assert drawn.result().indices.shape == (count,)


def cause(message, function, *arguments):
    """The cause of the `Closed` that a call raises with this message."""
    with pytest.raises(jr.Closed, match=message) as caught:
        function(*arguments)
    return caught.value.__cause__


def stored(shared):
    """All numbers of the items of a ReplayBuffer, oldest first."""
    with shared.state() as cell:
        newest = np.asarray(shared.buffer.newest(cell.state, 16))
        return shared.buffer.get(cell.state, newest)["id"][newest >= 0].tolist()


# --- calls ---------------------------------------------------------------------------------------------------------


def test_its_calls_are_those_of_the_buffer():
    """And what it has returned outlives the donated state."""
    buffer, state = replay()
    shared, td_errors = jr.Shared(buffer, state), np.arange(8, dtype=np.float32)
    state = buffer.init(batch())
    shared.add(batch(0, 8), td_errors=td_errors)
    state = buffer.add(state, batch(0, 8), td_errors=td_errors)
    with shared.state() as cell:
        diagnostics, size = jr.diagnostics(buffer, cell.state), cell.state.ring.size
    drawn, expected = shared.sample(KEY, 8, beta=0.5, max_age=6), buffer.sample(state, KEY, 8, beta=0.5, max_age=6)
    shared.update(drawn.indices, td_errors)
    state = buffer.update(state, drawn.indices, td_errors)
    values, mask = {"id": numbers(100, 8), "x": None}, np.arange(8) < 5
    shared.set(drawn.indices, values, mask=mask)
    state = buffer.set(state, drawn.indices, values, mask=mask)
    shared.add(batch(8))
    state = buffer.add(state, batch(8))
    jax.tree.map(np.testing.assert_array_equal, drawn, expected)
    assert (shared.size(), type(shared.size())) == (12, int)
    with shared.state() as cell:
        jax.tree.map(np.testing.assert_array_equal, cell.state, state)
    assert size.is_deleted()
    assert not any(x.is_deleted() for x in jax.tree.leaves(diagnostics))


def test_a_call_in_the_process_that_made_it_only(monkeypatch):
    """Which is said at once: a fork would wait for ever for the lock that a thread holds here."""
    shared = shared_replay()
    with held(shared.state()), monkeypatch.context() as patch:
        patch.setattr(os, "getpid", lambda: 0)
        for name, given in (("add", (batch(),)), ("size", ()), ("close", ())):
            message = f"{name}: this process is a fork.*start it by 'spawn'"
            rejects(message, getattr(shared, name), *given, error=RuntimeError)
    assert shared.size() == 0


# --- the state -----------------------------------------------------------------------------------------------------


def test_other_threads_wait_until_the_block_ends():
    shared = shared_replay()
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        with held(shared.state()):
            later = pool.submit(shared.add, batch())
            assert waits(later)
            message = "sample: waited for another thread, .* block of `state`"
            rejects(message, shared.sample, KEY, 1, timeout=SOON, error=TimeoutError)
        later.result(LONG)
    assert stored(shared) == [*range(4)]


def test_calls_in_the_block_are_errors():
    shared = shared_replay()
    with shared.state():
        for call in (lambda: shared.add(batch()), shared.size, shared.state().__enter__):
            rejects(r"called in a block of `state` of this thread; use cell\.state", call, error=RuntimeError)
    shared.add(batch())
    assert shared.size() == 4


def test_a_block_that_raises_before_the_state_is_assigned_changes_and_counts_nothing():
    shared = shared_replay(ratio=1, slack=100)
    shared.add(batch())
    shared.sample(KEY, 2)
    counts = shared.added, shared.drawn
    with pytest.raises(KeyError), shared.state(added=4, drawn=3):
        raise KeyError
    assert (shared.added, shared.drawn) == counts
    with contextlib.suppress(KeyError), shared.state(added=4) as cell:
        cell.state = shared.buffer.add(cell.state, batch(4))
        raise KeyError
    assert (shared.added, shared.drawn) == (counts[0] + 4, counts[1])
    assert stored(shared) == [*range(8)]


def test_a_state_of_another_buffer_is_refused():
    shared, (buffer, state), other = shared_replay(), replay(), jr.ReplayBuffer(capacity=16)
    flat = buffer.init({"id": numbers(0, 4), "x": np.zeros(4, np.float32)})
    for wrong, message in (
        (other.init(batch()), r"missing \.sampler.* a state of the buffer stores"),
        (replay(32)[1], "a state of the buffer stores"),
        (flat, r"leaf .storage\['x'\]: got float32\[16\], a state of the buffer stores float32\[16, 2\]"),
        (jax.device_get(state), "its leaves must be arrays of JAX"),
        (None, "got PyTreeDef"),
    ):
        with pytest.raises(ValueError, match=rf"cell\.state: .*{message}"), shared.state() as cell:
            cell.state = wrong
    shared.add(batch())
    assert shared.size() == 4


def test_a_donated_state_that_is_not_replaced_closes_it():
    shared = shared_replay()
    with pytest.raises(RuntimeError, match=r"cell\.state was donated and not replaced"), shared.state() as cell:
        shared.buffer.add(cell.state, batch())
    for call in (shared.size, lambda: shared.add(batch())):
        assert "not replaced" in str(cause(r"by RuntimeError.*was donated and not replaced", call))


def add_in_a_block(shared, rows):
    with shared.state() as cell:
        cell.state = shared.buffer.add(cell.state, rows)


@pytest.mark.parametrize("add_to", [jr.Shared.add, add_in_a_block])
@pytest.mark.parametrize("error", [KeyboardInterrupt(), RuntimeError("out of memory")])
def test_an_error_after_the_donation_closes_it(monkeypatch, error, add_to):
    shared = shared_replay()
    add = jr.ReplayBuffer.add

    def consume(*arguments, **named):
        add(*arguments, **named)
        raise error

    monkeypatch.setattr(jr.ReplayBuffer, "add", consume)
    rejects(f"^{error}$", add_to, shared, batch(), error=type(error))
    assert cause("sample: closed by thread", shared.sample, KEY, 4) is error


def test_an_error_before_the_donation_changes_nothing():
    shared = shared_replay(ratio=1, slack=100)
    shared.add(batch())
    shared.sample(KEY, 1)
    for wrong in ({"id": numbers(0, 4)}, batch(0, 17), None, {"id": 1, "x": 2}, items(np.zeros((3, 2), int))):
        rejects(r"leaf|batch|structure|items|holds", shared.add, wrong)
    rejects("mask", shared.add, batch(), mask=np.ones(3, bool))
    rejects("add", shared.add, error=TypeError)
    rejects("add: a Shared is an object", jax.jit(shared.add), batch(), error=RuntimeError)
    rejects("batch_size", shared.sample, KEY, 0)
    assert (shared.added, shared.drawn, shared.closed) == (0, 1, False)
    assert stored(shared) == [*range(4)]


# --- waiting -------------------------------------------------------------------------------------------------------


def test_the_first_draw_waits_for_min_size():
    shared = shared_replay(min_size=6)
    with waiting_draw(shared) as drawn:
        shared.add(batch())
        assert waits(drawn)
        shared.add(batch(4), mask=np.array([True, False, False, False]))
        assert waits(drawn)
        shared.add(batch(8))


def test_a_draw_that_waits_goes_on_when_another_thread_finds_enough_items():
    shared = shared_replay(ratio=1, slack=6, min_size=4)
    with shared.state() as cell:  # no count tells that there are items
        cell.state = shared.buffer.add(cell.state, batch(0, 3))
    with waiting_draw(shared), shared._turns._changed:
        shared._turns.limiter.begin()  # as an actor does, whose addition then has to wait
        shared._turns._changed.notify_all()


def test_min_size_counts_sequences_that_may_be_drawn():
    buffer = jr.SequenceBuffer(length=8, num_envs=1, sequence_length=3, windows="inside")
    shared = jr.Shared(buffer, buffer.init(np.zeros((1, 1))), ratio=1, min_size=2)
    ends = np.array([[False], [True]])
    for _ in range(3):
        shared.add(np.zeros((2, 1)), ends=ends)  # no sequence of three lies in an episode of two
    rejects("draws have not begun", shared.sample, KEY, 1, timeout=SOON, error=TimeoutError)
    shared.add(np.zeros((4, 1)), ends=np.zeros((4, 1), bool))
    assert shared.sample(KEY, 1).mask.all()


def test_rows_of_sequences_and_of_sources_are_counted():
    streams = jr.SequenceBuffer(length=8, num_envs=2, sequence_length=2)
    buffer = jr.Mixture(buffers=(streams, streams))
    shared = jr.Shared(buffer, buffer.init(np.zeros((3, 2))), ratio=1, slack=100)
    shared.add(0, np.zeros((3, 2)))
    shared.sample(KEY, 2)
    shared.add(1, np.zeros((3, 2)))
    shared.add(source=1, items=np.zeros((2, 2)))
    shared.actor(0).add(np.zeros((2, 2)))
    shared.add(np.int64(1), np.zeros((1, 2)))
    assert shared.added == 6 + 4 + 4 + 2


def test_timeouts_say_who_is_ahead():
    shared = shared_replay(ratio=4, slack=8)
    begin = r"^sample: ratio=4, 0 items added; .* min_size=1. Waited .* s; does the"
    rejects(begin, shared.sample, KEY, 1, timeout=SOON, error=TimeoutError)
    shared.add(batch())
    shared.sample(KEY, 8)
    rejects(r"^sample: .*0 items added and 8 drawn since", shared.sample, KEY, 1, timeout=SOON, error=TimeoutError)
    rejects("^state: ", shared.state(drawn=1, timeout=0).__enter__, error=TimeoutError)
    for first in range(4):
        shared.add(batch(first, 1))
    ahead = "^add: .*the additions are ahead by 8 draws, slack=8"
    rejects(ahead, shared.add, batch(0, 1), timeout=0, error=TimeoutError)
    rejects("wrong structure", shared.add, {}, timeout=0)  # which no waiting would mend
    assert (shared.added, shared.drawn) == (4, 8)


def test_a_single_thread_that_would_wait_for_itself_is_an_error(monkeypatch):
    shared = shared_replay(ratio=1)
    monkeypatch.setattr(threading, "enumerate", lambda: [threading.current_thread()])
    rejects(r"sample: .* It would wait for ever, as the only thread", shared.sample, KEY, 1, error=RuntimeError)
    rejects("Waited", shared.sample, KEY, 1, timeout=0, error=TimeoutError)
    # One that Python has not started, as those of Ray, is not alone: `threading` does not list it.
    monkeypatch.setattr(threading, "enumerate", lambda: [threading.main_thread()])
    with waiting_draw(shared):
        shared.add(batch())


# --- the end -------------------------------------------------------------------------------------------------------


def test_close_wakes_all_and_then_it_is_only_read():
    buffer, state = replay(donate=False)
    shared, error = jr.Shared(buffer, state, min_size=5), ValueError("the end")
    shared.add(batch())
    with thread(shared.sample, KEY, 4) as first, thread(shared.sample, KEY, 4) as second:
        assert waits(first)
        shared.close(error)
        shared.close(ValueError("not the first"))
    for future in (first, second):
        assert cause("sample: closed by thread MainThread", future.result) is error
    calls = {"sample": (KEY, 4), "update": (np.zeros(1, int), np.zeros(1)), "add": (batch(),)}
    for name, given in (calls | {"set": (np.zeros(4, int), batch())}).items():
        rejects(name, getattr(shared, name), *given, error=jr.Closed)
    rejects("state", shared.state(drawn=1).__enter__, error=jr.Closed)

    def assign():
        with shared.state() as cell:
            cell.state = buffer.add(cell.state, batch(4))

    assert cause("state: closed", assign) is error
    assert (shared.closed, shared.size(), stored(shared)) == (True, 4, [*range(4)])


def test_a_thread_that_dies_ends_the_others():
    shared, learns = shared_replay(ratio=1, slack=8), threading.Event()

    def act():
        with shared.worker():
            shared.add(batch())
            assert learns.wait(LONG)
            raise OSError("the robot is gone")

    def learn():
        with shared.worker():
            while True:
                shared.sample(KEY, 4)
                learns.set()

    with thread(act) as actor, thread(learn) as learner:
        pass
    rejects("robot", actor.result, error=OSError)
    message = r"sample: closed by thread .*, by OSError\('the robot is gone'\)"
    assert cause(message, learner.result) is actor.exception()


@pytest.mark.parametrize("error", [None, KeyboardInterrupt, SystemExit, ValueError])
def test_the_end_of_the_main_thread_ends_the_others(error):
    shared = shared_replay(ratio=1)

    def act():
        with shared.worker():
            for first in range(10**6):
                shared.add(batch(first))
        return "ended"

    expected = contextlib.nullcontext() if error is None else pytest.raises(error)
    with thread(act) as actor, expected, shared:
        for _ in range(3):
            shared.sample(KEY, 4)
        if error is not None:
            raise error
    if error is ValueError:
        assert isinstance(actor.exception().__cause__, ValueError)
    else:
        assert actor.result() == "ended"


def test_a_call_that_waits_is_told_that_the_last_worker_has_ended():
    shared = shared_replay(ratio=1, slack=8)
    with thread(shared.sample, KEY, 4) as drawn, held(shared.worker()):
        with held(shared.worker()):
            assert waits(drawn)
        assert waits(drawn)
    assert cause(r"^sample: ratio=1, 0 items .* all blocks of `worker` have ended", drawn.result) is None
    assert not shared.closed


def test_a_worker_that_is_told_of_another_shared_closes_its_own():
    own, other = shared_replay(), shared_replay()
    other.close()
    with own.worker():
        other.add(batch())
    assert own.closed


def test_without_workers_only_calls_that_would_wait_are_told():
    shared = shared_replay(ratio=1, slack=8)
    with shared.worker():
        shared.add(batch())
    shared.sample(KEY, 8)
    told = "as all blocks of `worker` have ended"
    rejects(f"sample: .*{told}", shared.sample, KEY, 1, error=jr.Closed)
    rejects("Waited", shared.sample, KEY, 1, timeout=SOON, error=TimeoutError)
    rejects(f"state: .*{told}", shared.state(drawn=1).__enter__, error=jr.Closed)
    for first in range(4, 20, 4):
        shared.add(batch(first))
    rejects(f"add: .*{told}", shared.add, batch(20), error=jr.Closed)
    assert (shared.added, shared.drawn, shared.size()) == (16, 8, 16)


def test_a_call_may_wait_for_a_worker_that_starts_later():
    shared = shared_replay(ratio=1, slack=8)
    with shared.worker():
        shared.add(batch())
        with shared.worker():
            shared.sample(KEY, 8)
        with waiting_draw(shared):  # the outer block is left
            shared.add(batch(4))
    with shared.worker(), waiting_draw(shared):  # nor does the first end matter to a later block
        shared.add(batch(8))


def test_what_the_last_worker_added_is_drawn_before():
    shared = shared_replay(ratio=1, slack=8, min_size=4)
    with waiting_draw(shared, 8), shared.worker():
        shared.add(batch())
    rejects("as all blocks", shared.sample, KEY, 8, error=jr.Closed)


END = """
import atexit, concurrent.futures, contextlib, sys, threading, time, jax, numpy as np, jaxreplay as jr
buffer, rows = jr.ReplayBuffer(capacity=8), np.zeros(4)
waiting, free = (jr.Shared(buffer, buffer.init(rows), ratio=ratio) for ratio in (1, None))
def add(shared):
    with shared.worker():
        while True:
            shared.add(rows)
def assign():
    with contextlib.suppress(jr.Closed):
        while True:
            with free.state() as cell:
                cell.state = buffer.add(cell.state, rows)
waiting.add(rows), waiting.sample(jax.random.key(0), 4)
def thread(body, *given):
    threading.Thread(target=body, args=given).start()
start = concurrent.futures.ThreadPoolExecutor().submit if sys.argv[2] == "executor" else thread
for body, *given in ((add, waiting), (add, free), (assign,)):
    start(body, *given)
time.sleep(0.2)
with free.state() as cell:
    jr.save(sys.argv[1], buffer, cell.state, wait=False)
atexit.register(lambda: print("size", waiting.size(), "closed", waiting.closed))
"""


@pytest.mark.parametrize(
    ("threads", "last", "code"),
    [
        *(("alone", "", 0), ("executor", "raise OSError", 1)),
        *map(rarely, [("alone", "raise OSError", 1), ("alone", "sys.exit(3)", 3)]),
    ],
)
def test_the_end_of_a_program_ends_its_threads(tmp_path, threads, last, code):
    """Also of an executor, whose threads Python would wait for; the error of the program is told."""
    program = [sys.executable, "-c", END + last, str(tmp_path / "run"), threads]
    done = subprocess.run(program, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (code, "size 8 closed True\n")
    assert "thread" not in done.stderr.lower()
    assert done.stderr.rstrip().endswith(last.removeprefix("raise ")) or code != 1
    buffer = jr.ReplayBuffer(capacity=8)
    assert buffer.size(jr.restore(tmp_path / "run", buffer, buffer.init(np.zeros(4)))) == 8


# --- arguments -----------------------------------------------------------------------------------------------------


def test_arguments_that_make_no_sense():
    for message, settings in {
        "ratio=0: must be": {"ratio": 0},
        "ratio=-1.0: must be": {"ratio": -1.0},
        "ratio=True: must be": {"ratio": True},
        "slack=-1: must be": {"ratio": 2, "slack": -1},
        "slack=3: needs a ratio": {"slack": 3},
        "min_size=0: must be an integer from 1 to 16": {"min_size": 0},
        "min_size=17: must be an integer from 1 to 16": {"min_size": 17},
    }.items():
        rejects(message, shared_replay, **settings)


def test_buffers_and_states_that_make_no_sense():
    buffer, state = replay()
    rejects("must be a buffer of jaxreplay", jr.Shared, jr.bind(buffer, state), state)
    # In one line; its text is a view by NumPy, which would keep `state` from being donated.
    rejects(r"^buffer=ReplayState\(.{1,80}\.\.\.: must be", jr.Shared, replay()[1], buffer)
    buffer.add(state, batch())
    rejects("donated", jr.Shared, buffer, state)
    rejects("state: got NoneType, expected ReplayState", jr.Shared, buffer, None)
    rejects("capacity=16: this state has a leading axis of 8", jr.Shared, buffer, replay(8)[1])
    rejects("state: its leaves must be arrays of JAX", jr.Shared, buffer, jax.device_get(replay()[1]))


def test_a_timeout_that_makes_no_sense():
    shared = shared_replay()
    for timeout in (-1, float("nan"), float("inf"), "1", True):
        for call, *given in ((shared.add, batch()), (shared.sample, KEY, 1), (shared.state,)):
            message = r"timeout=.*: must be a number in \[0, .*\]; seconds, or None for no limit"
            rejects(message, call, *given, timeout=timeout)
    assert shared.size() == 0


def test_an_actor_needs_a_source():
    rejects(r"actor: .*jr.Mixture\(buffers=\(buffer,\) \* k", shared_replay().actor, 0)
    buffer = jr.Mixture(buffers=(replay()[0],) * 2)
    shared = jr.Shared(buffer, buffer.init(batch()), min_size=32)
    rejects("source=2: must be an integer from 0 to 1", shared.actor, 2)
    rejects("source=2: must be", shared.add, 2, batch())


# --- save and restore ----------------------------------------------------------------------------------------------


def test_it_goes_on_with_the_counts_of_a_checkpoint(tmp_path):
    settings = {"ratio": 4, "slack": 40}
    shared = shared_replay(**settings)
    shared.add(batch())
    drawn = shared.sample(KEY, 8)
    shared.add(batch(4))
    with shared.state() as cell:
        saved = {"replay": cell.state, "added": shared.added, "drawn": shared.drawn}
        finish = jr.save(tmp_path, {"replay": shared.buffer}, saved, wait=False)
    shared.update(drawn.indices, jnp.arange(8.0))
    finish()
    saved = jr.restore(tmp_path, {"replay": shared.buffer}, saved)
    again = jr.Shared(shared.buffer, saved.pop("replay"), **settings, **saved, min_size=10)
    assert (again.added, again.drawn) == (shared.added, shared.drawn) == (4, 8)
    again.update(drawn.indices, jnp.arange(8.0))
    for each in (shared, again):
        each.add(batch(8), timeout=0)
        rejects("8 items added and 8 drawn since", each.add, batch(12, 5), timeout=0, error=TimeoutError)
    jax.tree.map(np.testing.assert_array_equal, again.sample(KEY, 8), shared.sample(KEY, 8))


# --- devices -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_shards", [0, 2])
def test_arrays_of_another_default_device_are_moved_to_the_state(num_shards):
    """As those of actors are, that run on a device of their own."""
    own, other = jax.devices("cpu" if num_shards else None)[: max(num_shards, 1)], jax.devices("cpu")[-1]
    buffer = over_devices(replay()[0], num_shards)
    shared = jr.Shared(buffer, buffer.init(batch()))
    with jax.default_device(other):
        shared.add(batch())
        rows, mask, td_errors = jax.device_put((batch(4), np.ones(4, bool), np.ones(4, np.float32)))
        assert all(x.device == other and not x.committed for x in jax.tree.leaves(rows))
        shared.add(rows, mask=mask)
        drawn = shared.sample(jax.random.key(0), 4)
        shared.update(drawn.indices, td_errors)
        rejects("incompatible devices", shared.add, jax.device_put(batch(), other))
    with shared.state() as cell:
        assert all(x.devices() == {*own} for x in jax.tree.leaves((cell.state, drawn)))
    assert shared.size() == 8
    assert {*np.asarray(drawn.items["id"]).tolist()} <= {*range(8)}
