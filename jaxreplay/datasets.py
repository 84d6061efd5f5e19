"""Recorded data as the rows of a `SequenceBuffer` or as transitions, and the rows of a buffer as recorded data.

The rows are those that `jaxreplay.sequence_buffer` asks for: each observation once, and one row without a step for the
last observation of an episode. A data set is one stream, so the buffer has `num_envs=1`.

The formats are those of D4RL (Fu et al. 2020, arXiv:2004.07219), OGBench (Park et al. 2024, arXiv:2410.20092) and
Minari (Farama Foundation, https://minari.farama.org). Importing this module imports none of their packages.
"""

import importlib
import os
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxreplay._common import checks, layouts
from jaxreplay._common.checks import check_integer
from jaxreplay.sequence_buffer import SequenceBuffer, SequenceState
from jaxreplay.tracing import n_step_transitions
from jaxreplay.transition_batch import TransitionBatch

_NAMES = ("observation", "action", "reward", "terminated", "truncated", "step")


class Steps(NamedTuple):
    """A data set as `SequenceBuffer.add` takes it: `buffer.add(buffer.init(steps.rows), *steps)`.

    Attributes:
      rows: dict of NumPy arrays [T, 1, ...] in the dtypes of the data. `observation` and `action` are pytrees,
        `reward` [T, 1] is a number, and `terminated`, `truncated` and `step` [T, 1] are bool. Where `step` is False,
        action and reward are 0 and the observation is the last one of its episode.
      ends: bool [T, 1], True for the last row of an episode.
    """

    rows: dict[str, Any]
    ends: np.ndarray  # [T, 1]

    def padded(self, sequence_length: int) -> "Steps":
        """The same with more rows without a step at the end of the last episode, so that no step is left undrawn.

        A sequence can be drawn once all of its rows are stored. Without these rows the last steps of the data set would
        start no sequence. There are `sequence_length` - 2 of them; they repeat the last observation.

        Raises:
          ValueError: `sequence_length` is no positive integer.
        """
        length = check_integer("sequence_length", sequence_length, 1, 2**31 - 1, "the rows of a sequence")
        count = max(length - 2, 0)

        def pad(x: np.ndarray, mode: Any) -> np.ndarray:
            return np.pad(x, [(0, count)] + [(0, 0)] * (x.ndim - 1), mode)

        rows = jax.tree.map(lambda x: pad(x, "constant"), self.rows)
        rows["observation"] = jax.tree.map(lambda x: pad(x, "edge"), self.rows["observation"])
        ends = pad(self.ends, "constant")
        ends[[len(self.ends) - 1, -1]] = ends[[-1, len(self.ends) - 1]]
        return Steps(rows, ends)


def from_arrays(
    observations: Any, actions: Any, rewards: Any, terminals: Any, timeouts: Any, next_observations: Any = None
) -> Steps:
    """Rows of a data set of N steps, episodes laid end to end, as in D4RL.

    An episode ends where it was terminated or timed out. The data end behind step N - 1; if this step is neither, its
    episode is truncated there. The last step of a truncated episode has `truncated` True.

    Without `next_observations` the last observation of an episode is not in the data:

    - *Truncated*: there is nothing to bootstrap from behind the last step. Its row becomes the row without a step, and
      its action and reward are left out; the step before it is then the truncated one. An episode of one such step is
      left out altogether.
    - *Terminated*: nothing is bootstrapped from there. The row without a step repeats the last observation. Nothing
      else should be learned of it, such as a model of the environment.

    Args:
      observations: pytree [N, ...], before each step.
      actions: pytree [N, ...].
      rewards: number [N].
      terminals: bool [N] (a number other than 0 is True), whether the environment terminated.
      timeouts: bool [N] as well, whether the episode was cut off; ignored where terminated.
      next_observations: like `observations`, after each step and before any reset; or None.

    Returns:
      `Steps`, in new arrays: N rows and one more for each episode, or for each terminated one without
      `next_observations`.

    Raises:
      ValueError: leading axes differ; a leaf is not made of numbers; there is more than one reward or flag per step; no
        step is left; or, inside an episode, a next observation is not the observation of the next step.
    """
    arrays = _as_numbers({"observations": observations, "actions": actions, "rewards": rewards})
    flags = _as_numbers({"terminals": terminals, "timeouts": timeouts})
    (num_steps,) = checks.leading_axes(arrays | flags, 1, "a data set")
    for name in ("rewards", "terminals", "timeouts"):
        _check_one_each(name, (arrays | flags)[name])
    terminated, last = flags["terminals"] != 0, (flags["terminals"] != 0) | (flags["timeouts"] != 0)
    last[-1:] = True
    repeats = 1 + last.astype(np.intp)  # a row for each step, and one for the last observation
    if next_observations is None:
        is_missing = last & ~terminated
        is_first = np.concatenate([last[:1] | True, last[:-1]])
        repeats = np.where(is_missing, np.where(is_first, 0, 1), repeats)
    source = np.repeat(np.arange(num_steps), repeats)  # the step that a row is made of
    _check_not_empty(len(source))
    ends = last[source] & (np.append(source[1:], num_steps) != source)
    observation = jax.tree.map(lambda x: x[source], arrays["observations"])
    if next_observations is not None:
        following = _next_observations(next_observations, arrays["observations"], last)
        observation = jax.tree.map(lambda x, after: _replace(x, ends, after[last]), observation, following)
    action, reward = jax.tree.map(lambda x: _replace(x[source], ends, 0), (arrays["actions"], arrays["rewards"]))
    return _steps(observation, action, reward, terminated[source] & ~ends, ~ends, ends)


def from_minari(dataset: Any) -> Steps:
    """Rows of a `minari.MinariDataset`, episode by episode.

    A Minari episode of T steps has T + 1 observations, which are its rows. It is terminated or truncated as its last
    step says; if that says neither, it is truncated there. Truncations before the last step are ignored. Nested
    observations and actions (spaces `Dict` and `Tuple`) are dicts and tuples of arrays. Episodes without steps are left
    out, and so are the infos.

    Args:
      dataset: what `minari.load_dataset` returns, or a part of it such as `dataset.filter_episodes(...)`.

    Returns:
      `Steps`: as many rows as the data set has steps and episodes.

    Raises:
      ValueError: `dataset` is none, a leaf is not made of numbers (as of a space `Text`), an episode has not one
        observation more than actions, or no step is left.
    """
    if not hasattr(dataset, "iterate_episodes"):
        raise ValueError(f"dataset={dataset!r}: must be a minari.MinariDataset; load one with minari.load_dataset.")
    episodes = [episode for episode in map(_minari_rows, dataset.iterate_episodes()) if episode[-1].size > 1]
    _check_not_empty(len(episodes))
    return _steps(*jax.tree.map(lambda *parts: np.concatenate(parts), *episodes))


def from_ogbench(path: str | os.PathLike[str]) -> Steps:
    """Rows of an OGBench data set, a file `.npz` of `observations`, `actions` and `terminals`, [N, ...] each.

    `terminals` marks the last row of an episode, which holds its last observation and no step. All episodes are
    truncated. The file has no rewards; all are 0, to be computed from the observations and a goal. For the rewards of a
    single task give what `ogbench.make_env_and_datasets` returns to `from_arrays`, with terminals = 1 - `masks`,
    timeouts = `terminals`, and `next_observations`.

    Args:
      path: the file.

    Returns:
      `Steps`: the N rows of the file, less episodes without a step.

    Raises:
      ValueError: the file lacks one of the three arrays, or `from_arrays` refuses them.
    """
    names = ("observations", "actions", "terminals")
    with np.load(path) as file:
        missing = [name for name in names if name not in file]
        if missing:
            raise ValueError(f"path={os.fspath(path)!r}: no {', '.join(missing)}, but {', '.join(file.files)}.")
        observations, actions, terminals = (file[name] for name in names)
    nothing = np.zeros(terminals.shape, np.float32)
    return from_arrays(observations, actions, nothing, nothing, terminals)


def transitions(rows: dict[str, Any], ends: Any, n: int = 1, gamma: float = 0.99) -> TransitionBatch:
    """All n-step transitions of a data set, for a `ReplayBuffer`: `transitions(*steps, n=3, gamma=0.99)`.

    They are those of `jaxreplay.n_step_transitions`, in order of time. A step that is the last row of its episode, or
    of the data, has no next observation. Unless it was terminated, it is left out, and windows end before it.

    Args:
      rows: dict of arrays [T, num_envs, ...], as of `Steps`; other leaves than those of `Steps` are ignored.
      ends: bool [T, num_envs], True for the last row of an episode.
      n: see `NStep`.
      gamma: see `NStep`.

    Returns:
      TransitionBatch [M] of NumPy arrays, M the number of steps that have a next observation or were terminated. S, A
      and S_next have the dtypes of the rows. `Rn` and `In` have those that JAX computes with, and `In` is 0 where the
      window ends with a terminated step.

    Raises:
      ValueError: `rows` lacks a leaf, shapes or dtypes are not as above, or `n` or `gamma` is out of range.
    """
    rows = _check_rows(rows)
    length, num_envs = checks.leading_axes(rows, 2, "a data set")
    ends = np.asarray(checks.check_mask(ends, (length, num_envs), "ends"))
    terminated, truncated, step = (np.asarray(rows[name]) != 0 for name in _NAMES[3:])
    num_rows = check_integer("T * num_envs", length * num_envs, 0, 2**31 - 1, "the rows; give them in parts")
    at = np.arange(num_rows, dtype=np.int32).reshape(length, num_envs)  # stands for what is in a row
    is_last = ends.copy()
    is_last[-1:] = True
    has_next = step & (~is_last | terminated)
    after = np.where(is_last, at, np.concatenate([at[1:], at[-1:]]))
    traced = n_step_transitions(
        at, at, rows["reward"], terminated, truncated, after, n=n, gamma=gamma, mask=has_next, flush=True
    )
    batch, valid = jax.tree.map(np.asarray, traced)

    def gather(leaf: Any, index: np.ndarray) -> Any:
        return np.asarray(leaf).reshape(num_rows, *leaf.shape[2:])[index]

    start, last = batch.S[valid], batch.S_next[valid]
    return TransitionBatch(
        S=jax.tree.map(lambda leaf: gather(leaf, start), rows["observation"]),
        A=jax.tree.map(lambda leaf: gather(leaf, start), rows["action"]),
        logP=None,
        Rn=batch.Rn[valid],
        In=batch.In[valid],
        S_next=jax.tree.map(lambda leaf: gather(leaf, last), rows["observation"]),
    )


def to_minari(
    buffer: SequenceBuffer,
    state: SequenceState,
    dataset_id: str,
    *,
    env: Any = None,
    observation_space: Any = None,
    action_space: Any = None,
    jpeg_encoding: bool = False,
    **settings: Any,
) -> Any:
    """A Minari data set of the steps that are stored, written where Minari keeps its data sets.

    Episodes are those of stream 0, oldest first, then those of stream 1, and so on. An episode ends with a row without
    a step, and where `add` was told so if the buffer keeps its `ends`. Of the oldest of each stream the part that is
    overwritten is missing. The newest may not be over; it is then truncated at its last observation. Where a truncated
    step has no next observation it is left out, and the observation behind a terminated one is then a copy, both as in
    `from_arrays`.

    Args:
      buffer: the buffer, whose rows have the leaves of `Steps`; other leaves are left out.
      state: its state, unchanged and not donated.
      dataset_id: its name for Minari, such as "cartpole/mine-v0".
      env: the environment, as `minari.create_dataset_from_buffers` takes it; or None.
      observation_space, action_space: `gymnasium.Space`; None for that of `env`, or without `env` for a `Box` without
        bounds (of bools, a `MultiBinary`) for each leaf.
      jpeg_encoding: whether images are stored as JPEG, which changes them.
      settings: other arguments of `minari.create_dataset_from_buffers`, such as `author`; it warns of what is missing.

    Returns:
      `minari.MinariDataset`.

    Raises:
      ImportError: the extra `datasets` is not installed.
      ValueError: `buffer` is no `SequenceBuffer`, the rows lack a leaf or have leaves in other containers than dicts
        and tuples, no step is stored that has a next observation, or the name is taken.
    """
    if not isinstance(buffer, SequenceBuffer):
        raise ValueError(f"buffer={buffer!r}: must be a SequenceBuffer; jaxreplay.migrate makes one of a Sharded.")
    buffer._check_state(state)
    gymnasium, minari, _, _ = (_import(name) for name in ("gymnasium", "minari", "h5py", "PIL"))
    rows, ends = _stored_rows(state)
    if env is None:
        observation_space = observation_space or _space(gymnasium, rows["observation"], "observation")
        action_space = action_space or _space(gymnasium, rows["action"], "action")
    buffers = [minari.data_collector.EpisodeBuffer(**episode) for episode in _episodes(rows, ends)]
    _check_not_empty(len(buffers))
    return minari.create_dataset_from_buffers(
        dataset_id,
        buffers,
        env=env,
        observation_space=observation_space,
        action_space=action_space,
        jpeg_encoding=jpeg_encoding,
        **settings,
    )


def _steps(observation: Any, action: Any, reward: Any, terminated: Any, step: Any, ends: Any) -> Steps:
    """`Steps` of rows [T, ...]; a step is truncated if no step of its episode follows and it is not terminated."""
    truncated = step & ~np.append(step[1:], False) & ~terminated
    values = observation, action, reward, terminated, truncated, step
    return Steps(*jax.tree.map(lambda x: x[:, None], (dict(zip(_NAMES, values, strict=True)), ends)))


def _minari_rows(episode: Any) -> tuple[Any, ...]:
    """The arguments of `_steps` for an episode."""
    names = ("observations", "actions", "rewards", "terminations")
    arrays = _as_numbers({name: getattr(episode, name) for name in names})
    steps = {name: arrays[name] for name in names[1:]}
    (length,) = checks.leading_axes(steps, 1, "an episode")
    (num_rows,) = checks.leading_axes(arrays["observations"], 1, "the observations of an episode")
    if num_rows != length + 1:
        raise ValueError(
            f"episode {episode.id}: got {num_rows} observations and {length} actions; an episode has one observation "
            "more than actions."
        )
    ends = np.arange(num_rows) == length

    def with_last(x: np.ndarray) -> np.ndarray:
        return np.concatenate([x, np.zeros((1, *x.shape[1:]), x.dtype)])

    action, reward, terminated = jax.tree.map(with_last, tuple(steps.values()))
    return arrays["observations"], action, reward, terminated != 0, ~ends, ends


def _as_numbers(tree: Any) -> Any:
    """`tree` with NumPy arrays for leaves, a list being one too; a `ValueError` where one is not made of numbers."""

    def as_numbers(path: Any, leaf: Any) -> np.ndarray:
        array = np.asarray(leaf)
        if not (jnp.issubdtype(array.dtype, jnp.number) or array.dtype == np.bool_):
            raise ValueError(
                f"leaf {jax.tree_util.keystr(path)}: got {array.dtype}, expected numbers or bools; leave it out, or "
                "encode it as numbers."
            )
        return array

    return jax.tree_util.tree_map_with_path(as_numbers, tree, is_leaf=lambda x: isinstance(x, list))


def _check_one_each(name: str, x: np.ndarray) -> None:
    if x.ndim != 1:
        raise ValueError(f"{name}: got {checks.type_text(x.dtype, x.shape)}, expected one for each step, [N].")


def _check_not_empty(count: int) -> None:
    if count == 0:
        raise ValueError("no step has a next observation; give more steps, or next_observations.")


def _replace(x: np.ndarray, where: np.ndarray, value: Any) -> np.ndarray:
    """`x` itself, which is a copy, with `value` in the rows `where`."""
    x[where] = value
    return x


def _next_observations(following: Any, observations: Any, last: np.ndarray) -> Any:
    """`following` as arrays; a `ValueError` where it is not like `observations`, one step later."""
    following = _as_numbers(following)
    checks.check_like(checks.as_spec(following), checks.as_spec(observations), 1, 1, "the data set")
    for after, now in zip(jax.tree.leaves(following), jax.tree.leaves(observations), strict=True):
        if len(after) != len(now):
            raise ValueError(f"next_observations: got {len(after)} rows, expected {len(now)}, one for each step.")
        is_equal = (after[:-1] == now[1:]) | ((after[:-1] != after[:-1]) & (now[1:] != now[1:]))
        differs = ~is_equal.all(axis=tuple(range(1, is_equal.ndim))) & ~last[:-1]
        if differs.any():
            t = int(np.flatnonzero(differs)[0])
            raise ValueError(
                f"next_observations[{t}] differs from observations[{t + 1}], of the same episode; mark step {t} in "
                "timeouts if an episode ends there, or leave next_observations out."
            )
    return following


def _check_rows(rows: Any) -> dict[str, Any]:
    """The leaves of `Steps` in `rows`."""
    missing = [name for name in _NAMES if not isinstance(rows, dict) or name not in rows]
    if missing:
        raise ValueError(f"rows: no {', '.join(missing)}; expected a dict of {', '.join(_NAMES)}.")
    rows = {name: rows[name] for name in _NAMES}
    leading = checks.leading_axes(rows, 2, "a data set")
    for name in _NAMES[2:]:
        if rows[name].shape != leading:
            found = checks.type_text(rows[name].dtype, rows[name].shape)
            raise ValueError(f"leaf [{name!r}]: got {found}, expected {list(leading)}, one for each row.")
    return rows


def _stored_rows(state: SequenceState) -> tuple[dict[str, Any], np.ndarray]:
    """What is stored, oldest first, [T, num_envs, ...] on the host; and which rows are the last of their episode."""
    storage = {name: state.storage[name] for name in _check_rows(layouts.stored_spec(state.storage))}
    size, inserted, length = int(state.rows.size), int(state.rows.inserted), layouts.leading(storage, 2)[0]
    order = (inserted - size + np.arange(size)) % length

    def read(leaf: Any) -> np.ndarray:
        if isinstance(leaf, layouts.Bits):
            leaf = layouts.from_bits(leaf.bits, leaf.dtype)
        return np.asarray(leaf)[order]

    stored = layouts.as_it_is((storage, state.ends))
    rows, ends = jax.tree.map(read, stored, is_leaf=lambda x: isinstance(x, layouts.Bits))
    terminated, truncated, step = (rows[name] != 0 for name in _NAMES[3:])
    is_step_next = np.concatenate([step[1:], np.zeros_like(step[:1])])
    is_last = ~step | (terminated | truncated) & is_step_next
    is_last[-1:] = True
    return rows, is_last if ends is None else is_last | ends


def _episodes(rows: dict[str, Any], ends: np.ndarray) -> Iterator[dict[str, Any]]:
    """The fields of a Minari `EpisodeBuffer` for each episode with a step."""
    for env in range(ends.shape[1]):
        stream, start = jax.tree.map(lambda x, env=env: x[:, env], rows), 0
        for last in np.flatnonzero(ends[:, env]):
            first, start = start, int(last) + 1
            num_rows = int(last) - first + 1
            # The last row holds no step, or one without a next observation.
            num_steps = num_rows if stream["step"][last] and stream["terminated"][last] else num_rows - 1
            if num_steps == 0:
                continue
            at = np.minimum(np.arange(num_steps + 1) + first, last)
            part = jax.tree.map(lambda x, at=at: x[at[:-1]], stream)
            terminated = part["terminated"] != 0
            truncated = np.arange(num_steps) == num_steps - 1
            yield {
                "observations": jax.tree.map(lambda x, at=at: x[at], stream["observation"]),
                "actions": part["action"],
                "rewards": part["reward"],
                "terminations": terminated,
                "truncations": truncated & ~terminated,
            }


def _space(gymnasium: Any, tree: Any, path: str) -> Any:
    """A space of all arrays like these [T, num_envs, ...]."""
    spaces = gymnasium.spaces
    if isinstance(tree, dict):
        return spaces.Dict({name: _space(gymnasium, x, f"{path}[{name!r}]") for name, x in tree.items()})
    if isinstance(tree, tuple):
        return spaces.Tuple([_space(gymnasium, x, f"{path}[{i}]") for i, x in enumerate(tree)])
    if not isinstance(tree, np.ndarray):
        raise ValueError(f"leaf {path}: in a {type(tree).__name__}; Minari stores dicts and tuples of arrays.")
    item = tree.shape[2:]
    if tree.dtype == np.bool_:
        return spaces.MultiBinary(item)
    if jnp.issubdtype(tree.dtype, jnp.integer):
        return spaces.Box(np.iinfo(tree.dtype).min, np.iinfo(tree.dtype).max, item, tree.dtype)
    return spaces.Box(-np.inf, np.inf, item, tree.dtype)


def _import(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        remedy = "install the extra that brings it, with pip install 'jaxreplay[datasets]'"
        raise ImportError(f"to_minari needs {name}; {remedy}.") from error
