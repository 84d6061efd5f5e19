import inspect
import pickle

import chex
import jax
import numpy as np
import pytest
from helpers import at, items, numbers, over_devices, rejects
from jax import lax

import jaxreplay as jr

KEY = jax.random.key(0)
PER = jr.Prioritized(alpha=0.7)
BUFFERS = {
    "replay": jr.ReplayBuffer(capacity=10, sampler=PER, donate=False),
    "reservoir": jr.ReservoirBuffer(capacity=10, donate=False),
    "sequence": jr.SequenceBuffer(length=6, num_envs=4, sequence_length=2, sampler=PER, donate=False),
    "mixture": jr.Mixture(buffers=(jr.ReplayBuffer(capacity=10, donate=False),) * 2),
    "sharded": over_devices(jr.ReplayBuffer(capacity=10, sampler=PER, donate=False), 2),
}


def test_a_bound_buffer_in_jit_scan_and_vmap_is_the_buffer():
    buffer = BUFFERS["replay"]

    def run(key):
        """A scan of the buffer and its state, and of both as one."""
        bound = jr.bind(buffer, buffer.init(items(numbers(0, 4))))

        def step(carry, x):
            (state, bound), (ids, key) = carry, x
            rows, td_errors = items(ids), np.arange(4, dtype=np.float32)
            state, bound = buffer.add(state, rows), bound.add(rows)
            sample, other = buffer.sample(state, key, 4), bound.sample(key, 4)
            state, bound = buffer.update(state, sample.indices, td_errors), bound.update(other.indices, td_errors)
            return (state, bound), (sample, other)

        return lax.scan(step, (bound.state, bound), (numbers(0, 16).reshape(4, 4), jax.random.split(key, 4)))

    (state, bound), (samples, others) = jax.jit(jax.vmap(run))(jax.random.split(KEY, 2))
    chex.assert_trees_all_equal(bound.state, state)
    chex.assert_trees_all_equal(others, samples)
    one = at(bound, 0)
    assert one.config is buffer
    assert int(one.size()) == int(buffer.size(one.state)) == 10
    chex.assert_trees_all_equal(one.epoch(KEY, 4, step=0), buffer.epoch(one.state, KEY, 4, step=0))


@pytest.mark.parametrize("name", [*BUFFERS, "tracer"])
def test_help_on_a_bound_method_is_the_configurations_without_the_state(name):
    config = BUFFERS.get(name, jr.NStep(n=2, gamma=0.9))
    bound = jr.Bound(config, None)
    for method in ("add", "init", *(() if name == "tracer" else ("sample", "update", "size"))):
        own, found = getattr(config, method), getattr(bound, method)
        parameters = [x for x in inspect.signature(own).parameters.values() if x.name != "state"]
        assert [*inspect.signature(found).parameters.values()] == parameters
        assert inspect.signature(found).return_annotation == inspect.signature(own).return_annotation
        assert inspect.getdoc(found) == inspect.getdoc(own)
        assert found.__name__ == method
    assert {x for x in dir(config) if x[0] != "_"} | {"config", "state", "replace"} <= set(dir(bound))
    assert not hasattr(jr.Bound, "sample")
    assert repr(jr.Bound(config, (np.zeros(3, np.float32), 7))).endswith("tuple of 12 bytes)")


def test_eager_calls_donate_as_the_buffer_does():
    buffer = jr.ReplayBuffer(capacity=4)
    gone = jr.bind(buffer, buffer.init(items(numbers(0, 2))))
    replay = gone.add(items(numbers(0, 2))).set(np.array([0, 1]), {"id": numbers(5, 2), "x": None})
    assert isinstance(replay, jr.Bound)
    assert replay.get(np.arange(2))["id"].tolist() == [5, 6]
    rejects("state: was donated to an earlier call and is gone", gone.size)
    kept = jr.bind(jr.ReplayBuffer(capacity=4, donate=False), replay.state)
    kept.add(items(numbers(0, 2)))
    assert int(kept.size()) == 2


def test_a_configuration_and_its_state_in_another_order_or_of_another_buffer():
    buffer = BUFFERS["replay"]
    state = buffer.init(items(numbers(0, 4)))
    rejects("config: got a ReplayState, not hashable; give it before the state", jr.bind, state, buffer)
    rejects("state: got NoneType, expected ReplayState", jr.bind, buffer, None)


@pytest.mark.parametrize("name", BUFFERS)
def test_each_method_that_returns_a_state_returns_one_that_is_bound(name):
    """Also where the state is a tuple, and the method takes only masks or nothing."""
    config = BUFFERS[name]
    public = {x: getattr(config, x) for x in dir(config) if x[0] != "_"}
    signatures = {x: inspect.signature(method) for x, method in public.items() if callable(method)}
    changes = [x for x, its in signatures.items() if "state" in its.parameters and
               its.return_annotation == its.parameters["state"].annotation]  # fmt: skip
    assert {"add", "clear", "update", "set"} <= {*changes}
    state = config.init(items(numbers(0, 4).reshape((1, 4) if name == "sequence" else 4)))
    for method in changes:
        bound = jr.Bound(config, state)._after(method, state)
        assert (type(bound), bound.config) == (jr.Bound, config), method


def test_what_else_a_configuration_can_do():
    tracer, ones, flags = jr.NStep(n=2, gamma=0.9, num_envs=3), np.ones(3, np.float32), np.zeros(3, bool)
    step = ones, ones, ones, flags, flags, ones
    tracing, batch, valid = jr.bind(tracer, tracer.init(*step)).add(*step)
    assert isinstance(tracing, jr.Bound)
    assert tracing.state.count == 1
    assert (batch.batch_size, valid.tolist(), tracing.n) == (3, [False] * 3, 2)
    assert tracing.spec(*step).S.shape == (3,)  # takes no state
    emptied, *flushed = tracing.flush()
    assert emptied.state.count == 0
    chex.assert_trees_all_equal(flushed, [*tracer.flush(tracing.state)[1:]])
    rejects("'NStep' object has no attribute 'push'", lambda: tracing.push(1), error=AttributeError)
    rejects("no attribute 'config'", lambda: object.__new__(type(tracing)).config, error=AttributeError)
    rejects("no attribute '_check_state'", lambda: tracing._check_state, error=AttributeError)
    chex.assert_trees_all_equal(pickle.loads(pickle.dumps(tracing)).state, tracing.state)


def test_a_state_may_come_back_with_other_shapes():
    pools, more = (jr.DifficultyPools(tasks_per_env=(count,), easy_threshold=0.9) for count in (4, 5))
    bound, kept = jr.bind(pools, pools.init()).update(np.arange(2), np.ones((2, 3)))
    assert (bound.pool_of().tolist(), kept.tolist()) == ([1, 1, 0, 0], [True] * 2)
    bound = jr.bind(more, bound.state).remap("abcd", "dcbae")
    assert isinstance(bound, jr.Bound)
    assert more.pool_of(bound.state).shape == bound.recycle(KEY).pool_of().shape == (5,)


class Bare:
    """A configuration of any state."""

    def add(self, state, x):
        return jax.tree.map(lambda y: y + x, state)

    def update(self, state, x):
        return jax.tree.map(lambda y: y * x, state), x

    def push(self, state, x):
        return state

    def size(self, state):
        return state // 2

    def parts(self, state):
        return state, -state

    def none(self, state):
        return ()

    def given(self, state, *arguments, **named):
        return arguments, named


@pytest.mark.parametrize("transform", [lambda function: function, jax.jit], ids=["eager", "jit"])
def test_a_state_that_is_a_single_array(transform):
    @transform
    def use(x):
        bound = jr.bind(Bare(), np.int32(5)).add(x)
        assert bound.none() == ()
        return bound, *bound.update(2 * x), bound.size(), bound.parts(), bound.push(x)

    bound, other, rest, size, parts, pushed = use(jax.device_put(np.int32(3)))
    assert [type(x) for x in (bound, other)] == [jr.Bound] * 2
    assert (bound.state, other.state, rest) == (8, 16 * 3, 6)
    assert (size, parts, pushed) == (4, (8, -8), 8)  # no states, though they look like one


def test_states_that_are_containers():
    """Their class tells no state from what else a method returns."""
    for state in ({"x": 1, "y": 2}, [1, 2]):
        bound = jr.bind(Bare(), state)
        assert bound.given(1, 2, mask=3) == ((1, 2), {"mask": 3})
        assert bound.push(0) == state
        assert jax.tree.leaves(bound.add(1)) == [2, 3]
        other, rest = bound.update(3)
        assert (jax.tree.leaves(other), rest, type(other)) == ([3, 6], 3, jr.Bound)


def test_a_mixtures_sizes_are_no_state():
    mixture = BUFFERS["mixture"]
    bound = jr.bind(mixture, mixture.init(items(numbers(0, 2)))).add(0, items(numbers(0, 2)))
    assert isinstance(bound, jr.Bound)
    assert bound.sizes() == (2, 0)
    one = jr.Mixture(buffers=mixture.buffers[:1])  # of one source, sizes has the structure of a ring's field
    assert jr.bind(one, one.init(items(numbers(0, 2)))).sizes() == (0,)
