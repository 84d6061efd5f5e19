"""Leaves of a saved state: the record and the stored form of each.

PRNG keys are stored as their data, and dtypes that file formats may not support (float8, int4, ...) as unsigned
integers. Python numbers are stored in the description.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.core
import jax.numpy as jnp
import numpy as np

from jaxreplay._common import layouts, xla
from jaxreplay.checkpoint._arrays import Packed, Region, chunks_of, region_of

PLAIN = {
    *("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
    *("bfloat16", "float16", "float32", "float64", "complex64", "complex128"),
}
WEAK = {"int32", "int64", "float32", "float64", "complex64", "complex128"}  # may be weakly typed
NUMBERS = {number.__name__: number for number in (bool, int, float, complex)}


def named(tree: Any) -> dict[str, Any]:
    """Leaves by path; a `ValueError` if two have the same."""
    found = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree, is_leaf=lambda x: hasattr(x, "_is_config")):
        if (name := jax.tree_util.keystr(path)) in found:
            raise ValueError(f"leaf {name}: there are two with this path; give the node's children keys of their own.")
        found[name] = leaf
    return found


def record(path: str, leaf: Any) -> dict[str, Any]:
    """The record of a leaf, an array or its shape and dtype, in a description.

    A `ValueError` if it is traced, no array or number, JAX would change its dtype, or its PRNG keys have no name.
    """
    if isinstance(leaf, jax.core.Tracer):
        raise ValueError(f"leaf {path}: is traced; save and restore run on the host, outside of jit, scan and vmap.")
    if type(leaf) in NUMBERS.values():
        number = str(leaf) if isinstance(leaf, complex) else leaf
        return {"path": path, "dtype": type(leaf).__name__, "number": number}
    if not isinstance(leaf, jax.Array | np.ndarray | np.generic | jax.ShapeDtypeStruct):
        rule = "expected an array or a number, in save(path, buffer, state)"
        raise ValueError(f"leaf {path or '<root>'}: got a {type(leaf).__qualname__}; {rule}.")
    if not jnp.issubdtype(leaf.dtype, jax.dtypes.extended):
        _check_dtype(leaf.dtype, path)
    found = {"path": path, "dtype": str(leaf.dtype), "shape": list(leaf.shape)}
    if isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        if not isinstance(impl := jax.random.key_impl(leaf), str):
            raise ValueError(f"leaf {path}: PRNG keys of {impl}, which has no name; use one of JAX's own.")
    elif getattr(leaf, "weak_type", False) and str(leaf.dtype) in WEAK:
        found["weak"] = True
    return found


def is_record(x: Any) -> bool:
    """True if JSON is the record of a leaf, with the shape of its chunks."""
    match x:
        case {"path": str(), "dtype": "complex", "number": str(number), **more} if not more:
            return complex(number) is not None
        case {"path": str(), "dtype": str(dtype), "number": number, **more} if not more:
            return dtype in ("bool", "int", "float") and type(number) is NUMBERS[dtype]
        case {"path": str(), "dtype": str(dtype), "shape": [*shape], "chunk": [*chunk], **more}:
            is_weak = dtype in WEAK and more == {"weak": True} and more["weak"] is True
            return (is_weak or not more) and all(type(size) is int for size in [*shape, *chunk])
    return False


def static(tree: Any) -> dict[str, Any]:
    """Static fields of dataclasses by path; None for those that are no plain values."""
    found = {}

    def visit(path: Any, node: Any) -> bool:
        for field in dataclasses.fields(node) if dataclasses.is_dataclass(node) else ():
            if field.metadata.get("static", not field.metadata.get("pytree_node", True)):
                found[f"{jax.tree_util.keystr(path)}.{field.name}"] = _plain(getattr(node, field.name))
        return False

    jax.tree_util.tree_leaves_with_path(tree, is_leaf=visit, is_leaf_takes_path=True)
    return found


def _plain(value: Any) -> Any:
    """A static value as JSON; None for what is not plain, also in a tuple."""
    if isinstance(value, tuple | list):
        return [_plain(x) for x in value]
    if isinstance(value, np.dtype) or (isinstance(value, type) and issubclass(value, np.generic)):
        return np.dtype(value).name
    return value if isinstance(value, bool | int | float | str) else None


def part_of(content: dict[str, Any], where: str) -> dict[str, Any]:
    """The part of a description for the state at a path, as if it was saved alone."""
    cut, within = len(where), f"{where}."
    leaves = [x | {"path": x["path"][cut:]} for x in content["leaves"] if x["path"].startswith(within)]
    static = {path[cut:]: value for path, value in content["static"].items() if path.startswith(within)}
    return {"leaves": leaves, "static": static}


def differ(content: dict[str, Any], like: Any) -> str:
    """The first leaf of `like` whose path, shape or dtype is not as saved, or static field; "" if there is none."""
    given = {path: record(path, leaf) for path, leaf in named(like).items()}
    old, saved = {x["path"]: x for x in content["leaves"]}, content["static"]
    for path in {**old, **given}:
        was, now = old.get(path, {}), given.get(path, {})
        found, wanted = (f"{x['dtype']}{x.get('shape', '')}" if x else "nothing" for x in (was, now))
        if found != wanted and not ("number" in was and now.get("weak")):  # weak: of jax.eval_shape
            hint = " (is jax_enable_x64 as it was?)" if ("64[" in found) != ("64[" in wanted) else ""
            if "number" in was | now and [] in (was.get("shape"), now.get("shape")):
                hint = " (what goes through jit comes back as an array)"
            return f"like{path}: saved {found}, given {wanted}{hint}"
    for path, value in static(like).items():
        if path in saved and saved[path] != value:
            return f"like{path}: saved {saved[path]!r}, given {value!r}"
    return "" if [*old] == [*given] else "like: its leaves have another order"


def pack(leaf: Any, copies: bool) -> Packed:
    """The stored form of an array, as a copy on the host if `copies`."""
    x = leaf if isinstance(leaf, jax.Array) else np.array(leaf)
    if str(x.dtype) not in PLAIN:
        x = stored(jnp.asarray(x))
    if isinstance(x, np.ndarray):
        return Packed(chunks_of(x.shape, x.dtype, x.shape), True, [(region_of(x.shape), x)])
    parts = [(region, _alone(part)) for region, part in _parts(x)]
    if copies:
        parts = [(region, np.array(xla.on_host(part))) for region, part in parts]
    chunks = chunks_of(x.shape, np.dtype(x.dtype), x.sharding.shard_shape(x.shape))
    return Packed(chunks, x.is_fully_addressable, parts)


def _parts(x: jax.Array) -> list[tuple[Region, jax.Array]]:
    """The regions of an array whose first device is of this process, each with its part.

    By region, as JAX lists some parts twice, or not yet all, where another thread is asking for them too.
    """
    regions = {device: region_of(x.shape, index) for device, index in x.sharding.devices_indices_map(x.shape).items()}
    first = {str(region): device for device, region in reversed(regions.items())}
    own = [name for name, device in first.items() if device in x.sharding.addressable_devices]
    found: dict[str, tuple[Region, jax.Array]] = {}
    number = 0
    while not {*own} <= found.keys():
        try:
            part = x.addressable_data(number)
        except IndexError:  # not yet listed
            number = 0
            continue
        region = regions[next(iter(part.devices()))]
        found.setdefault(str(region), (region, part))
        number += 1
    return [found[name] for name in own]


@dataclasses.dataclass(frozen=True)
class Stored:
    """An array of a checkpoint that is not yet read.

    Attributes:
      found: its record.
      shape, dtype: as in the state.
      read: a function that reads the stored form, for a sharding or None.
    """

    found: dict[str, Any]
    shape: tuple[int, ...]
    dtype: Any
    read: Callable[[Any], Any]

    def stacked(self) -> "Stored":
        """The same with a leading axis of size 1."""
        return dataclasses.replace(self, shape=(1, *self.shape), read=lambda _: self.read(None)[None])

    def __array__(self, *_: Any, **__: Any) -> np.ndarray:
        """The array on the host; not of PRNG keys."""
        x = self.read(None)
        return x if str(self.dtype) in PLAIN else np.asarray(_from_bits(x, self.dtype))

    def load(self, sharding: Any) -> jax.Array:
        """The array, with its sharding."""
        x = self.read(sharding)
        x = x if isinstance(x, jax.Array) else jax.device_put(x)  # an array of several processes stays where it is
        jax.block_until_ready(x)  # before the next one is read
        if jnp.issubdtype(self.dtype, jax.dtypes.prng_key):
            x = jax.random.wrap_key_data(x, impl=_key_impl(self.dtype))
        elif str(self.dtype) not in PLAIN:
            x = _from_bits(x, self.dtype)
        if self.found.get("weak"):
            x = _weakly_typed(x)
        return x if sharding is None else jax.device_put(x, sharding)


def _check_dtype(dtype: Any, path: str) -> None:
    try:
        is_number = jnp.issubdtype(dtype, jnp.number) or jnp.issubdtype(dtype, jnp.bool_)
        kept = is_number and jax.dtypes.canonicalize_dtype(dtype) == dtype
    except TypeError:  # a dtype unknown to this version of JAX
        kept = False
    if not kept:
        raise ValueError(f"leaf {path}: has dtype {dtype}, which JAX would not keep; cast it, or set jax_enable_x64.")


@jax.jit
def stored(x: jax.Array) -> jax.Array:
    """The stored form of an array."""
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        return jax.random.key_data(x)
    return x if x.dtype.name in PLAIN else layouts.to_bits(x)


def _key_impl(dtype: Any) -> Any:
    """The implementation of PRNG keys of a dtype; `jax.random.key_impl` takes keys alone, also traced ones."""
    found = []
    jax.eval_shape(lambda key: found.append(jax.random.key_impl(key)), jax.ShapeDtypeStruct((), dtype))
    return found[0]


_from_bits = jax.jit(layouts.from_bits, static_argnums=1)


def _alone(array: jax.Array) -> jax.Array:
    """The same array of one device as a new object; a cached copy on the host then belongs to the new object."""
    return jax.make_array_from_single_device_arrays(array.shape, array.sharding, [array])


@jax.jit
def _weakly_typed(x: jax.Array) -> jax.Array:
    """`x` with a weak type, if JAX has one for its dtype now."""
    zero = jnp.asarray(np.zeros((), x.dtype).item())  # arrays made from Python numbers are weakly typed
    return jnp.broadcast_to(zero, x.shape).at[...].set(x) if zero.dtype == x.dtype else x
