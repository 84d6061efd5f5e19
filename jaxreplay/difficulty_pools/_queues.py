"""Bounded queues that many join in order, all at once: first in, first out.

A batch of rows is processed in order. The item of a row joins a queue unless it is in one at its turn; if that leaves
the queue longer than its limit, its oldest member leaves. Members of a queue are numbered 0, 1, 2, ... from the oldest
at the start on, and those who join go on counting: number m leaves when number m + limit joins.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax


class Joins(NamedTuple):
    """What a batch of G rows does to Q queues.

    Attributes:
      joins: bool [G], the rows whose item joins a queue.
      number: int32 [G], its number there.
      stays: bool [G], of these, those whose item is still there at the end.
      leaves: bool [G], the rows at which the oldest member leaves the queue that is joined.
      leaver: int32 [G], that member's number.
      leaver_row: int32 [G], the row at which it had joined; where it was there from the start on, any.
      free: bool [G], of these rows those whose leaver joins no queue again.
      joined: int32 [Q], how many join each queue.
      left: int32 [Q], how many leave it.
    """

    joins: jax.Array
    number: jax.Array
    stays: jax.Array
    leaves: jax.Array
    leaver: jax.Array
    leaver_row: jax.Array
    free: jax.Array
    joined: jax.Array
    left: jax.Array


class _Turns(NamedTuple):
    """What G rows find at their turns.

    Attributes:
      before: int32 [G, Q], how many earlier rows joined each queue.
      last_queue: int32 [G], the queue that the row's item was last in, Q for none.
      last_number: int32 [G], the item's number there.
    """

    before: jax.Array
    last_queue: jax.Array
    last_number: jax.Array


def join(
    item: jax.Array,
    num_items: int,
    queue: jax.Array,
    current: jax.Array,
    place: jax.Array,
    size: jax.Array,
    limit: jax.Array,
) -> Joins:
    """Let the items join queues in order of their rows.

    Args:
      item: int32 [G], in [0, num_items); one may occur more than once.
      num_items: number of items there are.
      queue: int32 [G], the queue to join, Q for none.
      current: int32 [G], the queue that the item is in at the start, Q for none.
      place: int32 [G], its number there.
      size: int32 [Q], members at the start, no more than the limit.
      limit: int32 [Q].
    """
    num_rows, num_queues = item.size, size.size
    wanted = queue[:, None] == jnp.arange(num_queues, dtype=jnp.int32)[None]  # [G, Q]
    by_item, first = _sort_by_item(item, num_items)

    def turns(joins: jax.Array) -> _Turns:
        before = sum_before((wanted & joins[:, None]).astype(jnp.int32))
        earlier = _last_before(joins, by_item, first)
        again = earlier >= 0
        last_queue = jnp.where(again, queue[earlier], current)
        last_number = jnp.where(again, (_of(size, queue) + _of_row(before, queue))[earlier], place)
        return _Turns(before, last_queue, last_number)

    joins = _joining_rows(turns, queue, current, size - limit)
    before, last_queue, last_number = turns(joins)
    number = _of(size, queue) + _of_row(before, queue)
    joined = jnp.sum(wanted & joins[:, None], axis=0, dtype=jnp.int32)
    left = jnp.maximum(size + joined - limit, 0)
    row_of, starts = _rows_by_number(joins, queue, number, joined, size)
    leaver = number - _of(limit, queue)
    leaves = joins & (leaver >= 0)
    # An item that joins again had left: at the row that joined `limit` behind it.
    back = joins & (last_queue < num_queues)
    left_at = row_of.at[_of(starts + limit, last_queue) + last_number].get(mode="fill", fill_value=0)
    return Joins(
        joins=joins,
        number=number,
        stays=joins & (number >= _of(left, queue)),
        leaves=leaves,
        leaver=leaver,
        leaver_row=row_of.at[_of(starts, queue) + leaver].get(mode="fill", fill_value=0),
        free=leaves.at[jnp.where(back, left_at, num_rows)].set(False, mode="drop"),
        joined=joined,
        left=left,
    )


def _joining_rows(
    turns: Callable[[jax.Array], _Turns], queue: jax.Array, current: jax.Array, size_minus_limit: jax.Array
) -> jax.Array:
    """The rows that join a queue, bool [G], by fixed-point iteration.

    Whether an item is in a queue at its turn depends on the earlier rows that join. Each pass recomputes all rows from
    the last guess, and at least one more row from the start on becomes right; after a pass without changes all are.
    One pass is enough if no item returns to the batch after it left a queue; G passes always are.
    """
    num_queues = size_minus_limit.size

    def next_guess(guess):
        joins, _ = guess
        before, last_queue, last_number = turns(joins)
        oldest = _of(size_minus_limit, last_queue) + _of_row(before, last_queue)
        inside = (last_queue < num_queues) & (last_number >= oldest)
        new = (queue < num_queues) & ~inside
        return new, jnp.any(new != joins)

    guess = (queue < num_queues) & (current == num_queues)
    joins, _ = lax.while_loop(lambda guess: guess[1], next_guess, (guess, jnp.array(True)))
    return joins


def _rows_by_number(
    joins: jax.Array, queue: jax.Array, number: jax.Array, joined: jax.Array, size: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """(row_of [G], starts [Q]), int32: row_of[starts[q] + m] is the row whose item joined queue q as number m."""
    rows = jnp.arange(queue.size, dtype=jnp.int32)
    starts = sum_before(joined) - size
    row_of = jnp.zeros_like(rows)
    row_of = row_of.at[jnp.where(joins, _of(starts, queue) + number, rows.size)].set(rows, mode="drop")
    return row_of, starts


def sum_before(x: jax.Array) -> jax.Array:
    """Of each row of x (int32 [G, ...]) the sum of all earlier rows."""
    return jnp.cumsum(x, axis=0, dtype=jnp.int32) - x


def _sort_by_item(item: jax.Array, num_items: int) -> tuple[jax.Array, jax.Array]:
    """Rows sorted by item, in order within one; and, of each place there, the first place with the same item."""
    place = jnp.arange(item.size, dtype=jnp.int32)
    if num_items * item.size <= 2**32:  # item and row in one number: XLA sorts one array much faster than two
        both = item.astype(jnp.uint32) * jnp.uint32(item.size) + place.astype(jnp.uint32)
        by_item = (lax.sort(both) % jnp.uint32(item.size)).astype(jnp.int32)
    else:
        by_item = jnp.argsort(item, stable=True).astype(jnp.int32)
    of = item[by_item]
    starts = jnp.concatenate([jnp.ones(1, bool), of[1:] != of[:-1]])
    return by_item, lax.cummax(jnp.where(starts, place, 0))


def _last_before(marked: jax.Array, by_item: jax.Array, first: jax.Array) -> jax.Array:
    """Of each row the last earlier one of the same item that is marked, int32 [G]; -1 where there is none."""
    place = jnp.arange(marked.size, dtype=jnp.int32)
    latest = lax.cummax(jnp.where(marked[by_item], place, -1))
    latest = jnp.concatenate([jnp.full(1, -1, jnp.int32), latest[:-1]])
    return jnp.zeros_like(place).at[by_item].set(jnp.where(latest >= first, by_item[latest], -1), unique_indices=True)


def _of(x: jax.Array, queue: jax.Array) -> jax.Array:
    """x [Q] at queue [G], 0 where that is Q."""
    return x.at[queue].get(mode="fill", fill_value=0)


def _of_row(x: jax.Array, queue: jax.Array) -> jax.Array:
    """x [G, Q] at the queue [G] of each row, 0 where that is Q."""
    return x.at[jnp.arange(queue.size), queue].get(mode="fill", fill_value=0)
