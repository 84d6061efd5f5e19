"""Draws of tasks that are all different."""

import functools

import jax
import numpy as np
import pytest
import seeds
from helpers import rejects
from oracles import distinct_law
from scipy import stats

import jaxreplay as jr
from jaxreplay.curricula import _task_lists

DRAWS = 20_000


def score(successes, trials, age):
    """The successes, without the prior."""
    return successes - 1


def test_a_task_of_the_least_mass_is_before_those_of_none():
    mass = np.append(np.zeros(1000), 2.0**-126).astype(np.float32)
    keys = jax.random.split(seeds.key(0), 100)
    assert np.all(jax.jit(jax.vmap(lambda key: _task_lists.distinct(key, mass, 1)))(keys) == 1000)


def check_law(config, state, law, n):
    """Compare drawn tuples with their probabilities."""
    keys = jax.random.split(seeds.key("distinct", n), DRAWS)
    draw = functools.partial(config.sample, n=n, replacement=False)
    drawn, _ = jax.device_get(jax.jit(jax.vmap(draw, (None, 0)))(state, keys))
    found, counts = np.unique(drawn, axis=0, return_counts=True)
    counts = dict(zip(map(tuple, found.tolist()), counts, strict=True))
    assert counts.keys() <= law.keys()
    assert stats.chisquare([counts.get(x, 0) for x in law], DRAWS * np.array([*law.values()])).pvalue > 1e-4


def tasks_of(**settings):
    """Tasks with scores 4, 2, 1, 0 and 0."""
    tasks = jr.Tasks(num_tasks=5, score=score, **settings)
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
