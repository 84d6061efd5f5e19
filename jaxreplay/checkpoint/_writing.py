"""The thread that writes a checkpoint, which no signal interrupts."""

import contextlib
import threading
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from jaxreplay.checkpoint import _arrays, _files, _processes

LOOK_AGAIN = 0.2  # seconds


class Writing(threading.Thread):
    """A thread that writes a checkpoint and completes it; with several processes, each writes its parts.

    An error that nobody was given stays in its thread, until a later `save` raises it or the program ends by it.
    In CPython 3.11 a `join` that a signal interrupts takes the thread for ended, so all wait for events.

    Attributes:
      number: of the checkpoint, once it has begun.
      error: of the write.
    """

    def __init__(self, path: str, arrays: dict[str, _arrays.Packed], content: dict[str, Any], keep: int, wait: bool):
        super().__init__(name="jaxreplay save")
        self._path, self._arrays, self._content, self._keep, self.number = path, arrays, content, keep, -1
        self._chunks = {name: _arrays.Chunks.of(x) for name, x in arrays.items()}
        self._files: dict[str, np.ndarray] = {}  # of each array: size and CRC-32 by file
        self._is_first, self._is_alone = jax.process_index() == 0, jax.process_count() == 1
        self._locks, self.error, self._has_agreed = contextlib.ExitStack(), None, self._is_alone
        self._begun, self.ended, self._heard = threading.Event(), threading.Event(), threading.Event()
        if wait:
            self._heard.set()

    def begin(self) -> None:
        """Start; returns when the checkpoint has its number.

        Raises:
          OSError: its folder cannot be made.
        """
        if self._is_first:
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
        while self.error is not None and not self._heard.wait(LOOK_AGAIN):
            if not threading.main_thread().is_alive():
                raise self.error

    def finish(self) -> None:
        """Wait until the checkpoint is on the disk; raises the error of the write."""
        self.ended.wait()
        if not self._has_agreed:
            self._has_agreed = True
            self._agree()
            if self._is_first:
                self._end()
            _processes.on_first(self._outcome)
        self._outcome()

    def raise_unheard(self) -> None:
        """Raise the error of a write that has failed, unless somebody was given it."""
        if self.ended.is_set() and not self._heard.is_set():
            self._outcome()

    def _outcome(self) -> int:
        if self.error is not None:
            self._heard.set()
            self.join()
            raise self.error
        return self.number

    def _attempt(self, step: Callable[[], None]) -> None:
        """Take a step, unless one before has failed."""
        try:
            if self.error is None:
                step()
        except OSError as error:
            self.error = error
        except BaseException as error:
            first_line = f"{type(error).__name__}: {error}".partition("\n")[0][:1000]
            self.error = OSError(f"{self._path}: cannot write the checkpoint: {first_line}")
            self.error.__cause__ = error

    def _make(self) -> None:
        self.number = _files.begin(self._path, self._arrays, self._locks)
        _files.describe(self._part(), self._content)

    def _part(self) -> str:
        return _files.folder_of(self._path, self.number, _files.PART)

    def _write(self) -> None:
        arrays, self._arrays = self._arrays, {}
        self._files = _arrays.write(self._part(), arrays, self._is_first)

    def _agree(self) -> None:
        """Tell all processes which files each has written, and whether one has failed."""
        of_all = [self._files.get(name, np.zeros((len(x.names), 2))) for name, x in self._chunks.items()]
        numbers = [*np.concatenate([x.ravel() for x in of_all]).tolist()] if of_all else []
        found = _processes.gather([self.error is not None, *map(int, numbers)])
        if found[:, 0].any() and self.error is None:
            self.error = OSError(f"{self._part()}: another process could not write its part; its error says why.")
        every = found[:, 1:].sum(axis=0, dtype=np.uint32).reshape(-1, 2)
        ends = np.cumsum([len(x.names) for x in self._chunks.values()])[:-1]
        self._files = dict(zip(self._chunks, np.split(every, ends), strict=True))

    def _end(self) -> None:
        """Complete the checkpoint, or delete what is there of it."""
        self._attempt(self._complete)
        if self.error is not None and self.number >= 0:
            _files.delete(self._part())
        self._locks.close()

    def _complete(self) -> None:
        arrays, sizes = {}, {}
        for name, chunks in self._chunks.items():
            found = self._files[name].tolist()
            arrays[name] = {"chunk": chunks.chunk, "files": found}
            paths = (_files.of_array(self._part(), name, file) for file in chunks.names)
            sizes.update(zip(paths, (size for size, _ in found), strict=True))
        _files.complete(self._path, self.number, self._content | {"arrays": arrays}, sizes)
        with contextlib.suppress(OSError):
            _files.delete_older(self._path, self.number, self._keep)
