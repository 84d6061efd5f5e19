"""jaxued's robust PLR on mazes, original and ported: its training loop, with a smaller network and fewer steps.

pip install -e . distrax==0.1.9 tfp-nightly==0.26.0.dev20261027 gymnax==0.0.9 six
git clone https://github.com/DramaCow/jaxued && git -C jaxued checkout 0f8f1284
pip install ./jaxued
python examples/ports/jaxued_plr.py --jaxued jaxued             # 8 seeds
python examples/ports/jaxued_plr.py --jaxued jaxued --sampler   # times of the sampler alone
python examples/ports/jaxued_plr.py --jaxued jaxued --speed     # times of updates
python examples/ports/jaxued_plr.py --jaxued jaxued --check     # checks of both versions against correct values
python examples/ports/jaxued_plr.py --jaxued jaxued --short     # to see that it runs

Tested with jax 0.10.2. `examples/maze_plr.py` runs unchanged, except for the sampler that it makes, and the features of
its LSTM. Its logger is not imported, and its loop over tests is that of this program.
"""

import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import flax.linen as nn
import jax
import jax.numpy as jnp
import jaxued.level_sampler
import jaxued_adapter
import jaxued_checks
import measure
import numpy as np

PACKAGES = ("jaxued", "distrax", "gymnax", "flax", "optax")
FEATURES, FEATURES_OF_JAXUED = 64, 256  # of the LSTM
BATCH, TIMES = 32, 20
CAPACITIES = (4_000, 32_768)
UPDATES = 64
TESTS = ("TrivialMaze", "TrivialMaze2", "TrivialMaze3", "SixteenRooms", "SixteenRooms2", "Labyrinth")
TESTS = (*TESTS, "LabyrinthFlipped", "Labyrinth2", "StandardMaze", "StandardMaze2", "StandardMaze3")  # jaxued's
SETTINGS = {
    "run_name": "port",
    "seed": 0,
    "mode": "train",
    "checkpoint_save_interval": 0,
    "eval_num_attempts": 4,
    "lr": 1e-3,
    "max_grad_norm": 0.5,
    "num_steps": 256,
    "num_train_envs": BATCH,
    "num_minibatches": 1,
    "gamma": 0.995,
    "epoch_ppo": 5,
    "clip_eps": 0.2,
    "gae_lambda": 0.98,
    "entropy_coeff": 1e-3,
    "critic_coeff": 0.5,
    "score_function": "MaxMC",
    "exploratory_grad_updates": False,
    "level_buffer_capacity": 4_000,
    "replay_prob": 0.8,
    "staleness_coeff": 0.3,
    "temperature": 0.3,
    "topk_k": 4,
    "minimum_fill_ratio": 0.5,
    "prioritization": "rank",
    "buffer_duplicate_check": True,
    "use_accel": False,
    "num_edits": 5,
    "agent_view_size": 5,
    "n_walls": 25,
}
ORIGINAL = jaxued.level_sampler.LevelSampler
PORT = jaxued_adapter.LevelSampler
LINES = measure.count_lines(jaxued_adapter.Sampler, PORT)
RATE = "; solve rate in %"


class Captured(Exception):
    """Ends jaxued's `main` where its training would begin."""


def load(folder: Path) -> ModuleType:
    """jaxued's script as a module."""
    sys.path.append(str(folder))
    with mock.patch.dict(sys.modules, {"wandb": mock.MagicMock()}):
        import maze_plr as module

    return module


def setup(
    module: ModuleType, sampler: Callable, updates: int, num_features: int = FEATURES, **changed: Any
) -> tuple[Callable, Callable]:
    """jaxued's functions: from a seed to the first state, and from a state to one after `updates` updates and a test.

    The second also returns the solve rate in each of the test's mazes.
    """
    settings = {**SETTINGS, "eval_levels": list(TESTS), "eval_freq": updates, "num_updates": updates, **changed}
    found: dict[str, Callable] = {}

    def jit(function: Callable) -> Callable:
        found[function.__name__] = function
        return stop if function.__name__ == "train_and_eval_step" else jax.jit(function)

    def stop(*args: Any) -> None:
        raise Captured

    lstm = {"OptimizedLSTMCell": lambda features: nn.OptimizedLSTMCell(features=num_features)}
    module.nn = SimpleNamespace(**{**vars(nn), **lstm})
    module.LevelSampler = sampler
    module.wandb = mock.MagicMock(config=settings)
    module.jax = SimpleNamespace(**{**vars(jax), "jit": jit})
    try:
        module.main(settings)
    except Captured:
        pass
    finally:
        module.jax = jax

    def first(seed: jax.Array) -> tuple[jax.Array, Any]:
        init_key, train_key = jax.random.split(jax.random.PRNGKey(seed))
        return train_key, found["create_train_state"](init_key)

    def train(state: Any) -> tuple[Any, jax.Array]:
        state, metrics = found["train_and_eval_step"](state, None)
        return state, metrics["eval_solve_rates"]

    return first, train


def compare(programs: dict[str, tuple[Callable, list[tuple]]]) -> Iterator[dict[str, Any]]:
    """After each round the figures of both programs, functions and their arguments in each round; see `compare_all`."""
    compiled = {name: measure.compile_one(train, *args[0]) for name, (train, args) in programs.items()}
    seconds: dict[str, list[float]] = {name: [] for name in programs}
    rates: dict[str, list[float]] = {name: [] for name in programs}
    for turn in range(len(programs["port"][1])):
        for name in list(programs)[:: -1 if turn % 2 else 1]:
            begin = time.perf_counter()
            _, found = jax.block_until_ready(compiled[name]["program"](*programs[name][1][turn]))
            seconds[name].append(round(time.perf_counter() - begin, 4))
            rates[name].append(round(100 * float(np.mean(found)), 2))
        kept = {key: {name: compiled[name][key] for name in programs} for key in measure.MEASURED}
        yield {**kept, "seconds": seconds, "returns": rates if len(rates["port"]) >= 8 else None}


def training(module: ModuleType, seeds: list[int], updates: int, **changed: Any) -> Iterator[dict[str, Any]]:
    """Rows of the training of these seeds, which are also the rounds."""
    programs = {}
    for name, sampler in {"original": ORIGINAL, "port": PORT}.items():
        first, train = setup(module, sampler, updates, **changed)
        make = jax.jit(first)
        programs[name] = train, [(make(seed),) for seed in seeds]
    capacity = changed.get("level_buffer_capacity", SETTINGS["level_buffer_capacity"])
    features = changed.get("num_features", FEATURES)
    task = (
        f"mazes, {capacity:,} levels, LSTM of {features}, {updates} updates of {BATCH} x {SETTINGS['num_steps']} steps"
    )
    for row in compare(programs):
        if row["returns"] is not None:
            task = f"{task.removesuffix(RATE)}{RATE}"
        yield {"port": "buffer only", "task": task, "lines": LINES, **row}


def sampler_alone(module: ModuleType, capacity: int, duplicates: bool, rounds: int) -> dict[str, Any]:
    """The row of a sampler: so many times, 32 levels are inserted in a full buffer, 32 drawn, and these updated."""
    keys = jax.random.split(jax.random.PRNGKey(0), capacity + TIMES * BATCH)
    levels = jax.jit(jax.vmap(module.make_level_generator(13, 13, SETTINGS["n_walls"])))(keys)
    levels, new = (
        jax.tree.map(lambda x, part=part: x[part], levels) for part in np.split(np.arange(len(keys)), [capacity])
    )
    new = jax.tree.map(lambda x: x.reshape(TIMES, BATCH, *x.shape[1:]), new)
    scores = jax.random.uniform(keys[0], (capacity,))

    def make_run(kind: Callable) -> Callable:
        sampler, extra = jaxued_checks.make(kind, capacity, duplicates), {"max_return": jnp.zeros(BATCH)}

        def run(key: jax.Array) -> tuple[Any, jax.Array]:
            full = sampler.initialize(jax.tree.map(lambda x: x[0], levels), {"max_return": 0.0})
            if kind is ORIGINAL:
                full = {**full, "levels": levels, "scores": scores, "size": jnp.int32(capacity)}
                full = {**full, "timestamps": jnp.arange(capacity), "episode_count": jnp.int32(capacity)}
            else:
                numbers = {"scores": scores, "last": jnp.arange(capacity)}
                counts = {"size": jnp.int32(capacity), "count": jnp.int32(capacity)}
                full = full.replace(state=full.state.replace(levels=levels, **numbers, **counts))

            def step(state: Any, row: tuple) -> tuple[Any, jax.Array]:
                new, scores, key = row
                state, _ = sampler.insert_batch(state, new, scores[0], extra)
                state, (slots, _) = sampler.sample_replay_levels(state, key, BATCH)
                return sampler.update_batch(state, slots, scores[1], extra), slots

            numbers = jax.random.uniform(key, (TIMES, 2, BATCH))
            return jax.lax.scan(step, full, (new, numbers, jax.random.split(key, TIMES)))

        return run

    args = [(key,) for key in jax.random.split(keys[0], rounds)]
    *_, row = compare({"original": (make_run(ORIGINAL), args), "port": (make_run(PORT), args)})
    what = f"the sampler alone, {capacity:,} levels" + ("" if duplicates else ", duplicates not looked for")
    return {"port": "buffer only", "task": what, "lines": LINES, **row, "returns": None}


def main() -> None:
    parser = measure.parser("jaxued's robust PLR, original and ported.")
    parser.add_argument("--jaxued", type=Path, required=True, help="a clone of jaxued")
    parser.add_argument("--sampler", action="store_true", help="only time the sampler alone, of several sizes")
    args = parser.parse()
    if not (args.jaxued / "examples" / "maze_plr.py").exists():
        parser.error(f"argument --jaxued: there is no examples/maze_plr.py in {str(args.jaxued)!r}")
    module = load(args.jaxued / "examples")
    file, agent, seeds = "jaxued_plr", "jaxued PLR", [args.seed + number for number in range(args.seeds)]
    if args.check:
        checks = jaxued_checks.check(ORIGINAL, PORT)
        measure.write(args.out, f"{file}_checks", PACKAGES, agent=agent, checks=checks)
    elif args.sampler:
        cases = [(capacity, duplicates) for capacity in CAPACITIES for duplicates in (True, False)]
        rows = [sampler_alone(module, *case, rounds=5) for case in cases[: 1 if args.short else None]]
        for row in rows:
            measure.show(row)
        measure.write(args.out, f"{file}_sampler", PACKAGES, agent=agent, rows=rows)
    elif args.speed:
        rows = []
        few = {"minimum_fill_ratio": 0.01}  # so that most updates replay
        for num_features, updates in ((FEATURES, 16), (FEATURES_OF_JAXUED, 2))[: 1 if args.short else None]:
            *_, row = training(module, seeds[:5], updates, num_features=num_features, eval_num_attempts=1, **few)
            rows.append({**row, "returns": None})
        for row in rows:
            measure.show(row)
        measure.write(args.out, f"{file}_speed", PACKAGES, agent=agent, rows=rows)
    else:
        updates = 4 if args.short else UPDATES
        for row in training(module, seeds, updates, level_buffer_capacity=512):
            measure.write(args.out, file, PACKAGES, agent=agent, rows=[row])
            print(row["seconds"]["port"][-1], flush=True)


if __name__ == "__main__":
    main()
