"""Interrupts at any moment lose nothing and leave nothing locked."""

import concurrent.futures
import contextlib
import itertools
import os
import random
import signal
import threading
import time
import types

import jax.numpy as jnp
import numpy as np
import pytest
from helpers import interruptible, rarely, rejects
from test_shared import KEY, LONG, SOON, batch, held, shared_replay, thread

import jaxreplay as jr
from jaxreplay._common import signals

PATIENCE = 5.0  # seconds, until a lock counts as held


class Program:
    """Calls of the main thread, beside a thread that calls too.

    Attributes:
      number: number of the next item; items are added in this order.
    """

    def __init__(self):
        self.buffer = buffer = jr.ReplayBuffer(capacity=64, sampler=jr.Prioritized())
        rows = np.zeros(1, np.int32)
        self.shared, self.closed = (jr.Shared(buffer, buffer.init(rows)) for _ in range(2))
        self.idle = jr.Shared(buffer, buffer.init(rows), ratio=1)  # no one adds
        handles, td_errors, self.number = jnp.arange(8), jnp.ones(8), 0

        def add():
            self.shared.add(np.array([self.number], np.int32))
            self.number += 1

        def block():
            with self.shared.state() as cell:
                state = buffer.update(cell.state, handles, td_errors)
                cell.state = buffer.add(state, np.array([self.number], np.int32))
            self.number += 1

        self.calls = {
            "add": add,
            "update": lambda: self.shared.update(handles, td_errors),
            "block": block,
            "sample": lambda: self.shared.sample(KEY, 8),
            "wait": lambda: self.idle.sample(KEY, 8),
            "close": self.closed.close,
        }
        for name in ("add", "update", "block", "sample"):
            self.calls[name]()  # and compile
        self.thread = threading.Thread(target=self.other, daemon=True)
        self.thread.start()

    def other(self):
        with self.shared.worker():
            while True:
                self.shared.sample(KEY, 8)
                time.sleep(0.0005)

    def check(self):
        """Nothing is lost or locked; another thread looks, as a lock of this thread does not stop this one."""
        with concurrent.futures.ThreadPoolExecutor(1) as looks:
            found = looks.submit(self.newest).result()
        assert signal.getsignal(signal.SIGALRM) is signal.default_int_handler
        assert found in (self.number - 1, self.number)  # the interrupt came before the number was raised
        self.number = found + 1

    def newest(self):
        """The newest item, once all states were taken."""
        for shared in (self.idle, self.closed, self.shared):
            with shared.state(timeout=PATIENCE) as cell:
                newest = self.buffer.get(cell.state, self.buffer.newest(cell.state, 1))
        return int(newest[0])


def interrupt(call):
    """Repeat the call until it is interrupted at a random moment, as by Ctrl-C."""
    try:
        signal.setitimer(signal.ITIMER_REAL, 1e-5 + random.random() ** 2 * 0.002)
        with contextlib.suppress(RuntimeError, ValueError):  # an earlier interrupt lost the state
            while True:
                call()
        time.sleep(PATIENCE)
    except KeyboardInterrupt:
        pass


def process(count):
    """The body of a process: interrupts of each call in turn."""
    interruptible()
    program = Program()
    for name, _ in zip(itertools.cycle(program.calls), range(count), strict=False):
        interrupt(program.calls[name])
        try:
            program.check()
        except Exception as error:
            raise AssertionError(f"after an interrupt of {name}") from error
    program.shared.close()
    program.thread.join()


class FirstError(Exception):
    """Raised by a handler."""


class SecondError(Exception):
    """Raised by another handler."""


@pytest.fixture
def handlers():
    """Handlers that raise, of two signals; checks that these are the handlers afterwards."""
    found = {signal.SIGUSR1: FirstError, signal.SIGUSR2: SecondError}

    def handler(number, frame):
        raise found[number]("stop")

    old = {number: signal.signal(number, handler) for number in found}
    yield
    assert [signal.signal(number, handler) for number, handler in old.items()] == [handler] * 2


@pytest.mark.parametrize("count", [60, rarely(3_000)])
def test_at_any_moment_they_lose_nothing_and_leave_nothing_locked(children, count):
    with children.Pool(1) as processes:
        processes.apply_async(process, (count,)).get(300)


def test_all_handlers_run_and_an_error_of_the_call_is_their_context(handlers):
    shared = shared_replay()

    def block():
        with shared.state():
            for number in (signal.SIGUSR2, signal.SIGUSR1, signal.SIGUSR2):
                signal.raise_signal(number)
            raise KeyError

    with pytest.raises((FirstError, SecondError)) as caught:
        block()
    last, first = caught.value, caught.value.__context__
    assert (type(first), type(last)) == (SecondError, FirstError)  # in the order in which they came
    assert isinstance(first.__context__, KeyError)
    shared.add(batch())


def test_blocks_of_two_are_interrupted_at_the_end_of_the_outer_one(handlers):
    outer, inner, reached = shared_replay(), shared_replay(), []

    def block():
        with outer.state() as cell:
            state = outer.buffer.add(cell.state, batch())
            with inner.state():
                signal.raise_signal(signal.SIGUSR1)
            inner.add(batch())
            reached.append(inner.size())
            cell.state = state

    rejects("stop", block, error=FirstError)
    assert (reached, outer.size(), outer.closed) == ([4], 4, False)


def test_a_thread_that_waits_is_interrupted(handlers):
    shared = shared_replay(ratio=1)

    def interrupt():
        time.sleep(SOON)
        os.kill(os.getpid(), signal.SIGUSR1)

    for timeout in (None, LONG):
        with thread(interrupt):
            rejects("stop", shared.sample, KEY, 1, timeout=timeout, error=FirstError)  # no one adds
    with held(shared.state()):
        for call in (shared.size, shared.close):
            with thread(interrupt):
                rejects("stop", call, error=FirstError)  # for the lock
    shared.add(batch())
    assert (shared.size(), shared.closed) == (4, False)


def test_a_handler_may_use_it():
    shared, found = shared_replay(), []

    def handler(number, frame):
        shared.add(batch(4))
        with shared.state() as cell:
            found.append(int(shared.buffer.size(cell.state)))
        shared.close()

    old = signal.signal(signal.SIGUSR1, handler)
    with contextlib.suppress(jr.Closed), shared.state() as cell:
        signal.raise_signal(signal.SIGUSR1)
        cell.state = shared.buffer.add(cell.state, batch())
    assert (signal.signal(signal.SIGUSR1, old), found, shared.closed) == (handler, [8], True)


def test_a_handler_that_the_block_installs_stays(handlers):
    mine, old = signal.default_int_handler, signal.getsignal(signal.SIGUSR1)
    with shared_replay().state():
        signal.signal(signal.SIGUSR1, mine)
    assert signal.signal(signal.SIGUSR1, old) is mine


def test_a_handler_that_raises_while_another_is_replaced(handlers, monkeypatch):
    replace = signals._signal.signal

    def raising(given, handler):
        if given == signal.SIGUSR2:
            signal.raise_signal(signal.SIGUSR2)
        return replace(given, handler)

    monkeypatch.setattr(signals, "_signal", types.SimpleNamespace(signal=raising, getsignal=signal.getsignal))
    shared = shared_replay()
    rejects("stop", shared.size, error=SecondError)
    monkeypatch.undo()
    assert shared.size() == 0
    rejects("stop", signal.raise_signal, signal.SIGUSR1, error=FirstError)


def test_other_threads_hold_nothing(handlers):
    seen = []

    def work():
        with signals.Held():
            seen.append(type(signal.getsignal(signal.SIGUSR1)))

    with thread(work):
        pass
    work()
    assert seen == [type(work), signals.Held]


def test_a_signal_that_is_still_held_after_the_block_runs_its_handler(handlers):
    with signals.Held() as after:
        pass
    rejects("stop", after, signal.SIGUSR1, None, error=FirstError)  # as where it could not be put back
