"""Settings of `Prioritized` are arrays of its state, and lanes of `jax.vmap` may differ in them."""

import dataclasses
import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest
import seeds
from helpers import at, check_tree, items, leaves_of, numbers, over_devices, rarely, rejects, stack, types

import jaxreplay as jr
from jaxreplay.inspection import _plot

IN_STATE = {"alpha": 0.7, "epsilon": 0.25, "floor": 0.5}
LANES = [
    {"alpha": 0.0, "epsilon": 0.0, "floor": 0.0},
    {"alpha": 0.37, "epsilon": 0.01, "floor": 0.0},
    {"alpha": 1.0, "epsilon": 0.0, "floor": 0.5},
    {"alpha": 1.7, "epsilon": 1e-6, "floor": 0.0},
]
PER = {
    "ever": {"beta": 0.7},
    "stored": {"max_priority": "stored", "normalize": "global"},
    "number": {"max_priority": 2.0, "stratified": False, "normalize": None},
    "fading": {"half_life": 1.0},
}
HALF_LIVES = np.float32([0.5, 2.0, 7.0, 1e6])  # of the lanes, with "fading"


@pytest.mark.parametrize("per", ["stored", "ever", rarely("number"), "fading"])
def test_lanes_do_what_their_twins_do(per):
    buffer = jr.ReplayBuffer(capacity=5, sampler=jr.Prioritized(**PER[per]))
    state = stack(*[buffer.init(items(numbers(0, 1)))] * len(LANES))
    stacked = {name: np.array([lane[name] for lane in LANES], np.float32) for name in IN_STATE}
    state = state.replace(sampler=state.sampler.replace(**stacked))
    if fading := state.sampler.tree.fading:
        tree = state.sampler.tree.replace(fading=fading.replace(half_life=HALF_LIVES))
        state = state.replace(sampler=state.sampler.replace(tree=tree))
    new, rng = PER[per].get("max_priority", "ever"), seeds.rng("settings", per)
    shards = [oracles.Shard(oracles.Ring(5), new_priority=new, **lane) for lane in LANES]

    @jax.jit
    @functools.partial(jax.vmap, in_axes=(0, None, None, None, None))
    def step(state, ids, new_errors, handles, errors):
        state = buffer.update(buffer.add(state, items(ids), td_errors=new_errors), handles, errors)
        return state, buffer.sample(state, jax.random.key(0), 8), buffer.priorities(state, handles)

    for number in range(12):
        ids = numbers(3 * number, 3)
        new_errors = np.where(rng.random(3) < 0.5, rng.choice([np.nan, np.inf], 3), rng.normal(size=3))
        handles, errors = rng.integers(max(0, 3 * number - 3), 3 * number + 3, 6).astype(np.int32), rng.normal(size=6)
        errors[number % 6], errors[rng.integers(6)] = 0, rng.choice([np.nan, np.inf, -np.inf])
        state, samples, priorities = step(state, ids, new_errors.astype(np.float32), handles, errors.astype(np.float32))
        for k, (shard, lane) in enumerate(zip(shards, LANES, strict=True)):
            own_age = {"half_life": float(HALF_LIVES[k])} if fading else {}
            sampler = dataclasses.replace(buffer.sampler, **own_age)
            twin, its = oracles.ShardedTwin([shard], 2**30, sampler), shard.priorities
            twin.add(np.array([{"id": int(i)} for i in ids]), None, new_errors)
            twin.update(handles, errors.astype(np.float32))
            own, sample = at(state.sampler, k), at(samples, k)
            check_tree(own.tree)
            np.testing.assert_allclose(leaves_of(own.tree), shard.by_slot(its.leaf), rtol=2e-5)
            np.testing.assert_allclose(own.max_priority, its.max_priority, rtol=1e-6)
            assert (own.updates, own.rejected) == (its.updates, its.rejected)
            (law,), drawn = twin.draw_law(), [(0, handle) for handle in sample.indices]
            np.testing.assert_allclose(sample.probabilities, [law[handle] for _, handle in drawn], rtol=3e-5)
            np.testing.assert_allclose(sample.weights, twin.draw_weights([law], drawn, 8), rtol=3e-5)
            exponent = 1 / lane["alpha"] if lane["alpha"] else 0
            held = [its.leaf.get(handle, 0) for handle in handles.tolist()]
            np.testing.assert_allclose(priorities[k], [x and x**exponent for x in held], rtol=1e-4)


def test_shards_have_settings_of_their_own():
    buffer, state = stored(jr.Prioritized(epsilon=0.0), 2, alpha=[1.0, 2.0])
    leaves = np.concatenate([leaves_of(at(state.sampler.tree, k)) for k in range(2)])
    np.testing.assert_allclose(leaves, np.linspace(0, 4, 12) ** np.repeat([1, 2], 6), rtol=1e-6)
    rejects(r"state.sampler.alpha: got \[1.0, 2.0\] by shard", jr.migrate, buffer, state, buffer)


def stored(sampler, num_shards=0, **settings):
    """A buffer with twelve items of known priorities, and its state."""
    buffer = over_devices(jr.ReplayBuffer(capacity=12, sampler=sampler), num_shards)
    state = buffer.init(items(numbers(0, 12)))
    for name, value in settings.items():
        given = np.broadcast_to(np.float32(value), getattr(state.sampler, name).shape)
        state = state.replace(sampler=state.sampler.replace(**{name: given}))
    return buffer, buffer.add(state, items(numbers(0, 12)), td_errors=np.linspace(0, 4, 12, dtype=np.float32))


STATIC = jr.Prioritized(alpha=0.7, epsilon=0.25, floor=0.5)


@pytest.mark.parametrize("num_shards", [0, 2])
def test_migration_keeps_the_settings_of_the_state_where_the_configurations_agree(num_shards):
    usual, state = stored(jr.Prioritized(), num_shards, **IN_STATE)
    chex.assert_trees_all_equal(jr.migrate(usual, state, usual).sampler, state.sampler)
    other, expected = stored(jr.Prioritized(alpha=2.0), num_shards, **IN_STATE | {"alpha": 2.0})
    found = jr.migrate(usual, state, other)
    chex.assert_trees_all_close(jax.device_get(found.sampler), jax.device_get(expected.sampler), rtol=1e-5)
    uniform, plain = stored(jr.Uniform(), num_shards)
    found = jr.migrate(uniform, plain, other).sampler
    assert (np.ravel(found.alpha)[0], np.ravel(found.floor)[0]) == (2, 0)


def test_settings_of_another_dtype_change_no_other():
    """With 64-bit types they are float64."""
    buffer = jr.ReplayBuffer(capacity=4, sampler=jr.Prioritized(), donate=False)
    given = {name: jax.device_put(np.float64(value)) for name, value in IN_STATE.items()}
    state = buffer.init(numbers(0, 4))
    state = state.replace(sampler=state.sampler.replace(**given))
    after = buffer.update(buffer.add(state, numbers(0, 4), td_errors=np.arange(4.0)), numbers(0, 4), np.arange(4.0))
    assert types(after) == types(state)
    found = buffer.priorities(after, numbers(0, 4))
    np.testing.assert_allclose(found, [0.75, 1.25, 2.25, 3.25], rtol=1e-6)
    assert found.dtype == jnp.float32


def test_diagnostics_and_plots_have_the_priorities_of_static_settings():
    pairs = stored(jr.Prioritized(), 2, **IN_STATE), stored(STATIC, 2)
    found, expected = (jr.diagnostics(*pair, jax.random.key(0), thorough=True) for pair in pairs)
    chex.assert_trees_all_close(found, expected, rtol=1e-5)
    seen = [_plot._contents(*pair)["priorities"] for pair in pairs]
    chex.assert_trees_all_close(*seen, rtol=1e-5)
