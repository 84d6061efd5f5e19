"""The expected gradient of prioritized draws is that of another loss on uniform draws (Fujimoto et al. 2020)."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import seeds

import jaxreplay as jr

N = 64
RNG = seeds.rng("equivalent losses")
TD_ERRORS = (RNG.uniform(0.05, 3.0, N) * RNG.choice([-1, 1], N)).astype(np.float32)
SIZES = np.abs(np.float64(TD_ERRORS))


def expected_gradient(sampler, loss):
    """The expectation over draws of weight * dloss / dtd_error, by item, [N]."""
    buffer = jr.ReplayBuffer(capacity=N, sampler=sampler)
    state = buffer.add(buffer.init(np.arange(N)), np.arange(N))
    state = buffer.update(state, buffer.newest(state, N), TD_ERRORS)
    sample = buffer.sample(state, seeds.key("draws"), 2**14)
    items, first = np.unique(sample.items, return_index=True)
    assert items.size == N, "an item was never drawn"
    gradient = jax.vmap(jax.grad(loss))(TD_ERRORS)
    return sample.probabilities[first] * sample.weights[first] * gradient


def mean_gradient(loss):
    """The same of uniform draws without weights."""
    return jax.vmap(jax.grad(loss))(TD_ERRORS) / N


@pytest.mark.parametrize(("alpha", "beta"), [(0.6, 0.0), (0.6, 0.4), (0.7, 1.0), (1.0, 1.0)])
def test_per(alpha, beta):
    """The squared loss of PER is a power of the TD error on uniform draws."""
    power = 2 + alpha - alpha * beta
    scale = N * SIZES.min() ** (alpha * beta) / np.sum(SIZES**alpha)
    drawn = expected_gradient(jr.Prioritized(alpha=alpha, beta=beta, epsilon=0.0), lambda x: 0.5 * x**2)
    np.testing.assert_allclose(drawn, mean_gradient(lambda x: scale / power * jnp.abs(x) ** power), rtol=2e-5)


@pytest.mark.parametrize("alpha", [0.4, 1.0])
def test_lap_and_pal(alpha):
    """The Huber loss of LAP is PAL on uniform draws."""
    sampler = jr.Prioritized(alpha=alpha, beta=0.0, epsilon=0.0, floor=1.0, max_priority="stored")
    scale = np.mean(np.maximum(SIZES, 1) ** alpha)

    def pal(x):
        return jnp.where(jnp.abs(x) <= 1, 0.5 * x**2, jnp.abs(x) ** (1 + alpha) / (1 + alpha)) / scale

    drawn = expected_gradient(sampler, optax.huber_loss)
    np.testing.assert_allclose(drawn, mean_gradient(pal), rtol=2e-5)
    assert 0 < np.sum(SIZES < 1) < N
