"""Checkpoints: `save` writes a state and its configuration, and `restore` reads the state back bit for bit.

A checkpoint consists of arrays and one description. The structure of the state comes from `like`, so a checkpoint names
no class, and nothing in it is trusted.
"""

import contextlib
import functools
import json
import os
import threading
import warnings
import zlib
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from jaxreplay._common import checks, devices, files, xla
from jaxreplay._common.version import __version__
from jaxreplay.checkpoint import _arrays, _config, _files, _leaves, _migration, _places, _processes
from jaxreplay.checkpoint._writing import Writing

FORMAT = 1  # increment if older versions cannot read the new description
Path = str | os.PathLike


@xla.reads_state
def save(
    path: Path, config: Any, state: Any, *, step: int | None = None, wait: bool = True, keep: int = 1
) -> Callable[[], None]:
    """Write a checkpoint of `state`. Once it is on the disk, all but the `keep` newest are deleted.

    Whenever a save is cut off, by a signal, an error, a full disk or a power failure, an earlier checkpoint or the new
    one remains. A save that has begun is completed even if the program ends by an error. Threads and programs may save
    to the same path. With several processes of `jax.distributed`, all of them must call this function and the returned
    one, with the same path on a shared file system. Each writes its part, and the returned function completes the
    checkpoint.

    Args:
      path: a folder for checkpoints; it need not exist.
      config: the configuration, such as a `ReplayBuffer`, `NStep` or `DifficultyPools`, or a dict, list or tuple of
        configurations and plain values. `restore` requires the same configuration. A callable in it, such as a
        schedule, is identified by its name only.
      state: the state of the configuration, or any pytree, such as {"replay": replay, "params": params, "key": key},
        whose leaves are arrays, typed PRNG keys and Python numbers. Plain static fields are recorded.
      step: a number by which `restore` finds this checkpoint, at least 0.
      wait: return when the checkpoint is on the disk. If False, return once `state` is copied (it may then be donated)
        and write in the background.
      keep: how many checkpoints remain, the newest ones; at least 1.

    Returns:
      a function that waits until the checkpoint is on the disk and raises any error of the write.

    Raises:
      ValueError: values are traced; a part of `config` or `state` cannot be recorded (the message names it); or
        `config` is a buffer, and `state` is of another.
      OSError: the checkpoint cannot be written, and the earlier ones remain. Or an earlier `save(wait=False)` has
        failed, and nobody has called what it returned: nothing is written then, and the next call does.

    Examples:
      >>> run = {"replay": state, "steps": 7}
      >>> finish = jr.save("run/checkpoint", {"replay": buffer}, run, wait=False)
      >>> finish()  # now it is on the disk
    """
    folder = _files.absolute(path)
    keep = checks.check_integer("keep", keep, 1, 2**31 - 1, "a number of checkpoints")
    step = None if step is None else checks.check_integer("step", step, 0, 2**63 - 1, "a number of steps")
    _places.check_state(config, state)
    for thread in threading.enumerate():
        if isinstance(thread, Writing):
            thread.raise_unreported()
    leaves, records, packed = _leaves.named(state), [], {}
    for leaf_path in leaves:
        record = _leaves.record(leaf_path, leaves[leaf_path])
        if "number" not in record:
            x = packed[str(len(records))] = _leaves.pack(leaves[leaf_path], copies=not wait)
            record["chunk"] = x.chunks.chunk
        records.append(record)
    content = {
        "format": FORMAT,
        "library": __version__,
        "step": step,
        "config": {where: value for where, value, _ in _config.fields(config)},
        "shards": _places.shards(config),
        "static": _leaves.static(state),
        "leaves": records,
        "files": {},
    }
    _check_same(content, packed)
    writing = Writing(folder, {name: x for name, x in packed.items() if 0 not in x.chunks.shape}, content, keep, wait)
    del state, leaves, packed  # releases donated arrays early
    writing.begin()
    if wait:
        writing.finish()
    return writing.finish


def restore(path: Path, config: Any, like: Any, *, step: int | None = None) -> Any:
    """Read the state in the newest complete checkpoint at `path`, equal to the saved one bit for bit.

    A damaged or half-copied checkpoint is named in a warning, and the one before it is restored.

    `Sharded` buffers may have been saved with another number of devices, or without `Sharded`. Their states are then
    those that `migrate` makes of the saved ones.

    An array gets the sharding of its leaf in `like`; else the sharding of the `Sharded` to which it belongs; else it is
    on the default device. NumPy arrays are restored as JAX arrays, Python numbers as Python numbers.

    Args:
      path: the path passed to `save`.
      config: the configuration passed to `save`; `donate`, and the devices and axes of a mesh, may differ.
      like: a pytree of the structure, shapes and dtypes of the saved state, such as the state of a run that begins, or
        `jax.eval_shape` of what makes it. Its values are not read, so donated arrays will do. Static fields come from
        it; the plain ones must be as saved.
      step: restore the newest checkpoint that was saved with this `step`; None for the newest of all.

    Raises:
      FileNotFoundError: there is no complete checkpoint, or none of this `step`.
      ValueError: `config` differs from the saved one (the message names the field); `like` differs in a path, shape,
        dtype or static field (the message names it); all checkpoints are damaged; or a newer version of this library
        wrote them.

    Examples:
      >>> _ = jr.save("run/checkpoint", buffer, state)
      >>> state = jr.restore("run/checkpoint", buffer, like=buffer.init(items))
      >>> buffer.get(state, buffer.newest(state, 3)).tolist()
      [10, 20, 30]
    """

    return newest(path, functools.partial(_rebuilt, config=config, like=like), step)


def newest(path: Path, use: Callable[[str, dict[str, Any]], Any], step: int | None = None) -> Any:
    """Apply `use` to the folder and description of the newest checkpoint that is not damaged.

    Raises a `FileNotFoundError` if there is no checkpoint, and a `ValueError` if all are damaged.
    """
    folder, damaged, tried = _files.absolute(path), {}, set()
    while (number := _processes.on_first(lambda: _next(folder, step, tried))) >= 0:
        tried.add(number)
        one, found, error = _files.folder_of(folder, number), None, None
        try:
            found = use(one, _described(one))
        except Exception as raised:
            error = raised
        if _processes.gather([error is not None]).any() and error is None:
            error = _files.Damaged(f"{one}: another process could not read its part; its error says why.")
        if error is None:
            for message in damaged.values():
                warnings.warn(f"{message} Restored {one!r}.", stacklevel=3)
            return found
        if not isinstance(error, _files.Damaged):
            raise error
        if os.path.lexists(one):  # else another program has meanwhile replaced it
            damaged[number] = str(error)  # the error itself holds arrays
    if damaged:
        raise _files.Damaged(next(iter(damaged.values())))
    what = "" if step is None else f" of step {step}"
    raise FileNotFoundError(f"{os.fspath(path)}: no complete checkpoint{what} there; save one, or check the path.")


def _next(folder: str, step: int | None, tried: set[int]) -> int:
    """Number of the newest checkpoint of a step that was not tried; -1 if there is none."""
    for number in _files.numbers(folder):
        if number not in tried:
            with contextlib.suppress(_files.Damaged):  # its step is unknown
                if step is None or _described(_files.folder_of(folder, number))["step"] == step:
                    return number
    return -1


def _described(folder: str) -> dict[str, Any]:
    """The description of a checkpoint; a `ValueError` if it has another format."""
    content = _files.description(folder)
    if (found := content.get("format")) != FORMAT:
        rule = f"this version of jaxreplay reads format {FORMAT}; use the version that wrote it"
        raise ValueError(f"{folder}: has format {str(found)[:20]!r}; {rule}.")
    with _files.reported(folder, files.OF_STRANGERS):
        _check(**content)
    return content


def _check(*, library: str, step: Any, config: dict, shards: dict, static: dict, leaves: list, files: dict, **_: Any):
    """Raise an error if a description is not of the form that `save` writes; what a later version has added may be."""
    counts = [1 if step is None else step + 1, *shards.values()]
    is_ours = (
        (type(library), type(leaves)) == (str, list)
        and all(map(_leaves.is_record, leaves))
        and all(type(x) is int and x > 0 for x in counts)
        and all(type(x) is list and [*map(type, x)] == [int, int] for x in files.values())
    )
    texts = [*config.keys(), *static.keys(), *(x["path"] + x["dtype"] for x in leaves)]
    if not (is_ours and all(map(str.isprintable, texts))):  # they are printed; a terminal obeys others
        raise ValueError("its description has another form")


def _rebuilt(folder: str, content: dict[str, Any], config: Any, like: Any) -> Any:
    """The saved state, rebuilt."""
    if different := _config.differences(content["config"], config):
        more = f" (and {len(different) - 5} more)" if len(different) > 5 else ""
        found = f"{folder}: saved with another configuration: {'; '.join(different[:5])}{more}"
        raise ValueError(f"{found}. Restore with the saved one, then convert by jr.migrate, remap or recycle.")
    owners = _places.owners(config, like, content["shards"])

    def as_saved(path: Any, node: Any) -> Any:
        """A state with its old number of shards, in the layout of the backend that saved it."""
        if not _places.is_state(node):
            return node
        name = jax.tree_util.keystr(path)
        owner, saved = owners.get(name), _leaves.part_of(content, name)
        spec = node if owner is None or owner.is_same else _places.spec_of_old(owner, node)
        for backend in (None, *dict.fromkeys(devices.BACKENDS.values())):
            laid = jax.eval_shape(lambda x, to=backend: x.on_this_backend(to), spec) if backend else spec
            if not _leaves.differ(saved, laid):
                return laid
        return spec

    spec = jax.tree_util.tree_map_with_path(as_saved, like, is_leaf=_places.is_state)
    if different := _leaves.differ(content, spec):
        raise ValueError(f"{folder}: {different}. Build like as for the saved state.")
    stored = jax.tree.unflatten(jax.tree.structure(spec), _stored(folder, content, _leaves.named(spec)))
    by_path = _leaves.named(like)

    def rebuilt(path: Any, _: Any, node: Any) -> Any:
        owner = owners.get(jax.tree_util.keystr(path))
        if owner is not None and not owner.is_same:
            return _migration.moved(owner, node)

        def load(x: Any) -> Any:
            if not isinstance(x, _leaves.Stored):  # a Python number
                return x
            leaf = by_path.get(x.found["path"])  # None in a state of another layout
            sharding = getattr(leaf, "sharding", None) if getattr(leaf, "committed", True) else None
            if isinstance(getattr(sharding, "mesh", None), jax.sharding.AbstractMesh):
                sharding = None  # of a trace, which knows no devices
            if sharding is None and owner is not None:
                sharding = owner.new.sharding
            if sharding is None and jax.process_count() > 1:
                raise ValueError(f"like{x.found['path']}: has no sharding, which several processes need.")
            return x.load(sharding)

        loaded = jax.tree.map(load, node)
        return loaded.on_this_backend() if _places.is_state(node) else loaded

    return jax.tree_util.tree_map_with_path(rebuilt, like, stored, is_leaf=_places.is_state)


def _stored(folder: str, content: dict[str, Any], leaves: dict[str, Any]) -> list[Any]:
    """The Python numbers of a checkpoint, and its arrays for leaves like these, which are read later."""

    def one(name: str, record: dict[str, Any], like: Any) -> Any:
        if "number" in record:
            return _leaves.NUMBERS[record["dtype"]](record["number"])
        spec = jax.eval_shape(_leaves.stored, jax.ShapeDtypeStruct(like.shape, like.dtype))
        chunks = _arrays.Chunks(spec.shape, np.dtype(spec.dtype), tuple(record["chunk"]))
        read = functools.partial(_arrays.load, folder, name, chunks, content["files"])
        return _leaves.Stored(record, tuple(like.shape), like.dtype, read)

    return [one(str(i), *both) for i, both in enumerate(zip(content["leaves"], leaves.values(), strict=True))]


def _check_same(content: dict[str, Any], packed: dict[str, Any]) -> None:
    """Raise a `ValueError` if processes save different things."""
    if jax.process_count() == 1:
        return
    if np.ptp(_processes.gather([zlib.crc32(json.dumps(content, sort_keys=True).encode())])):
        raise ValueError("config or state: the structure differs between processes; pass the same in all.")
    whole = {name: [xla.on_host(part) for _, part in x.parts] for name, x in packed.items() if x.is_whole}
    sums = [functools.reduce(lambda crc, x: zlib.crc32(x.tobytes(), crc), parts, 0) for parts in whole.values()]
    if (differ := np.ptp(_processes.gather(sums), axis=0)).any():
        leaf = content["leaves"][int([*whole][int(np.argmax(differ))])]
        raise ValueError(f"leaf {leaf['path']}: differs between processes; make it one global array.")
