"""The library in 30 lines: fill a prioritized buffer, draw from it, learn, update the priorities.

Run: python examples/quickstart.py
"""

import jax
import jax.numpy as jnp
import optax

import jaxreplay as jr

beta = optax.linear_schedule(0.4, 1.0, 1_000)
buffer = jr.ReplayBuffer(capacity=10_000, sampler=jr.Prioritized(alpha=0.6, beta=beta))
true_weights = jnp.array([1.0, -2.0, 3.0, 0.5], jnp.float32)

example = {"x": jax.ShapeDtypeStruct((32, 4), jnp.float32), "y": jax.ShapeDtypeStruct((32,), jnp.float32)}
weights, replay = jnp.zeros(4), buffer.init(example)


def train_step(carry, key):
    weights, replay = carry
    data_key, sample_key = jax.random.split(key)
    x = jax.random.normal(data_key, (32, 4), jnp.float32)
    replay = buffer.add(replay, {"x": x, "y": x @ true_weights})
    sample = buffer.sample(replay, sample_key, batch_size=64)
    error = sample.items["x"] @ weights - sample.items["y"]
    replay = buffer.update(replay, sample.indices, error)
    weights -= 0.1 * jnp.mean((sample.weights * error)[:, None] * sample.items["x"], axis=0)
    return (weights, replay), jnp.mean(error**2)


(weights, replay), loss = jax.jit(lambda c, k: jax.lax.scan(train_step, c, k))(
    (weights, replay), jax.random.split(jax.random.key(0), 500)
)
print(f"stored {buffer.size(replay)} items, loss {loss[0]:.2f} -> {loss[-1]:.1e}, weights {weights.round(3)}")
