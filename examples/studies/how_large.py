"""How large a buffer, and which n? The DQN of sweep.py on CartPole and on Acrobot.

With few updates the largest buffer, and on CartPole a large n; with more updates it depends on the task.

pip install -e '.[examples]'
python examples/studies/how_large.py           # 20 seeds; figures in how_large.json
python examples/studies/how_large.py --short   # a few seconds, to see that it runs

Zhang and Sutton 2017 (A Deeper Look at Experience Replay, arXiv:1712.01275) find that a large buffer can hurt. Fedus et
al. 2020 (Revisiting Fundamentals of Experience Replay, arXiv:2007.06700) find that it helps, if returns have several
steps. Here n is 1, 3, 5 or 10, and the capacity is 10^3, 10^4 or the whole run: with 50,000 steps, any larger
buffer is the same. One or four updates follow 16 steps of the environments. All n, capacities and seeds are lanes of
one program: each lane stores everything, and `sample(..., max_age=)` draws from its newest transitions.

With one update per 16 steps a large buffer is best. On CartPole the gain grows with n, as Fedus et al. found: with n =
10 the return rises from 47 [42, 54] to 154 [124, 186]. On Acrobot n = 1 gains as much as n = 10, against what they
found. With four updates, CartPole with n = 10 is best with the smallest buffer, 273 [208, 337] against 144 [98, 195],
as Zhang and Sutton found; Acrobot is best with the largest. With n below 10, CartPole needs more than 50,000 steps.
"""

import argparse
import itertools
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from experiment import Parser, heat_map, report
from matplotlib.figure import Figure
from sweep import Config, Setting, make_train, timed

import jaxreplay as jr

TASKS = {"CartPole": "CartPole-v1", "Acrobot": "Acrobot-v1"}
N, UPDATES = (1, 3, 5, 10), (1, 4)
CAPACITIES = (1_000, 10_000)  # and all
NUM_ENVS, WARMUP, LEARNING_RATE = 16, 64, 1e-3


def uniform(config: Config, sequence_length: int, alpha: None) -> jr.SequenceBuffer:
    return jr.SequenceBuffer(length=config.length, num_envs=NUM_ENVS, sequence_length=sequence_length)


def run(task: str, updates: int, capacities: tuple[int, ...], args: argparse.Namespace) -> tuple[np.ndarray, str]:
    """Returns [N, capacities, seeds] and the times; a return is the mean of the second half."""
    steps = args.steps // NUM_ENVS - WARMUP
    config = Config(
        steps=steps,
        task=TASKS[task],
        num_envs=NUM_ENVS,
        warmup=WARMUP,
        length=steps + WARMUP,
        max_n=N[-1],
        max_updates=updates,
    )
    n, capacity = map(jnp.array, zip(*itertools.product(N, capacities), strict=True))
    same = jnp.ones_like(n)
    settings = Setting(None, n, LEARNING_RATE * same, updates * same, max_age=capacity // NUM_ENVS)
    keys = jax.random.split(jax.random.key(args.seed), args.seeds)
    lanes = jax.vmap(jax.vmap(make_train(config, make_buffer=uniform), in_axes=(0, None)), in_axes=(None, 0))
    returns, compiling, running = timed(lanes, keys, settings)
    return returns.reshape(len(N), len(capacities), -1), f"compile {compiling:.0f} s, run {running:.0f} s"


def names_of(capacities: tuple[int, ...], steps: int) -> list[str]:
    return [f"{capacity:,}" if capacity < steps else "all" for capacity in capacities]


def plot(path: Path, title: str, returns: dict[str, dict[int, np.ndarray]], names: list[str]) -> None:
    """Heat maps over capacity and n of returns [N, capacities, seeds], a row for each task."""
    figure = Figure(figsize=(8, 7.4), layout="constrained")
    panels = figure.subplots(len(returns), len(next(iter(returns.values()))), squeeze=False, sharex=True, sharey=True)
    for row, (task, of_updates) in zip(panels, returns.items(), strict=True):
        means = [x.mean(axis=-1) for x in of_updates.values()]
        for axes, (updates, x) in zip(row, of_updates.items(), strict=True):
            image = heat_map(axes, x, np.min(means), np.max(means), digits=0)
            axes.set_title(f"{task}, {updates} update{'s' * (updates > 1)} per {NUM_ENVS} steps", fontsize=10)
            axes.set_xticks(range(len(names)), names)
            axes.set_yticks(range(len(N)), [f"n = {n}" for n in N])
        figure.colorbar(image, ax=row, label="mean return of the second half", shrink=0.8)
    for axes in panels[-1]:
        axes.set_xlabel("capacity")
    figure.suptitle(title, fontsize=11)
    figure.savefig(path, dpi=130)


def main() -> None:
    parser = Parser("Returns of n steps by the capacity of the buffer and by the updates per step.")
    parser.add_experiment(seeds=20)
    parser.add_count("steps", "environment steps per seed", 50_000, 2_000)
    args = parser.parse()
    capacities = (*(x for x in CAPACITIES if x < args.steps), args.steps)
    tasks, ratios = (list(TASKS)[:1], UPDATES[:1]) if args.short else (list(TASKS), UPDATES)
    names = names_of(capacities, args.steps)
    returns: dict[str, dict[int, Any]] = {}
    for task, updates in itertools.product(tasks, ratios):
        x, times = run(task, updates, capacities, args)
        returns.setdefault(task, {})[updates] = x
        print(f"{task}, {updates} per {NUM_ENVS} steps: {times}")
    path = args.out / "how_large.png"
    plot(path, f"DQN, {args.steps:,} steps: mean of {args.seeds} seeds, [95% bootstrap interval]", returns, names)
    figures = {
        f"{task}, {updates} per {NUM_ENVS} steps, n = {n}, capacity {name}": values
        for task, of_updates in returns.items()
        for updates, x in of_updates.items()
        for n, of_n in zip(N, x, strict=True)
        for name, values in zip(names, of_n, strict=True)
    }
    title = f"return of the episodes of the second half, {args.steps:,} environment steps, {args.seeds} seeds"
    report(path, title, figures, 1)


if __name__ == "__main__":
    main()
