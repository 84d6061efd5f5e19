"""Hints for XLA, new arrays, and copies of arguments."""

import functools
import math
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import jax
import jax.core
import jax.extend.core
import jax.numpy as jnp
import numpy as np
from jax.experimental.xla_metadata import set_xla_metadata

# In `jax.core` before JAX 0.8.
_current_trace: Any = getattr(jax.extend.core, "get_opaque_trace_state", None) or jax.core.get_opaque_trace_state
NOT_TRACING = _current_trace()
SMALL = 2**14  # elements of an array that is made on the host


def is_tracing() -> bool:
    """True during tracing of an outer program."""
    return _current_trace() != NOT_TRACING


def is_traced(tree: Any) -> bool:
    """True if a leaf of a pytree is traced, so that its value is not known."""
    return any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves(tree))


def materialize(*arrays: jax.Array) -> Any:
    """The same arrays; a CPU computes them once, before all operations that depend on them.

    XLA:CPU fuses a cheap computation into every operation that uses its result and repeats it there, even for each
    element of a gather. A replay step took several times as long. XLA:CPU drops `jax.lax.optimization_barrier` before
    fusion but keeps calls that are not inlined, so on a CPU the arrays pass through a call that returns them. It has no
    kernel. On other backends this function compiles to nothing.

    XLA:CPU starts all calls without kernels at once. It hands operations to another thread if more than 8 can start,
    which costs a small program 30 us. Where there is one for each level of a tree, `compute_once` is better.
    """
    return compute_once(_same, *arrays) if arrays else ()


def compute_once(function: Callable[..., Any], *arrays: Any, **static: Any) -> Any:
    """`materialize` of what a jitted function returns; it is computed within the call, which then has a kernel."""

    def through_a_call(*arrays: Any) -> Any:
        with set_xla_metadata(inlineable="false"):
            return function(*arrays, **static)

    return jax.lax.platform_dependent(*arrays, cpu=through_a_call, default=functools.partial(function, **static))


@jax.jit
def _same(*arrays: jax.Array) -> Any:
    return arrays


def read_once(tree: Any) -> Any:
    """The same pytree of arrays; a GPU computes them before all operations that depend on them.

    Their inputs are then read once, before any dependent write. Without the barrier XLA:GPU may repeat the read in each
    kernel that uses it, even after a write, which then needs a copy. XLA:TPU does not do this.
    """
    return on_gpu(jax.lax.optimization_barrier, tree)


def on_gpu(function: Callable[..., Any], x: Any, *others: Any) -> Any:
    """`function(x, *others)` in programs for a GPU, `x` in all others."""
    return jax.lax.platform_dependent(x, *others, cuda=function, rocm=function, default=lambda x, *others: x)


def after(numbers: jax.Array, *others: Any) -> jax.Array:
    """`numbers` (int32) unchanged, but with a data dependency on `others` (pytrees of arrays).

    XLA orders reads and writes of an array by data dependencies only. If a read and a write may come in either order,
    XLA:CPU copies the array. A write at `numbers` comes after all reads that `others` depend on. Of each array only
    the first element is used, of one with one axis after all of it is computed.
    """

    def first(x: jax.Array) -> jax.Array:
        return jnp.real(jax.lax.slice(x, [0] * x.ndim, [1] * x.ndim)).astype(jnp.float32).reshape(())

    arrays = [jnp.asarray(x) for x in jax.tree.leaves(others) if x.size > 0]
    arrays = [jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x for x in arrays]
    if not arrays:
        return numbers
    vectors = [x for x in arrays if x.ndim == 1]
    seen = map(first, [*materialize(*vectors), *(x for x in arrays if x.ndim != 1)])
    never = jnp.minimum(functools.reduce(jnp.add, seen), -1.0) >= 0  # False, but XLA cannot tell
    # On other backends this compiles to nothing.
    return jax.lax.platform_dependent(
        numbers,
        never,
        cpu=lambda x, never: jnp.where(never, 0, x),
        default=lambda x, never: jnp.where(never & False, 0, x),
    )


def full(shape: tuple[int, ...], value: Any, dtype: Any) -> jax.Array:
    """A new array of one value, also of PRNG keys. No program is compiled for a small one: it comes from the host."""
    if is_tracing() or math.prod(shape) > SMALL or jnp.issubdtype(dtype, jax.dtypes.extended):
        return jax.lax.full(shape, value, dtype)
    # Not aligned to 64 bytes: a CPU would share that memory, and could not donate it.
    return jax.device_put(np.full(math.prod(shape) + 1, value, dtype)[1:].reshape(shape))


P = ParamSpec("P")
R = TypeVar("R")


def explain_donated(state: Any, error: Exception | None) -> None:
    """Raise a `ValueError` from `error` if an array of `state` has been donated."""
    for x in jax.tree.leaves(state):
        if not isinstance(x, jax.core.Tracer) and getattr(x, "is_deleted", bool)():
            remedy = "rebind it, as in state = buffer.add(state, items), or create the buffer with donate=False"
            raise ValueError(f"state: was donated to an earlier call and is gone; {remedy}.") from error


@functools.partial(jax.jit, inline=True)
def copy(tree: Any) -> Any:
    """The same arrays in memory of their own; in a compiled program, the same arrays."""
    return jax.tree.map(jnp.copy, tree)


def reads_state(function: Callable[P, R]) -> Callable[P, R]:
    """Decorator: `function` raises a `ValueError` that explains donation if an argument was donated."""

    @functools.wraps(function)
    def call(*arguments: P.args, **named: P.kwargs) -> R:
        try:
            return function(*arguments, **named)
        except (OSError, RuntimeError, ValueError) as error:
            explain_donated((arguments, named), error)
            raise

    return call


@functools.cache
def never_changes(kind: type) -> bool:
    """True for the type of a leaf that nobody can overwrite."""
    return issubclass(kind, jax.Array | int | float | None)


def copy_numpy(arguments: Any) -> Any:
    """The same pytree with copies of its NumPy arrays.

    A program may read its arguments after the call has returned, when the caller may already overwrite them. On a CPU,
    even `jnp.array` and `jax.device_put` may return an array in the same memory.
    """
    leaves, treedef = jax.tree.flatten(arguments)
    if not [x for x in leaves if isinstance(x, np.ndarray)]:  # quicker than `any`
        return arguments
    return treedef.unflatten([np.array(x) if isinstance(x, np.ndarray) else x for x in leaves])


def copies_numpy(function: Callable[P, R]) -> Callable[P, R]:
    """Decorator: the caller may overwrite NumPy arguments as soon as the call has returned."""

    @functools.wraps(function)
    def call(*arguments: P.args, **named: P.kwargs) -> R:
        arguments, named = copy_numpy((arguments, named))
        return function(*arguments, **named)

    return call


def on_host(x: Any) -> np.ndarray:
    """Values of an array as NumPy, even if implicit transfers are disallowed. Waits for the device."""
    try:
        return np.asarray(x)  # on a CPU always allowed, and the setting would take longer than this
    except RuntimeError:
        with jax.transfer_guard_device_to_host("allow"):
            return np.asarray(x)
