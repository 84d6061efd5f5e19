"""What operators do to the folders of checkpoints, and what befalls them: nothing good is lost, nothing hangs."""

import contextlib
import errno
import itertools
import os
import pathlib
import re
import shutil
import tempfile
import threading
import time
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checkpoint_runs import N_STEP, assert_same, environment_step
from faults import (
    OPENS,
    WITHIN,
    Fails,
    array_folders,
    assert_alone,
    chunks,
    hooked,
    in_child,
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


NAMES = {
    "backslash": "a\\b",
    "backslash at the end": "a\\",
    "of addresses": "a%20b?c=d#e|f:",
    "not of ASCII": "\u00fc \u0663",
    "new line": "a\nb",
}


@pytest.mark.parametrize("below", ["", "run"])
@pytest.mark.parametrize("name", NAMES)
def test_a_path_with_an_odd_name_works_or_is_refused(tmp_path, name, below):
    path, refused = tmp_path / NAMES[name] / below, ""
    try:
        for one in (OLD, NEW):
            jr.save(path, None, one)
            assert_same(jr.restore(path, None, one), one)
    except ValueError as error:
        refused = str(error)
    if refused:
        assert "damaged" not in refused
        assert os.listdir(tmp_path) == []
        assert name != "not of ASCII"
    else:
        assert_alone(path, NEW)


def test_a_checkpoint_that_is_moved_below_a_backslash_works_or_is_refused(two):
    path, refused = two.rename(two.parent / "a\\b"), ""
    try:
        found = which(path, OLD, NEW)
    except ValueError as error:
        found, refused = 1, str(error)
    assert found == 1
    assert "damaged" not in refused


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


def copied(name, source="checkpoint_0"):
    return lambda path: shutil.copytree(path / source, path / name)


def moved(source, name):
    return lambda path: (path / source).rename(path / name)


def linked(name, target):
    return lambda path: (path / name).symlink_to(target)


def then(*changes):
    return lambda path: [change(path) for change in changes]


OTHERS = {  # and which of the two is the newest then
    "dangling link": linked("checkpoint_5", "nowhere"),
    "dangling link to a disk": linked("checkpoint_5", "/nowhere/checkpoint_5"),
    "link to itself": linked("checkpoint_5", "checkpoint_5"),
    "link to a file": then(lambda path: (path / "file").touch(), linked("checkpoint_5", "file")),
    "file": lambda path: (path / "checkpoint_5").write_text("text"),
    "FIFO": lambda path: os.mkfifo(path / "checkpoint_5"),
    "zeros before the number": lambda path: (path / "checkpoint_007").mkdir(),
    "zeros before the number, a copy": copied("checkpoint_007"),
    "zeros beside the number": then(moved("checkpoint_1", "checkpoint_7"), copied("checkpoint_007")),
    "another digit": lambda path: (path / "checkpoint_\u0663").mkdir(),
    "another digit, a copy": copied("checkpoint_\u0663"),
    "another digit beside the number": then(moved("checkpoint_1", "checkpoint_3"), copied("checkpoint_\u0663")),
    "a long number": lambda path: (path / f"checkpoint_{'9' * 40}").mkdir(),
    "a sign": then(*(lambda path, x=x: (path / f"checkpoint_{x}").mkdir() for x in ("-3", "+3", "3_0", " 3", "3\n"))),
}
MAY_BE_RESTORED = ("zeros before the number, a copy", "another digit, a copy")


@pytest.mark.parametrize("name", OTHERS)
def test_what_else_is_in_the_folder_makes_nothing_hang(two, name, capsys):
    OTHERS[name](two)
    with warnings.catch_warnings(), in_time():
        warnings.simplefilter("ignore")  # it may be told
        allowed = (0, 1) if name in MAY_BE_RESTORED else (1,)
        assert which(two, OLD, NEW) in allowed
        assert main([str(two)]) == 0
        assert_same(jr.restore(two, None, OLD, step=0), OLD)
        jr.save(two, None, NEXT)
        assert_same(jr.restore(two, None, NEXT), NEXT)
    assert "arrays and numbers" in capsys.readouterr().out


@pytest.mark.parametrize("name", [x for x in OTHERS if x not in MAY_BE_RESTORED and "beside" not in x])
def test_a_folder_with_nothing_to_restore_is_an_error_at_once(two, name, capsys):
    OTHERS[name](two)
    for number in (0, 1):
        shutil.rmtree(two / f"checkpoint_{number}")
    with in_time():
        for step in (None, 1):
            with pytest.raises((FileNotFoundError, ValueError), match=r"no complete checkpoint|is damaged"):
                jr.restore(two, None, NEW, step=step)
        assert main([str(two)]) == 2
    assert "python -m jaxreplay: " in capsys.readouterr().err


CLOSED = {"newest": "checkpoint_1", "only": "checkpoint_1", "all": ""}  # of a folder with this name


def restore_as_nobody(path):
    """What the program returns for a user who may list a folder and not enter it; a restore raises an error."""
    jr.restore(path / "mine", None, OLD)
    if os.geteuid() == 0:  # who may enter all
        os.setgid(65534)
        os.setuid(65534)
    found = {}
    for name in CLOSED:
        with in_time(), pytest.raises(PermissionError):
            jr.restore(path / name, None, OLD)
        with in_time():
            found[name] = main([str(path / name)])
    return found


def test_a_folder_that_may_be_listed_and_not_entered(two_saved, children):
    with tempfile.TemporaryDirectory() as folder:  # which others may enter
        path = pathlib.Path(folder)
        path.chmod(0o755)
        for name in ("mine", *CLOSED):
            shutil.copytree(two_saved, path / name)
        shutil.rmtree(path / "only" / "checkpoint_0")
        for name, closed in CLOSED.items():
            (path / name / closed).chmod(0o444)
        try:
            assert in_child(children, restore_as_nobody, path) == dict.fromkeys(CLOSED, 2)
        finally:
            for name, closed in CLOSED.items():
                (path / name / closed).chmod(0o755)


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


def foreign(name):
    def change(checkpoint):
        at = array_folders(checkpoint)[0] / name
        at.parent.mkdir(exist_ok=True)
        shutil.copy(chunks(checkpoint)[1], at)

    return change


@pytest.mark.parametrize("name", ["7", "1", "0.0", "00", "-1", "0.__lock", "../9/0", "../8/.zarray"])
def test_a_foreign_file_with_the_name_of_a_chunk_is_never_read_into_a_state(two, name):
    foreign(name)(two / "checkpoint_1")
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        found = which(two, OLD, NEW)
    assert found == 1 - len(told)
    assert all("checkpoint_1: the checkpoint is damaged" in str(x.message) for x in told)


# --- shapes from jax.eval_shape on a mesh


on_mesh = getattr(jax, "set_mesh", None) or jax.sharding.use_mesh  # its name before jax 0.8
EXPLICIT = Mesh(np.array(jax.devices("cpu")[:4]), ("data",), axis_types=(AxisType.Explicit,))
ON_MESH = jr.Sharded(buffer=jr.ReplayBuffer(capacity=8, sampler=jr.Prioritized(), donate=False), mesh=EXPLICIT)


def made_on_mesh():
    x = np.arange(8, dtype=np.float32)
    tracer = N_STEP.init(*environment_step(jax.random.key(0)))
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


# --- a writer that is slow


def save_slowly(path, where, connection):
    """Save, with a pause after the call that makes the folder of a checkpoint, or before the one that names it."""
    jax.config.update("jax_platforms", "cpu")

    def paused(call):
        times = itertools.count()

        def replaced(first, *arguments, **named):
            if not str(first).endswith(".part") or next(times) > 0:
                return call(first, *arguments, **named)
            found = call(first, *arguments, **named) if where == "made" else None
            connection.send("here")
            connection.recv()
            return found if where == "made" else call(first, *arguments, **named)

        return replaced

    for name in ["mkdir"] if where == "made" else ["rename", "replace"]:
        setattr(os, name, paused(getattr(os, name)))
    try:
        jr.save(path, None, NEW)
        connection.send("saved")
    except OSError as error:
        connection.send(str(error))


@pytest.mark.parametrize("where", ["made", "named"])
def test_a_writer_that_is_slow_and_one_that_is_not(tmp_path, children, where):
    """Neither writes into what the other writes, and neither deletes it."""
    jr.save(tmp_path, None, OLD)
    ours, theirs = children.Pipe()
    process = children.Process(target=save_slowly, args=(tmp_path, where, theirs))
    process.start()
    theirs.close()
    go_on = threading.Timer(2, ours.send, [None])  # the quick one may wait for it
    try:
        assert ours.poll(120)
        assert ours.recv() == "here"
        go_on.start()
        jr.save(tmp_path, None, NEXT)
        if not go_on.finished.is_set():
            go_on.cancel()
            ours.send(None)
        assert ours.poll(WITHIN)
        assert ours.recv() == "saved"
    finally:
        go_on.cancel()
        process.kill()
        process.join()
    assert which(tmp_path, OLD, NEXT, NEW) > 0
    jr.save(tmp_path, None, OLD)
    assert_alone(tmp_path, OLD)
