"""What the buffers have in common: draws, handles and updates."""

import abc
import dataclasses
from typing import Any, ClassVar, Generic, Protocol, TypeVar

import jax
import jax.core
import jax.numpy as jnp
from flax import struct

from jaxreplay import ring
from jaxreplay._common import checks, shards
from jaxreplay._common.checks import check_integer
from jaxreplay._common.xla import jit_method, materialize, on_host, read_once
from jaxreplay.samplers import Sampler
from jaxreplay.sum_tree import SumTree
from jaxreplay.transition_batch import TransitionBatch


@struct.dataclass
class Sample:
    """A batch of draws.

    Attributes:
      items: leaves [batch, ...]; [batch, sequence_length, ...] from a `SequenceBuffer`.
      indices: int32 [batch], the items' handles, to be given back to `update`; -1 where the buffer was empty.
      probabilities: float32 [batch], with which each item was drawn; 0 where the buffer was empty.
      weights: float32 [batch], importance-sampling weights; 0 where the buffer was empty.
      mask: None; from a `SequenceBuffer` bool [batch, sequence_length], which steps count.
    """

    items: Any
    indices: jax.Array  # [batch]
    probabilities: jax.Array  # [batch]
    weights: jax.Array  # [batch]
    mask: jax.Array | None = None  # [batch, sequence_length]


class State(Protocol):
    """What the states of all buffers hold."""

    @property
    def ring(self) -> ring.Ring: ...

    @property
    def sampler(self) -> Any: ...


S = TypeVar("S", bound=State)


class Buffer(abc.ABC, Generic[S]):
    """A buffer whose drawable items lie in a ring of slots; those that inherit are frozen dataclasses and final."""

    sampler: Sampler
    donate: bool
    _axis_name: str | None  # of a shard: the mapped axis over all shards
    _batch_axes: ClassVar[int]  # leading axes of what `add` takes; shards get equal parts of the last of them
    _cut: ClassVar[str]  # the field that counts all shards

    @abc.abstractmethod
    def init(self, items: Any, /) -> S:
        """An empty buffer for items like these."""

    @abc.abstractmethod
    def add(self, state: S, items: Any, mask_or_ends: Any = None, /) -> S:
        """Insert a batch of items."""

    @abc.abstractmethod
    def is_full(self, state: S) -> jax.Array:
        """Whether the next insertion overwrites."""

    @property
    @abc.abstractmethod
    def _num_slots(self) -> int:
        """Size of the ring of slots."""

    @property
    def _axis(self) -> tuple[str, ...]:
        """The last argument of a sampler's methods; a sampler for buffers without shards need not take it."""
        return () if self._axis_name is None else (self._axis_name,)

    def _handles(self, state: S, slots: jax.Array) -> jax.Array:
        """Handles of the items in `slots` [B], which exist; -1 for an empty slot."""
        handles = ring.handles(state.ring, slots, self._num_slots)
        return jnp.where(handles >= 0, handles + ring.first_handle(state.ring, shards.index(self._axis_name)), -1)

    def _slots(self, state: S, handles: jax.Array) -> jax.Array:
        """Slots of the items that `handles` [B] name; `_num_slots` for an item that is no longer stored."""
        handles = handles - ring.first_handle(state.ring, shards.index(self._axis_name))
        return ring.slots(state.ring, handles, self._num_slots)

    @abc.abstractmethod
    def _check_state(self, state: S) -> None:
        """Raise a `ValueError` where `state` is not one of this buffer's."""

    def _check_sampler(self, state: S) -> None:
        """Raise a `ValueError` where `state` has not the structure of the sampler's states."""

        def kind(state: Any) -> Any:  # a tree of another backend has another fan-out
            leaves, treedef = jax.tree.flatten(state, is_leaf=lambda x: isinstance(x, SumTree))
            trees = [(x.capacity, x.minima is None) if isinstance(x, SumTree) else jnp.shape(x) for x in leaves]
            return treedef, trees

        if kind(state.sampler) != kind(jax.eval_shape(lambda: self.sampler.init(self._num_slots))):
            raise ValueError(
                f"sampler={self.sampler!r}: this state is of another sampler, or of another size; use the buffer that "
                "made it, or take it over with jaxreplay.migrate."
            )

    @abc.abstractmethod
    def _live(self, state: S) -> ring.Live:
        """The slots that may be drawn."""

    @abc.abstractmethod
    def _read(self, state: S, slots: jax.Array, fill: bool) -> tuple[Any, jax.Array | None]:
        """Items at `slots` [B], which exist, or else are zeros with `fill`; and `Sample.mask`."""

    def sample(self, state: S, key: jax.Array, batch_size: int, beta: Any = None) -> Sample:
        """Draw items with replacement.

        Where the items are a `TransitionBatch`, its `W` is multiplied by the weights (or is the weights, if it was
        None) and its `idx` is the handles.

        Args:
          state: unchanged.
          key: a PRNG key.
          batch_size: number of draws.
          beta: exponent of the importance weights, instead of the sampler's; a float, or a traced float [].

        Raises:
          ValueError: `batch_size` is not a positive integer; or the buffer is empty and the call is eager (which waits
            for the buffer's size; under `jit` an empty buffer gives weights and probabilities 0 and indices -1).
        """
        return draw(self, state, key, batch_size, beta)

    @jit_method(static=("batch_size",))
    def _draw(self, state: S, key: jax.Array, batch_size: int, beta: Any) -> Sample:
        # Arguments are checked while this is traced, so that calls of a kind seen before do not pay for it.
        self._check_state(state)
        drawn = self.sampler.sample(state.sampler, key, batch_size, self._live(state))
        slots, probabilities = read_once(materialize(*drawn))
        weights = self.sampler.weights(state.sampler, probabilities, state.ring.size, beta, *self._axis)
        probabilities = probabilities / shards.count(self._axis_name)
        indices = self._handles(state, slots)
        items, mask = self._read(state, slots, fill=False)
        items = read_once(items)
        if mask is not None:
            mask &= (indices >= 0)[:, None]
        if isinstance(items, TransitionBatch):
            items = items.with_draw(weights, indices)
        return Sample(items, indices, probabilities, weights, mask)

    @jit_method(donates=True, handles="indices")
    def update(self, state: S, indices: jax.Array, td_errors: jax.Array) -> S:
        """Tell the sampler the TD errors of items that were drawn. `Uniform` ignores them.

        Args:
          state: donated when called eagerly (see the class).
          indices: int [B], handles from `Sample.indices`. One whose item has been overwritten since is ignored. Of a
            handle that occurs more than once the last occurrence counts.
          td_errors: float [B], signed or not.

        Raises:
          ValueError: shapes or dtypes other than these.
        """
        self._check_state(state)
        indices, td_errors = checks.check_td_errors(indices, td_errors)
        slots = self._slots(state, indices)
        stored = slots < self._num_slots
        sampler = self.sampler.update(state.sampler, slots, td_errors, stored, *self._axis)
        # What is added next comes after the draws that these are the TD errors of.
        changed = {"sampler": sampler, "ring": ring.after(state.ring, td_errors)}
        return dataclasses.replace(state, **changed)  # pyright: ignore[reportArgumentType]

    @jit_method(handles="indices")
    def get(self, state: S, indices: jax.Array) -> Any:
        """Items [B, ...] named by the handles `indices` (int [B]); zeros for items no longer stored.

        Raises:
          ValueError: `indices` is not a vector of integers.
        """
        self._check_state(state)
        return self._read(state, self._slots(state, checks.check_indices(indices)), fill=True)[0]

    def size(self, state: S) -> jax.Array:
        """Number of items that may be drawn, int32 []."""
        return state.ring.size

    def is_empty(self, state: S) -> jax.Array:
        """Whether nothing may be drawn, bool []."""
        return jnp.logical_not(ring.at_least(state.ring.size, 1))

    def can_sample(self, state: S, batch_size: int = 1) -> jax.Array:
        """Whether at least `batch_size` items may be drawn, bool []."""
        batch_size = check_integer("batch_size", batch_size, 0, 2**31 - 1, "a number of items")
        return ring.at_least(state.ring.size, batch_size)


def draw(buffer: Any, state: Any, key: jax.Array, batch_size: int, beta: Any) -> Sample:
    """`buffer._draw` with checked arguments, for `sample` of a buffer and of a sharded one."""
    batch_size = check_integer("batch_size", batch_size, 1, ring.MAX_CAPACITY, "the number of draws")
    checks.check_beta(beta)
    drawn = buffer._draw(state, key, batch_size, beta)
    size = state.ring.size  # read after the draw is under way, so that it need not wait for this
    if not isinstance(size, jax.core.Tracer):
        # Summed on the host: devices would do it after the draw. What other processes hold cannot be read here.
        size = on_host(size).sum() if getattr(size, "is_fully_addressable", True) else buffer.size(state)
        if size == 0:
            raise ValueError("cannot sample from an empty buffer; add items first (see can_sample).")
    return drawn
