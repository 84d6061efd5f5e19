"""Buffer: draws, common to all buffers."""

import abc
import functools
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from jaxreplay._common import checks, layouts, ring, shards
from jaxreplay._common.checks import check_integer
from jaxreplay._common.permutation import permuted
from jaxreplay._common.xla import alive, copy, jit_method, materialize, read_once, reads_state
from jaxreplay.buffers import _uses
from jaxreplay.buffers._handled import Handled, S
from jaxreplay.buffers._sample import Sample, check_draw, check_drawn
from jaxreplay.sum_tree import SumTree
from jaxreplay.transitions import TransitionBatch


class Buffer(Handled[S]):
    """A buffer whose drawable items lie in slots, mostly a ring; subclasses are frozen dataclasses and final."""

    _state_kind: ClassVar[type]

    @abc.abstractmethod
    def init(self, items: Any, /) -> S:
        """An empty buffer for items like these."""

    def _abstract(self, items: Any) -> S:
        """Shapes and dtypes of a state."""
        return jax.eval_shape(self.init, items)

    @abc.abstractmethod
    def add(self, state: S, *args: Any, **kwargs: Any) -> S:
        """Insert a batch of items."""

    @abc.abstractmethod
    def is_full(self, state: S) -> jax.Array:
        """True if the next insertion overwrites."""

    @property
    def _batch_axes(self) -> int:
        """Number of leading axes of a batch for `add`; shards get equal parts along the last of them."""
        return len(self._storage_axes)

    def _check_state(self, state: S) -> None:
        """Raise a `ValueError` if `state` is not of this buffer."""
        checks.check_state(self, state, self._state_kind)
        fields = self._storage_axes
        found, expected = layouts.leading(state.storage, len(fields)), tuple(getattr(self, field) for field in fields)
        if state.ring.size.shape != () or found != expected:
            names = ", ".join(f"{field}={size}" for field, size in zip(fields, expected, strict=True))
            axes = f"a leading axis of {found[0]}" if len(found) == 1 else f"leading axes {list(found)}"
            raise ValueError(
                f"{names}: this state has {axes}; use the buffer that made it, and jax.vmap for a stack of states."
            )
        if _kind((state.sampler, state.uses)) != _kind_of_states(self):
            raise ValueError(
                f"sampler={self.sampler!r}: this state is of another sampler, or of another size, count_updates or "
                "max_uses; use the buffer that made it, or convert the state with jaxreplay.migrate."
            )

    @abc.abstractmethod
    def _live(self, state: S, max_age: jax.Array | None = None) -> ring.Live:
        """The drawable slots; with `max_age` (int32 []), only those whose items are younger."""

    @property
    def _by_age(self) -> bool:
        """True if the sampler needs live slots in order of age."""
        return getattr(self.sampler, "by_age", False)

    def _why_empty(self, state: S) -> str:
        """The error message of a draw from an empty buffer."""
        return "cannot sample from an empty buffer; add items first (see can_sample)."

    def _insert(self, state: S, slots: jax.Array, drawable: jax.Array, td_errors: jax.Array | None) -> Any:
        """The fields `sampler` and `uses` after `slots` were written; `td_errors` is passed only if it is not None."""
        named: Any = {} if td_errors is None else {"td_errors": td_errors}
        sampler = self.sampler.insert(state.sampler, slots, drawable, **named, **self._axis)
        return {"sampler": sampler, "uses": _uses.insert(state.uses, slots, drawable)}

    def sample(
        self,
        state: S,
        key: jax.Array,
        batch_size: int,
        *,
        beta: Any = None,
        max_age: jax.Array | int | None = None,
    ) -> Sample:
        """Draw items by the sampling distribution.

        If the items are a `TransitionBatch`, its `W` is multiplied by the weights (or set to them if None), and its
        `idx` is set to the handles.

        Args:
          state: unchanged.
          key: a PRNG key.
          batch_size: number of draws.
          beta: exponent of the importance weights, in place of the sampler's; a float, or a traced float [].
          max_age: draw only items whose `Sample.age` is less; an integer, a traced int32 [], or None for all items. The
            sampler's law, and with it probabilities and weights, is restricted to these items.

        Returns:
          `Sample`.

        Raises:
          ValueError: `batch_size` or `max_age` is not a positive integer, or `key` is not a PRNG key; or the buffer is
            empty and the call is eager. The eager call waits for the buffer's size. Under `jit` an empty buffer gives
            weights and probabilities 0 and indices -1.

        Examples:
          >>> sampler = jr.Prioritized(alpha=1.0, beta=1.0, epsilon=0.0)
          >>> buffer = jr.ReplayBuffer(capacity=4, sampler=sampler)
          >>> items = jnp.array([10, 20, 30, 40])
          >>> td_errors = jnp.array([1.0, 0.0, 0.0, 3.0])
          >>> state = buffer.add(buffer.init(items), items, td_errors=td_errors)
          >>> sample = buffer.sample(state, jax.random.key(0), batch_size=4)
          >>> sample.items.tolist()  # in proportion to the TD errors: 20 and 30 have priority 0
          [10, 40, 40, 40]
          >>> [round(weight, 2) for weight in sample.weights.tolist()]
          [1.0, 0.33, 0.33, 0.33]
        """
        batch_size = check_draw(batch_size, beta, max_age)
        return check_drawn(self, state, self._draw(state, key, batch_size, beta, max_age))

    @jit_method(static=("batch_size",))
    def _draw(self, state: S, key: jax.Array, batch_size: int, beta: Any, max_age: Any) -> Sample:
        # Checked at trace time, so that later calls of the same kind do not pay for it.
        self._check_state(state)
        checks.check_key(key)
        sampler_state = state.sampler
        if max_age is None:
            live = self._live(state)
        else:
            live = self._live(state, checks.as_count(max_age))
            if self._by_age:
                live = live._replace(older=self._live(state).size - live.size)
            sampler_state = self.sampler.restrict(state.sampler, live)
        live = _uses.live(state.uses, live, max_age is not None)
        drawn = self.sampler.sample(sampler_state, key, batch_size, live)
        slots, probabilities = read_once(materialize(*drawn))
        weights = self.sampler.weights(sampler_state, probabilities, live.size, beta=beta, **self._axis)
        return self._sample_of(state, slots, probabilities / shards.count(self._axis_name), weights)

    def epoch(self, state: S, key: jax.Array, batch_size: int, *, step: jax.Array | int) -> Sample:
        """Batch number `step` of a pass over all drawable items, each once, in an order shuffled by `key`.

        The order is computed and not stored, in O(batch_size) a call. All batches of a pass need the same key, and a
        buffer to which nothing is added in between. `num_batches` is their number. Weights are 1 for every sampler.

        Args:
          state: unchanged.
          key: a PRNG key, one for a pass.
          step: the batch's number, from 0; an integer, or a traced int32 [].
          batch_size: number of rows. Rows after the end of the pass have handle -1, probability 0 and weight 0.

        Raises:
          ValueError: `batch_size` is not a positive integer, `step` is not an integer or is negative, or `key` is not a
            PRNG key; or the buffer is empty and the call is eager.

        Examples:
          >>> buffer = jr.ReplayBuffer(capacity=4)
          >>> items = jnp.array([10, 20, 30])
          >>> state = buffer.add(buffer.init(items), items)
          >>> key = jax.random.key(0)
          >>> first, second = (buffer.epoch(state, key, 2, step=step) for step in range(2))
          >>> sorted(first.items.tolist() + second.items[:1].tolist()), second.weights.tolist()
          ([10, 20, 30], [1.0, 0.0])
        """
        batch_size = check_draw(batch_size)
        check_integer("step", step, 0, 2**31 - 1, "the number of a batch", traced=None)
        return check_drawn(self, state, self._epoch(state, key, batch_size, step))

    @jit_method(static=("batch_size",))
    def _epoch(self, state: S, key: jax.Array, batch_size: int, step: jax.Array | int) -> Sample:
        self._check_state(state)
        checks.check_key(key)
        live = self._live(state)
        end = -(-live.size // batch_size)
        step = checks.as_int32(step)
        step = jnp.where((step >= 0) & (step < end), step, end)
        position = step * batch_size + jnp.arange(batch_size, dtype=jnp.int32)
        exists = position < live.size
        order = jax.random.clone(key)  # batches of a pass share a key; cloned, it does not count as reused
        slots = live.slots(permuted(order, jnp.where(exists, position, 0), live.size), self._num_slots)
        exists &= _uses.is_unspent(state.uses, slots)
        slots, exists = read_once(materialize(slots, exists))
        probability = 1.0 / jnp.maximum(live.size, 1).astype(jnp.float32)
        weights = exists.astype(jnp.float32)
        return self._sample_of(state, slots, jnp.where(exists, probability, 0.0), weights)

    def num_batches(self, state: S, batch_size: int) -> jax.Array:
        """Number of batches of an `epoch`, int32 [].

        Examples:
          >>> buffer = jr.ReplayBuffer(capacity=4)
          >>> items = jnp.array([10, 20, 30])
          >>> int(buffer.num_batches(buffer.add(buffer.init(items), items), batch_size=2))
          2
        """
        batch_size = check_draw(batch_size)
        return -(-alive(state.ring.size) // batch_size)

    def _sample_of(self, state: S, slots: jax.Array, probabilities: jax.Array, weights: jax.Array) -> Sample:
        """A sample of the items at `slots` [B], which are in range; rows of probability 0 have no item."""
        drawn = probabilities > 0
        indices = jnp.where(drawn, self._handles(state, slots), -1)
        age = jnp.where(indices >= 0, self._ages(state, slots), -1)
        items, mask = self._read(state, slots, fill=False)
        items = read_once(items)
        if mask is not None:
            mask &= (indices >= 0)[:, None]
        if isinstance(items, TransitionBatch):
            items = items.with_draw(weights, indices)
        return Sample(items, indices, probabilities, weights, mask, age)

    def size(self, state: S) -> jax.Array:
        """Number of drawable items, int32 [].

        Examples:
          >>> buffer = jr.ReplayBuffer(capacity=4)
          >>> items = jnp.array([10, 20, 30])
          >>> int(buffer.size(buffer.add(buffer.init(items), items)))
          3
        """
        alive(state.ring.size)
        return copy(self._num_drawable(state))  # a later call may donate the state

    @reads_state
    def is_empty(self, state: S) -> jax.Array:
        """True if no item is drawable, bool [].

        Examples:
          >>> buffer = jr.ReplayBuffer(capacity=4)
          >>> # `init` ignores the values.
          >>> bool(buffer.is_empty(buffer.init(jnp.array([10, 20, 30]))))
          True
        """
        return jnp.logical_not(ring.at_least(self._num_drawable(state), 1))

    @reads_state
    def can_sample(self, state: S, batch_size: int = 1) -> jax.Array:
        """True if at least `batch_size` items are drawable, bool [].

        Examples:
          >>> buffer = jr.ReplayBuffer(capacity=4)
          >>> items = jnp.array([10, 20, 30])
          >>> state = buffer.add(buffer.init(items), items)
          >>> bool(buffer.can_sample(state, 3)), bool(buffer.can_sample(state, 4))
          (True, False)
        """
        batch_size = check_integer("batch_size", batch_size, 0, 2**31 - 1, "a number of items")
        return ring.at_least(self._num_drawable(state), batch_size)

    def _num_drawable(self, state: S) -> jax.Array:
        """Number of drawable items, int32 []; without the items that are spent (see `max_uses`)."""
        return _uses.number(state.uses, state.ring.size)


def _kind(part: Any) -> Any:
    """Structure and sizes of a part of a state, without the fan-out of trees, which differs between backends."""

    def sizes(x: Any) -> Any:
        return (x.capacity, x.minima is None, x.maxima is None) if isinstance(x, SumTree) else jnp.shape(x)

    leaves, treedef = jax.tree.flatten(part, is_leaf=lambda x: isinstance(x, SumTree))
    return treedef, [*map(sizes, leaves)]


@functools.cache
def _kind_of_states(buffer: Any) -> Any:
    """The `_kind` of a buffer's samplers and uses, cached as every trace of a method needs it."""
    return _kind(jax.eval_shape(lambda: (buffer.sampler.init(buffer._num_slots), _uses.init(buffer))))
