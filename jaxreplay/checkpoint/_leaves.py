"""The arrays of a checkpoint: records, storage and checksums.

PRNG keys are stored as their data, and dtypes that file formats may not support (float8, int4, ...) as unsigned
integers. A part is the shard of an array on one device.
"""

import math
import zlib
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxreplay._common import layouts, xla

PLAIN = {
    *("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
    *("bfloat16", "float16", "float32", "float64", "complex64", "complex128"),
}
CHUNK = 2**24  # bytes per step of a checksum
Box = tuple[tuple[int, ...], tuple[int, ...]]  # first index and shape of a part


class Part(NamedTuple):
    """A part of an array and the process that holds it; `data` is None on other processes."""

    process: int
    box: Box
    data: Any


def check_dtype(dtype: Any, name: str) -> None:
    """Raise a `ValueError` if JAX would change the dtype."""
    try:
        is_number = jnp.issubdtype(dtype, jnp.number) or jnp.issubdtype(dtype, jnp.bool_)
        kept = is_number and jax.dtypes.canonicalize_dtype(dtype) == dtype
    except TypeError:  # a dtype unknown to this version of JAX
        kept = False
    if not kept:
        raise ValueError(
            f"leaf {name}: has dtype {dtype}, which JAX would not keep; set jax_enable_x64 for 64-bit dtypes, or "
            "cast it before the save."
        )


def pack(leaf: Any, name: str, meshes: Mapping[str, Mesh]) -> tuple[dict[str, Any], jax.Array | np.ndarray]:
    """The record of an array without its parts, and its stored form, on the host unless it is sharded.

    `meshes` of the configuration are given by name.

    Raises:
      ValueError: the leaf is traced, JAX would change its dtype, or it holds PRNG keys of an unnamed implementation.
    """
    if isinstance(leaf, jax.core.Tracer):
        raise ValueError(f"leaf {name}: is traced; save runs on the host, so call it outside of jit, scan and vmap.")
    record = {"path": name, "dtype": str(leaf.dtype), "shape": list(leaf.shape)}
    if _is_key(leaf.dtype):
        record["dtype"], record["key"] = "key", jax.random.key_impl(leaf)
        if not isinstance(record["key"], str):
            raise ValueError(f"leaf {name}: PRNG keys of {record['key']}, which has no name; use one of JAX's own.")
    else:
        check_dtype(leaf.dtype, name)
    leaf = jnp.asarray(leaf)
    if getattr(leaf, "weak_type", False):  # keys have none
        record["weak"] = True
    if isinstance(leaf.sharding, NamedSharding):
        where = _places(leaf.sharding.mesh)
        found = [mesh for mesh in meshes if _places(meshes[mesh]) == where]
        if found:
            record |= {"mesh": found[0], "spec": list(leaf.sharding.spec)}
    leaf = _stored(leaf)
    if len(leaf.sharding.device_set) == 1 or (jax.process_count() > 1 and leaf.is_fully_addressable):
        return record, _on_host(leaf)
    shards = [_alone(shard.data) for shard in leaf.addressable_shards]  # so that `leaf` caches no copy on the host
    return record, jax.make_array_from_single_device_arrays(leaf.shape, leaf.sharding, shards)


def sharding_in(meshes: Mapping[str, Mesh], record: dict[str, Any]) -> NamedSharding | None:
    """Saved sharding of the array on the mesh of the same name; None if it was on no mesh of the configuration."""
    if record.get("mesh") not in meshes:
        return None
    spec = PartitionSpec(*(tuple(x) if isinstance(x, list) else x for x in record["spec"]))
    return NamedSharding(meshes[record["mesh"]], spec)


def parts(stored: jax.Array | np.ndarray) -> list[Part]:
    """Parts of an array without replicas, in the same order on all processes."""
    if stored.size == 0:
        return []
    if isinstance(stored, np.ndarray):
        return [Part(0, ((0,) * stored.ndim, stored.shape), stored)]
    shards = [shard for shard in stored.global_shards if shard.replica_id == 0]
    found = [Part(x.device.process_index, _box(x.index, stored.shape), x.data) for x in shards]
    return sorted(found, key=lambda part: part.box)  # the order of shards differs between processes


def checksum(part: Any) -> int:
    """CRC-32 of the bytes of a part; 0 if another process holds it."""
    if part is None:
        return 0
    raw: Any = np.ascontiguousarray(_on_host(part) if isinstance(part, jax.Array) else part)
    raw, found = raw.reshape(-1).view(np.uint8), 0
    for first in range(0, raw.size, CHUNK):
        found = zlib.crc32(memoryview(raw[first : first + CHUNK]), found)
    return found


def as_spec(record: dict[str, Any]) -> jax.ShapeDtypeStruct:
    """Shape and dtype of the array that `record` describes."""
    if "key" in record:
        dtype = jax.eval_shape(lambda: jax.random.key(0, impl=record["key"])).dtype
    else:
        dtype = jnp.dtype(record["dtype"])
    return jax.ShapeDtypeStruct(tuple(record["shape"]), dtype)


def stored_type(record: dict[str, Any]) -> tuple[tuple[int, ...], np.dtype]:
    """Shape and dtype of the stored form of the array that `record` describes."""
    spec = jax.eval_shape(_stored, as_spec(record))
    return spec.shape, np.dtype(spec.dtype)


def is_record(record: Any) -> bool:
    """True if JSON is the record of an array."""
    match record:
        case {"path": str(), "dtype": str(dtype), "shape": shape, "parts": [*parts]}:
            is_keyed = isinstance(record.get("key", ""), str) and ("key" in record) == (dtype == "key")
            is_meshed = "mesh" not in record or (isinstance(record["mesh"], str) and _is_spec(record.get("spec")))
            return is_keyed and is_meshed and _are_sizes(shape) and all(map(_is_part, parts))
    return False


def check_parts(record: dict[str, Any]) -> None:
    """Raise a `ValueError` if the parts do not cover the array."""
    shape, _ = stored_type(record)
    for start, part, _ in record["parts"]:
        inside = len(start) == len(part) == len(shape) and all(
            first >= 0 and 0 < count <= whole - first for first, count, whole in zip(start, part, shape, strict=True)
        )
        if not inside:
            raise ValueError(f"leaf {record['path']} has a part {part} at {start} of {list(shape)}")
    if (stored := sum(math.prod(part) for _, part, _ in record["parts"])) != math.prod(shape):
        raise ValueError(f"leaf {record['path']} has {stored} of {math.prod(shape)} numbers")


def check_bits(record: dict[str, Any], stored: jax.Array | np.ndarray) -> None:
    """Raise a `ValueError` if the local parts of an array differ from the saved ones."""
    shape, dtype = stored_type(record)
    same = stored.shape == shape and stored.dtype == dtype
    sharded = [] if isinstance(stored, np.ndarray) else stored.addressable_shards
    here = {_box(shard.index, shape): shard.data for shard in sharded}  # one of the replicas
    for start, count, expected in record["parts"] if same else ():
        if isinstance(stored, np.ndarray):
            part = stored[tuple(slice(first, first + size) for first, size in zip(start, count, strict=True))]
        else:
            part = here.pop((tuple(start), tuple(count)), None)
        same = same and (part is None or checksum(part) == expected)
    if not same or here:
        raise ValueError(f"leaf {record['path']} differs from its saved bits")


def numbers(record: dict[str, Any], stored: Any) -> np.ndarray:
    """Numbers of an array on the host; the data of PRNG keys."""
    return stored if "key" in record else xla.on_host(unpack(record, stored, None))


def unpack(record: dict[str, Any], stored: jax.Array | np.ndarray, sharding: NamedSharding | None) -> jax.Array:
    """The array that `record` describes, with its sharding."""
    leaf = jnp.asarray(stored)
    if "key" in record:
        leaf = jax.random.wrap_key_data(leaf, impl=record["key"])
    elif record["dtype"] not in PLAIN:
        leaf = _from_bits(leaf, jnp.dtype(record["dtype"]))
    if record.get("weak"):
        leaf = _weakly_typed(leaf)
    return leaf if sharding is None else jax.device_put(leaf, sharding)


def _are_sizes(x: Any) -> bool:
    return isinstance(x, list) and all(type(size) is int and 0 <= size < 2**63 for size in x)


def _is_part(x: Any) -> bool:
    return isinstance(x, list) and len(x) == 3 and all(map(_are_sizes, (x[0], x[1], [x[2]])))


def _is_spec(x: Any) -> bool:
    """True if JSON is a `PartitionSpec`."""
    axes = [axis if isinstance(axis, list) else [axis] for axis in x] if isinstance(x, list) else [[0]]
    return all(name is None or isinstance(name, str) for axis in axes for name in axis)


def _is_key(dtype: Any) -> bool:
    return jnp.issubdtype(dtype, jax.dtypes.prng_key)


_to_bits = jax.jit(layouts.to_bits)
_from_bits = jax.jit(layouts.from_bits, static_argnums=1)


def _stored(leaf: jax.Array) -> jax.Array:
    """Stored form of an array."""
    if _is_key(leaf.dtype):
        return jax.random.key_data(leaf)
    return leaf if leaf.dtype.name in PLAIN else _to_bits(leaf)


def _alone(array: jax.Array) -> jax.Array:
    """The same array of one device as a new object, which may cache a copy on the host."""
    return jax.make_array_from_single_device_arrays(array.shape, array.sharding, [array])


def _on_host(array: jax.Array) -> np.ndarray:
    return xla.on_host(_alone(array) if len(array.sharding.device_set) == 1 else array)


def _places(mesh: Any) -> tuple[Any, ...]:
    """Axes and devices of a mesh, its identity regardless of axis types."""
    return tuple(mesh.shape.items()), tuple(np.asarray(mesh.devices).flat)


def _box(index: tuple[slice, ...], shape: tuple[int, ...]) -> Box:
    bounds = [x.indices(size)[:2] for x, size in zip(index, shape, strict=True)]
    return tuple(first for first, _ in bounds), tuple(end - first for first, end in bounds)


@jax.jit
def _weakly_typed(x: jax.Array) -> jax.Array:
    """`x` with a weak type, if JAX has one for its dtype."""
    zero = jnp.asarray(np.zeros((), x.dtype).item())  # arrays made from Python numbers are weakly typed
    return jnp.broadcast_to(zero, x.shape).at[...].set(x) if zero.dtype == x.dtype else x
