"""What has to be said to the compiler."""

from collections.abc import Callable
from typing import Any

import jax
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


def jitted(method: Callable[..., Any]) -> dict[bool, Callable[..., Any]]:
    """`method(config, state, ...)` with the configuration static, by whether the state is donated."""
    return {
        False: jax.jit(method, static_argnums=0),
        # keep_unused: a leaf that is replaced without being read is donated like the others.
        True: jax.jit(method, static_argnums=0, donate_argnums=1, keep_unused=True),
    }
