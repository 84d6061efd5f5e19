"""Settings that `Prioritized` leaves open: `init` takes them, and lanes of `jax.vmap` may differ in them."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest
import seeds
from helpers import at, check_tree, items, leaves_of, numbers, over_devices, rarely
from scipy import stats

import jaxreplay as jr
from jaxreplay import testing
from jaxreplay.inspection import _plot

OPEN = {"alpha": None, "epsilon": None, "floor": None}
LANES = [
    {"alpha": 0.0, "epsilon": 0.0, "floor": 0.0},
    {"alpha": 0.37, "epsilon": 0.01, "floor": 0.0},
    {"alpha": 1.0, "epsilon": 0.0, "floor": 0.5},
    {"alpha": 1.7, "epsilon": 1e-6, "floor": 0.0},
]
STACKED = {name: jnp.array([lane[name] for lane in LANES], jnp.float32) for name in OPEN}
PER = {
    "ever": {"beta": 0.7},
    "stored": {"max_priority": "stored", "normalize": "global", "count_updates": True},
    "number": {"max_priority": 2.0, "stratified": False, "normalize": None},
}
BUFFERS = {
    "replay": lambda sampler: jr.ReplayBuffer(capacity=12, sampler=sampler),
    "reservoir": lambda sampler: jr.ReservoirBuffer(capacity=9, sampler=sampler),
    "sequence": lambda sampler: jr.SequenceBuffer(length=8, num_envs=2, sequence_length=3, sampler=sampler),
    "sharded": lambda sampler: over_devices(jr.ReplayBuffer(capacity=12, sampler=sampler), 2),
    "mixture": lambda sampler: jr.Mixture(buffers=(jr.ReplayBuffer(capacity=12, sampler=sampler),) * 2),
}
ERRORS = np.array([0.0, -0.2, 3.0, np.nan, 0.7, np.inf, -8.0, 0.01], np.float32)


def batch(buffer, number):
    return items(
        numbers(8 * number, 8).reshape(4, 2) if isinstance(buffer, jr.SequenceBuffer) else numbers(8 * number, 8)
    )


def steps(buffer, key, **settings):
    """The state after three replay steps, and the last draw with its priorities."""
    state = buffer.init(batch(buffer, 0), **settings)
    for number in range(3):
        its = () if not isinstance(buffer, jr.Mixture) else (number % 2,)
        own_key = (jax.random.fold_in(key, 9),) if isinstance(buffer, jr.ReservoirBuffer) else ()
        state = buffer.add(state, *its, batch(buffer, number), *own_key)
        sample = buffer.sample(state, jax.random.fold_in(key, number), 8)
        state = buffer.update(state, sample.indices, jnp.roll(ERRORS, number))
    return state, buffer.sample(state, key, 8), buffer.priorities(state, sample.indices)


def without_settings(tree):
    """States of samplers without the settings that they keep."""

    def is_sampler(x):
        return isinstance(x, jr.samplers.PrioritizedState)

    return jax.tree.map(lambda x: x.replace(**OPEN) if is_sampler(x) else x, tree, is_leaf=is_sampler)


@pytest.mark.parametrize(
    ("buffer", "per"),
    [
        ("replay", "ever"),
        *map(rarely, [("replay", "stored"), ("replay", "number"), ("sharded", "stored")]),
        *(rarely((name, "ever")) for name in BUFFERS if name not in ("replay", "sharded")),
    ],
)
def test_lanes_of_vmap_equal_static_settings(buffer, per):
    make, key = BUFFERS[buffer], jax.random.key(1)
    sweep = jax.jit(jax.vmap(lambda s: steps(make(jr.Prioritized(**OPEN, **PER[per])), key, **s)))(STACKED)
    for k, lane in enumerate(LANES):
        alone = jax.jit(lambda lane=lane: steps(make(jr.Prioritized(**lane, **PER[per])), key))()
        found, expected = jax.device_get((at(without_settings(sweep), k), alone))
        # XLA computes a power with a constant exponent by other instructions, which round differently.
        chex.assert_trees_all_close(found, expected, rtol=3e-5)
        chex.assert_trees_all_equal(found[1].indices, expected[1].indices)


def test_a_lane_equals_the_same_settings_alone_bit_for_bit():
    buffer, key = BUFFERS["replay"](jr.Prioritized(**OPEN)), jax.random.key(1)
    sweep = jax.jit(jax.vmap(lambda s: steps(buffer, key, **s)))(STACKED)
    alone = jax.jit(lambda s: steps(buffer, key, **s))
    for k in range(len(LANES)):
        chex.assert_trees_all_equal(at(sweep, k), alone(at(STACKED, k)))


@pytest.mark.parametrize("per", ["stored", *map(rarely, ["ever", "number"])])
def test_lanes_do_what_their_twins_do(per):
    buffer = jr.ReplayBuffer(capacity=5, sampler=jr.Prioritized(**OPEN, **PER[per]))
    state = jax.vmap(lambda s: buffer.init(items(numbers(0, 1)), **s))(STACKED)
    new = PER[per].get("max_priority", "ever")
    twins, rng = [oracles.ReplayTwin(5, new_priority=new, **lane) for lane in LANES], seeds.rng("open settings", per)
    add = jax.jit(jax.vmap(lambda s, x, e: buffer.add(s, x, td_errors=e), in_axes=(0, None, None)))
    update = jax.jit(jax.vmap(buffer.update, in_axes=(0, None, None)))
    for number in range(12):
        ids = numbers(3 * number, 3)
        new_errors = np.where(rng.random(3) < 0.5, np.nan, rng.normal(size=3)).astype(np.float32)
        state = add(state, items(ids), new_errors)
        handles, errors = rng.integers(max(0, 3 * number - 3), 3 * number + 3, 6).astype(np.int32), rng.normal(size=6)
        state = update(state, handles, errors.astype(np.float32))
        for k, twin in enumerate(twins):
            twin.add([{"id": int(i)} for i in ids], None, new_errors)
            twin.update([h if h in twin.leaf else None for h in handles.tolist()], errors.astype(np.float32))
            tree = jax.tree.map(lambda x, k=k: x[k], state.sampler.tree)
            check_tree(tree)
            np.testing.assert_allclose(leaves_of(tree), twin.leaves_by_slot(), rtol=2e-5)
            np.testing.assert_allclose(state.sampler.max_priority[k], twin.max_priority, rtol=1e-6)


@pytest.mark.law
def test_each_lane_draws_by_its_own_law():
    alphas, errors = np.array([0.5, 2.0]), np.array([0.5, 1.0, 2.0, 4.0])
    buffer = jr.ReplayBuffer(capacity=4, sampler=jr.Prioritized(alpha=None, epsilon=0.0, stratified=False))

    def draw(alpha):
        state = buffer.add(buffer.init(numbers(0, 4), alpha=alpha), numbers(0, 4), td_errors=errors)
        return buffer.sample(state, seeds.key(0), 20_000).items

    for alpha, drawn in zip(alphas, jax.jit(jax.vmap(draw))(alphas), strict=True):
        law = errors**alpha / np.sum(errors**alpha)
        assert stats.chisquare(np.bincount(drawn, minlength=4), 20_000 * law).pvalue > 1e-4


@pytest.mark.versions
@pytest.mark.parametrize("name", [name if name == "replay" else rarely(name) for name in ("replay", "sharded")])
def test_open_settings_follow_the_rules_of_buffers(name):
    buffer = BUFFERS[name](jr.Prioritized(**OPEN))
    testing.check_buffer(buffer, jnp.zeros((4, 2)), settings=LANES[1])


def test_open_settings_follow_the_rules_of_samplers():
    testing.check_sampler(jr.Prioritized(alpha=None, normalize="global"), settings={"alpha": 0.5})


@pytest.mark.parametrize("name", BUFFERS)
def test_init_checks_settings(name):
    example = batch(BUFFERS[name](jr.Uniform()), 0)

    def init(sampler, **settings):
        return BUFFERS[name](sampler).init(example, **settings)

    leaves_alpha = jr.Prioritized(alpha=None)
    for alpha, message in (
        (-1, "alpha=-1: must be a finite number of at least 0; 0.6 is usual; jax.vmap over init takes several"),
        (jnp.float32(-1), "alpha=.*-1.*: must be a finite number of at least 0"),
        (np.inf, "alpha=inf: must be a finite number"),
        (np.ones(3), "alpha=.*: must be a finite number"),
        (True, "alpha=True: must be a finite number"),
        (None, r"alpha: Prioritized\(alpha=None\) leaves it open; pass alpha=... to init"),
    ):
        with pytest.raises(ValueError, match=message):
            init(leaves_alpha, alpha=alpha)
    with pytest.raises(ValueError, match=r"alpha: got float32\[3\], expected one number"):
        jax.eval_shape(functools.partial(init, leaves_alpha), alpha=jnp.ones(3, jnp.float32))
    with pytest.raises(ValueError, match=r"alpha: Prioritized\(alpha=None\) leaves it open"):
        init(leaves_alpha)
    with pytest.raises(ValueError, match=r"alpha=0.5: the sampler has alpha=0.7; use Prioritized\(alpha=None\)"):
        init(jr.Prioritized(alpha=0.7), alpha=0.5)
    with pytest.raises(TypeError, match=r"init: Uniform\(\) takes no setting 'alpha'"):
        init(jr.Uniform(), alpha=0.5)
    with pytest.raises(TypeError, match="takes no setting 'beta'"):
        init(leaves_alpha, alpha=0.5, beta=0.5)
    assert not any(x.weak_type for x in jax.tree.leaves(init(leaves_alpha, alpha=np.float64(0.5))))
    assert jr.memory(BUFFERS[name](leaves_alpha), example).tree > 0


def test_a_setting_is_a_copy_that_may_be_donated():
    """Also through `jit`, which returns arguments that it passes on."""
    buffer, alpha = BUFFERS["mixture"](jr.Prioritized(alpha=None)), jnp.float32(0.5)
    for init in (buffer.init, jax.jit(buffer.init)):
        state = init(items(numbers(0, 8)), alpha=alpha)
        sample = buffer.sample(state := buffer.add(state, 1, items(numbers(0, 8))), jax.random.key(0), 8)
        buffer.update(state, sample.indices, ERRORS)
        assert float(alpha) == 0.5


def test_a_mixture_gives_settings_to_the_sources_that_leave_them_open():
    sources = jr.Uniform(), jr.Prioritized(alpha=None), jr.Prioritized(alpha=0.3, floor=None)
    buffer = jr.Mixture(buffers=tuple(jr.ReplayBuffer(capacity=8, sampler=sampler) for sampler in sources))
    _, first, second = (state.sampler for state in buffer.init(items(numbers(0, 8)), alpha=0.5, floor=1.0))
    assert (first.alpha, first.floor, second.alpha, second.floor) == (0.5, None, None, 1.0)


def stored(sampler, num_shards=0, **settings):
    """A buffer with twelve items of known priorities, and its state."""
    buffer = jr.ReplayBuffer(capacity=12, sampler=sampler)
    buffer = over_devices(buffer, num_shards) if num_shards else buffer
    state = buffer.init(items(numbers(0, 12)), **settings)
    return buffer, buffer.add(state, items(numbers(0, 12)), td_errors=np.linspace(0, 4, 12, dtype=np.float32))


STATIC = jr.Prioritized(alpha=0.7, epsilon=0.25, floor=0.5)
IN_STATE = {"alpha": 0.7, "epsilon": 0.25, "floor": 0.5}


@pytest.mark.parametrize("num_shards", [0, 2])
def test_migration_between_static_and_open_settings_keeps_their_values(num_shards):
    static, state = stored(STATIC, num_shards)
    leaves_open, expected = stored(jr.Prioritized(**OPEN), num_shards, **IN_STATE)
    found = jr.migrate(static, state, leaves_open)
    chex.assert_trees_all_close(jax.device_get(found.sampler), jax.device_get(expected.sampler), rtol=1e-6)
    chex.assert_trees_all_equal(found.sampler.tree, state.sampler.tree)  # to the bit
    back = jr.migrate(leaves_open, found, static)
    chex.assert_trees_all_equal(back.sampler, state.sampler)


def test_migration_takes_other_settings():
    old, state = stored(jr.Prioritized(alpha=None, epsilon=0.0), alpha=0.5)
    new = jr.ReplayBuffer(capacity=12, sampler=jr.Prioritized(alpha=None, epsilon=0.0))
    found = jr.migrate(old, state, new, alpha=2.0)
    np.testing.assert_allclose(leaves_of(found.sampler.tree), np.linspace(0, 4, 12) ** 2, rtol=1e-5)
    assert found.sampler.alpha == 2
    static = jr.ReplayBuffer(capacity=12, sampler=jr.Prioritized(alpha=1.0, epsilon=0.0))
    np.testing.assert_allclose(leaves_of(jr.migrate(old, state, static).sampler.tree), np.linspace(0, 4, 12), rtol=1e-5)
    uniform, plain = stored(jr.Uniform())
    assert jr.migrate(uniform, plain, new, alpha=0.5).sampler.alpha == 0.5
    with pytest.raises(ValueError, match=r"alpha: Prioritized\(alpha=None\) leaves it open"):
        jr.migrate(uniform, plain, new)
    with pytest.raises(ValueError, match=r"alpha=0\.5: the sampler has alpha=1\.0"):
        jr.migrate(old, state, static, alpha=0.5)
    with pytest.raises(TypeError, match="takes no setting 'alpha'"):
        jr.migrate(old, state, uniform, alpha=0.5)


def test_a_state_of_static_settings_is_not_one_of_open_settings():
    (buffer, state), (_, other) = stored(jr.Prioritized(alpha=None), alpha=0.5), stored(jr.Prioritized())
    with pytest.raises(ValueError, match="this state is of another sampler"):
        buffer.sample(other, jax.random.key(0), 4)
    assert buffer.sample(state, jax.random.key(0), 4).indices.shape == (4,)


@pytest.mark.parametrize("num_shards", [0, 2])
def test_a_checkpoint_keeps_settings(tmp_path, num_shards):
    buffer, state = stored(jr.Prioritized(**OPEN), num_shards, **IN_STATE)
    jr.save(tmp_path / "one", buffer, state)
    chex.assert_trees_all_equal(jr.restore(tmp_path / "one", buffer), state)
    lanes = jax.jit(jax.vmap(lambda s: stored(jr.Prioritized(**OPEN), **s)[1]))(STACKED)
    alone = stored(jr.Prioritized(**OPEN), **IN_STATE)[0]
    jr.save(tmp_path / "lanes", alone, lanes)
    chex.assert_trees_all_equal(jr.restore(tmp_path / "lanes", alone), lanes)
    with pytest.raises(ValueError, match=r"buffer.*sampler.alpha: saved None, given 0.7"):
        jr.restore(tmp_path / "one", stored(STATIC, num_shards)[0])


@pytest.mark.parametrize("num_shards", [0, 2])
def test_diagnostics_and_plots_have_the_priorities_of_static_settings(num_shards):
    buffer, state = stored(jr.Prioritized(**OPEN), num_shards, **IN_STATE)
    static, same = stored(STATIC, num_shards)
    key = jax.random.key(0)
    found, expected = (jr.diagnostics(*pair, key, thorough=True) for pair in ((buffer, state), (static, same)))
    settings = {name: found.pop(name) for name in OPEN}
    chex.assert_trees_all_close(settings, IN_STATE)
    chex.assert_trees_all_close(found, expected, rtol=1e-5)
    seen = [_plot._contents(*pair)["priorities"] for pair in ((buffer, state), (static, same))]
    chex.assert_trees_all_close(*seen, rtol=1e-5)
