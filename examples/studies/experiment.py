"""What the studies share: agents with other settings, command lines, tables, plots and result files.

matplotlib is imported on first use, so that a study can be imported without it.
"""

import argparse
import datetime
import importlib.metadata
import json
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
    low, high = np.percentile(means, [2.5, 97.5])
    return low, high


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


def record(path: Path, figures: dict[str, Any], *, seeds: int | None = None) -> None:
    """Write a study's result file beside its plot `path`: its figures, command, seconds, date and versions.

    A figure is an array [seeds], written with its mean and the interval of the mean; or a tuple of a value and the ends
    of its interval; or a number. `seeds` is needed only if no figure is an array.
    """

    def numbers(values: Any) -> list[float | None]:
        return [None if np.isnan(x) else float(f"{x:.7g}") for x in values]

    rows = {}
    for name, figure in figures.items():
        value, *ends = numbers(summary(figure))
        rows[name] = {"value": value, **({"interval": ends} if ends else {})}
        if isinstance(figure, np.ndarray):
            seeds, rows[name]["seeds"] = len(figure), numbers(figure)
    versions = {"python": platform.python_version(), "jax": jax.__version__, "jaxreplay": jr.__version__}
    if "gymnax" in sys.modules:
        versions["gymnax"] = importlib.metadata.version("gymnax")
    seconds = round(time.perf_counter() - START)  # compiling included
    head = {
        "command": command(),
        "seeds": seeds,
        "date": datetime.date.today().isoformat(),
        "seconds": seconds,
        "cpu_seconds": round(time.process_time()),  # of all threads: other programs hardly change it
        "device": jax.devices()[0].device_kind,
        "versions": versions,
    }
    lines, found = ([f"{json.dumps(name)}: {json.dumps(x)}" for name, x in of.items()] for of in (head, rows))
    path = path.with_suffix(".json")
    path.write_text("{\n " + ",\n ".join(lines) + ',\n "figures": {\n  ' + ",\n  ".join(found) + "\n }\n}\n")
    print(f"{seconds} s with compiling; wrote {path}")


def report(path: Path, title: str, figures: dict[str, Any], digits: int = 2, *, seeds: int | None = None) -> None:
    """Print the figures, and `record` them."""
    print(f"{title}\nmean over seeds [95% bootstrap interval]")
    for name, figure in figures.items():
        print(f"{text_of(figure, digits):>28}  {name}")
    record(path, figures, seeds=seeds)


def heat_maps(
    path: Path,
    title: str,
    rows: list[dict[str, np.ndarray]],
    x: tuple[str, Sequence[Any]],
    y: tuple[str, Sequence[Any]],
    digits: int,
    one_scale: bool = False,
) -> None:
    """Plot mean returns, and their intervals, over two settings: panels [len(y), len(x), seeds] by their titles.

    A setting has a name and values. Each row of panels has its own colors, or all have the same.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 7.4), layout="constrained")
    panels = figure.subplots(len(rows), len(rows[0]), squeeze=False, sharex=True, sharey=True)
    for of_row, row in zip(panels, rows, strict=True):
        means = np.stack([x.mean(axis=-1) for which in (rows if one_scale else [row]) for x in which.values()])
        for axes, (name, values) in zip(of_row, row.items(), strict=True):
            mean = values.mean(axis=-1)
            image = axes.imshow(mean, vmin=means.min(), vmax=means.max(), origin="lower", aspect="auto")
            for i, j in np.ndindex(mean.shape):
                text = text_of(values[i, j], digits).replace(" [", "\n[")
                color = "white" if mean[i, j] < (means.min() + means.max()) / 2 else "black"
                axes.text(j, i, text, ha="center", va="center", fontsize=8.5, color=color)
            axes.set_title(name, fontsize=10)
            axes.set_xticks(range(len(x[1])), x[1])
            axes.set_yticks(range(len(y[1])), y[1])
        figure.colorbar(image, ax=of_row, label="mean return of the second half", shrink=0.8)
    figure.suptitle(title, fontsize=11)
    figure.supxlabel(x[0])
    figure.supylabel(y[0])
    figure.savefig(path, dpi=130)


def legend_below(axes: Any, ncols: int = 2) -> None:
    """Add a legend below the axis label, where it covers no curve. The figure needs constrained layout."""
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.14), ncols=ncols, frameon=False)


def plot_mean(axes: Any, x: np.ndarray, curves: np.ndarray, color: Any, label: str, *, line: str = "-") -> None:
    """Draw the mean of `curves` [seeds, points], in a band of its 95% bootstrap intervals."""
    low, high = np.transpose([interval(point) for point in curves.T])
    axes.fill_between(x, low, high, color=color, alpha=0.15, linewidth=0)
    axes.plot(x, curves.mean(axis=0), line, color=color, linewidth=2, label=label)


def plot(
    path: Path, title: str, x: tuple[str, np.ndarray], y: str, curves: dict[str, np.ndarray], goal: float | None = None
) -> None:
    """Plot learning curves [seeds, points] of each agent over `x`, a name and values, and a dashed line at the goal.

    Each seed is a faint line. From 17 seeds on, a band of the mean's 95% intervals takes their place.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.subplots()
    for number, (name, seeds) in enumerate(curves.items()):
        color, label = f"C{number}", f"{name}: mean of {len(seeds)} seeds"
        if len(seeds) > 16:
            plot_mean(axes, x[1], seeds, color, label)
        else:
            axes.plot(x[1], seeds.T, color=color, alpha=0.35, linewidth=0.8)
            axes.plot(x[1], seeds.mean(axis=0), color=color, linewidth=2.5, label=label)
    if goal is not None:
        axes.axhline(goal, color="gray", linestyle="--", linewidth=1, label=f"return {goal}")
    axes.set(title=title, xlabel=x[0], ylabel=y, xlim=(0, x[1][-1]))
    axes.xaxis.set_major_formatter("{x:,g}")
    legend_below(axes)
    figure.savefig(path, dpi=150)
