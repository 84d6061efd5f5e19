"""Options that meet: random operations on random configurations, with checkpoints and migrations in the middle."""

import itertools

import crossings
import pytest
import seeds
from helpers import check_happened, rarely

LEAST = {"items added": 50, "items drawn": 100, "updates of stored items": 25}


@pytest.mark.parametrize("place", [0, 1, *map(rarely, (2, 3))])
def test_options_that_meet(tmp_path, place):
    """The configurations that cost least."""
    found, _ = crossings.configurations()
    run_one(tmp_path, sorted(range(len(found)), key=lambda number: found[number].cost)[place], seeds.SEED)


@pytest.mark.slow
@pytest.mark.parametrize("number", range(crossings.NUMBER))
def test_options_that_meet_with_a_new_seed(tmp_path, number):
    run_one(tmp_path, number, seeds.fresh())


def run_one(folder, number, seed):
    happened = crossings.Run(crossings.configurations()[0][number], number, seed).run(folder)
    assert happened["steps"] >= crossings.STEPS
    check_happened(happened, LEAST)


def test_every_pair_of_options_is_on_together_or_impossible():
    _, times = crossings.configurations()
    for pair in map(frozenset, itertools.combinations(crossings.OPTIONS, 2)):
        enough = times[pair] == 0 if pair in crossings.IMPOSSIBLE else times[pair] >= crossings.TIMES
        assert enough, f"{sorted(pair)} are on together {times[pair]} times"
