"""The windows of a `SequenceBuffer` of which all may be drawn: their slots follow from their numbers."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxreplay._common import ring


def changed_slots(
    buffer: Any,
    sequences: ring.Ring,
    num_steps: int,
    completed: jax.Array,
    drawable: jax.Array,
    td_errors: jax.Array | None,
) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    """Slots that change as steps are added, int32 [K * num_envs]; whether they are drawable now; their TD errors.

    They are those of the sequences completed, and the oldest slot, which for a while may hold a sequence that is partly
    overwritten. A slot that does not change after all is out of range.

    Args:
      buffer: a `SequenceBuffer`.
      sequences: its ring of sequences, behind the new ones.
      num_steps: number of steps added.
      completed: int32 [], how many sequences of each stream these complete.
      drawable: int32 [], how many of each stream may be drawn now.
      td_errors: float [buffer.completed(num_steps), num_envs], or None.
    """
    num_starts, num_slots, num_envs = buffer._num_starts, buffer._num_slots, buffer.num_envs
    ages = [*range(min(buffer.completed(num_steps), num_starts))]
    always_drawable = (buffer.length - buffer.sequence_length + 1) % buffer.stride == 0
    if not always_drawable and len(ages) < num_starts:
        ages.append(num_starts - 1)
    age = jnp.asarray(ages, jnp.int32)
    start = lax.div(sequences.inserted % num_slots, jnp.int32(num_envs)) - 1 - age
    start = ring.wrap_negative(start, num_starts)
    slots = start[:, None] * num_envs + jnp.arange(num_envs, dtype=jnp.int32)[None]
    changed = (age < completed) | (age >= drawable)
    slots = jnp.where(changed[:, None], slots, num_slots)
    if td_errors is not None:
        row = completed - 1 - age
        td_errors = jnp.where((row >= 0)[:, None], td_errors[jnp.maximum(row, 0)], jnp.nan).reshape(-1)
    return slots.reshape(-1), jnp.repeat(age < drawable, num_envs), td_errors
