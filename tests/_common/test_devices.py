"""A state is laid out for the devices that hold it, which need not be those of JAX's default backend."""

import dataclasses
import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import mesh, rarely, rejects
from jax import lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec, SingleDeviceSharding

import jaxreplay as jr
from jaxreplay import sum_tree
from jaxreplay._common import devices, layouts

SAMPLER = jr.Prioritized(normalize="global", max_priority="stored")
REPLAY = jr.ReplayBuffer(capacity=300, sampler=SAMPLER, donate=False)
SEQUENCES = jr.SequenceBuffer(
    length=40, num_envs=6, sequence_length=3, windows="inside", hindsight=True, sampler=SAMPLER, donate=False
)
ITEMS = {"x": np.ones((4, 5), np.float32), "y": np.ones(4, jnp.bfloat16)}
STEPS = {"x": np.ones((1, 6, 5), np.float32)}
BUFFERS = {
    "replay": (REPLAY, ITEMS),
    "reservoir": (jr.ReservoirBuffer(capacity=300, sampler=SAMPLER, donate=False), ITEMS),
    "sequence": (SEQUENCES, STEPS),
    "mixture": (jr.Mixture(buffers=(REPLAY, REPLAY)), ITEMS),
}
POOLS = jr.DifficultyPools(tasks_per_env=(200, 100), easy_threshold=0.9, donate=False)
FANOUTS = {"cpu": 8, "gpu": 64, "tpu": 128}


def trees(state):
    leaves = jax.tree.leaves(state, is_leaf=lambda x: isinstance(x, sum_tree.SumTree))
    return [x for x in leaves if isinstance(x, sum_tree.SumTree)]


def layout_of(state):
    """Backend whose layout all trees and storages have."""
    (fanout,) = {tree.fanout for tree in trees(state)}
    (backend,) = (name for name, children in FANOUTS.items() if children == fanout)
    parts = state if isinstance(state, tuple) else (state,)
    for leaf in jax.tree.leaves([getattr(part, "storage", ()) for part in parts], is_leaf=layouts.is_leaf):
        assert isinstance(leaf.bits if isinstance(leaf, layouts.Bits) else leaf, layouts.Rows) == (backend == "tpu")
    return backend


def structure(state):
    return jax.tree.map(lambda x: (x.shape, x.dtype), state)


@pytest.mark.parametrize("backend", FANOUTS)
@pytest.mark.parametrize("name", BUFFERS)
def test_abstract_states_of_an_absent_backend(name, backend):
    buffer, items = BUFFERS[name]
    with jax.default_device(backend):
        state = jax.eval_shape(buffer.init, items)
        program = jax.make_jaxpr(lambda: buffer.init(items))
        assert structure(state) == structure(jax.tree.unflatten(jax.tree.structure(state), program().out_avals))
    assert layout_of(state) == backend
    made = buffer.init(items)
    assert layout_of(made) == jax.default_backend()
    parts = zip(state, made, strict=True) if isinstance(made, tuple) else [(state, made)]
    there_and_back = [lambda part: part.on_this_backend(backend), lambda part: part.on_this_backend()]
    if name == "sequence":  # the programs that move others move it too
        there_and_back = [functools.partial(jax.eval_shape, move) for move in there_and_back]
    for abstract, part in parts:
        moved = there_and_back[0](part)
        assert structure(moved) == structure(abstract)
        assert structure(there_and_back[1](moved)) == structure(part)
    total = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(jax.eval_shape(lambda: made)))
    assert jr.memory(buffer, items).total == total


def test_trees_and_pools_of_an_absent_backend():
    for backend in ("gpu", "tpu"):
        with jax.default_device(backend):
            assert jax.eval_shape(lambda: sum_tree.init(300)).fanout == sum_tree.default_fanout(backend)
            assert layout_of(jax.eval_shape(POOLS.init)) == backend
            assert sum_tree.default_fanout("cpu") == 8


def test_pools_follow_their_state(monkeypatch):
    """Also with the trees that a call makes; the sizes are of no other test, so that all is traced here."""
    key, tasks = jax.random.key(0), np.arange(8, dtype=np.int32)
    rewards = np.tile(np.float32([[1.0], [0.0]]), (4, 1))
    pools = dataclasses.replace(POOLS, tasks_per_env=(201, 101))

    def run(state):
        state, _ = pools.update(state, tasks, rewards)
        recycled = pools.recycle(state, key, easy_fraction=0.5)
        remapped = pools.remap(recycled, range(302), range(302)[::-1])
        return pools.sample(state, key, 16)[0], (state, recycled, remapped)

    plain = pools.init()
    wide = plain.on_this_backend("tpu")
    monkeypatch.delattr(devices, "backend_of")
    (drawn, states), (expected, others) = run(wide), run(plain)
    np.testing.assert_array_equal(drawn, expected)
    for found, other in zip(states, others, strict=True):
        assert (layout_of(found), layout_of(other)) == ("tpu", jax.default_backend())
        np.testing.assert_array_equal(pools.pool_of(found), pools.pool_of(other))


@pytest.mark.parametrize("name", ["sequence", *map(rarely, ["replay"])])
def test_buffers_follow_their_state(monkeypatch, name):
    buffer, items = BUFFERS[name]
    buffer = dataclasses.replace(buffer, **({"capacity": 301} if name == "replay" else {"length": 41}))
    key = jax.random.key(0)

    def run(state):
        named = {"ends": np.zeros((1, 6), bool)} if name == "sequence" else {}
        state, _ = lax.scan(lambda state, _: (buffer.add(state, items, **named), None), state, length=6)
        drawn = buffer.sample(state, key, 8, max_age=10)  # single draws depend on the rounding of sums
        state = buffer.update(state, buffer.newest(state, 8), np.arange(8, dtype=np.float32))
        state = buffer.set(state, drawn.indices, drawn.items)
        later = buffer.later(state, key, buffer.newest(state, 8)) if name == "sequence" else ()
        return state, (later, buffer.get(state, buffer.newest(state, 8)))

    plain = buffer.init(items)
    wide = plain.on_this_backend("tpu")
    monkeypatch.setattr(devices, "backend_of", lambda arrays=(): "gpu")
    (found, read), (state, expected) = jax.device_get((jax.jit(run)(wide), jax.jit(run)(plain)))
    assert (layout_of(found), layout_of(state)) == ("tpu", jax.default_backend())
    chex.assert_trees_all_equal(read, expected)
    chex.assert_trees_all_equal(*([*map(sum_tree.leaves, trees(x))] for x in (found, state)))


@pytest.mark.parametrize("name", ["replay", *map(rarely, ["reservoir", "sequence"])])
def test_arguments_say_where_before_the_default_device(name):
    buffer, items = BUFFERS[name]
    device = jax.devices("cpu")[1]
    placed, spec = jax.device_put(items, device), jax.eval_shape(lambda: items)
    abstract = [
        jax.tree.map(lambda x, where=where: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where), spec)
        for where in (SingleDeviceSharding(device), NamedSharding(mesh(2), PartitionSpec()))
    ]
    with jax.default_device("tpu"):  # there is none, so that whatever is made there is an error
        for given in (placed, abstract[0]):
            state = buffer.init(given)
            assert layout_of(state) == "cpu"
            assert {*state.ring.size.devices()} == {device}
        assert layout_of(buffer.init(abstract[1])) == "cpu"
        assert jr.memory(buffer, placed).backend == "cpu"
        assert layout_of(jax.eval_shape(buffer.init, placed)) == "tpu"  # traced arrays are on no device
    with jax.default_device(device):
        anywhere = jax.tree.map(lambda x: jnp.asarray(x) * 1, items)
    assert {*buffer.init(anywhere).ring.size.devices()} == {jax.devices()[0]}  # where JAX would move them


def test_a_mesh_says_where_before_the_default_device():
    sharded = jr.Sharded(buffer=REPLAY, mesh=mesh(2))
    explicit = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Explicit,), devices=jax.devices("cpu")[:2])
    rows = jax.device_put(ITEMS, NamedSharding(explicit, PartitionSpec("data")))
    with jax.default_device("tpu"):
        assert layout_of(sharded.init(ITEMS)) == layout_of(jax.eval_shape(sharded.init, ITEMS)) == "cpu"
        assert jr.memory(sharded, ITEMS).backend == "cpu"
        assert jr.memory(sharded, ITEMS, backend="tpu").tree > jr.memory(sharded, ITEMS).tree
        traced = layout_of(jax.eval_shape(REPLAY.init, rows))
    has_platform = hasattr(explicit.abstract_mesh.abstract_device, "platform")
    assert traced == ("cpu" if has_platform else "tpu")


def test_other_errors_of_an_init_are_as_they_are(monkeypatch):
    def fails(*_):
        raise jax.errors.JaxRuntimeError("INTERNAL: something else")

    monkeypatch.setattr(layouts, "zeros", fails)
    rejects("something else", REPLAY.init, ITEMS, error=jax.errors.JaxRuntimeError)
