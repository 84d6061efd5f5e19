"""Stoix's Rainbow, original and ported: CartPole-v1 with a time limit of 200 steps.

pip install -e . stoa-env==0.1.2 distrax==0.1.9 rlax==0.1.9 tensorflow-probability==0.25.0 flashbax==0.1.3 \
    gymnax==0.0.9 hydra-core colorama
git clone https://github.com/EdanToledo/Stoix && git -C Stoix checkout 8fff19c9
python examples/ports/stoix_rainbow.py --stoix Stoix           # 8 seeds
python examples/ports/stoix_rainbow.py --stoix Stoix --speed   # times of short runs
python examples/ports/stoix_rainbow.py --stoix Stoix --check   # checks of both versions against correct values
python examples/ports/stoix_rainbow.py --stoix Stoix --short   # to see that it runs

Tested with jax 0.10.2. `ff_rainbow.py` runs unchanged, except for the buffer that it makes and, in the second port, the
discounts of its loss. Its logger and its other environments are not imported.
"""

import functools
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import flashbax
import gymnax
import jax
import measure
import numpy as np
import stoix_checks
from omegaconf import OmegaConf
from stoa.core_wrappers.auto_reset import AutoResetWrapper
from stoa.core_wrappers.episode_metrics import RecordEpisodeMetrics
from stoa.core_wrappers.vmap import VmapWrapper
from stoa.core_wrappers.wrapper import AddRNGKey
from stoa.env_adapters.gymnax import GymnaxToStoa
from stoa.utility_wrappers.extras_transforms import NoExtrasWrapper
from stoa.utility_wrappers.step_limit import EpisodeStepLimitWrapper
from stoix_adapter import Drawn, KeepsTermination, Sequences, Traced

TASK, LIMIT, NEVER = "CartPole-v1", 200, 2**31 - 1
PACKAGES = ("stoa-env", "flashbax", "distrax", "rlax", "gymnax", "flax", "optax")
SYSTEM = {
    "rollout_length": 4,
    "epochs": 8,
    "total_buffer_size": 20_000,
    "total_batch_size": 128,
    "q_lr": 5e-4,
}
NUM_ENVS = 16
CAPACITIES = (20_000, 1_000_000)
ORIGINAL = "original"
PORTS = {
    "buffer only": measure.count_lines(Drawn, Sequences),
    "5-step with truncation": measure.count_lines(Drawn, Sequences, KeepsTermination, Traced),
}


def load(stoix: Path) -> tuple[ModuleType, Any]:
    """Stoix's script as a module, and its settings. Modules that log and make environments are left out."""
    sys.path.append(str(stoix))
    with mock.patch.dict(sys.modules, {f"stoix.utils.{name}": mock.MagicMock() for name in ("make_env", "logger")}):
        from stoix.systems.q_learning import ff_rainbow as module

    module.original_loss = module.categorical_double_q_learning
    configs = stoix / "stoix" / "configs"
    network = OmegaConf.load(configs / "network" / "mlp_noisy_dueling_c51.yaml")
    network.actor_network.pre_torso.layer_sizes, network.actor_network.action_head.layer_sizes = [64, 64], [64]
    system = OmegaConf.load(configs / "system" / "q_learning" / "ff_rainbow.yaml")
    logger = {"checkpointing": {"load_model": False}}
    return module, OmegaConf.create({"system": system, "network": network, "logger": logger, "arch": {}})


def make_env(port: bool, env: Any = None, limit: int = LIMIT) -> Any:
    """The environment with Stoix's wrappers, and a time limit that is a truncation."""
    if env is None:
        plain, params = gymnax.make(TASK)
        env = NoExtrasWrapper(GymnaxToStoa(plain, params.replace(max_steps_in_episode=NEVER)))
    env = RecordEpisodeMetrics(AddRNGKey(EpisodeStepLimitWrapper(env, limit)))
    return VmapWrapper(AutoResetWrapper(KeepsTermination(env) if port else env, next_obs_in_extras=True))


def setup(
    module: ModuleType,
    base: Any,
    name: str,
    seed: int,
    updates: int,
    calls: int,
    watch: Callable | None = None,
    env: Any = None,
    limit: int = LIMIT,
    **system: Any,
) -> tuple[Callable, Any, Any]:
    """Stoix's learning function, the evaluated network and the first state; `updates` rollouts in so many calls.

    `watch` is called in the traced program, with the drawn batch, and with the reward and discount of each target.
    """
    arch = {
        "num_envs": NUM_ENVS,
        "update_batch_size": 1,
        "num_updates": updates,
        "num_updates_per_eval": updates // calls,
    }
    config = OmegaConf.merge(base, {"system": {**SYSTEM, **system}, "arch": arch})
    drawn: dict[str, Any] = {}

    def make_buffer(**sizes: Any) -> Any:
        if name == ORIGINAL:
            buffer = flashbax.make_prioritised_trajectory_buffer(**sizes)
        elif name == "buffer only":
            buffer = Sequences(**sizes)
        else:
            buffer = Traced(module, config.system.gamma, **sizes)
            drawn["loss"] = buffer.loss

        def sample(state: Any, key: jax.Array) -> Any:
            drawn["batch"] = buffer.sample(state, key)
            return drawn["batch"]

        return SimpleNamespace(init=buffer.init, add=buffer.add, sample=sample, set_priorities=buffer.set_priorities)

    def loss(*args: Any) -> jax.Array:
        if watch is not None:
            discount = args[4] if name != list(PORTS)[1] else drawn["loss"].__self__.discount
            watch(drawn["batch"].experience.obs[:, 0], args[3], discount)
        return drawn.get("loss", module.original_loss)(*args)

    module.fbx = SimpleNamespace(make_prioritised_trajectory_buffer=make_buffer)
    module.categorical_double_q_learning = loss
    keys = jax.random.split(jax.random.PRNGKey(seed), 3)
    learn, network, state = module.learner_setup(make_env(name == list(PORTS)[1], env, limit), keys, config)
    return learn, network, state


def train(
    program: Callable, learners: dict[str, Callable], name: str, seed: int, rollouts: int, **system: Any
) -> tuple[float, float]:
    """The return of a run, and the seconds of its last three calls; the first two may compile.

    The runs of one name share a learning function, in `learners`, which is compiled once.
    """
    learn, _, state = program(name=name, seed=seed, updates=rollouts, calls=5, **system)
    learn = learners.setdefault(name, learn)
    start = 0.0
    for call in range(5):
        output = jax.block_until_ready(learn(state))
        state = output.learner_state
        if call == 1:
            start = time.perf_counter()
    metrics = output.episode_metrics
    return float(np.mean(metrics["episode_return"][metrics["is_terminal_step"]])), time.perf_counter() - start


def compare(program: Callable, seeds: list[int], rollouts: int, **system: Any) -> Iterator[list[dict[str, Any]]]:
    """After each seed a row of results for each port."""
    learners: dict[str, Callable] = {}

    def run(name: str, seed: int) -> tuple[float, float]:
        return train(program, learners, name, seed, rollouts, **system)

    for found in measure.in_turn([ORIGINAL, *PORTS], seeds, run):
        yield [row(port, found, rollouts, **system) for port in PORTS]


def row(
    port: str, found: dict[str, Any], rollouts: int, total_buffer_size: int = SYSTEM["total_buffer_size"]
) -> dict[str, Any]:
    """The results of a port so far: the returns of 8 seeds, or the times of fewer."""
    names, enough = {ORIGINAL: ORIGINAL, "port": port}, len(found[port]) >= 8
    values = {of: [round(x, 1) for x, _ in found[name]] for of, name in names.items()}
    seconds = {of: [] if enough else [round(x, 3) for _, x in found[name]] for of, name in names.items()}
    steps = rollouts * SYSTEM["rollout_length"] * NUM_ENVS
    task = f"{TASK}, at most {LIMIT} steps, {total_buffer_size:,} items, {steps:,} steps"
    result = {"port": port, "task": task, "lines": PORTS[port], "seconds": seconds}
    return {**result, "returns": values if enough else None, "memory_bytes": None, "compile_seconds": None}


def main() -> None:
    parser = measure.parser("Stoix's Rainbow, original and ported.")
    parser.add_argument("--stoix", type=Path, required=True, help="a clone of Stoix")
    args = parser.parse()
    if not (args.stoix / "stoix" / "systems" / "q_learning" / "ff_rainbow.py").exists():
        parser.error(f"argument --stoix: there is no stoix/systems/q_learning/ff_rainbow.py in {str(args.stoix)!r}")
    program = functools.partial(setup, *load(args.stoix))
    file, agent, seeds = "stoix_rainbow", "Stoix Rainbow", [args.seed + number for number in range(args.seeds)]
    if args.check:
        measure.write(
            args.out, f"{file}_checks", PACKAGES, agent=agent, checks=stoix_checks.check(program, [ORIGINAL, *PORTS])
        )
    elif args.speed:
        found: list[dict[str, Any]] = []
        for size in CAPACITIES[: 1 if args.short else None]:
            for rows in compare(program, seeds[:3], 20 if args.short else 250, total_buffer_size=size):
                measure.write(args.out, f"{file}_speed", PACKAGES, agent=agent, rows=[*found, *rows])
            found += rows
    else:
        for rows in compare(program, seeds, 20 if args.short else 250):
            measure.write(args.out, file, PACKAGES, agent=agent, rows=rows)


if __name__ == "__main__":
    main()
