"""Slots: what each kind of buffer says of its slots and storage, of which `Buffer` makes the public methods."""

import abc
import dataclasses
from typing import Any, ClassVar, Generic

import jax

from jaxreplay._common import checks, ring
from jaxreplay.buffers import _uses
from jaxreplay.buffers._state import S, Sized, check_state
from jaxreplay.samplers import Sampler, Uniform
from jaxreplay.samplers._base import check_sampler


@checks.config
class Slots(Sized, Generic[S]):
    """What a kind of buffer says of its items, which lie in slots, mostly a ring."""

    sampler: Sampler = checks.field(check_sampler, default=Uniform())
    count_updates: bool = checks.field(checks.check_bool, "whether to count updates", default=False)
    max_uses: int | None = checks.field(
        checks.optional(checks.check_integer), 1, _uses.MOST, "a number of updates, or None for no bound", default=None
    )
    donate: bool = True
    # The mapped axis over all shards; None for a buffer without shards.
    _axis_name: str | None = dataclasses.field(default=None, repr=False)
    # Fields with the sizes of the storage's leading axes. Memory grows with the first; shards divide the last.
    _storage_axes: ClassVar[tuple[str, ...]] = ("capacity",)
    _state_kind: ClassVar[type]
    _keeps_order: ClassVar[bool] = True  # False if slots say nothing about ages

    def _check_fields(self) -> None:
        if self.sampler.by_age:
            self._check_order(f"sampler={self.sampler!r}", ", or another sampler")
        if self.max_uses is not None and self.sampler.by_age:
            found = f"max_uses={self.max_uses}: {self.sampler!r} draws by rank among all items"
            raise ValueError(f"{found}; use another sampler.")

    def _check_order(self, asked: str, remedy: str = "") -> None:
        """Raise a `ValueError` if the buffer keeps no order of age, which `asked` needs."""
        if not self._keeps_order:
            raise ValueError(f"{asked}: a {type(self).__name__} keeps no order; use a ReplayBuffer{remedy}.")

    @abc.abstractmethod
    def init(self, items: Any, /) -> S:
        """An empty buffer for items like these."""

    @abc.abstractmethod
    def add(self, state: S, *args: Any, **kwargs: Any) -> S:
        """Insert a batch of items."""

    @property
    @abc.abstractmethod
    def _num_slots(self) -> int:
        """Size of the ring of slots."""

    @abc.abstractmethod
    def _ages(self, state: S, slots: jax.Array) -> jax.Array:
        """`Sample.age` of the items in `slots` [B]."""

    @abc.abstractmethod
    def _read(self, state: S, slots: jax.Array, fill: bool) -> tuple[Any, jax.Array | None]:
        """Items at `slots` [B] and `Sample.mask`; with `fill`, zeros for slots out of range, else none may be."""

    def _rows(self, state: S) -> ring.Ring:
        """The ring of the storage's first axis."""
        return state.ring

    def _places(self, state: S, slots: jax.Array) -> jax.Array:
        """Positions of items in the storage with merged leading axes, from `slots` [B]; out of range if not stored."""
        return slots

    def _handles(self, state: S, slots: jax.Array) -> jax.Array:
        """Handles of the items in `slots` [B], which are in range, unique among all shards; -1 for an empty slot."""
        return state.ring.handles(slots, self._axis_name)

    def _slots(self, state: S, handles: jax.Array) -> jax.Array:
        """Slots of `handles` [B]; the number of slots for an item that is no longer stored in this shard."""
        return state.ring.slots(handles, self._axis_name)

    @property
    def _fills_rows(self) -> bool:
        """True if every row of a draw holds an item, unless there is none."""
        return self.sampler.fills_rows and self.max_uses is None

    @property
    def _batch_axes(self) -> int:
        """Number of leading axes of a batch for `add`; shards get equal parts along the last of them."""
        return len(self._storage_axes)

    _check_state = check_state

    @abc.abstractmethod
    def _live(self, state: S, max_age: jax.Array | None = None) -> ring.Live:
        """The drawable slots; with `max_age` (int32 []), only those whose items are younger."""
