"""Functions for drawn sequences: their priorities, burn-in and frame stacks."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxreplay._common import checks, xla


@xla.copies_numpy
def sequence_priority(td_errors: jax.Array, mask: jax.Array | None = None, *, eta: float = 0.9) -> jax.Array:
    """Reduce the TD errors of each sequence to one for `update`: eta * max |td_error| + (1 - eta) * mean |td_error|.

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
      >>> td_errors = np.array([[1.0, -3.0, 2.0]])
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
      >>> first, rest = jr.split_burn_in(np.array([[1, 2, 3, 4]]), burn_in=1)
      >>> first.tolist(), rest.tolist()
      ([[1]], [[2, 3, 4]])
    """
    _, length = checks.leading_axes(checks.as_spec(items), 2, "a batch of sequences")
    burn_in = checks.check_integer("burn_in", burn_in, 0, length - 1, "less than the length of the sequences")
    return jax.tree.map(lambda x: x[:, :burn_in], items), jax.tree.map(lambda x: x[:, burn_in:], items)


@xla.copies_numpy
def stack_frames(frames: jax.Array, ends: jax.Array, k: int) -> jax.Array:
    """Stack the last `k` frames at each step of drawn sequences that has at least k - 1 steps before it.

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
      >>> frames, ends = np.array([[1, 2, 3, 4]]), np.array([[False, True, False, False]])
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
