"""The expected gradient of prioritized draws is that of another loss on uniform draws (Fujimoto et al. 2020)."""

import functools

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


@functools.partial(jax.jit, static_argnums=0)
def gradient(loss, *settings):
    """Of the losses of all items."""
    return jax.vmap(jax.grad(lambda x: loss(x, *settings)))(TD_ERRORS)


def expected_gradient(sampler, loss):
    """The expectation over draws of weight * dloss / dtd_error, by item, [N]."""
    buffer = jr.ReplayBuffer(capacity=N, sampler=sampler)
    state = buffer.add(buffer.init(np.arange(N)), np.arange(N))
    state = buffer.update(state, buffer.newest(state, N), TD_ERRORS)
    sample = buffer.sample(state, seeds.key("draws"), 2**14)
    sample = jax.device_get(sample)
    items, first = np.unique(sample.items, return_index=True)
    assert items.size == N, "an item was never drawn"
    return sample.probabilities[first] * sample.weights[first] * np.asarray(gradient(loss))


def mean_gradient(loss, *settings):
    """The same of uniform draws without weights."""
    return np.asarray(gradient(loss, *map(np.float32, settings))) / N


def squared(x):
    return 0.5 * x**2


def power_of(x, scale, power):
    return scale / power * jnp.abs(x) ** power


def pal(x, scale, alpha):
    return jnp.where(jnp.abs(x) <= 1, 0.5 * x**2, jnp.abs(x) ** (1 + alpha) / (1 + alpha)) / scale


@pytest.mark.parametrize(("alpha", "beta"), [(0.6, 0.0), (0.6, 0.4), (0.7, 1.0), (1.0, 1.0)])
def test_per(alpha, beta):
    """The squared loss of PER is a power of the TD error on uniform draws."""
    power = 2 + alpha - alpha * beta
    scale = N * SIZES.min() ** (alpha * beta) / np.sum(SIZES**alpha)
    drawn = expected_gradient(jr.Prioritized(alpha=alpha, beta=beta, epsilon=0.0), squared)
    np.testing.assert_allclose(drawn, mean_gradient(power_of, scale, power), rtol=2e-5)


@pytest.mark.parametrize("alpha", [0.4, 1.0])
def test_lap_and_pal(alpha):
    """The Huber loss of LAP is PAL on uniform draws."""
    sampler = jr.Prioritized(alpha=alpha, beta=0.0, epsilon=0.0, floor=1.0, max_priority="stored")
    scale = np.mean(np.maximum(SIZES, 1) ** alpha)
    drawn = expected_gradient(sampler, optax.huber_loss)
    np.testing.assert_allclose(drawn, mean_gradient(pal, scale, alpha), rtol=2e-5)
    assert 0 < np.sum(SIZES < 1) < N
