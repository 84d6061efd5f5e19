"""Eager calls that move little, which a CPU runs on one thread.

XLA:CPU divides a write into a large array among threads, even of one row, and reads likewise. To hand over the work
takes longer than the work of a small batch, and much longer on a busy machine. In an outer `jit` it is the caller's to
choose, by the same options.
"""

import math
from typing import Any

import jax
import jax.core
import jax.extend.core

ON_ONE_THREAD = {"xla_disable_hlo_passes": "cpu-parallel-task-assigner"}  # other backends have no such pass
FEW_BYTES = 2**20
PATH_BYTES = 256  # of a tree, for an item
# Before JAX 0.8 the function was in `jax.core`.
_current_trace: Any = getattr(jax.extend.core, "get_opaque_trace_state", None) or jax.core.get_opaque_trace_state
NOT_TRACING = _current_trace(convention="flax")


def is_tracing() -> bool:
    """Whether a call now becomes a part of another program; options of its own would be an error."""
    return _current_trace(convention="flax") != NOT_TRACING


def num_bytes(arrays: list[Any]) -> int:
    """Bytes of some arrays; to ask each for its `nbytes` takes longer."""
    num = 0
    for x in arrays:
        num += x.size * x.dtype.itemsize
    return num


def on_one_thread(config: Any, state: Any, rows: Any, moves_items: bool) -> bool:
    """Whether a call is eager and moves few bytes.

    Args:
      config: a configuration, and `state` its state. With `moves_items`, its `_item_bytes(state)` is an item's size.
      rows: their number, or arrays with that many: handles, tasks, or items that are added.
      moves_items: whether a stored item is read or written for each row, beside a path through a tree.
    """
    if is_tracing():
        return False
    try:
        if isinstance(rows, int):
            count, given = rows, 0
        else:
            leaves = jax.tree.leaves(rows)
            count, given = math.prod(leaves[0].shape[: getattr(config, "_batch_axes", 1)]), num_bytes(leaves)
        moved = count * (config._item_bytes(state) if moves_items else 0)
        return max(given, moved, count * PATH_BYTES) <= FEW_BYTES
    except (AttributeError, LookupError, TypeError, ValueError):
        return False  # the program tells what is wrong with its arguments
