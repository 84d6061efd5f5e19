"""Reward tracing: from a stream of steps to n-step transitions.

A window of n steps opens at every step and closes early at the first step that ends the episode. Terminated and
truncated steps are distinguished (Pardo et al. 2018, Time Limits in Reinforcement Learning, section 3): both close the
window, but only termination stops the bootstrap.
"""

import dataclasses
import functools
import inspect
from collections.abc import Callable
from typing import Any, Concatenate, ParamSpec, TypeVar

import jax
import jax.numpy as jnp
from flax import struct

from jaxreplay._common import calls, checks, layouts, ring, shown, xla
from jaxreplay.transitions import _windows
from jaxreplay.transitions._batch import TransitionBatch
from jaxreplay.transitions._windows import TracerSteps

P = ParamSpec("P")
R = TypeVar("R")


@struct.dataclass
class NStepState(shown.Shown):
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

    def _contents(self) -> tuple[str, dict[str, Any]]:
        return shown.held(self.count, self.steps.r.shape[-2], "steps")[0], vars(self.steps)


TRACED_GAMMA = "make the tracer with gamma=None and pass it to add and flush, or to n_step_transitions"
TRACED_N = "n_step_transitions and sequence_transitions take a traced n with max_n"


def _takes_a_step(
    step: Callable[P, TracerSteps], method: Callable[[Any, TracerSteps], R]
) -> Callable[Concatenate[Any, P], R]:
    """A method of a `TracerSteps` as one that takes its fields, in a call that says what a step is."""
    fields = inspect.signature(step)

    @functools.wraps(method)
    def call(self: Any, *arguments: P.args, **named: P.kwargs) -> R:
        try:
            fields.bind(*arguments, **named)
        except TypeError as error:
            takes = f"it takes {', '.join(fields.parameters)}; without time limits give done, jnp.zeros_like(done)"
            raise TypeError(f"{type(self).__name__}.{method.__name__}(): {error}; {takes}.") from None
        return method(self, step(*arguments, **named))

    own = inspect.signature(method)
    parameters = [own.parameters["self"], *fields.parameters.values()]
    call.__signature__ = own.replace(parameters=parameters)  # pyright: ignore[reportAttributeAccessIssue]
    return call


def _with_gamma(_: Any, *arguments: Any) -> tuple[Any, ...]:
    """Arguments of a method whose last one is gamma, checked."""
    return *arguments[:-1], _windows.check_gamma(arguments[-1])


@checks.config
class NStep(metaclass=shown.Kind):
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

    @functools.partial(_takes_a_step, TracerSteps)
    def init(self, step: TracerSteps) -> NStepState:
        """State of an empty tracer for steps like this one, given as arrays or `jax.ShapeDtypeStruct`.

        It takes the arguments of a step that `add` takes.

        Raises:
          ValueError: a leading axis is not `num_envs`, or there is not one number or flag per environment.

        Examples:
          >>> tracer, obs, no = jr.NStep(n=2, gamma=0.5), np.array([1.0]), np.array([False])
          >>> # A step: s, a, r, terminated, truncated, s_next.
          >>> state = tracer.init(obs, obs, obs, no, no, obs)
          >>> state.steps.r.shape
          (2, 1)
        """
        spec = jax.eval_shape(functools.partial(_windows.as_steps, num_envs=self.num_envs), step)
        window = self.n + self.next_action  # with `next_action` also the step after it
        steps = jax.tree.map(lambda leaf: xla.full((window, *leaf.shape), 0, leaf.dtype), spec)
        return NStepState(steps, xla.full((), 0, jnp.int32), xla.full((), 0, jnp.int32))

    @functools.partial(_takes_a_step, TracerSteps)
    def spec(self, step: TracerSteps) -> TransitionBatch:
        """Shapes and dtypes of the transitions that `add` emits for steps like this one, for `ReplayBuffer.init`.

        Raises:
          ValueError: as for `init`, or there are both a gamma and a discount.

        Examples:
          >>> tracer, obs, no = jr.NStep(n=2, gamma=0.5), np.array([1.0]), np.array([False])
          >>> state = jr.ReplayBuffer(capacity=4).init(tracer.spec(obs, obs, obs, no, no, obs))
          >>> state.storage.Rn.shape
          (4,)
        """

        def emitted(step: TracerSteps) -> TransitionBatch:
            gamma = 1.0 if step.discount is None else None
            return self.add(self.init(**vars(step)), **vars(step), gamma=gamma)[1]

        return jax.eval_shape(emitted, step)

    @calls.method(before=_with_gamma)
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
        discount: Any = None,
        gamma: Any = None,
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
        given = TracerSteps(s, a, r, terminated, truncated, s_next, logp, w, mask=mask, discount=discount)
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
        count = xla.read_once(jnp.where(state.count >= window - 1, window, state.cursor + 1))
        filled = jnp.where(count == window, window, 0)[None]
        batch = _windows.transitions(self, steps, oldest[None], filled, lag, None, gamma)
        batch = jax.tree.map(lambda leaf: leaf[0], batch)
        return NStepState(kept, oldest, count), batch, batch.valid

    @calls.method(before=_with_gamma)
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
        window = len(state.steps.mask)
        starts = jnp.arange(window - self.n, window, dtype=jnp.int32)
        # Row 0 is empty, or holds a step whose transition has been emitted. The mask of an empty row is False.
        first, count = ring.wrap_excess(state.cursor + starts, window), jnp.where(starts > 0, window - starts, 0)
        batch = _windows.transitions(self, state.steps, first, count, _windows.lags_if_few(window, first), None, gamma)
        batch = layouts.merge_axes(batch)
        return jax.tree.map(jnp.zeros_like, state), batch, batch.valid

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
