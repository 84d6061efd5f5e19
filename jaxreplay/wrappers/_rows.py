"""Rows that a thread adds: how many are items, and the devices that they are moved to.

Both are done before the lock is taken, so that a thread waits for its own arrays only.
"""

import functools
import math
from typing import Any

import jax
import jax.core
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec, Sharding

from jaxreplay._common.xla import on_host, own
from jaxreplay.buffers._shards import shards_of
from jaxreplay.transitions import TransitionBatch
from jaxreplay.transitions._batch import without_valid

FEW_BYTES = 2**20  # of a NumPy array that may be copied while the lock is held


def num_items(buffer: Any, items: Any, *masks: Any) -> int:
    """Number of rows of `items` that `add` inserts: those where all masks, and all flags `valid`, are True.

    Waits for masks that are arrays of a device. Arguments that `add` rejects count as no item.
    """
    flags = [mask for mask in masks if mask is not None]
    try:
        leaves, treedef = jax.tree.flatten(items)
        if _has_transitions(treedef):
            items, valid = without_valid(items)
            flags += valid.values()
        shape = np.shape(leaves[0])[: shards_of(buffer).whole._batch_axes]
        if not flags:
            return math.prod(shape)
        flags = [on_host(x) if isinstance(x, jax.Array) else np.asarray(x) for x in flags]
        return int(np.count_nonzero(np.logical_and.reduce([np.broadcast_to(x, shape) for x in flags])))
    except (IndexError, TypeError, ValueError):
        return 0


@functools.lru_cache(maxsize=64)
def _has_transitions(treedef: Any) -> bool:
    """True if a pytree of this structure has a `TransitionBatch`; cached, as each `add` asks."""
    try:
        tree = treedef.unflatten(range(treedef.num_leaves))
    except Exception:  # a node of the user's, that takes arrays only
        return True  # `without_valid` finds them
    leaves = jax.tree.leaves(tree, is_leaf=lambda x: isinstance(x, TransitionBatch))
    return any(isinstance(x, TransitionBatch) for x in leaves)


class Places:
    """The devices of a buffer's state, and the shardings of the arrays that its methods take."""

    def __init__(self, buffer: Any, state: Any):
        shards = shards_of(buffer)
        self._rows: NamedSharding | None = buffer.items_sharding if shards.sharding else None
        self._whole: Sharding = state.ring.size.sharding
        if self._rows is not None:
            self._whole = NamedSharding(self._rows.mesh, PartitionSpec())
        self._devices = self._whole.device_set
        self._num_shards, self._several = shards.num_shards, jax.device_count() > 1

    def move(self, arguments: Any, rows: bool = False) -> Any:
        """The same arguments on these devices, with `rows` spread over the shards; small NumPy arrays stay as they are.

        The methods copy NumPy arrays themselves, while the lock is held; a large one is copied here.
        """
        leaves, treedef = jax.tree.flatten(arguments)
        if not any(map(self._is_elsewhere, leaves)):
            return arguments
        sharding = self._sharding if rows else lambda shape: self._whole
        return treedef.unflatten(
            [jax.device_put(own(x), sharding(x.shape)) if self._is_elsewhere(x) else x for x in leaves]
        )

    def _is_elsewhere(self, x: Any) -> bool:
        if isinstance(x, np.ndarray):
            return x.nbytes > FEW_BYTES
        if not self._several or not isinstance(x, jax.Array) or isinstance(x, jax.core.Tracer):
            return False
        return x.sharding.device_set != self._devices

    def _sharding(self, shape: tuple[int, ...]) -> Sharding:
        """The sharding of rows [..., B, ...] over the shards, or a replicated one."""
        if self._rows is None:
            return self._whole
        axis = len(self._rows.spec) - 1
        return self._rows if len(shape) > axis and shape[axis] % self._num_shards == 0 else self._whole
