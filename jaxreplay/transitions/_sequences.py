"""Functions for drawn sequences: their priorities, burn-in, frame stacks, and goals that were achieved."""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxreplay._common import checks, xla

Path = str | tuple[str, ...]


@xla.copies_numpy
def sequence_priority(td_errors: jax.Array, mask: jax.Array | None = None, *, eta: float = 0.9) -> jax.Array:
    """Reduce the TD errors of each sequence to one for `update`: eta * max |td_error| + (1 - eta) * mean |td_error|.

    From Kapturowski et al. 2019 (Recurrent Experience Replay in Distributed Reinforcement Learning, section 2.3).

    Args:
      td_errors: float [B, L], signed or not.
      mask: bool [B, L], True for TD errors that count; None for all.
      eta: weight of the maximum, 0 to 1.

    Returns:
      float [B]; 0 for a sequence in which no TD error counts.

    Raises:
      ValueError: other shapes or dtypes.

    Examples:
      >>> td_errors = np.array([[1.0, -3.0, 2.0]])
      >>> priority = jr.sequence_priority(td_errors, eta=0.9)  # 0.9 * 3 + 0.1 * 2
      >>> round(float(priority[0]), 3)
      2.9
    """
    td_errors = jnp.asarray(td_errors)
    if td_errors.ndim != 2 or td_errors.shape[1] == 0:
        raise ValueError(f"td_errors: got {checks.type_text(td_errors)}, expected [B, L], L at least 1.")
    checks.check_number("eta", eta, 0, 1, "it is the share of the largest", traced=None)
    counted = np.ones(td_errors.shape, bool) if mask is None else checks.check_mask(mask, td_errors.shape)
    return _priority(td_errors, counted, eta, 1 - eta)


@functools.partial(jax.jit, inline=True)
def _priority(td_errors: jax.Array, counted: Any, of_max: Any, of_mean: Any) -> jax.Array:
    sizes = jnp.where(counted, jnp.abs(td_errors), 0)
    count = jnp.maximum(jnp.sum(counted, axis=1, dtype=jnp.int32), 1).astype(sizes.dtype)
    return of_max * jnp.max(sizes, axis=1) + of_mean * jnp.sum(sizes, axis=1) / count


def split_burn_in(items: Any, burn_in: int) -> tuple[Any, Any]:
    """Split drawn sequences into the first `burn_in` steps and the rest.

    A recurrent network starts from its stored state and is unrolled over the first part without a gradient. The
    resulting state is the initial state for the second part (Kapturowski et al. 2019, section 3).

    Args:
      items: pytree [B, L, ...], such as `Sample.items`, or a mask.
      burn_in: 0 to L - 1.

    Raises:
      ValueError: `burn_in` is out of range, or leading axes differ.

    Examples:
      >>> first, rest = jr.split_burn_in(np.array([[1, 2, 3, 4]]), burn_in=1)
      >>> first.tolist(), rest.tolist()
      ([[1]], [[2, 3, 4]])
    """
    _, length = checks.leading_axes(checks.as_spec(items), 2, "a batch of sequences")
    burn_in = checks.check_integer("burn_in", burn_in, 0, length - 1, "less than the length of the sequences")
    return jax.tree.map(lambda x: x[:, :burn_in], items), jax.tree.map(lambda x: x[:, burn_in:], items)


@xla.copies_numpy
def stack_frames(frames: jax.Array, ends: jax.Array, k: int) -> jax.Array:
    """Stack the last `k` frames at each step of drawn sequences that has at least k - 1 steps before it.

    Args:
      frames: [B, L, ...], single frames.
      ends: bool [B, L], True for the last row of an episode; later rows belong to another episode.
      k: number of frames in a stack, 1 to L.

    Returns:
      [B, L - k + 1, ..., k] in the dtype of the frames, oldest frame first; frames from before the episode's start are
      zero. Row i is the stack at step i + k - 1.

    Raises:
      ValueError: other shapes or dtypes.

    Examples:
      >>> frames, ends = np.array([[1, 2, 3, 4]]), np.array([[False, True, False, False]])
      >>> jr.stack_frames(frames, ends, k=2).tolist()  # 3 is the first of its episode
      [[[1, 2], [0, 3], [3, 4]]]
    """
    frames = jnp.asarray(frames)
    batch_size, length = checks.leading_axes(frames, 2, "a batch of frames")
    ends = checks.check_mask(ends, (batch_size, length), "ends")
    return _stacks(frames, ends, checks.check_integer("k", k, 1, length, "the number of frames in a stack"))


@functools.partial(jax.jit, static_argnums=2, inline=True)
def _stacks(frames: jax.Array, ends: jax.Array, k: int) -> jax.Array:
    batch_size, length = ends.shape
    kept = jnp.ones((batch_size, length - k + 1), bool)
    stack = []
    for lag in range(k):
        rows = slice(k - 1 - lag, length - lag)
        if lag > 0:
            kept &= ~ends[:, rows]
        frame = frames[:, rows]
        stack.insert(0, jnp.where(kept.reshape(kept.shape + (1,) * (frame.ndim - 2)), frame, jnp.zeros_like(frame)))
    return jnp.stack(stack, axis=-1)


@xla.copies_numpy
def hindsight(
    key: jax.Array,
    rows: Any,
    goals: Any,
    reward: Callable[[Any, Any], Any],
    *,
    share: jax.Array | float = 0.8,
    mask: jax.Array | None = None,
    terminated: Callable[[Any, Any], Any] | None = None,
    achieved: Path = "achieved_goal",
    goal: Path = "desired_goal",
) -> tuple[Any, jax.Array]:
    """Relabel a random part of drawn sequences with other goals, and recompute their rewards.

    From Andrychowicz et al. 2017 (Hindsight Experience Replay, arXiv:1707.01495, algorithm 1). The paper stores each
    transition with its own goal and k others, so k / (k + 1) of a batch have other goals; its k = 4 (section 4.5) is
    `share` = 0.8. Here the other goals are drawn with the batch, for example by `SequenceBuffer.later`:

        sample = buffer.sample(replay, key, 256)
        later, steps = buffer.later(replay, later_key, sample.indices)
        goals = later["achieved_goal"]
      rows, _ = jr.hindsight(goal_key, sample.items, goals, reward, mask=steps > 0)

    The outcome of an action is in the next row, so the reward of row t is computed from the achieved goal of row t + 1.
    The last row has no outcome and keeps its reward, which `sequence_transitions` does not use. A leaf of
    discounts is kept too; where one is 0 because an episode terminated, it is not right for another goal.

    Args:
      key: a PRNG key.
      rows: sequences, leaves [B, L, ...], L at least 2, with a leaf `reward` [B, L] and, if the argument `terminated`
        is given, a leaf `terminated` [B, L]. `Sample.items` of a `SequenceBuffer` are such rows.
      goals: a new goal for each sequence, leaves [B, ...] with the shapes and dtypes of a row's goal.
      reward: reward(achieved, goal) -> reward [], for the achieved and the desired goal of one row.
      share: probability that a sequence is relabelled; a number in [0, 1], or a traced float [].
      mask: bool [B], True for sequences that may be relabelled; None for all.
      terminated: terminated(achieved, goal) -> bool [], True if the episode ends there; None if its end does not depend
        on the goal.
      achieved, goal: leaves of `rows`: a name, or a path such as ("observation", "desired_goal").

    Returns:
      the rows; and relabelled, bool [B]. A relabelled sequence has its new goal in all rows, and new rewards and flags
      in all but the last.

    Raises:
      ValueError: `rows` lack a leaf, leading axes differ, `goals` differ in structure, shapes or dtypes from a row's
        goal, `reward` or `terminated` does not return one number, or `share` is out of range.

    Examples:
      >>> rows = {"achieved_goal": np.array([[1, 2]]), "desired_goal": np.array([[5, 5]])}
      >>> rows["reward"] = np.array([[-1, -1]])
      >>> def reward(achieved, goal):
      ...     return jnp.where(achieved == goal, 0, -1)
      >>> new, _ = jr.hindsight(key, rows, np.array([2]), reward, share=1.0)
      >>> # The action of the first row led to 2, now the goal.
      >>> new["desired_goal"].tolist(), new["reward"].tolist()
      ([[2, 2]], [[0, -1]])
    """
    checks.check_key(key)
    changed = {"reward": reward} if terminated is None else {"reward": reward, "terminated": terminated}
    for name, function in changed.items():
        checks.check_callable(name, function, "a function of the achieved and the desired goal")
    rows, goals = checks.as_arrays((rows, goals))
    checks.check_number("share", share, 0, 1, "it is a probability", traced=None)
    batch_size, length = checks.leading_axes(rows, 2, "a batch of sequences")
    if length < 2:
        raise ValueError("rows: got sequences of 1 row, expected 2 or more; the next row holds an action's outcome.")
    meant, reached = _find(rows, goal, "goal"), _find(rows, achieved, "achieved")
    try:
        checks.check_like(goals, meant, 1, 2, "each row")
    except ValueError as error:
        raise ValueError(f"goals: {error}") from error
    (num_goals,) = checks.leading_axes(goals, 1, "goals")
    if num_goals != batch_size:
        raise ValueError(f"goals: got {num_goals}, expected {batch_size}, one per sequence.")
    relabelled = jax.random.bernoulli(key, jnp.asarray(share, jnp.float32), (batch_size,))
    if mask is not None:
        relabelled &= checks.check_mask(mask, (batch_size,))
    everywhere = jax.tree.map(lambda x: jnp.broadcast_to(x[:, None], (batch_size, length, *x.shape[1:])), goals)
    result = _put(rows, goal, _select(relabelled, everywhere, meant))
    for name, function in changed.items():
        old = _find(rows, name, name)
        new = jax.tree.leaves(jax.vmap(jax.vmap(function))(*jax.tree.map(lambda x: x[:, 1:], (reached, everywhere))))
        if len(new) != 1 or new[0].shape != (batch_size, length - 1) or old.ndim != 2:
            got = f"arrays of shapes {[list(x.shape[2:]) for x in new]} for rows of {list(old.shape[2:])}"
            raise ValueError(f"{name}: the function returned {got}, expected one number, [], for one row's goals.")
        followed = jnp.concatenate([new[0].astype(old.dtype), old[:, -1:]], axis=1)
        result = _put(result, name, _select(relabelled, followed, old))
    return result, relabelled


def _select(chosen: jax.Array, new: Any, old: Any) -> Any:
    """`new` where `chosen` [B] is True, else `old`; leaves [B, ...]."""
    return jax.tree.map(lambda x, y: jnp.where(chosen.reshape(-1, *[1] * (x.ndim - 1)), x, y), new, old)


def _find(rows: Any, path: Path, name: str) -> Any:
    """The value at a path; a `ValueError` if there is none."""
    found, parts = rows, (path,) if isinstance(path, str) else path
    if not (isinstance(parts, tuple) and parts and all(isinstance(part, str) for part in parts)):
        raise ValueError(f"{name}={path!r}: must be the name of a leaf in the rows, or a tuple of names to it.")
    for part in parts:
        inside = found if isinstance(found, Mapping) else getattr(found, "__dict__", {})
        if part not in inside:
            raise ValueError(f"{name}={path!r}: {part!r} is not in the rows; there are {sorted(inside)}.")
        found = inside[part]
    if found is None:
        raise ValueError(f"{name}={path!r}: the rows hold None there, expected arrays [B, L, ...].")
    return found


def _put(rows: Any, path: Path, value: Any) -> Any:
    """`rows` with the value at a path replaced."""
    part, *rest = (path,) if isinstance(path, str) else path
    if rest:
        value = _put(rows[part] if isinstance(rows, Mapping) else getattr(rows, part), tuple(rest), value)
    if isinstance(rows, Mapping):
        return type(rows)({**rows, part: value})  # pyright: ignore[reportCallIssue]
    return dataclasses.replace(rows, **{part: value})
