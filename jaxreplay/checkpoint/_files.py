"""The folder of a checkpoint, which Orbax writes atomically.

PATH/checkpoint_7/manifest/  JSON
PATH/checkpoint_7/arrays/3/  Zarr version 2 without compression: one file for each part of array 3
PATH/checkpoint_8.orbax.../  the next checkpoint: in progress, or left by a killed process
PATH/writing                 lock file; exists only during a save
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
_orbax = threading.Lock()  # concurrent calls of Orbax from several threads occasionally fail


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


def newest(path: str) -> int:
    """Number of the newest complete checkpoint, -1 if there is none."""
    try:
        found = [re.fullmatch(rf"{FOLDER}_(\d+)", name) for name in os.listdir(path)]
    except (FileNotFoundError, NotADirectoryError):
        found = []
    return max((int(match[1]) for match in found if match), default=-1)


def begin(path: str, arrays: Mapping[str, Any], manifest: Any) -> Callable[[], None]:
    """Copy named arrays to the host and begin to write them. The returned function waits for the end.

    The returned function must be called. All processes must call both functions. Other writers to `path` wait. NumPy
    arrays must not change until the end.

    Raises:
      OSError: the folder cannot be created or written; raised by this function or the returned one.
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
    """Items of a complete checkpoint, read by Orbax.

    Raises:
      ValueError: they cannot be read.
    """
    from orbax.checkpoint import v1 as ocp

    try:
        with _orbax, _options():
            return ocp.load_checkpointables(_complete(path, number), items)
    except Exception as error:  # damaged files raise many kinds of errors
        raise ValueError(_first_line(error.__cause__ or error)) from error


def check_sizes(path: str, number: int, expected: Mapping[str, tuple[tuple[int, ...], np.dtype]]) -> None:
    """Compare `expected` shapes and dtypes with the files on disk, before memory is allocated for them.

    Raises:
      ValueError: there are other arrays, or files that would need more memory.
      OSError: a file is missing.
    """
    if not expected:
        return
    folder = os.path.join(_complete(path, number), ARRAYS)
    if set(os.listdir(folder)) != {"_METADATA", *expected}:
        raise ValueError(f"it has files of arrays other than the {len(expected)} expected")
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
            raise ValueError(f"array {name} has files other than its parts")
        size, claimed = sum(entry.stat().st_size for entry in files), math.prod(shape) * dtype.itemsize
        if size != claimed or math.prod(chunk) * dtype.itemsize > size:
            raise ValueError(f"array {name} has {size} bytes on disk, not {claimed}")


@contextlib.contextmanager
def _locked(path: str) -> Iterator[None]:
    """Mutual exclusion by path between threads and processes. A killed process releases the lock."""
    import fcntl

    name, entered = os.path.join(path, LOCK), False
    while not entered:
        lock = os.open(name, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            with contextlib.suppress(OSError):  # some file systems do not support locks
                fcntl.flock(lock, fcntl.LOCK_EX)
            if entered := _is_file(lock, name):  # else its last holder deleted it, and others lock a new file
                try:
                    yield
                finally:
                    with contextlib.suppress(FileNotFoundError):
                        os.unlink(name)
        finally:
            os.close(lock)


def _options() -> Any:
    """The Orbax context for reads and writes."""
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
    options.asynchronous.create_directories_asynchronously = False  # True would hang threads if it fails
    return options


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Suppress a warning that Orbax logs at each save without OCDBT."""

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
    """Delete the unfinished checkpoint after an error, and raise any error of Orbax as an `OSError`."""
    try:
        yield
    except BaseException as error:
        if jax.process_index() == 0:
            _delete_others(path, number - 1)
        if isinstance(error, Exception) and not isinstance(error, OSError):
            raise OSError(f"{path}: cannot write the checkpoint: {_first_line(error)}") from error
        raise


def _begin(path: str) -> int:
    """Number of the next checkpoint. Unfinished checkpoints are deleted first."""
    number = newest(path) + 1
    _delete_others(path, number - 1)
    return number


def _complete(path: str, number: int) -> str:
    return os.path.join(path, f"{FOLDER}_{number}")


def _delete_others(path: str, number: int) -> None:
    """Delete all checkpoints except `number`, and all unfinished ones."""
    for name in os.listdir(path):
        if re.fullmatch(rf"{FOLDER}_\d+({re.escape(UNFINISHED)}.*)?", name) and name != f"{FOLDER}_{number}":
            shutil.rmtree(os.path.join(path, name), ignore_errors=True)  # stays until later while it is read


def _first_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}".partition("\n")[0][:1000]  # the cause comes after paths


def _is_file(file: int, name: str) -> bool:
    """True if the open file still has this name."""
    try:
        return os.path.samestat(os.fstat(file), os.stat(name))
    except FileNotFoundError:
        return False
