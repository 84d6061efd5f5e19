"""Draws of tasks: first an environment, then one of its pools, then a task in that pool."""

import jax
import jax.numpy as jnp
import numpy as np

from jaxreplay import sum_tree
from jaxreplay._common.random import random_bits, random_integers
from jaxreplay.curricula import _pool_turns as _turns
from jaxreplay.curricula._pool_state import PoolsState


def draw(
    state: PoolsState, ratios: np.ndarray, weights: tuple[float, ...], key: jax.Array, n: int
) -> tuple[jax.Array, jax.Array]:
    """Draw tasks, int32 [n], all -1 if there is none to draw; and ok, bool [], False in that case.

    Args:
      state: the pools.
      ratios: float64 [E], relative frequencies of the environments.
      weights: draw weights of a task in normal, in easy and in hard.
      key: a PRNG key.
      n: number of draws.
    """
    if not any(weights[1:]):
        env_key, rank_key = jax.random.split(key)
        env, ok = _draw_env(state, state.sizes[:, 0] > 0, ratios, env_key, n)
        rank = _draw_rank(state.sizes[:, 0], env, rank_key)
        return jnp.where(ok, sum_tree.find(state.normal, rank), -1), ok
    env_key, pool_key, rank_key = jax.random.split(key, 3)
    masses = state.sizes.astype(jnp.float32) * jnp.asarray([weights], jnp.float32)  # [E, 3]
    env, ok = _draw_env(state, jnp.any(masses > 0, axis=1), ratios, env_key, n)
    pool = _draw_pool(masses, env, pool_key)
    rank = _draw_rank(state.sizes, env, rank_key, pool)
    tasks = [sum_tree.find(tree, rank) if tree is not None else jnp.full(n, -1, jnp.int32) for tree in state.trees]
    return jnp.where(ok, jax.lax.select_n(pool, *tasks), -1), ok


def _draw_env(
    state: PoolsState, has_tasks: jax.Array, ratios: np.ndarray, key: jax.Array, n: int
) -> tuple[jax.Array, jax.Array]:
    """Draw environments that have tasks (bool [E]), int32 [n]; and True if one of them has a positive ratio."""
    share = jnp.asarray(ratios / max(ratios.max(), 1), jnp.float32)
    envs = sum_tree.init(share.size, fanout=state.normal.fanout)
    envs = sum_tree.update(envs, jnp.arange(share.size), jnp.where(has_tasks, share, 0.0), unique_indices=True)
    env, _ = sum_tree.sample_with(envs, random_bits(key, n))
    return env, sum_tree.total(envs) > 0


def _draw_pool(masses: jax.Array, env: jax.Array, key: jax.Array) -> jax.Array:
    """Draw a pool of each environment `env` (int32 [n]) in proportion to `masses` (float32 [E, 3]), int32 [n].

    The smallest mass comes first, as float32 resolves shares of any size near 0.
    """
    order = jnp.argsort(masses, axis=1)
    small, medium, large = (masses[env, order[env, i]] for i in range(3))
    coarse, fine = ((words >> 8).astype(jnp.float32) * 2.0**-24 for words in random_bits(key, env.size))
    prefix = (coarse + fine * 2.0**-24) * (small + medium + large)
    place = jnp.where(prefix < small, 0, jnp.where(prefix - small < medium, 1, 2))
    return order[env, place]


def _draw_rank(sizes: jax.Array, env: jax.Array, key: jax.Array, pool: jax.Array | None = None) -> jax.Array:
    """Draw uniformly from a pool of each `env`; returns ranks in that pool across all environments, int32 [n].

    `sizes` are the sizes of one pool, int32 [E], or of all pools, int32 [E, 3]; then `pool` is each draw's, int32 [n].
    """
    at = (env,) if pool is None else (env, pool)
    rank = random_integers(random_bits(key, env.size), jnp.maximum(sizes[at], 1))
    return rank + _turns.sum_before(sizes)[at]
