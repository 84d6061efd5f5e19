"""(l) What a program pays before its first step, in CPU seconds of all its threads.

A step is traced, lowered and compiled, after a small other program. First use is a whole process that imports a library
and calls `init`, `add`, `sample` and `update` once each. Every figure comes from a process of its own without a
compilation cache; libraries take turns. `python start.py SETTING LIBRARY CAPACITY BATCH_SIZE` is such a process.
"""

import datetime
import functools
import json
import os
import subprocess
import sys
import time
from typing import Any

CELLS = {"prioritized": 2**20, "prioritized, 8 seeds": 2**20, "sequences": 2**14, "uniform": 2**20, "first use": 2**20}


def compile_step(name: str, library: str, capacity: int, batch_size: int) -> float:
    """CPU seconds to trace, lower and compile a step of `jax_buffers` in a scan."""
    import jax
    import jax_buffers
    from harness import compiled_scan
    from jax import lax
    from settings import Setting

    import jaxreplay as jr

    setting = Setting(capacity=capacity, batch_size=batch_size, seeds=8 if "seeds" in name else 1)
    ours, uniform = library == "jaxreplay", name == "uniform"
    if name == "sequences":
        make = jax_buffers.jaxreplay_sequences if ours else jax_buffers.flashbax_trajectory
    elif ours:
        make = functools.partial(jax_buffers.jaxreplay, sampler=jr.Uniform() if uniform else None)
    else:
        make = functools.partial(jax_buffers.flashbax_item, uniform=uniform)
    buffer = make(setting)
    step = jax_buffers.whole_step(buffer, setting)
    carry = jax.eval_shape(lambda: jax_buffers.many(buffer.init(), setting)), setting.batch(*buffer.added)
    drawn = jax.eval_shape(step, (*carry, None), jax.random.key(0))[2]
    jax.jit(lambda x: lax.fori_loop(0, 3, lambda i, x: jax.numpy.sin(x), x))(jax.numpy.ones(8)).block_until_ready()
    started = time.process_time()
    compiled_scan(step, (*carry, drawn), 200)
    return time.process_time() - started


def first_use(name: str, library: str, capacity: int, batch_size: int) -> float:
    """CPU seconds of this process until each method has been called once."""
    import jax
    import jax.numpy as jnp

    items, key = {"obs": jnp.zeros((16, 4)), "reward": jnp.zeros(16)}, jax.random.key(0)
    if library == "jaxreplay":
        import jaxreplay as jr

        ours = jr.ReplayBuffer(capacity=capacity, sampler=jr.Prioritized())
        state = ours.add(ours.init(items), items)
        sample = ours.sample(state, key, batch_size)
        state = ours.update(state, sample.indices, jnp.ones(batch_size))
    else:
        import flashbax

        sizes = {"max_length": capacity, "min_length": 1, "sample_batch_size": batch_size, "add_batches": True}
        device = {"cpu": "cpu", "tpu": "tpu"}.get(jax.default_backend(), "gpu")
        buffer = flashbax.make_prioritised_item_buffer(**sizes, priority_exponent=0.6, device=device)
        state = jax.jit(buffer.init)(jax.tree.map(lambda x: x[0], items))
        state = jax.jit(buffer.add, donate_argnums=0)(state, items)
        sample = jax.jit(buffer.sample)(state, key)
        state = jax.jit(buffer.set_priorities, donate_argnums=0)(state, sample.indices, jnp.ones(batch_size))
    jax.block_until_ready(state)
    return time.process_time()


def run(smoke: bool, libraries: set[str]) -> dict[str, Any]:
    """CPU seconds by cell and library, the least and the median of alternating processes."""
    runs, names = (1, ["uniform", "first use"]) if smoke else (5, list(CELLS))
    shown = ["jaxreplay", *sorted({"flashbax"} & libraries)]
    cells = {}
    for name in names:
        capacity, batch_size = (2**10, 32) if smoke else (CELLS[name], 256)
        seconds = {library: [] for library in shown}
        for turn in range(runs):
            for library in shown if turn % 2 else shown[::-1]:
                seconds[library].append(_process(name, library, capacity, batch_size))
        cells[name] = {library: {"least": min(x), "median": sorted(x)[len(x) // 2]} for library, x in seconds.items()}
    return {"date": datetime.date.today().isoformat(), "runs": runs, "cells": cells}


def _process(name: str, library: str, capacity: int, batch_size: int) -> float:
    environment = {key: value for key, value in os.environ.items() if key != "JAX_COMPILATION_CACHE_DIR"}
    command = [sys.executable, __file__, name, library, str(capacity), str(batch_size)]
    found = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    return round(json.loads(found.stdout.splitlines()[-1]), 3)


if __name__ == "__main__":
    chosen = first_use if sys.argv[1] == "first use" else compile_step
    print(chosen(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])))
