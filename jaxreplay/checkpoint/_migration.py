"""migrate: convert the state of a buffer to another capacity, sampler or number of shards."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils

from jaxreplay import sum_tree
from jaxreplay._common import layouts, ring
from jaxreplay._common.xla import reads_state
from jaxreplay.buffers import (
    ReplayBuffer,
    ReplayState,
    SequenceBuffer,
    SequenceState,
    _chosen_sequences,
    _later_steps,
)
from jaxreplay.buffers._shards import Shards, shards_of
from jaxreplay.samplers import Prioritized, PrioritizedState, Uniform, UniformState, UpdateCounts
from jaxreplay.samplers._prioritized import largest_leaf

KINDS = (ReplayBuffer, SequenceBuffer)


@reads_state
def migrate(old_buffer: Any, state: Any, new_buffer: Any) -> Any:
    """The live items of `state` and their priorities, as a state of `new_buffer`.

    Items keep their order of age. If the new buffer is smaller, the newest items are kept. Items of a `ReplayBuffer`
    are distributed evenly over the new shards. Across old shards, items are ordered by rank from the newest; ties go to
    the lower shard as older. Streams of a `SequenceBuffer` keep their numbers, and sequences their starts.

    Priorities before alpha, the largest priority and the number of updates (the argument of a beta schedule) are kept.
    Items without a priority, from `Uniform` or with alpha 0, get the largest priority. Handles are new: do not update
    the new state with handles of the old one.

    Runs on the host, leaf by leaf. With several processes, each must call it, and each holds a copy of the leaf.

    Args:
      old_buffer: `ReplayBuffer`, `SequenceBuffer`, or `Sharded` of one.
      state: its state; unchanged and not donated.
      new_buffer: a buffer of the same kind. Of all that shapes the state, only its `capacity` or `length`, sampler,
        number of shards and devices may differ.

    Returns:
      a state of `new_buffer` in new arrays.

    Raises:
      ValueError: the buffers differ in anything else (the message names it), or a sampler is neither `Uniform` nor
        `Prioritized`.

    Examples:
      >>> old, new = jr.ReplayBuffer(capacity=4), jr.ReplayBuffer(capacity=2, sampler=jr.Prioritized())
      >>> items = jnp.array([10, 20, 30])
      >>> state = jr.migrate(old, old.add(old.init(items), items), new)
      >>> new.get(state, new.newest(state, 2)).tolist()  # the newest; there is no room for all
      [20, 30]
    """
    old, new = shards_of(old_buffer), shards_of(new_buffer)
    for whole, name in ((old.whole, "old_buffer"), (new.whole, "new_buffer")):
        if type(whole) not in KINDS:
            raise ValueError(
                f"{name}={whole!r}: must be a ReplayBuffer, a SequenceBuffer or Sharded of one; migrate the "
                "buffers of a Mixture one by one."
            )
        if type(whole.sampler) not in (Uniform, Prioritized):
            raise ValueError(f"{name}.sampler={whole.sampler!r}: must be Uniform or Prioritized.")
    if type(old.whole) is not type(new.whole):
        raise ValueError(f"new_buffer={new.whole!r}: must be a {type(old.whole).__name__} like old_buffer.")
    old_buffer._check_state(state)
    migrate_kind = _migrate_items if isinstance(old.whole, ReplayBuffer) else _migrate_sequences
    return migrate_kind(old, old.stacked(state), new).on_this_backend()


def _ring(new: Shards, size: np.ndarray, slots: int, num_rings: int) -> ring.Ring:
    """Rings of `slots` slots with `size` [num_shards] items from slot 0 on."""
    size = size.astype(np.int32)
    return ring.Ring(new.place(size), new.place(size), ring.init(slots, num_rings).period)


def _on_host(x: jax.Array) -> np.ndarray:
    if not x.is_fully_addressable:
        x = multihost_utils.process_allgather(x, tiled=True)
    return np.asarray(x)


def _move(x: jax.Array, move: Any, new: Shards) -> jax.Array:
    """A leaf of the new storage: `move`, a function of NumPy arrays, applied to an old leaf or its PRNG key data."""
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        moved = _move(jax.random.key_data(x), move, new)
        return jax.random.wrap_key_data(moved, impl=jax.random.key_impl(x))
    return new.place(move(_on_host(x)))


def _migrate_items(old: Shards, state: ReplayState, new: Shards) -> ReplayState:
    size, inserted = _on_host(state.ring.size), _on_host(state.ring.inserted)
    # Slots of all items in the stacked old shards, newest first.
    capacity = old.part.capacity
    age, shard = np.divmod(np.arange(old.whole.capacity), old.num_shards)
    shard = old.num_shards - 1 - shard
    live = age < size[shard]
    newest_first = (shard * capacity + (inserted[shard] % capacity - 1 - age) % capacity)[live]
    newest_first = newest_first[: new.whole.capacity]
    # Source slot of each slot of the new shards.
    shard = np.arange(new.num_shards)[:, None]
    new_size = (len(newest_first) + shard) // new.num_shards
    age = new_size - 1 - np.arange(new.part.capacity)
    filled = age >= 0
    rank = np.where(filled, age * new.num_shards + new.num_shards - 1 - shard, 0)
    source = np.where(filled, newest_first[rank] if len(newest_first) else 0, -1)

    def move(x: np.ndarray) -> np.ndarray:
        moved = np.zeros((*source.shape, *x.shape[2:]), x.dtype)
        moved[filled] = layouts.merge_axes(x)[source[filled]]
        return moved

    return ReplayState(
        storage=jax.tree.map(lambda x: _move(x, move, new), layouts.as_it_is(state.storage)),
        ring=_ring(new, new_size[:, 0], new.part.capacity, new.num_shards),
        sampler=_migrate_sampler(old, state.sampler, new, source),
    )


def _migrate_sequences(old: Shards, state: SequenceState, new: Shards) -> SequenceState:
    for name in ("num_envs", "sequence_length", "stride", "windows", "gaps", "hindsight"):
        if getattr(old.whole, name) != getattr(new.whole, name):
            raise ValueError(
                f"new_buffer.{name}={getattr(new.whole, name)!r}: must be as in old_buffer, "
                f"{getattr(old.whole, name)!r}."
            )
    rows, sequences, wait = (int(_on_host(x)[0]) for x in (state.rows.inserted, state.ring.inserted, state.wait))
    num_rows = min(int(_on_host(state.rows.size)[0]), new.whole.length)
    old_rows = (rows - num_rows + np.arange(num_rows)) % old.whole.length

    def deal(x: np.ndarray, axis: int) -> np.ndarray:
        """Regroup [old shards, n, streams per old shard, ...] to [new shards, n, streams per new shard, ...]."""
        x = np.moveaxis(x, 0, axis)
        x = x.reshape(x.shape[0], new.num_shards, new.part.num_envs, *x.shape[3:])
        return np.moveaxis(x, 1, 0)

    def move(x: np.ndarray) -> np.ndarray:
        kept = deal(x[:, old_rows], 1)
        moved = np.zeros((new.num_shards, new.whole.length, *kept.shape[2:]), x.dtype)
        moved[:, :num_rows] = kept
        return moved

    num_starts = (num_rows + wait - new.whole.sequence_length) // new.whole.stride
    source = np.full((new.num_shards, new.part._num_starts, new.part.num_envs), -1)
    source[:, :num_starts] = deal(_newest_slots(old, sequences, num_starts), 1)
    source, size = source.reshape(new.num_shards, -1), np.full(new.num_shards, num_starts * new.part.num_envs)
    windows = None
    if state.windows is not None:
        source, size, windows = _migrate_windows(old, state, new, rows - num_rows, num_rows)

    def every(value: int) -> np.ndarray:
        return np.full(new.num_shards, value, np.int32)

    storage, ends, old_episodes = layouts.as_it_is((state.storage, state.ends, state.episodes))
    episodes = None
    if old_episodes is not None:
        now = _on_host(old_episodes.now).reshape(new.num_shards, new.part.num_envs)
        episodes = _later_steps.EpisodeNumbers(_move(old_episodes.number, move, new), new.place(now))
    return SequenceState(
        storage=jax.tree.map(lambda x: _move(x, move, new), storage),
        ends=None if ends is None else _move(ends, move, new),
        rows=_ring(new, every(num_rows), new.whole.length, 1),
        wait=new.place(every(wait)),
        ring=_ring(new, size, new.part._num_slots, new.num_shards),
        sampler=_migrate_sampler(old, state.sampler, new, source),
        windows=windows,
        episodes=episodes,
    )


def _newest_slots(old: Shards, inserted: int, num_starts: int) -> np.ndarray:
    """Slots of the newest sequences in the stacked old shards, oldest first, [old shards, num_starts, streams]."""
    start = (inserted // old.part.num_envs - num_starts + np.arange(num_starts)) % old.part._num_starts
    shard = np.arange(old.num_shards)[:, None, None]
    return shard * old.part._num_slots + start[:, None] * old.part.num_envs + np.arange(old.part.num_envs)


def _migrate_windows(
    old: Shards, state: SequenceState, new: Shards, first_row: int, num_rows: int
) -> tuple[np.ndarray, np.ndarray, _chosen_sequences.ChosenSequences]:
    """Slots of the windows in the stacked old shards, [new shards, slots]; their number; and their new positions.

    `num_rows` rows from `first_row` on, modulo the old length, are kept and moved to row 0.
    """
    assert state.windows is not None
    num_slots, num_envs = old.part._num_slots, old.part.num_envs
    size, inserted = _on_host(state.ring.size)[:, None], _on_host(state.ring.inserted)[:, None]
    position = np.arange(num_slots)
    slot = (inserted - size + position) % num_slots
    first = np.take_along_axis(_on_host(layouts.as_it_is(state.windows.first)), slot, axis=1)
    shard = np.arange(old.num_shards)[:, None]
    row, env = (first // num_envs - first_row) % old.whole.length, first % num_envs + shard * num_envs
    kept = (position < size) & (row < num_rows)
    slot, row, env = ((x + shard * 0)[kept] for x in (slot + shard * num_slots, row, env))
    in_order = np.lexsort((env, row))

    source = np.full((new.num_shards, new.part._num_slots), -1)
    moved, count = np.zeros(source.shape, np.int32), np.zeros(new.num_shards, np.int32)
    for k in range(new.num_shards):
        its = in_order[env[in_order] // new.part.num_envs == k]
        count[k] = its.size
        source[k, : its.size] = slot[its]
        moved[k, : its.size] = row[its] * new.part.num_envs + env[its] % new.part.num_envs
    so_far = _on_host(state.windows.so_far).reshape(new.num_shards, new.part.num_envs)
    return source, count, _chosen_sequences.ChosenSequences(new.place(moved), new.place(so_far))


def _migrate_sampler(old: Shards, state: Any, new: Shards, source: np.ndarray) -> Any:
    """State of the new sampler; `source` [new shards, slots] holds slots of the stacked old shards, -1 for none."""
    sampler, old_sampler = new.whole.sampler, old.whole.sampler
    capacity = new.part._num_slots
    counts = _migrate_counts(state.counts, new, source) if sampler.count_updates else None
    if isinstance(sampler, Uniform):
        return UniformState(capacity, counts)
    max_priority, updates, rejected = 1.0, 0, 0
    if isinstance(old_sampler, Prioritized):
        max_priority = float(_on_host(state.max_priority).max())
        updates = int(_on_host(state.updates).max())
        rejected = min(int(_on_host(state.rejected).sum(dtype=np.int64)), 2**31 - 1)
    if isinstance(old_sampler, Prioritized) and old_sampler.alpha > 0:
        leaves = _on_host(sum_tree.leaves(state.tree)).reshape(-1)[source]
        if old_sampler.alpha != sampler.alpha:
            priorities = leaves.astype(np.float64) ** (1 / old_sampler.alpha)
            leaves = sampler._leaf(jnp.asarray(priorities, jnp.float32), capacity)
        leaves = np.minimum(leaves, largest_leaf(capacity))
    else:
        leaves = sampler._leaf(jnp.full((), max_priority, jnp.float32), capacity)
    leaves = np.where(source >= 0, leaves, 0.0)

    def tree(leaves: np.ndarray) -> sum_tree.SumTree:
        return sum_tree.update(sampler.tree(capacity), np.arange(capacity), leaves, unique_indices=True)

    def every(value: Any, dtype: Any) -> jax.Array:
        return new.place(np.full(new.num_shards, value, dtype))

    trees = [tree(shard) for shard in leaves]
    counted_once = np.where(np.arange(new.num_shards) == 0, rejected, 0).astype(np.int32)
    return PrioritizedState(
        tree=jax.tree.map(lambda *x: new.place(np.stack(x)), *trees),
        max_priority=every(max_priority, np.float32),
        updates=every(updates, np.int32),
        rejected=new.place(counted_once),
        counts=counts,
    )


def _migrate_counts(counts: UpdateCounts | None, new: Shards, source: np.ndarray) -> UpdateCounts:
    """Counts of the kept items, 0 if nothing was counted; `source` as in `_migrate_sampler`."""
    of_slots, late = np.zeros(source.shape, np.int32), 0
    if counts is not None:
        of_slots = np.where(source >= 0, _on_host(counts.of_slots).reshape(-1)[source], 0).astype(np.int32)
        late = min(int(_on_host(counts.late).sum(dtype=np.int64)), 2**31 - 1)
    counted_once = np.where(np.arange(new.num_shards) == 0, late, 0).astype(np.int32)
    return UpdateCounts(new.place(of_slots), new.place(counted_once))
