import jax
import jax.numpy as jnp
import numpy as np
import pytest
import seeds
from helpers import cases, leaves_of, numbers, rejects

import jaxreplay as jr
from jaxreplay import sum_tree
from jaxreplay._common import ring

# Jitted: each shape compiles once, not each operation of it.
total = jax.jit(sum_tree.total)
handles_of = jax.jit(ring.handles, static_argnums=2)


def test_buffer_push_and_sample_shapes():
    buffer = jr.ReplayBuffer(capacity=16, sampler=jr.Prioritized())
    items = {
        "frame": np.ones((4, 8, 8), np.uint8),
        "done": np.array([True, False, True, False]),
        "action": np.ones((4, 2), np.int8),
        "latent": np.full((4, 3), 1.5, jnp.bfloat16),
        "reward": np.ones(4, np.float32),
        "key": jax.random.split(jax.random.key(0), 4),
        "nothing": np.ones((4, 0, 2), np.uint8),
    }
    state = buffer.init(items)
    state = buffer.add(state, items)
    sample = buffer.sample(state, jax.random.key(1), 32)
    for got, given in zip(jax.tree.leaves(sample.items), jax.tree.leaves(items), strict=True):
        assert got.shape == (32, *given.shape[1:])
        assert got.dtype == given.dtype
    np.testing.assert_array_equal(sample.items["frame"], 1)
    assert np.all(sample.items["latent"] == 1.5)
    slots = sample.indices % 16
    np.testing.assert_array_equal(sample.items["done"], items["done"][slots])
    assert jnp.all(jax.random.key_data(sample.items["key"]) == jax.random.key_data(items["key"][slots]))
    assert sample.weights.shape == sample.probabilities.shape == sample.indices.shape == (32,)
    assert sample.weights.dtype == np.float32
    assert sample.indices.dtype == np.int32
    got = buffer.get(state, sample.indices)
    np.testing.assert_array_equal(got["latent"], sample.items["latent"])


def test_numbers_of_less_than_a_byte_come_back():
    names = [
        name for name in ("int2", "uint2", "int4", "uint4", "float4_e2m1fn", "float8_e8m0fnu") if hasattr(jnp, name)
    ]
    assert len(names) >= 2

    items = {name: np.array([-1.0, 0.0, 1.0, -2.0]).astype(jnp.dtype(name)) for name in names}
    buffer = jr.ReplayBuffer(capacity=4)
    state = buffer.add(buffer.init(items), items)
    got, drawn = buffer.get(state, numbers(0, 4)), buffer.sample(state, jax.random.key(0), 8).items
    assert jax.tree.map(lambda x: x.dtype, drawn) == jax.tree.map(lambda x: x.dtype, items)
    for name in names:
        np.testing.assert_array_equal(*(np.asarray(x[name]).astype(np.float32) for x in (got, items)))


@pytest.mark.parametrize("sampler", [jr.Uniform(), jr.Prioritized()])
def test_empty_buffer_raises(sampler):
    buffer = jr.ReplayBuffer(capacity=4, sampler=sampler)
    state = buffer.init(np.ones((1, 2)))
    rejects("cannot sample from an empty buffer; add items first", buffer.sample, state, jax.random.key(0), 2)
    sample = jax.jit(lambda s: buffer.sample(s, jax.random.key(0), 2))(state)
    np.testing.assert_array_equal(sample.indices, -1)
    np.testing.assert_array_equal(sample.weights, 0)
    np.testing.assert_array_equal(sample.probabilities, 0)
    np.testing.assert_array_equal(sample.items, 0)
    updated = buffer.update(state, sample.indices, np.ones(2))
    assert buffer.is_empty(updated)


def test_priorities_bias_sampling():
    buffer = jr.ReplayBuffer(capacity=100, sampler=jr.Prioritized(alpha=1.0, epsilon=0.0))
    state = buffer.add(buffer.init(numbers(0, 100)), numbers(0, 100))
    state = buffer.update(state, numbers(0, 100), np.where(np.arange(100) == 0, 100.0, 0.01))
    draws = jax.vmap(lambda key: buffer.sample(state, key, 8).items)(jax.random.split(seeds.key(0), 200))
    assert 1400 <= (draws == 0).sum() <= 1600


def test_is_weights_range_and_inverse_relation():
    buffer = jr.ReplayBuffer(capacity=64, sampler=jr.Prioritized(alpha=1.0, beta=0.5))
    state = buffer.add(buffer.init(numbers(0, 64)), numbers(0, 64))
    state = buffer.update(state, numbers(0, 64), 1.0 + np.arange(64))
    sample = jax.device_get(buffer.sample(state, jax.random.key(0), 32))
    assert np.all((sample.weights > 0) & (sample.weights <= 1))
    assert sample.weights.max() == 1
    order = np.argsort(sample.probabilities)
    assert np.all(np.diff(sample.weights[order]) <= 0)
    np.testing.assert_allclose(sample.weights, np.sqrt(sample.probabilities.min() / sample.probabilities), rtol=1e-5)


@pytest.mark.parametrize(("pushes", "expected"), [(4, [4, 2, 3]), (8, [7, 8, 6])])
def test_oldest_is_overwritten_first(pushes, expected):
    buffer = jr.ReplayBuffer(capacity=3)
    state = buffer.init(numbers(0, 1))
    for i in range(1, pushes + 1):
        state = buffer.add(state, numbers(i, 1))
    np.testing.assert_array_equal(state.storage, expected)


def test_size_predicates():
    buffer = jr.ReplayBuffer(capacity=3)
    state = buffer.init(numbers(0, 1))
    assert buffer.is_empty(state)
    for size in (1, 2, 3, 3):
        state = buffer.add(state, numbers(0, 1))
        assert buffer.size(state) == size
        assert not buffer.is_empty(state)
        assert buffer.is_full(state) == (size == 3)
        assert buffer.can_sample(state)
        assert buffer.can_sample(state, 3) == (size >= 3)
    assert buffer.size(state).dtype == np.int32


def test_masked_rows_leave_no_gap():
    buffer = jr.ReplayBuffer(capacity=4, sampler=jr.Prioritized(alpha=1.0))
    state = buffer.init(numbers(0, 3))
    state = buffer.add(state, numbers(0, 3), mask=np.array([True, False, True]))
    state = buffer.add(state, numbers(10, 3), mask=np.zeros(3, bool))
    assert buffer.size(state) == 2
    state = buffer.add(state, numbers(20, 3), mask=np.array([False, True, True]))
    np.testing.assert_array_equal(state.storage, [0, 2, 21, 22])
    np.testing.assert_array_equal(buffer.get(state, numbers(0, 5)), [0, 2, 21, 22, 0])


def test_late_update_is_ignored_and_does_not_undo_a_live_one():
    """The replaced system let a stale id of the same slot undo a live id's update."""
    buffer = jr.ReplayBuffer(capacity=9, sampler=jr.Prioritized(alpha=1.0, epsilon=0.0))
    state = buffer.init(numbers(0, 1))
    for i in range(20):
        state = buffer.add(state, numbers(i, 1))
    for handles in ([19, 10], [10, 19]):
        td_errors = [5.0 if h == 19 else 7.0 for h in handles]
        state = buffer.update(state, np.array(handles), np.array(td_errors))
        assert sum_tree.get(state.sampler.tree, 19 % 9) == 5
        assert sum_tree.total(state.sampler.tree) == 13
        assert state.sampler.max_priority == 5


def test_transition_batch_carries_weights_and_handles():
    def batch(w):
        x = np.arange(4.0)
        return jr.TransitionBatch(S=x, A=x, logP=None, Rn=x, In=x, S_next=x, W=w)

    for w, factor in ((None, 1.0), (np.full(4, 2.0), 2.0)):
        buffer = jr.ReplayBuffer(capacity=8, sampler=jr.Prioritized(alpha=1.0))
        state = buffer.add(buffer.init(batch(w)), batch(w))
        state = buffer.update(state, numbers(0, 4), np.arange(1.0, 5.0))
        sample = buffer.sample(state, jax.random.key(0), 16)
        np.testing.assert_allclose(sample.items.W, factor * sample.weights)
        np.testing.assert_array_equal(sample.items.idx, sample.indices)
        np.testing.assert_array_equal(sample.items.S, sample.indices)


def test_eager_calls_donate_and_keep_the_storage_in_place():
    items = np.ones((4, 1000))
    for sampler in (jr.Uniform(), jr.Prioritized()):
        buffer = jr.ReplayBuffer(capacity=100, sampler=sampler)
        state = buffer.init(items)
        place = state.storage.unsafe_buffer_pointer()
        for call in (lambda s, b=buffer: b.add(s, items), lambda s, b=buffer: b.update(s, numbers(0, 4), np.ones(4))):
            new = call(state)
            assert all(leaf.is_deleted() for leaf in jax.tree.leaves(state))
            assert new.storage.unsafe_buffer_pointer() == place
            state = new
        stacked = jax.vmap(lambda _, b=buffer: b.init(items))(np.arange(3))
        place = stacked.storage.unsafe_buffer_pointer()
        new = jax.vmap(lambda s, b=buffer: b.add(s, items))(stacked)
        assert stacked.storage.is_deleted()
        assert new.storage.unsafe_buffer_pointer() == place


def test_donate_false_and_outer_jit_keep_the_old_state():
    items = numbers(0, 4)
    keeping = jr.ReplayBuffer(capacity=8, sampler=jr.Prioritized(), donate=False)
    state = keeping.init(items)
    keeping.update(keeping.add(state, items), items, np.ones(4))
    assert keeping.size(state) == 0
    donating = jr.ReplayBuffer(capacity=8, sampler=jr.Prioritized())
    before, after = jax.jit(lambda s: (donating.size(s), donating.size(donating.add(s, items))))(state)
    assert (before, after) == (0, 4)
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(state))


@pytest.mark.parametrize("sampler", [jr.Uniform(), jr.Prioritized(normalize="global")])
def test_insertion_counter_wraps_without_effect(sampler):
    """A buffer whose counter starts just below its wrap behaves as a fresh one, but for the handles' numbers."""
    buffer = jr.ReplayBuffer(capacity=6, sampler=sampler, donate=False)
    fresh = buffer.init(numbers(0, 4))
    offset = ring.init(6).period - 12
    late = fresh.replace(ring=fresh.ring.replace(inserted=jnp.int32(offset)))
    for step in range(12):
        mask = np.arange(4) % 3 != step % 3
        fresh, late = (buffer.add(s, numbers(10 * step, 4), mask=mask) for s in (fresh, late))
        a, b = (buffer.sample(s, jax.random.key(step), 8) for s in (fresh, late))
        np.testing.assert_array_equal(b.indices, (np.asarray(a.indices, np.int64) + offset) % ring.init(6).period)
        for name in ("items", "weights", "probabilities"):
            np.testing.assert_array_equal(getattr(a, name), getattr(b, name))
        np.testing.assert_array_equal(buffer.get(late, b.indices), b.items)
        fresh, late = (buffer.update(s, x.indices, np.arange(8.0)) for s, x in ((fresh, a), (late, b)))
        for x, y in zip(jax.tree.leaves(fresh.sampler), jax.tree.leaves(late.sampler), strict=True):
            np.testing.assert_array_equal(x, y)
    assert late.ring.inserted < 100
    stale = buffer.update(late, np.array([offset, ring.init(6).period - 1]), np.array([50.0, 50.0]))
    if isinstance(sampler, jr.Prioritized):
        np.testing.assert_array_equal(stale.sampler.tree.sums[-1], late.sampler.tree.sums[-1])


def test_handles_of_64_bits_do_not_wrap():
    buffer = jr.ReplayBuffer(capacity=4, sampler=jr.Prioritized(), donate=False)
    state = buffer.add(buffer.init(numbers(0, 4)), numbers(0, 4))
    for handles in (np.array([2**32 + 3]), np.array([2**63 + 1], np.uint64), jnp.array([-(2**31) + 3])):
        same = buffer.update(state, handles, np.array([50.0]))
        np.testing.assert_array_equal(leaves_of(same.sampler.tree), leaves_of(state.sampler.tree))
        assert buffer.get(state, handles) == 0
    if jax.config.jax_enable_x64:
        same = buffer.update(state, jnp.array([2**32 + 3]), np.array([50.0]))
        np.testing.assert_array_equal(leaves_of(same.sampler.tree), leaves_of(state.sampler.tree))


def refuse_beta(value, message):
    buffer = jr.ReplayBuffer(capacity=4, sampler=jr.Prioritized())
    with pytest.raises(ValueError, match=message):
        jax.eval_shape(lambda: buffer.sample(buffer.init(numbers(0, 4)), jax.random.key(0), 4, beta=value))


@pytest.mark.parametrize("beta", [np.nan, 7.0, -1, np.float32(1.5), np.array(2.0), True])
def test_beta_of_a_draw_is_in_range(beta):
    refuse_beta(beta, r"beta=.*: must be a number in \[0, 1\]")


def test_beta_of_a_draw_is_one_number():
    refuse_beta(lambda count: 0.5, r"beta=.*: must be a number in \[0, 1\]; a schedule")
    refuse_beta(np.ones(4), r"beta: got float64\[4\], expected one number for the whole batch")
    refuse_beta(jnp.array(1j), r"beta: got complex.*\[\], expected one number")


def test_a_state_of_another_sampler_is_refused():
    samplers = [jr.Uniform(), jr.Prioritized(), jr.Prioritized(normalize="global")]
    for sampler in samplers:
        buffer = jr.ReplayBuffer(capacity=4, sampler=sampler)
        for other in samplers:
            if other != sampler:
                state = jax.eval_shape(jr.ReplayBuffer(capacity=4, sampler=other).init, numbers(0, 4))
                rejects("this state is of another sampler", jax.eval_shape, buffer.add, state, numbers(0, 4))


def test_coax_traces():
    """coax gives every added item a priority of its own: here, an add of one item followed by an update."""
    for case in cases("coax_per"):
        sampler = jr.Prioritized(alpha=case["alpha"], epsilon=case["epsilon"])
        buffer = jr.ReplayBuffer(capacity=case["capacity"], sampler=sampler)
        state = buffer.init(numbers(0, 1))
        for op in case["ops"]:
            if op["op"] == "add":
                for i, adv in zip(op["ids"], op["adv"], strict=True):
                    state = buffer.add(state, numbers(i, 1), td_errors=np.array([adv]))
            else:
                rows = 8 - len(op["ids"])
                ids = np.pad(op["ids"], (0, rows), constant_values=-1)
                state = buffer.update(state, ids, np.pad(op["adv"], (0, rows)))
            leaves = leaves_of(state.sampler.tree)
            np.testing.assert_allclose(leaves, op["leaves"], rtol=1e-5)
            np.testing.assert_allclose(total(state.sampler.tree), op["root"], rtol=1e-5)
            handles = np.asarray(handles_of(state.ring, np.arange(case["capacity"]), case["capacity"]))
            slot_ids = [-1 if i is None else i for i in op["slot_ids"]]
            np.testing.assert_array_equal(handles, slot_ids)
            np.testing.assert_array_equal(np.where(handles < 0, -1, state.storage), slot_ids)


ITEMS = {"obs": np.zeros((2, 4), np.uint8), "reward": np.zeros(2, np.float32)}


def replaced(**leaves):
    return {**ITEMS, **leaves}


@pytest.mark.versions
@pytest.mark.parametrize(
    ("items", "message"),
    [
        (
            replaced(reward=np.zeros((2, 2), np.float32)),
            r"leaf \['reward'\]: got float32\[2\], the buffer stores float32\[\]",
        ),
        (replaced(reward=np.zeros((2, 1), np.float32)), r"got float32\[1\], the buffer stores float32\[\]\."),
        (replaced(reward=np.zeros(2, bool)), r"leaf \['reward'\]: got bool\[\], the buffer stores float32\[\]"),
        (replaced(obs=np.zeros((2, 4), np.float32)), r"leaf \['obs'\]: got float32\[4\], the buffer stores uint8\[4\]"),
        (replaced(reward=np.zeros(3, np.float32)), r"leaf \['reward'\]: leading axes \[3\] differ from \[2\]"),
        (replaced(reward=1.0), r"leaf \['reward'\]: got .*\[\], a batch of items needs 1 leading axis"),
        (replaced(done=np.zeros(2)), r"wrong structure: unexpected \['done'\];"),
        ({"obs": ITEMS["obs"]}, r"wrong structure: missing \['reward'\];"),
        ({}, r"a batch of items holds no arrays"),
        (
            replaced(obs=np.zeros((9, 4), np.uint8), reward=np.zeros(9, np.float32)),
            r"batch of 9 items: expected 1 to capacity=8; add it in parts",
        ),
        (replaced(obs=np.zeros((0, 4), np.uint8), reward=np.zeros(0, np.float32)), r"batch of 0 items"),
    ],
)
def test_wrong_items(items, message):
    buffer = jr.ReplayBuffer(capacity=8)
    state = buffer.init(ITEMS)
    rejects(message, buffer.add, state, items)
    rejects(message, jax.jit(buffer.add), state, items)
    assert not state.ring.size.is_deleted()


@pytest.mark.versions
@pytest.mark.parametrize(
    ("leaves", "message"),
    [
        ({"W": 1}, r"leaf \.W: got float32\[4, 1\], expected \[4\], the shape of leaf \.Rn; squeeze"),
        ({"In": 1}, r"leaf \.In: got float32\[4, 1\], expected \[4\]"),
        ({"Rn": 1}, r"leaf \.In: got float32\[4\], expected \[4, 1\]"),
        ({"Rn": 1, "In": 1}, r"leaf \.W: got float32\[4\], expected \[4, 1\]"),
        ({"Rn": None}, r"leaf \.Rn: got None, expected an array"),
    ],
)
def test_transitions_have_one_weight_and_one_factor_a_return(leaves, message):
    """Else the drawn weights would be broadcast to a matrix."""
    x = np.arange(4, dtype=np.float32)
    batch = jr.TransitionBatch(S=x, A=x, logP=None, Rn=x, In=x, S_next=x, W=x)
    wrong = batch.replace(**{name: axes and x[:, None] for name, axes in leaves.items()})
    rejects(message, jr.ReplayBuffer(capacity=8).init, wrong)
    steps = jax.tree.map(lambda x: x[None], wrong)
    rejects(message.replace("[4", "[1, 4"), jr.SequenceBuffer(length=8, num_envs=4, sequence_length=2).init, steps)


@pytest.mark.versions
def test_other_wrong_arguments():
    buffer = jr.ReplayBuffer(capacity=8)
    state = buffer.add(buffer.init(numbers(0, 2)), numbers(0, 2))
    key = jax.random.key(0)
    for mask in (np.ones(3, bool), np.ones((2, 1), bool), np.ones(2)):
        rejects(r"mask: got .*, expected bool\[2\], one flag per row", buffer.add, state, numbers(0, 2), mask=mask)
    rejects("batch_size=0: must be an integer from 1 to 536870912, the number of draws", buffer.sample, state, key, 0)
    for batch_size in (-1, 2.0, 2**31):
        with pytest.raises(ValueError, match=f"batch_size={batch_size}: must be an integer from 0 to 2147483647"):
            buffer.can_sample(state, batch_size)
    for indices in (np.zeros(2), np.zeros((2, 1), np.int32), jnp.int32(1)):
        rejects(r"indices: got .*, expected a vector of integers", buffer.update, state, indices, np.zeros(2))
        rejects(r"indices: got .*, expected a vector of integers", buffer.get, state, indices)
    for td_errors in (np.zeros(3), np.zeros((2, 1)), np.zeros(2, bool)):
        with pytest.raises(ValueError, match=r"td_errors: got .*, expected one number for each of the 2 indices"):
            buffer.update(state, numbers(0, 2), td_errors)
    stacked = jax.vmap(lambda _: buffer.init(numbers(0, 2)))(np.arange(3))
    rejects(r"capacity=8: this state has a leading axis of 3; .* jax.vmap", buffer.sample, stacked, key, 2)
    rejects(r"a batch of items holds no arrays", buffer.init, {})


@pytest.mark.versions
@pytest.mark.parametrize("capacity", [0, -1, 2**29 + 1, 1e6, True])
def test_construction_errors(capacity):
    with pytest.raises(
        ValueError, match=f"capacity={capacity}: must be an integer from 1 to 536870912, the number of items"
    ):
        jr.ReplayBuffer(capacity=capacity)
