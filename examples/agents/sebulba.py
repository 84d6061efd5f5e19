"""Threads that act and a thread that learns (Sebulba, Hessel et al. 2021, arXiv:2104.06272): double DQN on CartPole-v1.

pip install -e '.[examples]'
python examples/agents/sebulba.py           # 2 seeds, a minute on two CPU cores; draws sebulba.png
python examples/agents/sebulba.py --short   # half a minute at most, to see that it runs

Each actor steps Gymnasium environments in a thread of its own and adds transitions to one `Shared`. The main thread
draws, learns and updates priorities. The ratio of draws to additions makes whoever is ahead wait.
"""

import argparse
import concurrent.futures
import contextlib
import dataclasses
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
    learner: list[Any]  # parameters, target parameters, optimizer state
    shared: jr.Shared
    episodes: list[tuple[int, float]] = dataclasses.field(default_factory=list)  # (steps, return) of finished ones


def act(run: Run, actor: int) -> None:
    """The body of an actor's thread, until `shared` is closed."""
    # If an actor fails, the others and the learner hear of it at their next call.
    with run.shared.worker(), contextlib.closing(gymnasium.make_vec("CartPole-v1", ENVS, "sync")) as envs:
        rng = np.random.default_rng((run.seed, actor))
        obs, _ = envs.reset(seed=int(rng.integers(2**31)))
        tracing, resets, returns = None, np.zeros(ENVS, bool), np.zeros(ENVS)
        while True:
            epsilon = max(0.01, 1 - run.shared.added / (EXPLORE * STEPS))  # counted from the first draw on
            greedy = np.argmax(q_values(run.learner[0], obs), axis=-1)
            action = np.where(rng.random(ENVS) < epsilon, rng.integers(0, 2, ENVS), greedy).astype(np.int32)
            next_obs, reward, terminated, truncated, _ = envs.step(action)
            step = (obs, action, reward.astype(np.float32), terminated, truncated, next_obs)
            tracing = tracer.init(*step) if tracing is None else tracing
            # Gymnasium resets at the step after an episode's last, which is no transition.
            tracing, batch, _ = tracer.add(tracing, *step, mask=~resets)
            run.shared.add(batch)  # waits while additions are ahead of the draws
            returns += reward
            resets = terminated | truncated
            run.episodes.extend((run.shared.added, float(x)) for x in returns[resets])
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


def train(seed: int, updates: int) -> Run:
    """Run all threads until so many updates were made."""
    params = network.init(jax.random.key(seed), jnp.zeros((1, 4)))
    no, obs = jnp.zeros(ENVS, bool), jnp.zeros((ENVS, 4))
    replay = buffer.init(tracer.spec(obs, jnp.zeros(ENVS, jnp.int32), jnp.zeros(ENVS), no, no, obs))
    run = Run(seed, [params, params, optimizer.init(params)], jr.Shared(buffer, replay, ratio=RATIO, min_size=WARMUP))
    with concurrent.futures.ThreadPoolExecutor(ACTORS) as threads, run.shared:  # closed at the end: actors end too
        for actor in range(ACTORS):
            threads.submit(act, run, actor)
        for update in tqdm(range(updates), unit=" updates"):
            # Waits while draws are ahead of the additions.
            sample = run.shared.sample(jax.random.fold_in(jax.random.key(seed), update), BATCH)
            *run.learner, td_errors = learn(*run.learner, sample.items)
            # An actor may have overwritten a drawn item meanwhile; its priority then stays.
            run.shared.update(sample.indices, td_errors)
    return run


def main() -> np.ndarray:
    """Returns of the last episodes [seeds, 1]."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seed", type=int, default=0, help="base seed (0)")
    parser.add_argument("--seeds", type=int, default=2, help="number of seeds (2)")
    parser.add_argument("--short", action="store_true", help="one seed, half a minute at most; it does not learn")
    args = parser.parse_args()
    steps, seeds = (6_000, 1) if args.short else (STEPS, args.seeds)

    updates = RATIO * (steps - WARMUP) // BATCH
    runs = [train(seed, updates) for seed in range(args.seed, args.seed + seeds)]

    figure, axes = plt.subplots(figsize=(5, 3.5), layout="constrained")
    for run in runs:
        steps, returns = np.array(run.episodes).T
        means = np.convolve(returns, np.ones(LAST) / LAST, "valid")
        axes.plot(steps[LAST - 1 :] / 1000, means, color="tab:blue", linewidth=1)
    axes.set(
        title="CartPole-v1, threads that act",
        xlabel="thousand steps from the first draw",
        ylabel=f"return, last {LAST} episodes",
    )
    figure.savefig("sebulba.png", dpi=150)
    found = np.array([np.mean([x for _, x in run.episodes[-LAST:]]) for run in runs])
    print(f"return of the last {LAST} episodes: {found.mean():.0f}; by seed: {np.round(found)}")
    return found[:, None]


if __name__ == "__main__":
    main()
