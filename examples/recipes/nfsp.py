"""NFSP: the average policy is learned from a reservoir of the whole run."""

import jax
import jax.numpy as jnp

import jaxreplay as jr

# M_RL of the paper, there 200,000: transitions.
newest = jr.ReplayBuffer(capacity=2_000)
# M_SL, there 2,000,000: best responses of all of the run.
everything = jr.ReservoirBuffer(capacity=20_000)
# For the row's player: rock beats scissors for 2.
payoff = jnp.array([[0, -1, 2], [1, 0, -1], [-2, 1, 0]], jnp.float32)


def play(values, logits, key):
    """Sixty-four games between two players that share what they learn."""
    best_key, policy_key, explore_key, random_key = jax.random.split(key, 4)
    best = jax.random.bernoulli(best_key, 0.1, (64, 2))  # the anticipatory parameter
    explore = jax.random.bernoulli(explore_key, 0.06, (64, 2))
    random = jax.random.randint(random_key, (64, 2), 0, 3)
    response = jnp.where(explore, random, jnp.argmax(values))
    average = jax.random.categorical(policy_key, logits, shape=(64, 2))
    action = jnp.where(best, response, average).astype(jnp.int32)
    rows = {"action": action, "reward": payoff[action, action[:, ::-1]]}
    return jax.tree.map(jnp.ravel, (rows, best))  # [128]


def train_step(carry, key):
    values, logits, ring, reservoir = carry  # of three actions
    play_key, add_key, *draw_keys = jax.random.split(key, 4)
    rows, best = play(values, logits, play_key)
    ring = newest.add(ring, rows)
    # Best responses alone.
    reservoir = everything.add(reservoir, rows["action"], add_key, mask=best)

    def value_loss(values):
        items = newest.sample(ring, draw_keys[0], batch_size=128).items
        return jnp.mean((items["reward"] - values[items["action"]]) ** 2)

    def policy_loss(logits):
        sample = everything.sample(reservoir, draw_keys[1], batch_size=128)
        return -jnp.mean(sample.weights * jax.nn.log_softmax(logits)[sample.items])

    values -= 0.3 * jax.grad(value_loss)(values)
    logits -= 0.3 * jax.grad(policy_loss)(logits)
    return (values, logits, ring, reservoir), jax.nn.softmax(logits)


keys = jax.random.split(jax.random.key(0), 20_000)
values = logits = jnp.zeros(3, jnp.float32)
rows, _ = play(values, logits, keys[0])
carry = values, logits, newest.init(rows), everything.init(rows["action"])
train = jax.jit(lambda carry, keys: jax.lax.scan(train_step, carry, keys))
carry, policies = train(carry, keys)
# In equilibrium it is 0.25, 0.50, 0.25.
print("average policy:", *(f"{x:.2f}" for x in policies[-1]))
