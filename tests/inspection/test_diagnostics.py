import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest
import seeds
import twins
from helpers import at, over_devices, rarely, rejects, stack

import jaxreplay as jr
from jaxreplay.inspection import _diagnostics

pytestmark = pytest.mark.versions
CAPACITY, ALPHA = 40, 0.7


def items(count, first=0):
    return {"id": np.arange(first, first + count, dtype=np.int32)}


@pytest.fixture(scope="module")
def filled():
    """A state after 60 insertions and updates, of which some come too late; and what its twin has counted."""
    sampler = jr.Prioritized(alpha=ALPHA, beta=lambda updates: updates / 10)
    buffer = jr.ReplayBuffer(capacity=CAPACITY, sampler=sampler, count_updates=True, donate=False)
    state, rng = buffer.init(items(10)), seeds.rng(0)
    shard = oracles.Shard(oracles.Ring(CAPACITY), alpha=ALPHA)
    twin = oracles.ShardedTwin([shard], 2**30, sampler)
    for first in range(0, 60, 10):
        state = buffer.add(state, items(10, first))
        twin.add(items(10, first)["id"])
        handles = rng.integers(-1, first + 10, 12).astype(np.int32)
        td_errors = np.where(rng.random(12) < 0.2, np.nan, rng.exponential(size=12) ** 3).astype(np.float32)
        state = buffer.update(state, handles, td_errors)
        twin.update(handles, td_errors)
    priorities = [shard.priorities.leaf[handle] ** (1 / ALPHA) for handle in shard.handles]
    counts = [shard.uses.counts[handle] for handle in shard.handles]
    return buffer, state, priorities, counts, shard.priorities.rejected, shard.uses.late


def assert_close(found, expected, rtol=2e-4):
    for name, value in expected.items():
        np.testing.assert_allclose(found[name], value, rtol=rtol, err_msg=name)


def test_numbers_that_need_no_draws(filled):
    """Those of all items match the twin."""
    buffer, state, priorities, counts, rejected, late = filled
    found = jr.diagnostics(buffer, state)
    assert all(x.shape == () and x.dtype == jnp.float32 for x in found.values())
    total = sum(p**ALPHA for p in priorities)
    largest = float(state.sampler.max_priority)
    assert rejected > 0 < late
    expected = {"size": 40, "fill": 1, "drawable": 1, "beta": 0.6, "updates": 6, "rejected": rejected, "late": late}
    expected |= {"total_priority": total, "max_priority": largest}
    assert found.keys() == expected.keys()
    assert_close(found, expected)
    expected |= oracles.thorough_diagnostics(priorities, ALPHA)
    expected |= {"never_updated": np.mean(np.array(counts) == 0), "updates_per_item": np.mean(counts)}
    assert_close(jr.diagnostics(buffer, state, thorough=True), expected)
    np.testing.assert_array_equal(np.roll(state.uses.of_slots, -(60 % CAPACITY)), counts)


@pytest.mark.parametrize("batch_size", [60, rarely(600)])  # all compared with all, and with some
def test_draws_match_the_twin(filled, batch_size):
    """Of a batch that is given, and of the same one that is drawn."""
    buffer, state, priorities, _, _, _ = filled
    key = jax.jit(lambda key: jax.random.split(key)[0])(jax.random.key(2))
    sample = buffer.sample(state, key, batch_size)
    found = jr.diagnostics(buffer, state, sample=sample)
    ages = np.asarray(sample.age)
    drawn = [priorities[-1 - age] for age in ages]
    every = 1 if batch_size == 60 else 9
    expected = oracles.diagnostics(np.asarray(sample.probabilities), ages, drawn, CAPACITY, every)
    weights = np.asarray(sample.weights)
    expected["draws/effective_sample_size"] = np.sum(weights) ** 2 / np.sum(weights**2)
    assert_close(found, expected)
    drawn = jr.diagnostics(buffer, state, jax.random.key(2), batch_size=batch_size)
    assert drawn.keys() == {*found, "never_updated"}
    assert_close(drawn, found)


def test_pivots_are_the_same_along_either_axis():
    """A CPU reduces over the first axis, other backends over the second."""
    rng = seeds.rng(0)
    numbers = [rng.integers(0, 20, 64).astype(np.float32) for _ in range(4)]
    pivots = [x[::4] for x in numbers[:2]]

    @jax.jit
    def sums_at_pivots(*arguments):
        return [_diagnostics._sums_at_pivots(axis, *arguments) for axis in (0, 1)]

    found = sums_at_pivots(numbers[:2], pivots, numbers[2:])
    not_below = [x[None] >= pivot[:, None] for x, pivot in zip(numbers, pivots, strict=False)]
    expected = [x.sum(1) for x in not_below] + [(not_below[0] * x).sum(1) for x in numbers[2:]]
    for sums in found:
        assert len(sums) == 4
        for x, y in zip(sums, expected, strict=True):
            np.testing.assert_array_equal(x, y)


def test_a_reservoir_counts_and_has_no_ages():
    buffer = jr.ReservoirBuffer(capacity=CAPACITY, count_updates=True, donate=False)

    @jax.jit
    def play(first, second):
        state = buffer.add(buffer.init(items(200)), items(200), first, mask=np.arange(200) < 30)
        state = buffer.update(state, np.array([3, 3, 5, 700]), np.ones(4))
        old = buffer.sample(state, first, 100).indices
        state = buffer.update(buffer.add(state, items(200), second), old, np.ones(100))
        drawn = jr.diagnostics(buffer, state, sample=buffer.sample(state, first, 100))
        many = jr.diagnostics(buffer, state.replace(count=jnp.array([3, 5], jnp.uint32)))["kept"]  # 3 * 2^32 + 5
        return old, state.handles, jr.diagnostics(buffer, state, thorough=True), drawn, many

    old, handles, found, drawn, many = jax.device_get(play(jax.random.key(0), jax.random.key(1)))
    still = int(np.sum(np.isin(old, handles)))
    assert (found["late"], found["updates_per_item"] * CAPACITY) == (1 + 100 - still, still)
    np.testing.assert_allclose(many, CAPACITY / (3 * 2**32 + 5), rtol=1e-6)
    np.testing.assert_array_max_ulp(found["kept"], np.float32(40 / 230), maxulp=1)  # compiled, a quotient by a constant
    assert drawn["draws/effective_sample_size"] == 100
    assert not any("age" in name for name in drawn)


def replay_buffer(sampler):
    return jr.ReplayBuffer(capacity=12, sampler=sampler, count_updates=True, donate=False)


STREAMS = {"length": 12, "num_envs": 2, "sequence_length": 3, "windows": "inside", "count_updates": True}
BUFFERS = {
    "sequence": lambda sampler: jr.SequenceBuffer(**STREAMS, sampler=sampler, donate=False),
    "sharded": lambda sampler: over_devices(replay_buffer(sampler), 2),
    "mixture": lambda sampler: jr.Mixture(buffers=(jr.ReplayBuffer(capacity=6), replay_buffer(sampler))),
    "one shard": lambda sampler: over_devices(replay_buffer(sampler), 1),
}
SAMPLERS = {
    "prioritized": jr.Prioritized(),
    "zero": jr.Prioritized(epsilon=0.0, alpha=0.0),
    "uniform": jr.Uniform(replacement=False),
}
PAIRS = [pair for pair in itertools.product(BUFFERS, SAMPLERS) if pair != ("mixture", "prioritized")]


def filled_with(buffer):
    if isinstance(buffer, jr.SequenceBuffer):
        rows = np.arange(40.0, dtype=np.float32).reshape(2, 10, 2)
        state = buffer.add(buffer.init(rows[0]), rows[0], ends=rows[0] % 7 == 0)
        state = buffer.add(state, rows[1], ends=rows[1] % 7 == 0)
    elif isinstance(buffer, jr.Mixture):
        state = buffer.add(buffer.add(buffer.init(items(4)), 0, items(4)), 1, items(8))
    else:
        state = buffer.add(buffer.init(items(8)), items(8))
    drawn = buffer.sample(state, jax.random.key(3), 8)
    some = jnp.where(np.arange(8) % 3 == 0, drawn.indices, -1)
    return buffer.update(state, some, np.arange(8, dtype=np.float32) ** 3)


@pytest.mark.parametrize(("kind", "sampler"), [("mixture", "prioritized"), *map(rarely, PAIRS)])
def test_every_buffer(kind, sampler):
    buffer = BUFFERS[kind](SAMPLERS[sampler])
    example = np.zeros((10, 2), np.float32) if kind == "sequence" else items(8)
    look = jax.jit(lambda state: jr.diagnostics(buffer, state, jax.random.key(0), batch_size=50, thorough=True))
    states = jax.jit(lambda: (buffer.init(example), filled_with(buffer)))()
    empty, found = jax.device_get([look(state) for state in states])
    assert all(np.isfinite(x) for x in (*empty.values(), *found.values()))
    assert empty.keys() == found.keys()
    prefix = "1/" if kind == "mixture" else ""
    assert empty[f"{prefix}size"] == empty[f"{prefix}fill"] == empty[f"{prefix}drawable"] == 0
    assert found["size"] == int(buffer.size(states[1]))
    if kind == "mixture":
        assert found["size"] == found["0/size"] + found["1/size"] == 12
        np.testing.assert_allclose(found["0/top_10pct_mass"], 0.1, rtol=1e-6)
    if sampler == "prioritized":
        assert 0 < found[f"{prefix}never_updated"] < 1
        assert found[f"{prefix}top_10pct_mass"] > 0.15
    if kind == "sequence":
        complete = 2 * (12 - 3 + 1)
        assert (found["fill"], found["drawable"]) == (1, found["size"] / complete)
        assert found["drawable"] < 1


@pytest.mark.parametrize("kind", ["mixture", "sequence", rarely("sharded")])
def test_names_and_types_do_not_depend_on_values(kind):
    for sampler in SAMPLERS.values():
        buffer = BUFFERS[kind](sampler)
        state = jax.eval_shape(buffer.init, np.zeros((10, 2), np.float32) if kind == "sequence" else items(8))
        with twins.strict():
            found = jax.eval_shape(functools.partial(jr.diagnostics, buffer, thorough=True), state, jax.random.key(0))
        assert all((x.shape, x.dtype, x.weak_type) == ((), jnp.float32, False) for x in found.values())


def half_filled(counts, sampler):
    """Shards that hold so many of the items from 0 and from 20 on, with known TD errors; and a draw of 60, or all."""
    buffer = over_devices(jr.ReplayBuffer(capacity=40, donate=False, sampler=sampler), 2)
    td_errors = (1.0 + np.arange(40) * 7 % 11).astype(np.float32) ** 2
    return buffer, *_filled_shards(buffer, np.arange(40) % 20 < np.repeat(counts, 20), td_errors), td_errors


@functools.partial(jax.jit, static_argnums=0)
def _filled_shards(buffer, mask, td_errors):
    state = buffer.add(buffer.init(items(40)), items(40), mask=mask, td_errors=td_errors)
    return state, buffer.sample(state, jax.random.key(0), 40 if buffer.buffer.sampler.is_distinct else 60)


@pytest.mark.parametrize("counts", [(7, 20), (0, 12)])
def test_draws_from_shards_match_the_twin(counts):
    """Of shards with different items, one of them empty: probabilities tell no order of priorities."""
    buffer, state, sample, td_errors = half_filled(counts, jr.Prioritized(alpha=ALPHA, normalize=None))
    found = jr.diagnostics(buffer, state, sample=sample)
    drawn = np.asarray(sample.indices) >= 0
    assert drawn.sum() == 30 * np.count_nonzero(counts)
    law = np.asarray(sample.probabilities)[drawn] * 2 / np.count_nonzero(counts)
    priorities = td_errors[np.asarray(sample.items["id"])[drawn]] + 1e-6
    expected = oracles.diagnostics(law, np.asarray(sample.age)[drawn], priorities, sum(counts), 1)
    masses = (td_errors.astype(np.float64) + 1e-6) ** ALPHA * (np.arange(40) % 20 < np.repeat(counts, 20))
    law = masses.reshape(2, 20) / np.maximum(masses.reshape(2, 20).sum(axis=1, keepdims=True), 1e-9) / 2
    weights = law.reshape(-1)[np.asarray(sample.items["id"])[drawn]] ** -0.4  # beta is 0.4
    expected["draws/effective_sample_size"] = weights.sum() ** 2 / np.sum(weights**2)
    assert_close(found, expected)
    assert len(np.unique(priorities)) > 5
    exact = oracles.thorough_diagnostics((masses[masses > 0] ** (1 / ALPHA)).tolist(), ALPHA)
    exact |= oracles.top_masses(law)  # not that of one tree
    assert_close(jr.diagnostics(buffer, state, thorough=True), exact)


@functools.partial(jax.jit, static_argnums=(0, 1))
def played(buffer, batch_size, stored, td_errors, updated, new):
    """A state of the `stored` of some items, of which some are `updated`, -1 for none; and its numbers, by draws and
    of all items."""
    count = len(stored)
    state = buffer.add(buffer.init(items(count)), items(count), mask=stored, td_errors=td_errors)
    shard, place = jnp.divmod(updated, count // twins.num_shards(buffer))
    state = buffer.update(state, jnp.where(updated < 0, -1, shard * state.ring.period + place), new)
    drawn = jr.diagnostics(buffer, state, jax.random.key(0), batch_size=batch_size) if batch_size else None
    return state, drawn, jr.diagnostics(buffer, state, thorough=True)


def test_counts_of_a_partly_filled_buffer_are_of_its_items():
    """All stored items are updated, or none is stored; the rest of the storage is not counted."""
    buffer = jr.ReplayBuffer(capacity=12, count_updates=True, donate=False)
    slots = np.arange(8)
    for size, updated, never, updates in ((0, slots, 0.0, 0), (5, slots, 0.0, 5), (5, slots % 3, 0.4, 8)):
        state, drawn, exact = played(buffer, 256, slots < size, None, updated, np.ones(8))
        assert_close(exact, {"size": size, "fill": size / 12, "never_updated": never, "updates_per_item": updates / 5})
        assert_close(drawn, {"top_1pct_mass": 0.01 * (size > 0), "top_10pct_mass": 0.1 * (size > 0)})
        atol = 0.15 * (never > 0)  # five deviations of 256 draws
        np.testing.assert_allclose(drawn["never_updated"], never, atol=atol)
    of_both = jax.jit(lambda x: jr.diagnostics(jr.Mixture(buffers=(buffer, buffer)), (x, x), jax.random.key(0)))(state)
    assert of_both["0/never_updated"] != of_both["1/never_updated"], "the sources are drawn by one key"


@pytest.mark.parametrize("num_shards", [2, rarely(0)])
def test_spent_items_are_counted_as_spent_alone(num_shards):
    """Of 16 items eight are spent, one has all priority; with shards, those of the first are spent."""
    sampler = jr.Prioritized(alpha=1.0, epsilon=0.0, max_priority="stored")
    buffer = over_devices(jr.ReplayBuffer(capacity=32, sampler=sampler, max_uses=1, donate=False), num_shards)
    numbers = np.arange(16)
    td_errors, spent = np.where(numbers == 9, np.float32(3), np.float32(0)), np.where(numbers < 8, numbers, -1)
    state, drawn, found = played(buffer, 256, numbers >= 0, td_errors, spent, np.full(16, 100.0, np.float32))
    expected = {"size": 8, "fill": 0.5, "drawable": 0.5, "spent": 8, "max_priority": 3, "total_priority": 3}
    expected |= {"top_10pct_mass": 1}
    assert_close(drawn, expected)
    assert_close(found, expected | {"updates_per_item": 0.5})
    assert found["size"] == int(buffer.size(state))
    none = {"size": 0, "fill": 0, "drawable": 0, "spent": 0, "max_priority": 1}
    assert_close(jr.diagnostics(buffer, buffer.clear(state)), none)


def test_counts_of_shards_are_sums_over_all():
    """Of shards of 2, 6 and 1 items, of which those of the second are updated."""
    sampler = jr.Prioritized(alpha=1.0, epsilon=0.0)
    buffer = over_devices(jr.ReplayBuffer(capacity=24, sampler=sampler, count_updates=True, donate=False), 3)
    slots, td_errors = np.arange(24), np.repeat(np.float32([2, 1, 2]), 8)
    td_errors[[0, 8, 12]] = np.inf
    stored, new = slots % 8 < np.repeat([2, 6, 1], 8), np.where(slots % 8 == 5, np.nan, 3.0).astype(np.float32)
    updated = np.where(stored & (slots // 8 == 1), slots, -1)
    updated[[6, 7, 22, 23]] = 7, 7, 23, 23  # of nothing that is stored
    _, drawn, found = played(buffer, 1, stored, td_errors, updated, new)  # draws a row of each shard
    # A rejected TD error at insertion leaves an item the largest priority of all, 2; one of an update changes nothing.
    expected = {"size": 9, "fill": 9 / 24, "drawable": 1, "rejected": 4, "late": 4, "updates": 1}
    expected |= {"total_priority": 2 * 2 + (5 * 3 + 1) + 2, "max_priority": 3, "never_updated": 3 / 9}
    assert_close(drawn, expected)
    assert_close(found, expected | {"updates_per_item": 6 / 9})


@pytest.mark.parametrize("num_shards", [0, 2])
def test_the_drawable_share_of_sequences(num_shards):
    """Those of the complete sequences that may be drawn, before and after the buffer is full."""
    kind = {"length": 10, "num_envs": 4, "sequence_length": 3, "stride": 2}
    buffer = over_devices(jr.SequenceBuffer(**kind, windows="inside", donate=False), num_shards)
    inside, whole = (oracles.SequenceTwin(*kind.values(), windows) for windows in ("inside", "any"))
    rows, rng = np.zeros((5, 4), np.int32), seeds.rng(0)
    state = buffer.init(rows)

    @jax.jit
    def add(state, ends):
        state = buffer.add(state, rows, ends=ends)
        return state, jr.diagnostics(buffer, state)

    for stored in (5, 10, 10):
        ends = rng.random((5, 4)) < [0.05, 0.1, 0.5, 0.4]
        state, found = add(state, ends)
        inside.store(rows, ends), whole.store(rows, ends)
        size, share = len(inside.handles), len(inside.handles) / len(whole.handles)
        assert 0 < share < 1
        assert_close(found, {"size": size, "fill": stored / 10, "drawable": share})


def test_all_items_without_priorities_are_drawn_evenly():
    """Those of a shard of 1 item and one of 12, which are half of the law each; and of some that are not spent."""
    buffer = jr.ReplayBuffer(capacity=40, sampler=jr.Prioritized(epsilon=0.0))
    slots, zeros = np.arange(40), np.zeros(40, np.float32)
    stored = slots % 20 < np.repeat([1, 12], 20)
    *_, found = played(over_devices(buffer, 2), 0, stored, zeros, np.full(40, -1), zeros)
    assert_close(found, {"stored/priority_zero": 1, "top_1pct_mass": 0.13 / 2, "top_10pct_mass": 0.5 + 0.3 / 12 / 2})
    spending = dataclasses.replace(buffer, max_uses=1)
    for stored, spent in ((2, 1), (40, 30), (1, 0)):
        *_, found = played(spending, 0, slots < stored, zeros, np.where(slots < spent, slots, -1), zeros)
        assert_close(found, {"stored/priority_zero": 1, "top_10pct_mass": 0.1 * stored / (stored - spent)}, rtol=1e-6)


def test_items_that_fading_makes_never_drawn_are_counted():
    for half_life, never in ((0.51, 9 - 1), (1e9, 0)):  # of ages 0 to 39 those from 31 on, one of which has priority 0
        sampler = jr.Prioritized(epsilon=0.0, half_life=half_life)
        buffer = jr.ReplayBuffer(capacity=40, donate=False, sampler=sampler)
        td_errors = np.ones(40, np.float32) - (np.arange(40) == 3)
        *_, found = played(buffer, 0, np.arange(40) >= 0, td_errors, np.full(40, -1), np.ones(40))
        assert (found["stored/faded"], found["size"]) == (never, 40)


def test_the_mass_of_shards_with_fewer_items_than_rows():
    """Known exactly, as all items are drawn: those of the smaller shard are the more probable ones."""
    for counts in ((1, 15), (8, 8), (0, 12), (3, 20)):
        buffer, state, sample, _ = half_filled(counts, jr.Uniform(replacement=False))
        law = np.concatenate([np.full(count, 1 / count) for count in sorted(counts) if count])
        for drawn in ({"sample": sample}, {"key": jax.random.key(0)}):  # which takes all that it can
            expected = {"draws/effective_sample_size": sum(counts), **oracles.top_masses(law)}
            assert_close(jr.diagnostics(buffer, state, **drawn), expected, rtol=1e-4)


def test_vmap_equals_a_loop(filled):
    buffer, state, *_ = filled
    look = functools.partial(jr.diagnostics, buffer, batch_size=60)
    other = buffer.update(state, np.arange(20, 60), np.arange(40, dtype=np.float32))
    keys = jax.random.split(jax.random.key(0), 2)
    found = jax.device_get(jax.vmap(look)(stack(state, other), keys))
    for i, (one, key) in enumerate(zip((state, other), keys, strict=True)):
        assert_close(at(found, i), look(one, key))
    assert found["top_10pct_mass"][0] != found["top_10pct_mass"][1]


def test_pools():
    pools = jr.DifficultyPools(tasks_per_env=(5, 9), easy_threshold=0.9, donate=False)
    state, _ = pools.update(pools.init(), np.array([0, 99]), np.ones((2, 3)))
    found = jr.diagnostics(pools, state)
    assert found.keys() == {*pools.metrics(state), "rejected"}
    assert (float(found["rejected"]), np.asarray(found["pool/easy"])) == (1, np.float32(1 / 14))


@pytest.mark.law
@pytest.mark.parametrize("stratified", [True, rarely(False)])
def test_the_mass_of_the_top_is_estimated_within_its_error(stratified):
    sampler = jr.Prioritized(alpha=1.0, epsilon=0.0, stratified=stratified)
    buffer = jr.ReplayBuffer(capacity=5_000, sampler=sampler, donate=False)
    # The quantiles of a Pareto distribution in any order: of 5,000 draws from it the largest alone may be most of all.
    td_errors = (seeds.rng(0).permutation(np.arange(0.5, 5_000)) / 5_000) ** (-1 / 1.1) - 1
    td_errors = td_errors.astype(np.float32)
    state = buffer.add(buffer.init(items(5_000)), items(5_000), td_errors=td_errors)
    keys = jax.random.split(seeds.key(0), 400)
    found = jax.jit(jax.vmap(lambda key: jr.diagnostics(buffer, state, key, batch_size=128)))(keys)
    in_order = np.sort(td_errors.astype(np.float64))[::-1]
    for name, count in (("top_1pct_mass", 50), ("top_10pct_mass", 500)):
        exact = in_order[:count].sum() / in_order.sum()
        assert 0.3 < exact < 0.9
        errors = np.asarray(found[name]) - exact
        assert np.std(errors) < 0.5 / np.sqrt(128)
        assert abs(np.mean(errors)) < 0.01


def test_wrong_arguments(filled):
    buffer, state, *_ = filled
    key = jax.random.key(0)
    sample = buffer.sample(state, key, 60)
    rejects("key and sample: got both", jr.diagnostics, buffer, state, key, sample=sample)
    rejects("sample: got a dict", jr.diagnostics, buffer, state, sample={})
    rejects("batch_size=0", jr.diagnostics, buffer, state, batch_size=0)
    rejects("thorough=1", jr.diagnostics, buffer, state, thorough=1)
    rejects("key", jr.diagnostics, buffer, state, key=3)
    rejects("must be a buffer", jr.diagnostics, jr.Uniform(), state)
    rejects(r"^buffer=ReplayState\(40 of 40 items, .{1,80}: must be", jr.diagnostics, state, buffer)  # in one line
    rejects("capacity=5", jr.diagnostics, dataclasses.replace(buffer, capacity=5), state)
