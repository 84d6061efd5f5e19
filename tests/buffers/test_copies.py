"""What a caller overwrites once a call has returned does not reach the result, although it is computed later.

On a CPU a program, and an array made of NumPy's, may lie in the caller's memory. Without copies each of these calls
gives another result in nearly every try.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import over_devices, pointers, rarely
from jax import lax

import jaxreplay as jr
from jaxreplay import sum_tree

TRIES = 8
KEY, B = jax.random.key(0), 64
FLAGS, ONES = np.zeros(B, bool), np.ones(B, np.float32)
PER = jr.Prioritized(alpha=1.0, epsilon=0.0)


def aligned(shape, dtype=np.float32):
    """As JAX wants memory that it need not copy."""
    num_bytes = int(np.prod(shape)) * np.dtype(dtype).itemsize
    raw = np.empty(num_bytes + 64, np.uint8)
    start = -raw.ctypes.data % 64
    return raw[start : start + num_bytes].view(dtype).reshape(shape)


@jax.jit
def keep_busy(x):
    return lax.fori_loop(0, 100, lambda i, x: jnp.tanh(x @ x), x)


def with_state(buffer, call, width=32):
    @functools.cache  # not made where its test does not run
    def stored():
        rows = np.zeros((B, width), np.float32)
        steps = rows[None] if isinstance(buffer, jr.SequenceBuffer) else rows
        return buffer.add(buffer.init(steps), steps, *([KEY] if isinstance(buffer, jr.ReservoirBuffer) else []))

    return lambda x: call(buffer, stored(), x)


def replay(call, width=32):
    return with_state(jr.ReplayBuffer(capacity=B, sampler=PER, donate=False), call, width)


def traced(x):
    tracer = jr.NStep(n=1, gamma=0.9, num_envs=B)
    return tracer.add(tracer.init(x, ONES, ONES, FLAGS, FLAGS, x), x, ONES, ONES, FLAGS, FLAGS, x)[1].S


def pools(tasks):
    config = jr.DifficultyPools(tasks_per_env=(B,), easy_threshold=0.5, donate=False)
    empty = functools.cache(config.init)
    return lambda x: config.update(empty(), tasks, x)[0].pool


def goals(x):
    rows = {"achieved_goal": x, "desired_goal": x, "reward": np.zeros((B, 32), np.float32)}
    return jr.hindsight(KEY, rows, x[:2].reshape(B), lambda a, b: jnp.float32(1), share=1.0)[0]["desired_goal"]


SEQUENCE = jr.SequenceBuffer(length=2, num_envs=B, sequence_length=1, donate=False)
MIXTURE = jr.Mixture(buffers=(jr.ReplayBuffer(capacity=B, donate=False),) * 2)
TREE = sum_tree.update(sum_tree.init(B), np.arange(B), np.arange(B, dtype=np.float32))
CALLS = {
    "add": replay(lambda buffer, state, x: buffer.add(state, x).storage),
    "add one row": replay(lambda buffer, state, x: buffer.add(state, x[:1]).storage[:1], 4096),
    "add much": replay(lambda buffer, state, x: buffer.add(state, x).storage, 8192),
    "update": replay(lambda buffer, state, x: buffer.update(state, np.arange(32), x[0]).sampler.tree.sums[-1]),
    "set": replay(lambda buffer, state, x: buffer.set(state, np.arange(B), x).storage),
    "steps": with_state(SEQUENCE, lambda buffer, state, x: buffer.add(state, x[None]).storage[1]),
    "reservoir": with_state(
        jr.ReservoirBuffer(capacity=2 * B, donate=False), lambda buffer, state, x: buffer.add(state, x, KEY).storage
    ),
    "shards": with_state(
        over_devices(jr.ReplayBuffer(capacity=B, donate=False), 2),
        lambda buffer, state, x: buffer.add(state, x).storage,
    ),
    "mixture": lambda x: MIXTURE.add(MIXTURE.init(np.zeros((B, 32), np.float32)), 1, x)[1].storage,
    "tracer": traced,
    "autoreset": lambda x: jr.NextStepAutoreset(env_step=max).init(x, x).env,
    "rollout": lambda x: jr.n_step_transitions(x, x, x, x > 9, x > 9, x, n=1, gamma=0.9)[0].S,
    "sequences": lambda x: jr.sequence_transitions(x, x, x, x > 9, x > 9, n=1, gamma=0.9)[0].S,
    "pools": pools(np.arange(B)),
    "tasks on a device": pools(jnp.asarray(np.arange(B))),
    "frames": lambda x: jr.stack_frames(x[..., None], np.zeros(x.shape, bool), 2),
    "priority": jr.sequence_priority,
    "goals": goals,
    "weights": lambda x: jr.importance_weights(x[0], 8, 1.0),
    "sample size": jr.effective_sample_size,
    "leaves": lambda x: sum_tree.leaves(sum_tree.update(TREE, np.arange(32), x[0])),
    "single": lambda x: jr.TransitionBatch.from_single(x, 0, 0.0, 0.0, False, 0.9, x).S,
}


WIDTHS = {"add one row": 4096, "add much": 8192}


def check(call, x):
    x[:] = 1
    expected = np.array(call(x))
    x[:] = 0
    assert not np.array_equal(call(x), expected)  # the result tells what was read
    for _ in range(TRIES):
        x[:] = 1
        keep_busy(np.ones((64, 64), np.float32))
        found = call(x)
        x[:] = 0
        np.testing.assert_array_equal(found, expected)


ALWAYS = {"add", "update", "tracer", "tasks on a device", "frames", "priority", "weights", "leaves", "single", "goals"}


@pytest.mark.parametrize("name", [name if name in ALWAYS else rarely(name) for name in CALLS])
def test_a_caller_may_overwrite_its_arrays_once_a_call_has_returned(name):
    check(CALLS[name], aligned((B, WIDTHS.get(name, 32))))


def test_arrays_in_files_are_numpy_arrays_too(tmp_path):
    check(CALLS["add"], np.memmap(tmp_path / "rows", np.float32, "w+", shape=(B, 32)))


SAMPLER = {"sampler": jr.Prioritized(), "max_uses": 2}
OF_SEQUENCES = jr.SequenceBuffer(length=4, num_envs=2, sequence_length=2, windows="episodes", hindsight=True, **SAMPLER)
ROWS, STEPS, FLAG, NUMBER = jax.jit(  # arrays of a program: they lie in no memory of NumPy
    lambda: ({"x": jnp.ones((2, 3))}, {"x": jnp.ones((1, 2, 3))}, jnp.zeros(2, bool), jnp.ones(2))
)()
REPLAY = jr.ReplayBuffer(capacity=4, **SAMPLER)
STEP = {"s": ROWS, "a": NUMBER, "r": NUMBER, "terminated": FLAG, "truncated": FLAG, "s_next": ROWS}
STEP |= {"logp": NUMBER, "w": NUMBER}
INITS = {  # configurations of every class with `init`, and arguments; samplers are in `test_every_sampler.py`
    "ReplayBuffer": (REPLAY, (ROWS,), {}),
    "ReservoirBuffer": (jr.ReservoirBuffer(capacity=4, **SAMPLER), (ROWS,), {}),
    "SequenceBuffer": (OF_SEQUENCES, (STEPS,), {}),
    "Sharded": (over_devices(REPLAY, 2), (ROWS,), {}),
    "Mixture": (jr.Mixture(buffers=(REPLAY, REPLAY)), (ROWS,), {}),
    "NStep": (jr.NStep(n=1, gamma=0.5, num_envs=2), (), STEP),
    "MonteCarlo": (jr.MonteCarlo(gamma=0.5, max_length=1, num_envs=2), (), STEP),
    "NextStepAutoreset": (jr.NextStepAutoreset(env_step=max), ((NUMBER, KEY, ROWS), NUMBER), {}),
    "DifficultyPools": (jr.DifficultyPools(tasks_per_env=(4,)), (), {}),
    "Tasks": (jr.Tasks(num_tasks=4), (), {}),
    "Levels": (jr.Levels(capacity=4), (ROWS,), {}),
}


def test_no_state_holds_an_array_that_init_was_given_or_one_array_twice():
    """So that a caller may donate the state, together with what it was made of."""
    public = {name: getattr(jr, name) for name in jr.__all__}
    kinds = {name: x for name, x in public.items() if isinstance(x, type) and hasattr(x, "init")}
    assert {name for name, x in kinds.items() if not issubclass(x, jr.samplers.Sampler)} == INITS.keys()
    for name, (config, arguments, named) in INITS.items():
        state = config.init(*arguments, **named)
        found, given = pointers(state), pointers((arguments, named))
        assert len(set(found)) == len(found), name
        assert not set(found) & set(given), name
        assert found, name
    env, obs = jr.NextStepAutoreset(env_step=max), jnp.ones(3)
    after = jax.jit(lambda state, obs: (state, obs + 1), donate_argnums=(0, 1))(env.init(obs, obs), obs)
    assert after[1].tolist() == [2, 2, 2]
