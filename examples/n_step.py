"""Returns of n = 1, 3 and 5 steps, with uniform and with prioritized replay, for the DQN of dqn.py.

pip install -e '.[examples]'
python examples/n_step.py           # CartPole and DeepSea, 16 seeds; figures in n_step.json
python examples/n_step.py --short   # a few seconds, to see that it runs

DeepSea (Osband et al. 2020, arXiv:1908.03568) rewards one path of ten right actions, each with a small cost, so
random actions are rewarded once in 1,024 episodes. Its epsilon falls over half of the steps.
"""

import argparse
import dataclasses
import time
from pathlib import Path
from typing import Any

import gymnax
import jax
import numpy as np
from arguments import Parser
from dqn import LAST_EPISODES, Config, make_agent, make_buffer, make_train
from matplotlib.figure import Figure
from reporting import COLORS, Progress, interval, learning_curves, plot_mean, record, run

STEPS_IN_A_RETURN = (1, 3, 5)
POINTS = 50  # in a learning curve
STYLES = {"uniform": "--", "prioritized": "-"}
FIGURES = {"mean over training": lambda x: np.nanmean(x, axis=1), "at the end": lambda x: x[:, -1]}  # from curves


@dataclasses.dataclass(frozen=True, kw_only=True)
class Task:
    env: str
    settings: dict[str, Any]  # arguments of the environment
    exploration: float  # fraction of the steps in which epsilon falls


TASKS = {
    "CartPole": Task(env="CartPole-v1", settings={}, exploration=0.1),
    "DeepSea, 10 rows": Task(env="DeepSea-bsuite", settings={"size": 10}, exploration=0.5),
}


def train(name: str, law: str, n: int, args: argparse.Namespace) -> tuple[np.ndarray, np.ndarray]:
    """Environment steps [POINTS], and the mean return of the last episodes at each [seeds, POINTS]."""
    task = TASKS[name]
    buffer = make_buffer(law == "prioritized", args.steps)
    config = Config(buffer=buffer, steps=args.steps, n=n, exploration=task.exploration)
    progress = Progress(args.steps * config.num_envs * args.seeds, f"{name}, {law}, n={n}: ")
    keys = jax.random.split(jax.random.key(args.seed), args.seeds)
    agent = make_agent(config, *gymnax.make(task.env, **task.settings))
    returns, _ = run(make_train(agent, config, progress), keys, progress)
    env_steps, curves = learning_curves(returns, LAST_EPISODES, POINTS + 1)
    return env_steps[1:], curves[:, 1:]


def print_table(name: str, curves: dict[str, dict[int, np.ndarray]]) -> None:
    """Print mean and final returns of `curves` (sampler -> n -> [seeds, points]), and the gain from priorities."""
    print(f"\n{name}{'':{46 - len(name)}}" + "".join(f"{f'n={n}':>26}" for n in curves["uniform"]))
    for title, figure in FIGURES.items():
        figures = {law: [figure(x) for x in of_n.values()] for law, of_n in curves.items()}
        pairs = zip(figures["prioritized"], figures["uniform"], strict=True)
        figures["prioritized less uniform"] = [a - b for a, b in pairs]
        for law, of_n in figures.items():
            texts = ["{:.2f} [{:.2f}, {:.2f}]".format(x.mean(), *interval(x)) for x in of_n]
            print(f"{law + ', ' + title:46}" + "".join(f"{text:>26}" for text in texts))


def plot(path: Path, env_steps: np.ndarray, curves: dict[str, dict[str, dict[int, np.ndarray]]]) -> None:
    """Plot one panel per task: the mean over seeds, and its 95% interval."""
    figure = Figure(figsize=(11, 4.2), layout="constrained")
    for axes, (name, of_law) in zip(figure.subplots(1, len(curves)), curves.items(), strict=True):
        for law, of_n in of_law.items():
            for (n, x), color in zip(of_n.items(), COLORS, strict=False):
                plot_mean(axes, env_steps, x, color, f"{law}, n={n}", line=STYLES[law])
        axes.set(title=name, xlabel="environment steps per seed", ylabel=f"return, last {LAST_EPISODES} episodes")
        axes.xaxis.set_major_formatter("{x:,.0f}")
    figure.legend(*figure.axes[-1].get_legend_handles_labels(), loc="outside lower center", ncols=4, frameon=False)
    figure.savefig(path, dpi=150)


def parse_args() -> argparse.Namespace:
    parser = Parser("n-step returns with uniform and prioritized replay.")
    parser.add_experiment(seeds=16, short="n=1 alone, a tiny budget; it does not learn")
    parser.add_count("steps", "environment steps per seed", 100_000, 4_000)
    args = parser.parse()
    args.steps = parser.learning_steps(args.steps, Config.num_envs, Config)
    return args


def main() -> None:
    args = parse_args()
    start, curves, env_steps = time.perf_counter(), {}, np.zeros(0)
    for name in TASKS:
        curves[name] = {law: {} for law in STYLES}
        for law in STYLES:
            for n in STEPS_IN_A_RETURN[:1] if args.short else STEPS_IN_A_RETURN:
                env_steps, curves[name][law][n] = train(name, law, n, args)
    print(
        f"double DQN, {env_steps[-1]:,.0f} environment steps a seed, {args.seeds} seeds\n"
        f"return: mean of the last {LAST_EPISODES} training episodes; [95% bootstrap interval over seeds]"
    )
    for name, of_law in curves.items():
        print_table(name, of_law)
    print(f"{time.perf_counter() - start:.0f} s with compiling")
    path = args.out / "n_step.png"
    plot(path, env_steps, curves)
    figures = {}
    for name, of_law in curves.items():
        for title, figure in FIGURES.items():
            for n in of_law["uniform"]:
                found = {law: figure(of_n[n]) for law, of_n in of_law.items()}
                found["prioritized less uniform"] = found["prioritized"] - found["uniform"]
                suffix = "" if title == "mean over training" else f", {title}"
                figures |= {f"{name}, {law}, n={n}{suffix}": values for law, values in found.items()}
    record(path.with_suffix(".json"), figures)
    print(f"wrote {path} and {path.with_suffix('.json')}")


if __name__ == "__main__":
    main()
