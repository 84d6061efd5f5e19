"""Numbers at the ends of their types: none wraps."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxreplay._common import checks, ring

MOST = 2**31 - 1


@pytest.mark.parametrize("kind", ["int8", "uint16", "int32", "uint32", "int64", "uint64"])
def test_integers_of_any_type_become_int32_or_a_number_out_of_range(kind):
    info = np.iinfo(kind)
    numbers = [x for x in (info.min, -1, 0, 5, MOST, MOST + 1, info.max) if info.min <= x <= info.max]
    # All numbers of a type that int32 holds stay, the negative ones too.
    kept = [x if info.max <= MOST or 0 <= x <= MOST else -1 for x in numbers]
    given = np.array(numbers, kind)
    found = checks.as_int32(given)
    assert (type(found), found.dtype) == (np.ndarray, np.int32)
    np.testing.assert_array_equal(found, kept)
    with pytest.raises(ValueError, match=r"indices: got .*\[1, \d\], expected a vector of integers"):
        checks.check_indices(given[None])
    if info.bits < 64:
        found, counts = jax.jit(lambda x: (checks.as_int32(x), jax.vmap(checks.as_count)(x)))(given)
        assert (found.dtype, counts.dtype) == (np.int32, np.int32)
        np.testing.assert_array_equal(found, kept)
        np.testing.assert_array_equal(counts, np.clip(given.astype(np.int64), 0, MOST))


def test_sums_of_counts_stay_at_the_largest():
    counts = np.array([0, 5, MOST - 3, MOST - 2, MOST, 7], np.int32)
    found = ring.saturating_add(counts, np.array([3, 0, 2, 3, 9, MOST], np.int32))
    np.testing.assert_array_equal(found, [3, 5, MOST - 1, MOST, MOST, MOST])
    assert int(ring.saturating_add(jnp.int32(MOST - 1), 1)) == MOST
    np.testing.assert_array_equal(ring.at_least(counts, MOST - 2), counts >= MOST - 2)
