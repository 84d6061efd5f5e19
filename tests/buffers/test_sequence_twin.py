"""A SequenceBuffer, alone and sharded, does in random operations what its twin does."""

import jax.numpy as jnp
import numpy as np
import pytest
import seeds
import twins
from helpers import check_happened, items, no_ends, rarely

import jaxreplay as jr


class Lane(twins.Lane):
    def close(self, buffer):
        whole = twins.unsharded(buffer)
        if whole.windows in ("any", "cut") and not whole.gaps:
            return {}
        closed = self.rng.random(whole.num_envs) < 0.12
        self.twin.end_streams(closed)
        self.happened["streams closed"] += int(np.sum(closed))
        return {"closed": closed}

    def check_shard(self, buffer, state, shard):
        super().check_shard(buffer, state, shard)
        assert state.rows.size == min(len(shard.ring.steps) - shard.ring.lost, shard.ring.length)
        assert shard.ring.every or np.max(state.windows.so_far) <= shard.ring.sequence_length

    def check_seen(self, seen, given):
        super().check_seen(seen, given)
        rings = [shard.ring for shard in self.twin.shards]
        assert seen["stored_steps"] == sum(min(len(x.steps), x.length) * x.num_envs for x in rings)
        if "last" in seen:
            self.check_later(given["read"], *seen["last"], last=True)
            self.check_later(given["read"], *seen["uniform"], last=False)

    def check_later(self, names, found, steps, last):
        expected = []
        for row, (shard, handle) in enumerate(self.twin.rows(names)):
            ring = shard.ring
            if not shard.has(handle):
                assert steps[row] == 0
                expected.append(None)
                continue
            time, env = ring.times(handle)[0], handle % ring.num_envs
            most = ring.num_later(time, env)
            assert steps[row] == most if last else min(1, most) <= steps[row] <= most
            expected.append([ring.steps[time + steps[row]][env]])
            self.happened["later rows"] += most > 0
        twins.check_items(found, expected)


def rollouts(buffer, sizes):
    """Turns of rollouts whose ends, gaps and TD errors are told, and of rollouts without."""
    whole, shape = twins.unsharded(buffer), (twins.unsharded(buffer).num_envs,)

    def add(lane, number):
        steps, told = sizes[number % len(sizes)]
        rng, ids = lane.rng, 1 + lane.happened["rows added"] + np.arange(steps * shape[0], dtype=np.int32)
        ids, errors, drawable, mask = ids.reshape(steps, *shape), None, None, None
        ends = no_ends(buffer, ids).get("ends")
        if told:
            ends = rng.random(ids.shape) < rng.choice([0.2, 0.5])
            errors = twins.td_errors(rng, (whole.completed(steps), *shape), nan=0.4)
            drawable = rng.random(ids.shape) < 0.8 if whole.gaps else None
            mask = np.array(number % 12 != 6)
        named = {"ends": ends, "td_errors": errors, "drawable": drawable, "mask": mask}
        if mask is not None and not mask:
            lane.happened["rollouts masked"] += 1
            return (items(ids),), named
        new = lane.twin.add(twins.records(ids), ends, errors, drawable, axis=1)
        lane.happened["rows added"] += ids.size
        lane.happened["rows told of"] += sum(bool(np.isfinite(x)) for its in new for x in its.values())
        lane.happened["gaps"] += 0 if drawable is None else int(np.sum(~drawable))
        lane.happened["sequences completed"] += sum(map(len, new))
        return (items(ids),), named

    return add


def random_run(config, sampler, sizes, num_shards=1, mode="jit", seed=seeds.SEED):
    """Counters are about to wrap."""
    whole = jr.SequenceBuffer(**twins.choices(sampler), **config)
    buffer = twins.over(whole, num_shards)
    state = buffer.init(items(np.zeros((1, whole.num_envs), np.int32)))
    state = twins.about_to_wrap(state, "ring", "rows")
    if whole.hindsight:
        now = jnp.full_like(state.episodes.now, 2**31 - 3)
        state = state.replace(episodes=state.episodes.replace(now=now))

    names = "sequence", config, sampler, num_shards, mode
    return twins.Run(buffer, state, rollouts(buffer, sizes), *names, mode=mode, seed=seed, lane=Lane)


def config(length, num_envs, sequence_length, stride=1, windows="any", **flags):
    names = ("length", "num_envs", "sequence_length", "stride", "windows")
    return dict(zip(names, (length, num_envs, sequence_length, stride, windows), strict=True)) | flags


CONFIGS = {
    "strided": config(11, 2, 3, 2, windows="cut"),  # a slot that is partly overwritten
    "episodes": config(12, 4, 3, windows="episodes", gaps=True, hindsight=True),
    "inside": config(10, 4, 2, 2, "inside", gaps=True, hindsight=True),
    "cut with gaps": config(9, 2, 3, 2, gaps=True, windows="cut", hindsight=True),
    "episodes without gaps": config(9, 3, 4, windows="episodes"),
    "inside without gaps": config(12, 2, 4, windows="inside", hindsight=True),
    "one sequence": config(4, 2, 4, windows="cut"),
    "side by side": config(12, 2, 4, 4),
    "of one row": config(8, 2, 1, windows="inside", gaps=True),
    "of one row, far apart": config(5, 2, 1, 5),
}


# Where fewer can happen: of one sequence an environment none is younger than another, and long strides complete few.
ONE_EACH = {"updates of stored items": 120, "young draws": 0, "items of whole passes": 50}
FEWER = {
    "cut with gaps": {"gaps": 40},
    "one sequence": ONE_EACH | {"sequences completed": 150},
    "side by side": {"rows told of": 25, "sequences completed": 100},
    "of one row": {"gaps": 40},
    "of one row, far apart": ONE_EACH | {"rows told of": 25, "sequences completed": 80},
}


def least(name, sampler):
    kind = CONFIGS[name]
    found = twins.least(sampler) | {"rows masked": 0, "rollouts masked": 2, "sequences completed": 200}
    found |= {"gaps": 80} if kind.get("gaps") else {}
    found |= {"later rows": 80} if kind.get("hindsight") else {}
    if kind["windows"] in ("episodes", "cut"):
        found["steps masked out"] = 50
    if kind["windows"] in ("inside", "episodes") or kind.get("gaps"):
        found |= {"updates of stored items": 100, "young draws": 20, "rows set": 40, "sequences completed": 100}
        found["streams closed"] = 5
        found |= {"items of whole passes": 50} | {
            name: 20 for name in ("rows told of", "different weights") if name in found
        }
    return found | FEWER.get(name, {})


@pytest.mark.parametrize(
    ("name", "sampler", "num_shards", "mode"),
    [
        ("strided", "fading", 1, "jit"),
        ("episodes", "plain", 1, "eager"),
        ("inside without gaps", "stored global", 2, "vmap"),
        ("cut with gaps", "recent", 1, "jit"),
        *map(rarely, [(name, "global", 1, "jit") for name in CONFIGS]),
        rarely(("cut with gaps", "fading global", 1, "jit")),
        *map(rarely, [("strided", sampler, 2, "jit") for sampler in twins.SAMPLERS]),
    ],
)
def test_a_sequence_buffer_does_what_its_twin_does(name, sampler, num_shards, mode):
    sizes = [(1, True), (4, True), (3, False)]
    happened = random_run(CONFIGS[name], sampler, sizes, num_shards, mode).run(60)
    check_happened(happened, least(name, sampler))


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["jit", "eager", "vmap"])
@pytest.mark.parametrize("name", CONFIGS)
def test_long_runs_with_a_new_seed(name, mode):
    """Of rollouts up to the longest, which overwrites all."""
    rng, length = seeds.rng("samplers", name, mode, seed=seeds.fresh()), CONFIGS[name]["length"]
    sizes = [(size, told) for size in (1, 2, 5, length) if size <= length for told in (True, False)]
    sampler, num_shards = str(rng.choice(list(twins.SAMPLERS))), int(rng.integers(1, 3))
    num_shards = num_shards if CONFIGS[name]["num_envs"] % num_shards == 0 else 1
    happened = random_run(CONFIGS[name], sampler, sizes, num_shards, mode, seeds.fresh()).run(120)
    check_happened(happened, {"updates of stored items": 30, "rows told of": 5, "on a full buffer": 60})


@pytest.mark.slow
@pytest.mark.parametrize("number", range(12))
def test_any_configuration(number):
    rng = seeds.rng("configurations", number, seed=seeds.fresh())
    sequence_length, windows = int(rng.integers(1, 6)), rng.choice(["any", "cut", "inside", "episodes"])
    stride = 1 if windows == "episodes" else int(rng.integers(1, 5))
    length = sequence_length + stride - 1 + int(rng.integers(0, 9))
    flags = {name: bool(rng.integers(2)) for name in ("gaps", "hindsight")}
    kind = config(length, int(rng.integers(1, 6)), sequence_length, stride, str(windows), **flags)
    sizes = [(int(size), bool(told)) for size in rng.integers(1, length + 1, 3) for told in (True, False)]
    sampler = rng.choice(list(twins.SAMPLERS))
    happened = random_run(kind, sampler, sizes, seed=seeds.fresh()).run(120)
    check_happened(happened, {"steps": 100, "on a full buffer": 50})
