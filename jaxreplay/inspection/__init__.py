"""Inspection: numbers about a buffer, a figure of its contents, and its memory."""

from jaxreplay.inspection._diagnostics import diagnostics as diagnostics
from jaxreplay.inspection._memory import Memory as Memory
from jaxreplay.inspection._memory import memory as memory
from jaxreplay.inspection._plot import plot as plot
