"""Checks of a configuration's static arguments."""

import math
from typing import Any

import numpy as np


def check_integer(name: str, value: Any, low: int, high: int, meaning: str) -> int:
    """`value`, which may be a NumPy integer, as a Python integer.

    Raises:
      ValueError: it is no integer in [low, high].
    """
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or not low <= int(value) <= high:
        raise ValueError(f"{name}={value!r}: must be an integer from {low} to {high}, {meaning}.")
    return int(value)


def check_number(name: str, value: Any, low: float, high: float, remedy: str) -> float:
    """`value`, which may be a NumPy number, as a Python number.

    Raises:
      ValueError: it is no finite number in [low, high].
    """
    is_number = isinstance(value, int | float | np.integer | np.floating) and not isinstance(value, bool)
    if not (is_number and math.isfinite(value) and low <= value <= high):
        if math.isfinite(high):
            rule = f"a number in [{low:g}, {high:g}]"
        else:
            rule = f"a finite number of at least {low:g}" if math.isfinite(low) else "a finite number"
        raise ValueError(f"{name}={value!r}: must be {rule}; {remedy}.")
    return value.item() if isinstance(value, np.generic) else value


def settle(config: Any, **values: Any) -> None:
    """Set fields of a frozen dataclass that is being made."""
    for name, value in values.items():
        object.__setattr__(config, name, value)
