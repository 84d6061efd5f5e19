"""A save that is short of descriptors or of disk, at each of its calls and at many levels: nothing good is lost.

Either the save raises an `OSError` and the older state restores, or the new one restores; nothing is written after the
error; and the next good save leaves itself and nothing else.
"""

import contextlib
import errno
import fcntl
import itertools
import os
import shutil
import time

import pytest
from faults import OPENS, QUIET, Fails, assert_alone, check_save, disk, hooked, state, tree, which
from helpers import rarely

import jaxreplay as jr

pytestmark = pytest.mark.versions
OLD, NEW, NEXT = (state(seed) for seed in range(3))
MANY = [state(seed, 24, 2**14) for seed in range(3)]  # 400 KB, which hardly become fewer


def attempt(path, one, wait):
    """True if a save has worked, False if it or its end has raised an `OSError`."""
    try:
        jr.save(path, None, one, wait=wait)()
    except OSError:
        return False
    return True


def check(path, saved, before, states=(OLD, NEW, NEXT)):
    """Check what a save has left; `before` is the tree at its end."""
    old, new, following = states
    assert tree(path) == before, "is written after the end of the save"
    assert which(path, new, old) <= (0 if saved else 1)
    jr.save(path, None, following)
    assert_alone(path, following)


# --- descriptors


@pytest.mark.parametrize(
    ("wait", "more"), [(True, 0), *map(rarely, [(True, 2**31), (False, 0), (False, 2**31)])], ids=str
)
def test_a_save_without_a_descriptor_at_each_of_its_calls(tmp_path, wait, more):
    """The call, or also all `more` calls after it; and of those that make folders and give names."""
    jr.save(tmp_path / "old", None, OLD)
    found = []
    for first in itertools.count():
        path, fails = tmp_path / str(first), Fails(errno.EMFILE, first, more)
        shutil.copytree(tmp_path / "old", path)
        with hooked(path, fails, [*OPENS, (os, "mkdir"), (os, "rename")]):
            saved = attempt(path, NEW, wait)
        found.append((path, saved, tree(path)))
        if not fails.has_failed:
            break
    assert saved
    assert [saved for _, saved, _ in found].count(False) > 3
    time.sleep(QUIET)
    for arguments in found:
        check(*arguments)


# --- disks


def fill(file, num_free):
    """Fill the disk of a file up to some bytes."""
    with open(file, "wb", buffering=0) as opened, contextlib.suppress(OSError):
        while opened.write(bytes(2**16)) == 2**16:
            pass
    os.truncate(file, max(0, os.stat(file).st_size - num_free))


if os.geteuid() == 0 and shutil.which("mount") is not None:

    @pytest.mark.parametrize(
        ("wait", "levels"), [(False, [5]), *map(rarely, [(True, range(20)), (False, range(20))])], ids=str
    )
    def test_a_save_on_a_disk_that_is_nearly_full(tmp_path, wait, levels):
        """At levels of 32 KB, of which the last are enough."""
        old, new, _ = MANY
        jr.save(tmp_path / "old", None, old)
        path, ballast, found = tmp_path / "disk" / "run", tmp_path / "disk" / "ballast", []
        with disk(tmp_path / "disk", "size=4m") as mounted:
            if not mounted:
                return  # a container that may not
            for level in levels:
                shutil.copytree(tmp_path / "old", path)
                fill(ballast, 2**15 * level)
                found.append(attempt(path, new, wait))
                before = tree(path)
                time.sleep(QUIET)
                ballast.unlink()
                check(path, found[-1], before, MANY)
                shutil.rmtree(path)
        assert not found[0]
        assert found[-1] == (len(levels) > 1)


# --- what failed and killed saves leave


def test_parts_without_a_writer_are_deleted_and_others_stay(tmp_path):
    jr.save(tmp_path, None, OLD)
    for number, kept in ((3, {"arrays"}), (5, {"description.json"}), (7, {"arrays", "description.json"}), (8, set())):
        part = tmp_path / f"checkpoint_{number}.part"
        part.mkdir()
        for name in kept:
            source = tmp_path / "checkpoint_0" / name
            shutil.copytree(source, part / name) if source.is_dir() else shutil.copy(source, part / name)
    writer = os.open(tmp_path / "checkpoint_7.part", os.O_RDONLY)
    fcntl.flock(writer, fcntl.LOCK_EX)  # it is alive
    before = tree(tmp_path / "checkpoint_7.part")
    for one, number in ((NEW, 8), (NEXT, 9)):
        check_save(tmp_path, one)
        assert sorted(os.listdir(tmp_path)) == ["checkpoint_7.part", f"checkpoint_{number}"]
        assert tree(tmp_path / "checkpoint_7.part") == before
    os.close(writer)
    jr.save(tmp_path, None, OLD)
    assert_alone(tmp_path, OLD)
