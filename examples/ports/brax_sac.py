"""brax's SAC, original and ported: the inverted pendulum.

pip install -e . 'brax==0.14.2' 'jax<0.10'
python examples/ports/brax_sac.py           # 8 seeds, mostly compilation
python examples/ports/brax_sac.py --speed   # times of the buffer and of updates, with full buffers of several sizes
python examples/ports/brax_sac.py --check   # checks of both versions against correct values
python examples/ports/brax_sac.py --short   # to see that it runs

Tested with jax 0.9.2; brax 0.14.2 calls `jax.device_put_replicated`, which jax 0.10 lacks. `Replay` replaces brax's
queue, which rolls its whole storage at every insertion once it is full. The sampling distribution is the same.
"""

import functools
import threading
from collections.abc import Callable
from typing import Any
from unittest import mock

import brax_checks
import jax
import jax.numpy as jnp
import measure
import numpy as np
from brax import envs
from brax.training import replay_buffers
from brax.training.agents.sac import networks
from brax.training.agents.sac import train as sac
from brax_adapter import Replay

TASK, PACKAGES, UPDATES = "inverted_pendulum", ("brax", "mujoco", "flax", "optax"), 8
SETTINGS = {
    "episode_length": 1_000,
    "num_envs": 8,
    "num_eval_envs": 32,
    "learning_rate": 1e-3,
    "discounting": 0.99,
    "batch_size": 128,
    "normalize_observations": True,
    "min_replay_size": 1_000,
    "grad_updates_per_step": UPDATES,
    "network_factory": functools.partial(networks.make_sac_networks, hidden_layer_sizes=(64, 64)),
}
CAPACITIES = (10_000, 100_000, 1_000_000)
PORT, LINES = "buffer only", measure.count_lines(Replay)
ORIGINAL = replay_buffers.UniformSamplingQueue


def train(seed: int, steps: int, evaluations: int, progress: Callable, **changes: Any) -> None:
    """Train brax's SAC; `progress` is called after each evaluation."""
    env = envs.get_environment(TASK, backend="generalized")
    settings = {**SETTINGS, **changes, "num_evals": evaluations + 1, "progress_fn": progress}
    sac.train(environment=env, num_timesteps=steps, seed=seed, **settings)


def learn(replay: type, seed: int, steps: int, evaluations: int) -> tuple[float, float]:
    """The mean return of a run's evaluations, and the seconds of its updates after the first evaluation."""
    found: list[tuple[float, float]] = []

    def progress(step: int, metrics: dict[str, Any]) -> None:
        found.append((float(metrics["eval/episode_reward"]), metrics.get("training/walltime", 0.0)))

    with mock.patch.object(replay_buffers, "UniformSamplingQueue", replay):
        train(seed, steps, evaluations, progress, max_replay_size=10_000)
    returns, times = np.array(found[1:]).T
    return float(returns.mean()), times[-1] - times[0]


def compare(seeds: list[int], steps: int, evaluations: int) -> list[dict[str, Any]]:
    """The row of returns."""
    kinds = {"original": ORIGINAL, "port": Replay}
    *_, found = measure.in_turn(kinds, seeds, lambda name, seed: learn(kinds[name], seed, steps, evaluations))
    returns = {name: [round(x, 1) for x, _ in values] for name, values in found.items()}
    task = f"{TASK}, {steps:,} steps, {UPDATES} updates per 8 steps"
    enough = len(seeds) >= 8  # for returns; fewer give times
    seconds = {name: [] if enough else [x for _, x in values] for name, values in found.items()}
    return [measure.row_of_times(PORT, LINES, task, seconds, returns if enough else None)]


class FullQueue(ORIGINAL):
    """brax's queue, full of zeros from the start."""

    def init(self, key: jax.Array) -> Any:
        return super().init(key).replace(insert_position=jnp.int32(self._data_shape[0]))


class FullReplay(Replay):
    """The port, full of zeros from the start."""

    def init(self, key: jax.Array) -> Any:
        zeros = jax.tree.map(lambda x: jnp.zeros((self.buffer.capacity, *x.shape[1:]), x.dtype), self.like)
        return self.insert(super().init(key), zeros)


FULL = {"original": FullQueue, "port": FullReplay}


def time_buffers(capacity: int, rounds: int, times: int = 50) -> dict[str, Any]:
    """Seconds of an insertion of 8 rows and a draw of 1,024, in full buffers, in alternation."""
    item = {"observation": jnp.zeros(4), "action": jnp.zeros(1), "rest": jnp.zeros(3), "next_observation": jnp.zeros(4)}
    added = jax.tree.map(lambda x: jnp.tile(x, (8, 1)), item)
    programs, states = {}, {}
    for name, kind in FULL.items():
        replay = kind(capacity, item, 128 * UPDATES)

        def step(state: Any, number: jax.Array, replay: Any = replay) -> tuple[Any, jax.Array]:
            state, batch = replay.sample(replay.insert(state, jax.tree.map(lambda x: x + number, added)))
            return state, batch["observation"].sum()

        programs[name] = jax.jit(
            lambda state, _, step=step: jax.lax.scan(step, state, jnp.arange(times)), donate_argnums=0
        )
        states[name] = jax.jit(replay.init)(jax.random.key(0))
    seconds = measure.time_in_turn(programs, states, rounds)
    kept = {name: [x / times for x in values] for name, values in seconds.items()}
    return measure.row_of_times(PORT, LINES, f"the buffer alone, full, {capacity:,} items", kept, None)


def time_updates(capacity: int, rounds: int, steps: int = 1_600) -> dict[str, Any]:
    """Seconds between evaluations of two runs that take turns: each waits at its evaluations for the other."""
    turns = {name: threading.Semaphore(0) for name in FULL}
    walltimes: dict[str, list[float]] = {name: [] for name in FULL}

    def work(name: str, other: str) -> None:
        def progress(step: int, metrics: dict[str, Any]) -> None:
            walltimes[name].append(metrics.get("training/walltime", 0.0))
            turns[other].release()
            turns[name].acquire()

        turns[name].acquire()
        try:
            total = 1_000 + steps * (rounds + 1)
            train(0, total, rounds + 1, progress, max_replay_size=capacity, num_eval_envs=1)
        finally:
            turns[other].release(rounds + 3)  # the other waits no more

    kinds = iter(FULL.values())  # the original's run makes its replay first
    threads = [threading.Thread(target=work, args=names) for names in (("original", "port"), ("port", "original"))]
    with mock.patch.object(replay_buffers, "UniformSamplingQueue", lambda **sizes: next(kinds)(**sizes)):
        for thread in threads:
            thread.start()
        turns["original"].release()
        for thread in threads:
            thread.join()
    seconds = {name: list(np.diff(values)[1:]) for name, values in walltimes.items()}
    return measure.row_of_times(PORT, LINES, f"{TASK}, buffer full, {capacity:,} items, {steps:,} steps", seconds, None)


def main() -> None:
    args = measure.parser("brax's SAC, original and ported.").parse()
    agent, seeds = "brax SAC", [args.seed + number for number in range(args.seeds)]
    if args.check:
        measure.write(args.out, "brax_sac_checks", PACKAGES, agent=agent, checks=brax_checks.check())
    elif args.speed:
        rows = []
        for capacity in CAPACITIES[: 1 if args.short else None]:
            rows += [time_buffers(capacity, 3 if args.short else 9), time_updates(capacity, 3)]
            measure.write(args.out, "brax_sac_speed", PACKAGES, agent=agent, rows=rows)
    else:
        rows = compare(seeds, *((2_000, 2) if args.short else (9_000, 10)))
        measure.write(args.out, "brax_sac", PACKAGES, agent=agent, rows=rows)


if __name__ == "__main__":
    main()
