"""Prioritized: proportional prioritization, P(i) proportional to priority^alpha."""

import contextlib
import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, ClassVar, Literal

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from jaxreplay import sum_tree
from jaxreplay._common import checks, layouts, random, ring, xla
from jaxreplay.samplers._base import Moved, Sampler, old_priorities
from jaxreplay.samplers._weights import Normalize, uniform_slots, weights_of
from jaxreplay.sum_tree._tree import Stratified, emptied, of_rows, on_backend

SETTINGS = ("alpha", "epsilon", "floor")  # a state has its own


@struct.dataclass
class PrioritizedState(layouts.BackendState):
    """State of `Prioritized`.

    Attributes:
      tree: sum tree with leaf priority^alpha for each slot; 0 if the slot may not be drawn.
      max_priority: float32 [], largest priority so far, before alpha; at least 1.
      updates: int32 [], calls of `update` that named a stored item; saturates at 2**31 - 1.
      rejected: int32 [], rejected non-finite TD errors; saturates at 2**31 - 1.
      alpha, epsilon, floor: float32 [], at first the values of the configuration.

    Examples:
      >>> state = jr.Prioritized().init(4)
      >>> float(state.max_priority), int(state.updates)
      (1.0, 0)
    """

    tree: sum_tree.SumTree
    max_priority: jax.Array  # []
    updates: jax.Array  # []
    rejected: jax.Array  # []
    alpha: jax.Array  # []
    epsilon: jax.Array  # []
    floor: jax.Array  # []
    _layouts: ClassVar = {"tree": on_backend}


@functools.partial(jax.jit, static_argnums=2, inline=True)
def leaf_of(priority: jax.Array, alpha: jax.Array, capacity: int) -> jax.Array:
    """The leaf of a priority in a tree of this capacity."""
    # Within these bounds no sum overflows, and no sum, reciprocal or probability is subnormal (XLA flushes
    # subnormals to 0).
    least, most = 2.0**-63, 2.0 ** (63 - (capacity - 1).bit_length())
    leaf = priority**alpha
    leaf = jnp.minimum(jnp.where(leaf > least, leaf, least), most)  # `least` if alpha is NaN
    return jnp.where((priority > 0) | (alpha == 0), leaf, 0.0)


def priority_of(leaf: jax.Array, alpha: jax.Array) -> jax.Array:
    """The priority of a leaf: of one within its bounds, the inverse of `leaf_of`; 1 with alpha 0."""
    exponent = jnp.where(alpha > 0, 1 / jnp.where(alpha > 0, alpha, 1.0), 0.0)
    return jnp.where(leaf > 0, leaf**exponent, 0.0)


def _of_all_shards(states: PrioritizedState, name: str) -> float:
    values = np.asarray(getattr(states, name))
    if values.min() != values.max():
        raise ValueError(f"state.sampler.{name}: got {values.tolist()} by shard; migrate takes one value for all.")
    return float(values.max())


def _normalizer(state: PrioritizedState, size: jax.Array) -> tuple[jax.Array, jax.Array]:
    """A flag, True if any slot has a positive priority, and the normalizer: the total priority, else `size`.

    Both cases share one division. XLA:CPU runs a program on several threads if it begins with ten independent
    operations, and waking a thread takes longer than such a draw.
    """
    mass = sum_tree.total(state.tree)
    return mass > 0, jnp.where(mass > 0, mass, jnp.maximum(size, 1).astype(jnp.float32))


def _setting(name: str, usual: str, default: float) -> Any:
    traced = f"state.replace(sampler=state.sampler.replace({name}=...)) takes a traced one before the first add"
    return checks.field(checks.check_number, 0, math.inf, f"{usual} is usual", traced, default=default)


def _check_beta(name: str, beta: Any) -> Any:
    if not callable(beta):
        traced = "sample(beta=) takes a traced one"
        return checks.check_number(name, beta, 0, 1, "or a schedule of the number of updates", traced)
    with contextlib.suppress(TypeError, ValueError):
        if jax.eval_shape(lambda count: jnp.float32(beta(count)), jax.ShapeDtypeStruct((), jnp.int32)).shape == ():
            return beta
    raise ValueError(f"{name}={checks.brief(beta)}: must return one number for a number of updates, an int32 [].")


def _check_max_priority(name: str, value: Any) -> Any:
    if isinstance(value, str):
        return checks.check_choice(name, value, "ever", "stored")
    return checks.check_number(name, value, 0, math.inf, '"ever" is usual')


@checks.config
class Prioritized(Sampler[PrioritizedState]):
    """Proportional prioritization, after Schaul et al. 2016 (Prioritized Experience Replay, sections 3.3 and 3.4).

    An item is drawn with probability P(i) = p_i^alpha / sum_j p_j^alpha (in float32, see `jaxreplay.sum_tree.sample`),
    where p = max(|td_error|, floor) + epsilon is its priority. A new item gets the priority of its initial TD error, or
    `max_priority` if that is unknown. The weight of a draw is (N P(i))^-beta.

    LAP (Fujimoto et al. 2020, An Equivalence between Loss Functions and Non-Uniform Sampling in Experience Replay,
    section 4.1) is `Prioritized(alpha=0.4, beta=0.0, epsilon=0.0, floor=1.0, max_priority="stored")` with a Huber loss.

    `sample` can override beta. `alpha`, `epsilon` and `floor` are the first values of arrays of the state, which
    `state.sampler.replace(alpha=alpha)` changes before the first `add`. So each lane of `jax.vmap` may have its own.

    A non-finite TD error only increments the state's counter `rejected`. Positive p^alpha are clipped to
    [2^-63, 2^63 / capacity], so that no sum overflows. If every p is 0, sampling is uniform and all weights are 1. A p
    counts as 0 if it is negative or NaN, and p^alpha as the least if alpha is NaN, as a replaced setting may be;
    `jaxreplay.diagnostics` tells.

    Attributes:
      alpha: exponent of the priorities, at least 0; 0 draws uniformly.
      beta: exponent of the weights in [0, 1], or an `optax.Schedule` of the number of `update` calls so far, an
        int32 [], such as `optax.linear_schedule(0.4, 1.0, 200_000)`; its result is clipped. A call that names no stored
        item, as in a step without a draw, does not count.
      epsilon: added to |td_error|, at least 0.
      floor: lower bound of |td_error|, at least 0.
      max_priority: priority of new items, before alpha. "ever" is the running maximum, which starts at 1 and never
        falls. "stored" is the maximum over stored items (1 if there are none) and costs a tree of maxima. A number is
        used as it is.
      normalize: divide the weights by the largest of the "batch", by the largest of any stored item ("global"), or not
        at all (None).
      stratified: draw once from each of batch_size equal parts of the total priority, instead of independently. The
        rows of the batch are then in slot order: permute them (`jax.random.permutation`) before a split into
        minibatches, or each minibatch comes from one part of the buffer. "systematic" draws at the same random place in
        each part, in all shards of a buffer. An item then occurs batch_size * P(i) times, rounded down or up. So none
        occurs twice if batch_size * P(i) <= 1 for all, up to rounding in float32.

    Examples:
      >>> buffer = jr.ReplayBuffer(capacity=4, sampler=jr.Prioritized(epsilon=0.0))
      >>> items = np.array([10, 20, 30, 40])
      >>> td_errors = np.array([0.0, 0.0, -2.0, 0.0])
      >>> state = buffer.add(buffer.init(items), items, td_errors=td_errors)
      >>> buffer.sample(state, jax.random.key(0), batch_size=4).items.tolist()
      [30, 30, 30, 30]
    """

    alpha: float = _setting("alpha", "0.6", 0.6)
    beta: float | Callable[[jax.Array], Any] = checks.field(_check_beta, default=0.4)
    epsilon: float = _setting("epsilon", "1e-6", 1e-6)
    normalize: Normalize = checks.field(checks.check_choice, "batch", "global", None, default="batch")
    stratified: Stratified = checks.field(checks.check_choice, True, False, "systematic", default=True)
    floor: float = _setting("floor", "1 with a Huber loss, otherwise 0,", 0.0)
    max_priority: Literal["ever", "stored"] | float = checks.field(_check_max_priority, default="ever")

    shares_key = property(lambda self: self.stratified == "systematic")  # which has one offset
    fills_rows = property(lambda _: True)

    def tree(self, capacity: int) -> sum_tree.SumTree:
        """An empty sum tree for `capacity` slots.

        Examples:
          >>> tree = jr.Prioritized().tree(4)
          >>> tree.capacity, float(jr.sum_tree.total(tree))
          (4, 0.0)
        """
        minimum, maximum = self.normalize == "global", self.max_priority == "stored"
        return sum_tree.init(capacity, track_minimum=minimum, track_maximum=maximum)

    def init(self, capacity: int) -> PrioritizedState:
        numbers = {"max_priority": 1.0, **{name: getattr(self, name) for name in SETTINGS}}
        arrays = {name: xla.full((), x, jnp.float32) for name, x in numbers.items()}
        arrays |= {name: xla.full((), 0, jnp.int32) for name in ("updates", "rejected")}
        return PrioritizedState(tree=self.tree(capacity), **arrays)

    def insert(
        self,
        state: PrioritizedState,
        slots: jax.Array,
        drawable: jax.Array,
        *,
        td_errors: jax.Array | None = None,
        axis_name: str | None = None,
    ) -> PrioritizedState:
        capacity = state.tree.capacity
        drawable = checks.check_mask(drawable, slots.shape, "drawable")
        known, found = jnp.zeros(slots.shape, bool), jnp.zeros(slots.shape, jnp.float32)
        if td_errors is not None:
            has_error = drawable & (slots >= 0) & (slots < capacity) & ~jnp.isnan(td_errors)
            state, found, known, _ = self._learn(state, td_errors, has_error, axis_name)
        new: Any = self.max_priority
        new = {"ever": state.max_priority, "stored": 1.0}.get(new, new)
        leaf = leaf_of(jnp.float32(new), state.alpha, capacity)
        if self.max_priority == "stored":
            largest = jnp.maximum(sum_tree.maximum(state.tree), jnp.max(found, where=known, initial=0.0))
            largest = ring.reduced(jax.lax.pmax, largest, axis_name)
            leaf = jnp.where(largest > 0, largest, leaf)
        leaves = jnp.where(drawable, jnp.where(known, found, leaf), 0.0)
        return dataclasses.replace(state, tree=sum_tree.update(state.tree, slots, leaves, unique_indices=True))

    def cleared(self, state: PrioritizedState, capacity: int) -> PrioritizedState:
        return dataclasses.replace(state, tree=emptied(state.tree))

    def restrict(self, state: PrioritizedState, live: ring.Live) -> PrioritizedState:
        tree: Any = sum_tree.restrict(state.tree, live.start, live.size)
        return dataclasses.replace(state, tree=tree)

    def sample(
        self, state: PrioritizedState, key: jax.Array, batch_size: int, live: ring.Live
    ) -> tuple[jax.Array, jax.Array]:
        bits = random.random_bits(key, batch_size)
        drawn, leaves = sum_tree.sample_with(state.tree, bits, stratified=self.stratified)
        has_mass, normalizer = _normalizer(state, live.size)
        leaves = jnp.where(has_mass, leaves, jnp.where(live.size > 0, 1.0, 0.0))
        return jnp.where(has_mass, drawn, uniform_slots(bits, live)), leaves / normalizer

    def weights(
        self, state: PrioritizedState, probabilities: jax.Array, live: ring.Live, *, beta: Any = None
    ) -> jax.Array:
        if beta is None:
            beta = self.beta(state.updates) if callable(self.beta) else self.beta
        num_shards, axis_name, least = ring.num_shards(live.axis_name), live.axis_name, None
        if self.normalize == "global":
            has_mass, normalizer = _normalizer(state, live.size)
            uniform = jnp.where(has_mass | (live.size == 0), jnp.inf, 1.0)  # the minimum of no priorities is inf too
            least = jnp.minimum(sum_tree.minimum(state.tree), uniform) / normalizer / num_shards
        shares, size, normalize = probabilities / num_shards, live.total(), self.normalize
        return weights_of(shares, size, beta, normalize, least, axis_name)

    def update(
        self,
        state: PrioritizedState,
        slots: jax.Array,
        td_errors: jax.Array,
        mask: jax.Array,
        *,
        spent: jax.Array | None = None,
        axis_name: str | None = None,
    ) -> PrioritizedState:
        mask = checks.check_mask(mask, slots.shape)
        state, leaves, accepted, is_update = self._learn(state, td_errors, mask, axis_name)
        if spent is not None:
            leaves, accepted = jnp.where(spent, 0.0, leaves), accepted | spent
        tree = sum_tree.update(state.tree, slots, leaves, mask=accepted)
        updates = ring.saturating_add(state.updates, is_update.astype(jnp.int32))
        return dataclasses.replace(state, tree=tree, updates=updates)

    def priorities(self, state: PrioritizedState, slots: jax.Array) -> jax.Array:
        return priority_of(sum_tree.get(state.tree, slots), state.alpha.astype(jnp.float32))

    def masses(self, state: PrioritizedState) -> jax.Array:
        return sum_tree.leaves(state.tree)

    def priorities_at(self, state: PrioritizedState, probabilities: jax.Array) -> jax.Array:
        return priority_of(probabilities * sum_tree.total(state.tree), state.alpha.astype(jnp.float32))

    def metrics(self, states: PrioritizedState) -> dict[str, jax.Array]:
        updates, largest = jnp.max(states.updates), jnp.max(states.max_priority)
        if self.max_priority == "stored":
            leaf = jnp.max(jax.vmap(sum_tree.maximum)(states.tree))
            largest = jnp.where(leaf > 0, priority_of(leaf, jnp.max(states.alpha).astype(jnp.float32)), 1.0)
        invalid = [jnp.where(getattr(states, name) >= 0, 0.0, 1.0) for name in SETTINGS]
        return {
            "total_priority": jnp.sum(jax.vmap(sum_tree.total)(states.tree)),
            "max_priority": largest,
            "beta": jnp.asarray(self.beta(updates) if callable(self.beta) else self.beta),
            "updates": updates,
            "rejected": jnp.sum(states.rejected.astype(jnp.float32) + sum(invalid)),
        }

    def migrated(self, old: Sampler[Any], states: Any, moved: Moved) -> PrioritizedState:
        num_shards, capacity = moved.source.shape
        settings, counted, old_alpha = {name: getattr(self, name) for name in SETTINGS}, self.init(1), None
        if isinstance(old, Prioritized):
            before, counted = {name: _of_all_shards(states, name) for name in SETTINGS}, states
            settings = {name: before[name] if x == getattr(old, name) else x for name, x in settings.items()}
            old_alpha = before["alpha"]
        max_priority, alpha = np.max(np.asarray(counted.max_priority)), np.float32(settings["alpha"])
        has_same_alpha = old_alpha is not None and np.float32(old_alpha) == alpha
        priorities = None if old_alpha == 0 or has_same_alpha else old_priorities(old, states, moved)
        if priorities is not None and old_alpha is None:
            max_priority = np.maximum(max_priority, np.max(priorities))
        leaves = largest = leaf_of(max_priority, alpha, capacity)
        if has_same_alpha and old_alpha != 0:  # bit for bit
            most = leaf_of(np.float32(np.inf), np.float32(1), capacity)
            leaves = np.minimum(moved.values(sum_tree.leaves(states.tree)), most)
        elif priorities is not None:
            leaves = leaf_of(priorities, alpha, capacity)
        leaves = np.where(moved.was_drawable, leaves, largest)  # a spent item has lost its priority
        numbers: dict[str, Any] = {name: np.float32(x) for name, x in settings.items()}
        numbers |= {"max_priority": max_priority, "updates": np.max(counted.updates)}
        numbers = {name: np.full(num_shards, x) for name, x in numbers.items()}
        numbers["rejected"] = moved.total(counted.rejected)
        tree = of_rows(self.tree(capacity), np.where(moved.drawable, leaves, np.float32(0)))
        return PrioritizedState(tree=tree, **numbers)

    def _learn(
        self, state: PrioritizedState, td_errors: jax.Array, mask: jax.Array, axis_name: str | None
    ) -> tuple[PrioritizedState, jax.Array, jax.Array, jax.Array]:
        """Apply the TD errors of the rows in `mask` to all of the state but the tree.

        Returns:
          the state with new `max_priority` and `rejected`; leaves, float32 [B]; a mask of accepted rows, bool [B]; and
          True if `mask` has a True row in any shard, bool [].
        """
        td_errors = jnp.abs(td_errors.astype(jnp.float32))
        finite = jnp.isfinite(td_errors)
        accepted = mask & finite
        priorities = jnp.maximum(td_errors, state.floor.astype(jnp.float32)) + state.epsilon.astype(jnp.float32)
        # The maximum is -1 if no row is in `mask`, which saves a second reduction over rows and shards.
        largest = jnp.max(jnp.where(mask, jnp.where(finite, priorities, 0.0), -1.0), initial=-1.0)

        def not_below_first(largest: jax.Array, mask: jax.Array) -> jax.Array:  # unchanged: not negative if mask[0]
            return jnp.maximum(largest, jnp.max(mask[:1].astype(jnp.float32) - 1, initial=-1.0))

        # A GPU merges kernels of single numbers if they read the same array.
        alone = axis_name is None
        largest = xla.on_gpu(not_below_first, largest, mask) if alone else jax.lax.pmax(largest, axis_name)
        is_update = largest >= 0
        # Without an update none is rejected.
        rejected = jnp.where(is_update, jnp.sum(mask & ~finite, dtype=jnp.int32), 0)
        largest = jnp.where(largest > state.max_priority, largest, state.max_priority)  # not NaN
        state = dataclasses.replace(state, max_priority=largest, rejected=ring.saturating_add(state.rejected, rejected))
        # Computed once: a CPU rounds the power differently in each operation that it is fused into.
        leaves, accepted = xla.materialize(leaf_of(priorities, state.alpha, state.tree.capacity), accepted)
        return state, leaves, accepted, is_update
