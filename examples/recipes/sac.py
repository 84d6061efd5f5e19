"""SAC: a time limit is not a terminal state."""

import jax
import jax.numpy as jnp
import optax

import jaxreplay as jr

tracer = jr.NStep(n=1, gamma=0.99, num_envs=4)
buffer, optimizer = jr.ReplayBuffer(capacity=1_000_000), optax.adam(3e-3)


def step(env, action):
    """A cart on a line, cut off after 50 steps; what the tracer takes."""
    place, time = env
    after, truncated = jnp.clip(place + 0.5 * action, -2, 2), time == 49
    env = jnp.where(truncated, 1.5, after), jnp.where(truncated, 0, time + 1)
    return env, (place, action, -(after**2), jnp.zeros(4, bool), truncated, after)


def act(actor, s, key):
    """A sample of a squashed normal distribution, and its log-probability."""
    noise, log_std = jax.random.normal(key, s.shape, s.dtype), jnp.clip(actor[2], -5, 1)
    a = jnp.tanh(actor[0] * s + actor[1] + jnp.exp(log_std) * noise)
    return a, -0.5 * noise**2 - log_std - 0.919 - jnp.log(1 - a**2 + 1e-6)


def q(critics, s, a):  # of two critics, [2, B]
    return critics @ jnp.stack([jnp.ones_like(s), s, a, s * s, s * a, a * a])


def train_step(carry, key):
    params, target, opt_state, env, tracing, replay = carry
    act_key, draw_key, next_key, new_key = jax.random.split(key, 4)
    env, transition = step(env, act(params["actor"], env[0], act_key)[0])
    tracing, batch, _ = tracer.add(tracing, *transition)
    replay = buffer.add(replay, batch)
    batch = buffer.sample(replay, draw_key, batch_size=256).items
    a_next, logp = act(params["actor"], batch.S_next, next_key)
    next_value = q(target, batch.S_next, a_next).min(axis=0) - 0.02 * logp
    targets = batch.Rn + batch.In * next_value

    def loss(params):
        a, logp = act(params["actor"], batch.S, new_key)
        value = q(jax.lax.stop_gradient(params["critics"]), batch.S, a).min(axis=0)
        td_errors = q(params["critics"], batch.S, batch.A) - targets
        return jnp.mean(td_errors**2) + jnp.mean(0.02 * logp - value)

    updates, opt_state = optimizer.update(jax.grad(loss)(params), opt_state)
    params = optax.apply_updates(params, updates)
    target = optax.incremental_update(params["critics"], target, 0.005)
    return (params, target, opt_state, env, tracing, replay), jnp.mean(transition[2])


env = jnp.full(4, 1.5, jnp.float32), jnp.arange(0, 48, 12, dtype=jnp.int32)
critics = 0.1 * jax.random.normal(jax.random.key(1), (2, 6), jnp.float32)
params = {"actor": jnp.zeros(3, jnp.float32), "critics": critics}
_, transition = step(env, env[0])
tracing, replay = tracer.init(*transition), buffer.init(tracer.spec(*transition))
carry = params, params["critics"], optimizer.init(params), env, tracing, replay
train = jax.jit(lambda carry, keys: jax.lax.scan(train_step, carry, keys))
keys = jax.random.split(jax.random.key(0), 5_000)
(params, *_, replay), rewards = train(carry, keys)
print(f"mean reward: {rewards[:500].mean():.3f} -> {rewards[-500:].mean():.3f}")
