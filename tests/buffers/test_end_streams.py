"""Streams that are closed: nothing drawn has rows of both sides, such as of a run and of what it was resumed as."""

import dataclasses
import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import seeds
from helpers import at, compilations, over_devices, rarely, rejects, stack

import jaxreplay as jr

KEY, ENVS, RUN, LAWS = jax.random.key(0), 4, 10_000, ("last", "uniform", "geometric")
KINDS = [  # windows, gaps, stride
    ("inside", False, 1),
    ("episodes", False, 1),
    ("any", True, 3),
    ("cut", True, 1),
    *map(
        rarely, [("any", True, 1), ("cut", True, 2), ("inside", True, 2), ("inside", False, 3), ("episodes", True, 1)]
    ),
]


def make(windows, gaps, stride=1, length=40, sequence_length=5, **settings):
    sizes = {"length": length, "num_envs": ENVS, "sequence_length": sequence_length, "stride": stride}
    return jr.SequenceBuffer(**sizes, windows=windows, gaps=gaps, donate=False, **settings)


def rows(first, num_steps, runs):
    """Rows that say where they are, and rewards that say the run."""
    time, runs = first + np.arange(num_steps)[:, None], np.broadcast_to(runs, (num_steps, ENVS))
    return {"at": (RUN * runs + time + 1).astype(np.int32), "reward": (100.0**runs).astype(np.float32)}


def run_of(x):
    return (np.asarray(x) - 1) // RUN


class Runs:
    """A buffer to which rollouts are added, and whose streams are closed between them."""

    def __init__(self, buffer):
        self.buffer, self.rng, self.time = buffer, seeds.rng(buffer.windows, buffer.gaps, buffer.stride), 0
        self.runs = np.zeros(ENVS, int)
        self.state = buffer.init(rows(0, 1, self.runs) | {"end": np.zeros((1, ENVS), bool)})

    def add(self, num_steps):
        ends = self.rng.random((num_steps, ENVS)) < 0.1
        drawable = self.rng.random(ends.shape) < 0.95 if self.buffer.gaps else None
        steps = rows(self.time, num_steps, self.runs) | {"end": ends}
        self.state = self.buffer.add(self.state, steps, ends=ends, drawable=drawable)
        self.time += num_steps

    def close(self, mask=None):
        self.runs = self.runs + (1 if mask is None else mask)
        self.state = self.buffer.end_streams(self.state, mask=mask)

    def all_drawn(self):
        """All that may be drawn, and what is made of it."""
        found = jax.device_get(look(self.buffer, self.state))
        return at(found, found[0].indices >= 0)


VIEWS = ((0, 1, 1), (0, 4, 3), (2, 2, 2))  # burn-in, n, frames in a stack


@functools.partial(jax.jit, static_argnums=0)
def look(buffer, state):
    """All sequences in one batch, with rows of each: later steps, and n-step returns and stacks by `VIEWS`."""
    sample, views = buffer.epoch(state, KEY, buffer._num_slots, step=0), []
    for burn_in, n, k in VIEWS:
        _, rest = jr.split_burn_in(sample.items, burn_in)
        flags = rest["end"], jnp.zeros_like(rest["end"])
        batch, _ = jr.sequence_transitions(rest["at"], rest["at"], rest["reward"], *flags, n=n, gamma=1.0)
        returns = jax.tree.map(lambda x: x.reshape(buffer._num_slots, -1), (batch.Rn, batch.S_next))
        views.append((*returns, jr.stack_frames(rest["at"], rest["end"], k)))
    return sample, [buffer.later(state, KEY, sample.indices, law=law) for law in LAWS], views


def check_one_run(sample, later, views):
    """No sequence, n-step return, frame stack or later step is of another run, whatever the mask says."""
    first = sample.items["at"][:, :1]
    runs = run_of(first)
    np.testing.assert_array_equal(sample.items["at"], first + np.arange(sample.items["at"].shape[1]))
    for (_, n, _), (Rn, S_next, stacks) in zip(VIEWS, views, strict=True):
        np.testing.assert_array_equal(run_of(S_next), np.broadcast_to(runs, S_next.shape))
        steps = Rn / 100.0**runs
        np.testing.assert_allclose(steps, np.clip(np.round(steps), 1, n), rtol=1e-6)  # of rewards of one run alone
        assert np.all((run_of(stacks) == runs[..., None]) | (stacks == 0))
    for items, steps in later:
        np.testing.assert_array_equal(items["at"], first[:, 0] + steps)
        np.testing.assert_array_equal(run_of(items["at"]), runs[:, 0])
    return set(runs.reshape(-1).tolist())


@pytest.mark.parametrize(("windows", "gaps", "stride"), KINDS)
def test_nothing_drawn_mixes_runs(windows, gaps, stride):
    """After each rollout of a run that was stopped at any moment, also with rows that are overwritten."""
    it, seen = Runs(make(windows, gaps, stride, hindsight=True)), set()
    for number, num_steps in enumerate([13, 1, 1, 13, 13, 1, 13, 13, 1, 1, 1, 13]):
        it.add(num_steps)
        found = it.all_drawn()
        seen |= check_one_run(*found)
        if number % 2:
            it.close(it.rng.random(ENVS) < (1.0 if number % 4 == 1 else 0.6))
            chex.assert_trees_all_equal(it.all_drawn(), found)  # what is stored is drawn as before
    assert {0, 1, 2, 3} <= seen


@pytest.mark.parametrize("windows", ["inside", rarely("episodes")])
def test_what_a_run_draws_after_it_was_closed_is_what_a_new_buffer_would(windows):
    """Not one less."""
    resumed, new = Runs(make(windows, False)), Runs(make(windows, False))
    resumed.add(11)
    resumed.close()
    new.runs, new.time = resumed.runs, resumed.time
    resumed.rng = seeds.rng(1)
    new.rng = seeds.rng(1)
    resumed.add(11), new.add(11)
    every = resumed.buffer.num_slots
    drawn, expected = (np.asarray(x.buffer.get(x.state, x.buffer.newest(x.state, every))["at"]) for x in (resumed, new))
    own = drawn[run_of(drawn)[:, 0] == 1]
    assert own.tolist() == expected[run_of(expected)[:, 0] == 1].tolist()
    assert len(own) > 4


def test_two_rows_of_two_runs_are_no_sequence():
    """The smallest: without the call they are one, and with a mask they are in the streams that go on."""
    buffer, row = make("inside", False, sequence_length=2), np.ones((1, ENVS), np.int32)
    masks, none = (None, np.arange(ENVS) < 3, np.zeros(ENVS, bool)), np.zeros((1, ENVS), bool)

    @jax.jit
    def sizes(state):
        before = buffer.add(state, row, ends=none)
        closed = [buffer.end_streams(before, mask=mask) for mask in masks]
        return [buffer.size(buffer.add(its, row, ends=none)) for its in closed]

    assert [*map(int, sizes(buffer.init(row)))] == [0, ENVS - 3, ENVS]


def test_a_newest_row_that_may_not_be_drawn_stays_masked():
    buffer, ones = make("episodes", True, sequence_length=3), np.ones((3, ENVS), np.int32)

    @jax.jit
    def masks(state):
        drawable = np.tile([[True], [True], [False]], (1, ENVS))
        state = buffer.add(state, ones, ends=np.zeros_like(drawable), drawable=drawable)
        return [buffer.sample(its, KEY, 8).mask for its in (state, buffer.end_streams(state))]

    for mask in masks(buffer.init(ones)):
        assert np.unique(mask, axis=0).tolist() == [[True, True, False]]


@pytest.mark.versions
@pytest.mark.parametrize("windows", ["episodes", *map(rarely, ["inside", "any"])])
def test_eager_calls_a_scan_vmap_and_a_shard_agree(windows):
    buffer = make(windows, True, hindsight=True, sampler=jr.Prioritized())
    steps = np.stack([rows(6 * k, 6, np.full(ENVS, k))["at"] for k in range(4)])
    none = np.zeros((6, ENVS), bool)
    masks = np.array([[True] * ENVS, [True, False, False, True], [False] * ENVS, [True] * ENVS])

    def step(buffer, state, x):
        state = buffer.end_streams(buffer.add(state, x[0], ends=none), mask=x[1])
        return state, buffer.sample(state, KEY, 8)

    def run(buffer, steps):
        return jax.lax.scan(functools.partial(step, buffer), buffer.init(steps[0]), (steps, masks))

    together = jax.device_get(jax.jit(jax.vmap(functools.partial(run, buffer)))(stack(steps, steps)))
    shard, state = over_devices(buffer, 1), buffer.init(steps[0])
    alone = jax.device_get(jax.jit(functools.partial(run, shard))(steps))
    for t in range(len(steps)):
        state = buffer.add(state, steps[t], ends=none)
        every = None if masks[t].all() else masks[t]
        state = buffer.end_streams(state, mask=every)
        sample = jax.device_get(buffer.sample(state, KEY, 8))
        chex.assert_trees_all_equal(sample, at(at(together[1], 0), t), at(alone[1], t))
    state = jax.device_get(state)
    chex.assert_trees_all_equal(state, at(together[0], 0))
    chex.assert_trees_all_equal(jax.tree.leaves(state), jax.tree.leaves(at(alone[0], 0)))


def test_it_is_one_program_and_donates():
    buffer, ones = dataclasses.replace(make("episodes", False), donate=True), np.ones((3, ENVS), np.int32)
    state = buffer.add(buffer.init(ones), ones, ends=ones == 0)
    masks = [np.arange(ENVS) < k for k in range(4)]
    first = state
    state = buffer.end_streams(state, mask=masks[0])
    assert jax.tree.leaves(first.ends)[0].is_deleted()
    with compilations() as compiled:
        for mask in masks:
            state = buffer.end_streams(state, mask=mask)
    assert compiled == []


def test_shards_take_their_parts_of_the_mask():
    whole = make("inside", False, sequence_length=2)
    buffer, ones = over_devices(whole, 2), np.arange(3 * ENVS, dtype=np.int32).reshape(3, ENVS)
    state, none = buffer.init(ones), np.zeros(ones.shape, bool)

    @jax.jit
    def rows_of_all(state):
        state = buffer.end_streams(buffer.add(state, ones, ends=none), mask=np.array([False, True, True, True]))
        state = buffer.add(state, ones + 100, ends=none)
        return buffer.get(state, buffer.newest(state, whole.num_slots))

    drawn = np.asarray(rows_of_all(state))
    crossing = drawn[(drawn[:, 0] < 100) & (drawn[:, 1] >= 100)]
    assert crossing.tolist() == [[8, 100]]  # of the stream that goes on
    rejects("mask", buffer.end_streams, state, mask=np.ones(3, bool))


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
        ids = [its.get(state, its.newest(state, every))["at"] for its, state in both]
        np.testing.assert_array_equal(*ids)
        if closes:
            moved, it.runs = other.end_streams(moved), it.runs + 1
        steps, ends = rows(it.time, 9, it.runs) | {"end": np.zeros((9, ENVS), bool)}, np.zeros((9, ENVS), bool)
        it.state, moved = (its.add(x, steps, ends=ends) for its, x in ((it.buffer, it.state), (other, moved)))
        it.time += 9
    drawn = np.asarray(other.get(moved, other.newest(moved, other.num_slots))["at"])
    check = run_of(drawn[drawn[:, 0] > 0])
    assert np.all(check == check[:, :1])
    assert {0, 1} == set(check.reshape(-1).tolist())
    rejects("new_buffer.gaps=False: must be as in old_buffer, True", jr.migrate, other, moved, it.buffer)


def test_masks_that_make_no_sense():
    buffer, ones = make("inside", False), np.ones((1, ENVS), np.int32)
    state = buffer.init(ones)
    rejects(r"mask: got bool\[3\], expected bool\[4\]", buffer.end_streams, state, mask=np.ones(3, bool))
    rejects(r"mask: got int64\[4\]|mask: got int32\[4\]", buffer.end_streams, state, mask=np.ones(4, int))


FAST, SLOW = range(2)  # actors; the fast one takes 10 steps in the time of one


def test_actors_at_paces_of_ten_and_one_with_a_source_each():
    """Each keeps its own newest steps. One that begins anew does not touch the other."""
    source = jr.SequenceBuffer(length=20, num_envs=1, sequence_length=4, windows="inside")
    mixture = jr.Mixture(buffers=(source, source), weights="joint")
    added, state = [[], []], mixture.init(np.zeros((1, 1), np.int32))
    for number in range(60):
        if number == 59:
            state = mixture.end_streams(state, FAST)
        for actor, times in ((FAST, 10 * number + np.arange(10)), (SLOW, np.array([number]))):
            added[actor] += (RUN * actor + times).tolist()
            state = mixture.add(state, actor, (RUN * actor + times)[:, None].astype(np.int32), ends=times[:, None] < 0)
    expected = [[its[k : k + 4] for k in range(len(its) - 20, len(its) - 3)] for its in added]
    expected[FAST] = [x for x in expected[FAST] if x[-1] < 590 or x[0] >= 590]
    for actor, buffer in enumerate(mixture.buffers):
        size = int(mixture.sizes(state)[actor])
        found = np.asarray(buffer.get(state[actor], buffer.newest(state[actor], 17)))  # one shape for both
        assert found[17 - size :].tolist() == expected[actor]
    assert np.sum(np.asarray(mixture.sample(state, KEY, 8).items)[:, 0] >= RUN) == 4  # as many of each


def test_actors_at_paces_of_ten_and_one_in_one_buffer():
    """The slow one has rows in each tenth call. Its other rows take room, and its sequences lie in one call."""
    block, calls = 6, 40
    buffer = jr.SequenceBuffer(length=block * calls, num_envs=2, sequence_length=4, gaps=True)
    state = buffer.init(np.zeros((1, 2), np.int32))
    for call in range(calls):
        steps, ready = np.zeros((block, 2), np.int32), np.array([True, call % 10 == 9])
        steps[:, FAST] = block * call + np.arange(block)
        steps[:, SLOW] = RUN + block * (call // 10) + np.arange(block)
        state = buffer.add(state, steps, drawable=np.tile(ready, (block, 1)))
    drawn = np.asarray(buffer.get(state, buffer.newest(state, int(buffer.size(state)))))
    fast, slow = (sorted(drawn[drawn[:, 0] // RUN == actor].tolist()) for actor in (FAST, SLOW))
    assert fast == [list(range(k, k + 4)) for k in range(block * calls - 3)]
    starts = [RUN + block * number + k for number in range(calls // 10) for k in range(block - 3)]
    assert slow == [list(range(start, start + 4)) for start in starts]
