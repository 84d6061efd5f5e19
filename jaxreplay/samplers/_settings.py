"""Settings that a sampler leaves open: `init` takes them, and its state keeps them as arrays."""

import inspect
from typing import Any

import jax
import jax.numpy as jnp


def open_settings(sampler: Any) -> tuple[str, ...]:
    """Names of the settings that `sampler` leaves open."""
    return getattr(sampler, "open_settings", ())


def abstract_settings(sampler: Any) -> dict[str, jax.ShapeDtypeStruct]:
    """The open settings, float32 [] each, for the shapes of a state."""
    return {name: jax.ShapeDtypeStruct((), jnp.float32) for name in open_settings(sampler)}


def init_sampler(sampler: Any, capacity: int, settings: dict[str, Any]) -> Any:
    """The initial state of `sampler` with these settings.

    Raises:
      TypeError: the sampler's `init` does not take one of them.
      ValueError: as the sampler's `init`.
    """
    for name in settings:
        if name not in inspect.signature(sampler.init).parameters:
            raise TypeError(f"init: {sampler!r} takes no setting {name!r}.")
    return sampler.init(capacity, **settings)
