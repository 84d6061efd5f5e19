"""Checks of a `DifficultyPools` configuration; each raises a `ValueError` with a remedy."""

import math
from typing import Any

from jaxreplay._common.checks import check_integer, check_number, settle

MAX_TASKS = 2**24  # the sum tree counts them in float32


def check_envs(config: Any) -> None:
    """Check the fields with one entry per environment, and convert them to tuples of Python numbers."""
    for name in ("tasks_per_env", "env_ratios", "env_names"):
        value = getattr(config, name)
        if value is None:
            continue
        settle(config, **{name: _entries(name, value, "environment")})
        if len(getattr(config, name)) != len(config.tasks_per_env):
            raise ValueError(f"{name}={value}: must have one entry for each of {len(config.tasks_per_env)} envs.")
    tasks_per_env = tuple(
        check_integer(f"tasks_per_env[{i}]", count, 0, MAX_TASKS, "the number of an environment's tasks")
        for i, count in enumerate(config.tasks_per_env)
    )
    settle(config, tasks_per_env=tasks_per_env)
    if not config.tasks_per_env or config.num_tasks > MAX_TASKS:
        raise ValueError(
            f"tasks_per_env={config.tasks_per_env}: expected one number per environment, at most {MAX_TASKS} tasks."
        )
    if config.env_ratios is not None:
        without = [i for i, ratio in enumerate(config.env_ratios) if ratio is None]
        if without:
            raise ValueError(
                f"env_ratios={config.env_ratios}: None for environments {without}, must be given for all or none; use "
                "env_ratios=None for none, or give each a number."
            )
        env_ratios = tuple(
            check_number(f"env_ratios[{i}]", ratio, 0, math.inf, "0 never draws the environment")
            for i, ratio in enumerate(config.env_ratios)
        )
        settle(config, env_ratios=env_ratios)
        if sum(env_ratios) == 0:
            raise ValueError(f"env_ratios={env_ratios}: at least one must be positive.")
    if config.env_names is not None and len({*config.env_names}) < len(config.env_names):
        raise ValueError(f"env_names={config.env_names}: must be distinct.")


def check_weights(config: Any) -> None:
    """Check the weights of the pools, and convert them to Python floats."""
    found = _entries("pool_weights", config.pool_weights, "pool, (easy, normal, hard)")
    if len(found) != 3:
        raise ValueError(f"pool_weights={found}: must have three entries, (easy, normal, hard).")
    weights = tuple(
        float(check_number(f"pool_weights[{i}]", weight, 0, 1e6, "how often a task of the pool is drawn; 0 parks it"))
        for i, weight in enumerate(found)
    )
    if weights[1] == 0 or any(0 < weight / weights[1] < 1e-6 for weight in weights):
        raise ValueError(
            f"pool_weights={weights}: normal's must be positive, as all tasks start there, and the others 0 or at "
            "least a millionth of it; (0, 1, 0) parks easy and hard tasks."
        )
    settle(config, pool_weights=weights)


def check_thresholds(config: Any) -> None:
    """Check thresholds and fractions, and convert them to Python numbers."""
    for name in ("easy_threshold", "hard_threshold"):
        if getattr(config, name) is not None:
            threshold = check_number(name, getattr(config, name), -math.inf, math.inf, "or None")
            settle(config, **{name: threshold})
    easy, hard = config.easy_threshold, config.hard_threshold
    if easy is not None and hard is not None and easy < hard:
        raise ValueError(
            f"easy_threshold={easy}: must be at least hard_threshold={hard}; raise it, or lower the other."
        )
    fractions = {
        name: check_number(name, getattr(config, name), 0, 1, "a fraction of an environment's tasks, below 1")
        for name in ("max_easy_pool_fraction", "max_hard_pool_fraction")
    }
    settle(config, **fractions)
    parks = [not drawn for drawn in config._drawn[1:]]
    if sum(fraction for fraction, is_queue in zip(fractions.values(), parks, strict=True) if is_queue) >= 1:
        raise ValueError(
            " + ".join(f"{name}={fraction}" for name, fraction in fractions.items())
            + ": must sum to less than 1, so that tasks are left in normal; lower one of them."
        )


def _entries(name: str, value: Any, of: str) -> tuple[Any, ...]:
    if isinstance(value, str | bytes) or not hasattr(value, "__iter__"):
        raise ValueError(f"{name}={value!r}: must be a sequence, one entry for each {of}.")
    return tuple(value)
