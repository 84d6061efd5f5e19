"""A program that is interrupted again and again, at any moment, and finds out what that did."""

import concurrent.futures
import contextlib
import itertools
import random
import signal
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
from helpers import interruptible

import jaxreplay as jr

PATIENCE = 5.0  # seconds, until a lock counts as held
KEY = jax.random.key(0)


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
    signal.setitimer(signal.ITIMER_REAL, 1e-5 + random.random() ** 2 * 0.002)
    try:
        with contextlib.suppress(RuntimeError, ValueError):  # an earlier interrupt lost the state
            while True:
                call()
        time.sleep(PATIENCE)
    except KeyboardInterrupt:
        pass


def process(count):
    """The body of a process: interrupts of each call in turn."""
    interruptible()
    signal.signal(signal.SIGALRM, signal.default_int_handler)
    program = Program()
    for name, _ in zip(itertools.cycle(program.calls), range(count), strict=False):
        interrupt(program.calls[name])
        try:
            program.check()
        except Exception as error:
            raise AssertionError(f"after an interrupt of {name}") from error
    program.shared.close()
    program.thread.join()
