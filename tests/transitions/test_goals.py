"""Goals in hindsight."""

import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest
import seeds
from flax import struct
from helpers import rejects

import jaxreplay as jr


def reward(achieved, goal):
    return -(achieved != goal).any().astype(np.float32)  # of NumPy for the twin, or traced


def reached(achieved, goal):
    return (achieved == goal).all()


def sequences(batch_size=64, length=4, size=2):
    rng = seeds.rng(0)
    goals = rng.integers(0, 2, (3, batch_size, length, size)).astype(np.int32)
    return {
        "achieved_goal": goals[0],
        "desired_goal": goals[1],
        "reward": rng.normal(size=(batch_size, length)).astype(np.float32),
        "terminated": rng.random((batch_size, length)) < 0.3,
        "step": np.ones((batch_size, length), bool),
    }, goals[2, :, 0]


hindsight = jax.jit(jr.hindsight, static_argnums=3, static_argnames=("terminated", "achieved", "goal"))


@pytest.mark.parametrize("terminated", [None, reached])
def test_sequences_are_those_of_the_twin(terminated):
    rows, goals = sequences()
    mask = np.arange(64) % 3 > 0
    found, relabelled = hindsight(jax.random.key(0), rows, goals, reward, share=0.5, mask=mask, terminated=terminated)
    relabelled = np.asarray(relabelled)
    assert 0 < relabelled.sum() < mask.sum()
    assert not np.any(relabelled & ~mask)
    expected = oracles.hindsight(rows, goals, relabelled, reward, terminated)
    assert found.keys() == rows.keys()
    for name, x in expected.items():
        np.testing.assert_array_equal(found[name], x)
        assert found[name].dtype == rows[name].dtype


@pytest.mark.law
def test_share_is_that_of_the_batch():
    rows, goals = sequences(batch_size=20_000, length=2)
    for share in (0.0, 0.25, 0.8, 1.0):
        _, relabelled = hindsight(seeds.key(1), rows, goals, reward, share=share)
        assert abs(np.mean(np.asarray(relabelled)) - share) <= 4 * np.sqrt(share * (1 - share) / 20_000)


@struct.dataclass
class Observation:
    achieved: jax.Array
    goal: dict[str, jax.Array]


def test_goals_may_lie_anywhere_and_seeds_be_mapped():
    """Goals that are pytrees, in a dataclass in a dict; rewards of another dtype."""
    rows, goals = sequences()
    seen = Observation(rows["achieved_goal"], {"x": rows["desired_goal"]})
    nested = {"obs": seen, "reward": rows["reward"].astype(np.float16)}

    def relabel(seed):
        found, _ = jr.hindsight(
            jax.random.key(seed),
            nested,
            {"x": goals},
            lambda achieved, goal: reward(achieved, goal["x"]),
            share=jnp.float32(0.5),
            achieved=("obs", "achieved"),
            goal=("obs", "goal"),
        )
        return found

    mapped = jax.device_get(jax.jit(jax.vmap(relabel))(np.arange(2)))
    for k in range(2):
        _, relabelled = hindsight(jax.random.key(k), rows, goals, reward, share=0.5)
        expected = oracles.hindsight(rows, goals, np.asarray(relabelled), reward)
        np.testing.assert_array_equal(mapped["obs"].goal["x"][k], expected["desired_goal"])
        np.testing.assert_array_equal(mapped["reward"][k], expected["reward"].astype(np.float16))
        assert mapped["reward"].dtype == np.float16
    assert np.any(mapped["obs"].goal["x"][0] != mapped["obs"].goal["x"][1])


def test_transitions_have_the_new_goals_and_end_where_these_are_reached():
    """Rows, a later goal, hindsight and transitions, as an agent has them."""
    num_rows, gamma = 30, 0.9
    buffer = jr.SequenceBuffer(length=num_rows, num_envs=1, sequence_length=2, hindsight=True)
    place = np.arange(num_rows, dtype=np.int32)[:, None]
    ends = (place + 1) % 10 == 0  # episodes of 9 steps, and a row of the last observation
    steps = {"place": place, "goal": np.full_like(place, -1), "reward": -np.ones((num_rows, 1), np.float32)}
    steps |= {"action": place, "terminated": np.zeros_like(ends), "truncated": (place + 2) % 10 == 0, "step": ~ends}
    replay = buffer.add(buffer.init(steps), steps, ends=ends)

    @jax.jit
    def draw(replay, key):
        sample_key, later_key, goal_key = jax.random.split(key, 3)
        sample = buffer.sample(replay, sample_key, 256)
        later, count = buffer.later(replay, later_key, sample.indices)
        rows, relabelled = jr.hindsight(
            goal_key,
            sample.items,
            later["place"],
            lambda achieved, goal: jnp.where(achieved == goal, 0.0, -1.0),
            mask=count > 0,
            terminated=lambda achieved, goal: achieved == goal,
            achieved="place",
            goal="goal",
        )
        flags = rows["terminated"], rows["truncated"]
        seen = {name: rows[name] for name in ("place", "goal")}
        batch, valid = jr.sequence_transitions(
            seen, rows["action"], rows["reward"], *flags, n=1, gamma=gamma, mask=rows["step"]
        )
        return batch, valid, relabelled

    batch, valid, relabelled = jax.tree.map(np.asarray, draw(replay, jax.random.key(0)))
    place, goal = batch.S["place"], batch.S["goal"]
    assert np.all(goal[~relabelled] == -1)
    assert np.all((goal > place)[relabelled])
    assert np.all((goal // 10 == place // 10)[relabelled])
    np.testing.assert_array_equal(batch.S_next["goal"][valid], goal[valid])
    hit = valid & (goal == place + 1)
    assert 0 < hit.sum() < relabelled.sum()
    np.testing.assert_array_equal(batch.Rn[valid], np.where(hit, 0.0, -1.0)[valid])
    np.testing.assert_allclose(batch.In[valid], np.where(hit, 0.0, gamma)[valid])


def test_wrong_arguments():
    """Nothing is compiled."""
    rows, goals = sequences(batch_size=3)
    key = jax.random.key(0)
    for changed, message in (
        ({"rows": {}}, "a batch of sequences holds no arrays"),
        ({"rows": jax.tree.map(lambda x: x[:, :1], rows)}, "sequences of 1 row, expected 2 or more"),
        ({"goals": goals[:2]}, "goals: got 2, expected 3, one per sequence"),
        ({"goals": goals[:, :1]}, r"goals: leaf <root>: got int32\[1\], each row stores int32\[2\]"),
        ({"goals": goals * 1.0}, r"goals: leaf <root>: got float\d+\[2\], each row stores int32\[2\]"),
        ({"goal": "goal"}, "goal='goal': 'goal' is not in the rows; there are .*'achieved_goal'"),
        ({"achieved": ("reward", "x")}, "achieved=.*'x' is not in the rows"),
        ({"rows": {name: x for name, x in rows.items() if name != "reward"}}, "reward='reward': 'reward' is not in"),
        (
            {"reward": lambda achieved, goal: achieved == goal},
            r"reward: the function returned .* \[\[2\]\] .* expected one",
        ),
        ({"terminated": lambda achieved, goal: (1, 2)}, r"terminated: the function returned .* \[\[\], \[\]\]"),
        ({"share": 1.5}, r"share=1.5: must be a number in \[0, 1\]"),
        ({"goals": None}, r"goals: wrong structure: missing <root>;"),
        ({"goal": ()}, r"goal=\(\): must be the name of a leaf in the rows, or a tuple"),
        ({"achieved": None}, r"achieved=None: must be the name of a leaf"),
        ({"rows": {**rows, "achieved_goal": None}}, "achieved='achieved_goal': the rows hold None there"),
        ({"reward": None}, "reward=None: must be a function of the achieved and the desired goal"),
        ({"terminated": True}, "terminated=True: must be a function"),
        ({"key": 0}, "key: got 0, expected one PRNG key"),
        ({"mask": np.ones(2, bool)}, r"mask: got bool\[2\], expected bool\[3\]"),
    ):
        arguments = {"key": key, "rows": rows, "goals": goals, "reward": reward} | changed
        rejects(message, jax.eval_shape, lambda arguments=arguments: jr.hindsight(**arguments))
