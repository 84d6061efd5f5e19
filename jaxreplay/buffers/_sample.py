"""Sample: a drawn batch; and the checks of the arguments of a draw."""

from typing import Any

import jax
import jax.core
import numpy as np
from flax import struct

from jaxreplay._common import checks, ring, shown, xla
from jaxreplay.buffers._shards import room, whole_of

BATCH_SIZE = 1, ring.MAX_CAPACITY, "the number of draws"  # rule of `checks.check_integer`


@struct.dataclass
class Sample(shown.Shown):
    """A drawn batch.

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
      >>> sample = buffer.sample(state, key, batch_size=3)
      >>> sample.items.tolist(), sample.indices.tolist(), sample.age.tolist()
      ([10, 20, 30], [0, 1, 2], [2, 1, 0])
    """

    items: Any
    indices: jax.Array  # [batch]
    probabilities: jax.Array  # [batch]
    weights: jax.Array  # [batch]
    mask: jax.Array | None = None  # [batch, sequence_length]
    age: jax.Array | None = None  # [batch]


def sample_arguments(_: Any, key: Any, batch_size: Any, beta: Any, max_age: Any) -> tuple[Any, ...]:
    """The arguments of `sample`, checked."""
    if beta is not None:
        checks.check_number("beta", beta, 0, 1, "a schedule is an argument of the sampler", traced=None)
    if max_age is not None:
        checks.check_integer("max_age", max_age, 1, 2**31 - 1, "the number of newest items to draw from", traced=None)
    return key, checks.check_integer("batch_size", batch_size, *BATCH_SIZE), beta, max_age


def epoch_arguments(_: Any, key: Any, batch_size: Any, step: Any) -> tuple[Any, ...]:
    """The arguments of `epoch`, checked."""
    checks.check_integer("step", step, 0, 2**31 - 1, "the number of a batch", traced=None)
    return key, checks.check_integer("batch_size", batch_size, *BATCH_SIZE), step


def newest_arguments(buffer: Any, n: Any) -> tuple[Any, ...]:
    """The argument of `newest`, checked."""
    return (checks.check_integer("n", n, 1, room(buffer), "at most what the buffer can hold"),)


def reject_empty(buffer: Any, state: Any, drawn: Sample) -> Sample:
    """`drawn`; a `ValueError` if the buffer, with all its shards, is known to be empty."""
    if is_known_empty(state):
        raise ValueError(whole_of(buffer)._why_empty(state))
    return drawn


def is_known_empty(state: Any) -> bool:
    """True if a buffer's state, with all its shards, is empty and the size is here: nothing is waited for."""
    size = state.ring.size
    if isinstance(size, jax.core.Tracer) or not getattr(size, "is_ready", lambda: True)():
        return False
    return (size.ndim == 0 or size.is_fully_addressable) and not np.count_nonzero(xla.on_host(size))
