"""Minari data sets, recorded here, as rows and as draws from a buffer."""

import dataclasses
import functools
import types

import gymnasium
import jax
import minari
import numpy as np
import pytest
import seeds
from helpers import rarely, rejects

import jaxreplay as jr

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")  # of what describes a data set
NAMES = ("observations", "actions", "rewards", "terminations", "truncations")


@pytest.fixture(autouse=True)
def folder(monkeypatch, tmp_path):
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path))


def cart_pole():
    """Random actions; the last episode is left before it is over."""
    env = minari.DataCollector(gymnasium.make("CartPole-v1", max_episode_steps=25))
    env.action_space.seed(0)
    for episode in range(6):
        env.reset(seed=episode)
        for t in range(100):
            _, _, terminated, truncated, _ = env.step(env.action_space.sample())
            if terminated or truncated or (episode == 5 and t == 4):
                break
    dataset = env.create_dataset("recorded/random-v0")
    env.close()
    return dataset


def nested():
    """Two episodes with nested observations and actions, the second of one step."""
    rng, space, episodes = seeds.rng(0), gymnasium.spaces, []
    for length in (4, 1):
        rest = rng.normal(size=(length + 1, 2)).astype(np.float32), np.arange(length + 1)
        episode = {
            "observations": {"image": rng.integers(0, 256, (length + 1, 40, 40, 3), np.uint8), "rest": rest},
            "actions": (np.arange(length), rng.normal(size=(length, 1)).astype(np.float32)),
            "rewards": rng.normal(size=length),
            "terminations": np.arange(length) == 3,
            "truncations": np.arange(length) == 0,  # in the first episode a truncation before the last step
        }
        episodes.append(minari.data_collector.EpisodeBuffer(**episode))
    image, box = space.Box(0, 255, (40, 40, 3), np.uint8), space.Box(-9, 9, (2,))
    return minari.create_dataset_from_buffers(
        "made/nested-v0",
        episodes,
        observation_space=space.Dict(image=image, rest=space.Tuple([box, space.Discrete(9)])),
        action_space=space.Tuple([space.Discrete(9), space.Box(-9, 9, (1,))]),
        jpeg_encoding=False,
    )


def fields(episode):
    """What an episode holds, a truncation at its last step only, in the dtypes that a buffer stores."""
    found = {name: getattr(episode, name) for name in NAMES}
    found["truncations"] = (np.arange(len(episode)) == len(episode) - 1) & ~episode.terminations
    return jax.tree.map(lambda x: x.astype(jax.dtypes.canonicalize_dtype(x.dtype)), found)


check_equal = functools.partial(jax.tree.map, functools.partial(np.testing.assert_array_equal, strict=True))


@pytest.mark.parametrize("make", [cart_pole, rarely(nested)])
def test_rows_and_draws(make):
    """Each row, and each transition that is drawn."""
    dataset = make()
    episodes = [fields(episode) for episode in dataset]
    if make is cart_pole:
        assert any(episode["terminations"][-1] for episode in episodes)
        assert (len(episodes[-1]["rewards"]), episodes[-1]["terminations"].any()) == (5, False)
    steps = jr.datasets.from_minari(dataset)
    assert len(steps.ends) == dataset.total_steps + dataset.total_episodes
    buffer = jr.SequenceBuffer(length=len(steps.ends), num_envs=1, sequence_length=2)
    state = buffer.add(buffer.init(steps.rows), steps.rows, ends=steps.ends)
    items = jax.tree.map(np.asarray, buffer.get(state, np.arange(len(steps.ends) - 1)))
    row = 0
    for episode in episodes:
        for t in range(len(episode["rewards"])):
            drawn = jax.tree.map(lambda x, row=row: x[row], items)
            check_equal(drawn["observation"], jax.tree.map(lambda x, t=t: x[t : t + 2], episode["observations"]))
            now = jax.tree.map(lambda x: x[0], [drawn[key] for key in ("action", "reward", "terminated", "truncated")])
            check_equal(now, jax.tree.map(lambda x, t=t: x[t], [episode[key] for key in NAMES[1:]]))
            assert drawn["step"][0]
            row += 1
        assert steps.ends[row]
        assert not steps.rows["step"][row]
        row += 1


def test_an_episode_without_a_step_is_left_out():
    dataset = cart_pole()
    none = {name: getattr(dataset[0], name)[: name == "observations"] for name in NAMES}
    more = types.SimpleNamespace(iterate_episodes=lambda: [dataclasses.replace(dataset[0], **none), *dataset])
    check_equal(jr.datasets.from_minari(more), jr.datasets.from_minari(dataset))


def test_what_no_buffer_can_hold():
    space, flags = gymnasium.spaces, {"terminations": [False], "truncations": [False]}
    for name, observations, observed, message in (
        ("text", ["left", "right"], space.Text(9), r"leaf \['observations'\]: got <U5, expected numbers or bools"),
        ("few", [0], space.Discrete(3), r"episode 0: got 1 observations, expected 1 \+ 1"),
    ):
        episode = minari.data_collector.EpisodeBuffer(observations=observations, actions=[1], rewards=[1.0], **flags)
        spaces = {"observation_space": observed, "action_space": space.Discrete(3)}
        dataset = minari.create_dataset_from_buffers(f"made/{name}-v0", [episode], **spaces)
        rejects(message, jr.datasets.from_minari, dataset)
