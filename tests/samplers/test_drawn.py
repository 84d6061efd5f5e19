"""The hook `drawn`: a draw that changes the state of its sampler."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import struct
from helpers import mesh, rarely
from jax import lax

import jaxreplay as jr
from jaxreplay import testing

UNIFORM = jr.Uniform()


@struct.dataclass
class SeenState:
    uniform: jr.samplers.UniformState
    seen: jax.Array  # [capacity]


@dataclasses.dataclass(frozen=True)
class Seen(jr.samplers.Sampler):
    """Counts the draws of each item; uniform."""

    uniform: jr.Uniform = UNIFORM
    forgets: bool = False

    def init(self, capacity):
        return SeenState(self.uniform.init(capacity), jnp.zeros(capacity, jnp.int32))

    def insert(self, state, slots, drawable, **named):
        return state.replace(seen=state.seen.at[slots].set(0, mode="drop"))

    def sample(self, state, key, batch_size, live):
        return self.uniform.sample(state.uniform, key, batch_size, live)

    def restrict(self, state, live):
        return state

    def weights(self, state, probabilities, size, **named):
        return self.uniform.weights(state.uniform, probabilities, size, **named)

    def update(self, state, slots, td_errors, mask, **named):
        return state

    def drawn(self, state, slots):
        return state.replace(seen=state.seen.at[slots].add(1, mode="clip" if self.forgets else "drop"))


def filled(**settings):
    buffer = jr.ReplayBuffer(capacity=8, sampler=Seen(), **settings)
    return buffer, buffer.add(buffer.init(jnp.arange(6)), jnp.arange(6))


def counted(sample):
    return np.bincount(np.asarray(sample.items)[np.asarray(sample.indices) >= 0], minlength=8)


def test_an_eager_draw_gives_the_state_and_donates_the_old_one():
    buffer, state = filled()
    expected = np.zeros(8, int)
    for k in range(3):
        old = state
        state, sample = buffer.sample(state, jax.random.key(k), 16)
        expected += counted(sample)
        assert old.storage.is_deleted()
        np.testing.assert_array_equal(state.sampler.seen, expected)
    assert buffer.get(state, jnp.arange(6)).tolist() == [*range(6)]
    kept, old = filled(donate=False)
    _, sample = kept.sample(old, jax.random.key(0), 16)
    assert old.sampler.seen.tolist() == [0] * 8
    plain = jr.ReplayBuffer(capacity=8)  # the same draw
    like = plain.sample(plain.add(plain.init(jnp.arange(6)), jnp.arange(6)), jax.random.key(0), 16)
    np.testing.assert_array_equal(sample.items, like.items)


def test_jit_scan_and_vmap_give_the_same():
    buffer, state = filled(donate=False)
    keys = jax.random.split(jax.random.key(1), 5)

    def step(state, key):
        return buffer.sample(state, key, 4, max_age=3)

    def run(state):
        return lax.scan(step, state, keys)

    scanned, samples = jax.jit(run)(state)
    assert samples.items.shape == (5, 4)
    assert np.all(np.asarray(samples.items) >= 3)
    np.testing.assert_array_equal(scanned.sampler.seen, np.bincount(np.asarray(samples.items).reshape(-1), minlength=8))
    eager = state
    for key in keys:
        eager, _ = step(eager, key)
    stacked = jax.tree.map(lambda x: jnp.stack([x, x]), state)
    mapped, _ = jax.vmap(run)(stacked)
    for found in (eager, jax.tree.map(lambda x: x[1], mapped)):
        np.testing.assert_array_equal(found.sampler.seen, scanned.sampler.seen)


def test_rows_without_an_item_count_for_none():
    buffer = jr.ReplayBuffer(capacity=8, sampler=Seen(uniform=jr.Uniform(replacement=False)))
    state = buffer.add(buffer.init(jnp.arange(3)), jnp.arange(3))
    state, sample = buffer.sample(state, jax.random.key(0), 8)
    assert sorted(sample.indices.tolist()) == [-1] * 5 + [0, 1, 2]
    assert state.sampler.seen.tolist() == [1, 1, 1, 0, 0, 0, 0, 0]
    empty = buffer.init(jnp.arange(3))
    nothing, _ = jax.jit(lambda x: buffer.sample(x, jax.random.key(0), 4))(empty)
    assert nothing.sampler.seen.tolist() == [0] * 8
    with pytest.raises(ValueError, match="cannot sample from an empty buffer"):
        buffer.sample(empty, jax.random.key(0), 4)
    assert not empty.storage.is_deleted()
    state = buffer.add(state, jnp.arange(8))  # overwrites all
    assert state.sampler.seen.tolist() == [0] * 8


def test_a_sequence_buffer_and_a_bound_one():
    buffer = jr.SequenceBuffer(length=6, num_envs=2, sequence_length=2, sampler=Seen())
    replay = jr.bind(buffer, buffer.init(jnp.zeros((4, 2))))
    replay = replay.add(jnp.zeros((4, 2)))
    replay, sample = replay.sample(jax.random.key(0), 12)
    assert int(replay.state.sampler.seen.sum()) == 12
    epoch = replay.epoch(jax.random.key(0), 3, step=0)  # not a draw
    assert epoch.indices.shape == (3,)
    numbers = jr.diagnostics(buffer, replay.state, jax.random.key(0))
    assert float(numbers["size"]) == 6
    assert int(replay.state.sampler.seen.sum()) == 12
    replay = replay.update(sample.indices, jnp.zeros(12))
    np.testing.assert_array_equal(replay.slots(sample.indices[:2]) < 10, [True, True])


def test_what_cannot_hold_one_says_so():
    buffer, state = filled()
    for make, name in (
        (lambda: jr.Mixture(buffers=(jr.ReplayBuffer(capacity=8), buffer)), r"buffers\[1\]"),
        (lambda: jr.Sharded(buffer=buffer, mesh=mesh(2)), "buffer"),
        (lambda: jr.Shared(buffer, state), "buffer"),
    ):
        with pytest.raises(ValueError, match=rf"{name}=.*Seen has a hook `drawn`.* Use the buffer alone, or count"):
            make()


@pytest.mark.parametrize("forgets", [True, rarely(False)])
def test_the_checks_for_samplers_of_ones_own_look_at_it(forgets):
    if not forgets:
        testing.check_sampler(Seen())
        return
    with pytest.raises(AssertionError, match=testing.DRAWN):
        testing.check_sampler(Seen(forgets=True))
