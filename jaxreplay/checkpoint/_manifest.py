"""The manifest of a checkpoint: JSON that describes the arrays next to it, with a digest."""

import contextlib
import hashlib
import importlib.metadata
import json
from collections.abc import Iterator, Sequence
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
    with reported(path, "cannot read its manifest: "):
        manifest = _files.load(path, number, {_files.MANIFEST: None})[_files.MANIFEST]
    content = manifest.get("content") if isinstance(manifest, dict) else None
    with reported(path):
        if not isinstance(content, dict) or digest(content) != manifest.get("sha256"):
            raise ValueError("its manifest has changed")
    if content.get("format") != FORMAT:
        raise ValueError(
            f"{path}: has format {content.get('format')}, written by jaxreplay {content.get('library')}; this version "
            f"reads format {FORMAT}; use the version that wrote it."
        )
    with reported(path, "its manifest is invalid: "):
        _check(content)
        _description.check(content["buffer"])
        _structure.check(content["structure"], len(content["leaves"]))
    for record in content["leaves"]:
        if "key" not in record:
            _leaves.check_dtype(record["dtype"], record["path"])
    with reported(path):
        for record in content["leaves"]:
            _leaves.check_parts(record)
        types = {str(i): _leaves.stored_type(record) for i, record in enumerate(content["leaves"])}
        _files.check_sizes(path, number, {name: x for name, x in types.items() if 0 not in x[0]})
    return content


def digest(content: Any) -> str:
    """SHA-256 digest of JSON."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


@contextlib.contextmanager
def reported(path: str, what: str = "") -> Iterator[None]:
    """Report errors in files as a `ValueError` that says that the checkpoint is damaged."""
    try:
        yield
    except (KeyError, OSError, ValueError) as error:
        raise ValueError(f"{path}: the checkpoint is damaged: {what}{error}; use a copy of it.") from error


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
        if not _leaves.is_record(record):
            raise ValueError(f"{str(record)[:100]} is not the record of an array")


def _library_version() -> str:
    try:
        return importlib.metadata.version("jaxreplay")
    except importlib.metadata.PackageNotFoundError:
        return "unknown"
