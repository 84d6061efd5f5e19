"""Bounded first-in, first-out queues; a batch of items joins them at once, as if one after the other.

The rows of the batch take turns in order. At its turn, the item of a row joins a queue unless it is in one. If the
queue is then longer than its limit, its oldest member leaves. Members of a queue are numbered 0, 1, 2, ... from the
oldest at the start, and items that join continue the count. So number m leaves when number m + limit joins.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax


class Joins(NamedTuple):
    """Effect of a batch of G rows on Q queues.

    Attributes:
      inside: bool [G], True if the row's item is in a queue at its turn.
      joins: bool [G], True if the row's item joins a queue.
      number: int32 [G], the item's number there.
      stays: bool [G], True if it joins and is still there at the end.
      leaves: bool [G], True if it joins and the oldest member of that queue leaves.
      leaver: int32 [G], number of that member.
      leaver_row: int32 [G], the row at which the leaver joined; undefined if it was a member from the start.
      free: bool [G], True if a member leaves and joins no queue again.
      joined: int32 [Q], number of items that join each queue.
      left: int32 [Q], number of members that leave it.
    """

    inside: jax.Array
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
    """State of the queues at the turns of G rows.

    Attributes:
      before: int32 [G, Q], number of earlier rows that joined each queue.
      last_queue: int32 [G], last queue of the row's item, Q for none.
      last_number: int32 [G], the item's number there.
    """

    before: jax.Array
    last_queue: jax.Array
    last_number: jax.Array


def join(
    item: jax.Array,
    num_items: int,
    queue: jax.Array,
    start_queue: jax.Array,
    start_number: jax.Array,
    size: jax.Array,
    limit: jax.Array,
) -> Joins:
    """Let items join queues in order of their rows.

    Args:
      item: int32 [G], in [0, num_items); an item may occur more than once.
      num_items: number of distinct items.
      queue: int32 [G], the queue to join, Q for none.
      start_queue: int32 [G], the queue that the item is in at the start, Q for none.
      start_number: int32 [G], the item's number there.
      size: int32 [Q], number of members at the start, at most the limit.
      limit: int32 [Q], largest number of members.
    """
    num_rows, num_queues = item.size, size.size
    wanted = queue[:, None] == jnp.arange(num_queues, dtype=jnp.int32)[None]  # [G, Q]
    by_item, first = sort_by_item(item, num_items)

    def turns(joins: jax.Array) -> _Turns:
        before = sum_before((wanted & joins[:, None]).astype(jnp.int32))
        earlier = last_before(joins, by_item, first)
        again = earlier >= 0
        last_queue = jnp.where(again, queue[earlier], start_queue)
        last_number = jnp.where(again, (_at_queue(size, queue) + _at_own_queue(before, queue))[earlier], start_number)
        return _Turns(before, last_queue, last_number)

    joins = _joining_rows(turns, queue, start_queue, size - limit)
    before, last_queue, last_number = turn = turns(joins)
    number = _at_queue(size, queue) + _at_own_queue(before, queue)
    joined = jnp.sum(wanted & joins[:, None], axis=0, dtype=jnp.int32)
    left = jnp.maximum(size + joined - limit, 0)
    row_of, starts = _rows_by_number(joins, queue, number, joined, size)
    leaver = number - _at_queue(limit, queue)
    leaves = joins & (leaver >= 0)
    # An item that joins again has left before, at the row that joined `limit` numbers after it.
    back = joins & (last_queue < num_queues)
    left_at = row_of.at[_at_queue(starts + limit, last_queue) + last_number].get(mode="fill", fill_value=0)
    return Joins(
        inside=_inside(turn, size - limit),
        joins=joins,
        number=number,
        stays=joins & (number >= _at_queue(left, queue)),
        leaves=leaves,
        leaver=leaver,
        leaver_row=row_of.at[_at_queue(starts, queue) + leaver].get(mode="fill", fill_value=0),
        free=leaves.at[jnp.where(back, left_at, num_rows)].set(False, mode="drop"),
        joined=joined,
        left=left,
    )


def _joining_rows(
    turns: Callable[[jax.Array], _Turns], queue: jax.Array, start_queue: jax.Array, size_minus_limit: jax.Array
) -> jax.Array:
    """True if the row's item joins a queue, bool [G], by fixed-point iteration.

    A row depends on the earlier rows that join. Each pass recomputes all rows from the last guess, and extends the
    correct rows, counted from the first, by at least one. After a pass that changes nothing, all rows are correct. One
    pass is enough if no item returns to the batch after it left a queue; G passes are always enough.
    """
    num_queues = size_minus_limit.size

    def next_guess(guess):
        joins, _ = guess
        new = (queue < num_queues) & ~_inside(turns(joins), size_minus_limit)
        return new, jnp.any(new != joins)

    guess = (queue < num_queues) & (start_queue == num_queues)
    joins, _ = lax.while_loop(lambda guess: guess[1], next_guess, (guess, jnp.array(True)))
    return joins


def _inside(turn: _Turns, size_minus_limit: jax.Array) -> jax.Array:
    """True if the row's item is in a queue at its turn, bool [G]."""
    before, last_queue, last_number = turn
    oldest = _at_queue(size_minus_limit, last_queue) + _at_own_queue(before, last_queue)
    return (last_queue < size_minus_limit.size) & (last_number >= oldest)


def _rows_by_number(
    joins: jax.Array, queue: jax.Array, number: jax.Array, joined: jax.Array, size: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """(row_of [G], starts [Q]), int32: row_of[starts[q] + m] is the row whose item joined queue q as number m."""
    rows = jnp.arange(queue.size, dtype=jnp.int32)
    starts = sum_before(joined) - size
    row_of = jnp.zeros_like(rows)
    row_of = row_of.at[jnp.where(joins, _at_queue(starts, queue) + number, rows.size)].set(rows, mode="drop")
    return row_of, starts


def sum_before(x: jax.Array) -> jax.Array:
    """Exclusive cumulative sum of x (int32 [G, ...]) over its rows."""
    return jnp.cumsum(x, axis=0, dtype=jnp.int32) - x


def sort_by_item(item: jax.Array, num_items: int) -> tuple[jax.Array, jax.Array]:
    """Rows sorted stably by item, int32 [G]; and for each place in this order the first place with the same item."""
    place = jnp.arange(item.size, dtype=jnp.int32)
    if num_items * item.size <= 2**32:  # item and row in one number: XLA sorts one array much faster than two
        both = item.astype(jnp.uint32) * jnp.uint32(item.size) + place.astype(jnp.uint32)
        by_item = (lax.sort(both) % jnp.uint32(item.size)).astype(jnp.int32)
    else:
        by_item = jnp.argsort(item, stable=True).astype(jnp.int32)
    sorted_items = item[by_item]
    starts = jnp.concatenate([jnp.ones(1, bool), sorted_items[1:] != sorted_items[:-1]])
    return by_item, lax.cummax(jnp.where(starts, place, 0))


def last_before(marked: jax.Array, by_item: jax.Array, first: jax.Array) -> jax.Array:
    """The last `marked` row before each row with the same item, int32 [G]; -1 if there is none."""
    place = jnp.arange(marked.size, dtype=jnp.int32)
    latest = lax.cummax(jnp.where(marked[by_item], place, -1))
    latest = jnp.concatenate([jnp.full(1, -1, jnp.int32), latest[:-1]])
    return jnp.zeros_like(place).at[by_item].set(jnp.where(latest >= first, by_item[latest], -1), unique_indices=True)


def _at_queue(x: jax.Array, queue: jax.Array) -> jax.Array:
    """`x` [Q] at `queue` [G]; 0 if the queue is Q."""
    return x.at[queue].get(mode="fill", fill_value=0)


def _at_own_queue(x: jax.Array, queue: jax.Array) -> jax.Array:
    """`x` [G, Q] at each row's `queue` [G]; 0 if the queue is Q."""
    return x.at[jnp.arange(queue.size), queue].get(mode="fill", fill_value=0)
