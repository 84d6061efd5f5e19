"""Checks of arguments, item pytrees and configurations. A message says what was given, the rule and one remedy."""

import contextlib
import dataclasses
import functools
import inspect
import json
import math
from collections.abc import Callable
from typing import Any, TypeVar, dataclass_transform

import jax
import jax.core
import jax.numpy as jnp
import numpy as np

from jaxreplay._common import foreign_names, xla

K = TypeVar("K", bound=type)
REAL = jnp.integer, jnp.floating
LISTS = "np.stack makes an array of a list"  # remedy for a list among items
STATIC = "give it from outside of jit, or as a static argument"  # remedy for a traced number


def type_text(x: Any, sizes: tuple[int, ...] | None = None) -> str:
    """Type of an array as text for messages, such as float32[3, 2]; `sizes` in place of its shape."""
    return f"{x.dtype}{list(x.shape if sizes is None else sizes)}"


def brief(value: Any) -> str:
    """The first line of a value's text for messages, cut at 80 characters."""
    text = repr(value)
    line = text.splitlines()[0]
    return text if line == text and len(text) <= 80 else f"{line[:80]}..."


def named_leaves(tree: Any) -> dict[str, Any]:
    """The leaves of a pytree by their paths, for messages."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(path) or "<root>": leaf for path, leaf in leaves}


def as_spec(items: Any) -> Any:
    """Shapes and dtypes of `items` in JAX's canonical dtypes."""
    check_arrays(items)
    return jax.eval_shape(lambda x: x, items)


def check_arrays(tree: Any) -> None:
    """Raise a `TypeError` for a leaf that is no array with a dtype of JAX, and no number."""
    for path, leaf in named_leaves(tree).items():
        try:
            jax.eval_shape(lambda x: x, leaf)
        except TypeError:
            found = type_text(leaf) if isinstance(leaf, np.ndarray) else brief(leaf)
            rule = "expected an array of numbers or bools in a dtype of JAX; convert it, or leave it out"
            raise TypeError(f"leaf {path}: got {found}, {rule}.") from None


def as_arrays(items: Any) -> Any:
    """`items` with every leaf as an array in JAX's canonical dtype."""
    return jax.tree.map(jnp.asarray, items)


def as_int32(x: Any) -> Any:
    """Integers as int32, -1 if out of range (JAX would drop the upper bits). Other values are returned unchanged."""
    like = np if isinstance(x, np.ndarray) else jnp
    x = like.asarray(x)
    if not jnp.issubdtype(x.dtype, jnp.integer):
        return x
    cast = x.astype(np.int32)
    if jnp.iinfo(x.dtype).max < 2**31:
        return cast
    return like.where((x >= 0) & (x <= 2**31 - 1), cast, np.int32(-1))


def as_count(x: Any) -> jax.Array:
    """An integer [] as int32, clipped to [0, 2**31 - 1]."""
    x = jnp.asarray(x)
    return jnp.clip(x, 0, min(jnp.iinfo(x.dtype).max, 2**31 - 1)).astype(jnp.int32)


def as_float(x: Any) -> jax.Array:
    """Numbers as float32, or in their own dtype if that is wider, for any setting of JAX's dtype promotion."""
    x = jnp.asarray(x)
    is_wide = jnp.issubdtype(x.dtype, jnp.inexact) and x.dtype.itemsize >= 4
    return x.astype(x.dtype if is_wide else jnp.float32)


def as_real(
    name: str, x: Any, expected: str, sizes: tuple[int, ...] | None = None, kinds: tuple[Any, ...] = (jnp.bool_, *REAL)
) -> jax.Array:
    """`x` as an array; a `ValueError` that states `expected` if it has other sizes, or does not hold such numbers."""
    found = "None" if x is None else f"a {type(x).__name__}"
    with contextlib.suppress(TypeError, ValueError):
        array = jnp.asarray(None if isinstance(x, dict) else x)  # JAX 0.7 converts any dict of bools to True
        if sizes in (None, array.shape) and any(jnp.issubdtype(array.dtype, kind) for kind in kinds):
            return array
        found = type_text(array)
    raise ValueError(f"{name}: got {found}, expected {expected}.")


def leading_axes(spec: Any, num_axes: int, what: str, last: int | None = None) -> tuple[int, ...]:
    """Sizes of the `num_axes` (1 or 2) leading axes that all leaves of `spec`, or `what` in messages, share.

    A `ValueError` if there are no leaves, a leaf has too few axes (`last` is the size that the last of them should
    have, if that is known), or two leaves differ.
    """
    leaves = named_leaves(spec)
    if not leaves:
        raise ValueError(f"{what} holds no arrays; give a pytree with at least one.")
    first = next(iter(leaves.values())).shape[:num_axes]
    for name, leaf in leaves.items():
        if len(leaf.shape) < num_axes:
            remedy = "x[:, None] adds one" if leaf.shape[:1] not in ((), (last,)) else "x[None] adds one"
            remedy += "" if leaf.shape else f", {LISTS}"
            axes = "1 leading axis" if num_axes == 1 else f"{num_axes} leading axes"
            raise ValueError(f"leaf {name}: got {type_text(leaf)}, {what} needs {axes}; {remedy}.")
        if leaf.shape[:num_axes] != first:
            found = list(leaf.shape[:num_axes])
            raise ValueError(f"leaf {name}: leading axes {found} differ from {list(first)} of the first leaf.")
    return first


def num_rows(names: tuple[str, ...], arguments: dict[str, Any], axis: int) -> int:
    """Number of rows along `axis` of those arguments `names` that are given; a `ValueError` if they differ in it."""
    sizes = {x: leading_axes(arguments[x], axis + 1, x)[axis] for x in names if jax.tree.leaves(arguments[x])}
    first, size = next(iter(sizes.items()), ("", 0))
    for name in sizes:
        if sizes[name] != size:
            found = type_text(jax.tree.leaves(arguments[name])[0])
            raise ValueError(f"{name}: got {found}, expected a row for each of the {size} {first}.")
    return size


def check_structure(items: Any, stored: Any, owner: str) -> None:
    """Check that `items` has the structure of `stored`; a `ValueError` names the leaves that differ."""
    got, expected = jax.tree.structure(items), jax.tree.structure(stored)
    if got != expected:
        have, want = {*named_leaves(items)}, {*named_leaves(stored)}
        differing = {"missing": sorted(want - have), "unexpected": sorted(have - want)}
        detail = "".join(f" {word} {', '.join(names)};" for word, names in differing.items() if names)
        for k, part in enumerate(items) if isinstance(items, tuple) else ():
            if jax.tree.structure(part) == expected:
                detail = f" give the tuple's element [{k}] alone;"
        if any(isinstance(x, list) for x in jax.tree.leaves(items, is_leaf=lambda x: isinstance(x, list))):
            detail += f" a list holds leaves, {LISTS};"
        raise ValueError(f"wrong structure:{detail} got {got}, {owner} stores {expected}.")


def check_like(spec: Any, stored: Any, num_axes: int, num_stored_axes: int, owner: str) -> None:
    """Check that `spec` has the structure, item shapes and dtypes of `stored`; leading axes are ignored.

    A `ValueError` names the first leaf that differs.
    """
    check_structure(spec, stored, owner)
    for (name, leaf), like in zip(named_leaves(spec).items(), jax.tree.leaves(stored), strict=True):
        if (leaf.dtype, leaf.shape[num_axes:]) != (like.dtype, like.shape[num_stored_axes:]):
            got, expected = type_text(leaf, leaf.shape[num_axes:]), type_text(like, like.shape[num_stored_axes:])
            is_cast = leaf.shape[num_axes:] == like.shape[num_stored_axes:]
            remedy = f"; x.astype({str(like.dtype)!r}) converts it" if is_cast else ""
            raise ValueError(f"leaf {name}: got {got}, {owner} stores {expected}{remedy}.")


def check_parts(values: Any, stored: Any, leading: tuple[int, ...], num_stored_axes: int, owner: str) -> list[Any]:
    """One value for each leaf of `stored`: a leaf of `values`, or None if its part of `values` is None.

    A `ValueError` if all are None, or names a leaf that differs in structure, leading axes, item shape or dtype.
    """
    try:
        parts = jax.tree.broadcast(values, stored, is_leaf=lambda x: x is None)
        found = jax.tree.structure(stored).flatten_up_to(parts)
    except (ValueError, TypeError) as error:
        got, expected = jax.tree.structure(values), jax.tree.structure(stored)
        raise ValueError(f"wrong structure: got {got}, {owner} stores {expected}; None keeps a part.") from error
    if all(value is None for value in found):
        raise ValueError("values: all are None; give at least one leaf to write.")
    for value, (name, like) in zip(found, named_leaves(stored).items(), strict=True):
        expected = type_text(like, (*leading, *like.shape[num_stored_axes:]))
        if value is not None and type_text(value) != expected:
            raise ValueError(f"leaf {name}: got {type_text(value)}, expected {expected}.")
    return found


def check_mask(
    mask: Any, shape: tuple[int, ...], name: str = "mask", xp: Any = jnp, rule: str = "one flag per row"
) -> jax.Array:
    """`mask` as an array of `xp`, `jnp` or `np`; a `ValueError` that states `rule` if it is not bool of `shape`."""
    mask = xp.asarray(mask)
    if mask.shape != shape or mask.dtype != jnp.bool_:
        raise ValueError(f"{name}: got {type_text(mask)}, expected bool{list(shape)}, {rule}.")
    return mask


def check_integer(name: str, value: Any, low: int, high: int, meaning: str, traced: str | None = STATIC) -> int:
    """`value`, an integer of Python, NumPy or JAX, as a Python integer.

    Args:
      traced: remedy for a traced number, for messages. With None, a JAX array [] is allowed and returned unchanged.

    Raises:
      ValueError: `value` is not an integer in [low, high], or it is traced.
    """
    number = value if type(value) is int else _python_number(name, value, traced, f"an int32[], {meaning}", jnp.integer)
    if traced is None and isinstance(value, jax.Array):
        return value  # pyright: ignore[reportReturnType]
    if isinstance(number, bool) or not isinstance(number, int) or not low <= number <= high:
        raise ValueError(f"{name}={brief(value)}: must be an integer from {low} to {high}, {meaning}.")
    return number


def check_number(name: str, value: Any, low: float, high: float, remedy: str, traced: str | None = STATIC) -> float:
    """`value`, a number of Python, NumPy or JAX, as a Python number.

    Args:
      traced: as in `check_integer`; the value of a concrete array is checked, for which the call waits.

    Raises:
      ValueError: `value` is not a finite number in [low, high], or it is traced.
    """
    expected = "one number for the whole batch, such as a float32[]"
    number = _python_number(name, value, traced, expected, jnp.integer, jnp.floating)
    if traced is None and isinstance(number, jax.Array):
        if isinstance(value, jax.core.Tracer) or not value.is_fully_addressable:
            return value  # pyright: ignore[reportReturnType]
        number = float(xla.on_host(value))
    is_number = isinstance(number, int | float) and not isinstance(number, bool)
    if not (is_number and math.isfinite(number) and low <= number <= high):
        if math.isfinite(high):
            rule = f"a number in [{low:g}, {high:g}]"
        else:
            rule = f"a finite number of at least {low:g}" if math.isfinite(low) else "a finite number"
        raise ValueError(f"{name}={brief(value)}: must be {rule}; {remedy}.")
    return value if isinstance(value, jax.Array) and traced is None else number  # pyright: ignore[reportReturnType]


def _python_number(name: str, value: Any, traced: str | None, expected: str, *kinds: Any) -> Any:
    """A number of NumPy or JAX, or an array [] of one, as a Python number. Other values are returned unchanged.

    If `traced` is None, JAX arrays [] of these kinds are returned unchanged, so that no device is waited for.
    """
    if traced is None and isinstance(value, np.ndarray | jax.Array):
        if value.shape or not any(jnp.issubdtype(value.dtype, kind) for kind in kinds):
            raise ValueError(f"{name}: got {type_text(value)}, expected {expected}.")
        if isinstance(value, jax.Array):
            return value
    if isinstance(value, jax.core.Tracer):
        raise ValueError(f"{name}={value!r}: is traced, but must be known at compile time; {traced}.")
    if isinstance(value, np.generic | np.ndarray | jax.Array) and value.shape == ():
        return xla.on_host(value).item() if any(jnp.issubdtype(value.dtype, kind) for kind in REAL) else value
    return value


def check_bool(name: str, value: Any, meaning: str) -> bool:
    """`value`, a bool of Python or NumPy, as a Python bool; a `ValueError` if it is not a bool."""
    if not isinstance(value, bool | np.bool_):
        raise ValueError(f"{name}={value!r}: must be True or False ({meaning}).")
    return bool(value)


def field(check: Callable[..., Any], *rule: Any, default: Any = dataclasses.MISSING) -> Any:
    """A field of a `config`, with its rule: the value becomes what `check(name, value, *rule)` returns."""
    return dataclasses.field(default=default, metadata={"rule": (check, *rule)})


def set_checked(config: Any, name: str, check: Callable[..., Any], *rule: Any) -> None:
    """Set a field of a frozen configuration to what `check(name, value, *rule)` returns."""
    object.__setattr__(config, name, check(name, getattr(config, name), *rule))


def optional(check: Callable[..., Any]) -> Callable[..., Any]:
    """The same check, which None passes too."""
    return lambda name, value, *rule: None if value is None else check(name, value, *rule)


def check_choice(name: str, value: Any, *choices: Any) -> Any:
    """`value`; a `ValueError` if it is none of the choices: strings, bools or None."""
    if not any(isinstance(value, type(choice)) and value == choice for choice in choices):
        *most, last = [json.dumps(x) if isinstance(x, str) else repr(x) for x in choices]
        raise ValueError(f"{name}={value!r}: must be {', '.join(most)} or {last}.")
    return value


def choice(*choices: Any) -> Any:
    """A field of a `config` that is one of the choices, by default the first."""
    return field(check_choice, *choices, default=choices[0])


def check_callable(name: str, value: Any, what: str) -> Any:
    """`value`; a `ValueError` if it cannot be called."""
    if not callable(value):
        raise ValueError(f"{name}={value!r}: must be {what}.")
    return value


@dataclass_transform(frozen_default=True, kw_only_default=True, field_specifiers=(field, choice, dataclasses.field))
def config(kind: K) -> K:
    """Decorator of a configuration: a frozen dataclass with keyword-only fields and their rules (`field`).

    The method `_check_fields`, if there is one, is called last; rules for several fields are there. Fields without a
    default come first, also fields of a subclass. A `TypeError` for positional arguments or unknown names shows the
    call. `repr` shows the fields that differ from their defaults.
    """

    def post_init(self: Any) -> None:
        for x in dataclasses.fields(self):
            if "rule" in x.metadata:
                set_checked(self, x.name, *x.metadata["rule"])
        if hasattr(self, "_check_fields"):
            self._check_fields()

    made: Any = kind
    made.__post_init__ = post_init
    made = dataclasses.dataclass(frozen=True, kw_only=True)(made)
    by_name = made.__dataclass_fields__.items()
    made.__dataclass_fields__ = dict(sorted(by_name, key=lambda x: x[1].default is not dataclasses.MISSING))
    complete_hash = made.__hash__

    def hashed(self: Any) -> int:
        try:
            return self.__dict__["_hash"]  # JAX asks at each call
        except KeyError:
            return self.__dict__.setdefault("_hash", complete_hash(self))

    def state(self: Any) -> dict[str, Any]:  # without the hash: that of a string is another in another process
        return {name: x for name, x in vars(self).items() if name != "_hash"}

    made.__hash__, made.__getstate__ = hashed, state
    construct, fields = made.__init__, [x.name for x in dataclasses.fields(made) if x.init]
    known, parameters = [x for x in fields if x[0] != "_"], inspect.signature(construct).parameters

    @functools.wraps(construct)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        name = type(self).__name__
        if args:
            found = f"got {brief(args[0])}, takes keyword arguments only"
            raise TypeError(f"{name}: {found}; write {name}({fields[0]}=...).")
        if unknown := [x for x in kwargs if x not in fields]:
            found = f"has no field {unknown[0]}; it has {', '.join(known)}{foreign_names.advice(unknown[0])}"
            raise TypeError(f"{name}: {found}.")
        construct(self, **kwargs)

    def text(self: Any) -> str:
        shown = [x for x in dataclasses.fields(self) if x.repr and getattr(self, x.name) != x.default]
        return f"{type(self).__name__}({', '.join(f'{x.name}={getattr(self, x.name)!r}' for x in shown)})"

    init.__signature__ = inspect.Signature([parameters[x] for x in ("self", *known)])  # pyright: ignore[reportAttributeAccessIssue]
    made.__init__, made.__repr__, made._is_config = init, text, True
    return jax.tree_util.register_static(made)  # so that programs may take one as an ordinary argument


def check_indices(indices: Any, num_axes: int | None = 1, name: str = "indices") -> jax.Array:
    """`indices` as int32; a `ValueError` if they are no integers or have not `num_axes` axes (None: any number)."""
    if isinstance(getattr(indices, name, None), jax.Array):
        raise ValueError(f"{name}: got a {type(indices).__name__}, expected its field: give sample.{name}.")
    indices = as_int32(indices)
    if indices.dtype != jnp.int32 or num_axes not in (None, indices.ndim):
        expected = "integers" if num_axes is None else "a vector of integers"
        raise ValueError(f"{name}: got {type_text(indices)}, expected {expected}.")
    return jnp.asarray(indices)


def check_insertion_errors(td_errors: Any, shape: tuple[int, ...], each: str) -> jax.Array:
    """Initial TD errors of added items, flattened; a `ValueError` if they are not numbers of `shape`."""
    expected = f"float{list(shape)}, one number {each}; NaN if unknown"
    return as_float(as_real("td_errors", td_errors, expected, shape, REAL)).reshape(-1)


def check_state(config: Any, state: Any, kind: type) -> None:
    """Raise a `ValueError` if `state`, the first argument of a method of `config`, is not of the class `kind`."""
    if isinstance(state, kind):
        return
    found = type_text(state) if isinstance(state, jax.Array | np.ndarray) else type(state).__name__
    expected = f"{kind.__name__}, as init of {type(config).__name__} returns it"
    raise ValueError(f"state: got {found}, expected {expected}; give it first.")


def check_key(key: Any) -> Any:
    """`key`; a `ValueError` if it is not a single PRNG key, typed or raw."""
    is_array = isinstance(key, jax.Array | np.ndarray)
    is_typed = is_array and jnp.issubdtype(key.dtype, jax.dtypes.prng_key)
    if not is_array or (key.ndim != 0 if is_typed else (key.ndim, key.dtype) != (1, jnp.uint32)):
        found = type_text(key) if is_array else brief(key)
        raise ValueError(f"key: got {found}, expected one PRNG key, such as jax.random.key(0).")
    return key
