"""Checkpoints: `save` writes a state and its configuration, and `restore` reads the state back bit for bit.

A checkpoint is either complete or absent: the previous one is deleted only after the new one is complete. Each array
that is read is verified against checksums of its bits. A damaged file raises an error and never yields a wrong state.
"""

import concurrent.futures
import functools
import os
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import jax
import numpy as np
from jax.sharding import NamedSharding

from jaxreplay._common.xla import reads_state
from jaxreplay.checkpoint import _description, _files, _leaves, _manifest, _processes, _structure
from jaxreplay.checkpoint._names import Allowed, check_allow

T = TypeVar("T")


@reads_state
def save(path: str | os.PathLike, buffer: Any, state: Any, *, wait: bool = True) -> Callable[[], None]:
    """Write a checkpoint of `state`; the previous one is deleted once this one is complete.

    If the process is killed during a save, the previous checkpoint or the new one remains. Threads and programs that
    save to the same path take turns. With several processes of `jax.distributed`, all of them must call this function
    and the returned one, with the same path on a shared file system, before any of them calls `restore`. A process
    that cannot write its part raises at once. The others raise when Orbax gives up waiting for it, minutes later. The
    previous checkpoint remains.

    Args:
      path: a folder used only for the checkpoint; it need not exist.
      buffer: the configuration, such as a `ReplayBuffer`, `NStep` or `DifficultyPools`, or a dict, list or tuple of
        configurations and plain values. `restore` requires the same configuration. A callable in it, such as a
        schedule, is identified by its name only.
      state: the state of the configuration, or any pytree of arrays, such as {"replay": replay, "params": params,
        "key": key}, which is saved as a whole. It may consist of dicts (also `OrderedDict` and Flax's `FrozenDict`),
        lists, tuples, None, NamedTuples (states of optax), dataclasses that are pytrees (`flax.struct`, `chex`,
        `jax.tree_util.register_dataclass`), arrays, typed PRNG keys and Python numbers. For other nodes, such as
        Flax's `TrainState`, which holds functions, only the arrays are saved, and `restore` needs `like` to build them.
      wait: return when the checkpoint is complete. If False, return once `state` is copied (it may then be donated) and
        write in the background. The next `save` waits for the end of the write. Call the returned function before
        `restore` and before the program ends.

    Returns:
      a function that waits until the checkpoint is complete and raises any error of the write.

    Raises:
      ValueError: values are traced, or a part of `buffer` or `state` cannot be recorded; the message names it.
      OSError: the folder cannot be created or written; the previous checkpoint remains.

    Examples:
      >>> buffer = jr.ReplayBuffer(capacity=4)
      >>> state = buffer.init(jnp.array([10, 20, 30]))
      >>> finish = jr.save(
      ...     "run/checkpoint", {"replay": buffer}, {"replay": state, "steps": 7}, wait=False
      ... )
      >>> finish()  # before restore, and before the program ends
    """
    folder = _files.absolute(path)
    described, meshes = _description.describe(buffer), dict(_description.meshes(buffer))
    structure, leaves = _structure.record(state)
    packed = [_leaves.pack(leaf, name, meshes) for name, leaf in leaves]
    del state, leaves  # releases donated arrays early
    records, stored = [record for record, _ in packed], [x for _, x in packed]
    content = _manifest.make(described, structure, records)
    _add_checksums(content, [_leaves.parts(x) for x in stored])
    if not wait:
        stored = [x.copy() if isinstance(x, np.ndarray) else x for x in stored]
    arrays = {str(i): x for i, x in enumerate(stored) if x.size > 0}
    written = _files.begin(folder, arrays, _manifest.seal(content))
    if not wait:
        with_one_thread = concurrent.futures.ThreadPoolExecutor(1)
        finish = with_one_thread.submit(written).result
        with_one_thread.shutdown(wait=False)
        return finish
    written()
    return lambda: None


def restore(path: str | os.PathLike, buffer: Any, *, like: Any = None, allow: Allowed = ()) -> Any:
    """The state in the newest complete checkpoint at `path`, equal to the saved one bit for bit.

    A checkpoint never causes an import. Classes come only from this package, from `like` and from `allow`.

    Arrays that were sharded over a mesh of the configuration, such as that of `Sharded`, are sharded again over the
    mesh in the same place of `buffer`. Each device then reads its own part. All other arrays are restored to the
    default device. NumPy arrays are restored as JAX arrays.

    Args:
      path: the path passed to `save`.
      buffer: the configuration passed to `save`; `donate` may differ.
      like: a pytree with templates for nodes that a checkpoint cannot rebuild by itself: NamedTuples and dataclasses of
        other packages (states of optax), nodes registered with `jax.tree_util`, and dataclasses with a function among
        their static fields (`TrainState`). For a saved {"replay": replay, "params": params, "opt": opt}, pass {"opt":
        optimizer.init(params)}, or its shapes from `jax.eval_shape`; the rest may be omitted or None. Static fields
        that are functions come from `like`, all arrays and Python numbers from the checkpoint.
      allow: modules and classes, such as (optax, Settings), or one of them. Their NamedTuples and dataclasses are
        rebuilt without `like`, with values from the checkpoint. A module includes all its submodules that are already
        imported.

    Raises:
      FileNotFoundError: there is no complete checkpoint.
      ValueError: `buffer` differs from the saved one (the message names the field); `like` lacks a node that is needed
        or differs in a class, shape, dtype or plain static value (the message names it); the checkpoint names a class
        that is neither in `like` nor allowed (the message says what to pass), or whose fields have changed; the
        checkpoint is damaged, states sizes other than those on disk, or was written by a newer version of this library.

    Examples:
      >>> buffer = jr.ReplayBuffer(capacity=4)
      >>> items = jnp.array([10, 20, 30])
      >>> _ = jr.save("run/checkpoint", buffer, buffer.add(buffer.init(items), items))
      >>> state = jr.restore("run/checkpoint", buffer)
      >>> buffer.get(state, buffer.newest(state, 3)).tolist()
      [10, 20, 30]
    """
    return _newest(path, functools.partial(_rebuilt, buffer=buffer, like=like, allow=check_allow(allow)))


def open_saved(path: str | os.PathLike) -> tuple[dict[str, Any], Callable[[int], np.ndarray]]:
    """The manifest content of a checkpoint, and a function that reads one of its arrays. Needs no configuration.

    Raises:
      FileNotFoundError: there is no complete checkpoint.
      ValueError: the checkpoint is damaged or has another format; from the returned function: the array is damaged.
    """
    folder, number, content = _newest(path, lambda *saved: saved)

    def read(i: int) -> np.ndarray:
        record = content["leaves"][i]
        return _leaves.numbers(record, _read(folder, number, i, record, None))

    return content, read


def _newest(path: str | os.PathLike, use: Callable[[str, int, dict[str, Any]], T]) -> T:
    """`use` applied to the folder, number and manifest content of the newest complete checkpoint."""
    folder = _files.absolute(path)
    number = _processes.on_first(lambda: _files.newest(folder))
    if number < 0:
        raise FileNotFoundError(f"{os.fspath(path)}: no complete checkpoint there; save one, or check the path.")
    try:
        return use(folder, number, _manifest.read(folder, number))
    except ValueError:
        if jax.process_count() > 1 or _files.newest(folder) == number:
            raise
    return _newest(path, use)  # another process has meanwhile replaced the checkpoint


def _rebuilt(folder: str, number: int, content: dict[str, Any], buffer: Any, like: Any, allow: Iterable[Any]) -> Any:
    """The saved state, rebuilt."""
    if different := list(_description.differences(content["buffer"], buffer)):
        listed = "; ".join(f"{x.where}: saved {x.saved}, given {x.given}" for x in different[:5])
        more = f" (and {len(different) - 5} more)" if len(different) > 5 else ""
        raise ValueError(
            f"{folder}: saved with another configuration: {listed}{more}. Restore with the saved "
            f"configuration{different[0].advice}."
        )
    records, meshes = content["leaves"], dict(_description.meshes(buffer))
    rebuild = _structure.plan(content["structure"], records, like, allow)
    shardings = [_leaves.sharding_in(meshes, record) for record in records]
    stored = [_read(folder, number, i, *x) for i, x in enumerate(zip(records, shardings, strict=True))]
    return rebuild([_leaves.unpack(*x) for x in zip(records, stored, shardings, strict=True)])


def _read(
    folder: str, number: int, i: int, record: dict[str, Any], sharding: NamedSharding | None
) -> jax.Array | np.ndarray:
    """The stored form of array `i`, on the host unless it has a sharding.

    Raises:
      ValueError: the array cannot be read or differs from the saved one.
    """
    shape, dtype = _leaves.stored_type(record)
    if 0 in shape:
        return np.zeros(shape, dtype)
    how = np.ndarray if sharding is None else jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)
    with _manifest.reported(folder):
        array = _files.load(folder, number, {_files.ARRAYS: {str(i): how}})[_files.ARRAYS][str(i)]
        _leaves.check_bits(record, array)
    return array


def _add_checksums(content: dict[str, Any], parts: Sequence[Sequence[_leaves.Part]]) -> None:
    """Add the parts of each array, and their checksums, to its record.

    Raises:
      ValueError: the processes save different states.
    """
    for record, own in zip(content["leaves"], parts, strict=True):
        record["parts"] = [[*map(list, part.box), 0] for part in own]
    digest = np.frombuffer(bytes.fromhex(_manifest.digest(content)), np.uint32)
    if _differ(_processes.gather(digest.tolist())):
        raise ValueError("buffer or state: the structure differs between processes; pass the same in all.")
    sums = iter(_processes.gather([_leaves.checksum(part.data) for own in parts for part in own]).T)
    for record, own in zip(content["leaves"], parts, strict=True):
        for entry, part, found in zip(record["parts"], own, sums, strict=False):
            if isinstance(part.data, np.ndarray) and _differ(found):  # replicated: each process has the whole array
                raise ValueError(
                    f"leaf {record['path']}: differs between processes; make it one global array, so that "
                    "each process's part is saved."
                )
            entry[2] = int(found[part.process])


def _differ(found: np.ndarray) -> bool:
    """True if any process differs from the first."""
    return bool(np.any(found != found[0]))
