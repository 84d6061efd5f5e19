"""testing: checks of the rules that every buffer and sampler must follow, for tests of custom ones.

`check_buffer` and `check_sampler` compile and run a few small programs. A broken rule raises an `AssertionError` that
begins with the rule. Import this module explicitly, `from jaxreplay import testing`: it needs chex.
"""

import contextlib
import copy
import dataclasses
import functools
import inspect
from collections.abc import Callable, Collection, Iterator
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np

from jaxreplay import sum_tree
from jaxreplay._common import checks, ring
from jaxreplay.buffers._shards import whole_of
from jaxreplay.samplers._base import Sampler
from jaxreplay.samplers._base import check_sampler as check_base
from jaxreplay.transitions import TransitionBatch
from jaxreplay.transitions._batch import without_valid
from jaxreplay.wrappers import Mixture

Add = Callable[[Any, Any, jax.Array], Any]  # (state, items, key) -> state

STEPS, DRAWS = 4, 4096
CONFIG = "a configuration is frozen, hashable, and equal to its copies"
ABSTRACT = "init accepts arrays and jax.ShapeDtypeStruct, and ignores values"
STABLE = "add, update and insert preserve the structure, shapes and dtypes of the state"
TRACED = "new values do not retrace a program"
MODES = "eager calls, jit, jax.lax.scan and jax.vmap give the same results"
PURE = "a state is not modified in place"
DONATED = "add donates its state if donate=True, and only then"
TYPES = "a batch has int32 handles, float32 probabilities and weights, and items in their own dtypes"
RANGES = "probabilities are in [0, 1]; weights are finite and at least 0; rows without an item have 0, and handle -1"
EMPTY = "an empty buffer draws no item: handles -1, probabilities and weights 0"
HANDLES = "a handle names one insertion: get gives its item, or zeros once it is no longer stored"
LATE = "an update of an item that is no longer stored is ignored"
LAW = "draws follow their probabilities"
LIVE = "only live slots are drawn"
FILLED = "every row of a draw holds an item, if the sampler has fills_rows"
IGNORED = "slots out of range and masked rows change nothing"
LAST = "the last TD error of a repeated slot counts"
FINITE = "the probabilities stay valid after a non-finite TD error"
KEYWORDS = "every method takes the arguments of the base class"
SOME = "something is drawn while a slot is live, whatever the TD errors were"
EVERY = "every live slot is drawn"
KEYS = "different keys give different draws, and the same key the same"
WEIGHTS = "weights equalize the draws with beta=1, are equal with beta=0, and never rise with the probability"
AGREE = "priorities and masses agree with the draws"
RESTRICTED = "restrict keeps the ratios of the probabilities"
OTHERS = "an update of a slot keeps the ratios of the other probabilities"
SIGN = "the sign of a TD error does not count"
NAMES = "slots are names: a permutation of the slots permutes the probabilities"
SPENT = "a spent slot is not drawn until it is overwritten"
FORGOTTEN = "the TD errors of an overwritten item are forgotten"
SHARDS = "a new item is as likely in all shards, relative to an item of equal TD error"


def check_buffer(
    buffer: Any, items: Any, *, key: jax.Array | None = None, batch_size: int = 8, add: Add | None = None
) -> None:
    """Check that a buffer follows the rules of the buffers of this package.

    A custom buffer needs no base class. It has `init(items)`, `add(state, items)`, `sample(state, key, batch_size)`,
    `update(state, indices, td_errors)` and `get(state, indices)`. Donation is checked
    if it has a field `donate`. All sources of a `Mixture` are given the same items.

    Args:
      buffer: the configuration; at most a few hundred items, so that the check overwrites them.
      items: argument of `init`, arrays or `jax.ShapeDtypeStruct` of numbers. The check uses random values.
      key: a PRNG key for all random values; None means key 0.
      batch_size: rows of each drawn batch.
      add: add(state, items, key) in place of the buffer's `add`, if that needs more arguments.

    Raises:
      AssertionError: a rule is broken; the message begins with the rule.

    Examples:
      >>> from jaxreplay import testing
      >>> testing.check_buffer(jr.ReplayBuffer(capacity=12), {"x": jnp.zeros((5, 3))})
      >>> testing.check_buffer([], {"x": jnp.zeros((5, 3))})
      Traceback (most recent call last):
      AssertionError: a configuration is frozen, hashable, and equal to its copies: unhashable type: 'list'
    """
    spec, key = without_valid(checks.as_spec(items))[0], jax.random.key(0) if key is None else key
    _check_config(buffer)
    runs = _Runs(buffer, spec, batch_size, add or _adder(buffer))
    with _rule(ABSTRACT):
        chex.assert_trees_all_equal(*jax.device_get((runs.init(), buffer.init(_values(key, spec)))))
    with _rule(STABLE):
        state = jax.eval_shape(runs.init)
        after, _ = jax.eval_shape(runs.step, state, key)
        assert jax.tree.structure(after) == jax.tree.structure(state), "the structure differs"
        chex.assert_trees_all_equal_shapes_and_dtypes(after, state)
    runs.check_donation(key)
    runs.check_draws(runs.check_modes(key), key)


def check_sampler(
    sampler: Any,
    *,
    key: jax.Array | None = None,
    capacity: int = 13,
    batch_size: int = 8,
    exempt: Collection[str] = (),
) -> None:
    """Check that a sampler follows the rules of `jaxreplay.samplers.Sampler`.

    A sampler with `by_age` need not follow `NAMES` and `SPENT`. Weights that are all 1 follow `WEIGHTS`.

    Args:
      sampler: the configuration.
      key: a PRNG key for all random values; None means key 0.
      capacity: number of slots, at least 4.
      batch_size: rows of each drawn batch, at most `capacity` - 2.
      exempt: rules that this sampler may break, of the constants of this module. A sampler by rank needs `OTHERS`, one
        that draws only some of the slots `EVERY`.

    Raises:
      AssertionError: a rule is broken; the message begins with the rule.
      ValueError: `sampler` is not a `jaxreplay.samplers.Sampler`, or `exempt` has something that is no rule.

    Examples:
      >>> from jaxreplay import testing
      >>> testing.check_sampler(jr.Prioritized(alpha=0.7), exempt=[testing.OTHERS])
      >>> testing.check_sampler(None)
      Traceback (most recent call last):
      ValueError: sampler=None: must be a sampler, such as jr.Uniform() or jr.Prioritized().
    """
    _check_config(check_base("sampler", sampler))
    if isinstance(exempt, str) or not {*exempt} <= {x for x in globals().values() if isinstance(x, str)}:
        raise ValueError(f"exempt={exempt!r}: must be rules, such as [testing.OTHERS].")
    key, rules = jax.random.key(0) if key is None else key, {*exempt, *((NAMES, SPENT) if sampler.by_age else ())}
    runs = _SamplerRuns(sampler, capacity, min(batch_size, capacity - 2), key, rules)
    _check_keywords(runs)
    state = runs.check_modes()
    runs.check_draws(state)
    runs.check_updates(state)
    for check in (_check_keys, _check_words, _check_independence, _check_past, _check_shards):
        check(runs, state)


class _Draws(NamedTuple):
    """Many draws: weights with beta None, 0 and 1; `priorities` and `masses` of all slots, `priorities_at` of draws."""

    slots: Any
    probabilities: Any
    weights: Any
    priorities: Any
    masses: Any
    priorities_at: Any

    def law(self) -> np.ndarray:
        """Probabilities of all slots, 0 if not drawn, float64 [capacity]."""
        law = np.zeros(len(self.priorities))
        law[self.slots[self.probabilities > 0]] = self.probabilities[self.probabilities > 0]
        return law


@dataclasses.dataclass(frozen=True)
class _SamplerRuns:
    """Programs that drive a sampler, compiled once for all keys; all slots but the last are drawable."""

    sampler: Any
    capacity: int
    most: int
    key: Any = dataclasses.field(compare=False)
    exempt: Any = dataclasses.field(compare=False)

    @property
    def slots(self) -> np.ndarray:
        return np.arange(self.capacity, dtype=np.int32)

    def rule(self, text: str) -> Any:
        return _rule(text, self.exempt)

    def range(self, start: Any, size: Any, axis_name: str | None = None) -> Any:
        start, size, older = (jnp.asarray(x, np.int32) for x in (start, size, start * self.sampler.by_age))
        return ring.Live(start, size, older, capacity=self.capacity, axis_name=axis_name)

    def run(self, key: jax.Array) -> Any:
        """A state after two updates."""

        def learn(state: Any, td_errors: jax.Array) -> tuple[Any, None]:
            return self.sampler.update(state, slots[1 : self.most + 1], td_errors, jnp.ones(self.most, bool)), None

        slots = jnp.asarray(self.slots)
        state = self.sampler.insert(self.sampler.init(self.capacity), slots, slots < self.capacity - 1)
        return jax.lax.scan(learn, state, jax.random.normal(key, (2, self.most)))[0]

    @functools.partial(jax.jit, static_argnums=(0, 4, 5))
    def draw(self, state: Any, key: Any, live: ring.Live, count: int, betas: Any = (None,)) -> Any:
        drawn, probabilities = self.sampler.sample(state, key, count, live)
        return drawn, probabilities, *[self.sampler.weights(state, probabilities, live, beta=x) for x in betas]

    @functools.partial(jax.jit, static_argnums=(0, 7))
    def outcome(self, state: Any, key: Any, live: Any, new: Any, rows: Any, then: Any, restricts: bool) -> Any:
        """The state after insertions `new`, an update and insertions `then`; draws from it."""
        axis = {"axis_name": live.axis_name}
        state = self.sampler.insert(state, new, new < self.capacity - 1, **axis)
        state = self.sampler.update(state, *rows[:3], spent=rows[3], **axis)
        state = self.sampler.insert(state, then, then < self.capacity - 1, **axis)
        read = self.sampler.restrict(state, live) if restricts else state
        drawn, probabilities, *weights = self.draw(read, key, live, DRAWS, (None, 0.0, 1.0))
        words = self.sampler.priorities(state, jnp.asarray(self.slots)), self.sampler.masses(state)
        return state, _Draws(drawn, probabilities, weights, *words, self.sampler.priorities_at(state, probabilities))

    @functools.partial(jax.jit, static_argnums=0)
    def outcome_of_shards(self, *arguments: Any) -> Any:
        return jax.vmap(lambda *x: self.outcome(*x, False), axis_name="shards")(*arguments)

    def after(
        self, state: Any, slots: Any = (), td_errors: Any = 0, counts: Any = True, spent: Any = False, **more: Any
    ) -> Any:
        """`outcome` of rows for `slots`, filled up with masked ones."""
        given, errors = self.slots < len(slots), np.zeros(self.capacity, np.float32)
        errors[given] = td_errors

        def padded(slots: Any, fill: int) -> np.ndarray:
            return np.array([*slots, *[fill] * (self.capacity - len(slots))], np.int32)

        key, live = more.get("key", self.key), more.get("live", self.range(0, self.capacity - 1))
        new, then = (padded(more.get(name, ()), self.capacity) for name in ("new", "then"))
        rows = padded(slots, -1), errors, given & counts, given & spent
        return jax.device_get(self.outcome(state, key, live, new, rows, then, more.get("restricts", False)))

    def draws(self, *arguments: Any, **more: Any) -> _Draws:
        return self.after(*arguments, **more)[1]

    def check_modes(self) -> Any:
        """Check that all modes agree; return a state after two updates."""
        keys, run, state = jax.random.split(self.key, 2), jax.jit(self.run), jax.eval_shape(self.run, self.key)
        with self.rule(STABLE):
            chex.assert_trees_all_equal_shapes_and_dtypes(state, self.sampler.init(self.capacity))
        with self.rule(MODES):
            mapped = jax.device_get(jax.jit(jax.vmap(self.run))(keys))
            for i in range(2):
                _same(_row(mapped, i), run(keys[i]))
        return run(self.key)

    def check_draws(self, state: Any) -> None:
        live, last = self.range(0, self.capacity - 1), self.capacity - 1
        _check_rows(*self.draw(state, self.key, live, self.most), batch_size=self.most)
        all_of, young = (self.draws(state, live=self.range(x, last - x), restricts=x > 0) for x in (0, 2))
        with self.rule(LIVE):
            for start, draws in ((0, all_of), (2, young)):
                drawn = draws.slots[draws.probabilities > 0]
                assert np.all((drawn >= start) & (drawn < last)), f"slots {np.unique(drawn)} of {start} to {last - 1}"
            nothing = self.draws(self.sampler.init(self.capacity), live=self.range(0, 0))
            np.testing.assert_array_equal([nothing.probabilities, *nothing.weights], 0)
        with self.rule(FILLED):
            assert np.all(all_of.probabilities > 0) or not self.sampler.fills_rows
        _check_law(*all_of[:2])
        _check_law(*young[:2])
        with self.rule(RESTRICTED):
            _same_ratios(all_of.law()[2:], young.law()[2:])

    def check_updates(self, state: Any) -> None:
        live = self.range(0, self.capacity - 1)
        with self.rule(IGNORED):
            for slots in ((), (-1, self.capacity), (1, 2)):
                after = self.after(state, slots, 3.0, False)[0]
                _same(*(self.draw(x, self.key, live, self.most)[:2] for x in (after, state)))
        with self.rule(LAST):
            _same(*(self.draws(state, (1, 1), (x, 2.0))[:2] for x in (9.0, 0.5)))
        for value in (np.nan, np.inf, 0.0):
            some = self.draws(state, (1, 2), value)[:2]
            with self.rule(FINITE):
                assert np.all(np.isfinite(some[1])), "probabilities are not finite"
            _check_law(*some)
            with self.rule(SOME):
                for then in ((), self.slots):
                    drawn = self.draws(state, self.slots[:-1], value, then=then).probabilities > 0
                    assert np.any(drawn), f"nothing is drawn after TD errors of {value}"


def _check_keywords(runs: _SamplerRuns) -> None:
    """Bind the arguments of each method of the base class."""
    for name in ("insert", "restrict", "sample", "weights", "update", "priorities"):
        takes = inspect.signature(getattr(Sampler, name)).parameters.values()
        named = {x.name: None for x in takes if x.kind is x.KEYWORD_ONLY}
        with runs.rule(KEYWORDS):
            inspect.signature(getattr(runs.sampler, name)).bind(*[None] * (len(takes) - len(named) - 1), **named)


def _check_keys(runs: _SamplerRuns, state: Any) -> None:
    """Draw with many keys, because few offsets of systematic draws differ in their slots."""
    with runs.rule(KEYS):
        first, again, *others = (runs.draws(state, key=x).slots for x in (runs.key, *jax.random.split(runs.key, 32)))
        np.testing.assert_array_equal(first, runs.draws(state).slots)
        assert not all(np.array_equal(first, x) for x in (again, *others)), "all keys give the same slots"


def _check_words(runs: _SamplerRuns, state: Any) -> None:
    """Compare weights, priorities and masses with the probabilities."""
    draws = runs.draws(state)
    law, drawn = draws.law(), draws.probabilities > 0
    with runs.rule(WEIGHTS):
        _check_full_weights(draws)
        own, even, _ = (x[drawn] for x in draws.weights)
        np.testing.assert_allclose(even, even[0], rtol=1e-3)
        assert np.all(np.diff(own[np.argsort(draws.probabilities[drawn])]) <= 1e-3 * own.max()), "they rise"
    with runs.rule(AGREE):
        higher = (draws.priorities[:, None] > 1.001 * draws.priorities) & (law[:, None] > 0)
        assert not np.any(law[:, None] < 0.999 * law, where=higher), "a higher priority is drawn less often"
        _same_ratios(law, law if draws.masses is None else draws.masses)
        if draws.priorities_at is not None:
            np.testing.assert_allclose(draws.priorities_at[drawn], draws.priorities[draws.slots[drawn]], rtol=1e-3)


def _check_independence(runs: _SamplerRuns, state: Any) -> None:
    """Update one slot, all slots with either sign, and slots of other names."""
    others, slots = np.delete(runs.slots, 1), runs.slots[:-1]
    with runs.rule(OTHERS):
        _same_ratios(*(runs.draws(state, (1,), x).law()[others] for x in (0.01, 50.0)))
    td_errors = np.asarray(jax.random.normal(runs.key, slots.shape))
    with runs.rule(SIGN):
        _same(*(runs.draws(state, slots, x)[:2] for x in (td_errors, -td_errors)))
    with runs.rule(NAMES):
        names = slots, np.asarray(jax.random.permutation(runs.key, slots))
        _same_ratios(*(runs.draws(state, x, td_errors, new=x).law()[x] for x in names))


def _check_past(runs: _SamplerRuns, state: Any) -> None:
    """Spend and overwrite slots, and draw each of them."""
    with runs.rule(FORGOTTEN):
        _same_ratios(*(runs.draws(state, (2, 1)[:n], (7.0, 3.0)[:n], then=(1,)).law() for n in (2, 1)))
    unspent = sum_tree.of_leaves(jnp.float32((runs.slots > 2) & (runs.slots < runs.capacity - 1)))
    live = dataclasses.replace(runs.range(0, runs.capacity - 4), unspent=unspent)
    with runs.rule(SPENT):
        for td_errors in (np.nan, 9.0):
            state, draws = runs.after(state, (0, 1, 2), td_errors, spent=True, live=live)
            assert not np.any(draws.law()[:3]), "a spent slot was drawn"
    with runs.rule(EVERY):
        for end in range(1, runs.capacity):
            live = runs.range(max(end - 2, 0), min(end, 2))
            law = runs.draws(state, live=live, then=runs.slots, restricts=True).law()[:end][-2:]
            assert np.all(law[-1 if runs.sampler.by_age else 0 :] > 0), (
                f"probabilities {law} of the live slots before {end}"
            )


def _check_shards(runs: _SamplerRuns, state: Any) -> None:
    """Draw from two shards of different size and content, with slots 0 and 1 alike."""
    sizes, slots = np.array([runs.capacity - 1, runs.capacity // 2 + 1]), np.stack([runs.slots] * 2)
    held, zeros = slots < sizes[:, None], np.zeros(2, np.int32)
    new, then = (np.where(x, slots, runs.capacity) for x in (held, slots == 0))
    td_errors = np.float32(1 + np.where(slots == 1, 0, slots) * [[1.0], [0.1]])
    states = jax.tree.map(lambda x: jnp.stack([x, x]), runs.sampler.init(runs.capacity))
    live, rows = runs.range(zeros, sizes, "shards"), (np.where(held, slots, -1), td_errors, held, slots < 0)
    draws = jax.device_get(runs.outcome_of_shards(states, jax.random.split(runs.key), live, new, rows, then)[1])
    with runs.rule(WEIGHTS):
        _check_full_weights(draws)
    with runs.rule(SHARDS):
        _same_ratios(*(_row(draws, shard).law()[:2] for shard in range(2)))


def _check_full_weights(draws: _Draws) -> None:
    """Assert that beta=1 gives all items of all shards the same expected weight, or weight 1."""
    drawn, weights = draws.probabilities > 0, draws.weights[2]
    expected = (weights * draws.probabilities * np.mean(drawn, -1, keepdims=True))[drawn]
    if not np.all(weights[drawn] == 1):
        np.testing.assert_allclose(expected, expected[0], rtol=1e-3)


def _same_ratios(found: np.ndarray, expected: np.ndarray) -> None:
    """Assert that numbers are in proportion where both are positive."""
    both = (found > 0) & (expected > 0)
    found, expected = (x[both] / max(np.sum(x[both]), 1e-30) for x in (found, expected))
    np.testing.assert_allclose(found, expected, rtol=1e-3)


@dataclasses.dataclass
class _Runs:
    """Programs that drive a buffer."""

    buffer: Any
    spec: Any
    batch_size: int
    add: Add
    traced: int = 0

    def init(self) -> Any:
        return self.buffer.init(self.spec)

    def step(self, state: Any, key: jax.Array) -> tuple[Any, Any]:
        self.traced += 1
        state = self.add(state, _values(key, self.spec), key)
        sample = self.buffer.sample(state, key, self.batch_size)
        return self.buffer.update(state, sample.indices, _td_errors(key, self.batch_size)), sample

    def scan(self, keys: jax.Array) -> tuple[Any, Any]:
        return jax.lax.scan(self.step, self.init(), keys)

    def check_modes(self, key: jax.Array) -> Any:
        """Check that all modes agree; return a state with stored items."""
        keys = jax.random.split(key, (2, STEPS))
        step, state, new = jax.jit(self.step), self.init(), self.init()
        with _rule(MODES):
            scanned, samples = jax.device_get(jax.jit(self.scan)(keys[0]))
            mapped = jax.device_get(jax.jit(jax.vmap(self.scan))(keys))
            _same(_row(mapped, 0), (scanned, samples))
        self.traced = 0
        for t in range(STEPS):
            with _rule(MODES):
                new, sample = step(new, keys[0, t])
                _same(sample, _row(samples, t))
                state = self.add(state, _values(keys[0, t], self.spec), keys[0, t])
            if np.any(jax.device_get(sample.indices) >= 0):  # an eager draw from an empty buffer raises an error
                before = jax.device_get(state)
                with _rule(MODES):
                    _same(self.buffer.sample(state, keys[0, t], self.batch_size), sample)
                with _rule(PURE):
                    chex.assert_trees_all_equal(jax.device_get(state), before)
            with _rule(MODES):
                state = self.buffer.update(state, sample.indices, _td_errors(keys[0, t], self.batch_size))
        with _rule(MODES):
            _same(state, new)
            _same(state, scanned)
        with _rule(TRACED):
            assert self.traced == 1, f"{self.traced} traces for {STEPS} batches of one type"
        return new

    def check_draws(self, state: Any, key: jax.Array) -> None:
        """Check draws, handles and late updates."""
        step, get, draw = jax.jit(self.step), self.buffer.get, jax.jit(self.buffer.sample, static_argnums=2)
        with _rule(EMPTY):
            nothing = jax.device_get(draw(self.init(), key, DRAWS))
            np.testing.assert_array_equal(nothing.indices, -1)
            np.testing.assert_array_equal([nothing.probabilities, nothing.weights], 0)
        sample = jax.device_get(draw(state, key, self.batch_size))
        _check_rows(sample.indices, sample.probabilities, sample.weights, self.batch_size)
        is_traced = isinstance(sample.items, TransitionBatch)  # W and idx come from the draw
        with _rule(TYPES):
            for leaf, stored in zip(jax.tree.leaves(sample.items), jax.tree.leaves(self.spec), strict=not is_traced):
                assert is_traced or leaf.dtype == stored.dtype, f"{leaf.dtype} items, {stored.dtype} were added"
                chex.assert_axis_dimension(leaf, 0, self.batch_size)
        many = jax.device_get(draw(state, key, DRAWS))
        _check_rows(many.indices, many.probabilities, many.weights, DRAWS)
        with _rule(RANGES):
            named = many.indices[many.probabilities == 0]
            assert np.all(named == -1), f"handles {named} in rows without an item"
        parts = getattr(self.buffer, "_parts", lambda *_: [(0, slice(None))])  # of a Mixture: the rows of each source
        for _, rows in parts("batch_size", DRAWS):
            _check_law(many.indices[rows], many.probabilities[rows])
        old, gone = jax.device_get(get(state, sample.indices)), np.zeros(self.batch_size, bool)
        with _rule(HANDLES):
            if not is_traced:
                _same(*(_row(x, sample.indices >= 0) for x in (old, sample.items)))
            for k in jax.random.split(key, 4 * STEPS):
                state, _ = step(state, k)
                now = jax.device_get(get(state, sample.indices))
                same = _rows(np.array_equal, now, old)
                gone = _rows(lambda x, _: not np.any(x), now, old)
                assert np.all(same | gone), f"rows {np.flatnonzero(~(same | gone))} hold other items"
        with _rule(LATE):
            before = jax.device_get(draw(state, key, DRAWS).probabilities)
            late = np.where(gone, sample.indices, -1).astype(np.int32)
            state = self.buffer.update(state, late, 100 * np.ones(self.batch_size, np.float32))
            _same(draw(state, key, DRAWS).probabilities, before)

    def check_donation(self, key: jax.Array) -> None:
        if not hasattr(self.buffer, "donate"):
            return
        with _rule(DONATED):
            state = self.init()
            before = jax.device_get(jax.tree.map(jnp.copy, state))
            self.add(state, _values(key, self.spec), key)
            deleted = [x.is_deleted() for x in jax.tree.leaves(state)]
            assert any(deleted) == bool(self.buffer.donate), f"donate={self.buffer.donate}, {sum(deleted)} leaves gone"
            if not self.buffer.donate:
                chex.assert_trees_all_equal(jax.device_get(state), before)


@contextlib.contextmanager
def _rule(text: str, exempt: Collection[str] = ()) -> Iterator[None]:
    """Convert any error inside to an `AssertionError` that begins with `text`; ignore those of exempt rules."""
    try:
        yield
    except Exception as error:
        if text in exempt:
            return
        detail = str(error).removeprefix("[Chex] ")
        raise AssertionError(f"{text}: {detail}" if detail else text) from error


def _check_config(config: Any) -> None:
    with _rule(CONFIG):
        assert hash(config) == hash(copy.copy(config)), "hashes differ"
        assert config == copy.copy(config), "not equal"
        name = next((field.name for field in dataclasses.fields(config)), "anything")
        with contextlib.suppress(AttributeError, TypeError):  # includes FrozenInstanceError
            setattr(config, name, None)
            raise AssertionError(f"field {name} can be set")


def _check_rows(indices: Any, probabilities: Any, weights: Any, batch_size: int) -> None:
    with _rule(TYPES):
        chex.assert_shape((indices, probabilities, weights), (batch_size,))
        chex.assert_type([indices, probabilities, weights], [jnp.int32, jnp.float32, jnp.float32])
    with _rule(RANGES):
        indices, probabilities, weights = map(np.asarray, (indices, probabilities, weights))
        assert np.all((probabilities >= 0) & (probabilities <= 1 + 1e-5)), f"probabilities {probabilities}"
        assert np.all(np.isfinite(weights) & (weights >= 0)), f"weights {weights}"
        assert not np.any(weights[probabilities == 0]), f"weights {weights} of probabilities {probabilities}"


def _check_law(drawn: Any, probabilities: Any) -> None:
    """Pearson's chi-square test of the draws, at five standard deviations after Wilson and Hilferty (1931)."""
    with _rule(LAW):
        drawn, probabilities = (np.asarray(x)[np.asarray(probabilities) > 0] for x in (drawn, probabilities))
        names, first, counts = np.unique(drawn, return_index=True, return_counts=True)
        each = probabilities[first].astype(np.float64)
        np.testing.assert_allclose(probabilities, each[np.searchsorted(names, drawn)], rtol=1e-5)
        rest = 1 - each.sum()
        assert abs(rest) < 1e-3 or rest > 0, f"the probabilities of the draws sum to {each.sum()}"
        expected = counts.sum() * np.append(each, max(rest, 0))
        counts = np.append(counts, 0)[expected > 0]
        expected = expected[expected > 0]
        statistic, free = np.sum((counts - expected) ** 2 / np.maximum(expected, 5)), max(len(counts) - 1, 1)
        most = free * (1 - 2 / (9 * free) + 5 * np.sqrt(2 / (9 * free))) ** 3
        assert statistic <= most, f"chi-square of {statistic:.1f} with {free} degrees of freedom, at most {most:.1f}"


def _same(found: Any, expected: Any) -> None:
    """Assert that integers and bools are equal and floats close."""
    found, expected = jax.device_get((found, expected))
    chex.assert_trees_all_equal_shapes_and_dtypes(found, expected)
    chex.assert_trees_all_close(found, expected, rtol=1e-5, atol=1e-6)


def _row(tree: Any, i: int) -> Any:
    return jax.tree.map(lambda x: x[i], tree)


def _rows(test: Callable[[Any, Any], bool], found: Any, expected: Any) -> np.ndarray:
    """True for rows in which `test` holds for all leaves, bool [B]."""
    leaves = zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True)
    return np.all([[test(*row) for row in zip(x, y, strict=True)] for x, y in leaves], axis=0, keepdims=True)[0]


def _values(key: jax.Array, spec: Any) -> Any:
    """Random items like `spec`; non-zero numbers, because `get` returns zeros for items no longer stored."""
    leaves, treedef = jax.tree.flatten(spec)
    keys = jax.random.split(key, len(leaves))
    return treedef.unflatten([_leaf_values(k, x.shape, x.dtype) for k, x in zip(keys, leaves, strict=True)])


@functools.partial(jax.jit, static_argnums=(1, 2))
def _leaf_values(key: jax.Array, shape: tuple[int, ...], dtype: Any) -> jax.Array:
    if dtype == jnp.bool_:
        return jax.random.bernoulli(key, shape=shape)
    if jnp.issubdtype(dtype, jnp.integer):
        return jax.random.randint(key, shape, 1, 100, jnp.int32).astype(dtype)
    return jax.random.normal(key, shape).astype(dtype)


@functools.partial(jax.jit, static_argnums=1)
def _td_errors(key: jax.Array, count: int) -> jax.Array:
    return jax.random.normal(jax.random.fold_in(key, 1), (count,))


def _adder(buffer: Any) -> Add:
    """A function add(state, items, key), which passes the key on only if the buffer takes one."""
    if isinstance(buffer, Mixture):
        adders = [*map(_adder, buffer.buffers)]
        return lambda state, items, key: tuple(add(x, items, key) for add, x in zip(adders, state, strict=True))
    parameters = inspect.signature(whole_of(buffer).add).parameters
    if "ends" in parameters:
        return lambda state, items, key: buffer.add(
            state, items, ends=jnp.zeros(jax.tree.leaves(items)[0].shape[:2], bool)
        )
    if "key" in parameters:
        return lambda state, items, key: buffer.add(state, items, jax.random.fold_in(key, 2))
    return lambda state, items, key: buffer.add(state, items)
