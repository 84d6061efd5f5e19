"""How large a buffer, and which n? The DQN of sweep.py on CartPole and on Acrobot.

With few updates the largest buffer, and on CartPole a large n; with more updates it depends on the task.

pip install -e '.[examples]'
python examples/studies/how_large.py           # 20 seeds; figures in how_large.json
python examples/studies/how_large.py --short   # half a minute at most, to see that it runs

Zhang and Sutton 2017 (A Deeper Look at Experience Replay, arXiv:1712.01275) find that a large buffer can hurt. Fedus et
al. 2020 (Revisiting Fundamentals of Experience Replay, arXiv:2007.06700) find that it helps, if returns have several
steps. Here n is 1, 3, 5 or 10, and the capacity is 10^3, 10^4 or the whole run: with 50,000 steps, any larger
buffer is the same. One or four updates follow 16 steps of the environments. All n, capacities and seeds are lanes of
one program: each lane stores everything, and `sample(..., max_age=)` draws from its newest transitions.

With one update per 16 steps a large buffer is best. On CartPole the gain grows with n, as Fedus et al. found: with n =
10 the return rises from 47 [42, 54] to 154 [124, 186]. On Acrobot n = 1 gains as much as n = 10, against what they
found. With four updates, CartPole with n = 10 is best with the smallest buffer, 273 [208, 337] against 144 [98, 195],
as Zhang and Sutton found; Acrobot is best with the largest. With n below 10, CartPole needs more than 50,000 steps.
"""

import itertools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from experiment import Parser, plot, report
from sweep import Config, Setting, sweep

import jaxreplay as jr

TASKS = {"CartPole": "CartPole-v1", "Acrobot": "Acrobot-v1"}
N, UPDATES = (1, 3, 5, 10), (1, 4)
CAPACITIES = (1_000, 10_000)  # and all
NUM_ENVS, WARMUP, LEARNING_RATE = 16, 64, 1e-3


def run(
    updates: int, n: Sequence[int], capacities: Sequence[int], keys: jax.Array, half_lives: Any = None, **how: Any
) -> np.ndarray:
    """Returns of the second half [lanes, seeds], by sequences [lanes]; the last capacity is the whole run."""
    steps = capacities[-1] // NUM_ENVS - WARMUP
    sizes = {"steps": steps, "num_envs": NUM_ENVS, "warmup": WARMUP, "length": steps + WARMUP}
    config = Config(max_n=max(n), max_updates=updates, **sizes, **how)
    same, ages = jnp.ones(len(n), int), jnp.array(capacities) // NUM_ENVS
    settings = Setting(None, jnp.array(n), LEARNING_RATE * same, updates * same, ages, half_lives)
    returns, times = sweep(config, keys, settings)
    print(f"{config.task}, {updates} per {NUM_ENVS} steps: {times}")
    return returns


def main() -> None:
    args = Parser("Returns of n steps by the capacity of the buffer and by the updates per step.", seeds=20).parse()
    tasks, ratios, steps = (["CartPole"], UPDATES[:1], 2_000) if args.short else (TASKS, UPDATES, 50_000)
    capacities = (*(x for x in CAPACITIES if x < steps), steps)
    names = [*(f"{x:,}" for x in capacities[:-1]), "all"]
    panels, figures = {}, {}
    for task, updates in itertools.product(tasks, ratios):
        case, lanes = f"{task}, {updates} per {NUM_ENVS} steps", zip(*itertools.product(N, capacities), strict=True)
        x = run(updates, *lanes, args.keys, task=TASKS[task], sampler=jr.Uniform())
        x = x.reshape(len(N), len(capacities), -1)
        panels[case] = {f"n = {n}": x[i].T for i, n in enumerate(N)}
        for (i, n), (j, name) in itertools.product(enumerate(N), enumerate(names)):
            figures[f"{case}, n = {n}, capacity {name}"] = x[i, j]
    path, title = args.out / "how_large.png", f"DQN: return of the second half of {steps:,} steps, {args.seeds} seeds"
    plot(path, title, panels, ("capacity", names), "return", columns=len(ratios))
    report(path, title, figures, 1)


if __name__ == "__main__":
    main()
