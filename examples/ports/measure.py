"""Measurements of the ports: an agent as its authors wrote it, and the same agent on jaxreplay.

python examples/ports/measure.py           # the table of .docs/pages/ports.md, made from results/*.json
python examples/ports/measure.py --write   # write it into the page

A training function takes keys [seeds] and returns the return of each seed [seeds]. A script compares functions
with `compare_all`, counts the lines of its adapter with `count_lines`, and writes its results with `write`.

- A return is the mean over the last quarter, fifth or tenth of training. mujax: of the last 32 episodes. brax: of the
  10 evaluations during a run. JaxGCRL: the share of goals reached in the later half of 10 evaluations.
- The time of a run is the port's divided by the original's, the median of alternating runs. Compile time is separate.
  mujax's time is that of the learner's steps, brax's is that of full buffers, and JaxGCRL's is that of runs after the
  first evaluation. rejax, jaxnasium, JaxGCRL and Stoix were timed on idle cores, memorax and JaxMARL on busy cores.
- Temporaries, in the result files, are the memory of the compiled program without its arguments. The arguments are keys
  only, so they include the replay memory.
"""

import datetime
import importlib.metadata
import inspect
import io
import json
import os
import platform
import sys
import textwrap
import time
import tokenize
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

HERE = Path(__file__).resolve().parent
sys.path.append(str(HERE.parent / "studies"))
# The shared modules of the examples are found only on that path, so they are imported after it.
from experiment import Parser, command, interval  # noqa: E402 (see above)

RESULTS = HERE / "results"
PAGE = HERE.parent.parent / ".docs" / "pages" / "ports.md"
BEGIN, END = "<!-- table: begin -->\n", "<!-- table: end -->"
MEASURED = ("compile_seconds", "memory_bytes")
LAYOUT = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}


def parser(description: str, seeds: int = 8) -> Parser:
    """The command line of a port: --seeds, --seed, --out, --short, and --speed or --check."""
    result = Parser(description)
    result.add_experiment(seeds=seeds)
    result.add_argument("--speed", action="store_true", help="only time short runs, with buffers of several sizes")
    result.add_argument("--check", action="store_true", help="only check both versions against correct values")
    return result


def count_lines(*parts: Any) -> int:
    """Lines of code in the source of these classes and functions, without blank lines, comments and docstrings."""
    total = 0
    for part in parts:
        source, lines, statement = textwrap.dedent(inspect.getsource(part)), set(), []
        for token in tokenize.generate_tokens(io.StringIO(source).readline):
            if token.type not in LAYOUT:
                statement.append(token)
            elif token.type == tokenize.NEWLINE:
                if [each.type for each in statement] != [tokenize.STRING]:
                    lines |= {line for each in statement for line in range(each.start[0], each.end[0] + 1)}
                statement = []
        total += len(lines)
    return total


def compile_one(train: Callable, *args: Any) -> dict[str, Any]:
    """The compiled training function, the compile time in seconds, and the device memory of a run in bytes."""
    start = time.perf_counter()
    program = jax.jit(train).lower(*args).compile()
    seconds = round(time.perf_counter() - start, 2)
    sizes = program.memory_analysis()
    kinds = {"temporaries": "temp", "arguments": "argument", "outputs": "output"}
    memory = {kind: int(getattr(sizes, f"{name}_size_in_bytes")) for kind, name in kinds.items()}
    return {"program": program, "compile_seconds": seconds, "memory_bytes": memory}


def compare_all(
    original: Callable, ports: dict[str, tuple[Callable, int]], *args: Any, task: str, rounds: int, returns: bool = True
) -> list[dict[str, Any]]:
    """A row of results for each port, printed; `ports` holds training functions and their numbers of lines.

    All training functions are compiled, then run in turn, `rounds` times each. Every other round runs in reverse order.
    Before the first round each runs once, unless there is only one round. Use `returns=False` if the runs are too short
    for their returns to mean anything.
    """
    trains = {"": original, **{name: train for name, (train, _) in ports.items()}}
    compiled = {name: compile_one(train, *args) for name, train in trains.items()}
    seconds: dict[str, list[float]] = {name: [] for name in compiled}
    found = {}
    for turn in range(rounds + (rounds > 1)):
        for name in list(compiled)[:: -1 if turn % 2 else 1]:
            start = time.perf_counter()
            values = np.asarray(jax.block_until_ready(compiled[name]["program"](*args)))
            seconds[name].append(round(time.perf_counter() - start, 4))
            found[name] = [round(float(x), 3) for x in values]

    def row(port: str) -> dict[str, Any]:
        names = {"original": "", "port": port}
        kept = {key: {of: compiled[name][key] for of, name in names.items()} for key in MEASURED}
        kept["seconds"] = {of: seconds[name][-rounds:] for of, name in names.items()}
        kept["returns"] = {of: found[name] for of, name in names.items()} if returns else None
        result = {"port": port, "task": task, "lines": ports[port][1], **kept}
        show(result)
        return result

    return [row(port) for port in ports]


def in_turn(names: Iterable[str], seeds: list[int], run: Callable[[str, int], Any]) -> Iterator[dict[str, list]]:
    """After each seed all results of `run(name, seed)`, by name; every other seed runs in reverse order."""
    found: dict[str, list] = {name: [] for name in names}
    for turn, seed in enumerate(seeds):
        for name in list(found)[:: -1 if turn % 2 else 1]:
            found[name].append(run(name, seed))
            print(f"{name or 'original'}, seed {seed}: {found[name][-1]}", flush=True)
        yield found


def time_in_turn(programs: dict[str, Callable], states: dict[str, Any], rounds: int) -> dict[str, list[float]]:
    """Seconds of each `program(state, key)`, which donates the state and returns a new one first, in each round."""
    seconds: dict[str, list[float]] = {name: [] for name in programs}
    for turn in range(rounds + 1):  # the first compiles
        for name in list(programs)[:: -1 if turn % 2 else 1]:
            start = time.perf_counter()
            states[name] = jax.block_until_ready(programs[name](states[name], jax.random.key(turn)))[0]
            seconds[name].append(time.perf_counter() - start)
    return {name: values[1:] for name, values in seconds.items()}


def show(row: dict[str, Any]) -> None:
    """Print a row of results."""
    cells = [row["port"], row["task"], f"{row['lines']} lines", *(returns(row) or ()), ratio(row)]
    print("  ".join(cell for cell in cells if cell), flush=True)


def row_of_times(
    port: str, lines: int, task: str, seconds: dict[str, list[float]], returns: dict[str, list[float]] | None
) -> dict[str, Any]:
    """A row of results, printed; a run compiles several programs, so memory and compile time are not given."""
    times = {name: [round(float(x), 5) for x in values] for name, values in seconds.items()}
    unknown = {"memory_bytes": None, "compile_seconds": None}
    result = {"port": port, "task": task, "lines": lines, "seconds": times, "returns": returns, **unknown}
    show(result)
    return result


def write(out: Path, name: str, packages: Sequence[str], **found: Any) -> None:
    """Write the results of a port to `out`/`name`.json: its `agent`, and `rows`, `checks` or both."""
    about = {
        "date": datetime.date.today().isoformat(),
        "command": command(),
        "versions": {package: importlib.metadata.version(package) for package in ("jax", "jaxreplay", *packages)},
        "python": platform.python_version(),
        "device": f"{jax.devices()[0].device_kind}, {os.cpu_count()} cores",
    }
    path = out / f"{name}.json"
    path.write_text(json.dumps({**about, **found}, indent=1) + "\n")
    for check in found.get("checks", []):
        print("  ".join(f"{name}: {text}" for name, text in check.items()))
    print(f"wrote {path}")


COLUMNS = ("agent, task", "ours", "the original", "time", "lines", "command")


def returns(row: dict[str, Any]) -> list[str] | None:
    """The returns of the port and of the original, with their intervals; None if the runs were too short."""
    if row["returns"] is None:
        return None
    values = [np.array(row["returns"][name]) for name in ("port", "original")]
    return ["{:.1f} [{:.1f}, {:.1f}]".format(x.mean(), *interval(x)) for x in values]


def ratio(row: dict[str, Any]) -> str:
    """The median ratio of the times of runs, with the smallest and the largest; empty if there are fewer than 3."""
    original, port = (np.array(row["seconds"][name]) for name in ("original", "port"))
    ratios = port / original
    return f"{np.median(ratios):.2g} [{ratios.min():.2g}, {ratios.max():.2g}]" if len(ratios) >= 3 else ""


def times(agent: str, port: str, files: Sequence[dict[str, Any]]) -> str:
    """The smallest and the largest median of the times of whole runs, with buffers of several sizes."""
    rows = [row for found in files if found["agent"] == agent for row in found.get("rows", [])]
    medians = [
        ratio(row).split()[0] for row in rows if row["port"] == port and "alone" not in row["task"] and ratio(row)
    ]
    ends = sorted({*medians}, key=float)
    return " to ".join(ends if len(ends) < 2 else (ends[0], ends[-1])) or "-"


def table() -> str:
    """The table of the page: a row for each agent and task, with all ports that have returns."""
    files = {path.stem: json.loads(path.read_text()) for path in sorted(RESULTS.glob("*.json"))}
    lines = [COLUMNS, ["---"] * len(COLUMNS)]
    for stem, found in files.items():
        agent, command = found["agent"], found["command"].removeprefix("ports/").partition(" --seeds")[0]
        rows = [row for row in found.get("rows", []) if row["returns"] is not None]
        for task in dict.fromkeys(row["task"] for row in rows):
            ports = [row for row in rows if row["task"] == task]
            ours = "; ".join(f"{row['port']}: {returns(row)[0]}" for row in ports)
            time = "; ".join(times(agent, row["port"], [*files.values()]) for row in ports)
            counts = "; ".join(str(row["lines"]) for row in ports)
            link = f"[`{command}`](../../examples/ports/results/{stem}.json)"
            lines.append([f"{agent}, {task}", ours, returns(ports[0])[1], time, counts, link])
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def main() -> None:
    line = Parser("The table of the ports' results.")
    line.add_argument("--write", action="store_true", help=f"write it into {PAGE.name}, and do not print it")
    if not line.parse().write:
        print(table(), end="")
        return
    before, rest = PAGE.read_text().split(BEGIN)
    PAGE.write_text(before + BEGIN + table() + END + rest.split(END)[1])


if __name__ == "__main__":
    main()
