"""Settings for the whole suite."""

import gc
import multiprocessing
import os
import tempfile

import hypothesis
import jax
import pytest
from jax.experimental.compilation_cache import compilation_cache

jax.config.update("jax_num_cpu_devices", 8)  # to be shards
hypothesis.settings.register_profile("suite", deadline=None, derandomize=True, print_blob=True)
hypothesis.settings.load_profile("suite")
gc.set_threshold(100_000)  # tracing makes many objects and little garbage: collecting took a tenth of its time


def pytest_configure(config):
    """All workers of one run share what they compile, which is most of the work, and no run sees another's."""
    if not hasattr(config, "workerinput"):
        folder = tempfile.TemporaryDirectory(prefix="jaxreplay-tests-")
        config.add_cleanup(folder.cleanup)
        os.environ["JAXREPLAY_TESTS_CACHE"] = folder.name  # workers inherit it
    jax.config.update("jax_compilation_cache_dir", os.environ["JAXREPLAY_TESTS_CACHE"])
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


@pytest.fixture
def compiled_afresh():
    """For tests that read something off a compiled program: it does not come from the shared cache."""
    jax.config.update("jax_enable_compilation_cache", False)
    compilation_cache.reset_cache()  # the setting is only read once
    yield
    jax.config.update("jax_enable_compilation_cache", True)
    compilation_cache.reset_cache()


@pytest.fixture(scope="session")
def children():
    """Makes processes that start quickly."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["orbax.checkpoint", "optax", "pytest", "jaxreplay"])
    return context
