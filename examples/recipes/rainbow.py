"""Rainbow: prioritized 3-step replay of distributions of returns."""

import jax
import jax.numpy as jnp
import optax

import jaxreplay as jr

num_steps, atoms = 3_000, jnp.linspace(0.0, 2.0, 51, dtype=jnp.float32)
tracer = jr.NStep(n=3, gamma=0.99, num_envs=8)
sampler = jr.Prioritized(alpha=0.5, beta=optax.linear_schedule(0.4, 1.0, num_steps))
buffer = jr.ReplayBuffer(capacity=1_000_000, sampler=sampler)


def step(env, action):  # a corridor that resets itself; what the tracer takes
    place, time = env
    after = jnp.clip(place + 2 * action - 1, 0, 5)
    terminated, truncated = after == 5, (after < 5) & (time == 9)
    over, reward = terminated | truncated, terminated.astype(jnp.float32)
    env = jnp.where(over, 0, after), jnp.where(over, 0, time + 1)
    return env, (place, action, reward, terminated, truncated, after)


def train_step(carry, key):
    params, target, env, tracing, replay = carry  # params: logits [6, 2, 51]
    act_key, explore_key, draw_key = jax.random.split(key, 3)
    greedy = jnp.argmax(jax.nn.softmax(params[env[0]]) @ atoms, axis=1)
    random = jax.random.randint(act_key, (8,), 0, 2)
    action = jnp.where(jax.random.bernoulli(explore_key, 0.2, (8,)), random, greedy)
    env, transition = step(env, action.astype(jnp.int32))
    tracing, batch, _ = tracer.add(tracing, *transition)
    replay = buffer.add(replay, batch)
    sample = buffer.sample(replay, draw_key, batch_size=32)
    batch = sample.items  # W: the importance weights
    next_values = jax.nn.softmax(params[batch.S_next]) @ atoms
    best = jnp.argmax(next_values, axis=1)  # double Q-learning
    reached = jnp.clip(batch.Rn[:, None] + batch.In[:, None] * atoms, 0, 2)
    # An atom's mass goes to its two neighbours.
    share = jnp.clip(1 - 25 * jnp.abs(reached[:, :, None] - atoms), 0, 1)
    mass = jax.nn.softmax(target[batch.S_next, best])
    targets = jnp.einsum("bi,bij->bj", mass, share)

    def loss(params):
        log_mass = jax.nn.log_softmax(params[batch.S, batch.A])
        losses = optax.kl_divergence(log_mass, targets)
        return jnp.mean(batch.W * losses), losses

    grads, losses = jax.grad(loss, has_aux=True)(params)
    replay = buffer.update(replay, sample.indices, losses)  # the priorities: KL losses
    params -= 20 * grads
    target = optax.incremental_update(params, target, 0.05)
    return (params, target, env, tracing, replay), jnp.mean(losses)


zeros, params = jnp.zeros(8, jnp.int32), jnp.zeros((6, 2, 51), jnp.float32)
_, transition = step((zeros, zeros), zeros)
tracing, replay = tracer.init(*transition), buffer.init(tracer.spec(*transition))
carry = params, params, (zeros, zeros), tracing, replay
train = jax.jit(lambda carry, keys: jax.lax.scan(train_step, carry, keys))
keys = jax.random.split(jax.random.key(0), num_steps)
(params, *_, replay), losses = train(carry, keys)
values = (jax.nn.softmax(params[:5]) @ atoms).max(axis=1)
print("values on the way:", *(f"{x:.3f}" for x in values))  # 0.961 to 1
