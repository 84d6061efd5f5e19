"""Steps: recorded data as rows of a `SequenceBuffer`."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxreplay._common import checks

NAMES = ("observation", "action", "reward", "terminated", "truncated", "step")


class Steps(NamedTuple):
    """A data set for `SequenceBuffer.add`: `buffer.add(state, steps.rows, ends=steps.ends)`.

    Attributes:
      rows: dict of NumPy arrays [T, 1, ...] in the dtypes of the data. `observation` and `action` are pytrees,
        `reward` [T, 1] is a number, and `terminated`, `truncated` and `step` [T, 1] are bool. Where `step` is False,
        action and reward are 0 and the observation is the last one of its episode.
      ends: bool [T, 1], True for the last row of an episode.

    Examples:
      >>> x = jnp.array([1.0, 2.0, 3.0])
      >>> steps = jr.datasets.from_arrays(x, x, x, terminals=[0, 0, 1], timeouts=[0, 0, 0])
      >>> buffer = jr.SequenceBuffer(length=4, num_envs=1, sequence_length=2)
      >>> int(buffer.size(buffer.add(buffer.init(steps.rows), steps.rows, ends=steps.ends)))
      3
    """

    rows: dict[str, Any]
    ends: np.ndarray  # [T, 1]

    def padded(self, sequence_length: int) -> "Steps":
        """Append rows without a step to the last episode, so that every step can be drawn.

        A sequence can be drawn once all of its rows are stored. Without these rows the last steps of the data set would
        start no sequence. The `sequence_length` - 2 rows repeat the last observation.

        Raises:
          ValueError: `sequence_length` is not a positive integer.

        Examples:
          >>> x = jnp.array([1.0, 2.0, 3.0])
          >>> steps = jr.datasets.from_arrays(x, x, x, terminals=[0, 0, 1], timeouts=[0, 0, 0])
          >>> # Each of the three steps now starts a sequence of 4 rows.
          >>> steps.padded(4).rows["step"][:, 0].tolist()
          [True, True, True, False, False, False]
        """
        length = checks.check_integer("sequence_length", sequence_length, 1, 2**31 - 1, "the rows of a sequence")
        count = max(length - 2, 0)
        rows, ends = jax.tree.map(lambda x: pad_rows(x, count), (self.rows, self.ends))
        rows["observation"] = jax.tree.map(lambda x: pad_rows(x, count, "edge"), self.rows["observation"])
        ends[[len(self.ends) - 1, -1]] = ends[[-1, len(self.ends) - 1]]
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

    def as_numbers(path: Any, leaf: Any) -> np.ndarray:
        array = np.asarray(leaf)
        if not (jnp.issubdtype(array.dtype, jnp.number) or array.dtype == np.bool_):
            raise ValueError(
                f"leaf {jax.tree_util.keystr(path)}: got {array.dtype}, expected numbers or bools; encode it."
            )
        return array

    return jax.tree_util.tree_map_with_path(as_numbers, tree, is_leaf=lambda x: isinstance(x, list))


def check_not_empty(count: int) -> None:
    if count == 0:
        raise ValueError("no step has a next observation; give more steps, or next_observations.")


def check_rows(rows: Any) -> tuple[dict[str, Any], tuple[int, ...]]:
    """The leaves of `Steps` in `rows`, checked, and their leading axes."""
    missing = [name for name in NAMES if not isinstance(rows, dict) or name not in rows]
    if missing:
        raise ValueError(f"rows: no {', '.join(missing)}; expected a dict of {', '.join(NAMES)}.")
    rows = {name: rows[name] for name in NAMES}
    leading = checks.leading_axes(rows, 2, "a data set")
    for name in NAMES[2:]:
        if rows[name].shape != leading:
            found = checks.type_text(rows[name].dtype, rows[name].shape)
            raise ValueError(f"leaf [{name!r}]: got {found}, expected {list(leading)}, one for each row.")
    return rows, leading
