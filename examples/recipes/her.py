"""HER: goals that were reached later in the episode."""

import jax
import jax.numpy as jnp
import optax

import jaxreplay as jr

bits = 16
settings = {"sequence_length": 2, "windows": "inside", "hindsight": True}
buffer = jr.SequenceBuffer(length=62_500, num_envs=16, **settings)


def solved(achieved, goal):  # of one row
    return jnp.all(achieved == goal)


def reward(achieved, goal):
    return jnp.where(solved(achieved, goal), 0, -1).astype(jnp.float32)


def q(params, state, goal):
    """Values [B, bits] of flipping each bit, linear in the set of bits that differ."""
    signs = jnp.where(state ^ goal, 1, -1).astype(jnp.float32)
    return signs @ params["w"] + params["b"]


def step(carry, x):
    state, goal = carry
    time, key = x
    action = jax.random.randint(key, (16,), 0, bits, jnp.int32)  # your policy acts here
    row = {"achieved_goal": state, "desired_goal": goal, "action": action}
    state ^= jnp.arange(bits) == action[:, None]
    row["reward"] = jax.vmap(reward)(state, goal)
    row["terminated"] = jax.vmap(solved)(state, goal)
    row["truncated"] = jnp.full(16, time == bits - 1)
    return (state, goal), row | {"step": jnp.full(16, time < bits)}


def play(key):  # 16 episodes of 16 flips; the row of a final state is not a step
    start = jax.random.bernoulli(key, 0.5, (2, 16, bits))
    times = jnp.arange(bits + 1), jax.random.split(key, bits + 1)
    return jax.lax.scan(step, (*start,), times)[1]


def train_step(carry, key):
    params, target, replay = carry
    act_key, draw_key, later_key, goal_key = jax.random.split(key, 4)
    rows = play(act_key)
    replay = buffer.add(replay, rows, ends=~rows["step"])
    # Pairs of rows in one episode, and a later row of it: the strategy "future".
    sample = buffer.sample(replay, draw_key, batch_size=128)
    later, steps = buffer.later(replay, later_key, sample.indices)
    goals = later["achieved_goal"]
    how = {"share": 0.8, "mask": steps > 0, "terminated": solved}
    rows, _ = jr.hindsight(goal_key, sample.items, goals, reward, **how)
    seen = rows["achieved_goal"], rows["desired_goal"]
    names = ("action", "reward", "terminated", "truncated", "step")
    *rest, is_step = (rows[name] for name in names)
    batch, valid = jr.sequence_transitions(seen, *rest, n=1, gamma=0.98, mask=is_step)
    targets = batch.Rn + batch.In * q(target, *batch.S_next).max(axis=1)

    def loss(params):
        values = jnp.take_along_axis(q(params, *batch.S), batch.A[:, None], axis=1)
        return jnp.mean(valid * (values[:, 0] - targets) ** 2)

    error, grads = jax.value_and_grad(loss)(params)
    params = jax.tree.map(lambda x, grad: x - 0.03 * grad, params, grads)
    return (params, optax.incremental_update(params, target, 0.05), replay), error


keys = jax.random.split(jax.random.key(0), 3_000)
params = {"w": jnp.zeros((bits, bits), jnp.float32), "b": jnp.zeros(bits, jnp.float32)}
carry = params, params, buffer.init(play(keys[0]))
train = jax.jit(lambda carry, keys: jax.lax.scan(train_step, carry, keys))
(params, *_), errors = train(carry, keys)
values = q(params, jnp.arange(bits) == 3, jnp.zeros(bits, bool))[:6]
print("bit 3 is wrong; values of flips of bits 0 to 5:", *(f"{x:.2f}" for x in values))
