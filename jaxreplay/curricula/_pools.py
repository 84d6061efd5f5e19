"""DifficultyPools: a curriculum over a fixed list of tasks; it parks tasks that are always or never solved.

These are the difficulty pools of prime-rl (its pull request 2667) as pure functions. A draw, and a group of an update,
cost O(log N) each.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxreplay import sum_tree
from jaxreplay._common import calls, checks, random, ring, shown, xla
from jaxreplay.curricula import _pool_state, _task_lists
from jaxreplay.curricula._pool_state import PoolsState, sum_before

NORMAL, EASY, HARD = range(3)
MAX_TASKS = 2**24  # the sum tree counts them in float32


def _reject_empty(_: Any, __: Any, drawn: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
    if not xla.is_traced(drawn[1]) and not xla.on_host(drawn[1]):
        raise ValueError("No environments left with examples. Normal is empty; recycle moves parked tasks back.")
    return drawn


def _each(name: str, value: Any, check: Callable[..., Any], *rule: Any) -> tuple[Any, ...]:
    """A tuple with one entry for each environment, as `check(name, entry, *rule)` returns it."""
    if isinstance(value, str | bytes) or not isinstance(value, Iterable):
        raise ValueError(f"{name}={value!r}: must be a sequence, one entry for each environment.")
    return tuple(check(f"{name}[{i}]", entry, *rule) for i, entry in enumerate(value))


def _threshold() -> Any:
    return checks.field(checks.optional(checks.check_number), -math.inf, math.inf, "or None", default=None)


@checks.config
class DifficultyPools(metaclass=shown.Kind):
    """Draws the tasks to train on: those that are sometimes solved.

    A group is a set of rollouts of one task. Their mean reward labels the group easy (`>= easy_threshold`), else hard
    (`<= hard_threshold`), else normal. Tasks are drawn from normal alone. They move:

    | event | pool | what happens |
    | --- | --- | --- |
    | a group labelled easy or hard | normal | its task moves to the end of the label's pool |
    | any group | easy, hard | its task stays |
    | a pool exceeds its cap | easy, hard | its oldest task moves to the end of normal |

    Normal is never empty. Without thresholds no task is parked. Tasks are numbered 0 to N - 1, one environment after
    the other. Thresholds and rewards are compared in float32.

    All methods raise a `ValueError` for an argument that is not as described, or for a state of another configuration.

    Attributes:
      tasks_per_env: number of tasks of each environment; at most 2**24 in all.
      env_ratios: relative frequencies at which environments are drawn; None for their numbers of tasks.
      easy_threshold: None labels no group easy.
      hard_threshold: None labels no group hard.
      max_easy_pool_fraction: cap of easy, as a fraction of an environment's tasks; rounded down to whole tasks.
      max_hard_pool_fraction: the same for hard; both sum to less than 1.
      online_difficulty_filtering: drop groups whose mean reward is exactly 0 or 1, which carry no learning signal.
      env_names: names of the environments in the metrics; None for "0", "1", ...
      donate: donate the state when `update` is called eagerly. The update is then in place, and its cost hardly grows
        with the number of tasks.

    Examples:
      >>> thresholds = {"easy_threshold": 0.9, "hard_threshold": 0.1}
      >>> pools = jr.DifficultyPools(tasks_per_env=(4,), **thresholds)
      >>> rewards = np.array([[1.0, 1.0], [0.0, 1.0]])
      >>> state, kept = pools.update(pools.init(), np.array([0, 1]), rewards)
      >>> pools.pool_of(state).tolist()  # task 0 is always solved, and parked in easy
      [1, 0, 0, 0]
    """

    tasks_per_env: Sequence[int] = checks.field(_each, checks.check_integer, 0, MAX_TASKS, "the number of tasks")
    env_ratios: Sequence[float] | None = checks.field(
        checks.optional(_each), checks.check_number, 0, math.inf, "give all, or env_ratios=None", default=None
    )
    easy_threshold: float | None = _threshold()
    hard_threshold: float | None = _threshold()
    max_easy_pool_fraction: float = checks.field(checks.check_number, 0, 1, "a share of the tasks", default=0.5)
    max_hard_pool_fraction: float = checks.field(checks.check_number, 0, 1, "a share of the tasks", default=0.4)
    online_difficulty_filtering: bool = False
    env_names: Sequence[str] | None = checks.field(checks.optional(_each), lambda _, name: name, default=None)
    donate: bool = True

    def _check_fields(self) -> None:
        if not self.tasks_per_env or self.num_tasks > MAX_TASKS:
            raise ValueError(f"tasks_per_env={self.tasks_per_env}: needs 1 number or more, at most {MAX_TASKS} tasks.")
        for name in ("env_ratios", "env_names"):
            if (value := getattr(self, name)) is not None and len(value) != len(self.tasks_per_env):
                raise ValueError(f"{name}={value}: must have one entry for each of {len(self.tasks_per_env)} envs.")
        if self.env_ratios is not None and sum(self.env_ratios) == 0:
            raise ValueError(f"env_ratios={self.env_ratios}: at least one must be positive.")
        if self.env_names is not None and len({*self.env_names}) < len(self.env_names):
            raise ValueError(f"env_names={self.env_names}: must be distinct.")
        easy, hard = self.easy_threshold, self.hard_threshold
        if easy is not None and hard is not None and easy < hard:
            raise ValueError(f"easy_threshold={easy}: must be at least hard_threshold={hard}; raise it.")
        easy, hard = self.max_easy_pool_fraction, self.max_hard_pool_fraction
        if easy + hard >= 1:
            raise ValueError(f"max_easy_pool_fraction={easy}: must be < 1 - max_hard_pool_fraction={hard}; lower one.")

    @property
    def num_tasks(self) -> int:
        """N, the number of tasks."""
        return sum(self.tasks_per_env)

    @property
    def caps(self) -> tuple[tuple[int, int], ...]:
        """Largest numbers of tasks in easy and in hard, for each environment."""
        caps = []
        for count in self.tasks_per_env:
            # If the sum of the fractions rounds to below 1, their floors can still leave no task in normal.
            room = max(count - 1, 0)
            easy = min(math.floor(count * self.max_easy_pool_fraction), room)
            caps.append((easy, min(math.floor(count * self.max_hard_pool_fraction), room - easy)))
        return tuple(caps)

    @property
    def _sizes(self) -> tuple[jax.Array, jax.Array]:
        """`tasks_per_env`, int32 [E], and `caps`, int32 [E, 2]."""
        return jnp.array(self.tasks_per_env, jnp.int32), jnp.array(self.caps, jnp.int32)

    @functools.partial(jax.jit, static_argnums=0)
    def init(self) -> PoolsState:
        """State with all tasks in the normal pool, in order of their numbers.

        Examples:
          >>> pools.pool_of(pools.init()).tolist()
          [0, 0, 0, 0]
        """
        return _pool_state.arrange(*self._sizes, jnp.zeros(self.num_tasks, jnp.int32), ())

    @calls.method(num_rows="n", static=("replacement",), before=_task_lists.task_arguments, after=_reject_empty)
    def sample(
        self, state: PoolsState, key: jax.Array, n: int, *, replacement: bool = True
    ) -> tuple[jax.Array, jax.Array]:
        """Draw tasks from normal: an environment with tasks there by `env_ratios`, then a task.

        Args:
          state: unchanged.
          key: a PRNG key.
          n: number of draws.
          replacement: False for different tasks: one draw after another, in proportion to the probabilities of those
            left. If there are fewer than n, the last rows are -1. Costs O(N).

        Returns:
          tasks, int32 [n], all -1 if there is no task to draw; and ok, bool [], False in that case.

        Raises:
          ValueError: there is no task to draw and the call is eager, which waits for the device to check this; under
            `jit` check `ok`. Or `n` exceeds `num_tasks` without replacement.

        Examples:
          >>> state, kept = pools.update(pools.init(), groups, rewards)
          >>> drawn, ok = pools.sample(state, key, 16)
          >>> sorted(set(drawn.tolist())), bool(ok)  # task 0 is parked in easy and 1 in hard
          ([2, 3], True)
        """
        ratios = np.asarray(self.tasks_per_env if self.env_ratios is None else self.env_ratios, np.float64)
        shares, sizes = jnp.asarray(ratios / max(ratios.max(), 1), jnp.float32), state.sizes[:, NORMAL]
        envs = sum_tree.of_leaves(jnp.where(sizes > 0, shares, 0.0), fanout=state.normal.fanout)
        ok = sum_tree.total(envs) > 0
        if not replacement:
            env = _pool_state.env_of(jnp.arange(self.num_tasks, dtype=jnp.int32), self._sizes[0])
            each = sum_tree.leaves(envs) / jnp.maximum(sizes, 1).astype(jnp.float32)
            mass = jnp.where(state.pool == NORMAL, each[env], 0.0)
            tasks = _task_lists.distinct(key, mass, n)
            return jnp.where(mass[tasks] > 0, tasks, -1), ok
        env_key, rank_key = jax.random.split(key)
        env, _ = sum_tree.sample_with(envs, random.random_bits(env_key, n))
        rank = random.random_integers(random.random_bits(rank_key, n), jnp.maximum(sizes[env], 1))
        return jnp.where(ok, sum_tree.find(state.normal, rank + sum_before(sizes)[env]), -1), ok

    def update(
        self, state: PoolsState, tasks: jax.Array, rewards: jax.Array, *, mask: jax.Array | None = None
    ) -> tuple[PoolsState, jax.Array]:
        """Process groups of rollouts in order.

        A group whose task does not exist or whose mean reward is not finite only increments the counter `rejected`.

        Args:
          state: donated when called eagerly (unless `donate=False`).
          tasks: int [G], the task of each group; a task may occur more than once. Eager calls pad G and R to powers of
            two, so few programs are compiled; under `jax.jit` each new G or R compiles another program.
          rewards: number [G, R], the reward of each rollout.
          mask: bool, True for groups [G], or rollouts [G, R], that exist; None for all. A group without rollouts has no
            effect.

        Returns:
          the state; and kept, bool [G], True for groups to train on. They have rollouts, and are neither rejected nor
          dropped by `online_difficulty_filtering`.

        Examples:
          >>> rewards = np.array([[jnp.nan, 1.0], [0.0, 0.0]])
          >>> state, kept = pools.update(pools.init(), np.array([0, 1]), rewards)
          >>> # NaN is rejected; task 1 is hard.
          >>> kept.tolist(), int(state.rejected), pools.pool_of(state).tolist()
          ([False, True], 1, [0, 2, 0, 0])
        """
        return _task_lists.padded_update(self._update, state, tasks, rewards, mask)

    @calls.method(donates=True)
    def _update(self, state: PoolsState, tasks: Any, rewards: Any, mask: Any) -> tuple[PoolsState, jax.Array]:
        rollouts = jnp.sum(mask, axis=1, dtype=jnp.int32)
        total = jnp.sum(rewards, axis=1, where=mask)
        known = (rollouts > 0) & (tasks >= 0) & (tasks < self.num_tasks) & jnp.isfinite(total)
        rejected = ring.saturating_add(state.rejected, jnp.sum((rollouts > 0) & ~known, dtype=jnp.int32))
        if self.num_tasks == 0 or rewards.size == 0:
            return dataclasses.replace(state, rejected=rejected), known
        tasks = jnp.where(known, tasks, 0).astype(jnp.int32)
        tasks_per_env, caps = self._sizes
        env = _pool_state.env_of(tasks, tasks_per_env)

        def total_at(threshold, otherwise):  # the total at which the mean is the threshold; a division would round
            totals = (otherwise if threshold is None else threshold) * np.arange(1, rewards.shape[1] + 1)
            return jnp.asarray(totals, jnp.float32)[jnp.maximum(rollouts - 1, 0)]

        easy, hard = total_at(self.easy_threshold, math.inf), total_at(self.hard_threshold, -math.inf)
        label = jnp.where(total >= easy, EASY, jnp.where(total <= hard, HARD, NORMAL))
        filtered = jnp.where(total == rollouts.astype(jnp.float32), EASY, jnp.where(total == 0, HARD, NORMAL))
        if not self.online_difficulty_filtering:
            filtered = jnp.zeros_like(filtered)

        def count(counts, pool, more):
            found = _pool_state.spread(3 * env + pool, known, counts.size) * more
            return ring.saturating_add(counts, jnp.sum(found, axis=0, dtype=jnp.int32).reshape(counts.shape))

        labelled, filtered_rollouts = count(state.groups, label, 1), count(state.rollouts, filtered, rollouts[:, None])
        state = dataclasses.replace(state, groups=labelled, rollouts=filtered_rollouts, rejected=rejected)
        state = _pool_state.move(state, tasks_per_env, caps, tasks, env, label, known)
        return state, known & (filtered == NORMAL)

    def pool_of(self, state: PoolsState) -> jax.Array:
        """Each task's pool, int32 [N]: 0 normal, 1 easy, 2 hard.

        Examples:
          >>> state, kept = pools.update(pools.init(), groups, rewards)
          >>> pools.pool_of(state).tolist()
          [1, 2, 0, 0]
        """
        return state.pool.astype(jnp.int32)

    @calls.method()
    def order(self, state: PoolsState) -> jax.Array:
        """Rank of each task in its pool by order of entry, int32 [N]: 0 for the oldest. Costs O(N log N).

        Examples:
          >>> state, kept = pools.update(pools.init(), np.array([1, 0]), np.ones((2, 1)))
          >>> pools.order(state).tolist()  # task 1 entered easy before task 0 did
          [1, 0, 0, 1]
        """
        return _pool_state.order(state)

    @calls.method()
    def metrics(self, state: PoolsState) -> dict[str, jax.Array]:
        """Fractions for logging, float32 [] by name, over all environments and for each `env`; 0 without counts.

        `evicted_examples[/env]/easy`, `.../hard`: groups since `reset_metrics` with this label.
        `filtered_rollouts[/env]/easy`, `.../hard`: rollouts since then that were dropped for a mean of 1, or 0.
        `pool[/env]/easy`, `.../normal`, `.../hard`: tasks in the pool.

        Examples:
          >>> state, kept = pools.update(pools.init(), groups, rewards)
          >>> numbers = pools.metrics(state)
          >>> float(numbers["pool/easy"]), float(numbers["evicted_examples/easy"])
          (0.25, 0.5)
        """
        names = self.env_names or tuple(map(str, range(len(self.tasks_per_env))))
        all_counts = {"evicted_examples": state.groups, "filtered_rollouts": state.rollouts, "pool": state.sizes}
        shares = {}
        for prefix, envs in (("", slice(None)), *((f"/{name}", slice(e, e + 1)) for e, name in enumerate(names))):
            for metric, counts in all_counts.items():
                counts = jnp.sum(counts[envs].astype(jnp.float32), axis=0)
                share = counts / jnp.maximum(jnp.sum(counts), 1.0)
                shares |= {f"{metric}{prefix}/easy": share[EASY], f"{metric}{prefix}/hard": share[HARD]}
                if metric == "pool":
                    shares[f"pool{prefix}/normal"] = share[NORMAL]
        return shares

    def reset_metrics(self, state: PoolsState) -> PoolsState:
        """Reset the counts of groups and rollouts to 0.

        Examples:
          >>> state, kept = pools.update(pools.init(), groups, rewards)
          >>> float(pools.metrics(pools.reset_metrics(state))["evicted_examples/easy"])
          0.0
        """
        return dataclasses.replace(state, **_zeros_like({"groups": state.groups, "rollouts": state.rollouts}))

    def recycle(
        self, state: PoolsState, key: jax.Array, *, easy_fraction: float = 0.0, hard_fraction: float = 0.0
    ) -> PoolsState:
        """Move random tasks from easy and hard back to normal, and bring both pools within their caps.

        Use it when a run is resumed: `state` may come from other thresholds or fractions. From each pool
        round(size * fraction) tasks move (halves round to even), then the oldest tasks above the cap. Easy tasks enter
        normal first, each pool from its oldest. Costs O(N log N). Fractions are numbers in [0, 1].

        Examples:
          >>> state, kept = pools.update(pools.init(), groups, rewards)
          >>> state = pools.recycle(state, key, hard_fraction=1.0)
          >>> pools.pool_of(state).tolist()  # task 1 gets another chance
          [1, 0, 0, 0]
        """
        for name, fraction in (("easy_fraction", easy_fraction), ("hard_fraction", hard_fraction)):
            checks.check_number(name, fraction, 0, 1, "the fraction of the pool that returns to normal")
        counts = np.outer([0.0, easy_fraction, hard_fraction], np.arange(max(self.tasks_per_env) + 1))  # in float64
        return self._recycle(state, key, np.round(counts).astype(np.int32))

    @calls.method()
    def _recycle(self, state: PoolsState, key: jax.Array, counts: Any) -> PoolsState:
        """See `recycle`; counts: int32 [3, max size + 1], number of tasks that move, by pool and its size."""
        env, pool = _pool_state.pools_of(state)
        at_random, _ = _pool_state.ranks(3 * env + pool, state.sizes.size, *random.random_bits(key, self.num_tasks))
        returns = at_random < counts[pool, state.sizes[env, pool]]
        keys = jnp.where(returns, pool, 0), _pool_state.order(state)
        new = _pool_state.arrange(*self._sizes, jnp.where(returns, 0, pool), keys, state.normal.fanout)
        return dataclasses.replace(new, groups=state.groups, rollouts=state.rollouts, rejected=state.rejected)

    def remap(self, state: PoolsState, old_keys: Sequence[Hashable], new_keys: Sequence[Hashable]) -> PoolsState:
        """Convert a state to another list of tasks, or another configuration.

        A task keeps its pool and its rank in it, even if its environment changes. New tasks enter normal after the old
        ones. Then every pool is brought within its cap. If a key occurs more than once, its first old task becomes its
        first new one, and so on. The metrics are reset. Costs O(N log N).

        Args:
          state: from any configuration, for tasks with `old_keys`.
          old_keys: a key for each task of `state`, such as one from `task_key`, known on the host.
          new_keys: a key for each task of this configuration.

        Raises:
          ValueError: there is not one key per task, or `state` is a stack of states.

        Examples:
          >>> state, kept = pools.update(pools.init(), groups, rewards)
          >>> pools.pool_of(pools.remap(state, old_keys="abcd", new_keys="dcba")).tolist()
          [0, 0, 2, 1]
        """
        return self._remap(state, _task_lists.old_task_of_each(state.pool, old_keys, new_keys, self.num_tasks))

    @calls.method()
    def _remap(self, old: PoolsState, source: Any) -> PoolsState:
        """See `remap`; source: int32 [N], each task's number in `old`, or the number of tasks there if it is new."""
        env, pool = _pool_state.pools_of(old)

        def of_source(values, otherwise):
            return values.at[source].get(mode="fill", fill_value=otherwise)

        keys = of_source(env, old.sizes.shape[0]), of_source(_pool_state.order(old), 0)
        new = _pool_state.arrange(*self._sizes, of_source(pool, NORMAL), keys, old.normal.fanout)
        return dataclasses.replace(new, rejected=old.rejected)

    def _check_state(self, state: PoolsState) -> None:
        """Raise a `ValueError` if `state` is for other numbers of tasks or environments."""
        checks.check_state(self, state, PoolsState)
        if state.pool.shape != (self.num_tasks,) or state.sizes.shape[0] != len(self.tasks_per_env):
            found = f"this state has tasks {[*state.pool.shape]} in {state.sizes.shape[0]} environments"
            raise ValueError(f"tasks_per_env={self.tasks_per_env}: {found}; remap it, or use jax.vmap for a stack.")


_zeros_like = jax.jit(lambda tree: jax.tree.map(jnp.zeros_like, tree))  # eagerly, a 0 would be sent to the device
