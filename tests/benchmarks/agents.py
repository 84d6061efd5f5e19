"""Training steps of agents in `examples/`, compiled for eight seeds at once, and whose kernels they are.

They need the extra `examples`.
"""

import importlib
import pathlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

from hlo import Program
from owners import Owners
from programs import STEPS, compile_on, mesh_of  # before jax
from tables import table

# isort: split
import jax
import jax.numpy as jnp
from jax.sharding import SingleDeviceSharding

EXAMPLES = pathlib.Path(__file__).parents[2] / "examples/agents"
SEEDS = 8
AGENTS = ("dqn", "sac", "minatar", "r2d2")
# The most that a step may take; "own" is the sum for replay and tracer.
MOST = {
    ("h100", "dqn"): {"launches": 70, "chain": 31, "own_launches": 26},
    ("h100", "sac"): {"launches": 69, "chain": 32, "own_launches": 10},
    ("h100", "minatar"): {"chain": 32, "own_launches": 23},
    ("h100", "r2d2"): {"own_launches": 39},
    ("tpu-v5e", "dqn"): {"cycles": 290_000},
    ("tpu-v5e", "sac"): {"cycles": 240_000},
    ("tpu-v5e", "minatar"): {"cycles": 800_000},
}


def report(target: str, agent: str) -> dict[str, Any]:
    """A row for the training step of an agent; the figures of "replay" and "tracer" are parts of the others."""
    text = compile_agent(target, agent).as_text()
    program = Program(text)
    owners = Owners(program, text)
    kernels = [x for x in program.instructions if x.is_kernel and x.depth]
    moved: dict[str | None, int] = dict.fromkeys((None, "replay", "tracer"), 0)
    row = {"target": target, "agent": agent, "seeds": SEEDS, "launches": round(program.kernels / STEPS, 1)}
    row |= {"chain": round(program.chain / STEPS, 1), "cycles": round(program.cycles / STEPS)}
    for owner in moved:
        own = [x for x in kernels if owners.of(x) == owner]
        moved[owner] = sum(x.times * owners.num_bytes(x) for x in own)
        if owner:
            row[f"{owner}_launches"] = round(sum(x.times for x in own) / STEPS, 1)
            row[f"{owner}_cycles"] = round(sum(x.times * x.cycles for x in own) / STEPS)
    row["share_of_bytes"] = round(1 - moved[None] / sum(moved.values()), 4)
    row["own_launches"] = row["replay_launches"] + row["tracer_launches"]
    return row | {"missed": list(above(MOST.get((target, agent), {}), row))}


def above(most: dict[str, float], row: dict[str, Any]) -> Iterator[str]:
    """The figures of a row that exceed their bounds."""
    return (f"{row[name]} {name}: at most {bound}" for name, bound in most.items() if row[name] > bound)


def markdown(rows: list[dict[str, Any]]) -> str:
    """A table."""
    columns = ["agent", "launches", "of replay", "of the tracer", "chain", "share of bytes"]
    columns += ["cycles", "of replay", "of the tracer"] if any(row["cycles"] for row in rows) else []
    lines = []
    for row in rows:
        counts = [f"{row[f'{part}launches']:g}" for part in ("", "replay_", "tracer_")]
        cycles = [f"{row[f'{part}cycles']:,}" for part in ("", "replay_", "tracer_") if row["cycles"]]
        name, share = f"{row['agent']}, {SEEDS} seeds", f"{row['share_of_bytes']:.1%}"
        lines.append([name, *counts, f"{row['chain']:g}", share, *cycles])
    return table(columns, lines)


def compile_agent(target: str, agent: str) -> Any:
    """A scan of training steps of `SEEDS` seeds, with the state donated."""
    mesh = mesh_of(target, 1)
    device = mesh.devices.flat[0]
    init, advance = training(agent)
    with jax.default_device(device):
        state = jax.eval_shape(lambda: init(jax.random.split(jax.random.key(0), SEEDS)))
    times = jax.ShapeDtypeStruct((STEPS,), jnp.int32)
    sharding = SingleDeviceSharding(device)
    placed = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), (state, times))
    return compile_on(mesh, advance, placed)


def training(agent: str) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Training of an agent, with the settings of its example: init(keys) -> state, and advance(state, times)."""
    if str(EXAMPLES) not in sys.path:
        sys.path.append(str(EXAMPLES))
    example = importlib.import_module(agent)
    step = jax.vmap(example.step, in_axes=(0, None))
    return jax.vmap(example.init), lambda state, times: jax.lax.scan(step, state, times)
