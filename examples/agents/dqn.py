"""Double DQN with prioritized 3-step replay on CartPole-v1, several seeds in one program.

pip install -e '.[examples]'
python examples/agents/dqn.py           # 8 seeds, half a minute on two CPU cores; draws dqn.png
python examples/agents/dqn.py --short   # half a minute at most, to see that it runs
"""

import argparse
from typing import Any

import flax.linen as nn
import gymnax
import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import optax
from flax import struct
from tqdm import tqdm

import jaxreplay as jr

NUM_ENVS = 16  # of each seed; a step advances all of them, and makes one update
WARMUP, STEPS, INTERVAL = 100, 15_500, 310
CAPACITY, BATCH, N, GAMMA, TARGET_RATE = 2**15, 128, 3, 0.99, 0.02
LAST = 20  # episodes of a mean return

env, _ = gymnax.make("CartPole-v1")
hidden = [nn.Dense(128), nn.relu, nn.Dense(128), nn.relu]
network = nn.Sequential([lambda obs: obs.reshape(len(obs), -1), *hidden, nn.Dense(env.num_actions)])
optimizer = optax.adam(optax.linear_schedule(2e-3, 0.0, STEPS))
epsilon = optax.linear_schedule(1.0, 0.01, STEPS // 10)
# Beta rises with the updates: the weights correct all of the bias once the values settle.
prioritized = jr.Prioritized(alpha=0.6, beta=optax.linear_schedule(0.4, 1.0, STEPS))
buffer = jr.ReplayBuffer(capacity=CAPACITY, sampler=prioritized)
tracer = jr.NStep(n=N, gamma=GAMMA, num_envs=NUM_ENVS)


@struct.dataclass
class State:
    env: Any
    obs: jax.Array  # [NUM_ENVS, ...]
    total: jax.Array  # [NUM_ENVS], return of the present episode
    tracer: jr.transitions.NStepState
    buffer: Any
    params: Any
    target_params: Any
    opt: optax.OptState
    key: jax.Array


def init(key: jax.Array) -> State:
    key, params_key, env_key = jax.random.split(key, 3)
    obs, env_state = jax.vmap(env.reset)(jax.random.split(env_key, NUM_ENVS))
    params = network.init(params_key, obs)
    zeros = jnp.zeros(NUM_ENVS, obs.dtype)
    row = obs, zeros.astype(jnp.int32), zeros, zeros > 0, zeros > 0, obs  # only shapes matter
    replay = tracer.init(*row), buffer.init(tracer.spec(*row))
    state = State(env_state, obs, zeros, *replay, params, params, optimizer.init(params), key)
    return jax.lax.scan(lambda state, _: (act(state, 1.0)[0], None), state, length=WARMUP)[0]


def act(state: State, epsilon: jax.Array | float) -> tuple[State, jax.Array]:
    """The state after one step, and the returns [NUM_ENVS] of the episodes that ended, NaN where none did."""
    key, explore_key, action_key, env_key = jax.random.split(state.key, 4)
    greedy = jnp.argmax(network.apply(state.params, state.obs), axis=-1).astype(jnp.int32)
    random = jax.random.randint(action_key, greedy.shape, 0, env.num_actions)
    action = jnp.where(jax.random.uniform(explore_key, greedy.shape) < epsilon, random, greedy)
    env_keys = jax.random.split(env_key, NUM_ENVS)
    obs, env_state, reward, terminated, truncated, info = jax.vmap(env.step)(env_keys, state.env, action)
    # If the episode ended, obs already belongs to the next one; the tracer needs the final observation.
    row = state.obs, action, reward, terminated, truncated, info["final_observation"]
    # The transition of three steps ago is complete now. The batch marks the rows that are not valid.
    tracing, batch, _ = tracer.add(state.tracer, *row)
    replay = buffer.add(state.buffer, batch)
    done, total = terminated | truncated, state.total + reward
    state = state.replace(env=env_state, obs=obs, tracer=tracing, buffer=replay, key=key)
    return state.replace(total=jnp.where(done, 0.0, total)), jnp.where(done, total, jnp.nan)


def learn(state: State) -> State:
    key, sample_key = jax.random.split(state.key)
    sample = buffer.sample(state.buffer, sample_key, BATCH)
    batch, rows = sample.items, jnp.arange(BATCH)
    best = jnp.argmax(network.apply(state.params, batch.S_next), axis=-1)
    # In is gamma^3, or less at the end of an episode: 0 if it terminated, and not at a time limit.
    target = batch.Rn + batch.In * network.apply(state.target_params, batch.S_next)[rows, best]

    def loss_fn(params: Any) -> tuple[jax.Array, jax.Array]:
        td_errors = target - network.apply(params, batch.S)[rows, batch.A]
        return jnp.mean(sample.weights * optax.huber_loss(td_errors)), td_errors

    grads, td_errors = jax.grad(loss_fn, has_aux=True)(state.params)
    # New priorities. An index of an item that was overwritten since names nothing.
    replay = buffer.update(state.buffer, sample.indices, td_errors)
    updates, opt = optimizer.update(grads, state.opt)
    params = optax.apply_updates(state.params, updates)
    target_params = optax.incremental_update(params, state.target_params, TARGET_RATE)
    return state.replace(buffer=replay, params=params, target_params=target_params, opt=opt, key=key)


def step(state: State, t: jax.Array) -> tuple[State, jax.Array]:
    state, returns = act(state, epsilon(t))
    return learn(state), returns


def main() -> np.ndarray:
    """Learning curves [seeds, intervals]."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seed", type=int, default=0, help="base seed (0)")
    parser.add_argument("--seeds", type=int, default=8, help="number of seeds (8)")
    parser.add_argument("--short", action="store_true", help="two seeds, half a minute at most; it does not learn")
    args = parser.parse_args()
    seeds, steps = (2, INTERVAL) if args.short else (args.seeds, STEPS)

    states = jax.jit(jax.vmap(init))(jax.random.split(jax.random.key(args.seed), seeds))
    train = jax.jit(lambda states, t: jax.lax.scan(jax.vmap(step, in_axes=(0, None)), states, t), donate_argnums=0)
    curves, episodes = [], [[] for _ in range(seeds)]
    for t in tqdm(range(0, steps, INTERVAL), unit=f" x {INTERVAL} steps"):
        states, returns = train(states, t + jnp.arange(INTERVAL))  # [INTERVAL, seeds, NUM_ENVS]
        for seed, x in enumerate(np.swapaxes(returns, 0, 1)):
            episodes[seed].extend(x[~np.isnan(x)])
        curves.append([np.mean(x[-LAST:]) for x in episodes])

    figure, axes = plt.subplots(figsize=(5, 3.5), layout="constrained")
    axes.plot(NUM_ENVS * INTERVAL * np.arange(1, len(curves) + 1), curves, color="tab:blue", linewidth=1)
    axes.set(title="CartPole-v1, 3-step double DQN", xlabel="environment steps", ylabel=f"return, last {LAST} episodes")
    figure.savefig("dqn.png", dpi=150)
    print(f"return of the last {LAST} episodes: {np.mean(curves[-1]):.0f}; by seed: {np.round(curves[-1])}")
    return np.transpose(curves)


if __name__ == "__main__":
    main()
