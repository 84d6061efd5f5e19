"""Data sets: readers for D4RL, Minari, OGBench and Flashbax vaults; a recorder."""

from jaxreplay.datasets._recording import Recorder as Recorder
from jaxreplay.datasets._recording import load as load
from jaxreplay.datasets._rows import Steps as Steps
from jaxreplay.datasets._rows import from_arrays as from_arrays
from jaxreplay.datasets._rows import from_minari as from_minari
from jaxreplay.datasets._rows import from_ogbench as from_ogbench
from jaxreplay.datasets._rows import transitions as transitions
from jaxreplay.datasets._vault import from_vault as from_vault
