"""Inspection: diagnostics, plots and reports of buffer contents."""

from jaxreplay.inspection._diagnostics import diagnostics as diagnostics
from jaxreplay.inspection._report import plot as plot
