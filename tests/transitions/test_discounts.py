"""Discounts of each step, and one for each environment; the twin has the rest."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import seeds
from helpers import at, rarely, rejects
from jax import lax
from jax.test_util import check_grads

import jaxreplay as jr
from jaxreplay.transitions import _windows

NAMES = ("s", "a", "r", "terminated", "truncated", "s_next")


def make_steps(length, num_envs):
    rng, shape = seeds.rng("discounts"), (length, num_envs)
    obs = np.arange(length * num_envs, dtype=np.float32).reshape(shape)
    ends = rng.random((2, *shape)) < 0.1
    rewards = rng.standard_normal(shape).astype(np.float32)
    return dict(zip(NAMES, (obs, obs, rewards, *ends, obs + 0.5), strict=True)), rng.random(shape) < 0.9


def traced(steps, mask, discounts, gamma, **settings):
    """By `add` and `flush`; [T, num_envs] or one number of each call."""
    return kept(all_emitted(jr.NStep(gamma=None, num_envs=len(mask[0]), **settings), steps, mask, discounts, gamma))


def kept(batch):
    """The transitions alone, on the host."""
    return jax.tree.map(lambda x: np.asarray(x)[np.asarray(batch.valid)], batch)


@functools.partial(jax.jit, static_argnums=0)
def all_emitted(tracer, steps, mask, discounts, gamma):
    def step(state, x):
        given = {"gamma": gamma} if discounts is None else {"discount": x[2]}
        state, batch, _ = tracer.add(state, **x[0], **given, mask=x[1])
        return state, batch

    first = {name: x[0] for name, x in steps.items()} | ({} if discounts is None else {"discount": discounts[0]})
    state, batch = lax.scan(step, tracer.init(**first), (steps, mask, discounts))
    rest = tracer.flush(state, gamma=gamma)[1]
    return jax.tree.map(lambda x, y: jnp.concatenate([x.reshape(-1, *x.shape[2:]), y]), batch, rest)


def at_once(steps, mask, discounts, gamma, **settings):
    rest = {"mask": mask, "discounts": discounts, "gamma": gamma, "flush": True}
    return kept(jr.n_step_transitions(*[steps[name] for name in NAMES], **rest, **settings)[0])


def of_sequences(steps, mask, discounts, gamma, **settings):
    rest = {"mask": mask.T, "discounts": None if discounts is None else discounts.T, "gamma": gamma}
    return kept(jr.sequence_transitions(*[steps[name].T for name in NAMES[:-1]], **rest, **settings)[0])


def same_bits(found, expected):
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_array_equal(np.asarray(x).view(np.uint8), np.asarray(y).view(np.uint8))


@pytest.mark.parametrize("n", [5, *map(rarely, (1, 2, 9))])
@pytest.mark.parametrize("call", [traced, at_once, of_sequences])
def test_equal_discounts_give_the_bits_of_a_gamma(call, n):
    """A product would round at each factor. A number's powers are rounded once, from float64."""
    steps, mask = make_steps(40, 3)
    for gamma in np.float32([0.9, 0.997]):
        expected = call(steps, mask, None, jnp.float32(gamma), n=n)
        assert len(expected.Rn) > 60
        discounts = np.where(mask, gamma, np.float32(0.3))  # those of a window are alike
        same_bits(call(steps, mask, discounts, None, n=n), expected)
        same_bits(call(steps, mask, None, np.full(3, gamma), n=n), expected)
    for gamma in (0.0, 0.5):  # the powers of these are exact
        same_bits(call(steps, mask, np.full_like(steps["r"], gamma), None, n=n), call(steps, mask, None, gamma, n=n))


def test_equal_discounts_give_the_bits_of_a_gamma_where_a_short_ring_is_selected_from(monkeypatch):
    monkeypatch.setattr(_windows.devices, "backend_of", lambda: "gpu")
    jax.clear_caches()
    try:
        test_equal_discounts_give_the_bits_of_a_gamma(traced, 3)
    finally:
        jax.clear_caches()


def test_a_discount_out_of_range_is_clipped_as_a_gamma_is():
    steps, mask = make_steps(40, 3)
    for given, kept in ((1.5, 1.0), (-0.5, 0.0)):
        discounts = [np.full_like(steps["r"], x) for x in (given, kept)]
        same_bits(*(at_once(steps, mask, x, None, n=5) for x in discounts))
        arguments = [steps[name] for name in NAMES]
        run = functools.partial(jr.n_step_transitions, *arguments, mask=mask, n=5, flush=True)
        traced = jax.jit(lambda gamma, run=run: run(gamma=gamma))
        same_bits(*(traced(x[0]) for x in discounts))


@pytest.mark.parametrize("equal", [True, False])
def test_derivatives_are_those_of_the_products(equal):
    """Also with respect to each of several equal discounts."""
    steps, _ = make_steps(6, 2)
    rng = seeds.rng(1)
    discounts = np.full((6, 2), 0.9, np.float32) if equal else rng.uniform(0.2, 0.9, (6, 2)).astype(np.float32)

    def total(discounts):
        arguments = [steps[name] for name in NAMES]
        batch, valid = jr.n_step_transitions(*arguments, n=3, discounts=discounts, flush=True)
        return jnp.sum(jnp.where(valid, batch.Rn + 2 * batch.In, 0))

    check_grads(jax.jit(total), (discounts,), 1, atol=1e-2, rtol=1e-2, eps=1e-2)


@pytest.mark.versions
def test_one_kind_of_discount_is_needed_in_all_calls():
    steps, _ = make_steps(1, 2)
    step, discount = at(steps, 0), np.full(2, 0.9, np.float32)
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
        (r"or a discount to init and add", lambda: tracer.add(without, **step)),
        (r"discount: got complex64\[2\], expected one real", lambda: tracer.init(**step, discount=discount * 1j)),
        (r"discount: got float32\[2, 1\], .*; squeeze", lambda: tracer.init(**step, discount=discount[:, None])),
    ):
        rejects(message, call)
    emitted = tracer.add(state, **step, discount=np.ones(2, int))[1]
    specified = tracer.spec(**step, discount=jax.ShapeDtypeStruct((2,), jnp.bfloat16))
    assert jax.tree.map(lambda x: (x.shape, x.dtype), emitted) == jax.tree.map(lambda x: (x.shape, x.dtype), specified)
