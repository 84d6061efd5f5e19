"""What files of a checkpoint may not do, whoever wrote them: run code, hang, take memory, or reach the terminal."""

import contextlib
import functools
import io
import json
import os
import re
import resource
import shutil
import struct
import zlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checkpoint_runs import assert_same, rewrite
from faults import LONG, Child
from helpers import rejects

import jaxreplay as jr
from jaxreplay.__main__ import main

pytestmark = pytest.mark.versions
HUGE, ESCAPE = 2**40, "\x1b[31m\x07"
STATE = {"a": jnp.arange(5, dtype=jnp.int32), "key": jax.random.key(0), "n": 3, "small": jnp.arange(3, dtype=jnp.uint8)}
CHUNK, ARRAY = "arrays/0/0", "arrays/0/.zarray"


def seal(folder):
    """Record the files as they are now, as one may who has changed them."""

    def change(content):
        for name in ("0/.zarray", "0/0"):
            file = folder / "arrays" / name
            size = file.stat().st_size
            content["files"][name] = [size, zlib.crc32(file.read_bytes()) if size < 2**24 else 0]

    rewrite(folder.parent, change)


def claims(*at, value):
    """The description claims something else."""

    def set_value(content):
        functools.reduce(lambda node, key: node[key], at[:-1], content)[at[-1]] = value

    return lambda folder: rewrite(folder.parent, set_value)


def contains(name, content=b"", size=None):
    """A file has this content, and zeros up to a size, and the description knows."""

    def change(folder):
        (folder / name).write_bytes(content)
        os.truncate(folder / name, len(content) if size is None else size)
        if name != "description.json":
            seal(folder)

    return change


def array(**changes):
    """What Zarr says of an array, and the description knows."""

    def change(folder):
        text = (folder / ARRAY).read_text()
        contains(ARRAY, json.dumps(json.loads(text) | changes).encode())(folder)

    return change


def is_a(kind, name):
    """A file is something else: a FIFO, a folder, or a link to a path."""
    make = {"FIFO": os.mkfifo, "folder": os.mkdir}.get(kind, functools.partial(os.symlink, kind))

    def change(folder):
        (folder / name).unlink()
        make(folder / name)

    return change


def reverse(folder):
    """The names in a description are in another order, as other programs that rewrite JSON may leave them."""
    text = (folder / "description.json").read_text()
    content = json.loads(text, object_pairs_hook=lambda pairs: dict(pairs[::-1]))
    (folder / "description.json").write_text(json.dumps(content, indent=1))


def blosc(size, content):
    """A chunk in Blosc's format, version 2, that says that it unpacks to `size` bytes, in one block."""
    return struct.pack("<BBBBIII", 2, 1, 0x80, 4, size, size, 16 + len(content)) + content


DAMAGED, NAMES = "is damaged", ("description.json", CHUNK, ARRAY)
CHUNKS = {"another shape": ([HUGE], [5, 1], [], [0], [-5]), DAMAGED: ([1],), "another form": (["5"], [5.0], [True], 5)}
FILES = {
    "too large": ({}, {"0/.zarray": [-1, 1]}),
    "has changed": ({"0/.zarray": [HUGE, 1], "0/0": [HUGE, 1]},),
    "another form": [{"0/0": x} for x in (7, [7], [1.0, 1], ["1", 1], [True, 1])],
}
CASES = {
    **{f"sparse {name}": (contains(name, size=3 * 2**30), "too large") for name in NAMES},
    **{f"{kind} {name}": (is_a(kind, name), DAMAGED) for kind in ("FIFO", "/dev/zero", "folder") for name in NAMES},
    "reverse": (reverse, None),
    "link": (is_a("/etc/passwd", CHUNK), DAMAGED),
    "another file": (lambda folder: (folder / "arrays" / "0" / "1").write_text(""), None),
    "deep description": (contains("description.json", b"[" * 10**6), DAMAGED),
    "text": (contains("description.json", b"\xff\xfe"), DAMAGED),
    "no object": (contains("description.json", b"[]"), DAMAGED),
    "deep array": (contains(ARRAY, b"[" * 2_000), None),  # what Zarr says is for other programs
    "shape": (array(shape=[HUGE], chunks=[HUGE]), None),
    "compressor": (array(compressor={"id": "os.system"}, dtype="<c16", filters=[{"id": "delta"}]), None),
    "separator": (array(dimension_separator="/../"), None),
    **{f"chunk {x}": (claims("leaves", 0, "chunk", value=x), told) for told, every in CHUNKS.items() for x in every},
    "large bomb": (contains(CHUNK, blosc(20, bytes(10**6))), "too large"),
    "bomb": (contains(CHUNK, blosc(2**31 - 17, bytes(40))), "unpacks to another size"),
    "no Blosc": (contains(CHUNK, zlib.compress(bytes(2**20))), "unpacks to another size"),
    "cut off": (contains(CHUNK, blosc(20, bytes(20))[:7]), DAMAGED),
    "header alone": (contains(CHUNK, blosc(20, b"")), DAMAGED),
    "noise behind a header": (contains(CHUNK, blosc(20, bytes(range(200)))), DAMAGED),
    "noise": (contains(CHUNK, bytes(range(256))), DAMAGED),
    "outside": (claims("files", "../../../etc/passwd", value=[1, 1]), None),
    **{f"files {x}": (claims("files", value=x), told) for told, every in FILES.items() for x in every},
    "leaf's shape": (claims("leaves", 0, "shape", value=[HUGE]), r"like\['a'\]: saved int32\[1099511627776\], given"),
    "leaf's dtype": (claims("leaves", 0, "dtype", value="object"), r"like\['a'\]: saved object\[5\], given int32"),
    "kind of keys": (claims("leaves", 1, "dtype", value="key<rbg>"), r"like\['key'\]: saved key<rbg>\[\], given key"),
    **{f"weak {x}": (claims("leaves", 0, "weak", value=x), DAMAGED) for x in ("yes", [], [1], 7, None)},
    **{f"weak {i}": (claims("leaves", i, "weak", value=True), DAMAGED) for i in (1, 3)},  # of keys and of bytes
    **{f"key {i}": (claims("leaves", i, "key", value="threefry2x32"), DAMAGED) for i in (0, 1)},  # more than is known
    "number": (claims("leaves", 2, "number", value="x"), DAMAGED),
    "large number": (claims("leaves", 2, "number", value=float("inf")), DAMAGED),
    "path": (claims("leaves", 0, "path", value=f"a{ESCAPE}"), DAMAGED),
    "fewer": (claims("leaves", value=[]), "saved nothing|nothing, given|Too few"),
    "config": (claims("config", f"config.{ESCAPE}", value=1), DAMAGED),
    **{f"no {name}": (claims(name, value=7), DAMAGED) for name in ("config", "shards", "static", "leaves", "files")},
    **{f"step {i}": (claims("step", value=x), DAMAGED) for i, x in enumerate((ESCAPE, -1))},
    "library": (claims("library", value=ESCAPE), None),
    "kind of library": (claims("library", value=7), DAMAGED),
    "kind of leaves": (claims("leaves", value={}), DAMAGED),
    "value": (claims("config", "config", value=ESCAPE), "another configuration"),
    "static": (claims("static", f"a{ESCAPE}", value=1), DAMAGED),
}


def restore_all(folder, connection):
    """Restore and print each checkpoint; tell what comes of it, and the bytes by which the largest memory has grown."""
    jr.restore(folder / "good", None, STATE)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for name in CASES:
        try:
            message = jr.restore(folder / name.replace("/", "."), None, STATE) and None
        except Exception as error:
            message = str(error) if isinstance(error, ValueError) else f"not clear: {error!r}"
        with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(out):
            main([str(folder / name.replace("/", "."))])
        connection.send((name, message, out.getvalue()))
    connection.send(1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before))


def test_hostile_files_are_an_error_at_once(tmp_path, children):
    jr.save(tmp_path / "good", None, STATE)
    for name, (change, _) in CASES.items():
        shutil.copytree(tmp_path / "good", tmp_path / name.replace("/", "."))
        change(tmp_path / name.replace("/", ".") / "checkpoint_0")
    child, wrong = Child(children, restore_all, tmp_path), {}
    try:
        for name, (_, expected) in CASES.items():
            assert child.ours.poll(LONG), f"hangs: {name}"
            try:
                found, message, printed = child.ours.recv()
            except EOFError:
                pytest.fail(f"aborts: {name}")
            assert found == name
            if not printed.replace("\n", "").isprintable() or not str(message).isprintable():
                wrong[name] = "reaches the terminal"
            if not re.search(expected or "^None$", str(message)):
                wrong[name] = message
        assert wrong == {}
        assert child.ours.poll(LONG)
        assert child.ours.recv() < 100 * 2**20
    finally:
        child.process.kill()
        child.process.join()
    for name in ("good", "reverse"):
        assert_same(jr.restore(tmp_path / name, None, STATE), STATE)


def test_an_error_of_the_package_itself_is_not_blamed_on_the_file(tmp_path, monkeypatch):
    buffer = jr.ReplayBuffer(capacity=4)
    state = buffer.init(np.zeros(1))
    jr.save(tmp_path, buffer, state)
    monkeypatch.setattr(jr.buffers.ReplayBuffer, "_check_state", lambda *_: {}["of the package"])
    rejects("of the package", jr.restore, tmp_path, buffer, state, error=KeyError)
