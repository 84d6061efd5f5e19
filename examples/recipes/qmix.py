"""QMIX: an item is an episode of all agents."""

import jax
import jax.numpy as jnp
import optax

import jaxreplay as jr

buffer, optimizer = jr.ReplayBuffer(capacity=5_000), optax.adam(0.02)
# Payoffs of [state, action, action].
payoffs = jnp.array([[[7.0, 7.0], [7.0, 7.0]], [[0.0, 1.0], [1.0, 8.0]]], jnp.float32)


def play(key):
    """Episodes [8, 2, ...]; the first agent's action chooses the second state."""
    # [episode, step, agent]: your policies act here.
    actions = jax.random.randint(key, (8, 2, 2), 0, 2, jnp.int32)
    states = jnp.stack([jnp.zeros(8, jnp.int32), 1 + actions[:, 0, 0]], axis=1)
    last = payoffs[actions[:, 0, 0], actions[:, 1, 0], actions[:, 1, 1]]
    rewards = jnp.stack([jnp.zeros(8, jnp.float32), last], axis=1)
    ends = jnp.array([[False, True]] * 8)
    return {"state": states, "actions": actions, "reward": rewards, "terminated": ends}


def q_total(params, states, chosen):
    """The joint value [B, 2], increasing in the value of each agent [B, 2, agents]."""
    w1, w2 = jnp.abs(params["w1"][states]), jnp.abs(params["w2"][states])
    inner = jnp.einsum("bta,btah->bth", chosen, w1) + params["b1"][states]
    return jnp.sum(jax.nn.elu(inner) * w2, axis=-1) + params["b2"][states]


def train_step(carry, key):
    params, target, opt_state, replay = carry
    play_key, draw_key = jax.random.split(key)
    replay = buffer.add(replay, play(play_key))
    # 32 episodes, with the steps of all agents in each.
    items = buffer.sample(replay, draw_key, batch_size=32).items
    agents = jnp.arange(2)
    best = q_total(target, items["state"], target["q"][items["state"]].max(axis=-1))
    following = jnp.concatenate([best[:, 1:], jnp.zeros((32, 1), best.dtype)], axis=1)
    targets = items["reward"] + 0.99 * jnp.where(items["terminated"], 0, following)

    def loss(params):
        chosen = params["q"][items["state"][..., None], agents, items["actions"]]
        joint = q_total(params, items["state"], chosen)  # from [32, 2, agents]
        return jnp.mean((joint - targets) ** 2)

    error, grads = jax.value_and_grad(loss)(params)
    updates, opt_state = optimizer.update(grads, opt_state)
    params = optax.apply_updates(params, updates)
    target = optax.incremental_update(params, target, 0.05)
    return (params, target, opt_state, replay), error


keys = jax.random.split(jax.random.key(0), 3_000)
# A table for each of 3 states.
shapes = {"q": (3, 2, 2), "w1": (3, 2, 8), "b1": (3, 8), "w2": (3, 8), "b2": (3,)}
params = {
    name: 0.5 * jax.random.normal(keys[i], shapes[name], jnp.float32)
    for i, name in enumerate(shapes)
}
carry = params, params, optimizer.init(params), buffer.init(play(keys[0]))
train = jax.jit(lambda carry, keys: jax.lax.scan(train_step, carry, keys))
(params, *_, replay), errors = train(carry, keys)
first = jnp.argmax(params["q"][0, 0])
second = jnp.argmax(params["q"][1 + first], axis=-1)
print("reward of the greedy agents:", payoffs[first, *second])  # 8
