"""The state of a `SequenceBuffer`."""

from typing import Any, ClassVar

import jax
from flax import struct

from jaxreplay._common import layouts, ring
from jaxreplay.buffers import _chosen_sequences, _later_steps
from jaxreplay.buffers._size import State


@struct.dataclass(kw_only=True)
class SequenceState(State):
    """State of a `SequenceBuffer`.

    Attributes:
      storage: the steps, leaves [length, num_envs, ...] as the backend wants them (`jaxreplay._common.layouts`).
      ends: bool [length, num_envs] in the same layout, True for the last step of an episode; with `gaps` uint8, the
        flags of `jaxreplay.buffers._episode_flags`; None if not needed.
      rows: the ring of rows: the cursor of the next step, and the number of rows stored.
      wait: int32 [], number of steps until the next sequence is complete, at least 1.
      ring: the ring of complete sequences. Sequence number k of environment env has slot k * num_envs + env, modulo the
        number of slots. With `windows` "inside" or "episodes", or with `gaps`, the ring holds only the drawable
        sequences, in order of completion.
      sampler: the sampler's state.
      uses: of the items (`jaxreplay.buffers._uses`); None without `count_updates` and `max_uses`.
      windows: places of the drawable sequences; None if all are drawable (windows "any" and "cut", without `gaps`).
      episodes: the number of each row's episode; None without `hindsight`.

    Examples:
      >>> buffer = jr.SequenceBuffer(length=4, num_envs=1, sequence_length=2)
      >>> steps = jnp.array([[1], [2], [3]])
      >>> state = buffer.add(buffer.init(steps), steps)
      >>> int(state.rows.size), int(state.ring.size)  # 3 steps hold 2 sequences
      (3, 2)
    """

    ends: Any  # [length, num_envs]
    rows: ring.Ring
    wait: jax.Array  # []
    windows: _chosen_sequences.ChosenSequences | None = None
    episodes: _later_steps.EpisodeNumbers | None = None
    _layouts: ClassVar = {"storage": layouts.storage_layout(2), "ends": layouts.storage_layout(2)}
