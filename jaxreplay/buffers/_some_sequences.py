"""The windows of a `SequenceBuffer` that may be drawn where not all may, as a ring of their own.

As a window is completed it enters the ring if it may be drawn, with the place of its first row. Windows leave in the
same order, when their first row is overwritten. So the slots of the ring are what may be drawn, without gaps: samplers,
handles and epochs know nothing of episodes. A window is judged in O(1): by the number of rows that its stream has had
without a break, which is the end of an episode or a row that may not be drawn; or by whether the row before it was an
end.

**Flags.** Of each row there is a flag whether it is the last of its episode. Where rows may be told that may not be
drawn, flags are numbers: 0, 1 for the last row of an episode, or `GAP`. Such a row is an episode by itself: the row
behind it starts one, and the one before it is not continued.
"""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jax import lax

from jaxreplay._common import layouts, ring
from jaxreplay._common.xla import read_once

PROBES = 64  # of a search, at a time
GAP = 2  # the flag of a row that may not be drawn


@struct.dataclass
class Windows:
    """The windows that may be drawn.

    Attributes:
      first: by slot of the ring, int32 [num_slots] as the backend wants it: row * num_envs + env of the first row.
      so_far: int32 [num_envs], rows of each stream behind its last break, at most `sequence_length`.
    """

    first: Any  # [num_slots]
    so_far: jax.Array  # [num_envs]


def init(num_slots: int, num_envs: int) -> Windows:
    spec = jax.ShapeDtypeStruct((), jnp.int32)
    return Windows(layouts.zeros(spec, (num_slots,), 0), jnp.zeros(num_envs, jnp.int32))


def flags_of(ends: jax.Array, drawable: jax.Array | None) -> jax.Array:
    """Flags as numbers, uint8 [T, num_envs], of the last rows of episodes and of rows that may be drawn (None: all)."""
    flags = ends.astype(jnp.uint8)
    return flags if drawable is None else jnp.where(drawable, flags, jnp.uint8(GAP))


def is_end(flags: jax.Array) -> jax.Array:
    """Whether the row behind is of another episode, bool [...]."""
    return flags if flags.dtype == jnp.bool_ else flags > 0


def is_gap(flags: jax.Array) -> jax.Array:
    """Whether the row may not be drawn, bool [...]."""
    return jnp.zeros(flags.shape, bool) if flags.dtype == jnp.bool_ else flags == GAP


def counted(flags: jax.Array) -> jax.Array:
    """Which rows of sequences with `flags` [B, L] lie in the episode that the first row does, bool [B, L]."""
    end = is_end(flags)
    return (jnp.cumsum(end, axis=1, dtype=jnp.int32) == end.astype(jnp.int32)) & ~is_gap(flags)


def first_rows(windows: Windows, slots: jax.Array, num_envs: int) -> tuple[jax.Array, jax.Array]:
    """First row and stream of the windows in `slots` [B], int32 [B] each; 0 for a slot that does not exist."""
    first = layouts.read(windows.first, slots, fill=True)
    row = lax.div(first, jnp.int32(num_envs))
    return row, first - row * num_envs


def enter(
    state: Any,
    sequences: ring.Ring,
    ends: jax.Array,
    last: jax.Array,
    kind: str,
    sequence_length: int,
    length: int,
    num_slots: int,
) -> tuple[ring.Ring, Windows, jax.Array, jax.Array]:
    """Ring and windows behind new rows, the slots that change [K], and whether they are drawable from now on.

    Args:
      state: that of the buffer, before the rows are written.
      sequences: its ring of windows.
      ends: [T, num_envs], flags of the new rows.
      last: int32 [...], last rows of the windows that may be completed, counted from the first new row.
      kind: `SequenceBuffer.windows`.
      sequence_length, length, num_slots: of the buffer.
    """
    windows, (num_steps, num_envs) = state.windows, ends.shape
    cursor = state.rows.inserted % length
    first = last - sequence_length + 1
    breaks = is_gap(ends) if kind in ("any", "cut") else is_end(ends)
    lengths, so_far = episode_lengths(windows.so_far, breaks, sequence_length)
    if kind == "episodes":
        may_be_drawn = start_episodes(ends, first, state.ends, state.rows, length)
    else:
        lengths = jnp.where(is_gap(ends), 0, lengths)
        may_be_drawn = lengths[jnp.clip(last, 0, num_steps - 1)] >= sequence_length
    may_be_drawn &= ((last < num_steps) & (first >= num_steps - length))[:, None]

    most = min(last.size * num_envs, num_slots)
    old, gone = overwritten(windows, sequences, cursor, num_steps, length, most)
    sequences = ring.after(sequences, gone)
    new, count = ring.next_slots(sequences, may_be_drawn.reshape(-1), may_be_drawn.size, num_slots)
    new, old, gone = read_once((new, old, gone))
    row = cursor + ring.wrap_negative(first, length)
    row = ring.wrap_excess(row, length)
    places = row[:, None] * num_envs + jnp.arange(num_envs, dtype=jnp.int32)[None]
    kept = layouts.write(windows.first, new, places.reshape(-1))
    left = dataclasses.replace(sequences, size=sequences.size - jnp.sum(gone, dtype=jnp.int32))
    # A slot that is left and entered at once is entered.
    behind = old - sequences.inserted % num_slots
    entered = ring.wrap_negative(behind, num_slots) < count
    old = jnp.where(gone & ~entered, old, num_slots)
    return (
        ring.advance(left, count, num_slots),
        Windows(kept, so_far),
        jnp.concatenate([new, old]),
        jnp.concatenate([jnp.ones(new.size, bool), jnp.zeros(old.size, bool)]),
    )


def episode_lengths(so_far: jax.Array, ends: jax.Array, most: int) -> tuple[jax.Array, jax.Array]:
    """Rows of the present episode at each new row, itself included, int32 [T, num_envs]; and `so_far` behind them.

    Args:
      so_far: int32 [num_envs], before.
      ends: bool [T, num_envs], True for the last row of an episode, or whatever else breaks a stream behind it.
      most: what counts are cut off at.
    """
    time = jnp.arange(ends.shape[0], dtype=jnp.int32)[:, None]
    # When the episode of the row behind each one started.
    started = lax.cummax(jnp.where(ends, time + 1, -so_far[None]), axis=0)
    started = jnp.concatenate([-so_far[None], started])
    lengths = jnp.minimum(time + 1 - started[:-1], most)
    return lengths, jnp.where(ends[-1], 0, lengths[-1])


def start_episodes(flags: jax.Array, time: jax.Array, stored: Any, rows: ring.Ring, length: int) -> jax.Array:
    """Whether the rows at `time` (int32 [K], of the new rows, negative before them) start an episode, [K, num_envs].

    Args:
      flags: [T, num_envs], of the new rows.
      time: int32 [K].
      stored: the storage of flags before these, [length, num_envs].
      rows: its ring.
      length: its length.
    """
    num_steps, num_envs = flags.shape

    def flags_at(time: jax.Array) -> jax.Array:
        row = rows.inserted % length + jnp.clip(time, -length, -1)
        row = ring.wrap_negative(row, length)
        places = row[:, None] * num_envs + jnp.arange(num_envs, dtype=jnp.int32)[None]
        old = layouts.read(layouts.merge_axes(stored), places, fill=False)
        return jnp.where((time >= 0)[:, None], flags[jnp.clip(time, 0, num_steps - 1)], old)

    before = time - 1
    found = is_end(flags_at(before)) | (-before > rows.size)[:, None]  # or there was no row
    return found if flags.dtype == jnp.bool_ else found & ~is_gap(flags_at(time))


def overwritten(
    windows: Windows, sequences: ring.Ring, cursor: jax.Array, num_steps: int, length: int, most: int
) -> tuple[jax.Array, jax.Array]:
    """The slots of the oldest `most` windows, and which of these lose their first row to `num_steps` new rows.

    Args:
      windows: before the rows are written.
      sequences: their ring.
      cursor: int32 [], the row that is written first.
      num_steps: number of rows, at most `length`.
      length: rows of the storage.
      most: no more than this many can.

    Returns:
      slots, int32 [most], and bool [most].
    """
    num_envs, position = windows.so_far.size, jnp.arange(most, dtype=jnp.int32)
    capacity = layouts.leading(windows.first, 1)[0]
    slots = ring.newest(sequences, sequences.size, capacity).slots(position, capacity)
    row, _ = first_rows(windows, slots, num_envs)
    until = row - cursor
    until = ring.wrap_negative(until, length)
    return slots, (position < sequences.size) & (until < num_steps)


def num_older(ages_at: Any, size: jax.Array, capacity: int, max_age: jax.Array) -> jax.Array:
    """How many of `size` windows in order of age, oldest first, have an age of `max_age` or more, int32 [].

    `ages_at` are the ages at positions, int32 [PROBES] of each. It is asked O(log(capacity)) times.
    """
    count = jnp.zeros((), jnp.int32)
    rounds = max(1, math.ceil(math.log(capacity, PROBES) - 1e-9))
    for width in (PROBES**k for k in reversed(range(rounds))):
        position = count + width * jnp.arange(1, PROBES + 1, dtype=jnp.int32) - 1
        older = (position < size) & (ages_at(jnp.clip(position, 0, capacity - 1)) >= max_age)
        count += width * jnp.sum(older, dtype=jnp.int32)
    return count
