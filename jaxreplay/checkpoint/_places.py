"""Where the states of buffers are in a saved pytree, and with how many devices they were saved."""

import dataclasses
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax

from jaxreplay._common import layouts, ring
from jaxreplay.buffers._shards import Shards, part_of, shards_of, whole_of
from jaxreplay.checkpoint import _config


class Place(NamedTuple):
    """A buffer of a configuration: its field, the names on the way to it, and the buffer."""

    where: str
    names: frozenset[str]
    buffer: Any


def buffers(config: Any, where: str = "config", names: frozenset[str] = frozenset()) -> Iterator[Place]:
    """All buffers of a configuration."""
    if hasattr(whole_of(config), "_storage_axes"):
        yield Place(where, names, config)
        return
    for name, value in (_config.children(config) or {}).items():
        yield from buffers(value, f"{where}.{name}", names | {str(name)})


def shards(config: Any) -> dict[str, int]:
    """Numbers of shards of all `Sharded` buffers, by field."""
    return {x.where: found.num_shards for x in buffers(config) if (found := shards_of(x.buffer)).sharding}


class Owner(NamedTuple):
    """The buffer of a state, and its numbers of shards as saved and as given; None without `Sharded`."""

    buffer: Any
    old: int | None
    new: int | None

    @property
    def is_same(self) -> bool:
        return self.old == self.new

    @property
    def sharding(self) -> Any:
        return shards_of(self.buffer).sharding


def is_state(x: Any) -> bool:
    """True if `x` is the state of a buffer, of pools, tasks or levels."""
    return isinstance(x, layouts.BackendState)


def map_states(function: Any, owners: dict[str, Owner], tree: Any, *others: Any) -> Any:
    """`function(owner, *nodes)` applied to each state in `tree`, and to each leaf outside of states."""

    def call(path: Any, *nodes: Any) -> Any:
        return function(owners.get(jax.tree_util.keystr(path)), *nodes)

    return jax.tree_util.tree_map_with_path(call, tree, *others, is_leaf=is_state)


def owners(config: Any, tree: Any, old_counts: dict[str, int]) -> dict[str, Owner]:
    """The buffers of the states in `tree`, by path. Of several that fit, the one whose names are most like the path."""
    places, found = [*buffers(config)], {}
    for path, state in jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_state):
        keys = {str(getattr(key, "key", getattr(key, "name", getattr(key, "idx", "")))) for key in path}
        fitting = [place for place in places if is_state(state) and _fits(place.buffer, state)]
        if fitting:
            place = max(fitting, key=lambda x: len(x.names & keys))
            shards = shards_of(place.buffer)
            new = shards.num_shards if shards.sharding else None
            found[jax.tree_util.keystr(path)] = Owner(place.buffer, old_counts.get(place.where), new)
    return found


def old_shards(owner: Owner) -> Shards:
    """The buffer with its number of shards as saved, which are on no device."""
    whole, count = whole_of(owner.buffer), owner.old or 1
    return Shards(whole, part_of(whole, count), count, None)


def spec_of_old(owner: Owner, state: Any) -> Any:
    """Shapes and dtypes of the saved state that becomes `state`."""
    part, axes = old_shards(owner).part, len(whole_of(owner.buffer)._storage_axes)
    skipped, leading = axes + (owner.new is not None), (1, *[getattr(part, "num_envs", 1)] * (axes - 1))

    def item(x: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((*leading, *x.shape[skipped:]), x.dtype)

    spec = jax.eval_shape(lambda: part.init(jax.tree.map(item, layouts.stored_spec(state.storage))))
    period = ring.init(part._num_slots, owner.old or 1).period
    spec = dataclasses.replace(spec, ring=dataclasses.replace(spec.ring, period=period))
    count = () if owner.old is None else (owner.old,)
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct((*count, *x.shape), x.dtype), spec)


def _fits(buffer: Any, state: Any) -> bool:
    try:
        buffer._check_state(state)
    except ValueError:
        return False
    return True
