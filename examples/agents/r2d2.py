"""R2D2 (Kapturowski et al. 2019): a recurrent Q-learner on stored sequences, for CartPole without velocities.

pip install -e '.[examples]'
python examples/agents/r2d2.py           # 8 seeds, a minute on two CPU cores; draws r2d2.png
python examples/agents/r2d2.py --short   # half a minute at most, to see that it runs

Overlapping sequences, the recurrent state stored with every step, burn-in, and sequence priorities. `TASK = "memory"`
is MemoryChain, where the last action must repeat the bit that the first step showed.

On CartPole the return is 459 [410, 500], and without memory 38 [37, 39]. On MemoryChain, where 1 is the best, it is
0.98 [0.97, 1.00].
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

TASK = "cartpole"
RECURRENT = True  # else a feed-forward network with as many parameters
NUM_ENVS, ROLLOUT = 16, 8  # a step makes 8 steps of each environment, and one update
WARMUP = 10
STEPS = {"cartpole": 4_000, "memory": 3_000}[TASK]
INTERVAL = STEPS // 50
LENGTH = 10_000  # rows kept of each environment
SEQUENCE_LENGTH, STRIDE, BURN_IN, BATCH = 32, 8, 4, 32
N, GAMMA, TARGET_RATE = 3, 0.99, 0.02
UNITS = 32
LAST = 50  # episodes of a mean return

env, env_params = gymnax.make({"cartpole": "CartPole-v1", "memory": "MemoryChain-bsuite"}[TASK])
env_params = env_params.replace(memory_length=20) if TASK == "memory" else env_params
learning_rate = optax.linear_schedule(1e-3, 0.0, STEPS)
optimizer = optax.chain(optax.clip_by_global_norm(10.0), optax.adam(learning_rate))
epsilon = optax.linear_schedule(1.0, 0.02, int(0.3 * STEPS))
sequences = {"sequence_length": SEQUENCE_LENGTH, "stride": STRIDE}
prioritized = jr.Prioritized(alpha=0.9, beta=0.6)
buffer = jr.SequenceBuffer(length=LENGTH, num_envs=NUM_ENVS, **sequences, sampler=prioritized)


class Network(nn.Module):
    """Action values [..., num_actions] from one observation and the recurrent state before it."""

    @nn.compact
    def __call__(self, carry: jax.Array, obs: jax.Array) -> tuple[jax.Array, jax.Array]:
        x = nn.relu(nn.Dense(UNITS)(obs))
        if RECURRENT:
            # Flax's default is orthogonal. On few cores, several concurrent batched QR factorizations can wait for each
            # other forever (jaxlib 0.10).
            carry, x = nn.GRUCell(UNITS, recurrent_kernel_init=nn.initializers.lecun_normal())(carry, x)
        else:
            x = nn.relu(nn.Dense(UNITS)(nn.relu(nn.Dense(3 * UNITS)(x))))
        return carry, nn.Dense(env.num_actions)(nn.relu(nn.Dense(UNITS)(x)))


network = Network()


@struct.dataclass
class State:
    env: jr.transitions.AutoresetState
    obs: jax.Array  # [NUM_ENVS, ...]
    carry: jax.Array  # [NUM_ENVS, UNITS]
    total: jax.Array  # [NUM_ENVS], return of the present episode
    buffer: Any
    params: Any
    target_params: Any
    opt: optax.OptState
    key: jax.Array


def squash(x: jax.Array) -> jax.Array:
    """The value rescaling, which keeps large returns small (Kapturowski et al. 2019, section 2.3)."""
    return jnp.sign(x) * (jnp.sqrt(jnp.abs(x) + 1) - 1) + 1e-3 * x


def unsquash(y: jax.Array) -> jax.Array:
    root = (jnp.sqrt(1 + 4e-3 * (jnp.abs(y) + 1 + 1e-3)) - 1) / 2e-3
    return jnp.sign(y) * (root**2 - 1)


def see(obs: jax.Array) -> jax.Array:
    return obs[..., jnp.array([0, 2])] if TASK == "cartpole" else obs


def env_step(key: jax.Array, env_state: Any, action: jax.Array) -> tuple:
    obs, env_state, reward, terminated, truncated, info = env.step(key, env_state, action, env_params)
    return see(obs), env_state, reward, terminated, truncated, see(info["final_observation"])


# A final observation becomes a row of its own, without a step, so that sequences hold all that a target needs.
env_rows = jr.NextStepAutoreset(env_step=env_step)


def interact(state: State, epsilon: jax.Array | float) -> tuple[State, dict[str, jax.Array]]:
    key, explore_key, action_key, env_key = jax.random.split(state.key, 4)
    carry, q = network.apply(state.params, state.carry, state.obs)
    random = jax.random.randint(action_key, (NUM_ENVS,), 0, env.num_actions)
    explore = jax.random.uniform(explore_key, (NUM_ENVS,)) < epsilon
    action = jnp.where(explore, random, jnp.argmax(q, axis=-1))
    env_keys = jax.random.split(env_key, NUM_ENVS)
    env_state, obs, reward, terminated, truncated, step = jax.vmap(env_rows.step)(state.env, action, env_keys)
    # The recurrent state is stored with its step: a drawn sequence starts from it.
    row = {"obs": state.obs, "carry": state.carry, "action": action, "reward": reward}
    row |= {"terminated": terminated, "truncated": truncated, "step": step}
    carry = jnp.where(step[:, None], carry, 0.0)  # the row without a step was the episode's last
    total, done = state.total + reward, terminated | truncated
    returns, total = jnp.where(done, total, jnp.nan), jnp.where(done, 0.0, total)
    return state.replace(env=env_state, obs=obs, carry=carry, total=total, key=key), (row, returns)


def init(key: jax.Array) -> State:
    key, params_key, env_key = jax.random.split(key, 3)
    obs, env_state = jax.vmap(env.reset, in_axes=(0, None))(jax.random.split(env_key, NUM_ENVS), env_params)
    obs = see(obs)
    carry, zeros = jnp.zeros((NUM_ENVS, UNITS)), jnp.zeros(NUM_ENVS)
    params = network.init(params_key, carry, obs)
    env_state = jax.vmap(env_rows.init)(env_state, obs)
    state = State(env_state, obs, carry, zeros, None, params, params, optimizer.init(params), key)
    _, (row, _) = jax.eval_shape(interact, state, 1.0)  # only shapes
    rollout = jax.tree.map(lambda x: jax.ShapeDtypeStruct((ROLLOUT, *x.shape), x.dtype), row)
    state = state.replace(buffer=buffer.init(rollout))
    return jax.lax.scan(lambda state, _: (act(state, 1.0)[0], None), state, length=WARMUP)[0]


def act(state: State, epsilon: jax.Array | float) -> tuple[State, jax.Array]:
    """The state after a rollout, and returns [ROLLOUT, NUM_ENVS] of the episodes that ended, NaN where none did."""
    played = jax.lax.scan(lambda state, _: interact(state, epsilon), state.replace(buffer=None), length=ROLLOUT)
    new, (rows, returns) = played
    return new.replace(buffer=buffer.add(state.buffer, rows)), returns


def unroll(params: Any, carry: jax.Array, items: dict[str, jax.Array]) -> tuple[jax.Array, jax.Array]:
    """From the state [B, UNITS] before sequences: the state after them, and the values of each step [B, L, ...]."""

    def step(carry: jax.Array, row: dict[str, jax.Array]) -> tuple[jax.Array, jax.Array]:
        new, q = network.apply(params, carry, row["obs"])
        return jnp.where(row["step"][:, None], new, 0.0), q

    by_time = {name: items[name].swapaxes(0, 1) for name in ("obs", "step")}
    carry, q = jax.lax.scan(step, carry, by_time)
    return carry, q.swapaxes(0, 1)


def learn(state: State) -> State:
    key, sample_key = jax.random.split(state.key)
    sample = buffer.sample(state.buffer, sample_key, BATCH)
    # The first steps only bring the stored state up to date; what follows is learned from.
    before, items = jr.split_burn_in(sample.items, BURN_IN)

    def values(params: Any) -> jax.Array:
        carry, _ = unroll(params, sample.items["carry"][:, 0], before)
        return unroll(params, jax.lax.stop_gradient(carry), items)[1]

    target_values = values(state.target_params)

    def loss_fn(params: Any) -> tuple[jax.Array, jax.Array]:
        q, steps = values(params), [items[name] for name in ("action", "reward", "terminated", "truncated")]
        how = {"n": N, "gamma": GAMMA, "mask": items["step"]}
        batch, valid = jr.sequence_transitions({"q": q, "target": target_values}, *steps, **how)
        rows, following = jnp.arange(batch.batch_size), jax.lax.stop_gradient(batch.S_next)
        best = following["target"][rows, jnp.argmax(following["q"], axis=-1)]
        target = squash(batch.Rn + batch.In * unsquash(best))
        td_errors = jnp.where(valid, target - batch.S["q"][rows, batch.A], 0.0)
        td_errors, valid = (x.reshape(BATCH, -1) for x in (td_errors, valid))
        losses = jnp.sum(optax.huber_loss(td_errors), axis=1) / jnp.maximum(jnp.sum(valid, axis=1), 1)
        # A sequence's priority is between the largest and the mean of its TD errors.
        return jnp.mean(sample.weights * losses), jr.sequence_priority(td_errors, valid)

    grads, priorities = jax.grad(loss_fn, has_aux=True)(state.params)
    updates, opt = optimizer.update(grads, state.opt)
    params = optax.apply_updates(state.params, updates)
    target_params = optax.incremental_update(params, state.target_params, TARGET_RATE)
    replay = buffer.update(state.buffer, sample.indices, priorities)
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
        states, returns = train(states, t + jnp.arange(INTERVAL))  # [INTERVAL, seeds, ROLLOUT, NUM_ENVS]
        for seed, x in enumerate(np.swapaxes(returns, 0, 1)):
            episodes[seed].extend(x[~np.isnan(x)])
        curves.append([np.mean(x[-LAST:]) for x in episodes])

    figure, axes = plt.subplots(figsize=(5, 3.5), layout="constrained")
    axes.plot(NUM_ENVS * ROLLOUT * INTERVAL * np.arange(1, len(curves) + 1), curves, linewidth=1)
    axes.set(title=f"R2D2, {TASK}", xlabel="environment steps", ylabel=f"return, last {LAST} episodes")
    figure.savefig("r2d2.png", dpi=150)
    print(f"return of the last {LAST} episodes: {np.mean(curves[-1]):.2f}; by seed: {np.round(curves[-1], 2)}")
    return np.transpose(curves)


if __name__ == "__main__":
    main()
