"""The folders of checkpoints, and when one is deleted.

PATH/checkpoint_7/description.json  what was saved, and the size and CRC-32 of each file
PATH/checkpoint_7/arrays/           written by Orbax: Zarr version 2, compressed, one folder for each array
PATH/checkpoint_8.part/             the next checkpoint: in progress, or left by a process that was killed

A checkpoint is written to a folder of its own by a thread of its own, which no signal interrupts, and gets its name
when all of it is on the disk. Only then is an older one deleted. So whatever is cut off, a complete one is there. Only
folders with a description are deleted. A lock on the description tells that its writer is alive.
"""

import contextlib
import hashlib
import io
import json
import logging
import os
import re
import shutil
import stat
import threading
import zlib
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor  # before `finish_all` is registered, to end after it
from typing import Any

import jax
import numpy as np

PART, DESCRIPTION, ARRAYS, LEAVES = ".part", "description.json", "arrays", "leaves"
CHUNK = 2**22  # bytes of an array that are compressed at a time
MAX_DESCRIPTION, MAX_SIZE = 2**28, 2**63  # bytes, of a description and of any file
ZSTD = b"\x28\xb5\x2f\xfd"
_orbax = threading.Lock()  # concurrent calls of Orbax from several threads occasionally fail


class Damaged(ValueError):
    """Files of a checkpoint are not those that were written."""


class Writing(threading.Thread):
    """A thread that writes a checkpoint to a folder that `begin` made, completes it, and deletes older ones.

    It sets `copied` when it no longer needs the arrays, and `done` at its end, when it has an `error` if it failed.
    Wait for these events: in CPython 3.11 a `join` that a signal interrupts takes the thread for ended.
    """

    def __init__(self, path: str, number: int, arrays: dict[str, Any], content: dict[str, Any], keep: int):
        super().__init__(name="jaxreplay save")
        self.path, self.number, self.part = path, number, folder_of(path, number, PART)
        self.arrays, self.content, self.keep = arrays, content, keep
        self.copied, self.done, self.error = threading.Event(), threading.Event(), None

    def run(self) -> None:
        is_first = jax.process_index() == 0
        try:
            with _orbax, _quiet(), contextlib.ExitStack() as locks:
                if is_first:
                    _describe(self.part, self.content, locks)
                if self.arrays:
                    written = _save(os.path.join(self.part, ARRAYS), self.arrays)
                    self.arrays = {}
                    self.copied.set()
                    written.result()
                if is_first:
                    self._complete(locks)
                    self._delete_older()
        except OSError as error:
            self.error = error
        except Exception as error:
            first_line = f"{type(error).__name__}: {error}".partition("\n")[0][:1000]
            self.error = OSError(f"{self.part}: cannot write the checkpoint: {first_line}")
            self.error.__cause__ = error
        finally:
            if self.error is not None:
                _delete(self.part)
            self.copied.set()
            self.done.set()

    def outcome(self) -> int:
        """0; raises the error of the write."""
        if self.error is not None:
            raise self.error
        return 0

    def _complete(self, locks: contextlib.ExitStack) -> None:
        checked = _checked_all(self.part, dict.fromkeys(_listed(self.part), MAX_SIZE), sync=True)
        _describe(self.part, self.content | {"files": checked}, locks)
        for folder, _, _ in os.walk(self.part):
            _sync(folder)
        os.rename(self.part, folder_of(self.path, self.number))
        _sync(self.path)

    def _delete_older(self) -> None:
        complete = []
        for number in numbers(self.path):
            with contextlib.suppress(Damaged):
                read(folder_of(self.path, number))
                complete.append(number)
        for number in complete[self.keep :]:
            with contextlib.suppress(OSError):  # another writer was quicker
                os.rename(folder_of(self.path, number), folder_of(self.path, number, PART))
                _delete(folder_of(self.path, number, PART))


def finish_all() -> None:
    """Wait for all threads that write."""
    for thread in threading.enumerate():
        if isinstance(thread, Writing) and thread.is_alive():
            thread.done.wait()


# Before the interpreter ends what Orbax's threads need, which is before it waits for other threads.
threading._register_atexit(finish_all)  # pyright: ignore[reportAttributeAccessIssue]


def absolute(path: str | os.PathLike) -> str:
    """The absolute path as text.

    Raises:
      ValueError: `path` is a URL.
    """
    path = os.fspath(path)
    if "://" in path:
        raise ValueError(
            f"{path}: is a URL; a checkpoint is a folder of a file system: mount that, or copy the folder."
        )
    return os.path.abspath(path)


def numbers(path: str, part: str = "") -> list[int]:
    """Numbers of the checkpoints in a folder, the newest first; with PART, of those that are not complete."""
    try:
        found = [re.fullmatch(rf"checkpoint_(\d+){re.escape(part)}", name) for name in os.listdir(path)]
    except (FileNotFoundError, NotADirectoryError):
        return []
    return sorted((int(match[1]) for match in found if match), reverse=True)


def folder_of(path: str, number: int, part: str = "") -> str:
    return os.path.join(path, f"checkpoint_{number}{part}")


def begin(path: str) -> int:
    """Make the folder of a new checkpoint, and delete those of killed processes; the number of the new one."""
    _make(path)
    for number in numbers(path, PART):
        part = folder_of(path, number, PART)
        with contextlib.suppress(OSError, Damaged):  # it is written, or not one of ours
            read(part)
            with open(os.path.join(part, DESCRIPTION), "rb") as file:
                _lock(file)
                _delete(part)
    number = max([-1, *numbers(path), *numbers(path, PART)]) + 1
    while True:  # another writer may be quicker
        with contextlib.suppress(FileExistsError):
            os.mkdir(part := folder_of(path, number, PART))
            if not os.path.exists(folder_of(path, number)):
                return number
            os.rmdir(part)
        number += 1


@contextlib.contextmanager
def reported(folder: str) -> Iterator[None]:
    """Errors in files, of which there are many kinds, as `Damaged`; but not those of too little memory."""
    try:
        yield
    except (OSError, ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RecursionError) as error:
        raise Damaged(f"{folder}: the checkpoint is damaged: {str(error)[:500]}; use a copy of it.") from error


def read(folder: str) -> dict[str, Any]:
    """The description of a checkpoint."""
    with reported(folder):
        found = json.loads(_read(os.path.join(folder, DESCRIPTION), MAX_DESCRIPTION))
        if found["sha256"] != _digest(found["content"]):
            raise ValueError(f"its {DESCRIPTION} has changed")
        return found["content"]


def check(folder: str, files: Any, arrays: Mapping[str, tuple[tuple[int, ...], np.dtype]]) -> None:
    """Compare the files of a checkpoint with its description, and their sizes with shapes and dtypes of `arrays`."""
    found = _listed(folder)
    if {*files} != found:
        raise ValueError(f"it has other files than its description says: {sorted(found ^ {*files})[:3]!r}")
    bounds = {}
    for name, (shape, dtype) in arrays.items():
        metadata = json.loads(_read(_file_of(folder, name, ".zarray"), 2**16))
        saved_shape, chunk = metadata["shape"], metadata["chunks"]
        if saved_shape != list(shape) or not isinstance(chunk, list) or len(chunk) != len(shape):
            raise ValueError(f"array {name} has another shape")
        if not all(type(n) is int and 0 < n <= size for n, size in zip(chunk, shape, strict=True)):
            raise ValueError(f"array {name} has parts of another shape")
        num_bytes = int(np.prod(chunk, dtype=np.float64)) * dtype.itemsize
        bounds[os.path.join(ARRAYS, LEAVES, name)] = 2 * num_bytes + 2**18
    chunks = {x: bounds[y] for x in found if (y := os.path.dirname(x)) in bounds and not x.endswith(".zarray")}
    checked = _checked_all(folder, dict.fromkeys(found, MAX_DESCRIPTION) | chunks)
    for name in found:
        if checked[name] != files[name]:
            raise ValueError(f"its file {name!r} has changed")
        if name in chunks and _unpacked(os.path.join(folder, name)) > chunks[name]:
            raise ValueError(f"its file {name!r} unpacks to more than its array")


def load(folder: str, name: str, shape: tuple[int, ...], dtype: np.dtype, sharding: Any) -> Any:
    """An array, on the host or with a sharding: each device then gets its part."""
    import tensorstore

    if 0 in shape:
        return np.zeros(shape, dtype)
    kvstore = {"driver": "file", "path": _file_of(folder, name, "")}
    few = tensorstore.Context({"file_io_concurrency": {"limit": 4}})  # parts in memory at a time
    with reported(folder):
        array: Any = tensorstore.open({"driver": "zarr", "kvstore": kvstore}, context=few, read=True).result()
        if array.dtype.numpy_dtype != dtype:
            raise ValueError(f"array {name} has dtype {array.dtype.name}")
        if sharding is None or len(sharding.device_set) == 1:
            found = array.read().result()
        else:
            found = jax.make_array_from_callback(shape, sharding, lambda index: array[index].read().result())
        if not os.path.exists(folder):  # a part that is gone reads as zeros
            raise ValueError("it was deleted")
        return found


def _save(path: str, arrays: Mapping[str, Any]) -> Any:
    """Begin to write arrays with Orbax; returns when they are copied to the host."""
    from orbax.checkpoint import v1 as ocp

    options = ocp.Context()
    registry = options.checkpointables.registry = ocp.handlers.local_registry(include_global_registry=False)
    registry.add(ocp.handlers.PyTreeHandler, checkpointable_name=LEAVES)
    saving = options.array.saving
    saving.use_ocdbt = saving.use_zarr3 = saving.enable_write_sharding_file = saving.use_replica_parallel = False
    saving.array_metadata_store, saving.storage_options.chunk_byte_size = None, CHUNK
    options.memory.deepcopy_host_arrays = False
    options.asynchronous.create_directories_asynchronously = False  # True would hang threads if it fails
    with options:
        return ocp.save_checkpointables_async(path, {LEAVES: dict(arrays)})


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without a warning that Orbax logs at each save in this format."""

    def is_other(record: logging.LogRecord) -> bool:
        return "Skipping merge of OCDBT" not in str(record.msg)

    logger = logging.getLogger("absl")
    logger.addFilter(is_other)
    try:
        yield
    finally:
        logger.removeFilter(is_other)


def _file_of(folder: str, name: str, file: str) -> str:
    return os.path.join(folder, ARRAYS, LEAVES, name, file)


def _make(path: str) -> None:
    """Make a folder, and its name durable."""
    if not os.path.isdir(path):
        _make(os.path.dirname(path))
        with contextlib.suppress(FileExistsError):
            os.mkdir(path)
        if not os.path.isdir(path):
            raise NotADirectoryError(f"{path}: is not a folder.")
        _sync(os.path.dirname(path))


def _sync(folder: str) -> None:
    file = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(file)
    finally:
        os.close(file)


def _lock(file: Any) -> None:
    import fcntl

    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


def _delete(folder: str) -> None:
    """Delete a folder of ours, its description last, unless another writer is quicker."""
    with contextlib.suppress(OSError):
        for name in os.listdir(folder):
            if name.startswith(ARRAYS):  # also those that Orbax has not completed
                shutil.rmtree(os.path.join(folder, name), ignore_errors=True)
    description = os.path.join(folder, DESCRIPTION)
    for remove, name in ((os.unlink, description + ".new"), (os.unlink, description), (os.rmdir, folder)):
        with contextlib.suppress(OSError):
            remove(name)


def _digest(content: Any) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _describe(folder: str, content: dict[str, Any], locks: contextlib.ExitStack) -> None:
    """Write a description, whole or not at all, that stays locked until the end of `locks`."""
    path = os.path.join(folder, DESCRIPTION)
    file = locks.enter_context(io.FileIO(path + ".new", "w"))
    with contextlib.suppress(OSError):  # a file system without locks
        _lock(file)
    text = memoryview(json.dumps({"sha256": _digest(content), "content": content}).encode())
    while text:
        text = text[file.write(text) :]
    os.fsync(file.fileno())
    os.replace(path + ".new", path)


def _listed(folder: str) -> set[str]:
    """Files of a checkpoint but its description, by their names in its folder."""
    found = {os.path.relpath(os.path.join(root, name), folder) for root, _, names in os.walk(folder) for name in names}
    return found - {DESCRIPTION}


@contextlib.contextmanager
def _opened(path: str, limit: int = MAX_SIZE) -> Iterator[tuple[Any, int]]:
    """A regular file of at most `limit` bytes and its size; no link, and nothing that waits."""
    file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    with open(file, "rb", buffering=0) as opened:
        info = os.fstat(file)
        if not stat.S_ISREG(info.st_mode):
            raise ValueError(f"{os.path.basename(path)!r} is not a file")
        if info.st_size > limit:
            raise ValueError(f"{os.path.basename(path)!r} is too large")
        yield opened, info.st_size


def _read(path: str, limit: int) -> bytes:
    with _opened(path, limit) as (file, _):
        return file.read()


def _checked_all(folder: str, limits: dict[str, int], sync: bool = False) -> dict[str, list[int]]:
    """`_checked` of files of a folder, several at a time: a disk then writes as many at once."""
    with ThreadPoolExecutor(8) as threads:
        checked = threads.map(lambda name: _checked(os.path.join(folder, name), limits[name], sync), sorted(limits))
        return dict(zip(sorted(limits), checked, strict=True))


def _checked(path: str, limit: int, sync: bool) -> list[int]:
    """Size and CRC-32 of a file, which is made durable if `sync`."""
    crc, buffer = 0, memoryview(bytearray(2**20))
    with _opened(path, limit) as (file, size):
        while count := file.readinto(buffer):
            crc = zlib.crc32(buffer[:count], crc)
        if sync:
            os.fsync(file.fileno())
    return [size, crc]


def _unpacked(path: str) -> int:
    """Upper bound of the bytes that a file in Zstandard format unpacks to (RFC 8878, section 3.1.1).

    Raises:
      ValueError: it has another format.
    """
    total = 0
    with _opened(path) as (file, size):
        while file.tell() < size:
            magic, descriptor = file.read(4), (file.read(1) or b"\0")[0]
            if magic != ZSTD:
                raise ValueError(f"{os.path.basename(path)!r} is not compressed by Zstandard")
            single = descriptor >> 5 & 1
            file.seek((1 - single) + (0, 1, 2, 4)[descriptor & 3] + (single, 2, 4, 8)[descriptor >> 6], 1)
            header = 0
            while not header & 1:
                if len(raw := file.read(3)) < 3:
                    raise ValueError(f"{os.path.basename(path)!r} is cut off")
                header = int.from_bytes(raw, "little")
                kind, count = header >> 1 & 3, header >> 3
                file.seek(1 if kind == 1 else count, 1)
                total += 2**17 if kind == 2 else count
            file.seek(4 * (descriptor >> 2 & 1), 1)
    return total
