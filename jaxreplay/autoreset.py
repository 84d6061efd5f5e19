"""NextStepAutoreset: a row for the final observation, from environments that reset within the last step."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from jaxreplay._common import checks


@struct.dataclass
class AutoresetState:
    """State of one environment behind `NextStepAutoreset`.

    Attributes:
      env: the environment's own state, that of the next episode where `waiting`.
      obs: what the environment returned last: where `waiting` the next episode's first observation.
      waiting: bool [], whether the episode has ended and the next call only starts the next one.
    """

    env: Any
    obs: Any
    waiting: jax.Array  # []


@dataclasses.dataclass(frozen=True, kw_only=True)
class NextStepAutoreset:
    """Turns same-step autoreset into next-step autoreset: one environment, to be mapped by `jax.vmap`.

    An environment with same-step autoreset returns, with an episode's last reward, the first observation of the next
    episode, and hands over the final observation aside (gymnax: `info["final_observation"]`). A stream of its steps
    lacks that observation, from which a truncated episode bootstraps. Here the last step returns the final observation;
    the call after it makes no step, ignores its action and returns the first observation, reward 0 and no flags, as
    Gymnasium's vector environments do by default. An episode of T steps so takes T + 1 calls, and its T + 1
    observations are the rows of a `SequenceBuffer`.

    Attributes:
      env_step: env_step(key, env_state, action) -> (obs, env_state, reward, terminated, truncated, final_obs), where
        `obs` and `env_state` are those after the reset if the episode ended, and `final_obs` is what the step led to
        (read only then). The flags are bool [], or numbers, of which any but 0 is True.
    """

    env_step: Callable[[jax.Array, Any, Any], tuple[Any, Any, jax.Array, jax.Array, jax.Array, Any]]

    def init(self, env_state: Any, obs: Any) -> AutoresetState:
        """The state behind an environment that has just been reset to `obs`."""
        return AutoresetState(env_state, obs, jnp.zeros((), bool))

    def step(
        self, key: jax.Array, state: AutoresetState, action: Any
    ) -> tuple[AutoresetState, Any, jax.Array, jax.Array, jax.Array, jax.Array]:
        """Make a step, or start the next episode.

        Returns:
          the new state, the observation, the reward, and bool []: terminated, truncated, and whether this was a step.

        Raises:
          ValueError: `env_step` returns flags of another shape.
        """
        obs, env, reward, terminated, truncated, final_obs = self.env_step(key, state.env, action)
        stepped = ~state.waiting
        terminated, truncated = _as_flag("terminated", terminated) & stepped, _as_flag("truncated", truncated) & stepped
        done = terminated | truncated

        def where(condition: jax.Array, x: Any, y: Any) -> Any:
            return jax.tree.map(lambda x, y: jnp.where(condition, x, y), x, y)

        env, obs = where(stepped, (env, obs), (state.env, state.obs))
        reward = jnp.where(stepped, reward, jnp.zeros_like(reward))
        return AutoresetState(env, obs, done), where(done, final_obs, obs), reward, terminated, truncated, stepped


def _as_flag(name: str, x: Any) -> jax.Array:
    flag = jnp.asarray(x, bool)
    if flag.shape != ():
        raise ValueError(f"{name}: got {checks.type_text(flag.dtype, flag.shape)}, expected bool[]; map with jax.vmap.")
    return flag
