"""jaxreplay: experience replay that lives on the accelerator, as pure functions."""

from jaxreplay import datasets as datasets
from jaxreplay import sum_tree as sum_tree
from jaxreplay._common.ring import Live as Live
from jaxreplay.buffers import Bound as Bound
from jaxreplay.buffers import Memory as Memory
from jaxreplay.buffers import Mixture as Mixture
from jaxreplay.buffers import ReplayBuffer as ReplayBuffer
from jaxreplay.buffers import ReplayState as ReplayState
from jaxreplay.buffers import ReservoirBuffer as ReservoirBuffer
from jaxreplay.buffers import ReservoirState as ReservoirState
from jaxreplay.buffers import Sample as Sample
from jaxreplay.buffers import SequenceBuffer as SequenceBuffer
from jaxreplay.buffers import SequenceState as SequenceState
from jaxreplay.buffers import Sharded as Sharded
from jaxreplay.buffers import bind as bind
from jaxreplay.buffers import memory as memory
from jaxreplay.checkpoint import migrate as migrate
from jaxreplay.checkpoint import restore as restore
from jaxreplay.checkpoint import save as save
from jaxreplay.difficulty_pools import DifficultyPools as DifficultyPools
from jaxreplay.difficulty_pools import PoolsState as PoolsState
from jaxreplay.difficulty_pools import task_key as task_key
from jaxreplay.inspection import diagnostics as diagnostics
from jaxreplay.inspection import plot as plot
from jaxreplay.samplers import Prioritized as Prioritized
from jaxreplay.samplers import PrioritizedState as PrioritizedState
from jaxreplay.samplers import Recent as Recent
from jaxreplay.samplers import RecentState as RecentState
from jaxreplay.samplers import Sampler as Sampler
from jaxreplay.samplers import Uniform as Uniform
from jaxreplay.samplers import UniformState as UniformState
from jaxreplay.samplers import effective_sample_size as effective_sample_size
from jaxreplay.samplers import importance_weights as importance_weights
from jaxreplay.shared import Closed as Closed
from jaxreplay.shared import Shared as Shared
from jaxreplay.sum_tree import SumTree as SumTree
from jaxreplay.tasks import Levels as Levels
from jaxreplay.tasks import LevelsState as LevelsState
from jaxreplay.tasks import Tasks as Tasks
from jaxreplay.tasks import TasksState as TasksState
from jaxreplay.tasks import Thompson as Thompson
from jaxreplay.tasks import learnability as learnability
from jaxreplay.tasks import max_monte_carlo as max_monte_carlo
from jaxreplay.tasks import positive_value_loss as positive_value_loss
from jaxreplay.tasks import success_band as success_band
from jaxreplay.tasks import thompson as thompson
from jaxreplay.tasks import uncertainty as uncertainty
from jaxreplay.transitions import AutoresetState as AutoresetState
from jaxreplay.transitions import MonteCarlo as MonteCarlo
from jaxreplay.transitions import NextStepAutoreset as NextStepAutoreset
from jaxreplay.transitions import NStep as NStep
from jaxreplay.transitions import NStepState as NStepState
from jaxreplay.transitions import TransitionBatch as TransitionBatch
from jaxreplay.transitions import hindsight as hindsight
from jaxreplay.transitions import n_step_transitions as n_step_transitions
from jaxreplay.transitions import sequence_priority as sequence_priority
from jaxreplay.transitions import sequence_transitions as sequence_transitions
from jaxreplay.transitions import split_burn_in as split_burn_in
from jaxreplay.transitions import stack_frames as stack_frames

__version__ = "0.1.0"


def _missing(name: str) -> None:
    from jaxreplay._common import elsewhere

    raise elsewhere.missing(f"module {__name__!r}", name, elsewhere.FOR_NAMES)


globals()["__getattr__"] = _missing  # in this way type checkers still find names that do not exist
