"""Functions for lists of tasks: checks of draws and updates, and the keys by which `remap` matches tasks.

Groups are padded, which limits the number of compiled programs.
"""

import hashlib
import json
from collections import defaultdict, deque
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxreplay._common import checks, xla


def task_arguments(config: Any, key: Any, n: Any, replacement: Any) -> tuple[Any, ...]:
    """The arguments of `sample` of tasks, checked."""
    replacement = checks.check_bool("replacement", replacement, "False for tasks that are all different")
    most, meaning = (2**24, "the number of draws") if replacement else (config.num_tasks, "at most num_tasks")
    return key, checks.check_integer("n", n, 1, most, meaning), replacement


def distinct(key: jax.Array, mass: jax.Array, n: int) -> jax.Array:
    """`n` different tasks by successive draws in proportion to `mass` (float32 [N]), int32 [n]; tasks of mass 0 last.

    These are the n largest of log(mass) + Gumbel noise (Kool et al. 2019, Stochastic Beams and Where to Find Them,
    section 2.3). The noise is above -5.
    """
    logs = jnp.where(mass > 0, jnp.log(jnp.maximum(mass, 2.0**-126)), -300.0)
    return jax.lax.top_k(logs + jax.random.gumbel(key, mass.shape, jnp.float32, mode="high"), n)[1]


def check(tasks: Any, rewards: Any, mask: Any, xp: Any = jnp) -> tuple[Any, ...]:
    """Check tasks (integers [G]), rewards (float32 [G, R]) and mask (bool [G, R]); return them as arrays of `xp`."""
    try:
        tasks = checks.as_int32(xp.asarray(tasks))
    except (TypeError, ValueError) as error:
        raise ValueError(f"tasks: got a {type(tasks).__name__}, expected integers; give sample(...)[0].") from error
    rewards = xp.asarray(rewards)
    if tasks.ndim != 1 or not jnp.issubdtype(tasks.dtype, jnp.integer):
        raise ValueError(f"tasks: got {checks.type_text(tasks)}, expected a vector of integers.")
    if rewards.ndim != 2 or rewards.shape[0] != tasks.size or jnp.issubdtype(rewards.dtype, jnp.complexfloating):
        raise ValueError(f"rewards: got {checks.type_text(rewards)}, expected [{tasks.size}, R]; try rewards[:, None].")
    mask = xp.ones(rewards.shape, bool) if mask is None else xp.asarray(mask)
    mask = checks.check_mask(mask, tasks.shape if mask.ndim == 1 else rewards.shape, xp=xp)
    return tasks, rewards.astype(np.float32), xp.broadcast_to(mask[:, None] if mask.ndim == 1 else mask, rewards.shape)


def padded(tasks: Any, rewards: Any, mask: Any, xp: Any = jnp) -> tuple[Any, ...]:
    """`check`, then pad G and R to powers of two with masked-out groups and rollouts."""
    groups = tasks, rewards, mask = check(tasks, rewards, mask, xp)
    padding = [(0, (1 << max(size - 1, 0).bit_length()) - size) for size in rewards.shape]
    return tuple(xp.pad(x, padding[: x.ndim]) for x in groups)


_padded_on_device = xla.copies_numpy(jax.jit(padded))
_first = jax.jit(lambda x, n: x[:n], static_argnums=1)  # eagerly, the bounds would be sent to the device


def padded_update(update: Callable[..., tuple[Any, Any]], state: Any, *groups: Any) -> tuple[Any, Any]:
    """`update(state, tasks, rewards, mask)`, with padded groups if the call is eager; and a flag of each group."""
    if xla.is_traced((state, groups)):
        return update(state, *check(*groups))
    on_device = any(isinstance(x, jax.Array) for x in groups)
    state, kept = update(state, *(_padded_on_device(*groups) if on_device else padded(*groups, xp=np)))
    return state, _first(kept, len(groups[0]))


def task_key(task: Mapping[str, Any], fields: Sequence[str]) -> str:
    """Make a key for `remap`: the hexadecimal SHA-256 digest of some fields of a task.

    Args:
      task: its fields by name, with JSON-serializable values.
      fields: names of the fields that identify the task, in order, such as ("env", "prompt").

    Raises:
      ValueError: `fields` is empty, or the task lacks one.

    Examples:
      >>> old = {"prompt": "2 + 2", "env": "math", "number": 7}
      >>> new = {"env": "math", "prompt": "2 + 2", "number": 12}
      >>> jr.task_key(old, ("env", "prompt")) == jr.task_key(new, ("env", "prompt"))
      True
    """
    if missing := [field for field in fields if field not in task] or not fields:
        raise ValueError(f"fields={fields!r}: not in the task: {missing}; it has {sorted(task)}; give at least one.")
    return hashlib.sha256(json.dumps([task[field] for field in fields], sort_keys=True).encode()).hexdigest()


def old_task_of_each(
    old: jax.Array, old_keys: Sequence[Hashable], new_keys: Sequence[Hashable], num_tasks: int
) -> np.ndarray:
    """For each of `num_tasks` new tasks the number of its old task, or the number of old tasks if it is new; int32.

    If a key occurs more than once, its first old task becomes its first new one, and so on. Raises a `ValueError` if
    there is not one key per task, or if `old`, an array [number of old tasks] of the old state, has more axes.
    """
    if old.ndim != 1:
        raise ValueError(f"state: has tasks {list(old.shape)}; use jax.vmap for a stack of states.")
    old_keys, new_keys = list(old_keys), list(new_keys)
    for name, keys, expected in (("old_keys", old_keys, old.size), ("new_keys", new_keys, num_tasks)):
        if len(keys) != expected:
            raise ValueError(f"{name}: got {len(keys)} keys for {expected} tasks; give one for each, in order.")
    positions = defaultdict(deque)
    for position, key in enumerate(old_keys):
        positions[key].append(position)
    return np.asarray([positions[key].popleft() if positions.get(key) else len(old_keys) for key in new_keys], np.int32)
