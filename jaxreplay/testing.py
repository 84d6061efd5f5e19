"""testing: checks of the rules that every buffer and sampler must follow, for tests of custom ones.

`check_buffer` and `check_sampler` compile and run a few small programs. A broken rule raises an `AssertionError` that
begins with the rule. Import this module explicitly, `from jaxreplay import testing`: it needs chex.
"""

import contextlib
import copy
import dataclasses
import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np

from jaxreplay._common import checks, ring
from jaxreplay.buffers._shards import whole_of
from jaxreplay.samplers._base import check_sampler as check_base
from jaxreplay.transitions import TransitionBatch
from jaxreplay.transitions._batch import without_valid

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


def check_buffer(
    buffer: Any, items: Any, *, key: jax.Array | None = None, batch_size: int = 8, add: Add | None = None
) -> None:
    """Check that a buffer follows the rules of the buffers of this package.

    A custom buffer needs no base class. It has `init(items)`, `add(state, items)`, `sample(state, key, batch_size)`,
    `update(state, indices, td_errors)` and `get(state, indices)`. Donation is checked
    if it has a field `donate`. Check the buffers of a `Mixture` one by one, because its handles alone do not name
    items.

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


def check_sampler(sampler: Any, *, key: jax.Array | None = None, capacity: int = 13, batch_size: int = 8) -> None:
    """Check that a sampler follows the rules of the `jaxreplay.samplers.Sampler` protocol.

    Args:
      sampler: the configuration.
      key: a PRNG key for all random values; None means key 0.
      capacity: number of slots, at least 4.
      batch_size: rows of each drawn batch, at most `capacity` - 2.

    Raises:
      AssertionError: a rule is broken; the message begins with the rule.
      ValueError: `sampler` is not a `jaxreplay.samplers.Sampler`.

    Examples:
      >>> from jaxreplay import testing
      >>> testing.check_sampler(jr.Prioritized(alpha=0.7))
      >>> testing.check_sampler(None)
      Traceback (most recent call last):
      ValueError: sampler=None: must be a sampler, such as jr.Uniform() or jr.Prioritized().
    """
    key, most = jax.random.key(0) if key is None else key, min(batch_size, capacity - 2)
    _check_config(check_base("sampler", sampler))
    runs = _SamplerRuns(sampler, key, capacity, most)
    state = runs.check_modes()
    runs.check_draws(state)
    runs.check_updates(state)


class _SamplerRuns:
    """Programs that drive a sampler; all slots but the last are drawable."""

    def __init__(self, sampler: Any, key: jax.Array, capacity: int, most: int):
        self.sampler, self.key, self.capacity, self.most = sampler, key, capacity, most
        self.slots = jnp.arange(capacity, dtype=jnp.int32)
        self.live = ring.Live(jnp.int32(0), jnp.int32(capacity - 1), capacity=capacity)
        self.draw = jax.jit(self._draw, static_argnums=3)

    def init(self) -> Any:
        return self.sampler.init(self.capacity)

    def run(self, key: jax.Array) -> Any:
        """A state after two updates."""

        def learn(state: Any, key: jax.Array) -> tuple[Any, None]:
            td_errors = jax.random.normal(key, (self.most,))
            return self.sampler.update(state, self.slots[1 : self.most + 1], td_errors, jnp.ones(self.most, bool)), None

        state = self.sampler.insert(self.init(), self.slots, self.slots < self.capacity - 1)
        return jax.lax.scan(learn, state, jax.random.split(key, 2))[0]

    def _draw(self, state: Any, key: jax.Array, live: ring.Live, count: int) -> Any:
        drawn, probabilities = self.sampler.sample(state, key, count, live)
        return drawn, probabilities, self.sampler.weights(state, probabilities, live)

    def law(self, state: Any, live: ring.Live | None = None) -> Any:
        """Many draws and their probabilities."""
        return jax.device_get(self.draw(state, self.key, live or self.live, DRAWS)[:2])

    def check_modes(self) -> Any:
        """Check that all modes agree; return a state after two updates."""
        keys, run = jax.random.split(self.key, 2), jax.jit(self.run)
        with _rule(STABLE):
            chex.assert_trees_all_equal_shapes_and_dtypes(jax.eval_shape(self.run, self.key), self.init())
        with _rule(MODES):
            mapped = jax.device_get(jax.jit(jax.vmap(self.run))(keys))
            for i in range(2):
                _same(_row(mapped, i), run(keys[i]))
        return run(self.key)

    def check_draws(self, state: Any) -> None:
        _check_rows(*self.draw(state, self.key, self.live, self.most), batch_size=self.most)
        many = self.law(state)
        with _rule(LIVE):
            assert np.all(many[0][many[1] > 0] < self.capacity - 1), "a slot that is not drawable was drawn"
            _, *nothing = self.draw(self.init(), self.key, dataclasses.replace(self.live, size=jnp.int32(0)), DRAWS)
            np.testing.assert_array_equal(jax.device_get(nothing), 0)
        with _rule(FILLED):
            assert np.all(many[1] > 0) or not self.sampler.fills_rows
        _check_law(*many)
        live = ring.Live(jnp.int32(2), self.live.size - 2, capacity=self.capacity)
        drawn, probabilities = self.law(jax.jit(self.sampler.restrict)(state, live), live)
        with _rule(LIVE):
            taken = drawn[probabilities > 0]
            assert np.all((taken >= 2) & (taken < self.capacity - 1)), "a slot excluded by restrict was drawn"
        _check_law(drawn, probabilities)

    def check_updates(self, state: Any) -> None:
        unchanged, update = self.law(state), jax.jit(self.sampler.update)

        def updated(slots: tuple[int, int], td_errors: tuple[float, float], counts: bool = True) -> Any:
            rows = jnp.array(slots, jnp.int32), jnp.array(td_errors, jnp.float32), jnp.full(2, counts)
            return self.law(update(state, *rows))

        with _rule(IGNORED):
            _same(updated((-1, self.capacity), (3.0, 3.0), False), unchanged)
            _same(updated((1, 2), (3.0, 3.0), False), unchanged)
            beyond = jnp.full(self.capacity, self.capacity, jnp.int32)
            _same(self.law(jax.jit(self.sampler.insert)(state, beyond, self.slots < self.capacity - 1)), unchanged)
        with _rule(LAST):
            _same(updated((1, 1), (9.0, 2.0)), updated((1, 1), (0.5, 2.0)))
        wrong = updated((1, 2), (np.nan, np.inf))
        with _rule(FINITE):
            assert np.all(np.isfinite(wrong[1])), "probabilities are not finite"
            _check_law(*wrong)


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
        sample = jax.device_get(self.buffer.sample(state, key, self.batch_size))
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
        _check_law(many.indices, many.probabilities)
        old = jax.device_get(get(state, sample.indices)) if is_traced else sample.items
        gone = np.zeros(self.batch_size, bool)
        with _rule(HANDLES):
            _same(get(state, sample.indices), old)
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
def _rule(text: str) -> Iterator[None]:
    """Convert any error inside to an `AssertionError` that begins with `text`."""
    try:
        yield
    except Exception as error:
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
        statistic, free = np.sum((counts - expected) ** 2 / np.maximum(expected, 1)), max(len(counts) - 1, 1)
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
    parameters = inspect.signature(whole_of(buffer).add).parameters
    if "ends" in parameters:
        return lambda state, items, key: buffer.add(
            state, items, ends=jnp.zeros(jax.tree.leaves(items)[0].shape[:2], bool)
        )
    if "key" in parameters:
        return lambda state, items, key: buffer.add(state, items, jax.random.fold_in(key, 2))
    return lambda state, items, key: buffer.add(state, items)
