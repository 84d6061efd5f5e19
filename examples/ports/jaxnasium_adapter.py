"""Adapters of jaxnasium 0.1.1, for `jaxnasium_dqn.py`."""

from typing import Any
from unittest.mock import patch

import equinox as eqx
import jax
import jax.numpy as jnp
import jaxnasium as jym
from jaxnasium._environment import ORIGINAL_OBSERVATION_KEY
from jaxnasium.algorithms import DQN, dqn
from jaxnasium.algorithms.core import Transition
from jaxnasium.algorithms.dqn import DQNAgent

import jaxreplay as jr

FINAL = "final_observation"


class Replay(eqx.Module):
    """A buffer with the methods of jaxnasium's. Rows without their next observation in the buffer are not drawn."""

    buffer: Any = eqx.field(static=True)
    batch_size: int = eqx.field(static=True)
    state: Any

    def __init__(self, max_size: int, sample_batch_size: int, data_sample: Transition, sampler: Any):
        num_envs = data_sample.reward.shape[1]
        settings = {"length": max_size // num_envs, "num_envs": num_envs, "windows": "inside", "sampler": sampler}
        self.buffer, self.batch_size = jr.SequenceBuffer(sequence_length=2, **settings), sample_batch_size
        self.state = self.buffer.init(data_sample)

    def insert(self, rows: Transition) -> "Replay":
        return eqx.tree_at(lambda x: x.state, self, self.buffer.add(self.state, rows, ends=rows.truncated))

    def sample(self, key: jax.Array, with_next_obs: bool = True) -> Transition:
        found = self.buffer.sample(self.state, key, self.batch_size)
        first = jax.tree.map(lambda leaf: leaf[:, 0], found.items)
        next_obs = found.items.observation[:, 1]
        return first.replace(next_observation=next_obs, PER_weight=found.weights, PER_index=found.indices)

    def update_priorities(self, indices: jax.Array, td_errors: jax.Array) -> "Replay":
        return eqx.tree_at(lambda x: x.state, self, self.buffer.update(self.state, indices, td_errors))


class KeepsFinal(jym.Wrapper):
    """Keeps the observation before any reset, under another name."""

    def step(self, key: jax.Array, state: Any, action: Any) -> tuple:
        timestep, state = self._env.step(key, state, action)
        timestep.info[FINAL] = timestep.info[ORIGINAL_OBSERVATION_KEY]
        return timestep, state


class TracedReplay(Replay):
    """Stores prioritized n-step transitions of its input; the environment is wrapped in `KeepsFinal`."""

    tracer: jr.NStep = eqx.field(static=True)
    tracing: jr.transitions.NStepState

    def __init__(self, max_size: int, sample_batch_size: int, data_sample: Transition, gamma: float, n: int = 3):
        self.tracer = jr.NStep(n=n, gamma=gamma, num_envs=data_sample.reward.shape[1])
        self.tracing = self.tracer.init(*jax.tree.map(lambda leaf: leaf[0], self.steps(data_sample)))
        self.buffer = jr.ReplayBuffer(capacity=max_size, sampler=jr.Prioritized(), axes=2)
        self.state = self.buffer.init(jax.eval_shape(lambda rows: self.trace(rows), data_sample)[1])
        self.batch_size = sample_batch_size

    def steps(self, rows: Transition) -> tuple:
        return rows.observation, rows.action, rows.reward, rows.terminated, rows.truncated, rows.info[FINAL]

    def trace(self, rows: Transition) -> tuple[jr.transitions.NStepState, jr.TransitionBatch]:
        def add(tracing: jr.transitions.NStepState, step: tuple) -> tuple:
            return self.tracer.add(tracing, *step)[:2]

        return jax.lax.scan(add, self.tracing, self.steps(rows))

    def insert(self, rows: Transition) -> "TracedReplay":
        tracing, batch = self.trace(rows)
        state = self.buffer.add(self.state, batch)
        return eqx.tree_at(lambda x: (x.tracing, x.state), self, (tracing, state))

    def sample(self, key: jax.Array, with_next_obs: bool = True) -> Transition:
        found = self.buffer.sample(self.state, key, self.batch_size).items
        terminated = 1 - found.In / self.tracer.gamma  # jaxnasium multiplies gamma by 1 - terminated
        row = Transition(found.S, found.A, found.Rn, terminated, terminated, next_observation=found.S_next)
        return row.replace(PER_weight=found.W, PER_index=found.idx)


def learn(agent: DQNAgent, batch: Transition) -> tuple[DQNAgent, jax.Array]:
    """jaxnasium's own update with weighted errors: a target moved closer gives the gradient of a smaller weight."""
    values = jnp.max(jax.vmap(agent.critic_target)(batch.next_observation), axis=1)
    taken = jnp.take_along_axis(jax.vmap(agent.critic)(batch.observation), batch.action[:, None], axis=1)[:, 0]
    td_errors = batch.reward + (1 - batch.terminated) * agent.trainer.gamma * values - taken
    target = taken + batch.PER_weight * td_errors
    return agent.update_params(batch.replace(reward=target, terminated=jnp.ones_like(target))), td_errors


class PrioritizedDQN(DQN):
    """jaxnasium's DQN with a prioritized buffer, its own or `Replay`."""

    def train_iteration(self, runner_state: tuple, train_iter: Any, *, env: Any) -> tuple:
        agent, buffer, *rollout_state = runner_state
        (env_state, obs, key), rows = self._collect_rollout(agent, tuple(rollout_state), env)
        buffer, agent = buffer.insert(rows), agent.update_normalizer(rows)

        def update(carry: tuple, key: jax.Array) -> tuple[tuple, None]:
            agent, buffer = carry
            batch = buffer.sample(key, with_next_obs=True)
            agent, td_errors = learn(agent, batch.normalize(agent.normalizer))
            return (agent, buffer.update_priorities(batch.PER_index, td_errors)), None

        key, update_key = jax.random.split(key)
        keys = jax.random.split(update_key, self.num_updates)
        (agent, buffer), _ = jax.lax.scan(update, (agent, buffer), keys)
        return (agent, buffer, env_state, obs, key), rows.info


def with_buffer(algorithm: type[DQN], buffer: Any) -> type[DQN]:
    """The algorithm with another buffer class instead of jaxnasium's."""

    class WithBuffer(algorithm):
        def train(self, *args: Any) -> tuple:
            with patch.object(dqn, "TransitionBuffer", buffer):
                return super().train(*args)

    return WithBuffer
