"""Checkpoints: `save` writes a state and its configuration, and `restore` reads the state back bit for bit.

A checkpoint is either complete or absent: the previous one is deleted only after the new one is complete. When an array
is read, it is compared with checksums of its bits. So a damaged file raises an error and never yields a wrong state.
"""

import hashlib
import importlib.metadata
import json
import os
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxreplay._common.xla import reads_state
from jaxreplay.checkpoint import _description, _stored, _structure

FORMAT = 3  # of the manifest; raise it when older versions cannot read the new manifest
FOLDER = "checkpoint"  # name of a checkpoint's folder, without its number
MANIFEST, ARRAYS = "manifest", "arrays"


@reads_state
def save(path: str | os.PathLike, buffer: Any, state: Any, *, wait: bool = True) -> Callable[[], None]:
    """Write a checkpoint of `state`; the previous one is deleted once this one is complete.

    If the process is killed while it saves, the previous checkpoint or the new one remains. With several processes, all
    of them call this function with the same path on a shared file system.

    Args:
      path: a folder used only for the checkpoint; it need not exist.
      buffer: the configuration, such as a `ReplayBuffer`, `NStep` or `DifficultyPools`, or a dict, list or tuple of
        configurations and plain values. `restore` requires the same one. A callable in it, such as a schedule, is
        identified by its name alone.
      state: the state of the configuration, or any pytree of arrays, such as {"replay": replay, "params": params,
        "key": key}, which is saved as a whole. It may consist of dicts (also `OrderedDict` and Flax's `FrozenDict`),
        lists, tuples, None, NamedTuples (states of optax), dataclasses that are pytrees (`flax.struct`, `chex`,
        `jax.tree_util.register_dataclass`), arrays, typed PRNG keys and Python numbers. For other nodes, such as
        Flax's `TrainState`, which holds functions, only the arrays are saved, and `restore` needs `like` to build them.
      wait: return when the checkpoint is complete. If False, return once `state` is copied (it may then be donated) and
        write in the background. Call the returned function before the next `save` to this path, and before the program
        ends.

    Returns:
      a function that waits until the checkpoint is complete, and raises any error that occurred while it was written.

    Raises:
      ValueError: values are traced, or a part of `buffer` or `state` cannot be recorded; the message names it.

    Examples:
      >>> buffer = jr.ReplayBuffer(capacity=4)
      >>> state = buffer.init(jnp.array([10, 20, 30]))
      >>> finish = jr.save("run/checkpoint", {"replay": buffer}, {"replay": state, "steps": 7}, wait=False)
      >>> finish()  # before the next save, and before the program ends
    """
    import orbax.checkpoint as ocp

    described = _description.describe(buffer)
    structure, leaves = _structure.record(state)
    arrays = [_stored.as_array(leaf, name) for name, leaf in leaves]
    records = [_stored.header(array, name) for array, (name, _) in zip(arrays, leaves, strict=True)]
    arrays = [_stored.pack(array) for array in arrays]
    for record, sums in zip(records, _stored.checksums(arrays), strict=True):
        record["checksums"] = sums
    content = {
        "format": FORMAT,
        "library": _library_version(),
        "buffer": described,
        "structure": structure,
        "leaves": records,
    }
    if jax.process_count() > 1:
        _check_processes_agree(content)
        arrays = [np.asarray(array) if array.is_fully_addressable else array for array in arrays]
    items: dict[str, Any] = {MANIFEST: ocp.args.JsonSave({"sha256": _digest(content), "content": content})}
    stored = {str(i): array for i, array in enumerate(arrays) if array.size > 0}
    if stored:
        items[ARRAYS] = ocp.args.PyTreeSave(stored)
    manager = _manager(path, create=True)
    number = _latest(manager) + 1
    manager.save(number, args=ocp.args.Composite(**items), force=True)

    def finish() -> None:
        try:
            manager.wait_until_finished()
        finally:
            manager.close()

    if wait:
        finish()
    return finish


def restore(path: str | os.PathLike, buffer: Any, like: Any = None) -> Any:
    """The state in the newest complete checkpoint at `path`, equal to the saved one bit for bit.

    Arrays that were sharded over a mesh are sharded again if `buffer` holds a mesh with the same axes (as `Sharded`
    does); each device then reads its own part. All other arrays are restored to the default device. NumPy arrays are
    restored as JAX arrays.

    Args:
      path: the path passed to `save`.
      buffer: the configuration passed to `save`; `donate` may differ.
      like: a pytree with new nodes for those that a checkpoint cannot build by itself: nodes registered with
        `jax.tree_util`, dataclasses with a function among their static fields (`TrainState`), and classes that cannot
        be imported. For a saved {"replay": replay, "train": train_state}, pass {"train": TrainState.create(...)}, or
        its shapes from `jax.eval_shape`; the rest may be omitted or None. Static fields, such as functions, come from
        `like`, and all arrays and Python numbers from the checkpoint.

    Raises:
      FileNotFoundError: there is no complete checkpoint.
      ValueError: `buffer` differs from the saved one (the message names the field); `like` lacks a node that is needed
        or differs in a class, shape, dtype or plain static value (the message names it); the checkpoint is damaged or
        was written by a newer version of this library; or a class of the state cannot be imported or has other fields.

    Examples:
      >>> buffer = jr.ReplayBuffer(capacity=4)
      >>> items = jnp.array([10, 20, 30])
      >>> _ = jr.save("run/checkpoint", buffer, buffer.add(buffer.init(items), items))
      >>> state = jr.restore("run/checkpoint", buffer)
      >>> buffer.get(state, buffer.newest(state, 3)).tolist()
      [10, 20, 30]
    """
    number, manifest = _read_manifest(path)
    content = _checked(path, manifest, buffer)
    records, meshes = content["leaves"], list(_description.meshes(buffer))
    nodes = _structure.match(content["structure"], records, like)
    shardings = [_stored.sharding_in(meshes, record) for record in records]
    arrays = _read_arrays(path, number, records, shardings)
    for record, sums in zip(records, _stored.checksums(arrays), strict=True):
        if record["checksums"] != sums:
            raise _damaged(path, f"leaf {record['path']} has other bits than when it was saved")
    leaves = [_stored.unpack(*x) for x in zip(records, arrays, shardings, strict=True)]
    return _structure.rebuild(content["structure"], leaves, nodes)


def _read_manifest(path: str | os.PathLike) -> tuple[int, Any]:
    """The number of the newest complete checkpoint, and its manifest."""
    import orbax.checkpoint as ocp
    from etils import epath

    missing = f"{os.fspath(path)}: no complete checkpoint there; save one, or look for its folder."
    if not epath.Path(_absolute(path)).is_dir():
        raise FileNotFoundError(missing)
    with _manager(path, create=False) as manager:
        number = _latest(manager)
        if number < 0:
            raise FileNotFoundError(missing)
        try:
            restored = manager.restore(number, args=ocp.args.Composite(**{MANIFEST: ocp.args.JsonRestore()}))
            return number, restored[MANIFEST]
        except Exception as error:  # a damaged file raises errors of many kinds
            raise _damaged(path, f"cannot read its manifest: {_first_line(error)}") from error


def _read_arrays(path: str | os.PathLike, number: int, records: Sequence[Any], shardings: Sequence[Any]) -> list[Any]:
    """The stored form of the arrays of a checkpoint, in the order of their records."""
    handler = _handler()
    # One read at a time: if one of several failed, the others would meet a closed event loop on a storage thread.
    return [
        jnp.asarray(_read_array(path, number, handler, i, record, sharding))
        for i, (record, sharding) in enumerate(zip(records, shardings, strict=True))
    ]


def _read_array(path: str | os.PathLike, number: int, handler: Any, i: int, record: Any, sharding: Any = None) -> Any:
    """The stored form of array `i`: of NumPy without a sharding."""
    import orbax.checkpoint as ocp
    from etils import epath

    shape, dtype = _stored.stored_type(record)
    array = np.zeros(shape, dtype)
    if array.size > 0:
        how = ocp.RestoreArgs(restore_type=np.ndarray)
        if sharding is not None:
            how = ocp.ArrayRestoreArgs(sharding=sharding, global_shape=shape)
        item = {str(i): jax.ShapeDtypeStruct(shape, dtype)}
        args = ocp.args.PyTreeRestore(item, restore_args={str(i): how}, partial_restore=True)
        try:
            array = handler.restore(epath.Path(_absolute(path)) / f"{FOLDER}_{number}" / ARRAYS, args=args)[str(i)]
        except Exception as error:
            raise _damaged(path, f"cannot read leaf {record['path']}: {_first_line(error)}") from error
    if array.shape != shape or array.dtype != dtype:
        raise _damaged(path, f"leaf {record['path']} is {array.dtype}{list(array.shape)}, not {dtype}{list(shape)}")
    return array


def open_saved(path: str | os.PathLike) -> tuple[dict[str, Any], Callable[[int], np.ndarray]]:
    """What a checkpoint says of itself, without a configuration; and a function that reads one of its arrays.

    Raises:
      FileNotFoundError: there is no complete checkpoint.
      ValueError: it is damaged, or has a newer format. The function: the array is damaged.
    """
    number, manifest = _read_manifest(path)
    content, handler = _intact(path, manifest), _handler()

    def read(i: int) -> np.ndarray:
        record = content["leaves"][i]
        array = np.asarray(_read_array(path, number, handler, i, record))
        if record["checksums"] != _stored.host_checksums(array):
            raise _damaged(path, f"leaf {record['path']} has other bits than when it was saved")
        return array

    return content, read


def _absolute(path: str | os.PathLike) -> str:
    """The path as text, absolute unless it is a URL."""
    path = os.fspath(path)
    return path if "://" in path else os.path.abspath(path)


def _manager(path: str | os.PathLike, create: bool) -> Any:
    """Orbax's manager of the checkpoints at `path`; to write, `create` the folder and delete incomplete ones."""
    import orbax.checkpoint as ocp

    options = ocp.CheckpointManagerOptions(
        max_to_keep=1, step_prefix=FOLDER, create=create, cleanup_tmp_directories=create
    )
    registry = ocp.handlers.DefaultCheckpointHandlerRegistry()
    registry.add(ARRAYS, ocp.args.PyTreeSave, _handler())
    return ocp.CheckpointManager(_absolute(path), options=options, handler_registry=registry)


def _handler() -> Any:
    """Orbax's handler that writes and reads arrays.

    Only the first replica writes: to share the work among replicas, the handler would set a global mesh.
    """
    import orbax.checkpoint as ocp

    registry = ocp.type_handlers.create_type_handler_registry(
        (jax.Array, ocp.type_handlers.ArrayHandler(use_replica_parallel=False)),
        (np.ndarray, ocp.type_handlers.NumpyHandler()),
    )
    return ocp.PyTreeCheckpointHandler(type_handler_registry=registry)


def _latest(manager: Any) -> int:
    """Number of the newest complete checkpoint, -1 if there is none; the same on all processes."""
    number = manager.latest_step()
    number = -1 if number is None else number
    if jax.process_count() > 1:
        from jax.experimental import multihost_utils

        number = int(multihost_utils.broadcast_one_to_all(np.int32(number)))
    return number


def _intact(path: str | os.PathLike, manifest: Any) -> dict[str, Any]:
    """The content of a manifest.

    Raises:
      ValueError: it is damaged, or has a newer format.
    """
    if not isinstance(manifest, dict) or _digest(manifest.get("content")) != manifest.get("sha256"):
        raise _damaged(path, "its manifest has changed")
    content = manifest["content"]
    if content["format"] > FORMAT:
        raise ValueError(
            f"{os.fspath(path)}: has format {content['format']}, written by jaxreplay {content['library']}; this "
            f"version knows formats up to {FORMAT}; use a newer one."
        )
    return content


def _checked(path: str | os.PathLike, manifest: Any, buffer: Any) -> dict[str, Any]:
    """The content of a manifest.

    Raises:
      ValueError: it is damaged, has a newer format, or belongs to another configuration.
    """
    content = _intact(path, manifest)
    if different := list(_description.differences(content["buffer"], buffer)):
        listed = "; ".join(f"{x.where}: saved {x.saved}, given {x.given}" for x in different[:5])
        more = f" (and {len(different) - 5} more)" if len(different) > 5 else ""
        raise ValueError(
            f"{os.fspath(path)}: saved with another configuration: {listed}{more}. Restore with the saved "
            f"configuration{_next_step(different[0].owner)}."
        )
    for record in content["leaves"]:
        if "key" not in record:
            _stored.check_dtype(record["dtype"], record["path"])
    return content


def _next_step(config: Any) -> str:
    """Advice, for a message, on how to use the state of `config` with another configuration."""
    if hasattr(config, "remap"):
        return ", then use remap or recycle of the new one"
    if hasattr(config, "can_sample"):
        return ", then use jr.migrate(old_buffer, state, new_buffer)"
    return ""


def _check_processes_agree(content: dict[str, Any]) -> None:
    """Raise a `ValueError` if processes save different states."""
    from jax.experimental import multihost_utils

    digest = np.frombuffer(bytes.fromhex(_digest({**content, "leaves": None})), np.uint32)
    sums = [np.array(record["checksums"], np.uint32) for record in content["leaves"]]
    found = multihost_utils.process_allgather(np.concatenate([digest, *sums]))
    differs = np.any(found != found[0], axis=0)
    for number, record in enumerate(content["leaves"]):
        if np.any(differs[digest.size + 2 * number :][:2]):
            raise ValueError(
                f"leaf {record['path']}: differs from process to process; make one global array of it, so that each "
                "process's part is saved."
            )
    if np.any(differs):
        raise ValueError("buffer or state: their structure differs from process to process; give the same to all.")


def _digest(content: Any) -> str:
    """The SHA-256 digest of JSON."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _library_version() -> str:
    try:
        return importlib.metadata.version("jaxreplay")
    except importlib.metadata.PackageNotFoundError:
        return "unknown"


def _damaged(path: str | os.PathLike, what: str) -> ValueError:
    return ValueError(f"{os.fspath(path)}: the checkpoint is damaged: {what}; use a copy of it.")


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".partition("\n")[0][:300]
