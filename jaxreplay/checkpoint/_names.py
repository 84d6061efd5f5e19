"""Names of classes in checkpoints, and the classes that a checkpoint may name."""

import sys
import types
from collections.abc import Iterable
from typing import Any

from jaxreplay._common.layouts import Bits, Rows
from jaxreplay._common.ring import Ring
from jaxreplay.buffers import ReplayState, ReservoirState, Sample, SequenceState
from jaxreplay.buffers._chosen_sequences import ChosenSequences
from jaxreplay.buffers._later_steps import EpisodeNumbers
from jaxreplay.buffers._uses import Uses
from jaxreplay.curricula import LevelsState, PoolsState, TasksState
from jaxreplay.datasets import Steps
from jaxreplay.samplers import PrioritizedState, RecentState, UniformState
from jaxreplay.sum_tree import SumTree
from jaxreplay.sum_tree._range import Restricted
from jaxreplay.transitions import AutoresetState, NStepState, TransitionBatch
from jaxreplay.transitions._windows import TracerSteps

PACKAGE = "jaxreplay"
# Part of the file format and independent of the defining modules: a class that is renamed keeps its name here.
CLASSES: dict[str, type] = {"DataSteps": Steps} | {
    cls.__name__: cls
    for cls in (
        *(AutoresetState, Bits, ChosenSequences, EpisodeNumbers, LevelsState, NStepState, PoolsState),
        *(PrioritizedState, RecentState, ReplayState, ReservoirState, Restricted, Ring, Rows, Sample, SequenceState),
        *(SumTree, TasksState, TracerSteps, TransitionBatch, UniformState, Uses),
    )
}
_NAMES = {cls: name for name, cls in CLASSES.items()}
Allowed = type | types.ModuleType | Iterable[type | types.ModuleType]


def class_name(cls: type) -> str | None:
    """Name of a class: "jaxreplay:name" or "module:qualname"; None if no name leads back to it."""
    if cls in _NAMES:
        return f"{PACKAGE}:{_NAMES[cls]}"
    if cls.__module__.partition(".")[0] == PACKAGE:
        return None
    return f"{cls.__module__}:{cls.__qualname__}" if _found(cls.__module__, cls.__qualname__) is cls else None


def own_class(name: str) -> type | None:
    """The class of this package with this name, else None."""
    package, _, rest = name.partition(":")
    return CLASSES.get(rest) if package == PACKAGE else None


def check_allow(allow: Allowed) -> list[type | types.ModuleType]:
    """`allow` as a list.

    Raises:
      ValueError: an entry is neither a module nor a class.
    """
    listed = [allow] if isinstance(allow, type | types.ModuleType) else list(allow)
    for given in listed:
        if not isinstance(given, type | types.ModuleType):
            raise ValueError(f"allow: got {allow!r}; expected modules and classes, such as allow=(optax, Settings).")
    return listed


def allowed_class(name: str, allow: Iterable[type | types.ModuleType]) -> type | None:
    """The class with this name if `allow` contains it or its module, else None. Imports nothing."""
    module, _, qualname = name.partition(":")
    for given in allow:
        found: type | None = None
        if isinstance(given, type):
            found = given
        elif f"{module}.".startswith(f"{given.__name__}."):
            found = _found(module, qualname)
        if found is not None and class_name(found) == name:
            return found
    return None


def dotted_name(named: Any) -> str:
    """Dotted name of a class or function for descriptions, without the module if it is from this package."""
    if named.__module__.partition(".")[0] == PACKAGE:
        return f"{PACKAGE}.{named.__name__}"
    return f"{named.__module__}.{named.__qualname__}"


def _found(module: str, qualname: str) -> Any:
    """A class of an already imported module. Runs no code, such as the `__getattr__` of a module."""
    found: Any = sys.modules.get(module)
    for name in qualname.split("."):
        found = getattr(found, "__dict__", {}).get(name)
    return found if isinstance(found, type) else None
