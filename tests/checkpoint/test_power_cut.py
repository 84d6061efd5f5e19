"""The power fails: what a disk has at that moment is mounted again, and a checkpoint that `save` has reported is there.

A file with a file system stands for the disk; its copy, of one moment, is what is left. It needs a machine where one
may mount such files. Elsewhere only the order of fsync, rename and unlink is tested: see test_interrupted.py.
"""

import filecmp
import itertools
import os
import random
import shutil
import signal
import subprocess
import time

import pytest
from checkpoint_runs import filled, numbers_in
from faults import Child

import jaxreplay as jr


def save_for_ever(path, connection):
    """Save states of growing numbers until killed, and tell the number of each that is saved."""
    for number in itertools.count():
        jr.save(path, None, filled(number))
        connection.send(("saved", number))


def mount(image, folder):
    folder.mkdir(exist_ok=True)
    return subprocess.run(["mount", "-o", "loop", image, folder], capture_output=True).returncode == 0


if os.geteuid() == 0 and shutil.which("mkfs.ext4") is not None and os.path.exists("/dev/loop-control"):

    @pytest.mark.slow
    def test_what_was_saved_before_a_power_cut_is_there_after_it(tmp_path, children):
        image, copy, disk, after = (tmp_path / name for name in ("image", "copy", "disk", "after"))
        image.write_bytes(b"")
        os.truncate(image, 2**26)
        subprocess.run(["mkfs.ext4", "-q", image], check=True)
        if not mount(image, disk):
            return  # a container that may not
        child, rng = Child(children, save_for_ever, disk / "run"), random.Random(0)
        try:
            child.wait("saved", 1)
            for _ in range(20):  # at any moment of any save, however long one takes here
                begin, saves = time.monotonic(), rng.randrange(2, 6)
                child.wait("saved", child.last["saved"] + saves)
                time.sleep(rng.random() * (time.monotonic() - begin) / saves)
                child.read()
                os.kill(child.process.pid, signal.SIGSTOP)
                copy.write_bytes(b"")
                while not filecmp.cmp(image, copy, shallow=False):  # else it has changed while it was copied
                    shutil.copyfile(image, copy)
                assert mount(copy, after)
                try:
                    (restored,) = numbers_in(jr.restore(after / "run", None, like=filled(0)))
                finally:
                    subprocess.run(["umount", after], check=True)
                assert restored >= child.last["saved"]
                os.kill(child.process.pid, signal.SIGCONT)
        finally:
            child.process.kill()
            child.process.join()
            subprocess.run(["umount", disk], check=True)
