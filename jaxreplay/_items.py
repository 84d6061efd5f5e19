"""Checks on item pytrees at trace time, and storage for them."""

from typing import Any

import jax
import jax.numpy as jnp


def _describe(dtype: Any, shape: tuple[int, ...]) -> str:
    return f"{dtype}[{', '.join(map(str, shape))}]"


def _name(path: Any) -> str:
    return f"leaf {jax.tree_util.keystr(path) or '<root>'}"


def as_spec(items: Any) -> Any:
    """Shapes and dtypes of `items`, as JAX would hold them."""
    return jax.eval_shape(lambda x: x, items)


def as_arrays(items: Any) -> Any:
    """`items` with every leaf an array, in JAX's canonical dtype."""
    return jax.tree.map(jnp.asarray, items)


def leading_axes(spec: Any, num_axes: int, what: str) -> tuple[int, ...]:
    """The first `num_axes` sizes, which all leaves of `spec` share.

    Raises:
      ValueError: no leaves, a leaf has too few axes, or two leaves differ.
    """
    leaves = jax.tree_util.tree_leaves_with_path(spec)
    if not leaves:
        raise ValueError(f"{what} holds no arrays; give a pytree with at least one.")
    first = leaves[0][1].shape[:num_axes]
    for path, leaf in leaves:
        if len(leaf.shape) < num_axes:
            raise ValueError(
                f"{_name(path)}: got {_describe(leaf.dtype, leaf.shape)}, {what} needs {num_axes} leading "
                f"{'axis' if num_axes == 1 else 'axes'}; add a batch axis with x[None]."
            )
        if leaf.shape[:num_axes] != first:
            raise ValueError(
                f"{_name(path)}: leading axes {list(leaf.shape[:num_axes])} differ from {list(first)}, "
                "those of the first leaf."
            )
    return first


def check_like(spec: Any, stored: Any, num_axes: int, num_stored_axes: int, owner: str) -> None:
    """Check that `spec` has the structure, item shapes and dtypes of `stored`, leading axes aside.

    Raises:
      ValueError: names the first leaf that differs.
    """
    got, expected = jax.tree.structure(spec), jax.tree.structure(stored)
    if got != expected:
        have = {jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(spec)}
        want = {jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(stored)}
        missing, extra = sorted(want - have), sorted(have - want)
        detail = "".join(
            f" {word} {', '.join(names)};" for word, names in (("missing", missing), ("unexpected", extra)) if names
        )
        raise ValueError(f"wrong structure:{detail} got {got}, {owner} stores {expected}.")
    for (path, leaf), like in zip(jax.tree_util.tree_leaves_with_path(spec), jax.tree.leaves(stored), strict=True):
        shape, stored_shape = leaf.shape[num_axes:], like.shape[num_stored_axes:]
        if shape != stored_shape or leaf.dtype != like.dtype:
            raise ValueError(
                f"{_name(path)}: got {_describe(leaf.dtype, shape)}, "
                f"{owner} stores {_describe(like.dtype, stored_shape)}."
            )


def check_mask(mask: Any, shape: tuple[int, ...]) -> jax.Array | None:
    """`mask` as a bool array of `shape`, or None.

    Raises:
      ValueError: another shape or dtype.
    """
    if mask is None:
        return None
    mask = jnp.asarray(mask)
    if mask.shape != shape or mask.dtype != jnp.bool_:
        raise ValueError(
            f"mask: got {_describe(mask.dtype, mask.shape)}, expected {_describe('bool', shape)}, one flag a row."
        )
    return mask


def zeros(spec: Any, leading: tuple[int, ...], num_axes: int) -> Any:
    """Storage for items of `spec`: zeros whose `num_axes` leading axes are replaced by `leading`."""
    # lax.full, unlike jnp.zeros, also makes arrays of PRNG keys.
    return jax.tree.map(lambda leaf: jax.lax.full(leading + leaf.shape[num_axes:], 0, leaf.dtype), spec)
