"""mujax's Gumbel MuZero, original and ported: CartPole-v1 with two actor threads.

pip install -e . mujax==0.1.3
python examples/ports/mujax_gmz.py           # 8 seeds of all, a quarter of an hour on two CPU cores
python examples/ports/mujax_gmz.py --speed   # times of short runs
python examples/ports/mujax_gmz.py --check   # checks of both versions against correct values
python examples/ports/mujax_gmz.py --short   # to see that it runs

Tested with jax 0.10.2. `SharedReplay` replaces the replay between actors and learner, and `KeepingReanalyzer` also
stores what reanalysis finds.
"""

import functools
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
PORTS = {"keeps what reanalysis found": ((SharedReplay, KeepingReanalyzer), LINES)}
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


def learn(replay: type, reanalyzer: type, steps: int, seed: int) -> tuple[list[float], float]:
    """The mean return of the last episodes of a run, and its seconds."""
    found: list[tuple[float, float]] = []
    run = ExperimentConfig(
        config=GMZConfig(**SEARCH, **REPLAY, **LEARNING).with_size("XS"),
        environment_factory=make_envs,
        max_num_learner_steps=steps,
        num_actors=NUM_ACTORS,
        seed=seed,
        observer_factories=[lambda: Returns(found)],
    )
    with mock.patch.multiple(experiment, Buffer=replay, Reanalyzer=reanalyzer, Learner=Timed):
        times = experiment.run_experiment(run).times
    return [np.mean([value for _, value in sorted(found)[-LAST:]])], times[-1] - times[WARM_UP]


def rows(args: Any, seeds: int, steps: int, with_returns: bool) -> measure.Rows:
    steps = 50 if args.short else steps
    versions = {"original": (Buffer, Reanalyzer), **{name: version for name, (version, _) in PORTS.items()}}
    runs = {name: functools.partial(learn, *version, steps) for name, version in versions.items()}
    task = f"{TASK}, {NUM_ACTORS} actors, {steps:,} updates"
    return measure.compare(runs, PORTS, task, range(args.seed, args.seed + seeds), with_returns=with_returns)


def train(args: Any) -> measure.Rows:
    return rows(args, args.seeds, 500, with_returns=True)


def speed(args: Any) -> measure.Rows:
    return rows(args, 1 if args.short else 5, 200, with_returns=False)


if __name__ == "__main__":
    args, packages = measure.parser("mujax's Gumbel MuZero").parse(), ("mujax", "mctx", "flashbax", "gymnasium")
    measure.run(args, "mujax GMZ", packages, check=mujax_checks.check, speed=speed, train=train)
