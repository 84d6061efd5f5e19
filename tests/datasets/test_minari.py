"""Minari data sets: as rows, drawn from buffers, and written from buffers, which gives what was put in.

They are recorded here.
"""

import dataclasses

import gymnasium
import jax
import minari
import numpy as np
import pytest
import seeds
from helpers import rarely

import jaxreplay as jr

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")  # of what describes a data set
NAMES = ("observations", "actions", "rewards", "terminations", "truncations")


@pytest.fixture(autouse=True)
def folder(monkeypatch, tmp_path):
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path))


def record(name, num_episodes, **settings):
    """Random actions; the last episode is left before it is over."""
    env = minari.DataCollector(gymnasium.make(name, **settings))
    env.action_space.seed(0)
    for episode in range(num_episodes):
        env.reset(seed=episode)
        for t in range(100):
            _, _, terminated, truncated, _ = env.step(env.action_space.sample())
            if terminated or truncated or (episode == num_episodes - 1 and t == 4):
                break
    dataset = env.create_dataset("recorded/random-v0")
    env.close()
    return dataset


def nested():
    """Two episodes with nested observations and actions, the second of one step."""
    rng, space, episodes = seeds.rng(0), gymnasium.spaces, []
    for length in (4, 1):
        episodes.append(
            minari.data_collector.EpisodeBuffer(
                observations={
                    "image": rng.integers(0, 256, (length + 1, 40, 40, 3), np.uint8),
                    "rest": (rng.normal(size=(length + 1, 2)).astype(np.float32), np.arange(length + 1)),
                },
                actions=(np.arange(length), rng.normal(size=(length, 1)).astype(np.float32)),
                rewards=rng.normal(size=length),
                terminations=np.arange(length) == 3,
                truncations=np.arange(length) == 0,  # in the first episode a truncation before the last step
            )
        )
    image, box = space.Box(0, 255, (40, 40, 3), np.uint8), space.Box(-9, 9, (2,))
    return minari.create_dataset_from_buffers(
        "made/nested-v0",
        episodes,
        observation_space=space.Dict(image=image, rest=space.Tuple([box, space.Discrete(9)])),
        action_space=space.Tuple([space.Discrete(9), space.Box(-9, 9, (1,))]),
        jpeg_encoding=False,
    )


DATASETS = {
    "CartPole": lambda: record("CartPole-v1", 6, max_episode_steps=25),
    "Pendulum": lambda: record("Pendulum-v1", 3, max_episode_steps=9),
    "nested": nested,
}


def fields(episode):
    """What an episode holds, a truncation at its last step only, in the dtypes that a buffer stores."""
    found = {name: getattr(episode, name) for name in NAMES}
    found["truncations"] = (np.arange(len(episode)) == len(episode) - 1) & ~episode.terminations
    return jax.tree.map(lambda x: x.astype(jax.dtypes.canonicalize_dtype(x.dtype)), found)


def check_equal(found, expected):
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for (path, x), y in zip(jax.tree_util.tree_leaves_with_path(found), jax.tree.leaves(expected), strict=True):
        assert (x.shape, x.dtype) == (y.shape, y.dtype), path
        np.testing.assert_array_equal(x, y, err_msg=str(path))


def filled(steps, **settings):
    buffer = jr.SequenceBuffer(length=len(steps.ends), num_envs=1, sequence_length=2, **settings)
    return buffer, buffer.add(buffer.init(steps.rows), steps.rows, ends=steps.ends)


@pytest.mark.parametrize("name", [name if i == 0 else rarely(name) for i, name in enumerate(DATASETS)])
def test_rows_draws_and_the_way_back(name):
    """Each row; each transition that is drawn; and the data set that is written from the buffer."""
    dataset = DATASETS[name]()
    episodes = [fields(episode) for episode in dataset]
    if name != "nested":
        ends = [(bool(episode["terminations"][-1]), len(episode["rewards"])) for episode in episodes]
        assert ends[-1] == (False, 5)
        assert any(terminated for terminated, _ in ends) == (name == "CartPole")
    steps = jr.datasets.from_minari(dataset)
    assert len(steps.ends) == dataset.total_steps + dataset.total_episodes
    buffer, state = filled(steps)
    items = jax.tree.map(np.asarray, buffer.get(state, np.arange(len(steps.ends) - 1)))
    row = 0
    for episode in episodes:
        for t in range(len(episode["rewards"])):
            drawn = jax.tree.map(lambda x, row=row: x[row], items)
            check_equal(drawn["observation"], jax.tree.map(lambda x, t=t: x[t : t + 2], episode["observations"]))
            now = jax.tree.map(lambda x: x[0], {key: x for key, x in drawn.items() if key != "observation"})
            check_equal(
                (now["action"], now["reward"], now["terminated"], now["truncated"], now["step"]),
                (*jax.tree.map(lambda x, t=t: x[t], tuple(episode[key] for key in NAMES[1:])), np.True_),
            )
            row += 1
        assert steps.ends[row]
        assert not steps.rows["step"][row]
        row += 1
    jr.datasets.to_minari(buffer, state, "mine/again-v0")
    again = minari.load_dataset("mine/again-v0")
    assert again.total_episodes == dataset.total_episodes
    for found, expected in zip(again, episodes, strict=True):
        check_equal({key: getattr(found, key) for key in NAMES}, expected)
    check_equal(jr.datasets.from_minari(again).ends, steps.ends)


def test_a_buffer_with_a_seam_and_two_streams():
    """Written are the episodes that are stored, the oldest without its overwritten part, stream by stream."""
    x = np.arange(20.0, dtype=np.float32)
    # Stream 0: ends at 2 (of episode 0..2), 9, 13, 17; stream 1: the same episodes, other numbers.
    terminals, timeouts = np.isin(x, [2, 13]), np.isin(x, [9, 17])
    one = jr.datasets.from_arrays(x, x, x, terminals, timeouts, x + 1)
    two = jr.datasets.from_arrays(100 + x, x, x, terminals, timeouts, x + 101)
    steps = jax.tree.map(lambda x, y: np.concatenate([x, y], axis=1), one, two)  # 25 rows
    buffer = jr.SequenceBuffer(length=14, num_envs=2, sequence_length=2)
    state = buffer.init(steps.rows)
    for start in (0, 9, 18):  # 24 of the rows: the last episode is not over
        part = jax.tree.map(lambda x, start=start: x[start : min(start + 9, 24)], steps)
        state = buffer.add(state, part.rows, ends=part.ends)
    found = jr.datasets.to_minari(
        buffer, state, "mine/seam-v0", description="a seam", action_space=gymnasium.spaces.Box(0, 20, ())
    )
    expected = [([9], [9, 10]), ([10, 11, 12, 13], [10, 11, 12, 13, 14]), ([14, 15, 16, 17], [14, 15, 16, 17, 18])]
    expected = [*expected, ([18], [18, 19])]  # step 19 has no next observation yet
    assert found.total_episodes == 2 * len(expected)
    assert found.storage.metadata["description"] == "a seam"
    assert found.action_space == gymnasium.spaces.Box(0, 20, ())
    for i, episode in enumerate(found):
        env, which = divmod(i, len(expected))
        actions, observations = expected[which]
        np.testing.assert_array_equal(episode.actions, actions)
        np.testing.assert_array_equal(episode.observations, np.array(observations) + 100 * env)
        np.testing.assert_array_equal(episode.terminations, np.array(actions) == 13)
        np.testing.assert_array_equal(episode.truncations, (np.array(actions) == actions[-1]) & (actions[-1] != 13))


def test_streams_without_rows_for_the_last_observations():
    """A step that is the last of its episode is left out; behind a terminated one the observation is repeated."""
    x, flags = np.arange(6.0, dtype=np.float32)[:, None], np.zeros((3, 6, 1), bool)
    flags[0, 2], flags[1, 4], flags[2] = True, True, True
    names = ("observation", "action", "reward", "terminated", "truncated", "step")
    rows = dict(zip(names, (x, x > 0, x, *flags), strict=True))
    # The buffer was told of an end that has no flag, and of none that has one.
    buffer, state = filled(jr.datasets.Steps({**rows, "more": x}, x == 1), windows="episodes")
    found = [(e.observations.tolist(), e.rewards.tolist()) for e in jr.datasets.to_minari(buffer, state, "mine/few-v0")]
    assert found == [([0, 1], [0]), ([2, 2], [2]), ([3, 4], [3])]
    with pytest.raises(ValueError, match="no step has a next observation"):
        jr.datasets.to_minari(buffer, buffer.init({**rows, "more": x}), "mine/none-v0")
    with pytest.raises(ValueError, match="rows: no action, reward, terminated, truncated, step"):
        jr.datasets.to_minari(buffer, buffer.init({"observation": x}), "mine/none-v0")
    with pytest.raises(ValueError, match="leaf observation: in a list; Minari stores dicts and tuples of arrays"):
        jr.datasets.to_minari(buffer, buffer.init({**rows, "observation": [x]}), "mine/none-v0")


def test_rows_that_may_not_be_drawn_are_no_steps():
    """An episode ends before one; that it says of itself that it terminated makes it no episode."""
    x, flags = np.arange(8.0, dtype=np.float32)[:, None], np.zeros((2, 8, 1), bool)
    flags[0, [2, 6]] = True  # terminated
    rows = dict(zip(("observation", "action", "reward", "terminated", "truncated"), (x, x, x, *flags), strict=True))
    rows["step"] = x != 3  # the last observation of the first episode
    buffer = jr.SequenceBuffer(length=8, num_envs=1, sequence_length=2, gaps=True, windows="episodes")
    state = buffer.add(buffer.init(rows), rows, ends=x == 3, drawable=x != 6)
    written = jr.datasets.to_minari(buffer, state, "mine/gap-v0")
    found = [(episode.observations.tolist(), episode.terminations.tolist()) for episode in written]
    assert found == [([0, 1, 2, 3], [False, False, True]), ([4, 5], [False])]
    unflagged = dataclasses.replace(buffer, windows="any")
    with pytest.raises(ValueError, match=r"windows='any', gaps=True: this state does not store .* windows=\"cut\""):
        jr.datasets.to_minari(unflagged, unflagged.init(rows), "mine/gap-v1")


def test_spaces_hold_all_arrays_like_the_rows():
    """Without an environment to ask, nested ones too; they have no bounds but those of the dtype."""
    space, flag = gymnasium.spaces, np.array([0, 0, 1], bool)
    images, rest = np.zeros((3, 1, 2, 4), np.uint8), (np.zeros((3, 1, 5), np.float32), np.zeros((3, 1, 6), bool))
    flags = {"terminated": flag & ~flag, "truncated": flag & ~flag, "step": ~flag}
    rows = {"observation": {"image": images, "rest": rest}, "action": np.zeros((3, 1), np.int32)}
    rows |= {name: x[:, None] for name, x in {"reward": flag * 1.0, **flags}.items()}
    buffer, state = filled(jr.datasets.Steps(rows, flag[:, None]))
    found = jr.datasets.to_minari(buffer, state, "mine/spaces-v0")
    assert found.observation_space == space.Dict(
        image=space.Box(0, 255, (2, 4), np.uint8),
        rest=space.Tuple([space.Box(-np.inf, np.inf, (5,), np.float32), space.MultiBinary((6,))]),
    )
    assert found.action_space == space.Box(-(2**31), 2**31 - 1, (), np.int32)
    other = buffer.init(rows | {"observation": {"image": [images]}})
    with pytest.raises(ValueError, match=r"leaf observation\['image'\]: in a list"):
        jr.datasets.to_minari(buffer, other, "mine/none-v0")


def test_what_no_buffer_can_hold():
    space = gymnasium.spaces
    buffers = [
        minari.data_collector.EpisodeBuffer(
            observations=["left", "right"], actions=[1], rewards=[1.0], terminations=[False], truncations=[False]
        )
    ]
    text = minari.create_dataset_from_buffers(
        "made/text-v0", buffers, observation_space=space.Text(9), action_space=space.Discrete(3)
    )
    with pytest.raises(ValueError, match=r"leaf \['observations'\]: got <U5, expected numbers or bools"):
        jr.datasets.from_minari(text)
