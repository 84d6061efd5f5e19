"""Double DQN with prioritized 3-step replay on Breakout-MinAtar, every observation stored once.

pip install -e '.[examples]'
python examples/agents/minatar.py                          # 2 seeds, 400,000 environment steps each
python examples/agents/minatar.py --steps 5000000 --seeds 8
python examples/agents/minatar.py --short                  # a few seconds, to see that it runs

A transition needs its first observation and the one n steps later. A ReplayBuffer would store each observation twice.
Here a SequenceBuffer stores the stream, and a transition is built from n + 1 drawn rows.
"""

import argparse
import dataclasses
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import gymnax
import jax
import jax.numpy as jnp
import optax
from experiment import Parser, run, summarize, with_final_rows
from flax import struct

import jaxreplay as jr

LAST_EPISODES = 100  # a seed's return is the mean over this many training episodes


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """Static settings. One step advances each of a seed's environments once, and makes one update."""

    steps: int
    num_envs: int = 16
    n: int = 3
    warmup: int = 300  # steps with random actions before the first update
    intervals: int = 50  # progress reports
    length: int = 6_250  # steps kept per environment
    batch_size: int = 64
    gamma: float = 0.99
    learning_rate: float = 5e-4
    target_rate: float = 0.01
    epsilon: float = 0.02
    exploration: float = 0.2  # fraction of the steps in which epsilon falls from 1


@struct.dataclass
class State:
    env: jr.transitions.AutoresetState
    obs: jax.Array  # [num_envs, 10, 10, 4], bool
    episode_return: jax.Array  # [num_envs]
    buffer: jr.buffers.SequenceState
    params: Any
    target_params: Any
    opt: optax.OptState
    key: jax.Array


class Network(nn.Module):
    """Action values; the network of Young and Tian 2019 (MinAtar, section 3)."""

    num_actions: int

    @nn.compact
    def __call__(self, obs: jax.Array) -> jax.Array:
        x = nn.relu(nn.Conv(16, (3, 3), padding="VALID")(obs.astype(jnp.float32)))
        x = nn.relu(nn.Dense(128)(x.reshape(*x.shape[:-3], -1)))
        return nn.Dense(self.num_actions)(x)


def make_agent(config: Config) -> tuple[Callable, Callable, Callable]:
    """The agent of one seed as three pure functions: init, act, learn."""
    env, env_params = gymnax.make("Breakout-MinAtar")
    network, optimizer = Network(env.num_actions), optax.adam(config.learning_rate)
    beta = optax.linear_schedule(0.4, 1.0, config.steps)
    buffer = jr.SequenceBuffer(
        length=config.length,
        num_envs=config.num_envs,
        sequence_length=config.n + 1,
        sampler=jr.Prioritized(alpha=0.6, beta=beta),
    )

    env_rows = with_final_rows(env, env_params, see=lambda obs: obs > 0)

    def step_envs(key: jax.Array, env_state: Any, obs: jax.Array, action: jax.Array) -> tuple[Any, jax.Array, dict]:
        keys = jax.random.split(key, config.num_envs)
        env_state, next_obs, reward, terminated, truncated, step = jax.vmap(env_rows.step)(env_state, action, keys)
        row = {"obs": obs, "action": action, "reward": reward, "step": step}
        return env_state, next_obs, row | {"terminated": terminated, "truncated": truncated}

    def init(key: jax.Array) -> State:
        key, params_key, env_key = jax.random.split(key, 3)
        env_keys = jax.random.split(env_key, config.num_envs)
        obs, env_state = jax.vmap(env.reset, in_axes=(0, None))(env_keys, env_params)
        obs, env_state = obs > 0, jax.vmap(env_rows.init)(env_state, obs > 0)
        params = network.init(params_key, obs)
        actions = jnp.zeros(config.num_envs, jnp.int32)
        _, _, row = jax.eval_shape(step_envs, env_key, env_state, obs, actions)  # only shapes
        rows = jax.tree.map(lambda x: jax.ShapeDtypeStruct((1, *x.shape), x.dtype), row)
        zeros, opt = jnp.zeros(config.num_envs), optimizer.init(params)
        return State(env_state, obs, zeros, buffer.init(rows), params, params, opt, key)

    def act(state: State, epsilon: jax.Array | float) -> tuple[State, jax.Array]:
        """The state after one step, and the returns [num_envs] of the episodes that ended, NaN where none did."""
        key, explore_key, action_key, env_key = jax.random.split(state.key, 4)
        greedy = jnp.argmax(network.apply(state.params, state.obs), axis=-1).astype(jnp.int32)
        random = jax.random.randint(action_key, greedy.shape, 0, env.num_actions)
        action = jnp.where(jax.random.uniform(explore_key, greedy.shape) < epsilon, random, greedy)
        env_state, obs, row = step_envs(env_key, state.env, state.obs, action)
        buffer_state = buffer.add(state.buffer, jax.tree.map(lambda x: x[None], row))
        done, total = row["terminated"] | row["truncated"], state.episode_return + row["reward"]
        state = state.replace(env=env_state, obs=obs, buffer=buffer_state, key=key)
        return state.replace(episode_return=jnp.where(done, 0.0, total)), jnp.where(done, total, jnp.nan)

    def learn(state: State) -> State:
        """One update from one batch of replay."""
        key, sample_key = jax.random.split(state.key)
        sample = buffer.sample(state.buffer, sample_key, config.batch_size)
        items, rows = sample.items, jnp.arange(config.batch_size)
        steps = [items[name] for name in ("obs", "action", "reward", "terminated", "truncated")]
        batch, valid = jr.sequence_transitions(*steps, n=config.n, gamma=config.gamma, mask=items["step"])
        best = jnp.argmax(network.apply(state.params, batch.S_next), axis=-1)
        target = batch.Rn + batch.In * network.apply(state.target_params, batch.S_next)[rows, best]

        def loss_fn(params: Any) -> tuple[jax.Array, jax.Array]:
            td_errors = jnp.where(valid, target - network.apply(params, batch.S)[rows, batch.A], 0.0)
            return jnp.mean(sample.weights * optax.huber_loss(td_errors)), td_errors

        grads, td_errors = jax.grad(loss_fn, has_aux=True)(state.params)
        buffer_state = buffer.update(state.buffer, sample.indices, td_errors)
        updates, opt = optimizer.update(grads, state.opt)
        params = optax.apply_updates(state.params, updates)
        target_params = optax.incremental_update(params, state.target_params, config.target_rate)
        return state.replace(buffer=buffer_state, params=params, target_params=target_params, opt=opt, key=key)

    return init, act, learn


def parse_args() -> tuple[argparse.Namespace, Config]:
    parser = Parser("Double DQN on Breakout-MinAtar, several seeds in one jitted scan.")
    parser.add_experiment(seeds=2)
    parser.add_count("steps", "environment steps per seed", 400_000, 6_400)
    args = parser.parse()
    return args, Config(steps=parser.learning_steps(args.steps, Config.num_envs, Config))


def main() -> None:
    args, config = parse_args()
    returns, timing = run(make_agent(config), config, args)
    title = f"Breakout-MinAtar, {config.n}-step double DQN, prioritized replay"
    summarize(args.out / "minatar.png", title, "return", returns, timing, last_episodes=LAST_EPISODES)


if __name__ == "__main__":
    main()
