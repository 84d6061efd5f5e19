"""Checkpoints: `save` writes a state and its configuration, and `restore` reads the state back bit for bit.

A checkpoint consists of arrays and one description. The structure of the state comes from `like`, so a checkpoint names
no class, and nothing in it is trusted.
"""

import functools
import importlib.metadata
import json
import os
import warnings
import zlib
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from jaxreplay._common import checks
from jaxreplay._common.xla import reads_state
from jaxreplay.checkpoint import _config, _files, _leaves, _migration, _places, _processes

FORMAT = 2  # increment if older versions cannot read the new description
BACKENDS = ("cpu", "gpu", "tpu")  # with layouts of their own
Path = str | os.PathLike


@reads_state
def save(
    path: Path, config: Any, state: Any, *, step: int | None = None, wait: bool = True, keep: int = 1
) -> Callable[[], None]:
    """Write a checkpoint of `state`. Once it is on the disk, all but the `keep` newest are deleted.

    Whenever a save is cut off, by a signal, an error, a full disk or a power failure, an earlier checkpoint or the new
    one remains. A save that has begun is completed even if the program ends by an error. Threads and programs may save
    to the same path. With several processes of `jax.distributed`, all of them must call this function and the returned
    one, with the same path on a shared file system. Each writes its part.

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
      ValueError: values are traced, or a part of `config` or `state` cannot be recorded; the message names it.
      OSError: the checkpoint cannot be written; the earlier ones remain.

    Examples:
      >>> buffer = jr.ReplayBuffer(capacity=4)
      >>> state = buffer.init(jnp.array([10, 20, 30]))
      >>> finish = jr.save(
      ...     "run/checkpoint", {"replay": buffer}, {"replay": state, "steps": 7}, wait=False
      ... )
      >>> finish()  # now it is on the disk
    """
    folder = _files.absolute(path)
    keep = checks.check_integer("keep", keep, 1, 2**31 - 1, "a number of checkpoints")
    step = None if step is None else checks.check_integer("step", step, 0, 2**63 - 1, "a number of steps")
    leaves = _leaves.named(state)
    records = [_leaves.record(*x) for x in leaves.items()]
    content = {
        "format": FORMAT,
        "library": _library_version(),
        "step": step,
        "config": _config.described(config),
        "shards": _places.shards(config),
        "static": _leaves.static(state),
        "leaves": records,
    }
    is_array = {path: "number" not in found for path, found in zip(leaves, records, strict=True)}
    packed = {path: _leaves.pack(x, copies=not wait) for path, x in leaves.items() if is_array[path]}
    _check_same(content, packed)
    arrays = {str(i): packed[path] for i, path in enumerate(leaves) if is_array[path] and packed[path].size > 0}
    del state, leaves, packed  # releases donated arrays early
    number = _processes.on_first(lambda: _files.begin(folder))
    writing = _files.Writing(folder, number, arrays, content, keep)
    del arrays
    writing.start()

    def finish() -> None:
        writing.done.wait()
        _processes.on_first(writing.outcome)
        writing.outcome()

    if wait:
        finish()
    else:
        writing.copied.wait()
    return finish


def restore(path: Path, config: Any, like: Any, *, step: int | None = None) -> Any:
    """The state in the newest complete checkpoint at `path`, equal to the saved one bit for bit.

    A damaged or half-copied checkpoint is named in a warning, and the one before it is restored.

    `Sharded` buffers may have been saved with another number of devices, or without `Sharded`. Their states are then
    those that `migrate` makes of the saved ones.

    An array gets the sharding of its leaf in `like`; else that of the `Sharded` to which it belongs; else it is on the
    default device. NumPy arrays are restored as JAX arrays, Python numbers as Python numbers.

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
      >>> buffer = jr.ReplayBuffer(capacity=4)
      >>> items = jnp.array([10, 20, 30])
      >>> state = buffer.add(buffer.init(items), items)
      >>> _ = jr.save("run/checkpoint", buffer, state)
      >>> state = jr.restore("run/checkpoint", buffer, like=buffer.init(items))
      >>> buffer.get(state, buffer.newest(state, 3)).tolist()
      [10, 20, 30]
    """

    def rebuild(folder: str, content: dict[str, Any]) -> Any:
        return _rebuilt(folder, content, config, like)

    return newest(path, rebuild, step)


def newest(path: Path, use: Callable[[str, dict[str, Any]], Any], step: int | None = None) -> Any:
    """`use` applied to the folder and description of the newest checkpoint that is not damaged.

    Raises:
      FileNotFoundError: there is none.
      ValueError: all are damaged.
    """
    folder, damaged = _files.absolute(path), {}
    while True:
        number = _processes.on_first(lambda: _next(folder, step, damaged))
        if number < 0:
            break
        one = _files.folder_of(folder, number)
        try:
            found = use(one, _described(one))
        except _files.Damaged as error:
            if os.path.exists(one):  # else another program has meanwhile replaced it
                damaged[number] = error
            continue
        for error in damaged.values():
            warnings.warn(f"{error} Restored {one!r}.", stacklevel=3)
        return found
    if damaged:
        raise next(iter(damaged.values()))
    what = "" if step is None else f" of step {step}"
    raise FileNotFoundError(f"{os.fspath(path)}: no complete checkpoint{what} there; save one, or check the path.")


def _next(folder: str, step: int | None, damaged: dict[int, _files.Damaged]) -> int:
    """Number of the newest checkpoint of a step that is not known to be damaged, -1 if there is none."""
    for number in _files.numbers(folder):
        if number in damaged:
            continue
        try:
            if step is None or _described(_files.folder_of(folder, number))["step"] == step:
                return number
        except _files.Damaged:  # its step is unknown
            continue
    return -1


def _described(folder: str) -> dict[str, Any]:
    """The description of a checkpoint; a `ValueError` if it has another format."""
    content = _files.read(folder)
    with _files.reported(folder):
        is_known = content["format"] == FORMAT
        if is_known:
            _check(content)
    if not is_known:
        raise ValueError(
            f"{folder}: has format {str(content['format'])[:20]!r}; this version of jaxreplay reads format {FORMAT}; "
            "use the version that wrote it."
        )
    return content


def _check(content: dict[str, Any]) -> None:
    """Raise a `ValueError` if a description is not of the form that `save` writes."""
    match content:
        case {"config": {}, "shards": {**shards}, "static": {}, "leaves": [*leaves], "files": {}, "library": str()}:
            counts = [*shards.values(), 1 if content["step"] is None else content["step"] + 1]
            texts = [*content["config"], *content["static"], *(leaf["path"] + leaf["dtype"] for leaf in leaves)]
            are_sizes = all(type(x) is int and x > 0 for x in counts)
            if are_sizes and all(map(_leaves.is_record, leaves)) and all(map(str.isprintable, texts)):
                return  # all texts are printed; a terminal obeys those that are not printable
    raise ValueError("its description has another form")


def _rebuilt(folder: str, content: dict[str, Any], config: Any, like: Any) -> Any:
    """The saved state, rebuilt."""
    if different := _config.differences(content["config"], config):
        more = f" (and {len(different) - 5} more)" if len(different) > 5 else ""
        raise ValueError(
            f"{folder}: saved with another configuration: {'; '.join(different[:5])}{more}. Restore with the saved "
            "one, then convert the state: jr.migrate(old_buffer, state, new_buffer), remap or recycle."
        )
    owners = _places.owners(config, like, content["shards"])

    def as_saved(owner: _places.Owner | None, node: Any) -> Any:
        return node if owner is None or owner.is_same else _places.spec_of_old(owner, node)

    laid, backend = _laid_out(folder, content, _places.map_states(as_saved, owners, like))
    stored = jax.tree.unflatten(jax.tree.structure(laid), _stored(folder, content, _leaves.named(laid)))
    by_path = _leaves.named(like)

    def rebuilt(owner: _places.Owner | None, _: Any, node: Any) -> Any:
        if owner is not None and not owner.is_same:
            return _migration.moved(owner, node, backend)

        def load(x: _leaves.Stored) -> Any:
            leaf = by_path.get(x.found["path"])  # None in a state of another layout
            sharding = getattr(leaf, "sharding", None) if getattr(leaf, "committed", True) else None
            if sharding is None and owner is not None:
                sharding = owner.sharding
            if sharding is None and jax.process_count() > 1 and "number" not in x.found:
                raise ValueError(f"like{x.found['path']}: has no sharding, which several processes need.")
            return x.load(sharding)

        loaded = jax.tree.map(load, node)
        return loaded.on_this_backend() if _places.is_state(node) else loaded

    return _places.map_states(rebuilt, owners, like, stored)


def _stored(folder: str, content: dict[str, Any], leaves: dict[str, Any]) -> list[_leaves.Stored]:
    """The arrays of a checkpoint, for leaves like these; its files are checked."""
    found = dict(enumerate(zip(content["leaves"], leaves.values(), strict=True)))
    types = {str(i): _leaves.stored_type(x) for i, (record, x) in found.items() if "number" not in record}
    with _files.reported(folder):
        _files.check(folder, content["files"], {name: x for name, x in types.items() if 0 not in x[0]})

    def read(name: str, sharding: Any) -> Any:
        return _files.load(folder, name, *types[name], sharding)

    return [_leaves.Stored(record, x, functools.partial(read, str(i))) for i, (record, x) in found.items()]


def _laid_out(folder: str, content: dict[str, Any], spec: Any) -> tuple[Any, str | None]:
    """`spec` in the layout of the saved state, and the backend of that layout; None if it is as given.

    Raises:
      ValueError: the saved state differs from it.
    """
    for backend in (None, *BACKENDS):
        laid = _places.map_states(functools.partial(_on_backend, backend), {}, spec) if backend else spec
        if not _leaves.differ(content["leaves"], _leaves.named(laid)):
            break
    else:
        different = _leaves.differ(content["leaves"], _leaves.named(spec))
        raise ValueError(f"{folder}: {different}. Build like as for the saved state.")
    if different := _leaves.static_differ(content["static"], _leaves.static(laid)):
        raise ValueError(f"{folder}: {different}. Build like as for the saved state.")
    return laid, backend


def _on_backend(backend: str, _: Any, node: Any) -> Any:
    return jax.eval_shape(lambda x: x.on_this_backend(backend), node) if _places.is_state(node) else node


def _check_same(content: dict[str, Any], packed: dict[str, Any]) -> None:
    """Raise a `ValueError` if processes save different things."""
    if jax.process_count() == 1:
        return
    local = {path: x for path, x in packed.items() if isinstance(x, np.ndarray)}  # each process has the whole array
    sums = [zlib.crc32(json.dumps(content, sort_keys=True).encode())]
    if np.ptp(_processes.gather(sums)):
        raise ValueError("config or state: the structure differs between processes; pass the same in all.")
    sums = [zlib.crc32(np.ascontiguousarray(x).view(np.uint8).data) for x in local.values()]
    if (differ := np.ptp(_processes.gather(sums), axis=0)).any():
        raise ValueError(
            f"leaf {[*local][int(np.argmax(differ))]}: differs between processes; make it one global array, so that "
            "each process's part is saved."
        )


def _library_version() -> str:
    try:
        return importlib.metadata.version("jaxreplay")
    except importlib.metadata.PackageNotFoundError:
        return "unknown"
