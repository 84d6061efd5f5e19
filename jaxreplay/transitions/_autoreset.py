"""NextStepAutoreset: next-step autoreset for environments that reset within the last step."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from jaxreplay._common import checks, shown, xla

RETURNED = ("obs", "env_state", "reward", "terminated", "truncated", "final_obs")


@struct.dataclass
class AutoresetState(shown.Shown):
    """State of one environment in `NextStepAutoreset`.

    Attributes:
      env: the environment's own state; already the next episode's if `waiting`.
      obs: the last observation that the environment returned; the first of the next episode if `waiting`.
      waiting: bool [], True if the episode has ended and the next call only starts a new one.

    Examples:
      >>> env = jr.NextStepAutoreset(env_step=lambda *_: (0, 0, 1.0, True, False, 9))
      >>> isinstance(env.init(env_state=0, obs=0), jr.transitions.AutoresetState)
      True
    """

    env: Any
    obs: Any
    waiting: jax.Array  # []


@checks.config
class NextStepAutoreset(metaclass=shown.Kind):
    """Converts an environment from same-step to next-step autoreset; use `jax.vmap` for several environments.

    With same-step autoreset, the last step of an episode returns the first observation of the next one. The final
    observation is passed separately (gymnax: `info["final_observation"]`). The stream of observations then lacks the
    one that a truncated episode bootstraps from.

    With next-step autoreset, the last step returns the final observation. The next call is not a step: it ignores its
    action and returns the first observation, reward 0 and flags False. Gymnasium's vector environments do this by
    default.
    An episode of T steps takes T + 1 calls, and its T + 1 observations are the rows of a `SequenceBuffer`.

    Attributes:
      env_step: env_step(key, env_state, action) -> (obs, env_state, reward, terminated, truncated, final_obs). If the
        episode ended, `obs` and `env_state` are from after the reset, and `final_obs` is the final observation;
        otherwise `final_obs` is ignored. The flags are bool [] or numbers [] (nonzero is True).

    Examples:
      >>> # Ends at place 2, and resets itself within that step.
      >>> def env_step(key, place, action):
      ...     done, after = place == 1, jnp.where(place == 1, 0, place + 1)
      ...     return after, after, 1.0, done, False, place + 1
      >>> env = jr.NextStepAutoreset(env_step=env_step)
      >>> state, rows = env.init(jnp.int32(0), jnp.int32(0)), []
      >>> for _ in range(4):
      ...     state, obs, reward, terminated, truncated, step = env.step(state, None, key)
      ...     rows.append((int(obs), float(reward), bool(terminated), bool(step)))
      >>> rows[:2]  # the final observation, 2, has a row
      [(1, 1.0, False, True), (2, 1.0, True, True)]
      >>> rows[2:]  # the call after it is not a step
      [(0, 0.0, False, False), (1, 1.0, False, True)]
    """

    env_step: Callable[[jax.Array, Any, Any], tuple[Any, Any, jax.Array, jax.Array, jax.Array, Any]] = checks.field(
        checks.check_callable, "a function of a key, a state and an action"
    )

    def init(self, env_state: Any, obs: Any) -> AutoresetState:
        """State of an environment that has just been reset to `obs`.

        Examples:
          >>> env = jr.NextStepAutoreset(env_step=lambda *_: (0, 0, 1.0, True, False, 9))
          >>> bool(env.init(env_state=0, obs=0).waiting)
          False
        """
        env_state, obs = xla.copy(xla.copy_numpy((env_state, obs)))  # the caller may donate both the state and obs
        return AutoresetState(env_state, obs, jnp.zeros((), bool))

    def step(
        self, state: AutoresetState, action: Any, key: jax.Array
    ) -> tuple[AutoresetState, Any, jax.Array, jax.Array, jax.Array, jax.Array]:
        """Make a step, or start the next episode if the last call ended one.

        Args:
          state: the state from `init` or the last call.
          action: passed to `env_step`.
          key: a PRNG key, passed to `env_step`.

        Returns:
          the new state, the observation, the reward, and bool []: terminated, truncated, and True if this was a step.

        Raises:
          ValueError: `state` is not an `AutoresetState`, or `env_step` does not return the values above, such as scalar
            flags, and observations and states with the structure and shapes of `state`.

        Examples:
          >>> # Episodes of one step, with the final observation 9.
          >>> env = jr.NextStepAutoreset(env_step=lambda *_: (0, 0, 1.0, True, False, 9))
          >>> state, obs, reward, terminated, *_ = env.step(env.init(0, 0), None, key)
          >>> int(obs), bool(terminated), bool(state.waiting)  # the next call starts an episode
          (9, True, True)
        """
        checks.check_state(self, state, AutoresetState)
        returned = self.env_step(key, state.env, action)
        if not isinstance(returned, tuple | list) or len(returned) != len(RETURNED):
            count = f" of {len(returned)}" if isinstance(returned, tuple | list) else ""
            raise ValueError(f"env_step: returned a {type(returned).__name__}{count}, expected {', '.join(RETURNED)}.")
        obs, env, reward, terminated, truncated, final_obs = returned
        returned = checks.as_spec({"obs": obs, "env_state": env, "final_obs": final_obs})
        before = checks.as_spec({"obs": state.obs, "env_state": state.env, "final_obs": state.obs})
        checks.check_like(returned, before, 0, 0, "the state before env_step")
        reward = checks.as_real("reward", reward, "a real number")
        stepped = ~state.waiting
        terminated, truncated = _as_flag("terminated", terminated) & stepped, _as_flag("truncated", truncated) & stepped
        done = terminated | truncated

        env, obs = jax.tree.map(functools.partial(jnp.where, stepped), (env, obs), (state.env, state.obs))
        reward = jnp.where(stepped, reward, jnp.zeros_like(reward))
        last = jax.tree.map(functools.partial(jnp.where, done), final_obs, obs)
        return AutoresetState(env, obs, done), last, reward, terminated, truncated, stepped


def _as_flag(name: str, x: Any) -> jax.Array:
    """`x` as bool []."""
    return checks.as_real(name, x, "bool[]; map with jax.vmap", ()).astype(bool)
