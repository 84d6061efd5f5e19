"""ReplayBuffer: a ring of independent items. ItemBuffer: base of the buffers with one item in each slot."""

import math
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import struct

from jaxreplay._common import calls, checks, devices, layouts, ring
from jaxreplay.buffers._base import Buffer
from jaxreplay.buffers._state import S, State
from jaxreplay.transitions._batch import TransitionBatch, check_returns, rows_to_write, without_valid

WHAT = {1: "a batch of items", 2: "a rollout"}  # by number of leading axes


@checks.config
class ItemBuffer(Buffer[S]):
    """A buffer of `capacity` items."""

    capacity: int = checks.field(checks.check_integer, 1, ring.MAX_CAPACITY, "the number of items kept")

    def init(self, items: Any) -> S:
        """State of an empty buffer for items like these.

        Args:
          items: pytree [B, ...] of arrays or `jax.ShapeDtypeStruct`, as `add` will take them; values are ignored, and
            `TransitionBatch.valid` is not stored.

        Raises:
          ValueError: no leaves, leaves whose batch axes differ, or a `TransitionBatch` whose `In` or `W` has another
            shape than its `Rn`; or the state does not fit the device.

        Examples:
          >>> rows = {"obs": jax.ShapeDtypeStruct((3, 2), jnp.uint8), "reward": np.zeros(3)}
          >>> state = buffer.init(rows)  # rows [3, ...] as `add` takes them
          >>> int(buffer.size(state)), buffer.get(state, np.array([0]))["obs"].dtype
          (0, dtype('uint8'))
        """
        spec, _ = without_valid(checks.as_spec(items))
        checks.leading_axes(spec, self._batch_axes, WHAT[self._batch_axes])
        check_returns(spec)
        return devices.init_on(items, lambda: self._state_kind(**self._empty(spec)))

    def _check_batch(self, state: S, items: Any, mask: Any, td_errors: Any, most: int, rule: str) -> tuple[Any, ...]:
        """Items, their number, mask and TD errors, flat; a `ValueError` if they are invalid."""
        items, valid = without_valid(checks.as_arrays(items))
        stored, num_axes = layouts.stored_spec(state.storage), self._batch_axes
        if isinstance(items, TransitionBatch) and not isinstance(stored, TransitionBatch):
            remedy = "give it transitions, as in buffer.init(tracer.spec(*step))"
            raise ValueError(f"items: got a TransitionBatch, but init was given other items, such as a step; {remedy}.")
        checks.check_structure(items, stored, "the buffer")
        leading = checks.leading_axes(items, num_axes, WHAT[num_axes])
        batch_size = math.prod(leading)
        if not 1 <= batch_size <= most:
            raise ValueError(f"batch of {batch_size} items: expected 1 to {rule}.")
        mask = rows_to_write(mask, valid, leading)
        if td_errors is not None:
            td_errors = checks.check_insertion_errors(td_errors, leading, "an item")
        checks.check_like(items, stored, num_axes, 1, "the buffer")
        items = layouts.merge_axes(items) if num_axes == 2 else items
        return items, batch_size, None if mask is None else mask.reshape(-1), td_errors

    @property
    def num_slots(self) -> int:
        """Number of slots, the capacity."""
        return self.capacity


@struct.dataclass(kw_only=True)
class ReplayState(State):
    """State of a `ReplayBuffer`.

    Attributes:
      storage: the items, leaves [capacity, ...] as the backend wants them (`jaxreplay._common.layouts`).
      ring: cursor and fill.
      sampler: the sampler's state.
      uses: of the items (`jaxreplay.buffers._uses`); None without `count_updates` and `max_uses`.

    Examples:
      >>> isinstance(state, jr.buffers.ReplayState), int(state.ring.size)
      (True, 3)
    """


@checks.config
class ReplayBuffer(ItemBuffer[ReplayState]):
    """Stores independent items and draws them; the oldest item is overwritten first.

    The configuration is static and hashable; all arrays live in the `ReplayState` that the methods take and return.
    Called eagerly, methods that return a state donate the one they are given: the storage is changed in place, and the
    old state must not be used again. Inside an outer `jax.jit` they are plain pure functions.

    All methods raise a `ValueError` for an argument that is not as described, and for a state of another buffer or one
    that was donated. The message names the argument or the leaf.

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
        row without an item where one is spent. If all are spent, rows have handle -1 and weight 0, also where the
        call is eager. Costs about 8 bytes per item. `Recent` is rejected; `Uniform(replacement=False)` needs at most
        2**23 slots.
      donate: donate the state in eager calls.

    Examples:
      >>> buffer, items = jr.ReplayBuffer(capacity=4), np.array([10, 20, 30])
      >>> state = buffer.add(buffer.init(items), items)
      >>> state = buffer.add(state, items + 5)  # overwrites the oldest, 10 and 20
      >>> buffer.get(state, buffer.newest(state, 4)).tolist()
      [30, 15, 25, 35]
    """

    axes: int = checks.field(checks.check_integer, 1, 2, "1 for batches, 2 for rollouts", default=1)
    _state_kind: ClassVar[type] = ReplayState

    @calls.method(rows=("items", "mask", "td_errors"), is_batch=True, donates=True)
    def add(
        self, state: ReplayState, items: Any, *, mask: jax.Array | None = None, td_errors: jax.Array | None = None
    ) -> ReplayState:
        """Insert a batch in order, overwriting the oldest items once the buffer is full.

        Args:
          state: donated when called eagerly (see the class).
          items: pytree [B, ...] with the structure, item shapes and dtypes given to `init`; 1 <= B <= capacity.
          mask: bool [B], True for rows to insert; None for all. Rows of a `TransitionBatch`, which may be a part of the
            items, are inserted only if `valid`.
          td_errors: float [B], signed or not: initial TD errors; NaN or None means unknown. `Uniform` ignores it.

        With `axes=2`, [T, num_envs] replaces [B], and 1 <= T * num_envs <= capacity.

        Examples:
          >>> state = buffer.init(items)
          >>> state = buffer.add(state, items, mask=np.array([True, False, True]))
          >>> buffer.get(state, buffer.newest(state, 2)).tolist()
          [10, 30]
        """
        rule = f"capacity={self.capacity}; add it in parts, or raise the capacity"
        items, batch_size, mask, td_errors = self._check_batch(state, items, mask, td_errors, self.capacity, rule)
        slots, count = state.ring.after(items).next_slots(mask, batch_size)
        return ReplayState(
            storage=layouts.write(state.storage, slots, items),
            ring=state.ring.advance(count),
            **self._insert(state, slots, jnp.ones(batch_size, bool), td_errors),
        )

    @property
    def _batch_axes(self) -> int:
        return self.axes

    def _younger(self, state: ReplayState, max_age: jax.Array) -> ring.Live:
        return state.ring.newest(-(-max_age // ring.num_shards(self._axis_name)))

    def _ages(self, state: ReplayState, slots: jax.Array) -> jax.Array:
        return state.ring.ages(slots) * ring.num_shards(self._axis_name)

    def _read(self, state: ReplayState, slots: jax.Array, fill: bool) -> tuple[Any, None]:
        return layouts.read(state.storage, slots, fill=fill), None
