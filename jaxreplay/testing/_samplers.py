"""Checks of a sampler."""

import dataclasses
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
    sampler: Any,
    *,
    key: Any = None,
    capacity: int = 13,
    batch_size: int = 8,
    exempt: Collection[str] = (),
) -> None:
    """Check that a sampler follows the rules of `jaxreplay.samplers.Sampler`.

    A sampler without `takes_spent` need not follow `SPENT`, and one with `by_rank` neither `OTHERS` nor the second half
    of `SHARDS`. Weights that are all 1 follow `WEIGHTS`.

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
        runs.key = each
        state = runs.check_modes()
        runs.check_draws(state)
        runs.check_updates(state)
        for check in (_check_words, _check_past, _check_cleared, _check_shards):
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

    def run(self, key: jax.Array) -> Any:
        """A state after two updates."""

        def learn(state: Any, td_errors: jax.Array) -> tuple[Any, None]:
            rows = slots[1 : self.most + 1], td_errors, jnp.ones(self.most, bool)
            return self.sampler.update(state, *rows, spent=None, axis_name=None), None

        slots, unknown = jnp.asarray(self.slots), {"td_errors": None, "axis_name": None}
        state = self.sampler.insert(self.sampler.init(self.capacity), slots, slots < self.capacity - 1, **unknown)
        return jax.lax.scan(learn, state, jax.random.normal(key, (2, self.most)))[0]

    @compiled()
    def modes(self, keys: jax.Array) -> Any:
        return [*map(self.run, keys)], jax.vmap(self.run)(keys)

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

    @compiled()
    def cleared(self, state: Any) -> Any:
        return self.sampler.cleared(state, self.capacity)

    def check_promises(self, *arguments: Any) -> None:
        """Look at the indices of all scatters with unique_indices of an update; on a CPU a repeated one is harmless."""
        with jax.disable_jit():  # no program inside the program
            traced = jax.make_jaxpr(lambda *x: self.sampler.update(*x))(*arguments)
        scatters = [x for x in traced.eqns if x.primitive.name.startswith("scatter") and x.params["unique_indices"]]
        wanted = ClosedJaxpr(traced.jaxpr.replace(outvars=[x.invars[1] for x in scatters]), traced.consts)
        found = jax.device_get(jax.jit(jaxpr_as_fun(wanted))(*jax.tree.leaves(arguments)))
        for scatter, indices in zip(scatters, found, strict=True):
            axes = scatter.params["dimension_numbers"].scatter_dims_to_operand_dims
            rows = indices.reshape(-1, len(axes))
            rows = rows[np.all((rows >= 0) & (rows < np.take(scatter.invars[0].aval.shape, axes)), axis=1)]
            assert len(np.unique(rows, axis=0)) == len(rows), "unique_indices=True of a scatter with repeated indices"

    @compiled()
    def outcome_of_shards(self, *arguments: Any) -> Any:
        return jax.vmap(lambda *x: self.outcome(*x, False), axis_name="shards")(*arguments)

    def after(self, state: Any, slots: Any = (), td_errors: Any = 0, counts: Any = True, **more: Any) -> Any:
        """`outcome` of rows for `slots`, filled up with masked ones."""
        given, errors = self.slots < len(slots), np.zeros(self.capacity, np.float32)
        errors[given] = td_errors

        def padded(slots: Any, fill: int) -> np.ndarray:
            return np.array([*slots, *[fill] * (self.capacity - len(slots))], np.int32)

        key, live = more.get("key", self.key), more.get("live", self.range(0, self.capacity - 1))
        new, then = padded((), self.capacity), padded(more.get("then", ()), self.capacity)
        rows = padded(slots, -1), errors, given & counts, given & more.get("spent", False)
        return jax.device_get(self.outcome(state, key, live, new, rows, then, more.get("restricts", False)))

    def draws(self, *arguments: Any, **more: Any) -> _Draws:
        return self.after(*arguments, **more)[1]

    def check_modes(self) -> Any:
        """Check that all modes agree; return a state after two updates."""
        keys, state = jax.random.split(self.key, 2), jax.eval_shape(self.run, self.key)
        with self.rule(rules.STABLE):
            chex.assert_trees_all_equal_shapes_and_dtypes(state, self.sampler.init(self.capacity))
        with self.rule(rules.MODES):
            states, mapped = jax.device_get(self.modes(keys))
            for i in range(2):
                same(row(mapped, i), states[i])
        return states[0]

    def check_draws(self, state: Any) -> None:
        live, last = self.range(0, self.capacity - 1), self.capacity - 1
        check_rows(*self.draw(state, self.key, live, self.most), batch_size=self.most)
        all_of, young = (self.draws(state, live=self.range(x, last - x), restricts=x > 0) for x in (0, 2))
        with self.rule(rules.LIVE):
            for start, draws in ((0, all_of), (2, young)):
                drawn = draws.slots[draws.probabilities > 0]
                assert np.all((drawn >= start) & (drawn < last)), f"slots {np.unique(drawn)} of {start} to {last - 1}"
            nothing = self.draws(self.sampler.init(self.capacity), live=self.range(0, 0))
            np.testing.assert_array_equal([nothing.probabilities, *nothing.weights], 0)
        with self.rule(rules.FILLED):
            assert np.all(all_of.probabilities > 0) or not self.sampler.fills_rows
        check_law(*all_of[:2])
        check_law(*young[:2])
        with self.rule(rules.RESTRICTED):
            _same_ratios(all_of.law()[2:], young.law()[2:])
        with self.rule(rules.KEYS):
            np.testing.assert_array_equal(all_of.slots, self.draws(state).slots)
            others = (self.draws(state, key=key).slots for key in jax.random.split(self.key, 32))  # some may be alike
            assert not all(np.array_equal(all_of.slots, x) for x in others), "all keys give the same slots"

    def check_updates(self, state: Any) -> None:
        with self.rule(rules.IGNORED):
            for slots in ((), (-1, self.capacity), (1, 2)):
                after = self.after(state, slots, 3.0, False)[0]
                same(*(self.draw(x, self.key, self.range(0, self.capacity - 1), self.most)[:2] for x in (after, state)))
        with self.rule(rules.LAST):
            same(*(self.draws(state, (1, 1), (x, 2.0))[:2] for x in (9.0, 0.5)))
            self.check_promises(state, self.slots // 2, np.float32(self.slots), self.slots >= 0)
        for value in (np.nan, np.inf, 0.0):
            some = self.draws(state, (1, 2), value)[:2]
            with self.rule(rules.FINITE):
                assert np.all(np.isfinite(some[1])), "probabilities are not finite"
            check_law(*some)
            with self.rule(rules.SOME):
                for then in ((), self.slots):
                    drawn = self.draws(state, self.slots[:-1], value, then=then).probabilities > 0
                    assert np.any(drawn), f"nothing is drawn after TD errors of {value}"


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
    with runs.rule(rules.OTHERS):
        _same_ratios(*(np.delete(runs.draws(state, (1,), x).law(), 1) for x in (0.01, 50.0)))


def _check_past(runs: _SamplerRuns, state: Any) -> None:
    """Spend and overwrite slots, and draw each of them."""
    with runs.rule(rules.FORGOTTEN):
        _same_ratios(*(runs.draws(state, (2, 1)[:n], (7.0, 3.0)[:n], then=(1,)).law() for n in (2, 1)))
    unspent = sum_tree.of_leaves(jnp.float32((runs.slots > 2) & (runs.slots < runs.capacity - 1)))
    live = dataclasses.replace(runs.range(0, runs.capacity - 4), unspent=unspent)
    with runs.rule(rules.SPENT):
        for td_errors in (np.nan, 9.0):
            state, draws = runs.after(state, (0, 1, 2), td_errors, spent=True, live=live)
            assert not np.any(draws.law()[[0, 1, 2, -1]]), "a spent or empty slot was drawn"
    with runs.rule(rules.EVERY):
        for end in range(1, runs.capacity):
            live = runs.range(max(end - 2, 0), min(end, 2))
            law = runs.draws(state, live=live, then=runs.slots, restricts=True).law()[:end][-2:]
            assert np.all(law[-1 if runs.sampler.by_age else 0 :] > 0), f"probabilities {law} of slots before {end}"


def _check_cleared(runs: _SamplerRuns, state: Any) -> None:
    """Clear a state whose counters count something, and store one item."""
    with runs.rule(rules.CLEARED):
        state = runs.after(state, (1, 2), (9.0, np.nan))[0]
        empty = runs.cleared(state)
        for name, value in vars(state).items() if dataclasses.is_dataclass(state) else ():
            if getattr(value, "shape", None) == ():
                np.testing.assert_array_equal(getattr(empty, name), value, err_msg=name)
        law = runs.draws(empty, then=(0,), live=runs.range(0, 1)).law()
        assert not np.any(law[1:]), f"probabilities {law} after slot 0 alone was filled"


def _check_shards(runs: _SamplerRuns, state: Any) -> None:
    """Draw from two shards of different size and content, with slots 0 and 1 alike."""
    sizes, slots = np.array([runs.capacity - 1, runs.capacity // 2 + 1]), np.stack([runs.slots] * 2)
    held, zeros = slots < sizes[:, None], np.zeros(2, np.int32)
    new, then = (np.where(x, slots, runs.capacity) for x in (held, slots == 0))
    td_errors = np.float32(1 + np.where(slots == 1, 0, slots) * [[1.0], [0.1]])
    states = jax.tree.map(lambda x: jnp.stack([x, x]), runs.sampler.init(runs.capacity))
    live, rows = runs.range(zeros, sizes, "shards"), (np.where(held, slots, -1), td_errors, held, slots < 0)
    draws = jax.device_get(runs.outcome_of_shards(states, jax.random.split(runs.key), live, new, rows, then)[1])
    with runs.rule(rules.WEIGHTS):
        _check_full_weights(draws)
    with runs.rule(rules.SHARDS):
        np.testing.assert_allclose(*draws.priorities[:, :2], rtol=1e-5)
        if not runs.sampler.by_rank:
            _same_ratios(*(row(draws, shard).law()[:2] for shard in range(2)))


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
