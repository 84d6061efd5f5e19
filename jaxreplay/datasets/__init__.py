"""Data sets: recorded episodes as rows for buffers."""

from jaxreplay.datasets._arrays import from_arrays as from_arrays
from jaxreplay.datasets._arrays import from_ogbench as from_ogbench
from jaxreplay.datasets._arrays import transitions as transitions
from jaxreplay.datasets._minari import from_minari as from_minari
from jaxreplay.datasets._steps import Steps as Steps
