"""What operators do to the folders of checkpoints, and what befalls them: nothing good is lost, nothing hangs."""

import contextlib
import errno
import fcntl
import itertools
import os
import re
import shutil
import threading
import time
import warnings

import faults
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checkpoint_runs import assert_same
from faults import OPENS, Fails, assert_alone, check_save, hooked, in_time, refuse, state, tree, unreadable, which
from helpers import mesh, rarely, rejects
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

import jaxreplay as jr
from jaxreplay.__main__ import main

pytestmark = pytest.mark.versions
OLD, NEW, NEXT = (state(seed) for seed in range(3))


@pytest.fixture
def two(tmp_path):
    """A folder with checkpoints of OLD and NEW."""
    for step, one in enumerate((OLD, NEW)):
        jr.save(tmp_path / "run", None, one, step=step, keep=2)
    return tmp_path / "run"


# --- links


@pytest.mark.parametrize("relative", [True, False])
@pytest.mark.parametrize("part", ["checkpoint_1", "checkpoint_1/arrays", "checkpoint_1/arrays/1", "checkpoint_5.part"])
def test_what_was_moved_to_an_archive_and_linked_back_stays_there(two, part, relative):
    moved, archive = two / part, two.parent / "archive" / "of_may"
    if part == "checkpoint_5.part":
        shutil.copytree(two / "checkpoint_1", moved)
    archive.parent.mkdir()
    moved.rename(archive)
    moved.symlink_to(os.path.relpath(archive, moved.parent) if relative else archive)
    before = tree(archive.parent)
    if part == "checkpoint_1":
        assert which(two, OLD, NEW) == 1
    for one in (NEXT, OLD, NEXT):
        check_save(two, one, keep=1)
        assert tree(archive.parent) == before
    assert len([x for x in os.listdir(two) if not (two / x).is_symlink() and not x.endswith(".part")]) == 1


# --- names of paths


INSIDE = ["checkpoint_1", "checkpoint_1/", "checkpoint_1/arrays", "checkpoint_1/new/deeper", "latest"]


@pytest.mark.parametrize("wait", [True, False])
@pytest.mark.parametrize("inside", INSIDE)
def test_a_save_into_a_checkpoint_is_refused(two, inside, wait):
    (two / "latest").symlink_to("checkpoint_1")
    before = tree(two)
    rejects(re.escape(str(two)) + r"(?!/)", jr.save, f"{two}/{inside}", None, NEXT, wait=wait)  # what to pass
    assert tree(two) == before
    assert which(two, OLD, NEW) == 1


def test_a_path_may_be_a_link_or_have_the_name_of_a_checkpoint(two):
    link, named = two.parent / "link", two.parent / "checkpoint_1"
    link.symlink_to(two)
    for path in (link, named):
        for one in (OLD, NEXT):
            check_save(path, one)
    assert link.is_symlink()
    assert_alone(two, NEXT)
    assert_alone(named, NEXT)


# --- files that vanish while they are written


FILES = {"a chunk is lost": "arrays/1/0", "a chunk is emptied": "arrays/3/0", "an array is lost": "arrays/1/.zarray"}


@pytest.mark.parametrize("wait", [True, False])
@pytest.mark.parametrize("name", FILES)
def test_a_file_that_is_lost_before_a_save_completes_is_an_error(tmp_path, name, wait):
    """Once all are written, and before the package looks again, by one of the threads that write."""
    lost = threading.Lock()
    jr.save(tmp_path, None, OLD)

    def lose(*_):
        part = tmp_path / "checkpoint_1.part"
        if all((part / file).exists() for file in FILES.values()) and lost.acquire(blocking=False):
            os.truncate(part / FILES[name], 0) if "emptied" in name else os.unlink(part / FILES[name])

    with hooked(tmp_path, lose, [*OPENS, (os, "stat"), (os, "lstat")]):
        rejects("checkpoint_1", lambda: jr.save(tmp_path, None, NEW, wait=wait)(), error=OSError)
    assert lost.locked()
    assert_alone(tmp_path, OLD)


# --- saves in the background that fail


@pytest.mark.parametrize("wait", [True, False])
@pytest.mark.parametrize("other", ["run", "other"])
def test_a_save_in_the_background_that_failed_unseen_is_told_by_the_next(tmp_path, other, wait):
    run, tried = tmp_path / "run", threading.Event()
    jr.save(run, None, OLD)
    with pytest.MonkeyPatch.context() as patch, in_time():
        patch.setattr(os, "rename", lambda *_: tried.set() or refuse())
        finish = jr.save(run, None, NEW, wait=False)
        tried.wait()
        while [*run.glob("*.part")]:
            time.sleep(0.01)
    for call in (lambda: jr.save(tmp_path / other, None, NEXT, wait=wait)(), finish, finish):
        rejects("(?s)run.*Read-only|Read-only.*run", call, error=OSError)
    assert_alone(run, OLD)
    for one in (NEW, NEXT):
        jr.save(tmp_path / other, None, one, wait=wait)()
    assert_alone(tmp_path / other, NEXT)


# --- what else is in the folder


OTHERS = {
    "dangling link": lambda place: place.symlink_to("nowhere"),
    "link to itself": lambda place: place.symlink_to("checkpoint_5"),
    "link to a file": lambda place: place.symlink_to("checkpoint_1/description.json"),
    "file": lambda place: place.write_text("text"),
    "FIFO": os.mkfifo,
}


@pytest.mark.parametrize("name", OTHERS)
def test_what_else_is_in_the_folder_makes_nothing_hang(two, tmp_path, name, capsys):
    """And where there is nothing else, nothing is restored."""
    (alone := tmp_path / "alone").mkdir()
    for folder in (two, alone):
        OTHERS[name](folder / "checkpoint_5")
    with warnings.catch_warnings(), in_time():
        warnings.simplefilter("ignore")  # it may be told
        assert which(two, OLD, NEW) == 1
        assert main([str(two)]) == 0
        assert_same(jr.restore(two, None, OLD, step=0), OLD)
        check_save(two, NEXT)
        errors = FileNotFoundError, ValueError
        for step in (None, 1):
            rejects("no complete checkpoint|is damaged", jr.restore, alone, None, NEW, step=step, error=errors)
        assert main([str(alone)]) == 2
    told = capsys.readouterr()
    assert "arrays and numbers" in told.out
    assert "python -m jaxreplay: " in told.err


# --- errors that are no damage


@pytest.mark.parametrize("how", ["opening", "reading"])
@pytest.mark.parametrize("name", ["EMFILE", "EACCES", *map(rarely, ["ENFILE", "EIO", "ESTALE"])])
def test_an_error_of_the_system_is_no_damage(two, name, how):
    """At each of the calls by which a restore opens, lists or reads something: that error, and no older state."""
    number, errors = getattr(errno, name), 0
    for first in itertools.count():
        fails = Fails(number, first)
        with hooked(two, fails) if how == "opening" else unreadable(fails):
            try:
                found = which(two, OLD, NEW)
            except OSError as error:
                found = error.errno
                errors += 1
        assert found in (1, number)
        if not fails.has_failed:
            break
    assert errors > 0
    assert which(two, OLD, NEW) == 1


@pytest.mark.parametrize("name", ["make_array_from_callback", "device_put"])
def test_an_error_of_jax_is_no_damage(two, name, monkeypatch):
    def fails(*_, **__):
        raise ValueError("of JAX")

    sharding = NamedSharding(Mesh(np.array(jax.devices("cpu")[:2]), ("x",)), PartitionSpec("x"))
    like = {**NEW, "x00": jax.ShapeDtypeStruct(NEW["x00"].shape, np.uint8, sharding=sharding)}
    assert_same(jr.restore(two, None, like), NEW)
    monkeypatch.setattr(jax, name, fails)
    rejects("^of JAX$", jr.restore, two, None, like)


# --- files of other programs in a checkpoint


def test_files_of_operating_systems_in_a_checkpoint_are_ignored(two, capsys):
    newest = two / "checkpoint_1"
    for folder in (newest, newest / "arrays", newest / "arrays" / "1"):
        for name in (".DS_Store", "._x", "Thumbs.db", ".nfs0001", "._0", "desktop.ini"):
            (folder / name).write_bytes(b"text")
    assert which(two, OLD, NEW) == 1
    assert main([str(two)]) == 0
    assert capsys.readouterr().err == ""
    for one in (OLD, NEXT):  # nor does it hold a folder that is deleted
        jr.save(two, None, one)
    assert_alone(two, NEXT)


# --- shapes from jax.eval_shape on a mesh


on_mesh = getattr(jax, "set_mesh", None) or jax.sharding.use_mesh  # its name before jax 0.8
EXPLICIT = mesh(4, kind=AxisType.Explicit)
ON_MESH = jr.Sharded(buffer=jr.ReplayBuffer(capacity=8, sampler=jr.Prioritized(), donate=False), mesh=EXPLICIT)


def made_on_mesh():
    x = np.arange(8, dtype=np.float32)
    keys = {"key": jax.random.key(3), "keys": jax.random.split(jax.random.key(1), 4)}
    return keys | {"replay": ON_MESH.add(ON_MESH.init(x), x), "params": jnp.arange(4), "n": 3}


@pytest.mark.parametrize("inside", [("save", "like", "restore"), ("like",), ("restore",), rarely(((),))])
def test_shapes_on_a_mesh_of_explicit_axes_are_restored(tmp_path, inside):
    def context(name):
        return on_mesh(EXPLICIT) if name in inside else contextlib.nullcontext()

    saved = made_on_mesh()
    with context("save"):
        jr.save(tmp_path, {"replay": ON_MESH}, saved)
    with context("like"):
        like = jax.eval_shape(made_on_mesh)
    with context("restore"):
        found = jr.restore(tmp_path, {"replay": ON_MESH}, like)
    assert_same(found, saved)
    replay = found.pop("replay")
    for x, y in zip(jax.tree.leaves(replay), jax.tree.leaves(saved["replay"]), strict=True):
        assert x.sharding.is_equivalent_to(y.sharding, x.ndim)
    for x in jax.tree.leaves(found):
        assert isinstance(x, int) or x.sharding.device_set == {jax.devices()[0]}


# --- saves that are short of descriptors or of disk


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
    time.sleep(0.2)  # in which nothing may be written any more
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
    with faults.full_disk(int(share * (tmp_path / "checkpoint_0" / "description.json").stat().st_size)):
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
