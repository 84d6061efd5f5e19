"""Shared: one state for threads that act and threads that learn."""

from jaxreplay.shared._closed import Closed as Closed
from jaxreplay.shared._shared import Shared as Shared
