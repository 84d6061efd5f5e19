"""Data sets: recorded episodes as rows for buffers."""

from jaxreplay.datasets._rows import Steps as Steps
from jaxreplay.datasets._rows import from_arrays as from_arrays
from jaxreplay.datasets._rows import from_minari as from_minari
from jaxreplay.datasets._rows import from_ogbench as from_ogbench
from jaxreplay.datasets._rows import transitions as transitions
