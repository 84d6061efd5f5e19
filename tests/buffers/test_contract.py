"""The contract of `jaxreplay.testing` over every buffer of the package, and what it does not check."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import seeds
import twins
from helpers import at, compilations, over_devices, rarely, rejects, stack, types
from jax import lax

import jaxreplay as jr
from jaxreplay import sum_tree, testing
from jaxreplay.testing._buffers import _adder

pytestmark = pytest.mark.versions


def items(*shape):
    ids = np.arange(np.prod(shape), dtype=np.int32).reshape(shape)
    halves, frames = (ids[..., None] * np.ones(3)).astype(jnp.bfloat16), (ids[..., None] * np.ones(3)).astype(np.uint8)
    return {"id": ids, "flag": ids % 3 == 0, "carry": (halves, frames)}


PER = jr.Prioritized(alpha=0.7)
STREAMS = functools.partial(jr.SequenceBuffer, length=9, num_envs=4, sequence_length=4)
CONTRACTS = {  # a buffer, and the shape of a batch
    "replay": (jr.ReplayBuffer(capacity=10, sampler=PER), (4,)),
    "reservoir": (jr.ReservoirBuffer(capacity=7, sampler=PER), (4,)),
    "sequence": (STREAMS(sampler=PER), (3, 4)),
    "sharded": (over_devices(jr.ReplayBuffer(capacity=12, sampler=PER), 2), (4,)),
    "mixture": (jr.Mixture(buffers=(jr.ReplayBuffer(capacity=10),) * 2), (4,)),
}
MORE_CONTRACTS = {
    "uniform": (jr.ReplayBuffer(capacity=10, donate=False), (4,)),
    "gaps": (STREAMS(sampler=PER, gaps=True), (3, 4)),
    "mixture of shards": (
        jr.Mixture(
            buffers=(
                over_devices(jr.ReplayBuffer(capacity=12, sampler=PER), 2),
                over_devices(jr.ReservoirBuffer(capacity=14), 2),
                over_devices(jr.ReplayBuffer(capacity=10, sampler=PER), 2),
            ),
            shares=(2, 1, 1),
            weights="joint",
        ),
        (4,),
    ),
    "mixture of sequences": (jr.Mixture(buffers=(STREAMS(sampler=PER), STREAMS(gaps=True))), (3, 4)),
    "spent": (jr.ReplayBuffer(capacity=10, sampler=PER, max_uses=1), (4,)),
    "spent evenly": (jr.ReplayBuffer(capacity=10, max_uses=2), (4,)),
    "spent and distinct": (jr.ReplayBuffer(capacity=10, sampler=jr.Uniform(replacement=False), max_uses=1), (4,)),
    "spent in a reservoir": (jr.ReservoirBuffer(capacity=7, sampler=PER, max_uses=2), (4,)),
    "spent sequences": (STREAMS(sampler=PER, max_uses=1), (3, 4)),
    "spent shards": (over_devices(jr.ReplayBuffer(capacity=12, sampler=PER, max_uses=1), 2), (4,)),
    "counted": (jr.ReplayBuffer(capacity=10, sampler=jr.Recent(half_life=4.0), count_updates=True), (4,)),
    "rollouts": (jr.ReplayBuffer(capacity=24, axes=2), (3, 4)),
    "strided": (STREAMS(sampler=PER, stride=2), (3, 4)),
    "sharded streams": (over_devices(STREAMS(sampler=PER), 2), (3, 4)),
    "sharded reservoir": (over_devices(jr.ReservoirBuffer(capacity=8, sampler=PER), 2), (4,)),
}


def test_every_buffer_of_the_package_has_a_contract():
    exported = [getattr(jr, name) for name in jr.__all__]
    kinds = {x for x in exported if isinstance(x, type) and hasattr(x, "sample") and hasattr(x, "can_sample")}
    assert {jr.ReplayBuffer, jr.Mixture} <= kinds
    assert {type(buffer) for buffer, _ in CONTRACTS.values()} == kinds


# Replay buffers with every sampler, in a mixture, are always checked in tests/samplers/test_every_sampler.py.
@pytest.mark.parametrize(
    ("name", "num_seeds"),
    [*((x, 1) for x in ("reservoir", "sequence", "sharded")), *(rarely((x, 20)) for x in CONTRACTS | MORE_CONTRACTS)],
)
def test_the_contract(name, num_seeds):
    buffer, shape = (CONTRACTS | MORE_CONTRACTS)[name]
    keys = [seeds.key("contract", seed) for seed in range(num_seeds)]
    testing.check_buffer(buffer, jax.eval_shape(lambda: items(*shape)), key=keys)


@pytest.mark.parametrize("name", [x if x == "counted" else rarely(x) for x in CONTRACTS | MORE_CONTRACTS])
def test_eager_calls_a_scan_and_vmap_agree_bit_for_bit_and_nothing_recompiles(name):
    """Of which the contract asks to a bit or two."""
    buffer, shape = (CONTRACTS | MORE_CONTRACTS)[name]
    first, steps, add = items(*shape), 6, _adder(buffer)
    each = [first | {"id": first["id"] + t * first["id"].size} for t in range(steps)]
    batches, keys = stack(*each), jax.random.split(jax.random.key(0), (2, steps))

    def step(state, batch, key):
        state = add(state, batch, key)
        sample = buffer.sample(state, key, 8)
        return buffer.update(state, sample.indices, jax.random.normal(key, (8,))), sample

    def begin(key):  # with items to draw
        state = buffer.init(first)
        for batch in each[:4]:
            state = add(state, batch, key)
        return state

    def run(keys):
        return lax.scan(lambda state, x: step(state, *x), begin(keys[0]), (batches, keys))

    scanned, mapped = jax.device_get(jax.jit(lambda keys: (lax.map(run, keys), jax.vmap(run)(keys)))(keys))
    state = begin(keys[0, 0])
    kinds, (last, samples) = types(state), at(scanned, 0)
    for t, key in enumerate(keys[0]):
        with compilations() as compiled:
            state, sample = step(state, at(batches, t), key)
        assert t == 0 or compiled == []
        chex.assert_trees_all_equal(sample, at(samples, t))
    chex.assert_trees_all_equal(state, last)
    assert types(state) == kinds
    with compilations() as compiled:
        jax.jit(lambda x: x + steps)(1.0)
    assert len(compiled) > 0  # the listener does hear
    if name == "counted":  # probabilities by rank are powers, whose last bit XLA leaves open
        names = "probabilities", "weights"
        for field in names:
            np.testing.assert_array_max_ulp(*(getattr(x[1], field) for x in (mapped, scanned)), maxulp=4)
        mapped, scanned = ((state, x.replace(**dict.fromkeys(names))) for state, x in (mapped, scanned))
    chex.assert_trees_all_equal(mapped, scanned)


STREAMS_WITH = {  # buffers whose `add` takes a mask for all rows
    **{name: buffer for name, (buffer, shape) in (CONTRACTS | MORE_CONTRACTS).items() if len(shape) == 2},
    "inside": STREAMS(sampler=jr.Prioritized(max_priority="stored", normalize="global"), windows="inside", gaps=True),
    "episodes": STREAMS(windows="episodes", hindsight=True, max_uses=2),
    "cut": over_devices(STREAMS(sampler=PER, windows="cut", hindsight=True, count_updates=True), 2),
}
del STREAMS_WITH["rollouts"]


@pytest.mark.parametrize("name", [x if x in ("inside", "episodes", "cut") else rarely(x) for x in STREAMS_WITH])
def test_a_false_mask_equals_no_call(name):
    """Eager, and in a scan over lanes with different masks; with ends, TD errors and gaps."""
    buffer, rng = STREAMS_WITH[name], seeds.rng("masks", name)
    wholes = list(map(twins.unsharded, getattr(buffer, "buffers", (buffer,))))
    masks = rng.random((2, 10)) < 0.7
    batches = stack(*[items(3, 4) | {"id": rng.integers(1, 99, (3, 4), np.int32)} for _ in range(10)])
    ends, drawable, error = rng.random((3, 10, 3, 4)) < [[[[0.2]]], [[[0.9]]], [[[0.1]]]]

    def step(state, batch, ends, drawable, error, key, mask):
        parts = enumerate(wholes) if isinstance(buffer, jr.Mixture) else [((), wholes[0])]
        for source, whole in parts:
            named = {"ends": ends, "td_errors": jnp.where(error, jnp.nan, 1.0 * batch["id"])[: whole.completed(3)]}
            named |= {"drawable": drawable} if whole.gaps else {}
            given = (batch,) if source == () else (source, batch)
            state = buffer.add(state, *given, **named, mask=mask)
        handles = buffer.sample(state, key, 8).indices
        return state, handles, jax.random.normal(key, (8,))

    def learn(state, given):
        state, *told = step(state, *given)
        return jax.tree.map(functools.partial(jnp.where, given[-1]), buffer.update(state, *told), state), state

    given = batches, ends, drawable, error, jax.random.split(jax.random.key(0), 10)
    state = buffer.init(items(3, 4))
    call, called = jax.jit(functools.partial(step, mask=None)), jax.jit(step)
    each = jax.jit(jax.vmap(lambda masks: lax.scan(learn, state, (*given, masks))))(masks)
    for lane, mask in enumerate(masks):
        now = buffer.init(items(3, 4))
        for t in range(10):
            if mask[t]:
                now, *told = call(now, *at(given, t))
            else:
                chex.assert_trees_all_equal(called(now, *at(given, t), mask=False)[0], now)
            chex.assert_trees_all_equal(now, at(at(each[1], lane), t))
            now = buffer.update(now, *told) if mask[t] else now
        chex.assert_trees_all_equal(now, at(each[0], lane))
    assert 0 < masks.sum() < masks.size


KINDS = ["replay", "reservoir", "sequence", "sharded"]


@pytest.mark.parametrize(
    ("name", "factor"), [("replay", 1.0), ("sequence", 2.0), *map(rarely, [(x, y) for x in KINDS for y in (1.0, 2.0)])]
)
def test_transitions_carry_the_weights_and_handles_of_their_draw(name, factor):
    (buffer, shape), key = CONTRACTS[name], jax.random.key(0)
    x = np.arange(np.prod(shape) * 1.0).reshape(shape)
    W, add = None if factor == 1 else np.full(shape, factor), _adder(buffer)
    batch = jr.TransitionBatch(S=x, A=x, logP=None, Rn=x, In=x, S_next=x, W=W)

    def draw(state):
        state = add(add(state, batch, key), batch, key)
        state = buffer.update(state, buffer.sample(state, key, 16).indices, 1.0 + np.arange(16))
        sample = buffer.sample(state, key, 16)
        return sample, buffer.get(state, sample.indices).S

    sample, stored = jax.device_get(jax.jit(draw)(buffer.init(batch)))
    weights, handles = (np.broadcast_to(x, sample.items.S.T.shape).T for x in (sample.weights, sample.indices))
    assert len(np.unique(weights)) > 2
    np.testing.assert_allclose(sample.items.W, factor * weights)
    np.testing.assert_array_equal(sample.items.idx, handles)
    np.testing.assert_array_equal(sample.items.S, stored)


def places(state):
    arrays = jax.tree.leaves((state.storage, getattr(state, "handles", ())))
    return [part.data.unsafe_buffer_pointer() for x in arrays for part in x.addressable_shards]


class Anew(jr.Prioritized):
    def cleared(self, state, capacity):
        return self.init(capacity)


def test_arrays_that_are_replaced_unread_are_donated_too():
    buffer = jr.ReplayBuffer(capacity=8, sampler=Anew())
    buffer.clear(state := buffer.init(items(4)))
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(state))


@pytest.mark.parametrize("name", KINDS)
def test_eager_calls_donate_and_keep_the_storage_in_place(name):
    (buffer, shape), key = CONTRACTS[name], jax.random.key(0)
    batch, add = items(*shape), _adder(buffer)
    state = buffer.init(batch)
    rejects("cannot sample from an empty buffer; add items first", buffer.sample, state, key, 8)
    for call in (lambda s: add(s, batch, key), lambda s: buffer.update(s, np.arange(4), np.ones(4)), buffer.clear):
        before, kinds, new = places(state), types(state), call(state)
        assert all(leaf.is_deleted() for leaf in jax.tree.leaves(state))
        assert (places(new), types(new)) == (before, kinds)
        for gone in (call, buffer.size):
            rejects("state: was donated to an earlier call", gone, state)
        state = new


@pytest.mark.parametrize("name", ["replay", "reservoir", "every", *map(rarely, ("inside", "mixture", "sharded"))])
def test_no_handle_comes_back_however_often_a_buffer_is_cleared(name):
    """If each time used up a round of all slots, the handles would come back after at most 1,536."""
    replay, streams = jr.ReplayBuffer(capacity=2**20), {"length": 2**20, "num_envs": 2, "sequence_length": 1}
    buffer = {
        "replay": replay,
        "reservoir": jr.ReservoirBuffer(capacity=2**20),
        "every": jr.SequenceBuffer(**streams),
        "inside": jr.SequenceBuffer(**streams, windows="inside"),
        "mixture": jr.Mixture(buffers=(replay, replay)),
        "sharded": over_devices(replay, 2),
    }[name]
    ones, add = np.ones((1, 2) if name in ("every", "inside") else 2, np.float32), _adder(buffer)

    @jax.jit
    def run(state, key):
        state = add(state, ones, key)
        first = buffer.sample(state, key, 8).indices

        def step(k, carry):
            state, came_back = carry
            state = add(buffer.clear(state), ones, key)
            return state, came_back | (buffer.get(state, first) != 0).any()

        state, came_back = lax.fori_loop(0, 1600, step, (state, False))
        return first, buffer.get(state, buffer.sample(state, key, 8).indices), came_back

    first, found, came_back = jax.device_get(run(buffer.init(ones), jax.random.key(0)))
    assert np.all(first >= 0)
    assert np.all(found == 1)
    assert not came_back


def test_eager_calls_run_under_checks_of_jax():
    """The first time they do without: programs are compiled, and constants sent to the device."""
    buffer = jr.ReplayBuffer(capacity=12, sampler=jr.Prioritized(normalize="global"), donate=False)
    pools, tracer = POOLS, jr.NStep(n=2, gamma=0.9, num_envs=2)
    numbers, flags, batch, groups = jax.device_put(
        (np.arange(2, dtype=np.float32), np.zeros(2, bool), items(5), (np.arange(3), np.ones((3, 2), np.float32)))
    )
    step, (handles, _), ones = (numbers, numbers, numbers, flags, flags, numbers), groups, jax.device_put(np.ones(3))
    tree, key, td_errors = sum_tree.init(4, track_minimum=True), jax.random.key(0), jax.device_put(np.ones(8))

    def run(replay, tracing, state):
        replay = buffer.add(replay, batch)
        replay = buffer.update(replay, buffer.sample(replay, key, 8).indices, td_errors)
        buffer.is_full(replay), buffer.is_empty(replay), buffer.can_sample(replay, 3)
        buffer.get(replay, handles)
        tracer.flush(tracer.add(tracing, *step)[0])
        state, _ = pools.update(state, *groups)
        pools.sample(state, key, 3), pools.metrics(state), pools.pool_of(state), pools.reset_metrics(state)
        updated = sum_tree.update(tree, handles, ones)
        sum_tree.total(updated), sum_tree.minimum(updated), sum_tree.find(updated, numbers)

    first, second, third = [(buffer.init(batch), tracer.init(*step), pools.init()) for _ in range(3)]
    run(*first)
    with jax.transfer_guard("disallow"):
        run(*second)
    with jax.debug_infs(True), jax.debug_nans(True):  # which read all results
        run(*third)


GOALS, ONE = {name: np.ones((2, 3)) for name in ("achieved_goal", "desired_goal", "reward")}, np.ones((1, 1))
RESERVOIR, POOLS = jr.ReservoirBuffer(capacity=2), jr.DifficultyPools(tasks_per_env=(5, 9), easy_threshold=0.9)
EPISODES = jr.SequenceBuffer(length=4, num_envs=1, sequence_length=2, hindsight=True)
DRAWS = {
    **{name: lambda key, x=x: x[0].sample(x[0].init(items(*x[1])), key, 2) for name, x in CONTRACTS.items()},
    "uniform": lambda key: (buffer := jr.ReplayBuffer(capacity=2)).sample(buffer.init(ONE), key, 2),
    "add": lambda key: RESERVOIR.add(RESERVOIR.init(ONE), ONE, key),
    "later": lambda key: EPISODES.later(EPISODES.init(ONE), key, np.zeros(2, np.int32)),
    "hindsight": lambda key: jr.hindsight(key, GOALS, np.ones(2), lambda achieved, goal: achieved - goal),
    "tree": lambda key: sum_tree.sample(sum_tree.init(2), key, 2),
    "pools": lambda key: POOLS.sample(POOLS.init(), key, 2),
    "recycle": lambda key: POOLS.recycle(POOLS.init(), key, easy_fraction=0.5),
}


@pytest.mark.parametrize("draw", DRAWS)
def test_a_key_that_is_used_twice_is_noticed(draw):
    with jax.debug_key_reuse(True):
        jax.jit(DRAWS[draw]).trace(jax.random.key(0))
        with pytest.raises(jax.errors.KeyReuseError):
            jax.jit(lambda key: (DRAWS[draw](key), DRAWS[draw](key))).trace(jax.random.key(0))


def test_the_key_of_an_epoch_may_be_used_again():
    (buffer, shape), key = CONTRACTS["replay"], jax.random.key(0)
    state = jax.eval_shape(buffer.init, items(*shape))

    def batch(state, key, step):
        return buffer.epoch(state, key, 4, step=step).indices

    with jax.debug_key_reuse(True):
        jax.jit(lambda *x: [batch(*x, step) for step in range(2)]).trace(state, key)
        jax.jit(lambda *x: jax.lax.map(lambda step: batch(*x, step), np.arange(2))).trace(state, key)


@twins.strict()
def test_functions_run_under_strict_settings():
    """Also what multiplies weights of transitions, of any dtype; the twins tell it of the methods of buffers."""
    x, flags = np.ones((2, 5), np.float32), np.zeros((2, 5), bool)

    def run(key):
        tree = jr.sum_tree.init(100, track_minimum=True)
        tree = jr.sum_tree.update(tree, np.arange(4, dtype=np.int32), np.ones(4, np.float32), mask=np.ones(4, bool))
        drawn = jr.sum_tree.sample(tree, key, 4, stratified=True), jr.sum_tree.find(tree, x)
        read = jr.sum_tree.get(tree, np.zeros((2, 3), np.int32)), jr.sum_tree.minimum(tree), jr.sum_tree.total(tree)
        weights = jr.importance_weights(x[0], 10, 0.5), jr.effective_sample_size(x)
        buffer = jr.SequenceBuffer(length=4, num_envs=5, sequence_length=2, hindsight=True)
        replay = buffer.add(buffer.init(x), x, ends=flags)
        for gamma in (0.9, np.float32(0.9), jnp.float32(0.9), jnp.bfloat16(0.9)):
            buffer.later(replay, key, np.arange(3), law="geometric", gamma=gamma)
        jr.hindsight(key, GOALS, np.ones(2), lambda achieved, goal: achieved - goal, share=np.float32(0.5))
        return drawn, read, weights, jr.sequence_priority(x, ~flags), jr.stack_frames(x, flags, 3)

    jax.eval_shape(run, jax.random.key(0))
    replay, x = jr.ReplayBuffer(capacity=4), np.zeros(4, np.float32)
    for dtype in (np.int32, jnp.bfloat16, np.float32):
        batch = jr.TransitionBatch(S=x, A=x, logP=None, Rn=x, In=x, S_next=x, W=x.astype(dtype))
        drawn = jax.eval_shape(lambda key, batch=batch: replay.sample(replay.init(batch), key, 2), jax.random.key(0))
        assert drawn.items.W.dtype == np.float32
