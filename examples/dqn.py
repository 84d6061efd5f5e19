"""Double DQN with prioritized 3-step replay, several seeds at once, all of training inside one jitted scan.

    python examples/dqn.py              # prioritized replay
    python examples/dqn.py --uniform    # the same agent with uniform replay
    python examples/dqn.py --short      # seconds; does not learn

It needs the `examples` extra: gymnax, six, matplotlib, tqdm.
"""

import argparse
import dataclasses
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import flax.linen as nn
import gymnax
import jax
import jax.numpy as jnp
import matplotlib
import numpy as np
import optax
from flax import struct
from tqdm import tqdm

import jaxreplay as jr

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """Static settings of a run; a `step` steps every environment of a seed once."""

    sampler: jr.Sampler
    num_envs: int
    n: int
    steps: int  # training steps, each with one update
    warmup: int = 100  # random steps before the first update
    intervals: int = 50  # reports
    capacity: int = 2**15
    batch_size: int = 128
    gamma: float = 0.99
    learning_rate: float = 1e-3
    target_rate: float = 0.01
    epsilon: float = 0.01
    exploration: float = 0.3  # part of training in which epsilon falls to its last value


# The agent: one seed. --------------------------------------------------------------------------------------------------


class QNetwork(nn.Module):
    num_actions: int

    @nn.compact
    def __call__(self, obs: jax.Array) -> jax.Array:
        x = nn.relu(nn.Dense(64)(obs))
        x = nn.relu(nn.Dense(64)(x))
        return nn.Dense(self.num_actions)(x)


@struct.dataclass
class State:
    env: Any
    obs: jax.Array  # [num_envs, ...]
    episode_return: jax.Array  # [num_envs]
    tracer: Any
    buffer: jr.ReplayState
    params: Any
    target_params: Any
    opt: optax.OptState
    key: jax.Array


def make_agent(config: Config) -> tuple[Callable, Callable, Callable]:
    """The three pure functions of an agent: init, act, learn."""
    env, env_params = gymnax.make("CartPole-v1")
    network = QNetwork(env.num_actions)
    optimizer = optax.adam(optax.linear_schedule(config.learning_rate, 0.0, config.steps))
    tracer = jr.NStep(n=config.n, gamma=config.gamma, num_envs=config.num_envs)
    buffer = jr.ReplayBuffer(capacity=config.capacity, sampler=config.sampler)
    reset_envs = jax.vmap(env.reset, in_axes=(0, None))
    step_envs = jax.vmap(env.step, in_axes=(0, 0, 0, None))

    def init(key: jax.Array) -> State:
        key, params_key, env_key = jax.random.split(key, 3)
        env_keys = jax.random.split(env_key, config.num_envs)
        obs, env_state = reset_envs(env_keys, env_params)
        params = network.init(params_key, obs)
        # One step, for the shapes of what the tracer and the buffer will hold.
        action = jnp.zeros(config.num_envs, jnp.int32)
        _, _, reward, terminated, truncated, info = step_envs(env_keys, env_state, action, env_params)
        step = (obs, action, reward, terminated, truncated, info["final_observation"])
        tracer_state = tracer.init(*step)
        _, batch, _ = tracer.add(tracer_state, *step)
        return State(
            env=env_state,
            obs=obs,
            episode_return=jnp.zeros(config.num_envs),
            tracer=tracer_state,
            buffer=buffer.init(batch),
            params=params,
            target_params=params,
            opt=optimizer.init(params),
            key=key,
        )

    def act(state: State, epsilon: jax.Array) -> tuple[State, jax.Array]:
        """Step the environments and store what the tracer emits; returns of episodes that end, NaN elsewhere."""
        key, explore_key, action_key, env_key = jax.random.split(state.key, 4)
        greedy = jnp.argmax(network.apply(state.params, state.obs), axis=-1).astype(jnp.int32)
        anything = jax.random.randint(action_key, greedy.shape, 0, env.num_actions)
        action = jnp.where(jax.random.uniform(explore_key, greedy.shape) < epsilon, anything, greedy)
        env_keys = jax.random.split(env_key, config.num_envs)
        obs, env_state, reward, terminated, truncated, info = step_envs(env_keys, state.env, action, env_params)
        # `obs` is the first of the next episode where one ended: what the step led to is the final observation.
        tracer_state, batch, valid = tracer.add(
            state.tracer, state.obs, action, reward, terminated, truncated, info["final_observation"]
        )
        done = terminated | truncated
        episode_return = state.episode_return + reward
        state = state.replace(
            env=env_state,
            obs=obs,
            episode_return=jnp.where(done, 0.0, episode_return),
            tracer=tracer_state,
            buffer=buffer.add(state.buffer, batch, mask=valid),
            key=key,
        )
        return state, jnp.where(done, episode_return, jnp.nan)

    def learn(state: State) -> State:
        """One update from a batch of replay."""
        key, sample_key = jax.random.split(state.key)
        sample = buffer.sample(state.buffer, sample_key, config.batch_size)
        batch = sample.items
        rows = jnp.arange(config.batch_size)
        best = jnp.argmax(network.apply(state.params, batch.S_next), axis=-1)
        target = batch.Rn + batch.In * network.apply(state.target_params, batch.S_next)[rows, best]

        def loss_fn(params: Any) -> tuple[jax.Array, jax.Array]:
            td_errors = target - network.apply(params, batch.S)[rows, batch.A]
            return jnp.mean(sample.weights * optax.huber_loss(td_errors)), td_errors

        grads, td_errors = jax.grad(loss_fn, has_aux=True)(state.params)
        updates, opt = optimizer.update(grads, state.opt)
        params = optax.apply_updates(state.params, updates)
        return state.replace(
            buffer=buffer.update(state.buffer, sample.indices, td_errors),
            params=params,
            target_params=optax.incremental_update(params, state.target_params, config.target_rate),
            opt=opt,
            key=key,
        )

    return init, act, learn


# Training: all seeds, one scan. ----------------------------------------------------------------------------------------


def make_train(config: Config, report: Callable[[jax.Array], None]) -> Callable[[jax.Array], jax.Array]:
    """A function of one key a seed; it returns the returns [steps, seeds, num_envs] of `act`."""
    init, act, learn = (jax.vmap(f, in_axes=axes) for f, axes in zip(make_agent(config), (0, (0, None), 0)))
    epsilon = optax.linear_schedule(1.0, config.epsilon, int(config.exploration * config.steps))

    def step(state: State, t: jax.Array) -> tuple[State, jax.Array]:
        state, returns = act(state, epsilon(t))
        return learn(state), returns

    def interval(state: State, times: jax.Array) -> tuple[State, jax.Array]:
        state, returns = jax.lax.scan(step, state, times)
        jax.debug.callback(report, returns)
        return state, returns

    def train(keys: jax.Array) -> jax.Array:
        state, warmup = jax.lax.scan(lambda state, _: act(state, 1.0), init(keys), length=config.warmup)
        times = jnp.arange(config.steps).reshape(config.intervals, -1)
        _, returns = jax.lax.scan(interval, state, times)
        return jnp.concatenate([warmup, returns.reshape(-1, *returns.shape[2:])])

    return jax.jit(train)
