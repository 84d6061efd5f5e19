"""An adapter of brax 0.14 for `brax_sac.py`."""

from typing import Any

import jax
import jax.numpy as jnp

import jaxreplay as jr


class Replay:
    """A buffer with the methods of brax's `UniformSamplingQueue`, which brax calls inside its compiled programs."""

    def __init__(self, max_replay_size: int, dummy_data_sample: Any, sample_batch_size: int):
        self.buffer, self.batch_size = jr.ReplayBuffer(capacity=max_replay_size), sample_batch_size
        self.like = jax.tree.map(lambda x: jnp.asarray(x)[None], dummy_data_sample)

    def init(self, key: jax.Array) -> tuple[jax.Array, jr.buffers.ReplayState]:
        return key, self.buffer.init(self.like)

    def insert(self, state: Any, samples: Any) -> Any:
        return state[0], self.buffer.add(state[1], samples)

    def sample(self, state: Any) -> tuple[Any, Any]:
        key, draw = jax.random.split(state[0])
        return (key, state[1]), self.buffer.sample(state[1], draw, self.batch_size).items

    def size(self, state: Any) -> jax.Array:
        return self.buffer.size(state[1])
