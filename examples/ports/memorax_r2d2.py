"""memorax's R2D2, original and ported: CartPole without velocities.

pip install -e . memorax==1.0.1 gymnax==0.0.9
python examples/ports/memorax_r2d2.py           # 8 seeds of all, a quarter of an hour on two CPU cores
python examples/ports/memorax_r2d2.py --speed   # times of short runs, with buffers of several sizes
python examples/ports/memorax_r2d2.py --check   # checks of both versions against correct values
python examples/ports/memorax_r2d2.py --short   # to see that it runs

Tested with jax 0.10.2. There are two ports. `sequence_buffer` only replaces the buffer. `PortedR2D2` also starts from
the stored recurrent state, learns from n-step transitions that bootstrap at a time limit, and uses the paper's
priorities (Kapturowski et al. 2019, section 2.3).
"""

import functools
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import measure
import memorax_checks
import optax
from memorax.algorithms import R2D2, R2D2Config
from memorax.buffers import make_prioritised_episode_buffer
from memorax.buffers.episode_buffer import get_full_start_flags
from memorax.environments import environment
from memorax.networks import MLP, RNN, FeatureExtractor, Network, heads
from memorax.utils import Transition
from memorax_adapter import BufferState, KeepsFinal, PortedR2D2, Rows, make_rows, sequence_buffer

TASK, UNITS, FEW = "CartPole-v1", Rows.units, 1_280
AGENT = {"learning_rate": 1e-3, "gamma": 0.99, "tau": 0.02, "target_network_frequency": 1, "n_step": 3}
EXPLORATION = {"start_e": 1.0, "end_e": 0.05, "exploration_fraction": 0.25, "learning_starts": 4_096}
SIZES = {"num_envs": 16, "num_eval_envs": 1, "buffer_size": 100_000, "batch_size": 32, "train_frequency": 64}
SETTINGS = {**AGENT, **EXPLORATION, **SIZES, "burn_in_length": 4, "sequence_length": 20}
ORIGINAL = functools.partial(
    make_prioritised_episode_buffer, min_length=1, add_sequences=True, get_start_flags=get_full_start_flags
)


def make_agent(agent: type[R2D2], make_buffer: Callable, steps: int, settings: dict[str, Any]) -> R2D2:
    config = R2D2Config(name="R2D2", **settings)
    env, env_params = environment.make(f"gymnax::{TASK}")
    see = nn.Sequential((lambda obs: obs[..., ::2], MLP(features=(UNITS,))))  # no velocities
    # Flax's default is orthogonal. On few cores, several concurrent batched QR factorizations can wait for each other
    # forever.
    cell = nn.GRUCell(UNITS, recurrent_kernel_init=nn.initializers.lecun_normal())
    buffer = make_buffer(
        max_length=config.buffer_size,
        sample_batch_size=config.batch_size,
        sample_sequence_length=config.burn_in_length + config.sequence_length,
        add_batch_size=config.num_envs,
        priority_exponent=config.priority_exponent,
    )
    return agent(
        cfg=config,
        env=KeepsFinal(env) if agent is PortedR2D2 else env,
        env_params=env_params,
        q_network=Network(FeatureExtractor(see), RNN(cell), heads.DiscreteQNetwork(env.action_space(env_params).n)),
        optimizer=optax.chain(optax.clip_by_global_norm(10.0), optax.adam(config.learning_rate)),
        buffer=buffer,
        epsilon_schedule=optax.linear_schedule(config.start_e, config.end_e, int(config.exploration_fraction * steps)),
        beta_schedule=optax.linear_schedule(config.importance_sampling_exponent, 1.0, steps),
    )


def make_train(agent: R2D2, steps: int) -> Callable:
    """A function from keys [seeds] to mean returns [seeds] of the episodes that end in the last tenth of the run."""

    def train(key: jax.Array) -> jax.Array:
        key, state = agent.init(key)
        key, state = agent.warmup(key, state, agent.cfg.learning_starts)
        _, _, steps_made = agent.train(key, state, steps)
        rows = Transition(reward=steps_made.reward, done=steps_made.done)
        returns = jax.tree.map(lambda x: x.reshape(-1, agent.cfg.num_envs), rows).episode_returns
        return jnp.nanmean(returns[-(len(returns) // 10) :])

    return jax.vmap(train)


BUFFER = measure.count_lines(BufferState, make_rows, sequence_buffer)
AGENT = measure.count_lines(make_rows, KeepsFinal, Rows, PortedR2D2)
PORTS = {
    "buffer only": (R2D2, sequence_buffer, BUFFER),
    "stored states, n-step with truncation, priorities": (PortedR2D2, Rows, AGENT),
}


def rows(keys: jax.Array, steps: int, rounds: int = 1, **settings: Any) -> measure.Rows:
    settings = {**SETTINGS, **settings}

    def train(agent: type[R2D2], make_buffer: Callable) -> Callable:
        return make_train(make_agent(agent, make_buffer, steps, settings), steps)

    ports = {name: (train(agent, make_buffer), lines) for name, (agent, make_buffer, lines) in PORTS.items()}
    task = f"{TASK} without velocities, {settings['buffer_size']:,} steps stored, {steps:,} made"
    return measure.compare(train(R2D2, ORIGINAL), ports, keys, task=task, rounds=rounds)


def train(args: Any) -> measure.Rows:
    return rows(measure.keys(args), FEW if args.short else 200_000)


def speed(args: Any) -> measure.Rows:
    for size in (10_000, 100_000, 1_000_000)[: 1 if args.short else None]:
        yield from rows(measure.keys(args)[:1], FEW if args.short else 6_400, 5, buffer_size=size)


def learned_value(agent: type[R2D2], make_buffer: Callable) -> str:
    """The mean learned value with a reward of 1 per step and a time limit of 5 steps."""
    learner = make_agent(agent, make_buffer, 32_000, {**SETTINGS, "gamma": 0.9, "tau": 0.1, "buffer_size": 10_000})
    learner = learner.replace(env_params=learner.env_params.replace(max_steps_in_episode=5))
    key, state = learner.warmup(*learner.init(jax.random.key(0)), 1_024)
    return f"{learner.train(key, state, 32_000)[2].info['losses/q_value'][-1]:.1f}"


def check() -> list[dict[str, str]]:
    values = {name: learned_value(agent, make_buffer) for name, (agent, make_buffer, _) in PORTS.items()}
    ported = ", ".join(f"{name}: {value}" for name, value in values.items())
    what = "mean learned value under a time limit of 5 steps, 10 if correct"
    value = {"what": what, "original": learned_value(R2D2, ORIGINAL), "port": ported}
    return [*memorax_checks.check(ORIGINAL, sequence_buffer), value]


if __name__ == "__main__":
    args, how = measure.parser("memorax's R2D2").parse_args(), {"check": check, "speed": speed, "train": train}
    measure.run(args, "memorax_r2d2", ("memorax", "flashbax", "gymnax", "flax"), agent="memorax R2D2", **how)
