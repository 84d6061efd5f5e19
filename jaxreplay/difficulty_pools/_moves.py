"""Update of difficulty pools if easy or hard tasks are drawn too (`DifficultyPools.pool_weights`).

A batch of G rows makes up to two moves per row, in order: first the row's task, then the task that leaves a queue to
make room for it. A move takes one task to one pool. A task ends in the pool of its last move.
"""

import dataclasses

import jax
import jax.numpy as jnp

from jaxreplay import sum_tree
from jaxreplay._common.repeats import last_of_each
from jaxreplay._common.xla import materialize
from jaxreplay.difficulty_pools import _parking, _queues
from jaxreplay.difficulty_pools._parking import PoolsState


def move(
    state: PoolsState,
    tasks_per_env: jax.Array,
    caps: jax.Array,
    tasks: jax.Array,
    env: jax.Array,
    label: jax.Array,
    known: jax.Array,
) -> PoolsState:
    """Move tasks to the pools of their labels, in order, unless they are in a queue.

    Args:
      state: pools with easy, hard or neither as a queue; queues are within their caps.
      tasks_per_env: int32 [E].
      caps: int32 [E, 2], of easy and hard; only that of a queue matters.
      tasks: int32 [G]; a task may occur more than once.
      env: int32 [G], environments of the tasks.
      label: int32 [G], pools to move to.
      known: bool [G], True for rows that count.
    """
    num_tasks = state.pool.size
    queues, heads = state.queues, state.heads
    if not all(state.drawn):
        joining = jnp.where(known, label, 0)
        done = _parking.join_queues(state, caps, tasks, env, joining)
        leaver, written = _parking.leavers_and_slots(state, tasks_per_env, tasks, env, joining, done)
        leaver, written = materialize(leaver, written)  # read before tasks that stay are written over them
        leaver = jnp.where(done.leaves, leaver, 0)
        task, to, at = _interleave(tasks, leaver), _interleave(label, jnp.zeros_like(label)), _interleave(env, env)
        active = _interleave(known & ~done.inside, done.leaves)
        queues = queues.at[jnp.maximum(label - 1, 0), written].set(tasks, mode="drop", unique_indices=True)
        heads = (heads + done.left.reshape(-1, 2)) % jnp.maximum(tasks_per_env, 1)[:, None]
    else:
        task, to, at, active = tasks, label, env, known

    by_task, first = _queues.sort_by_item(task, num_tasks)
    earlier = _queues.last_before(active, by_task, first)
    was = jnp.where(earlier >= 0, to[earlier], state.pool[task].astype(jnp.int32))
    moves = active & (to != was)
    last = moves & last_of_each(jnp.where(moves, task, num_tasks + jnp.arange(task.size, dtype=jnp.int32)))

    num_pools = state.sizes.size
    pool = 3 * at + to
    into = ((pool[:, None] == jnp.arange(num_pools, dtype=jnp.int32)[None]) & moves[:, None]).astype(
        jnp.int32
    )  # [., 3 * E]
    number = jnp.take_along_axis(_queues.sum_before(into), pool[:, None], axis=1)[:, 0]
    entry = state.entered.reshape(-1)[pool] + number.astype(jnp.uint32)
    entries = jnp.sum(into, axis=0, dtype=jnp.int32).reshape(state.sizes.shape)
    exits = jnp.zeros_like(state.sizes).at[at, was].add(moves.astype(jnp.int32))

    moved, to, entry = materialize(jnp.where(last, task, num_tasks), to, entry)
    trees = [
        tree and sum_tree.update(tree, moved, to == number, unique_indices=True)
        for number, tree in enumerate(state.trees)
    ]
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


def _interleave(x: jax.Array, y: jax.Array) -> jax.Array:
    """x[0], y[0], x[1], y[1], ...: [2 * G]."""
    return jnp.stack([x, y], axis=1).reshape(-1)
