"""Prioritized level replay in a grid world: an agent that is trained on random levels, most of them of little use.

pip install -e '.[examples]'
python examples/agents/levels.py           # random levels, level replay and ACCEL, in one jitted program
python examples/agents/levels.py --short   # a few seconds, to see that it runs

A level has walls, a start and a goal, in a grid of 11 x 11 cells. Its share of walls is uniform from 0 to 1. So most
levels have no path to the goal, and many others have few walls. The agent sees the 5 x 5 cells around it, the direction
of the goal and its own last move. It is tested on fixed levels that it never trains on: mazes, in which one path leads
from each cell to each other, and random levels that have a path.

Each update plays 32 levels and trains with PPO (Schulman et al. 2017). The ways to choose the levels:

- random: new random levels each time.
- PLR: half of the time levels from `jr.Levels`, by their score (Jiang et al. 2021, Prioritized Level Replay). The score
  is the mean absolute advantage (L1, of that paper), or the positive value loss.
- robust PLR: the same, but new levels are only scored, and the agent learns from replayed levels alone (Jiang et al.
  2021, Replay-Guided Adversarial Environment Design).
- ACCEL: robust PLR, and after each replay the replayed levels with some cells changed (Parker-Holder et al. 2022).

All get 1.2 million environment steps. In mazes PLR with L1 ends above random levels by 0.030 [0.008, 0.052]. With the
positive value loss it finds the levels with a path, but prefers short ones, and ends below. Robust PLR and ACCEL learn
from a half and a third of the steps, and end below too. Against random levels after as many updates they are ahead, by
0.049 [0.029, 0.070] and 0.024 [0.015, 0.032].

The settings were chosen after trials with 2 or 4 seeds. Draws by rank with temperature 0.3, as jaxued makes them, were
worse than with 1.0, and PLR with `max_monte_carlo` ended below random levels. With at most 60% walls, the order was the
same. The papers train more than a hundred times as long, and with memory.
"""

import argparse
import dataclasses
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from experiment import Parser, plot_mean, report
from flax import struct
from matplotlib.figure import Figure

import jaxreplay as jr

SIZE, SIGHT = 11, 2  # cells of a side, and how far the agent sees
MOVES = jnp.array([(-1, 0), (0, 1), (1, 0), (0, -1)], jnp.int32)
INTERVALS = 12  # tests, with as many updates between two
LEVELS = jr.Levels(capacity=512, temperature=1.0, staleness=0.3, replay_probability=0.5, min_filled=0.5)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """Settings of the training, the same for all ways to choose levels."""

    updates: int
    batch: int = 32  # levels per update
    steps: int = 64  # per update; a level starts again when its goal is reached
    width: int = 64
    epochs: int = 2
    minibatches: int = 4
    learning_rate: float = 1e-3
    gamma: float = 0.97
    gae: float = 0.95
    clip: float = 0.2
    entropy: float = 0.01
    edits: int = 6


@struct.dataclass
class Method:
    """A way to choose levels: bools, traced, so that one program trains with all of them."""

    replays: Any  # draws levels from the buffer
    learns_from_new: Any  # also trains on levels that were not drawn
    edits: Any  # changes levels after they were replayed
    absolute: Any  # scores by the absolute advantage, not by its positive part


METHODS = {
    "random": Method(False, True, False, True),
    "PLR, L1": Method(True, True, False, True),
    "PLR, positive": Method(True, True, False, False),
    "robust PLR, L1": Method(True, False, False, True),
    "ACCEL, L1": Method(True, False, True, True),
}
COLORS = dict(zip(METHODS, ("tab:gray", "tab:blue", "tab:cyan", "tab:orange", "tab:green"), strict=True))


@struct.dataclass
class Level:
    walls: jax.Array  # bool [SIZE, SIZE]
    start: jax.Array  # int32 [2]
    goal: jax.Array  # int32 [2]


@struct.dataclass
class State:
    params: Any
    opt: optax.OptState
    levels: jr.curricula.LevelsState
    played: Level  # in the last update, [batch, ...]
    learned_from: Level  # the latest that were, [batch, ...]
    replayed: jax.Array  # bool, whether they were drawn from the buffer
    learned: jax.Array  # int32, updates of the parameters


def clear(walls: jax.Array, start: jax.Array, goal: jax.Array) -> Level:
    """A level without walls at its start and its goal."""
    return Level(walls.at[start[0], start[1]].set(False).at[goal[0], goal[1]].set(False), start, goal)


def random_level(key: jax.Array) -> Level:
    numbers = jax.random.uniform(key, SIZE**2 + 3)
    walls, (share, start, goal) = numbers[:-3], numbers[-3:]
    start = (start * SIZE**2).astype(jnp.int32)
    goal = (start + 1 + (goal * (SIZE**2 - 1)).astype(jnp.int32)) % SIZE**2  # another cell
    cells = (jnp.stack([x // SIZE, x % SIZE]) for x in (start, goal))
    return clear((walls < share).reshape(SIZE, SIZE), *cells)


def edit(key: jax.Array, level: Level, edits: int) -> Level:
    """The level with `edits` random cells changed, from wall to free or back."""
    y, x = (SIZE * jax.random.uniform(key, (2, edits))).astype(jnp.int32)
    return clear(level.walls.at[y, x].set(~level.walls[y, x]), level.start, level.goal)


def mazes(count: int) -> Level:
    """Mazes with one path between any two cells, made by a random depth-first search; start and goal are random."""
    rng, levels = np.random.default_rng(0), []
    for _ in range(count):
        walls = np.ones((SIZE, SIZE), bool)
        stack = [tuple(2 * rng.integers(0, (SIZE + 1) // 2, 2))]
        walls[stack[0]] = False
        while stack:
            y, x = stack[-1]
            free = [(dy, dx) for dy, dx in np.asarray(MOVES) if 0 <= y + 2 * dy < SIZE and 0 <= x + 2 * dx < SIZE]
            free = [(dy, dx) for dy, dx in free if walls[y + 2 * dy, x + 2 * dx]]
            if not free:
                stack.pop()
                continue
            dy, dx = free[rng.integers(len(free))]
            walls[y + dy, x + dx] = walls[y + 2 * dy, x + 2 * dx] = False
            stack.append((y + 2 * dy, x + 2 * dx))
        start, goal = rng.permutation(np.argwhere(~walls))[:2]
        levels.append(Level(walls, start.astype(np.int32), goal.astype(np.int32)))
    return jax.tree.map(lambda *x: jnp.stack(x), *levels)


def path_length(level: Level) -> jax.Array:
    """Moves of the shortest path, int32; 0 if there is none."""

    def spread(carry: tuple, moves: jax.Array) -> tuple:
        reached, found = carry
        near = jnp.pad(reached, 1)
        reached |= near[2:, 1:-1] | near[:-2, 1:-1] | near[1:-1, 2:] | near[1:-1, :-2]
        reached &= ~level.walls
        there = reached[level.goal[0], level.goal[1]]
        return (reached, jnp.where(there & (found == 0), moves, found)), None

    reached = jnp.zeros((SIZE, SIZE), bool).at[level.start[0], level.start[1]].set(True)
    return jax.lax.scan(spread, (reached, jnp.int32(0)), jnp.arange(1, SIZE**2, dtype=jnp.int32))[0][1]


def random_levels_with_path(count: int) -> Level:
    levels = jax.vmap(random_level)(jax.random.split(jax.random.key(0), 8 * count))
    with_path = np.flatnonzero(jax.vmap(path_length)(levels))[:count]
    return jax.tree.map(lambda x: x[with_path], levels)


def observe(level: Level, position: jax.Array, move: jax.Array) -> jax.Array:
    """Walls around the agent, the direction of the goal, and the last move (4 at the start), float32 [33]."""
    padded = jnp.pad(level.walls, SIGHT, constant_values=True)
    view = jax.lax.dynamic_slice(padded, position, (2 * SIGHT + 1, 2 * SIGHT + 1))
    offset = (level.goal - position).astype(jnp.float32)
    return jnp.concatenate([view.ravel(), offset / SIZE, jnp.sign(offset), jax.nn.one_hot(move, len(MOVES))])


class Network(nn.Module):
    """Logits of the moves and the value of a position."""

    width: int

    @nn.compact
    def __call__(self, obs: jax.Array) -> tuple[jax.Array, jax.Array]:
        for _ in range(2):
            obs = nn.relu(nn.Dense(self.width)(obs))
        return nn.Dense(len(MOVES), kernel_init=nn.initializers.zeros)(obs), nn.Dense(1)(obs)[..., 0]


def make_train(config: Config, test: dict[str, Level]) -> Any:
    """A function of a key and a `Method`: a log of arrays [intervals]."""
    network, levels = Network(config.width), LEVELS
    adam = optax.chain(optax.clip_by_global_norm(0.5), optax.adam(config.learning_rate))

    def play(params: Any, played: Level, key: jax.Array) -> tuple[dict[str, jax.Array], jax.Array]:
        """Rows [steps, batch] of the levels, and the values [batch] of the last positions."""

        def step(carry: tuple, key: jax.Array) -> tuple[tuple, dict[str, jax.Array]]:
            position, last_move = carry
            obs = jax.vmap(observe)(played, position, last_move)
            logits, value = network.apply(params, obs)
            move = jax.random.categorical(key, logits)
            target = jnp.clip(position + MOVES[move], 0, SIZE - 1)
            blocked = jax.vmap(lambda walls, at: walls[at[0], at[1]])(played.walls, target)
            position = jnp.where(blocked[:, None], position, target)
            solved = jnp.all(position == played.goal, axis=-1)
            log_prob = jnp.take_along_axis(jax.nn.log_softmax(logits), move[:, None], axis=-1)[:, 0]
            row = {"obs": obs, "move": move, "value": value, "solved": solved, "log_prob": log_prob}
            position = jnp.where(solved[:, None], played.start, position)
            return (position, jnp.where(solved, len(MOVES), move)), row

        first = played.start, jnp.full(len(played.start), len(MOVES))
        (position, move), rows = jax.lax.scan(step, first, jax.random.split(key, config.steps))
        return rows, network.apply(params, jax.vmap(observe)(played, position, move))[1]

    def advantages(rows: dict[str, jax.Array], last_value: jax.Array) -> jax.Array:
        """Generalized advantages [steps, batch]. The reward of the goal is 1."""

        def back(carry: tuple, row: tuple) -> tuple[tuple, jax.Array]:
            advantage, next_value = carry
            value, solved = row
            error = solved + config.gamma * next_value * (1 - solved) - value
            advantage = error + config.gamma * config.gae * (1 - solved) * advantage
            return (advantage, value), advantage

        rows = rows["value"], rows["solved"].astype(jnp.float32)
        return jax.lax.scan(back, (jnp.zeros_like(last_value), last_value), rows, reverse=True)[1]

    def learn(params: Any, opt: optax.OptState, rows: Any, advantage: jax.Array, key: jax.Array) -> tuple:
        rows = {**rows, "advantage": advantage, "target": advantage + rows["value"]}
        rows = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), rows)

        def loss(params: Any, row: dict[str, jax.Array]) -> jax.Array:
            logits, value = network.apply(params, row["obs"])
            log_probs = jax.nn.log_softmax(logits)
            ratio = jnp.exp(jnp.take_along_axis(log_probs, row["move"][:, None], axis=-1)[:, 0] - row["log_prob"])
            gain = (row["advantage"] - row["advantage"].mean()) / (row["advantage"].std() + 1e-5)
            clipped = jnp.clip(ratio, 1 - config.clip, 1 + config.clip)
            entropy = -jnp.sum(jnp.exp(log_probs) * log_probs, axis=-1).mean()
            errors = optax.huber_loss(value, row["target"])
            return -jnp.minimum(ratio * gain, clipped * gain).mean() + errors.mean() - config.entropy * entropy

        def minibatch(carry: tuple, rows: Any) -> tuple[tuple, None]:
            params, opt = carry
            updates, opt = adam.update(jax.grad(loss)(params, rows), opt)
            return (optax.apply_updates(params, updates), opt), None

        def epoch(carry: tuple, key: jax.Array) -> tuple[tuple, None]:
            order = jax.random.permutation(key, len(rows["move"])).reshape(config.minibatches, -1)
            return jax.lax.scan(lambda carry, k: minibatch(carry, jax.tree.map(lambda x: x[k], rows)), carry, order)

        return jax.lax.scan(epoch, (params, opt), jax.random.split(key, config.epochs))[0]

    def update(method: Method, state: State, key: jax.Array) -> State:
        keys = jax.random.split(key, 6)
        edits = method.edits & state.replayed
        replays = method.replays & levels.replay(state.levels, keys[0]) & ~edits
        drawn_levels, slots, drawn = levels.sample(state.levels, keys[1], config.batch)
        new = jax.vmap(random_level)(jax.random.split(keys[2], config.batch))
        edited = jax.vmap(edit, (0, 0, None))(jax.random.split(keys[3], config.batch), state.played, config.edits)
        played = jax.tree.map(lambda x, y: jnp.where(edits, x, y), edited, new)
        played = jax.tree.map(lambda x, y: jnp.where(replays, x, y), drawn, played)

        rows, last_value = play(state.params, played, keys[4])
        advantage = advantages(rows, last_value)
        # A level that is never solved counts as one episode.
        ends = rows["solved"].at[-1].set(rows["solved"][-1] | ~jnp.any(rows["solved"], axis=0))
        scores = jr.scores.positive_value_loss(jnp.where(method.absolute, jnp.abs(advantage), advantage), ends)
        of_levels = jax.tree.map(lambda x, y: jnp.where(replays, x, y), drawn_levels, state.levels)
        of_levels = levels.update(of_levels, slots, scores, mask=jnp.full(config.batch, replays))
        of_levels, _ = levels.insert(of_levels, played, scores, mask=jnp.full(config.batch, method.replays & ~replays))

        learns = replays | method.learns_from_new
        learned = learn(state.params, state.opt, rows, advantage, keys[5])
        params, opt = jax.tree.map(lambda x, y: jnp.where(learns, x, y), learned, (state.params, state.opt))
        learned_from = jax.tree.map(lambda x, y: jnp.where(learns, x, y), played, state.learned_from)
        return State(params, opt, of_levels, played, learned_from, replays, state.learned + learns)

    def log(state: State, key: jax.Array) -> dict[str, jax.Array]:
        rows, _ = play(state.params, jax.tree.map(lambda *x: jnp.concatenate(x), *test.values()), key)
        ends = np.cumsum([len(held_out.start) for held_out in test.values()])[:-1]
        rates = [x.mean() for x in jnp.split(jnp.any(rows["solved"], axis=0), ends)]
        # Of the latest levels that the agent learned from.
        paths = jax.vmap(path_length)(state.learned_from)
        return {**dict(zip(test, rates, strict=True)), "path": paths, "learned": state.learned}

    def train(key: jax.Array, method: Method) -> dict[str, jax.Array]:
        def part(state: State, key: jax.Array) -> tuple[State, dict[str, jax.Array]]:
            log_key, *keys = jax.random.split(key, 1 + config.updates // INTERVALS)
            state, _ = jax.lax.scan(lambda state, key: (update(method, state, key), None), state, jnp.stack(keys))
            return state, log(state, log_key)

        init_key, level_key, train_key = jax.random.split(key, 3)
        level = random_level(level_key)
        played = jax.tree.map(lambda x: jnp.repeat(x[None], config.batch, axis=0), level)
        params = network.init(init_key, observe(level, level.start, jnp.int32(0)))
        state = State(params, adam.init(params), levels.init(level), played, played, jnp.array(False), jnp.int32(0))
        return jax.lax.scan(part, state, jax.random.split(train_key, INTERVALS))[1]

    return train


def gains(found: dict[str, np.ndarray], k: int) -> dict[str, np.ndarray]:
    """Mazes solved with method k at the end [seeds], less those with random levels after as many steps or updates."""
    solved, random = found["mazes"][k, :, -1], found["mazes"][0]
    updates = found["learned"][k].mean(axis=0)[-1]
    after_updates = np.array([np.interp(updates, found["learned"][0, 0], rates) for rates in random])
    return {"more by steps": solved - random[:, -1], "more by updates": solved - after_updates}


def describe(config: Config, seeds: int) -> str:
    """The sizes of a run, and how useful random levels are."""
    levels = jax.vmap(random_level)(jax.random.split(jax.random.key(1), 10_000))
    paths = np.asarray(jax.vmap(path_length)(levels))
    distance = np.asarray(jnp.abs(levels.start - levels.goal).sum(axis=-1))
    return (
        f"random levels: {np.mean(paths == 0):.0%} without a path, {np.mean(paths == distance):.0%} without a detour\n"
        f"{config.updates:,} updates of {config.batch} levels of {config.steps} steps, {seeds} seeds\n"
        "share of levels solved at the end\n"
        "more: mazes solved, less those with random levels after as many steps, or as many updates of the parameters\n"
        "no path: the share without a path of the levels learned from in the second half"
    )


def figures_of(found: dict[str, np.ndarray], test: dict[str, Level]) -> dict[str, Any]:
    """Figures at the end by method, for the result file."""
    figures = {}
    for k, name in enumerate(METHODS):
        ends = {each: found[each][k, :, -1] for each in test} | gains(found, k)
        figures |= {f"{name}, {each}": values for each, values in ends.items()}
        figures[f"{name}, updates of the parameters"] = np.round(found["learned"][k].mean(axis=0)[-1])
        figures[f"{name}, no path"] = np.mean(found["path"][k, :, INTERVALS // 2 :] == 0)
    return figures


def plot(path: Path, found: dict[str, np.ndarray], config: Config) -> None:
    figure = Figure(figsize=(12, 4.2), layout="constrained")
    axes = figure.subplots(1, 3)
    steps = np.arange(1, INTERVALS + 1) / INTERVALS * config.updates * config.batch * config.steps / 1e6
    by_steps = (axes[0], "mazes", steps), (axes[2], "random levels", steps)
    for k, (name, color) in enumerate(COLORS.items()):
        learned = found["learned"][k].mean(axis=0)
        for each, test, x in (*by_steps, (axes[1], "mazes", learned)):
            plot_mean(each, x, found[test][k], color, name)
    for each, test, x in zip(axes, ("mazes", "mazes", "random levels"), (0, 1, 0), strict=True):
        labels = ("million environment steps", "updates of the parameters")
        each.set(title=f"{test}, solved", xlabel=labels[x], xlim=(0, None))
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=5, frameon=False)
    figure.savefig(path, dpi=150)


def parse_args() -> tuple[argparse.Namespace, Config]:
    parser = Parser("An agent in a grid world, trained on random levels or with prioritized level replay.")
    parser.add_experiment(seeds=32)
    parser.add_count("updates", f"updates, a multiple of {INTERVALS}", 600, INTERVALS)
    args = parser.parse()
    parser.check_multiple("updates", args.updates, INTERVALS)
    return args, Config(updates=args.updates)


def main() -> None:
    args, config = parse_args()
    test = {"mazes": mazes(64), "random levels": random_levels_with_path(64)}
    methods = jax.tree.map(lambda *x: jnp.array(x), *METHODS.values())
    train = jax.vmap(jax.vmap(make_train(config, test), in_axes=(0, None)), in_axes=(None, 0))
    found = jax.jit(train)(jax.random.split(jax.random.key(args.seed), args.seeds), methods)
    found = jax.tree.map(np.asarray, found)
    path = args.out / "levels.png"
    plot(path, found, config)
    report(path, describe(config, args.seeds), figures_of(found, test), 3)


if __name__ == "__main__":
    main()
