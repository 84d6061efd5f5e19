"""How much memory a save and a restore take beside the state, by the operating system, in processes of their own."""

import pathlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from faults import in_child
from helpers import over_devices

import jaxreplay as jr

WITHIN = 300  # seconds
LEAVES, ROWS = 8, 2**18  # of 128 bytes each
MOST = {"save": 0.1, "restore": 1.3, "restore sharded": 1.5, "restore to fewer": 1.5, "restore to one": 1.5}


def buffer(what):
    plain = jr.ReplayBuffer(capacity=LEAVES * ROWS // 8, sampler=jr.Prioritized())
    return {"restore to fewer": over_devices(plain, 4), "restore to one": plain}.get(what, over_devices(plain, 8))


def items(n):
    """Eight equal leaves, which hardly compress."""
    rng = np.random.default_rng(0)
    return {str(i): rng.integers(0, 2**30, (n, 128), np.int32) for i in range(LEAVES)}


def resident(name):
    """Bytes of this process: VmRSS now, or VmHWM at most since `reset`."""
    return 1024 * int(re.search(rf"{name}:\s+(\d+)", pathlib.Path("/proc/self/status").read_text())[1])


def measure(what, path):
    """By how much one call raises the largest memory, and the bytes of the state."""
    jax.config.update("jax_num_cpu_devices", 8)
    jr.save(path / "small", None, jnp.arange(9), step=1)  # what is used once
    jr.restore(path / "small", None, jnp.arange(9))
    is_plain = what in ("save", "restore")
    config = None if is_plain else buffer(what)
    like = jax.eval_shape(lambda: {k: jnp.zeros((ROWS, 128), jnp.int32) for k in "abcdefgh"})
    if not is_plain:
        like = jax.eval_shape(config.init, items(8))
    size = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(like))
    if what == "save":
        state = jax.block_until_ready(dict(zip("abcdefgh", map(jnp.asarray, items(ROWS).values()), strict=True)))
    pathlib.Path("/proc/self/clear_refs").write_text("5")
    before = resident("VmRSS")
    if what == "save":
        jr.save(path / "plain", None, state)
    else:
        jr.restore(path / ("plain" if is_plain else "sharded"), config, like)
    return resident("VmHWM") - before, size


def fill(path):
    """Save a full buffer on eight devices."""
    jax.config.update("jax_num_cpu_devices", 8)
    config = buffer("save")
    state, rows = config.init(items(8)), items(ROWS // 8)
    for _ in range(8):
        state = config.add(state, rows)
    jr.save(path / "sharded", config, state)


@pytest.mark.slow
def test_memory_of_a_save_and_of_restores(tmp_path, children):
    """Of 1 GiB."""
    in_child(children, fill, tmp_path, within=WITHIN)
    found = {}
    for what, most in MOST.items():
        grown, size = in_child(children, measure, what, tmp_path, within=WITHIN)
        assert size >= 2**30
        if grown > most * size:
            found[what] = grown / size
    assert found == {}
