"""Figures of pages and of the studies' docstrings are those of result files, which the studies write
(`experiment.report`)."""

import ast
import json
import pathlib
import re
import runpy
import types

import experiment
import numpy as np
import pytest

ROOT = pathlib.Path(__file__).parent.parent
evidence = types.SimpleNamespace(**runpy.run_path(ROOT / ".docs/evidence.py"))
PAGES = {path.name: path.read_text() for path in evidence.PAGES}
RECORDS = evidence.all_records()
FILES = sorted((ROOT / "examples").glob("[as]*s/*.py"))  # agents and studies
PROGRAMS = sorted({record["command"].split()[0] for record in RECORDS.values()})
STUDIES = [line for line in PAGES["evidence.md"].split("\n") if evidence.is_study(line)]
WITH_INTERVAL = re.compile(rf"{evidence.NUMBER} \[{evidence.NUMBER}, {evidence.NUMBER}\]")


@pytest.mark.parametrize("name", PAGES)
def test_tables_have_the_figures_of_the_result_files(name):
    found, expected = PAGES[name].split("\n"), evidence.filled(PAGES[name], RECORDS).split("\n")
    assert found == expected, "run python .docs/evidence.py"


def test_the_table_has_every_program_with_a_result_file():
    assert f"| {' | '.join(evidence.COLUMNS)} |" in PAGES["evidence.md"].split("\n")
    shown = [RECORDS[name]["command"] for _, name in evidence.LINK.findall("".join(STUDIES))]
    assert len(set(shown)) == len(shown) >= 19
    assert sorted({command.split()[0] for command in shown}) == PROGRAMS


def is_shown(shown, records):
    """True if a figure of `records` is `shown`, such as "0.99 [0.98, 1.00]"."""
    figures = [figure for record in records for figure in record["figures"].values()]
    return any(evidence.updated(figure, shown) == shown for figure in figures)


@pytest.mark.parametrize("name", PAGES)
def test_text_has_the_figures_of_the_result_files(name):
    for section in PAGES[name].split("\n## "):
        text = " ".join(line for line in section.split("\n") if not line.startswith("|"))
        links = {link for _, link in evidence.LINK.findall(text)}
        for shown in WITH_INTERVAL.findall(text):
            assert is_shown(shown, [RECORDS[link] for link in links]), shown


def intervals_of(path):
    """Figures with intervals in a program's docstring."""
    return WITH_INTERVAL.findall(" ".join(ast.get_docstring(ast.parse(path.read_text())).split()))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_docstrings_have_the_figures_of_the_result_files(path):
    """A program's result files are named after it."""
    for shown in intervals_of(path):
        assert is_shown(shown, [record for name, record in RECORDS.items() if name.startswith(path.stem)]), shown


def test_programs_whose_docstrings_have_figures():
    """Of all programs, so that the test above does not pass for want of figures."""
    shown = {path.stem for path in FILES if intervals_of(path)}
    assert {"r2d2", "her", "nfsp", "rlpd", "levels", "cliffwalk", "rae"} <= shown


BETTER = ("how_large", "n = 10,", "n = 1,"), ("sweep", "n 8,", "n 1,"), ("sweep", "alpha 0.9,", "alpha 0,")


def test_the_counts_of_the_page_of_buffers_are_those_of_the_result_files():
    """In how many cells one value of a setting has a higher return than another."""
    page = " ".join((ROOT / ".docs/pages/buffers.md").read_text().split())
    patterns = r"in (\d+) of (\d+) cells", r"n = 8 beat n = 1 in (\d+) of (\d+)", r"alpha 0.9 beat 0 in (\d+) of (\d+)"
    for pattern, (name, value, other) in zip(patterns, BETTER, strict=True):
        figures = {key: figure["value"] for key, figure in RECORDS[f"{name}.json"]["figures"].items()}
        wins = [x > figures[key.replace(value, other)] for key, x in figures.items() if value in key]
        assert [int(count) for count in re.search(pattern, page).groups()] == [sum(wins), len(wins)]


@pytest.mark.parametrize("name", RECORDS)
def test_intervals_are_those_of_the_seeds(name):
    for figure in RECORDS[name]["figures"].values():
        values = np.array(figure.get("seeds", [np.nan]), float)
        if not np.isnan(values).any():
            found = [figure["value"], *figure["interval"]]
            np.testing.assert_allclose(found, [values.mean(), *experiment.interval(values)], rtol=1e-3, atol=1e-5)


def test_a_command_names_no_folder_of_this_machine(monkeypatch):
    words = ["/me/of/study.py", "--clone", "/home/me/Agents", "--data", "a/b", "--out", "/home/me/found", "--short"]
    monkeypatch.setattr("sys.argv", words)
    assert experiment.command() == "of/study.py --clone Agents --data a/b --short"


def test_a_study_s_figures_reach_the_page(tmp_path, monkeypatch):
    monkeypatch.setattr("sys.argv", ["examples/studies/study.py", "--out", str(tmp_path), "--short"])
    seeds = np.array([1.0, 2.0, 6.0])
    figures = {"a, b": seeds, "slope": (0.5, 0.25, 0.75), "a, none": np.nan, "a, count": 1_024, "slope: b": -0.001}
    experiment.report(tmp_path / "study.json", "a study", figures)
    record = json.loads((tmp_path / "study.json").read_text())
    low, high = experiment.interval(seeds)
    assert record["figures"]["a, b"] == {"value": 3.0, "interval": [round(low, 6), round(high, 6)], "seeds": [1, 2, 6]}
    assert record["figures"]["slope"] == {"value": 0.5, "interval": [0.25, 0.75]}
    assert record["figures"]["a, none"] == {"value": None}
    assert record["command"] == "studies/study.py --short"
    assert record["seeds"] == 3
    assert record["versions"].keys() >= {"python", "jax", "jaxreplay"}

    folder = "../examples/studies/results"
    page = (
        "| claim | slope: 0.00 [0, 0]; slope: b: 0.00; a, count: 0; 7 seeds | plotted "
        f"| []({folder}/study.json) |\n"
        f"\n## Below\n\n| | b | count |\n| --- | --- | --- |\n| a | 9.0 | 9 |\n\n[figures]({folder}/study.json)\n"
    )
    found = evidence.filled(page, {"study.json": record})
    assert found.split("\n")[0] == (
        "| claim | slope: 0.50 [0.25, 0.75]; slope: b: 0.00; a, count: 1,024; 3 seeds | plotted "
        f"| `examples/studies/study.py --short` ([figures]({folder}/study.json)) |"
    )
    assert f"\n| a | 3.0 [{low:.1f}, {high:.1f}] | 1,024 |\n" in found
    assert evidence.filled(found, {"study.json": record}) == found
    with pytest.raises(ValueError, match="too many values"):  # a figure of two files
        evidence.filled(f"{page}[more]({folder}/other.json)\n", {"study.json": record, "other.json": record})
