"""Experience on the disk: recorded rows, in parts that any program reads, and their description.

FOLDER/description.json               leaves, their shapes and dtypes; length, sizes and CRC-32 of each part;
                                      the first row of each recorder
FOLDER/part_00000007/observation.npy  the rows of a part, one file of NumPy's format per leaf
FOLDER/part.new/                      the next part: in progress, or left by a process that was killed

A part is written with the description in it, which lists it and all before it. It gets its name when all of it is on
the disk, and only then the description moves up. So the newest description has no part that is not there.
"""

import ast
import contextlib
import io
import itertools
import os
import re
import shutil
import weakref
import zlib
from concurrent import futures
from typing import Any

import jax
import numpy as np
from jax.tree_util import DictKey, keystr

from jaxreplay._common import checks, files, signals
from jaxreplay.datasets._rows import Steps, as_number

ENDS, NEW = "ends", "part.new"


class Recorder(contextlib.AbstractContextManager):
    """Recorded rows of `SequenceBuffer.add`, appended to a folder of plain `.npy` files.

    Rows are copied and written in parts, each by a thread in the background. A full part waits for the one before it,
    and `add` with it, so memory is that of two parts. A part is on the disk, all of it, or not there: whatever cuts the
    program off (a signal, Ctrl-C, a full disk, a power cut), `load` returns the rows of all finished parts and no
    others, and the next recorder continues after them. Where it does, `load` returns an end in the last row before.

    One recorder at a time writes to a folder. The end of the `with` block writes the last rows and releases the folder.
    Other programs read a part with `np.load`. bfloat16, float8 and int4 are stored as unsigned integers of one or two
    bytes; `description.json` has the names, shapes and dtypes.

    Args:
      folder: path; it is made, or empty, or holds a recording.
      part_bytes: size of a part, at least one row. `flush` writes smaller ones.

    Raises:
      ValueError: `folder` holds something else or a damaged description, is a URL, or another recorder writes to it.
      OSError: the folder cannot be made or read.

    Examples:
      >>> with jr.datasets.Recorder("runs/pendulum") as recorder:
      ...     for _ in range(3):
      ...         rows, ends = {"reward": np.ones((5, 2))}, np.zeros((5, 2), bool)
      ...         recorder.add(rows, ends)
      >>> jr.datasets.load("runs/pendulum").rows["reward"].shape
      (15, 2)
    """

    def __init__(self, folder: str | os.PathLike[str], *, part_bytes: int = 2**26):
        self._folder = os.path.realpath(files.local(folder, "a recording"))
        self._part_bytes = checks.check_integer("part_bytes", part_bytes, 1, 2**40, "the size of a part")
        files.make(self._folder)
        with contextlib.ExitStack() as locks:
            if files.lock(self._folder, locks) is False:
                raise ValueError(f"{self._folder}: another recorder writes to it; give each a folder of its own.")
            self._content = {} if {*os.listdir(self._folder)} <= {NEW} else _description(self._folder)
            self._unlock = weakref.finalize(self, locks.pop_all().close)
        self._arrays, self._spare, self._count = {}, {}, 0  # rows of a part, of the one that is written, and how many
        self._thread = futures.ThreadPoolExecutor(2, "jaxreplay record")  # one writes, one checksums
        self._written = self._thread.submit(int)

    def add(self, rows: Any, ends: Any) -> None:
        """Append rows; returns when they are copied, so the caller may overwrite them.

        Args:
          rows: pytree of arrays [T, num_envs, ...], on any device. The first call determines structure, shapes and
            dtypes, also for later recorders. Nodes other than dicts, lists and tuples are recorded as dicts.
          ends: bool [T, num_envs], True for the last row of an episode.

        Raises:
          ValueError: a leaf differs from the recorded ones or is not numeric, or the block has ended.
          OSError: rows added before could not be written.

        Examples:
          >>> recorder = jr.datasets.Recorder("runs/walker")
          >>> recorder.add({"reward": np.ones((5, 2))}, ends=np.zeros((5, 2), bool))
          >>> recorder.flush()
          >>> len(jr.datasets.load("runs/walker").ends)
          5
        """
        with signals.Held():
            rows = _plain(jax.tree.map_with_path(as_number, rows))
            length, num_envs = checks.leading_axes(rows, 2, "a recording")
            ends = checks.check_mask(as_number((), ends), (length, num_envs), ENDS, np)
            if not self._arrays:
                self._content = _described(rows, num_envs) | self._content
                self._content["starts"].append(sum(part["length"] for part in self._content["parts"]))
                room = max(self._part_bytes // max(sum(x.nbytes for x in _empty(self._content, 1)[0].values()), 1), 1)
                (self._arrays, self._like), (self._spare, _) = (_empty(self._content, room) for _ in range(2))
            checks.check_like(rows, self._like, 1, 1, "the recording")
            room, leaves = len(self._arrays[ENDS]), [ends, *jax.tree.leaves(rows)]
            for at in (0, *range(room - self._count, length, room)):
                after = min(self._count + length - at, room)
                for array, leaf in zip(self._arrays.values(), leaves, strict=True):
                    array[self._count : after] = leaf[at : at + after - self._count]
                self._count = after
                self._hand_over(room)

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
        with signals.Held():
            self._hand_over(1)
            self._written.result()

    def __exit__(self, *_: Any) -> None:
        with signals.Held(), contextlib.ExitStack() as last, self._thread:
            last.callback(self._unlock)
            self.flush()

    def _hand_over(self, least: int) -> None:
        """Have a part of at least so many rows written in the background, once the one before it is."""
        if not self._unlock.alive:
            raise ValueError(f"{self._folder}: the recorder's block has ended; make a new one, which goes on.")
        if self._written.done() or self._count >= least:
            self._written.result()  # raises its error
        if self._count >= least:
            self._written = self._thread.submit(self._write, self._arrays, self._count)
            self._arrays, self._spare, self._count = self._spare, self._arrays, 0

    def _write(self, arrays: dict[str, np.ndarray], count: int) -> None:
        """Write a part; it is durable before it gets its name."""
        parts, written = self._content["parts"], {}
        new, folder = os.path.join(self._folder, NEW), _part(self._folder, len(parts))
        try:
            shutil.rmtree(new, ignore_errors=True)
            os.mkdir(new)
            for name, array in arrays.items():
                is_plain, header = array.dtype.isbuiltin < 2, io.BytesIO()  # 2: NumPy's format has no name for it
                stored = array[:count].view(array.dtype if is_plain else f"u{array.dtype.itemsize}")
                np.lib.format.write_array_header_1_0(header, np.lib.format.header_data_from_array_1_0(stored))
                pieces = header.getvalue(), stored.reshape(-1).view(np.uint8).data
                crc = self._thread.submit(zlib.crc32, pieces[1], zlib.crc32(pieces[0]))
                written[name] = [files.write(os.path.join(new, f"{name}.npy"), *pieces), crc.result()]
            parts.append({"length": count, "files": written})
            files.complete(new, folder, self._content)
            os.replace(os.path.join(folder, files.DESCRIPTION), os.path.join(self._folder, files.DESCRIPTION))
        except OSError as error:
            shutil.rmtree(new, ignore_errors=True)
            raise type(error)(error.errno, f"{self._folder}: cannot record: {error}") from error


def load(folder: str | os.PathLike[str], *, start: int = 0, stop: int | None = None) -> Steps:
    """Rows of a recording, from row of time `start` to before `stop`, also while a recorder writes.

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
    content = _description(path)
    firsts = [0, *itertools.accumulate(part["length"] for part in content["parts"])]
    stop = checks.check_integer("stop", firsts[-1] if stop is None else stop, 0, firsts[-1], "after the last row")
    start = checks.check_integer("start", start, 0, stop, "the first row")
    found, rows = _empty(content, stop - start)
    for number, (first, after) in enumerate(itertools.pairwise(firsts)):
        part, low, high = content["parts"][number], max(first, start), min(after, stop)
        for name, array in found.items() if low < high else ():
            size, crc = part["files"][name]
            file, offset = os.path.join(_part(path, number), f"{name}.npy"), size - (after - low) * array[0].nbytes
            files.read_into(file, size, crc, offset, array[low - start : high - start].reshape(-1).view(np.uint8))
    found[ENDS][[first - 1 - start for first in content["starts"] if start < first <= stop]] = True
    return Steps(rows, found[ENDS])


def _part(folder: str, number: int) -> str:
    return os.path.join(folder, f"part_{number:08}")


def _described(rows: Any, num_envs: int) -> dict[str, Any]:
    """The description of a recording of such rows, before its first part."""
    types: dict[str, Any] = {ENDS: ["bool", [num_envs]]}
    for path, leaf in jax.tree.leaves_with_path(rows):
        name = re.sub(r"[^\w.-]", "_", keystr(path, simple=True, separator="."))[:100] or "rows"
        while name in types:
            name += "_"
        types[name] = [str(leaf.dtype), [*leaf.shape[1:]]]
    names = jax.tree.unflatten(jax.tree.structure(rows), [*types][1:])
    return {"recording": 2, "rows": repr(names), "leaves": types, "starts": [], "parts": []}


def _empty(content: dict[str, Any], length: int) -> tuple[dict[str, np.ndarray], Any]:
    """Arrays for `length` rows: by name, with the ends, and as the recorded pytree."""
    arrays = {name: np.empty((length, *shape), dtype) for name, (dtype, shape) in content["leaves"].items()}
    return arrays, jax.tree.map(arrays.__getitem__, ast.literal_eval(content["rows"]))


def _description(folder: str) -> dict[str, Any]:
    """The newest description of a recording, which may not have moved up yet."""
    content, places = {}, [_part(folder, 0), folder]
    while places:
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            content = files.description(places.pop())
            places = [_part(folder, len(content.get("parts", ())))]
    if content.get("recording") != 2:
        raise ValueError(f"{folder}: holds no recording; give its folder, or a new one to record.")
    return content


def _plain(node: Any) -> Any:
    """A pytree of dicts, lists and tuples; other nodes become dicts."""
    children = jax.tree.leaves_with_path(node, is_leaf=lambda x: x is not node)
    if node is None or any(x is node for _, x in children):
        return node
    if type(node) in (list, tuple):
        return type(node)(map(_plain, node))
    return {x.key if type(x) is DictKey else keystr((x,), simple=True): _plain(y) for (x,), y in children}
