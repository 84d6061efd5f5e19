"""Threads that act and a thread that learns (Sebulba, Hessel et al. 2021, arXiv:2104.06272): double DQN on CartPole-v1.

pip install -e '.[examples]'
python examples/agents/sebulba.py           # 2 seeds, a minute on two CPU cores; draws sebulba.png
python examples/agents/sebulba.py --short   # a few seconds, to see that it runs

Each actor steps Gymnasium environments in a thread of its own and adds transitions to one `Shared`. The main thread
draws, learns and updates priorities. The ratio of draws to additions makes whoever is ahead wait. Where Ctrl-C ends a
run, the same command goes on.
"""

import argparse
import concurrent.futures
import contextlib
import dataclasses
import shutil
from pathlib import Path
from typing import Any

import flax.linen as nn
import gymnasium
import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import optax
from tqdm import tqdm

import jaxreplay as jr

STEPS, WARMUP = 150_000, 1_600  # environment steps of a seed, and random ones before the first draw
ACTORS, ENVS = 2, 8  # threads that act, and environments of each
BATCH, RATIO = 128, 8  # rows of a draw; draws for each transition
N, GAMMA, TARGET_RATE = 3, 0.99, 0.02
EXPLORE = 0.1  # part of the steps until epsilon is at its least
LAST = 20  # episodes of a mean return
SAVE_EVERY = 2_000  # updates

network = nn.Sequential([nn.Dense(128), nn.relu, nn.Dense(128), nn.relu, nn.Dense(2)])
optimizer = optax.adam(optax.linear_schedule(2e-3, 0.0, RATIO * (STEPS - WARMUP) // BATCH))
beta = optax.linear_schedule(0.4, 1.0, RATIO * (STEPS - WARMUP) // BATCH)
buffer = jr.ReplayBuffer(capacity=2**15, sampler=jr.Prioritized(alpha=0.6, beta=beta))
tracer = jr.NStep(n=N, gamma=GAMMA, num_envs=ENVS)
q_values = jax.jit(network.apply)


@dataclasses.dataclass
class Run:
    """What the threads of one run share."""

    seed: int
    learner: dict[str, Any]  # parameters, target parameters, optimizer state, and number of updates
    shared: jr.Shared
    episodes: list[tuple[int, float]] = dataclasses.field(default_factory=list)  # (step, return) of finished ones

    @property
    def taken(self) -> int:
        """Environment steps so far."""
        return WARMUP + self.shared.added if self.shared.added else 0


def act(run: Run, actor: int, first: int) -> None:
    """The body of an actor's thread, until `shared` is closed; `first` is the update at which it starts."""
    # If an actor fails, the others and the learner hear of it at their next call.
    with run.shared.worker(), contextlib.closing(gymnasium.make_vec("CartPole-v1", ENVS, "sync")) as envs:
        rng = np.random.default_rng((run.seed, actor, first))
        obs, _ = envs.reset(seed=int(rng.integers(2**31)))
        tracing, resets, returns = None, np.zeros(ENVS, bool), np.zeros(ENVS)
        while True:
            epsilon = max(0.01, 1 - max(0, run.taken - WARMUP) / (EXPLORE * STEPS))
            greedy = np.argmax(q_values(run.learner["params"], obs), axis=-1)
            action = np.where(rng.random(ENVS) < epsilon, rng.integers(0, 2, ENVS), greedy).astype(np.int32)
            next_obs, reward, terminated, truncated, _ = envs.step(action)
            step = (obs, action, reward.astype(np.float32), terminated, truncated, next_obs)
            tracing = tracer.init(*step) if tracing is None else tracing
            # Gymnasium resets at the step after an episode's last, which is no transition.
            tracing, batch, _ = tracer.add(tracing, *step, mask=~resets)
            run.shared.add(batch)  # waits while additions are ahead of the draws
            returns += reward
            resets = terminated | truncated
            run.episodes.extend((run.taken, float(x)) for x in returns[resets])
            returns[resets], obs = 0.0, next_obs


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
    return params, optax.incremental_update(params, target_params, TARGET_RATE), opt, td_errors


def update(run: Run) -> None:
    learner = run.learner
    key = jax.random.fold_in(jax.random.key(run.seed), learner["updates"])
    sample = run.shared.sample(key, BATCH)  # waits while draws are ahead of the additions
    *new, td_errors = learn(learner["params"], learner["target"], learner["opt"], sample.items)
    # An actor may have overwritten a drawn item meanwhile; its priority then stays.
    run.shared.update(sample.indices, td_errors)
    run.learner = dict(zip(("params", "target", "opt"), new, strict=True), updates=learner["updates"] + 1)


def contents(run: Run, replay: Any) -> dict[str, Any]:
    """Contents of a checkpoint. Episodes are padded, so that the arrays of all checkpoints have the same shapes."""
    ended = np.reshape(list(run.episodes), (-1, 2)).astype(np.float32)
    episodes = np.pad(ended, [(0, STEPS - len(ended)), (0, 0)], constant_values=-1)
    counts = {"added": run.shared.added, "drawn": run.shared.drawn}
    return {"replay": replay, "counts": counts, "learner": run.learner, "episodes": episodes}


def save(run: Run, checkpoint: Path, wait: bool = False) -> None:
    """Write a checkpoint of one moment; it is being written while the threads go on, unless `wait`."""
    with run.shared.state() as cell:
        jr.save(checkpoint, {"replay": buffer}, contents(run, cell.state), wait=wait)


def begin(seed: int, checkpoint: Path) -> Run:
    """A run, resumed if there is a checkpoint."""
    params = network.init(jax.random.key(seed), jnp.zeros((1, 4)))
    learner = {"params": params, "target": params, "opt": optimizer.init(params), "updates": 0}
    no, obs = jnp.zeros(ENVS, bool), jnp.zeros((ENVS, 4))
    replay = buffer.init(tracer.spec(obs, jnp.zeros(ENVS, jnp.int32), jnp.zeros(ENVS), no, no, obs))
    run = Run(seed, learner, jr.Shared(buffer, replay, ratio=RATIO, min_size=WARMUP))
    if checkpoint.exists():
        saved = jr.restore(checkpoint, {"replay": buffer}, contents(run, replay))
        run.learner = saved["learner"] | {"updates": int(saved["learner"]["updates"])}
        run.shared = jr.Shared(buffer, saved["replay"], ratio=RATIO, min_size=WARMUP, **saved["counts"])
        run.episodes = [(int(t), float(x)) for t, x in saved["episodes"] if t >= 0]
        print(f"goes on at update {run.learner['updates']:,}")
    return run


def train(run: Run, updates: int, checkpoint: Path) -> None:
    """Run all threads until so many updates were made. If interrupted, the last state is saved."""
    first = run.learner["updates"]
    try:
        with concurrent.futures.ThreadPoolExecutor(ACTORS) as threads, run.shared:  # closed at the end: actors end too
            for actor in range(ACTORS):
                threads.submit(act, run, actor, first)
            for done in tqdm(range(first + 1, updates + 1), initial=first, total=updates, unit=" updates"):
                update(run)
                if done % SAVE_EVERY == 0:
                    save(run, checkpoint)
    except KeyboardInterrupt:
        raise SystemExit(f"interrupted after {run.learner['updates']:,} updates; the same command goes on") from None
    finally:
        save(run, checkpoint, wait=True)


def main() -> np.ndarray:
    """Returns of the last episodes [seeds, 1]."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seed", type=int, default=0, help="base seed (0)")
    parser.add_argument("--seeds", type=int, default=2, help="number of seeds (2)")
    parser.add_argument("--short", action="store_true", help="one seed, a few seconds; it does not learn")
    args = parser.parse_args()
    steps, seeds = (6_000, 1) if args.short else (STEPS, args.seeds)

    runs, checkpoints = [], [Path(f"sebulba_{seed}") for seed in range(args.seed, args.seed + seeds)]
    for seed, checkpoint in enumerate(checkpoints, args.seed):
        runs.append(begin(seed, checkpoint))
        train(runs[-1], RATIO * (steps - WARMUP) // BATCH, checkpoint)
    for checkpoint in checkpoints:
        shutil.rmtree(checkpoint)

    figure, axes = plt.subplots(figsize=(5, 3.5), layout="constrained")
    for run in runs:
        steps, returns = np.array(run.episodes).T
        means = np.convolve(returns, np.ones(LAST) / LAST, "valid")
        axes.plot(steps[LAST - 1 :] / 1000, means, color="tab:blue", linewidth=1)
    axes.set(title="CartPole-v1, threads that act", xlabel="thousand steps", ylabel=f"return, last {LAST} episodes")
    figure.savefig("sebulba.png", dpi=150)
    found = np.array([np.mean([x for _, x in run.episodes[-LAST:]]) for run in runs])
    print(f"return of the last {LAST} episodes: {found.mean():.0f}; by seed: {np.round(found)}")
    return found[:, None]


if __name__ == "__main__":
    main()
