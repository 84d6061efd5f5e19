"""diagnostics: numbers about a buffer for logging, also inside jit.

**Mass.** A sum tree does not give the probability mass of the most probable 1% of the items, but draws estimate it. One
of B draws, of item i, represents 1/B of the mass. It represents 1 / (B P(i)) items, the weight with which a sum over
draws estimates the sum over items (Horvitz and Thompson 1952). Cumulative sums over draws sorted by P trace the Lorenz
curve, and the estimate is the curve at 1% of the items. Its standard error is below 0.5 / sqrt(B): 3% of the mass with
256 draws. For equal probabilities it is exact. Between draws the curve is linear.

**Copies.** XLA:CPU orders reads and writes by data dependencies only. In a program that goes on with `update` or `add`,
the reads for a `key` may come before or after these writes, so XLA:CPU copies the tree. The copy takes half a
millisecond for 2^20 items, several times as long as a replay step. A `sample` from which the agent learns has already
been read, so nothing is copied. A GPU copies nothing in either case.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxreplay import sum_tree
from jaxreplay._common import ring
from jaxreplay._common.checks import check_bool, check_integer, check_key
from jaxreplay._common.meshes import over_any_mesh
from jaxreplay._common.random import random_bits, random_integers
from jaxreplay._common.xla import own, reads_state
from jaxreplay.buffers import ReservoirBuffer, Sample, SequenceBuffer
from jaxreplay.buffers._base import Buffer
from jaxreplay.buffers._shards import Shards, shards_of, whole_of
from jaxreplay.curricula import DifficultyPools, Levels, Tasks
from jaxreplay.inspection import _facts
from jaxreplay.samplers import Prioritized, effective_sample_size
from jaxreplay.wrappers import Mixture

TENTHS = {"q10": 1, "q50": 5, "q90": 9}  # quantiles

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
    """Numbers about a buffer and its draws for logging: float32 [] by name, all finite.

    Works under `jit`, `scan` and `vmap`. The names depend only on the types of the arguments. Undefined numbers, such
    as averages over an empty buffer, are 0. Without `key` and `sample` nothing is drawn:

    - `size`: number of items (sequences) that may be drawn. `fill`: filled share of the storage. `drawable`: share of
      the stored items (complete sequences) that may be drawn. `kept`: share of all items ever added to a
      `ReservoirBuffer` that is stored.
    - With `Prioritized`: `total_priority`, the sum of p^alpha; `max_priority`, the running maximum of p in the state;
      `beta`, its current value; `updates`, calls that named a stored item; `rejected`, rejected TD errors; `alpha`,
      `epsilon` and `floor` if they are in the state.
    - With `count_updates=True` or `max_uses`: `late`, update rows ignored because their item was no longer stored.
    - With `max_uses`: `spent`, how many of the `size` items were updated so often that they are no longer drawn.

    With a `key` or a `sample`, estimates from draws:

    - `top_1pct_mass`, `top_10pct_mass`: probability of the most probable 1% (10%) of the items, estimated with a
      standard error below 0.5 / sqrt(draws) (see the module docstring).
    - `draws/effective_sample_size`: `jaxreplay.effective_sample_size` of the batch.
    - `draws/age_q10`, `_q50`, `_q90`: quantiles of `Sample.age`; absent for a `ReservoirBuffer`.
    - With `Prioritized`: `draws/priority_q10`, `_q50`, `_q90`: quantiles of the priority p of the draws.
    - With `count_updates=True` or `max_uses`, and a `key`: `never_updated`, share of the items not updated since their
      insertion, estimated from uniform draws.

    With `thorough`, from all items:

    - With `Prioritized`: exact `top_1pct_mass` and `top_10pct_mass`; `stored/priority_q10`, `_q50`, `_q90` and
      `stored/priority_max` of the stored items; `stored/priority_zero`, the share of items with priority 0, which are
      not drawn.
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
      >>> buffer = jr.ReplayBuffer(capacity=4)
      >>> items = jnp.array([10, 20, 30])
      >>> numbers = jr.diagnostics(buffer, buffer.add(buffer.init(items), items))
      >>> float(numbers["size"]), float(numbers["fill"])
      (3.0, 0.75)
    """
    batch_size = check_integer("batch_size", batch_size, 1, ring.MAX_CAPACITY, "the number of draws")
    thorough = check_bool("thorough", thorough, "whether to look at all items, in O(N log N)")
    if key is not None and sample is not None:
        raise ValueError("key and sample: got both; give a key or a sample.")
    if key is not None:
        check_key(key)
    if sample is not None and not isinstance(sample, Sample):
        raise ValueError(f"sample: got a {type(sample).__name__}, expected the result of the buffer's sample.")
    if not isinstance(whole_of(buffer), Buffer | Mixture | DifficultyPools | Tasks | Levels):
        raise ValueError(f"buffer={buffer!r}: must be a buffer of jaxreplay, DifficultyPools, Tasks or Levels.")
    if sample is not None:  # without its items, which are not needed
        sample = own(_facts.without_items(sample))
    return _program(buffer, state, key, sample, batch_size, thorough)


@functools.partial(jax.jit, static_argnums=(0, 4, 5))
def _program(buffer: Any, *arguments: Any) -> Numbers:
    return over_any_mesh(functools.partial(_numbers, buffer))(*arguments)


def _numbers(
    buffer: Any, state: Any, key: jax.Array | None, sample: Sample | None, batch_size: int, thorough: bool
) -> Numbers:
    buffer._check_state(state)
    if isinstance(buffer, DifficultyPools | Tasks | Levels):
        found = {**buffer.metrics(state), "rejected": state.rejected}
    else:
        keys: Any = (None, None) if key is None else jax.random.split(key)
        if key is not None:
            sample = _facts.draw(buffer, state, keys[0], batch_size)
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
        found |= _all_items(sampler, state.sampler, items)
    counts = getattr(state.sampler, "counts", None) if hasattr(sampler, "count_updates") else None
    unspent = getattr(state.sampler, "unspent", None) if hasattr(sampler, "max_uses") else None
    if unspent is not None:
        found["spent"] = found["size"] - jnp.sum(jax.vmap(sum_tree.total)(unspent))
    if counts is not None:
        found["late"] = jnp.sum(counts.late.astype(jnp.float32))
        if items is not None:
            live, size = items.live, jnp.maximum(found["size"], 1.0)
            found["never_updated"] = jnp.sum(live & (counts.of_slots == 0), dtype=jnp.float32) / size
            found["updates_per_item"] = jnp.sum(jnp.where(live, counts.of_slots, 0).astype(jnp.float32)) / size
        elif key is not None:
            found["never_updated"] = _never_updated(shards, state, key, -(-batch_size // shards.num_shards))
    return found


def _fill(shards: Shards, state: Any) -> Numbers:
    buffer, size = shards.whole, jnp.sum(_facts.sizes(state))
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
        **{name: jnp.max(getattr(state, name)) for name in sampler.open_settings},
    }


def _draws(shards: Shards, state: Any, sample: Sample) -> Numbers:
    """Estimates from the rows of a batch; the rows are grouped by shard."""
    sampler, draws = shards.whole.sampler, _facts.of_draws(shards, state, sample)
    found = dict(
        zip(_facts.TOPS, _interpolated(np.array([*_facts.TOPS.values()], np.float32), *draws.curve), strict=True)
    )
    found["draws/effective_sample_size"] = effective_sample_size(sample.weights)
    if draws.leaves is not None:
        leaves = zip(TENTHS, _quantiles(draws.leaves, draws.num_rows), strict=True)
        found |= {f"draws/priority_{name}": _facts.priority(sampler, state.sampler, leaf) for name, leaf in leaves}
    if draws.ages is not None:
        ages = zip(TENTHS, _quantiles(draws.ages, draws.num_rows), strict=True)
        found |= {f"draws/age_{name}": age for name, age in ages}
    return found


def _interpolated(at: np.ndarray, x: jax.Array, y: jax.Array) -> jax.Array:
    """`jnp.interp` within [0, 1], whose search is a loop of many kernels on a GPU."""
    k = jnp.clip(jnp.searchsorted(x, at, side="right", method="compare_all"), 1, x.size - 1)
    width = x[k] - x[k - 1]
    share = jnp.where(width > 0, (at - x[k - 1]) / jnp.where(width > 0, width, 1.0), 0.0)
    return jnp.clip(y[k - 1] + jnp.minimum(share, 1.0) * (y[k] - y[k - 1]), 0.0, 1.0)


def _quantiles(ascending: jax.Array, count: jax.Array) -> jax.Array:
    """Quantiles [3] of the last `count` numbers, which occur among them; 0 of none."""
    tenths, ten = np.array([*TENTHS.values()], np.int32), np.int32(10)
    below = lax.div(count, ten) * tenths + lax.div(lax.rem(count, ten) * tenths + 9, np.full(3, 10, np.int32)) - 1
    place = jnp.maximum(ascending.size - count + below, 0)  # no product overflows
    return jnp.where(count > 0, ascending[place], 0)


def _all_items(sampler: Prioritized, state: Any, items: _facts.Items) -> Numbers:
    found, live = dict(items.top_masses), items.live
    stored = jnp.sort(jnp.where(live, items.leaves, -1.0), axis=None)
    num_items = jnp.sum(live, dtype=jnp.int32)
    of_all = (*_quantiles(stored, num_items), jnp.maximum(stored[-1], 0.0))
    for name, leaf in zip((*TENTHS, "max"), of_all, strict=True):
        found[f"stored/priority_{name}"] = _facts.priority(sampler, state, leaf)
    zeros = jnp.sum(live & (items.leaves == 0), dtype=jnp.float32)
    found["stored/priority_zero"] = zeros / jnp.maximum(num_items, 1).astype(jnp.float32)
    return found


def _never_updated(shards: Shards, state: Any, key: jax.Array, batch_size: int) -> jax.Array:
    def share(state: Any, key: jax.Array) -> jax.Array:
        live, of_slots = shards.part._live(state), state.sampler.counts.of_slots
        position = random_integers(random_bits(key, batch_size), jnp.maximum(live.size, 1))
        slots = live.slots(position, shards.part._num_slots)
        return jnp.mean(of_slots.at[slots].get(mode="promise_in_bounds") == 0, dtype=jnp.float32)

    found, sizes = jax.vmap(share)(state, jax.random.split(key, shards.num_shards)), _facts.sizes(state)
    return jnp.sum(found * sizes) / jnp.maximum(jnp.sum(sizes), 1.0)
