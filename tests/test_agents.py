"""An agent is one file: it needs nothing else of the repository, is short, and runs alone in an empty folder."""

import ast
import os
import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parent.parent
AGENTS = sorted((ROOT / "examples/agents").glob("*.py"))
PACKAGES = {"jaxreplay", "jax", "flax", "optax", "numpy", "matplotlib", "tqdm", "gymnax", "gymnasium"}
LONG = {"r2d2", "levels", "sebulba"}  # may have 200 lines, the others 150


def imported(tree):
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (name.name.partition(".")[0] for name in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module.partition(".")[0]


def lines_of(tree):
    """Lines of code, without docstrings; comments and blank lines hold no node."""
    kinds = ast.Module, ast.ClassDef, ast.FunctionDef
    documented = [node for node in ast.walk(tree) if isinstance(node, kinds) and ast.get_docstring(node) is not None]
    docs = {line for node in documented for line in range(node.body[0].lineno, node.body[0].end_lineno + 1)}
    return {
        line for node in ast.walk(tree) if hasattr(node, "lineno") for line in (node.lineno, node.end_lineno)
    } - docs


@pytest.mark.parametrize("path", AGENTS, ids=lambda path: path.stem)
def test_an_agent_is_one_short_file(path):
    tree = ast.parse(path.read_text())
    assert set(imported(tree)) <= PACKAGES | sys.stdlib_module_names
    assert 50 < len(lines_of(tree)) <= (200 if path.stem in LONG else 150)
    options = [
        node.args[0].value
        for node in ast.walk(tree)
        if ast.unparse(getattr(node, "func", tree)).endswith("add_argument")
    ]
    assert options == ["--seed", "--seeds", "--short"]


TWO = ("DEVICES, PROCESSES = 4, 1\n", "DEVICES, PROCESSES = 4, 2\n")
CASES = {path.stem: (path, ("", "")) for path in AGENTS}
CASES["multi_device in two processes"] = ROOT / "examples/agents/multi_device.py", TWO


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_an_agent_copied_alone_runs(case, tmp_path):
    pytest.importorskip("gymnax")
    path, (old, new) = CASES[case]
    assert old in path.read_text()
    (tmp_path / path.name).write_text(path.read_text().replace(old, new))
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | {"MPLBACKEND": "agg"}
    installed = [sys.executable, "-c", "import jaxreplay"]
    if subprocess.run(installed, cwd=tmp_path, env=environment, capture_output=True).returncode:  # a checkout alone
        environment["PYTHONPATH"] = str(ROOT)
    done = subprocess.run(
        [sys.executable, path.name, "--short"], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert "by seed" in done.stdout
    assert (tmp_path / f"{path.stem}.png").stat().st_size > 10_000
