"""Matplotlib figures of a `View`. Matplotlib is imported here only, when the first figure is made."""

import base64
import importlib
import io
from typing import Any, NamedTuple

from jaxreplay.inspection._panels import SOFT, Panel, panels
from jaxreplay.inspection._views import View

INK = "#22313f"
WIDTH = 4.6  # inches: legible at the width of a phone
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
        for name, panel in panels(view).items():
            figure = matplotlib.figure.Figure(figsize=(WIDTH, panel.height))
            _draw(panel, figure.add_subplot())
            made[name] = Picture(figure, panel.caption)
    return made


def _draw(panel: Panel, ax: Any) -> None:
    for method, arguments, settings in panel.calls:
        drawn = getattr(ax, method)(*arguments, **settings)
        if method == "pcolormesh":
            ticks = [10**k for k in range(9) if k == 0 or 10**k <= drawn.get_array().max()]
            bar = ax.figure.colorbar(drawn, ax=ax, label="items", pad=0.02, ticks=ticks, format="{x:,.0f}")
            bar.minorticks_off()
            bar.ax.set_ylim(1, None)
    ax.set(**panel.axes)
    if count := len(ax.get_legend_handles_labels()[1]):  # between the title and the data
        ncols = 3 if count <= 3 else 2
        ax.legend(loc="lower left", bbox_to_anchor=(0, 1.0), ncols=ncols, borderaxespad=0.1, handlelength=1.2)
        ax.set_title(panel.axes["title"], pad=4 + 16 * -(-count // ncols))


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
