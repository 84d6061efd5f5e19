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
import time
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

TASK, UPDATES, BATCH_SIZE = "inverted_pendulum", 8, 128
AGENT = {"learning_rate": 1e-3, "discounting": 0.99, "batch_size": BATCH_SIZE, "normalize_observations": True}
STEPS = {"episode_length": 1_000, "num_envs": 8, "min_replay_size": 1_000, "grad_updates_per_step": UPDATES}
NETWORKS = functools.partial(networks.make_sac_networks, hidden_layer_sizes=(64, 64))
CAPACITIES = (10_000, 100_000)
PORT = "buffer only"
PORTS = {PORT: (Replay, measure.count_lines(Replay))}
ORIGINAL = replay_buffers.UniformSamplingQueue


def learn(
    replay: type, steps: int, evaluations: int, seed: int, capacity: int = 10_000, num_eval_envs: int = 32
) -> tuple[list[float], float]:
    """The mean return of a run's evaluations, and the seconds of its updates after the first evaluation."""
    found: list[tuple[float, float]] = []

    def progress(step: int, metrics: dict[str, Any]) -> None:
        found.append((float(metrics["eval/episode_reward"]), metrics.get("training/walltime", 0.0)))

    sizes = {"num_timesteps": steps, "num_evals": evaluations + 1, "max_replay_size": capacity, "seed": seed}
    settings = {**AGENT, **STEPS, **sizes, "num_eval_envs": num_eval_envs, "progress_fn": progress}
    env = envs.get_environment(TASK, backend="generalized")
    with mock.patch.object(replay_buffers, "UniformSamplingQueue", replay):
        sac.train(environment=env, network_factory=NETWORKS, **settings)
    returns, times = np.array(found[1:]).T
    return [returns.mean()], times[-1] - times[0]


def train(args: Any) -> measure.Rows:
    """The row of returns, without seconds: these are of full buffers."""
    steps, evaluations = (2_000, 2) if args.short else (9_000, 10)
    kinds, seeds = {"original": ORIGINAL, PORT: Replay}, range(args.seed, args.seed + args.seeds)
    runs = {name: functools.partial(learn, kind, steps, evaluations) for name, kind in kinds.items()}
    task = f"{TASK}, {steps:,} steps, {UPDATES} updates per 8 steps"
    return measure.compare(runs, PORTS, task, seeds, warm_up=len(seeds))


class FullQueue(ORIGINAL):
    """brax's queue, full of zeros from the start."""

    def init(self, key: jax.Array) -> Any:
        return super().init(key).replace(insert_position=jnp.int32(self._data_shape[0]))


class FullReplay(Replay):
    """The port, full of zeros from the start."""

    def init(self, key: jax.Array) -> Any:
        zeros = jax.tree.map(lambda x: jnp.zeros((self.buffer.capacity, *x.shape[1:]), x.dtype), self.like)
        return self.insert(super().init(key), zeros)


FULL = {"original": FullQueue, PORT: FullReplay}


def of_buffer(kind: type, capacity: int, times: int = 50) -> measure.Run:
    """Runs of insertions of 8 rows and draws of 1,024 in one program, which donates the state; the seconds of one."""
    item = {"observation": jnp.zeros(4), "action": jnp.zeros(1), "rest": jnp.zeros(3), "next_observation": jnp.zeros(4)}
    added = jax.tree.map(lambda x: jnp.tile(x, (8, 1)), item)
    replay = kind(capacity, item, BATCH_SIZE * UPDATES)

    def step(state: Any, number: jax.Array) -> tuple[Any, jax.Array]:
        state, batch = replay.sample(replay.insert(state, jax.tree.map(lambda x: x + number, added)))
        return state, batch["observation"].sum()

    steps = jax.jit(lambda state: jax.lax.scan(step, state, jnp.arange(times)), donate_argnums=0)
    state = jax.jit(replay.init)(jax.random.key(0))

    def run(turn: int) -> tuple[list[float], float]:
        nonlocal state
        start = time.perf_counter()
        state = jax.block_until_ready(steps(state))[0]
        return [], (time.perf_counter() - start) / times

    return run


def speed(args: Any) -> measure.Rows:
    """Times of full buffers alone, and of updates between the evaluations of a run."""
    rounds, times = (3, 1) if args.short else (9, 3)
    for capacity in CAPACITIES[: 1 if args.short else None]:
        runs = {name: of_buffer(kind, capacity) for name, kind in FULL.items()}
        task = f"the buffer alone, full, {capacity:,} items"
        yield from measure.compare(runs, PORTS, task, range(rounds + 1), warm_up=1, with_returns=False)
        sizes = {"capacity": capacity, "num_eval_envs": 1}
        runs = {name: functools.partial(learn, kind, 4_200, 2, **sizes) for name, kind in FULL.items()}
        task = f"{TASK}, buffer full, {capacity:,} items, 1,600 steps"
        yield from measure.compare(runs, PORTS, task, range(times), with_returns=False)


if __name__ == "__main__":
    args, packages = measure.parser("brax's SAC").parse(), ("brax", "mujoco", "flax", "optax")
    measure.run(args, "brax SAC", packages, check=brax_checks.check, speed=speed, train=train)
