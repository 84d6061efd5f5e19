"""Vaults of flashbax: what is read is what flashbax reads. `vectors/record_flashbax.py` has recorded them."""

import functools
import json
import pathlib
import shutil

import jax
import numpy as np
import pytest
import tensorstore
from helpers import rejects

import jaxreplay as jr

RECORDED = pathlib.Path(__file__).parents[1] / "vectors" / "vaults.tar.xz"


@pytest.fixture
def vaults(tmp_path):
    shutil.unpack_archive(RECORDED, tmp_path, filter="data")
    return tmp_path / "vaults"


def read(vaults, name, added):
    """A vault as `Steps`, compared with what flashbax reads; names of the rows that are `added`."""
    steps, by_flashbax = jr.datasets.from_vault(vaults / name / "recorded"), np.load(vaults / f"{name}.npz")
    found = {jax.tree_util.keystr(path): x for path, x in jax.tree_util.tree_leaves_with_path(steps.rows)}
    assert found.keys() - by_flashbax.keys() == added
    for path, x in by_flashbax.items():
        np.testing.assert_array_equal(found[path], np.swapaxes(x, 0, 1), strict=True)
    return steps


def test_a_vault_of_steps_and_its_recording_go_to_buffers(vaults):
    steps = read(vaults, "single.vlt", added={"['step']"})
    np.testing.assert_array_equal(steps.ends, (np.arange(12)[:, None] + 1) % [[4, 6]] == 0)
    assert steps.rows["step"].all()
    with jr.datasets.Recorder(vaults / "recording") as recorder:
        recorder.add(*steps)
    for found in (steps, jr.datasets.load(vaults / "recording")):
        jax.tree.map(functools.partial(np.testing.assert_array_equal, strict=True), found, steps)
        buffer = jr.SequenceBuffer(length=12, num_envs=2, sequence_length=2)
        assert int(buffer.size(buffer.add(buffer.init(found.rows), found.rows, ends=found.ends))) == 22
        batch = jr.datasets.transitions(*found, n=1)
        # The first environment's steps are terminated or go on; two of the second's are cut off, without observation.
        assert sorted(batch.A.tolist()) == sorted([*range(12), *(x + 1 for x in range(12) if x not in (5, 11))])
        assert {int(x) for x in batch.A[np.asarray(batch.In) == 0]} == {3, 7, 11}
        replay = jr.ReplayBuffer(capacity=batch.batch_size)
        assert int(replay.size(replay.add(replay.init(batch), batch))) == 22


def test_what_a_vault_of_steps_lacks_is_added(vaults):
    path = vaults / "single.vlt" / "recorded" / "metadata.json"
    metadata = json.loads(path.read_text())
    del metadata["structure_shape"]["truncated"]
    path.write_text(json.dumps(metadata))
    rows = jr.datasets.from_vault(path.parent).rows
    assert {*rows} == {"observation", "action", "reward", "terminated", "truncated", "step"}
    assert not rows["truncated"].any()
    assert jr.datasets.from_vault(path.parent, names={x: x for x in metadata["structure_shape"]}).rows.keys() == {*rows}


def test_a_vault_of_several_agents(vaults):
    steps = read(vaults, "several.vlt", added=set())
    assert np.flatnonzero(steps.ends[:, 0]).tolist() == [5, 11], "an episode ends with its last agent"


def make_vault(path, structure, **arrays):
    """A vault of arrays, or of Zarr's metadata for arrays without a chunk."""
    path.mkdir()
    (path / "metadata.json").write_text(json.dumps({"structure_shape": structure}))
    for name, x in arrays.items():
        base = {"driver": "file", "path": f"{path}/"}
        kvstore = {"driver": "ocdbt", "base": base, "path": name.replace("__", ".") + ("." * (name != "vault_index"))}
        spec = {"driver": "zarr", "kvstore": kvstore, "create": True}
        if isinstance(x, dict):
            tensorstore.open(spec | {"metadata": x}).result()
        else:
            tensorstore.open(spec, dtype=x.dtype, shape=x.shape).result()[...] = x
    return path


def zarr(*shape, dtype="|b1", chunk=3):
    return {"shape": [*shape], "chunks": [1, chunk], "dtype": dtype}


DONE, THREE, HUGE = np.array([[False, True, False]]), np.array([3], np.int32), 2**50


def test_an_episode_of_agents_with_leaves_of_their_own_ends_with_the_last(tmp_path):
    structure = {"done": {"first": "(1, 3)", "second": "(1, 3)"}}
    both = DONE | [[False, False, True]]
    path = make_vault(tmp_path / "run", structure, done__first=DONE, done__second=both, vault_index=THREE)
    assert jr.datasets.from_vault(path).ends[:, 0].tolist() == [False, True, False]


@pytest.mark.parametrize(
    ("structure", "arrays", "message"),
    [
        ({"done": ""}, {"done": zarr(1, HUGE), "vault_index": np.array([HUGE])}, "do not fit in the memory"),
        ({"done": ""}, {"done": zarr(HUGE, 3)}, "do not fit in the memory"),
        ({"done": ""}, {"done": zarr(1, 3, chunk=HUGE)}, "do not fit in the memory"),
        ({"done": ""}, {"vault_index": np.array([-1])}, "interval"),
        ({"done": ""}, {"vault_index": np.array([4])}, "OUT_OF_RANGE"),
        ({"done": ""}, {"vault_index": np.array([np.nan])}, "NaN"),
        ({"done": ""}, {"vault_index": np.array(3)}, "dimension"),
        ({"done": ""}, {"done": DONE[0]}, "dimension"),
        ({"done": "", "x": ""}, {"x": np.zeros((2, 3))}, "leading axes"),
        ({"done": ""}, {"done": zarr(1, 3, dtype="|S3")}, "numbers or bools"),
        (["done"], {}, "SequenceKey"),
        (None, {}, "no arrays"),
        ({"done": None}, {}, "no arrays"),
        ({"done": None, "x": ""}, {"x": DONE}, "no flag of ends"),
        ({"../done": ""}, {}, "NOT_FOUND"),
        ({"\udcff": ""}, {}, "str"),
    ],
)
def test_vaults_of_strangers(tmp_path, structure, arrays, message):
    path = make_vault(tmp_path / "run", structure, **{"done": DONE, "vault_index": THREE} | arrays)
    rejects(f"{path}: .*{message}", jr.datasets.from_vault, path)


def test_structures_of_strangers(tmp_path):
    path = make_vault(tmp_path / "run", {}, done=DONE, vault_index=THREE)
    for text in ("[]", "1", "{}", "{" * 10**5, '{"structure_shape": ' + '{"a":' * 10**5 + "1" + "}" * 10**5 + "}"):
        (path / "metadata.json").write_text(text)
        rejects(f"{path}: is no vault with a metadata.json, or damaged", jr.datasets.from_vault, path)


def test_names_of_ones_own(vaults):
    names = {"action": "reward", "reward": "action", "terminated": "action", "cut": "truncated"}
    rows = jr.datasets.from_vault(vaults / "single.vlt" / "recorded", names=names).rows
    assert [rows[name].dtype for name in names] == [np.float32, np.int32, np.bool_, np.bool_]
    assert not rows["truncated"].any()


def test_what_is_refused(vaults):
    path = vaults / "several.vlt" / "recorded"
    names = {"observation": "observations", "action": "actions", "reward": "rewards", "terminated": "terminals"}
    rejects(r"leaf \['reward'\]: got float32\[12, 1, 2\]", jr.datasets.from_vault, path, names=names)
    rejects("the vault has actions, infos", jr.datasets.from_vault, path, names={"reward": "return"})
    rejects("rows: no action, reward, terminated", jr.datasets.from_vault, path, names={"observation": "infos"})
    rejects("no flag of ends", jr.datasets.from_vault, path, names={"x": "terminals", "y": "truncations"})
    rejects("metadata.json", jr.datasets.from_vault, path.parent)
    rejects("is no vault", jr.datasets.from_vault, RECORDED)
    shutil.rmtree(path / "d")
    rejects("recorded: is no vault .*, or damaged", jr.datasets.from_vault, path)
