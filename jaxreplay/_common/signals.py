"""Defers signal handlers while a lock is held.

CPython runs a handler in the main thread, between any two instructions of Python. If it raises, as the handler of
Ctrl-C does, what a call has just returned is dropped, and a lock that was just taken is never released. A mask of
signals does not prevent that, as any other thread may receive them. So the handlers themselves are replaced for a
while.
"""

import _signal  # pyright: ignore[reportMissingImports]; as `signal`, without its enumerations: 15 times as fast
import threading
from signal import NSIG
from types import FrameType
from typing import Any, Self


class Held:
    """A block that defers Python's signal handlers; `deliver` and the end of the block run them.

    Blocks may be nested: the inner one delivers to the outer one. Other threads run no handlers and hold nothing.
    """

    __slots__ = ("_came", "_handlers", "_holds")

    def __init__(self):
        self._came: dict[int, FrameType | None] = {}
        self._handlers: dict[int, Any] = {}
        self._holds = True
        if threading.get_ident() != threading.main_thread().ident:
            return
        self._handlers = {number: found for number in range(1, NSIG) if callable(found := _signal.getsignal(number))}
        try:
            for number in self._handlers:
                _signal.signal(number, self)
        except BaseException:  # of a handler that was still to be replaced
            self.__exit__()
            raise

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if self._holds:
            self._came[number] = frame
        else:  # two handlers raised at once, and one was not put back
            self._handlers[number](number, frame)

    def deliver(self) -> None:
        """Run the handlers of the signals that came, the oldest first; all of them, also if one raises."""
        if self._came:
            number = [*self._came][0]  # noqa: RUF015, as an iterator fails where another signal comes
            frame = self._came.pop(number)
            try:
                self._handlers[number](number, frame)
            finally:
                self.deliver()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: Any) -> None:
        try:
            for number, handler in self._handlers.items():
                if _signal.getsignal(number) is self:
                    _signal.signal(number, handler)
        finally:
            self._holds = False
            self.deliver()
