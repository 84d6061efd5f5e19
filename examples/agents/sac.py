"""Soft Actor-Critic (Haarnoja et al. 2018, arXiv:1812.05905) on Pendulum-v1, with uniform or prioritized replay.

pip install -e '.[examples]'
python examples/agents/sac.py           # uniform replay, 8 seeds at once, all of training inside one jitted scan
python examples/agents/sac.py --per     # prioritized replay
python examples/agents/sac.py --short   # a few seconds, to see that it runs
"""

import argparse
import dataclasses
import math
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from experiment import Parser, integer, run, summarize
from flax import struct

import jaxreplay as jr

LAST_EPISODES = 40  # a seed's return is the mean over this many training episodes
SOLVED = -200


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """Static settings. One step advances each of a seed's environments once, and makes one update."""

    steps: int
    use_per: bool = False  # prioritized instead of uniform replay
    num_envs: int = 4
    n: int = 1  # steps in a return
    capacity: int = 2**16
    warmup: int = 250  # steps with random actions before the first update
    intervals: int = 50  # progress reports
    batch_size: int = 128
    gamma: float = 0.99
    width: int = 64
    learning_rate: float = 1e-3
    target_rate: float = 0.01
    epsilon: float = 0.0  # share of random actions after `exploration`
    exploration: float = 0.02  # fraction of the steps in which epsilon falls from 1

    @property
    def buffer(self) -> jr.ReplayBuffer:
        beta = optax.linear_schedule(0.4, 1.0, self.steps)
        sampler = jr.Prioritized(alpha=0.6, beta=beta) if self.use_per else jr.Uniform()
        return jr.ReplayBuffer(capacity=self.capacity, sampler=sampler)


@struct.dataclass
class Networks:
    actor: Any
    critics: Any  # leaves [2, ...]
    log_temperature: Any  # scalar


@struct.dataclass
class State:
    env: Any
    obs: jax.Array  # [num_envs, ...]
    episode_return: jax.Array  # [num_envs]
    tracer: jr.transitions.NStepState
    buffer: jr.buffers.ReplayState
    networks: Networks
    target_critics: Any
    opt: optax.OptState
    key: jax.Array


def critic_loss(td_errors: jax.Array, weights: jax.Array) -> jax.Array:
    """Loss mean(w * (d1^2 + d2^2) / 2), with TD errors [2, B] of both critics and weights [B]."""
    return jnp.mean(weights * jnp.sum(td_errors**2, axis=0) / 2)


def priorities(td_errors: jax.Array) -> jax.Array:
    """Priorities (|d1| + |d2|) / 2 [B] from TD errors [2, B]."""
    return jnp.mean(jnp.abs(td_errors), axis=0)


class MLP(nn.Module):
    width: int
    outputs: int

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        for _ in range(2):
            x = nn.relu(nn.Dense(self.width)(x))
        return nn.Dense(self.outputs)(x)


def make_agent(config: Config, env: Any, env_params: Any) -> tuple[Callable, Callable, Callable]:
    """The agent of one seed as three pure functions: init, act, learn. Its actions are in [-1, 1]."""
    scale = env.action_space(env_params).high  # largest action of the environment
    actor, critic = MLP(config.width, 2 * env.num_actions), MLP(config.width, 1)
    optimizer = optax.adam(config.learning_rate)
    tracer = jr.NStep(n=config.n, gamma=config.gamma, num_envs=config.num_envs)
    buffer = config.buffer

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
        x = jnp.concatenate([obs, action], axis=-1)
        return jax.vmap(critic.apply, in_axes=(0, None))(params, x)[..., 0]

    def step_envs(key: jax.Array, env_state: Any, obs: jax.Array, action: jax.Array) -> tuple[Any, jax.Array, tuple]:
        keys = jax.random.split(key, config.num_envs)
        step = jax.vmap(env.step, in_axes=(0, 0, 0, None))
        next_obs, env_state, reward, terminated, truncated, info = step(keys, env_state, scale * action, env_params)
        # If the episode ended, next_obs already belongs to the next one; the tracer needs the final observation.
        return env_state, next_obs, (obs, action, reward, terminated, truncated, info["final_observation"])

    def init(key: jax.Array) -> State:
        key, actor_key, critic_key, env_key = jax.random.split(key, 4)
        obs, env_state = jax.vmap(env.reset, in_axes=(0, None))(jax.random.split(env_key, config.num_envs), env_params)
        action = jnp.zeros((config.num_envs, env.num_actions), obs.dtype)
        x = jnp.concatenate([obs, action], axis=-1)
        critics = jax.vmap(critic.init, in_axes=(0, None))(jax.random.split(critic_key), x)
        networks = Networks(actor=actor.init(actor_key, obs), critics=critics, log_temperature=jnp.float32(0))
        _, _, step = jax.eval_shape(step_envs, env_key, env_state, obs, action)  # only shapes
        tracer_state, buffer_state = tracer.init(*step), buffer.init(tracer.spec(*step))
        zeros, opt = jnp.zeros(config.num_envs), optimizer.init(networks)
        return State(env_state, obs, zeros, tracer_state, buffer_state, networks, critics, opt, key)

    def act(state: State, epsilon: jax.Array | float) -> tuple[State, jax.Array]:
        """The state after one step, and the returns [num_envs] of the episodes that ended, NaN where none did."""
        key, explore_key, policy_key, action_key, env_key = jax.random.split(state.key, 5)
        action, _ = policy(state.networks.actor, state.obs, policy_key)
        random = jax.random.uniform(action_key, action.shape, action.dtype, minval=-1.0, maxval=1.0)
        explore = jax.random.uniform(explore_key, (config.num_envs, 1)) < epsilon
        env_state, obs, step = step_envs(env_key, state.env, state.obs, jnp.where(explore, random, action))
        tracer_state, batch, _ = tracer.add(state.tracer, *step)
        buffer_state = buffer.add(state.buffer, batch)

        _, _, reward, terminated, truncated, _ = step
        done, total = terminated | truncated, state.episode_return + reward
        state = state.replace(env=env_state, obs=obs, tracer=tracer_state, buffer=buffer_state, key=key)
        return state.replace(episode_return=jnp.where(done, 0.0, total)), jnp.where(done, total, jnp.nan)

    def learn(state: State) -> State:
        """One update of all networks from one batch of replay."""
        key, sample_key, next_key, policy_key = jax.random.split(state.key, 4)
        sample = buffer.sample(state.buffer, sample_key, config.batch_size)
        batch = sample.items
        temperature = jnp.exp(state.networks.log_temperature)
        next_action, next_logp = policy(state.networks.actor, batch.S_next, next_key)
        next_q = q(state.target_critics, batch.S_next, next_action).min(axis=0)
        target = batch.Rn + batch.In * (next_q - temperature * next_logp)

        def loss_fn(networks: Networks) -> tuple[jax.Array, jax.Array]:
            td_errors = target - q(networks.critics, batch.S, batch.A)
            action, logp = policy(networks.actor, batch.S, policy_key)
            value = q(jax.lax.stop_gradient(networks.critics), batch.S, action).min(axis=0)
            actor_loss = jnp.mean(temperature * logp - value)
            too_certain = jnp.mean(jax.lax.stop_gradient(logp)) - env.num_actions  # the target entropy is -num_actions
            temperature_loss = -networks.log_temperature * too_certain
            return critic_loss(td_errors, sample.weights) + actor_loss + temperature_loss, td_errors

        grads, td_errors = jax.grad(loss_fn, has_aux=True)(state.networks)
        buffer_state = buffer.update(state.buffer, sample.indices, priorities(td_errors))
        updates, opt = optimizer.update(grads, state.opt)
        networks = optax.apply_updates(state.networks, updates)
        target_critics = optax.incremental_update(networks.critics, state.target_critics, config.target_rate)
        return state.replace(buffer=buffer_state, networks=networks, target_critics=target_critics, opt=opt, key=key)

    return init, act, learn


def parse_args() -> tuple[argparse.Namespace, Config]:
    parser = Parser("Soft Actor-Critic on Pendulum-v1, several seeds in one jitted scan.")
    parser.add_experiment(seeds=8)
    parser.add_count("steps", "environment steps per seed", 40_000, 4_000)
    parser.add_argument("--per", action="store_true", help="prioritized replay (default: uniform)")
    parser.add_argument("--n", type=integer(1, 100), default=Config.n, help=f"steps in a return ({Config.n})")
    args = parser.parse()
    steps = parser.learning_steps(args.steps, Config.num_envs, Config)
    return args, Config(steps=steps, use_per=args.per, n=args.n)


def main() -> None:
    import gymnax  # here, as the agent takes any environment with this interface

    args, config = parse_args()
    name = "prioritized" if args.per else "uniform"
    returns, timing = run(make_agent(config, *gymnax.make("Pendulum-v1")), config, args)

    path, title = args.out / f"sac_{name}.png", f"Pendulum-v1, Soft Actor-Critic, {name} replay"
    summarize(path, title, name, returns, timing, last_episodes=LAST_EPISODES, goal=SOLVED)


if __name__ == "__main__":
    main()
