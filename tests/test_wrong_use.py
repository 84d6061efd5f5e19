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
from jaxreplay.datasets import from_ogbench

pytestmark = pytest.mark.versions
KEY, ROWS, STEPS = jax.random.key(0), np.zeros(3, np.float32), np.zeros((3, 2), np.float32)


def streams(sequence_length=2, **settings):
    return jr.SequenceBuffer(length=8, num_envs=2, sequence_length=sequence_length, **settings)


REPLAY = jr.ReplayBuffer(capacity=16)
PER = jr.ReplayBuffer(capacity=16, sampler=jr.Prioritized())


def zeros(buffer, items):
    """An empty state, without a program that makes it."""
    return jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), jax.eval_shape(buffer.init, items))


def traced(buffer, method, *arguments, items=ROWS, **named):
    """A method of an abstract state."""
    state = jax.eval_shape(buffer.init, items)
    return jax.eval_shape(lambda state: getattr(buffer, method)(state, *arguments, **named), state)


def no_ends(wrap=lambda buffer: buffer, *arguments, **settings):
    return lambda: traced(wrap(streams(**settings)), "add", *arguments, STEPS, items=STEPS)


def of_state(config, *method, other, items=STEPS, wrap=lambda state: state):
    """A method of a buffer for a state of another; without a method the buffer is bound."""
    state = wrap(zeros(other, items))
    return lambda: getattr(config, method[0])(state, *method[1:]) if method else jr.bind(config, state)


def stacked(state):
    return jax.tree.map(lambda x: np.stack([x, x]), state)


SHARDED, RESERVOIR = over_devices(REPLAY, 2), jr.ReservoirBuffer(capacity=16)
USE = "; use the buffer that made it"
STATES = (  # a message, the buffer that takes the state, and where that is from
    (f"sequence_length=3, stride=4: .* with 4 and 4{USE}", streams(3, stride=4), {"other": streams(4, stride=4)}),
    (f"sequence_length=2, stride=4: .* with 2 and 5{USE}", streams(stride=4), {"other": streams(stride=5)}),
    (f"capacity=16: .* a leading axis of 12{USE}", REPLAY, {"other": jr.ReplayBuffer(capacity=12), "items": ROWS}),
    (r"sampler=Prioritized\(\): .* of another sampler", PER, {"other": REPLAY, "items": ROWS}),
    ("got ReservoirState, expected ReplayState, as init of", REPLAY, {"other": RESERVOIR, "items": ROWS}),
    (rf"2 shards: this state has leading axes \[\]{USE}", SHARDED, {"other": REPLAY, "items": ROWS}),
    ("and jax.vmap for a stack", REPLAY, {"other": REPLAY, "items": ROWS, "wrap": stacked}),
    ("jax.vmap for a stack", streams(), {"other": streams(), "wrap": stacked}),
)
METHODS = ("size",), ("is_full",), ("is_empty",), ("can_sample", 2), ("num_batches", 2), ()
STATE, HANDLES, ONES = zeros(REPLAY, ROWS), np.zeros(3, np.int32), np.ones(3, np.float32)
OF_PER, OF_STREAMS, OF_SHARDS = zeros(PER, ROWS), zeros(streams(), STEPS), zeros(SHARDED, ROWS[:2])
BIG = jr.Mixture(buffers=(REPLAY, REPLAY))
DRAWN = jr.Sample(ROWS, jnp.asarray(HANDLES), ONES, ONES)
NO, FOUR, SLOTS = np.zeros((1, 2), bool), np.zeros(4, np.float32), np.zeros(4, np.int32)
ROLLOUT = [np.zeros((2, 2), np.float32)] * 3 + [np.zeros((2, 2), bool)] * 2 + [np.zeros((2, 2), np.float32)]
LEVELS, HIGH = jr.Levels(capacity=4), jnp.float32(1.5)
DISTINCT = jr.ReplayBuffer(capacity=4, sampler=jr.Uniform(replacement=False))
PAIR = jr.Mixture(buffers=(DISTINCT, DISTINCT))
STREAMS = jr.SequenceBuffer(length=4, num_envs=2, sequence_length=2, sampler=jr.Uniform(replacement=False))
STEP = np.zeros((2, 3), np.float32), ONES[:2], ONES[:2], NO[0], NO[0]
NSTEP = jr.NStep(n=2, gamma=0.9, num_envs=2)
LONG = [np.zeros((5, *x.shape), x.dtype) for x in (*STEP, STEP[0])]


def saved(config, state):
    return lambda: jr.save("nowhere/at all", config, state)


def weights(beta, probabilities=ONES / 3, size=3):
    return lambda: jr.importance_weights(probabilities, size, beta)


def tracer_add(gamma):
    step = ONES[:2], ONES[:2], ONES[:2], NO[0], NO[0], ONES[:2]
    tracer = jr.NStep(n=2, gamma=None, num_envs=2)
    return lambda: tracer.add(jax.tree.map(np.zeros_like, jax.eval_shape(tracer.init, *step)), *step, gamma=gamma)


def rollout(steps=ROLLOUT, **named):
    return lambda: jax.eval_shape(lambda: jr.n_step_transitions(*steps, gamma=0.9, **named))


def schedule(function):
    return lambda: jr.Prioritized(beta=function)


def draw(buffer, *batch_size, items=ROWS, **named):
    return lambda: buffer.sample(zeros(buffer, items), KEY, *batch_size, **named)


def of_alpha(alpha):
    return OF_PER.replace(sampler=OF_PER.sampler.replace(alpha=alpha))


BETA = r"beta=Array\(.*\): must be a number in \[0, 1\]"
MOST = "at most what the buffer can hold"
NOT_ARRAYS = "expected an array of numbers or bools in a dtype of JAX; convert it, or leave it out"
CASES = [
    *((x, of_state(buffer, *method, **given)) for x, buffer, given in STATES for method in METHODS),
    ("capacity=16: .* a leading axis of 12", saved(REPLAY, zeros(jr.ReplayBuffer(capacity=12), ROWS))),
    ("stride=4: .* with 2 and 5", saved(streams(stride=4), stacked(zeros(streams(stride=5), STEPS)))),
    ("2 shards: this state has leading axes", saved(SHARDED, STATE)),
    (r"ends: got None, .* needs the last row of each episode; give a bool\[T, num_envs\]", no_ends(windows="cut")),
    ("ends: got None, but hindsight=True needs", no_ends(hindsight=True)),
    ("each of 2 shards: ends: got None", no_ends(functools.partial(over_devices, num_shards=2), windows="inside")),
    ("ends: got None, but windows='cut'", no_ends(lambda x: jr.Mixture(buffers=(x, x)), 1, windows="cut")),
    (BETA, lambda: PER.sample(OF_PER, KEY, 2, beta=HIGH)),
    (BETA, lambda: PER.sample(OF_PER, KEY, 2, beta=jnp.float32(-0.5))),
    (BETA, lambda: PER.sample(OF_PER, KEY, 2, beta=jnp.float32(np.nan))),
    (r"beta=2: must be a number in \[0, 1\]", lambda: REPLAY.sample(STATE, KEY, 2, beta=2)),
    ("beta=array.*: must be a number", lambda: REPLAY.sample(STATE, KEY, 2, beta=np.array(2.0))),
    (BETA, lambda: BIG.sample((STATE, STATE), KEY, 2, beta=jnp.float32(3.0))),
    (r"beta=1.5: must be a number in \[0, 1\]; 1 corrects in full", weights(1.5)),
    (BETA, weights(jnp.float32(np.nan))),
    ("beta='all': must be a number", weights("all")),
    (r"eta=1.5: must be a number in \[0, 1\]; it is the share", lambda: jr.sequence_priority(STEPS, eta=1.5)),
    ("eta=Array.*: must be a number", lambda: jr.sequence_priority(STEPS, eta=jnp.float32(np.nan))),
    ("gamma=Array.*: must be a number", tracer_add(HIGH)),
    (r"gamma=Array.*: must be numbers in \[0, 1\]", tracer_add(jnp.array([0.5, 1.5]))),
    (r"gamma=array.*: must be numbers in \[0, 1\]", tracer_add(np.array([0.5, np.nan]))),
    (r"td_errors: got complex64\[3\], .* one number for each of the 3", lambda: PER.update(OF_PER, HANDLES, ONES * 1j)),
    (r"got complex64\[3\], expected float\[3\], .* NaN if", lambda: traced(PER, "add", ROWS, td_errors=ONES * 1j)),
    (r"td_errors: got bool\[3\], expected", lambda: traced(REPLAY, "update", HANDLES, ONES > 0)),
    (
        r"td_errors: got float32\[3, 2\], .* each of the 3 indices; jr.sequence_priority\(td_errors, sample.mask\)",
        lambda: traced(streams(), "update", HANDLES, STEPS, items=STEPS),
    ),
    (r"got float32\[3, 2\], .* each of the 3 indices\.(\n|$)", lambda: traced(PER, "update", HANDLES, STEPS)),
    (
        r"got a TransitionBatch, but init was given .* a step; .* buffer.init\(tracer.spec\(\*step\)\)",
        lambda: traced(REPLAY, "add", NSTEP.spec(*STEP, STEP[0]), items=STEP),
    ),
    (f"batch_size=17: .* from 0 to 16, {MOST}, or it would be False", lambda: REPLAY.can_sample(STATE, 17)),
    ("from 0 to 14", lambda: streams().can_sample(OF_STREAMS, 15)),
    ("from 0 to 16", lambda: SHARDED.can_sample(OF_SHARDS, 17)),
    ("from 0 to 32", lambda: BIG.can_sample((STATE, STATE), 33)),
    ("n=3: got a rollout of 2 steps, expected at least 3; give more steps, or flush=True", rollout(n=3)),
    ("n=2: got a rollout of 2 steps, expected at least 3", rollout(n=2, next_action=True)),
    ("from an empty set of levels; insert some first", lambda: LEVELS.sample(LEVELS.init(ROWS[0]), KEY, 2)),
    ("path='': must be the name of a folder, such as 'run/checkpoint'", lambda: jr.save("", None, ONES)),
    ("path='': must be the name of a folder", lambda: jr.restore("", None, ONES)),
    (r"sample\(\): has no argument 'n'; it takes key, batch_size, beta, max_age", draw(REPLAY, n=4)),
    (r"indices: got a Sample, expected its field: give sample.indices", lambda: traced(REPLAY, "update", DRAWN, ONES)),
    (r"got float32\[3\], a rollout needs 2 leading axes; x\[:, None\] adds one", lambda: streams().init(ROWS)),
    (f"n=17: must be an integer from 1 to 16, {MOST}", lambda: REPLAY.newest(STATE, 17)),
    ("n=17: must be an integer from 1 to 16", lambda: traced(REPLAY, "newest", 17)),
    ("n=15: .* from 1 to 14", lambda: traced(streams(), "newest", 15, items=STEPS)),
    ("n=17: .* from 1 to 16", lambda: SHARDED.newest(OF_SHARDS, 17)),
    *(
        (f"no attribute '{name}'; use {ours}", functools.partial(getattr, subject, name))
        for name, subject, ours in (
            ("extend", REPLAY, r"add\(state, items\)"),
            ("reward", NSTEP.spec(*STEP, STEP[0]), r"Rn \(of a TransitionBatch\)"),
            ("done", NSTEP.spec(*STEP, STEP[0]), r"ends .* In == 0 \(of a TransitionBatch\)"),
            ("next_obs", NSTEP.spec(*STEP, STEP[0]), r"S, A and S_next"),
            ("append", SHARDED, r"add\(state, items\)"),
            ("update_priorities", BIG, r"update\(state, sample.indices, td_errors\)"),
            ("set_priorities", PER, r"update\(state, sample.indices, td_errors\)"),
            ("sample_batch", jr.bind(REPLAY, STATE), r"sample\(state, key, batch_size\)"),
            ("experience", DRAWN, "sample.items"),
        )
    ),
    ("a draw of 5 rows, expected at most 4, the slots, as .* draw fewer, or", draw(DISTINCT, 5)),
    ("a draw of 5 rows, expected at most 4", lambda: traced(DISTINCT, "sample", KEY, 5)),
    ("2 shards: got a draw of 3 rows", draw(over_devices(DISTINCT, 2), 6, items=ROWS[:2])),
    ("a draw of 7 rows, expected at most 6", draw(STREAMS, 7, items=STEPS)),
    ("a draw of 5 rows, expected at most 4", lambda: PAIR.sample((zeros(DISTINCT, ROWS),) * 2, KEY, 10)),
    (r"leaf \['s_next'\]: got float32\[2, 2\], s stores float32\[2, 3\]", lambda: NSTEP.init(*STEP, STEP[0][:, :2])),
    (
        r"\['s_next'\]: got uint8\[2, 3\], s stores float32\[2, 3\]; x.astype",
        lambda: NSTEP.init(*STEP, np.uint8(STEP[0])),
    ),
    (r"\['S_next'\]: got float32\[5, 2, 2\], S stores float32\[5, 2, 3\]", rollout([*LONG[:5], LONG[5][..., :2]], n=2)),
    (r"expected \[5\], .* give many steps to n_step_transitions", lambda: NSTEP.init(*LONG)),
    ("beta=.*: must return one number for a number of updates", schedule(lambda: 1.0)),
    (r"beta=.*: must return one number", schedule(lambda count: np.ones(3))),
    ("beta=.*: must return one number", schedule(lambda count: "one")),
    (r"sampler.alpha: got float32\[3\], expected one number; use jax.vmap", lambda: PER.sample(of_alpha(ONES), KEY, 2)),
    (r"sampler.alpha: got float32\[3\], expected one number", lambda: PER.size(of_alpha(ONES))),
    ("weights=.*: must not be negative or NaN", lambda: jr.effective_sample_size(-ONES)),
    ("weights=.*: must not be negative or NaN", lambda: jr.effective_sample_size(ONES * np.nan)),
    (rf"leaf \['a'\]: got 'text', {NOT_ARRAYS}", lambda: REPLAY.init({"a": "text"})),
    (rf"leaf \['items'\]\['a'\]: got 'text', {NOT_ARRAYS}", lambda: REPLAY.add(STATE, {"a": "text"})),
    (rf"\['items'\]: got object\[3\], {NOT_ARRAYS}", lambda: REPLAY.add(STATE, ROWS.astype(object))),
    (rf"\['td_errors'\]: got 'all', {NOT_ARRAYS}", lambda: REPLAY.update(STATE, HANDLES, "all")),
    (
        r"got int32\[\], the buffer stores float32\[\]; x.astype\('float32'\) converts it",
        lambda: REPLAY.add(STATE, HANDLES),
    ),
    ("key: got Generator.*, expected one PRNG", lambda: REPLAY.sample(STATE, np.random.default_rng(), 2)),
    (r"state: got float32\[3\], expected ReplayState, .*; give it first", lambda: REPLAY.add(ROWS)),
    (r"state: got key.*, expected ReplayState, .* give it first", lambda: REPLAY.sample(KEY, 4)),
    (r"too many positional arguments; .* state, items, mask=, td_errors=", lambda: REPLAY.add(STATE, ROWS, ROWS > 0)),
    ("path: got a ReplayBuffer, expected the name of a", lambda: jr.save(REPLAY, STATE, "x")),
    ("path: got a ReplayState, .*; give it first", lambda: jr.restore(STATE, "x", REPLAY)),
    ("got a ReplayBuffer; expected an array", lambda: jr.save("nowhere/at all", STATE, REPLAY)),
    ("'a'.*got a ReplayBuffer; .*, in save", lambda: jr.save("nowhere/at all", REPLAY, {"a": REPLAY})),
    ("items: got a ReplayState, expected items, as init takes them", lambda: jr.memory(REPLAY, STATE)),
    (r"mesh=2: must be a jax.sharding.Mesh\(jax.devices\(\), \(.data.", lambda: jr.Sharded(buffer=REPLAY, mesh=2)),
    (r"len: a ReplayBuffer holds no items, its state does; use size\(state\)", lambda: len(REPLAY)),
    ("probabilities=.*: must not be negative or NaN, or", weights(0.5, probabilities=-ONES)),
    ("probabilities=.*: must not be negative or NaN", weights(0.5, probabilities=ONES * np.nan)),
    ("probabilities=.*: .* or above 1; give", weights(0.5, probabilities=ONES * 3)),
    ("probabilities: got a str, expected numbers, float", weights(0.5, probabilities="all")),
    (r"probabilities: got float\d\d\[\], expected numbers, .* B at", weights(0.5, probabilities=0.5)),
    ("size=-3: must be an integer from 0 to 2147483647, the number of items", weights(0.5, size=-3)),
    ("size=2.5: must be an integer", weights(0.5, size=2.5)),
    (r"weights: got float\d\d\[\], expected numbers, .* B at least 1", lambda: jr.effective_sample_size(1.0)),
    (r"weights: got float\d\d\[0\], expected numbers, .* B at least 1", lambda: jr.effective_sample_size([])),
    (r"unexpected \[0\], \[1\]; .* np.stack makes an array of a list; got", lambda: REPLAY.add(STATE, [1.0, 2.0])),
    ("a list holds leaves, np.stack makes", lambda: REPLAY.add(STATE, {"a": [[1.0], [2.0]]})),
    ("a list holds leaves, np.stack makes", lambda: REPLAY.add(STATE, [{"a": ROWS}] * 2)),
    ("got both, or a Sample as key; give a key, or sample=", lambda: jr.diagnostics(REPLAY, STATE, DRAWN)),
    ("test_wrong_use.py': .* a file .npz with observations, actions, .* from_arrays", lambda: from_ogbench(__file__)),
    ("path='nowhere.npz': must be a file .npz", lambda: from_ogbench("nowhere.npz")),
    (r"mask: got bool\[2\], expected a row for each of the 4 items", lambda: SHARDED.add(OF_SHARDS, FOUR, mask=NO[0])),
    (
        r"mask: got bool\[\d, \d\], expected bool\[\], .*; drawable= is the",
        lambda: streams().add(OF_STREAMS, STEPS, mask=NO),
    ),
    (
        r"mask: got int(32|64)\[\], expected bool\[\], one flag for all",
        lambda: streams().add(OF_STREAMS, STEPS, mask=1),
    ),
    (r"got float32\[3\], expected a row for each of the 4 indices", lambda: SHARDED.update(OF_SHARDS, SLOTS, ONES)),
    (r"^batch_size=Array.*dtype=key<fry>\) overlaying:\.\.\.: must be an", lambda: REPLAY.sample(STATE, 4, KEY)),
    ("score='learnability': must be a function such as those of", lambda: jr.Tasks(num_tasks=4, score="learnability")),
    (
        r"'dones'; it takes steps, ends, td_errors, drawable, mask; use ends \(of a buffer\)",
        lambda: streams().add(OF_STREAMS, STEPS, dones=NO),
    ),
    ("it takes indices, td_errors; use td_errors", lambda: REPLAY.update(STATE, HANDLES, priorities=ONES)),
    (r"argument 'alpha'; .*; use sampler=jr.Prioritized\(alpha=\.\.\.\)\.", draw(REPLAY, 2, alpha=0.5)),
    (r"ReplayBuffer: has no field max_size; it has capacity, .*; use capacity\.", lambda: jr.ReplayBuffer(max_size=8)),
    ("has no field period; it has .*; use stride", lambda: jr.SequenceBuffer(period=1)),
    (r"no attribute 'add'; use that of the buffer, or of jr.bind\(buffer, state\)", lambda: STATE.add),
    (
        r"inside the block only; write with shared.state\(\) as cell",
        lambda: jr.Shared(REPLAY, REPLAY.init(ROWS)).state().state,
    ),
]


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


@pytest.mark.parametrize(("message", "call"), CASES)
def test_a_wrong_use_is_told(message, call):
    rejects(message, call, error=(AttributeError, TypeError, ValueError))
