"""SequenceBuffer: streams of steps, each stored once, and the sequences of consecutive steps that are drawn from them.

Sequences are views: a step that lies in many of them is still stored once, and so is an observation that is the next
one of the step before it or a part of several frame stacks. `stack_frames` and `jaxreplay.sequence_transitions` make
these from a drawn sequence.

**What to store.** A row holds an observation, the action that was taken there, and the reward and the flags that came
of it; the next observation is that of the next row. So the last observation of an episode must be a row too, one
without a step, or else a truncated episode has nothing to bootstrap from. Environments that reset at the call after an
episode's end (next-step autoreset, the default of Gymnasium 1) give such rows by themselves; those that reset within
the last step (same-step autoreset) do with `jaxreplay.NextStepAutoreset`. Store with each row whether it holds a step,
e.g. as a leaf `step`. `ends` is True for the last row of an episode: here the rows without a step; in a stream without
such rows, those that are terminated or truncated.
"""

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import struct
from jax import lax

from jaxreplay import ring
from jaxreplay._common import checks, layouts
from jaxreplay._common.checks import check_integer, settle
from jaxreplay._common.xla import jit_method, materialize
from jaxreplay.buffer import Buffer
from jaxreplay.samplers import Sampler, Uniform, check_sampler
from jaxreplay.transition_batch import check_returns


@struct.dataclass
class SequenceState:
    """State of a `SequenceBuffer`.

    Attributes:
      storage: the steps, leaves [length, num_envs, ...] as the backend wants them (`jaxreplay._common.layouts`).
      ends: likewise, bool [length, num_envs], which steps were the last of their episode; None unless `within_episode`.
      rows: the rows of the storage: where the next step goes, and how many hold one.
      wait: int32 [], steps to come until the next sequence is complete, at least 1.
      ring: the complete sequences. Slot k * num_envs + env is that of environment env's sequence number k, modulo the
        number of slots.
      sampler: the sampler's state.
    """

    storage: Any  # [length, num_envs, ...]
    ends: Any  # [length, num_envs]
    rows: ring.Ring
    wait: jax.Array  # []
    ring: ring.Ring
    sampler: Any

    def on_this_backend(self) -> "SequenceState":
        """The same state with a storage as this backend wants it."""
        storage, ends = layouts.on_this_backend((self.storage, self.ends), 2, self.wait.ndim)
        return dataclasses.replace(self, storage=storage, ends=ends)


@dataclasses.dataclass(frozen=True, kw_only=True)
class SequenceBuffer(Buffer[SequenceState]):
    """Replay of sequences of `sequence_length` consecutive steps from `num_envs` streams that advance together.

    A sequence starts at every `stride`-th step, counted from the first that was ever added. It can be drawn while all
    of its steps are stored: from when its last step is added until its first is overwritten. None contains the place
    where the newest step meets the oldest. What to store is said at the head of this module.

    Handles, late updates, samplers and donation are those of `ReplayBuffer`; handles name sequences.

    Attributes:
      length: steps kept of each stream; length * num_envs is at most 2**29.
      num_envs: number of streams.
      sequence_length: steps in a sequence, 1 to `length`.
      stride: steps from one start to the next, 1 to `length`.
      sampler: the law of the draw, `Uniform()` or `Prioritized(...)`.
      within_episode: mask out (`Sample.mask`) the steps behind the first end in a sequence.
      donate: donate the state when `add` or `update` is called eagerly.
    """

    length: int
    num_envs: int
    sequence_length: int
    stride: int = 1
    sampler: Sampler = Uniform()
    within_episode: bool = False
    donate: bool = True
    _axis_name: str | None = dataclasses.field(default=None, repr=False)
    _batch_axes: ClassVar[int] = 2
    _cut: ClassVar[str] = "num_envs"

    def __post_init__(self):
        num_envs = check_integer("num_envs", self.num_envs, 1, ring.MAX_CAPACITY, "the number of streams")
        longest = ring.MAX_CAPACITY // num_envs
        length = check_integer("length", self.length, 1, longest, "the number of steps kept of each stream")
        settle(
            self,
            num_envs=num_envs,
            length=length,
            sequence_length=check_integer(
                "sequence_length", self.sequence_length, 1, length, "at most length, the steps kept"
            ),
            stride=check_integer("stride", self.stride, 1, length, "the number of steps between starts"),
            sampler=check_sampler(self.sampler),
        )

    def init(self, steps: Any) -> SequenceState:
        """An empty buffer for steps like these.

        Args:
          steps: pytree [T, num_envs, ...] of arrays or `jax.ShapeDtypeStruct`, as `add` will take them; T and the
            values are ignored.

        Raises:
          ValueError: no leaves, leading axes that differ or are not `num_envs`, or a `TransitionBatch` whose `In` or
            `W` has another shape than its `Rn`.
        """
        spec = checks.as_spec(steps)
        self._num_steps(spec)
        check_returns(spec)
        leading = (self.length, self.num_envs)
        return SequenceState(
            storage=layouts.zeros(spec, leading, 2),
            ends=layouts.zeros(jax.ShapeDtypeStruct((), bool), leading, 0) if self.within_episode else None,
            rows=ring.init(self.length),
            wait=jnp.full((), self.sequence_length, jnp.int32),
            ring=ring.init(self._num_slots),
            sampler=self.sampler.init(self._num_slots),
        )

    @jit_method(donates=True)
    def add(self, state: SequenceState, steps: Any, ends: jax.Array | None = None) -> SequenceState:
        """Append T steps to every stream, overwriting the oldest once the buffer is full.

        Args:
          state: donated when called eagerly (see the class).
          steps: pytree [T, num_envs, ...] with the structure, shapes and dtypes given to `init`; 1 <= T <= length, and
            another T each time if need be (each compiles once).
          ends: bool [T, num_envs], True for the last row of an episode; None for none. They are kept and made use of
            `within_episode` alone.

        Raises:
          ValueError: wrong structure, shape or dtype; the message names the leaf.
        """
        self._check_state(state)
        steps, ends = self._check_rollout(state, steps, ends)
        num_steps = ends.shape[0]
        old_sequences = ring.after(state.ring, steps, ends)
        old_rows = ring.after(state.rows, old_sequences.inserted)
        at, count = ring.next_slots(old_rows, None, num_steps, self.length)
        rows = ring.advance(old_rows, count, self.length)
        new = (steps, ends if self.within_episode else None)
        storage, ends = layouts.write((state.storage, state.ends), at, new)

        # Sequences of each stream: completed by these steps, and drawable from now on.
        completed = jnp.maximum(num_steps - state.wait + self.stride, 0) // self.stride
        wait = state.wait + completed * self.stride - num_steps
        drawable = jnp.maximum(rows.size + wait - self.sequence_length, 0) // self.stride
        sequences = ring.advance(old_sequences, completed * self.num_envs, self._num_slots)
        slots, is_drawable = self._changed_slots(sequences, num_steps, completed, drawable)
        return SequenceState(
            storage=storage,
            ends=ends,
            rows=rows,
            wait=wait,
            ring=dataclasses.replace(sequences, size=drawable * self.num_envs),
            sampler=self.sampler.insert(state.sampler, slots, is_drawable),
        )

    def is_full(self, state: SequenceState) -> jax.Array:
        """Whether the next step overwrites, bool []."""
        return ring.at_least(state.rows.size, self.length)

    @property
    def _num_starts(self) -> int:
        """The most sequences of one stream that can be drawn at a time."""
        return (self.length - self.sequence_length) // self.stride + 1

    @property
    def _num_slots(self) -> int:
        return self._num_starts * self.num_envs

    def _num_steps(self, spec: Any) -> int:
        num_steps, num_envs = checks.leading_axes(spec, 2, "a rollout")
        if num_envs != self.num_envs:
            raise ValueError(
                f"num_envs={self.num_envs}: got steps with leading axes [{num_steps}, {num_envs}], expected "
                f"[T, {self.num_envs}]."
            )
        return num_steps

    def _check_rollout(self, state: SequenceState, steps: Any, ends: Any) -> tuple[Any, jax.Array]:
        """`steps` and `ends` as arrays; a `ValueError` where `add` cannot take them."""
        steps = checks.as_arrays(steps)
        num_steps = self._num_steps(steps)
        if not 1 <= num_steps <= self.length:
            raise ValueError(
                f"a rollout of {num_steps} steps: expected 1 to length={self.length}; add it in parts, or raise the "
                "length."
            )
        ends = jnp.zeros((num_steps, self.num_envs), bool) if ends is None else ends
        ends = checks.check_mask(ends, (num_steps, self.num_envs), "ends")
        checks.check_like(steps, layouts.stored_spec(state.storage), 2, 2, "the buffer")
        return steps, ends

    def _check_state(self, state: SequenceState) -> None:
        found = layouts.leading(state.storage, 2)
        if state.ring.size.shape != () or found != (self.length, self.num_envs):
            raise ValueError(
                f"length={self.length}, num_envs={self.num_envs}: this state has leading axes {list(found)}; use the "
                "buffer that made it, and jax.vmap for a stack of states."
            )
        self._check_sampler(state)

    def _live(self, state: SequenceState) -> ring.Live:
        # The newest `size` of those that were completed.
        start = (state.ring.inserted - state.ring.size) % self._num_slots
        return ring.Live(start=start, size=state.ring.size)

    def _changed_slots(
        self, sequences: ring.Ring, num_steps: int, completed: jax.Array, drawable: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """Slots that change as steps are added, int32 [K * num_envs], and whether they are drawable from now on.

        They are those of the sequences completed, and the oldest slot, which for a while may hold a sequence that is
        partly overwritten. A slot that does not change after all is out of range.
        """
        num_starts = self._num_starts
        ages = [*range(min((num_steps - 1) // self.stride + 1, num_starts))]
        always_drawable = (self.length - self.sequence_length + 1) % self.stride == 0
        if not always_drawable and len(ages) < num_starts:
            ages.append(num_starts - 1)
        age = jnp.asarray(ages, jnp.int32)
        start = lax.div(sequences.inserted % self._num_slots, jnp.int32(self.num_envs)) - 1 - age
        start = jnp.where(start < 0, start + num_starts, start)
        slots = start[:, None] * self.num_envs + jnp.arange(self.num_envs, dtype=jnp.int32)[None]
        changed = (age < completed) | (age >= drawable)
        slots = jnp.where(changed[:, None], slots, self._num_slots)
        return slots.reshape(-1), jnp.repeat(age < drawable, self.num_envs)

    def _first_rows(self, state: SequenceState, age: jax.Array) -> jax.Array:
        """Rows of the first steps of the sequences that were completed `age` starts ago (0 for the newest)."""
        row = state.rows.inserted % self.length + state.wait - self.sequence_length - (age + 1) * self.stride
        return jnp.clip(jnp.where(row < 0, row + self.length, row), 0, self.length - 1)

    def _read(self, state: SequenceState, slots: jax.Array, fill: bool) -> tuple[Any, jax.Array]:
        start = lax.div(slots, jnp.int32(self.num_envs))
        env = slots - start * self.num_envs
        age = lax.div(state.ring.inserted % self._num_slots, jnp.int32(self.num_envs)) - 1 - start
        age = jnp.where(age < 0, age + self._num_starts, age)
        rows = self._first_rows(state, age)[:, None] + jnp.arange(self.sequence_length, dtype=jnp.int32)[None]
        rows = jnp.where(rows >= self.length, rows - self.length, rows)  # [B, sequence_length]
        exists = jnp.broadcast_to((slots < self._num_slots)[:, None], rows.shape)
        at = jnp.where(exists, rows * self.num_envs + env[:, None], self.length * self.num_envs)
        (at,) = materialize(at)
        items, ends = layouts.read(layouts.merge_axes((state.storage, state.ends)), at, fill=fill)
        mask = exists
        if ends is not None:
            mask &= jnp.cumsum(ends, axis=1, dtype=jnp.int32) == ends.astype(jnp.int32)  # no end before
        return items, mask
