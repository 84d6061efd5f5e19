"""Double DQN with prioritized 3-step replay, several seeds at once, all of training inside one jitted scan.

pip install -e '.[examples]'
python examples/agents/dqn.py              # prioritized replay, 8 seeds
python examples/agents/dqn.py --uniform    # the same agent with uniform replay
python examples/agents/dqn.py --short      # a few seconds, to see that it runs
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
from experiment import Parser, integer, run, summarize
from flax import struct

import jaxreplay as jr

CAPACITY = 2**15
LAST_EPISODES = 20  # a seed's return is the mean over this many training episodes
SOLVED = 450


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """Static settings. One step advances each of a seed's environments once, and makes one update."""

    buffer: Any  # has the methods init, add, sample and update of jr.ReplayBuffer
    steps: int
    num_envs: int = 16
    n: int = 3
    warmup: int = 100  # steps with random actions before the first update
    intervals: int = 50  # progress reports
    batch_size: int = 128
    gamma: float = 0.99
    width: int = 128
    learning_rate: float = 2e-3
    target_rate: float = 0.02
    epsilon: float = 0.01
    exploration: float = 0.1  # fraction of the steps in which epsilon falls from 1


def of_actions(values: jax.Array, actions: jax.Array) -> jax.Array:
    """Values [B] of the given actions [B], from the values of all actions [B, num_actions]."""
    return jnp.take_along_axis(values, actions[:, None], axis=1)[:, 0]


@struct.dataclass
class State:
    env: Any
    obs: jax.Array  # [num_envs, ...]
    episode_return: jax.Array  # [num_envs]
    tracer: jr.transitions.NStepState
    buffer: jr.buffers.ReplayState
    params: Any
    target_params: Any
    opt: optax.OptState
    key: jax.Array


def make_agent(config: Config, env: Any, env_params: Any) -> tuple[Callable, Callable, Callable]:
    """The agent of one seed as three pure functions: init, act, learn."""
    hidden = [nn.Dense(config.width), nn.relu, nn.Dense(config.width), nn.relu]
    network = nn.Sequential([lambda obs: obs.reshape(len(obs), -1), *hidden, nn.Dense(env.num_actions)])
    optimizer = optax.adam(optax.linear_schedule(config.learning_rate, 0.0, config.steps))
    tracer = jr.NStep(n=config.n, gamma=config.gamma, num_envs=config.num_envs)
    buffer = config.buffer

    def step_envs(key: jax.Array, env_state: Any, obs: jax.Array, action: jax.Array) -> tuple[Any, jax.Array, tuple]:
        keys = jax.random.split(key, config.num_envs)
        step = jax.vmap(env.step, in_axes=(0, 0, 0, None))
        next_obs, env_state, reward, terminated, truncated, info = step(keys, env_state, action, env_params)
        # If the episode ended, next_obs already belongs to the next one; the tracer needs the final observation.
        return env_state, next_obs, (obs, action, reward, terminated, truncated, info["final_observation"])

    def init(key: jax.Array) -> State:
        key, params_key, env_key = jax.random.split(key, 3)
        env_keys = jax.random.split(env_key, config.num_envs)
        obs, env_state = jax.vmap(env.reset, in_axes=(0, None))(env_keys, env_params)
        params = network.init(params_key, obs)
        actions = jnp.zeros(config.num_envs, jnp.int32)
        _, _, step = jax.eval_shape(step_envs, env_key, env_state, obs, actions)  # only shapes
        tracer_state, buffer_state = tracer.init(*step), buffer.init(tracer.spec(*step))
        zeros, opt = jnp.zeros(config.num_envs), optimizer.init(params)
        return State(env_state, obs, zeros, tracer_state, buffer_state, params, params, opt, key)

    def act(state: State, epsilon: jax.Array | float) -> tuple[State, jax.Array]:
        """The state after one step, and the returns [num_envs] of the episodes that ended, NaN where none did."""
        key, explore_key, action_key, env_key = jax.random.split(state.key, 4)
        greedy = jnp.argmax(network.apply(state.params, state.obs), axis=-1).astype(jnp.int32)
        random = jax.random.randint(action_key, greedy.shape, 0, env.num_actions)
        action = jnp.where(jax.random.uniform(explore_key, greedy.shape) < epsilon, random, greedy)

        env_state, obs, step = step_envs(env_key, state.env, state.obs, action)
        tracer_state, batch, _ = tracer.add(state.tracer, *step)
        buffer_state = buffer.add(state.buffer, batch)

        _, _, reward, terminated, truncated, _ = step
        done, total = terminated | truncated, state.episode_return + reward
        state = state.replace(env=env_state, obs=obs, tracer=tracer_state, buffer=buffer_state, key=key)
        return state.replace(episode_return=jnp.where(done, 0.0, total)), jnp.where(done, total, jnp.nan)

    def learn(state: State) -> State:
        """One update from one batch of replay."""
        key, sample_key = jax.random.split(state.key)
        sample = buffer.sample(state.buffer, sample_key, config.batch_size)
        batch = sample.items
        best = jnp.argmax(network.apply(state.params, batch.S_next), axis=-1)
        target = batch.Rn + batch.In * of_actions(network.apply(state.target_params, batch.S_next), best)

        def loss_fn(params: Any) -> tuple[jax.Array, jax.Array]:
            td_errors = target - of_actions(network.apply(params, batch.S), batch.A)
            return jnp.mean(sample.weights * optax.huber_loss(td_errors)), td_errors

        grads, td_errors = jax.grad(loss_fn, has_aux=True)(state.params)
        buffer_state = buffer.update(state.buffer, sample.indices, td_errors)
        updates, opt = optimizer.update(grads, state.opt)
        params = optax.apply_updates(state.params, updates)
        target_params = optax.incremental_update(params, state.target_params, config.target_rate)
        return state.replace(buffer=buffer_state, params=params, target_params=target_params, opt=opt, key=key)

    return init, act, learn


def make_buffer(per: bool, steps: int) -> jr.ReplayBuffer:
    """A prioritized or uniform replay buffer. Beta anneals to 1 in `steps` updates."""
    beta = optax.linear_schedule(0.4, 1.0, steps)
    return jr.ReplayBuffer(capacity=CAPACITY, sampler=jr.Prioritized(alpha=0.6, beta=beta) if per else jr.Uniform())


def parse_args() -> tuple[argparse.Namespace, Config]:
    parser = Parser("Double DQN on CartPole-v1, several seeds in one jitted scan.")
    parser.add_experiment(seeds=8)
    parser.add_count("steps", "environment steps per seed", 250_000, 8_000)
    draws = parser.add_mutually_exclusive_group()
    draws.add_argument("--per", action="store_true", default=True, help="prioritized replay (the default)")
    draws.add_argument("--uniform", dest="per", action="store_false", help="uniform replay")
    parser.add_argument("--num-envs", type=integer(1, CAPACITY), default=Config.num_envs, help="per seed (16)")
    parser.add_argument("--n", type=integer(1, Config.warmup), default=Config.n, help="steps in a return (3)")
    args = parser.parse()
    steps = parser.learning_steps(args.steps, args.num_envs, Config)
    return args, Config(buffer=make_buffer(args.per, steps), steps=steps, num_envs=args.num_envs, n=args.n)


def main() -> None:
    args, config = parse_args()
    name = "prioritized" if args.per else "uniform"
    returns, timing = run(make_agent(config, *gymnax.make("CartPole-v1")), config, args)

    path, title = args.out / f"dqn_{name}.png", f"CartPole-v1, {args.n}-step double DQN, {name} replay"
    summarize(path, title, name, returns, timing, last_episodes=LAST_EPISODES, goal=SOLVED, ylim=(0, 520))


if __name__ == "__main__":
    main()
