"""Task keys, by which `DifficultyPools.remap` matches tasks."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any


def task_key(task: Mapping[str, Any], fields: Sequence[str]) -> str:
    """Hexadecimal SHA-256 digest of some fields of a task, a key for `DifficultyPools.remap`.

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
