"""(k) Tasks drawn by a score: draw B tasks, learn the rewards of their groups, score them anew and draw again."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from harness import LoopProgram, ScanProgram
from pools import ROLLOUTS
from settings import Setting

import jaxreplay as jr


def _rewards(tasks, xp):
    """Rewards [B, ROLLOUTS]: a third of the tasks is never solved, a third half the time, a third always."""
    solved = xp.where(tasks % 3 == 1, ROLLOUTS // 2, (tasks % 3) * ROLLOUTS)
    return (xp.arange(ROLLOUTS) < solved[:, None]).astype(np.float32)


def jaxreplay_tasks(setting: Setting) -> ScanProgram:
    tasks = jr.Tasks(num_tasks=setting.capacity)

    def step(carry, key):
        state, _ = carry
        drawn, _ = tasks.sample(state, key, setting.batch_size)
        return tasks.update(state, drawn, _rewards(drawn, jnp))

    return ScanProgram(step, jax.tree.map(jnp.copy, (tasks.init(), jnp.zeros(setting.batch_size, bool))))


def _levels_program(setting: Setting, state: Any, draw: Callable, update: Callable, steps: int = 200) -> ScanProgram:
    """Draw levels, which are task numbers, and score them; the state is full."""

    def step(carry, key):
        state, slots, drawn = draw(carry[0], key)
        rate = _rewards(drawn, jnp).mean(axis=1)
        return update(state, slots, rate * (1 - rate)), drawn

    carry = state, jnp.zeros(setting.batch_size, jnp.int32)
    return ScanProgram(step, jax.tree.map(jnp.copy, carry), steps=steps)


def _full(setting: Setting) -> dict[str, Any]:
    """Levels, their scores and their number."""
    capacity = setting.capacity
    numbers, scores = jnp.arange(capacity, dtype=jnp.int32), jnp.full(capacity, 0.25, jnp.float32)
    return {"levels": numbers, "scores": scores, "size": jnp.int32(capacity)}


def jaxreplay_levels(setting: Setting) -> ScanProgram:
    """`Levels` by rank."""
    levels = jr.Levels(capacity=setting.capacity, temperature=1.0, staleness=0.5)
    state = levels.init(jnp.int32(0)).replace(**_full(setting))
    return _levels_program(setting, state, lambda *x: levels.sample(*x, setting.batch_size), levels.update)


def jaxued_levels(setting: Setting) -> ScanProgram:
    """Its level sampler; the settings are its defaults."""
    from jaxued.level_sampler import LevelSampler

    levels = LevelSampler(setting.capacity)
    state = {**levels.initialize(jnp.int32(0)), **_full(setting), "episode_count": jnp.int32(0)}

    def draw(state, key):
        state, (slots, drawn) = levels.sample_replay_levels(state, key, setting.batch_size)
        return state, slots, drawn

    return _levels_program(setting, state, draw, levels.update_batch, steps=3)  # it sorts all scores for each level


def numpy_tasks(setting: Setting) -> LoopProgram:
    """The counts, scores and draws of `Tasks` in NumPy, as one would write them."""
    rng = np.random.default_rng(0)
    successes, trials = np.zeros(setting.capacity), np.zeros(setting.capacity)
    scores = np.full(setting.capacity, 0.25)

    def step():
        drawn = rng.choice(setting.capacity, setting.batch_size, p=scores / scores.sum())
        np.add.at(successes, drawn, _rewards(drawn, np).sum(axis=1))
        np.add.at(trials, drawn, ROLLOUTS)
        rate = (successes[drawn] + 1) / (trials[drawn] + 2)
        scores[drawn] = rate * (1 - rate)

    return LoopProgram(step)
