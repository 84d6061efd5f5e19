"""Can one jitted program train 64 settings of a DQN with prioritized replay, several seeds of each?

Yes, and it compiles once, where a program for each setting compiles each time.

pip install -e '.[examples]'
python examples/studies/sweep.py           # 64 settings, 6 seeds of each
python examples/studies/sweep.py --short   # half a minute at most, to see that it runs

The settings are all combinations of four values of alpha and of n, two learning rates, and one or two updates per step.
`jax.vmap` maps the training over them, so each must be a traced array:

- alpha: `state.sampler.alpha`, an array of the state, replaced before the first `add`.
- n: `jr.sequence_transitions(..., n=n, max_n=N[-1])`; each drawn sequence has the rows for the largest n.
- the learning rate: an optax optimizer that is made from a traced number.
- the number of updates: every lane makes the most updates, and masks those that its setting leaves out.

The task is Catch: a ball falls for nine steps, and the reward follows at the end.

The best setting, chosen on the same seeds, reaches 0.91 [0.89, 0.93] of 1.
"""

import dataclasses
import itertools
import time
from collections import namedtuple
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import gymnax
import jax
import jax.numpy as jnp
import numpy as np
import optax
from experiment import Parser, plot, report
from flax import struct

import jaxreplay as jr

ALPHA, N = (0.0, 0.3, 0.6, 0.9), (1, 2, 4, 8)
LEARNING_RATE, UPDATES = (5e-4, 2e-3), (1, 2)
BATCH, WIDTH, GAMMA, TARGET_RATE = 32, 32, 0.99, 0.02
EPSILON, EXPLORATION = 0.05, 0.2  # fraction of the steps in which epsilon falls from 1
PER = jr.Prioritized()
SETTINGS = [*itertools.product(ALPHA, N, LEARNING_RATE, UPDATES)]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """Settings that shape the arrays, the same for all. One step advances each environment once."""

    steps: int
    task: str = "Catch-bsuite"
    num_envs: int = 4
    warmup: int = 100  # steps with random actions before the first update
    length: int = 1_024  # steps kept per environment
    max_n: int = N[-1]  # the largest of all settings
    max_updates: int = UPDATES[-1]
    sampler: jr.samplers.Sampler = PER
    swap: int = 0  # if not 0, the first and the last action change places whenever this many steps have passed


# The values that are swept: numbers, or arrays with an axis for `jax.vmap`. Without alpha the buffer has none, or its
# own. A `max_age` restricts draws to the newest sequences of each environment. A `half_life` needs a sampler with one.
Setting = namedtuple("Setting", "alpha n learning_rate updates max_age half_life", defaults=(None, None))


@struct.dataclass
class State:
    env: jr.transitions.AutoresetState
    obs: jax.Array  # [num_envs, ...], bool for Catch
    buffer: Any
    params: Any
    target_params: Any
    opt: optax.OptState


def make_train(config: Config) -> Callable[..., jax.Array]:
    """A function of a key and a `Setting`: the mean return of the episodes that end in the second half of the run."""
    env, env_params = gymnax.make(config.task)
    hidden = [nn.Dense(WIDTH), nn.relu, nn.Dense(WIDTH), nn.relu]
    network = nn.Sequential(
        [lambda obs: obs.reshape(len(obs), -1).astype(jnp.float32), *hidden, nn.Dense(env.num_actions)]
    )
    sizes = {"length": config.length, "num_envs": config.num_envs, "sequence_length": config.max_n + 1}
    buffer = jr.SequenceBuffer(**sizes, sampler=config.sampler)

    def seen(obs: jax.Array) -> jax.Array:
        return obs > 0 if config.task == "Catch-bsuite" else obs

    def env_step(key: jax.Array, env_state: Any, action: jax.Array) -> tuple:
        obs, env_state, reward, terminated, truncated, info = env.step(key, env_state, action, env_params)
        return seen(obs), env_state, reward, terminated, truncated, seen(info["final_observation"])

    env_rows = jr.NextStepAutoreset(env_step=env_step)  # with rows for final observations

    def init(key: jax.Array, setting: Setting) -> State:
        params_key, env_key = jax.random.split(key)
        obs, env_state = jax.vmap(env.reset, in_axes=(0, None))(jax.random.split(env_key, config.num_envs), env_params)
        obs = seen(obs)
        env_state = jax.vmap(env_rows.init)(env_state, obs)
        flags = dict.fromkeys(("terminated", "truncated", "step"), jnp.zeros(config.num_envs, bool))
        row = {"obs": obs, "action": jnp.zeros(config.num_envs, jnp.int32), "reward": jnp.zeros(config.num_envs)}
        rows = jax.tree.map(lambda x: x[None], row | flags)
        replay = buffer.init(rows)
        if setting.alpha is not None:
            replay = replay.replace(sampler=replay.sampler.replace(alpha=setting.alpha))
        if setting.half_life is not None:
            tree = replay.sampler.tree
            tree = tree.replace(fading=tree.fading.replace(half_life=setting.half_life))
            replay = replay.replace(sampler=replay.sampler.replace(tree=tree))
        params = network.init(params_key, obs)
        return State(env_state, obs, replay, params, params, optax.adam(1.0).init(params))

    def act(state: State, key: jax.Array, epsilon: jax.Array | float, t: jax.Array | int = 0) -> tuple[State, Any]:
        """The state after step t; rewards [num_envs], and True if an episode ended."""
        explore_key, action_key, env_key = jax.random.split(key, 3)
        greedy = jnp.argmax(network.apply(state.params, state.obs), axis=-1).astype(jnp.int32)
        random = jax.random.randint(action_key, greedy.shape, 0, env.num_actions)
        action = jnp.where(jax.random.uniform(explore_key, greedy.shape) < epsilon, random, greedy)
        keys = jax.random.split(env_key, config.num_envs)
        swapped = t // config.swap % 2 == 1 if config.swap else False
        done = jnp.where(swapped, env.num_actions - 1 - action, action)
        env_state, obs, reward, terminated, truncated, step = jax.vmap(env_rows.step)(state.env, done, keys)
        row = {"obs": state.obs, "action": action, "reward": reward}
        row |= {"terminated": terminated, "truncated": truncated, "step": step}
        replay = buffer.add(state.buffer, jax.tree.map(lambda x: x[None], row))
        return state.replace(env=env_state, obs=obs, buffer=replay), (reward, terminated | truncated)

    def learn(state: State, key: jax.Array, setting: Setting, masked: jax.Array | bool) -> State:
        """One update; it changes nothing where `masked`."""
        restricted = {} if setting.max_age is None else {"max_age": setting.max_age}
        sample = buffer.sample(state.buffer, key, BATCH, **restricted)
        items, rows = sample.items, jnp.arange(BATCH)
        columns = [items[name] for name in ("obs", "action", "reward", "terminated", "truncated")]
        how = {"n": setting.n, "max_n": config.max_n, "gamma": GAMMA}
        batch, valid = jr.sequence_transitions(*columns, **how, mask=items["step"])
        best = jnp.argmax(network.apply(state.params, batch.S_next), axis=-1)
        target = batch.Rn + batch.In * network.apply(state.target_params, batch.S_next)[rows, best]

        def loss_fn(params: Any) -> tuple[jax.Array, jax.Array]:
            td_errors = jnp.where(valid, target - network.apply(params, batch.S)[rows, batch.A], 0.0)
            return jnp.mean(sample.weights * optax.huber_loss(td_errors)), td_errors

        grads, td_errors = jax.grad(loss_fn, has_aux=True)(state.params)
        updates, opt = optax.adam(setting.learning_rate).update(grads, state.opt)
        params = optax.apply_updates(state.params, updates)
        target_params = optax.incremental_update(params, state.target_params, TARGET_RATE)
        # The handle -1 names nothing. The storage itself is never selected, which would copy it.
        replay = buffer.update(state.buffer, jnp.where(masked, -1, sample.indices), td_errors)
        old, new = (state.params, state.target_params, state.opt), (params, target_params, opt)
        return State(state.env, state.obs, replay, *jax.tree.map(lambda x, y: jnp.where(masked, x, y), old, new))

    explore = optax.linear_schedule(1.0, EPSILON, int(EXPLORATION * config.steps))

    def train(key: jax.Array, setting: Setting) -> jax.Array:
        def step(state: State, t: jax.Array) -> tuple[State, Any]:
            keys = jax.random.split(jax.random.fold_in(key, t), 1 + config.max_updates)
            state, result = act(state, keys[0], explore(t), t)

            def update(state: State, k: jax.Array) -> tuple[State, None]:
                return learn(state, keys[1 + k], setting, k >= setting.updates), None

            return jax.lax.scan(update, state, jnp.arange(config.max_updates))[0], result

        keys = jax.random.split(jax.random.fold_in(key, config.steps), 1 + config.warmup)
        state, _ = jax.lax.scan(lambda state, key: act(state, key, 1.0), init(keys[0], setting), keys[1:])
        _, (rewards, ends) = jax.lax.scan(step, state, jnp.arange(config.steps))
        half = config.steps // 2
        return jnp.sum(rewards[half:]) / jnp.maximum(jnp.sum(ends[half:]), 1)

    return train


def timed(train: Callable[..., jax.Array], *arguments: Any) -> tuple[np.ndarray, str]:
    """The result of a jitted function, and the seconds of its compilation and of its run."""
    start = time.perf_counter()
    compiled = jax.jit(train).lower(*arguments).compile()
    middle = time.perf_counter()
    result = np.asarray(compiled(*arguments))
    return result, f"compile {middle - start:.1f} s, run {time.perf_counter() - middle:.1f} s"


def sweep(config: Config, keys: jax.Array, settings: Setting) -> tuple[np.ndarray, str]:
    """Returns [settings, seeds] of one program for all, and its times."""
    lanes = jax.vmap(jax.vmap(make_train(config), in_axes=(0, None)), in_axes=(None, 0))
    return timed(lanes, keys, settings)


def main() -> None:
    args = Parser("64 settings of a DQN on Catch, several seeds of each, in one jitted program.", seeds=6).parse()
    config = Config(steps=40 if args.short else 1_000)
    returns, times = sweep(config, args.keys, Setting(*map(jnp.array, zip(*SETTINGS, strict=True))))
    print(f"one program: {times}")
    names = ["alpha {:g}, n {}, learning_rate {:g}, updates {}".format(*setting) for setting in SETTINGS]
    best = returns[np.argmax(returns.mean(axis=1))]
    grid, panels = returns.reshape(len(ALPHA), len(N), len(LEARNING_RATE), len(UPDATES), -1), {}
    for (i, rate), (j, k) in itertools.product(enumerate(LEARNING_RATE), enumerate(UPDATES)):
        of_alpha = zip(ALPHA, grid[:, :, i, j].swapaxes(1, 2), strict=True)  # [seeds, n] each
        panels[f"learning rate {rate:g}, updates per step: {k}"] = {f"alpha {alpha:g}": x for alpha, x in of_alpha}
    path, title = args.out / "sweep.png", f"DQN on Catch: return of the second half, {args.seeds} seeds"
    about = f"{title}; 1 is best\nby alpha of the priorities and n of n-step returns"
    plot(path, about, panels, ("n", [*map(str, N)]), "mean return (1 is best)", columns=len(UPDATES), ylim=(-0.1, 1.02))
    report(path, title, {"best of 64": best, **dict(zip(names, returns, strict=True))}, 3)


if __name__ == "__main__":
    main()
