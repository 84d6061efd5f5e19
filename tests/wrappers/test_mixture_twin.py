"""A Mixture does in random operations what the twins of its sources do, each on its rows."""

import itertools

import crossings
import pytest
import seeds
from helpers import check_happened, rarely

SOURCES = {  # by name: the options of each source
    "replay": ("prioritized", "distinct"),
    "plain": ("prioritized", "prioritized"),
    "shards": ("prioritized sharded", "prioritized"),
    "reservoir": ("prioritized", "prioritized reservoir"),
    "sequences": ("sequence windows prioritized hindsight", "sequence windows distinct hindsight"),
    "three": (
        "sequence windows prioritized hindsight sharded",
        "sequence prioritized hindsight max_uses",
        "sequence prioritized hindsight count_updates sharded",
    ),
}
LEAST = {
    "items added": 50,
    "items drawn": 100,
    "updates of stored items": 100,
    "updates of stale items": 25,
    "of an item twice": 10,
    "TD errors refused": 10,
    "rows set": 50,
}


def run(folder, name, program, seed=seeds.SEED, least=LEAST):
    sources = [frozenset(options.split()) for options in SOURCES[name]]
    on = crossings.Configuration(tuple(sources), frozenset(["mixture", "clear", *program.split()]))
    happened = crossings.Run(on, f"{name} {program}", seed, steps=16).run(folder)
    check_happened(happened, least)


@pytest.mark.parametrize(
    ("name", "program"),
    [("shards", "joint max_age"), ("sequences", "vmap"), *map(rarely, itertools.product(SOURCES, ("", "joint eager")))],
)
def test_a_mixture_does_what_its_twin_does(tmp_path, name, program):
    run(tmp_path, name, program)


@pytest.mark.slow
@pytest.mark.parametrize("program", ["joint", "eager", "vmap restore", "joint max_age"])
@pytest.mark.parametrize("name", SOURCES)
def test_long_runs_with_a_new_seed(tmp_path, name, program):
    if name != "reservoir" or "max_age" not in program:  # it keeps no order
        run(tmp_path, name, program, seeds.fresh(), {"items added": 50, "items drawn": 100})
