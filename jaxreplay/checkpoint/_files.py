"""The folder of a checkpoint: blocks of bytes with checksums, written as a whole or not at all.

PATH/checkpoint_7/arrays_0       blocks of bytes, one behind the other, that process 0 wrote
PATH/checkpoint_7/manifest.json  what they mean
PATH/checkpoint_8.tmp/           the next one: being written, or left by a process that was killed
PATH/writing                     locked by whoever writes; only there meanwhile
"""

import contextlib
import os
import re
import shutil
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np

FOLDER, UNFINISHED, MANIFEST, ARRAYS, LOCK = "checkpoint", ".tmp", "manifest.json", "arrays", "writing"
CHUNK = 2**24  # bytes at a time


def absolute(path: str | os.PathLike) -> str:
    """The path as text, absolute.

    Raises:
      ValueError: it is a URL.
    """
    path = os.fspath(path)
    if "://" in path:
        raise ValueError(
            f"{path}: is a URL; a checkpoint is a folder of a file system, so mount it, or copy the folder."
        )
    return os.path.abspath(path)


def newest(path: str) -> int:
    """The number of the newest complete checkpoint, -1 if there is none."""
    try:
        found = [re.fullmatch(rf"{FOLDER}_(\d+)", name) for name in os.listdir(path)]
    except (FileNotFoundError, NotADirectoryError):
        found = []
    return max((int(match[1]) for match in found if match), default=-1)


@contextlib.contextmanager
def locked(path: str) -> Iterator[None]:
    """Only one thread of one process is in here with the same path; one that is killed holds up nobody."""
    import fcntl

    name, entered = os.path.join(path, LOCK), False
    while not entered:
        lock = os.open(name, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            with contextlib.suppress(OSError):  # some file systems have no locks
                fcntl.flock(lock, fcntl.LOCK_EX)
            if entered := _is_file(lock, name):  # else its last holder has deleted it, and others lock a new one
                try:
                    yield
                finally:
                    with contextlib.suppress(FileNotFoundError):
                        os.unlink(name)
        finally:
            os.close(lock)


def begin(path: str) -> int:
    """Make the folder of the next checkpoint, after those that were never finished are deleted; returns its number."""
    number = newest(path) + 1
    _delete_others(path, number - 1)
    os.mkdir(_unfinished(path, number))
    return number


def write(path: str, number: int, process: int, blocks: Iterable[np.ndarray]) -> list[int]:
    """Write the blocks of one process; returns their checksums."""
    name = os.path.join(_unfinished(path, number), f"{ARRAYS}_{process}")
    with open(name, "wb") as file:
        sums = [checksum(block, file.write) for block in blocks]
        file.flush()
        os.fsync(file.fileno())
    return sums


def checksum(block: np.ndarray, visit: Callable[[memoryview], Any] = len) -> int:
    """The CRC-32 of the bytes of a block; `visit` gets one chunk of them after the other, before it counts."""
    raw: Any = np.ascontiguousarray(block).reshape(-1).view(np.uint8)
    found = 0
    for first in range(0, raw.size, CHUNK):
        chunk = memoryview(raw[first : first + CHUNK])
        visit(chunk)
        found = zlib.crc32(chunk, found)
    return found


def commit(path: str, number: int, manifest: bytes) -> int:
    """Complete a checkpoint, then delete the previous one; returns its number."""
    folder = _unfinished(path, number)
    with open(os.path.join(folder, MANIFEST), "wb") as file:
        file.write(manifest)
        file.flush()
        os.fsync(file.fileno())
    _sync_folder(folder)
    os.rename(folder, os.path.join(path, f"{FOLDER}_{number}"))
    _sync_folder(path)
    _delete_others(path, number)
    return number


def discard(path: str, number: int) -> None:
    """Delete a checkpoint that will not be completed."""
    shutil.rmtree(_unfinished(path, number), ignore_errors=True)


def read_manifest(path: str, number: int) -> bytes:
    """The manifest of a complete checkpoint."""
    with open(os.path.join(path, f"{FOLDER}_{number}", MANIFEST), "rb") as file:
        return file.read()


def size(path: str, number: int, process: int) -> int:
    """How many bytes the process wrote."""
    return os.path.getsize(_arrays(path, number, process))


def read(
    path: str, number: int, process: int, offset: int, shape: Sequence[int], dtype: np.dtype
) -> tuple[np.ndarray, int]:
    """One of the blocks that a process wrote, and its checksum."""
    block = np.empty(shape, dtype)
    with open(_arrays(path, number, process), "rb") as file:
        file.seek(offset)
        return block, checksum(block, file.readinto)  # of a file that ends early the checksum is another


def _arrays(path: str, number: int, process: int) -> str:
    return os.path.join(path, f"{FOLDER}_{number}", f"{ARRAYS}_{process}")


def _unfinished(path: str, number: int) -> str:
    return os.path.join(path, f"{FOLDER}_{number}{UNFINISHED}")


def _delete_others(path: str, number: int) -> None:
    """Delete all checkpoints but one, and what is left of those that were never finished."""
    for name in os.listdir(path):
        if re.fullmatch(rf"{FOLDER}_\d+({re.escape(UNFINISHED)})?", name) and name != f"{FOLDER}_{number}":
            shutil.rmtree(os.path.join(path, name), ignore_errors=True)  # one that is being read may stay until later


def _is_file(file: int, name: str) -> bool:
    """Whether the open file has this name."""
    try:
        return os.path.samestat(os.fstat(file), os.stat(name))
    except FileNotFoundError:
        return False


def _sync_folder(path: str) -> None:
    folder = os.open(path, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
