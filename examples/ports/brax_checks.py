"""Checks of brax's queue and of the port, in numbers, with brax's own code.

brax's draws and its time limits are correct. Its queue is slow: once it is full, each insertion rolls the whole
storage. It stores an item as one row of one dtype, so an integer above 2^24 changes. In a run the small networks of
this task need most of a training step. Returns vary much from seed to seed in runs of 9,000 steps.
"""

import jax
import jax.numpy as jnp
import numpy as np
from brax.training.replay_buffers import UniformSamplingQueue
from brax_adapter import Replay

CAPACITY, ROWS, BATCH, ADDED = 100, 8, 1_000, 320
BIG = 2**24 + 1  # the smallest integer that float32 lacks


def items(first: int, count: int) -> dict[str, jax.Array]:
    """Numbered items, with one integer and one real number."""
    number = jnp.arange(first, first + count)
    return {"number": number, "half": number / 2}


def drawn(kind: type) -> dict[str, np.ndarray]:
    """20 draws of 1,000 items, after 320 were added, 8 per call."""
    replay = kind(CAPACITY, jax.tree.map(lambda x: x[0], items(0, 1)), BATCH)
    state, insert, sample = replay.init(jax.random.key(0)), jax.jit(replay.insert), jax.jit(replay.sample)
    for first in range(0, ADDED, ROWS):
        state = insert(state, items(first, ROWS))
    found = []
    for _ in range(20):
        state, batch = sample(state)
        found.append(batch)
    return jax.tree.map(lambda *x: np.concatenate(x), *found)


def wrong(kind: type) -> str:
    """Draws that are not an item as it was added, or not among the newest 100."""
    found = drawn(kind)
    number = found["number"]
    bad = (number < ADDED - CAPACITY) | (number >= ADDED) | (found["half"] != number / 2)
    return f"{bad.sum()} of {bad.size:,}"


def integer(kind: type) -> str:
    """The integer that is drawn after 2^24 + 1 was stored."""
    row = {"number": jnp.int32(BIG), "half": jnp.float32(0)}
    replay = kind(CAPACITY, row, 1)
    state = replay.insert(replay.init(jax.random.key(0)), jax.tree.map(lambda x: x[None], row))
    return f"{int(replay.sample(state)[1]['number'][0]):,}"


def copied(kind: type) -> str:
    """Bytes of temporaries of a donated insertion."""
    row = {"row": jnp.zeros(12)}
    replay = kind(100_000, row, 1)
    state = jax.eval_shape(replay.init, jax.random.key(0))
    added = jax.eval_shape(lambda: jax.tree.map(lambda x: jnp.tile(x, (ROWS, 1)), row))
    program = jax.jit(replay.insert, donate_argnums=0).lower(state, added).compile()
    return f"{program.memory_analysis().temp_size_in_bytes:,}"


def check() -> dict[str, list[str]]:
    """Findings in both versions."""
    rows = {
        f"draws of an item that was not added or is not among the newest {CAPACITY}": wrong,
        f"item that is drawn after the integer {BIG:,} was stored": integer,
        "bytes of temporaries of an insertion of 8 rows into 100,000 of 48 bytes": copied,
    }
    return {what: [of(UniformSamplingQueue), of(Replay)] for what, of in rows.items()}
