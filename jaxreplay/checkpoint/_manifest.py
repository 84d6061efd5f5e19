"""The manifest of a checkpoint: JSON that describes the arrays next to it, with a digest."""

import hashlib
import importlib.metadata
import json
from collections.abc import Sequence
from typing import Any

from jaxreplay.checkpoint import _description, _files, _leaves, _structure

FORMAT = 1  # increment if older versions cannot read the new manifest
MAX_DEPTH = 4 * _structure.MAX_DEPTH  # of JSON; a node takes up to three levels


def make(described: Any, structure: list, records: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Content of a manifest."""
    return {
        "format": FORMAT,
        "library": _library_version(),
        "buffer": described,
        "structure": structure,
        "leaves": list(records),
    }


def seal(content: dict[str, Any]) -> dict[str, Any]:
    """Manifest with this content."""
    return {"sha256": digest(content), "content": content}


def read(path: str, number: int) -> dict[str, Any]:
    """Manifest content of a checkpoint.

    Raises:
      ValueError: the checkpoint is damaged, has another format, or states sizes other than those on disk.
    """
    try:
        manifest = _files.load(path, number, {_files.MANIFEST: None})[_files.MANIFEST]
    except (KeyError, ValueError) as error:
        raise damaged(path, f"cannot read its manifest: {error}") from error
    content = manifest.get("content") if isinstance(manifest, dict) else None
    if not isinstance(content, dict) or digest(content) != manifest.get("sha256"):
        raise damaged(path, "its manifest has changed")
    if content.get("format") != FORMAT:
        raise ValueError(
            f"{path}: has format {content.get('format')}, written by jaxreplay {content.get('library')}; this version "
            f"reads format {FORMAT}; use the version that wrote it."
        )
    try:
        _check(content)
        _description.check(content["buffer"])
        _structure.check(content["structure"], len(content["leaves"]))
    except (KeyError, ValueError) as error:
        raise damaged(path, f"its manifest is invalid: {error}") from error
    for record in content["leaves"]:
        if "key" not in record:
            _leaves.check_dtype(record["dtype"], record["path"])
    try:
        for record in content["leaves"]:
            _leaves.check_parts(record)
        types = {str(i): _leaves.stored_type(record) for i, record in enumerate(content["leaves"])}
        _files.check_sizes(path, number, {name: x for name, x in types.items() if 0 not in x[0]})
    except (OSError, ValueError) as error:
        raise damaged(path, str(error)) from error
    return content


def digest(content: Any) -> str:
    """SHA-256 digest of JSON."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def damaged(path: str, what: str) -> ValueError:
    return ValueError(f"{path}: the checkpoint is damaged: {what}; use a copy of it.")


def _check(content: dict[str, Any]) -> None:
    """Raise a `ValueError` if the content is nested too deeply or a leaf record is invalid."""
    todo: list[tuple[Any, int]] = [(content, 0)]
    while todo:
        x, depth = todo.pop()
        if depth > MAX_DEPTH:
            raise ValueError(f"it is nested more than {MAX_DEPTH} levels deep")
        if isinstance(x, list | dict):
            todo += [(child, depth + 1) for child in (x.values() if isinstance(x, dict) else x)]
    if not isinstance(content["leaves"], list):
        raise ValueError("it has no list of leaves")
    for record in content["leaves"]:
        match record:
            case {"path": str(), "dtype": str(), "shape": [*shape], "parts": [*parts]} if _are_sizes(shape):
                keyed = isinstance(record.get("key", ""), str) and ("key" in record) == (record["dtype"] == "key")
                meshed = "mesh" not in record or (isinstance(record["mesh"], str) and _is_spec(record.get("spec")))
                if keyed and meshed and all(map(_is_part, parts)):
                    continue
        raise ValueError(f"{str(record)[:100]} is not the record of an array")


def _are_sizes(x: Any) -> bool:
    return isinstance(x, list) and all(type(size) is int and 0 <= size < 2**63 for size in x)


def _is_part(x: Any) -> bool:
    return isinstance(x, list) and len(x) == 3 and _are_sizes(x[0]) and _are_sizes(x[1]) and _are_sizes([x[2]])


def _is_spec(x: Any) -> bool:
    """True if JSON is a `PartitionSpec`."""
    names = (
        [name for axis in x for name in (axis if isinstance(axis, list) else [axis])] if isinstance(x, list) else [0]
    )
    return all(name is None or isinstance(name, str) for name in names)


def _library_version() -> str:
    try:
        return importlib.metadata.version("jaxreplay")
    except importlib.metadata.PackageNotFoundError:
        return "unknown"
