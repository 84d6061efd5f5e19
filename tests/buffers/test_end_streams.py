"""Streams that are closed: nothing drawn has rows of both sides, such as of a run and of what it was resumed as.

Which sequences these are, in every mode and over shards, the twin tells in `test_sequence_twin`.
"""

import dataclasses

import chex
import jax
import numpy as np
import pytest
import seeds
from helpers import at, over_devices, rarely, rejects

import jaxreplay as jr

KEY, ENVS, RUN, LAWS = jax.random.key(0), 4, 10_000, ("last", "uniform", "geometric")
KINDS = [  # windows, gaps, stride
    ("inside", False, 3),
    ("cut", True, 1),
    *map(
        rarely, [("any", True, 1), ("cut", True, 2), ("inside", True, 2), ("inside", False, 1), ("episodes", True, 1)]
    ),
]


def make(windows, gaps, stride=1, length=40, sequence_length=5, **settings):
    sizes = {"length": length, "num_envs": ENVS, "sequence_length": sequence_length, "stride": stride}
    return jr.SequenceBuffer(**sizes, windows=windows, gaps=gaps, donate=False, **settings)


def rows(first, num_steps, runs):
    """Rows that say where they are."""
    time, runs = first + np.arange(num_steps)[:, None], np.broadcast_to(runs, (num_steps, ENVS))
    return (RUN * runs + time + 1).astype(np.int32)


def run_of(x):
    return (np.asarray(x) - 1) // RUN


class Runs:
    """A buffer to which rollouts are added, and whose streams are closed between them."""

    def __init__(self, buffer):
        self.buffer, self.rng, self.time = buffer, seeds.rng(buffer.windows, buffer.gaps, buffer.stride), 0
        self.runs = np.zeros(ENVS, int)
        self.state = buffer.init(rows(0, 1, self.runs))
        self.look = jax.jit(self.every)

    def add(self, num_steps):
        ends = self.rng.random((num_steps, ENVS)) < 0.1
        drawable = self.rng.random(ends.shape) < 0.95 if self.buffer.gaps else None
        steps = rows(self.time, num_steps, self.runs)
        self.state = self.buffer.add(self.state, steps, ends=ends, drawable=drawable)
        self.time += num_steps

    def close(self, mask):
        self.runs = self.runs + mask
        self.state = self.buffer.end_streams(self.state, mask=mask)

    def every(self, state):
        """All sequences in one batch, and later steps of each."""
        sample = self.buffer.epoch(state, KEY, self.buffer.num_slots, step=0)
        return sample, [self.buffer.later(state, KEY, sample.indices, law=law) for law in LAWS]

    def all_drawn(self):
        sample, later = jax.device_get(self.look(self.state))
        return at((sample, later), sample.indices >= 0)


@pytest.mark.parametrize(("windows", "gaps", "stride"), KINDS)
def test_nothing_drawn_mixes_runs(windows, gaps, stride):
    """After each rollout of a run that was stopped at any moment, also with rows that are overwritten."""
    it, seen = Runs(make(windows, gaps, stride, hindsight=True)), set()
    for number, num_steps in enumerate([13, 1, 1, 13, 13, 1, 13, 13, 1, 1, 1, 13]):
        it.add(num_steps)
        sample, later = found = it.all_drawn()
        first = sample.items[:, :1]
        np.testing.assert_array_equal(sample.items, first + np.arange(5))
        for ids, steps in later:
            np.testing.assert_array_equal(ids, first[:, 0] + steps)
            np.testing.assert_array_equal(run_of(ids), run_of(first[:, 0]))
        seen |= {*run_of(first[:, 0]).tolist()}
        if number % 2:
            it.close(it.rng.random(ENVS) < (1.0 if number % 4 == 1 else 0.6))
            chex.assert_trees_all_equal(it.all_drawn(), found)  # what is stored is drawn as before
    assert {0, 1, 2, 3} <= seen


def test_one_source_of_a_mixture_and_a_shared_buffer():
    source, ones = make("inside", False, sequence_length=2), np.ones((2, ENVS), np.int32)
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
    buffer, ones = make(windows, False), np.ones((1, ENVS), np.int32)
    message = f"windows=.{windows}., gaps=False: .* with a mask or without, needs a buffer with gaps=True"
    for its in (buffer, over_devices(buffer, 2)):
        state = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), jax.eval_shape(its.init, ones))
        rejects(message, its.end_streams, state, mask=mask)


@pytest.mark.parametrize(("windows", "num_shards"), [("cut", 1), *map(rarely, [("any", 2), ("inside", 1)])])
def test_a_state_without_gaps_becomes_one_with_gaps(windows, num_shards):
    """It draws the same, also of the rows that follow; and its streams can be closed."""
    it = Runs(make(windows, False, stride=2))
    for _ in range(5):
        it.add(9)
    other = dataclasses.replace(it.buffer, gaps=True)
    moved = jr.migrate(it.buffer, it.state, over_devices(other, 2) if num_shards == 2 else other)
    moved = jr.migrate(over_devices(other, 2), moved, other) if num_shards == 2 else moved
    other._check_state(moved)
    for closes in (False, True):
        both, every = ((it.buffer, it.state), (other, moved)), it.buffer.num_slots
        np.testing.assert_array_equal(*(its.get(state, its.newest(state, every)) for its, state in both))
        if closes:
            moved, it.runs = other.end_streams(moved), it.runs + 1
        steps, ends = rows(it.time, 9, it.runs), np.zeros((9, ENVS), bool)
        it.state, moved = (its.add(x, steps, ends=ends) for its, x in ((it.buffer, it.state), (other, moved)))
        it.time += 9
    drawn = np.asarray(other.get(moved, other.newest(moved, other.num_slots)))
    check = run_of(drawn[drawn[:, 0] > 0])
    assert np.all(check == check[:, :1])
    assert {0, 1} == set(check.reshape(-1).tolist())
    rejects("new_buffer.gaps=False: must be as in old_buffer, True", jr.migrate, other, moved, it.buffer)


def test_masks_that_make_no_sense():
    buffer, ones = make("inside", False), np.ones((1, ENVS), np.int32)
    state = buffer.init(ones)
    rejects(r"mask: got bool\[3\], expected bool\[4\]", buffer.end_streams, state, mask=np.ones(3, bool))
    rejects(r"mask: got int64\[4\]|mask: got int32\[4\]", buffer.end_streams, state, mask=np.ones(4, int))
    rejects("mask", over_devices(buffer, 2).end_streams, over_devices(buffer, 2).init(ones), mask=np.ones(3, bool))
