"""Views: the contents of each buffer and each `DifficultyPools` in a state for reports, as NumPy arrays."""

import dataclasses
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

from jaxreplay.buffers import (
    ReplayBuffer,
    ReplayState,
    ReservoirBuffer,
    ReservoirState,
    SequenceBuffer,
    SequenceState,
)
from jaxreplay.difficulty_pools import DifficultyPools, PoolsState
from jaxreplay.inspection import _facts, _saved
from jaxreplay.inspection._saved import Saved
from jaxreplay.samplers import PrioritizedState, UniformState

KINDS: dict[type, Any] = {
    ReplayState: ReplayBuffer,
    ReservoirState: ReservoirBuffer,
    SequenceState: SequenceBuffer,
    PoolsState: DifficultyPools,
}
RETURNS = {"rn": "return of a window (Rn)", "reward": "reward", "rewards": "reward", "r": "reward"}
ENDS = ("terminated", "truncated", "done", "is_last")
MOST = 2**22  # numbers in a figure; longer arrays are thinned to every k-th


@dataclasses.dataclass
class View:
    """A buffer or a `DifficultyPools` in a report.

    Attributes:
      name: path in the state; "" if it is the whole state.
      kind: class name.
      settings: the configuration as text, by name.
      facts: counts and shares as text, by name.
      leaves: path, dtype, item shape and total bytes of each stored leaf.
      power: unit of `priorities`: "p", or "p^alpha" if alpha is unknown.
      priorities: float64 [stored items]; None without priorities.
      law: float64 [stored items], probabilities; None without priorities.
      weights: float64 [stored items], importance weights at the current beta, scaled to a maximum of 1; None without
        priorities.
      beta: beta as text.
      ages: int [stored items]; None if unknown.
      returns: a label and the numbers; None if no leaf is known to hold returns or rewards.
      episodes: int [complete stored episodes], lengths in rows; None if ends are unknown.
      updates: int [stored items], number of updates; None if not counted.
      pools: names of environments, and numbers of tasks [E, 3] in normal, easy and hard; None without pools.
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
    """Remaining contents of a state: path, number of arrays and bytes."""
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
    """True if `state`, with leaves of a report for arrays, is an instance of `kind`."""
    return isinstance(state, kind)


def _children(tree: Any) -> list[Any]:
    return list(tree) if isinstance(tree, tuple | list) else []


def _find(state: Any, config: Any, name: str, whole: Any) -> Iterator[tuple[str, Any, Any]]:
    """States of buffers and pools: path, state, and its description if there is one."""
    fields = config.get("fields", {}) if isinstance(config, dict) else {}
    if type(state) in KINDS:
        if _type(config) not in (KINDS[type(state)].__name__, "Sharded"):
            fits = [x for x in _all(whole) if _type(x) == KINDS[type(state)].__name__]
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
    """A description and all descriptions nested in it."""
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
    """Text of a value in a description."""
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
    kind, settings = KINDS[type(state)].__name__, {}
    if _type(config) == "Sharded":
        settings["mesh"] = _text(config["fields"]["mesh"])
        kind, config = f"Sharded({kind})", config["fields"]["buffer"]
    fields: dict[str, Any] = config.get("fields", {})
    settings |= {key: _text(value) for key, value in fields.items() if key != "sampler"}
    sampler = fields.get("sampler", {})
    if sampler:
        settings["sampler"] = _text(sampler)
    rows, stored = _rows(state), [(path, *_saved.shape_of(leaf)) for path, leaf in _saved.items_of(state.storage)]
    lead = len(state.ring.size.shape)
    axes = lead + len(KINDS[type(state)]._storage_axes)
    leading = stored[0][1][lead:axes]
    part = _part(state, leading, fields)
    if kind.startswith("Sharded") and lead == 1:
        part = dataclasses.replace(part, _axis_name="shards")  # ages count insertions into all shards
    items = jax.device_get(_facts.of_items(part, rows))
    view = View(name, kind, settings, {}, [(path, dtype, shape[axes:], size) for path, shape, dtype, size in stored])
    if lead > (1 if kind.startswith("Sharded") else 0):
        view.settings["stacked"] = f"{state.ring.size.shape[0]} states"
    size, capacity = rows.ring.size.sum(), items.live.size
    what = "sequences that may be drawn" if _is(state, SequenceState) else "items"
    view.facts[what] = f"{size:,} of {capacity:,} ({size / capacity:.0%})"
    if _is(state, SequenceState):
        filled, most = rows.rows.size.sum(), leading[0] * len(items.live)
        view.facts["rows of each stream"] = f"{filled:,} of {most:,} ({filled / most:.0%})"
        view.episodes = _episodes(state, rows.rows, lead)
    view.facts["bytes"] = f"{sum(_saved.shape_of(x)[2] for _, x in _saved.items_of(state)):,}"
    _add_sampler(view, rows.sampler, sampler.get("fields", {}), items)
    is_known = getattr(state, "windows", None) is None or part.length == leading[0]
    view.ages = items.ages[items.live] if is_known and not _is(state, ReservoirState) else None
    view.returns = _returns(state, rows, items.live, lead)
    return view


def _rows(state: Any) -> Any:
    """A state without its items, as NumPy arrays [D, ...] of D stacked states. Items are not read."""
    unread = dict.fromkeys(x for x in ("storage", "ends", "episodes", "handles", "count") if hasattr(state, x))
    if not isinstance(state.sampler, PrioritizedState | UniformState):
        unread["sampler"] = None
    lead = len(state.ring.size.shape)
    return jax.tree.map(lambda x: x.read().reshape(-1, *x.shape[lead:]), dataclasses.replace(state, **unread))


def _part(state: Any, shape: tuple[int, ...], fields: dict[str, Any]) -> Any:
    """A buffer for a state whose storage has leading axes `shape`, for slots and ages only.

    If the configuration of a `SequenceBuffer` is unknown or does not fit, the result is one with as many slots.
    """
    if not _is(state, SequenceState):
        return KINDS[type(state)](capacity=shape[0])
    (length, num_envs), sequence_length, stride = shape, fields.get("sequence_length", 1), fields.get("stride", 1)
    num_slots = ((length - sequence_length) // stride + 1) * num_envs
    found = getattr(getattr(state.sampler, "tree", state.sampler), "capacity", num_slots)
    if found != num_slots:
        length, sequence_length, stride = found // num_envs, 1, 1
    sizes = {"length": length, "num_envs": num_envs, "sequence_length": sequence_length, "stride": stride}
    return SequenceBuffer(**sizes, gaps=state.windows is not None)  # only the sequences that may be drawn have slots


def _add_sampler(view: View, state: Any, fields: dict[str, Any], items: _facts.Items) -> None:
    live, counts = items.live, getattr(state, "counts", None)
    if counts is not None:
        view.updates = counts.of_slots[live]
        view.facts["late updates"] = f"{counts.late.sum():,}"
        view.facts["never updated"] = f"{np.mean(view.updates == 0) if view.updates.size else 0:.1%}"
    if items.law is None:
        return
    alpha, beta = fields.get("alpha"), fields.get("beta")
    view.law, view.priorities = (x[live].astype(np.float64) for x in (items.law, items.leaves))
    if alpha:
        view.priorities = view.priorities ** (1 / alpha)
    elif alpha is None:
        view.power = "p^alpha"
    view.beta = "beta = 0.4, as the saved beta is a function" if not isinstance(beta, float) else f"beta = {beta:g}"
    positive = view.law > 0
    if positive.any():
        exponent = beta if isinstance(beta, float) else 0.4
        view.weights = np.where(positive, np.where(positive, view.law, 1.0) / view.law[positive].min(), np.inf)
        view.weights = view.weights**-exponent
    view.facts["beta"] = view.beta.removeprefix("beta = ")
    view.facts |= {
        "largest priority ever": f"{state.max_priority.max():.4g}",
        "updates": f"{state.updates.max():,}",
        "TD errors rejected": f"{state.rejected.sum():,}",
    }
    if view.law.size:
        view.facts |= {f"mass in the top {_facts.TOPS[x]:.0%}": f"{mass:.1%}" for x, mass in items.top_masses.items()}


def _returns(state: Any, rows: Any, live: np.ndarray, stacked: int) -> tuple[str, np.ndarray] | None:
    """A label and the numbers of the leaf with returns or rewards, if one is known."""
    axes = stacked + (2 if _is(state, SequenceState) else 1)
    named = {path.rpartition(".")[2].lower(): leaf for path, leaf in _saved.items_of(state.storage)}
    for name, what in RETURNS.items():
        if name not in named:
            continue
        shape, dtype, _ = _saved.shape_of(named[name])
        if len(shape) == axes and ("float" in dtype or "int" in dtype):
            numbers = _saved.values(named[name]).astype(np.float64)
            if _is(state, SequenceState):
                filled = zip(numbers.reshape(-1, *shape[-2:]), rows.rows.size, strict=True)
                numbers = np.concatenate([x[:n].reshape(-1) for x, n in filled])
            else:
                numbers = numbers.reshape(live.shape)[live]
            return what, thin(numbers[np.isfinite(numbers)])
    return None


def _episodes(state: Any, rows: Any, stacked: int) -> np.ndarray | None:
    """Lengths of completely stored episodes, int; None if ends are unknown."""
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
    for its, inserted, size in zip(ends, rows.inserted, rows.size, strict=True):
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
        "groups rejected": f"{state.rejected.read().sum():,}",
        "bytes": f"{sum(_saved.shape_of(x)[2] for _, x in _saved.items_of(state)):,}",
    }
    return View(name, "DifficultyPools", settings, facts, [], pools=(names, sizes))


def thin(numbers: np.ndarray) -> np.ndarray:
    """At most MOST evenly spaced entries of `numbers`."""
    return numbers[:: -(-numbers.size // MOST)] if numbers.size > MOST else numbers
