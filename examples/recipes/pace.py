"""Slow rollouts: a learner that waits for them, or that discards late ones."""

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jaxreplay as jr

num_tasks, group, in_flight, bound, num_seeds = 128, 8, 64, 4, 16
is_slow = jnp.arange(num_tasks) % 2 == 1
sampler, optimizer = jr.Uniform(replacement=False), optax.adam(0.1)
buffer = jr.ReplayBuffer(capacity=1_024, sampler=sampler, max_uses=1)  # each group once
# Task t is solved by token answers[t]. The slow tasks are the hard ones.
answers = jax.random.randint(jax.random.key(0), (num_tasks,), 0, 32)
first_logits = jnp.where(is_slow, 0.0, 2.0)[:, None] * jax.nn.one_hot(answers, 32)


def roll_out(policy, tasks, version, key):
    """Groups of rollouts of one token; policy: logits [num_tasks, 32]."""
    logp = jax.nn.log_softmax(policy[tasks])  # [B, 32]
    tokens = jax.random.categorical(key, logp[:, None], shape=(len(tasks), group))
    tokens = tokens.astype(jnp.int32)
    rewards = (tokens == answers[tasks][:, None]).astype(jnp.float32)
    rows = {"task": tasks, "tokens": tokens, "rewards": rewards}
    rows["version"] = jnp.full(len(tasks), version, jnp.int32)
    return rows | {"logp": jnp.take_along_axis(logp, tokens, axis=1)}


def loss(policy, items, weights):
    rewards = items["rewards"]
    mean, std = (f(rewards, axis=1, keepdims=True) for f in (jnp.mean, jnp.std))
    advantage = (rewards - mean) / (std + 1e-6)
    logp = jax.nn.log_softmax(policy[items["task"]])
    logp = jnp.take_along_axis(logp, items["tokens"], axis=1)
    ratio = jnp.exp(logp - items["logp"])
    surrogate = jnp.minimum(ratio * advantage, jnp.clip(ratio, 0.8, 1.2) * advantage)
    return -jnp.sum(weights * surrogate.mean(axis=1)) / jnp.maximum(weights.sum(), 1)


def train(discards, waits, key, ticks=800):
    """Rollouts of fast tasks need a tick, of slow tasks 16."""

    def tick(carry, key):
        policy, opt_state, replay, flight, left, version, cursor = carry
        rollout_key, draw_key = jax.random.split(key)
        left = left - 1
        done, lag = left == 0, version - flight["version"]
        kept = done & ((lag <= bound) | ~discards)
        replay = buffer.add(replay, flight, mask=kept)
        # The next tasks of the list start where rollouts are done.
        tasks = (cursor + jnp.cumsum(done, dtype=jnp.int32)) % num_tasks
        new = roll_out(policy, tasks, version, rollout_key)
        flight = jax.tree.map(lambda *x: jax.vmap(jnp.where)(done, *x), new, flight)
        left = jnp.where(done, jnp.where(is_slow[tasks], 16, 1), left)
        cursor = (cursor + jnp.sum(done, dtype=jnp.int32)) % num_tasks
        # The learner waits while an update would make a rollout in flight too old.
        in_time = version - flight["version"].min() < bound
        ready = buffer.can_sample(replay, 8) & (in_time | ~waits)
        # All new groups; rows without a group have weight 0.
        sample = buffer.sample(replay, draw_key, batch_size=2 * in_flight)
        grads = jax.grad(loss)(policy, sample.items, sample.weights)
        updates, new_state = optimizer.update(grads, opt_state)
        old = policy, opt_state
        updated = optax.apply_updates(policy, updates), new_state
        policy, opt_state = jax.tree.map(lambda *x: jnp.where(ready, *x), updated, old)
        learned = jnp.where(ready, sample.indices, -1)
        staleness = jnp.where(learned >= 0, version - sample.items["version"], -1)
        replay = buffer.update(replay, learned, jnp.zeros(2 * in_flight))
        version = version + ready
        solved = jax.nn.softmax(policy)[jnp.arange(num_tasks), answers]
        log = {"fast": solved[::2].mean(), "slow": solved[1::2].mean()}
        log |= {"staleness": staleness.max(), "updates": version}
        log["learned"] = jnp.sum(learned >= 0, dtype=jnp.int32)
        return (policy, opt_state, replay, flight, left, version, cursor), log

    first_key, key = jax.random.split(key)
    tasks, now = jnp.arange(in_flight, dtype=jnp.int32), jnp.int32(0)
    flight = roll_out(first_logits, tasks, now, first_key)
    left = jnp.where(is_slow[tasks], 16, 1)
    opt_state, replay = optimizer.init(first_logits), buffer.init(flight)
    carry = first_logits, opt_state, replay, flight, left, now, tasks[-1]
    return jax.lax.scan(tick, carry, jax.random.split(key, ticks))[1]


# Whether it discards late groups, and whether it waits so that none is late.
rules = ("discards", True, False), ("keeps all", False, False), ("waits", False, True)
keys = jax.random.split(jax.random.key(1), num_seeds)
of_seeds, logs = jax.jit(jax.vmap(train, in_axes=(None, None, 0))), {}
print("learner    fast tasks  slow tasks  groups  updates  oldest")
for name, *learner in rules:
    log = logs[name] = jax.tree.map(np.asarray, of_seeds(*learner, keys))
    fast, slow, updates = (log[x][:, -1].mean() for x in ("fast", "slow", "updates"))
    groups, oldest = log["learned"].sum(axis=1).mean(), log["staleness"].max()
    print(f"{name:9}{fast:12.3f}{slow:12.3f}{groups:8.0f}{updates:9.0f}{oldest:8}")
