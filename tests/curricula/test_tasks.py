"""Tasks: counts, scores and draws of a curriculum."""

import collections
import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import seeds
from helpers import at, check_tree, leaves_of, rarely, rejects
from lanes import EAGER, SCANS, num_lanes, results
from oracles import TasksTwin, distinct_law
from scipy import stats

import jaxreplay as jr
from jaxreplay.curricula import _task_lists

N, GROUPS, ROLLOUTS, STEPS = 11, 6, 3, 25  # eager calls pad to eight groups of four


def mean(successes, trials, age):
    """A score that tells all of its arguments apart."""
    return successes / trials + 0.25 * jnp.minimum(age, 3).astype(jnp.float32)


def random_groups(rng):
    tasks = rng.integers(-1, N + 1, GROUPS).astype(np.int32)
    rewards = rng.integers(0, 5, (GROUPS, ROLLOUTS)).astype(np.float32) / 4
    odd = rng.random((GROUPS, ROLLOUTS)) < 0.03
    rewards = np.where(odd, rng.choice([-0.5, 2.0, np.nan], rewards.shape), rewards).astype(np.float32)
    exists = rng.random((GROUPS, 1)) < rng.choice([0.0, 0.9], p=[0.1, 0.9])  # now and then no group does
    return tasks, rewards, exists & (rng.random((GROUPS, ROLLOUTS)) < 0.8)


def check(state, twin):
    np.testing.assert_array_equal(state.successes, twin.successes.astype(np.float32))
    np.testing.assert_array_equal(state.trials, twin.trials.astype(np.float32))
    np.testing.assert_array_equal(state.last, twin.last)
    assert (int(state.updates), int(state.rejected)) == (twin.updates, twin.rejected)
    check_tree(state.tree)


@pytest.mark.parametrize(("way", "decay"), [(EAGER, 1.0), (SCANS, 0.5), *map(rarely, [(EAGER, 0.5), (SCANS, 1.0)])])
def test_tasks_do_what_their_twin_does(way, decay):
    tasks = jr.Tasks(num_tasks=N, score=mean, prior=(2.0, 1.0), decay=decay, refresh=N)
    rng = seeds.rng("tasks", way, decay)
    given = [[random_groups(rng) for _ in range(STEPS)] for _ in range(num_lanes(way))]

    def step(state, groups):
        state, kept = tasks.update(state, *groups[:2], mask=groups[2])
        return state, (kept, state)

    kept, states = results(way, tasks.init(), step, given)
    happened = collections.Counter()
    for lane, of_lane in enumerate(given):
        twin = TasksTwin(N, tasks.prior, decay)
        for number, groups in enumerate(of_lane):
            before, state = twin.rejected, at(states, (lane, number))
            expected = twin.update(*groups)
            assert kept[lane, number].tolist() == expected
            check(state, twin)
            happened["kept"] += sum(expected)
            happened["rejected"] += twin.rejected - before
            happened["twice"] += len(groups[0]) - len(set(groups[0].tolist()))
        # Every task was scored in the last update.
        counts, age = twin.counts(np.arange(N)), np.asarray(twin.updates - 1 - twin.last)
        scores = counts[0] / counts[1] + 0.25 * np.minimum(age, 3)
        np.testing.assert_allclose(leaves_of(state.tree), scores, rtol=1e-6)
        np.testing.assert_allclose(tasks.probabilities(state), scores / scores.sum(), rtol=1e-5)
        np.testing.assert_allclose(tasks.success_rates(state), counts[0] / counts[1], rtol=1e-6)
    least = {"kept": 60, "rejected": 5, "twice": 10}
    assert all(happened[what] > count * len(given) for what, count in least.items()), happened


def test_tasks_are_scored_anew_in_turn():
    tasks = jr.Tasks(num_tasks=5, score=lambda successes, trials, age: 1.0 + age.astype(jnp.float32), refresh=2)
    state, seen = tasks.init(), []
    for _ in range(6):
        state, _ = tasks.update(state, np.array([4]), np.array([[1.0]]))
        seen.append(leaves_of(state.tree).tolist())
    kept = [1, 1, 1, 1, 1], [1, 1, 2, 2, 1], [4, 4, 2, 2, 1], [4, 4, 5, 5, 1]
    assert seen == [kept[i] for i in (0, 1, 1, 2, 3, 3)]


def test_ages_count_from_the_latest_update_that_had_a_group():
    """However they are read: in an update, a remap or a Thompson draw, and after an update without a group."""

    def one_more(successes, trials, age):
        return 1 + age.astype(jnp.float32)

    by_age = jr.Tasks(num_tasks=3, score=one_more, refresh=3, donate=False)
    nearest_one = jr.scores.Thompson(candidates=40, score=lambda rates, ones, age: -jnp.abs(age - 1))
    state, seen = by_age.init(), []
    for task in (0, 9, 1, 9, 2, 1, 9):
        state, _ = by_age.update(state, np.array([task]), np.ones((1, 1)))
        seen.append(leaves_of(state.tree).tolist())
        np.testing.assert_array_equal(leaves_of(by_age.remap(state, "abc", "abc").tree), seen[-1])
    assert seen == [[1, 1, 1], [1, 1, 1], [2, 1, 2], [2, 1, 2], [3, 2, 1], [4, 1, 2], [4, 1, 2]]
    assert jr.sum_tree.leaves(by_age.remap(state, "abc", "cxa").tree).tolist() == [2, 4, 4]  # x has no group
    assert jr.sum_tree.leaves(by_age.remap(by_age.init(), "abc", "abc").tree).tolist() == [1, 1, 1]
    drawn, _ = jr.Tasks(num_tasks=3, score=nearest_one).sample(state, seeds.key("ages"), 20)
    assert set(drawn.tolist()) == {2}  # of age 1; draws without such a candidate have a chance of 2e-6


@pytest.mark.parametrize("exploration", [0.4, rarely(0.0)])
def test_law_of_the_draw(exploration):
    tasks = jr.Tasks(num_tasks=N, exploration=exploration)
    solved = np.arange(8) < np.arange(N)[:, None] - 1
    state, _ = tasks.update(tasks.init(), np.arange(N), solved.astype(np.float32))
    drawn, ok = jax.jit(lambda s, k: tasks.sample(s, k, 50_000))(state, seeds.key("law", exploration))
    counts = np.bincount(drawn, minlength=N)
    rate = np.asarray(tasks.success_rates(state))
    scores = np.asarray(rate * (1 - rate), float)
    law = (1 - exploration) * scores / scores.sum() + exploration / N
    assert bool(ok)
    assert law.max() > 1.3 * law.min()
    assert stats.chisquare(counts, law * counts.sum()).pvalue > 1e-4
    np.testing.assert_allclose(tasks.probabilities(state), law, rtol=1e-5)


NO_PRIOR = [(0, 4), (4, 0), (0, 0)]  # as if rounding lost it
BETAS = [(1e-3, 1e-3), (0.01, 0.01), (1e-3, 1), (1, 1e-3), (0.02, 0.05), (0.3, 2)]
BETAS += [(0.5, 0.5), (1, 1), (2, 3), (1, 0.05), (20.01, 80.01), (5e5, 2e5)]


@jax.jit
def drawn_rates(key, successes, trials):
    """The success rates that a Thompson draw compares."""
    seen = []
    jr.scores.Thompson(score=lambda rates, ones, age: seen.append(rates) or rates).winner(key, successes, trials, 0)
    return seen[0]


@pytest.mark.law
def test_law_of_drawn_success_rates():
    """Against the exact distribution, rounded to float32, in which a number below 2^-126 is 0."""
    size, smallest = 50_000, 2.0**-126
    successes, failures = (np.repeat(np.float32(x)[:, None], size, axis=1) for x in zip(*BETAS, *NO_PRIOR, strict=True))
    trials = successes + failures
    rates = np.asarray(drawn_rates(seeds.key("rates"), successes, trials))
    assert np.all((rates >= 0) & (rates <= 1))
    rates = np.where(rates < smallest, 0, rates)
    assert [set(row) for row in rates[-3:]] == [{0}, {1}, {0, 1}]
    for row, a, b in zip(rates[:-3], successes[:-3, 0], (trials - successes)[:-3, 0], strict=True):
        beta = stats.beta(float(a), float(b))
        found, counts = np.unique(row, return_counts=True)
        ends = (found + np.nextafter(found, np.float32(2)).astype(float)) / 2  # of what is rounded to these
        ends = np.where(found == 0, smallest, np.minimum(ends, 1))
        distance = np.abs(np.cumsum(counts) / size - beta.cdf(ends)).max()
        assert stats.kstwo.sf(distance, size) > 1e-5, (a, b)
        shares = {0.0: beta.cdf(smallest), 1.0: beta.sf(1 - 2**-25)}
        shares[0.5] = beta.cdf(0.5 + 2**-25) - beta.cdf(0.5 - 2**-26)
        for rate, share in shares.items():
            assert stats.binomtest(int(np.sum(row == rate)), size, share).pvalue > 1e-6, (a, b, rate)
        if beta.ppf(1e-5) > 1e-20:  # a proposal that should not have been accepted may be far out
            assert stats.binomtest(int(np.sum(row < beta.ppf(1e-5))), size, 1e-5).pvalue > 1e-6, (a, b)


@pytest.mark.law
@pytest.mark.parametrize(("exploration", "prior"), [(0.3, 0.01), rarely((0.0, 1.0))])
def test_law_of_thompson_draws(exploration, prior):
    """Against winners that NumPy draws: of three candidates, the rate nearest to a half. Task 2 was never tried."""
    tasks = jr.Tasks(num_tasks=4, prior=(prior, prior), score=jr.scores.Thompson(candidates=3), exploration=exploration)
    rewards = np.array([[1, 1, 1, 1, 1, 1], [0, 1, 0, 1, 0, 1], [0, 0, 0, 0, 0, 0], [1, 0, 0, 0, 0, 0]], np.float32)
    tried = np.arange(4) != 2
    state, _ = tasks.update(tasks.init(), np.arange(4), rewards, mask=tried)
    size = 60_000
    drawn, ok = tasks.sample(state, seeds.key("thompson", exploration), size)
    rng = seeds.rng("thompson", exploration)
    candidates = rng.integers(0, 4, (size, 3))
    won, lost = rewards.sum(1), np.where(tried, 6 - rewards.sum(1), 0)
    rates = rng.beta(prior + won[candidates], prior + lost[candidates]).astype(np.float32)
    rates = np.where(rates < 2.0**-126, np.float32(0), rates)
    best = (rates * (1 - rates)).argmax(1)
    best = np.where(rng.random(size) < exploration, 0, best)
    expected = np.take_along_axis(candidates, best[:, None], 1)[:, 0]
    table = [np.bincount(x, minlength=4) for x in (drawn, expected)]
    assert bool(ok)
    assert stats.chi2_contingency(table).pvalue > 1e-4
    assert table[0][1] > 1.2 * table[0][2]


def test_scores():
    won, tried = np.array([1.0, 3.0, 0.5]), np.array([4.0, 6.0, 20.0])
    beta = stats.beta(won, tried - won)
    np.testing.assert_allclose(jr.scores.learnability(won, tried, 0), beta.mean() * (1 - beta.mean()), rtol=1e-6)
    np.testing.assert_allclose(jr.scores.uncertainty(won, tried, 0), beta.std(), rtol=1e-6)
    score = jr.scores.success_band(0.25, 0.6, inside=3.0, outside=0.5)
    np.testing.assert_array_equal(score(won, tried, 0), [0.5, 3.0, 0.5])
    assert jr.scores.success_band(0.25, 0.6, inside=3.0, outside=0.5) in {score}
    for hard, easy in ((0.5, 0.5), (0.8, 0.2), (-0.1, 0.5)):
        rejects("hard=", jr.scores.success_band, hard, easy)
    third = np.float32(1 / 3)
    band = jr.scores.success_band(float(third), 0.6)  # not at its ends
    np.testing.assert_array_equal(band(np.array([third, np.nextafter(third, 1), 0.6], np.float32), 1, 0), [0, 1, 0])
    np.testing.assert_allclose(jr.scores.failure(won, tried, 0), 1 - beta.mean(), rtol=1e-6)
    score = jr.scores.pools((0.25, 0.5), (3.0, 2.0, 1.0))
    np.testing.assert_array_equal(score(won, tried, 0), [2.0, 1.0, 3.0])  # rates 0.25, 0.5, 0.025
    assert jr.scores.pools()(np.float32([0, 0.5, 1]), np.float32(1), 0).tolist() == np.float32([0.2, 1, 0.1]).tolist()
    for thresholds, weights in (((0.5, 0.5), (1, 1, 1)), ((0.5,), (1,)), ((2.0,), (1, 1)), ((0.5,), (1, -1))):
        rejects(r"thresholds=|thresholds\[0\]|weights\[1\]", jr.scores.pools, thresholds, weights)


def test_scores_that_no_tree_can_hold():
    """NaN and negative scores are 0, and infinite ones finite; if all are 0, draws are uniform."""
    tasks = jr.Tasks(num_tasks=4, score=lambda won, tried, age: jnp.array([jnp.nan, -1.0, jnp.inf, 2.0])[: won.size])
    assert jr.sum_tree.leaves(tasks.init().tree).tolist() == [0.0, 0.0, 1e6, 2.0]
    nothing = jr.Tasks(num_tasks=4, score=jr.scores.success_band(0.9, 1.0))
    drawn, ok = nothing.sample(nothing.init(), seeds.key("nothing"), 4000)
    assert not ok
    assert stats.chisquare(np.bincount(drawn, minlength=4)).pvalue > 1e-4
    assert nothing.probabilities(nothing.init()).tolist() == [0.25] * 4


def test_groups_that_carry_no_signal_are_dropped():
    tasks = jr.Tasks(num_tasks=3, online_difficulty_filtering=True)
    rewards = np.array([[1, 1, 0], [0, 1, 1], [0, 0, 1]], np.float32)
    mask = np.array([[True, True, False], [True, True, True], [True, True, False]])
    state, kept = tasks.update(tasks.init(), np.arange(3), rewards, mask=mask)
    assert kept.tolist() == [False, True, False]
    assert state.trials.tolist() == [2, 3, 2]


def test_counts_stay_exact_after_many_trials():
    tasks = jr.Tasks(num_tasks=3, donate=False)
    successes, trials = np.array([2.0**20, 2.0**20, 0], np.float32), np.array([2.0**22 + 4, 2.0**22, 0], np.float32)
    state = dataclasses.replace(tasks.init(), successes=successes, trials=trials)
    state, _ = tasks.update(state, np.array([0, 1, 0]), np.ones((3, 4)))
    assert state.trials.tolist() == [2.0**21 + 10, 2.0**22 + 4, 0]
    assert state.successes.tolist() == [2.0**19 + 8, 2.0**20 + 4, 0]


def test_counters_saturate():
    tasks, most = jr.Tasks(num_tasks=3, donate=False), 2**31 - 1
    state = dataclasses.replace(tasks.init(), updates=np.int32(most - 1), rejected=np.int32(most - 1))
    for last in (most - 1, most):
        state, _ = tasks.update(state, np.array([0, 5, -1]), np.ones((3, 4)))
        assert (int(state.updates), int(state.rejected)) == (most, most)
        assert state.last.tolist() == [last, 0, 0]


def test_a_state_for_another_list_of_tasks():
    old, new = jr.Tasks(num_tasks=3, score=jr.scores.uncertainty), jr.Tasks(num_tasks=4)
    state, _ = old.update(old.init(), np.array([0, 2]), np.array([[1, 1], [0, 1]]))
    moved = new.remap(state, iter("aab"), iter("xbaa"))
    assert moved.trials.tolist() == [0, 2, 2, 0]
    assert moved.successes.tolist() == [0, 1, 2, 0]
    np.testing.assert_allclose(jr.sum_tree.leaves(moved.tree), [0.25, 0.25, 0.1875, 0.25])
    for wrong in (("aa", "xbaa"), ("aab", "xba")):
        rejects(r"(old|new)_keys: got", new.remap, state, *wrong)
    rejects("prior=2.0: must be two numbers", jr.Tasks, num_tasks=4, score=mean, prior=2.0)
    drawn = new.sample(new.init(), seeds.key(), 2)
    rejects(r"got a tuple, .* give sample\(...\)\[0\]", new.update, new.init(), drawn, np.ones((2, 1)))
    rejects(r"num_tasks=4: this state has tasks \[3\]", new.sample, state, seeds.key(), 2)
    for tasks in (new, jr.Tasks(num_tasks=4, score=jr.scores.Thompson())):
        rejects(r"key: got", tasks.sample, tasks.init(), np.int32(0), 2)


def test_metrics():
    tasks = jr.Tasks(num_tasks=5, decay=0.5)
    state, _ = tasks.update(tasks.init(), np.array([3]), np.array([[1.0, 0.0]]))
    assert jr.memory(tasks).total >= 5 * 16
    assert all(np.isfinite(x) for x in tasks.metrics(tasks.init()).values())
    numbers = tasks.metrics(state)
    np.testing.assert_allclose(numbers["perplexity"], 1, rtol=1e-6)  # each task's rate is a half
    assert (float(numbers["tried"]), float(numbers["success"])) == (np.float32(0.2), 0.5)
    state, _ = tasks.update(state, np.array([2]), np.array([[1.0, 1.0]]))
    law = np.array([4, 4, 3, 4, 4]) / 19  # 3/4 1/4, of 1/2 1/2
    np.testing.assert_allclose(tasks.metrics(state)["perplexity"], np.prod(law**-law) / 5, rtol=1e-5)
    state, _ = tasks.update(state, np.array([0]), np.ones((1, 1)))
    assert float(tasks.metrics(state)["tried"]) == np.float32(0.6)


# --- draws of tasks that are all different


def test_a_task_of_the_least_mass_is_before_those_of_none():
    mass = np.append(np.zeros(1000), 2.0**-126).astype(np.float32)
    keys = jax.random.split(seeds.key(0), 100)
    assert np.all(jax.jit(jax.vmap(lambda key: _task_lists.distinct(key, mass, 1)))(keys) == 1000)


def check_law(config, state, law, n):
    """Compare drawn tuples with their probabilities."""
    keys = jax.random.split(seeds.key("distinct", n), 20_000)
    draw = functools.partial(config.sample, n=n, replacement=False)
    drawn, _ = jax.device_get(jax.jit(jax.vmap(draw, (None, 0)))(state, keys))
    found, counts = np.unique(drawn, axis=0, return_counts=True)
    counts = dict(zip(map(tuple, found.tolist()), counts, strict=True))
    assert counts.keys() <= law.keys()
    assert stats.chisquare([counts.get(x, 0) for x in law], 20_000 * np.array([*law.values()])).pvalue > 1e-4


def tasks_of(**settings):
    """Tasks with scores 4, 2, 1, 0 and 0."""
    tasks = jr.Tasks(num_tasks=5, score=lambda successes, trials, age: successes - 1, **settings)  # without the prior
    solved = np.arange(4) < np.array([4, 2, 1, 0, 0])[:, None]
    return tasks, tasks.update(tasks.init(), np.arange(5), solved.astype(np.float32))[0]


@pytest.mark.law
def test_tasks_are_drawn_one_after_another():
    tasks, state = tasks_of()
    check_law(tasks, state, distinct_law([4, 2, 1, 0, 0], 4), 4)  # tasks of score 0 are last
    tasks, state = tasks_of(exploration=0.5)
    check_law(tasks, state, distinct_law(np.asarray(tasks.probabilities(state), float), 2), 2)


def test_all_of_many_tasks_are_drawn_once():
    """Also of scores that differ by more than float32 adds up, and where all are 0."""
    tasks = jr.Tasks(num_tasks=3000, score=lambda won, tried, age: 10.0 ** (6 - 12 * (tried - 2)) * (won > 1))
    state, _ = tasks.update(tasks.init(), np.arange(1000), np.ones((1000, 1), np.float32))
    drawn, ok = jax.device_get(tasks.sample(state, seeds.key("all"), 3000, replacement=False))
    assert ok
    assert np.sort(drawn).tolist() == [*range(3000)]
    assert {*drawn[:1000].tolist()} == {*range(1000)}
    drawn, ok = tasks.sample(tasks.init(), seeds.key("none"), 3000, replacement=False)
    assert (bool(ok), np.sort(drawn).tolist()) == (False, [*range(3000)])


@pytest.mark.law
def test_pools_draw_from_normal_alone():
    pools = jr.DifficultyPools(tasks_per_env=(4, 2), env_ratios=(1, 3), easy_threshold=0.9)
    state, _ = pools.update(pools.init(), np.array([1]), np.ones((1, 2)))
    check_law(pools, state, distinct_law([1 / 12, 0, 1 / 12, 1 / 12, 3 / 8, 3 / 8], 3), 3)
    drawn, ok = jax.device_get(pools.sample(state, seeds.key("pools"), 6, replacement=False))
    assert ok
    assert (sorted(drawn[:5].tolist()), drawn[5]) == ([0, 2, 3, 4, 5], -1)


@pytest.mark.parametrize("make", [lambda: jr.Tasks(num_tasks=4), lambda: jr.DifficultyPools(tasks_per_env=(4,))])
def test_no_more_than_there_are(make):
    config, key = make(), jax.random.key(0)
    state = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), jax.eval_shape(config.init))
    rejects("n=5: must be an integer from 1 to 4, at most num_tasks", config.sample, state, key, 5, replacement=False)
    rejects("replacement=1: must be True or False", config.sample, state, key, 2, replacement=1)
    thompson = jr.Tasks(num_tasks=4, score=jr.scores.thompson)
    message = "replacement=False: Thompson draws each task on its own; use another score"
    rejects(message, jax.eval_shape, lambda s: thompson.sample(s, key, 2, replacement=False), thompson.init())
