"""The names by which checkpoints know classes: those of this package, wherever they live, and those of others."""

import functools
import importlib
from typing import Any

from jaxreplay._common.layouts import Bits, Rows
from jaxreplay._windows import Steps
from jaxreplay.autoreset import AutoresetState
from jaxreplay.buffer import Sample
from jaxreplay.difficulty_pools._parking import PoolsState
from jaxreplay.replay_buffer import ReplayState
from jaxreplay.ring import Ring
from jaxreplay.samplers import PrioritizedState, UniformState
from jaxreplay.sequence_buffer import SequenceState
from jaxreplay.sum_tree import SumTree
from jaxreplay.tracing import NStepState
from jaxreplay.transition_batch import TransitionBatch

PACKAGE = "jaxreplay"
# A file format: names may be added, none may be changed.
CLASSES = {
    "AutoresetState": AutoresetState,
    "Bits": Bits,
    "NStepState": NStepState,
    "PoolsState": PoolsState,
    "PrioritizedState": PrioritizedState,
    "ReplayState": ReplayState,
    "Ring": Ring,
    "Rows": Rows,
    "Sample": Sample,
    "SequenceState": SequenceState,
    "Steps": Steps,
    "SumTree": SumTree,
    "TransitionBatch": TransitionBatch,
    "UniformState": UniformState,
}
_NAMES = {cls: name for name, cls in CLASSES.items()}


def class_name(cls: type) -> str | None:
    """The name "module:qualname" of a class, if it is found by that; of one of this package "jaxreplay:name"."""
    if cls in _NAMES:
        return f"{PACKAGE}:{_NAMES[cls]}"
    name = f"{cls.__module__}:{cls.__qualname__}"
    try:
        return name if find_class(name) is cls else None
    except ValueError:
        return None


def find_class(name: str) -> Any:
    """The class of a name.

    Raises:
      ValueError: there is none.
    """
    module, _, qualname = name.partition(":")
    # Formats 1 and 2 had the modules in which this package's classes lived then.
    if module.partition(".")[0] == PACKAGE and qualname in CLASSES:
        return CLASSES[qualname]
    try:
        return functools.reduce(getattr, qualname.split("."), importlib.import_module(module))
    except (ImportError, AttributeError) as error:
        raise ValueError(f"{name}: a class of the saved state cannot be imported: {error}.") from error


def stable_name(name: str) -> str:
    """A dotted name of a configuration's class or of a function; of one of this package without its module."""
    package, _, rest = name.partition(".")
    return f"{PACKAGE}.{rest.rpartition('.')[2]}" if package == PACKAGE else name
