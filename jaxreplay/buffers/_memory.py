"""Memory of a state on a device, computed before anything is allocated.

**Padding.** A CPU and a GPU store an array's numbers without padding. A TPU stores arrays in tiles: up to 1,024 numbers
for one axis, else up to 8 rows of 128 numbers along the two axes with the least padding. The results equal the argument
sizes of programs that XLA compiled for a TPU v5e (recorded in the tests).
"""

import contextlib
import dataclasses
import inspect
import itertools
import math
import os
from collections.abc import Iterator
from typing import Any

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from jaxreplay._common import layouts
from jaxreplay._common.checks import as_spec, type_text
from jaxreplay._common.devices import BACKENDS, backend_of, beside
from jaxreplay._common.meshes import OnMesh
from jaxreplay._common.xla import is_tracing
from jaxreplay.buffers._shards import whole_of
from jaxreplay.sum_tree import SumTree

TILED = ("tpu",)
LANES, SUBLANES, WORD = 128, 8, 4  # columns and rows of a TPU's tile; bytes of a word
STACKS = range(2, 9)  # sizes of an axis that probably stacks frames


@dataclasses.dataclass(frozen=True, kw_only=True)
class Memory:
    """Bytes of a state on a device, padding included. `print` shows a table.

    For a `Mixture` of sources on several devices and sources on one, the device is the one that has both.

    Attributes:
      backend: "cpu", "gpu", "tpu", or another name of a backend of JAX.
      num_devices: number of devices that hold this many bytes each.
      leaves: bytes of the stored items, by leaf path, such as "['obs']".
      stored: shape and dtype of the items on a device, without padding, by leaf path.
      tree: bytes of the sum trees.
      other: bytes of all else: counters, flags, handles, queues.

    Examples:
      >>> frames = {"obs": jax.ShapeDtypeStruct((1, 84, 84), jnp.uint8)}
      >>> found = jr.memory(jr.ReplayBuffer(capacity=1000), frames, backend="cpu")
      >>> found.leaves, found.tree
      ({"['obs']": 7056000}, 0)
    """

    backend: str
    num_devices: int
    leaves: dict[str, int]
    stored: dict[str, jax.ShapeDtypeStruct]
    tree: int
    other: int

    @property
    def total(self) -> int:
        """Bytes on a device."""
        return sum(self.leaves.values()) + self.tree + self.other

    def __str__(self) -> str:
        devices = f"{self.num_devices} devices, each" if self.num_devices > 1 else "1 device"
        rows = [(f"{self.backend}, {devices}", "", "bytes")]
        for path, num_bytes in self.leaves.items():
            rows.append((path, _type_of(self.stored[path]), f"{num_bytes:,}"))
        rows += [("sum trees", "", f"{self.tree:,}"), ("other", "", f"{self.other:,}")]
        rows.append(("total", short(self.total), f"{self.total:,}"))
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        return "\n".join(f"{a:<{widths[0]}}  {b:<{widths[1]}}  {c:>{widths[2]}}" for a, b, c in rows)


def memory(buffer: Any, items: Any = None, *, backend: str | None = None) -> Memory:
    """Memory of a buffer's state on each device. Nothing is allocated.

    A stack of n states, such as `jax.vmap` over n seeds makes, takes n times as much.

    Args:
      buffer: a `ReplayBuffer`, `ReservoirBuffer`, `SequenceBuffer`, `Mixture`, `Sharded`, `DifficultyPools` or
        `Tasks`.
      items: as `buffer.init` takes them, arrays or `jax.ShapeDtypeStruct`; None for `DifficultyPools` and `Tasks`.
      backend: "cpu", "gpu" or "tpu", which need not be present; None for that of the state that `init` makes.

    Raises:
      ValueError: there is no such backend, or as the buffer's `init`.

    Examples:
      >>> rows = {
      ...     "obs": jax.ShapeDtypeStruct((1, 17), jnp.float32),
      ...     "reward": jax.ShapeDtypeStruct((1,), jnp.float32),
      ... }
      >>> print(jr.memory(jr.ReplayBuffer(capacity=1000), rows, backend="gpu"))
      gpu, 1 device                      bytes
      ['obs']        float32[1000, 17]  68,000
      ['reward']     float32[1000]       4,000
      sum trees                              0
      other                                  8
      total          72.0 kB            72,008
    """
    if not hasattr(buffer, "_device_states") or isinstance(buffer, type):
        raise ValueError(
            f"buffer={buffer!r}: must be a buffer, a Mixture, Sharded of a buffer, DifficultyPools or Tasks."
        )
    if backend is not None and backend not in BACKENDS:
        raise ValueError(f"backend={backend!r}: must be one of {', '.join(BACKENDS)}, or None.")
    if items is None and inspect.signature(buffer.init).parameters:
        raise ValueError(
            f"items: the memory of a {type(buffer).__name__} depends on its items; give them as its init takes them, "
            "arrays or jax.ShapeDtypeStruct."
        )
    kind = backend_of(_place_of(buffer, items)) if backend is None else BACKENDS[backend]
    leaves, stored, tree, other, num_devices = {}, {}, 0, 0, 1
    with jax.default_device(kind):
        states = buffer._device_states(None if items is None else as_spec(items))
    for prefix, state, devices in states:
        for path, leaf in _stored(getattr(state, "storage", ())):
            leaves[prefix + path] = _bytes(leaf, kind)
            stored[prefix + path] = jax.ShapeDtypeStruct(leaf.shape[state.ring.size.ndim :], leaf.dtype)
        in_storage = _bytes(getattr(state, "storage", ()), kind)
        in_trees = _bytes([x for x in jax.tree.leaves(state, is_leaf=_is_tree) if _is_tree(x)], kind)
        tree, other = tree + in_trees, other + _bytes(state, kind) - in_storage - in_trees
        num_devices = max(num_devices, devices)
    return Memory(backend=kind, num_devices=num_devices, leaves=leaves, stored=stored, tree=tree, other=other)


@contextlib.contextmanager
def room(buffer: Any, items: Any) -> Iterator[None]:
    """Context of `init`, in which new arrays are laid out for their devices and made there.

    If the device reports its limit, it is checked in advance.

    Raises:
      ValueError: there is no room; the message names the largest leaf and the remedies.
    """
    with beside(_place_of(buffer, items)):
        if is_tracing():
            yield
            return
        device = _default_device()
        limit = bytes_limit(device)
        if limit is not None and (found := memory(buffer, items)).total > limit:
            raise ValueError(_too_large(buffer, found, limit, device))
        try:
            yield
        except jax.errors.JaxRuntimeError as error:
            if "RESOURCE_EXHAUSTED" not in str(error):
                raise
            found = memory(buffer, items)
            raise ValueError(_too_large(buffer, found, limit or _free_bytes(found.num_devices), device)) from error


def bytes_limit(device: Any) -> int | None:
    """Bytes that JAX may allocate on a device; None if unknown, as on a CPU."""
    try:
        return (device.memory_stats() or {}).get("bytes_limit")
    except (NotImplementedError, jax.errors.JaxRuntimeError):  # the device has no statistics
        return None


def _free_bytes(num_devices: int) -> int | None:
    """Free bytes of the host's memory for each of `num_devices` that share it; None if unknown."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES") // num_devices
    except (AttributeError, OSError, ValueError):  # not every system reports them
        return None


def device_bytes(shape: tuple[int, ...], itemsize: int, backend: str) -> int:
    """Bytes of an array on a device of `backend`."""
    size = math.prod(shape)
    if backend not in TILED or size == 0:
        return size * itemsize
    packed = max(WORD // itemsize, 1)  # numbers in a word
    if len(shape) < 2:
        tile = min(1024, max(_power(size), LANES * packed))
        return -(-size // tile) * tile * itemsize

    def padded(row_axis: int, lane_axis: int) -> int:
        rows, lanes = shape[row_axis], shape[lane_axis]
        tile = min(SUBLANES, max(_power(rows), packed))
        return size // (rows * lanes) * (-(-rows // tile) * tile) * (-(-lanes // LANES) * LANES) * itemsize

    return min(padded(*axes) for axes in itertools.permutations(range(len(shape)), 2))


def short(num_bytes: float) -> str:
    """Bytes with three digits, such as 28.3 GB; a GB is 10^9 bytes."""
    for unit, size in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if num_bytes >= size:
            return f"{num_bytes / size:#.3g}".rstrip(".") + f" {unit}"
    return f"{num_bytes} bytes"


def _power(n: int) -> int:
    """The smallest power of two that is at least n."""
    return 1 << max(n - 1, 0).bit_length()


def _type_of(leaf: jax.ShapeDtypeStruct) -> str:
    return type_text(leaf.dtype, leaf.shape)


def _is_tree(x: Any) -> bool:
    return isinstance(x, SumTree)


def _stored(storage: Any) -> list[tuple[str, Any]]:
    """Path and storage of each leaf of the items."""
    leaves = jax.tree_util.tree_leaves_with_path(storage, is_leaf=layouts.is_leaf)
    return [(jax.tree_util.keystr(path) or "<root>", leaf) for path, leaf in leaves]


def _bytes(tree: Any, backend: str) -> int:
    """Bytes of the arrays of a pytree."""

    def array_bytes(x: Any) -> int:
        if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
            x = jax.eval_shape(jax.random.key_data, x)
        return device_bytes(x.shape, np.dtype(x.dtype).itemsize, backend)

    return sum(map(array_bytes, jax.tree.leaves(tree)))


def _place_of(buffer: Any, items: Any) -> Any:
    """What says where `init` makes its state: the mesh of a `Sharded`, or the items."""
    return NamedSharding(buffer.mesh, PartitionSpec()) if isinstance(buffer, OnMesh) else items


def _default_device() -> Any:
    """The device on which new arrays are made."""
    device = jax.config.jax_default_device  # pyright: ignore[reportAttributeAccessIssue]
    return jax.local_devices(backend=device)[0] if device is None or isinstance(device, str) else device


def _too_large(buffer: Any, found: Memory, limit: int | None, device: Any) -> str:
    """The error message, with remedies. `limit` is None if the room is unknown."""
    largest = max(found.leaves, key=lambda path: found.leaves[path])
    is_host = bytes_limit(device) is None
    has = "no room left for it"
    if limit is not None and limit < found.total:
        has = short(limit) + " free" * is_host
    whole = whole_of(buffer)
    if hasattr(whole, "buffers"):
        remedies = ["lower the sizes of its buffers"]
    else:
        name = whole._storage_axes[0]
        size = getattr(whole, name)
        fits = int(size * (limit or 0) / found.total)
        to = f" to {fits - fits % 10 ** max(len(str(fits)) - 3, 0)}" if 0 < fits < size else ""
        remedies = [f"lower {name}={size}{to}"]
        if (kind := whole._once_in) and (once := _bytes_once(found, largest)) < found.total:
            remedies.append(f"store each observation or frame once in a {kind}, which takes about {short(once)}")
    if whole is buffer and not is_host:
        remedies.append("spread it over several devices with jr.Sharded")
    return (
        f"{type(buffer).__name__}: its state takes {short(found.total)}, and {device.device_kind} has {has}. "
        f"The largest leaf is {largest}, {_type_of(found.stored[largest])}, of {short(found.leaves[largest])}; "
        f"{', or '.join(remedies)}. See jr.memory."
    )


def _bytes_once(found: Memory, largest: str) -> int:
    """Total bytes if leaves like the largest one, and the frames that it stacks, are stored once."""
    leaf = found.stored[largest]
    alike = [path for path, x in found.stored.items() if (x.shape, x.dtype) == (leaf.shape, leaf.dtype)]
    item = leaf.shape[1:]
    stacked = next((n for n in (item[-1:] + item[:1]) if n in STACKS), 1) if len(item) == 3 else 1
    repeated = len(alike) if len(item) > 0 else 1
    return found.total - found.leaves[largest] * (repeated * stacked - 1) // stacked
