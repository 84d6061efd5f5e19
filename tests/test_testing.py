"""The checks for buffers and samplers of one's own: ours pass, and what breaks a rule is told which one."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import seeds
from helpers import over_devices, rarely, rejects

import jaxreplay as jr
from jaxreplay import testing
from jaxreplay.testing import _buffers

PER = jr.Prioritized(alpha=0.7)
ITEMS = {"x": jnp.zeros((4, 2)), "frame": jax.ShapeDtypeStruct((4, 3), jnp.uint8)}
STEPS = jax.tree.map(lambda x: jax.ShapeDtypeStruct((3, *x.shape), x.dtype), ITEMS)


def sequences(**settings):
    return jr.SequenceBuffer(length=9, num_envs=4, sequence_length=4, sampler=PER, **settings)


BUFFERS = {
    "replay": (jr.ReplayBuffer(capacity=10, sampler=PER), ITEMS),
    "uniform": (jr.ReplayBuffer(capacity=10, donate=False), ITEMS),
    "reservoir": (jr.ReservoirBuffer(capacity=7, sampler=PER), ITEMS),
    "sequence": (sequences(), STEPS),
    "gaps": (sequences(gaps=True), STEPS),
    "sharded": (over_devices(jr.ReplayBuffer(capacity=12, sampler=PER), 2), ITEMS),
    "mixture": (
        jr.Mixture(
            buffers=(
                over_devices(jr.ReplayBuffer(capacity=12, sampler=PER), 2),
                over_devices(jr.ReservoirBuffer(capacity=14), 2),
                over_devices(jr.ReplayBuffer(capacity=10, sampler=PER), 2),
            ),
            shares=(2, 1, 1),
            weights="joint",
        ),
        ITEMS,
    ),
    "mixture of sequences": (jr.Mixture(buffers=(sequences(), sequences(gaps=True))), STEPS),
}


@pytest.mark.parametrize("name", [*map(rarely, BUFFERS)])
def test_our_buffers_pass(name):
    testing.check_buffer(*BUFFERS[name], key=seeds.key(0))


class Nameless(jr.Mixture):
    """Its handles are those of the sources."""

    def _names(self, k, handles):
        return handles


@pytest.mark.parametrize("kind", [Nameless, rarely(jr.Mixture)])
def test_handles_that_do_not_name_their_source_break_a_rule(kind):
    buffer = kind(buffers=(jr.ReplayBuffer(capacity=10),) * 2)
    if kind is jr.Mixture:
        testing.check_buffer(buffer, ITEMS)
        return
    with pytest.raises(AssertionError) as error:
        testing.check_buffer(buffer, ITEMS)
    assert str(error.value).startswith((testing.LAW, testing.HANDLES))


MORE_BUFFERS = {
    **BUFFERS,
    "spent": (jr.ReplayBuffer(capacity=10, sampler=PER, max_uses=1), ITEMS),
    "spent evenly": (jr.ReplayBuffer(capacity=10, max_uses=2), ITEMS),
    "spent and distinct": (jr.ReplayBuffer(capacity=10, sampler=jr.Uniform(replacement=False), max_uses=1), ITEMS),
    "spent in a reservoir": (jr.ReservoirBuffer(capacity=7, sampler=PER, max_uses=2), ITEMS),
    "spent sequences": (sequences(max_uses=1), STEPS),
    "spent shards": (over_devices(jr.ReplayBuffer(capacity=12, sampler=PER, max_uses=1), 2), ITEMS),
    "counted": (jr.ReplayBuffer(capacity=10, sampler=jr.Recent(power=1.0), count_updates=True), ITEMS),
    "rollouts": (jr.ReplayBuffer(capacity=24, axes=2), STEPS),
    "strided": (sequences(stride=2), STEPS),
    "sharded streams": (over_devices(sequences(), 2), STEPS),
    "sharded reservoir": (over_devices(jr.ReservoirBuffer(capacity=8, sampler=PER), 2), ITEMS),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", MORE_BUFFERS)
def test_our_buffers_pass_with_twenty_seeds(name):
    for seed in range(20):
        testing.check_buffer(*MORE_BUFFERS[name], key=seeds.key("contract", seed))


@pytest.mark.slow
def test_a_buffer_of_transitions_passes():
    x, flags = jnp.zeros((4, 2)), jnp.zeros(4, bool)
    spec = jr.NStep(n=2, gamma=0.9, num_envs=4).spec(x, x[:, 0], x[:, 0], flags, flags, x)
    testing.check_buffer(jr.ReplayBuffer(capacity=10, sampler=PER), spec)


@dataclasses.dataclass(frozen=True)
class Own:
    """A buffer that inherits from nothing, draws evenly, and has something in all that `Sample` may hold."""

    capacity: int = 6
    keeps_handles: bool = False

    def init(self, items):
        storage = jax.tree.map(lambda x: jnp.zeros((self.capacity, *x.shape[1:]), x.dtype), items)
        return {"storage": storage, "count": jnp.zeros((), jnp.int32)}

    @functools.partial(jax.jit, static_argnums=0)
    def add(self, state, items, key):
        size = jax.tree.leaves(items)[0].shape[0]
        at = (state["count"] + jnp.arange(size, dtype=jnp.int32)) % self.capacity
        storage = jax.tree.map(lambda x, new: x.at[at].set(new), state["storage"], items)
        return {"storage": storage, "count": state["count"] + size}

    @functools.partial(jax.jit, static_argnums=(0, 3))
    def sample(self, state, key, batch_size):
        """Every third row is without an item."""
        size = jnp.minimum(state["count"], self.capacity)
        drawn = (jnp.arange(batch_size) % 3 > 0) & (size > 0)
        ages = jax.random.randint(key, (batch_size,), 0, jnp.maximum(size, 1), jnp.int32)
        named = drawn | (self.keeps_handles & (size > 0))
        indices = jnp.where(named, state["count"] - 1 - ages, -1)
        probabilities = jnp.where(drawn, 1.0 / jnp.maximum(size, 1), 0.0).astype(jnp.float32)
        weights = drawn.astype(jnp.float32)
        items = self.get(state, indices).replace(W=weights, idx=indices)
        return jr.Sample(items, indices, probabilities, weights)

    def update(self, state, indices, td_errors):
        return state

    @functools.partial(jax.jit, static_argnums=0)
    def get(self, state, indices):
        stored = (indices >= 0) & (indices >= state["count"] - self.capacity)

        def read(x):
            found = x[indices % self.capacity]
            return jnp.where(stored.reshape(-1, *[1] * (found.ndim - 1)), found, 0).astype(x.dtype)

        return jax.tree.map(read, state["storage"])


ROWS = jr.TransitionBatch(S=jnp.zeros((4, 2)), A=jnp.zeros(4, bool), logP=None, Rn=jnp.zeros(4), In=jnp.zeros(4),
                          S_next=jnp.zeros((4, 2)))  # fmt: skip


@pytest.mark.parametrize("keeps_handles", [False, rarely(True)])
def test_a_buffer_of_ones_own_passes_unless_rows_without_an_item_name_one(keeps_handles):
    buffer = Own(keeps_handles=keeps_handles)
    if not keeps_handles:
        testing.check_buffer(buffer, ROWS)
        return
    with pytest.raises(AssertionError) as error:
        testing.check_buffer(buffer, ROWS)
    assert str(error.value).startswith(f"{testing.RANGES}: handles [")


def test_an_add_that_keeps_its_state_is_not_taken_for_one_that_donates_it():
    key = jax.random.key(0)
    for buffer in (Small(), jr.ReplayBuffer(capacity=10)):
        _buffers._Runs(buffer, ITEMS, 4, _buffers._adder(buffer)).check_donation(key)
    runs = _buffers._Runs(Small(), ITEMS, 4, _buffers._adder(jr.ReplayBuffer(capacity=10)))
    rejects(f"{testing.DONATED}: donate=False, [1-9] leaves gone", runs.check_donation, key, error=AssertionError)


def test_a_draw_from_an_empty_buffer_that_names_an_item():
    runs = _buffers._Runs(DrawsNothing(), ITEMS, 4, _buffers._adder(DrawsNothing()))
    rejects(testing.EMPTY, runs.check_draws, None, jax.random.key(0), error=AssertionError)


P, W = [0.0, 0.5, 1.0, 1.0], [0.0, 2.0, 0.0, 1e30]  # what a draw may tell


@pytest.mark.parametrize(
    ("rule", "changed"),
    [
        (None, {}),
        (None, {"probabilities": [0.0, 1 + 5e-6, 1e-38, 1.0]}),
        (testing.TYPES, {"indices": np.zeros(3, np.int32)}),
        (testing.TYPES, {"probabilities": np.zeros((4, 1), np.float32)}),
        (testing.TYPES, {"weights": np.zeros((), np.float32)}),
        (testing.TYPES, {"indices": np.zeros(4, np.int64)}),
        (testing.TYPES, {"indices": np.zeros(4, np.float32)}),
        (testing.TYPES, {"probabilities": np.zeros(4, np.float16)}),
        (testing.TYPES, {"weights": np.zeros(4, np.int32)}),
        (testing.RANGES, {"probabilities": [0.0, -1e-6, 1.0, 1.0]}),
        (testing.RANGES, {"probabilities": [0.0, 1 + 1e-4, 1.0, 1.0]}),
        (testing.RANGES, {"probabilities": [0.0, 2.0, 1.0, 1.0]}),
        (testing.RANGES, {"probabilities": [0.0, np.nan, 1.0, 1.0]}),
        (testing.RANGES, {"weights": [0.0, np.nan, 1.0, 1.0]}),
        (testing.RANGES, {"weights": [0.0, np.inf, 1.0, 1.0]}),
        (testing.RANGES, {"weights": [0.0, -1e-6, 1.0, 1.0]}),
        (testing.RANGES, {"weights": [1e-6, 1.0, 1.0, 1.0]}),
    ],
)
def test_the_rows_of_a_draw_are_checked_one_by_one(rule, changed):
    rows = {"indices": np.arange(4, dtype=np.int32), "probabilities": P, "weights": W, **changed}
    rows = {name: np.array(x, np.float32) if isinstance(x, list) else x for name, x in rows.items()}
    for like in (np.asarray, jnp.asarray):
        if rows["indices"].dtype == np.int64 and like is jnp.asarray:
            continue
        given = {name: like(x) for name, x in rows.items()}
        if rule is None:
            _buffers.check_rows(**given, batch_size=4)
            continue
        with pytest.raises(AssertionError) as error:
            _buffers.check_rows(**given, batch_size=4)
        assert str(error.value).startswith(rule)


SAMPLERS = {
    "uniform": jr.Uniform(),
    "distinct": jr.Uniform(replacement=False),
    "recent": jr.Recent(power=1.5, beta=0.5),
    "prioritized": PER,
    "every setting": jr.Prioritized(normalize="global", stratified=False, max_priority="stored", floor=0.5),
}


@pytest.mark.parametrize("name", [name if name == "distinct" else rarely(name) for name in SAMPLERS])
def test_our_samplers_pass(name):
    testing.check_sampler(SAMPLERS[name], key=seeds.key(0))


def config(**settings):
    return dataclasses.dataclass(**{"frozen": True, "kw_only": True, **settings})


@dataclasses.dataclass(eq=False)
class NotFrozen:
    sampler: object = PER


@config()
class Small(jr.ReplayBuffer):
    """A buffer to be broken."""

    capacity: int = 10
    donate: bool = False


@config()
class StoresAtInit(Small):
    def init(self, items):
        state = super().init(items)
        values = [x for x in jax.tree.leaves(items) if isinstance(x, jax.Array)]
        return state.replace(ring=state.ring.replace(size=state.ring.size + len(values)))


@config()
class Widens(Small):
    def add(self, state, items, *, mask=None):
        state = super().add(state, items, mask=mask)
        return state.replace(ring=state.ring.replace(size=state.ring.size.astype(jnp.float32)))


@config()
class IsWeaklyTyped(Small):
    def init(self, items):
        state = super().init(items)
        return state.replace(ring=state.ring.replace(size=jnp.asarray(0)))  # as a Python number is, and add's is not


CALLS = []


@config()
class CountsCalls(Small):
    def add(self, state, items, *, mask=None):
        CALLS.append(0)
        return super().add(state, jax.tree.map(lambda x: x + len(CALLS) % 5, items), mask=mask)


@config()
class GivesAway(Small):
    donate: bool = True

    def add(self, state, items, *, mask=None):
        return Small().add(state, items, mask=mask)


@config()
class DrawsInPlace(Small):
    def sample(self, state, key, batch_size, *, beta=None, max_age=None):
        sample = super().sample(state, key, batch_size)
        if not isinstance(state.storage["x"], jax.core.Tracer):
            state.storage["x"] = state.storage["x"] + 1
        return sample


@config()
class DrawsFloats(Small):
    def sample(self, state, key, batch_size, *, beta=None, max_age=None):
        sample = super().sample(state, key, batch_size)
        return sample.replace(items=jax.tree.map(lambda x: x.astype(jnp.float32), sample.items))


@config()
class WeighsByRoot(Small):
    def sample(self, state, key, batch_size, *, beta=None, max_age=None):
        sample = super().sample(state, key, batch_size)
        drawn = sample.probabilities > 0
        return sample.replace(weights=jnp.where(drawn, jnp.sqrt(sample.probabilities - 0.2), 0.0))


@config()
class DrawsNothing(Small):
    def sample(self, state, key, batch_size, *, beta=None, max_age=None):
        sample = super().sample(state, key, batch_size)
        return sample.replace(indices=jnp.maximum(sample.indices, 0))


@config()
class Misreports(Small):
    sampler: object = PER

    def sample(self, state, key, batch_size, *, beta=None, max_age=None):
        sample = super().sample(state, key, batch_size)
        evenly = 1.0 / jnp.maximum(self.size(state), 1).astype(jnp.float32)
        return sample.replace(probabilities=jnp.where(sample.indices >= 0, evenly, 0.0))


@config()
class NamesSlots(Small):
    def sample(self, state, key, batch_size, *, beta=None, max_age=None):
        sample = super().sample(state, key, batch_size)
        return sample.replace(indices=jnp.where(sample.indices >= 0, sample.indices % self.capacity, -1))

    def get(self, state, indices):
        return jax.tree.map(lambda x: x[indices], state.storage)


@config()
class UpdatesSlots(Small):
    sampler: object = PER

    def update(self, state, indices, td_errors):
        slots = jnp.where(indices >= 0, indices % self.capacity, self.capacity)
        there = jnp.ones(slots.shape, bool)
        return state.replace(sampler=self.sampler.update(state.sampler, slots, jnp.asarray(td_errors), there))


BROKEN_BUFFERS = {
    testing.CONFIG: NotFrozen(),
    testing.ABSTRACT: StoresAtInit(),
    testing.STABLE: Widens(),
    testing.DONATED: GivesAway(),
    testing.TRACED: IsWeaklyTyped(),
    testing.MODES: CountsCalls(),
    testing.PURE: DrawsInPlace(),
    testing.EMPTY: DrawsNothing(),
    testing.TYPES: DrawsFloats(),
    testing.RANGES: WeighsByRoot(),
    testing.LAW: Misreports(),
    testing.HANDLES: NamesSlots(),
    testing.LATE: UpdatesSlots(),
}
QUICK = (testing.CONFIG, testing.ABSTRACT, testing.STABLE, testing.DONATED)  # what nothing is compiled for, or little


@pytest.mark.parametrize(
    "rule", [rule if rule in QUICK else rarely(rule) for rule in BROKEN_BUFFERS], ids=lambda rule: rule[:12]
)
def test_a_buffer_that_breaks_a_rule_is_told_which(rule):
    with pytest.raises(AssertionError) as error:
        testing.check_buffer(BROKEN_BUFFERS[rule], ITEMS, key=seeds.key(0))
    assert str(error.value).startswith(rule)


@config()
class HasHiddenCounter(jr.Prioritized):
    def update(self, state, slots, td_errors, mask, *, spent=None, axis_name=None):
        CALLS.append(0)
        return super().update(state, slots, td_errors * len(CALLS), mask)


@config()
class Forgets(jr.Prioritized):
    def sample(self, state, key, batch_size, live):
        evenly = jnp.where(live.size > 0, 1.0 / jnp.maximum(live.size, 1), 0.0)
        return super().sample(state, key, batch_size, live)[0], jnp.full(batch_size, evenly, jnp.float32)


@config()
class DrawsAll(jr.Uniform):
    def sample(self, state, key, batch_size, live):
        return super().sample(state, key, batch_size, live.replace(size=jnp.int32(live.capacity)))


@config()
class HasNoMask(jr.Prioritized):
    def update(self, state, slots, td_errors, mask, *, spent=None, axis_name=None):
        return super().update(state, slots, td_errors, jnp.ones_like(mask))


@config()
class FirstCounts(jr.Prioritized):
    def update(self, state, slots, td_errors, mask, *, spent=None, axis_name=None):
        return super().update(state, slots[::-1], td_errors[::-1], mask[::-1])


@config()
class TakesAll(jr.Prioritized):
    def update(self, state, slots, td_errors, mask, *, spent=None, axis_name=None):
        state = super().update(state, slots, td_errors, mask)
        return state.replace(max_priority=jnp.where(jnp.isfinite(jnp.sum(td_errors)), state.max_priority, jnp.inf))

    def sample(self, state, key, batch_size, live):
        slots, probabilities = super().sample(state, key, batch_size, live)
        return slots, probabilities * (state.max_priority / state.max_priority)


@config()
class WeighsByInts(jr.Uniform):
    def weights(self, state, probabilities, size, *, beta=None, axis_name=None):
        return (probabilities > 0).astype(jnp.int32)


@config()
class LeavesRows(jr.Uniform):
    replacement: bool = False
    fills_rows = True


def wrong(**methods):
    """A prioritized sampler with other methods, given as functions of the right method and its arguments."""

    def method(name, function):
        right = getattr(jr.Prioritized, name)
        return functools.wraps(right)(lambda self, *args, **named: function(right.__get__(self), *args, **named))

    mine = {name: method(name, function) for name, function in methods.items()}
    return config()(type("Wrong", (jr.Prioritized,), mine))(alpha=0.7, stratified=False)


def forgetful(insert, state, slots, drawable, **named):
    new, held = insert(state, slots, drawable, **named), jr.sum_tree.leaves(state.tree)
    kept = jr.sum_tree.update(new.tree, np.arange(held.size), held, mask=held > 0)
    return new.replace(tree=kept)


def keep_nan(update, state, slots, td_errors, mask, **named):
    new = update(state, slots, td_errors, mask, **named)
    return new.replace(max_priority=jnp.where(jnp.any(mask & jnp.isnan(td_errors)), jnp.nan, new.max_priority))


def draw_if_finite(sample, state, *args):
    slots, probabilities = sample(state, *args)
    return slots, jnp.where(jnp.isnan(state.max_priority), 0.0, probabilities)


def spend_for_ever(insert, state, slots, drawable, **named):
    alive = jr.sum_tree.get(state.tree, slots) > 0
    return insert(state, slots, drawable & (alive | (jr.sum_tree.total(state.tree) == 0)), **named)


def take_no_spent(update, state, slots, td_errors, mask, *, spent=None, axis_name=None):
    return update(state, slots, td_errors, mask, axis_name=axis_name)


@config()
class TakesNoSpent(jr.Prioritized):
    def update(self, state, slots, td_errors, mask, *, axis_name=None):
        return super().update(state, slots, td_errors, mask, axis_name=axis_name)


@config()
class TakesNoBeta(jr.Uniform):
    def weights(self, state, probabilities, live):
        return super().weights(state, probabilities, live)


@config()
class SkipsTheLast(jr.Uniform):
    def sample(self, state, key, batch_size, live):
        return super().sample(
            state, key, batch_size, live.replace(size=jnp.where(live.size > 1, live.size - 1, live.size))
        )


@config()
class SkipsTheFirst(jr.Uniform):
    def sample(self, state, key, batch_size, live):
        few = live.size > 1
        return super().sample(state, key, batch_size, live.replace(start=live.start + few, size=live.size - few))


@config()
class Newest(jr.Recent):
    """Only the newest item is drawn."""

    power: float = 1.0

    def sample(self, state, key, batch_size, live):
        size = jnp.minimum(live.size, 1)
        return super().sample(state, key, batch_size, live.replace(start=live.start + live.size - size, size=size))


def evenly(restrict, state, live):
    slots = np.arange(live.capacity)
    leaves = ((slots - live.start) % live.capacity < live.size).astype(jnp.float32)
    return state.replace(tree=jr.sum_tree.update(state.tree, slots, leaves))


def by_rank(update, state, slots, td_errors, mask, **named):
    """Leaves are the ranks of the priorities."""
    new = update(state, slots, td_errors, mask, **named)
    leaves = jr.sum_tree.leaves(new.tree)
    ranks = jnp.where(leaves > 0, jnp.argsort(jnp.argsort(leaves)), 0).astype(jnp.float32)
    return new.replace(tree=jr.sum_tree.update(new.tree, np.arange(leaves.size), ranks))


def alone(method, *args, axis_name=None, **named):
    return method(*args, **named)


def of_one_shard(weights, state, probabilities, live, **named):
    return weights(state, probabilities, live.replace(axis_name=None), **named)


WRONG_SAMPLERS = {  # the rule that each breaks
    "weights inverted": (testing.WEIGHTS, wrong(weights=lambda weights, s, p, live, **named: p)),
    "beta ignored": (testing.WEIGHTS, wrong(weights=lambda weights, *args, beta=None: weights(*args))),
    "weights by the root": (
        testing.WEIGHTS,
        wrong(weights=lambda weights, *args, beta=None: weights(*args, beta=None if beta is None else beta / 2)),
    ),
    "weights of one shard": (testing.WEIGHTS, wrong(weights=of_one_shard)),
    "NaN kept": (testing.SOME, wrong(update=keep_nan, sample=draw_if_finite)),
    "nothing drawn": (testing.SOME, wrong(sample=lambda sample, *args: (sample(*args)[0], jnp.zeros(args[2])))),
    "neighbour updated": (
        testing.OTHERS,
        wrong(update=lambda update, state, slots, *args, **named: update(state, slots + 1, *args, **named)),
    ),
    "ranks": (testing.OTHERS, wrong(update=by_rank)),
    "last slot never drawn": (testing.EVERY, SkipsTheLast()),
    "first slot never drawn": (testing.EVERY, SkipsTheFirst()),
    "newest slot alone": (testing.KEYS, Newest()),
    "spent for ever": (testing.EVERY, wrong(insert=spend_for_ever)),
    "spent ignored": (testing.SPENT, wrong(update=take_no_spent)),
    "spent ignored with NaN": (
        testing.SPENT,
        wrong(
            update=lambda update, state, slots, td, mask, spent=None, **named: update(
                state, slots, td, mask, spent=None if spent is None else spent & ~jnp.isnan(td), **named
            )
        ),
    ),
    "axis_name of update ignored": (testing.SHARDS, wrong(update=alone)),
    "key ignored": (
        testing.KEYS,
        wrong(sample=lambda sample, state, key, *args: sample(state, jax.random.key(1), *args)),
    ),
    "signed TD errors": (
        testing.SIGN,
        wrong(update=lambda update, state, slots, td, *args, **named: update(state, slots, td.clip(0), *args, **named)),
    ),
    "overwritten items remembered": (testing.FORGOTTEN, wrong(insert=forgetful)),
    "priorities inverted": (testing.AGREE, wrong(priorities=lambda priorities, *args: 1 / (priorities(*args) + 1))),
    "masses before alpha": (testing.AGREE, wrong(masses=lambda masses, state: masses(state) ** 2)),
    "priorities_at of others": (testing.AGREE, wrong(priorities_at=lambda right, *args: 2 * right(*args))),
    "restricted evenly": (testing.RESTRICTED, wrong(restrict=evenly)),
    "restrict ignored": (testing.LIVE, wrong(restrict=lambda restrict, state, live: state)),
    "slots are no names": (
        testing.NAMES,
        wrong(update=lambda update, s, slots, td, *args, **named: update(s, slots, td * (1 + slots), *args, **named)),
    ),
    "no spent": (testing.KEYWORDS, TakesNoSpent()),
    "no beta": (testing.KEYWORDS, TakesNoBeta()),
    "not frozen": (testing.CONFIG, type("Open", (jr.Uniform,), {"__setattr__": lambda self, name, value: None})()),
    "hidden counter": (testing.MODES, HasHiddenCounter()),
    "integer weights": (testing.TYPES, WeighsByInts()),
    "wrong probabilities": (testing.LAW, Forgets()),
    "dead slots drawn": (testing.LIVE, DrawsAll()),
    "rows left empty": (testing.FILLED, LeavesRows()),
    "mask ignored": (testing.IGNORED, HasNoMask()),
    "first TD error counts": (testing.LAST, FirstCounts()),
    "infinite priority": (testing.FINITE, TakesAll()),
}
QUICK_ONES = ("not frozen", "integer weights", "no spent", "no beta", "dead slots drawn", "last slot never drawn")


@pytest.mark.parametrize("name", [name if name in QUICK_ONES else rarely(name) for name in WRONG_SAMPLERS])
def test_a_sampler_that_breaks_a_rule_is_told_which(name):
    rule, sampler = WRONG_SAMPLERS[name]
    with pytest.raises(AssertionError) as error:
        testing.check_sampler(sampler, key=seeds.key(0))
    assert str(error.value).startswith(rule)


@pytest.mark.parametrize(
    ("name", "exempt"),
    [
        ("newest slot alone", [testing.KEYS, testing.EVERY, testing.RESTRICTED]),
        rarely(("ranks", [testing.OTHERS, testing.FORGOTTEN, testing.SHARDS])),
    ],
)
def test_an_exempt_rule_may_be_broken_and_no_other(name, exempt):
    rule, sampler = WRONG_SAMPLERS[name]
    assert rule == exempt[0]
    testing.check_sampler(sampler, exempt=exempt, key=seeds.key(0))
    rejects(rule, testing.check_sampler, sampler, exempt=exempt[1:], key=seeds.key(0), error=AssertionError)


@pytest.mark.parametrize("exempt", [testing.EVERY, ["no rule"]])
def test_what_is_exempt_is_a_list_of_rules(exempt):
    rejects("must be rules", testing.check_sampler, PER, exempt=exempt)


def test_what_is_no_sampler_and_a_law_that_is_not_quite_right():
    rejects("must be a sampler", testing.check_sampler, object())
    rng = seeds.rng(0)
    law = np.array([0.1, 0.2, 0.7])
    drawn = rng.choice(3, 2 * _buffers.DRAWS, p=law)
    _buffers.check_law(drawn, law[drawn].astype(np.float32))
    wrong = np.array([0.1, 0.25, 0.65], np.float32)
    with pytest.raises(AssertionError, match="draws follow their probabilities: chi-square"):
        _buffers.check_law(drawn, wrong[drawn])
    rejects(r"sum to 1\.5", _buffers.check_law, drawn, np.full(drawn.size, 0.5), error=AssertionError)
