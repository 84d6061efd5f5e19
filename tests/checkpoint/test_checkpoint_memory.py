"""How much memory a save and a restore take beside the state, by the operating system, in processes of their own."""

import pathlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import over_devices

import jaxreplay as jr

WITHIN = 300  # seconds; what takes longer hangs
LEAVES, ROWS = 8, 2**18  # of 128 bytes each
MOST = {"save": 0.1, "restore": 1.3, 8: 1.5, 4: 1.5, 0: 1.5}  # of the state; also restored to so many devices


def begin():
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 8)


def buffer(num_devices):
    return over_devices(jr.ReplayBuffer(capacity=LEAVES * ROWS // 8, sampler=jr.Prioritized()), num_devices)


def items(n, width=128):
    """Eight equal leaves, which hardly compress."""
    return {str(i): np.random.default_rng(i).integers(0, 2**30, (n, width), np.int32) for i in range(LEAVES)}


def resident(name):
    """Bytes of this process: VmRSS now, or VmHWM at most since `reset`."""
    return 1024 * int(re.search(rf"{name}:\s+(\d+)", pathlib.Path("/proc/self/status").read_text())[1])


def measure(what, path):
    """By how much one call raises the largest memory, and the bytes of the state."""
    config = None if isinstance(what, str) else buffer(what)
    small = jnp.arange(9) if config is None else jax.eval_shape(config.init, items(8, 1))
    jr.restore(path / ("narrow" if config else "small"), config, small)  # what is loaded and compiled once
    jr.save(path / "small", None, jnp.arange(9))
    plain = {name: jax.ShapeDtypeStruct((ROWS, 128), jnp.int32) for name in items(0)}
    like = plain if config is None else jax.eval_shape(config.init, items(8))
    if what == "save":
        state = jax.block_until_ready(jax.tree.map(jnp.asarray, items(ROWS)))
    pathlib.Path("/proc/self/clear_refs").write_text("5")
    before = resident("VmRSS")
    if what == "save":
        jr.save(path / "plain", None, state)
    else:
        jr.restore(path / ("plain" if config is None else "sharded"), config, like)
    return resident("VmHWM") - before, sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(like))


def fill(path):
    """Save a full buffer on eight devices."""
    config = buffer(8)
    jr.save(path / "small", None, jnp.arange(9))
    jr.save(path / "narrow", config, config.init(items(8, 1)))
    state, rows = config.init(items(8)), items(ROWS // 8)
    for _ in range(8):
        state = config.add(state, rows)
    jr.save(path / "sharded", config, state)


@pytest.mark.slow
def test_memory_of_a_save_and_of_restores(tmp_path, children):
    """Of 1 GiB."""
    with children.Pool(1, begin, maxtasksperchild=1) as processes:
        processes.apply_async(fill, (tmp_path,)).get(WITHIN)
        for what, most in MOST.items():
            grown, size = processes.apply_async(measure, (what, tmp_path)).get(WITHIN)
            assert size >= 2**30
            assert grown <= most * size, (what, grown / size)
