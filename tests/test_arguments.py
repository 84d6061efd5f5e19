import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxreplay as jr

CONFIGS = {
    "replay": lambda i, _: jr.ReplayBuffer(capacity=i(100)),
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


def fields(config):
    values = [getattr(config, field.name) for field in dataclasses.fields(config)]
    return [x for value in values for x in (value if isinstance(value, tuple) else (value,))]


NUMPY = (np.int8, np.float16), (np.uint32, np.float32), (np.int64, np.float64)
JAX = (jnp.int8, jnp.float16), (jnp.int32, jnp.float32)


@pytest.mark.parametrize("kinds", [*NUMPY, *JAX])
@pytest.mark.parametrize("name", CONFIGS)
def test_other_numbers_are_as_good_as_python_ones(name, kinds):
    """They would change dtypes, and numbers computed from narrow ones overflow."""
    make = CONFIGS[name]
    config = make(*kinds)
    assert config == make(int, float)
    assert hash(config) == hash(make(int, float))
    assert not any(isinstance(value, np.generic | jax.Array) for value in fields(config))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda x: jr.NStep(n=1, gamma=x),
            r"gamma=.*: is traced, .*; make the tracer with gamma=None and give it to add",
        ),
        (lambda x: jr.Prioritized(alpha=x), r"alpha=.*: is traced, .*; use alpha=1 and epsilon=0, and give update \("),
        (lambda x: jr.Prioritized(beta=x), r"beta=.*: is traced, .*; sample\(beta=\) takes a traced one"),
        (lambda x: jr.ReplayBuffer(capacity=x), "capacity=.*: is traced, .*; give it from outside of jit"),
    ],
)
def test_what_must_not_be_traced_says_what_else_to_do(make, message):
    with pytest.raises(ValueError, match=message):
        jax.eval_shape(make, 0.5)
    assert jax.eval_shape(lambda: jr.ReplayBuffer(capacity=np.array(3)).init(jnp.ones(2))).storage.shape == (3,)


@pytest.mark.parametrize(
    "sampler", [jr.Prioritized, None, "uniform", dataclasses.make_dataclass("Other", ["alpha"])(1)]
)
@pytest.mark.parametrize("make", [jr.ReplayBuffer, jr.ReservoirBuffer, jr.SequenceBuffer])
def test_what_is_no_sampler_is_refused_at_once(make, sampler):
    sizes = {"length": 4, "num_envs": 1, "sequence_length": 2} if make is jr.SequenceBuffer else {"capacity": 4}
    with pytest.raises(ValueError, match=r"sampler=.*: must be a sampler, such as jr.Uniform\(\)"):
        make(sampler=sampler, **sizes)
