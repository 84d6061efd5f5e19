"""The sources of a `Mixture`: checks of its arguments, and properties of its buffers."""

import dataclasses
import math
from collections.abc import Sequence
from fractions import Fraction
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from jaxreplay._common import checks, layouts
from jaxreplay.buffers._base import Buffer
from jaxreplay.buffers._sequence import SequenceBuffer
from jaxreplay.buffers._shards import shards_of, whole_of, with_whole
from jaxreplay.samplers import Prioritized, Recent, Uniform
from jaxreplay.wrappers._sharded import Sharded


def leading_of(buffer: Buffer[Any] | Sharded[Any]) -> tuple[int, ...]:
    """Leading axes of the smallest batch that `init` takes."""
    shards = shards_of(buffer)
    last = shards.whole.num_envs if isinstance(shards.whole, SequenceBuffer) else shards.num_shards
    return (*[1] * (shards.whole._batch_axes - 1), last)


def items_spec(buffer: Buffer[Any] | Sharded[Any], state: Any) -> Any:
    """Shapes and dtypes of an item."""
    shards = shards_of(buffer)
    num_axes = len(shards.whole._storage_axes)
    spec = layouts.stored_spec(shards.part_spec(state.storage))
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[num_axes:], x.dtype), spec)


def check_buffers(_: str, buffers: Any) -> tuple[Buffer[Any] | Sharded[Any], ...]:
    """`buffers` as a tuple; a `ValueError` if they are not buffers, or draw different kinds of rows."""
    if not isinstance(buffers, tuple | list) or not buffers:
        raise ValueError(f"buffers={buffers!r}: must be a tuple of at least one buffer, such as (online, offline).")
    lengths = []
    for k, buffer in enumerate(buffers):
        whole = whole_of(buffer)
        if not isinstance(whole, Buffer):
            raise ValueError(
                f"buffers[{k}]={buffer!r}: must be a ReplayBuffer, ReservoirBuffer, SequenceBuffer or Sharded of one; "
                "give the buffers of another Mixture one by one."
            )
        lengths.append(whole.sequence_length if isinstance(whole, SequenceBuffer) else None)
        if lengths[k] != lengths[0]:
            drawn = ["items" if x is None else f"sequences of {x} steps" for x in (lengths[k], lengths[0])]
            raise ValueError(
                f"buffers[{k}]={buffer!r}: draws {drawn[0]}, but buffers[0] draws {drawn[1]}; use buffers of items "
                "only, or SequenceBuffers with one sequence_length."
            )
    return tuple(buffers)


def check_shares(shares: Any, num_buffers: int) -> tuple[float, ...]:
    """Shares with sum 1; a `ValueError` if they are not one positive number for each buffer."""
    if shares is None:
        return (1 / num_buffers,) * num_buffers
    if not isinstance(shares, Sequence | np.ndarray) or len(shares) != num_buffers:
        raise ValueError(
            f"shares={shares!r}: must be one positive number for each of the {num_buffers} buffers, or None for equal "
            "shares."
        )
    numbers = [
        float(checks.check_number(f"shares[{k}]", share, 0, math.inf, "leave out a buffer to give it no share"))
        for k, share in enumerate(shares)
    ]
    for k, number in enumerate(numbers):
        if number == 0:
            raise ValueError(f"shares[{k}]={shares[k]!r}: must be positive; leave out a buffer to give it no share.")
    total = sum(map(Fraction, numbers))  # as a float it might overflow
    return tuple(float(Fraction(number) / total) for number in numbers)


def normalization_of(buffers: Sequence[Buffer[Any] | Sharded[Any]]) -> Literal["batch"] | None:
    """The normalization of joint weights; a `ValueError` if the samplers disagree."""
    rules = {}
    for k, buffer in enumerate(buffers):
        sampler = whole_of(buffer).sampler
        if hasattr(sampler, "normalize"):
            rules.setdefault(getattr(sampler, "normalize", None), k)
    for rule, k in rules.items():
        if rule not in ("batch", None):
            raise ValueError(
                f'weights="joint": the sampler of buffers[{k}] has normalize={rule!r}; must be "batch" or None, the '
                "normalizations that a batch of several sources has."
            )
    if len(rules) > 1:
        raise ValueError(
            f'weights="joint": the samplers of buffers {sorted(rules.values())} have normalize={list(rules)}; they '
            'must agree, as the batch is normalized as a whole: all "batch", or all None.'
        )
    return next(iter(rules), None)


def num_rows(buffer: Buffer[Any] | Sharded[Any], probabilities: jax.Array) -> Any:
    """Number of rows over which the weighted mean estimates the mean of the buffer's items; at least 1.

    These are the rows with an item, by their `probabilities` [B]. Weights of shards correct for empty rows: all count.
    """
    shards = shards_of(buffer)
    if fills_rows(shards.whole) or shards.num_shards > 1:
        return probabilities.size
    return jnp.maximum(jnp.sum(probabilities > 0, dtype=jnp.int32), 1).astype(jnp.float32)


def fills_rows(buffer: Buffer[Any]) -> bool:
    """True if every row of a draw from a buffer that is not empty holds an item; False for unknown samplers."""
    sampler = buffer.sampler
    samples_all = type(sampler) in (Prioritized, Recent) or (type(sampler) is Uniform and sampler.replacement)
    return buffer.max_uses is None and samples_all


def without_normalization(buffer: Any) -> Any:
    """The same buffer without normalization of weights; it has the same states."""
    whole = whole_of(buffer)
    if getattr(whole.sampler, "normalize", None) is None:
        return buffer
    sampler = dataclasses.replace(whole.sampler, normalize=None)
    return with_whole(buffer, dataclasses.replace(whole, sampler=sampler))
