"""Sampler: the base of all samplers, and the interface between a buffer and its sampler.

A sampler sees slots, probabilities and TD errors, but no items. A row whose slot is outside [0, capacity) is ignored.
A buffer may be split into D shards. Each shard then has its own sampler state and draws 1/D of the batch. `insert` and
`update` also get the name of a mapped axis over the shards, and `Live` has it.
"""

import abc
import dataclasses
import functools
from typing import Any, ClassVar, Generic, NamedTuple, Self, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from jaxreplay._common import ring, shown

S = TypeVar("S")


class Moved(NamedTuple):
    """Slots of all new shards that `jaxreplay.migrate` fills.

    Attributes:
      source: int32 [D, capacity], the slot among those of all old shards, one shard after another; -1 if empty.
      drawable: bool [D, capacity], True if the new slot may be drawn.
      was_drawable: bool [D, capacity], True if its item could be drawn: it was not spent (`max_uses`).

    Examples:
      >>> # Two old shards of 3 slots become one of 4, which has one slot to spare.
      >>> source = np.array([[1, 2, 5, -1]])
      >>> moved = jr.samplers.Moved(source, source >= 0, source >= 0)
      >>> moved.values(np.array([[10, 11, 12], [13, 14, 15]])).tolist()[0][:3]
      [11, 12, 15]
    """

    source: np.ndarray
    drawable: np.ndarray
    was_drawable: np.ndarray

    def values(self, of_slots: Any) -> np.ndarray:
        """Values of the new slots, [D, capacity], from those of the old slots, [old D, old capacity].

        The values of empty slots are arbitrary.

        Examples:
          >>> source = np.array([[1], [2]])  # one old shard, two new ones
          >>> moved = jr.samplers.Moved(source, source >= 0, source >= 0)
          >>> moved.values(np.array([[10, 11, 12]])).tolist()
          [[11], [12]]
        """
        return np.asarray(of_slots).reshape(-1)[self.source]

    def total(self, counts: Any) -> np.ndarray:
        """The sum of the old shards' counts as the count of the first new shard, int32 [D]; saturates at 2**31 - 1.

        Examples:
          >>> source = np.array([[0], [1], [2]])
          >>> moved = jr.samplers.Moved(source, source >= 0, source >= 0)
          >>> moved.total(np.array([5, 7])).tolist()
          [12, 0, 0]
        """
        total = min(int(np.asarray(counts).sum(dtype=np.int64)), 2**31 - 1)
        return np.where(np.arange(len(self.source)) == 0, total, 0).astype(np.int32)


class Sampler(Generic[S], metaclass=shown.Kind):
    """Base of a sampler: implement `sample` and `weights`, and `init` if it has a state.

    The other methods have right defaults for a sampler without priorities. One with priorities is better a
    `jaxreplay.samplers.ByPriority`, which implements them.

    A sampler is a frozen dataclass. Its state `S` is None, or a frozen dataclass too, registered as a pytree. The
    sampler below draws only the newest slots. It suits a `SequenceBuffer`, whose live slots are in order of age; see
    `jaxreplay.samplers.Live`.

    Attributes:
      by_rank: True if an update of one slot changes the ratios of other slots' probabilities.
      takes_spent: False if a draw cannot leave out spent slots. A buffer with `max_uses` rejects such a sampler.
      normalize: "batch" or "global" if the weights are divided by the largest of the batch or of all items, None if
        not. "any" if the sampler has no such setting; its weights are not divided, and suit any other sampler's.

    Examples:
      >>> import dataclasses
      >>> @dataclasses.dataclass(frozen=True)
      ... class Newest(jr.Uniform):
      ...     most: int = 1000
      ...
      ...     def sample(self, state, key, batch_size, live):
      ...         size = jnp.minimum(live.size, self.most)
      ...         start = (live.start + live.size - size) % live.capacity
      ...         return super().sample(
      ...             state, key, batch_size, live.replace(start=start, size=size)
      ...         )
      >>> buffer = jr.SequenceBuffer(
      ...     length=4, num_envs=1, sequence_length=2, sampler=Newest(most=1)
      ... )
      >>> steps = np.array([[1], [2], [3]])
      >>> state = buffer.add(buffer.init(steps), steps)
      >>> buffer.sample(state, jax.random.key(0), batch_size=2).items.tolist()
      [[2, 3], [2, 3]]
    """

    takes_spent: ClassVar[bool] = True
    by_rank: ClassVar[bool] = False
    normalize: Any = "any"

    def __init_subclass__(cls, **named: Any):
        """Leave out what a class that overrides a method, and so may draw otherwise, must not inherit."""
        super().__init_subclass__(**named)
        overrides = any(name[0] != "_" and callable(getattr(Sampler, name, None)) for name in vars(cls))
        for name in {"fills_rows", "migrated"} - vars(cls).keys() if overrides else ():
            setattr(cls, name, getattr(Sampler, name))

    fills_rows = property(
        lambda _: False,
        doc="True if every row of a draw holds an item, unless there is none. A subclass does not inherit it.",
    )
    by_age = property(lambda _: False, doc="True if draws depend on ages. A `ReservoirBuffer` rejects such a sampler.")
    is_distinct = property(lambda _: False, doc="True if each item is drawn once, at most as many rows as slots.")

    def unnormalized(self) -> Self:
        """The same sampler, for the same states, with weights that are not divided by the largest.

        Examples:
          >>> jr.Prioritized().unnormalized()
          Prioritized(normalize=None)
        """
        kept: Any = self
        return self if self.normalize in ("any", None) else dataclasses.replace(kept, normalize=None)

    def _with_ages(self, streams: int, step: float) -> Self:
        """The same sampler for a buffer in which `streams` consecutive slots have one age, `step` above the next's."""
        kept: Any = self
        return dataclasses.replace(kept, _ages=(streams, step)) if self.by_age and hasattr(self, "_ages") else self

    def init(self, capacity: int) -> S:
        """Initial state, all slots empty; None unless a sampler has one.

        Args:
          capacity: number of slots.

        Examples:
          >>> jr.sum_tree.leaves(jr.Prioritized().init(4).tree).tolist()
          [0.0, 0.0, 0.0, 0.0]
        """
        return None  # pyright: ignore[reportReturnType]

    def insert(
        self,
        state: S,
        slots: jax.Array,
        drawable: jax.Array,
        *,
        td_errors: jax.Array | None = None,
        axis_name: str | None = None,
    ) -> S:
        """State after writes to slots.

        Args:
          state: the sampler's state.
          slots: int32 [B], distinct where in range.
          drawable: bool [B], True if the new item may be drawn.
          td_errors: float [B], initial TD errors; NaN or None means unknown.
          axis_name: mapped axis over the shards of the buffer; None without shards.

        Examples:
          >>> sampler = jr.Prioritized(epsilon=0.0)
          >>> state = jax.jit(sampler.insert)(
          ...     sampler.init(4), np.array([0, 1]), np.array([True, False])
          ... )
          >>> # A new item has the largest priority so far, at first 1.
          >>> jr.sum_tree.leaves(state.tree).tolist()
          [1.0, 0.0, 0.0, 0.0]
        """
        return state

    def cleared(self, state: S, capacity: int) -> S:
        """State after all slots were emptied; `init(capacity)` unless a sampler keeps counters or settings.

        Examples:
          >>> sampler = jr.Prioritized(epsilon=0.0)
          >>> first, true, td_errors = np.array([0]), np.array([True]), np.array([9.0])
          >>> insert = jax.jit(sampler.insert)
          >>> state = insert(sampler.init(4), first, true, td_errors=td_errors)
          >>> state = sampler.cleared(state, 4)
          >>> jr.sum_tree.leaves(state.tree).tolist(), float(state.max_priority)
          ([0.0, 0.0, 0.0, 0.0], 9.0)
        """
        return self.init(capacity)

    @abc.abstractmethod
    def sample(self, state: S, key: jax.Array, batch_size: int, live: ring.Live) -> tuple[jax.Array, jax.Array]:
        """Draw slots.

        Args:
          state: the sampler's state.
          key: a PRNG key.
          batch_size: number of draws.
          live: the slots that may be drawn.

        Returns:
          slots, int32 [batch_size], and their probabilities, float32 [batch_size]. Probability 0 marks a row without
          a draw.

        Examples:
          >>> live = jr.samplers.Live(
          ...     start=jnp.int32(3), size=jnp.int32(2), capacity=4
          ... )  # slots 3 and 0
          >>> sampler = jr.Uniform()
          >>> draw = jax.jit(sampler.sample, static_argnums=2)
          >>> slots, probabilities = draw(sampler.init(4), jax.random.key(0), 2, live)
          >>> set(slots.tolist()) <= {0, 3}, probabilities.tolist()
          (True, [0.5, 0.5])
        """

    def restrict(self, state: S, live: ring.Live) -> S:
        """State restricted to `live`, a subset of the filled slots, for `sample` and `weights`.

        Args:
          state: the sampler's state.
          live: the slots that may be drawn; pass the same to `sample`.

        Examples:
          >>> sampler = jr.Prioritized(epsilon=0.0)
          >>> state = jax.jit(sampler.insert)(
          ...     sampler.init(4), np.array([0, 1]), np.array([True, True])
          ... )
          >>> live = jr.samplers.Live(
          ...     start=jnp.int32(3), size=jnp.int32(2), capacity=4
          ... )  # slots 3 and 0
          >>> float(jr.sum_tree.total(sampler.restrict(state, live).tree))
          1.0
        """
        return state

    @abc.abstractmethod
    def weights(self, state: S, probabilities: jax.Array, live: ring.Live, *, beta: Any = None) -> jax.Array:
        """Importance weights of the draws.

        Args:
          state: the sampler's state.
          probabilities: float32 [B], from `sample`.
          live: the slots that may be drawn, as for `sample`. The weights are for the distribution over the items of
            all shards.
          beta: number or float [], overrides the sampler's own exponent.

        Returns:
          float32 [B], 0 for a row without a draw.

        Examples:
          >>> sampler = jr.Prioritized(beta=1.0, normalize=None)
          >>> weights = jax.jit(sampler.weights)(
          ...     sampler.init(4),
          ...     np.array([0.5, 0.25, 0.0]),
          ...     jr.samplers.Live(start=jnp.int32(0), size=jnp.int32(4), capacity=4),
          ... )
          >>> [round(weight, 3) for weight in weights.tolist()]  # 1 / (N P)
          [0.5, 1.0, 0.0]
        """

    def update(
        self,
        state: S,
        slots: jax.Array,
        td_errors: jax.Array,
        mask: jax.Array,
        *,
        spent: jax.Array | None = None,
        axis_name: str | None = None,
    ) -> S:
        """State after an update with TD errors.

        Args:
          state: the sampler's state.
          slots: int32 [B]. The last occurrence of a repeated slot counts. -1 marks a row that never named an item, the
            number of slots a row whose item is no longer stored.
          td_errors: float [B], signed or absolute.
          mask: bool [B]; rows with False are ignored.
          spent: bool [B], True for rows whose item is no longer drawn; given only with a buffer's `max_uses`. `sample`
            then gets a `Live` with `unspent`.
          axis_name: mapped axis over the shards of the buffer; None without shards.

        Examples:
          >>> sampler = jr.Prioritized(epsilon=0.0)
          >>> state = jax.jit(sampler.insert)(
          ...     sampler.init(4), np.array([0, 1]), np.array([True, True])
          ... )
          >>> td_errors = np.array([-4.0, jnp.nan])
          >>> state = jax.jit(sampler.update)(
          ...     state, np.array([0, 1]), td_errors, mask=np.array([True, True])
          ... )
          >>> # NaN changes nothing.
          >>> float(state.max_priority), int(state.rejected), float(state.tree.sums[-1][1])
          (4.0, 1, 1.0)
        """
        return state

    def priorities(self, state: S, slots: jax.Array) -> jax.Array:
        """Priorities of slots, before alpha, float32 [B]; 1 for a sampler without priorities.

        Args:
          state: the sampler's state.
          slots: int32 [B], in [0, capacity).

        Examples:
          >>> sampler = jr.Prioritized(alpha=0.5, epsilon=0.0)
          >>> state = jax.jit(sampler.insert)(
          ...     sampler.init(4), np.array([0]), np.array([True]), td_errors=np.array([9.0])
          ... )
          >>> jax.jit(sampler.priorities)(state, np.array([0, 1])).tolist()
          [9.0, 0.0]
        """
        return jnp.ones(slots.shape, jnp.float32)

    def masses(self, state: S) -> jax.Array | None:
        """Numbers in proportion to the probabilities of all slots, float32 [capacity]; None without priorities.

        For exact facts of `diagnostics` and `plot`; may cost O(capacity).

        Examples:
          >>> sampler = jr.Prioritized(alpha=0.5, epsilon=0.0)
          >>> state = jax.jit(sampler.insert)(
          ...     sampler.init(4), np.array([0]), np.array([True]), td_errors=np.array([9.0])
          ... )
          >>> jax.jit(sampler.masses)(state).tolist()  # 9^alpha
          [3.0, 0.0, 0.0, 0.0]
        """
        return None

    def priorities_at(self, state: S, probabilities: jax.Array) -> jax.Array | None:
        """Priorities of items drawn with these probabilities, from `sample`, in their order; None if unknown.

        For `diagnostics` and `plot`. Reads no slot, as a program that then changes the slots would copy them.

        Examples:
          >>> sampler = jr.Prioritized(alpha=0.5, epsilon=0.0)
          >>> td_errors, both = np.array([9.0, 1.0]), np.array([True, True])
          >>> state = jax.jit(sampler.insert)(
          ...     sampler.init(4), np.array([0, 1]), both, td_errors=td_errors
          ... )
          >>> jax.jit(sampler.priorities_at)(state, np.array([0.75, 0.25])).tolist()
          [9.0, 1.0]
        """
        return None

    def metrics(self, states: S) -> dict[str, jax.Array]:
        """Numbers for `diagnostics`, float32 [] by name, from the states of all shards, leaves [D, ...].

        Examples:
          >>> sampler = jr.Prioritized()
          >>> states = jax.tree.map(lambda x: x[None], sampler.init(4))
          >>> sorted(jax.jit(sampler.metrics)(states))
          ['beta', 'max_priority', 'rejected', 'total_priority', 'updates']
        """
        return {}

    def migrated(self, old: "Sampler[Any]", states: Any, moved: Moved) -> S:
        """States of new shards, NumPy leaves [D, ...], for `migrate`. A subclass does not inherit it.

        Args:
          old: the sampler of the old states; it may be any other.
          states: states of all old shards, NumPy leaves [old D, ...].
          moved: the slots that are moved.

        Raises:
          ValueError: the sampler has a state, and no method for this.

        Examples:
          >>> source = np.array([[1, 2]])
          >>> moved = jr.samplers.Moved(source, source >= 0, source >= 0)
          >>> state = jr.Prioritized().migrated(jr.Uniform(), None, moved)
          >>> jr.sum_tree.leaves(state.tree).tolist()  # the largest priority, 1
          [[1.0, 1.0]]
        """
        state = self.init(moved.source.shape[1])
        if jax.tree.leaves(state):
            rule = "cannot convert its state for another capacity or number of devices"
            raise ValueError(f"sampler={self!r}: {rule}; write its method `migrated`.")
        return state


def old_priorities(old: Sampler[Any], states: Any, moved: Moved) -> np.ndarray | None:
    """For `migrated`: priorities of the new slots, [D, capacity]; None if the old sampler has none."""
    masses = jax.eval_shape(jax.vmap(old.masses), states) if jax.tree.leaves(states) else None
    return None if masses is None else moved.values(of_all_slots(old, "priorities", states, masses.shape[1]))


@functools.partial(jax.jit, static_argnums=(0, 1, 3))
def of_all_slots(config: Any, method: str, states: Any, capacity: int) -> jax.Array:
    """Numbers of all slots of all shards, [D, capacity], from a method of a state and slots."""
    slots = jnp.arange(capacity, dtype=jnp.int32)
    return jax.vmap(lambda state: getattr(config, method)(state, slots))(states)


def check_sampler(name: str, sampler: Any) -> Any:
    """Return `sampler` after a check that it is a hashable `Sampler`; a `ValueError` if it is not."""
    if not isinstance(sampler, Sampler):
        raise ValueError(f"{name}={sampler!r}: must be a sampler, such as jr.Uniform() or jr.Prioritized().")
    try:
        hash(sampler)
    except TypeError as error:
        raise ValueError(f"{name}={sampler!r}: must be hashable; make it a frozen dataclass of tuples.") from error
    return sampler
