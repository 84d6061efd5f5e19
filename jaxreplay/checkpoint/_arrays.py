"""The arrays of a checkpoint: Zarr arrays (version 2) whose chunks are compressed files.

TensorStore packs and unpacks chunks in memory, and `_files` writes and reads them. So a missing chunk is never read as
zeros, each chunk is read once, and the file system's errors are `OSError`.
"""

import itertools
import math
import os
import threading
import zlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxreplay._common import files, xla
from jaxreplay.checkpoint import _files

CHUNK = 2**22  # bytes of an array that are compressed at a time
THREADS = 4  # each holds a chunk, so they bound the memory of a save
# Its header says how many bytes it unpacks to. Its own choice of blocks is small, and takes up to three times the time.
COMPRESSOR = {"id": "blosc", "cname": "zstd", "clevel": 1, "shuffle": 1, "blocksize": 2**20}
ALIGNMENT = 64  # bytes; `jax.device_put` on a CPU copies what is not aligned
Region = tuple[slice, ...]  # with start and stop


def region_of(shape: tuple[int, ...], index: tuple[slice, ...] | None = None) -> Region:
    """An index of an array as a region; all of it by default."""
    index = (slice(None),) * len(shape) if index is None else index
    return tuple(slice(*x.indices(size)[:2]) for x, size in zip(index, shape, strict=True))


class Chunks(NamedTuple):
    """The chunks into which an array is cut; the last ones may be smaller."""

    shape: tuple[int, ...]
    dtype: np.dtype
    chunk: tuple[int, ...]

    def meet(self, region: Region) -> Iterator[tuple[str, Region]]:
        """The files of the chunks that meet a region, and where they meet it."""
        ranges = (range(x.start // n, -(-x.stop // n)) for x, n in zip(region, self.chunk, strict=True))
        for position in itertools.product(*ranges):
            every = zip(position, self.chunk, region, strict=True)
            where = tuple(slice(max(i * n, x.start), min((i + 1) * n, x.stop)) for i, n, x in every)
            yield ".".join(map(str, position)) or "0", where

    def names(self) -> list[str]:
        """All files: .zarray, which describes the array to other programs, and the chunks."""
        return [_files.METADATA, *(file for file, _ in self.meet(region_of(self.shape)))]

    def in_memory(self) -> Any:
        """A Zarr array that holds a chunk while it is packed or unpacked."""
        import tensorstore

        metadata = {"shape": self.shape, "chunks": self.chunk, "compressor": COMPRESSOR}
        spec = {"driver": "zarr", "kvstore": "memory://", "metadata": metadata, "dtype": self.dtype.name}
        return tensorstore.open(spec, create=True).result()


class Packed(NamedTuple):
    """The stored form of an array that is to be written.

    Attributes:
      chunks: how it is cut.
      is_whole: True if this process has all of it.
      parts: the shards that this process has, each shard once in all processes unless `is_whole`.
    """

    chunks: Chunks
    is_whole: bool
    parts: list[tuple[Region, Any]]


def chunks_of(shape: tuple[int, ...], dtype: np.dtype, shard: tuple[int, ...]) -> Chunks:
    """Chunks of at most `CHUNK` bytes that divide a shard, so that no two shards share one.

    A shard whose size has no small divisor is one chunk.
    """
    chunk = list(shard)
    for axis, size in enumerate(shard):
        most = max(CHUNK // max(math.prod(shard[axis + 1 :]) * dtype.itemsize, 1), 1)
        count = -(-size // most)
        if size != shape[axis]:
            count = next((n for n in range(count, 8 * count) if size % n == 0), 1)
        chunk[axis] = -(-size // count) if count else 0
        if most > 1:
            break
    return Chunks(shape, dtype, tuple(chunk))


def write(folder: str, arrays: dict[str, Packed], is_first: bool) -> dict[str, list[int]]:
    """Write what this process has of arrays, to folders that exist; size and CRC-32 of the files by name."""
    found = {}

    def tasks() -> Iterator[tuple[str, Any, str, Region, np.ndarray | None]]:
        for name, (chunks, is_whole, parts) in arrays.items():
            memory = chunks.in_memory()
            if is_first:
                yield name, memory, _files.METADATA, (), None
            for region, part in parts if is_first or not is_whole else ():
                values = xla.on_host(part)
                for file, here in chunks.meet(region):
                    yield name, memory, file, here, values[_shifted(here, region)]

    def write_one(name: str, memory: Any, file: str, here: Region, values: np.ndarray | None) -> None:
        if values is not None:
            memory[here].write(values, can_reference_source_data_indefinitely=True).result()
        data, path = memory.kvstore[file], os.path.join(name, file)
        del memory.kvstore[file]
        found[path] = [files.write(os.path.join(folder, _files.ARRAYS, path), data), zlib.crc32(data)]

    _in_threads(write_one, tasks(), THREADS)
    return found


def load(folder: str, name: str, chunks: Chunks, written: dict[str, list[int]], sharding: Any) -> Any:
    """Load an array to the host, or its parts to the devices of a sharding; `Damaged` if a file is not as written."""
    if 0 in chunks.shape:
        return np.zeros(chunks.shape, chunks.dtype)
    num_bytes = math.prod(chunks.chunk) * chunks.dtype.itemsize  # of a chunk, not compressed

    def read_file(file: str) -> bytes:
        size, crc = written.get(os.path.join(name, file), (0, 0))
        return _files.read(os.path.join(folder, _files.ARRAYS, name, file), min(size, num_bytes + 2**12), crc)

    with _files.reported(folder):
        if not all(0 < n <= m for n, m in itertools.zip_longest(chunks.chunk, chunks.shape, fillvalue=0)):
            raise ValueError(f"array {name} has chunks of another shape")
        read_file(_files.METADATA)
    memory = chunks.in_memory()

    def read(index: tuple[slice, ...] | None = None) -> np.ndarray:
        region = region_of(chunks.shape, index)
        found = _aligned(tuple(x.stop - x.start for x in region), chunks.dtype)

        def read_one(file: str, here: Region) -> None:
            with _files.reported(folder):
                packed = read_file(file)
                if int.from_bytes(packed[4:8], "little") != num_bytes:
                    raise ValueError(f"chunk {file} of array {name} unpacks to another size")
                memory.kvstore[file] = packed
                found[_shifted(here, region)] = memory[here].read().result()
                del memory.kvstore[file]

        tasks = [*chunks.meet(region)]
        _in_threads(read_one, tasks, min(THREADS, len(tasks)))
        return found

    if sharding is None or len(sharding.device_set) == 1:
        return read()
    return jax.make_array_from_callback(chunks.shape, sharding, read)


def _shifted(region: Region, origin: Region) -> Region:
    """A region, counted from the beginning of another one."""
    return tuple(slice(x.start - y.start, x.stop - y.start) for x, y in zip(region, origin, strict=True))


def _aligned(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    num_bytes = math.prod(shape) * dtype.itemsize
    room = np.empty(num_bytes + ALIGNMENT, np.uint8)
    start = -room.ctypes.data % ALIGNMENT
    return room[start : start + num_bytes].view(dtype).reshape(shape)


def _in_threads(function: Callable[..., None], tasks: Iterable[Any], count: int) -> None:
    """Call a function for each task, in at most `count` threads, this one included; return when all have ended.

    Plain threads, as executors refuse work while the interpreter ends.
    """
    left, lock, errors = iter(tasks), threading.Lock(), []

    def work() -> None:
        try:
            while not errors:
                with lock:
                    task = next(left, None)
                if task is None:
                    return
                function(*task)
        except BaseException as error:
            errors.append(error)

    others = [files.beside(work) for _ in range(count - 1)]
    work()
    for thread in others:
        if thread:
            thread.join()
    if errors:
        raise errors.pop()
