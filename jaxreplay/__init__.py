"""jaxreplay: experience replay that lives on the accelerator, as pure functions.

| name | is |
| --- | --- |
| *buffers* | |
| ReplayBuffer | items, the oldest overwritten first |
| SequenceBuffer | streams of steps; a draw is a sequence |
| ReservoirBuffer | a uniform sample of all items ever added |
| Sample | a drawn batch |
| *samplers* | |
| Uniform | all items alike |
| Prioritized | in proportion to priority^alpha |
| Recent | newer items more often |
| importance_weights | weights of draws by their probabilities |
| effective_sample_size | how many equal draws weighted ones are worth |
| *around a buffer* | |
| Sharded | a buffer over the devices of a mesh |
| Mixture | batches from several buffers |
| Shared | one buffer for several threads |
| Closed | raised by a Shared that is closed |
| bind | a buffer and its state as one pytree |
| Bound | what `bind` returns |
| *transitions* | |
| TransitionBatch | n-step transitions, with Rn and In |
| NStep | n-step transitions, step by step |
| MonteCarlo | returns of whole episodes, step by step |
| NextStepAutoreset | a row for the final observation |
| n_step_transitions | n-step transitions of a rollout |
| hindsight | transitions with goals that were reached |
| *drawn sequences* | |
| sequence_transitions | their n-step transitions |
| sequence_priority | one priority from the TD errors of the steps |
| split_burn_in | the first steps, and the others |
| stack_frames | stacks of the last frames |
| *curricula* | |
| DifficultyPools | tasks that are always or never solved are parked |
| Tasks | tasks drawn by a score |
| Levels | prioritized level replay |
| task_key | a key of a task, by which states move to other lists |
| *checkpoints* | |
| save | a state, or a whole run, on the disk |
| restore | the same, bit for bit |
| migrate | a state for another capacity, sampler or number of devices |
| *looking inside* | |
| diagnostics | numbers to log |
| plot | a figure of a state |
| memory | bytes of a state, before it is made |
| *modules* | |
| sum_tree | sums over slots, and draws from them |
| samplers | types to write a sampler with |
| buffers | types of states |
| wrappers | the same of wrappers |
| transitions | types of a tracer |
| scores | scores of `Tasks` and `Levels` |
| datasets | files of others, and recordings |
| testing | checks of samplers and buffers of your own |

Types of states, and what is needed to write a sampler, are in the modules.
"""

import importlib
from typing import TYPE_CHECKING, Any

from jaxreplay import buffers, datasets, samplers, sum_tree, transitions, wrappers
from jaxreplay._common import foreign_names
from jaxreplay._common.version import __version__ as __version__
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
