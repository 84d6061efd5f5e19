"""Should old transitions fade? The DQN of sweep.py, with draws that prefer new transitions in three ways.

Where the task changes, yes. Where it does not, fading without priorities more than halves the return at few updates.

pip install -e '.[examples]'
python examples/studies/fading.py           # 20 seeds; figures in fading.json
python examples/studies/fading.py --short   # half a minute at most, to see that it runs

- window: uniform draws of the newest, by `max_age`.
- Recent: `jr.Recent(half_life=)`.
- Prioritized: `jr.Prioritized(half_life=)`, by alpha 0.6 and beta 0.4.

Window and half-life give drawn transitions a mean age of 1,000 or 8,000 steps, apart from priorities; the buffer holds
the whole run. In Catch left and right change places every 8,000 steps, so half of the older transitions are wrong. One
or four updates of 32 transitions follow 16 steps. A gain is over the same draws without a preference, by seed.

- CartPole, one update: Recent and windows lose, for 8,000 -67 [-106, -30] and -85 [-114, -58]. arXiv:2605.10236 found
  that fading gains there. Prioritized shows no gain, 26 [-12, 63], and loses with 1,000.
- CartPole, four: Recent gains 102 [10, 195], and no more than a window of 1,000, 115 [30, 195]. Prioritized shows no
  gain: 58 [-4, 121].
- Catch: all gain, except Prioritized with 1,000 at one update. With four and 1,000, Recent beats windows: 0.56 [0.53,
  0.59] against 0.43 [0.40, 0.46]. Prioritized with 8,000 is best: 0.62 [0.58, 0.66], without fading 0.35 [0.29, 0.40].
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
DRAWS = "window: the newest alone", "Recent: old ones fade", "Prioritized: old ones fade"
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
    panels, figures, names = {}, {}, [*(f"{age:,}" for age in ages), "any"]
    for task, updates in cases:
        returns, case = train(task, updates, ages, steps, args.keys), f"{task}, {updates} per {NUM_ENVS} steps"
        figures |= {f"{case}, {name}": x for name, x in figures_of(returns, names).items()}
        panels[case.replace(", ", ", updates: ")] = dict(zip(DRAWS, returns.values(), strict=True))
    path, title = args.out / "fading.png", f"DQN: return of the second half of {steps:,} steps, {args.seeds} seeds"
    x, y = ("mean age of draws in steps (priorities apart)", names), "return (best: 500 in CartPole, 1 in Catch)"
    plot(path, title, panels, x, y, columns=1 if args.short else len(UPDATES))
    report(path, title, figures)


if __name__ == "__main__":
    main()
