"""jaxreplay: experience replay that lives on the accelerator, as pure functions.

| topic | names |
| --- | --- |
| buffers | ReplayBuffer, SequenceBuffer, ReservoirBuffer, Sample |
| samplers | Uniform, Prioritized, Recent, importance_weights, effective_sample_size |
| around a buffer | Sharded, Mixture, Shared, Closed, bind, Bound |
| transitions | TransitionBatch, NStep, MonteCarlo, NextStepAutoreset, n_step_transitions, hindsight |
| drawn sequences | sequence_transitions, sequence_priority, split_burn_in, stack_frames |
| curricula | DifficultyPools, Tasks, Levels, task_key |
| checkpoints | save, restore, migrate |
| looking inside | diagnostics, plot, memory |
| modules | sum_tree, samplers, buffers, wrappers, transitions, scores, datasets, testing |

Types of states, and what is needed to write a sampler, are in the modules.
"""

import importlib
from typing import TYPE_CHECKING, Any

from jaxreplay import buffers, datasets, samplers, sum_tree, transitions, wrappers
from jaxreplay._common import foreign_names
from jaxreplay.buffers import ReplayBuffer, ReservoirBuffer, Sample, SequenceBuffer
from jaxreplay.curricula import DifficultyPools, Levels, Tasks, scores, task_key
from jaxreplay.inspection import diagnostics, memory, plot
from jaxreplay.samplers import Prioritized, Recent, Uniform, effective_sample_size, importance_weights
from jaxreplay.transitions import (
    MonteCarlo,
    NextStepAutoreset,
    NStep,
    TransitionBatch,
    hindsight,
    n_step_transitions,
    sequence_priority,
    sequence_transitions,
    split_burn_in,
    stack_frames,
)
from jaxreplay.wrappers import Bound, Closed, Mixture, Sharded, Shared, bind

if TYPE_CHECKING:
    from jaxreplay import testing
    from jaxreplay.checkpoint import migrate, restore, save

__version__ = "0.1.0"
__all__ = [  # noqa: RUF022 (by topic)
    "ReplayBuffer", "SequenceBuffer", "ReservoirBuffer", "Sample",
    "Uniform", "Prioritized", "Recent", "importance_weights", "effective_sample_size",
    "Sharded", "Mixture", "Shared", "Closed", "bind", "Bound",
    "TransitionBatch", "NStep", "MonteCarlo", "NextStepAutoreset", "n_step_transitions", "hindsight",
    "sequence_transitions", "sequence_priority", "split_burn_in", "stack_frames",
    "DifficultyPools", "Tasks", "Levels", "task_key",
    "save", "restore", "migrate",
    "diagnostics", "plot", "memory",
    "sum_tree", "samplers", "buffers", "wrappers", "transitions", "scores", "datasets", "testing",
]  # fmt: skip


def __dir__() -> list[str]:
    return sorted(__all__)


def _missing(name: str) -> Any:
    # Imported when they are used: the first needs chex, and few programs need the others when they start.
    if name == "testing":
        return importlib.import_module("jaxreplay.testing")
    if name in ("save", "restore", "migrate"):
        return getattr(importlib.import_module("jaxreplay.checkpoint"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}{foreign_names.advice(name)}", name=name)


globals()["__getattr__"] = _missing  # in this way type checkers still find names that do not exist
