import copy
import dataclasses
import functools
import inspect
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import leaves_of, over_devices, rarely, rejects

import jaxreplay as jr

CONFIGS = {
    "replay": lambda i, _: jr.ReplayBuffer(capacity=i(100)),
    "rollouts": lambda i, _: jr.ReplayBuffer(capacity=i(100), axes=i(2)),
    "reservoir": lambda i, _: jr.ReservoirBuffer(capacity=i(100)),
    "sequence": lambda i, _: jr.SequenceBuffer(length=i(10), num_envs=i(100), sequence_length=i(3), stride=i(2)),
    "mixture": lambda _, f: jr.Mixture(buffers=(jr.ReplayBuffer(capacity=9),) * 2, shares=np.array([f(1), f(3)])),
    "prioritized": lambda _, f: jr.Prioritized(alpha=f(0.5), beta=f(0.25), epsilon=f(0.125)),
    "tracer": lambda i, f: jr.NStep(n=i(3), gamma=f(0.5), num_envs=i(100)),
    "returns": lambda i, f: jr.MonteCarlo(gamma=f(0.5), max_length=i(100), num_envs=i(2)),
    "pools": lambda i, f: jr.DifficultyPools(
        tasks_per_env=np.array([i(100), i(7)]),
        env_ratios=[f(0.5), f(1.5)],
        easy_threshold=f(0.75),
        hard_threshold=f(0.25),
        max_easy_pool_fraction=f(0.5),
        max_hard_pool_fraction=f(0.25),
    ),
}


NUMPY = (np.int8, np.float16), (np.uint32, np.float32), (np.int64, np.float64)


@pytest.mark.parametrize("kinds", [*NUMPY, (jnp.int8, jnp.float16), (jnp.int32, jnp.float32)])
@pytest.mark.parametrize("name", CONFIGS)
def test_other_numbers_are_as_good_as_python_ones(name, kinds):
    """They would change dtypes, and numbers computed from narrow ones overflow."""
    make = CONFIGS[name]
    config = make(*kinds)
    assert config == make(int, float)
    assert hash(config) == hash(make(int, float))
    values = jax.tree.leaves([getattr(config, field.name) for field in dataclasses.fields(config)])
    assert not any(isinstance(value, np.generic | jax.Array) for value in values)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda x: jr.NStep(n=1, gamma=x), r"gamma=.*: is traced, .*; make the tracer with gamma=None and pass"),
        (
            lambda x: jr.Prioritized(alpha=x),
            r"alpha=.*: is traced, .*; state.replace\(sampler=state.sampler.replace\(alpha=...\)\) takes a traced one "
            "before the first add",
        ),
        (lambda x: jr.Prioritized(beta=x), r"beta=.*: is traced, .*; sample\(beta=\) takes a traced one"),
        (lambda x: jr.ReplayBuffer(capacity=x), "capacity=.*: is traced, .*; give it from outside of jit"),
    ],
)
def test_what_must_not_be_traced_says_what_else_to_do(make, message):
    rejects(message, jax.eval_shape, make, 0.5)
    assert jax.eval_shape(lambda: jr.ReplayBuffer(capacity=np.array(3)).init(jnp.ones(2))).storage.shape == (3,)


@pytest.mark.versions
@pytest.mark.parametrize(
    "key", [0, None, np.float32(0.5), np.ones(2, bool), np.array(3, np.uint32), "two keys", "a vector of them"]
)
def test_what_is_no_key_is_refused_as_such(key):
    """Nothing is compiled."""
    if isinstance(key, str):
        key = jax.random.wrap_key_data(np.zeros((2 if key == "two keys" else 1, 2), np.uint32))
    buffer, steps = jr.SequenceBuffer(length=4, num_envs=2, sequence_length=2, hindsight=True), np.zeros((3, 2))
    prioritized, pools = jr.ReplayBuffer(capacity=4, sampler=jr.Prioritized()), jr.DifficultyPools(tasks_per_env=(4,))
    sharded, mixture = over_devices(buffer, 2), jr.Mixture(buffers=(buffer, buffer))
    reservoir, items = jr.ReservoirBuffer(capacity=4), np.zeros(3)
    state, leaf, shards = ones(buffer, steps), ones(prioritized, items), ones(sharded, steps)
    tree = jax.tree.map(np.ones_like, jr.sum_tree.init(4))
    for call in (
        lambda: buffer.sample(state, key, 2),
        lambda: jax.jit(lambda: buffer.sample(state, key, 2))(),
        lambda: prioritized.sample(leaf, key, 2),
        lambda: buffer.epoch(state, key, 2, step=0),
        lambda: buffer.later(state, key, np.arange(2)),
        lambda: sharded.sample(shards, key, 2),
        lambda: mixture.sample((state, state), key, 2),
        lambda: reservoir.add(ones(reservoir, items), items, key),
        lambda: pools.sample(ones(pools), key, 2),
        lambda: jr.sum_tree.sample(tree, key, 2),
        lambda: jr.hindsight(key, {"achieved_goal": steps, "desired_goal": steps}, items, lambda a, d: a),
    ):
        rejects(r"key: got .*, expected one PRNG key, such as jax.random.key\(0\)\.", call)


PUBLIC = [x for module in (jr, jr.scores) for x in vars(module).values() if isinstance(x, type)]
KINDS_OF_CONFIG = [x for x in PUBLIC if getattr(x, "_is_config", False)]


@pytest.mark.parametrize("kind", KINDS_OF_CONFIG)
def test_positional_arguments_are_errors(kind):
    """Whatever is given; the first argument that is needed is named."""
    fields = [x for x in dataclasses.fields(kind) if x.init]
    first = next((x.name for x in fields if x.default is dataclasses.MISSING), fields[0].name)
    message = rf"{kind.__name__}: got .*, takes keyword arguments only; write {kind.__name__}\({first}="
    for given in ((3,), (jr.ReplayBuffer(capacity=4), None), [True] * 9):
        rejects(message, kind, *given, error=TypeError)
    assert {jr.ReplayBuffer, jr.Mixture, jr.NStep, jr.scores.Thompson} <= {*KINDS_OF_CONFIG}


def test_a_field_that_does_not_exist_is_an_error_with_those_that_do():
    fields = [x.name for x in dataclasses.fields(jr.ReplayBuffer) if x.name[0] != "_"]
    assert fields[0] == "capacity"
    message = rf"ReplayBuffer: has no field max_length; it has {', '.join(fields)}; use capacity\.$"
    rejects(message, jr.ReplayBuffer, max_length=9, error=TypeError)


def test_a_configuration_that_rejects_positional_arguments_is_a_plain_dataclass_otherwise():
    """Its signature, its copies, and the constructor of a subclass, which may take positional arguments."""
    sampler = jr.Prioritized(alpha=0.5)
    known = hash(sampler)  # is kept, but not in a copy: that of a string is another in another process
    for again in (copy.deepcopy(sampler), pickle.loads(pickle.dumps(sampler)), dataclasses.replace(sampler)):
        assert [*vars(again)] == [x.name for x in dataclasses.fields(sampler)]
        assert (again, hash(again)) == (sampler, known)
    assert hash(dataclasses.replace(sampler, alpha=0.25)) != known
    parameters = inspect.signature(jr.Prioritized).parameters
    assert list(parameters) == [field.name for field in dataclasses.fields(sampler) if field.name[0] != "_"]
    assert {parameter.kind for parameter in parameters.values()} == {inspect.Parameter.KEYWORD_ONLY}
    assert parameters["alpha"].default == 0.6
    own = dataclasses.make_dataclass("Own", [("most", int)], bases=(jr.Uniform,), frozen=True)
    assert own(3, replacement=False) == own(most=3, replacement=False)


@pytest.mark.versions
def test_a_list_of_numbers_is_a_pytree_whose_leaves_are_named():
    """Nothing is compiled."""
    replay, one, numbers = jr.ReplayBuffer(capacity=4), np.zeros(2, np.float32), [1.0, 2.0]
    state = empty(replay, {"x": one})
    message = r"leaf \['x'\]\[0\]: got float(32|64)\[\], .* needs 1 leading axis; x\[None\] adds one, np.stack makes"
    rejects(message, replay.init, {"x": numbers, "y": one})
    rejects("wrong structure: got PyTreeDef", replay.set, state, np.arange(2), {"x": numbers})
    assert jax.eval_shape(replay.init, [one, one]).storage[1].shape == (4,)  # a list of arrays: two leaves


class Hooked(jr.Uniform):
    """A sampler whose draws change its state."""

    def drawn(self, state, slots):
        return state


def empty(config, *like, fill=np.zeros):
    """A state of NumPy arrays, so that nothing is compiled."""
    return jax.tree.map(lambda x: fill(x.shape, x.dtype), jax.eval_shape(config.init, *like))


ones = functools.partial(empty, fill=np.ones)  # a state with items


def test_a_state_that_is_forgotten_or_swapped_with_the_key_is_named():
    """No call compiles anything."""
    replay, one, key, raw = jr.ReplayBuffer(capacity=4), np.zeros((2, 2)), jax.random.key(0), np.zeros(2, np.uint32)
    sequence = jr.SequenceBuffer(length=4, num_envs=2, sequence_length=2)
    pools, tasks, levels = jr.DifficultyPools(tasks_per_env=(4,)), jr.Tasks(num_tasks=4), jr.Levels(capacity=4)
    for config, like in (
        (replay, [one]),
        (jr.ReplayBuffer(capacity=4, sampler=Hooked()), [one]),
        (jr.ReservoirBuffer(capacity=4), [one]),
        (sequence, [one]),
        (over_devices(replay, 2), [one]),
        (jr.Mixture(buffers=(replay, replay)), [one]),
        *((pools, []), (tasks, []), (levels, [one[0]])),
    ):
        state, owner = empty(config, *like), type(config).__name__
        expected = rf"expected {type(state).__name__}, as init of {owner}"
        for given, found in ((key, r"key<fry>\[\]"), (raw, r"uint32\[2\]")):
            rejects(f"state: got {found}, {expected}", config.sample, given, state, 4)
        if config not in (pools, tasks, levels):
            rows = {"ReservoirBuffer": (one, key), "Mixture": (0, one)}.get(owner, (one,))
            for given, found in (
                (None, "NoneType"),
                (object(), "object"),
                (one, r"float32\[2, 2\]|float64\[2, 2\]"),
                (3, r"int|int(32|64)\[\]"),
            ):
                rejects(rf"state: got ({found}), {expected}", config.add, given, *rows)
    rejects("state: got SequenceState, expected ReplayState, as init", replay.add, empty(sequence, one), one)
    for call in (lambda: pools.update(None, np.arange(2), one), lambda: tasks.update(None, np.arange(2), one)):
        rejects(r"state: got NoneType, expected .*State, as init of", call)


@pytest.mark.parametrize("sampler", [jr.Prioritized, None, "uniform", dataclasses.make_dataclass("A", ["alpha"])(1)])
@pytest.mark.parametrize("make", [jr.ReplayBuffer, jr.ReservoirBuffer, jr.SequenceBuffer])
def test_what_is_no_sampler_is_refused_at_once(make, sampler):
    sizes = {"length": 4, "num_envs": 1, "sequence_length": 2} if make is jr.SequenceBuffer else {"capacity": 4}
    rejects(r"sampler=.*: must be a sampler, such as jr.Uniform\(\)", make, sampler=sampler, **sizes)
    of_a_list = dataclasses.make_dataclass("OfAList", ["table"], bases=(jr.Uniform,), frozen=True, kw_only=True)
    rejects(r"sampler=.*: must be hashable; make it a frozen dataclass", make, sampler=of_a_list(table=[1.0]), **sizes)


def integers(values, kind, like):
    """Of `values` those that fit `kind`, then 100s, so that there are as many of each kind, as a vector of `like`."""
    kind = jnp.asarray(np.zeros(0, kind)).dtype if like is jnp else kind  # of 32 bits where JAX has no others
    info = np.iinfo(kind)
    fit = [x for x in values if info.min <= x <= info.max]
    return like.asarray(np.array([*fit, *[100] * (len(values) - len(fit))], kind))


KINDS = ["int8", "uint32", "uint64", *map(rarely, ["int16", "int32", "int64", "uint8", "uint16"])]
MANY = [*range(-3, 6), 100, 127, 128, 255, 2**15 - 1, 2**16 - 1, 2**31 - 1, 2**31, 2**31 + 3, 2**32 - 1]
MANY += [2**32, 2**32 + 3, 2**63 - 1, 2**63, 2**63 + 3, 2**64 - 1, -128, -(2**31), -(2**63), -(2**31) + 3]
BUFFER = jr.ReplayBuffer(capacity=4, sampler=jr.Prioritized(), donate=False)
CALLS = {name: call for name in dir(BUFFER) if (call := getattr(getattr(BUFFER, name), "call", None))}
READS = [name for name, call in CALLS.items() if call.rows in (("indices",), ("slots",))]


@pytest.mark.parametrize("name", CALLS)
def test_an_argument_that_is_missing_or_given_twice_is_an_error(name):
    """By position and by name, of every method, also where the two are the same."""
    state, parameters = stored(), [*inspect.signature(getattr(BUFFER, name)).parameters.values()][1:]
    names = [x.name for x in parameters if x.kind is not x.KEYWORD_ONLY]
    key = jax.random.key(0)
    right = {"key": key, "batch_size": 2, "n": 2, "items": np.arange(3), "values": np.arange(2.0)}
    given = [right.get(x, np.arange(2)) for x in names]
    for count, missing in enumerate(x.name for x in parameters if x.default is x.empty):
        message = f"{name}.*missing a required( keyword-only)? argument: '{missing}'"
        rejects(message, getattr(BUFFER, name), state, *given[:count], error=TypeError)
    for count in range(1, len(names) + 1):
        for again in names[:count]:
            rest = dict(zip(names[count:], given[count:], strict=True)) | {again: given[names.index(again)]}
            call = functools.partial(getattr(BUFFER, name), state, *given[:count], **rest)
            rejects(f"{name}.*multiple values for argument '{again}'", call, error=TypeError)


@functools.cache
def stored():
    """Items 10, 20, ..., of which handles 2 to 5 are stored."""
    state = BUFFER.init(10 * np.arange(3))
    return BUFFER.add(BUFFER.add(state, 10 * np.arange(1, 4)), 10 * np.arange(4, 7))


@jax.jit
def get_traced(state, handles):
    """Of all handles at once, and one by one under `jax.vmap`."""
    return BUFFER.get(state, handles), jax.vmap(BUFFER.get, in_axes=(None, 0))(state, handles[:, None])[:, 0]


@pytest.mark.versions
@pytest.mark.parametrize("like", [np, jnp])
@pytest.mark.parametrize("kind", KINDS)
def test_handles_of_any_integers_are_the_numbers_that_they_are(kind, like):
    """None wraps to one that is stored, and none fails."""
    state, handles = stored(), integers(MANY, kind, like)
    values = np.asarray(handles).astype(object)
    expected = [10 * (x + 1) if 2 <= x <= 5 else 0 for x in values]
    assert sum(map(bool, expected)) == 4
    np.testing.assert_array_equal(BUFFER.get(state, handles), expected)
    told = np.where(expected, 2.0, np.nan)  # refused, and counted, where it names an item
    updated, written = BUFFER.update(state, handles, told), BUFFER.set(state, handles, np.arange(1, told.size + 1))
    assert np.asarray(updated.sampler.rejected) == 0
    assert np.all(leaves_of(updated.sampler.tree) > 1.4)
    fits = np.where((values >= -1) & (values < 2**31), values, -1).astype(np.int32)
    assert {"handles", "slots", "age", "priorities"} <= {*READS}
    for name in READS:
        np.testing.assert_array_equal(*(getattr(BUFFER, name)(state, x) for x in (handles, fits)), err_msg=name)
    order = [list(values).index(x) + 1 for x in range(2, 6)]
    np.testing.assert_array_equal(BUFFER.get(written, BUFFER.newest(written, 4)), order)
    if like is jnp:  # of a NumPy array a program of one's own has already dropped what does not fit
        for found in get_traced(state, handles):
            np.testing.assert_array_equal(found, expected)


def draws(state, number):
    key = jax.random.key(0)
    return BUFFER.sample(state, key, 64, max_age=number).age, BUFFER.epoch(state, key, 2, step=number).indices


@jax.jit
def draws_traced(state, numbers):
    """For one number after another, and for all under `jax.vmap`."""
    return jax.lax.map(lambda x: draws(state, x), numbers), jax.vmap(lambda x: draws(state, x))(numbers)


@pytest.mark.versions
@pytest.mark.parametrize("like", [np, jnp])
@pytest.mark.parametrize("kind", KINDS)
def test_ages_and_steps_of_any_integers_are_the_numbers_that_they_are(kind, like):
    state, key = stored(), jax.random.key(0)
    passes = {step: np.asarray(BUFFER.epoch(state, key, 2, step=step).indices) for step in range(2)}
    numbers = integers(MANY, kind, like)

    def check(value, ages, indices):
        np.testing.assert_array_equal(np.unique(ages), np.arange(min(value, 4)) if value > 0 else [-1])
        np.testing.assert_array_equal(indices, passes.get(value, [-1, -1]))

    rejects(r"max_age: got float.*, expected an int32\[\]", BUFFER.sample, state, key, 2, max_age=like.asarray(2.0))
    taken = []
    for number in np.asarray(numbers):
        value = int(number)
        if like is np and not 1 <= value < 2**31:  # refused, where the value is at hand
            rejects(r"max_age=.*: must be an integer from 1 to 2147483647", draws, state, number)
            if value != 0:
                message = r"step=.*: must be an integer from 0 to 2147483647"
                rejects(message, BUFFER.epoch, state, key, 2, step=number)
            continue
        check(value, *draws(state, like.asarray(number)[()]))
        taken.append(number)
    assert {1, 2, 3, 127} < set(map(int, taken))
    taken = np.resize(taken, len(MANY))
    for found in draws_traced(state, taken):
        for value, ages, indices in zip(taken.tolist(), *jax.device_get(found), strict=True):
            check(value, ages, indices)


@pytest.mark.parametrize("outer", [jax.jit, rarely(lambda function: function)], ids=["in a program", "eager"])
def test_numbers_are_taken_where_nothing_is_compiled(outer):
    """As one does to find an error. In a program it is all but the outermost call."""
    buffer, numbers = jr.ReplayBuffer(capacity=4), np.arange(4)
    state = buffer.add(buffer.init(numbers), numbers)

    @outer
    def drawn(state):
        with jax.disable_jit():
            key, numbers = jax.random.key(0), (2, np.int8(2), np.array(2))
            return [buffer.sample(state, key, 20, max_age=number).age for number in numbers]

    for ages in drawn(state):
        assert set(ages.tolist()) == {0, 1}
