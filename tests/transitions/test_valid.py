"""Rows of a tracer's batch that are no transitions: no buffer stores them, with or without the mask."""

import dataclasses

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import at, over_devices, rarely, rejects, run_once
from jax import lax
from rollouts import at_once, first, make_steps

import jaxreplay as jr

NUM_ENVS, LENGTH = 4, 12
STEPS = make_steps(np.random.default_rng(0), LENGTH, NUM_ENVS, 1, rates=(0.15, 0.15, 0.2))  # whose numbers differ
TRACER = jr.NStep(n=3, gamma=0.9, num_envs=NUM_ENVS)
PRIORITIZED = jr.Prioritized(alpha=0.7)


def traced():
    """[LENGTH, NUM_ENVS, ...] of all that the tracer emits; on the host."""
    batch, _ = at_once(STEPS, n=3, gamma=0.9)
    return jax.tree.map(lambda x: np.asarray(x).reshape(LENGTH, NUM_ENVS, *x.shape[1:]), batch)


def some():
    """What the tracer emits at a step, with a row that is no transition."""
    return dataclasses.replace(at(traced(), 5), valid=np.array([True, False, True, True]))


REPLAY, RESERVOIR = jr.ReplayBuffer(capacity=24, sampler=PRIORITIZED), jr.ReservoirBuffer(capacity=8)
BUFFERS = {
    "replay": REPLAY,
    "reservoir": RESERVOIR,
    "sharded": over_devices(REPLAY, 2),
    "mixture": jr.Mixture(buffers=(jr.ReplayBuffer(capacity=8), REPLAY)),
}


def add(buffer, state, batch, t, **mask):
    """To the second source of a mixture, with a key to a reservoir."""
    sources = (1,) if isinstance(buffer, jr.Mixture) else ()
    keys = (jax.random.fold_in(jax.random.key(0), t),) if buffer is RESERVOIR else ()
    return buffer.add(state, *sources, batch, *keys, **mask)


@pytest.mark.versions
@pytest.mark.parametrize("name", ["replay", "reservoir", *map(rarely, ["sharded", "mixture"])])
def test_a_run_with_the_mask_forgotten_is_the_run_with_it(name):
    """Bit for bit."""
    buffer = BUFFERS[name]

    @run_once
    def run(rows):
        def step(carry, x):
            t, tracing, given, forgotten = carry
            tracing, batch, valid = TRACER.add(tracing, **x)
            given, forgotten = add(buffer, given, batch, t, mask=valid), add(buffer, forgotten, batch, t)
            return (t + 1, tracing, given, forgotten), jnp.sum(valid)

        empty, tracing = buffer.init(TRACER.spec(**first(rows))), TRACER.init(**first(rows))
        (_, _, *replays), emitted = lax.scan(step, (jnp.int32(0), tracing, empty, empty), rows)
        return replays, emitted.sum()

    (given, forgotten), emitted = jax.device_get(run(STEPS))
    chex.assert_trees_all_equal(forgotten, given)
    assert 0 < emitted < (LENGTH - 2) * NUM_ENVS  # rows of open windows are left out, and others
    if name == "replay":
        assert given.ring.inserted == emitted


@pytest.mark.parametrize("buffer", [REPLAY, *map(rarely, [*BUFFERS.values()][1:])])
def test_it_is_not_stored(buffer):
    """A buffer made for a batch with it is the buffer made for a batch without it."""
    with_it, without = some(), dataclasses.replace(some(), valid=None)
    chex.assert_trees_all_equal(buffer.init(with_it), buffer.init(without))
    assert jr.memory(buffer, with_it) == jr.memory(buffer, without)
    assert jr.memory(buffer, jax.eval_shape(lambda: with_it)) == jr.memory(buffer, without)


@pytest.mark.versions
def test_a_mask_narrows_it():
    buffer, batch = jr.ReplayBuffer(capacity=8, donate=False), some()
    every = np.array([list(np.binary_repr(i, NUM_ENVS)) for i in range(2**NUM_ENVS)]) == "1"
    state = buffer.init(batch)

    @run_once
    def stored(valid, mask):
        new = buffer.add(state, dataclasses.replace(batch, valid=valid), mask=mask)
        return new.ring.size, new.storage.A

    for valid in every[[0, 5, 6, 15]]:
        for mask in every:
            size, A = jax.device_get(stored(valid, mask))
            assert size == np.sum(valid & mask)
            np.testing.assert_array_equal(A[:size], batch.A[valid & mask])


def test_rollouts():
    """With `axes=2`, as a scan stacks what a tracer emits."""
    buffer, batch = jr.ReplayBuffer(capacity=64, axes=2), traced()
    state = buffer.add(buffer.init(batch), batch)
    assert int(buffer.size(state)) == batch.valid.sum()
    np.testing.assert_array_equal(np.asarray(state.storage.A)[: batch.valid.sum()], batch.A[batch.valid])


@pytest.mark.parametrize("depth", ["beside", "two", "inside"])
def test_at_any_depth(depth):
    batch, extra = some(), np.arange(NUM_ENVS, dtype=np.int32)
    second = dataclasses.replace(batch, valid=np.array([True, True, False, True]))
    items, valid = {
        "beside": ({"batch": batch, "extra": [extra]}, batch.valid),
        "two": ({"batches": (batch, second), "extra": [extra]}, batch.valid & second.valid),
        "inside": ({"extra": [extra], "batch": dataclasses.replace(second, S=(batch,))}, batch.valid & second.valid),
    }[depth]
    assert 0 < valid.sum() < NUM_ENVS
    buffer = jr.ReplayBuffer(capacity=8, donate=False)
    empty = buffer.init(items)
    state, masked = jax.device_get(jax.jit(lambda s, x: (buffer.add(s, x), buffer.add(s, x, mask=valid)))(empty, items))
    assert int(state.ring.size) == valid.sum()
    np.testing.assert_array_equal(state.storage["extra"][0][: valid.sum()], extra[valid])
    assert len(jax.tree.leaves(state.storage)) == len(jax.tree.leaves(items)) - (1 if depth == "beside" else 2)
    chex.assert_trees_all_equal(masked, state)


def test_set_leaves_other_rows_alone():
    buffer, batch = jr.ReplayBuffer(capacity=8, donate=False), some()
    stored = dataclasses.replace(batch, valid=None)
    state = buffer.add(buffer.init(stored), stored)
    handles, mask = buffer.newest(state, NUM_ENVS), np.array([True, True, False, True])
    new = dataclasses.replace(batch, S=None, A=-batch.A, W=None)
    assert 0 < (batch.valid & mask).sum() < batch.valid.sum()
    for given, written in (({}, batch.valid), ({"mask": mask}, batch.valid & mask)):
        found = buffer.get(buffer.set(state, handles, new, **given), handles)
        np.testing.assert_array_equal(found.A, np.where(written, -batch.A, batch.A))


@pytest.mark.versions
@pytest.mark.parametrize(("axes", "found"), [((2,), r"bool\[2\]"), ((NUM_ENVS, 1), r"bool\[4, 1\]"), (None, "float32")])
def test_one_flag_a_row(axes, found):
    batch = some()
    wrong = np.ones(NUM_ENVS, np.float32) if axes is None else np.ones(axes, bool)
    items = {"x": dataclasses.replace(batch, valid=wrong)}
    message = rf"leaf \['x'\]\.valid: got {found}.*, expected bool\[4\], one flag per row" if axes != (2,) else "leaf"
    for buffer in (REPLAY, RESERVOIR):
        state = jax.eval_shape(buffer.init, {"x": batch})
        rejects(message, jax.eval_shape, lambda s, x, buffer=buffer: add(buffer, s, x, 0), state, items)


@pytest.mark.versions
@pytest.mark.parametrize("wrap", [lambda buffer: buffer, rarely(lambda buffer: over_devices(buffer, 2))])
def test_a_sequence_buffer_says_what_to_do_instead(wrap):
    """While it is traced, also of a batch of which all rows are valid; and what it says works."""
    batch = traced()
    buffer = jr.SequenceBuffer(length=16, num_envs=NUM_ENVS, sequence_length=2, gaps=True)
    sequences, plain = wrap(buffer), dataclasses.replace(batch, valid=None)
    chex.assert_trees_all_equal(sequences.init(batch), sequences.init(plain))
    state = sequences.init(batch)
    for items, leaf in ((batch, r"leaf \.valid"), ({"x": batch}, r"leaf \['x'\]\.valid")):
        message = rf"^(each of 2 shards: )?{leaf}: a SequenceBuffer stores every row, .* sequence_transitions"
        rejects(message, jax.eval_shape, sequences.add, jax.eval_shape(sequences.init, items), items)
    state = sequences.add(state, plain, drawable=batch.valid)
    both = batch.valid[1:] & batch.valid[:-1]
    assert 0 < both.sum() < both.size
    assert int(sequences.size(state)) == both.sum()


def test_singles_are_transitions():
    batch = some()
    for given in (batch, jax.tree.map(jnp.asarray, batch)):
        for reverse in (False, True):
            singles = [*given.to_singles(reverse=reverse)]
            order = np.flatnonzero(batch.valid)[:: -1 if reverse else 1]
            assert [int(x.A[0]) for x in singles] == batch.A[order].tolist()
            assert all(x.valid is None and x.batch_size == 1 for x in singles)
    rejects(r"valid: is traced", jax.eval_shape, lambda batch: [*batch.to_singles()], batch)
    plain = dataclasses.replace(batch, valid=None)
    assert len(jax.eval_shape(lambda batch: [*batch.to_singles()], plain)) == NUM_ENVS
    assert jr.TransitionBatch.from_single(s=1.0, a=0, logp=0, r=0.0, done=False, gamma=1.0, s_next=1.0).valid is None
    assert batch.copy(deep=True).valid.tolist() == batch.valid.tolist()
