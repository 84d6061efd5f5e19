"""Sizes of one measurement, and the items that are replayed."""

import dataclasses
import math
from typing import Any

import numpy as np

ITEMS = {
    "vector": {"obs": ((4,), np.float32), "reward": ((), np.float32)},
    "frames": {"frame": ((84, 84, 4), np.uint8), "reward": ((), np.float32)},
}
SEQUENCE_LENGTH, SEQUENCE_PERIOD = 80, 40


@dataclasses.dataclass(frozen=True, kw_only=True)
class Setting:
    """Sizes of one measurement.

    Attributes:
      capacity: N, items stored (sequences in part g), full before the first step.
      batch_size: B, items drawn a step.
      num_added: E, items added a step.
      seeds: S, independent buffers advanced together.
      items: "vector" or "frames".
    """

    capacity: int
    batch_size: int
    num_added: int = 16
    seeds: int = 1
    items: str = "vector"

    @property
    def spec(self) -> dict[str, tuple[tuple[int, ...], Any]]:
        """Shape and dtype of each leaf of an item."""
        return ITEMS[self.items]

    @property
    def item_bytes(self) -> int:
        return sum(math.prod(shape) * np.dtype(dtype).itemsize for shape, dtype in self.spec.values())

    def batch(self, *leading: int, seed: int = 0) -> dict[str, np.ndarray]:
        """Random items with leading axes; rewards lie in [0.1, 1)."""
        rng = np.random.default_rng(seed)
        items = {}
        for name, (shape, dtype) in self.spec.items():
            if dtype == np.uint8:
                items[name] = rng.integers(0, 256, (*leading, *shape), np.uint8)
            else:
                items[name] = rng.uniform(0.1, 1.0, (*leading, *shape)).astype(dtype)
        return items

    def fill_rows(self) -> int:
        """Rows to add at a time while filling."""
        return min(self.capacity, 256 if self.items == "frames" else 4096)

    def fill(self) -> tuple[tuple[int, ...], int]:
        """Leading axes of what is added at a time while filling, and how many times."""
        return (self.fill_rows(),), self.capacity // self.fill_rows()


def power(n: int) -> str:
    """A size as text: 2^20, 5 * 2^21, or the number itself."""
    factor = n >> (n & -n).bit_length() - 1
    text = f"2^{(n // factor).bit_length() - 1}"
    return str(n) if n // factor < 1024 else text if factor == 1 else f"{factor} * {text}"
