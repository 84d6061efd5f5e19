"""Reward tracing of a whole rollout at once."""

from typing import Any

import jax

from jaxreplay._common import checks, xla
from jaxreplay.transitions._batch import TransitionBatch
from jaxreplay.transitions._n_step import NStep
from jaxreplay.transitions._windows import TracerSteps, check_gamma


def n_step_transitions(
    S: Any,
    A: Any,
    R: Any,
    terminated: Any,
    truncated: Any,
    S_next: Any,
    *,
    n: int | jax.Array,
    gamma: float | jax.Array | None = None,
    logP: Any = None,
    W: Any = None,
    mask: Any = None,
    discounts: Any = None,
    next_action: bool = False,
    record_extra_info: bool = False,
    flush: bool = False,
    max_n: int | None = None,
) -> tuple[TransitionBatch, jax.Array]:
    """The transitions of a whole rollout in one vectorised pass.

    The result equals the concatenated results of `NStep.add`, called step by step. Row t * num_envs + e is emitted by
    step t of environment e, so rows of the first n - 1 steps are not valid. With `flush`, the n * num_envs rows of
    `NStep.flush` follow.

    Args:
      S, A, R, terminated, truncated, S_next, logP, W, mask, discounts: as for `NStep.add`, with a leading time axis:
        [T, num_envs, ...].
      n, next_action, record_extra_info: see `NStep`.
      gamma: discount in [0, 1], a number, or an array [] or [num_envs], clipped if traced; None with `discounts`.
      flush: also emit the transitions that are pending at the end of the rollout, as if it were truncated there.
      max_n: None, or the largest `n`, which may then be traced; see `jaxreplay.sequence_transitions`. Rows are for the
        same steps as with n = `max_n`.

    Returns:
      TransitionBatch [T * num_envs] ([(T + n) * num_envs] with `flush`); and its `valid`, bool of the same length.

    Raises:
      ValueError: `n`, `gamma` or `max_n` is out of range, `n` is traced without `max_n`, leading axes differ, there is
        more than one number or flag per step, or not one of `gamma` and `discounts`.

    Examples:
      >>> # Arrays [T, num_envs].
      >>> rewards, no = jnp.array([[1.0], [1.0], [1.0]]), jnp.array([[False]] * 3)
      >>> obs, following = jnp.array([[0.0], [1.0], [2.0]]), jnp.array([[1.0], [2.0], [3.0]])
      >>> batch, valid = jr.n_step_transitions(
      ...     obs, obs, rewards, no, no, following, n=2, gamma=0.5
      ... )
      >>> valid.tolist()  # the first step emits nothing
      [False, True, True]
      >>> batch.S.tolist()[1:], batch.Rn.tolist()[1:], batch.S_next.tolist()[1:]
      ([0.0, 1.0], [1.5, 1.5], [2.0, 3.0])
    """
    tracer, n_now, gamma_now = tracer_for(n, gamma, discounts, max_n, next_action, record_extra_info)
    flush = checks.check_bool("flush", flush, "whether to emit pending transitions")
    steps = TracerSteps(S, A, R, terminated, truncated, S_next, logp=logP, w=W, mask=mask, discount=discounts)
    batch = tracer._rollout(xla.copy_numpy(steps), flush, n_now, gamma_now)
    return batch, batch.valid


def tracer_for(
    n: Any, gamma: Any, discounts: Any, max_n: Any, next_action: bool, record_extra_info: bool
) -> tuple[NStep, Any, Any]:
    """A tracer with these settings, and `n` and `gamma` to replace its own, or None; see `_windows.transitions`."""
    n_now = gamma_now = None
    if gamma is None and discounts is None:
        rule = "must be a number in [0, 1], or a traced float [] or [num_envs]; it is a discount"
        raise ValueError(f"gamma=None: {rule}; or give discounts, one per step.")
    gamma = check_gamma(gamma)
    if isinstance(gamma, jax.Array):
        gamma, gamma_now = 1.0, gamma
    if max_n is not None:
        max_n = checks.check_integer("max_n", max_n, 1, 2**31 - 1, "the largest number of steps in a window")
        checks.check_integer("n", n, 1, max_n, "at most max_n; or give a larger max_n", traced=None)
        n, n_now = max_n, n
    tracer = NStep(n=n, gamma=gamma, next_action=next_action, record_extra_info=record_extra_info)
    return tracer, n_now, gamma_now
