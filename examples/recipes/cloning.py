"""Behaviour cloning: every demonstration once per epoch."""

import jax
import jax.numpy as jnp
import optax

import jaxreplay as jr

cross_entropy = optax.softmax_cross_entropy_with_integer_labels
expert = jnp.array([[1.0, -1.0], [0.5, 0.0], [0.0, 2.0], [-1.0, 1.0]], jnp.float32)
obs = jax.random.normal(jax.random.key(0), (1_000, 4), jnp.float32)
numbers, action = jnp.arange(1_000, dtype=jnp.int32), jnp.argmax(obs @ expert, axis=1)
demonstrations = {"row": numbers, "obs": obs, "action": action}
buffer = jr.ReplayBuffer(capacity=1_000)
replay = buffer.add(buffer.init(demonstrations), demonstrations)
# Four; the last one has 232 rows.
num_batches = int(buffer.num_batches(replay, batch_size=256))


def epoch(params, key):
    def update(params, number):
        # The key is the same in all of an epoch.
        batch = buffer.epoch(replay, key, 256, step=number)

        def loss(params):
            logits, actions = batch.items["obs"] @ params, batch.items["action"]
            losses = cross_entropy(logits, actions)
            # Rows without an item have weight 0.
            return jnp.sum(batch.weights * losses) / jnp.sum(batch.weights)

        error, grads = jax.value_and_grad(loss)(params)
        return params - grads, (error, batch.items["row"], batch.weights)

    return jax.lax.scan(update, params, jnp.arange(num_batches))


train = jax.jit(lambda params, keys: jax.lax.scan(epoch, params, keys))
keys = jax.random.split(jax.random.key(1), 10)  # 10 epochs
params, (errors, rows, weights) = train(jnp.zeros((4, 2), jnp.float32), keys)
print("loss by epoch:", *(f"{x:.2f}" for x in errors.mean(axis=1)))
