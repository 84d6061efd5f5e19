"""A ReplayBuffer, alone and sharded, does in random operations what its twin does."""

import functools

import jax.numpy as jnp
import numpy as np
import oracles
import pytest
import seeds
import twins
from helpers import items, numbers, over_devices, rarely

import jaxreplay as jr


def batches(sizes):
    """Turns of masked batches with TD errors, and of whole ones without."""

    def add(lane, number):
        rows, masked, told = sizes[number % len(sizes)]
        ids = numbers(1 + lane.happened["rows added"], rows)
        mask = lane.rng.random(rows) < lane.rng.choice([0.0, 0.3, 0.8, 1.0]) if masked else None
        errors = twins.td_errors(lane.rng, rows, nan=0.4) if told else None
        lane.twin.add(twins.records(ids), mask, errors)
        lane.happened["rows added"] += rows
        lane.happened["rows masked"] += 0 if mask is None else int(np.sum(~mask))
        lane.happened["rows told of"] += 0 if errors is None else int(np.sum(np.isfinite(errors)))
        return (items(ids),), {"mask": mask, "td_errors": errors}

    return add


def twin_of(buffer, state):
    whole, num_shards = twins.unsharded(buffer), twins.num_shards(buffer)
    law, period = twins.law_of(whole), state.ring.period
    first, share = int(state.ring.inserted.reshape(-1)[0]), whole.capacity // num_shards
    shards = [oracles.ReplayTwin(share, first_handle=first, period=period, **law) for _ in range(num_shards)]
    return oracles.ShardedTwin(shards, period, whole.sampler, age_step=num_shards)


def random_run(capacity, sampler, sizes, num_shards=1, mode="jit", near_wrap=False, seed=seeds.SEED, backend=None):
    """`backend`: the state is laid out as there."""
    buffer = jr.ReplayBuffer(capacity=capacity, **twins.choices(sampler))
    buffer = buffer if num_shards == 1 else over_devices(buffer, num_shards)
    state, share = buffer.init(items(numbers(0, num_shards))), capacity // num_shards
    first = state.ring.period - 3 * share if near_wrap else 0
    state = state.replace(ring=state.ring.replace(inserted=jnp.full_like(state.ring.inserted, first)))
    state = state if backend is None else state.on_this_backend(backend)

    names, make_twin = ("replay", capacity, sampler, num_shards, mode), functools.partial(twin_of, buffer, state)
    settings = {"num_newest": share * num_shards, "mode": mode, "seed": seed}
    return twins.Run(buffer, state, make_twin, batches(sizes), *names, **settings)


@pytest.mark.parametrize(
    ("capacity", "sampler", "num_shards", "backend", "mode"),
    [
        (7, "batch", 1, None, "eager"),
        (8, "stored global, max_uses", 2, None, "vmap"),
        (6, "distinct", 2, None, "jit"),
        (150, "stored global", 1, "tpu", "jit"),
        rarely((300, "stored global", 2, "tpu", "jit")),
        *map(rarely, [(9, name, 1, None, "jit") for name in twins.SAMPLERS]),
        *map(rarely, [(12, name, 4, None, "jit") for name in twins.SAMPLERS]),
        rarely((300, "plain", 1, None, "jit")),
    ],
)
def test_a_replay_buffer_does_what_its_twin_does(capacity, sampler, num_shards, backend, mode):
    sizes = [(capacity, True, True), (2 * num_shards, False, False)]
    run = random_run(capacity, sampler, sizes, num_shards, mode, near_wrap=True, backend=backend)
    twins.check_happened(run.run(60), twins.least(sampler))


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["jit", "eager", "vmap"])
@pytest.mark.parametrize("sampler", twins.SAMPLERS)
def test_long_runs_with_a_new_seed(sampler, mode):
    """Of batches of all sizes."""
    rng = seeds.rng("sizes", sampler, mode, seed=seeds.fresh())
    num_shards = int(rng.choice([1, 1, 2]))
    share = int(rng.integers(3, 20))
    sizes = [(num_shards * rows, *kind) for rows in {1, 2, share} for kind in ((True, True), (False, False))]
    run = random_run(share * num_shards, sampler, sizes, num_shards, mode, bool(rng.integers(2)), seeds.fresh())
    least = twins.least(sampler) | {"rows masked": 30, "on a full buffer": 30}
    for name, of_each in (("items of whole passes", 20), ("rows told of", 12)):  # a buffer of few items has few
        least[name] = min(least.get(name, 0), of_each * share * num_shards)
    twins.check_happened(run.run(150), least)


@pytest.mark.slow
def test_a_buffer_of_one_item():
    happened = random_run(1, "batch", [(1, True, True), (1, False, False)], near_wrap=True, seed=seeds.fresh()).run(100)
    twins.check_happened(happened, {"updates of stored items": 80, "rows masked": 10, "on a full buffer": 70})
