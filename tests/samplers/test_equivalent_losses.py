"""The expected gradient of prioritized draws is that of another loss on uniform draws (Fujimoto et al. 2020)."""

import jax
import numpy as np
import seeds

import jaxreplay as jr

N = 64
RNG = seeds.rng("equivalent losses")
TD_ERRORS = (RNG.uniform(0.05, 3.0, N) * RNG.choice([-1, 1], N)).astype(np.float32)
SIZES, SIGNS = np.abs(np.float64(TD_ERRORS)), np.sign(TD_ERRORS)


def expected_gradients(sampler, alphas, betas, gradient):
    """Expectations over draws of weight * gradient, by item, [K, N]: of each alpha and beta."""
    buffer, ids = jr.ReplayBuffer(capacity=N, sampler=sampler), np.arange(N)

    @jax.jit
    @jax.vmap
    def draw(alpha, beta):
        state = buffer.init(ids)
        state = buffer.add(state.replace(sampler=state.sampler.replace(alpha=alpha)), ids)
        return buffer.sample(buffer.update(state, ids, TD_ERRORS), seeds.key("draws"), 2**14, beta=beta)

    sample, found = jax.device_get(draw(np.float32(alphas), np.float32(betas))), []
    for drawn, probabilities, weights in zip(sample.items, sample.probabilities, sample.weights, strict=True):
        items, first = np.unique(drawn, return_index=True)
        assert items.size == N, "an item was never drawn"
        found.append(probabilities[first] * weights[first] * gradient)
    return found


def test_per():
    """The squared loss of PER is a power of the TD error on uniform draws."""
    alphas, betas = [0.6, 0.6, 0.7, 1.0], [0.0, 0.4, 1.0, 1.0]
    found = expected_gradients(jr.Prioritized(epsilon=0.0), alphas, betas, TD_ERRORS)
    for drawn, alpha, beta in zip(found, alphas, betas, strict=True):
        scale = SIZES.min() ** (alpha * beta) / np.sum(SIZES**alpha)
        np.testing.assert_allclose(drawn, scale * SIGNS * SIZES ** (1 + alpha - alpha * beta), rtol=2e-5)


def test_lap_and_pal():
    """The Huber loss of LAP is PAL on uniform draws."""
    alphas, sampler = [0.4, 1.0], jr.Prioritized(epsilon=0.0, floor=1.0, max_priority="stored")
    found = expected_gradients(sampler, alphas, [0.0, 0.0], np.clip(TD_ERRORS, -1, 1))
    assert 0 < np.sum(SIZES < 1) < N
    for drawn, alpha in zip(found, alphas, strict=True):
        pal = SIGNS * np.where(SIZES <= 1, SIZES, SIZES**alpha) / np.sum(np.maximum(SIZES, 1) ** alpha)
        np.testing.assert_allclose(drawn, pal, rtol=2e-5)
