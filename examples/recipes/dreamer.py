"""DreamerV3: each new sequence once, a replay ratio, latent states written back."""

import jax
import jax.numpy as jnp

import jaxreplay as jr

settings = {"sequence_length": 64, "sampler": jr.Uniform(replacement=False)}
buffer = jr.SequenceBuffer(length=250_000, num_envs=4, **settings)
# A replay ratio of 32, for the 4 x 64 steps that are gathered at a time.
num_updates = 32 * 4 * 64 // (16 * 64)


def cell(params, latent, obs):
    """The next latent state, and a prediction of the next observation."""
    latent = jnp.tanh(obs[:, None] * params["in"] + latent @ params["state"])
    return latent, latent @ params["out"]


def step(carry, key):  # the environment is a pendulum; its position is observed
    params, latent, angle = carry
    obs = jnp.sin(angle)
    row = {"obs": obs, "latent": latent}
    return (params, cell(params, latent, obs)[0], angle + 0.5), row


def learn(carry, sample):
    params, replay = carry
    obs = sample.items["obs"].T  # [64, 16]

    def loss(params):
        def unroll(latent, x):
            new, prediction = cell(params, latent, x)
            return new, (latent, prediction)

        start = sample.items["latent"][:, 0]
        _, (latents, predictions) = jax.lax.scan(unroll, start, obs)
        errors = jnp.mean((predictions[:-1] - obs[1:]) ** 2, axis=0)
        error = jnp.sum(sample.weights * errors) / jnp.sum(sample.weights)
        return error, latents.swapaxes(0, 1)

    (error, latents), grads = jax.value_and_grad(loss, has_aux=True)(params)
    # The fresh latent states are written back.
    replay = buffer.set(replay, sample.indices, {"obs": None, "latent": latents})
    params = jax.tree.map(lambda x, grad: x - 0.05 * grad, params, grads)
    return (params, replay), error


def train_step(carry, key):
    env, (params, replay) = carry
    new_key, fill_key, *keys = jax.random.split(key, 1 + num_updates)
    (_, *env), rows = jax.lax.scan(step, (params, *env), length=64)
    replay = buffer.add(replay, rows)
    # The online queue: the sequences just gathered, each once.
    newest = buffer.sample(replay, new_key, 4, max_age=1)
    rest = buffer.sample(replay, fill_key, 12)
    batch = jax.tree.map(lambda *parts: jnp.concatenate(parts), newest, rest)
    learner, _ = learn((params, replay), batch)
    learner, errors = jax.lax.scan(
        lambda x, key: learn(x, buffer.sample(x[1], key, 16)), learner, jnp.stack(keys)
    )
    return (env, learner), jnp.mean(errors)


keys = jax.random.split(jax.random.key(0), 50)
params = {"in": (1, 8), "state": (8, 8), "out": (8,)}
params = {
    name: 0.5 * jax.random.normal(keys[0], shape, jnp.float32)
    for name, shape in params.items()
}
env = [jnp.zeros((4, 8), jnp.float32), jnp.arange(4, dtype=jnp.float32)]
rows = jax.eval_shape(lambda: jax.lax.scan(step, (params, *env), length=64)[1])
carry = env, (params, buffer.init(rows))
train = jax.jit(lambda carry, keys: jax.lax.scan(train_step, carry, keys))
carry, errors = train(carry, keys)
print(f"error of the predictions: {errors[0]:.4f} -> {errors[-1]:.4f}")
