"""Checks of the groups of rollouts in an update, and padding, which limits the number of compiled programs."""

from collections.abc import Callable
from typing import Any

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxreplay._common import checks, xla


def task_arguments(config: Any, key: Any, n: Any, replacement: Any) -> tuple[Any, ...]:
    """The arguments of `sample` of tasks, checked."""
    replacement = checks.check_bool("replacement", replacement, "False for tasks that are all different")
    most, meaning = (2**24, "the number of draws") if replacement else (config.num_tasks, "at most num_tasks")
    return key, checks.check_integer("n", n, 1, most, meaning), replacement


def distinct(key: jax.Array, mass: jax.Array, n: int) -> jax.Array:
    """`n` different tasks by successive draws in proportion to `mass` (float32 [N]), int32 [n]; those of mass 0 last.

    These are the n largest of log(mass) + Gumbel noise (Kool et al. 2019, Stochastic Beams and Where to Find Them,
    section 2.3). The noise is above -5.
    """
    logs = jnp.where(mass > 0, jnp.log(jnp.maximum(mass, 2.0**-126)), -300.0)
    return lax.top_k(logs + jax.random.gumbel(key, mass.shape, jnp.float32, mode="high"), n)[1]


def check(tasks: Any, rewards: Any, mask: Any, xp: Any = jnp) -> tuple[Any, ...]:
    """Convert tasks (integers [G]), rewards (float32 [G, R]) and mask (bool [G, R]) to arrays of `xp`, NumPy or JAX.

    Raises:
      ValueError: other shapes or dtypes.
    """
    try:
        tasks = checks.as_int32(xp.asarray(tasks))
    except (TypeError, ValueError) as error:
        found = f"tasks: got a {type(tasks).__name__}, expected a vector of integers"
        raise ValueError(f"{found}; of what `sample` returns, give the first.") from error
    rewards = xp.asarray(rewards)
    if tasks.ndim != 1 or not jnp.issubdtype(tasks.dtype, jnp.integer):
        raise ValueError(f"tasks: got {checks.type_text(tasks)}, expected a vector of integers.")
    if rewards.ndim != 2 or rewards.shape[0] != tasks.size or jnp.issubdtype(rewards.dtype, jnp.complexfloating):
        found = checks.type_text(rewards)
        raise ValueError(f"rewards: got {found}, expected [{tasks.size}, R]; if R is 1, give rewards[:, None].")
    mask = xp.asarray(xp.ones(rewards.shape, bool) if mask is None else mask)
    mask = checks.check_mask(mask, tasks.shape if mask.ndim == 1 else rewards.shape, xp=xp)
    if mask.ndim == 1:
        mask = xp.broadcast_to(mask[:, None], rewards.shape)
    return tasks, rewards.astype(np.float32), mask


def padded(tasks: Any, rewards: Any, mask: Any, xp: Any = jnp) -> tuple[Any, ...]:
    """`check`, then pad G and R to powers of two with masked-out groups and rollouts."""
    groups = tasks, rewards, mask = check(tasks, rewards, mask, xp)
    padding = [(0, (1 << max(size - 1, 0).bit_length()) - size) for size in rewards.shape]
    return tuple(xp.pad(x, padding[: x.ndim]) for x in groups)


_padded_on_device = xla.copies_numpy(jax.jit(padded))
_first = jax.jit(lambda x, n: x[:n], static_argnums=1)


def padded_update(update: Callable[..., tuple[Any, Any]], state: Any, *groups: Any) -> tuple[Any, Any]:
    """`update(state, tasks, rewards, mask)`, with padded groups if the call is eager; and a flag of each group."""
    if any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves((state, groups))):
        return update(state, *groups)
    on_device = any(isinstance(x, jax.Array) for x in groups)
    padded_groups = _padded_on_device(*groups) if on_device else padded(*groups, xp=np)
    state, kept = update(state, *padded_groups)
    return state, _first(kept, len(groups[0]))
