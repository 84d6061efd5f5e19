"""Which choice among 200 tasks lets a simulated solver solve the most? It learns from those it sometimes solves.

Draws by a score solve nearly all; difficulty pools end where uniform draws do, unless hard tasks come back.

pip install -e '.[examples]'
python examples/studies/curriculum.py           # all tasks; two kinds of pools; two scores
python examples/studies/curriculum.py --short   # a few seconds, to see that it runs

The solver solves a task of difficulty d with probability sigmoid(skill - d), with one skill for each of two
environments. It learns from a group of rollouts in proportion to the variance of the rewards. A group with equal
rewards teaches it nothing, as with group-relative advantages (Shao et al. 2024, DeepSeekMath, section 4.1).

`Tasks` draws by a score: "learnability" is the variance of the rewards, and "Thompson" draws a rate of success from its
posterior. Both solve nearly all tasks, 0.989 [0.989, 0.990] and 0.996 [0.996, 0.996]. `DifficultyPools` end where
uniform draws of all tasks do, 0.764 [0.760, 0.767] and 0.768 [0.766, 0.770], unless half of the hard pool goes back
every 100 updates: 0.948 [0.946, 0.950].
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from experiment import Parser, plot, report

import jaxreplay as jr

TASKS_PER_ENV = (120, 80)
DIFFICULTY = np.concatenate([np.linspace(-4, 12, count) for count in TASKS_PER_ENV])
ENV = np.repeat([0, 1], TASKS_PER_ENV)
GROUPS, ROLLOUTS, RATE = 16, 8, 0.05
INTERVAL = 100  # updates between two recyclings


# Difficulty pools; without thresholds all tasks stay in normal.
ALL_TASKS = jr.DifficultyPools(tasks_per_env=TASKS_PER_ENV, online_difficulty_filtering=True)
WITH_POOLS = dataclasses.replace(ALL_TASKS, easy_threshold=0.9, hard_threshold=0.1)
SCORED = jr.Tasks(num_tasks=len(ENV), decay=0.9, exploration=0.1, online_difficulty_filtering=True)
CURRICULA = {  # how tasks are drawn, and the fraction of the hard pool moved back to normal every `INTERVAL` updates
    "all tasks": (ALL_TASKS, 0.0),
    "pools": (WITH_POOLS, 0.0),
    "pools, recycled": (WITH_POOLS, 0.5),
    "learnability": (SCORED, 0.0),
    "Thompson": (dataclasses.replace(SCORED, score=jr.scores.thompson), 0.0),
}


def train(tasks: jr.DifficultyPools | jr.Tasks, recycled: float, steps: int, key: jax.Array) -> dict[str, jax.Array]:
    """Train one seed for `steps` updates, a multiple of `INTERVAL`. Returns numbers after each update, [steps].

    The skill is the mean over the environments, and "solved" the probability of solving a task, over all tasks. "kept"
    is the share of groups that were kept.
    """
    difficulty, env = jnp.asarray(DIFFICULTY, jnp.float32), jnp.asarray(ENV)

    def update(carry: tuple, _: None) -> tuple[tuple, dict[str, jax.Array]]:
        state, skill, key = carry
        key, draw_key, solve_key = jax.random.split(key, 3)
        drawn, _ = tasks.sample(state, draw_key, GROUPS)
        chance = jax.nn.sigmoid(skill[env[drawn]] - difficulty[drawn])
        rewards = jax.random.bernoulli(solve_key, chance[:, None], (GROUPS, ROLLOUTS)).astype(jnp.float32)
        state, kept = tasks.update(state, drawn, rewards)
        gain = RATE * jnp.where(kept, 4 * jnp.var(rewards, axis=1), 0.0) / GROUPS
        skill = skill.at[env[drawn]].add(gain)
        solved = jax.nn.sigmoid(skill[env] - difficulty).mean()
        return (state, skill, key), {"skill": skill.mean(), "solved": solved, "kept": kept.mean()}

    def interval(carry: tuple, _: None) -> tuple[tuple, dict[str, jax.Array]]:
        (state, skill, key), log = jax.lax.scan(update, carry, length=INTERVAL)
        if isinstance(tasks, jr.DifficultyPools):
            key, recycle_key = jax.random.split(key)
            state = tasks.recycle(state, recycle_key, hard_fraction=recycled)
        return (state, skill, key), log

    carry = tasks.init(), jnp.zeros(len(TASKS_PER_ENV)), key
    _, log = jax.lax.scan(interval, carry, length=steps // INTERVAL)
    return jax.tree.map(jnp.ravel, log)


def figures_of(logs: dict[str, dict[str, np.ndarray]]) -> dict[str, np.ndarray]:
    """Figures [seeds] by curriculum; "groups kept" is the share of those with differing rewards."""
    figures = {}
    for name, log in logs.items():
        figures[f"{name}, tasks solved at the end"] = log["solved"][:, -1]
        figures[f"{name}, skill at the end"] = log["skill"][:, -1]
        half = log["solved"] >= 0.5
        figures[f"{name}, updates to half of the tasks"] = np.where(half.any(1), half.argmax(axis=1) + 1, np.nan)
        figures[f"{name}, groups kept"] = log["kept"].mean(axis=1)
    return figures


def main() -> None:
    args = Parser("A simulated curriculum: all tasks, difficulty pools, or tasks by a score.", seeds=16).parse()
    steps, logs = 200 if args.short else 1_500, {}
    for name, (tasks, recycled) in CURRICULA.items():
        run = jax.jit(jax.vmap(functools.partial(train, tasks, recycled, steps)))
        logs[name] = jax.tree.map(np.asarray, run(args.keys))
    path = args.out / "curriculum.png"
    updates, solved = np.arange(10, steps + 1, 10), {name: log["solved"][:, 9::10] for name, log in logs.items()}
    plot(path, f"{len(ENV)} tasks", {"": solved}, ("updates", updates), "share of the tasks that are solved")
    title = f"{len(ENV)} tasks, {steps:,} updates of {GROUPS} groups of {ROLLOUTS} rollouts, {args.seeds} seeds"
    report(path, title, figures_of(logs), 3)


if __name__ == "__main__":
    main()
