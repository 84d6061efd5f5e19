"""The figure of `plot` shows what is stored and what is drawn."""

import dataclasses
import importlib
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import over_devices, rarely, rejects

import jaxreplay as jr

PRIORITIES, AGES, MASS, WEIGHTS = TITLES = ["Priorities", "Ages", "Cumulative mass", "Importance weights"]

# Names of pyparsing in camel case, which an old matplotlib uses.
pytestmark = pytest.mark.filterwarnings("ignore:'[a-z]+[A-Z][A-Za-z]*'( argument is)? deprecated:DeprecationWarning")


def legend(ax):
    return [text.get_text() for text in ax.get_legend().get_texts()]


@pytest.mark.versions
def test_what_is_seen_is_what_is_stored_and_drawn(tmp_path):
    """Of a buffer that has wrapped, of which a seventh has priority 0."""
    sampler = jr.Prioritized(alpha=0.6, beta=0.55, epsilon=0.0)
    buffer = jr.ReplayBuffer(capacity=40, sampler=sampler, donate=False)
    rows, handles = np.zeros(30, np.float32), np.arange(20, 60)
    state = buffer.add(buffer.add(buffer.init(rows), rows), rows)
    priorities = (handles % 7).astype(np.float32)
    state = buffer.update(state, handles, priorities)
    law = priorities**0.6 / np.sum(priorities**0.6)
    figure = jr.plot(buffer, state)
    by_title = {ax.get_title(loc="left"): ax for ax in figure.axes}
    assert list(by_title) == TITLES
    for title, of_items in ((PRIORITIES, priorities), (AGES, 59 - handles)):
        stored, drawn = (patch.get_data() for patch in by_title[title].patches)
        np.testing.assert_allclose(stored.values, np.histogram(of_items, stored.edges)[0] / 40, rtol=1e-6)
        np.testing.assert_allclose(drawn.values, np.histogram(of_items, drawn.edges, weights=law)[0], atol=1e-3)
        assert drawn.values.sum() == pytest.approx(1)
    zeros = np.mean(priorities == 0)
    assert by_title[PRIORITIES].get_xlabel() == f"priority (not shown: {zeros:.1%} with priority 0)"
    x, y = by_title[MASS].lines[0].get_data()
    np.testing.assert_allclose([x[0], y[0], x[-2], *y[-2:]], [0, 0, 1 - zeros, 1, 1], atol=1e-2)
    assert (x[-1], y[-1]) == (1, y[-2])  # items of probability 0 too
    shares = np.arange(1, 35) / 40
    np.testing.assert_allclose(np.interp(shares, x, y), np.cumsum(np.sort(law)[::-1])[:34], atol=1e-2)
    assert legend(by_title[MASS])[2].startswith("top 10%: ")
    assert float(legend(by_title[MASS])[2].split()[2][:-1]) == pytest.approx(100 * np.sort(law)[-4:].sum(), abs=0.3)
    weights = np.where(law > 0, (np.maximum(law, 1e-9) / law[law > 0].min()) ** -0.55, 0)
    (drawn,) = (patch.get_data() for patch in by_title[WEIGHTS].patches)
    assert drawn.edges[-1] == pytest.approx(1.02 * weights.max(), rel=1e-3)
    np.testing.assert_allclose(drawn.values, np.histogram(weights, drawn.edges, weights=law)[0], atol=1e-3)
    size = np.sum(law * weights) ** 2 / np.sum(law * weights**2)
    assert by_title[WEIGHTS].get_xlabel() == f"weight (effective sample size: {size:.0%})"
    assert legend(by_title[WEIGHTS]) == [f"mean {np.sum(law * weights):.2g}"]
    figure.savefig(tmp_path / "figure.png")
    assert (tmp_path / "figure.png").stat().st_size > 10_000
    shown = figure._repr_png_()  # for a notebook
    assert shown[:4] == (tmp_path / "figure.png").read_bytes()[:4]
    assert len(shown) > 10_000


@dataclasses.dataclass(frozen=True)
class Oldest(jr.samplers.Sampler):
    """A sampler of one's own, whose state says nothing."""

    def init(self, capacity):
        return ()

    def sample(self, state, key, batch_size, live):
        return jnp.full(batch_size, live.start), jnp.ones(batch_size)

    def weights(self, state, probabilities, live, *, beta=None):
        return probabilities


class Untold(jr.Prioritized):
    def priorities_at(self, state, probabilities):
        return None


def added(buffer, rows, *arguments, **named):
    return buffer, buffer.add(buffer.init(rows), rows, *arguments, **named)


def replay(sampler, count=4, **named):
    return added(jr.ReplayBuffer(capacity=4, sampler=sampler), ROWS[:4], mask=np.arange(4) < count, **named)


def sharded(rows, sampler, **named):
    return added(over_devices(jr.ReplayBuffer(capacity=8, sampler=sampler), 2), rows, **named)


def mixture():
    buffer = jr.Mixture(buffers=(jr.ReplayBuffer(capacity=4), RESERVOIR))
    return buffer, buffer.add(buffer.init(ROWS[:4]), 1, ROWS[:4], jax.random.key(0))


ROWS, ERRORS = np.arange(9, dtype=np.float32), np.array([1, 3, 9, 9], np.float32)
RESERVOIR = jr.ReservoirBuffer(capacity=4, sampler=jr.Prioritized())
STREAMS = jr.SequenceBuffer(length=12, num_envs=2, sequence_length=3, windows="inside", sampler=jr.Prioritized())
STEPS, ENDS, FIRST_TWO = np.zeros((12, 2), np.float32), np.arange(24).reshape(12, 2) % 7 == 0, np.arange(4) < 2
SHARP = jr.Prioritized(alpha=1.0, beta=1.0)
HEAVY = jr.Prioritized(alpha=1.0, beta=1.0, epsilon=0.0, normalize=None)
CASES = {
    "empty": (lambda: replay(jr.Prioritized(), 0), [""]),
    "no mass": (lambda: replay(jr.Prioritized(epsilon=0.0), td_errors=np.zeros(4, np.float32)), [AGES, MASS, WEIGHTS]),
    "alpha 0": (lambda: replay(jr.Prioritized(alpha=0.0)), TITLES),
    "without replacement": (lambda: replay(jr.Uniform(replacement=False)), [AGES, MASS, WEIGHTS]),
    "own sampler": (lambda: replay(Oldest()), [AGES, MASS, WEIGHTS]),
    "priorities of draws untold": (lambda: replay(Untold()), [AGES, MASS, WEIGHTS]),
    "reservoir": (lambda: added(RESERVOIR, ROWS, jax.random.key(0)), [PRIORITIES, MASS, WEIGHTS]),
    "sequences": (lambda: added(STREAMS, STEPS, ends=ENDS), TITLES),
    "sharded": (lambda: sharded(ROWS[:8], jr.Prioritized(), td_errors=ROWS[:8]), TITLES),
    "half empty": (lambda: sharded(ROWS[:4], SHARP, mask=FIRST_TWO, td_errors=ERRORS), TITLES),
    "mixture": (mixture, ["", PRIORITIES, MASS, WEIGHTS]),
    "heavy weight": (lambda: replay(HEAVY, td_errors=np.array([1, 1, 1, 0.01], np.float32)), TITLES),
}
RARE = ("alpha 0", "without replacement", "reservoir", "sequences")


@pytest.mark.parametrize("name", [rarely(name) if name in RARE else name for name in CASES])
def test_every_buffer(name):
    make, expected = CASES[name]
    buffer, state = make()
    figure = jr.plot(buffer, state)
    assert [ax.get_title(loc="left") for ax in figure.axes] == expected
    for title, ax in zip(expected, figure.axes, strict=True):
        if title == PRIORITIES and "not shown" not in ax.get_xlabel():
            assert [patch.get_data().values.sum() for patch in ax.patches] == pytest.approx([1, 1])
        if title == MASS:
            assert ax.lines[1].get_xydata().tolist() == [[0, 0], [1, 1]]  # uniform
            assert ax.lines[0].get_ydata()[-1] == pytest.approx(1)
            assert np.isfinite(ax.lines[0].get_xdata()).all()  # also of rows that hold no item
    if name == "own sampler":
        _, drawn = (patch.get_data().values for patch in figure.axes[0].patches)
        assert drawn.tolist() == [0, 0, 0, 1]  # the oldest
    if name == "half empty":  # rows of the empty shard hold no item
        assert figure.axes[0].get_xlabel() == "priority"
        for ax in figure.axes[:2]:
            assert ax.patches[0].get_data().values.tolist().count(0.5) == 2
        drawn = np.sort(figure.axes[0].patches[1].get_data().values)
        assert drawn[-2:] == pytest.approx([0.25, 0.75], abs=0.01)
        assert np.interp(0.75, *figure.axes[2].lines[0].get_data()) == pytest.approx(0.875, abs=0.01)
        assert legend(figure.axes[3]) == ["mean 0.5"]  # 1 and 1/3, drawn 1 and 3 times
    if name == "sharded":  # shards have equal mass, and ages count insertions into all
        td_errors = np.arange(8) + 1e-6
        law = (td_errors**0.6).reshape(2, 4) / np.sum((td_errors**0.6).reshape(2, 4), axis=1, keepdims=True) / 2
        stored, drawn = (patch.get_data() for patch in figure.axes[0].patches)
        assert stored.values.sum() == pytest.approx(1)
        expected = np.histogram(td_errors, drawn.edges, weights=law.ravel())[0]
        np.testing.assert_allclose(drawn.values, expected, atol=0.01)
        ages = figure.axes[1].patches[0].get_data()
        assert (ages.values.tolist(), ages.edges.tolist()) == ([0.25, 0, 0.25, 0, 0.25, 0, 0.25], [*range(8)])
    if name == "mixture":  # equal priorities are in the middle of a decade
        edges = figure.axes[1].patches[0].get_data().edges
        np.testing.assert_allclose([edges[0], edges[-1]], [10**-0.5, 10**0.5], rtol=0.01)
    if name == "heavy weight":  # of 75, in a third of a percent of the draws; all others of 0.75
        assert figure.axes[3].patches[0].get_data().edges[-1] == pytest.approx(1.1 * 0.7525, rel=1e-3)


def test_errors(monkeypatch):
    buffer, pools = jr.ReplayBuffer(capacity=4), jr.DifficultyPools(tasks_per_env=(4,))
    rejects("state: is traced", jax.eval_shape, lambda: jr.plot(buffer, buffer.init(np.zeros(2, np.float32))))
    rejects(r"buffer=DifficultyPools.*must be a buffer of jaxreplay", jr.plot, pools, pools.init())
    swapped = buffer.init(np.zeros((2, 9), np.float32))
    rejects(r"^buffer=ReplayState\(. of . items, .{1,60}: must be", jr.plot, swapped, buffer)  # in one line
    rejects("capacity=5", jr.plot, jr.ReplayBuffer(capacity=5), buffer.init(np.zeros(2, np.float32)))
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    rejects(r"matplotlib.*jaxreplay\[plots\]", jr.plot, buffer, buffer.init(np.zeros(2, np.float32)), error=ImportError)


@pytest.mark.slow
def test_a_notebook_that_imports_nothing_else_shows_the_figure():
    nbclient, nbformat = map(importlib.import_module, ("nbclient", "nbformat"))  # of the extra `examples`
    cells = (
        "import jax, jaxreplay as jr, numpy as np; rows, buffer = np.zeros(4), jr.ReplayBuffer(capacity=8)",
        "state = jax.block_until_ready(buffer.add(buffer.init(rows), rows)); state",
        "jr.plot(buffer, state)",
    )
    notebook = nbformat.v4.new_notebook(cells=[*map(nbformat.v4.new_code_cell, cells)])
    nbclient.NotebookClient(notebook, timeout=300).execute()
    _, (state,), (figure,) = ([output["data"] for output in cell["outputs"]] for cell in notebook["cells"])
    assert state == {"text/plain": "ReplayState(4 of 8 items, 40 bytes; items float32[])"}
    assert {*figure} == {"image/png", "text/plain"}
