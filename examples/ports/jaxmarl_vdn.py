"""JaxMARL's VDN, original and ported: simple_spread of MPE, with JaxMARL's settings, but fewer steps.

pip install -e . 'jaxmarl[algs]==0.2.0'
git clone https://github.com/FLAIROx/JaxMARL && git -C JaxMARL checkout c793d095
python examples/ports/jaxmarl_vdn.py --baselines JaxMARL/baselines           # a quarter of an hour on two CPU cores
python examples/ports/jaxmarl_vdn.py --baselines JaxMARL/baselines --speed   # times of short runs
python examples/ports/jaxmarl_vdn.py --baselines JaxMARL/baselines --check   # correctness of both
python examples/ports/jaxmarl_vdn.py --baselines JaxMARL/baselines --short   # to see that it runs

Tested with jax 0.12.0. The package has the environments but not the scripts of the agents. `vdn_ff.py` runs unchanged,
except for the buffer that it makes. There are two ports, `one_step_buffer` and `n_step_buffer`.

`vdn_ff` uses the row 16 steps later as the next row, mostly from another episode. On this task 8 seeds show no loss
from it. 3-step transitions that bootstrap at the time limit raise the return, with the loss function unchanged; the two
effects were not separated.
"""

import functools
import importlib.util
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import jax
import measure
import numpy as np
from flashbax.buffers.flat_buffer import TransitionSample, make_flat_buffer
from flashbax.buffers.trajectory_buffer import TrajectoryBuffer
from jaxmarl import make
from jaxmarl.wrappers.baselines import MPELogWrapper
from jaxmarl_adapter import adapt, n_step_buffer, one_step_buffer
from omegaconf import OmegaConf


def load(baselines: Path) -> tuple[ModuleType, dict[str, Any]]:
    """JaxMARL's script as a module, and its settings for MPE, with one test at the end of training."""
    path = baselines / "QLearning"
    spec = importlib.util.spec_from_file_location("vdn_ff", path / "vdn_ff.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    settings = OmegaConf.to_container(OmegaConf.load(path / "config" / "alg" / "vdn_ff_mpe.yaml"))
    return module, {**settings, "TEST_INTERVAL": 1.0, "WANDB_MODE": "disabled"}


def make_train(module: ModuleType, config: dict[str, Any], make_buffer: Callable) -> Callable:
    """A function from keys [seeds] to returns [seeds] of the greedy policy after training, means over 512 episodes."""
    env = MPELogWrapper(make(config["ENV_NAME"]))

    def train(keys: jax.Array) -> jax.Array:
        module.fbx = SimpleNamespace(make_flat_buffer=make_buffer)  # read while tracing
        _, _, _, test, _ = jax.vmap(module.make_train(dict(config), env))(keys)["runner_state"]
        return test["returned_episode_returns"]

    return train


def make_ports(config: dict[str, Any], n: int = 3) -> dict[str, tuple[Callable, int]]:
    """The buffer constructor of each port, and its number of lines."""
    num_envs, gamma = config["NUM_ENVS"], config["GAMMA"]
    n_step = functools.partial(n_step_buffer, num_envs, n, gamma)
    return {
        "buffer only": (functools.partial(one_step_buffer, num_envs), measure.count_lines(adapt, one_step_buffer)),
        f"{n}-step with truncation": (n_step, measure.count_lines(adapt, n_step_buffer)),
    }


def compare(module: ModuleType, config: dict[str, Any], keys: jax.Array, **kwargs: Any) -> list[dict[str, Any]]:
    """A row of results for each port."""
    ports = make_ports(config).items()
    trains = {name: (make_train(module, config, make_buffer), lines) for name, (make_buffer, lines) in ports}
    task = (
        f"MPE simple_spread, {config['TOTAL_TIMESTEPS']:,} steps, {config['NUM_LAYERS'] - 2} hidden layers, "
        f"updates a rollout: {config['NUM_EPOCHS']}"
    )
    return measure.compare_all(make_train(module, config, make_flat_buffer), trains, keys, task=task, **kwargs)


def draw(module: ModuleType, config: dict[str, Any], make_buffer: Callable) -> list[Any]:
    """All draws of a short run: agent_0's observation and `done`, of the first row and of the second."""
    drawn = []

    def make_recorder(**settings: Any) -> TrajectoryBuffer:
        buffer = make_buffer(**settings)

        def sample(state: Any, key: jax.Array) -> TransitionSample:
            batch = buffer.sample(state, key)
            pair = [(row.obs["agent_0"], row.dones["__all__"]) for row in batch.experience]
            jax.debug.callback(lambda pair: drawn.append(jax.tree.map(np.array, pair)), pair)
            return batch

        return buffer.replace(sample=sample)

    config = {**config, "TOTAL_TIMESTEPS": 100_000, "BUFFER_SIZE": 20_000, "TEST_NUM_ENVS": 1}
    jax.block_until_ready(make_train(module, config, make_recorder)(jax.random.PRNGKey(0)[None]))
    jax.effects_barrier()
    return jax.tree.map(lambda *x: np.concatenate(x), *drawn)


def check(module: ModuleType, config: dict[str, Any]) -> list[dict[str, str]]:
    """Rows of the table of checks, for both ports.

    An agent observes its velocity, its position and the relative positions of the landmarks; a step is 0.1 s. JaxMARL's
    `CTRolloutManager` sets the first observation of every episode but the first to zero.
    """

    def shares(make_buffer: Callable) -> tuple[str, ...]:
        (first, done), (second, _) = draw(module, config, make_buffer)
        velocity, position, marks = (slice(2 * i, 2 * i + 2) for i in range(3))
        move = second[:, position] - first[:, position]
        follows = np.abs(move - 0.1 * first[:, velocity]).max(axis=1) < 1e-4
        same = np.abs(second[:, marks] - first[:, marks] + move).max(axis=1) < 1e-4
        blind = ~first[:, position].any(axis=1)
        counts = (done < 1) & ~blind & second[:, position].any(axis=1)
        return tuple(f"{share.mean():.1%}" for share in (follows[counts], same[counts], done == 1, blind))

    original = shares(make_flat_buffer)
    ports = {name: shares(make_buffer) for name, (make_buffer, _) in make_ports(config).items()}
    one_step, n_step = ports
    rows = [
        ("drawn pairs whose second row is the next step", 0, (one_step,)),
        ("drawn pairs of one episode", 1, (one_step, n_step)),
        ("draws that do not bootstrap, although only the time limit ends episodes", 2, (one_step, n_step)),
        ("draws that start from an observation that JaxMARL's wrapper has set to zero", 3, (one_step, n_step)),
    ]
    return [
        {"what": what, "original": original[i], "port": ", ".join(f"{name}: {ports[name][i]}" for name in names)}
        for what, i, names in rows
    ]


def main() -> None:
    parser = measure.parser("JaxMARL's VDN, original and ported.")
    parser.add_argument("--baselines", type=Path, required=True, help="the folder baselines of a clone of JaxMARL")
    args = parser.parse()
    if not (args.baselines / "QLearning" / "vdn_ff.py").exists():
        parser.error(f"argument --baselines: there is no QLearning/vdn_ff.py in {str(args.baselines)!r}")
    module, config = load(args.baselines)
    name, about, packages = "jaxmarl_vdn", {"agent": "JaxMARL VDN"}, ("jaxmarl", "flashbax", "flax")
    keys = jax.random.split(jax.random.PRNGKey(args.seed), args.seeds)  # its `train` takes no typed key
    if args.check:
        measure.write(args.out, f"{name}_checks", packages, **about, checks=check(module, config))
        return
    steps = 20_000 if args.short else 50_000 if args.speed else 500_000
    deeper = {"NUM_LAYERS": 3, "NUM_EPOCHS": 4}
    rows = []
    for changed in ({}, deeper):
        settings = {**config, **changed, "TOTAL_TIMESTEPS": steps}
        seeds = keys[:1] if args.speed else keys
        rows += compare(module, settings, seeds, rounds=5 if args.speed else 1, returns=not args.speed)
    measure.write(args.out, f"{name}_speed" if args.speed else name, packages, **about, rows=rows)


if __name__ == "__main__":
    main()
