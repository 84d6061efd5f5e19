"""Minari data sets as rows."""

from typing import Any

import jax
import numpy as np

from jaxreplay._common import checks
from jaxreplay.datasets._steps import Steps, as_numbers, check_not_empty, make_steps, pad_rows


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
      >>> import gymnasium, minari, numpy as np
      >>> x, box = np.arange(4.0), gymnasium.spaces.Box(0, 9, ())
      >>> episode = minari.data_collector.EpisodeBuffer(
      ...     observations=x,
      ...     actions=x[1:],
      ...     rewards=x[1:],
      ...     terminations=x[1:] > 2,
      ...     truncations=x[1:] < 0,
      ... )
      >>> spaces = {"observation_space": box, "action_space": box}
      >>> dataset = minari.create_dataset_from_buffers("walk/made-v0", [episode], **spaces)
      >>> jr.datasets.from_minari(dataset).rows["reward"][:, 0].tolist()
      [1.0, 2.0, 3.0, 0.0]
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
