"""Checks of jaxued's level sampler and of the port, in numbers.

jaxued's `LevelSampler` draws with the right probabilities. When its buffer is full, a new level replaces the level that
is least likely in a draw. With staleness that can be a level that was just drawn, and not the one with the lowest
score. One score that is NaN can keep better levels out. It finds a level that is already stored, which `Levels` does
not do. It sorts all scores again for each level that it inserts or draws, which the port does once for a batch. jaxued
itself trains much longer than this comparison.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

CAPACITY, INSERTED, BATCH, DRAWS = 100, 2_000, 20, 20_000
STALENESS, TEMPERATURE = 0.3, 0.3  # of jaxued's script


def make(sampler: Callable, capacity: int, duplicates: bool = True) -> Any:
    return sampler(
        capacity=capacity,
        replay_prob=0.8,
        staleness_coeff=STALENESS,
        minimum_fill_ratio=0.5,
        prioritization="rank",
        prioritization_params={"temperature": TEMPERATURE},
        duplicate_check=duplicates,
    )


def start(sampler: Any, scores: np.ndarray) -> Any:
    """The state after an insertion of the levels 0, 1, ... with these scores."""
    return insert(sampler, empty(sampler), jnp.arange(len(scores)), scores)


def empty(sampler: Any) -> Any:
    return sampler.initialize(jnp.int32(0), {"max_return": 0.0})


def insert(sampler: Any, state: Any, levels: jax.Array, scores: jax.Array) -> Any:
    extra = {"max_return": jnp.zeros(len(scores))}
    return sampler.insert_batch(state, levels, jnp.asarray(scores, jnp.float32), extra)[0]


def best_kept(kind: Callable) -> str:
    """The number of the `CAPACITY` highest scores that are stored. Draws follow each insertion."""
    scores = np.random.default_rng(0).permutation(INSERTED).astype(np.float32).reshape(-1, BATCH)
    sampler = make(kind, CAPACITY)

    def step(state: Any, new: tuple) -> tuple[Any, None]:
        levels, scores, key = new
        return sampler.sample_replay_levels(insert(sampler, state, levels, scores), key, BATCH)[0], None

    rows = jnp.arange(INSERTED).reshape(-1, BATCH), scores, jax.random.split(jax.random.PRNGKey(0), len(scores))
    state = jax.jit(lambda rows: jax.lax.scan(step, empty(sampler), rows)[0])(rows)
    return str(int(np.sum(np.asarray(state["scores"]) >= INSERTED - CAPACITY)))


def after_nan(kind: Callable) -> str:
    """How many of 8 levels with higher scores are stored in a full buffer, one of whose scores was set to NaN."""
    sampler = make(kind, 8)
    state = start(sampler, np.arange(8))
    extra = {"max_return": jnp.zeros(1)}
    state = sampler.update_batch(state, jnp.array([3]), jnp.array([jnp.nan]), extra)
    state = insert(sampler, state, jnp.arange(8, 16), np.arange(8, 16))
    return str(int(np.sum(np.asarray(state["scores"]) >= 8)))


def chi_square(kind: Callable) -> str:
    """Of first draws from 16 levels, against the formula in float64."""
    sampler = make(kind, 16)
    scores = np.random.default_rng(1).permutation(16)
    state = start(sampler, scores)
    keys = jax.random.split(jax.random.PRNGKey(0), DRAWS)
    slots = jax.jit(jax.vmap(lambda key: sampler.sample_replay_levels(state, key, 1)[1][0][0]))(keys)
    by_score = (1 / (16 - scores)) ** (1 / TEMPERATURE)
    stale = 15.0 - np.arange(16)
    p = (1 - STALENESS) * by_score / by_score.sum() + STALENESS * stale / stale.sum()
    counts = np.bincount(np.asarray(slots), minlength=16)
    return f"{np.sum((counts - DRAWS * p) ** 2 / (DRAWS * p)):.0f}"


def copies(kind: Callable) -> str:
    """Slots with a level that was inserted twice."""
    sampler = make(kind, 8)
    state = start(sampler, np.ones(4))
    return str(int(insert(sampler, state, jnp.array([2]), np.array([2.0]))["size"]) - 3)


def check(original: Callable, port: Callable) -> list[dict[str, str]]:
    """The results of both versions."""
    rows = {
        f"of the {CAPACITY} highest scores of {INSERTED:,} levels, those kept in a buffer of {CAPACITY}": best_kept,
        "of 8 levels with higher scores, those stored in a full buffer that holds a score of NaN": after_nan,
        f"chi-square of {DRAWS:,} draws from 16 levels, 15 ± 11 in 95% of cases": chi_square,
        "slots of a level that was inserted twice": copies,
    }
    return [{"what": what, "original": of(original), "port": of(port)} for what, of in rows.items()]
