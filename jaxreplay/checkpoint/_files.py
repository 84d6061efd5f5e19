"""The folder of a checkpoint, which Orbax writes as a whole or not at all.

PATH/checkpoint_7/manifest/  JSON
PATH/checkpoint_7/arrays/3/  Zarr of version 2, without compression: one file for each part of array 3
PATH/checkpoint_8.orbax.../  the next one: being written, or left by a process that was killed
PATH/writing                 locked by whoever writes; only there meanwhile
"""

import contextlib
import json
import logging
import math
import os
import re
import shutil
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import numpy as np

from jaxreplay.checkpoint import _processes

FOLDER, UNFINISHED, MANIFEST, ARRAYS, LOCK = "checkpoint", ".orbax-checkpoint-tmp", "manifest", "arrays", "writing"
_orbax = threading.Lock()  # its functions fail now and then when several threads are in them


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


def begin(path: str, arrays: Mapping[str, Any], manifest: Any) -> Callable[[], None]:
    """Copy arrays, by name, to the host; the function that is returned waits until all is written, and must be called.

    All processes call it, and others that write there wait. NumPy arrays must not change until the end.

    Raises:
      OSError: the folder cannot be made or written. This function or the returned one.
    """
    from orbax.checkpoint import v1 as ocp

    _processes.on_first(lambda: os.makedirs(path, exist_ok=True) or 0)
    with contextlib.ExitStack() as stack:
        if jax.process_count() == 1:
            stack.enter_context(_locked(path))
        stack.enter_context(_orbax)
        stack.enter_context(_quiet())
        number = _processes.on_first(lambda: _begin(path))
        stack.enter_context(_undone(path, number))
        items = {MANIFEST: manifest} | ({ARRAYS: dict(arrays)} if arrays else {})
        with _options():
            written = ocp.save_checkpointables_async(_complete(path, number), items)
        held = stack.pop_all()

    def finish() -> None:
        with held:
            written.result()
            if jax.process_index() == 0:
                _delete_others(path, number)

    return finish


def load(path: str, number: int, items: dict[str, Any]) -> dict[str, Any]:
    """What Orbax reads of a complete checkpoint.

    Raises:
      ValueError: it cannot be read.
    """
    from orbax.checkpoint import v1 as ocp

    try:
        with _orbax, _options():
            return ocp.load_checkpointables(_complete(path, number), items)
    except Exception as error:  # a damaged file raises errors of many kinds
        raise ValueError(_first_line(error.__cause__ or error)) from error


def check_sizes(path: str, number: int, expected: Mapping[str, tuple[tuple[int, ...], np.dtype]]) -> None:
    """Compare shapes and dtypes, by name, with what is on disk, before memory is taken to read it.

    Raises:
      ValueError: there are other arrays, or files with which more memory would be taken.
      OSError: a file is not there.
    """
    if not expected:
        return
    folder = os.path.join(_complete(path, number), ARRAYS)
    if set(os.listdir(folder)) != {"_METADATA", *expected}:
        raise ValueError(f"it has files of other arrays than the {len(expected)} expected")
    for name, (shape, dtype) in expected.items():
        with open(os.path.join(folder, name, ".zarray"), "rb") as file:
            found = json.load(file)
        plain = {"zarr_format": 2, "shape": list(shape), "compressor": None, "filters": None}
        if not isinstance(found, dict) or any(found.get(key, 0) != value for key, value in plain.items()):
            raise ValueError(f"array {name} is not of shape {list(shape)} without compression")
        chunk = found.get("chunks")
        if not isinstance(chunk, list) or not all(type(n) is int and n > 0 for n in chunk):
            raise ValueError(f"array {name} has parts of shape {str(chunk)[:100]}")
        files = [entry for entry in os.scandir(os.path.join(folder, name)) if entry.name != ".zarray"]
        if not all(re.fullmatch(r"\d+(\.\d+)*", entry.name) for entry in files):
            raise ValueError(f"array {name} has other files than its parts")
        size, claimed = sum(entry.stat().st_size for entry in files), math.prod(shape) * dtype.itemsize
        if size != claimed or math.prod(chunk) * dtype.itemsize > size:
            raise ValueError(f"array {name} has {size} bytes on disk, not {claimed}")


@contextlib.contextmanager
def _locked(path: str) -> Iterator[None]:
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


def _options() -> Any:
    """How Orbax writes and reads."""
    from orbax.checkpoint import v1 as ocp

    options = ocp.Context()
    registry = options.checkpointables.registry = ocp.handlers.local_registry(include_global_registry=False)
    registry.add(ocp.handlers.JsonHandler, checkpointable_name=MANIFEST)
    registry.add(ocp.handlers.PyTreeHandler, checkpointable_name=ARRAYS)
    saving = options.array.saving
    saving.use_ocdbt = saving.use_zarr3 = saving.use_compression = saving.enable_write_sharding_file = False
    saving.array_metadata_store, saving.use_replica_parallel = None, False
    options.pytree.loading.partial_load = True
    options.memory.deepcopy_host_arrays = False
    options.asynchronous.create_directories_asynchronously = False  # else threads hang if that fails
    return options


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without a warning of Orbax at each save, that it has not used another format."""

    def other(record: logging.LogRecord) -> bool:
        return "Skipping merge of OCDBT" not in str(record.msg)

    logger = logging.getLogger("absl")
    logger.addFilter(other)
    try:
        yield
    finally:
        logger.removeFilter(other)


@contextlib.contextmanager
def _undone(path: str, number: int) -> Iterator[None]:
    """After an error nothing of the checkpoint is left. Orbax has many kinds of errors, they are an `OSError`."""
    try:
        yield
    except BaseException as error:
        if jax.process_index() == 0:
            _delete_others(path, number - 1)
        if isinstance(error, Exception) and not isinstance(error, OSError):
            raise OSError(f"{path}: cannot write the checkpoint: {_first_line(error)}") from error
        raise


def _begin(path: str) -> int:
    """The number of the next checkpoint, after those that were never finished are deleted."""
    number = newest(path) + 1
    _delete_others(path, number - 1)
    return number


def _complete(path: str, number: int) -> str:
    return os.path.join(path, f"{FOLDER}_{number}")


def _delete_others(path: str, number: int) -> None:
    """Delete all checkpoints but one, and what is left of those that were never finished."""
    for name in os.listdir(path):
        if re.fullmatch(rf"{FOLDER}_\d+({re.escape(UNFINISHED)}.*)?", name) and name != f"{FOLDER}_{number}":
            shutil.rmtree(os.path.join(path, name), ignore_errors=True)  # one that is being read may stay until later


def _first_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}".partition("\n")[0][:1000]  # the cause comes after paths


def _is_file(file: int, name: str) -> bool:
    """Whether the open file has this name."""
    try:
        return os.path.samestat(os.fstat(file), os.stat(name))
    except FileNotFoundError:
        return False
