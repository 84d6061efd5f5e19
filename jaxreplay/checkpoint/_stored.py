"""The stored form of arrays in a checkpoint, and checksums of their bits.

PRNG keys are stored as their data, and dtypes that file formats may not support (float8, int4, ...) as unsigned
integers.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxreplay._common import layouts

PLAIN = {
    *("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
    *("bfloat16", "float16", "float32", "float64", "complex64", "complex128"),
}
SMALL = 2**16  # bytes; the checksums of smaller arrays are computed on the host
CHUNK = 2**20  # words that the host looks at together


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


def header(leaf: jax.Array, name: str) -> dict[str, Any]:
    """JSON with everything about an array but its values.

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
        record |= {"mesh": dict(leaf.sharding.mesh.shape), "spec": list(leaf.sharding.spec)}
    return record


def sharding_in(meshes: Iterable[Mesh], record: dict[str, Any]) -> NamedSharding | None:
    """The sharding of the saved array on the first of `meshes` with the same axes; None if there is none."""
    for mesh in meshes:
        if record.get("mesh") == dict(mesh.shape):
            return NamedSharding(mesh, PartitionSpec(*(tuple(x) if isinstance(x, list) else x for x in record["spec"])))
    return None


def pack(leaf: jax.Array) -> jax.Array:
    """The stored form of an array."""
    if _is_key(leaf.dtype):
        return jax.random.key_data(leaf)
    return leaf if leaf.dtype.name in PLAIN else _to_bits(leaf)


def as_spec(record: dict[str, Any]) -> jax.ShapeDtypeStruct:
    """Shape and dtype of the array that `record` describes."""
    if "key" in record:
        dtype = jax.eval_shape(lambda: jax.random.key(0, impl=record["key"])).dtype
    else:
        dtype = jnp.dtype(record["dtype"])
    return jax.ShapeDtypeStruct(tuple(record["shape"]), dtype)


def stored_type(record: dict[str, Any]) -> tuple[tuple[int, ...], np.dtype]:
    """Shape and dtype of the stored form of the array that `record` describes."""
    spec = as_spec(record)
    if "key" in record:
        data = jax.eval_shape(jax.random.key_data, spec)
        return data.shape, np.dtype(data.dtype)
    return spec.shape, jnp.dtype(record["dtype"] if record["dtype"] in PLAIN else "uint8")


def unpack(record: dict[str, Any], stored: jax.Array, sharding: NamedSharding | None) -> jax.Array:
    """The inverse of `pack`: the array that `record` describes, with its sharding."""
    if "key" in record:
        leaf = jax.random.wrap_key_data(stored, impl=record["key"])
    else:
        leaf = stored if record["dtype"] in PLAIN else _from_bits(stored, jnp.dtype(record["dtype"]))
    if record.get("weak"):
        leaf = _weakly_typed(leaf)
    return leaf if sharding is None else jax.device_put(leaf, sharding)


def checksums(stored: Sequence[jax.Array]) -> list[list[int]]:
    """Two 32-bit checksums for each array, of its bits and their positions; they do not depend on its sharding.

    If an array is large or spans processes, only its checksums leave the devices.
    """
    found, groups = {}, {}
    for number, array in enumerate(stored):
        if array.is_fully_addressable and array.nbytes <= SMALL:
            found[number] = host_checksums(np.asarray(array))
        else:
            sharding = array.sharding
            devices = np.asarray(sharding.mesh.devices).flat if isinstance(sharding, NamedSharding) else [sharding]
            groups.setdefault(tuple(devices), []).append(number)
    for numbers in groups.values():
        pairs = _device_checksums([stored[number] for number in numbers])
        found |= dict(zip(numbers, np.asarray(pairs).tolist(), strict=True))
    return [found[number] for number in range(len(stored))]


def _is_key(dtype: Any) -> bool:
    return jnp.issubdtype(dtype, jax.dtypes.prng_key)


_to_bits = jax.jit(layouts.to_bits)
_from_bits = jax.jit(layouts.from_bits, static_argnums=1)


@jax.jit
def _weakly_typed(x: jax.Array) -> jax.Array:
    """`x` with a weak type, if JAX has one for its dtype."""
    zero = jnp.asarray(np.zeros((), x.dtype).item())  # arrays made from Python numbers are weakly typed
    return jnp.broadcast_to(zero, x.shape).at[...].set(x) if zero.dtype == x.dtype else x


def _mix(x: Any) -> Any:
    """A bijection of uint32 in which every bit depends on every other (the finalizer of MurmurHash3)."""
    x = (x ^ (x >> 16)) * np.uint32(0x85EBCA6B)
    x = (x ^ (x >> 13)) * np.uint32(0xC2B2AE35)
    return x ^ (x >> 16)


def _pair(words: Any, position: Any) -> tuple[Any, Any]:
    """The summands of both checksums, from uint32 words and their positions."""
    mixed = _mix(words ^ _mix(position))
    return mixed, _mix(mixed ^ np.uint32(0x9E3779B9))


def host_checksums(x: np.ndarray) -> list[int]:
    """The checksums of `_device_checksums`, without compilation."""
    x = np.ascontiguousarray(x).reshape(-1)
    words = x.view(f"uint{8 * min(x.itemsize, 4)}")
    sums = np.zeros(2, np.uint32)
    for first in range(0, words.size, CHUNK):
        part = words[first : first + CHUNK].astype(np.uint32)
        position = np.arange(first, first + part.size, dtype=np.int64).astype(np.uint32)
        sums += np.array([np.sum(y, dtype=np.uint32) for y in _pair(part, position)])
    return sums.tolist()


def _words(x: jax.Array) -> jax.Array:
    """The bits of an array as uint32, with a further axis if a number needs several."""
    if x.dtype == jnp.bool_:
        return x.astype(jnp.uint32)
    if jnp.issubdtype(x.dtype, jnp.complexfloating):
        return jnp.stack([_words(lax.real(x)), _words(lax.imag(x))], axis=x.ndim)
    if x.dtype.itemsize == 8:
        return lax.bitcast_convert_type(x, jnp.uint32)
    return lax.bitcast_convert_type(x, f"uint{8 * x.dtype.itemsize}").astype(jnp.uint32)


@jax.jit
def _device_checksums(stored: list[jax.Array]) -> jax.Array:
    """Both checksums of each array, uint32 [len(stored), 2]."""
    sums = []
    for x in stored:
        words = _words(x)
        position, stride = jnp.zeros(words.shape, jnp.uint32), 1
        for axis in reversed(range(words.ndim)):
            position += lax.broadcasted_iota(jnp.uint32, words.shape, axis) * np.uint32(stride % 2**32)
            stride *= words.shape[axis]
        # One reduction for both: with two, XLA:CPU stores their common input, which is larger than a storage of bytes.
        zeros, axes = (np.uint32(0), np.uint32(0)), tuple(range(words.ndim))
        pair = lax.reduce(_pair(words, position), zeros, lambda x, y: (x[0] + y[0], x[1] + y[1]), axes)
        sums.append(jnp.stack(pair))
    return jnp.stack(sums)
