"""Threads that act and a thread that learns (Sebulba, Hessel et al. 2021, arXiv:2104.06272): double DQN on CartPole-v1.

    pip install -e '.[examples]'
    python examples/agents/sebulba.py
    python examples/agents/sebulba.py --short       # a few seconds, to see that it runs
    python examples/agents/sebulba.py --resume      # goes on where Ctrl-C ended it

Each actor steps Gymnasium environments in a thread of its own and adds transitions to one `Shared`. The main thread
draws, learns and updates priorities. The ratio of draws to additions makes whoever is ahead wait. The plot shows the
returns, the ratio over time, and how each thread spent its time.
"""

import collections
import concurrent.futures
import contextlib
import dataclasses
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import flax.linen as nn
import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
import optax
from experiment import Parser

import jaxreplay as jr

BATCH, RATIO, WARMUP = 128, 8, 1_600  # rows of a draw; draws for each transition; random steps before the first draw
ENVS = 8  # of each actor
EXPLORE = 0.1  # part of the steps until epsilon is at its least
WINDOW = 20  # episodes of a mean return
RANDOM_RETURN = 22  # of the random policy on CartPole-v1


class Clock:
    """Seconds that a thread spent in each of its activities."""

    def __init__(self):
        self.seconds: collections.Counter[str] = collections.Counter()

    @contextlib.contextmanager
    def __call__(self, activity: str) -> Iterator[None]:
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[activity] += time.perf_counter() - start


@dataclasses.dataclass
class Run:
    """What the threads of one run share.

    Attributes:
      steps: environment steps of all actors.
      network: Q-values of observations.
      params: its newest parameters, which the learner replaces.
      shared: the replay.
      seed: seed of the run.
      episodes: (step, return) of each finished episode.
      ratios: (step, draws for each addition so far) at some updates.
      clocks: of each thread, by name.
    """

    steps: int
    network: nn.Module
    params: Any
    shared: jr.Shared
    seed: int
    episodes: list[tuple[int, float]] = dataclasses.field(default_factory=list)
    ratios: list[tuple[int, float]] = dataclasses.field(default_factory=list)
    clocks: dict[str, Clock] = dataclasses.field(default_factory=dict)

    @property
    def taken(self) -> int:
        """Environment steps so far."""
        return WARMUP + self.shared.added if self.shared.added else 0


def act(run: Run, actor: int, first: int) -> None:
    """The body of an actor's thread, until `shared` is closed; `first` is the update at which it starts."""
    clock = run.clocks[f"actor {actor}"] = Clock()
    with run.shared.worker(), contextlib.closing(gymnasium.make_vec("CartPole-v1", ENVS, "sync")) as envs:
        rng = np.random.default_rng((run.seed, actor, first))
        obs, _ = envs.reset(seed=int(rng.integers(2**31)))
        tracer, q_values = jr.NStep(n=3, gamma=0.99, num_envs=ENVS), jax.jit(run.network.apply)
        tracing, resets, returns = None, np.zeros(ENVS, bool), np.zeros(ENVS)
        while True:
            with clock("policy"):
                epsilon = max(0.01, 1 - max(0, run.taken - WARMUP) / (EXPLORE * run.steps))
                greedy = np.argmax(q_values(run.params, obs), axis=-1)
                random = rng.integers(0, 2, ENVS)
                action = np.where(rng.random(ENVS) < epsilon, random, greedy).astype(np.int32)
            with clock("environments"):
                next_obs, reward, terminated, truncated, _ = envs.step(action)
            step = (obs, action, reward.astype(np.float32), terminated, truncated, next_obs)
            with clock("tracer"):
                tracing = tracer.init(*step) if tracing is None else tracing
                tracing, batch, _ = tracer.add(tracing, *step, mask=~resets)
            with clock("add, with its waiting"):
                run.shared.add(batch)
            returns += reward
            resets = terminated | truncated  # Gymnasium resets at the next step, which is no transition
            run.episodes.extend((run.taken, float(x)) for x in returns[resets])
            returns[resets], obs = 0.0, next_obs


def make_learn(network: nn.Module, optimizer: optax.GradientTransformation) -> Callable[..., tuple]:
    """A jitted double DQN update: (params, target_params, opt, batch) -> (the same three, td_errors)."""

    @jax.jit
    def learn(params: Any, target_params: Any, opt: optax.OptState, batch: jr.TransitionBatch) -> tuple:
        rows = jnp.arange(batch.batch_size)
        best = jnp.argmax(network.apply(params, batch.S_next), axis=-1)
        target = batch.Rn + batch.In * network.apply(target_params, batch.S_next)[rows, best]

        def loss_fn(params: Any) -> tuple[jax.Array, jax.Array]:
            td_errors = target - network.apply(params, batch.S)[rows, batch.A]
            return jnp.mean(batch.W * optax.huber_loss(td_errors)), td_errors

        grads, td_errors = jax.grad(loss_fn, has_aux=True)(params)
        updates, opt = optimizer.update(grads, opt)
        params = optax.apply_updates(params, updates)
        return params, optax.incremental_update(params, target_params, 0.02), opt, td_errors

    return learn


class Learner:
    """The learner's state, and one update of it."""

    def __init__(self, run: Run, opt: optax.GradientTransformation):
        self.run, self.learn = run, make_learn(run.network, opt)
        self.target, self.opt, self.updates = run.params, opt.init(run.params), 0
        self.clock = run.clocks["learner"] = Clock()

    def update(self, batch_size: int = BATCH) -> None:
        run, key = self.run, jax.random.fold_in(jax.random.key(self.run.seed), self.updates)
        with self.clock("draw, with its waiting"):
            sample = run.shared.sample(key, batch_size)
        with self.clock("learning"):
            run.params, self.target, self.opt, td_errors = self.learn(run.params, self.target, self.opt, sample.items)
            run.shared.update(sample.indices, jax.block_until_ready(td_errors))
        self.updates += 1
        if self.updates % 20 == 0:
            run.ratios.append((run.taken, run.shared.drawn / max(run.shared.added, 1)))

    def saved(self) -> dict[str, Any]:
        """Contents of a checkpoint besides the replay."""
        lists = {"episodes": self.run.episodes, "ratios": self.run.ratios}
        history = {name: padded(rows, self.run.steps) for name, rows in lists.items()}
        return {"params": self.run.params, "target": self.target, "opt": self.opt, "updates": self.updates} | history

    def save(self, checkpoint: Path, wait: bool = False) -> None:
        """Write a checkpoint of one moment; it is being written while the threads go on, unless `wait`."""
        shared = self.run.shared
        with shared.state() as cell:
            saved = {"replay": cell.state, "added": shared.added, "drawn": shared.drawn} | self.saved()
            jr.save(checkpoint, {"replay": shared.buffer}, saved, wait=wait)

    def load(self, saved: dict[str, Any]) -> None:
        self.run.params, self.target = saved["params"], saved["target"]
        self.opt, self.updates = saved["opt"], int(saved["updates"])
        self.run.episodes = [(int(step), float(x)) for step, x in saved["episodes"] if step >= 0]
        self.run.ratios = [(int(step), float(x)) for step, x in saved["ratios"] if step >= 0]


def padded(rows: list[tuple[float, float]], length: int) -> np.ndarray:
    """Rows, and -1 after them, so that the arrays of all checkpoints have the same shapes."""
    found = np.full((length, 2), -1, np.float32)
    found[: len(rows)] = np.reshape(rows, (-1, 2))
    return found


def make_run(steps: int, seed: int, checkpoint: Path, resume: bool) -> tuple[Run, Learner, int]:
    """A run, new or resumed, its learner, and the number of updates it takes in all."""
    num_updates = RATIO * (steps - WARMUP) // BATCH
    network = nn.Sequential([nn.Dense(128), nn.relu, nn.Dense(128), nn.relu, nn.Dense(2)])
    opt = optax.adam(optax.linear_schedule(2e-3, 0.0, num_updates))
    params = network.init(jax.random.key(seed), jnp.zeros((1, 4)))
    beta = optax.linear_schedule(0.4, 1.0, num_updates)
    buffer = jr.ReplayBuffer(capacity=2**15, sampler=jr.Prioritized(alpha=0.6, beta=beta))
    no, obs = jnp.zeros(ENVS, bool), jnp.zeros((ENVS, 4))
    items = jr.NStep(n=3, gamma=0.99, num_envs=ENVS).spec(obs, jnp.zeros(ENVS, jnp.int32), jnp.zeros(ENVS), no, no, obs)
    settings = {"ratio": RATIO, "min_size": WARMUP}
    run = Run(steps, network, params, jr.Shared(buffer, buffer.init(items), **settings), seed)
    learner = Learner(run, opt)
    if resume:
        like = {"replay": buffer.init(items), "added": 0, "drawn": 0} | learner.saved()
        saved = jr.restore(checkpoint, {"replay": buffer}, like)
        run.shared = jr.Shared(buffer, saved["replay"], added=saved["added"], drawn=saved["drawn"], **settings)
        learner.load(saved)
        print(f"goes on at update {learner.updates:,}, with {run.shared.size():,} transitions")
    return run, learner, num_updates


def train(run: Run, learner: Learner, num_updates: int, checkpoint: Path, actors: int) -> bool:
    """Run all threads until `num_updates`; False if interrupted. Either way the last state is saved."""
    from tqdm import tqdm

    bar = tqdm(total=num_updates, initial=learner.updates, unit=" updates")
    try:
        with concurrent.futures.ThreadPoolExecutor(actors) as threads, run.shared:
            for actor in range(actors):
                threads.submit(act, run, actor, learner.updates)
            while learner.updates < num_updates:
                learner.update()
                bar.update()
                if learner.updates % 2_000 == 0:
                    learner.save(checkpoint)
                if learner.updates % 100 == 0:
                    bar.set_description(f"return {mean_return(run):.0f}, ratio {run.ratios[-1][1]:.2f}")
    except KeyboardInterrupt:
        print(f"\ninterrupted after {learner.updates:,} updates; --resume goes on")
        return False
    finally:
        bar.close()
        learner.save(checkpoint, wait=True)
    return True


def mean_return(run: Run) -> float:
    """Mean return of the last episodes; NaN if there are none."""
    return float(np.mean([x for _, x in run.episodes[-WINDOW:]] or [np.nan]))


def plot(path: Path, runs: list[Run]) -> None:
    """Returns and ratio of each seed, and the shares of the threads' time in the last run."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 3.8), layout="constrained")
    returns, ratio, time_of = figure.subplots(1, 3)
    for run in runs:
        steps, values = np.array(run.episodes).T
        means = np.convolve(values, np.ones(WINDOW) / WINDOW, "valid") if len(values) >= WINDOW else values
        returns.plot(steps[-len(means) :], means, label=f"seed {run.seed}")
        ratio.plot(*np.array(run.ratios).T)
    returns.set(title=f"Return, mean of {WINDOW} episodes", xlabel="environment steps", ylim=(0, 510))
    returns.legend(frameon=False)
    ratio.axhline(RATIO, color="gray", linestyle="--", linewidth=1)
    ratio.set(title=f"Draws for each addition; asked: {RATIO}", xlabel="environment steps")
    ratio.set_ylim(RATIO * 0.8, RATIO * 1.2)
    for axes in (returns, ratio):
        axes.locator_params(axis="x", nbins=4)
        axes.xaxis.set_major_formatter("{x:,.0f}")
    threads = sorted(runs[-1].clocks)
    activities = list(dict.fromkeys(x for name in threads for x in runs[-1].clocks[name].seconds))
    left = np.zeros(len(threads))
    for activity in activities:
        seconds = np.array([runs[-1].clocks[name].seconds[activity] for name in threads])
        share = 100 * seconds / [sum(runs[-1].clocks[name].seconds.values()) for name in threads]
        time_of.barh(threads, share, left=left, label=activity)
        left += share
    time_of.set(title="Time of each thread (%)", xlim=(0, 100))
    time_of.legend(loc="upper center", bbox_to_anchor=(0.5, -0.12), ncols=2, frameon=False, fontsize=8)
    figure.savefig(path, dpi=150)


def main() -> None:
    parser = Parser("Double DQN on CartPole-v1 with actors in threads.")
    parser.add_count("steps", "environment steps of a seed", 150_000, 6_000, low=2 * WARMUP)
    parser.add_count("actors", "threads that act", 2, 2, high=64)
    parser.add_experiment(seeds=2, short_seeds=1)
    parser.add_argument(
        "--resume", action="store_true", help="go on from the checkpoint of --seed in the output folder"
    )
    args = parser.parse()
    runs, seconds = [], time.perf_counter()
    for seed in range(args.seed, args.seed + args.seeds):
        checkpoint = args.out / f"sebulba_{seed}"
        resume = args.resume and seed == args.seed
        if checkpoint.exists() and not resume:
            shutil.rmtree(checkpoint)
        run, learner, num_updates = make_run(args.steps, seed, checkpoint, resume)
        if not train(run, learner, num_updates, checkpoint, args.actors):
            return
        runs.append(run)
        mean = mean_return(run)
        print(
            f"seed {seed}: return {mean:.0f}, {mean / RANDOM_RETURN:.1f} times random play; "
            f"{run.shared.added:,} rows added and {run.shared.drawn:,} drawn"
        )
    plot(args.out / "sebulba.png", runs)
    print(f"{time.perf_counter() - seconds:.0f} s; wrote {args.out / 'sebulba.png'}")


if __name__ == "__main__":
    main()
