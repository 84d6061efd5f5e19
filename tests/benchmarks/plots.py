"""Plots of a benchmark's result, narrow enough to be read on a phone."""

import pathlib
from typing import Any

import numpy as np
from grid import BASE
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from settings import power

WIDTH = 4.6  # inches
COLOURS = {
    BASE: "tab:blue",
    "flashbax": "tab:orange",
    "flashbax flat": "tab:olive",
    "flashbax ordered": "tab:red",
    "naive": "tab:gray",
}
COLOURS |= {"cpprb": "tab:green", "torchrl": "tab:purple", "dopamine": "tab:brown", "brax": "tab:cyan"}


def save(result: dict[str, Any], folder: pathlib.Path) -> None:
    """Write the plots for which there are figures: BACKEND_peers.png, _ratio.png, _time.png, _seeds.png, _dqn.png."""
    name, rows = result["backend"], result["rows"]
    made = {
        "peers": _peers([row for row in rows if _is_usual(row) and row["part"] == "b"]),
        "ratio": _ratio([r for r in rows if r["part"] == "b" and "ratio" in r["libraries"].get("flashbax", {})]),
        "time": _time([row for row in rows if _is_usual(row)]),
        "seeds": _seeds([row for row in rows if row["part"] == "c" and "per_seed" in row]),
        "dqn": _dqn(result["end_to_end"] or {}),
    }
    for kind, figure in made.items():
        if figure:
            figure.savefig(folder / f"{name}_{kind}.png", dpi=150)


def _is_usual(row: dict) -> bool:
    return (row["batch_size"], row["num_added"], row["items"]) == (256, 16, "vector")


def _peers(rows: list[dict]) -> Figure | None:
    """Time of a replay step by capacity, beside the libraries that are compared in most cells."""
    if not rows:
        return None
    figure = Figure(figsize=(WIDTH, 3.4), layout="constrained")
    axes = figure.subplots()
    for name in (BASE, "flashbax", "flashbax ordered", "cpprb", "torchrl"):
        times = _times(rows, name)
        if times:
            sizes, us = zip(*times, strict=True)
            axes.plot(sizes, us, "o-", color=COLOURS[name], markersize=5, linewidth=2.5 if name == BASE else 1.5)
            height = 4 if name == "torchrl" else -6  # beside cpprb's
            axes.annotate(name, (sizes[-1], us[-1]), (8, height), textcoords="offset points", color=COLOURS[name])
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(sorted({row["capacity"] for row in rows}))
    axes.set_yticks([10, 100, 1_000], ["10", "100", "1,000"])
    axes.minorticks_off()
    axes.set(xlabel="capacity", ylabel="us per step", ylim=(10, 10_000), title="add 16, draw 256 by priority, update")
    axes.set_xlim(2**13.5, 2**23.5)
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    return figure


def _times(rows: list[dict], name: str) -> list[tuple[int, float]]:
    """Capacity and median microseconds of a step, by capacity."""
    found = [(row["capacity"], row["libraries"].get(name, {})) for row in rows]
    return sorted((capacity, library["us"]["median"]) for capacity, library in found if "us" in library)


def _ratio(rows: list[dict]) -> Figure | None:
    """Ratio to flashbax in every cell of (b): a panel for each kind of items and size of a batch."""
    if not rows:
        return None
    kinds = sorted({(row["items"], row["batch_size"]) for row in rows}, key=lambda cell: (cell[0] != "vector", cell))
    figure, panels = _panels([f"{items}, batch of {batch_size}" for items, batch_size in kinds])
    added = sorted({row["num_added"] for row in rows})
    for axes, kind in zip(panels, kinds, strict=True):
        for count, colour in zip(added, ("tab:blue", "tab:orange", "tab:green", "tab:purple"), strict=False):
            of_line = [r for r in rows if (r["items"], r["batch_size"], r["num_added"]) == (*kind, count)]
            if of_line:
                points = sorted((r["capacity"], r["libraries"]["flashbax"]["ratio"]) for r in of_line)
                sizes, ratios = zip(*points, strict=True)
                axes.plot(
                    sizes, [x["median"] for x in ratios], "o-", color=colour, markersize=4, label=f"{count} added"
                )
                low, high = [x["p10"] for x in ratios], [x["p90"] for x in ratios]
                axes.fill_between(sizes, low, high, color=colour, alpha=0.15, linewidth=0)
        axes.axhspan(0.01, 1, color="gray", alpha=0.15)
        axes.set_ylim(bottom=0.5)
        axes.set(xticks=sorted({row["capacity"] for row in rows}))
    figure.supxlabel("capacity")
    figure.supylabel("flashbax's time / jaxreplay's")
    _legend(figure, "median, 10th to 90th percentile; gray: flashbax is faster")
    return figure


def _panels(titles: list[str]) -> tuple[Figure, list[Axes]]:
    """A figure with a panel for each title, two in a row, with binary logarithmic axes."""
    shape = -(-len(titles) // 2), min(len(titles), 2)
    figure = Figure(figsize=(WIDTH, 0.9 + 1.9 * shape[0]), layout="constrained")
    panels = figure.subplots(*shape, sharex=True, sharey=True, squeeze=False).ravel()
    for axes in panels[len(titles) :]:
        axes.set_visible(False)
    for axes, title in zip(panels, titles, strict=False):
        axes.set_xscale("log", base=2)
        axes.set_yscale("log", base=2)
        axes.yaxis.set_major_formatter("{x:g}")
        axes.set_title(title, fontsize=10)
        axes.grid(alpha=0.3)
    return figure, [*panels[: len(titles)]]


def _legend(figure: Figure, title: str = "") -> None:
    """One legend for all panels, above them."""
    lines = {line.get_label(): line for axes in figure.axes for line in axes.lines if line.get_label()[0] != "_"}
    of_text = {"fontsize": 8, "title": title, "title_fontsize": 8}
    figure.legend(lines.values(), lines.keys(), loc="outside upper center", ncols=min(len(lines), 4), **of_text)


def _time(rows: list[dict]) -> Figure | None:
    """Time a step by capacity, for (a) and (b) at B=256."""
    chosen = {part: [row for row in rows if row["part"] == part] for part in "ab"}
    if not any(chosen.values()):
        return None
    figure = Figure(figsize=(WIDTH, 7.5), layout="constrained")
    for axes, part in zip(figure.subplots(2, 1, sharey=True), "ab", strict=True):
        _lines(axes, chosen[part])
        title = {"a": "(a) tree: sample + update", "b": "(b) whole replay step"}[part]
        axes.set(title=f"{title}, B=256", xlabel="capacity N", ylabel="us per step")
    lines = {line.get_label(): line for axes in figure.axes for line in axes.lines}
    figure.legend(lines.values(), lines.keys(), loc="outside lower center", ncols=3, fontsize=8)
    return figure


def _lines(axes: Axes, rows: list[dict]) -> None:
    rows = sorted(rows, key=lambda row: row["capacity"])
    for name, colour in COLOURS.items():
        found = [(r["capacity"], r["libraries"][name]["us"]) for r in rows if "us" in r["libraries"].get(name, {})]
        if found:
            sizes, us = zip(*found, strict=True)
            axes.plot(sizes, [u["median"] for u in us], "o-", color=colour, markersize=4, label=name)
            low, high = [u["p10"] for u in us], [u["p90"] for u in us]
            axes.fill_between(sizes, low, high, color=colour, alpha=0.2, linewidth=0)
    own = [r for r in rows if "limit_us" in r["libraries"].get(BASE, {})]
    limit = [r["libraries"][BASE]["limit_us"] for r in own]
    axes.plot([r["capacity"] for r in own], limit, ":", color="black", label="limit for jaxreplay")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.grid(alpha=0.3)


def _seeds(rows: list[dict]) -> Figure | None:
    """Cost per seed by number of seeds, over that of one seed: a panel for each size, a line for each library."""
    if not rows:
        return None
    cells = {(r["items"], r["capacity"], r["batch_size"]) for r in rows}
    cells = sorted(cells, key=lambda cell: (cell[0] != "vector", cell))
    figure, panels = _panels([f"{items}, N={power(capacity)}, B={batch}" for items, capacity, batch in cells])
    for axes, cell in zip(panels, cells, strict=True):
        of_cell = [r for r in rows if (r["items"], r["capacity"], r["batch_size"]) == cell]
        for name, colour in COLOURS.items():
            costs = sorted((r["seeds"], r["per_seed"][name]) for r in of_cell if name in r["per_seed"])
            if costs:
                axes.plot(*np.array(costs).T, "o-", color=colour, markersize=4, label=name)
        axes.axhline(1, color="gray", linestyle="--", linewidth=1)
        axes.xaxis.set_major_formatter("{x:g}")
    figure.supxlabel("seeds")
    figure.supylabel("cost per seed / cost of one seed alone")
    _legend(figure)
    return figure


def _dqn(result: dict[str, Any]) -> Figure | None:
    """Learning curves with both buffers: mean of the seeds, and every seed."""
    if "libraries" not in result:
        return None
    figure = Figure(figsize=(WIDTH, 3.8), layout="constrained")
    axes = figure.subplots()
    for name, found in result["libraries"].items():
        curves, steps = np.array(found["curves"]), result["env_steps"]
        axes.plot(steps, curves.T, color=COLOURS[name], alpha=0.2, linewidth=0.7)
        label = f"{name}: {found['mean_return']} {found['interval']}, {found['seconds']['median']:.1f} s"
        axes.plot(steps, curves.mean(axis=0), color=COLOURS[name], linewidth=2.2, label=label)
    axes.set(title="CartPole-v1, prioritized 3-step double DQN", xlabel="environment steps per seed", ylabel="return")
    axes.xaxis.set_major_formatter("{x:,.0f}")
    figure.legend(loc="outside lower center", title="final return [95% interval], training time", fontsize=8)
    return figure
