"""Arrays that lie over a mesh with explicit axes, as `jax.make_mesh` makes it: the results are those of any other."""

import functools

import jax
import numpy as np
import pytest
from helpers import collectives, compiled, items, mesh, no_ends, numbers, rarely, stack
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

import jaxreplay as jr

KEY, ROWS = jax.random.key(0), PartitionSpec("data")
KEYS = jax.random.split(KEY, 4)
EXPLICIT = mesh(4, kind=AxisType.Explicit)
PER = jr.Prioritized(alpha=0.7)
REPLAY = jr.ReplayBuffer(capacity=16, sampler=PER, donate=False)
BUFFERS = {
    "replay": REPLAY,
    "reservoir": jr.ReservoirBuffer(capacity=16, donate=False),
    "sequence": jr.SequenceBuffer(
        length=8, num_envs=8, sequence_length=2, sampler=PER, windows="episodes", hindsight=True, donate=False
    ),
    "distinct": jr.ReplayBuffer(capacity=16, sampler=jr.Uniform(replacement=False), donate=False),
}


def over(tree, spec=ROWS):
    """The same arrays, over the devices of the explicit mesh, with no program that cuts them."""
    return jax.device_put(jax.device_get(tree), NamedSharding(EXPLICIT, spec))


def specs(tree):
    """How each leaf lies over the explicit mesh, without what follows of its axes that lie nowhere."""

    def spec(x):
        assert set(x.sharding.mesh.axis_types) == {AxisType.Explicit}
        named = [i for i, name in enumerate(x.sharding.spec) if name is not None]
        return tuple(x.sharding.spec)[: named[-1] + 1] if named else ()

    return {spec(x) for x in jax.tree.leaves(tree)}


def assert_same(found, expected):
    found, expected = jax.device_get((found, expected))
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-6), found, expected)


jit_or_eager = pytest.mark.parametrize("transform", [jax.jit, rarely(lambda function: function)], ids=["jit", "eager"])


def batch_of(name):
    rows = items(numbers(0, 8))
    return stack(*[rows] * 3) if name == "sequence" else rows


def add(name, buffer, state, rows, flags=None):
    named = no_ends(buffer, rows) if flags is None else {"ends" if name == "sequence" else "mask": flags}
    return buffer.add(state, rows, *((KEY,) if name == "reservoir" else ()), **named)


def use(name, state, rows, flags, handles, td_errors, values):
    """What a buffer gives for rows that lie somewhere."""
    buffer = BUFFERS[name]
    state = add(name, buffer, state, rows, flags)
    drawn = buffer.sample(state, KEY, 8)
    updated = buffer.update(state, handles, td_errors)
    written = buffer.set(state, handles, values)
    more = buffer.later(state, KEY, handles) if name == "sequence" else buffer.epoch(state, KEY, 8, step=0)
    return state, updated, written, drawn, buffer.get(state, handles), more


@pytest.mark.parametrize("name", ["replay", *map(rarely, ["reservoir", "sequence", "distinct"])])
@jit_or_eager
def test_a_buffer_takes_rows_over_a_mesh(name, transform):
    buffer, rows = BUFFERS[name], batch_of(name)
    by_stream = name == "sequence"
    flags = np.arange(24).reshape(3, 8) % 5 == 0 if by_stream else np.arange(8) % 3 > 0
    lies = PartitionSpec(None, "data") if by_stream else ROWS

    @jax.jit
    def first(rows):
        state = add(name, buffer, buffer.init(rows), rows)
        handles = buffer.sample(state, KEY, 8).indices
        return state, handles, buffer.get(state, handles[::-1])

    state, handles, values = jax.device_get(first(rows))
    others = handles, np.arange(8, dtype=np.float32), values
    function = transform(functools.partial(use, name))
    expected = function(state, rows, flags, *others)
    found = function(state, over(rows, lies), over(flags, lies), *over(others))
    assert_same(found, expected)
    *states, drawn, got, more = found
    assert specs(states) == specs(drawn) == {()}  # whole on each device
    assert specs(got) == {("data",)}  # as the handles lie
    assert specs(more) == ({("data",)} if by_stream else {()})


def step(state, key, rows):
    state = REPLAY.add(state, rows)
    drawn = REPLAY.sample(state, key, 4)
    return REPLAY.update(state, drawn.indices, drawn.weights), drawn


def test_seeds_over_a_mesh():
    """Under `jax.vmap` over explicit axes each device has its seeds, and their states."""
    rows, init = batch_of("replay"), jax.jit(lambda rows: REPLAY.add(REPLAY.init(rows), rows))
    given = stack(*[init(rows)] * 4), KEYS, stack(*[rows] * 4)
    mapped = jax.jit(jax.vmap(step))
    found = mapped(*over(given))
    assert_same(found, mapped(*given))
    assert specs(found) == {("data",)}


def mixture(of_mesh):
    sharded = jr.Sharded(buffer=jr.ReplayBuffer(capacity=16, sampler=jr.Prioritized(), donate=False), mesh=of_mesh)
    return jr.Mixture(buffers=(sharded, jr.ReplayBuffer(capacity=16, donate=False)), weights="joint")


@jit_or_eager
def test_a_mixture_of_shards_and_a_plain_source(transform):
    def use(of_mesh, rows, handles, td_errors):
        buffer = mixture(of_mesh)
        state = buffer.add(buffer.add(buffer.init(rows), 0, rows, td_errors=td_errors), 1, rows)
        drawn = buffer.sample(state, KEY, 8)
        updated = buffer.update(state, handles, td_errors)
        written = buffer.set(state, drawn.indices, drawn.items)
        odd = jr.Mixture(buffers=buffer.buffers, shares=(4, 1)).sample(state, KEY, 5)  # rows that no mesh divides
        whole = odd, buffer.get(state, odd.indices), jr.diagnostics(buffer, state, sample=drawn)
        return updated, written, drawn, buffer.get(state, drawn.indices), buffer.get(state, handles), whole

    rows, td_errors = batch_of("replay"), np.arange(8, dtype=np.float32)
    empty = mixture(mesh(4)).init(rows)
    period = empty[0].ring.period // 2  # of two sources
    handles = np.array([0, 2 * period, 4 * period, 6 * period + 2, 1, 7, 11, 15], np.int32)
    expected = transform(functools.partial(use, mesh(4)))(rows, handles, td_errors)
    found = transform(functools.partial(use, EXPLICIT))(over(rows), *over((handles, td_errors)))
    assert_same(found, expected)
    (updated, plain), written, drawn, *got, (odd, of_odd, looked) = found
    assert specs((updated, written[0], drawn, got)) == {("data",)}
    assert specs((plain, written[1], odd, looked)) == {()}
    assert_same(of_odd, odd.items)
    assert np.all(np.asarray(got[1]["id"]) == [0, 2, 4, 7, 0, 3, 5, 7])


@pytest.mark.parametrize("meshes", [(EXPLICIT, mesh(4)), rarely(((mesh(4), EXPLICIT),))], ids=["explicit", "automatic"])
def test_a_mixture_over_explicit_and_automatic_axes(meshes):
    sources = [jr.Sharded(buffer=jr.ReplayBuffer(capacity=16, donate=False), mesh=its) for its in meshes]
    buffer = jr.Mixture(buffers=sources)

    @jax.jit
    def states(rows):
        state = buffer.init(rows)
        state = buffer.add(buffer.add(state, 0, rows), 1, rows)
        half = state[0], sources[1].add(state[1], rows)
        are_full = buffer.is_full(half), buffer.is_full((sources[0].add(state[0], rows), half[1]))
        return state, (*are_full, *(buffer.can_sample(state, n) for n in (16, 17)), buffer.is_empty(state))

    @jax.jit
    def look_up(state, backwards):
        return buffer.get(state, backwards), buffer.age(buffer.update(state, backwards[:5], np.ones(5)), backwards)

    state, flags = states(batch_of("replay"))
    drawn = jax.device_get(buffer.sample(state, KEY, 8))
    assert int(buffer.size(state)) == 16
    assert [*map(bool, flags)] == [False, True, True, False, False]
    expected = jax.tree.map(lambda x: x[::-1], (drawn.items, drawn.age))
    assert_same(look_up(state, drawn.indices[::-1]), expected)

    state = tuple(jax.device_put(part, its.state_sharding) for part, its in zip(state, sources, strict=True))
    after, _ = jax.lax.scan(lambda x, _: (buffer.update(x, drawn.indices, np.ones(8)), None), state, length=2)
    for new, old in zip(jax.tree.leaves(after), jax.tree.leaves(state), strict=True):
        assert new.sharding.is_equivalent_to(old.sharding, new.ndim)  # each source stays over its own mesh


@pytest.mark.parametrize("name", ["replay", *map(rarely, ["reservoir", "sequence", "distinct"])])
def test_diagnostics_of_shards(name):
    """Without a key, of all items with one, and of a sample: eager and under jit, those of automatic axes."""

    def looks(of_mesh, rows):
        buffer = jr.Sharded(buffer=BUFFERS[name], mesh=of_mesh)
        state = add(name, buffer, buffer.init(rows), rows)
        drawn = buffer.sample(state, KEY, 16)
        state = buffer.update(state, drawn.indices, np.arange(16, dtype=np.float32))
        thorough = jr.diagnostics(buffer, state, KEY, thorough=True)
        return jr.diagnostics(buffer, state), thorough, jr.diagnostics(buffer, state, sample=drawn)

    rows, explicit = batch_of(name), functools.partial(looks, EXPLICIT)
    expected = jax.jit(functools.partial(looks, mesh(4)))(rows)
    for found in (explicit(rows), jax.jit(explicit)(rows)):
        assert_same(found, expected)
        assert specs(found) == {()}
    assert int(expected[1]["size"]) > 0


OBS, NUMBERS = np.ones((8, 5), np.float32), np.arange(8, dtype=np.float32)
STEP = [OBS, NUMBERS, NUMBERS, NUMBERS == 5, NUMBERS == 3, 2 * OBS]
TRACERS = {
    "nstep": jr.NStep(n=3, gamma=0.9, num_envs=8),
    "sarsa": jr.NStep(n=2, gamma=0.9, num_envs=8, next_action=True, record_extra_info=True),
    "monte carlo": jr.MonteCarlo(gamma=0.9, max_length=2, num_envs=8),
}


@pytest.mark.parametrize("name", ["nstep", *map(rarely, ["sarsa", "monte carlo"])])
def test_tracers_of_environments_over_a_mesh(name):
    tracer = TRACERS[name]
    state = tracer.init(*STEP)
    laid_out = jax.tree.map(lambda x: over(x, PartitionSpec(None, "data") if x.ndim > 1 else PartitionSpec()), state)
    given, there = [state], [laid_out]
    for _ in range(4):
        state, *transitions = tracer.add(state, *STEP)
        laid_out, *others = tracer.add(laid_out, *over(STEP))
        given.append((state, transitions))
        there.append((laid_out, others))
        assert specs(others) == {("data",)}
        assert specs(laid_out.steps) == {(None, "data")}
    assert_same(there, given)
    assert np.asarray(there[-1][1][1]).sum() >= 7  # four steps were enough for a transition of each environment
    assert_same(tracer.flush(laid_out), tracer.flush(state))
    state, *others = tracer.add(tracer.init(*over(STEP)), *over(STEP))  # a state that lies nowhere
    assert_same((state, others), given[1])
    assert specs(state) == {()}


def test_observations_that_lie_along_two_axes():
    """What is traced lies along the first of them, as environments do, and along no other."""
    axes = {"axis_names": ("data", "model"), "axis_types": (AxisType.Explicit,) * 2}
    both = NamedSharding(Mesh(np.array(jax.devices("cpu")[:4]).reshape(2, 2), **axes), PartitionSpec("data", "model"))
    step = [np.ones((8, 6), np.float32), *STEP[1:5], 2 * np.ones((8, 6), np.float32)]
    tracer = jr.NStep(n=1, gamma=0.9, num_envs=8)
    expected = tracer.add(tracer.init(*step), *step)
    laid_out = [jax.device_put(step[0], both), *step[1:5], jax.device_put(step[5], both)]
    found = tracer.add(tracer.init(*step), *laid_out)
    assert_same(found, expected)
    assert specs(found[1:]) == {("data",)}


@pytest.mark.hlo
@pytest.mark.usefixtures("compiled_afresh")
@pytest.mark.parametrize(
    ("of_mesh", "gamma"),
    [(EXPLICIT, 0.9), *(pytest.param(mesh(4), gamma, marks=pytest.mark.versions) for gamma in (0.9, None))],
)
def test_tracing_environments_of_several_devices_exchanges_nothing(of_mesh, gamma):
    tracer, discount = jr.NStep(n=3, gamma=gamma, num_envs=8), {} if gamma else {"discount": NUMBERS}

    def laid_out(x, *spec):
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(of_mesh, PartitionSpec(*spec)))

    def laid_out_state(x):  # [n, num_envs, ...], or a counter
        return laid_out(x, None, "data") if x.ndim > 1 else laid_out(x)

    def add(state, step, discount):
        return tracer.add(state, *step, **discount)

    state = jax.tree.map(laid_out_state, tracer.init(*STEP, **discount))
    step, discount = jax.tree.map(lambda x: laid_out(x, "data"), (STEP, discount))
    assert collectives(compiled(jax.jit(add), state, step, discount).as_text()) == []


def test_transitions_of_sequences_over_a_mesh():
    rows = [np.arange(48, dtype=np.float32).reshape(8, 6)] * 3 + [np.zeros((8, 6), bool)] * 2
    look = functools.partial(jr.sequence_transitions, n=2, gamma=0.9)
    found = look(*over(rows))
    assert_same(found, look(*rows))
    assert specs(found) == {("data",)}
    by_time = [x.T for x in rows]
    look = functools.partial(jr.n_step_transitions, n=2, gamma=0.9)
    found = look(*over([*by_time, by_time[0]], PartitionSpec(None, "data")))
    assert_same(found, look(*by_time, by_time[0]))
    assert specs(found) == {()}  # each device has some of every time's rows


CURRICULA = [
    jr.DifficultyPools(tasks_per_env=(16,), easy_threshold=0.9, donate=False),
    jr.Tasks(num_tasks=16, exploration=0.1, donate=False),
    rarely(jr.Tasks(num_tasks=16, score=jr.scores.thompson, refresh=3, donate=False)),
]


@pytest.mark.parametrize("tasks", CURRICULA, ids=["parked", "learnability", "thompson"])
def test_curricula_take_groups_over_a_mesh(tasks):
    groups = np.arange(8, dtype=np.int32), (np.arange(32).reshape(8, 4) % 3 > 0).astype(np.float32)

    def use(*groups):
        state, kept = tasks.update(tasks.init(), *groups)
        return state, kept, tasks.sample(state, KEY, 4)

    expected = jax.jit(use)(*groups)
    for function in (use, jax.jit(use)):
        found = function(*over(groups))
        assert_same(found, expected)
        assert specs(found[0]) == {()}


def test_moving_shards_off_a_mesh_and_back():
    rows = batch_of("replay")
    sharded = jr.Sharded(buffer=REPLAY, mesh=EXPLICIT)
    state = sharded.update(sharded.add(sharded.init(rows), rows), np.zeros(8, np.int32), np.ones(8, np.float32))
    plain = jr.migrate(sharded, state, REPLAY)
    assert sorted(np.asarray(REPLAY.get(plain, REPLAY.newest(plain, 8))["id"])) == list(range(8))
    back = jr.migrate(REPLAY, plain, sharded)
    assert specs(back) == {("data",)}
    assert_same(*(sharded.get(its, sharded.newest(its, 8)) for its in (back, state)))
    assert specs(jr.bind(sharded, back).add(rows).state) == {("data",)}


def test_a_program_that_runs_on_a_mesh_by_set_mesh():
    """There also what `init` makes lies over the mesh, and a scan may carry it."""

    def train(rows, keys):
        return jax.lax.scan(lambda state, key: step(state, key, rows), REPLAY.init(rows), keys)

    rows = batch_of("replay")
    with jax.default_device("cpu"):
        expected = jax.jit(train)(rows, KEYS)
    with jax.set_mesh(EXPLICIT):
        found = jax.jit(train)(over(rows), KEYS)
    assert_same(found, expected)
    assert np.all(np.asarray(found[1].weights) > 0)
