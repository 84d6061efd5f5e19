"""Folders of checkpoints: how they are written, named, read and deleted.

PATH/checkpoint_7/description.json  what was saved, and the size and CRC-32 of each file of its arrays
PATH/checkpoint_7/arrays/3/         the array of leaf 3 in Zarr's format, as compressed chunks
PATH/checkpoint_8.part/             the next checkpoint: in progress, or left by a process that was killed

A checkpoint is written to a folder of its own, and gets its name when all of it is on the disk. Only then is an older
one deleted. So whatever is cut off, a complete one is there. A lock on the folder shows that its writer is alive. Only
complete checkpoints, and parts without a writer, are deleted, and nothing through a link.
"""

import contextlib
import errno
import os
import re
import shutil
import zlib
from typing import Any

from jaxreplay._common import files

PART, ARRAYS, METADATA = ".part", "arrays", ".zarray"
NAME = r"checkpoint_(0|[1-9][0-9]*)"
OURS = rf"{re.escape(files.DESCRIPTION)}\.new|{ARRAYS}/[0-9]+/({re.escape(METADATA)}|[0-9.]+)"
LAST = 2**31  # greater numbers are of others


class Damaged(ValueError):
    """Files of a checkpoint are not those that were written."""


def absolute(path: str | os.PathLike) -> str:
    """The absolute path as text; a `ValueError` if `path` is empty, a URL, a checkpoint or in one."""
    path = files.local(path, "a checkpoint")
    outer = os.path.realpath(path)
    while (folder := os.path.dirname(outer)) != outer:
        if re.fullmatch(NAME, os.path.basename(outer)) and os.path.exists(os.path.join(outer, files.DESCRIPTION)):
            raise ValueError(f"{path}: is a checkpoint, or in one; pass the folder of the checkpoints, {folder!r}.")
        outer = folder
    return os.path.abspath(path)


def numbers(path: str, part: str = "") -> list[int]:
    """Numbers of the checkpoints in a folder, the newest first; with PART, of those that are not complete."""
    try:
        found = [re.fullmatch(NAME + re.escape(part), name) for name in os.listdir(path)]
    except (FileNotFoundError, NotADirectoryError):
        return []
    return sorted((number for match in found if match and (number := int(match[1])) < LAST), reverse=True)


def folder_of(path: str, number: int, part: str = "") -> str:
    return os.path.join(path, f"checkpoint_{number}{part}")


def begin(path: str, locks: contextlib.ExitStack) -> int:
    """Make the folder of a new checkpoint, locked until the end of `locks`; its number.

    Folders that were left by killed processes are deleted.
    """
    files.make(path)
    for number in numbers(path, PART):
        with contextlib.suppress(OSError), contextlib.ExitStack() as lock:  # OSError: another was quicker, or a link
            if files.lock(part := folder_of(path, number, PART), lock) and _is_ours(part):
                delete(part)
    number = max([-1, *numbers(path), *numbers(path, PART)]) + 1
    while not _begun(path, number, locks):  # another writer was quicker
        number += 1
    if number >= LAST:
        raise OSError(errno.EOVERFLOW, f"checkpoint_{number - 1} is the last; move the checkpoints to another folder")
    return number


def _begun(path: str, number: int, locks: contextlib.ExitStack) -> bool:
    """Make the folder of a checkpoint and lock it; False if another writer has this number."""
    part = folder_of(path, number, PART)
    try:
        os.mkdir(part)
        is_ours = files.lock(part, locks) is not False
    except (FileExistsError, FileNotFoundError):  # FileNotFoundError: the folder was deleted, as it was not yet locked
        return False
    if is_ours and os.path.lexists(folder_of(path, number)):
        delete(part)
        return False
    return is_ours


def complete(path: str, number: int, content: dict[str, Any], every: list[str], written: dict[str, list[int]]) -> None:
    """Give a checkpoint its description and its name, once all files of its arrays are on the disk.

    Args:
      every: names of the files.
      written: size and CRC-32 of those that this process has written.
    """
    part = folder_of(path, number, PART)
    arrays = os.path.join(part, ARRAYS)
    for name in every:
        file = os.path.join(arrays, name)
        if name not in written:  # by another process
            data = files.read(file, 2**32)
            written[name] = [len(data), zlib.crc32(data)]
        if os.stat(file).st_size != written[name][0]:
            raise OSError(errno.EIO, "has another size than was written", file)
    for folder in (*{os.path.join(arrays, os.path.dirname(name)) for name in every}, arrays):
        files.sync(folder)
    files.complete(part, folder_of(path, number), content | {"files": {name: written[name] for name in every}})
    files.sync(path)


def delete_older(path: str, newest: int, keep: int) -> None:
    """Delete complete checkpoints but the `keep` newest, at least one of which is complete for certain."""
    kept = 0
    for number in numbers(path):
        folder, part = folder_of(path, number), folder_of(path, number, PART)
        with contextlib.suppress(Damaged):
            if number != newest:
                description(folder)
            kept += 1
            if kept > keep and not os.path.islink(folder):
                with contextlib.suppress(OSError):  # another writer was quicker
                    os.rename(folder, part)
                    delete(part)


def delete(folder: str) -> None:
    """Delete a folder, its arrays before its description, as far as that is possible."""
    for part in (os.path.join(folder, ARRAYS), folder):
        shutil.rmtree(part, ignore_errors=True)


def _is_ours(part: str) -> bool:
    """True if a folder has a description, or nothing that a save does not write."""

    def stop(error: OSError) -> None:
        raise error

    found = [os.path.join(root, name) for root, _, names in os.walk(part, onerror=stop) for name in names]
    names = {os.path.relpath(x, part) for x in found}
    return files.DESCRIPTION in names or all(re.fullmatch(OURS, name) for name in names)


def reported(folder: str, also: tuple[type[Exception], ...] = ()) -> contextlib.AbstractContextManager[None]:
    """Errors of reading as `Damaged`."""
    return files.reported(f"{folder}: the checkpoint is damaged", Damaged, also)


def description(folder: str) -> dict[str, Any]:
    """The description of a checkpoint."""
    with reported(folder):
        return files.description(folder)


def read(path: str, size: int, crc: int) -> bytes:
    """A file of this size and CRC-32; a `ValueError` if it has another."""
    data = files.read(path, size)
    if [len(data), zlib.crc32(data)] != [size, crc]:
        raise ValueError(f"{os.path.basename(path)!r} has changed")
    return data
