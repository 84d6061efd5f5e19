"""bind: a configuration and its state as one object."""

import functools
import inspect
import types
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Concatenate, Generic, ParamSpec, TypeVar, overload

import jax
from flax import struct

from jaxreplay._common import shown
from jaxreplay.buffers._base import Buffer
from jaxreplay.wrappers._mixture import Mixture
from jaxreplay.wrappers._sharded import Sharded

B = TypeVar("B")
C = TypeVar("C")
P = ParamSpec("P")
R = TypeVar("R")


@struct.dataclass
class Bound(Generic[C], metaclass=shown.Kind):
    """A configuration and its state as one pytree; made by `jaxreplay.bind`.

    It has the methods of the configuration, without their argument `state`. They return the same, with a new `Bound`
    in place of a new state: `NStep.add` returns a `Bound`, the transitions and `valid`; `DifficultyPools.update`
    returns a `Bound` and `kept`. A `Bound` is immutable, like the state. If a method donates the state, rebind the
    `Bound` that it returns.

    **Methods that return a state** are known by their result, alone or first in a tuple: it has the class of the state.
    If the state is a single array, a tuple, a list or a dict, `add`, `update`, `set`, `clear` and `end_streams` return
    a state, and no other method does.

    Attributes:
      config: the configuration (static), such as a `ReplayBuffer`, `NStep` or `DifficultyPools`.
      state: its state. Functions such as `jaxreplay.save` and `diagnostics` take both: (path, x.config, x.state).

    Examples:
      >>> bound = jr.bind(pools, pools.init())
      >>> bound, kept = bound.update(groups, rewards)
      >>> isinstance(bound, jr.Bound), bound.num_tasks, bound.pool_of().tolist()
      (True, 4, [1, 2, 0, 0])
    """

    config: C = struct.field(pytree_node=False)
    state: Any

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name in ("config", "state"):  # may be looked up before they are set
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r}.")
        method = _method(type(self.config), name)
        return getattr(self.config, name) if method is None else types.MethodType(method, self)

    def __len__(self) -> int:
        """The buffer's `size`, for which an eager call waits."""
        return int(self.size())

    def __bool__(self) -> bool:
        return True  # also while it is empty

    def __repr__(self) -> str:
        num_bytes = sum(getattr(x, "nbytes", 0) for x in jax.tree.leaves(self.state))
        return f"Bound({self.config!r}, {type(self.state).__name__} of {num_bytes:,} bytes)"

    def __dir__(self) -> list[str]:
        return [*super().__dir__(), *(name for name in dir(self.config) if not name.startswith("_"))]

    def _after(self, name: str, result: Any) -> Any:
        """The result of a method, with a `Bound` in place of a new state."""
        kind = type(self.state)
        first = result[0] if type(result) is tuple and result and kind is not tuple else result
        is_plain = kind in (tuple, list, dict) or jax.tree_util.treedef_is_leaf(jax.tree.structure(self.state))
        is_state = name in ("add", "update", "set", "clear", "end_streams") if is_plain else type(first) is kind
        if not is_state:
            return result
        bound = self.replace(state=first)  # pyright: ignore[reportAttributeAccessIssue]
        return bound if first is result else (bound, *result[1:])


if TYPE_CHECKING:
    # The methods of a bound buffer for type checkers and editors; at run time `__getattr__` makes them.

    def _reads(method: Callable[Concatenate[Any, Any, P], R]) -> Callable[Concatenate[Any, P], R]: ...

    def _changes(method: Callable[Concatenate[Any, Any, P], Any]) -> Callable[Concatenate[B, P], B]: ...

    class BoundBuffer(Bound[C]):
        """A `Bound` of a buffer."""

        add, update, set = _changes(Buffer.add), _changes(Buffer.update), _changes(Buffer.set)
        clear = _changes(Buffer.clear)
        sample, epoch, num_batches = _reads(Buffer.sample), _reads(Buffer.epoch), _reads(Buffer.num_batches)
        get, newest, size = _reads(Buffer.get), _reads(Buffer.newest), _reads(Buffer.size)
        is_empty, is_full, can_sample = _reads(Buffer.is_empty), _reads(Buffer.is_full), _reads(Buffer.can_sample)
        handles, slots = _reads(Buffer.handles), _reads(Buffer.slots)
        priorities, age = _reads(Buffer.priorities), _reads(Buffer.age)


Kind = TypeVar("Kind", bound=Buffer[Any] | Sharded[Any] | Mixture)


@overload
def bind(config: Kind, state: Any) -> "BoundBuffer[Kind]": ...


@overload
def bind(config: C, state: Any) -> Bound[C]: ...


def bind(config: Any, state: Any) -> Any:
    """Join a configuration and its state in one pytree, with methods that take no state.

    Use it to carry one object through `jit`, `scan` and `vmap`, such as an agent's train state with a replay buffer as
    a field. Its leaves are the leaves of the state. It draws and donates as the buffer does.

    Args:
      config: a buffer, `Sharded`, `Mixture`, `NStep`, `MonteCarlo`, `DifficultyPools`, or any other object that has
        methods with a first argument `state`.
      state: its state, as `init` returns it; also a state of `jax.ShapeDtypeStruct`.

    Returns:
      `Bound`. Its methods raise what the methods of the configuration raise, and AttributeError for an unknown name.

    Raises:
      ValueError: `config` is not hashable, as a state is not; or it is a buffer and `state` is not of it. For a
        stack of states, `jax.vmap(lambda state: bind(config, state))(states)`.

    Examples:
      >>> replay = jr.bind(buffer, state).add(items + 5)
      >>> replay.sample(key, batch_size=8).items.shape, int(replay.size())
      ((8,), 4)
    """
    try:
        hash(config)
    except TypeError as error:
        raise ValueError(f"config: got a {type(config).__name__}, not hashable; give it before the state.") from error
    if isinstance(config, Buffer | Sharded | Mixture):
        config._check_state(state)
    return Bound(config, state)


@functools.cache
def _method(kind: type, name: str) -> Any:
    """The method `name` of a class of configurations, as a method of `Bound`; None if it takes no state."""
    method: Any = getattr(kind, name, None)
    parameters = [*inspect.signature(method).parameters.values()] if callable(method) else []
    if [x.name for x in parameters[1:2]] != ["state"]:
        return None

    @functools.wraps(method)
    def call(bound: Bound[Any], *args: Any, **kwargs: Any) -> Any:
        return bound._after(name, getattr(bound.config, name)(bound.state, *args, **kwargs))

    signature = inspect.signature(method).replace(parameters=[parameters[0], *parameters[2:]])
    call.__signature__ = signature  # pyright: ignore[reportAttributeAccessIssue]
    return call
