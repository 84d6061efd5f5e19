"""Two ports of memorax's R2D2: one of its buffer, one of the agent."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import struct
from memorax.algorithms import R2D2
from memorax.buffers.prioritised_episode_buffer import PrioritisedEpisodeBufferSample
from memorax.utils import Transition, periodic_incremental_update
from memorax.utils.wrappers import GymnaxWrapper

import jaxreplay as jr


@struct.dataclass
class BufferState:
    """The fields of a buffer's state that the agent reads, for a factor of the weights that normalization cancels."""

    replay: jr.buffers.SequenceState
    is_full: bool = struct.field(pytree_node=False, default=False)
    current_index: int = struct.field(pytree_node=False, default=1)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Replay:
    """A `jr.SequenceBuffer` from the arguments of memorax's buffer. A sequence may start at any row."""

    max_length: int
    sample_batch_size: int
    sample_sequence_length: int
    add_batch_size: int
    priority_exponent: float

    @property
    def buffer(self) -> jr.SequenceBuffer:
        length, rows = self.max_length // self.add_batch_size, self.sample_sequence_length + 1
        sizes = {"length": length, "num_envs": self.add_batch_size, "sequence_length": rows}
        return jr.SequenceBuffer(**sizes, sampler=jr.Prioritized(alpha=self.priority_exponent))

    def empty(self, row: Any) -> jr.buffers.SequenceState:
        axes = 1, self.add_batch_size
        return self.buffer.init(jax.tree.map(lambda x: jax.ShapeDtypeStruct((*axes, *x.shape), x.dtype), row))


class Sequences(Replay):
    """A buffer with the methods that `make_prioritised_episode_buffer` gives its own.

    The next observation is the observation of the next row, and `done` is its `prev_done`. So each is stored once.
    """

    def stored(self, steps: Transition) -> Transition:
        return steps.replace(next_obs=None, done=None, info=None)

    def init(self, step: Transition) -> BufferState:
        return BufferState(self.empty(self.stored(step)))

    def add(self, state: BufferState, steps: Transition) -> BufferState:  # [num_envs, T, ...]
        steps = jax.tree.map(lambda x: jnp.swapaxes(x, 0, 1), self.stored(steps))
        return state.replace(replay=self.buffer.add(state.replay, steps))

    def sample(self, state: BufferState, key: jax.Array) -> PrioritisedEpisodeBufferSample:
        drawn = self.buffer.sample(state.replay, key, self.sample_batch_size)
        rows, following = jax.tree.map(lambda x: x[:, :-1], drawn.items), jax.tree.map(lambda x: x[:, 1:], drawn.items)
        rows = rows.replace(next_obs=following.obs, done=following.prev_done)
        return PrioritisedEpisodeBufferSample(experience=rows, indices=drawn.indices, probabilities=drawn.probabilities)

    def set_priorities(self, state: BufferState, indices: jax.Array, priorities: jax.Array) -> BufferState:
        return state.replace(replay=self.buffer.update(state.replay, indices, priorities))

    def can_sample(self, state: BufferState) -> jax.Array:
        return self.buffer.can_sample(state.replay)


class KeepsFinal(GymnaxWrapper):
    """Gives the final observation of an episode a row of its own, without a step; `done` is True there."""

    def rows(self, params: Any) -> jr.NextStepAutoreset:
        def step(key: jax.Array, state: Any, action: jax.Array) -> tuple:
            step_key, reset_key = jax.random.split(key)
            final, new, reward, done, _ = self._env.step_env(step_key, state, action, params)
            terminated = self._env.is_terminal(new.replace(time=0), params)
            reset = self._env.reset(reset_key, params)
            obs, new = jax.tree.map(lambda x, y: jnp.where(done, x, y), reset, (final, new))
            return obs, new, reward, terminated, done & ~terminated, final

        return jr.NextStepAutoreset(env_step=step)

    def reset(self, key: jax.Array, params: Any) -> tuple:
        obs, state = self._env.reset(key, params)
        return obs, self.rows(params).init(state, obs)

    def step(self, key: jax.Array, state: Any, action: jax.Array, params: Any) -> tuple:
        state, obs, reward, terminated, truncated, step = self.rows(params).step(state, action, key)
        return obs, state, reward, ~step, {"terminated": terminated, "truncated": truncated}


class Rows(Replay):
    """The rows that `PortedR2D2` stores, with the recurrent state [units] before each."""

    units = 64

    def init(self, step: Transition) -> jr.buffers.SequenceState:
        return self.empty(self.row(step, jnp.zeros(self.units)))

    def row(self, step: Transition, carry: jax.Array) -> dict[str, jax.Array]:
        row = {name: getattr(step, name) for name in ("obs", "action", "reward", "done", "prev_done")}
        return {**row, **step.info, "carry": carry}

    def add(self, state: jr.buffers.SequenceState, step: Transition, carry: jax.Array) -> jr.buffers.SequenceState:
        return self.buffer.add(state, jax.tree.map(lambda x: x[None], self.row(step, carry)))


@struct.dataclass(frozen=True)
class PortedR2D2(R2D2):
    """R2D2 on `Rows`; the environment is wrapped in `KeepsFinal`."""

    def _step(self, carry: Any, _: Any, *, policy: Callable, write_to_buffer: bool = True) -> Any:
        recurrent = carry[1].hidden_state
        (key, state), step = super()._step(carry, None, policy=policy, write_to_buffer=False)
        if write_to_buffer:
            state = state.replace(buffer_state=self.buffer.add(state.buffer_state, step, recurrent))
        return (key, state), step

    def _values(self, params: Any, items: dict[str, jax.Array]) -> jax.Array:
        """Values [B, L, num_actions] after the burn-in."""

        def unroll(rows: dict[str, jax.Array], carry: jax.Array) -> tuple:
            reset, reward = rows["prev_done"], rows["reward"][..., None]
            return self.q_network.apply(params, rows["obs"], reset, rows["action"], reward, reset, carry)

        before, rows = jr.split_burn_in(items, self.cfg.burn_in_length)
        carry = unroll(before, items["carry"][:, 0])[0]
        return unroll(rows, jax.lax.stop_gradient(carry))[1][0]

    def _update(self, key: jax.Array, state: Any) -> tuple:
        key, sample_key = jax.random.split(key)
        buffer, beta, size = self.buffer.buffer, self.beta_schedule(state.step), self.buffer.sample_batch_size
        sample = buffer.sample(state.buffer_state, sample_key, size, beta=beta)
        _, rows = jr.split_burn_in(sample.items, self.cfg.burn_in_length)
        target_values = self._values(state.target_params, sample.items)

        def loss(params: Any) -> tuple:
            values = {"online": self._values(params, sample.items), "target": target_values}
            steps = [rows[name] for name in ("action", "reward", "terminated", "truncated")]
            how = {"n": self.cfg.n_step, "gamma": self.cfg.gamma, "mask": ~rows["done"]}
            batch, valid = jr.sequence_transitions(values, *steps, **how)
            best = jnp.argmax(batch.S_next["online"], axis=-1, keepdims=True)
            following = jnp.take_along_axis(batch.S_next["target"], best, axis=-1)[:, 0]
            taken = jnp.take_along_axis(batch.S["online"], batch.A[:, None], axis=-1)[:, 0]
            td_errors = jnp.where(valid, taken - jax.lax.stop_gradient(batch.Rn + batch.In * following), 0.0)
            td_errors, valid = td_errors.reshape(size, -1), valid.reshape(size, -1)
            losses = jnp.sum(td_errors**2, axis=1) / jnp.maximum(jnp.sum(valid, axis=1), 1)
            return jnp.mean(sample.weights * losses), (td_errors, valid, jnp.mean(taken))

        (value, (td_errors, valid, mean)), grads = jax.value_and_grad(loss, has_aux=True)(state.params)
        updates, optimizer_state = self.optimizer.update(grads, state.optimizer_state, state.params)
        params = optax.apply_updates(state.params, updates)
        period = self.cfg.target_network_frequency
        target = periodic_incremental_update(params, state.target_params, state.step, period, self.cfg.tau)
        replay = buffer.update(state.buffer_state, sample.indices, jr.sequence_priority(td_errors, valid))
        state = state.replace(params=params, target_params=target, optimizer_state=optimizer_state, buffer_state=replay)
        return state, value, mean, jnp.mean(jnp.abs(td_errors))
