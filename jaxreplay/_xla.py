"""What has to be said to the compiler."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax


def materialize(*arrays: jax.Array) -> Any:
    """The same arrays, computed once, before anything is computed from them.

    XLA:CPU fuses a cheap computation into each place that uses its result and repeats it there, even for every element
    of a gather: a replay step took several times as long. It drops `lax.optimization_barrier` before it fuses, but not
    a loop; so there the arrays go twice round one.
    """

    arrays = lax.optimization_barrier(arrays)

    def twice_round_a_loop(*arrays: jax.Array) -> Any:
        return lax.fori_loop(0, 2, lambda _, pair: (pair[1], pair[0]), (arrays, arrays))[0]

    return lax.platform_dependent(*arrays, cpu=twice_round_a_loop, default=lambda *arrays: arrays)


def after(numbers: jax.Array, *others: Any) -> jax.Array:
    """`numbers` (int32), computed from `others` (pytrees of arrays) as well, on which they do not depend.

    XLA orders the reads and writes of an array by data alone; where two may come in any order, XLA:CPU copies the
    array. A write at `numbers` comes after all reads that `others` were computed from. Of an array with two axes or
    more only the first element is looked at.
    """

    def look_at(x: Any) -> jax.Array:
        x = jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else jnp.asarray(x)
        x = jnp.real(x if x.ndim < 2 else lax.slice(x, [0] * x.ndim, [1] * x.ndim))
        return jnp.sum(x.astype(jnp.float32))

    seen = [look_at(leaf) for leaf in (numbers, *jax.tree.leaves(others)) if leaf.size > 0]
    never = jnp.minimum(functools.reduce(jnp.add, seen), -1.0) >= 0  # XLA does not see that this is False
    # Elsewhere nothing is left of it.
    return lax.platform_dependent(
        numbers,
        never,
        cpu=lambda x, never: jnp.where(never, 0, x),
        default=lambda x, never: jnp.where(never & False, 0, x),
    )


def jitted(method: Callable[..., Any]) -> dict[bool, Callable[..., Any]]:
    """`method(config, state, ...)` with the configuration static, by whether the state is donated."""
    return {
        False: jax.jit(method, static_argnums=0),
        # keep_unused: a leaf that is replaced without being read is donated like the others.
        True: jax.jit(method, static_argnums=0, donate_argnums=1, keep_unused=True),
    }
