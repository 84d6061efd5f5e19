"""`python -m jaxreplay` prints what a checkpoint holds."""

import re
import runpy
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import over_devices

import jaxreplay as jr
from jaxreplay import __main__ as program
from jaxreplay.__main__ import main


@pytest.mark.versions
def test_a_checkpoint_is_printed(tmp_path, capsys):
    sampler = jr.Prioritized(beta=optax.linear_schedule(0.4, 1.0, 4))
    buffer = over_devices(jr.ReplayBuffer(capacity=8, sampler=sampler), 2)
    config = {"replay": buffer, "kind": np.dtype("int8"), "nothing": None}
    items = {"half": jnp.zeros((2, 3), jnp.bfloat16), "key": jax.random.split(jax.random.key(0), 2)}
    state = {"replay": buffer.init(items), "small": jnp.zeros(3, jnp.int4), "steps": 1234}
    jr.save(tmp_path, config, state, step=7)
    assert main([str(tmp_path)]) == 0
    text = capsys.readouterr().out
    first, settings, table = text.split("\n\n")
    assert re.fullmatch(rf"{tmp_path}: saved by jaxreplay '\S+', step 7", first)
    settings = dict(line.split(" = ") for line in settings.splitlines())
    assert settings["config['replay'].capacity"] == "8"
    assert settings["config['replay'].sampler"] == "'jaxreplay.Prioritized'"
    assert settings["config['replay'].sampler.beta"].startswith("'optax.")
    assert (settings["config['kind']"], settings["config['nothing']"]) == ("'int8'", "None")
    head, *rows, last = table.splitlines()
    assert head.split() == ["array", "dtype", "shape", "bytes", "on", "disk"]
    cells = {name: (dtype, shape, number_of(size)) for name, dtype, shape, size in map(cut, rows)}
    assert cells["['replay'].storage['half'].bits"][:2] == ("uint16", "[2, 4, 3]")
    assert cells["['replay'].storage['key']"][:2] == ("key<fry>", "[2, 4]")
    assert cells["['small']"][:2] == ("int4", "[3]")
    assert cells["['steps']"] == ("int", "1234", 0)
    assert all(size > 0 for name, (_, _, size) in cells.items() if name != "['steps']")
    assert cut(last)[0] == f"{len(rows)} arrays and numbers"
    files = [file for file in tmp_path.rglob("*") if file.is_file() and file.name != "description.json"]
    assert number_of(cut(last)[-1]) == sum(file.stat().st_size for file in files)
    assert len({len(line) for line in table.splitlines()}) == 1


def number_of(text):
    return int(text.replace(",", ""))


def cut(row):
    """Cells of a row of the table."""
    return [cell.strip() for cell in row.split("  ") if cell.strip()]


def test_a_configuration_that_is_no_dict_and_a_path_without_a_checkpoint(tmp_path, capsys):
    buffer = jr.ReplayBuffer(capacity=1000, axes=1)
    jr.save(tmp_path / "run", buffer, buffer.init(jnp.zeros(1, jnp.float32)))
    assert main([str(tmp_path / "run")]) == 0
    out = capsys.readouterr().out
    assert "\nconfig = 'jaxreplay.ReplayBuffer'\nconfig.capacity = 1000\n" in out
    assert main([str(tmp_path / "nothing")]) == 2
    assert "no complete checkpoint there" in capsys.readouterr().err
    (tmp_path / "run/checkpoint_0/description.json").write_text("no")
    assert main([str(tmp_path / "run")]) == 2
    assert "the checkpoint is damaged" in capsys.readouterr().err


def test_the_program_ends_with_the_status(tmp_path, monkeypatch, capsys):
    with pytest.raises(SystemExit) as end:
        main(["--help"])
    assert end.value.code == 0
    assert capsys.readouterr().out.startswith("usage: python -m jaxreplay ")
    monkeypatch.setattr(sys, "argv", ["jaxreplay", str(tmp_path)])
    with pytest.raises(SystemExit) as end:
        runpy.run_path(program.__file__, run_name="__main__")
    assert end.value.code == 2
