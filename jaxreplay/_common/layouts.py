"""Storage of items: how a backend wants it laid out, and what is written to it and read from it.

On a CPU and a GPU a leaf is stored as it is, [*leading, *item]. A TPU copies the whole of most such arrays at every
call, as its layout of them is not the one that it gathers and scatters in. There a leaf is stored as rows of 128
numbers, the lanes of a TPU, which it takes as they are: `Rows`.
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import lax

LANES = 128
PADDING = 1.25  # an item is rounded up to whole rows where that makes it at most so many times as large
BACKENDS_OF_ROWS = ("tpu",)


@struct.dataclass
class Bits:
    """Storage of a narrow leaf (bfloat16, float8, int4, ...) as unsigned integers of 8 bits or more.

    XLA:CPU widens narrow floats that it scatters to float32, which would copy the whole storage twice a write, and
    takes milliseconds over integers of less than a byte.
    """

    bits: Any  # as the storage of any leaf
    dtype: Any = struct.field(pytree_node=False)

    @property
    def shape(self) -> tuple[int, ...]:
        return self.bits.shape


@struct.dataclass
class Rows:
    """Storage of a leaf as rows of 128 numbers.

    Attributes:
      rows: [num_rows, 128]; items one after the other, each `_stride` numbers after the last.
      leading: the axes of the storage, such as (capacity,) (static).
      item: the shape of an item's leaf (static).
    """

    rows: Any  # [num_rows, 128]
    leading: tuple[int, ...] = struct.field(pytree_node=False)
    item: tuple[int, ...] = struct.field(pytree_node=False)

    @property
    def shape(self) -> tuple[int, ...]:
        return self.rows.shape[:-2] + self.leading + self.item

    @property
    def dtype(self) -> Any:
        return self.rows.dtype


def stores_rows() -> bool:
    """Whether the default backend of JAX wants storage as rows."""
    return jax.default_backend() in BACKENDS_OF_ROWS


def zeros(spec: Any, leading: tuple[int, ...], num_axes: int) -> Any:
    """Storage for items of `spec`: zeros whose `num_axes` leading axes are replaced by `leading`."""

    def leaf_zeros(leaf: Any) -> Any:
        item, dtype = tuple(leaf.shape[num_axes:]), leaf.dtype
        stored = f"uint{max(8, width(dtype))}" if is_narrow(dtype) else dtype
        if _fits_rows(leaf.dtype, item):
            rows = _num_rows(leading, item, stored)
            made = Rows(jnp.zeros((rows, LANES), stored), leading, item)
        else:
            made = lax.full(leading + item, 0, stored)  # unlike jnp.zeros, also makes arrays of PRNG keys
        return Bits(made, dtype) if is_narrow(dtype) else made

    return jax.tree.map(leaf_zeros, spec)


def stored_spec(storage: Any) -> Any:
    """Shapes and dtypes of what is stored."""
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), storage, is_leaf=_is_leaf)


def leading(storage: Any, num_axes: int) -> tuple[int, ...]:
    """The first axes of a storage, as many."""
    return jax.tree.leaves(stored_spec(storage))[0].shape[:num_axes]


def write(storage: Any, slots: jax.Array, items: Any) -> Any:
    """Storage with `items` [B, ...] at `slots` [B] of its first axis, distinct; one out of range is dropped."""

    def leaf_write(stored: Any, new: jax.Array) -> Any:
        if isinstance(stored, Bits):
            return Bits(leaf_write(stored.bits, to_bits(new)), stored.dtype)
        if isinstance(stored, Rows):
            return _write_rows(stored, slots, new)
        return stored.at[slots].set(new, mode="drop", unique_indices=True)

    return jax.tree.map(leaf_write, storage, items, is_leaf=_is_leaf)


def read(storage: Any, slots: jax.Array, *, fill: bool = False) -> Any:
    """Items at `slots` [...] of the first axis, which are in range, or else read zeros with `fill`."""

    def leaf_read(stored: Any) -> jax.Array:
        if isinstance(stored, Bits):
            return from_bits(leaf_read(stored.bits), stored.dtype)
        if isinstance(stored, Rows):
            return _read_rows(stored, slots, fill)
        if fill:
            return stored.at[slots].get(mode="fill", fill_value=0)
        return stored.at[slots].get(mode="promise_in_bounds")

    return jax.tree.map(leaf_read, storage, is_leaf=_is_leaf)


def merge_axes(storage: Any) -> Any:
    """`storage` with its first two axes made one; free, and then to be read only."""

    def merged(leaf: Any) -> Any:
        if isinstance(leaf, Rows):
            return Rows(leaf.rows, (math.prod(leaf.leading[:2]), *leaf.leading[2:]), leaf.item)
        return leaf.reshape(math.prod(leaf.shape[:2]), *leaf.shape[2:])

    return _map_arrays(merged, storage)


def on_this_backend(storage: Any, num_axes: int, num_stacked: int) -> Any:
    """The same storage as this backend wants it; `num_stacked` axes are before its own `num_axes`."""

    def again(leaf: Any) -> Any:
        is_rows, wants_rows = isinstance(leaf, Rows), _fits_rows(leaf.dtype, leaf.shape[num_stacked + num_axes :])
        if is_rows == wants_rows:
            return leaf
        return _as_it_is(leaf) if is_rows else _as_rows(leaf, num_axes, num_stacked)

    return _map_arrays(again, storage)


def as_it_is(storage: Any) -> Any:
    """The same storage, its leaves [*leading, *item] on every backend."""

    return _map_arrays(lambda leaf: _as_it_is(leaf) if isinstance(leaf, Rows) else leaf, storage)


def _map_arrays(function: Callable[[Any], Any], storage: Any) -> Any:
    """`function` of each array or `Rows` of a storage, also where it holds the bits of a narrow leaf."""

    def mapped(leaf: Any) -> Any:
        return Bits(function(leaf.bits), leaf.dtype) if isinstance(leaf, Bits) else function(leaf)

    return jax.tree.map(mapped, storage, is_leaf=_is_leaf)


def _is_leaf(x: Any) -> bool:
    return isinstance(x, Bits | Rows)


def _fits_rows(dtype: Any, item: tuple[int, ...]) -> bool:
    return stores_rows() and math.prod(item) > 0 and not jnp.issubdtype(dtype, jax.dtypes.prng_key)


def _tile(dtype: Any) -> int:
    """Numbers of a tile: 8 rows of 32 bits, or as many bytes of narrower ones."""
    return LANES * 8 * max(4 // np.dtype(dtype).itemsize, 1)


def _stride(item: tuple[int, ...], dtype: Any) -> int:
    """Numbers from one item to the next: whole tiles, or whole rows, or no more than it has."""
    size = math.prod(item)
    for unit in (_tile(dtype), LANES):
        if -(-size // unit) * unit <= PADDING * size:
            return -(-size // unit) * unit
    return size


def _num_rows(leading: tuple[int, ...], item: tuple[int, ...], dtype: Any) -> int:
    stride, num_items = _stride(item, dtype), math.prod(leading)
    if stride % LANES == 0:
        return num_items * (stride // LANES)
    tile = _tile(dtype) // LANES
    rows = num_items // LANES * stride + -(-(num_items % LANES * stride) // LANES)
    return -(-rows // tile) * tile


def _merged(stored: Rows, slots: jax.Array, fill: Any) -> jax.Array:
    """`slots` of the first axis as places of single items, with an axis for each other one; `fill` if out of range."""
    others = math.prod(stored.leading[1:])
    within = np.arange(others, dtype=np.int32).reshape(*[1] * slots.ndim, *stored.leading[1:])
    slots = slots.reshape(*slots.shape, *[1] * (within.ndim - slots.ndim))
    inside = (slots >= 0) & (slots < stored.leading[0])
    return jnp.where(inside, slots * others + within, fill)


def _numbers(rows: jax.Array, items: jax.Array, stride: int) -> tuple[jax.Array, jax.Array]:
    """Rows and lanes, [..., stride], of items [...] that are packed."""
    first_row, lane = jnp.zeros_like(items), items * stride
    if rows.size > 2**30:  # int32 might overflow
        first_row = lax.div(items, np.int32(LANES)) * stride
        lane = lax.rem(items, np.int32(LANES)) * stride
    number = _count(lane, stride)
    return lax.div(number, np.int32(LANES)) + first_row[..., None], lax.rem(number, np.int32(LANES))


def _count(start: jax.Array, size: int) -> jax.Array:
    """[..., size], from `start` [...] on."""
    return start[..., None] + np.arange(size, dtype=np.int32).reshape(*[1] * start.ndim, size)


def _view(stored: Rows, items: jax.Array, stride: int) -> tuple[jax.Array, Any]:
    """An array, and the indices in it of what items [...] hold, in order, as an array [..., ...]."""
    rows = stored.rows
    if stride % LANES:
        return rows, _numbers(rows, items, stride)
    if stride % _tile(rows.dtype) == 0:
        return rows.reshape(-1, stride // LANES, LANES), (items,)
    each = stride // LANES
    return rows, (_count(items * each, each),)


def _write_rows(stored: Rows, slots: jax.Array, new: jax.Array) -> Rows:
    stride, size = _stride(stored.item, stored.dtype), math.prod(stored.item)
    beyond = -(-stored.rows.size // stride)  # the last rows may have room for more items than there are
    items = _merged(stored, slots, beyond).reshape(-1)
    array, at = _view(stored, items, stride)
    numbers = jnp.pad(new.reshape(items.size, size), ((0, 0), (0, stride - size)))
    numbers = numbers.reshape(*at[0].shape, *array.shape[len(at) :])
    array = array.at[at].set(numbers, mode="drop", unique_indices=True, wrap_negative_indices=False)
    return Rows(array.reshape(stored.rows.shape), stored.leading, stored.item)


def _read_rows(stored: Rows, slots: jax.Array, fill: bool) -> jax.Array:
    items = _merged(stored, slots, 0)
    stride = _stride(stored.item, stored.dtype)
    array, at = _view(stored, items, stride)
    numbers = array.at[at].get(mode="promise_in_bounds", wrap_negative_indices=False)
    numbers = numbers.reshape(*items.shape, stride)[..., : math.prod(stored.item)]
    found = numbers.reshape(*items.shape, *stored.item)
    if not fill:
        return found
    inside = (slots >= 0) & (slots < stored.leading[0])
    return jnp.where(inside.reshape(*slots.shape, *[1] * (found.ndim - slots.ndim)), found, jnp.zeros_like(found))


@jax.jit
def _as_it_is(stored: Rows) -> jax.Array:
    """[*stacked, *leading, *item], where the rows may be [*stacked, num_rows, 128]."""
    stacked, num_items = stored.rows.shape[:-2], math.prod(stored.leading)
    stride, size = _stride(stored.item, stored.dtype), math.prod(stored.item)
    numbers = stored.rows.reshape(*stacked, -1)[..., : num_items * stride]
    numbers = numbers.reshape(*stacked, num_items, stride)[..., :size]
    return numbers.reshape(*stacked, *stored.leading, *stored.item)


@functools.partial(jax.jit, static_argnums=(1, 2))
def _as_rows(plain: jax.Array, num_axes: int, num_stacked: int) -> Rows:
    shape = plain.shape
    stacked, leading = shape[:num_stacked], tuple(shape[num_stacked : num_stacked + num_axes])
    item = tuple(shape[num_stacked + num_axes :])
    num_items, size, stride = math.prod(leading), math.prod(item), _stride(item, plain.dtype)
    num_rows = _num_rows(leading, item, plain.dtype)

    def padded(x: jax.Array, more: int) -> jax.Array:
        return jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, more)])

    numbers = padded(plain.reshape(*stacked, num_items, size), stride - size).reshape(*stacked, num_items * stride)
    numbers = padded(numbers, num_rows * LANES - num_items * stride)
    return Rows(numbers.reshape(*stacked, num_rows, LANES), leading, item)


def width(dtype: Any) -> int:
    """Bits of a number, without padding."""
    return (jnp.finfo if jnp.issubdtype(dtype, jnp.floating) else jnp.iinfo)(dtype).bits


def to_bits(x: jax.Array) -> jax.Array:
    """Numbers of real dtypes as unsigned integers of as many bits, or 8."""
    bits = lax.bitcast_convert_type(x, f"uint{width(x.dtype)}")
    return bits.astype(f"uint{max(8, width(x.dtype))}")


def from_bits(bits: jax.Array, dtype: Any) -> jax.Array:
    """What `to_bits` was given."""
    return lax.bitcast_convert_type(bits.astype(f"uint{width(dtype)}"), dtype)


def is_narrow(dtype: Any) -> bool:
    if jnp.issubdtype(dtype, jnp.floating):
        return dtype not in (jnp.float16, jnp.float32, jnp.float64)
    return jnp.issubdtype(dtype, jnp.integer) and width(dtype) < 8
