"""Programs with arrays sharded over a mesh with explicit axes, as made by `jax.make_mesh`.

The sharding of such an array is part of its type, and most operations that combine two shardings are errors. Inside a
program of this package the axes are automatic: XLA chooses the sharding of intermediate arrays. Results are explicitly
sharded again.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

# Missing in JAX 0.7.0, where arguments over explicit axes are left unchanged.
_use_mesh: Any = getattr(jax.sharding, "use_abstract_mesh", None)


def over_any_mesh(function: Callable[..., Any]) -> Callable[..., Any]:
    """Decorator: `function(state, *arguments)` may be traced with arrays over any mesh.

    If an argument is sharded over explicit axes, so are the results. A returned state has the sharding of `state`.
    Leaves [k B, ...] are sharded along their first axis like arguments [B, ...]. All else is replicated.

    With an argument [6, 3] sharded along its first axis, and one [4] that is not sharded, results [6] and [12, 2] are
    sharded as the first one, as 6 divides them. A result [4] is replicated.
    """

    @functools.wraps(function)
    def call(state: Any, *arguments: Any) -> Any:
        leaves = jax.tree.leaves((state, arguments))
        mesh = next((mesh for mesh in map(_explicit_mesh, leaves) if mesh is not None), None)
        if mesh is None or _use_mesh is None:
            return function(state, *arguments)
        automatic = mesh.update_axis_types(dict.fromkeys(mesh.explicit_axes, AxisType.Auto))
        of_rows = {x.shape[0]: spec[:1] for x in leaves if any((spec := _spec(x))[:1]) and x.shape[0]}

        def within(x: Any) -> Any:
            return x if _explicit_mesh(x) is None else _resharded(x, automatic, ())

        def as_old(x: jax.Array, old: Any) -> jax.Array:
            old_mesh = jax.typeof(old).sharding.mesh
            is_automatic = not old_mesh.empty and not old_mesh.explicit_axes
            return x if is_automatic else _resharded(x, mesh, _spec(old))

        def as_given(result: Any) -> Any:
            if jax.tree.structure(result) == jax.tree.structure(state):
                return jax.tree.map(as_old, result, state)
            if type(result) is tuple:
                return tuple(map(as_given, result))
            return jax.tree.map(as_rows, result)

        def as_rows(x: jax.Array) -> jax.Array:
            fitting = (spec for count, spec in of_rows.items() if x.ndim and x.shape[0] % count == 0)
            return _resharded(x, mesh, next(fitting, ()))

        with _use_mesh(automatic):
            result = function(*jax.tree.map(within, (state, *arguments)))
        return as_given(result)

    return call


def mesh_here(mesh: Mesh) -> Mesh | AbstractMesh:
    """`mesh`, or its abstract mesh with automatic axes inside `over_any_mesh`."""
    here = jax.sharding.get_abstract_mesh()
    is_automatic = here.axis_names == mesh.axis_names and not here.explicit_axes
    return here if is_automatic and mesh.explicit_axes else mesh


def _explicit_mesh(x: Any) -> AbstractMesh | None:
    """The mesh of an array that is sharded over explicit axes, else None."""
    mesh = jax.typeof(x).sharding.mesh if isinstance(x, jax.Array) else None
    return mesh if mesh is not None and mesh.explicit_axes else None


def _spec(x: Any) -> tuple[Any, ...]:
    """Partition spec of an array over explicit axes, else ()."""
    return () if _explicit_mesh(x) is None else tuple(jax.typeof(x).sharding.spec)


def _resharded(x: jax.Array, mesh: AbstractMesh, spec: tuple[Any, ...]) -> jax.Array:
    return jax.sharding.reshard(x, NamedSharding(mesh, PartitionSpec(*spec)))
