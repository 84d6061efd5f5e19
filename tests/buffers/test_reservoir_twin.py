"""A ReservoirBuffer, alone and sharded, does in random operations what its twin does."""

import jax
import numpy as np
import pytest
import seeds
import twins
from helpers import check_happened, items, numbers, rarely

import jaxreplay as jr

SAMPLERS = [name for name, sampler in twins.SAMPLERS.items() if not sampler.by_age]


class Lane(twins.Lane):
    def check_shard(self, buffer, state, shard):
        super().check_shard(buffer, state, shard)
        assert state.ring.inserted == (shard.ring.next_handle + len(shard.handles)) % shard.ring.period
        assert state.handles.tolist() == [shard.ring.last.get(slot, -1) for slot in range(shard.ring.num_slots)]
        assert [int(x) for x in state.count] == [shard.ring.count >> 32, shard.ring.count % 2**32]
        self.happened["slots taken again"] = sum(shard.ring.taken_again for shard in self.twin.shards)


def random_run(capacity, sampler, sizes, num_shards=1, mode="jit", many=False, seed=seeds.SEED):
    """As if items had been stored, and cleared, in every other slot: their next handles wrap. The next slot is 5.

    `many`: the count of items is about to reach 2^32, as if those so far had all been masked.
    """
    buffer = twins.over(jr.ReservoirBuffer(capacity=capacity, **twins.choices(sampler)), num_shards)
    state = buffer.init(items(numbers(0, num_shards)))
    count = np.array(state.count)
    count[..., 1] = 2**32 - 20 if many else 0
    slots = np.arange(capacity // num_shards, dtype=np.int32)
    handles = np.where(slots % 2, state.ring.period - 2 * slots.size + slots, -1)
    handles = np.broadcast_to(handles, state.handles.shape)
    ring = state.ring.replace(inserted=np.full_like(state.ring.inserted, 5 % slots.size))
    new = state.replace(count=count, handles=handles.astype(np.int32), ring=ring)
    state = jax.tree.map(lambda x, old: jax.device_put(x, old.sharding), new, state)
    names = "reservoir", capacity, sampler, num_shards, mode
    return twins.Run(buffer, state, twins.batches(sizes, keyed=True), *names, mode=mode, seed=seed, lane=Lane)


def least(sampler):
    """No draws by age; the longer a run, the less of what is added comes to be stored."""
    changed = {"rows stored": 60, "rows masked": 25, "updates of stale items": 10, "rows told of": 10, "young draws": 0}
    changed |= {"slots taken again": 10, "clears off slot 0": 1}
    return twins.least(sampler) | changed


@pytest.mark.parametrize(
    ("capacity", "sampler", "num_shards", "mode"),
    [
        (16, "global", 1, "jit"),
        (16, "plain", 2, "vmap"),
        *map(rarely, [(14, name, 1, "jit") for name in SAMPLERS]),
        *map(rarely, [(20, name, 2, "jit") for name in SAMPLERS]),
    ],
)
def test_a_reservoir_does_what_its_twin_does(capacity, sampler, num_shards, mode):
    happened = random_run(capacity, sampler, [(48, True), (2 * num_shards, False)], num_shards, mode).run(40)
    check_happened(happened, least(sampler))


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["jit", "eager", "vmap"])
@pytest.mark.parametrize("many", [False, True])
def test_long_runs_with_a_new_seed(many, mode):
    """Also of batches that are larger than the buffer."""
    rng = seeds.rng("sizes", int(many), mode, seed=seeds.fresh())
    num_shards, sampler = int(rng.integers(1, 3)), str(rng.choice(SAMPLERS))
    capacity = num_shards * int(rng.integers(1, 20))
    sizes = [(rows * num_shards, told) for rows in (1, 3, 2 * capacity) for told in (True, False)]
    run = random_run(capacity, sampler, sizes, num_shards, mode, many, seeds.fresh())
    check_happened(run.run(150), {"rows masked": 30, "updates of stored items": 50})
