"""Where random tests get their randomness: JAXREPLAY_SEED, an integer, varies all of it; without it every run is alike.

The thorough twins, which are slow, take a seed that is new in each run. It is shown when one fails, and JAXREPLAY_SEED
repeats it.
"""

import os
import secrets
import zlib

import jax
import numpy as np

GIVEN = os.environ.get("JAXREPLAY_SEED") or None
SEED = int(GIVEN or 0)


def fresh():
    """A seed that is new in each run; all processes of a run have the same one, by way of the environment."""
    return int(GIVEN or os.environ.setdefault("JAXREPLAY_FRESH_SEED", str(secrets.randbelow(2**31))))


def text():
    """What the report says of the seeds."""
    return f"JAXREPLAY_SEED={SEED}; of slow twins JAXREPLAY_SEED={fresh()}"


def rng(*names, seed=SEED):
    """A NumPy generator of its own for each tuple of integers and strings."""
    numbers = [zlib.crc32(name.encode()) if isinstance(name, str) else int(name) for name in names]
    return np.random.default_rng([*numbers, seed])  # with seed 0 and few names that of the names alone


def key(*names, seed=SEED):
    """A JAX key, likewise."""
    return jax.random.key(int(rng(*names, seed=seed).integers(2**31)))
