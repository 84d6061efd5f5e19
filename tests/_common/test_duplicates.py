import jax
import numpy as np
import pytest
import seeds

from jaxreplay._common import duplicates


@pytest.mark.parametrize("count", [1, duplicates.ALL_PAIRS, duplicates.ALL_PAIRS + 1])
def test_the_last_row_of_each_number(count):
    numbers = seeds.rng(count).integers(-3, count // 2 + 1, count).astype(np.int32)
    expected = np.zeros(count, bool)
    expected[list({number: row for row, number in enumerate(numbers.tolist())}.values())] = True
    np.testing.assert_array_equal(jax.jit(duplicates.last_of_each)(numbers), expected)
