"""Update of difficulty pools: tasks move to the pools of their labels, and the oldest surplus tasks back to normal.

Pool p of environment e has number 3 * e + p here.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxreplay import sum_tree
from jaxreplay._common.xla import materialize
from jaxreplay.curricula import _pool_turns as _turns
from jaxreplay.curricula._pool_state import PoolsState
from jaxreplay.curricula._pool_turns import Rows, Turns, spread, sum_before


class Moves(NamedTuple):
    """Moves of G rows between P pools, in order.

    Attributes:
      rows: the rows.
      number: int32 [G], number of the row's task in the row's pool.
      moves: bool [G], True if the row's task moves to the row's pool.
      last: int32 [G], the last earlier row that moves the same task; -1 for none.
      joins: bool [G], True if that pool is a queue.
      leaves: bool [G], True if the oldest member of this queue then moves to normal.
      into: int32 [G, P], entries into each pool at each row.
      out: int32 [G, P], exits from each pool at each row.
    """

    rows: Rows
    number: jax.Array
    moves: jax.Array
    last: jax.Array
    joins: jax.Array
    leaves: jax.Array
    into: jax.Array
    out: jax.Array


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
    normal, num_tasks = 3 * env, state.pool.size
    start = normal + state.pool[task].astype(jnp.int32)
    start_number = (state.entry[task] - state.entered.reshape(-1)[start]).astype(jnp.int32)
    rows = _turns.sorted_rows(task, num_tasks, normal + label, start, start_number)
    limit = _limits(state, caps)
    turns = _turns.take(rows, known if _leaves_pools(state) else known & (label > 0), limit)
    moves = _moves(state, rows, turns, normal, limit)
    stays = moves.moves
    if _leaves_pools(state):
        stays = stays.at[jnp.where(stays & (moves.last >= 0), moves.last, task.size)].set(False, mode="drop")
    if limit is None:
        return _write(state, moves, normal, [jnp.where(stays, task, num_tasks)], [rows.pool])
    row_of = _joining_rows(moves)
    stays, freed = _stay(moves, limit, stays, row_of)
    leaver, queues, heads = _rings(state, tasks_per_env, moves, limit, env, label, stays, row_of)
    moved = [jnp.where(stays, task, num_tasks), jnp.where(freed, leaver, num_tasks)]
    return dataclasses.replace(_write(state, moves, normal, moved, [rows.pool, normal]), queues=queues, heads=heads)


def _leaves_pools(state: PoolsState) -> bool:
    """True if a row can move a task out of easy or hard, since tasks are drawn from there."""
    return any(state.drawn[1:])


def _limits(state: PoolsState, caps: jax.Array) -> jax.Array | None:
    """Limits of all pools, as `_turns.take` expects them."""
    if all(state.drawn):
        return None
    limit = jnp.maximum(jnp.pad(caps, ((0, 0), (1, 0))), state.sizes)
    return jnp.where(jnp.array(state.drawn), -1, limit).reshape(-1)


def _moves(state: PoolsState, rows: Rows, turns: Turns, normal: jax.Array, limit: jax.Array | None) -> Moves:
    """Moves at these turns; normal: int32 [G], number of the normal pool of each row."""
    sizes = state.sizes.reshape(-1)
    was, _ = _turns.place_of(turns.last, turns.number, rows)
    was = was if limit is None else jnp.where(limit[was] >= 0, normal, was)
    moves = turns.enters & (was != rows.pool)
    last = _turns.last_before(moves, rows) if _leaves_pools(state) else turns.last
    joins = leaves = jnp.zeros_like(moves)
    into, out = spread(rows.pool, moves, sizes.size), spread(was, moves, sizes.size)
    if limit is not None:
        joins = moves & (limit[rows.pool] >= 0)
        leaves = joins & (turns.number - limit[rows.pool] >= -sizes[rows.pool])
        into, out = into + spread(normal, leaves, sizes.size), out + spread(rows.pool, leaves, sizes.size)
    return Moves(rows, turns.number, moves, last, joins, leaves, into, out)


def _joining_rows(moves: Moves) -> Callable[[jax.Array, jax.Array], jax.Array]:
    """A function of queue and number, int32 [G] each: the row that joined so, or any row if none did."""
    rows, num_rows = moves.rows, moves.moves.size
    starts = sum_before(jnp.sum(moves.into, axis=0, dtype=jnp.int32))
    place = jnp.where(moves.joins, starts[rows.pool] + moves.number, 2 * num_rows)
    row_of = jnp.zeros(2 * num_rows, jnp.int32).at[place].set(jnp.arange(num_rows, dtype=jnp.int32), mode="drop")
    return lambda queue, number: row_of[starts[queue] + number]


def _stay(
    moves: Moves, limit: jax.Array, stays: jax.Array, row_of: Callable[[jax.Array, jax.Array], jax.Array]
) -> tuple[jax.Array, jax.Array]:
    """Rows that move their task last, of `stays`; and rows at which a member leaves to stay in normal; bool [G]."""
    rows = moves.rows
    entries = jnp.sum(moves.into, axis=0, dtype=jnp.int32)
    stays &= ~(moves.joins & (entries[rows.pool] - moves.number > limit[rows.pool]))
    # A task that enters again left its queue before, at the row that joined `limit` numbers after it.
    queue, number = _turns.place_of(moves.last, moves.number, rows)
    back = moves.moves & (limit[queue] >= 0)
    left_at = jnp.where(back, row_of(queue, number + limit[queue]), moves.moves.size)
    return stays, moves.leaves.at[left_at].set(False, mode="drop")


def _rings(
    state: PoolsState,
    tasks_per_env: jax.Array,
    moves: Moves,
    limit: jax.Array,
    env: jax.Array,
    label: jax.Array,
    stays: jax.Array,
    row_of: Callable[[jax.Array, jax.Array], jax.Array],
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The task that leaves a queue at each row, int32 [G]; and the rings and their heads after all rows."""
    rows, leaves, pool_sizes = moves.rows, moves.leaves, state.sizes
    ring, oldest = jnp.maximum(label - 1, 0), moves.number - limit[rows.pool]
    first = sum_before(tasks_per_env)[env]

    def slot(number: jax.Array) -> jax.Array:
        return first + (state.heads[env, ring] + pool_sizes[env, label] + number) % tasks_per_env[env]

    there = state.queues[ring, jnp.where(leaves, slot(oldest), 0)]
    leaver = jnp.where(oldest < 0, there, rows.task[row_of(rows.pool, oldest)])
    written = jnp.where(stays & moves.joins, slot(moves.number), state.pool.size)
    leaver, written = materialize(leaver, written)
    queues = state.queues.at[ring, written].set(rows.task, mode="drop", unique_indices=True)
    left = jnp.sum(spread(rows.pool, leaves, pool_sizes.size), axis=0, dtype=jnp.int32).reshape(pool_sizes.shape)[:, 1:]
    return leaver, queues, (state.heads + left) % jnp.maximum(tasks_per_env, 1)[:, None]


def _write(
    state: PoolsState, moves: Moves, normal: jax.Array, tasks: Sequence[jax.Array], pools: Sequence[jax.Array]
) -> PoolsState:
    """Write where tasks are after all rows, and count entries and exits; not the queues.

    Args:
      state: the pools before.
      moves: the moves.
      normal: int32 [G], number of the normal pool of each row.
      tasks: int32 [G] each, tasks to write; the number of tasks for none.
      pools: int32 [G] each, their pools.
    """
    entered, before = state.entered.reshape(-1), sum_before(moves.into)
    entry = jnp.concatenate([entered[p] + _turns.at_own(before, p).astype(jnp.uint32) for p in pools])
    entries = jnp.sum(moves.into, axis=0, dtype=jnp.int32).reshape(state.sizes.shape)
    exits = jnp.sum(moves.out, axis=0, dtype=jnp.int32).reshape(state.sizes.shape)
    task, to = jnp.concatenate(tasks), jnp.concatenate([p - normal for p in pools])
    if _leaves_pools(state):
        task, to, entry = materialize(task, to, entry)
    trees = [tree and sum_tree.update(tree, task, to == p, unique_indices=True) for p, tree in enumerate(state.trees)]
    return dataclasses.replace(
        state,
        pool=state.pool.at[task].set(to.astype(jnp.int8), mode="drop", unique_indices=True),
        entry=state.entry.at[task].set(entry, mode="drop", unique_indices=True),
        sizes=state.sizes + entries - exits,
        entered=state.entered + entries.astype(jnp.uint32),
        normal=trees[0],
        easy=trees[1],
        hard=trees[2],
    )
