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


def of_state(*method, buffer, other, items=STEPS, wrap=lambda state: state):
    """A method of `buffer` for a state of `other`; without a method the buffer is bound."""
    state = wrap(zeros(other, items))
    return lambda: getattr(buffer, method[0])(state, *method[1:]) if method else jr.bind(buffer, state)


def stacked(state):
    return jax.tree.map(lambda x: np.stack([x, x]), state)


SHARDED = over_devices(REPLAY, 2)
STATES = {  # methods that take a state only, or with a number
    "another sequence_length": (
        {"buffer": streams(3, stride=4), "other": streams(4, stride=4)},
        r"sequence_length=3, stride=4: this state is of a buffer with 4 and 4; use the buffer that made it\.",
    ),
    "another stride": (
        {"buffer": streams(stride=4), "other": streams(stride=5)},
        "sequence_length=2, stride=4: this state is of a buffer with 2 and 5; use the buffer that made it",
    ),
    "another capacity": (
        {"buffer": REPLAY, "other": jr.ReplayBuffer(capacity=12), "items": ROWS},
        "capacity=16: this state has a leading axis of 12; use the buffer that made it",
    ),
    "another sampler": (
        {"buffer": PRIORITIZED, "other": REPLAY, "items": ROWS},
        r"sampler=Prioritized\(\): this state is of another sampler",
    ),
    "another class": (
        {"buffer": REPLAY, "other": jr.ReservoirBuffer(capacity=16), "items": ROWS},
        "state: got ReservoirState, expected ReplayState, as init of ReplayBuffer returns it; give it first",
    ),
    "no shards": (
        {"buffer": SHARDED, "other": REPLAY, "items": ROWS},
        r"2 shards: this state has leading axes \[\]; use the buffer that made it",
    ),
    "a stack": ({"buffer": REPLAY, "other": REPLAY, "items": ROWS, "wrap": stacked}, "and jax.vmap for a stack"),
    "a stack of sequences": ({"buffer": streams(), "other": streams(), "wrap": stacked}, "jax.vmap for a stack"),
}
METHODS = ("size",), ("is_full",), ("is_empty",), ("can_sample", 2), ("num_batches", 2), ()


def saved(config, state):
    return lambda: jr.save("nowhere/at all", config, state)


CASES = {
    "save, another capacity": (
        saved(REPLAY, zeros(jr.ReplayBuffer(capacity=12), ROWS)),
        "capacity=16: this state has a leading axis of 12",
    ),
    "save, a stack of another": (
        saved(streams(stride=4), stacked(zeros(streams(stride=5), STEPS))),
        "stride=4: this state is of a buffer with 2 and 5",
    ),
    "save, shards": (saved(SHARDED, zeros(REPLAY, ROWS)), "2 shards: this state has leading axes"),
    **{
        f"{kind}, {method[0] if method else 'bind'}": (of_state(*method, **given), message)
        for kind, (given, message) in STATES.items()
        for method in METHODS
    },
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
