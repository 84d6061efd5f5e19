"""Storage of items: layouts for each backend, reads and writes.

CPUs and GPUs store a leaf as an array [*leading, *item]. A TPU gathers and scatters in another layout than it stores,
and would copy most such arrays in full at every call. TPUs therefore store a leaf as `Rows` of 128 numbers, one per
lane, which need no copy.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, ClassVar, Self

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from jaxreplay._common import devices, duplicates, shown, xla

LANES = 128
PADDING = 1.25  # items are padded to whole rows if they grow by at most this factor


@struct.dataclass
class Bits(shown.Shown):
    """Storage of a narrow leaf (bfloat16, float8, int4, ...) as unsigned integers of 8 bits or more.

    XLA:CPU widens narrow floats to float32 before a scatter, which would copy the whole storage twice per write. A
    scatter of integers narrower than a byte takes milliseconds.
    """

    bits: Any  # stored like any other leaf
    dtype: Any = struct.field(pytree_node=False)

    @property
    def shape(self) -> tuple[int, ...]:
        return self.bits.shape


@struct.dataclass
class Rows(shown.Shown):
    """Storage of a leaf as rows of 128 numbers.

    Attributes:
      rows: [num_rows, 128]; items in order, `_stride` numbers apart.
      leading: sizes of the leading axes, such as (capacity,) (static).
      item: shape of the leaf of one item (static).
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


def stores_rows(backend: str) -> bool:
    """True if a backend stores leaves as `Rows`."""
    return backend == "tpu"


def zeros(spec: Any, leading: tuple[int, ...], num_axes: int) -> Any:
    """Storage of zeros for items of `spec`, with its `num_axes` leading axes replaced by `leading`."""
    backend = devices.backend_of()

    def leaf_zeros(leaf: Any) -> Any:
        item, dtype = tuple(leaf.shape[num_axes:]), leaf.dtype
        stored = f"uint{max(8, width(dtype))}" if is_narrow(dtype) else dtype
        if _fits_rows(dtype, item, backend):
            numbers = Rows(xla.full((_num_rows(leading, item, stored), LANES), 0, stored), leading, item)
        else:
            numbers = xla.full(leading + item, 0, stored)
        return Bits(numbers, dtype) if is_narrow(dtype) else numbers

    return jax.tree.map(leaf_zeros, spec)


def stored_spec(storage: Any) -> Any:
    """Shapes and dtypes of the stored leaves."""
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), storage, is_leaf=is_leaf)


def write(storage: Any, places: jax.Array, items: Any, num_axes: int = 1) -> Any:
    """Storage with `items` [B, ...] at distinct `places` [B] (int32); places out of range are dropped.

    Places are flat indices over the `num_axes` leading axes.
    """

    def written(stored: Any, new: jax.Array) -> Any:
        if isinstance(stored, Bits):
            return Bits(written(stored.bits, to_bits(new)), stored.dtype)
        sizes = stored.shape[:num_axes]
        if isinstance(stored, Rows):
            as_one = Rows(stored.rows, (math.prod(sizes), *stored.leading[num_axes:]), stored.item)
            return Rows(_write_rows(as_one, places, new), stored.leading, stored.item)
        # One index per axis: XLA:CPU would copy the array to merge and split the axes.
        others = jnp.int32(math.prod(sizes[1:]))
        index = (places,) if num_axes == 1 else (jax.lax.div(places, others), jax.lax.rem(places, others))
        return stored.at[index].set(new, mode="drop", unique_indices=True, wrap_negative_indices=False)

    return jax.tree.map(written, storage, items, is_leaf=is_leaf)


def write_parts(storage: Any, num_axes: int, places: jax.Array, mask: jax.Array | None, values: list[Any]) -> Any:
    """`write` of one array [*places.shape, ...] for each leaf, or None; the last write to a repeated place wins."""
    stored, treedef = jax.tree.flatten(storage, is_leaf=is_leaf)
    beyond, batch_axes = math.prod(stored[0].shape[:num_axes]), places.ndim
    places = (places if mask is None else jnp.where(mask, places, beyond)).reshape(-1)
    places = jnp.where(duplicates.last_of_each(places), places, beyond)
    for i, value in enumerate(values):
        if value is not None:
            stored[i] = write(stored[i], places, value.reshape(places.size, *value.shape[batch_axes:]), num_axes)
    return jax.tree.unflatten(treedef, stored)


def read(storage: Any, slots: jax.Array, *, fill: bool = False) -> Any:
    """Items at `slots` [...] of the first axis, in range; with `fill`, slots out of range read as zeros."""

    def leaf_read(stored: Any) -> jax.Array:
        if isinstance(stored, Bits):
            return from_bits(leaf_read(stored.bits), stored.dtype)
        if isinstance(stored, Rows):
            return _read_rows(stored, slots, fill)
        if fill:
            return stored.at[slots].get(mode="fill", fill_value=0, wrap_negative_indices=False)
        return stored.at[slots].get(mode="promise_in_bounds")

    return jax.tree.map(leaf_read, storage, is_leaf=is_leaf)


def merge_axes(storage: Any) -> Any:
    """Read-only view of `storage` with its first two axes merged, without a copy."""

    def merged(leaf: Any) -> Any:
        if isinstance(leaf, Rows):
            return Rows(leaf.rows, (math.prod(leaf.leading[:2]), *leaf.leading[2:]), leaf.item)
        return leaf.reshape(math.prod(leaf.shape[:2]), *leaf.shape[2:])

    return _map_arrays(merged, storage)


def on_backend(storage: Any, num_axes: int, num_stacked: int, backend: str) -> Any:
    """`storage` in the layout of `backend`; `num_stacked` axes precede its own `num_axes`."""

    def converted(leaf: Any) -> Any:
        item = leaf.shape[num_stacked + num_axes :]
        is_rows, wants_rows = isinstance(leaf, Rows), _fits_rows(leaf.dtype, item, backend)
        if is_rows == wants_rows:
            return leaf
        return jax.jit(_as_it_is)(leaf) if is_rows else _as_rows(leaf, num_axes, num_stacked)

    return _map_arrays(converted, storage)


class BackendState(shown.Shown):
    """A state with fields that are laid out by backend.

    `_layouts`, of the state and of its parts, maps the name of each such field to a function
    `(value, state, backend) -> value`.
    """

    _layouts: ClassVar[dict[str, Callable[[Any, Any, str], Any]]]

    def on_this_backend(self, backend: str | None = None) -> Self:
        """The same state with storages and trees in the layout of `backend`; None for the backend of its devices.

        Use it after `jax.device_put` of a state to another backend.

        Examples:
          >>> state = buffer.init({"x": np.zeros((3, 2))}).on_this_backend("tpu")
          >>> # An item has two numbers, a row has 128.
          >>> state.storage["x"].rows.shape, state.sampler.tree.fanout
          ((8, 128), 128)
        """
        return _for_backend(self, self, backend or devices.backend_of(self))


def _for_backend(tree: Any, state: Any, backend: str) -> Any:
    """A pytree of parts of a state, with each part that has `_layouts` laid out for a backend."""

    def converted(part: Any) -> Any:
        if not hasattr(part, "_layouts"):
            return part
        changed = {name: part._layouts.get(name, _for_backend)(x, state, backend) for name, x in vars(part).items()}
        return dataclasses.replace(part, **changed)

    return jax.tree.map(converted, tree, is_leaf=lambda x: hasattr(x, "_layouts"))


def storage_layout(num_axes: int) -> Callable[[Any, Any, str], Any]:
    """Entry of `BackendState._layouts` for a buffer storage with `num_axes` leading axes."""
    return lambda storage, state, backend: on_backend(storage, num_axes, np.ndim(state.ring.size), backend)


def plain(storage: Any) -> Any:
    """The same storage with leaves [*leading, *item], on every backend; NumPy arrays stay on the host."""
    return _map_arrays(lambda leaf: _as_it_is(leaf) if isinstance(leaf, Rows) else leaf, storage)


def _map_arrays(function: Callable[[Any], Any], storage: Any) -> Any:
    """`function` applied to each array or `Rows` of a storage, also inside `Bits`."""

    def mapped(leaf: Any) -> Any:
        return Bits(function(leaf.bits), leaf.dtype) if isinstance(leaf, Bits) else function(leaf)

    return jax.tree.map(mapped, storage, is_leaf=is_leaf)


def is_leaf(x: Any) -> bool:
    """True if `x` is the storage of one leaf, although it is a pytree."""
    return isinstance(x, Bits | Rows)


def _fits_rows(dtype: Any, item: tuple[int, ...], backend: str) -> bool:
    """True if a backend stores such a leaf as `Rows`; never for PRNG keys or empty items."""
    return stores_rows(backend) and math.prod(item) > 0 and not jnp.issubdtype(dtype, jax.dtypes.prng_key)


def _tile(dtype: Any) -> int:
    """Numbers per tile: 8 rows of 32-bit numbers, or the same number of bytes for narrower dtypes."""
    return LANES * 8 * max(4 // np.dtype(dtype).itemsize, 1)


def _stride(item: tuple[int, ...], dtype: Any) -> int:
    """Distance between items in numbers: whole tiles, else whole rows, else the item's size."""
    size = math.prod(item)
    for unit in (_tile(dtype), LANES):
        if -(-size // unit) * unit <= PADDING * size:
            return -(-size // unit) * unit
    return size


def _num_rows(leading: tuple[int, ...], item: tuple[int, ...], dtype: Any) -> int:
    """Number of rows that store all items, in whole tiles."""
    num_tiles = -(-math.prod(leading) * _stride(item, dtype) // _tile(dtype))
    return num_tiles * (_tile(dtype) // LANES)


def _item_numbers(stored: Rows, slots: jax.Array, stride: int) -> jax.Array:
    """Flat indices of the items at `slots` [...] of the first axis, [..., *leading[1:]]; out of range if these are."""
    beyond = -(-stored.rows.size // stride)  # out of range even in the padding of the last rows
    others = math.prod(stored.leading[1:])
    within = np.arange(others, dtype=np.int32).reshape(*[1] * slots.ndim, *stored.leading[1:])
    slots = slots.reshape(*slots.shape, *[1] * (within.ndim - slots.ndim))
    inside = (slots >= 0) & (slots < stored.leading[0])
    return jnp.where(inside, slots * others + within, beyond)


def _rows_and_lanes(rows: jax.Array, items: jax.Array, stride: int) -> tuple[jax.Array, jax.Array]:
    """Rows and lanes, [..., stride], of items [...] that are not aligned to rows."""
    first_row, lane = jnp.zeros_like(items), items * stride
    if rows.size > 2**30:  # int32 might overflow
        first_row = jax.lax.div(items, np.int32(LANES)) * stride
        lane = jax.lax.rem(items, np.int32(LANES)) * stride
    lanes = _consecutive(lane, stride)
    return jax.lax.div(lanes, np.int32(LANES)) + first_row[..., None], jax.lax.rem(lanes, np.int32(LANES))


def _consecutive(start: jax.Array, size: int) -> jax.Array:
    """`size` consecutive integers from each `start` [...], [..., size]."""
    return start[..., None] + np.arange(size, dtype=np.int32).reshape(*[1] * start.ndim, size)


def _view(stored: Rows, items: jax.Array, stride: int) -> tuple[jax.Array, Any]:
    """A view of the rows, and the indices that gather the numbers of items [...] from it in order, [..., ...]."""
    rows = stored.rows
    if stride % LANES:
        return rows, _rows_and_lanes(rows, items, stride)
    if stride % _tile(rows.dtype) == 0:
        return rows.reshape(-1, stride // LANES, LANES), (items,)
    rows_per_item = stride // LANES
    return rows, (_consecutive(items * rows_per_item, rows_per_item),)


def _write_rows(stored: Rows, slots: jax.Array, new: jax.Array) -> jax.Array:
    """The rows of `stored` with `new` [B, ...] at `slots` [B]."""
    stride, size = _stride(stored.item, stored.dtype), math.prod(stored.item)
    items = _item_numbers(stored, slots, stride).reshape(-1)
    array, at = _view(stored, items, stride)
    numbers = jnp.pad(new.reshape(items.size, size), ((0, 0), (0, stride - size)))
    numbers = numbers.reshape(*at[0].shape, *array.shape[len(at) :])
    array = array.at[at].set(numbers, mode="drop", unique_indices=True, wrap_negative_indices=False)
    return array.reshape(stored.rows.shape)


def _read_rows(stored: Rows, slots: jax.Array, fill: bool) -> jax.Array:
    """Items at `slots` [...], [..., *leading[1:], *item]; with `fill`, zeros if out of range."""
    stride, mode = _stride(stored.item, stored.dtype), "fill" if fill else "promise_in_bounds"
    items = _item_numbers(stored, slots, stride)
    array, at = _view(stored, items, stride)
    numbers = array.at[at].get(mode=mode, fill_value=0, wrap_negative_indices=False).reshape(*items.shape, stride)
    return numbers[..., : math.prod(stored.item)].reshape(*items.shape, *stored.item)


def _as_it_is(stored: Rows) -> jax.Array:
    """The items as an array [*stacked, *leading, *item], from rows [*stacked, num_rows, 128]."""
    stacked, num_items = stored.rows.shape[:-2], math.prod(stored.leading)
    stride, size = _stride(stored.item, stored.dtype), math.prod(stored.item)
    numbers = stored.rows.reshape(*stacked, -1)[..., : num_items * stride].reshape(*stacked, num_items, stride)
    return numbers[..., :size].reshape(*stacked, *stored.leading, *stored.item)


@functools.partial(jax.jit, static_argnums=(1, 2))
def _as_rows(plain: jax.Array, num_axes: int, num_stacked: int) -> Rows:
    """The inverse of `_as_it_is`."""
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
    """Bits per number without padding."""
    return (jnp.finfo if jnp.issubdtype(dtype, jnp.floating) else jnp.iinfo)(dtype).bits


def to_bits(x: jax.Array) -> jax.Array:
    """Bits of real numbers as unsigned integers of the same width, but at least 8 bits."""
    return jax.lax.bitcast_convert_type(x, f"uint{width(x.dtype)}").astype(f"uint{max(8, width(x.dtype))}")


def from_bits(bits: jax.Array, dtype: Any) -> jax.Array:
    """The inverse of `to_bits`."""
    return jax.lax.bitcast_convert_type(bits.astype(f"uint{width(dtype)}"), dtype)


def is_narrow(dtype: Any) -> bool:
    """True if leaves of this dtype are stored as `Bits`."""
    if jnp.issubdtype(dtype, jnp.floating):
        return dtype not in (jnp.float16, jnp.float32, jnp.float64)
    return jnp.issubdtype(dtype, jnp.integer) and width(dtype) < 8
