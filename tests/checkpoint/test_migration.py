import functools
from itertools import chain

import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest
import seeds
from checkpoint_runs import assert_same
from helpers import at, check_tree, items, over_devices, rarely, rejects, types
from hypothesis import given, settings
from hypothesis import strategies as st

import jaxreplay as jr
from jaxreplay.buffers._shards import shards_of

UNIFORM = jr.Uniform()
PER = jr.Prioritized(alpha=0.7, epsilon=0.0)
SAMPLERS = [UNIFORM, PER, jr.Prioritized(alpha=0.4, epsilon=0.0, normalize="global"), jr.Prioritized(alpha=0.0)]


def stacked(buffer, state):
    """The shards' states, and the buffer that each is one of."""
    if not isinstance(buffer, jr.Sharded):
        return [state], buffer
    return [at(state, k) for k in range(buffer.num_shards)], shards_of(buffer).part


def contents(buffer, state):
    """Of every shard, oldest first: (id, leaf, uses)."""
    shards, shard = stacked(buffer, state)
    found = []
    for one in shards:
        size, inserted = int(one.ring.size), int(one.ring.inserted)
        slots = (inserted - size + np.arange(size)) % shard.capacity
        ids = np.asarray(one.storage["id"])[slots]
        np.testing.assert_array_equal(np.asarray(one.storage["x"])[slots], np.stack([ids, -ids], 1))
        leaves = np.ones(size) if shard.sampler == UNIFORM else np.asarray(one.sampler.tree.sums[-1])[slots]
        uses = np.asarray(one.uses.of_slots)[slots]
        found.append(list(zip(ids.tolist(), leaves.tolist(), uses.tolist(), strict=True)))
    return found


def expected_leaf(old, new, leaf, max_priority):
    if isinstance(new, jr.Uniform):
        return 1.0
    if isinstance(old, jr.Uniform) or old.alpha == 0:
        return max_priority**new.alpha
    return (leaf ** (1 / old.alpha)) ** new.alpha if leaf > 0 or new.alpha == 0 else 0.0


def check_goes_on(buffer, state, expected):
    """Check that a state is as `init` gives it but for its values, and that the next items overwrite the oldest."""
    fresh, num_shards = buffer.init(items(np.zeros(8))), len(expected)
    assert types(state) == types(fresh)
    for found, like in zip(jax.tree.leaves(state), jax.tree.leaves(fresh), strict=True):
        assert found.sharding.is_equivalent_to(like.sharding, like.ndim)
    np.testing.assert_array_equal(state.ring.period, fresh.ring.period)
    added = np.arange(100, 108).reshape(num_shards, -1).tolist()
    ids = [[i for i, *_ in shard] + more for shard, more in zip(expected, added, strict=True)]
    capacity = getattr(buffer, "buffer", buffer).capacity // num_shards
    found = contents(buffer, buffer.add(state, items(np.arange(100, 108))))
    assert [[i for i, *_ in shard] for shard in found] == [shard[-capacity:] for shard in ids]


FEW = st.sampled_from([((8, 0, UNIFORM), (16, 2, PER)), ((16, 4, SAMPLERS[2]), (24, 0, PER))])
ANY = st.tuples(
    st.tuples(st.sampled_from([8, 16]), st.sampled_from([0, 2, 4]), st.sampled_from(SAMPLERS[:3])),
    st.tuples(st.sampled_from([8, 16, 24]), st.sampled_from([0, 1, 2, 4]), st.sampled_from(SAMPLERS)),
)


@pytest.mark.parametrize("layouts", [FEW, rarely(ANY)])
@settings(max_examples=25)
@given(
    data=st.data(),
    masks=st.lists(st.lists(st.booleans(), min_size=8, max_size=8), max_size=5),
    td_errors=st.lists(st.sampled_from([0.0, 0.1, 3.0, -20.0, np.nan]), min_size=8, max_size=8),
)
def test_items_and_priorities_equal_the_twins(layouts, data, masks, td_errors):
    """Layouts, old and new, are the capacity, the number of shards and the sampler."""
    old, new = data.draw(layouts)

    def made(capacity, num_shards, sampler):
        return over_devices(jr.ReplayBuffer(capacity=capacity, sampler=sampler, count_updates=True), num_shards)

    old_buffer, new_buffer = made(*old), made(*new)
    state = old_buffer.init(items(np.zeros(8)))
    drawn = None
    for t, mask in enumerate(masks):
        state = old_buffer.add(state, items(8 * t + np.arange(8)), mask=np.array(mask))
        if drawn is not None:  # some of them are stored no more
            state = old_buffer.update(state, drawn, np.array(td_errors, np.float32))
        if any(chain(*masks[: t + 1])):
            drawn = old_buffer.sample(state, jax.random.key(0), 8).indices
    before = contents(old_buffer, state)
    max_priority = 1.0 if old[2] == UNIFORM else float(np.asarray(state.sampler.max_priority).max())

    found = jr.migrate(old_buffer, state, new_buffer)
    expected = oracles.migrate_items(before, max(new[1], 1), new[0])
    after = contents(new_buffer, found)
    assert [[x[::2] for x in shard] for shard in after] == [[x[::2] for x in shard] for shard in expected]
    for (_, leaf, _), (_, old_leaf, _) in zip(chain(*after), chain(*expected), strict=True):
        np.testing.assert_allclose(leaf, expected_leaf(old[2], new[2], old_leaf, max_priority), rtol=1e-5)
    assert contents(old_buffer, state) == before
    assert np.asarray(found.uses.late).sum() == np.asarray(state.uses.late).sum()
    if new[2] != UNIFORM:
        updates, rejected = (0, 0) if old[2] == UNIFORM else (state.sampler.updates, state.sampler.rejected)
        for shard in stacked(new_buffer, found)[0]:
            check_tree(shard.sampler.tree)
            assert shard.sampler.max_priority == max_priority
            assert shard.sampler.updates == np.max(updates)
        assert np.asarray(found.sampler.rejected).sum() == np.asarray(rejected).sum()
        if old[2] != UNIFORM and old[2].alpha == new[2].alpha:
            assert set(chain(*after)) <= set(chain(*before))  # to the bit
    check_goes_on(new_buffer, found, expected)


@pytest.mark.parametrize("num_shards", [0, rarely(4)])
def test_counts_of_several_shards_are_added(num_shards):
    """Late updates, and TD errors that are not finite; a total saturates."""
    whole = jr.ReplayBuffer(capacity=8, sampler=PER, count_updates=True)
    old, new = (over_devices(whole, n) for n in (2, num_shards))
    state = old.init(items(np.zeros(8)))
    for counts, total in (([1, 4], 5), ([2**31 - 2, 3], 2**31 - 1)):
        counts = jnp.array(counts, jnp.int32)
        sampler, uses = state.sampler.replace(rejected=counts), state.uses.replace(late=counts)
        found = jr.migrate(old, state.replace(sampler=sampler, uses=uses), new)
        for added in (found.sampler.rejected, found.uses.late):
            assert np.ravel(added).tolist() == [total, 0, 0, 0][: max(num_shards, 1)]


def test_spent_items_stay_spent_and_priorities_are_clipped_for_the_new_capacity():
    """To 2**63 / capacity after alpha, so that no sum overflows; the capacity is a shard's."""
    old = jr.ReplayBuffer(capacity=8, sampler=jr.Prioritized(alpha=1.0, epsilon=0.0), max_uses=1)
    new = over_devices(jr.ReplayBuffer(capacity=4, sampler=jr.Prioritized(alpha=2.0, epsilon=0.0), max_uses=1), 2)
    state = old.add(old.init(items(np.zeros(8))), items(np.arange(8)), td_errors=np.full(8, 1e30, np.float32))
    moved = jr.migrate(old, old.update(state, np.array([0, 7]), np.ones(2)), new)
    assert int(new.size(moved)) == 3
    leaves = np.asarray(moved.sampler.tree.sums[-1])
    np.testing.assert_array_equal(leaves > 0, moved.uses.unspent.sums[-1] > 0)
    np.testing.assert_allclose(leaves[leaves > 0], np.full(3, 2.0**62), rtol=1e-5)
    assert int(new.size(new.add(moved, items(np.arange(4))))) == 4


def test_items_of_every_dtype_move():
    batch = {
        "key": jax.random.split(jax.random.key(0), 8),
        "half": np.arange(8, dtype=jnp.bfloat16),
        "flag": np.arange(8) % 3 == 0,
        "frame": np.arange(16, dtype=np.uint8).reshape(8, 2),
        "nothing": np.zeros((8, 0, 2), np.uint8),
    }
    old, new = jr.ReplayBuffer(capacity=8), over_devices(jr.ReplayBuffer(capacity=16), 4)
    state = jr.migrate(old, old.add(old.init(batch), batch), new)
    shard, place = np.divmod(np.arange(8), 2)  # of each row, once it is moved
    found = new.get(state, shard * state.ring.period + place)
    assert_same(found, jax.tree.map(lambda x: x[shard + 4 * place], batch))


@functools.partial(jax.jit, static_argnums=0)
def every_sequence(buffer, state):
    """Handles (-1 for none), items and masks of all slots."""
    slots = np.arange(buffer.num_slots, dtype=np.int32)
    return state.ring.handles(slots), *buffer._read(state, slots, fill=False)


def rows(first, num_steps):
    return items(100 * np.arange(first, first + num_steps)[:, None] + np.arange(4))


@pytest.mark.parametrize(
    ("lengths", "shards", "samplers", "windows"),
    [
        ((5, 7), (0, 2), (PER, SAMPLERS[2]), "episodes"),
        *map(rarely, [((9, 5), (2, 0), (PER, PER), "inside"), ((9, 12), (2, 4), (UNIFORM, PER), "cut")]),
    ],
)
@settings(max_examples=10)
@given(
    rollouts=st.lists(st.sampled_from([1, 3]), min_size=1, max_size=8),
    later=st.lists(st.sampled_from([1, 3]), max_size=4),
)
def test_sequences_keep_their_starts_and_priorities(lengths, shards, samplers, windows, rollouts, later):
    stride = 1 if windows == "episodes" else 2
    settings = {"num_envs": 4, "sequence_length": 3, "stride": stride, "windows": windows}
    old, new = (
        over_devices(jr.SequenceBuffer(length=length, sampler=sampler, **settings), num_shards)
        for length, num_shards, sampler in zip(lengths, shards, samplers, strict=True)
    )
    twin = oracles.SequenceTwin(lengths[0], 4, 3, stride, windows)
    rng = seeds.rng(sum(rollouts))
    state, time = old.init(rows(0, 1)), 0

    def advance(buffer, state, num_steps):
        ends = rng.random((num_steps, 4)) < 0.2
        twin.store(np.asarray(rows(time, num_steps)["id"]), ends)
        return buffer.add(state, rows(time, num_steps), ends=ends), time + num_steps

    def sequences(buffer, state):
        """What each drawable sequence holds, and its leaf, by (first step, environment)."""
        found = {}
        states, shard = stacked(buffer, state)
        for one in states:
            handles, drawn, mask = jax.tree.map(np.asarray, every_sequence(shard, one))
            tree = None if shard.sampler == UNIFORM else np.asarray(one.sampler.tree.sums[-1])
            for slot in np.flatnonzero(handles >= 0):
                ids = drawn["id"][slot].tolist()
                leaf = 1.0 if tree is None else float(tree[slot])
                found[ids[0] // 100, ids[0] % 100] = ids, mask[slot].tolist(), leaf
            if tree is not None:
                check_tree(one.sampler.tree)
                assert np.all(tree[: shard.num_slots][handles < 0] == 0)
        return found

    def check(buffer, state, leaves):
        found = sequences(buffer, state)
        assert len(found) == len(twin.handles) == buffer.size(state)
        for handle in twin.handles:
            ids, mask, leaf = found[handle // 4 * stride, handle % 4]
            assert (ids, mask) == (twin.sequence(handle), twin.mask(handle))
            np.testing.assert_allclose(leaf, leaves(handle), rtol=1e-5)

    for num_steps in rollouts:
        state, time = advance(old, state, num_steps)
    if twin.handles:
        state = old.update(state, old.sample(state, jax.random.key(0), 8).indices, np.arange(8.0))
    before = sequences(old, state)
    max_priority = 1.0 if samplers[0] == UNIFORM else float(np.asarray(state.sampler.max_priority).max())

    state = jr.migrate(old, state, new)
    twin.lost = max(twin.lost, len(twin.steps) - min(lengths))
    twin.length = lengths[1]

    def leaf_of(handle):
        key = handle // 4 * stride, handle % 4
        if key not in before:  # completed later
            return 1.0 if samplers[1] == UNIFORM else max_priority ** samplers[1].alpha
        return expected_leaf(*samplers, before[key][2], max_priority)

    check(new, state, leaf_of)
    for num_steps in later:
        state, time = advance(new, state, num_steps)
        check(new, state, leaf_of)


@pytest.mark.parametrize("shards", [(2, 0), rarely(((0, 2),)), rarely(((4, 2),))])
def test_sequences_of_a_row_keep_the_order_of_their_streams(shards):
    """The newest sequences, and their handles, are as if the new buffer had been given all rows."""
    settings = {"length": 7, "num_envs": 4, "sequence_length": 3, "windows": "inside", "donate": False}
    old, new = (over_devices(jr.SequenceBuffer(**settings), num_shards) for num_shards in shards)
    ends = np.zeros((6, 4), bool)
    ends[2, 1] = ends[3, 3] = ends[4, 0] = True

    def filled(buffer):
        return buffer.add(buffer.init(rows(0, 6)), rows(0, 6), ends=ends)

    expected, found = filled(new), jr.migrate(old, filled(old), new)
    size = int(new.size(expected))
    handles = new.newest(expected, size - size % max(shards[1], 1))
    ids = np.asarray(new.get(expected, handles)["id"])
    assert len({*map(tuple, ids.tolist())}) == len(ids) > 8
    np.testing.assert_array_equal(new.newest(found, len(ids)), handles)
    np.testing.assert_array_equal(new.get(found, handles)["id"], ids)


@pytest.mark.versions
def test_errors_name_what_differs():
    replay = jr.ReplayBuffer(capacity=8)
    settings = {"length": 8, "num_envs": 2, "sequence_length": 3}
    sequence = jr.SequenceBuffer(**settings)
    state, stepped = replay.init(items(np.zeros(4))), sequence.init(items(np.zeros((1, 2))))
    for arguments, message in (
        ((jr.Uniform(), state, replay), r"old_buffer=Uniform\(\): must be a ReplayBuffer"),
        ((state, replay, replay), r"^old_buffer=ReplayState\(0 of 8 items, .{1,80}: must be"),
        ((replay, state, sequence), "must be a ReplayBuffer like old_buffer"),
        ((jr.ReplayBuffer(capacity=4), state, replay), "capacity=4: this state has"),
        ((over_devices(replay, 2), state, replay), "2 shards: this state has"),
    ):
        rejects(message, jr.migrate, *arguments)
    for name, value in {"num_envs": 4, "sequence_length": 2, "stride": 2, "windows": "cut"}.items():
        other = jr.SequenceBuffer(**settings | {name: value})
        rejects(f"new_buffer.{name}=", jr.migrate, sequence, stepped, other)


@pytest.mark.parametrize(("windows", "gaps"), [("inside", False), ("episodes", False), ("cut", True)])
def test_a_migrated_buffer_goes_on_as_if_it_had_been_so_from_the_start(windows, gaps):
    """Sequences that are completed later have their first rows from before, and none has an end inside."""
    sizes = {"num_envs": 4, "sequence_length": 3, "windows": windows, "gaps": gaps, "donate": False}
    old, new = (jr.SequenceBuffer(length=length, **sizes) for length in (6, 9))
    ends = np.arange(6)[:, None] == np.arange(1, 5)  # streams ended 3, 2, 1 and 0 rows before
    moved, expected = old.init(rows(0, 5)), new.init(rows(0, 5))
    moved = jr.migrate(old, old.add(moved, rows(0, 5), ends=ends[:5]), new)
    expected = new.add(expected, rows(0, 5), ends=ends[:5])
    for time in (5, 6, 7):
        moved, expected = (new.add(x, rows(time, 1), ends=ends[:1]) for x in (moved, expected))
        found, wanted = (new.get(x, new.newest(x, new.num_slots))["id"] for x in (moved, expected))
        np.testing.assert_array_equal(*(sorted(x) for x in (np.asarray(found).tolist(), np.asarray(wanted).tolist())))
