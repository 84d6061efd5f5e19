"""The `Sampler` protocol: the interface between a buffer and its sampler.

A sampler sees slots, probabilities and TD errors, but no items. A row whose slot is outside [0, capacity) is ignored.
A buffer may be split into D shards. Each shard then has its own sampler state and draws 1/D of the batch, and `insert`,
`weights` and `update` also get the name of a mapped axis over the shards. Each shard draws with a key of its own, or
with the same key if the sampler has an attribute `shares_key` that is True.

If the sampler has an attribute `by_age` that is True, live slots are in order of age, the oldest first, and with
`max_age` the older ones that are left out are counted (`Live.older`). A `ReservoirBuffer` rejects such a sampler.
"""

from typing import Any, Protocol, TypeVar

import jax
import jax.numpy as jnp

from jaxreplay._common import ring

S = TypeVar("S")


class Sampler(Protocol[S]):
    """Protocol of a sampler: implement these methods for a custom sampling distribution.

    A sampler is a frozen dataclass. Its state `S` is a frozen dataclass too, registered as a pytree. The sampler below
    draws only the newest slots. It suits a `SequenceBuffer`, whose live slots are in order of age; see
    `jaxreplay.samplers.Live`.

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
      >>> steps = jnp.array([[1], [2], [3]])
      >>> state = buffer.add(buffer.init(steps), steps)
      >>> buffer.sample(state, jax.random.key(0), batch_size=2).items.tolist()
      [[2, 3], [2, 3]]
    """

    def init(self, capacity: int) -> S:
        """Initial state: all slots are empty.

        Args:
          capacity: number of slots.

        Examples:
          >>> jr.sum_tree.leaves(jr.Prioritized().init(4).tree).tolist()
          [0.0, 0.0, 0.0, 0.0]
        """
        ...

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
          ...     sampler.init(4), jnp.array([0, 1]), jnp.array([True, False])
          ... )
          >>> # A new item has the largest priority so far, at first 1.
          >>> jr.sum_tree.leaves(state.tree).tolist()
          [1.0, 0.0, 0.0, 0.0]
        """
        return state

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
        ...

    def restrict(self, state: S, live: ring.Live) -> S:
        """State restricted to `live`, a subset of the filled slots, for `sample` and `weights`.

        Args:
          state: the sampler's state.
          live: the slots that may be drawn; pass the same to `sample`.

        Examples:
          >>> sampler = jr.Prioritized(epsilon=0.0)
          >>> state = jax.jit(sampler.insert)(
          ...     sampler.init(4), jnp.array([0, 1]), jnp.array([True, True])
          ... )
          >>> live = jr.samplers.Live(
          ...     start=jnp.int32(3), size=jnp.int32(2), capacity=4
          ... )  # slots 3 and 0
          >>> float(jr.sum_tree.total(sampler.restrict(state, live).tree))
          1.0
        """
        return state

    def weights(self, state: S, probabilities: jax.Array, live: ring.Live, *, beta: Any = None) -> jax.Array:
        """Importance weights of the draws.

        Args:
          state: the sampler's state.
          probabilities: float32 [B], from `sample`.
          live: the slots that may be drawn, the same as for `sample`.
          beta: number or float [], overrides the sampler's own exponent.

        The weights are for the distribution over the items of all shards.

        Returns:
          float32 [B].

        Examples:
          >>> sampler = jr.Prioritized(beta=1.0, normalize=None)
          >>> weights = jax.jit(sampler.weights)(
          ...     sampler.init(4),
          ...     jnp.array([0.5, 0.25, 0.0]),
          ...     jr.samplers.Live(start=jnp.int32(0), size=jnp.int32(4), capacity=4),
          ... )
          >>> [round(weight, 3) for weight in weights.tolist()]  # 1 / (N P)
          [0.5, 1.0, 0.0]
        """
        ...

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
          ...     sampler.init(4), jnp.array([0, 1]), jnp.array([True, True])
          ... )
          >>> td_errors = jnp.array([-4.0, jnp.nan])
          >>> state = jax.jit(sampler.update)(
          ...     state, jnp.array([0, 1]), td_errors, mask=jnp.array([True, True])
          ... )
          >>> # NaN changes nothing.
          >>> float(state.max_priority), int(state.rejected), float(state.tree.sums[-1][1])
          (4.0, 1, 1.0)
        """
        return state

    def priorities(self, state: S, slots: jax.Array) -> jax.Array:
        """Priorities of slots, before alpha, float32 [B]; optional, for a buffer's `priorities`.

        Args:
          state: the sampler's state.
          slots: int32 [B], in [0, capacity).

        Examples:
          >>> sampler = jr.Prioritized(alpha=0.5, epsilon=0.0)
          >>> state = jax.jit(sampler.insert)(
          ...     sampler.init(4), jnp.array([0]), jnp.array([True]), td_errors=jnp.array([9.0])
          ... )
          >>> sampler.priorities(state, jnp.array([0, 1])).tolist()
          [9.0, 0.0]
        """
        return jnp.ones(slots.shape, jnp.float32)


def check_sampler(sampler: Any) -> Any:
    """Return `sampler` after a check of its methods.

    Raises:
      ValueError: a method of `Sampler` is missing, or `sampler` is not hashable.
    """
    methods = ("init", "insert", "sample", "weights", "update")
    if isinstance(sampler, type) or not all(callable(getattr(sampler, method, None)) for method in methods):
        raise ValueError(f"sampler={sampler!r}: must be a sampler, such as jr.Uniform() or jr.Prioritized().")
    try:
        hash(sampler)
    except TypeError as error:
        raise ValueError(
            f"sampler={sampler!r}: must be hashable; make it a frozen dataclass of numbers, strings and tuples."
        ) from error
    return sampler
