"""Reward tracing: from a stream of steps to n-step transitions.

A window of n steps opens at every step and closes early at the first step that ends the episode. Terminated and
truncated steps are distinguished (Pardo et al. 2018, Time Limits in Reinforcement Learning, section 3): both close the
window, but only termination stops the bootstrap.
"""

import dataclasses
import functools
import inspect
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import jax
import jax.numpy as jnp
from flax import struct

from jaxreplay._common import calls, checks, layouts, ring, xla
from jaxreplay.transitions import _windows
from jaxreplay.transitions._batch import TransitionBatch
from jaxreplay.transitions._windows import TracerSteps

P = ParamSpec("P")
R = TypeVar("R")


@struct.dataclass
class NStepState:
    """State of a tracer: a ring buffer of the last steps.

    Attributes:
      steps: leaves [window, num_envs, ...].
      cursor: int32 [], the row that the next step is written to.
      count: int32 [], number of rows that hold a step.

    Examples:
      >>> obs, no = np.array([1.0]), np.array([False])
      >>> state = jr.NStep(n=2, gamma=0.5).init(obs, obs, obs, no, no, obs)
      >>> isinstance(state, jr.transitions.NStepState), int(state.count)
      (True, 0)
    """

    steps: TracerSteps
    cursor: jax.Array  # []
    count: jax.Array  # []


TRACED_GAMMA = "make the tracer with gamma=None and pass it to add and flush, or to n_step_transitions"
TRACED_N = "n_step_transitions and sequence_transitions take a traced n with max_n"


def _takes_a_step(method: Callable[P, R]) -> Callable[P, R]:
    """Decorator: a call that gives done, not terminated and truncated, raises a `TypeError` that says so."""
    signature = inspect.signature(method)
    num_needed = sum(parameter.default is inspect.Parameter.empty for parameter in signature.parameters.values())

    @functools.wraps(method)
    def call(*arguments: P.args, **named: P.kwargs) -> R:
        if "done" in named or ("s_next" not in named and len(arguments) == num_needed - 1):
            found = "got done" if "done" in named else "s_next is missing, got 5 arguments of a step"
            rule = "terminated and truncated, not done; without time limits give done, jnp.zeros_like(done)"
            raise TypeError(f"{type(arguments[0]).__name__}.{method.__name__}(): {found}, expected {rule}.")
        return method(*arguments, **named)

    return call


@checks.config
class NStep:
    """Traces n-step transitions of `num_envs` environments that step in lockstep and reset automatically.

    The call of `add` for step t + n - 1 always emits the transition that starts at step t. So every step is emitted
    once and in order, without a flush at the end of an episode. The window of the transition has m <= n steps; it ends
    at a terminated or truncated step:

      Rn = sum_{k<m} gamma^k R_{t+k};  In = 0 if the last step is terminated, else gamma^m;  S_next = its `s_next`.

    Steps may have discounts of their own (dm_env; a model's probability to continue; an option's duration). The product
    of the first k in the window then replaces gamma^k. A discount of 0 ends no window: later rewards count 0, and `In`
    is 0. Products of equal discounts are the powers of a traced gamma, bit for bit.

    Attributes:
      n: length of the longest window in steps, at least 1.
      gamma: discount in [0, 1]; None to pass one to `add` and `flush`, which may be traced and mapped by `jax.vmap`, or
        `discount` to `init` and `add`.
      num_envs: size of the leading axis of every argument.
      next_action: also fill `A_next` and `logP_next` (SARSA), which delays transitions by one more step. A truncated
        window has no next action and is emitted as not valid.
      record_extra_info: fill `extra_info` with the window itself: `states`, `actions`, `rewards`, `dones`,
        `log_props`, `weights` (the last two None without `logp` and `w`), and `discounts` if steps have any, leaves
        [B, n, ...]. Rows after the end of the window repeat its last step and have `dones` True.

    Examples:
      >>> tracer, obs, no = jr.NStep(n=2, gamma=0.5), np.array([1.0]), np.array([False])
      >>> state = tracer.init(obs, obs, obs, no, no, obs)
      >>> state, _, _ = tracer.add(state, obs, obs, obs, no, no, obs + 1)
      >>> # Cut off by a time limit.
      >>> state, batch, valid = tracer.add(state, obs + 1, obs, obs, no, ~no, obs + 2)
      >>> # Target: Rn + In * Q(S_next, ...)
      >>> float(batch.Rn[0]), float(batch.In[0]), float(batch.S_next[0])
      (1.5, 0.25, 3.0)
    """

    n: int = checks.field(checks.check_integer, 1, 2**31 - 1, "the number of steps in a window", TRACED_N)
    gamma: float | None = checks.field(checks.optional(checks.check_number), 0, 1, "it is a discount", TRACED_GAMMA)
    num_envs: int = checks.field(checks.check_integer, 1, 2**31 - 1, "the number of environments", default=1)
    next_action: bool = checks.field(checks.check_bool, "whether to fill A_next", default=False)
    record_extra_info: bool = checks.field(checks.check_bool, "whether to fill extra_info", default=False)

    @_takes_a_step
    def init(
        self,
        s: Any,
        a: Any,
        r: Any,
        terminated: Any,
        truncated: Any,
        s_next: Any,
        logp: Any = None,
        w: Any = None,
        *,
        discount: Any = None,
    ) -> NStepState:
        """State of an empty tracer for steps like this one, given as arrays or `jax.ShapeDtypeStruct`.

        Raises:
          ValueError: a leading axis is not `num_envs`, or there is not one number or flag per environment.

        Examples:
          >>> tracer, obs, no = jr.NStep(n=2, gamma=0.5), np.array([1.0]), np.array([False])
          >>> # A step: s, a, r, terminated, truncated, s_next.
          >>> state = tracer.init(obs, obs, obs, no, no, obs)
          >>> state.steps.r.shape
          (2, 1)
        """
        step = TracerSteps(s, a, r, terminated, truncated, s_next, logp=logp, w=w, discount=discount)
        spec = jax.eval_shape(functools.partial(_windows.as_steps, num_envs=self.num_envs), step)
        window = self.n + self.next_action  # with `next_action` also the step after it
        steps = jax.tree.map(lambda leaf: xla.full((window, *leaf.shape), 0, leaf.dtype), spec)
        return NStepState(steps, xla.full((), 0, jnp.int32), xla.full((), 0, jnp.int32))

    @_takes_a_step
    def spec(
        self,
        s: Any,
        a: Any,
        r: Any,
        terminated: Any,
        truncated: Any,
        s_next: Any,
        logp: Any = None,
        w: Any = None,
        *,
        discount: Any = None,
    ) -> TransitionBatch:
        """Shapes and dtypes of the transitions that `add` emits for steps like this one, for `ReplayBuffer.init`.

        Raises:
          ValueError: as for `init`, or there are both a gamma and a discount.

        Examples:
          >>> tracer, obs, no = jr.NStep(n=2, gamma=0.5), np.array([1.0]), np.array([False])
          >>> state = jr.ReplayBuffer(capacity=4).init(tracer.spec(obs, obs, obs, no, no, obs))
          >>> state.storage.Rn.shape
          (4,)
        """
        step = (s, a, r, terminated, truncated, s_next, logp, w)

        def emitted(step: Any, discount: Any) -> TransitionBatch:
            gamma = 1.0 if discount is None else None
            return self.add(self.init(*step, discount=discount), *step, discount=discount, gamma=gamma)[1]

        return jax.eval_shape(emitted, step, discount)

    @_takes_a_step
    def add(
        self,
        state: NStepState,
        s: Any,
        a: Any,
        r: Any,
        terminated: Any,
        truncated: Any,
        s_next: Any,
        logp: Any = None,
        w: Any = None,
        *,
        mask: Any = None,
        gamma: Any = None,
        discount: Any = None,
    ) -> tuple[NStepState, TransitionBatch, jax.Array]:
        """Add one step of every environment and emit the transitions that started n - 1 steps ago.

        Args:
          state: the state of the tracer.
          s: pytree [num_envs, ...], observations before the step.
          a: pytree [num_envs, ...], actions.
          r: number [num_envs], rewards.
          terminated: bool [num_envs] (or numbers; nonzero is True), True if the step reached a terminal state.
          truncated: the same, True if the episode was cut off at this step; ignored where terminated.
          s_next: pytree [num_envs, ...], observations after the step. At the end of an episode this is its final
            observation, not the first one after the reset.
          logp: float [num_envs] or None, log-propensities of the actions.
          w: float [num_envs] or None, weights; they become `W` of the transitions.
          mask: bool [num_envs] or None, False if an environment made no step. Its arguments are then ignored, no
            transition starts at this step, and open windows end before it, as if truncated. Gymnasium's vector
            environments need this for the call after the end of an episode, which only resets.
          gamma: discount of the transitions emitted now, instead of the tracer's: a float in [0, 1], or an array [] or
            [num_envs], clipped if traced. Powers are computed in float32 or its wider dtype, the tracer's in float64.
          discount: float [num_envs] or None, discounts of this step, clipped to [0, 1], instead of gamma. Either `init`
            and all calls of `add` get one, or none does.

        Returns:
          the new state; TransitionBatch [num_envs]; and its `valid`, bool [num_envs], False for rows that are not
          transitions, which `add` of a buffer skips.

        Raises:
          ValueError: a leaf differs from the one passed to `init` or is not as above (the message names it), the
            discount is missing, twice there or out of range, or the state is another tracer's.

        Examples:
          >>> tracer, obs, no = jr.NStep(n=2, gamma=0.5), np.array([1.0]), np.array([False])
          >>> state = tracer.init(obs, obs, obs, no, no, obs)
          >>> # The window is still open.
          >>> state, _, valid = tracer.add(state, obs, obs, obs, no, no, obs + 1)
          >>> bool(valid[0])
          False
          >>> # The second step terminates.
          >>> state, batch, valid = tracer.add(state, obs + 1, obs, obs, ~no, no, obs + 2)
          >>> bool(valid[0]), float(batch.Rn[0]), float(batch.In[0])
          (True, 1.5, 0.0)
        """
        step = TracerSteps(s, a, r, terminated, truncated, s_next, logp=logp, w=w, mask=mask, discount=discount)
        state, batch = self._add(state, step, _windows.check_gamma(gamma))
        return state, batch, batch.valid

    @calls.method()
    def _add(self, state: NStepState, given: Any, gamma: Any) -> tuple[NStepState, TransitionBatch]:
        step = _windows.as_steps(given, num_envs=self.num_envs)
        checks.check_like(step, state.steps, 0, 1, "the tracer")
        window = len(state.steps.mask)
        oldest = ring.wrap_excess(state.cursor + 1, window)
        lag = _windows.lags_if_few(window, oldest[None])

        def written(rows: jax.Array, new: jax.Array) -> jax.Array:  # at the cursor, which is the newest row
            if lag is None or rows.nbytes > _windows.FEW_BYTES:
                return jax.lax.dynamic_update_index_in_dim(rows, new, state.cursor, 0)
            return jnp.where(lag.reshape(-1, *[1] * new.ndim) == window - 1, new, rows)

        if window == 1:  # the step is emitted at once, so the state needs no copy of it
            kept, steps = state.steps, jax.tree.map(lambda leaf: leaf[None], step)
        else:
            kept = steps = jax.tree.map(written, state.steps, step)
        # From the cursor, as a GPU merges kernels that read the same array.
        count = jnp.where(state.count >= window - 1, window, state.cursor + 1)
        filled = jnp.where(count == window, window, 0)[None]
        batch = _windows.transitions(self, steps, oldest[None], filled, lag, None, gamma)
        state = NStepState(kept, oldest, count)
        return state, jax.tree.map(lambda leaf: leaf[0], batch)

    def flush(self, state: NStepState, *, gamma: Any = None) -> tuple[NStepState, TransitionBatch, jax.Array]:
        """Emit the pending transitions, oldest first, as if every environment were truncated here.

        Args:
          state: the state of the tracer.
          gamma: as for `add`; None if the steps have discounts.

        Returns:
          an empty state; TransitionBatch [n * num_envs], time-major; and its `valid`, bool [n * num_envs].

        Raises:
          ValueError: the discount is missing, twice there or out of range, or the state is another tracer's.

        Examples:
          >>> tracer, obs, no = jr.NStep(n=2, gamma=0.5), np.array([1.0]), np.array([False])
          >>> state = tracer.init(obs, obs, obs, no, no, obs)
          >>> state, _, _ = tracer.add(state, obs, obs, obs, no, no, obs + 1)
          >>> state, batch, valid = tracer.flush(state)
          >>> valid.tolist(), float(batch.In[1])  # the pending step, as a window of one step
          ([False, True], 0.5)
        """
        state, batch = self._flush(state, _windows.check_gamma(gamma))
        return state, batch, batch.valid

    @calls.method()
    def _flush(self, state: NStepState, gamma: Any) -> tuple[NStepState, TransitionBatch]:
        window = len(state.steps.mask)
        starts = jnp.arange(window - self.n, window, dtype=jnp.int32)
        # Row 0 is empty, or holds a step whose transition has been emitted.
        pending = (starts >= window - state.count) & (starts > 0)
        first, count = ring.wrap_excess(state.cursor + starts, window), jnp.where(pending, window - starts, 0)
        batch = _windows.transitions(self, state.steps, first, count, _windows.lags_if_few(window, first), None, gamma)
        return jax.tree.map(jnp.zeros_like, state), layouts.merge_axes(batch)

    @calls.method(static=("flush",))
    def _rollout(self, given: Any, flush: bool, n: Any, gamma: Any) -> TransitionBatch:
        """See `n_step_transitions`; `n` and `gamma` as for `_windows.transitions`."""
        steps = _windows.as_steps(given, "a rollout")
        length, window = len(steps.r), self.n + self.next_action
        if 0 < length < window and not flush:
            rule = f"expected at least {window}; give more steps, or flush=True"
            raise ValueError(f"n={self.n}: got a rollout of {length} steps, {rule}.")
        starts = jnp.arange(length, dtype=jnp.int32) - (window - 1)
        if flush:
            pending = jnp.arange(length - self.n, length, dtype=jnp.int32)
            starts = jnp.concatenate([starts, jnp.where(pending <= length - window, -1, pending)])
        if length == 0:  # a row without a step, so that there is one to read
            steps = jax.tree.map(lambda leaf: jax.lax.full((1, *leaf.shape[1:]), 0, leaf.dtype), steps)
        count = jnp.where(starts < 0, 0, length - starts)
        return layouts.merge_axes(_windows.transitions(self, steps, jnp.maximum(starts, 0), count, None, n, gamma))

    @calls.method()
    def _sequences(self, given: Any, n: Any, gamma: Any) -> TransitionBatch:
        """See `jaxreplay.sequence_transitions`; `n` and `gamma` as for `_windows.transitions`."""
        steps = _windows.as_steps(given, "a batch of sequences")
        length = steps.r.shape[1]
        if length <= self.n:
            found = f"{'n' if n is None else 'max_n'}={self.n}: got sequences of {length} rows"
            raise ValueError(f"{found}, expected at least {self.n + 1}: {self.n} steps and the next observation.")
        is_step_next = jnp.pad(steps.mask[:, 1:], ((0, 0), (0, 1)))
        cut = steps.truncated & ~steps.terminated & is_step_next  # the final observation is missing
        steps = dataclasses.replace(steps, mask=steps.mask & ~cut)
        steps = jax.tree.map(lambda leaf: leaf.swapaxes(0, 1), steps)
        starts = jnp.arange(length - self.n, dtype=jnp.int32)
        count = length - (not self.next_action) - starts  # the action of the last row may be a next action
        batch = _windows.transitions(self, steps, starts, count, None, n, gamma)
        return layouts.merge_axes(jax.tree.map(lambda leaf: leaf.swapaxes(0, 1), batch))

    def _check_state(self, state: Any) -> None:
        expected, found = f"one of {[self.n + self.next_action, self.num_envs]} steps", type(state).__name__
        if isinstance(state, NStepState):
            found = f"one of {list(state.steps.mask.shape)} steps"
        if found != expected:
            raise ValueError(f"state: got {found}, expected {expected}, from this tracer; use jax.vmap for a stack.")


@checks.config
class MonteCarlo(NStep):
    """Traces the discounted return to the end of the episode.

    This is `NStep` with n = `max_length`. `In` is 0 if the episode terminated; the transition bootstraps if the episode
    was truncated or is longer than `max_length`. Transitions are emitted `max_length` - 1 steps after they start;
    `flush` emits the pending ones.

    Attributes:
      gamma: discount in [0, 1], or None, as in `NStep`; with None, steps may have discounts.
      max_length: length of the longest return in steps, at least 1.
      num_envs: size of the leading axis of every argument.

    Examples:
      >>> tracer = jr.MonteCarlo(gamma=0.5, max_length=2)
      >>> obs, no = np.array([1.0]), np.array([False])
      >>> state = tracer.init(obs, obs, obs, no, no, obs)
      >>> state, _, _ = tracer.add(state, obs, obs, obs, no, no, obs + 1)
      >>> # Terminated.
      >>> state, batch, valid = tracer.add(state, obs + 1, obs, obs, ~no, no, obs + 2)
      >>> float(batch.Rn[0]), float(batch.In[0])  # the return 1 + 0.5 * 1, and no bootstrap
      (1.5, 0.0)
    """

    n: int = dataclasses.field(init=False, repr=False, compare=False)
    max_length: int = checks.field(checks.check_integer, 1, 2**31 - 1, "the number of steps in a window", TRACED_N)

    def _check_fields(self) -> None:
        object.__setattr__(self, "n", self.max_length)


def n_step_transitions(
    S: Any,
    A: Any,
    R: Any,
    terminated: Any,
    truncated: Any,
    S_next: Any,
    *,
    n: int | jax.Array,
    gamma: float | jax.Array | None = None,
    logP: Any = None,
    W: Any = None,
    mask: Any = None,
    discounts: Any = None,
    next_action: bool = False,
    record_extra_info: bool = False,
    flush: bool = False,
    max_n: int | None = None,
) -> tuple[TransitionBatch, jax.Array]:
    """The transitions of a whole rollout in one vectorised pass.

    The result equals the concatenated results of `NStep.add`, called step by step. Row t * num_envs + e is emitted by
    step t of environment e, so rows of the first n - 1 steps are not valid. With `flush`, the n * num_envs rows of
    `NStep.flush` follow.

    Args:
      S, A, R, terminated, truncated, S_next, logP, W, mask, discounts: as for `NStep.add`, with a leading time axis:
        [T, num_envs, ...].
      n, next_action, record_extra_info: see `NStep`.
      gamma: discount in [0, 1], a number, or an array [] or [num_envs], clipped if traced; None with `discounts`.
      flush: also emit the transitions that are pending at the end of the rollout, as if it were truncated there.
      max_n: None, or the largest `n`, which may then be traced; see `jaxreplay.sequence_transitions`. Rows are for the
        same steps as with n = `max_n`.

    Returns:
      TransitionBatch [T * num_envs] ([(T + n) * num_envs] with `flush`); and its `valid`, bool of the same length.

    Raises:
      ValueError: `n`, `gamma` or `max_n` is out of range, `n` is traced without `max_n`, leading axes differ, there is
        more than one number or flag per step, or not one of `gamma` and `discounts`.

    Examples:
      >>> # Arrays [T, num_envs].
      >>> rewards, no = np.array([[1.0], [1.0], [1.0]]), np.array([[False]] * 3)
      >>> obs, following = np.array([[0.0], [1.0], [2.0]]), np.array([[1.0], [2.0], [3.0]])
      >>> batch, valid = jr.n_step_transitions(
      ...     obs, obs, rewards, no, no, following, n=2, gamma=0.5
      ... )
      >>> valid.tolist()  # the first step emits nothing
      [False, True, True]
      >>> batch.S.tolist()[1:], batch.Rn.tolist()[1:], batch.S_next.tolist()[1:]
      ([0.0, 1.0], [1.5, 1.5], [2.0, 3.0])
    """
    flush = checks.check_bool("flush", flush, "whether to emit pending transitions")
    steps = TracerSteps(S, A, R, terminated, truncated, S_next, logp=logP, w=W, mask=mask, discount=discounts)
    return _extracted(steps, flush, n, gamma, max_n, next_action, record_extra_info)


def sequence_transitions(
    S: Any,
    A: Any,
    R: Any,
    terminated: Any,
    truncated: Any,
    *,
    n: int | jax.Array,
    gamma: float | jax.Array | None = None,
    mask: Any = None,
    logP: Any = None,
    W: Any = None,
    discounts: Any = None,
    next_action: bool = False,
    record_extra_info: bool = False,
    max_n: int | None = None,
) -> tuple[TransitionBatch, jax.Array]:
    """Extract n-step transitions from sequences of a `SequenceBuffer`; next observations are later rows.

    Each of the first L - n of L rows starts the transition that `NStep` traces from the same steps. A sequence of n + 1
    rows yields one transition.

    A truncated step needs its final observation, in the row after it, where `mask` is False (see
    `jaxreplay.SequenceBuffer`). If that row holds a step instead, it belongs to the next episode, and the final
    observation is missing. Windows that reach the truncated step then end right before it and bootstrap from the
    observation that it started from. No transition starts at the truncated step itself.

    With `max_n`, `n` may be traced, as `gamma` may, and annealed within one program: Schwarzer et al. 2023 (Bigger,
    Better, Faster, section 3) decrease n from 10 to 3 and increase gamma from 0.97 to 0.997. Whatever `n` is, each of
    the first L - max_n rows starts the transition of a static `n`. No transition starts at later rows, even if a
    smaller `n` leaves room for it.

    Args:
      S: pytree [B, L, ...], observations; or other data of the rows, such as the values of a recurrent network.
      A: pytree [B, L, ...], actions.
      R: number [B, L], rewards.
      terminated, truncated: bool [B, L]; a number other than 0 is True.
      n: see `NStep`; with `max_n` also a traced integer [], clipped to [1, max_n].
      gamma: discount in [0, 1], a number, or an array [] or [B], clipped if traced; None with `discounts`. Powers of an
        array are computed in float32 or its wider dtype, powers of a number in float64.
      next_action, record_extra_info: see `NStep`; with `max_n`, `extra_info` has leaves [B, max_n, ...].
      mask: bool [B, L], True if the row holds a step; None for all. If the stream has no rows for final observations,
        mask `valid` with `Sample.mask`, and leave it out here.
      logP, W: float [B, L] or None.
      discounts: float [B, L] or None, a discount for each step instead of gamma, as in `NStep`.
      max_n: None, or the largest `n`, a Python integer, which determines all shapes.

    Returns:
      TransitionBatch [B * (L - n)] ([B * (L - max_n)] with `max_n`), sequence by sequence; and its `valid`, bool of the
      same length, False if the row holds no step, or no action follows (`next_action`).

    Raises:
      ValueError: `n`, `gamma` or `max_n` is out of range, `n` is traced without `max_n`, leading axes differ, a leaf
        has more than one number or flag per step, there are fewer than n + 1 (max_n + 1) rows, or there is not one
        of `gamma` and `discounts`.

    Examples:
      >>> rows, no = np.array([[1.0, 2.0, 3.0, 4.0]]), np.array([[False] * 4])
      >>> batch, valid = jr.sequence_transitions(rows, rows, rows, no, no, n=2, gamma=0.5)
      >>> batch.S.tolist(), batch.Rn.tolist(), batch.In.tolist(), batch.S_next.tolist()
      ([1.0, 2.0], [2.0, 3.5], [0.25, 0.25], [3.0, 4.0])
    """
    steps = TracerSteps(S, A, R, terminated, truncated, s_next=None, logp=logP, w=W, mask=mask, discount=discounts)
    return _extracted(steps, None, n, gamma, max_n, next_action, record_extra_info)


def _extracted(
    steps: TracerSteps, flush: bool | None, n: Any, gamma: Any, max_n: Any, next_action: bool, record_extra_info: bool
) -> tuple[TransitionBatch, jax.Array]:
    """Transitions of a rollout, or with `flush` None of sequences; `max_n` is as for `n_step_transitions`."""
    n_now = gamma_now = None  # to replace the tracer's own
    if gamma is None and steps.discount is None:
        raise ValueError("gamma=None: must be a number in [0, 1], or float[num_envs]; or give discounts, one per step.")
    gamma = _windows.check_gamma(gamma)
    if isinstance(gamma, jax.Array):
        gamma, gamma_now = 1.0, gamma
    if max_n is not None:
        max_n = checks.check_integer("max_n", max_n, 1, 2**31 - 1, "the largest number of steps in a window")
        checks.check_integer("n", n, 1, max_n, "at most max_n; or give a larger max_n", traced=None)
        n, n_now = max_n, n
    tracer = NStep(n=n, gamma=gamma, next_action=next_action, record_extra_info=record_extra_info)
    steps = xla.copy_numpy(steps)
    if flush is None:
        batch = tracer._sequences(steps, n_now, gamma_now)
    else:
        batch = tracer._rollout(steps, flush, n_now, gamma_now)
    return batch, batch.valid
