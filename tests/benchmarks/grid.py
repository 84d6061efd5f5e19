"""The groups of programs that are measured in turn, the most telling first."""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator

import host_buffers
import jax_buffers
import pools
import tasks
import trees
from jax_buffers import eager_program, scan_program
from settings import SEQUENCE_LENGTH, Setting

import jaxreplay as jr

PACKAGES = {"flashbax": "flashbax", "cpprb": "cpprb", "torchrl": "torchrl", "dopamine": "dopamine-rl", "brax": "brax"}
PACKAGES |= {"rejax": "rejax", "jaxnasium": "jaxnasium", "memorax": "memorax", "jaxued": "jaxued"}
HOST_LIBRARIES = {"cpprb", "torchrl", "dopamine"}
BASE = "jaxreplay"
FANOUTS = (2, 4, 8, 16, 32, 64, 128)


@dataclasses.dataclass(frozen=True)
class Group:
    """Programs measured in turn.

    Attributes:
      part: letter of the part.
      rank: 0 for the most telling.
      makers: functions that make a program, by (setting, library).
      storage: estimated bytes of each program's buffer, by the same keys.
    """

    part: str
    rank: int
    makers: dict[tuple[Setting, str], Callable]
    storage: dict[tuple[Setting, str], int]

    @property
    def name(self) -> str:
        setting = next(iter(self.makers))[0]
        return f"{self.part} N={setting.capacity} B={setting.batch_size} E={setting.num_added} {setting.items}"


def peer(library: str) -> str | None:
    """The package that a library's name starts with; None for jaxreplay and the naive baseline."""
    word = library.split()[0]
    return word if word in PACKAGES else None


def _group(part: str, rank: int, by_setting: dict[Setting, dict[str, Callable]]) -> Group:
    makers = {(setting, name): make for setting, by_name in by_setting.items() for name, make in by_name.items()}
    return Group(part, rank, makers, {key: _storage(part, *key) for key in makers})


def _storage(part: str, setting: Setting, library: str) -> int:
    item = {"a": 0, "h": 0, "k": 0, "fanout": 0, "g": SEQUENCE_LENGTH * setting.item_bytes}.get(
        part, setting.item_bytes
    )
    if library == "brax" and setting.items == "frames":
        item *= 4  # it keeps everything in the items' common dtype, float32
    return setting.seeds * setting.capacity * (item + 12)


def _rank(setting: Setting, key: Setting) -> int:
    """How many of the sizes differ from the key setting's."""
    return sum(a != b for a, b in zip(dataclasses.astuple(setting), dataclasses.astuple(key), strict=True))


def tree_groups(smoke: bool) -> Iterator[Group]:
    key = Setting(capacity=2**20, batch_size=256)
    for capacity, batch_size in _sizes(smoke, (2**20, 2**14, 2**22, 2**17, 2**24)):
        setting = Setting(capacity=capacity, batch_size=batch_size)
        makers = {
            BASE: functools.partial(trees.tree_program, setting),
            "flashbax": functools.partial(trees.flashbax_tree, setting),
            "naive": functools.partial(trees.naive_table, setting),
            "torchrl": functools.partial(trees.torchrl_tree, setting),
            "dopamine": functools.partial(trees.dopamine_tree, setting),
        }
        if capacity > 2**20:
            del makers["naive"]
        # Targets are stated for B=256 at all sizes, so these come first.
        yield _group("a", 0 if batch_size == 256 and capacity <= 2**22 else _rank(setting, key), {setting: makers})


def step_groups(smoke: bool) -> Iterator[Group]:
    key = Setting(capacity=2**20, batch_size=256)
    added = [16] if smoke else [16, 1, 128]
    items = ["vector"] if smoke else ["vector", "frames"]
    for kind, num_added, (capacity, batch_size) in itertools.product(items, added, list(_sizes(smoke))):
        if kind == "frames" and capacity > 2**20:
            continue
        setting = Setting(capacity=capacity, batch_size=batch_size, num_added=num_added, items=kind)
        makers = {
            BASE: functools.partial(scan_program, jax_buffers.jaxreplay, setting),
            "flashbax": functools.partial(scan_program, jax_buffers.flashbax_item, setting),
            "cpprb": functools.partial(host_buffers.cpprb_program, setting),
            "torchrl": functools.partial(host_buffers.torchrl_program, setting),
            "flashbax ordered": functools.partial(scan_program, jax_buffers.flashbax_item, setting, ordered=True),
            "flashbax flat": functools.partial(scan_program, jax_buffers.flashbax_flat, setting),
            "naive": functools.partial(scan_program, jax_buffers.naive, setting),
            "dopamine": functools.partial(host_buffers.dopamine_program, setting),
        }
        if capacity > 2**20:
            del makers["naive"]
        if num_added != 16 or batch_size != 256:
            del makers["flashbax flat"]
        # dopamine adds item by item in Python: filling a larger one takes minutes.
        if capacity > 2**17 or kind == "frames" or num_added != 16:
            del makers["dopamine"]
        rank = _rank(setting, key)
        if kind == "frames" and (capacity, batch_size, num_added) in ((2**14, 256, 16), (2**17, 256, 16)):
            rank = 0
        yield _group("b", rank, {setting: makers})


def vmap_groups(smoke: bool) -> Iterator[Group]:
    seeds = (1, 2) if smoke else (1, 16, 64)
    key = Setting(capacity=2**17, batch_size=256)
    kinds = ["vector"] if smoke else ["vector", "frames"]
    for kind, (capacity, batch_size) in itertools.product(kinds, list(_sizes(smoke, (2**17, 2**14, 2**20)))):
        if kind == "frames" and (capacity > 2**14 or batch_size > 256):
            continue
        one = Setting(capacity=capacity, batch_size=batch_size, items=kind)
        by_setting = {}
        for count in seeds:
            setting = dataclasses.replace(one, seeds=count)
            by_setting[setting] = {
                BASE: functools.partial(scan_program, jax_buffers.jaxreplay, setting),
                "flashbax": functools.partial(scan_program, jax_buffers.flashbax_item, setting),
                "flashbax ordered": functools.partial(scan_program, jax_buffers.flashbax_item, setting, ordered=True),
            }
            if count <= 16:
                by_setting[setting]["cpprb"] = functools.partial(host_buffers.cpprb_program, setting)
        yield _group("c", _rank(one, key), by_setting)


def eager_groups(smoke: bool) -> Iterator[Group]:
    key = Setting(capacity=2**17, batch_size=256)
    added = [16] if smoke else [16, 1]
    for num_added, (capacity, batch_size) in itertools.product(added, list(_sizes(smoke, (2**17, 2**20)))):
        setting = Setting(capacity=capacity, batch_size=batch_size, num_added=num_added)
        makers = {
            BASE: functools.partial(eager_program, jax_buffers.jaxreplay, setting, jitted=False),
            "flashbax": functools.partial(eager_program, jax_buffers.flashbax_item, setting, jitted=True),
            "cpprb": functools.partial(host_buffers.cpprb_program, setting),
            "torchrl": functools.partial(host_buffers.torchrl_program, setting),
            "dopamine": functools.partial(host_buffers.dopamine_program, setting),
        }
        if capacity > 2**17:
            del makers["dopamine"]
        yield _group("d", _rank(setting, key), {setting: makers})


def uniform_groups(smoke: bool) -> Iterator[Group]:
    key = Setting(capacity=2**20, batch_size=256)
    kinds = ["vector"] if smoke else ["vector", "frames"]
    for kind, (capacity, batch_size) in itertools.product(kinds, list(_sizes(smoke))):
        if kind == "frames" and capacity > 2**17:
            continue
        setting = Setting(capacity=capacity, batch_size=batch_size, items=kind)
        ours = functools.partial(jax_buffers.jaxreplay, sampler=jr.Uniform())
        makers = {
            BASE: functools.partial(scan_program, ours, setting),
            "flashbax": functools.partial(
                scan_program, functools.partial(jax_buffers.flashbax_item, uniform=True), setting
            ),
            "brax": functools.partial(scan_program, jax_buffers.brax_uniform, setting),
            "cpprb": functools.partial(host_buffers.cpprb_program, setting, prioritized=False),
            "torchrl": functools.partial(host_buffers.torchrl_program, setting, prioritized=False),
        }
        yield _group("f", _rank(setting, key), {setting: makers})


def sequence_groups(smoke: bool) -> Iterator[Group]:
    key = Setting(capacity=2**14, batch_size=256)
    settings = [Setting(capacity=n, batch_size=b) for n, b in _sizes(smoke, (2**14, 2**17))]
    if not smoke:
        settings += [Setting(capacity=2**10, batch_size=32, items="frames")]
    for setting in settings:
        makers = {
            BASE: functools.partial(scan_program, jax_buffers.jaxreplay_sequences, setting),
            "flashbax": functools.partial(scan_program, jax_buffers.flashbax_trajectory, setting),
        }
        yield _group("g", _rank(setting, key), {setting: makers})


def pool_groups(smoke: bool) -> Iterator[Group]:
    key = Setting(capacity=2**14, batch_size=256)
    for capacity, batch_size in _sizes(smoke, (2**14, 2**10, 2**17, 2**20)):
        one, by_setting = Setting(capacity=capacity, batch_size=batch_size), {}
        for count in (1, 2) if smoke else (1, 16):
            setting = dataclasses.replace(one, seeds=count)
            by_setting[setting] = {BASE: functools.partial(pools.jaxreplay_pools, setting)}
            if count == 1 and capacity * batch_size <= 2**27:  # where a step takes less than a second
                by_setting[setting]["Python"] = functools.partial(pools.python_pools, setting)
        yield _group("h", _rank(one, key), by_setting)


def task_groups(smoke: bool) -> Iterator[Group]:
    key = Setting(capacity=2**14, batch_size=256)
    for capacity, batch_size in _sizes(smoke, (2**14, 2**10, 2**17, 2**20)):
        setting = Setting(capacity=capacity, batch_size=batch_size)
        makers = {
            BASE: functools.partial(tasks.jaxreplay_tasks, setting),
            "jaxreplay Levels": functools.partial(tasks.jaxreplay_levels, setting),
            "jaxued": functools.partial(tasks.jaxued_levels, setting),
            "NumPy": functools.partial(tasks.numpy_tasks, setting),
        }
        if capacity * batch_size > 2**22:  # where a step takes more than a second
            del makers["jaxued"]
        yield _group("k", _rank(setting, key), {setting: makers})


def fanout_groups(smoke: bool) -> Iterator[Group]:
    key = Setting(capacity=2**20, batch_size=256)
    for capacity, batch_size in _sizes(smoke):
        setting = Setting(capacity=capacity, batch_size=batch_size)
        makers = {f"fan-out {k}": functools.partial(trees.tree_program, setting, fanout=k) for k in FANOUTS}
        yield _group("fanout", _rank(setting, key), {setting: makers})


def _sizes(smoke: bool, capacities: tuple[int, ...] = (2**20, 2**17, 2**14, 2**22)) -> Iterator[tuple[int, int]]:
    return itertools.product([2**10] if smoke else capacities, [32] if smoke else [256, 32, 1024])


PARTS = {
    "a": ("Tree only: sample and update", tree_groups),
    "b": ("Replay step in a scan: add, sample with weights, gather, update", step_groups),
    "c": ("The same, vmapped over seeds", vmap_groups),
    "d": ("Eager calls from Python", eager_groups),
    "f": ("Uniform replay step in a scan", uniform_groups),
    "g": ("Sequences of 80 steps, one every 40", sequence_groups),
    "h": ("Difficulty pools in a scan: draw and update", pool_groups),
    "k": ("Tasks by a score: draw and update", task_groups),
    "fanout": ("Tree only, by fan-out", fanout_groups),
}


def groups(parts: list[str], libraries: set[str], smoke: bool) -> list[Group]:
    """Groups of the parts in the order to run them, without the peers that are not in `libraries`."""
    found = []
    for part in parts:
        for group in PARTS[part][1](smoke):
            makers = {k: make for k, make in group.makers.items() if peer(k[1]) in (None, *libraries)}
            found.append(dataclasses.replace(group, makers=makers))
    order = "bacghkdf"
    return sorted(found, key=lambda g: (g.part == "fanout", g.rank, order.find(g.part)))
