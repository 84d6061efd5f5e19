"""Buffers of items, one a slot."""

import math
from typing import Any

from jaxreplay._common import checks, devices, layouts, ring
from jaxreplay.buffers import _uses
from jaxreplay.buffers._base import Buffer
from jaxreplay.buffers._state import S
from jaxreplay.transitions._batch import check_returns, rows_to_write, without_valid

WHAT = {1: "a batch of items", 2: "a rollout"}  # by number of leading axes


@checks.config
class ItemBuffer(Buffer[S]):
    """A buffer of `capacity` items."""

    capacity: int = checks.field(checks.check_integer, 1, ring.MAX_CAPACITY, "the number of items kept")

    def init(self, items: Any) -> S:
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
        checks.leading_axes(spec, self._batch_axes, WHAT[self._batch_axes])
        check_returns(spec)
        with devices.on_device_of(items):
            return self._empty(
                storage=layouts.zeros(spec, (self.capacity,), self._batch_axes),
                ring=ring.init(self.capacity),
                sampler=self.sampler.init(self.capacity),
                uses=_uses.init(self),
            )

    def _empty(self, **fields: Any) -> Any:
        return self._state_kind(**fields)

    def _check_batch(self, state: S, items: Any, mask: Any, td_errors: Any, most: int, rule: str) -> tuple[Any, ...]:
        """Items, their number, mask and TD errors, flat; a `ValueError` if they are invalid."""
        items, valid = without_valid(checks.as_arrays(items))
        stored, num_axes = layouts.stored_spec(state.storage), self._batch_axes
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
    def _num_slots(self) -> int:
        return self.capacity
