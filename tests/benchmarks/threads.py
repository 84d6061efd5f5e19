"""Threads that add and a thread that draws: `jaxreplay.Shared` compared with one thread and with other limiters.

`python tests/benchmarks/threads.py` prints tables; run it on idle cores. mujax's limiter is measured if
`mujax==0.1.3` is installed. `--smoke` runs everything once. README.md explains the programs.
"""

import argparse
import functools
import queue
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import numpy as np
from harness import WARM_UP_RUNS, percentiles
from settings import Setting

import jaxreplay as jr

SETTING = Setting(capacity=2**14, batch_size=256)
ROWS, BATCH = SETTING.num_added, SETTING.batch_size
RATIO = BATCH / ROWS
SLACK = 4 * BATCH
ACTORS = (1, 2, 4, 8)
KEYS = [jax.random.key(number) for number in range(8)]


class Bare:
    """A buffer and its state, in one thread."""

    def __init__(self):
        self.buffer = jr.ReplayBuffer(capacity=SETTING.capacity, sampler=jr.Prioritized())
        self.rows, self.state = SETTING.batch(ROWS), self.buffer.init(SETTING.batch(ROWS))
        full = SETTING.batch(SETTING.fill_rows())
        for _ in range(SETTING.capacity // SETTING.fill_rows()):
            self.state = self.buffer.add(self.state, full)

    def add(self) -> None:
        self.state = self.buffer.add(self.state, self.rows)

    def draw(self, number: int) -> Any:
        return self.buffer.sample(self.state, KEYS[number % len(KEYS)], BATCH)

    def wait(self) -> None:
        jax.block_until_ready(self.state)

    def cycles(self, count: int, actors: int) -> None:
        """`count` additions and draws, in turn."""
        for number in range(count):
            self.add()
            drawn = self.draw(number)
        jax.block_until_ready((self.state, drawn))


class Threads(Bare):
    """The same calls by threads that wait for each other."""

    def cycles(self, count: int, actors: int) -> None:
        """`count` additions by `actors` threads, and as many draws by this one."""

        def act() -> None:
            for _ in range(count // actors):
                self.add()

        with ThreadPoolExecutor(actors) as pool:
            done = [pool.submit(act) for _ in range(actors)]
            for number in range(count // actors * actors):
                drawn = self.draw(number)
            for future in done:
                future.result()
        jax.block_until_ready(drawn)
        self.wait()


class Shared(Threads):
    """`jaxreplay.Shared`; with a ratio if `limited`."""

    def __init__(self, limited: bool = True):
        super().__init__()
        limits = {"ratio": RATIO, "slack": SLACK} if limited else {}
        self.shared = jr.Shared(self.buffer, self.__dict__.pop("state"), **limits)

    def add(self) -> None:
        self.shared.add(self.rows)

    def draw(self, number: int) -> Any:
        return self.shared.sample(KEYS[number % len(KEYS)], BATCH)

    def wait(self) -> None:
        self.shared.size()


class Mujax(Threads):
    """The same buffer with mujax's limiter and a lock, as mujax's replay uses them."""

    def __init__(self):
        super().__init__()
        from mujax.replay import SampleToInsertRatio

        self.limiter = SampleToInsertRatio(RATIO, min_size=0, error_buffer=SLACK)
        self.lock = threading.Lock()

    def add(self) -> None:
        self.limiter.insert(ROWS)
        with self.lock:
            super().add()

    def draw(self, number: int) -> Any:
        self.limiter.sample(BATCH)
        with self.lock:
            return super().draw(number)


class Queue(Threads):
    """The same buffer, owned by the thread that draws; rows come through a queue."""

    def __init__(self):
        super().__init__()
        self.queue: queue.Queue = queue.Queue(maxsize=SLACK // BATCH)

    def add(self) -> None:
        self.queue.put(self.rows)

    def draw(self, number: int) -> Any:
        self.state = self.buffer.add(self.state, self.queue.get())
        return super().draw(number)


PROGRAMS = {"one thread": Bare, "Shared": Shared, "mujax's limiter": Mujax, "queue": Queue}
CALLS = {"bare": Bare, "Shared": functools.partial(Shared, False), "Shared, ratio": Shared}


class TimedLock:
    """A reentrant lock for a Condition that keeps how long it was held, in microseconds."""

    def __init__(self):
        self._lock, self.held, self._start = threading.RLock(), [], 0.0

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        found = self._lock.acquire(blocking, timeout)
        self._start = time.perf_counter()
        return found

    def release(self) -> None:
        self.held.append((time.perf_counter() - self._start) * 1e6)
        self._lock.release()

    __enter__ = acquire

    def __exit__(self, *_: Any) -> None:
        self.release()

    def _is_owned(self) -> bool:
        return self._lock._is_owned()  # pyright: ignore[reportAttributeAccessIssue]

    _release_save = release

    def _acquire_restore(self, _: Any) -> None:
        self.acquire()


def in_turn(runs: dict[Any, Callable[[], float]], base: Any, count: int) -> dict[Any, dict]:
    """Microseconds (`us`) of each, and the `ratio` to `base`, from `count` alternating runs."""
    times: dict[Any, list[float]] = {key: [] for key in runs}
    for turn in range(WARM_UP_RUNS + count):
        for key in list(runs)[:: -1 if turn % 2 else 1]:
            times[key].append(runs[key]())
    kept = {key: np.array(of_key[WARM_UP_RUNS:]) * 1e6 for key, of_key in times.items()}
    return {key: {"us": percentiles(x, 2), "ratio": percentiles(x / kept[base])} for key, x in kept.items()}


def per_call(call: Callable[[int], Any], wait: Callable[[], Any], count: int) -> float:
    """Seconds of a call, of `count` calls and the wait for the last one."""
    start = time.perf_counter()
    for number in range(count):
        found = call(number)
    jax.block_until_ready(found)
    wait()
    return (time.perf_counter() - start) / count


def measure_calls(runs: int, count: int) -> dict[str, dict]:
    """Additions and draws of one thread: `count` additions, then as many draws, so that nobody is ahead."""
    programs = {name: make() for name, make in CALLS.items()}
    calls: dict[tuple[str, str], Callable[[], float]] = {}
    for name, program in programs.items():
        few = min(count, SLACK // BATCH)  # within the slack

        def both(draws: bool, program: Bare = program, few: int = few) -> float:
            spent = {False: 0.0, True: 0.0}
            for _ in range(count // few):
                spent[False] += per_call(lambda _: program.add(), program.wait, few)
                spent[True] += per_call(program.draw, program.wait, few)
            return spent[draws] / (count // few)

        calls["add", name], calls["draw", name] = functools.partial(both, False), functools.partial(both, True)
    found = {}
    for call in ("add", "draw"):
        of_call = {name: run for (which, name), run in calls.items() if which == call}
        found[call] = in_turn(of_call, "bare", runs)
    return found


def measure_threads(runs: int, count: int, actors: tuple[int, ...]) -> dict[str, dict]:
    """By number of actors: an addition and a draw together."""
    programs = dict(_installed())
    found = {}
    for number in actors:

        def cycles(program: Bare, number: int = number) -> float:
            start = time.perf_counter()
            program.cycles(count, number)
            return (time.perf_counter() - start) / count

        found[str(number)] = in_turn(
            {name: functools.partial(cycles, program) for name, program in programs.items()}, "one thread", runs
        )
    return found


def _installed() -> Iterator[tuple[str, Bare]]:
    for name, make in PROGRAMS.items():
        try:
            yield name, make()
        except ImportError as error:
            print(f"{name}: {error.name} is not installed.")


def measure_lock(count: int, actors: tuple[int, ...]) -> dict[str, dict[str, float]]:
    """How long a lock is held, in microseconds, by number of actors: the median and the 99th percentile."""
    found = {}
    for number in actors:
        program, lock = Shared(), TimedLock()
        program.cycles(count, number)  # compiles
        program.shared._turns._changed = threading.Condition(lock)  # pyright: ignore[reportArgumentType]
        program.cycles(count, number)
        found[str(number)] = percentiles(lock.held, 1, (1, 99))
    return found


def text(result: dict[str, Any]) -> str:
    """The tables."""

    def cell(figure: dict[str, dict[str, float]]) -> str:
        us, ratio = figure["us"], figure["ratio"]
        return f"{us['median']:.0f} [{us['p10']:.0f}-{us['p90']:.0f}], x{ratio['median']:.2f}"

    names = list(next(iter(result["calls"].values())))
    lines = [f"| call, us | {' | '.join(names)} |", "| --- " * (len(names) + 1) + "|"]
    lines += [f"| {call} | {' | '.join(cell(of[name]) for name in names)} |" for call, of in result["calls"].items()]
    names = list(next(iter(result["threads"].values())))
    lines += ["", f"| actors | {' | '.join(names)} | lock held, median and 99% |", "| --- " * (len(names) + 2) + "|"]
    for actors, of in result["threads"].items():
        held = result["lock"][actors]
        cells = " | ".join(cell(of[name]) for name in names)
        lines.append(f"| {actors} | {cells} | {held['median']:.0f}, {held['p99']:.0f} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--smoke", action="store_true", help="everything once; the figures mean nothing")
    args = parser.parse_args()
    runs, count, actors = (1, 16, ACTORS[:2]) if args.smoke else (15, 160, ACTORS)
    result = {
        "calls": measure_calls(runs, count),
        "threads": measure_threads(runs, count, actors),
        "lock": measure_lock(count, actors),
    }
    print(text(result))


if __name__ == "__main__":
    main()
