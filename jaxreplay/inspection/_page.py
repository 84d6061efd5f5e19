"""Reports as a self-contained HTML page."""

from html import escape

from jaxreplay.inspection._figures import data_uri, pictures
from jaxreplay.inspection._saved import Saved
from jaxreplay.inspection._sections import Section, Table, sections

STYLE = """
:root { color-scheme: light; --ink: #22313f; --soft: #5d6b77; --line: #dde4ea; --accent: #2a6f97; }
* { box-sizing: border-box; }
body { margin: 0; background: #f3f6f8; color: var(--ink); font: 16px/1.5 system-ui, sans-serif; }
main { max-width: 62rem; margin: 0 auto; padding: 1.2rem 1rem 3rem; }
h1, h2, dd { overflow-wrap: anywhere; }
td { white-space: nowrap; }
h1 { font-size: 1.35rem; margin: 0; }
h2 { font-size: 1.15rem; margin: 0 0 .6rem; }
h3 { font-size: .95rem; margin: 1.1rem 0 .3rem; color: var(--accent); }
h2 small, header p, dt, figcaption, th { color: var(--soft); font-weight: normal; }
header p { margin: .2rem 0 0; }
section { background: #fff; border: 1px solid var(--line); border-radius: .7rem; padding: 1rem; margin-top: 1.2rem; }
.facts, .figures { --least: 8rem; display: grid; gap: .5rem; margin: 0; }
.facts, .figures { grid-template-columns: repeat(auto-fill, minmax(min(var(--least), 100%), 1fr)); }
.figures { --least: 21rem; }
.facts div { background: #f3f6f8; border-radius: .5rem; padding: .45rem .6rem; }
dt { font-size: .78rem; line-height: 1.25; }
dd { margin: .1rem 0 0; font-size: .95rem; font-variant-numeric: tabular-nums; }
figure { min-width: 0; max-width: 32rem; margin: 1rem 0 0; }
figure img { width: 100%; height: auto; display: block; }
figcaption { font-size: .85rem; padding: .1rem .3rem 0; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-size: .85rem; width: 100%; }
th, td { text-align: left; padding: .25rem .8rem .25rem 0; border-bottom: 1px solid var(--line); vertical-align: top; }
.pairs td:first-child { width: 1%; }
.pairs td:last-child { white-space: normal; overflow-wrap: anywhere; }
.n { text-align: right; font-family: ui-monospace, monospace; white-space: pre; }
"""


def page(saved: Saved) -> str:
    """The report of a saved state as an HTML page.

    Raises:
      ImportError: matplotlib is not installed.
    """
    facts = " · ".join(escape(f"{name}: {value}") for name, value in saved.facts.items())
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{escape(saved.title)}</title>
<style>{STYLE}</style>
</head>
<body>
<main>
<header><h1>{escape(saved.title)}</h1><p>{facts}</p></header>
{"".join(map(_section, sections(saved)))}
</main>
</body>
</html>
"""


def _section(section: Section) -> str:
    kind = f"<small>{escape(section.kind)}</small>" if section.name else escape(section.kind)
    facts = (f"<div><dt>{escape(k)}</dt><dd>{escape(v)}</dd></div>" for k, v in section.facts.items())
    found = pictures(section.view) if section.view else {}
    figures = (
        f'<figure><img alt="{escape(f"{name}: {x.caption}")}" src="{data_uri(x.figure)}">'
        f"<figcaption>{escape(x.caption)}</figcaption></figure>"
        for name, x in found.items()
    )
    return (
        f'<section><h2>{escape(section.name)} {kind}</h2><dl class="facts">{"".join(facts)}</dl>'
        f'<div class="figures">{"".join(figures)}</div>{"".join(map(_table, section.tables))}</section>'
    )


def _table(table: Table) -> str:
    """A table; numbers are right-aligned."""

    def row(cells: tuple[str, ...], kind: str) -> str:
        classes = [" class=n" if i >= table.first_number else "" for i in range(len(cells))]
        pairs = zip(cells, classes, strict=True)
        return f"<tr>{''.join(f'<{kind}{names}>{escape(cell)}</{kind}>' for cell, names in pairs)}</tr>"

    rows = [row(table.head, "th")] * any(table.head) + [row(cells, "td") for cells in table.rows]
    kind = "" if any(table.head) else ' class="pairs"'
    return f'<h3>{escape(table.title)}</h3><div class="scroll"><table{kind}>{"".join(rows)}</table></div>'
