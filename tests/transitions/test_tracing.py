import functools
import inspect

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import seeds
import twins
from helpers import at, cases, rarely, rejects, stack
from rollouts import at_once, empty, first, make_steps, of_sequences, one_by_one, traced, turned

import jaxreplay as jr
from jaxreplay.transitions import _windows

RATES = 0.15, 0.15, 0.1
STEPS, TRACER = make_steps(np.random.default_rng(0), 4, 2), jr.NStep(n=3, gamma=0.9, num_envs=2)
FIRST = first(STEPS)


def by_start(batch, valid):
    """The transitions alone, in order of their first steps."""
    rows = np.flatnonzero(valid)
    rows = rows[np.argsort(np.asarray(batch.A)[rows])]
    return jax.tree.map(lambda leaf: np.asarray(leaf)[rows], batch)


def test_spec_is_what_add_emits():
    for arguments in ({"next_action": True}, {"record_extra_info": True}, {}):
        tracer = jr.NStep(n=3, gamma=0.9, num_envs=2, **arguments)
        _, batch, _ = jax.eval_shape(tracer.add, empty(tracer, STEPS), **at(STEPS, 0))
        for spec in (tracer.spec(**FIRST), jax.eval_shape(tracer.spec, **FIRST)):
            chex.assert_trees_all_equal_shapes_and_dtypes(spec, batch)
    assert jr.MonteCarlo(gamma=0.9, max_length=3, num_envs=2).spec(**FIRST) == TRACER.spec(**FIRST)


@pytest.mark.parametrize(
    ("flavour", "every"), [("nstep", 4), ("monte_carlo", 5), rarely(("nstep", 1)), rarely(("monte_carlo", 1))]
)
def test_coax_traces(flavour, every):
    for case in cases("coax_tracing")[::every]:
        gamma, n = case["gamma"], case["n"]
        columns = {k: np.array([step[k] for step in case["steps"]])[:, None] for k in case["steps"][0]}
        done = columns.pop("done")
        steps = columns | {"r": columns["r"].astype(np.float32), "s_next": columns["s"] + 1}
        steps |= {"terminated": done, "truncated": np.zeros_like(done)}
        tracer = jr.NStep(n=n, gamma=gamma, next_action=True)
        if flavour == "monte_carlo":
            tracer = jr.MonteCarlo(gamma=gamma, max_length=len(case["steps"]))
        batch = at(*jax.device_get(one_by_one(tracer, steps)))  # the transitions alone
        traced = case[flavour]
        assert batch.batch_size == len(traced)
        if flavour == "monte_carlo":
            traced = sorted(traced, key=lambda row: row["S"])  # there, the last step of an episode comes first
        for i, row in enumerate(traced):
            bootstrapped = ("S_next", "A_next", "logP_next") if row["In"] > 0 else ()
            for name in row.keys() & {"S", "A", "Rn", "In", "logP", "W", *bootstrapped}:
                np.testing.assert_allclose(getattr(batch, name)[i], row[name], rtol=1e-5, atol=1e-6)


def test_monte_carlo_is_n_step_with_n_max_length():
    tracers = jr.MonteCarlo(gamma=0.8, max_length=6, num_envs=2), jr.NStep(n=6, gamma=0.8, num_envs=2)
    one, other = (one_by_one.lower(tracer, STEPS).as_text() for tracer in tracers)  # not compiled
    assert one == other


@pytest.mark.parametrize("dtype", [jnp.bool_, jnp.bfloat16, *map(rarely, [jnp.int32, jnp.float32])])
def test_rewards_of_any_number_type_and_flags_as_numbers(dtype):
    tracer, one = jr.NStep(n=2, gamma=0.7), np.ones(1, np.int32)
    state = tracer.init(one, one, one.astype(dtype), one, one, one)
    state, _, valid = tracer.add(state, one, one, one.astype(dtype), 0 * one, 0 * one, one)
    assert not valid[0]
    state, batch, valid = tracer.add(state, one, one, one.astype(dtype), 0 * one, one, one)
    assert valid[0]
    np.testing.assert_allclose([batch.Rn[0], batch.In[0]], [1.7, 0.49], rtol=1e-6)
    assert batch.Rn.dtype == batch.In.dtype == jnp.float32


@pytest.mark.parametrize("next_action", [True, rarely(False)])
def test_leaves_without_elements(next_action):
    """What has an axis of size 0, such as an observation of which nothing is kept. Nothing is run."""
    settings = {"n": 3, "gamma": 0.9, "next_action": next_action, "record_extra_info": True}
    tracer = jr.NStep(**settings, num_envs=2)
    steps = STEPS | {"s": np.zeros((4, 2, 0)), "a": np.zeros((4, 2, 4, 0), np.int32), "s_next": np.zeros((4, 2, 0))}

    def check(emitted, rows):
        batch, valid = emitted
        assert batch.S.shape == batch.S_next.shape == (rows, 0)
        assert batch.A.shape == (rows, 4, 0)
        assert batch.extra_info["actions"].shape == (rows, 3, 4, 0)
        assert batch.Rn.shape == valid.shape == (rows,)

    state = empty(tracer, steps)
    state, *emitted = jax.eval_shape(lambda s, x: tracer.add(s, **x), state, at(steps, 0))
    check(emitted, 2)
    check(jax.eval_shape(tracer.flush, state)[1:], 6)
    for flush in (False, True):
        check(jax.eval_shape(lambda x, flush=flush: at_once(x, **settings, flush=flush), steps), 8 + 6 * flush)
    check(jax.eval_shape(lambda x: of_sequences(x, **settings), turned(steps)), 2 * (4 - 3))


@twins.strict()
@pytest.mark.parametrize("next_action", [True, rarely(False)])
def test_a_traced_n_gives_the_transitions_of_the_number(next_action):
    """Each start's transition is the one that the number gives; what a smaller n need not wait for is not truncated."""
    steps, max_n = make_steps(seeds.rng(3), 12, 3, rates=RATES), 4
    settings = {"next_action": next_action, "flush": True}
    run = jax.jit(lambda n, gamma: at_once(steps, n=n, gamma=gamma, max_n=max_n, **settings))
    for types in ((np.int64(3), np.float16(0.9)), (np.uint8(3), 0.9)):
        jax.eval_shape(run, *types)
    numbers = range(1, max_n + 1)
    expected = jax.jit(lambda steps: [at_once(steps, n=n, gamma=0.9, **settings) for n in numbers])(steps)
    for n in numbers:
        batch, valid = run(np.int32(n), np.float32(0.9))
        assert np.all(np.diff(np.asarray(batch.A)[valid]) > 0)
        chex.assert_trees_all_close(by_start(batch, valid), by_start(*expected[n - 1]), rtol=1e-5, atol=1e-6)


@pytest.mark.versions
def test_a_discount_that_is_mapped_gives_what_the_number_gives():
    """Of the calls and of a whole rollout, in one program, as where an agent's gamma is a leaf of a pytree."""
    gammas, steps = np.array([0.0, 0.9], np.float32), make_steps(seeds.rng(6), 9, 2, rates=RATES)
    make = functools.partial(jr.NStep, n=3, num_envs=2)

    @jax.jit
    @jax.vmap
    def mapped(gamma):
        return traced(make(gamma=None), steps, gamma=gamma), [*at_once(steps, n=3, gamma=gamma, flush=True)]

    each = jax.jit(lambda: [traced(make(gamma=gamma), steps) for gamma in gammas])
    found, expected = jax.device_get((mapped(gammas), each()))
    for k, (like, like_valid) in enumerate(expected):
        for batch, valid in at(found, k):
            np.testing.assert_array_equal(valid, like_valid)
            chex.assert_trees_all_close(at(batch, valid), at(like, valid), rtol=1e-6, atol=1e-7)


def test_a_rollout_without_steps_or_with_too_few():
    """Without steps emits nothing; where its end is flushed, rows as of an empty tracer, or of few steps."""
    steps = jax.tree.map(lambda x: x[:0], STEPS)
    for next_action in (False, True):
        spec, _ = jax.eval_shape(lambda x, a=next_action: at_once(x, n=3, gamma=0.9, next_action=a), steps)
        assert (spec.batch_size, spec.S["x"].shape) == (0, (0, 2))
    batch, valid = at_once(steps, n=3, gamma=0.9, next_action=True, flush=True)
    assert (batch.batch_size, batch.S["x"].shape, valid.shape) == (6, (6, 2), (6,))
    assert not np.asarray(valid).any()
    two = jax.tree.map(lambda x: x[:2], STEPS)
    rejects("n=3: got a rollout of 2 steps, expected at least 3; .* or flush=True", at_once, two, n=3, gamma=0.9)
    assert np.asarray(at_once(two, n=3, gamma=0.9, flush=True)[1]).sum() == 4  # of two environments


@pytest.mark.versions
def test_wrong_settings():
    rejects("n=0: must be an integer from 1 to 2147483647, the number of steps", jr.NStep, n=0, gamma=0.9)
    rejects(r"n=1\.0: must be an integer", jr.NStep, n=1.0, gamma=0.9)
    rejects(r"gamma=1.1: must be a number in \[0, 1\]; it is a discount", jr.NStep, n=1, gamma=1.1)
    rejects("gamma=nan", jr.NStep, n=1, gamma=float("nan"))
    rejects("num_envs=0: must be an integer from 1 .*, the number of env", jr.NStep, n=1, gamma=0.9, num_envs=0)
    rejects("num_envs=2147483648: must be an integer from 1 to", jr.NStep, n=1, gamma=0.9, num_envs=2**31)
    rejects("max_length=0: must be an integer", jr.MonteCarlo, gamma=0.9, max_length=0)
    rejects("num_envs=0", jr.MonteCarlo, gamma=0.9, max_length=1, num_envs=0)
    call = functools.partial(at_once, STEPS)
    rejects("n=0", call, n=0, gamma=0.9)
    rejects(r"gamma=None: must be a number in \[0, 1\], or float\[num_envs\]", call, n=3, gamma=None)  # else NaN
    rejects("flush=1: must be True or False", call, n=3, gamma=0.9, flush=1)
    rejects("next_action=1: must be True or False", call, n=3, gamma=0.9, next_action=1)
    rejects("record_extra_info=None: must be True or False", call, n=3, gamma=0.9, record_extra_info=None)


def test_wrong_discounts_of_a_call():
    tracer = jr.NStep(n=2, gamma=None, num_envs=2)
    state, step = empty(tracer, STEPS), at(STEPS, 0)
    emitted = jax.eval_shape(lambda: tracer.add(state, **step, gamma=0.9))[1]
    chex.assert_trees_all_equal_shapes_and_dtypes(emitted, tracer.spec(**FIRST))
    for call in (functools.partial(tracer.add, state, **step), functools.partial(tracer.flush, state)):
        rejects(r"gamma=None: must be .* of the tracer or of each call; or give discounts, .* also to init", call)
        rejects(r"gamma: got float(32|64)\[3\], expected one number, .* or float(32|64)\[2\]", call, gamma=np.ones(3))
        rejects(r"gamma=.*: must be numbers in \[0, 1\]", call, gamma=np.array([0.5, 1.5]))
        for gamma in (1.5, -0.1, np.nan, "0.9", True):
            rejects(rf"gamma={gamma!r}: must be a number in \[0, 1\]; it is a discount", call, gamma=gamma)


@pytest.mark.versions
def test_wrong_steps():
    state, step = empty(TRACER, STEPS), at(STEPS, 0)
    for name, x, message in (
        ("a", np.zeros(2, np.float32), r"leaf \.a: got float32\[2\], the tracer stores int32\[2\]"),
        ("r", np.zeros(3, np.float32), r"leaf \.r: leading axes \[3\] differ from \[2\]"),
        ("logp", None, r"wrong structure: missing \.logp;"),
        ("mask", np.ones(3, bool), r"leaf \.mask: leading axes \[3\] differ from \[2\]"),
        ("mask", np.ones(2, np.int32), r"leaf \.mask: got int32\[2\], the tracer stores bool\[2\]"),
    ):
        rejects(message, TRACER.add, state, **{**step, name: x})
    rejects("num_envs=2: got a step of 4 rows; give num_envs=4", TRACER.init, **first(make_steps(seeds.rng(0), 4, 4)))
    for name, x, message in (
        ("r", np.zeros((3, 2), np.float32), r"leaf \.R: leading axes \[3, 2\] differ from \[4, 2\]"),
        ("mask", np.ones((4, 2), np.int32), r"mask: got int32\[4, 2\], expected bool\[4, 2\]"),
    ):
        rejects(message, at_once, {**STEPS, name: x}, n=3, gamma=0.9)
    rejects(r"needs 2 leading axes", jr.n_step_transitions, *[np.zeros(3)] * 6, n=2, gamma=0.9)


OPTIONAL = ("logp", "w", "mask")
WRONG = {  # what is no number and no flag a step: as it is named, what makes it, and the remedy
    "None": (lambda x: None, ""),
    r"complex64\[.*\]": (lambda x: x.astype(np.complex64), ""),
    r"key<fry>\[.*\]": (lambda x: jax.random.wrap_key_data(np.zeros((*x.shape, 2), np.uint32)), ""),
    "a dict": (lambda x: {"agent": x}, ""),
    r"\w+\[.*, 1\]": (lambda x: x[..., None], "; squeeze"),
    r"\w+\[.*, 4\]": (lambda x: np.stack([x] * 4, axis=-1), "; reduce"),
}


@pytest.mark.versions
@pytest.mark.parametrize(("length", "num_envs"), [(5, 3), (1, 3), (5, 1)])
@pytest.mark.parametrize("name", ["r", "terminated", "truncated", *OPTIONAL])
def test_one_number_and_one_flag_a_step(name, length, num_envs):
    """Else the call names it as its argument, also where further axes would be broadcast. Nothing is run."""
    steps = make_steps(seeds.rng(0), length, num_envs)
    kind = "flag" if steps[name].dtype == bool else "(real )?number"
    tracers = jr.NStep(n=3, gamma=0.9, num_envs=num_envs), jr.MonteCarlo(gamma=0.9, max_length=3, num_envs=num_envs)
    state, upper = empty(tracers[0], steps), {"r": "R", "logp": "logP", "w": "W"}.get(name, name)
    for found, (make, remedy) in WRONG.items():
        if (found == "None" and name in OPTIONAL) or (min(length, num_envs) == 1 and not remedy):
            continue
        many, one = ({**x, name: make(x[name])} for x in (steps, at(steps, 0)))
        message = rf"^{name}: got {found}, expected (\[{num_envs}\], )?one {kind} per environment{remedy}"
        for tracer in tracers:
            rejects(message, jax.eval_shape, functools.partial(tracer.add, state), **one)
            for function in (tracer.init, tracer.spec) if name != "mask" else ():
                rejects(message, function, **{name: x for name, x in one.items() if name != "mask"})
        message = rf"^{upper}: got {found}, expected (\[{length}, {num_envs}\], )?one {kind} per step{remedy}"
        for function in (at_once, of_sequences):
            rejects(message, jax.eval_shape, functools.partial(function, n=2, gamma=0.9), many)


@pytest.mark.versions
def test_arguments_that_are_missing_are_named_with_the_call():
    tracer, buffer = TRACER, jr.ReplayBuffer(capacity=4)
    one = [FIRST[name] for name in ("s", "a", "r", "terminated", "truncated")]
    state, refused = empty(tracer, STEPS), functools.partial(rejects, error=TypeError)
    missing = "missing a required argument:"
    takes = "it takes (state, )?s, a, r, terminated, truncated, s_next, logp, w, mask=?, discount"
    refused(rf"NStep\.add\(\): {missing} 's_next'; {takes}", tracer.add, state, *one)
    more = {"done": one[3], "s_next": one[0]}
    for function in (tracer.init, tracer.spec):
        called, done = rf"NStep\.{function.__name__}\(\)", r"without time limits give done, jnp\.zeros_like\(done\)\.$"
        refused(rf"{called}: {missing} 's_next'; {takes}; {done}", function, *one)
        refused(rf"{called}: .*unexpected.*'done'; {takes}; {done}", function, *one, **more)
    of_a_tracer = r"gamma; use .*terminated and truncated \(of a tracer\), or In == 0 \(of a TransitionBatch\)\.$"
    refused(rf"NStep\.add\(\): has no argument 'done'; {takes}, {of_a_tracer}", tracer.add, state, *one[:3], **more)
    refused(rf"NStep\.add\(\): {missing} 'terminated'", tracer.add, state, *one[:3])
    refused(rf"NStep\.add\(\): {missing} 'truncated'", tracer.add, state, *one[:4], s_next=one[0])
    refused(r"flush\(\) missing 1 required .*: 'state'", tracer.flush)
    stored = buffer.init(np.zeros(1))
    refused(r"Buffer\.add\(\): missing a required argument: 'items'", buffer.add, stored)
    refused(r"Buffer\.update\(\): .*", buffer.update, stored, one=1)
    assert tracer.init(*one, s_next=one[0]).count == 0  # with its name, it is not missing


def test_init_and_spec_take_what_add_takes_of_a_step():
    """By one declaration of the fields of a step, which `add` spells out for its documentation."""

    def taken(function, *but):
        return [
            (x.name, x.kind, x.default) for x in inspect.signature(function).parameters.values() if x.name not in but
        ]

    step = taken(_windows.TracerSteps)
    assert [name for name, *_ in step] == [*"sar", "terminated", "truncated", "s_next", "logp", "w", "mask", "discount"]
    assert taken(TRACER.init) == taken(TRACER.spec) == taken(TRACER.add, "state", "gamma") == step


@pytest.mark.versions
def test_the_state_of_another_tracer_is_refused():
    """It would give windows of another length, or of nothing."""
    for state, found in (
        (jr.NStep(n=2, gamma=0.9, num_envs=2).init(**FIRST), r"one of \[2, 2\] steps"),
        (jr.NStep(n=3, gamma=0.9, num_envs=2, next_action=True).init(**FIRST), r"one of \[4, 2\] steps"),
        (stack(*[TRACER.init(**FIRST)] * 2), r"one of \[2, 3, 2\] steps"),
        (jr.ReplayBuffer(capacity=4).init(FIRST), "ReplayState"),
        (None, "NoneType"),
    ):
        for call in (lambda state=state: TRACER.add(state, **FIRST), lambda state=state: TRACER.flush(state)):
            rejects(rf"^state: got {found}, expected one of \[3, 2\] steps, from this", call)
