"""testing: checks of the rules that every buffer and sampler follows, for the tests of your own.

`check_buffer` and `check_sampler` compile and run a few small programs, `check_stream` looks at the steps of an
environment. A broken rule raises an `AssertionError` that begins with the rule. Import this module explicitly, `from
jaxreplay import testing`: it needs chex.
"""

from jaxreplay.testing._buffers import check_buffer as check_buffer
from jaxreplay.testing._rules import *  # noqa: F403 (the rules)
from jaxreplay.testing._samplers import check_sampler as check_sampler
from jaxreplay.testing._streams import check_stream as check_stream
