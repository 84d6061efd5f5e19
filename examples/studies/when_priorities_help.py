"""When do priorities help? Uniform and prioritized replay with a table and with a small network, on two tasks.

They help a table that gets few updates; with more of them, or with a network, uniform draws are as good or better.

pip install -e '.[examples]'
python examples/studies/when_priorities_help.py           # 100 seeds; figures in when_priorities_help.json
python examples/studies/when_priorities_help.py --short   # half a minute at most, to see that it runs

Panahi et al. 2024 (Investigating the Interplay of Prioritized Replay and Generalization, arXiv:2407.09702) find that
priorities propagate values faster in a table, and gain little or nothing with a network. They learn the values of a
chain. The tasks here are small too, and their sizes are our own choice:

- chain: the values of 50 states in a row, each of which leads to the next.
- chain with slips: a step leads back with probability 0.1.
- maze: Q-learning in the maze of Sutton and Barto 2018 (Example 8.1), 47 states and four actions.

The only reward is 1 at the end. Batches have 8 transitions, and follow every step of the environment (8 transitions are
replayed for each new one) or every eighth (1 for each). Tasks, step sizes and seeds are lanes of one `jax.vmap`. Every
sampler is reported with the step size that is best for it.

PER has alpha 0.6 and beta 0.4. In the chains the error is that of the values; in the maze it is the return that the
greedy policy misses. Means over the run, 0 when learned:

- A table, 1 for each: as in the paper, priorities help.
- A table, 8 for each: PER loses to uniform draws, 0.25 [0.25, 0.25] against 0.07 [0.07, 0.07] in the chain. TD errors
  are mostly far below the largest priority, so new transitions take most draws. `add(td_errors=)`, with the TD errors
  of new transitions, cures this in the chain, 0.07 [0.07, 0.07], and in the maze, 0.31 [0.27, 0.35] against 0.34 [0.30,
  0.38] of uniform draws. With slips, whose TD errors never vanish, it helps little.
- A network: as in the paper, little changes. In the chain with slips PER ends worse, at 0.060 [0.058, 0.063] against
  0.015 [0.014, 0.016]. In the maze 100 seeds show no difference with 8 for each: -0.05 [-0.11, 0.01].
- Spikes: in tables the error rises by at most 0.05 on average once it was below 0.5. The network forgets ways through
  the maze, with uniform draws too. That priorities cause larger spikes did not come out here; the target network moves
  by 5% per update, and this may be why.
"""

import itertools
from collections import namedtuple
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from experiment import Parser, plot, report

import jaxreplay as jr

STATES, ACTIONS = 50, 4  # of the larger task
CAPACITY, BATCH = 2_048, 8
RATIOS = (1, 8)  # transitions that are replayed for each new one
INTERVAL = 80  # steps between two points of a learning curve
TARGET_RATE = 0.05  # of the target network, per update
MAZE = ["       #G", "  #    # ", "S #    # ", "  #      ", "     #   ", "         "]
STEP_SIZES = {"table": (0.5, 1.0), "network": (1.5e-3, 5e-3)}


# A task, with states up to the number of its own, then unused ones; STATES stands for the end.
# - after: int32 [2, STATES, ACTIONS], the state after an action: usually, and after a slip
# - slip: float32 [], the probability of a slip
# - allowed: bool [ACTIONS]; with one action the task is to learn the values
# - features: float32 [STATES, 15], what the network sees
# - values: float32 [STATES], of the best actions; 0 for unused states
Task = namedtuple("Task", "after slip allowed start gamma features values")
Agent = namedtuple("Agent", "params target_params opt")  # for a table, the target parameters are the same
PER = jr.Prioritized(alpha=0.6, beta=0.4, stratified=True)
SAMPLERS = {"uniform": (jr.Uniform(), False), "PER": (PER, False), "PER with td_errors": (PER, True)}


def make_task(
    after: np.ndarray, slip: float, allowed: np.ndarray, start: int, gamma: float, features: np.ndarray
) -> Task:
    """A task with the values of its best allowed actions, by value iteration. Unused states have no features."""
    values = np.zeros(STATES + 1)
    for _ in range(2_000):
        reward = (after == STATES) + gamma * values[after]  # [2, STATES, ACTIONS]
        q = (1 - slip) * reward[0] + slip * reward[1]
        values[:STATES] = np.where(allowed, q, -np.inf).max(axis=1)
    return Task(after, slip, allowed, start, gamma, features, np.where(features.any(axis=1), values[:STATES], 0))


def make_chain(slip: float) -> Task:
    states = np.arange(STATES)
    after = np.stack([states + 1, np.maximum(states - 1, 0)])[:, :, None].repeat(ACTIONS, axis=2)
    features = np.exp(-(((states[:, None] - np.linspace(0, STATES - 1, 15)) / 3.5) ** 2))
    return make_task(after, slip, np.arange(ACTIONS) == 0, 0, 0.99, features)


def make_maze() -> Task:
    cells = [(y, x) for y, row in enumerate(MAZE) for x, cell in enumerate(row) if cell in " S"]
    number = {cell: i for i, cell in enumerate(cells)} | {(0, 8): STATES}
    after, features = np.full((STATES, ACTIONS), STATES), np.zeros((STATES, 15))
    for i, (y, x) in enumerate(cells):
        moves = [(y - 1, x), (y + 1, x), (y, x - 1), (y, x + 1)]
        after[i] = [number.get(move, i) for move in moves]  # a wall leaves the state
        features[i, [y, 6 + x]] = 1
    return make_task(after[None].repeat(2, axis=0), 0.0, np.ones(ACTIONS, bool), number[2, 0], 0.95, features)


TASKS = {"chain": make_chain(0.0), "chain with slips": make_chain(0.1), "maze": make_maze()}


def error(task: Task, q: jax.Array) -> jax.Array:
    """The error of values q [STATES, ACTIONS], float32 []; 0 if they are right.

    It is the root mean squared error relative to the true values. In the maze it is the share of the largest mean
    return, over all starts, that the greedy policy misses.
    """
    root = jnp.sqrt(jnp.mean((q[:, 0] - task.values) ** 2) / jnp.mean(task.values**2))
    moves = task.after[0][jnp.arange(STATES), jnp.argmax(jnp.where(task.allowed, q, -jnp.inf), axis=1)]

    def back(value: jax.Array, _: None) -> tuple[jax.Array, None]:
        return jnp.where(moves == STATES, 1.0, task.gamma * value[moves]), None

    value, _ = jax.lax.scan(back, jnp.zeros(STATES), length=STATES)
    missed = 1 - jnp.sum(jnp.where(task.values > 0, value, 0)) / jnp.sum(task.values)
    return jnp.where(jnp.sum(task.allowed) == 1, root, missed)


def make_train(sampler: Any, known: bool, network: bool, ratio: int, steps: int) -> Callable[..., jax.Array]:
    """A function of a key, a `Task` and a step size: the error after each interval, [steps // INTERVAL].

    If `known`, transitions are added with their TD errors.
    """
    buffer = jr.ReplayBuffer(capacity=CAPACITY, sampler=sampler)
    net = nn.Sequential([nn.Dense(32), nn.relu, nn.Dense(32), nn.relu, nn.Dense(ACTIONS)])
    period = BATCH // ratio  # steps of the environment for each batch
    explore = optax.linear_schedule(1.0, 0.1, steps // 5)

    def train(key: jax.Array, task: Task, step_size: jax.Array) -> jax.Array:
        def q_of(params: Any, states: jax.Array) -> jax.Array:
            return net.apply(params, task.features[states]) if network else params[states]

        def td_errors_of(params: Any, target_params: Any, items: dict) -> jax.Array:
            q = q_of(params, items["state"])[jnp.arange(len(items["action"])), items["action"]]
            after = jnp.minimum(items["after"], STATES - 1)
            best = jnp.max(jnp.where(task.allowed, q_of(target_params, after), -jnp.inf), axis=1)
            target = jnp.where(items["after"] == STATES, 1.0, task.gamma * best)
            return jax.lax.stop_gradient(target) - q

        def learn_table(agent: Agent, sample: jr.Sample) -> tuple[Agent, jax.Array]:
            """One row after another, so that a step size of 1 is stable with every sampler."""

            def learn_row(table: jax.Array, row: tuple) -> tuple[jax.Array, jax.Array]:
                item, weight = row
                td_error = td_errors_of(table, table, jax.tree.map(lambda x: x[None], item))[0]
                return table.at[item["state"], item["action"]].add(step_size * weight * td_error), td_error

            table, td_errors = jax.lax.scan(learn_row, agent.params, (sample.items, sample.weights))
            return Agent(table, table, None), td_errors

        def learn_network(agent: Agent, sample: jr.Sample) -> tuple[Agent, jax.Array]:
            def loss_fn(params: Any) -> tuple[jax.Array, jax.Array]:
                td_errors = td_errors_of(params, agent.target_params, sample.items)
                return jnp.mean(sample.weights * td_errors**2) / 2, td_errors

            grads, td_errors = jax.grad(loss_fn, has_aux=True)(agent.params)
            updates, opt = optax.adam(step_size).update(grads, agent.opt)
            params = optax.apply_updates(agent.params, updates)
            target_params = optax.incremental_update(params, agent.target_params, TARGET_RATE)
            return Agent(params, target_params, opt), td_errors

        learn = learn_network if network else learn_table

        def act(params: Any, state: jax.Array, key: jax.Array, epsilon: jax.Array) -> tuple[jax.Array, dict]:
            """The state after a step, and the transition."""
            keys = jax.random.split(key, 4)
            ties = 1e-6 * jax.random.uniform(keys[0], (ACTIONS,))
            q = jnp.where(task.allowed, q_of(params, state[None])[0] + ties, -jnp.inf)
            random = jax.random.categorical(keys[1], jnp.where(task.allowed, 0.0, -jnp.inf))
            action = jnp.where(jax.random.uniform(keys[2]) < epsilon, random, jnp.argmax(q))
            slip = jax.random.uniform(keys[3]) < task.slip
            after = task.after[slip.astype(int), state, action]
            return jnp.where(after == STATES, task.start, after), {"state": state, "action": action, "after": after}

        def update(carry: tuple, t: jax.Array) -> tuple[tuple, None]:
            """Some steps of the environment, then a batch; t is the number of steps before."""
            agent, state, replay = carry
            act_keys, sample_key = jnp.split(jax.random.split(jax.random.fold_in(key, t), period + 1), [period])
            state, items = jax.lax.scan(lambda state, key: act(agent.params, state, key, explore(t)), state, act_keys)
            errors = td_errors_of(agent.params, agent.target_params, items) if known else None
            replay = buffer.add(replay, items, td_errors=errors)
            sample = buffer.sample(replay, sample_key[0], BATCH)
            agent, td_errors = learn(agent, sample)
            replay = buffer.update(replay, sample.indices, td_errors)
            return (agent, state, replay), None

        def point(carry: tuple, i: jax.Array) -> tuple[tuple, jax.Array]:
            carry, _ = jax.lax.scan(update, carry, i * INTERVAL + jnp.arange(0, INTERVAL, period))
            return carry, error(task, q_of(carry[0].params, jnp.arange(STATES)))

        init_key = jax.random.fold_in(key, 2 * steps)
        params = net.init(init_key, task.features) if network else jnp.zeros((STATES, ACTIONS))
        item = dict.fromkeys(("state", "action", "after"), jnp.zeros(1, jnp.int32))
        agent = Agent(params, params, optax.adam(1.0).init(params) if network else None)
        carry = agent, task.start, buffer.init(item)
        return jax.lax.scan(point, carry, jnp.arange(steps // INTERVAL))[1]

    return train


def run(name: str, learner: str, ratio: int, steps: int, keys: jax.Array) -> np.ndarray:
    """Errors [tasks, step sizes, seeds, points] with one of `SAMPLERS`."""
    lane = make_train(*SAMPLERS[name], learner == "network", ratio, steps)
    for in_axes in (0, None, None), (None, None, 0), (None, 0, None):
        lane = jax.vmap(lane, in_axes)
    tasks = jax.tree.map(lambda *x: jnp.array(x), *TASKS.values())
    return np.asarray(jax.jit(lane)(keys, tasks, jnp.array(STEP_SIZES[learner])))


def rise(errors: np.ndarray) -> np.ndarray:
    """The largest rise of errors [..., points] above the smallest error so far, once that is below 0.5."""
    least = np.minimum.accumulate(errors, axis=-1)
    return np.where(least < 0.5, errors - least, 0).max(axis=-1)


def at_best(errors: np.ndarray) -> np.ndarray:
    """Errors [seeds, points] of the step size with the smallest mean error, of [step sizes, seeds, points]."""
    return errors[np.argmin(errors.mean(axis=(1, 2)))]


def figures_of(errors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The figures of a case; `errors` [seeds, points] by sampler."""
    means = {name: x.mean(axis=-1) for name, x in errors.items()}
    figures = {}
    for name, x in errors.items():
        figures |= {name: means[name], f"{name}, at the end": x[:, -1], f"{name}, largest rise": rise(x)}
        figures[f"{name}, less uniform"] = means[name] - means["uniform"]
    return figures


def main() -> None:
    about = "Uniform and prioritized replay with a table and with a network, on a chain and in a maze."
    args = Parser(about, seeds=100).parse()
    steps, ratios = (160, RATIOS[:1]) if args.short else (3_200, RATIOS)
    short, panels, figures = {"table": ("uniform", "PER"), "network": ("uniform",)}, {}, {}
    for learner, ratio in itertools.product(STEP_SIZES, ratios):
        title, names = f"{learner}, {ratio} for each", short[learner] if args.short else SAMPLERS
        errors = {name: run(name, learner, ratio, steps, args.keys) for name in names}
        for i, task in enumerate(TASKS):
            case = {name: at_best(np.nan_to_num(x[i], nan=2.0).clip(max=2.0)) for name, x in errors.items()}  # diverged
            panels[f"{task}, {learner}:\n{ratio} replayed for each new transition"] = case
            figures |= {f"{task}, {title}, {name}": figure for name, figure in figures_of(case).items()}
    path, points = args.out / "when_priorities_help.png", np.arange(INTERVAL, steps + 1, INTERVAL)
    title = (
        "Error of the learned values (maze: the share of the return that is missed), 0 is perfect. PER: by priority\n"
    )
    title += f"mean of {args.seeds} seeds at the best step size of each; 95% bootstrap intervals"
    plot(path, title, panels, ("environment steps", points), "error (0 is perfect)", columns=len(TASKS), ylim=(0, 1.05))
    report(path, "error, mean over the run", figures)


if __name__ == "__main__":
    main()
