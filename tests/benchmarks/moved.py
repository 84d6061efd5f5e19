"""Agents and buffers of others, as they are and with a buffer of jaxreplay in place of theirs, timed in turn.

    python tests/benchmarks/moved.py qdax PATH       # TD3 of QDax (46b8fee): pip install jax flax optax brax distrax
    python tests/benchmarks/moved.py purejaxrl PATH  # DQN of purejaxrl (31756b1): pip install gymnax flashbax optax six
    python tests/benchmarks/moved.py evorl PATH      # the buffer of EvoRL (36836c0): pip install chex

PATH is a clone of the original's repository. Its code is imported from there; of other packages that it imports, only
those named are needed. Each command prints times, original divided by port, as medians [10th, 90th percentile] of runs
in turn; then what the original does wrong. `--short` shows that it runs; its times mean nothing.
"""

import argparse
import functools
import sys
import time
import types
from pathlib import Path
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from harness import ScanProgram, measure, percentiles

import jaxreplay as jr

sys.path.append(str(Path(__file__).parents[2] / "examples/studies"))

from experiment import interval

BIG = 2**24 + 1  # the smallest integer that float32 lacks


def say(what: str, unit: str, times: dict[str, float], ratio: dict[str, float]) -> None:
    """A line of median times, and of their ratio."""
    texts = [f"{name} {of_name:,.4g} {unit}" for name, of_name in times.items()]
    median, *ends = (f"{x:.3g}" for x in ratio.values())
    print(f"{what}: {', '.join(texts)}; original / port {median} [{', '.join(ends)}]", flush=True)


def in_turn(what: str, steps: dict[str, Any], short: bool) -> None:
    """A line of times of steps `(carry, key) -> carry` with their carries, each in a scan."""
    makers = {name: functools.partial(ScanProgram, *of_name, steps=3) for name, of_name in steps.items()}
    found = measure(makers, lambda _: "port", *((3, 0.01) if short else (15, 0.2)))
    say(what, "us", {name: of["us"]["median"] for name, of in found.items()}, found["original"]["ratio"])


class ForQDax(flax.struct.PyTreeNode):
    """A buffer with the methods of QDax's `ReplayBuffer`."""

    state: Any
    buffer: jr.ReplayBuffer = flax.struct.field(pytree_node=False)

    @classmethod
    def init(cls, buffer_size: int, transition: Any) -> "ForQDax":
        buffer = jr.ReplayBuffer(capacity=buffer_size)
        return cls(state=buffer.init(transition), buffer=buffer)

    def insert(self, transitions: Any) -> "ForQDax":
        return self.replace(state=self.buffer.add(self.state, transitions))

    def sample(self, key: jax.Array, sample_size: int) -> Any:
        return self.buffer.sample(self.state, key, sample_size).items


def qdax(short: bool) -> None:
    """An insertion of 8 rows and a draw of 256 alone; and an iteration of TD3, with a step of 8 environments between.

    The buffers are full, the networks and batches are those of its default configuration.
    """
    from brax import envs
    from qdax.baselines.td3 import TD3, TD3Config
    from qdax.core.neuroevolution.buffers.buffer import ReplayBuffer, Transition
    from qdax.core.neuroevolution.sac_td3_utils import do_iteration_fn

    kinds = {"original": ReplayBuffer, "port": ForQDax}
    env = envs.create("inverted_pendulum", backend="spring", batch_size=8, episode_length=1_000, auto_reset=True)
    agent = TD3(TD3Config(), action_size=env.action_size)
    play = functools.partial(agent.play_step_fn, env=env)
    learner = agent.init(jax.random.key(0), action_size=env.action_size, observation_size=env.observation_size)
    game = jax.jit(env.reset)(jax.random.key(0))
    row = Transition.init_dummy(env.observation_size, env.action_size)

    def rows(count: int) -> Any:
        return jax.tree.map(lambda x: jnp.zeros((count, *x.shape[1:])), row)

    def alone(carry: Any, key: jax.Array) -> Any:
        replay = carry[0].insert(rows(8))
        return replay, replay.sample(key, 256)

    def iteration(updates: int, carry: Any, _: jax.Array) -> Any:
        return do_iteration_fn(*carry, 8, updates / 8, play, agent.update)[:3]

    for capacity in (10**3,) if short else (10**5, 10**6):

        def full(kind: Any, capacity: int = capacity) -> Any:
            return jax.jit(lambda: kind.init(capacity, row).insert(rows(capacity)))()

        steps = {name: (alone, (full(kind), rows(256))) for name, kind in kinds.items()}
        in_turn(f"the buffer alone, {capacity:,} items", steps, short)
        for updates in (1, 8):
            step = functools.partial(iteration, updates)
            steps = {n: (step, jax.tree.map(jnp.copy, (learner, game, full(kind)))) for n, kind in kinds.items()}
            in_turn(f"an iteration, updates: {updates}, {capacity:,} items", steps, short)
    numbers = Transition(
        obs=jnp.full((1, 1), BIG),
        next_obs=jnp.full((1, 1), 255, jnp.uint8),
        rewards=jnp.zeros(1),
        dones=jnp.zeros(1, bool),
        truncations=jnp.zeros(1, bool),
        actions=jnp.zeros((1, 1), jnp.int32),
    )
    for name, kind in kinds.items():
        drawn = kind.init(4, numbers).insert(numbers).sample(jax.random.key(0), 1)
        print(f"{name}: {BIG:,} comes back as {int(drawn.obs[0, 0]):,}, {jax.tree.map(lambda x: x.dtype.name, drawn)}")


class ForPureJaxRL:
    """A buffer with the functions of flashbax's flat buffer, as purejaxrl's DQN calls them."""

    def __init__(self, max_length: int, sample_batch_size: int, add_batch_size: int, **_: Any):
        self.batch_size, self.num_envs = sample_batch_size, add_batch_size
        length = max_length // add_batch_size
        self.buffer = jr.SequenceBuffer(length=length, num_envs=add_batch_size, sequence_length=2)

    def replace(self, **_: Any) -> "ForPureJaxRL":
        """It is compiled as a part of the whole."""
        return self

    def init(self, row: Any) -> Any:
        return self.buffer.init(jax.tree.map(lambda x: jnp.broadcast_to(x, (1, self.num_envs, *jnp.shape(x))), row))

    def add(self, state: Any, rows: Any) -> Any:
        return self.buffer.add(state, jax.tree.map(lambda x: x[None], rows))

    def can_sample(self, state: Any) -> jax.Array:
        return self.buffer.can_sample(state, self.batch_size)

    def sample(self, state: Any, key: jax.Array) -> Any:
        pairs = self.buffer.sample(state, key, self.batch_size).items
        first, second = (jax.tree.map(lambda x, n=n: x[:, n], pairs) for n in (0, 1))
        return types.SimpleNamespace(experience=types.SimpleNamespace(first=first, second=second))


class Told(Exception):
    """Ends the original's `main` once it has told its configuration."""


def purejaxrl(short: bool) -> None:
    """The whole DQN of CartPole with its own configuration, and how seeds differ."""
    told: dict[str, Any] = {}

    def init(*, config: dict[str, Any], **_: Any) -> None:
        told.update(config)
        raise Told

    sys.modules["wandb"] = types.SimpleNamespace(init=init)
    jax.tree_map = jax.tree.map  # which JAX no longer has
    from purejaxrl import dqn

    try:
        dqn.main()
    except Told:
        told["TOTAL_TIMESTEPS"] = 20_000 if short else int(told["TOTAL_TIMESTEPS"])
    kinds, programs = {"original": dqn.fbx.make_flat_buffer, "port": ForPureJaxRL}, {}

    def program(kind: str, steps: int) -> Any:
        dqn.fbx = types.SimpleNamespace(make_flat_buffer=kinds[kind])
        return jax.jit(dqn.make_train({**told, "TOTAL_TIMESTEPS": steps})).lower(jax.random.key(0)).compile()

    programs = {kind: program(kind, told["TOTAL_TIMESTEPS"]) for kind in kinds}
    times, runs = {kind: [] for kind in kinds}, {kind: [] for kind in kinds}
    for seed in range(8):
        for kind, train in programs.items():
            started = time.perf_counter()
            runs[kind].append(jax.block_until_ready(train(jax.random.key(seed))))
            times[kind].append(time.perf_counter() - started)
    ratio = percentiles(np.divide(times["original"], times["port"]))
    medians = {kind: float(np.median(of_kind)) for kind, of_kind in times.items()}
    say(f"a run of {told['TOTAL_TIMESTEPS']:,} steps, 8 seeds", "s", medians, ratio)
    for kind, of_kind in runs.items():
        returns = np.array([run["metrics"]["returns"][-5_000:].mean() for run in of_kind])
        low, high = interval(returns)
        print(f"{kind}: mean return of the last 5,000 iterations {returns.mean():.1f} [{low:.1f}, {high:.1f}]")
    before = program("original", told["LEARNING_STARTS"])  # it learns only after these
    begun = [before(jax.random.key(seed))["runner_state"][0].params for seed in range(8)]
    found = {
        "networks before learning": begun,
        "keys of actions, environments and draws": [run["runner_state"][-1] for run in runs["original"]],
        "runs": [run["metrics"] for run in runs["original"]],
    }
    print("original, distinct of 8 seeds:", {what: distinct(trees) for what, trees in found.items()})


def distinct(trees: list[Any]) -> int:
    return len({str([np.asarray(x).tobytes() for x in jax.tree.leaves(tree)]) for tree in trees})


def evorl(short: bool) -> None:
    """Add 2 rows and draw 256 from a full buffer, as its TD3 does; and a draw from an empty one."""
    package = sys.modules["evorl"] = types.ModuleType("evorl")  # its own imports all agents
    package.__path__ = [str(Path(sys.path[0]) / "evorl")]
    from evorl.replay_buffers import ReplayBuffer

    row = {"obs": jnp.zeros(17), "actions": jnp.zeros(6), "rewards": jnp.zeros(()), "next_obs": jnp.zeros(17)}
    rows = {n: jax.tree.map(lambda x, n=n: jnp.ones((n, *x.shape)), row) for n in (1, 2)}

    def ours(capacity: int, draws: int) -> Any:
        buffer = jr.ReplayBuffer(capacity=capacity)
        return buffer.init(rows[1]), buffer.add, lambda state, key: buffer.sample(state, key, draws).items

    def theirs(capacity: int, draws: int) -> Any:
        buffer = ReplayBuffer(capacity=capacity, sample_batch_size=draws)
        return buffer.init(row), buffer.add, buffer.sample

    def program(make: Any, capacity: int) -> tuple[Any, Any]:
        empty, add, draw = make(capacity, 256)
        full = add(empty, jax.tree.map(lambda x: jnp.ones((capacity, *x.shape)), row))
        return lambda carry, key: (state := add(carry[0], rows[2]), draw(state, key)), (
            full,
            draw(full, jax.random.key(0)),
        )

    makers = {"original": theirs, "port": ours}
    for capacity in (10**3,) if short else (10**5, 10**6):
        in_turn(f"an add and a draw, {capacity:,}", {n: program(x, capacity) for n, x in makers.items()}, short)
    for name, make in makers.items():
        empty, _, draw = make(100, 256)
        try:
            drawn = draw(empty, jax.random.key(0))["obs"]
            print(f"{name}: a draw from an empty buffer gives {len(drawn)} rows of {float(jnp.abs(drawn).max())}")
        except ValueError as error:
            print(f"{name}: a draw from an empty buffer raises {error}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", choices=("qdax", "purejaxrl", "evorl"))
    parser.add_argument("path", help="a clone of its repository")
    parser.add_argument("--short", action="store_true")
    options = parser.parse_args()
    sys.path.insert(0, options.path)
    print(f"{options.name}: jax {jax.__version__}, {jax.devices()[0].device_kind}", flush=True)
    {"qdax": qdax, "purejaxrl": purejaxrl, "evorl": evorl}[options.name](options.short)


if __name__ == "__main__":
    main()
