"""Interrupts at any moment lose nothing and leave nothing locked."""

import contextlib
import os
import signal
import time
import types

import interrupts
import pytest
from helpers import rarely, rejects
from test_shared import KEY, LONG, SOON, batch, held, shared_replay, thread

import jaxreplay as jr
from jaxreplay._common import signals


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
        processes.apply_async(interrupts.process, (count,)).get(600)


def test_a_block_is_interrupted_at_its_end(handlers):
    shared = shared_replay(ratio=1)
    shared.add(batch())

    def block():
        with shared.state() as cell:
            state = shared.buffer.add(cell.state, batch(4))
            signal.raise_signal(signal.SIGUSR1)
            cell.state = state

    rejects("stop", block, error=FirstError)
    assert (shared.size(), shared.closed) == (8, False)


def test_all_handlers_run(handlers):
    def block():
        with shared_replay().state():
            for number in (signal.SIGUSR1, signal.SIGUSR2, signal.SIGUSR1):
                signal.raise_signal(number)

    with pytest.raises((FirstError, SecondError)) as caught:
        block()
    assert {type(caught.value), type(caught.value.__context__)} == {FirstError, SecondError}


def test_an_error_of_a_call_is_the_context_of_an_interrupt(handlers):
    shared = shared_replay()

    def block():
        with shared.state():
            signal.raise_signal(signal.SIGUSR1)
            raise KeyError

    with pytest.raises(FirstError) as caught:
        block()
    assert isinstance(caught.value.__context__, KeyError)
    shared.add(batch())


def test_blocks_of_two_are_interrupted_at_the_end_of_the_outer_one(handlers):
    outer, inner, reached = shared_replay(), shared_replay(), []

    def block():
        with outer.state():
            with inner.state():
                signal.raise_signal(signal.SIGUSR1)
            inner.add(batch())
            reached.append(inner.size())

    rejects("stop", block, error=FirstError)
    assert reached == [4]


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
    def mine(number, frame):
        pass

    old = signal.getsignal(signal.SIGUSR1)
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
    with pytest.raises(FirstError):
        signal.raise_signal(signal.SIGUSR1)


def test_other_threads_hold_nothing(handlers):
    seen = []

    def work():
        with signals.Held():
            seen.append(type(signal.getsignal(signal.SIGUSR1)))

    with thread(work):
        pass
    work()
    assert seen == [type(work), signals.Held]
