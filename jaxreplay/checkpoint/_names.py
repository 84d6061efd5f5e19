"""The names of classes in checkpoints; those of this package do not depend on the module that defines them."""

import functools
import importlib
from typing import Any

from jaxreplay._common.layouts import Bits, Rows
from jaxreplay._episodes import Windows
from jaxreplay._windows import Steps
from jaxreplay.autoreset import AutoresetState
from jaxreplay.buffer import Sample
from jaxreplay.difficulty_pools._parking import PoolsState
from jaxreplay.replay_buffer import ReplayState
from jaxreplay.reservoir_buffer import ReservoirState
from jaxreplay.ring import Ring
from jaxreplay.samplers import PrioritizedState, UniformState
from jaxreplay.sequence_buffer import SequenceState
from jaxreplay.sum_tree import SumTree
from jaxreplay.tracing import NStepState
from jaxreplay.transition_batch import TransitionBatch
from jaxreplay.update_counts import UpdateCounts

PACKAGE = "jaxreplay"
# Part of the file format: names may be added, but never changed.
CLASSES = {
    "AutoresetState": AutoresetState,
    "Bits": Bits,
    "NStepState": NStepState,
    "PoolsState": PoolsState,
    "PrioritizedState": PrioritizedState,
    "ReplayState": ReplayState,
    "ReservoirState": ReservoirState,
    "Ring": Ring,
    "Rows": Rows,
    "Sample": Sample,
    "SequenceState": SequenceState,
    "Steps": Steps,
    "SumTree": SumTree,
    "TransitionBatch": TransitionBatch,
    "UniformState": UniformState,
    "UpdateCounts": UpdateCounts,
    "Windows": Windows,
}
_NAMES = {cls: name for name, cls in CLASSES.items()}


def class_name(cls: type) -> str | None:
    """The name "module:qualname" of a class, or "jaxreplay:name" for this package; None if it cannot be imported."""
    if cls in _NAMES:
        return f"{PACKAGE}:{_NAMES[cls]}"
    name = f"{cls.__module__}:{cls.__qualname__}"
    try:
        return name if find_class(name) is cls else None
    except ValueError:
        return None


def find_class(name: str) -> Any:
    """The class with a name from `class_name`.

    Raises:
      ValueError: it cannot be imported.
    """
    module, _, qualname = name.partition(":")
    # Formats 1 and 2 recorded the modules that defined this package's classes then.
    if module.partition(".")[0] == PACKAGE and qualname in CLASSES:
        return CLASSES[qualname]
    try:
        return functools.reduce(getattr, qualname.split("."), importlib.import_module(module))
    except (ImportError, AttributeError) as error:
        raise ValueError(f"{name}: a class of the saved state cannot be imported: {error}.") from error


def stable_name(name: str) -> str:
    """The dotted `name` of a class or function, without the module if it is from this package."""
    package, _, rest = name.partition(".")
    return f"{PACKAGE}.{rest.rpartition('.')[2]}" if package == PACKAGE else name
