"""Tracers do in random calls what their twin does: one by one, of whole rollouts, and of sequences of rows."""

import collections
import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest
import seeds
import twins
from helpers import at, check_happened, rarely, run_once
from rollouts import DISCOUNTS, at_once, first, make_rows, make_steps, of_sequences

import jaxreplay as jr
from jaxreplay.transitions import _windows

FLAGS = ("r", "terminated", "truncated", "mask")
WHOLE = (0, 6, 11)  # lengths of segments that are also traced at once


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """What is traced. A `gamma` of None is another traced one, or one per environment, for each call."""

    n: int
    gamma: float | None = 0.9
    num_envs: int = 3
    next_action: bool = False
    record_extra_info: bool = False
    discounts: bool = False  # each step has one

    @property
    def tracer(self):
        return jr.NStep(num_envs=self.num_envs, **self.settings)

    @property
    def settings(self):
        kept = {"next_action": self.next_action, "record_extra_info": self.record_extra_info}
        return {"n": self.n, "gamma": None if self.discounts else self.gamma, **kept}


def stream_of(steps, env):
    return {name: steps[name][:, env] for name in (*FLAGS, "discount") if name in steps}


def count(happened, stream, window, n, end):
    """Count where a window is, and how it ends, of the steps before time `end`."""
    if window is None:
        return
    start, last, *_ = window
    terminated, truncated = stream["terminated"][last], stream["truncated"][last]
    ends = stream["terminated"] | stream["truncated"]
    goes_on, is_full, behind_end = not ends[last], last == start + n - 1, start > 0 and ends[start - 1]
    found = {
        "transitions": True,
        "both": terminated and truncated,
        "terminated": terminated and not truncated,
        "truncated": truncated and not terminated,
        "full": goes_on and is_full,
        "flushed": goes_on and not is_full and last + 1 == end,
        "cut by the mask": goes_on and not is_full and last + 1 < end,
        "shorter than n": not is_full,
        "of one step": last == start,
        "behind an end": behind_end,
        "adjacent ends": ends[last] and start == last and behind_end and stream["mask"][start - 1],
    }
    if "discount" in stream and last > start:
        found["equal discounts"] = len({*stream["discount"][start : last + 1]}) == 1
        found["going on behind a discount of 0"] = 0 in stream["discount"][start:last]
    happened.update({name: int(is_so) for name, is_so in found.items()})


def check_row(case, batch, row, steps, env, window, max_n=None):
    """Row `row` of a batch against its window in environment `env`; `max_n` if n was traced."""
    start, last, Rn, In = window
    times = np.minimum(np.arange(start, start + (max_n or case.n)), last)
    np.testing.assert_array_equal(batch.S["x"][row], steps["s"]["x"][start, env])
    np.testing.assert_array_equal(batch.S_next["x"][row], steps["s_next"]["x"][last, env])
    assert batch.A[row] == steps["a"][start, env]
    assert batch.logP[row] == steps["logp"][start, env]
    assert batch.W[row] == steps["w"][start, env]
    np.testing.assert_allclose([batch.Rn[row], batch.In[row]], [Rn, In], rtol=2e-5, atol=2e-6)
    if case.next_action:
        bootstraps = not steps["terminated"][last, env]
        assert batch.A_next[row] == (steps["a"][start + case.n, env] if bootstraps else 0)
        assert batch.logP_next[row] == (steps["logp"][start + case.n, env] if bootstraps else 0)
    if case.record_extra_info:
        info = jax.tree.map(lambda x: x[row], batch.extra_info)
        np.testing.assert_array_equal(info["states"]["x"], steps["s"]["x"][times, env])
        fields = {"actions": "a", "rewards": "r", "log_props": "logp", "weights": "w"}
        fields |= {"discounts": "discount"} if case.discounts else {}
        assert info.keys() == {*fields, "states", "dones"}
        for name, field in fields.items():
            np.testing.assert_array_equal(info[name], steps[field][times, env])
        ends = (steps["terminated"] | steps["truncated"])[times, env]
        np.testing.assert_array_equal(info["dones"], ends | (np.arange(start, start + len(times)) > last))


def check_rows(case, emitted, windows, steps):
    """(batch, valid), time-major, against windows: a list for each time, of one for each environment or None."""
    batch, valid = jax.tree.map(np.asarray, emitted)
    assert batch.batch_size == len(windows) * case.num_envs
    np.testing.assert_array_equal(valid, [window is not None for at_time in windows for window in at_time])
    np.testing.assert_array_equal(batch.valid, valid)
    for row, (window, env) in enumerate((w, env) for at_time in windows for env, w in enumerate(at_time)):
        if window is not None:
            check_row(case, batch, row, steps, env, window)


def flat(*emitted):
    return jax.tree.map(lambda *x: np.concatenate([*map(np.asarray, x)]), *emitted)


@twins.strict()
def random_run(case, num_segments, *names, seed=seeds.SEED):
    """Segments of random lengths, each ended by a flush; returns how often things happened."""
    rng, tracer = seeds.rng("tracer", *names, seed=seed), case.tracer
    happened, state, number = collections.Counter(), None, 1
    for _ in range(num_segments):
        length = int(rng.choice([*WHOLE, int(rng.integers(1, 3 * case.n + 2))]))
        steps = make_steps(rng, length, case.num_envs, number, case.discounts)
        number += length * case.num_envs
        gammas = np.full((length + 1, case.num_envs), case.gamma)
        if case.gamma is None:  # one for all calls now and then, and one for all environments
            gammas = rng.choice(DISCOUNTS, [rng.choice([1, x]) for x in gammas.shape]).astype(np.float32)
            gammas = np.broadcast_to(gammas, (length + 1, case.num_envs))
        alike = bool(np.all(gammas == gammas[:, :1]))
        happened["a discount per environment"] += (not alike) * case.num_envs
        given = [{"gamma": jnp.float32(x[0] if alike else x)} if case.gamma is None else {} for x in gammas]
        if state is None:
            state = tracer.init(**first(make_steps(rng, 1, case.num_envs, 0, case.discounts)))
        emitted = []
        for t in range(length):
            step = at(steps, t)
            if np.all(step["mask"]) and t % 2:
                step.pop("mask")  # None: all are steps
            state, *found = tracer.add(state, **step, **given[t])
            emitted.append(found)
        state, *found = tracer.flush(state, **given[length])
        assert int(state.count) == 0
        happened["flushes of nothing"] += (length == 0) * case.num_envs
        # The flush has n rows an environment, and those of fewer pending steps come last.
        streams = [stream_of(steps, env) for env in range(case.num_envs)]
        each = zip(streams, gammas.T, strict=True)
        windows = [oracles.n_step_emissions(stream, case.n, own, case.next_action) for stream, own in each]
        for stream, (by_step, by_flush) in zip(streams, windows, strict=True):
            for now, window in enumerate(by_step):
                count(happened, stream, window, case.n, now + 1)
            for window in by_flush:
                count(happened, stream, window, case.n, length)
            happened["steps that are none"] += int(np.sum(~stream["mask"]))
            starts = int(np.sum(stream["mask"]))
            happened["without a next action"] += starts - sum(x is not None for x in (*by_step, *by_flush))
        by_step, by_flush = ([[*x] for x in zip(*parts, strict=True)] for parts in zip(*windows, strict=True))
        if length:
            check_rows(case, flat(*emitted), by_step, steps)
        pad = [[None] * case.num_envs] * (case.n - len(by_flush[-case.n :]))
        check_rows(case, found, pad + by_flush[-case.n :], steps)
        assert all(window is None for at_time in by_flush[: -case.n] for window in at_time)
        if length in WHOLE and np.all(gammas == gammas[0]):
            found = at_once(steps, **case.settings | given[0], flush=True)
            check_rows(case, found, by_step + pad + by_flush[-case.n :], steps)
            happened["rollouts at once"] += case.num_envs
    return happened


LEAST = {  # in a hundred segments of an environment
    "transitions": 80,
    "terminated": 20,
    "truncated": 25,
    "both": 1,
    "cut by the mask": 13,
    "full": 14,
    "flushed": 17,
    "shorter than n": 27,
    "of one step": 20,
    "behind an end": 10,
    "adjacent ends": 6,
    "flushes of nothing": 3,
    "steps that are none": 30,
    "rollouts at once": 15,
}
OF_DISCOUNTS = {"equal discounts": 15, "going on behind a discount of 0": 15}


def least(case):
    """A window of one step is full; with a next action only whole windows are emitted, and those that terminate."""
    never = set()
    if case.n == 1:
        never = {"cut by the mask", "flushed", "shorter than n"}
    if case.next_action:
        never |= {"truncated", "cut by the mask", "flushed"}
    found = {name: x for name, x in LEAST.items() if name not in never}
    found |= OF_DISCOUNTS if case.discounts and case.n > 1 else {}
    found |= {"a discount per environment": 30} if case.gamma is None and case.num_envs > 1 else {}
    return found | ({"without a next action": 60} if case.next_action else {})


CASES = [
    Case(n=3, record_extra_info=True),
    Case(n=4, gamma=None, num_envs=2, next_action=True, record_extra_info=True),
    rarely(Case(n=5, gamma=0.5)),
    Case(n=3, num_envs=2, record_extra_info=True, discounts=True),
    rarely(Case(n=4, num_envs=2, next_action=True, discounts=True)),
    rarely(Case(n=12, discounts=True)),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_tracer_does_what_its_twin_does(case):
    check_happened(random_run(case, 40, str(case)), least(case), 40 * case.num_envs)


@pytest.mark.parametrize("case", [CASES[1], rarely(CASES[3])], ids=str)
def test_rows_of_a_short_ring_are_selected_where_they_are_not_on_a_cpu(monkeypatch, case):
    asked = []
    monkeypatch.setattr(_windows.devices, "backend_of", lambda: asked.append(8) or "gpu")
    jax.clear_caches()
    try:
        random_run(case, 20, str(case))
    finally:
        jax.clear_caches()
    assert asked


@pytest.mark.slow
@pytest.mark.parametrize("num_envs", [1, 4])
@pytest.mark.parametrize("gamma", [None, 0.9, "discounts"])
@pytest.mark.parametrize("next_action", [False, True])
@pytest.mark.parametrize("n", [1, 2, 7])
def test_long_runs_with_a_new_seed(n, next_action, gamma, num_envs):
    discounts = {"discounts": True} if gamma == "discounts" else {"gamma": gamma}
    case = Case(n=n, num_envs=num_envs, next_action=next_action, record_extra_info=True, **discounts)
    check_happened(random_run(case, 200, str(case), seed=seeds.fresh()), least(case), 200 * num_envs)


@twins.strict()
def random_sequences(case, max_n, num_batches, *names, seed=seeds.SEED):
    """With `max_n`, n and gamma are traced; gamma is one number, or one per sequence."""
    rng, happened = seeds.rng("sequences", *names, seed=seed), collections.Counter()
    batch_size, length = 6, (max_n or case.n) + 6
    run = run_once(lambda rows, given: of_sequences(rows, **case.settings | given, max_n=max_n))
    for number in range(num_batches):
        rows = make_rows(rng, batch_size, length, 1 + number * batch_size * length, case.discounts)
        n, gammas, given = case.n, np.full(batch_size, case.gamma), {}
        if max_n:
            gammas = rng.choice([0.0, 0.9, 1.0], batch_size if number % 2 else 1).astype(np.float32)
            n, given_gamma = int(rng.integers(1, max_n + 1)), jnp.asarray(gammas if number % 2 else gammas[0])
            given = {"n": jnp.int32(n), **({} if case.discounts else {"gamma": given_gamma})}
            gammas = np.broadcast_to(gammas, batch_size)
        batch, valid = jax.tree.map(np.asarray, run(rows, given))
        num_starts = length - (max_n or n)
        assert batch.batch_size == batch_size * num_starts
        np.testing.assert_array_equal(batch.valid, valid)
        for b in range(batch_size):
            steps = {name: jax.tree.map(lambda x, b=b: x[b][:, None], x) for name, x in rows.items()}
            is_step_next = np.append(steps["mask"][1:, 0], False)[:, None]
            cut = steps["truncated"] & ~steps["terminated"] & is_step_next & steps["mask"]
            happened["without a final observation"] += int(np.sum(cut))
            steps["mask"] = steps["mask"] & ~cut
            steps["s_next"] = {"x": np.concatenate([steps["s"]["x"][1:], steps["s"]["x"][-1:]])}
            stream = stream_of(steps, 0)
            usable = stream if case.next_action else {name: x[:-1] for name, x in stream.items()}
            emitted, _ = oracles.n_step_emissions(usable, n, gammas[b], case.next_action)
            windows = emitted[n - 1 + case.next_action :][:num_starts]
            for start, window in enumerate(windows):
                row = b * num_starts + start
                assert valid[row] == (window is not None)
                count(happened, stream, window, n, length)
                if window is not None:
                    check_row(dataclasses.replace(case, n=n), batch, row, steps, 0, window, max_n)
    return happened


OF_SEQUENCES = {  # in a hundred batches
    "transitions": 450,
    "terminated": 90,
    "cut by the mask": 100,
    "full": 140,
    "shorter than n": 150,
    "of one step": 130,
    "without a final observation": 25,
}


@pytest.mark.parametrize(
    ("next_action", "max_n", "discounts"),
    [
        *((False, 5, False), (True, None, False), (False, None, True), (True, 5, False)),
        *map(rarely, [(False, None, False), (True, 5, True)]),
    ],
)
def test_sequences_of_rows_do_what_the_twin_does(next_action, max_n, discounts):
    case = Case(n=3, next_action=next_action, record_extra_info=True, discounts=discounts)
    check_happened(random_sequences(case, max_n, 20, str(case), str(max_n)), least_of_rows(case), 20)


@pytest.mark.slow
@pytest.mark.parametrize("max_n", [None, 6])
@pytest.mark.parametrize("next_action", [False, True])
@pytest.mark.parametrize("discounts", [False, True])
@pytest.mark.parametrize("n", [1, 2, 5])
def test_many_sequences_with_a_new_seed(n, discounts, next_action, max_n):
    case = Case(n=n, gamma=0.97, next_action=next_action, record_extra_info=True, discounts=discounts)
    happened = random_sequences(case, max_n, 200, str(case), str(max_n), seed=seeds.fresh())
    check_happened(happened, least_of_rows(case) if n > 1 or max_n else {"transitions": 450}, 200)


def least_of_rows(case):
    return {name: x for name, x in OF_SEQUENCES.items() if not (case.next_action and name == "cut by the mask")}
