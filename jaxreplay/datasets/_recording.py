"""Recordings: `Recorder` appends rows to a folder, in parts that any program can read, and `load` reads them back.

FOLDER/part_00000007/description.json  structure, types and number of its rows, its first row in the recording, sizes
                                       and CRC-32 of its files, and whether a recorder began with it
FOLDER/part_00000007/observation.npy   the rows of a leaf, in NumPy's format
FOLDER/part.new/                       the next part: in progress, or left by a process that was killed

A recording is its parts in the order of their numbers. A part gets its name when all of it is on the disk.
"""

import ast
import bisect
import contextlib
import errno
import io
import itertools
import math
import os
import re
import shutil
import threading
import zlib
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import DictKey, keystr

from jaxreplay._common import checks, files, signals
from jaxreplay.datasets._rows import Steps, as_number

FORMAT, ENDS, NEW, NAME = 1, "ends", "part.new", r"[\w.-]{1,150}"
MAX_DESCRIPTION = 2**20  # bytes; reading one takes some hundred times as much memory
LOOK_AGAIN = 0.2  # seconds; a waiting thread then hears signals


class Recorder(contextlib.AbstractContextManager):
    """Appends the rows of `SequenceBuffer.add` to a folder of plain `.npy` files.

    Rows are copied and written in parts, each by a thread in the background. A full part waits for the one before it,
    and `add` with it, so memory is that of two parts. A part is on the disk, all of it, or not there: whatever cuts the
    program off (a signal, Ctrl-C, a full disk, a power cut), `load` returns the rows of all finished parts and no
    others, and the next recorder continues after them. Where it does, `load` returns an end in the last row before.

    The end of the `with` block writes the last rows and releases the folder. So does the end of a program, or of the
    last reference. One recorder at a time writes to a folder, of any number of threads. A process that is forked cannot
    use it. A call that raises an error has added nothing; rows added before are kept, and the next call writes them.

    Other programs read a part with `np.load`. bfloat16, float8 and int4 are stored as unsigned integers of one or two
    bytes; `description.json` of each part has the names, shapes and dtypes.

    Args:
      folder: path; it is made, or empty, or holds a recording.
      part_bytes: size of a part, at least one row. `flush` writes smaller ones.

    Raises:
      ValueError: `folder` holds something else or a damaged newest part, is a URL, or another recorder writes to it.
      OSError: the folder cannot be made, read or written to.

    Examples:
      >>> with jr.datasets.Recorder("runs/pendulum") as recorder:
      ...     for _ in range(3):
      ...         rows, ends = {"reward": np.ones((5, 2))}, np.zeros((5, 2), bool)
      ...         recorder.add(rows, ends)
      >>> jr.datasets.load("runs/pendulum").rows["reward"].shape
      (15, 2)
    """

    def __init__(self, folder: str | os.PathLike[str], *, part_bytes: int = 2**26):
        from multiprocessing import util

        folder = os.path.realpath(files.local(folder, "a recording"))
        self._rows = _Rows(folder, checks.check_integer("part_bytes", part_bytes, 1, 2**40, "the size of a part"))
        # Also where the recorder is forgotten, and at the end of a program or a process of multiprocessing.
        self._close = util.Finalize(self, self._rows.close, exitpriority=0)

    def add(self, rows: Any, ends: Any) -> None:
        """Append rows; returns when they are copied, so the caller may overwrite them.

        Args:
          rows: pytree of arrays [T, num_envs, ...], on any device. The first call determines structure, shapes and
            dtypes, also for later recorders. Nodes other than dicts, lists and tuples are recorded as dicts.
          ends: bool [T, num_envs], True for the last row of an episode.

        Raises:
          ValueError: a leaf differs from the recorded ones or is not numeric, the keys of a dict cannot be recorded, or
            the block has ended.
          OSError: rows added before could not be written, or the folder has been replaced.
          RuntimeError: the process was forked after the recorder was made.

        Examples:
          >>> recorder = jr.datasets.Recorder("runs/walker")
          >>> recorder.add({"reward": np.ones((5, 2))}, ends=np.zeros((5, 2), bool))
          >>> recorder.flush()
          >>> len(jr.datasets.load("runs/walker").ends)
          5
        """
        self._rows.add(rows, ends)

    def flush(self) -> None:
        """Write all added rows; returns when they are on the disk.

        Raises:
          OSError: they could not be written.

        Examples:
          >>> recorder = jr.datasets.Recorder("runs/hopper")
          >>> recorder.add({"reward": np.ones((5, 2))}, np.zeros((5, 2), bool))
          >>> recorder.flush()
          >>> jr.datasets.load("runs/hopper").ends.shape
          (5, 2)
        """
        self._rows.flush()

    def __exit__(self, *_: Any) -> None:
        with signals.Held():  # else what has begun to close may not end
            self._close()


class _Rows:
    """Rows that are not written yet, and the folder that they go to; the methods of a `Recorder`."""

    def __init__(self, folder: str, part_bytes: int):
        self._folder, self._part_bytes = folder, part_bytes
        self._process, self._lock, self._thread = os.getpid(), threading.Lock(), None
        self._arrays, self._spare, self._count = {}, [], 0  # rows of a part, arrays for the next, and how many rows
        self._unwritten: list[tuple[dict[str, np.ndarray], int]] = []  # parts, the oldest first
        self._content, self._number, self._first, self._begins = {}, 0, 0, True
        files.make(self._folder)
        with contextlib.ExitStack() as locks:
            if files.lock(self._folder, locks) is False:
                raise ValueError(f"{self._folder}: another recorder writes to it; give each a folder of its own.")
            self._place = os.stat(self._folder)
            if numbers := _numbers(self._folder, may_be_new=True):
                newest = _described(self._folder, numbers[-1])
                self._content = {name: newest[name] for name in ("recording", "rows", "types")}
                self._number, self._first = numbers[-1] + 1, newest["first"] + newest["length"]
            self._write()
            self._locks: contextlib.ExitStack | None = locks.pop_all()

    def add(self, rows: Any, ends: Any) -> None:
        with self._turn():
            if self._unwritten and not (self._thread and self._thread.is_alive()):
                self._write()
            rows = jax.tree.map_with_path(as_number, _plain((), rows))
            length, num_envs = checks.leading_axes(rows, 2, "a recording")
            ends = checks.check_mask(as_number((), ends), (length, num_envs), ENDS, np)
            if not self._arrays:
                content = self._content or _types(rows, num_envs)
                like, self._like = _empty(content, 1)
                self._room = max(self._part_bytes // max(sum(x.nbytes for x in like.values()), 1), 1)
                self._arrays, self._content = _empty(content, self._room)[0], content
            checks.check_like(rows, self._like, 1, 1, "the recording")
            leaves = [ends, *jax.tree.leaves(rows)]
            for at in (0, *range(self._room - self._count, length, self._room)):
                after = min(self._count + length - at, self._room)
                for array, leaf in zip(self._arrays.values(), leaves, strict=True):
                    array[self._count : after] = leaf[at : at + after - self._count]
                self._count = after
                if after == self._room:
                    self._end_part()
                    self._thread = files.beside(self._try)

    def flush(self) -> None:
        with self._turn():
            self._finish()

    def close(self) -> None:
        if self._process == os.getpid():
            with self._turn() as locks, locks:
                self._locks = None
                self._finish()

    @contextlib.contextmanager
    def _turn(self) -> Iterator[contextlib.ExitStack]:
        """A call, of one thread at a time, which no signal interrupts."""
        if self._process != os.getpid():
            raise RuntimeError(f"{self._folder}: its recorder was forked; in a child, record to a folder of its own.")
        with signals.Held() as held:
            while not self._lock.acquire(timeout=LOOK_AGAIN):
                held.deliver()
            try:
                if self._locks is None:
                    raise ValueError(f"{self._folder}: the recorder's block has ended; make a new one, which goes on.")
                yield self._locks
            finally:
                self._lock.release()

    def _finish(self) -> None:
        """Write all rows; of a recording without any, a part that says their types."""
        is_first = self._number == 0 < len(self._arrays) and not self._unwritten
        self._end_part(is_part=self._count > 0 or is_first)
        self._write()

    def _end_part(self, is_part: bool = True) -> None:
        """Begin another part, once the writing of the one before has ended."""
        if self._thread:
            self._thread.join()
        if is_part:
            self._unwritten.append((self._arrays, self._count))
            self._arrays = self._spare.pop() if self._spare else _empty(self._content, self._room)[0]
            self._count = 0

    def _try(self) -> None:
        with contextlib.suppress(OSError):  # the next call raises it, if it comes again
            self._write()

    def _write(self) -> None:
        """Write the parts that wait. Each is durable before it gets its name, and kept if it cannot be written."""
        new = os.path.join(self._folder, NEW)
        try:
            while True:
                if not os.path.samestat(os.stat(self._folder), self._place):
                    raise FileNotFoundError(errno.ENOENT, "the folder is another one now; make a new recorder")
                files.sync(self._folder)  # the name of the part before is durable
                with contextlib.ExitStack() as last:
                    last.callback(shutil.rmtree, new, ignore_errors=True)
                    shutil.rmtree(new, ignore_errors=True)
                    os.mkdir(new)
                    if not self._unwritten:
                        if not self._arrays:  # it is made: an error comes now if nothing can be written
                            files.describe(new, {})
                        break
                    arrays, count = self._unwritten[0]
                    content = self._content | {"first": self._first, "length": count, "begins": self._begins}
                    content["files"] = _write_files({name: x[:count] for name, x in arrays.items()}, new)
                    files.complete(new, _part(self._folder, self._number), content, MAX_DESCRIPTION)
                    self._number, self._first, self._begins = self._number + 1, self._first + count, False
                    self._spare = [self._unwritten.pop(0)[0]]
        except OSError as error:
            raise type(error)(error.errno, f"{self._folder}: cannot record: {error}") from error


def load(folder: str | os.PathLike[str], *, start: int = 0, stop: int | None = None) -> Steps:
    """Read rows of a recording, from time `start` to before `stop`, also while a recorder writes.

    Only files of the parts with these rows are read, straight into the result, and each is compared with its CRC-32.
    Rows go to `SequenceBuffer.add`, and to `transitions` if they have the names of `Steps`.

    Args:
      folder: path of the recording.
      start: the first row.
      stop: after the last row; None for all.

    Returns:
      `Steps`: `rows`, the recorded pytree of NumPy arrays [stop - start, num_envs, ...], and `ends` bool
      [stop - start, num_envs], also True in the last row before the recording was resumed.

    Raises:
      ValueError: `folder` holds no recording, a file is missing or damaged, or the rows are out of range.

    Examples:
      >>> with jr.datasets.Recorder("runs/cheetah") as recorder:
      ...     recorder.add({"reward": np.arange(6.0).reshape(6, 1)}, np.zeros((6, 1), bool))
      >>> jr.datasets.load("runs/cheetah", start=2, stop=4).rows["reward"].tolist()
      [[2.0], [3.0]]
    """
    path = os.path.realpath(files.local(folder, "a recording"))
    numbers = _numbers(path)
    newest = _described(path, numbers[-1])
    num_rows = newest["first"] + newest["length"]
    stop = checks.check_integer("stop", num_rows if stop is None else stop, 0, num_rows, "after the last row")
    start = checks.check_integer("start", start, 0, stop, "the first row")
    later = bisect.bisect_right(numbers, start, key=lambda number: _described(path, number)["first"])
    begins, pieces, row = [], [], None
    for number in range(numbers[max(later - 1, 0)], numbers[-1] + 1):
        part, place = _described(path, number), _part(path, number)
        first, after = part["first"], part["first"] + part["length"]
        if (first > start if row is None else first != row) or any(part[x] != newest[x] for x in ("rows", "types")):
            raise ValueError(f"{place}: does not begin where the part before it ends, or has other leaves.")
        if part["begins"] and start < first <= stop:
            begins.append(first - 1 - start)
        low, high, row = max(first, start), min(after, stop), after
        for name, (size, crc) in part["files"].items() if low < high else ():
            pieces.append((name, low - start, high - start, after - low, os.path.join(place, f"{name}.npy"), size, crc))
            files.check_size(*pieces[-1][4:6])
        if after > stop:
            break
    found, rows = _empty(newest, stop - start)
    for name, low, high, from_end, file, size, crc in pieces:
        target = found[name][low:high].reshape(-1).view(np.uint8)
        files.read_into(file, size, crc, size - from_end * found[name][:1].nbytes, target)
    found[ENDS][begins] = True
    return Steps(rows, found[ENDS])


def _part(folder: str, number: int) -> str:
    return os.path.join(folder, f"part_{number:08}")


def _numbers(folder: str, may_be_new: bool = False) -> list[int]:
    """Numbers of the parts in a folder, in order; a `ValueError` if it holds no recording."""
    names = []
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        names = os.listdir(folder)
    found = sorted(int(name[5:]) for name in names if re.fullmatch("part_[0-9]{8,18}", name))
    if not found and not (may_be_new and {*names} <= {NEW}):
        raise ValueError(f"{folder}: holds no recording; give its folder, or a new one to record.")
    return found


def _types(rows: Any, num_envs: int) -> dict[str, Any]:
    """Structure and types of rows: what the descriptions of all parts have in common."""
    types: dict[str, Any] = {ENDS: ["bool", [num_envs]]}
    for path, leaf in jax.tree.leaves_with_path(rows):
        text = re.sub(r"[^\w.-]", "_", keystr(path, simple=True, separator=".")).encode()[:100].decode(errors="ignore")
        name, others = text or "rows", {x.lower() for x in types}  # file systems may not tell A from a
        while name.lower() in others:
            name = f"{name}_{len(types)}"
        types[name] = [str(leaf.dtype), [*leaf.shape[1:]]]
    names = jax.tree.unflatten(jax.tree.structure(rows), [*types][1:])
    if not _is_literal(names):
        paths = [path for path, _ in jax.tree.leaves_with_path(names)]
        path = next((x for x in paths if not all(_is_literal(getattr(key, "key", 0)) for key in x)), ())
        raise ValueError(f"leaf {keystr(path)}: its keys cannot be recorded; use text, ints or tuples of them.")
    return {"recording": FORMAT, "rows": repr(names), "types": types}


def _empty(content: dict[str, Any], length: int) -> tuple[dict[str, np.ndarray], Any]:
    """Arrays for `length` rows: by name, with the ends, and as the recorded pytree."""
    arrays = {name: np.empty((length, *shape), dtype) for name, (dtype, shape) in content["types"].items()}
    return arrays, jax.tree.map(arrays.__getitem__, ast.literal_eval(content["rows"]))


def _write_files(arrays: dict[str, np.ndarray], folder: str) -> dict[str, list[int]]:
    """Write the files of a part; return their sizes and CRC-32."""
    pieces, sums = {}, {}
    for name, array in arrays.items():
        is_plain, header = array.dtype.isbuiltin < 2, io.BytesIO()  # 2: NumPy's format has no name for it
        stored = array.view(array.dtype if is_plain else f"u{array.dtype.itemsize}")
        np.lib.format.write_array_header_1_0(header, np.lib.format.header_data_from_array_1_0(stored))
        pieces[name] = header.getvalue(), stored.reshape(-1).view(np.uint8).data

    def checksum() -> None:
        sums.update({name: zlib.crc32(data, zlib.crc32(header)) for name, (header, data) in pieces.items()})

    thread = files.beside(checksum)
    sizes = {name: files.write(os.path.join(folder, f"{name}.npy"), *pieces[name]) for name in pieces}
    if thread:
        thread.join()
    return {name: [sizes[name], sums[name]] for name in sizes}


def _described(folder: str, number: int) -> dict[str, Any]:
    """The description of a part; a `ValueError` if it is damaged or of another program."""
    path = _part(folder, number)
    with files.reported(f"{path}: is no part of a recording, or damaged", also=files.OF_STRANGERS):
        if os.path.islink(path):
            raise ValueError("it is a link")
        content = files.description(path, MAX_DESCRIPTION)
        _check(**content)
        return content


def _check(*, recording: int, rows: str, types: dict, files: dict, first: int, length: int, begins: bool) -> None:
    """Check that a recorder may have described a part so, before any memory of its size is asked for."""
    names, counts = [ENDS, *jax.tree.leaves(ast.literal_eval(rows))], [first, length, *itertools.chain(*files.values())]
    if recording != FORMAT or not names == [*types] == [*files] or {*map(type, counts)} != {int}:
        raise ValueError("it is of another version or program")
    if not 0 <= min(counts) <= max(counts) < 2**62:
        raise ValueError("a number is out of range")
    for name, array in _empty({"rows": rows, "types": types}, 0)[0].items():
        (size, _), (num_envs,) = files[name], types[ENDS][1]
        header = size - length * math.prod(array.shape[1:]) * array.itemsize
        is_number = jnp.issubdtype(array.dtype, jnp.number) or array.dtype == bool
        if not (is_number and array.shape[1] == num_envs and 0 < header < 2**16 and re.fullmatch(NAME, name)):
            raise ValueError(f"leaf {name!r}")


def _plain(path: tuple[Any, ...], node: Any) -> Any:
    """A pytree of dicts, lists and tuples; other nodes become dicts."""
    try:
        children = jax.tree.leaves_with_path(node, is_leaf=lambda x: x is not node)
    except ValueError as error:  # of keys that have no order
        raise ValueError(f"leaf {keystr(path)}: {error}") from error
    if node is None or any(x is node for _, x in children):
        return node
    if type(node) in (list, tuple):
        return type(node)(_plain((*path, key), child) for (key,), child in children)
    return {
        key.key if type(key) is DictKey else keystr((key,), simple=True): _plain((*path, key), child)
        for (key,), child in children
    }


def _is_literal(x: Any) -> bool:
    try:
        return ast.literal_eval(repr(x)) == x
    except (MemoryError, RecursionError, SyntaxError, TypeError, ValueError):
        return False
