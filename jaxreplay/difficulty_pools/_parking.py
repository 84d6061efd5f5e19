"""State of `DifficultyPools`: the pool of each task, and the order of entry.

Tasks in normal are leaves of value 1 in a sum tree, which finds the task of a given rank in O(log N). Easy and hard
have such a tree too if tasks are drawn from them. Otherwise they are first-in, first-out queues in ring buffers.
`arrange` builds a state. `park` updates a state in which easy and hard are queues; `_moves` has the other update.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import ClassVar

import jax
import jax.numpy as jnp
from flax import struct
from jax import lax

from jaxreplay import sum_tree
from jaxreplay._common import layouts
from jaxreplay._common.xla import materialize
from jaxreplay.difficulty_pools import _queues
from jaxreplay.sum_tree._tree import on_backend


@struct.dataclass
class PoolsState(layouts.LaidOut):
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
      easy: a leaf per task, 1 if it is in easy; None if no task is drawn from easy.
      hard: the same for hard.

    Examples:
      >>> pools = jr.DifficultyPools(tasks_per_env=(4,), easy_threshold=0.9, hard_threshold=0.1)
      >>> state = pools.init()
      >>> isinstance(state, jr.PoolsState), state.sizes.tolist()  # of normal, easy and hard
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
    easy: sum_tree.SumTree | None = None
    hard: sum_tree.SumTree | None = None
    _layouts: ClassVar = dict.fromkeys(("normal", "easy", "hard"), on_backend)

    @property
    def trees(self) -> tuple[sum_tree.SumTree | None, ...]:
        """Sum trees of normal, easy and hard; None for a pool that is not drawn from."""
        return self.normal, self.easy, self.hard

    @property
    def drawn(self) -> tuple[bool, ...]:
        """(normal, easy, hard), True for a pool that is drawn from."""
        return tuple(tree is not None for tree in self.trees)


def env_of(tasks: jax.Array, tasks_per_env: jax.Array) -> jax.Array:
    """Environment of each of `tasks` (int32 [G]), int32 [G]."""
    ends = jnp.cumsum(tasks_per_env, dtype=jnp.int32)[:-1]
    return jnp.searchsorted(ends, tasks, side="right", method="compare_all").astype(jnp.int32)


def ranks(group: jax.Array, num_groups: int, *keys: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Rank of each row in its group, sorted by `keys`, then by row; and the size of each group.

    `group` and the ranks are int32 [N], the keys integers [N], the sizes int32 [num_groups].
    """
    rows = jnp.arange(group.size, dtype=jnp.int32)
    sizes = jnp.zeros(num_groups, jnp.int32).at[group].add(1)
    starts = _queues.sum_before(sizes)
    group, *_, row = lax.sort((group, *keys, rows), num_keys=1 + len(keys))
    return jnp.zeros_like(rows).at[row].set(rows - starts[group], unique_indices=True), sizes


def pools_of(state: PoolsState) -> tuple[jax.Array, jax.Array]:
    """Environment and pool of each task, int32 [N] each."""
    env = env_of(jnp.arange(state.pool.size, dtype=jnp.int32), jnp.sum(state.sizes, axis=1, dtype=jnp.int32))
    return env, state.pool.astype(jnp.int32)


def order(state: PoolsState) -> jax.Array:
    """Rank of each task in its pool by order of entry, int32 [N]."""
    env, pool = pools_of(state)
    # Entries minus all entries so far are negative; as uint32 the oldest is the smallest, even after an overflow.
    rank, _ = ranks(3 * env + pool, state.sizes.size, state.entry - state.entered[env, pool])
    return rank


def arrange(
    tasks_per_env: jax.Array,
    caps: jax.Array,
    pool: jax.Array,
    keys: Sequence[jax.Array],
    rejected: jax.Array,
    drawn: tuple[bool, ...] = (True, False, False),
    fanout: int | None = None,
) -> PoolsState:
    """Build a state with metrics 0 and every pool within its cap; the oldest surplus tasks go to the end of normal.

    Args:
      tasks_per_env: int32 [E].
      caps: int32 [E, 2], of easy and hard.
      pool: int32 [N], each task's pool.
      keys: int [N] each; tasks enter their pool sorted by these keys.
      rejected: int32 [].
      drawn: (normal, easy, hard), True for a pool that is drawn from.
      fanout: fan-out of the trees; None for the best where the state is made.
    """
    num_tasks, num_envs = pool.size, tasks_per_env.size
    tasks = jnp.arange(num_tasks, dtype=jnp.int32)
    env = env_of(tasks, tasks_per_env)
    rank, sizes = ranks(3 * env + pool, 3 * num_envs, *keys)
    surplus = sizes.reshape(num_envs, 3)[:, 1:] - caps
    returns = (pool > 0) & (rank < surplus[env, pool - 1])
    pool, late = jnp.where(returns, 0, pool), jnp.where(returns, pool, 0)
    rank, sizes = ranks(3 * env + pool, 3 * num_envs, late, *keys)
    sizes = sizes.reshape(num_envs, 3)
    ring = jnp.where(pool > 0, pool - 1, 2)  # 2 is out of range: normal has no ring
    slot = rank + _queues.sum_before(tasks_per_env)[env]

    def tree_of(number: int) -> sum_tree.SumTree:
        empty = sum_tree.init(max(num_tasks, 1), fanout=fanout)
        return sum_tree.update(empty, tasks, pool == number, unique_indices=True)

    return PoolsState(
        pool=pool.astype(jnp.int8),
        entry=rank.astype(jnp.uint32),
        normal=tree_of(0),
        easy=tree_of(1) if drawn[1] else None,
        hard=tree_of(2) if drawn[2] else None,
        queues=jnp.zeros((2, num_tasks), jnp.int32).at[ring, slot].set(tasks, mode="drop"),
        heads=jnp.zeros((num_envs, 2), jnp.int32),
        sizes=sizes,
        entered=sizes.astype(jnp.uint32),
        groups=jnp.zeros_like(sizes),
        rollouts=jnp.zeros_like(sizes),
        rejected=rejected,
    )


def park(
    state: PoolsState, tasks_per_env: jax.Array, caps: jax.Array, tasks: jax.Array, env: jax.Array, label: jax.Array
) -> PoolsState:
    """Move tasks in normal to the pools of their labels, in order; the oldest surplus tasks return to normal.

    Args:
      state: pools within their caps; a pool above its cap does not grow.
      tasks_per_env: int32 [E].
      caps: int32 [E, 2], of easy and hard.
      tasks: int32 [G]; a task may occur more than once.
      env: int32 [G], environments of the tasks.
      label: int32 [G], pools to move to, 0 for none.
    """
    num_envs, num_tasks = state.sizes.shape[0], state.pool.size
    done = join_queues(state, caps, tasks, env, label)
    # Members that leave a ring are read before tasks that stay are written over them.
    leaver, written = materialize(*leavers_and_slots(state, tasks_per_env, tasks, env, label, done))
    ring = jnp.maximum(label - 1, 0)

    # Tasks whose pool or entry changes: parked at the end, or out of a ring and not in one again.
    moved = jnp.concatenate([jnp.where(done.stays, tasks, num_tasks), jnp.where(done.free, leaver, num_tasks)])
    pool = jnp.concatenate([label, jnp.zeros_like(label)])
    entry = _entries(state, env, label, done)

    joined, left = done.joined.reshape(num_envs, 2), done.left.reshape(num_envs, 2)
    entries = jnp.concatenate([jnp.sum(left, axis=1, keepdims=True, dtype=jnp.int32), joined], axis=1)
    exits = jnp.concatenate([jnp.sum(joined, axis=1, keepdims=True, dtype=jnp.int32), left], axis=1)
    return dataclasses.replace(
        state,
        pool=state.pool.at[moved].set(pool.astype(jnp.int8), mode="drop", unique_indices=True),
        entry=state.entry.at[moved].set(entry, mode="drop", unique_indices=True),
        normal=sum_tree.update(state.normal, moved, pool == 0, unique_indices=True),
        queues=state.queues.at[ring, written].set(tasks, mode="drop", unique_indices=True),
        heads=(state.heads + left) % jnp.maximum(tasks_per_env, 1)[:, None],
        sizes=state.sizes + entries - exits,
        entered=state.entered + entries.astype(jnp.uint32),
    )


def join_queues(
    state: PoolsState, caps: jax.Array, tasks: jax.Array, env: jax.Array, label: jax.Array
) -> _queues.Joins:
    """Effect of the rows of `park` on the queues; queue 2 * e + p - 1 is pool p of environment e.

    A task joins no queue if its label is not a queue, and leaves none if its pool is not a queue.
    """
    num_envs, num_tasks = state.sizes.shape[0], state.pool.size

    def queue_of(pool: jax.Array) -> jax.Array:
        is_queue = functools.reduce(jnp.logical_and, [pool != p for p in (1, 2) if state.drawn[p]], pool > 0)
        return jnp.where(is_queue, 2 * env + pool - 1, 2 * num_envs)

    size = state.sizes[:, 1:].reshape(-1)
    limit = jnp.maximum(caps.reshape(-1), size)
    pool = state.pool[tasks].astype(jnp.int32)
    number = state.sizes[env, pool] - (state.entered[env, pool] - state.entry[tasks]).astype(jnp.int32)
    return _queues.join(tasks, num_tasks, queue_of(label), queue_of(pool), number, size, limit)


def leavers_and_slots(
    state: PoolsState, tasks_per_env: jax.Array, tasks: jax.Array, env: jax.Array, label: jax.Array, done: _queues.Joins
) -> tuple[jax.Array, jax.Array]:
    """The task that leaves at each row's turn, and the slot of the row's task in its ring; int32 [G] each.

    The task is undefined if none leaves. The slot is N if the row's task does not stay in a queue.
    """
    ring, start = jnp.maximum(label - 1, 0), _queues.sum_before(tasks_per_env)[env]

    def slot(number: jax.Array) -> jax.Array:
        return start + (state.heads[env, ring] + number) % tasks_per_env[env]

    leaver = jnp.where(
        done.leaver < state.sizes[env, label],
        state.queues[ring, jnp.where(done.leaves, slot(done.leaver), 0)],
        tasks[done.leaver_row],
    )
    return leaver, jnp.where(done.stays, slot(done.number), state.pool.size)


def _entries(state: PoolsState, env: jax.Array, label: jax.Array, done: _queues.Joins) -> jax.Array:
    """`PoolsState.entry` of each row's task in its pool, then of each row's leaver in normal, uint32 [2 * G]."""
    envs = jnp.arange(state.sizes.shape[0], dtype=jnp.int32)[None]
    returned = ((env[:, None] == envs) & done.leaves[:, None]).astype(jnp.int32)  # [G, E]
    returned_before = _queues.sum_before(returned)[jnp.arange(env.size), env]
    joined_before = done.number - state.sizes[env, label]
    entry = jnp.concatenate([joined_before, returned_before]).astype(jnp.uint32)
    return entry + jnp.concatenate([state.entered[env, label], state.entered[env, 0]])
