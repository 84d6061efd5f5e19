"""Programs that are timed in turn: compiled scans that carry their state, and Python loops."""

import gc
import random
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from hlo import count_kernels
from jax import lax

WARM_UP_RUNS = 2
MIN_STEPS, MAX_STEPS = 3, 500


def percentiles(values: Any, digits: int = 3, ends: tuple[int, int] = (10, 90)) -> dict[str, float]:
    """Median, 10th and 90th percentile, or other ends."""
    low, high = ends
    names = {"median": 50, f"p{low}": low, f"p{high}": high}
    values = np.asarray(values, np.float64)
    return {name: round(float(np.percentile(values, share)), digits) for name, share in names.items()}


def steps_for(seconds_per_step: float, run_seconds: float) -> int:
    return int(np.clip(run_seconds / max(seconds_per_step, 1e-9), MIN_STEPS, MAX_STEPS))


def compiled_scan(step: Callable, carry: Any, steps: int) -> Any:
    """`run(carry, key) -> carry`, compiled for a carry that may be abstract and is donated."""

    def run(carry, key):
        return lax.scan(lambda carry, key: (step(carry, key), None), carry, jax.random.split(key, steps))[0]

    return jax.jit(run, donate_argnums=0).lower(carry, jax.random.key(0)).compile()


class ScanProgram:
    """A jitted `lax.scan` over `step(carry, key)`, whose carry goes from run to run.

    Attributes:
      steps: steps a run, adapted by `calibrate`.
      compile_seconds: to trace, lower and compile.
    """

    def __init__(self, step: Callable, carry: Any, steps: int = 200):
        self._step, self._carry, self._runs = step, carry, 0
        self.steps = steps
        self.carry_bytes = sum(x.nbytes for x in jax.tree.leaves(carry))
        started = time.perf_counter()
        self._compile()
        self.compile_seconds = time.perf_counter() - started
        self.kernels = count_kernels(self._run.as_text(), steps)
        self._memory = self._run.memory_analysis()

    def _compile(self) -> None:
        self._run = compiled_scan(self._step, self._carry, self.steps)

    def __call__(self) -> float:
        """One run; seconds a step."""
        key = jax.block_until_ready(jax.random.key(self._runs))
        self._runs += 1
        started = time.perf_counter()
        self._carry = jax.block_until_ready(self._run(self._carry, key))
        return (time.perf_counter() - started) / self.steps

    def calibrate(self, run_seconds: float) -> None:
        """Warm up; compile again where a run would be far from `run_seconds`."""
        first = self()
        slow = first * self.steps > 4 * run_seconds
        steps = steps_for(first if slow else self(), run_seconds)
        if not 0.4 <= steps / self.steps <= 4:
            self.steps = steps
            self._compile()
            self()

    def facts(self) -> dict[str, Any]:
        temporary = getattr(self._memory, "temp_size_in_bytes", None)
        peak = None
        if self._memory is not None:
            memory = self._memory
            peak = memory.argument_size_in_bytes + memory.output_size_in_bytes + temporary - memory.alias_size_in_bytes
        return {
            "compile_s": round(self.compile_seconds, 2),
            "temporary_bytes": temporary,
            "peak_bytes": peak,
            "carry_bytes": self.carry_bytes,
            "kernels": self.kernels,
        }


class LoopProgram:
    """A Python loop over `step()`, for host libraries and eager calls."""

    def __init__(self, step: Callable[[], Any]):
        self._step, self.steps = step, MIN_STEPS

    def __call__(self) -> float:
        started = time.perf_counter()
        for _ in range(self.steps):
            self._step()
        return (time.perf_counter() - started) / self.steps

    def calibrate(self, run_seconds: float) -> None:
        self()
        self.steps = steps_for(self(), run_seconds)

    def facts(self) -> dict[str, Any]:
        return {}


def in_turn(
    programs: dict[Any, Callable[[], float]],
    base: Callable[[Any], Any],
    runs: int,
    ends: tuple[int, int] = (10, 90),
) -> dict[Any, dict]:
    """Microseconds (`us`) of each program, which returns seconds, and the `ratio` to its base, if it has one.

    They take turns, of which the first do not count. The order of each turn is drawn: what runs after a library whose
    threads still spin, or that filled the caches, takes longer.
    """
    times, order = {key: [] for key in programs}, random.Random(0)
    for _ in range(WARM_UP_RUNS + runs):
        for key in order.sample([*programs], len(programs)):
            times[key].append(programs[key]() * 1e6)
    times = {key: np.array(of_key[WARM_UP_RUNS:]) for key, of_key in times.items()}
    figures = {key: {"us": percentiles(of_key, 2, ends)} for key, of_key in times.items()}
    for key in figures:
        if base(key) in times:
            figures[key]["ratio"] = percentiles(times[key] / times[base(key)], 3, ends)
    return figures


def measure(
    makers: dict[Any, Callable],
    base: Callable[[Any], Any],
    runs: int,
    run_seconds: float,
    ends: tuple[int, int] = (10, 90),
) -> dict[Any, dict]:
    """Make programs, and time them in turn.

    Args:
      makers: functions that make a program, by key.
      base: maps a key to that of the program that its time is divided by, run by run.
      runs: runs of each program that count, after some that do not.
      run_seconds: what a run should last.
      ends: the percentiles that are given beside the medians.

    Returns:
      By key: microseconds a step (`us`), `ratio` to the base, and the program's facts; or `error`, one line of text.
    """
    programs, figures = {}, {}
    for key, make in makers.items():
        try:
            programs[key] = make()
            programs[key].calibrate(run_seconds)
        except Exception as error:  # a peer that fails must not end the benchmark
            programs.pop(key, None)
            figures[key] = {"error": f"{type(error).__name__}: {(str(error).strip() or '-').splitlines()[0][:120]}"}
    for key, found in in_turn(programs, base, runs, ends).items():
        figures[key] = {**found, "steps": programs[key].steps, **programs[key].facts()}
    programs.clear()
    gc.collect()
    jax.clear_caches()
    return figures
