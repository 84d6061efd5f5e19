"""Checkpoints: `save` writes a state and the configuration that it belongs to, `restore` brings it back bit for bit.

A checkpoint is complete or not there at all: it is written beside the one before, which is deleted after that. Every
array is read back against checksums of its bits, so that a damaged file is an error and never a wrong state.
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

from jaxreplay.checkpoint import _description, _stored, _structure

FORMAT = 3  # of the manifest; to be raised when older versions cannot read what is written now
FOLDER = "checkpoint"  # of a checkpoint, before its number
MANIFEST, ARRAYS = "manifest", "arrays"


def save(path: str | os.PathLike, buffer: Any, state: Any, *, wait: bool = True) -> Callable[[], None]:
    """Write a checkpoint of `state`; the one before it is deleted once this one is complete.

    A process that is killed while it saves leaves the checkpoint before it or the new one. With several processes, all
    of them call this with the same path on a file system that they share.

    Args:
      path: a folder for the checkpoint, and for nothing else; it need not exist.
      buffer: the configuration, such as a `ReplayBuffer`, `NStep` or `DifficultyPools`, or a dict, list or tuple of
        configurations and plain values. `restore` insists on the same one. A callable in it, such as a schedule, is
        known by its name alone.
      state: the configuration's state, or any pytree of arrays, such as {"replay": replay, "params": params, "key":
        key}: then all of it is saved as one. It may be made of dicts (also `OrderedDict` and Flax's `FrozenDict`),
        lists, tuples, None, NamedTuples (states of optax), dataclasses that are pytrees (`flax.struct`, `chex`,
        `jax.tree_util.register_dataclass`), arrays, typed PRNG keys and Python numbers. Of other nodes, such as
        Flax's `TrainState`, which holds functions, the arrays are saved, and `restore` needs `like` to make them.
      wait: return when the checkpoint is complete. If False, return once `state` is copied (so that it may be donated)
        and write in the background. Then the function that is returned must be called before the next `save` to this
        path, and before the program ends.

    Returns:
      a function that waits until the checkpoint is complete, and raises what went wrong while it was written.

    Raises:
      ValueError: traced values, or something in `buffer` or `state` that cannot be recorded; the message names it.
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

    Arrays that were sharded over a mesh are so again if `buffer` holds a mesh like it (as `Sharded` does), each
    device reading its own part; all others come back on the default device. NumPy arrays come back as JAX arrays.

    Args:
      path: as given to `save`.
      buffer: the configuration given to `save`; `donate` may differ.
      like: a pytree with new nodes in place of those that a checkpoint cannot make by itself: what is registered with
        `jax.tree_util`, a dataclass with a function among its static fields (`TrainState`), or a class that cannot be
        imported. For a saved {"replay": replay, "train": train_state}, it is {"train": TrainState.create(...)}, or what
        `jax.eval_shape` makes of that; the rest may be left out, or be None. Static fields, such as functions, come
        from `like`, and all arrays and Python numbers from the checkpoint.

    Raises:
      FileNotFoundError: there is no complete checkpoint.
      ValueError: `buffer` differs from what was saved (the message names the field), `like` lacks a node that is
        needed or differs in a class, shape, dtype or plain static value (the message names it), the checkpoint is
        damaged or written by a newer version of this library, or a class of the state can no longer be imported or
        has other fields.
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
    """The arrays of a checkpoint as they are stored, in the order of their records."""
    import orbax.checkpoint as ocp
    from etils import epath

    folder, handler = epath.Path(_absolute(path)) / f"{FOLDER}_{number}" / ARRAYS, _handler()
    arrays = []
    # One at a time: if one of several reads fails, the others run into a closed event loop on a thread of the storage.
    for i, (record, sharding) in enumerate(zip(records, shardings, strict=True)):
        shape, dtype = _stored.stored_type(record)
        array = np.zeros(shape, dtype)
        if array.size > 0:
            how = ocp.RestoreArgs(restore_type=np.ndarray)
            if sharding is not None:
                how = ocp.ArrayRestoreArgs(sharding=sharding, global_shape=shape)
            item = {str(i): jax.ShapeDtypeStruct(shape, dtype)}
            args = ocp.args.PyTreeRestore(item, restore_args={str(i): how}, partial_restore=True)
            try:
                array = handler.restore(folder, args=args)[str(i)]
            except Exception as error:
                raise _damaged(path, f"cannot read leaf {record['path']}: {_first_line(error)}") from error
        if array.shape != shape or array.dtype != dtype:
            raise _damaged(path, f"leaf {record['path']} is {array.dtype}{list(array.shape)}, not {dtype}{list(shape)}")
        arrays.append(jnp.asarray(array))
    return arrays


def _absolute(path: str | os.PathLike) -> str:
    path = os.fspath(path)
    return path if "://" in path else os.path.abspath(path)


def _manager(path: str | os.PathLike, create: bool) -> Any:
    import orbax.checkpoint as ocp

    options = ocp.CheckpointManagerOptions(
        max_to_keep=1, step_prefix=FOLDER, create=create, cleanup_tmp_directories=create
    )
    registry = ocp.handlers.DefaultCheckpointHandlerRegistry()
    registry.add(ARRAYS, ocp.args.PyTreeSave, _handler())
    return ocp.CheckpointManager(_absolute(path), options=options, handler_registry=registry)


def _handler() -> Any:
    """What writes and reads the arrays; of replicas the first alone (to share them out, it would set a global mesh)."""
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


def _checked(path: str | os.PathLike, manifest: Any, buffer: Any) -> dict[str, Any]:
    """The content of a manifest that is whole, known and of this configuration."""
    if not isinstance(manifest, dict) or _digest(manifest.get("content")) != manifest.get("sha256"):
        raise _damaged(path, "its manifest has changed")
    content = manifest["content"]
    if content["format"] > FORMAT:
        raise ValueError(
            f"{os.fspath(path)}: has format {content['format']}, written by jaxreplay {content['library']}; this "
            f"version knows formats up to {FORMAT}; use a newer one."
        )
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
    """What to do with the state of a configuration to use it with another one."""
    if hasattr(config, "remap"):
        return ", then use remap or recycle of the new one"
    if hasattr(config, "can_sample"):
        return ", then use jr.migrate(old_buffer, state, new_buffer)"
    return ""


def _check_processes_agree(content: dict[str, Any]) -> None:
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
