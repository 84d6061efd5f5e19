"""Replacements for the flat buffer of flashbax in JaxMARL's VDN."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flashbax.buffers.flat_buffer import ExperiencePair, TransitionSample
from flashbax.buffers.trajectory_buffer import TrajectoryBuffer

import jaxreplay as jr


def adapt(buffer: jr.SequenceBuffer, batch_size: int, make_pairs: Callable[[Any], tuple[Any, Any]]) -> TrajectoryBuffer:
    """`buffer` with the interface of `fbx.make_flat_buffer`. `add` takes a rollout, flattened from [T, num_envs]."""

    def init(step: Any) -> jr.buffers.SequenceState:
        return buffer.init(jax.tree.map(lambda x: jax.ShapeDtypeStruct((1, buffer.num_envs, *x.shape), x.dtype), step))

    def add(state: jr.buffers.SequenceState, steps: Any) -> jr.buffers.SequenceState:
        steps = jax.tree.map(lambda x: x.reshape(-1, buffer.num_envs, *x.shape[1:]), steps)
        return buffer.add(state, steps, ends=steps.dones["__all__"])

    def sample(state: jr.buffers.SequenceState, key: jax.Array) -> TransitionSample:
        first, second = make_pairs(buffer.sample(state, key, batch_size).items)
        return TransitionSample(experience=ExperiencePair(first=first, second=second))

    can_sample = functools.partial(buffer.can_sample, batch_size=batch_size)
    return TrajectoryBuffer(init=init, add=add, sample=sample, can_sample=can_sample)


def one_step_buffer(num_envs: int, max_length: int, sample_batch_size: int, **_: Any) -> TrajectoryBuffer:
    """A buffer of pairs: a step and the next one."""
    buffer = jr.SequenceBuffer(length=max_length // num_envs, num_envs=num_envs, sequence_length=2)

    def make_pairs(items: Any) -> tuple[Any, Any]:
        return jax.tree.map(lambda x: x[:, 0], items), jax.tree.map(lambda x: x[:, 1], items)

    return adapt(buffer, sample_batch_size, make_pairs)


def n_step_buffer(
    num_envs: int, n: int, gamma: float, max_length: int, sample_batch_size: int, **_: Any
) -> TrajectoryBuffer:
    """A buffer of n-step transitions, for tasks that only a time limit ends, as all of MPE.

    Sequences lie inside an episode. The final observation is lost, so no sequence starts at an episode's last step, and
    all bootstrap. The agent bootstraps with (1 - done) * gamma, and `done` is set so that this equals gamma^n.
    """
    length = max_length // num_envs
    buffer = jr.SequenceBuffer(length=length, num_envs=num_envs, sequence_length=n + 1, windows="inside")

    def make_pairs(items: Any) -> tuple[Any, Any]:
        no = jnp.zeros((sample_batch_size, n + 1), bool)
        rewards = items.rewards["__all__"]
        batch, _ = jr.sequence_transitions(items, items.actions, rewards, no, no, n=n, gamma=gamma)
        done = {"__all__": 1 - batch.In / gamma}
        return batch.S.replace(rewards={"__all__": batch.Rn}, dones=done), batch.S_next

    return adapt(buffer, sample_batch_size, make_pairs)
