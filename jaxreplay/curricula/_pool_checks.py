"""Checks of a `DifficultyPools` configuration; each raises a `ValueError` with a remedy."""

import math
from collections.abc import Iterable
from typing import Any

from jaxreplay._common.checks import check_integer, check_number, set_fields

MAX_TASKS = 2**24  # the sum tree counts them in float32


def check_envs(config: Any) -> None:
    """Check the fields with one entry per environment, and convert them to tuples of Python numbers."""
    for name in ("tasks_per_env", "env_ratios", "env_names"):
        value = getattr(config, name)
        if value is None and name != "tasks_per_env":
            continue
        if isinstance(value, str | bytes) or not isinstance(value, Iterable):
            raise ValueError(f"{name}={value!r}: must be a sequence, one entry for each environment.")
        set_fields(config, **{name: tuple(value)})
        if len(getattr(config, name)) != len(config.tasks_per_env):
            raise ValueError(f"{name}={value}: must have one entry for each of {len(config.tasks_per_env)} envs.")
    tasks_per_env = tuple(
        check_integer(f"tasks_per_env[{i}]", count, 0, MAX_TASKS, "the number of an environment's tasks")
        for i, count in enumerate(config.tasks_per_env)
    )
    set_fields(config, tasks_per_env=tasks_per_env)
    if not tasks_per_env or config.num_tasks > MAX_TASKS:
        raise ValueError(f"tasks_per_env={tasks_per_env}: must be 1 number or more, of at most {MAX_TASKS} tasks.")
    if config.env_ratios is not None:
        env_ratios = tuple(
            check_number(f"env_ratios[{i}]", ratio, 0, math.inf, "give all, or env_ratios=None")
            for i, ratio in enumerate(config.env_ratios)
        )
        set_fields(config, env_ratios=env_ratios)
        if sum(env_ratios) == 0:
            raise ValueError(f"env_ratios={env_ratios}: at least one must be positive.")
    if config.env_names is not None and len({*config.env_names}) < len(config.env_names):
        raise ValueError(f"env_names={config.env_names}: must be distinct.")


def check_thresholds(config: Any) -> None:
    """Check thresholds and fractions, and convert them to Python numbers."""
    for name in ("easy_threshold", "hard_threshold"):
        if getattr(config, name) is not None:
            threshold = check_number(name, getattr(config, name), -math.inf, math.inf, "or None")
            set_fields(config, **{name: threshold})
    easy, hard = config.easy_threshold, config.hard_threshold
    if easy is not None and hard is not None and easy < hard:
        raise ValueError(f"easy_threshold={easy}: must be at least hard_threshold={hard}; raise it.")
    fractions = {
        name: check_number(name, getattr(config, name), 0, 1, "a fraction of an environment's tasks, below 1")
        for name in ("max_easy_pool_fraction", "max_hard_pool_fraction")
    }
    set_fields(config, **fractions)
    if sum(fractions.values()) >= 1:
        raise ValueError(
            " + ".join(f"{name}={fraction}" for name, fraction in fractions.items())
            + ": must sum to less than 1; lower one of them."
        )
