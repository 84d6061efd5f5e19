"""What the examples share: their command lines, progress bars, tables, plots and result files.

tqdm and matplotlib are imported on first use, so that an agent can be imported without them.
"""

import argparse
import datetime
import functools
import importlib.metadata
import json
import platform
import re
import sys
import time
import types
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jaxreplay as jr

START = time.perf_counter()  # of the program, nearly
COLORS = ("tab:blue", "tab:orange", "tab:green")


def agent(name: str, **constants: Any) -> Any:
    """The program `examples/agents/NAME.py` as a module, with other values of the constants at its top."""
    path = Path(__file__).resolve().parents[1] / "agents" / f"{name}.py"
    source = path.read_text()
    for constant, value in constants.items():
        source, found = re.subn(rf"^{constant} = [^#\n]*", f"{constant} = {value!r}  ", source, flags=re.MULTILINE)
        assert found == 1, f"{path} has no constant {constant}"
    module = types.ModuleType(f"agent_{name}")
    exec(compile(source, str(path), "exec"), module.__dict__)
    return module


class Parser(argparse.ArgumentParser):
    """A parser with one-line errors on stderr and exit status 2."""

    def __init__(self, description: str):
        super().__init__(description=description, allow_abbrev=False)
        self.counts: dict[str, tuple[int, int]] = {}

    def add_count(self, name: str, what: str, default: int, short: int, low: int = 1, high: int = 2**31 - 1) -> None:
        """Add an integer option with another default for --short."""
        self.add_argument(f"--{name}", type=integer(low, high), help=f"{what} ({default}; {short} if short)")
        self.counts[name] = default, short

    def add_experiment(self, seeds: int, short_seeds: int = 2, short: str = "a tiny budget; it does not learn") -> None:
        """Add the options of every experiment: --seeds, --seed, --out and --short."""
        self.add_count("seeds", "number of seeds", seeds, short_seeds, high=4096)
        self.add_argument("--seed", type=integer(0), default=0, help="base seed (0)")
        self.add_argument("--out", type=Path, default=Path("out"), help="output folder (out)")
        self.add_argument("--short", action="store_true", help=short)

    def parse(self) -> argparse.Namespace:
        """The arguments, with defaults filled in. Makes the folder of --out, if there is that option."""
        args = self.parse_args()
        for name, defaults in self.counts.items():
            if getattr(args, name) is None:
                setattr(args, name, defaults[args.short])
        if "out" in args:
            try:
                args.out.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                self.error(f"argument --out: cannot make the folder {str(args.out)!r} ({error.strerror})")
        return args

    def check_multiple(self, name: str, count: int, of: int) -> None:
        """End with an error unless the option --`name` is a multiple."""
        if count % of:
            self.error(f"argument --{name}: {count} is not a multiple of {of}")

    def learning_steps(self, env_steps: int, num_envs: int, config: Any) -> int:
        """Steps after the warmup within `env_steps`, rounded down to whole intervals of progress reports."""
        least = num_envs * (config.warmup + config.intervals)
        if env_steps < least:
            self.error(f"argument --steps: {env_steps} is too few for {num_envs} environments, which need {least}")
        return (env_steps // num_envs - config.warmup) // config.intervals * config.intervals

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message}\n")


def integer(low: int, high: int = 2**31 - 1) -> Callable[[str], int]:
    """An argument type: an integer from `low` to `high`."""

    def parse(text: str) -> int:
        if not text.removeprefix("-").isdecimal() or not low <= int(text) <= high:
            raise argparse.ArgumentTypeError(f"{text!r} is not an integer from {low} to {high}")
        return int(text)

    return parse


def count_episodes(returns: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The number of episodes that ended, and their mean return."""
    episodes = jnp.sum(~jnp.isnan(returns))
    return episodes, jnp.nansum(returns) / jnp.maximum(episodes, 1)


class Progress:
    """A bar over the environment steps of all seeds.

    In a jitted function, call it with the `returns` of some steps, NaN where no episode ended. The compiled function
    then advances the bar by these steps. Elsewhere call `update`.
    """

    def __init__(self, total: int, name: str = "", **settings: Any):
        from tqdm import tqdm

        self.name = name
        self.bar = tqdm(total=total, desc=f"{name}compiling", unit=" env steps", unit_scale=True, **settings)

    def __call__(self, returns: jax.Array) -> None:
        jax.debug.callback(functools.partial(self.update, returns.size), *count_episodes(returns), ordered=True)

    def update(self, steps: int, episodes: jax.Array, mean_return: jax.Array) -> None:
        text = f"return {float(mean_return):.2f}" if int(episodes) > 0 else "training"
        self.bar.set_description(f"{self.name}{text}", refresh=False)
        self.bar.update(steps)


def with_final_rows(
    env: Any, env_params: Any, see: Callable[[jax.Array], jax.Array] = lambda obs: obs
) -> jr.NextStepAutoreset:
    """An environment of gymnax with rows for final observations; `see` returns what is stored of an observation."""

    def env_step(key: jax.Array, env_state: Any, action: jax.Array) -> tuple:
        obs, env_state, reward, terminated, truncated, info = env.step(key, env_state, action, env_params)
        return see(obs), env_state, reward, terminated, truncated, see(info["final_observation"])

    return jr.NextStepAutoreset(env_step=env_step)


def make_loop(agent: tuple[Callable, Callable, Callable], config: Any) -> tuple[Callable, Callable]:
    """Training of all seeds in two parts: begin(keys) is the warmup, advance(state, times) the steps at these times.

    Both return the new state, and the second result of `act` at each step, [steps, seeds, ...].
    """
    init, act, learn = agent
    init, act, learn = jax.vmap(init), jax.vmap(act, in_axes=(0, None)), jax.vmap(learn)
    epsilon = optax.linear_schedule(1.0, config.epsilon, int(config.exploration * config.steps))

    def begin(keys: jax.Array) -> tuple[Any, jax.Array]:
        return jax.lax.scan(lambda state, _: act(state, 1.0), init(keys), length=config.warmup)

    def step(state: Any, t: jax.Array) -> tuple[Any, jax.Array]:
        state, returns = act(state, epsilon(t))
        return learn(state), returns

    return begin, lambda state, times: jax.lax.scan(step, state, times)


def train_and_test(
    train: Callable, states: Any, arguments: Iterable[tuple], bar: Any, steps: int = 1
) -> tuple[np.ndarray, Any]:
    """Results [seeds, calls] of `train(states, *arguments) -> states, result [seeds]`, and the last states.

    The bar advances by `steps` per call.
    """
    curve = []
    for each in arguments:
        states, found = train(states, *each)
        curve.append(np.asarray(found))
        bar.set_postfix_str(f"{curve[-1].mean():.3g}", refresh=False)
        bar.update(steps)
    return np.stack(curve, axis=1), states


def make_train(
    agent: tuple[Callable, Callable, Callable], config: Any, report: Callable[[jax.Array], None]
) -> Callable[[jax.Array], jax.Array]:
    """A jitted function from keys [seeds] to the second result of `act` at each step, [warmup + steps, seeds, ...].

    `report` is called while tracing, with the results of each interval.
    """
    begin, advance = make_loop(agent, config)

    def interval(state: Any, times: jax.Array) -> tuple[Any, jax.Array]:
        state, returns = advance(state, times)
        report(returns)
        return state, returns

    def train(keys: jax.Array) -> jax.Array:
        state, first = begin(keys)
        times = jnp.arange(config.steps).reshape(config.intervals, -1)
        _, returns = jax.lax.scan(interval, state, times)
        return jnp.concatenate([first, returns.reshape(-1, *returns.shape[2:])])

    return jax.jit(train)


def run(
    agent: tuple[Callable, Callable, Callable], config: Any, args: argparse.Namespace, name: str = "", rollout: int = 1
) -> tuple[np.ndarray, str]:
    """Train all seeds, with a bar: the result of `make_train`, and a line with the times.

    `act` makes `rollout` steps of each environment.
    """
    keys = jax.random.split(jax.random.key(args.seed), args.seeds)
    progress = Progress(config.steps * rollout * config.num_envs * args.seeds, name)
    start = time.perf_counter()
    compiled_train = make_train(agent, config, progress).lower(keys).compile()
    compiled = time.perf_counter()
    progress.bar.unpause()  # its clock starts here
    returns = np.asarray(compiled_train(keys))
    jax.effects_barrier()
    seconds = time.perf_counter() - compiled
    progress.bar.close()
    speed = f"{returns.size / seconds:,.0f} env steps/s"
    return returns, f"compile {compiled - start:.1f} s, train {seconds:.1f} s, {speed}"


def learning_curves(returns: np.ndarray, last_episodes: int, points: int = 201) -> tuple[np.ndarray, np.ndarray]:
    """Environment steps of a seed [points], and the mean return of its last episodes at each [seeds, points].

    `returns` [steps, seeds, num_envs] holds the return of each episode at its last step, and NaN elsewhere.
    """
    steps, seeds, num_envs = returns.shape
    times, curves = np.linspace(0, steps, points), np.full((seeds, points), np.nan)
    for seed in range(seeds):
        ended, envs = np.nonzero(~np.isnan(returns[:, seed]))
        episodes = returns[ended, seed, envs]
        for point, count in enumerate(np.searchsorted(ended, times)):
            if count:
                curves[seed, point] = episodes[max(0, count - last_episodes) : count].mean()
    return times * num_envs, curves


def interval(values: np.ndarray) -> tuple[float, float]:
    """95% bootstrap interval of the mean over seeds."""
    means = np.random.default_rng(0).choice(values, (10_000, len(values))).mean(axis=1)
    low, high = np.percentile(means, [2.5, 97.5])
    return low, high


def command() -> str:
    """The command line of this program in its folder, without `--out` and without the folders of absolute paths."""
    words = ["/".join(Path(sys.argv[0]).resolve().parts[-2:]), *sys.argv[1:]]
    if "--out" in words:
        place = words.index("--out")
        del words[place : place + 2]
    return " ".join(Path(word).name if word.startswith("/") else word for word in words)


def record(path: Path, figures: dict[str, Any], *, seeds: int | None = None) -> None:
    """Write a study's result file `path`: its figures, command, seconds, date and versions.

    A figure is an array [seeds], written with its mean and the interval of the mean; or a tuple of a value and the ends
    of its interval; or a number. `seeds` is needed only if no figure is an array.
    """

    def numbers(values: Any) -> list[float | None]:
        return [None if np.isnan(x) else float(f"{x:.7g}") for x in np.ravel(values)]

    rows = []
    for name, figure in figures.items():
        of_seeds = {}
        if isinstance(figure, np.ndarray):
            seeds, of_seeds = len(figure), {"seeds": numbers(figure)}
            figure = figure.mean(), *interval(figure)
        value, *ends = numbers(figure)
        row = {"value": value, **({"interval": ends} if ends else {}), **of_seeds}
        rows.append(f"  {json.dumps(name)}: {json.dumps(row)}")
    versions = {"python": platform.python_version(), "jax": jax.__version__, "jaxreplay": jr.__version__}
    if "gymnax" in sys.modules:
        versions["gymnax"] = importlib.metadata.version("gymnax")
    head = {
        "command": command(),
        "seeds": seeds,
        "date": datetime.date.today().isoformat(),
        "seconds": round(time.perf_counter() - START),  # compiling included
        "cpu_seconds": round(time.process_time()),  # of all threads: other programs hardly change it
        "device": jax.devices()[0].device_kind,
        "versions": versions,
    }
    lines = [f" {json.dumps(name)}: {json.dumps(value)}" for name, value in head.items()]
    path.write_text("{\n" + ",\n".join([*lines, ' "figures": {\n' + ",\n".join(rows) + "\n }"]) + "\n}\n")


def text_of(figure: Any, digits: int) -> str:
    """A figure of `record` as text, such as "0.50 [0.40, 0.60]"."""
    if isinstance(figure, np.ndarray):
        figure = figure.mean(), *interval(figure)
    value, *ends = (f"{x:,.{digits}f}" for x in np.ravel(figure))
    return f"{value} [{', '.join(ends)}]" if ends else value


def report(path: Path, title: str, figures: dict[str, Any], digits: int = 2) -> None:
    """Print figures by their names "ROW, COLUMN" in a table, and `record` them beside the plot `path`."""
    table: dict[str, dict[str, str]] = {}
    for name, figure in figures.items():
        row, _, column = name.rpartition(", ")
        table.setdefault(row, {})[column] = text_of(figure, digits)
    columns = list(dict.fromkeys(column for row in table.values() for column in row))
    first, width = 2 + max(map(len, table)), 2 + max(22, *map(len, columns))
    print(f"{title}\nmean over seeds [95% bootstrap interval]\n{'':{first}}", end="")
    print("".join(f"{column:>{width}}" for column in columns))
    for name, row in table.items():
        print(f"{name:{first}}" + "".join(f"{row.get(column, ''):>{width}}" for column in columns))
    save(path, figures)


def save(path: Path, figures: dict[str, Any], *, seeds: int | None = None) -> None:
    """`record` the figures of a study beside its plot `path`, and print where they are."""
    record(path.with_suffix(".json"), figures, seeds=seeds)
    written = " and ".join(str(x) for x in dict.fromkeys((path, path.with_suffix(".json"))))
    print(f"{time.perf_counter() - START:.0f} s with compiling; wrote {written}")


def print_table(title: str, last_episodes: int, final: dict[str, np.ndarray]) -> None:
    """Print the final returns of each agent, `final` [seeds], with their mean and its interval."""
    means = [text_of(values, 2) for values in final.values()]
    width = max(26, *(len(text) + 2 for text in (*final, *means)))
    print(f"{title}\nreturn: mean of the last {last_episodes} training episodes; [95% bootstrap interval over seeds]")
    print("seed" + "".join(f"{name:>{width}}" for name in final))
    for seed, row in enumerate(zip(*final.values(), strict=True)):
        print(f"{seed:4d}" + "".join(f"{value:{width}.2f}" for value in row))
    print("mean" + "".join(f"{text:>{width}}" for text in means))


def heat_map(axes: Any, values: np.ndarray, low: float, high: float, digits: int = 2) -> Any:
    """Draw means of `values` [rows, columns, seeds] and their intervals, in colors from `low` to `high`."""
    means = values.mean(axis=-1)
    image = axes.imshow(means, vmin=low, vmax=high, cmap="viridis", origin="lower", aspect="auto")
    for row, column in np.ndindex(means.shape):
        text = text_of(values[row, column], digits).replace(" [", "\n[")
        color = "white" if means[row, column] < (low + high) / 2 else "black"
        axes.text(column, row, text, ha="center", va="center", fontsize=8.5, color=color)
    axes.tick_params(length=0)
    return image


def legend_below(axes: Any, ncols: int = 2) -> None:
    """Add a legend below the axis label, where it covers no curve. The figure needs constrained layout."""
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.14), ncols=ncols, frameon=False)


def plot_mean(axes: Any, x: np.ndarray, curves: np.ndarray, color: Any, label: str, *, line: str = "-") -> None:
    """Draw the mean of `curves` [seeds, points], in a band of its 95% bootstrap intervals."""
    low, high = np.transpose([interval(point) for point in curves.T])
    axes.fill_between(x, low, high, color=color, alpha=0.15, linewidth=0)
    axes.plot(x, curves.mean(axis=0), line, color=color, linewidth=2, label=label)


def plot(
    path: Path,
    title: str,
    env_steps: np.ndarray,
    curves: dict[str, np.ndarray],
    *,
    ylabel: str,
    ylim: tuple[float, float] | None = None,
    goal: tuple[float, str] | None = None,
    xlabel: str = "environment steps per seed",
) -> None:
    """Plot learning curves [seeds, points] of each agent, and a dashed line at the goal.

    Each seed is a faint line. From 17 seeds on, a band of the mean's 95% intervals takes their place.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.subplots()
    for number, (name, seeds) in enumerate(curves.items()):
        color = f"C{number % 10}"
        label = f"{name}: mean of {len(seeds)} seeds" if len(curves) > 1 else f"mean of {len(seeds)} seeds"
        if len(seeds) > 16:
            plot_mean(axes, env_steps, seeds, color, label)
        else:
            axes.plot(env_steps, seeds.T, color=color, alpha=0.35, linewidth=0.8)
            axes.plot(env_steps, seeds.mean(axis=0), color=color, linewidth=2.5, label=label)
    if goal is not None:
        axes.axhline(goal[0], color="gray", linestyle="--", linewidth=1, label=goal[1])
    axes.set(title=title, xlabel=xlabel, ylabel=ylabel, xlim=(0, env_steps[-1]), ylim=ylim)
    axes.xaxis.set_major_formatter("{x:,.0f}")
    legend_below(axes)
    figure.savefig(path, dpi=150)


def summarize(
    path: Path,
    title: str,
    name: str,
    returns: np.ndarray,
    timing: str,
    *,
    last_episodes: int,
    goal: float | None = None,
    ylim: tuple[float, float] | None = None,
) -> None:
    """Print the table of one agent's `returns` (see `learning_curves`), and plot its learning curves to `path`.

    Also write the result file with the same stem.

    With a `goal`, also print how many seeds reach this return.
    """
    env_steps, curves = learning_curves(returns, last_episodes)
    final = curves[:, -1]
    print_table(f"{title}, {env_steps[-1]:,.0f} environment steps per seed", last_episodes, {name: final})
    print(timing if goal is None else f"{np.sum(final >= goal)} of {len(final)} seeds reach {goal:g}; {timing}")
    line = None if goal is None else (goal, f"return {goal:g}")
    plot(path, title, env_steps, {name: curves}, ylabel=f"return, last {last_episodes} episodes", ylim=ylim, goal=line)
    reached = {} if goal is None else {f"seeds above {goal:g}": np.sum(final >= goal)}
    save(path, {"return": final, **reached})
