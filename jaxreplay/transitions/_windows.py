"""Windows of n steps over time-major environment steps, and the transitions they yield."""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import lax

from jaxreplay._common import checks, layouts
from jaxreplay.transitions._batch import TransitionBatch


@struct.dataclass
class TracerSteps:
    """Environment steps, time-major; leaves [time, num_envs, ...]."""

    s: Any
    a: Any
    r: jax.Array
    terminated: jax.Array
    truncated: jax.Array
    s_next: Any
    logp: jax.Array | None
    w: jax.Array | None
    mask: jax.Array  # True if there was a step

    @property
    def ends(self) -> jax.Array:
        """True if the step ends its episode."""
        return self.terminated | self.truncated


class _Rollout(NamedTuple):
    """Arguments of functions that take many steps, under their names in messages."""

    S: Any
    A: Any
    R: Any
    terminated: Any
    truncated: Any
    S_next: Any
    logP: Any
    W: Any
    mask: Any


STEP = "per environment"  # there is one reward and one flag of each kind
ROWS = "per step"
NUMBERS = ("r", "logp", "w")  # fields of numbers; the others hold flags, or anything


def as_steps(
    s: Any,
    a: Any,
    r: Any,
    terminated: Any,
    truncated: Any,
    s_next: Any,
    logp: Any,
    w: Any,
    mask: Any = None,
    each: str = STEP,
) -> TracerSteps:
    """`TracerSteps` with rewards in float32 or wider and bool flags; without `mask` every row holds a step.

    Raises:
      ValueError: an argument does not hold numbers or flags as it should; the message names it as in `NStep.add`, or
        with ROWS as in `n_step_transitions`.
    """

    def numbers(field: str, x: Any) -> jax.Array:
        return checks.as_real(_name(field, each), x, f"one {'real number' if field in NUMBERS else 'flag'} {each}")

    r = checks.as_float(numbers("r", r))
    terminated, truncated = (
        numbers(field, x).astype(bool) for field, x in (("terminated", terminated), ("truncated", truncated))
    )
    s, a, s_next = checks.as_arrays((s, a, s_next))
    logp, w = (None if x is None else numbers(field, x) for field, x in (("logp", logp), ("w", w)))
    mask = jnp.ones(r.shape, bool) if mask is None else numbers("mask", mask)
    return TracerSteps(s, a, r, terminated, truncated, s_next, logp, w, mask)


def check_step(step: TracerSteps) -> tuple[int, ...]:
    """Leading axis (num_envs,) of one step in every environment, leaves [num_envs, ...].

    Raises:
      ValueError: leading axes differ, or a leaf does not have one number (or flag) per environment; the message names
        it.
    """
    return _check_axes(step, 1, "a step", STEP)


def check_steps(steps: TracerSteps, what: str) -> tuple[int, ...]:
    """Two leading axes of many steps, such as a rollout; messages name the arguments R, logP and W.

    Raises:
      ValueError: leading axes differ, or a leaf does not have one number (or flag) per step; the message names it.
    """
    return _check_axes(steps, 2, what, ROWS)


def _name(field: str, each: str) -> str:
    """Name of a field of `TracerSteps` in messages."""
    fields = [x.name for x in dataclasses.fields(TracerSteps)]
    return _Rollout._fields[fields.index(field)] if each == ROWS else field


def _check_axes(steps: TracerSteps, num_axes: int, what: str, each: str) -> tuple[int, ...]:
    """Leading axes that all leaves share."""
    named = steps if each == STEP else _Rollout(*[getattr(steps, x.name) for x in dataclasses.fields(TracerSteps)])
    leading = checks.leading_axes(named, num_axes, what)
    for field in ("r", "terminated", "truncated", "logp", "w", "mask"):
        leaf = getattr(steps, field)
        if leaf is not None and leaf.shape != leading:
            number = "number" if field in NUMBERS else "flag"
            raise ValueError(
                f"{_name(field, each)}: got {checks.type_text(leaf.dtype, leaf.shape)}, expected {list(leading)}, "
                f"one {number} {each}; {'squeeze' if leaf.shape[-1] == 1 else 'reduce'} the last axis."
            )
    return leading


class _Windows(NamedTuple):
    """Times of the steps of K windows in every environment.

    Attributes:
      start: int32 [K, 1], time of the first step.
      last: int32 [K, E], time of the last step.
      stop: int32 [K, E], time of the last step before the stream breaks: the end of the episode, the step before a
        missing one, or the last time.
      length: int32 [K, E], number of steps m, at least 1.
      times: int32 [K, max_n, E], times of the steps; after the window's end the last one is repeated.
      inside: bool [K, max_n, E], False for repeated times.
    """

    start: jax.Array
    last: jax.Array
    stop: jax.Array
    length: jax.Array
    times: jax.Array
    inside: jax.Array


def transitions(
    steps: TracerSteps,
    order: jax.Array,
    starts: jax.Array,
    exists: jax.Array,
    *,
    n: int | jax.Array,
    max_n: int,
    gamma: float | jax.Array,
    next_action: bool,
    record_extra_info: bool,
) -> TransitionBatch:
    """Transitions whose windows open at given times.

    Args:
      steps: leaves [T, E, ...], E environments; rows in any order.
      order: int32 [T], the row of each time.
      starts: int32 [K], times; any value where `exists` is False.
      exists: bool [K].
      n, gamma: see `jaxreplay.NStep`; numbers, or traced int32 [] and float [].
      max_n: the largest `n`; `extra_info` has `max_n` steps.
      next_action, record_extra_info: see `jaxreplay.NStep`.

    Returns:
      TransitionBatch [K * E], with `valid`.
    """
    windows = _open_windows(steps, order, starts, n, max_n)
    at = functools.partial(_at_times, order)
    terminated = at(steps.terminated, windows.last)
    rewards = jnp.where(windows.inside, at(steps.r, windows.times), 0)
    Rn, In = _returns(rewards, windows.length, terminated, gamma)
    first = jnp.broadcast_to(windows.start, windows.last.shape)
    valid = exists[:, None] & at(steps.mask, first)
    A_next = logP_next = extra_info = None
    if next_action:
        A_next, logP_next, has_next = _next_actions(steps, order, windows, n)
        valid &= terminated | has_next
    if record_extra_info:
        extra_info = _extra_info(steps, order, windows)
    batch = TransitionBatch(
        S=jax.tree.map(lambda leaf: at(leaf, first), steps.s),
        A=jax.tree.map(lambda leaf: at(leaf, first), steps.a),
        logP=None if steps.logp is None else at(steps.logp, first),
        Rn=Rn,
        In=In,
        S_next=jax.tree.map(lambda leaf: at(leaf, windows.last), steps.s_next),
        A_next=A_next,
        logP_next=logP_next,
        W=None if steps.w is None else at(steps.w, first),
        extra_info=extra_info,
        valid=valid,
    )
    return layouts.merge_axes(batch)


def _open_windows(steps: TracerSteps, order: jax.Array, starts: jax.Array, n: int | jax.Array, max_n: int) -> _Windows:
    """Windows of up to n steps that open at `starts` [K], with `max_n` times."""
    last_time = order.shape[0] - 1
    times = jnp.arange(last_time + 1, dtype=jnp.int32)[:, None]
    start = jnp.clip(starts, 0, last_time)[:, None]
    ends, missing = steps.ends[order], ~steps.mask[order]  # [T, E]
    stops = jnp.where(missing, times - 1, jnp.where(ends, times, last_time))
    stop = lax.cummin(stops, axis=0, reverse=True)[start[:, 0]]
    last = jnp.clip(stop, start, start + n - 1)
    length = last - start + 1
    lag = jnp.arange(max_n, dtype=jnp.int32)[None, :, None]
    return _Windows(start, last, stop, length, jnp.minimum(start[:, None] + lag, last[:, None]), lag < length[:, None])


def _at_times(order: jax.Array, leaf: jax.Array, times: jax.Array) -> jax.Array:
    """`leaf` [T, E, ...] at `times` [K, ..., E]; returns [K, ..., E, ...]."""
    # Mapped over environments: if they were indexed too, environments on several devices would exchange their steps.
    by_env = jax.vmap(lambda column, rows: column[rows], in_axes=(1, -1), out_axes=times.ndim - 1)
    return by_env(leaf, order[times])


def _returns(
    rewards: jax.Array, length: jax.Array, terminated: jax.Array, gamma: float | jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Partial returns and bootstrap factors, [K, E], of windows with `rewards` [K, max_n, E] (0 outside)."""
    max_n = rewards.shape[1]
    powers = jnp.asarray(_powers(gamma, max_n + 1), rewards.dtype)
    Rn = jnp.sum(powers[None, :max_n, None] * rewards, axis=1)
    return Rn, jnp.where(terminated, 0, powers[length])


def _powers(gamma: float | jax.Array, count: int) -> Any:
    """gamma^0, gamma^1, ..., gamma^(count - 1): in float64 for a number, in float32 or wider for a traced float []."""
    if not isinstance(gamma, jax.Array):
        return np.float64(gamma) ** np.arange(count)
    gamma = checks.as_float(gamma)
    return gamma ** jnp.arange(count, dtype=gamma.dtype)  # a product of products would round count times


def _next_actions(
    steps: TracerSteps, order: jax.Array, windows: _Windows, n: int | jax.Array
) -> tuple[Any, jax.Array | None, jax.Array]:
    """Next actions and their log-propensities, [K, E, ...], 0 if there is none; and True if there is one, [K, E]."""
    last_time = order.shape[0] - 1
    at, start = functools.partial(_at_times, order), windows.start
    after = jnp.broadcast_to(jnp.minimum(start + n, last_time), windows.last.shape)
    # No episode ends before start + n, and no step is missing up to and including it.
    has_next = ~at(steps.ends, windows.last) & (start + n <= windows.stop + 1) & at(steps.mask, after)
    has_next &= start + n <= last_time
    A_next, logP_next = jax.tree.map(lambda leaf: _where_rows(has_next, at(leaf, after)), (steps.a, steps.logp))
    return A_next, logP_next, has_next


def _extra_info(steps: TracerSteps, order: jax.Array, windows: _Windows) -> dict[str, Any]:
    """Steps of the windows, leaves [K, E, max_n, ...]."""
    at = functools.partial(_at_times, order)
    window = {
        "states": steps.s,
        "actions": steps.a,
        "rewards": steps.r,
        "log_props": steps.logp,
        "weights": steps.w,
    }
    extra_info = jax.tree.map(lambda leaf: jnp.moveaxis(at(leaf, windows.times), 1, 2), window)
    dones = at(steps.ends, windows.times) | ~windows.inside
    extra_info["dones"] = jnp.moveaxis(dones, 1, 2)
    return extra_info


def _where_rows(condition: jax.Array, x: jax.Array) -> jax.Array:
    """`x` [K, E, ...], 0 where `condition` [K, E] is False."""
    condition = condition.reshape(condition.shape + (1,) * (x.ndim - condition.ndim))
    return jnp.where(condition, x, jnp.zeros_like(x))
