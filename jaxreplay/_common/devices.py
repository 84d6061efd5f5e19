"""Chooses the backend for which a state is laid out.

The fan-out of trees and the layout of storage suit one backend. They are chosen where a state is made (`init`,
`restore`, `migrate`, `on_this_backend`), by the first of these that says where its arrays will be:

1. the mesh of a `Sharded`, or the devices of the arguments: of committed arrays (`jax.device_put`), of a
   `jax.ShapeDtypeStruct` with a sharding, of traced arrays over a mesh with explicit axes;
2. `jax.default_device`, which inside `jax.eval_shape` and `jax.jit(...).trace` may name a backend that is absent;
3. the default backend of JAX.

All other methods follow the state, whose static fields hold the layout.
"""

import contextlib
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.core
from jax.sharding import AbstractMesh, Sharding

BACKENDS = {"cpu": "cpu", "gpu": "gpu", "cuda": "gpu", "rocm": "gpu", "tpu": "tpu"}  # by platform

S = TypeVar("S")


def backend_of(arrays: Any = ()) -> str:
    """Backend of a state that is made from `arrays`, or that consists of them."""
    device = _device_of(arrays)
    if device is None:
        device = jax.config.jax_default_device  # pyright: ignore[reportAttributeAccessIssue]
    platform = jax.default_backend() if device is None else getattr(device, "platform", device)
    return BACKENDS.get(platform, platform)


def init_on(arrays: Any, make: Callable[[], S]) -> S:
    """The state that `make` makes, on the device of `arrays`; a `ValueError` if it does not fit the device."""
    device = _device_of(arrays)
    with contextlib.nullcontext() if device is None else jax.default_device(device):
        try:
            return jax.block_until_ready(make())  # a GPU allocates, and fails to, after the call
        except jax.errors.JaxRuntimeError as error:
            if "RESOURCE_EXHAUSTED" not in str(error):
                raise
            raise ValueError(f"init: {error} print(jr.memory(buffer, items)) shows the bytes of each part.") from error


def _device_of(arrays: Any) -> Any:
    """A device, or its platform, of a pytree of arrays, specs and shardings; None if they may be anywhere."""
    for x in jax.tree.leaves(arrays):
        if isinstance(x, Sharding):
            sharding = x
        elif isinstance(x, jax.core.Tracer):
            sharding = jax.typeof(x).sharding
        else:
            sharding = getattr(x, "sharding", None) if getattr(x, "committed", True) else None
        if isinstance(mesh := getattr(sharding, "mesh", None), AbstractMesh):
            found = getattr(getattr(mesh, "abstract_device", None), "platform", None)  # none before JAX 0.8
        else:
            found = sharding and min(sharding.addressable_devices or sharding.device_set, key=lambda device: device.id)
        if found is not None:
            return found
    return None
