"""State of `DifficultyPools`: the pool of each task, and the order of entry.

Tasks in normal are leaves of value 1 in a sum tree, which finds the task of a given rank in O(log N). Easy and hard are
first-in, first-out queues in ring buffers. `arrange` builds a state.
"""

from collections.abc import Sequence
from typing import ClassVar

import jax
import jax.numpy as jnp
from flax import struct

from jaxreplay import sum_tree
from jaxreplay._common import layouts
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
    return PoolsState(
        pool=pool.astype(jnp.int8),
        entry=rank.astype(jnp.uint32),
        normal=sum_tree.of_leaves(jnp.pad(pool == 0, (0, num_tasks == 0)), fanout=fanout),
        queues=jnp.zeros((2, num_tasks), jnp.int32)
        .at[ring, rank + sum_before(tasks_per_env)[env]]
        .set(tasks, mode="drop"),
        heads=jnp.zeros((num_envs, 2), jnp.int32),
        sizes=sizes,
        entered=sizes.astype(jnp.uint32),
        groups=jnp.zeros_like(sizes),
        rollouts=jnp.zeros_like(sizes),
        rejected=jnp.zeros((), jnp.int32),
    )
