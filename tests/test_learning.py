"""What agents learn with the package: gradients without bias, values under a time limit, Soft Actor-Critic."""

from types import SimpleNamespace

import experiment
import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest
import sac
import seeds
import time_limit
from helpers import rarely

import jaxreplay as jr

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


def test_sac_loss_and_priorities():
    td_errors = jnp.array([[1.0, -2.0], [3.0, 4.0]])
    assert sac.critic_loss(td_errors, jnp.ones(2)) == 7.5
    assert sac.critic_loss(td_errors, jnp.array([1.0, 0.5])) == 5.0
    np.testing.assert_array_equal(sac.priorities(td_errors), [2, 3])


class PointMass:
    """Pays for being near 0, where actions push; cut off after 10 steps. With the interface of gymnax."""

    num_actions = 1

    def action_space(self, params):
        return SimpleNamespace(high=2.0)

    def reset(self, key, params):
        x = jax.random.uniform(key, (1,), jnp.float32, -1.0, 1.0)
        return x, (x, jnp.int32(0))

    def step(self, key, state, action, params):
        x, time = state
        x = jnp.clip(x + 0.1 * action, -2.0, 2.0)
        reward, truncated = -jnp.sum(x**2), time == 9
        start = self.reset(key, params)
        obs, state = jax.tree.map(lambda a, b: jnp.where(truncated, a, b), start, (x, (x, time + 1)))
        return obs, state, reward, jnp.bool_(False), truncated, {"final_observation": x}


@pytest.mark.slow
def test_sac_trains():
    config = sac.Config(steps=20, num_envs=2, capacity=64, warmup=10, intervals=2, batch_size=8, width=8)
    reported = []
    train = experiment.make_train(sac.make_agent(config, PointMass(), None), config, lambda x: reported.append(x.shape))
    returns = np.asarray(train(jax.random.split(seeds.key(0), 3)))
    assert set(reported) == {(10, 3, 2)}
    ends = np.isfinite(returns).any(axis=(1, 2))
    np.testing.assert_array_equal(np.flatnonzero(ends), [9, 19, 29])
    assert np.isfinite(returns[ends]).all()
    assert len(np.unique(returns[ends])) == 3 * 3 * 2  # seeds and environments differ


@pytest.mark.slow
def test_sac_learns_with_per():
    assert not sac.Config(steps=1).use_per
    assert sac.Config(steps=1).buffer.sampler == jr.Uniform()
    config = sac.Config(steps=40, use_per=True, num_envs=2, n=3, capacity=128, batch_size=16, width=16)
    init, act, learn = sac.make_agent(config, PointMass(), None)

    @jax.jit
    @jax.vmap
    def train(key):
        before, _ = jax.lax.scan(lambda state, _: act(state, 1.0), init(key), length=20)
        return before, *jax.lax.scan(lambda state, _: act(learn(state), 0.0), before, length=config.steps)

    before, after, returns = train(jax.random.split(seeds.key(0), 2))
    assert np.isfinite(returns).sum() == 2 * 2 * 4  # an episode in 10 steps, of each seed and environment

    def draw(buffer_state, beta=None):
        return jax.vmap(lambda state: config.buffer.sample(state, seeds.key(1), 64, beta=beta))(buffer_state)

    # priorities move away from that of new items
    assert np.unique(draw(before.buffer).probabilities).size == 1
    probabilities = np.asarray(draw(after.buffer).probabilities)
    assert (probabilities.max(axis=1) > 2 * probabilities.min(axis=1)).all()

    weights = np.asarray(draw(after.buffer).weights)
    assert (weights > 0).all()
    np.testing.assert_array_equal(weights.max(axis=1), 1)

    # beta anneals from 0.4 to 1 with the updates, seen at the priorities of the end
    np.testing.assert_array_equal(after.buffer.sampler.updates, config.steps)
    for updates, beta in ((0, 0.4), (config.steps // 2, 0.7), (config.steps, 1.0)):
        sampler = after.buffer.sampler.replace(updates=jnp.full(2, updates, jnp.int32))
        annealed = draw(after.buffer.replace(sampler=sampler)).weights
        np.testing.assert_allclose(annealed, draw(after.buffer, beta=beta).weights, rtol=1e-5)

    # every parameter is finite, and learns
    for old, new in zip(jax.tree.leaves(before.networks), jax.tree.leaves(after.networks), strict=True):
        assert np.isfinite(new).all()
        assert (np.asarray(old) != np.asarray(new)).any()
