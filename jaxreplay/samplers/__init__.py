"""Samplers: the distribution from which a buffer draws slots."""

from jaxreplay._common.ring import Live as Live
from jaxreplay.samplers._base import Moved as Moved
from jaxreplay.samplers._base import Sampler as Sampler
from jaxreplay.samplers._by_priority import ByPriority as ByPriority
from jaxreplay.samplers._by_priority import PrioritizedState as PrioritizedState
from jaxreplay.samplers._index import Index as Index
from jaxreplay.samplers._prioritized import Prioritized as Prioritized
from jaxreplay.samplers._recent import Recent as Recent
from jaxreplay.samplers._uniform import Uniform as Uniform
from jaxreplay.samplers._weights import effective_sample_size as effective_sample_size
from jaxreplay.samplers._weights import importance_weights as importance_weights
