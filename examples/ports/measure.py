"""Measurements of the ports: an agent as its authors wrote it, and the same agent on jaxreplay.

python examples/ports/measure.py --table   # the tables of .docs/pages/ports.md, made from results/*.json
python examples/ports/measure.py --write   # write them into the page

A training function takes keys [seeds] and returns the return of each seed [seeds]. A script compares functions
with `compare_all`, counts the lines of its adapter with `count_lines`, and writes its results with `write`.
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
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

HERE = Path(__file__).resolve().parent
sys.path.append(str(HERE.parent))
# The shared modules of the examples are found only on that path, so they are imported after it.
from experiment import Parser, command, interval  # noqa: E402

RESULTS = HERE / "results"
PAGE = HERE.parent.parent / ".docs" / "pages" / "ports.md"
BEGIN, END = "<!-- tables: begin -->\n", "<!-- tables: end -->"
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
    original: Callable, ports: dict[str, Callable], *args: Any, rounds: int, returns: bool = True
) -> dict[str, dict[str, Any]]:
    """A row of results for each port. All training functions are compiled, then run in turn, `rounds` times each.

    Every other round runs in reverse order. Before the first round each runs once, unless there is only one round.
    Use `returns=False` if the runs are too short for their returns to mean anything.
    """
    compiled = {name: compile_one(train, *args) for name, train in {"": original, **ports}.items()}
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
        return {**kept, "returns": {of: found[name] for of, name in names.items()} if returns else None}

    return {port: row(port) for port in ports}


def show(row: dict[str, Any]) -> None:
    """Print a row as in the tables."""
    for columns, cells in ((RETURNS, returns(row)), (SPEED, speed(row))):
        if cells is not None:
            print("  ".join(f"{name}: {text}" for name, text in zip(columns[1:], cells, strict=True)), flush=True)


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


RETURNS = ("agent", "port", "task", "lines", "return, original", "return, port")
SPEED = (
    "agent",
    "port",
    "task",
    "time of a run, port / original",
    "temporaries, MB",
    "time to compile, port / original",
)


def returns(row: dict[str, Any]) -> list[str] | None:
    """A row of the table of returns, without its first cell; None if the runs were too short."""
    if row["returns"] is None:
        return None
    values = [np.array(row["returns"][name]) for name in ("original", "port")]
    means = ["{:.1f} [{:.1f}, {:.1f}]".format(x.mean(), *interval(x)) for x in values]
    return [row["port"], row["task"], str(row["lines"]), *means]


def speed(row: dict[str, Any]) -> list[str] | None:
    """A row of the table of speed, without its first cell; None if there were fewer than 3 runs."""
    original, port = (np.array(row["seconds"][name]) for name in ("original", "port"))
    if len(original) < 3:
        return None
    ratios = port / original
    run = f"{np.median(ratios):.2g} [{ratios.min():.2g}, {ratios.max():.2g}]"
    if row["memory_bytes"] is None:  # threads that run several programs
        return [row["port"], row["task"], run, "-", "-"]
    memory = " → ".join(f"{row['memory_bytes'][name]['temporaries'] / 1e6:.3g}" for name in ("original", "port"))
    compiled = row["compile_seconds"]["port"] / row["compile_seconds"]["original"]
    return [row["port"], row["task"], run, memory, f"{compiled:.2f}"]


def markdown(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [columns, ["---"] * len(columns), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def tables() -> str:
    """The tables of the page: measurements, checks and versions."""
    files = {path.stem: json.loads(path.read_text()) for path in sorted(RESULTS.glob("*.json"))}
    rows = [(found["agent"], row) for found in files.values() for row in found.get("rows", [])]
    measured = [[[agent, *cells] for agent, row in rows if (cells := of(row))] for of in (returns, speed)]
    checks = [
        [found["agent"], check["what"], check["original"], check["port"]]
        for found in files.values()
        for check in found.get("checks", [])
    ]
    versions = [
        [
            f"`{found['command']}`",
            found["date"],
            ", ".join(" ".join(item) for item in found["versions"].items()),
            f"{found['device']}, Python {found['python']}",
        ]
        for found in files.values()
    ]
    return "\n".join(
        [
            markdown(RETURNS, measured[0]),
            markdown(SPEED, measured[1]),
            markdown(("agent", "check", "original", "port"), checks),
            markdown(("command", "date", "versions", "device"), versions),
        ]
    )


def main() -> None:
    line = Parser("Tables of the ports' results.")
    line.add_argument("--table", action="store_true", help="print the tables (the default)")
    line.add_argument("--write", action="store_true", help=f"write them into {PAGE.name}")
    args = line.parse()
    if not args.write:
        print(tables(), end="")
        return
    before, rest = PAGE.read_text().split(BEGIN)
    PAGE.write_text(before + BEGIN + tables() + END + rest.split(END)[1])


if __name__ == "__main__":
    main()
