"""What the ports share: their command line, how they are timed, and the table of the page.

python examples/ports/measure.py   # write the table of .docs/pages/ports.md, made from results/*.json

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
import ast
import inspect
import json
import sys
import textwrap
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

sys.path.append(str(Path(__file__).resolve().parents[1] / "studies"))

from experiment import Parser, about, text_of

HERE = Path(__file__).resolve().parent
RESULTS = HERE / "results"
PAGE = HERE.parent.parent / ".docs" / "pages" / "ports.md"
BEGIN, END = "<!-- table: begin -->\n", "<!-- table: end -->"
Rows = Iterable[dict[str, Any]]
Run = Callable[[int], tuple[Iterable[float], float]]  # of a turn or seed: the returns of its seeds, and its seconds


def parser(agent: str) -> Parser:
    """The command line of a port: --seeds, --seed, --out, --short, and --speed or --check."""
    line = Parser(f"{agent}, original and ported.", seeds=8, short_seeds=1)
    line.add_argument("--speed", action="store_true", help="only time short runs, with buffers of several sizes")
    line.add_argument("--check", action="store_true", help="only check both versions against correct values")
    return line


def run(args: argparse.Namespace, agent: str, packages: Sequence[str], **modes: Callable[..., Any]) -> None:
    """Do what the arguments of a port ask for, and write results after each row.

    The modes: `check` returns, by what is checked, the findings in the original and in the port. `speed` and `train`
    take the arguments and give rows of results.
    """
    name, rows = agent.lower().replace(",", "").replace(" ", "_"), []
    if args.check:
        checks = [{"what": what, "original": old, "port": new} for what, (old, new) in modes["check"]().items()]
        print(*("  ".join(f"{name}: {text}" for name, text in row.items()) for row in checks), sep="\n")
        write(args.out / f"{name}_checks.json", packages, agent=agent, checks=checks)
        return
    for row in modes["speed" if args.speed else "train"](args):
        rows.append(row)
        print(*filter(None, (row["port"], row["task"], f"{row['lines']} lines", *(returns(row) or ()), ratio(row))))
        write(args.out / f"{name}{'_speed' * args.speed}.json", packages, agent=agent, rows=rows)


def count_lines(*parts: Any) -> int:
    """Lines of code in the source of these classes and functions, without blank lines, comments and docstrings."""
    total = 0
    for part in parts:
        source = textwrap.dedent(inspect.getsource(part))
        texts = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Expr)]
        texts = [node for node in texts if isinstance(node.value, ast.Constant)]
        left_out = {line for node in texts for line in range(node.lineno, node.end_lineno + 1)}
        lines = enumerate(map(str.strip, source.splitlines()), 1)
        total += sum(line != "" and line[0] != "#" and number not in left_out for number, line in lines)
    return total


def compiled(train: Callable, keys: jax.Array) -> Run:
    """A run of a compiled training function, which takes keys [seeds] and returns the return of each seed [seeds]."""
    program = jax.jit(train).lower(keys).compile()

    def run(turn: int) -> tuple[np.ndarray, float]:
        start = time.perf_counter()
        return np.asarray(program(keys)), time.perf_counter() - start

    return run


def programs(
    original: Any,
    ports: dict[str, tuple[Any, int]],
    trainer: Callable[[Any, dict[str, Any]], Callable],
    tasks: tuple[str, str],
    settings: dict[str, Any],
    short: dict[str, Any],
    speeds: Sequence[dict[str, Any]],
    rounds: int = 3,
) -> dict[str, Callable[[argparse.Namespace], Rows]]:
    """`train` and `speed` for `run`, where a seed is a lane of a compiled program.

    `trainer` makes a training function of the original, or of one of `ports` (a version and its lines), with settings.
    These are `settings`, of which `short` and one of `speeds` replace some. They fill in the names of the `tasks` of
    training and of `speed`, in which each program runs once before the rounds.
    """
    versions = {"original": original, **{name: version for name, (version, _) in ports.items()}}

    def rows(task: str, settings: dict[str, Any], keys: jax.Array, turns: int, **how: Any) -> Rows:
        runs = {name: compiled(trainer(version, settings), keys) for name, version in versions.items()}
        return compare(runs, ports, task.format(**settings), range(turns), **how)

    def train(args: argparse.Namespace) -> Rows:
        return rows(tasks[0], {**settings, **(short if args.short else {})}, args.keys, 1)

    def speed(args: argparse.Namespace) -> Rows:
        for sizes in speeds[: 1 if args.short else None]:
            changed = {**settings, **sizes}
            yield from rows(tasks[1], changed, args.keys[:1], rounds + 1, warm_up=1, with_returns=False)

    return {"train": train, "speed": speed}


def compare(
    runs: dict[str, Run],
    ports: dict[str, tuple[Any, int]],
    task: str,
    turns: Sequence[int],
    *,
    warm_up: int = 0,
    with_returns: bool = True,
) -> Rows:
    """A row of results for each port, from runs of "original" and of all ports, in turn.

    Every other turn goes in reverse order. The seconds of the first `warm_up` turns are left out. Without returns, the
    runs are too short for theirs to mean anything.
    """
    found = {name: [] for name in runs}
    for number, turn in enumerate(turns):
        for name in [*runs][:: -1 if number % 2 else 1]:
            values, seconds = runs[name](turn)
            found[name].append(([round(float(x), 3) for x in values], round(float(seconds), 5)))
    for name, (_, lines) in ports.items():
        of = {"original": found["original"], "port": found[name]}
        seconds = {version: [x for _, x in results[warm_up:]] for version, results in of.items()}
        values = {version: [x for of_turn, _ in results for x in of_turn] for version, results in of.items()}
        row = {"port": name, "task": task, "lines": lines, "seconds": seconds}
        yield {**row, "returns": values if with_returns else None}


def write(path: Path, packages: Sequence[str], **found: Any) -> None:
    """Write the results of a port: its `agent`, and `rows` or `checks`."""
    head = about(*packages)
    path.write_text(json.dumps({**head, **found}, indent=1) + "\n")
    print(", ".join(f"{package} {version}" for package, version in head["versions"].items()))


COLUMNS = ("agent, task", "ours", "the original", "time", "lines", "command")


def returns(row: dict[str, Any]) -> list[str] | None:
    """The returns of the port and of the original, with their intervals; None if the runs were too short."""
    if row["returns"] is None:
        return None
    return [text_of(np.array(row["returns"][name]), 1) for name in ("port", "original")]


def ratio(row: dict[str, Any]) -> str:
    """The median ratio of the times of runs, with the smallest and the largest; empty if there are fewer than 3."""
    original, port = (np.array(row["seconds"][name]) for name in ("original", "port"))
    ratios = port / original
    return f"{np.median(ratios):.2g} [{ratios.min():.2g}, {ratios.max():.2g}]" if len(ratios) >= 3 else ""


def times(agent: str, port: str, files: Sequence[dict[str, Any]]) -> str:
    """The smallest and the largest median of the times of whole runs, with buffers of several sizes."""
    rows = [row for found in files if found["agent"] == agent for row in found.get("rows", [])]
    ratios = [ratio(row) for row in rows if row["port"] == port and "alone" not in row["task"]]
    ends = sorted({text.split()[0] for text in ratios if text}, key=float)
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
    before, rest = PAGE.read_text().split(BEGIN)
    PAGE.write_text(before + BEGIN + table() + END + rest.split(END)[1])
