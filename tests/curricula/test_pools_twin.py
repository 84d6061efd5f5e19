"""DifficultyPools do in random operations what their twin does: updates, recycling, other lists of tasks."""

import collections
import dataclasses

import jax
import numpy as np
import pytest
import seeds
from helpers import check_happened
from oracles import PoolsTwin
from test_difficulty_pools import lists, make, random_updates

from jaxreplay.curricula import _pool_state as _state

GROUPS, ROLLOUTS = 12, 3
KINDS = ["update"] * 14 + ["recycle"] * 3 + ["remap"] * 2 + ["reset"]


class CountingTwin(PoolsTwin):
    """Counts what moves where."""

    def __init__(self, happened, config):
        super().__init__(**{"easy": 0.9, "hard": 0.1} | config)
        self.happened = happened

    def where(self):
        return {task: name for env in self.pools for name, tasks in env.items() for task in tasks}

    def _bring_under_cap(self, env, label):
        before = len(self.pools[env][label])
        super()._bring_under_cap(env, label)
        self.happened["evicted by a cap"] += before - len(self.pools[env][label])

    def remap(self, other, old_keys, new_keys):
        """Take over the tasks of another twin."""
        places, found = collections.defaultdict(collections.deque), {}
        where = {
            task: (env, rank, name)
            for env, pools in enumerate(other.pools)
            for name, tasks in pools.items()
            for rank, task in enumerate(tasks)
        }
        for task, key in enumerate(old_keys):
            places[key].append(where[task])
        for task, key in enumerate(new_keys):
            found[task] = places[key].popleft() if places[key] else (len(other.pools), 0, "normal")
        for pools in self.pools:
            tasks = sorted(task for of in pools.values() for task in of)
            for name in self.POOLS:
                pools[name] = sorted((t for t in tasks if found[t][2] == name), key=lambda t: (*found[t][:2], t))
        self.happened["tasks remapped"] += sum(env < len(other.pools) for env, *_ in found.values())
        self.happened["tasks remapped that are parked"] += sum(name != "normal" for *_, name in found.values())
        self.happened["new tasks"] += sum(env == len(other.pools) for env, *_ in found.values())
        self.bring_under_caps()
        self.reset_metrics()

    def recycle(self, after):
        """Take over which tasks went back, as a key has chosen them; where they go is checked by the caller."""
        for pools, new in zip(self.pools, after, strict=True):
            for name in ("easy", "hard"):
                returned = [task for task in pools[name] if task not in new[name]]
                pools[name] = [task for task in pools[name] if task in new[name]]
                pools["normal"] += returned
                self.happened["recycled"] += len(returned)


@jax.jit
def late(state):
    """A state like this one whose fifth entry from now on is number 0, or 2^31 in the easy pools: they wrap.

    When a task entered the normal pool does not matter, and was long ago.
    """
    env, pool = _state.pools_of(state)
    shift, ago = state.entered + np.uint32([5, 2**31 + 5, 5]), (pool == 0).astype(np.uint32) * np.uint32(2**31)
    return dataclasses.replace(state, entry=state.entry - shift[env, pool] - ago, entered=state.entered - shift)


def random_run(num_operations, seed=seeds.SEED):
    """Operations on pools that change from one configuration to the other and back."""
    rng, happened = seeds.rng("pools", "parked", seed=seed), collections.Counter()
    both = [make(**config) for config in CONFIGS]
    which, kinds = 0, []
    pools, config = both[0], CONFIGS[0]
    state, twin, keys, rejected = late(pools.init()), CountingTwin(happened, config), list(range(pools.num_tasks)), 0
    for number in range(num_operations):
        kinds = kinds or rng.permutation(KINDS).tolist()
        kind = kinds.pop()
        happened[kind] += 1
        if kind == "update":
            (tasks,), (rewards,), (mask,) = random_updates(rng, pools.num_tasks, 1, GROUPS, ROLLOUTS)
            if rng.random() < 0.3:
                rewards[rng.integers(GROUPS)] = rng.choice([np.nan, np.inf])
            given = [rewards[g][mask[g]].tolist() for g in range(GROUPS)]
            pairs = list(zip(tasks.tolist(), given, strict=True))
            before = twin.where()
            expected = twin.update(pairs)
            after = twin.where()
            happened.update(f"{before[task]} to {after[task]}" for task in before if before[task] != after[task])
            state, kept = pools.update(state, tasks, rewards, mask=mask)
            np.testing.assert_array_equal(kept, expected)
            known = [0 <= task < pools.num_tasks and np.all(np.isfinite(x)) for task, x in pairs]
            rejected += sum(len(x) > 0 and not good for x, good in zip(given, known, strict=True))
            happened["groups of unknown tasks"] += sum(len(x) > 0 and task not in before for task, x in pairs)
            happened["groups that are not finite"] += sum(not np.all(np.isfinite(x)) for x in given)
            whole = zip(given, known, expected, strict=True)
            happened["groups filtered"] += sum(len(x) > 0 and good and not kept for x, good, kept in whole)
            happened["rows of a task that came before"] += GROUPS - len(set(tasks.tolist()))
            happened["groups without rollouts"] += sum(not x for x in given)
        elif kind == "recycle":
            parts = {"easy": float(rng.choice([0, 0.3, 0.5, 1])), "hard": float(rng.choice([0, 0.3, 0.5, 1]))}
            before = [{name: len(tasks) for name, tasks in env.items()} for env in twin.pools]
            fractions = {f"{name}_fraction": part for name, part in parts.items()}
            state = pools.recycle(state, jax.random.key(number), **fractions)
            after = lists(pools, state)
            for env, sizes in zip(after, before, strict=True):
                assert all(sizes[name] - len(env[name]) == round(sizes[name] * part) for name, part in parts.items())
            twin.recycle(after)
        elif kind == "remap":
            which = which if happened["remap"] % 3 == 0 else 1 - which  # now and then the same one
            old, pools, config = twin, both[which], CONFIGS[which]
            new_keys = rng.choice(max(len(keys), pools.num_tasks) + 5, pools.num_tasks).tolist()  # some twice
            twin = CountingTwin(happened, config)
            twin.remap(old, keys, new_keys)
            state, keys = late(pools.remap(state, keys, new_keys)), new_keys
        else:
            state = pools.reset_metrics(state)
            twin.reset_metrics()
        assert lists(pools, state) == twin.pools  # with all that the state must keep
        assert state.rejected == rejected
        metrics = pools.metrics(state)
        expected = twin.metrics([str(e) for e in range(len(pools.tasks_per_env))])
        assert expected.keys() <= metrics.keys()
        for name, value in metrics.items():
            np.testing.assert_allclose(value, expected.get(name, 0), atol=1e-6, err_msg=name)
        tasks, ok = pools.sample(state, jax.random.key(number), 16)
        assert ok
        assert {*tasks.tolist()} <= {task for env in twin.pools for task in env["normal"]}
    return happened


LEAST = {  # in a hundred operations
    "normal to easy": 25,
    "normal to hard": 20,
    "evicted by a cap": 20,
    "recycled": 10,
    "groups of unknown tasks": 10,
    "groups that are not finite": 8,
    "groups without rollouts": 20,
    "groups filtered": 20,
    "rows of a task that came before": 60,
    "tasks remapped": 40,
    "tasks remapped that are parked": 8,
    "new tasks": 20,
    "reset": 1,
}
CONFIGS = (  # from one to the other and back
    {"tasks_per_env": [1, 12, 2, 9], "caps": (0.29, 0.2), "online_difficulty_filtering": True},
    {"tasks_per_env": [6, 11], "caps": (0.1, 0.5), "easy": 0.6, "hard": 0.3},
)


def test_pools_do_what_their_twin_does():
    check_happened(random_run(60), LEAST, 60)


@pytest.mark.slow
def test_long_runs_with_a_new_seed():
    check_happened(random_run(600, seed=seeds.fresh()), LEAST, 600)
