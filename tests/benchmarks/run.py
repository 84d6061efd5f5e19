"""Benchmark: the sum tree by fan-out, and a whole replay step beside flashbax.

Run: python tests/benchmarks/run.py [--smoke] [--out FILE]

Every figure is the median over alternating runs in one process (A B C A B C ...), with the 10th and 90th percentile;
ratios are taken run by run. A run is one jitted `lax.scan` of many steps, so that dispatch does not count.
"""

import argparse
import datetime
import functools
import importlib.metadata
import itertools
import json
import pathlib
import platform
import time

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from tqdm import tqdm

import jaxreplay as jr
from jaxreplay import sum_tree

RESULTS = pathlib.Path(__file__).parent / "results"


def tree_program(capacity, batch_size, fanout):
    """(a) Sample and update the tree alone."""

    def step(tree, key):
        drawn, _ = sum_tree.sample(tree, key, batch_size, stratified=True)
        values = jax.random.uniform(key, (batch_size,), jnp.float32, 0.1, 1.0)
        return sum_tree.update(tree, drawn, values), drawn[0]

    every = jnp.arange(capacity)
    tree = sum_tree.update(sum_tree.init(capacity, fanout=fanout), every, jnp.ones(capacity), unique_indices=True)
    return step, tree


def item(num):
    return {"obs": jnp.zeros((num, 4), jnp.float32), "reward": jnp.zeros(num, jnp.float32)}


def jaxreplay_program(capacity, batch_size, num_envs):
    """(b) Add, sample with weights, gather, update."""
    buffer = jr.ReplayBuffer(capacity=capacity, sampler=jr.Prioritized())

    def step(state, key):
        state = buffer.add(state, item(num_envs))
        sample = buffer.sample(state, key, batch_size)
        td_errors = sample.weights + sample.items["reward"]
        return buffer.update(state, sample.indices, td_errors), td_errors[0]

    state = buffer.init(item(num_envs))
    return step, buffer.add(state, item(capacity))


def flashbax_program(capacity, batch_size, num_envs):
    """The same with flashbax's prioritised item buffer; the weights are computed from its probabilities."""
    import flashbax

    device = "cpu" if jax.default_backend() == "cpu" else "gpu"
    buffer = flashbax.make_prioritised_item_buffer(
        max_length=capacity,
        min_length=1,
        sample_batch_size=batch_size,
        add_batches=True,
        priority_exponent=0.6,
        device=device,
    )

    def step(state, key):
        state = buffer.add(state, item(num_envs))
        sample = buffer.sample(state, key)
        weights = jr.importance_weights(sample.probabilities, capacity, 0.4)
        td_errors = weights + sample.experience["reward"]
        return buffer.set_priorities(state, sample.indices, td_errors), td_errors[0]

    state = buffer.init(jax.tree.map(lambda x: x[0], item(1)))
    return step, buffer.add(state, item(capacity))


class Program:
    """A compiled scan that carries its state from run to run."""

    def __init__(self, step, state, steps):
        run = jax.jit(lambda s, k: lax.scan(step, s, jax.random.split(k, steps)), donate_argnums=0)
        started = time.perf_counter()
        self.run = run.lower(state, jax.random.key(0)).compile()
        self.compile_seconds = time.perf_counter() - started
        self.temporary_bytes = getattr(self.run.memory_analysis(), "temp_size_in_bytes", None)
        self.state, self.steps, self.times = jax.tree.map(jnp.copy, state), steps, []

    def __call__(self, record=True):
        started = time.perf_counter()
        self.state, _ = jax.block_until_ready(self.run(self.state, jax.random.key(len(self.times))))
        if record:
            self.times.append((time.perf_counter() - started) / self.steps * 1e6)

    def figures(self):
        low, median, high = np.percentile(self.times, [10, 50, 90])
        return {
            "us_per_step": round(float(median), 2),
            "p10": round(float(low), 2),
            "p90": round(float(high), 2),
            "compile_s": round(self.compile_seconds, 2),
            "temporary_bytes": self.temporary_bytes,
        }


def measure(programs, runs):
    """Alternate the programs; figures of each by name, with the ratio to the first."""
    for program in programs.values():
        program(record=False)
    for _ in range(runs):
        for program in programs.values():
            program()
    base = np.array(next(iter(programs.values())).times)
    return {
        name: {**p.figures(), "ratio_to_first": round(float(np.median(np.array(p.times) / base)), 3)}
        for name, p in programs.items()
    }


def cells(smoke):
    """(name, {label: function that makes (step, state)}) for every cell of the grid, the most telling first."""
    sizes = [2**10] if smoke else [2**20, 2**17, 2**14, 2**22]
    batches = [32] if smoke else [256, 32, 1024]
    fanouts = [sum_tree.DEFAULT_FANOUT, 4] if smoke else [sum_tree.DEFAULT_FANOUT, 2, 4, 16, 32, 64, 128]
    grid = list(itertools.product(batches, sizes))
    for batch_size, capacity in grid:
        makers = {
            "jaxreplay": functools.partial(jaxreplay_program, capacity, batch_size, 16),
            "flashbax": functools.partial(flashbax_program, capacity, batch_size, 16),
        }
        yield f"step N={capacity} B={batch_size} E=16", makers
    for batch_size, capacity in grid:
        makers = {f"fanout {k}": functools.partial(tree_program, capacity, batch_size, k) for k in fanouts}
        yield f"tree N={capacity} B={batch_size}", makers


def without_missing_peers(makers):
    try:
        importlib.metadata.version("flashbax")
    except importlib.metadata.PackageNotFoundError:
        return {name: make for name, make in makers.items() if name != "flashbax"}
    return makers


def versions():
    found = {"python": platform.python_version()}
    for package in ("jax", "jaxlib", "flax", "optax", "flashbax"):
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = None
    return found


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--smoke", action="store_true", help="a tiny grid, to see that it runs")
    parser.add_argument("--seconds", type=float, default=360.0, help="stop starting cells after this long")
    parser.add_argument("--out", type=pathlib.Path, help="JSON file (default: results/BACKEND.json; none with --smoke)")
    arguments = parser.parse_args()
    steps, runs = (10, 2) if arguments.smoke else (200, 7)
    device = jax.devices()[0]
    grid = [(name, without_missing_peers(makers)) for name, makers in cells(arguments.smoke)]
    report = {
        "date": datetime.date.today().isoformat(),
        "backend": device.platform,
        "device": device.device_kind,
        "versions": versions(),
        "steps_per_run": steps,
        "runs": runs,
        "cells": {},
    }
    started = time.perf_counter()
    for name, makers in (bar := tqdm(grid, unit="cell")):
        if time.perf_counter() - started > arguments.seconds:
            report["cells"][name] = "not run: out of time"
            continue
        bar.set_description(name)
        programs = {label: Program(*make(), steps) for label, make in makers.items()}
        report["cells"][name] = measure(programs, runs)
    print(f"{report['backend']} ({report['device']}), {report['versions']}")
    for name, cell in report["cells"].items():
        if isinstance(cell, str):
            print(f"{name:32s} {cell}")
            continue
        row = "  ".join(f"{label}: {f['us_per_step']:.0f} [{f['p10']:.0f}-{f['p90']:.0f}]" for label, f in cell.items())
        print(f"{name:32s} us/step  {row}")
    out = arguments.out or (None if arguments.smoke else RESULTS / f"{device.platform}.json")
    if out:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
