"""Reports as text for a terminal."""

import numpy as np

from jaxreplay.inspection._saved import Saved
from jaxreplay.inspection._views import View

BARS = " ▁▂▃▄▅▆▇█"
QUANTILES = (0.0, 0.1, 0.5, 0.9, 1.0)


def text(saved: Saved, views: list[View], others: list[tuple[str, int, int]]) -> str:
    """The text of a report; each line ends with a newline."""
    parts = [saved.title, _table(list(saved.facts.items()))]
    for view in views:
        parts += ["", *_view(view)]
    if not views:
        parts += ["", "No buffer and no pools found."]
    if others:
        rows = [(name, f"{count:,} arrays", f"{nbytes:,} bytes") for name, count, nbytes in others]
        parts += ["", "Other contents", _table(rows)]
    return "\n".join(parts) + "\n"


def _view(view: View) -> list[str]:
    name = f"{view.name}: " if view.name else ""
    lines = [f"{name}{view.kind}", _table(list(view.settings.items())), _table(list(view.facts.items()))]
    if view.leaves:
        rows = [(path, type_text(dtype, shape), f"{nbytes:,} bytes") for path, dtype, shape, nbytes in view.leaves]
        lines += ["  item", _table(rows, 4)]
    for what, numbers, log in numbers_of(view):
        lines.append(f"  {what}")
        lines.append("    " + "  ".join(f"{n}: {short(x)}" for n, x in quantiles(numbers).items()))
        lines.append("    " + bars(numbers, log))
    if view.pools is not None:
        rows = [("environment", "normal", "easy", "hard")]
        names, sizes = view.pools
        rows += [(name, *map(str, size)) for name, size in zip(names[:30], sizes, strict=False)]
        lines += [_table(rows, 2)] + ([f"  ... {len(names) - 30} more"] if len(names) > 30 else [])
    return [line for line in lines if line]


def type_text(dtype: str, shape: tuple[int, ...]) -> str:
    """Dtype and shape of an item leaf."""
    return f"{dtype}[{', '.join(map(str, shape))}]"


def numbers_of(view: View) -> list[tuple[str, np.ndarray, bool]]:
    """Per-item numbers of a view: a label, the numbers, and True for a log scale."""
    found = [
        (f"priority {view.power}", view.priorities, True),
        ("age", view.ages, False),
        ("weight", view.weights, False),
        ("updates per item", view.updates, False),
        *([] if view.returns is None else [(*view.returns, False)]),
        ("episode length", view.episodes, False),
    ]
    return [(what, x, log) for what, x, log in found if x is not None and x.size > 0]


def quantiles(numbers: np.ndarray) -> dict[str, float]:
    """Quantiles by name."""
    names = ("min", "10%", "50%", "90%", "max")
    return dict(zip(names, np.quantile(numbers, QUANTILES, method="inverted_cdf").tolist(), strict=True))


def short(x: float) -> str:
    """A number with few digits."""
    return f"{x:,.0f}" if x == round(x) and abs(x) < 1e9 else f"{x:.4g}"


def bars(numbers: np.ndarray, log: bool, width: int = 40) -> str:
    """A histogram in one line."""
    if log:
        positive = numbers[numbers > 0]
        numbers = np.log(positive) if positive.size else np.zeros(1)
    if numbers.dtype.kind in "iu":
        width = min(width, int(np.ptp(numbers)) + 1)
    counts = np.histogram(numbers, width)[0]
    heights = np.ceil(counts / max(counts.max(), 1) * (len(BARS) - 1)).astype(int)
    return "".join(BARS[height] for height in heights) + (" (log)" if log else "")


def _table(rows: list[tuple[str, ...]], indent: int = 2) -> str:
    """Rows with aligned columns."""
    if not rows:
        return ""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]) - 1)]
    lines = [[*(f"{x:<{w}}" for x, w in zip(row[:-1], widths, strict=True)), row[-1]] for row in rows]
    return "\n".join(" " * indent + "  ".join(line) for line in lines)
