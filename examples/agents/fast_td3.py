"""FastTD3 (Seo et al. 2025, arXiv:2505.22642): 4,096 environments, batches of 8,192, each observation stored once.

pip install -e '.[examples]'
python examples/agents/fast_td3.py           # 2 seeds, minutes on two CPU cores; draws fast_td3.png
python examples/agents/fast_td3.py --short   # half a minute at most, to see that it runs

As in the authors' code: twin distributional critics (C51), the lower one in targets; smoothed target actions, and
updates of the actor at every second update (TD3); a scale of exploration for each environment, new in each episode;
running normalization of observations; n-step returns; two updates a step. Networks are smaller, rates larger.

A cart with a pole is pushed to a goal, in a wind. The critic sees its state and the wind. The actor sees the state with
noise, and no wind. An episode terminates when the pole falls, and is truncated after 100 steps. The return is about 71
of at most 100, over five seeds.
"""

import argparse
import functools
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import optax
from flax import struct
from tqdm import tqdm

import jaxreplay as jr

NUM_ENVS = 4_096  # of each seed; a step advances all of them, and makes UPDATES updates of the critics
LENGTH = 256  # rows kept of each environment
STORED = "bfloat16"  # dtype of observations, actions and rewards in the buffer
BATCH, UPDATES, ACTOR_EVERY = 8_192, 2, 2
WARMUP, STEPS, INTERVAL = 10, 400, 20
N, GAMMA, TARGET_RATE = 3, 0.97, 0.1
NOISE, SMOOTHING = (0.001, 0.4), 0.001  # scales of exploration, and of the noise of target actions
ATOMS = np.linspace(0, 1 / (1 - GAMMA), 51, dtype=np.float32)  # returns: rewards are in [0, 1]
CRITIC, ACTOR = (64, 32, 16), (64, 32, 16)  # widths
TIME_LIMIT = 100

optimizers = {name: optax.adamw(3e-3, weight_decay=1e-3) for name in ("actor", "critics")}
buffer = jr.SequenceBuffer(length=LENGTH, num_envs=NUM_ENVS, sequence_length=N + 1)


class MLP(nn.Module):
    widths: tuple[int, ...]
    outputs: int
    last: Any = nn.initializers.lecun_normal()

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        for width in self.widths:
            x = nn.relu(nn.Dense(width)(x))
        return nn.Dense(self.outputs, kernel_init=self.last)(x)


actor, critic = MLP(ACTOR, 1, nn.initializers.normal(0.01)), MLP(CRITIC, len(ATOMS))


@struct.dataclass
class Cart:
    x: jax.Array  # [4]: place, speed, angle, angular speed
    goal: jax.Array  # []
    wind: jax.Array  # []
    time: jax.Array  # []


@struct.dataclass
class State:
    env: jr.transitions.AutoresetState
    obs: dict[str, jax.Array]  # [NUM_ENVS, ...]
    noise: jax.Array  # [NUM_ENVS, 1], scale of exploration
    total: jax.Array  # [NUM_ENVS], return of the present episode
    last: jax.Array  # [NUM_ENVS], return of the last episode
    moments: dict[str, jax.Array]  # [3, ...]: sums of 1, x and x^2 over observations
    buffer: Any
    networks: dict[str, Any]  # of the critics leaves [2, ...]
    target_critics: Any
    opt: dict[str, optax.OptState]
    key: jax.Array


def look(key: jax.Array, cart: Cart) -> dict[str, jax.Array]:
    noisy = cart.x + jnp.array([0.02, 0.2, 0.01, 0.2]) * jax.random.normal(key, (4,))
    return {"actor": jnp.append(noisy, cart.goal), "critic": jnp.append(cart.x, jnp.stack([cart.goal, cart.wind]))}


def reset(key: jax.Array) -> tuple[dict[str, jax.Array], Cart]:
    x_key, goal_key, wind_key, obs_key = jax.random.split(key, 4)
    goal, wind = jax.random.uniform(goal_key, minval=-1.0), jax.random.uniform(wind_key, minval=-2.0, maxval=2.0)
    cart = Cart(jax.random.uniform(x_key, (4,), minval=-0.05, maxval=0.05), goal, wind, jnp.int32(0))
    return look(obs_key, cart), cart


def env_step(key: jax.Array, cart: Cart, action: jax.Array) -> tuple:
    """A step of 0.02 s (Barto, Sutton and Anderson 1983, appendix, without friction), with the final observation."""
    reset_key, obs_key = jax.random.split(key)
    _, speed, angle, turn = cart.x
    sin, cos = jnp.sin(angle), jnp.cos(angle)
    push = (10 * action[0] + cart.wind + 0.05 * turn**2 * sin) / 1.1
    turning = (9.8 * sin - cos * push) / (0.5 * (4 / 3 - 0.1 * cos**2 / 1.1))
    speeding = push - 0.05 * turning * cos / 1.1
    cart = cart.replace(x=cart.x + 0.02 * jnp.stack([speed, speeding, turn, turning]), time=cart.time + 1)
    place, _, angle, _ = cart.x
    terminated, truncated = (jnp.abs(place) > 2.4) | (jnp.abs(angle) > 0.21), cart.time >= TIME_LIMIT
    reward, final = jnp.exp(-jnp.abs(place - cart.goal)), look(obs_key, cart)
    obs, cart = jax.tree.map(functools.partial(jnp.where, terminated | truncated), reset(reset_key), (final, cart))
    return obs, cart, reward, terminated, truncated & ~terminated, final


# A final observation becomes a row of its own, without a step: a return that the time limit cuts bootstraps from it.
env = jr.NextStepAutoreset(env_step=env_step)


def cast(rows: Any, dtype: Any) -> Any:
    """`rows` with floats of this dtype."""
    return jax.tree.map(lambda x: x.astype(dtype) if jnp.issubdtype(x.dtype, jnp.floating) else x, rows)


def normalized(moments: dict[str, jax.Array], obs: dict[str, jax.Array]) -> dict[str, jax.Array]:
    def one(moments: jax.Array, x: jax.Array) -> jax.Array:
        mean, square = moments[1:] / moments[0]
        return (x - mean) / (jnp.sqrt(jnp.maximum(square - mean**2, 0)) + 0.01)

    return jax.tree.map(one, moments, obs)


def act(params: Any, obs: dict[str, jax.Array]) -> jax.Array:
    return jnp.tanh(actor.apply(params, obs["actor"]))


def logits(params: Any, obs: dict[str, jax.Array], action: jax.Array) -> jax.Array:
    """Of the returns [2, B, atoms], by each critic."""
    x = jnp.concatenate([obs["critic"], action], axis=-1)
    return jax.vmap(critic.apply, in_axes=(0, None))(params, x)


def interact(state: State) -> tuple[State, dict[str, Any]]:
    """The state after a step of all environments, and its rows [1, NUM_ENVS, ...]."""
    key, noise_key, action_key, env_key = jax.random.split(state.key, 4)
    sums = jax.tree.map(lambda x: jnp.stack([jnp.ones_like(x), x, x**2]).sum(axis=1), state.obs)
    moments = jax.tree.map(jnp.add, state.moments, sums)
    action = act(state.networks["actor"], normalized(moments, state.obs))
    action = jnp.clip(action + state.noise * jax.random.normal(action_key, action.shape), -1, 1)
    keys = jax.random.split(env_key, NUM_ENVS)
    env_state, obs, reward, terminated, truncated, step = jax.vmap(env.step)(state.env, action, keys)
    row = {"obs": state.obs, "action": action, "reward": reward, "step": step}
    row |= {"terminated": terminated, "truncated": truncated}
    done, total = terminated | truncated, state.total + reward
    noise = jnp.where(done[:, None], new_noise(noise_key), state.noise)
    state = state.replace(env=env_state, obs=obs, noise=noise, moments=moments, key=key)
    state = state.replace(total=jnp.where(done, 0.0, total), last=jnp.where(done, total, state.last))
    return state, jax.tree.map(lambda x: x[None], cast(row, STORED))


def new_noise(key: jax.Array) -> jax.Array:
    return jax.random.uniform(key, (NUM_ENVS, 1), minval=NOISE[0], maxval=NOISE[1])


def init(key: jax.Array) -> State:
    key, actor_key, critic_key, env_key, noise_key = jax.random.split(key, 5)
    obs, carts = jax.vmap(reset)(jax.random.split(env_key, NUM_ENVS))
    x = jnp.zeros((1, obs["critic"].shape[1] + 1))
    critics = jax.vmap(critic.init, in_axes=(0, None))(jax.random.split(critic_key), x)
    networks = {"actor": actor.init(actor_key, obs["actor"]), "critics": critics}
    moments = jax.tree.map(lambda x: jnp.zeros((3, x.shape[1])), obs)
    zeros, opt = jnp.zeros(NUM_ENVS), {name: optimizers[name].init(networks[name]) for name in networks}
    autoreset, noise = jax.vmap(env.init)(carts, obs), new_noise(noise_key)
    state = State(autoreset, obs, noise, zeros, zeros, moments, None, networks, critics, opt, key)
    _, rows = jax.eval_shape(interact, state)
    state = state.replace(buffer=buffer.init(rows))
    return jax.lax.scan(lambda state, _: (collect(state), None), state, length=WARMUP)[0]


def collect(state: State) -> State:
    new, rows = interact(state.replace(buffer=None))
    return new.replace(buffer=buffer.add(state.buffer, rows))


def draw(state: State, key: jax.Array) -> jr.TransitionBatch:
    """Transitions [BATCH] of float32. `W` is 0 where the first row holds no step."""
    items = cast(buffer.sample(state.buffer, key, BATCH).items, jnp.float32)
    steps = [items[name] for name in ("obs", "action", "reward", "terminated", "truncated")]
    batch, valid = jr.sequence_transitions(*steps, n=N, gamma=GAMMA, mask=items["step"])
    return batch.replace(W=valid.astype(jnp.float32))


def projected(mass: jax.Array, Rn: jax.Array, In: jax.Array) -> jax.Array:
    """The distribution [B, atoms] of Rn + In * Z, of a Z with these masses (Bellemare et al. 2017, equation 7)."""
    places = (jnp.clip(Rn[:, None] + In[:, None] * ATOMS, ATOMS[0], ATOMS[-1]) - ATOMS[0]) / (ATOMS[1] - ATOMS[0])
    low, rows = jnp.floor(places), jnp.arange(BATCH)[:, None]
    lower, upper = low.astype(jnp.int32), mass * (places - low)
    found = jnp.zeros((BATCH, len(ATOMS) + 1)).at[rows, lower].add(mass - upper).at[rows, lower + 1].add(upper)
    return found[:, :-1]


def learn(state: State, with_actor: bool) -> State:
    key, sample_key, noise_key = jax.random.split(state.key, 3)
    batch = draw(state, sample_key)
    obs, next_obs = (normalized(state.moments, x) for x in (batch.S, batch.S_next))
    noise = jnp.clip(SMOOTHING * jax.random.normal(noise_key, batch.A.shape), -0.5, 0.5)
    next_action = jnp.clip(act(state.networks["actor"], next_obs) + noise, -1, 1)
    mass = nn.softmax(logits(state.target_critics, next_obs, next_action))
    # The critic with the lower value; a projection that clips nothing leaves the order of values as it is.
    lower = jnp.argmin(mass @ ATOMS, axis=0)
    target = projected(mass[lower, jnp.arange(BATCH)], batch.Rn, batch.In)

    def critic_loss(params: Any) -> jax.Array:
        losses = optax.softmax_cross_entropy(logits(params, obs, batch.A), target)
        return jnp.sum(batch.W * losses) / jnp.sum(batch.W)

    def actor_loss(params: Any) -> jax.Array:
        values = nn.softmax(logits(state.networks["critics"], obs, act(params, obs))) @ ATOMS
        return -jnp.sum(batch.W * values.min(axis=0)) / jnp.sum(batch.W)

    def better(name: str, loss: Any, state: State) -> State:
        params = state.networks[name]
        updates, opt = optimizers[name].update(jax.grad(loss)(params), state.opt[name], params)
        networks = state.networks | {name: optax.apply_updates(params, updates)}
        return state.replace(networks=networks, opt=state.opt | {name: opt})

    state = better("critics", critic_loss, state)
    state = better("actor", actor_loss, state) if with_actor else state
    target_critics = optax.incremental_update(state.networks["critics"], state.target_critics, TARGET_RATE)
    return state.replace(target_critics=target_critics, key=key)


def step(state: State) -> State:
    state = collect(state)
    for k in range(UPDATES):
        state = learn(state, with_actor=(k + 1) % ACTOR_EVERY == 0)
    return state


def main() -> np.ndarray:
    """Learning curves [seeds, intervals]."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seed", type=int, default=0, help="base seed (0)")
    parser.add_argument("--seeds", type=int, default=2, help="number of seeds (2)")
    parser.add_argument("--short", action="store_true", help="one seed, half a minute at most; it does not learn")
    args = parser.parse_args()
    seeds, steps, interval = (1, 4, 2) if args.short else (args.seeds, STEPS, INTERVAL)

    keys = jax.random.split(jax.random.key(args.seed), seeds)
    print(jr.memory(buffer, jax.eval_shape(lambda: interact(init(keys[0]))[1])))  # of each seed
    states, curves = jax.jit(jax.vmap(init))(keys), []
    of_interval = functools.partial(jax.lax.scan, lambda x, _: (jax.vmap(step)(x), None), length=interval)
    train = jax.jit(of_interval, donate_argnums=0)
    for _ in tqdm(range(0, steps, interval), unit=f" x {interval} steps"):
        states, _ = train(states)
        curves.append(np.asarray(states.last).mean(axis=1))

    figure, axes = plt.subplots(figsize=(5, 3.5), layout="constrained")
    axes.plot(NUM_ENVS * interval / 1e6 * np.arange(1, len(curves) + 1), curves, color="tab:blue", linewidth=1)
    axes.set(title="FastTD3, a cart in the wind", xlabel="million steps", ylabel="return of the last episodes")
    figure.savefig("fast_td3.png", dpi=150)
    print(f"return of each environment's last episode: {np.mean(curves[-1]):.0f}; by seed: {np.round(curves[-1])}")
    return np.transpose(curves)


if __name__ == "__main__":
    main()
