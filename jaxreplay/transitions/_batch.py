"""TransitionBatch: transitions that a reward tracer emits, a buffer stores and an agent learns from."""

import dataclasses
import functools
from collections.abc import Iterator
from typing import Any

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
from flax import struct

from jaxreplay._common import checks, shown, xla


@struct.dataclass
class TransitionBatch(shown.Shown):
    """A batch of one-step or n-step transitions, with the field names of coax's reward tracing.

    The bootstrapped target of a row is G = Rn + In * Q(S_next, A_next). `Rn` is the discounted sum of the m rewards in
    the transition's window. `In` is gamma^m, or 0 if the episode terminated in the window. If each step has a discount,
    gamma^k stands for the product of the first k.

    Attributes:
      S: pytree [B, ...], states.
      A: pytree [B, ...], actions.
      logP: float [B] or None, log-propensities of the actions.
      Rn: float [B], partial returns, sum_{k<m} gamma^k R_{t+k}.
      In: float [B], bootstrap factors.
      S_next: pytree [B, ...], states to bootstrap from.
      A_next: pytree [B, ...] or None, actions to bootstrap from (SARSA).
      logP_next: float [B] or None, log-propensities of `A_next`.
      W: float [B] or None, weights; a buffer multiplies them by its importance weights.
      idx: int32 [B] or None, handles, set by `sample` of a buffer.
      extra_info: pytree or None.
      valid: bool [B] or None, True for rows that are transitions; None for all. A tracer sets it. `add` and `set` of a
        buffer write only rows where it is True. It is not stored, so a drawn batch has None. A mean with
        `where=batch.valid` is right for both.

    Examples:
      >>> x = np.array([1.0, 2.0])
      >>> ends = {"Rn": x, "In": np.array([0.5, 0.0])}  # the second transition terminates
      >>> batch = jr.TransitionBatch(S=x, A=x, logP=None, S_next=x + 1, **ends)
      >>> (batch.Rn + batch.In * 10.0 * batch.S_next).tolist()  # targets, if Q(s) = 10 s
      [11.0, 2.0]
    """

    S: Any
    A: Any
    logP: Any
    Rn: jax.Array  # [B]
    In: jax.Array  # [B]
    S_next: Any
    A_next: Any = None
    logP_next: Any = None
    W: jax.Array | None = None  # [B]
    idx: Any = None
    extra_info: Any = None
    valid: Any = None

    def with_draw(self, weights: jax.Array, handles: jax.Array) -> "TransitionBatch":
        """Multiply `W` by importance weights [B] and set `idx` to handles [B].

        Examples:
          >>> drawn = batch.with_draw(weights=np.array([1.0, 0.5]), handles=np.array([7, 8]))
          >>> drawn.W.tolist(), drawn.idx.tolist()
          ([1.0, 0.5], [7, 8])
        """

        def spread(x: jax.Array) -> jax.Array:  # over [B] or [B, sequence_length]
            return jnp.broadcast_to(x.reshape(x.shape + (1,) * (self.Rn.ndim - 1)), self.Rn.shape)

        W = spread(weights)
        if self.W is not None:
            stored = checks.as_float(self.W)
            W = stored * W.astype(stored.dtype)
        return dataclasses.replace(self, W=W, idx=spread(handles))  # pyright: ignore[reportArgumentType]

    @property
    def batch_size(self) -> int:
        """B, the length of the leading axis."""
        return self.Rn.shape[0]

    @classmethod
    @xla.copies_numpy
    def from_single(
        cls,
        s: Any,
        a: Any,
        logp: Any,
        r: Any,
        done: bool,
        gamma: float,
        s_next: Any = None,
        a_next: Any = None,
        logp_next: Any = None,
        w: float = 1.0,
        idx: int | None = None,
        extra_info: Any = None,
    ) -> "TransitionBatch":
        """A batch of one transition, from values without a batch axis.

        Args:
          s, a, s_next, a_next: state and action pytrees.
          logp, logp_next: log-propensities, at most 0.
          r: reward, or partial return of a window.
          done: True if the target does not bootstrap; `In` is then 0.
          gamma: discount of the bootstrapped value in [0, 1], gamma^m for a window of m steps.
          w: weight, positive.
          idx: handle.
          extra_info: pytree.

        Raises:
          TypeError: an argument is not as above.

        Examples:
          >>> step = {"s": 1.0, "a": 0, "logp": -0.5, "r": 2.0, "done": False, "s_next": 3.0}
          >>> single = jr.TransitionBatch.from_single(**step, gamma=0.5)
          >>> single.batch_size, single.Rn.tolist(), single.In.tolist()
          (1, [2.0], [0.5])
        """
        _check_numbers("logp", logp, lambda x: x <= 0, "a log-propensity is a number at most 0", is_one=False)
        if logp_next is not None:
            _check_numbers("logp_next", logp_next, lambda x: x <= 0, "must be at most 0, or None", is_one=False)
        _check_numbers("r", r, lambda x: x == x, "a reward is a number and not NaN")
        if not isinstance(done, bool | np.bool_):
            raise TypeError(f"done={done!r}: expected a bool.")
        _check_numbers("gamma", gamma, lambda x: (x >= 0) & (x <= 1), "a discount is a number in [0, 1]")
        _check_numbers("w", w, lambda x: x > 0, "a weight is a positive number")

        def batched(x: Any, dtype: Any = None) -> Any:
            return jax.tree.map(lambda leaf: jnp.asarray(leaf, dtype)[None], x)

        leaves = {"S": s, "A": a, "S_next": s_next, "A_next": a_next, "extra_info": extra_info}
        floats = {"logP": logp, "Rn": r, "In": float(gamma) * (not done), "logP_next": logp_next, "W": w}
        return cls(**batched(leaves), **batched(floats, float), idx=batched(idx, jnp.int32))

    def to_singles(self, reverse: bool = False) -> Iterator["TransitionBatch"]:
        """Iterate over the transitions as batches of one; from last to first if `reverse`.

        Skips rows that are not `valid`, which must not be traced. The batches have `valid` None.

        Examples:
          >>> [single.S.tolist() for single in batch.to_singles(reverse=True)]
          [[2.0], [1.0]]
        """
        if isinstance(self.valid, jax.core.Tracer):
            raise ValueError("valid: is traced, so it is not known; call to_singles outside of jit, or set valid=None.")
        rows = range(self.batch_size) if self.valid is None else np.flatnonzero(xla.on_host(self.valid)).tolist()
        batch = dataclasses.replace(self, valid=None)  # pyright: ignore[reportArgumentType]
        for i in reversed(rows) if reverse else rows:
            yield jax.tree.map(lambda leaf, i=i: leaf[i : i + 1], batch)

    def copy(self, deep: bool = False) -> "TransitionBatch":
        """A new batch with the same leaves, or with copies of them if `deep`.

        Examples:
          >>> batch.copy().Rn is batch.Rn, batch.copy(deep=True).Rn is batch.Rn
          (True, False)
        """
        return jax.tree.map(lambda leaf: leaf.copy() if deep else leaf, self)


def _check_numbers(name: str, x: Any, is_right: Any, rule: str, *, is_one: bool = True) -> None:
    """Raise a `TypeError` if `x` is not a number that `is_right`; without `is_one` it may be an array of them."""
    is_number = isinstance(x, int | float | np.number | np.ndarray | jax.Array) and not isinstance(x, bool)
    array = np.asarray(x if is_number else None)
    if not np.issubdtype(array.dtype, np.number) or (is_one and array.ndim) or not np.all(is_right(array)):
        raise TypeError(f"{name}={x!r}: {rule}.")


def check_returns(spec: Any) -> None:
    """Raise a `ValueError` if `spec` is a `TransitionBatch` whose `In` or `W` differs in shape from `Rn`."""
    if not isinstance(spec, TransitionBatch):
        return
    if not hasattr(spec.Rn, "shape"):
        raise ValueError(f"leaf .Rn: got {spec.Rn!r}, expected an array; store items other than transitions in a dict.")
    for name in ("In", "W"):
        for leaf in jax.tree.leaves(getattr(spec, name)):
            if leaf.shape != spec.Rn.shape:
                found, rule = checks.type_text(leaf), f"{list(spec.Rn.shape)}, the shape of leaf .Rn"
                raise ValueError(f"leaf .{name}: got {found}, expected {rule}; squeeze the extra axis.")


def without_valid(items: Any) -> tuple[Any, dict[str, Any]]:
    """`items` with `valid=None` in every `TransitionBatch`, and the values removed, by leaf name."""
    found = {}

    def is_batch(x: Any) -> bool:
        return isinstance(x, TransitionBatch)

    def visit(path: Any, node: Any) -> Any:
        if not is_batch(node):
            return node
        if node.valid is not None:
            found[f"leaf {jax.tree_util.keystr(path)}.valid"] = node.valid
        node = dataclasses.replace(node, valid=None)  # pyright: ignore[reportArgumentType]
        return jax.tree_util.tree_map_with_path(
            lambda inner, x: visit((*path, *inner), x), node, is_leaf=lambda x: is_batch(x) and x is not node
        )

    return jax.tree_util.tree_map_with_path(visit, items, is_leaf=is_batch), found


def rows_to_write(mask: Any, valid: dict[str, Any], shape: tuple[int, ...]) -> jax.Array | None:
    """Rows to write, bool of `shape`: True where `mask` and all flags found by `without_valid` are; None for all rows.

    A `ValueError` names an array of flags with another shape or dtype.
    """
    named = valid if mask is None else valid | {"mask": mask}
    flags = [checks.check_mask(flag, shape, name) for name, flag in named.items()]
    # Logical and, as a `where`: XLA drops one of an array with itself, as in add(batch, mask=batch.valid).
    return functools.reduce(lambda x, y: jnp.where(x, y, x), flags) if flags else None
