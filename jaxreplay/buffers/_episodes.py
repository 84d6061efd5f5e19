"""Episodes in a `SequenceBuffer`: flags of its rows, and the number of later steps, with draws from them.

Without `gaps` the flag is a bool, True for the last row of an episode. With `gaps` it is 0, 1 (last of its episode) or
GAP (not drawable). A gap is an episode by itself: the row before it is the last of its episode, and the row after it
starts one.

The end of an episode is not known when its rows are written. So each row stores the number of its episode, which never
decreases along a stream. Bisection finds the last stored row of the same number.
"""

import math
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import struct

from jaxreplay._common import checks, layouts, random, ring, shown, xla
from jaxreplay.buffers._shards import whole_of

GAP = 2
DIGIT = 2**10  # steps are drawn digit by digit: one float32 has too few bits for many of them


def flags_of(ends: jax.Array, drawable: jax.Array | None) -> jax.Array:
    """Flags with gaps, uint8 [T, num_envs], from `ends` and `drawable`, bool [T, num_envs] (None: all rows)."""
    flags = ends.astype(jnp.uint8)
    return flags if drawable is None else jnp.where(drawable, flags, jnp.uint8(GAP))


def is_end(flags: jax.Array) -> jax.Array:
    """True if the next row is of another episode, bool [...]."""
    return flags if flags.dtype == jnp.bool_ else flags > 0


def is_gap(flags: jax.Array) -> jax.Array:
    """True if the row is not drawable, bool [...]."""
    return jnp.zeros(flags.shape, bool) if flags.dtype == jnp.bool_ else flags == GAP


def in_first_episode(flags: jax.Array) -> jax.Array:
    """True for steps of sequences [B, L] in the episode of the first row, bool [B, L]."""
    end = is_end(flags)
    return (jnp.cumsum(end, axis=1, dtype=jnp.int32) == end.astype(jnp.int32)) & ~is_gap(flags)


@struct.dataclass
class EpisodeNumbers(shown.Shown):
    """The numbers of the episodes, counted in each stream, modulo 2^32.

    Attributes:
      number: int32 [length, num_envs] as the backend wants it, the number of each row's episode.
      now: int32 [num_envs], the number of the next row's episode.
    """

    number: Any  # [length, num_envs]
    now: jax.Array  # [num_envs]
    _layouts: ClassVar = {"number": layouts.storage_layout(2)}


def init(length: int, num_envs: int) -> EpisodeNumbers:
    spec = jax.ShapeDtypeStruct((), jnp.int32)
    return EpisodeNumbers(layouts.zeros(spec, (length, num_envs), 0), xla.full((num_envs,), 0, jnp.int32))


def append(episodes: EpisodeNumbers, ends: jax.Array, at: jax.Array) -> EpisodeNumbers:
    """`episodes` with new rows, written at the rows `at` [T]; `ends` [T, num_envs] are their flags."""
    after = episodes.now[None] + jnp.cumsum(ends, axis=0, dtype=jnp.int32)
    return EpisodeNumbers(layouts.write(episodes.number, at, after - is_end(ends).astype(jnp.int32)), after[-1])


def num_later(number: Any, row: jax.Array, env: jax.Array, cursor: jax.Array, length: int, num_envs: int) -> jax.Array:
    """Number of stored later rows of the same episode, int32 [B].

    Args:
      number: `EpisodeNumbers.number`.
      row, env: int32 [B], places of stored rows.
      cursor: int32 [], the next row to write.
      length, num_envs: size of the storage.
    """
    number = layouts.merge_axes(number)
    room = ring.wrap_negative(cursor - 1 - row, length)  # rows up to the newest

    def number_at(steps: jax.Array) -> jax.Array:
        return layouts.read(number, place(row, env, steps, length, num_envs))

    own, count = number_at(jnp.zeros_like(row)), jnp.zeros_like(row)
    for bit in reversed(range((length - 1).bit_length())):  # unrolled: one kernel on a GPU
        more = count + 2**bit
        count = jnp.where((more <= room) & (number_at(jnp.minimum(more, room)) == own), more, count)
    return count


def place(row: jax.Array, env: jax.Array, steps: jax.Array, length: int, num_envs: int) -> jax.Array:
    """Position of the row `steps` later (at most `length`) in the storage with merged leading axes."""
    return ring.wrap_excess(row + steps, length) * num_envs + env


def checked(buffer: Any, key: Any, indices: Any, law: Any, gamma: Any) -> tuple[Any, ...]:
    """The arguments of `later`, checked, with log(gamma) for gamma.

    The logarithm is computed in float64 of a Python number, and clipped to [-80, -1e-20], where its quotients are safe.

    Raises:
      ValueError: `buffer` stores no episode numbers, there is no such `law`, or `gamma` is neither a number in [0, 1]
        nor a real array [].
    """
    for one in getattr(buffer, "buffers", (buffer,)):  # of a mixture all
        if not getattr(whole_of(one), "hindsight", False):
            raise ValueError(f"buffer={one!r}: `later` needs a SequenceBuffer with hindsight=True.")
    checks.check_choice("law", law, "uniform", "geometric", "last")
    checks.check_number("gamma", gamma, 0, 1, "it is a discount", traced=None)
    if isinstance(gamma, jax.Array):
        return key, indices, law, jnp.clip(jnp.log(checks.as_float(gamma)), -80.0, -1e-20)
    return key, indices, law, min(max(math.log(gamma), -80.0), -1e-20) if gamma > 0 else -80.0


def draw(key: jax.Array, count: jax.Array, law: str, log_gamma: Any, length: int) -> jax.Array:
    """A draw from 1 to `count` steps, int32 [B]; 0 if `count` (int32 [B], below `length`) is 0."""
    if law == "last":
        return count
    if law == "uniform":
        steps = 1 + random.random_integers(random.random_bits(key, count.size), jnp.maximum(count, 1))
    else:
        num_digits = max(1, math.ceil(math.log(length, DIGIT) - 1e-9))
        words = jnp.stack(random.random_bits(key, -(-num_digits // 2) * count.size)).reshape(-1, count.size)
        steps = 1 + geometric(words[:num_digits], jnp.maximum(count, 1), jnp.asarray(log_gamma, jnp.float32))
    return jnp.where(count > 0, steps, 0)


def geometric(words: jax.Array, count: jax.Array, log_gamma: jax.Array) -> jax.Array:
    """Numbers in [0, count) with probabilities in proportion to gamma^k, int32 [B].

    The first word chooses a block of DIGIT^(n - 1) numbers, the next a smaller block in it, and the last a number. Each
    inverts the distribution function, in a form with the relative error of float32 for any gamma.

    Args:
      words: uint32 [n, B], random bits; `count` is at most DIGIT^n.
      count: int32 [B], at least 1.
      log_gamma: float32 [], negative.
    """
    found = jnp.zeros_like(count)
    for power, word in reversed([*enumerate(words[::-1])]):
        block = DIGIT**power
        below, above = ((x.astype(jnp.float32) + 0.5) * 2.0**-32 for x in (word, ~word))  # u and 1 - u
        exponent = count.astype(jnp.float32) * log_gamma
        fallen = below * jnp.expm1(exponent)  # gamma^x - 1
        # A small gamma^x needs its own digits; a large one needs the digits of gamma^x - 1.
        log = jnp.where(fallen < -0.5, jnp.log(above + below * jnp.exp(exponent)), jnp.log1p(fallen))
        digit = (log / (log_gamma * block)).astype(jnp.int32)
        digit = jnp.clip(digit, 0, (count - 1) // block)
        found += digit * block
        count = jnp.minimum(count - digit * block, block)
    return found
