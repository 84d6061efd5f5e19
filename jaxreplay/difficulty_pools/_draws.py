"""Draws of tasks: an environment, then a pool of it, then a task of the pool."""

import jax
import jax.numpy as jnp
import numpy as np

from jaxreplay import sum_tree
from jaxreplay._common.random import random_bits, random_integers
from jaxreplay.difficulty_pools import _queues
from jaxreplay.difficulty_pools._parking import PoolsState


def draw(
    state: PoolsState, ratios: np.ndarray, weights: tuple[float, ...], key: jax.Array, n: int
) -> tuple[jax.Array, jax.Array]:
    """Tasks, int32 [n], all -1 if there is none to draw; and whether there is one, bool [].

    Args:
      state: the pools.
      ratios: float64 [E], relative frequencies of the environments.
      weights: of a task in normal, in easy and in hard.
      key: a PRNG key.
      n: number of draws.
    """
    if not any(weights[1:]):
        env_key, rank_key = jax.random.split(key)
        env, ok = _draw_env(state.sizes[:, 0] > 0, ratios, env_key, n)
        rank = _draw_rank(state.sizes[:, 0], env, rank_key)
        return jnp.where(ok, sum_tree.find(state.normal, rank), -1), ok
    env_key, pool_key, rank_key = jax.random.split(key, 3)
    masses = state.sizes.astype(jnp.float32) * jnp.asarray([weights], jnp.float32)  # [E, 3]
    env, ok = _draw_env(jnp.any(masses > 0, axis=1), ratios, env_key, n)
    pool = _draw_pool(masses, env, pool_key)
    rank = _draw_rank(state.sizes, env, rank_key, pool)
    tasks = [sum_tree.find(tree, rank) if tree is not None else jnp.full(n, -1, jnp.int32) for tree in state.trees]
    return jnp.where(ok, jax.lax.select_n(pool, *tasks), -1), ok


def _draw_env(has_tasks: jax.Array, ratios: np.ndarray, key: jax.Array, n: int) -> tuple[jax.Array, jax.Array]:
    """Environments, int32 [n], of those that have tasks (bool [E]); and whether there is one with a positive ratio."""
    share = jnp.asarray(ratios / max(ratios.max(), 1), jnp.float32)
    envs = sum_tree.init(share.size)
    envs = sum_tree.update(envs, jnp.arange(share.size), jnp.where(has_tasks, share, 0.0), unique_indices=True)
    env, _ = sum_tree.sample_with(envs, random_bits(key, n))
    return env, sum_tree.total(envs) > 0


def _draw_pool(masses: jax.Array, env: jax.Array, key: jax.Array) -> jax.Array:
    """Pools, int32 [n], of environments `env` (int32 [n]) in proportion to `masses` (float32 [E, 3]).

    The smallest comes first: near 0 a float32 has bits enough for a share of any size.
    """
    order = jnp.argsort(masses, axis=1)
    small, medium, large = (masses[env, order[env, i]] for i in range(3))
    coarse, fine = ((words >> 8).astype(jnp.float32) * 2.0**-24 for words in random_bits(key, env.size))
    prefix = (coarse + fine * 2.0**-24) * (small + medium + large)
    place = jnp.where(prefix < small, 0, jnp.where(prefix - small < medium, 1, 2))
    return order[env, place]


def _draw_rank(sizes: jax.Array, env: jax.Array, key: jax.Array, pool: jax.Array | None = None) -> jax.Array:
    """Rank of a uniform draw in its environment's pool, among the tasks in that pool of all environments; int32 [n].

    `sizes` are those of a pool, int32 [E], or of all, int32 [E, 3]; then `pool` is the one of each draw, int32 [n].
    """
    at = (env,) if pool is None else (env, pool)
    rank = random_integers(random_bits(key, env.size), jnp.maximum(sizes[at], 1))
    return rank + _queues.sum_before(sizes)[at]
