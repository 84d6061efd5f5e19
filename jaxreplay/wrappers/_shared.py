"""Shared: one buffer that several threads use."""

import contextlib
import functools
import math
import types
from collections.abc import Iterator
from typing import Any, Self

import jax
import numpy as np

from jaxreplay._common import checks, ring, xla
from jaxreplay.buffers._base import Buffer
from jaxreplay.buffers._sample import Sample, sample_arguments
from jaxreplay.buffers._shards import room, whole_of
from jaxreplay.wrappers._limiter import Limiter
from jaxreplay.wrappers._mixture import Mixture
from jaxreplay.wrappers._sharded import Sharded
from jaxreplay.wrappers._turns import Closed, Turn, Turns


class Shared:
    """One buffer for threads that act and threads that learn.

    It owns the state, and replaces it in each call. It has the methods `add`, `sample`, `update`, `set`, `clear`,
    `size` and `end_streams` of the buffer, without their argument `state`, and any thread may call them at any time.
    They dispatch work and return; they do not wait for the device, except `size`. A handle names one insertion, so an
    update of items that other threads have overwritten meanwhile has no effect. For all else, such as `jaxreplay.save`
    and `diagnostics`, take the state by `state`.

    **Waiting.** The first draw waits until `min_size` items are drawable. From then on items are counted, and a `ratio`
    makes whoever is ahead wait: ratio * added - drawn stays in [-slack, slack]. A draw of B rows counts as B. An `add`
    counts its rows, also those that a mask or `TransitionBatch.valid` leaves out. For a `SequenceBuffer`, `add` counts
    steps, and a draw counts sequences: to replay each step k times, use the ratio k / sequence_length. Without a ratio
    nothing is counted.

    **One thread.** A limiter needs one thread that adds and another that draws: a single thread that is ahead waits for
    itself. That is an error if the process has no other thread, and otherwise a `TimeoutError` after `timeout`. Inside
    `jax.jit` and in a single thread, use the buffer itself: the program fixes the ratio.

    **Streams.** Steps of two threads must not mix in a stream of a `SequenceBuffer`. Give each thread a source of a
    `Mixture` and let it add through `actor`.

    **Devices.** The state stays on its devices. Move arrays that are committed to other devices there, by
    `jax.device_put`; JAX itself moves the others, such as arrays that are made under `jax.default_device`. NumPy arrays
    are copied, and may be overwritten after the call. If the devices also run other programs that communicate, dispatch
    these in a block of `state`, so that all devices run all programs in one order.

    **The end.** `with shared:` closes it at the end of the block, and `with shared.worker():` if the block raises an
    error. The end of the main thread closes it too. In a closed `Shared` all calls raise `Closed`, except `size` and a
    block of `state` that only reads. Once all blocks `worker` have ended, calls that would wait raise `Closed`.

    **Interrupts.** In the main thread, handlers of signals, such as the one of Ctrl-C, run before or after a call or a
    block of `state`, or while it waits for its turn. So an interrupt loses no state and leaves no lock held.

    Args:
      buffer: a `ReplayBuffer`, `SequenceBuffer`, `ReservoirBuffer`, `Mixture` or `Sharded`.
      state: its state, from `init`, `restore` or the calls of one thread; do not use it again.
      ratio: items drawn for each item added, once `min_size` items are drawable; None for no limit.
      min_size: drawable items needed for the first draw, from 1 to what the buffer can hold. After that, rows without
        an item have handle -1, as in `sample` under `jit`.
      slack: how many draws either side may be ahead; at least (ratio * a + d) / 2 for additions of at most a items and
        draws of at most d. None for ratio * a + d, of the largest calls so far.
      added, drawn: counts of an earlier `Shared` with this ratio, to go on from a checkpoint.

    Raises:
      ValueError: an argument is invalid, or `state` is not a state of the buffer or was donated.

    Examples:
      >>> import threading
      >>> def act(shared):
      ...     with shared.worker():
      ...         while True:  # until it is closed
      ...             shared.add(items)
      >>> with jr.Shared(buffer, state, ratio=4) as shared:
      ...     threading.Thread(target=act, args=(shared,)).start()
      ...     for new_key in jax.random.split(key, 10):
      ...         sample = shared.sample(new_key, batch_size=6)
      >>> abs(4 * shared.added - shared.drawn) <= shared.slack
      True
    """

    def __init__(
        self,
        buffer: Buffer[Any] | Sharded[Any] | Mixture,
        state: Any,
        *,
        ratio: float | None = None,
        min_size: int = 1,
        slack: float | None = None,
        added: int = 0,
        drawn: int = 0,
    ):
        if not isinstance(buffer, Buffer | Sharded | Mixture):
            raise ValueError(f"buffer={checks.brief(buffer)}: must be a buffer of jaxreplay, Sharded or Mixture.")
        number = checks.optional(checks.check_number)
        ratio = number("ratio", ratio, 1e-9, 1e9, "the number of items drawn for each item added")
        slack = number("slack", slack, 0, 1e18, "the number of draws that either side may be ahead")
        if slack is not None and ratio is None:
            raise ValueError(f"slack={slack:g}: needs a ratio.")
        added = checks.check_integer("added", added, 0, 2**63, "the number of items added before")
        drawn = checks.check_integer("drawn", drawn, 0, 2**63, "the number of items drawn before")
        xla.explain_donated(state, None)
        buffer._check_state(state)
        self.buffer: Any = buffer
        self.min_size = checks.check_integer("min_size", min_size, 1, room(buffer), "the items for the first draw")
        self._turns = Turns(state, buffer.size, self.min_size, Limiter(ratio, slack, added, drawn))

    def __repr__(self) -> str:
        counts = "" if self.ratio is None else f", ratio={self.ratio:g}, added={self.added:,}, drawn={self.drawn:,}"
        return f"Shared({self.buffer!r}{counts}{', closed' * self.closed})"

    @property
    def ratio(self) -> float | None:
        """Items drawn for each item added; None for no limit."""
        return self._turns.limiter.ratio

    @property
    def slack(self) -> float:
        """Number of draws that either side may be ahead now."""
        return self._turns.limiter.slack

    @property
    def added(self) -> int:
        """Number of items added since `min_size` items were drawable."""
        return self._turns.limiter.added if self._turns.limiter.began else 0

    @property
    def drawn(self) -> int:
        """Number of items drawn."""
        return self._turns.limiter.drawn

    @property
    def closed(self) -> bool:
        """True if it is closed."""
        return self._turns.is_closed()

    def add(self, *args: Any, timeout: float | None = None, **kwargs: Any) -> None:
        """Call the buffer's `add`; wait while the additions are ahead.

        Args:
          *args, **kwargs: as the buffer's `add` takes them, without the state. For a `Mixture` the source is first. All
            rows count for the ratio, masked or not.
          timeout: seconds to wait at most; None for no limit.

        Raises:
          TimeoutError: it has waited so long; nothing was added.
          Closed: it is closed.
          ValueError: as the buffer's `add`; or `slack` is too small for these items.

        Examples:
          >>> shared = jr.Shared(buffer, buffer.init(items))
          >>> shared.add(items, mask=np.array([True, False, True]))
          >>> shared.size()
          2
        """
        added = 0 if self.ratio is None else self._num_rows(*args, **kwargs)
        with Turn(self._turns, "add", added, 0, timeout) as turn:
            turn.state = self.buffer.add(turn.state, *args, **kwargs)

    def _num_rows(self, *args: Any, **kwargs: Any) -> int:
        """Number of rows that these arguments of `add` have; 0 if `add` rejects them."""
        try:
            buffer = self.buffer
            if isinstance(buffer, Mixture):
                buffer = buffer.buffers[args[0] if args else kwargs["source"]]
                args = args[1:]
            items = args[0] if args else kwargs.get("items", kwargs.get("steps"))
            return math.prod(np.shape(jax.tree.leaves(items)[0])[: whole_of(buffer)._batch_axes])
        except (LookupError, TypeError, ValueError):
            return 0

    def actor(self, source: int) -> types.SimpleNamespace:
        """An object whose `add(items, ...)` adds to one source of a `Mixture`, without waiting for other sources.

        With a source for each thread that acts, the streams of a `SequenceBuffer` advance independently. Its
        `end_streams(mask=)` closes them, such as when its environment has failed and was made anew.

        Raises:
          ValueError: the buffer is not a `Mixture`, or has no such source.

        Examples:
          >>> mixture = jr.Mixture(buffers=(sequences, sequences), weights="joint")  # two actors
          >>> shared = jr.Shared(mixture, mixture.init(steps))
          >>> shared.actor(0).add(steps, ends=ends)
          >>> shared.actor(1).add(steps + 6, ends=ends)
          >>> (shared.sample(key, batch_size=2).items > 6).tolist()
          [[False, False], [True, True]]
        """
        if not isinstance(self.buffer, Mixture):
            raise ValueError("actor: the buffer is no Mixture; use jr.Mixture(buffers=(buffer,) * k, weights='joint').")
        source = checks.check_integer("source", source, 0, len(self.buffer.buffers) - 1, "the position of a buffer")
        methods = {"add": self.add, "end_streams": self.end_streams}
        return types.SimpleNamespace(**{name: functools.partial(call, source) for name, call in methods.items()})

    def sample(
        self,
        key: jax.Array,
        batch_size: int,
        *,
        beta: Any = None,
        max_age: jax.Array | int | None = None,
        timeout: float | None = None,
    ) -> Sample:
        """Call the buffer's `sample`; wait for the first `min_size` items, and while the draws are ahead.

        Raises:
          TimeoutError: it has waited `timeout` seconds; nothing was drawn.
          Closed: it is closed.
          ValueError: as the buffer's `sample`; or `slack` is too small for this batch.

        Examples:
          >>> shared = jr.Shared(buffer, state)
          >>> shared.sample(key, batch_size=3).items.tolist()
          [10, 20, 30]
        """
        arguments = sample_arguments(self.buffer, key, batch_size, beta, max_age)
        with Turn(self._turns, "sample", 0, arguments[1], timeout) as turn:
            return self.buffer.sample.dispatch(self.buffer, turn.state, *arguments)

    def update(self, indices: jax.Array, td_errors: jax.Array) -> None:
        """Call the buffer's `update`.

        Examples:
          >>> shared = jr.Shared(buffer, state)
          >>> shared.update(np.array([0, 1]), np.array([0.0, 0.0]))
          >>> shared.sample(key, batch_size=3).items.tolist()
          [30, 30, 30]
        """
        with Turn(self._turns, "update") as turn:
            turn.state = self.buffer.update(turn.state, indices, td_errors)

    def set(self, indices: jax.Array, values: Any, *, mask: jax.Array | None = None) -> None:
        """Call the buffer's `set`.

        Examples:
          >>> shared = jr.Shared(buffer, state)
          >>> shared.set(np.array([0]), np.array([11]))
          >>> shared.sample(key, batch_size=3).items.tolist()
          [11, 20, 30]
        """
        with Turn(self._turns, "set") as turn:
            turn.state = self.buffer.set(turn.state, indices, values, mask=mask)

    def clear(self) -> None:
        """Call the buffer's `clear`. Until items are added, draws have handles -1. The counts for `ratio` go on.

        Examples:
          >>> shared = jr.Shared(buffer, state)
          >>> shared.clear()
          >>> shared.size()
          0
        """
        with Turn(self._turns, "clear") as turn:
            turn.state = self.buffer.clear(turn.state)

    def end_streams(self, *args: Any, **kwargs: Any) -> None:
        """Call the buffer's `end_streams`. For a `Mixture` the first argument is the source.

        Examples:
          >>> shared = jr.Shared(sequences, sequences.init(steps))
          >>> shared.add(steps, ends=ends)
          >>> shared.end_streams()  # the environments were reset
          >>> shared.add(steps + 100, ends=ends)
          >>> shared.size()  # [1, 2], [2, 3], [101, 102] and [102, 103]
          4
        """
        with Turn(self._turns, "end_streams") as turn:
            turn.state = self.buffer.end_streams(turn.state, *args, **kwargs)

    def size(self) -> int:
        """Number of drawable items. Waits for the device, without the lock.

        Examples:
          >>> jr.Shared(buffer, state).size()
          3
        """
        with Turn(self._turns, "size", counts=False) as turn:
            size = self.buffer.size(turn.state)
        return int(xla.on_host(size))

    def state(self, *, added: int = 0, drawn: int = 0, timeout: float | None = None) -> Turn:
        """A block that alone uses the state, for a whole jitted step or a checkpoint.

        All other threads wait until the block ends, so wait for the device in it only to save. Assign the new state to
        `cell.state`. If the block raises an error before that, state and counts are unchanged. After `close` a block
        without counts still reads the state.

        Args:
          added: number of items that the block adds; it waits for its turn, as `add` does.
          drawn: number of items that it draws, likewise.
          timeout: seconds to wait at most; None for no limit.

        Raises:
          TimeoutError: it has waited so long.
          Closed: it is closed, and the block counts or replaces the state.
          ValueError: `slack` is too small for these counts, or `cell.state` is not a state of the buffer.
          RuntimeError: the state was donated and not replaced; this closes the `Shared`.

        Examples:
          >>> shared = jr.Shared(buffer, state)
          >>> with shared.state(added=3) as cell:
          ...     cell.state = buffer.add(cell.state, items + 5)
          ...     newest = buffer.newest(cell.state, 1)
          >>> shared.size(), newest.tolist()
          (4, [5])
        """
        added = checks.check_integer("added", added, 0, ring.MAX_CAPACITY, "the number of items that the block adds")
        drawn = checks.check_integer("drawn", drawn, 0, ring.MAX_CAPACITY, "the number of items that the block draws")
        return Turn(self._turns, "state", added, drawn, timeout, counts=added + drawn > 0)

    @contextlib.contextmanager
    def worker(self) -> Iterator[Self]:
        """A block for the body of a thread, so that no other thread waits for it after its end.

        An error in it closes the `Shared`. If it ends without an error and no other block is left, calls that wait for
        other threads without a `timeout` raise `Closed`, until another block begins. Other calls go on. A thread that
        starts such threads later should be in a block of its own until then.

        The block ends without an error if the `Shared` was closed without one, or by a `KeyboardInterrupt`.

        Examples:
          >>> import contextlib
          >>> shared = jr.Shared(buffer, state)
          >>> with contextlib.suppress(OSError), shared.worker():
          ...     raise OSError("the robot is gone")
          >>> shared.closed
          True
        """
        try:
            self._turns.count_workers(1)
            yield self
            self._turns.count_workers(-1)  # an error closes it
        except Closed as error:
            self.close(error.__cause__)
            if isinstance(error.__cause__, Exception):
                raise
        except BaseException as error:
            self.close(error)
            raise

    def close(self, error: BaseException | None = None) -> None:
        """Close it: calls that wait, and later ones, raise `Closed`, caused by `error`. Only the first call counts.

        Examples:
          >>> shared = jr.Shared(buffer, state)
          >>> shared.close()
          >>> shared.add(items)
          Traceback (most recent call last):
            ...
          jaxreplay.wrappers._turns.Closed: add: closed by thread MainThread.
        """
        self._turns.close(error)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, _: Any, error: BaseException | None, __: Any) -> None:
        self.close(error)
