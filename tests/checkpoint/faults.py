"""What goes wrong on an operator's day: calls that fail, disks that are full, and children that are short of something.

They know how a checkpoint lies on the disk, and no name of the package but `save` and `restore`. Recordings use some.
"""

import builtins
import collections
import contextlib
import errno
import functools
import io
import itertools
import os
import pathlib
import re
import resource
import shutil
import signal
import threading

import jax
import numpy as np
import pytest
from checkpoint_runs import assert_same, bits

import jaxreplay as jr

WITHIN, LONG = 20, 120  # seconds; what takes longer hangs, in this process or with a child
OPENS = [(os, "open"), (os, "listdir"), (os, "scandir"), (builtins, "open"), (io, "open"), (io, "FileIO")]


def state(seed, num_leaves=3, num_bytes=2**12):
    """Leaves that hardly compress, in which no byte is 0, and a number."""
    rng = np.random.default_rng(seed)
    leaves = {f"x{i:02}": rng.integers(1, 256, num_bytes, np.uint8) for i in range(num_leaves)}
    return {name: jax.device_put(x) for name, x in leaves.items()} | {"n": seed}


def which(path, *states):
    """The index of the one of `states` that is restored."""
    found = jr.restore(path, None, states[0])
    same = [i for i, x in enumerate(states) if [*map(bits, jax.tree.leaves(x))] == [*map(bits, jax.tree.leaves(found))]]
    assert same, "restores what was never saved"
    return same[0]


def check_save(path, one, **settings):
    """Save a state, which is then restored."""
    jr.save(path, None, one, **settings)
    assert_same(jr.restore(path, None, one), one)


def tree(folder):
    """All that is in a folder by name: the bytes of a file, the target of a link, None for a folder."""
    found = {}
    for root, folders, files in os.walk(folder):
        for path in (pathlib.Path(root, name) for name in [*folders, *files]):
            name = str(path.relative_to(folder))
            with contextlib.suppress(FileNotFoundError):  # somebody writes, as the next look will tell
                found[name] = os.readlink(path) if path.is_symlink() else None if path.is_dir() else path.read_bytes()
    return found


def assert_alone(path, expected):
    """Nothing is there but one checkpoint of this state."""
    (name,) = os.listdir(path)
    assert re.fullmatch(r"checkpoint_\d+", name)
    jr.save(path / "beside", None, expected)
    same = {*tree(path / "beside" / "checkpoint_0")}
    shutil.rmtree(path / "beside")
    assert {*tree(path / name)} == same
    assert_same(jr.restore(path, None, expected), expected)


@contextlib.contextmanager
def in_time(seconds=WITHIN):
    def hangs(*_):
        pytest.fail(f"hangs: is not done in {seconds} seconds")

    before = signal.signal(signal.SIGALRM, hangs)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def _is_in(folder, path, dir_fd):
    return dir_fd is not None or os.path.abspath(os.fsdecode(path)).startswith(str(folder))


@contextlib.contextmanager
def hooked(folder, hook, calls=OPENS):
    """`hook(count, path)` before each of the calls by which Python opens or lists something in a folder."""
    count, local = itertools.count(), threading.local()

    def wrapped(call):
        def replaced(*arguments, **named):
            path = arguments[0] if arguments else named.get("path", named.get("file", "."))
            is_inside = not isinstance(path, int) and _is_in(folder, path, named.get("dir_fd"))
            if is_inside and not getattr(local, "inside", False):
                local.inside = True  # the hook's own calls are not counted
                try:
                    hook(next(count), path)
                finally:
                    local.inside = False
            return call(*arguments, **named)

        return replaced

    with pytest.MonkeyPatch.context() as patch:
        for module, name in calls:
            patch.setattr(module, name, wrapped(getattr(module, name)))
        yield


def refuse(*_, **__):
    raise OSError(errno.EROFS, os.strerror(errno.EROFS))


class Fails:
    """A hook that raises an error at the call `first`, and at `more` calls after it."""

    def __init__(self, number, first, more=0):
        self.number, self.first, self.last, self.has_failed = number, first, first + more, False

    def __call__(self, count, path):
        self.has_failed |= count >= self.first
        if self.first <= count <= self.last:
            raise OSError(self.number, os.strerror(self.number), path if isinstance(path, str) else None)


@contextlib.contextmanager
def unreadable(hook):
    """`hook(count, path)` before each read from a file that was opened."""
    count = itertools.count()

    class File(io.FileIO):
        def readall(self):
            hook(next(count), self.name)
            return super().readall()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(io, "FileIO", File)
        yield


@contextlib.contextmanager
def full_disk(num_bytes):
    """No file gets larger than this: of a larger one its beginning is written, as where a disk is full."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def damaged(file):
    """Damage a file in 14 ways in turn: other contents, or none. It is restored in the end."""
    content = file.read_bytes()
    changes = [None, content + b"x", b"", content[:-1], content[: len(content) // 2], bytes(len(content))]
    for part in range(1, 9):
        at = len(content) * part // 9
        changes.append(content[:at] + bytes([content[at] ^ 1 << part - 1]) + content[at + 1 :])
    for changed in changes:
        file.unlink()
        if changed is not None:
            file.write_bytes(changed)
        yield
        file.write_bytes(content)


def recorded(monkeypatch):
    """A list of all calls that make files durable, rename or delete them, with what is in a folder that is renamed."""
    events = []

    def path_of(path, dir_fd=None):
        if isinstance(path, int):
            return os.readlink(f"/proc/self/fd/{path}")
        return os.path.join(path_of(dir_fd), path) if dir_fd is not None else os.fspath(path)

    def state(path):
        info = os.stat(path)
        return info.st_mtime_ns, 0 if os.path.isdir(path) else info.st_size

    def everything(top):
        return {os.path.relpath(path, top): state(path) for path in (top, *pathlib.Path(top).rglob("*"))}

    def called(name, call, path, *to, **named):
        where = path_of(path, named.get("dir_fd"))
        found = everything(where) if name == "rename" else state(where) if name == "fsync" else None
        events.append((name, where, *(to or [None]), found))
        return call(path, *to, **named)

    for name in ("fsync", "rename", "replace", "unlink", "remove", "rmdir"):
        monkeypatch.setattr(os, name, functools.partial(called, name, getattr(os, name)))
    return events


def check_durable(events, path, part):
    """Check that all in a folder named so is on the disk when it gets its final name, and that then; the renames."""
    named = [i for i, (name, where, *_) in enumerate(events) if name == "rename" and where.endswith(part)]
    for i in named:
        _, renamed, _, inside = events[i]
        synced = {}
        for name, where, to, found in events[:i]:
            if name == "fsync":
                synced[os.path.relpath(where, renamed)] = found
            elif name == "replace":
                synced[os.path.relpath(to, renamed)] = synced.get(os.path.relpath(where, renamed))
        for file, found in inside.items():
            assert synced.get(file) == found, f"{file} is not durable as it is"
        assert events[i + 1][:2] == ("fsync", path), "the rename is durable before anything else happens"
    assert {("fsync", str(x)) for x in pathlib.Path(path).parents[:2]} <= {x[:2] for x in events[: named[0]]}
    return named


def _on_cpu(target, *arguments):
    jax.config.update("jax_platforms", "cpu")
    target(*arguments)


class Child:
    """A process that tells its last number of each event, and that a signal may end."""

    def __init__(self, children, target, *arguments):
        self.last = collections.defaultdict(int)
        self.ours, theirs = children.Pipe(duplex=False)
        self.process = children.Process(target=_on_cpu, args=(target, *arguments, theirs), daemon=True)
        self.process.start()
        theirs.close()

    def wait(self, event, number):
        """Read what it tells, until this event has come to a number."""
        while self.last[event] < number:
            assert self.ours.poll(LONG), f"hangs after {self.last}"
            self.last.update([self.ours.recv()])

    def read(self):
        """Read all that it has told."""
        with contextlib.suppress(EOFError):
            while self.ours.poll():
                self.last.update([self.ours.recv()])

    def ended(self):
        """Its exit code, once all is read; None if it hangs."""
        self.process.join(LONG)
        self.read()
        return self.process.exitcode
