"""What a buffer asks of its sampler.

A sampler knows slots, probabilities and TD errors, but no items. A slot outside [0, capacity) names no item, and its
row is ignored. A buffer may be cut into D shards. Each shard has a sampler's state of its own and draws a D-th of the
batch. Then `insert`, `weights` and `update` also get the name of a mapped axis over the shards.
"""

from typing import Any, Protocol, TypeVar

import jax

from jaxreplay._common.ring import Live

S = TypeVar("S")


class Sampler(Protocol[S]):
    """What a buffer asks of its sampler: the methods to write for a law of one's own.

    A sampler is a frozen dataclass, and so is its state `S`, as a pytree. The one below draws the newest slots alone.
    It is right for a `SequenceBuffer`, whose live slots are in order of age; see `jaxreplay.Live`.

    Examples:
      >>> import dataclasses
      >>> @dataclasses.dataclass(frozen=True)
      ... class Newest(jr.Uniform):
      ...     most: int = 1000
      ...     def sample(self, state, key, batch_size, live):
      ...         size = jnp.minimum(live.size, self.most)
      ...         start = (live.start + live.size - size) % state.capacity
      ...         return super().sample(state, key, batch_size, live._replace(start=start, size=size))
      >>> buffer = jr.SequenceBuffer(length=4, num_envs=1, sequence_length=2, sampler=Newest(most=1))
      >>> steps = jnp.array([[1], [2], [3]])
      >>> state = buffer.add(buffer.init(steps), steps)
      >>> buffer.sample(state, jax.random.key(0), batch_size=2).items.tolist()
      [[2, 3], [2, 3]]
    """

    def init(self, capacity: int) -> S:
        """The state for empty slots.

        Args:
          capacity: number of slots.

        Examples:
          >>> jr.Uniform().init(4)
          UniformState(capacity=4, counts=None)
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
        """The state after slots were written.

        Args:
          state: the sampler's state.
          slots: int32 [B], distinct where they are in range.
          drawable: bool [B], which of them may be drawn from now on.
          td_errors: None, or float [B], what is known of the items; NaN for one of which nothing is.
          axis_name: None, or a mapped axis over the shards of a buffer, of which this is one.

        Examples:
          >>> sampler = jr.Prioritized(epsilon=0.0)
          >>> state = jax.jit(sampler.insert)(sampler.init(4), jnp.array([0, 1]), jnp.array([True, False]))
          >>> jr.sum_tree.leaves(state.tree).tolist()  # a new item has the largest priority so far, at first 1
          [1.0, 0.0, 0.0, 0.0]
        """
        ...

    def sample(self, state: S, key: jax.Array, batch_size: int, live: Live) -> tuple[jax.Array, jax.Array]:
        """Draw slots.

        Args:
          state: the sampler's state.
          key: a PRNG key.
          batch_size: number of draws.
          live: the slots that may be drawn.

        Returns:
          slots, int32 [batch_size], and their probabilities, float32 [batch_size]; 0 for a row that draws no slot.

        Examples:
          >>> live = jr.Live(start=jnp.int32(3), size=jnp.int32(2))  # slots 3 and 0
          >>> sampler = jr.Uniform()
          >>> draw = jax.jit(sampler.sample, static_argnums=2)
          >>> slots, probabilities = draw(sampler.init(4), jax.random.key(0), 2, live)
          >>> set(slots.tolist()) <= {0, 3}, probabilities.tolist()
          (True, [0.5, 0.5])
        """
        ...

    def restrict(self, state: S, live: Live) -> S:
        """The state for draws from `live` alone, a part of the slots that hold items, for `sample` and `weights`.

        Args:
          state: the sampler's state.
          live: the slots that may be drawn; `sample` gets the same.

        Examples:
          >>> sampler = jr.Prioritized(epsilon=0.0)
          >>> state = jax.jit(sampler.insert)(sampler.init(4), jnp.array([0, 1]), jnp.array([True, True]))
          >>> live = jr.Live(start=jnp.int32(3), size=jnp.int32(2))  # slots 3 and 0
          >>> float(jr.sum_tree.total(sampler.restrict(state, live).tree))
          1.0
        """
        ...

    def weights(
        self,
        state: S,
        probabilities: jax.Array,
        size: jax.Array,
        *,
        beta: Any = None,
        axis_name: str | None = None,
    ) -> jax.Array:
        """Importance weights of draws.

        Args:
          state: the sampler's state.
          probabilities: float32 [B], as `sample` returned them.
          size: int32 [], number of slots that may be drawn.
          beta: exponent that replaces the sampler's own, a number or float [].
          axis_name: None, or a mapped axis over D shards. Then an item's probability in the whole batch is a D-th of
            that in its shard, and the weights are those of the law over the items of all shards.

        Returns:
          float32 [B].

        Examples:
          >>> sampler = jr.Prioritized(beta=1.0, normalize=None)
          >>> weights = jax.jit(sampler.weights)(sampler.init(4), jnp.array([0.5, 0.25, 0.0]), size=4)
          >>> [round(weight, 3) for weight in weights.tolist()]  # 1 / (N P)
          [0.5, 1.0, 0.0]
        """
        ...

    def update(
        self, state: S, slots: jax.Array, td_errors: jax.Array, mask: jax.Array, *, axis_name: str | None = None
    ) -> S:
        """The state after TD errors are known.

        Args:
          state: the sampler's state.
          slots: int32 [B]; of one that occurs more than once the last occurrence counts. -1 for a row that never named
            an item, the number of slots for one whose item is no longer stored.
          td_errors: float [B], signed or not.
          mask: bool [B], the rows that count.
          axis_name: None, or a mapped axis over the shards of a buffer, of which this is one.

        Examples:
          >>> sampler = jr.Prioritized(epsilon=0.0)
          >>> state = jax.jit(sampler.insert)(sampler.init(4), jnp.array([0, 1]), jnp.array([True, True]))
          >>> td_errors = jnp.array([-4.0, jnp.nan])
          >>> state = jax.jit(sampler.update)(state, jnp.array([0, 1]), td_errors, mask=jnp.array([True, True]))
          >>> float(state.max_priority), int(state.rejected), float(state.tree.sums[-1][1])  # NaN changes nothing
          (4.0, 1, 1.0)
        """
        ...


def check_sampler(sampler: Any) -> Any:
    """`sampler`.

    Raises:
      ValueError: it is none, or cannot be hashed.
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
