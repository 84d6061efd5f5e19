"""Rows that may not be drawn, in what a `SequenceBuffer` is given to; the twin tells which are drawn."""

import dataclasses

import jax
import numpy as np
import oracles
import pytest
import seeds
from helpers import over_devices, rarely, rejects
from jax import lax

import jaxreplay as jr

KEY, ROLLOUTS, T, ENVS = jax.random.key(0), 6, 3, 4
SIZES = {"length": 9, "num_envs": ENVS, "sequence_length": 2, "donate": False}
RNG = seeds.rng(0)
STEPS = np.arange(ROLLOUTS * T * ENVS, dtype=np.int32).reshape(ROLLOUTS, T, ENVS)
ENDS, GAPS = RNG.random((2, ROLLOUTS, T, ENVS)) < [[[[0.2]]], [[[0.15]]]]


def fill(buffer, gaps):
    def step(state, x):
        state = buffer.add(state, x[0], ends=x[1], drawable=~x[2])
        sample = buffer.sample(state, KEY, 8)
        return buffer.update(state, sample.indices, 1.0 + sample.items[:, 0] % 7), sample

    return lax.scan(step, buffer.init(STEPS[0]), (STEPS, ENDS, gaps))


def drawable(buffer, state):
    """All sequences that may be drawn, by a pass over them."""
    batches = [buffer.epoch(state, KEY, 8, step=k) for k in range(int(buffer.num_batches(state, 8)))]
    batches = jax.device_get(batches)
    return sorted(steps.tolist() for batch in batches for steps in batch.items[batch.indices >= 0])


def twin_of(gaps, windows="any", length=SIZES["length"]):
    twin = oracles.SequenceTwin(length, ENVS, SIZES["sequence_length"], 1, windows, True)
    for steps, ends, its in zip(STEPS, ENDS, gaps, strict=True):
        twin.add(steps, ends, ~its)
    return twin


def drawable_by(twin):
    return sorted(map(twin.sequence, twin.handles))


@pytest.mark.parametrize("windows", ["any", *map(rarely, ["episodes", "cut", "inside"])])
def test_migration_keeps_what_may_be_drawn(windows):
    """From shards to a longer buffer, which then goes on as one that had all rows."""
    buffer = jr.SequenceBuffer(gaps=True, windows=windows, **SIZES)
    longer, shards = dataclasses.replace(buffer, length=12), over_devices(buffer, 2)
    state, _ = jax.jit(lambda: fill(shards, GAPS))()
    moved, twin = jr.migrate(shards, state, longer), twin_of(GAPS, windows, longer.length)
    twin.lost = ROLLOUTS * T - buffer.length
    assert drawable(longer, moved) == drawable(shards, state) == drawable_by(twin)
    steps, ends, told = 1000 + STEPS[0], ENDS[0], ~GAPS[0]
    twin.add(steps, ends, told)
    assert drawable(longer, longer.add(moved, steps, ends=ends, drawable=told)) == drawable_by(twin)


def test_a_buffer_is_not_told_of_such_rows_by_mistake():
    buffer = jr.SequenceBuffer(**SIZES)
    state = buffer.init(STEPS[0])
    rejects("drawable: gaps=False: make the buffer with gaps=True", buffer.add, state, STEPS[0], drawable=~GAPS[0])
    buffer = dataclasses.replace(buffer, gaps=True)
    with pytest.raises(ValueError, match=r"drawable: got bool\[4\], expected bool\[3, 4\]"):
        buffer.add(buffer.init(STEPS[0]), STEPS[0], drawable=np.ones(4, bool))
    rejects("gaps=1: must be True or False", dataclasses.replace, buffer, gaps=1)
