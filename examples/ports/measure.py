"""What the ports share: their command line, how they are timed, and the table of the page.

python examples/ports/measure.py           # the table of .docs/pages/ports.md, made from results/*.json
python examples/ports/measure.py --write   # write it into the page

A port is three files: `*_adapter.py` puts jaxreplay behind the other library's interface; the program has the agent,
its settings and its runs; `*_checks.py` compares both versions with correct values, and says at its head what it found.

- A training function takes keys [seeds] and returns the return of each seed [seeds]: the mean over the last quarter,
  fifth or tenth of training. mujax: of the last 32 episodes. brax: of the 10 evaluations during a run. JaxGCRL: the
  share of goals reached in the later half of 10 evaluations.
- The time of a run is the port's divided by the original's, the median of alternating runs, without compilation.
  mujax's time is that of the learner's steps, brax's is that of full buffers, and JaxGCRL's is that of runs after the
  first evaluation. rejax, jaxnasium, JaxGCRL and Stoix were timed on idle cores, memorax and JaxMARL on busy cores.
"""

import argparse
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
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

HERE = Path(__file__).resolve().parent
RESULTS = HERE / "results"
PAGE = HERE.parent.parent / ".docs" / "pages" / "ports.md"
BEGIN, END = "<!-- table: begin -->\n", "<!-- table: end -->"
LAYOUT = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
Rows = Iterable[dict[str, Any]]
MODES = {
    "short": "to see that it runs",
    "speed": "only time short runs, with buffers of several sizes",
    "check": "only check both versions against correct values",
}


def parser(agent: str) -> argparse.ArgumentParser:
    """The command line of a port: --seeds, --seed, --out, --short, and --speed or --check."""
    line = argparse.ArgumentParser(description=f"{agent}, original and ported.", allow_abbrev=False)
    line.add_argument("--seeds", type=int, help="number of seeds (8; 1 if short)")
    line.add_argument("--seed", type=int, default=0, help="base seed (0)")
    line.add_argument("--out", type=Path, default=Path("out"), help="output folder (out)")
    for mode, text in MODES.items():
        line.add_argument(f"--{mode}", action="store_true", help=text)
    return line


def run(
    args: argparse.Namespace,
    name: str,
    packages: Sequence[str],
    *,
    agent: str,
    check: Callable[[], list[dict[str, str]]],
    speed: Callable[[argparse.Namespace], Rows],
    train: Callable[[argparse.Namespace], Rows],
) -> None:
    """Do what the arguments of the port `name` ask for, and write results after each row.

    `check` returns rows of checks (`checks`); `speed` and `train` take the arguments and give rows of results.
    """
    args.seeds = args.seeds or (1 if args.short else 8)
    args.out.mkdir(parents=True, exist_ok=True)
    if args.check:
        write(args.out, f"{name}_checks", packages, agent=agent, checks=check())
        return
    rows: list[dict[str, Any]] = []
    for row in (speed if args.speed else train)(args):
        rows.append(row)
        print(*filter(None, (row["port"], row["task"], f"{row['lines']} lines", *(returns(row) or ()), ratio(row))))
        write(args.out, name + "_speed" * args.speed, packages, agent=agent, rows=rows)


def keys(args: argparse.Namespace) -> jax.Array:
    """A key for each seed."""
    return jax.random.split(jax.random.key(args.seed), args.seeds)


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


def compare(
    original: Callable, ports: dict[str, tuple[Callable, int]], keys: jax.Array, *, task: str, rounds: int = 1
) -> Rows:
    """A row of results for each port; `ports` holds training functions and their numbers of lines.

    All training functions are compiled, then run in turn, `rounds` times each. Every other round runs in reverse order.
    With more than one round each runs once before, and the runs are too short for their returns to mean anything.
    """
    trains = {"": original, **{name: train for name, (train, _) in ports.items()}}
    programs = {name: jax.jit(train).lower(keys).compile() for name, train in trains.items()}
    found: dict[str, list[float]] = {}

    def timed(name: str, _: int) -> float:
        start = time.perf_counter()
        values = np.asarray(jax.block_until_ready(programs[name](keys)))
        found[name] = [round(float(x), 3) for x in values]
        return time.perf_counter() - start

    seconds = in_turn(programs, range(rounds + (rounds > 1)), timed)
    for name, (_, lines) in ports.items():
        of = {"original": "", "port": name}
        values = {which: found[x] for which, x in of.items()} if rounds == 1 else None
        yield result(name, lines, task, {which: seconds[x][-rounds:] for which, x in of.items()}, values)


def in_turn(names: Iterable[str], seeds: Iterable[int], run: Callable[[str, int], Any]) -> dict[str, list]:
    """All results of `run(name, seed)`, by name; every other seed runs in reverse order."""
    found: dict[str, list] = {name: [] for name in names}
    for turn, seed in enumerate(seeds):
        for name in list(found)[:: -1 if turn % 2 else 1]:
            found[name].append(run(name, seed))
    return found


def result(
    port: str, lines: int, task: str, seconds: dict[str, list[float]], returns: dict[str, list[float]] | None
) -> dict[str, Any]:
    """A row of results."""
    times = {name: [round(float(x), 5) for x in values] for name, values in seconds.items()}
    return {"port": port, "task": task, "lines": lines, "seconds": times, "returns": returns}


def checks(original: Any, port: Any, found: dict[str, Callable[[Any], str]]) -> list[dict[str, str]]:
    """Rows of checks: what each function says of the original and of the port."""
    return [{"what": what, "original": of(original), "port": of(port)} for what, of in found.items()]


def write(out: Path, name: str, packages: Sequence[str], **found: Any) -> None:
    """Write the results of a port to `out`/`name`.json: its `agent`, and `rows` or `checks`."""
    words = [Path(sys.argv[0]).name, *sys.argv[1:]]
    if "--out" in words:
        del words[(at := words.index("--out")) : at + 2]
    about = {
        "date": datetime.date.today().isoformat(),
        "command": " ".join(words),
        "versions": {package: importlib.metadata.version(package) for package in ("jax", "jaxreplay", *packages)},
        "python": platform.python_version(),
        "device": f"{jax.devices()[0].device_kind}, {os.cpu_count()} cores",
    }
    (out / f"{name}.json").write_text(json.dumps({**about, **found}, indent=1) + "\n")
    print(", ".join(f"{package} {version}" for package, version in about["versions"].items()))
    for check in found.get("checks", []):
        print("  ".join(f"{name}: {text}" for name, text in check.items()))


def interval(values: np.ndarray) -> np.ndarray:
    """95% bootstrap interval of the mean over seeds."""
    means = np.random.default_rng(0).choice(values, (10_000, len(values))).mean(axis=1)
    return np.percentile(means, [2.5, 97.5])


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


if __name__ == "__main__":
    line = argparse.ArgumentParser(description="The table of the ports' results.")
    line.add_argument("--write", action="store_true", help=f"write it into {PAGE.name}, and do not print it")
    if line.parse_args().write:
        before, rest = PAGE.read_text().split(BEGIN)
        PAGE.write_text(before + BEGIN + table() + END + rest.split(END)[1])
    else:
        print(table(), end="")
