"""Windows of n steps over time-major environment steps, and the transitions they yield."""

import collections
import dataclasses
import functools
from typing import Any

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
from flax import struct

from jaxreplay._common import checks, devices, ring, shown, xla
from jaxreplay.transitions._batch import TransitionBatch

FEW_BYTES = 2**12  # of a leaf that is selected from, or written, as a whole


@struct.dataclass
class TracerSteps(shown.Shown):
    """Environment steps, time-major; leaves [time, num_envs, ...]. Without `s_next`, it is `s` of the next step.

    The metadata of a field: its name as an argument of many steps; its kind, if there is a number or flag for each.
    """

    s: Any = struct.field(metadata={"many": "S"})
    a: Any = struct.field(metadata={"many": "A"})
    r: Any = struct.field(metadata={"many": "R", "kind": "number"})
    terminated: Any = struct.field(metadata={"kind": "flag"})
    truncated: Any = struct.field(metadata={"kind": "flag"})
    s_next: Any = struct.field(metadata={"many": "S_next"})
    logp: Any = struct.field(default=None, metadata={"many": "logP", "kind": "number"})
    w: Any = struct.field(default=None, metadata={"many": "W", "kind": "number"})
    # True if there was a step.
    mask: Any = struct.field(default=None, kw_only=True, metadata={"kind": "flag"})
    # Of what follows the step; None if all have the same.
    discount: Any = struct.field(default=None, kw_only=True, metadata={"many": "discounts", "kind": "number"})


# Names of the fields as arguments of many steps; and "number" or "flag" for a field with one for each step.
ROLLOUT = {field.name: field.metadata.get("many", field.name) for field in dataclasses.fields(TracerSteps)}
KINDS = {field.name: field.metadata.get("kind") for field in dataclasses.fields(TracerSteps)}
_Rollout = collections.namedtuple("_Rollout", ROLLOUT.values())


def as_steps(given: TracerSteps, what: str | None = None, num_envs: int | None = None) -> TracerSteps:
    """The same steps, checked, with numbers in float32 or wider and bool flags; all rows hold a step by default.

    Args:
      given: what the caller gave, leaves [num_envs, ...], or [time, num_envs, ...] if `what` is given.
      what: name of many steps in messages, which then use the names of `n_step_transitions`; None for one step.
      num_envs: if not None, the number of environments.

    Raises:
      ValueError: leading axes differ, or are not `num_envs`, or an argument does not hold one number or flag per
        environment (or step); the message names it.
    """
    num_axes, each = (2, "per step") if what else (1, "per environment")
    names, found = ROLLOUT if what else {field: field for field in ROLLOUT}, dict(vars(given))
    for field, name in names.items():
        kind, x = KINDS[field], found[field]
        if kind is None:
            found[field] = checks.as_arrays(x)
        elif x is not None or field in ("r", "terminated", "truncated"):
            found[field] = checks.as_real(name, x, f"one {'real ' if kind == 'number' else ''}{kind} {each}")
    found["r"] = checks.as_float(found["r"])
    if found["discount"] is not None:
        found["discount"] = jnp.clip(checks.as_float(found["discount"]), 0, 1)
    found |= {field: found[field].astype(bool) for field in ("terminated", "truncated")}
    if found["mask"] is None:
        found["mask"] = jnp.ones(found["r"].shape, bool)
    steps = TracerSteps(**found)
    rows = _Rollout(**{ROLLOUT[field]: x for field, x in found.items()}) if what else steps
    leading = checks.leading_axes(rows, num_axes, what or "a step")
    for field, name in names.items():
        leaf = found[field]
        if KINDS[field] and leaf is not None and leaf.shape != leading:
            remedy = f"{'squeeze' if leaf.shape[-1] == 1 else 'reduce'} the last axis"
            remedy += "" if what else ", or give many steps to n_step_transitions"
            rule = f"expected {list(leading)}, one {KINDS[field]} {each}; {remedy}"
            raise ValueError(f"{name}: got {checks.type_text(leaf)}, {rule}.")
    if jax.tree.structure(steps.s_next) == jax.tree.structure(steps.s):  # another structure, or None, is meant
        checks.check_like({names["s_next"]: steps.s_next}, {names["s_next"]: steps.s}, 0, 0, names["s"])
    if what:
        checks.check_mask(steps.mask, leading)
    if num_envs not in (None, leading[0]):
        raise ValueError(f"num_envs={num_envs}: got a step of {leading[0]} rows; give num_envs={leading[0]}.")
    return steps


def check_gamma(gamma: Any) -> Any:
    """`gamma`: None, a number in [0, 1], or an array [] or [num_envs]; a `ValueError` if it is known to be none."""
    if not isinstance(gamma, np.ndarray | jax.Array) or gamma.ndim != 1:
        return gamma if gamma is None else checks.check_number("gamma", gamma, 0, 1, "it is a discount", traced=None)
    found = checks.as_float(checks.as_real("gamma", gamma, "one number, or one per environment"))
    known: Any = None if isinstance(gamma, jax.core.Tracer) else xla.on_host(gamma)  # pyright: ignore[reportArgumentType]
    if known is not None and not np.all((known >= 0) & (known <= 1)):
        raise ValueError(f"gamma={gamma!r}: must be numbers in [0, 1]; they are discounts.")
    return found


def lags_if_few(num_rows: int, first: jax.Array) -> jax.Array | None:
    """Steps from the rows `first` [K] to each row of a ring, int32 [K, num_rows]; None if there are many rows.

    A ring of few rows is selected from as a whole; on a CPU a gather costs less. One scalar for each row costs nothing
    on a TPU. A GPU merges kernels that read the same array, but not a scalar.
    """
    if num_rows > (1 if devices.backend_of() == "cpu" else 8):
        return None
    return xla.read_once(jnp.stack([ring.wrap_negative(row - first, num_rows) for row in range(num_rows)], axis=1))


def transitions(
    tracer: Any, steps: TracerSteps, first: jax.Array, count: jax.Array, lag: jax.Array | None, n: Any, gamma: Any
) -> TransitionBatch:
    """Transitions whose windows open at given rows.

    A lag is a number of steps from the first of a window.

    Args:
      tracer: an `NStep` or `MonteCarlo`; its `n` is the largest.
      steps: leaves [T, E, ...], E environments; a ring of T rows.
      first: int32 [K], rows of the first steps.
      count: int32 [K], number of rows from the first one on that hold steps; 0 for no transition.
      lag: int32 [K, T], lags of all rows, if they are few; None to gather the rows of each window.
      n, gamma: integer [], and float [] or [E], clipped to range; or None for the tracer's own.

    Returns:
      TransitionBatch [K, E], with `valid`.

    Raises:
      ValueError: there is not one of a gamma and discounts of the steps, or the gammas are not one per environment.
    """
    n = tracer.n if n is None else jnp.clip(checks.as_count(n), 1, tracer.n)
    width = tracer.n + tracer.next_action
    at = functools.partial(_at, first, lag)
    stop = jnp.minimum(_first_breaks(steps, first, lag, width), 2 * count[:, None] - 1)
    last = jnp.clip(stop >> 1, 0, n - 1)  # of the window
    is_terminal = stop == 2 * last
    every = jnp.arange(width, dtype=jnp.int32)[None, :, None]
    gamma = tracer.gamma if gamma is None else jnp.clip(gamma, 0, 1)
    if gamma is None and steps.discount is None:
        rule = "must be a number in [0, 1], or float[num_envs], of the tracer or of each call"
        raise ValueError(f"gamma=None: {rule}; or give discounts, one per step, also to init.")
    if gamma is not None and steps.discount is not None:
        raise ValueError("gamma: steps have discounts of their own; give gamma=None, and discounts times gamma.")
    if isinstance(gamma, jax.Array) and gamma.shape not in ((), steps.r.shape[1:]):
        expected = f"one number, such as a float32[], or float32{list(steps.r.shape[1:])}"
        raise ValueError(f"gamma: got {checks.type_text(gamma)}, expected {expected}.")
    discount = None if steps.discount is None else at(steps.discount, every)
    Rn, In = _returns(at(steps.r, every), discount, last, is_terminal, gamma, lag is None)
    valid, has_next = stop >= 0, stop >= 2 * n
    opening = jnp.zeros_like(first)[:, None]
    S, A, logP, W = jax.tree.map(lambda leaf: at(leaf, opening), (steps.s, steps.a, steps.logp, steps.w))
    observed, when = (steps.s, last + 1) if steps.s_next is None else (steps.s_next, last)
    S_next = jax.tree.map(lambda leaf: at(leaf, when), observed)
    A_next = logP_next = None
    if tracer.next_action:
        valid &= has_next | is_terminal
        after = jax.tree.map(lambda leaf: at(leaf, opening + n), (steps.a, steps.logp))
        A_next, logP_next = jax.tree.map(
            lambda x: jnp.where(has_next.reshape(has_next.shape + (1,) * (x.ndim - 2)), x, jnp.zeros_like(x)), after
        )
    extra_info = _extra_info(steps, last, tracer.n, at) if tracer.record_extra_info else None
    return TransitionBatch(S, A, logP, Rn, In, S_next, A_next, logP_next, W, extra_info=extra_info, valid=valid)


def _returns(
    r: jax.Array, discount: jax.Array | None, last: jax.Array, is_terminal: jax.Array, gamma: Any, gathers: bool
) -> tuple[jax.Array, jax.Array]:
    """Partial returns and bootstrap factors [K, E] of windows with rewards, and discounts if any, [K, width, E].

    Powers of a number are in float64, and of a traced float [] or [E] in float32 or wider.
    """
    every = jnp.arange(r.shape[1], dtype=jnp.int32)[None, :, None]
    if discount is not None:
        powers = _products(discount, every <= last[:, None])
    elif isinstance(gamma, jax.Array):
        gamma = checks.as_float(gamma)
        powers = _powers(gamma[None, None] if gamma.ndim else gamma, r.shape[1])
    else:
        powers = np.float64(gamma) ** np.arange(r.shape[1] + 1)
    powers = jnp.asarray(powers, r.dtype)
    if powers.ndim == 1:
        powers = powers[None, :, None]
    Rn = jnp.sum(jnp.where(every <= last[:, None], powers[:, :-1] * r, 0), axis=1)
    if gathers and powers.shape[::2] == (1, 1):
        return Rn, jnp.where(is_terminal, 0, powers[0, 1:, 0][last])
    return Rn, jnp.sum(jnp.where((every == last[:, None]) & ~is_terminal[:, None], powers[:, 1:], 0), axis=1)


def _powers(x: jax.Array, width: int) -> jax.Array:
    """Powers 0 to `width` of `x` [] or [K, 1, E], along the second axis. A product would round at each factor."""
    exponents = jnp.arange(width + 1, dtype=x.dtype)
    return x ** (exponents[None, :, None] if x.ndim else exponents)


def _products(discount: jax.Array, inside: jax.Array) -> jax.Array:
    """Products of the first 0 to `width` discounts [K, width, E] of windows; `inside` is True in the window.

    A window in which all are equal has the powers, bit for bit. Its derivatives are those of the products.
    """
    products = jnp.pad(jnp.cumprod(discount, axis=1), ((0, 0), (1, 0), (0, 0)), constant_values=1)
    is_equal = jnp.all((discount == discount[:, :1]) | ~inside, axis=1, keepdims=True)
    values = jnp.where(is_equal, _powers(discount[:, :1], discount.shape[1]), products)
    return jax.lax.stop_gradient(values) + (products - jax.lax.stop_gradient(products))


def _first_breaks(steps: TracerSteps, first: jax.Array, lag: jax.Array | None, width: int) -> jax.Array:
    """2 * lag + kind of the first break of the stream from each row of `first` [K] on, int32 [K, E].

    The stream breaks after a truncated step (kind 1), after a terminated one (0), or before a missing one (-1). So the
    first break is the smallest, and it is even if it is terminal.

    Of steps that go on, are truncated and are terminated, at lags 0, 1 and 2, the last two break the stream:
    2 * 1 + 1 = 3 and 2 * 2 + 0 = 4. The first is 3: the window ends at lag 3 >> 1 = 1, and bootstraps, as 3 is odd.
    """
    kind = jnp.where(steps.terminated, 0, jnp.where(steps.truncated, 1, 2)).astype(jnp.int8)
    kind = jnp.where(steps.mask, kind, jnp.int8(-1))
    if lag is None and len(first) > 1:  # windows overlap, so one scan of all rows costs less than a scan of each window
        num_rows = len(kind)
        row = jnp.arange(num_rows, dtype=jnp.int32)[:, None]
        breaks = jnp.where(kind < 2, 2 * row + kind.astype(jnp.int32), 4 * num_rows)
        following = jax.lax.cummin(breaks, axis=0, reverse=True)
        found = following[first]
        return jnp.where(found < 2 * num_rows, found, following[:1] + 2 * num_rows) - 2 * first[:, None]
    every = jnp.arange(width, dtype=jnp.int32)[None, :, None]
    kind, lag = (_at(first, None, kind, every), every) if lag is None else (kind[None], lag[..., None])
    return jnp.min(jnp.where(kind < 2, 2 * lag + kind.astype(jnp.int32), 2 * width), axis=1)


def _at(first: jax.Array, lag: jax.Array | None, leaf: jax.Array, wanted: jax.Array) -> jax.Array:
    """`leaf` [T, E, ...] at the lags `wanted` [K, ..., E], or [K, ..., 1] for all; returns [K, ..., E, ...]."""
    num_rows, axes = len(leaf), [1] * (wanted.ndim - 1)
    if lag is not None and (num_rows == 1 or leaf.nbytes <= FEW_BYTES):
        found = leaf[0].reshape(*axes, *leaf.shape[1:])
        for row in range(1, num_rows):
            here = lag[:, row].reshape(-1, *axes) == wanted
            found = jnp.where(here.reshape(*here.shape, *[1] * (leaf.ndim - 2)), leaf[row], found)
        return found
    rows = ring.wrap_excess(first.reshape(-1, *axes) + wanted, num_rows)
    if rows.shape[-1] == 1:
        return leaf[rows[..., 0]]
    # Mapped over environments: if they were indexed too, environments on several devices would exchange their steps.
    return jax.vmap(lambda column, rows: column[rows], in_axes=(1, -1), out_axes=rows.ndim - 1)(leaf, rows)


def _extra_info(steps: TracerSteps, last: jax.Array, max_n: int, at: Any) -> dict[str, Any]:
    """Steps of the windows, leaves [K, E, max_n, ...]."""
    every = jnp.arange(max_n, dtype=jnp.int32)[None, :, None]
    wanted = jnp.minimum(every, last[:, None])  # [K, max_n, E]
    window = {"states": steps.s, "actions": steps.a, "rewards": steps.r, "log_props": steps.logp, "weights": steps.w}
    window = jax.tree.map(lambda leaf: at(leaf, wanted), window)
    if steps.discount is not None:
        window["discounts"] = at(steps.discount, wanted)
    window["dones"] = at(steps.terminated | steps.truncated, wanted) | (every > last[:, None])
    return jax.tree.map(lambda leaf: jnp.moveaxis(leaf, 1, 2), window)
