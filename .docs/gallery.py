"""Make the gallery's pictures in .docs/pages/assets/gallery: `python .docs/gallery.py [NAME ...]`.

It needs the extra `examples`, and pillow. Studies have large figures in `examples/studies/results`, and notebooks
have theirs, which are made smaller. The other programs run (some minutes), and recipes run (some seconds each). With
names, such as `agents/sac.py` or `recipes/her.py`, only these.
"""

import base64
import io
import json
import os
import pathlib
import runpy
import subprocess
import sys
import tempfile
from collections.abc import Callable
from typing import Any

import matplotlib
import numpy as np
from matplotlib.figure import Figure
from PIL import Image

ROOT = pathlib.Path(__file__).parent.parent
OUT = ROOT / ".docs/pages/assets/gallery"
WIDTH, COLORS = 640, 48  # pixels, and colours of the palette
FIGURES: dict[str, tuple[str, float]] = {  # of each study: the figure, and the share of its width to show
    "quickstart.py": ("quickstart.png", 1),
    "studies/cliffwalk.py": ("studies/results/cliffwalk.png", 1),
    "studies/curriculum.py": ("studies/results/curriculum.png", 1),
    "studies/fading.py": ("studies/results/fading.png", 1),
    "agents/her.py": ("studies/results/her.png", 0.51),
    "studies/how_large.py": ("studies/results/how_large.png", 1),
    "agents/levels.py": ("studies/results/levels.png", 1),
    "agents/nfsp.py": ("studies/results/nfsp.png", 1),
    "agents/r2d2.py": ("studies/results/r2d2_cartpole.png", 1),
    "studies/rae.py": ("studies/results/rae.png", 1),
    "agents/rlpd.py": ("studies/results/rlpd.png", 1),
    "studies/staleness.py": ("studies/results/staleness.png", 1),
    "studies/sweep.py": ("studies/results/sweep.png", 1),
    "studies/when_priorities_help.py": ("studies/results/when_priorities_help.png", 1),
}
PROGRAMS = tuple(f"agents/{name}.py" for name in ("dqn", "sac", "fast_td3", "minatar", "multi_device", "sebulba"))
NOTEBOOKS = {"looking_inside": 1}  # the number of the output to show
BLUE, ORANGE, GRAY = "tab:blue", "tab:orange", "gray"
Names = dict[str, Any]  # that a recipe binds


def curve(
    what: str, label: str, x: str = "updates", at: dict[str, float] | None = None, **axes_settings: Any
) -> Callable[[Any, Names], None]:
    """A curve of means over a hundredth of the run, and lines `at` values for comparison."""

    def draw(axes: Any, names: Names) -> None:
        y = np.asarray(names[what], np.float64)
        y = y.reshape(len(y), -1).mean(axis=1)
        part = -(-len(y) // 100)
        y = y[: len(y) // part * part].reshape(-1, part).mean(axis=1)
        axes.plot(part * (np.arange(len(y)) + 0.5), y, color=BLUE)
        for (name, value), color in zip((at or {}).items(), (GRAY, ORANGE), strict=False):
            axes.axhline(value, linestyle="--", color=color, label=name)
        axes.set(xlabel=x, ylabel=label, **axes_settings)
        if at:
            axes.legend(frameon=False)

    return draw


def values(axes: Any, names: Names) -> None:
    """Learned values of the corridor's cells, and the true ones."""
    learned = np.asarray(names["values"])
    axes.plot(learned, "o", color=BLUE, markersize=10, label="learned")
    axes.plot(0.99 ** np.arange(4, -1, -1), "_", color=ORANGE, markersize=40, markeredgewidth=3, label="true")
    axes.set(xlabel="cell", ylabel="value", xlim=(-0.6, 4.6), ylim=(0.95, 1.01))
    axes.legend(ncols=2, loc="upper left", markerscale=0.5)


def distributions(axes: Any, names: Names) -> None:
    """The distribution of returns in two cells."""
    mass = np.exp(names["params"] - np.logaddexp.reduce(names["params"], axis=-1, keepdims=True))
    for cell, color in ((0, ORANGE), (4, BLUE)):
        axes.plot(names["atoms"], mass[cell, 1], color=color, label=f"cell {cell}, value {names['values'][cell]:.2f}")
    axes.set(xlabel="return", ylabel="probability", xlim=(0.7, 1.3))
    axes.legend()


def corridor(axes: Any, names: Names) -> None:
    axes.plot(np.asarray(names["params"]).min(axis=0).max(axis=-1)[:49], color=BLUE, label="learned")
    axes.plot(0.99 ** np.arange(48, -1, -1), "--", color=ORANGE, label="true")
    axes.set(xlabel="cell", ylabel="value")
    axes.legend()


def lengths(axes: Any, names: Names) -> None:
    axes.hist(names["lengths"], bins=20, color=BLUE)
    axes.set(xlabel="steps of an episode", ylabel="episodes")


def flips(axes: Any, names: Names) -> None:
    learned = np.asarray(names["values"])
    axes.bar(range(len(learned)), learned, color=[ORANGE if bit == 3 else BLUE for bit in range(len(learned))])
    axes.set(xlabel="bit to flip (only bit 3 is wrong)", ylabel="value")


def average_policy(axes: Any, names: Names) -> None:
    for k, (name, color) in enumerate({"rock": BLUE, "paper": ORANGE, "scissors": "tab:green"}.items()):
        axes.plot(np.asarray(names["policies"])[:, k], color=color, label=name)
    for x in (0.25, 0.5):
        axes.axhline(x, linestyle="--", color=GRAY, linewidth=1)
    axes.set(xlabel="updates", ylabel="average policy", ylim=(0, 0.8))
    axes.legend(ncols=3, loc="upper center")


def slow_rollouts(axes: Any, names: Names) -> None:
    """Probability of the answer of slow tasks, and of fast ones, over ticks."""
    for (name, log), color in zip(names["logs"].items(), ("tab:red", ORANGE, BLUE), strict=True):
        axes.plot(log["slow"].mean(axis=0), color=color, linewidth=2.5, label=f"{name}: slow tasks")
        axes.plot(log["fast"].mean(axis=0), "--", color=color, linewidth=1.2, label="fast tasks")
    axes.set(xlabel="ticks of generation", ylabel="probability of the answer", ylim=(0, 1.02), xlim=(0, None))
    axes.legend(ncols=3, loc="upper center", bbox_to_anchor=(0.45, 1.25), fontsize=10, frameon=False)


CART = "A cart is to stand at 0: reward -place squared"
RECIPES: dict[str, Callable[[Any, Names], None]] = {
    "dqn": values,
    "rainbow": distributions,
    "sac": curve(
        "rewards", "mean reward per step", at={"not moving: -2.25": -2.25, "best: -0.025": -0.025}, title=CART
    ),
    "td3_lap": curve(
        "rewards", "mean reward per step", at={"not moving: -1.33": -4 / 3, "best: -0.56": -0.5625}, title=CART
    ),
    "r2d2": curve("rewards", "reward", ylim=(0.3, 1)),
    "dreamer": curve(
        "errors",
        "squared error (0 is perfect)",
        x="rounds: 256 new steps, 8 updates",
        at={"predicting the mean": 0.5},
        title="Predictions of a pendulum's next position",
        yscale="log",
    ),
    "qmix": curve("errors", "squared error", yscale="log"),
    "cloning": curve(
        "errors",
        "cross-entropy (0 is perfect)",
        x="epochs",
        at={"guessing one of two actions": np.log(2)},
        title="Imitating 1,000 demonstrations",
        ylim=(0, None),
    ),
    "keep_best": curve(
        "rewards",
        "right digits in a row",
        at={"guessing: 0.33": 1 / 3, "best: 16": 16},
        title="A lock of 16 digits: mean of 16 tries",
        ylim=(0, 17),
    ),
    "rlpd": corridor,
    "to_minari": lengths,
    "her": flips,
    "nfsp": average_policy,
    "groups": curve("rewards", "share of right rollouts", ylim=(0, 1)),
    "pace": slow_rollouts,
    "as_flashbax": values,
    "processes": curve("rewards", "share that reaches the goal", x="messages of 128 steps", ylim=(0, 1.02)),
}


def small(figure: pathlib.Path | io.BytesIO, name: str, share: float = 1) -> None:
    """Write the left `share` of a figure as the picture of `name`."""
    picture = Image.open(figure).convert("RGB")
    picture = picture.crop((0, 0, round(picture.width * share), picture.height))
    picture = picture.resize((WIDTH, round(picture.height * WIDTH / picture.width)), Image.Resampling.LANCZOS)
    path = (OUT / name).with_suffix(".png")
    path.parent.mkdir(parents=True, exist_ok=True)
    picture.quantize(COLORS).save(path, optimize=True)
    print(f"{path.relative_to(ROOT)}: {path.stat().st_size / 1000:.0f} kB")


def of_program(name: str, folder: pathlib.Path) -> pathlib.Path:
    """The figure that a program makes."""
    command = [sys.executable, str(ROOT / "examples" / name)]
    subprocess.run(command, check=True, cwd=folder, env={**os.environ, "PYTHONPATH": str(ROOT)})
    (figure,) = folder.glob(f"{pathlib.Path(name).stem}*.png")
    return figure


def of_recipe(name: str, folder: pathlib.Path) -> pathlib.Path:
    """A figure of the names that a recipe binds."""
    names = runpy.run_path(str(ROOT / "examples/recipes" / f"{name}.py"), run_name="__main__")
    with matplotlib.rc_context({"font.size": 13, "axes.spines.top": False, "axes.spines.right": False}):
        figure = Figure(figsize=(WIDTH / 100, 4.1), layout="constrained")
        RECIPES[name](figure.add_subplot(), names)
        figure.savefig(folder / f"{name}.png", dpi=200)
    return folder / f"{name}.png"


def of_notebook(name: str) -> io.BytesIO:
    """A figure among the outputs of a notebook."""
    cells = json.loads((ROOT / f"examples/notebooks/{name}.ipynb").read_text())["cells"]
    data = [output.get("data", {}) for cell in cells for output in cell.get("outputs", ())]
    return io.BytesIO(base64.b64decode([x["image/png"] for x in data if "image/png" in x][NOTEBOOKS[name]]))


def all_names() -> list[str]:
    recipes, notebooks = (f"recipes/{name}.py" for name in RECIPES), (f"notebooks/{name}.ipynb" for name in NOTEBOOKS)
    return [*FIGURES, *notebooks, *PROGRAMS, *recipes]


def main() -> None:
    names = sys.argv[1:] or all_names()
    for name in names:
        with tempfile.TemporaryDirectory() as folder:
            if name in FIGURES:
                small(ROOT / "examples" / FIGURES[name][0], name, FIGURES[name][1])
            elif name.startswith("notebooks/"):
                small(of_notebook(pathlib.Path(name).stem), name)
            elif name in PROGRAMS:
                small(of_program(name, pathlib.Path(folder)), name)
            else:
                small(of_recipe(pathlib.Path(name).stem, pathlib.Path(folder)), name)


if __name__ == "__main__":
    main()
