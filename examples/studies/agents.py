"""Do the agents learn what the literature says, and what of them does it need?

They do: the page of evidence has each result with its interval.

This runs an agent with several values of the constants
at its top, and writes its final returns into a result file.

python examples/studies/agents.py r2d2_cartpole           # any name of RESULTS
python examples/studies/agents.py r2d2_cartpole --short   # half a minute at most, to see that it runs
"""

import contextlib
import sys
from unittest import mock

import numpy as np
from experiment import Parser, agent, plot, report

MEMORIES = {"recurrent": {}, "feed-forward": {"RECURRENT": False}}
NFSP = {name: {"MEMORY": name} for name in ("reservoir", "ring", "ring of all")}
SHARES = {"hindsight": {}, "no hindsight": {"SHARE": 0.0}}
HER = {f"{bits}, {name}": {"BITS": bits, **share} for bits in (8, 13, 20, 30) for name, share in SHARES.items()}
RLPD = {name: {"SOURCE": source} for name, source in (("online", "online"), ("data alone", "data"))}
LEVELS = {f"{method}, L1": {"METHOD": method} for method in ("PLR", "robust PLR", "ACCEL")}
MEASURES = {"nfsp": "exploitability", "her": "goals reached", "levels": "mazes solved"}  # of others: the return
ABOUT = {  # of pictures whose legend needs it
    "levels": "Shares of mazes solved that no agent was trained on; 1 is best\n"
    "by the choice of levels to train on, and their score\n(L1: mean |advantage|; positive: value loss)",
}
RESULTS = {  # of each file: the agent, and its constants by figure
    "dqn_prioritized": ("dqn", {"return": {}}),
    "sac_uniform": ("sac", {"return": {}}),
    "sac_prioritized": ("sac", {"return": {"PRIORITIZED": True}}),
    "multi_device_prioritized": ("multi_device", {"return": {}}),
    "r2d2_cartpole": ("r2d2", MEMORIES),
    "r2d2_memory": ("r2d2", {name: {"TASK": "memory", **constants} for name, constants in MEMORIES.items()}),
    "nfsp": ("nfsp", NFSP),
    "her": ("her", HER),
    "rlpd": ("rlpd", RLPD | {"half and half": {}}),
    "levels": ("levels", {"random": {"METHOD": "random"}, **LEVELS, "PLR, positive": {"SCORE": "positive"}}),
}


def figures_of(curves: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Figures [seeds] from learning curves [seeds, points]: the last point; of two agents also differences."""
    figures = {name: x[:, -1] for name, x in curves.items()}
    if "half and half" in figures:
        figures |= {f"half and half less {name}": figures["half and half"] - figures[name] for name in RLPD}
    if "random" in figures:
        figures |= {f"{name} less random": x - figures["random"] for name, x in figures.items() if name != "random"}
    return figures


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
    path, measure = args.out / f"{args.name}.png", MEASURES.get(program, "return of the last episodes")
    points = np.linspace(0, 1, next(iter(curves.values())).shape[1] + 1)[1:]
    plot(path, ABOUT.get(args.name, args.name), {"": curves}, ("share of training", points), measure)
    report(path, args.name, figures_of(curves), 3)


if __name__ == "__main__":
    main()
