"""A loop on the host: Gymnasium's vector environments feed a replay buffer on the device.

    pip install -e '.[examples]'
    python examples/gymnasium_loop.py
    python examples/gymnasium_loop.py --short    # a few seconds, to see that it runs

A Gymnasium 1.x vector environment resets at the step after an episode's end (AutoresetMode.NEXT_STEP). That step
ignores the action and goes from the last observation of one episode to the first of the next. It is not a transition,
so the tracer's mask excludes it.
"""

import time
from collections import deque
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
import optax
from experiment import Parser, integer

import jaxreplay as jr

NUM_ENVS = 16
RANDOM_RETURN = 22  # return of the random policy on CartPole-v1


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


def train(steps: int, warmup: int, seed: int, n: int = 3) -> deque:
    """Step all environments `steps` times, and return the returns of the last 20 episodes."""
    envs = gymnasium.make_vec("CartPole-v1", num_envs=NUM_ENVS, vectorization_mode="sync")
    obs, _ = envs.reset(seed=seed)
    rng, key = np.random.default_rng(seed), jax.random.key(seed)

    num_actions = int(envs.single_action_space.n)
    network = nn.Sequential([nn.Dense(128), nn.relu, nn.Dense(128), nn.relu, nn.Dense(num_actions)])
    optimizer = optax.adam(optax.linear_schedule(2e-3, 0.0, steps - warmup))
    learn = make_learn(network, optimizer)
    q_values = jax.jit(network.apply)
    params = target_params = network.init(key, obs)
    opt = optimizer.init(params)

    tracer = jr.NStep(n=n, gamma=0.99, num_envs=NUM_ENVS)
    beta = optax.linear_schedule(0.4, 1.0, steps - warmup)
    buffer = jr.ReplayBuffer(capacity=2**15, sampler=jr.Prioritized(alpha=0.6, beta=beta))

    resets = np.zeros(NUM_ENVS, bool)  # environments whose next step is a reset
    running, finished = np.zeros(NUM_ENVS), deque(maxlen=20)
    for t in range(steps):
        epsilon = max(0.01, 1.0 - max(0, t - warmup) / (0.1 * steps))
        greedy = np.argmax(q_values(params, obs), axis=-1)
        random = rng.integers(0, num_actions, NUM_ENVS)
        action = np.where(rng.random(NUM_ENVS) < epsilon, random, greedy).astype(np.int32)
        next_obs, reward, terminated, truncated, _ = envs.step(action)

        step = (obs, action, reward.astype(np.float32), terminated, truncated, next_obs)
        if t == 0:
            tracer_state, buffer_state = tracer.init(*step), buffer.init(tracer.spec(*step))
        tracer_state, batch, _ = tracer.add(tracer_state, *step, mask=~resets)
        buffer_state = buffer.add(buffer_state, batch)

        running += reward
        done = terminated | truncated
        finished.extend(running[done])
        running[done] = 0.0
        obs, resets = next_obs, done

        if t >= warmup:
            sample = buffer.sample(buffer_state, jax.random.fold_in(key, t), batch_size=128)
            params, target_params, opt, td_errors = learn(params, target_params, opt, sample.items)
            buffer_state = buffer.update(buffer_state, sample.indices, td_errors)
    envs.close()
    return finished


def main() -> None:
    warmup = 100  # random steps before the first update
    parser = Parser("Double DQN on Gymnasium's CartPole-v1, environments on the host.")
    parser.add_count("steps", "environment steps", 200_000, 4_000, low=(warmup + 1) * NUM_ENVS)
    parser.add_argument("--seed", type=integer(0), default=0, help="seed (0)")
    parser.add_argument("--short", action="store_true", help="a tiny budget; it does not learn")
    args = parser.parse()
    steps = args.steps // NUM_ENVS
    start = time.perf_counter()
    finished = train(steps, warmup, args.seed)
    seconds = time.perf_counter() - start
    if not finished:
        print("no episode has ended")
        return
    mean = np.mean(finished)
    verdict = f"{mean / RANDOM_RETURN:.1f} times" if mean > RANDOM_RETURN else "no better than"
    print(
        f"mean return of the last {len(finished)} episodes: {mean:.0f}, {verdict} random play ({RANDOM_RETURN}); "
        f"{steps * NUM_ENVS:,} environment steps in {seconds:.0f} s"
    )


if __name__ == "__main__":
    main()
