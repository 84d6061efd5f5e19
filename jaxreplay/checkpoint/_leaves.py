"""The arrays of a checkpoint: what is recorded of each, and the blocks that it is stored in.

An array is stored as the bytes that NumPy has of it, in one block for each part that a device holds. The blocks of a
process follow one another in its file, in the order of the arrays.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from jaxreplay._common import xla
from jaxreplay.checkpoint import _files

Box = tuple[tuple[int, ...], tuple[int, ...]]  # of a part: its first index and its shape


class Part(NamedTuple):
    """A part of an array, and the process that writes it.

    The data are None on other processes, unless each of them has its own copy.
    """

    process: int
    box: Box
    data: jax.Array | None
    is_copy: bool = False


def as_array(leaf: Any, name: str) -> jax.Array:
    """The leaf as a JAX array.

    Raises:
      ValueError: the leaf is traced, or JAX would change its dtype.
    """
    if isinstance(leaf, jax.core.Tracer):
        raise ValueError(f"leaf {name}: is traced; save runs on the host, so call it outside of jit, scan and vmap.")
    if not _is_key(leaf.dtype):
        check_dtype(leaf.dtype, name)
    return jnp.asarray(leaf)


def check_dtype(dtype: Any, name: str) -> None:
    """Raise a `ValueError` if JAX would change the dtype."""
    try:
        is_number = jnp.issubdtype(dtype, jnp.number) or jnp.issubdtype(dtype, jnp.bool_)
        kept = is_number and jax.dtypes.canonicalize_dtype(dtype) == dtype
    except TypeError:  # a name that this version of JAX does not know
        kept = False
    if not kept:
        raise ValueError(
            f"leaf {name}: has dtype {dtype}, which JAX would not keep; set jax_enable_x64 for a 64-bit one, or "
            "cast it before it is saved."
        )


def header(leaf: jax.Array, name: str, meshes: Mapping[str, Mesh]) -> dict[str, Any]:
    """JSON with everything about an array but its values; `meshes` are those of the configuration, by name.

    Raises:
      ValueError: the leaf holds PRNG keys of an implementation without a name.
    """
    record = {"path": name, "dtype": str(leaf.dtype), "shape": list(leaf.shape)}
    if _is_key(leaf.dtype):
        record["dtype"], record["key"] = "key", jax.random.key_impl(leaf)
        if not isinstance(record["key"], str):
            raise ValueError(f"leaf {name}: PRNG keys of {record['key']}, which has no name; use those of JAX.")
    elif leaf.weak_type:
        record["weak"] = True
    if isinstance(leaf.sharding, NamedSharding):
        where = _places(leaf.sharding.mesh)
        found = [mesh for mesh in meshes if _places(meshes[mesh]) == where]
        if found:
            record |= {"mesh": found[0], "spec": list(leaf.sharding.spec)}
    return record


def sharding_in(meshes: Mapping[str, Mesh], record: dict[str, Any]) -> NamedSharding | None:
    """The sharding that the array had, on the mesh of the same name; None if it was on none of the configuration's."""
    if "mesh" not in record:
        return None
    spec = PartitionSpec(*(tuple(x) if isinstance(x, list) else x for x in record["spec"]))
    return NamedSharding(meshes[record["mesh"]], spec)


def parts(leaf: jax.Array) -> list[Part]:
    """The parts of an array, in the same order on all processes; of copies only the first."""
    leaf = _data(leaf)
    if leaf.size == 0:
        return []
    if jax.process_count() > 1 and leaf.is_fully_addressable:  # each process has one, and they are equal
        return [Part(0, ((0,) * leaf.ndim, leaf.shape), leaf, is_copy=True)]
    shards = [shard for shard in leaf.global_shards if shard.replica_id == 0]
    found = [Part(x.device.process_index, _box(x.index, leaf.shape), x.data) for x in shards]
    return sorted(found, key=lambda part: part.box)  # each process has its own order


def on_host(arrays: list[Any]) -> Iterator[np.ndarray]:
    """The numbers of each array in turn; it is taken from the list, so that neither stays in memory."""
    while arrays:
        array = arrays.pop(0)
        if isinstance(array.sharding, SingleDeviceSharding):  # an array keeps its copy on the host, so have another one
            array = jax.make_array_from_single_device_arrays(array.shape, array.sharding, [array])
        yield xla.on_host(array)


def as_spec(record: dict[str, Any]) -> jax.ShapeDtypeStruct:
    """Shape and dtype of the array that `record` describes."""
    if "key" in record:
        dtype = jax.eval_shape(lambda: jax.random.key(0, impl=record["key"])).dtype
    else:
        dtype = jnp.dtype(record["dtype"])
    return jax.ShapeDtypeStruct(tuple(record["shape"]), dtype)


def stored_type(record: dict[str, Any]) -> tuple[tuple[int, ...], np.dtype]:
    """Shape and dtype of the stored numbers of the array that `record` describes."""
    spec = jax.eval_shape(_data, as_spec(record))
    return spec.shape, np.dtype(spec.dtype)


class Blocks:
    """The arrays of a checkpoint, which are read when they are asked for.

    Raises:
      ValueError: what the records claim is not what is on disk; nothing of that size has been allocated.
      OSError: a file is not there.
    """

    def __init__(self, records: Sequence[dict[str, Any]], path: str, number: int):
        self._records, self._path, self._number = records, path, number
        self._types = [stored_type(record) for record in records]
        self._offsets: list[list[int]] = []
        ends: dict[int, int] = {}
        for record, (shape, dtype) in zip(records, self._types, strict=True):
            self._offsets.append([])
            for process, start, part, _ in record["parts"]:
                inside = len(start) == len(part) == len(shape) and all(
                    first >= 0 and 0 < count <= whole - first
                    for first, count, whole in zip(start, part, shape, strict=True)
                )
                if not inside:
                    raise ValueError(f"leaf {record['path']} has a part {part} at {start} of {list(shape)}")
                offset = ends.get(process, 0)
                self._offsets[-1].append(offset)
                ends[process] = offset + math.prod(part) * dtype.itemsize
            stored = sum(math.prod(part) for _, _, part, _ in record["parts"])
            if stored != math.prod(shape):
                raise ValueError(f"leaf {record['path']} has {stored} of {math.prod(shape)} numbers")
        for process, end in ends.items():
            if (found := _files.size(path, number, process)) != end:
                raise ValueError(f"the file of process {process} has {found} bytes, not {end}")

    def read(self, i: int, box: Box | None = None) -> np.ndarray:
        """The stored numbers of array `i`, or a part of it, on the host.

        Raises:
          ValueError: they are not those that were saved.
        """
        record, (shape, dtype) = self._records[i], self._types[i]
        for part, offset in zip(record["parts"], self._offsets[i], strict=True):
            if (box or ((0,) * len(shape), shape)) == (tuple(part[1]), tuple(part[2])):
                return self._block(record["path"], part, offset, dtype)
        whole = np.zeros(shape, dtype)
        for part, offset in zip(record["parts"], self._offsets[i], strict=True):
            whole[_slices(part[1], part[2])] = self._block(record["path"], part, offset, dtype)
        return whole if box is None else whole[_slices(*box)]

    def array(self, i: int, sharding: NamedSharding | None) -> jax.Array:
        """Array `i`, of which each device reads its own part.

        Raises:
          ValueError: its numbers are not those that were saved.
        """
        record, (shape, _) = self._records[i], self._types[i]
        if sharding is None:
            stored = jnp.asarray(self.read(i))
        else:
            read: dict[Box, np.ndarray] = {}  # by each device of those that hold copies

            def part(index: Any) -> np.ndarray:
                box = _box(index, shape)
                if box not in read:
                    read[box] = self.read(i, box)
                return read[box]

            stored = jax.make_array_from_callback(shape, sharding, part)
        leaf = jax.random.wrap_key_data(stored, impl=record["key"]) if "key" in record else stored
        if record.get("weak"):
            leaf = _weakly_typed(leaf)
        return leaf if sharding is None else jax.device_put(leaf, sharding)

    def _block(self, name: str, part: Sequence[Any], offset: int, dtype: np.dtype) -> np.ndarray:
        process, _, shape, checksum = part
        block, found = _files.read(self._path, self._number, process, offset, shape, dtype)
        if found != checksum:
            raise ValueError(f"leaf {name} has other bits than when it was saved")
        return block


def _is_key(dtype: Any) -> bool:
    return jnp.issubdtype(dtype, jax.dtypes.prng_key)


def _data(leaf: Any) -> Any:
    """The numbers that are stored of an array."""
    return jax.random.key_data(leaf) if _is_key(leaf.dtype) else leaf


def _places(mesh: Any) -> tuple[Any, ...]:
    """The devices of a mesh by axis, which tell it from others, whatever the types of its axes."""
    return tuple(mesh.shape.items()), tuple(np.asarray(mesh.devices).flat)


def _box(index: tuple[slice, ...], shape: tuple[int, ...]) -> Box:
    bounds = [x.indices(size)[:2] for x, size in zip(index, shape, strict=True)]
    return tuple(first for first, _ in bounds), tuple(end - first for first, end in bounds)


def _slices(start: Sequence[int], shape: Sequence[int]) -> tuple[slice, ...]:
    return tuple(slice(first, first + size) for first, size in zip(start, shape, strict=True))


@jax.jit
def _weakly_typed(x: jax.Array) -> jax.Array:
    """`x` with a weak type, if JAX has one for its dtype."""
    zero = jnp.asarray(np.zeros((), x.dtype).item())  # arrays made from Python numbers are weakly typed
    return jnp.broadcast_to(zero, x.shape).at[...].set(x) if zero.dtype == x.dtype else x
