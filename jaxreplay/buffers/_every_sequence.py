"""Drawable sequences of a `SequenceBuffer` if all are: their slots follow from their numbers.

This module and `_chosen_sequences` have the same functions: `init`, `advance`, `end_streams`, `starts`, `ages` and
`younger`.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from jaxreplay._common import ring


def init(buffer: Any) -> None:
    """None: the ring is all the state needed."""


def advance(
    buffer: Any, state: Any, flags: jax.Array, count: jax.Array, completed: jax.Array, wait: jax.Array, td_errors: Any
) -> tuple[dict[str, Any], jax.Array, jax.Array, jax.Array | None]:
    """The change by new rows.

    The completed sequences change their slots. So may the oldest slot, which can hold a partly overwritten sequence.

    Args:
      buffer: a `SequenceBuffer`.
      state: its state before.
      flags: [T, num_envs], the flags of the rows.
      count: int32 [], T, or 0 for no change.
      completed: int32 [], number of sequences of each stream that they complete.
      wait: int32 [], `SequenceState.wait` after them.
      td_errors: float [buffer.completed(T), num_envs], of the completed sequences; or None.

    Returns:
      the fields of the state that change; int32 [K], slots that changed, out of range for no change; bool [K], True if
      the slot is drawable now; and float [K], initial TD errors of the sequences in these slots, or None.
    """
    num_starts, num_slots, num_envs = buffer._num_starts, buffer.num_slots, buffer.num_envs
    num_steps = flags.shape[0]
    stored = jnp.minimum(state.rows.size + count, buffer.length)
    drawable = (stored + wait - buffer.sequence_length) // buffer.stride  # of each stream
    sequences = state.ring.advance(completed * num_envs)
    ages = [*range(min(buffer.completed(num_steps), num_starts))]
    always_drawable = (buffer.length - buffer.sequence_length + 1) % buffer.stride == 0
    if not always_drawable and len(ages) < num_starts:
        ages.append(num_starts - 1)
    age = jnp.asarray(ages[::-1], jnp.int32)  # the oldest first
    newest = jax.lax.div(sequences.inserted % num_slots, jnp.int32(num_envs)) - 1
    start = ring.wrap_negative(newest - age, num_starts)
    slots = start[:, None] * num_envs + jnp.arange(num_envs, dtype=jnp.int32)[None]
    changed = ((age < completed) | (age >= drawable)) & (count > 0)
    slots = jnp.where(changed[:, None], slots, num_slots)
    if td_errors is not None:
        row = completed - 1 - age
        td_errors = jnp.where((row >= 0)[:, None], td_errors[jnp.maximum(row, 0)], jnp.nan).reshape(-1)
    sequences = dataclasses.replace(sequences, size=drawable * num_envs)
    return {"ring": sequences}, slots.reshape(-1), jnp.repeat(age < drawable, num_envs), td_errors


def end_streams(buffer: Any, state: Any, closed: jax.Array) -> dict[str, Any]:
    """Raise a `ValueError`: the place of a sequence follows from its number, so none can be left out."""
    rule = "end_streams, with a mask or without, needs a buffer with gaps=True; jaxreplay.migrate converts the state"
    raise ValueError(f"windows={buffer.windows!r}, gaps=False: {rule}.")


def starts(buffer: Any, state: Any, slots: jax.Array) -> tuple[jax.Array, jax.Array]:
    """First row and stream of the sequences in `slots` [B], int32 [B] each; arbitrary for slots out of range."""
    start = jax.lax.div(slots, jnp.int32(buffer.num_envs))
    return row_of_age(buffer, state, ages(buffer, state, slots)), slots - start * buffer.num_envs


def ages(buffer: Any, state: Any, slots: jax.Array) -> jax.Array:
    """Number of later sequences of the same stream, int32 [B]."""
    start = jax.lax.div(slots, jnp.int32(buffer.num_envs))
    newest = jax.lax.div(state.ring.inserted % buffer.num_slots, jnp.int32(buffer.num_envs)) - 1
    return ring.wrap_negative(newest - start, buffer._num_starts)


def younger(buffer: Any, state: Any, max_age: jax.Array) -> ring.Live:
    """The slots of sequences with an age below `max_age` (int32 [])."""
    return state.ring.newest(jnp.minimum(max_age, buffer._num_starts) * buffer.num_envs)


def row_of_age(buffer: Any, state: Any, age: jax.Array) -> jax.Array:
    """First rows of the sequences completed `age` starts ago (0 for the newest)."""
    row = state.rows.inserted % buffer.length + state.wait - buffer.sequence_length - (age + 1) * buffer.stride
    return jnp.clip(ring.wrap_negative(row, buffer.length), 0, buffer.length - 1)
