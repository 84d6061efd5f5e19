"""Threads that add and a thread that draws: `jaxreplay.Shared` compared with one thread and with a queue.

`python tests/benchmarks/threads.py` prints tables; run it on idle cores. `--smoke` runs everything once. README.md
explains the programs.
"""

import argparse
import functools
import queue
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
from harness import in_turn
from settings import Setting
from tables import spread, table

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


PROGRAMS = {"one thread": Bare, "Shared": Shared, "queue": Queue}
CALLS = {"bare": Bare, "Shared": functools.partial(Shared, False), "Shared, ratio": Shared}


def per_call(call: Callable[[int], Any], wait: Callable[[], Any], count: int) -> float:
    """Seconds of a call, of `count` calls and the wait for the last one."""
    start = time.perf_counter()
    for number in range(count):
        found = call(number)
    jax.block_until_ready(found)
    wait()
    return (time.perf_counter() - start) / count


def measure_calls(runs: int, count: int) -> dict[str, dict]:
    """Additions and draws of one thread: as many as the slack allows, then as many draws, so that nobody is ahead."""
    programs, few = {name: make() for name, make in CALLS.items()}, min(count, SLACK // BATCH)

    def both(program: Bare, which: int) -> float:
        spent = [0.0, 0.0]
        for _ in range(count // few):
            spent[0] += per_call(lambda _: program.add(), program.wait, few)
            spent[1] += per_call(program.draw, program.wait, few)
        return spent[which] / (count // few)

    def measure(which: int) -> dict[str, dict]:
        return in_turn({k: functools.partial(both, x, which) for k, x in programs.items()}, lambda _: "bare", runs)

    return {"add": measure(0), "draw": measure(1)}


def measure_threads(runs: int, count: int, actors: tuple[int, ...]) -> dict[str, dict]:
    """By number of actors: an addition and a draw together."""
    programs = {name: make() for name, make in PROGRAMS.items()}

    def cycles(program: Bare, number: int) -> float:
        start = time.perf_counter()
        program.cycles(count, number)
        return (time.perf_counter() - start) / count

    def measure(number: int) -> dict[str, dict]:
        runs_of = {name: functools.partial(cycles, x, number) for name, x in programs.items()}
        return in_turn(runs_of, lambda _: "one thread", runs)

    return {str(number): measure(number) for number in actors}


def _table(title: str, found: dict[str, dict]) -> str:
    """Lines by name, columns by program."""

    def cell(figure: dict[str, dict[str, float]]) -> str:
        return f"{spread(figure['us'])}, x{figure['ratio']['median']:.2f}"

    names = list(next(iter(found.values())))
    return table([title, *names], [[row, *map(cell, its.values())] for row, its in found.items()])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--smoke", action="store_true", help="everything once; the figures mean nothing")
    args = parser.parse_args()
    runs, count, actors = (1, 16, ACTORS[:2]) if args.smoke else (15, 160, ACTORS)
    print(_table("call, us", measure_calls(runs, count)), end="\n\n")
    print(_table("actors", measure_threads(runs, count, actors)))


if __name__ == "__main__":
    main()
