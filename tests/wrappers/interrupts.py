"""A program that is interrupted again and again, at any moment, and finds out what that did."""

import collections
import concurrent.futures
import contextlib
import os
import signal
import subprocess
import sys
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
from helpers import interruptible

import jaxreplay as jr

SENDER = """
import os, random, signal, sys, time
for line in sys.stdin:
    time.sleep(random.random() ** 2 * 0.002)
    os.kill(int(line), signal.SIGINT)
"""
CALLS = ("update", "add", "block", "sample", "wait", "close")
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
        self.number = 0
        self.add()
        self.handles, self.td_errors = jnp.arange(8), jnp.ones(8)
        for call in (self.update, self.block, self.sample):
            call()  # and compile
        self.thread = threading.Thread(target=self.other, daemon=True)
        self.thread.start()

    def other(self):
        with self.shared.worker():
            while True:
                self.shared.sample(KEY, 8)
                time.sleep(0.0005)

    def update(self):
        self.shared.update(self.handles, self.td_errors)

    def add(self):
        self.shared.add(np.array([self.number], np.int32))
        self.number += 1

    def block(self):
        with self.shared.state() as cell:
            state = self.buffer.update(cell.state, self.handles, self.td_errors)
            cell.state = self.buffer.add(state, np.array([self.number], np.int32))
        self.number += 1

    def sample(self):
        self.shared.sample(KEY, 8)

    def wait(self):
        self.idle.sample(KEY, 8)

    def close(self):
        self.closed.close()

    def check(self):
        """What the last interrupt did; another thread looks, as a lock of this thread does not stop this one."""
        looks = concurrent.futures.ThreadPoolExecutor(1)
        try:
            found = looks.submit(self.newest).result()
        except TimeoutError:
            return "held"
        except (RuntimeError, ValueError):
            return "lost"
        finally:
            looks.shutdown()
        if signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
            return "handler"
        if found not in (self.number - 1, self.number):  # the interrupt came before the number was raised
            return "wrong"
        self.number = found + 1
        return "right"

    def newest(self):
        """The newest item, once all states were taken."""
        for shared in (self.idle, self.closed, self.shared):
            with shared.state(timeout=PATIENCE) as cell:
                newest = self.buffer.get(cell.state, self.buffer.newest(cell.state, 1))
        return int(newest[0])


def interrupted(sender, call):
    """Repeat the call until an interrupt that it asks for; an error means that an earlier one lost the state."""
    try:
        sender.stdin.write(f"{os.getpid()}\n")
        sender.stdin.flush()
        with contextlib.suppress(RuntimeError, ValueError):
            while True:
                call()
        time.sleep(PATIENCE)
    except KeyboardInterrupt:
        pass


def process(count):
    """The body of a process: how many interrupts of each call had which effect."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell may ignore it in what runs in the background
    interruptible()
    sender = subprocess.Popen([sys.executable, "-c", SENDER], stdin=subprocess.PIPE, text=True)
    results, program = collections.defaultdict(collections.Counter), Program()
    for number in range(count):
        call = CALLS[number % len(CALLS)]
        interrupted(sender, getattr(program, call))
        result = program.check()
        results[call][result] += 1
        if result in ("held", "lost"):
            program = Program()
    program.shared.close()
    program.thread.join()
    sender.stdin.close()
    sender.wait()
    return {call: dict(found) for call, found in results.items()}
