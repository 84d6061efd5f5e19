"""Bounded queues that many join in order, all at once: first in, first out.

A batch of rows is processed in order. The item of a row joins a queue unless it is in one at its turn; if that leaves
the queue longer than its limit, its oldest member leaves. Members of a queue are numbered 0, 1, 2, ... from the oldest
at the start on, and those who join go on counting: number m leaves when number m + limit joins.
"""

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

    Whether a row's item is in a queue depends on the earlier rows that joined. So which rows join is computed from a
    guess of it, again and again: each time the rows are right up to a later one at least, and once nothing changes all
    are. One pass does where no item returns to the batch after it left a queue; G passes always do.

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
    rows = jnp.arange(num_rows, dtype=jnp.int32)
    wanted = queue[:, None] == jnp.arange(num_queues, dtype=jnp.int32)[None]  # [G, Q]
    by_item, first = _sort_by_item(item, num_items)

    def at_turn(joins):
        """Of each row: how many joined each queue before it; the queue its item was last in, Q for none; its number."""
        before = sum_before((wanted & joins[:, None]).astype(jnp.int32))
        earlier = _last_before(joins, by_item, first)
        again = earlier >= 0
        return (
            before,
            jnp.where(again, queue[earlier], current),
            jnp.where(again, (_of(size, queue) + _of_row(before, queue))[earlier], place),
        )

    def next_guess(guess):
        joins, _ = guess
        before, last_queue, last_number = at_turn(joins)
        oldest = _of(size - limit, last_queue) + _of_row(before, last_queue)
        inside = (last_queue < num_queues) & (last_number >= oldest)
        new = (queue < num_queues) & ~inside
        return new, jnp.any(new != joins)

    guess = (queue < num_queues) & (current == num_queues)
    joins, _ = lax.while_loop(lambda guess: guess[1], next_guess, (guess, jnp.array(True)))

    before, last_queue, last_number = at_turn(joins)
    number = _of(size, queue) + _of_row(before, queue)
    joined = jnp.sum(wanted & joins[:, None], axis=0, dtype=jnp.int32)
    left = jnp.maximum(size + joined - limit, 0)

    starts = sum_before(joined) - size
    row_of = jnp.zeros(num_rows, jnp.int32)  # by queue and number, from `size` on: the row that joined
    row_of = row_of.at[jnp.where(joins, _of(starts, queue) + number, num_rows)].set(rows, mode="drop")
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
