"""Discounts of each step, and one for each environment; the twin has the rest."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import seeds
from helpers import at, rarely, rejects
from jax.test_util import check_grads
from rollouts import at_once, first, make_steps, of_sequences, one_by_one, turned

import jaxreplay as jr
from jaxreplay.transitions import _windows


def steps_of(length, num_envs):
    return make_steps(seeds.rng("discounts"), length, num_envs, rates=(0.1, 0.1, 0.1))


def by_calls(steps, n, gamma=None):
    return one_by_one(jr.NStep(n=n, gamma=None, num_envs=3), steps, gamma)


def by_sequences(steps, **arguments):
    return of_sequences(turned(steps), **arguments)


def kept(call, steps, **arguments):
    """The transitions alone, on the host."""
    return at(*jax.device_get(call(steps, **arguments)))


by_rollout = functools.partial(at_once, flush=True)


def same_bits(found, expected):
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        if jax.default_backend() == "cpu":
            np.testing.assert_array_equal(np.asarray(x).view(np.uint8), np.asarray(y).view(np.uint8))
        np.testing.assert_allclose(x, y, rtol=1e-6)  # a GPU may round a product within a sum, or not


@pytest.mark.parametrize("n", [5, *map(rarely, (1, 2, 9))])
@pytest.mark.parametrize("call", [by_calls, by_rollout, by_sequences])
def test_equal_discounts_give_the_bits_of_a_gamma(call, n):
    """A product would round at each factor. A number's powers are rounded once, from float64."""
    steps = steps_of(40, 3)
    for gamma in np.float32([0.9, 0.997]):
        expected = kept(call, steps, n=n, gamma=jnp.float32(gamma))
        assert len(expected.Rn) > 60
        discounts = np.where(steps["mask"], gamma, np.float32(0.3))  # those of a window are alike
        same_bits(kept(call, steps | {"discount": discounts}, n=n), expected)
        same_bits(kept(call, steps, n=n, gamma=np.full(3, gamma)), expected)
    for gamma in (0.0, 0.5):  # the powers of these are exact
        discounts = np.full_like(steps["r"], gamma)
        same_bits(kept(call, steps | {"discount": discounts}, n=n), kept(call, steps, n=n, gamma=gamma))


def test_equal_discounts_give_the_bits_of_a_gamma_where_a_short_ring_is_selected_from(monkeypatch):
    monkeypatch.setattr(_windows.devices, "backend_of", lambda: "gpu")
    jax.clear_caches()
    try:
        test_equal_discounts_give_the_bits_of_a_gamma(by_calls, 3)
    finally:
        jax.clear_caches()


def test_a_discount_out_of_range_is_clipped_as_a_gamma_is():
    steps = steps_of(40, 3)
    run = jax.jit(lambda gamma: by_rollout(steps, n=5, gamma=gamma))
    for given in ((1.5, 1.0), (-0.5, 0.0)):
        discounts = [np.full_like(steps["r"], x) for x in given]
        same_bits(*(kept(by_rollout, steps | {"discount": x}, n=5) for x in discounts))
        same_bits(*(run(x[0]) for x in discounts))


@pytest.mark.parametrize("equal", [True, False])
def test_derivatives_are_those_of_the_products(equal):
    """Also with respect to each of several equal discounts."""
    steps, rng = make_steps(seeds.rng("discounts"), 6, 2, rates=(0.1, 0.1, 0.0)), seeds.rng(1)
    discounts = np.full((6, 2), 0.9, np.float32) if equal else rng.uniform(0.2, 0.9, (6, 2)).astype(np.float32)

    def total(discounts):
        batch, valid = by_rollout(steps | {"discount": discounts}, n=3)
        return jnp.sum(jnp.where(valid, batch.Rn + 2 * batch.In, 0))

    check_grads(jax.jit(total), (discounts,), 1, atol=1e-2, rtol=1e-2, eps=1e-2)


@pytest.mark.versions
def test_one_kind_of_discount_is_needed_in_all_calls():
    step, discount = first(steps_of(1, 2)), np.full(2, 0.9, np.float32)
    tracer = jr.NStep(n=2, gamma=None, num_envs=2)
    state, without = tracer.init(**step, discount=discount), tracer.init(**step)
    two = "gamma: steps have discounts of their own; give gamma=None, and discounts times gamma"
    for message, call in (
        (two, lambda: tracer.add(state, **step, discount=discount, gamma=0.9)),
        (two, lambda: tracer.flush(state, gamma=discount)),
        (two, lambda: jr.NStep(n=2, gamma=0.9, num_envs=2).spec(**step, discount=discount)),
        (two, lambda: jr.NStep(n=2, gamma=0.9, num_envs=2).flush(state)),
        (r"missing \.discount", lambda: tracer.add(state, **step, gamma=0.9)),
        (r"unexpected \.discount", lambda: tracer.add(without, **step, discount=discount)),
        (r"or give discounts, one per step, also to init", lambda: tracer.add(without, **step)),
        (r"discount: got complex64\[2\], expected one real", lambda: tracer.init(**step, discount=discount * 1j)),
        (r"discount: got float32\[2, 1\], .*; squeeze", lambda: tracer.init(**step, discount=discount[:, None])),
    ):
        rejects(message, call)
    emitted = tracer.add(state, **step, discount=np.ones(2, int))[1]
    specified = tracer.spec(**step, discount=jax.ShapeDtypeStruct((2,), jnp.bfloat16))
    assert jax.tree.map(lambda x: (x.shape, x.dtype), emitted) == jax.tree.map(lambda x: (x.shape, x.dtype), specified)
