"""Levels: what is kept, what is drawn, and scores of rollouts."""

import collections
import functools

import jax
import numpy as np
import pytest
import seeds
from helpers import at, rarely, rejects
from lanes import EAGER, SCANS, num_lanes, results
from oracles import LevelsTwin
from scipy import stats

import jaxreplay as jr

N, STEPS, DRAWN, FEW = 9, 60, 5, 8  # FEW: of the first steps, which leave an empty slot
KEPT = jr.Levels(capacity=12, donate=False)


def random_step(rng, batch_size, number):
    """Levels with their scores, many of them equal; and slots with new scores.

    Whatever the seed, the first steps leave an empty slot: they insert nothing, one level, and at most one each. They
    also give a score to the last slot, which is empty. The next N fill all slots. Of each three steps after that, two
    set a slot to the lowest score, and the last replaces one of these two.
    """
    odd = rng.choice([np.nan, -np.inf, np.inf], (2, batch_size))
    scores = np.where(rng.random((2, batch_size)) < 0.12, odd, rng.integers(-1, 7, (2, batch_size)))
    slots = rng.integers(-2, N + 2, batch_size)
    masks = rng.random((2, batch_size)) < 0.85
    levels = rng.integers(0, 2**30, batch_size)
    scores[1] = np.where(np.isinf(scores[1]), 3, scores[1])
    if number < FEW:
        masks[0, :-1] = False
        if number < 2:  # none, then one
            scores[0, -1], masks[0, -1] = 2, number == 1
        slots[-1], masks[1, -1] = N - 1, True
        scores[1, -1] = np.nan if number % 2 else 6
    elif number < FEW + N:
        scores[0, -1], masks[0, -1] = 2, True
        scores[1, -1] = np.nan
        slots[-1], masks[1, -1] = 0, number > FEW
    elif number % 3 < 2:
        pair = np.array([number - number % 3, number - number % 3 + 4]) % N
        slots[np.isin(slots, pair)] = -2
        slots[-1], scores[1, -1], masks[1, -1] = pair[number % 3], -1, True
        masks[0] &= number % 3 == 0
    else:
        masks[0] = np.arange(batch_size) == batch_size - 1
        scores[0, -1] = 60
    return levels.astype(np.int32), scores.astype(np.float32), slots.astype(np.int32), masks


def advance(levels, state, inputs):
    """An insertion, an update and a draw."""
    (new, scores, slots, masks), key = inputs[0], jax.random.wrap_key_data(inputs[1])
    state, places = levels.insert(state, {"id": new}, scores[0], mask=masks[0])
    state = levels.update(state, slots, scores[1], mask=masks[1])
    sample = functools.partial(levels.sample, n=DRAWN)
    if not isinstance(state.size, jax.core.Tracer) and state.size == 0:
        rejects("cannot sample from an empty set of levels; insert some first", sample, state, key)
        sample = jax.jit(sample)
    state, drawn, items = sample(state, key)
    return state, (places, drawn, items["id"], state)


LEAST = {"stored": N + 14, "replaced": 14, "replaced one of several lowest": 14, "rejected": N - 1}
LEAST |= {"empty slots updated": FEW, "partly filled": FEW - 1}


@pytest.mark.parametrize(
    ("way", "batch_size"), [(EAGER, 4), (SCANS, 1), (SCANS, 14), *map(rarely, [(EAGER, 1), (EAGER, 14), (SCANS, 4)])]
)
def test_levels_do_what_their_twin_does(way, batch_size):
    levels = jr.Levels(capacity=N, staleness=0.3, temperature=1.0)
    rng, lanes = seeds.rng("levels", way, batch_size), num_lanes(way)
    given = [[random_step(rng, batch_size, number) for number in range(STEPS)] for _ in range(lanes)]
    keys = np.asarray(jax.random.key_data(jax.random.split(seeds.key("levels", way, batch_size), (lanes, STEPS))))
    keyed = [[*zip(lane, of_lane, strict=True)] for lane, of_lane in zip(given, keys, strict=True)]
    found = results(way, levels.init({"id": np.int32(0)}), functools.partial(advance, levels), keyed)
    happened = collections.Counter()
    for lane in range(lanes):
        twin = LevelsTwin(N)
        for step, (new, scores, slots, masks) in enumerate(given[lane]):
            places, drawn, ids, state = at(found, (lane, step))
            was_full, stored = len(twin.scores) == N, list(twin.scores)
            assert places.tolist() == twin.insert(new, scores[0], masks[0])
            happened["stored"] += np.sum(places >= 0)
            happened["replaced"] += was_full * np.sum(places >= 0)
            happened["replaced one of several lowest"] += (
                was_full and stored.count(min(stored)) > 1 and np.any(places >= 0)
            )
            happened["empty slots updated"] += np.sum((slots >= len(twin.scores)) & (slots < N) & masks[1])
            twin.update(slots, scores[1], masks[1])
            if twin.scores:
                assert ids.tolist() == [twin.levels[slot] for slot in drawn]
                twin.drew(drawn)
            else:
                assert drawn.tolist() == [-1] * DRAWN
                twin.count += DRAWN
            size = len(twin.scores)
            assert (int(state.size), int(state.count), int(state.rejected)) == (size, twin.count, twin.rejected)
            assert state.levels["id"][:size].tolist() == twin.levels
            assert state.scores.tolist() == twin.scores + [-np.inf] * (N - size)
            assert state.last[:size].tolist() == twin.last
            happened["partly filled"] += 0 < size < N
        happened["rejected"] += twin.rejected
    assert all(happened[what] >= count * lanes for what, count in LEAST.items()), happened


STALENESS = 0.0, 0.4, 1.0


@pytest.mark.parametrize(("prioritization", "temperature"), [("rank", 1.0), ("rank", 0.1), ("proportional", 0.5)])
def test_law_of_the_draw(prioritization, temperature):
    settings = {"capacity": 12, "prioritization": prioritization, "temperature": temperature, "donate": False}
    rng, twin = seeds.rng("law", prioritization, temperature), LevelsTwin(12)
    scores = rng.uniform(-0.2, 2, 10).astype(np.float32)
    state, _ = KEPT.insert(KEPT.init(0), np.arange(10), scores)
    twin.insert(np.arange(10), scores, np.ones(10, bool))
    state, drawn, _ = KEPT.sample(state, seeds.key("before"), 4)
    twin.drew(drawn.tolist())

    @jax.jit
    def draws(state, keys):
        given = zip([jr.Levels(**settings, staleness=staleness) for staleness in STALENESS], keys, strict=True)
        return [(levels.probabilities(state), levels.sample(state, key, 60_000)[1:]) for levels, key in given]

    keys = [seeds.key("law", staleness) for staleness in STALENESS]
    for staleness, (found, (drawn, items)) in zip(STALENESS, jax.device_get(draws(state, keys)), strict=True):
        law = twin.law(prioritization, temperature, staleness)
        np.testing.assert_allclose(found[:10], law, rtol=2e-5, atol=1e-9)
        assert found[10:].tolist() == [0, 0]
        np.testing.assert_array_equal(drawn, items)
        counts, often = np.bincount(drawn, minlength=10), law * 60_000 > 5
        expected = law * 60_000
        pooled = np.append(counts[often], counts[~often].sum()), np.append(expected[often], expected[~often].sum())
        kept = pooled[1] > 0
        assert law.max() > 1.5 * law.min()
        assert stats.chisquare(pooled[0][kept], pooled[1][kept], sum_check=False).pvalue > 1e-4


def insert(levels, state, scores):
    """Levels 0, 1, ... with these scores, in a batch of 4, so that one program serves several numbers of levels."""
    return levels.insert(state, np.arange(4), np.resize(scores, 4), mask=np.arange(4) < len(scores))


def test_draws_when_all_scores_are_zero_and_none_is_stale():
    levels = jr.Levels(capacity=4, prioritization="proportional", staleness=0.5)
    assert levels.probabilities(levels.init(0)).tolist() == [0] * 4
    state, _ = insert(levels, levels.init(0), [0.0, -1.0, 0.0])
    np.testing.assert_allclose(levels.probabilities(state), [0.5 / 3 + 1 / 3, 0.5 / 3 + 0.5 / 3, 0.5 / 3, 0], atol=1e-6)


def test_infinite_scores_in_a_proportional_draw():
    """They are finite there: of equal weight, however many."""
    levels = jr.Levels(capacity=4, prioritization="proportional", temperature=1.0, staleness=0.0)
    state, _ = insert(levels, levels.init(0), [np.inf, 1.0, 1e30, np.inf])
    np.testing.assert_allclose(levels.probabilities(state), [1 / 3, 0, 1 / 3, 1 / 3], atol=1e-6)


def test_when_to_replay():
    levels = jr.Levels(capacity=4, replay_probability=0.25, min_filled=0.55)  # 2.2 levels: 3
    keys = jax.random.split(seeds.key("replay"), 4_000)
    decide = jax.vmap(levels.replay, in_axes=(None, 0))
    state, _ = insert(levels, levels.init(0), [1.0, 1.0])
    assert not np.any(jax.device_get(decide(state, keys)))
    state, _ = insert(levels, state, [1.0])
    assert stats.binomtest(int(np.sum(jax.device_get(decide(state, keys)))), 4_000, 0.25).pvalue > 1e-4
    part = jr.Levels(capacity=25, min_filled=0.28, replay_probability=1.0)
    state, _ = part.insert(part.init(0), np.arange(7), np.ones(7))
    assert part.replay(state, seeds.key("one"))  # 0.28 * 25 > 7 in floating point
    assert not jr.Levels(capacity=4, min_filled=0.0, replay_probability=1.0).replay(levels.init(0), seeds.key("one"))


def test_counts_saturate():
    levels, most = jr.Levels(capacity=2, donate=False), 2**31 - 1
    state, _ = levels.insert(levels.init(0), np.arange(3), np.array([1.0, 1.0, -1.0]))
    state = state.replace(count=np.int32(most - 2), last=np.zeros(2, np.int32), rejected=np.int32(most - 1))
    new, _ = levels.insert(state, np.arange(3), np.full(3, 2.0))
    assert (int(new.count), max(new.last.tolist())) == (most, most)
    drawn, slots, _ = jax.device_get(levels.sample(state, seeds.key(), 3))
    assert (int(drawn.count), max(drawn.last)) == (most, most)
    assert drawn.last[slots[0]] >= most - 1
    wrong, _ = levels.insert(new, np.arange(3), np.full(3, np.nan))
    assert (int(wrong.count), int(wrong.rejected)) == (most, most)
    assert int(levels.update(state, np.array([0, 1, 0]), np.full(3, np.nan)).rejected) == most


def mean_of_episodes(numbers, ends):
    """Twin of the scores: one episode after the other."""
    found = []
    for column, ended in zip(np.transpose(numbers), np.transpose(ends), strict=True):
        parts = np.split(column, np.flatnonzero(ended) + 1)[:-1]
        found.append(np.mean([part.mean() for part in parts]) if parts else -np.inf)
    return found


def test_scores_of_rollouts():
    rng = seeds.rng("scores of rollouts")
    numbers, ends = rng.normal(size=(40, 12)).astype(np.float32), rng.random((40, 12)) < 0.1
    ends[:, 0] = False
    largest = rng.normal(size=12).astype(np.float32)
    both = jax.jit(lambda x, ends, m: (jr.scores.positive_value_loss(x, ends), jr.scores.max_monte_carlo(x, ends, m)))
    positive, found = both(numbers, ends, largest)
    np.testing.assert_allclose(positive, mean_of_episodes(np.maximum(numbers, 0), ends), rtol=1e-5)
    np.testing.assert_allclose(found, mean_of_episodes(largest - numbers, ends), rtol=1e-4, atol=1e-6)
    assert found.tolist()[0] == -np.inf
    for x, wrong in ((np.zeros(3), np.zeros(3, bool)), (np.zeros((3, 2)), np.zeros(3, bool)), (numbers, numbers)):
        rejects("advantages: got float32.* with ends", jr.scores.positive_value_loss, x, wrong)
    rejects(r"max_returns: got shape \[2\], expected \[12\]", jr.scores.max_monte_carlo, numbers, ends, np.zeros(2))


def test_states_are_bound_and_measured():
    levels = jr.Levels(capacity=4)
    level = {"walls": np.zeros((3, 3), bool)}
    bound = jr.bind(levels, levels.init(level))
    bound, slots = bound.insert({"walls": np.ones((2, 3, 3), bool)}, np.array([0.5, 0.25]))
    assert slots.tolist() == [0, 1]
    assert levels.get(bound.state, np.array([1, 2]))["walls"].any(axis=(1, 2)).tolist() == [True, False]
    assert jr.memory(levels, level).total >= 4 * (9 + 8)
    numbers = jr.diagnostics(levels, bound.state)
    assert (float(numbers["filled"]), float(numbers["score"]), int(numbers["rejected"])) == (0.5, 0.375, 0)
    law = np.array([0.9 / (1 + 2.0**-10) + 0.1, 0.9 / (1 + 2.0**10)])  # ranks 1 and 2; the first alone is stale
    np.testing.assert_allclose(levels.metrics(bound.state)["perplexity"], np.prod(law**-law) / 2, rtol=1e-5)
    assert float(levels.metrics(bound.state)["max_score"]) == 0.5
    nothing = {"filled": 0, "score": 0, "max_score": 0, "perplexity": 1}
    assert jax.tree.map(float, levels.metrics(levels.init(level))) == nothing
    state = levels.update(bound.state, np.array([0, 1, 2]), np.array([-3.0, -2.0, 5.0]))  # slot 2 is empty
    assert float(levels.metrics(state)["max_score"]) == -2
    assert state.scores.tolist() == [-3, -2, -np.inf, -np.inf]


def test_arguments_that_are_refused():
    levels = jr.Levels(capacity=4)
    state = levels.init({"id": np.int32(0)})
    rejects("wrong structure", levels.insert, state, np.zeros(2, np.int32), np.zeros(2))
    new = {"id": np.zeros(2, np.int32)}
    rejects(r"scores: got shape \[3\], expected \[2\]", levels.insert, state, new, np.zeros(3))
    rejects("batch of 0 levels: expected 1 or more", levels.insert, state, {"id": np.zeros(0, np.int32)}, np.zeros(0))
    rejects(r"scores: got shape \[3\], expected \[2\]", levels.update, state, np.zeros(2, np.int32), np.zeros(3))
    rejects(r"capacity=5: this state has \[4\]", jr.Levels(capacity=5).sample, state, seeds.key(), 2)
    rejects("n=0: must be an integer from 1", levels.sample, state, seeds.key(), 0)
