"""mujax's replay on `jaxreplay.Shared`, and a reanalysis that keeps what it finds."""

import contextlib
import threading
from typing import Any

import jax
import numpy as np
from flax import struct
from mujax.reanalyze import Reanalyzer
from mujax.replay import _item_template as item_template
from mujax.types import EnvironmentSpec, Transition

import jaxreplay as jr


@struct.dataclass
class Drawn:
    """Sequences as mujax's learner takes them, and their handles."""

    experience: Transition  # [B, T, ...]
    indices: jax.Array  # [B]


class Adder:
    """The write handle of one actor, which no other actor waits for."""

    def __init__(self, actor: Any):
        self.actor = actor

    def add(self, transition: Transition) -> None:
        with contextlib.suppress(jr.Closed):
            self.actor.add(jax.tree.map(lambda x: x[None], transition))


class SharedReplay:
    """mujax's `Buffer`: one source of a mixture for each actor."""

    def __init__(
        self,
        spec: EnvironmentSpec,
        *,
        num_envs: int,
        max_size: int,
        sample_batch_size: int,
        sequence_length: int,
        min_size: int = 0,
        period: int = 1,
        replay_ratio: float | None = None,
        stop_event: threading.Event | None = None,
        num_actors: int = 1,
    ):
        length = max_size // (num_envs * num_actors)
        sizes = {"num_envs": num_envs, "length": length, "sequence_length": sequence_length, "stride": period}
        mixture = jr.Mixture(buffers=(jr.SequenceBuffer(**sizes),) * num_actors, weights="joint")
        steps = jax.tree.map(lambda x: jax.ShapeDtypeStruct((1, num_envs, *x.shape), x.dtype), item_template(spec))
        drawable = max(1, min_size - num_envs * num_actors * (sequence_length - 1))
        self.shared = jr.Shared(mixture, mixture.init(steps), ratio=replay_ratio, min_size=drawable)
        self.batch_size, self.room = sample_batch_size, length * num_envs * num_actors
        # A batch is sorted by actor, and reanalysis takes its first rows.
        self.order = np.random.default_rng(0).permutation(sample_batch_size)
        if stop_event is not None:
            stop_event.set = lambda stop=stop_event.set: (stop(), self.shared.close())  # threads that wait stop too

    def adder(self, index: int) -> Adder:
        return Adder(self.shared.actor(index))

    def sample(self, key: jax.Array) -> Drawn | None:
        with contextlib.suppress(jr.Closed):
            sample = self.shared.sample(key, self.batch_size)
            return jax.tree.map(lambda x: x[self.order], Drawn(sample.items, sample.indices))

    def keep(self, drawn: Drawn, mask: np.ndarray) -> None:
        """Store the policies and values of drawn sequences where the mask [B, T] is True."""
        nothing = Transition(*[None] * len(Transition._fields))
        found = nothing._replace(policy_probs=drawn.experience.policy_probs, value=drawn.experience.value)
        back = np.argsort(self.order)
        rows = jax.tree.map(lambda x: x[back], (drawn.indices, found, mask))
        with contextlib.suppress(jr.Closed):
            self.shared.set(rows[0], rows[1], mask=rows[2])

    @property
    def size(self) -> int:
        return self.shared.size()

    def metrics(self) -> dict[str, float]:
        shared = self.shared
        ratio = shared.drawn / max(1, shared.added)
        return {"buffer_size": self.size, "buffer_fill_ratio": self.size / self.room, "replay_ratio": ratio}


class KeepingReanalyzer(Reanalyzer):
    """Writes the searched policies and values back, for later draws (Schrittwieser et al. 2021, arXiv:2104.06294)."""

    def __next__(self) -> Drawn:
        drawn = super().__next__()
        rows, steps = np.indices(drawn.experience.value.shape)
        self._replay.keep(drawn, (rows < self._num_reanalyze) & (steps < self._num_search))
        return drawn
