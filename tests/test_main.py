"""`python -m jaxreplay` prints what a checkpoint holds."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import over_devices

import jaxreplay as jr
from jaxreplay.__main__ import main


@pytest.mark.versions
def test_a_checkpoint_is_printed(tmp_path, capsys):
    sampler = jr.Prioritized(beta=optax.linear_schedule(0.4, 1.0, 4))
    buffer = over_devices(jr.ReplayBuffer(capacity=8, sampler=sampler), 2)
    config = {"replay": buffer, "kind": np.dtype("int8"), "nothing": None}
    items = {"half": jnp.zeros((2, 3), jnp.bfloat16), "key": jax.random.split(jax.random.key(0), 2)}
    jr.save(tmp_path, config, {"replay": buffer.init(items), "small": jnp.zeros(3, jnp.int4)})
    assert main([str(tmp_path)]) == 0
    first, _, replay, kind, nothing, _, head, *rows, last = lines = capsys.readouterr().out.splitlines()
    assert first.startswith(f"{tmp_path}: saved by jaxreplay ")
    assert replay.startswith("replay: Sharded(buffer=ReplayBuffer(capacity=8, sampler=Prioritized(alpha=0.6, ")
    assert "beta=optax." in replay
    assert "mesh={'data': 2}" in replay
    assert (kind, nothing) == ("kind: int8", "nothing: None")
    assert head.split() == ["array", "dtype", "shape", "bytes"]
    cells = {name: (dtype, shape, size) for name, dtype, shape, size in map(cut, rows)}
    assert cells["['replay'].storage['half'].bits"] == ("uint16", "[2, 4, 3]", "48")
    assert cells["['replay'].storage['key']"] == ("key", "[2, 4]", "64")
    assert cells["['small']"] == ("int4", "[3]", "3")
    assert cut(last)[0] == f"{len(rows)} arrays"
    assert int(cut(last)[-1].replace(",", "")) == sum(int(size.replace(",", "")) for _, _, size in cells.values())
    assert len({len(line) for line in lines[6:]}) == 1


def cut(row):
    """Cells of a row of the table."""
    return [cell.strip() for cell in row.split("  ") if cell.strip()]


def test_a_configuration_that_is_no_dict_and_a_path_without_a_checkpoint(tmp_path, capsys):
    buffer = jr.ReplayBuffer(capacity=1000, axes=1)
    jr.save(tmp_path / "run", buffer, buffer.init(jnp.zeros(1, jnp.float32)))
    assert main([str(tmp_path / "run")]) == 0
    out = capsys.readouterr().out
    assert "\nconfiguration: ReplayBuffer(capacity=1000, sampler=Uniform(" in out
    assert "4,008" in out.splitlines()[-1]
    assert main([str(tmp_path / "nothing")]) == 2
    assert "no complete checkpoint there" in capsys.readouterr().err
