"""Checkpoints: `save` writes a state and its configuration, and `restore` reads the state back bit for bit.

A checkpoint is either complete or absent: the previous one is deleted only after the new one is complete. When an array
is read, it is compared with checksums of its bits. So a damaged file raises an error and never yields a wrong state.
"""

import concurrent.futures
import contextlib
import functools
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax
import numpy as np

from jaxreplay._common.xla import reads_state
from jaxreplay.checkpoint import _description, _files, _leaves, _manifest, _processes, _structure
from jaxreplay.checkpoint._names import Allowed, check_allow


@reads_state
def save(path: str | os.PathLike, buffer: Any, state: Any, *, wait: bool = True) -> Callable[[], None]:
    """Write a checkpoint of `state`; the previous one is deleted once this one is complete.

    If the process is killed while it saves, the previous checkpoint or the new one remains. Threads and programs that
    save to one path take turns. With several processes of `jax.distributed`, all of them call this function, and the
    one that it returns, with the same path on a shared file system.

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
        write in the background; of several processes the first completes the checkpoint when all call the returned
        function. Call it before the next `save` to this path, and before the program ends.

    Returns:
      a function that waits until the checkpoint is complete, and raises any error that occurred while it was written.

    Raises:
      ValueError: values are traced, or a part of `buffer` or `state` cannot be recorded; the message names it.
      OSError: the folder cannot be made or written; the previous checkpoint remains.

    Examples:
      >>> buffer = jr.ReplayBuffer(capacity=4)
      >>> state = buffer.init(jnp.array([10, 20, 30]))
      >>> finish = jr.save("run/checkpoint", {"replay": buffer}, {"replay": state, "steps": 7}, wait=False)
      >>> finish()  # before the next save, and before the program ends
    """
    folder = _files.absolute(path)
    described, meshes = _description.describe(buffer), dict(_description.meshes(buffer))
    structure, leaves = _structure.record(state)
    arrays = [_leaves.as_array(leaf, name) for name, leaf in leaves]
    records = [_leaves.header(array, name, meshes) for array, (name, _) in zip(arrays, leaves, strict=True)]
    parts = [_leaves.parts(array) for array in arrays]
    if jax.process_count() > 1:
        _check_processes_agree(described, structure, records, parts)
    own = [part.data for x in parts for part in x if part.process == jax.process_index()]
    places = [[[part.process, *map(list, part.box)] for part in x] for x in parts]
    del state, leaves, arrays, parts  # what is donated now is not held up to the end

    def manifest(checksums: Iterable[int]) -> bytes:
        each = iter(checksums)
        for record, parts in zip(records, places, strict=True):
            record["parts"] = [[*part, next(each)] for part in parts]
        return _manifest.to_bytes(_manifest.make(described, structure, records))

    _processes.on_first(lambda: os.makedirs(folder, exist_ok=True) or 0)
    blocks = _leaves.on_host(own) if wait else [block.copy() for block in _leaves.on_host(own)]
    if jax.process_count() > 1:
        finish = _save_together(folder, [process for x in places for process, *_ in x], blocks, manifest, wait)
    else:
        finish = _later(functools.partial(_save_alone, folder, blocks, manifest), wait)
    if wait:
        finish()
    return finish


def _save_alone(folder: str, blocks: Iterable[np.ndarray], manifest: Callable[[Iterable[int]], bytes]) -> None:
    """Write a checkpoint of one process, after all others that are being written there."""
    with _files.locked(folder):
        number = _files.begin(folder)
        try:
            _files.commit(folder, number, manifest(_files.write(folder, number, 0, blocks)))
        except BaseException:
            _files.discard(folder, number)
            raise


def _save_together(
    folder: str,
    writers: Sequence[int],
    blocks: Iterable[np.ndarray],
    manifest: Callable[[Iterable[int]], bytes],
    wait: bool,
) -> Callable[[], None]:
    """Write this process's part of a checkpoint; the function that is returned completes it, on all processes."""
    process = jax.process_index()
    number = _processes.on_first(lambda: _files.begin(folder))
    written = _later(lambda: _files.write(folder, number, process, blocks), wait)

    def commit(checksums: Iterable[int]) -> int:
        return _files.commit(folder, number, manifest(checksums))

    @functools.cache
    def finish() -> None:
        own, error = iter(()), None
        try:
            own = iter(written())
        except Exception as raised:
            error = raised
        sums = [next(own, 0) if writer == process else 0 for writer in writers]
        try:
            sums = _processes.add_up(sums, error)
            _processes.on_first(lambda: commit(sums))
        except OSError:
            if process == 0:
                _files.discard(folder, number)
            raise

    return finish


def _later(function: Callable[[], Any], wait: bool) -> Callable[[], Any]:
    """What returns the result of `function`, or raises its error; unless `wait`, a thread computes it meanwhile."""
    if wait:
        return functools.cache(function)
    with_one_thread = concurrent.futures.ThreadPoolExecutor(1)
    result = with_one_thread.submit(function).result
    with_one_thread.shutdown(wait=False)
    return result


def restore(path: str | os.PathLike, buffer: Any, like: Any = None, *, allow: Allowed = ()) -> Any:
    """The state in the newest complete checkpoint at `path`, equal to the saved one bit for bit.

    Nothing is imported because a checkpoint names it. Classes come from this package, from `like` and from `allow`.

    Arrays that were sharded over a mesh of the configuration are sharded again over the mesh in the same place of
    `buffer` (as `Sharded` holds one); each device then reads its own part. All other arrays are restored to the default
    device. NumPy arrays are restored as JAX arrays.

    Args:
      path: the path passed to `save`.
      buffer: the configuration passed to `save`; `donate` may differ.
      like: a pytree with new nodes for those that a checkpoint cannot build by itself: NamedTuples and dataclasses of
        other packages (states of optax), nodes registered with `jax.tree_util`, and dataclasses with a function among
        their static fields (`TrainState`). For a saved {"replay": replay, "params": params, "opt": opt}, pass {"opt":
        optimizer.init(params)}, or its shapes from `jax.eval_shape`; the rest may be omitted or None. Static fields
        that are functions come from `like`, and all arrays and Python numbers from the checkpoint.
      allow: modules and classes, such as (optax, Settings), or one of them. Their NamedTuples and dataclasses are also
        built without `like`, with values from the checkpoint. A module stands for all modules inside it that are
        already imported.

    Raises:
      FileNotFoundError: there is no complete checkpoint.
      ValueError: `buffer` differs from the saved one (the message names the field); `like` lacks a node that is needed
        or differs in a class, shape, dtype or plain static value (the message names it); the checkpoint names a class
        that is neither in `like` nor allowed (the message says what to pass), or one that has other fields now; it is
        damaged, claims other sizes than it has on disk, or was written by a newer version of this library.

    Examples:
      >>> buffer = jr.ReplayBuffer(capacity=4)
      >>> items = jnp.array([10, 20, 30])
      >>> _ = jr.save("run/checkpoint", buffer, buffer.add(buffer.init(items), items))
      >>> state = jr.restore("run/checkpoint", buffer)
      >>> buffer.get(state, buffer.newest(state, 3)).tolist()
      [10, 20, 30]
    """
    allowed = check_allow(allow)
    folder, number, content, arrays = _open(path)
    try:
        return _rebuilt(folder, content, arrays, buffer, like, allowed)
    except ValueError:
        if jax.process_count() > 1 or _files.newest(folder) == number:
            raise
    return restore(path, buffer, like, allow=allowed)  # another process has meanwhile replaced the checkpoint


def open_saved(path: str | os.PathLike) -> tuple[dict[str, Any], Callable[[int], np.ndarray]]:
    """What a checkpoint says of itself, without a configuration; and a function that reads one of its arrays.

    Raises:
      FileNotFoundError: there is no complete checkpoint.
      ValueError: it is damaged, or has another format. The function: the array is damaged.
    """
    folder, _, content, arrays = _open(path)

    def read(i: int) -> np.ndarray:
        with _damage_in(folder):
            return arrays.read(i)

    return content, read


def _open(path: str | os.PathLike) -> tuple[str, int, dict[str, Any], _leaves.Blocks]:
    """The folder and number of the newest complete checkpoint, its content, and its arrays, which are not yet read."""
    folder = _files.absolute(path)
    number = _processes.on_first(lambda: _files.newest(folder))
    if number < 0:
        raise FileNotFoundError(f"{os.fspath(path)}: no complete checkpoint there; save one, or look for its folder.")
    try:
        return folder, number, *_manifest.read(folder, number)
    except ValueError:
        if jax.process_count() > 1 or _files.newest(folder) == number:
            raise
    return _open(path)  # another process has meanwhile replaced the checkpoint


def _rebuilt(
    folder: str, content: dict[str, Any], arrays: _leaves.Blocks, buffer: Any, like: Any, allow: Iterable[Any]
) -> Any:
    """The state that was saved."""
    if different := list(_description.differences(content["buffer"], buffer)):
        listed = "; ".join(f"{x.where}: saved {x.saved}, given {x.given}" for x in different[:5])
        more = f" (and {len(different) - 5} more)" if len(different) > 5 else ""
        raise ValueError(
            f"{folder}: saved with another configuration: {listed}{more}. Restore with the saved "
            f"configuration{_next_step(different[0].owner)}."
        )
    structure, records, meshes = content["structure"], content["leaves"], dict(_description.meshes(buffer))
    nodes = _structure.match(structure, records, like)
    classes = _structure.classes(structure, nodes, allow)
    with _damage_in(folder):
        leaves = [arrays.array(i, _leaves.sharding_in(meshes, record)) for i, record in enumerate(records)]
    return _structure.rebuild(structure, leaves, nodes, classes)


@contextlib.contextmanager
def _damage_in(folder: str) -> Iterator[None]:
    """An error while arrays are read is a `ValueError` that the checkpoint is damaged."""
    try:
        yield
    except (KeyError, OSError, ValueError) as error:
        raise _manifest.damaged(folder, str(error)) from error


def _next_step(config: Any) -> str:
    """Advice, for a message, on how to use the state of `config` with another configuration."""
    if hasattr(config, "remap"):
        return ", then use remap or recycle of the new one"
    if hasattr(config, "can_sample"):
        return ", then use jr.migrate(old_buffer, state, new_buffer)"
    return ""


def _check_processes_agree(
    described: Any, structure: list, records: Sequence[dict[str, Any]], parts: Sequence[Sequence[_leaves.Part]]
) -> None:
    """Raise a `ValueError` if processes save different states."""
    digest = bytes.fromhex(_manifest.digest([described, structure, records]))
    if _differ([int(x) for x in np.frombuffer(digest, np.uint32)]):
        raise ValueError("buffer or state: their structure differs from process to process; give the same to all.")
    copies = [[part.data for part in x if part.is_copy] for x in parts]  # each process has all of the array
    sums = [sum(map(_files.checksum, _leaves.on_host(x))) for x in copies]
    if different := _differ(sums):
        raise ValueError(
            f"leaf {records[different[0]]['path']}: differs from process to process; make one global array of it, so "
            "that each process's part is saved."
        )


def _differ(numbers: Sequence[int]) -> list[int]:
    """Indices of the numbers that differ from process to process."""
    found = _processes.gather(numbers)
    return np.flatnonzero(np.any(found != found[0], axis=0)).tolist()
