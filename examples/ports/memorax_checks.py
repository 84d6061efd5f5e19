"""Checks of the draws of memorax's buffer and of the port's, in numbers, and of memorax's targets.

At each `add` memorax's buffer sets the priority of the row before the new one to zero. So it learns only from the first
sequence of each stream, and later from the sequence across the seam of its ring. Its stored rows and its n-step targets
are correct.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from memorax.algorithms.r2d2 import compute_n_step_returns
from memorax.utils import Transition

import jaxreplay as jr

LENGTH, NUM_ENVS, SEQUENCE, DRAWS, ROUNDS = 64, 4, 8, 100, 100


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


def different(make_buffer: Callable, rows: int) -> str:
    return f"{len(np.unique(draw(*fill(make_buffer, rows)).obs[:, 0]))}"


def across_the_seam(make_buffer: Callable) -> str:
    """Share of draws from a full ring that contain non-consecutive rows."""
    obs = draw(*fill(make_buffer, 2 * LENGTH + 10)).obs
    return f"{np.any(np.diff(obs, axis=1) != 1, axis=1).mean():.1%}"


def keep_priority(make_buffer: Callable) -> str:
    """Share of draws, one row later, of the sequences that `set_priorities` gave a priority of a million."""
    buffer, state = fill(make_buffer, 2 * LENGTH + 10)
    first = buffer.sample(state, jax.random.key(0))
    state = buffer.set_priorities(state, first.indices, jnp.full(DRAWS, 1e6))
    state = buffer.add(state, make_steps(2 * LENGTH + 10))
    known = np.unique(first.experience.obs[:, 0])
    return f"{np.isin(draw(buffer, state).obs[:, 0], known).mean():.1%}"


def altered(make_buffer: Callable) -> str:
    """Drawn rows that differ from the added rows in any leaf, also across the seam."""
    found = draw(*fill(make_buffer, 2 * LENGTH + 10))
    expected = make_steps(0)
    obs = found.obs
    rows = {"next_obs": obs + 1, "reward": obs / 2, "done": (obs + 1) % 7 == 0, "prev_done": obs % 7 == 0}
    wrong = np.zeros(obs.shape, bool)
    for name, values in rows.items():
        wrong |= getattr(found, name) != values
    assert expected.obs.dtype == obs.dtype
    return f"{wrong.sum()} of {wrong.size:,}"


def targets() -> str:
    """Largest difference between memorax's n-step targets and jaxreplay's; no time limit ends an episode here."""
    keys = jax.random.split(jax.random.key(0), 3)
    shape, n, gamma = (64, 20), 3, 0.9
    rewards, values = (jax.random.normal(key, shape) for key in keys[:2])
    dones = jax.random.bernoulli(keys[2], 0.15, shape)
    found = compute_n_step_returns(rewards, dones.astype(jnp.float32), values, n, gamma)
    after = jnp.pad(values, ((0, 0), (1, 0)))  # value of a row's observation, the next observation of the row before
    add = [jnp.pad(x, ((0, 0), (0, 1))) for x in (rewards, dones)]
    no = jnp.zeros_like(add[1])
    batch, valid = jr.sequence_transitions(after, add[0], add[0], add[1], no, n=n, gamma=gamma)
    difference = jnp.abs(found.reshape(-1) - batch.Rn - batch.In * batch.S_next)
    return f"{jnp.max(jnp.where(valid, difference, 0.0)):.0e}"


def check(original: Callable, port: Callable) -> list[dict[str, str]]:
    """Rows of the table of checks; `original` draws from every row too."""

    def both(what: str, measure: Callable, *args: Any) -> dict[str, str]:
        return {"what": what, "original": measure(original, *args), "port": measure(port, *args)}

    draws = f"{DRAWS * ROUNDS:,} draws"
    part, full = 40, LENGTH * 2 + 10
    stored = [(part - SEQUENCE) * NUM_ENVS, (LENGTH - SEQUENCE) * NUM_ENVS]
    rows = [
        both(f"different sequences in {draws} from a ring half full, which has {stored[0]}", different, part),
        both(f"different sequences in {draws} from a full ring, which has {stored[1]}", different, full),
        both("draws from a full ring across the seam, from the newest row to the oldest", across_the_seam),
        both("draws of sequences with a priority of a million, one row after it was set", keep_priority),
        both("drawn rows that differ from those added", altered),
    ]
    what = "largest difference of n-step targets from `jr.sequence_transitions`, where every end is a termination"
    return [*rows, {"what": what, "original": targets(), "port": "the same code"}]
