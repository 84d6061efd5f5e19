"""Inspection: numbers, plots and reports of what a buffer holds."""

from jaxreplay.inspection._diagnostics import diagnostics as diagnostics
from jaxreplay.inspection._report import plot as plot
