"""The groups of programs that are measured in turn, the most telling first."""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import host_buffers
import jax_buffers
import pools
import tasks
import trees
from jax_buffers import eager_program, scan_program
from settings import SEQUENCE_LENGTH, Setting

import jaxreplay as jr

PACKAGES = ("flashbax", "cpprb", "torchrl", "brax", "rejax", "jaxnasium", "memorax", "jaxued")
HOST_LIBRARIES = {"cpprb", "torchrl"}
BASE = "jaxreplay"


@dataclasses.dataclass(frozen=True)
class Group:
    """Programs measured in turn.

    Attributes:
      part: letter of the part.
      rank: 0 for the most telling.
      makers: functions that make a program, by (setting, library).
    """

    part: str
    rank: int
    makers: dict[tuple[Setting, str], Callable]

    @property
    def name(self) -> str:
        setting = next(iter(self.makers))[0]
        return f"{self.part} N={setting.capacity} B={setting.batch_size} E={setting.num_added} {setting.items}"


def peer(library: str) -> str | None:
    """The package that a library's name starts with; None for jaxreplay and the naive baseline."""
    word = library.split()[0]
    return word if word in PACKAGES else None


# The sizes of each part's most telling cell.
KEYS = {
    part: Setting(capacity=2**power, batch_size=256)
    for part, power in zip("abfcdghk", (20,) * 3 + (17,) * 2 + (14,) * 3, strict=True)
}
KEYS["m"] = KEYS["n"] = Setting(capacity=2**20, batch_size=2**15, num_added=4_096)
CAPACITIES = (2**20, 2**17, 2**14, 2**22)
OURS, FLASHBAX = jax_buffers.jaxreplay, jax_buffers.flashbax_item
TREES = {BASE: trees.tree_program, "flashbax": trees.flashbax_tree}
TREES |= {"naive": trees.naive_table, "torchrl": trees.torchrl_tree}
STEPS = {
    BASE: functools.partial(scan_program, OURS),
    "flashbax": functools.partial(scan_program, FLASHBAX),
    "cpprb": host_buffers.cpprb_program,
    "torchrl": host_buffers.torchrl_program,
    "flashbax ordered": functools.partial(scan_program, FLASHBAX, ordered=True),
}
SEEDS = {name: STEPS[name] for name in (BASE, "flashbax", "flashbax ordered", "cpprb")}
EAGER = {
    BASE: functools.partial(eager_program, OURS, jitted=False),
    "flashbax": functools.partial(eager_program, FLASHBAX, jitted=True),
    **{name: STEPS[name] for name in ("cpprb", "torchrl")},
}
UNIFORM = {
    BASE: functools.partial(scan_program, functools.partial(OURS, sampler=jr.Uniform())),
    "flashbax": functools.partial(scan_program, functools.partial(FLASHBAX, uniform=True)),
    "brax": functools.partial(scan_program, jax_buffers.brax_uniform),
    "cpprb": functools.partial(host_buffers.cpprb_program, prioritized=False),
    "torchrl": functools.partial(host_buffers.torchrl_program, prioritized=False),
}
MANY = {name: STEPS[name] for name in (BASE, "flashbax", "torchrl")}
MANY |= {"cumsum": functools.partial(scan_program, jax_buffers.cumulative_sums)}
MANY_UNIFORM = {name: UNIFORM[name] for name in (BASE, "flashbax", "torchrl")}
SEQUENCES = {
    BASE: functools.partial(scan_program, jax_buffers.jaxreplay_sequences),
    "flashbax": functools.partial(scan_program, jax_buffers.flashbax_trajectory),
}
TASKS = {
    BASE: tasks.jaxreplay_tasks,
    "jaxreplay Levels": tasks.jaxreplay_levels,
    "jaxued": tasks.jaxued_levels,
    "NumPy": tasks.numpy_tasks,
}


def storage_bytes(part: str, setting: Setting, library: str) -> int:
    """Estimated bytes of the buffer of a program."""
    item = {"a": 0, "h": 0, "k": 0, "g": SEQUENCE_LENGTH * setting.item_bytes}.get(part, setting.item_bytes)
    item *= 4 if library == "brax" and setting.items == "frames" else 1  # it keeps floats
    return setting.seeds * setting.capacity * (item + 12)


def _group(
    part: str,
    settings: Setting | list[Setting],
    programs: dict[str, Callable],
    left_out: Callable[[str, Setting], bool] = lambda name, setting: False,
    rank: int | None = None,
) -> Group:
    """All programs of one setting or several; the rank is how many of the first one's sizes differ from the key's."""
    settings = settings if isinstance(settings, list) else [settings]
    sizes = zip(*map(dataclasses.astuple, (settings[0], KEYS[part])), strict=True)
    keys = [(setting, name) for setting in settings for name in programs if not left_out(name, setting)]
    makers = {(setting, name): functools.partial(programs[name], setting) for setting, name in keys}
    return Group(part, sum(a != b for a, b in sizes) if rank is None else rank, makers)


def _settings(smoke: bool, capacities: tuple[int, ...] = CAPACITIES, **sizes: Any) -> list[Setting]:
    pairs = itertools.product([2**10] if smoke else capacities, [32] if smoke else [256, 32, 1024])
    return [Setting(capacity=capacity, batch_size=batch_size, **sizes) for capacity, batch_size in pairs]


def _kinds(smoke: bool) -> tuple[str, ...]:
    return ("vector",) if smoke else ("vector", "frames")


def tree_groups(smoke: bool) -> Iterator[Group]:
    for setting in _settings(smoke, (2**20, 2**14, 2**22, 2**17, 2**24)):
        # Targets are stated for B=256 at all sizes, so these come first.
        rank = 0 if setting.batch_size == 256 and setting.capacity <= 2**22 else None
        yield _group("a", setting, TREES, lambda name, x: name == "naive" and x.capacity > 2**20, rank)


def step_groups(smoke: bool) -> Iterator[Group]:
    for kind, num_added in itertools.product(_kinds(smoke), [16] if smoke else [16, 1, 128]):
        for setting in _settings(smoke, num_added=num_added, items=kind):
            if kind == "vector" or setting.capacity <= 2**20:
                usual = kind == "frames" and (setting.batch_size, num_added) == (256, 16) and setting.capacity <= 2**17
                yield _group("b", setting, STEPS, rank=0 if usual else None)


def vmap_groups(smoke: bool) -> Iterator[Group]:
    for kind in _kinds(smoke):
        for one in _settings(smoke, (2**17, 2**14, 2**20), items=kind):
            if kind == "vector" or (one.capacity <= 2**14 and one.batch_size <= 256):
                settings = [dataclasses.replace(one, seeds=count) for count in ((1, 2) if smoke else (1, 16, 64))]
                yield _group("c", settings, SEEDS, lambda name, x: name == "cpprb" and x.seeds > 16)


def eager_groups(smoke: bool) -> Iterator[Group]:
    for num_added in [16] if smoke else [16, 1]:
        for setting in _settings(smoke, (2**17, 2**20), num_added=num_added):
            yield _group("d", setting, EAGER)


def uniform_groups(smoke: bool) -> Iterator[Group]:
    for kind in _kinds(smoke):
        for setting in _settings(smoke, items=kind):
            if kind == "vector" or setting.capacity <= 2**17:
                yield _group("f", setting, UNIFORM)


def sequence_groups(smoke: bool) -> Iterator[Group]:
    frames = [] if smoke else [Setting(capacity=2**10, batch_size=32, items="frames")]
    for setting in _settings(smoke, (2**14, 2**17)) + frames:
        yield _group("g", setting, SEQUENCES)


def pool_groups(smoke: bool) -> Iterator[Group]:
    programs = {BASE: pools.jaxreplay_pools, "Python": pools.python_pools}
    for one in _settings(smoke, (2**14, 2**10, 2**17, 2**20)):
        settings = [dataclasses.replace(one, seeds=count) for count in ((1, 2) if smoke else (1, 16))]
        slow = one.capacity * one.batch_size > 2**27  # a step takes more than a second
        yield _group("h", settings, programs, lambda name, x, slow=slow: name == "Python" and (slow or x.seeds > 1))


def task_groups(smoke: bool) -> Iterator[Group]:
    for setting in _settings(smoke, (2**14, 2**10, 2**17, 2**20)):
        slow = setting.capacity * setting.batch_size > 2**22  # a step takes more than a second
        yield _group("k", setting, TASKS, lambda name, _, slow=slow: name == "jaxued" and slow)


def many_groups(part: str, smoke: bool) -> Iterator[Group]:
    """Thousands of environments; each size that differs from the key's is a rank less telling."""
    capacities, drawn, added = (2**20, 2**22, 10 * 2**20), (2**15, 2**13, 2**16), (4_096, 1_024, 16)
    sizes = [(2**11, 64, 32)] if smoke else itertools.product(capacities, drawn, added)
    for capacity, batch_size, num_added in sizes:
        setting = Setting(capacity=capacity, batch_size=batch_size, num_added=num_added)
        yield _group(part, setting, MANY if part == "m" else MANY_UNIFORM)


PARTS = {
    "a": ("Tree only: sample and update", tree_groups),
    "b": ("Replay step in a scan: add, sample with weights, gather, update", step_groups),
    "c": ("The same, vmapped over seeds", vmap_groups),
    "d": ("Eager calls from Python", eager_groups),
    "f": ("Uniform replay step in a scan", uniform_groups),
    "g": ("Sequences of 80 steps, one every 40", sequence_groups),
    "h": ("Difficulty pools in a scan: draw and update", pool_groups),
    "k": ("Tasks by a score: draw and update", task_groups),
    "m": ("Many environments: a prioritized step in a scan", functools.partial(many_groups, "m")),
    "n": ("Many environments: a uniform step in a scan", functools.partial(many_groups, "n")),
}


def groups(parts: list[str], libraries: set[str], smoke: bool) -> list[Group]:
    """Groups of the parts in the order to run them, without the peers that are not in `libraries`."""
    found = []
    for part in parts:
        for group in PARTS[part][1](smoke):
            makers = {k: make for k, make in group.makers.items() if peer(k[1]) in (None, *libraries)}
            found.append(dataclasses.replace(group, makers=makers))
    order = "bacghkdfmn"
    return sorted(found, key=lambda g: (g.rank, order.find(g.part)))
