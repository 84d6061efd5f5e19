"""Checks of a sampler."""

import dataclasses
import functools
from collections.abc import Collection
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun

from jaxreplay import sum_tree
from jaxreplay._common import ring
from jaxreplay.samplers import _base
from jaxreplay.testing import _rules as rules
from jaxreplay.testing._buffers import DRAWS, check_config, check_law, check_rows, compiled, keys_of, row, rule, same


def check_sampler(
    sampler: Any, *, key: Any = None, capacity: int = 13, batch_size: int = 8, exempt: Collection[str] = ()
) -> None:
    """Check that a sampler follows the rules of `jaxreplay.samplers.Sampler`.

    A sampler without `takes_spent` need not follow `SPENT`, and one with `by_rank` neither `OTHERS` nor the second half
    of `SHARDS`. Weights that are all 1 follow `WEIGHTS`. Without `fills_rows` those of shards may differ from those of
    one buffer.

    Args:
      sampler: the configuration.
      key: a PRNG key for all random values, or a list of keys, with each of which the check is repeated by the same
        programs; None means key 0.
      capacity: number of slots, at least 4.
      batch_size: rows of each drawn batch, at most `capacity` - 2.
      exempt: rules that this sampler may break, of the constants of this module. A sampler that draws only some of the
        slots needs `EVERY`.

    Raises:
      AssertionError: a rule is broken; the message begins with the rule.
      ValueError: `sampler` is not a `jaxreplay.samplers.Sampler`, `exempt` has something that is no rule, or the list
        of keys is empty.

    Examples:
      >>> from jaxreplay import testing
      >>> testing.check_sampler(jr.Prioritized(alpha=0.7), exempt=[testing.OTHERS])
      >>> testing.check_sampler(None)
      Traceback (most recent call last):
      ValueError: sampler=None: must be a sampler, such as jr.Uniform() or jr.Prioritized().
    """
    check_config(_base.check_sampler("sampler", sampler))
    if isinstance(exempt, str) or not {*exempt} <= {x for name, x in vars(rules).items() if name.isupper()}:
        raise ValueError(f"exempt={exempt!r}: must be rules, such as [testing.OTHERS].")
    keys = keys_of(key)
    exempt = {*exempt, *[rules.SPENT] * (not sampler.takes_spent), *[rules.OTHERS] * sampler.by_rank}
    runs = _SamplerRuns(sampler, capacity, min(batch_size, capacity - 2), exempt)
    for each in keys:
        runs.check(each)


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


@dataclasses.dataclass
class _SamplerRuns:
    """Programs that drive a sampler, compiled once for all keys; all slots but the last are drawable."""

    sampler: Any
    capacity: int
    most: int
    exempt: Any
    key: Any = None

    @property
    def slots(self) -> np.ndarray:
        return np.arange(self.capacity, dtype=np.int32)

    def rule(self, text: str) -> Any:
        return rule(text, self.exempt)

    def range(self, start: Any, size: Any, axis_name: str | None = None) -> Any:
        start, size = (jnp.asarray(x, np.int32) for x in (start, size))
        return ring.Live(start, size, capacity=self.capacity, axis_name=axis_name)

    def check(self, key: Any) -> None:
        self.key = key
        state = self.check_modes()
        self.check_draws(state)
        self.check_updates(state)
        for check in (_check_histories, _check_words, _check_past, _check_cleared, _check_shards):
            check(self, state)

    @compiled(3, 4)
    def draw(self, state: Any, key: Any, live: ring.Live, count: int, betas: Any = (None,)) -> Any:
        drawn, probabilities = self.sampler.sample(state, key, count, live)
        return drawn, probabilities, *[self.sampler.weights(state, probabilities, live, beta=x) for x in betas]

    @compiled(6)
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

    @functools.cached_property
    def scatters(self) -> Any:
        """Promises of distinct indices in an update: lengths of axes by scatter, and a program of the indices."""
        repeated = self.slots // 2, np.float32(self.slots), self.slots >= 0
        update = jax.make_jaxpr(lambda state: self.sampler.update(state, *repeated))
        with jax.disable_jit():  # no program inside the program
            traced = update(self.sampler.init(self.capacity))
        found = [x for x in traced.eqns if x.primitive.name.startswith("scatter") and x.params["unique_indices"]]
        axes = [x.params["dimension_numbers"].scatter_dims_to_operand_dims for x in found]
        lengths = [np.take(x.invars[0].aval.shape, its) for x, its in zip(found, axes, strict=True)]
        wanted = ClosedJaxpr(traced.jaxpr.replace(outvars=[x.invars[1] for x in found]), traced.consts)
        return lengths, jax.jit(jaxpr_as_fun(wanted))

    def check_promises(self, state: Any) -> None:
        """Check the indices of all scatters with unique_indices; on a CPU a repeated one is harmless."""
        lengths, program = self.scatters
        for most, indices in zip(lengths, jax.device_get(program(*jax.tree.leaves(state))), strict=True):
            rows = indices.reshape(-1, len(most))
            rows = rows[np.all((rows >= 0) & (rows < most), axis=1)]
            assert len(np.unique(rows, axis=0)) == len(rows), "unique_indices=True of a scatter with repeated indices"

    @compiled()
    def mapped(self, *arguments: Any) -> Any:
        """`outcome` of stacked arguments, for lanes or shards."""
        return jax.vmap(lambda *x: self.outcome(*x, False), axis_name="shards")(*arguments)

    def given(self, state: Any, slots: Any = (), td_errors: Any = 0, counts: Any = True, **more: Any) -> Any:
        """Arguments of `outcome`, with rows for `slots`; rows and insertions are filled up with ignored ones."""
        exist, errors = self.slots < len(slots), np.zeros(self.capacity, np.float32)
        errors[exist] = td_errors

        def padded(slots: Any, fill: int) -> np.ndarray:
            return np.array([*slots, *[fill] * (self.capacity - len(slots))], np.int32)

        new, then = (padded(more.get(name, ()), self.capacity) for name in ("new", "then"))
        rows = padded(slots, -1), errors, exist & counts, exist & more.get("spent", False)
        return state, self.key, more.get("live", self.range(0, self.capacity - 1)), new, rows, then

    def after(self, *arguments: Any, restricts: bool = False, only: str = rules.LIVE, **more: Any) -> Any:
        """`outcome`, after checks of what every draw follows; `only` is the rule against slots that are not live."""
        given = self.given(*arguments, **more)
        state, draws = jax.device_get(self.outcome(*given, restricts))
        for weights in draws.weights:
            check_rows(draws.slots, draws.probabilities, weights, DRAWS)
        check_law(draws.slots, draws.probabilities)
        live = jax.device_get(given[2])
        is_live = (self.slots >= live.start) & (self.slots < live.start + live.size)
        if live.unspent is not None:
            is_live = np.asarray(sum_tree.leaves(live.unspent)) > 0
        with self.rule(only):
            law = draws.law()
            assert not np.any(law[~is_live]), f"slots {np.flatnonzero(law)} of {np.flatnonzero(is_live)}"
        return state, draws

    def draws(self, *arguments: Any, **more: Any) -> _Draws:
        return self.after(*arguments, **more)[1]

    def check_modes(self) -> Any:
        """Check that all modes agree; return a state after an update."""
        td_errors = jax.random.normal(self.key, (self.most,))
        first = self.sampler.init(self.capacity)
        given = self.given(first, self.slots[1 : self.most + 1], td_errors, new=self.slots)
        state, _ = jax.device_get(self.outcome(*given, False))
        with self.rule(rules.STABLE):
            chex.assert_trees_all_equal_shapes_and_dtypes(state, first)
        with self.rule(rules.MODES):
            same(row(jax.device_get(self.mapped(*_stacked(given, given))[0]), 1), state)
        return state

    def check_draws(self, state: Any) -> None:
        live = self.range(0, self.capacity - 1)
        few = [jax.device_get(self.draw(state, key, live, self.most)) for key in jax.random.split(self.key, 64)]
        check_rows(*few[0], batch_size=self.most)
        check_law(*(np.concatenate(x) for x in list(zip(*few, strict=True))[:2]))  # of several keys
        self.draws(self.sampler.init(self.capacity), live=self.range(0, 0))
        drawn = self.draws(state).probabilities > 0
        with self.rule(rules.FILLED):
            assert np.all(drawn) or not self.sampler.fills_rows

    def check_updates(self, state: Any) -> None:
        with self.rule(rules.LAST):
            self.check_promises(state)
        every = self.slots[:-1]
        for value in (np.nan, np.inf, 0.0):
            for slots, then in (((1, 2), ()), (every, ()), (every, self.slots)):
                draws = self.draws(state, slots, value, then=then)
                with self.rule(rules.SOME):
                    assert np.any(draws.probabilities > 0), f"nothing is drawn after TD errors of {value}"


def _check_histories(runs: _SamplerRuns, state: Any) -> None:
    """Compare the laws after histories that differ in what a rule says to be without effect."""
    for text, *histories in (
        (rules.RESTRICTED, {}, {"live": runs.range(2, runs.capacity - 3), "restricts": True}),
        (rules.IGNORED, {}, {"slots": (-1, runs.capacity), "td_errors": 3.0}),
        (rules.IGNORED, {"then": (1,)}, {"slots": (2, 3), "td_errors": 99.0, "counts": False, "then": (1,)}),
        (rules.LAST, *({"slots": (1, 1), "td_errors": (x, 2.0)} for x in (9.0, 0.5))),
        (rules.FORGOTTEN, *({"slots": (2, 1), "td_errors": (7.0, x), "then": (1,)} for x in (3.0, 4.0))),
        (rules.OTHERS, *({"slots": (0,), "td_errors": x} for x in (0.01, 50.0))),
    ):
        laws = [runs.draws(state, **history).law() for history in histories]
        with runs.rule(text):
            _same_ratios(*(x[1:] if text == rules.OTHERS else x for x in laws))


def _check_words(runs: _SamplerRuns, state: Any) -> None:
    """Compare weights, priorities and masses with the probabilities."""
    draws = runs.draws(state)
    law, drawn = draws.law(), draws.probabilities > 0
    with runs.rule(rules.WEIGHTS):
        _check_full_weights(draws)
        own, even, _ = (x[drawn] for x in draws.weights)
        np.testing.assert_allclose(even, even[0], rtol=1e-3)
        assert np.all(np.diff(own[np.argsort(draws.probabilities[drawn])]) <= 1e-3 * own.max()), "they rise"
    with runs.rule(rules.AGREE):
        higher = (draws.priorities[:, None] > 1.001 * draws.priorities) & (law[:, None] > 0)
        assert runs.sampler.by_age or not np.any(law[:, None] < 0.999 * law, where=higher), "higher, drawn less often"
        _same_ratios(law, law if draws.masses is None else draws.masses)
        if draws.priorities_at is not None:
            np.testing.assert_allclose(draws.priorities_at[drawn], draws.priorities[draws.slots[drawn]], rtol=1e-3)


def _check_past(runs: _SamplerRuns, state: Any) -> None:
    """Spend and overwrite slots, and draw each of them."""
    unspent = sum_tree.of_leaves(jnp.float32((runs.slots > 2) & (runs.slots < runs.capacity - 1)))
    live = dataclasses.replace(runs.range(0, runs.capacity - 4), unspent=unspent)
    for td_errors in (np.nan, 9.0):
        state, _ = runs.after(state, (0, 1, 2), td_errors, spent=True, live=live, only=rules.SPENT)
    for end in range(1, runs.capacity):
        live = runs.range(max(end - 2, 0), min(end, 2))
        law = runs.draws(state, live=live, then=runs.slots, restricts=True).law()[:end][-2:]
        with runs.rule(rules.EVERY):
            assert np.all(law[-1 if runs.sampler.by_age else 0 :] > 0), f"probabilities {law} of slots before {end}"


def _check_cleared(runs: _SamplerRuns, state: Any) -> None:
    """Clear a state whose counters count something, and store one item."""
    state, _ = runs.after(state, (1, 2), (9.0, np.nan))
    with runs.rule(rules.CLEARED):
        empty = runs.sampler.cleared(state, runs.capacity)
        for name, value in vars(state).items() if dataclasses.is_dataclass(state) else ():
            if getattr(value, "shape", None) == ():
                np.testing.assert_array_equal(getattr(empty, name), value, err_msg=name)
    runs.draws(empty, then=(0,), live=runs.range(0, 1), only=rules.CLEARED)


def _check_shards(runs: _SamplerRuns, state: Any) -> None:
    """Draw from two shards of different size and content, with slots 0 and 1 alike; and from two that are alike."""
    shards, empty = [], runs.sampler.init(runs.capacity)
    for size, scale in ((runs.capacity - 1, 1.0), (runs.capacity // 2 + 1, 0.1)):
        slots, live = runs.slots[:size], runs.range(0, size, "shards")
        td_errors = 1 + scale * np.where(slots == 1, 0, slots)
        shards.append(runs.given(empty, slots, td_errors, new=slots, then=(0,), live=live))
    draws = jax.device_get(runs.mapped(*_stacked(*shards))[1])
    alike = runs.given(state, live=runs.range(0, runs.capacity - 1, "shards"))
    of_one, of_both = runs.draws(state).weights, jax.device_get(runs.mapped(*_stacked(alike, alike))[1]).weights
    with runs.rule(rules.WEIGHTS):
        _check_full_weights(draws)
        if runs.sampler.fills_rows:  # else weights make up for rows without an item
            np.testing.assert_allclose(of_both, np.stack([of_one] * 2, axis=1), rtol=0.05)
    with runs.rule(rules.SHARDS):
        np.testing.assert_allclose(*draws.priorities[:, :2], rtol=1e-5)
        if not runs.sampler.by_rank:
            _same_ratios(*(row(draws, shard).law()[:2] for shard in range(2)))


@jax.jit
def _stacked(*trees: Any) -> Any:
    return jax.tree.map(lambda *x: jnp.stack(x), *trees)


def _check_full_weights(draws: _Draws) -> None:
    """Assert that beta=1 gives all items of all shards the same expected weight, or weight 1."""
    drawn, weights = draws.probabilities > 0, draws.weights[2]
    expected = (weights * draws.probabilities * np.mean(drawn, -1, keepdims=True))[drawn]
    if not np.all(weights[drawn] == 1):
        np.testing.assert_allclose(expected, expected[0], rtol=1e-3)


def _same_ratios(found: np.ndarray, expected: np.ndarray) -> None:
    """Assert that numbers are in proportion where both are positive."""
    both = (found > 0) & (expected > 0)
    found, expected = (x[both] / np.sum(x[both]) for x in (found, expected))
    np.testing.assert_allclose(found, expected, rtol=1e-3)
