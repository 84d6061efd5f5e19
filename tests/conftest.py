"""Settings for the whole suite."""

import multiprocessing

import hypothesis
import jax
import pytest

jax.config.update("jax_num_cpu_devices", 8)  # to be shards
hypothesis.settings.register_profile("suite", deadline=None, derandomize=True, print_blob=True)
hypothesis.settings.load_profile("suite")


@pytest.fixture(scope="session")
def children():
    """Makes processes that start quickly."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["orbax.checkpoint", "optax", "pytest", "jaxreplay"])
    return context
