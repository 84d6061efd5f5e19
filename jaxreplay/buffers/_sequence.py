"""SequenceBuffer: draws sequences of consecutive steps from streams of steps.

Sequences are views: a step is stored once, however many sequences contain it. An observation is stored once, although
it is also the next observation of the step before, and part of several frame stacks. `jaxreplay.stack_frames` and
`jaxreplay.sequence_transitions` make these from drawn sequences.
"""

import dataclasses
from typing import Any, ClassVar, Literal

import jax
import jax.numpy as jnp
from flax import struct

from jaxreplay._common import calls, checks, devices, layouts, ring, xla
from jaxreplay.buffers import _chosen_sequences, _episodes, _every_sequence
from jaxreplay.buffers._base import Buffer
from jaxreplay.buffers._state import State, check_once
from jaxreplay.transitions._batch import check_returns, without_valid


@struct.dataclass(kw_only=True)
class SequenceState(State):
    """State of a `SequenceBuffer`.

    Attributes:
      storage: the steps, leaves [length, num_envs, ...] as the backend wants them (`jaxreplay._common.layouts`).
      ends: bool [length, num_envs] in the same layout, True for the last step of an episode; with `gaps` uint8, the
        flags of `jaxreplay.buffers._episodes`; None if not needed.
      rows: the ring of rows: the cursor of the next step, and the number of rows stored.
      wait: int32 [], number of steps until the next sequence is complete, at least 1.
      ring: the ring of complete sequences. Sequence number k of environment env has slot k * num_envs + env, modulo the
        number of slots. With `windows` "inside" or "episodes", or with `gaps`, the ring holds only the drawable
        sequences, in order of completion.
      sampler: the sampler's state.
      uses: of the items (`jaxreplay.buffers._uses`); None without `count_updates` and `max_uses`.
      windows: places of the drawable sequences; None if all are drawable (windows "any" and "cut", without `gaps`).
      episodes: the number of each row's episode; None without `hindsight`.
      sequences: the buffer's `sequence_length` and `stride` (static).

    Examples:
      >>> state = sequences.add(sequences.init(steps), steps, ends=ends)
      >>> int(state.rows.size), int(state.ring.size)  # 3 steps hold 2 sequences
      (3, 2)
    """

    ends: Any  # [length, num_envs]
    rows: ring.Ring
    wait: jax.Array  # []
    windows: _chosen_sequences.ChosenSequences | None = None
    episodes: _episodes.EpisodeNumbers | None = None
    sequences: tuple[int, int] = struct.field(pytree_node=False)
    _layouts: ClassVar = {"storage": layouts.storage_layout(2), "ends": layouts.storage_layout(2)}
    _noun: ClassVar = "sequences", 0


@checks.config
class SequenceBuffer(Buffer[SequenceState]):
    """Stores steps of `num_envs` streams in lockstep, and draws sequences of `sequence_length` consecutive steps.

    A sequence starts at every `stride`-th step, counted from the first step ever added. It can be drawn while all its
    steps are stored: from the addition of its last step until its first step is overwritten. No sequence contains the
    seam between the newest and the oldest step.

    **What to store.** A row holds an observation, the action taken there, and the reward and flags that followed. The
    next observation is in the next row. The last observation of an episode therefore needs a row of its own,
    without a step; otherwise a truncated episode has nothing to bootstrap from. Environments that reset in the call
    after an episode's end (next-step autoreset, the default of Gymnasium 1) return such rows. Environments that reset
    within the last step (same-step autoreset) return them through `jaxreplay.NextStepAutoreset`. Store a flag with each
    row, such as a leaf `step`, that is True if the row holds a step; it also gives `ends`.

    Handles, late updates, samplers, donation and errors are as for `ReplayBuffer`. A handle names a sequence.

    Attributes:
      length: number of steps kept of each stream; length * num_envs is at most 2**29.
      num_envs: number of streams.
      sequence_length: number of steps in a sequence, 1 to `length`.
      stride: steps from one start to the next, 1 to length - sequence_length + 1, so that a full buffer always holds a
        whole sequence.
      sampler: the sampling distribution, `Uniform()` or `Prioritized(...)`.
      windows: the drawable sequences, and the steps that `Sample.mask` leaves out.
        "any": all sequences; no step is masked out.
        "cut": all sequences. The steps after a sequence's first end are masked out.
        "inside": sequences without an end before their last row.
        "episodes": sequences that start with an episode's first row (the first row ever added, or the row after an
        end). The steps after the episode's end are masked out. An episode may start at any row, so `stride` must be 1.
        It can be drawn once `sequence_length` rows from its first one are stored, even if it is shorter.
        The sampling distribution is over the drawable sequences, and `size` and `can_sample` count them. If rows
        without a step are stored as above, no sequence of "inside" or "episodes" with two rows or more starts at one.
      gaps: allow `add(drawable=)`, and `end_streams` with "any" and "cut" too; costs 4 bytes a sequence with these.
      hindsight: store the number of each row's episode (4 bytes a row), which `later` needs.
      count_updates, max_uses, donate: as for `ReplayBuffer`.

    Examples:
      >>> buffer = jr.SequenceBuffer(length=4, num_envs=1, sequence_length=2)
      >>> steps = np.array([[1], [2], [3]])  # [T, num_envs]
      >>> state = buffer.add(buffer.init(steps), steps)
      >>> state = buffer.add(state, steps + 3)  # overwrites 1 and 2
      >>> buffer.get(state, buffer.newest(state, 3)).tolist()  # the drawable sequences
      [[3, 4], [4, 5], [5, 6]]
    """

    length: int
    num_envs: int = checks.field(checks.check_integer, 1, ring.MAX_CAPACITY, "the number of streams")
    sequence_length: int
    stride: int = 1
    windows: Literal["any", "cut", "inside", "episodes"] = checks.choice("any", "cut", "inside", "episodes")
    gaps: bool = checks.field(checks.check_bool, "True to allow `add(drawable=)`", default=False)
    hindsight: bool = checks.field(checks.check_bool, "True to allow `later`", default=False)
    _state_kind: ClassVar[type] = SequenceState
    _storage_axes: ClassVar[tuple[str, ...]] = ("length", "num_envs")

    def _check_fields(self) -> None:
        super()._check_fields()
        integer, longest = checks.check_integer, ring.MAX_CAPACITY // self.num_envs
        checks.set_checked(self, "length", integer, 1, longest, "the number of steps kept of each stream")
        checks.set_checked(self, "sequence_length", integer, 1, self.length, "at most length, the steps kept")
        checks.set_checked(self, "stride", integer, 1, self.length, "the number of steps between starts")
        room = self.length - self.sequence_length + 1
        if room < self.stride:
            found = f"length={self.length}, sequence_length={self.sequence_length}, stride={self.stride}"
            remedy = f"raise length to {self.sequence_length + self.stride - 1}, or lower stride to {room}"
            raise ValueError(f"{found}: the buffer would at times hold no whole sequence; {remedy}.")
        if self.windows == "episodes" and self.stride > 1:
            raise ValueError(f'stride={self.stride}: must be 1 with windows="episodes"; episodes start at any row.')

    def init(self, steps: Any) -> SequenceState:
        """State of an empty buffer for steps like these.

        Args:
          steps: pytree [T, num_envs, ...] of arrays or `jax.ShapeDtypeStruct`, as `add` will take them; T and the
            values are ignored.

        Raises:
          ValueError: no leaves, leading axes that differ or are not `num_envs`, or a `TransitionBatch` whose `In` or
            `W` has another shape than its `Rn`; or the state does not fit the device.

        Examples:
          >>> state = sequences.init({"obs": jax.ShapeDtypeStruct((3, 1, 2), jnp.uint8)})  # any T
          >>> int(sequences.size(state))
          0
        """
        spec, _ = without_valid(checks.as_spec(steps))
        self._num_steps(spec)
        check_returns(spec)
        return devices.init_on(steps, lambda: SequenceState(**self._empty(spec)))

    def _empty(self, spec: Any) -> Any:
        flag = jax.ShapeDtypeStruct((), jnp.uint8 if self.gaps else bool)
        return super()._empty(spec) | {
            "ends": layouts.zeros(flag, (self.length, self.num_envs), 0) if self._keeps_ends else None,
            "rows": ring.init(self.length),
            "wait": xla.full((), self.sequence_length, jnp.int32),
            "windows": self._drawable.init(self),
            "episodes": _episodes.init(self.length, self.num_envs) if self.hindsight else None,
            "sequences": (self.sequence_length, self.stride),
        }

    @calls.method(rows=("steps", "ends", "td_errors", "drawable"), is_batch=True, donates=True)
    def add(
        self,
        state: SequenceState,
        steps: Any,
        *,
        ends: jax.Array | None = None,
        td_errors: jax.Array | None = None,
        drawable: jax.Array | None = None,
        mask: jax.Array | None = None,
    ) -> SequenceState:
        """Append T steps to every stream, overwriting the oldest once the buffer is full.

        Args:
          state: donated when called eagerly (see the class).
          steps: pytree [T, num_envs, ...] with the structure, shapes and dtypes given to `init`; 1 <= T <= length. T
            may differ between calls; each T compiles once. No `TransitionBatch` with `valid`.
          ends: bool [T, num_envs], True for the last row of an episode; zeros if no episode ever ends. If the stream
            has a row for the final observation, that row is the last: `ends=~step`. If it has none, the last row is the
            terminated or truncated one: `ends=terminated | truncated`. Needed, except with windows="any" without
            `hindsight`, which ignores it.
          td_errors: float [K, num_envs] with K = `completed(T)`, signed or not: initial TD errors of the completed
            sequences, in order; NaN or None means unknown. If fewer than K are completed, the last rows are ignored.
            `Uniform` ignores it.
          drawable: bool [T, num_envs], False for a row that may not be drawn, such as padding of a rollout or a step
            that reset the environment; None if all rows may. Needs `gaps`. No drawn sequence contains such a row,
            except masked out after the episode's end with windows="episodes". It is an episode by itself: the row
            before it is the last stored row of its episode, and the row after it starts an episode.
          mask: bool [], one flag for all rows; False writes nothing and leaves the state unchanged. Use it in place of
            a `lax.cond`, which copies the storage under `jax.vmap`.

        Raises:
          ValueError: wrong structure, shape or dtype (the message names the leaf), or no `ends` where they are needed.

        Examples:
          >>> state, ends = sequences.init(steps), np.array([[False], [True], [False]])
          >>> state = sequences.add(state, steps, ends=ends)
          >>> sequences.sample(state, key, batch_size=2).items.tolist()  # 3 starts an episode
          [[1, 2], [1, 2]]
          >>> buffer = jr.SequenceBuffer(**sizes, sampler=jr.Prioritized(epsilon=0.0))
          >>> # 2 completes [1, 2] and 3 completes [2, 3]; the last TD error has no sequence.
          >>> td_errors = np.array([[2.0], [0.0], [jnp.nan]])
          >>> state = buffer.add(buffer.init(steps), steps, td_errors=td_errors)
          >>> [round(x, 3) for x in buffer.priorities(state, np.array([0, 1])).tolist()]
          [2.0, 0.0]
          >>> int(buffer.size(buffer.add(state, steps, mask=np.array(False))))
          2
        """
        steps, flags = self._check_rollout(state, steps, ends, drawable)
        rule = "one flag for all rows; drawable= is the mask of rows"
        mask = checks.check_mask(mask is None or mask, (), rule=rule)
        flags = jnp.where(mask, flags, jnp.zeros_like(flags))
        num_steps = flags.shape[0]
        count = jnp.where(mask, jnp.int32(num_steps), 0)
        if td_errors is not None:
            shape = self.completed(num_steps), self.num_envs
            td_errors = checks.check_insertion_errors(td_errors, shape, "a sequence that is completed").reshape(shape)
        completed = jnp.maximum(count - state.wait + self.stride, 0) // self.stride  # of each stream
        wait = state.wait + completed * self.stride - count
        state = dataclasses.replace(state, ring=state.ring.after(steps, flags))
        changed, *inserted = self._drawable.advance(self, state, flags, count, completed, wait, td_errors)
        rows = state.rows.after(changed["ring"].inserted)
        at, _ = rows.next_slots(None, num_steps)
        at = jnp.where(mask, at, self.length)
        storage, ends = layouts.write((state.storage, state.ends), at, (steps, flags if self._keeps_ends else None))
        return dataclasses.replace(
            state,
            storage=storage,
            ends=ends,
            rows=rows.advance(count),
            wait=wait,
            **changed,
            **self._insert(state, *inserted),
            episodes=state.episodes and _episodes.append(state.episodes, flags, at),
        )

    def _emptied(self, state: SequenceState) -> dict[str, Any]:
        wait = jnp.minimum(state.wait, 0) + self.sequence_length
        return super()._emptied(state) | {"rows": state.rows.emptied(), "wait": wait}

    def completed(self, num_steps: int) -> int:
        """Maximum number of sequences that `num_steps` steps of a stream complete: the K of `add(td_errors=)`.

        Examples:
          >>> sequences.completed(3)
          3
        """
        return (num_steps - 1) // self.stride + 1

    @calls.method(rows=("mask",), donates=True)
    def end_streams(self, state: SequenceState, *, mask: jax.Array | None = None) -> SequenceState:
        """Close streams: the next row of each continues no stored row, such as after a reset of the environments.

        Drawn items, handles and priorities stay as they are. From now on no sequence with rows from before and after
        this call can be drawn, so no n-step return or frame stack of a drawn sequence contains both; `later` stays
        before or after it. With windows="episodes" the next row starts an episode. The last `sequence_length` - 1 rows
        start no sequence. It costs O(num_envs), and needs windows "inside" or "episodes", or `gaps`.

        Args:
          state: donated when called eagerly (see the class).
          mask: bool [num_envs], True for streams to close; None for all.

        Raises:
          ValueError: windows "any" or "cut" without `gaps`, with `mask` or without; or `mask` has another shape.

        Examples:
          >>> state = sequences.add(sequences.init(steps), steps, ends=ends)
          >>> state = sequences.end_streams(state)  # the environments were reset
          >>> state = sequences.add(state, steps + 100, ends=ends)
          >>> sequences.get(state, sequences.newest(state, 4)).tolist()
          [[1, 2], [2, 3], [101, 102], [102, 103]]
        """
        closed = checks.check_mask(jnp.ones(self.num_envs, bool) if mask is None else mask, (self.num_envs,))
        return dataclasses.replace(state, **self._drawable.end_streams(self, state, closed))

    @calls.method(rows=("indices",), static=("law",), before=_episodes.checked)
    def later(
        self,
        state: SequenceState,
        key: jax.Array,
        indices: jax.Array,
        *,
        law: Literal["uniform", "geometric", "last"] = "uniform",
        gamma: jax.Array | float = 0.99,
    ) -> tuple[Any, jax.Array]:
        """Draw a later row of the same episode for the first row of each sequence.

        Needs `hindsight`, and costs O(log(length)) a row. The episode consists of its stored rows, up to the row that
        `add(ends=)` flagged, or the newest row. "last" and "uniform" are the strategies "final" and "future" of
        hindsight experience replay (Andrychowicz et al. 2017, arXiv:1707.01495, section 4.5). "geometric" is the
        discounted distribution of C-learning (Eysenbach et al. 2021, arXiv:2011.08909) and of contrastive RL (Eysenbach
        et al. 2022, arXiv:2206.07568, section 3).

        Args:
          state: unchanged.
          key: a PRNG key; not used by "last".
          indices: int [B], handles from `Sample.indices`.
          law: distribution of the number k of steps: "uniform"; "geometric", in proportion to gamma^(k-1); or "last".
          gamma: the discount of "geometric", in [0, 1]; a number, or a traced float [].

        Returns:
          items, leaves [B, ...], one row each; and steps, int32 [B], the number of rows from the first row to the item.
          If no later row of the episode is stored, steps is 0 and the item is the first row itself. If the sequence is
          no longer stored, steps and item are 0.

        Raises:
          ValueError: the buffer lacks `hindsight`, there is no such `law`, `gamma` is out of range, or `indices` is not
            a vector of integers.

        Examples:
          >>> state = sequences.add(sequences.init(steps), steps, ends=ends)
          >>> later, count = sequences.later(state, key, np.array([0, 1]), law="last")
          >>> later.tolist(), count.tolist()  # from rows 1 and 2 to the newest of their episode
          ([3, 3], [2, 1])
        """
        if state.episodes is None:
            raise ValueError("hindsight=True: this state is of a buffer without it; use the buffer that made it.")
        slots = self._slots(state, indices)
        row, env = self._drawable.starts(self, state, slots)
        exists, sizes = slots < self.num_slots, (self.length, self.num_envs)
        count = _episodes.num_later(state.episodes.number, row, env, state.rows.inserted % self.length, *sizes)
        steps = _episodes.draw(self._own_key(key), jnp.where(exists, count, 0), law, gamma, self.length)
        at = jnp.where(exists, _episodes.place(row, env, steps, *sizes), self.length * self.num_envs)
        at, steps = xla.materialize(at, steps)
        return layouts.read(layouts.merge_axes(state.storage), at, fill=True), steps

    def stored_steps(self, state: SequenceState) -> jax.Array:
        """Number of steps stored in all streams, int32 []; `size` is the number of drawable sequences.

        Examples:
          >>> state = sequences.add(sequences.init(steps), steps, ends=ends)
          >>> int(sequences.stored_steps(state)), int(sequences.size(state))
          (3, 2)
        """
        check_once(self, state)
        return state.rows.size * self.num_envs

    def _why_empty(self, state: SequenceState) -> str:
        stored = int(xla.on_host(jnp.max(state.rows.size)))
        if stored == 0:
            return super()._why_empty(state)
        if stored < self.sequence_length:
            found = f"sequence_length={self.sequence_length} steps, and the buffer has {stored} of each stream"
            more = self.sequence_length - stored
            return f"cannot sample: a sequence takes {found}; add {more} more first (see can_sample)."
        rule = f"windows={self.windows!r}" + ", gaps=True" * self.gaps
        return f"cannot sample: no stored sequence may be drawn ({rule}); add steps until one may."

    @property
    def _num_starts(self) -> int:
        """Maximum number of drawable sequences of one stream."""
        return (self.length - self.sequence_length) // self.stride + 1

    @property
    def _drawable(self) -> Any:
        """The module that keeps the drawable sequences."""
        return _chosen_sequences if self.gaps or self.windows in ("inside", "episodes") else _every_sequence

    @property
    def _slots_of_ages(self) -> tuple[int, float]:
        # Streams have different numbers of chosen sequences, so their ages are of the ring.
        return (1, 1 / self.num_envs) if self._drawable is _chosen_sequences else (self.num_envs, 1.0)

    @property
    def _keeps_ends(self) -> bool:
        return self.windows in ("cut", "episodes")

    @property
    def num_slots(self) -> int:
        """Number of slots: the maximum number of drawable sequences."""
        return self._num_starts * self.num_envs

    def _num_steps(self, spec: Any) -> int:
        """T of steps [T, num_envs, ...]."""
        num_steps, num_envs = checks.leading_axes(spec, 2, "a rollout", self.num_envs)
        if num_envs != self.num_envs:
            found, expected = f"leading axes [{num_steps}, {num_envs}]", f"[T, {self.num_envs}], time first"
            raise ValueError(f"num_envs={self.num_envs}: got steps with {found}, expected {expected}.")
        return num_steps

    def _check_rollout(self, state: SequenceState, steps: Any, ends: Any, drawable: Any) -> tuple[Any, jax.Array]:
        """`steps` as arrays, and their flags; a `ValueError` if the arguments of `add` are invalid."""
        steps, valid = without_valid(checks.as_arrays(steps))
        for name in valid:
            remedy = "store steps, and use sequence_transitions; or valid=None, and drawable=batch.valid with gaps=True"
            raise ValueError(f"{name}: a SequenceBuffer stores every row, also those that are not valid; {remedy}.")
        stored = layouts.stored_spec(state.storage)
        checks.check_structure(steps, stored, "the buffer")
        num_steps = self._num_steps(steps)
        if not 1 <= num_steps <= self.length:
            raise ValueError(f"a rollout of {num_steps} steps: expected 1 to length={self.length}; add it in parts.")
        if ends is None and (self.windows != "any" or self.hindsight):
            option = "hindsight=True" if self.hindsight else f"windows={self.windows!r}"
            rule = "needs the last row of each episode; give a bool[T, num_envs], zeros if no episode ever ends"
            raise ValueError(f"ends: got None, but {option} {rule}.")
        ends = jnp.zeros((num_steps, self.num_envs), bool) if ends is None else ends
        ends = checks.check_mask(ends, (num_steps, self.num_envs), "ends")
        checks.check_like(steps, stored, 2, 2, "the buffer")
        if drawable is not None:
            drawable = checks.check_mask(drawable, (num_steps, self.num_envs), "drawable")
            if not self.gaps:
                raise ValueError("drawable: gaps=False: make the buffer with gaps=True to use drawable.")
        return steps, _episodes.flags_of(ends, drawable) if self.gaps else ends

    def _check_state(self, state: SequenceState) -> None:
        super()._check_state(state)
        expected = self._drawable is _chosen_sequences, self._keeps_ends
        if (found := state.sequences) != (self.sequence_length, self.stride):
            given, other = f"sequence_length={self.sequence_length}, stride={self.stride}", f"{found[0]} and {found[1]}"
        elif (state.windows is not None, state.ends is not None) != expected:
            given, other = f"windows={self.windows!r}, gaps={self.gaps}", "other windows or gaps"
        else:
            return
        raise ValueError(f"{given}: this state is of a buffer with {other}; use the buffer that made it.")

    def _younger(self, state: SequenceState, max_age: jax.Array) -> ring.Live:
        return self._drawable.younger(self, state, max_age)

    def _ages(self, state: SequenceState, slots: jax.Array) -> jax.Array:
        return self._drawable.ages(self, state, slots)

    def _places(self, state: SequenceState, slots: jax.Array) -> jax.Array:
        first, env = self._drawable.starts(self, state, slots)
        rows = first[:, None] + jnp.arange(self.sequence_length, dtype=jnp.int32)[None]
        rows = ring.wrap_excess(rows, self.length)  # [B, sequence_length]
        exists = (slots < self.num_slots)[:, None]
        return jnp.where(exists, rows * self.num_envs + env[:, None], self.length * self.num_envs)

    def _read(self, state: SequenceState, slots: jax.Array, fill: bool) -> tuple[Any, jax.Array]:
        at = self._places(state, slots)
        mask = at < self.length * self.num_envs
        items, ends = layouts.read(layouts.merge_axes((state.storage, state.ends)), at, fill=fill)
        if ends is not None:
            mask &= _episodes.in_first_episode(ends)
        return items, mask
