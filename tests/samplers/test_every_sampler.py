"""Every sampler of the package in every folder: a new one is found here, and must pass without a line elsewhere."""

import dataclasses
import itertools

import jax
import numpy as np
import pytest
import seeds
from helpers import ByRank, numbers, over_devices, pointers, rarely, rejects

import jaxreplay as jr
from jaxreplay import testing
from jaxreplay._common import checks

EXPORTED = [getattr(jr, name) for name in jr.__all__]
CLASSES = [ByRank, *(x for x in EXPORTED if isinstance(x, type) and issubclass(x, jr.samplers.Sampler))]
CAPACITY, ROWS = 8, 16


def assert_same(found, expected):
    jax.tree.map(np.testing.assert_array_equal, found, expected)


def make(kind, **settings):
    """A sampler; what it requires is a number, for which 1 will do."""
    required = {x.name: 1.0 for x in dataclasses.fields(kind) if x.default is dataclasses.MISSING}
    return kind(**required | settings)


def variants(kind):
    """The sampler with its defaults, and with each other choice of a field."""
    yield make(kind)
    for field in dataclasses.fields(kind):
        check, *choices = field.metadata.get("rule", (None,))
        choices = {checks.check_bool: (True, False), checks.check_choice: choices}.get(check, ())
        yield from (make(kind, **{field.name: choice}) for choice in choices if choice != field.default)


FADING = jr.Prioritized(half_life=5.0, normalize=None)
SAMPLERS = [*map(make, CLASSES), FADING]
VARIANTS = [*(sampler for kind in CLASSES for sampler in variants(kind)), FADING]
each = pytest.mark.parametrize("sampler", SAMPLERS, ids=repr)
CASES = [x if x in SAMPLERS else rarely(x) for x in VARIANTS]
each_variant = pytest.mark.parametrize("sampler", CASES, ids=repr)
PAIRS = [*itertools.product(SAMPLERS, SAMPLERS)]


def replay(sampler, capacity=CAPACITY, count=CAPACITY):
    """A buffer with numbered items, and the last ones' TD errors 1, 2, 3."""
    buffer = jr.ReplayBuffer(capacity=capacity, sampler=sampler, donate=False)
    state = buffer.add(buffer.init(numbers(0, 4)), numbers(0, count))
    return buffer, buffer.update(state, buffer.newest(state, 3), np.array([1.0, -2.0, 3.0], np.float32))


def has_priorities(sampler):
    return jax.eval_shape(lambda: sampler.masses(sampler.init(4))) is not None


# Methods of samplers, each as one program.
weigh = jax.jit(lambda sampler, *arguments: sampler.weights(*arguments), static_argnums=0)
measure = jax.jit(lambda sampler, state: sampler.metrics(jax.tree.map(lambda x: x[None], state)), static_argnums=0)


def live(count):
    return jr.samplers.Live(np.int32(0), np.int32(count), capacity=CAPACITY)


def test_all_are_found():
    assert {jr.Uniform, jr.Prioritized, jr.Recent} <= {*CLASSES}
    assert {jr.Uniform(replacement=False), jr.Prioritized(normalize="global")} <= {*VARIANTS}


OTHER_SETTINGS = jr.Prioritized(max_priority="stored", normalize="global", stratified=False, floor=0.3, alpha=1.0)
SETTINGS = [
    *(jr.Recent(half_life=age, beta=beta, normalize=None) for age, beta in ((1e9, 1.0), (7.0, 0.5), (1.0, 0.0))),
    jr.Prioritized(half_life=3.0, max_priority="stored", normalize="global", stratified=False),
    *(jr.Prioritized(alpha=alpha, normalize=None, beta=1.0) for alpha in (0.0, 0.5, 1.5)),
    jr.Prioritized(max_priority=0.3, epsilon=0.0, stratified=False),
    jr.Prioritized(alpha=0.4, beta=0.0, epsilon=0.0, floor=1.0, max_priority="stored"),  # LAP
    jr.Prioritized(beta=lambda updates: 0.4 + 0.001 * updates, floor=0.5),
]


@pytest.mark.parametrize(
    ("sampler", "num_seeds"),
    [*((x, 1) for x in (*SAMPLERS, OTHER_SETTINGS)), *(rarely((x, 20)) for x in (*VARIANTS, *SETTINGS))],
    ids=lambda x: repr(x).partition(" at 0x")[0],
)
def test_the_contract(sampler, num_seeds):
    keys = [seeds.key("contract", seed) for seed in range(num_seeds)]
    testing.check_sampler(sampler, key=keys[::2], capacity=8)  # fewer slots than two more than its rows
    if num_seeds > 1:
        testing.check_sampler(sampler, key=keys[1::2])


@each_variant
def test_no_state_holds_one_array_twice(sampler):
    """So that a caller may donate it. Nor is one weakly typed, as that of a later state is not."""
    state = sampler.init(4)
    found = pointers(state)
    assert len({*found}) == len(found)
    assert not any(x.weak_type for x in jax.tree.leaves(state))
    assert bool(found) == has_priorities(sampler)


def test_the_contract_of_buffers():
    buffers = tuple(jr.ReplayBuffer(capacity=12, sampler=sampler) for sampler in SAMPLERS)
    testing.check_buffer(jr.Mixture(buffers=buffers), {"x": jax.ShapeDtypeStruct((5, 3), np.float32)})


@each_variant
def test_it_says_whether_rows_are_filled_and_how_weights_are_normalized(sampler):
    buffer, state = replay(sampler, count=3)
    sample = buffer.sample(state, jax.random.key(0), CAPACITY if sampler.is_distinct else ROWS)
    filled = np.asarray(sample.indices) >= 0
    assert filled.all() == sampler.fills_rows, "a sampler that fills rows has to say so, and no other"
    plain = sampler.unnormalized()
    assert plain.normalize in ("any", None)
    probabilities = np.asarray(sample.probabilities)
    of_all = np.asarray(weigh(plain, state.sampler, probabilities, live(3)))
    of_some = np.asarray(weigh(plain, state.sampler, probabilities[:5], live(3)))
    np.testing.assert_array_equal(of_some, of_all[:5])  # no other row matters
    expected = np.asarray(sample.weights)
    if sampler.normalize == "batch":
        of_all = of_all / of_all.max()
    if sampler.normalize != "global":
        np.testing.assert_allclose(of_all, expected, rtol=1e-6)


@each_variant
def test_a_subclass_that_draws_otherwise_says_nothing_it_does_not_say_itself(sampler):
    class Other(type(sampler)):
        def sample(self, state, key, batch_size, live):
            slots, probabilities = super().sample(state, key, batch_size, live)
            return slots, probabilities.at[0].set(0.0)

    other = Other(**{x.name: getattr(sampler, x.name) for x in dataclasses.fields(sampler)})
    assert not other.fills_rows
    buffer, state = replay(sampler)
    others = dataclasses.replace(buffer, sampler=other)
    if jax.tree.leaves(state.sampler):
        rejects("cannot convert its state", jr.migrate, buffer, state, others)
    else:
        assert_same(jr.migrate(buffer, state, others), jr.migrate(buffer, state, buffer))


@pytest.mark.parametrize("capacity", [6, rarely(12)])
@pytest.mark.parametrize(("old", "new"), PAIRS, ids=repr)
def test_states_are_converted(old, new, capacity):
    buffer, state = replay(old)
    wanted, count = jr.ReplayBuffer(capacity=capacity, sampler=new, donate=False), min(capacity, CAPACITY)
    moved = jr.migrate(buffer, state, wanted)
    handles = wanted.newest(moved, count)
    assert wanted.get(moved, handles).tolist() == [*range(CAPACITY - count, CAPACITY)]
    if has_priorities(old) and has_priorities(new):
        expected = buffer.priorities(state, buffer.newest(state, count))
        np.testing.assert_allclose(wanted.priorities(moved, handles), expected, rtol=1e-5)
    sample = wanted.sample(moved, jax.random.key(0), ROWS)
    assert np.all(np.asarray(sample.indices)[np.asarray(sample.probabilities) > 0] >= 0)
    assert np.all(np.isfinite(sample.weights))
    assert np.any(np.asarray(sample.weights) > 0)


@each
def test_diagnostics_plot_and_memory(sampler):
    buffer, state = replay(sampler)
    found = jr.diagnostics(buffer, state, jax.random.key(0), thorough=True)
    assert all(np.isfinite(x) for x in found.values())
    said = measure(sampler, state.sampler)
    assert {name: float(found[name]) for name in said} == {name: float(np.float32(x)) for name, x in said.items()}
    known = has_priorities(sampler)
    assert known == ("stored/priority_q50" in found)
    shown = jax.eval_shape(lambda: sampler.priorities_at(sampler.init(4), np.ones(1))) is not None
    assert shown == ("draws/priority_q50" in found)
    if known:
        stored = np.sort(buffer.priorities(state, buffer.newest(state, CAPACITY)))
        np.testing.assert_allclose([found["stored/priority_q50"], found["stored/priority_max"]], stored[[3, -1]], 1e-5)
    assert len(jr.plot(buffer, state).axes) == 3 + (known and shown)
    assert jr.memory(buffer, numbers(0, 4)).total == sum(x.nbytes for x in jax.tree.leaves(state))


@each_variant
def test_mixtures(sampler):
    (buffer, state), (plain, other) = replay(sampler), replay(jr.Uniform())
    states = state, other
    own = jr.Mixture(buffers=(buffer, plain)).sample(states, jax.random.key(0), 8)
    alone = buffer.sample(state, jax.random.split(jax.random.key(0), 2)[0], 4)
    np.testing.assert_array_equal(own.weights[:4], alone.weights)
    if sampler.normalize == "global":
        return rejects("has normalize=\"?'?global", jr.Mixture, buffers=(buffer, plain), weights="joint")
    joint = jr.Mixture(buffers=(buffer, plain), weights="joint").sample(states, jax.random.key(0), 8)
    raw = np.asarray(weigh(sampler.unnormalized(), state.sampler, alone.probabilities, live(CAPACITY)))
    expected = np.concatenate([raw, np.ones(4)])
    if sampler.normalize == "batch":
        expected /= expected.max()
    np.testing.assert_allclose(joint.weights, expected, rtol=1e-5)


@each
def test_shards_and_checkpoints(sampler, tmp_path):
    wide, narrow = (over_devices(jr.ReplayBuffer(capacity=CAPACITY, sampler=sampler, donate=False), n) for n in (4, 2))
    state = wide.add(wide.init(numbers(0, CAPACITY)), numbers(0, CAPACITY))
    sample = wide.sample(state, jax.random.key(0), ROWS)
    np.testing.assert_array_equal(wide.get(state, sample.indices), sample.items)
    state = wide.update(state, sample.indices, np.ones(ROWS, np.float32))
    assert all(np.isfinite(x) for x in jr.diagnostics(wide, state, jax.random.key(0), thorough=True).values())
    jr.save(tmp_path, wide, state)
    assert_same(jr.restore(tmp_path, wide, state), state)
    fewer = jr.restore(tmp_path, narrow, jax.eval_shape(narrow.init, numbers(0, CAPACITY)))
    assert_same(fewer, jr.migrate(wide, state, narrow))
    if sampler.by_age:
        rejects("keeps no order", jr.ReservoirBuffer, capacity=4, sampler=sampler)
    if not sampler.takes_spent:
        rejects("draws by age among all items", jr.ReplayBuffer, capacity=4, sampler=sampler, max_uses=1)
