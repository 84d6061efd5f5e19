"""Buffers: they store items and draw batches of them."""

from jaxreplay.buffers._replay import ReplayBuffer as ReplayBuffer
from jaxreplay.buffers._replay import ReplayState as ReplayState
from jaxreplay.buffers._reservoir import ReservoirBuffer as ReservoirBuffer
from jaxreplay.buffers._reservoir import ReservoirState as ReservoirState
from jaxreplay.buffers._sample import Sample as Sample
from jaxreplay.buffers._sequence import SequenceBuffer as SequenceBuffer
from jaxreplay.buffers._sequence import SequenceState as SequenceState
