import functools

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxreplay._common import ring


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


@pytest.mark.parametrize("inserted", [0, 5, 8, -1])
def test_an_emptied_ring_goes_on_where_it_is(inserted):
    before = ring.init(4)
    before = before.replace(inserted=np.int32(inserted % before.period), size=np.int32(3))
    after = before.emptied()
    assert (int(after.inserted), int(after.size)) == (inserted % before.period, 0)


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


def test_without_mask_all_rows_are_inserted():
    slots, count = jax.jit(ring.Ring.next_slots, static_argnums=2)(ring.init(5), None, 3)
    np.testing.assert_array_equal(slots, [0, 1, 2])
    assert count == 3
