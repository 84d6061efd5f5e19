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
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from experiment import Parser, legend_below, report
from flax import struct
from matplotlib.figure import Figure

import jaxreplay as jr

TASKS_PER_ENV = (120, 80)
DIFFICULTY = np.concatenate([np.linspace(-4, 12, count) for count in TASKS_PER_ENV])
ENV = np.repeat([0, 1], TASKS_PER_ENV)
GROUPS, ROLLOUTS, RATE = 16, 8, 0.05
INTERVAL = 100  # updates between two recyclings
POOLS = {"hard": "#c44e52", "normal": "#8172b2", "easy": "#55a868"}  # colours in the plot, from the bottom


@dataclasses.dataclass(frozen=True, kw_only=True)
class Curriculum:
    """A way to choose tasks.

    Attributes:
      tasks: difficulty pools (without thresholds all tasks stay in normal), or tasks drawn by a score.
      recycled: fraction of the hard pool that is moved back to normal every `INTERVAL` updates.
    """

    tasks: jr.DifficultyPools | jr.Tasks
    recycled: float = 0.0


ALL_TASKS = jr.DifficultyPools(tasks_per_env=TASKS_PER_ENV, online_difficulty_filtering=True)
WITH_POOLS = dataclasses.replace(ALL_TASKS, easy_threshold=0.9, hard_threshold=0.1)
SCORED = jr.Tasks(num_tasks=len(ENV), decay=0.9, exploration=0.1, online_difficulty_filtering=True)
CURRICULA = {
    "all tasks": Curriculum(tasks=ALL_TASKS),
    "pools": Curriculum(tasks=WITH_POOLS),
    "pools, recycled": Curriculum(tasks=WITH_POOLS, recycled=0.5),
    "learnability": Curriculum(tasks=SCORED),
    "Thompson": Curriculum(tasks=dataclasses.replace(SCORED, score=jr.scores.thompson)),
}


@struct.dataclass
class State:
    tasks: jr.curricula.PoolsState | jr.curricula.TasksState
    skill: jax.Array  # [num_envs]
    key: jax.Array


@struct.dataclass
class Log:
    """Numbers logged after each update.

    Attributes:
      skill: mean over the environments.
      solved: probability of solving a task, mean over all tasks.
      shares: share of the tasks in each pool [3], in the order of `POOLS`; 0 without pools.
      kept: share of the update's groups that were kept.
    """

    skill: jax.Array
    solved: jax.Array
    shares: jax.Array
    kept: jax.Array


def train(curriculum: Curriculum, steps: int, key: jax.Array) -> Log:
    """Train one seed for `steps` updates, a multiple of `INTERVAL`."""
    tasks = curriculum.tasks
    difficulty, env = jnp.asarray(DIFFICULTY, jnp.float32), jnp.asarray(ENV)

    def update(state: State, _: None) -> tuple[State, Log]:
        key, draw_key, solve_key = jax.random.split(state.key, 3)
        drawn, _ = tasks.sample(state.tasks, draw_key, GROUPS)
        chance = jax.nn.sigmoid(state.skill[env[drawn]] - difficulty[drawn])
        rewards = jax.random.bernoulli(solve_key, chance[:, None], (GROUPS, ROLLOUTS)).astype(jnp.float32)
        tasks_state, kept = tasks.update(state.tasks, drawn, rewards)
        gain = RATE * jnp.where(kept, 4 * jnp.var(rewards, axis=1), 0.0) / GROUPS
        skill = state.skill.at[env[drawn]].add(gain)
        metrics = tasks.metrics(tasks_state)
        log = Log(
            skill=skill.mean(),
            solved=jax.nn.sigmoid(skill[env] - difficulty).mean(),
            shares=jnp.stack([metrics.get(f"pool/{name}", jnp.float32(0)) for name in POOLS]),
            kept=kept.mean(),
        )
        return State(tasks=tasks_state, skill=skill, key=key), log

    def interval(state: State, _: None) -> tuple[State, Log]:
        state, log = jax.lax.scan(update, state, length=INTERVAL)
        if not isinstance(tasks, jr.DifficultyPools):
            return state, log
        key, recycle_key = jax.random.split(state.key)
        recycled = tasks.recycle(state.tasks, recycle_key, hard_fraction=curriculum.recycled)
        return state.replace(tasks=recycled, key=key), log

    state = State(tasks=tasks.init(), skill=jnp.zeros(len(TASKS_PER_ENV)), key=key)
    _, log = jax.lax.scan(interval, state, length=steps // INTERVAL)
    return jax.tree.map(lambda x: x.reshape(steps, *x.shape[2:]), log)


def figures_of(logs: dict[str, Log]) -> dict[str, np.ndarray]:
    """Figures [seeds] by curriculum; "groups kept" is the share of those with differing rewards."""
    figures = {}
    for name, log in logs.items():
        figures[f"{name}, tasks solved at the end"] = log.solved[:, -1]
        figures[f"{name}, skill at the end"] = log.skill[:, -1]
        half = np.where(log.solved.max(axis=1) >= 0.5, np.argmax(log.solved >= 0.5, axis=1) + 1, np.nan)
        figures[f"{name}, updates to half of the tasks"] = half
        figures[f"{name}, groups kept"] = log.kept.mean(axis=1)
    return figures


def plot(path: Path, logs: dict[str, Log], steps: int) -> None:
    """Plot pool shares and skills."""
    updates = np.arange(1, steps + 1)
    figure = Figure(figsize=(11, 3.8), layout="constrained")
    axes = figure.subplots(1, 3)
    for panel, name in zip(axes, ("pools", "pools, recycled"), strict=False):
        panel.stackplot(updates, logs[name].shares.mean(axis=0).T, labels=POOLS, colors=POOLS.values())
        panel.set(title=name, xlabel="updates", ylabel="share of the tasks", xlim=(0, steps), ylim=(0, 1))
    legend_below(axes[0], ncols=3)
    for (name, log), color in zip(
        logs.items(), ("tab:blue", "tab:orange", "tab:green", "tab:red", "tab:purple"), strict=True
    ):
        axes[2].plot(updates, log.skill.T, color=color, alpha=0.2, linewidth=0.6)
        axes[2].plot(updates, log.skill.mean(axis=0), color=color, linewidth=2.5, label=name)
    axes[2].set(
        title=f"skill, {len(log.skill)} seeds and their mean", xlabel="updates", ylabel="skill", xlim=(0, steps)
    )
    legend_below(axes[2])
    figure.savefig(path, dpi=150)


def main() -> None:
    parser = Parser("A simulated curriculum: all tasks, difficulty pools, or tasks by a score.")
    parser.add_experiment(seeds=16, short="a tiny budget")
    parser.add_count("steps", f"updates, a multiple of {INTERVAL}", 1_500, 200)
    args = parser.parse()
    parser.check_multiple("steps", args.steps, INTERVAL)
    keys = jax.random.split(jax.random.key(args.seed), args.seeds)
    logs = {}
    for name, curriculum in CURRICULA.items():
        run = jax.jit(jax.vmap(lambda key, curriculum=curriculum: train(curriculum, args.steps, key)))
        logs[name] = jax.tree.map(np.asarray, run(keys))
    path = args.out / "curriculum.png"
    plot(path, logs, args.steps)
    title = f"{len(ENV)} tasks, {args.steps:,} updates of {GROUPS} groups of {ROLLOUTS} rollouts, {args.seeds} seeds"
    report(path, title, figures_of(logs), 3)


if __name__ == "__main__":
    main()
