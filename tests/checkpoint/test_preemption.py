"""A run of rollouts that is killed and resumed neither loses nor repeats a group: it ends as if not interrupted."""

import itertools
import os
import random
import signal
import time

import numpy as np
import pytest
from checkpoint_runs import assert_same
from faults import Child
from rollout_runs import CONFIG, IN_FLIGHT, STEPS, begin, resumed, run, run_until_killed

pytestmark = pytest.mark.versions
SHORT = 8  # steps


class Preempted(Exception):
    pass


def check_once(state):
    """Every group was learned from once, but for those that are in flight, stored or drawn at the end."""
    learned, started, replay = np.asarray(state["learned"]), int(state["cursor"]), CONFIG["replay"]
    unused = np.asarray(replay.priorities(state["replay"], replay.handles(state["replay"], np.arange(64)))) > 0
    rest = [state["flight"]["number"], np.asarray(state["replay"].storage["number"])[unused]]
    rest = {*np.concatenate(rest).tolist()}
    np.testing.assert_array_equal(learned[:started], [number not in rest for number in range(started)])
    assert not learned[started:].any()
    assert learned.sum() > started // 3


def test_a_run_that_is_interrupted_twice_ends_as_if_not(tmp_path):
    expected = run(tmp_path / "whole", begin(), steps=SHORT, wait=True)
    check_once(expected)
    for moment in (4, 10):  # before the first save, and with groups that are drawn but not learned from
        moments = itertools.count()

        def reached(step, moment=moment, moments=moments):
            if next(moments) == moment:
                raise Preempted

        with pytest.raises(Preempted):
            run(tmp_path / "run", resumed(tmp_path / "run"), reached, steps=SHORT, wait=True)
    saved = resumed(tmp_path / "run")
    assert 0 < saved["version"] < SHORT
    assert np.any(saved["drawn"] >= 0)
    assert_same(run(tmp_path / "run", saved, steps=SHORT, wait=True), expected)
    # Each part of the save is needed: groups are lost or repeated without it, or learned from too late.
    for part, differs in {"flight": "learned", "cursor": "learned", "drawn": "policy"}.items():
        found = run(tmp_path / part, saved | {part: begin()[part]}, steps=SHORT, wait=True)
        assert np.any(found[differs] != expected[differs])


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
    found = resumed(tmp_path / "run")
    assert_same(found, expected)
    assert int(found["cursor"]) > 2 * STEPS > IN_FLIGHT
