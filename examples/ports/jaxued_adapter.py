"""Adapter of jaxued's prioritized level replay, for `jaxued_plr.py`: `jr.Levels` with the methods of `LevelSampler`."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

import jaxreplay as jr


@struct.dataclass
class Sampler:
    """The levels, and what jaxued keeps for each, by slot."""

    state: jr.curricula.LevelsState
    extra: Any  # [N, ...]

    def __getitem__(self, name: str) -> jax.Array:
        return {"size": self.state.size, "episode_count": self.state.count, "scores": self.state.scores}[name]


class LevelSampler:
    """jaxued's settings, ranks only. Levels are not compared, so `duplicate_check` is not used."""

    def __init__(
        self,
        capacity: int,
        replay_prob: float,
        staleness_coeff: float,
        minimum_fill_ratio: float,
        prioritization_params: dict[str, float],
        **others: Any,
    ):
        self.capacity = capacity
        self.levels = jr.Levels(
            capacity=capacity,
            temperature=prioritization_params["temperature"],
            staleness=staleness_coeff,
            replay_probability=replay_prob,
            min_filled=minimum_fill_ratio,
        )

    def initialize(self, level: Any, extra: Any) -> Sampler:
        return Sampler(self.levels.init(level), jax.tree.map(lambda x: jnp.full(self.capacity, x), extra))

    def insert_batch(self, sampler: Sampler, levels: Any, scores: jax.Array, extra: Any) -> tuple[Sampler, jax.Array]:
        state, slots = self.levels.insert(sampler.state, levels, scores)
        return Sampler(state, self._write(sampler.extra, slots, extra)), slots

    def update_batch(self, sampler: Sampler, slots: jax.Array, scores: jax.Array, extra: Any) -> Sampler:
        return Sampler(self.levels.update(sampler.state, slots, scores), self._write(sampler.extra, slots, extra))

    def sample_replay_levels(self, sampler: Sampler, key: jax.Array, num: int) -> tuple[Sampler, tuple]:
        state, slots, levels = self.levels.sample(sampler.state, key, num)
        return sampler.replace(state=state), (slots, levels)

    def sample_replay_decision(self, sampler: Sampler, key: jax.Array) -> jax.Array:
        return self.levels.replay(sampler.state, key)

    def level_weights(self, sampler: Sampler) -> jax.Array:
        return self.levels.probabilities(sampler.state)

    def get_levels(self, sampler: Sampler, slot: jax.Array) -> Any:
        return jax.tree.map(lambda x: x[0], self.levels.get(sampler.state, slot[None]))

    def get_levels_extra(self, sampler: Sampler, slots: jax.Array) -> Any:
        return jax.tree.map(lambda x: x[slots], sampler.extra)

    def _write(self, extra: Any, slots: jax.Array, new: Any) -> Any:
        slots = jnp.where(slots < 0, self.capacity, slots)
        return jax.tree.map(lambda x, y: x.at[slots].set(y, mode="drop"), extra, new)
