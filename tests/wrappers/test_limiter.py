"""The rule of who may add and who may draw, by itself."""

import itertools
from fractions import Fraction

import numpy as np
import pytest
import seeds
from helpers import rejects

import jaxreplay as jr
from jaxreplay.wrappers._limiter import Limiter


def limiter(ratio, slack=None):
    made = Limiter(ratio, slack)
    made.begin()
    return made


def call(limiter, added, drawn):
    """True if the call passes, and is counted."""
    limiter.register(added, drawn)
    passes = limiter.passes(added, drawn)
    if passes:
        limiter.count(added, drawn)
    return passes


def test_by_default_each_side_can_be_one_call_ahead():
    it = limiter(ratio=2)
    assert call(it, 3, 0)
    assert (it.slack, it.balance) == (6, 6)
    assert not call(it, 3, 0)  # no draw has been seen
    assert call(it, 0, 10)
    assert it.slack == 16
    assert call(it, 10, 0)  # a larger call raises the slack
    assert it.slack == 30


def test_before_draws_begin_all_additions_pass_and_are_not_limited():
    it = Limiter(ratio=1, slack=4)
    assert all(call(it, 100, 0) for _ in range(3))
    assert not it.passes(0, 1)
    assert not it.passes(1, 1)
    it.begin()
    assert (it.added, it.balance) == (0, 0)
    assert call(it, 4, 0)
    assert not call(it, 1, 0)


def test_without_a_ratio_nothing_is_counted():
    it = limiter(ratio=None)
    assert call(it, 10**9, 0)
    assert call(it, 0, 1)
    assert (it.added, it.drawn, it.balance, it.slack) == (0, 0, 0, 0)


def test_a_block_that_adds_and_draws_counts_the_difference():
    it = limiter(ratio=2, slack=4)
    assert all(call(it, 50, 100) for _ in range(3))
    assert it.slack == 4
    assert call(it, 3, 2)
    assert not call(it, 3, 2)


@pytest.mark.parametrize(
    ("calls", "least"), [([(10, 0)], 20), ([(0, 41)], 21), ([(4, 0), (0, 32)], 24), ([(0, 32), (4, 0)], 24)]
)
def test_a_slack_that_could_stop_both_sides_is_an_error_of_the_call(calls, least):
    it, enough = limiter(ratio=4, slack=19), limiter(ratio=4, slack=least)
    for x in calls[:-1]:
        it.register(*x)
    added, drawn = map(max, zip(*calls, strict=True))
    message = f"slack=19: adding {added} and drawing {drawn} could wait for ever; use slack={least}, or None"
    rejects(message, it.register, *calls[-1])
    for x in calls:
        enough.register(*x)


@pytest.mark.parametrize(("ratio", "slack", "kept"), [(4, 19.5, 19), (0.5, 2.75, 2.5), (0.5, 2.5, 2.5), (1, 0.99, 0)])
def test_a_slack_between_two_balances_is_the_lower_one(ratio, slack, kept):
    assert limiter(ratio, slack).slack == kept


def test_the_largest_ratio_of_floats_is_exact():
    it = limiter(ratio=0.1, slack=1e6)
    for _ in range(10_000):
        call(it, 1, 0)
    assert Fraction(it.balance) == Fraction(float(10_000 * Fraction(0.1)))


@pytest.mark.parametrize("ratio", [0.1, 1 / 3, 1, 4, 12.5])
@pytest.mark.parametrize("exact", [True, False])
def test_one_side_can_always_go_on_and_the_balance_stays_within_the_slack(ratio, exact):
    rng = seeds.rng("limiter", str(ratio), exact)
    adds, draws = [1, 3, 8], [1, 2, 32]
    least = (Fraction(ratio) * max(adds) + max(draws)) / 2
    it = limiter(ratio, float(least) + (0 if ratio >= 1 else 1e-6) if exact else None)
    for added in adds:
        it.register(added, 0)
    for drawn in draws:
        it.register(0, drawn)
    passed = 0
    for _ in range(3_000):
        added, drawn = int(rng.choice(adds)), int(rng.choice(draws))
        waits = [not it.passes(a, d) for a, d in itertools.product((added, 0), (drawn, 0)) if (a == 0) != (d == 0)]
        assert not all(waits)
        passed += call(it, added, 0) if rng.random() < 0.5 else call(it, 0, drawn)
        assert abs(it.balance) <= it.slack
    assert passed > 500
    assert abs(ratio * it.added - it.drawn) <= it.slack * (1 + 1e-9)


def test_a_smaller_slack_than_before_leads_back():
    it = limiter(ratio=1, slack=100)
    for _ in range(10):
        call(it, 10, 0)
    later = Limiter(1, 8, it.added, it.drawn)
    assert not call(later, 1, 0)
    assert sum(call(later, 0, 8) for _ in range(20)) == 13  # 100 = 13 * 8 - 4
    assert later.balance == -4


def test_the_text_says_who_is_ahead():
    it = limiter(ratio=2, slack=100)
    assert "no one is ahead" in it.text()
    call(it, 8, 0)
    counts = "ratio=2, 8 items added and 0 drawn since draws began"
    assert it.text() == f"{counts}; the additions are ahead by 16 draws, slack=100"
    call(it, 0, 40)
    assert "the draws are ahead by 24 draws" in it.text()
    assert "draws have not begun" in Limiter(2, None).text()
    assert limiter(None).text() == "no ratio"


SEQUENCES = jr.SequenceBuffer(length=8, num_envs=2, sequence_length=2)


@pytest.mark.parametrize(
    ("buffer", "name", "rows"),
    [(jr.ReplayBuffer(capacity=8), "items", np.ones(4)), (SEQUENCES, "steps", np.ones((2, 2)))],
)
def test_rows_are_counted_however_they_are_given(buffer, name, rows):
    """By position or name, and of a source of a mixture too."""
    for its, source in ((buffer, {}), (jr.Mixture(buffers=(buffer, buffer)), {"source": 1})):
        shared = jr.Shared(its, its.init(rows), ratio=1.0)
        for named in ({}, {name: rows}, source | {name: rows}):
            given = [x for x, key in ((1, "source"), (rows, name)) if key not in named and (key != "source" or source)]
            assert shared._num_rows(*given, **named) == 4
