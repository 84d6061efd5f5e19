"""jaxreplay: experience replay that lives on the accelerator, as pure functions.

| name | is |
| --- | --- |
| *buffers* | |
| ReplayBuffer | items, the oldest overwritten first |
| SequenceBuffer | streams of steps; a draw is a sequence |
| ReservoirBuffer | a uniform sample of all items ever added |
| Sample | a drawn batch |
| *samplers* | |
| Uniform | draws each item equally often |
| Prioritized | draws in proportion to priority^alpha |
| Recent | draws newer items more often |
| importance_weights | weights of draws by their probabilities |
| effective_sample_size | the number of unweighted draws that weighted draws are worth |
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
| NextStepAutoreset | gives the final observation a row of its own |
| n_step_transitions | n-step transitions of a rollout |
| hindsight | replaces goals by goals that were reached |
| *drawn sequences* | |
| sequence_transitions | their n-step transitions |
| sequence_priority | one priority from the TD errors of the steps |
| split_burn_in | the first steps, and the others |
| stack_frames | stacks of the last frames |
| *curricula* | |
| DifficultyPools | parks tasks that are always or never solved |
| Tasks | tasks drawn by a score |
| Levels | prioritized level replay |
| task_key | a key that finds a task again in another list |
| *checkpoints* | |
| save | writes a state, or a whole run, to the disk |
| restore | reads it back, bit for bit |
| migrate | converts a state to another capacity, sampler or number of devices |
| *looking inside* | |
| diagnostics | numbers to log |
| plot | a figure of a state |
| memory | the bytes of a state, before it is allocated |
| *modules* | |
| sum_tree | a sum tree over slots, and draws from it |
| samplers | types for writing a sampler |
| buffers | types of buffer states |
| wrappers | the classes around a buffer |
| transitions | types of tracer states |
| scores | scores for `Tasks` and `Levels` |
| datasets | readers for D4RL, Minari, OGBench and Flashbax vaults; a recorder |
| testing | checks of your own samplers and buffers |

Types of states, and all that a sampler needs, are in the modules.

All examples of docstrings start after the lines below. The buffer holds three items with the handles 0, 1 and 2. The
three steps are of one environment, within an episode. The rewards are of two groups of two rollouts.

Examples:
  >>> import jax
  >>> import jax.numpy as jnp
  >>> import numpy as np
  >>> import jaxreplay as jr
  >>> key = jax.random.key(0)
  >>> items = np.array([10, 20, 30])
  >>> buffer = jr.ReplayBuffer(capacity=4, sampler=jr.Prioritized(epsilon=0.0))
  >>> state = buffer.add(buffer.init(items), items)
  >>> steps, ends = np.array([[1], [2], [3]]), np.zeros((3, 1), bool)
  >>> sizes = {"length": 8, "num_envs": 1, "sequence_length": 2}
  >>> sequences = jr.SequenceBuffer(**sizes, windows="inside", hindsight=True)
  >>> x = np.array([1.0, 2.0])
  >>> batch = jr.TransitionBatch(S=x, A=x, logP=None, Rn=x, In=x / 2, S_next=x + 1)
  >>> groups, rewards = np.array([0, 1]), np.array([[1.0, 1.0], [0.0, 0.0]])
  >>> tasks = jr.Tasks(num_tasks=4)
  >>> thresholds = {"easy_threshold": 0.9, "hard_threshold": 0.1}
  >>> pools = jr.DifficultyPools(tasks_per_env=(4,), **thresholds)
  >>> by_score = {"prioritization": "proportional", "temperature": 1.0, "staleness": 0.0}
  >>> levels = jr.Levels(capacity=3, **by_score)
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
