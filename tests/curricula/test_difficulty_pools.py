import dataclasses
import fractions
import functools
import hashlib
import math

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import seeds
from helpers import at, cases, check_tree, compilations, leaves_of, rarely, rejects, stack
from lanes import EAGER, SCANS, num_lanes, results
from oracles import PoolsTwin
from scipy import stats

import jaxreplay as jr
from jaxreplay.curricula import _pool_state as _state

CASES = cases("pools")
SOLVED, FAILED, MIXED = [1.0, 1.0], [0.0, 0.0], [0.0, 1.0]


@functools.partial(jax.jit, static_argnums=0)
def pool_and_order(pools, state):
    return pools.pool_of(state), pools.order(state)


def lists(pools, state):
    """Of each environment the tasks of normal, easy and hard in order of entry; checks that the state is valid."""
    pool, order = map(np.asarray, pool_and_order(pools, state))
    state = jax.tree.map(np.asarray, state)
    np.testing.assert_array_equal(leaves_of(state.normal)[: pools.num_tasks], pool == 0)
    check_tree(state.normal)
    found, first = [], 0
    for e, (count, caps) in enumerate(zip(pools.tasks_per_env, pools.caps, strict=True)):
        tasks = np.arange(first, first + count)
        env = {}
        for number, name in enumerate(PoolsTwin.POOLS):
            members = tasks[pool[tasks] == number]
            assert sorted(order[members]) == list(range(len(members)))
            env[name] = members[np.argsort(order[members])].tolist()
            if number:
                ring, head = state.queues[number - 1, first : first + count], int(state.heads[e, number - 1])
                assert [int(ring[(head + i) % count]) for i in range(len(members))] == env[name]
                assert len(members) <= caps[number - 1]
                assert 0 <= head < max(count, 1)
        assert state.sizes[e].tolist() == [len(env[name]) for name in PoolsTwin.POOLS]
        assert env["normal"] or count == 0
        found.append(env)
        first += count
    return found


def update(pools, state, *groups):
    """With groups (task, rewards), all of two rollouts."""
    tasks, rewards = zip(*groups, strict=True)
    return pools.update(state, np.array(tasks), np.array(rewards))


def make(tasks_per_env=(10,), easy=0.9, hard=0.1, caps=(0.5, 0.4), **settings):
    thresholds = {"easy_threshold": easy, "hard_threshold": hard}
    fractions = {"max_easy_pool_fraction": caps[0], "max_hard_pool_fraction": caps[1]}
    return jr.DifficultyPools(tasks_per_env=tasks_per_env, **thresholds, **fractions, **settings)


@pytest.mark.parametrize("case", [CASES[0], *map(rarely, CASES[1:])])
def test_published_traces(case):
    names, counts = list(case["envs"]), list(case["envs"].values())
    first = dict(zip(names, np.cumsum([0, *counts]), strict=False))
    pools = jr.DifficultyPools(tasks_per_env=counts, env_names=names, **case["config"])
    state = pools.init()
    most = max(len(update["groups"]) for update in case["updates"])
    for update in case["updates"]:
        groups = [(first[env] + task, rewards) for env, task, rewards in update["groups"]]
        mask = np.arange(most) < len(groups)
        tasks, rewards = zip(*groups, *[(0, [0.0] * 4)] * (most - len(groups)), strict=True)
        state, kept = pools.update(state, np.array(tasks), np.array(rewards), mask=mask)
        found = dict(zip(names, lists(pools, state), strict=True))
        for env, expected in update["state"].items():
            members = {name: [task - first[env] for task in of] for name, of in found[env].items()}
            assert members | {"normal": sorted(members["normal"])} == expected
        assert sorted(np.array(tasks)[kept]) == sorted(first[env] + task for env, task in update["kept"])
        metrics = jax.device_get(pools.metrics(state))
        for name, value in update["metrics"].items():
            assert metrics[name] == pytest.approx(value, abs=1e-6), name
        assert all(metrics[name] == 0 for name in metrics.keys() - update["metrics"].keys())
        state = pools.reset_metrics(state)


def random_updates(rng, num_tasks, steps, groups, rollouts):
    """Tasks, rewards and masks; about every twentieth group is none that can be."""
    tasks = rng.integers(0, num_tasks, (steps, groups))
    tasks = np.where(rng.random(tasks.shape) < 0.05, rng.choice([-1, num_tasks, 2**30], tasks.shape), tasks)
    solved = rng.choice([0.0, 1.0, 0.5], (steps, groups, 1), p=rng.dirichlet([1, 1, 1]))
    rewards = (rng.random((steps, groups, rollouts)) < solved).astype(np.float32)
    rewards[rng.random(rewards.shape) < 0.002] = np.nan
    mask = rng.random(rewards.shape) < rng.choice([0.0, 0.8, 1.0], (steps, groups, 1), p=[0.1, 0.3, 0.6])
    return tasks.astype(np.int32), rewards, mask


def test_scans_under_vmap_equal_eager_updates():
    """Which are padded to eight groups of four rollouts."""
    pools = make((5, 9), online_difficulty_filtering=True)
    given = [[*zip(*random_updates(seeds.rng(seed), 14, 40, 6, 3), strict=True)] for seed in range(num_lanes(SCANS))]

    def step(state, groups):
        state, kept = pools.update(state, *groups[:2], mask=groups[2])
        state = pools.reset_metrics(state)
        return state, (kept, state)

    scanned = results(SCANS, pools.init(), step, given)
    for lane, one in enumerate(given):
        chex.assert_trees_all_equal(at(results(EAGER, pools.init(), step, [one]), 0), at(scanned, lane))


def test_metrics_saturate():
    pools, full = make((10,), 0.9, None), np.full((1, 3), 2**31 - 3, np.int32)
    state = dataclasses.replace(pools.init(), groups=full, rollouts=full)
    state = jax.device_get(update(pools, state, *[(0, SOLVED)] * 3)[0])
    assert state.groups.tolist() == [[2**31 - 3, 2**31 - 1, 2**31 - 3]]
    assert state.rollouts[0, 0] == 2**31 - 1


def test_means_are_compared_as_in_float64():
    """Also exactly at a threshold, for 1 to 24 rollouts."""
    most = 24
    groups = [(solved, rollouts) for rollouts in range(1, most + 1) for solved in range(rollouts + 1)]
    solved, count = (np.array(x)[:, None] for x in zip(*groups, strict=True))
    rewards, mask = np.arange(most) < solved, np.arange(most) < count

    @functools.partial(jax.jit, static_argnums=0)
    def pool_after(pools, rewards, mask):
        state, _ = pools.update(pools.init(), np.arange(len(rewards)), rewards, mask=mask)
        return pools.pool_of(state)

    found = pool_after(make((len(groups) * 10,), easy=0.29, hard=0.29), rewards, mask)
    np.testing.assert_array_equal(found[: len(groups)], np.where(solved / count >= 0.29, 1, 2)[:, 0])
    found = pool_after(make((10,), easy=0.9, hard=-0.9), np.float32([[0.9] * 4, [-0.9] * 4, [0.89] * 4]), None)
    assert found.tolist() == [1, 2, *[0] * 8]


def fractions_at_the_edge(rng, num_tasks):
    """Two fractions whose sum is the largest float64 below 1."""
    easy = rng.choice([rng.random(), rng.integers(0, num_tasks + 1) / num_tasks, 0.1 * rng.integers(0, 10)])
    easy = float(min(easy, np.nextafter(1, 0)))
    hard = float(1 - fractions.Fraction(2) ** -54 - fractions.Fraction(easy))  # there sums round to 1
    return easy, hard if easy + hard < 1 else float(np.nextafter(hard, 0))


def test_caps_are_floors_in_float64():
    counts = tuple(range(1, 1001))
    for hundredths in range(1, 100):
        fraction = hundredths / 100
        caps = make(counts, caps=(fraction, 0.0)).caps
        assert [easy for easy, _ in caps] == [math.floor(count * fraction) for count in counts]
        assert {hard for _, hard in caps} == {0}
        assert [hard for _, hard in make(counts, caps=(0.0, fraction)).caps] == [easy for easy, _ in caps]
    assert make((6,), caps=(1 / 6, np.nextafter(5 / 6, 0))).caps == ((1, 4),)
    rng = seeds.rng("caps")
    for size in range(1, 500):  # a task is left for normal
        assert sum(make((size,), caps=fractions_at_the_edge(rng, size)).caps[0]) < size


def run_dry(pools, env):
    """A state that no update leads to: all tasks of an environment are parked."""
    counts = np.array(pools.tasks_per_env, np.int32)
    pool = np.where(np.repeat(np.arange(counts.size), counts) == env, 2, 0).astype(np.int32)
    return jax.jit(_state.arrange, static_argnums=3)(counts, np.stack([counts, counts], axis=1), pool, ())


@pytest.mark.law
@pytest.mark.parametrize("dry", [0, *map(rarely, [None, 2])])
@pytest.mark.parametrize("ratios", [(2e39, 0.5e39, 1.5e39), *(rarely((x,)) for x in (None, (1, 0, 3)))])  # no float32
def test_law_of_the_draw(ratios, dry):
    pools = make((6, 20, 14), env_ratios=ratios)
    groups = (1, SOLVED), (7, FAILED), (30, SOLVED), (31, FAILED), (5, SOLVED), (9, MIXED)
    state, _ = update(pools, pools.init(), *groups)
    if dry is not None:
        state = run_dry(pools, dry)
    normal = np.asarray(pools.pool_of(state)) == 0
    env = np.repeat([0, 1, 2], pools.tasks_per_env)
    ratio = np.asarray(ratios or pools.tasks_per_env, float) * [np.any(normal[env == e]) for e in range(3)]
    expected = np.where(normal, (ratio / ratio.sum() / np.maximum(np.bincount(env, normal), 1))[env], 0)
    tasks, ok = pools.sample(state, seeds.key(3), 60_000)
    assert ok
    counts = np.bincount(tasks, minlength=40)
    assert np.all(counts[expected == 0] == 0)
    drawable = expected > 0
    assert stats.chisquare(counts[drawable], 60_000 * expected[drawable]).pvalue > 1e-4
    drawn = env[np.asarray(tasks)] == 1
    pairs = np.bincount(2 * drawn[::2] + drawn[1::2], minlength=4)
    if np.all(pairs.reshape(2, 2).sum(axis=0) > 0):
        assert stats.chi2_contingency(pairs.reshape(2, 2)).pvalue > 1e-4  # draws do not depend on one another


@pytest.mark.parametrize(("thresholds", "expected"), [((0.9, None), [1, 0, 0]), ((None, 0.1), [0, 2, 0])])
def test_without_its_threshold_a_pool_stays_empty(thresholds, expected):
    pools = make((10,), *thresholds)
    state, _ = update(pools, pools.init(), (0, SOLVED), (1, FAILED), (2, MIXED))
    assert pools.pool_of(state).tolist() == [*expected, *[0] * 7]


@pytest.mark.parametrize(
    ("counts", "ratios", "dry"), [((6,), None, 0), rarely(((0, 3), (1, 0), None)), rarely(((0,), None, None))]
)
def test_nothing_left_to_draw(counts, ratios, dry):
    pools = make(counts, env_ratios=ratios)
    state = pools.init() if dry is None else run_dry(pools, dry)
    rejects(r"No environments left with examples\..*recycle", pools.sample, state, jax.random.key(0), 2)
    tasks, ok = jax.device_get(jax.jit(lambda state, key: pools.sample(state, key, 2))(state, jax.random.key(0)))
    assert tasks.tolist() == [-1, -1]
    assert not ok
    state, kept = jax.device_get(pools.update(state, tasks, np.ones((2, 2))))
    assert not np.any(kept)
    assert state.rejected == 2


def test_no_tasks_at_all():
    pools = make((0,))
    state = pools.remap(pools.init(), [], [])

    @jax.jit
    def recycled(state):
        return pools.recycle(state, jax.random.key(0), easy_fraction=0.5, hard_fraction=0.5), pools.metrics(state)

    state, metrics = recycled(state)
    assert not any(jax.device_get(metrics).values())
    lists(pools, state)


def test_eager_updates_are_padded_to_powers_of_two_and_nothing_recompiles():
    """So a program serves many numbers of groups and rollouts, given by the host or by the device."""
    rng, key, (pools, equal) = seeds.rng(0), jax.random.key(0), (make(x, donate=False) for x in ((40,), [40]))
    assert hash(pools) == hash(equal)
    state, _ = pools.update(pools.init(), np.arange(5), np.ones((5, 3)))
    jax.block_until_ready(pools.sample(state, key, 3))

    def update(state, tasks, rewards, mask):
        return equal.update(state, tasks, rewards, mask=mask)

    for tasks, rollouts in [(5, 4), (7, 3)]:
        groups = rng.integers(0, 40, tasks), rng.integers(0, 2, (tasks, rollouts)) * 1.0, rng.random(tasks) < 0.8
        with compilations() as compiled:
            expected = jax.block_until_ready(update(state, *groups))
            equal.sample(expected[0], key, 3)
        assert len(compiled) <= (tasks != 5)  # which of the groups were kept
    groups = jax.tree.map(jnp.asarray, groups)
    with compilations() as compiled:
        found = jax.block_until_ready(update(state, *groups))
    assert len(compiled) <= 1  # the padding itself
    chex.assert_trees_all_equal(found, expected)
    assert "[8,4]" not in str(jax.make_jaxpr(update)(state, *groups))  # a traced call is not padded


@pytest.mark.slow
def test_recycle_draws_all_members_alike():
    pools = make((20,))
    state, _ = update(pools, pools.init(), *[(task, SOLVED) for task in range(10)])
    keys = jax.random.split(seeds.key(0), 4000)
    pool = jax.vmap(lambda key: pools.pool_of(pools.recycle(state, key, easy_fraction=0.3)))(keys)
    returned = np.asarray(pool)[:, :10] == 0
    assert np.all(returned.sum(axis=1) == 3)
    # Without replacement the counts are less spread than a multinomial's, by (10 - 3) / (10 - 1).
    assert 1e-4 < stats.chi2.sf(np.sum((returned.sum(axis=0) - 1200.0) ** 2 / 1200) / (7 / 9), 9) < 1 - 1e-4


def test_task_keys():
    task = {"prompt": [{"role": "user", "content": "1 + 1"}], "env": "sums", "answer": 2, "id": 7}
    assert jr.task_key(task, ("env", "answer")) == hashlib.sha256(b'["sums", 2]').hexdigest()
    moved = task | {"id": 8, "prompt": [{"content": "1 + 1", "role": "user"}]}
    assert jr.task_key(task, ("env", "prompt")) == jr.task_key(moved, ("env", "prompt"))
    assert jr.task_key(task, ("env", "id")) != jr.task_key(moved, ("env", "id"))
    rejects(r"not in the task: \['question'\]; it has \['answer', 'env'", jr.task_key, task, ("env", "question"))
    rejects("give at least one", jr.task_key, task, ())


def test_rows_of_many_tasks_are_sorted_as_those_of_few():
    """Of more tasks than one number can hold with the row."""
    tasks = seeds.rng("rows").integers(0, 20, 24).astype(np.int32)
    few, many = jax.jit(lambda x: [_state._by_task(x, count) for count in (20, 2**31)])(tasks)
    np.testing.assert_array_equal(few[0], np.argsort(tasks, stable=True))
    chex.assert_trees_all_equal(few, many)


def test_each_task_is_written_once(monkeypatch):
    written, update = [], _state.sum_tree.update

    def recording(tree, moved, *arguments, **named):
        written.append(moved)
        return update(tree, moved, *arguments, **named)

    monkeypatch.setattr(_state.sum_tree, "update", recording)
    rng, counts, caps = seeds.rng("written once"), np.array([4], np.int32), np.array([[1, 1]], np.int32)

    @jax.jit
    def move(state, task, label):
        env, known = jnp.zeros(12, jnp.int32), jnp.ones(12, bool)
        state = _state.move(state, jnp.array(counts), jnp.array(caps), task, env, label, known)
        return state, written.pop()

    state = jax.jit(_state.arrange, static_argnums=3)(counts, caps, np.zeros(4, np.int32), ())
    for _ in range(4):
        state, tasks = move(state, *(rng.integers(0, most, 12).astype(np.int32) for most in (4, 3)))
        tasks = np.asarray(tasks)[np.asarray(tasks) < 4]
        assert 0 < len(tasks) == len(set(tasks.tolist()))


@pytest.mark.versions
@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"tasks_per_env": ()}, r"tasks_per_env=\(\)"),
        ({"tasks_per_env": 5}, r"tasks_per_env=5: must be a sequence"),
        ({"tasks_per_env": (3, -1)}, r"tasks_per_env\[1\]=-1: must be an integer from 0"),
        ({"tasks_per_env": (2**23, 2**23 + 1)}, "at most 16777216 tasks"),
        ({"env_ratios": (1, 2, 3)}, r"env_ratios=\(1, 2, 3\): must have one entry for each of 1"),
        ({"tasks_per_env": (2, 2, 2), "env_ratios": (1, None, None)}, r"env_ratios\[1\]=None: must be a finite"),
        ({"env_ratios": (0,)}, "at least one must be positive"),
        ({"env_names": "ab"}, "env_names='ab': must be a sequence"),
        ({"tasks_per_env": (1, 1), "env_names": ("a", "a")}, "must be distinct"),
        ({"easy": 0.1, "hard": 0.2}, r"easy_threshold=0.1: must be at least hard_threshold=0.2"),
        ({"easy": math.nan}, r"easy_threshold=nan: must be a finite number; or None"),
        ({"caps": (1.0, 0.0)}, r"max_easy_pool_fraction=1.0: must be < 1 - max_hard_pool_fraction=0.0"),
        ({"caps": (0.7, 0.3)}, "must be < 1 - max_hard_pool_fraction=0.3"),
        ({"caps": (-0.1, 0.3)}, r"max_easy_pool_fraction=-0.1: must be a number in \[0, 1\]"),
        ({"caps": (0.1, 1.3)}, r"max_hard_pool_fraction=1.3"),
    ],
)
def test_construction_errors(settings, message):
    rejects(message, make, **settings)
    assert make(easy=0.5, hard=0.5).easy_threshold == 0.5


@pytest.mark.versions
def test_argument_errors():
    pools, key = make((3, 2)), jax.random.key(0)
    state = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), jax.eval_shape(pools.init))  # nothing is compiled
    tasks, rewards = np.arange(2), np.ones((2, 3))
    update = functools.partial(pools.update, state, tasks, rewards)
    for call, message in (
        (lambda: pools.update(state, tasks[:, None], rewards), r"tasks: got int32\[2, 1\], expected a vector"),
        (lambda: pools.update(state, tasks * 1.0, rewards), r"tasks: got float32\[2\]"),
        (lambda: pools.update(state, tasks, rewards[0]), r"rewards: got float32\[3\].*rewards\[:, None\]"),
        (lambda: pools.update(state, tasks, np.ones((3, 2))), r"rewards: got float32\[3, 2\]"),
        (lambda: update(mask=np.ones(3, bool)), r"mask: got bool\[3\], expected bool\[2\]"),
        (lambda: update(mask=rewards), r"mask: got float32\[2, 3\], expected bool\[2, 3\]"),
        (lambda: make((4, 2)).update(state, tasks, rewards), r"tasks_per_env=\(4, 2\): this state has tasks \[5\]"),
        (lambda: make((5,)).sample(state, key, 1), "in 2 environments"),
        (lambda: pools.sample(stack(state), key, 1), "jax.vmap for a stack"),
        (lambda: pools.order(stack(state)), "jax.vmap for a stack"),
        (lambda: pools.remap(stack(state), "abcde", "abcde"), r"tasks \[1, 5\]; use"),
        (lambda: pools.remap(state, "abc", "abcde"), "old_keys: got 3 keys for 5 tasks"),
        (lambda: pools.remap(state, "abcde", "abc"), "new_keys: got 3 keys for 5 tasks"),
        (lambda: pools.sample(state, key, 0), r"n=0: must be an integer from 1"),
        (lambda: pools.recycle(state, key, easy_fraction=1.5), r"easy_fraction=1.5: must be a number in \[0, 1\]"),
        (lambda: pools.recycle(state, key, easy_fraction=0.5, hard_fraction=-1), r"hard_fraction=-1"),
    ):
        rejects(message.replace("int32", "int(32|64)").replace("float32", "float(32|64)"), call)
