"""Views: the contents of each buffer and each `DifficultyPools` in a state for reports, as NumPy arrays."""

import dataclasses
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

from jaxreplay import sum_tree
from jaxreplay.buffers import (
    ReplayBuffer,
    ReplayState,
    ReservoirBuffer,
    ReservoirState,
    SequenceBuffer,
    SequenceState,
)
from jaxreplay.curricula import DifficultyPools, PoolsState
from jaxreplay.inspection import _facts, _saved
from jaxreplay.inspection._saved import Saved
from jaxreplay.samplers import PrioritizedState, RecentState, UniformState

KINDS: dict[type, Any] = {
    ReplayState: ReplayBuffer,
    ReservoirState: ReservoirBuffer,
    SequenceState: SequenceBuffer,
    PoolsState: DifficultyPools,
}
POOLS = ("normal", "easy", "hard")
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
    found = _find(saved.state, saved.config, "", saved.config)
    return [(_pools if isinstance(x[1], PoolsState) else _buffer)(*x) for x in found]


def others(saved: Saved) -> list[tuple[str, int, int]]:
    """Remaining contents of a state: path, number of arrays and bytes."""
    parts = _children(saved.state).items()
    rest = [(name, child) for name, child in parts if not any(_find(child, None, "", None))]
    return [(name, len(_saved.leaves_of(child)), _saved.num_bytes(child)) for name, child in rest]


def _children(tree: Any) -> dict[str, Any]:
    """Children of a dict, list or tuple by name; none for other nodes."""
    items = tree.items() if isinstance(tree, dict) else enumerate(tree if isinstance(tree, list | tuple) else ())
    return {str(name): child for name, child in items}


def _find(state: Any, config: Any, name: str, whole: Any) -> Iterator[tuple[str, Any, Any]]:
    """States of buffers and pools: path, state, and its description if there is one."""
    if type(state) in KINDS:
        kind = KINDS[type(state)].__name__
        if _type(config) not in (kind, "Sharded"):
            described = jax.tree.leaves(whole, is_leaf=lambda x: _type(x) == kind)
            fits = [x for x in described if _type(x) == kind]
            config = fits[0] if len(fits) == 1 else None
        yield name, state, config
        return
    parts: Any = config.get("fields") if isinstance(config, dict) else config
    parts = _children(parts["buffers"] if _type(config) == "Mixture" else parts)
    for key, child in _children(state).items():
        yield from _find(child, parts.get(key), f"{name}.{key}" if name else key, whole)


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
    kind, settings = KINDS[type(state)].__name__, {}
    is_sharded, is_sequence = _type(config) == "Sharded", isinstance(state, SequenceState)
    if is_sharded:
        settings["mesh"] = _text(config["fields"]["mesh"])
        kind, config = f"Sharded({kind})", config["fields"]["buffer"]
    fields: dict[str, Any] = config["fields"] if config else {}
    sampler = fields.get("sampler") or {}
    settings |= {key: _text(value) for key, value in fields.items() if key != "sampler"}
    settings |= {"sampler": _text(sampler)} if sampler else {}
    lead, stored = len(state.ring.size.shape), _saved.leaves_of(state.storage)
    if lead > is_sharded:
        settings["stacked"] = f"{state.ring.size.shape[0]} states"
    axes = lead + len(KINDS[type(state)]._storage_axes)
    leading = next(iter(stored.values())).shape[lead:axes]
    rows, part = _rows(state), _part(state, leading, fields)
    if is_sharded and lead == 1:
        part = dataclasses.replace(part, _axis_name="shards")  # ages count insertions into all shards
    items = jax.device_get(_facts.of_items(part, rows))
    leaves = [(path, str(x.dtype), x.shape[axes:], _saved.num_bytes(x)) for path, x in stored.items()]
    facts = {"sequences that may be drawn" if is_sequence else "items": _share(rows.ring.size.sum(), items.live.size)}
    view, is_stored = View(name, kind, settings, facts, leaves), items.live
    if is_sequence:
        facts["rows of each stream"] = _share(rows.rows.size.sum(), leading[0] * len(items.live))
        is_stored = np.arange(leading[0]) < rows.rows.size[:, None]
        view.episodes = _episodes(state, rows.rows, _scalars(state, axes, ENDS))
    facts["bytes"] = f"{_saved.num_bytes(state):,}"
    _add_sampler(view, rows.sampler, rows.uses, sampler.get("fields", {}), items)
    is_known = getattr(state, "windows", None) is None or part.length == leading[0]
    view.ages = items.ages[items.live] if is_known and not isinstance(state, ReservoirState) else None
    for key, leaf in _scalars(state, axes, RETURNS).items():
        if "float" in str(leaf.dtype) or "int" in str(leaf.dtype):
            numbers = _saved.values(leaf).astype(np.float64)
            numbers = numbers.reshape(*is_stored.shape, *leaf.shape[lead + 1 :])[is_stored]
            view.returns = RETURNS[key], thin(numbers[np.isfinite(numbers)])
            break
    return view


def _share(part: int, whole: int) -> str:
    return f"{part:,} of {whole:,} ({part / whole:.0%})"


def _rows(state: Any) -> Any:
    """A state without its items, as NumPy arrays [D, ...] of D stacked states. Items are not read."""
    unread = dict.fromkeys(x for x in ("storage", "ends", "episodes", "handles", "count") if hasattr(state, x))
    if not isinstance(state.sampler, PrioritizedState | RecentState | UniformState):
        unread["sampler"] = None
    lead = len(state.ring.size.shape)
    return jax.tree.map(lambda x: np.asarray(x).reshape(-1, *x.shape[lead:]), dataclasses.replace(state, **unread))


def _part(state: Any, shape: tuple[int, ...], fields: dict[str, Any]) -> Any:
    """A buffer for a state whose storage has leading axes `shape`, for slots and ages only.

    If the configuration of a `SequenceBuffer` is unknown or does not fit, the result is one with as many slots.
    """
    if not isinstance(state, SequenceState):
        return KINDS[type(state)](capacity=shape[0])
    (length, num_envs), sequence_length, stride = shape, fields.get("sequence_length", 1), fields.get("stride", 1)
    num_slots = ((length - sequence_length) // stride + 1) * num_envs
    found = getattr(getattr(state.sampler, "tree", state.sampler), "capacity", num_slots)
    if found != num_slots:
        length, sequence_length, stride = found // num_envs, 1, 1
    sizes = {"length": length, "num_envs": num_envs, "sequence_length": sequence_length, "stride": stride}
    return SequenceBuffer(**sizes, gaps=state.windows is not None)  # only the sequences that may be drawn have slots


def _add_sampler(view: View, state: Any, counts: Any, fields: dict[str, Any], items: _facts.Items) -> None:
    live = items.live
    if counts is not None:
        view.updates = counts.of_slots[live]
        view.facts["late updates"] = f"{counts.late.sum():,}"
        if counts.unspent is not None:
            view.facts["no longer drawn"] = f"{np.sum(np.asarray(sum_tree.leaves(counts.unspent))[live] == 0):,}"
        view.facts["never updated"] = f"{np.mean(view.updates == 0) if view.updates.size else 0:.1%}"
    if items.law is None:
        return
    alpha, beta = fields.get("alpha"), fields.get("beta")
    is_number = isinstance(beta, float)
    view.law, view.priorities = (x[live].astype(np.float64) for x in (items.law, items.leaves))
    if alpha:
        view.priorities = view.priorities ** (1 / alpha)
    elif alpha is None:
        view.power = "p^alpha"
    view.beta = f"beta = {beta:g}" if is_number else "beta = 0.4, as the saved beta is a function"
    positive = view.law > 0
    if positive.any():
        view.weights = np.where(positive, view.law / view.law[positive].min(), np.inf) ** -(beta if is_number else 0.4)
    view.facts |= {
        "beta": view.beta.removeprefix("beta = "),
        "largest priority ever": f"{state.max_priority.max():.4g}",
        "updates": f"{state.updates.max():,}",
        "TD errors rejected": f"{state.rejected.sum():,}",
    }
    if view.law.size:
        view.facts |= {f"mass in the top {_facts.TOPS[x]:.0%}": f"{mass:.1%}" for x, mass in items.top_masses.items()}


def _scalars(state: Any, axes: int, names: Any) -> dict[str, Any]:
    """Stored leaves of one number for each item with one of these names, by lower-case name, in the order of names."""
    named = {path.rpartition(".")[2].lower(): leaf for path, leaf in _saved.leaves_of(state.storage).items()}
    return {name: named[name] for name in names if name in named and len(named[name].shape) == axes}


def _episodes(state: Any, rows: Any, flags: dict[str, Any]) -> np.ndarray | None:
    """Lengths of completely stored episodes, int; None if ends are unknown."""
    leaves = [*flags.values()] if state.ends is None else [state.ends]
    if not leaves:
        return None
    ends = np.any([_saved.values(leaf) != 0 for leaf in leaves], axis=0)
    found = [np.zeros(0, int)]
    for its, inserted, size in zip(ends.reshape(-1, *ends.shape[-2:]), rows.inserted, rows.size, strict=True):
        in_order = np.roll(its, -(int(inserted) % len(its)), axis=0)[len(its) - int(size) :]
        for stream in in_order.T:
            at = np.flatnonzero(stream)
            found.append(np.diff(at) if inserted > size else np.diff(at, prepend=-1))
    return np.concatenate(found)


def _pools(name: str, state: Any, config: Any) -> View:
    fields = config["fields"] if config else {}
    sizes = np.asarray(state.sizes)
    sizes = sizes.reshape(-1, *sizes.shape[-2:]).sum(axis=0)
    settings = {key: _text(x) for key, x in fields.items() if key not in ("tasks_per_env", "env_names", "env_ratios")}
    names = [str(x) for x in fields.get("env_names") or range(len(sizes))]
    counts = {"groups normal / easy / hard": state.groups, "rollouts kept / too easy / too hard": state.rollouts}
    whole = max(int(sizes.sum()), 1)
    facts = {
        "tasks": f"{sizes.sum():,} in {len(sizes)} environments",
        **{f"in {pool}": f"{n:,} ({n / whole:.0%})" for pool, n in zip(POOLS, sizes.sum(0), strict=True)},
        **{what: " / ".join(f"{n:,}" for n in np.asarray(x).reshape(-1, 3).sum(0)) for what, x in counts.items()},
        "groups rejected": f"{np.asarray(state.rejected).sum():,}",
        "bytes": f"{_saved.num_bytes(state):,}",
    }
    return View(name, "DifficultyPools", settings, facts, [], pools=(names, sizes))


def thin(numbers: np.ndarray) -> np.ndarray:
    """At most MOST evenly spaced entries of `numbers`."""
    return numbers[:: -(-numbers.size // MOST)] if numbers.size > MOST else numbers
