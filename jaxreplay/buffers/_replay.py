"""ReplayBuffer: a ring of independent items."""

import dataclasses
import math
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import struct

from jaxreplay._common import checks, layouts, ring
from jaxreplay._common.calls import method
from jaxreplay._common.checks import check_integer, set_fields
from jaxreplay._common.devices import on_device_of
from jaxreplay._common.xla import reads_state
from jaxreplay.buffers import _uses
from jaxreplay.buffers._base import Buffer
from jaxreplay.buffers._size import State
from jaxreplay.samplers import Sampler, Uniform
from jaxreplay.samplers._protocol import check_sampler
from jaxreplay.transitions._batch import check_returns, rows_to_write, without_valid

WHAT = {1: "a batch of items", 2: "a rollout"}  # by number of leading axes


@struct.dataclass(kw_only=True)
class ReplayState(State):
    """State of a `ReplayBuffer`.

    Attributes:
      storage: the items, leaves [capacity, ...] as the backend wants them (`jaxreplay._common.layouts`).
      ring: cursor and fill.
      sampler: the sampler's state.
      uses: of the items (`jaxreplay.buffers._uses`); None without `count_updates` and `max_uses`.

    Examples:
      >>> buffer = jr.ReplayBuffer(capacity=4)
      >>> items = jnp.array([10, 20, 30])
      >>> state = buffer.add(buffer.init(items), items)
      >>> isinstance(state, jr.buffers.ReplayState), int(state.ring.size)
      (True, 3)
    """


@checks.keywords_only
@dataclasses.dataclass(frozen=True, kw_only=True)
class ReplayBuffer(Buffer[ReplayState]):
    """Replay of independent items; the oldest is overwritten first.

    The configuration is static and hashable; all arrays live in the `ReplayState` that the methods take and return.
    Called eagerly, `add`, `update` and `set` donate their state: the storage is changed in place, and the old state
    must not be used again. Inside an outer `jax.jit` they are plain pure functions.

    Attributes:
      capacity: number of items kept, 1 to 2**29.
      sampler: the sampling distribution, `Uniform()` or `Prioritized(...)`.
      axes: number of leading axes of items in `init` and `add`: 1 for [B, ...], 2 for rollouts [T, num_envs, ...],
        whose rows are inserted in order of time.
      count_updates: count how often each item is updated, and how many updates come too late (reported by
        `jaxreplay.diagnostics`); costs 4 bytes per item.
      max_uses: an item that was updated so often is no longer drawn; None for no bound. Every row of `update` that
        names the item counts, so an item that was drawn twice in a batch comes back twice. The count starts at 0 when
        the slot is overwritten. `size` and `can_sample` count the items that may still be drawn, and `epoch` leaves a
        row without an item where one is spent. If all are spent, rows have handle -1 and weight 0, as from an empty
        buffer. Costs about 8 bytes per item. `Recent` is rejected; `Uniform(replacement=False)` needs at most 2**23
        slots.
      donate: donate the state when `add`, `update` or `set` is called eagerly.

    Examples:
      >>> buffer = jr.ReplayBuffer(capacity=4)
      >>> items = jnp.array([10, 20, 30])
      >>> state = buffer.add(buffer.init(items), items)
      >>> state = buffer.add(state, items + 5)
      >>> # The oldest, 10 and 20, are overwritten.
      >>> buffer.get(state, buffer.newest(state, 4)).tolist()
      [30, 15, 25, 35]
    """

    capacity: int
    sampler: Sampler = Uniform()
    axes: int = 1
    count_updates: bool = False
    max_uses: int | None = None
    donate: bool = True
    _axis_name: str | None = dataclasses.field(default=None, repr=False)
    _state_kind: ClassVar[type] = ReplayState

    def __post_init__(self):
        capacity = check_integer("capacity", self.capacity, 1, ring.MAX_CAPACITY, "the number of items kept")
        axes = check_integer("axes", self.axes, 1, 2, "1 for batches, 2 for rollouts")
        set_fields(self, capacity=capacity, sampler=check_sampler(self.sampler), axes=axes)
        _uses.check(self)

    def init(self, items: Any) -> ReplayState:
        """An empty buffer for items like these.

        Args:
          items: pytree [B, ...] of arrays or `jax.ShapeDtypeStruct`, as `add` will take them; values are ignored, and
            `TransitionBatch.valid` is not stored.

        Raises:
          ValueError: no leaves, leaves whose batch axes differ, or a `TransitionBatch` whose `In` or `W` has another
            shape than its `Rn`; or the state does not fit the device.

        Examples:
          >>> buffer = jr.ReplayBuffer(capacity=4)
          >>> rows = {
          ...     "obs": jax.ShapeDtypeStruct((3, 2), jnp.uint8),
          ...     "reward": jax.ShapeDtypeStruct((3,), jnp.float32),
          ... }
          >>> state = buffer.init(rows)  # rows [3, ...] as `add` takes them
          >>> int(buffer.size(state)), buffer.get(state, jnp.array([0]))["obs"].dtype
          (0, dtype('uint8'))
        """
        spec, _ = without_valid(checks.as_spec(items))
        checks.leading_axes(spec, self.axes, WHAT[self.axes])
        check_returns(spec)
        with on_device_of(items):
            return ReplayState(
                storage=layouts.zeros(spec, (self.capacity,), self.axes),
                ring=ring.init(self.capacity),
                sampler=self.sampler.init(self.capacity),
                uses=_uses.init(self),
            )

    @method(rows=("items", "mask", "td_errors"), is_batch=True, donates=True)
    def add(
        self,
        state: ReplayState,
        items: Any,
        *,
        mask: jax.Array | None = None,
        td_errors: jax.Array | None = None,
    ) -> ReplayState:
        """Insert a batch in order, overwriting the oldest items once the buffer is full.

        Args:
          state: donated when called eagerly (see the class).
          items: pytree [B, ...] with the structure, item shapes and dtypes given to `init`; 1 <= B <= capacity.
          mask: bool [B], True for rows to insert; None for all. Rows of a `TransitionBatch`, which may be a part of the
            items, are inserted only if `valid`.
          td_errors: float [B], signed or not: initial TD errors; NaN or None means unknown. `Uniform` ignores it.

        With `axes=2`, [T, num_envs] replaces [B], and 1 <= T * num_envs <= capacity.

        Raises:
          ValueError: wrong structure, shape, dtype or batch size; the message names the leaf.

        Examples:
          >>> buffer = jr.ReplayBuffer(capacity=4)
          >>> items = jnp.array([10, 20, 30])
          >>> state = buffer.add(buffer.init(items), items, mask=jnp.array([True, False, True]))
          >>> buffer.get(state, buffer.newest(state, 3)).tolist()  # two are stored
          [0, 10, 30]
        """
        items, valid = without_valid(checks.as_arrays(items))
        stored = layouts.stored_spec(state.storage)
        checks.check_structure(items, stored, "the buffer")
        leading = checks.leading_axes(items, self.axes, WHAT[self.axes])
        batch_size = math.prod(leading)
        if not 1 <= batch_size <= self.capacity:
            raise ValueError(
                f"batch of {batch_size} items: expected 1 to capacity={self.capacity}; add it in parts, or raise "
                "the capacity."
            )
        mask = rows_to_write(mask, valid, leading)
        mask = None if mask is None else mask.reshape(-1)
        if td_errors is not None:
            td_errors = checks.check_insertion_errors(td_errors, leading, "an item")
        checks.check_like(items, stored, self.axes, 1, "the buffer")
        items = layouts.merge_axes(items) if self.axes == 2 else items
        slots, count = ring.next_slots(ring.after(state.ring, items), mask, batch_size, self.capacity)
        return ReplayState(
            storage=layouts.write(state.storage, slots, items),
            ring=ring.advance(state.ring, count, self.capacity),
            **self._insert(state, slots, jnp.ones(batch_size, bool), td_errors),
        )

    @reads_state
    def is_full(self, state: ReplayState) -> jax.Array:
        """True if the next insertion overwrites, bool [].

        Examples:
          >>> buffer = jr.ReplayBuffer(capacity=4)
          >>> items = jnp.array([10, 20, 30])
          >>> state = buffer.add(buffer.init(items), items)
          >>> bool(buffer.is_full(state)), bool(buffer.is_full(buffer.add(state, items)))
          (False, True)
        """
        return ring.at_least(state.ring.size, self.capacity)

    @property
    def _batch_axes(self) -> int:
        return self.axes

    @property
    def _num_slots(self) -> int:
        return self.capacity

    def _live(self, state: ReplayState, max_age: jax.Array | None = None) -> ring.Live:
        if max_age is None:
            return ring.newest(state.ring, state.ring.size, self.capacity) if self._by_age else ring.live(state.ring)
        share = -(-max_age // ring.num_shards(self._axis_name))
        return ring.newest(state.ring, share, self.capacity)

    def _ages(self, state: ReplayState, slots: jax.Array) -> jax.Array:
        return ring.ages(state.ring, slots, self.capacity) * ring.num_shards(self._axis_name)

    def _read(self, state: ReplayState, slots: jax.Array, fill: bool) -> tuple[Any, None]:
        return layouts.read(state.storage, slots, fill=fill), None
