"""Goals in hindsight: an agent flips bits until they equal a goal, and only then is rewarded.

pip install -e '.[examples]'
python examples/agents/her.py           # 8 to 30 bits, with hindsight and without, 8 seeds of each at once
python examples/agents/her.py --short   # a few seconds, to see that it runs

The experiment of Andrychowicz et al. 2017 (Hindsight Experience Replay, arXiv:1707.01495, section 3.1 and figure 1). A
state and a goal are n bits each, both random at first. An action flips a bit. The reward is 0 if the state equals the
goal, and -1 otherwise. An episode ends at the goal, or after n steps. Among 2^n states a random walk finds no goal of
more than a dozen bits or so, and there is nothing to learn from. But it reaches other states. If these become the goals
(strategy "future"), the same transitions teach how to reach a goal.

A `jr.SequenceBuffer` stores every state once. `later` draws a state that was reached later in the episode,
`jr.hindsight` makes it the goal, and `jr.sequence_transitions` makes transitions of the relabelled rows.

In the paper, with longer training, DQN solves up to 13 bits without hindsight and up to 50 with it. Here, after 80,000
environment steps and 5,000 updates, hindsight solves 30 bits, 0.99 [0.98, 1.00], and without it 13 bits are never
solved. `--bits` takes other numbers; more bits need more `--steps`.
"""

import argparse
import dataclasses
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from experiment import COLORS, Parser, integer, legend_below, plot_mean, report, train_and_test
from flax import struct
from matplotlib.figure import Figure
from tqdm import tqdm

import jaxreplay as jr

VARIANTS = {"hindsight": 0.8, "no hindsight": 0.0}  # share of a batch with hindsight goals


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """Static settings. One step advances each of a seed's environments once, and makes one update."""

    bits: int
    num_envs: int = 16
    length: int = 2**13  # rows kept per environment
    warmup: int = 50  # steps with random actions before the first update
    interval: int = 500  # steps between two tests
    batch_size: int = 128
    gamma: float = 0.98
    epsilon: float = 0.1  # share of random actions; it falls from 1 in the first half
    width: int = 256
    learning_rate: float = 2e-3
    target_rate: float = 0.05
    tests: int = 64  # episodes of a test, without random actions

    @property
    def buffer(self) -> jr.SequenceBuffer:
        """A buffer of pairs of rows in one episode: a state and the next one."""
        return jr.SequenceBuffer(
            length=self.length, num_envs=self.num_envs, sequence_length=2, windows="inside", hindsight=True
        )


@struct.dataclass
class Env:
    """Environments with next-step autoreset, as in Gymnasium: the call after the end of an episode only resets."""

    bits: jax.Array  # bool [num_envs, n]
    goal: jax.Array  # bool [num_envs, n]
    time: jax.Array  # int32 [num_envs], steps of the present episode
    done: jax.Array  # bool [num_envs]


@struct.dataclass
class State:
    env: Env
    buffer: jr.buffers.SequenceState
    params: Any
    target: Any
    opt: optax.OptState
    key: jax.Array


def reward(achieved: jax.Array, goal: jax.Array) -> jax.Array:
    return jnp.where(reached(achieved, goal), 0.0, -1.0)


def reached(achieved: jax.Array, goal: jax.Array) -> jax.Array:
    return jnp.all(achieved == goal, axis=-1)


def reset(key: jax.Array, num_envs: int, bits: int) -> Env:
    start, goal = jax.random.bernoulli(key, 0.5, (2, num_envs, bits))
    return Env(start, goal, jnp.zeros(num_envs, jnp.int32), reached(start, goal))


def step_envs(key: jax.Array, env: Env, action: jax.Array) -> tuple[Env, dict[str, jax.Array]]:
    """The next environments, and a row [num_envs, ...]; it holds no step if the episode ended at the previous call."""
    flipped = env.bits ^ (jnp.arange(env.bits.shape[1]) == action[:, None])
    terminated = reached(flipped, env.goal)
    truncated = ~terminated & (env.time + 1 >= env.bits.shape[1])
    row = {
        "achieved_goal": env.bits,
        "desired_goal": env.goal,
        "action": action,
        "reward": reward(flipped, env.goal),
        "terminated": terminated & ~env.done,
        "truncated": truncated & ~env.done,
        "step": ~env.done,
    }
    stepped = Env(flipped, env.goal, env.time + 1, terminated | truncated)
    new = reset(key, *env.bits.shape)
    chosen = jax.tree.map(lambda x, y: jnp.where(env.done.reshape(-1, *[1] * (x.ndim - 1)), x, y), new, stepped)
    return chosen, row


class Network(nn.Module):
    """Action values for bits and a goal."""

    width: int

    @nn.compact
    def __call__(self, bits: jax.Array, goal: jax.Array) -> jax.Array:
        x = jnp.concatenate([bits, goal], axis=-1).astype(jnp.float32) * 2 - 1
        return nn.Dense(bits.shape[-1])(nn.relu(nn.Dense(self.width)(x)))


@functools.lru_cache(maxsize=1)
def make_trainer(config: Config) -> tuple[Callable, Callable]:
    """Functions of all seeds: `init(keys)`, and `train(states, share, epsilon)`, one interval and then a test."""
    network, buffer = Network(config.width), config.buffer
    optimizer = optax.adam(config.learning_rate)

    def act(params: Any, env: Env, key: jax.Array, epsilon: Any) -> jax.Array:
        random_key, explore_key = jax.random.split(key)
        best = jnp.argmax(network.apply(params, env.bits, env.goal), axis=-1)
        random = jax.random.randint(random_key, best.shape, 0, config.bits)
        return jnp.where(jax.random.uniform(explore_key, best.shape) < epsilon, random, best)

    def step(state: State, epsilon: Any) -> State:
        key, action_key, env_key = jax.random.split(state.key, 3)
        action = act(state.params, state.env, action_key, epsilon)
        env, row = step_envs(env_key, state.env, action)
        rows = jax.tree.map(lambda x: x[None], row)
        return state.replace(env=env, buffer=buffer.add(state.buffer, rows, ends=~rows["step"]), key=key)

    def learn(state: State, share: jax.Array) -> State:
        key, sample_key, later_key, goal_key = jax.random.split(state.key, 4)
        sample = buffer.sample(state.buffer, sample_key, config.batch_size)
        later, steps = buffer.later(state.buffer, later_key, sample.indices)
        goals = later["achieved_goal"]
        rows, _ = jr.hindsight(goal_key, sample.items, goals, reward, share=share, mask=steps > 0, terminated=reached)
        seen = {name: rows[name] for name in ("achieved_goal", "desired_goal")}
        flags = rows["terminated"], rows["truncated"]
        batch, _ = jr.sequence_transitions(
            seen, rows["action"], rows["reward"], *flags, n=1, gamma=config.gamma, mask=rows["step"]
        )

        def q(params: Any, seen: dict[str, jax.Array]) -> jax.Array:
            return network.apply(params, seen["achieved_goal"], seen["desired_goal"])

        next_action = jnp.argmax(q(state.params, batch.S_next), axis=-1)  # double Q-learning
        next_q = jnp.take_along_axis(q(state.target, batch.S_next), next_action[:, None], axis=-1)[:, 0]
        # Returns lie between the return of -1 for ever and 0.
        target = jnp.clip(batch.Rn + batch.In * next_q, -1 / (1 - config.gamma), 0.0)

        def loss_fn(params: Any) -> jax.Array:
            chosen = jnp.take_along_axis(q(params, batch.S), batch.A[:, None], axis=-1)[:, 0]
            return jnp.mean(optax.huber_loss(chosen, target))

        updates, opt = optimizer.update(jax.grad(loss_fn)(state.params), state.opt)
        params = optax.apply_updates(state.params, updates)
        target = optax.incremental_update(params, state.target, config.target_rate)
        return state.replace(params=params, target=target, opt=opt, key=key)

    def test(params: Any, key: jax.Array) -> jax.Array:
        """Share of test episodes that reach their goal."""
        env = reset(key, config.tests, config.bits)

        def step(env: Env, _: None) -> tuple[Env, None]:
            stepped, _ = step_envs(key, env, act(params, env, key, 0.0))
            return jax.tree.map(
                lambda x, y: jnp.where(env.done.reshape(-1, *[1] * (x.ndim - 1)), x, y), env, stepped
            ), None

        env, _ = jax.lax.scan(step, env, length=config.bits)
        return jnp.mean(reached(env.bits, env.goal))

    def init(key: jax.Array) -> State:
        env_key, params_key, key = jax.random.split(key, 3)
        env = reset(env_key, config.num_envs, config.bits)
        _, row = jax.eval_shape(step_envs, key, env, jnp.zeros(config.num_envs, jnp.int32))
        params = network.init(params_key, env.bits, env.goal)
        rows = jax.tree.map(lambda x: jax.ShapeDtypeStruct((1, *x.shape), x.dtype), row)
        state = State(env, buffer.init(rows), params, params, optimizer.init(params), key)
        return jax.lax.scan(lambda state, _: (step(state, 1.0), None), state, length=config.warmup)[0]

    def train(state: State, share: jax.Array, epsilon: jax.Array) -> tuple[State, jax.Array]:
        def both(state: State, _: None) -> tuple[State, None]:
            return learn(step(state, epsilon), share), None

        state, _ = jax.lax.scan(both, state, length=config.interval)
        key, test_key = jax.random.split(state.key)
        return state.replace(key=key), test(state.params, test_key)

    return jax.jit(jax.vmap(init)), jax.jit(jax.vmap(train, in_axes=(0, None, None)), donate_argnums=0)


def run(config: Config, share: float, keys: jax.Array, steps: int, bar: tqdm) -> np.ndarray:
    """Share of test episodes that reach their goal [seeds, steps / interval]."""
    init, train = make_trainer(config)
    count = steps // config.interval
    arguments = [(share, max(config.epsilon, 1 - 2 * number / count)) for number in range(count)]
    return train_and_test(train, init(keys), arguments, bar, config.interval * config.num_envs * len(keys))[0]


def plot(path: Path, curves: dict[str, dict[int, np.ndarray]], env_steps: np.ndarray) -> None:
    """Plot shares after training by number of bits (left), and shares with hindsight during training (right)."""
    figure = Figure(figsize=(10, 4.5), layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True)
    for (name, by_bits), color in zip(curves.items(), COLORS, strict=False):
        bits = np.array([*by_bits])
        final = np.stack([seeds[:, -1] for seeds in by_bits.values()], axis=1)  # [seeds, bits]
        plot_mean(left, bits, final, color, name, line="o-")
    seeds = len(final)
    left.set(title="Flipping bits until they equal a goal", xlabel="number of bits")
    left.set(ylabel=f"goals reached after training, mean of {seeds} seeds", ylim=(-0.03, 1.03))
    legend_below(left)
    by_bits = next(iter(curves.values()))
    for number, (bits, found) in enumerate(by_bits.items()):
        shade = (0.12, 0.47, 0.71, 1 - 0.8 * number / len(by_bits))
        right.plot(env_steps, found.mean(axis=0), color=shade, linewidth=2, label=f"{bits} bits")
    right.set(title=f"During training, with {next(iter(curves))}", xlabel="environment steps per seed")
    right.xaxis.set_major_formatter("{x:,.0f}")
    legend_below(right, ncols=4)
    figure.savefig(path, dpi=150)


def parse_args() -> argparse.Namespace:
    parser = Parser("Bit flipping with goals in hindsight and without, several seeds at once.")
    parser.add_experiment(seeds=8, short="a tiny budget, and 8 bits alone")
    parser.add_count("steps", "environment steps per seed", 80_000, 8_000)
    parser.add_argument("--bits", type=integer(2, 100), nargs="+", help="numbers of bits (8 13 20 30; 8 if short)")
    args = parser.parse()
    args.bits = sorted(set(args.bits or ((8,) if args.short else (8, 13, 20, 30))))
    per_interval = Config.interval * Config.num_envs
    parser.check_multiple("steps", args.steps, per_interval)
    return args


def main() -> None:
    args = parse_args()
    keys = jax.random.split(jax.random.key(args.seed), args.seeds)
    curves: dict[str, dict[int, np.ndarray]] = {name: {} for name in VARIANTS}
    with tqdm(total=len(args.bits) * 2 * args.steps * args.seeds, unit=" env steps", unit_scale=True) as bar:
        for bits in args.bits:
            for name, share in VARIANTS.items():
                bar.set_description(f"{bits} bits, {name}")
                curves[name][bits] = run(Config(bits=bits), share, keys, args.steps // Config.num_envs, bar)
    path, per_interval = args.out / "her.png", Config.interval * Config.num_envs
    plot(path, curves, per_interval * np.arange(1, args.steps // per_interval + 1))
    finals = {f"{bits}, {name}": x[:, -1] for name, by_bits in curves.items() for bits, x in by_bits.items()}
    title = f"share of {Config.tests} goals reached, by bits, {args.steps:,} environment steps, {args.seeds} seeds"
    report(path, title, finals)


if __name__ == "__main__":
    main()
