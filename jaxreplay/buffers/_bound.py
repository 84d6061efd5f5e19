"""bind: a configuration and its state as one object, for programs that carry one."""

import functools
import inspect
from typing import Any, Generic, Self, TypeVar, get_args, get_origin, overload

import jax
from flax import struct

from jaxreplay.buffers._base import Buffer, Sample
from jaxreplay.buffers._mixture import Mixture
from jaxreplay.buffers._sharded import Sharded

C = TypeVar("C")


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
        found = getattr(self.config, name)
        return functools.partial(self._call, name) if _takes_state(type(self.config), name) else found

    def _call(self, name: str, *args: Any, **kwargs: Any) -> Any:
        result: Any = getattr(self.config, name)(self.state, *args, **kwargs)
        is_array = jax.tree_util.treedef_is_leaf(jax.tree.structure(self.state))
        gives = None if is_array else _annotated(type(self.config), name)
        if gives is None and name in ("add", "update", "set"):
            gives = "first" if isinstance(result, tuple) and not isinstance(self.state, tuple) else "whole"
        if gives == "first":
            return self.replace(state=result[0]), *result[1:]  # pyright: ignore[reportAttributeAccessIssue]
        return self.replace(state=result) if gives == "whole" else result  # pyright: ignore[reportAttributeAccessIssue]


@struct.dataclass
class BoundBuffer(Bound[C]):
    """A `Bound` of a buffer. Its methods are those of the buffer, which say what they take and return."""

    def add(self, *args: Any, **kwargs: Any) -> Self:
        return self._call("add", *args, **kwargs)

    def update(self, indices: jax.Array, td_errors: jax.Array) -> Self:
        return self._call("update", indices, td_errors)

    def set(self, indices: jax.Array, values: Any, *, mask: jax.Array | None = None) -> Self:
        return self._call("set", indices, values, mask=mask)

    def sample(
        self, key: jax.Array, batch_size: int, *, beta: Any = None, max_age: jax.Array | int | None = None
    ) -> Sample:
        return self._call("sample", key, batch_size, beta=beta, max_age=max_age)

    def epoch(self, key: jax.Array, batch_size: int, *, step: jax.Array | int) -> Sample:
        return self._call("epoch", key, batch_size, step=step)

    def num_batches(self, batch_size: int) -> jax.Array:
        return self._call("num_batches", batch_size)

    def get(self, indices: jax.Array) -> Any:
        return self._call("get", indices)

    def newest(self, n: int) -> jax.Array:
        return self._call("newest", n)

    def size(self) -> jax.Array:
        return self._call("size")

    def is_empty(self) -> jax.Array:
        return self._call("is_empty")

    def is_full(self) -> jax.Array:
        return self._call("is_full")

    def can_sample(self, batch_size: int = 1) -> jax.Array:
        return self._call("can_sample", batch_size)


Kind = TypeVar("Kind", bound=Buffer[Any] | Sharded[Any] | Mixture)


@overload
def bind(config: Kind, state: Any) -> BoundBuffer[Kind]: ...


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
    kind: Any = BoundBuffer if isinstance(config, Buffer | Sharded | Mixture) else Bound
    return kind(config, state)


@functools.cache
def _takes_state(kind: type, name: str) -> bool:
    """Whether an attribute of a class of configurations is a method of a state."""
    method = getattr(kind, name, None)
    return callable(method) and [*inspect.signature(method).parameters][1:2] == ["state"]


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
