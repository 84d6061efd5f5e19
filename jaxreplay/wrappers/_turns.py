"""Turns: a state that several threads replace, one call at a time.

**Invariants.**

1. The state is read and replaced under one lock, and no thread keeps it. So no thread sees a donated state, and the
   calls have one order, in which a single thread would get the same bits.
2. The lock is held while a call is dispatched, never while a device works. Calls return arrays of their own, no parts
   of the state, so that a later call cannot donate them.
3. The counts change together with the state: a call that raises before the state is replaced counts nothing.
4. A waiting thread holds no lock. Each change of the state, of the counts or of the slack wakes all waiting threads,
   and so does `close`. The rule of `jaxreplay.wrappers._limiter` lets at least one of them pass.
5. The state is lost only in a call that raises after it donated the state. That closes it for all threads.
"""

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax

from jaxreplay._common.xla import is_tracing, on_host
from jaxreplay.wrappers._closed import Closed
from jaxreplay.wrappers._limiter import Limiter

LOOK_AGAIN = 1.0  # seconds; a waiting thread then notices interrupts on all systems, and that it is alone


class Turns:
    """A state, its lock and its limiter.

    Attributes:
      state: read and replaced only in a block of `turn`.
      limiter: likewise.
      size_of: a function from the state to the number of drawable items.
      why_closed: why it is closed, as text; None if it is not.
    """

    def __init__(self, state: Any, size_of: Callable[[Any], jax.Array], min_size: int, limiter: Limiter):
        self.state, self.limiter = _committed(state), limiter
        self.why_closed: str | None = None
        self._cause: BaseException | None = None
        self.size_of, self._min_size = size_of, min_size
        self._changed = threading.Condition()
        self._alone: int | None = None  # the thread in a block of `alone`
        self._version = 0

    def turn(
        self, call: str, added: int = 0, drawn: int = 0, timeout: float | None = None, reads: bool = False
    ) -> "Turn":
        """A block under the lock, after its turn has come; `reads` if it may also run after `close`."""
        return Turn(self, call, added, drawn, timeout, reads)

    def enter(self, call: str, added: int, drawn: int, timeout: float | None, reads: bool) -> bool:
        """Take the lock when the turn of a call has come; True if the call counts, False if it only reads."""
        if is_tracing():
            raise RuntimeError(
                f"{call}: a Shared is an object of the host, and a traced call would run once, at trace time; in jit, "
                "use the buffer's methods on a state, such as cell.state."
            )
        if self._alone is not None and self._alone == threading.get_ident():
            raise RuntimeError(f"{call}: called in a block of `state` of this thread; use cell.state there.")
        deadline = None if timeout is None else time.monotonic() + timeout
        if self.limiter.began is None and (drawn or self.limiter.added + added > self._min_size):
            self._begin(call, drawn > 0, deadline)
        self._acquire(call, deadline)
        try:
            if reads and not self._is_lost():
                return False
            self._check_open(call)
            self.limiter.register(added, drawn)
            if not self.limiter.passes(added, drawn):
                self._wait(lambda: self.limiter.passes(added, drawn), call, deadline)
        except BaseException:
            self._changed.release()
            raise
        return True

    def leave(self, before: Any, added: int, drawn: int, error: BaseException | None) -> None:
        """Count a call, if it has replaced the state `before` or raised no error, and release the lock."""
        try:
            if error is None or self.state is not before:
                self._count(added, drawn)
            if error is not None and self._is_lost():
                self.close(error)
        finally:
            self._changed.release()

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """In a block of `turn`: the thread uses the state itself, so its calls are errors."""
        self._alone = threading.get_ident()
        try:
            yield
        finally:
            self._alone = None
        if self._is_lost():
            raise RuntimeError("cell.state was donated and not replaced; assign the new state to it.")

    def close(self, error: BaseException | None = None) -> None:
        """Let all calls that wait, and later ones, raise `Closed`; the first call counts."""
        with self._changed:
            if self.why_closed is None:
                by = f"closed by thread {threading.current_thread().name}"
                self._cause, self.why_closed = error, by if error is None else f"{by}, by {error!r}"
            self._changed.notify_all()

    def release(self) -> None:
        """End a block that only reads."""
        self._changed.release()

    def _acquire(self, call: str, deadline: float | None) -> None:
        if deadline is None:
            self._changed.acquire()
        elif not self._changed.acquire(timeout=max(0, deadline - time.monotonic())):
            raise TimeoutError(f"{call}: waited for another thread, which is in a block of `state`.")

    @contextlib.contextmanager
    def _locked(self, call: str, deadline: float | None) -> Iterator[None]:
        self._acquire(call, deadline)
        try:
            self._check_open(call)
            yield
        finally:
            self._changed.release()

    def _count(self, added: int, drawn: int) -> None:
        self.limiter.count(added, drawn)
        self._version += 1
        self._changed.notify_all()

    def _begin(self, call: str, waits: bool, deadline: float | None) -> None:
        """Let draws begin if enough items are stored; with `waits`, wait for that."""
        while True:
            with self._locked(call, deadline):
                if self.limiter.began is not None:
                    return
                version, size = self._version, self.size_of(self.state)
            enough = int(on_host(size)) >= self._min_size
            with self._locked(call, deadline):
                if enough:
                    self.limiter.begin()
                    self._changed.notify_all()
                elif waits:
                    self._wait(lambda v=version: self.limiter.began is not None or self._version != v, call, deadline)
                else:
                    return

    def _wait(self, passes: Callable[[], bool], call: str, deadline: float | None) -> None:
        """Wait, without the lock, until `passes`."""
        self._changed.notify_all()  # the slack may have grown
        start = time.monotonic()
        while True:
            self._check_open(call)
            if passes():
                return
            why = f"{call}: {self.limiter.text()}; min_size={self._min_size}"
            if deadline is None and threading.enumerate() == [threading.current_thread()]:
                raise RuntimeError(
                    f"{why}. It would wait for ever, as the process has no other thread; use the buffer itself, or no "
                    "ratio."
                )
            waited = time.monotonic() - start
            if deadline is not None and time.monotonic() >= deadline:
                raise TimeoutError(f"{why}. Waited {waited:.3g} s; does the other side run, in another thread?")
            left = LOOK_AGAIN if deadline is None else min(LOOK_AGAIN, deadline - time.monotonic())
            self._changed.wait(left)

    def _check_open(self, call: str) -> None:
        if self.why_closed is not None:
            raise Closed(f"{call}: {self.why_closed}.") from self._cause

    def _is_lost(self) -> bool:
        return any(x.is_deleted() for x in jax.tree.leaves(self.state))


class Turn:
    """A block of `Turns.turn`; a class, as `contextlib.contextmanager` takes three times as long."""

    __slots__ = ("_before", "_call", "_counts", "_turns")

    def __init__(self, turns: Turns, *call: Any):
        self._turns, self._call = turns, call

    def __enter__(self) -> None:
        self._counts = self._turns.enter(*self._call)
        self._before = self._turns.state

    def __exit__(self, _: Any, error: BaseException | None, __: Any) -> None:
        if self._counts:
            self._turns.leave(self._before, self._call[1], self._call[2], error)
        else:
            self._turns.release()


def _committed(state: Any) -> Any:
    """The same state, committed to its devices, so that arguments from other devices cannot move it."""
    leaves = jax.tree.leaves(state)
    if any(x.sharding.device_set != leaves[0].sharding.device_set for x in leaves):
        return state  # a mixture of buffers on one device and on several
    return jax.device_put(state, jax.tree.map(lambda x: x.sharding, state))
