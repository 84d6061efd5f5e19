"""A thread that writes a checkpoint, which no signal interrupts."""

import contextlib
import os
import threading
from collections.abc import Callable
from typing import Any

import jax

from jaxreplay._common import files, signals
from jaxreplay.checkpoint import _arrays, _files, _processes

LOOK_AGAIN = 0.2  # seconds


class Writing(threading.Thread):
    """A thread that writes a checkpoint and completes it; with several processes, each writes its parts.

    An error that nobody was given stays in its thread, until a later `save` raises it or the program ends by it.
    A handler that raises while a thread or an event is waited for may leave a lock held for ever, or take the thread
    for ended (CPython 3.11). So handlers run between waits.

    Attributes:
      number: of the checkpoint, once it has begun.
      error: of the write.
    """

    def __init__(self, path: str, arrays: dict[str, _arrays.Packed], content: dict[str, Any], keep: int, wait: bool):
        super().__init__(name="jaxreplay save")
        self._path, self._arrays, self._content, self._keep = path, arrays, content, keep
        self._chunks = {name: x.chunks for name, x in arrays.items()}
        self._is_first, self._is_alone = jax.process_index() == 0, jax.process_count() == 1
        self.number, self.error, self._has_agreed = -1, None, self._is_alone
        self._locks, self._files = contextlib.ExitStack(), {}
        self._begun, self.ended, self._reported = threading.Event(), threading.Event(), threading.Event()
        if wait:
            self._reported.set()

    def begin(self) -> None:
        """Start; return when the checkpoint has its number. Raises an `OSError` if its folder cannot be made."""
        if self._is_first:
            with signals.Held():  # a save that comes after an interrupted one gets a later number
                self.start()
                self._begun.wait()
        self.number = _processes.on_first(self._outcome)
        if not self._is_first:
            self.start()

    def run(self) -> None:
        if self._is_first:
            self._attempt(self._make)
        has_failed = self.error is not None
        self._begun.set()
        self._attempt(self._write)
        if self._is_alone or has_failed:
            self._end()
        self.ended.set()
        while self.error is not None and not self._reported.wait(LOOK_AGAIN):
            if not threading.main_thread().is_alive():
                raise self.error

    def finish(self) -> None:
        """Wait until the checkpoint is on the disk; raise the error of the write."""
        with signals.Held() as held:
            while not self.ended.wait(LOOK_AGAIN):
                held.deliver()
        if not self._has_agreed:
            self._has_agreed = True
            if _processes.gather([self.error is not None]).any() and self.error is None:
                self.error = OSError(f"{self._part()}: another process could not write its part; its error says why.")
            if self._is_first:
                self._end()
            _processes.on_first(self._outcome)
        self._outcome()

    def raise_unreported(self) -> None:
        """Raise the error of a failed write, if nobody has seen it yet."""
        if not self._reported.is_set():
            self._outcome()

    def _outcome(self) -> int:
        if self.error is not None:
            with signals.Held():
                self._reported.set()
                self.join()
            raise self.error
        return self.number

    def _attempt(self, step: Callable[[], None]) -> None:
        """Take a step of the write, unless an earlier step has failed."""
        try:
            if self.error is None:
                step()
        except BaseException as error:
            first_line = f"{type(error).__name__}: {error}".partition("\n")[0][:1000]
            message = f"{self._path}: cannot write a checkpoint: {first_line}"
            number = getattr(error, "errno", None)
            self.error = OSError(message) if number is None else OSError(number, message)  # of the same kind
            self.error.__cause__ = error

    def _part(self) -> str:
        return _files.folder_of(self._path, self.number, _files.PART)

    def _make(self) -> None:
        self.number = _files.begin(self._path, self._locks)
        files.describe(self._part(), self._content)
        for name in ("", *self._chunks):
            os.mkdir(os.path.join(self._part(), _files.ARRAYS, name))

    def _write(self) -> None:
        arrays, self._arrays = self._arrays, {}
        self._files = _arrays.write(self._part(), arrays, self._is_first)

    def _end(self) -> None:
        """Complete the checkpoint, or delete its unfinished folder."""
        self._attempt(self._complete)
        if self.error is not None and self.number >= 0:
            _files.delete(self._part())
        self._locks.close()

    def _complete(self) -> None:
        every = [os.path.join(name, file) for name, chunks in self._chunks.items() for file in chunks.names()]
        _files.complete(self._path, self.number, self._content, every, self._files)
        with contextlib.suppress(OSError):
            _files.delete_older(self._path, self.number, self._keep)
