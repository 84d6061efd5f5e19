import functools
import itertools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import cases, leaves_of, numbers, rejects

import jaxreplay as jr
from jaxreplay import sum_tree


@functools.partial(jax.jit, static_argnums=1)
def total_and_handles(state, capacity):
    return sum_tree.total(state.sampler.tree), state.ring.handles(np.arange(capacity))


def test_items_of_every_dtype_come_back():
    narrow = "bfloat16", "int2", "uint2", "int4", "uint4", "float4_e2m1fn", "float8_e8m0fnu"
    items = {name: np.array([-1.0, 0.0, 1.0, -2.0]).astype(jnp.dtype(name)) for name in narrow if hasattr(jnp, name)}
    assert len(items) >= 3
    items |= {
        "frame": np.arange(256, dtype=np.uint8).reshape(4, 8, 8),
        "done": np.array([True, False, True, False]),
        "action": np.ones((4, 2), np.int8),
        "key": jax.random.split(jax.random.key(0), 4),
        "nothing": np.ones((4, 0, 2), np.uint8),
    }
    buffer = jr.ReplayBuffer(capacity=16, sampler=jr.Prioritized())
    state = buffer.add(buffer.init(items), items)
    sample = buffer.sample(state, jax.random.key(1), 32)
    for found in (sample.items, buffer.get(state, sample.indices)):
        for name, given in items.items():
            assert found[name].dtype == given.dtype
            x, given = (jax.random.key_data(leaf) if name == "key" else leaf for leaf in (found[name], given))
            np.testing.assert_array_equal(*(np.asarray(leaf).astype(np.float32) for leaf in (x, given[sample.indices])))
    chex.assert_shape([sample.weights, sample.probabilities, sample.indices], (32,))
    chex.assert_type([sample.weights, sample.probabilities, sample.indices], [np.float32, np.float32, np.int32])


def test_a_stack_of_states_is_changed_in_place():
    rows = np.ones((4, 1000))
    for sampler in (jr.Uniform(), jr.Prioritized()):
        buffer = jr.ReplayBuffer(capacity=100, sampler=sampler)
        init = jax.jit(jax.vmap(lambda _, b=buffer: b.init(rows)))
        stacked = init(np.arange(3))  # not by `device_put`, which may share the memory of NumPy
        place = stacked.storage.unsafe_buffer_pointer()
        new = jax.vmap(lambda s, b=buffer: b.add(s, rows))(stacked)
        assert stacked.storage.is_deleted()
        assert new.storage.unsafe_buffer_pointer() == place


def test_beta_of_a_draw_is_one_number_in_range():
    buffer = jr.ReplayBuffer(capacity=4, sampler=jr.Prioritized())
    state, out_of_range = jax.eval_shape(buffer.init, numbers(0, 4)), r"beta=.*: must be a number in \[0, 1\]"
    for beta, message in (
        *((x, out_of_range) for x in (np.nan, 7.0, -1, np.float32(1.5), np.array(2.0), True)),
        (lambda count: 0.5, rf"{out_of_range}; a schedule"),
        (np.ones(4), r"beta: got float64\[4\], expected one number for the whole batch"),
        (jnp.asarray(np.array(1j)), r"beta: got complex.*\[\], expected one number"),
    ):
        draw = functools.partial(buffer.sample, batch_size=4, beta=beta)
        rejects(message, jax.eval_shape, draw, state, jax.random.key(0))


def test_a_state_of_another_sampler_is_refused():
    samplers = [jr.Uniform(), jr.Prioritized(), jr.Prioritized(normalize="global")]
    for pair in itertools.permutations(samplers, 2):
        buffer, other = (jr.ReplayBuffer(capacity=4, sampler=sampler) for sampler in pair)
        state = jax.eval_shape(other.init, numbers(0, 4))
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
            total, handles = jax.device_get(total_and_handles(state, case["capacity"]))
            np.testing.assert_allclose(total, op["root"], rtol=1e-5)
            slot_ids = [-1 if i is None else i for i in op["slot_ids"]]
            np.testing.assert_array_equal(handles, slot_ids)
            np.testing.assert_array_equal(np.where(handles < 0, -1, state.storage), slot_ids)


@pytest.mark.versions
def test_wrong_items():
    items = {"obs": np.zeros((2, 4), np.uint8), "reward": np.zeros(2, np.float32)}
    buffer = jr.ReplayBuffer(capacity=8)
    state = buffer.init(items)

    def refused(message, wrong):
        rejects(message, buffer.add, state, wrong)
        rejects(message, jax.jit(buffer.add), state, wrong)
        assert not state.ring.size.is_deleted()

    of_reward, column = r"leaf \['reward'\]: ", np.zeros((2, 1), np.float32)
    refused(rf"{of_reward}got float32\[1\], the buffer stores float32\[\]\.", items | {"reward": column})
    refused(rf"{of_reward}got bool\[\], the buffer stores float32\[\]", items | {"reward": np.zeros(2, bool)})
    refused(rf"{of_reward}leading axes \[3\] differ from \[2\]", items | {"reward": np.zeros(3, np.float32)})
    refused(rf"{of_reward}got .*\[\], a batch of items needs 1 leading axis", items | {"reward": 1.0})
    message = r"leaf \['obs'\]: got float32\[4\], the buffer stores uint8\[4\]"
    refused(message, items | {"obs": np.zeros((2, 4), np.float32)})
    refused(r"wrong structure: unexpected \['done'\];", items | {"done": np.zeros(2)})
    refused(r"wrong structure: missing \['reward'\];", {"obs": items["obs"]})
    refused(r"wrong structure: missing \['obs'\], \['reward'\];", {})
    refused(r"wrong structure: give the tuple's element \[1\] alone; got", (1.0, items))  # as of a tracer's add
    many, none = (jax.tree.map(lambda x, n=n: np.zeros((n, *x.shape[1:]), x.dtype), items) for n in (9, 0))
    refused("batch of 9 items: expected 1 to capacity=8; add it in parts", many)
    refused("batch of 0 items", none)


@pytest.mark.versions
def test_transitions_have_one_weight_and_one_factor_a_return():
    """Else the drawn weights would be broadcast to a matrix."""
    x = np.arange(4, dtype=np.float32)
    batch, wide = jr.TransitionBatch(S=x, A=x, logP=None, Rn=x, In=x, S_next=x, W=x), x[:, None]
    replay, sequences = jr.ReplayBuffer(capacity=8), jr.SequenceBuffer(length=8, num_envs=4, sequence_length=2)
    for leaves, message in (
        ({"W": wide}, r"leaf \.W: got float32\[4, 1\], expected \[4\], the shape of leaf \.Rn; squeeze"),
        ({"In": wide}, r"leaf \.In: got float32\[4, 1\], expected \[4\]"),
        ({"Rn": wide}, r"leaf \.In: got float32\[4\], expected \[4, 1\]"),
        ({"Rn": wide, "In": wide}, r"leaf \.W: got float32\[4\], expected \[4, 1\]"),
        ({"Rn": None}, r"leaf \.Rn: got None, expected an array"),
    ):
        wrong = batch.replace(**leaves)
        rejects(message, replay.init, wrong)
        rejects(message.replace("[4", "[1, 4"), sequences.init, jax.tree.map(lambda x: x[None], wrong))


@pytest.mark.versions
def test_other_wrong_arguments():
    buffer = jr.ReplayBuffer(capacity=8)
    state = buffer.add(buffer.init(numbers(0, 2)), numbers(0, 2))
    key = jax.random.key(0)
    for mask in (np.ones(3, bool), np.ones((2, 1), bool), np.ones(2)):
        rejects(r"mask: got .*, expected bool\[2\], one flag per row", buffer.add, state, numbers(0, 2), mask=mask)
    rejects("batch_size=0: must be an integer from 1 to 536870912, the number of draws", buffer.sample, state, key, 0)
    for batch_size in (-1, 2.0, 2**31):
        rejects(f"batch_size={batch_size}: must be an integer from 0", buffer.can_sample, state, batch_size)
    for indices in (np.zeros(2), np.zeros((2, 1), np.int32), jnp.asarray(np.int32(1))):
        rejects(r"indices: got .*, expected a vector of integers", buffer.update, state, indices, np.zeros(2))
        rejects(r"indices: got .*, expected a vector of integers", buffer.get, state, indices)
    for td_errors in (np.zeros(3), np.zeros((2, 1)), np.zeros(2, bool)):
        rejects(r"td_errors: got .*, expected one number for each", buffer.update, state, numbers(0, 2), td_errors)
    stacked = jax.tree.map(lambda x: np.stack([x] * 3), jax.device_get(state))
    rejects(r"capacity=8: this state has a leading axis of 3; .* jax.vmap", buffer.sample, stacked, key, 2)
    rejects("capacity=9: this state has a leading axis of 8", jr.ReplayBuffer(capacity=9).sample, state, key, 2)
    rejects(r"a batch of items holds no arrays", buffer.init, {})


@pytest.mark.versions
@pytest.mark.parametrize("capacity", [0, -1, 2**29 + 1, 1e6, True])
def test_construction_errors(capacity):
    rejects(f"capacity={capacity}: must be an integer from 1 to 536870912,", jr.ReplayBuffer, capacity=capacity)
