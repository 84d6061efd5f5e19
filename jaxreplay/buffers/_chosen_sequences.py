"""Drawable sequences of a `SequenceBuffer` in which some are not drawable: a ring of their own.

A completed sequence enters the ring if it is drawable, with the place of its first row. Sequences leave in the same
order, when their first row is overwritten. So the slots of the ring are the drawable sequences, and samplers, handles
and epochs know nothing of episodes. A break is the end of an episode, a gap, or the place where the stream was closed.
The number of rows of a stream since its last break, or the flag of the row before a sequence, decides in O(1) if the
sequence is drawable.

This module and `_every_sequence` have the same functions: `init`, `advance`, `end_streams`, `starts`, `ages` and
`younger`.
"""

import dataclasses
import math
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import struct

from jaxreplay._common import layouts, ring, shown, xla
from jaxreplay.buffers import _every_sequence
from jaxreplay.buffers._episodes import is_end, is_gap

PROBES = 64  # positions that a search reads at a time


@struct.dataclass
class ChosenSequences(shown.Shown):
    """The drawable sequences.

    Attributes:
      first: int32 [num_slots] as the backend wants it, row * num_envs + env of the first row, by slot of the ring.
      so_far: int32 [num_envs], number of rows of each stream since its last break, at most `sequence_length`; with
        windows="episodes" since it was last closed.
    """

    first: Any  # [num_slots]
    so_far: jax.Array  # [num_envs]
    _layouts: ClassVar = {"first": layouts.storage_layout(1)}


def init(buffer: Any) -> ChosenSequences:
    """No drawable sequences."""
    first = layouts.zeros(jax.ShapeDtypeStruct((), jnp.int32), (buffer.num_slots,), 0)
    return ChosenSequences(first, xla.full((buffer.num_envs,), 0, jnp.int32))


def advance(
    buffer: Any, state: Any, flags: jax.Array, count: jax.Array, completed: Any, wait: Any, td_errors: Any
) -> tuple[dict[str, Any], jax.Array, jax.Array, jax.Array | None]:
    """The change by new rows; see `_every_sequence.advance`."""
    (num_steps, num_envs), length, num_slots = flags.shape, buffer.length, buffer.num_slots
    # First rows of the sequences that these rows may complete, counted from the first new row.
    starting = buffer.stride * jnp.arange(buffer.completed(num_steps), dtype=jnp.int32)
    first = starting + state.wait - buffer.sequence_length
    may_be_drawn, so_far = _judge(buffer, state, flags, count, first)
    cursor = state.rows.inserted % length
    # The oldest sequences may be overwritten.
    position = jnp.arange(min(first.size * num_envs, num_slots), dtype=jnp.int32)
    old = state.ring.live().slots(position)
    until = ring.wrap_negative(starts(buffer, state, old)[0] - cursor, length)
    gone = (position < state.ring.size) & (until < count)
    sequences = state.ring.after(gone)
    new, num_new = sequences.next_slots(may_be_drawn.reshape(-1), may_be_drawn.size)
    row = ring.wrap_excess(cursor + ring.wrap_negative(first, length), length)
    places = row[:, None] * num_envs + jnp.arange(num_envs, dtype=jnp.int32)[None]
    kept = layouts.write(state.windows.first, new, places.reshape(-1))
    left = dataclasses.replace(sequences, size=sequences.size - jnp.sum(gone, dtype=jnp.int32))
    # A slot that a sequence leaves and another enters counts as entered only.
    entered = ring.wrap_negative(old - sequences.inserted % num_slots, num_slots) < num_new
    old = jnp.where(gone & ~entered, old, num_slots)
    if td_errors is not None:
        td_errors = jnp.concatenate([td_errors.reshape(-1), jnp.full(old.size, jnp.nan, td_errors.dtype)])
    changed = {"ring": left.advance(num_new), "windows": ChosenSequences(kept, so_far)}
    slots, is_new = jnp.concatenate([new, old]), jnp.arange(new.size + old.size) < new.size
    return changed, slots, is_new, td_errors


def end_streams(buffer: Any, state: Any, closed: jax.Array) -> dict[str, Any]:
    """The fields of the state that change where streams are closed; `closed` is bool [num_envs].

    A sequence with rows from before and after the place is never drawable:
      - its last row has fewer than `sequence_length` rows since the place up to it, and `so_far` counts these.
      - with windows="episodes" the newest row is flagged as an end, so that the next one starts an episode. No complete
        sequence has rows after it, so no mask changes.
      - rows of one number, in which `later` stays, are before or after the place.
    """
    so_far = jnp.where(closed, 0, state.windows.so_far)
    rows = state.rows.after(state.ring.inserted, closed)  # of the next write too
    changed: dict[str, Any] = {"windows": dataclasses.replace(state.windows, so_far=so_far), "rows": rows}
    if buffer.windows == "episodes":
        newest = ring.wrap_negative(rows.inserted % buffer.length - 1, buffer.length)
        places = newest * buffer.num_envs + jnp.arange(buffer.num_envs, dtype=jnp.int32)
        (flags,) = xla.materialize(layouts.read(layouts.merge_axes(state.ends), places))
        flags = jnp.maximum(flags, closed.astype(flags.dtype))  # a gap stays one
        changed["ends"] = layouts.write(state.ends, newest[None], flags[None])
    if state.episodes is not None:
        now = state.episodes.now + closed.astype(jnp.int32)
        changed["episodes"] = dataclasses.replace(state.episodes, now=now)
    # After a draw, XLA:GPU could fuse its reads with those of an addition, which come after this write.
    return xla.read_once(changed | {"ring": state.ring})


def starts(buffer: Any, state: Any, slots: jax.Array) -> tuple[jax.Array, jax.Array]:
    """First row and stream of the sequences in `slots` [B], int32 [B] each; 0 for slots out of range."""
    first = layouts.read(state.windows.first, slots, fill=True)
    row = jax.lax.div(first, jnp.int32(buffer.num_envs))
    return row, first - row * buffer.num_envs


def ages(buffer: Any, state: Any, slots: jax.Array) -> jax.Array:
    """Number of later completed sequences of the same stream, drawable or not, int32 [B]."""
    row, _ = starts(buffer, state, slots)
    since = _every_sequence.row_of_age(buffer, state, jnp.zeros((), jnp.int32)) - row
    return ring.wrap_negative(since, buffer.length) // buffer.stride


def younger(buffer: Any, state: Any, max_age: jax.Array) -> ring.Live:
    """The slots of sequences with an age below `max_age` (int32 []).

    The ring has all in order, oldest first. The search reads PROBES ages at a time, O(log(capacity)) times.
    """
    every, num_older = state.ring.live(), jnp.zeros((), jnp.int32)
    rounds = max(1, math.ceil(math.log(every.capacity, PROBES) - 1e-9))
    for width in (PROBES**k for k in reversed(range(rounds))):
        position = num_older + width * jnp.arange(1, PROBES + 1, dtype=jnp.int32) - 1
        found = ages(buffer, state, every.slots(jnp.clip(position, 0, every.capacity - 1)))
        num_older += width * jnp.sum((position < every.size) & (found >= max_age), dtype=jnp.int32)
    return state.ring.newest(every.size - num_older)


def _judge(buffer: Any, state: Any, flags: jax.Array, count: Any, first: jax.Array) -> tuple[jax.Array, jax.Array]:
    """True for drawable sequences with the rows from `first` (int32 [K]) on, bool [K, num_envs]; and `so_far`."""
    num_steps, so_far, last = flags.shape[0], state.windows.so_far, first + buffer.sequence_length - 1
    if buffer.windows == "episodes":
        may_be_drawn = _start_episodes(buffer, state, flags, first)
        may_be_drawn &= so_far[None] + last[:, None] + 1 >= buffer.sequence_length
        so_far = jnp.minimum(so_far + count, buffer.sequence_length)
    else:
        breaks = is_gap(flags) if buffer.windows in ("any", "cut") else is_end(flags)
        following = jnp.arange(1, num_steps + 1, dtype=jnp.int32)[:, None]
        # The row after the last break up to each row.
        start = jax.lax.cummax(jnp.where(breaks, following, -so_far[None]), axis=0)
        before = jnp.where(is_gap(flags), num_steps, jnp.concatenate([-so_far[None], start[:-1]]))
        may_be_drawn = before[jnp.clip(last, 0, num_steps - 1)] <= first[:, None]
        so_far = jnp.minimum(count - start[-1], buffer.sequence_length)
    return may_be_drawn & ((last < count) & (first >= num_steps - buffer.length))[:, None], so_far


def _start_episodes(buffer: Any, state: Any, flags: jax.Array, time: jax.Array) -> jax.Array:
    """True for rows at `time` that start an episode, bool [K, num_envs].

    Args:
      buffer: a `SequenceBuffer`.
      state: its state before the new rows are written.
      flags: [T, num_envs], of the new rows.
      time: int32 [K], counted from the first new row.
    """
    num_steps, num_envs = flags.shape

    def flags_at(time: jax.Array) -> jax.Array:
        row = state.rows.inserted % buffer.length + jnp.clip(time, -buffer.length, -1)
        row = ring.wrap_negative(row, buffer.length)
        places = row[:, None] * num_envs + jnp.arange(num_envs, dtype=jnp.int32)[None]
        old = layouts.read(layouts.merge_axes(state.ends), places)
        return jnp.where((time >= 0)[:, None], flags[jnp.clip(time, 0, num_steps - 1)], old)

    before = time - 1
    found = is_end(flags_at(before)) | (-before > state.rows.size)[:, None]  # or there was no row
    return found if flags.dtype == jnp.bool_ else found & ~is_gap(flags_at(time))
