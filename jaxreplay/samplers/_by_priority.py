"""ByPriority: what all samplers with priorities share (the books), over an index that draws."""

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

from jaxreplay._common import checks, layouts, random, ring, xla
from jaxreplay.samplers._base import Moved, Sampler, of_all_slots, old_priorities
from jaxreplay.samplers._index import Index
from jaxreplay.samplers._weights import Normalize, uniform_slots, weights_of
from jaxreplay.sum_tree._tree import on_backend

SETTINGS = ("alpha", "epsilon", "floor")  # a state has its own


@struct.dataclass
class PrioritizedState(layouts.BackendState):
    """State of `Prioritized`, and of every `ByPriority`.

    Attributes:
      tree: the arrays of the index: a sum tree with leaf priority^alpha for each slot; 0 if the slot may not be drawn.
      max_priority: float32 [], largest priority so far, before alpha; at least 1.
      updates: int32 [], calls of `update` that named a stored item; saturates at 2**31 - 1.
      rejected: int32 [], rejected non-finite TD errors; saturates at 2**31 - 1.
      alpha, epsilon, floor: float32 [], at first the values of the configuration.

    Examples:
      >>> state = jr.Prioritized().init(4)
      >>> float(state.max_priority), int(state.updates)
      (1.0, 0)
    """

    tree: Any
    # Numbers in one array make a call from Python 4% quicker, and a step on a TPU 7% longer.
    max_priority: jax.Array  # []
    updates: jax.Array  # []
    rejected: jax.Array  # []
    alpha: jax.Array  # []
    epsilon: jax.Array  # []
    floor: jax.Array  # []
    _layouts: ClassVar = {"tree": on_backend}


State = PrioritizedState


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
    """The priority of a leaf: of one within its bounds, the inverse of `leaf_of`; with alpha 0 the leaf, which is 1."""
    return jnp.where(leaf > 0, leaf ** (1 / jnp.where(alpha > 0, alpha, 1.0)), 0.0)


def _of_all_shards(states: State, name: str) -> float:
    values = np.asarray(getattr(states, name))
    if values.min() != values.max():
        raise ValueError(f"state.sampler.{name}: got {values.tolist()} by shard; migrate takes one value for all.")
    return float(values.max())


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
class ByPriority(Sampler[State]):
    """Base of samplers with priorities: it keeps the books, and its `index` draws. A subclass has another index.

    The books are all that such samplers share: priorities of TD errors, the largest, rejected TD errors, settings of a
    sweep, updates, spent slots, shards, `clear`, `migrate` and weights. Its fields are those of `Prioritized`, whose
    index is a sum tree. The one below never draws slots with less than half of the largest leaf. See
    `jaxreplay.samplers.Index`.

    Examples:
      >>> import dataclasses
      >>> @dataclasses.dataclass(frozen=True)
      ... class Upper(jr.samplers.Index):
      ...     def masses(self, state):
      ...         leaves = super().masses(state)
      ...         return jnp.where(leaves >= jnp.max(leaves) / 2, leaves, 0.0)
      >>> class Best(jr.samplers.ByPriority):
      ...     index = Upper()
      >>> sampler, slots = Best(alpha=1.0, epsilon=0.0), np.array([0, 1, 2])
      >>> state = jax.jit(sampler.insert)(
      ...     sampler.init(4), slots, slots >= 0, td_errors=np.array([5.0, -9.0, 2.0])
      ... )
      >>> jax.jit(sampler.masses)(state).tolist()
      [5.0, 9.0, 0.0, 0.0]
    """

    alpha: float = _setting("alpha", "0.6", 0.6)
    beta: float | Callable[[jax.Array], Any] = checks.field(_check_beta, default=0.4)
    epsilon: float = _setting("epsilon", "1e-6", 1e-6)
    normalize: Normalize = checks.choice("batch", "global", None)
    stratified: bool = checks.field(checks.check_bool, "whether to draw from equal parts", default=True)
    floor: float = _setting("floor", "1 with a Huber loss, otherwise 0,", 0.0)
    max_priority: Literal["ever", "stored"] | float = checks.field(_check_max_priority, default="ever")

    index: ClassVar[Any] = Index()  # an `Index`
    fills_rows = property(lambda _: True)

    def init(self, capacity: int) -> State:
        numbers = {"max_priority": 1.0, **{name: getattr(self, name) for name in SETTINGS}}
        arrays = {name: xla.full((), x, jnp.float32) for name, x in numbers.items()}
        arrays |= {name: xla.full((), 0, jnp.int32) for name in ("updates", "rejected")}
        tracks = {"track_minimum": self.normalize == "global", "track_maximum": self.max_priority == "stored"}
        return PrioritizedState(tree=self.index.init(capacity, **tracks), **arrays)

    def insert(
        self, state: State, slots: jax.Array, drawable: jax.Array, *, td_errors: Any = None, axis_name: Any = None
    ) -> State:
        index, capacity = self.index, state.tree.capacity
        drawable = checks.check_mask(drawable, slots.shape, "drawable")
        known, found = jnp.zeros(slots.shape, bool), jnp.zeros(slots.shape, jnp.float32)
        if td_errors is not None:
            has_error = drawable & (slots >= 0) & (slots < capacity) & ~jnp.isnan(td_errors)
            state, found, known, _ = self._learn(state, td_errors, has_error, axis_name)
        new: Any = self.max_priority
        new = {"ever": state.max_priority, "stored": 1.0}.get(new, new)
        leaf = leaf_of(jnp.float32(new), state.alpha, capacity)
        if self.max_priority == "stored":
            largest = jnp.maximum(index.maximum(state), jnp.max(found, where=known, initial=0.0))
            largest = largest if axis_name is None else jax.lax.pmax(largest, axis_name)
            leaf = jnp.where(largest > 0, largest, leaf)
        leaves = jnp.where(drawable, jnp.where(known, found, leaf), 0.0)
        return self._inserted(state, slots, leaves, drawable)

    def _inserted(self, state: State, slots: jax.Array, leaves: jax.Array, is_item: jax.Array) -> State:
        state = dataclasses.replace(state, tree=self.index.advance(state, slots, is_item))
        return dataclasses.replace(state, tree=self.index.write(state, slots, leaves, is_new=True))

    def cleared(self, state: State, capacity: int) -> State:
        return dataclasses.replace(state, tree=self.index.emptied(state))

    def restrict(self, state: State, live: ring.Live) -> State:
        return dataclasses.replace(state, tree=self.index.restrict(state, live))

    def sample(self, state: State, key: jax.Array, batch_size: int, live: ring.Live) -> tuple[jax.Array, jax.Array]:
        bits = random.random_bits(key, batch_size)
        drawn, masses = self.index.draw(state, bits, stratified=self.stratified)
        has_mass, normalizer = self._normalizer(state, live.size)
        masses = jnp.where(has_mass, masses, jnp.where(live.size > 0, 1.0, 0.0))
        return jnp.where(has_mass, drawn, uniform_slots(bits, live)), masses / normalizer

    def _normalizer(self, state: State, size: jax.Array) -> tuple[jax.Array, jax.Array]:
        """A flag, True if any slot has a mass, and the normalizer: the total mass, else `size`.

        Both cases share one division. XLA:CPU runs a program on several threads if it begins with ten independent
        operations, and waking a thread takes longer than such a draw.
        """
        mass = self.index.total(state)
        return mass > 0, jnp.where(mass > 0, mass, jnp.maximum(size, 1).astype(jnp.float32))

    def weights(self, state: State, probabilities: jax.Array, live: ring.Live, *, beta: Any = None) -> jax.Array:
        if beta is None:
            beta = self.beta(state.updates) if callable(self.beta) else self.beta
        num_shards, axis_name, least = ring.num_shards(live.axis_name), live.axis_name, None
        if self.normalize == "global":
            has_mass, normalizer = self._normalizer(state, live.size)
            uniform = jnp.where(has_mass | (live.size == 0), jnp.inf, 1.0)  # the minimum of no priorities is inf too
            least = jnp.minimum(self.index.minimum(state), uniform) / normalizer / num_shards
        shares, size, normalize = probabilities / num_shards, live.total(), self.normalize
        return weights_of(shares, size, beta, normalize, least, axis_name)

    def update(
        self, state: State, slots: Any, td_errors: jax.Array, mask: Any, *, spent: Any = None, axis_name: Any = None
    ) -> State:
        mask = checks.check_mask(mask, slots.shape)
        state, leaves, accepted, is_update = self._learn(state, td_errors, mask, axis_name)
        if spent is not None:
            leaves, accepted = jnp.where(spent, 0.0, leaves), accepted | spent
        tree = self.index.write(state, slots, leaves, is_new=False, mask=accepted)
        updates = ring.saturating_add(state.updates, is_update.astype(jnp.int32))
        return dataclasses.replace(state, tree=tree, updates=updates)

    def priorities(self, state: State, slots: jax.Array) -> jax.Array:
        return priority_of(self.index.get(state, slots), state.alpha.astype(jnp.float32))

    def masses(self, state: State) -> jax.Array:
        return self.index.masses(state)

    def priorities_at(self, state: State, probabilities: jax.Array) -> jax.Array | None:
        if self.index.is_proportional:
            return priority_of(probabilities * self.index.total(state), state.alpha.astype(jnp.float32))
        return None

    def metrics(self, states: State) -> dict[str, jax.Array]:
        updates, largest = jnp.max(states.updates), jnp.max(states.max_priority)
        if self.max_priority == "stored":
            leaf = jnp.max(jax.vmap(self.index.maximum)(states))
            largest = jnp.where(leaf > 0, priority_of(leaf, jnp.max(states.alpha).astype(jnp.float32)), 1.0)
        invalid = [jnp.where(getattr(states, name) >= 0, 0.0, 1.0) for name in SETTINGS]
        return {
            "total_priority": jnp.sum(jax.vmap(self.index.total)(states)),
            "max_priority": largest,
            "beta": jnp.asarray(self.beta(updates) if callable(self.beta) else self.beta),
            "updates": updates,
            "rejected": jnp.sum(states.rejected.astype(jnp.float32) + sum(invalid)),
        }

    def migrated(self, old: Any, states: Any, moved: Moved) -> State:
        num_shards, capacity = moved.source.shape
        settings, counted, old_alpha = {name: getattr(self, name) for name in SETTINGS}, self.init(1), None
        if isinstance(old, ByPriority):
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
            leaves = np.minimum(moved.values(of_all_slots(old.index, "get", states, states.tree.capacity)), most)
        elif priorities is not None:
            leaves = leaf_of(priorities, alpha, capacity)
        leaves = np.where(moved.was_drawable, leaves, largest)  # a spent item has lost its priority
        leaves = np.where(moved.drawable, leaves, np.float32(0))
        numbers: dict[str, Any] = {name: np.float32(x) for name, x in settings.items()}
        numbers |= {"max_priority": max_priority, "updates": np.max(counted.updates)}
        empty = dataclasses.replace(self.init(capacity), **numbers)
        slots = np.where(moved.source >= 0, np.arange(capacity, dtype=np.int32), capacity)
        trees = [self._inserted(empty, *x).tree for x in zip(slots, leaves, moved.source >= 0, strict=True)]
        numbers = {name: np.full(num_shards, x) for name, x in numbers.items()}
        numbers |= {"rejected": moved.total(counted.rejected), "tree": jax.tree.map(lambda *x: np.stack(x), *trees)}
        return PrioritizedState(**numbers)

    def _learn(
        self, state: State, td_errors: jax.Array, mask: jax.Array, axis_name: str | None
    ) -> tuple[State, jax.Array, jax.Array, jax.Array]:
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
