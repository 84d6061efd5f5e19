import functools

import jax
import numpy as np
import pytest
import seeds
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxreplay._common import duplicates, ring


@functools.partial(jax.jit, static_argnums=(3, 4))  # each shape compiles once, not each operation of it
def insert(state, mask, every, batch, capacity):
    """The slots of a batch, the ring after it, handles of all its slots and slots of handles."""
    slots, count = state.next_slots(mask, batch)
    state = state.advance(count)
    places = np.arange(capacity, dtype=np.int32)
    return slots, state, state.handles(places), state.slots(every)


@settings(max_examples=40)
@given(
    capacity=st.sampled_from([1, 3, 8]),
    batches=st.lists(st.lists(st.booleans(), min_size=1, max_size=9), max_size=12),
    from_wrap=st.integers(0, 12),
)
def test_slots_and_handles_match_a_list_of_insertions(capacity, batches, from_wrap):
    period = ring.init(capacity).period
    first = period - capacity * -(-from_wrap // capacity) if from_wrap else 0  # a multiple of the capacity
    state = ring.init(capacity).replace(inserted=np.int32(first % period))
    inserted = []
    for mask in batches:
        mask = mask[:capacity]
        new = [len(inserted) + k for k in range(sum(mask))]
        inserted += new
        every = np.full(4 + 12 * 8, -1)
        every[:4] = -1, period, 2**31 - 1, -(2**31)
        every[4 : 4 + len(inserted)] = [(first + i) % period for i in inserted]
        slots, state, handles, found = jax.device_get(insert(state, np.array(mask), every, len(mask), capacity))
        np.testing.assert_array_equal(slots[mask], [i % capacity for i in new])
        assert np.all(slots[~np.array(mask)] == capacity)
        kept = inserted[-capacity:]
        expected = np.full(capacity, -1)
        for i in kept:
            expected[i % capacity] = (first + i) % period
        np.testing.assert_array_equal(handles, expected)
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


@pytest.mark.parametrize("num_names", [1, 2, 3, 5, 8, 1000])
@pytest.mark.parametrize("num_rings", [1, 3, 512])
@pytest.mark.parametrize("capacity", [1, 3, 7, 10**6, 2**27, 2**29])
def test_names_in_a_mixture_fit_int32_and_tell_generations_apart(capacity, num_rings, num_names):
    """With as many slots as a mixture takes."""
    capacity = max(min(capacity, 2**29 // num_names) // num_rings, 1)
    whole = ring.init(capacity, num_rings)
    period = whole.named(num_names * num_rings).period
    assert num_names * num_rings * period <= 2**31
    assert num_names * num_rings * period > 2**30 or period == whole.period
    assert period % capacity == whole.period % period == 0
    assert period > 2 * capacity or period == whole.period


@pytest.mark.parametrize("count", [1, duplicates.ALL_PAIRS, duplicates.ALL_PAIRS + 1])
def test_the_last_row_of_each_number(count):
    numbers = seeds.rng(count).integers(-3, count // 2 + 1, count).astype(np.int32)
    expected = np.zeros(count, bool)
    expected[list({number: row for row, number in enumerate(numbers.tolist())}.values())] = True
    np.testing.assert_array_equal(jax.jit(duplicates.last_of_each)(numbers), expected)
