"""Files that an earlier version wrote come back bit for bit."""

import re
import zipfile

import recorded
from checkpoint_runs import assert_same

import jaxreplay as jr
from jaxreplay.checkpoint._checkpoint import open_saved
from jaxreplay.checkpoint._names import CLASSES


def test_states_of_every_kind_come_back_from_a_recorded_file(tmp_path):
    zipfile.ZipFile(recorded.FILE).extractall(tmp_path)
    structure = open_saved(tmp_path)[0]["structure"]
    named = set(re.findall(r"'jaxreplay:(\w+)'", str(structure)))
    for file, (config, later_states) in recorded.LATER.items():
        folder = tmp_path / f"of {file.stem}"
        zipfile.ZipFile(file).extractall(folder)
        named |= set(re.findall(r"'jaxreplay:(\w+)'", str(open_saved(folder)[0]["structure"])))
        assert_same(jr.restore(folder, config), later_states())
    assert named == set(CLASSES), "record new kinds of states in another file"
    states = recorded.states()
    states["replay of a TPU"] = states["replay"]  # in the layout of this backend
    # A `Bound` is restored with `like`, which has its configuration.
    like = {name: states[name] for name in ("bound", "bound buffer")}
    assert_same(jr.restore(tmp_path, recorded.CONFIG, like=like), states)
