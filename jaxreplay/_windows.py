"""Windows of n steps over time-major environment steps, and the transitions they make."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import lax

from jaxreplay._common import checks, layouts
from jaxreplay.transition_batch import TransitionBatch


@struct.dataclass
class Steps:
    """Environment steps, time-major; leaves [time, num_envs, ...]."""

    s: Any
    a: Any
    r: jax.Array
    terminated: jax.Array
    truncated: jax.Array
    s_next: Any
    logp: jax.Array | None
    w: jax.Array | None
    mask: jax.Array  # whether there was a step


def as_steps(
    s: Any, a: Any, r: Any, terminated: Any, truncated: Any, s_next: Any, logp: Any, w: Any, mask: Any = None
) -> Steps:
    """Steps with rewards in float32 or wider and bool flags; all of them are steps if `mask` is None."""
    r = checks.as_float(r)
    terminated, truncated = jnp.asarray(terminated, bool), jnp.asarray(truncated, bool)
    s, a, s_next = checks.as_arrays((s, a, s_next))
    logp, w = (None if x is None else jnp.asarray(x) for x in (logp, w))
    mask = jnp.ones(r.shape, bool) if mask is None else jnp.asarray(mask)
    return Steps(s, a, r, terminated, truncated, s_next, logp, w, mask)


def check_step(step: Steps) -> tuple[int, ...]:
    """[num_envs] of a step of every environment, leaves [num_envs, ...].

    Raises:
      ValueError: leading axes that differ, or not one number (or flag) an environment; the message names the leaf.
    """
    return _check_axes(step, 1, "a step", "an environment", {})


def check_steps(steps: Steps, what: str) -> tuple[int, ...]:
    """The two leading axes of many steps, such as a rollout, whose arguments are called R, logP and W.

    Raises:
      ValueError: leading axes that differ, or not one number (or flag) a step; the message names the leaf.
    """
    return _check_axes(steps, 2, what, "a step", {"r": "R", "logp": "logP", "w": "W"})


def _check_axes(steps: Steps, num_axes: int, what: str, each: str, names: dict[str, str]) -> tuple[int, ...]:
    leading = checks.leading_axes(steps, num_axes, what)
    for field in ("r", "terminated", "truncated", "logp", "w", "mask"):
        leaf = getattr(steps, field)
        if leaf is not None and leaf.shape != leading:
            number = "number" if field in ("r", "logp", "w") else "flag"
            raise ValueError(
                f"{names.get(field, field)}: got {checks.type_text(leaf.dtype, leaf.shape)}, expected {list(leading)}, "
                f"one {number} {each}; {'squeeze' if leaf.shape[-1] == 1 else 'reduce'} the last axis."
            )
    return leading


def transitions(
    steps: Steps,
    order: jax.Array,
    starts: jax.Array,
    exists: jax.Array,
    *,
    n: int,
    gamma: float,
    next_action: bool,
    record_extra_info: bool,
) -> tuple[TransitionBatch, jax.Array]:
    """Transitions whose windows open at given times.

    Args:
      steps: leaves [T, num_envs, ...] in any order of rows.
      order: int32 [T], the row of each time.
      starts: int32 [K], times; any value where `exists` is False.
      exists: bool [K].
      n, gamma, next_action, record_extra_info: as of `jaxreplay.NStep`.

    Returns:
      TransitionBatch [K * num_envs] and valid, bool [K * num_envs].
    """
    last_time = order.shape[0] - 1
    times = jnp.arange(last_time + 1, dtype=jnp.int32)[:, None]
    starts = jnp.clip(starts, 0, last_time)[:, None]  # [K, 1]
    ends, missing = (steps.terminated | steps.truncated)[order], ~steps.mask[order]  # [T, E]
    stops = jnp.where(missing, times - 1, jnp.where(ends, times, last_time))
    stops = lax.cummin(stops, axis=0, reverse=True)[starts[:, 0]]
    last = jnp.clip(stops, starts, starts + n - 1)  # [K, E], time of the window's last step
    length = last - starts + 1

    def at(leaf, time):  # rows of a [T, E, ...] leaf at times [K, ..., E]
        # Mapped over environments: indexed by them as well, those on several devices would exchange their steps.
        by_env = jax.vmap(lambda column, rows: column[rows], in_axes=(1, -1), out_axes=time.ndim - 1)
        return by_env(leaf, order[time])

    terminated = at(steps.terminated, last)
    # [K, n, E]: the steps of every window, the last one repeated behind its end.
    lag = jnp.arange(n, dtype=jnp.int32)[None, :, None]
    inside = jnp.minimum(starts[:, None] + lag, last[:, None])
    in_window = lag < length[:, None]
    dtype = steps.r.dtype
    powers = jnp.asarray(np.float64(gamma) ** np.arange(n + 1), dtype)
    rewards = jnp.where(in_window, at(steps.r, inside), 0)
    Rn = jnp.sum(powers[None, :n, None] * rewards, axis=1)
    In = jnp.where(terminated, 0, powers[length])

    start_rows = jnp.broadcast_to(starts, last.shape)
    valid = exists[:, None] & at(steps.mask, start_rows)
    A_next = logP_next = extra_info = None
    if next_action:
        after = jnp.broadcast_to(jnp.minimum(starts + n, last_time), last.shape)
        # No end and no missing step before or at start + n.
        has_next = ~at(steps.terminated | steps.truncated, last) & (starts + n <= stops + 1) & at(steps.mask, after)
        has_next &= starts + n <= last_time
        valid &= terminated | has_next
        A_next, logP_next = jax.tree.map(lambda leaf: _where_rows(has_next, at(leaf, after)), (steps.a, steps.logp))
    if record_extra_info:
        window = {
            "states": steps.s,
            "actions": steps.a,
            "rewards": steps.r,
            "log_props": steps.logp,
            "weights": steps.w,
        }
        extra_info = jax.tree.map(lambda leaf: jnp.moveaxis(at(leaf, inside), 1, 2), window)
        done = at(steps.terminated | steps.truncated, inside) | ~in_window
        extra_info["dones"] = jnp.moveaxis(done, 1, 2)
    batch = TransitionBatch(
        S=jax.tree.map(lambda leaf: at(leaf, start_rows), steps.s),
        A=jax.tree.map(lambda leaf: at(leaf, start_rows), steps.a),
        logP=None if steps.logp is None else at(steps.logp, start_rows),
        Rn=Rn,
        In=In,
        S_next=jax.tree.map(lambda leaf: at(leaf, last), steps.s_next),
        A_next=A_next,
        logP_next=logP_next,
        W=None if steps.w is None else at(steps.w, start_rows),
        extra_info=extra_info,
    )
    return layouts.merge_axes((batch, valid))


def _where_rows(condition: jax.Array, x: jax.Array) -> jax.Array:
    condition = condition.reshape(condition.shape + (1,) * (x.ndim - condition.ndim))
    return jnp.where(condition, x, jnp.zeros_like(x))
