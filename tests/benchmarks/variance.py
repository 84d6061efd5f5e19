"""Law and variance of prioritized draws: independent, stratified, systematic.

`python tests/benchmarks/variance.py` draws many batches with each, and writes `results/variance.json` and
`results/variance.md`. For each kind: the p-value of a chi-square test of how often items are drawn, the share of a
batch's rows that repeat an item of the batch, and for several kinds of values the variance of the weighted mean over a
batch, relative to that of independent draws. The weights are (N P)^-1, so each mean is unbiased; its error in standard
errors is given.
"""

import argparse
import json
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from scipy import stats

import jaxreplay as jr

RESULTS = pathlib.Path(__file__).parent / "results"
KINDS = {"independent": False, "stratified": True, "systematic": "systematic"}


def values(priorities: np.ndarray, rng: np.random.Generator) -> dict[str, np.ndarray]:
    """Values of the items, by kind."""
    size, slots = len(priorities), np.arange(len(priorities))
    return {
        "no order": rng.normal(size=size) + 1,
        "like the priority": priorities * rng.uniform(0.8, 1.2, size),
        "a trend over the slots": slots / size + 0.1 * rng.normal(size=size),
        "blocks of 64 slots": np.repeat(rng.normal(size=-(-size // 64)), 64)[:size] + 1,
    }


def measure(capacity: int, batch_size: int, batches: int) -> dict[str, Any]:
    """Rows of the table."""
    rng = np.random.default_rng(0)
    priorities = rng.exponential(size=capacity).astype(np.float32) + 0.1
    found: dict[str, Any] = {"capacity": capacity, "batch_size": batch_size, "batches": batches, "kinds": {}}
    of_items = values(priorities, rng)
    law = priorities.astype(np.float64) / priorities.sum(dtype=np.float64)
    order = np.minimum((np.cumsum(law) * 1000).astype(int), 999)  # a thousand groups of slots
    independent: dict[str, float] = {}
    for name, kind in KINDS.items():
        sampler = jr.Prioritized(alpha=1.0, beta=1.0, epsilon=0.0, normalize=None, stratified=kind)
        buffer = jr.ReplayBuffer(capacity=capacity, sampler=sampler)
        slots = jnp.arange(capacity, dtype=jnp.int32)
        state = buffer.add(buffer.init(slots), slots, td_errors=jnp.asarray(priorities))
        draw = jax.jit(
            lambda state, keys, buffer=buffer: jax.lax.map(lambda k: _pair(buffer, state, k, batch_size), keys)
        )
        drawn, weights = map(np.asarray, draw(state, jax.random.split(jax.random.key(1), batches)))
        counts = np.bincount(order[drawn.reshape(-1)], minlength=1000)
        in_order = np.sort(drawn, axis=1)
        row: dict[str, Any] = {
            "p-value": float(stats.chisquare(counts, np.bincount(order, law) * drawn.size).pvalue),
            "repeats": float(np.mean(in_order[:, 1:] == in_order[:, :-1])),
        }
        for what, x in of_items.items():
            means = np.mean(weights * x[drawn], axis=1)
            variance = independent.setdefault(what, float(means.var(ddof=1)))
            error = (means.mean() - x.mean()) / max(means.std() / np.sqrt(batches), 1e-12)
            row[what] = {"variance": float(means.var(ddof=1) / variance), "bias": float(error)}
        found["kinds"][name] = row
    return found


def _pair(buffer: Any, state: Any, key: jax.Array, batch_size: int) -> tuple[jax.Array, jax.Array]:
    sample = buffer.sample(state, key, batch_size)
    return sample.items, sample.weights


def markdown(found: dict[str, Any]) -> str:
    """The table."""
    kinds = found["kinds"]
    names = [name for name, x in next(iter(kinds.values())).items() if isinstance(x, dict)]
    lines = [
        f"{found['batches']:,} batches of {found['batch_size']} from {found['capacity']:,} items of exponential "
        "priorities. Variance of the weighted mean relative to independent draws; in brackets its error in standard "
        "errors.",
        "",
        f"| draws | law, p-value | repeats | {' | '.join(names)} |",
        "| --- " * (len(names) + 3) + "|",
    ]
    for kind, row in kinds.items():
        cells = [f"{row[name]['variance']:.2f} ({row[name]['bias']:+.1f})" for name in names]
        lines.append(f"| {kind} | {row['p-value']:.2f} | {row['repeats']:.2%} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--smoke", action="store_true", help="few batches; writes nothing")
    smoke = parser.parse_args().smoke
    found = measure(2**16, 256, 64 if smoke else 8192)
    if not smoke:
        (RESULTS / "variance.json").write_text(json.dumps(found, indent=1) + "\n")
        (RESULTS / "variance.md").write_text(markdown(found))
    print(markdown(found))


if __name__ == "__main__":
    main()
