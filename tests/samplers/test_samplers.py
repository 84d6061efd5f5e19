import jax
import jax.numpy as jnp
import numpy as np
import pytest
import seeds
from helpers import cases, leaves_of, rarely, rejects
from scipy import stats

import jaxreplay as jr
from jaxreplay import sum_tree
from jaxreplay._common.ring import Live
from jaxreplay.samplers import _by_priority

# The methods, jitted: each shape compiles once, not each operation of it.
insert = jax.jit(lambda sampler, *arguments: sampler.insert(*arguments), static_argnums=0)
draw = jax.jit(lambda sampler, *arguments: sampler.sample(*arguments), static_argnums=(0, 3))
weigh = jax.jit(
    lambda sampler, state, probabilities, size, **named: sampler.weights(
        state, probabilities, Live(np.int32(0), size, capacity=64), **named
    ),
    static_argnums=0,
)
take_in = jax.jit(lambda sampler, *arguments: sampler.update(*arguments), static_argnums=0)
look = jax.jit(lambda tree, prefixes: (sum_tree.total(tree), sum_tree.minimum(tree), sum_tree.find(tree, prefixes)))
total = jax.jit(sum_tree.total)
ROWS = 8  # of most calls, and slots of most states, so that tests share programs


def live(size, start=0):
    return Live(start=np.int32(start), size=np.int32(size), capacity=10 if size <= 10 else 64)


def filled(sampler, capacity=ROWS):
    return insert(sampler, sampler.init(capacity), np.arange(capacity), np.ones(capacity, bool))


def update(sampler, state, slots, td_errors, mask=None):
    mask, more = np.ones(len(slots), bool) if mask is None else mask, (0, max(ROWS - len(slots), 0))
    told = np.asarray(slots, np.int32), np.asarray(td_errors, np.float32), mask
    return take_in(sampler, state, *(np.pad(x, more) for x in told))


@pytest.mark.law
@pytest.mark.parametrize(("start", "size"), [(0, 1), (0, 7), (3, 7), (8, 10)])
def test_uniform_law_over_the_live_range(start, size):
    sampler = jr.Uniform()
    slots, probabilities = draw(sampler, sampler.init(10), seeds.key(0), 20_000, live(size, start))
    counts = np.bincount(slots, minlength=10)
    inside = (start + np.arange(size)) % 10
    assert counts[inside].sum() == 20_000
    assert size == 1 or stats.chisquare(counts[inside]).pvalue > 1e-4
    first, second = ((np.asarray(slots) - start) % 10).reshape(-1, 2).T  # neither tells of the other
    assert size == 1 or stats.chisquare(np.bincount(first * size + second, minlength=size**2)).pvalue > 1e-4
    np.testing.assert_allclose(probabilities, 1 / size, rtol=1e-6)
    slots, probabilities = draw(jr.Uniform(replacement=False), None, seeds.key(0), 10, live(size, start))
    assert sorted(slots[:size].tolist()) == sorted(inside.tolist())
    np.testing.assert_allclose(probabilities, (np.arange(10) < size) / size, rtol=1e-6)


def test_a_count_of_all_shards_stops_at_the_largest_int32():
    moved = jr.samplers.Moved(*[np.zeros((2, 1), int)] * 3)
    assert moved.total(np.int32([2**31 - 1, 5])).tolist() == [2**31 - 1, 0]


class Counting(jr.Uniform):
    def init(self, capacity):
        return np.zeros((), np.int32)


def test_items_of_a_sampler_with_a_state_but_no_priorities_are_moved_with_the_largest():
    moved = jr.samplers.Moved(np.array([[1, 0]]), *[np.ones((1, 2), bool)] * 2)
    state = jr.Prioritized().migrated(Counting(), np.zeros(1, np.int32), moved)
    assert sum_tree.leaves(state.tree).tolist() == [[1.0, 1.0]]


def test_all_items_have_priority_1_with_alpha_0():
    sampler, slots = jr.Prioritized(alpha=0.0), np.arange(4, dtype=np.int32)
    state = sampler.insert(sampler.init(4), slots, slots < 2)
    assert sampler.priorities(state, slots).tolist() == [1, 1, 0, 0]


def test_a_new_row_that_is_no_item_teaches_nothing():
    """Of a slot that may not be drawn, of none, and of one behind the last."""
    sampler, slots = jr.Prioritized(epsilon=0.0), np.array([0, 1, 2, -1, 8], np.int32)
    told = {"td_errors": np.array([2.0, 99.0, np.inf, np.inf, 99.0], np.float32)}
    state = sampler.insert(sampler.init(8), slots, ~np.isin(slots, (1, 2)), **told)
    assert (state.max_priority, state.rejected) == (2, 0)
    assert np.flatnonzero(leaves_of(state.tree)).tolist() == [0]


@pytest.mark.parametrize("value", [np.nan, -1.0])
@pytest.mark.parametrize("name", ["alpha", "epsilon", "floor"])
def test_a_setting_that_is_nan_or_negative_is_told_and_draws_stay_valid(name, value):
    buffer, key, items = jr.ReplayBuffer(capacity=8, sampler=jr.Prioritized()), jax.random.key(0), np.arange(8.0)

    def drawn_from(state):
        sample = buffer.sample(state, key, 64)
        assert np.all(np.asarray(sample.indices) >= 0)
        assert np.all((np.asarray(sample.probabilities) > 0) & (np.asarray(sample.weights) > 0))
        return sample

    state = buffer.init(items)
    usual, wrong = getattr(state.sampler, name), np.float32(value)
    state = buffer.add(state.replace(sampler=state.sampler.replace(**{name: wrong})), items)
    drawn_from(state)
    handles = np.asarray(buffer.newest(state, 8))
    state = buffer.update(state, handles, items)
    drawn_from(state)
    assert float(jr.diagnostics(buffer, state)["rejected"]) == 1
    state = state.replace(sampler=state.sampler.replace(**{name: usual}))  # and is forgotten once it is mended
    state = buffer.update(state, handles, items[::-1])
    np.testing.assert_allclose(state.sampler.max_priority, 7, rtol=1e-5)
    sample = drawn_from(state)
    expected = (7 - np.asarray(sample.indices) + 1e-6) ** 0.6
    np.testing.assert_allclose(sample.probabilities, expected / np.sum((items + 1e-6) ** 0.6), rtol=1e-4)
    assert float(jr.diagnostics(buffer, state)["rejected"]) == 0


def test_a_gpu_counts_as_other_backends_do(monkeypatch):
    """What only its programs compute changes no number: here it is computed on this backend."""
    sampler, slots = jr.Prioritized(), np.arange(ROWS, dtype=np.int32)
    state = filled(sampler)
    td_errors = np.array([0.5, np.nan, -3.0, np.inf, *[7.0] * (ROWS - 4)], np.float32)
    masks = [[bool(number >> i & 1) for i in range(ROWS)] for number in range(16)]
    calls = [(slots, td_errors, np.array(mask)) for mask in masks] + [(slots[:0], td_errors[:0], np.ones(0, bool))]
    plain = [take_in(sampler, state, *call) for call in calls]
    monkeypatch.setattr(_by_priority.xla, "on_gpu", lambda function, *x: function(*x))
    take_in_anew = jax.jit(lambda *given: sampler.update(*given))
    for call, expected in zip(calls, plain, strict=True):
        found = take_in_anew(state, *call)
        assert int(found.updates) == int(expected.updates) == int(state.updates) + (call[2].sum() > 0)
        jax.tree.map(np.testing.assert_array_equal, found, expected)


@pytest.mark.parametrize("alpha", [3.0, *map(rarely, [0.0, 0.6])])
def test_equal_td_errors_are_drawn_evenly_and_keep_every_sum_finite(alpha):
    """Also where all leaves are 0, and those of extreme TD errors."""
    sampler = jr.Prioritized(alpha=alpha, epsilon=0.0, normalize="global")
    largest, smallest = np.finfo(np.float32).max, np.finfo(np.float32).tiny
    for td_error in (0.0, largest, smallest, np.float32(1e-30)):
        state = update(sampler, filled(sampler, 60), np.arange(60), np.full(60, td_error))
        mass = float(total(state.tree))
        assert 0 < mass < np.inf if td_error or alpha == 0 else mass == 0
        slots, probabilities = draw(sampler, state, seeds.key(0), 6000, live(60))
        assert stats.chisquare(np.bincount(slots, minlength=60)).pvalue > 1e-4
        np.testing.assert_allclose(probabilities, 1 / 60, rtol=1e-5)
        np.testing.assert_allclose(weigh(sampler, state, probabilities, np.int32(60)), 1, rtol=1e-5)
    state = update(sampler, state, [0, 1], [largest, smallest])
    weights = np.asarray(weigh(sampler, state, leaves_of(state.tree) / np.asarray(total(state.tree)), np.int32(60)))
    assert np.all(np.isfinite(weights))
    assert weights.max() == 1


@pytest.mark.law
@pytest.mark.parametrize("stratified", [False, True])
def test_prioritized_law_and_probabilities(stratified):
    sampler = jr.Prioritized(alpha=0.7, stratified=stratified, normalize="global")
    td_errors = seeds.rng(0).exponential(size=60)
    state = update(sampler, filled(sampler, 60), np.arange(60), td_errors)
    law = (td_errors + 1e-6) ** 0.7
    law /= law.sum()
    slots, probabilities = draw(sampler, state, seeds.key(3), 100_000, live(60))
    np.testing.assert_allclose(probabilities, law[np.asarray(slots)], rtol=1e-5)
    counts = np.bincount(slots, minlength=60)
    assert stats.chisquare(counts, law * len(slots)).pvalue > 1e-4
    edges = np.searchsorted(np.cumsum(law), (np.arange(100_000) + 0.5) / 100_000)
    assert (np.mean(np.abs(edges - np.asarray(slots)) <= 1) > 0.999) == stratified
    first, second = (np.asarray(slots) > np.median(slots)).reshape(-1, 2).T
    pairs = np.bincount(2 * first + second, minlength=4).reshape(2, 2)
    # Independent draws tell nothing of each other.
    assert (stats.chi2_contingency(pairs).pvalue > 1e-4) != stratified


def test_counters_stop_at_the_largest_int32():
    sampler = jr.Prioritized(beta=lambda count: jnp.where(count > 0, 1.0, 0.0))
    state = filled(sampler).replace(updates=np.int32(2**31 - 2), rejected=np.int32(2**31 - 2))
    for _ in range(3):
        state = update(sampler, state, [0, 1], [np.nan, np.nan])
    assert (int(state.updates), int(state.rejected)) == (2**31 - 1, 2**31 - 1)
    np.testing.assert_array_equal(weigh(sampler, state, np.array([0.5, 0.25]), np.int32(2)), [0.5, 1])


def test_labml_traces():
    """labml's buffer: no epsilon, independent draws, weights divided by the largest over all stored items."""
    for case in cases("labml_per"):
        capacity, most = case["capacity"], ROWS if case["capacity"] <= ROWS else 64  # slots after the last stay empty
        sampler = jr.Prioritized(alpha=case["alpha"], epsilon=0.0, normalize="global", stratified=False)
        state, cursor = sampler.init(most), 0
        for op in case["ops"]:
            if op["op"] == "add":
                for _ in range(op["count"]):
                    slots = np.where(np.arange(ROWS) == 0, cursor, most)  # the others are out of range, and dropped
                    state = insert(sampler, state, slots, np.ones(ROWS, bool))
                    cursor = (cursor + 1) % capacity
            else:
                state = update(sampler, state, op["idx"], op["priority"])
            assert cursor == op["next_idx"]
            np.testing.assert_allclose(leaves_of(state.tree), np.pad(op["leaves"], (0, most - capacity)), rtol=1e-5)
            fractions, expected = zip(*op["find"], strict=True)
            mass, minimum, found = look(state.tree, np.float32(np.array(fractions) * op["total"]))
            np.testing.assert_allclose(mass, op["total"], rtol=1e-5)
            np.testing.assert_array_equal(found, expected)
            np.testing.assert_allclose(minimum, op["min"], rtol=1e-5)
            np.testing.assert_allclose(state.max_priority, op["max_priority"], rtol=1e-5)
            if "weights_all" in op:
                stored = leaves_of(state.tree)
                weights = weigh(sampler, state, stored / stored.sum(), np.int32(op["size"]), beta=op["beta"])
                np.testing.assert_allclose(np.asarray(weights)[: op["size"]], op["weights_all"], rtol=1e-5)


@pytest.mark.versions
def test_construction_errors():
    rejects(r"alpha=-0.1: must be a finite number of at least 0; 0.6 is usual", jr.Prioritized, alpha=-0.1)
    rejects(r"alpha=nan", jr.Prioritized, alpha=float("nan"))
    rejects(r"alpha='0.6'", jr.Prioritized, alpha="0.6")
    rejects(r"beta=1.5: must be a number in \[0, 1\]; or a schedule", jr.Prioritized, beta=1.5)
    rejects(r"beta=Array.*: must be a number in \[0, 1\]", jr.Prioritized, beta=jnp.asarray(np.ones(2)))
    rejects(r"epsilon=-1e-06: must be a finite number of at least 0", jr.Prioritized, epsilon=-1e-6)
    rejects(r"epsilon=inf", jr.Prioritized, epsilon=float("inf"))
    rejects(r"normalize='max': must be \"batch\", \"global\" or None", jr.Prioritized, normalize="max")


def test_flags_that_are_no_flags():
    sampler, rows = jr.Prioritized(), np.arange(3)
    state = jax.eval_shape(lambda: sampler.init(4))
    for flags in (np.full(3, 2), np.ones(3, np.float32), np.ones((3, 1), bool)):
        rejects(r"drawable: got .*, expected bool\[3\], one flag", jax.eval_shape, sampler.insert, state, rows, flags)
        rejects(r"mask: got .*, expected bool\[3\]", jax.eval_shape, sampler.update, state, rows, np.ones(3), flags)
