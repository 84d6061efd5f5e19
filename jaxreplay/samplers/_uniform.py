"""Uniform: every stored item is equally likely."""

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import struct

from jaxreplay import sum_tree
from jaxreplay._common import layouts, shards
from jaxreplay._common.checks import check_bool, keywords_only, settle
from jaxreplay._common.permutation import permuted
from jaxreplay._common.random import random_bits, random_integers
from jaxreplay._common.ring import Live
from jaxreplay.samplers import _update_counts, _uses
from jaxreplay.samplers._protocol import Sampler
from jaxreplay.samplers._update_counts import UpdateCounts
from jaxreplay.sum_tree._tree import on_backend

MOST_DISTINCT = 2**23  # counts up to this are exact in a float32 tree, with room for a half


def uniform_slots(bits: tuple[jax.Array, jax.Array], live: Live, capacity: int) -> jax.Array:
    """Uniform draws from the live slots, int32 [B], from `bits` (two uint32 [B])."""
    return live.slots(random_integers(bits, jnp.maximum(live.size, 1)), capacity)


def uniform_probability(size: jax.Array) -> jax.Array:
    """Uniform probability 1 / `size`, float32; 0 if `size` is 0."""
    return jnp.where(size > 0, 1.0 / jnp.maximum(size, 1).astype(jnp.float32), 0.0)


@struct.dataclass
class UniformState(layouts.LaidOut):
    """State of `Uniform`.

    Attributes:
      capacity: number of slots (static).
      counts: update counts; None without `count_updates` and `max_uses`.
      unspent: sum tree with leaf 1 for each slot that may be drawn; None without `max_uses`.

    Examples:
      >>> state = jr.Uniform().init(4)
      >>> isinstance(state, jr.samplers.UniformState), state.capacity
      (True, 4)
    """

    capacity: int = struct.field(pytree_node=False)
    counts: UpdateCounts | None = None
    unspent: sum_tree.SumTree | None = None
    _layouts: ClassVar = {"unspent": on_backend}


@keywords_only
@dataclasses.dataclass(frozen=True, kw_only=True)
class Uniform(Sampler[UniformState]):
    """Uniform sampling: every stored item is equally likely.

    All weights are 1. `update` changes nothing but the counts of `count_updates` and `max_uses`.

    In a sharded buffer, weights correct for unequal shards: (items in the shard / items in all shards) * (rows of the
    batch / rows of the shard that hold an item). The weighted distribution is uniform over the items of all shards.

    Attributes:
      replacement: draw with replacement. If False, the items of a batch are distinct. Rows beyond the number of items
        have handle -1, probability 0 and weight 0.
      count_updates: count in the state how often each item is updated, and how many updates come too late (reported
        by `jaxreplay.diagnostics`); costs 4 bytes per item.
      max_uses: an item that was updated so often is no longer drawn; None for no bound. Every row of `update` that
        names the item counts, so an item that was drawn twice in a batch comes back twice. The count starts at 0 when
        the slot is overwritten. `size` and `can_sample` count the items that may still be drawn, and `epoch` leaves a
        row without an item where one is spent. If all are spent, rows have handle -1 and weight 0, as from an empty
        buffer. Costs about 8 bytes per item; a draw costs O(batch_size log(capacity)). With `replacement=False` the
        capacity is at most 2**23.

    Examples:
      >>> buffer = jr.ReplayBuffer(capacity=4, sampler=jr.Uniform(replacement=False))
      >>> items = jnp.array([10, 20, 30, 40])
      >>> state = buffer.add(buffer.init(items), items)
      >>> sorted(buffer.sample(state, jax.random.key(0), batch_size=4).items.tolist())
      [10, 20, 30, 40]
    """

    replacement: bool = True
    count_updates: bool = False
    max_uses: int | None = None

    def __post_init__(self):
        settle(
            self,
            replacement=check_bool("replacement", self.replacement, "whether to draw with replacement"),
            count_updates=check_bool("count_updates", self.count_updates, "whether to count updates"),
            max_uses=_uses.check_max_uses(self.max_uses),
        )

    def __repr__(self) -> str:
        shown = [] if self.replacement else ["replacement=False"]
        shown += ["count_updates=True"] if self.count_updates else []
        shown += [] if self.max_uses is None else [f"max_uses={self.max_uses}"]
        return f"{type(self).__name__}({', '.join(shown)})"

    def init(self, capacity: int) -> UniformState:
        if self.max_uses is None:
            return UniformState(capacity, _update_counts.init(capacity) if self.count_updates else None)
        if not self.replacement and capacity > MOST_DISTINCT:
            raise ValueError(
                f"max_uses={self.max_uses}, replacement=False: {capacity} slots, at most {MOST_DISTINCT}; draw with "
                "replacement, or lower the capacity."
            )
        return UniformState(capacity, _update_counts.init(capacity), sum_tree.init(capacity))

    def insert(
        self,
        state: UniformState,
        slots: jax.Array,
        drawable: jax.Array,
        *,
        td_errors: jax.Array | None = None,
        axis_name: str | None = None,
    ) -> UniformState:
        unspent = _uses.insert(state.unspent, slots, drawable)
        return dataclasses.replace(state, counts=_update_counts.insert(state.counts, slots), unspent=unspent)

    def sample(self, state: UniformState, key: jax.Array, batch_size: int, live: Live) -> tuple[jax.Array, jax.Array]:
        size = _uses.number(state.unspent, live.size)
        probability = jnp.full(batch_size, uniform_probability(size))
        if self.replacement and state.unspent is not None:
            slots, leaves = sum_tree.sample_with(state.unspent, random_bits(key, batch_size))
            return slots, jnp.where(leaves > 0, probability, 0.0)
        if self.replacement:
            return uniform_slots(random_bits(key, batch_size), live, state.capacity), probability
        rows = jnp.arange(batch_size, dtype=jnp.int32)
        exists = rows < size
        rank = permuted(key, jnp.where(exists, rows, 0), size)
        if state.unspent is None:
            slots = live.slots(rank, state.capacity)
        else:
            slots = sum_tree.find(state.unspent, rank.astype(jnp.float32) + 0.5)
        return slots, jnp.where(exists, probability, 0.0)

    def restrict(self, state: UniformState, live: Live) -> UniformState:
        if state.unspent is None:
            return state
        return dataclasses.replace(state, unspent=sum_tree.restrict(state.unspent, live.start, live.size))

    def weights(
        self,
        state: UniformState,
        probabilities: jax.Array,
        size: jax.Array,
        *,
        beta: Any = None,
        axis_name: str | None = None,
    ) -> jax.Array:
        weight, size = jnp.ones((), jnp.float32), _uses.number(state.unspent, size)
        if axis_name is not None:
            # Items times rows / rows that hold an item. Without replacement no more rows than items hold one.
            share = shards.count(axis_name) * (size if self.replacement else jnp.maximum(size, probabilities.size))
            weight = share.astype(jnp.float32) / jnp.maximum(shards.total(size, axis_name), 1).astype(jnp.float32)
        return jnp.where(probabilities > 0, weight, 0.0)

    def priorities(self, state: UniformState, slots: jax.Array) -> jax.Array:
        return jnp.ones(slots.shape, jnp.float32) if state.unspent is None else sum_tree.get(state.unspent, slots)

    def update(
        self,
        state: UniformState,
        slots: jax.Array,
        td_errors: jax.Array,
        mask: jax.Array,
        *,
        axis_name: str | None = None,
    ) -> UniformState:
        if state.unspent is None:
            return dataclasses.replace(state, counts=_update_counts.update(state.counts, slots))
        counts: Any = state.counts
        unspent, counts, _ = _uses.update(state.unspent, counts, slots, mask, self.max_uses or 0)
        return dataclasses.replace(state, counts=counts, unspent=unspent)
