"""Replay across experiments: a second agent learns from its own replay and from the saved replay of a first one.

pip install -e '.[examples]'
python examples/studies/rae.py           # a first experiment, and a second one with its replay and without
python examples/studies/rae.py --short   # a few seconds, to see that it runs
python examples/studies/rae.py --hold 2 --steps 6000   # a harder task

The agent of `sac.py` on the car on a hill of `rlpd.py`, where each action lasts for 3 steps of the car, so that random
actions sometimes reach the top. The first experiment saves its replay. The second starts from new parameters and an
empty buffer of its own, and draws half of each batch from either (Tirumala et al. 2023, Replay across Experiments,
arXiv:2311.15951). Nothing but the replay is kept: no parameters, no optimizer.

Over training the second experiment's return is higher with both replays than with its own alone, by 28 [17, 38], and
higher than the first one's by 18 [10, 26]. If an action lasts for 2 steps, the first experiment seldom finds the top,
and its replay helps little: 6 [-2, 16]. In a trial with 4 steps, and with the network of `sac.py`, all seeds of a first
experiment learned within 2,500 actions.
"""

import argparse
import dataclasses
import sys
import tempfile
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from experiment import Parser, integer, plot, report, train_and_test
from tqdm import tqdm

import jaxreplay as jr

sys.path.append(str(Path(__file__).parents[1] / "agents"))

import rlpd

SOLVED = rlpd.SOLVED
FIRST, ALONE, MIXED = "first experiment", "second, its own replay", "second, both replays"
DIFFERENCES = {"both less its own": ALONE, "both less the first": FIRST}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(rlpd.Config):
    """Static settings. One step is one action, and makes one update."""

    hold: int = 3  # steps of the car that an action lasts
    width: int = 32
    batch_size: int = 64
    interval: int = 250

    @property
    def horizon(self) -> int:
        return -(-rlpd.HORIZON // self.hold)

    @property
    def buffer(self) -> rlpd.Replay:
        """One's own replay, and the saved replay of an experiment with the same settings."""
        return rlpd.Replay(own=self.own, data=self.own, source=self.source)

    @property
    def own(self) -> jr.ReplayBuffer:
        return jr.ReplayBuffer(capacity=self.capacity)


def make_env(hold: int) -> tuple[Any, Any]:
    """The environment of `rlpd.py`, with `hold` steps in one."""
    car, params = rlpd.make_env()

    class Held(type(car)):
        def step_env(self, key: jax.Array, state: Any, action: jax.Array, params: Any) -> Any:
            def step(before: Any, _: None) -> tuple[Any, None]:
                obs, state, reward, terminated, info = car.step_env(key, before[1], action, params)
                after = obs, state, before[2] + reward, terminated, info
                return jax.tree.map(lambda x, y: jnp.where(before[3], x, y), before, after), None

            first = car.step_env(key, state, action, params)
            return jax.lax.scan(step, first, length=hold - 1)[0]

    return Held(), params


def parse_args() -> argparse.Namespace:
    parser = Parser("A second experiment that draws half of each batch from the replay of a first one.")
    parser.add_experiment(seeds=32)
    parser.add_count("steps", "actions and updates per seed of each experiment", 5_000, 100)
    hold = Config.hold
    parser.add_argument("--hold", type=integer(1, 100), default=hold, help=f"steps that an action lasts ({hold})")
    args = parser.parse()
    args.interval = 50 if args.short else Config.interval
    parser.check_multiple("steps", args.steps, args.interval)
    return args


def main() -> None:
    args, curves = parse_args(), {}
    first_keys, second_keys = (jax.random.split(key, args.seeds) for key in jax.random.split(jax.random.key(args.seed)))
    online = Config(steps=args.steps, source="online", interval=args.interval, hold=args.hold)
    both = dataclasses.replace(online, source="both")
    tests, per_test = [()] * (args.steps // args.interval), args.interval * args.seeds
    total = (2 if args.short else 3) * args.steps * args.seeds
    with tempfile.TemporaryDirectory() as folder, tqdm(total=total, unit=" steps", unit_scale=True) as bar:
        bar.set_description(FIRST)
        init, train = rlpd.make_trainer(online, *make_env(args.hold))
        curves[FIRST], states = train_and_test(train, init(first_keys), tests, bar, per_test)
        jr.save(folder, online.own, states.buffer[0])  # of all seeds, stacked
        if not args.short:
            bar.set_description(ALONE)
            curves[ALONE], _ = train_and_test(train, init(second_keys), tests, bar, per_test)
        bar.set_description(MIXED)
        init, train = rlpd.make_trainer(both, *make_env(args.hold))
        states = init(second_keys)
        saved = jr.restore(folder, both.own, states.buffer[0])
        states = states.replace(buffer=(states.buffer[0], saved))
        curves[MIXED], _ = train_and_test(train, states, tests, bar, per_test)

    figures = {}
    differences = {name: curves[MIXED] - curves[other] for name, other in DIFFERENCES.items() if other in curves}
    for name, seeds in {**curves, **differences}.items():
        figures |= {f"{name}, mean over training": seeds.mean(axis=1), f"{name}, at the end": seeds[:, -1]}
        if name in curves:
            figures[f"{name}, seeds above {SOLVED} at the end"] = np.sum(seeds[:, -1] >= SOLVED)
    path = args.out / ("rae.png" if args.hold == Config.hold else f"rae_hold_{args.hold}.png")
    times = args.interval * np.arange(1, args.steps // args.interval + 1)
    title, ylabel = "A car on a hill, Soft Actor-Critic", f"return of {Config.tests} test episodes"
    goal = SOLVED, f"return {SOLVED}"
    plot(path, title, times, curves, ylabel=ylabel, goal=goal, xlabel="actions and updates per seed in an experiment")
    about = f"{ylabel}, actions of {args.hold} steps, {args.steps:,} in an experiment, {args.seeds} seeds"
    report(path, f"{title}: {about}", figures, 0)


if __name__ == "__main__":
    main()
