"""check_stream: are the steps of an environment as a tracer takes them?"""

from typing import Any

import jax
import numpy as np

from jaxreplay.testing import _rules as rules
from jaxreplay.testing._buffers import rule


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
    terminated, truncated = (np.asarray(jax.device_get(x)) != 0 for x in (terminated, truncated))
    is_step = np.ones_like(terminated) if mask is None else np.asarray(jax.device_get(mask))
    ends = (terminated | truncated) & is_step
    after = ends[:-1]  # an end is in the row before
    if not after.any():
        raise ValueError("terminated, truncated: no episode ends before the last row; give more steps.")
    pairs = zip(*(jax.tree.leaves(jax.device_get(x)) for x in (s, s_next)), strict=True)
    same = [np.equal(x[1:], y[:-1]).reshape(*after.shape, -1).all(axis=-1) for x, y in pairs]
    continues = np.all(same, axis=0)
    with rule(rules.CONTINUES):
        broken = np.argwhere(~after & is_step[:-1] & ~(is_step[1:] & continues))
        assert not broken.size, f"not so in {len(broken)} rows, the first is {broken[:1].tolist()}, [time, env]"
    is_first = is_step[1:][after]
    with rule(rules.RESTARTS):
        found = "s is s_next of the end. With next-step autoreset give mask=~resets, False in that row"
        found += "; with same-step autoreset s_next must be the final observation, not the one after the reset"
        assert not is_first.any() or not continues[after][is_first].all(), found
    lengths: dict[bool, list[int]] = {True: [], False: []}  # of whole episodes, by terminated
    for env in range(ends.shape[1]):
        (last,) = np.nonzero(ends[:, env])
        sizes = np.diff(np.cumsum(is_step[:, env])[last])
        for size, by in zip(sizes.tolist(), terminated[last[1:], env].tolist(), strict=True):
            lengths[by].append(size)
    longest, cut = {*lengths[True]}, {*lengths[False]}
    with rule(rules.TIME_LIMIT):
        found = f"the {len(lengths[True])} terminated episodes have {longest} steps, the truncated ones fewer"
        is_swapped = len(longest) == 1 < min(len(lengths[True]), len(cut)) and max(cut) <= max(longest)
        assert not is_swapped, f"{found}; are the flags swapped?"
    return "same-step" if is_first.all() else "next-step"
