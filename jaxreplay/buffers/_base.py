"""What the buffers have in common: draws, handles and updates."""

import abc
import dataclasses
import functools
from typing import Any, ClassVar, Generic, Protocol, TypeVar

import jax
import jax.core
import jax.numpy as jnp
from flax import struct

from jaxreplay._common import checks, layouts, ring, shards
from jaxreplay._common.checks import check_integer
from jaxreplay._common.eager import num_bytes
from jaxreplay._common.permutation import permuted
from jaxreplay._common.xla import alive, jit_method, materialize, on_host, read_once, reads_state
from jaxreplay.buffers._shards import whole_of
from jaxreplay.samplers import Sampler
from jaxreplay.sum_tree import SumTree
from jaxreplay.transitions import TransitionBatch
from jaxreplay.transitions._batch import without_valid, written


@struct.dataclass
class Sample:
    """A batch of draws.

    Attributes:
      items: leaves [batch, ...]; [batch, sequence_length, ...] from a `SequenceBuffer`.
      indices: int32 [batch], the items' handles, to be given back to `update`; -1 for rows without an item, as all
        rows from an empty buffer are.
      probabilities: float32 [batch], with which each item was drawn; 0 for rows without an item.
      weights: float32 [batch], importance-sampling weights; 0 for rows without an item.
      mask: None; from a `SequenceBuffer` bool [batch, sequence_length], which steps count.
      age: int32 [batch], insertions since the item's, 0 for the newest; of a sequence the later ones of its stream. -1
        for rows without an item.

    Examples:
      >>> buffer = jr.ReplayBuffer(capacity=4)
      >>> items = jnp.array([10, 20, 30, 40])
      >>> state = buffer.add(buffer.init(items[:1]), items[:1])
      >>> sample = buffer.sample(state, jax.random.key(0), batch_size=2)
      >>> sample.items.tolist(), sample.indices.tolist(), sample.probabilities.tolist(), sample.weights.tolist()
      ([10, 10], [0, 0], [1.0, 1.0], [1.0, 1.0])
    """

    items: Any
    indices: jax.Array  # [batch]
    probabilities: jax.Array  # [batch]
    weights: jax.Array  # [batch]
    mask: jax.Array | None = None  # [batch, sequence_length]
    age: jax.Array | None = None  # [batch]


class State(Protocol):
    """What the states of all buffers hold."""

    @property
    def ring(self) -> ring.Ring: ...

    @property
    def sampler(self) -> Any: ...

    @property
    def storage(self) -> Any: ...


S = TypeVar("S", bound=State)


class Buffer(abc.ABC, Generic[S]):
    """A buffer whose drawable items lie in slots, mostly a ring; what inherits is a frozen dataclass and final."""

    sampler: Sampler
    donate: bool
    _axis_name: str | None  # of a shard: the mapped axis over all shards
    # Fields with the sizes of the storage's leading axes. Memory grows with the first; shards get parts of the last.
    _storage_axes: ClassVar[tuple[str, ...]] = ("capacity",)
    _once_in: ClassVar[str | None] = None  # a kind of buffer that stores once what this one may store several times

    @abc.abstractmethod
    def init(self, items: Any, /) -> S:
        """An empty buffer for items like these."""

    @abc.abstractmethod
    def add(self, state: S, *args: Any, **kwargs: Any) -> S:
        """Insert a batch of items."""

    @abc.abstractmethod
    def is_full(self, state: S) -> jax.Array:
        """Whether the next insertion overwrites."""

    @property
    @abc.abstractmethod
    def _num_slots(self) -> int:
        """Size of the ring of slots."""

    def _device_states(self, items: Any) -> list[tuple[str, Any, int]]:
        """For `jaxreplay.memory`: a prefix for names of leaves, the abstract state on a device, number of devices."""
        return [("", jax.eval_shape(self.init, items), 1)]

    @property
    def _item_share(self) -> float:
        """What part of the storage a drawn item is."""
        return 1 / self._num_slots

    def _item_bytes(self, state: S) -> float:
        """Bytes of a drawn item."""
        return self._item_share * num_bytes(jax.tree.leaves(state.storage))

    @property
    def _batch_axes(self) -> int:
        """Leading axes of what `add` takes; shards get equal parts of the last of them."""
        return len(self._storage_axes)

    @property
    def _axis(self) -> dict[str, Any]:
        """An argument of a sampler's methods; a sampler for buffers without shards need not take it."""
        return {} if self._axis_name is None else {"axis_name": self._axis_name}

    def _local_handles(self, state: S, slots: jax.Array) -> jax.Array:
        """Handles, among those of one shard, of the items in `slots` [B], which exist; -1 for an empty slot."""
        return ring.handles(state.ring, slots, self._num_slots)

    def _local_slots(self, state: S, handles: jax.Array) -> jax.Array:
        """Slots of the items that `handles` [B] name; `_num_slots` for an item that is no longer stored."""
        return ring.slots(state.ring, handles, self._num_slots)

    def _handles(self, state: S, slots: jax.Array) -> jax.Array:
        """`_local_handles` as all shards know them."""
        handles = self._local_handles(state, slots)
        return jnp.where(handles >= 0, handles + ring.first_handle(state.ring, shards.index(self._axis_name)), -1)

    def _slots(self, state: S, handles: jax.Array) -> jax.Array:
        """`_local_slots` of handles as all shards know them."""
        return self._local_slots(state, handles - ring.first_handle(state.ring, shards.index(self._axis_name)))

    def _check_state(self, state: S) -> None:
        """Raise a `ValueError` where `state` is not one of this buffer's."""
        fields = self._storage_axes
        found, expected = layouts.leading(state.storage, len(fields)), tuple(getattr(self, field) for field in fields)
        if state.ring.size.shape != () or found != expected:
            names = ", ".join(f"{field}={size}" for field, size in zip(fields, expected, strict=True))
            axes = f"a leading axis of {found[0]}" if len(found) == 1 else f"leading axes {list(found)}"
            raise ValueError(
                f"{names}: this state has {axes}; use the buffer that made it, and jax.vmap for a stack of states."
            )
        self._check_sampler(state)

    def _check_sampler(self, state: S) -> None:
        """Raise a `ValueError` where `state` has not the structure of the sampler's states."""
        if _kind(state.sampler) != _kind_of_states(self.sampler, self._num_slots):
            raise ValueError(
                f"sampler={self.sampler!r}: this state is of another sampler, or of another size; use the buffer that "
                "made it, or take it over with jaxreplay.migrate."
            )

    @abc.abstractmethod
    def _live(self, state: S, max_age: jax.Array | None = None) -> ring.Live:
        """The slots that may be drawn; of these the ones with items younger than `max_age` (int32 [])."""

    def _why_empty(self, state: S) -> str:
        """What is wrong with a draw from a buffer, or shards of it, that has nothing to draw; and what to do."""
        return "cannot sample from an empty buffer; add items first (see can_sample)."

    @abc.abstractmethod
    def _ages(self, state: S, slots: jax.Array) -> jax.Array:
        """`Sample.age` of the items in `slots` [B]."""

    def _insert(self, state: S, slots: jax.Array, drawable: jax.Array, td_errors: jax.Array | None) -> Any:
        """The sampler's state after `slots` were written; a sampler need not take what is not there."""
        named: Any = {} if td_errors is None else {"td_errors": td_errors}
        return self.sampler.insert(state.sampler, slots, drawable, **named, **self._axis)

    def _places(self, state: S, slots: jax.Array) -> jax.Array:
        """Where the items in `slots` [B] are stored, if the storage's leading axes are one; out of range if nowhere."""
        return slots

    @abc.abstractmethod
    def _read(self, state: S, slots: jax.Array, fill: bool) -> tuple[Any, jax.Array | None]:
        """Items at `slots` [B], which exist, or else are zeros with `fill`; and `Sample.mask`."""

    def sample(
        self, state: S, key: jax.Array, batch_size: int, *, beta: Any = None, max_age: jax.Array | int | None = None
    ) -> Sample:
        """Draw items by the sampler's law.

        Where the items are a `TransitionBatch`, its `W` is multiplied by the weights (or is the weights, if it was
        None) and its `idx` is the handles.

        Args:
          state: unchanged.
          key: a PRNG key.
          batch_size: number of draws.
          beta: exponent of the importance weights, instead of the sampler's; a float, or a traced float [].
          max_age: None, or draw only items of which `Sample.age` is less; an integer, or a traced int32 []. The law is
            the sampler's, restricted to these, and so are probabilities and weights.

        Raises:
          ValueError: `batch_size` or `max_age` is not a positive integer, or `key` no PRNG key; or the buffer is empty
            and the call is eager (which waits for the buffer's size; under `jit` an empty buffer gives weights and
            probabilities 0 and indices -1).

        Examples:
          >>> buffer = jr.ReplayBuffer(capacity=4, sampler=jr.Prioritized(alpha=1.0, beta=1.0, epsilon=0.0))
          >>> items = jnp.array([10, 20, 30, 40])
          >>> state = buffer.add(buffer.init(items), items, td_errors=jnp.array([1.0, 0.0, 0.0, 3.0]))
          >>> sample = buffer.sample(state, jax.random.key(0), batch_size=4)
          >>> sample.items.tolist()  # in proportion to the TD errors: 20 and 30 have priority 0
          [10, 40, 40, 40]
          >>> [round(weight, 2) for weight in sample.weights.tolist()]
          [1.0, 0.33, 0.33, 0.33]
        """
        batch_size = check_draw(batch_size, beta, max_age)
        return check_drawn(self, state, self._draw(state, key, batch_size, beta, max_age))

    @jit_method(static=("batch_size",), rows="batch_size", moves_items=True)
    def _draw(self, state: S, key: jax.Array, batch_size: int, beta: Any, max_age: Any) -> Sample:
        # Arguments are checked while this is traced, so that calls of a kind seen before do not pay for it.
        self._check_state(state)
        checks.check_key(key)
        sampler_state = state.sampler
        if max_age is None:
            live = self._live(state)
        else:
            live = self._live(state, checks.as_count(max_age))
            sampler_state = self.sampler.restrict(state.sampler, live)
        drawn = self.sampler.sample(sampler_state, key, batch_size, live)
        slots, probabilities = read_once(materialize(*drawn))
        weights = self.sampler.weights(sampler_state, probabilities, live.size, beta=beta, **self._axis)
        return self._sample_of(state, slots, probabilities / shards.count(self._axis_name), weights)

    def epoch(self, state: S, key: jax.Array, batch_size: int, *, step: jax.Array | int) -> Sample:
        """Batch number `step` of a pass over all drawable items, each of them once, in an order that `key` shuffles.

        The order is computed and not stored, at O(batch_size) a call. A pass is one as long as the state stays: give
        all its batches the same key and nothing added in between. `num_batches` tells how many there are. Weights are
        1, whatever the sampler.

        Args:
          state: unchanged.
          key: a PRNG key, one for a pass.
          step: which batch, from 0 on; an integer, or a traced int32 [].
          batch_size: number of rows. Those behind the pass's end have handle -1, probability and weight 0.

        Raises:
          ValueError: `batch_size` is not a positive integer, `step` is no integer or negative, or `key` no PRNG key; or
            the buffer is empty and the call is eager.

        Examples:
          >>> buffer = jr.ReplayBuffer(capacity=4)
          >>> items = jnp.array([10, 20, 30])
          >>> state = buffer.add(buffer.init(items), items)
          >>> first, second = (buffer.epoch(state, jax.random.key(0), batch_size=2, step=step) for step in range(2))
          >>> sorted(first.items.tolist() + second.items[:1].tolist()), second.weights.tolist()
          ([10, 20, 30], [1.0, 0.0])
        """
        batch_size = check_draw(batch_size)
        check_integer("step", step, 0, 2**31 - 1, "the number of a batch", traced=None)
        return check_drawn(self, state, self._epoch(state, key, batch_size, step))

    @jit_method(static=("batch_size",), rows="batch_size", moves_items=True)
    def _epoch(self, state: S, key: jax.Array, batch_size: int, step: jax.Array | int) -> Sample:
        self._check_state(state)
        checks.check_key(key)
        live = self._live(state)
        end = -(-live.size // batch_size)
        step = checks.as_int32(step)
        step = jnp.where((step >= 0) & (step < end), step, end)
        position = step * batch_size + jnp.arange(batch_size, dtype=jnp.int32)
        exists = position < live.size
        order = jax.random.clone(key)  # all batches of a pass have the same key, which is not its reuse by mistake
        slots = live.slots(permuted(order, jnp.where(exists, position, 0), live.size), self._num_slots)
        slots, exists = read_once(materialize(slots, exists))
        probability = 1.0 / jnp.maximum(live.size, 1).astype(jnp.float32)
        weights = exists.astype(jnp.float32)
        return self._sample_of(state, slots, jnp.where(exists, probability, 0.0), weights)

    def num_batches(self, state: S, batch_size: int) -> jax.Array:
        """Number of batches of an `epoch`, int32 [].

        Examples:
          >>> buffer = jr.ReplayBuffer(capacity=4)
          >>> items = jnp.array([10, 20, 30])
          >>> int(buffer.num_batches(buffer.add(buffer.init(items), items), batch_size=2))
          2
        """
        batch_size = check_draw(batch_size)
        return -(-self.size(state) // batch_size)

    def _sample_of(self, state: S, slots: jax.Array, probabilities: jax.Array, weights: jax.Array) -> Sample:
        """The items at `slots` [B], which exist; rows of probability 0 are without an item."""
        drawn = probabilities > 0
        indices = jnp.where(drawn, self._handles(state, slots), -1)
        age = jnp.where(indices >= 0, self._ages(state, slots), -1)
        items, mask = self._read(state, slots, fill=False)
        items = read_once(items)
        if mask is not None:
            mask &= (indices >= 0)[:, None]
        if isinstance(items, TransitionBatch):
            items = items.with_draw(weights, indices)
        return Sample(items, indices, probabilities, weights, mask, age)

    @jit_method(donates=True, handles="indices", rows="indices")
    def update(self, state: S, indices: jax.Array, td_errors: jax.Array) -> S:
        """Tell the sampler the TD errors of items that were drawn. `Uniform` ignores them.

        Args:
          state: donated when called eagerly (see the class).
          indices: int [B], handles from `Sample.indices`. One whose item has been overwritten since is ignored. Of a
            handle that occurs more than once the last occurrence counts.
          td_errors: float [B], signed or not.

        Raises:
          ValueError: shapes or dtypes other than these.

        Examples:
          >>> buffer = jr.ReplayBuffer(capacity=4, sampler=jr.Prioritized(epsilon=0.0))
          >>> items = jnp.array([10, 20, 30, 40])
          >>> state = buffer.add(buffer.init(items), items)
          >>> state = buffer.update(state, buffer.newest(state, 4), jnp.array([0.0, 0.0, -2.0, 0.0]))
          >>> buffer.sample(state, jax.random.key(0), batch_size=4).items.tolist()
          [30, 30, 30, 30]
        """
        self._check_state(state)
        indices, td_errors = checks.check_td_errors(indices, td_errors)
        slots = self._slots(state, indices)
        stored = slots < self._num_slots
        slots = jnp.where(indices >= 0, slots, -1)
        sampler = self.sampler.update(state.sampler, slots, td_errors, stored, **self._axis)
        # What is added next comes after the draws that these are the TD errors of, and after all reads of handles.
        changed = {"sampler": sampler, "ring": ring.after(state.ring, slots, td_errors)}
        return dataclasses.replace(state, **changed)  # pyright: ignore[reportArgumentType]

    @jit_method(donates=True, handles="indices", rows="indices", moves_items=True)
    def set(self, state: S, indices: jax.Array, values: Any, *, mask: jax.Array | None = None) -> S:
        """Write leaves of stored items in place, such as recurrent states that were computed anew.

        Args:
          state: donated when called eagerly (see the class).
          indices: int [B], handles from `Sample.indices`. One whose item has been overwritten since is ignored. Of a
            handle that occurs more than once the last occurrence counts.
          values: a pytree of the items' structure, leaves [B, ...] ([B, sequence_length, ...] for a `SequenceBuffer`)
            of the stored shapes and dtypes. None stands for a leaf, or a part of the tree, that is left alone.
          mask: bool [B] ([B, sequence_length]); where it is False nothing is written, and neither where a
            `TransitionBatch` is not `valid`. Where sequences overlap, the later row of the batch counts.

        Raises:
          ValueError: wrong structure, shape or dtype; the message names the leaf.

        Examples:
          >>> buffer = jr.ReplayBuffer(capacity=4)
          >>> items = jnp.array([10, 20, 30])
          >>> state = buffer.add(buffer.init(items), items)
          >>> handles = buffer.newest(state, 3)
          >>> state = buffer.set(state, handles, items + 1, mask=jnp.array([True, False, True]))
          >>> buffer.get(state, handles).tolist()
          [11, 20, 31]
        """
        self._check_state(state)
        places = self._places(state, self._slots(state, checks.check_indices(indices)))
        spec = layouts.stored_spec(state.storage)
        values, valid = without_valid(checks.as_arrays(values))
        num_axes = len(self._storage_axes)
        values = checks.check_parts(values, spec, places.shape, num_axes, "the buffer")
        mask = written(mask, valid, places.shape)
        if mask is not None:
            places = jnp.where(mask, places, layouts.num_places(spec, num_axes))
        changed = {"storage": layouts.write_parts(state.storage, num_axes, places, values)}
        return dataclasses.replace(state, **changed)  # pyright: ignore[reportArgumentType]

    def newest(self, state: S, n: int) -> jax.Array:
        """Handles of the newest `n` insertions, int32 [n], oldest first; -1 where there are none.

        Raises:
          ValueError: `n` is not a positive integer.

        Examples:
          >>> buffer = jr.ReplayBuffer(capacity=4)
          >>> items = jnp.array([10, 20, 30])
          >>> state = buffer.add(buffer.init(items), items)
          >>> buffer.newest(state, 4).tolist()
          [-1, 0, 1, 2]
        """
        return self._newest(state, check_integer("n", n, 1, ring.MAX_CAPACITY, "the number of insertions"))

    @jit_method(static=("n",), rows="n")
    def _newest(self, state: S, n: int) -> jax.Array:
        self._check_state(state)
        live = ring.newest(state.ring, state.ring.size, self._num_slots)
        position = live.size - n + jnp.arange(n, dtype=jnp.int32)
        slots = live.slots(jnp.maximum(position, 0), self._num_slots)
        return jnp.where(position >= 0, self._handles(state, slots), -1)

    @jit_method(handles="indices", rows="indices", moves_items=True)
    def get(self, state: S, indices: jax.Array) -> Any:
        """Items [B, ...] named by the handles `indices` (int [B]); zeros for items no longer stored.

        Raises:
          ValueError: `indices` is not a vector of integers.

        Examples:
          >>> buffer = jr.ReplayBuffer(capacity=4)
          >>> items = jnp.array([10, 20, 30])
          >>> state = buffer.add(buffer.init(items), items)
          >>> handles = buffer.newest(state, 3)
          >>> state = buffer.add(state, items + 5)  # overwrites 10 and 20; no handle names another item instead
          >>> buffer.get(state, handles).tolist()
          [0, 0, 30]
        """
        self._check_state(state)
        return self._read(state, self._slots(state, checks.check_indices(indices)), fill=True)[0]

    def size(self, state: S) -> jax.Array:
        """Number of items that may be drawn, int32 [].

        Examples:
          >>> buffer = jr.ReplayBuffer(capacity=4)
          >>> items = jnp.array([10, 20, 30])
          >>> int(buffer.size(buffer.add(buffer.init(items), items)))
          3
        """
        return alive(state.ring.size)

    @reads_state
    def is_empty(self, state: S) -> jax.Array:
        """Whether nothing may be drawn, bool [].

        Examples:
          >>> buffer = jr.ReplayBuffer(capacity=4)
          >>> bool(buffer.is_empty(buffer.init(jnp.array([10, 20, 30]))))  # `init` ignores the values
          True
        """
        return jnp.logical_not(ring.at_least(state.ring.size, 1))

    @reads_state
    def can_sample(self, state: S, batch_size: int = 1) -> jax.Array:
        """Whether at least `batch_size` items may be drawn, bool [].

        Examples:
          >>> buffer = jr.ReplayBuffer(capacity=4)
          >>> items = jnp.array([10, 20, 30])
          >>> state = buffer.add(buffer.init(items), items)
          >>> bool(buffer.can_sample(state, 3)), bool(buffer.can_sample(state, 4))
          (True, False)
        """
        batch_size = check_integer("batch_size", batch_size, 0, 2**31 - 1, "a number of items")
        return ring.at_least(state.ring.size, batch_size)


def _kind(sampler_state: Any) -> Any:
    """What the states of a sampler have in common; a tree of another backend has another fan-out."""

    def sizes(x: Any) -> Any:
        return (x.capacity, x.minima is None, x.maxima is None) if isinstance(x, SumTree) else jnp.shape(x)

    leaves, treedef = jax.tree.flatten(sampler_state, is_leaf=lambda x: isinstance(x, SumTree))
    return treedef, [*map(sizes, leaves)]


@functools.cache
def _kind_of_states(sampler: Sampler, num_slots: int) -> Any:
    """The `_kind` of a sampler's states; asked for in each trace of a method, and so of a hashable sampler."""
    return _kind(jax.eval_shape(lambda: sampler.init(num_slots)))


def check_draw(batch_size: int, beta: Any = None, max_age: Any = None) -> int:
    """`batch_size` as a Python integer; a `ValueError` where a draw cannot have these arguments."""
    batch_size = check_integer("batch_size", batch_size, 1, ring.MAX_CAPACITY, "the number of draws")
    checks.check_beta(beta)
    if max_age is not None:
        check_integer("max_age", max_age, 1, 2**31 - 1, "how many of the newest items may be drawn", traced=None)
    return batch_size


def check_drawn(buffer: Any, state: Any, drawn: Sample) -> Sample:
    """`drawn`; raises a `ValueError` where the buffer, or all shards, are known to be empty."""
    if is_known_empty(buffer, state):
        raise ValueError(whole_of(buffer)._why_empty(state))
    return drawn


def is_known_empty(buffer: Any, state: Any) -> bool:
    """Whether the buffer, or all shards, are empty; False under `jit`.

    Ask after a draw is under way, so that the draw need not wait for this.
    """
    size = state.ring.size
    if isinstance(size, jax.core.Tracer):
        return False
    # Summed on the host: devices would do it after the draw. What other processes hold cannot be read here.
    size = on_host(size).sum() if getattr(size, "is_fully_addressable", True) else buffer.size(state)
    return bool(size == 0)
