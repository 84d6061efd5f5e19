"""Plots of a benchmark's result."""

import pathlib
from typing import Any

import numpy as np
from grid import BASE
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from settings import power

COLOURS = {BASE: "tab:blue", "flashbax": "tab:orange", "flashbax flat": "tab:olive", "naive": "tab:gray"}
COLOURS |= {"cpprb": "tab:green", "torchrl": "tab:purple", "dopamine": "tab:brown", "brax": "tab:cyan"}


def save(result: dict[str, Any], folder: pathlib.Path) -> None:
    """Write the plots for which there are figures: BACKEND_ratio.png, _time.png, _seeds.png and _dqn.png."""
    name, rows = result["backend"], result["rows"]
    made = {
        "ratio": _ratio([r for r in rows if r["part"] == "b" and "ratio" in r["libraries"].get("flashbax", {})]),
        "time": _time(rows),
        "seeds": _seeds([row for row in rows if row["part"] == "c" and "per_seed" in row]),
        "dqn": _dqn(result["end_to_end"] or {}),
    }
    for kind, figure in made.items():
        if figure:
            figure.savefig(folder / f"{name}_{kind}.png", dpi=100)


def _ratio(rows: list[dict]) -> Figure | None:
    """Ratio to flashbax of every cell of (b); red where flashbax is faster."""
    if not rows:
        return None
    rows = sorted(rows, key=lambda r: (r["items"], r["capacity"], r["batch_size"], r["num_added"]), reverse=True)
    figure = Figure(figsize=(7, 1.2 + 0.19 * len(rows)), layout="constrained")
    axes = figure.subplots()
    for y, row in enumerate(rows):
        ratio = row["libraries"]["flashbax"]["ratio"]
        colour = "tab:red" if ratio["median"] < 1 else "tab:blue"
        axes.plot([ratio["p10"], ratio["p90"]], [y, y], color=colour, linewidth=1.5, alpha=0.6)
        axes.plot(ratio["median"], y, "o", color=colour, markersize=4)
    labels = [f"{r['items']} N={power(r['capacity'])} B={r['batch_size']} E={r['num_added']}" for r in rows]
    axes.set_yticks(range(len(rows)), labels, fontsize=7)
    axes.axvline(1, color="gray", linestyle="--", linewidth=1)
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter("{x:g}")
    axes.set(title="Replay step, median and 10th to 90th percentile", ylim=(-0.7, len(rows) - 0.3))
    axes.set_xlabel("flashbax's time / jaxreplay's (red: flashbax is faster)")
    axes.grid(axis="x", alpha=0.3)
    return figure


def _time(rows: list[dict]) -> Figure | None:
    """Time a step by capacity, for (a) and (b) at B=256."""
    usual = [r for r in rows if (r["batch_size"], r["num_added"], r["items"]) == (256, 16, "vector")]
    chosen = {part: [row for row in usual if row["part"] == part] for part in "ab"}
    if not any(chosen.values()):
        return None
    figure = Figure(figsize=(10, 4.2), layout="constrained")
    for axes, part in zip(figure.subplots(1, 2, sharey=True), "ab", strict=True):
        _lines(axes, chosen[part])
        title = {"a": "(a) tree: sample + update", "b": "(b) whole replay step"}[part]
        axes.set(title=f"{title}, B=256", xlabel="capacity N", ylabel="us a step" if part == "a" else "")
    lines = {line.get_label(): line for axes in figure.axes for line in axes.lines}
    figure.legend(lines.values(), lines.keys(), loc="outside right center", fontsize=8)
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
    """Cost per seed by number of seeds, over that of one seed."""
    if not rows:
        return None
    libraries = [name for name in COLOURS if any(name in row["per_seed"] for row in rows)]
    figure = Figure(figsize=(4 * len(libraries), 3.8), layout="constrained")
    cells = sorted({(r["items"], r["capacity"], r["batch_size"]) for r in rows}, reverse=True)
    for axes, name in zip(figure.subplots(1, len(libraries), sharey=True, squeeze=False)[0], libraries, strict=True):
        for i, (items, capacity, batch_size) in enumerate(cells):
            of_cell = [r for r in rows if (r["items"], r["capacity"], r["batch_size"]) == cells[i]]
            costs = sorted((r["seeds"], r["per_seed"][name]) for r in of_cell if name in r["per_seed"])
            shade = 0.15 + 0.75 * i / max(len(cells) - 1, 1)
            label = f"{items} N={power(capacity)} B={batch_size}"
            axes.plot(*np.array(costs).T, "o-", color=_colormap(shade), markersize=3, label=label)
        axes.axhline(1, color="gray", linestyle="--", linewidth=1)
        axes.set_xscale("log", base=2)
        axes.set_yscale("log", base=2)
        axes.xaxis.set_major_formatter("{x:g}")
        axes.yaxis.set_major_formatter("{x:g}")
        axes.set(title=name, xlabel="seeds")
        axes.grid(alpha=0.3)
    figure.axes[0].set_ylabel("cost per seed / cost of one seed")
    figure.axes[-1].legend(fontsize=6.5, loc="center left", bbox_to_anchor=(1, 0.5))
    return figure


def _colormap(share: float) -> Any:
    from matplotlib import colormaps

    return colormaps["viridis"](share)


def _dqn(result: dict[str, Any]) -> Figure | None:
    """Learning curves with both buffers: mean of the seeds, and every seed."""
    if "libraries" not in result:
        return None
    figure = Figure(figsize=(7, 4.2), layout="constrained")
    axes = figure.subplots()
    for name, found in result["libraries"].items():
        curves, steps = np.array(found["curves"]), result["env_steps"]
        axes.plot(steps, curves.T, color=COLOURS[name], alpha=0.2, linewidth=0.7)
        label = f"{name}: {found['mean_return']} {found['interval']}, {found['seconds']['median']:.1f} s"
        axes.plot(steps, curves.mean(axis=0), color=COLOURS[name], linewidth=2.2, label=label)
    axes.set(title="CartPole-v1, prioritized 3-step double DQN", xlabel="environment steps a seed", ylabel="return")
    axes.xaxis.set_major_formatter("{x:,.0f}")
    figure.legend(loc="outside lower center", title="final return [95% interval], training time", fontsize=8)
    return figure
