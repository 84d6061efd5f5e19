"""Tables of a benchmark's result, as Markdown; a peer that is faster is bold there and red on a terminal."""

import functools
import re
from collections.abc import Iterator
from typing import Any

from draws import BESIDE
from grid import BASE, PARTS
from settings import power
from sharded import QUARTILES
from tables import number, size, spread, table
from targets import targets

FASTER = " (faster)"


def coloured(markdown: str) -> str:
    """The text for a terminal: cells of faster peers in red."""
    return re.sub(r"\*\*([^*|]*?)\*\*", "\033[1;31m\\1\033[0m    ", markdown)


def _bold(text: str, found: dict[str, Any]) -> str:
    """The text of a ratio; bold if the other library is faster."""
    return f"**{text}{FASTER}**" if found["ratio"]["median"] < 1 else text


def _figure(found: dict[str, Any], key: str = "us", ends: tuple[int, int] = (10, 90)) -> str:
    if "error" in found:
        return found["error"].replace("|", "/")
    return spread(found[key], ends) if key in found else ""


def _peer_cell(found: dict[str, Any] | None) -> str:
    if not found or "ratio" not in found:
        return _figure(found or {})
    ratio = found["ratio"]
    return _bold(f"{_figure(found)}, x{number(ratio['median'])} [{number(ratio['p10'])}-{number(ratio['p90'])}]", found)


def part_table(part: str, rows: list[dict]) -> str:
    sizes = {"N": "capacity", "B": "batch_size", "E": "num_added", "S": "seeds", "items": "items"}
    shown = [label for label, field in sizes.items() if len({row[field] for row in rows}) > 1 or label in "NB"]
    libraries = list(dict.fromkeys(name for row in rows for name in row["libraries"]))
    peers = [name for name in libraries if name != BASE]
    header = [*shown, f"{BASE}, us", *(f"{name}, us, ratio" for name in peers)]
    header += ["per seed / one seed"] * (part == "c")
    header += ["limit, us (bytes + launches)", "over limit", "temporary", "peak", "compile, s"]
    lines = []
    for row in sorted(rows, key=lambda r: tuple(str(r[f]) if f == "items" else r[f] for f in sizes.values())):
        fields = [row[sizes[label]] for label in shown]
        own = row["libraries"][BASE]
        line = [power(x) if isinstance(x, int) else x for x in fields]
        line += [_figure(own), *(_peer_cell(row["libraries"].get(name)) for name in peers)]
        line += [" ".join(f"{k} {v:.2f}" for k, v in row.get("per_seed", {}).items())] * (part == "c")
        lines.append(line + _facts(own))
    return table(header, lines)


def _facts(own: dict[str, Any]) -> list[str]:
    if "limit_us" not in own:
        return [""] * 5
    limit = f"{number(own['limit_us'])} ({number(own['bytes_us'])} + {number(own['launches_us'])})"
    seconds = f"{own['compile_s']:.1f}"
    return [limit, f"{own['over_limit']:.1f}", size(own["temporary_bytes"]), size(own["peak_bytes"]), seconds]


def add_per_seed(rows: list[dict]) -> None:
    """(c) Cost per seed over that of one seed, of the rows measured in turn with it."""
    ones = {(r["capacity"], r["batch_size"], r["items"]): r for r in rows if r["part"] == "c" and r["seeds"] == 1}
    for row in rows:
        one = ones.get((row["capacity"], row["batch_size"], row["items"]))
        if row["part"] != "c" or one is None:
            continue
        row["per_seed"] = {
            name: round(found["us"]["median"] / row["seeds"] / one["libraries"][name]["us"]["median"], 3)
            for name, found in row["libraries"].items()
            if "us" in found and "us" in one["libraries"].get(name, {})
        }


def _end_to_end(result: dict[str, Any]) -> str:
    if "skipped" in result:
        return f"Skipped: {result['skipped']}."
    lines = []
    for name, found in result["libraries"].items():
        returns = f"{found['mean_return']} {found['interval']}"
        ratio = _bold(spread(found["ratio"]), found)
        lines.append([name, spread(found["seconds"]), ratio, returns, f"{found['compile_s']:.1f}"])
    header = ["buffer", "training, s", "ratio", "final return, mean of seeds [95% interval]", "compile, s"]
    return f"{result['seeds']} seeds, {result['pairs']} trainings with each.\n\n" + table(header, lines)


_quartiles = functools.partial(_figure, ends=QUARTILES)


def _sharded(found: dict[str, Any]) -> Iterator[str]:
    runs, cores = f"medians of {found['runs']} alternating runs [quartiles]", found["cores"]
    lines = []
    for row in sorted(found["cost"], key=lambda r: (r["how"] == "eager", r["buffer"], r["capacity"], r["batch_size"])):
        plain, ours = row["libraries"][BASE], row["libraries"]["Sharded"]
        figures = [_quartiles(plain, "us"), _quartiles(ours, "us"), _quartiles(ours, "ratio")]
        lines.append([row["buffer"], row["how"], power(row["capacity"]), power(row["batch_size"]), *figures])
    if lines:
        yield f"One device, beside the buffer itself; {runs}."
        yield table(["buffer", "calls", "N", "B", f"{BASE}, us", "Sharded, us", "ratio"], lines)
    lines = []
    for row in found["scaling"]:
        for devices, figure in row["devices"].items():
            line = [row["buffer"], power(row["capacity"]), power(row["batch_size"]), devices, _quartiles(figure, "us")]
            throughput = int(devices) / figure["ratio"]["median"] if "ratio" in figure else float("nan")
            line += [_quartiles(figure, "ratio"), f"{throughput:.2f}"]
            lines.append(line + ([f"{throughput / min(int(devices), cores):.2f}"] if cores else []))
    if lines:
        text = f"Each device with N items, B draws and 16 added; {runs}. Relative to one device: time and throughput"
        if cores:
            text += (
                f"; the {cores} cores are shared by the devices, so the last column is the throughput over the smaller "
                "of devices and cores (one device alone can already use several cores)"
            )
        yield text + "."
        header = ["buffer", "N", "B", "devices", "us", "time", "throughput"]
        yield table(header + ["over cores"] * bool(cores), lines)
    if "skipped" in found:
        yield f"More devices: skipped, {found['skipped']}."


def _draws(found: dict[str, Any]) -> Iterator[str]:
    def cell(name: str, figure: dict[str, Any], first: bool) -> str:
        if "ratio" not in figure or (first and name not in BESIDE):
            return _figure(figure)
        text = f"{_figure(figure)}, x{number(figure['ratio']['median'])}"
        return _bold(text, figure) if name in BESIDE else text

    yield (
        f"{found['date']}. Draws of {found['batch_size']}, us; medians of {found['runs']} alternating runs "
        "[10th-90th percentile]. xR is the growth since the smallest N; of another way its time over that of ours "
        "that is named beside it. Memory is that of the compiled scan at the largest N."
    )
    sizes = list(next(iter(found["draws"].values())))
    lines = []
    for name, figures in found["draws"].items():
        label = f"{name} (beside {BESIDE[name]})" if name in BESIDE else name
        last = figures[sizes[-1]]
        memory = [size(last.get("carry_bytes")), size(last.get("temporary_bytes"))]
        lines.append([label, *(cell(name, figures[n], n == sizes[0]) for n in sizes), *memory])
    yield table(["draw", *(f"N={power(int(n))}" for n in sizes), "arguments", "temporary"], lines)


def _start(found: dict[str, Any]) -> Iterator[str]:
    yield (
        f"{found['date']}. CPU seconds of all threads of fresh processes without a compilation cache: the least of "
        f"{found['runs']} (the median). The ratio is jaxreplay's least over the other's."
    )
    lines = []
    for name, libraries in found["cells"].items():
        line = [name, *(f"{x['least']:.2f} ({x['median']:.2f})" for x in libraries.values())]
        others = [x["least"] for library, x in libraries.items() if library != BASE]
        lines.append([*line, *(f"{libraries[BASE]['least'] / x:.2f}" for x in others)])
    names = list(next(iter(found["cells"].values())))
    yield table(["", *names, *("ratio" for _ in names[1:])], lines)


def render(result: dict[str, Any]) -> str:
    """The whole report."""
    add_per_seed(result["rows"])
    known = ", ".join(f"{name} {version or 'not measured'}" for name, version in result["versions"].items())
    machine = result["machine"]
    copies = ", ".join(f"{size(int(n))} at {speed:.1f} GB/s" for n, speed in machine["copy_GB_per_s"].items())
    text = [
        f"# Benchmark on {result['backend']} ({result['device']}, {result['cores']} cores), {result['date']}",
        f"Versions: {known}.",
        f"Medians of {result['runs']} alternating runs [10th-90th percentile]; xR: the peer's time over jaxreplay's, "
        f"run by run. Measured: copies of {copies}; launch cost {machine['launch_us']} us.",
    ]
    for part, (title, _) in PARTS.items():
        rows = [row for row in result["rows"] if row["part"] == part]
        if rows:
            text += [f"## ({part}) {title}", part_table(part, rows)]
    if result["end_to_end"]:
        text += ["## (e) End to end: the DQN of examples/agents/dqn.py", _end_to_end(result["end_to_end"])]
    if result.get("sharded"):
        text += ["## (i) Sharded: on one device, and on more", *_sharded(result["sharded"])]
    if result.get("draws"):
        text += ["## (j) Draws alone, by capacity", *_draws(result["draws"])]
    if result.get("start"):
        text += ["## (l) Before the first step: compile time and first use", *_start(result["start"])]
    if result["not_run"]:
        text += ["## Not run, out of time", "; ".join(result["not_run"]) + "."]
    if result["smoke"]:
        return "\n\n".join([*text, "Smoke mode: the figures mean nothing."]) + "\n"
    lines = [["met" if met else "**missed**", name, figure] for name, met, figure in targets(result)]
    if lines and result["backend"] == "cpu":
        text += ["## Targets", table(["", "target", "measured"], lines)]
    return "\n\n".join(text) + "\n"
