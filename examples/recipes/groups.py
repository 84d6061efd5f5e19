"""Groups of rollouts: a bound on the age of the policy, and tasks by difficulty."""

import jax
import jax.numpy as jnp
import optax

import jaxreplay as jr

num_tasks, group, bound = 512, 16, 4  # 64 rollouts a group in the paper
# A task that its latest groups always solved, or never, is drawn a fifth as often.
band = jr.scores.success_band(0.06, 0.9, outside=0.2)
settings = {"score": band, "decay": 0.5, "online_difficulty_filtering": True}
curriculum = jr.Tasks(num_tasks=num_tasks, **settings)
buffer, optimizer = jr.ReplayBuffer(capacity=1_024), optax.adam(0.1)
# Task t is solved by token answers[t].
answers = jax.random.randint(jax.random.key(0), (num_tasks,), 0, 32)


def roll_out(policy, tasks, version, key):
    """Groups of rollouts of one token; policy: logits [num_tasks, 32]."""
    logp = jax.nn.log_softmax(policy[tasks])  # [B, 32]
    tokens = jax.random.categorical(key, logp[:, None], shape=(len(tasks), group))
    tokens = tokens.astype(jnp.int32)
    rewards = (tokens == answers[tasks][:, None]).astype(jnp.float32)
    rows = {"task": tasks, "tokens": tokens, "rewards": rewards}
    rows["version"] = jnp.full(len(tasks), version, jnp.int32)
    return rows | {"logp": jnp.take_along_axis(logp, tokens, axis=1)}


def train_step(carry, x):
    policy, opt_state, state, replay, counts = carry
    version, key = x
    task_key, rollout_key, draw_key = jax.random.split(key, 3)
    tasks, _ = curriculum.sample(state, task_key, 64)
    rows = roll_out(policy, tasks, version, rollout_key)
    # A group is kept if some of it is right and some of it is wrong.
    state, kept = curriculum.update(state, tasks, rows["rewards"])
    replay = buffer.add(replay, rows, mask=kept)
    # The number of groups of the last four policies.
    counts = jnp.roll(counts, 1).at[0].set(jnp.sum(kept, dtype=jnp.int32))
    newest = jnp.sum(counts, dtype=jnp.int32)
    sample = buffer.sample(replay, draw_key, batch_size=64, max_age=newest)
    items, rewards = sample.items, sample.items["rewards"]
    mean, std = (f(rewards, axis=1, keepdims=True) for f in (jnp.mean, jnp.std))
    advantage = (rewards - mean) / (std + 1e-6)

    def loss(policy):
        logp = jax.nn.log_softmax(policy[items["task"]])
        logp = jnp.take_along_axis(logp, items["tokens"], axis=1)
        ratio = jnp.exp(logp - items["logp"])
        clipped = jnp.clip(ratio, 0.8, 1.2)
        surrogate = jnp.minimum(ratio * advantage, clipped * advantage)
        # The weight is 0 where no group is new enough.
        return -jnp.mean(sample.weights * surrogate.mean(axis=1))

    updates, opt_state = optimizer.update(jax.grad(loss)(policy), opt_state)
    staleness = jnp.where(sample.indices >= 0, version - items["version"], -1)
    carry = optax.apply_updates(policy, updates), opt_state, state, replay, counts
    return carry, (rows["rewards"].mean(), staleness)


policy = jnp.zeros((num_tasks, 32), jnp.float32)
rows = jax.eval_shape(roll_out, policy, jnp.zeros(64, jnp.int32), 0, jax.random.key(0))
counts = jnp.zeros(bound, jnp.int32)
carry = policy, optimizer.init(policy), curriculum.init(), buffer.init(rows), counts
versions = jnp.arange(600, dtype=jnp.int32), jax.random.split(jax.random.key(1), 600)
train = jax.jit(lambda carry, x: jax.lax.scan(train_step, carry, x))
(policy, _, state, replay, _), (rewards, staleness) = train(carry, versions)
solved = jax.nn.softmax(policy)[jnp.arange(num_tasks), answers]
oldest = f"the oldest group: of {staleness.max()} policies ago"
print(f"probability of the answer: 0.03 -> {solved.mean():.2f}; {oldest}")
