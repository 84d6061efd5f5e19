"""The checks for buffers and samplers of one's own: ours pass, and what breaks a rule is told which one."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import seeds
from flax import struct
from helpers import ByRank, rarely, rejects

import jaxreplay as jr
from jaxreplay import testing
from jaxreplay.testing import _buffers

PER = jr.Prioritized(alpha=0.7)
ITEMS = {"x": jax.ShapeDtypeStruct((4, 2), jnp.float32)}


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
        return {"storage": storage, "count": state["count"] + jnp.int32(size)}

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
        items = self.get(state, indices)
        if isinstance(items, jr.TransitionBatch):
            items = items.replace(W=weights, idx=indices)
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


def test_a_buffer_of_ones_own_passes_with_the_add_that_is_given():
    calls = []

    def add(state, items, key):
        calls.append(key)
        return Own().add(state, items, key)

    testing.check_buffer(Own(), ROWS, add=add)
    assert calls


def test_an_add_that_keeps_its_state_is_not_taken_for_one_that_donates_it():
    key = jax.random.key(0)
    for buffer in (Small(), jr.ReplayBuffer(capacity=10)):
        _buffers._Runs(buffer, ITEMS, 4, _buffers._adder(buffer)).check_donation(key)
    runs = _buffers._Runs(Small(), ITEMS, 4, _buffers._adder(jr.ReplayBuffer(capacity=10)))
    rejects(f"{testing.DONATED}: donate=False, [1-9] leaves gone", runs.check_donation, key, error=AssertionError)


def test_a_law_is_looked_at_in_as_many_draws_of_a_buffer_that_allows_few():
    buffer = jr.ReplayBuffer(capacity=10, sampler=jr.Uniform(replacement=False))
    runs = _buffers._Runs(buffer, ITEMS, 4, _buffers._adder(buffer))
    rows = jax.tree.map(lambda x: jnp.ones(x.shape, x.dtype), ITEMS)
    state = runs.add(runs.init(), rows, jax.random.key(0))
    assert runs.draw_often(state, jax.random.key(0))[0].shape == (_buffers.DRAWS // 4, 4)


def breaks(rule, check, *arguments, **named):
    """Check that a check tells that this rule is broken."""
    rejects(f"^{re.escape(rule)}", check, *arguments, error=AssertionError, **named)


P, W = [0.0, 0.5, 1.0, 1.0], [0.0, 2.0, 0.0, 1e30]  # what a draw may tell


@pytest.mark.parametrize(
    ("rule", "changed"),
    [
        (None, {}),
        (None, {"probabilities": [0.0, 1 + 5e-6, 1e-38, 1.0]}),
        *((testing.TYPES, {"indices": np.zeros(4, dtype)}) for dtype in (np.int64, np.float32)),
        *((testing.TYPES, {"probabilities": x}) for x in (np.zeros((4, 1), np.float32), np.zeros(4, np.float16))),
        *((testing.TYPES, {"weights": x}) for x in (np.zeros((), np.float32), np.zeros(4, np.int32))),
        (testing.TYPES, {"indices": np.zeros(3, np.int32)}),
        *((testing.RANGES, {"probabilities": [0.0, x, 1.0, 1.0]}) for x in (-1e-6, 1 + 1e-4, 2.0, np.nan)),
        *((testing.RANGES, {"weights": [0.0, x, 1.0, 1.0]}) for x in (-1e-6, np.nan, np.inf)),
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
        check = functools.partial(breaks, rule, _buffers.check_rows) if rule else _buffers.check_rows
        check(**given, batch_size=4)


def test_a_law_is_tested_at_five_standard_deviations():
    """Chi-squares of 28.9 and 32.4 with one degree of freedom: at most 30.8; two would make it 33.4."""
    near, far = (np.repeat([3, 5], [200 + more, 800 - more]) for more in (68, 72))
    _buffers.check_law(near, np.where(near == 3, 0.2, 0.8))
    _buffers.check_law(np.arange(1000) == 0, np.float32([1e-6, *[1 - 1e-6] * 999]))  # a rare draw
    breaks(testing.LAW, _buffers.check_law, far, np.where(far == 3, 0.2, 0.8))


config = dataclasses.dataclass(frozen=True, kw_only=True)


@dataclasses.dataclass(eq=False)
class NotFrozen:
    sampler: object = PER


@config
class Small(jr.ReplayBuffer):
    """A buffer to be broken."""

    capacity: int = 10
    donate: bool = False


def store_at_init(init, items):
    state, values = init(items), [x for x in jax.tree.leaves(items) if isinstance(x, jax.Array)]
    return state.replace(ring=state.ring.replace(size=state.ring.size + len(values)))


def widen(add, *arguments, **named):
    state = add(*arguments, **named)
    return state.replace(ring=state.ring.replace(size=state.ring.size.astype(jnp.float32)))


def altered(kind, **methods):
    """A class like this one with other methods, given as functions of the right method and its arguments."""

    def method(name, function):
        right = getattr(kind, name)
        return functools.wraps(right)(lambda self, *args, **named: function(right.__get__(self), *args, **named))

    return type("Wrong", (kind,), {name: method(name, function) for name, function in methods.items()})


def own(**methods):
    """A buffer like `Own`, with other methods."""
    return altered(Own, **methods)()


def drawn_with(change):
    """A buffer of which draws differ as `change(sample)`, a dict of fields, says."""
    return own(sample=lambda sample, *args: (drawn := sample(*args)).replace(**change(drawn)))


CALLS = []


def count_calls(add, state, items, key):
    CALLS.append(0)
    return add(state, jax.tree.map(lambda x: x + len(CALLS) % 5, items), key)


def is_eager(state):
    return not isinstance(state["count"], jax.core.Tracer)


def draw_in_place(sample, state, *args):
    drawn = sample(state, *args)
    if is_eager(state):
        state["storage"] = jax.tree.map(lambda x: x + 1, state["storage"])
    return drawn


@jax.custom_batching.custom_vmap
def unless_mapped(x):
    return x


@unless_mapped.def_vmap
def plus_one(size, is_batched, x):
    return x + 1, True


def forget_late(update, state, indices, td_errors):
    """After an update of nothing with large TD errors, one item is left."""
    return state | {"count": jnp.where(jnp.any((indices == -1) & (td_errors > 50)), 1, state["count"])}


def draw_slots(sample, *arguments):
    drawn = sample(*arguments)
    return drawn.replace(indices=jnp.where(drawn.indices < 0, -1, drawn.indices % 6))


BROKEN_BUFFERS = [
    (testing.CONFIG, NotFrozen()),
    (testing.ABSTRACT, altered(Small, init=store_at_init)()),
    (testing.STABLE, altered(Small, add=widen)()),
    (testing.STABLE, own(add=lambda add, *args: add(*args) | {"more": jnp.zeros(())})),
    (testing.DONATED, altered(Small, add=lambda add, *args, **named: Small().add(*args, **named))(donate=True)),
    (
        testing.TRACED,
        own(
            init=lambda init, items: init(items) | {"count": jnp.asarray(0)},  # weakly typed, as add's is not
            add=lambda add, *args: (new := add(*args)) | {"count": new["count"].astype(jnp.asarray(0).dtype)},
        ),
    ),
    (testing.MODES, own(add=count_calls)),
    (testing.MODES, own(add=lambda add, *args: jax.tree.map(unless_mapped, add(*args)))),
    (testing.MODES, own(sample=lambda sample, s, *args: sample(s | {"count": s["count"] + is_eager(s)}, *args))),
    (
        testing.MODES,
        own(
            init=lambda init, items: init(items) | {"eager": jnp.zeros((), jnp.int32)},
            add=lambda add, state, *args: state | add(state, *args),
            update=lambda update, state, *args: state | {"eager": state["eager"] + is_eager(state)},
        ),
    ),
    (testing.PURE, own(sample=draw_in_place)),
]
BROKEN_DRAWS = [
    (testing.EMPTY, drawn_with(lambda x: {"indices": jnp.maximum(x.indices, 0)})),
    (testing.EMPTY, drawn_with(lambda x: {"probabilities": jnp.maximum(x.probabilities, 0.1)})),
    (testing.TYPES, drawn_with(lambda x: {"items": x.items["x"].astype(jnp.int32)})),
    (testing.TYPES, drawn_with(lambda x: {"items": x.items["x"][1:]})),
    (testing.TYPES, drawn_with(lambda x: {"indices": x.indices.astype(jnp.float32)})),
    (testing.RANGES, Own(keeps_handles=True)),
    (testing.RANGES, drawn_with(lambda x: {"weights": -x.weights})),
    (testing.LAW, drawn_with(lambda x: {"probabilities": x.probabilities / 2})),
    (testing.HANDLES, drawn_with(lambda x: {"items": {"x": x.items["x"] + 1}})),
    (testing.HANDLES, own(sample=draw_slots, get=lambda get, s, slots: jax.tree.map(lambda x: x[slots], s["storage"]))),
    (testing.LATE, own(update=forget_late)),
]


def of_rule(value):
    return value[:12] if isinstance(value, str) else ""


@pytest.mark.parametrize(("rule", "buffer"), BROKEN_BUFFERS, ids=of_rule)
def test_a_buffer_that_breaks_a_rule_is_told_which(rule, buffer):
    breaks(rule, testing.check_buffer, buffer, ITEMS, key=seeds.key(0))


def runs_of(buffer):
    return _buffers._Runs(buffer, ITEMS, 8, buffer.add)


@pytest.fixture(scope="module")
def right():
    """A state of `Own`, from which it draws as it should."""
    state = runs_of(Own()).check_modes(seeds.key(0))
    runs_of(Own()).check_draws(state, seeds.key(0))
    return state


@pytest.mark.parametrize(("rule", "buffer"), BROKEN_DRAWS, ids=of_rule)
def test_draws_that_break_a_rule_are_told_which(right, rule, buffer):
    breaks(rule, runs_of(buffer).check_draws, right, seeds.key(0))


@pytest.mark.parametrize(
    ("message", "found"),
    [
        ("hashes differ", NotFrozen()),
        ("not equal", type("Unequal", (), {"__hash__": lambda self: 1})()),
        ("field capacity can be set", dataclasses.make_dataclass("Open", [("capacity", int, 1)], unsafe_hash=True)()),
    ],
)
def test_a_configuration_is_checked_part_by_part(message, found):
    rejects(f"{testing.CONFIG}: {message}", _buffers.check_config, found, error=AssertionError)


def test_a_law_is_checked_part_by_part():
    drawn = np.array([0, 1, 1, 0])
    for last, others, message in ((0.4, 0.5, "Not equal to tolerance"), (0.6, 0.6, "sum to 1.2")):
        law = np.float32([others, others, last, others])
        rejects(message, _buffers.check_law, drawn, law, error=AssertionError)


RIGHT, UNIFORM = jr.Prioritized(alpha=0.7, stratified=False), jr.Uniform()


def wrong(sampler=RIGHT, **methods):
    """A sampler like this one with other methods."""
    fields = {x.name: getattr(sampler, x.name) for x in dataclasses.fields(sampler)}
    return config(altered(type(sampler), **methods))(**fields)


def drawn_from(change, sampler=UNIFORM):
    """A sampler that draws from other live slots than it should."""
    return wrong(sampler, sample=lambda sample, state, key, size, live: sample(state, key, size, change(live)))


def all_but_first(live):
    few = live.size > 1
    return live.replace(start=live.start + few, size=live.size - few)


def halve_beta_of_one_shard(weights, state, probabilities, live, beta=None):
    return weights(state, probabilities, live, beta=beta if beta is None or live.axis_name else beta / 2)


def newest_alone(live):
    size = jnp.minimum(live.size, 1)
    return live.replace(start=live.start + live.size - size, size=size)


def told_evenly(sample, state, key, batch_size, live):
    evenly = jnp.where(live.size > 0, 1.0 / jnp.maximum(live.size, 1), 0.0)
    return sample(state, key, batch_size, live)[0], jnp.full(batch_size, evenly, jnp.float32)


def grow(update, state, slots, td_errors, mask, **named):
    CALLS.append(0)
    return update(state, slots, td_errors * len(CALLS), mask)


def take_all(update, state, slots, td_errors, mask, **named):
    state = update(state, slots, td_errors, mask)
    return state.replace(max_priority=jnp.where(jnp.isfinite(jnp.sum(td_errors)), state.max_priority, jnp.inf))


def draw_of_largest(sample, state, *args):
    slots, probabilities = sample(state, *args)
    return slots, probabilities * (state.max_priority / state.max_priority)


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


def spend_no_nan(update, state, slots, td_errors, mask, spent=None, **named):
    spent = None if spent is None else spent & ~jnp.isnan(td_errors)
    return update(state, slots, td_errors, mask, spent=spent, **named)


def by_half(weights, *arguments, beta=None):
    return weights(*arguments, beta=None if beta is None else beta / 2)


def evenly(restrict, state, live):
    slots = np.arange(live.capacity)
    leaves = ((slots - live.start) % live.capacity < live.size).astype(jnp.float32)
    return state.replace(tree=jr.sum_tree.update(state.tree, slots, leaves))


def tell_size(sample, state, key, batch_size, live):
    raise RuntimeError(f"{batch_size} rows")


def by_rank(update, state, slots, td_errors, mask, **named):
    """Leaves are the ranks of the priorities."""
    new = update(state, slots, td_errors, mask, **named)
    leaves = jr.sum_tree.leaves(new.tree)
    ranks = jnp.where(leaves > 0, jnp.argsort(jnp.argsort(leaves)), 0).astype(jnp.float32)
    return new.replace(tree=jr.sum_tree.update(new.tree, np.arange(leaves.size), ranks))


def of_one_shard(weights, state, probabilities, live, **named):
    return weights(state, probabilities, live.replace(axis_name=None), **named)


@struct.dataclass
class Row:
    leaves: jax.Array
    capacity = property(lambda self: self.leaves.shape[-1])


@dataclasses.dataclass(frozen=True)
class Unique(jr.samplers.Index):
    """Leaves in an array, and a promise of distinct slots that is false."""

    def init(self, capacity, **named):
        return Row(jnp.zeros(capacity))

    def write(self, state, slots, leaves, *, is_new, mask=True):
        slots = jnp.where(mask, slots, state.tree.capacity)
        return Row(state.tree.leaves.at[slots].set(leaves, mode="drop", unique_indices=True))

    def get(self, state, slots):
        return state.tree.leaves[slots]

    def masses(self, state):
        return state.tree.leaves


def ignore_axis(update, *arguments, axis_name=None, **named):
    return update(*arguments, **named)


WRONG_SAMPLERS = {  # the rule that each breaks
    "weights inverted": (testing.WEIGHTS, wrong(weights=lambda weights, s, p, live, **named: p)),
    "beta ignored": (testing.WEIGHTS, wrong(weights=lambda weights, *args, beta=None: weights(*args))),
    "weights by the root": (testing.WEIGHTS, wrong(weights=by_half)),
    "weights of one shard": (testing.WEIGHTS, wrong(weights=of_one_shard)),
    "NaN kept": (testing.SOME, wrong(update=keep_nan, sample=draw_if_finite)),
    "nothing drawn": (testing.SOME, wrong(sample=lambda sample, *args: (sample(*args)[0], jnp.zeros(args[2])))),
    "neighbour updated": (testing.OTHERS, wrong(update=lambda update, s, i, *x, **y: update(s, i + 1, *x, **y))),
    "ranks": (testing.OTHERS, wrong(update=by_rank)),
    "half of beta": (testing.WEIGHTS, wrong(weights=halve_beta_of_one_shard)),
    "one of two drawn": (testing.EVERY, drawn_from(lambda live: live.replace(size=live.size - (live.size == 2)))),
    "first slot never drawn": (testing.EVERY, drawn_from(all_but_first)),
    "newest slot alone": (testing.KEYS, drawn_from(newest_alone, jr.Recent(half_life=4.0))),
    "spent for ever": (testing.EVERY, wrong(insert=spend_for_ever)),
    "spent ignored": (testing.SPENT, wrong(update=lambda update, *x, spent=None, **y: update(*x, **y))),
    "spent ignored with NaN": (testing.SPENT, wrong(update=spend_no_nan)),
    "axis_name ignored": (testing.SHARDS, wrong(update=ignore_axis)),
    "key ignored": (testing.KEYS, wrong(sample=lambda sample, state, key, *x: sample(state, jax.random.key(1), *x))),
    "overwritten items remembered": (testing.FORGOTTEN, wrong(insert=forgetful)),
    "priorities inverted": (testing.AGREE, wrong(priorities=lambda priorities, *args: 1 / (priorities(*args) + 1))),
    "masses before alpha": (testing.AGREE, wrong(masses=lambda masses, state: masses(state) ** 2)),
    "priorities_at of others": (testing.AGREE, wrong(priorities_at=lambda right, *args: 2 * right(*args))),
    "restricted evenly": (testing.RESTRICTED, wrong(restrict=evenly)),
    "restrict ignored": (testing.LIVE, wrong(restrict=lambda restrict, state, live: state)),
    "unique promised": (testing.LAST, type("Own", (jr.samplers.ByPriority,), {"index": Unique()})()),
    "counters forgotten": (testing.CLEARED, wrong(cleared=lambda cleared, state, capacity: RIGHT.init(capacity))),
    "nothing cleared": (testing.CLEARED, wrong(cleared=lambda cleared, state, capacity: state)),
    "axis_name ignored by rank": (testing.SHARDS, wrong(ByRank(), update=ignore_axis)),
    "not frozen": (testing.CONFIG, type("Open", (jr.Uniform,), {"__setattr__": lambda self, name, value: None})()),
    "hidden counter": (testing.MODES, wrong(update=grow)),
    "integer weights": (testing.TYPES, wrong(UNIFORM, weights=lambda weights, s, p, *_, **named: (p > 0) + 0)),
    "wrong probabilities": (testing.LAW, wrong(sample=told_evenly)),
    "dead slots drawn": (testing.LIVE, drawn_from(lambda live: live.replace(size=jnp.int32(live.capacity)))),
    "rows left empty": (testing.FILLED, type("Own", (jr.Uniform,), {"fills_rows": True})(replacement=False)),
    "mask ignored": (testing.IGNORED, wrong(update=lambda update, *x, **named: update(*x[:3], jnp.ones_like(x[3])))),
    "first TD error counts": (testing.LAST, wrong(update=lambda update, s, *x, **y: update(s, *map(jnp.flip, x)))),
    "infinite priority": (testing.FINITE, wrong(update=take_all, sample=draw_of_largest)),
}
QUICK_ONES = ("not frozen", "unique promised", "counters forgotten")


@pytest.mark.parametrize("name", [name if name in QUICK_ONES else rarely(name) for name in WRONG_SAMPLERS])
def test_a_sampler_that_breaks_a_rule_is_told_which(name):
    rule, sampler = WRONG_SAMPLERS[name]
    breaks(rule, testing.check_sampler, sampler, key=seeds.key(0))


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
    rejects("must be a sampler", testing.check_sampler, object(), exempt=exempt)
    rejects(r"key=\[\]: must be", testing.check_sampler, PER, key=[])


def test_a_method_that_takes_too_little_is_named():
    for name, base, method in (
        ("update", jr.Prioritized, lambda self, *x, axis_name=None: x[0]),
        ("weights", jr.Uniform, lambda self, *x: UNIFORM.weights(*x)),
    ):
        own = type("Own", (base,), {name: method})()
        rejects("unexpected keyword argument '(spent|beta)'", testing.check_sampler, own, error=TypeError)


def test_a_sampler_is_asked_for_as_many_rows_as_are_given():
    rejects("^2 rows", testing.check_sampler, wrong(sample=tell_size), batch_size=2, error=RuntimeError)


@pytest.mark.slow
def test_a_sampler_is_checked_anew_after_its_class_was_mended_in_place():
    sampler = wrong(sample=told_evenly)
    breaks(testing.LAW, testing.check_sampler, sampler)
    type(sampler).sample = jr.Prioritized.sample
    testing.check_sampler(sampler)


def stream(autoreset, seed=0, num_steps=200, limit=5):
    """Steps of two environments that count up from a random number: terminated at random, else truncated at `limit`."""
    rng, rows = np.random.default_rng(seed), []
    for _ in range(2):
        obs, age, ended, of_env = rng.uniform(), 0, False, []
        for _ in range(num_steps):
            if ended and autoreset == "next-step":
                first = rng.uniform()
                of_env.append((obs, first, False, False, True))
                obs, age, ended = first, 0, False
                continue
            if ended:
                obs, age = rng.uniform(), 0
            terminated, age = rng.uniform() < 0.2, age + 1
            truncated = age == limit and not terminated
            of_env.append((obs, obs + 1, terminated, truncated, False))
            obs, ended = obs + 1, terminated or truncated
        rows.append(of_env)
    s, s_next, *flags = (np.array(x, np.float64).T for x in zip(*(zip(*env, strict=True) for env in rows), strict=True))
    return s, s_next, *(x > 0 for x in flags)


@pytest.mark.parametrize("autoreset", ["same-step", "next-step"])
def test_a_stream_is_right_and_every_fault_of_it_is_named(autoreset):
    s, s_next, terminated, truncated, resets = stream(autoreset)
    assert terminated.sum() > 20 < truncated.sum()
    check = functools.partial(testing.check_stream, mask=~resets)
    assert check(s, s_next, terminated, truncated) == autoreset
    assert (
        check(
            {"a": s[..., None], "b": jnp.array(s)},
            {"a": s_next[..., None], "b": jnp.array(s_next)},
            terminated,
            truncated * 1,
        )
        == autoreset
    )
    ends = terminated | truncated
    wrong = functools.partial(rejects, error=AssertionError)
    wrong(
        "^within an episode s_next is s of the next row: .*\\[\\[[0-9]+, [01]\\]\\], \\[time, env\\]",
        check,
        s,
        s_next,
        terminated,
        truncated & False,
    )
    wrong(
        "^a time limit truncates, and a terminal state terminates: the [0-9]+ terminated episodes have \\[5\\] steps",
        check,
        s,
        s_next,
        truncated,
        terminated,
    )
    if autoreset == "next-step":
        wrong(
            "^the row after an end is the first of an episode, or a reset that mask leaves out: .* give mask=~resets",
            testing.check_stream,
            s,
            s_next,
            terminated,
            truncated,
        )
        some = ~resets | (np.arange(200) < 100)[:, None]
        wrong(
            "^the row after an end is the first of an episode, or a reset that mask leaves out: .* give mask=~resets",
            check,
            s,
            s_next,
            terminated,
            truncated,
            mask=some,
        )
    else:
        late = np.roll(terminated, 1, axis=0), np.roll(truncated, 1, axis=0)
        wrong("^within an episode s_next is s of the next row: not so in [0-9]+ rows", check, s, s_next, *late)
        lost = np.where(ends, np.roll(s, -1, axis=0), s_next)
        wrong(
            "^the row after an end is the first of an episode, .* must be the final observation",
            check,
            s,
            lost,
            terminated,
            truncated,
        )
    rejects("no episode ends before the last row", check, s, s_next, ends & False, ends & False)


def test_what_a_stream_cannot_tell_is_not_an_error():
    s, s_next, terminated, truncated, _ = stream("same-step")
    ends = terminated | truncated
    assert testing.check_stream(s, s_next, ends, ends & False) == "same-step"  # a time limit reported as a termination
    fixed = np.broadcast_to(np.arange(20)[:, None] % 4, (20, 2))
    assert testing.check_stream(fixed, fixed + 1, fixed == 3, fixed < 0) == "same-step"
