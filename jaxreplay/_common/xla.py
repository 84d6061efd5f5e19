"""Hints for XLA, and methods as programs that are called from Python."""

import functools
import inspect
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxreplay._common.checks import as_int32


def materialize(*arrays: jax.Array) -> Any:
    """The same arrays, on a CPU computed once, before anything is computed from them.

    XLA:CPU fuses a cheap computation into each place that uses its result and repeats it there, even for every element
    of a gather: a replay step took several times as long. It drops `lax.optimization_barrier` before it fuses, but not
    a loop; so there the arrays go twice round one. Elsewhere it would be a kernel more, and nothing is left of it.
    """

    def twice_round_a_loop(*arrays: jax.Array) -> Any:
        return lax.fori_loop(0, 2, lambda _, pair: (pair[1], pair[0]), (arrays, arrays))[0]

    return lax.platform_dependent(*arrays, cpu=twice_round_a_loop, default=lambda *arrays: arrays)


def read_once(tree: Any) -> Any:
    """The same pytree of arrays, on a GPU computed before anything is computed from them.

    What was read for them is read once, and before what depends on them is written. Without this a GPU's compiler may
    read it in each kernel that uses it, and in one after the write of a copy; a TPU's does not.
    """
    leaves, treedef = jax.tree.flatten(tree)

    def barrier(*leaves: jax.Array) -> Any:
        return lax.optimization_barrier(leaves)

    leaves = lax.platform_dependent(*leaves, cuda=barrier, rocm=barrier, default=lambda *leaves: leaves)
    return jax.tree.unflatten(treedef, leaves)


def after(numbers: jax.Array, *others: Any) -> jax.Array:
    """`numbers` (int32), computed from `others` (pytrees of arrays) as well, on which they do not depend.

    XLA orders the reads and writes of an array by data alone; where two may come in any order, XLA:CPU copies the
    array. A write at `numbers` comes after all reads that `others` were computed from. Of an array with two axes or
    more only the first element is looked at.
    """

    def look_at(x: jax.Array) -> jax.Array:
        x = jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else jnp.asarray(x)
        x = x if x.ndim == 1 else lax.slice(x, [0] * x.ndim, [1] * x.ndim)
        return jnp.sum(jnp.real(x).astype(jnp.float32))

    seen = [look_at(leaf) for leaf in (jnp.ravel(numbers)[:1], *jax.tree.leaves(others)) if leaf.size > 0]
    never = jnp.minimum(functools.reduce(jnp.add, seen), -1.0) >= 0  # XLA does not see that this is False
    # Elsewhere nothing is left of it.
    return lax.platform_dependent(
        numbers,
        never,
        cpu=lambda x, never: jnp.where(never, 0, x),
        default=lambda x, never: jnp.where(never & False, 0, x),
    )


P = ParamSpec("P")
R = TypeVar("R")


def jit_method(
    *, static: tuple[str, ...] = (), donates: bool = False, handles: str | None = None
) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """A decorator: `method(self, state, ...)` as a program that is called from Python, with `self` static.

    Args:
      static: names of other arguments that are static.
      donates: the state is donated if `self.donate`, unless the call is differentiated, for which it must stay.
      handles: name of an argument that holds handles: one that is no int32 is -1, where JAX would drop its upper bits.

    Other arguments may be overwritten as soon as the call has returned. The method's attribute `programs` has the pure
    and the donating one, and `__wrapped__` is the body.

    Raises (the method):
      ValueError: the state was donated to an earlier call.
    """

    def decorate(method: Callable[P, R]) -> Callable[P, R]:
        body: Any = method
        signature = inspect.signature(body)
        names = list(signature.parameters)[2:]
        at = names.index(handles) if handles else None
        by_position = _by_position(signature)
        pure, donating = _programs(body, signature, static, donates)

        @functools.wraps(body)
        def call(self: Any, state: Any, *arguments: Any, **named: Any) -> Any:
            arguments = by_position(self, state, arguments, named)
            if at is not None and isinstance(arguments[at], np.ndarray):
                arguments = (*arguments[:at], as_int32(arguments[at]), *arguments[at + 1 :])
            arguments, chosen = own(arguments), pure
            if donates and self.donate and not _is_differentiated((state, arguments)):
                chosen = donating
            try:
                return chosen(self, state, *arguments)
            except (RuntimeError, ValueError) as error:
                if not any(map(_is_deleted, jax.tree.leaves(state))):
                    raise
                raise ValueError(
                    "state: was donated to an earlier call and is gone; rebind it, as in state = buffer.add(state, "
                    "items), or make the buffer with donate=False."
                ) from error

        call.programs = pure, donating  # pyright: ignore[reportAttributeAccessIssue]
        return call  # pyright: ignore[reportReturnType]

    return decorate


def _by_position(signature: inspect.Signature) -> Callable[..., tuple[Any, ...]]:
    """Makes a function that puts the arguments of a call after the state into a tuple, with defaults filled in."""
    names = list(signature.parameters)[2:]
    defaults = tuple(signature.parameters[name].default for name in names)
    num_required = sum(default is inspect.Parameter.empty for default in defaults)
    keyword_only = _has_keyword_only(signature)

    def by_position(self: Any, state: Any, arguments: tuple[Any, ...], named: dict[str, Any]) -> tuple[Any, ...]:
        if not (named or keyword_only) and num_required <= len(arguments) <= len(names):
            return arguments + defaults[len(arguments) :]
        bound = signature.bind(self, state, *arguments, **named).arguments
        return tuple(bound.get(name, default) for name, default in zip(names, defaults, strict=True))

    return by_position


def _programs(body: Any, signature: inspect.Signature, static: tuple[str, ...], donates: bool) -> tuple[Any, Any]:
    """The pure and the donating program of a method, one and the same unless `donates`."""
    program, names = body, list(signature.parameters)
    if _has_keyword_only(signature):  # a program takes all arguments by position, so one serves all ways to call

        def program(*arguments: Any) -> Any:
            return body(**dict(zip(names, arguments, strict=True)))

        program.__name__ = body.__name__  # in profiles
    numbers = (0, *map(names.index, static))
    pure = jax.jit(program, static_argnums=numbers)
    # keep_unused: a leaf that is replaced without being read is donated like the others.
    donating = jax.jit(program, static_argnums=numbers, donate_argnums=1, keep_unused=True) if donates else pure
    return pure, donating


def _has_keyword_only(signature: inspect.Signature) -> bool:
    return any(x.kind is x.KEYWORD_ONLY for x in signature.parameters.values())


def own(arguments: Any) -> Any:
    """The same pytree with copies of its NumPy arrays.

    A program may read the arrays that it is given after the call has returned, when the caller may overwrite them.
    """
    leaves, treedef = jax.tree.flatten(arguments)
    if np.ndarray not in map(type, leaves):
        return arguments
    return treedef.unflatten([leaf.copy() if isinstance(leaf, np.ndarray) else leaf for leaf in leaves])


def on_host(x: jax.Array) -> np.ndarray:
    """The values of an array, also where transfers that are not asked for are forbidden. Waits for the device."""
    with jax.transfer_guard_device_to_host("allow"):
        return np.asarray(x)


def _is_deleted(x: Any) -> bool:
    return isinstance(x, jax.Array) and not isinstance(x, jax.core.Tracer) and x.is_deleted()


def _is_differentiated(arguments: Any) -> bool:
    leaves = jax.tree.leaves(arguments)
    if not any(issubclass(kind, jax.core.Tracer) for kind in set(map(type, leaves))):  # fewer kinds than leaves
        return False
    for x in leaves:
        while isinstance(x, jax.core.Tracer):
            if hasattr(x, "tangent"):
                return True
            x = getattr(x, "val", None)  # what jax.vmap maps over
    return False
