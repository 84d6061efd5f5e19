"""The time of separate programs of `examples/studies/sweep.py`, which each compile, also with flashbax's buffer.

`python tests/benchmarks/sweeps.py` (extras `examples` and `bench`) compiles and runs `--count` of the 64 settings with
their numbers compiled in, by both libraries in turn, and prints mean seconds. `examples/studies/sweep.py` prints the
time of one program for all.
"""

import argparse
import dataclasses
import functools
import pathlib
import sys
import types
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax_buffers import flashbax_trajectory_buffer

import jaxreplay as jr

sys.path.insert(0, str(pathlib.Path(__file__).parents[2] / "examples/studies"))

import sweep


class Flashbax:
    """flashbax's prioritised trajectory buffer with the methods of `jr.SequenceBuffer`; its alpha is static."""

    def __init__(self, config: sweep.Config, sequence_length: int, *, alpha: float):
        sizes = config.num_envs, sweep.BATCH, config.length, sequence_length
        self.buffer = flashbax_trajectory_buffer(*sizes, alpha=alpha)

    def init(self, rows: Any) -> Any:
        return self.buffer.init(jax.tree.map(lambda x: x[0, 0], rows))

    def add(self, state: Any, rows: Any) -> Any:
        return self.buffer.add(state, jax.tree.map(lambda x: jnp.swapaxes(x, 0, 1), rows))

    def sample(self, state: Any, key: jax.Array, batch_size: int) -> Any:
        drawn = self.buffer.sample(state, key)
        weights = jr.importance_weights(drawn.probabilities, drawn.probabilities.size, 0.4)
        return types.SimpleNamespace(items=drawn.experience, indices=drawn.indices, weights=weights)

    def update(self, state: Any, indices: jax.Array, td_errors: jax.Array) -> Any:
        return self.buffer.set_priorities(state, indices, jnp.abs(td_errors) + 1e-6)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--count", type=int, default=3, help="settings to compile and run (3)")
    parser.add_argument("--steps", type=int, default=1_000, help="as in the example (1000)")
    parser.add_argument("--seeds", type=int, default=6, help="as in the example (6)")
    options = parser.parse_args()
    config, keys = sweep.Config(steps=options.steps), jax.random.split(jax.random.key(0), options.seeds)
    for k in np.linspace(0, 63, options.count).astype(int):
        alpha, n, learning_rate, updates = sweep.SETTINGS[k]
        of_setting = dataclasses.replace(config, max_n=n, max_updates=updates)
        flashbax = functools.partial(Flashbax, alpha=alpha)
        for name, make, traced in ("jaxreplay", sweep.sequences, alpha), ("flashbax", flashbax, None):
            train = sweep.make_train(of_setting, make)
            setting = sweep.Setting(traced, n, learning_rate, updates)
            returns, times = sweep.timed(jax.vmap(functools.partial(train, setting=setting)), keys)
            print(f"setting {k}, {name}: {times}, return {returns.mean():.2f}")


if __name__ == "__main__":
    main()
