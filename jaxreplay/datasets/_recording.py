"""Experience on the disk: recorded rows, in parts that any program reads, and their description.

FOLDER/description.json               leaves, their shapes and dtypes; length, sizes and CRC-32 of each part
FOLDER/part_00000007/observation.npy  the rows of a part, one file of NumPy's format per leaf
FOLDER/part_00000008.new/             the next part: in progress, or left by a process that was killed

A part is written with the description in it, which lists it and all before it. It gets its name when all of it is on
the disk, and only then the description moves up. So the newest description has no part that is not there.
"""

import contextlib
import io
import itertools
import os
import re
import shutil
import threading
import weakref
from collections.abc import Iterator
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np
from jax import tree_util

from jaxreplay._common import checks, files, signals
from jaxreplay.datasets._rows import Steps, as_number

ENDS, PLAIN = "ends", "biufc"  # kinds of dtypes that NumPy's format has


class Recorder:
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
      ...         rows, ends = {"reward": jnp.ones((5, 2))}, jnp.zeros((5, 2), bool)
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
            self._resumes = not {*os.listdir(self._folder)} <= {os.path.basename(_part(self._folder, 0, ".new"))}
            self._content = _description(self._folder) if self._resumes else {}
            self._unlock = weakref.finalize(self, locks.pop_all().close)
        self._like, self._count = None, 0
        self._arrays, self._spare = [], []  # the part that is filled, and the one that is written
        self._thread: threading.Thread | None = None
        self._error: OSError | None = None

    def add(self, rows: Any, ends: Any) -> None:
        """Append rows; returns when they are copied, so the caller may overwrite them.

        Args:
          rows: pytree of arrays [T, num_envs, ...], on any device. The first call determines structure, shapes and
            dtypes, also for later recorders. Nodes other than dicts, lists and tuples are recorded as dicts.
          ends: bool [T, num_envs], True for the last row of an episode.

        Raises:
          ValueError: a leaf differs from the recorded ones, or is traced or not numeric; or the block has ended.
          OSError: rows added before could not be written.

        Examples:
          >>> recorder = jr.datasets.Recorder("runs/walker")
          >>> recorder.add({"reward": jnp.ones((5, 2))}, ends=jnp.zeros((5, 2), bool))
          >>> recorder.flush()
          >>> len(jr.datasets.load("runs/walker").ends)
          5
        """
        with signals.Held():
            self._check()
            rows, ends = tree_util.tree_map_with_path(as_number, (rows, ends))
            length, num_envs = checks.leading_axes(rows, 2, "a recording")
            ends = checks.check_mask(ends, (length, num_envs), ENDS, np)
            if self._like is None:
                self._begin(rows, num_envs)
            checks.check_like(rows, self._like, 1, 0, "the recording")
            at = 0
            while at < length:
                count = min(length - at, len(self._arrays[0]) - self._count)
                for array, leaf in zip(self._arrays, [ends, *jax.tree.leaves(rows)], strict=True):
                    array[self._count : self._count + count] = leaf[at : at + count]
                self._count, at = self._count + count, at + count
                if self._count == len(self._arrays[0]):
                    self._hand_over()

    def flush(self) -> None:
        """Write all added rows; returns when they are on the disk.

        Raises:
          OSError: they could not be written.

        Examples:
          >>> recorder = jr.datasets.Recorder("runs/hopper")
          >>> recorder.flush()
        """
        with signals.Held():
            self._check()
            if self._count:
                self._hand_over()
            self._wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: Any) -> None:
        with signals.Held():
            try:
                self.flush()
            finally:
                self._unlock()

    def _begin(self, rows: Any, num_envs: int) -> None:
        """Describe the first rows; a `ValueError` if they are not as those that are recorded."""
        types: dict[str, Any] = {ENDS: ["bool", [num_envs]]}
        for path, leaf in tree_util.tree_leaves_with_path(rows):
            name = re.sub(r"[^\w.-]", "_", tree_util.keystr(path, simple=True, separator="."))[:100] or "rows"
            while name in types:
                name += "_"
            types[name] = [str(leaf.dtype), [*leaf.shape[1:]]]
        content = {"recording": 1, "rows": _structure(rows, iter([*types][1:])), "leaves": types, "parts": []}
        stored = (self._content or content)["leaves"]
        for name in {**stored, **types}:
            got, expected = (checks.type_text(*x[name]) if name in x else "nothing" for x in (types, stored))
            if got != expected:
                raise ValueError(f"leaf {name}: got {got}, the recording stores {expected}.")
        self._content = self._content or content
        if self._content["rows"] != content["rows"]:
            raise ValueError(f"rows: got {content['rows']}, the recording stores {self._content['rows']}.")
        specs = [jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype) for leaf in jax.tree.leaves(rows)]
        row_bytes = num_envs + sum(x.size * x.dtype.itemsize for x in specs)
        room = max(self._part_bytes // max(row_bytes, 1), 1)
        self._arrays, self._spare = (
            [np.empty((room, num_envs), bool), *(np.empty((room, *x.shape), x.dtype) for x in specs)] for _ in range(2)
        )
        self._like = jax.tree.unflatten(jax.tree.structure(rows), specs)

    def _check(self) -> None:
        if not self._unlock.alive:
            raise ValueError(f"{self._folder}: the recorder's block has ended; make a new one, which goes on.")
        if self._error is not None:
            raise self._error

    def _wait(self) -> None:
        if self._thread is not None:
            self._thread.join()
        self._check()

    def _hand_over(self) -> None:
        """Have the part written in the background, once the one before it is."""
        self._wait()
        self._thread = threading.Thread(target=self._attempt, args=(self._arrays, self._count), name="jaxreplay record")
        self._thread.start()
        self._arrays, self._spare, self._count = self._spare, self._arrays, 0

    def _attempt(self, arrays: list[np.ndarray], count: int) -> None:
        try:
            self._write(arrays, count)
        except BaseException as error:
            shutil.rmtree(_part(self._folder, len(self._content["parts"]), ".new"), ignore_errors=True)
            first_line = f"{type(error).__name__}: {error}".partition("\n")[0][:1000]
            message, code = f"{self._folder}: cannot record: {first_line}", getattr(error, "errno", None)
            self._error = OSError(message) if code is None else OSError(code, message)
            self._error.__cause__ = error

    def _write(self, arrays: list[np.ndarray], count: int) -> None:
        """Write a part; it is durable before it gets its name."""
        number, written = len(self._content["parts"]), {}
        new, folder = _part(self._folder, number, ".new"), _part(self._folder, number)
        if os.path.lexists(new):
            shutil.rmtree(new)
        os.mkdir(new)
        for name, array in zip(self._content["leaves"], arrays, strict=True):
            header, stored = io.BytesIO(), array[:count]
            if array.dtype.kind not in PLAIN:
                stored = stored.view(f"u{array.dtype.itemsize}")
            np.lib.format.write_array_header_1_0(header, np.lib.format.header_data_from_array_1_0(stored))
            written[name] = files.write(os.path.join(new, f"{name}.npy"), header.getvalue(), _bytes_of(stored))
        entry = {"length": count, "resumed": self._resumes, "files": written}
        content = self._content | {"parts": [*self._content["parts"], entry]}
        files.describe(new, content)
        files.sync(new)
        os.rename(new, folder)
        self._content, self._resumes = content, False
        files.sync(self._folder)
        os.replace(os.path.join(folder, files.DESCRIPTION), os.path.join(self._folder, files.DESCRIPTION))


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
      ...     recorder.add({"reward": jnp.arange(6.0).reshape(6, 1)}, jnp.zeros((6, 1), bool))
      >>> jr.datasets.load("runs/cheetah", start=2, stop=4).rows["reward"].tolist()
      [[2.0], [3.0]]
    """
    path = os.path.realpath(files.local(folder, "a recording"))
    content = _description(path)
    firsts = [0, *itertools.accumulate(part["length"] for part in content["parts"])]
    stop = checks.check_integer("stop", firsts[-1] if stop is None else stop, 0, firsts[-1], "after the last row")
    start = checks.check_integer("start", start, 0, stop, "the first row")
    found = {name: np.empty((stop - start, *x[1]), jnp.dtype(x[0])) for name, x in content["leaves"].items()}
    for number, (first, after) in enumerate(itertools.pairwise(firsts)):
        part, low, high = content["parts"][number], max(first, start), min(after, stop)
        if part["resumed"] and start < first <= stop:
            found[ENDS][first - 1 - start] = True
        for name, array in found.items() if low < high else ():
            size, crc = part["files"][name]
            offset, file = size - (after - low) * (array.nbytes // len(array)), os.path.join(_part(path, number), name)
            files.read_into(f"{file}.npy", size, crc, offset, _bytes_of(array[low - start : high - start]))
    return Steps(_rebuilt(content["rows"], found), found[ENDS])


def _part(folder: str, number: int, new: str = "") -> str:
    return os.path.join(folder, f"part_{number:08}{new}")


def _description(folder: str) -> dict[str, Any]:
    """The newest description of a recording, which may not have moved up yet."""
    content = {}
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        content = files.description(folder)
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        while True:
            content = files.description(_part(folder, len(content.get("parts", ()))))
    if content.get("recording") != 1:
        raise ValueError(f"{folder}: holds no recording; give its folder, or a new one to record.")
    return content


def _bytes_of(array: np.ndarray) -> Any:
    return memoryview(array.reshape(-1).view(np.uint8))  # pyright: ignore[reportArgumentType]


def _structure(node: Any, names: Iterator[str]) -> Any:
    """A pytree as JSON, with names for leaves; nodes other than lists and tuples are dicts."""
    children = tree_util.tree_leaves_with_path(node, is_leaf=lambda x: x is not node)
    if node is None or any(x is node for _, x in children):
        return None if node is None else next(names)
    kind = type(node).__name__ if type(node) in (list, tuple) else "dict"
    keys = [x.key if isinstance(x, tree_util.DictKey) else tree_util.keystr((x,), simple=True) for (x,), _ in children]
    return [kind, keys, [_structure(x, names) for _, x in children]]


def _rebuilt(found: Any, leaves: dict[str, Any]) -> Any:
    """The inverse of `_structure`, with leaves for names."""
    if not isinstance(found, list):
        return found and leaves[found]
    kind, keys, nodes = found
    nodes = [_rebuilt(x, leaves) for x in nodes]
    return dict(zip(keys, nodes, strict=True)) if kind == "dict" else tuple(nodes) if kind == "tuple" else nodes
