"""Places of buffer states in a saved pytree, and the number of shards they were saved with."""

import math
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxreplay._common import layouts
from jaxreplay.buffers._shards import Shards, part_of, shards_of, whole_of
from jaxreplay.checkpoint import _config


def buffers(config: Any, where: str = "config") -> Iterator[tuple[str, Any]]:
    """All buffers of a configuration, with the names of their fields."""
    if hasattr(whole_of(config), "_storage_axes"):
        yield where, config
        return
    for name, value in (_config.children(config) or {}).items():
        yield from buffers(value, where + name)


def shards(config: Any) -> dict[str, int]:
    """Numbers of shards of all `Sharded` buffers, by field."""
    return {where: found.num_shards for where, x in buffers(config) if (found := shards_of(x)).sharding}


class Owner(NamedTuple):
    """The buffer of a state as shards.

    Attributes:
      old: the shards as saved, which are on no device.
      new: the shards as given.
      stacked: axes [D] of the saved leaves; () without `Sharded`.
      is_same: True if the given leaves have the same.
    """

    old: Shards
    new: Shards
    stacked: tuple[int, ...]
    is_same: bool


def is_state(x: Any) -> bool:
    """True if `x` is the state of a buffer, of pools, tasks or levels."""
    return isinstance(x, layouts.BackendState)


def owners(config: Any, tree: Any, old_counts: dict[str, int]) -> dict[str, Owner]:
    """The buffers of the states in `tree`, by path. Of several that fit, the one whose names are most like the path.

    A state at "['actor']['replay']" fits buffers at "config['actor']['replay']" and "config['critic']['replay']". The
    names of the first share two words with the path, those of the second one. Of equally many the first counts.
    """
    every, found = [*buffers(config)], {}
    for path, state in jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_state):
        name = jax.tree_util.keystr(path)
        words = {*re.findall(r"\w+", name)}
        fitting = [x for x in every if is_state(state) and _fits(x[1], state)]
        if fitting:
            where, buffer = max(fitting, key=lambda x: len(words & {*re.findall(r"\w+", x[0])}))
            new, stacked = shards_of(buffer), (old_counts[where],) if where in old_counts else ()
            count = math.prod(stacked)
            old = Shards(new.whole, part_of(new.whole, count), count, None)
            found[name] = Owner(old, new, stacked, stacked == ((new.num_shards,) if new.sharding else ()))
    return found


def empty_spec(shards: Shards, storage: Any, num_axes: int) -> Any:
    """Shapes and dtypes of a shard's state without items, for items as in a storage with `num_axes` leading axes."""
    items = shards_of(shards.part).smallest_batch(layouts.stored_spec(storage), num_axes)
    return jax.eval_shape(lambda: shards.part.init(items))


def spec_of_old(owner: Owner, state: Any) -> Any:
    """Shapes and dtypes of the saved state that becomes `state`."""
    num_axes = len(owner.old.part._storage_axes) + (owner.new.sharding is not None)
    spec = empty_spec(owner.old, state.storage, num_axes)
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct((*owner.stacked, *x.shape), x.dtype), spec)


def check_state(config: Any, state: Any) -> None:
    """Raise a `ValueError` if `state` is of another buffer than `config`; a stack of its states passes."""
    if not is_state(state) or not hasattr(whole_of(config), "_storage_axes"):
        return
    check, axes = config._check_state, np.ndim(state.ring.size) if hasattr(state, "ring") else 0
    for _ in range(axes - (shards_of(config).sharding is not None)):
        check = jax.vmap(check)
    jax.eval_shape(check, state)


def _fits(buffer: Any, state: Any) -> bool:
    try:
        buffer._check_state(state)
    except ValueError:
        return False
    return True
