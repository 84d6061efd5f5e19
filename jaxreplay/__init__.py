"""jaxreplay: experience replay that lives on the accelerator, as pure functions."""

from jaxreplay import datasets as datasets
from jaxreplay import sum_tree as sum_tree
from jaxreplay._report import plot as plot
from jaxreplay.autoreset import AutoresetState as AutoresetState
from jaxreplay.autoreset import NextStepAutoreset as NextStepAutoreset
from jaxreplay.binding import Bound as Bound
from jaxreplay.binding import bind as bind
from jaxreplay.buffer import Sample as Sample
from jaxreplay.checkpoint import restore as restore
from jaxreplay.checkpoint import save as save
from jaxreplay.diagnostics import diagnostics as diagnostics
from jaxreplay.difficulty_pools import DifficultyPools as DifficultyPools
from jaxreplay.difficulty_pools import task_key as task_key
from jaxreplay.difficulty_pools._parking import PoolsState as PoolsState
from jaxreplay.footprint import Memory as Memory
from jaxreplay.footprint import memory as memory
from jaxreplay.goals import hindsight as hindsight
from jaxreplay.migration import migrate as migrate
from jaxreplay.mixture import Mixture as Mixture
from jaxreplay.replay_buffer import ReplayBuffer as ReplayBuffer
from jaxreplay.replay_buffer import ReplayState as ReplayState
from jaxreplay.reservoir_buffer import ReservoirBuffer as ReservoirBuffer
from jaxreplay.reservoir_buffer import ReservoirState as ReservoirState
from jaxreplay.sampler_protocol import Sampler as Sampler
from jaxreplay.samplers import Prioritized as Prioritized
from jaxreplay.samplers import Uniform as Uniform
from jaxreplay.sequence_buffer import SequenceBuffer as SequenceBuffer
from jaxreplay.sequence_buffer import SequenceState as SequenceState
from jaxreplay.sequences import sequence_priority as sequence_priority
from jaxreplay.sequences import sequence_transitions as sequence_transitions
from jaxreplay.sequences import split_burn_in as split_burn_in
from jaxreplay.sequences import stack_frames as stack_frames
from jaxreplay.sharding import Sharded as Sharded
from jaxreplay.sum_tree import SumTree as SumTree
from jaxreplay.tracing import MonteCarlo as MonteCarlo
from jaxreplay.tracing import NStep as NStep
from jaxreplay.tracing import NStepState as NStepState
from jaxreplay.tracing import n_step_transitions as n_step_transitions
from jaxreplay.transition_batch import TransitionBatch as TransitionBatch
from jaxreplay.weights import effective_sample_size as effective_sample_size
from jaxreplay.weights import importance_weights as importance_weights

__version__ = "0.1.0"
