"""What a checkpoint may not do: name classes that run code, or claim what is not there."""

import contextlib
import importlib
import importlib.metadata
import json
import pathlib
import shutil
import sys
import tracemalloc
import types
import zlib
from typing import Any, NamedTuple

import flax.struct
import jax
import jax.numpy as jnp
import optax
import pytest
from checkpoint_runs import assert_same, rewrite_manifest
from flax.core import FrozenDict
from flax.training.train_state import TrainState

import jaxreplay as jr
from jaxreplay import checkpoint
from jaxreplay.__main__ import main
from jaxreplay.checkpoint._checkpoint import open_saved
from jaxreplay.checkpoint._names import CLASSES

pytestmark = pytest.mark.versions
HERE = sys.modules[__name__]
made = []


class Pair(NamedTuple):
    x: Any
    y: Any


class Outer:
    class Inner(NamedTuple):
        x: Any


@flax.struct.dataclass
class Watched:
    """Notes that it was made."""

    x: Any
    name: str = flax.struct.field(pytree_node=False)

    def __post_init__(self):
        made.append(self.name)


function = Pair  # another name of the class


@pytest.fixture
def unimported(tmp_path, monkeypatch):
    """The name of a module that can be imported, and has not been."""
    source = "from typing import NamedTuple\nclass Pair(NamedTuple):\n    x: int\n    y: int"
    (tmp_path / "never_imported.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    importlib.invalidate_caches()
    yield "never_imported"
    assert "never_imported" not in sys.modules


def named(path, name):
    """A checkpoint that names a class."""
    jr.save(path, None, {"x": [Pair(jnp.arange(2), 5)]})
    rewrite_manifest(path, lambda content: content["structure"][1][0][1][1][0].__setitem__(1, name))


def test_no_module_is_imported_because_a_file_names_it(tmp_path, unimported, capsys):
    path, state = tmp_path / "run", {"x": [Pair(jnp.arange(2), 5)]}
    named(path, f"{unimported}:Pair")
    for allow in ((), HERE, [optax, Watched]):
        message = (
            r"never_imported.Pair at \['x'\]\[0\]: restore builds no.* like= .*same place.*allow=\(never_imported,\)"
        )
        with pytest.raises(ValueError, match=message):
            jr.restore(path, None, allow=allow)
    assert main([str(path)]) == 0
    assert "x" in capsys.readouterr().out
    assert_same(jr.restore(path, None, like=state), state)  # by a class of the same name, wherever that lives now


@pytest.mark.parametrize(
    "name",
    [
        *("os:system", "builtins:eval", "os.path:join", ":Pair", "jaxreplay:Pair", "jaxreplay:ReplayBuffer"),
        *(f"test_checkpoint_trust:{name}" for name in ("pytest", "made", "function", "Outer", "")),
    ],
)
def test_what_is_no_such_class_is_refused_although_its_module_is_allowed(tmp_path, name):
    import os

    named(tmp_path, name)
    with pytest.raises(ValueError, match=r"restore builds no|is no longer the saved namedtuple"):
        jr.restore(tmp_path, None, allow=(os, os.path, sys.modules["builtins"], HERE, jr))


def test_classes_come_from_what_is_allowed(tmp_path):
    state = {"a": Pair(jnp.arange(2), None), "b": Outer.Inner(jnp.ones(1)), "c": Watched(jnp.zeros(1), "name")}
    jr.save(tmp_path, None, state)
    made.clear()
    with pytest.raises(
        ValueError, match=r"\.Pair at \['a'\]; \S+Outer\.Inner at \['b'\]; \S+Watched at \['c'\]: restore"
    ):
        jr.restore(tmp_path, None)
    with pytest.raises(ValueError, match=r"trust\.Watched at \['c'\]: restore builds no"):
        jr.restore(tmp_path, None, like={"b": Outer.Inner(None)}, allow=Pair)
    with pytest.raises(ValueError, match=r"allow: got 'optax'; expected modules and classes, such as allow=\(optax"):
        jr.restore(tmp_path, None, allow="optax")
    assert made == []
    for allow in (HERE, [optax, HERE], {Pair, Outer.Inner, Watched}):
        assert_same(jr.restore(tmp_path, None, allow=allow), state)
        assert "name" in made
    assert_same(jr.restore(tmp_path, None, like={"a": None, "c": state["c"]}, allow=(Pair, Outer.Inner)), state)
    with pytest.raises(ValueError, match=r"like\['c'\], static name: saved 'name', given 'other'"):
        jr.restore(tmp_path, None, like={"c": Watched(None, "other")}, allow=HERE)


@pytest.mark.parametrize("count", [5, 6])
def test_five_classes_are_named_and_how_many_more(tmp_path, count):
    jr.save(tmp_path, None, [Pair(jnp.arange(2), None)] * count)
    with pytest.raises(ValueError, match=r"Pair at \[4\]( \(and 1 more\))?: restore builds no") as error:
        jr.restore(tmp_path, None)
    assert ("more" in str(error.value)) == (count == 6)


def test_a_module_stands_for_those_inside_it_and_runs_nothing(tmp_path, monkeypatch):
    outer, inner = types.ModuleType("outer_module"), types.ModuleType("outer_module.inner")
    inner.Pair = type("Pair", (Pair,), {"__module__": "outer_module.inner"})
    outer.__getattr__ = inner.__getattr__ = lambda name: pytest.fail("was run")
    for module in (outer, inner):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    named(tmp_path, "outer_module.inner:Pair")
    assert isinstance(jr.restore(tmp_path, None, allow=outer)["x"][0], inner.Pair)
    assert isinstance(jr.restore(tmp_path, None, allow=inner.Pair)["x"][0], inner.Pair)
    other = types.ModuleType("outer")
    with pytest.raises(ValueError, match="restore builds no"):
        jr.restore(tmp_path, None, allow=other)
    named(tmp_path, "outer_module:Other")
    with pytest.raises(ValueError, match="restore builds no"):
        jr.restore(tmp_path, None, allow=outer)


def test_an_agent_comes_back_with_like(tmp_path):
    """States of Flax and optax, as agents have them."""
    optimizer = optax.chain(optax.clip(1.0), optax.adam(1e-3))
    params = FrozenDict({"w": jnp.ones((2, 3)), "b": [jnp.zeros(3)]})
    train = TrainState.create(apply_fn=print, params=params, tx=optimizer)
    state = {"train": train, "params": params, "opt": optimizer.init(params)}
    jr.save(tmp_path, None, state)
    like = jax.eval_shape(lambda: state)
    assert_same(jr.restore(tmp_path, None, like=like), state)
    with pytest.raises(ValueError, match=r"like: must have a TrainState at \['train'\]"):
        jr.restore(tmp_path, None, like={"opt": like["opt"]})
    with pytest.raises(ValueError, match=r"at \['opt'\]\[0\].*such as .*init\(params\) or .*allow=\(optax,\)"):
        jr.restore(tmp_path, None, like={"train": like["train"]})
    assert_same(jr.restore(tmp_path, None, like={"train": like["train"]}, allow=optax), state)


def modules():
    """All of the package's, imported."""
    folder = pathlib.Path(jr.__file__).parent
    for file in sorted(folder.rglob("*.py")):
        if file.name != "__main__.py":
            parts = file.relative_to(folder.parent).with_suffix("").parts
            yield importlib.import_module(".".join(parts[:-1] if parts[-1] == "__init__" else parts))


def test_every_state_class_has_a_name_in_files_that_no_module_is_in():
    found = {
        cls
        for module in modules()
        for cls in vars(module).values()
        if isinstance(cls, type) and cls.__module__.startswith("jaxreplay") and hasattr(cls, "_flax_dataclass")
    }
    assert {jr.buffers.SequenceState, jr.Bound, jr.sum_tree.SumTree} < found
    # A `Bound` is restored with `like`, which has its configuration.
    assert found - {jr.Bound} <= set(CLASSES.values()), "add what is missing to CLASSES"
    assert len(set(CLASSES.values())) == len(CLASSES)
    assert all(name.isidentifier() for name in CLASSES)
    for name, cls in CLASSES.items():
        assert checkpoint._names.class_name(cls) == f"jaxreplay:{name}"
        assert checkpoint._names.own_class(f"jaxreplay:{name}") is cls


def test_a_bound_configuration_comes_back_with_like(tmp_path):
    """A checkpoint has no configurations to build, and so no name for `Bound`."""
    buffer = jr.ReplayBuffer(capacity=4)
    bound = jr.bind(buffer, buffer.init(jnp.zeros(1)))
    jr.save(tmp_path, buffer, {"bound": bound})
    with pytest.raises(ValueError, match=r"like: must have a Bound at \['bound'\]"):
        jr.restore(tmp_path, buffer, allow=jr)
    assert_same(jr.restore(tmp_path, buffer, like={"bound": bound}), {"bound": bound})


def test_a_state_without_a_name_is_not_saved_by_its_module(tmp_path, monkeypatch):
    @flax.struct.dataclass
    class New:
        x: Any

    New.__module__, New.__qualname__ = "jaxreplay.buffers._replay", "New"
    monkeypatch.setattr(sys.modules["jaxreplay.buffers._replay"], "New", New, raising=False)
    jr.save(tmp_path, None, New(jnp.arange(2)))
    with pytest.raises(ValueError, match="like: must have a New at <root>"):
        jr.restore(tmp_path, None, allow=jr)
    assert_same(jr.restore(tmp_path, None, like=New(jnp.zeros(2, int))), New(jnp.arange(2)))


def test_no_module_of_the_package_is_named_in_a_file(tmp_path):
    rows = jnp.zeros((1, 2))
    config = {
        "hindsight": jr.SequenceBuffer(length=6, num_envs=2, sequence_length=3, hindsight=True, windows="inside"),
        "items": jr.ReplayBuffer(capacity=4, sampler=jr.Prioritized(), count_updates=True),
        "pools": jr.DifficultyPools(tasks_per_env=(4,)),
        "tracer": jr.NStep(n=1, gamma=0.5),
        "mixture": jr.Mixture(buffers=(jr.ReservoirBuffer(capacity=4), jr.ReplayBuffer(capacity=6))),
    }
    state = {
        "hindsight": config["hindsight"].init(rows.astype(jnp.bfloat16)),
        "items": config["items"].init(jr.TransitionBatch(*[rows[0]] * 6)),
        "pools": config["pools"].init(),
        "tracer": config["tracer"].init(*[rows[0, :1]] * 3, *[rows[0, :1] > 0] * 2, rows[0, :1]),
        "mixture": config["mixture"].init(rows[0]),
    }
    jr.save(tmp_path, config, state)
    (manifest,) = tmp_path.glob("*/manifest/data.json")
    assert "jaxreplay:EpisodeNumbers" in manifest.read_text()
    assert "jaxreplay." not in json.dumps(json.loads(manifest.read_text())["content"]["structure"])
    assert_same(jr.restore(tmp_path, config), state)


def claims(at, value):
    """A change of what a manifest claims."""

    def change(content):
        *path, last = at
        for key in path:
            content = content[key]
        content[last] = value

    return change


HUGE = 2**40
TREE = ("structure", 1, 1, 1)
CLAIMS = {
    "shape": (claims(("leaves", 0, "shape"), [HUGE]), "has 2 of 1099511627776 numbers"),
    "shape and part": (
        lambda content: content["leaves"][0].update(shape=[HUGE], parts=[[[0], [HUGE], 0]]),
        r"array 0 is not of shape \[1099511627776\]",
    ),
    "dtype": (claims(("leaves", 0, "dtype"), "complex64"), "array 0 has 8 bytes on disk, not 16"),
    "dtype of the same size": (claims(("leaves", 0, "dtype"), "int32"), "leaf .'a'. differs from its saved bits"),
    "no dtype": (claims(("leaves", 0, "dtype"), "object"), "dtype object, which JAX would not keep"),
    "unknown dtype": (claims(("leaves", 0, "dtype"), "float3"), "dtype float3, which JAX would not keep"),
    "many parts": (
        lambda content: content["leaves"][0]["parts"].extend(content["leaves"][0]["parts"] * 3),
        "has 8 of 2",
    ),
    "a part outside": (claims(("leaves", 0, "parts", 0, 0), [1]), r"a part \[2\] at \[1\] of \[2\]"),
    "a part with fewer axes": (claims(("leaves", 0, "parts", 0, 1), []), r"a part \[\] at \[0\] of \[2\]"),
    "part": (claims(("leaves", 0, "parts", 0), [0]), "is not the record of an array"),
    "a part that begins nowhere": (claims(("leaves", 0, "parts", 0, 0), ["0"]), "is not the record of an array"),
    "a part of no size": (claims(("leaves", 0, "parts", 0, 1), ["2"]), "is not the record of an array"),
    "a part without a checksum": (claims(("leaves", 0, "parts", 0, 2), None), "is not the record of an array"),
    "another array": (lambda content: content["leaves"].reverse(), "is not of shape"),
    "axes": (claims(("leaves", 0, "shape"), [2] + [1] * 99), "leaf .* has a part"),
    "negative": (claims(("leaves", 0, "shape"), [-2]), "is not the record of an array"),
    "leaves twice": (lambda content: content["leaves"].append(content["leaves"][0]), "each of 5 leaves exactly once"),
    "a leaf twice": (claims(("structure", 1, 0, 1, 1), 1), "each of 4 leaves exactly once"),
    "no leaves": (claims(("leaves",), None), "no list of leaves"),
    "no structure": (claims(("structure",), ["set", []]), "is not a node"),
    "no buffer": (claims(("buffer",), {"x": 1}), "is not the description of a configuration"),
    "no buffer at all": (lambda content: content.pop("buffer"), "'buffer'"),
    "key": (claims(("leaves", 0, "key"), "rbg"), "is not the record of an array"),
    "spec": (lambda content: content["leaves"][0].update(mesh="buffer", spec=[1]), "is not the record of an array"),
    "capacity": (claims((*TREE, 3, "capacity"), 2**29), "is no longer the saved dataclass"),
    "capacity and fan-out": (claims((*TREE, 3), {"capacity": 8, "fanout": 1}), "has no sizes"),
    "levels": (claims((*TREE, 2, "sums"), ["list", []]), "has no sizes"),
    "rows": (claims((*TREE, 1), "jaxreplay:Rows"), "has no sizes"),
}


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """A checkpoint of a tree and an array of 64 bytes in all."""
    path = tmp_path_factory.mktemp("small")
    state = {"a": jnp.arange(2, dtype=jnp.float32), "tree": jr.sum_tree.init(8, fanout=2)}
    jr.save(path, None, state)
    return path, state


@pytest.mark.parametrize("name", CLAIMS)
def test_what_is_claimed_is_compared_with_the_disk_before_memory_is_taken(tmp_path, small, name):
    change, message = CLAIMS[name]
    shutil.copytree(small[0], tmp_path / "run")
    rewrite_manifest(tmp_path / "run", change)
    peaks = []
    for _ in range(2):
        tracemalloc.start()
        try:
            with pytest.raises(ValueError, match=message):
                jr.restore(tmp_path / "run", None)
            peaks.append(tracemalloc.get_traced_memory()[1])
        finally:
            tracemalloc.stop()
    # What a claim takes, every call takes. Python also grows tables of its own, such as that of its interned strings
    # (4 MB), in whichever call fills them.
    assert min(peaks) < 2**21


def described(**changes):
    """A change of what Zarr says of array 0."""

    def change(arrays):
        file = arrays / "0" / ".zarray"
        file.write_text(json.dumps(json.loads(file.read_text()) | changes))

    return change


def compressed(arrays):
    """What takes a thousand times its size in memory."""
    described(compressor={"id": "zlib", "level": 9})(arrays)
    (arrays / "0" / "0").write_bytes(zlib.compress(bytes(2**20), 9))


FILES = {
    "shorter": (lambda arrays: (arrays / "0" / "0").write_bytes(bytes(7)), "array 0 has 7 bytes on disk, not 8"),
    "longer": (lambda arrays: (arrays / "0" / "0").write_bytes(bytes(9)), "array 0 has 9 bytes on disk, not 8"),
    "no part": (lambda arrays: (arrays / "0" / "0").unlink(), "array 0 has 0 bytes on disk, not 8"),
    "another part": (lambda arrays: (arrays / "0" / "0").rename(arrays / "0" / "1"), "damaged"),
    "no array": (lambda arrays: shutil.rmtree(arrays / "0"), "files of arrays other than the 4 expected"),
    "another array": (lambda arrays: (arrays / "9").mkdir(), "files of arrays other than the 4 expected"),
    "another format": (lambda arrays: (arrays / "0" / "zarr.json").write_text("{}"), "has files other than its parts"),
    "a database": (lambda arrays: (arrays / "manifest.ocdbt").write_text(""), "files of arrays other"),
    "compression": (compressed, r"array 0 is not of shape \[2\] without compression"),
    "filters": (described(filters=[{"id": "delta"}]), "without compression"),
    "shape": (described(shape=[HUGE]), r"is not of shape \[2\]"),
    "no shape": (lambda arrays: (arrays / "0" / ".zarray").write_text("[]"), r"is not of shape \[2\]"),
    "a large part": (described(chunks=[HUGE]), "array 0 has 8 bytes on disk, not 8"),
    "no size of a part": (described(chunks=["2"]), "array 0 has parts of shape"),
    "dtype": (described(dtype="<i4"), "leaf .'a'. differs from its saved bits"),
    "a larger dtype": (described(dtype="<c16"), "damaged"),
}


@pytest.mark.parametrize("name", FILES)
def test_files_are_compared_with_what_is_expected_before_memory_is_taken(tmp_path, small, name):
    change, message = FILES[name]
    shutil.copytree(small[0], tmp_path / "run")
    (arrays,) = (tmp_path / "run").glob("*/arrays")
    change(arrays)
    with pytest.raises(ValueError, match=message):
        jr.restore(tmp_path / "run", None)
    assert_same(jr.restore(small[0], None), small[1])


NOTES = {
    "format": ("arrays/_METADATA", '{"tree_metadata": {}, "use_ocdbt": true, "use_zarr3": true}', "is damaged"),
    "nested": ("arrays/_METADATA", "[" * 10**6, "is damaged"),
    "handlers": ("_CHECKPOINT_METADATA", '{"item_handlers": {"manifest": "os:system", "arrays": "UN.Pair"}}', None),
    "handler": ("_CHECKPOINT_METADATA", '{"item_handlers": "UN.Pair"}', None),
    "no notes": ("_CHECKPOINT_METADATA", "[]", None),
}


@pytest.mark.parametrize("name", NOTES)
def test_nothing_that_orbax_notes_is_trusted(tmp_path, small, unimported, name):
    file, text, message = NOTES[name]
    shutil.copytree(small[0], tmp_path / "run")
    (file,) = (tmp_path / "run").glob(f"*/{file}")
    file.write_text(text.replace("UN", unimported))
    if message is None:
        assert_same(jr.restore(tmp_path / "run", None), small[1])
        return
    with pytest.raises(ValueError, match=message):
        jr.restore(tmp_path / "run", None)


def test_parts_that_do_not_belong_together_are_refused(tmp_path):
    buffer = jr.ReplayBuffer(capacity=4)
    jr.save(tmp_path, buffer, buffer.init(jnp.zeros(1)))

    def swap(content):
        fields = content["structure"][2]
        fields["ring"], fields["sampler"] = fields["sampler"], fields["ring"]

    def no_size(content):
        swap(content)
        content["structure"][2]["ring"][2]["size"] = ["tuple", [content["structure"][2]["ring"][2]["size"]]]

    for change, name in ((swap, "ReplayState"), (no_size, "Ring")):
        rewrite_manifest(tmp_path, change)
        with pytest.raises(ValueError, match=f"jaxreplay:{name}: is no longer the saved dataclass"):
            jr.restore(tmp_path, buffer)


def test_an_error_of_the_package_itself_is_not_blamed_on_the_file(tmp_path, monkeypatch):
    def fails(state):
        raise TypeError("of the package")

    buffer = jr.ReplayBuffer(capacity=4)
    jr.save(tmp_path, buffer, buffer.init(jnp.zeros(1)))
    monkeypatch.setattr(jr.buffers.ReplayState, "on_this_backend", fails)
    with pytest.raises(TypeError, match="of the package"):
        jr.restore(tmp_path, buffer)


def test_the_order_of_names_in_a_manifest_does_not_matter(tmp_path, small):
    """As other programs that rewrite JSON may change it."""
    shutil.copytree(small[0], tmp_path / "run")
    (file,) = (tmp_path / "run").glob("*/manifest/data.json")
    file.write_text(json.dumps(json.loads(file.read_text(), object_pairs_hook=lambda pairs: dict(pairs[::-1]))))
    assert_same(jr.restore(tmp_path / "run", None), small[1])


def test_a_manifest_that_is_something_else_is_damaged(tmp_path):
    jr.save(tmp_path, None, jnp.ones(1))
    (file,) = tmp_path.glob("*/manifest/data.json")
    for text in ("[]", "{}", '{"sha256": "0", "content": {}}', '{"content": 1}', "\xff"):
        file.write_text(text)
        with pytest.raises(ValueError, match=r"is damaged: (its manifest has changed|cannot read its manifest)"):
            jr.restore(tmp_path, None)


def test_what_wrote_it_is_said_where_it_is_not_installed(tmp_path, monkeypatch):
    def missing(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", missing)
    jr.save(tmp_path, None, jnp.ones(1))
    assert open_saved(tmp_path)[0]["library"] == "unknown"


def test_deep_nesting_is_refused(tmp_path):
    state = jnp.ones(1)
    for _ in range(100):
        state = [state]
    jr.save(tmp_path, None, state)
    assert_same(jr.restore(tmp_path, None), state)
    with pytest.raises(ValueError, match=r"\[0\]\[0\]: nested more than 100 levels deep"):
        jr.save(tmp_path, None, [state])
    rewrite_manifest(tmp_path, lambda content: content.update(structure=["list", [content["structure"]]]))
    with pytest.raises(ValueError, match="its structure is nested more than 100 levels deep"):
        jr.restore(tmp_path, None)
    for depth, message in ((500, "more than 400 levels deep"), (10**6, "cannot read its manifest")):
        (file,) = tmp_path.glob("*/manifest/data.json")
        buffer = "[" * depth + "]" * depth
        with contextlib.suppress(RecursionError):
            content = json.loads(f'{{"format": 1, "buffer": {buffer}, "structure": ["none"], "leaves": []}}')
            digest = checkpoint._manifest.digest(content)
        file.write_text(f'{{"sha256": "{digest}", "content": {json.dumps(content)}}}' if depth == 500 else buffer)
        with pytest.raises(ValueError, match=message):
            jr.restore(tmp_path, None)
