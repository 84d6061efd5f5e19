"""Double DQN with prioritized 3-step replay on Breakout-MinAtar, every observation stored once.

pip install -e '.[examples]'
python examples/agents/minatar.py           # 2 seeds, minutes on two CPU cores; draws minatar.png
python examples/agents/minatar.py --short   # half a minute at most, to see that it runs

A transition needs its first observation and the one n steps later. A ReplayBuffer would store each observation twice.
Here a SequenceBuffer stores the stream, and a transition is built from n + 1 drawn rows.
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
WARMUP, STEPS, INTERVAL = 300, 24_700, 494
LENGTH = 6_250  # rows kept of each environment
BATCH, N, GAMMA, TARGET_RATE = 64, 3, 0.99, 0.01
LAST = 100  # episodes of a mean return

env, env_params = gymnax.make("Breakout-MinAtar")
optimizer = optax.adam(5e-4)
epsilon = optax.linear_schedule(1.0, 0.02, STEPS // 5)
prioritized = jr.Prioritized(alpha=0.6, beta=optax.linear_schedule(0.4, 1.0, STEPS))
buffer = jr.SequenceBuffer(length=LENGTH, num_envs=NUM_ENVS, sequence_length=N + 1, sampler=prioritized)


class Network(nn.Module):
    """Action values; the network of Young and Tian 2019 (MinAtar, section 3)."""

    @nn.compact
    def __call__(self, obs: jax.Array) -> jax.Array:
        x = nn.relu(nn.Conv(16, (3, 3), padding="VALID")(obs.astype(jnp.float32)))
        x = nn.relu(nn.Dense(128)(x.reshape(*x.shape[:-3], -1)))
        return nn.Dense(env.num_actions)(x)


network = Network()


@struct.dataclass
class State:
    env: jr.transitions.AutoresetState
    obs: jax.Array  # [NUM_ENVS, 10, 10, 4], bool: a bit is enough
    total: jax.Array  # [NUM_ENVS], return of the present episode
    buffer: jr.buffers.SequenceState
    params: Any
    target_params: Any
    opt: optax.OptState
    key: jax.Array


def env_step(key: jax.Array, env_state: Any, action: jax.Array) -> tuple:
    obs, env_state, reward, terminated, truncated, info = env.step(key, env_state, action, env_params)
    return obs > 0, env_state, reward, terminated, truncated, info["final_observation"] > 0


# A final observation becomes a row of its own, without a step, so that the stream holds all that a target needs.
rows = jr.NextStepAutoreset(env_step=env_step)


def interact(key: jax.Array, env_state: Any, obs: jax.Array, action: jax.Array) -> tuple[Any, jax.Array, dict]:
    keys = jax.random.split(key, NUM_ENVS)
    env_state, next_obs, reward, terminated, truncated, step = jax.vmap(rows.step)(env_state, action, keys)
    row = {"obs": obs, "action": action, "reward": reward, "step": step}
    return env_state, next_obs, row | {"terminated": terminated, "truncated": truncated}


def init(key: jax.Array) -> State:
    key, params_key, env_key = jax.random.split(key, 3)
    obs, env_state = jax.vmap(env.reset, in_axes=(0, None))(jax.random.split(env_key, NUM_ENVS), env_params)
    obs, env_state = obs > 0, jax.vmap(rows.init)(env_state, obs > 0)
    params = network.init(params_key, obs)
    *_, row = jax.eval_shape(interact, key, env_state, obs, jnp.zeros(NUM_ENVS, jnp.int32))
    replay = buffer.init(jax.tree.map(lambda x: jax.ShapeDtypeStruct((1, *x.shape), x.dtype), row))
    state = State(env_state, obs, jnp.zeros(NUM_ENVS), replay, params, params, optimizer.init(params), key)
    return jax.lax.scan(lambda state, _: (act(state, 1.0)[0], None), state, length=WARMUP)[0]


def act(state: State, epsilon: jax.Array | float) -> tuple[State, jax.Array]:
    """The state after one step, and the returns [NUM_ENVS] of the episodes that ended, NaN where none did."""
    key, explore_key, action_key, env_key = jax.random.split(state.key, 4)
    greedy = jnp.argmax(network.apply(state.params, state.obs), axis=-1).astype(jnp.int32)
    random = jax.random.randint(action_key, greedy.shape, 0, env.num_actions)
    action = jnp.where(jax.random.uniform(explore_key, greedy.shape) < epsilon, random, greedy)
    env_state, obs, row = interact(env_key, state.env, state.obs, action)
    replay = buffer.add(state.buffer, jax.tree.map(lambda x: x[None], row))  # one row of each stream
    done, total = row["terminated"] | row["truncated"], state.total + row["reward"]
    state = state.replace(env=env_state, obs=obs, buffer=replay, key=key)
    return state.replace(total=jnp.where(done, 0.0, total)), jnp.where(done, total, jnp.nan)


def learn(state: State) -> State:
    key, sample_key = jax.random.split(state.key)
    sample = buffer.sample(state.buffer, sample_key, BATCH)
    items, each = sample.items, jnp.arange(BATCH)
    # A sequence of n + 1 rows is one transition. It is not valid if it starts at a row without a step.
    steps = [items[name] for name in ("obs", "action", "reward", "terminated", "truncated")]
    batch, valid = jr.sequence_transitions(*steps, n=N, gamma=GAMMA, mask=items["step"])
    best = jnp.argmax(network.apply(state.params, batch.S_next), axis=-1)
    target = batch.Rn + batch.In * network.apply(state.target_params, batch.S_next)[each, best]

    def loss_fn(params: Any) -> tuple[jax.Array, jax.Array]:
        td_errors = jnp.where(valid, target - network.apply(params, batch.S)[each, batch.A], 0.0)
        return jnp.mean(sample.weights * optax.huber_loss(td_errors)), td_errors

    grads, td_errors = jax.grad(loss_fn, has_aux=True)(state.params)
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
    parser.add_argument("--seeds", type=int, default=2, help="number of seeds (2)")
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
    axes.plot(NUM_ENVS * INTERVAL / 1000 * np.arange(1, len(curves) + 1), curves, color="tab:blue", linewidth=1)
    axes.set(
        title="Breakout-MinAtar, a line for each seed", xlabel="thousand steps", ylabel=f"return, last {LAST} episodes"
    )
    figure.savefig("minatar.png", dpi=150)
    print(f"return of the last {LAST} episodes: {np.mean(curves[-1]):.0f}; by seed: {np.round(curves[-1])}")
    return np.transpose(curves)


if __name__ == "__main__":
    main()
