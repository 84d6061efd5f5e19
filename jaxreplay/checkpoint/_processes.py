"""Messages about a checkpoint between the processes of one program (`jax.distributed`)."""

from collections.abc import Callable, Sequence

import jax
import numpy as np

FAILED = -2  # no checkpoint has this number


def gather(numbers: Sequence[int]) -> np.ndarray:
    """Numbers below 2^32 from all processes, the same count from each, uint32 [processes, numbers]."""
    if jax.process_count() == 1:
        return np.array([numbers], np.uint32)
    from jax.experimental import multihost_utils

    found = multihost_utils.process_allgather(np.array([0, *numbers], np.uint32))  # the 0 avoids an empty gather
    return np.asarray(found).reshape(-1, 1 + len(numbers))[:, 1:]


def on_first(function: Callable[[], int]) -> int:
    """Result of `function` on the first process, broadcast to all. If it fails, all processes raise an `OSError`."""
    number, error = FAILED, None
    if jax.process_index() == 0:
        try:
            number = function()
        except OSError as raised:
            error = raised
    number = int(gather([number - FAILED])[0, 0]) + FAILED
    if number == FAILED:
        raise error or OSError("the first process could not read or write the checkpoint; its error says why.")
    return number
