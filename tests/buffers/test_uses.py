"""max_uses: an item that came back to `update` so often is no longer drawn; the twins count."""

import functools

import jax
import numpy as np
import pytest
import seeds
from helpers import rarely, rejects
from scipy import stats

import jaxreplay as jr
from jaxreplay.buffers import _uses

SAMPLERS = {
    "uniform": jr.Uniform(),
    "distinct": jr.Uniform(replacement=False),
    "prioritized": jr.Prioritized(alpha=1.0, beta=1.0, epsilon=0.0, normalize=None),
}
SAMPLERS["no priority"] = SAMPLERS["prioritized"]


def filled(sampler):
    buffer = jr.ReplayBuffer(capacity=8, sampler=sampler, max_uses=2, donate=False)
    return buffer, buffer.add(buffer.init(np.arange(8)), np.arange(8))


def spend(buffer, state, handles):
    """Use items up, in one batch that names each twice."""
    rows = np.full(16, -1, np.int32)  # -1 does nothing, so one program serves all
    rows[: 2 * len(handles)] = np.repeat(np.asarray(handles, np.int32), 2)
    return buffer.update(state, rows, np.full(rows.size, 1.5))


@pytest.mark.law
@pytest.mark.parametrize("name", ["uniform", "no priority", *map(rarely, ["distinct", "prioritized"])])
@pytest.mark.parametrize("max_age", [None, 6])
def test_law_of_the_others(name, max_age):
    """Spent items have probability 0, the others their law without them; without any priority it is even."""
    buffer, state = filled(SAMPLERS[name])
    td_errors, rows = np.linspace(0.5, 2.0, 8) * (name != "no priority"), 3 if name == "distinct" else 1
    state = spend(buffer, buffer.update(state, np.arange(8), td_errors), [1, 4, 6])
    law = np.where(np.isin(np.arange(8), [1, 4, 6]), 0, td_errors if name == "prioritized" else 1.0)
    law[: 8 - (max_age or 8)] = 0
    keys = jax.random.split(seeds.key(0), 2**14)
    sample = jax.jit(jax.vmap(lambda key: buffer.sample(state, key, rows, max_age=max_age)))(keys)
    counts = np.bincount(np.ravel(sample.items), minlength=8)
    assert not np.any(counts[law == 0])
    assert stats.chisquare(counts[law > 0], (law / law.sum() * counts.sum())[law > 0]).pvalue > 1e-4
    assert name == "prioritized" or np.allclose(sample.weights, 1, rtol=1e-6)


def test_the_count_of_one_item_stops_and_that_of_another_goes_on():
    counts = _uses.Uses(np.array([_uses.MOST, 5, _uses.MOST - 1], np.int32), np.int32(0), None)
    for slots in ([0, 1, 2, 1, -1], [2, 0, 1, 3, 3]):
        counts, _ = jax.jit(lambda counts, slots: counts.update(slots, None))(counts, np.array(slots, np.int32))
    assert counts.of_slots.tolist() == [_uses.MOST, 8, _uses.MOST]
    assert counts.late == 2
    assert jax.tree.leaves(jax.jit(_uses.Uses.cleared)(counts))[1] == 2  # the number of late ones stays
    counts = jax.jit(_uses.Uses.insert)(counts, np.array([-1, 1, 3], np.int32), np.ones(3, bool))
    assert counts.of_slots.tolist() == [_uses.MOST, 0, _uses.MOST]


@pytest.mark.parametrize("name", ["distinct", rarely("prioritized")])
def test_an_epoch_leaves_out_what_is_spent_and_keeps_its_order_as_items_are_spent(name):
    buffer, state = filled(SAMPLERS[name])
    key, found = jax.random.key(3), []
    for step in range(4):
        sample = buffer.epoch(state, key, 2, step=step)
        found += sample.indices.tolist()
        state = spend(buffer, state, [x for x in sample.indices.tolist() if x >= 0])
    assert sorted(found) == [*range(8)]
    assert [int(buffer.num_batches(state, rows)) for rows in (2, 3)] == [4, 3]
    for step in range(4):
        assert buffer.epoch(state, key, 2, step=step).indices.tolist() == [-1] * 2


def test_what_is_spent_is_known_in_the_layout_of_a_tpu():
    buffer, state = filled(SAMPLERS["prioritized"])
    wide = spend(buffer, state, [0, 7]).on_this_backend("tpu")
    assert (wide.uses.unspent.fanout, int(buffer.size(wide))) == (128, 6)


def test_a_spent_item_that_revives_gets_the_largest_priority():
    buffer, state = filled(SAMPLERS["prioritized"])
    state = spend(buffer, buffer.update(state, np.arange(8), np.arange(8.0)), [0, 3])  # 0 has no priority
    state = buffer.update(state, np.array([1]), np.array([0.0]))
    plain = jr.ReplayBuffer(capacity=8, sampler=SAMPLERS["prioritized"])
    moved = jr.migrate(buffer, state, plain)
    assert plain.priorities(moved, plain.newest(moved, 8)).tolist() == [7, 7, 2, 7, 4, 5, 6, 7]


def test_a_buffer_that_only_counts_keeps_no_tree_of_what_is_unspent():
    assert jax.eval_shape(jr.ReplayBuffer(capacity=4, count_updates=True).init, np.zeros(1)).uses.unspent is None


@pytest.mark.versions
def test_errors():
    for make in (jr.ReplayBuffer, jr.ReservoirBuffer):
        for value in (0, -1, 1.5, "2", True):
            rejects(f"max_uses={value!r}", make, capacity=4, max_uses=value)
    rejects("count_updates=2", jr.ReplayBuffer, capacity=4, count_updates=2)
    buffer = jr.ReplayBuffer(capacity=2**23 + 1, sampler=SAMPLERS["distinct"], max_uses=1)
    state = jax.eval_shape(buffer.init, np.zeros(1))
    message = "max_uses, replacement=False: 8388609 slots, at most 8388608"
    draw = functools.partial(buffer.sample, batch_size=4)
    rejects(message, jax.eval_shape, draw, state, jax.random.key(0))
    message, recent = r"max_uses=1: Recent\(.*draws by age among all items; use another sampler", jr.Recent(half_life=1)
    rejects(message, jr.ReplayBuffer, capacity=4, sampler=recent, max_uses=1)
