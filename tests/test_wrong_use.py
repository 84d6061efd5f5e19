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


def weights(beta, probabilities=ONES / 3, size=3):
    return lambda: jr.importance_weights(probabilities, size, beta)


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
        "n=3: got a rollout of 2 steps, expected at least 3; give more steps, or flush=True",
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

DISTINCT = jr.ReplayBuffer(capacity=4, sampler=jr.Uniform(replacement=False))
STREAMS = jr.SequenceBuffer(length=4, num_envs=2, sequence_length=2, sampler=jr.Uniform(replacement=False))
STEP = np.zeros((2, 3), np.float32), ONES[:2], ONES[:2], NO[0], NO[0]
NSTEP = jr.NStep(n=2, gamma=0.9, num_envs=2)
LONG = [np.zeros((5, *x.shape), x.dtype) for x in (*STEP, STEP[0])]


def schedule(function):
    return lambda: jr.Prioritized(beta=function)


def draw(buffer, batch_size, items=ROWS, wrap=lambda call: call):
    state = zeros(buffer, items)
    return lambda: wrap(lambda state: buffer.sample(state, KEY, batch_size))(state)


def with_alpha(alpha):
    state = zeros(PRIORITIZED, ROWS)
    return state.replace(sampler=state.sampler.replace(alpha=alpha))


NOT_ARRAYS = "expected an array of numbers or bools in a dtype of JAX; convert it, or leave it out"
CASES |= {
    "distinct, too many": (draw(DISTINCT, 5), "a draw of 5 rows, expected at most 4, the slots, as .* draw fewer, or"),
    "distinct, too many while traced": (draw(DISTINCT, 5, wrap=jax.jit), "a draw of 5 rows, expected at most 4"),
    "distinct, too many of shards": (draw(over_devices(DISTINCT, 2), 6, ROWS[:2]), "2 shards: got a draw of 3 rows"),
    "distinct, too many sequences": (draw(STREAMS, 7, STEPS), "a draw of 7 rows, expected at most 6"),
    "distinct, too many of a mixture": (
        lambda: jr.Mixture(buffers=(DISTINCT, DISTINCT)).sample((zeros(DISTINCT, ROWS),) * 2, KEY, 10),
        "a draw of 5 rows, expected at most 4",
    ),
    "next observations of another shape": (
        lambda: NSTEP.init(*STEP, STEP[0][:, :2]),
        r"leaf \['s_next'\]: got float32\[2, 2\], s stores float32\[2, 3\]",
    ),
    "next observations of another dtype": (
        lambda: jax.eval_shape(NSTEP.init, *STEP, STEP[0].astype(np.uint8)),
        r"\['s_next'\]: got uint8\[2, 3\], s stores float32\[2, 3\]; x.astype",
    ),
    "a rollout's next observations": (
        lambda: jr.n_step_transitions(*LONG[:5], LONG[5][..., :2], n=2, gamma=0.9),
        r"\['S_next'\]: got float32\[5, 2, 2\], S stores float32\[5, 2, 3\]",
    ),
    "a rollout for a tracer": (lambda: NSTEP.init(*LONG), r"expected \[5\], .* give many steps to n_step_transitions"),
    "a schedule of nothing": (schedule(lambda: 1.0), "beta=.*: must return one number for a number of updates"),
    "a schedule of three": (schedule(lambda count: np.ones(3)), r"beta=.*: must return one number"),
    "a schedule of text": (schedule(lambda count: "one"), "beta=.*: must return one number"),
    "alphas": (
        lambda: PRIORITIZED.sample(with_alpha(ONES), KEY, 2),
        r"state.sampler.alpha: got float32\[3\], expected one number; use jax.vmap",
    ),
    "negative weights": (lambda: jr.effective_sample_size(-ONES), "weights=.*: must not be negative or NaN"),
    "weights that are NaN": (
        lambda: jr.effective_sample_size(ONES * np.nan),
        "weights=.*: must not be negative or NaN",
    ),
    "text to store": (lambda: REPLAY.init({"a": "text"}), rf"leaf \['a'\]: got 'text', {NOT_ARRAYS}"),
    "text to add": (lambda: REPLAY.add(STATE, {"a": "text"}), rf"leaf \['items'\]\['a'\]: got 'text', {NOT_ARRAYS}"),
    "objects to add": (lambda: REPLAY.add(STATE, ROWS.astype(object)), rf"\['items'\]: got object\[3\], {NOT_ARRAYS}"),
    "text as TD errors": (lambda: REPLAY.update(STATE, HANDLES, "all"), rf"\['td_errors'\]: got 'all', {NOT_ARRAYS}"),
    "another dtype": (
        lambda: REPLAY.add(STATE, HANDLES),
        r"leaf <root>: got int32\[\], the buffer stores float32\[\]; x.astype\('float32'\) converts it",
    ),
    "a key of NumPy": (
        lambda: REPLAY.sample(STATE, np.random.default_rng(), 2),
        "key: got Generator.*, expected one PRNG",
    ),
    "add without a state": (
        lambda: REPLAY.add(ROWS),
        r"state: got float32\[3\], expected ReplayState, .*; give it first",
    ),
    "sample without a state": (
        lambda: REPLAY.sample(KEY, 4),
        r"state: got key.*, expected ReplayState, .* give it first",
    ),
    "a mask by position": (
        lambda: REPLAY.add(STATE, ROWS, ROWS > 0),
        r"add\(\): too many positional arguments; it takes state, items, mask=, td_errors=",
    ),
    "save, the buffer first": (lambda: jr.save(REPLAY, STATE, "x"), "path: got a ReplayBuffer, expected the name of a"),
    "restore, the state first": (lambda: jr.restore(STATE, "x", REPLAY), "path: got a ReplayState, .*; give it first"),
    "save, the buffer last": (
        lambda: jr.save("nowhere/at all", STATE, REPLAY),
        "got a ReplayBuffer; expected an array",
    ),
    "save, the buffer twice": (
        lambda: jr.save("nowhere/at all", REPLAY, {"a": REPLAY}),
        "'a'.*got a ReplayBuffer; .*, in save",
    ),
    "memory of a state": (
        lambda: jr.memory(REPLAY, STATE),
        "items: got a ReplayState, expected items, as init takes them",
    ),
    "a mesh": (
        lambda: jr.Sharded(buffer=REPLAY, mesh=2),
        r"mesh=2: must be a jax.sharding.Mesh\(jax.devices\(\), \(.data.",
    ),
    "a length": (lambda: len(REPLAY), r"len: a ReplayBuffer holds no items, its state does; use size\(state\)"),
    "probabilities, negative": (weights(0.5, probabilities=-ONES), "probabilities=.*: must not be negative or NaN, or"),
    "probabilities, NaN": (weights(0.5, probabilities=ONES * np.nan), "probabilities=.*: must not be negative or NaN"),
    "priorities as probabilities": (weights(0.5, probabilities=ONES * 3), "probabilities=.*: .* or above 1; give"),
    "probabilities, text": (weights(0.5, probabilities="all"), "probabilities: got a str, expected numbers, float"),
    "one probability": (
        weights(0.5, probabilities=0.5),
        r"probabilities: got float\d\d\[\], expected numbers, .* B at",
    ),
    "size, negative": (weights(0.5, size=-3), "size=-3: must be an integer from 0 to 2147483647, the number of items"),
    "size, a fraction": (weights(0.5, size=2.5), "size=2.5: must be an integer"),
    "one weight": (
        lambda: jr.effective_sample_size(1.0),
        r"weights: got float\d\d\[\], expected numbers, .* B at least 1",
    ),
    "no weights": (
        lambda: jr.effective_sample_size([]),
        r"weights: got float\d\d\[0\], expected numbers, .* B at least 1",
    ),
    "lists to add": (
        lambda: REPLAY.add(STATE, [1.0, 2.0]),
        r"unexpected \[0\], \[1\]; a list holds leaves, np.stack makes an array of a list; got",
    ),
    "lists of lists to add": (lambda: REPLAY.add(STATE, {"a": [[1.0], [2.0]]}), "a list holds leaves, np.stack makes"),
    "dicts to add": (lambda: REPLAY.add(STATE, [{"a": ROWS}] * 2), "a list holds leaves, np.stack makes"),
    "lists of lists to store": (
        lambda: REPLAY.init([[1.0, 2.0]]),
        r"leaf \[0\]\[0\]: .* needs 1 leading axis; x\[None\] adds one, np.stack makes an array of a list",
    ),
    "a sample as a key": (
        lambda: jr.diagnostics(REPLAY, STATE, DRAWN),
        "key and sample: got both, or a Sample as key; give a key, or sample=",
    ),
    "a file that is no .npz": (
        lambda: jr.datasets.from_ogbench(__file__),
        "path='.*test_wrong_use.py': must be a file .npz with observations, actions, terminals; see from_arrays",
    ),
    "no file": (lambda: jr.datasets.from_ogbench("nowhere.npz"), "path='nowhere.npz': must be a file .npz"),
    "shards, a mask of too few": (
        lambda: SHARDED.add(zeros(SHARDED, ROWS[:2]), np.zeros(4, np.float32), mask=np.ones(2, bool)),
        r"mask: got bool\[2\], expected a row for each of the 4 items",
    ),
    "shards, TD errors of too few": (
        lambda: SHARDED.update(zeros(SHARDED, ROWS[:2]), np.zeros(4, np.int32), ONES),
        r"td_errors: got float32\[3\], expected a row for each of the 4 indices",
    ),
    "sample, the key last": (
        lambda: REPLAY.sample(STATE, 4, KEY),
        r"^batch_size=Array\(\(\), dtype=key<fry>\) overlaying:\.\.\.: must be an integer",
    ),
    "a score by its name": (
        lambda: jr.Tasks(num_tasks=4, score="learnability"),
        "score='learnability': must be a function such as those of jr.scores",
    ),
    "a foreign argument of add": (
        lambda: streams().add(zeros(streams(), STEPS), STEPS, dones=NO),
        r"has no argument 'dones'; it takes steps, ends, td_errors, drawable; use ends\.",
    ),
    "a foreign argument of update": (lambda: REPLAY.update(STATE, HANDLES, priorities=ONES), "; use td_errors"),
    "a foreign argument of sample": (
        lambda: REPLAY.sample(STATE, KEY, 2, alpha=0.5),
        r"has no argument 'alpha'; .*; use sampler=jr.Prioritized\(alpha=\.\.\.\)\.",
    ),
    "a foreign field": (
        lambda: jr.ReplayBuffer(max_size=8),
        r"ReplayBuffer: has no field max_size; it has capacity, .*; use capacity\.",
    ),
    "a foreign field of streams": (lambda: jr.SequenceBuffer(period=1), "has no field period; it has .*; use stride"),
    "a method of a state": (
        functools.partial(getattr, STATE, "add"),
        r"'ReplayState' object has no attribute 'add'; use that of the buffer, or of jr.bind\(buffer, state\)",
    ),
    "a cell outside of its block": (
        lambda: jr.Shared(REPLAY, REPLAY.init(ROWS)).state().state,
        r"state: is there inside the block only; write with shared.state\(\) as cell",
    ),
}


def test_traced_numbers_out_of_range_are_clipped():
    """In a program no value is known; NaN counts as 1."""
    given = jnp.array([-1.0, 0.0, 0.5, 1.0, 3.0, np.nan])
    found = jax.jit(jax.vmap(lambda beta: jr.importance_weights(np.array([0.5, 0.25]), 4, beta, normalize=None)))(given)
    expected = [(4 * np.array([0.5, 0.25])) ** -beta for beta in (0, 0, 0.5, 1, 1, 1)]
    np.testing.assert_allclose(found, expected, rtol=1e-6)


def test_a_program_takes_a_buffer_as_an_argument():
    state = REPLAY.add(REPLAY.init(ROWS), ROWS)
    draw = jax.jit(lambda buffer, state: buffer.sample(state, KEY, 4).indices)
    np.testing.assert_array_equal(draw(REPLAY, state), REPLAY.sample(state, KEY, 4).indices)
    (buffer, _), _ = jax.lax.scan(lambda carry, _: (carry, None), (REPLAY, state), length=2)
    assert buffer == REPLAY


@pytest.mark.parametrize("name", CASES)
def test_a_wrong_use_is_told(name):
    call, message = CASES[name]
    rejects(message, call, error=(AttributeError, TypeError, ValueError))
