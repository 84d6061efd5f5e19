"""Vaults: data sets that flashbax (https://github.com/instadeepai/flashbax) writes, such as those of OG-MARL.

A vault is a folder with `metadata.json` and one Zarr array [B, T, ...] per leaf, in a key-value store of TensorStore.
"""

import json
import math
import os
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from jaxreplay._common import checks, files
from jaxreplay.datasets._rows import NAMES, Steps, as_numbers, check_rows

FLAGS = ("terminated", "truncated", "done", "dones", "terminal", "terminals", "truncation", "truncations")


def from_vault(path: str | os.PathLike[str], *, names: Mapping[str, str] | None = None) -> Steps:
    """Read a vault, without flashbax: T rows of its B streams.

    Experience with `observation`, `action`, `reward` and `terminated` becomes the rows of `Steps`, with `truncated` and
    `step` added if it lacks them. A vault has no row for the last observation of a truncated episode, so its last step
    cannot be learnt from; `transitions` and `sequence_transitions` drop it. Other experience, such as that of several
    agents, is returned as it is.

    An episode ends where one of the flags (`terminated`, `truncated`, `done`, `terminals`, `truncations`, ...) says so,
    and with several agents where that is so for all of them. Writes to the vault end no episode.

    Args:
      path: the folder that has `metadata.json`.
      names: leaves of the vault by their names in `Steps`, for a vault with other names, such as
        `{"observation": "obs", "terminated": "done"}`.

    Returns:
      `Steps`: rows [T, B, ...] and ends [T, B].

    Raises:
      ValueError: `path` is no vault, or a damaged one; it lacks a name or all flags; or a named leaf has another shape.

    Examples:
      >>> import json, os, tensorstore
      >>> os.mkdir("vault")
      >>> with open("vault/metadata.json", "w") as file:
      ...     json.dump({"structure_shape": {"done": "(1, 3)"}}, file)
      >>> done, length = np.array([[False, True, False]]), np.array([3], np.int32)
      >>> for name, x in {"done./": done, "vault_index/": length}.items():
      ...     base = {"driver": "file", "path": os.path.abspath("vault") + "/"}
      ...     store = {"driver": "ocdbt", "base": base, "path": name}
      ...     spec = {"driver": "zarr", "kvstore": store, "create": True}
      ...     array = tensorstore.open(spec, dtype=x.dtype, shape=x.shape).result()
      ...     array[...] = x
      >>> jr.datasets.from_vault("vault").ends[:, 0].tolist()
      [False, True, False]
    """
    import tensorstore

    folder = os.path.realpath(files.local(path, "a vault"))

    def opened(name: str) -> Any:
        kvstore = {"driver": "ocdbt", "base": {"driver": "file", "path": f"{folder}/"}, "path": f"{name}/"}
        return tensorstore.open({"driver": "zarr", "kvstore": kvstore}, read=True).result()

    with files.reported(f"{folder}: is no vault with a metadata.json, or damaged", also=files.OF_STRANGERS):
        structure = json.loads(files.read(os.path.join(folder, "metadata.json"), 2**24))["structure_shape"]
        length = int(opened("vault_index")[0].read().result())
        paths = [path for path, _ in jax.tree.leaves_with_path(structure)]
        views = [opened("".join(f"{x.key}." for x in path))[:, :length] for path in paths]
        sizes = [max(x.size, math.prod(x.chunk_layout.read_chunk.shape)) for x in views]
        num_bytes = sum(size * x.dtype.numpy_dtype.itemsize for size, x in zip(sizes, views, strict=True))
        if num_bytes > os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"):
            raise ValueError(f"{num_bytes:,} bytes do not fit in the memory of this machine")
        arrays = [np.swapaxes(x.read().result(), 0, 1) for x in views]
        rows = as_numbers(jax.tree.unflatten(jax.tree.structure(structure), arrays))
        checks.leading_axes(rows, 2, "a vault")
    given = dict(names or {})
    if not {*given.values()} <= rows.keys():
        raise ValueError(f"names={given}: the vault has {', '.join(rows)}.")
    rows = {x: rows[x] for x in rows if x not in given.values()} | {x: rows[given[x]] for x in given}
    # [T, B, agents] each; one agent if a flag is of the whole environment.
    found = [jax.tree.leaves(rows.get(name)) for name in FLAGS]
    flags = [[x.reshape(*x.shape[:2], -1) != 0 for x in agents] for agents in found if agents]
    if not flags:
        raise ValueError(f"{folder}: has no flag of ends, only {', '.join(rows)}; give the one that is, as terminated.")
    ends = np.all(sum(np.concatenate(agents, axis=2) for agents in flags), axis=2)
    if names is None and not {*NAMES[:4]} <= rows.keys():
        return Steps(rows, ends)
    rows = {"truncated": np.zeros_like(ends), "step": np.ones_like(ends)} | rows
    check_rows(rows)
    return Steps(rows | {name: rows[name] != 0 for name in NAMES[3:]}, ends)
