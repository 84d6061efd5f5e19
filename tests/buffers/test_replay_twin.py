"""A ReplayBuffer, alone and sharded, does in random operations what its twin does."""

import pytest
import seeds
import twins
from helpers import check_happened, items, numbers, rarely

import jaxreplay as jr


def random_run(capacity, sampler, sizes, num_shards=1, mode="jit", near_wrap=False, seed=seeds.SEED, backend=None):
    """`backend`: the state is laid out as there."""
    buffer = twins.over(jr.ReplayBuffer(capacity=capacity, **twins.choices(sampler)), num_shards)
    state = buffer.init(items(numbers(0, num_shards)))
    state = twins.about_to_wrap(state, "ring") if near_wrap else state
    state = state if backend is None else state.on_this_backend(backend)
    names = "replay", capacity, sampler, num_shards, mode
    return twins.Run(buffer, state, twins.batches(sizes), *names, mode=mode, seed=seed)


@pytest.mark.parametrize(
    ("capacity", "sampler", "num_shards", "backend", "mode"),
    [
        (7, "batch", 1, None, "eager"),
        (8, "stored global, max_uses", 2, None, "vmap"),
        (10, "fading", 2, None, "jit"),
        (6, "distinct, max_uses", 2, None, "jit"),
        (150, "stored global", 1, "tpu", "jit"),
        rarely((300, "stored global", 2, "tpu", "jit")),
        *map(rarely, [(9, name, 1, None, "jit") for name in twins.SAMPLERS]),
        *map(rarely, [(12, name, 4, None, "jit") for name in twins.SAMPLERS]),
        rarely((300, "plain", 1, None, "jit")),
    ],
)
def test_a_replay_buffer_does_what_its_twin_does(capacity, sampler, num_shards, backend, mode):
    sizes = [(capacity, True), (2 * num_shards, False)]
    run = random_run(capacity, sampler, sizes, num_shards, mode, near_wrap=True, backend=backend)
    nothing_left = 3 if "max_uses" in sampler and num_shards == 2 else 0  # in a shard of few slots and many updates
    check_happened(run.run(60), twins.least(sampler) | {"draws with nothing left in a shard": nothing_left})


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["jit", "eager", "vmap"])
@pytest.mark.parametrize("sampler", twins.SAMPLERS)
def test_long_runs_with_a_new_seed(sampler, mode):
    """Of batches of all sizes."""
    rng = seeds.rng("sizes", sampler, mode, seed=seeds.fresh())
    num_shards = int(rng.choice([1, 1, 2]))
    share = int(rng.integers(3, 20))
    sizes = [(num_shards * rows, told) for rows in {1, 2, share} for told in (True, False)]
    run = random_run(share * num_shards, sampler, sizes, num_shards, mode, bool(rng.integers(2)), seeds.fresh())
    least = twins.least(sampler) | {"rows masked": 30, "on a full buffer": 30}
    few = {"items of whole passes": 20, "rows told of": 12, "updates of stored items": 50}  # of a buffer of few items
    for name, of_each in few.items():
        least[name] = min(least.get(name, 0), of_each * share * num_shards)
    check_happened(run.run(150), least)


@pytest.mark.slow
def test_a_buffer_of_one_item():
    happened = random_run(1, "batch", [(1, True), (1, False)], near_wrap=True, seed=seeds.fresh()).run(100)
    check_happened(happened, {"updates of stored items": 80, "rows masked": 10, "on a full buffer": 70})
