"""What the processes of one program (`jax.distributed`) tell one another about a checkpoint."""

from collections.abc import Callable, Sequence

import jax
import numpy as np

FAILED = -2  # no checkpoint has this number


def gather(numbers: Sequence[int]) -> np.ndarray:
    """The numbers below 2^32 that each process gives, as many in each, uint32 [processes, numbers]."""
    if jax.process_count() == 1:
        return np.array([numbers], np.uint32)
    from jax.experimental import multihost_utils

    found = multihost_utils.process_allgather(np.array([0, *numbers], np.uint32))  # never of no numbers
    return np.asarray(found).reshape(-1, 1 + len(numbers))[:, 1:]


def on_first(function: Callable[[], int]) -> int:
    """What `function` returns on the first process; all get it, and where it fails all raise an error.

    Raises:
      OSError: it failed.
    """
    if jax.process_count() == 1:
        return function()
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
