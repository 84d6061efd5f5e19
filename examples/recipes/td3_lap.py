"""TD3 with LAP: priorities with a floor, and a Huber loss instead of weights."""

import jax
import jax.numpy as jnp
import optax

import jaxreplay as jr

settings = {"floor": 1.0, "max_priority": "stored"}
sampler = jr.Prioritized(alpha=0.4, beta=0.0, epsilon=0.0, **settings)
buffer = jr.ReplayBuffer(capacity=1_000_000, sampler=sampler)
optimizer = optax.adam(3e-3)


def act(actor, s, noise):
    return jnp.clip(jnp.tanh(actor[0] * s + actor[1]) + noise, -1, 1)


def q(critics, s, a):  # of two critics, [2, B]
    return critics @ jnp.stack([jnp.ones_like(s), s, a, s * s, s * a, a * a])


def gather(actor, key):
    """Eight steps of a cart on a line; with a tracer as in sac.py if episodes end."""
    s, noise = jax.random.uniform(key, (2, 8), jnp.float32, -2, 2)
    a = act(actor, s, 0.1 * noise)
    after = jnp.clip(s + 0.5 * a, -2, 2)
    discount = jnp.full(8, 0.99, jnp.float32)
    return jr.TransitionBatch(
        S=s, A=a, logP=None, Rn=-(after**2), In=discount, S_next=after
    )


def train_step(carry, key):
    params, target, opt_state, replay = carry
    act_key, draw_key, next_key = jax.random.split(key, 3)
    replay = buffer.add(replay, gather(params["actor"], act_key))
    sample = buffer.sample(replay, draw_key, batch_size=256)
    batch = sample.items
    noise = 0.2 * jax.random.normal(next_key, (256,), jnp.float32)
    a_next = act(target["actor"], batch.S_next, jnp.clip(noise, -0.5, 0.5))
    next_value = q(target["critics"], batch.S_next, a_next).min(axis=0)
    targets = batch.Rn + batch.In * next_value

    def loss(params):
        td_errors = q(params["critics"], batch.S, batch.A) - targets
        losses = optax.huber_loss(td_errors, delta=1.0)  # delta is the floor
        critics = jax.lax.stop_gradient(params["critics"])
        value = q(critics, batch.S, act(params["actor"], batch.S, 0.0))[0]
        return jnp.mean(losses) - jnp.mean(value), td_errors

    grads, td_errors = jax.grad(loss, has_aux=True)(params)
    larger = jnp.abs(td_errors).max(axis=0)  # of the two critics
    replay = buffer.update(replay, sample.indices, larger)
    updates, opt_state = optimizer.update(grads, opt_state)
    params = optax.apply_updates(params, updates)
    target = optax.incremental_update(params, target, 0.005)
    return (params, target, opt_state, replay), jnp.mean(batch.Rn)


keys = jax.random.split(jax.random.key(0), 3_000)
critics = 0.1 * jax.random.normal(keys[0], (2, 6), jnp.float32)
params = {"actor": jnp.zeros(2, jnp.float32), "critics": critics}
replay = buffer.init(gather(params["actor"], keys[0]))
carry = params, params, optimizer.init(params), replay
train = jax.jit(lambda carry, keys: jax.lax.scan(train_step, carry, keys))
(params, *_, replay), rewards = train(carry, keys)
actions = act(params["actor"], jnp.array([-1.0, 1.0]), 0.0)
print("actions at -1 and 1:", *(f"{x:.2f}" for x in actions))
