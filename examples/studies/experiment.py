"""What the studies share: agents with other settings, command lines, tables, plots and result files.

matplotlib is imported on first use, so that a study can be imported without it.
"""

import argparse
import datetime
import importlib.metadata
import json
import os
import platform
import re
import sys
import time
import types
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

import jaxreplay as jr

START = time.perf_counter()  # of the program, nearly


def agent(name: str, **constants: Any) -> Any:
    """The program `examples/agents/NAME.py` as a module, with other values of the constants at its top."""
    path = Path(__file__).resolve().parents[1] / "agents" / f"{name}.py"
    source = path.read_text()
    for constant, value in constants.items():
        source, found = re.subn(rf"^{constant} = [^#\n]*", f"{constant} = {value!r}  ", source, flags=re.MULTILINE)
        assert found == 1, f"{path} has no constant {constant}"
    module = types.ModuleType(f"agent_{name}")
    exec(compile(source, str(path), "exec"), module.__dict__)
    return module


class Parser(argparse.ArgumentParser):
    """The options of a study: --seeds, --seed, --out and --short."""

    def __init__(self, description: str, seeds: int, short_seeds: int = 2):
        super().__init__(description=description, allow_abbrev=False)
        self.short_seeds = short_seeds
        self.add_argument("--seeds", type=int, default=seeds, help=f"number of seeds ({seeds}; {short_seeds} if short)")
        self.add_argument("--seed", type=int, default=0, help="base seed (0)")
        self.add_argument("--out", type=Path, default=Path("out"), help="output folder (out)")
        self.add_argument("--short", action="store_true", help="few seeds and a tiny budget; it does not learn")

    def parse(self) -> argparse.Namespace:
        """The arguments, and `keys` [seeds]. Makes the folder of --out."""
        args = self.parse_args()
        args.seeds = self.short_seeds if args.short else args.seeds
        args.keys = jax.random.split(jax.random.key(args.seed), args.seeds)
        args.out.mkdir(parents=True, exist_ok=True)
        return args


def interval(values: np.ndarray) -> tuple[float, float]:
    """95% bootstrap interval of the mean over seeds."""
    means = np.random.default_rng(0).choice(values, (10_000, len(values))).mean(axis=1)
    return tuple(np.percentile(means, [2.5, 97.5]))


def command() -> str:
    """The command line of this program in its folder, without `--out` and without the folders of absolute paths."""
    words = ["/".join(Path(sys.argv[0]).resolve().parts[-2:]), *sys.argv[1:]]
    if "--out" in words:
        place = words.index("--out")
        del words[place : place + 2]
    return " ".join(Path(word).name if word.startswith("/") else word for word in words)


def summary(figure: Any) -> list[float]:
    """The value of a figure, and the ends of its interval if it has one."""
    return [figure.mean(), *interval(figure)] if isinstance(figure, np.ndarray) else [*np.ravel(figure)]


def text_of(figure: Any, digits: int) -> str:
    """A figure as text, such as "0.50 [0.40, 0.60]"."""
    value, *ends = (f"{x:,.{digits}f}" for x in summary(figure))
    return f"{value} [{', '.join(ends)}]" if ends else value


def about(*packages: str) -> dict[str, Any]:
    """The head of a result file: the command, the date, the device, and versions."""
    versions = {"python": platform.python_version(), "jax": jax.__version__, "jaxreplay": jr.__version__}
    return {
        "command": command(),
        "date": datetime.date.today().isoformat(),
        "device": f"{jax.devices()[0].device_kind}, {os.cpu_count()} cores",
        "versions": {**versions, **{package: importlib.metadata.version(package) for package in packages}},
    }


def report(path: Path, title: str, figures: dict[str, Any], digits: int = 2, *, seeds: int | None = None) -> None:
    """Print a study's figures, and write them into its result file beside its plot `path`.

    A figure is an array [seeds], written with its mean and the interval of the mean; or a tuple of a value and the ends
    of its interval; or a number. `seeds` is needed only if no figure is an array.
    """

    def numbers(values: Any) -> list[float | None]:
        return [None if np.isnan(x) else float(f"{x:.7g}") for x in values]

    print(f"{title}\nmean over seeds [95% bootstrap interval]")
    rows = {}
    for name, figure in figures.items():
        print(f"{text_of(figure, digits):>28}  {name}")
        value, *ends = numbers(summary(figure))
        rows[name] = {"value": value, **({"interval": ends} if ends else {})}
        if isinstance(figure, np.ndarray):
            seeds, rows[name]["seeds"] = len(figure), numbers(figure)
    seconds = round(time.perf_counter() - START)  # compiling included
    cpu_seconds = round(time.process_time())  # of all threads: other programs hardly change it
    head = {**about(*{"gymnax"} & sys.modules.keys()), "seeds": seeds, "seconds": seconds, "cpu_seconds": cpu_seconds}
    lines, found = ([f"{json.dumps(name)}: {json.dumps(x)}" for name, x in of.items()] for of in (head, rows))
    path = path.with_suffix(".json")
    path.write_text("{\n " + ",\n ".join(lines) + ',\n "figures": {\n  ' + ",\n  ".join(found) + "\n }\n}\n")
    print(f"{seconds} s with compiling; wrote {path}")


def plot(
    path: Path,
    title: str,
    panels: dict[str, dict[str, np.ndarray]],
    x: tuple[str, Sequence[Any]],
    y: str,
    columns: int = 1,
    **settings: Any,
) -> None:
    """Plot curves [seeds, points] over `x`, a name and values: means in bands of their 95% bootstrap intervals.

    Each panel has a title, and curves by name. `settings` are those of its axes.
    """
    from matplotlib.figure import Figure

    rows = len(panels) // columns
    figure = Figure(figsize=(3.4 + 2.6 * columns, 1.5 + 2.6 * rows), layout="constrained")
    grid = figure.subplots(rows, columns, squeeze=False, sharex=True, sharey="row")
    for axes, (name, curves) in zip(grid.flat, panels.items(), strict=True):
        for label, seeds in curves.items():
            low, high = np.transpose([interval(point) for point in seeds.T])
            axes.fill_between(x[1], low, high, alpha=0.15, linewidth=0)
            axes.plot(x[1], seeds.mean(axis=0), linewidth=2, label=label)
        axes.set(title=name, **settings)
    figure.suptitle(title)
    for axes in grid[-1]:
        axes.set_xlabel(x[0])
    figure.supylabel(y)
    figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=3, frameon=False)
    figure.savefig(path, dpi=150)
