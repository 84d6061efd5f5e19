"""Priorities, burn-in, frame stacks and transitions of drawn sequences."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxreplay._common import checks, xla
from jaxreplay.transitions._batch import TransitionBatch
from jaxreplay.transitions._n_step import tracer_for
from jaxreplay.transitions._windows import TracerSteps


@xla.copies_numpy
def sequence_priority(td_errors: jax.Array, mask: jax.Array | None = None, *, eta: float = 0.9) -> jax.Array:
    """One TD error per sequence, eta * max |td_error| + (1 - eta) * mean |td_error|, for `SequenceBuffer.update`.

    From Kapturowski et al. 2019 (Recurrent Experience Replay in Distributed Reinforcement Learning, section 2.3).

    Args:
      td_errors: float [B, L], signed or not.
      mask: bool [B, L], True for TD errors that count; None for all.
      eta: weight of the maximum, 0 to 1.

    Returns:
      float [B]; 0 for a sequence in which no TD error counts.

    Raises:
      ValueError: other shapes or dtypes.

    Examples:
      >>> td_errors = jnp.array([[1.0, -3.0, 2.0]])
      >>> priority = jr.sequence_priority(td_errors, eta=0.9)  # 0.9 * 3 + 0.1 * 2
      >>> round(float(priority[0]), 3)
      2.9
    """
    td_errors = jnp.asarray(td_errors)
    if td_errors.ndim != 2 or td_errors.shape[1] == 0:
        raise ValueError(f"td_errors: got {checks.type_text(td_errors)}, expected [B, L], L at least 1.")
    checks.check_number("eta", eta, 0, 1, "it is the share of the largest", traced=None)
    counted = np.ones(td_errors.shape, bool) if mask is None else checks.check_mask(mask, td_errors.shape)
    return _priority(td_errors, counted, eta, 1 - eta)


@functools.partial(jax.jit, inline=True)
def _priority(td_errors: jax.Array, counted: Any, of_max: Any, of_mean: Any) -> jax.Array:
    sizes = jnp.where(counted, jnp.abs(td_errors), 0)
    count = jnp.maximum(jnp.sum(counted, axis=1, dtype=jnp.int32), 1).astype(sizes.dtype)
    return of_max * jnp.max(sizes, axis=1) + of_mean * jnp.sum(sizes, axis=1) / count


def split_burn_in(items: Any, burn_in: int) -> tuple[Any, Any]:
    """Split drawn sequences into the first `burn_in` steps and the rest.

    A recurrent network starts from its stored state and is unrolled over the first part without a gradient. The
    resulting state is the initial state for the second part (Kapturowski et al. 2019, section 3).

    Args:
      items: pytree [B, L, ...], such as `Sample.items`, or a mask.
      burn_in: 0 to L - 1.

    Raises:
      ValueError: `burn_in` is out of range, or leading axes differ.

    Examples:
      >>> first, rest = jr.split_burn_in(jnp.array([[1, 2, 3, 4]]), burn_in=1)
      >>> first.tolist(), rest.tolist()
      ([[1]], [[2, 3, 4]])
    """
    _, length = checks.leading_axes(checks.as_spec(items), 2, "a batch of sequences")
    burn_in = checks.check_integer("burn_in", burn_in, 0, length - 1, "less than the length of the sequences")
    return jax.tree.map(lambda x: x[:, :burn_in], items), jax.tree.map(lambda x: x[:, burn_in:], items)


@xla.copies_numpy
def stack_frames(frames: jax.Array, ends: jax.Array, k: int) -> jax.Array:
    """Stacks of the last `k` frames at each step of drawn sequences that has at least k - 1 steps before it.

    Args:
      frames: [B, L, ...], single frames.
      ends: bool [B, L], True for the last row of an episode; later rows belong to another episode.
      k: number of frames in a stack, 1 to L.

    Returns:
      [B, L - k + 1, ..., k] in the dtype of the frames, oldest frame first; frames from before the episode's start are
      zero. Row i is the stack at step i + k - 1.

    Raises:
      ValueError: other shapes or dtypes.

    Examples:
      >>> frames, ends = jnp.array([[1, 2, 3, 4]]), jnp.array([[False, True, False, False]])
      >>> jr.stack_frames(frames, ends, k=2).tolist()  # 3 is the first of its episode
      [[[1, 2], [0, 3], [3, 4]]]
    """
    frames = jnp.asarray(frames)
    batch_size, length = checks.leading_axes(frames, 2, "a batch of frames")
    ends = checks.check_mask(ends, (batch_size, length), "ends")
    return _stacks(frames, ends, checks.check_integer("k", k, 1, length, "the number of frames in a stack"))


@functools.partial(jax.jit, static_argnums=2, inline=True)
def _stacks(frames: jax.Array, ends: jax.Array, k: int) -> jax.Array:
    batch_size, length = ends.shape
    kept = jnp.ones((batch_size, length - k + 1), bool)
    stack = []
    for lag in range(k):
        rows = slice(k - 1 - lag, length - lag)
        if lag > 0:
            kept &= ~ends[:, rows]
        frame = frames[:, rows]
        stack.insert(0, jnp.where(kept.reshape(kept.shape + (1,) * (frame.ndim - 2)), frame, jnp.zeros_like(frame)))
    return jnp.stack(stack, axis=-1)


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
      >>> rows, no = jnp.array([[1.0, 2.0, 3.0, 4.0]]), jnp.array([[False] * 4])
      >>> batch, valid = jr.sequence_transitions(rows, rows, rows, no, no, n=2, gamma=0.5)
      >>> batch.S.tolist(), batch.Rn.tolist(), batch.In.tolist(), batch.S_next.tolist()
      ([1.0, 2.0], [2.0, 3.5], [0.25, 0.25], [3.0, 4.0])
    """
    tracer, n_now, gamma_now = tracer_for(n, gamma, discounts, max_n, next_action, record_extra_info)
    steps = TracerSteps(S, A, R, terminated, truncated, s_next=None, logp=logP, w=W, mask=mask, discount=discounts)
    batch = tracer._sequences(xla.copy_numpy(steps), n_now, gamma_now)
    return batch, batch.valid
