"""JaxGCRL's contrastive RL, original and ported: a point that moves through a maze.

pip install -e . 'brax==0.14.2' 'jax<0.10'
git clone https://github.com/MichalBortkiewicz/JaxGCRL && git -C JaxGCRL checkout 6dccab2
python examples/ports/jaxgcrl_crl.py --jaxgcrl JaxGCRL           # 8 seeds
python examples/ports/jaxgcrl_crl.py --jaxgcrl JaxGCRL --speed   # times of the buffer with its goals, and of runs
python examples/ports/jaxgcrl_crl.py --jaxgcrl JaxGCRL --check   # checks of both versions against correct values
python examples/ports/jaxgcrl_crl.py --jaxgcrl JaxGCRL --short   # to see that it runs

Tested with jax 0.9.2. `crl.py` runs unchanged, except for its queue and the function that draws goals. Its other agents
and environments are not imported. Its goals come from windows that start anywhere, so a window's end cuts the episode.
"""

import functools
import sys
import tempfile
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import jax
import jaxgcrl_checks
import measure
import numpy as np
from jaxgcrl_adapter import Replay, with_goals

TASK, PACKAGES = "simple_u_maze", ("brax", "mujoco", "flax", "optax")
ABSENT = ("brax.v1", "jaxgcrl.utils.env", "jaxgcrl.agents.ppo", "jaxgcrl.agents.sac", "jaxgcrl.agents.td3")
AGENT = {"batch_size": 128, "h_dim": 64, "max_replay_size": 1_000, "min_replay_size": 200, "unroll_length": 50}
LENGTHS = (1_500, 10_000)  # rows of an environment; JaxGCRL keeps 10,000
RUN = {"episode_length": 101, "num_envs": 32, "num_eval_envs": 128, "action_repeat": 1}
PORT, LINES = "goals from the whole episode", measure.count_lines(Replay, with_goals)


def load(clone: Path) -> tuple[ModuleType, type]:
    """JaxGCRL's agent as a module, and its maze. Its other agents and environments are left out."""
    sys.path.append(str(clone))
    with mock.patch.dict(sys.modules, {name: mock.MagicMock() for name in ABSENT}):
        from jaxgcrl.agents.crl import crl
        from jaxgcrl.envs.simple_maze import SimpleMaze
    return crl, SimpleMaze


def learn(crl: ModuleType, maze: type, port: bool, seed: int, updates: int, evaluations: int) -> tuple[float, float]:
    """The percentage of reached goals of a run, and the seconds of its updates after the first evaluation."""
    env, found = maze(backend="spring", maze_layout_name="u_maze"), []
    env.goal_indices = np.asarray(env.goal_indices)  # numbers that a jitted function can take as static

    def progress(step: int, metrics: dict[str, Any], *others: Any, **more: Any) -> None:
        found.append((100 * float(metrics["eval/episode_success_any"]), metrics["training/walltime"]))

    agent = crl.CRL(**AGENT)
    rollout = agent.unroll_length * RUN["num_envs"]
    total = agent.min_replay_size * RUN["num_envs"] + evaluations * updates * rollout
    with tempfile.TemporaryDirectory() as folder:
        config = {**RUN, "seed": seed, "num_evals": evaluations, "total_env_steps": total}
        config |= {"visualization_interval": 1, "checkpoint_logdir": folder}  # without a folder its last line fails
        ours = {"TrajectoryUniformSamplingQueue": functools.partial(Replay, gamma=agent.discounting)}
        with mock.patch.multiple(crl, **(ours | {"flatten_batch": with_goals} if port else {"logging": crl.logging})):
            agent.train_fn(SimpleNamespace(**config), env, env, progress_fn=progress)
    reached, times = np.array(found).T
    return float(reached[evaluations // 2 :].mean()), times[-1] - times[0]


def compare(crl: ModuleType, maze: type, seeds: list[int], updates: int, evaluations: int) -> list[dict[str, Any]]:
    """The row of returns of 8 seeds, or of times of fewer."""

    def run(name: str, seed: int) -> tuple[float, float]:
        return learn(crl, maze, name == "port", seed, updates, evaluations)

    *_, found = measure.in_turn(("original", "port"), seeds, run)
    returns = {name: [round(x, 1) for x, _ in values] for name, values in found.items()}
    seconds = {name: [x for _, x in values] for name, values in found.items()}
    rollout = AGENT["unroll_length"] * RUN["num_envs"]
    task = f"{TASK}, {AGENT['min_replay_size'] * RUN['num_envs'] + evaluations * updates * rollout:,} steps"
    if len(seeds) < 8:
        return [measure.row_of_times(PORT, LINES, task, seconds, None)]
    untimed: dict[str, list[float]] = {name: [] for name in found}
    return [measure.row_of_times(PORT, LINES, f"{task}, % of goals reached", untimed, returns)]


def time_buffers(crl: ModuleType, length: int, draws: bool, rounds: int) -> dict[str, Any]:
    """Seconds of an insertion of 62 rows of 32 environments into a full buffer, and of a draw if `draws`, in turn."""
    programs, states = {}, {}
    first, rollout = (jaxgcrl_checks.rows_at_full_size(crl, count) for count in (length, 62))
    for name, kind in (("original", crl.TrajectoryUniformSamplingQueue), ("port", Replay)):
        replay, draw = jaxgcrl_checks.at_full_size(crl, kind, length)

        def step(state: Any, key: jax.Array, insert: Any = replay.insert_internal, draw: Any = draw) -> Any:
            state = insert(state, rollout)
            if not draws:
                return state, ()
            state, pairs = draw(state, key)
            return state, (pairs.observation, pairs.action, pairs.extras["future_state"])

        programs[name] = jax.jit(step, donate_argnums=0)
        states[name] = jax.jit(replay.insert_internal, donate_argnums=0)(replay.init(jax.random.key(0)), first)
    seconds = measure.time_in_turn(programs, states, rounds)
    what = "an insertion of 62 rows and a draw of 32,000 pairs" if draws else "an insertion of 62 rows"
    return measure.row_of_times(
        PORT, LINES, f"the buffer alone, full, {length:,} rows of 32 environments, {what}", seconds, None
    )


def main() -> None:
    parser = measure.parser("JaxGCRL's contrastive RL, original and ported.")
    parser.add_argument("--jaxgcrl", type=Path, required=True, help="a clone of JaxGCRL")
    args = parser.parse()
    if not (args.jaxgcrl / "jaxgcrl" / "agents" / "crl" / "crl.py").exists():
        parser.error(f"argument --jaxgcrl: there is no jaxgcrl/agents/crl/crl.py in {str(args.jaxgcrl)!r}")
    crl, maze = load(args.jaxgcrl)
    file, agent, seeds = "jaxgcrl_crl", "JaxGCRL CRL", [args.seed + number for number in range(args.seeds)]
    counts = (2, 2) if args.short else (10, 10)  # updates between evaluations, and evaluations
    if args.check:
        measure.write(args.out, f"{file}_checks", PACKAGES, agent=agent, checks=jaxgcrl_checks.check(crl))
    elif args.speed:
        rows = []
        for length in LENGTHS[: 1 if args.short else None]:
            rows += [time_buffers(crl, length, draws, 3 if args.short else 5) for draws in (False, True)]
            measure.write(args.out, f"{file}_speed", PACKAGES, agent=agent, rows=rows)
        rows += compare(crl, maze, seeds[:3], *counts)
        measure.write(args.out, f"{file}_speed", PACKAGES, agent=agent, rows=rows)
    else:
        rows = compare(crl, maze, seeds, *counts)
        measure.write(args.out, file, PACKAGES, agent=agent, rows=rows)


if __name__ == "__main__":
    main()
