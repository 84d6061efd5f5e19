"""Adapters of rejax 0.1.3 and gymnax 0.0.9, for `rejax_dqn.py` and `rejax_sac.py`, and how these train."""

from collections.abc import Callable
from typing import Any

import jax
from flax import struct
from gymnax.wrappers.purerl import GymnaxWrapper
from rejax.algos.algorithm import register_init
from rejax.buffers import ReplayBuffer
from rejax.compat import create

import jaxreplay as jr

PACKAGES = ("rejax", "gymnax", "flax", "optax")
NEVER = 2**31 - 1


class Replay(struct.PyTreeNode):
    """A buffer and its state, with the two methods that rejax calls."""

    buffer: jr.ReplayBuffer = struct.field(pytree_node=False)
    state: jr.ReplayState

    def extend(self, batch: Any) -> "Replay":
        return self.replace(state=self.buffer.add(self.state, batch))

    def sample(self, num: int, rng: jax.Array) -> Any:
        return self.buffer.sample(self.state, rng, num).items


class OnReplayBuffer:
    """Inherited before an algorithm of rejax: its replay is a `jr.ReplayBuffer` with the same law."""

    @register_init
    def initialize_replay_buffer(self, rng: jax.Array) -> dict[str, Any]:
        buffer = jr.ReplayBuffer(capacity=self.buffer_size, sampler=jr.Uniform(replacement=False))
        like = jax.eval_shape(lambda: ReplayBuffer.empty(1, self.obs_space, self.action_space))
        return {"replay_buffer": Replay(buffer, buffer.init(like.data))}


class Ended(struct.PyTreeNode):
    """The state of an environment, and what its last step led to."""

    env: Any
    obs: jax.Array
    terminated: jax.Array | bool = False
    truncated: jax.Array | bool = False


class KeepsEnds(GymnaxWrapper):
    """Keeps what gymnax 0.0.9 does not tell: the final observation, and which of its ends are but the time limit."""

    def __deepcopy__(self, memo: dict) -> "KeepsEnds":  # rejax makes one, which the base class cannot stand
        return self

    def reset(self, key: jax.Array, params: Any) -> tuple[jax.Array, Ended]:
        obs, state = self._env.reset(key, params)
        return obs, Ended(state, obs)

    def step(self, key: jax.Array, ended: Ended, action: jax.Array, params: Any) -> tuple:
        obs, state, reward, done, info = self._env.step(key, ended.env, action, params)
        final_obs, final, *_ = self._env.step_env(jax.random.split(key)[0], ended.env, action, params)
        terminated = self._env.is_terminal(final, params.replace(max_steps_in_episode=NEVER))
        return obs, Ended(state, final_obs, terminated, done & ~terminated), reward, done, info


def trainer(algorithm: Any, env: str, last: int, keep_ends: bool = False, **settings: Any) -> Callable:
    """A function from keys [seeds] to returns [seeds]: means of the last evaluations, of 128 episodes each."""
    task, params = create(env)
    task = KeepsEnds(task) if keep_ends else task
    algo = algorithm.create(env=task, env_params=params, **settings)

    def train(key: jax.Array) -> jax.Array:
        _, (_, returns) = algo.train(key)
        return returns[-last:].mean()

    return jax.vmap(train)
