import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import seeds
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxreplay.curricula import _pool_moves as _moves
from jaxreplay.curricula import _pool_state as _state

LIMITS = (0, 1, 2, 5)


@functools.partial(jax.jit, static_argnums=1)
def take(item, num_items, pool, start, start_number, limit):
    rows = _moves._sorted_rows(item, num_items, pool, start, start_number)
    return _moves._entries(rows, jnp.ones(item.size, bool), limit)


def plainly(items, queue, members):
    """Of each row its number in the queue it joins and who leaves it, or None; and the members at the end.

    A member is (item, number, row at which it joined).
    """
    members = [list(of) for of in members]
    joined = [len(of) for of in members]
    rows = []
    for row, (item, q) in enumerate(zip(items, queue, strict=True)):
        if q == len(members) or any(item == other for of in members for other, *_ in of):
            rows.append(None)
            continue
        members[q].append((item, joined[q], row))
        joined[q] += 1
        leaver = members[q].pop(0) if len(members[q]) > LIMITS[q] else None
        rows.append((joined[q] - 1, leaver))
    return rows, members


@settings(max_examples=60)
@given(seed=st.integers(0, 2**31), num_items=st.integers(1, 20))
def test_joining_all_at_once_equals_one_after_the_other(seed, num_items):
    rng, num_queues = seeds.rng(seed), len(LIMITS)
    items, queue = rng.integers(0, num_items, 24), rng.integers(0, num_queues + 1, 24)
    sizes = [int(rng.integers(0, limit + 1)) for limit in LIMITS]
    there = rng.permutation(num_items)
    members, current, place = [], np.full(num_items, num_queues), np.zeros(num_items, int)
    for q, size in enumerate(sizes):
        found, there = there[:size], there[size:]
        members.append([(item, number, None) for number, item in enumerate(found)])
        current[found], place[found] = q, np.arange(len(found))
    sizes = np.array([*sizes, 0])
    limit = np.array([*LIMITS, -1], np.int32)  # the last pool is no queue
    arrays = [x.astype(np.int32) for x in (queue, current[items], (place - sizes[current])[items])]
    items = items.astype(np.int32)
    done = jax.device_get(take(items, 20, *arrays, limit))
    rows, _ = plainly(items.tolist(), queue.tolist(), members)
    joins = done.enters & (queue < num_queues)
    assert joins.tolist() == [row is not None for row in rows]
    for g, row in enumerate(rows):
        earlier = np.flatnonzero(done.enters[:g] & (items[:g] == items[g]))
        assert done.last[g] == max(earlier, default=-1)
        if row is not None:
            number, leaver = row
            assert done.number[g] + sizes[queue[g]] == number
            oldest = number - LIMITS[queue[g]]
            assert (oldest >= 0) == (leaver is not None)
            assert leaver is None or leaver[1] == oldest
    chex.assert_trees_all_equal(done, take(items, 2**31, *arrays, limit))  # too many to sort by one number


def test_each_task_is_written_once(monkeypatch):
    written, update = [], _moves.sum_tree.update

    def recording(tree, moved, *arguments, **named):
        written.append(moved)
        return update(tree, moved, *arguments, **named)

    monkeypatch.setattr(_moves.sum_tree, "update", recording)
    rng, counts, caps = seeds.rng("written once"), np.array([4], np.int32), np.array([[1, 1]], np.int32)

    @jax.jit
    def move(state, task, label):
        env, known = jnp.zeros(12, jnp.int32), jnp.ones(12, bool)
        state = _moves.move(state, jnp.array(counts), jnp.array(caps), task, env, label, known)
        return state, written.pop()

    state = jax.jit(_state.arrange, static_argnums=3)(counts, caps, np.zeros(4, np.int32), ())
    for _ in range(4):
        state, tasks = move(state, *(rng.integers(0, most, 12).astype(np.int32) for most in (4, 3)))
        tasks = np.asarray(tasks)[np.asarray(tasks) < 4]
        assert 0 < len(tasks) == len(set(tasks.tolist()))
