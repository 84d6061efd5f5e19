"""Wrappers: objects around one or more buffers, with the methods of a buffer."""

from jaxreplay.wrappers._bound import Bound as Bound
from jaxreplay.wrappers._bound import bind as bind
from jaxreplay.wrappers._mixture import Mixture as Mixture
from jaxreplay.wrappers._sharded import Sharded as Sharded
from jaxreplay.wrappers._shared import Shared as Shared
from jaxreplay.wrappers._turns import Closed as Closed
