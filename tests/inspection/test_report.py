"""What `plot` and `python -m jaxreplay` show is what is stored."""

import base64
import collections
import dataclasses
import html.parser
import re
import subprocess
import sys
import xml.etree.ElementTree as ET

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import over_devices, rarely

import jaxreplay as jr
from jaxreplay.__main__ import main
from jaxreplay._common.layouts import Bits, Rows
from jaxreplay.inspection import _report

CAPACITY, NUM_ENVS, LENGTH = 40, 2, 12


def transitions(first, count):
    x = np.arange(first, first + count, dtype=np.float32)
    return jr.TransitionBatch(S={"frame": np.zeros((count, 3), np.uint8)}, A=x, logP=None, Rn=x / 2, In=x, S_next=x)


def replay_run():
    """A buffer that has wrapped, and the priorities of its items, newest last."""
    sampler = jr.Prioritized(beta=optax.linear_schedule(0.4, 1.0, 4), epsilon=0.0)
    buffer = jr.ReplayBuffer(capacity=CAPACITY, sampler=sampler, count_updates=True, donate=False)
    state = buffer.init(transitions(0, 30))
    for first in (0, 30):
        state = buffer.add(state, transitions(first, 30))
    handles = np.arange(10, 50, dtype=np.int32)
    state = buffer.update(state, handles, handles.astype(np.float32) % 7)
    return buffer, state, np.where(np.arange(20, 60) < 50, np.arange(20, 60) % 7, 1.0)


def streams_run(**settings):
    buffer = jr.SequenceBuffer(length=LENGTH, num_envs=NUM_ENVS, sequence_length=3, donate=False, **settings)
    rows = {"reward": np.arange(20 * NUM_ENVS, dtype=np.float32).reshape(20, NUM_ENVS)}
    ends = np.zeros((20, NUM_ENVS), bool)
    ends[[9, 11, 16], 0] = ends[[12, 18], 1] = True
    state = buffer.init(rows)
    for first in (0, 10):
        part = slice(first, first + 10)
        state = buffer.add(state, {"reward": rows["reward"][part]}, ends=ends[part])
    return buffer, state


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A run of which the report knows nothing but the checkpoint, and what was saved."""
    buffer, replay, priorities = replay_run()
    streams, steps = streams_run(windows="cut")
    pools = jr.DifficultyPools(tasks_per_env=(5, 2), env_names=("<math>", "code"))
    config = {"replay": buffer, "streams": streams, "pools": pools}
    state = {"replay": replay, "streams": steps, "pools": pools.init(), "optimizer": (jnp.zeros(3), [jnp.ones(2)])}
    path = tmp_path_factory.mktemp("run") / "checkpoint"
    jr.save(path, config, state)
    return path, config, state, priorities


def check_views(views, priorities):
    replay, streams, pools = (views[name] for name in ("replay", "streams", "pools"))
    newest_first = np.argsort(replay.ages)
    np.testing.assert_array_equal(np.sort(replay.ages), np.arange(CAPACITY))
    np.testing.assert_allclose(replay.priorities[newest_first][::-1], priorities, rtol=1e-5)
    np.testing.assert_allclose(replay.law.sum(), 1, rtol=1e-6)
    law = priorities**0.6 / np.sum(priorities**0.6)
    np.testing.assert_allclose(replay.law[newest_first][::-1], law, rtol=1e-5)
    np.testing.assert_array_equal(replay.returns[1][newest_first][::-1], np.arange(20, 60) / 2)
    np.testing.assert_array_equal(replay.updates[newest_first][::-1], np.arange(20, 60) < 50)
    assert replay.facts["late updates"] == "10"
    assert replay.facts["mass in the top 10%"] == f"{np.sort(law)[-4:].sum():.1%}"
    np.testing.assert_array_equal(np.sort(streams.returns[1]), np.arange(16, 40))
    assert sorted(streams.episodes) == [2, 5, 6]  # of which no row is overwritten
    assert [leaf[:3] for leaf in replay.leaves][:2] == [("S.frame", "uint8", (3,)), ("A", "float32", ())]
    assert sum(leaf[3] for leaf in replay.leaves) == CAPACITY * (3 + 4 * 4)
    names, sizes = pools.pools
    assert (names, sizes.tolist()) == (["<math>", "code"], [[5, 0, 0], [2, 0, 0]])


@pytest.mark.versions
def test_what_is_seen_is_what_was_saved(saved):
    path, config, state, priorities = saved
    seen = _report._saved.from_checkpoint(path)
    views = {view.name: view for view in _report._views.views(seen)}
    check_views(views, priorities)
    assert views["replay"].beta == "beta = 0.55"
    assert _report._views.others(seen) == [("optimizer", 2, 5 * jnp.zeros(1).itemsize)]
    described = _report._description.describe(_report._description.with_numbers(config, state))
    live = _report.Saved("", {}, described, state)
    views = {view.name: view for view in _report._views.views(live)}
    check_views(views, priorities)
    assert views["replay"].beta == "beta = 0.55"
    smallest = np.min(priorities[priorities > 0])
    expected = np.where(priorities > 0, (np.maximum(priorities, smallest) / smallest) ** (-0.6 * 0.55), 0)
    newest_first = np.argsort(views["replay"].ages)
    np.testing.assert_allclose(views["replay"].weights[newest_first][::-1], expected, rtol=1e-5)


class Page(html.parser.HTMLParser):
    """The pictures and the text of a page; fails where tags do not match."""

    VOID = ("meta", "img", "br")

    def __init__(self, text):
        super().__init__()
        self.open, self.images, self.text = [], [], ""
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag, attributes):
        if tag == "img":
            self.images.append(dict(attributes))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text += data


def test_a_page_holds_all_of_its_pictures(saved, tmp_path, capsys):
    path, *_ = saved
    assert main([str(path), "--out", str(tmp_path / "report.html")]) == 0
    assert "wrote" in capsys.readouterr().out
    text = (tmp_path / "report.html").read_text()
    page = Page(text)
    assert "http" not in re.sub(r'src="data:[^"]*"', "", text)  # nothing is fetched
    names = [image["alt"].partition(":")[0] for image in page.images]
    assert names == ["priorities", "ages", "mass", "weights", "updates", "returns", "returns", "episodes", "pools"]
    for image in page.images:
        kind, _, data = image["src"].partition(",")
        assert kind == "data:image/svg+xml;base64"
        picture = ET.fromstring(base64.b64decode(data))
        assert picture.tag.endswith("svg")
        assert len(list(picture.iter("{http://www.w3.org/2000/svg}path"))) > 10
    assert "<math>" not in text
    nbytes = 5 * jnp.zeros(1).itemsize
    assert f"<td>optimizer</td><td class=n>2</td><td class=n>{nbytes}</td>" in text  # numbers at the right
    for word in ("replay", "ReplayBuffer", "optimizer", "late updates", "S.frame", "uint8[3]"):
        assert word in page.text


@pytest.mark.versions
def test_text_for_a_terminal(saved, capsys):
    path, *_ = saved
    assert main([str(path)]) == 0
    text = capsys.readouterr().out
    assert all(
        word in text for word in ("replay: ReplayBuffer", "40 of 40 (100%)", "priority p", "optimizer", "<math>")
    )
    assert max(map(len, text.splitlines())) < 400
    assert re.search(r"^  Item\n    leaf +type +bytes stored\n    S\.frame +uint8\[3\] +120$", text, re.MULTILINE)
    assert main([str(path / "nothing")]) == 2
    assert "no complete checkpoint there" in capsys.readouterr().err


def test_figures_for_a_notebook(saved):
    _, config, state, _ = saved
    figures = jr.plot([config["pools"]], [state["pools"]])
    assert list(figures) == ["0/pools"]
    assert "data:image/svg" in figures._repr_html_()
    assert "Nothing" in jr.plot({}, {})._repr_html_()


@pytest.mark.slow
def test_figures_of_a_buffer(saved):
    _, config, state, _ = saved
    figures = jr.plot(config["replay"], state["replay"])
    assert list(figures) == ["priorities", "ages", "mass", "weights", "updates", "returns"]
    assert figures._repr_html_().count("<img") == 6
    assert all(figure.axes for figure in figures.values())


def view_of(**numbers):
    return _report._views.View("", "ReplayBuffer", {}, {}, [], beta="beta = 1", **numbers)


def test_figures_show_the_numbers():
    law, weights = np.array([0, 0.25, 0.25, 0.5]), np.array([np.inf, 1, 1, 0.5])
    updates = np.repeat([0, 1, 5, 50], [500, 400, 96, 4])
    view = view_of(priorities=np.array([0, 1, 1, 2.0]), law=law, weights=weights, ages=np.arange(4), updates=updates)
    pictures = _report._figures.pictures(view)
    assert pictures["priorities"].caption.endswith("Not shown: 25.0% with priority 0, which are never drawn.")
    (ages, _bar), (counts,) = (pictures[name].figure.axes for name in ("ages", "updates"))
    assert (ages.get_xscale(), ages.get_yscale()) == ("linear", "log")
    assert pictures["weights"].caption.endswith("Effective sample size: 90% of a large batch.")  # 0.75^2 / 0.625
    assert [bar.get_height() for bar in counts.patches] == [0.5, 0.4, 0, 0, 0, 0.096, 0.004]  # the last: more than 5
    assert "more than 5" in counts.get_xlabel()


def test_a_list_of_buffers_and_one_of_states():
    """Each buffer belongs to the state at its place; there may be more states."""
    buffer, state, _ = replay_run()
    for configs in ([buffer], (buffer,)):
        states = [state, jnp.zeros(3)]
        described = _report._description.describe(_report._description.with_numbers(configs, states))
        (view,) = _report._views.views(_report.Saved("", {}, described, states))
        assert (view.name, view.beta) == ("0", "beta = 0.55")


@pytest.mark.parametrize("place", ["alone", "shards", "mixture", "dict", "elsewhere"])
def test_a_schedule_is_shown_by_its_value_when_it_was_saved(place, tmp_path):
    sampler = jr.Prioritized(beta=optax.linear_schedule(0.4, 1.0, 10))
    one = jr.ReplayBuffer(capacity=8, sampler=sampler)
    buffer = {"shards": over_devices(one, 2), "mixture": jr.Mixture(buffers=(one, one))}.get(place, one)
    state = buffer.init(jnp.arange(4))
    state = buffer.add(state, *([0] if place == "mixture" else []), jnp.arange(4))
    for key in jax.random.split(jax.random.key(0), 5):
        sample = buffer.sample(state, key, 4)
        state = buffer.update(state, sample.indices, jnp.ones(4))
    config, saved = (buffer, state) if place not in ("dict", "elsewhere") else ({"replay": buffer}, {"replay": state})
    saved = {"other": saved["replay"]} if place == "elsewhere" else saved
    jr.save(tmp_path / "checkpoint", config, saved)
    (view, *_) = _report._views.views(_report._saved.from_checkpoint(tmp_path / "checkpoint"))
    assert view.beta == ("beta = 0.4, as the saved beta is a function" if place == "elsewhere" else "beta = 0.7")
    assert jax.tree.all(jax.tree.map(jnp.array_equal, jr.restore(tmp_path / "checkpoint", config), saved))


def test_numbers_of_a_large_state_are_thinned_evenly(monkeypatch):
    monkeypatch.setattr(_report._views, "MOST", 4)
    for size, shown in ((3, [0, 1, 2]), (4, [0, 1, 2, 3]), (5, [0, 2, 4]), (8, [0, 2, 4, 6]), (10, [0, 3, 6, 9])):
        assert _report._views.thin(np.arange(size)).tolist() == shown


def test_quantiles_are_numbers_that_occur():
    assert list(_report._sections.QUANTILES) == ["min", "10%", "50%", "90%", "max"]
    assert _report._sections.quantiles(np.array([3, 0, 2, 1])) == [0, 0, 1, 3, 3]


def test_without_matplotlib_the_error_names_the_extra(saved, monkeypatch, capsys):
    path, config, state, _ = saved
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match=r"matplotlib is not installed.*jaxreplay\[plots\]"):
        jr.plot(config["pools"], state["pools"])
    assert main([str(path), "--out", "page.html"]) == 2
    assert "jaxreplay[plots]" in capsys.readouterr().err
    assert main([str(path)]) == 0


@dataclasses.dataclass(frozen=True)
class Oldest:
    """A sampler whose state says nothing, also not for how many slots it is."""

    def init(self, capacity):
        return ()

    def insert(self, state, slots, drawable):
        return state

    def sample(self, state, key, batch_size, live):
        return jnp.zeros(batch_size, jnp.int32), jnp.ones(batch_size)

    def weights(self, state, probabilities, size, beta=None):
        return probabilities

    def update(self, state, slots, td_errors, mask):
        return state


OTHERS = {
    "empty": lambda: (buffer := jr.ReplayBuffer(capacity=4, sampler=jr.Prioritized()), buffer.init(jnp.zeros((1, 2)))),
    "no priorities": lambda: (
        buffer := jr.ReplayBuffer(capacity=4, sampler=jr.Prioritized(epsilon=0.0)),
        buffer.add(buffer.init(jnp.zeros(2)), jnp.zeros(2), td_errors=jnp.zeros(2)),
    ),
    "alpha 0": lambda: (
        buffer := jr.ReplayBuffer(capacity=4, sampler=jr.Prioritized(alpha=0.0)),
        buffer.add(buffer.init(jnp.zeros(2)), jnp.zeros(2)),
    ),
    "reservoir": lambda: (
        buffer := jr.ReservoirBuffer(capacity=4),
        buffer.add(buffer.init({"r": jnp.zeros(9)}), {"r": jnp.arange(9.0)}, jax.random.key(0)),
    ),
    "windows": lambda: streams_run(windows="inside", sampler=jr.Prioritized()),
    "sharded": lambda: (
        buffer := over_devices(jr.ReplayBuffer(capacity=4, sampler=jr.Prioritized()), 2),
        buffer.add(buffer.init({"reward": jnp.zeros(4)}), {"reward": jnp.arange(4.0)}),
    ),
    "mixture": lambda: (
        buffer := jr.Mixture(buffers=(jr.ReplayBuffer(capacity=4), jr.ReplayBuffer(capacity=6))),
        buffer.add(buffer.init({"reward": jnp.zeros(4)}), 1, {"reward": jnp.arange(4.0)}),
    ),
    "narrow": lambda: (
        buffer := jr.ReplayBuffer(capacity=4),
        buffer.add(buffer.init(narrow := {"reward": jnp.arange(4, dtype=jnp.bfloat16)}), narrow),
    ),
    "stacked": lambda: (
        buffer := jr.ReplayBuffer(capacity=4, sampler=jr.Prioritized(), donate=False),
        jax.vmap(lambda x: buffer.add(buffer.init(x), x))(jnp.zeros((3, 2))),
    ),
    "nothing": lambda: (None, {"x": jnp.zeros(3), "opt": optax.EmptyState()}),
    "own sampler": lambda: (buffer := jr.ReplayBuffer(capacity=4, sampler=Oldest()), buffer.init(jnp.zeros((1, 2)))),
}
EXPECTED = {
    "own sampler": [],
    "empty": [],
    "no priorities": ["mass", "weights"],
    "alpha 0": ["priorities", "ages", "mass", "weights"],
    "reservoir": ["returns"],
    "windows": ["priorities", "ages", "mass", "weights", "returns"],
    "sharded": ["priorities", "ages", "mass", "weights", "returns"],
    "mixture": ["1/returns"],
    "narrow": ["returns"],
    "stacked": ["priorities", "ages", "mass", "weights"],
    "nothing": [],
}


ALWAYS = ("windows", "sharded", "narrow", "reservoir", "no priorities", "nothing", "mixture", "empty", "own sampler")


@pytest.mark.parametrize("name", [name if name in ALWAYS else rarely(name) for name in OTHERS])
def test_other_states(tmp_path, name):
    config, state = OTHERS[name]()
    assert list(jr.plot(config, state)) == EXPECTED[name]
    jr.save(tmp_path / "run", config, state)
    text, page = (_report.of_checkpoint(tmp_path / "run", html=html) for html in (False, True))
    assert len(Page(page).images) == len(EXPECTED[name])
    for shown in (text, page):
        assert ("No buffer and no pools found." in shown) == (name == "nothing")
    if name == "sharded":
        assert "Sharded(ReplayBuffer)" in text
        assert "4 of 4" in text
        (view,) = _report._views.views(_report._saved.from_checkpoint(tmp_path / "run"))
        sample = config.sample(state, jax.random.key(0), 40)
        assert set(view.ages.tolist()) == set(sample.age.tolist()) == {0, 2}
    if name == "windows":
        (view,) = _report._views.views(_report._saved.from_checkpoint(tmp_path / "run"))
        live = config._live(state)
        slots = live.slots(jnp.arange(int(live.size)), config._num_slots)
        np.testing.assert_array_equal(np.sort(view.ages), np.sort(config._ages(state, slots)))
    if name == "narrow":
        (view,) = _report._views.views(_report._saved.from_checkpoint(tmp_path / "run"))
        assert view.returns[1].tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("windows", ["any", rarely("inside")])
def test_rows_of_a_state_without_its_configuration(tmp_path, windows):
    """What may be drawn and how probable it is needs no configuration; nor do ages, where all windows may be drawn."""
    sizes = {"length": LENGTH, "num_envs": NUM_ENVS, "sequence_length": 3, "stride": 2}
    buffer = jr.SequenceBuffer(**sizes, windows=windows, sampler=jr.Prioritized(epsilon=0.0), donate=False)
    steps = jnp.zeros((9, NUM_ENVS, 4), jnp.float32)
    state = buffer.add(buffer.add(buffer.init(steps), steps), steps)
    state = buffer.update(state, buffer.newest(state, 10), jnp.arange(10.0))
    expected = np.arange(10) ** 0.6 / np.sum(np.arange(10) ** 0.6)
    for name, config in {"known": buffer, "unknown": None, "another": jr.SequenceBuffer(**LONGER)}.items():
        jr.save(tmp_path / name, config, state)
        (view,) = _report._views.views(_report._saved.from_checkpoint(tmp_path / name))
        assert [leaf[:3] for leaf in view.leaves] == [("items", "float32", (4,))]
        assert view.facts["rows of each stream"] == "12 of 12 (100%)"
        assert view.facts["sequences that may be drawn"] == "10 of 10 (100%)"
        np.testing.assert_allclose(np.sort(view.law), expected, rtol=1e-5)
        if windows == "any" or name == "known":
            assert view.ages[np.argsort(view.law)].tolist() == [4, 4, 3, 3, 2, 2, 1, 1, 0, 0]
        else:
            assert view.ages is None


LONGER = {"length": 40, "num_envs": NUM_ENVS, "sequence_length": 20}


def test_a_saved_tree_is_read_as_it_is(tmp_path):
    """Lists, tuples, nodes of any class as dicts, stacked rows, narrow numbers and keys; and its size."""
    rows = np.arange(3 * 8 * 128, dtype=np.float32).reshape(3, 8, 128)
    state = {
        "pair": (jnp.ones(1, jnp.float32), [jnp.arange(3, dtype=jnp.int4)]),
        "other": collections.defaultdict(list, a=jnp.zeros((2, 2), jnp.bfloat16), b=None),
        "rows": Rows(jnp.asarray(rows), (2, 4), (128,)),
        "bits": Bits(jnp.array([1, 255], jnp.uint8), jnp.dtype("int8")),
        "key": jax.random.split(jax.random.key(0), 2),
        "number": 3,
    }
    jr.save(tmp_path, None, state)
    seen = _report._saved.from_checkpoint(tmp_path)
    sizes = [4, 3, 8, rows.nbytes, 2, 16]
    assert seen.facts["arrays"] == "6"
    assert seen.facts["bytes"] == f"{sum(sizes):,}"
    live = {name: value for name, value in state.items() if name != "number"}
    (one, (narrow,)), other, stored = seen.state["pair"], seen.state["other"], seen.state["rows"]
    assert type(seen.state["pair"]) is tuple
    assert type(seen.state["pair"][1]) is list
    assert list(other) == ["a", "b"]
    assert seen.state["number"] == 3
    found = [one, narrow, other["a"], stored, seen.state["bits"], seen.state["key"]]
    same = [live["pair"][0], live["pair"][1][0], live["other"]["a"], live["rows"], live["bits"], live["key"]]
    types = [(x.shape, str(x.dtype), _report._saved.num_bytes(x)) for x in found]
    assert types == [(x.shape, str(x.dtype), _report._saved.num_bytes(x)) for x in same[:5]] + [((2,), "key", 16)]
    assert [_report._saved.num_bytes(x) for x in same] == sizes
    assert types[3] == ((3, 2, 4, 128), "float32", rows.nbytes)
    assert np.asarray(narrow).dtype == np.float32
    assert np.asarray(narrow).tolist() == [0, 1, 2]
    np.testing.assert_array_equal(_report._saved.values(stored), rows.reshape(3, 2, 4, 128))
    assert _report._saved.values(seen.state["bits"]).tolist() == [1, -1]
    assert sorted(_report._saved.leaves_of(seen.state)) == ["bits", "key", "other.a", "pair.0", "pair.1.0", "rows"]


@pytest.mark.slow
def test_the_package_does_not_import_matplotlib():
    code = "import sys, jaxreplay; assert 'matplotlib' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_traced_values_are_refused():
    buffer = jr.ReplayBuffer(capacity=4)
    with pytest.raises(ValueError, match="state: is traced"):
        jax.eval_shape(lambda: jr.plot(buffer, buffer.init(jnp.zeros(2))))
