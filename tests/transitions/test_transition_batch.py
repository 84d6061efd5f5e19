import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import rejects

import jaxreplay as jr

SINGLE = {"s": {"x": np.arange(3)}, "a": 1, "logp": -0.5, "r": 2.0, "done": False, "gamma": 0.9}


def single(**arguments):
    return jr.TransitionBatch.from_single(**{**SINGLE, **arguments})


def test_from_single():
    given = {"s_next": {"x": np.ones(3)}, "a_next": 2, "logp_next": -1, "w": 3, "idx": 7, "extra_info": {"k": 1.0}}
    batch = jax.device_get(single(**given))
    assert batch.batch_size == 1
    np.testing.assert_array_equal(batch.S["x"], [[0, 1, 2]])
    np.testing.assert_allclose(batch.In, [0.9])
    np.testing.assert_allclose([batch.Rn[0], batch.logP[0], batch.logP_next[0], batch.W[0]], [2, -0.5, -1, 3])
    assert (batch.A[0], batch.A_next[0], batch.idx[0], batch.extra_info["k"][0]) == (1, 2, 7, 1)
    assert batch.idx.dtype == jnp.int32
    last = jax.device_get(single(done=True, gamma=1))
    assert last.In[0] == 0
    assert (last.S_next, last.A_next, last.logP_next, last.idx, last.extra_info) == (None,) * 5
    assert last.W[0] == 1
    np.testing.assert_array_equal(single(logp=np.array([-1.0, -2.0])).logP, [[-1, -2]])
    assert single(gamma=0).In.tolist() == [0]


@pytest.mark.versions
def test_from_single_type_errors():
    for message, name, value in (
        (r"logp=0.1: a log-propensity is a number at most 0", "logp", 0.1),
        (r"logp=None", "logp", None),
        (r"logp='x'", "logp", "x"),
        (r"logp=\[-1.0\]", "logp", [-1.0]),
        (r"logp_next=1.0", "logp_next", 1.0),
        (r"gamma=1.1: a discount is a number in \[0, 1\]", "gamma", 1.1),
        (r"gamma=-0.1", "gamma", -0.1),
        (r"gamma='0.9'", "gamma", "0.9"),
        (r"w=0: a weight is a positive number", "w", 0),
        (r"w=-1.0", "w", -1.0),
        (r"done=1: expected a bool", "done", 1),
        (r"done=None", "done", None),
        (r"r='1': a reward is a number", "r", "1"),
        (r"r=nan", "r", float("nan")),
        (r"r=array\(\[1\., 1\.\]\): a reward is a number", "r", np.ones(2)),
    ):
        rejects(message, single, **{name: value}, error=TypeError)


def batch_of(size):
    x, more = map(jnp.asarray, (np.arange(size, dtype=np.float32), np.arange(1, size + 1, dtype=np.float32)))
    return jr.TransitionBatch(S={"x": x}, A=x, logP=x, Rn=x, In=x, S_next={"x": more}, W=x)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.float32])
def test_weights_of_half_precision_are_multiplied_in_float32(dtype):
    """By weights that have no half-precision value."""
    weights, stored = np.array([0.3, 0.7, 0.0], np.float32), np.array([1.5, 3.0, 5.0], np.float32)
    integers = np.array([2, 3, 4], np.int32)

    @jax.jit
    def draw(*stored):
        return [batch_of(3).replace(W=x).with_draw(weights, np.arange(3)).W for x in stored]

    found, whole = draw(stored.astype(dtype), integers)
    assert found.dtype == jnp.float32
    np.testing.assert_array_equal(found, stored * weights)
    assert not np.array_equal(weights.astype(jnp.float16).astype(np.float32), weights)
    np.testing.assert_array_equal(whole, integers.astype(np.float32) * weights)


def test_copy():
    batch = batch_of(3)
    shallow, deep = batch.copy(), batch.copy(deep=True)
    assert shallow is not batch
    assert shallow.S["x"] is batch.S["x"]
    assert shallow.S is not batch.S
    assert deep.S["x"] is not batch.S["x"]
    assert deep.A.unsafe_buffer_pointer() != batch.A.unsafe_buffer_pointer()
    np.testing.assert_array_equal(deep.W, batch.W)
