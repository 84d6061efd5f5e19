"""Settings for the whole suite."""

import atexit
import ctypes
import gc
import importlib.util
import multiprocessing
import os
import pathlib
import shutil
import sys
import tempfile

if sys.dont_write_bytecode:
    # Each process would read the sources of JAX, for seconds: the processes of one run share their bytecode.
    sys.dont_write_bytecode, sys.pycache_prefix = False, tempfile.mkdtemp(prefix="jaxreplay-bytecode-")
    atexit.register(shutil.rmtree, sys.pycache_prefix, ignore_errors=True)
    os.environ["PYTHONPYCACHEPREFIX"] = sys.pycache_prefix
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

import hypothesis
import jax
import meter
import pytest
import seeds
from jax.experimental.compilation_cache import compilation_cache

from jaxreplay._common import devices

# Compiling is nearly all of the suite's work. LLVM's optimisation and XLA's newer code generators double it, and change
# no result beyond rounding; with XLA_FLAGS set, even to nothing, programs are compiled as it says. Read by XLA when
# the first program is compiled; an XLA that has the older code generators no more ignores that option.
QUICK = (
    "--xla_backend_optimization_level=0 --xla_cpu_parallel_codegen_split_count=1"
    " --xla_backend_extra_options=xla_cpu_disable_new_fusion_emitters"
)
os.environ.setdefault("XLA_FLAGS", QUICK)
# Of the extra `bench`, with which `.ci/run benchmark` runs it.
collect_ignore = [] if importlib.util.find_spec("flashbax") else ["test_as_flashbax.py"]
MEMORY = pathlib.Path("/proc/self/statm")
MOST_BYTES = 1_300_000_000  # of a process; two together need less than 4 GB
jax.config.update("jax_num_cpu_devices", 8)  # to be shards
hypothesis.settings.register_profile(
    "suite", deadline=None, derandomize=seeds.GIVEN is None, database=None, print_blob=True
)
hypothesis.settings.load_profile("suite")
gc.set_threshold(100_000)  # tracing makes many objects and little garbage: collecting took a tenth of its time


def pytest_addoption(parser):
    parser.addoption("--meter", action="store_true", help="list what files and tests compile")


def pytest_configure(config):
    """All processes of one run share what they compile, which is most of the work.

    A virtual environment in the checkout keeps it for the next run; elsewhere it goes. JAX_COMPILATION_CACHE_DIR names
    another folder, and an environment that is made anew, as `.ci/run` does, starts with nothing.
    """
    seeds.fresh()  # before there are workers
    config.pluginmanager.register(meter.Meter(), "meter")
    if seeds.GIVEN is not None:  # before the plugin of hypothesis reads it; state machines take it too
        config.option.hypothesis_seed = seeds.GIVEN
    if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
        folder = meter.kept_cache(pathlib.Path(sys.prefix), pathlib.Path(__file__).parents[1])
        if folder is None:
            temporary = tempfile.TemporaryDirectory(prefix="jaxreplay-tests-")
            config.add_cleanup(temporary.cleanup)
            folder = temporary.name
        os.environ["JAX_COMPILATION_CACHE_DIR"] = str(folder)  # workers and children inherit it
    for name, value in {
        "jax_compilation_cache_dir": os.environ["JAX_COMPILATION_CACHE_DIR"],
        "jax_persistent_cache_min_compile_time_secs": 0,
        "jax_persistent_cache_min_entry_size_bytes": -1,
    }.items():
        os.environ[name.upper()] = str(value)
        jax.config.update(name, value)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """No process waits at the end, while another has tests that it has not begun."""
    return importlib.import_module("xdist.scheduler").WorkStealingScheduling(config, log)


def pytest_report_header():
    return seeds.text()


def pytest_terminal_summary(terminalreporter):
    """With -q there is no header."""
    if terminalreporter.stats.get("failed"):
        terminalreporter.write_line(seeds.text())


@pytest.fixture
def compiled_afresh():
    """For tests that read something off a compiled program: it does not come from the shared cache."""
    jax.config.update("jax_enable_compilation_cache", False)
    compilation_cache.reset_cache()  # the setting is only read once
    yield
    jax.config.update("jax_enable_compilation_cache", True)
    compilation_cache.reset_cache()


def resident_bytes():
    """Memory of this process; 0 where it is not known."""
    return int(MEMORY.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") if MEMORY.exists() else 0


@pytest.fixture(scope="session")
def most_bytes():
    """What a process may hold before its programs are let go, in a list of one."""
    return [MOST_BYTES]


@pytest.fixture(autouse=True)
def few_programs(most_bytes):
    """Let programs go before they take too much memory, and some thousand of a Linux process's 65,530 memory maps."""
    yield
    if resident_bytes() > most_bytes[0]:
        jax.clear_caches()
        gc.collect()
        if sys.platform == "linux":
            ctypes.CDLL(None).malloc_trim(0)
        most_bytes[0] = max(MOST_BYTES, resident_bytes() + MOST_BYTES // 3)


@pytest.fixture(scope="session", autouse=True)
def layout():
    """JAXREPLAY_LAYOUT=gpu or tpu lays states out as for that backend: the tests of laws hold in every layout."""
    backend = os.environ.get("JAXREPLAY_LAYOUT")
    with pytest.MonkeyPatch.context() as patch:
        for module in (devices,) if backend else ():
            patch.setattr(module, "backend_of", lambda arrays=(): backend)
        yield


@pytest.fixture(scope="session")
def children():
    """Makes processes that start quickly."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tensorstore", "optax", "pytest", "jaxreplay"])
    return context
