import pickle

import chex
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.training.train_state import TrainState
from helpers import at, items, mesh, numbers, rarely
from jax import lax

import jaxreplay as jr

KEY, STEPS = jax.random.key(0), 4
PER = jr.Prioritized(alpha=0.7)
BUFFERS = {
    "replay": jr.ReplayBuffer(capacity=10, sampler=PER, donate=False),
    "reservoir": jr.ReservoirBuffer(capacity=10, donate=False),
    "sequence": jr.SequenceBuffer(length=6, num_envs=4, sequence_length=2, sampler=PER, donate=False),
    "mixture": jr.Mixture(buffers=(jr.ReplayBuffer(capacity=10, donate=False),) * 2),
    "sharded": jr.Sharded(jr.ReplayBuffer(capacity=10, sampler=PER, donate=False), mesh(2)),
}


def arguments(name, t, key):
    ids = 4 * t + jnp.arange(4, dtype=jnp.int32)
    return {
        "sequence": (items(ids[None]),),
        "reservoir": (items(ids), key),
        "mixture": (1, items(ids)),
    }.get(name, (items(ids),))


def run(name, buffer, key):
    """A scan of the buffer and its state, and of both as one."""
    first = arguments(name, 0, key)[name == "mixture"]
    bound = jr.bind(buffer, buffer.init(first))
    keys = jax.random.split(key, STEPS)

    def step(carry, x):
        state, bound = carry
        t, key = x
        state, bound = (f(*arguments(name, t, key)) for f in (lambda *a: buffer.add(state, *a), bound.add))
        sample, other = buffer.sample(state, key, 4), bound.sample(key, 4)
        td_errors = jnp.cos(jnp.arange(4.0, dtype=jnp.float32))
        state, bound = buffer.update(state, sample.indices, td_errors), bound.update(other.indices, td_errors)
        return (state, bound), (sample, other)

    return lax.scan(step, (bound.state, bound), (jnp.arange(STEPS, dtype=jnp.int32), keys))


@pytest.mark.parametrize("name", [name if name == "reservoir" else rarely(name) for name in BUFFERS])
def test_a_bound_buffer_in_jit_scan_and_vmap_is_the_buffer(name):
    buffer = BUFFERS[name]
    (state, bound), (samples, others) = jax.jit(jax.vmap(lambda key: run(name, buffer, key)))(jax.random.split(KEY, 2))
    chex.assert_trees_all_equal(bound.state, state)
    chex.assert_trees_all_equal(others, samples)
    one = at(bound, 0)
    assert one.config is buffer
    handles = others.indices[0, -1]
    chex.assert_trees_all_equal(one.get(handles), buffer.get(one.state, handles))
    for method in ("size", "is_empty", "is_full", "can_sample"):
        assert getattr(one, method)() == getattr(buffer, method)(one.state)
    if name != "mixture":
        assert one.num_batches(4) == buffer.num_batches(one.state, 4)
        if name != "reservoir":  # which keeps no order
            chex.assert_trees_all_equal(one.newest(2), buffer.newest(one.state, 2))
        chex.assert_trees_all_equal(one.epoch(KEY, 0, 4), buffer.epoch(one.state, KEY, 0, 4))
    else:
        assert one.sizes() == buffer.sizes(one.state)


def test_eager_calls_donate_as_the_buffer_does():
    buffer = jr.ReplayBuffer(capacity=4)
    gone = jr.bind(buffer, buffer.init(items(numbers(0, 2))))
    replay = gone.add(items(numbers(0, 2))).set(np.array([0, 1]), {"id": numbers(5, 2), "x": None})
    assert isinstance(replay, jr.Bound)
    assert replay.get(np.arange(2))["id"].tolist() == [5, 6]
    with pytest.raises(ValueError, match="state: was donated to an earlier call and is gone"):
        gone.size()
    kept = jr.bind(jr.ReplayBuffer(capacity=4, donate=False), replay.state)
    kept.add(items(numbers(0, 2)))
    assert kept.size() == 2


def test_what_else_a_configuration_can_do():
    tracer, ones, flags = jr.NStep(n=2, gamma=0.9, num_envs=3), jnp.ones(3), jnp.zeros(3, bool)
    step = ones, ones, ones, flags, flags, ones
    tracing, batch, valid = jr.bind(tracer, tracer.init(*step)).add(*step)
    assert isinstance(tracing, jr.Bound)
    assert tracing.state.count == 1
    assert (batch.batch_size, valid.tolist(), tracing.n) == (3, [False] * 3, 2)
    assert tracing.spec(*step).S.shape == (3,)  # takes no state
    emptied, *flushed = tracing.flush()
    assert emptied.state.count == 0
    chex.assert_trees_all_equal(flushed, [*tracer.flush(tracing.state)[1:]])
    pools = jr.DifficultyPools(tasks_per_env=(4,), easy_threshold=0.9)
    bound, kept = jr.bind(pools, pools.init()).update(np.arange(2), np.ones((2, 3)))
    tasks, ok = bound.sample(KEY, n=2)
    assert (bound.pool_of().tolist(), kept.tolist(), tasks.shape, ok) == ([1, 1, 0, 0], [True] * 2, (2,), True)
    assert bound.reset_metrics().state.rejected == bound.state.rejected
    sequences = jr.SequenceBuffer(length=6, num_envs=2, sequence_length=2, hindsight=True)
    replay = jr.bind(sequences, sequences.init(np.zeros((1, 2)))).add(np.zeros((3, 2)))
    assert (replay.completed(3), replay.stored_steps()) == (3, 6)
    assert replay.later(KEY, replay.newest(2))[1].tolist() == [1, 1]
    with pytest.raises(AttributeError, match="'SequenceBuffer' object has no attribute 'push'"):
        replay.push(1)
    chex.assert_trees_all_equal(pickle.loads(pickle.dumps(replay)).state, replay.state)


class AgentState(TrainState):
    replay: jr.Bound


@pytest.mark.slow  # the guide's first block does the same
def test_a_train_state_holds_a_buffer_and_is_saved_whole(tmp_path):
    """Its functions, and the buffer's configuration, come from one that is made anew."""
    buffer = jr.ReplayBuffer(capacity=8, sampler=PER)
    model = nn.Dense(1)

    def create(key):
        replay = jr.bind(buffer, buffer.init(jnp.zeros((1, 3))))
        return AgentState.create(
            apply_fn=model.apply, params=model.init(key, jnp.zeros((1, 3))), tx=optax.adam(1e-2), replay=replay
        )

    @jax.jit
    def train(agent, key):
        agent = agent.replace(replay=agent.replay.add(jax.random.normal(key, (4, 3))))
        sample = agent.replay.sample(key, 4)
        grads = jax.grad(lambda params: jnp.mean(sample.weights * agent.apply_fn(params, sample.items)[:, 0] ** 2))
        return agent.apply_gradients(grads=grads(agent.params))

    agent = train(create(KEY), KEY)
    jr.save(tmp_path, buffer, agent)
    restored = jr.restore(tmp_path, buffer, like=jax.eval_shape(create, KEY))
    chex.assert_trees_all_equal(jax.tree.leaves(restored), jax.tree.leaves(agent))
    assert restored.replay.config == buffer
    chex.assert_trees_all_equal(train(restored, KEY).params, train(agent, KEY).params)
