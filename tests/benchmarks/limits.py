"""What a step cannot beat on this machine: bytes over the copy bandwidth, plus kernels times the launch cost."""

import dataclasses
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from hlo import count_kernels
from jax import lax
from settings import SEQUENCE_LENGTH, SEQUENCE_PERIOD, Setting

from jaxreplay import sum_tree


@dataclasses.dataclass(frozen=True)
class Machine:
    """Measured in this process.

    Attributes:
      bandwidths: bytes read and written a second, by the bytes of the array that is copied.
      launch: seconds a kernel costs inside a compiled loop.
    """

    bandwidths: dict[int, float]
    launch: float

    def bandwidth(self, state_bytes: int) -> float:
        """The best of copies as large as a program's state, or larger: what fits into a cache moves faster."""
        large = [speed for copied, speed in self.bandwidths.items() if copied >= state_bytes]
        return max(large, default=self.bandwidths[max(self.bandwidths)])


def measure_machine(largest: int = 2**28, launches: int = 5000) -> Machine:
    sizes = [2**k for k in range(18, 31, 2) if 2**k <= largest]
    return Machine({size: _copy_bandwidth(size, 8 * largest // size) for size in sizes}, _launch_cost(launches))


def _copy_bandwidth(size: int, times: int) -> float:
    x = jnp.zeros(size // 4, jnp.float32)
    copy = jax.jit(lambda x: lax.fori_loop(0, times, lambda _, x: x + 1, x))
    return 2 * size * times / _best(lambda: copy(x))


def _launch_cost(launches: int) -> float:
    def body(_, carry):  # every kernel needs the result of the one before
        x, rows = carry
        x = x.at[rows].add(1)
        return x, (rows + x[rows]) % x.size

    # Over a single row XLA:CPU would make one kernel of the whole loop.
    start = (jnp.zeros(64, jnp.int32), jnp.arange(16))
    loop = jax.jit(lambda carry: lax.fori_loop(0, launches, body, carry)).lower(start).compile()
    return _best(lambda: loop(start)) / launches / max(count_kernels(loop.as_text(), launches), 1)


def _best(run: Callable[[], Any], times: int = 5) -> float:
    jax.block_until_ready(run())
    seconds = []
    for _ in range(times):
        started = time.perf_counter()
        jax.block_until_ready(run())
        seconds.append(time.perf_counter() - started)
    return min(seconds)


def must_move(part: str, setting: Setting) -> int:
    """Bytes that a step of jaxreplay has to read or write in this part, whatever the program."""
    fanout = sum_tree.default_fanout()
    levels = len(jax.eval_shape(lambda: sum_tree.init(setting.capacity)).sums)
    read_path, write_path = levels * fanout * 4, levels * (fanout + 1) * 4
    if part in ("a", "h", "k"):
        return setting.seeds * setting.batch_size * (read_path + write_path)
    added = setting.num_added * (SEQUENCE_LENGTH + SEQUENCE_PERIOD if part == "g" else 2) * setting.item_bytes
    drawn = 2 * setting.batch_size * (SEQUENCE_LENGTH if part == "g" else 1) * setting.item_bytes
    tree = setting.batch_size * (read_path + write_path) + setting.num_added * write_path
    return setting.seeds * (added + drawn + (0 if part in ("f", "n") else tree))


def limits(part: str, setting: Setting, kernels: float, state_bytes: int, machine: Machine) -> dict[str, float]:
    """Microseconds a step that the bytes and the launches take at least; their sum is the limit."""
    moved = must_move(part, setting)
    by_bytes, by_launches = moved / machine.bandwidth(state_bytes) * 1e6, kernels * machine.launch * 1e6
    return {
        "must_move_bytes": moved,
        "bytes_us": round(by_bytes, 3),
        "launches_us": round(by_launches, 3),
        "limit_us": round(by_bytes + by_launches, 3),
    }
