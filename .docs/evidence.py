"""Write the figures of result files into the pages: `python .docs/evidence.py`.

Each study writes a result file (`report` in `examples/studies/experiment.py`); those of the pages are in
`examples/studies/results`.

- A row of the table of studies names figures of the file that its last cell links to: `return: -145 [-156, -134]`. All
  its numbers are replaced, with as many digits as before; the number of seeds and the command too.
- In another table of a section that links to result files, a cell shows the figure "ROW, COLUMN" of these files. ROW
  is the first cell, without a verdict before it such as "helps: ".
"""

import json
import pathlib
import re
from typing import Any

ROOT = pathlib.Path(__file__).parent.parent
LINK = re.compile(r"\]\(([./]*examples/studies/results/(\w+\.json))\)")
PAGES = [path for path in sorted((ROOT / ".docs/pages").rglob("*.md")) if LINK.search(path.read_text())]
COLUMNS = ("claim", "ours", "the original", "command")
NUMBER = r"-?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?"


def rounded(figure: dict[str, Any], digits: int) -> str:
    """A figure as text, such as "-145 [-156, -134]"."""
    value, *ends = (f"{round(x, digits) + 0.0:,.{digits}f}" for x in (figure["value"], *figure.get("interval", ())))
    return f"{value} [{', '.join(ends)}]" if ends else value


def updated(figure: dict[str, Any], text: str) -> str:
    """A figure with as many digits as the text has, which is a number or any other placeholder."""
    found = re.search(NUMBER, text)
    return rounded(figure, len(found[0].partition(".")[2]) if found else 2)


def is_study(line: str) -> bool:
    """True for a row of the table of studies."""
    return line.startswith("| ") and len(cells(line)) == len(COLUMNS) and LINK.search(cells(line)[-1]) is not None


def cells(row: str) -> list[str]:
    return [cell.strip() for cell in row.strip()[1:-1].split("|")]


def row_of_study(row: str, records: dict[str, Any]) -> str:
    found = dict(zip(COLUMNS, cells(row), strict=True))
    path, name = LINK.search(found["command"]).groups()
    record, ours = records[name], []
    for part in found["ours"].split("; ")[:-1]:
        figure, _, text = part.rpartition(": ")
        ours.append(f"{figure}: {updated(record['figures'][figure], text)}")
    found["ours"] = "; ".join([*ours, f"{record['seeds']} seeds"])
    found["command"] = f"`examples/{record['command']}` ([figures]({path}))"
    return f"| {' | '.join(found.values())} |"


def filled(page: str, records: dict[str, Any]) -> str:
    """A page with the figures of `records`, by the name of their file."""
    sections = []
    for section in page.split("\n## "):
        lines, header = section.split("\n"), None
        links = {name for line in lines if not is_study(line) for _, name in LINK.findall(line)}
        figures = [records[link]["figures"] for link in links]
        for number, line in enumerate(lines):
            if not line.startswith("|"):
                header = None
            elif is_study(line):
                lines[number] = row_of_study(line, records)
            elif header is None:
                header = cells(line)
            elif figures and not line.startswith("| ---"):
                name, *texts = cells(line)
                found = [name]
                for column, text in zip(header[1:], texts, strict=True):
                    key = f"{name.rpartition(': ')[2]}, {column}"
                    (figure,) = [of_file[key] for of_file in figures if key in of_file]  # in one file alone
                    found.append(updated(figure, text))
                lines[number] = f"| {' | '.join(found)} |"
        sections.append("\n".join(lines))
    return "\n## ".join(sections)


def all_records() -> dict[str, Any]:
    folder = ROOT / "examples/studies/results"
    return {path.name: json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))}


if __name__ == "__main__":
    for path in PAGES:
        path.write_text(filled(path.read_text(), all_records()))
