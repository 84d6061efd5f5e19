"""What has to be said to the compiler."""

from typing import Any

import jax
from jax import lax


def materialize(*arrays: jax.Array) -> tuple[jax.Array, ...]:
    """The same arrays, computed once, before anything is computed from them.

    XLA:CPU fuses a cheap computation into each place that uses its result and repeats it there, for every element of a
    gather even: a replay step took several times as long. What comes out of a loop is not repeated, so here they go twice
    round one. (`lax.optimization_barrier` is gone before fusion there.) On other backends nothing is done.
    """

    def twice_round_a_loop(*arrays: jax.Array) -> Any:
        return lax.fori_loop(0, 2, lambda _, pair: (pair[1], pair[0]), (arrays, arrays))[0]

    return lax.platform_dependent(*arrays, cpu=twice_round_a_loop, default=lambda *arrays: arrays)
