"""All calls of each curriculum, traced: types are stable, nothing is promoted, each key serves once. Wrong settings."""

import functools

import jax
import numpy as np
import pytest
from helpers import rejects, types
from twins import strict

import jaxreplay as jr

SCORES = jr.scores.learnability, jr.scores.uncertainty, jr.scores.thompson, jr.scores.success_band(0.1, 0.9)
CURRICULA = [
    jr.DifficultyPools(tasks_per_env=(5, 2), env_ratios=(1, 2), easy_threshold=0.9, hard_threshold=0.1),
    *(jr.Tasks(num_tasks=7, score=score, decay=0.9, exploration=0.1, refresh=2) for score in SCORES),
    *(jr.Levels(capacity=7, prioritization=by, staleness=0.5) for by in ("rank", "proportional")),
]


def calls_of_tasks(tasks, state, key):
    key, again = jax.random.split(key)
    drawn, _ = tasks.sample(state, key, 5)
    state, kept = tasks.update(state, drawn, np.ones((5, 2), np.float32), mask=np.ones(5, bool))
    state = tasks.remap(state, "abcdefg", "gfedcba")
    if isinstance(tasks, jr.DifficultyPools):
        state = tasks.reset_metrics(tasks.recycle(state, again, easy_fraction=0.5, hard_fraction=0.5))
        own = tasks.pool_of(state), tasks.order(state)
    else:
        own = tasks.probabilities(state)
    return state, (kept, tasks.metrics(state), own)


def calls_of_levels(levels, state, key):
    (key, again), ends, ones = jax.random.split(key), np.ones((3, 4), bool), np.ones((3, 4), np.float32)
    scores = jr.scores.positive_value_loss(ones, ends) + jr.scores.max_monte_carlo(ones, ends, np.ones(4, np.float32))
    state, slots = levels.insert(state, np.arange(4, dtype=np.int8), scores)
    state, drawn, items = levels.sample(levels.update(state, slots, scores), key, 5)
    return state, (items, levels.get(state, drawn), levels.metrics(state), levels.replay(state, again))


@pytest.mark.parametrize("curriculum", CURRICULA)
def test_types_are_stable_and_nothing_is_promoted_or_drawn_twice(curriculum):
    is_of_levels = isinstance(curriculum, jr.Levels)
    calls = functools.partial(calls_of_levels if is_of_levels else calls_of_tasks, curriculum)
    with strict():
        state = jax.eval_shape(curriculum.init, *[np.int8(0)] * is_of_levels)
        new, _ = jax.eval_shape(calls, state, jax.eval_shape(lambda: jax.random.key(0)))
    assert types(new) == types(state)
    with jax.debug_key_reuse(True):
        jax.jit(calls).trace(state, jax.random.key(0))


@pytest.mark.parametrize("donate", [True, False])
def test_calls_are_in_place(donate):
    groups, given = (np.arange(3), np.ones((3, 4))), (np.arange(4), np.ones(4))
    pools = jr.DifficultyPools(tasks_per_env=(5, 9), easy_threshold=0.9, hard_threshold=0.1, donate=donate)
    tasks, levels = jr.Tasks(num_tasks=3, donate=donate), jr.Levels(capacity=4, donate=donate)
    for state, *calls in (
        (pools.init(), (pools.update, *groups)),
        (tasks.init(), (tasks.update, *groups)),
        (levels.init(0), (levels.insert, *given), (levels.update, *given), (levels.sample, jax.random.key(0), 3)),
    ):
        for call, *arguments in calls:
            after = call(state, *arguments)
            assert any(x.is_deleted() for x in jax.tree.leaves(state)) == donate
            if donate:
                rejects("state: was donated to an earlier call", call, state, *arguments)
            state = after[0] if isinstance(after, tuple) else after


OF_TASKS, OF_LEVELS = functools.partial(jr.Tasks, num_tasks=4), functools.partial(jr.Levels, capacity=4)


@pytest.mark.parametrize(
    ("make", "settings", "message"),
    [
        (OF_TASKS, {"num_tasks": 0}, "num_tasks=0: must be an integer from 1"),
        (OF_TASKS, {"score": 3}, "score=3: must be a function"),
        (OF_TASKS, {"prior": (1.0,)}, r"prior=\(1.0,\): must be two numbers"),
        (OF_TASKS, {"prior": (0.0, 1.0)}, r"prior\[0\]=0.0: must be a number in"),
        (OF_TASKS, {"decay": 0}, "decay=0: must be a number in"),
        (OF_TASKS, {"exploration": 2}, "exploration=2: must be a number in"),
        (OF_TASKS, {"refresh": 9}, "refresh=9: must be an integer from 0 to 4"),
        (OF_LEVELS, {"capacity": 0}, "capacity=0: must be an integer from 1"),
        (OF_LEVELS, {"prioritization": "topk"}, 'prioritization=\'topk\': must be "rank" or "proportional"'),
        (OF_LEVELS, {"temperature": 0}, "temperature=0: must be a number in"),
        (OF_LEVELS, {"staleness": 2}, "staleness=2: must be a number in"),
        (OF_LEVELS, {"replay_probability": -1}, "replay_probability=-1: must be a number in"),
        (OF_LEVELS, {"min_filled": 2}, "min_filled=2: must be a number in"),
    ],
)
def test_settings_that_are_refused(make, settings, message):
    rejects(message, make, **settings)
