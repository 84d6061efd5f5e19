"""R2D2: overlapping sequences with stored states, burn-in and priorities."""

import jax
import jax.numpy as jnp
import optax

import jaxreplay as jr

settings = {"sequence_length": 80, "stride": 40, "windows": "cut"}
sampler = jr.Prioritized(alpha=0.9, beta=0.0)
buffer = jr.SequenceBuffer(length=10_000, num_envs=8, sampler=sampler, **settings)


def cell(params, h, obs):
    """The next recurrent state [B, 8] for obs [B, 2], and the values of two actions."""
    h = jnp.tanh(obs @ params["in"] + h @ params["state"])
    return h, h @ params["out"]


def unroll(params, h, obs):  # [B, 8], [B, L, 2] -> [B, 8], [B, L, 2]
    h, q = jax.lax.scan(lambda h, x: cell(params, h, x), h, obs.swapaxes(0, 1))
    return h, q.swapaxes(0, 1)


def step(carry, key):
    """The reward is for the bit that was seen one step ago; episodes have 100 steps."""
    params, h, last, time = carry
    chances = jnp.array([[0.5], [0.5], [0.2]])
    bit, random, explore = jax.random.bernoulli(key, chances, (3, 8))
    obs, end = jnp.stack([bit, ~bit], axis=1).astype(jnp.float32), time == 99
    row = {"obs": obs, "h": h, "terminated": end}
    h, q = cell(params, h, obs)
    row["action"] = jnp.where(explore, random, q[:, 1] > q[:, 0]).astype(jnp.int32)
    row["reward"] = (row["action"] == last).astype(jnp.float32)
    h, time = jnp.where(end[:, None], 0, h), jnp.where(end, 0, time + 1)
    return (params, h, bit.astype(jnp.int32), time), row


def train_step(carry, key):
    (params, *env), target, replay = carry
    act_key, draw_key = jax.random.split(key)
    (_, *env), rows = jax.lax.scan(step, (params, *env), jax.random.split(act_key, 40))
    replay = buffer.add(replay, rows, ends=rows["terminated"])
    sample = buffer.sample(replay, draw_key, batch_size=64)
    before, items = jr.split_burn_in(sample.items, 40)

    def loss(params):
        start = before["h"][:, 0], before["obs"]
        h, h_target = (unroll(x, *start)[0] for x in (params, target))
        values = {"q": unroll(params, jax.lax.stop_gradient(h), items["obs"])[1]}
        values["target"] = unroll(target, h_target, items["obs"])[1]
        rest = [items[x] for x in ("action", "reward", "terminated")]
        no = jnp.zeros((64, 40), bool)  # is truncated
        how = {"n": 5, "gamma": 0.9, "mask": sample.mask[:, 40:]}
        batch, valid = jr.sequence_transitions(values, *rest, no, **how)
        best = jnp.argmax(batch.S_next["q"], axis=1)[:, None]
        next_value = jnp.take_along_axis(batch.S_next["target"], best, axis=1)[:, 0]
        targets = batch.Rn + batch.In * next_value
        chosen = jnp.take_along_axis(batch.S["q"], batch.A[:, None], axis=1)[:, 0]
        td_errors = jax.lax.stop_gradient(targets) - chosen
        td_errors, valid = (x.reshape(64, -1) for x in (td_errors, valid))
        priorities = jr.sequence_priority(td_errors, valid, eta=0.9)
        return jnp.mean(jnp.where(valid, td_errors, 0) ** 2), priorities

    grads, priorities = jax.grad(loss, has_aux=True)(params)
    replay = buffer.update(replay, sample.indices, priorities)
    params = jax.tree.map(lambda x, grad: x - 0.1 * grad, params, grads)
    target = optax.incremental_update(params, target, 0.02)
    return ((params, *env), target, replay), rows["reward"].mean()


keys = jax.random.split(jax.random.key(0), 600)
shapes = {"in": (2, 8), "state": (8, 8), "out": (8, 2)}
params = {
    name: 0.5 * jax.random.normal(keys[0], shape, jnp.float32)
    for name, shape in shapes.items()
}
last, times = jnp.zeros(8, jnp.int32), jnp.arange(8, dtype=jnp.int32) * 12
env = params, jnp.zeros((8, 8), jnp.float32), last, times
rows = jax.eval_shape(lambda: jax.lax.scan(step, env, keys[:40])[1])
carry = env, params, buffer.init(rows)
train = jax.jit(lambda carry, keys: jax.lax.scan(train_step, carry, keys))
carry, rewards = train(carry, keys)
# 0.9 is the most, as a fifth of the actions are random.
print(f"mean reward: {rewards[:10].mean():.2f} -> {rewards[-10:].mean():.2f}")
