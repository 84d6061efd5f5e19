"""Benchmark of jaxreplay beside other replay buffers.

Run: python tests/benchmarks/run.py [--parts abcdefghijklmn] [--peers flashbax ...] [--seconds S] [--smoke] [--out DIR]

Prints tables; writes BACKEND.json, BACKEND.md and plots. What is measured, and how, is in the README beside this file.
"""

import argparse
import contextlib
import datetime
import importlib
import importlib.metadata
import io
import json
import logging
import os
import pathlib
import platform
import signal
import time
import warnings

import draws
import end_to_end
import jax
import report
import sharded
import start
from grid import BASE, HOST_LIBRARIES, PACKAGES, PARTS, Group, groups, peer, storage_bytes
from harness import measure
from limits import Machine, limits, measure_machine
from tqdm import tqdm

RESULTS = pathlib.Path(__file__).parent / "results"
MODULES = {"torchrl": "torchrl._torchrl", "rejax": "rejax.buffers", "memorax": "memorax.buffers"}
MODULES |= {"brax": "brax.training.replay_buffers", "jaxued": "jaxued.level_sampler"}
MODULES |= {"jaxnasium": "jaxnasium.algorithms.core"}


def importable(names: list[str]) -> set[str]:
    """Those of the peers that can be imported here."""
    found = set()
    for name in names:
        try:
            with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
                importlib.import_module(MODULES.get(name, name))
        except Exception:  # a broken installation raises anything
            continue
        found.add(name)
    return found


def versions(peers: set[str]) -> dict[str, str | None]:
    """Of this package and those under it, and of the peers; None where one is not measured."""
    used = {"jaxreplay", "jax", "jaxlib", "flax", "optax", *peers, *(["torch"] if "torchrl" in peers else [])}
    installed = {str(x.name).lower(): x.version for x in importlib.metadata.distributions()}
    names = ("jaxreplay", "jax", "jaxlib", "flax", "optax", *PACKAGES, "torch")
    return {"python": platform.python_version()} | {x: installed.get(x) if x in used else None for x in names}


def device_bytes() -> float:
    """Memory of the device that the buffers of one group may take: 60% of what there is."""
    stats = jax.devices()[0].memory_stats() or {}
    return 0.6 * (stats.get("bytes_limit", 0) - stats.get("bytes_in_use", 0))


def host_bytes() -> float:
    """The same of the host."""
    lines = pathlib.Path("/proc/meminfo").read_text().splitlines()
    return 0.6 * 1024 * next(int(line.split()[1]) for line in lines if line.startswith("MemAvailable"))


def run_group(group: Group, machine: Machine, runs: int, run_seconds: float) -> list[dict]:
    """One row a setting: sizes, and figures by library."""
    room = {"host": host_bytes(), "device": device_bytes()}
    on_device = jax.default_backend() != "cpu"
    fitting, figures = {}, {}
    for key, make in group.makers.items():
        place = "device" if on_device and peer(key[1]) not in HOST_LIBRARIES else "host"
        stored = storage_bytes(group.part, *key)
        if stored > room[place]:
            figures[key] = {"error": f"does not fit: {stored / 1e9:.1f} GB"}
            continue
        room[place] -= stored
        fitting[key] = make
    figures |= measure(fitting, lambda key: (key[0], BASE), runs, run_seconds)
    rows = {}
    for setting, library in group.makers:
        row = rows.setdefault(setting, {"part": group.part, **vars(setting), "libraries": {}})
        found = figures[setting, library]
        if library == BASE and "kernels" in found:
            found |= limits(group.part, setting, found["kernels"], found["carry_bytes"], machine)
            found["over_limit"] = round(found["us"]["median"] / found["limit_us"], 2)
        row["libraries"][library] = found
    return list(rows.values())


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--parts", default="abcdefghijklmn", help="letters of the parts (abcdefghijklmn)")
    parser.add_argument("--peers", nargs="*", choices=PACKAGES, default=PACKAGES, help="all by default")
    parser.add_argument("--seconds", type=float, default=7200.0, help="start no cell after this long (7200)")
    parser.add_argument("--smoke", action="store_true", help="one tiny cell a part, to see that it runs")
    parser.add_argument("--out", type=pathlib.Path, help="folder (results, beside this file; none with --smoke)")
    args = parser.parse_args()
    args.deadline = time.perf_counter() + args.seconds
    args.parts = list(args.parts)
    if unknown := set(args.parts) - {*PARTS, *"eijl"}:
        parser.error(f"argument --parts: no part {', '.join(sorted(unknown))}")
    if args.out is None and not args.smoke:
        args.out = RESULTS
    return args


def run(args: argparse.Namespace, todo: list[Group], machine: Machine, peers: set[str], result: dict) -> None:
    """Measure (i), the groups, (j), (l), then (e), into `result`; cells that are late are only noted."""
    run_seconds = 0.02 if args.smoke else 0.04
    with tqdm(total=len(todo) + sum(part in args.parts for part in "eijl"), unit="cell", smoothing=0) as bar:
        if "i" in args.parts:
            # Its cells rank among themselves: it comes first, with a share of the time where there are other parts.
            share = 1.0 if args.parts == ["i"] else 0.15
            result["sharded"] = {}
            sharded.run(result["sharded"], args.smoke, args.deadline - (1 - share) * args.seconds, bar)
            result["not_run"] += result["sharded"].pop("not_run")
            bar.update()
        for group in todo:
            if time.perf_counter() > args.deadline:
                result["not_run"].append(group.name)
            else:
                bar.set_description(group.name)
                result["rows"] += run_group(group, machine, result["runs"], run_seconds)
            bar.update()
        for part, name, run_part in (("j", "draws", draws.run), ("l", "start", start.run)):
            if part in args.parts and time.perf_counter() > args.deadline:
                result["not_run"].append(part)
            elif part in args.parts:
                bar.set_description(part)
                result[name] = run_part(args.smoke, peers)
                bar.update()
        if "e" in args.parts:
            bar.set_description("e")
            result["end_to_end"] = end_to_end.run(args.smoke, "flashbax" in peers)
            bar.update()


def main() -> None:
    args = parse_args()
    if args.smoke:  # compiles faster; read when JAX starts
        os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_backend_optimization_level=0"
    warnings.filterwarnings("ignore")  # peers warn about their own use of other packages
    peers = importable(args.peers)
    logging.getLogger("torchrl").setLevel(logging.ERROR)
    device = jax.devices()[0]
    machine = measure_machine(2**24, 200) if args.smoke else measure_machine()
    result = {
        "date": datetime.date.today().isoformat(),
        "backend": device.platform,
        "device": device.device_kind,
        "cores": os.cpu_count(),
        "versions": versions(peers),
        "smoke": args.smoke,
        "runs": 2 if args.smoke else 21,
        "machine": {
            "copy_GB_per_s": {size: round(speed / 1e9, 2) for size, speed in machine.bandwidths.items()},
            "launch_us": round(machine.launch * 1e6, 3),
        },
        **{"rows": [], "not_run": [], "end_to_end": None, "sharded": None, "draws": None, "start": None},
    }
    todo = groups([part for part in args.parts if part not in "eijl"], peers, args.smoke)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        run(args, todo, machine, peers, result)
    except KeyboardInterrupt:  # what has been measured is still reported
        print("Interrupted.")
    text = report.render(result)
    print(report.coloured(text))
    if args.out:
        args.out.mkdir(parents=True, exist_ok=True)
        (args.out / f"{device.platform}.json").write_text(json.dumps(result, indent=1) + "\n")
        (args.out / f"{device.platform}.md").write_text(text)
        try:
            import plots
        except ImportError as error:
            print(f"No plots: {error.name} is not installed.")
        else:
            plots.save(result, args.out)


if __name__ == "__main__":
    main()
