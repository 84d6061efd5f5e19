"""An agent is one file: it needs nothing else of the repository, is short, and runs alone in an empty folder."""

import ast
import contextlib
import functools
import os
import pathlib
import socket
import subprocess
import sys
from unittest import mock

import experiment
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxreplay as jr

ROOT = pathlib.Path(__file__).parent.parent
AGENTS = sorted((ROOT / "examples/agents").glob("*.py"))
PACKAGES = {"jaxreplay", "jax", "flax", "optax", "numpy", "matplotlib", "tqdm", "gymnax", "gymnasium"}
LONG = {"fast_td3", "r2d2", "levels", "sebulba"}  # may have 200 lines, the others 150


def imported(tree):
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (name.name.partition(".")[0] for name in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module.partition(".")[0]


def lines_of(tree):
    """Lines of code, without docstrings; comments and blank lines hold no node."""
    nodes = [*ast.walk(tree)]
    lines = {line for node in nodes if hasattr(node, "lineno") for line in (node.lineno, node.end_lineno)}
    for node in nodes:
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(node) is not None:
            lines -= {*range(node.body[0].lineno, node.body[0].end_lineno + 1)}
    return lines


@pytest.mark.parametrize("path", AGENTS, ids=lambda path: path.stem)
def test_an_agent_is_one_short_file(path):
    tree = ast.parse(path.read_text())
    assert set(imported(tree)) <= PACKAGES | sys.stdlib_module_names
    assert 50 < len(lines_of(tree)) <= (200 if path.stem in LONG else 150)
    calls = [node for node in ast.walk(tree) if getattr(getattr(node, "func", None), "attr", "") == "add_argument"]
    options = [call.args[0].value for call in calls]
    assert options == ["--seed", "--seeds", "--short"]


CASES = {path.stem: (path, 1) for path in AGENTS}
CASES["multi_device in two processes"] = ROOT / "examples/agents/multi_device.py", 2


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_an_agent_copied_alone_runs(case, tmp_path):
    pytest.importorskip("gymnax")
    path, processes = CASES[case]
    (tmp_path / path.name).write_text(path.read_text())
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | {"MPLBACKEND": "agg"}
    installed = [sys.executable, "-c", "import jaxreplay"]
    if subprocess.run(installed, cwd=tmp_path, env=environment, capture_output=True).returncode:  # a checkout alone
        environment["PYTHONPATH"] = str(ROOT)
    with socket.create_server(("localhost", 0)) as free:
        environment |= {"COORDINATOR": f"localhost:{free.getsockname()[1]}", "PROCESSES": str(processes)}
    command, pipes = [sys.executable, path.name, "--short"], {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with contextlib.ExitStack() as ended:
        ranks = [environment | {"RANK": str(rank)} for rank in range(processes)]
        running = [subprocess.Popen(command, cwd=tmp_path, env=env, text=True, **pipes) for env in ranks]
        for process in running:
            ended.callback(process.kill)
        (out, err), *others = [process.communicate(timeout=300) for process in running]
    assert [process.returncode for process in running] == [0] * processes, err
    assert "by seed" in out
    assert not any("by seed" in out for out, _ in others)
    assert (tmp_path / f"{path.stem}.png").stat().st_size > 10_000


def values_learned(agent, key, weight):
    """Parameters of the values, before and after an update with these importance weights."""
    if agent.__name__ == "agent_sebulba":
        params, x = agent.network.init(key, jnp.ones((1, 4))), jnp.ones((8, 4))
        batch = jr.TransitionBatch(x, jnp.ones(8, jnp.int32), None, x[:, 0], x[:, 0], -x, W=weight * x[:, 0])
        return params, agent.learn(params, params, agent.optimizer.init(params), batch)[0]
    state, _ = jax.lax.scan(lambda state, _: (agent.act(state, 1.0)[0], None), agent.init(key), length=30)
    sample = agent.buffer.sample(state.buffer, key, agent.BATCH)
    sample = sample.replace(weights=weight * jnp.ones_like(sample.weights))
    with mock.patch.object(agent, "buffer", mock.Mock(sample=lambda *_: sample, update=lambda state, *_: state)):
        after = agent.learn(state)
    return [x.networks["critics"] if agent.__name__ == "agent_sac" else x.params for x in (state, after)]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["dqn", "minatar", "multi_device", "r2d2", "sac", "sebulba"])
def test_a_prioritized_agent_weights_its_loss(name, monkeypatch):
    pytest.importorskip("gymnax")
    monkeypatch.setattr(jax.config, "update", lambda *_: None)  # the devices are there
    learned = jax.jit(functools.partial(values_learned, experiment.agent(name)))
    for weight in (0.0, 1.0):
        before, after = learned(jax.random.key(0), weight)
        same = jax.tree.leaves(jax.tree.map(np.array_equal, before, after))
        assert not any(same) if weight else all(same)
