"""Of another configuration, of another `like` and of values that cannot be recorded: what is refused, and its name."""

import dataclasses
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checkpoint_runs import Custom, Flax, Pair, assert_same, recorded, rewrite
from helpers import rarely, rejects
from jax.extend.random import define_prng_impl

import jaxreplay as jr
from jaxreplay.checkpoint import _checkpoint, _config

pytestmark = pytest.mark.versions
ONE = np.ones(1, np.int8)
LIKE = jax.eval_shape(lambda: jnp.arange(2))


class Twins(Custom):
    """Its children have the same key."""


jax.tree_util.register_pytree_with_keys(
    Twins, lambda node: ([(jax.tree_util.GetAttrKey("x"), node.x)] * 2, None), lambda _, children: Twins(children[0], 0)
)


def schedule(count):
    return 0.5


def other_schedule(count):
    return 0.5


@dataclasses.dataclass(frozen=True)
class Settings:
    """A configuration that got a new field."""

    alpha: float = 0.1
    added: str = "default"


@dataclasses.dataclass(frozen=True)
class Outer:
    """A configuration that got a part."""

    inner: Settings = Settings(alpha=0.2, added="more")


PER, OTHER_PER = jr.Prioritized(), jr.Prioritized(alpha=0.7)
BUFFER, POOLS = jr.ReplayBuffer(capacity=4, sampler=PER), jr.DifficultyPools(tasks_per_env=(4,))
SCHEDULED, OTHER_SCHEDULE = jr.Prioritized(beta=schedule), jr.Prioritized(beta=other_schedule)
INNER = Outer(inner=BUFFER), Outer(inner=dataclasses.replace(BUFFER, sampler=OTHER_PER))
CHANGES = {
    "last bit": (PER, jr.Prioritized(alpha=np.nextafter(0.6, 1)), r"saved 0\.6, given 0\.60000000"),
    "schedule": (SCHEDULED, OTHER_SCHEDULE, r"beta: saved '\w+\.schedule', given '\w+\.other_schedule'"),
    "constant": (SCHEDULED, PER, r"beta: saved '\w+\.schedule', given 0\.4"),
    "pools": (POOLS, dataclasses.replace(POOLS, easy_threshold=1), r"easy_threshold: saved None, given 1.*remap"),
    "length": (POOLS, jr.DifficultyPools(tasks_per_env=(4, 2)), r"tasks_per_env\[1\]: saved nothing, given 2"),
    "inner": (*INNER, r"config\.inner\.sampler\.alpha: saved 0\.6, given 0\.7.*jr\.migrate"),
    "root": (POOLS, jr.NStep(n=1, gamma=1), r"config: saved '\w+\.DifficultyPools', given '\w+\.NStep'; .* more\)\."),
    "nested": ({"a": [POOLS, 1]}, {"a": [POOLS, 2]}, r"\['a'\]\[1\]: saved 1, given 2\. Restore with the saved one"),
    "many": (list(range(9)), list(range(1, 10)), r"\[4\]: saved 4, given 5 \(and 4 more\)"),
    "both": (BUFFER, jr.ReplayBuffer(capacity=5), r"capacity: saved 4, given 5; config\.sampler: saved 'jaxr\w+\.Prio"),
}


@pytest.mark.parametrize(("saved", "given", "message"), CHANGES.values(), ids=CHANGES)
def test_another_configuration_is_refused_by_field(tmp_path, saved, given, message):
    jr.save(tmp_path, saved, jnp.arange(2))
    rejects(message, jr.restore, tmp_path, given, ONE)
    assert_same(jr.restore(tmp_path, saved, LIKE), jnp.arange(2))


def test_equal_values_of_other_types_are_no_difference():
    saved = {"config['a']": float("nan"), "config['b']": 1, "config['c']": 0.5, "config['d']": "float32"}
    for given in ({"b": 1.0, "c": 0.5}, {"b": True, "c": np.float64(0.5)}, {"b": np.int8(1), "c": 0.5}):
        config = given | {"a": float("nan"), "d": np.dtype("float32")}
        assert _config.differences(saved, config) == []
    assert _config.differences(saved, config | {"a": 0.0}) == ["config['a']: saved nan, given 0.0"]


def test_what_is_new_in_a_part_with_its_default_has_its_default():
    """Of a part that was given, the default of the whole does not count."""
    saved = {where: value for where, value, _ in _config.fields(Outer()) if "inner" not in where}
    assert _config.differences(saved, Outer()) == []
    found = _config.differences(saved, Outer(inner=Settings(added="other")))
    assert found[-1] == "config.inner.added: saved nothing, given 'other'"


def test_donation_does_not_matter_and_a_new_field_has_its_default(tmp_path):
    buffer = jr.ReplayBuffer(capacity=4, donate=True)
    jr.save(tmp_path, [buffer, Settings()], jnp.arange(2))
    buffer = dataclasses.replace(buffer, donate=False)
    jr.restore(tmp_path, [buffer, Settings()], LIKE)
    rewrite(tmp_path, lambda content: content["config"].pop("config[1].added"))
    jr.restore(tmp_path, [buffer, Settings()], LIKE)
    other = [buffer, Settings(added="other")]
    rejects(r"config\[1\]\.added: saved nothing, given 'other'", jr.restore, tmp_path, other, LIKE)


def test_versions(tmp_path):
    jr.save(tmp_path, jr.Uniform(), jnp.arange(2))
    rewrite(tmp_path, lambda content: content.update(format=_checkpoint.FORMAT + 1, added=1))
    message = rf"has format '{_checkpoint.FORMAT + 1}'; .* reads format {_checkpoint.FORMAT};"
    rejects(message, jr.restore, tmp_path, jr.Uniform(), LIKE)
    jr.save(tmp_path, None, jnp.arange(2))
    assert _checkpoint.newest(tmp_path, lambda _, content: content)["library"] == jr.__version__


def test_a_recorded_checkpoint_of_this_format_is_restored():
    """As other versions of this package, of JAX and of TensorStore wrote it; checkpoint_runs.py records it anew."""
    config, state = recorded()
    found = jr.restore(pathlib.Path(__file__).with_name("recorded"), config, jax.eval_shape(lambda: state), step=3)
    assert_same(found, state)


def test_nothing_to_restore(tmp_path):
    (tmp_path / "file").write_text("text")
    for path in (tmp_path, tmp_path / "missing", tmp_path / "file"):
        rejects("no complete checkpoint there", jr.restore, path, None, ONE, error=FileNotFoundError)


UNNAMED = define_prng_impl(key_shape=(2,), **dict.fromkeys(("seed", "split", "random_bits", "fold_in")))
KEYS = jax.random.wrap_key_data(np.zeros(2, np.uint32), impl=UNNAMED)
REFUSED = {
    "keys": (None, {"key": KEYS}, r"leaf \['key'\]: PRNG keys of \?, which has no name"),
    "twins": (None, {"a": [Twins(ONE, 0)]}, r"\['a'\]\[0\]\.x: there are two with this path"),
    "text": (None, {"a": "text"}, r"\['a'\]: got a str; expected an array"),
    "no pytree": (None, object(), "leaf <root>: got a object; expected an array"),
    "text in a node": (None, {"a": Custom("text", 0)}, r"\['a'\]\[<flat index 0>\]: got a str; expected an array"),
    "another buffer": (
        BUFFER,
        jax.eval_shape(jr.ReplayBuffer(capacity=5).init, ONE),
        "capacity=4: this state has .* use the buffer that made it",
    ),
    "objects": (None, {"a": np.array([None])}, r"leaf \['a'\]: has dtype object, which JAX would not keep"),
    "configuration": ({"a": [object()]}, ONE, r"config\['a'\]\[0\]: got a object, which cannot be recorded"),
    "array": (dataclasses.make_dataclass("Settings", ["scale"])(ONE), ONE, r"config\.scale: got a ndarray"),
}


@pytest.mark.parametrize(("config", "state", "message"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_recorded_is_refused_before_anything_is_written(tmp_path, config, state, message):
    rejects(message, jr.save, tmp_path / "run", config, state)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("setting", [{"keep": 0}, {"keep": True}, {"step": -1}, {"step": 0.5}, {"step": 2**63}])
def test_settings_out_of_range(tmp_path, setting):
    rejects(f"{next(iter(setting))}=", jr.save, tmp_path / "run", None, ONE, **setting)
    assert not (tmp_path / "run").exists()


def but(**changes):
    return lambda like: like | changes


SAVED = {
    "params": {"w": jnp.zeros((2, 3)), "b": [jnp.zeros(3)]},
    "custom": [Custom(jax.random.key(0), 3)],
    "flax": Flax(ONE, "name", settings=(1, len)),
    "local": Pair({"y": jnp.zeros(()), "z": None}, 5),
}
FLAX, PARAMS, FIRST = SAVED["flax"], SAVED["params"], SAVED["local"].first
KEY = r"like\['custom'\]\[0\]\[<flat index 0>\]: saved key<fry>\[\], "
UNLIKE = {
    "nothing": (lambda like: None, KEY + "given nothing"),
    "kind": (lambda like: [like], KEY + "given nothing"),
    "key": (but(custom=[Custom(jax.random.key(0, impl="rbg"), 3)]), KEY + r"given key<rbg>\[\]"),
    "unknown": (but(b=ONE), r"like\['b'\]: saved nothing, given int8\[1\]"),
    "shape": (but(params=PARAMS | {"w": jnp.zeros((2, 4))}), r"\['w'\]: saved \w+\[2, 3\], given \w+\[2, 4\]"),
    "dtype": (but(flax=FLAX.replace(x=np.zeros(1, np.uint8))), r"flax'\]\.x: saved int8\[1\], given uint8\[1\]"),
    "number": (but(flax=FLAX.replace(x=1)), r"\.x: saved int8\[1\], given int\."),
    "number for a number": (but(local=Pair(FIRST, 0.5)), r"\.second: saved int, given float"),
    "fewer": (but(params={"w": PARAMS["w"]}), r"like\['params'\]\['b'\]\[0\]: saved float\d\d\[3\], given nothing"),
    "None": (but(flax=FLAX.replace(x=None)), r"\.x: saved int8\[1\], given nothing"),
    "not None": (but(local=Pair({"y": jnp.zeros(()), "z": 0}, 5)), r"first\['z'\]: saved nothing, given int"),
    "text": (but(b="text"), r"\['b'\]: got a str; expected an array"),
    "array for a number": (but(local=Pair(FIRST, jnp.int32(5))), r"saved int, given int32\[\] \(what goes"),
    "number for an array": (but(local=Pair({"y": 0.0, "z": None}, 5)), r"float\d\d\[\], given float \(what goes"),
    "static": (but(flax=FLAX.replace(name="b")), r"like\['flax'\]\.name: saved 'name', given 'b'"),
    "a type in a tuple": (but(flax=FLAX.replace(settings=(1, np.int8))), r"saved \[1, None\], given \[1, 'int8'\]"),
    "static in a tuple": (but(flax=FLAX.replace(settings=(2, len))), r"saved \[1, None\], given \[2, None\]"),
}


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    path = tmp_path_factory.mktemp("saved")
    jr.save(path, None, SAVED)
    return path


@pytest.mark.parametrize(("change", "message"), UNLIKE.values(), ids=UNLIKE)
def test_a_like_unlike_the_saved_state_is_refused_by_path(saved, change, message):
    rejects(message, jr.restore, saved, None, change(SAVED))


@pytest.mark.parametrize(("saved", "given"), [("float8_e5m2", "float8_e4m3fn"), rarely(("bfloat16", "uint16"))])
def test_items_of_another_dtype_are_refused_although_their_bits_would_fit(tmp_path, saved, given):
    buffer = jr.ReplayBuffer(capacity=4)
    jr.save(tmp_path, buffer, buffer.init(np.zeros(1, saved)))
    message = rf"like\.storage\S*: saved \S*({saved}|uint16)\S*, given \S*({given}|nothing)"
    rejects(message, jr.restore, tmp_path, buffer, jax.eval_shape(buffer.init, np.zeros(1, given)))


def test_only_shapes_of_like_are_read(saved):
    """So what jax.eval_shape makes will do, and donated arrays; static fields that are not plain come from it."""
    assert_same(jr.restore(saved, None, jax.eval_shape(lambda: SAVED)), SAVED)
    like = SAVED | {"params": jax.tree.map(jnp.copy, SAVED["params"])}
    jax.tree.map(lambda x: x.delete(), like["params"])
    found = jr.restore(saved, None, like)
    assert_same(found, SAVED)
    assert found["flax"].settings == (1, len)
    jr.save(saved / "weak", None, {"a": 5})  # a number, and where it was one that jax.eval_shape has seen
    for like in ({"a": 7}, jax.eval_shape(lambda: {"a": 7})):
        assert_same(jr.restore(saved / "weak", None, like), {"a": 5})
