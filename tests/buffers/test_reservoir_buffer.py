import jax
import numpy as np
import oracles
import pytest
import seeds
from helpers import compiled, numbers, over_devices, rarely, rejects
from jax import lax
from scipy import stats
from twins import draws_of

import jaxreplay as jr
from jaxreplay._common import ring
from jaxreplay.buffers import _reservoir

slots_of = jax.jit(_reservoir._draw_slots)


def words(number):
    return np.array([number >> 32, number % 2**32], np.uint32)


# --- the law


MASKS = {
    "one by one": np.ones((9, 1), bool),
    "in threes": np.ones((3, 3), bool),
    "all at once": np.ones((1, 9), bool),
    "fives, the first over the capacity": np.arange(10).reshape(2, 5) < 9,
    "masked": np.array([[0, 1, 1, 0, 0, 1, 1], [0] * 7, [1, 0, 0, 1, 1, 1, 1]], bool),
}


@pytest.mark.law
@pytest.mark.parametrize("name", [rarely(x) if x in ("in threes", "all at once") else x for x in MASKS])
def test_what_is_stored_has_the_law_of_algorithm_r(name):
    """The joint law of all slots: so of each slot, of pairs of items and of what the sample is."""
    mask, capacity, num_seeds = MASKS[name], 3, 40_000
    ids = np.where(mask, np.cumsum(mask).reshape(mask.shape) - 1, 99)
    buffer = jr.ReservoirBuffer(capacity=capacity)

    def run(key):
        def step(state, batch):
            number, ids, mask = batch
            return buffer.add(state, ids, jax.random.fold_in(key, number), mask=mask), None

        return lax.scan(step, buffer.init(ids[0]), (np.arange(len(ids)), ids, mask))[0]

    state = jax.jit(jax.vmap(run))(jax.random.split(seeds.key(1), num_seeds))
    assert np.all(np.asarray(state.count) == [0, 9])
    law = oracles.reservoir_law(capacity, 9)
    found = np.asarray(state.on_this_backend("cpu").storage) @ [100, 10, 1]
    expected = {slots[0] * 100 + slots[1] * 10 + slots[2]: num_seeds * p for slots, p in law.items()}
    counts = np.bincount(found, minlength=1000)
    assert counts[list(expected)].sum() == num_seeds
    assert min(expected.values()) > 20
    assert stats.chisquare(counts[list(expected)], list(expected.values())).pvalue > 1e-4


@pytest.mark.parametrize("count", [0, 5, 2**31 - 1000, 2**32 - 1000, 2**63 - 7, 2**64 - 1000])
def test_draws_are_exact_whatever_the_count(count):
    """Compared with integers of any length; at the end the count stops."""
    capacity, rows, key = 2**29, 2_000, jax.random.key(count % 1001)
    full = np.int32(min(count, capacity))
    fill = ring.init(capacity).replace(inserted=full, size=full)
    slots = slots_of(fill, words(count), numbers(1, rows), key)
    counts, expected = [min(count + row + 1, 2**64 - 1) for row in range(rows)], []
    for row, bits in enumerate(draws_of(key, rows)):
        slot = bits * counts[row] >> 64
        expected.append(row + count if row + count < capacity else min(slot, capacity))
    np.testing.assert_array_equal(slots, expected)
    found = np.stack(_reservoir._plus(words(count), numbers(1, rows)), axis=1)
    np.testing.assert_array_equal(found, [*map(words, counts)])


# --- memory, and what it costs


@pytest.mark.hlo
@pytest.mark.usefixtures("compiled_afresh")
def test_an_addition_costs_the_same_at_any_capacity_and_loops_over_nothing():
    def program(capacity):
        buffer = jr.ReservoirBuffer(capacity=capacity)
        arguments = np.zeros(64, np.float32), jax.random.key(0), np.zeros(64, bool)
        state = jax.eval_shape(buffer.init, arguments[0])
        add = jax.jit(lambda *x: buffer.add(*x[:-1], mask=x[-1]), donate_argnums=0)
        traced = str(add.trace(state, *arguments).jaxpr)
        assert not any(f" {loop}[" in traced for loop in ("while", "scan", "sort"))
        return compiled(add, state, *arguments)

    small, large = program(2**10), program(2**20)
    assert small.cost_analysis()["flops"] == large.cost_analysis()["flops"] > 0
    assert large.memory_analysis().temp_size_in_bytes <= small.memory_analysis().temp_size_in_bytes + 1024


# --- what is refused


@pytest.mark.versions
def test_wrong_arguments():
    buffer, key = jr.ReservoirBuffer(capacity=8), jax.random.key(0)
    state = buffer.init({"x": np.zeros((2, 3))})
    rows = {"x": np.zeros((2, 3))}
    rejects("batch of 0 items: expected 1 to 536870912", buffer.add, state, {"x": np.zeros((0, 3))}, key)
    rejects(r"wrong structure: missing \['x'\]; unexpected \['y'\];", buffer.add, state, {"y": rows["x"]}, key)
    rejects(r"mask: got bool\[3\], expected bool\[2\], one flag", buffer.add, state, rows, key, mask=np.ones(3, bool))
    rejects(r"leaf \['y'\]: leading axes \[3\] differ from \[2\]", buffer.init, {**rows, "y": np.zeros(3)})
    state = buffer.add(state, rows, jax.random.PRNGKey(0))
    assert int(buffer.size(state)) == 2
    stacked = jax.tree.map(lambda x: np.stack([x] * 3), jax.device_get(state))
    rejects(r"capacity=8: this state has a leading axis of 3; .* jax.vmap", buffer.add, stacked, rows, key)
    for capacity in (0, 2**29 + 1, 1e6):
        rejects(r"capacity=.*: must be an integer from 1 to 536870912", jr.ReservoirBuffer, capacity=capacity)


def test_what_cannot_be_done_with_it_yet_is_refused(tmp_path):
    buffer = jr.ReservoirBuffer(capacity=8)
    state, ring_buffer = buffer.init(numbers(0, 2)), jr.ReplayBuffer(capacity=8)
    rejects("max_age: a ReservoirBuffer keeps no order", buffer.sample, state, jax.random.key(0), 2, max_age=1)
    rejects(r"old_buffer=ReservoirBuffer\(.*: must be a ReplayBuffer,", jr.migrate, buffer, state, buffer)
    rejects(r"new_buffer=ReservoirBuffer\(", jr.migrate, ring_buffer, ring_buffer.init(numbers(0, 2)), buffer)
    old, new = (over_devices(buffer, n) for n in (2, 4))
    jr.save(tmp_path, old, old.init(numbers(0, 4)))
    rejects("saved with another number of devices", jr.restore, tmp_path, new, new.init(numbers(0, 4)))
