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
from typing import Any, Self

import jax

from jaxreplay._common.eager import is_tracing
from jaxreplay._common.xla import on_host
from jaxreplay.wrappers._limiter import Limiter

LOOK_AGAIN = 1.0  # seconds; a waiting thread then notices interrupts on all systems, and that it is alone


class Closed(RuntimeError):
    """The `jaxreplay.Shared` is closed; if an error closed it, that error is the cause (`__cause__`).

    Examples:
      >>> buffer = jr.ReplayBuffer(capacity=4)
      >>> items = jnp.array([10, 20, 30])
      >>> shared = jr.Shared(buffer, buffer.init(items))
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
        self.state, self.limiter = _committed(state), limiter
        self.why_closed: str | None = None
        self._cause: BaseException | None = None
        self.size_of, self._min_size = size_of, min_size
        self._structure = jax.tree.structure(state)
        self._changed = threading.Condition()
        self._owner: int | None = None  # the thread whose turn it is
        self._version = 0

    def enter(self, turn: "Turn") -> None:
        """Take the lock when the turn has come, and give it the state."""
        call, added, drawn = turn.call, turn.added, turn.drawn
        if is_tracing():
            raise RuntimeError(
                f"{call}: a Shared is an object of the host, and a traced call would run once, at trace time; in jit, "
                "use the buffer's methods on a state, such as cell.state."
            )
        if self._owner == threading.get_ident():
            raise RuntimeError(f"{call}: called in a block of `state` of this thread; use cell.state there.")
        deadline = None if turn.timeout is None else time.monotonic() + turn.timeout
        if not self.limiter.began and (drawn or self.limiter.added + added > self._min_size):
            self._begin(call, drawn > 0, deadline)
        self._acquire(call, deadline)
        try:
            if turn.counts or self._is_lost():
                self._check_open(call)
            self.limiter.register(added, drawn)
            self._wait(lambda: self.limiter.passes(added, drawn), call, deadline)
            turn.state, turn.only_reads = self.state, self.why_closed is not None
        except BaseException:
            self._changed.release()
            raise
        self._owner = threading.get_ident()

    def leave(self, turn: "Turn", error: BaseException | None) -> None:
        """Take the turn's state, count the turn if it has replaced the state or raised no error, release the lock."""
        try:
            if replaced := turn.state is not self.state:
                if turn.only_reads:
                    self._check_open(turn.call)
                if (found := jax.tree.structure(turn.state)) != self._structure:
                    raise ValueError(f"cell.state: got {found}, expected a state of the buffer, {self._structure}.")
                self.state = turn.state
            if replaced or (error is None and turn.counts):
                self.limiter.count(turn.added, turn.drawn)
                self._version += 1
                self._changed.notify_all()
            if error is None and self._is_lost():
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
        """Let all calls that wait, and later ones, raise `Closed`; the first call counts."""
        with self._changed:
            if self.why_closed is None:
                by = f"closed by thread {threading.current_thread().name}"
                self._cause, self.why_closed = error, by if error is None else f"{by}, by {error!r}"
            self._changed.notify_all()

    def _acquire(self, call: str, deadline: float | None) -> None:
        if not self._changed.acquire(timeout=-1 if deadline is None else max(0, deadline - time.monotonic())):
            raise TimeoutError(f"{call}: waited for another thread, which is in a block of `state`.")

    @contextlib.contextmanager
    def _locked(self, call: str, deadline: float | None) -> Iterator[None]:
        self._acquire(call, deadline)
        try:
            self._check_open(call)
            yield
        finally:
            self._changed.release()

    def _begin(self, call: str, waits: bool, deadline: float | None) -> None:
        """Let draws begin if enough items are stored; with `waits`, wait for that."""
        while not self.limiter.began:
            with self._locked(call, deadline):
                version, size = self._version, self.size_of(self.state)
            enough = int(on_host(size)) >= self._min_size
            with self._locked(call, deadline):
                if enough:
                    self.limiter.begin()
                    self._changed.notify_all()
                elif waits:
                    self._wait(lambda v=version: self.limiter.began or self._version != v, call, deadline)
                else:
                    return

    def _wait(self, passes: Callable[[], bool], call: str, deadline: float | None) -> None:
        """Wait, without the lock, until `passes`."""
        start = time.monotonic()
        if not passes():
            self._changed.notify_all()  # the slack may have grown
        while not passes():
            why = f"{call}: {self.limiter.text()}; min_size={self._min_size}"
            if deadline is None and threading.enumerate() == [threading.current_thread()]:
                raise RuntimeError(
                    f"{why}. It would wait for ever, as the process has no other thread; use the buffer itself, or no "
                    "ratio."
                )
            waited = time.monotonic() - start
            if deadline is not None and time.monotonic() >= deadline:
                raise TimeoutError(f"{why}. Waited {waited:.3g} s; does the other side run, in another thread?")
            self._changed.wait(LOOK_AGAIN if deadline is None else min(LOOK_AGAIN, deadline - time.monotonic()))
            self._check_open(call)

    def _check_open(self, call: str) -> None:
        if self.why_closed is not None:
            raise Closed(f"{call}: {self.why_closed}.") from self._cause

    def _is_lost(self) -> bool:
        return any(x.is_deleted() for x in jax.tree.leaves(self.state))


class Turn:
    """The state in a block of `Shared.state`; assign a new one to `state`.

    Each call of a `Shared` is such a block. A class, as `contextlib.contextmanager` takes three times as long.
    """

    __slots__ = ("_turns", "added", "call", "counts", "drawn", "only_reads", "state", "timeout")

    def __init__(
        self, turns: Turns, call: str, added: int = 0, drawn: int = 0, timeout: float | None = None, counts: bool = True
    ):
        self._turns, self.call, self.added, self.drawn, self.timeout = turns, call, added, drawn, timeout
        self.counts = counts  # False for a block that also reads after `close`

    def __enter__(self) -> Self:
        self._turns.enter(self)
        return self

    def __exit__(self, _: Any, error: BaseException | None, __: Any) -> None:
        self._turns.leave(self, error)


def _committed(state: Any) -> Any:
    """The same state, committed to its devices, so that arguments from other devices cannot move it."""
    leaves = jax.tree.leaves(state)
    if any(x.sharding.device_set != leaves[0].sharding.device_set for x in leaves):
        return state  # a mixture of buffers on one device and on several
    return jax.device_put(state, jax.tree.map(lambda x: x.sharding, state))
