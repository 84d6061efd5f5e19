"""Fields common to all buffer states, and their checks."""

import abc
import functools
from typing import Any, ClassVar, TypeVar

import jax
import jax.numpy as jnp
from flax import struct

from jaxreplay._common import checks, foreign_names, layouts, ring, shown, xla
from jaxreplay.buffers import _uses
from jaxreplay.buffers._shards import room
from jaxreplay.sum_tree import SumTree


@struct.dataclass(kw_only=True)
class State(layouts.BackendState):
    """Fields common to all buffer states.

    Attributes:
      storage: the items.
      ring: the ring of slots, its size the number of items.
      sampler: the sampler's state.
      uses: counts of uses with `count_updates` or `max_uses`, else None.
    """

    storage: Any
    ring: ring.Ring
    sampler: Any
    uses: _uses.Uses | None = None
    _layouts: ClassVar = {"storage": layouts.storage_layout(1)}
    _noun: ClassVar = "items", 1  # and the axis of the storage at which `repr` lets an item begin

    @property
    def _witness(self) -> jax.Array:
        """An array that is donated with the rest, for a quick look before each eager call."""
        return self.ring.inserted

    def _contents(self) -> tuple[str, dict[str, Any]]:
        words, axes = shown.held(self.ring.size, self.ring.capacity, self._noun[0])
        stored, axes = layouts.stored_spec(self.storage), axes + self._noun[1]
        items = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[axes:], x.dtype), stored)
        others = {name: x for name, x in vars(self).items() if name not in ("storage", "ring", "rows", "sequences")}
        return words, {"": items, **others}


S = TypeVar("S", bound=State)


def kind(num_slots: int, part: Any) -> Any:
    """Number of slots, structure and sizes of a part of a state, without the fan-out of trees, a backend's choice."""

    def its(x: Any) -> Any:
        is_kept = (getattr(x, name, None) is not None for name in ("minima", "maxima"))
        return (x.capacity, *is_kept, jax.tree.structure(x.fading)) if isinstance(x, SumTree) else jnp.shape(x)

    leaves, treedef = jax.tree.flatten(part, is_leaf=lambda x: isinstance(x, SumTree))
    return num_slots, treedef, [*map(its, leaves)]


def sizes(buffer: Any) -> dict[str, int]:
    """Sizes of the storage's leading axes, by field."""
    return {field: getattr(buffer, field) for field in buffer._storage_axes}


@functools.cache
def of_states(buffer: Any) -> Any:
    """`sizes`, and the `kind` of samplers and uses, of a buffer's states; cached, as every trace needs it."""
    slots = buffer.num_slots
    return sizes(buffer), kind(slots, jax.eval_shape(lambda: (buffer.sampler.init(slots), _uses.init(buffer))))


def check_state(buffer: Any, state: Any) -> None:
    """Raise a `ValueError` if `state` is not of this buffer."""
    checks.check_state(buffer, state, buffer._state_kind)
    expected, expected_kind = of_states(buffer)
    found = jax.tree.leaves(state.storage, is_leaf=layouts.is_leaf)[0].shape[: len(expected)]
    if state.ring.size.shape != () or found != tuple(expected.values()):
        names = ", ".join(f"{field}={size}" for field, size in expected.items())
        axes = f"a leading axis of {found[0]}" if len(found) == 1 else f"leading axes {list(found)}"
        raise ValueError(f"{names}: this state has {axes}; use the buffer that made it, and jax.vmap for a stack.")
    if kind(state.ring.capacity, (state.sampler, state.uses)) != expected_kind:
        for name, x in checks.named_leaves(state.sampler).items():
            if name[1:] in vars(buffer.sampler) and x.shape:
                raise ValueError(f"state.sampler{name}: got {checks.type_text(x)}, expected one number; use jax.vmap.")
        rule = "this state is of another sampler, size, count_updates or max_uses; convert it with jaxreplay.migrate"
        raise ValueError(f"sampler={buffer.sampler!r}: {rule}.")


def check_once(buffer: Any, state: Any) -> None:
    """Check a state in an eager call, once for all states of its structure and shapes; and that it was not donated."""
    leaves, treedef = jax.tree.flatten(state)
    xla.explain_donated(leaves[0], None)  # a call donates all or none
    try:
        return _checked(buffer, treedef, tuple([x.shape for x in leaves]))
    except (AttributeError, ValueError):
        pass
    buffer._check_state(state)  # with its dtypes, for the message


@functools.cache
def _checked(buffer: Any, treedef: Any, shapes: tuple[tuple[int, ...], ...]) -> None:
    buffer._check_state(treedef.unflatten([jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]))


class Sized(metaclass=shown.Kind):
    """Base of buffers and wrappers: `size`, `is_empty`, `can_sample`."""

    is_sharded: ClassVar[bool] = False
    locals()["__getattr__"] = foreign_names.missing  # in this way type checkers still find names that do not exist

    def __len__(self) -> int:
        raise TypeError(f"len: a {type(self).__name__} holds no items, its state does; use size(state).")

    def __bool__(self) -> bool:
        return True

    @abc.abstractmethod
    def size(self, state: Any) -> jax.Array:
        """Number of drawable items, int32 []."""

    def _count(self, state: Any) -> jax.Array:
        """`size`, which may be an array of the state."""
        return self.size(state)

    def is_empty(self, state: Any) -> jax.Array:
        """True if no item is drawable, bool [].

        Examples:
          >>> bool(buffer.is_empty(state)), bool(buffer.is_empty(buffer.init(items)))
          (False, True)
        """
        return jnp.logical_not(ring.at_least(self._count(state), 1))

    def can_sample(self, state: Any, batch_size: int = 1) -> jax.Array:
        """True if at least `batch_size` items are drawable, bool [].

        Examples:
          >>> bool(buffer.can_sample(state, 3)), bool(buffer.can_sample(state, 4))
          (True, False)
        """
        rule = "at most what the buffer can hold, or it would be False for ever"
        batch_size = checks.check_integer("batch_size", batch_size, 0, room(self), rule)
        return ring.at_least(self._count(state), batch_size)
