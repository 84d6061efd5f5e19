"""An adapter of JaxGCRL's CRL for `jaxgcrl_crl.py`: a replay that draws the goals too."""

import math
from typing import Any

import jax
import jax.numpy as jnp

import jaxreplay as jr


class Replay:
    """A buffer with the methods of JaxGCRL's queue. Each drawn row has a later row of its episode, for its goal."""

    def __init__(
        self,
        max_replay_size: int,
        dummy_data_sample: Any,
        sample_batch_size: int,
        num_envs: int,
        episode_length: int,
        gamma: float = 0.99,
    ):
        sizes = {"length": max_replay_size, "num_envs": num_envs, "sequence_length": 2}
        self.buffer = jr.SequenceBuffer(**sizes, windows="inside", hindsight=True)  # each first row has a later one
        self.rows, self.gamma = (num_envs, episode_length - 1), gamma
        self.like = jax.tree.map(lambda x: jnp.zeros((1, num_envs, *jnp.shape(x))), dummy_data_sample)

    def init(self, key: jax.Array) -> tuple[jax.Array, jr.buffers.SequenceState]:
        return key, self.buffer.init(self.like)

    def insert_internal(self, state: Any, rows: Any) -> Any:
        return state[0], self.buffer.add(state[1], rows, ends=rows.discount == 0)

    def sample_internal(self, state: Any) -> tuple[Any, Any]:
        key, draw, goal = jax.random.split(state[0], 3)
        found = self.buffer.sample(state[1], draw, math.prod(self.rows))
        later, _ = self.buffer.later(state[1], goal, found.indices, law="geometric", gamma=self.gamma)
        rows = jax.tree.map(lambda x: x[:, 0], found.items)
        rows = rows._replace(extras={**rows.extras, "later": later})
        return (key, state[1]), jax.tree.map(lambda x: x.reshape(*self.rows, *x.shape[1:]), rows)

    insert, sample = insert_internal, sample_internal

    def size(self, state: Any) -> jax.Array:
        return self.buffer.size(state[1])


def with_goals(config: tuple[float, int, tuple[int, ...]], rows: Any, key: jax.Array) -> Any:
    """Replaces JaxGCRL's `flatten_batch`: the rows with the goals of their later rows."""
    _, state_size, goal_indices = config
    later = rows.extras["later"]
    state, future = (x.observation[:, :state_size] for x in (rows, later))
    goal = later.observation[:, jnp.array(goal_indices)]
    return rows._replace(observation=jnp.concatenate([state, goal], axis=1), extras={"future_state": future})
