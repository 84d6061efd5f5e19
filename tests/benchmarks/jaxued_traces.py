"""`jr.Levels` and jaxued's `LevelSampler`, step by step, on random traces with equal scores.

pip install -e . jaxued six
python tests/benchmarks/jaxued_traces.py --traces 500

Both get the same insertions, updates, draws and decisions. Ranks are compared with temperature 1 and without staleness,
as jaxued replaces the level that is least likely in a draw, and jaxreplay the one with the lowest score. The
probabilities are compared with staleness too. jaxued draws; its draws are carried over.
"""

import argparse
import collections
import importlib
import importlib.metadata

import jax
import jax.numpy as jnp
import numpy as np
from jaxued.level_sampler import LevelSampler

import jaxreplay as jr

jax.tree_map = jax.tree.map  # jaxued uses the name that JAX has removed
utils = importlib.import_module("jaxued.utils")

CAPACITY, BATCH, STEPS, STALENESS = 12, 4, 25, 0.3


def random_step(rng: np.random.Generator, size: int) -> dict[str, np.ndarray]:
    """An insertion; and an update of stored levels, each once."""
    scores = np.where(rng.random(BATCH) < 0.05, -np.inf, rng.integers(0, 8, BATCH) / 4)
    slots = rng.permutation(max(size, 1))[:BATCH]
    slots = np.resize(slots, BATCH)
    new = np.resize(rng.integers(0, 8, len(set(slots.tolist()))) / 4, BATCH)
    return {"levels": rng.integers(0, 2**30, BATCH), "scores": scores, "slots": slots, "new": new}


def by_row(slots: np.ndarray) -> list[int]:
    """Slots of inserted levels; -1 for those that a later row of the same insertion replaced."""
    return [-1 if slot in slots[k + 1 :] else int(slot) for k, slot in enumerate(slots)]


def compare_scores(rng: np.random.Generator) -> float:
    """Largest relative difference of the scores of random rollouts; levels without an episode are the same."""
    length, num_levels = int(rng.integers(1, 80)), 16
    ends = rng.random((length, num_levels)) < rng.choice([0.02, 0.1, 0.5])
    numbers = rng.normal(size=(length, num_levels)).astype(np.float32)
    returns = rng.normal(size=num_levels).astype(np.float32)
    pairs = (
        (jr.scores.positive_value_loss(numbers, ends), utils.positive_value_loss(ends, numbers)),
        (jr.scores.max_monte_carlo(numbers, ends, returns), utils.max_mc(ends, numbers, returns)),
    )
    largest = 0.0
    for mine, other in ((np.asarray(x), np.asarray(y)) for x, y in pairs):
        assert np.array_equal(np.isinf(mine), np.isinf(other))
        finite = np.isfinite(mine)
        difference = np.abs(mine[finite] - other[finite]) / np.maximum(np.abs(other[finite]), 1e-2)
        largest = max(largest, float(np.max(difference, initial=0.0)))
    assert largest < 1e-4, largest
    return largest


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--traces", type=int, default=200, help="number of traces (200)")
    traces = parser.parse_args().traces
    ours = jr.Levels(capacity=CAPACITY, temperature=1.0, staleness=0.0, replay_probability=0.5, min_filled=0.5)
    settings = {"capacity": CAPACITY, "replay_prob": 0.5, "minimum_fill_ratio": 0.5}
    theirs = LevelSampler(**settings, staleness_coeff=0.0)
    stale, stale_theirs = (
        jr.Levels(capacity=CAPACITY, temperature=1.0, staleness=STALENESS),
        LevelSampler(**settings, staleness_coeff=STALENESS),
    )
    insert, update = jax.jit(theirs.insert_batch), jax.jit(theirs.update_batch)
    draw = jax.jit(theirs.sample_replay_levels, static_argnums=2)
    decide, weigh = jax.jit(theirs.sample_replay_decision), jax.jit(stale_theirs.level_weights)
    counts, largest, of_scores = collections.Counter(), 0.0, 0.0
    for trace in range(traces):
        rng, key = np.random.default_rng(trace), jax.random.key(trace)
        of_scores = max(of_scores, compare_scores(np.random.default_rng([trace, 1])))
        state, sampler = ours.init(jnp.int32(0)), theirs.initialize(jnp.int32(0))
        for t in range(STEPS):
            keys = jax.random.split(jax.random.fold_in(key, t))
            step = random_step(rng, int(state.size))
            levels = jnp.asarray(step["levels"], jnp.int32)
            full = int(state.size) == CAPACITY
            held = np.asarray(state.scores)
            sampler, slots = insert(sampler, levels, jnp.asarray(step["scores"], jnp.float32))
            state, found = ours.insert(state, levels, step["scores"])
            assert found.tolist() == by_row(np.asarray(slots).tolist()), (trace, t)
            counts["insertions"] += BATCH
            counts["stored"] += int(np.sum(np.asarray(found) >= 0))
            counts["insertions into a full buffer whose lowest score is held twice"] += (
                full * BATCH * (np.sum(held == held.min()) > 1)
            )
            if int(state.size):
                sampler = update(sampler, step["slots"], jnp.asarray(step["new"], jnp.float32))
                state = ours.update(state, step["slots"], step["new"])
                sampler, (drawn, items) = draw(sampler, keys[0], 3)
                assert np.array_equal(items, state.levels[drawn]), (trace, t)
                stamps = state.last.at[drawn].max(state.count + 1 + jnp.arange(3))
                state = state.replace(last=stamps, count=state.count + 3)
            assert bool(ours.replay(state, keys[1])) == bool(decide(sampler, keys[1])), (trace, t)
            counts["decisions"] += 1
            size = int(state.size)
            assert (size, int(state.count)) == (int(sampler["size"]), int(sampler["episode_count"])), (trace, t)
            for mine, other in ((state.levels, "levels"), (state.scores, "scores"), (state.last, "timestamps")):
                assert np.array_equal(mine[:size], sampler[other][:size]), (trace, t, other)
            if size:
                difference = np.max(np.abs(np.asarray(stale.probabilities(state)) - np.asarray(weigh(sampler))))
                largest = max(largest, float(difference))
    versions = ", ".join(f"{package} {importlib.metadata.version(package)}" for package in ("jax", "jaxued"))
    print(f"{versions}: {traces} traces of {STEPS} steps are equal")
    for name, count in counts.items():
        print(f"{count:>8,} {name}")
    print(f"largest difference of two probabilities: {largest:.1e}")
    print(f"largest relative difference of two scores of rollouts: {of_scores:.1e}")


if __name__ == "__main__":
    main()
