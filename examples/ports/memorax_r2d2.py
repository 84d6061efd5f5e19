"""memorax's R2D2, original and ported: CartPole without velocities.

pip install -e . memorax==1.0.1 gymnax==0.0.9
python examples/ports/memorax_r2d2.py           # 8 seeds of all, a quarter of an hour on two CPU cores
python examples/ports/memorax_r2d2.py --speed   # times of short runs, with buffers of several sizes
python examples/ports/memorax_r2d2.py --check   # checks of both versions against correct values
python examples/ports/memorax_r2d2.py --short   # to see that it runs

Tested with jax 0.10.2. There are two ports. `Sequences` only replaces the buffer. `PortedR2D2` also starts from
the stored recurrent state, learns from n-step transitions that bootstrap at a time limit, and uses the paper's
priorities (Kapturowski et al. 2019, section 2.3).
"""

import dataclasses
import functools
import pathlib
import sys
from collections.abc import Callable
from typing import Any

import flashbax
import flax.linen as nn
import jax
import jax.numpy as jnp
import measure
import memorax_checks
import optax
from memorax.algorithms import DQN, R2D2, DQNConfig, R2D2Config
from memorax.buffers import make_prioritised_episode_buffer
from memorax.buffers.episode_buffer import get_full_start_flags
from memorax.environments import environment
from memorax.networks import MLP, RNN, FeatureExtractor, Network, heads
from memorax.utils import Transition
from memorax_adapter import BufferState, KeepsFinal, PortedR2D2, Replay, Rows, Sequences

sys.path.append(str(pathlib.Path(__file__).parent.parent / "recipes"))
import as_flashbax

TASK = "CartPole-v1 without velocities, {buffer_size:,} steps stored, {steps:,} made"
UNITS = Rows.units
AGENT = {"learning_rate": 1e-3, "gamma": 0.99, "tau": 0.02, "target_network_frequency": 1, "n_step": 3}
EXPLORATION = {"start_e": 1.0, "end_e": 0.05, "exploration_fraction": 0.25, "learning_starts": 4_096}
SIZES = {"num_envs": 16, "num_eval_envs": 1, "buffer_size": 100_000, "batch_size": 32, "train_frequency": 64}
SETTINGS = {**AGENT, **EXPLORATION, **SIZES, "burn_in_length": 4, "sequence_length": 20, "steps": 200_000}
EVERY_ROW = {"min_length": 1, "add_sequences": True, "get_start_flags": get_full_start_flags}
ORIGINAL = (R2D2, functools.partial(make_prioritised_episode_buffer, **EVERY_ROW))


def make_agent(version: tuple[type[R2D2], Callable], steps: int, **settings: Any) -> R2D2:
    agent, make_buffer = version
    config = R2D2Config(name="R2D2", **settings)
    env, env_params = environment.make("gymnax::CartPole-v1")
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


def trainer(version: tuple[type[R2D2], Callable], settings: dict[str, Any]) -> Callable:
    """A function from keys [seeds] to mean returns [seeds] of the episodes that end in the last tenth of the run."""
    agent, steps = make_agent(version, **settings), settings["steps"]

    def train(key: jax.Array) -> jax.Array:
        key, state = agent.init(key)
        key, state = agent.warmup(key, state, agent.cfg.learning_starts)
        _, _, steps_made = agent.train(key, state, steps)
        rows = Transition(reward=steps_made.reward, done=steps_made.done)
        returns = jax.tree.map(lambda x: x.reshape(-1, agent.cfg.num_envs), rows).episode_returns
        return jnp.nanmean(returns[-(len(returns) // 10) :])

    return jax.vmap(train)


BUFFER = measure.count_lines(BufferState, Replay, Sequences)
WHOLE = measure.count_lines(Replay, KeepsFinal, Rows, PortedR2D2)
PORTS = {
    "buffer only": ((R2D2, Sequences), BUFFER),
    "stored states, n-step with truncation, priorities": ((PortedR2D2, Rows), WHOLE),
}


def learned_value(version: tuple[type[R2D2], Callable]) -> str:
    """The mean learned value with a reward of 1 per step and a time limit of 5 steps."""
    sizes = {"steps": 32_000, "gamma": 0.9, "tau": 0.1, "buffer_size": 10_000}
    learner = make_agent(version, **{**SETTINGS, **sizes})
    learner = learner.replace(env_params=learner.env_params.replace(max_steps_in_episode=5))
    key, state = learner.warmup(*learner.init(jax.random.key(0)), 1_024)
    return f"{learner.train(key, state, 32_000)[2].info['losses/q_value'][-1]:.1f}"


def moved(fbx: Any) -> str:
    """The mean learned value of memorax's DQN, with the buffer of flashbax or of the recipe that has its names."""
    like = make_agent(ORIGINAL, **{**SETTINGS, "steps": 16_000, "gamma": 0.9, "burn_in_length": 0})
    config = DQNConfig(**{x.name: getattr(like.cfg, x.name) for x in dataclasses.fields(DQNConfig)})
    draws = {"sample_batch_size": config.batch_size, "sample_sequence_length": 8, "period": 1}
    sizes = {"max_size": config.buffer_size, "add_batch_size": config.num_envs, "min_length_time_axis": 8}
    parts = {name: getattr(like, name) for name in ("env", "env_params", "q_network", "optimizer", "epsilon_schedule")}
    learner = DQN(cfg=config, buffer=fbx.make_trajectory_buffer(**draws, **sizes), **parts)
    key, state = learner.warmup(*learner.init(jax.random.key(0)), 1_024)
    return f"{learner.train(key, state, 16_000)[2].info['losses/q_value'][-1].mean():.1f}"


def check() -> dict[str, list[str]]:
    ported = ", ".join(f"{name}: {learned_value(version)}" for name, (version, _) in PORTS.items())
    values = {"mean learned value under a time limit of 5 steps, 10 if correct": [learned_value(ORIGINAL), ported]}
    values["mean learned value of memorax's DQN, which changes one import"] = [moved(flashbax), moved(as_flashbax)]
    return {**memorax_checks.check(ORIGINAL[1], Sequences), **values}


if __name__ == "__main__":
    speeds = [{"buffer_size": size, "steps": 6_400} for size in (10_000, 100_000, 1_000_000)]
    how = measure.programs(ORIGINAL, PORTS, trainer, (TASK, TASK), SETTINGS, {"steps": 1_280}, speeds, rounds=5)
    args, packages = measure.parser("memorax's R2D2").parse(), ("memorax", "flashbax", "gymnax", "flax")
    measure.run(args, "memorax R2D2", packages, check=check, **how)
