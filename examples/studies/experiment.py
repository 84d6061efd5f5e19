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
    """A parser of the options of a study, some of which are smaller with --short."""

    def __init__(self, description: str):
        super().__init__(description=description, allow_abbrev=False)
        self.counts: dict[str, tuple[int, int]] = {}

    def add_count(self, name: str, what: str, default: int, short: int) -> None:
        """Add an integer option with another default for --short."""
        self.add_argument(f"--{name}", type=int, help=f"{what} ({default}; {short} if short)")
        self.counts[name] = default, short

    def add_experiment(self, seeds: int, short_seeds: int = 2, short: str = "a tiny budget; it does not learn") -> None:
        """Add the options of every study: --seeds, --seed, --out and --short."""
        self.add_count("seeds", "number of seeds", seeds, short_seeds)
        self.add_argument("--seed", type=int, default=0, help="base seed (0)")
        self.add_argument("--out", type=Path, default=Path("out"), help="output folder (out)")
        self.add_argument("--short", action="store_true", help=short)

    def parse(self) -> argparse.Namespace:
        """The arguments, with defaults filled in. Makes the folder of --out."""
        args = self.parse_args()
        for name, defaults in self.counts.items():
            if getattr(args, name) is None:
                setattr(args, name, defaults[args.short])
        args.out.mkdir(parents=True, exist_ok=True)
        return args

    def check_multiple(self, name: str, count: int, of: int) -> None:
        """End with an error unless the option --`name` is a multiple."""
        if count % of:
            self.error(f"argument --{name}: {count} is not a multiple of {of}")


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


def record(path: Path, figures: dict[str, Any], *, seeds: int | None = None) -> None:
    """Write a study's result file `path`: its figures, command, seconds, date and versions.

    A figure is an array [seeds], written with its mean and the interval of the mean; or a tuple of a value and the ends
    of its interval; or a number. `seeds` is needed only if no figure is an array.
    """

    def numbers(values: Any) -> list[float | None]:
        return [None if np.isnan(x) else float(f"{x:.7g}") for x in np.ravel(values)]

    rows = []
    for name, figure in figures.items():
        of_seeds = {}
        if isinstance(figure, np.ndarray):
            seeds, of_seeds = len(figure), {"seeds": numbers(figure)}
            figure = figure.mean(), *interval(figure)
        value, *ends = numbers(figure)
        row = {"value": value, **({"interval": ends} if ends else {}), **of_seeds}
        rows.append(f"  {json.dumps(name)}: {json.dumps(row)}")
    versions = {"python": platform.python_version(), "jax": jax.__version__, "jaxreplay": jr.__version__}
    if "gymnax" in sys.modules:
        versions["gymnax"] = importlib.metadata.version("gymnax")
    head = {
        "command": command(),
        "seeds": seeds,
        "date": datetime.date.today().isoformat(),
        "seconds": round(time.perf_counter() - START),  # compiling included
        "cpu_seconds": round(time.process_time()),  # of all threads: other programs hardly change it
        "device": jax.devices()[0].device_kind,
        "versions": versions,
    }
    lines = [f" {json.dumps(name)}: {json.dumps(value)}" for name, value in head.items()]
    path.write_text("{\n" + ",\n".join([*lines, ' "figures": {\n' + ",\n".join(rows) + "\n }"]) + "\n}\n")


def text_of(figure: Any, digits: int) -> str:
    """A figure of `record` as text, such as "0.50 [0.40, 0.60]"."""
    if isinstance(figure, np.ndarray):
        figure = figure.mean(), *interval(figure)
    value, *ends = (f"{x:,.{digits}f}" for x in np.ravel(figure))
    return f"{value} [{', '.join(ends)}]" if ends else value


def report(path: Path, title: str, figures: dict[str, Any], digits: int = 2, seeds: int | None = None) -> None:
    """Print figures by their names "ROW, COLUMN" in a table, and `record` them beside the plot `path`."""
    table: dict[str, dict[str, str]] = {}
    for name, figure in figures.items():
        row, _, column = name.rpartition(", ")
        table.setdefault(row, {})[column] = text_of(figure, digits)
    columns = list(dict.fromkeys(column for row in table.values() for column in row))
    first, width = 2 + max(map(len, table)), 2 + max(22, *map(len, columns))
    print(f"{title}\nmean over seeds [95% bootstrap interval]\n{'':{first}}", end="")
    print("".join(f"{column:>{width}}" for column in columns))
    for name, row in table.items():
        print(f"{name:{first}}" + "".join(f"{row.get(column, ''):>{width}}" for column in columns))
    save(path, figures, seeds=seeds)


def save(path: Path, figures: dict[str, Any], *, seeds: int | None = None) -> None:
    """`record` the figures of a study beside its plot `path`, and print where they are."""
    record(path.with_suffix(".json"), figures, seeds=seeds)
    written = " and ".join(str(x) for x in dict.fromkeys((path, path.with_suffix(".json"))))
    print(f"{time.perf_counter() - START:.0f} s with compiling; wrote {written}")


def heat_map(axes: Any, values: np.ndarray, low: float, high: float, digits: int = 2) -> Any:
    """Draw means of `values` [rows, columns, seeds] and their intervals, in colors from `low` to `high`."""
    means = values.mean(axis=-1)
    image = axes.imshow(means, vmin=low, vmax=high, cmap="viridis", origin="lower", aspect="auto")
    for row, column in np.ndindex(means.shape):
        text = text_of(values[row, column], digits).replace(" [", "\n[")
        color = "white" if means[row, column] < (low + high) / 2 else "black"
        axes.text(column, row, text, ha="center", va="center", fontsize=8.5, color=color)
    axes.tick_params(length=0)
    return image


def legend_below(axes: Any, ncols: int = 2) -> None:
    """Add a legend below the axis label, where it covers no curve. The figure needs constrained layout."""
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.14), ncols=ncols, frameon=False)


def plot_mean(axes: Any, x: np.ndarray, curves: np.ndarray, color: Any, label: str, *, line: str = "-") -> None:
    """Draw the mean of `curves` [seeds, points], in a band of its 95% bootstrap intervals."""
    low, high = np.transpose([interval(point) for point in curves.T])
    axes.fill_between(x, low, high, color=color, alpha=0.15, linewidth=0)
    axes.plot(x, curves.mean(axis=0), line, color=color, linewidth=2, label=label)


def plot(
    path: Path,
    title: str,
    env_steps: np.ndarray,
    curves: dict[str, np.ndarray],
    *,
    ylabel: str,
    goal: tuple[float, str] | None = None,
    xlabel: str = "environment steps per seed",
) -> None:
    """Plot learning curves [seeds, points] of each agent, and a dashed line at the goal.

    Each seed is a faint line. From 17 seeds on, a band of the mean's 95% intervals takes their place.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.subplots()
    for number, (name, seeds) in enumerate(curves.items()):
        color = f"C{number % 10}"
        label = f"{name}: mean of {len(seeds)} seeds" if len(curves) > 1 else f"mean of {len(seeds)} seeds"
        if len(seeds) > 16:
            plot_mean(axes, env_steps, seeds, color, label)
        else:
            axes.plot(env_steps, seeds.T, color=color, alpha=0.35, linewidth=0.8)
            axes.plot(env_steps, seeds.mean(axis=0), color=color, linewidth=2.5, label=label)
    if goal is not None:
        axes.axhline(goal[0], color="gray", linestyle="--", linewidth=1, label=goal[1])
    axes.set(title=title, xlabel=xlabel, ylabel=ylabel, xlim=(0, env_steps[-1]))
    axes.xaxis.set_major_formatter("{x:,.0f}")
    legend_below(axes)
    figure.savefig(path, dpi=150)
