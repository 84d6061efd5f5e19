"""Do the agents learn what the literature says, and what of them does it need?

They do: the page of evidence has each result with its interval.

This runs an agent with several values of the constants
at its top, and writes its final returns into a result file.

python examples/studies/agents.py r2d2_cartpole           # any name of RESULTS
python examples/studies/agents.py r2d2_cartpole --short   # a few seconds, to see that it runs
"""

import contextlib
import sys
from unittest import mock

import numpy as np
from experiment import Parser, agent, plot, report

EPISODES = {"WINDOWS": "episodes"}  # whole ones, of at most 500 steps of CartPole and 21 of MemoryChain
LONG = {"WARMUP": 63, "SEQUENCE_LENGTH, STRIDE, BURN_IN, BATCH": (503, 1, 0, 4)}
SHORT = {"WARMUP": 4, "SEQUENCE_LENGTH, STRIDE, BURN_IN, BATCH": (24, 1, 0, 4)}
MEMORY = {"TASK": "memory"}


def with_and_without_memory(**constants: object) -> dict[str, dict]:
    return {"recurrent": constants, "feed-forward": {**constants, "RECURRENT": False}}


NFSP = {name: {"MEMORY": name} for name in ("reservoir", "ring", "ring of all")}
SHARES = {"hindsight": {}, "no hindsight": {"SHARE": 0.0}}
HER = {f"{bits}, {name}": {"BITS": bits, **share} for bits in (8, 13, 20, 30) for name, share in SHARES.items()}
RLPD = {name: {"SOURCE": source} for name, source in (("online", "online"), ("data alone", "data"))}
LEVELS = {f"{method}, L1": {"METHOD": method} for method in ("random", "PLR", "robust PLR", "ACCEL")}
RESULTS = {  # of each file: the agent, and its constants by figure
    "dqn_prioritized": ("dqn", {"return": {}}),
    "sac_uniform": ("sac", {"return": {}}),
    "sac_prioritized": ("sac", {"return": {"PRIORITIZED": True}}),
    "multi_device_prioritized": ("multi_device", {"return": {}}),
    "r2d2_cartpole": ("r2d2", with_and_without_memory()),
    "r2d2_cartpole_refresh": ("r2d2", with_and_without_memory(REFRESH=True)),
    "r2d2_cartpole_episodes": ("r2d2", with_and_without_memory(**EPISODES, **LONG)),
    "r2d2_memory": ("r2d2", with_and_without_memory(**MEMORY)),
    "r2d2_memory_refresh": ("r2d2", with_and_without_memory(**MEMORY, REFRESH=True)),
    "r2d2_memory_episodes": ("r2d2", with_and_without_memory(**MEMORY, **EPISODES, **SHORT)),
    "nfsp": ("nfsp", NFSP),
    "her": ("her", HER),
    "rlpd": ("rlpd", RLPD | {"half and half": {}}),
    "levels": ("levels", LEVELS | {"PLR, positive": {"SCORE": "positive"}}),
}


def last_half(curves: np.ndarray) -> np.ndarray:
    return curves[:, curves.shape[1] // 2 :]


def figures_of(program: str, curves: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Figures [seeds] from learning curves [seeds, points]."""
    if program not in ("nfsp", "rlpd"):
        return {name: x[:, -1] for name, x in curves.items()}
    halves = {name: last_half(x) for name, x in curves.items()}
    ways = {"at the end": lambda x: x[:, -1], "mean of the last half": lambda x: x.mean(axis=1)}
    if program == "nfsp":
        ways["largest of the last half"] = lambda x: x.max(axis=1)
    elif "half and half" in curves:
        halves |= {f"half and half less {name}": halves["half and half"] - halves[name] for name in RLPD}
    return {f"{name}, {way}": figure(x) for name, x in halves.items() for way, figure in ways.items()}


def figures_of_levels(found: dict[str, dict[str, np.ndarray]]) -> dict[str, np.ndarray]:
    """Figures [seeds]. "more": mazes solved, less those with random levels after as many steps, or as many updates."""
    figures, random = {}, found["random, L1"]
    for name, curves in found.items():
        learned, mazes = curves["learned"][:, -1].mean(), curves["mazes"][:, -1]
        after_updates = [np.interp(learned, random["learned"][0], x) for x in random["mazes"]]
        figures |= {f"{name}, {test}": curves[test][:, -1] for test in ("mazes", "random levels")}
        figures[f"{name}, more by steps"] = mazes - random["mazes"][:, -1]
        figures[f"{name}, more by updates"] = mazes - np.array(after_updates)
        figures[f"{name}, updates of the parameters"] = np.round(learned)
        figures[f"{name}, no path"] = last_half(curves["no path"]).mean()  # of levels learned
    return {name.replace("random, L1", "random"): figure for name, figure in figures.items()}


def main() -> None:
    parser = Parser("Returns of agents, with several values of their constants.", seeds=8)
    parser.add_argument("name", choices=RESULTS, help="of the result file")
    args = parser.parse()
    program, variants = RESULTS[args.name]
    variants = dict(list(variants.items())[: 1 if args.short else None])
    words = [program, "--seed", str(args.seed), "--seeds", str(args.seeds), *["--short"] * args.short]
    curves = {}
    with contextlib.chdir(args.out), mock.patch("sys.argv", words):
        for figure, constants in variants.items():
            print(f"{figure}: ", end="", file=sys.stderr)
            curves[figure] = agent(program, **constants).main()
    if program == "levels":
        figures, curves = figures_of_levels(curves), {name: x["mazes"] for name, x in curves.items()}
    else:
        figures = figures_of(program, curves)
    path = args.out / f"{args.name}.png"
    points = np.linspace(0, 1, next(iter(curves.values())).shape[1] + 1)[1:]
    plot(path, args.name, ("share of training", points), "return of the last episodes", curves)
    report(path, args.name, figures, 3)


if __name__ == "__main__":
    main()
