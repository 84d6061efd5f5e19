import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxreplay._common import ring

# Jitted: each shape compiles once, not each operation of it.
next_slots = jax.jit(ring.next_slots, static_argnums=(2, 3))
advance = jax.jit(ring.advance, static_argnums=2)
handles_of = jax.jit(ring.handles, static_argnums=2)
slots_of = jax.jit(ring.slots, static_argnums=2)


@settings(max_examples=40)
@given(
    capacity=st.sampled_from([1, 3, 8]),
    batches=st.lists(st.lists(st.booleans(), min_size=1, max_size=9), max_size=12),
    from_wrap=st.integers(0, 12),
)
def test_slots_and_handles_match_a_list_of_insertions(capacity, batches, from_wrap):
    period = ring.init(capacity).period
    first = period - capacity * -(-from_wrap // capacity) if from_wrap else 0  # a multiple of the capacity
    state = ring.init(capacity).replace(inserted=jnp.int32(first % period))
    inserted = []
    for mask in batches:
        mask = mask[:capacity]
        slots, count = next_slots(state, np.array(mask), len(mask), capacity)
        new = [len(inserted) + k for k in range(sum(mask))]
        np.testing.assert_array_equal(np.asarray(slots)[mask], [i % capacity for i in new])
        assert np.all(np.asarray(slots)[~np.array(mask)] == capacity)
        inserted += new
        state = advance(state, count, capacity)
        kept = inserted[-capacity:]
        expected = np.full(capacity, -1)
        for i in kept:
            expected[i % capacity] = (first + i) % period
        handles = handles_of(state, np.arange(capacity), capacity)
        np.testing.assert_array_equal(handles, expected)
        every = np.full(4 + 12 * 8, -1)
        every[:4] = -1, period, 2**31 - 1, -(2**31)
        every[4 : 4 + len(inserted)] = [(first + i) % period for i in inserted]
        found = np.asarray(slots_of(state, every, capacity))
        assert np.all(found[:4] == capacity)
        expected = [i % capacity if i in kept else capacity for i in inserted]
        np.testing.assert_array_equal(found[4 : 4 + len(inserted)], expected)
        assert state.inserted == (first + len(inserted)) % period
        assert state.size == len(kept)


@pytest.mark.parametrize("num_rings", [1, 2, 7, 512])
@pytest.mark.parametrize("capacity", [1, 2, 3, 10**6, 2**28, 2**29])
def test_period_leaves_room_for_int32_and_tells_generations_and_rings_apart(capacity, num_rings):
    capacity = -(-capacity // num_rings)
    period = ring.init(capacity, num_rings).period
    assert period % capacity == 0
    assert period >= 2 * capacity
    assert num_rings * period + capacity <= 2**31 - 1
    assert num_rings * period >= 10**9


def test_without_mask_all_rows_are_inserted():
    slots, count = ring.next_slots(ring.init(5), None, 3, 5)
    np.testing.assert_array_equal(slots, [0, 1, 2])
    assert count == 3
