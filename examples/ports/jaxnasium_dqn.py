"""jaxnasium's DQN, original and ported: CartPole-v1 with jaxnasium's default settings, but fewer steps.

pip install -e . 'jaxnasium[algs]==0.1.1'
python examples/ports/jaxnasium_dqn.py                 # 8 seeds, minutes on two CPU cores
python examples/ports/jaxnasium_dqn.py --prioritized   # the same with prioritized buffers
python examples/ports/jaxnasium_dqn.py --speed         # time of short runs; with --prioritized of two sizes
python examples/ports/jaxnasium_dqn.py --check         # checks of both versions against correct values
python examples/ports/jaxnasium_dqn.py --short         # a minute, mostly compilation

Tested with jax 0.10.2. `Replay` replaces jaxnasium's two buffers, uniform and prioritized. No agent of jaxnasium uses
its prioritized buffer, so `PrioritizedDQN` does. `TracedReplay` gives it 3-step transitions that bootstrap at a time
limit.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import jaxnasium as jym
import jaxnasium_checks
import measure
from jaxnasium.algorithms import DQN
from jaxnasium.algorithms.core import PrioritizedTransitionBuffer
from jaxnasium_adapter import KeepsFinal, PrioritizedDQN, Replay, TracedReplay, with_buffer

import jaxreplay as jr

TASK = "CartPole-v1"
STEPS = "{total_timesteps:,} steps"
TASKS = f"{TASK}, {STEPS}", f"{TASK}, {{replay_buffer_size:,}} items, {STEPS}"
CAPACITIES = (50_000, 1_000_000)  # the first is jaxnasium's default
GAMMA = 0.99
ON_ITS_OWN = with_buffer(PrioritizedDQN, PrioritizedTransitionBuffer)
BUFFER_LINES = measure.count_lines(Replay, with_buffer)
TRACED_LINES = BUFFER_LINES + measure.count_lines(TracedReplay, KeepsFinal)
UNIFORM = {"buffer only": (with_buffer(DQN, functools.partial(Replay, sampler=jr.Uniform())), BUFFER_LINES)}
PRIORITIZED = {
    "buffer only": (with_buffer(PrioritizedDQN, functools.partial(Replay, sampler=jr.Prioritized())), BUFFER_LINES),
    "3-step, truncation": (with_buffer(PrioritizedDQN, functools.partial(TracedReplay, gamma=GAMMA)), TRACED_LINES),
}


def trainer(algorithm: type[DQN], settings: dict[str, Any]) -> Callable:
    """A function from keys [seeds] to returns [seeds]: means over the last quarter of training.

    Seeds train one after the other. Under `jax.vmap` jaxnasium's own program gave no result either (jax 0.10.2, a CPU).
    """
    env, algo = KeepsFinal(jym.make(TASK)), algorithm(log_function=None, gamma=GAMMA, **settings)

    def train(key: jax.Array) -> jax.Array:
        _, returns = algo.train(key, env)
        return jnp.nanmean(returns[-(len(returns) // 4) :])

    return lambda keys: jax.lax.map(train, keys)


if __name__ == "__main__":
    line = measure.parser("jaxnasium's DQN")
    line.add_argument("--prioritized", action="store_true", help="with prioritized buffers, as always with --check")
    args, agent, original, ports = line.parse(), "jaxnasium DQN", DQN, UNIFORM
    if args.prioritized:
        agent, original, ports = f"{agent}, prioritized", ON_ITS_OWN, PRIORITIZED
    settings, short = {"total_timesteps": 20_480}, {"total_timesteps": 5_120}
    sizes = [{"replay_buffer_size": capacity} for capacity in CAPACITIES[: 1 + args.prioritized]]
    speeds = [{**short, "warmup_steps": 1_024, **size} for size in sizes]
    how = measure.programs(original, ports, trainer, TASKS, settings, short, speeds)
    measure.run(args, agent, ("jaxnasium", "equinox", "optax"), check=jaxnasium_checks.check, **how)
