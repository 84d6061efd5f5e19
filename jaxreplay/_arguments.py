"""Checks of a configuration's static arguments."""

import math
from typing import Any

import numpy as np


def check_integer(name: str, value: Any, low: int, high: int, meaning: str) -> None:
    """Raise a `ValueError` unless `value` is an integer in [low, high]."""
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or not low <= value <= high:
        raise ValueError(f"{name}={value!r}: must be an integer from {low} to {high}, {meaning}.")


def check_number(name: str, value: Any, low: float, high: float, remedy: str) -> None:
    """Raise a `ValueError` unless `value` is a finite Python or numpy number in [low, high]."""
    is_number = isinstance(value, int | float | np.number) and not isinstance(value, bool)
    if not (is_number and math.isfinite(value) and low <= value <= high):
        if math.isfinite(high):
            rule = f"a number in [{low:g}, {high:g}]"
        else:
            rule = f"a finite number of at least {low:g}" if math.isfinite(low) else "a finite number"
        raise ValueError(f"{name}={value!r}: must be {rule}; {remedy}.")
