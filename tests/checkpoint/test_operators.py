"""What operators do to the folders of checkpoints, and what befalls them: nothing good is lost, nothing hangs."""

import contextlib
import errno
import itertools
import os
import pathlib
import re
import shutil
import threading
import time
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checkpoint_runs import assert_same
from faults import (
    OPENS,
    WITHIN,
    Fails,
    array_folders,
    assert_alone,
    chunks,
    hooked,
    in_time,
    refuse,
    run_program,
    state,
    tree,
    unreadable,
    which,
)
from helpers import rarely
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

import jaxreplay as jr
from jaxreplay.__main__ import main

pytestmark = pytest.mark.versions
OLD, NEW, NEXT = (state(seed) for seed in range(3))


@pytest.fixture(scope="module")
def two_saved(tmp_path_factory):
    """A folder with checkpoints of OLD and NEW, to be copied."""
    path = tmp_path_factory.mktemp("two") / "run"
    for step, one in enumerate((OLD, NEW)):
        jr.save(path, None, one, step=step, keep=2)
    return path


@pytest.fixture
def two(two_saved, tmp_path):
    return pathlib.Path(shutil.copytree(two_saved, tmp_path / "run"))


def until(condition, seconds=2):
    """Wait for a condition for a while."""
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.01)


# --- links


@pytest.mark.parametrize("relative", [True, False])
@pytest.mark.parametrize("part", ["checkpoint_1", "checkpoint_1/arrays", "checkpoint_1/arrays/0", "checkpoint_5.part"])
def test_what_was_moved_to_an_archive_and_linked_back_stays_there(two, part, relative):
    moved, archive = two / part, two.parent / "archive" / "of_may"
    if part == "checkpoint_1/arrays/0":
        moved = array_folders(two / "checkpoint_1")[0]
    if part == "checkpoint_5.part":
        shutil.copytree(two / "checkpoint_1", moved)
    archive.parent.mkdir()
    moved.rename(archive)
    moved.symlink_to(os.path.relpath(archive, moved.parent) if relative else archive)
    before = tree(archive.parent)
    if part == "checkpoint_1":
        assert which(two, OLD, NEW) == 1
    for one in (NEXT, OLD, NEXT):
        jr.save(two, None, one, keep=1)
        assert tree(archive.parent) == before
        assert_same(jr.restore(two, None, one), one)
    assert len([x for x in os.listdir(two) if not (two / x).is_symlink() and not x.endswith(".part")]) == 1


def test_a_path_that_is_a_link_to_a_folder(two):
    link = two.parent / "link"
    link.symlink_to(two)
    jr.save(link, None, NEXT)
    assert_same(jr.restore(link, None, NEXT), NEXT)
    assert link.is_symlink()
    assert_alone(two, NEXT)


# --- names of paths


INSIDE = ["checkpoint_1", "checkpoint_1/", "checkpoint_1/arrays", "checkpoint_1/new/deeper", "latest"]


@pytest.mark.parametrize("wait", [True, False])
@pytest.mark.parametrize("inside", INSIDE)
def test_a_save_into_a_checkpoint_is_refused(two, inside, wait):
    (two / "latest").symlink_to("checkpoint_1")
    before = tree(two)
    with pytest.raises(ValueError, match=re.escape(str(two)) + r"(?!/)"):  # what to pass
        jr.save(f"{two}/{inside}", None, NEXT, wait=wait)
    assert tree(two) == before
    assert which(two, OLD, NEW) == 1


def test_a_path_may_have_the_name_of_a_checkpoint(tmp_path):
    path = tmp_path / "checkpoint_1"
    for one in (OLD, NEW):
        jr.save(path, None, one)
        assert_same(jr.restore(path, None, one), one)
    assert_alone(path, NEW)


# --- files that vanish while they are written


def vanishes(path):
    path.unlink()


def is_emptied(path):
    os.truncate(path, 0)


@pytest.mark.parametrize("wait", [True, False])
@pytest.mark.parametrize(
    ("name", "change"),
    [("first chunk", vanishes), ("last chunk", vanishes), rarely(("last chunk", is_emptied)), ("array", vanishes)],
)
def test_a_file_that_is_lost_before_a_save_completes_is_an_error(tmp_path, name, change, wait):
    """Once all are written, and before the package looks again."""
    jr.save(tmp_path / "like", None, NEW)
    written = {x.relative_to(tmp_path / "like" / "checkpoint_0") for x in chunks(tmp_path / "like" / "checkpoint_0")}
    assert len(written) == 3
    path, lost = tmp_path / "run", []
    jr.save(path, None, OLD)

    def lose(*_):
        part = path / "checkpoint_1.part"
        if not lost and all((part / x).exists() for x in written):
            files = [folder / ".zarray" for folder in array_folders(part)] if name == "array" else chunks(part)
            lost.append(files[0 if name == "first chunk" else -1])
            change(lost[0])

    with (
        hooked(path, lose, [*OPENS, (os, "stat"), (os, "lstat"), (os, "fsync")]),
        pytest.raises(OSError, match="checkpoint_1"),
    ):
        jr.save(path, None, NEW, wait=wait)()
    assert len(lost) == 1
    assert_alone(path, OLD)
    jr.save(path, None, NEXT)
    assert_alone(path, NEXT)


# --- saves in the background that fail


def fail_in_background(path):
    tried = threading.Event()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "rename", lambda *_: tried.set() or refuse())
        jr.save(path, None, NEW, wait=False)
        assert tried.wait(WITHIN)
    until(lambda: not parts(path))


def parts(path):
    return [name for name in os.listdir(path) if name.endswith(".part")]


@pytest.mark.parametrize("wait", [True, False])
@pytest.mark.parametrize("other", ["run", "other"])
def test_a_save_in_the_background_that_failed_unseen_is_told_by_the_next(tmp_path, other, wait):
    jr.save(tmp_path / "run", None, OLD)
    fail_in_background(tmp_path / "run")
    with pytest.raises(OSError, match=r"(?s)run.*Read-only|Read-only.*run"):
        jr.save(tmp_path / other, None, NEXT, wait=wait)()
    assert_alone(tmp_path / "run", OLD)
    for one in (NEW, NEXT):
        jr.save(tmp_path / other, None, one, wait=wait)()
    assert_alone(tmp_path / other, NEXT)


FAILS_UNSEEN = """
    import errno, os, resource, sys
    import numpy as np
    import jaxreplay as jr

    def refuse(*_, **__):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    if sys.argv[2] == "the name":
        os.rename = refuse
    else:
        resource.setrlimit(resource.RLIMIT_FSIZE, (5000, resource.RLIM_INFINITY))  # as with a full disk
    x = np.random.default_rng(0).integers(1, 256, 10**5, np.uint8)
    jr.save(sys.argv[1], None, x, wait=False)
    sys.exit(int(sys.argv[3]))
"""
TOLD = {"the name": "Read-only file system", "the arrays": "File too large"}


@pytest.mark.parametrize(("what", "status"), [("the name", 0), rarely(("the name", 3)), rarely(("the arrays", 0))])
def test_a_save_in_the_background_that_failed_unseen_is_told_at_the_end_of_a_program(two, what, status):
    done = run_program(FAILS_UNSEEN, two, what, status)
    assert TOLD[what] in done.stderr
    assert str(two) in done.stderr
    assert done.returncode == status or (status == 0 and done.returncode == 1)
    assert which(two, OLD, NEW) == 1


# --- what else is in the folder


def linked(target):
    return lambda place: place.symlink_to(target)


OTHERS = {
    "dangling link": linked("nowhere"),
    "link to itself": linked("checkpoint_5"),
    "link to a file": linked("checkpoint_1/description.json"),
    "file": lambda place: place.write_text("text"),
    "FIFO": os.mkfifo,
}


@pytest.mark.parametrize("name", OTHERS)
def test_what_else_is_in_the_folder_makes_nothing_hang(two, name, capsys):
    OTHERS[name](two / "checkpoint_5")
    with warnings.catch_warnings(), in_time():
        warnings.simplefilter("ignore")  # it may be told
        assert which(two, OLD, NEW) == 1
        assert main([str(two)]) == 0
        assert_same(jr.restore(two, None, OLD, step=0), OLD)
        jr.save(two, None, NEXT)
        assert_same(jr.restore(two, None, NEXT), NEXT)
    assert "arrays and numbers" in capsys.readouterr().out


@pytest.mark.parametrize("name", OTHERS)
def test_a_folder_with_nothing_to_restore_is_an_error_at_once(tmp_path, name, capsys):
    OTHERS[name](tmp_path / "checkpoint_5")
    with in_time():
        for step in (None, 1):
            with pytest.raises((FileNotFoundError, ValueError), match=r"no complete checkpoint|is damaged"):
                jr.restore(tmp_path, None, NEW, step=step)
        assert main([str(tmp_path)]) == 2
    assert "python -m jaxreplay: " in capsys.readouterr().err


# --- errors that are no damage


NUMBERS = ["EMFILE", "EACCES", *map(rarely, ["ENFILE", "EIO", "ESTALE"])]


@pytest.mark.parametrize("how", ["opening", "reading"])
@pytest.mark.parametrize("name", NUMBERS)
def test_an_error_of_the_system_is_no_damage(two, name, how):
    """At each of the calls by which a restore opens, lists or reads something: that error, and no older state."""
    number, errors = getattr(errno, name), 0
    assert which(two, OLD, NEW) == 1
    for first in itertools.count():
        fails = Fails(number, first)
        context = hooked(two, fails) if how == "opening" else unreadable(number, first)
        with context as counted:
            try:
                found = which(two, OLD, NEW)
            except OSError as error:
                found = error.errno
                errors += 1
        assert found in (1, number)
        if not (fails if how == "opening" else counted).has_failed:
            break
    assert errors > 0
    assert which(two, OLD, NEW) == 1


@pytest.mark.parametrize("name", ["make_array_from_callback", "device_put"])
def test_an_error_of_jax_is_no_damage(two, name, monkeypatch):
    def fails(*_, **__):
        raise ValueError("of JAX")

    sharding = NamedSharding(Mesh(np.array(jax.devices("cpu")[:2]), ("x",)), PartitionSpec("x"))
    like = {name: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding) for name, x in NEW.items() if name != "n"}
    assert which(two, OLD, NEW, like=like | {"n": 0}) == 1
    monkeypatch.setattr(jax, name, fails)
    try:
        found = jr.restore(two, None, like | {"n": 0})
    except ValueError as error:
        assert str(error) == "of JAX"  # noqa: PT017
    else:  # made without it
        assert_same(found, NEW)


# --- files of other programs in a checkpoint


def test_files_of_operating_systems_in_a_checkpoint_are_ignored(two, capsys):
    newest = two / "checkpoint_1"
    for folder in (newest, newest / "arrays", array_folders(newest)[0]):
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
EXPLICIT = Mesh(np.array(jax.devices("cpu")[:4]), ("data",), axis_types=(AxisType.Explicit,))
ON_MESH = jr.Sharded(buffer=jr.ReplayBuffer(capacity=8, sampler=jr.Prioritized(), donate=False), mesh=EXPLICIT)


N_STEP = jr.NStep(n=2, gamma=0.9, num_envs=8)


def made_on_mesh():
    x = np.arange(8, dtype=np.float32)
    tracer = N_STEP.init(*[x] * 6)
    keys = {"key": jax.random.key(3), "keys": jax.random.split(jax.random.key(1), 4)}
    return keys | {"replay": ON_MESH.add(ON_MESH.init(x), x), "tracer": tracer, "params": jnp.arange(4), "n": 3}


@pytest.mark.parametrize("inside", [("save", "like", "restore"), ("like",), ("restore",), rarely(((),))])
def test_shapes_on_a_mesh_of_explicit_axes_are_restored(tmp_path, inside):
    config = {"replay": ON_MESH, "tracer": N_STEP}

    def context(name):
        return on_mesh(EXPLICIT) if name in inside else contextlib.nullcontext()

    saved = made_on_mesh()
    with context("save"):
        jr.save(tmp_path, config, saved)
    with context("like"):
        like = jax.eval_shape(made_on_mesh)
    with context("restore"):
        found = jr.restore(tmp_path, config, like)
    assert_same(found, saved)
    replay = found.pop("replay")
    for x, y in zip(jax.tree.leaves(replay), jax.tree.leaves(saved["replay"]), strict=True):
        assert x.sharding.is_equivalent_to(y.sharding, x.ndim)
    for x in jax.tree.leaves(found):
        assert isinstance(x, int) or x.sharding.device_set == {jax.devices()[0]}
