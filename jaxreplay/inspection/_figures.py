"""Matplotlib figures of a `View`. Matplotlib is imported here only, when the first figure is made."""

import base64
import importlib
import io
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from jaxreplay.inspection._views import View

INK, SOFT, ACCENT, SECOND, THIRD = "#22313f", "#8a97a3", "#2a6f97", "#d9793c", "#b9c4cc"
SIZE = (4.6, 3.0)  # inches: legible at the width of a phone
STYLE = {
    "font.size": 9.5,
    "axes.titlesize": 10.5,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.labelcolor": INK,
    "axes.edgecolor": SOFT,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#e6ebef",
    "grid.linewidth": 0.8,
    "text.color": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "legend.frameon": False,
    "svg.hashsalt": "jaxreplay",
    "figure.constrained_layout.use": True,
}


class Picture(NamedTuple):
    """A figure and its caption."""

    figure: Any
    caption: str


class Figures(dict[str, Any]):
    """Matplotlib figures by name; a notebook shows all of them."""

    def _repr_html_(self) -> str:
        images = [
            f'<img alt="{name}" style="max-width:100%;display:inline-block" src="{data_uri(figure)}">'
            for name, figure in self.items()
        ]
        return "".join(images) or "<p>Nothing is stored yet.</p>"


def pictures(view: View) -> dict[str, Picture]:
    """All figures for which a view has data, by name.

    Raises:
      ImportError: matplotlib is not installed.
    """
    matplotlib = _matplotlib()
    made = {}
    with matplotlib.rc_context(STYLE):
        for name, (draw, has) in DRAWERS.items():
            if has(view):
                figure = matplotlib.figure.Figure(figsize=SIZE)
                caption = draw(view, figure.add_subplot())
                made[name] = Picture(figure, caption)
    return made


def data_uri(figure: Any) -> str:
    """A figure as the data URI of an SVG image."""
    file = io.BytesIO()
    with _matplotlib().rc_context(STYLE):
        figure.savefig(file, format="svg", dpi=160, metadata={"Date": None})
    return "data:image/svg+xml;base64," + base64.b64encode(file.getvalue()).decode()


def _matplotlib() -> Any:
    try:
        importlib.import_module("matplotlib.figure")
    except ImportError as error:
        raise ImportError(
            "matplotlib is not installed, and figures need it; install the extra `plots`: pip install "
            "'jaxreplay[plots]'."
        ) from error
    return importlib.import_module("matplotlib")


def _log_bins(x: np.ndarray, most: int = 50) -> np.ndarray:
    """Bin edges around positive numbers, evenly spaced on a log scale."""
    low, high = np.log10(x.min()), np.log10(x.max())
    if high - low < 0.02:
        low, high = low - 0.5, high + 0.5
    return np.logspace(low, high, most + 1)


def _legend(ax: Any) -> None:
    """A legend between the title and the data."""
    count = len(ax.get_legend_handles_labels()[1])
    ncols = 3 if count <= 3 else 2
    rows = -(-count // ncols)
    ax.legend(loc="lower left", bbox_to_anchor=(0, 1.0), ncols=ncols, borderaxespad=0.1, handlelength=1.2)
    ax.set_title(ax.get_title(loc="left"), pad=4 + 16 * rows)


def _priorities(view: View, ax: Any) -> str:
    positive = view.priorities[view.priorities > 0]
    bins = _log_bins(positive)
    law = view.law[view.priorities > 0]
    drawn = np.histogram(positive, bins, weights=law)[0]
    stored = np.histogram(positive, bins)[0] / view.priorities.size
    ax.stairs(stored, bins, fill=True, color=ACCENT, alpha=0.85, label="stored")
    ax.stairs(drawn, bins, color=SECOND, linewidth=1.6, label="drawn")
    ax.set(xscale="log", xlabel=f"priority {view.power}", ylabel="share of items", title="Priorities")
    _legend(ax)
    zero = np.mean(view.priorities == 0)
    none = f" Not shown: {zero:.1%} with priority 0, which are never drawn." if zero else ""
    return f"Priorities of the stored items and of draws.{none}"


def _ages(view: View, ax: Any) -> str:
    keep = view.priorities > 0
    x, y = view.ages[keep], view.priorities[keep]
    edges = np.linspace(0, x.max() + 1, 41)
    bins = _log_bins(y, 30)
    counts = np.histogram2d(x, y, (edges, bins))[0]
    shown = np.ma.masked_equal(counts.T, 0)
    mesh = ax.pcolormesh(edges, bins, shown, cmap="Blues", norm="log", rasterized=True)
    mesh.set_clim(0.3, max(counts.max(), 3))  # so that single items are not too pale
    place = np.clip(np.digitize(x, edges) - 1, 0, 39)
    order = np.argsort(place, kind="stable")
    groups = np.split(y[order], np.searchsorted(place[order], np.arange(1, 40)))
    middles = [np.median(group) if group.size else np.nan for group in groups]
    ax.plot((edges[1:] + edges[:-1]) / 2, middles, color=SECOND, linewidth=1.8, label="median")
    ticks = [10**k for k in range(9) if k == 0 or 10**k <= counts.max()]
    bar = ax.figure.colorbar(mesh, ax=ax, label="items", pad=0.02)
    bar.set_ticks(ticks, labels=[f"{x:,}" for x in ticks])
    bar.minorticks_off()
    bar.ax.set_ylim(1, None)
    ax.set(yscale="log", xlabel="age (insertions since)", ylabel=f"priority {view.power}", title="Age and priority")
    ax.grid(False)
    _legend(ax)
    return "Priorities of items by age, newest at the left. A high edge at the left: new items without an update."


def _mass(view: View, ax: Any) -> str:
    in_order = np.sort(view.law)[::-1]
    share = np.arange(in_order.size + 1) / in_order.size
    mass = np.concatenate([[0.0], np.cumsum(in_order)])
    points = np.unique(np.linspace(0, in_order.size, 400).astype(int))
    ax.plot(share[points], mass[points], color=ACCENT, linewidth=2, label="drawn")
    ax.plot([0, 1], [0, 1], color=SOFT, linewidth=1, linestyle=(0, (4, 3)), label="if uniform")
    for part, marker in ((0.01, "D"), (0.1, "o")):
        at = float(np.interp(part, share, mass))
        ax.plot([part], [at], marker, color=SECOND, markersize=5, label=f"top {part:.0%}: {at:.1%}")
    ax.set(xlabel="share of items, most probable first", ylabel="share of draws", title="Cumulative mass")
    ax.set(xlim=(-0.02, 1.02), ylim=(0, 1.03))
    _legend(ax)
    return "Share of the draws that falls on the most probable items."


def _weights(view: View, ax: Any) -> str:
    weights, law = view.weights, view.law
    keep = law > 0
    order = np.argsort(weights[keep])
    above = np.searchsorted(np.cumsum(law[keep][order]), 0.995)
    most = min(1.0, 1.1 * weights[keep][order][min(above, order.size - 1)])
    counts, bins = np.histogram(weights[keep], np.linspace(0, most, 51), weights=law[keep])
    ax.stairs(counts, bins, fill=True, color=ACCENT, alpha=0.85)
    mean, square = np.sum(law[keep] * weights[keep]), np.sum(law[keep] * weights[keep] ** 2)
    share = mean**2 / square if square else 0.0
    ax.axvline(mean, color=SECOND, linewidth=1.6, label=f"mean {mean:.2g}")
    ax.locator_params(axis="x", nbins=6)
    ax.set(xlabel="weight (1: least probable item)", ylabel="share of draws", title="Importance weights")
    _legend(ax)
    return f"Weights of draws at {view.beta}. Effective sample size: {share:.0%} of a large batch."


def _returns(view: View, ax: Any) -> str:
    what, numbers = view.returns
    distinct = np.unique(numbers)
    if distinct.size <= 12:
        counts = [np.mean(numbers == x) for x in distinct]
        ax.bar([f"{x:g}" for x in distinct], counts, color=ACCENT, width=0.6)
        ax.grid(axis="x", visible=False)
    else:
        counts, bins = np.histogram(numbers, 50)
        ax.stairs(counts / numbers.size, bins, fill=True, color=ACCENT, alpha=0.85)
        ax.axvline(numbers.mean(), color=SECOND, linewidth=1.6, label=f"mean {numbers.mean():.3g}")
    ax.set(xlabel=what, ylabel="share", title="Returns" if "return" in what else "Rewards")
    if distinct.size > 12:
        _legend(ax)
    return f"Mean {numbers.mean():.4g}, standard deviation {numbers.std():.4g} of the stored numbers."


def _episodes(view: View, ax: Any) -> str:
    lengths = view.episodes
    edges = np.histogram_bin_edges(lengths, bins=min(40, int(np.ptp(lengths)) + 1))
    ax.hist(lengths, edges, color=ACCENT, alpha=0.85)
    ax.axvline(lengths.mean(), color=SECOND, linewidth=1.6, label=f"mean {lengths.mean():.4g}")
    ax.set(xlabel="rows", ylabel="episodes", title="Episode lengths")
    _legend(ax)
    return f"{lengths.size:,} completely stored episodes, {lengths.min():,} to {lengths.max():,} rows long."


def _updates(view: View, ax: Any) -> str:
    counts = view.updates
    most = int(max(np.percentile(counts, 99.5), 5))
    shares = np.bincount(np.minimum(counts, most + 1), minlength=most + 2) / counts.size
    color = [SECOND] + [ACCENT] * most + [SOFT]
    ax.bar(np.arange(most + 2), shares, width=0.9, color=color)
    ax.set(xlabel=f"updates (last bar: more than {most})", ylabel="share of items", title="Updates per item")
    ax.grid(axis="x", visible=False)
    return f"{shares[0]:.1%} of the items have had no update since their insertion; the mean is {counts.mean():.3g}."


def _pools(view: View, ax: Any) -> str:
    names, sizes = view.pools
    names, sizes = names[:MOST_ENVS], sizes[:MOST_ENVS]
    shares = sizes / np.maximum(sizes.sum(axis=1, keepdims=True), 1)
    left = np.zeros(len(names))
    at = np.arange(len(names))
    for pool, column, color in (("hard", 2, SECOND), ("normal", 0, ACCENT), ("easy", 1, THIRD)):
        ax.barh(at, shares[:, column], left=left, color=color, label=pool, height=0.7)
        left += shares[:, column]
    ax.set_yticks(at, names)
    ax.invert_yaxis()
    ax.figure.set_size_inches(SIZE[0], max(1.6, 1.1 + 0.24 * len(names)))
    ax.set(xlabel="share of tasks", xlim=(0, 1))
    ax.grid(axis="y", visible=False)
    ax.set_title("Pools")
    _legend(ax)
    more = f" Shown: the first {MOST_ENVS} of {len(view.pools[0])}." if len(view.pools[0]) > MOST_ENVS else ""
    return f"Tasks per environment and pool.{more}"


MOST_ENVS = 30


def _some(x: np.ndarray | None) -> bool:
    return x is not None and x.size > 0 and bool(np.any(x > 0))


DRAWERS: dict[str, tuple[Callable[[View, Any], str], Callable[[View], bool]]] = {
    "priorities": (_priorities, lambda view: _some(view.priorities)),
    "ages": (_ages, lambda view: _some(view.priorities) and view.ages is not None),
    "mass": (_mass, lambda view: _some(view.law)),
    "weights": (_weights, lambda view: _some(view.law) and view.weights is not None),
    "updates": (_updates, lambda view: view.updates is not None and view.updates.size > 0),
    "returns": (_returns, lambda view: view.returns is not None and view.returns[1].size > 0),
    "episodes": (_episodes, lambda view: view.episodes is not None and view.episodes.size > 0),
    "pools": (_pools, lambda view: view.pools is not None and len(view.pools[0]) > 0),
}
