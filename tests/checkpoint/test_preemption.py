"""A run of rollouts that is killed and resumed neither loses nor repeats a group: it ends as if not interrupted.

The run makes groups of rollouts, learns from each of them once, and goes on from its last save.
"""

import os
import random
import signal
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checkpoint_runs import assert_same
from faults import Child
from helpers import run_once

import jaxreplay as jr

pytestmark = pytest.mark.versions
STEPS, SHORT, SAVE_EVERY = 63, 8, 2
IN_FLIGHT, BATCH = 6, 8
BUFFER = jr.ReplayBuffer(capacity=64, sampler=jr.Uniform(replacement=False), max_uses=1)


def start(policy, numbers, key):
    """Groups with these numbers (of the list of prompts), and ticks until each is done."""
    rewards = policy + jax.random.normal(key, numbers.shape)
    return {"number": numbers, "reward": rewards}, jax.random.randint(jax.random.fold_in(key, 1), numbers.shape, 1, 6)


@run_once
def begin():
    key = jax.random.key(7)
    flight, left = start(0.0, jnp.arange(IN_FLIGHT), key)
    return {
        "replay": BUFFER.init(flight),
        "policy": jnp.zeros(()),
        "flight": flight,
        "left": left,
        "cursor": jnp.int32(IN_FLIGHT),  # of the list of prompts
        "drawn": jnp.full(BATCH, -1, jnp.int32),  # handles of groups that were drawn, and not yet learned from
        "key": key,
        "version": jnp.int32(0),  # of the policy, which is the number of steps
        "learned": jnp.zeros(STEPS * IN_FLIGHT, jnp.int32),  # how often, of each group ever started
    }


@run_once
def learn(state):
    """Learn from the groups that an earlier step has drawn, perhaps in a process that is no more."""
    items, there = BUFFER.get(state["replay"], state["drawn"]), state["drawn"] >= 0
    number = jnp.where(there, items["number"], len(state["learned"]))
    return state | {
        "policy": 0.9 * state["policy"] + 0.1 * jnp.mean(there * items["reward"]),
        "replay": BUFFER.update(state["replay"], state["drawn"], jnp.zeros(BATCH)),
        "drawn": jnp.full(BATCH, -1, jnp.int32),
        "version": state["version"] + 1,
        "learned": state["learned"].at[number].add(1, mode="drop"),
    }


@run_once
def generate(state):
    """Add the groups that are done, and start the next prompts of the list in their places."""
    key, new_key = jax.random.split(state["key"])
    done = state["left"] == 1
    rows, left = start(state["policy"], state["cursor"] + jnp.cumsum(done) - 1, new_key)
    return state | {
        "replay": BUFFER.add(state["replay"], state["flight"], mask=done),
        "flight": jax.tree.map(lambda new, old: jnp.where(done, new, old), rows, state["flight"]),
        "left": jnp.where(done, left, state["left"] - 1),
        "cursor": state["cursor"] + jnp.sum(done, dtype=jnp.int32),
        "key": key,
    }


@run_once
def draw(state):
    key, draw_key = jax.random.split(state["key"])
    return state | {"drawn": BUFFER.sample(state["replay"], draw_key, BATCH).indices, "key": key}


def resumed(path):
    """The state of the last save at `path`, or a new one if there is none."""
    try:
        return jr.restore(path, BUFFER, begin())
    except FileNotFoundError:
        return begin()


def run(path, state, reached=lambda step: None, steps=STEPS, wait=False):
    """The last state of a run that goes on from `state` and is saved at `path`; calls `reached` at many moments."""
    for step in range(int(state["version"]), steps):
        for part in (learn, generate, draw):
            state = part(state)
            reached(step)
        if (step + 1) % SAVE_EVERY == 0 or step + 1 == steps:
            finish = jr.save(path, BUFFER, state, wait=wait)  # all of it, in one call
            reached(step + 1)
    finish()
    return state


def check_once(state):
    """Every group was learned from once, but for those that are in flight, stored or drawn at the end."""
    learned, started, replay = np.asarray(state["learned"]), int(state["cursor"]), state["replay"]
    unused = np.asarray(BUFFER.priorities(replay, BUFFER.handles(replay, np.arange(64)))) > 0
    rest = {*state["flight"]["number"].tolist(), *np.asarray(replay.storage["number"])[unused].tolist()}
    np.testing.assert_array_equal(learned[:started], [number not in rest for number in range(started)])
    assert not learned[started:].any()
    assert learned.sum() > started // 3


def test_a_run_that_is_interrupted_twice_ends_as_if_not(tmp_path):
    expected = run(tmp_path / "whole", begin(), steps=SHORT, wait=True)
    check_once(expected)
    for moment in (4, 10):  # before the first save, and with groups that are drawn but not learned from
        left = iter(range(moment))
        with pytest.raises(StopIteration):
            run(tmp_path / "run", resumed(tmp_path / "run"), lambda _, left=left: next(left), SHORT, wait=True)
    saved = resumed(tmp_path / "run")
    assert 0 < saved["version"] < SHORT
    assert np.any(saved["drawn"] >= 0)
    assert_same(run(tmp_path / "run", saved, steps=SHORT, wait=True), expected)
    # Each part of the save is needed: groups are lost or repeated without it, or learned from too late.
    for part, differs in {"flight": "learned", "cursor": "learned", "drawn": "policy"}.items():
        found = run(tmp_path / part, saved | {part: begin()[part]}, steps=SHORT, wait=True)
        assert np.any(found[differs] != expected[differs])


def run_until_killed(path, connection):
    run(path, resumed(path), lambda step: connection.send(("step", step)))
    connection.send(("done", 1))


@pytest.mark.slow
def test_a_run_that_is_killed_at_20_moments_neither_loses_nor_repeats_a_group(tmp_path, children):
    expected = run(tmp_path / "whole", begin())
    check_once(expected)
    rng, kills, seen, unfinished = random.Random(0), 20, set(), 0
    for kill in range(kills):
        child = Child(children, run_until_killed, tmp_path / "run")
        child.wait("step", (kill + 1) * STEPS // (kills + 1))
        time.sleep(0.03 * rng.random())
        child.process.kill()
        assert child.ended() == -signal.SIGKILL
        seen.add(child.last["step"])
        unfinished += any(".part" in entry for entry in os.listdir(tmp_path / "run"))
    child = Child(children, run_until_killed, tmp_path / "run")
    child.wait("done", 1)
    assert child.ended() == 0
    assert len(seen) > kills * 3 // 4, seen  # the moments are spread over the run
    assert unfinished >= 1  # some kills were during a save
    assert_same(resumed(tmp_path / "run"), expected)
    assert int(expected["cursor"]) > 2 * STEPS > IN_FLIGHT
