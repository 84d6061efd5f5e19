"""migrate: converts the state of a buffer to another capacity, sampler or number of shards."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils

from jaxreplay import sum_tree
from jaxreplay._common import checks, layouts, ring, xla
from jaxreplay.buffers import ReplayBuffer, ReplayState, SequenceBuffer, SequenceState
from jaxreplay.buffers._chosen_sequences import ChosenSequences
from jaxreplay.buffers._episodes import EpisodeNumbers
from jaxreplay.buffers._shards import Shards, shards_of
from jaxreplay.buffers._uses import Uses
from jaxreplay.checkpoint import _leaves, _places
from jaxreplay.samplers import Moved
from jaxreplay.sum_tree._tree import of_rows

KINDS = (ReplayBuffer, SequenceBuffer)
Plan = tuple[np.ndarray, Callable[[np.ndarray], np.ndarray], dict[str, Any]]
"""The old slot of each new one (-1 for none), what moves a leaf of the storage, and fields of sequences."""


@xla.reads_state
def migrate(old_buffer: Any, state: Any, new_buffer: Any) -> Any:
    """Convert a state of `old_buffer` to a state of `new_buffer` with the same items and priorities.

    Items keep their order of age. If the new buffer is smaller, the newest items are kept. Items of a `ReplayBuffer`
    are distributed evenly over the new shards. Across old shards, items are ordered by rank from the newest; ties go to
    the lower shard as older. Streams of a `SequenceBuffer` keep their numbers, and sequences their starts.

    `alpha`, `epsilon` and `floor` are the state's if both configurations have the same, else those of the new one.
    Priorities before alpha, the largest priority and the number of updates (the argument of a beta schedule) are kept.
    Items without a priority, from `Uniform`, `Recent` or with alpha 0, or spent (`max_uses`), get the largest priority.
    Handles are new: do not update the new state with handles of the old one.

    Runs on the host, leaf by leaf. With several processes, each must call it, and each holds a copy of the leaf.

    Args:
      old_buffer: `ReplayBuffer`, `SequenceBuffer`, or `Sharded` of one.
      state: its state; unchanged and not donated.
      new_buffer: a buffer of the same kind. Of all that shapes the state, only its `capacity` or `length`, sampler,
        number of shards and devices may differ; and a `SequenceBuffer` may have `gaps` where the old one has not.

    Returns:
      a state of `new_buffer` in new arrays.

    Raises:
      ValueError: the buffers differ in anything else (the message names it), or the new sampler has a state and no
        method `migrated`.

    Examples:
      >>> new = jr.ReplayBuffer(capacity=2)
      >>> state = jr.migrate(buffer, state, new)
      >>> new.get(state, new.newest(state, 2)).tolist()  # the newest items
      [20, 30]
    """
    old, new = shards_of(old_buffer), shards_of(new_buffer)
    if type(old.whole) not in KINDS:
        rule = "must be a ReplayBuffer, a SequenceBuffer or Sharded of one"
        raise ValueError(f"old_buffer={checks.brief(old.whole)}: {rule}; migrate the buffers of a Mixture one by one.")
    if type(old.whole) is not type(new.whole):
        raise ValueError(f"new_buffer={checks.brief(new.whole)}: must be a {type(old.whole).__name__} like old_buffer.")
    old_buffer._check_state(state)
    return _migrated(old, old.stacked(state), new)


def moved(owner: _places.Owner, state: Any) -> Any:
    """The state of a buffer for a new number of shards, in this backend's layout, from one that is not yet read."""
    if type(owner.old.whole) not in KINDS:
        raise ValueError(f"{owner.old.whole!r}: was saved with another number of devices; restore it with as many.")
    stacked = state if owner.stacked else jax.tree.map(_leaves.Stored.stacked, state)
    return _migrated(owner.old, stacked, owner.new)


def _migrated(old: Shards, state: Any, new: Shards) -> Any:
    """The new state, from a stacked one; its storage is read leaf by leaf, everything else at once."""
    in_memory = layouts.plain(jax.tree.map(_on_host, dataclasses.replace(state, storage=None)))
    state = dataclasses.replace(in_memory, storage=state.storage)
    # Of the new configuration: the fields that are there, their dtypes, and static fields.
    empty = _places.empty_spec(new, state.storage, 1 + len(old.whole._storage_axes))
    plan = _plan_items if isinstance(old.whole, ReplayBuffer) else _plan_sequences
    source, move, others = plan(old, state, new, empty)
    migrated = dataclasses.replace(
        empty,
        **_migrate_sampler(old, state, new, empty, source),
        **others,
        storage=_move_all(state.storage, move, new),
        ring=_filled(empty.ring, np.sum(source >= 0, axis=1), new),
    )
    return migrated.on_this_backend()


def _filled(empty: ring.Ring, size: np.ndarray, new: Shards) -> ring.Ring:
    """Rings with `size` [num_shards] items from slot 0 on."""
    size = size.astype(np.int32)
    return dataclasses.replace(empty, inserted=new.place(size), size=new.place(size))


def _on_host(x: Any) -> np.ndarray:
    if isinstance(x, jax.Array) and not x.is_fully_addressable:
        x = multihost_utils.process_allgather(x, tiled=True)
    return np.asarray(x)


def _move(x: Any, move: Any, new: Shards) -> jax.Array:
    """A leaf of the new storage: `move`, a function of NumPy arrays, applied to an old leaf or its PRNG key data."""
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        x = x.load(None) if isinstance(x, _leaves.Stored) else x
        return jax.random.wrap_key_data(_move(jax.random.key_data(x), move, new), impl=jax.random.key_impl(x))
    return jax.block_until_ready(new.place(move(_on_host(x))))  # before the next leaf is read


def _move_all(storage: Any, move: Any, new: Shards) -> Any:
    """`_move` of all leaves of a storage, one after the other; those in the layout of a backend become plain."""

    def moved(leaf: Any) -> Any:
        plain = layouts.plain(jax.tree.map(_on_host, leaf)) if layouts.is_leaf(leaf) else leaf
        return jax.tree.map(lambda x: _move(x, move, new), plain)

    return jax.tree.map(moved, storage, is_leaf=layouts.is_leaf)


def _live(old: Shards, state: Any) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Shard, slot in the shard, and age (0 for the newest of the shard) of each live item or sequence."""
    shard, age = np.nonzero(np.arange(old.part.num_slots) < state.ring.size[:, None])
    return shard, (state.ring.inserted[shard] - 1 - age) % old.part.num_slots, age


def _deal(values: np.ndarray, shard: np.ndarray, new: Shards, fill: int) -> np.ndarray:
    """Deal `values` in order to the slots of the new shards, [new shards, slots]; empty slots get `fill`."""
    dealt = np.full((new.num_shards, new.part.num_slots), fill, np.int32)
    for k in range(new.num_shards):
        own = values[shard == k]
        dealt[k, : own.size] = own
    return dealt


def _plan_items(old: Shards, state: ReplayState, new: Shards, _: Any) -> Plan:
    """Keep the newest items, dealt to the new shards."""
    shard, slot, age = _live(old, state)
    newest = np.lexsort((shard, -age))[-new.whole.capacity :]  # oldest first
    to = new.num_shards - 1 - np.arange(newest.size)[::-1] % new.num_shards
    source = _deal((shard * old.part.capacity + slot)[newest], to, new, -1)

    def move(x: np.ndarray) -> np.ndarray:
        moved = np.take(layouts.merge_axes(x), source, axis=0, mode="clip")
        moved[source < 0] = 0
        return moved

    return source, move, {}


def _plan_sequences(old: Shards, state: SequenceState, new: Shards, empty: SequenceState) -> Plan:
    """Keep the newest rows, and the sequences that start in them, in order of their first rows.

    A ring of 8 rows has taken 10, and 4 are kept: `first_row` is 10 - 4 = 6, and the kept rows are 6, 7, 0 and 1 of the
    ring, 0 to 3 of the new one. The sequence with first row 7 now starts at (7 - 6) % 8 = 1. With 2 old shards of 3
    streams and 3 new ones of 2, stream 1 of old shard 1 is stream 4 of all, so stream 0 of new shard 2.
    """
    for name in ("num_envs", "sequence_length", "stride", "windows", "gaps", "hindsight"):
        before, after = getattr(old.whole, name), getattr(new.whole, name)
        if before != after and not (name == "gaps" and after):
            raise ValueError(f"new_buffer.{name}={after!r}: must be as in old_buffer, {before!r}.")
    places: Any = dataclasses.replace(state, storage=None, ends=None, episodes=None, sampler=None)  # of the sequences
    num_rows = min(int(places.rows.size[0]), new.whole.length)
    first_row = int(places.rows.inserted[0]) - num_rows
    old_rows = (first_row + np.arange(num_rows)) % old.whole.length

    def streams(x: np.ndarray) -> np.ndarray:
        """Regroup [old shards, streams per old shard] to [new shards, streams per new shard]."""
        return x.reshape(new.num_shards, new.part.num_envs)

    def move(x: np.ndarray) -> np.ndarray:
        kept = np.moveaxis(x[:, old_rows], 0, 1)
        kept = kept.reshape(num_rows, new.num_shards, new.part.num_envs, *x.shape[3:])
        moved = np.zeros((new.num_shards, new.whole.length, *kept.shape[2:]), x.dtype)
        moved[:, :num_rows] = np.moveaxis(kept, 1, 0)
        return moved

    shard, slot, _ = _live(old, state)
    every_slot = np.arange(old.part.num_slots, dtype=np.int32)
    starts = jax.jit(jax.vmap(lambda one: old.part._drawable.starts(old.part, one, every_slot)))(places)
    row, env = (np.asarray(x)[shard, slot] for x in starts)
    row, env = (row - first_row) % old.whole.length, shard * old.part.num_envs + env
    order = np.lexsort((env, row))
    order = order[row[order] < num_rows]
    to, env = np.divmod(env, new.part.num_envs)
    source = _deal((shard * old.part.num_slots + slot)[order], to[order], new, -1)
    ends, windows, episodes = empty.ends, empty.windows, empty.episodes
    if ends is not None:
        ends = _move(state.ends.astype(ends.dtype), move, new)
    if windows is not None:
        first = _deal((row * new.part.num_envs + env)[order], to[order], new, 0)
        # Without gaps "any" and "cut" have no break.
        so_far = np.full(old.whole.num_envs, min(places.rows.size[0], old.whole.sequence_length), np.int32)
        so_far = so_far if state.windows is None else places.windows.so_far
        windows = ChosenSequences(new.place(first), new.place(streams(so_far)))
    if episodes is not None and state.episodes is not None:
        now = new.place(streams(_on_host(state.episodes.now)))
        episodes = EpisodeNumbers(_move(state.episodes.number, move, new), now)
    rows = _filled(empty.rows, np.full(new.num_shards, num_rows), new)
    wait = new.place(np.full(new.num_shards, places.wait[0]))
    return source, move, {"ends": ends, "rows": rows, "wait": wait, "windows": windows, "episodes": episodes}


def _migrate_sampler(old: Shards, state: Any, new: Shards, empty: Any, source: np.ndarray) -> dict[str, Any]:
    """The new fields `sampler` and `uses`; `source` [new shards, slots] holds slots of the stacked old shards."""
    exists, uses = source >= 0, empty.uses
    moved = Moved(source, exists, exists)
    if old.whole.max_uses is not None:
        moved = moved._replace(was_drawable=moved.values(sum_tree.leaves(state.uses.unspent)) > 0)
    if uses is not None:
        nothing: Any = np.zeros((old.num_shards, old.part.num_slots), np.int32)
        counts = state.uses or Uses(nothing, nothing[:, 0], None)
        of_slots, unspent = exists * moved.values(counts.of_slots), None
        if new.whole.max_uses is not None:
            moved = moved._replace(drawable=exists & (of_slots < new.whole.max_uses))
            unspent = of_rows(sum_tree.init(source.shape[1]), moved.drawable.astype(np.float32))
        uses = dataclasses.replace(uses, of_slots=of_slots, late=moved.total(counts.late), unspent=unspent)
    sampler = new.part.sampler.migrated(old.part.sampler, state.sampler, moved)
    return jax.tree.map(new.place, {"sampler": sampler, "uses": uses})
