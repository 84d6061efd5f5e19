"""A Mixture does in random operations what the twins of its sources do, each on its rows."""

import dataclasses
import functools

import jax.numpy as jnp
import numpy as np
import oracles
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
            self.sequence_length, self.hindsight = first.sequence_length, first.hindsight

    def add(self, state, *arguments):
        for k, (own, named) in enumerate(arguments):
            state = self.mixture.add(state, k, *own, **named)
        return state

    def named_again(self, state, indices):
        """Of each shard's rows those of its own items."""
        slots, source, found = self.mixture.slots(state, indices), indices % len(self.mixture.buffers), -1
        for k, buffer in enumerate(self.mixture.buffers):
            count = twins.num_shards(buffer)
            own = self.mixture.handles(state, k, jnp.tile(slots, count)).reshape(count, -1)
            found = jnp.where(source == k, jnp.max(jnp.where(own == indices, own, -1), axis=0), found)
        return found

    def __getattr__(self, name):
        return getattr(self.mixture, name)


class Lane(twins.Lane):
    """One for each source."""

    def __init__(self, buffers, joint, twin, rng):
        super().__init__(twin, rng)
        self.joint = joint
        kinds = {jr.ReservoirBuffer: reservoir.Lane, jr.SequenceBuffer: sequence.Lane}
        kinds = [kinds.get(type(twins.unsharded(buffer)), twins.Lane) for buffer in buffers]
        self.parts = [kind(source, rng) for kind, source in zip(kinds, twin.sources, strict=True)]
        for lane in self.parts:
            lane.happened = self.happened

    def names(self, count, stored=0.5):
        """Mostly of any source in any order, otherwise as they may be drawn."""
        found = [[self.twin.named(k, x) for x in lane.names(count, stored)] for k, lane in enumerate(self.parts)]
        if self.rng.random() < 0.2:
            names = [x for its, rows in zip(found, self.twin.parts(count), strict=True) for x in its[rows]]
        else:
            names = self.rng.permutation(np.ravel(found))[:count]
        sources = [x % len(self.parts) for x in names if x >= 0]
        self.happened["batches in another order"] += sources != sorted(sources)
        return np.array(names).astype(np.int32)

    def remember(self):
        for lane in self.parts:
            lane.remember()

    def check_state(self, buffer, state):
        for lane, its, own in zip(self.parts, buffer.buffers, state, strict=True):
            lane.check_state(its, own)

    def check_seen(self, seen, given):
        super().check_seen(seen, given)
        for law in {"last", "uniform"} & seen.keys():
            sequence.Lane.check_later(self, given["read"], *seen[law], last=law == "last")

    def check_look_ups(self, seen, names, rows):
        for k, lane in enumerate(self.parts):
            its = self.twin.of_source(k, rows)
            own = {name: seen[name][its] for name in ("slots", "age", "priorities", "handles")}
            lane.check_look_ups(own, names[its], [rows[row] for row in its])

    def check_draw(self, sample, max_age=None, beta=None):
        twin, batch_size, joint = self.twin, len(sample.indices), self.joint
        expected = np.zeros(batch_size)
        for k, (lane, share, rows) in enumerate(zip(self.parts, twin.shares, twin.parts(batch_size), strict=True)):
            source, own = lane.twin, at(sample, rows)
            found, names = twin.rows(own.indices), [-1] * len(own.indices)
            for row, (shard, handle) in enumerate(found):
                if own.indices[row] >= 0:
                    assert handle is not None
                    names[row] = source.shards.index(shard) * source.period + shard.name(handle)
                    assert own.indices[row] == twin.named(k, names[row])
            own = dataclasses.replace(own, indices=np.array(names, np.int32))
            drawn = lane.check_draw(own, max_age, beta, weights=not joint)
            lane.drawn = own.indices if len(own.indices) else lane.drawn
            if drawn and joint:
                weights = source.draw_weights(source.draw_law(max_age), drawn, len(own.indices), beta, None)
                # Weights of shards correct for those that are empty.
                number = len(drawn) if len(source.shards) == 1 else len(own.indices)
                expected[rows][own.indices >= 0] = share * batch_size / number * weights
        if joint:
            normalize = {getattr(source.sampler, "normalize", None) for source in twin.sources} & {"batch"}
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
    streams = {"num_envs": 2, "sequence_length": 3, "hindsight": True}
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
        "three": (
            (
                sharded(SEQUENCE(length=9, **streams, sampler=per(), windows="inside")),
                SEQUENCE(length=8, **streams, sampler=per(), max_uses=3),
                sharded(SEQUENCE(length=10, **streams, sampler=per(), count_updates=True)),
            ),
            (2, 1, 1),
        ),
    }


def random_run(name, weights, mode="jit", seed=seeds.SEED):
    """The first source is given nothing for a while, and then the second one."""
    buffers, shares = mixtures()[name]
    mixture = jr.Mixture(buffers=buffers, shares=shares, weights=weights)
    wholes, ages = [twins.unsharded(buffer) for buffer in buffers], True
    of_items = not isinstance(wholes[0], jr.SequenceBuffer)
    state = mixture.init(items(numbers(0, 2) if of_items else np.zeros((1, 2), np.int32)))
    # Counters are about to wrap, except of reservoirs, whose slots have their own.
    state = tuple(
        part
        if isinstance(part, jr.buffers.ReservoirState)
        else part.replace(
            ring=part.ring.replace(
                inserted=jnp.full_like(part.ring.inserted, part.ring.period - 3 * part.ring.capacity)
            )
        )
        for part in state
    )
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
        return oracles.MixtureTwin(sources, mixture.shares)

    def add(lane, number):
        return tuple(add(own, number) for add, own in zip(adds, lane.parts, strict=True)), {}

    names, settings = ("mixture", name, weights, mode), {"mode": mode, "seed": seed, "ages": ages}
    settings["lane"] = functools.partial(Lane, buffers, weights == "joint")
    return twins.Run(EachSource(mixture), state, make_twin, add, *names, **settings)


NAMES = ("replay", "plain", "shards", "reservoir", "sequences", "three")
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
    "batches in another order": 150,
}


def least(name):
    """Of a source that draws no item twice there are batches with rows of none."""
    some = {"rows of no item": 10} if name in ("replay", "sequences") else {}
    return LEAST | some | ({"later rows": 40} if name in ("sequences", "three") else {})


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
