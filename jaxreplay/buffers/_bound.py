"""bind: a configuration and its state as one object, for programs that carry one."""

import functools
import inspect
import types
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Concatenate, Generic, ParamSpec, TypeVar, get_args, get_origin, overload

import jax
from flax import struct

from jaxreplay.buffers._base import Buffer
from jaxreplay.buffers._mixture import Mixture
from jaxreplay.buffers._sharded import Sharded

B = TypeVar("B")
C = TypeVar("C")
P = ParamSpec("P")
R = TypeVar("R")


@struct.dataclass
class Bound(Generic[C]):
    """A configuration and its state as one pytree; made by `jaxreplay.bind`.

    It has the methods of the configuration, without their argument `state`. What they return is the same, with a new
    `Bound` in place of a new state: `NStep.add` returns one, the transitions and `valid`; `DifficultyPools.update`
    returns one, and `kept`. It is immutable, as the state is. What donates the state does so here too, so rebind it.

    **Methods that return a state** are those of which the annotations say so: the result's is that of the argument
    `state`, or a tuple that begins with it. An annotation says nothing if it is missing, or names no class of its own
    (`Any`, `tuple`, `dict`), or if the state is a single array. Then `add`, `update` and `set` return a state, alone or
    as the first of a tuple, and no other method does.

    Attributes:
      config: the configuration (static), such as a `ReplayBuffer`, `NStep` or `DifficultyPools`.
      state: its state. `jaxreplay.save`, `diagnostics` and the like take both: (path, x.config, x.state).

    Examples:
      >>> tracer, obs, no = jr.NStep(n=2, gamma=0.5), jnp.array([1.0]), jnp.array([False])
      >>> tracing = jr.bind(tracer, tracer.init(obs, obs, obs, no, no, obs))
      >>> tracing, batch, valid = tracing.add(obs, obs, obs, no, no, obs + 1)
      >>> isinstance(tracing, jr.Bound), tracing.n, int(tracing.state.count)
      (True, 2, 1)
    """

    config: C = struct.field(pytree_node=False)
    state: Any

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name in ("config", "state"):  # these are asked for before they are there
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r}.")
        method = _method(type(self.config), name)
        return getattr(self.config, name) if method is None else types.MethodType(method, self)

    def __dir__(self) -> list[str]:
        return [*super().__dir__(), *(name for name in dir(self.config) if not name.startswith("_"))]

    def _call(self, name: str, *args: Any, **kwargs: Any) -> Any:
        result: Any = getattr(self.config, name)(self.state, *args, **kwargs)
        is_array = jax.tree_util.treedef_is_leaf(jax.tree.structure(self.state))
        gives = None if is_array else _annotated(type(self.config), name)
        if gives is None and name in ("add", "update", "set"):
            gives = "first" if isinstance(result, tuple) and not isinstance(self.state, tuple) else "whole"
        if gives == "first":
            return self.replace(state=result[0]), *result[1:]  # pyright: ignore[reportAttributeAccessIssue]
        return self.replace(state=result) if gives == "whole" else result  # pyright: ignore[reportAttributeAccessIssue]


if TYPE_CHECKING:
    # The methods of a bound buffer for type checkers and editors; Python makes them as they are asked for.

    def _reads(method: Callable[Concatenate[Any, Any, P], R]) -> Callable[Concatenate[Any, P], R]: ...

    def _changes(method: Callable[Concatenate[Any, Any, P], Any]) -> Callable[Concatenate[B, P], B]: ...

    class BoundBuffer(Bound[C]):
        """A `Bound` of a buffer."""

        add, update, set = _changes(Buffer.add), _changes(Buffer.update), _changes(Buffer.set)
        sample, epoch, num_batches = _reads(Buffer.sample), _reads(Buffer.epoch), _reads(Buffer.num_batches)
        get, newest, size = _reads(Buffer.get), _reads(Buffer.newest), _reads(Buffer.size)
        is_empty, is_full, can_sample = _reads(Buffer.is_empty), _reads(Buffer.is_full), _reads(Buffer.can_sample)


Kind = TypeVar("Kind", bound=Buffer[Any] | Sharded[Any] | Mixture)


@overload
def bind(config: Kind, state: Any) -> "BoundBuffer[Kind]": ...


@overload
def bind(config: C, state: Any) -> Bound[C]: ...


def bind(config: Any, state: Any) -> Any:
    """A configuration and its state as one object, whose methods take no state and return new ones.

    For programs that carry one object through `jit`, `scan` and `vmap`, such as an agent's train state with a replay
    buffer as a field. It is a pytree whose leaves are those of the state. Nothing else changes: it draws, and donates,
    as the buffer does.

    Args:
      config: a buffer, `Sharded`, `Mixture`, `NStep`, `MonteCarlo`, `DifficultyPools`, or whatever else has methods
        with a first argument `state`.
      state: its state, as `init` makes it; also one of `jax.ShapeDtypeStruct`.

    Returns:
      `Bound`.

    Raises (its methods):
      as those of the configuration; AttributeError where it has no such attribute.

    Examples:
      >>> buffer = jr.ReplayBuffer(capacity=100)
      >>> replay = jr.bind(buffer, buffer.init({"x": jnp.zeros((4, 2))}))
      >>> replay = replay.add({"x": jnp.ones((4, 2))})
      >>> replay.sample(jax.random.key(0), batch_size=8).items["x"].shape
      (8, 2)
      >>> int(replay.size())
      4
    """
    return Bound(config, state)


@functools.cache
def _method(kind: type, name: str) -> Any:
    """A method of a class of configurations as one of `Bound`, if it is a method of a state; else None."""
    method = getattr(kind, name, None)
    if not callable(method):
        return None
    signature = inspect.signature(method)
    own, *others = signature.parameters.values()
    if not others or others[0].name != "state":
        return None

    @functools.wraps(method)
    def call(bound: Bound[Any], *args: Any, **kwargs: Any) -> Any:
        return bound._call(name, *args, **kwargs)

    call.__signature__ = signature.replace(parameters=[own, *others[1:]])  # pyright: ignore[reportAttributeAccessIssue]
    return call


@functools.cache
def _annotated(kind: type, name: str) -> str | None:
    """What the annotations of a method say of its result: it is a state ("whole"), begins with one ("first"), neither
    ("none"), or they say nothing (None)."""
    try:
        method = inspect.signature(getattr(kind, name), eval_str=True)
    except NameError:  # known to type checkers alone
        return None
    state, result = method.parameters["state"].annotation, method.return_annotation
    if not isinstance(state, TypeVar):
        of = get_origin(state) or state
        if not isinstance(of, type) or of.__module__ in ("builtins", "typing", "inspect"):
            return None
    if result == state:
        return "whole"
    parts = get_args(result) if get_origin(result) is tuple else ()
    return "first" if parts[:1] == (state,) else "none"
