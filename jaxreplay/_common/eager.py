"""Small eager calls, which run on one CPU thread.

XLA:CPU splits reads and writes of a large array among threads, even for a single row. For a small batch the handoff
takes longer than the work itself, and much longer on a busy machine. In an outer `jit` the caller can set the same
options.
"""

import functools
import math
from typing import Any

import jax
import jax.core
import jax.extend.core

from jaxreplay._common.devices import backend_of

ON_ONE_THREAD = {"xla_disable_hlo_passes": "cpu-parallel-task-assigner"}  # other backends have no such pass
FEW_BYTES = 2**20
PATH_BYTES = 256  # moved along one tree path, for one item
# In `jax.core` before JAX 0.8.
_current_trace: Any = getattr(jax.extend.core, "get_opaque_trace_state", None) or jax.core.get_opaque_trace_state
NOT_TRACING = _current_trace(convention="flax")


def is_tracing() -> bool:
    """True during tracing of an outer program. A traced call must not have compiler options."""
    return _current_trace(convention="flax") != NOT_TRACING


@functools.cache
def _has_accelerators() -> bool:
    return jax.default_backend() != "cpu"


def _on_cpu(state: Any) -> bool:
    """True if a CPU holds the state; `ring` is a part of most states that has few leaves."""
    return not _has_accelerators() or backend_of(getattr(state, "ring", state)) == "cpu"


def num_bytes(arrays: list[Any]) -> int:
    """Total bytes of `arrays`; faster than the sum of their `nbytes`."""
    num = 0
    for x in arrays:
        num += x.size * x.dtype.itemsize
    return num


def on_one_thread(config: Any, state: Any, rows: Any, moves_items: bool) -> bool:
    """True if a call is eager and moves at most FEW_BYTES.

    Args:
      config: the configuration of the called method.
      state: its state.
      rows: number of rows, or arrays with one entry per row: handles, tasks or added items.
      moves_items: True if each row also reads or writes a stored item of `config._item_bytes(state)` bytes, besides a
        tree path.
    """
    if not _on_cpu(state) or is_tracing():
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
        return False  # the program itself reports invalid arguments
