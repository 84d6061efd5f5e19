"""Reads recorded data as rows of a `SequenceBuffer` or as transitions.

Rows are as in `jaxreplay.SequenceBuffer`: each observation once, and one row without a step for the last observation of
an episode. A data set is one stream, so the buffer has `num_envs=1`.

Supported formats are D4RL (Fu et al. 2020, arXiv:2004.07219), OGBench (Park et al. 2024, arXiv:2410.20092) and Minari
(Farama Foundation, https://minari.farama.org). Importing this module imports none of their packages.
"""

import os
import zipfile
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxreplay._common import checks, xla
from jaxreplay.transitions import TransitionBatch, n_step_transitions

NAMES = ("observation", "action", "reward", "terminated", "truncated", "step")


class Steps(NamedTuple):
    """A data set for `SequenceBuffer.add`: `buffer.add(state, steps.rows, ends=steps.ends)`.

    Attributes:
      rows: dict of NumPy arrays [T, 1, ...] in the dtypes of the data. `observation` and `action` are pytrees,
        `reward` [T, 1] is a number, and `terminated`, `truncated` and `step` [T, 1] are bool. Where `step` is False,
        action and reward are 0 and the observation is the last one of its episode.
      ends: bool [T, 1], True for the last row of an episode.

    Examples:
      >>> data = jr.datasets.from_arrays(x, x, x, terminals=[0, 1], timeouts=[0, 0])
      >>> state = sequences.add(sequences.init(data.rows), data.rows, ends=data.ends)
      >>> int(sequences.size(state))
      2
    """

    rows: dict[str, Any]
    ends: np.ndarray  # [T, 1]

    def padded(self, sequence_length: int) -> "Steps":
        """Append rows without a step to the last episode, so that every step can be drawn.

        A sequence can be drawn once all of its rows are stored. Without these rows the last steps of the data set would
        start no sequence. The `sequence_length` - 2 rows repeat the last observation.

        If the last row holds a step, its next observation is missing. Unless it was terminated, this becomes the row
        without a step, as in `from_arrays`: the step before it is then the truncated one. A terminated step is kept,
        with one row more.

        Raises:
          ValueError: `sequence_length` is not a positive integer, or a leaf of `Steps` is missing.

        Examples:
          >>> data = jr.datasets.from_arrays(x, x, x, terminals=[0, 1], timeouts=[0, 0])
          >>> # Each of the two steps now starts a sequence of 4 rows.
          >>> data.padded(4).rows["step"][:, 0].tolist()
          [True, True, False, False, False]
        """
        checks.check_integer("sequence_length", sequence_length, 1, 2**31 - 1, "rows of a sequence")
        checked, (length, _) = check_rows(self.rows)
        last = length - 1
        terminated, has_step = (np.asarray(checked[name])[last] != 0 for name in ("terminated", "step"))
        count = max(sequence_length - 2 + bool(np.any(has_step & terminated)), 0)
        rows, ends = jax.tree.map(lambda x: pad_rows(x, count), (self.rows, self.ends))
        rows["observation"] = jax.tree.map(lambda x: pad_rows(x, count, "edge"), self.rows["observation"])
        cut = has_step & ~terminated
        for x in jax.tree.leaves([rows[name] for name in ("action", "reward", "truncated", "step")]):
            x[last, cut] = 0
        rows["truncated"][last - 1, cut & ~ends[last - 1] & (last > 0)] = True
        ends[[last, -1]] = ends[[-1, last]]
        return Steps(rows, ends)


def pad_rows(x: np.ndarray, count: int, mode: Any = "constant") -> np.ndarray:
    """Append `count` rows to `x`: zeros, or copies of its last row with `mode` "edge"."""
    return np.pad(x, [(0, count)] + [(0, 0)] * (x.ndim - 1), mode)


def make_steps(observation: Any, action: Any, reward: Any, terminated: Any, step: Any, ends: Any) -> Steps:
    """`Steps` of rows [T, ...]; a step is truncated if no step of its episode follows and it is not terminated."""
    truncated = step & ~np.append(step[1:], False) & ~terminated
    values = observation, action, reward, terminated, truncated, step
    return Steps(*jax.tree.map(lambda x: x[:, None], (dict(zip(NAMES, values, strict=True)), ends)))


def as_numbers(tree: Any) -> Any:
    """`tree` with NumPy arrays as leaves (a list is a leaf); a `ValueError` if one is not numeric."""
    return jax.tree_util.tree_map_with_path(as_number, tree, is_leaf=lambda x: isinstance(x, list))


def as_number(path: Any, leaf: Any) -> np.ndarray:
    try:
        array = xla.on_host(leaf)
    except (RuntimeError, TypeError) as error:  # of a deleted array, or of keys
        raise ValueError(f"leaf {jax.tree_util.keystr(path)}: {error}") from error
    if not (jnp.issubdtype(array.dtype, jnp.number) or array.dtype == np.bool_):
        raise ValueError(f"leaf {jax.tree_util.keystr(path)}: got {array.dtype}, expected numbers or bools; encode it.")
    return array


def check_not_empty(count: int) -> None:
    if count == 0:
        raise ValueError("no step has a next observation; give more steps, or next_observations.")


def check_rows(rows: Any) -> tuple[dict[str, Any], tuple[int, ...]]:
    """The leaves of `Steps` in `rows`, checked, and their leading axes."""
    if missing := [name for name in NAMES if not isinstance(rows, dict) or name not in rows]:
        raise ValueError(f"rows: no {', '.join(missing)}; expected a dict of {', '.join(NAMES)}.")
    rows = {name: rows[name] for name in NAMES}
    leading = checks.leading_axes(rows, 2, "a data set")
    for x in NAMES[2:]:
        if rows[x].shape != leading:
            raise ValueError(f"leaf [{x!r}]: got {checks.type_text(rows[x])}, expected {[*leading]}, one for each row.")
    return rows, leading


def from_arrays(
    observations: Any, actions: Any, rewards: Any, terminals: Any, timeouts: Any, next_observations: Any = None
) -> Steps:
    """Make rows from arrays of N steps, with episodes laid end to end as in D4RL.

    An episode ends where it was terminated or timed out. If step N - 1 is neither, its episode is truncated there. The
    last step of a truncated episode has `truncated` True.

    Without `next_observations` the last observation of an episode is not in the data:

    - *Truncated*: there is no observation to bootstrap from after the last step. Its row becomes the row without a
      step, and its action and reward are dropped; the step before it is then the truncated one. An episode of one such
      step is dropped.
    - *Terminated*: no bootstrap is needed. The row without a step repeats the last observation. Do not learn from it,
      for example a model of the environment.

    Args:
      observations: pytree [N, ...], before each step.
      actions: pytree [N, ...].
      rewards: number [N].
      terminals: bool [N] (or numbers; nonzero is True), True if the environment terminated.
      timeouts: the same, True if the episode was cut off; ignored where terminated.
      next_observations: like `observations`, after each step and before any reset; or None.

    Returns:
      `Steps`, in new arrays: N rows and one more per episode, or without `next_observations` per terminated episode.

    Raises:
      ValueError: leading axes differ; a leaf is not numeric; there is more than one reward or flag per step; no step is
        left; or, inside an episode, a next observation is not the observation of the next step.

    Examples:
      >>> ends = {"terminals": [0, 1], "timeouts": [0, 0]}
      >>> data = jr.datasets.from_arrays(x, x, x, **ends, next_observations=x + 1)
      >>> # 3 has no step.
      >>> data.rows["observation"][:, 0].tolist(), data.rows["step"][:, 0].tolist()
      ([1.0, 2.0, 3.0], [True, True, False])
    """
    numbers = as_numbers({"rewards": rewards, "terminals": terminals, "timeouts": timeouts})
    items = as_numbers({"observations": observations, "actions": actions})
    (num_steps,) = checks.leading_axes(items | numbers, 1, "a data set")
    for name, x in numbers.items():
        if x.ndim != 1:
            raise ValueError(f"{name}: got {checks.type_text(x)}, expected one for each step, [N].")
    terminated, last = numbers["terminals"] != 0, (numbers["terminals"] != 0) | (numbers["timeouts"] != 0)
    last[-1:] = True
    repeats = 1 + last.astype(np.intp)  # a row for each step, and one for the last observation
    if next_observations is None:
        is_first = np.concatenate([last[:1] | True, last[:-1]])
        repeats = np.where(last & ~terminated, ~is_first, repeats)
    source = np.repeat(np.arange(num_steps), repeats)  # the step of each row
    check_not_empty(len(source))
    ends = last[source] & (np.append(source[1:], num_steps) != source)
    observation = jax.tree.map(lambda x: x[source], items["observations"])
    if next_observations is not None:
        following = _next_observations(next_observations, items["observations"], last)
        observation = jax.tree.map(lambda x, after: _replace(x, ends, after[last]), observation, following)
    action, reward = jax.tree.map(lambda x: _replace(x[source], ends, 0), (items["actions"], numbers["rewards"]))
    return make_steps(observation, action, reward, terminated[source] & ~ends, ~ends, ends)


def from_ogbench(path: str | os.PathLike[str]) -> Steps:
    """Read an OGBench data set, a file `.npz` of `observations`, `actions` and `terminals`, [N, ...] each.

    `terminals` marks the last row of an episode, which holds its last observation and no step. All episodes are
    truncated. The file has no rewards; all are 0, to be computed from the observations and a goal. For the rewards of a
    single task, pass the result of `ogbench.make_env_and_datasets` to `from_arrays`, with terminals = 1 - `masks`,
    timeouts = `terminals`, and `next_observations`.

    Args:
      path: the file.

    Returns:
      `Steps`: the N rows of the file, except episodes without a step.

    Raises:
      ValueError: there is no such file, it lacks one of the three arrays, or `from_arrays` rejects them.

    Examples:
      >>> np.savez("walk.npz", observations=x, actions=x, terminals=[0, 1])
      >>> jr.datasets.from_ogbench("walk.npz").rows["step"][:, 0].tolist()
      [True, False]
    """
    names = ("observations", "actions", "terminals")
    if not zipfile.is_zipfile(path):
        raise ValueError(f"path={os.fspath(path)!r}: must be a file .npz with {', '.join(names)}; see from_arrays.")
    with np.load(path) as file:
        if missing := [name for name in names if name not in file]:
            raise ValueError(f"path={os.fspath(path)!r}: has no {', '.join(missing)}; it has {', '.join(file.files)}.")
        observations, actions, terminals = (file[name] for name in names)
    nothing = np.zeros(terminals.shape, np.float32)
    return from_arrays(observations, actions, nothing, nothing, terminals)


def transitions(rows: dict[str, Any], ends: Any, *, n: int = 1, gamma: float = 0.99) -> TransitionBatch:
    """Extract all n-step transitions of a data set, for a `ReplayBuffer`: `transitions(*steps, n=3, gamma=0.99)`.

    They equal the transitions of `jaxreplay.n_step_transitions`, in order of time. A step in the last row of its
    episode, or of the data, has no next observation. Unless it was terminated, it is dropped, and windows end before
    it.

    Args:
      rows: dict of arrays [T, num_envs, ...] with the leaves of `Steps`; other leaves are ignored.
      ends: bool [T, num_envs], True for the last row of an episode.
      n: see `NStep`.
      gamma: see `NStep`.

    Returns:
      TransitionBatch [M] of NumPy arrays, M the number of steps that have a next observation or were terminated. S, A
      and S_next have the dtypes of the rows. `Rn` and `In` have the dtypes that JAX computes in; `In` is 0 where the
      window ends with a terminated step.

    Raises:
      ValueError: `rows` lacks a leaf, shapes or dtypes are not as above, or `n` or `gamma` is out of range.

    Examples:
      >>> data = jr.datasets.from_arrays(x, x, x, terminals=[0, 1], timeouts=[0, 0])
      >>> batch = jr.datasets.transitions(*data, n=2, gamma=0.5)
      >>> batch.Rn.tolist(), batch.In.tolist()  # windows end with the terminated step
      ([2.0, 2.0], [0.0, 0.0])
    """
    rows, (length, num_envs) = check_rows(rows)
    ends = np.asarray(checks.check_mask(ends, (length, num_envs), "ends"))
    terminated, truncated, step = (np.asarray(rows[name]) != 0 for name in NAMES[3:])
    num_rows = checks.check_integer("T * num_envs", length * num_envs, 0, 2**31 - 1, "the rows; give them in parts")
    at = np.arange(num_rows, dtype=np.int32).reshape(length, num_envs)  # row numbers, in place of their contents
    is_last = ends.copy()
    is_last[-1:] = True
    has_next = step & (~is_last | terminated)
    after = np.where(is_last, at, np.concatenate([at[1:], at[-1:]]))
    batch, valid = n_step_transitions(
        at, at, rows["reward"], terminated, truncated, after, n=n, gamma=gamma, mask=has_next, flush=True
    )
    batch = jax.tree.map(lambda x: np.asarray(x)[np.asarray(valid)], batch)

    def gather(name: str, index: np.ndarray) -> Any:
        return jax.tree.map(lambda x: np.asarray(x).reshape(num_rows, *x.shape[2:])[index], rows[name])

    s, a, s_next = gather("observation", batch.S), gather("action", batch.S), gather("observation", batch.S_next)
    return TransitionBatch(S=s, A=a, logP=None, Rn=batch.Rn, In=batch.In, S_next=s_next)


def _replace(x: np.ndarray, where: np.ndarray, value: Any) -> np.ndarray:
    """Set the rows `where` of `x` to `value`, in place."""
    x[where] = value
    return x


def _next_observations(following: Any, observations: Any, last: np.ndarray) -> Any:
    """`following` as arrays; a `ValueError` if it does not equal `observations` one step later."""
    following = as_numbers(following)
    checks.check_like(checks.as_spec(following), checks.as_spec(observations), 1, 1, "the data set")
    for after, now in zip(jax.tree.leaves(following), jax.tree.leaves(observations), strict=True):
        if len(after) != len(now):
            raise ValueError(f"next_observations: got {len(after)} rows, expected {len(now)}, one for each step.")
        is_equal = (after[:-1] == now[1:]) | ((after[:-1] != after[:-1]) & (now[1:] != now[1:]))
        differs = ~is_equal.all(axis=tuple(range(1, is_equal.ndim))) & ~last[:-1]
        if differs.any():
            t = int(np.flatnonzero(differs)[0])
            raise ValueError(f"next_observations[{t}] differs from observations[{t + 1}]; mark last steps in timeouts.")
    return following


def from_minari(dataset: Any) -> Steps:
    """Read a `minari.MinariDataset`, episode by episode.

    A Minari episode of T steps has T + 1 observations, which are its rows. It is terminated or truncated according to
    its last step, and truncated if that step has neither flag. Truncations before the last step are ignored. Nested
    observations and actions (spaces `Dict` and `Tuple`) are dicts and tuples of arrays. Episodes without steps are
    dropped, and so are the infos.

    Args:
      dataset: from `minari.load_dataset`, or a part of it such as `dataset.filter_episodes(...)`.

    Returns:
      `Steps`: one row per step and one more per episode.

    Raises:
      ValueError: `dataset` is not a Minari data set, a leaf is not numeric (such as in a space `Text`), an episode does
        not have one more observation than actions, or no step is left.

    Examples:
      >>> import gymnasium, minari
      >>> flags = {"terminations": x > 1, "truncations": x < 0}
      >>> episode = minari.data_collector.EpisodeBuffer(
      ...     observations=np.arange(3.0), actions=x, rewards=x, **flags
      ... )
      >>> box = gymnasium.spaces.Box(0, 9, ())
      >>> spaces = {"observation_space": box, "action_space": box}
      >>> dataset = minari.create_dataset_from_buffers("walk/made-v0", [episode], **spaces)
      >>> jr.datasets.from_minari(dataset).rows["reward"][:, 0].tolist()
      [1.0, 2.0, 0.0]
    """
    if not hasattr(dataset, "iterate_episodes"):
        raise ValueError(f"dataset={dataset!r}: must be a minari.MinariDataset; load one with minari.load_dataset.")
    episodes = [episode for episode in map(_minari_rows, dataset.iterate_episodes()) if episode[-1].size > 1]
    check_not_empty(len(episodes))
    return make_steps(*jax.tree.map(lambda *parts: np.concatenate(parts), *episodes))


def _minari_rows(episode: Any) -> tuple[Any, ...]:
    """Arguments of `make_steps` for an episode."""
    names = ("observations", "actions", "rewards", "terminations")
    arrays = as_numbers({name: getattr(episode, name) for name in names})
    steps = {name: arrays[name] for name in names[1:]}
    (length,) = checks.leading_axes(steps, 1, "an episode")
    (num_rows,) = checks.leading_axes(arrays["observations"], 1, "the observations of an episode")
    if num_rows != length + 1:
        raise ValueError(f"episode {episode.id}: got {num_rows} observations, expected {length} + 1, for its actions.")
    ends = np.arange(num_rows) == length
    action, reward, terminated = jax.tree.map(lambda x: pad_rows(x, 1), tuple(steps.values()))
    return arrays["observations"], action, reward, terminated != 0, ~ends, ends
