"""Minari data sets: read as rows, and written from the steps of a buffer."""

import importlib
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxreplay._common import checks, layouts
from jaxreplay.buffers import SequenceBuffer, SequenceState
from jaxreplay.buffers._episode_flags import GAP
from jaxreplay.datasets._steps import NAMES, Steps, as_numbers, check_not_empty, check_rows, make_steps


def from_minari(dataset: Any) -> Steps:
    """Rows from a `minari.MinariDataset`, episode by episode.

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
      >>> import numpy as np
      >>> x = np.array([1.0, 2.0, 3.0], np.float32)
      >>> rows = jr.datasets.from_arrays(x, x, x, terminals=[0, 0, 1], timeouts=[0, 0, 0])
      >>> buffer = jr.SequenceBuffer(length=4, num_envs=1, sequence_length=2)
      >>> state = buffer.add(buffer.init(rows.rows), rows.rows, ends=rows.ends)
      >>> dataset = jr.datasets.to_minari(buffer, state, "walk/made-v0")
      >>> jr.datasets.from_minari(dataset).rows["reward"][:, 0].tolist()
      [1.0, 2.0, 3.0, 0.0]
    """
    if not hasattr(dataset, "iterate_episodes"):
        raise ValueError(f"dataset={dataset!r}: must be a minari.MinariDataset; load one with minari.load_dataset.")
    episodes = [episode for episode in map(_minari_rows, dataset.iterate_episodes()) if episode[-1].size > 1]
    check_not_empty(len(episodes))
    return make_steps(*jax.tree.map(lambda *parts: np.concatenate(parts), *episodes))


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
    """Write the stored steps as a Minari data set, where Minari keeps its data sets.

    Episodes are in order of streams, oldest first in each. An episode ends with a row without a step, and at the `ends`
    given to `add` if the buffer keeps them. The oldest episode of a stream lacks its overwritten part. The newest, if
    it goes on, is truncated at its last observation. As in `from_arrays`, a truncated step without a next observation
    is dropped, and a terminated one repeats its observation.

    Args:
      buffer: the buffer, whose rows have the leaves of `Steps`; other leaves are left out.
      state: its state, not donated.
      dataset_id: the name of the data set, such as "cartpole/mine-v0".
      env: the environment, as `minari.create_dataset_from_buffers` takes it; or None.
      observation_space, action_space: `gymnasium.Space`; None for the space of `env`, or without `env` for an unbounded
        `Box` per leaf (`MultiBinary` for bools).
      jpeg_encoding: store images as JPEG, which changes them.
      settings: other arguments of `minari.create_dataset_from_buffers`, such as `author`; it warns of missing ones.

    Returns:
      `minari.MinariDataset`.

    Raises:
      ImportError: the extra `datasets` is not installed.
      ValueError: `buffer` is not a `SequenceBuffer`, or has `gaps` with windows that do not store them ("any" and
        "inside"); the rows lack a leaf or have containers other than dicts and tuples; no stored step has a next
        observation; or the name is taken.

    Examples:
      >>> import numpy as np
      >>> x = np.array([1.0, 2.0, 3.0], np.float32)
      >>> rows = jr.datasets.from_arrays(x, x, x, terminals=[0, 0, 1], timeouts=[0, 0, 0])
      >>> buffer = jr.SequenceBuffer(length=4, num_envs=1, sequence_length=2)
      >>> state = buffer.add(buffer.init(rows.rows), rows.rows, ends=rows.ends)
      >>> dataset = jr.datasets.to_minari(buffer, state, "walk/made-v0")
      >>> dataset.total_episodes, dataset.total_steps
      (1, 3)
    """
    if not isinstance(buffer, SequenceBuffer):
        raise ValueError(f"buffer={buffer!r}: must be a SequenceBuffer; jaxreplay.migrate converts a Sharded to one.")
    buffer._check_state(state)
    if buffer.gaps and state.ends is None:
        raise ValueError(
            f"windows={buffer.windows!r}, gaps=True: this state does not store which rows may not be drawn; make the "
            'buffer with windows="cut".'
        )
    gymnasium, minari, _, _ = (_import(name) for name in ("gymnasium", "minari", "h5py", "PIL"))
    rows, ends = _stored_rows(state)
    if env is None:
        observation_space = observation_space or _space(gymnasium, rows["observation"], "observation")
        action_space = action_space or _space(gymnasium, rows["action"], "action")
    buffers = [minari.data_collector.EpisodeBuffer(**episode) for episode in _episodes(rows, ends)]
    check_not_empty(len(buffers))
    return minari.create_dataset_from_buffers(
        dataset_id,
        buffers,
        env=env,
        observation_space=observation_space,
        action_space=action_space,
        jpeg_encoding=jpeg_encoding,
        **settings,
    )


def _minari_rows(episode: Any) -> tuple[Any, ...]:
    """Arguments of `make_steps` for an episode."""
    names = ("observations", "actions", "rewards", "terminations")
    arrays = as_numbers({name: getattr(episode, name) for name in names})
    steps = {name: arrays[name] for name in names[1:]}
    (length,) = checks.leading_axes(steps, 1, "an episode")
    (num_rows,) = checks.leading_axes(arrays["observations"], 1, "the observations of an episode")
    if num_rows != length + 1:
        raise ValueError(
            f"episode {episode.id}: got {num_rows} observations and {length} actions; an episode has one more "
            "observation than actions."
        )
    ends = np.arange(num_rows) == length

    def with_last(x: np.ndarray) -> np.ndarray:
        return np.concatenate([x, np.zeros((1, *x.shape[1:]), x.dtype)])

    action, reward, terminated = jax.tree.map(with_last, tuple(steps.values()))
    return arrays["observations"], action, reward, terminated != 0, ~ends, ends


def _stored_rows(state: SequenceState) -> tuple[dict[str, Any], np.ndarray]:
    """Stored rows on the host, oldest first, [T, num_envs, ...]; and True for the last row of an episode."""
    storage = {name: state.storage[name] for name in check_rows(layouts.stored_spec(state.storage))}
    size, inserted, length = int(state.rows.size), int(state.rows.inserted), layouts.leading(storage, 2)[0]
    order = (inserted - size + np.arange(size)) % length

    def read(leaf: Any) -> np.ndarray:
        if isinstance(leaf, layouts.Bits):
            leaf = layouts.from_bits(leaf.bits, leaf.dtype)
        return np.asarray(leaf)[order]

    stored = layouts.as_it_is((storage, state.ends))
    rows, flags = jax.tree.map(read, stored, is_leaf=lambda x: isinstance(x, layouts.Bits))
    terminated, truncated, step = (rows[name] != 0 for name in NAMES[3:])
    is_step_next = np.concatenate([step[1:], np.zeros_like(step[:1])])
    is_last = ~step | (terminated | truncated) & is_step_next
    is_last[-1:] = True
    if flags is None:
        return rows, is_last
    gap = flags == GAP  # a row outside of episodes, which end before it
    is_last[:-1] |= gap[1:]
    return {**rows, "step": step & ~gap}, is_last | (flags > 0)


def _episodes(rows: dict[str, Any], ends: np.ndarray) -> Iterator[dict[str, Any]]:
    """Fields of a Minari `EpisodeBuffer` for each episode with a step."""
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
    """The space of the rows of `tree`, leaves [T, num_envs, ...]."""
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
        remedy = "install it with pip install 'jaxreplay[datasets]'"
        raise ImportError(f"to_minari needs {name}; {remedy}.") from error
