"""Rows that may not be drawn, in what a `SequenceBuffer` is given to; the twin tells which are drawn."""

import dataclasses

import jax
import numpy as np
import oracles
import pytest
import seeds
from helpers import over_devices, rarely, rejects

import jaxreplay as jr

ROLLOUTS, T, ENVS = 6, 3, 4
RNG = seeds.rng(0)
STEPS = np.arange(ROLLOUTS * T * ENVS, dtype=np.int32).reshape(ROLLOUTS, T, ENVS)
ENDS, DRAWABLE = RNG.random((2, ROLLOUTS, T, ENVS)) < [[[[0.2]]], [[[0.85]]]]
BUFFER = jr.SequenceBuffer(length=9, num_envs=ENVS, sequence_length=2, gaps=True, hindsight=True, donate=False)


def stored(buffer, state):
    """All sequences that may be drawn, and the last row of each one's episode."""
    handles = buffer.newest(state, buffer.num_slots * getattr(buffer, "num_shards", 1))
    last, _ = buffer.later(state, jax.random.key(0), handles, law="last")
    found = jax.device_get((buffer.get(state, handles), last, handles))
    return sorted((items.tolist(), int(row)) for items, row, handle in zip(*found, strict=True) if handle >= 0)


def stored_in(twin):
    """The same of the twin."""
    places = [(handle, twin.times(handle)[0], handle % ENVS) for handle in twin.handles]
    return sorted(
        (twin.sequence(handle), twin.steps[time + twin.num_later(time, env)][env]) for handle, time, env in places
    )


@pytest.mark.parametrize("windows", ["any", *map(rarely, ["episodes", "cut", "inside"])])
def test_migration_keeps_what_may_be_drawn_and_the_episodes(windows):
    """From shards to a longer buffer, which then goes on as one that had all rows, and to a shorter one."""
    buffer = dataclasses.replace(BUFFER, windows=windows)
    longer, shards = dataclasses.replace(buffer, length=12), over_devices(buffer, 2)
    twin, state = oracles.SequenceTwin(longer.length, ENVS, 2, 1, windows, True), shards.init(STEPS[0])
    for steps, ends, drawable in zip(STEPS, ENDS, DRAWABLE, strict=True):
        state = shards.add(state, steps, ends=ends, drawable=drawable)
        twin.store(steps, ends, drawable=drawable)
    twin.lost = ROLLOUTS * T - buffer.length
    moved = jr.migrate(shards, state, longer)
    assert stored(longer, moved) == stored(shards, state) == stored_in(twin)
    steps, ends, drawable = 1000 + STEPS[0], ENDS[0], DRAWABLE[0]
    twin.store(steps, ends, drawable=drawable)
    moved = longer.add(moved, steps, ends=ends, drawable=drawable)
    assert stored(longer, moved) == stored_in(twin)
    twin.lost = len(twin.steps) - buffer.length
    assert stored(buffer, jr.migrate(longer, moved, buffer)) == stored_in(twin)


def test_a_buffer_is_not_told_of_such_rows_by_mistake():
    buffer = dataclasses.replace(BUFFER, gaps=False, hindsight=False)
    state, drawable = jax.eval_shape(buffer.init, STEPS[0]), DRAWABLE[0]
    rejects("drawable: gaps=False: make the buffer with gaps=True", buffer.add, state, STEPS[0], drawable=drawable)
    state, message = jax.eval_shape(BUFFER.init, STEPS[0]), r"drawable: got bool\[4\], expected bool\[3, 4\]"
    rejects(message, BUFFER.add, state, STEPS[0], ends=ENDS[0], drawable=drawable[0])
    rejects("gaps=1: must be True or False", dataclasses.replace, BUFFER, gaps=1)
