"""plot: one figure of the items of a buffer and of draws from it. Imports matplotlib on first use."""

import functools
import io
from typing import Any

import jax
import numpy as np

from jaxreplay._common import checks, meshes, xla
from jaxreplay.buffers import _base, _shards
from jaxreplay.inspection import _facts
from jaxreplay.wrappers import Mixture

INK, SOFT, ACCENT, SECOND = "#22313f", "#8a97a3", "#2a6f97", "#d9793c"
STYLE: Any = {
    "font.size": 9,
    "axes.titlesize": 10,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.edgecolor": SOFT,
    "grid.color": "#e6ebef",
    **dict.fromkeys(("axes.labelcolor", "text.color", "xtick.color", "ytick.color"), INK),
    **dict.fromkeys(("axes.spines.top", "axes.spines.right", "legend.frameon"), False),
    **dict.fromkeys(("axes.grid", "axes.axisbelow"), True),
}


@xla.reads_state
def plot(buffer: Any, state: Any) -> Any:
    """A figure of a state: priorities and ages of its items and of draws, cumulative mass, importance weights.

    It shows all items and some 16,000 draws, in O(N log N). `figure.savefig` writes a file; a notebook shows
    the figure at the end of a cell. A `Mixture` has a row for each source, with the source's own weights.
    A buffer without priorities has no panel of them, a `ReservoirBuffer` none of ages. Plot a stack of states, as
    `jax.vmap` makes it, one by one.

    Args:
      buffer: a `ReplayBuffer`, `ReservoirBuffer`, `SequenceBuffer`, `Sharded` or `Mixture`.
      state: its state; unchanged.

    Returns:
      a `matplotlib.figure.Figure`.

    Raises:
      ImportError: matplotlib is not installed (extra `plots`).
      ValueError: values are traced, `buffer` is of another type, or `state` does not belong to it.

    Examples:
      >>> [panel.get_title(loc="left") for panel in jr.plot(buffer, state).axes]
      ['Priorities', 'Ages', 'Cumulative mass', 'Importance weights']
    """
    if not isinstance(_shards.whole_of(buffer), _base.Buffer | Mixture):
        raise ValueError(f"buffer={checks.brief(buffer)}: must be a buffer of jaxreplay; of a curriculum see metrics.")
    if xla.is_traced(state):
        raise ValueError("state: is traced; plot runs on the host, so call it outside of jit, scan and vmap.")
    pairs = [*zip(buffer.buffers, state, strict=True)] if isinstance(buffer, Mixture) else [(buffer, state)]
    rows = [_panels(**jax.device_get(_contents(*pair))) for pair in pairs]
    try:
        import matplotlib.figure
    except ImportError as error:
        raise ImportError("plot needs matplotlib: pip install 'jaxreplay[plots]'.") from error
    with matplotlib.rc_context(STYLE):
        most = max(map(len, rows))
        # Inches.
        figure = matplotlib.figure.Figure(figsize=(3.3 * most, 3 * len(rows)), layout="constrained")
        for k, (part, row) in enumerate(zip(figure.subfigures(len(rows), squeeze=False)[:, 0], rows, strict=True)):
            if len(rows) > 1:
                part.suptitle(f"buffers[{k}]")
            for place, (draw, *arguments) in enumerate(row, 1):
                draw(part.add_subplot(1, most, place), *arguments)
    # Notebooks ask for it. They show a figure by themselves only where pyplot was imported.
    figure._repr_png_ = functools.partial(_png, figure)  # pyright: ignore[reportAttributeAccessIssue]
    return figure


def _png(figure: Any) -> bytes:
    file = io.BytesIO()
    figure.savefig(file)
    return file.getvalue()


@functools.partial(jax.jit, static_argnums=0)
@meshes.over_any_mesh
def _contents(buffer: Any, state: Any) -> dict[str, Any]:
    shards = _shards.shards_of(buffer)
    sample = _facts.draw(buffer, state, jax.random.key(0), 2**14)
    state = shards.stacked(state)
    items, drawn = _facts.of_items(shards.part, state), _facts.priorities_at(shards, state, sample.probabilities)
    priorities = None if items.priorities is None or drawn is None else (items.priorities, drawn)
    age = sample.age if shards.whole._keeps_order else None
    curve = _facts.curve(shards, state, sample)
    return {"items": items, "sample": sample, "age": age, "priorities": priorities, "curve": curve}


def _panels(items: _facts.Items, sample: Any, age: Any, priorities: Any, curve: Any) -> list[Any]:
    """Functions that draw panels, with their arguments after the axes."""
    has_item = sample.indices >= 0
    if not has_item.any():
        return [(_text, "Nothing can be drawn yet.")]
    panels: list[Any] = []
    if priorities:
        stored, drawn = priorities[0][items.live], priorities[1][has_item]
        if np.any(stored > 0):
            zeros = np.mean(stored == 0)
            label = "priority" + f" (not shown: {zeros:.1%} with priority 0)" * bool(zeros)
            low, high = np.log10([stored[stored > 0].min(), stored.max()])
            margin = 0.02 if high - low > 0.02 else 0.5
            bins = np.logspace(low - margin, high + margin, 51)
            panels.append((_shares, "Priorities", label, bins, stored, np.clip(drawn, bins[0], bins[-1])))
    if age is not None:
        stored = items.ages[items.live]
        bins = np.linspace(0, stored.max() + 1, min(40, stored.max() + 1) + 1)
        panels.append((_shares, "Ages", "age (insertions since)", bins, stored, age[has_item]))
    return [*panels, (_mass, *curve), (_weights, sample.weights[has_item])]


def _text(ax: Any, text: str) -> None:
    ax.set_axis_off()
    ax.text(0.5, 0.5, text, ha="center", va="center")


def _shares(ax: Any, title: str, label: str, bins: np.ndarray, stored: np.ndarray, drawn: np.ndarray) -> None:
    """Histograms of all items and of draws."""
    ax.stairs(np.histogram(stored, bins)[0] / stored.size, bins, fill=True, color=ACCENT, alpha=0.85, label="stored")
    ax.stairs(np.histogram(drawn, bins)[0] / drawn.size, bins, color=SECOND, linewidth=1.6, label="drawn")
    ax.set(title=title, xlabel=label, ylabel="share", xscale="log" if title == "Priorities" else "linear")
    if title == "Ages":
        ax.locator_params(axis="x", nbins=5)
    ax.legend()


def _mass(ax: Any, items: np.ndarray, mass: np.ndarray) -> None:
    ax.plot([*items, 1], [*mass, mass[-1]], color=ACCENT, linewidth=2)
    ax.plot([0, 1], [0, 1], color=SOFT, linewidth=1, linestyle="--", label="uniform")
    for part, marker in ((0.01, "D"), (0.1, "o")):
        top = float(np.interp(part, items, mass))
        ax.plot([part], [top], marker, color=SECOND, markersize=5, label=f"top {part:.0%}: {top:.1%}")
    ax.set(title="Cumulative mass", xlabel="share of items, most probable first", ylabel="share of draws")
    ax.set(xlim=(-0.02, 1.02), ylim=(0, 1.03))
    ax.legend(loc="lower right")


def _weights(ax: Any, weights: np.ndarray) -> None:
    share = np.sum(weights) ** 2 / np.sum(weights**2) / weights.size
    most = min(1.02 * weights.max(), 1.1 * np.quantile(weights, 0.995))  # a few weights may be much larger
    counts, bins = np.histogram(weights, np.linspace(0, most, 41))
    ax.stairs(counts / weights.size, bins, fill=True, color=ACCENT, alpha=0.85)
    ax.axvline(weights.mean(), color=SECOND, linewidth=1.6, label=f"mean {weights.mean():.2g}")
    ax.set(title="Importance weights", xlabel=f"weight (effective sample size: {share:.0%})", ylabel="share of draws")
    ax.legend()
