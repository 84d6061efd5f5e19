"""Mixture: one batch from several buffers, in fixed shares.

**Weights.** Let s_k be the share of source k, n_k the number of its rows in a batch of B that hold an item, and N_k the
number of its items. A draw from it is item i with probability P_k(i). With `weights="joint"` a row has the weight

    (s_k B / n_k) (N_k P_k(i))^-beta.

With beta = 1 the weighted values f of the n_k rows have the expected sum s_k B (mean of f over source k). So the mean
over the batch estimates sum_k s_k (mean of f over source k) without bias, unless a source has no rows or no items. The
weights of a `Sharded` source already count shards that fill fewer of their rows, or none; so there n_k are all rows.

The second factor is the importance weight of the source's own sampler (Schaul et al. 2016, section 3.4), not
normalized; for `Uniform` it is 1. A smaller beta keeps a part of what priorities do. The first factor corrects the
rounding of s_k B to whole rows. Nobody wants that bias, so beta does not apply to it. For any beta the mean estimates
the mixture, by shares, of what each source's own weights estimate.
"""

import dataclasses
import functools
import math
from fractions import Fraction
from typing import Any, Literal

import jax
import jax.numpy as jnp

from jaxreplay._common import checks, ring
from jaxreplay._common.checks import check_integer, settle
from jaxreplay._common.xla import jit_method, materialize, read_once
from jaxreplay.buffers import _memory
from jaxreplay.buffers._base import Buffer, Sample, check_draw, is_known_empty
from jaxreplay.buffers._mixture_sources import (
    check_buffers,
    check_shares,
    items_spec,
    leading_of,
    normalization_of,
    num_rows,
    without_normalization,
)
from jaxreplay.buffers._sharded import Sharded
from jaxreplay.buffers._shards import shards_of, whole_of
from jaxreplay.transitions import TransitionBatch


@dataclasses.dataclass(frozen=True, kw_only=True)
class Mixture:
    """Draws each batch from several buffers, its sources, a fixed number of rows from each.

    It has a buffer's methods, other than `epoch`, `num_batches` and `newest`. The state is the tuple of the buffers'
    states, so `buffers[k].epoch(state[k], ...)` and all else that a buffer can do works on its part. RLPD (Ball et al.
    2023, Efficient Online Reinforcement Learning with Offline Data, arXiv:2302.02948, section 4.1) learns from batches
    of which half is from a data set, and half from the agent's own buffer.

    **Rows.** A batch of B rows has `counts(B)` rows from each source, in the order of the buffers. Give handles to
    `update`, `get` and `set` in the rows in which they were drawn: handles of two sources may be equal numbers, and the
    row tells which one is meant.

    **Empty sources.** The rows of a source that is empty have handle -1, probability 0 and weight 0.

    Called eagerly, `update` and `set` donate the state if all buffers donate theirs. `add` donates that of its buffer
    if that buffer does.

    Attributes:
      buffers: any of `ReplayBuffer`, `ReservoirBuffer`, or `Sharded` of these; or instead of them `SequenceBuffer`, or
        `Sharded` of these, with one `sequence_length`. The states hold items of one structure, shape and dtype.
      shares: a positive number for each buffer; kept as parts of 1. None: equal ones.
      weights: "own": those that each source's buffer gives its rows; where they are normalized, each source's by
        itself. "joint": importance weights for the mixture, by `shares`, of the uniform laws over each source's items
        (see the head of the module). With beta=1 and `normalize=None` weighted means over the batch are unbiased. They
        are normalized as the samplers say that have a `normalize`, which must agree: "batch" divides by the largest of
        the whole batch, which becomes 1, and None by nothing, as where no sampler has one. "global" is refused. The
        share of a source without items, or without rows in the batch, is missing from the mean.

    Examples:
      >>> online, offline = jr.ReplayBuffer(capacity=4), jr.ReplayBuffer(capacity=4)
      >>> buffer = jr.Mixture(buffers=(online, offline), shares=(0.25, 0.75))
      >>> items = jnp.array([10, 20, 30])
      >>> state = buffer.add(buffer.add(buffer.init(items), 0, items), 1, items + 500)
      >>> (buffer.sample(state, jax.random.key(0), batch_size=4).items > 500).tolist()
      [False, True, True, True]
    """

    buffers: tuple[Buffer[Any] | Sharded[Any], ...]
    shares: tuple[float, ...] | None = None
    weights: Literal["own", "joint"] = "own"

    def __post_init__(self):
        settle(self, buffers=check_buffers(self.buffers))
        settle(self, shares=check_shares(self.shares, len(self.buffers)))
        if self.weights not in ("own", "joint"):
            raise ValueError(f'weights={self.weights!r}: must be "own" or "joint".')
        if self.weights == "joint":
            normalization_of(self.buffers)

    @property
    def donate(self) -> bool:
        """Whether eager calls of `update` and `set` donate the state."""
        return all(buffer.donate for buffer in self.buffers)

    def counts(self, batch_size: int) -> tuple[int, ...]:
        """Rows of a batch from each source: by largest remainders, of equal ones the earlier buffer's first.

        Each is its share of `batch_size`, rounded up or down. It may be 0.

        Raises:
          ValueError: `batch_size` is no integer, or negative.

        Examples:
          >>> buffer = jr.Mixture(buffers=(jr.ReplayBuffer(capacity=4), jr.ReplayBuffer(capacity=4)))
          >>> buffer.counts(5)
          (3, 2)
        """
        batch_size = check_integer("batch_size", batch_size, 0, ring.MAX_CAPACITY, "the number of rows")
        # Shares such as 1 / 3 are not exact as floats; rounding would decide between remainders that are equal.
        exact = [Fraction(share).limit_denominator(10**9) for share in self.shares or ()]
        quotas = [share * batch_size / sum(exact) for share in exact]
        counts = [math.floor(quota) for quota in quotas]
        by_remainder = sorted(range(len(counts)), key=lambda k: counts[k] - quotas[k])
        for k in by_remainder[: batch_size - sum(counts)]:
            counts[k] += 1
        return tuple(counts)

    def init(self, items: Any) -> tuple[Any, ...]:
        """Empty buffers for items like these.

        Args:
          items: pytree of arrays or `jax.ShapeDtypeStruct`, as `add` of the first buffer takes them; values are
            ignored. Other buffers may be given other numbers of rows, or streams.

        Raises:
          ValueError: as from the first buffer's `init`.

        Examples:
          >>> buffer = jr.Mixture(buffers=(jr.ReplayBuffer(capacity=4), jr.ReplayBuffer(capacity=4)))
          >>> [type(state).__name__ for state in buffer.init(jnp.array([10, 20, 30]))]
          ['ReplayState', 'ReplayState']
        """
        spec = checks.as_spec(items)
        jax.eval_shape(self.buffers[0].init, spec)  # for its checks
        with _memory.room(self, spec):
            return tuple(buffer.init(its) for buffer, its in zip(self.buffers, self._specs(spec), strict=True))

    def _specs(self, spec: Any) -> list[Any]:
        """What each buffer's `init` takes, where the first one's takes `spec`."""
        num_axes = whole_of(self.buffers[0])._batch_axes

        def its(buffer: Buffer[Any] | Sharded[Any]) -> Any:
            leading = leading_of(buffer)
            return jax.tree.map(lambda x: jax.ShapeDtypeStruct(leading + x.shape[num_axes:], x.dtype), spec)

        return [spec, *map(its, self.buffers[1:])]

    def _item_bytes(self, state: tuple[Any, ...]) -> float:
        """Bytes of a drawn item, of the source of which it has most."""
        buffers: Any = self.buffers
        return max(buffer._item_bytes(part) for buffer, part in zip(buffers, state, strict=True))

    def _device_states(self, items: Any) -> list[tuple[str, Any, int]]:
        """See `Buffer._device_states`."""
        return [
            (f"buffers[{k}]{prefix}", state, num_devices)
            for k, spec in enumerate(self._specs(items))
            for prefix, state, num_devices in self.buffers[k]._device_states(spec)
        ]

    def add(self, state: tuple[Any, ...], source: int, items: Any, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        """Insert a batch of items into one buffer; the others stay as they are.

        Args:
          state: that of the buffer is donated when called eagerly, if the buffer donates.
          source: which buffer, from 0 on; a Python integer.
          items: as `add` of that buffer takes them.
          *args: further arguments of that buffer's `add`, as `mask`, or the `key` of a `ReservoirBuffer`.
          **kwargs: likewise.

        Raises:
          ValueError: there is no such source, or as from the buffer's `add`.

        Examples:
          >>> buffer = jr.Mixture(buffers=(jr.ReplayBuffer(capacity=4), jr.ReplayBuffer(capacity=4)))
          >>> items = jnp.array([10, 20, 30])
          >>> state = buffer.add(buffer.init(items), 1, items)  # to the second source
          >>> [int(size) for size in buffer.sizes(state)]
          [0, 3]
        """
        self._check_length(state)
        last = len(self.buffers) - 1
        source = check_integer("source", source, 0, last, "the place of a buffer among buffers, static")
        add: Any = self.buffers[source].add
        return (*state[:source], add(state[source], items, *args, **kwargs), *state[source + 1 :])

    def sample(
        self,
        state: tuple[Any, ...],
        key: jax.Array,
        batch_size: int,
        *,
        beta: Any = None,
        max_age: jax.Array | int | None = None,
    ) -> Sample:
        """Draw `counts(batch_size)` rows from the sources, in the order of the buffers, by each one's law.

        Source k of K draws with `jax.random.split(key, K)[k]`. Probabilities and ages are those within a row's source.
        Where the items are a `TransitionBatch`, its `W` and `idx` are as from the buffers, with the mixture's weights.

        Args:
          state: unchanged.
          key: a PRNG key.
          batch_size: number of draws.
          beta: exponent of the importance weights, instead of those of the samplers; a float, or a traced float [].
          max_age: None, or draw from each source only items of which `Sample.age` is less; an integer, or a traced
            int32 []. N_k then counts these.

        Raises:
          ValueError: `batch_size` or `max_age` is not a positive integer; the sources store items that differ; the rows
            of a `Sharded` source are no multiple of its shards; or all sources are empty and the call is eager.

        Examples:
          >>> buffer = jr.Mixture(buffers=(jr.ReplayBuffer(capacity=4), jr.ReplayBuffer(capacity=4)))
          >>> items = jnp.array([10, 20, 30])
          >>> state = buffer.add(buffer.init(items), 1, items)
          >>> buffer.sample(state, jax.random.key(0), batch_size=4).weights.tolist()  # rows of a source that is empty
          [0.0, 0.0, 1.0, 1.0]
        """
        batch_size = check_draw(batch_size, beta, max_age)
        drawn = self._draw(state, key, batch_size, beta, max_age)
        if all(map(is_known_empty, self.buffers, state)):
            raise ValueError("cannot sample from a mixture of empty buffers; add items first (see can_sample).")
        return drawn

    @jit_method(static=("batch_size",), rows="batch_size", moves_items=True)
    def _draw(self, state: tuple[Any, ...], key: jax.Array, batch_size: int, beta: Any, max_age: Any) -> Sample:
        self._check_state(state)
        checks.check_key(key)
        buffers, keys = self.buffers, jax.random.split(key, len(self.buffers))
        if self.weights == "joint":
            buffers = tuple(map(without_normalization, buffers))
        parts = self._parts("batch_size", batch_size)
        drawn = [buffers[k]._draw(state[k], keys[k], rows.stop - rows.start, beta, max_age) for k, rows in parts]
        if self.weights == "joint":
            drawn = self._weigh(drawn, [k for k, _ in parts], batch_size)
        return jax.tree.map(lambda *rows: jnp.concatenate(rows), *drawn)

    def _weigh(self, drawn: list[Sample], sources: list[int], batch_size: int) -> list[Sample]:
        """Draws from `sources`, of which weights are not normalized, with those of the mixture."""
        shares, normalize = self.shares or (), normalization_of(self.buffers)
        rows = [num_rows(self.buffers[k], x.probabilities) for k, x in zip(sources, drawn, strict=True)]
        scales = [jnp.asarray(shares[k] * batch_size / n, jnp.float32) for k, n in zip(sources, rows, strict=True)]
        # Computed once, so that the largest is found again.
        weights = read_once(materialize(*[x.weights for x in drawn]))
        weights = [x * scale for x, scale in zip(weights, scales, strict=True)]
        largest = jnp.ones((), jnp.float32)
        if normalize == "batch":
            largest = functools.reduce(jnp.maximum, map(jnp.max, weights))
            largest = jnp.where(largest > 0, largest, 1.0)
            # A product with the reciprocal: what XLA makes of a quotient depends on jax.vmap.
            weights = [jnp.where(x == largest, 1.0, x * (1.0 / largest)) for x in weights]

        def weighed(x: Sample, weights: jax.Array, scale: jax.Array) -> Sample:
            changed: dict[str, Any] = {"weights": weights}
            if isinstance(x.items, TransitionBatch):
                W: Any = x.items.W
                W = W * (scale * (1.0 / largest)).astype(W.dtype)
                changed["items"] = dataclasses.replace(x.items, W=W)  # pyright: ignore[reportArgumentType]
            return dataclasses.replace(x, **changed)  # pyright: ignore[reportArgumentType]

        return list(map(weighed, drawn, weights, scales))

    @jit_method(donates=True, handles="indices", rows="indices")
    def update(self, state: tuple[Any, ...], indices: jax.Array, td_errors: jax.Array) -> tuple[Any, ...]:
        """Tell each source's sampler the TD errors of the items that were drawn from it.

        Args:
          state: donated when called eagerly (see the class).
          indices: int [B], handles from `Sample.indices`, in the rows in which they were drawn. One whose item has been
            overwritten since is ignored. Of a handle that occurs more than once in the rows of a source the last
            occurrence counts.
          td_errors: float [B], signed or not.

        Raises:
          ValueError: shapes or dtypes other than these.

        Examples:
          >>> part = jr.ReplayBuffer(capacity=4, sampler=jr.Prioritized(epsilon=0.0))
          >>> buffer, items = jr.Mixture(buffers=(part, part)), jnp.array([10, 20, 30, 40])
          >>> state = buffer.add(buffer.add(buffer.init(items), 0, items), 1, items)
          >>> sample = buffer.sample(state, jax.random.key(0), batch_size=4)
          >>> state = buffer.update(state, sample.indices, jnp.array([0.0, 0.0, 5.0, 5.0]))
          >>> [float(source.sampler.max_priority) for source in state]
          [1.0, 5.0]
        """
        self._check_state(state)
        indices, td_errors = checks.check_td_errors(indices, td_errors)
        states = list(state)
        for k, rows in self._parts("indices", indices.size):
            states[k] = self.buffers[k].update(state[k], indices[rows], td_errors[rows])
        return tuple(states)

    @jit_method(donates=True, handles="indices")
    def set(
        self, state: tuple[Any, ...], indices: jax.Array, values: Any, *, mask: jax.Array | None = None
    ) -> tuple[Any, ...]:
        """Write leaves of stored items in place, as `set` of the buffers does.

        Args:
          state: donated when called eagerly (see the class).
          indices: int [B], handles, in the rows in which they were drawn.
          values: a pytree of the items' structure, leaves [B, ...], or None where one is left alone.
          mask: bool [B] ([B, sequence_length]); where it is False nothing is written.

        Raises:
          ValueError: as from the buffers' `set`.

        Examples:
          >>> buffer = jr.Mixture(buffers=(jr.ReplayBuffer(capacity=4), jr.ReplayBuffer(capacity=4)))
          >>> items = jnp.array([10, 20, 30])
          >>> state = buffer.add(buffer.add(buffer.init(items), 0, items), 1, items)
          >>> state = buffer.set(state, jnp.array([0, 0]), jnp.array([11, 12]))  # handle 0 of each source
          >>> buffer.get(state, jnp.array([0, 1, 0, 1])).tolist()
          [11, 20, 12, 20]
        """
        self._check_state(state)
        indices = checks.check_indices(indices)
        arguments = checks.as_arrays(values), None if mask is None else jnp.asarray(mask)
        for leaf in jax.tree.leaves(arguments):
            checks.check_rows(leaf, indices.size)
        states = list(state)
        for k, rows in self._parts("indices", indices.size):
            own_values, own_mask = jax.tree.map(lambda x, rows=rows: x[rows], arguments)
            states[k] = self.buffers[k].set(state[k], indices[rows], own_values, mask=own_mask)
        return tuple(states)

    @jit_method(handles="indices")
    def get(self, state: tuple[Any, ...], indices: jax.Array) -> Any:
        """Items [B, ...] named by handles (int [B]) in the rows in which they were drawn; zeros where not stored.

        Raises:
          ValueError: `indices` is not a vector of integers.

        Examples:
          >>> buffer = jr.Mixture(buffers=(jr.ReplayBuffer(capacity=4), jr.ReplayBuffer(capacity=4)))
          >>> items = jnp.array([10, 20, 30])
          >>> state = buffer.add(buffer.add(buffer.init(items), 0, items), 1, items + 5)
          >>> buffer.get(state, jnp.array([0, 1, 0, 1])).tolist()  # the row tells which source is meant
          [10, 20, 15, 25]
        """
        self._check_state(state)
        indices = checks.check_indices(indices)
        parts = self._parts("indices", indices.size)
        items = [self.buffers[k].get(state[k], indices[rows]) for k, rows in parts]
        return jax.tree.map(lambda *rows: jnp.concatenate(rows), *items)

    def sizes(self, state: tuple[Any, ...]) -> tuple[jax.Array, ...]:
        """Number of items that may be drawn from each source, int32 [] each.

        Examples:
          >>> buffer = jr.Mixture(buffers=(jr.ReplayBuffer(capacity=4), jr.ReplayBuffer(capacity=4)))
          >>> items = jnp.array([10, 20, 30])
          >>> [int(size) for size in buffer.sizes(buffer.add(buffer.init(items), 0, items))]
          [3, 0]
        """
        self._check_length(state)
        return tuple(buffer.size(part) for buffer, part in zip(self.buffers, state, strict=True))

    def size(self, state: tuple[Any, ...]) -> jax.Array:
        """Number of items that may be drawn, of all sources, int32 []; at most 2**31 - 1.

        Examples:
          >>> buffer = jr.Mixture(buffers=(jr.ReplayBuffer(capacity=4), jr.ReplayBuffer(capacity=4)))
          >>> items = jnp.array([10, 20, 30])
          >>> int(buffer.size(buffer.add(buffer.add(buffer.init(items), 0, items), 1, items)))
          6
        """
        return _total(self.sizes(state))

    def is_empty(self, state: tuple[Any, ...]) -> jax.Array:
        """Whether nothing may be drawn, from no source, bool [].

        Examples:
          >>> buffer = jr.Mixture(buffers=(jr.ReplayBuffer(capacity=4), jr.ReplayBuffer(capacity=4)))
          >>> items = jnp.array([10, 20, 30])
          >>> bool(buffer.is_empty(buffer.add(buffer.init(items), 1, items)))  # one of two is
          False
        """
        return jnp.logical_not(ring.at_least(self.size(state), 1))

    def is_full(self, state: tuple[Any, ...]) -> jax.Array:
        """Whether the next insertion overwrites in every source, bool [].

        Examples:
          >>> buffer = jr.Mixture(buffers=(jr.ReplayBuffer(capacity=4), jr.ReplayBuffer(capacity=4)))
          >>> items = jnp.array([10, 20, 30, 40])
          >>> bool(buffer.is_full(buffer.add(buffer.init(items), 0, items)))  # one of two
          False
        """
        self._check_length(state)
        full = [buffer.is_full(part) for buffer, part in zip(self.buffers, state, strict=True)]
        return functools.reduce(jnp.logical_and, full)

    def can_sample(self, state: tuple[Any, ...], batch_size: int = 1) -> jax.Array:
        """Whether at least `batch_size` items may be drawn, of all sources, bool []; `sizes` tells of each.

        Examples:
          >>> buffer = jr.Mixture(buffers=(jr.ReplayBuffer(capacity=4), jr.ReplayBuffer(capacity=4)))
          >>> items = jnp.array([10, 20, 30])
          >>> state = buffer.add(buffer.init(items), 1, items)
          >>> bool(buffer.can_sample(state, 3)), bool(buffer.can_sample(state, 4))
          (True, False)
        """
        batch_size = check_integer("batch_size", batch_size, 0, 2**31 - 1, "a number of items")
        return ring.at_least(self.size(state), batch_size)

    def _parts(self, name: str, num_rows: int) -> list[tuple[int, slice]]:
        """The sources that have rows in a batch, and these rows."""
        parts, start = [], 0
        for k, count in enumerate(self.counts(num_rows)):
            num_shards = shards_of(self.buffers[k]).num_shards
            if count % num_shards:
                raise ValueError(
                    f"{name}={num_rows}: of these rows buffers[{k}] gets {count}, which must be a multiple of "
                    f"{num_shards}, the number of its shards; change the batch size or the shares."
                )
            if count > 0:
                parts.append((k, slice(start, start + count)))
            start += count
        return parts or [(0, slice(0, 0))]

    def _check_length(self, state: Any) -> None:
        if not isinstance(state, tuple) or len(state) != len(self.buffers):
            found = f"{type(state).__name__} of {len(state)}" if isinstance(state, tuple | list) else type(state)
            raise ValueError(f"state: got {found}, expected a tuple of {len(self.buffers)} states, one a buffer.")

    def _check_state(self, state: Any) -> None:
        """Raise a `ValueError` where `state` is not one of this mixture's, or its parts store other items."""
        self._check_length(state)
        specs = []
        for buffer, part in zip(self.buffers, state, strict=True):
            buffer._check_state(part)
            specs.append(items_spec(buffer, part))
        for k, spec in enumerate(specs):
            try:
                checks.check_like(spec, specs[0], 0, 0, "buffers[0]")
            except ValueError as error:
                raise ValueError(f"buffers[{k}] stores other items than buffers[0]: {error}") from error


@jax.jit
def _total(sizes: tuple[jax.Array, ...]) -> jax.Array:
    return functools.reduce(ring.saturating_add, sizes)
