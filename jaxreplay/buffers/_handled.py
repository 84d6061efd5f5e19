"""Handled: reads and writes of stored items by their handles, common to all buffers."""

import abc
import dataclasses
from typing import Any, ClassVar, Generic, Protocol, TypeVar

import jax
import jax.numpy as jnp

from jaxreplay._common import checks, layouts, ring, shards
from jaxreplay._common.checks import check_integer
from jaxreplay._common.xla import jit_method
from jaxreplay.buffers import _uses
from jaxreplay.samplers import Sampler
from jaxreplay.transitions._batch import rows_to_write, without_valid


class State(Protocol):
    """Fields of every buffer's state."""

    @property
    def ring(self) -> ring.Ring: ...

    @property
    def sampler(self) -> Any: ...

    @property
    def uses(self) -> _uses.Uses | None: ...

    @property
    def storage(self) -> Any: ...


S = TypeVar("S", bound=State)


class Handled(abc.ABC, Generic[S]):
    """A buffer as a table of items that have handles."""

    sampler: Sampler
    count_updates: bool
    max_uses: int | None
    donate: bool
    _axis_name: str | None  # the mapped axis over all shards; None for a buffer without shards
    # Fields with the sizes of the storage's leading axes. Memory grows with the first; shards divide the last.
    _storage_axes: ClassVar[tuple[str, ...]] = ("capacity",)

    @property
    @abc.abstractmethod
    def _num_slots(self) -> int:
        """Size of the ring of slots."""

    @property
    def _axis(self) -> dict[str, Any]:
        """The keyword `axis_name` of a sampler's methods; left out without shards, so a sampler need not take it."""
        return {} if self._axis_name is None else {"axis_name": self._axis_name}

    @abc.abstractmethod
    def _check_state(self, state: S) -> None:
        """Raise a `ValueError` if `state` is not of this buffer."""

    @abc.abstractmethod
    def _ages(self, state: S, slots: jax.Array) -> jax.Array:
        """`Sample.age` of the items in `slots` [B]."""

    @abc.abstractmethod
    def _read(self, state: S, slots: jax.Array, fill: bool) -> tuple[Any, jax.Array | None]:
        """Items at `slots` [B] and `Sample.mask`; with `fill`, zeros for slots out of range, else none may be."""

    def _places(self, state: S, slots: jax.Array) -> jax.Array:
        """Positions of items in the storage with merged leading axes, from `slots` [B]; out of range if not stored."""
        return slots

    def _local_handles(self, state: S, slots: jax.Array) -> jax.Array:
        """Handles within one shard of the items in `slots` [B], which are in range; -1 for an empty slot."""
        return ring.handles(state.ring, slots, self._num_slots)

    def _local_slots(self, state: S, handles: jax.Array) -> jax.Array:
        """Slots of `handles` [B] within one shard; `_num_slots` for an item that is no longer stored."""
        return ring.slots(state.ring, handles, self._num_slots)

    def _handles(self, state: S, slots: jax.Array) -> jax.Array:
        """Handles of the items in `slots`, unique among all shards."""
        handles = self._local_handles(state, slots)
        return jnp.where(handles >= 0, handles + ring.first_handle(state.ring, shards.index(self._axis_name)), -1)

    def _slots(self, state: S, handles: jax.Array) -> jax.Array:
        """Slots of `handles`, which are unique among all shards."""
        return self._local_slots(state, handles - ring.first_handle(state.ring, shards.index(self._axis_name)))

    @jit_method(donates=True, handles="indices")
    def update(self, state: S, indices: jax.Array, td_errors: jax.Array) -> S:
        """Give the sampler the TD errors of drawn items, and count their uses. `Uniform` and `Recent` ignore TD errors.

        Args:
          state: donated when called eagerly (see the class).
          indices: int [B], handles from `Sample.indices`. A handle whose item has been overwritten is ignored. The last
            occurrence of a handle counts.
          td_errors: float [B], signed or not.

        Raises:
          ValueError: other shapes or dtypes.

        Examples:
          >>> buffer = jr.ReplayBuffer(capacity=4, sampler=jr.Prioritized(epsilon=0.0))
          >>> items = jnp.array([10, 20, 30, 40])
          >>> state = buffer.add(buffer.init(items), items)
          >>> td_errors = jnp.array([0.0, 0.0, -2.0, 0.0])
          >>> state = buffer.update(state, buffer.newest(state, 4), td_errors)
          >>> buffer.sample(state, jax.random.key(0), batch_size=4).items.tolist()
          [30, 30, 30, 30]
        """
        self._check_state(state)
        indices, td_errors = checks.check_td_errors(indices, td_errors)
        slots = self._slots(state, indices)
        stored = slots < self._num_slots
        slots = jnp.where(indices >= 0, slots, -1)
        uses, spent = _uses.update(state.uses, slots, self.max_uses)
        named: Any = self._axis if spent is None else self._axis | {"spent": spent}
        sampler = self.sampler.update(state.sampler, slots, td_errors, stored, **named)
        # Orders the next `add` after the draws of these TD errors, and after all reads of handles.
        changed = {"sampler": sampler, "uses": uses, "ring": ring.after(state.ring, slots, td_errors)}
        return dataclasses.replace(state, **changed)  # pyright: ignore[reportArgumentType]

    @jit_method(donates=True, handles="indices")
    def set(self, state: S, indices: jax.Array, values: Any, *, mask: jax.Array | None = None) -> S:
        """Write leaves of stored items in place, such as recomputed recurrent states.

        Args:
          state: donated when called eagerly (see the class).
          indices: int [B], handles from `Sample.indices`. A handle whose item has been overwritten is ignored. The last
            occurrence of a handle counts.
          values: a pytree of the items' structure, leaves [B, ...] ([B, sequence_length, ...] for a `SequenceBuffer`)
            of the stored shapes and dtypes. None leaves a leaf, or a subtree, unchanged.
          mask: bool [B] ([B, sequence_length]), True for rows to write; None for all. Rows of a `TransitionBatch` that
            are not `valid` are not written. Where sequences overlap, the later row of the batch counts.

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
        mask = rows_to_write(mask, valid, places.shape)
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

    @jit_method(static=("n",))
    def _newest(self, state: S, n: int) -> jax.Array:
        self._check_state(state)
        live = ring.newest(state.ring, state.ring.size, self._num_slots)
        position = live.size - n + jnp.arange(n, dtype=jnp.int32)
        slots = live.slots(jnp.maximum(position, 0), self._num_slots)
        return jnp.where(position >= 0, self._handles(state, slots), -1)

    @jit_method(handles="indices")
    def get(self, state: S, indices: jax.Array) -> Any:
        """Items [B, ...] by their handles `indices`, int [B]; zeros for items that are no longer stored.

        Raises:
          ValueError: `indices` is not a vector of integers.

        Examples:
          >>> buffer = jr.ReplayBuffer(capacity=4)
          >>> items = jnp.array([10, 20, 30])
          >>> state = buffer.add(buffer.init(items), items)
          >>> handles = buffer.newest(state, 3)
          >>> # Overwrites 10 and 20; no handle names another item instead.
          >>> state = buffer.add(state, items + 5)
          >>> buffer.get(state, handles).tolist()
          [0, 0, 30]
        """
        self._check_state(state)
        return self._read(state, self._slots(state, checks.check_indices(indices)), fill=True)[0]

    @jit_method(handles="slots")
    def handles(self, state: S, slots: jax.Array) -> jax.Array:
        """Handles of the items in `slots`, int [B]; int32 [B], -1 for a slot that is empty or out of range.

        Raises:
          ValueError: `slots` is not a vector of integers.

        Examples:
          >>> buffer = jr.ReplayBuffer(capacity=4)
          >>> state = buffer.add(buffer.init(jnp.zeros(3)), jnp.array([10.0, 20.0, 30.0]))
          >>> state = buffer.add(state, jnp.array([40.0, 50.0]))  # 50 overwrites 10
          >>> buffer.handles(state, jnp.arange(5)).tolist()
          [4, 1, 2, 3, -1]
        """
        self._check_state(state)
        slots = checks.check_indices(slots, name="slots")
        inside = (slots >= 0) & (slots < self._num_slots)
        return jnp.where(inside, self._handles(state, jnp.where(inside, slots, 0)), -1)

    @jit_method(handles="indices")
    def slots(self, state: S, indices: jax.Array) -> jax.Array:
        """Slots of items by their handles `indices`, int [B]; int32 [B], the number of slots if no longer stored.

        A slot keeps its item until the item is overwritten. Use slots to index an array of your own with a row for each
        slot: `x.at[slots].set(rows, mode="drop")` ignores items that are no longer stored.

        Raises:
          ValueError: `indices` is not a vector of integers.

        Examples:
          >>> buffer = jr.ReplayBuffer(capacity=4)
          >>> state = buffer.add(buffer.init(jnp.zeros(3)), jnp.array([10.0, 20.0, 30.0]))
          >>> buffer.slots(state, jnp.array([2, 7])).tolist()  # no item has handle 7 yet
          [2, 4]
        """
        self._check_state(state)
        return self._slots(state, checks.check_indices(indices))

    @jit_method(handles="indices")
    def priorities(self, state: S, indices: jax.Array) -> jax.Array:
        """Priorities of items by their handles `indices`, int [B]; float32 [B], 0 if no longer stored or not drawable.

        The priority is before alpha. It is computed from the stored p^alpha: its relative error is about 1e-7 / alpha,
        and a priority whose p^alpha was clipped is returned clipped. It is 1 with `Uniform` and `Recent`, and if alpha
        is 0.

        Raises:
          ValueError: `indices` is not a vector of integers, or the sampler has no method `priorities`.

        Examples:
          >>> buffer = jr.ReplayBuffer(capacity=4, sampler=jr.Prioritized(epsilon=0.0))
          >>> items = jnp.array([10.0, 20.0, 30.0])
          >>> td_errors = jnp.array([-4.0, 1.0, 0.0])
          >>> state = buffer.add(buffer.init(items), items, td_errors=td_errors)
          >>> [round(x, 3) for x in buffer.priorities(state, jnp.array([0, 1, 2, 3])).tolist()]
          [4.0, 1.0, 0.0, 0.0]
        """
        self._check_state(state)
        if not hasattr(self.sampler, "priorities"):
            raise ValueError(f"sampler={self.sampler!r}: has no method priorities(state, slots).")
        slots, stored = self._stored(state, indices)
        stored &= _uses.is_unspent(state.uses, slots)
        return jnp.where(stored, self.sampler.priorities(state.sampler, slots), 0.0)

    @jit_method(handles="indices")
    def age(self, state: S, indices: jax.Array) -> jax.Array:
        """`Sample.age` of items by their handles `indices`, int [B]; int32 [B], -1 if no longer stored.

        Raises:
          ValueError: `indices` is not a vector of integers.

        Examples:
          >>> buffer = jr.ReplayBuffer(capacity=4)
          >>> items = jnp.array([10.0, 20.0, 30.0])
          >>> state = buffer.add(buffer.init(items), items)
          >>> buffer.age(state, jnp.array([0, 2, -1])).tolist()
          [2, 0, -1]
        """
        self._check_state(state)
        slots, stored = self._stored(state, indices)
        return jnp.where(stored, self._ages(state, slots), -1)

    def _stored(self, state: S, indices: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Slots of items by their handles, 0 if no longer stored; and a flag, True if stored, [B] each."""
        slots = self._slots(state, checks.check_indices(indices))
        stored = slots < self._num_slots
        return jnp.where(stored, slots, 0), stored
