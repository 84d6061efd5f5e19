"""The page of ports has the figures of the result files, the lines that they count are code, and no port needs a
private name of jaxreplay."""

import ast
import collections
import json
import pathlib
import re
import runpy
import types

import pytest

ROOT = pathlib.Path(__file__).parent.parent
FOLDER = ROOT / "examples" / "ports"


@pytest.fixture(scope="module")
def measure():
    return types.SimpleNamespace(**runpy.run_path(FOLDER / "measure.py"))


def is_private(name):
    return name.startswith("_") and name.strip("_") and not name.endswith("__")


def defined(tree):
    """Names of functions and classes, and those that are assigned to, with or without an object before them."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            yield node.name
        elif isinstance(node, (ast.Name, ast.Attribute)) and isinstance(node.ctx, ast.Store):
            yield node.id if isinstance(node, ast.Name) else node.attr


def used(tree):
    """Attributes that a module reads, and the dotted names of jaxreplay that it imports or reads."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            dotted = ast.unparse(node)
            yield node.attr, dotted if dotted.replace(".", "").isidentifier() else node.attr
        elif isinstance(node, ast.ImportFrom):
            yield from ((name.name, f"{node.module}.{name.name}") for name in node.names)
        elif isinstance(node, ast.Import):
            yield from ((name.name, name.name) for name in node.names)


def counted():
    """A docstring,
    of two lines."""
    # a comment

    text = """two
lines"""
    return [
        text  # in three lines
    ]


def test_lines(measure):
    assert measure.count_lines(counted) == 6
    assert measure.count_lines(counted, counted) == 12


def test_page(measure):
    page = measure.PAGE.read_text()
    assert page.split(measure.BEGIN)[1].split(measure.END)[0] == measure.table(), "python examples/ports/measure.py"


def numbers(text):
    return {float(x.replace(",", "")) for x in re.findall(r"-?\d+(?:,\d{3})*(?:\.\d+)?", text)}


def test_findings_have_the_numbers_of_the_checks(measure):
    """Each number of a finding is in the checks of that library, or is the time of its buffer alone."""
    found = dict(re.findall(r"^- \*\*(\w+)\*\*(.*?)(?=^- |\Z)", measure.PAGE.read_text(), re.MULTILINE | re.DOTALL))
    assert len(found) >= 9
    for library, text in found.items():
        files = [json.loads(path.read_text()) for path in measure.RESULTS.glob(f"{library.lower()}_*.json")]
        known = {0.0, 1.0, 5.0, 7.0, 8.0}  # as in "one of two", "gamma^5" and "7 of 8 seeds"
        for file in files:
            for check in file.get("checks", []):
                known |= numbers(" ".join(str(value) for value in check.values()))
            for row in file.get("rows", []):
                known |= numbers(row["task"]) | numbers(measure.ratio(row).partition(" [")[0])
        assert files
        assert numbers(text) <= known, library


def test_stoix_breaks_down_as_the_page_says(measure):
    rows = json.loads((measure.RESULTS / "stoix_rainbow.json").read_text())["rows"]
    assert sum(x < 10 for x in rows[0]["returns"]["original"]) == 7
    assert all(min(row["returns"]["port"]) > 100 for row in rows)


def test_a_row_is_what_its_figures_say(measure):
    row = {"port": "buffer only", "task": "task", "returns": {"original": [1.0, 1.0], "port": [2.0, 2.0]}}
    row["seconds"] = {"original": [2.0, 4.0, 1.0], "port": [1.0, 1.0, 1.0]}
    assert measure.returns(row) == ["2.0 [2.0, 2.0]", "1.0 [1.0, 1.0]"]
    assert measure.ratio(row) == "0.5 [0.25, 1]"
    assert measure.returns({**row, "returns": None}) is None
    assert measure.ratio({**row, "seconds": {"original": [2.0], "port": [1.0]}}) == ""
    slower = {**row, "seconds": {"original": [1.0] * 3, "port": [3.0] * 3}}
    alone = {**row, "task": "the buffer alone", "seconds": {"original": [1.0] * 3, "port": [9.0] * 3}}
    files = [{"agent": "DQN", "rows": [row, slower, alone]}, {"agent": "SAC", "rows": [row]}, {"agent": "DQN"}]
    assert measure.times("DQN", "buffer only", files) == "0.5 to 3"
    assert measure.times("SAC", "buffer only", files) == "0.5"
    assert measure.times("SAC", "other", files) == "-"


@pytest.mark.parametrize("path", sorted((FOLDER / "results").glob("*.json")), ids=lambda path: path.stem)
def test_results(measure, path):
    found = json.loads(path.read_text())
    assert found["versions"]["jaxreplay"]
    assert found.get("rows") or found.get("checks")
    for row in found.get("rows", []):
        assert len(row["seconds"]["original"]) == len(row["seconds"]["port"])
        assert row["returns"] is None or len(row["returns"]["original"]) == len(row["returns"]["port"]) >= 8


@pytest.fixture(scope="module")
def private():
    """The private names that jaxreplay defines, except those of any named tuple."""
    trees = [ast.parse(path.read_text()) for path in (ROOT / "jaxreplay").rglob("*.py")]
    assert trees
    names = {name for tree in trees for name in defined(tree) if is_private(name)}
    return names - {*dir(collections.namedtuple("Row", ""))}


def uses(tree, private):
    """The private names of jaxreplay that a module uses and does not define itself."""
    private = private - {*defined(tree)}
    dotted = [text for name, text in used(tree) if name in private or text.split(".")[0] in ("jaxreplay", "jr")]
    return [text for text in dotted if any(map(is_private, text.split(".")))]


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.py")), ids=lambda path: path.stem)
def test_no_private_name(private, path):
    assert uses(ast.parse(path.read_text()), private) == []


@pytest.mark.parametrize(
    ("line", "count"),
    [
        ("from jaxreplay.buffers._replay import ReplayState", 1),
        ("from jaxreplay.wrappers import _shared", 1),
        ("import jaxreplay._common.ring", 1),
        ("jr.buffers._replay", 1),
        ("made.shared._turns", 1),
        ("jr.sum_tree.SumTree(self._env.step(made.shared.slack, row._replace(reward=0))).slack", 0),
    ],
)
def test_private_names_are_found(private, line, count):
    assert len(uses(ast.parse(line), private)) == count
