"""Update of difficulty pools: tasks move to the pools of their labels, and the oldest surplus tasks back to normal.

Pool p of environment e has number 3 * e + p here.
"""

import dataclasses

import jax
import jax.numpy as jnp

from jaxreplay import sum_tree
from jaxreplay._common.xla import materialize
from jaxreplay.difficulty_pools import _turns
from jaxreplay.difficulty_pools._state import PoolsState
from jaxreplay.difficulty_pools._turns import spread, sum_before


def move(
    state: PoolsState,
    tasks_per_env: jax.Array,
    caps: jax.Array,
    task: jax.Array,
    env: jax.Array,
    label: jax.Array,
    known: jax.Array,
) -> PoolsState:
    """Move tasks to the pools of their labels, in order, unless a queue holds them.

    Args:
      state: pools with easy, hard or neither as a queue; a queue above its cap does not grow.
      tasks_per_env: int32 [E].
      caps: int32 [E, 2], of easy and hard; only that of a queue matters.
      task: int32 [G]; a task may occur more than once.
      env: int32 [G], environments of the tasks.
      label: int32 [G], pools to move to.
      known: bool [G], True for rows that count.
    """
    sizes, entered = state.sizes.reshape(-1), state.entered.reshape(-1)
    normal, has_queues, only_queues = 3 * env, not all(state.drawn), not any(state.drawn[1:])
    start = normal + state.pool[task]
    start_number = (state.entry[task] - entered[start]).astype(jnp.int32)
    rows = _turns.sorted_rows(task, state.pool.size, normal + label, start, start_number)
    limit = jnp.maximum(jnp.pad(caps, ((0, 0), (1, 0))), state.sizes)
    limit = jnp.where(jnp.array(state.drawn), -1, limit).reshape(-1) if has_queues else None
    turns = _turns.take(rows, known & (label > 0) if only_queues else known, limit)

    was, _ = _turns.place_of(turns.last, turns.number, rows)
    was = jnp.where(limit[was] >= 0, normal, was) if has_queues else was
    moves = turns.enters & (was != rows.pool)
    into, out = spread(rows.pool, moves, sizes.size), spread(was, moves, sizes.size)
    stays, last = moves, turns.last
    if not only_queues:
        last = _turns.last_before(moves, rows)
        stays = stays.at[jnp.where(moves & (last >= 0), last, task.size)].set(False, mode="drop")
    moved, pools, queues, heads = [jnp.where(stays, task, state.pool.size)], [rows.pool], state.queues, state.heads
    if has_queues:
        joins = moves & (limit[rows.pool] >= 0)
        oldest = turns.number - limit[rows.pool]
        leaves = joins & (oldest >= -sizes[rows.pool])
        into, out = into + spread(normal, leaves, sizes.size), out + spread(rows.pool, leaves, sizes.size)
        entries = jnp.sum(into, axis=0, dtype=jnp.int32)
        starts = sum_before(entries)
        row_of = jnp.zeros(2 * task.size, jnp.int32)
        row_of = row_of.at[jnp.where(joins, starts[rows.pool] + turns.number, 2 * task.size)].set(
            jnp.arange(task.size, dtype=jnp.int32), mode="drop"
        )
        stays &= ~(joins & (entries[rows.pool] - turns.number > limit[rows.pool]))
        # A task that enters again left its queue before, at the row that joined `limit` numbers after it.
        queue, number = _turns.place_of(last, turns.number, rows)
        left_at = row_of[starts[queue] + number + limit[queue]]
        back = moves & (limit[queue] >= 0)
        freed = leaves.at[jnp.where(back, left_at, task.size)].set(False, mode="drop")
        ring = jnp.maximum(label - 1, 0)
        first = sum_before(tasks_per_env)[env]

        def slot(number):
            return first + (state.heads[env, ring] + state.sizes[env, label] + number) % tasks_per_env[env]

        leaver = jnp.where(
            oldest < 0, state.queues[ring, jnp.where(leaves, slot(oldest), 0)], task[row_of[starts[rows.pool] + oldest]]
        )
        written = jnp.where(stays & joins, slot(turns.number), state.pool.size)
        leaver, written = materialize(leaver, written)
        queues = queues.at[ring, written].set(task, mode="drop", unique_indices=True)
        left = jnp.sum(spread(rows.pool, leaves, sizes.size), axis=0, dtype=jnp.int32).reshape(state.sizes.shape)[:, 1:]
        heads = (heads + left) % jnp.maximum(tasks_per_env, 1)[:, None]
        moved = [jnp.where(stays, task, state.pool.size), jnp.where(freed, leaver, state.pool.size)]
        pools = [rows.pool, normal]
    before = sum_before(into)
    entry = jnp.concatenate([entered[p] + _turns.at_own(before, p).astype(jnp.uint32) for p in pools])
    entries = jnp.sum(into, axis=0, dtype=jnp.int32).reshape(state.sizes.shape)
    exits = jnp.sum(out, axis=0, dtype=jnp.int32).reshape(state.sizes.shape)
    moved, to = jnp.concatenate(moved), jnp.concatenate([p - normal for p in pools])
    if not only_queues:
        moved, to, entry = materialize(moved, to, entry)
    trees = [tree and sum_tree.update(tree, moved, to == p, unique_indices=True) for p, tree in enumerate(state.trees)]
    return dataclasses.replace(
        state,
        pool=state.pool.at[moved].set(to.astype(jnp.int8), mode="drop", unique_indices=True),
        entry=state.entry.at[moved].set(entry, mode="drop", unique_indices=True),
        sizes=state.sizes + entries - exits,
        entered=state.entered + entries.astype(jnp.uint32),
        normal=trees[0],
        easy=trees[1],
        hard=trees[2],
        queues=queues,
        heads=heads,
    )
