"""Durable files, folders that one writer locks, and descriptions of what they hold.

Nothing is read through a link, or from what is no regular file.
"""

import contextlib
import errno
import hashlib
import io
import json
import os
import stat
import threading
import zlib
from collections.abc import Callable, Iterator
from typing import Any

DESCRIPTION = "description.json"
PIECE = 2**18  # bytes that are read or written at a time; more need pages that are contiguous
MAX_DESCRIPTION = 2**24  # bytes: of some 3 TB of arrays
OF_DAMAGE = {errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ELOOP, errno.ENXIO}  # others pass, or mean no damage
OF_STRANGERS = ArithmeticError, AttributeError, LookupError, MemoryError, RuntimeError, SyntaxError, TypeError


def local(path: str | os.PathLike, what: str) -> str:
    """`path` as text; a `ValueError` if it is empty or a URL."""
    if not isinstance(path, str | os.PathLike):
        raise TypeError(f"path: got a {type(path).__name__}, expected the name of a folder; give it first.")
    path = os.fspath(path)
    if not path:
        raise ValueError(f"path={path!r}: must be the name of a folder, such as 'run/checkpoint'.")
    if "://" in path:
        raise ValueError(f"{path}: is a URL; {what} is a folder of a file system: mount that, or copy the folder.")
    return path


def describe(folder: str, content: dict[str, Any], limit: int = MAX_DESCRIPTION) -> None:
    """Write a description, whole or not at all."""
    path = os.path.join(folder, DESCRIPTION)
    text = json.dumps({"sha256": digest(content), "content": content}).encode()
    if len(text) > limit:
        raise OSError(errno.EFBIG, "too large a description; begin another folder", path)
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path + ".new")
    write(path + ".new", text)
    os.replace(path + ".new", path)


def complete(part: str, folder: str, content: dict[str, Any], limit: int = MAX_DESCRIPTION) -> None:
    """Describe a folder whose files are durable, and give it its name once the description is.

    The name is durable once the folder around it is synced.
    """
    describe(part, content, limit)
    sync(part)
    os.rename(part, folder)


def description(folder: str, limit: int = MAX_DESCRIPTION) -> dict[str, Any]:
    """What `describe` has written; a `ValueError` or an `OSError` if it is not there as it was."""
    path = os.path.join(folder, DESCRIPTION)
    data = read(path, limit)
    with contextlib.suppress(ValueError, RecursionError):
        match json.loads(data):
            case {"sha256": str(sha256), "content": {**content}} if sha256 == digest(content):
                return content
    raise ValueError(f"{path} has changed, or is of another program")


def digest(content: Any) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def write(path: str, *pieces: Any) -> int:
    """Write a new file of some buffers of bytes and make it durable; return its size."""
    size = 0
    with io.FileIO(path, "x") as file:
        for left in map(memoryview, pieces):
            while left:
                count = file.write(left[:PIECE])
                size, left = size + count, left[count:]
        os.fsync(file.fileno())
    return size


def opened(path: str) -> io.FileIO:
    """Open a regular file for reading; a `ValueError` if it is none. Follows no link, and waits for nothing."""
    number = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(number).st_mode):
        os.close(number)
        raise ValueError(f"{os.path.basename(path)!r} is not a file")
    return io.FileIO(number, "rb")


def read(path: str, limit: int) -> bytes:
    """Read a regular file of at most `limit` bytes."""
    with opened(path) as file:
        if os.fstat(file.fileno()).st_size > limit:
            raise ValueError(f"{os.path.basename(path)!r} is too large")
        return file.readall()


@contextlib.contextmanager
def reported(
    message: str, kind: type[Exception] = ValueError, also: tuple[type[Exception], ...] = ()
) -> Iterator[None]:
    """Convert errors of reading to `kind`, except those that are not about the file, such as too many open files."""
    try:
        yield
    except (OSError, ValueError, RecursionError, *also) as error:
        if isinstance(error, OSError) and error.errno not in OF_DAMAGE:
            raise
        raise kind(f"{message}: {str(error)[:500].rstrip('.')}; use a copy of it.") from error


def check_size(path: str, size: int) -> None:
    """Raise a `ValueError` if there is no file of this size."""
    with reported(f"{path}: is missing or has changed"):
        if (found := os.lstat(path).st_size) != size:
            raise ValueError(f"{found} bytes instead of {size}")


def read_into(path: str, size: int, crc: int, first: int, target: Any) -> None:
    """Read a file of this size and CRC-32, from byte `first` on into `target`; a `ValueError` if it has another."""
    found, at, target, room, after = 0, 0, memoryview(target), memoryview(bytearray(PIECE)), first + len(target)
    with reported(f"{path}: is missing or has changed"), opened(path) as file:
        while at <= size:
            piece = target[at - first :] if first <= at < after else room[: first - at if at < first else PIECE]
            if not (count := file.readinto(piece)):
                break
            at, found = at + count, zlib.crc32(piece[:count], found)
        if [at, found] != [size, crc]:
            raise ValueError("its CRC-32 differs")


def make(path: str) -> None:
    """Make a folder, and its name durable."""
    if not os.path.exists(path):
        make(os.path.dirname(path))
        os.makedirs(path, exist_ok=True)
        sync(os.path.dirname(path))


def sync(folder: str) -> None:
    file = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(file)
    finally:
        os.close(file)


def beside(function: Callable[[], None]) -> threading.Thread | None:
    """Run a function in another thread; in this one, with no thread returned, where none can start."""
    thread = threading.Thread(target=function)
    try:
        thread.start()
    except RuntimeError:  # too many threads, or the program is at its end
        return function()
    return thread


def lock(folder: str, locks: contextlib.ExitStack) -> bool | None:
    """Lock a folder until the end of `locks`. False: another has locked it. None: the file system has no locks.

    Raises:
      FileNotFoundError: it was deleted.
    """
    import fcntl

    file = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    locks.callback(os.close, file)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return None
    locks.callback(fcntl.flock, file, fcntl.LOCK_UN)  # closing it leaves the lock to processes that were forked
    if not os.path.samestat(os.stat(folder), os.fstat(file)):
        raise FileNotFoundError(folder)
    return True
