"""Tasks: a curriculum over a fixed list of tasks, drawn in proportion to a score."""

import dataclasses
import functools
from collections.abc import Hashable, Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import struct
from jax.scipy.special import entr

from jaxreplay import sum_tree
from jaxreplay._common import calls, checks, layouts, random, ring, shown, xla
from jaxreplay.curricula import _task_lists
from jaxreplay.curricula.scores import Score, Thompson, learnability
from jaxreplay.sum_tree._tree import on_backend

LARGEST_SCORE = 1e6  # no sum of scores overflows
MANY_TRIALS = 2.0**22  # float32 counts up to 2^24 in steps of 1


@struct.dataclass
class TasksState(layouts.BackendState):
    """State of `jaxreplay.Tasks`, N tasks.

    Attributes:
      tree: a leaf per task, its score.
      successes: float32 [N], decayed sum of each task's rewards.
      trials: float32 [N], decayed number of its rollouts.
      last: int32 [N], number of updates before the update with its latest group; 0 if it has none.
      updates: int32 [], number of updates with a group; saturates at 2**31 - 1.
      rejected: int32 [], groups with a task that does not exist or a reward outside [0, 1]; saturates at 2**31 - 1.

    Examples:
      >>> state = tasks.init()
      >>> isinstance(state, jr.curricula.TasksState), state.trials.tolist()
      (True, [0.0, 0.0, 0.0, 0.0])
    """

    tree: sum_tree.SumTree
    successes: jax.Array  # [N]
    trials: jax.Array  # [N]
    last: jax.Array  # [N]
    updates: jax.Array  # []
    rejected: jax.Array  # []
    _layouts: ClassVar = {"tree": on_backend}


def _check_prior(name: str, value: Any) -> tuple[float, ...]:
    prior = tuple(value) if isinstance(value, Sequence) else (value,)
    if len(prior) != 2:
        raise ValueError(f"prior={value!r}: must be two numbers, successes and failures.")
    return tuple(float(checks.check_number(f"{name}[{i}]", prior[i], 1e-3, 1e6, "(1, 1) is uniform")) for i in range(2))


@checks.config
class Tasks(metaclass=shown.Kind):
    """Draws the tasks to train on, in proportion to a score of each task's successes and trials.

    It has the methods of `DifficultyPools`, so that either serves the same loop. An update counts the rewards of a
    task, computes its score, and writes the score into a sum tree. A draw of n tasks costs O(n log N).

    All methods raise a `ValueError` for an argument that is not as described, or for a state of another configuration.

    Attributes:
      num_tasks: N, 1 to 2**24. Tasks are numbered 0 to N - 1.
      score: function `(successes, trials, age) -> scores`: `learnability`, `uncertainty`, `failure`,
        `success_band(...)`, `pools(...)`, `thompson`, or your own. Scores are clipped to [0, 10^6]; NaN is 0.
      prior: successes and failures that are added to the counts of each task, both positive: the parameters of a Beta
        prior.
      decay: in (0, 1]; an update multiplies the counts of its tasks by it before it adds the new rewards, so that old
        rollouts count less as the policy changes.
      exploration: fraction of draws that are uniform over all tasks.
      refresh: number of further tasks, in turn, whose score each update computes anew; for scores that depend on `age`.
      online_difficulty_filtering: drop groups whose mean reward is exactly 0 or 1, which carry no learning signal.
      donate: donate the state when `update` is called eagerly.

    Examples:
      >>> tasks = jr.Tasks(num_tasks=3)
      >>> rewards = np.array([[1.0, 1.0], [0.0, 1.0]])
      >>> state, kept = tasks.update(tasks.init(), np.array([0, 1]), rewards)
      >>> tasks.success_rates(state).tolist()  # with the prior of one success and one failure
      [0.75, 0.5, 0.5]
      >>> drawn, ok = tasks.sample(state, jax.random.key(0), 8)
    """

    num_tasks: int = checks.field(checks.check_integer, 1, 2**24, "the number of tasks")
    score: Score = checks.field(checks.check_callable, "a function such as those of jr.scores", default=learnability)
    prior: tuple[float, float] = checks.field(_check_prior, default=(1.0, 1.0))
    decay: float = checks.field(checks.check_number, 1e-3, 1, "1 keeps all, 0.9 some ten updates", default=1.0)
    exploration: float = checks.field(checks.check_number, 0, 1, "the fraction of uniform draws", default=0.0)
    refresh: int = 0
    online_difficulty_filtering: bool = checks.field(checks.check_bool, "drop mean 0 and 1", default=False)
    donate: bool = True

    def _check_fields(self) -> None:
        checks.set_checked(self, "refresh", checks.check_integer, 0, self.num_tasks, "tasks scored anew in each update")

    @functools.partial(jax.jit, static_argnums=0)
    def init(self) -> TasksState:
        """State in which no task was tried.

        Examples:
          >>> float(jr.sum_tree.total(tasks.init().tree))  # four scores p (1 - p) with p = 1 / 2
          1.0
        """
        state = TasksState(
            tree=sum_tree.init(self.num_tasks),
            successes=xla.full((self.num_tasks,), 0, jnp.float32),
            trials=xla.full((self.num_tasks,), 0, jnp.float32),
            last=xla.full((self.num_tasks,), 0, jnp.int32),
            updates=xla.full((), 0, jnp.int32),
            rejected=xla.full((), 0, jnp.int32),
        )
        return self._scored(state, jnp.arange(self.num_tasks, dtype=jnp.int32))

    @calls.method(num_rows="n", static=("replacement",), before=_task_lists.task_arguments)
    def sample(
        self, state: TasksState, key: jax.Array, n: int, *, replacement: bool = True
    ) -> tuple[jax.Array, jax.Array]:
        """Draw tasks in proportion to their scores.

        Args:
          state: unchanged.
          key: a PRNG key.
          n: number of draws.
          replacement: False for different tasks: one draw after another by `probabilities`, in proportion to those of
            the tasks left. Tasks of probability 0 come last. Costs O(N).

        Returns:
          tasks, int32 [n]; and ok, bool [], False if all scores are 0: then the draw is uniform.

        Raises:
          ValueError: without replacement, `n` exceeds `num_tasks`, or the score is `Thompson`.

        Examples:
          >>> tasks = jr.Tasks(num_tasks=3, score=jr.scores.success_band(0.4, 0.6))
          >>> state, kept = tasks.update(tasks.init(), groups, rewards)
          >>> tasks.sample(state, key, 4)[0].tolist()  # nothing is known of task 2
          [2, 2, 2, 2]
        """
        total = sum_tree.total(state.tree)
        if not replacement and isinstance(self.score, Thompson):
            raise ValueError("replacement=False: Thompson draws each task on its own; use another score.")
        if not replacement:
            return _task_lists.distinct(key, self.probabilities(state), n), total > 0
        if isinstance(self.score, Thompson):
            return self._winners(self.score, state, key, n), total > 0
        words = random.random_bits(key, 2 * n)
        by_score, _ = sum_tree.sample_with(state.tree, tuple(x[:n] for x in words))
        evenly = random.random_integers(words, jnp.asarray(self.num_tasks, jnp.int32))[:n]
        coin = (words[0][n:] >> 8).astype(jnp.float32) * 2.0**-24
        return jnp.where((total > 0) & (coin >= self.exploration), by_score, evenly), total > 0

    def _winners(self, rule: Thompson, state: TasksState, key: jax.Array, n: int) -> jax.Array:
        """Winners of n draws, int32 [n]; the first candidate with probability `exploration`."""
        key, coin_key, choice_key = jax.random.split(key, 3)
        bits = random.random_bits(key, n * rule.candidates)
        drawn = random.random_integers(bits, jnp.asarray(self.num_tasks, jnp.int32)).reshape(n, rule.candidates)
        winner = rule.winner(choice_key, *self._counts(state, drawn))
        winner = jnp.where(jax.random.uniform(coin_key, (n,)) < self.exploration, 0, winner)
        return jnp.take_along_axis(drawn, winner[:, None], axis=1)[:, 0]

    def update(
        self, state: TasksState, tasks: jax.Array, rewards: jax.Array, *, mask: jax.Array | None = None
    ) -> tuple[TasksState, jax.Array]:
        """Count the rewards of groups of rollouts, and score their tasks anew.

        All groups of a task in one call count alike: `decay` is applied once. Sums of rewards that are not multiples of
        a power of two may differ in their last bit between runs on a GPU if a task occurs more than once.

        Args:
          state: donated when called eagerly (unless `donate=False`).
          tasks: int [G], the task of each group. Eager calls pad G and R to powers of two, so few programs are
            compiled; under `jax.jit` each new G or R compiles another program.
          rewards: number [G, R], the reward of each rollout, in [0, 1].
          mask: bool, True for groups [G], or rollouts [G, R], that exist; None for all.

        Returns:
          the state; and kept, bool [G], True for groups to train on. They have rollouts, and are neither rejected nor
          dropped by `online_difficulty_filtering`.

        Examples:
          >>> rewards = np.array([[1.0, 0.0], [2.0, 0.0]])  # 2 is not in [0, 1]
          >>> state, kept = tasks.update(tasks.init(), np.array([0, 1]), rewards)
          >>> kept.tolist(), state.trials.tolist(), int(state.rejected)
          ([True, False], [2.0, 0.0, 0.0, 0.0], 1)
        """
        return _task_lists.padded_update(self._update, state, tasks, rewards, mask)

    @calls.method(donates=True)
    def _update(self, state: TasksState, tasks: Any, rewards: Any, mask: Any) -> tuple[TasksState, jax.Array]:
        rollouts = jnp.sum(mask, axis=1, dtype=jnp.float32)
        total = jnp.sum(rewards, axis=1, where=mask)
        valid = jnp.all(~mask | ((rewards >= 0) & (rewards <= 1)), axis=1) & (tasks >= 0) & (tasks < self.num_tasks)
        known = (rollouts > 0) & valid
        kept = known & (total > 0) & (total < rollouts) if self.online_difficulty_filtering else known
        target = jnp.where(known, tasks, self.num_tasks)

        # Halved counts keep the rate, and further rollouts are not lost to rounding.
        scale = self.decay * jnp.where(_of(state.trials, target) > MANY_TRIALS, 0.5, 1.0)

        def counted(counts: jax.Array, more: jax.Array) -> jax.Array:
            return counts.at[target].set(scale * _of(counts, target), mode="drop").at[target].add(more, mode="drop")

        turn = (state.updates % -(-self.num_tasks // max(self.refresh, 1))) * self.refresh
        scored = jnp.concatenate([target, turn + jnp.arange(self.refresh, dtype=jnp.int32)])
        state = dataclasses.replace(
            state,
            successes=counted(state.successes, total),
            trials=counted(state.trials, rollouts),
            last=state.last.at[target].set(state.updates, mode="drop"),
            updates=ring.saturating_add(state.updates, jnp.any(known).astype(jnp.int32)),
            rejected=ring.saturating_add(state.rejected, jnp.sum((rollouts > 0) & ~valid, dtype=jnp.int32)),
        )
        return self._scored(state, scored), kept

    def _scored(self, state: TasksState, tasks: jax.Array) -> TasksState:
        """The state with the scores of `tasks` (int32 [B]; those outside [0, N) are ignored) in the tree."""
        scores = jnp.asarray(self.score(*self._counts(state, tasks)), jnp.float32)
        scores = jnp.clip(jnp.where(jnp.isnan(scores), 0.0, scores), 0.0, LARGEST_SCORE)
        return dataclasses.replace(state, tree=sum_tree.update(state.tree, tasks, scores))

    def _counts(self, state: TasksState, tasks: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Successes and trials with the prior, float32 [...], and ages, int32 [...], of `tasks` (int32 [...])."""
        won, lost = self.prior
        age = jnp.maximum(state.updates - 1 - _of(state.last, tasks), 0)  # 0 of all before the first update
        return _of(state.successes, tasks) + won, _of(state.trials, tasks) + (won + lost), age

    @calls.method()
    def success_rates(self, state: TasksState) -> jax.Array:
        """Mean success rate of each task, prior included, float32 [N].

        Examples:
          >>> state, kept = tasks.update(tasks.init(), groups, rewards)
          >>> tasks.success_rates(state).tolist()
          [0.75, 0.25, 0.5, 0.5]
        """
        won, lost = self.prior
        return (state.successes + won) / (state.trials + (won + lost))

    @calls.method()
    def probabilities(self, state: TasksState) -> jax.Array:
        """Probability of each task in a draw, float32 [N]; with `Thompson`, the probability of being a candidate.

        Examples:
          >>> tasks.probabilities(tasks.init()).tolist()
          [0.25, 0.25, 0.25, 0.25]
        """
        scores, total = sum_tree.leaves(state.tree), sum_tree.total(state.tree)
        evenly = jnp.float32(1 / self.num_tasks)
        by_score = jnp.where(total > 0, scores / jnp.where(total > 0, total, 1.0), evenly)
        return (1 - self.exploration) * by_score + self.exploration * evenly

    @calls.method()
    def metrics(self, state: TasksState) -> dict[str, jax.Array]:
        """Numbers of a state for logging, float32 [] by name.

        `tried`: fraction of tasks with a trial. `success`: mean success rate of these, without the prior.
        `perplexity`: exp(entropy) of a draw over N: 1 for uniform draws, 1 / N if one task has all the score.

        Examples:
          >>> state, kept = tasks.update(tasks.init(), groups, rewards)
          >>> float(tasks.metrics(state)["tried"]), float(tasks.metrics(state)["success"])
          (0.5, 0.5)
        """
        tried = state.trials > 0
        count = jnp.sum(tried, dtype=jnp.float32)
        return {
            "tried": count / self.num_tasks,
            "success": jnp.sum(state.successes / jnp.where(tried, state.trials, 1.0)) / jnp.maximum(count, 1.0),
            "perplexity": jnp.exp(jnp.sum(entr(self.probabilities(state)))) / self.num_tasks,
        }

    def remap(self, state: TasksState, old_keys: Sequence[Hashable], new_keys: Sequence[Hashable]) -> TasksState:
        """Convert a state to another list of tasks, or another configuration.

        A task keeps its counts and its age, and all tasks are scored anew. If a key occurs more than once, its first
        old task becomes its first new one, and so on. Costs O(N).

        Args:
          state: from any configuration, for tasks with `old_keys`.
          old_keys: a key for each task of `state`, such as one from `task_key`, known on the host.
          new_keys: a key for each task of this configuration.

        Raises:
          ValueError: there is not one key per task, or `state` is a stack of states.

        Examples:
          >>> state, kept = tasks.update(tasks.init(), groups, rewards)
          >>> tasks.remap(state, old_keys="abcd", new_keys="dcba").trials.tolist()
          [0.0, 0.0, 2.0, 2.0]
        """
        return self._remap(state, _task_lists.old_task_of_each(state.trials, old_keys, new_keys, self.num_tasks))

    @calls.method()
    def _remap(self, old: TasksState, source: Any) -> TasksState:
        """See `remap`; source: int32 [N], each task's number in `old`, or the number of tasks there if it is new."""
        counts = {x: _of(getattr(old, x), source) for x in ("successes", "trials", "last")}
        new = dataclasses.replace(old, tree=sum_tree.init(self.num_tasks, fanout=old.tree.fanout), **counts)
        return self._scored(new, jnp.arange(self.num_tasks, dtype=jnp.int32))

    def _check_state(self, state: TasksState) -> None:
        """Raise a `ValueError` if `state` is for another number of tasks."""
        checks.check_state(self, state, TasksState)
        shape = jnp.shape(state.trials)
        if shape != (self.num_tasks,):
            raise ValueError(f"num_tasks={self.num_tasks}: this state has tasks {[*shape]}; remap it, or vmap a stack.")


def _of(values: jax.Array, tasks: jax.Array) -> jax.Array:
    """`values` [N] of `tasks` (int32 [...]), [...]; 0 for those outside [0, N)."""
    return values.at[tasks].get(mode="fill", fill_value=0)
