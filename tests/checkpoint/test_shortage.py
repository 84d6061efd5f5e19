"""A save that is short of descriptors or of disk, at each of its calls and at many levels: nothing good is lost.

Either the save raises an `OSError` and the older state restores, or the new one restores; nothing is written after the
error; and the next good save leaves itself and nothing else.
"""

import errno
import fcntl
import itertools
import os
import pathlib
import re
import resource
import shutil
import time

import pytest
from checkpoint_runs import assert_same
from faults import QUIET, Fails, assert_alone, disk, fill, hooked, in_child, state, tree, which
from helpers import rarely

import jaxreplay as jr

pytestmark = pytest.mark.versions
OLD, NEW, NEXT = (state(seed) for seed in range(3))
LARGE = [state(seed, 2**17) for seed in range(3)]  # 400 KB, of which little is compressed


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
    """The call, or also all `more` calls after it."""
    jr.save(tmp_path / "old", None, OLD)
    found = []
    for first in itertools.count():
        path, fails = (
            pathlib.Path(shutil.copytree(tmp_path / "old", tmp_path / str(first))),
            Fails(errno.EMFILE, first, more),
        )
        with hooked(path, fails):
            saved = attempt(path, NEW, wait)
        found.append((path, saved, tree(path)))
        if not fails.has_failed:
            break
    assert saved
    assert [saved for _, saved, _ in found].count(False) > 3
    time.sleep(QUIET)
    for arguments in found:
        check(*arguments)


def starve(path, wait):
    """Saves with more and more free descriptors, until some work; how many have not."""
    old, new, following = (state(seed) for seed in range(3))
    jr.save(path / "old", None, old)
    jr.save(path / "used once", None, new, wait=wait)()
    limit, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    found = []
    for free in range(100):
        run = pathlib.Path(shutil.copytree(path / "old", path / str(free)))
        used = {*map(int, os.listdir("/proc/self/fd"))}
        resource.setrlimit(resource.RLIMIT_NOFILE, ([n for n in range(limit) if n not in used][free], most))
        try:
            saved = attempt(run, new, wait)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (limit, most))
        found.append((run, saved, tree(run)))
        if all(saved for _, saved, _ in found[-8:]):
            break
    time.sleep(QUIET)
    for arguments in found:
        check(*arguments, (old, new, following))
    return [saved for _, saved, _ in found]


@pytest.mark.parametrize("wait", [False, rarely(True)])
def test_a_save_in_a_process_with_few_free_descriptors(tmp_path, children, wait):
    found = in_child(children, starve, tmp_path, wait)
    assert not found[0]
    assert found[-1]


# --- disks


def may_mount():
    return os.geteuid() == 0 and shutil.which("mount") is not None


if may_mount():
    LEVELS = [2**15 * i for i in range(20)]  # free bytes: of the last ones there are enough

    @pytest.mark.parametrize(
        ("wait", "levels"), [(False, LEVELS[5:6]), rarely((True, LEVELS)), rarely((False, LEVELS))], ids=str
    )
    def test_a_save_on_a_disk_that_is_nearly_full(tmp_path, wait, levels):
        old, new, _ = LARGE
        jr.save(tmp_path / "old", None, old)
        found = {}
        with disk(tmp_path / "disk", "size=4m") as mounted:
            if not mounted:
                return  # a container that may not
            for free in levels:
                path, ballast = tmp_path / "disk" / "run", tmp_path / "disk" / "ballast"
                shutil.copytree(tmp_path / "old", path)
                fill(ballast, free)
                found[free] = attempt(path, new, wait)
                before = tree(path)
                time.sleep(QUIET)
                ballast.unlink()
                check(path, found[free], before, LARGE)
                shutil.rmtree(path)
        assert False in found.values()
        assert len(levels) == 1 or True in found.values()

    @pytest.mark.slow
    @pytest.mark.parametrize("wait", [True, False])
    def test_a_save_on_a_disk_with_few_free_names(tmp_path, wait):
        found = {}
        jr.save(tmp_path / "old", None, OLD)
        with disk(tmp_path / "disk", "size=4m,nr_inodes=100") as mounted:
            if not mounted:
                return
            for free in range(20):
                path, ballast = tmp_path / "disk" / "run", tmp_path / "disk" / "ballast"
                shutil.copytree(tmp_path / "old", path)
                ballast.mkdir()
                fill_names(ballast, free)
                found[free] = attempt(path, NEW, wait)
                before = tree(path)
                time.sleep(QUIET)
                shutil.rmtree(ballast)
                check(path, found[free], before)
                shutil.rmtree(path)
        assert {*found.values()} == {True, False}

    def fill_names(folder, num_free):
        made = []
        try:
            for number in itertools.count():
                (folder / str(number)).touch()
                made.append(folder / str(number))
        except OSError:
            for file in made[len(made) - num_free :]:
                file.unlink()

    @pytest.mark.parametrize("wait", [False, rarely(True)])
    def test_many_saves_on_a_full_disk_leave_nothing(tmp_path, wait):
        old, new, following = LARGE
        with disk(tmp_path / "disk", "size=4m") as mounted:
            if not mounted:
                return
            path = tmp_path / "disk" / "run"
            jr.save(path, None, old)
            fill(tmp_path / "disk" / "ballast", 2**18)  # more than half of what it takes
            assert [attempt(path, new, wait) for _ in range(12)] == [False] * 12
            assert_same(jr.restore(path, None, old), old)
            assert os.listdir(path) == ["checkpoint_0"]
            (tmp_path / "disk" / "ballast").unlink()
            jr.save(path, None, following)
            assert_alone(path, following)
            time.sleep(QUIET)
            assert os.listdir(path) == ["checkpoint_1"]


# --- what failed and killed saves leave


@pytest.mark.parametrize("wait", [True, rarely(False)])
def test_many_saves_without_descriptors_leave_nothing(tmp_path, wait):
    jr.save(tmp_path, None, OLD)
    for first in range(12):
        with hooked(tmp_path, Fails(errno.EMFILE, first, 2**31)):
            attempt(tmp_path, NEW, wait)
    assert which(tmp_path, OLD, NEW) in (0, 1)
    jr.save(tmp_path, None, NEXT)
    assert_alone(tmp_path, NEXT)


def parts(path):
    return sorted(name for name in os.listdir(path) if not re.fullmatch(r"checkpoint_\d+", name))


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
    for one in (NEW, NEXT):
        jr.save(tmp_path, None, one)
        assert parts(tmp_path) == ["checkpoint_7.part"]
        assert tree(tmp_path / "checkpoint_7.part") == before
        assert_same(jr.restore(tmp_path, None, one), one)
    os.close(writer)
    jr.save(tmp_path, None, OLD)
    assert_alone(tmp_path, OLD)
