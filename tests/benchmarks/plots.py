"""Plots of a benchmark's result, narrow enough to be read on a phone."""

import pathlib
from typing import Any

import numpy as np
from grid import BASE
from matplotlib.axes import Axes
from matplotlib.figure import Figure

WIDTH = 4.6  # inches
COLOURS = {BASE: "tab:blue", "flashbax": "tab:orange", "flashbax ordered": "tab:red", "naive": "tab:gray"}
COLOURS |= {"cpprb": "tab:green", "torchrl": "tab:purple", "brax": "tab:cyan"}


def save(result: dict[str, Any], folder: pathlib.Path) -> None:
    """Write the plots for which there are figures: BACKEND_peers.png, _ratio.png, _time.png, _dqn.png."""
    steps = [row for row in result["rows"] if row["part"] == "b"]
    trainings = result["end_to_end"] or {}
    usual = [row for row in result["rows"] if _is_usual(row)]
    made = {
        "peers": (_peers, [row for row in usual if row["part"] == "b"]),
        "ratio": (_ratio, [row for row in steps if "ratio" in row["libraries"].get("flashbax", {})]),
        "time": (_time, [row for row in usual if row["part"] in "ab"]),
        "dqn": (_dqn, trainings if "libraries" in trainings else None),
    }
    for kind, (draw, figures) in made.items():
        if figures:
            height = {"peers": 3.4, "time": 7.5}.get(kind, 3.8)
            draw(figure := Figure(figsize=(WIDTH, height), layout="constrained"), figures)
            figure.savefig(folder / f"{result['backend']}_{kind}.png", dpi=150)


def _is_usual(row: dict) -> bool:
    return (row["batch_size"], row["num_added"], row["items"]) == (256, 16, "vector")


def _line(axes: Axes, rows: list[dict], name: str, figure: str, band: bool = True, **style: Any) -> list[tuple]:
    """Medians of a library's figure by capacity, and a band of percentiles; returns the points (capacity, median)."""
    rows = sorted((r for r in rows if figure in r["libraries"].get(name, {})), key=lambda row: row["capacity"])
    sizes, found = [row["capacity"] for row in rows], [row["libraries"][name][figure] for row in rows]
    if rows:
        (line,) = axes.plot(sizes, [x["median"] for x in found], "o-", **style)
        low, high = [x["p10"] for x in found], [x["p90"] for x in found]
        axes.fill_between(sizes, low, high, color=line.get_color(), alpha=0.15 * band, linewidth=0)
    axes.set_xscale("log", base=2)
    axes.grid(alpha=0.3)
    return [(size, x["median"]) for size, x in zip(sizes, found, strict=True)]


def _legend(figure: Figure, loc: str, **text: Any) -> None:
    """One legend for all axes."""
    lines = {line.get_label(): line for axes in figure.axes for line in axes.lines if line.get_label()[0] != "_"}
    figure.legend(lines.values(), lines.keys(), loc=loc, ncols=3, fontsize=8, title_fontsize=8, **text)


def _peers(figure: Figure, rows: list[dict]) -> None:
    """Time of a replay step by capacity, beside the libraries that are compared in most cells."""
    axes = figure.subplots()
    for name in (BASE, "flashbax", "flashbax ordered", "cpprb", "torchrl"):
        width = 2.5 if name == BASE else 1.5
        points = _line(axes, rows, name, "us", False, color=COLOURS[name], markersize=5, linewidth=width)
        if points:
            height = 4 if name == "torchrl" else -6  # beside cpprb's
            label = "flashbax ordered:\nno tree copies" if name == "flashbax ordered" else name
            axes.annotate(label, points[-1], (8, height), textcoords="offset points", color=COLOURS[name])
    axes.set_yscale("log")
    axes.set_xticks(sorted({row["capacity"] for row in rows}))
    axes.set_yticks([10, 100, 1_000], ["10", "100", "1,000"])
    axes.minorticks_off()
    axes.set(xlabel="capacity (items)", ylim=(10, 10_000), title="add 16, draw 256 by priority, update")
    axes.set_ylabel("microseconds (less is better)")
    axes.set_xlim(2**13.5, 2**23.5)
    axes.spines[["top", "right"]].set_visible(False)


def _ratio(figure: Figure, rows: list[dict]) -> None:
    """Ratio to flashbax in every cell of (b): a panel for each kind of items and size of a batch, two in a row."""
    kinds = sorted({(row["items"], row["batch_size"]) for row in rows}, key=lambda cell: (cell[0] != "vector", cell))
    shape = -(-len(kinds) // 2), min(len(kinds), 2)
    figure.set_figheight(0.9 + 1.9 * shape[0])
    panels = figure.subplots(*shape, sharex=True, sharey=True, squeeze=False).ravel()
    for axes in panels[len(kinds) :]:
        axes.set_visible(False)
    for axes, (items, batch_size) in zip(panels, kinds, strict=False):
        of_kind = [row for row in rows if (row["items"], row["batch_size"]) == (items, batch_size)]
        for count in sorted({row["num_added"] for row in of_kind}):
            of_line = [row for row in of_kind if row["num_added"] == count]
            _line(axes, of_line, "flashbax", "ratio", markersize=4, label=f"{count} added")
        axes.set_title(f"{items}, batch of {batch_size}", fontsize=10)
        axes.set_yscale("log", base=2)
        axes.yaxis.set_major_formatter("{x:g}")
        axes.axhspan(0.01, 1, color="gray", alpha=0.15)
        axes.set_ylim(bottom=0.5)
        axes.set(xticks=sorted({row["capacity"] for row in rows}))
    figure.supxlabel("capacity")
    figure.supylabel("flashbax's time / jaxreplay's")
    _legend(figure, "outside upper center", title="median, 10th to 90th percentile; gray: flashbax is faster")


def _time(figure: Figure, rows: list[dict]) -> None:
    """Time a step by capacity, for (a) and (b) at B=256."""
    titles = {"a": "(a) tree: sample + update", "b": "(b) whole replay step"}
    for axes, part in zip(figure.subplots(2, 1, sharey=True), titles, strict=True):
        of_part = sorted((row for row in rows if row["part"] == part), key=lambda row: row["capacity"])
        for name, colour in COLOURS.items():
            _line(axes, of_part, name, "us", color=colour, markersize=4, label=name)
        own = [r for r in of_part if "limit_us" in r["libraries"].get(BASE, {})]
        limit = [r["libraries"][BASE]["limit_us"] for r in own]
        axes.plot([r["capacity"] for r in own], limit, ":", color="black", label="limit for jaxreplay")
        axes.set_yscale("log")
        axes.set(title=f"{titles[part]}, B=256", xlabel="capacity N", ylabel="us per step")
    _legend(figure, "outside lower center")


def _dqn(figure: Figure, result: dict[str, Any]) -> None:
    """Learning curves with both buffers: mean of the seeds, and every seed."""
    axes = figure.subplots()
    for name, found in result["libraries"].items():
        curves, steps = np.array(found["curves"]), result["env_steps"]
        axes.plot(steps, curves.T, color=COLOURS[name], alpha=0.2, linewidth=0.7)
        label = f"{name}: {found['mean_return']} {found['interval']}, {found['seconds']['median']:.1f} s"
        axes.plot(steps, curves.mean(axis=0), color=COLOURS[name], linewidth=2.2, label=label)
    axes.set(title="CartPole-v1, prioritized 3-step double DQN", xlabel="environment steps per seed", ylabel="return")
    axes.xaxis.set_major_formatter("{x:,.0f}")
    figure.legend(loc="outside lower center", title="final return [95% interval], training time", fontsize=8)
