"""diagnostics: numbers about a buffer to log, from within jit.

**Mass.** How much of the probability lies in the most probable 1% of the items cannot be read off a sum tree, but draws
estimate it. A draw of item i, one of B, stands for a B-th of the mass. It stands for 1 / (B P(i)) items, as this is the
weight with which a sum over draws estimates the sum over items (Horvitz and Thompson 1952). Draws in the order of P,
summed up so, trace the Lorenz curve, and the curve at 1% of the items is the estimate. Its standard error is below
0.5 / sqrt(B): 3% of the mass with 256 draws. Of equal probabilities it is exact. The curve is computed at 64 of the
draws or more, and straight in between.

**Copies.** XLA:CPU orders reads and writes by their data alone. In a program that goes on with `update` or `add`, what
is read for a `key` may come before or after these writes, so it copies the tree: half a millisecond for 2^20 items,
several times as long as a replay step. A `sample` that the agent learns from has been read already, and nothing is
copied. Nor is it on a GPU.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxreplay._common import ring
from jaxreplay._common.checks import check_bool, check_integer, check_key
from jaxreplay._common.meshes import over_any_mesh
from jaxreplay._common.random import random_bits, random_integers
from jaxreplay._common.xla import materialize, own, read_once, reads_state
from jaxreplay.buffers import Mixture, ReservoirBuffer, Sample, SequenceBuffer
from jaxreplay.buffers._base import Buffer
from jaxreplay.buffers._mixture_sources import fills_rows
from jaxreplay.buffers._shards import Shards, shards_of, whole_of
from jaxreplay.difficulty_pools import DifficultyPools
from jaxreplay.inspection import _facts
from jaxreplay.samplers import Prioritized, effective_sample_size

TENTHS = {"q10": 1, "q50": 5, "q90": 9}  # quantiles
# All draws are compared with some of them, evenly spaced. To sort 256 numbers takes a CPU 20 us, this 2 us.
PIVOTS, MOST_PIVOTS = 64, 256

Numbers = dict[str, jax.Array]


@reads_state
def diagnostics(
    buffer: Any,
    state: Any,
    key: jax.Array | None = None,
    *,
    batch_size: int = 256,
    sample: Sample | None = None,
    thorough: bool = False,
) -> Numbers:
    """Numbers about a buffer and what it draws, to be logged: float32 [] each, by name. All are finite.

    Works under `jit`, `scan` and `vmap`. The names depend on the arguments' types alone. A number that does not exist,
    as where the buffer is empty, is 0. Without `key` and `sample` nothing is drawn:

    - `size`: items (sequences) that may be drawn. `fill`: share of the storage that is filled. `drawable`: of the
      items stored (of the complete sequences) the share that may be drawn. `kept`: of all items ever added to a
      `ReservoirBuffer` the share that is stored.
    - With `Prioritized`: `total_priority`, the sum of p^alpha; `max_priority`, the largest p ever, as of the state;
      `beta`, the present one; `updates`, those that named a stored item; `rejected`, TD errors that were refused.
    - With `count_updates=True`: `late`, rows of updates that were ignored, as their item was no longer stored.

    With a `key` or a `sample`, estimates from draws:

    - `top_1pct_mass`, `top_10pct_mass`: probability of the most probable 1% (10%) of the items, estimated with a
      standard error below 0.5 / sqrt(draws) (see the head of the module).
    - `draws/effective_sample_size`: of the batch by its weights, as `jaxreplay.effective_sample_size`.
    - `draws/age_q10`, `_q50`, `_q90`: quantiles of `Sample.age`, to within 2% of the draws; none for a
      `ReservoirBuffer`.
    - With `Prioritized`: `draws/priority_q10`, `_q50`, `_q90`: quantiles of the priority p of what is drawn.
    - With `count_updates=True` and a `key`: `never_updated`, the share of the items that have not come back in
      `update` since they were inserted, estimated from uniform draws.

    With `thorough`, from all items:

    - With `Prioritized`: `top_1pct_mass` and `top_10pct_mass`, now exact; `stored/priority_q10`, `_q50`, `_q90`, and
      `stored/priority_max` of the items that are stored; `stored/priority_zero`, the share of those with priority 0,
      which are not drawn.
    - With `count_updates=True`: `never_updated`, now exact; `updates_per_item`, the mean over the items stored.

    A priority p is |TD error| as in `Prioritized`, before alpha; with alpha 0, where it is not kept, it is 1. Quantiles
    are values that occur.

    Of a `Mixture` each source has its numbers, with names that start with `0/`, `1/`, ...; `size` and
    `draws/effective_sample_size` without a number are the mixture's. Of a `Sharded` buffer the numbers are those of
    the law over all shards. Of `DifficultyPools` they are its `metrics`, and `rejected`.

    Args:
      buffer: a `ReplayBuffer`, `ReservoirBuffer`, `SequenceBuffer`, `Sharded` or `Mixture`, or `DifficultyPools`.
      state: its state; unchanged. Not donated.
      key: a PRNG key to draw with, another than the agent's.
      batch_size: number of draws with `key`; rounded up to a multiple of the shards.
      sample: instead of a key, a batch of a hundred rows or more that was drawn from this state, such as the one that
        the agent learns from. That is much cheaper, above all in a scan (see the head of the module). Not one of
        `max_age` or `epoch`, which have other laws.
      thorough: look at all items: O(N log N) instead of O(batch_size * log(N)).

    Raises:
      ValueError: not such a buffer, or a state of another; both a key and a sample.

    Examples:
      >>> buffer = jr.ReplayBuffer(capacity=4)
      >>> items = jnp.array([10, 20, 30])
      >>> numbers = jr.diagnostics(buffer, buffer.add(buffer.init(items), items))
      >>> float(numbers["size"]), float(numbers["fill"])
      (3.0, 0.75)
    """
    batch_size = check_integer("batch_size", batch_size, 1, ring.MAX_CAPACITY, "the number of draws")
    thorough = check_bool("thorough", thorough, "whether to look at all items, in O(N log N)")
    if key is not None and sample is not None:
        raise ValueError("key and sample: got both; give a key to draw with, or the sample that was drawn.")
    if key is not None:
        check_key(key)
    if sample is not None and not isinstance(sample, Sample):
        raise ValueError(f"sample: got a {type(sample).__name__}, expected what the buffer's sample returns.")
    if not isinstance(whole_of(buffer), Buffer | Mixture | DifficultyPools):
        raise ValueError(f"buffer={buffer!r}: must be a buffer of jaxreplay, or DifficultyPools.")
    if sample is not None:  # its items are not looked at
        sample = own(Sample(None, sample.indices, sample.probabilities, sample.weights, None, sample.age))
    return _program(buffer, state, key, sample, batch_size, thorough)


@functools.partial(jax.jit, static_argnums=(0, 4, 5))
def _program(buffer: Any, *arguments: Any) -> Numbers:
    return over_any_mesh(functools.partial(_numbers, buffer))(*arguments)


def _numbers(
    buffer: Any, state: Any, key: jax.Array | None, sample: Sample | None, batch_size: int, thorough: bool
) -> Numbers:
    buffer._check_state(state)
    if isinstance(buffer, DifficultyPools):
        found = {**buffer.metrics(state), "rejected": state.rejected}
    else:
        keys: Any = (None, None) if key is None else jax.random.split(key)
        if key is not None:
            shards = shards_of(buffer).num_shards
            drawn = buffer._draw(state, keys[0], -(-batch_size // shards) * shards, None, None)
            sample = Sample(None, drawn.indices, drawn.probabilities, drawn.weights, None, drawn.age)
        look = _mixture if isinstance(buffer, Mixture) else _buffer
        found = look(buffer, state, keys[1], sample, batch_size, thorough)
    return {name: jnp.asarray(x).astype(jnp.float32) for name, x in found.items()}


def _mixture(
    buffer: Mixture, states: Any, key: jax.Array | None, sample: Sample | None, batch_size: int, thorough: bool
) -> Numbers:
    found: Numbers = {"size": buffer.size(states)}
    rows: dict[int, slice] = {}
    if sample is not None:
        found["draws/effective_sample_size"] = effective_sample_size(sample.weights)
        rows = dict(buffer._parts("batch_size", sample.indices.size))
    for k, (source, state) in enumerate(zip(buffer.buffers, states, strict=True)):
        own_key = None if key is None else jax.random.fold_in(key, k)
        own = jax.tree.map(lambda x, k=k: x[rows[k]], sample) if k in rows else None
        numbers = _buffer(source, state, own_key, own, batch_size, thorough)
        found |= {f"{k}/{name}": x for name, x in numbers.items()}
    return found


def _buffer(
    buffer: Any, state: Any, key: jax.Array | None, sample: Sample | None, batch_size: int, thorough: bool
) -> Numbers:
    shards = shards_of(buffer)
    sampler, state = shards.whole.sampler, shards.stacked(state)
    found = _fill(shards, state)
    if isinstance(sampler, Prioritized):
        found |= _priorities(sampler, state.sampler)
    if sample is not None:
        found |= _draws(shards, state, sample)
    items = _facts.of_items(shards.part, state) if thorough else None
    if items is not None and isinstance(sampler, Prioritized):
        found |= _all_items(sampler, items)
    counts = getattr(state.sampler, "counts", None) if hasattr(sampler, "count_updates") else None
    if counts is not None:
        found["late"] = jnp.sum(counts.late.astype(jnp.float32))
        if items is not None:
            live, size = items.live, jnp.maximum(found["size"], 1.0)
            found["never_updated"] = jnp.sum(live & (counts.of_slots == 0), dtype=jnp.float32) / size
            found["updates_per_item"] = jnp.sum(jnp.where(live, counts.of_slots, 0).astype(jnp.float32)) / size
        elif key is not None:
            found["never_updated"] = _never_updated(shards, state, key, -(-batch_size // shards.num_shards))
    return found


def _sizes(state: Any) -> jax.Array:
    """Items in each shard, float32 [D]."""
    return state.ring.size.astype(jnp.float32)


def _fill(shards: Shards, state: Any) -> Numbers:
    buffer, size = shards.whole, jnp.sum(_sizes(state))
    found: Numbers = {"size": size}
    if not isinstance(buffer, SequenceBuffer):
        found["fill"] = size / buffer.capacity
        found["drawable"] = jnp.minimum(size, 1.0)
        if isinstance(buffer, ReservoirBuffer):
            count = state.count.astype(jnp.float32)  # [D, 2]
            found["kept"] = size / jnp.maximum(jnp.sum(count[:, 0] * 2.0**32 + count[:, 1]), 1.0)
        return found
    rows = state.rows.size
    found["fill"] = jnp.mean(rows.astype(jnp.float32)) / buffer.length
    complete = (rows + state.wait - buffer.sequence_length) // buffer.stride * shards.part.num_envs
    complete = jnp.sum(jnp.maximum(complete, 0).astype(jnp.float32))
    found["drawable"] = size / jnp.maximum(complete, 1.0)
    return found


def _priorities(sampler: Prioritized, state: Any) -> Numbers:
    updates = jnp.max(state.updates)
    return {
        "total_priority": jnp.sum(_facts.totals(state)),
        "max_priority": jnp.max(state.max_priority),
        "beta": jnp.asarray(sampler.beta(updates) if callable(sampler.beta) else sampler.beta),
        "updates": updates,
        "rejected": jnp.sum(state.rejected.astype(jnp.float32)),
    }


def _draws(shards: Shards, state: Any, sample: Sample) -> Numbers:
    """What the rows of a batch tell; the rows of shards follow each other."""
    probabilities, drawn = sample.probabilities, sample.indices >= 0
    num_rows = jnp.sum(drawn, dtype=jnp.int32)
    sizes, rows_each = _sizes(state), drawn.size // shards.num_shards
    filled = jnp.sum(sizes > 0).astype(jnp.float32)
    # Rows of a shard without items draw nothing, and the others are all of the law.
    rows, parts = num_rows.astype(jnp.float32), []
    if shards.num_shards > 1 and not fills_rows(shards.whole.sampler):  # each shard is as much of the law
        held = jnp.sum(drawn.reshape(shards.num_shards, -1), axis=1, dtype=jnp.int32).astype(jnp.float32)
        rows = jnp.repeat(held * filled, rows_each)
        parts = [jnp.where(drawn, 1.0 / rows, 0.0)]
    share = filled / (rows * jnp.sum(sizes) * shards.num_shards)
    items = jnp.where(drawn, share / jnp.where(drawn, probabilities, 1.0), 0.0)  # share that each row stands for
    at, not_below, upper, *mass = _ranked(probabilities, items, *parts)
    mass = mass[0] if mass else not_below.astype(jnp.float32) / jnp.maximum(num_rows, 1).astype(jnp.float32)
    found = {name: _at(top, upper, mass) for name, top in _facts.TOPS.items()}
    found["draws/effective_sample_size"] = effective_sample_size(sample.weights)
    if isinstance(shards.whole.sampler, Prioritized):
        # Of a shard's rows, p^alpha is their probability times the total. In one shard the order is the same.
        totals = _facts.totals(state.sampler)
        leaves, alone = at * totals[0], not_below
        if shards.num_shards > 1:
            rows = jnp.repeat(totals * shards.num_shards, rows_each)
            leaves, alone, _ = _ranked(probabilities * rows, jnp.zeros_like(items))
        for name, leaf in _quantiles(leaves, alone, num_rows).items():
            found[f"draws/priority_{name}"] = _priority(shards.whole.sampler, leaf)
    if sample.age is not None and not isinstance(shards.whole, ReservoirBuffer):
        ages, alone, _ = _ranked(sample.age, jnp.zeros_like(items))
        found |= {f"draws/age_{name}": age for name, age in _quantiles(ages, alone, num_rows).items()}
    return found


def _ranked(x: jax.Array, *columns: jax.Array) -> list[jax.Array]:
    """Some of `x` [B]; how many rows are not below each, int32; and the sums of their `columns`, float32 [B] each."""
    x, *sums = read_once(materialize(x, *columns))
    at = x[:: max(x.size // max(PIVOTS, min(x.size // 16, MOST_PIVOTS)), 1)]
    not_below = x[:, None] >= at[None]  # [of, than]
    # One reduction, which takes a CPU 2 us and not 12, as this loop it vectorizes.
    operands = [not_below.astype(jnp.int32), *[jnp.where(not_below, column[:, None], 0.0) for column in sums]]
    zeros = [np.zeros((), operand.dtype) for operand in operands]
    return [at, *lax.reduce(operands, zeros, lambda x, y: [a + b for a, b in zip(x, y, strict=True)], (0,))]


def _quantiles(x: jax.Array, not_below: jax.Array, num_rows: jax.Array) -> Numbers:
    """Quantiles of `num_rows` numbers, of which `not_below` [K] are not below each of `x` [K].

    The largest of `x` that do not exceed them. Rows that draw nothing come with the lowest numbers of all, and do not
    matter.
    """
    found = {}
    for name, tenths in TENTHS.items():
        rank = num_rows // 10 * tenths + (num_rows % 10 * tenths + 9) // 10  # from 1 on; no product overflows
        above = num_rows - rank + 1  # so many are not below the quantile
        lowest = jnp.asarray(-1, x.dtype)
        found[name] = jnp.maximum(jnp.max(jnp.where(not_below >= above, x, lowest)), jnp.zeros((), x.dtype))
    return {name: jnp.where(num_rows > 0, x, jnp.zeros((), x.dtype)) for name, x in found.items()}


def _at(part: float, x: jax.Array, y: jax.Array) -> jax.Array:
    """The height at `part` of the curve through (0, 0), the points (x, y) [B] and, from the last one on, level."""
    reached = x <= part
    x0, y0 = (jnp.max(jnp.where(reached, a, 0.0)) for a in (x, y))
    x1, y1 = (jnp.min(jnp.where(reached, jnp.inf, a)) for a in (x, y))
    ahead = jnp.isfinite(x1)
    slope = jnp.where(ahead, y1 - y0, 0.0) / jnp.where(ahead, jnp.maximum(x1 - x0, 1e-30), 1.0)
    return jnp.clip(y0 + slope * (part - x0), 0.0, 1.0)


def _priority(sampler: Prioritized, leaf: jax.Array) -> jax.Array:
    """The priority p of which `leaf` is p^alpha."""
    return leaf ** (1.0 / sampler.alpha) if sampler.alpha > 0 else leaf


def _all_items(sampler: Prioritized, items: _facts.Items) -> Numbers:
    found, live = dict(items.top_masses), items.live
    stored = _facts.descending(jnp.where(live, items.leaves, -1.0))
    num_items = jnp.sum(live, dtype=jnp.int32)
    quantiles = {**_quantiles(stored, jnp.arange(1, stored.size + 1, dtype=jnp.int32), num_items), "max": stored[0]}
    for name, leaf in quantiles.items():
        found[f"stored/priority_{name}"] = _priority(sampler, jnp.maximum(leaf, 0.0))
    zeros = jnp.sum(live & (items.leaves == 0), dtype=jnp.float32)
    found["stored/priority_zero"] = zeros / jnp.maximum(num_items, 1).astype(jnp.float32)
    return found


def _never_updated(shards: Shards, state: Any, key: jax.Array, batch_size: int) -> jax.Array:
    def share(state: Any, key: jax.Array) -> jax.Array:
        live, of_slots = shards.part._live(state), state.sampler.counts.of_slots
        position = random_integers(random_bits(key, batch_size), jnp.maximum(live.size, 1))
        slots = live.slots(position, shards.part._num_slots)
        return jnp.mean(of_slots.at[slots].get(mode="promise_in_bounds") == 0, dtype=jnp.float32)

    found, sizes = jax.vmap(share)(state, jax.random.split(key, shards.num_shards)), _sizes(state)
    return jnp.sum(found * sizes) / jnp.maximum(jnp.sum(sizes), 1.0)
