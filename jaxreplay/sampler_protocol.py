"""What a buffer asks of its sampler.

A sampler knows slots, probabilities and TD errors, but no items. A slot outside [0, capacity) names no item, and its
row is ignored. A buffer may be cut into D shards. Each shard has a sampler's state of its own and draws a D-th of the
batch. Then `insert`, `weights` and `update` also get the name of a mapped axis over the shards.
"""

from typing import Any, Protocol, TypeVar

import jax

from jaxreplay.ring import Live

S = TypeVar("S")


class Sampler(Protocol[S]):
    """What a buffer asks of its sampler: the methods to write for a law of one's own.

    A sampler is a frozen dataclass, and so is its state `S`, as a pytree. This one draws the newest slots alone:

        @dataclasses.dataclass(frozen=True)
        class Newest(jr.Uniform):
            most: int = 1000

            def sample(self, state, key, batch_size, live):
                size = jnp.minimum(live.size, self.most)
                start = (live.start + live.size - size) % state.capacity
                return super().sample(state, key, batch_size, live._replace(start=start, size=size))

    It is right for a `SequenceBuffer`, whose live slots are in order of age; see `jaxreplay.ring.Live`.
    """

    def init(self, capacity: int) -> S:
        """The state for empty slots.

        Args:
          capacity: number of slots.
        """
        ...

    def insert(
        self,
        state: S,
        slots: jax.Array,
        drawable: jax.Array,
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
        """
        ...

    def restrict(self, state: S, live: Live) -> S:
        """The state for draws from `live` alone, a part of the slots that hold items, for `sample` and `weights`.

        Args:
          state: the sampler's state.
          live: the slots that may be drawn; `sample` gets the same.
        """
        ...

    def weights(
        self,
        state: S,
        probabilities: jax.Array,
        size: jax.Array,
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
        """
        ...

    def update(
        self, state: S, slots: jax.Array, td_errors: jax.Array, mask: jax.Array, axis_name: str | None = None
    ) -> S:
        """The state after TD errors are known.

        Args:
          state: the sampler's state.
          slots: int32 [B]; of one that occurs more than once the last occurrence counts. -1 for a row that never named
            an item, the number of slots for one whose item is no longer stored.
          td_errors: float [B], signed or not.
          mask: bool [B], the rows that count.
          axis_name: None, or a mapped axis over the shards of a buffer, of which this is one.
        """
        ...


def check_sampler(sampler: Any) -> Any:
    """`sampler`.

    Raises:
      ValueError: it is none.
    """
    methods = ("init", "insert", "sample", "weights", "update")
    if isinstance(sampler, type) or not all(callable(getattr(sampler, method, None)) for method in methods):
        raise ValueError(f"sampler={sampler!r}: must be a sampler, such as jr.Uniform() or jr.Prioritized().")
    return sampler
