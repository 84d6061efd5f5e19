"""Soft Actor-Critic (Haarnoja et al. 2018, arXiv:1812.05905) on Pendulum-v1, several seeds in one program.

pip install -e '.[examples]'
python examples/agents/sac.py           # 8 seeds, half a minute on two CPU cores; draws sac.png
python examples/agents/sac.py --short   # half a minute at most, to see that it runs
"""

import argparse
import math
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

PRIORITIZED = False
NUM_ENVS = 4  # of each seed; a step advances all of them, and makes one update
WARMUP, STEPS, INTERVAL = 250, 9_750, 195
CAPACITY = 2**16
BATCH = 128
N = 1  # steps in a return
GAMMA, TARGET_RATE = 0.99, 0.01
WIDTH = 64
LAST = 40  # episodes of a mean return

env, env_params = gymnax.make("Pendulum-v1")
scale = env.action_space(env_params).high  # the agent's actions are in [-1, 1]
optimizer = optax.adam(1e-3)
epsilon = optax.linear_schedule(1.0, 0.0, STEPS // 50)
prioritized = jr.Prioritized(alpha=0.6, beta=optax.linear_schedule(0.4, 1.0, STEPS))
buffer = jr.ReplayBuffer(capacity=CAPACITY, sampler=prioritized if PRIORITIZED else jr.Uniform())
tracer = jr.NStep(n=N, gamma=GAMMA, num_envs=NUM_ENVS)


class MLP(nn.Module):
    outputs: int

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        for _ in range(2):
            x = nn.relu(nn.Dense(WIDTH)(x))
        return nn.Dense(self.outputs)(x)


actor, critic = MLP(2 * env.num_actions), MLP(1)


@struct.dataclass
class State:
    env: Any
    obs: jax.Array  # [NUM_ENVS, ...]
    total: jax.Array  # [NUM_ENVS], return of the present episode
    tracer: jr.transitions.NStepState
    buffer: Any
    networks: dict[str, Any]  # of the critics leaves [2, ...]
    target_critics: Any
    opt: optax.OptState
    key: jax.Array


def policy(params: Any, obs: jax.Array, key: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Actions [B, num_actions] from a Gaussian squashed by tanh, and their log-densities [B]."""
    mean, log_std = jnp.split(actor.apply(params, obs), 2, axis=-1)
    log_std = jnp.clip(log_std, -5, 2)
    noise = jax.random.normal(key, mean.shape, mean.dtype)
    u = mean + jnp.exp(log_std) * noise
    log_density = -0.5 * noise**2 - log_std - 0.5 * math.log(2 * math.pi)
    log_slope = 2 * (math.log(2) - u - nn.softplus(-2 * u))  # log(1 - tanh(u)^2)
    return jnp.tanh(u), jnp.sum(log_density - log_slope, axis=-1)


def q(params: Any, obs: jax.Array, action: jax.Array) -> jax.Array:
    """Values [2, B], one row per critic."""
    return jax.vmap(critic.apply, in_axes=(0, None))(params, jnp.concatenate([obs, action], axis=-1))[..., 0]


def init(key: jax.Array) -> State:
    key, actor_key, critic_key, env_key = jax.random.split(key, 4)
    obs, env_state = jax.vmap(env.reset)(jax.random.split(env_key, NUM_ENVS))
    action = jnp.zeros((NUM_ENVS, env.num_actions), obs.dtype)
    x = jnp.concatenate([obs, action], axis=-1)
    critics = jax.vmap(critic.init, in_axes=(0, None))(jax.random.split(critic_key), x)
    networks = {"actor": actor.init(actor_key, obs), "critics": critics, "log_temperature": jnp.float32(0)}
    zeros = jnp.zeros(NUM_ENVS, obs.dtype)
    row = obs, action, zeros, zeros > 0, zeros > 0, obs  # only shapes matter
    replay = tracer.init(*row), buffer.init(tracer.spec(*row))
    state = State(env_state, obs, zeros, *replay, networks, critics, optimizer.init(networks), key)
    return jax.lax.scan(lambda state, _: (act(state, 1.0)[0], None), state, length=WARMUP)[0]


def act(state: State, epsilon: jax.Array | float) -> tuple[State, jax.Array]:
    """The state after one step, and the returns [NUM_ENVS] of the episodes that ended, NaN where none did."""
    key, explore_key, policy_key, action_key, env_key = jax.random.split(state.key, 5)
    action, _ = policy(state.networks["actor"], state.obs, policy_key)
    random = jax.random.uniform(action_key, action.shape, action.dtype, minval=-1.0, maxval=1.0)
    explore = jax.random.uniform(explore_key, (NUM_ENVS, 1)) < epsilon
    action = jnp.where(explore, random, action)
    env_keys = jax.random.split(env_key, NUM_ENVS)
    obs, env_state, reward, terminated, truncated, info = jax.vmap(env.step)(env_keys, state.env, scale * action)
    # If the episode ended, obs already belongs to the next one; the tracer needs the final observation.
    row = state.obs, action, reward, terminated, truncated, info["final_observation"]
    tracing, batch, _ = tracer.add(state.tracer, *row)
    replay = buffer.add(state.buffer, batch)
    done, total = terminated | truncated, state.total + reward
    state = state.replace(env=env_state, obs=obs, tracer=tracing, buffer=replay, key=key)
    return state.replace(total=jnp.where(done, 0.0, total)), jnp.where(done, total, jnp.nan)


def learn(state: State) -> State:
    key, sample_key, next_key, policy_key = jax.random.split(state.key, 4)
    sample = buffer.sample(state.buffer, sample_key, BATCH)
    batch, temperature = sample.items, jnp.exp(state.networks["log_temperature"])
    next_action, next_logp = policy(state.networks["actor"], batch.S_next, next_key)
    next_q = q(state.target_critics, batch.S_next, next_action).min(axis=0)
    # Pendulum ends at its time limit alone, where In stays gamma: the value goes on.
    target = batch.Rn + batch.In * (next_q - temperature * next_logp)

    def loss_fn(networks: dict) -> tuple[jax.Array, jax.Array]:
        td_errors = target - q(networks["critics"], batch.S, batch.A)  # [2, B]
        action, logp = policy(networks["actor"], batch.S, policy_key)
        value = q(jax.lax.stop_gradient(networks["critics"]), batch.S, action).min(axis=0)
        actor_loss = jnp.mean(temperature * logp - value)
        too_certain = jnp.mean(jax.lax.stop_gradient(logp)) - env.num_actions  # the target entropy is -num_actions
        critic_loss = jnp.mean(sample.weights * jnp.sum(td_errors**2, axis=0) / 2)  # weights of uniform draws are 1
        return critic_loss + actor_loss - networks["log_temperature"] * too_certain, td_errors

    grads, td_errors = jax.grad(loss_fn, has_aux=True)(state.networks)
    # With two critics the mean error is the priority; uniform draws ignore it.
    replay = buffer.update(state.buffer, sample.indices, jnp.mean(jnp.abs(td_errors), axis=0))
    updates, opt = optimizer.update(grads, state.opt)
    networks = optax.apply_updates(state.networks, updates)
    target_critics = optax.incremental_update(networks["critics"], state.target_critics, TARGET_RATE)
    return state.replace(buffer=replay, networks=networks, target_critics=target_critics, opt=opt, key=key)


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
    axes.set(
        title="Pendulum-v1, a line for each seed", xlabel="environment steps", ylabel=f"return, last {LAST} episodes"
    )
    figure.savefig("sac.png", dpi=150)
    print(f"return of the last {LAST} episodes: {np.mean(curves[-1]):.0f}; by seed: {np.round(curves[-1])}")
    return np.transpose(curves)


if __name__ == "__main__":
    main()
