"""n-step transitions of whole rollouts, and of drawn sequences, each in one vectorised pass."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jaxreplay._common import calls, checks, layouts, xla
from jaxreplay.transitions import _windows
from jaxreplay.transitions._batch import TransitionBatch
from jaxreplay.transitions._n_step import NStep
from jaxreplay.transitions._windows import TracerSteps


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
    """Extract the n-step transitions of a whole rollout, in one vectorised pass.

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
      >>> rewards, no = np.array([[1.0], [1.0], [1.0]]), np.array([[False]] * 3)
      >>> obs, following = np.array([[0.0], [1.0], [2.0]]), np.array([[1.0], [2.0], [3.0]])
      >>> batch, valid = jr.n_step_transitions(
      ...     obs, obs, rewards, no, no, following, n=2, gamma=0.5
      ... )
      >>> valid.tolist()  # the first step emits nothing
      [False, True, True]
      >>> batch.S.tolist()[1:], batch.Rn.tolist()[1:], batch.S_next.tolist()[1:]
      ([0.0, 1.0], [1.5, 1.5], [2.0, 3.0])
    """
    flush = checks.check_bool("flush", flush, "whether to emit pending transitions")
    steps = TracerSteps(S, A, R, terminated, truncated, S_next, logp=logP, w=W, mask=mask, discount=discounts)
    options = {"next_action": next_action, "record_extra_info": record_extra_info}
    return _extracted(functools.partial(_of_rollout, flush=flush), steps, n, gamma, max_n, **options)


def sequence_transitions(
    S: Any,
    A: Any,
    R: Any,
    terminated: Any,
    truncated: Any,
    *,
    n: int | jax.Array,
    gamma: float | jax.Array | None = None,
    mask: Any = None,
    logP: Any = None,
    W: Any = None,
    discounts: Any = None,
    next_action: bool = False,
    record_extra_info: bool = False,
    max_n: int | None = None,
) -> tuple[TransitionBatch, jax.Array]:
    """Extract n-step transitions from sequences of a `SequenceBuffer`; next observations are later rows.

    Each of the first L - n of L rows starts the transition that `NStep` traces from the same steps. A sequence of n + 1
    rows yields one transition.

    A truncated step needs its final observation, in the row after it, where `mask` is False (see
    `jaxreplay.SequenceBuffer`). If that row holds a step instead, it belongs to the next episode, and the final
    observation is missing. Windows that reach the truncated step then end right before it and bootstrap from the
    observation that it started from. No transition starts at the truncated step itself.

    With `max_n`, `n` may be traced, as `gamma` may, and annealed within one program: Schwarzer et al. 2023 (Bigger,
    Better, Faster, section 3) decrease n from 10 to 3 and increase gamma from 0.97 to 0.997. Whatever `n` is, each of
    the first L - max_n rows starts the transition of a static `n`. No transition starts at later rows, even if a
    smaller `n` leaves room for it.

    Args:
      S: pytree [B, L, ...], observations; or other data of the rows, such as the values of a recurrent network.
      A: pytree [B, L, ...], actions.
      R: number [B, L], rewards.
      terminated, truncated: bool [B, L]; a number other than 0 is True.
      n: see `NStep`; with `max_n` also a traced integer [], clipped to [1, max_n].
      gamma: discount in [0, 1], a number, or an array [] or [B], clipped if traced; None with `discounts`. Powers of an
        array are computed in float32 or its wider dtype, powers of a number in float64.
      next_action, record_extra_info: see `NStep`; with `max_n`, `extra_info` has leaves [B, max_n, ...].
      mask: bool [B, L], True if the row holds a step; None for all. If the stream has no rows for final observations,
        mask `valid` with `Sample.mask`, and leave it out here.
      logP, W: float [B, L] or None.
      discounts: float [B, L] or None, a discount for each step instead of gamma, as in `NStep`.
      max_n: None, or the largest `n`, a Python integer, which determines all shapes.

    Returns:
      TransitionBatch [B * (L - n)] ([B * (L - max_n)] with `max_n`), sequence by sequence; and its `valid`, bool of the
      same length, False if the row holds no step, or no action follows (`next_action`).

    Raises:
      ValueError: `n`, `gamma` or `max_n` is out of range, `n` is traced without `max_n`, leading axes differ, a leaf
        has more than one number or flag per step, there are fewer than n + 1 (max_n + 1) rows, or there is not one
        of `gamma` and `discounts`.

    Examples:
      >>> rows, no = np.array([[1.0, 2.0, 3.0, 4.0]]), np.array([[False] * 4])
      >>> batch, valid = jr.sequence_transitions(rows, rows, rows, no, no, n=2, gamma=0.5)
      >>> batch.S.tolist(), batch.Rn.tolist(), batch.In.tolist(), batch.S_next.tolist()
      ([1.0, 2.0], [2.0, 3.5], [0.25, 0.25], [3.0, 4.0])
    """
    steps = TracerSteps(S, A, R, terminated, truncated, s_next=None, logp=logP, w=W, mask=mask, discount=discounts)
    options = {"next_action": next_action, "record_extra_info": record_extra_info}
    return _extracted(_of_sequences, steps, n, gamma, max_n, **options)


def _extracted(
    extract: Callable[..., TransitionBatch], steps: TracerSteps, n: Any, gamma: Any, max_n: Any, **recorded: Any
) -> tuple[TransitionBatch, jax.Array]:
    """`extract(tracer, steps, n, gamma)` for a tracer of the largest `n`; see `n_step_transitions`."""
    n_now = gamma_now = None  # to replace the tracer's own
    gamma = _windows.check_gamma(gamma)
    if isinstance(gamma, jax.Array):
        gamma, gamma_now = 1.0, gamma
    if max_n is not None:
        max_n = checks.check_integer("max_n", max_n, 1, 2**31 - 1, "the largest number of steps in a window")
        checks.check_integer("n", n, 1, max_n, "at most max_n; or give a larger max_n", traced=None)
        n, n_now = max_n, n
    batch = extract(NStep(n=n, gamma=gamma, **recorded), xla.copy_numpy(steps), n_now, gamma_now)
    return batch, batch.valid


@calls.method(static=("flush",))
def _of_rollout(tracer: NStep, given: Any, n: Any, gamma: Any, *, flush: bool) -> TransitionBatch:
    """See `n_step_transitions`; `n` and `gamma` as for `_windows.transitions`."""
    steps = _windows.as_steps(given, "a rollout")
    length, window = len(steps.r), tracer.n + tracer.next_action
    if 0 < length < window and not flush:
        rule = f"expected at least {window}; give more steps, or flush=True"
        raise ValueError(f"n={tracer.n}: got a rollout of {length} steps, {rule}.")
    starts = jnp.arange(length, dtype=jnp.int32) - (window - 1)
    if flush:
        pending = jnp.arange(length - tracer.n, length, dtype=jnp.int32)
        starts = jnp.concatenate([starts, jnp.where(pending <= length - window, -1, pending)])
    if length == 0:  # a row without a step, so that there is one to read
        steps = jax.tree.map(lambda leaf: jax.lax.full((1, *leaf.shape[1:]), 0, leaf.dtype), steps)
    count = jnp.where(starts < 0, 0, length - starts)
    return layouts.merge_axes(_windows.transitions(tracer, steps, jnp.maximum(starts, 0), count, None, n, gamma))


@calls.method()
def _of_sequences(tracer: NStep, given: Any, n: Any, gamma: Any) -> TransitionBatch:
    """See `sequence_transitions`; `n` and `gamma` as for `_windows.transitions`."""
    steps = _windows.as_steps(given, "a batch of sequences")
    length = steps.r.shape[1]
    if length <= tracer.n:
        found = f"{'n' if n is None else 'max_n'}={tracer.n}: got sequences of {length} rows"
        raise ValueError(f"{found}, expected at least {tracer.n + 1}: {tracer.n} steps and the next observation.")
    is_step_next = jnp.pad(steps.mask[:, 1:], ((0, 0), (0, 1)))
    cut = steps.truncated & ~steps.terminated & is_step_next  # the final observation is missing
    steps = dataclasses.replace(steps, mask=steps.mask & ~cut)
    steps = jax.tree.map(lambda leaf: leaf.swapaxes(0, 1), steps)
    starts = jnp.arange(length - tracer.n, dtype=jnp.int32)
    count = length - (not tracer.next_action) - starts  # the action of the last row may be a next action
    batch = _windows.transitions(tracer, steps, starts, count, None, n, gamma)
    return layouts.merge_axes(jax.tree.map(lambda leaf: leaf.swapaxes(0, 1), batch))
