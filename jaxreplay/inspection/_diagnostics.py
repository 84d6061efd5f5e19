"""diagnostics: numbers about a buffer for logging, also inside jit.

**Mass.** A sum tree does not give the probability mass of the most probable 1% of the items, but draws estimate it. One
of B draws, of item i, represents 1/B of the mass. It represents 1 / (B P(i)) items, the weight with which a sum over
draws estimates the sum over items (Horvitz and Thompson 1952). Cumulative sums over draws sorted by P trace the Lorenz
curve, and the estimate is the curve at 1% of the items. Its standard error is below 0.5 / sqrt(B): 3% of the mass with
256 draws. For equal probabilities it is exact. The curve is computed at 64 or more of the draws and interpolated
linearly.

**Copies.** XLA:CPU orders reads and writes by data dependencies only. In a program that goes on with `update` or `add`,
the reads for a `key` may come before or after these writes, so XLA:CPU copies the tree. The copy takes half a
millisecond for 2^20 items, several times as long as a replay step. A `sample` from which the agent learns has already
been read, so nothing is copied. A GPU copies nothing in either case.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxreplay._common import checks, meshes, random, ring, xla
from jaxreplay.buffers import ReservoirBuffer, Sample, SequenceBuffer, _shards
from jaxreplay.curricula import DifficultyPools, Levels, Tasks
from jaxreplay.inspection import _facts
from jaxreplay.samplers import effective_sample_size
from jaxreplay.wrappers import Mixture

TENTHS = {"q10": 1, "q50": 5, "q90": 9}  # quantiles
# All draws are compared with evenly spaced pivots: 2 us on a CPU for 256 draws, where a sort takes 20 us.
PIVOTS, MOST_PIVOTS = 64, 256

Numbers = dict[str, jax.Array]
Arrays = list[jax.Array]


@xla.reads_state
def diagnostics(
    buffer: Any,
    state: Any,
    key: jax.Array | None = None,
    *,
    batch_size: int = 256,
    sample: Sample | None = None,
    thorough: bool = False,
) -> Numbers:
    """Compute numbers about a buffer and its draws for logging: float32 [] by name, all finite.

    Works under `jit`, `scan` and `vmap`. The names depend only on the types of the arguments. Undefined numbers, such
    as averages over an empty buffer, are 0. Without `key` and `sample` nothing is drawn:

    - `size`: number of items (sequences) that may be drawn. `fill`: filled share of the storage. `drawable`: share of
      the stored items (complete sequences) that may be drawn. `kept`: share of all items ever added to a
      `ReservoirBuffer` that is stored.
    - With `Prioritized`: `total_priority`, the sum of p^alpha (faded, with `half_life`); `max_priority`, the largest p
      ever, or with `max_priority="stored"` the largest of the items that may be drawn (1 if none); `beta`, its current
      value; `updates`, calls that named a stored item; `rejected`, rejected TD errors, and 1 more for each of alpha,
      epsilon and floor that is NaN or negative.
    - With `count_updates=True` or `max_uses`: `late`, update rows ignored because their item was no longer stored.
    - With `max_uses`: `spent`, the number of stored items that were updated so often that they are no longer drawn.

    With a `key` or a `sample`, estimates from draws:

    - `top_1pct_mass`, `top_10pct_mass`: probability of the most probable 1% (10%) of the items, estimated with a
      standard error below 0.5 / sqrt(draws) (see the module docstring).
    - `draws/effective_sample_size`: `jaxreplay.effective_sample_size` of the batch.
    - `draws/age_q10`, `_q50`, `_q90`: quantiles of `Sample.age`, to within 2% of the draws; absent for a
      `ReservoirBuffer`.
    - With `Prioritized` without `half_life`: `draws/priority_q10`, `_q50`, `_q90`: quantiles of the priority p of the
      draws.
    - With `count_updates=True` or `max_uses`, and a `key`: `never_updated`, share of the items not updated since their
      insertion, estimated from uniform draws.

    With `thorough`, from all items:

    - With `Prioritized`: exact `top_1pct_mass` and `top_10pct_mass`; `stored/priority_q10`, `_q50`, `_q90` and
      `stored/priority_max` of the stored items; `stored/priority_zero`, the share of items with priority 0, drawn only
      where it is 1. With `half_life` also `stored/faded`: how many items have a priority but are never drawn, as their
      probability is below 2^-60 of the largest.
    - With `count_updates=True` or `max_uses`: exact `never_updated`; `updates_per_item`, the mean over the stored
      items.

    Priorities p are before alpha, as in `Prioritized`. With alpha 0 they are not stored and count as 1. Quantiles are
    values that occur.

    A `Mixture` has numbers for each source, with names that start with `0/`, `1/`, ...; `size` and
    `draws/effective_sample_size` without a prefix are for the whole mixture. For a `Sharded` buffer the numbers
    describe the distribution over all shards. For `DifficultyPools`, `Tasks` and `Levels` they are `metrics`
    and `rejected`.

    Args:
      buffer: a `ReplayBuffer`, `ReservoirBuffer`, `SequenceBuffer`, `Sharded` or `Mixture`, `DifficultyPools` or
        `Tasks`.
      state: its state; unchanged and not donated.
      key: a PRNG key for draws, not used by the agent.
      batch_size: number of draws with `key`, rounded up to a multiple of the number of shards.
      sample: a batch of a hundred rows or more drawn from this state, in place of a key, such as the batch from which
        the agent learns. Much cheaper, above all in a scan (see the module docstring). Batches from `max_age` or
        `epoch` have other distributions and do not qualify.
      thorough: look at all items, in O(N log N) instead of O(batch_size * log(N)).

    Raises:
      ValueError: `buffer` is of another type, `state` does not belong to it, or both a key and a sample are given.

    Examples:
      >>> numbers = jr.diagnostics(buffer, state)
      >>> float(numbers["size"]), float(numbers["fill"])
      (3.0, 0.75)
    """
    batch_size = checks.check_integer("batch_size", batch_size, 1, ring.MAX_CAPACITY, "the number of draws")
    thorough = checks.check_bool("thorough", thorough, "whether to look at all items, in O(N log N)")
    if (key is not None and sample is not None) or isinstance(key, Sample):
        raise ValueError("key and sample: got both, or a Sample as key; give a key, or sample=.")
    if key is not None:
        checks.check_key(key)
    if sample is not None and not isinstance(sample, Sample):
        raise ValueError(f"sample: got a {type(sample).__name__}, expected the result of the buffer's sample.")
    _facts.check_buffer(buffer)
    sample = None if sample is None else xla.copy_numpy(_facts.without_items(sample))
    return _numbers(buffer, state, key, sample, batch_size, thorough)


@functools.partial(jax.jit, static_argnums=(0, 4, 5))
@meshes.over_any_mesh
def _numbers(buffer: Any, state: Any, key: Any, sample: Sample | None, batch_size: int, thorough: bool) -> Numbers:
    buffer._check_state(state)
    if isinstance(buffer, DifficultyPools | Tasks | Levels):
        found = {**buffer.metrics(state), "rejected": state.rejected}
    else:
        if key is not None:
            draw_key, key = jax.random.split(key)
            sample = _facts.draw(buffer, state, draw_key, batch_size)
        found = (_mixture if isinstance(buffer, Mixture) else _buffer)(buffer, state, key, sample, batch_size, thorough)
    return {name: jnp.asarray(x).astype(jnp.float32) for name, x in found.items()}


def _mixture(buffer: Mixture, states: Any, key: Any, sample: Sample | None, batch_size: int, thorough: bool) -> Numbers:
    found: Numbers = {"size": buffer.size(states)}
    rows: list[slice] = []
    if sample is not None:
        found["draws/effective_sample_size"] = effective_sample_size(sample.weights)
        rows = buffer._parts(sample.indices.size)
    for k, (source, state) in enumerate(zip(buffer.buffers, states, strict=True)):
        own_key = None if key is None else jax.random.fold_in(key, k)
        own = jax.tree.map(lambda x, k=k: x[rows[k]], sample) if rows else None
        found |= {f"{k}/{name}": x for name, x in _buffer(source, state, own_key, own, batch_size, thorough).items()}
    return found


def _buffer(buffer: Any, state: Any, key: Any, sample: Sample | None, batch_size: int, thorough: bool) -> Numbers:
    shards = _shards.shards_of(buffer)
    state = shards.stacked(state)
    found = _fill(shards, state) | shards.whole.sampler.metrics(state.sampler)
    if sample is not None:
        found |= _draws(shards, state, sample)
    items = _facts.of_items(shards.part, state) if thorough else None
    if items is not None and items.priorities is not None:
        found |= _all_items(items)
    counts = state.uses
    if counts is not None:
        stored = jnp.sum(_facts.sizes(state))
        if counts.unspent is not None:
            found["spent"] = stored - found["size"]
        found["late"] = jnp.sum(counts.late.astype(jnp.float32))
        if items is not None:
            live, size = items.live, jnp.maximum(stored, 1.0)
            found["never_updated"] = jnp.sum(live & (counts.of_slots == 0), dtype=jnp.float32) / size
            found["updates_per_item"] = jnp.sum(jnp.where(live, counts.of_slots, 0).astype(jnp.float32)) / size
        elif key is not None:
            found["never_updated"] = _never_updated(shards, state, key, -(-batch_size // shards.num_shards))
    return found


def _fill(shards: _shards.Shards, state: Any) -> Numbers:
    buffer, size, stored = shards.whole, jnp.sum(_facts.drawable(state)), jnp.sum(_facts.sizes(state))
    if isinstance(buffer, SequenceBuffer):
        rows = state.rows.size
        fill = jnp.mean(rows.astype(jnp.float32)) / buffer.length
        complete = (rows + state.wait - buffer.sequence_length) // buffer.stride * shards.part.num_envs
        stored = jnp.sum(jnp.maximum(complete, 0).astype(jnp.float32))
    else:
        fill = stored / buffer.capacity
    found: Numbers = {"size": size, "fill": fill, "drawable": size / jnp.maximum(stored, 1.0)}
    if isinstance(buffer, ReservoirBuffer):
        count = state.count.astype(jnp.float32)  # [D, 2]
        found["kept"] = stored / jnp.maximum(jnp.sum(count[:, 0] * 2.0**32 + count[:, 1]), 1.0)
    return found


def _draws(shards: _shards.Shards, state: Any, sample: Sample) -> Numbers:
    """Estimates from the rows of a batch; the rows are grouped by shard."""
    drawn, num_shards = sample.indices >= 0, shards.num_shards
    sizes, num_rows = _facts.sizes(state), jnp.sum(drawn, dtype=jnp.int32)
    filled = jnp.sum(_facts.drawable(state) > 0).astype(jnp.float32)
    # Each row's share of the items, and of the draws if rows differ in it, up to a factor. Rows of an empty shard draw
    # nothing; the rows of the other shards cover the whole distribution, and non-empty shards have equal mass.
    columns = [jnp.where(drawn, 1.0 / jnp.where(drawn, sample.probabilities, 1.0), 0.0)]
    factor = num_rows.astype(jnp.float32)  # without draws 0: then `_masses` compares with NaN, and finds no mass
    if num_shards > 1 and not shards.whole._fills_rows:
        part = _facts.shares_of_draws(drawn, num_shards, filled)
        columns, factor = [columns[0] * part, part], jnp.ones((), jnp.float32)
    ranked = {"probability": sample.probabilities}
    if sample.age is not None and shards.whole._keeps_order:
        ranked["age"] = sample.age.astype(jnp.float32)
    # Within a shard items have one order by probability and by priority.
    if num_shards > 1 and (priorities := _facts.priorities_at(shards, state, sample.probabilities)) is not None:
        ranked["priority"] = priorities
    at, not_below, sums = _ranked([*ranked.values()], columns)
    mass = sums[1] if len(sums) > 1 else not_below[0].astype(jnp.float32) / factor
    num_items = jnp.maximum(jnp.sum(sizes), 1.0) * num_shards
    found = dict(zip(_facts.TOPS, _masses(sums[0] * filled / (factor * num_items), mass), strict=True))
    found["draws/effective_sample_size"] = effective_sample_size(sample.weights)
    quantiles = dict(zip(ranked, _quantiles(at, not_below, num_rows), strict=True))
    of_probability = quantiles.pop("probability")
    if num_shards == 1 and (priorities := _facts.priorities_at(shards, state, of_probability)) is not None:
        quantiles["priority"] = priorities
    return found | {f"draws/{of}_{name}": x[k] for of, x in quantiles.items() for k, name in enumerate(TENTHS)}


def _ranked(ranked: Arrays, columns: Arrays) -> tuple[Arrays, Arrays, Arrays]:
    """Pivots [K] of numbers [B]; rows not below each, int32 [K]; sums of `columns` over the first's rows, [K]."""
    arrays = xla.read_once(xla.materialize(*ranked, *columns))
    ranked, columns = arrays[: len(ranked)], arrays[len(ranked) :]
    step = max(ranked[0].size // max(PIVOTS, min(ranked[0].size // 16, MOST_PIVOTS)), 1)
    pivots = [x[::step] for x in ranked]
    by_axis = [functools.partial(_sums_at_pivots, axis) for axis in (0, 1)]
    sums = jax.lax.platform_dependent(ranked, pivots, columns, cpu=by_axis[0], default=by_axis[1])
    return pivots, sums[: len(ranked)], sums[len(ranked) :]


def _sums_at_pivots(axis: int, ranked: Arrays, pivots: Arrays, columns: Arrays) -> Arrays:
    """Rows not below each pivot, int32 [K] for each of `ranked`; sums of `columns` over these rows of the first, [K].

    The comparisons have the rows along `axis`. A CPU vectorizes one joint reduction over axis 0: 1 us instead of 12. A
    GPU makes the comparisons in the kernel that reduces them only over axis 1.
    """
    by_row = functools.partial(jnp.expand_dims, axis=1 - axis)
    not_below = [by_row(x) >= jnp.expand_dims(pivot, axis) for x, pivot in zip(ranked, pivots, strict=True)]
    of_first = [jnp.where(not_below[0], by_row(column), 0.0) for column in columns]
    return _reduced(axis, [*(x.astype(jnp.int32) for x in not_below), *of_first], 0, jnp.add)


def _reduced(axis: int, arrays: Arrays, empty: float, combine: Callable[..., jax.Array]) -> Arrays:
    """Joint reduction of arrays of one shape by a function of two elements; `empty` is the result for no elements.

    It needs one kernel. Single reductions need one each on a GPU, and three each on a CPU.
    """
    initial = tuple(np.asarray(empty, x.dtype) for x in arrays)
    return list(jax.lax.reduce(tuple(arrays), initial, lambda x, y: tuple(map(combine, x, y)), (axis,)))


def _quantiles(x: Arrays, not_below: Arrays, num_rows: jax.Array) -> Arrays:
    """Quantiles [3] of `num_rows` numbers, for each array of pivots `x` [K] and the number of rows `not_below` each.

    The result is the largest pivot that does not exceed the quantile. Rows without a draw rank lowest and are not
    counted.
    """
    tenths, ten = np.array([*TENTHS.values()], np.int32), np.int32(10)
    rest = jax.lax.div(jax.lax.rem(num_rows, ten) * tenths + 9, np.full(3, 10, np.int32))
    rank = jax.lax.div(num_rows, ten) * tenths + rest
    least = (num_rows - rank + 1)[:, None]  # the rank is 1-based; no product overflows
    reached = [jnp.where(rows[None] >= least, pivot[None], 0.0) for pivot, rows in zip(x, not_below, strict=True)]
    return _reduced(1, reached, 0.0, jnp.maximum)


def _masses(x: jax.Array, y: jax.Array) -> jax.Array:
    """Linear interpolation of (0, 0) and the points (x, y) [K] at the `TOPS`, [2]; constant after the last point."""
    tops = np.array([*_facts.TOPS.values()], np.float32)
    reached = x[None] <= tops[:, None]
    below = [jnp.where(reached, a[None], 0.0) for a in (x, y)]
    above = [jnp.where(reached, -jnp.inf, -a[None]) for a in (x, y)]
    x0, y0, x1, y1 = _reduced(1, below + above, -jnp.inf, jnp.maximum)
    x1, y1, ahead = -x1, -y1, jnp.isfinite(x1)
    slope = jnp.where(ahead, y1 - y0, 0.0) / jnp.where(ahead, jnp.maximum(x1 - x0, 1e-30), 1.0)
    return jnp.clip(y0 + slope * (tops - x0), 0.0, 1.0)


def _all_items(items: _facts.Items) -> Numbers:
    stored = jnp.sort(jnp.where(items.live, items.priorities, -1.0), axis=None)[::-1]
    num_items = jnp.sum(items.live, dtype=jnp.int32)
    (quantiles,) = _quantiles([stored], [jnp.arange(1, stored.size + 1, dtype=jnp.int32)], num_items)
    zeros = jnp.sum(items.live & (items.priorities == 0), dtype=jnp.float32)
    share_of_zeros = zeros / jnp.maximum(num_items, 1).astype(jnp.float32)
    found = zip((*TENTHS, "max", "zero"), (*quantiles, jnp.maximum(stored[0], 0.0), share_of_zeros), strict=True)
    return items.sums | {f"stored/priority_{name}": x for name, x in found}


def _never_updated(shards: _shards.Shards, state: Any, key: jax.Array, batch_size: int) -> jax.Array:
    def share(state: Any, key: jax.Array) -> jax.Array:
        live, of_slots = state.ring.live(), state.uses.of_slots
        slots = live.slots(random.random_integers(random.random_bits(key, batch_size), jnp.maximum(live.size, 1)))
        return jnp.mean(of_slots.at[slots].get(mode="promise_in_bounds") == 0, dtype=jnp.float32)

    found, sizes = jax.vmap(share)(state, jax.random.split(key, shards.num_shards)), _facts.sizes(state)
    return jnp.sum(found * sizes) / jnp.maximum(jnp.sum(sizes), 1.0)
