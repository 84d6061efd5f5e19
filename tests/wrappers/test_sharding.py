import dataclasses
import functools

import chex
import helpers
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import seeds
import test_sequence_twin
import twins
from helpers import at, big_copies, collectives, compiled, items, mesh, no_ends, over_devices, rarely, rejects, run_once
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

import jaxreplay as jr

PRIORITIZED = jr.Prioritized(alpha=0.7, beta=0.6, epsilon=0.01)
ITEMS = {"id": jax.ShapeDtypeStruct((8,), jnp.int32), "x": jax.ShapeDtypeStruct((8, 2), jnp.float32)}

GLOBAL = dataclasses.replace(PRIORITIZED, normalize="global")
STREAMS = {"length": 8, "num_envs": 8, "sequence_length": 3, "stride": 2, "windows": "cut"}


def batch_of_items(t):
    return items(8 * t + np.arange(8, dtype=np.int32))


def batch_of_steps(t):
    return items(100 * (3 * t + np.arange(3, dtype=np.int32)[:, None]) + np.arange(8, dtype=np.int32))


BUFFERS = {
    "replay": (jr.ReplayBuffer(capacity=24, sampler=PRIORITIZED), batch_of_items),
    "uniform": (jr.ReplayBuffer(capacity=24), batch_of_items),
    "sequence": (jr.SequenceBuffer(sampler=GLOBAL, **STREAMS), batch_of_steps),
}


def run(buffer, batch, key, state=None):
    def step(state, x):
        t, key = x
        state = buffer.add(state, batch(t), **no_ends(buffer, batch(t)))
        sample = buffer.sample(state, key, 16)
        return buffer.update(state, sample.indices, np.cos(np.arange(16, dtype=np.float32)) * (1.0 + t)), sample

    state = buffer.init(jax.eval_shape(batch, 0)) if state is None else state
    return lax.scan(step, state, (jnp.arange(6, dtype=jnp.int32), jax.random.split(key, 6)))


@pytest.mark.versions
@pytest.mark.parametrize("name", ["uniform", *map(rarely, ["replay", "sequence"])])
def test_one_shard_is_the_buffer_bit_for_bit_in_jit_and_vmap(name):
    buffer, batch = BUFFERS[name]
    sharded = jr.Sharded(buffer=buffer, mesh=mesh(1, jax.devices()))
    key = jax.random.key(0)
    for transform, given, axis in ((lambda f: f, key, 0), (jax.vmap, jax.random.split(key, 3), 1)):
        expected, samples = run_once(transform(functools.partial(run, buffer, batch)))(given)
        found, found_samples = run_once(transform(functools.partial(run, sharded, batch)))(given)
        chex.assert_trees_all_equal(samples, found_samples)
        chex.assert_trees_all_equal(expected, jax.tree.map(lambda x, axis=axis: np.squeeze(np.asarray(x), axis), found))


class Oldest(jr.Uniform):
    def sample(self, state, key, batch_size, live):
        return jnp.full(batch_size, live.start), jnp.ones(batch_size)


def test_what_a_sampler_draws_may_be_the_same_in_all_shards():
    """Also where a shard has one slot."""
    sharded = over_devices(jr.ReplayBuffer(capacity=8, sampler=Oldest()), 2)
    state = sharded.add(sharded.init(np.arange(4)), np.arange(4))
    assert sharded.sample(state, jax.random.key(0), 4).items.tolist() == [0, 0, 2, 2]
    sharded = over_devices(jr.ReplayBuffer(capacity=2, max_uses=1), 2)
    state = sharded.add(sharded.init(np.arange(2)), np.arange(2))
    sample = sharded.sample(state, jax.random.key(0), 4)
    assert sample.items.tolist() == [0, 0, 1, 1]
    state = sharded.update(state, sample.indices, np.ones(4))
    assert sharded.sample(state, jax.random.key(0), 4).indices.tolist() == [-1] * 4


@pytest.mark.parametrize("sampler", [jr.Uniform(replacement=False), jr.Prioritized(beta=1.0, normalize=None)])
def test_the_weighted_mean_of_two_items_beside_eight(sampler):
    """And a pass over them, which is as long as the shard of eight needs."""
    sharded = over_devices(jr.ReplayBuffer(capacity=16, sampler=sampler), 2)
    values = np.where(np.arange(16) < 8, 100.0, 1.0).astype(np.float32)
    state = sharded.add(sharded.init(values), values, mask=np.arange(16) >= 6)
    sample = sharded.sample(state, jax.random.key(0), 8)
    weights = np.asarray(sample.weights)
    weighted = weights * np.asarray(sample.items)
    assert np.mean(weighted) == pytest.approx(20.8)
    assert np.sum(weighted) / np.sum(weights) == pytest.approx(20.8)
    is_full, num_batches = jax.jit(lambda state: (sharded.is_full(state), sharded.num_batches(state, 6)))(state)
    assert not is_full  # only one shard is
    assert int(num_batches) == 3
    rejects("batch_size=5: must be a multiple of 2", sharded.num_batches, state, 5)
    drawn = np.stack([sharded.epoch(state, jax.random.key(0), 6, step=k).indices for k in range(4)]).reshape(4, 2, 3)
    np.testing.assert_array_equal(np.sum(drawn >= 0, axis=-1), [[2, 3], [0, 3], [0, 2], [0, 0]])
    assert len(set(drawn[drawn >= 0])) == 10


def test_shards_with_equal_contents_draw_unlike():
    """So do passes and later steps."""
    buffer = jr.SequenceBuffer(length=16, num_envs=4, sequence_length=2, sampler=jr.Prioritized(), hindsight=True)
    sharded, steps = over_devices(buffer, 4), np.zeros((16, 4), np.float32)

    @run_once
    def draw(key):
        state = sharded.add(sharded.init(steps), steps, ends=steps > 0)
        period = state.ring.period
        sample, epoch = sharded.sample(state, key, 32), sharded.epoch(state, key, 32, step=0)
        _, later = sharded.later(state, key, np.repeat(np.arange(4) * period, 8))  # of the oldest sequences
        return sample.indices % period, epoch.indices % period, later

    found = [np.asarray(rows).reshape(4, 8) for rows in draw(jax.random.key(0))]
    assert [len(np.unique(rows, axis=0)) for rows in found] == [4, 4, 4]


@pytest.mark.law
@pytest.mark.versions
@pytest.mark.parametrize("sampler", ["global", *map(rarely, ["plain", "batch", "distinct", "uniform"])])
@pytest.mark.parametrize("kinds", ["Auto Explicit", *map(rarely, ["Explicit Auto", "Explicit Explicit", "Auto Auto"])])
def test_shards_over_any_mesh_do_what_their_twins_do(monkeypatch, sampler, kinds):
    """Axes of both kinds, beside another axis with the usual name, and arguments wherever they lie."""
    devices = np.array(jax.devices("cpu")[:4]).reshape(2, 2)
    kinds = tuple(AxisType[kind] for kind in kinds.split())
    over = Mesh(devices, ("data", "seed"), axis_types=kinds)
    monkeypatch.setattr(twins, "over", lambda buffer, _: jr.Sharded(buffer=buffer, mesh=over, axis="seed"))
    config = test_sequence_twin.CONFIGS["inside"]
    run = test_sequence_twin.random_run(config, sampler, [(1, True), (4, True), (3, False)], 2)
    least = {"updates of stored items": 150, "young draws": 40, "later rows": 400, "gaps": 60}
    helpers.check_happened(run.run(30), least)
    sharded = run.buffer
    shards, rows = (NamedSharding(over, PartitionSpec(*axes)) for axes in (("seed",), (None, "seed")))
    assert (sharded.state_sharding, sharded.items_sharding) == (shards, rows)
    for leaf in jax.tree.leaves(run.state):
        assert leaf.sharding.is_equivalent_to(shards, leaf.ndim)
    steps = items(np.arange(4, dtype=np.int32)[None])
    state = sharded.init(steps)
    for layout in (PartitionSpec(), PartitionSpec(None, "seed"), PartitionSpec(None, "data")):
        rows = jax.device_put(steps, NamedSharding(over, layout))
        state = sharded.add(state, rows, ends=np.zeros((1, 4), bool))
    sample = sharded.sample(state, jax.random.key(1), 4, beta=np.float32(0.5))
    state = sharded.update(state, np.asarray(sample.indices), np.ones(4))
    assert int(sharded.size(state)) == 4  # of each stream the first two steps, of three


@pytest.mark.versions
@pytest.mark.parametrize("name", ["uniform", *map(rarely, ["replay", "sequence"])])
def test_buffers_run_in_the_users_own_shard_map(name):
    """One buffer a device, that knows nothing of the others, with JAX's checks of what varies between them."""
    buffer, batch = BUFFERS[name]

    def on_device(keys, states):
        key, state = jax.random.wrap_key_data(keys[0]), at(states, 0)
        state, samples = run(buffer, lambda t: batch(t + lax.axis_index("data")), key, state=state)
        return jax.tree.map(lambda x: x[None], (state, samples))

    spec = PartitionSpec("data")
    mapped = run_once(jax.shard_map(on_device, mesh=mesh(2), in_specs=spec, out_specs=spec))
    keys = seeds.rng(0).integers(2**32, size=(2, 2), dtype=np.uint32)
    empty = jax.device_get(jax.jit(jax.vmap(lambda _: buffer.init(jax.eval_shape(batch, 0))))(keys))
    _, samples = mapped(keys, empty)

    @run_once
    def alone(key, device):
        return run(buffer, lambda t: batch(t + device), jax.random.wrap_key_data(key))[1]

    for device in range(2):
        chex.assert_trees_all_close(at(samples, device), alone(keys[device], np.int32(device)), rtol=1e-6)


@pytest.mark.hlo
@pytest.mark.versions
@pytest.mark.usefixtures("compiled_afresh")
@pytest.mark.parametrize("name", [rarely("replay"), "sequence"])
@pytest.mark.parametrize("num_shards", [4, rarely(2), rarely(8)])
def test_only_numbers_are_exchanged_and_nothing_is_copied(num_shards, name):
    sampler = jr.Prioritized(normalize="global")
    spec = jax.ShapeDtypeStruct((8, 4096), jnp.uint8)
    if name == "replay":
        buffer = jr.ReplayBuffer(capacity=50_000, sampler=sampler)
    else:
        buffer = jr.SequenceBuffer(length=6_250, num_envs=8, sequence_length=3, sampler=sampler)
        spec = jax.ShapeDtypeStruct((1, 8, 4096), jnp.uint8)
    sharded = over_devices(buffer, num_shards)

    def train(state, batch, key):
        def step(state, key):
            state = sharded.add(state, batch)
            sample = sharded.sample(state, key, 16)
            td_errors = jnp.mean(sample.items.astype(jnp.float32), axis=tuple(range(1, sample.items.ndim)))
            return sharded.update(state, sample.indices, td_errors), jnp.sum(sample.weights)

        return lax.scan(step, state, jax.random.split(key, 3))

    layout = NamedSharding(sharded.mesh, PartitionSpec("data"))
    state = jax.eval_shape(sharded.init, spec)
    state = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=layout), state)
    batch = jax.ShapeDtypeStruct(spec.shape, spec.dtype, sharding=sharded.items_sharding)
    program = compiled(jax.jit(train, donate_argnums=0), state, batch, jax.random.key(0))
    hlo, memory = program.as_text(), program.memory_analysis()
    sizes = collectives(hlo)
    assert len(sizes) >= 3  # N, the smallest probability, the largest priority
    assert max(sizes) == 1
    whole = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(jax.eval_shape(buffer.init, spec)))
    assert memory.argument_size_in_bytes < 1.01 * whole / num_shards + 1e6  # of one device
    assert memory.temp_size_in_bytes < 0.01 * whole / num_shards
    assert big_copies(hlo, 50_000 * 4096 // num_shards) == []


@pytest.mark.versions
def test_errors_name_what_is_wrong():
    buffer, steps = BUFFERS["replay"][0], BUFFERS["sequence"][0]
    four = mesh(4)
    rejects("buffer=Uniform", jr.Sharded, buffer=jr.Uniform(), mesh=four)
    rejects("give a Mixture Sharded ones", jr.Sharded, buffer=jr.Mixture(buffers=(buffer, buffer)), mesh=four)
    rejects("must be a jax.sharding.Mesh", jr.Sharded, buffer=buffer, mesh=jax.devices("cpu"))
    rejects(r"axis='model': must be one of the mesh's axes", jr.Sharded, buffer=buffer, mesh=four, axis="model")
    rejects("capacity=10: must be a multiple of 4", jr.Sharded, buffer=jr.ReplayBuffer(capacity=10), mesh=four)
    six = jr.SequenceBuffer(length=8, num_envs=6, sequence_length=2)
    rejects("num_envs=6: must be", jr.Sharded, buffer=six, mesh=four)
    sharded, sequences = jr.Sharded(buffer=buffer, mesh=four), jr.Sharded(buffer=steps, mesh=four)
    state = sharded.add(sharded.init(ITEMS), items(np.arange(8)))
    rejects("batch=6: must be a multiple of 4", sharded.init, items(np.arange(6)))
    rejects("holds no arrays", sharded.init, {})
    rejects("each of 4 shards: num_envs=2: got steps", sequences.init, items(np.zeros((1, 4))))
    rejects("items=6: must be a multiple of 4", sharded.add, state, items(np.arange(6)))
    rejects("each of 4 shards: batch of 8 items: expected 1 to capacity=6", sharded.add, state, items(np.arange(32)))
    of_rows = r"mask: got bool\[7\], expected a row for each of the 8 items"
    rejects(of_rows, sharded.add, state, items(np.arange(8)), mask=np.ones(7, bool))
    rejects("wrong structure: missing", sharded.add, state, {"id": np.arange(8)})
    rejects("batch_size=6: must be a multiple of 4", sharded.sample, state, jax.random.key(0), 6)
    rejects("batch_size=0: must be an integer from 1", sharded.sample, state, jax.random.key(0), 0)
    rejects("indices=6: must be a multiple of 4", sharded.update, state, np.arange(6), np.ones(6))
    rejects("td_errors: got float", sharded.update, state, np.arange(8), np.ones(4))
    rejects(r"^indices: got float(32|64)\[8\], expected a", sharded.set, state, np.ones(8), items(np.arange(8)))
    rejects("batch_size=2147483648: must be an integer from 0 to 24", sharded.can_sample, state, 2**31)
    wider = jr.Sharded(buffer=jr.ReplayBuffer(capacity=32), mesh=four)
    rejects("capacity=8: this state has a leading axis of 6", wider.sample, state, jax.random.key(0), 8)
    rejects(r"2 shards: this state has .* \[4\]", over_devices(buffer, 2).sample, state, jax.random.key(0), 8)
    rejects("state: got dict, .* as init of Sharded returns it", sharded.sample, ITEMS, jax.random.key(0), 8)
    rejects("capacity=24: this state has a leading axis of 4", buffer.sample, state, jax.random.key(0), 8)
    rejects("ends", sharded.add, state, items(np.arange(8)), ends=None, error=TypeError)
