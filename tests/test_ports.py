"""The page of ports has the tables that its figures make, and the lines of code that they count are code."""

import importlib.util
import json
import pathlib

import pytest

FOLDER = pathlib.Path(__file__).parent.parent / "examples" / "ports"


@pytest.fixture(scope="module")
def measure():
    spec = importlib.util.spec_from_file_location("ports_measure", FOLDER / "measure.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def counted():
    """A docstring,
    of two lines."""
    # a comment

    text = """two
lines"""
    return [
        text,  # in three lines
    ]


def test_lines(measure):
    assert measure.count_lines(counted) == 6
    assert measure.count_lines(counted, counted) == 12


def test_page(measure):
    page = measure.PAGE.read_text()
    assert page.split(measure.BEGIN)[1].split(measure.END)[0] == measure.tables(), (
        "python examples/ports/measure.py --write"
    )


def test_a_row_is_what_its_figures_say(measure):
    memory = {"original": {"temporaries": 2_000_000}, "port": {"temporaries": 500_000}}
    row = {
        "port": "buffer only",
        "task": "task",
        "lines": 3,
        "seconds": {"original": [2.0, 4.0, 1.0], "port": [1.0, 1.0, 1.0]},
        "compile_seconds": {"original": 2.0, "port": 1.0},
        "memory_bytes": memory,
        "returns": {"original": [1.0, 1.0], "port": [2.0, 2.0]},
    }
    assert measure.returns(row) == ["buffer only", "task", "3", "1.0 [1.0, 1.0]", "2.0 [2.0, 2.0]"]
    assert measure.speed(row) == ["buffer only", "task", "0.5 [0.25, 1]", "2 → 0.5", "0.50"]
    assert measure.returns({**row, "returns": None}) is None
    threads = {**row, "memory_bytes": None, "compile_seconds": None}
    assert measure.speed(threads) == ["buffer only", "task", "0.5 [0.25, 1]", "-", "-"]
    assert measure.speed({**row, "seconds": {"original": [2.0], "port": [1.0]}}) is None


@pytest.mark.parametrize("path", sorted((FOLDER / "results").glob("*.json")), ids=lambda path: path.stem)
def test_results(measure, path):
    found = json.loads(path.read_text())
    assert found["versions"]["jaxreplay"]
    assert found.get("rows") or found.get("checks")
    for row in found.get("rows", []):
        assert len(row["seconds"]["original"]) == len(row["seconds"]["port"])
        assert row["returns"] is None or len(row["returns"]["original"]) == len(row["returns"]["port"]) >= 8
