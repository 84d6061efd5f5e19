"""Reports as a self-contained HTML page."""

import html

from jaxreplay.inspection._figures import Picture, data_uri
from jaxreplay.inspection._saved import Saved
from jaxreplay.inspection._text import numbers_of, quantiles, short, type_text
from jaxreplay.inspection._views import View

STYLE = """
:root { color-scheme: light; --ink: #22313f; --soft: #5d6b77; --line: #dde4ea; --accent: #2a6f97; }
* { box-sizing: border-box; }
body { margin: 0; background: #f3f6f8; color: var(--ink); font: 16px/1.5 system-ui, sans-serif; }
main { max-width: 62rem; margin: 0 auto; padding: 1.2rem 1rem 3rem; }
h1 { font-size: 1.35rem; margin: 0; overflow-wrap: anywhere; }
h2 { font-size: 1.15rem; margin: 0 0 .6rem; overflow-wrap: anywhere; }
h2 small { color: var(--soft); font-weight: normal; }
h3 { font-size: .95rem; margin: 1.1rem 0 .3rem; color: var(--accent); }
header p { margin: .2rem 0 0; color: var(--soft); }
section { background: #fff; border: 1px solid var(--line); border-radius: .7rem; padding: 1rem; margin-top: 1.2rem; }
.facts { display: flex; flex-wrap: wrap; gap: .5rem; margin: 0; }
.facts div { flex: 1 1 8rem; background: #f3f6f8; border-radius: .5rem; padding: .45rem .6rem; }
dt { color: var(--soft); font-size: .78rem; line-height: 1.25; }
dd { margin: .1rem 0 0; font-size: .95rem; font-variant-numeric: tabular-nums; overflow-wrap: anywhere; }
.figures { display: flex; flex-wrap: wrap; gap: 1rem; margin-top: 1rem; }
figure { flex: 1 1 21rem; min-width: 0; max-width: 32rem; margin: 0; }
figure img { width: 100%; height: auto; display: block; }
figcaption { color: var(--soft); font-size: .85rem; padding: .1rem .3rem 0; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-size: .85rem; width: 100%; }
th, td { text-align: left; padding: .25rem .8rem .25rem 0; border-bottom: 1px solid var(--line); vertical-align: top; }
td.n, th.n { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; }
td { overflow-wrap: anywhere; }
th { color: var(--soft); font-weight: normal; }
code { font-size: .92em; overflow-wrap: anywhere; }
"""


def page(
    saved: Saved,
    views: list[tuple[View, dict[str, Picture]]],
    others: list[tuple[str, int, int]],
) -> str:
    """The HTML page of a report."""
    sections = [_section(view, pictures) for view, pictures in views]
    if not views:
        sections.append("<section><p>No buffer and no pools found.</p></section>")
    if others:
        rows = [(name, f"{count:,}", f"{nbytes:,}") for name, count, nbytes in others]
        table = _table(("part", "arrays", "bytes"), rows, 1)
        sections.append(f"<section><h2>Other contents</h2>{table}</section>")
    facts = " · ".join(_escape(f"{name}: {value}") for name, value in saved.facts.items())
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{_escape(saved.title)}</title>
<style>{STYLE}</style>
</head>
<body>
<main>
<header><h1>{_escape(saved.title)}</h1><p>{facts}</p></header>
{"".join(sections)}
</main>
</body>
</html>
"""


def _section(view: View, pictures: dict[str, Picture]) -> str:
    kind = f"<small>{_escape(view.kind)}</small>" if view.name else _escape(view.kind)
    parts = [f"<section><h2>{_escape(view.name)} {kind}</h2>", _facts(view.facts)]
    if pictures:
        figures = "".join(
            f'<figure><img alt="{_escape(f"{name}: {x.caption}")}" src="{data_uri(x.figure)}">'
            f"<figcaption>{_escape(x.caption)}</figcaption></figure>"
            for name, x in pictures.items()
        )
        parts.append(f'<div class="figures">{figures}</div>')
    if numbers := numbers_of(view):
        rows = [(what, *map(short, quantiles(x).values())) for what, x, _ in numbers]
        parts.append(f"<h3>Quantiles over the items</h3>{_table(('', 'min', '10%', '50%', '90%', 'max'), rows, 1)}")
    if view.leaves:
        rows = [(path, type_text(dtype, shape), f"{nbytes:,}") for path, dtype, shape, nbytes in view.leaves]
        parts.append(f"<h3>Item</h3>{_table(('leaf', 'type', 'bytes stored'), rows, 2)}")
    if view.settings:
        parts.append(f"<h3>Configuration</h3>{_table(('', ''), list(view.settings.items()), 2)}")
    return "".join(parts) + "</section>"


def _facts(facts: dict[str, str]) -> str:
    cells = (f"<div><dt>{_escape(name)}</dt><dd>{_escape(value)}</dd></div>" for name, value in facts.items())
    return f'<dl class="facts">{"".join(cells)}</dl>'


def _table(head: tuple[str, ...], rows: list[tuple[str, ...]], first_number: int) -> str:
    """A table; columns from `first_number` on hold numbers and are right-aligned."""

    def row(cells: tuple[str, ...], kind: str) -> str:
        found = [
            f"<{kind}{' class=n' if i >= first_number else ''}>{_escape(cell)}</{kind}>" for i, cell in enumerate(cells)
        ]
        return f"<tr>{''.join(found)}</tr>"

    top = row(head, "th") if any(head) else ""
    return f'<div class="scroll"><table>{top}{"".join(row(x, "td") for x in rows)}</table></div>'


def _escape(text: str) -> str:
    return html.escape(text)
