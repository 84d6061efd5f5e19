"""Later steps of an episode as others draw them, written plainly: what `SequenceBuffer.later` is measured beside."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from harness import LoopProgram
from settings import Setting

GAMMA = 0.99
TRAJECTORY = 64  # rows of a trajectory, whose goals are drawn together


def relabel_by_matrix(key: jax.Array, rows: dict[str, jax.Array], ends: jax.Array) -> dict[str, jax.Array]:
    """Rows [B, T, ...] and a later row of the same episode for each, as in JaxGCRL.

    Each trajectory has the probability of every row for every other, [T, T], and a categorical draw for each row.
    """
    number = jnp.cumsum(ends, axis=1) - ends  # [B, T], of the episodes
    lag = jnp.arange(ends.shape[1])[None] - jnp.arange(ends.shape[1])[:, None]
    mass = jnp.where(lag > 0, GAMMA**lag, 0.0) * (number[:, :, None] == number[:, None])
    mass += 1e-5 * jnp.eye(ends.shape[1])  # a row without later ones gets itself
    chosen = jax.random.categorical(key, jnp.log(mass), axis=-1)  # [B, T]
    later = jax.vmap(lambda row, i: jax.tree.map(lambda x: x[i], row))(rows, chosen)
    found = rows | {f"later {name}": x for name, x in later.items()}
    return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), found)


def host_program(setting: Setting, is_end: Callable[[Any], Any]) -> LoopProgram:
    """As OGBench does on the host: the episode's end by bisection of all ends, then a step count, and two reads."""
    rows, rng = setting.batch(setting.capacity), np.random.default_rng(0)
    ends = np.flatnonzero(np.asarray(is_end(rows)))
    ends = np.unique([*ends, setting.capacity - 1])

    def step() -> Any:
        at = rng.integers(setting.capacity, size=setting.batch_size)
        last = ends[np.searchsorted(ends, at)]
        later = np.minimum(at + rng.geometric(1 - GAMMA, setting.batch_size), last)
        drawn = {name: x[at] for name, x in rows.items()}
        return (
            drawn,
            {name: x[np.minimum(at + 1, last)] for name, x in rows.items()},
            {name: x[later] for name, x in rows.items()},
        )

    return LoopProgram(step)
