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


def targets(result: dict[str, Any]) -> Iterator[Target]:
    """(target, met, figure) of each target that was measured; they are stated for a CPU."""
    rows = [row for row in result["rows"] if _us(row)]
    yield from _beside_peers([row for row in rows if row["part"] in "bc"])
    for row in rows:
        cost = row.get("per_seed", {}).get(BASE)
        if row["seeds"] == 64 and cost:
            yield f"64 seeds cost at most 1.1x a seed, {_name(row)}", cost <= 1.1, f"{cost:.2f}x"
    tree = {row["capacity"]: _us(row) for row in rows if row["part"] == "a" and row["batch_size"] == 256}
    if {2**14, 2**22} <= tree.keys():
        growth = tree[2**22] / tree[2**14]
        yield "(a) grows less than 3x from 2^14 to 2^22 leaves, B=256", growth < 3, f"{growth:.2f}x"
    yield from _memory(rows)
    compiled = [(row["libraries"][BASE]["compile_s"], row) for row in rows if row["part"] == "b"]
    if compiled:
        worst, row = max(compiled, key=lambda pair: pair[0])
        yield "(b) compiles in under 3 s", worst < 3, f"at most {worst:.1f} s, {_name(row)}"
    if result.get("draws"):
        yield from _draws(result["draws"]["draws"])
    libraries = (result["end_to_end"] or {}).get("libraries", {})
    if "flashbax" in libraries:
        ratio = libraries["flashbax"]["ratio"]
        text = f"flashbax's time over ours {ratio['median']:.3f} [{ratio['p10']:.3f}-{ratio['p90']:.3f}]"
        yield "(e) at least as fast as with flashbax's buffer", ratio["median"] >= 1, text


def _beside_peers(steps: list[Row]) -> Iterator[Target]:
    names = dict.fromkeys(name for row in steps for name in row["libraries"])
    for name in names:
        ratios = [ratio for row in steps if (ratio := _ratio(row, name))]
        least = {"flashbax": 1.5, "cpprb": 3.0, "torchrl": 10.0}.get(name, 1.0)
        if name == BASE or not ratios:
            continue
        mean = float(np.exp(np.mean(np.log(ratios))))
        text = f"{mean:.2f}x over {len(ratios)} cells"
        yield f"(b), (c) geometric mean at least {least:g}x faster than {name}", mean >= least, text
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
