"""RLPD: half of each batch comes from data."""

import jax
import jax.numpy as jnp
import optax

import jaxreplay as jr

online, offline = jr.ReplayBuffer(capacity=1_000_000), jr.ReplayBuffer(capacity=2_000)
buffer = jr.Mixture(buffers=(online, offline), shares=(0.5, 0.5))
optimizer, updates_per_step = optax.adam(0.01), 20


def walk(env, key, act):
    """Eight walkers in a corridor of 50 cells. Its end gives 1, and they start anew."""
    action = act(env, key)
    after = jnp.clip(env + 2 * action - 1, 0, 49)
    end = after == 49
    reward, discount = end.astype(jnp.float32), jnp.where(end, 0, jnp.float32(0.99))
    batch = jr.TransitionBatch(
        S=env, A=action, logP=None, Rn=reward, In=discount, S_next=after
    )
    return jnp.where(end, 0, after), batch


def update(carry, batch):
    params, target, opt_state = carry
    next_value = target[:, batch.S_next].max(axis=-1).min(axis=0)  # of two critics
    targets = batch.Rn + batch.In * next_value

    def loss(params):
        return jnp.mean(batch.W * (params[:, batch.S, batch.A] - targets) ** 2)

    updates, opt_state = optimizer.update(jax.grad(loss)(params), opt_state)
    params = optax.apply_updates(params, updates)
    target = optax.incremental_update(params, target, 0.05)
    return (params, target, opt_state), jnp.mean(batch.S)


def at_random(env, key):
    return jax.random.randint(key, (8,), 0, 2, jnp.int32)


def ahead(env, key):  # the expert
    return jnp.ones(8, jnp.int32)


def train_step(carry, key):
    learner, env, replay = carry
    act_key, draw_key = jax.random.split(key)
    env, batch = walk(env, act_key, at_random)
    replay = buffer.add(replay, 0, batch)
    # All online rows come before the offline rows.
    rows = buffer.sample(replay, draw_key, updates_per_step * 256).items
    halves = jax.tree.map(lambda x: x.reshape(2, updates_per_step, 128), rows)
    batches = jax.tree.map(lambda x: x.swapaxes(0, 1).reshape(-1, 256), halves)
    learner, places = jax.lax.scan(update, learner, batches)  # each is half and half
    return (learner, env, replay), places


keys = jax.random.split(jax.random.key(0), 200)
starts = jnp.arange(8, dtype=jnp.int32)
_, data = jax.lax.scan(lambda env, key: walk(env, key, ahead), starts, keys)
data = jax.tree.map(lambda x: x.reshape(-1), data)  # an expert's 1,600 transitions
replay = buffer.add(buffer.init(data), 1, data)
params = jnp.zeros((2, 50, 2), jnp.float32)
carry = (params, params, optimizer.init(params)), starts, replay
train = jax.jit(lambda carry, keys: jax.lax.scan(train_step, carry, keys))
((params, *_), _, replay), places = train(carry, keys)
values = params.min(axis=0).max(axis=-1)[:41:20]
print("values at 0, 20, 40:", *(f"{x:.2f}" for x in values))  # 0.62, 0.75, 0.92
