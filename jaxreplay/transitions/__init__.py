"""Transitions: traced step by step, extracted from sequences, or relabelled in hindsight."""

from jaxreplay.transitions._autoreset import AutoresetState as AutoresetState
from jaxreplay.transitions._autoreset import NextStepAutoreset as NextStepAutoreset
from jaxreplay.transitions._batch import TransitionBatch as TransitionBatch
from jaxreplay.transitions._n_step import MonteCarlo as MonteCarlo
from jaxreplay.transitions._n_step import NStep as NStep
from jaxreplay.transitions._n_step import NStepState as NStepState
from jaxreplay.transitions._rollouts import n_step_transitions as n_step_transitions
from jaxreplay.transitions._rollouts import sequence_transitions as sequence_transitions
from jaxreplay.transitions._sequences import hindsight as hindsight
from jaxreplay.transitions._sequences import sequence_priority as sequence_priority
from jaxreplay.transitions._sequences import split_burn_in as split_burn_in
from jaxreplay.transitions._sequences import stack_frames as stack_frames
