"""What every buffer with every sampler keeps, in one parametrised test each."""

import dataclasses
import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jaxreplay as jr

CONSTANT = 3

SAMPLERS = {
    "uniform": functools.partial(jr.Uniform),
    "prioritized": functools.partial(jr.Prioritized, alpha=0.7),
    "independent": functools.partial(jr.Prioritized, stratified=False, normalize=None, beta=1.0),
    "global": functools.partial(jr.Prioritized, normalize="global"),
}


@dataclasses.dataclass(frozen=True)
class Case:
    """How to drive one kind of buffer: `make(sampler)`, and the batch to add at step t."""

    make: object
    batch: object


def items(t):
    rows = 5 * t + jnp.arange(5)
    return {"id": rows.astype(jnp.int32), "frame": (rows[:, None] * jnp.ones(3)).astype(jnp.uint8)}


def steps(t):
    rows = 9 * t + jnp.arange(9).reshape(3, 3)
    return {"id": rows.astype(jnp.int32), "frame": (rows[..., None] * jnp.ones(3)).astype(jnp.uint8)}


def sequence_buffer(sampler, **settings):
    return jr.SequenceBuffer(length=8, num_envs=3, sequence_length=3, sampler=sampler, donate=False, **settings)


def sharded_buffer(sampler):
    mesh = jax.sharding.Mesh(np.array(jax.devices("cpu")[:2]), ("data",))
    return jr.Sharded(jr.ReplayBuffer(capacity=10, sampler=sampler, donate=False), mesh)


BUFFERS = {
    "replay": Case(lambda sampler: jr.ReplayBuffer(capacity=12, sampler=sampler, donate=False), items),
    "sequence": Case(sequence_buffer, steps),
    "sequence, strided": Case(functools.partial(sequence_buffer, stride=2, within_episode=True), steps),
    "sharded": Case(sharded_buffer, lambda t: jax.tree.map(lambda x: x[:4], items(t))),
}


@pytest.fixture(params=SAMPLERS)
def sampler(request):
    return SAMPLERS[request.param]()


@pytest.fixture(params=BUFFERS)
def case(request):
    return BUFFERS[request.param]


def step(buffer, state, batch, key):
    """A replay step: add, sample, update, for one seed."""
    state = buffer.add(state, batch)
    sample = buffer.sample(state, key, 8)
    state = buffer.update(state, sample.indices, jax.random.normal(key, (8,)))
    return state, sample


def inputs(case, seed, steps=6):
    batches = jax.tree.map(lambda *x: jnp.stack(x), *[case.batch(t) for t in range(steps)])
    return batches, jax.random.split(jax.random.key(seed), steps)


def run_scan(buffer, case, seed):
    state = buffer.init(jax.eval_shape(case.batch, 0))
    return lax.scan(lambda s, x: step(buffer, s, *x), state, inputs(case, seed))


def types(tree):
    return jax.tree.map(lambda x: (x.shape, x.dtype, x.weak_type), tree)


def test_init_takes_arrays_and_abstract_values_alike(case, sampler):
    buffer = case.make(sampler)
    from_arrays, abstract = buffer.init(case.batch(3)), buffer.init(jax.eval_shape(case.batch, 0))
    assert types(from_arrays) == types(abstract)
    chex.assert_trees_all_equal(from_arrays, abstract)
    assert types(jax.eval_shape(buffer.init, case.batch(0))) == types(abstract)


def test_shapes_and_dtypes_are_stable_and_nothing_recompiles(case, sampler):
    buffer = case.make(sampler)
    state = buffer.init(jax.eval_shape(case.batch, 0))
    program = jax.jit(functools.partial(step, buffer))
    first = types(state)
    for t in range(4):
        state, _ = program(state, case.batch(t), jax.random.key(t))
        assert types(state) == first
    assert program._cache_size() == 1
    state = buffer.init(jax.eval_shape(case.batch, 0))
    batch, key = case.batch(0), jax.random.key(0)
    state, _ = step(buffer, state, batch, key)
    compilations = []
    jax.monitoring.register_event_duration_secs_listener(
        lambda event, *_, **__: compilations.append(event) if "backend_compile" in event else None
    )
    state, _ = step(buffer, state, batch, key)
    assert compilations == []
    jax.jit(lambda x: x + CONSTANT)(1.0)  # the listener does hear
    assert len(compilations) > 0


def test_eager_equals_jit_equals_scan(case, sampler):
    buffer = case.make(sampler)
    state, samples = run_scan(buffer, case, 0)
    program = jax.jit(functools.partial(step, buffer))
    eager = jitted = buffer.init(jax.eval_shape(case.batch, 0))
    batches, keys = inputs(case, 0)
    for t in range(6):
        x = jax.tree.map(lambda leaf, t=t: leaf[t], batches), keys[t]
        eager, eager_sample = step(buffer, eager, *x)
        jitted, jitted_sample = program(jitted, *x)
        chex.assert_trees_all_equal(eager_sample, jitted_sample)
        chex.assert_trees_all_equal(eager_sample, jax.tree.map(lambda leaf, t=t: leaf[t], samples))
    chex.assert_trees_all_equal(eager, state)
    chex.assert_trees_all_equal(jitted, state)


def test_vmap_over_seeds_equals_a_loop_bit_for_bit(case, sampler):
    buffer = case.make(sampler)
    batches, _ = inputs(case, 0)
    keys = jnp.stack([inputs(case, seed)[1] for seed in range(5)])

    def run(keys):
        state = buffer.init(jax.eval_shape(case.batch, 0))
        return lax.scan(lambda s, x: step(buffer, s, *x), state, (batches, keys))

    vmapped, alone = jax.jit(jax.vmap(run))(keys), jax.jit(run)
    for seed in range(5):
        chex.assert_trees_all_equal(jax.tree.map(lambda leaf, seed=seed: leaf[seed], vmapped), alone(keys[seed]))
    chex.assert_trees_all_equal(jax.tree.map(lambda leaf: leaf[:1], vmapped), jax.jit(jax.vmap(run))(keys[:1]))


def test_drawn_items_are_the_stored_ones(case, sampler):
    buffer = case.make(sampler)
    state, samples = run_scan(buffer, case, 1)
    last = jax.tree.map(lambda leaf: leaf[-1], samples)
    chex.assert_trees_all_equal(buffer.get(state, last.indices), last.items)
    assert np.all(np.asarray(samples.weights) > 0)
    assert np.all(np.asarray(samples.indices) >= 0)


def test_samples_do_not_depend_on_anything_but_state_and_key(case, sampler):
    buffer = case.make(sampler)
    state, _ = run_scan(buffer, case, 1)
    chex.assert_trees_all_equal(buffer.sample(state, jax.random.key(5), 8), buffer.sample(state, jax.random.key(5), 8))


@pytest.mark.parametrize("name", SAMPLERS)
def test_equal_configs_are_equal_static_arguments(case, name):
    one, two = (case.make(SAMPLERS[name]()) for _ in range(2))
    assert one == two
    assert hash(one) == hash(two)
    with pytest.raises(dataclasses.FrozenInstanceError):
        one.sampler = None
    others = [case.make(make()) for other, make in SAMPLERS.items() if other != name]
    assert all(one != other for other in others)


def test_changing_the_sampler_is_the_whole_switch(case):
    """The same agent code runs with every sampler and gives the same shapes."""
    shapes = [types(run_scan(case.make(make()), case, 0)[1]) for make in SAMPLERS.values()]
    assert all(shape == shapes[0] for shape in shapes)
