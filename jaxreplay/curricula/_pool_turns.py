"""Turns of a batch of tasks that enter pools, all at once as if one after the other.

The rows of the batch take turns in order. A pool with a limit is a queue: first in, first out. At its turn, the task of
a row enters the row's pool, unless a queue holds the task. If a queue is then longer than its limit, its oldest member
leaves. Entries into a pool are numbered 0, 1, 2, ... in the batch. Members at the start have numbers below 0, the
newest -1. So number m leaves a queue when number m + limit enters.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax


class Rows(NamedTuple):
    """G rows in order; tasks are in [0, N), pools in [0, P).

    Attributes:
      task: int32 [G]; a task may occur more than once.
      pool: int32 [G], pool to enter.
      start: int32 [G], pool of the task at the start.
      start_number: int32 [G], the task's number there; any, if that pool is no queue.
      by_task: int32 [G], the rows sorted stably by task.
      first: int32 [G], for each place in this order the first place with the same task.
    """

    task: jax.Array
    pool: jax.Array
    start: jax.Array
    start_number: jax.Array
    by_task: jax.Array
    first: jax.Array


class Turns(NamedTuple):
    """Turns of G rows.

    Attributes:
      enters: bool [G], True if the row's task enters the row's pool, or is there and no queue holds it.
      number: int32 [G], its number in that pool.
      last: int32 [G], the last earlier row with the same task that enters; -1 for none.
    """

    enters: jax.Array
    number: jax.Array
    last: jax.Array


def sorted_rows(task: jax.Array, num_tasks: int, pool: jax.Array, start: jax.Array, start_number: jax.Array) -> Rows:
    """`Rows` of `num_tasks` tasks."""
    place = jnp.arange(task.size, dtype=jnp.int32)
    if num_tasks * task.size <= 2**32:  # task and row in one number: XLA sorts one array much faster than two
        both = task.astype(jnp.uint32) * jnp.uint32(task.size) + place.astype(jnp.uint32)
        by_task = (lax.sort(both) % jnp.uint32(task.size)).astype(jnp.int32)
    else:
        by_task = jnp.argsort(task, stable=True).astype(jnp.int32)
    in_order = task[by_task]
    starts = jnp.concatenate([jnp.ones(1, bool), in_order[1:] != in_order[:-1]])
    return Rows(task, pool, start, start_number, by_task, lax.cummax(jnp.where(starts, place, 0)))


def last_before(marked: jax.Array, rows: Rows) -> jax.Array:
    """The last `marked` row before each row with the same task, int32 [G]; -1 for none."""
    place = jnp.arange(marked.size, dtype=jnp.int32)
    latest = lax.cummax(jnp.where(marked[rows.by_task], place, -1))
    latest = jnp.concatenate([jnp.full(1, -1, jnp.int32), latest[:-1]])
    last = jnp.where(latest >= rows.first, rows.by_task[latest], -1)
    return jnp.zeros_like(place).at[rows.by_task].set(last, unique_indices=True)


def place_of(last: jax.Array, number: jax.Array, rows: Rows) -> tuple[jax.Array, jax.Array]:
    """Pool that each task entered at row `last`, and its number there; those at the start if that is -1."""
    again = last >= 0
    return jnp.where(again, rows.pool[last], rows.start), jnp.where(again, number[last], rows.start_number)


def take(rows: Rows, counts: jax.Array, limit: jax.Array | None) -> Turns:
    """Let the tasks take turns.

    With queues, by fixed-point iteration. A row depends on the earlier rows that enter. Each pass computes all rows
    from the last guess, and extends the correct rows, counted from the first, by at least one. After a pass that
    changes nothing, all rows are correct. One pass is enough if no task leaves a queue and enters again in the batch,
    and none occurs twice; G passes are always enough.

    Args:
      rows: the rows.
      counts: bool [G], True for rows that count.
      limit: int32 [P], largest number of members of each queue, at least that at the start; -1 for other pools. None
        if no pool is a queue.
    """
    if limit is None:
        return Turns(counts, jnp.zeros_like(rows.pool), last_before(counts, rows))

    def next_guess(guess: tuple[jax.Array, Turns]) -> tuple[jax.Array, Turns]:
        found = _turns_if(guess[1].enters, rows, counts, limit)
        return jnp.any(found.enters != guess[1].enters), found

    guess = Turns(counts & (limit[rows.start] < 0), jnp.zeros_like(rows.pool), jnp.zeros_like(rows.pool))
    return lax.while_loop(lambda guess: guess[0], next_guess, (jnp.array(True), guess))[1]


def _turns_if(enters: jax.Array, rows: Rows, counts: jax.Array, limit: jax.Array) -> Turns:
    """Turn of each row if the earlier rows that enter are the marked rows of `enters` (bool [G])."""
    before = sum_before(spread(rows.pool, enters, limit.size))
    number, last = at_own(before, rows.pool), last_before(enters, rows)
    pool, its_number = place_of(last, number, rows)
    held = (limit[pool] >= 0) & (at_own(before, pool) - its_number <= limit[pool])
    return Turns(counts & ~held, number, last)


def sum_before(x: jax.Array) -> jax.Array:
    """Exclusive cumulative sum of x (int32 [G, ...]) over its rows."""
    return jnp.cumsum(x, axis=0, dtype=jnp.int32) - x


def spread(pool: jax.Array, marked: jax.Array, num_pools: int) -> jax.Array:
    """1 at the `pool` of each `marked` row, int32 [G, P]."""
    return ((pool[:, None] == jnp.arange(num_pools, dtype=jnp.int32)[None]) & marked[:, None]).astype(jnp.int32)


def at_own(x: jax.Array, pool: jax.Array) -> jax.Array:
    """`x` [G, P] at each row's `pool`, [G]."""
    return jnp.take_along_axis(x, pool[:, None], axis=1)[:, 0]
