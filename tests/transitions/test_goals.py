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
    seen = Observation(rows["achieved_goal"], {"x": {"y": rows["desired_goal"]}})
    nested = {"obs": seen, "reward": rows["reward"].astype(np.float16)}

    names = {"achieved": ("obs", "achieved"), "goal": ("obs", "goal", "x")}

    def own(achieved, goal):
        return reward(achieved, goal["y"])

    def relabel(seed):
        return jr.hindsight(jax.random.key(seed), nested, {"y": goals}, own, share=jnp.float32(0.5), **names)[0]

    mapped = jax.device_get(jax.jit(jax.vmap(relabel))(np.arange(2)))
    for k in range(2):
        _, relabelled = hindsight(jax.random.key(k), rows, goals, reward, share=0.5)
        expected = oracles.hindsight(rows, goals, np.asarray(relabelled), reward)
        np.testing.assert_array_equal(mapped["obs"].goal["x"]["y"][k], expected["desired_goal"])
        np.testing.assert_array_equal(mapped["reward"][k], expected["reward"].astype(np.float16))
        assert mapped["reward"].dtype == np.float16
    assert np.any(mapped["obs"].goal["x"]["y"][0] != mapped["obs"].goal["x"]["y"][1])


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
        ({"reward": lambda x, goal: x == goal}, r"reward: the function returned .* \[\[2\]\] .* expected one"),
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
