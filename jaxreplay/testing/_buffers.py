"""check_buffer, and the functions that check_sampler also uses."""

import contextlib
import copy
import dataclasses
import functools
import inspect
from collections.abc import Callable, Collection, Iterator
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np

from jaxreplay._common import checks
from jaxreplay.buffers._shards import whole_of
from jaxreplay.testing import _rules as rules
from jaxreplay.transitions import TransitionBatch, _batch
from jaxreplay.wrappers import Mixture

Add = Callable[[Any, Any, jax.Array], Any]  # (state, items, key) -> state

STEPS, DRAWS = 4, 4096


def check_buffer(buffer: Any, items: Any, *, key: Any = None, batch_size: int = 8, add: Add | None = None) -> None:
    """Check that a buffer follows the rules of the buffers of this package.

    A custom buffer needs no base class. It has `init(items)`, `add(state, items)`, `sample(state, key, batch_size)`,
    `update(state, indices, td_errors)` and `get(state, indices)`. Donation is checked
    if it has a field `donate`. All sources of a `Mixture` are given the same items.

    Args:
      buffer: the configuration; at most a few hundred items, so that the check overwrites them.
      items: argument of `init`, arrays or `jax.ShapeDtypeStruct` of numbers. The check uses random values.
      key: a PRNG key for all random values, or a list of keys, with each of which the check is repeated by the same
        programs; None means key 0.
      batch_size: rows of each drawn batch.
      add: add(state, items, key) in place of the buffer's `add`, if that needs more arguments.

    Raises:
      AssertionError: a rule is broken; the message begins with the rule.
      ValueError: the list of keys is empty.

    Examples:
      >>> from jaxreplay import testing
      >>> testing.check_buffer(jr.ReplayBuffer(capacity=12), {"x": np.zeros((5, 3))})
      >>> testing.check_buffer([], items)
      Traceback (most recent call last):
      AssertionError: a configuration is frozen, hashable, and equal to its copies: unhashable type: 'list'
    """
    spec, keys = _batch.without_valid(checks.as_spec(items))[0], keys_of(key)
    check_config(buffer)
    runs = _Runs(buffer, spec, batch_size, add or _adder(buffer))
    for each in keys:
        runs.check(each)


def keys_of(key: Any) -> list[Any]:
    """The list of keys of a check, from its argument `key`."""
    if isinstance(key, list) and not key:
        raise ValueError("key=[]: must be a key, or a list of one or more, with each of which the check is repeated.")
    return key if isinstance(key, list) else [jax.random.key(0) if key is None else key]


def compiled(*static: int) -> Callable[[Callable[..., Any]], Any]:
    """Decorator: jit a method for each instance, which owns the program. Static positions do not count `self`."""
    return lambda method: functools.cached_property(
        lambda self: jax.jit(functools.partial(method, self), static_argnums=static)
    )


@dataclasses.dataclass
class _Runs:
    """Programs that drive a buffer, compiled once for all keys."""

    buffer: Any
    spec: Any
    batch_size: int
    add: Add
    traced: int = 0

    def check(self, key: Any) -> None:
        with rule(rules.ABSTRACT):
            chex.assert_trees_all_equal(*jax.device_get((self.init(), self.buffer.init(self.values(key)))))
        with rule(rules.STABLE):
            state = jax.eval_shape(self.init)
            after, _ = jax.eval_shape(self.step, state, key)
            chex.assert_trees_all_equal_shapes_and_dtypes(after, state)
        self.check_donation(key)
        self.check_draws(self.check_modes(key), key)

    def init(self) -> Any:
        return self.buffer.init(self.spec)

    @compiled()
    def values(self, key: jax.Array) -> Any:
        """Random items; non-zero numbers, because `get` returns zeros for items no longer stored."""
        leaves, treedef = jax.tree.flatten(self.spec)
        pairs = zip(jax.random.split(key, len(leaves)), leaves, strict=True)
        return treedef.unflatten([jax.random.randint(k, x.shape, 1, 100, jnp.int32).astype(x.dtype) for k, x in pairs])

    def step(self, state: Any, key: jax.Array) -> tuple[Any, Any]:
        state = self.add(state, self.values(key), key)
        sample = self.buffer.sample(state, key, self.batch_size)
        return self.buffer.update(state, sample.indices, jax.random.normal(key, (self.batch_size,))), sample

    @compiled()
    def draw(self, state: Any, key: jax.Array) -> Any:
        """Batches of some `DRAWS` rows, leaves [batches, batch_size, ...]; a buffer may allow few rows at a time."""
        draw = jax.vmap(lambda key: self.buffer.sample(state, key, self.batch_size))
        return draw(jax.random.split(key, -(-DRAWS // self.batch_size)))

    @compiled()
    def jit_step(self, state: Any, key: jax.Array) -> tuple[Any, Any]:
        self.traced += 1
        return self.step(state, key)

    @compiled()
    def scan_and_vmap(self, state: Any, keys: jax.Array) -> Any:
        scan = functools.partial(jax.lax.scan, self.step, state)
        return scan(keys[0]), jax.vmap(scan)(keys)

    def check_modes(self, key: jax.Array) -> Any:
        """Check that all modes agree; return a state with stored items."""
        keys = jax.random.split(key, (2, STEPS))
        state, new = self.init(), self.init()
        with rule(rules.MODES):
            scanned, mapped = jax.device_get(self.scan_and_vmap(state, keys))
            same(row(mapped, 0), scanned)
        for t in range(STEPS):
            with rule(rules.MODES):
                new, sample = self.jit_step(new, keys[0, t])
                state = self.add(state, self.values(keys[0, t]), keys[0, t])
                before = jax.device_get(state)
            with rule(rules.MODES):
                same(sample, row(scanned[1], t))
                if np.any(jax.device_get(sample.indices) >= 0):  # an eager draw from an empty buffer raises an error
                    same(self.buffer.sample(state, keys[0, t], self.batch_size), sample)
            with rule(rules.PURE):
                chex.assert_trees_all_equal(jax.device_get(state), before)
            with rule(rules.MODES):
                state = self.buffer.update(state, sample.indices, jax.random.normal(keys[0, t], (self.batch_size,)))
        with rule(rules.MODES):
            same(state, new)
        with rule(rules.TRACED):
            assert self.traced == 1, f"{self.traced} traces for {STEPS} batches of one type"
        return new

    def check_draws(self, state: Any, key: jax.Array) -> None:
        """Check draws, handles and late updates."""
        get = self.buffer.get
        with rule(rules.EMPTY):
            nothing = jax.device_get(self.draw(self.init(), key))
            np.testing.assert_array_equal(nothing.indices, -1)
            np.testing.assert_array_equal([nothing.probabilities, nothing.weights], 0)
        samples = jax.device_get(self.draw(state, key))
        sample, probabilities = row(samples, 0), samples.probabilities
        check_rows(sample.indices, sample.probabilities, sample.weights, self.batch_size)
        is_traced = isinstance(sample.items, TransitionBatch)  # W and idx come from the draw
        with rule(rules.TYPES):
            for leaf, stored in zip(jax.tree.leaves(sample.items), jax.tree.leaves(self.spec), strict=not is_traced):
                assert is_traced or leaf.dtype == stored.dtype, f"{leaf.dtype} items, {stored.dtype} were added"
                chex.assert_axis_dimension(leaf, 0, self.batch_size)
        with rule(rules.RANGES):
            named = samples.indices[probabilities == 0]
            assert np.all(named == -1), f"handles {named} in rows without an item"
        parts = getattr(self.buffer, "_parts", lambda _: [slice(None)])  # of a Mixture: the rows of each source
        for rows in parts(self.batch_size):
            check_law(samples.indices[:, rows], probabilities[:, rows])
        old, gone = jax.device_get(get(state, sample.indices)), np.zeros(self.batch_size, bool)
        with rule(rules.HANDLES):
            if not is_traced:
                same(*(row(x, sample.indices >= 0) for x in (old, sample.items)))
            for k in jax.random.split(key, 4 * STEPS):
                state, _ = self.jit_step(state, k)
                now = _numbers(jax.device_get(get(state, sample.indices)))
                kept, gone = (now == _numbers(old)).all(axis=1), ~now.any(axis=1)
                assert np.all(kept | gone), f"rows {np.flatnonzero(~(kept | gone))} hold other items"
        with rule(rules.LATE):
            before = jax.device_get(self.draw(state, key).probabilities)
            late = np.where(gone, sample.indices, -1).astype(np.int32)
            state = self.buffer.update(state, late, 100 * np.ones(self.batch_size, np.float32))
            same(self.draw(state, key).probabilities, before)

    def check_donation(self, key: jax.Array) -> None:
        if not hasattr(self.buffer, "donate"):
            return
        with rule(rules.DONATED):
            state = self.init()
            before = jax.device_get(jax.tree.map(jnp.copy, state))
            self.add(state, self.values(key), key)
            deleted = [x.is_deleted() for x in jax.tree.leaves(state)]
            assert any(deleted) == bool(self.buffer.donate), f"donate={self.buffer.donate}, {sum(deleted)} leaves gone"
            if not self.buffer.donate:
                chex.assert_trees_all_equal(jax.device_get(state), before)


def _numbers(items: Any) -> np.ndarray:
    """All numbers of each row, [B, ...]."""
    return np.concatenate([np.reshape(x, (len(x), -1)).astype(float) for x in jax.tree.leaves(items)], axis=1)


def _adder(buffer: Any) -> Add:
    """A function add(state, items, key), which passes the key on only if the buffer takes one."""
    if isinstance(buffer, Mixture):
        adders = [*map(_adder, buffer.buffers)]
        return lambda state, items, key: tuple(add(x, items, key) for add, x in zip(adders, state, strict=True))
    takes = inspect.signature(whole_of(buffer).add).parameters

    def add(state: Any, items: Any, key: Any) -> Any:
        if "ends" in takes:
            return buffer.add(state, items, ends=jnp.zeros(jax.tree.leaves(items)[0].shape[:2], bool))
        return buffer.add(state, items, *[key] * ("key" in takes))

    return add


@contextlib.contextmanager
def rule(text: str, exempt: Collection[str] = ()) -> Iterator[None]:
    """Convert any error inside to an `AssertionError` that begins with `text`; ignore errors of exempt rules."""
    try:
        yield
    except Exception as error:
        if text in exempt:
            return
        detail = str(error).removeprefix("[Chex] ")
        raise AssertionError(f"{text}: {detail}" if detail else text) from error


def check_config(config: Any) -> None:
    with rule(rules.CONFIG):
        assert hash(config) == hash(copy.copy(config)), "hashes differ"
        assert config == copy.copy(config), "not equal"
        name = next((field.name for field in dataclasses.fields(config)), "anything")
        with contextlib.suppress(AttributeError, TypeError):  # includes FrozenInstanceError
            setattr(config, name, None)
            raise AssertionError(f"field {name} can be set")


def check_rows(indices: Any, probabilities: Any, weights: Any, batch_size: int) -> None:
    with rule(rules.TYPES):
        chex.assert_shape((indices, probabilities, weights), (batch_size,))
        chex.assert_type([indices, probabilities, weights], [jnp.int32, jnp.float32, jnp.float32])
    with rule(rules.RANGES):
        indices, probabilities, weights = map(np.asarray, (indices, probabilities, weights))
        assert np.all((probabilities >= 0) & (probabilities <= 1 + 1e-5)), f"probabilities {probabilities}"
        assert np.all(np.isfinite(weights) & (weights >= 0)), f"weights {weights}"
        assert not np.any(weights[probabilities == 0]), f"weights {weights} of probabilities {probabilities}"


def check_law(drawn: Any, probabilities: Any) -> None:
    """Pearson's chi-square test of the draws, at five standard deviations after Wilson and Hilferty (1931)."""
    with rule(rules.LAW):
        drawn, probabilities = (np.asarray(x)[np.asarray(probabilities) > 0] for x in (drawn, probabilities))
        names, first, counts = np.unique(drawn, return_index=True, return_counts=True)
        each = probabilities[first].astype(np.float64)
        np.testing.assert_allclose(probabilities, each[np.searchsorted(names, drawn)], rtol=1e-5)
        rest = 1 - each.sum()
        assert abs(rest) < 1e-3 or rest > 0, f"the probabilities of the draws sum to {each.sum()}"
        expected = counts.sum() * np.append(each, rest)
        counts, expected = np.append(counts, 0)[expected > 0], expected[expected > 0]
        statistic, free = np.sum((counts - expected) ** 2 / np.maximum(expected, 5)), max(len(counts) - 1, 1)
        most = free * (1 - 2 / (9 * free) + 5 * np.sqrt(2 / (9 * free))) ** 3
        assert statistic <= most, f"chi-square of {statistic:.1f} with {free} degrees of freedom, at most {most:.1f}"


def same(found: Any, expected: Any) -> None:
    """Assert that integers and bools are equal and floats close."""
    found, expected = jax.device_get((found, expected))
    chex.assert_trees_all_equal_shapes_and_dtypes(found, expected)
    chex.assert_trees_all_close(found, expected, rtol=1e-5, atol=1e-6)


def row(tree: Any, i: int) -> Any:
    return jax.tree.map(lambda x: x[i], tree)
