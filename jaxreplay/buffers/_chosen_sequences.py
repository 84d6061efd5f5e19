"""Drawable sequences of a `SequenceBuffer` if not all are: a ring of their own.

A completed sequence enters the ring if it is drawable, with the place of its first row. Sequences leave in the same
order, when their first row is overwritten. So the slots of the ring are the drawable sequences, and samplers, handles
and epochs know nothing of episodes. A break is the end of an episode, a gap, or the place where the stream was closed.
The number of rows of a stream since its last break, or the flag of the row before a sequence, decides in O(1) if the
sequence is drawable.

This module and `_every_sequence` have the same functions: `init`, `advance`, `end_streams`, `starts`, `ages` and
`live`.
"""

import dataclasses
import math
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import struct

from jaxreplay._common import layouts, ring, xla
from jaxreplay.buffers import _every_sequence
from jaxreplay.buffers._episode_flags import is_end, is_gap
from jaxreplay.buffers._every_sequence import ChangedSlots

PROBES = 64  # positions that a search reads at a time


@struct.dataclass
class ChosenSequences:
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
    first = layouts.zeros(jax.ShapeDtypeStruct((), jnp.int32), (buffer._num_slots,), 0)
    return ChosenSequences(first, xla.full((buffer.num_envs,), 0, jnp.int32))


def advance(
    buffer: Any, state: Any, sequences: ring.Ring, flags: jax.Array, completed: Any, wait: Any, td_errors: Any
) -> ChangedSlots:
    """The change by new rows; see `_every_sequence.advance`."""
    chosen, (num_steps, num_envs) = state.windows, flags.shape
    length, num_slots = buffer.length, buffer._num_slots
    # Rows of the sequences that these rows may complete, counted from the first new row.
    last = state.wait - 1 + buffer.stride * jnp.arange(buffer.completed(num_steps), dtype=jnp.int32)
    first = last - buffer.sequence_length + 1
    may_be_drawn, so_far = _judge(buffer, state, flags, first, last)
    cursor = state.rows.inserted % length
    most = min(last.size * num_envs, num_slots)
    old, gone = overwritten(chosen, sequences, cursor, num_steps, length, most)
    sequences = sequences.after(gone)
    new, count = sequences.next_slots(may_be_drawn.reshape(-1), may_be_drawn.size)
    row = ring.wrap_excess(cursor + ring.wrap_negative(first, length), length)
    places = row[:, None] * num_envs + jnp.arange(num_envs, dtype=jnp.int32)[None]
    kept = layouts.write(chosen.first, new, places.reshape(-1))
    left = dataclasses.replace(sequences, size=sequences.size - jnp.sum(gone, dtype=jnp.int32))
    # A slot that a sequence leaves and another enters counts as entered only.
    entered = ring.wrap_negative(old - sequences.inserted % num_slots, num_slots) < count
    old = jnp.where(gone & ~entered, old, num_slots)
    if td_errors is not None:
        td_errors = jnp.concatenate([td_errors.reshape(-1), jnp.full(old.size, jnp.nan, td_errors.dtype)])
    return ChangedSlots(
        left.advance(count),
        ChosenSequences(kept, so_far),
        jnp.concatenate([new, old]),
        jnp.concatenate([jnp.ones(new.size, bool), jnp.zeros(old.size, bool)]),
        td_errors,
    )


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
    return changed


def starts(buffer: Any, state: Any, slots: jax.Array) -> tuple[jax.Array, jax.Array]:
    """First row and stream of the sequences in `slots` [B], int32 [B] each; 0 for slots out of range."""
    return _first_rows(state.windows, slots, buffer.num_envs)


def ages(buffer: Any, state: Any, slots: jax.Array) -> jax.Array:
    """Number of later completed sequences of the same stream, drawable or not, int32 [B]."""
    row, _ = _first_rows(state.windows, slots, buffer.num_envs)
    since = _every_sequence.row_of_age(buffer, state, jnp.zeros((), jnp.int32)) - row
    return ring.wrap_negative(since, buffer.length) // buffer.stride


def live(buffer: Any, state: Any, max_age: jax.Array) -> ring.Live:
    """The slots of sequences with an age below `max_age` (int32 [])."""
    every = state.ring.newest(state.ring.size)

    def ages_at(position: jax.Array) -> jax.Array:
        return ages(buffer, state, every.slots(position))

    return state.ring.newest(every.size - num_older(ages_at, every.size, every.capacity, max_age))


def _first_rows(chosen: ChosenSequences, slots: jax.Array, num_envs: int) -> tuple[jax.Array, jax.Array]:
    first = layouts.read(chosen.first, slots, fill=True)
    row = jax.lax.div(first, jnp.int32(num_envs))
    return row, first - row * num_envs


def _judge(buffer: Any, state: Any, flags: jax.Array, first: jax.Array, last: jax.Array) -> tuple[jax.Array, jax.Array]:
    """True for drawable sequences with rows `first` to `last` (int32 [K]), bool [K, num_envs]; and `so_far`."""
    num_steps, so_far = flags.shape[0], state.windows.so_far
    if buffer.windows == "episodes":
        may_be_drawn = start_episodes(flags, first, state.ends, state.rows, buffer.length)
        may_be_drawn &= so_far[None] + last[:, None] + 1 >= buffer.sequence_length
        so_far = jnp.minimum(so_far + num_steps, buffer.sequence_length)
    else:
        breaks = is_gap(flags) if buffer.windows in ("any", "cut") else is_end(flags)
        lengths, so_far = episode_lengths(so_far, breaks, buffer.sequence_length)
        lengths = jnp.where(is_gap(flags), 0, lengths)
        may_be_drawn = lengths[jnp.clip(last, 0, num_steps - 1)] >= buffer.sequence_length
    return may_be_drawn & ((last < num_steps) & (first >= num_steps - buffer.length))[:, None], so_far


def episode_lengths(so_far: jax.Array, ends: jax.Array, most: int) -> tuple[jax.Array, jax.Array]:
    """Number of rows after the last break, through each new row, int32 [T, num_envs]; and `so_far` after them.

    Args:
      so_far: int32 [num_envs], before.
      ends: bool [T, num_envs], True for a break.
      most: the counts saturate here.
    """
    time = jnp.arange(ends.shape[0], dtype=jnp.int32)[:, None]
    # Start of the count at the row after each one.
    started = jax.lax.cummax(jnp.where(ends, time + 1, -so_far[None]), axis=0)
    started = jnp.concatenate([-so_far[None], started])
    lengths = jnp.minimum(time + 1 - started[:-1], most)
    return lengths, jnp.where(ends[-1], 0, lengths[-1])


def start_episodes(flags: jax.Array, time: jax.Array, stored: Any, rows: ring.Ring, length: int) -> jax.Array:
    """True for rows at `time` that start an episode, bool [K, num_envs].

    Args:
      flags: [T, num_envs], of the new rows.
      time: int32 [K], counted from the first new row.
      stored: the stored flags before `flags` are written, [length, num_envs].
      rows: the ring of the stored rows.
      length: number of rows in the storage.
    """
    num_steps, num_envs = flags.shape

    def flags_at(time: jax.Array) -> jax.Array:
        row = ring.wrap_negative(rows.inserted % length + jnp.clip(time, -length, -1), length)
        places = row[:, None] * num_envs + jnp.arange(num_envs, dtype=jnp.int32)[None]
        old = layouts.read(layouts.merge_axes(stored), places, fill=False)
        return jnp.where((time >= 0)[:, None], flags[jnp.clip(time, 0, num_steps - 1)], old)

    before = time - 1
    found = is_end(flags_at(before)) | (-before > rows.size)[:, None]  # or there was no row
    return found if flags.dtype == jnp.bool_ else found & ~is_gap(flags_at(time))


def overwritten(
    chosen: ChosenSequences, sequences: ring.Ring, cursor: jax.Array, num_steps: int, length: int, most: int
) -> tuple[jax.Array, jax.Array]:
    """Slots of the oldest sequences, int32 [most]; and True if new rows overwrite the sequence, bool [most].

    Args:
      chosen: the sequences before the rows are written.
      sequences: the ring of the sequences.
      cursor: int32 [], the first row that is written.
      num_steps: number of new rows, at most `length`.
      length: number of rows in the storage.
      most: upper bound on the number of sequences overwritten.
    """
    num_envs, position = chosen.so_far.size, jnp.arange(most, dtype=jnp.int32)
    slots = sequences.newest(sequences.size).slots(position)
    row, _ = _first_rows(chosen, slots, num_envs)
    until = ring.wrap_negative(row - cursor, length)
    return slots, (position < sequences.size) & (until < num_steps)


def num_older(ages_at: Any, size: jax.Array, capacity: int, max_age: jax.Array) -> jax.Array:
    """Number of sequences with an age of `max_age` or more, int32 [], of `size` sequences in order, oldest first.

    `ages_at` maps positions, int32 [PROBES], to ages. It is called O(log(capacity)) times.
    """
    count = jnp.zeros((), jnp.int32)
    rounds = max(1, math.ceil(math.log(capacity, PROBES) - 1e-9))
    for width in (PROBES**k for k in reversed(range(rounds))):
        position = count + width * jnp.arange(1, PROBES + 1, dtype=jnp.int32) - 1
        older = (position < size) & (ages_at(jnp.clip(position, 0, capacity - 1)) >= max_age)
        count += width * jnp.sum(older, dtype=jnp.int32)
    return count
