"""Buffer: base of all buffers. It draws, reads and writes items; a subclass defines their slots and storage."""

import abc
import dataclasses
from typing import Any, ClassVar, Generic

import jax
import jax.numpy as jnp

from jaxreplay._common import calls, checks, layouts, random, ring, xla
from jaxreplay.buffers import _sample, _uses
from jaxreplay.buffers._sample import Sample
from jaxreplay.buffers._state import S, Sized, check_once, check_state, sizes
from jaxreplay.samplers import Sampler, Uniform
from jaxreplay.samplers._base import check_sampler
from jaxreplay.transitions import TransitionBatch
from jaxreplay.transitions._batch import rows_to_write, without_valid


@checks.config
class Buffer(Sized, Generic[S]):
    """Base of all buffers, which are final frozen dataclasses. Items are in slots, mostly a ring."""

    sampler: Sampler = checks.field(check_sampler, default=Uniform())
    count_updates: bool = checks.field(checks.check_bool, "whether to count updates", default=False)
    max_uses: int | None = checks.field(
        checks.optional(checks.check_integer), 1, _uses.MOST, "a number of updates, or None for no bound", default=None
    )
    donate: bool = True
    # The mapped axis over all shards; None for a buffer without shards.
    _axis_name: str | None = dataclasses.field(default=None, repr=False)
    _num_shards: int = dataclasses.field(default=1, repr=False)
    # Number of consecutive slots of one `Sample.age`, and the difference to the next ones' age.
    _slots_of_ages = property(lambda self: (1, float(self._num_shards)))
    # Fields with the sizes of the storage's leading axes. Memory grows with the first; shards divide the last.
    _storage_axes: ClassVar[tuple[str, ...]] = ("capacity",)
    _state_kind: ClassVar[type]
    _keeps_order: ClassVar[bool] = True  # False if slots say nothing about ages

    def _check_fields(self) -> None:
        if self.sampler.by_age:
            self._check_order(f"sampler={self.sampler!r}", ", or another sampler")
        if self.max_uses is not None and not self.sampler.takes_spent:
            rule = "draws by age among all items; use another sampler"
            raise ValueError(f"max_uses={self.max_uses}: {self.sampler!r} {rule}.")
        object.__setattr__(self, "sampler", self.sampler._with_ages(*self._slots_of_ages))

    def _check_order(self, asked: str, remedy: str = "") -> None:
        """Raise a `ValueError` if the buffer keeps no order of age, which `asked` needs."""
        if not self._keeps_order:
            raise ValueError(f"{asked}: a {type(self).__name__} keeps no order; use a ReplayBuffer{remedy}.")

    @abc.abstractmethod
    def init(self, items: Any, /) -> S:
        """State of an empty buffer for items like these."""

    @abc.abstractmethod
    def add(self, state: S, *args: Any, **kwargs: Any) -> S:
        """Insert a batch of items."""

    @abc.abstractmethod
    def _ages(self, state: S, slots: jax.Array) -> jax.Array:
        """`Sample.age` of the items in `slots` [B]."""

    @abc.abstractmethod
    def _read(self, state: S, slots: jax.Array, fill: bool) -> tuple[Any, jax.Array | None]:
        """Items at `slots` [B] and `Sample.mask`; with `fill`, zeros for slots out of range, else none may be."""

    def _places(self, state: S, slots: jax.Array) -> jax.Array:
        """Positions of items in the storage with merged leading axes, from `slots` [B]; out of range if not stored."""
        return slots

    def _own_handles(self, state: S, slots: jax.Array) -> jax.Array:
        """Handles, within this shard, of the items in `slots` [B], which are in range; -1 for an empty slot."""
        return state.ring.handles(slots)

    def _own_slots(self, state: S, handles: jax.Array) -> jax.Array:
        """Slots of handles [B] within this shard; the number of slots for an item that is not stored."""
        return state.ring.slots(handles)

    def _handles(self, state: S, slots: jax.Array) -> jax.Array:
        """Handles of the items in `slots` [B], which are in range, unique among all shards; -1 for an empty slot."""
        handles = self._own_handles(state, slots)
        return jnp.where(handles >= 0, handles + self._first_handle(state), -1) if self._axis_name else handles

    def _slots(self, state: S, handles: jax.Array) -> jax.Array:
        """Slots of `handles` [B]; the number of slots for an item that is no longer stored in this shard."""
        return self._own_slots(state, handles - self._first_handle(state) if self._axis_name else handles)

    def _first_handle(self, state: S) -> jax.Array:
        """The first handle of this shard."""
        return jax.lax.axis_index(self._axis_name) * state.ring.period

    @property
    def _fills_rows(self) -> bool:
        """True if every row of a draw holds an item, unless there is none."""
        return self.sampler.fills_rows and self.max_uses is None

    @property
    def _batch_axes(self) -> int:
        """Number of leading axes of a batch for `add`; shards get equal parts along the last of them."""
        return len(self._storage_axes)

    _check_state = check_state

    def _younger(self, state: S, max_age: jax.Array) -> ring.Live:
        """The slots of items with a `Sample.age` below `max_age` (int32 []); only if the buffer keeps an order."""
        raise NotImplementedError

    def _own_key(self, key: jax.Array) -> jax.Array:
        """The key of this shard."""
        if self._axis_name is None:
            return key
        return jax.random.fold_in(key, jax.lax.axis_index(self._axis_name))

    def _why_empty(self, state: S) -> str:
        """The error message of a draw from an empty buffer."""
        return "cannot sample from an empty buffer; add items first (see can_sample)."

    def _empty(self, spec: Any) -> Any:
        """The fields that every empty state has, for items of `spec` with the leading axes of a batch."""
        return {
            "storage": layouts.zeros(spec, tuple(sizes(self).values()), self._batch_axes),
            "ring": ring.init(self.num_slots, self._num_shards),
            "sampler": self.sampler.init(self.num_slots),
            "uses": _uses.init(self),
        }

    def _insert(self, state: S, slots: jax.Array, drawable: jax.Array, td_errors: jax.Array | None) -> Any:
        """The fields `sampler` and `uses` after `slots` were written."""
        named = {"td_errors": td_errors, "axis_name": self._axis_name}  # a sampler need not take what is not given
        named = {name: x for name, x in named.items() if x is not None}
        sampler = self.sampler.insert(state.sampler, slots, drawable, **named)
        return {"sampler": sampler, "uses": state.uses and state.uses.insert(slots, drawable)}

    @calls.method(num_rows="batch_size", before=_sample.sample_arguments, after=_sample.reject_empty)
    def sample(
        self, state: S, key: jax.Array, batch_size: int, *, beta: Any = None, max_age: jax.Array | int | None = None
    ) -> Sample:
        """Draw items by the sampling distribution.

        If the items are a `TransitionBatch`, its `W` is multiplied by the weights (or set to them if None), and its
        `idx` is set to the handles.

        Args:
          state: unchanged.
          key: a PRNG key.
          batch_size: number of draws.
          beta: exponent of the importance weights, in place of the sampler's; a number in [0, 1], or a traced float [],
            which is clipped (NaN counts as 1). The call waits for a concrete array.
          max_age: draw only items whose `Sample.age` is less; an integer, a traced int32 [], or None for all items.
            Probabilities and weights are conditional on these items.

        Returns:
          `Sample`.

        Raises:
          ValueError: `batch_size` or `max_age` is not a positive integer, or `key` is not a PRNG key; or the buffer is
            empty, the call is eager and the size is already computed. The call waits for nothing: otherwise, as under
            `jit`, an empty buffer gives weights and probabilities 0 and indices -1.

        Examples:
          >>> state = buffer.update(state, np.array([1, 2]), np.array([0.0, 9.0]))
          >>> sample = buffer.sample(state, key, batch_size=4, beta=1.0)
          >>> sample.items.tolist()  # 20 has priority 0, and 30 a larger one than 10
          [10, 30, 30, 30]
          >>> [round(weight, 2) for weight in sample.weights.tolist()]
          [1.0, 0.27, 0.27, 0.27]
        """
        if self.sampler.is_distinct and batch_size > self.num_slots:
            rule = f"at most {self.num_slots}, the slots, as each is drawn once; draw fewer, or with replacement"
            raise ValueError(f"got a draw of {batch_size} rows, expected {rule}.")
        key = self._own_key(key)
        live, sampler_state = state.ring.live(), state.sampler
        if max_age is not None:
            self._check_order("max_age")
            live = self._younger(state, checks.as_count(max_age))
            sampler_state = self.sampler.restrict(state.sampler, live)
        if state.uses is not None:
            live = state.uses.live(live, max_age is not None)
        live = dataclasses.replace(live, axis_name=self._axis_name)
        drawn = self.sampler.sample(sampler_state, key, batch_size, live)
        if self._axis_name is not None:  # JAX 0.10 joins only arrays that vary over the mesh; constants do not
            drawn = [jnp.where(live.size >= 0, x, x) for x in drawn]
        slots, probabilities = xla.read_once(xla.materialize(*drawn))
        weights = self.sampler.weights(sampler_state, probabilities, live, beta=beta)
        return self._sample_of(state, slots, probabilities / ring.num_shards(self._axis_name), weights)

    @calls.method(num_rows="batch_size", before=_sample.epoch_arguments, after=_sample.reject_empty)
    def epoch(self, state: S, key: jax.Array, batch_size: int, *, step: jax.Array | int) -> Sample:
        """Batch number `step` of a pass over all drawable items, each once, in an order shuffled by `key`.

        The order is computed and not stored, in O(batch_size) a call. All batches of a pass need the same key, and a
        buffer to which nothing is added in between. `num_batches` is their number. Weights are 1 for every sampler.

        Args:
          state: unchanged.
          key: a PRNG key, one for a pass.
          step: the batch's number, from 0; an integer, or a traced int32 [].
          batch_size: number of rows. Rows after the end of the pass have handle -1, probability 0 and weight 0.

        Raises:
          ValueError: `batch_size` is not a positive integer, `step` is not an integer or is negative, or `key` is not a
            PRNG key; or the buffer is empty, as in `sample`.

        Examples:
          >>> first, second = (buffer.epoch(state, key, 2, step=step) for step in range(2))
          >>> sorted(first.items.tolist() + second.items[:1].tolist()), second.weights.tolist()
          ([10, 20, 30], [1.0, 0.0])
        """
        key = self._own_key(key)
        live = state.ring.live()
        end = -(-live.size // batch_size)
        step = checks.as_int32(step)
        step = jnp.where((step >= 0) & (step < end), step, end)
        position = step * batch_size + jnp.arange(batch_size, dtype=jnp.int32)
        exists = position < live.size
        order = jax.random.clone(key)  # batches of a pass share a key; cloned, it does not count as reused
        slots = live.slots(random.permuted(order, position, live.size))
        exists &= _uses.is_unspent(state.uses, slots)
        slots, exists = xla.materialize(slots, exists)
        probability = 1.0 / jnp.maximum(live.size, 1).astype(jnp.float32)
        return self._sample_of(state, slots, jnp.where(exists, probability, 0.0), exists.astype(jnp.float32))

    def num_batches(self, state: S, batch_size: int) -> jax.Array:
        """Number of batches of an `epoch`, int32 [].

        Examples:
          >>> int(buffer.num_batches(state, batch_size=2))  # of three items
          2
        """
        batch_size = checks.check_integer("batch_size", batch_size, *_sample.BATCH_SIZE)
        check_once(self, state)
        return -(-state.ring.size // batch_size)

    def _sample_of(self, state: S, slots: jax.Array, probabilities: jax.Array, weights: jax.Array) -> Sample:
        """A sample of the items at `slots` [B], which are in range; rows of probability 0 have no item."""
        drawn = probabilities > 0
        indices = jnp.where(drawn, self._handles(state, slots), -1)
        age = jnp.where(indices >= 0, self._ages(state, slots), -1)
        items, mask = xla.read_once(self._read(state, slots, fill=False))
        if mask is not None:
            mask &= (indices >= 0)[:, None]
        if isinstance(items, TransitionBatch):
            items = items.with_draw(weights, indices)
        return Sample(items, indices, probabilities, weights, mask, age)

    def size(self, state: S) -> jax.Array:
        """Number of drawable items, int32 [].

        Examples:
          >>> int(buffer.size(state))
          3
        """
        return xla.copy(self._count(state))  # a later call may donate the state

    def _count(self, state: S) -> jax.Array:
        check_once(self, state)
        return _uses.num_drawable(state.uses, state.ring.size)

    def is_full(self, state: S) -> jax.Array:
        """True if the storage is full, so that the next stored item (or step) overwrites one, bool [].

        Examples:
          >>> bool(buffer.is_full(state)), bool(buffer.is_full(buffer.add(state, items)))
          (False, True)
        """
        check_once(self, state)
        rows = getattr(state, "rows", state.ring)  # of the storage's first axis
        return ring.at_least(rows.size, rows.capacity)

    @property
    @abc.abstractmethod
    def num_slots(self) -> int:
        """Number of slots: the maximum number of drawable items (sequences).

        Examples:
          >>> buffer.num_slots, sequences.num_slots  # 4 items; 7 starts in one stream
          (4, 7)
        """

    @calls.method(donates=True)
    def clear(self, state: S) -> S:
        """Remove all items and keep the storage. Handles go on, so that no earlier handle names a new item.

        Counters, such as the number of updates and the largest priority ever, and replaced settings (`alpha`) stay too.
        Counts of uses start at 0 again. Costs O(capacity) for the sampler's priorities, and does not touch the items.

        Examples:
          >>> state = buffer.add(buffer.clear(state), items + 5)
          >>> int(buffer.size(state)), buffer.newest(state, 3).tolist()
          (3, [3, 4, 5])
        """
        return dataclasses.replace(state, **self._emptied(state))

    def _emptied(self, state: S) -> dict[str, Any]:
        """The fields of the state that `clear` changes."""
        sampler = self.sampler.cleared(state.sampler, self.num_slots)
        return {"ring": state.ring.emptied(), "sampler": sampler, "uses": state.uses and state.uses.cleared()}

    @calls.method(rows=("indices", "td_errors"), donates=True)
    def update(self, state: S, indices: jax.Array, td_errors: jax.Array) -> S:
        """Update the priorities of drawn items from their TD errors, and count uses. `Uniform` and `Recent` have none.

        Args:
          state: donated when called eagerly (see the class).
          indices: int [B], handles from `Sample.indices`. A handle whose item has been overwritten is ignored. The last
            occurrence of a handle counts.
          td_errors: float [B], signed or not.

        Examples:
          >>> state = buffer.update(state, np.array([0, 1, 2]), np.array([0.0, 0.0, -2.0]))
          >>> buffer.sample(state, key, batch_size=4).items.tolist()
          [30, 30, 30, 30]
        """
        expected = f"one number for each of the {indices.size} indices"
        if len(self._storage_axes) > 1 and jnp.ndim(td_errors) > 1:
            expected += "; jr.sequence_priority(td_errors, sample.mask) makes one of those of a sequence's steps"
        td_errors = checks.as_real("td_errors", td_errors, expected, indices.shape, checks.REAL)
        (slots,) = xla.materialize(self._slots(state, indices))
        stored = slots < state.ring.capacity
        slots = jnp.where(indices >= 0, slots, -1)
        uses, spent = state.uses, None
        if uses is not None:
            uses, spent = uses.update(slots, self.max_uses)
        named = {name: x for name, x in {"spent": spent, "axis_name": self._axis_name}.items() if x is not None}
        sampler = self.sampler.update(state.sampler, slots, td_errors, stored, **named)
        # Orders the next `add` after the draws of these TD errors, and after all reads of handles.
        return dataclasses.replace(state, sampler=sampler, uses=uses, ring=state.ring.after(slots, td_errors))

    @calls.method(rows=("indices", "values", "mask"), donates=True)
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

        Examples:
          >>> handles = np.array([0, 1, 2])
          >>> state = buffer.set(state, handles, items + 1, mask=np.array([True, False, True]))
          >>> buffer.get(state, handles).tolist()
          [11, 20, 31]
        """
        slots = self._slots(state, indices)
        places = self._places(state, slots)
        spec, num_axes = layouts.stored_spec(state.storage), len(self._storage_axes)
        values, valid = without_valid(checks.as_arrays(values))
        values = checks.check_parts(values, spec, places.shape, num_axes, "the buffer")
        mask = rows_to_write(mask, valid, places.shape)
        storage = layouts.write_parts(state.storage, num_axes, places, mask, values)
        return dataclasses.replace(state, storage=storage, ring=state.ring.after(slots))  # as `update`

    @calls.method(num_rows="n", before=_sample.newest_arguments)
    def newest(self, state: S, n: int) -> jax.Array:
        """Handles of the newest `n` insertions, int32 [n], oldest first; -1 where there are none.

        Raises:
          ValueError: `n` is not a positive integer, or is above `num_slots` (of a `Sharded`, of all shards).

        Examples:
          >>> buffer.newest(state, 4).tolist()  # three items were added
          [-1, 0, 1, 2]
        """
        self._check_order("newest")
        live = state.ring.live()
        position = live.size - n + jnp.arange(n, dtype=jnp.int32)
        slots = live.slots(jnp.maximum(position, 0))
        return jnp.where(position >= 0, self._handles(state, slots), -1)

    @calls.method(rows=("indices",))
    def get(self, state: S, indices: jax.Array) -> Any:
        """Items [B, ...] by their handles `indices`, int [B]; zeros for items that are no longer stored.

        Examples:
          >>> state = buffer.add(state, items + 5)  # overwrites 10 and 20
          >>> buffer.get(state, np.array([0, 1, 2, 3])).tolist()
          [0, 0, 30, 15]
        """
        return self._read(state, self._slots(state, indices), fill=True)[0]

    @calls.method(rows=("slots",))
    def handles(self, state: S, slots: jax.Array) -> jax.Array:
        """Handles of the items in `slots`, int [B]; int32 [B], -1 for a slot that is empty or out of range.

        Examples:
          >>> state = buffer.add(state, np.array([40, 50]))  # 50 overwrites 10
          >>> buffer.handles(state, np.arange(5)).tolist()
          [4, 1, 2, 3, -1]
        """
        inside = (slots >= 0) & (slots < state.ring.capacity)
        return jnp.where(inside, self._handles(state, jnp.where(inside, slots, 0)), -1)

    @calls.method(rows=("indices",))
    def slots(self, state: S, indices: jax.Array) -> jax.Array:
        """Slots of items by their handles `indices`, int [B]; int32 [B], the number of slots if no longer stored.

        A slot keeps its item until the item is overwritten. Use slots to index an array of your own with a row for each
        slot: `x.at[slots].set(rows, mode="drop")` ignores items that are no longer stored.

        Examples:
          >>> buffer.slots(state, np.array([2, 7])).tolist()  # no item has handle 7 yet
          [2, 4]
        """
        return self._slots(state, indices)

    @calls.method(rows=("indices",))
    def priorities(self, state: S, indices: jax.Array) -> jax.Array:
        """Priorities of items by their handles `indices`, int [B]; float32 [B], 0 if no longer stored or not drawable.

        The priority is before alpha. It is computed from the stored p^alpha: its relative error is about 1e-7 / alpha,
        and a priority whose p^alpha was clipped is returned clipped. It is 1 with `Uniform` and `Recent`, and if alpha
        is 0.

        Examples:
          >>> state = buffer.update(state, np.array([0, 2]), np.array([-4.0, 0.0]))
          >>> [round(x, 3) for x in buffer.priorities(state, np.array([0, 1, 2, 3])).tolist()]
          [4.0, 1.0, 0.0, 0.0]
        """
        slots, stored = self._stored(state, indices)
        stored &= _uses.is_unspent(state.uses, slots)
        return jnp.where(stored, self.sampler.priorities(state.sampler, slots), 0.0)

    @calls.method(rows=("indices",))
    def age(self, state: S, indices: jax.Array) -> jax.Array:
        """Ages (as `Sample.age`) of items by their handles `indices`, int [B]; int32 [B], -1 if no longer stored.

        Examples:
          >>> buffer.age(state, np.array([0, 2, -1])).tolist()
          [2, 0, -1]
        """
        slots, stored = self._stored(state, indices)
        return jnp.where(stored, self._ages(state, slots), -1)

    def _stored(self, state: S, indices: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Slots of items by their handles, 0 if no longer stored; and a flag, True if stored, [B] each."""
        slots = self._slots(state, indices)
        stored = slots < state.ring.capacity
        return jnp.where(stored, slots, 0), stored
