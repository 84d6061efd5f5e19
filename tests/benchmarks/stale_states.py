"""How far the recurrent states stored by `examples/agents/r2d2.py` are from those of its learned parameters.

`python tests/benchmarks/stale_states.py` (extra `examples`) makes the first 1,200 updates of the recurrent agent, with
and without `REFRESH`. Then it runs the network over all stored steps of each environment. For each task it prints the
norm of the difference between these states and the stored ones, relative to the norm of these states: the mean over
seeds, with a 95% bootstrap interval.
"""

import argparse
import pathlib
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

sys.path.insert(0, str(pathlib.Path(__file__).parents[2] / "examples/studies"))

from experiment import agent, interval

UPDATES = 1_200  # all their steps are still stored


def stored_steps(r2d2: Any, state: Any) -> dict[str, jax.Array]:
    """All complete sequences of a seed, joined to the steps [time, num_envs, ...] that they hold."""
    buffer = r2d2.buffer
    sequences = ((r2d2.WARMUP + UPDATES) * r2d2.ROLLOUT - buffer.sequence_length) // buffer.stride + 1
    items = buffer.get(state.buffer, buffer.newest(state.buffer, sequences * buffer.num_envs))
    items = jax.tree.map(lambda x: x.reshape(sequences, buffer.num_envs, *x.shape[1:]), items)

    def joined(x: jax.Array) -> jax.Array:
        return x[:, :, : buffer.stride].swapaxes(1, 2).reshape(-1, buffer.num_envs, *x.shape[3:])

    return jax.tree.map(joined, items)


def errors(r2d2: Any, keys: jax.Array) -> np.ndarray:
    """The relative error of the stored states after the updates [seeds]."""

    def error(state: Any) -> jax.Array:
        rows = stored_steps(r2d2, state)

        def step(carry: jax.Array, row: dict[str, Any]) -> tuple[jax.Array, jax.Array]:
            new, _ = r2d2.network.apply(state.params, carry, row["obs"])
            return jnp.where(row["step"][:, None], new, 0.0), carry

        _, fresh = jax.lax.scan(step, jnp.zeros_like(rows["carry"][0]), rows)
        return jnp.linalg.norm(rows["carry"] - fresh) / jnp.linalg.norm(fresh)

    @jax.jit
    def train(keys: jax.Array) -> jax.Array:
        state = jax.vmap(r2d2.begin)(keys)
        state, _ = jax.lax.scan(jax.vmap(r2d2.step, in_axes=(0, None)), state, jnp.arange(UPDATES))
        return jax.vmap(error)(state)

    return np.asarray(train(keys))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seeds", type=int, default=8, help="as in the example (8)")
    options = parser.parse_args()
    keys = jax.random.split(jax.random.key(0), options.seeds)
    for task in ("cartpole", "memory"):
        for refresh in (False, True):
            found = errors(agent("r2d2", TASK=task, REFRESH=refresh), keys)
            low, high = interval(found)
            print(f"{task}, {'refreshed' if refresh else 'as stored'}: {found.mean():.3f} [{low:.3f}, {high:.3f}]")


if __name__ == "__main__":
    main()
