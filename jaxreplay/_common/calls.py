"""Decorator for jitted methods; its arguments say how Sharded and Mixture split rows."""

import functools
import inspect
from collections.abc import Callable
from typing import Any, Concatenate, NamedTuple, ParamSpec, TypeVar

import jax
import jax.core
import numpy as np

from jaxreplay._common import checks, foreign_names, meshes, xla

P = ParamSpec("P")
R = TypeVar("R")
HANDLES = ("indices", "slots")  # names of arguments whose integers must fit int32
CHECKS = {"key": checks.check_key, **{name: functools.partial(checks.check_indices, name=name) for name in HANDLES}}


class Call(NamedTuple):
    """Declaration of a jitted method `method(self, state, ...)`.

    Attributes:
      static: names of static arguments besides `num_rows`.
      donates: the method returns a new state, and donates the old one if `self.donate`, unless it is differentiated.
      rows: names of arguments with a row for each row of a batch. A wrapper gives each part of a state its rows.
      is_batch: rows lie along the last leading axis of a batch for `add`, and not along the first axis.
      num_rows: name of a static argument, the number of rows of the result, split over the parts; "" for none.
      before: called first, as before(self, *arguments); returns the checked arguments by position.
      after: called last, as after(self, state, result); returns the result.
    """

    static: tuple[str, ...] = ()
    donates: bool = False
    rows: tuple[str, ...] = ()
    is_batch: bool = False
    num_rows: str = ""
    before: Callable[..., tuple[Any, ...]] | None = None
    after: Callable[..., Any] | None = None

    @property
    def every_static(self) -> tuple[str, ...]:
        """Names of all static arguments."""
        return (*self.static, self.num_rows) if self.num_rows else self.static


def method(**declared: Any) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Decorator: jit a method, with `self` static, as the fields of a `Call` say.

    The caller may overwrite arguments as soon as the call returns. While the call is traced, `self._check_state` checks
    a first argument with the name `state`, and `CHECKS` a key and handles, by their names. Handles that do not fit
    int32 become -1; JAX would drop their upper bits.

    Attributes (of the method):
      call: the `Call`.
      body: the method as it was written. It checks no state, key or handle; it is for calls inside of a program.
      dispatch: the method without `before` and `after`; takes all arguments by position.
      programs: the pure and the donating program, the same unless `donates`.

    Raises (the method):
      ValueError: the state was donated to an earlier call.
    """
    return lambda body: _compiled(body, Call(**declared))


def forwarded(method: Callable[Concatenate[Any, P], R], doc: str) -> Callable[Concatenate[Any, P], R]:
    """Make a wrapper's method from `method` of a buffer: its body is `self._run(name, call, state, arguments)`.

    Args:
      method: as declared by the decorator of the same name.
      doc: the docstring, which says what differs.
    """
    declared: Any = method

    @functools.wraps(declared)
    def body(self: Any, state: Any, **arguments: Any) -> Any:
        return self._run(declared.__name__, declared.call, state, arguments)

    body.__doc__ = doc
    return _compiled(body, declared.call)


def _compiled(body: Any, call: Call) -> Any:
    """The jitted method. In a call `buffer.update(state, indices, td_errors=x)`:

    - `run` brings the arguments in the order of the signature and checks them (`call.before`); the result is checked.
    - `dispatch` converts and copies NumPy arguments, and chooses the pure or the donating program.
    - `program(buffer, state, indices, x)` is what these two compile: `body`, over any mesh, after a check of the state.
    """
    signature = inspect.signature(body)
    first, *names = list(signature.parameters)[1:]
    handles = [number for number, name in enumerate(names) if name in HANDLES]
    by_position, defaults = _by_position(signature, body.__name__, first)
    before, after = call.before, call.after

    def program(self: Any, *arguments: Any) -> Any:  # all by position, so one program serves every call
        def traced(state: Any, *arguments: Any) -> Any:
            if first == "state":
                self._check_state(state)
            named = dict(zip(names, arguments, strict=True))
            return body(self, state, **named | {name: CHECKS[name](named[name]) for name in CHECKS if name in named})

        lays_out = getattr(self, "is_sharded", False)  # by itself
        return (traced if lays_out else meshes.over_any_mesh(traced))(*arguments)

    program.__name__ = body.__name__  # in profiles
    donates, static = call.donates, (0, *(names.index(name) + 2 for name in call.every_static))
    pure = donating = jax.jit(program, static_argnums=static)
    if donates:  # keep_unused: also leaves that are replaced without being read
        donating = jax.jit(program, static_argnums=static, donate_argnums=1, keep_unused=True)

    def dispatch(self: Any, state: Any, *arguments: Any) -> Any:
        if not all(map(xla.never_changes, map(type, arguments))):  # quicker than a look at leaves
            for number in handles:
                if isinstance(arguments[number], np.ndarray):
                    arguments = (*arguments[:number], checks.as_int32(arguments[number]), *arguments[number + 1 :])
            arguments = xla.copy_numpy(arguments)
        donate, lays_out = donates and self.donate, getattr(self, "is_sharded", False)
        # XLA logs an array that is gone before it is donated, and JAX 0.10 crashes over one on several devices.
        if lays_out or (donate and (_are_several_devices() or xla.is_tracing())):
            leaves = jax.tree.leaves(state)
            xla.explain_donated(leaves if lays_out else leaves[:1], None)
            donate = donate and _may_donate(leaves, jax.tree.leaves(arguments))
        elif donate:
            witness = getattr(state, "_witness", None)
            if witness is None or getattr(witness, "is_deleted", bool)():
                xla.explain_donated(state, None)
        try:
            return (donating if donate else pure)(self, state, *arguments)
        except (RuntimeError, TypeError, ValueError) as error:
            xla.explain_donated(state, error)
            if donate and "donate" in str(error):  # one device refuses an array that is given twice; several would hang
                return pure(self, state, *arguments)
            if isinstance(error, TypeError):  # JAX refuses what is no array before the call is traced
                if first == "state":
                    self._check_state(state)
                named = {name: x for name, x in zip(names, arguments, strict=True) if name not in call.every_static}
                if "key" in named:
                    checks.check_key(named.pop("key"))
                checks.check_arrays(named)
            raise

    @functools.wraps(body)
    def run(self: Any, state: Any, *arguments: Any, **named: Any) -> Any:
        if named or len(arguments) not in defaults:
            arguments = by_position(self, state, arguments, named)
        else:  # quicker
            arguments += defaults[len(arguments)]
        if before is not None:
            arguments = before(self, *arguments)
        result = dispatch(self, state, *arguments)
        return result if after is None else after(self, state, result)

    for name, value in {"call": call, "body": body, "dispatch": dispatch, "programs": (pure, donating)}.items():
        setattr(run, name, value)
    return run


def _by_position(signature: inspect.Signature, method: str, first: str) -> tuple[Callable[..., Any], dict[int, Any]]:
    """A function that returns the arguments after the state by position; the defaults that follow n of them, by n."""
    names = list(signature.parameters)[2:]
    defaults = tuple(signature.parameters[name].default for name in names)
    places = {name: place for place, name in enumerate(names)}
    num_positional = sum(signature.parameters[name].kind is not inspect.Parameter.KEYWORD_ONLY for name in names)
    num_needed = max((place + 1 for place, x in enumerate(defaults) if x is inspect.Parameter.empty), default=0)

    def by_position(self: Any, state: Any, arguments: tuple[Any, ...], named: dict[str, Any]) -> tuple[Any, ...]:
        count = len(arguments)
        values, fit = [*arguments, *defaults[count:]], count <= num_positional
        for name, value in named.items():
            if fit := fit and places.get(name, -1) >= count:
                values[places[name]] = value
        if fit and not any(value is inspect.Parameter.empty for value in values):
            return tuple(values)
        if unknown := [name for name in named if name not in places]:
            takes = f"has no argument {unknown[0]!r}; it takes {', '.join(names)}{foreign_names.advice(unknown[0])}"
            raise TypeError(f"{type(self).__name__}.{method}(): {takes}.")
        try:
            signature.bind(self, state, *arguments, **named)  # raises an error that explains
        except TypeError as error:
            if first == "state":
                self._check_state(state)
            takes = ", ".join([first, *names[:num_positional], *(f"{x}=" for x in names[num_positional:])])
            raise TypeError(f"{type(self).__name__}.{method}(): {error}; it takes {takes}.") from None
        return tuple(values)

    return by_position, {count: defaults[count:] for count in range(num_needed, num_positional + 1)}


@functools.cache
def _are_several_devices() -> bool:
    return jax.device_count() > 1


def _may_donate(state: list[Any], others: list[Any]) -> bool:
    """False if an array of the state is given twice, or one is traced by differentiation, also inside `jax.vmap`."""
    arrays = {*map(id, state)}
    if len(arrays) < len(state) or not arrays.isdisjoint(map(id, others)):
        return False
    kinds = {*map(type, state), *map(type, others)}  # fewer than leaves
    if not [kind for kind in kinds if jax.core.Tracer in kind.__mro__]:
        return True
    for x in (*state, *others):
        while isinstance(x, jax.core.Tracer):
            if hasattr(x, "tangent"):
                return False
            x = getattr(x, "val", None)  # the value that jax.vmap maps over
    return True
