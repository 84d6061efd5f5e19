"""Sections: the contents of a report as tables of text, and their form in a terminal."""

from typing import NamedTuple

import numpy as np

from jaxreplay.inspection import _views
from jaxreplay.inspection._saved import Saved
from jaxreplay.inspection._views import POOLS, View

BARS = " ▁▂▃▄▅▆▇█"
QUANTILES = {"min": 0.0, "10%": 0.1, "50%": 0.5, "90%": 0.9, "max": 1.0}
MOST_ENVS = 30


class Table(NamedTuple):
    """A table.

    Attributes:
      title: its heading.
      head: names of the columns.
      rows: cells as text.
      first_number: columns from this one on hold numbers.
    """

    title: str
    head: tuple[str, ...]
    rows: list[tuple[str, ...]]
    first_number: int


class Section(NamedTuple):
    """A part of a report. `view` is None for contents that are neither buffers nor pools."""

    name: str
    kind: str
    facts: dict[str, str]
    tables: list[Table]
    view: View | None = None


def sections(saved: Saved) -> list[Section]:
    """All parts of a report."""
    found = [Section(view.name, view.kind, view.facts, _tables(view), view) for view in _views.views(saved)]
    if not found:
        found.append(Section("", "No buffer and no pools found.", {}, []))
    if rows := [(name, f"{count:,}", f"{nbytes:,}") for name, count, nbytes in _views.others(saved)]:
        found.append(Section("", "Other contents", {}, [Table("Parts", ("part", "arrays", "bytes"), rows, 1)]))
    return found


def text(saved: Saved) -> str:
    """A report for a terminal; each line ends with a newline."""
    lines = [saved.title, *_aligned([*saved.facts.items()], 2)]
    for section in sections(saved):
        lines += ["", ": ".join(filter(None, section[:2])), *_aligned([*section.facts.items()], 2)]
        for title, head, rows, _ in section.tables:
            lines += [f"  {title}", *_aligned([head, *rows] if any(head) else rows, 4)]
    return "\n".join(lines) + "\n"


def _tables(view: View) -> list[Table]:
    """All tables of a view that have rows."""
    numbers = [
        (f"priority {view.power}", view.priorities, True),
        ("age", view.ages, False),
        ("weight", view.weights, False),
        ("updates per item", view.updates, False),
        *([] if view.returns is None else [(*view.returns, False)]),
        ("episode length", view.episodes, False),
    ]
    quantile_rows = [
        (what, *map(_short, quantiles(x)), _bars(x, log)) for what, x, log in numbers if x is not None and x.size
    ]
    leaves = [(path, f"{kind}[{', '.join(map(str, shape))}]", f"{size:,}") for path, kind, shape, size in view.leaves]
    names, sizes = view.pools or ([], [])
    pools = [(name, *map(str, size)) for name, size in zip(names[:MOST_ENVS], sizes, strict=False)]
    if len(names) > MOST_ENVS:
        pools.append((f"... {len(names) - MOST_ENVS} more", "", "", ""))
    found = [
        Table("Quantiles over the items", ("", *QUANTILES, "histogram"), quantile_rows, 1),
        Table("Item", ("leaf", "type", "bytes stored"), leaves, 2),
        Table("Tasks", ("environment", *POOLS), pools, 1),
        Table("Configuration", ("", ""), [*view.settings.items()], 2),
    ]
    return [table for table in found if table.rows]


def quantiles(numbers: np.ndarray) -> list[float]:
    """The `QUANTILES`, which are numbers that occur."""
    return np.quantile(numbers, [*QUANTILES.values()], method="inverted_cdf").tolist()


def _short(x: float) -> str:
    """A number with few digits."""
    return f"{x:,.0f}" if x == round(x) and abs(x) < 1e9 else f"{x:.4g}"


def _bars(numbers: np.ndarray, log: bool, width: int = 40) -> str:
    """A histogram in one line."""
    if log:
        positive = numbers[numbers > 0]
        numbers = np.log(positive) if positive.size else np.zeros(1)
    if numbers.dtype.kind in "iu":
        width = min(width, int(np.ptp(numbers)) + 1)
    counts = np.histogram(numbers, width)[0]
    heights = np.ceil(counts / max(counts.max(), 1) * (len(BARS) - 1)).astype(int)
    return "".join(BARS[height] for height in heights) + (" (log)" if log else "")


def _aligned(rows: list[tuple[str, ...]], indent: int) -> list[str]:
    """Lines with aligned columns."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [" " * indent + "  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
