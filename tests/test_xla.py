import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jaxreplay._xla import after, materialize

ARRAYS = (jnp.arange(6.0).reshape(3, 2), jnp.arange(3, dtype=jnp.int32), jnp.array([True, False, True]))


def check_same(found, expected):
    for a, b in zip(found, expected, strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(a, b)


def test_materialize_changes_nothing_eager_jit_scan_and_vmap():
    check_same(materialize(*ARRAYS), ARRAYS)
    check_same(jax.jit(materialize)(*ARRAYS), ARRAYS)
    check_same(jax.vmap(materialize)(*ARRAYS), ARRAYS)
    check_same(lax.scan(lambda carry, x: (carry, materialize(*x)), 0, ARRAYS)[1], ARRAYS)


@pytest.mark.hlo
@pytest.mark.versions
@pytest.mark.usefixtures("compiled_afresh")
def test_xla_keeps_what_materialize_puts_in_its_way():
    """Should XLA:CPU learn to see through the loop, replay becomes several times slower; this would tell."""

    def run(x):
        (y,) = materialize(x * 2)
        return jnp.sin(y) + y[::-1]

    compiled = jax.jit(run).lower(jnp.ones(1000)).compile().as_text()
    assert "while(" in compiled or jax.default_backend() != "cpu"


@pytest.mark.parametrize(
    "other", [np.float32(np.nan), -np.ones(3), np.array([True]), np.zeros((2, 0)), np.complex64(1j), "key"]
)
def test_after_changes_nothing(other):
    other = jax.random.split(jax.random.key(0)) if isinstance(other, str) else other
    numbers = jnp.array([-1, 5], jnp.int32)
    check_same([after(numbers, {"other": other})], [numbers])
