"""Recorded data as rows and as transitions: what is drawn is what the data hold, transition by transition."""

import importlib.util
import pathlib
import sys
import types

import chex
import jax
import numpy as np
import oracles
import seeds
from helpers import rejects
from hypothesis import given, settings
from hypothesis import strategies as st

import jaxreplay as jr

GAMMA, N, NUM_ROWS = 0.9, 3, 40
SEQUENCES = jr.SequenceBuffer(length=NUM_ROWS, num_envs=1, sequence_length=N + 1, donate=False)


NAMES = ("observation", "action", "reward", "terminated", "truncated")


def random_data(endings, with_next):
    """Steps whose action is their number; `endings`: 0 if the episode goes on, 1 terminated, 2 timed out, 3 both."""
    endings, count = np.asarray(endings), len(endings)
    rng, numbers, terminals, timeouts = seeds.rng(0), np.arange(count, dtype=np.int32), endings % 2 == 1, endings >= 2
    x, ids = rng.normal(size=(count, 2)).astype(np.float32), numbers.astype(np.uint8)
    last = (terminals | timeouts | (numbers == count - 1)).astype(np.uint8)
    following = {"x": np.roll(x, -1, axis=0) + np.float32(9) * last[:, None], "id": np.roll(ids, -1) + 100 * last}
    rewards = rng.integers(1, 9, count).astype(np.float32)
    data = {"observations": {"x": x, "id": ids}, "actions": numbers, "rewards": rewards, "terminals": terminals}
    data |= {"timeouts": timeouts, "next_observations": following if with_next else None}
    return data, oracles.Dataset(**data)


def check_transitions(batch, valid, twin, n):
    """They are those of the twin, by action, and all of them."""
    expected, found = twin.transitions(n, GAMMA), set()
    batch = jax.tree.map(np.asarray, batch)
    for row in np.flatnonzero(valid):
        step = int(batch.A[row])
        obs, Rn, In, following = expected[step]
        for name, value in obs.items():
            np.testing.assert_array_equal(batch.S[name][row], value)
        np.testing.assert_allclose([batch.Rn[row], batch.In[row]], [Rn, In], rtol=1e-6)
        if In > 0:
            for name, value in following.items():
                np.testing.assert_array_equal(batch.S_next[name][row], value)
        found.add(step)
    assert found == set(expected)


@settings(max_examples=40)
@given(st.lists(st.sampled_from([0, 0, 0, 1, 2, 3]), min_size=1, max_size=18), st.booleans())
def test_what_is_drawn_is_the_data(endings, with_next):
    """Rows equal the twin's, and all draws of a buffer and all transitions equal those of a plain loop."""
    data, twin = random_data(endings, with_next)
    if not twin.rows():
        rejects("no step has a next observation; give more steps,", jr.datasets.from_arrays, **data)
        return
    steps = jr.datasets.from_arrays(**data)
    assert len(steps.ends) == len(twin.rows())
    for t, row in enumerate(twin.rows()):
        chex.assert_trees_all_equal(jax.tree.map(lambda x, t=t: x[t, 0], {name: steps.rows[name] for name in row}), row)
        assert steps.ends[t, 0] == (not row["step"])
    padded = steps.padded(NUM_ROWS - len(steps.ends) + 2)  # one shape for all examples
    state = SEQUENCES.add(SEQUENCES.init(padded.rows), padded.rows, ends=padded.ends)
    items = SEQUENCES.get(state, np.arange(NUM_ROWS - N, dtype=np.int32))
    columns = [items[name] for name in NAMES]
    check_transitions(*jr.sequence_transitions(*columns, n=N, gamma=GAMMA, mask=items["step"]), twin, N)
    for n in (N, 20):  # more than the data have steps
        rows = {**padded.rows, "return of the episode": np.zeros(3)}
        batch = jr.datasets.transitions(rows, padded.ends, n=n, gamma=GAMMA)
        assert all(isinstance(leaf, np.ndarray) for leaf in jax.tree.leaves(batch))
        assert batch.S["id"].dtype == np.uint8
        assert np.all(np.diff(batch.A) > 0)
        check_transitions(batch, np.ones(batch.batch_size, bool), twin, n)


def test_padding_leaves_no_step_undrawn():
    """And sequences that start with an episode start with each, and with no row that was added."""
    data, _ = random_data([0, 0, 2, 0, 1, 0, 0], True)
    plain, length = jr.datasets.from_arrays(**data), 5
    steps = plain.padded(length)
    buffer = jr.SequenceBuffer(length=len(steps.ends), num_envs=1, sequence_length=length, windows="episodes")
    state = buffer.add(buffer.init(steps.rows), steps.rows, ends=steps.ends)
    assert buffer.size(state) == 3
    episodes = jax.device_get(buffer.get(state, np.arange(3)))
    np.testing.assert_array_equal(episodes["action"][:, 0], [0, 3, 5])
    assert episodes["step"][:, 0].all()
    assert len(steps.ends) - length == np.flatnonzero(plain.rows["step"])[-1]  # the last start, and no more
    assert plain.padded(2).ends.shape == plain.padded(1).ends.shape == plain.ends.shape
    assert plain.padded(100).ends.shape == (len(plain.ends) + 98, 1)
    rejects("sequence_length=2147483648: must be an integer from 1", plain.padded, 2**31)
    old, new = plain.rows, steps.rows  # the last row of the last episode is now the last that was added
    np.testing.assert_array_equal(steps.ends, np.append(plain.ends[:-1], [[False], [False], [False], [True]], axis=0))
    np.testing.assert_array_equal(new["step"], np.append(old["step"], np.zeros((3, 1), bool), axis=0))
    for x, padded in zip(*(jax.tree.leaves(rows["observation"]) for rows in (old, new)), strict=True):
        np.testing.assert_array_equal(padded, np.append(x, x[[-1] * 3], axis=0))


def test_steps_without_rows_of_their_own_for_the_last_observation():
    """Of rows whose ends hold steps: a terminated one is kept, a truncated one has nothing to bootstrap from."""
    x = np.arange(6, dtype=np.float32)[:, None]
    flags = np.zeros((3, 6, 1), bool)
    flags[0, 2], flags[1, 4], flags[2] = True, True, True  # terminated, truncated, step
    rows = dict(zip((*NAMES, "step"), (x, x, 1 + x, *flags), strict=True))
    batch = jr.datasets.transitions(rows, flags[0] | flags[1], n=2, gamma=0.5)
    np.testing.assert_array_equal(batch.A, [0, 1, 2, 3])  # not 4, which is cut off, nor 5, where the data end
    np.testing.assert_array_equal(batch.Rn, [2, 3.5, 3, 4])
    np.testing.assert_array_equal(batch.In, [0.25, 0, 0, 0.5])
    np.testing.assert_array_equal(batch.S_next, [2, 2, 2, 4])


def test_padding_invents_no_transition_and_loses_none():
    """Of streams whose last row holds a step: terminated, truncated, cut off, and the first of its episode."""
    x = np.arange(6, dtype=np.float32)[:, None] + 10 * np.arange(4, dtype=np.float32)
    terminated, truncated, ends = np.zeros((3, 6, 4), bool)
    terminated[5, 0] = truncated[5, 1] = truncated[3, 3] = ends[5, :2] = ends[4, 3] = True
    step = ~ends | (np.arange(6) == 5)[:, None]
    rows = dict(zip((*NAMES, "step"), (x, x, 1 + x * step, terminated, truncated, step), strict=True))
    plain, n, length = jr.datasets.Steps(rows, ends), 2, 4
    steps = plain.padded(length)
    expected = jr.datasets.transitions(*plain, n=n, gamma=0.5)
    assert {5, 14, 24, 33} <= {*expected.A}
    assert not {15, 25, 34, 35} & {*expected.A}
    buffer = jr.SequenceBuffer(length=len(steps.ends), num_envs=4, sequence_length=length)
    state = buffer.add(buffer.init(steps.rows), steps.rows, ends=steps.ends)
    items = buffer.get(state, np.arange(buffer.size(state)))
    drawn, valid = jr.sequence_transitions(*[items[name] for name in NAMES], n=n, gamma=0.5, mask=items["step"])
    for found in (jr.datasets.transitions(*steps, n=n, gamma=0.5), jax.tree.map(lambda leaf: leaf[valid], drawn)):
        found = {float(x.A[0]): x for x in found.to_singles()}
        assert found.keys() == {*expected.A}
        for one in expected.to_singles():
            other, names = found[float(one.A[0])], ["Rn", "In", *["S_next"] * bool(one.In > 0)]
            assert [getattr(other, name) for name in names] == [getattr(one, name) for name in names]


def test_ogbench(tmp_path):
    """The last row of an episode has no step, and its action is no action."""
    path, terminals = tmp_path / "pointmaze-navigate-v0.npz", np.array([0, 0, 1, 1, 0, 1, 0, 0], np.float32)
    arrays = {"observations": np.arange(16.0).reshape(8, 2), "actions": 1 + np.arange(8, dtype=np.float32)[:, None]}
    np.savez(path, terminals=terminals, qpos=terminals, **arrays)
    rows, ends = jr.datasets.from_ogbench(path)
    np.testing.assert_array_equal(rows["observation"][:, 0], arrays["observations"][[0, 1, 2, 4, 5, 6, 7]])
    np.testing.assert_array_equal(rows["action"][:, 0, 0], [1, 2, 0, 5, 0, 7, 0])
    np.testing.assert_array_equal(rows["step"][:, 0], [1, 1, 0, 1, 0, 1, 0])
    np.testing.assert_array_equal(rows["truncated"][:, 0], [0, 1, 0, 1, 0, 1, 0])
    assert not rows["terminated"].any()
    assert not rows["reward"].any()
    np.testing.assert_array_equal(ends, ~rows["step"])
    np.savez(path, observations=terminals, qpos=terminals)
    rejects(r"path=.*: has no actions, terminals; it has observations, qpos", jr.datasets.from_ogbench, str(path))


def test_next_observations_may_hold_nan():
    x = np.array([0.0, np.nan, 2.0])
    rows, _ = jr.datasets.from_arrays(x, x, x, x == 5, x == 5, np.array([np.nan, 2.0, 3.0]))
    np.testing.assert_array_equal(rows["observation"][:, 0], [0, np.nan, 2, 3])


def test_what_is_refused():
    flat, following = np.zeros(5), "next_observations"
    data = {"observations": np.arange(5.0), "actions": flat, "rewards": flat, "terminals": flat, "timeouts": flat}
    for name, wrong, message in (
        ("rewards", np.zeros(4), r"leaf \['rewards'\]: leading axes \[4\] differ from \[5\]"),
        ("rewards", np.zeros((5, 1)), r"rewards: got float64\[5, 1\], expected one for each step, \[N\]"),
        ("timeouts", np.zeros((5, 2)), r"timeouts: got float64\[5, 2\], expected one for each step, \[N\]"),
        ("actions", np.array(["left"] * 5), r"leaf \['actions'\]: got <U4, expected numbers or bools"),
        (following, np.zeros(5), r"next_observations\[0\] differs from observations\[1\].*timeouts"),
        (following, np.arange(1.0, 7), r"next_observations: got 6 rows, expected 5, one for each step"),
        (following, np.zeros((5, 2)), r"leaf <root>: got float\d+\[2\], the data set stores float\d+\[\]"),
    ):
        rejects(message, jr.datasets.from_arrays, **data | {name: wrong})
    x = np.zeros((3, 1))
    rows = dict.fromkeys((*NAMES, "step"), x)
    call, wide = jr.datasets.transitions, rows | {"reward": x[..., None]}
    rejects("rows: no observation, action", call, None, x > 0)
    rejects("rows: no action, reward, terminated, truncated, step; expected a dict of", call, {"observation": x}, x > 0)
    rejects(r"leaf \['reward'\]: got float64\[3, 1, 1\], expected \[3, 1\]", call, wide, x > 0)
    rejects(r"ends: got float\d+\[3, 1\], expected bool\[3, 1\]", call, rows, x)
    rejects(r"dataset='cartpole-v0': must be a minari.MinariDataset; load one", jr.datasets.from_minari, "cartpole-v0")
    rejects("no step has a next", jr.datasets.from_minari, types.SimpleNamespace(iterate_episodes=lambda: iter(())))
    rejects("sequence_length=0: must be an integer", jr.datasets.Steps(rows, x > 0).padded, 0)


def test_importing_the_module_imports_no_package_of_a_data_set(monkeypatch):
    for name in ("minari", "h5py", "gymnasium", "PIL"):
        monkeypatch.setitem(sys.modules, name, None)  # importing it is an error
    for file in pathlib.Path(jr.datasets.__file__).parent.glob("*.py"):
        spec = importlib.util.spec_from_file_location(f"copy_of_{file.stem}", file)
        spec.loader.exec_module(importlib.util.module_from_spec(spec))
