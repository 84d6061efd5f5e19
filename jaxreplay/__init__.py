"""jaxreplay: experience replay that lives on the accelerator, as pure functions."""

from jaxreplay import sum_tree as sum_tree
from jaxreplay._buffer import Sample as Sample
from jaxreplay._pool_state import PoolsState as PoolsState
from jaxreplay.autoreset import AutoresetState as AutoresetState
from jaxreplay.autoreset import NextStepAutoreset as NextStepAutoreset
from jaxreplay.difficulty_pools import DifficultyPools as DifficultyPools
from jaxreplay.difficulty_pools import task_key as task_key
from jaxreplay.replay_buffer import ReplayBuffer as ReplayBuffer
from jaxreplay.replay_buffer import ReplayState as ReplayState
from jaxreplay.samplers import Prioritized as Prioritized
from jaxreplay.samplers import Sampler as Sampler
from jaxreplay.samplers import Uniform as Uniform
from jaxreplay.sequence_buffer import SequenceBuffer as SequenceBuffer
from jaxreplay.sequence_buffer import SequenceState as SequenceState
from jaxreplay.sequence_buffer import sequence_priority as sequence_priority
from jaxreplay.sequence_buffer import split_burn_in as split_burn_in
from jaxreplay.sequence_buffer import stack_frames as stack_frames
from jaxreplay.sum_tree import SumTree as SumTree
from jaxreplay.tracing import MonteCarlo as MonteCarlo
from jaxreplay.tracing import NStep as NStep
from jaxreplay.tracing import NStepState as NStepState
from jaxreplay.tracing import n_step_transitions as n_step_transitions
from jaxreplay.tracing import sequence_transitions as sequence_transitions
from jaxreplay.transition_batch import TransitionBatch as TransitionBatch
from jaxreplay.weights import effective_sample_size as effective_sample_size
from jaxreplay.weights import importance_weights as importance_weights
