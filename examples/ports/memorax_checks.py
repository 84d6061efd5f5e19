"""Checks of the draws of memorax's buffer and of the port's, in numbers.

At each `add` memorax's buffer sets the priority of the row before the new one to zero. So it learns only from the first
sequence of each stream, and later from the sequence across the seam of its ring. Its stored rows are correct.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from memorax.utils import Transition

LENGTH, NUM_ENVS, SEQUENCE, DRAWS, ROUNDS = 64, 4, 8, 100, 100
FULL = 2 * LENGTH + 10  # rows after which a ring has wrapped


def make_steps(time: int) -> Transition:
    """Row number `time` of each stream, [num_envs, 1]. The observation holds the numbers of row and stream."""
    env = jnp.arange(NUM_ENVS, dtype=jnp.int32)[:, None]
    obs = time + 1000 * env
    done, prev_done = ((obs + shift) % 7 == 0 for shift in (1, 0))
    action, reward = jnp.zeros_like(env), obs / 2
    return Transition(obs=obs, next_obs=obs + 1, action=action, reward=reward, done=done, prev_done=prev_done, info={})


def fill(make_buffer: Callable, rows: int) -> tuple[Any, Any]:
    """A buffer, and its state after `rows` rows, added one at a time as by the agent."""
    sizes = {"max_length": LENGTH * NUM_ENVS, "add_batch_size": NUM_ENVS}
    draws = {"sample_batch_size": DRAWS, "sample_sequence_length": SEQUENCE, "priority_exponent": 0.9}
    buffer = make_buffer(**sizes, **draws)
    state, add = buffer.init(jax.tree.map(lambda x: x[0, 0], make_steps(0))), jax.jit(buffer.add)
    for time in range(rows):
        state = add(state, make_steps(time))
    return buffer, state


def draw(buffer: Any, state: Any) -> Transition:
    """ROUNDS batches, concatenated: leaves [draws, SEQUENCE]."""
    batches = jax.lax.map(lambda key: buffer.sample(state, key).experience, jax.random.split(jax.random.key(0), ROUNDS))
    return jax.tree.map(lambda x: np.asarray(x).reshape(-1, SEQUENCE), batches)


def different(make_buffer: Callable) -> str:
    return f"{len(np.unique(draw(*fill(make_buffer, FULL)).obs[:, 0]))}"


def across_the_seam(make_buffer: Callable) -> str:
    """Share of draws from a full ring that contain non-consecutive rows."""
    obs = draw(*fill(make_buffer, FULL)).obs
    return f"{np.any(np.diff(obs, axis=1) != 1, axis=1).mean():.1%}"


def keep_priority(make_buffer: Callable) -> str:
    """Share of draws, one row later, of the sequences that `set_priorities` gave a priority of a million."""
    buffer, state = fill(make_buffer, FULL)
    first = buffer.sample(state, jax.random.key(0))
    state = buffer.set_priorities(state, first.indices, jnp.full(DRAWS, 1e6))
    state = buffer.add(state, make_steps(FULL))
    known = np.unique(first.experience.obs[:, 0])
    return f"{np.isin(draw(buffer, state).obs[:, 0], known).mean():.1%}"


def altered(make_buffer: Callable) -> str:
    """Drawn rows that differ from the added rows in any leaf, also across the seam."""
    found = draw(*fill(make_buffer, FULL))
    obs = found.obs
    rows = {"next_obs": obs + 1, "reward": obs / 2, "done": (obs + 1) % 7 == 0, "prev_done": obs % 7 == 0}
    wrong = np.any([getattr(found, name) != values for name, values in rows.items()], axis=0)
    assert obs.dtype == make_steps(0).obs.dtype
    return f"{wrong.sum()} of {wrong.size:,}"


def check(original: Callable, port: Callable) -> dict[str, list[str]]:
    """Findings in both versions; `original` draws from every row too."""
    draws, stored = f"{DRAWS * ROUNDS:,} draws", (LENGTH - SEQUENCE) * NUM_ENVS
    rows = {
        f"different sequences in {draws} from a full ring, which has {stored}": different,
        "draws from a full ring across the seam, from the newest row to the oldest": across_the_seam,
        "draws of sequences with a priority of a million, one row after it was set": keep_priority,
        "drawn rows that differ from those added": altered,
    }
    return {what: [of(original), of(port)] for what, of in rows.items()}
