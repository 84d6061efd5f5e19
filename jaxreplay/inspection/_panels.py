"""Panels: figures of a `View` as calls of matplotlib's `Axes`, which `_figures` makes."""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from jaxreplay.inspection._sections import MOST_ENVS
from jaxreplay.inspection._views import View

SOFT, ACCENT, SECOND, THIRD = "#8a97a3", "#2a6f97", "#d9793c", "#b9c4cc"
Call = tuple[str, tuple[Any, ...], dict[str, Any]]  # a method of `Axes`, and its arguments


class Panel(NamedTuple):
    """A figure.

    Attributes:
      caption: a sentence or two.
      calls: methods of `Axes` that draw the figure, in order.
      axes: arguments of `Axes.set`.
      height: in inches.
    """

    caption: str
    calls: list[Call]
    axes: dict[str, Any]
    height: float = 3.0


def panels(view: View) -> dict[str, Panel]:
    """All figures for which a view has data, by name."""
    has_priorities = view.priorities is not None and np.any(view.priorities > 0)
    has_law = view.law is not None and np.any(view.law > 0)
    makers: dict[str, tuple[Callable[[View], Panel], Any]] = {
        "priorities": (_priorities, has_priorities),
        "ages": (_ages, has_priorities and view.ages is not None),
        "mass": (_mass, has_law),
        "weights": (_weights, has_law),
        "updates": (_updates, view.updates is not None and view.updates.size),
        "returns": (_returns, view.returns is not None and view.returns[1].size),
        "episodes": (_episodes, view.episodes is not None and view.episodes.size),
        "pools": (_pools, view.pools is not None and view.pools[0]),
    }
    return {name: maker(view) for name, (maker, has_data) in makers.items() if has_data}


def _call(method: str, *arguments: Any, **settings: Any) -> Call:
    return method, arguments, settings


def _histogram(x: np.ndarray, bins: Any, shares: np.ndarray | None = None, **settings: Any) -> Call:
    """Bars of the share of `x` in each of the bins, with `shares` of its numbers instead of equal ones."""
    counts, edges = np.histogram(x, bins, weights=np.full(x.size, 1 / x.size) if shares is None else shares)
    return _call("stairs", counts, edges, **{"fill": True, "color": ACCENT, "alpha": 0.85} | settings)


def _mean(x: float, text: str) -> Call:
    return _call("axvline", x, color=SECOND, linewidth=1.6, label=f"mean {text}")


def _log_bins(x: np.ndarray, most: int = 50) -> np.ndarray:
    """Bin edges around positive numbers, evenly spaced on a log scale."""
    low, high = np.log10(x.min()), np.log10(x.max())
    if high - low < 0.02:
        low, high = low - 0.5, high + 0.5
    return np.logspace(low, high, most + 1)


def _priorities(view: View) -> Panel:
    x = view.priorities
    bins, zero = _log_bins(x[x > 0]), np.mean(x == 0)
    none = f" Not shown: {zero:.1%} with priority 0, which are never drawn." if zero else ""
    stored = _histogram(x, bins, label="stored")
    drawn = _histogram(x, bins, view.law, fill=False, color=SECOND, alpha=1, linewidth=1.6, label="drawn")
    axes = {"xscale": "log", "xlabel": f"priority {view.power}", "ylabel": "share of items", "title": "Priorities"}
    return Panel(f"Priorities of the stored items and of draws.{none}", [stored, drawn], axes)


def _ages(view: View) -> Panel:
    keep = view.priorities > 0
    x, y = view.ages[keep], view.priorities[keep]
    edges, bins = np.linspace(0, x.max() + 1, 41), _log_bins(y, 30)
    counts = np.histogram2d(x, y, (edges, bins))[0]
    place = np.digitize(x, edges) - 1
    middles = [np.median(y[place == k]) if np.any(place == k) else np.nan for k in range(40)]
    heat = {"cmap": "Blues", "norm": "log", "vmin": 0.3, "vmax": max(counts.max(), 3)}  # single items are not too pale
    return Panel(
        "Priorities of items by age, newest at the left. A high edge at the left: new items without an update.",
        [
            _call("pcolormesh", edges, bins, np.ma.masked_equal(counts.T, 0), rasterized=True, **heat),
            _call("plot", (edges[1:] + edges[:-1]) / 2, middles, color=SECOND, linewidth=1.8, label="median"),
            _call("grid", False),
        ],
        {
            "yscale": "log",
            "xlabel": "age (insertions since)",
            "ylabel": f"priority {view.power}",
            "title": "Age and priority",
        },
    )


def _mass(view: View) -> Panel:
    share = np.linspace(0, 1, view.law.size + 1)
    mass = np.concatenate([[0.0], np.cumsum(np.sort(view.law)[::-1])])
    points = np.unique(np.linspace(0, view.law.size, 400).astype(int))
    calls = [
        _call("plot", share[points], mass[points], color=ACCENT, linewidth=2, label="drawn"),
        _call("plot", [0, 1], [0, 1], color=SOFT, linewidth=1, linestyle=(0, (4, 3)), label="if uniform"),
    ]
    for part, marker in ((0.01, "D"), (0.1, "o")):
        at = float(np.interp(part, share, mass))
        calls.append(_call("plot", [part], [at], marker, color=SECOND, markersize=5, label=f"top {part:.0%}: {at:.1%}"))
    axes = {"xlabel": "share of items, most probable first", "ylabel": "share of draws", "title": "Cumulative mass"}
    axes |= {"xlim": (-0.02, 1.02), "ylim": (0, 1.03)}
    return Panel("Share of the draws that falls on the most probable items.", calls, axes)


def _weights(view: View) -> Panel:
    weights, law = view.weights[view.law > 0], view.law[view.law > 0]
    order = np.argsort(weights)
    above = np.searchsorted(np.cumsum(law[order]), 0.995)
    most = min(1.0, 1.1 * weights[order][min(above, order.size - 1)])
    mean, square = np.sum(law * weights), np.sum(law * weights**2)
    return Panel(
        f"Weights of draws at {view.beta}. Effective sample size: {mean**2 / square:.0%} of a large batch.",
        [
            _histogram(weights, np.linspace(0, most, 51), law),
            _mean(mean, f"{mean:.2g}"),
            _call("locator_params", axis="x", nbins=6),
        ],
        {"xlabel": "weight (1: least probable item)", "ylabel": "share of draws", "title": "Importance weights"},
    )


def _returns(view: View) -> Panel:
    what, x = view.returns
    distinct, counts = np.unique(x, return_counts=True)
    if distinct.size > 12:
        calls = [_histogram(x, 50), _mean(x.mean(), f"{x.mean():.3g}")]
    else:
        bars = _call("bar", [f"{x:g}" for x in distinct], counts / x.size, color=ACCENT, width=0.6)
        calls = [bars, _call("grid", False, axis="x")]
    return Panel(
        f"Mean {x.mean():.4g}, standard deviation {x.std():.4g} of the stored numbers.",
        calls,
        {"xlabel": what, "ylabel": "share", "title": "Returns" if "return" in what else "Rewards"},
    )


def _episodes(view: View) -> Panel:
    x = view.episodes
    edges = np.histogram_bin_edges(x, bins=min(40, int(np.ptp(x)) + 1))
    return Panel(
        f"{x.size:,} completely stored episodes, {x.min():,} to {x.max():,} rows long.",
        [_histogram(x, edges, np.ones(x.size)), _mean(x.mean(), f"{x.mean():.4g}")],
        {"xlabel": "rows", "ylabel": "episodes", "title": "Episode lengths"},
    )


def _updates(view: View) -> Panel:
    counts = view.updates
    most = int(max(np.percentile(counts, 99.5), 5))
    shares = np.bincount(np.minimum(counts, most + 1), minlength=most + 2) / counts.size
    color = [SECOND] + [ACCENT] * most + [SOFT]
    return Panel(
        f"{shares[0]:.1%} of the items have had no update since their insertion; the mean is {counts.mean():.3g}.",
        [_call("bar", np.arange(most + 2), shares, width=0.9, color=color), _call("grid", False, axis="x")],
        {"xlabel": f"updates (last bar: more than {most})", "ylabel": "share of items", "title": "Updates per item"},
    )


def _pools(view: View) -> Panel:
    names, sizes = view.pools[0][:MOST_ENVS], view.pools[1][:MOST_ENVS, [2, 0, 1]]
    shares = sizes / np.maximum(sizes.sum(axis=1, keepdims=True), 1)
    left, at = np.cumsum(shares, axis=1) - shares, -np.arange(len(names))  # the first at the top
    calls = [_call("grid", False, axis="y")]
    for k, (pool, color) in enumerate({"hard": SECOND, "normal": ACCENT, "easy": THIRD}.items()):
        calls.append(_call("barh", at, shares[:, k], left=left[:, k], color=color, label=pool, height=0.7))
    axes = {"yticks": at, "yticklabels": names, "xlabel": "share of tasks", "xlim": (0, 1), "title": "Pools"}
    more = f" Shown: the first {MOST_ENVS} of {len(view.pools[0])}." if len(view.pools[0]) > MOST_ENVS else ""
    return Panel(f"Tasks per environment and pool.{more}", calls, axes, max(1.6, 1.1 + 0.24 * len(names)))
