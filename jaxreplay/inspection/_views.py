"""What a report shows of each buffer and each set of pools in a state: arrays of NumPy, on the host."""

import dataclasses
from collections.abc import Iterator
from typing import Any

import numpy as np

from jaxreplay.buffers import ReplayState, ReservoirState, SequenceState
from jaxreplay.difficulty_pools import PoolsState
from jaxreplay.inspection import _saved
from jaxreplay.inspection._saved import Saved
from jaxreplay.samplers import PrioritizedState

KINDS = {
    ReplayState: "ReplayBuffer",
    ReservoirState: "ReservoirBuffer",
    SequenceState: "SequenceBuffer",
    PoolsState: "DifficultyPools",
}
RETURNS = {"rn": "return of a window (Rn)", "reward": "reward", "rewards": "reward", "r": "reward"}
ENDS = ("terminated", "truncated", "done", "is_last")
MOST = 2**22  # numbers of a picture; of more every k-th is taken


@dataclasses.dataclass
class View:
    """A buffer or a set of pools.

    Attributes:
      name: where it is in the state; "" if it is all of it.
      kind: its class.
      settings: the configuration, as text by name.
      facts: counts and shares, as text by name.
      leaves: of an item: path, dtype, shape and bytes of the whole storage.
      power: what `priorities` are: "p", or "p^alpha" where alpha is not known.
      priorities: float64 [items stored], None without priorities.
      law: float64 [items stored], the probability of each; None without priorities.
      weights: float64 [items stored], importance weights by the present beta, the largest 1; None without priorities.
      beta: as text.
      ages: int [items stored], None where unknown.
      returns: what they are, and the numbers; None where no leaf is known to hold them.
      episodes: int [complete episodes stored], lengths in rows; None where ends are not known.
      updates: int [items stored], how often each came back; None where not counted.
      pools: names of environments and numbers of tasks [E, 3] in normal, easy and hard; None without pools.
    """

    name: str
    kind: str
    settings: dict[str, str]
    facts: dict[str, str]
    leaves: list[tuple[str, str, tuple[int, ...], int]]
    power: str = "p"
    priorities: Any = None
    law: Any = None
    weights: Any = None
    beta: str = ""
    ages: Any = None
    returns: Any = None
    episodes: Any = None
    updates: Any = None
    pools: Any = None


def views(saved: Saved) -> list[View]:
    """All buffers and pools in a state."""
    return [
        (_pools if _is(state, PoolsState) else _buffer)(name, state, config)
        for name, state, config in _find(saved.state, saved.config, "", saved.config)
    ]


def others(saved: Saved) -> list[tuple[str, int, int]]:
    """All else in a state: where, number of arrays and bytes."""
    if isinstance(saved.state, tuple(KINDS)):
        return []
    named = saved.state.items() if isinstance(saved.state, dict) else enumerate(_children(saved.state))
    found = []
    for name, child in named:
        if not any(True for _ in _find(child, None, "", None)):
            leaves = [_saved.shape_of(leaf) for _, leaf in _saved.items_of(child)]
            found.append((str(name), len(leaves), sum(nbytes for _, _, nbytes in leaves)))
    return found


def _is(state: Any, kind: type) -> bool:
    """Whether `state`, whose arrays are leaves of a report, is of this kind."""
    return isinstance(state, kind)


def _children(tree: Any) -> list[Any]:
    return list(tree) if isinstance(tree, tuple | list) else []


def _find(state: Any, config: Any, name: str, whole: Any) -> Iterator[tuple[str, Any, Any]]:
    """The states of buffers and pools, with their descriptions where they are found."""
    fields = config.get("fields", {}) if isinstance(config, dict) else {}
    if type(state) in KINDS:
        if _type(config) not in (KINDS[type(state)], "Sharded"):
            fits = [x for x in _all(whole) if _type(x) == KINDS[type(state)]]
            config = fits[0] if len(fits) == 1 else None
        yield name, state, config
        return
    if isinstance(state, dict):
        named = {str(key): (child, fields.get(str(key))) for key, child in state.items()}
    else:
        parts = fields.get("buffers") if _type(config) == "Mixture" else config
        parts = parts if isinstance(parts, list) else []
        children = _children(state)
        parts = [*parts, *[None] * len(children)]
        named = {str(i): (child, parts[i]) for i, child in enumerate(children)}
    for key, (child, its) in named.items():
        yield from _find(child, its, f"{name}.{key}" if name else key, whole)


def _all(config: Any) -> Iterator[Any]:
    """All descriptions in a description; of a `Sharded` buffer not the buffer in it once more."""
    if isinstance(config, dict):
        yield config
        for child in config.get("fields", {}).values():
            yield from _all(child)
    elif isinstance(config, list):
        for child in config:
            yield from _all(child)


def _type(config: Any) -> str:
    return config.get("type", "").rpartition(".")[2] if isinstance(config, dict) else ""


def _text(value: Any) -> str:
    """A value of a description."""
    if isinstance(value, list):
        return "(" + ", ".join(map(_text, value)) + ")"
    if not isinstance(value, dict):
        return repr(value) if isinstance(value, str) else str(value)
    if "type" in value:
        fields = ", ".join(f"{name}={_text(x)}" for name, x in value["fields"].items())
        return f"{_type(value)}({fields})"
    return str(next(iter(value.values())))


def _buffer(name: str, state: Any, config: Any) -> View:
    config = config or {}
    kind, settings = KINDS[type(state)], {}
    if _type(config) == "Sharded":
        settings["mesh"] = _text(config["fields"]["mesh"])
        kind, config = f"Sharded({kind})", config["fields"]["buffer"]
    fields: dict[str, Any] = config.get("fields", {})
    settings |= {key: _text(value) for key, value in fields.items() if key != "sampler"}
    sampler = fields.get("sampler", {})
    if sampler:
        settings["sampler"] = _text(sampler)
    lead = state.ring.size.shape
    live, inserted, size = _live(state)
    leaves = [(path, *_saved.shape_of(leaf)) for path, leaf in _saved.items_of(state.storage)]
    axes = len(lead) + (2 if _is(state, SequenceState) else 1)
    view = View(
        name,
        kind,
        settings,
        {},
        [(path, dtype, shape[axes:], nbytes) for path, shape, dtype, nbytes in leaves],
    )
    if len(lead) > (1 if kind.startswith("Sharded") else 0):
        view.settings["stacked"] = f"{lead[0]} states"
    capacity = live.size
    what = "sequences that may be drawn" if _is(state, SequenceState) else "items"
    view.facts[what] = f"{size.sum():,} of {capacity:,} ({size.sum() / capacity:.0%})"
    if _is(state, SequenceState):
        rows, most = state.rows.size.read().sum(), leaves[0][1][len(lead)] * max(int(np.prod(lead)), 1)
        view.facts["rows of each stream"] = f"{rows:,} of {most:,} ({rows / most:.0%})"
    view.facts["bytes"] = f"{sum(_saved.shape_of(x)[2] for _, x in _saved.items_of(state)):,}"
    _add_sampler(view, state.sampler, sampler.get("fields", {}), live)
    view.ages = _ages(state, fields, live, inserted)
    view.returns = _returns(state, live, len(lead))
    view.episodes = _episodes(state, len(lead)) if _is(state, SequenceState) else None
    return view


def _live(state: Any) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Which slots hold what may be drawn, [stack, slots]; insertions and sizes, [stack]."""
    inserted, size = (x.read().reshape(-1).astype(np.int64) for x in (state.ring.inserted, state.ring.size))
    if _is(state.sampler, PrioritizedState):
        slots = state.sampler.tree.capacity
    else:
        slots = getattr(state.sampler, "capacity", None) or int(size.max(initial=1))
    slot, start = np.arange(slots), np.zeros_like(size)
    if _is(state, SequenceState):
        start = inserted % slots - size
    return (slot - start[:, None]) % slots < size[:, None], inserted, size


def _add_sampler(view: View, state: Any, fields: dict[str, Any], live: np.ndarray) -> None:
    counts = getattr(state, "counts", None)
    if counts is not None:
        view.updates = counts.of_slots.read().reshape(live.shape)[live]
        view.facts["late updates"] = f"{counts.late.read().sum():,}"
        view.facts["never updated"] = f"{np.mean(view.updates == 0) if view.updates.size else 0:.1%}"
    if not _is(state, PrioritizedState):
        return
    alpha, beta = fields.get("alpha"), fields.get("beta")
    leaves = state.tree.sums[-1].read().astype(np.float64)
    leaves = leaves.reshape(len(live), -1)[:, : state.tree.capacity]
    leaves = np.where(live, leaves, 0.0)
    totals = leaves.sum(axis=1, keepdims=True)
    even = live / np.maximum(live.sum(axis=1, keepdims=True), 1)
    law = np.where(totals > 0, leaves / np.where(totals > 0, totals, 1.0), even)
    law = law / max(int(np.sum(live.any(axis=1))), 1)  # each of several shards is drawn from equally often
    view.law, view.priorities = law[live], leaves[live]
    if alpha:
        view.priorities = view.priorities ** (1 / alpha)
    elif alpha is None:
        view.power = "p^alpha"
    view.beta = "beta = 0.4, as the saved one is a function" if not isinstance(beta, float) else f"beta = {beta:g}"
    positive = view.law > 0
    if positive.any():
        exponent = beta if isinstance(beta, float) else 0.4
        view.weights = np.where(positive, np.where(positive, view.law, 1.0) / view.law[positive].min(), np.inf)
        view.weights = view.weights**-exponent
    view.facts["beta"] = view.beta.removeprefix("beta = ")
    view.facts |= {
        "largest priority ever": f"{state.max_priority.read().max():.4g}",
        "updates": f"{state.updates.read().max():,}",
        "TD errors refused": f"{state.rejected.read().sum():,}",
    }
    if view.law.size:
        in_order, size = np.sort(view.law)[::-1], view.law.size
        for part in (0.01, 0.1):
            whole = int(part * size)
            mass = in_order[:whole].sum() + (part * size - whole) * in_order[min(whole, size - 1)]
            view.facts[f"mass in the top {part:.0%}"] = f"{mass:.1%}"


def _ages(state: Any, fields: dict[str, Any], live: np.ndarray, inserted: np.ndarray) -> np.ndarray | None:
    if _is(state, ReservoirState):
        return None
    num_slots = live.shape[1]
    age = (inserted[:, None] - 1 - np.arange(num_slots)) % num_slots
    if _is(state, SequenceState):
        num_envs = _saved.shape_of(_saved.items_of(state.storage)[0][1])[0][len(state.ring.size.shape) + 1]
        if state.windows is None:
            age = age // num_envs
        else:
            if not all(name in fields for name in ("length", "sequence_length", "stride")):
                return None
            first = _saved.values(state.windows.first).reshape(live.shape)
            rows, wait = (x.read().reshape(-1, 1).astype(np.int64) for x in (state.rows.inserted, state.wait))
            newest = rows % fields["length"] + wait - fields["sequence_length"] - fields["stride"]
            age = (newest - first // num_envs) % fields["length"] // fields["stride"]
    return age[live]


def _returns(state: Any, live: np.ndarray, stacked: int) -> tuple[str, np.ndarray] | None:
    """Numbers of the leaf that is known to hold returns or rewards."""
    axes = stacked + (2 if _is(state, SequenceState) else 1)
    named = {path.rpartition(".")[2].lower(): leaf for path, leaf in _saved.items_of(state.storage)}
    for name, what in RETURNS.items():
        if name not in named:
            continue
        shape, dtype, _ = _saved.shape_of(named[name])
        if len(shape) == axes and ("float" in dtype or "int" in dtype):
            numbers = _saved.values(named[name]).astype(np.float64)
            if _is(state, SequenceState):
                numbers = numbers.reshape(-1, *shape[-2:])
                rows = state.rows.size.read().reshape(-1)
                numbers = np.concatenate([x[:n].reshape(-1) for x, n in zip(numbers, rows, strict=True)])
            else:
                slots = numbers.reshape(len(live), -1)
                numbers = slots[:, : live.shape[1]][live[:, : slots.shape[1]]]
            return what, thin(numbers[np.isfinite(numbers)])
    return None


def _episodes(state: Any, stacked: int) -> np.ndarray | None:
    """Lengths of the episodes of which all rows are stored, int."""
    if state.ends is not None:
        ends = _saved.values(state.ends)
    else:
        named = {path.rpartition(".")[2].lower(): leaf for path, leaf in _saved.items_of(state.storage)}
        flags = [
            _saved.values(named[x]) for x in ENDS if x in named and len(_saved.shape_of(named[x])[0]) == stacked + 2
        ]
        if not flags:
            return None
        ends = np.any(np.stack(flags).astype(bool), axis=0)
    ends = ends.reshape(-1, *ends.shape[-2:])
    found = []
    counts = (x.read().reshape(-1) for x in (state.rows.inserted, state.rows.size))
    for its, inserted, size in zip(ends, *counts, strict=True):
        in_order = np.roll(its, -(int(inserted) % len(its)), axis=0)[len(its) - int(size) :]
        for stream in in_order.T:
            at = np.flatnonzero(stream)
            found.append(np.diff(at) if inserted > size else np.diff(np.concatenate([[-1], at])))
    return np.concatenate(found) if found else np.zeros(0, int)


def _pools(name: str, state: Any, config: Any) -> View:
    fields = (config or {}).get("fields", {})
    sizes = state.sizes.read()
    sizes = sizes.reshape(-1, *sizes.shape[-2:]).sum(axis=0)
    settings = {key: _text(x) for key, x in fields.items() if key not in ("tasks_per_env", "env_names", "env_ratios")}
    names = [str(x) for x in fields.get("env_names") or range(len(sizes))]
    groups, rollouts = (x.read().reshape(-1, 3).sum(axis=0) for x in (state.groups, state.rollouts))
    whole = max(int(sizes.sum()), 1)
    facts = {
        "tasks": f"{sizes.sum():,} in {len(sizes)} environments",
        **{
            f"in {pool}": f"{n:,} ({n / whole:.0%})"
            for pool, n in zip(("normal", "easy", "hard"), sizes.sum(0), strict=True)
        },
        "groups normal / easy / hard": " / ".join(f"{n:,}" for n in groups),
        "rollouts kept / too easy / too hard": " / ".join(f"{n:,}" for n in rollouts),
        "groups refused": f"{state.rejected.read().sum():,}",
        "bytes": f"{sum(_saved.shape_of(x)[2] for _, x in _saved.items_of(state)):,}",
    }
    return View(name, "DifficultyPools", settings, facts, [], pools=(names, sizes))


def thin(numbers: np.ndarray) -> np.ndarray:
    """At most MOST of the numbers, evenly spaced."""
    return numbers[:: -(-numbers.size // MOST)] if numbers.size > MOST else numbers
