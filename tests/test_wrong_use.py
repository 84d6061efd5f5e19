"""Wrong uses, each with its message: what was given, the rule, the remedy.

Nothing is compiled: states are abstract, or zeros.
"""

import functools

import jax
import jax.numpy as jnp
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


STATE, HANDLES, ONES = zeros(REPLAY, ROWS), np.zeros(3, np.int32), np.ones(3, np.float32)
BIG = jr.Mixture(buffers=(REPLAY, REPLAY))
DRAWN = jr.Sample(ROWS, jnp.asarray(HANDLES), ONES, ONES)
NO = np.zeros((1, 2), bool)
ROLLOUT = [np.zeros((2, 2), np.float32)] * 3 + [np.zeros((2, 2), bool)] * 2 + [np.zeros((2, 2), np.float32)]


def weights(beta):
    return lambda: jr.importance_weights(ONES / 3, 3, beta)


def tracer_add(gamma):
    step = ONES[:2], ONES[:2], ONES[:2], NO[0], NO[0], ONES[:2]
    tracer = jr.NStep(n=2, gamma=None, num_envs=2)
    return lambda: tracer.add(jax.tree.map(np.zeros_like, jax.eval_shape(tracer.init, *step)), *step, gamma=gamma)


BETA = r"beta=Array\(.*\): must be a number in \[0, 1\]"
LATER = streams(hindsight=True)
CASES |= {
    "beta, above": (lambda: PRIORITIZED.sample(zeros(PRIORITIZED, ROWS), KEY, 2, beta=jnp.float32(1.5)), BETA),
    "beta, below": (lambda: PRIORITIZED.sample(zeros(PRIORITIZED, ROWS), KEY, 2, beta=jnp.float32(-0.5)), BETA),
    "beta, NaN": (lambda: PRIORITIZED.sample(zeros(PRIORITIZED, ROWS), KEY, 2, beta=jnp.float32(np.nan)), BETA),
    "beta, a number": (lambda: REPLAY.sample(STATE, KEY, 2, beta=2), r"beta=2: must be a number in \[0, 1\]"),
    "beta, of NumPy": (lambda: REPLAY.sample(STATE, KEY, 2, beta=np.array(2.0)), "beta=array.*: must be a number"),
    "beta, a mixture": (lambda: BIG.sample((STATE, STATE), KEY, 2, beta=jnp.float32(3.0)), BETA),
    "weights, beta above": (weights(1.5), r"beta=1.5: must be a number in \[0, 1\]; 1 corrects in full"),
    "weights, beta NaN": (weights(jnp.float32(np.nan)), BETA),
    "weights, beta no number": (weights("all"), "beta='all': must be a number"),
    "eta": (lambda: jr.sequence_priority(STEPS, eta=1.5), r"eta=1.5: must be a number in \[0, 1\]; it is the share"),
    "eta, NaN": (lambda: jr.sequence_priority(STEPS, eta=jnp.float32(np.nan)), "eta=Array.*: must be a number"),
    "later, gamma": (
        lambda: LATER.later(zeros(LATER, STEPS), KEY, HANDLES, law="geometric", gamma=jnp.float32(1.5)),
        r"gamma=Array.*: must be a number in \[0, 1\]; it is a discount",
    ),
    "tracer, gamma": (tracer_add(jnp.float32(1.5)), "gamma=Array.*: must be a number"),
    "tracer, gammas": (tracer_add(jnp.array([0.5, 1.5])), r"gamma=Array.*: must be numbers in \[0, 1\]"),
    "tracer, gamma NaN": (tracer_add(np.array([0.5, np.nan])), r"gamma=array.*: must be numbers in \[0, 1\]"),
    "complex TD errors": (
        lambda: PRIORITIZED.update(zeros(PRIORITIZED, ROWS), HANDLES, ONES * 1j),
        r"td_errors: got complex64\[3\], expected one number for each of the 3 indices",
    ),
    "complex first TD errors": (
        lambda: traced(PRIORITIZED, "add", ROWS, td_errors=ONES * 1j),
        r"td_errors: got complex64\[3\], expected float\[3\], one number an item; NaN if unknown",
    ),
    "bools as TD errors": (lambda: traced(REPLAY, "update", HANDLES, ONES > 0), r"td_errors: got bool\[3\], expected"),
    "can_sample, too many": (
        lambda: REPLAY.can_sample(STATE, 17),
        "batch_size=17: must be an integer from 0 to 16, at most what the buffer can hold, or it would be False for",
    ),
    "can_sample, too many sequences": (lambda: streams().can_sample(zeros(streams(), STEPS), 15), "from 0 to 14"),
    "can_sample, too many of shards": (lambda: SHARDED.can_sample(zeros(SHARDED, ROWS[:2]), 17), "from 0 to 16"),
    "can_sample, too many of a mixture": (lambda: BIG.can_sample((STATE, STATE), 33), "from 0 to 32"),
    "a rollout shorter than n": (
        lambda: jax.eval_shape(lambda: jr.n_step_transitions(*ROLLOUT, n=3, gamma=0.9)),
        "n=3: got a rollout of 2 steps, expected at least 3: none is complete, .*; give more steps, or flush=True",
    ),
    "a rollout without a next action": (
        lambda: jax.eval_shape(lambda: jr.n_step_transitions(*ROLLOUT, n=2, gamma=0.9, next_action=True)),
        "n=2: got a rollout of 2 steps, expected at least 3",
    ),
    "levels, none": (
        lambda: jr.Levels(capacity=4).sample(jr.Levels(capacity=4).init(np.float32(0)), KEY, 2),
        "cannot sample from an empty set of levels; insert some first",
    ),
    "save, no name": (
        lambda: jr.save("", None, ONES),
        "path='': must be the name of a folder, such as 'run/checkpoint'",
    ),
    "restore, no name": (lambda: jr.restore("", None, ONES), "path='': must be the name of a folder"),
    "an unknown argument": (
        lambda: REPLAY.sample(STATE, KEY, n=4),
        r"ReplayBuffer.sample\(\): has no argument 'n'; it takes key, batch_size, beta, max_age",
    ),
    "an unknown argument of update": (
        lambda: REPLAY.update(STATE, HANDLES, priorities=ONES),
        r"update\(\): has no argument 'priorities'; it takes indices, td_errors",
    ),
    "an unknown argument of add": (
        lambda: streams().add(zeros(streams(), STEPS), STEPS, done=STEPS > 0),
        r"add\(\): has no argument 'done'; it takes steps, ends, td_errors, drawable",
    ),
    "a sample for its indices": (
        lambda: traced(REPLAY, "update", DRAWN, ONES),
        r"indices: got a Sample, expected its field: give sample.indices",
    ),
    "a rollout of one stream": (
        lambda: jax.eval_shape(streams().init, ROWS),
        r"leaf <root>: got float32\[3\], a rollout needs 2 leading axes; x\[:, None\] adds one",
    ),
}

CASES |= {
    "newest, too many": (lambda: REPLAY.newest(STATE, 17), "n=17: must be an integer from 1 to 16, at most what"),
    "newest, too many while traced": (lambda: traced(REPLAY, "newest", 17), "n=17: must be an integer from 1 to 16"),
    "newest, too many sequences": (lambda: traced(streams(), "newest", 15, items=STEPS), "n=15: .* from 1 to 14"),
    "newest, too many of shards": (lambda: SHARDED.newest(zeros(SHARDED, ROWS[:2]), 17), "n=17: .* from 1 to 16"),
    **{
        f"a foreign name, {name}": (functools.partial(getattr, subject, name), f"no attribute '{name}'; use {ours}")
        for name, subject, ours in (
            ("extend", REPLAY, r"add\(state, items\)"),
            ("append", SHARDED, r"add\(state, items\)"),
            ("update_priorities", BIG, r"update\(state, sample.indices, td_errors\)"),
            ("set_priorities", PRIORITIZED, r"update\(state, sample.indices, td_errors\)"),
            ("sample_batch", jr.bind(REPLAY, STATE), r"sample\(state, key, batch_size\)"),
            ("experience", DRAWN, "sample.items"),
        )
    },
}


def test_traced_numbers_out_of_range_are_clipped():
    """In a program no value is known; NaN counts as 1."""
    given = jnp.array([-1.0, 0.0, 0.5, 1.0, 3.0, np.nan])
    found = jax.jit(jax.vmap(lambda beta: jr.importance_weights(np.array([0.5, 0.25]), 4, beta, normalize=None)))(given)
    expected = [(4 * np.array([0.5, 0.25])) ** -beta for beta in (0, 0, 0.5, 1, 1, 1)]
    np.testing.assert_allclose(found, expected, rtol=1e-6)


@pytest.mark.parametrize("name", CASES)
def test_a_wrong_use_is_told(name):
    call, message = CASES[name]
    rejects(message, call, error=(AttributeError, TypeError, ValueError))
