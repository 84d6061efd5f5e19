"""Views of drawn sequences: n-step transitions with a traced n, stacks of frames, priorities and burn-in."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest
import seeds
from helpers import at, compilations, rarely, rejects
from jax import lax
from rollouts import make_rows, of_sequences

import jaxreplay as jr

GAMMA = 0.97
RATES = 0.1, 0.1, 0.1
MAX_N = 5
assert_same = functools.partial(chex.assert_trees_all_close, rtol=2e-6, atol=1e-6)


def annealed(rows, n, gamma):
    return of_sequences(rows, n=n, gamma=gamma, max_n=MAX_N, next_action=True, record_extra_info=True)


def test_n_and_gamma_are_annealed_in_a_scan_and_differ_between_seeds():
    """n from 5 to 1 and gamma from 0.97 to 0.997, in one program, as in eager calls, which share one too."""
    steps, ns = make_rows(seeds.rng(1), 8, 7, rates=RATES), np.arange(MAX_N, 0, -1, dtype=np.int32)
    gammas = 1 - np.geomspace(0.03, 0.003, MAX_N).astype(np.float32)
    scan = jax.jit(lambda *xs: lax.scan(lambda _, x: (None, annealed(steps, *x)), None, xs)[1])
    scanned, mapped = scan(ns, gammas), jax.jit(jax.vmap(lambda *x: annealed(steps, *x)))(ns, gammas)
    with compilations() as made:
        scan(ns[::-1], gammas)
    assert not made
    for i, (n, gamma) in enumerate(zip(ns.tolist(), gammas, strict=True)):
        with compilations() as made:
            expected = annealed(steps, n, jnp.asarray(gamma))
        assert i == 0 or not made
        assert_same(at(scanned, i), expected)
        assert_same(at(mapped, i), expected)


@pytest.mark.parametrize("dtype", [np.int8, *map(rarely, [np.int32, np.uint8])])
def test_a_traced_n_out_of_range_is_clipped(dtype):
    run = jax.jit(functools.partial(annealed, make_rows(seeds.rng(3), 4, 7, rates=RATES)))
    half = np.float32(0.5)
    for n, kept in ((0, 1), (-7, 1), (MAX_N + 1, MAX_N), (127, MAX_N)):
        if n >= 0 or dtype != np.uint8:
            assert_same(run(dtype(n), half), run(dtype(kept), half))
    for gamma, kept in ((-0.5, 0), (1.5, 1)):
        assert_same(run(dtype(2), np.float32(gamma)), run(dtype(2), np.float32(kept)))
    # A narrow dtype may not hold max_n.
    many, _ = jr.sequence_transitions(*[np.zeros((1, 301))] * 5, n=jnp.asarray(3, dtype), gamma=GAMMA, max_n=300)
    np.testing.assert_allclose(many.In, GAMMA**3, rtol=1e-6)


def test_powers_of_a_traced_gamma():
    """To within float32's last place, where 50 products would be several off."""
    zeros, flags = np.zeros((1, 51), np.float32), np.zeros((1, 51), bool)
    run = jax.jit(lambda n, g: jr.sequence_transitions(zeros, zeros, zeros, flags, flags, n=n, gamma=g, max_n=50)[0].In)
    for gamma in (0.997, 0.97, 0.5, 0.0, 1.0):
        powers = np.concatenate([run(np.int32(n), np.float32(gamma)) for n in range(1, 51)])
        assert powers.dtype == np.float32
        expected = np.float64(np.float32(gamma)) ** np.arange(1, 51)
        np.testing.assert_allclose(powers, expected, rtol=1.2e-7, atol=1e-38)


@pytest.mark.versions
def test_wrong_arguments_of_sequence_transitions():
    x, flags = np.zeros((2, 3), np.float32), np.zeros((2, 3), bool)
    three, column = jnp.asarray(np.ones(3)), jnp.asarray(np.ones((2, 1)))
    for options, message in (
        ({"n": 3, "gamma": 0.9}, "n=3: got sequences of 3 rows, expected at least 4: 3 steps and the next observation"),
        ({"n": 0, "gamma": 0.9}, "n=0: must be an integer"),
        ({"n": 1, "gamma": 1.1}, r"gamma=1.1: must be a number in \[0, 1\]"),
        ({"n": 1, "gamma": 0.9, "mask": x}, r"mask: got float32\[2, 3\], expected bool\[2, 3\]"),
        ({"n": 3, "gamma": 0.9, "max_n": 2}, "n=3: must be an integer from 1 to 2, at most max_n"),
        ({"n": 1, "gamma": 0.9, "max_n": 3}, "max_n=3: got sequences of 3 rows, expected at least 4"),
        ({"n": 1, "gamma": 0.9, "max_n": 2.0}, "max_n=.*: must be an integer"),
        ({"n": np.ones(2, np.int32), "gamma": 0.9, "max_n": 2}, r"n: got int32\[2\], expected an int32\[\]"),
        ({"n": jnp.asarray(np.float32(1)), "gamma": 0.9, "max_n": 2}, r"n: got float32\[\], expected an int32\[\]"),
        ({"n": 1, "gamma": three, "max_n": 2}, r"gamma: got float\d+\[3\], expected one number"),
        ({"n": 1, "gamma": column, "max_n": 2}, r"gamma: got float\d+\[2, 1\], expected one number"),
        ({"n": 1, "gamma": np.array([0.9, 1.1])}, r"gamma=array.*: must be numbers in \[0, 1\]"),
        ({"n": 1}, r"gamma=None: must be a number in \[0, 1\], .* or give discounts, one per step"),
        ({"n": 1, "gamma": 0.9, "discounts": x}, "gamma: steps have discounts of their own; give gamma=None"),
        ({"n": 1, "discounts": x[:, 0]}, r"leaf \.discounts: got float\d+\[2\], .* needs 2 leading axes"),
        ({"n": 1, "discounts": x[..., None]}, r"discounts: got .*, one number per step; squeeze"),
        ({"n": 1, "gamma": np.float32(2), "max_n": 2}, r"gamma=.*: must be a number in \[0, 1\]; it is a discount"),
    ):
        rejects(message, jr.sequence_transitions, x, x, x, flags, flags, **options)
    call = functools.partial(jr.sequence_transitions, x, x, x, flags, flags, gamma=0.9)
    rejects(r"n=.*int32\[\].*: is traced, .* a traced n with max_n", jax.eval_shape, lambda n: call(n=n), np.int32(1))
    rejects("leading axes", jr.sequence_transitions, x, x[:1], x, flags, flags, n=1, gamma=0.9)


def test_sequence_priority():
    td_errors = np.array([[1.0, -3.0, 2.0], [4.0, np.nan, 0.0], [5.0, 5.0, 5.0]])
    mask = np.array([[True, True, True], [True, False, True], [False, False, False]])
    priority = jr.sequence_priority

    @jax.jit
    def traced(x, mask):
        by_row = jax.vmap(lambda x, m: priority(x[None], m[None])[0])(x, mask)
        means, largest = priority(x, mask, eta=0.0), priority(x, mask, eta=1.0)
        return by_row, means, largest, priority(x[:1]), priority([[1.0, -2.0]], [[False, True]]), priority(x)

    *found, with_nan = jax.device_get(traced(td_errors, mask))
    expected = [0.9 * 3 + 0.1 * 2, 0.9 * 4 + 0.1 * 2, 0.0], [2.0, 2.0, 0.0], [3.0, 4.0, 0.0], [2.9], [2.0]
    for x, y in zip(found, expected, strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-6)
    assert found[-1] == 2.0  # its largest and mean are one
    assert not np.isfinite(with_nan[1])  # which the sampler refuses
    np.testing.assert_array_equal(found[0], priority(td_errors, mask))


def test_split_burn_in():
    items = {"x": np.arange(12).reshape(2, 6), "y": np.zeros((2, 6, 3))}
    first, rest = jr.split_burn_in(items, 2)
    np.testing.assert_array_equal(first["x"], [[0, 1], [6, 7]])
    np.testing.assert_array_equal(rest["x"], [[2, 3, 4, 5], [8, 9, 10, 11]])
    assert rest["y"].shape == (2, 4, 3)
    none, everything = jr.split_burn_in(items, 0)
    assert none["y"].shape == (2, 0, 3)
    np.testing.assert_array_equal(everything["x"], items["x"])
    rejects("burn_in=6: must be an integer from 0 to 5, less than the length", jr.split_burn_in, items, 6)


@pytest.mark.parametrize(
    ("length", "k", "frame_shape"),
    [(1, 1, ()), (4, 1, (2, 3)), (5, 5, ()), (9, 4, (2, 3)), *[rarely((9, k, ())) for k in range(1, 10)]],
)
def test_stacks_equal_the_twins(length, k, frame_shape):
    rng = seeds.rng(k)
    frames = np.arange(1, 1 + 2 * length * int(np.prod(frame_shape))).astype(np.uint8)
    frames = frames.reshape(2, length, *frame_shape)
    for rate in (0.0, 0.1, 0.3, 0.6, 1.0):
        ends = rng.random((2, length)) < rate
        expected = np.stack([oracles.stack_frames(frames[row], ends[row], k) for row in range(2)])
        eager = (jr.stack_frames,) if length == 4 else ()
        for function in (*eager, jax.jit(jr.stack_frames, static_argnums=2)):
            stacks = function(frames, ends, k)
            assert stacks.dtype == np.uint8
            np.testing.assert_array_equal(stacks, expected)


@pytest.mark.versions
def test_wrong_arguments_of_other_views():
    for shape in ((3,), (3, 0), (3, 2, 1)):
        zeros = np.zeros(shape, np.float32)
        rejects(r"td_errors: got float32\[3.*\], expected \[B, L\]", jr.sequence_priority, zeros)
    frames, ends = np.zeros((2, 3, 4), np.float32), np.zeros((2, 3), bool)
    rejects(r"k=4: must be an integer from 1 to 3, the number of frames in a stack", jr.stack_frames, frames, ends, 4)
    rejects(r"ends: got bool\[2\], expected bool\[2, 3\]", jr.stack_frames, frames, ends[:, 0], 2)
    rejects(r"eta=1.5: must be a number in \[0, 1\]", jr.sequence_priority, frames[..., 0], eta=1.5)
