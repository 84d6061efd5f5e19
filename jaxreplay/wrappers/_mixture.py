"""Mixture: one batch from several buffers, in fixed shares.

**Weights.** Let s_k be the share of source k, and N_k the number of its items. Let n_k be the number of its rows in a
batch of B that hold an item. A draw from source k is item i with probability P_k(i). With `weights="joint"` a row has
the weight

    (s_k B / n_k) (N_k P_k(i))^-beta.

With beta = 1 the weighted values f of the n_k rows have the expected sum s_k B (mean of f over source k). So the batch
mean is an unbiased estimate of sum_k s_k (mean of f over source k), unless a source has no items. The weights of a
`Sharded` source already correct for unfilled rows of its shards, so its n_k counts all rows.

The second factor is the importance weight of the source's sampler (Schaul et al. 2016, section 3.4), not normalized;
for `Uniform` it is 1. A smaller beta keeps part of the effect of priorities. The first factor corrects the rounding of
s_k B to whole rows. That bias is never wanted, so beta does not apply to it. For any beta the batch mean estimates the
mixture, by shares, of the estimates that each source's own weights give.
"""

import dataclasses
import functools
import math
from collections.abc import Sequence
from fractions import Fraction
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from jaxreplay._common import calls, checks, devices, layouts, meshes, ring, xla
from jaxreplay._common.calls import forwarded
from jaxreplay.buffers._base import Buffer
from jaxreplay.buffers._sample import Sample, is_known_empty, sample_arguments
from jaxreplay.buffers._sequence import SequenceBuffer
from jaxreplay.buffers._shards import shards_of, whole_of
from jaxreplay.buffers._state import Sized
from jaxreplay.transitions import TransitionBatch
from jaxreplay.wrappers._sharded import Sharded

Parts = tuple[Any, ...]  # the states of all buffers
NO_SHARE = "leave out a buffer to give it no share"


def check_buffers(_: str, buffers: Any) -> tuple[Buffer[Any] | Sharded[Any], ...]:
    """`buffers` as a tuple; a `ValueError` if they are not buffers, or draw different kinds of rows."""
    if not isinstance(buffers, tuple | list) or not buffers:
        raise ValueError(f"buffers={buffers!r}: must be a tuple of at least one buffer, such as (online, offline).")
    drawn = []
    for k, buffer in enumerate(buffers):
        whole, shown = whole_of(buffer), f"buffers[{k}]={checks.brief(buffer)}"
        if not isinstance(whole, Buffer):
            raise ValueError(f"{shown}: must be a buffer or Sharded; give the buffers of another Mixture one by one.")
        drawn.append(f"sequences of {whole.sequence_length} steps" if isinstance(whole, SequenceBuffer) else "items")
        if drawn[k] != drawn[0]:
            raise ValueError(f"{shown}: draws {drawn[k]}, but buffers[0] draws {drawn[0]}; all must draw the same.")
        name, most = f"slots of buffers[{k}]", ring.MAX_CAPACITY // len(buffers)
        checks.check_integer(name, whole.num_slots, 1, most, f"as handles of {len(buffers)} sources must fit int32")
    found = [buffer.mesh for buffer in buffers if isinstance(buffer, Sharded)]
    explicit = any(mesh.explicit_axes for mesh in found)
    if len({(*mesh.devices.flat, *(mesh.shape.items() if explicit else ())) for mesh in found}) > 1:
        places = [(dict(mesh.shape), [device.id for device in mesh.devices.flat]) for mesh in found]
        raise ValueError(f"buffers: got Sharded over axes and devices {places}; give all of them one mesh.")
    return tuple(buffers)


def _unnormalized(buffer: Any) -> Any:
    """The same buffer without normalization of weights; it has the same states."""
    whole = whole_of(buffer)
    changed = dataclasses.replace(whole, sampler=whole.sampler.unnormalized())
    return changed if whole is buffer else dataclasses.replace(buffer, buffer=changed)


def _reject_empty(_: Any, state: Any, drawn: Sample) -> Sample:
    if all(map(is_known_empty, state)):
        raise ValueError("cannot sample from a mixture of empty buffers; add items first (see can_sample).")
    return drawn


@checks.config
class Mixture(Sized):
    """One batch from several buffers, its sources, with a fixed number of rows from each.

    It has the methods of a buffer except `epoch`, `num_batches` and `newest`. A method's docstring says only what
    differs. The state is the tuple of the buffers' states, so all methods of a buffer work on its part, e.g.
    `buffers[k].epoch(state[k], ...)`, with handles of its own. RLPD (Ball et al. 2023, Efficient Online Reinforcement
    Learning with Offline Data, arXiv:2302.02948, section 4.1) learns from batches with one half from a data set, and
    one half from the agent's own buffer.

    **Rows.** A batch of B rows has `counts(B)` rows from each source, in the order of the buffers.

    **Handles** name their source: `indices % K` of K sources is its position. Methods take handles in any order and
    number, also those of shards. `handles` makes them from slots. A handle of a buffer alone is another number. A
    handle is reused after at least 10^9 / (2 K) insertions into its source.

    **Empty sources.** Rows of an empty source have handle -1, probability 0 and weight 0.

    Called eagerly, `update` and `set` donate the state if all buffers have `donate`. `add` donates the state of its
    buffer if that buffer has it.

    Attributes:
      buffers: either `ReplayBuffer`s and `ReservoirBuffer`s, or `SequenceBuffer`s with one `sequence_length`; `Sharded`
        or not, all over the same devices in the same order. Each of K has at most 2**29 / K slots. The states hold
        items of one structure, shape and dtype.
      shares: a positive number for each buffer, normalized to sum 1; None for equal shares.
      weights: "own": the weights that each buffer gives its rows, normalized within the source if at all. "joint":
        importance weights for the mixture, by `shares`, of uniform distributions over each source's items (see the head
        of the module). With beta=1 and `normalize=None` weighted means over the batch are unbiased. Samplers with a
        `normalize` must agree on it: "batch" divides by the largest weight of the whole batch; None, also if no sampler
        has one, divides by nothing; "global" is refused. The share of a source without items is missing from the mean.

    Examples:
      >>> online, offline = jr.ReplayBuffer(capacity=4), jr.ReplayBuffer(capacity=4)
      >>> buffer = jr.Mixture(buffers=(online, offline), shares=(0.25, 0.75))
      >>> state = buffer.add(buffer.add(buffer.init(items), 0, items), 1, items + 500)
      >>> (buffer.sample(state, key, batch_size=4).items > 500).tolist()
      [False, True, True, True]
    """

    buffers: tuple[Buffer[Any] | Sharded[Any], ...] = checks.field(check_buffers)
    shares: tuple[float, ...] | None = None
    weights: Literal["own", "joint"] = checks.choice("own", "joint")

    def _check_fields(self) -> None:
        checks.set_checked(self, "shares", check_shares, len(self.buffers))
        if self.weights == "joint":
            normalization_of(self.buffers)

    @property
    def donate(self) -> bool:
        """True if eager calls of `update` and `set` donate the state."""
        return all(buffer.donate for buffer in self.buffers)

    def counts(self, batch_size: int) -> tuple[int, ...]:
        """Number of rows from each source, by largest remainders; ties go to the earlier buffer.

        Each is the source's share of `batch_size`, rounded up or down. It may be 0, but not in `sample`.

        Raises:
          ValueError: `batch_size` is not an integer, or is negative.
        """
        batch_size = checks.check_integer("batch_size", batch_size, 0, ring.MAX_CAPACITY, "the number of rows")
        # Shares such as 1 / 3 are not exact as floats: without this, rounding would decide ties.
        exact = [Fraction(share).limit_denominator(10**9) for share in self.shares or ()]
        quotas = [share * batch_size / sum(exact) for share in exact]
        counts = [math.floor(quota) for quota in quotas]
        by_remainder = sorted(range(len(counts)), key=lambda k: counts[k] - quotas[k])
        for k in by_remainder[: batch_size - sum(counts)]:
            counts[k] += 1
        return tuple(counts)

    def init(self, items: Any) -> Parts:
        """Empty states of all buffers.

        Args:
          items: as the first buffer's `init` takes them. Other buffers may have other numbers of rows or streams.

        Raises:
          TypeError, ValueError: as the buffers' `init`.
        """
        pairs = [*zip(self.buffers, self._specs(checks.as_spec(items)), strict=True)]
        return devices.init_on(items, lambda: tuple(buffer.init(spec) for buffer, spec in pairs))

    def _specs(self, spec: Any) -> list[Any]:
        """A spec for each buffer's `init`, from the spec of the first one."""
        num_axes = whole_of(self.buffers[0])._batch_axes
        return [spec, *(shards_of(buffer).smallest_batch(spec, num_axes) for buffer in self.buffers[1:])]

    def add(self, state: Parts, source: int, items: Any, *args: Any, **kwargs: Any) -> Parts:
        """Insert a batch of items into one buffer; the others are unchanged.

        Args:
          source: the buffer's position in `buffers`, from 0; a Python integer.
          items, *args, **kwargs: as that buffer's `add` takes them.

        Raises:
          ValueError: there is no such source, or as that buffer's `add`.
        """
        return self._changed("add", state, source, items, *args, **kwargs)

    def clear(self, state: Parts) -> Parts:
        """Remove all items of all sources, as `Buffer.clear`."""
        return tuple(buffer.clear(part) for buffer, part in self._pairs(state))

    def end_streams(self, state: Parts, source: int, *, mask: jax.Array | None = None) -> Parts:
        """Close streams of one buffer, as `SequenceBuffer.end_streams`; the others are unchanged.

        Args:
          source: the buffer's position in `buffers`, from 0; a Python integer.
          mask: bool [num_envs], True for streams of that buffer to close; None for all.

        Raises:
          ValueError: there is no such source, or as that buffer's `end_streams`.
        """
        return self._changed("end_streams", state, source, mask=mask)

    def _changed(self, method: str, state: Parts, source: int, *args: Any, **kwargs: Any) -> Parts:
        """The state after a method of one buffer."""
        source = self._position(state, source)
        change: Any = getattr(self.buffers[source], method)
        return (*state[:source], change(state[source], *args, **kwargs), *state[source + 1 :])

    def _position(self, state: Parts, source: Any) -> int:
        self._pairs(state)
        return checks.check_integer("source", source, 0, len(self.buffers) - 1, "the position of a buffer in buffers")

    @calls.method(num_rows="batch_size", before=sample_arguments, after=_reject_empty)
    def sample(
        self, state: Parts, key: jax.Array, batch_size: int, *, beta: Any = None, max_age: jax.Array | int | None = None
    ) -> Sample:
        """Draw `counts(batch_size)` rows from the sources, in the order of the buffers, each by its own sampler.

        Source k of K draws with `jax.random.split(key, K)[k]`. Probabilities and ages are within the row's source.

        Args:
          max_age: applies to each source; N_k then counts the younger items only.

        Raises:
          ValueError: an invalid argument, as in a buffer's `sample`; the sources store different items; a source gets
            no row; the rows of a `Sharded` source are not a multiple of its shards; or all sources are empty and the
            call is eager.
        """
        buffers, keys = self.buffers, jax.random.split(key, len(self.buffers))
        if self.weights == "joint":
            buffers = tuple(map(_unnormalized, buffers))
        drawn = []
        for k, rows in enumerate(self._parts(batch_size)):
            sample: Any = buffers[k].sample
            count, source = rows.stop - rows.start, self._named(k, state[k])
            part = sample.body(buffers[k], source, key=keys[k], batch_size=count, beta=beta, max_age=max_age)
            indices = self._names(k, part.indices)
            if isinstance(part.items, TransitionBatch):
                part = part.replace(items=dataclasses.replace(part.items, idx=self._names(k, part.items.idx)))
            drawn.append(part.replace(indices=indices))
        if self.weights == "joint":
            drawn = self._weigh(drawn, batch_size)
        return jax.tree.map(lambda *rows: jnp.concatenate(rows), *drawn)

    def _weigh(self, drawn: list[Sample], batch_size: int) -> list[Sample]:
        """Draws from all sources whose weights are not normalized, with joint weights."""
        shares, normalize = self.shares or (), normalization_of(self.buffers)
        rows = [num_rows(buffer, x.probabilities) for buffer, x in zip(self.buffers, drawn, strict=True)]
        scales = [jnp.asarray(share * batch_size / n, jnp.float32) for share, n in zip(shares, rows, strict=True)]
        # A GPU computes them once: the comparison with the largest below needs the very same bits.
        weights = xla.read_once([x.weights for x in drawn])
        weights = [x * scale for x, scale in zip(weights, scales, strict=True)]
        largest = jnp.ones((), jnp.float32)
        if normalize == "batch":
            largest = functools.reduce(jnp.maximum, map(jnp.max, weights))
            largest = jnp.where(largest > 0, largest, 1.0)
            # A product with the reciprocal: XLA compiles a quotient differently under jax.vmap.
            weights = [jnp.where(x == largest, 1.0, x * (1.0 / largest)) for x in weights]

        def weighed(x: Sample, weights: jax.Array, scale: jax.Array) -> Sample:
            items: Any = x.items
            if isinstance(x.items, TransitionBatch):
                items = dataclasses.replace(items, W=items.W * (scale * (1.0 / largest)).astype(items.W.dtype))
            return dataclasses.replace(x, items=items, weights=weights)

        return list(map(weighed, drawn, weights, scales))

    update = forwarded(Buffer.update, "Give each sampler the TD errors of its rows; the last of a handle counts.")
    set = forwarded(Buffer.set, "Write leaves of stored items in place, in each source its rows.")
    get = forwarded(Buffer.get, "Items [B, ...] by their handles, int [B]; zeros if not stored.")
    slots = forwarded(Buffer.slots, "`Buffer.slots`, within its source (and shard), of the handles, int [B].")
    priorities = forwarded(Buffer.priorities, "`Buffer.priorities` of the handles, int [B].")
    age = forwarded(Buffer.age, "`Buffer.age` of the handles, int [B].")
    later = forwarded(SequenceBuffer.later, "`SequenceBuffer.later` of the handles, int [B].")

    def handles(self, state: Parts, source: int, slots: jax.Array) -> jax.Array:
        """Handles in the mixture of the items in `slots`, int [B], of the buffer at `source`; as `Buffer.handles`."""
        source = self._position(state, source)
        return self._names(source, self.buffers[source].handles(self._named(source, state[source]), slots))

    def _run(self, name: str, call: calls.Call, state: Parts, arguments: dict[str, Any]) -> Any:
        """Call the method `name` of each shard of each source with all rows; rows of others have handle -1 there."""
        indices = arguments["indices"]
        checks.num_rows(call.rows, arguments, 0)
        source, own = indices % len(self.buffers), indices // len(self.buffers)  # -1 // K is -1
        found, lane, start = [], jnp.full_like(indices, -1), 0
        for k, buffer in enumerate(self.buffers):
            part, count = self._named(k, state[k]), shards_of(buffer).num_shards
            shard = jnp.clip(own // part.ring.period, 0, count - 1)
            lane = jnp.where(source == k, start + shard, lane)  # number of the shard among those of all sources
            mine = lane[None] == start + jnp.arange(count, dtype=jnp.int32)[:, None]
            rows = {x: arguments[x] for x in call.rows}
            given = arguments | jax.tree.map(lambda x, n=count: jnp.tile(x, (n, *[1] * (x.ndim - 1))), rows)
            given["indices"] = jnp.where(mine, own[None], -1).reshape(-1)
            result = getattr(buffer, name).body(buffer, part, **given)
            if call.donates:
                result = result.replace(ring=result.ring.replace(period=state[k].ring.period))
            found.append(result)
            start += count
        if call.donates:
            return tuple(found)
        at = lane * indices.size + jnp.arange(indices.size, dtype=jnp.int32)
        return jax.tree.map(lambda *parts: jnp.concatenate(parts).at[at].get(mode="promise_in_bounds"), *found)

    def _named(self, k: int, state: Any) -> Any:
        """The state of source k with a ring whose handles leave room for K sources."""
        return state.replace(ring=state.ring.named(len(self.buffers) * shards_of(self.buffers[k]).num_shards))

    def _names(self, k: int, handles: jax.Array) -> jax.Array:
        """Handles in the mixture, from handles of source k, K * handle + k; -1 stays."""
        return jnp.where(handles < 0, -1, len(self.buffers) * handles + k)

    def sizes(self, state: Parts) -> tuple[jax.Array, ...]:
        """Number of drawable items of each source, int32 [] each."""
        return tuple(buffer.size(part) for buffer, part in self._pairs(state))

    def size(self, state: Parts) -> jax.Array:
        """Number of drawable items of all sources, int32 []; saturates at 2**31 - 1."""
        return _reduced(ring.saturating_add, self.sizes(state))

    def is_full(self, state: Parts) -> jax.Array:
        """True if the next insertion overwrites in every source, bool []."""
        return _reduced(jnp.logical_and, tuple(buffer.is_full(part) for buffer, part in self._pairs(state)))

    def _parts(self, num_rows: int) -> list[slice]:
        """The rows of each source in a batch; a `ValueError` if one, or one of its shards, cannot get any."""
        parts, start = [], 0
        for k, count in enumerate(self.counts(num_rows)):
            num_shards = shards_of(self.buffers[k]).num_shards
            if count == 0:
                share = (self.shares or ())[k]
                least = math.ceil(round(1 / max(share, 1e-9), 6))
                rule = f"gets no row of each batch; give at least {least} rows, or a larger share"
                raise ValueError(f"batch_size={num_rows}: buffers[{k}], of share {share:.3g}, {rule}.")
            if count % num_shards:
                found = f"batch_size={num_rows}: buffers[{k}] gets {count} of these rows"
                raise ValueError(f"{found}, but needs a multiple of {num_shards}; change the batch size or the shares.")
            parts.append(slice(start, start + count))
            start += count
        return parts

    def _pairs(self, state: Any) -> list[tuple[Any, Any]]:
        """Each buffer and its state; a `ValueError` if `state` is not a tuple of one state for each."""
        checks.check_state(self, state, tuple)
        if len(state) != len(self.buffers):
            raise ValueError(f"state: got a tuple of {len(state)}, expected {len(self.buffers)} states, one of each.")
        return [*zip(self.buffers, state, strict=True)]

    def _check_state(self, state: Any) -> None:
        """Raise a `ValueError` if `state` is not of this mixture, or the sources store different items."""
        specs = []
        for k, (buffer, part) in enumerate(self._pairs(state)):
            buffer._check_state(part)
            shards = shards_of(buffer)
            specs.append((layouts.stored_spec(shards.part_spec(part.storage)), len(shards.whole._storage_axes)))
            try:
                checks.check_like(specs[k][0], specs[0][0], specs[k][1], specs[0][1], "buffers[0]")
            except ValueError as error:
                raise ValueError(f"buffers[{k}] stores other items than buffers[0]: {error}") from error


@functools.partial(jax.jit, static_argnums=0)
def _reduced(function: Any, parts: tuple[jax.Array, ...]) -> jax.Array:
    return meshes.over_any_mesh(functools.partial(functools.reduce, function))(parts)


def check_shares(_: str, shares: Any, num_buffers: int) -> tuple[float, ...]:
    """Shares with sum 1; a `ValueError` if they are not one positive number for each buffer."""
    if shares is None:
        return (1 / num_buffers,) * num_buffers
    if not isinstance(shares, Sequence | np.ndarray) or len(shares) != num_buffers:
        raise ValueError(f"shares={shares!r}: must be one positive number for each of {num_buffers} buffers, or None.")
    numbers = [float(checks.check_number(f"shares[{k}]", x, 0, math.inf, NO_SHARE)) for k, x in enumerate(shares)]
    if 0 in numbers:
        raise ValueError(f"shares={shares!r}: must be positive; {NO_SHARE}.")
    total = sum(map(Fraction, numbers))  # as a float it might overflow
    return tuple(float(Fraction(number) / total) for number in numbers)


def normalization_of(buffers: Sequence[Buffer[Any] | Sharded[Any]]) -> Literal["batch"] | None:
    """The normalization of joint weights; a `ValueError` if the samplers disagree."""
    rules = {}
    for k, buffer in enumerate(buffers):
        rule = whole_of(buffer).sampler.normalize
        if rule != "any":
            rules.setdefault(rule, k)
        if rule not in ("any", "batch", None):
            raise ValueError(
                f'weights="joint": sampler of buffers[{k}] has normalize={rule!r}; must be "batch" or None.'
            )
    if len(rules) > 1:
        raise ValueError(f'weights="joint": buffers {[*rules.values()]} have normalize={[*rules]}; they must agree.')
    return next(iter(rules), None)


def num_rows(buffer: Buffer[Any] | Sharded[Any], probabilities: jax.Array) -> Any:
    """Number of rows over which the weighted mean estimates the mean of the buffer's items; at least 1.

    These are the rows with an item, by their `probabilities` [B]. Weights of shards correct for empty rows: all count.
    """
    shards = shards_of(buffer)
    if shards.whole._fills_rows or shards.num_shards > 1:
        return probabilities.size
    return jnp.maximum(jnp.sum(probabilities > 0, dtype=jnp.int32), 1).astype(jnp.float32)
