"""The figures of the documentation's page of speed are those of the benchmark's files."""

import json
import math
import pathlib

ROOT = pathlib.Path(__file__).parent.parent
RESULTS = ROOT / "tests/benchmarks/results"
PEERS = "flashbax", "flashbax ordered", "cpprb", "torchrl"
PARTS = {
    "bc": "prioritized step in a scan, 1 to 64 seeds",
    "f": "uniform step in a scan",
    "g": "prioritized sequences in a scan",
    "d": "prioritized step, called from Python",
    "a": "sum tree alone",
    "m": "many environments, prioritized",
    "n": "many environments, uniform",
}
DRAWS = {
    "replay, uniform": "flashbax, uniform",
    "replay, prioritized": "flashbax, prioritized",
    "sequence, prioritized": None,
    "pools, prioritized": None,
}
SIZE = "5 floats, N=2^20, B=256"
GPU_PEERS = "flashbax", "cpprb"
ON_CPU = {f"2^{power}": ("b", power, 256, "vector", 1) for power in (14, 17, 20, 22)}
ON_GPU = {  # part, log2 of the capacity, batch size, items, seeds
    "N = 2^20": ("b", 20, 256, "vector", 1),
    "N = 2^17, frames": ("b", 17, 256, "frames", 1),
    "N = 2^17, 64 seeds": ("c", 17, 256, "vector", 64),
    "N = 2^14, sequences": ("g", 14, 256, "vector", 1),
    "N = 2^20, uniform": ("f", 20, 256, "vector", 1),
    "N = 2^17, called from Python": ("d", 17, 256, "vector", 1),
}


def beside(found):
    """The other library's microseconds, and its time over ours."""
    return f"{found['us']['median']:.0f} ({found['ratio']['median']:.1f}x)" if found else "-"


def steps(result, cells, peers):
    """Microseconds of a step of each cell, and beside them the other libraries'."""
    names = "part", "capacity", "batch_size", "items", "seeds"
    rows = {tuple(row[name] for name in names): row["libraries"] for row in result["rows"] if row["num_added"] == 16}
    for name, (part, power, *others) in cells.items():
        found = rows[part, 2**power, *others]
        ours = f"{found['jaxreplay']['us']['median']:.0f}"
        yield [name, ours, *(beside(found.get(peer)) for peer in peers)]


def medians(rows, parts, peer):
    """The peer's times over ours in all cells of these parts."""
    found = [row["libraries"].get(peer, {}).get("ratio") for row in rows if row["part"] in parts]
    return [ratio["median"] for ratio in found if ratio]


def ratios(rows):
    """Geometric means over the cells of a part."""
    for parts, name in PARTS.items():
        cells = [name]
        for peer in PEERS:
            found = [*map(math.log, medians(rows, parts, peer))]
            cells.append(f"{math.exp(sum(found) / len(found)):.2f} ({len(found)})" if found else "-")
        yield cells


def compiled_steps(compiled):
    """Launches on an H100 and estimated cycles on a TPU v5e, of a step and of the same step with flashbax."""
    found = {(x["target"], x["cell"]): x for x in compiled if x.get("operation") == "step"}
    for ours, theirs in DRAWS.items():
        cells = [ours]
        for target, unit in (("h100", "launches"), ("tpu-v5e", "cycles")):
            for cell in (ours, theirs):
                cells.append(f"{found[target, f'{cell}, {SIZE}'][unit]:,.0f}" if cell else "-")
        yield cells


def test_speed_page():
    page = (ROOT / ".docs/pages/speed.md").read_text()
    cpu, gpu, compiled = (json.loads((RESULTS / f"{name}.json").read_text()) for name in ("cpu", "gpu", "compiled"))
    many = json.loads((RESULTS / "many_environments/cpu.json").read_text())
    means, launches = ratios([*cpu["rows"], *many["rows"]]), compiled_steps(compiled)
    tables = steps(cpu, ON_CPU, PEERS), steps(gpu, ON_GPU, GPU_PEERS), means, launches
    tables = [[*table] for table in tables]
    assert [*map(len, tables)] == [len(ON_CPU), len(ON_GPU), len(PARTS), len(DRAWS)]
    least = [min(medians(many["rows"], part, "flashbax")) for part in "mn"]
    assert f"smallest ratios {least[0]:.2f} and {least[1]:.2f}, jax {many['versions']['jax']}" in " ".join(page.split())
    assert f"{gpu['date']}, jax {gpu['versions']['jax']}, {gpu['device']}" in page
    for table in tables:
        assert "\n".join(f"| {' | '.join(cells)} |" for cells in table) in page
    assert f"{cpu['date']}, jax {cpu['versions']['jax']}, {cpu['cores']} cores" in page
    assert f"{cpu['end_to_end']['libraries']['flashbax']['ratio']['median']:.2f} times as fast" in page
    for peer in ("flashbax", "cpprb", "torchrl"):
        assert f"{peer} {cpu['versions'][peer]}" in page
