"""What accelerators would run: programs compiled for a GPU or a TPU that this machine lacks, and read.

`python tests/benchmarks/compiled.py` (extra `accelerators`) compiles each cell's operations, prints a table and writes
`results/compiled.json` and `results/compiled.md`. It fails where a bound does not hold. Nothing is run: no time is
measured. The training steps of `agents.py` need the extra `examples`. `--smoke` compiles the steps of few cells, also
for a CPU, and fails where a figure exceeds that of `results/guard.json`; `--record` writes that file. The columns are
explained in README.md.
"""

import argparse
import importlib.metadata
import json
import pathlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

import agents
from hlo import Program
from programs import ITEMS, SAMPLERS, TARGETS, Cell, arrays_of, compile_for
from tables import table

RESULTS = pathlib.Path(__file__).parent / "results"
MAX_USES = ("uniform max_uses", "max_uses")
CELLS = [
    *(Cell(sampler=sampler, orders=True) for sampler in SAMPLERS if sampler not in MAX_USES),
    *(Cell(capacity=2**power) for power in (14, 17, 22)),
    *(Cell(batch_size=batch_size) for batch_size in (32, 1024)),
    *(Cell(batch_size=2**15, num_added=2**12, sampler=sampler) for sampler in ("uniform", "prioritized")),
    *(Cell(sampler=sampler, seeds=64, capacity=2**17) for sampler in ("uniform", "prioritized")),
    *(Cell(items=items, capacity=2**16, sampler="uniform") for items in ITEMS),
    *(Cell(items=items, capacity=2**17) for items in ("64 bfloat16", "84x84x4 bytes", "10x10x4 floats")),
    Cell(items="376 floats", capacity=2**22),
    *(
        Cell(kind="sequence", sampler=sampler, orders=sampler == "global")
        for sampler in SAMPLERS
        if sampler not in MAX_USES
    ),
    Cell(sampler="recent", draw="max_age"),
    *(Cell(items="17 floats", sampler=sampler) for sampler in ("prioritized", *MAX_USES)),
    *(Cell(kind="sequence", items=items, capacity=2**16) for items in ("376 floats", "84x84x4 bytes")),
    Cell(kind="sequence", seeds=64, capacity=2**17),
    *(Cell(sampler=sampler, draw="max_age") for sampler in ("uniform", "prioritized", "global")),
    Cell(sampler="uniform", draw="epoch"),
    Cell(draw="diagnostics"),
    *(Cell(kind="sequence", windows="inside", sampler=sampler, orders=True) for sampler in ("uniform", "prioritized")),
    Cell(kind="sequence", windows="inside", sampler="uniform", draw="max_age"),
    Cell(kind="sequence", windows="episodes", sampler="uniform"),
    *(Cell(kind="sequence", windows=windows, gaps=True, sampler="uniform") for windows in ("any", "episodes")),
    *(Cell(kind=kind, writes=True) for kind in ("replay", "sequence")),
    Cell(sampler="stored", writes=True),
    *(Cell(kind="sequence", windows=windows, sampler="uniform", draw="later") for windows in ("any", "inside")),
    *(Cell(kind=kind, sampler=sampler) for kind in ("mixture", "reservoir") for sampler in ("uniform", "prioritized")),
    *(Cell(kind="tracer", capacity=16, batch_size=16, seeds=seeds) for seeds in (1, 8)),
    Cell(kind="tracer", items="84x84x4 bytes", capacity=16, batch_size=16, n=1),
    *(Cell(kind=kind) for kind in ("pools", "tasks")),
    *(Cell(kind=kind, capacity=2**12, batch_size=32) for kind in ("levels", "levels by rank")),
    Cell(kind="levels", capacity=2**17),
    *(Cell(kind="sharded", sampler=sampler) for sampler in ("uniform", "prioritized")),
    *(Cell(kind="flashbax", sampler=sampler) for sampler in ("uniform", "prioritized")),
]
# What is compared with GUARD. Each hint of `jaxreplay._common.xla` is needed by one of these.
GUARD = RESULTS / "guard.json"
MAIN = [Cell(), Cell(items="84x84x4 bytes", capacity=2**16), Cell(seeds=8, capacity=2**17), Cell(kind="sequence")]
MAIN += [Cell(batch_size=2**15, num_added=2**12), Cell(sampler="fading")]
OTHERS = [
    Cell(sampler="global", draw="max_age"),
    Cell(sampler="uniform", draw="epoch"),
    Cell(draw="diagnostics"),
    Cell(sampler="recent"),
    Cell(sampler="stored", writes=True),
    Cell(kind="sequence", writes=True),
    Cell(kind="sequence", windows="inside"),
    Cell(kind="sequence", windows="inside", sampler="uniform", draw="later"),
    Cell(kind="sequence", windows="episodes", sampler="uniform", closes=True),
    Cell(kind="joint mixture"),
    Cell(kind="reservoir"),
    Cell(kind="tracer", capacity=16, batch_size=16),
    Cell(kind="pools", capacity=2**14),
    Cell(items="17 floats", sampler="max_uses"),
]
GUARDED = {"cpu": [*MAIN, *OTHERS], "h100": [*MAIN, *OTHERS, *agents.AGENTS], "tpu-v5e": [*MAIN, "dqn", "sac"]}
FIGURES = {
    "cpu": ("flops", "copies"),
    "h100": ("launches", "chain", "copies", "row_loops", "unknown_loops", "temporary_bytes"),
    "tpu-v5e": ("cycles", "copies", "row_loops", "unknown_loops", "temporary_bytes"),
}
COMPILERS = ("jax", "jaxlib", "jax-cuda12-plugin", "jax-cuda12-pjrt", "nvidia-cuda-nvcc-cu12", "libtpu")
LIBRARIES = ("flax", "optax", "gymnax")  # of the agent
# The most that a step may take: on an H100, and cycles on a TPU v5e if they are bounded.
MOST = {
    Cell(orders=True): ({"launches": 21, "chain": 14}, 76_000),
    Cell(sampler="uniform", orders=True): ({}, 20_000),
    Cell(draw="diagnostics"): ({"launches": 26, "chain": 16}, 96_000),
    Cell(seeds=64, capacity=2**17): ({"launches": 30}, None),
    Cell(kind="sequence"): ({"launches": 36}, None),
    Cell(draw="max_age"): ({"launches": 33}, None),
    Cell(sampler="uniform", draw="epoch"): ({"launches": 8}, None),
    Cell(kind="sequence", windows="inside"): ({"launches": 36}, None),
    Cell(writes=True): ({"launches": 29}, None),
    Cell(kind="tracer", capacity=16, batch_size=16): ({"launches": 8}, 28_000),
    Cell(kind="tracer", capacity=16, batch_size=16, seeds=8): ({"launches": 6}, 35_000),
    Cell(kind="pools"): ({"launches": 48}, None),
    Cell(kind="tasks"): ({"launches": 21}, 65_000),
    Cell(kind="levels", capacity=2**12, batch_size=32): ({"launches": 18}, 46_000),
    Cell(kind="levels by rank", capacity=2**12, batch_size=32): ({"launches": 21}, 48_000),
    Cell(kind="levels", capacity=2**17): ({"launches": 28}, 80_000),
}
MEGABYTE = 2**20


def report(target: str, cell: Cell, only: str = "") -> list[dict[str, Any]]:
    """A row for each operation, or for the `only` one."""
    rows = []
    arrays = arrays_of(target, cell)
    num_bytes = [cell.seeds * x.size * x.dtype.itemsize // cell.num_devices for x in arrays]
    at_least = 2**16 if cell.kind == "tracer" else cell.seeds * cell.capacity // cell.num_devices
    large = {x for x in num_bytes if x >= at_least}
    for name, compiled, steps in compile_for(target, cell, only):
        program, memory = Program(compiled.as_text()), compiled.memory_analysis()
        inner = [loop for loop in program.loops if loop.depth == (steps > 1)]
        collectives = [x for x in program.collectives if x.depth == (steps > 1)]
        row = {
            "target": target,
            "cell": str(cell),
            "operation": name,
            "launches": round(program.kernels / steps, 1),
            "chain": round(program.chain / steps, 1),
            "cycles": round(program.cycles / steps),
            "flops": round(compiled.cost_analysis()["flops"]) if target == "cpu" else 0,
            "copies": [copy.result.split("{")[0] for copy in program.copies(large)],
            "moves": len(program.moves(large)),
            "row_loops": sum(1 for loop in inner if loop.trips is not None and loop.trips >= 16),
            "unknown_loops": sum(1 for loop in inner if loop.trips is None),
            "temporary_bytes": memory.temp_size_in_bytes,
            "argument_bytes": memory.argument_size_in_bytes,
            "payload_bytes": cell.payload // cell.num_devices,
            "collectives": len(collectives),
            "collective_bytes": sum(x.num_bytes for x in collectives),
        }
        is_bounded = cell.kind != "flashbax" and target != "cpu"
        rows.append(row | {"missed": list(missed(target, cell, row)) if is_bounded else []})
    return rows


def missed(target: str, cell: Cell, row: dict[str, Any]) -> Iterator[str]:
    """The bounds that do not hold."""
    if row["copies"] or row["row_loops"]:
        yield f"copies {row['copies']}, {row['row_loops']} loops over rows: expected none"
    if row["unknown_loops"] > (cell.kind == "pools"):
        yield f"{row['unknown_loops']} loops of unknown length"
    if cell.kind not in ("tracer", "pools", "tasks", "levels", "levels by rank"):
        # An item's own size, if it is small, is no more than that of its priority and its minimum.
        most = row["payload_bytes"] * (1.25 if cell.item_bytes >= 64 else 1.6)
        if row["argument_bytes"] > most:
            yield f"arguments of {row['argument_bytes']} bytes: at most {most:.0f}"
    # A TPU reads a row of 128 nodes for each draw, and a batch may be larger than 2% of a small storage. A mixture has
    # two trees.
    is_long = row["operation"] == "orders" or cell.kind in ("pools", "tasks", "mixture")
    # The 48 rounds of a permutation are unrolled; their random words take 34 kB each there.
    permutes = cell.draw == "epoch" or cell.sampler == "distinct"
    has_more = cell.draw in ("max_age", "later") or cell.windows != "any" or cell.gaps or cell.writes
    floor = max(4.2 if permutes else 3.2 if is_long else 1.6, 0.1 * cell.seeds) * (1.2 if has_more else 1) * MEGABYTE
    rows_of_nodes = 4 * 128 * cell.batch_size if target == "tpu-v5e" else 0
    most = max(0.02 * row["payload_bytes"], 6 * cell.batch_bytes, rows_of_nodes, floor)
    if row["temporary_bytes"] > most and cell.kind != "tracer":
        yield f"temporaries of {row['temporary_bytes']} bytes: at most {most:.0f}"
    if row["operation"] == ("add" if cell.kind == "tracer" else "step"):
        on_h100, cycles = MOST.get(cell, ({}, None))
        on_tpu = {} if cycles is None else {"cycles": cycles}
        yield from agents.above({"h100": on_h100, "tpu-v5e": on_tpu}.get(target, {}), row)


COLUMNS: dict[str, Callable[[dict[str, Any]], str]] = {
    "cell": lambda row: row["cell"],
    "operation": lambda row: row["operation"],
    "launches": lambda row: f"{row['launches']:g}",
    "chain": lambda row: f"{row['chain']:g}",
    "cycles": lambda row: f"{row['cycles']:,}" if row["cycles"] else "-",
    "copies": lambda row: f"{len(row['copies'])}",
    "moves": lambda row: f"{row['moves']}",
    "row loops": lambda row: f"{row['row_loops']}",
    "unknown loops": lambda row: f"{row['unknown_loops']}",
    "temporary bytes": lambda row: f"{row['temporary_bytes']:,}",
    "arguments / payload": lambda row: f"{row['argument_bytes'] / row['payload_bytes']:.2f}",
    "collectives (bytes)": lambda row: (
        f"{row['collectives']} ({row['collective_bytes']})" if row["collectives"] else "-"
    ),
}


def markdown(rows: list[dict[str, Any]]) -> str:
    """Two tables for each target: of agents, and of single operations."""
    texts = [f"Compiled with jax {importlib.metadata.version('jax')}; nothing was run. README.md says what is counted."]
    for target in dict.fromkeys(row["target"] for row in rows):
        found = [row for row in rows if row["target"] == target]
        trained, cells = [row for row in found if "agent" in row], [row for row in found if "cell" in row]
        texts.append(f"## {target}")
        texts += [agents.markdown(trained)] * bool(trained)
        texts += [table([*COLUMNS], [[text(row) for text in COLUMNS.values()] for row in cells])] * bool(cells)
    return "\n\n".join(texts) + "\n"


def versions() -> dict[str, str]:
    """Of the packages that decide about a figure."""
    return {name: importlib.metadata.version(name) for name in (*COMPILERS, *LIBRARIES)}


def guarded(rows: list[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """What is recorded: the figures of each row."""

    def figures(row: dict[str, Any]) -> dict[str, float]:
        found = {name: row[name] for name in FIGURES[row["target"]] if name in row}
        return {name: len(x) if isinstance(x, list) else x for name, x in found.items()}

    return {_name(row): figures(row) for row in rows}


def _name(row: dict[str, Any]) -> str:
    return f"{row['target']}, {row.get('agent') or row['cell']}"


def compare(found: dict[str, dict[str, float]], recorded: dict[str, dict[str, float]]) -> Iterator[str]:
    """The figures that exceed the recorded ones, or have none."""
    for name, figures in found.items():
        for figure, now in figures.items():
            was = recorded.get(name, {}).get(figure, -1)
            if now > was:
                yield f"{name}: {figure} was {was if was >= 0 else 'not recorded'}, is {now}"
            elif now < was:
                print(f"{name}: {figure} was {was}, is {now}: fewer, to be recorded by --record")


def _rows(target: str, match: str, smoke: bool) -> Iterator[dict[str, Any]]:
    for cell in GUARDED[target] if smoke else [*agents.AGENTS, *CELLS]:
        if isinstance(cell, Cell) and match in str(cell):
            yield from report(target, cell, "step" if smoke else "")
        elif not isinstance(cell, Cell) and match in f"agent {cell}":
            yield agents.report(target, cell)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--smoke", action="store_true", help=f"few cells, compared with {GUARD.name}")
    parser.add_argument("--record", action="store_true", help=f"with --smoke: write {GUARD.name}")
    parser.add_argument("--targets", nargs="+", choices=[*TARGETS, "cpu"])
    parser.add_argument("--match", default="", help="only cells and agents with this in their name")
    parser.add_argument("--out", type=pathlib.Path, help=f"folder for the results, {RESULTS} if all is compiled")
    options = parser.parse_args()
    targets = options.targets or list(GUARDED if options.smoke else TARGETS)
    recorded = {} if options.record or not options.smoke else json.loads(GUARD.read_text())
    if recorded and recorded["versions"] != versions():
        print(
            f"{GUARD.name} has figures of {recorded['versions']}, and these are {versions()}; use `.ci/run compiled`."
        )
        return 1
    rows = []
    for target in targets:
        for row in _rows(target, options.match, options.smoke):
            rows.append(row)
            print(json.dumps(row), flush=True)
    is_all = not (options.smoke or options.match or options.targets)
    if out := options.out or (RESULTS if is_all else None):
        out.mkdir(parents=True, exist_ok=True)
        (out / "compiled.json").write_text(json.dumps(rows, indent=1) + "\n")
        (out / "compiled.md").write_text(markdown(rows))
    if options.record:
        GUARD.write_text(json.dumps({"versions": versions(), "figures": guarded(rows)}, indent=1) + "\n")
    print(markdown(rows))
    if options.smoke:
        wrong = list(compare(guarded(rows), recorded["figures"]) if recorded else ())
    else:
        wrong = [f"{_name(row)}, {row.get('operation', 'step')}: {x}" for row in rows for x in row["missed"]]
    print("\n".join(wrong))
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
