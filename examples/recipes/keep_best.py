"""Keep the best: episodes of the highest returns are kept and imitated."""

import jax
import jax.numpy as jnp
import optax

import jaxreplay as jr

STEPS, EPISODES = 400, 16
# A lock of 16 digits. The return counts the digits before the first wrong one.
code = jax.random.randint(jax.random.key(0), (16,), 0, 4)
# The 32 best of the run, drawn by rank. Staleness would draw old ones more often.
best = jr.Levels(capacity=32, temperature=1.0, staleness=0.0)
optimizer = optax.adam(0.03)
cross_entropy = optax.softmax_cross_entropy_with_integer_labels


def play(policy, key):
    actions = jax.random.categorical(key, policy, shape=(EPISODES, 16))
    right = jnp.cumprod(actions == code, axis=1)
    return {"actions": actions}, right.sum(axis=1).astype(jnp.float32)


def train_step(carry, key):
    policy, moments, kept = carry
    play_key, draw_key = jax.random.split(key)
    episodes, returns = play(policy, play_key)
    # An episode is stored if its return exceeds the lowest one that is kept.
    kept, _ = best.insert(kept, episodes, returns)
    kept, _, drawn = best.sample(kept, draw_key, 32)

    def loss(policy):
        logits = jnp.broadcast_to(policy, (32, *policy.shape))
        return cross_entropy(logits, drawn["actions"]).mean()

    updates, moments = optimizer.update(jax.grad(loss)(policy), moments)
    lowest = kept.scores.min()
    return (policy + updates, moments, kept), (returns.mean(), lowest)


policy = jnp.zeros((16, 4), jnp.float32)
kept = best.init(jax.tree.map(lambda x: x[0], play(policy, jax.random.key(1))[0]))
keys = jax.random.split(jax.random.key(2), STEPS)
carry = policy, optimizer.init(policy), kept
train = jax.jit(lambda carry, keys: jax.lax.scan(train_step, carry, keys))
(policy, _, kept), (rewards, lowest) = train(carry, keys)
print("mean return, every 50 steps:", *(f"{x:.1f}" for x in rewards[::50]))
print("lowest return that is kept:", *(f"{x:.0f}" for x in lowest[::50]))
