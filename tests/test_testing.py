"""The checks for buffers and samplers of one's own: ours pass, and what breaks a rule is told which one."""

import contextlib
import dataclasses
import functools
import operator
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import seeds
from flax import struct
from helpers import rejects

import jaxreplay as jr
from jaxreplay import testing
from jaxreplay.testing import _buffers, _samplers

PER = jr.Prioritized(alpha=0.7)
ITEMS = {"x": jax.ShapeDtypeStruct((4, 2), jnp.float32)}


@struct.dataclass
class OwnState:
    storage: object
    count: jax.Array  # int32 [], items added so far
    priorities: jax.Array  # float32 [capacity]
    fault: jax.Array  # int32 [], the number of the fault that is on


@dataclasses.dataclass(frozen=True)
class Own:
    """A buffer that inherits from nothing, draws by TD errors, and has something in all that `Sample` may hold."""

    capacity: int = 6
    fault: int = dataclasses.field(default=-1, compare=False)

    def init(self, items):
        storage = jax.tree.map(lambda x: jnp.asarray(np.zeros((self.capacity, *x.shape[1:]), x.dtype)), items)
        priorities = jnp.asarray(np.zeros(self.capacity, np.float32))
        return OwnState(storage, jnp.int32(0), priorities, jnp.int32(self.fault))

    @functools.partial(jax.jit, static_argnums=0)
    def add(self, state, items, key):
        size = jax.tree.leaves(items)[0].shape[0]
        at = (state.count + jnp.arange(size, dtype=jnp.int32)) % self.capacity
        storage = jax.tree.map(lambda x, new: x.at[at].set(new), state.storage, items)
        return state.replace(
            storage=storage, count=state.count + jnp.int32(size), priorities=state.priorities.at[at].set(1.0)
        )

    @functools.partial(jax.jit, static_argnums=(0, 3))
    def sample(self, state, key, batch_size):
        """Every third row is without an item."""
        total = jnp.sum(state.priorities)
        slots = jax.random.categorical(key, jnp.log(state.priorities), shape=(batch_size,)).astype(jnp.int32)
        drawn = (jnp.arange(batch_size) % 3 > 0) & (total > 0)
        indices = jnp.where(drawn, state.count - 1 - (state.count - 1 - slots) % self.capacity, -1)
        probabilities = jnp.where(drawn, state.priorities[slots] / jnp.where(total > 0, total, 1.0), 0.0)
        weights = drawn.astype(jnp.float32)
        items = self.get(state, indices)
        if isinstance(items, jr.TransitionBatch):
            items = items.replace(W=weights, idx=indices)
        return jr.Sample(items, indices, probabilities, weights)

    @functools.partial(jax.jit, static_argnums=0)
    def update(self, state, indices, td_errors):
        slots = jnp.where(self.has(state, indices), indices % self.capacity, self.capacity)
        priorities = (jnp.abs(td_errors) + 0.1).astype(jnp.float32)
        return state.replace(priorities=state.priorities.at[slots].set(priorities, mode="drop"))

    @functools.partial(jax.jit, static_argnums=0)
    def get(self, state, indices):
        def read(x):
            found = x[indices % self.capacity]
            stored = self.has(state, indices).reshape(-1, *[1] * (found.ndim - 1))
            return jnp.where(stored, found, 0).astype(x.dtype)

        return jax.tree.map(read, state.storage)

    def has(self, state, indices):
        return (indices >= 0) & (indices >= state.count - self.capacity)


NONE, OBS = np.zeros(4, np.float32), np.zeros((4, 2), np.float32)
ROWS = jr.TransitionBatch(S=OBS, A=np.zeros(4, bool), logP=None, Rn=NONE, In=NONE, S_next=OBS)


def test_a_buffer_of_ones_own_passes_with_the_add_that_is_given():
    calls = []

    def add(state, items, key):
        calls.append(key)
        return Own().add(state, items, key)

    testing.check_buffer(Own(), ROWS, add=add)
    assert calls


def test_a_law_is_looked_at_in_as_many_draws_of_a_buffer_that_allows_few():
    buffer = jr.ReplayBuffer(capacity=10, sampler=jr.Uniform(replacement=False))
    runs = _buffers._Runs(buffer, ITEMS, 3, _buffers._adder(buffer))
    rows = jax.tree.map(lambda x: np.ones(x.shape, x.dtype), ITEMS)
    state = runs.add(runs.init(), rows, jax.random.key(0))
    assert runs.draw(state, jax.random.key(0)).indices.shape == (_buffers.DRAWS // 3 + 1, 3)


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


@jax.custom_batching.custom_vmap
def unless_mapped(x):
    return x


@unless_mapped.def_vmap
def plus_one(size, is_batched, x):
    return x + 1, True


BROKEN_BUFFERS = [
    (testing.CONFIG, NotFrozen()),
    (testing.STABLE, altered(Small, add=widen)()),
    (
        testing.STABLE,
        own(add=lambda add, *args: (x := add(*args)).replace(fault=x.fault.astype(jnp.int16))),
    ),
    (testing.DONATED, altered(Small, add=lambda add, *args, **named: Small().add(*args, **named))(donate=True)),
    (
        testing.DONATED,
        altered(Small, add=lambda add, *args, **named: altered(Small)(donate=True).add(*args, **named))(),
    ),
    (
        testing.TRACED,
        own(
            init=lambda init, items: init(items).replace(count=jnp.asarray(0)),  # weakly typed, as add's is not
            add=lambda add, *args: (new := add(*args)).replace(count=new.count.astype(jnp.asarray(0).dtype)),
        ),
    ),
]
WRONG_TYPES = [
    lambda x: {"items": x.items["x"].astype(jnp.int32)},
    lambda x: {"items": x.items["x"][1:]},
    lambda x: {"probabilities": x.probabilities.astype(jnp.float16)},
]


def switched(base, faults):
    """Methods like those of `base`, of which a state's `fault` says which of `faults` is on: all share their programs.

    A fault is a dict of methods, functions of the right method and its arguments.
    """

    @jax.jit
    def switch(is_on, found, right):
        return jax.tree.map(lambda x, y: jnp.where(is_on, x, y).astype(y.dtype), found, right)

    def method(name):
        @functools.wraps(getattr(base, name))
        def chosen(self, state, *args, **named):
            method = functools.partial(getattr(base, name), self)
            result = method(state, *args, **named)

            def right(*its, **more):
                is_same = map(operator.is_, (*its, *more.values()), (state, *args, *named.values()))
                return result if all(is_same) and more.keys() == named.keys() else method(*its, **more)

            for number, methods in enumerate(faults.values()):
                if name in methods:
                    found = methods[name](right, state, *args, **named)
                    result = switch(state.fault == number, found, result)
            return result

        return chosen

    return {name: method(name) for name in {name for methods in faults.values() for name in methods}}


def broken_rules(monkeypatch, check, key):
    """Names of all rules that a check finds broken, if it goes on after each."""
    found = set()

    @contextlib.contextmanager
    def rule(text, exempt=()):
        try:
            yield
        except Exception:
            found.add(text)

    for module in (_buffers, _samplers):
        monkeypatch.setattr(module, "rule", rule)
    check(key)
    return {name for name, text in vars(testing).items() if name.isupper() and text in found}


def check_faults(faults, found):
    """Check that right methods break no rule, and each fault the one rule that its name begins with."""
    expected = {name: {name.partition(":")[0]} for name in faults}
    assert dict(zip([*faults, "none"], found, strict=True)) == expected | {"none": set()}


def leaves(state):
    return RIGHT.masses(state) if isinstance(state.tree, jr.sum_tree.SumTree) else jnp.ones(1)


def sampled(change):
    """A `sample` with other fields, a function of the right one and the state."""
    return {"sample": lambda right, state, *x: (found := right(state, *x)).replace(**change(found, state))}


def is_eager(state):
    return not isinstance(state.count, jax.core.Tracer)


def sample_in_place(right, state, *arguments):
    found = right(state, *arguments)
    if is_eager(state):
        is_on = int(state.count) == 4 and int(state.fault) == [*BUFFER_FAULTS].index("PURE: changed in place")
        object.__setattr__(state, "storage", {"x": state.storage["x"].at[5].add(is_on)})  # then overwritten
    return found


def newest(slots, state):
    """Handles of what is in the slots now."""
    return state.count - 1 - (state.count - 1 - slots) % 6


def newest_for_none(drawn, state):
    indices = jnp.where(drawn.probabilities > 0, drawn.indices, state.count - 1)
    return {"indices": indices, "items": Own().get(state, indices)}


SCANNED = []  # something when the program with the scan has been traced
BUFFER_FAULTS = {  # the rule that each breaks, and no other
    "ABSTRACT: values stored": {},
    "MODES: another state under vmap": {
        "add": lambda right, *x: (new := right(*x)).replace(priorities=unless_mapped(new.priorities))
    },
    "MODES: another draw in a scan": sampled(lambda x, s: {"items": {"x": x.items["x"] + (not SCANNED)}}),
    "MODES: another draw if eager": {
        "sample": lambda right, s, key, n: right(s, jax.random.fold_in(key, is_eager(s)), n)
    },
    "MODES: another state if eager": {
        "update": lambda right, s, *x: (new := right(s, *x)).replace(
            priorities=new.priorities * (1.0 + (is_eager(s) and int(s.count) == 16))
        )
    },
    "PURE: changed in place": {"sample": sample_in_place},
    "EMPTY: empty, named": sampled(lambda x, s: {"indices": jnp.where(s.count == 0, 0, x.indices)}),
    "EMPTY: empty, likely": sampled(lambda x, s: {"probabilities": jnp.where(s.count == 0, 0.1, x.probabilities)}),
    "EMPTY: empty, weighed": sampled(lambda x, s: {"weights": jnp.where(s.count == 0, 1.0, x.weights)}),
    "RANGES: negative weights": sampled(lambda x, s: {"weights": -x.weights}),
    "RANGES: name without an item": sampled(newest_for_none),
    "LAW: key ignored": {"sample": lambda right, s, key, n: right(s, jax.random.key(1), n)},
    "HANDLES: items of others": sampled(lambda x, s: {"items": {"x": x.items["x"] + (x.items["x"] != 0)}}),
    "HANDLES: slots for handles": sampled(lambda x, s: {"indices": jnp.where(x.indices >= 0, x.indices % 6, -1)})
    | {"get": lambda right, s, slots: right(s, jnp.where(slots >= 0, newest(slots, s), -1))},
    "LATE: late TD errors of new items": {
        "update": lambda right, s, old, x: right(s, jnp.where(old >= 0, newest(old, s), -1), x)
    },
}


class FaultyBuffer(type("Switched", (Own,), switched(Own, BUFFER_FAULTS))):
    def init(self, items):
        values = [x for x in jax.tree.leaves(items) if isinstance(x, jax.Array)]
        is_stored = self.fault == [*BUFFER_FAULTS].index("ABSTRACT: values stored")
        return super().init(items).replace(count=jnp.int32(is_stored * len(values)))


def test_a_fault_of_a_buffer_breaks_one_rule(monkeypatch):
    runs, found, key = runs_of(FaultyBuffer()), [], seeds.key(0)
    runs.scan_and_vmap(runs.init(), jax.random.split(key, (2, _buffers.STEPS)))
    SCANNED.append(True)
    for number in (*range(len(BUFFER_FAULTS)), -1):
        runs.buffer = FaultyBuffer(fault=number)
        found.append(broken_rules(monkeypatch, runs.check, key))
    check_faults(BUFFER_FAULTS, found)
    monkeypatch.undo()
    state, _ = runs.jit_step(runs.init(), key)
    for change in WRONG_TYPES:
        buffer = own(sample=lambda sample, *args, change=change: (found := sample(*args)).replace(**change(found)))
        breaks(testing.TYPES, runs_of(buffer).check_draws, state, key)


def runs_of(buffer):
    return _buffers._Runs(buffer, ITEMS, 8, buffer.add)


def of_rule(value):
    return value[:12] if isinstance(value, str) else ""


@pytest.mark.parametrize(("rule", "buffer"), BROKEN_BUFFERS, ids=of_rule)
def test_a_buffer_that_breaks_a_rule_is_told_which(rule, buffer):
    breaks(rule, testing.check_buffer, buffer, ITEMS, key=seeds.key(0))


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


@struct.dataclass
class FaultyState(jr.samplers.PrioritizedState):
    fault: jax.Array  # int32 [], the number of the fault that is on


def has_tiny(state):
    """True after a TD error of 0."""
    return jnp.any((leaves(state) > 0) & (leaves(state) < 1e-3))


def updated(**fields):
    """An `update` after which fields are functions of the right state, and of the arguments."""

    def update(right, state, *rows, **named):
        new = right(state, *rows, **named)
        return new.replace(**{name: change(new, *rows) for name, change in fields.items()})

    return {"update": update}


def rows_of(change):
    """An `update` of other rows: slots, TD errors, mask and spent."""

    def update(right, state, *rows, spent=None, axis_name=None):
        *rows, spent = change(*rows, jnp.zeros(len(rows[0]), bool) if spent is None else spent)
        return right(state, *rows, spent=spent, axis_name=axis_name)

    return {"update": update}


def largest(found):
    """An `update` after which the largest priority is the TD error that was found, if one was."""

    def change(new, slots, td_errors, mask):
        return jnp.max(jnp.abs(td_errors), where=mask & found(td_errors), initial=new.max_priority)

    return updated(max_priority=change)


def drawn(change):
    """A `sample` whose slots and probabilities are a function of the right ones, the state and `live`."""
    return {"sample": lambda right, s, key, n, live: change(*right(s, key, n, live), s, live)}


def first(value, where):
    """A `sample` whose first row has another probability, in some states."""
    return drawn(lambda slots, p, s, live: (slots, p.at[0].set(jnp.where(where(s, live), value, p[0]))))


def nothing(where):
    return drawn(lambda slots, p, s, live: (slots, jnp.where(where(s), 0.0, p)))


def alike(where):
    """A `sample` of which a quarter is alike, in some states; slots and their probabilities are right."""

    def change(slots, p, s, live):
        same = (np.arange(len(slots)) < len(slots) // 4) & where(s, live)
        return jnp.where(same, slots[0], slots), jnp.where(same, p[0], p)

    return drawn(change)


def dead(where):
    """The empty slot is drawn in the ninth row, as one of a tiny priority."""

    def change(slots, p, s, live):
        is_dead = where(live) & (np.arange(len(slots)) == 8)
        tiny = 1e-7 / jnp.sum(leaves(s)) if where(live) is not False else 0.0
        return jnp.where(is_dead, live.capacity - 1, slots), jnp.where(is_dead, tiny, p)

    return drawn(change) | {"priorities_at": lambda right, s, p: jnp.where(p < 1e-6, 0.0, right(s, p))}


def weighed(of, change):
    """`weights` of this beta are a function of the right method, its arguments and the probabilities."""

    def weights(right, state, p, live, *, beta=None):
        return change(functools.partial(right, state, p), p, live) if beta == of else right(state, p, live, beta=beta)

    return {"weights": weights}


def old_leaf(right, state, slots, drawable, *, axis_name=None, **named):
    new, held = right(state, slots, drawable, axis_name=axis_name, **named), leaves(state)
    return new.replace(
        tree=jr.sum_tree.update(
            new.tree, np.arange(held.size, dtype=np.int32), held, mask=(held > 0) & (axis_name is None)
        )
    )


def give_up(right, state, slots, *args, **named):
    """Count on where an item is inserted after many TD errors were rejected."""
    many = (state.rejected > 4) & jnp.any(slots < state.tree.capacity)
    return right(state, slots, *args, **named).replace(rejected=jnp.where(many, 1000, state.rejected))


def spend_for_ever(right, state, slots, drawable, **named):
    alive = leaves(state)[slots] > 0
    return right(state, slots, drawable & (alive | (jnp.sum(leaves(state)) == 0)), **named)


def nudge(right, state, slots, td_errors, mask, **named):
    """A large TD error makes slot 2 likelier."""
    new = right(state, slots, td_errors, mask, **named)
    leaf = (1 + 0.01 * jnp.any(mask & (td_errors == 50))) * leaves(new)[2]
    return new.replace(tree=jr.sum_tree.update(new.tree, np.array([2], np.int32), leaf[None].astype(jnp.float32)))


def promise(right, state, slots, *args, axis_name=None, **named):
    """A promise of distinct indices, which is false."""
    slots_told = jnp.where(
        state.fault == [*FAULTS].index("LAST: distinct slots promised"), slots, np.arange(len(slots))
    )
    told = jnp.zeros(state.tree.capacity).at[slots_told].set(1.0, mode="drop", unique_indices=True)
    return right(state, slots, *args, axis_name=axis_name, **named).replace(epsilon=state.epsilon + 0 * told[0])


def newer(live):
    few = (live.size == 2) & (live.start == live.capacity - 3)
    return live.replace(start=live.start + few, size=live.size - few)


def other_alpha(right, state, slots, drawable, *, axis_name=None, **named):
    """In the second shard an insertion of one item changes alpha afterwards."""
    new = right(state, slots, drawable, axis_name=axis_name, **named)
    one = 0 if axis_name is None else jax.lax.axis_index(axis_name) * (jnp.sum(slots < state.tree.capacity) == 1)
    return new.replace(alpha=new.alpha * (1 + 0.01 * one))


def evenly(slots, p, state, live):
    if live.unspent is not None or leaves(state).size > 1:
        return slots, p
    size = jnp.maximum(live.size, 1)
    return live.slots(np.arange(len(slots)) % size), jnp.full(len(slots), 1 / size)


def rarer_in_one_shard(slots, p, state, live):
    is_second = live.axis_name is not None and jax.lax.axis_index(live.axis_name) == 1
    return slots, jnp.where((slots == 0) & is_second, 0.99 * p, p)


RIGHT, UNIFORM = jr.Prioritized(alpha=0.7, stratified=False), jr.Uniform()
FAULTS = {  # the rule that each breaks, and no other
    "MODES: another result under vmap": updated(rejected=lambda new, *_: unless_mapped(new.rejected)),
    "RANGES: weight of the first row": weighed(
        None, lambda right, p, live: right(live).at[0].set(jnp.nan if len(p) == 8 else right(live)[0])
    ),
    "LIVE: empty slot drawn": dead(lambda live: (live.start == 2) & (live.axis_name is None)),
    "LIVE: restrict ignored": {
        "restrict": lambda right, s, live: right(s, live.replace(start=0 * live.start, size=live.start + live.size))
    },
    "LIVE: empty, drawn": drawn(lambda slots, p, s, live: (slots, jnp.where(live.size == 0, 1.0, p))),
    "RANGES: empty, weighed": weighed(
        0.0, lambda right, p, live: jnp.where(live.size == 0, 1.0, right(live, beta=0.0))
    ),
    "FILLED: row left empty": first(0.0, lambda s, live: True),
    "LAW: another law": alike(lambda s, live: (live.start == 0) & (s.rejected == 0) & ~has_tiny(s)),
    "LAW: another law if restricted": alike(lambda s, live: live.start > 0),
    "LAW: another law after a NaN": alike(lambda s, live: s.rejected > 0),
    "RESTRICTED: restricted evenly": drawn(evenly),
    "LAW: key ignored": {"sample": lambda right, s, key, *x: right(s, jax.random.key(1), *x)},
    "IGNORED: no name is slot 0": rows_of(lambda i, x, mask, spent: (jnp.where(i == -1, 0, i), x, mask, spent)),
    "IGNORED: stale is slot 0": rows_of(lambda i, x, mask, spent: (jnp.where(i == 13, 0, i), x, mask, spent)),
    "IGNORED: mask ignored": rows_of(lambda i, x, mask, spent: (i, x, jnp.ones_like(mask), spent)),
    "IGNORED: masked maximum": updated(
        max_priority=lambda new, slots, x, mask: jnp.max(jnp.abs(x), where=x == 99, initial=new.max_priority)
    ),
    "LAST: first TD error counts": rows_of(lambda *rows: map(jnp.flip, rows)),
    "LAST: distinct slots promised": {"update": promise},
    "RANGES: NaN after a NaN": largest(jnp.isnan) | first(jnp.nan, lambda s, live: jnp.isnan(s.max_priority)),
    "RANGES: NaN after an infinity": largest(jnp.isinf) | first(jnp.nan, lambda s, live: jnp.isinf(s.max_priority)),
    "RANGES: NaN after a zero": first(jnp.nan, lambda s, live: has_tiny(s)),
    "SOME: nothing after NaN": largest(jnp.isnan) | nothing(lambda s: jnp.isnan(s.max_priority) & (s.rejected > 4)),
    "SOME: nothing after infinities": largest(jnp.isinf) | nothing(lambda s: jnp.isinf(s.max_priority)),
    "SOME: nothing after zeros": nothing(lambda s: jnp.max(leaves(s)) < 1e-3),
    "SOME: nothing new after NaN": {"insert": give_up} | nothing(lambda s: s.rejected > 999),
    "EVERY: older of the last two never drawn": {"restrict": lambda right, s, live: right(s, newer(live))},
    "EVERY: spent for ever": {"insert": spend_for_ever},
    "AGREE: priorities inverted": {
        "priorities": lambda right, *x: 1 / (right(*x) + 1),
        "priorities_at": lambda right, *x: 1 / (right(*x) + 1),
    },
    "AGREE: masses of others": {"masses": lambda right, s: right(s) * (1 + 0.01 * np.arange(s.tree.capacity))},
    "AGREE: priorities_at of others": {"priorities_at": lambda right, *x: 1.01 * right(*x)},
    "WEIGHTS: a smaller beta": weighed(1.0, lambda right, p, live: right(live, beta=1.0 if live.axis_name else 0.99)),
    "WEIGHTS: of one shard": weighed(1.0, lambda right, p, live: right(live, beta=0.99 if live.axis_name else 1.0)),
    "WEIGHTS: probabilities of a shard": weighed(None, lambda right, p, live: right(live) * (1 + (not live.axis_name))),
    "WEIGHTS: weights with beta 0": weighed(0.0, lambda right, p, live: jnp.where(p > 0, p**0.01, 0.0)),
    "WEIGHTS: weights that rise": weighed(None, lambda right, p, live: jnp.where(p > 0, p**0.01, 0.0)),
    "OTHERS: neighbour changed": {"update": nudge},
    "FORGOTTEN: old TD errors remembered": {"insert": old_leaf},
    "SPENT: spent ignored with NaN": rows_of(lambda i, x, mask, spent: (i, x, mask, spent & ~jnp.isnan(x))),
    "SPENT: spent ignored with others": rows_of(lambda i, x, mask, spent: (i, x, mask, spent & jnp.isnan(x))),
    "SPENT: empty slot drawn after spent ones": dead(lambda live: live.unspent is not None),
    "CLEARED: counter forgotten": {"cleared": lambda right, s, n: right(s, n).replace(updates=0 * s.updates)},
    "CLEARED: nothing cleared": {"cleared": lambda right, s, n: s},
    "SHARDS: axis_name ignored": {"update": lambda right, *x, axis_name=None, **y: right(*x, **y)},
    "SHARDS: another priority in one shard": {"insert": other_alpha},
    "SHARDS: rarer in one shard": drawn(rarer_in_one_shard),
}


@config
class Faulty(type("Switched", (jr.Prioritized,), switched(jr.Prioritized, FAULTS))):
    fault: int = dataclasses.field(default=-1, compare=False)
    fills_rows = True

    def init(self, capacity):
        return FaultyState(**vars(super().init(capacity)), fault=jnp.int32(self.fault))


def as_bfloat16(insert, *arguments, **named):
    state = insert(*arguments, **named)
    return state.replace(alpha=state.alpha.astype(jnp.bfloat16))


@pytest.mark.parametrize(
    ("rule", "sampler"),
    [
        (testing.CONFIG, type("Open", (jr.Uniform,), {"__setattr__": lambda self, name, value: None})()),
        (testing.STABLE, config(altered(jr.Prioritized, insert=as_bfloat16))()),
        (testing.TYPES, config(altered(jr.Uniform, weights=lambda weights, s, p, *_, **named: (p > 0) + 0))()),
    ],
    ids=of_rule,
)
def test_a_sampler_that_breaks_a_rule_is_told_which(rule, sampler):
    breaks(rule, testing.check_sampler, sampler, key=seeds.key(0))


def test_a_fault_of_a_sampler_breaks_one_rule(monkeypatch):
    runs, found = _samplers._SamplerRuns(Faulty(alpha=0.7, stratified=False), 13, 8, ()), []
    for number in (*range(len(FAULTS)), -1):
        runs.sampler = dataclasses.replace(runs.sampler, fault=number)
        found.append(broken_rules(monkeypatch, runs.check, seeds.key(0)))
    check_faults(FAULTS, found)


def test_every_rule_has_a_fault():
    rules = {name for name, text in vars(testing).items() if name.isupper()}
    told = {name for name, text in vars(testing).items() if text in [rule for rule, _ in BROKEN_BUFFERS]}
    assert rules == told | {"TYPES"} | {name.partition(":")[0] for name in (*FAULTS, *BUFFER_FAULTS)}


def newest_alone(sample, state, key, batch_size, live):
    size = jnp.minimum(live.size, 1)
    return sample(state, key, batch_size, live.replace(start=live.start + live.size - size, size=size))


def test_an_exempt_rule_may_be_broken_and_no_other():
    wrong = altered(jr.Recent, sample=newest_alone)
    wrong.by_age = False
    sampler = config(wrong)(half_life=4.0)
    testing.check_sampler(sampler, exempt=[testing.EVERY], key=seeds.key(0))
    breaks(testing.EVERY, testing.check_sampler, sampler, exempt=[testing.RESTRICTED], key=seeds.key(0))


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
        sampler = type("Wrong", (base,), {name: method})()
        rejects("unexpected keyword argument '(spent|beta)'", testing.check_sampler, sampler, error=TypeError)


def test_a_sampler_is_asked_for_as_many_rows_as_are_given():
    def raise_size(sample, state, key, batch_size, live):
        if batch_size != _samplers.DRAWS:
            raise RuntimeError(f"{batch_size} rows")
        return sample(state, key, batch_size, live)

    sampler = config(altered(jr.Uniform, sample=raise_size))()
    rejects("^2 rows", testing.check_sampler, sampler, batch_size=2, error=RuntimeError)


@pytest.mark.slow
def test_a_sampler_is_checked_anew_after_its_class_was_mended_in_place():
    sampler = config(altered(jr.Uniform, sample=newest_alone))()
    breaks(testing.LAW, testing.check_sampler, sampler)
    type(sampler).sample = jr.Uniform.sample
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


WITHIN, BEHIND = (
    "^within an episode s_next is s of the next row: ",
    "^the row after an end is the first of an episode, ",
)


@pytest.mark.parametrize("autoreset", ["same-step", "next-step"])
def test_a_stream_is_right_and_every_fault_of_it_is_named(autoreset):
    s, s_next, terminated, truncated, resets = stream(autoreset)
    ends, none = terminated | truncated, terminated & False
    assert terminated.sum() > 20 < truncated.sum()

    def check(s=s, s_next=s_next, terminated=terminated, truncated=truncated, mask=~resets):
        return testing.check_stream(s, s_next, terminated, truncated, mask=mask)

    def wrong(message, **changed):
        rejects(message, check, error=AssertionError, **changed)

    assert check() == check(s_next=np.where(resets, -1.0, s_next)) == autoreset
    trees = [{"a": x[..., None], "b": jnp.array(x)} for x in (s, s_next)]
    assert check(*trees, truncated=truncated * 1) == autoreset
    wrong(rf"{WITHIN}.*\[\[[0-9]+, [01]\]\], \[time, env\]", truncated=none)
    limit = r"the [0-9]+ terminated episodes have \[5\] steps"
    rule = f"^a time limit truncates, and a terminal state terminates: {limit}"
    wrong(rule, terminated=truncated, truncated=terminated)
    if autoreset == "next-step":
        message = f"{BEHIND}or a reset that mask leaves out: .* give mask=~resets"
        wrong(message, mask=None)
        wrong(message, mask=~resets | (np.arange(200) < 100)[:, None])
    else:
        late = {"terminated": np.roll(terminated, 1, axis=0), "truncated": np.roll(truncated, 1, axis=0)}
        wrong(f"{WITHIN}not so in [0-9]+ rows", **late)
        wrong(f"{BEHIND}.* must be the final observation", s_next=np.where(ends, np.roll(s, -1, axis=0), s_next))
    rejects("no episode ends before the last row", check, terminated=none, truncated=none)


def test_what_a_stream_cannot_tell_is_not_an_error():
    s, s_next, terminated, truncated, _ = stream("same-step")
    ends = terminated | truncated
    assert testing.check_stream(s, s_next, ends, ends & False) == "same-step"  # a time limit reported as a termination
    fixed = np.broadcast_to(np.arange(20)[:, None] % 4, (20, 2))
    assert testing.check_stream(fixed, fixed + 1, fixed == 3, fixed < 0) == "same-step"
    # One terminated episode of the largest length is chance, and so are terminated ones of several lengths.
    for lengths, least, is_told in (
        ((1, 2, 3, 4), 4, False),
        ((1, 2, 3, 4, 4), 4, True),
        ((1, 2, 2, 4, 4), 4, False),
        ((1, 1, 2, 3, 4, 4), 3, False),
    ):
        age = np.concatenate([np.arange(1, n + 1) for n in lengths])[:, None]
        ends = np.append(age[1:] == 1, [[True]], axis=0)
        flags = ends & (age >= least), ends & (age < least)
        if is_told:
            rejects("the flags swapped", testing.check_stream, age, age + 1, *flags, error=AssertionError)
        else:
            testing.check_stream(age, age + 1, *flags)
