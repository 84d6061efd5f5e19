"""Memory of a state on a device, computed before anything is allocated.

**Padding.** A CPU and a GPU store an array's numbers without padding. A TPU stores arrays in tiles: up to 1,024 numbers
for one axis, else up to 8 rows of 128 numbers along the two axes with the least padding. The results equal the argument
sizes of programs that XLA compiled for a TPU v5e (recorded in the tests).
"""

import dataclasses
import itertools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxreplay._common import checks, devices, layouts
from jaxreplay._common.shown import short
from jaxreplay.curricula import DifficultyPools, Tasks
from jaxreplay.inspection import _facts
from jaxreplay.sum_tree import SumTree
from jaxreplay.wrappers import Mixture, Sharded

LANES, SUBLANES, WORD = 128, 8, 4  # columns and rows of a TPU's tile; bytes of a word


@dataclasses.dataclass(frozen=True, kw_only=True)
class Memory:
    """Bytes of a state on a device, padding included. Shown as a table.

    For a `Mixture` of sources on several devices and sources on one, the device is the one that has both.

    Attributes:
      backend: "cpu", "gpu", "tpu", or another name of a backend of JAX.
      num_devices: number of devices that hold this many bytes each.
      leaves: bytes of the stored items, by leaf path, such as "['obs']".
      stored: shape and dtype of the items on a device, without padding, by leaf path.
      tree: bytes of the sum trees.
      other: bytes of all else: counters, flags, handles, queues.

    Examples:
      >>> found = jr.memory(buffer, {"obs": np.zeros((1, 84, 84), np.uint8)}, backend="cpu")
      >>> found.leaves
      {"['obs']": 28224}
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

    def __repr__(self) -> str:
        devices = f"{self.num_devices} devices, each" if self.num_devices > 1 else "1 device"
        rows = [(f"{self.backend}, {devices}", "", "bytes")]
        rows += [(path, checks.type_text(x), f"{self.leaves[path]:,}") for path, x in self.stored.items()]
        rows += [("sum trees", "", f"{self.tree:,}"), ("other", "", f"{self.other:,}")]
        rows.append(("total", short(self.total), f"{self.total:,}"))
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        return "\n".join(f"{a:<{widths[0]}}  {b:<{widths[1]}}  {c:>{widths[2]}}" for a, b, c in rows)


def memory(buffer: Any, items: Any = None, *, backend: str | None = None) -> Memory:
    """Bytes of a buffer's state on each device, without allocating it.

    A stack of n states, such as `jax.vmap` over n seeds makes, takes n times as much.

    Args:
      buffer: a `ReplayBuffer`, `ReservoirBuffer`, `SequenceBuffer`, `Mixture`, `Sharded`, `DifficultyPools`, `Tasks` or
        `Levels`.
      items: as `buffer.init` takes them, arrays or `jax.ShapeDtypeStruct`; None for `DifficultyPools` and `Tasks`.
      backend: "cpu", "gpu" or "tpu", which need not be present; None for the backend of the state that `init` makes.

    Raises:
      ValueError: there is no such backend, or as the buffer's `init`.

    Examples:
      >>> rows = {"obs": np.zeros((1, 17), np.float32), "reward": np.zeros(1, np.float32)}
      >>> jr.memory(jr.ReplayBuffer(capacity=1000), rows, backend="gpu")
      gpu, 1 device                      bytes
      ['obs']        float32[1000, 17]  68,000
      ['reward']     float32[1000]       4,000
      sum trees                              0
      other                                  8
      total          72.0 kB            72,008
    """
    _facts.check_buffer(buffer)
    if backend is not None and backend not in devices.BACKENDS:
        raise ValueError(f"backend={backend!r}: must be one of {', '.join(devices.BACKENDS)}, or None.")
    if (items is None) != isinstance(buffer, DifficultyPools | Tasks):
        raise ValueError(f"items: must be as {type(buffer).__name__}.init takes them; None if it takes none.")
    if hasattr(items, "sampler"):
        raise ValueError(f"items: got a {type(items).__name__}, expected items, as init takes them; give these.")
    kind = devices.BACKENDS[backend] if backend else devices.backend_of(getattr(buffer, "state_sharding", items))
    leaves, stored, tree, other = {}, {}, 0, 0
    with jax.default_device(kind):
        parts = _states(buffer, checks.as_spec(items))
    for prefix, state, _ in parts:
        part = getattr(state, "storage", getattr(state, "levels", ()))
        for path, leaf in jax.tree_util.tree_leaves_with_path(part, is_leaf=layouts.is_leaf):
            name = prefix + (jax.tree_util.keystr(path) or "<root>")
            leaves[name], shape = _bytes(leaf, kind), leaf.shape[getattr(state, "ring", state).size.ndim :]
            stored[name] = jax.ShapeDtypeStruct(shape, leaf.dtype)
        trees = [x for x in jax.tree.leaves(state, is_leaf=lambda x: isinstance(x, SumTree)) if isinstance(x, SumTree)]
        tree, other = tree + _bytes(trees, kind), other + _bytes(state, kind) - _bytes((part, trees), kind)
    num_devices = max(count for *_, count in parts)
    return Memory(backend=kind, num_devices=num_devices, leaves=leaves, stored=stored, tree=tree, other=other)


def _states(buffer: Any, spec: Any, prefix: str = "") -> list[tuple[str, Any, int]]:
    """Prefix of leaf names, abstract state on a device, and number of devices, for each part of a state."""
    if isinstance(buffer, Mixture):
        parts = enumerate(zip(buffer.buffers, buffer._specs(spec), strict=True))
        return [state for k, part in parts for state in _states(*part, f"buffers[{k}]")]
    if isinstance(buffer, Sharded):  # each device holds a shard
        shard = jax.eval_shape(buffer._part.init, buffer._part_spec(spec))
        shard = jax.tree.map(lambda x: jax.ShapeDtypeStruct((1, *x.shape), x.dtype), shard)
        return [(prefix, shard, buffer.mesh.size)]
    return [(prefix, jax.eval_shape(buffer.init, *([] if spec is None else [spec])), 1)]


def device_bytes(shape: tuple[int, ...], itemsize: int, backend: str) -> int:
    """Bytes of an array on a device of `backend`."""
    size = math.prod(shape)
    if backend != "tpu" or size == 0:
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


def _power(n: int) -> int:
    """The smallest power of two that is at least n, from 1."""
    return 1 << (n - 1).bit_length()


def _bytes(tree: Any, backend: str) -> int:
    """Bytes of the arrays of a pytree."""

    def array_bytes(x: Any) -> int:
        if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
            x = jax.eval_shape(jax.random.key_data, x)
        return device_bytes(x.shape, np.dtype(x.dtype).itemsize, backend)

    return sum(map(array_bytes, jax.tree.leaves(tree)))
