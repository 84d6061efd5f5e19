"""DQN: each frame is stored once, and drawn sequences give the stacks."""

import jax
import jax.numpy as jnp
import optax

import jaxreplay as jr

buffer = jr.SequenceBuffer(length=125_000, num_envs=8, sequence_length=5)
optimizer = optax.adam(0.01)


def step(env, action):
    """A corridor. The call after an end only resets: its row is not a step."""
    place, time, over = env
    frame = jax.nn.one_hot(place, 6, dtype=jnp.uint8)
    row = {"frame": frame, "action": action, "step": ~over}
    place = jnp.where(over, 0, jnp.clip(place + 2 * action - 1, 0, 5))
    time = jnp.where(over, 0, time + 1)
    terminated = ~over & (place == 5)
    truncated = ~over & (place < 5) & (time == 10)
    row |= {"terminated": terminated, "truncated": truncated}
    row["reward"] = terminated.astype(jnp.float32)
    rows = jax.tree.map(lambda x: x[None], row)  # [1, 8, ...]
    return (place, time, terminated | truncated), rows


def of_wrapper(frames, ends):  # [B, L, 6], [B, L] -> [B, L - 3, 6, 4]
    """Stacks as of an Atari wrapper, which repeats the first frame of an episode.

    Of its stacks [T, num_envs, 6, 4] store `stacks[..., -1]`, each frame once.
    """
    stacks = jr.stack_frames(frames, ends, 4)
    is_there = jr.stack_frames(jnp.ones_like(ends, jnp.uint8), ends, 4)
    at = jnp.maximum(jnp.arange(4), is_there.argmax(axis=-1, keepdims=True))
    return jnp.take_along_axis(stacks, at[:, :, None], axis=-1)


def q(params, stacks):  # [B, 6, 4] -> [B, 2]
    return stacks.reshape(-1, 24).astype(jnp.float32) @ params


def train_step(carry, key):
    params, target, opt_state, env, replay = carry
    act_key, draw_key = jax.random.split(key)
    action = jax.random.randint(act_key, (8,), 0, 2, jnp.int32)  # your policy acts here
    env, rows = step(env, action)
    replay = buffer.add(replay, rows)
    items = buffer.sample(replay, draw_key, batch_size=32).items  # [32, 5, ...]
    # The stacks of a state and of the next one, each of one episode: [32, 2, 6, 4].
    stacks = jr.stack_frames(items["frame"], ~items["step"], 4)
    names = ("action", "reward", "terminated", "truncated", "step")
    *rest, is_step = (items[name][:, 3:] for name in names)
    batch, valid = jr.sequence_transitions(stacks, *rest, n=1, gamma=0.99, mask=is_step)

    def loss(params):
        targets = batch.Rn + batch.In * jnp.max(q(target, batch.S_next), axis=1)
        values = jnp.take_along_axis(q(params, batch.S), batch.A[:, None], axis=1)[:, 0]
        return jnp.mean(valid * optax.huber_loss(values, targets))

    updates, opt_state = optimizer.update(jax.grad(loss)(params), opt_state)
    params = optax.apply_updates(params, updates)
    target = optax.incremental_update(params, target, 0.01)
    return (params, target, opt_state, env, replay), loss(params)


zeros, params = jnp.zeros(8, jnp.int32), jnp.zeros((24, 2), jnp.float32)
env = zeros, zeros, zeros > 0
carry = params, params, optimizer.init(params), env, buffer.init(step(env, zeros)[1])
train = jax.jit(lambda carry, keys: jax.lax.scan(train_step, carry, keys))
(params, *_, replay), losses = train(carry, jax.random.split(jax.random.key(0), 3_000))
# The stacks on the way: [5, 6, 4].
walk = jax.nn.one_hot(jnp.arange(5)[:, None] - jnp.arange(3, -1, -1), 6, axis=1)
values = q(params, walk).max(axis=1)
print("values on the way:", *(f"{x:.3f}" for x in values))  # 0.961 to 1
