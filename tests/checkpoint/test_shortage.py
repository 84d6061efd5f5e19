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
from faults import OPENS, QUIET, Fails, assert_alone, check_save, full_disk, hooked, state, tree, which
from helpers import rarely, rejects

import jaxreplay as jr

pytestmark = pytest.mark.versions
OLD, NEW, NEXT = (state(seed) for seed in range(3))


@pytest.mark.parametrize(("wait", "more"), [(True, 0), *map(rarely, [(True, 2**31), (False, 0), (False, 2**31)])])
def test_a_save_without_a_descriptor_at_each_of_its_calls(tmp_path, wait, more):
    """The call, or also all `more` calls after it; and of those that make folders and give names."""
    jr.save(tmp_path / "old", None, OLD)
    found = []
    for first in itertools.count():
        path, fails, saved = tmp_path / str(first), Fails(errno.EMFILE, first, more), False
        shutil.copytree(tmp_path / "old", path)
        with hooked(path, fails, [*OPENS, (os, "mkdir"), (os, "rename")]), contextlib.suppress(OSError):
            jr.save(path, None, NEW, wait=wait)()
            saved = True
        found.append((path, saved, tree(path)))
        if not fails.has_failed:
            break
    assert saved
    assert [saved for _, saved, _ in found].count(False) > 3
    time.sleep(QUIET)
    for path, saved, before in found:
        assert tree(path) == before, "is written after the end of the save"
        assert which(path, NEW, OLD) <= (0 if saved else 1)
        jr.save(path, None, NEXT)
        assert_alone(path, NEXT)


@pytest.mark.parametrize("wait", [True, False])
@pytest.mark.parametrize(("size", "share"), [(2**12, 0), (2**12, 2), (2**8, 0.9)])
def test_a_save_on_a_full_disk(tmp_path, size, share, wait):
    """There is room for no file, for a description and no array, or for all but the complete description."""
    old, new, following = (state(seed, 3, size) for seed in range(3))
    jr.save(tmp_path, None, old)
    with full_disk(int(share * (tmp_path / "checkpoint_0" / "description.json").stat().st_size)):
        rejects(r"^\[Errno \d+\] .*File too large", lambda: jr.save(tmp_path, None, new, wait=wait)(), error=OSError)
    assert_alone(tmp_path, old)
    jr.save(tmp_path, None, following)
    assert_alone(tmp_path, following)


def test_parts_without_a_writer_are_deleted_and_others_stay(tmp_path):
    jr.save(tmp_path, None, OLD)
    for number, kept in ((3, {"arrays"}), (5, {"description.json"}), (7, {"arrays", "description.json"}), (8, set())):
        (part := tmp_path / f"checkpoint_{number}.part").mkdir()
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
