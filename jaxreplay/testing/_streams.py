"""check_stream: are the steps of an environment as a tracer takes them?"""

from typing import Any

import jax
import numpy as np


def check_stream(s: Any, s_next: Any, terminated: Any, truncated: Any, *, mask: Any = None) -> str:
    """Check the steps of an environment, as `NStep.add` and `n_step_transitions` take them, and name its autoreset.

    Give it some hundred steps, with several ends. It runs on the host. It compares observations, so it cannot know
    anything of an environment whose first observation is also its final one, and it does not look at rewards.
    Swapped flags are known by lengths alone: terminated episodes that all have the same length, the largest, and
    truncated ones of different lengths. A time limit that is reported as `terminated` only, or episodes whose lengths
    are all the same, cannot be known. Episodes that are cut at random may look swapped.

    Args:
      s: pytree [T, num_envs, ...], observations before the steps.
      s_next: the same, observations after the steps.
      terminated, truncated: bool [T, num_envs] (or numbers; nonzero is True).
      mask: bool [T, num_envs], False for rows that only reset, such as `~resets`; None for all True.

    Returns:
      "same-step" if the row after an end is the first step of the next episode; "next-step" if it is a reset, which
      `mask` leaves out.

    Raises:
      AssertionError: a rule is broken: `s_next` is not the next `s`, a mask is missing, the final observation is lost,
        or the flags look swapped. The message begins with the rule.
      ValueError: no episode ends before the last row.

    Examples:
      >>> s = np.array([[0], [1], [0], [1]])  # one environment, whose episodes end at 2
      >>> ends, no = np.array([[0], [1], [0], [1]]), np.zeros((4, 1))
      >>> from jaxreplay import testing
      >>> testing.check_stream(s, s + 1, ends, no)
      'same-step'
    """
    terminated, truncated = (np.asarray(x) != 0 for x in (terminated, truncated))
    is_step = np.full_like(terminated, True) if mask is None else np.asarray(mask)
    ends = (terminated | truncated) & is_step
    after = ends[:-1]  # an end is in the row before
    if not after.any():
        raise ValueError("terminated, truncated: no episode ends before the last row; give more steps.")
    pairs = zip(*map(jax.tree.leaves, (s, s_next)), strict=True)
    continues = np.all([np.equal(x[1:], y[:-1]).reshape(*after.shape, -1).all(-1) for x, y in pairs], axis=0)
    broken = np.argwhere(~after & is_step[:-1] & ~(is_step[1:] & continues))
    found = f"not so in {len(broken)} rows, the first is {broken[:1].tolist()}, [time, env]"
    assert not broken.size, f"within an episode s_next is s of the next row: {found}"
    is_first = is_step[1:][after]
    is_lost = is_first.any() and continues[after][is_first].all()
    found = "its s is the end's s_next. With next-step autoreset give mask=~resets, False in that row; with same-step"
    found += " autoreset s_next must be the final observation, not the one after the reset"
    assert not is_lost, f"the row after an end is the first of an episode, or a reset that mask leaves out: {found}"
    # Lengths of the episodes that begin in these rows.
    lengths = np.concatenate([np.diff(np.cumsum(x)[y]) for x, y in zip(is_step.T, ends.T, strict=True)])
    is_terminated = np.concatenate([x[y][1:] for x, y in zip(terminated.T, ends.T, strict=True)])
    whole, cut = lengths[is_terminated], lengths[~is_terminated]
    is_swapped = min(whole.size, np.unique(cut).size) > 1 and np.all(whole == lengths.max())
    found = f"the {whole.size} terminated episodes have {whole[:1]} steps, the others fewer; are the flags swapped?"
    assert not is_swapped, f"a time limit truncates, and a terminal state terminates: {found}"
    return "same-step" if is_first.all() else "next-step"
