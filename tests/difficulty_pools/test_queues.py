import chex
import jax
import jax.numpy as jnp
import numpy as np
import seeds
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxreplay.difficulty_pools import _queues

LIMITS = (0, 1, 2, 5)
join = jax.jit(_queues.join, static_argnums=1)


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
    arrays = (queue, current[items], place[items], [len(of) for of in members], LIMITS)
    arrays = [jnp.asarray(x, jnp.int32) for x in arrays]
    items = jnp.asarray(items, jnp.int32)
    done = join(items, 20, *arrays)
    rows, left = plainly(items.tolist(), queue.tolist(), members)
    assert done.joins.tolist() == [row is not None for row in rows]
    assert done.leaves.tolist() == [row is not None and row[1] is not None for row in rows]
    last_leaves = {}
    for g, row in enumerate(rows):
        if row is None:
            continue
        number, leaver = row
        assert done.number[g] == number
        stays = (int(items[g]), number, g) in left[queue[g]]
        assert done.stays[g] == stays
        if leaver is not None:
            assert done.leaver[g] == leaver[1]
            if leaver[2] is not None:
                assert done.leaver_row[g] == leaver[2]
            last_leaves[leaver[0]] = g
    parked = {item for of in left for item, *_ in of}
    free = sorted(g for item, g in last_leaves.items() if item not in parked)
    assert np.flatnonzero(done.free).tolist() == free
    assert done.joined.tolist() == [sum(rows[g] is not None and q == k for g, q in enumerate(queue)) for k in range(4)]
    assert (arrays[3] + done.joined - done.left).tolist() == [len(of) for of in left]
    chex.assert_trees_all_equal(done, join(items, 2**31, *arrays))  # too many to sort by one number
