"""Should old transitions fade? The DQN of sweep.py, with draws that prefer new transitions in three ways.

pip install -e '.[examples]'
python examples/studies/fading.py           # 20 seeds; figures in fading.json
python examples/studies/fading.py --short   # a few seconds, to see that it runs
"""

import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
from experiment import Parser, plot, report
from how_large import NUM_ENVS, UPDATES, run

import jaxreplay as jr

TASKS = {  # n, and the settings of the environment
    "CartPole": (10, {"task": "CartPole-v1"}),
    "Catch that changes": (3, {"task": "Catch-bsuite", "swap": 500}),
}
AGES = (1_000, 8_000)  # of drawn transitions, on average


def train(task: str, updates: int, ages: tuple[int, ...], steps: int, keys: jax.Array) -> dict[str, np.ndarray]:
    """Returns [seeds, ages and none] by the way of drawing."""
    n, env = TASKS[task]

    def returns(sampler: jr.samplers.Sampler, *windows: int, half_lives: jax.Array | None = None) -> np.ndarray:
        return run(updates, [n] * len(windows), windows, keys, half_lives, sampler=sampler, **env)

    halves = [math.log(2) * age / NUM_ENVS for age in ages]  # in steps of a stream
    windows = returns(jr.Uniform(), *(2 * age for age in ages), steps)
    recent = [*(returns(jr.Recent(half_life=half_life), steps)[0] for half_life in halves), windows[-1]]
    all_steps = [steps] * (len(ages) + 1)
    prioritized = returns(jr.Prioritized(half_life=1.0), *all_steps, half_lives=jnp.array([*halves, jnp.inf]))
    return {"window": windows.T, "Recent": np.transpose(recent), "Prioritized": prioritized.T}


def figures_of(returns: dict[str, np.ndarray], names: list[str]) -> dict[str, np.ndarray]:
    """The figures of a case; `names` of the ages. Without one, `window` and `Recent` are uniform draws."""
    figures = {"uniform": returns["window"][:, -1], "Prioritized": returns["Prioritized"][:, -1]}
    for (draw, x), (i, age) in itertools.product(returns.items(), enumerate(names[:-1])):
        figures |= {f"{draw} {age}": x[:, i], f"{draw} {age}, gain": x[:, i] - x[:, -1]}
    return figures


def main() -> None:
    args = Parser("Returns by the age of drawn transitions, and by the way of drawing.", seeds=20).parse()
    cases = [("CartPole", 1)] if args.short else [*itertools.product(TASKS, UPDATES)]
    ages, steps = (AGES[:1], 2_000) if args.short else (AGES, 50_000)
    panels, figures, names = {}, {}, [*(f"{age:,}" for age in ages), "no bound"]
    for task, updates in cases:
        case = f"{task}, {updates} per {NUM_ENVS} steps"
        panels[case] = train(task, updates, ages, steps, args.keys)
        figures |= {f"{case}, {name}": x for name, x in figures_of(panels[case], names).items()}
    path, title = args.out / "fading.png", f"DQN: return of the second half of {steps:,} steps, {args.seeds} seeds"
    x = "mean age of drawn transitions [steps]", names
    plot(path, f"{title}; more is better", panels, x, "return", columns=1 if args.short else len(UPDATES))
    report(path, title, figures)


if __name__ == "__main__":
    main()
