"""DQN with prioritized 10-step replay on CartPole, four seeds in one scan; needs `pip install -e '.[examples]'`."""

import flax.linen as nn
import gymnax
import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import optax
from flax.training.train_state import TrainState
from gymnax.wrappers import LogWrapper

import jaxreplay as jr

STEPS, ENVS, SEEDS = 8_000, 16, 4
env = LogWrapper(gymnax.make("CartPole-v1")[0])
network = nn.Sequential([nn.Dense(64), nn.relu, nn.Dense(64), nn.relu, nn.Dense(2)])
# Values [B, 2] of both actions, from parameters and observations.
q = network.apply
epsilon = optax.linear_schedule(1.0, 0.01, STEPS // 10)
learning_rate = optax.linear_schedule(2e-3, 1e-4, STEPS)
tracer = jr.NStep(n=10, gamma=0.99, num_envs=ENVS)
buffer = jr.ReplayBuffer(capacity=32_768, sampler=jr.Prioritized(alpha=0.6, beta=0.4))


def interact(key, obs, envs, action):
    keys = jax.random.split(key, ENVS)
    next_obs, envs, reward, _, _, info = jax.vmap(env.step)(keys, envs, action)
    # After an end next_obs is of the next episode; a transition needs the final one.
    end = info["terminated"], info["truncated"], info["final_observation"]
    return next_obs, envs, (obs, action, reward, *end), info["returned_episode_returns"]


def loss(params, old_params, batch):
    target = batch.Rn + batch.In * q(old_params, batch.S_next).max(axis=1)
    value = jnp.take_along_axis(q(params, batch.S), batch.A[:, None], axis=1)
    td_errors = target - value[:, 0]
    return jnp.mean(batch.W * optax.huber_loss(td_errors)), td_errors


def train_step(carry, t):
    obs, envs, agent, old_params, tracing, replay, key = carry
    key, random_key, explore_key, env_key, sample_key = jax.random.split(key, 5)
    greedy = q(agent.params, obs).argmax(axis=1)
    explore = jax.random.bernoulli(explore_key, epsilon(t), (ENVS,))
    action = jnp.where(explore, jax.random.randint(random_key, (ENVS,), 0, 2), greedy)
    obs, envs, step, returns = interact(env_key, obs, envs, action)
    tracing, transitions, _ = tracer.add(tracing, *step)
    replay = buffer.add(replay, transitions)

    sample = buffer.sample(replay, sample_key, batch_size=128)
    learn = jax.grad(loss, has_aux=True)
    grads, td_errors = learn(agent.params, old_params, sample.items)
    replay = buffer.update(replay, sample.indices, td_errors)
    agent = agent.apply_gradients(grads=grads)
    old_params = optax.incremental_update(agent.params, old_params, 0.05)
    return (obs, envs, agent, old_params, tracing, replay, key), returns.mean()


def train(key):
    key, params_key, env_key = jax.random.split(key, 3)
    obs, envs = jax.vmap(env.reset)(jax.random.split(env_key, ENVS))
    params = network.init(params_key, obs)
    agent = TrainState.create(apply_fn=q, params=params, tx=optax.adam(learning_rate))
    step = interact(key, obs, envs, jnp.zeros(ENVS, int))[2]
    tracing, replay = tracer.init(*step), buffer.init(tracer.spec(*step))
    carry = (obs, envs, agent, params, tracing, replay, key)
    return jax.lax.scan(train_step, carry, jnp.arange(STEPS))[1]


returns = jax.jit(jax.vmap(train))(jax.random.split(jax.random.key(0), SEEDS))
print("mean return of the last 16 episodes, by seed:", returns[:, -1])
# mean return of the last 16 episodes, by seed: [...]
plt.legend(plt.plot(returns.T), range(SEEDS), title="seed")
plt.gca().set(title="CartPole's return: 500 is best", xlabel="steps of 16 environments")
plt.savefig("quickstart.png")
