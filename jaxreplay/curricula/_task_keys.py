"""Task keys, by which `DifficultyPools.remap` and `Tasks.remap` match tasks."""

import hashlib
import json
from collections import defaultdict, deque
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import jax
import numpy as np


def task_key(task: Mapping[str, Any], fields: Sequence[str]) -> str:
    """Hexadecimal SHA-256 digest of some fields of a task, a key for `remap`.

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

    If a key occurs more than once, its first old task becomes its first new one, and so on.

    Args:
      old: an array of the old state, [number of old tasks].

    Raises:
      ValueError: there is not one key per task, or the state is a stack of states.
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
    source = [positions[key].popleft() if positions.get(key) else len(old_keys) for key in new_keys]
    return np.asarray(source, np.int32)
