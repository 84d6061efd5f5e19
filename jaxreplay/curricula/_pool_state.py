"""State of `DifficultyPools`: the pool of each task, and the order of entry.

Tasks in normal are leaves of value 1 in a sum tree, which finds the task of a given rank in O(log N). Easy and hard are
first-in, first-out queues in ring buffers. `arrange` builds a state.

`move` moves a batch of tasks at once, with the result of one move after the other. The rows of the batch come in order.
Easy and hard are queues with a limit. The task of a row enters the row's queue, unless a queue holds the task. If this
queue is then longer than its limit, its oldest member leaves, to the end of normal. Entries into a pool are numbered 0,
1, 2, ... in the batch. Members at the start have numbers below 0, the newest -1. So number m leaves a queue when number
m + limit enters. Pool p of environment e has number 3 * e + p there.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import struct

from jaxreplay import sum_tree
from jaxreplay._common import layouts, xla
from jaxreplay.sum_tree._tree import on_backend


@struct.dataclass
class PoolsState(layouts.BackendState):
    """State of `jaxreplay.DifficultyPools`, N tasks in E environments.

    Attributes:
      pool: int8 [N], each task's pool: 0 normal, 1 easy, 2 hard.
      entry: uint32 [N], number of tasks that entered the task's pool before it, modulo 2^32.
      normal: a leaf per task, 1 if it is in normal.
      queues: int32 [2, N], tasks in easy and in hard; each environment has a ring in the range of its task numbers.
      heads: int32 [E, 2], slots of the oldest members in these rings.
      sizes: int32 [E, 3], number of tasks in each pool.
      entered: uint32 [E, 3], number of entries into each pool so far, modulo 2^32.
      groups: int32 [E, 3], number of groups by label since the metrics were reset; saturates at 2**31 - 1.
      rollouts: int32 [E, 3], number of rollouts since then: 0 kept, 1 filtered as too easy, 2 as too hard; saturates
        at 2**31 - 1.
      rejected: int32 [], number of groups with a task that does not exist or a mean reward that is not finite;
        saturates at 2**31 - 1.

    Examples:
      >>> state = pools.init()
      >>> isinstance(state, jr.curricula.PoolsState), state.sizes.tolist()
      (True, [[4, 0, 0]])
    """

    pool: jax.Array  # [N]
    entry: jax.Array  # [N]
    normal: sum_tree.SumTree
    queues: jax.Array  # [2, N]
    heads: jax.Array  # [E, 2]
    sizes: jax.Array  # [E, 3]
    entered: jax.Array  # [E, 3]
    groups: jax.Array  # [E, 3]
    rollouts: jax.Array  # [E, 3]
    rejected: jax.Array  # []
    _layouts: ClassVar = {"normal": on_backend}


def env_of(tasks: jax.Array, tasks_per_env: jax.Array) -> jax.Array:
    """Environment of each of `tasks` (int32 [G]), int32 [G]."""
    ends = jnp.cumsum(tasks_per_env, dtype=jnp.int32)[:-1]
    return jnp.searchsorted(ends, tasks, side="right", method="compare_all").astype(jnp.int32)


def sum_before(x: jax.Array) -> jax.Array:
    """Exclusive cumulative sum of x (int32 [G, ...]) over its rows."""
    return jnp.cumsum(x, axis=0, dtype=jnp.int32) - x


def ranks(group: jax.Array, num_groups: int, *keys: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Rank of each row in its group, sorted by `keys`, then by row; and the size of each group.

    `group` and the ranks are int32 [N], the keys integers [N], the sizes int32 [num_groups].
    """
    rows = jnp.arange(group.size, dtype=jnp.int32)
    sizes = jnp.zeros(num_groups, jnp.int32).at[group].add(1)
    group, *_, row = jax.lax.sort((group, *keys, rows), num_keys=1 + len(keys))
    return jnp.zeros_like(rows).at[row].set(rows - sum_before(sizes)[group], unique_indices=True), sizes.reshape(-1, 3)


def pools_of(state: PoolsState) -> tuple[jax.Array, jax.Array]:
    """Environment and pool of each task, int32 [N] each."""
    env = env_of(jnp.arange(state.pool.size, dtype=jnp.int32), jnp.sum(state.sizes, axis=1, dtype=jnp.int32))
    return env, state.pool.astype(jnp.int32)


def order(state: PoolsState) -> jax.Array:
    """Rank of each task in its pool by order of entry, int32 [N]."""
    env, pool = pools_of(state)
    # Entries minus all entries so far are negative; as uint32 the oldest is the smallest, even after an overflow.
    return ranks(3 * env + pool, state.sizes.size, state.entry - state.entered[env, pool])[0]


def arrange(
    tasks_per_env: jax.Array, caps: jax.Array, pool: jax.Array, keys: Sequence[jax.Array], fanout: int | None = None
) -> PoolsState:
    """Build a state with all counts 0 and every pool within its cap; the oldest surplus tasks go to the end of normal.

    Args:
      tasks_per_env: int32 [E].
      caps: int32 [E, 2], of easy and hard.
      pool: int32 [N], each task's pool.
      keys: int [N] each; tasks enter their pool sorted by these keys.
      fanout: fan-out of the tree; None for the best where the state is made.
    """
    num_tasks, num_envs = pool.size, tasks_per_env.size
    tasks = jnp.arange(num_tasks, dtype=jnp.int32)
    env = env_of(tasks, tasks_per_env)
    rank, sizes = ranks(3 * env + pool, 3 * num_envs, *keys)
    surplus = sizes[:, 1:] - caps
    returns = (pool > 0) & (rank < surplus[env, pool - 1])
    pool, late = jnp.where(returns, 0, pool), jnp.where(returns, pool, 0)
    rank, sizes = ranks(3 * env + pool, 3 * num_envs, late, *keys)
    ring = jnp.where(pool > 0, pool - 1, 2)  # 2 is out of range: normal has no ring
    place = rank + sum_before(tasks_per_env)[env]
    return PoolsState(
        pool=pool.astype(jnp.int8),
        entry=rank.astype(jnp.uint32),
        normal=sum_tree.of_leaves(jnp.pad(pool == 0, (0, num_tasks == 0)), fanout=fanout),
        queues=jnp.zeros((2, num_tasks), jnp.int32).at[ring, place].set(tasks, mode="drop"),
        heads=jnp.zeros((num_envs, 2), jnp.int32),
        sizes=sizes,
        entered=sizes.astype(jnp.uint32),
        groups=jnp.zeros_like(sizes),
        rollouts=jnp.zeros_like(sizes),
        rejected=jnp.zeros((), jnp.int32),
    )


def move(
    state: PoolsState, tasks_per_env: Any, caps: Any, task: jax.Array, env: jax.Array, label: jax.Array, known: Any
) -> PoolsState:
    """Move tasks to the pools of their labels, in order, unless a queue holds them.

    A member has a number in its queue, a row in the batch if it joined there, and a slot in its ring. Queues with 2 and
    3 entries have `starts` 0 and 2, so number 1 of the second is `joined_at[3]`, its row. A number below 0 joined
    before the batch: with a head of 4 and 2 members, numbers -2 and -1 are in slots 4 and 5, and number 0 goes to 6.

    Args:
      state: the pools; a queue above its cap does not grow.
      tasks_per_env: int32 [E].
      caps: int32 [E, 2], of easy and hard.
      task: int32 [G]; a task may occur more than once.
      env: int32 [G], environments of the tasks.
      label: int32 [G], pools to move to.
      known: bool [G], True for rows that count.
    """
    num_rows, num_tasks, num_pools = task.size, state.pool.size, state.sizes.size
    normal, pool = 3 * env, 3 * env + label
    start = normal + state.pool[task].astype(jnp.int32)
    start_number = (state.entry[task] - state.entered.reshape(-1)[start]).astype(jnp.int32)
    limit = jnp.pad(jnp.maximum(caps, state.sizes[:, 1:]), ((0, 0), (1, 0)), constant_values=-1).reshape(-1)
    by_task = _by_task(task, num_tasks)
    enters, number, queue, its_number = _entries(pool, start, start_number, *by_task, known & (label > 0), limit)
    oldest = number - limit[pool]  # number of the member that leaves the row's queue, if one leaves
    leaves = enters & (oldest >= -state.sizes.reshape(-1)[pool])
    into = spread(pool, enters, num_pools) + spread(normal, leaves, num_pools)
    out = spread(normal, enters, num_pools) + spread(pool, leaves, num_pools)
    joined, left = (jnp.sum(x, axis=0, dtype=jnp.int32) for x in (into, out))

    starts = sum_before(joined)
    place = jnp.where(enters, starts[pool] + number, 2 * num_rows)
    joined_at = jnp.zeros(2 * num_rows, jnp.int32).at[place].set(jnp.arange(num_rows, dtype=jnp.int32), mode="drop")

    def row_of(queue: jax.Array, number: jax.Array) -> jax.Array:  # that joined so; any row if none did
        return joined_at[starts[queue] + number]

    def slot(number: jax.Array) -> jax.Array:
        return first + (state.heads[env, ring] + state.sizes[env, label] + number) % tasks_per_env[env]

    stays = enters & (joined[pool] - number <= limit[pool])
    # A task that enters again left its queue before, at the row that joined `limit` numbers after it.
    back = enters & (limit[queue] >= 0)
    freed = leaves.at[jnp.where(back, row_of(queue, its_number + limit[queue]), num_rows)].set(False, mode="drop")
    ring, first = jnp.maximum(label - 1, 0), sum_before(tasks_per_env)[env]
    leaver = jnp.where(oldest < 0, state.queues[ring, jnp.where(leaves, slot(oldest), 0)], task[row_of(pool, oldest)])
    written = jnp.where(stays, slot(number), num_tasks)
    leaver, written = xla.materialize(leaver, written)

    # All tasks that have moved in the end, each once: they are in their row's queue, or left one and are in normal.
    moved = jnp.concatenate([jnp.where(stays, task, num_tasks), jnp.where(freed, leaver, num_tasks)])
    to = jnp.concatenate([label, jnp.zeros_like(label)])
    entered, before = state.entered.reshape(-1), sum_before(into)
    entry = jnp.concatenate([entered[p] + _at_own(before, p).astype(jnp.uint32) for p in (pool, normal)])
    return dataclasses.replace(
        state,
        pool=state.pool.at[moved].set(to.astype(jnp.int8), mode="drop", unique_indices=True),
        entry=state.entry.at[moved].set(entry, mode="drop", unique_indices=True),
        normal=sum_tree.update(state.normal, moved, to == 0, unique_indices=True),
        queues=state.queues.at[ring, written].set(task, mode="drop", unique_indices=True),
        heads=(state.heads + left.reshape(-1, 3)[:, 1:]) % jnp.maximum(tasks_per_env, 1)[:, None],
        sizes=state.sizes + (joined - left).reshape(-1, 3),
        entered=state.entered + joined.reshape(-1, 3).astype(jnp.uint32),
    )


def _by_task(task: jax.Array, num_tasks: int) -> tuple[jax.Array, jax.Array]:
    """The rows sorted stably by task; and for each place in this order the first with the same task; int32 [G] each."""
    place = jnp.arange(task.size, dtype=jnp.int32)
    if num_tasks * task.size <= 2**32:  # task and row in one number: XLA sorts one array much faster than two
        both = task.astype(jnp.uint32) * jnp.uint32(task.size) + place.astype(jnp.uint32)
        by_task = (jax.lax.sort(both) % jnp.uint32(task.size)).astype(jnp.int32)
    else:
        by_task = jnp.argsort(task, stable=True).astype(jnp.int32)
    in_order = task[by_task]
    starts = jnp.concatenate([jnp.ones(1, bool), in_order[1:] != in_order[:-1]])
    return by_task, jax.lax.cummax(jnp.where(starts, place, 0))


def _entries(pool: Any, start: Any, start_number: Any, by_task: Any, first: Any, counts: Any, limit: Any) -> Any:
    """Entries of the rows in order, by fixed-point iteration.

    A row depends on the earlier rows that enter. Each pass computes all rows from the last guess, and extends the
    correct rows, counted from the first, by at least one. After a pass that changes nothing, all rows are correct. One
    pass is enough if no task leaves a queue and enters again in the batch, and none occurs twice; G passes are always
    enough.

    Args:
      pool: int32 [G], pool to enter, in [0, P).
      start: int32 [G], pool of the task at the start.
      start_number: int32 [G], the task's number there; any, if that pool is normal.
      by_task, first: of `_by_task`.
      counts: bool [G], True for rows that count.
      limit: int32 [P], largest number of members of each queue, at least that at the start; -1 for normal.

    Returns:
      bool [G], True if the row's task enters the row's queue; int32 [G], its number in that queue; and int32 [G] each,
      the pool that it entered before, and its number there.
    """

    def place_of(last: jax.Array, number: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Pool that each task entered at row `last`, and its number there; those at the start if that is -1."""
        again = last >= 0
        return jnp.where(again, pool[last], start), jnp.where(again, number[last], start_number)

    def entries_if(enters: jax.Array) -> tuple[jax.Array, ...]:
        """Rows that enter, their numbers, and the last earlier row of the same task that does, -1 for none.

        That is, if the earlier rows that enter are the marked rows of `enters` (bool [G]).
        With limit 1 and a queue of task A, which has number -1: row 0, task B, enters with number 0, and A leaves. At
        row 1, task A, one entry came before: 1 - (-1) = 2 is more than the limit, so no queue holds A, and it enters
        with number 1. Had row 0 not entered, 0 - (-1) = 1 would not be more, and A would be held.
        """
        before = sum_before(spread(pool, enters, limit.size))
        place = jnp.arange(enters.size, dtype=jnp.int32)
        latest = jax.lax.cummax(jnp.where(enters[by_task], place, -1))
        latest = jnp.concatenate([jnp.full(1, -1, jnp.int32), latest[:-1]])
        last = jnp.where(latest >= first, by_task[latest], -1)
        last = jnp.zeros_like(place).at[by_task].set(last, unique_indices=True)
        number = _at_own(before, pool)
        queue, its_number = place_of(last, number)
        held = (limit[queue] >= 0) & (_at_own(before, queue) - its_number <= limit[queue])
        return counts & ~held, number, last

    def next_guess(guess: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        found = entries_if(guess[1])
        return jnp.any(found[0] != guess[1]), *found

    guess = jnp.array(True), counts & (limit[start] < 0), jnp.zeros_like(pool), jnp.zeros_like(pool)
    _, enters, number, last = jax.lax.while_loop(lambda guess: guess[0], next_guess, guess)
    return enters, number, *place_of(last, number)


def spread(pool: jax.Array, marked: jax.Array, num_pools: int) -> jax.Array:
    """1 at the `pool` of each `marked` row, int32 [G, P]."""
    return ((pool[:, None] == jnp.arange(num_pools, dtype=jnp.int32)[None]) & marked[:, None]).astype(jnp.int32)


def _at_own(x: jax.Array, pool: jax.Array) -> jax.Array:
    """`x` [G, P] at each row's `pool`, [G]."""
    return jnp.take_along_axis(x, pool[:, None], axis=1)[:, 0]
