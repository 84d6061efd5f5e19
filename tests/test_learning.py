"""What agents learn with the package: gradients without bias, values under a time limit, Soft Actor-Critic."""

import experiment
import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest
import seeds
import time_limit
from helpers import rarely

pytestmark = pytest.mark.law
WAYS = {
    time_limit.AS_TERMINATION: "as_termination",
    time_limit.ONE_GAMMA: "one_gamma",
    time_limit.RESET_OBSERVATION: "reset_obs",
    time_limit.NO_END: "no_end",
}


@pytest.mark.parametrize("n", [rarely(1), rarely(3)])
def test_values_under_a_time_limit(n):
    values = time_limit.learn_all(n, updates=10_000, seed=int(seeds.rng(n).integers(2**31)))
    for env, first_differs in enumerate(time_limit.ENVIRONMENTS.values()):
        right = [100, 99 - time_limit.FEE] if first_differs else [100]
        np.testing.assert_allclose(values[env, time_limit.RIGHT, : len(right)], right, rtol=0.02)
        for way in time_limit.WAYS:
            mistakes = {name: way == mistake for mistake, name in WAYS.items()}
            settings = (n, time_limit.GAMMA, time_limit.LIMIT, -time_limit.FEE, first_differs)
            expected = oracles.time_limit_values(*settings, **mistakes)[: len(right)]
            np.testing.assert_allclose(values[env, way, : len(right)], expected, rtol=0.02, err_msg=f"{env}, {way}")


def test_known_values_under_a_time_limit():
    def value(n, **mistakes):
        flags = dict.fromkeys(WAYS.values(), False) | mistakes
        return oracles.time_limit_values(n, 0.99, 50, 1.0, False, **flags)[0]

    np.testing.assert_allclose([value(1), value(3)], 100)
    np.testing.assert_allclose(value(1, as_termination=True), 1 / (1 - 0.99 * 49 / 50))


class PointMass:
    """Pays for being near 0, where actions push; cut off after 10 steps. With the interface of gymnax."""

    num_actions = 1

    def reset(self, key):
        x = jax.random.uniform(key, (1,), jnp.float32, -1.0, 1.0)
        return x, (x, jnp.int32(0))

    def step(self, key, state, action):
        x, time = state
        x = jnp.clip(x + 0.1 * action, -2.0, 2.0)
        reward, truncated = -jnp.sum(x**2), time == 9
        start = self.reset(key)
        obs, state = jax.tree.map(lambda a, b: jnp.where(truncated, a, b), start, (x, (x, time + 1)))
        return obs, state, reward, jnp.bool_(False), truncated, {"final_observation": x}


def sac_on_point_mass(steps, num_envs, capacity, warmup, **constants):
    pytest.importorskip("gymnax")
    constants |= {"WARMUP, STEPS, INTERVAL": (warmup, steps, steps), "NUM_ENVS": num_envs, "CAPACITY": capacity}
    sac = experiment.agent("sac", **constants)
    sac.env, sac.scale = PointMass(), 2.0
    return sac


@pytest.mark.slow
def test_sac_learns_with_per():
    sac = sac_on_point_mass(steps=40, num_envs=2, capacity=128, warmup=20, PRIORITIZED=True, N=3, BATCH=16, WIDTH=16)

    @jax.jit
    @jax.vmap
    def train(key):
        before = sac.init(key)
        return before, *jax.lax.scan(lambda state, _: sac.act(sac.learn(state), 0.0), before, length=sac.STEPS)

    before, after, returns = train(jax.random.split(seeds.key(0), 2))
    # An episode in 10 steps, of each seed and environment, which all differ.
    assert np.isfinite(returns).sum() == len(np.unique(returns[np.isfinite(returns)])) == 2 * 2 * 4

    def draw(buffer_state, beta=None):
        return jax.vmap(lambda state: sac.buffer.sample(state, seeds.key(1), 64, beta=beta))(buffer_state)

    # priorities move away from that of new items
    assert np.unique(draw(before.buffer).probabilities).size == 1
    probabilities = np.asarray(draw(after.buffer).probabilities)
    assert (probabilities.max(axis=1) > 2 * probabilities.min(axis=1)).all()

    weights = np.asarray(draw(after.buffer).weights)
    assert (weights > 0).all()
    np.testing.assert_array_equal(weights.max(axis=1), 1)

    # beta anneals from 0.4 to 1 with the updates, seen at the priorities of the end
    np.testing.assert_array_equal(after.buffer.sampler.updates, sac.STEPS)
    for updates, beta in ((0, 0.4), (sac.STEPS // 2, 0.7), (sac.STEPS, 1.0)):
        sampler = after.buffer.sampler.replace(updates=jnp.full(2, updates, jnp.int32))
        annealed = draw(after.buffer.replace(sampler=sampler)).weights
        np.testing.assert_allclose(annealed, draw(after.buffer, beta=beta).weights, rtol=1e-5)

    # every parameter is finite, and learns
    for old, new in zip(jax.tree.leaves(before.networks), jax.tree.leaves(after.networks), strict=True):
        assert np.isfinite(new).all()
        assert (np.asarray(old) != np.asarray(new)).any()


@pytest.mark.slow
def test_sac_priorities():
    """A priority is the mean error of both critics, to the power of alpha."""
    sac = sac_on_point_mass(steps=40, num_envs=2, capacity=128, warmup=20, PRIORITIZED=True, BATCH=8, WIDTH=8)
    state = sac.init(seeds.key(2))
    sample_key, next_key = jax.random.split(state.key, 4)[1:3]
    sample = sac.buffer.sample(state.buffer, sample_key, sac.BATCH)
    next_action, logp = sac.policy(state.networks["actor"], sample.items.S_next, next_key)
    next_q = sac.q(state.target_critics, sample.items.S_next, next_action).min(axis=0)
    target = sample.items.Rn + sample.items.In * (next_q - logp)  # the temperature is 1
    errors = np.abs(target - sac.q(state.networks["critics"], sample.items.S, sample.items.A))
    after = sac.learn(state)
    everything = sac.buffer.sample(after.buffer, seeds.key(3), 512)
    known = dict(zip(np.asarray(everything.indices).tolist(), np.asarray(everything.probabilities), strict=True))
    of_index = dict(zip(np.asarray(sample.indices).tolist(), errors.mean(axis=0), strict=True))
    shared = sorted(known.keys() & of_index.keys())
    assert len(shared) >= 4
    expected, found = ([x[index] for index in shared] for x in (of_index, known))
    np.testing.assert_allclose(np.divide(found, found[0]), np.divide(expected, expected[0]) ** 0.6, rtol=1e-3)
