"""mujax's Gumbel MuZero, original and ported: CartPole-v1 with two actor threads.

pip install -e . mujax==0.1.3
python examples/ports/mujax_gmz.py           # 8 seeds of all, a quarter of an hour on two CPU cores
python examples/ports/mujax_gmz.py --speed   # times of short runs
python examples/ports/mujax_gmz.py --check   # checks of both versions against correct values
python examples/ports/mujax_gmz.py --short   # to see that it runs

Tested with jax 0.10.2. `SharedReplay` replaces the replay between actors and learner, and `KeepingReanalyzer` also
stores what reanalysis finds.
"""

import time
from typing import Any
from unittest import mock

import gymnasium as gym
import measure
import mujax_checks
import numpy as np
from mujax import ExperimentConfig, GMZConfig, experiment
from mujax.learner import Learner
from mujax.observers import EnvLoopObserver
from mujax.reanalyze import Reanalyzer
from mujax.replay import Buffer
from mujax_adapter import Adder, Drawn, KeepingReanalyzer, SharedReplay

TASK, NUM_ENVS, NUM_ACTORS = "CartPole-v1", 8, 2
SEARCH = {"effective_horizon": 100, "num_simulations": 8, "num_bins": 101, "support_min": -10.0, "support_max": 10.0}
REPLAY = {"batch_size": 128, "replay_ratio": 8.0, "max_replay_size": 20_000, "min_replay_size": 1_000}
LEARNING = {"learning_rate": 2e-3, "lr_warmup_steps": 50, "variable_update_period": 10}
WARM_UP = 20  # learner steps before the clock starts: they compile
LINES = measure.count_lines(Drawn, Adder, SharedReplay, KeepingReanalyzer)
PORTS = {"keeps what reanalysis found": (SharedReplay, KeepingReanalyzer, LINES)}
LAST = 32  # episodes whose mean is the return of a run


class Returns(EnvLoopObserver):
    """Returns of the episodes of one actor thread, in order of their ends."""

    def __init__(self, found: list[tuple[float, float]]):
        self.found = found

    def observe_first(self, env: Any, num_envs: int) -> None:
        self.sums = np.zeros(num_envs)

    def observe(self, env: Any, step: Any) -> None:
        self.sums += step.reward

    def get_metrics(self, index: int) -> dict[str, float]:
        self.found.append((time.perf_counter(), self.sums[index]))
        self.sums[index] = 0
        return {}


class Timed(Learner):
    """A learner that keeps the times of its steps."""

    def step(self, batch: Any) -> None:
        super().step(batch)
        self.__dict__.setdefault("times", []).append(time.perf_counter())


def make_envs(seed: int) -> gym.vector.VectorEnv:
    same_step = {"autoreset_mode": gym.vector.AutoresetMode.SAME_STEP}
    return gym.make_vec(TASK, num_envs=NUM_ENVS, vectorization_mode="sync", vector_kwargs=same_step)


def learn(replay: type, reanalyzer: type, seed: int, steps: int) -> tuple[float, float]:
    """The mean return of the last episodes of a run, and its seconds."""
    found: list[tuple[float, float]] = []
    config = GMZConfig(**SEARCH, **REPLAY, **LEARNING).with_size("XS")
    run = ExperimentConfig(
        config=config,
        environment_factory=make_envs,
        max_num_learner_steps=steps,
        num_actors=NUM_ACTORS,
        seed=seed,
        observer_factories=[lambda: Returns(found)],
    )
    with (
        mock.patch.object(experiment, "Buffer", replay),
        mock.patch.object(experiment, "Reanalyzer", reanalyzer),
        mock.patch.object(experiment, "Learner", Timed),
    ):
        times = experiment.run_experiment(run).times
    returns = [value for _, value in sorted(found)[-LAST:]]
    return float(np.mean(returns)), times[-1] - times[WARM_UP]


def rows(seeds: range, steps: int, returns: bool = True) -> measure.Rows:
    programs = {"": (Buffer, Reanalyzer), **{name: parts[:2] for name, parts in PORTS.items()}}
    found = measure.in_turn(programs, seeds, lambda name, seed: learn(*programs[name], seed, steps))
    for port, (*_, lines) in PORTS.items():
        runs = {"original": found[""], "port": found[port]}
        values, seconds = ({of: [round(x[part], 3) for x in runs[of]] for of in runs} for part in (0, 1))
        task = f"{TASK}, {NUM_ACTORS} actors, {steps:,} updates"
        yield measure.result(port, lines, task, seconds, values if returns else None)


def train(args: Any) -> measure.Rows:
    return rows(range(args.seed, args.seed + args.seeds), 50 if args.short else 500)


def speed(args: Any) -> measure.Rows:
    return rows(range(args.seed, args.seed + (1 if args.short else 5)), 50 if args.short else 200, returns=False)


if __name__ == "__main__":
    args = measure.parser("mujax's Gumbel MuZero").parse_args()
    how = {"agent": "mujax GMZ", "check": mujax_checks.check, "speed": speed, "train": train}
    measure.run(args, "mujax_gmz", ("mujax", "mctx", "flashbax", "gymnasium"), **how)
