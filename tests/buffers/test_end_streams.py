"""Streams that are closed, and gaps: nothing drawn has rows of both sides, such as of a run and what it was resumed as.

Which sequences these are, in every mode and over shards, the twin tells in `test_sequence_twin`.
"""

import dataclasses

import chex
import jax
import numpy as np
import pytest
import seeds
from helpers import over_devices, rarely, rejects

import jaxreplay as jr

ENVS = 4


def make(windows, stride=1, length=40, sequence_length=5):
    sizes = {"length": length, "num_envs": ENVS, "sequence_length": sequence_length, "stride": stride}
    return jr.SequenceBuffer(**sizes, windows=windows, donate=False)


def test_wrappers_close_streams_and_clear():
    """One source of a mixture, or all; what threads share, and what is bound."""
    source, ones = make("inside", sequence_length=2), np.ones((2, ENVS), np.int32)
    none = {"ends": ones == 0}
    mixture = jr.Mixture(buffers=(source, source))
    shared = jr.Shared(mixture, mixture.init(ones))
    state = mixture.init(ones)
    for k in range(2):
        state = mixture.add(state, k, ones, **none)
        shared.add(k, ones, **none)
    state = mixture.end_streams(state, 1, mask=np.arange(ENVS) > 0)
    shared.actor(1).end_streams(mask=np.arange(ENVS) > 0)
    for k in range(2):
        state = mixture.add(state, k, ones, **none)
        shared.actor(k).add(ones, **none)
    assert tuple(map(int, mixture.sizes(state))) == (3 * ENVS, 2 * ENVS + 1)
    with shared.state() as cell:
        chex.assert_trees_all_equal(cell.state, state)
    shared.clear()
    assert shared.size() == 0
    alone = jr.Shared(source, source.add(source.init(ones), ones, **none))
    alone.end_streams()
    alone.add(ones, **none)
    assert alone.size() == 2 * ENVS
    bound = jr.bind(source, source.add(source.init(ones), ones, **none))
    assert len(bound.end_streams().add(ones, **none)) == 2 * ENVS
    rejects("source=2", mixture.end_streams, state, 2)


@pytest.mark.parametrize("windows", ["any", "cut"])
@pytest.mark.parametrize("mask", [None, np.ones(ENVS, bool)])
def test_one_count_of_all_sequences_cannot_leave_any_out(windows, mask):
    buffer, ones = make(windows), np.ones((1, ENVS), np.int32)
    message = f"windows=.{windows}., gaps=False: .* with a mask or without, needs a buffer with gaps=True"
    for its in (buffer, over_devices(buffer, 2)):
        state = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), jax.eval_shape(its.init, ones))
        rejects(message, its.end_streams, state, mask=mask)


@pytest.mark.parametrize(("windows", "num_shards"), [("cut", 1), *map(rarely, [("any", 2), ("inside", 1)])])
def test_a_state_without_gaps_becomes_one_with_gaps(windows, num_shards):
    """It draws the same, also of the rows that follow; and its streams can be closed."""
    buffer, rng = make(windows, stride=2), seeds.rng(windows)
    other, rows = dataclasses.replace(buffer, gaps=True), np.broadcast_to(np.arange(1, 64)[:, None], (63, ENVS))
    state = buffer.init(rows[:1])
    for time in range(0, 45, 9):
        state = buffer.add(state, rows[time : time + 9], ends=rng.random((9, ENVS)) < 0.1)
    moved = jr.migrate(buffer, state, over_devices(other, 2) if num_shards == 2 else other)
    moved = jr.migrate(over_devices(other, 2), moved, other) if num_shards == 2 else moved
    other._check_state(moved)
    none = {"ends": np.zeros((9, ENVS), bool)}
    for _ in range(2):
        both = ((buffer, state), (other, moved))
        np.testing.assert_array_equal(*(its.get(x, its.newest(x, buffer.num_slots)) for its, x in both))
        state, moved = (its.add(x, rows[45:54], **none) for its, x in both)
    moved = other.add(other.end_streams(moved), rows[54:], **none)
    drawn = np.asarray(other.get(moved, other.newest(moved, other.num_slots)))
    is_new = drawn[drawn[:, 0] > 0] > 54
    assert np.all(is_new == is_new[:, :1])
    assert {*is_new[:, 0].tolist()} == {False, True}
    rejects("new_buffer.gaps=False: must be as in old_buffer, True", jr.migrate, other, moved, buffer)


def test_masks_that_make_no_sense():
    buffer, ones = make("inside"), np.ones((1, ENVS), np.int32)
    state = buffer.init(ones)
    rejects(r"mask: got bool\[3\], expected bool\[4\]", buffer.end_streams, state, mask=np.ones(3, bool))
    rejects(r"mask: got int64\[4\]|mask: got int32\[4\]", buffer.end_streams, state, mask=np.ones(4, int))
    rejects("mask", over_devices(buffer, 2).end_streams, over_devices(buffer, 2).init(ones), mask=np.ones(3, bool))


@pytest.mark.parametrize("windows", ["any", "cut", "inside", "episodes"])
@pytest.mark.parametrize("hindsight", [False, True])
@pytest.mark.parametrize("gaps", [False, True])
def test_ends_are_needed_wherever_something_depends_on_them(windows, hindsight, gaps):
    buffer, ones = dataclasses.replace(make(windows), hindsight=hindsight, gaps=gaps), np.ones((1, ENVS), np.int32)
    state = jax.eval_shape(buffer.init, ones)
    if windows == "any" and not hindsight:
        jax.eval_shape(buffer.add, state, ones)
    else:
        rejects("ends: got None, but", jax.eval_shape, buffer.add, state, ones)


def test_a_buffer_is_not_told_of_gaps_by_mistake():
    buffer, ones, drawable = make("any"), np.ones((3, ENVS), np.int32), np.ones((3, ENVS), bool)
    with_gaps = dataclasses.replace(buffer, gaps=True)
    state, other = (jax.eval_shape(x.init, ones) for x in (buffer, with_gaps))
    rejects("drawable: gaps=False: make the buffer with gaps=True", buffer.add, state, ones, drawable=drawable)
    rejects(r"drawable: got bool\[4\], expected bool\[3, 4\]", with_gaps.add, other, ones, drawable=drawable[0])
    rejects("gaps=1: must be True or False", dataclasses.replace, buffer, gaps=1)
