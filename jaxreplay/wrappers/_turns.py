"""Turns: a state that several threads replace, one call at a time.

**Invariants.**

1. The state is read and replaced under one lock, and no thread keeps it. So no thread sees a donated state, and the
   calls have one order, in which a single thread would get the same bits.
2. The lock is held while a call is dispatched, never while a device works. Calls return arrays of their own, no parts
   of the state, so that a later call cannot donate them.
3. The counts change together with the state: a call that raises before the state is replaced counts nothing.
4. A waiting thread holds no lock. Each change of the state or of the counts wakes all waiting threads, and so does
   `close`; they also look again in `LOOK_AGAIN` seconds, such as at a slack that has grown. The rule of
   `jaxreplay.wrappers._limiter` lets at least one of them pass.
5. The state is lost only in a call that raises after it donated the state. That closes it for all threads.
6. Handlers of signals run before a turn, after it, or while it waits: never between a call that donates the state and
   the assignment of its result, nor where the lock would stay held. So an interrupt loses nothing and stops no thread.
7. No thread waits for what cannot come: not if the process has no other thread, if all blocks of `worker` have ended,
   or if the program is at its end.

**A call** is a block, such as `with Turn(turns, "add", added=3) as turn: turn.state = buffer.add(turn.state, rows)`.

- At the start `Turn.__enter__` holds signals back. `Turns.enter` takes the lock, waits without it until 3 more items
  may be added, and keeps it.
- At the end, also after an error, `Turn.__exit__` calls `Turns.leave`. It takes the new state, counts 3 items, wakes
  the threads that wait, and releases the lock. Then the handlers of the signals that came run.
"""

import contextlib
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any, Self

import jax

from jaxreplay._common import checks, xla
from jaxreplay._common.signals import Held
from jaxreplay.wrappers._limiter import Limiter

ARRAYS = "its leaves must be arrays of JAX, such as jax.device_put makes."
LOOK_AGAIN = 0.1  # seconds; a waiting thread then notices interrupts, that it is alone, and the end of the program


class Closed(RuntimeError):
    """The `jaxreplay.Shared` is closed, or all its workers have ended and a call would wait for ever.

    If an error closed it, that error is the cause (`__cause__`).

    Examples:
      >>> shared = jr.Shared(buffer, state)
      >>> shared.close(ValueError("no more episodes"))
      >>> try:
      ...     shared.add(items)
      ... except jr.Closed as error:
      ...     print(repr(error.__cause__))
      ValueError('no more episodes')
    """


class Turns:
    """A state, its lock and its limiter; `Turn` is a call.

    Attributes:
      state: read and replaced only by the thread that has the lock.
      limiter: likewise.
      size_of: a function from the state to the number of drawable items.
      why_closed: why it is closed, as text; None if it is not.
    """

    def __init__(self, state: Any, size_of: Callable[[Any], jax.Array], min_size: int, limiter: Limiter):
        self._kind = _kind(state)
        if not all(isinstance(x, jax.Array) for x in jax.tree.leaves(state)):
            raise ValueError(f"state: {ARRAYS}")
        self.state, self.limiter = _committed(state), limiter
        self.why_closed: str | None = None
        self._cause: BaseException | None = None
        self.size_of, self._min_size = size_of, min_size
        self._workers: int | None = None  # blocks of `worker` that have not ended; None before the first
        self._process = os.getpid()
        self._changed = threading.Condition()
        self._owner: int | None = None  # the thread whose turn it is
        self._version = 0
        _at_end(weakref.WeakMethod(self.end))

    def enter(self, turn: "Turn") -> None:
        """Take the lock when the turn has come, and give it the state."""
        if xla.is_tracing():
            raise RuntimeError(f"{turn.call}: a Shared is an object of the host; in jit, use the buffer on cell.state.")
        if self._owner == threading.get_ident():
            raise RuntimeError(f"{turn.call}: called in a block of `state` of this thread; use cell.state there.")
        if not self.limiter.began and (turn.drawn or self.limiter.added + turn.added > self._min_size):
            self._begin(turn)
        self._acquire(turn)
        try:
            only_reads = self.is_closed()
            if only_reads and (turn.counts or self._is_lost()):
                self._check_open(turn.call)
            self.limiter.register(turn.added, turn.drawn)
            if not self.limiter.passes(turn.added, turn.drawn):
                self._wait(lambda: self.limiter.passes(turn.added, turn.drawn), turn)
            turn.state, turn.only_reads = self.state, only_reads
        except BaseException:
            self._changed.release()
            raise
        self._owner = threading.get_ident()

    def leave(self, turn: "Turn", error: BaseException | None) -> None:
        """Take the turn's state, count the turn if it has replaced the state or raised no error, release the lock."""
        is_block = turn.call == "state"  # in which code of the user runs
        try:
            if replaced := turn.state is not self.state:
                if turn.only_reads:
                    self._check_open(turn.call)
                if is_block and _kind(turn.state) != self._kind:
                    self._explain(turn.state)
                self.state = turn.state
            if replaced or (error is None and turn.counts):
                self.limiter.count(turn.added, turn.drawn)
                self._version += 1
                self._changed.notify_all()
            if is_block and error is None and self._is_lost():
                raise RuntimeError("cell.state was donated and not replaced; assign the new state to it.")
        except BaseException as raised:
            error = raised
            raise
        finally:
            if error is not None and self._is_lost():
                self.close(error)
            self._owner = None
            self._changed.release()

    def close(self, error: BaseException | None = None) -> None:
        """Close it: calls that wait, and later ones, raise `Closed`. Only the first call counts."""
        turn = Turn(self, "close")
        with turn.hold(), self._locked(turn):
            if not self.is_closed():
                by = f"closed by thread {threading.current_thread().name}"
                self._cause, self.why_closed = error, by if error is None else f"{by}, by {error!r}"
            self._changed.notify_all()

    def is_closed(self) -> bool:
        """True if it is closed; the end of the main thread closes it, as Python then waits for the other threads."""
        if not threading.main_thread().is_alive():
            self.end()
        return self.why_closed is not None

    def end(self) -> None:
        """Close it at the end of the program, without the lock, which another thread may hold for ever."""
        if self.why_closed is None:
            self.why_closed = "closed by the end of the program"

    def count_workers(self, change: int) -> None:
        """Note that a block of `worker` begins (1) or ends (-1)."""
        turn = Turn(self, "worker")
        with turn.hold(), self._locked(turn):
            self._workers = (self._workers or 0) + change
            self._changed.notify_all()

    def _acquire(self, turn: "Turn") -> None:
        if os.getpid() != self._process:
            raise RuntimeError(f"{turn.call}: this process is a fork without JAX's threads; start it by 'spawn'.")
        while not self._changed.acquire(timeout=turn.patience()):
            turn.signals.deliver()
            if turn.is_late():
                raise TimeoutError(f"{turn.call}: waited for another thread, which is in a block of `state`.")

    @contextlib.contextmanager
    def _locked(self, turn: "Turn") -> Iterator[None]:
        self._acquire(turn)
        try:
            yield
        finally:
            self._changed.release()

    def _begin(self, turn: "Turn") -> None:
        """Let draws begin if enough items are stored; a draw waits for that."""
        while not self.limiter.began:
            with self._locked(turn):
                self._check_open(turn.call)
                version, size = self._version, self.size_of(self.state)
            enough = int(xla.on_host(size)) >= self._min_size
            with self._locked(turn):
                self._check_open(turn.call)
                if enough:
                    self.limiter.begin()
                    self._changed.notify_all()
                elif turn.drawn:
                    self._wait(lambda v=version: self.limiter.began or self._version != v, turn)
                else:
                    return

    def _wait(self, passes: Callable[[], bool], turn: "Turn") -> None:
        """Wait, without the lock, until `passes`."""
        start = time.monotonic()
        while not passes():
            why = f"{turn.call}: {self.limiter.text()}; min_size={self._min_size}"
            if turn.timeout is None and self._workers == 0:
                raise Closed(f"{why}. It would wait for ever, as all blocks of `worker` have ended.")
            if turn.timeout is None and threading.enumerate() == [threading.current_thread()]:
                raise RuntimeError(f"{why}. It would wait for ever, as the only thread; use the buffer, or no ratio.")
            if turn.is_late():
                raise TimeoutError(f"{why}. Waited {time.monotonic() - start:.3g} s; does the other side run?")
            self._changed.wait(turn.patience())
            turn.signals.deliver()
            self._check_open(turn.call)

    def _check_open(self, call: str) -> None:
        if self.is_closed():
            raise Closed(f"{call}: {self.why_closed}.") from self._cause

    def _explain(self, state: Any) -> None:
        """Raise a `ValueError` that says why `state` is not one of the buffer."""
        try:
            checks.check_like(state, self.state, 0, 0, "a state of the buffer")
        except (AttributeError, ValueError) as error:
            raise ValueError(f"cell.state: {error}") from None
        raise ValueError(f"cell.state: {ARRAYS}")

    def _is_lost(self) -> bool:
        return any(x.is_deleted() for x in jax.tree.leaves(self.state))


class Turn:
    """The state in a block of `Shared.state`; assign a new one to `state`.

    Each call of a `Shared` is such a block. A class, as `contextlib.contextmanager` takes three times as long.
    """

    __slots__ = ("_deadline", "_turns", "added", "call", "counts", "drawn", "only_reads", "signals", "state", "timeout")

    def __init__(
        self, turns: Turns, call: str, added: int = 0, drawn: int = 0, timeout: float | None = None, counts: bool = True
    ):
        if timeout is not None:
            timeout = checks.check_number("timeout", timeout, 0, threading.TIMEOUT_MAX, "seconds, or None for no limit")
        self._turns, self.call, self.added, self.drawn, self.timeout = turns, call, added, drawn, timeout
        self.counts = counts  # False for a block that also reads after `close`

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"{name}: is there inside the block only; write with shared.state() as cell.", name=name)

    def is_late(self) -> bool:
        """True if it has waited for `timeout` seconds."""
        return self._deadline is not None and time.monotonic() >= self._deadline

    def patience(self) -> float:
        """Seconds to wait before the next look."""
        return LOOK_AGAIN if self._deadline is None else max(0, min(LOOK_AGAIN, self._deadline - time.monotonic()))

    def hold(self) -> Held:
        """Begin the block, with signal handlers deferred."""
        self.signals = Held()
        self._deadline = None if self.timeout is None else time.monotonic() + self.timeout
        return self.signals

    def __enter__(self) -> Self:
        self.hold()
        try:
            self._turns.enter(self)
        except BaseException:
            self.signals.__exit__()
            raise
        return self

    def __exit__(self, _: Any, error: BaseException | None, __: Any) -> None:
        with self.signals:
            self._turns.leave(self, error)


def _at_end(method: weakref.WeakMethod) -> None:
    """Call a method, if its object is still there, when the main thread ends, before executors wait for their threads.

    At that time the main thread still counts as alive. A Python without this hook calls nothing.
    """
    import concurrent.futures.thread  # noqa: F401, registers its hook first; the last one is called first

    def call() -> None:
        if (found := method()) is not None:
            found()

    with contextlib.suppress(AttributeError, RuntimeError):  # it has none, or ends already
        getattr(threading, "_register_atexit")(call)  # noqa: B009, not a name for type checkers


def _committed(state: Any) -> Any:
    """The same state, committed to its devices, so that arguments from other devices cannot move it."""
    leaves = jax.tree.leaves(state)
    if any(x.sharding.device_set != leaves[0].sharding.device_set for x in leaves):
        return state  # a mixture of buffers on one device and on several
    return jax.device_put(state, jax.tree.map(lambda x: x.sharding, state))


def _kind(state: Any) -> Any:
    """A value that is equal for all states of a buffer."""
    leaves, structure = jax.tree.flatten(state)
    return structure, [(type(x), getattr(x, "shape", None), getattr(x, "dtype", None)) for x in leaves]
