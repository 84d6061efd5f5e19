"""Sample: a batch of draws, and the checks of a draw."""

from typing import Any

import jax
import jax.core
import jax.numpy as jnp
from flax import struct

from jaxreplay._common import checks, ring
from jaxreplay._common.checks import check_integer
from jaxreplay._common.random import random_bits, random_integers
from jaxreplay._common.xla import on_host
from jaxreplay.buffers._shards import whole_of


@struct.dataclass
class Sample:
    """A batch of draws. With `minibatches`, all leaves have two leading axes [minibatches, rows] in place of [batch].

    Attributes:
      items: leaves [batch, ...]; [batch, sequence_length, ...] from a `SequenceBuffer`.
      indices: int32 [batch], handles of the items, for `update`; -1 for rows without an item, such as all rows from
        an empty buffer.
      probabilities: float32 [batch], the probability of each draw; 0 for rows without an item.
      weights: float32 [batch], importance-sampling weights; 0 for rows without an item.
      mask: bool [batch, sequence_length] from a `SequenceBuffer`, True for steps that count; else None.
      age: int32 [batch], number of later insertions, 0 for the newest; for a sequence, number of later sequences of
        its stream. -1 for rows without an item.

    Examples:
      >>> buffer = jr.ReplayBuffer(capacity=4)
      >>> items = jnp.array([10, 20, 30, 40])
      >>> state = buffer.add(buffer.init(items[:1]), items[:1])
      >>> sample = buffer.sample(state, jax.random.key(0), batch_size=2)
      >>> sample.items.tolist(), sample.indices.tolist()
      ([10, 10], [0, 0])
      >>> sample.probabilities.tolist(), sample.weights.tolist()
      ([1.0, 1.0], [1.0, 1.0])
    """

    items: Any
    indices: jax.Array  # [batch]
    probabilities: jax.Array  # [batch]
    weights: jax.Array  # [batch]
    mask: jax.Array | None = None  # [batch, sequence_length]
    age: jax.Array | None = None  # [batch]


def check_draw(batch_size: int, beta: Any = None, max_age: Any = None, minibatches: Any = None) -> int:
    """`batch_size` as a Python integer; a `ValueError` if an argument of a draw is invalid."""
    batch_size = check_integer("batch_size", batch_size, 1, ring.MAX_CAPACITY, "the number of draws")
    checks.check_beta(beta)
    if max_age is not None:
        check_integer("max_age", max_age, 1, 2**31 - 1, "the number of newest items to draw from", traced=None)
    if minibatches is not None:
        check_integer("minibatches", minibatches, 1, batch_size, "the number of parts of the batch")
        check_minibatches("batch_size", batch_size, minibatches)
    return batch_size


def check_minibatches(name: str, size: int, minibatches: int | None) -> None:
    """Raise a `ValueError` if `size` is not a multiple of `minibatches`."""
    if minibatches is not None and size % minibatches:
        raise ValueError(f"{name}={size}: must be a multiple of {minibatches}, the number of minibatches.")


def minibatch_rows(key: jax.Array, batch_size: int, minibatches: int) -> jax.Array:
    """Rows of a batch in the order of its minibatches, int32 [batch_size].

    Row t of each minibatch comes from rows t * minibatches and following, each of which is as likely. So minibatches of
    a stratified batch are stratified too.
    """
    size = batch_size // minibatches
    # Cloned: the draw has used the key itself, and these bits are of another stream.
    bits = random_bits(jax.random.fold_in(jax.random.clone(key), batch_size), size)
    first = random_integers(bits, jnp.full(size, minibatches, jnp.int32))
    of_group = (jnp.arange(minibatches, dtype=jnp.int32)[:, None] + first[None]) % minibatches
    return (jnp.arange(size, dtype=jnp.int32)[None] * minibatches + of_group).reshape(-1)


def in_minibatches(sample: Sample, minibatches: int) -> Sample:
    """`sample` with the leading axis of each leaf split in two."""
    return jax.tree.map(lambda x: x.reshape(minibatches, -1, *x.shape[1:]), sample)


def check_drawn(buffer: Any, state: Any, drawn: Sample) -> Sample:
    """`drawn`; a `ValueError` if the buffer, with all its shards, is known to be empty."""
    if is_known_empty(buffer, state):
        raise ValueError(whole_of(buffer)._why_empty(state))
    return drawn


def is_known_empty(buffer: Any, state: Any) -> bool:
    """True if the buffer, with all its shards, is empty; False under `jit`.

    Call it after the draw is dispatched, so that the draw does not wait for the size.
    """
    size = state.ring.size
    if isinstance(size, jax.core.Tracer):
        return False
    # Summed on the host: a device would sum after the draw. Shards of other processes cannot be read here.
    size = on_host(size).sum() if getattr(size, "is_fully_addressable", True) else buffer.size(state)
    return bool(size == 0)
