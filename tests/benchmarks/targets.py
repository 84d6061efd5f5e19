"""What the benchmark should show, and whether it does."""

from collections.abc import Iterator
from typing import Any

import numpy as np
from draws import BESIDE
from grid import BASE, peer
from settings import power

Row = dict[str, Any]
Target = tuple[str, bool, str]


def _us(row: Row, library: str = BASE) -> float | None:
    return row["libraries"].get(library, {}).get("us", {}).get("median")


def _ratio(row: Row, library: str) -> float | None:
    return row["libraries"].get(library, {}).get("ratio", {}).get("median")


def _name(row: Row) -> str:
    text = f"({row['part']}) N={power(row['capacity'])} B={row['batch_size']}"
    if row["part"] != "a":
        text += f" E={row['num_added']} {row['items']}"
    return text + (f" S={row['seeds']}" if row["part"] == "c" else "")


def _find(rows: list[Row], part: str, capacity: int, batch_size: int = 256, **sizes: Any) -> Row | None:
    wanted = {"part": part, "capacity": capacity, "batch_size": batch_size, "num_added": 16, "seeds": 1, **sizes}
    wanted.setdefault("items", "vector")
    return next((row for row in rows if all(row[k] == v for k, v in wanted.items()) and _us(row)), None)


def targets(result: dict[str, Any]) -> Iterator[Target]:
    """(target, met, figure) of each target that was measured."""
    rows, on_cpu = result["rows"], result["backend"] == "cpu"
    steps = [row for row in rows if row["part"] in "bc" and _us(row)]
    yield from _beside_peers(steps, on_cpu)
    yield from _seeds(rows, on_cpu)
    if not on_cpu:
        yield from _accelerator(rows)
    small, large = _find(rows, "a", 2**14), _find(rows, "a", 2**22)
    if small and large:
        growth, most = _us(large) / _us(small), 3 if on_cpu else 2
        yield f"(a) grows less than {most}x from 2^14 to 2^22 leaves, B=256", growth < most, f"{growth:.2f}x"
    yield from _memory(rows)
    compiled = [(row["libraries"][BASE]["compile_s"], row) for row in rows if row["part"] == "b" and _us(row)]
    if compiled and on_cpu:
        worst, row = max(compiled, key=lambda pair: pair[0])
        yield "(b) compiles in under 3 s", worst < 3, f"at most {worst:.1f} s, {_name(row)}"
    if result.get("draws"):
        yield from _draws(result["draws"]["draws"])
    libraries = (result["end_to_end"] or {}).get("libraries", {})
    if "flashbax" in libraries:
        ratio = libraries["flashbax"]["ratio"]
        text = f"flashbax's time over ours {ratio['median']:.3f} [{ratio['p10']:.3f}-{ratio['p90']:.3f}]"
        yield "(e) at least as fast as with flashbax's buffer", ratio["median"] >= 1, text


def _beside_peers(steps: list[Row], on_cpu: bool) -> Iterator[Target]:
    names = dict.fromkeys(name for row in steps for name in row["libraries"])
    for name in names:
        ratios = [ratio for row in steps if (ratio := _ratio(row, name))]
        least = {"flashbax": 1.5, "cpprb": 3.0, "torchrl": 10.0}.get(name)
        if name == BASE or not ratios:
            continue
        mean = float(np.exp(np.mean(np.log(ratios))))
        text = f"{mean:.2f}x over {len(ratios)} cells"
        if least and on_cpu:
            yield f"(b), (c) geometric mean at least {least:g}x faster than {name}", mean >= least, text
        else:
            yield f"(b), (c) geometric mean, beside {name}", mean >= 1, text
    slowest = []
    for row in steps:
        ratios = {n: r for n in row["libraries"] if peer(n) and (r := _ratio(row, n))}
        if ratios:
            name = min(ratios, key=ratios.get)
            slowest.append((ratios[name], name, row))
    if slowest:
        ratio, name, row = min(slowest, key=lambda entry: entry[0])
        lost = sum(entry[0] < 1 for entry in slowest)
        text = f"slower in {lost} of {len(slowest)}; worst {ratio:.3f}x of {name}, {_name(row)}"
        yield "(b), (c) never slower than the fastest peer", not lost, text


def _seeds(rows: list[Row], on_cpu: bool) -> Iterator[Target]:
    for row in rows:
        if row["part"] != "c" or row["seeds"] != 64 or BASE not in row.get("per_seed", {}):
            continue
        cost, key = row["per_seed"][BASE], (row["capacity"], row["batch_size"]) == (2**17, 256)
        if on_cpu:
            yield f"64 seeds cost at most 1.1x a seed, {_name(row)}", cost <= 1.1, f"{cost:.2f}x"
        elif key:
            yield f"64 seeds cost at most 6x one, {_name(row)}", 64 * cost <= 6, f"{64 * cost:.1f}x"


def _accelerator(rows: list[Row]) -> Iterator[Target]:
    for part in "ab":
        row = _find(rows, part, 2**20)
        if row and (ratio := _ratio(row, "flashbax")):
            yield f"({part}) at least 3x faster than flashbax, N=2^20, B=256", ratio >= 3, f"{ratio:.2f}x"
    if row := _find(rows, "a", 2**20):
        over = row["libraries"][BASE]["over_limit"]
        yield "(a) under 60 us, N=2^20, B=256", _us(row) < 60, f"{_us(row):.1f} us"
        yield "(a) within 3x of its limit, N=2^20, B=256", over <= 3, f"{over:.1f}x"
    frames = [row for row in rows if row["part"] == "b" and row["items"] == "frames" and _us(row)]
    if frames:
        row = max(frames, key=lambda row: row["libraries"][BASE]["over_limit"])
        over = row["libraries"][BASE]["over_limit"]
        yield "(b) within 2x of its limit for uint8 items", over <= 2, f"at most {over:.1f}x, {_name(row)}"


def _draws(found: dict[str, Any]) -> Iterator[Target]:
    for name in ("rejax", "memorax"):
        if ratio := found.get(name, {}).get(str(2**17), {}).get("ratio"):
            text = f"{ratio['median']:.1f}x [{ratio['p10']:.1f}-{ratio['p90']:.1f}]"
            yield f"(j) at least 10x faster than {name}'s draw, N=2^17, B=256", ratio["median"] >= 10, text
    growth = {n: x[str(2**20)]["ratio"]["median"] for n, x in found.items() if n not in BESIDE and str(2**20) in x}
    if growth:
        above = [f"{name} {x:.2f}x" for name, x in growth.items() if x >= 2]
        text = f"{', '.join(above) or 'none above'}; at most {max(growth.values()):.2f}x"
        yield "(j) draws grow less than 2x from 2^12 to 2^20 items", not above, text


def _memory(rows: list[Row]) -> Iterator[Target]:
    shares = []
    for row in rows:
        own = row["libraries"].get(BASE, {})
        if row["part"] in "bcfg" and own.get("temporary_bytes") is not None:
            shares.append((own["temporary_bytes"] / own["carry_bytes"], row))
    if shares:
        above = sum(share >= 0.01 for share, _ in shares)
        worst, row = max(shares, key=lambda pair: pair[0])
        text = f"at least 1% in {above} of {len(shares)} cells; at most {worst:.2%}, {_name(row)}"
        yield "temporary bytes below 1% of the storage", not above, text
