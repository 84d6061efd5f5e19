import functools

import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest
import seeds
from helpers import rejects

import jaxreplay as jr

KINDS = ("batch", "global", None)


@jax.jit
def weigh(*arguments, smallest):
    """With each kind of normalization."""
    return [jr.importance_weights(*arguments, normalize=kind, min_probability=smallest) for kind in KINDS]


@pytest.mark.parametrize("beta", [0.0, 0.4, 1.0, -1.0, 1.5, -np.inf, np.inf, np.nan])  # the last are clipped
def test_matches_twin(beta):
    probabilities = seeds.rng(0).dirichlet(np.ones(50)).astype(np.float32)
    smallest = probabilities.min() / 3
    for normalize, found in zip(KINDS, weigh(probabilities, 80, beta, smallest=smallest), strict=True):
        expected = oracles.importance_weights(
            probabilities, 80, np.clip(np.nan_to_num(beta, nan=1), 0, 1), normalize, smallest
        )
        np.testing.assert_allclose(found, expected, rtol=1e-5)
        assert found.dtype == jnp.float32
        assert normalize != "batch" or np.max(found) == 1


def test_extreme_probabilities_stay_finite_and_empty_rows_are_zero():
    weights = weigh(np.resize(np.float32([0.0, 1e-37, 1e-20, 1.0]), 50), 2**24, 1.0, smallest=np.float32(1))[0]
    np.testing.assert_allclose(weights, np.resize([0, 1, 1e-17, 1e-37], 50), rtol=1e-4)
    assert not np.any(weigh(np.zeros(50, np.float32), 0, 1.0, smallest=np.float32(1)))


def test_a_row_without_an_item_has_no_gradient():
    """The logarithm of its probability, 0, has none."""

    def total(probabilities):
        return jnp.sum(jr.importance_weights(probabilities, 4, 1.0, normalize=None))  # 1 / (4 p) each

    np.testing.assert_allclose(jax.jit(jax.grad(total))(np.array([0.5, 0.25, 0.0], np.float32)), [-1, -4, 0], rtol=1e-6)


@pytest.mark.versions
def test_errors():
    rejects("normalize='max': must be \"batch\"", jr.importance_weights, np.ones(4), 2, 1.0, normalize="max")
    rejects(r"got float32\[\], expected numbers, .* B at least 1", jr.importance_weights, np.float32(0.5), 2, 1.0)
    rejects(r"got float32\[2, 0\], expected numbers", jr.effective_sample_size, np.zeros((2, 0), np.float32))
    weigh_global = functools.partial(jr.importance_weights, normalize="global")
    rejects("min_probability=None", jax.eval_shape, weigh_global, np.ones(4), 2, 1.0)
    rejects("must not be negative or NaN, or above 1; give", jr.importance_weights, np.array([0.5, 1.01]), 2, 1.0)
    rejects("size=2147483648: must be an integer from 0 to 2147483647", jr.importance_weights, np.ones(4), 2**31, 1.0)


def test_effective_sample_size():
    weights = np.array([[1, 1, 1], [1e-30, 0, 0], [0, 0, 0], [1, 3, 0], [1e30, 3e30, 0]])
    np.testing.assert_allclose(jr.effective_sample_size(weights), [3, 1, 0, 1.6, 1.6], rtol=1e-6)
