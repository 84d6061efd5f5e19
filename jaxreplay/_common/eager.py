"""Eager calls that move little, which a CPU runs on one thread.

XLA:CPU divides a write into a large array among threads, even of one row, and reads likewise. To hand over the work
takes longer than the work of a small batch, and much longer on a busy machine. In an outer `jit` it is the caller's to
choose, by the same options.
"""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.core
import jax.extend.core
import numpy as np

ON_ONE_THREAD = {"xla_disable_hlo_passes": "cpu-parallel-task-assigner"}  # other backends have no such pass
FEW_BYTES = 2**20
PATH_BYTES = 256  # of a tree, for an item
# Before JAX 0.8 the function was in `jax.core`.
_current_trace: Any = getattr(jax.extend.core, "get_opaque_trace_state", None) or jax.core.get_opaque_trace_state
NOT_TRACING = _current_trace(convention="flax")


def is_tracing() -> bool:
    """Whether a call now becomes a part of another program; options of its own would be an error."""
    return _current_trace(convention="flax") != NOT_TRACING


def on_one_thread(brief: Callable[..., bool], *arguments: Any) -> bool:
    """Whether a call is eager and `brief`."""
    try:
        return not is_tracing() and brief(*arguments)
    except (AttributeError, LookupError, TypeError, ValueError):
        return False  # the program tells what is wrong with its arguments


def few_rows(count: int) -> bool:
    """Whether so many paths through a tree are few."""
    return count * PATH_BYTES <= FEW_BYTES


def few_items(buffer: Any, state: Any, count: int) -> bool:
    """Whether so many stored items are few."""
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(state.storage))
    return few_rows(count) and count * buffer._item_share * size <= FEW_BYTES


def few_added(buffer: Any, state: Any, items: Any, *rest: Any) -> bool:
    """Of the arguments of `add`."""
    leaves = jax.tree.leaves(items)
    count = math.prod(leaves[0].shape[: buffer._batch_axes])
    return few_rows(count) and sum(leaf.nbytes for leaf in leaves) <= FEW_BYTES


def few_drawn(buffer: Any, state: Any, key: Any, batch_size: int, *rest: Any) -> bool:
    """Of the arguments of a draw."""
    return few_items(buffer, state, batch_size)


def few_drawn_of_all(mixture: Any, states: Any, key: Any, batch_size: int, *rest: Any) -> bool:
    """Of the arguments of a draw from several buffers."""
    return all(few_items(buffer, state, batch_size) for buffer, state in zip(mixture.buffers, states, strict=True))


def few_named(buffer: Any, state: Any, indices: Any, *rest: Any) -> bool:
    """Of the arguments of a call that reads or writes items by their handles."""
    return few_items(buffer, state, np.size(indices))


def few_told(buffer: Any, state: Any, indices: Any, td_errors: Any) -> bool:
    """Of the arguments of `update`."""
    return few_rows(np.size(indices))
