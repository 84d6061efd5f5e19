"""The arrays of a checkpoint: Zarr arrays (version 2) whose chunks are compressed files.

TensorStore packs and unpacks chunks in memory, and `_files` writes and reads them. So a missing chunk is never read as
zeros, each chunk is read once, and the file system's errors are `OSError`.
"""

import dataclasses
import functools
import itertools
import math
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxreplay._common import xla
from jaxreplay.checkpoint import _files

CHUNK = 2**22  # bytes of an array that are compressed at a time
THREADS = 4  # each holds a chunk, so they bound the memory of a save
COMPRESSOR = {"id": "blosc", "cname": "zstd", "clevel": 1, "shuffle": 1}  # its header says how many bytes it unpacks to
ALIGNMENT = 64  # bytes
Position = tuple[int, ...]  # of a chunk in the grid of chunks
Region = tuple[slice, ...]  # with start and stop


class Packed(NamedTuple):
    """The stored form of an array that is to be written.

    Attributes:
      shape: of the array.
      dtype: of NumPy.
      shard: the shape of a shard.
      is_whole: True if this process has all of the array.
      parts: slices and values of the shards that this process has, each shard once in all processes unless `is_whole`.
    """

    shape: tuple[int, ...]
    dtype: np.dtype
    shard: tuple[int, ...]
    is_whole: bool
    parts: list[tuple[Region, Any]]


@dataclasses.dataclass(frozen=True)
class Chunks:
    """An array in chunks."""

    shape: tuple[int, ...]
    dtype: np.dtype
    chunk: tuple[int, ...]

    @classmethod
    def of(cls, x: Packed) -> "Chunks":
        """Chunks of at most `CHUNK` bytes that divide a shard, so that no two shards share one.

        A shard whose size has no small divisor is a chunk of its own.
        """
        chunk = list(x.shard)
        for axis, size in enumerate(x.shard):
            most = max(CHUNK // (math.prod(x.shard[axis + 1 :]) * x.dtype.itemsize), 1)
            count = -(-size // most)
            if size != x.shape[axis]:
                count = next((n for n in range(count, 8 * count) if size % n == 0), 1)
            chunk[axis] = -(-size // count)
            if most > 1:
                break
        return cls(x.shape, x.dtype, tuple(chunk))

    @property
    def grid(self) -> tuple[int, ...]:
        return tuple(-(-size // n) for size, n in zip(self.shape, self.chunk, strict=True))

    @property
    def num_bytes(self) -> int:
        """Of a chunk, not compressed."""
        return math.prod(self.chunk) * self.dtype.itemsize

    def positions(self, region: Region) -> Iterator[Position]:
        """The chunks that meet a region."""
        ranges = (range(x.start // n, -(-x.stop // n)) for x, n in zip(region, self.chunk, strict=True))
        return itertools.product(*ranges)

    @functools.cached_property
    def names(self) -> list[str]:
        """Names of the files: of .zarray, and of the chunks in C order."""
        return [_files.METADATA, *map(name_of, self.positions(region_of(self.shape)))]

    def number(self, position: Position) -> int:
        """The place of a chunk in `names`."""
        return 1 + (int(np.ravel_multi_index(position, self.grid)) if position else 0)

    def meet(self, position: Position, region: Region) -> Region:
        """The part of a region that is in a chunk."""
        every = zip(position, self.chunk, region, strict=True)
        return tuple(slice(max(i * n, x.start), min((i + 1) * n, x.stop)) for i, n, x in every)

    @functools.cached_property
    def _memory(self) -> Any:
        """A Zarr array in memory that holds a chunk while it is packed or unpacked."""
        import tensorstore

        metadata = {"shape": self.shape, "chunks": self.chunk, "compressor": COMPRESSOR}
        spec = {"driver": "zarr", "kvstore": "memory://", "metadata": metadata, "dtype": self.dtype.name}
        return tensorstore.open(spec, create=True).result()

    def metadata(self) -> bytes:
        """The file .zarray."""
        return self._memory.kvstore.read(".zarray").result().value

    def pack(self, position: Position, values: np.ndarray) -> bytes:
        """The file of a chunk, from its values up to the end of the array."""
        region = self.meet(position, region_of(self.shape))
        self._memory[region].write(values).result()
        packed = self._memory.kvstore.read(name_of(position)).result().value
        del self._memory.kvstore[name_of(position)]
        return packed

    def unpack(self, position: Position, packed: bytes, region: Region) -> np.ndarray:
        """The values of a region that is in a chunk, from the chunk's file.

        Raises:
          ValueError: the file is not one of a chunk.
        """
        if int.from_bytes(packed[4:8], "little") != self.num_bytes:
            raise ValueError(f"chunk {name_of(position)} unpacks to another size")
        self._memory.kvstore[name_of(position)] = packed
        try:
            return self._memory[region].read().result()
        finally:
            del self._memory.kvstore[name_of(position)]


def region_of(shape: tuple[int, ...], index: tuple[slice, ...] | None = None) -> Region:
    """An index of an array as a region; all of it by default."""
    index = (slice(None),) * len(shape) if index is None else index
    return tuple(slice(*x.indices(size)[:2]) for x, size in zip(index, shape, strict=True))


def name_of(position: Position) -> str:
    return ".".join(map(str, position)) or "0"


def write(folder: str, arrays: dict[str, Packed], is_first: bool) -> dict[str, np.ndarray]:
    """Write what this process has of arrays, to folders that exist.

    Returns:
      by array, size and CRC-32 of its files in the order of `Chunks.names`, uint32 [files, 2]; 0 of those of others.
    """
    found = {name: np.zeros((len(Chunks.of(x).names), 2), np.uint32) for name, x in arrays.items()}

    def tasks() -> Iterator[tuple[str, int, str, Callable[[], bytes]]]:
        for name, x in arrays.items():
            chunks = Chunks.of(x)
            if is_first:
                yield name, 0, chunks.names[0], chunks.metadata
            for region, part in x.parts if is_first or not x.is_whole else ():
                values = xla.on_host(part)
                for position in chunks.positions(region):
                    of_chunk = values[_shifted(chunks.meet(position, region), region)]
                    number = chunks.number(position)
                    yield name, number, chunks.names[number], functools.partial(chunks.pack, position, of_chunk)

    def write_one(task: tuple[str, int, str, Callable[[], bytes]]) -> None:
        name, number, file, make = task
        found[name][number] = _files.write(_files.of_array(folder, name, file), make())

    _in_threads(write_one, tasks(), THREADS)
    return found


def is_record(x: Any) -> bool:
    """True if JSON is what a description says of an array in chunks."""
    match x:
        case {"chunk": [*chunk], "files": [*files]} if len(x) == 2:
            return all(type(n) is int and n > 0 for n in chunk) and all(
                isinstance(file, list) and list(map(type, file)) == [int, int] for file in files
            )
    return False


def load(
    folder: str,
    name: str,
    shape: tuple[int, ...],
    dtype: np.dtype,
    sharding: Any,
    *,
    chunk: list[int],
    files: list[list[int]],
) -> Any:
    """An array, on the host or with a sharding: each device then gets its part.

    Raises:
      Damaged: a file is not as it was written.
    """
    if 0 in shape:
        return np.zeros(shape, dtype)
    chunks = Chunks(shape, dtype, tuple(chunk))
    with _files.reported(folder):
        if len(chunk) != len(shape) or any(n > size for n, size in zip(chunk, shape, strict=True)):
            raise ValueError(f"array {name} has chunks of another shape")
        if len(files) != 1 + math.prod(chunks.grid):
            raise ValueError(f"array {name} has another number of files")
        if max(files)[0] > chunks.num_bytes + 2**12:
            raise ValueError(f"array {name} has a file that is too large")
        _files.read(_files.of_array(folder, name, chunks.names[0]), *files[0])

    def read(index: tuple[slice, ...] | None = None) -> np.ndarray:
        region = region_of(chunks.shape, index)
        found = _aligned(tuple(x.stop - x.start for x in region), chunks.dtype)

        def read_one(position: Position) -> None:
            here, number = chunks.meet(position, region), chunks.number(position)
            with _files.reported(folder):
                packed = _files.read(_files.of_array(folder, name, chunks.names[number]), *files[number])
                found[_shifted(here, region)] = chunks.unpack(position, packed, here)

        positions = [*chunks.positions(region)]
        _in_threads(read_one, positions, min(THREADS, len(positions)))
        return found

    if sharding is None or len(sharding.device_set) == 1:
        return read()
    return jax.make_array_from_callback(shape, sharding, read)


def _shifted(region: Region, origin: Region) -> Region:
    """A region, counted from the beginning of another one."""
    return tuple(slice(x.start - y.start, x.stop - y.start) for x, y in zip(region, origin, strict=True))


def _aligned(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """An array where `jax.device_put` on a CPU need not copy it."""
    num_bytes = math.prod(shape) * dtype.itemsize
    room = np.empty(num_bytes + ALIGNMENT, np.uint8)
    start = -room.ctypes.data % ALIGNMENT
    return room[start : start + num_bytes].view(dtype).reshape(shape)


def _in_threads(function: Callable[[Any], None], tasks: Iterable[Any], count: int) -> None:
    """Call a function for each task, in `count` threads, of which this is one; returns when all have ended.

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
                function(task)
        except BaseException as error:
            errors.append(error)

    others = [threading.Thread(target=work) for _ in range(count - 1)]
    try:
        for thread in others:
            thread.start()
        work()
    except BaseException as error:  # no thread could be started, or a signal
        errors.append(error)
    for thread in others:
        if thread.ident is not None:
            thread.join()
    if errors:
        raise errors[0]
