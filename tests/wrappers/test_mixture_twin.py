"""A Mixture does in random operations what the twins of its sources do, each on its rows."""

import itertools

import numpy as np
import pytest
import seeds
import test_replay_twin as replay
import test_reservoir_twin as reservoir
import test_sequence_twin as sequence
import twins
from helpers import at, items, numbers, over_devices, rarely

import jaxreplay as jr


class EachSource:
    """A mixture whose `add` gives something to every source."""

    def __init__(self, mixture):
        self.mixture, first = mixture, twins.unsharded(mixture.buffers[0])
        if isinstance(first, jr.SequenceBuffer):
            self.sequence_length = first.sequence_length

    def add(self, state, *arguments):
        for k, (own, named) in enumerate(arguments):
            state = self.mixture.add(state, k, *own, **named)
        return state

    def __getattr__(self, name):
        return getattr(self.mixture, name)


class Twin:
    """Twins of the sources."""

    def __init__(self, mixture, sources):
        self.mixture, self.sources = mixture, sources
        self.shards, self.age_step = [shard for source in sources for shard in source.shards], 1

    def parts(self, num_rows):
        """By largest remainders, of equal ones the earlier."""
        quotas = [round(share * num_rows, 9) for share in self.mixture.shares]
        counts = [int(quota) for quota in quotas]
        while sum(counts) < num_rows:
            left = [quota - count for quota, count in zip(quotas, counts, strict=True)]
            counts[int(np.argmax(left))] += 1
        stops = np.cumsum((0, *counts))
        return [slice(int(start), int(stop)) for start, stop in itertools.pairwise(stops)]

    def rows(self, names):
        parts = zip(self.sources, self.parts(len(names)), strict=True)
        return [row for source, rows in parts for row in source.rows(names[rows])]

    def update(self, names, td_errors):
        for source, rows in zip(self.sources, self.parts(len(names)), strict=True):
            source.update(names[rows], td_errors[rows])

    def clear(self):
        for source in self.sources:
            source.clear()

    @property
    def size(self):
        return sum(source.size for source in self.sources)


class Lane(twins.Lane):
    """One for each source."""

    def __init__(self, twin, rng):
        super().__init__(twin, rng)
        kinds = {jr.ReservoirBuffer: reservoir.Lane, jr.SequenceBuffer: sequence.Lane}
        buffers = twin.mixture.buffers
        kinds = [kinds.get(type(twins.unsharded(buffer)), twins.Lane) for buffer in buffers]
        self.parts = [kind(source, rng) for kind, source in zip(kinds, twin.sources, strict=True)]
        for lane in self.parts:
            lane.happened = self.happened

    def names(self, count, stored=0.5):
        rows = self.twin.parts(count)
        names = [lane.names(its.stop - its.start, stored) for lane, its in zip(self.parts, rows, strict=True)]
        return np.concatenate(names).astype(np.int32)

    def remember(self):
        for lane in self.parts:
            lane.remember()

    def check_state(self, buffer, state):
        for lane, its, own in zip(self.parts, buffer.buffers, state, strict=True):
            lane.check_state(its, own)

    def check_look_ups(self, seen, names, rows):
        for lane, its in zip(self.parts, self.twin.parts(len(names)), strict=True):
            own = {name: seen[name][its] for name in ("slots", "age", "priorities", "handles")}
            lane.check_look_ups(own, names[its], rows[its])

    def check_draw(self, sample, max_age=None, beta=None):
        mixture, batch_size = self.twin.mixture, len(sample.indices)
        expected, joint = np.zeros(batch_size), mixture.weights == "joint"
        for lane, share, rows in zip(self.parts, mixture.shares, self.twin.parts(batch_size), strict=True):
            source, own = lane.twin, at(sample, rows)
            drawn = lane.check_draw(own, max_age, beta, weights=not joint)
            lane.drawn = own.indices if len(own.indices) else lane.drawn
            if drawn and joint:
                weights = source.draw_weights(source.draw_law(max_age), drawn, len(own.indices), beta, None)
                expected[rows][own.indices >= 0] = share * batch_size / len(drawn) * weights
        if joint:
            normalize = {getattr(source.sampler, "normalize", None) for source in self.twin.sources} & {"batch"}
            expected /= expected.max() if normalize and expected.max() > 0 else 1
            np.testing.assert_allclose(sample.weights, expected, rtol=2e-5)


def per(**settings):
    return twins.PER(**settings)


DISTINCT, PLAIN = jr.Uniform(replacement=False), {"normalize": None}
REPLAY, RESERVOIR, SEQUENCE = jr.ReplayBuffer, jr.ReservoirBuffer, jr.SequenceBuffer


def sharded(buffer):
    return over_devices(buffer, 2)


def mixtures():
    """By name: the sources, their shares, and kinds of weights."""
    streams = {"num_envs": 2, "sequence_length": 3}
    return {
        "replay": ((REPLAY(capacity=7, sampler=per()), REPLAY(capacity=12, sampler=DISTINCT)), (0.62, 0.38)),
        "plain": (
            (REPLAY(capacity=5, sampler=per(**PLAIN)), REPLAY(capacity=9, sampler=per(**PLAIN, alpha=1.0))),
            (1, 3),
        ),
        "shards": ((sharded(REPLAY(capacity=8, sampler=per())), REPLAY(capacity=6, sampler=per())), (1, 1)),
        "reservoir": ((REPLAY(capacity=6, sampler=per()), RESERVOIR(capacity=10, sampler=per())), None),
        "sequences": (
            (
                SEQUENCE(length=9, **streams, sampler=per(), windows="episodes"),
                SEQUENCE(length=10, **streams, stride=2, sampler=DISTINCT, windows="cut"),
            ),
            (2, 3),
        ),
    }


def random_run(name, weights, mode="jit", seed=seeds.SEED):
    """The first source is given nothing for a while, and then the second one."""
    buffers, shares = mixtures()[name]
    mixture = jr.Mixture(buffers=buffers, shares=shares, weights=weights)
    wholes, ages = [twins.unsharded(buffer) for buffer in buffers], True
    of_items = not isinstance(wholes[0], jr.SequenceBuffer)
    state = mixture.init(items(numbers(0, 2) if of_items else np.zeros((1, 2), np.int32)))
    kinds, adds = [], []
    for buffer, whole in zip(buffers, wholes, strict=True):
        shards = twins.num_shards(buffer)
        if isinstance(whole, jr.SequenceBuffer):
            kinds.append(sequence)
            adds.append(sequence.rollouts(buffer, [(1, True), (3, True)]))
        elif isinstance(whole, jr.ReservoirBuffer):
            kinds.append(reservoir)
            adds.append(reservoir.batches([(3, True), (3, True)], shards))
            ages = False
        else:
            kinds.append(replay)
            adds.append(replay.batches([(4, True, True), (2, True, False)]))

    def make_twin():
        sources = [kind.twin_of(buffer, its) for kind, buffer, its in zip(kinds, buffers, state, strict=True)]
        return Twin(mixture, sources)

    def add(lane, number):
        return tuple(add(own, number) for add, own in zip(adds, lane.parts, strict=True)), {}

    names, settings = ("mixture", name, weights, mode), {"mode": mode, "seed": seed, "lane": Lane, "ages": ages}
    return twins.Run(EachSource(mixture), state, make_twin, add, *names, **settings)


NAMES = ("replay", "plain", "shards", "reservoir", "sequences")
LEAST = {
    "updates of stored items": 150,
    "updates of stale items": 30,
    "of an item twice": 10,
    "updates of nothing": 5,
    "TD errors refused": 30,
    "rows set": 50,
    "rows not set": 20,
    "draws with unequal priorities": 80,
    "draws of several items": 80,
    "rows told of": 40,
}


def least(name):
    """Of a source that draws no item twice there are batches with rows of none."""
    return LEAST | ({"rows of no item": 10} if name in ("replay", "sequences") else {})


@pytest.mark.parametrize(
    ("name", "weights"),
    [("replay", "joint"), ("shards", "own"), *map(rarely, [(n, w) for n in NAMES for w in ("own", "joint")])],
)
def test_a_mixture_does_what_its_twin_does(name, weights):
    happened = random_run(name, weights).run(40)
    twins.check_happened(happened, least(name))


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["jit", "eager", "vmap"])
@pytest.mark.parametrize("name", NAMES)
def test_long_runs_with_a_new_seed(name, mode):
    weights = str(seeds.rng("weights", name, mode, seed=seeds.fresh()).choice(["own", "joint"]))
    twins.check_happened(random_run(name, weights, mode, seeds.fresh()).run(120), least(name))
