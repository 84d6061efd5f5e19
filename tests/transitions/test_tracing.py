import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import seeds
from helpers import at, cases, rarely, rejects, stack
from jax import lax

import jaxreplay as jr


def rollout(rng, length, num_envs, end_rate=0.15, gap_rate=0.0):
    """Random steps of auto-resetting environments; observations are unique, so that a mix-up shows."""
    shape = (length, num_envs)
    terminated, truncated = rng.random(shape) < end_rate, rng.random(shape) < end_rate
    ids = np.arange(length * num_envs, dtype=np.float32).reshape(shape)
    return {
        "s": {"x": np.stack([ids, -ids], -1)},
        "a": ids.astype(np.int32),
        "r": rng.standard_normal(shape).astype(np.float32),
        "terminated": terminated,
        "truncated": truncated,
        "s_next": {"x": np.stack([ids + 0.5, -ids], -1)},  # also at an episode's end: no reset observation
        "logp": -rng.random(shape).astype(np.float32),
        "w": rng.random(shape).astype(np.float32) + 0.5,
        "mask": rng.random(shape) >= gap_rate,
    }


def scan_add(tracer, state, steps):
    def step(state, x):
        state, batch, valid = tracer.add(state, **x)
        return state, (batch, valid)

    return lax.scan(step, state, steps)


@functools.partial(jax.jit, static_argnums=0)  # one program, not one for each array
def _init(tracer, rows):
    return tracer.init(**rows)


def init(tracer, steps):
    return _init(tracer, first(steps))


def first(steps):
    """What `init` wants to know of a rollout."""
    return {name: jax.tree.map(lambda x: x[0], leaf) for name, leaf in steps.items() if name != "mask"}


def empty(tracer, steps):
    """A state of NumPy arrays, where only an error is looked at: nothing is compiled."""
    return jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), jax.eval_shape(lambda: tracer.init(**first(steps))))


def flatten(tree):
    return jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[2:]), tree)


def by_start(batch, valid):
    """The transitions alone, in order of their first steps."""
    rows = np.flatnonzero(valid)
    rows = rows[np.argsort(np.asarray(batch.A)[rows])]
    return jax.tree.map(lambda leaf: np.asarray(leaf)[rows], batch)


@functools.partial(jax.jit, static_argnums=0)
def one_by_one(tracer, steps):
    """By `add` in a scan, and `flush`."""
    state, emitted = scan_add(tracer, tracer.init(**first(steps)), steps)
    _, *rest = tracer.flush(state)
    return jax.tree.map(lambda *leaves: jnp.concatenate(leaves), flatten(emitted), tuple(rest))


def at_once(steps, **arguments):
    names = ("s", "a", "r", "terminated", "truncated", "s_next")
    leaves = [steps[name] for name in names]
    return jr.n_step_transitions(*leaves, logP=steps["logp"], W=steps["w"], mask=steps["mask"], **arguments)


def test_spec_is_what_add_emits():
    steps = rollout(seeds.rng(0), 4, 2)
    for arguments in ({"next_action": True}, {"record_extra_info": True}, {}):
        tracer = jr.NStep(n=3, gamma=0.9, num_envs=2, **arguments)
        _, batch, _ = jax.eval_shape(tracer.add, empty(tracer, steps), **at(steps, 0))
        for spec in (tracer.spec(**first(steps)), jax.eval_shape(tracer.spec, **first(steps))):
            assert jax.tree.structure(spec) == jax.tree.structure(batch)
            for a, b in zip(jax.tree.leaves(spec), jax.tree.leaves(batch), strict=True):
                assert (a.shape, a.dtype) == (b.shape, b.dtype)
    monte_carlo = jr.MonteCarlo(gamma=0.9, max_length=3, num_envs=2)
    assert monte_carlo.spec(**first(steps)) == jr.NStep(n=3, gamma=0.9, num_envs=2).spec(**first(steps))


@pytest.mark.parametrize(
    ("flavour", "every"),
    [
        ("nstep", slice(0, None, 4)),
        ("monte_carlo", slice(1, None, 5)),
        rarely(("nstep", slice(None))),
        rarely(("monte_carlo", slice(None))),
    ],
)
def test_coax_traces(flavour, every):
    for case in cases("coax_tracing")[every]:
        gamma, n = case["gamma"], case["n"]
        columns = {k: np.array([step[k] for step in case["steps"]])[:, None] for k in case["steps"][0]}
        done = columns.pop("done")
        steps = columns | {"r": columns["r"].astype(np.float32), "s_next": columns["s"] + 1}
        steps |= {"terminated": done, "truncated": np.zeros_like(done)}
        length = len(case["steps"])
        if flavour == "nstep":
            tracer = jr.NStep(n=n, gamma=gamma, next_action=True)
        else:
            tracer = jr.MonteCarlo(gamma=gamma, max_length=length)
        batch, valid = jax.device_get(one_by_one(tracer, steps))
        batch = jax.tree.map(lambda leaf, valid=valid: np.asarray(leaf)[valid], batch)
        traced = case[flavour]
        assert batch.batch_size == len(traced)
        if flavour == "monte_carlo":
            traced = sorted(traced, key=lambda row: row["S"])  # there, the last step of an episode comes first
        for i, row in enumerate(traced):
            exact, close = ("S", "A"), ("Rn", "In", "logP", "W")
            if row["In"] > 0:
                exact, close = (*exact, "S_next", "A_next"), (*close, "logP_next")
            for name in exact:
                assert name not in row or getattr(batch, name)[i] == row[name]
            for name in close:
                if name in row:
                    np.testing.assert_allclose(getattr(batch, name)[i], row[name], rtol=1e-5, atol=1e-6)


def test_monte_carlo_is_n_step_with_n_max_length():
    steps = rollout(seeds.rng(1), 30, 2)
    monte_carlo = jr.MonteCarlo(gamma=0.8, max_length=6, num_envs=2)
    a, b = (one_by_one(t, steps) for t in (monte_carlo, jr.NStep(n=6, gamma=0.8, num_envs=2)))
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_array_equal(x, y)


def test_eager_equals_scan_and_vmap_equals_loop():
    tracer = jr.NStep(n=3, gamma=0.9, num_envs=2, next_action=True, record_extra_info=True)
    rollouts = [rollout(seeds.rng(seed), 12, 2) for seed in range(4)]

    def run(steps):
        return scan_add(tracer, init(tracer, steps), steps)

    vmapped = jax.device_get(jax.jit(jax.vmap(run))(stack(*rollouts)))
    alone = jax.jit(run)
    for seed, steps in enumerate(rollouts):
        state, outputs = tracer.init(**first(steps)), []
        for t in range(12):
            state, batch, valid = tracer.add(state, **at(steps, t))
            outputs.append((batch, valid))
        eager = state, stack(*outputs)
        scanned = alone(steps)
        for a, b, c in zip(*map(jax.tree.leaves, (eager, scanned, vmapped)), strict=True):
            np.testing.assert_array_equal(a, b)
            np.testing.assert_array_equal(a, c[seed])


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


@pytest.mark.versions
@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: jr.NStep(n=0, gamma=0.9), "n=0: must be an integer from 1 to 2147483647, the number of steps"),
        (lambda: jr.NStep(n=1.0, gamma=0.9), r"n=1\.0: must be an integer"),
        (lambda: jr.NStep(n=1, gamma=1.1), r"gamma=1.1: must be a number in \[0, 1\]; it is a discount"),
        (lambda: jr.NStep(n=1, gamma=float("nan")), "gamma=nan"),
        (lambda: jr.NStep(n=1, gamma=0.9, num_envs=0), "num_envs=0: must be an integer from 1 .*, the number of env"),
        (lambda: jr.NStep(n=1, gamma=0.9, num_envs=2**31), "num_envs=2147483648: must be an integer from 1 to"),
        (lambda: jr.MonteCarlo(gamma=0.9, max_length=0), "max_length=0: must be an integer"),
        (lambda: jr.MonteCarlo(gamma=0.9, max_length=1, num_envs=0), "num_envs=0"),
        (lambda: jr.n_step_transitions(*[np.zeros((2, 1))] * 6, n=0, gamma=0.9), "n=0"),
    ],
)
def test_construction_errors(make, message):
    rejects(message, make)


@pytest.mark.versions
@pytest.mark.parametrize("name", ["r", "terminated", "truncated", "logp", "w", "mask"])
@pytest.mark.parametrize(("length", "num_envs"), [(5, 3), (1, 3), (5, 1)])
def test_one_number_and_one_flag_a_step(name, length, num_envs):
    """Also where further axes would be broadcast. Nothing is run."""
    steps = rollout(seeds.rng(0), length, num_envs)
    good = at(steps, 0)
    tracer = jr.NStep(n=3, gamma=0.9, num_envs=num_envs)
    monte_carlo = jr.MonteCarlo(gamma=0.9, max_length=3, num_envs=num_envs)
    state = empty(tracer, steps)
    number = "flag" if good[name].dtype == bool else "number"
    rest = {"r": "R", "logp": "logP", "w": "W"}.get(name, name)
    for axes, remedy in ((1, "squeeze"), (4, "reduce")):

        def wrong(x, axes=axes):
            return {**x, name: np.repeat(x[name][..., None], axes, axis=-1)}

        message = (
            rf"^{name}: got \w+\[{num_envs}, {axes}\], expected \[{num_envs}\], one {number} per environment; {remedy} "
        )
        for function in (tracer.add, monte_carlo.add):
            rejects(message, jax.eval_shape, lambda s, x, function=function: function(s, **x), state, wrong(good))
        for function in (tracer.init, tracer.spec, monte_carlo.init) if name != "mask" else ():
            rejects(message, function, **first(wrong(steps)))
        shape = rf"\[{length}, {num_envs}"
        with pytest.raises(
            ValueError, match=rf"^{rest}: got \w+{shape}, {axes}\], expected {shape}\], one {number} per step; "
        ):
            jax.eval_shape(lambda x: at_once(x, n=3, gamma=0.9), wrong(steps))
        with pytest.raises(ValueError, match=rf"^{rest}: got .*, one {number} per step; {remedy} the last axis"):
            jax.eval_shape(of_sequences, wrong(steps))


def of_sequences(steps):
    x = {**steps, "logP": steps["logp"], "W": steps["w"]}
    names = ("r", "terminated", "truncated", "logP", "W", "mask")
    R, terminated, truncated, *rest = (x[name] for name in names)
    rest = dict(zip(names[3:], rest, strict=True))
    return jr.sequence_transitions(x["s"], x["a"], R, terminated, truncated, **rest, n=2, gamma=0.9)


@pytest.mark.parametrize("next_action", [True, rarely(False)])
def test_leaves_without_elements(next_action):
    """What has an axis of size 0, such as an observation of which nothing is kept. Nothing is run."""
    settings = {"n": 3, "gamma": 0.9, "next_action": next_action, "record_extra_info": True}
    tracer = jr.NStep(**settings, num_envs=2)
    steps = rollout(seeds.rng(0), 5, 2)
    steps |= {"s": np.zeros((5, 2, 0)), "a": np.zeros((5, 2, 4, 0), np.int32), "s_next": np.zeros((5, 2, 0))}

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
        check(jax.eval_shape(lambda x, flush=flush: at_once(x, **settings, flush=flush), steps), 10 + 6 * flush)
    sequences = jax.tree.map(lambda x: x.swapaxes(0, 1), [steps[k] for k in ("s", "a", "r", "terminated", "truncated")])
    check(jax.eval_shape(lambda x: jr.sequence_transitions(*x, **settings), sequences), 2 * (5 - 3))


@pytest.mark.parametrize("next_action", [True, rarely(False)])
def test_a_traced_n_gives_the_transitions_of_the_number(next_action):
    """Each start's transition is the one that the number gives; what a smaller n need not wait for is not truncated."""
    steps, max_n = rollout(seeds.rng(3), 12, 3, gap_rate=0.1), 4
    settings = {"next_action": next_action, "flush": True}
    run = jax.jit(lambda n, gamma: at_once(steps, n=n, gamma=gamma, max_n=max_n, **settings))
    numbers = range(1, max_n + 1)
    expected = jax.jit(lambda steps: [at_once(steps, n=n, gamma=0.9, **settings) for n in numbers])(steps)
    for n in numbers:
        batch, valid = run(np.int32(n), np.float32(0.9))
        assert np.all(np.diff(np.asarray(batch.A)[valid]) > 0)
        chex.assert_trees_all_close(by_start(batch, valid), by_start(*expected[n - 1]), rtol=1e-5, atol=1e-6)


@pytest.mark.versions
@pytest.mark.parametrize("make", [lambda **x: jr.NStep(n=3, **x), rarely(lambda **x: jr.MonteCarlo(max_length=3, **x))])
def test_a_discount_that_is_mapped_gives_what_the_number_gives(make):
    """Of the calls and of a whole rollout, in one program, as where an agent's gamma is a leaf of a pytree."""
    gammas, steps = np.array([0.0, 0.9], np.float32), rollout(seeds.rng(6), 9, 2, gap_rate=0.1)
    tracer = make(gamma=None, num_envs=2)

    def run(tracer, gamma):
        given = {} if gamma is None else {"gamma": gamma}

        def step(state, x):
            state, *emitted = tracer.add(state, **x, **given)
            return state, emitted

        state, emitted = lax.scan(step, tracer.init(**first(steps)), steps)
        rows = flatten(emitted), [*tracer.flush(state, **given)[1:]]
        return jax.tree.map(lambda *x: jnp.concatenate(x), *rows)

    one_by_one = jax.jit(jax.vmap(lambda gamma: run(tracer, gamma)))(gammas)
    whole = jax.jit(jax.vmap(lambda gamma: [*at_once(steps, n=3, gamma=gamma, flush=True)]))(gammas)
    expected = jax.device_get(jax.jit(lambda: [run(make(gamma=gamma, num_envs=2), None) for gamma in gammas])())
    for k in range(len(gammas)):
        for found in (at(one_by_one, k), at(whole, k)):
            (batch, valid), (like, like_valid) = found, expected[k]
            np.testing.assert_array_equal(valid, like_valid)
            for x, y in zip(jax.tree.leaves(batch), jax.tree.leaves(like), strict=True):
                np.testing.assert_allclose(x[valid], y[valid], rtol=1e-6, atol=1e-7)


def test_a_tracer_without_a_discount_asks_for_one():
    steps = rollout(seeds.rng(0), 1, 2)
    tracer = jr.NStep(n=2, gamma=None, num_envs=2)
    state, spec = empty(tracer, steps), tracer.spec(**first(steps))
    emitted = jax.eval_shape(lambda: tracer.add(state, **at(steps, 0), gamma=0.9))[1]
    assert jax.tree.map(lambda x: (x.shape, x.dtype), emitted) == jax.tree.map(lambda x: (x.shape, x.dtype), spec)
    for call in (lambda: tracer.add(state, **at(steps, 0)), lambda: tracer.flush(state)):
        rejects(r"gamma=None: the tracer has none; pass one to each call", call)
    message = r"gamma: got float(32|64)\[3\], expected one number, .* or float(32|64)\[2\]"
    rejects(message, tracer.flush, state, gamma=np.ones(3))
    rejects(r"gamma=.*: must be numbers in \[0, 1\]", tracer.flush, state, gamma=np.array([0.5, 1.5]))


def test_a_rollout_without_steps():
    """Emits nothing; where its end is flushed, rows as of an empty tracer."""
    steps = jax.tree.map(lambda x: x[:0], rollout(seeds.rng(0), 1, 2))
    for next_action in (False, True):
        spec, _ = jax.eval_shape(lambda x, a=next_action: at_once(x, n=3, gamma=0.9, next_action=a), steps)
        assert (spec.batch_size, spec.S["x"].shape) == (0, (0, 2))
    batch, valid = at_once(steps, n=3, gamma=0.9, next_action=True, flush=True)
    assert (batch.batch_size, batch.S["x"].shape, valid.shape) == (6, (6, 2), (6,))
    assert not np.asarray(valid).any()


@pytest.mark.versions
def test_wrong_steps():
    tracer = jr.NStep(n=3, gamma=0.9, num_envs=2)
    steps = rollout(seeds.rng(0), 4, 2)
    state, step = empty(tracer, steps), at(steps, 0)
    for name, x, message in (
        ("a", np.zeros(2, np.float32), r"leaf \.a: got float32\[2\], the tracer stores int32\[2\]"),
        ("r", np.zeros(3, np.float32), r"leaf \.r: leading axes \[3\] differ from \[2\]"),
        ("logp", None, r"wrong structure: missing \.logp;"),
        ("mask", np.ones(3, bool), r"leaf \.mask: leading axes \[3\] differ from \[2\]"),
        ("mask", np.ones(2, np.int32), r"leaf \.mask: got int32\[2\], the tracer stores bool\[2\]"),
    ):
        rejects(message, tracer.add, state, **{**step, name: x})
    four = jax.tree.map(lambda x: x[:, [0] * 4], rollout(seeds.rng(0), 4, 4))
    rejects("num_envs=2: got a step of 4 rows; give num_envs=4", tracer.init, **first(four))
    for name, x, message in (
        ("r", np.zeros((3, 2), np.float32), r"leaf \.R: leading axes \[3, 2\] differ from \[4, 2\]"),
        ("mask", np.ones((4, 2), np.int32), r"mask: got int32\[4, 2\], expected bool\[4, 2\]"),
    ):
        rejects(message, at_once, {**steps, name: x}, n=3, gamma=0.9)
    rejects(r"needs 2 leading axes", jr.n_step_transitions, *[np.zeros(3)] * 6, n=2, gamma=0.9)


NOT_REAL = {
    "None": lambda x: None,
    r"complex64\[.*\]": lambda x: x.astype(np.complex64),
    r"key<fry>\[.*\]": lambda x: jax.random.wrap_key_data(np.zeros((*x.shape, 2), np.uint32)),
    "a dict": lambda x: {"agent": x},
}


OPTIONAL = ("logp", "w", "mask")


@pytest.mark.versions
@pytest.mark.parametrize(
    ("name", "found"),
    [
        (name, found)
        for name in ("r", "terminated", "truncated", *OPTIONAL)
        for found in NOT_REAL
        if found != "None" or name not in OPTIONAL
    ],
)
def test_what_is_no_number_and_no_flag_is_named(name, found):
    """By the name that the call has for it. Nothing is run."""
    steps = rollout(np.random.default_rng(0), 5, 2)
    many, one = ({**x, name: NOT_REAL[found](x[name])} for x in (steps, at(steps, 0)))
    tracer, kind = jr.NStep(n=3, gamma=0.9, num_envs=2), "flag" if steps[name].dtype == bool else "real number"
    state = empty(tracer, steps)

    def refused(function, message):
        rejects(f"^{message}", jax.eval_shape, function)

    refused(lambda: tracer.add(state, **one), f"{name}: got {found}, expected one {kind} per environment")
    if name != "mask":
        one.pop("mask")
        for function in (tracer.init, tracer.spec):
            refused(lambda function=function: function(**one), f"{name}: got {found}, expected one {kind} per environ")
    upper = {"r": "R", "logp": "logP", "w": "W"}.get(name, name)
    for function in (lambda: at_once(many, n=3, gamma=0.9), lambda: of_sequences(many)):
        refused(function, f"{upper}: got {found}, expected one {kind} per step")


@pytest.mark.versions
def test_arguments_that_are_missing_are_named_with_the_call():
    steps = rollout(np.random.default_rng(0), 5, 2)
    tracer = jr.NStep(n=3, gamma=0.9, num_envs=2)
    one = [at(steps, 0)[name] for name in ("s", "a", "r", "terminated", "truncated")]
    both = "terminated and truncated, not done"
    stored = jr.ReplayBuffer(capacity=4).init(np.zeros(1))
    for call, message in (
        (lambda: tracer.add(empty(tracer, steps), *one), rf"NStep\.add\(\): s_next is missing.*{both}"),
        (lambda: tracer.init(*one), rf"NStep\.init\(\): s_next is missing.*{both}"),
        (lambda: tracer.spec(*one), rf"NStep\.spec\(\): s_next is missing.*{both}"),
        (lambda: tracer.add(None, *one[:3], done=one[3], s_next=one[0]), rf"NStep\.add\(\): got done.*{both}"),
        (lambda: tracer.add(None, *one[:3]), r"add\(\) missing 3 required .*: 'terminated', 'truncated', and 's_next'"),
        (lambda: tracer.add(None, *one[:4], s_next=one[0]), r"add\(\) missing 1 required .*: 'truncated'"),
        (lambda: tracer.flush(), r"flush\(\) missing 1 required .*: 'state'"),
        (
            lambda: jr.ReplayBuffer(capacity=4).add(stored),
            r"Buffer\.add\(\): missing a required argument: 'items'",
        ),
        (lambda: jr.ReplayBuffer(capacity=4).update(stored, one=1), r"Buffer\.update\(\): .*"),
    ):
        rejects(message, call, error=TypeError)
    assert tracer.init(*one, s_next=one[0]).count == 0  # with its name, it is not missing


@pytest.mark.versions
def test_the_state_of_another_tracer_is_refused():
    """It would give windows of another length, or of nothing."""
    steps = rollout(np.random.default_rng(0), 5, 2)
    one, tracer = first(steps), jr.NStep(n=3, gamma=0.9, num_envs=2)
    stack_of_two = stack(*[tracer.init(**one)] * 2)
    for state, found in (
        (jr.NStep(n=2, gamma=0.9, num_envs=2).init(**one), r"one of \[2, 2\] steps"),
        (jr.NStep(n=3, gamma=0.9, num_envs=2, next_action=True).init(**one), r"one of \[4, 2\] steps"),
        (stack_of_two, r"one of \[2, 3, 2\] steps"),
        (jr.ReplayBuffer(capacity=4).init(one), "ReplayState"),
        (None, "NoneType"),
    ):
        for call in (lambda state=state: tracer.add(state, **one), lambda state=state: tracer.flush(state)):
            rejects(rf"^state: got {found}, expected one of \[3, 2\] steps, from this", call)


@pytest.mark.versions
@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"gamma": None}, r"gamma=None: must be a number in \[0, 1\], or float\[num_envs\]"),
        ({"flush": 1}, "flush=1: must be True or False"),
        ({"next_action": 1}, "next_action=1: must be True or False"),
        ({"record_extra_info": None}, "record_extra_info=None: must be True or False"),
    ],
)
def test_settings_of_a_rollout_are_checked(settings, message):
    """Without a discount all returns would be NaN."""
    rejects(message, at_once, rollout(np.random.default_rng(0), 5, 2), **{"n": 3, "gamma": 0.9, **settings})


@pytest.mark.parametrize("gamma", [1.5, -0.1, np.nan, "0.9", True])
def test_the_discount_of_a_call_is_in_range(gamma):
    steps = rollout(np.random.default_rng(0), 1, 2)
    tracer = jr.NStep(n=2, gamma=0.5, num_envs=2)
    state = empty(tracer, steps)
    for call in (lambda: tracer.add(state, **at(steps, 0), gamma=gamma), lambda: tracer.flush(state, gamma=gamma)):
        rejects(rf"gamma={gamma!r}: must be a number in \[0, 1\]; it is a discount", call)
