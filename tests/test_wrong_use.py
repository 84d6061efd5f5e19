"""Wrong uses, each with its message: what was given, the rule, the remedy.

Nothing is compiled: states are abstract, or zeros.
"""

import functools

import jax
import numpy as np
import pytest
from helpers import over_devices, rejects

import jaxreplay as jr

pytestmark = pytest.mark.versions
KEY, ROWS, STEPS = jax.random.key(0), np.zeros(3, np.float32), np.zeros((3, 2), np.float32)


def streams(sequence_length=2, **settings):
    return jr.SequenceBuffer(length=8, num_envs=2, sequence_length=sequence_length, **settings)


REPLAY = jr.ReplayBuffer(capacity=16)
PRIORITIZED = jr.ReplayBuffer(capacity=16, sampler=jr.Prioritized())


def zeros(buffer, items):
    """An empty state, without a program that makes it."""
    return jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), jax.eval_shape(buffer.init, items))


def traced(buffer, method, *arguments, items=ROWS, **named):
    """A method of an abstract state."""
    state = jax.eval_shape(buffer.init, items)
    return jax.eval_shape(lambda state: getattr(buffer, method)(state, *arguments, **named), state)


def no_ends(wrap=lambda buffer: buffer, **settings):
    return lambda: traced(wrap(streams(**settings)), "add", STEPS, items=STEPS)


CASES = {
    "ends, cut": (
        no_ends(windows="cut"),
        r"ends: got None, but windows='cut' needs the last row of each episode; "
        r"give a bool\[T, num_envs\], zeros if no episode ever ends\.",
    ),
    "ends, inside": (no_ends(windows="inside"), "ends: got None, but windows='inside' needs"),
    "ends, episodes": (no_ends(windows="episodes"), "ends: got None, but windows='episodes' needs"),
    "ends, hindsight": (no_ends(hindsight=True), "ends: got None, but hindsight=True needs"),
    "ends, gaps": (no_ends(gaps=True, windows="cut"), "ends: got None, but windows='cut' needs"),
    "ends, sharded": (
        no_ends(functools.partial(over_devices, num_shards=2), windows="inside"),
        "each of 2 shards: ends: got None",
    ),
    "ends, mixture": (
        lambda: traced(jr.Mixture(buffers=(streams(windows="cut"),) * 2), "add", 1, STEPS, items=STEPS),
        "ends: got None, but windows='cut' needs",
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_a_wrong_use_is_told(name):
    call, message = CASES[name]
    rejects(message, call, error=(TypeError, ValueError))
