"""(i) `Sharded`: what it costs on one device, and the time of a step on more devices with as much work for each."""

import datetime
import functools
import multiprocessing
import os
import time
from concurrent.futures import Future, ProcessPoolExecutor
from typing import Any

import jax
import jax_buffers
import numpy as np
from harness import ScanProgram, measure
from jax_buffers import eager_program, scan_program
from settings import Setting
from tqdm import tqdm

MAKERS = {"ReplayBuffer": jax_buffers.jaxreplay, "SequenceBuffer": jax_buffers.jaxreplay_sequences}
DEVICES = (1, 2, 4, 8)
QUARTILES = (25, 75)
START_SECONDS = 120.0

# (buffer, how it is called, capacity, batch size), the most telling first; with "scaling" the sizes are a device's.
CELLS = (
    *(("ReplayBuffer", how, 2**17, 256) for how in ("scan", "scaling", "eager")),
    *(("SequenceBuffer", how, 2**14, 256) for how in ("scan", "scaling")),
    ("ReplayBuffer", "scaling", 2**17, 1024),
    *(("ReplayBuffer", "scan", 2**power, size) for power in (14, 20) for size in (32, 256, 1024)),
    *(("ReplayBuffer", how, 2**17, size) for how in ("scan", "eager") for size in (32, 1024)),
    ("SequenceBuffer", "scan", 2**14, 32),
)
SMOKE = tuple(("ReplayBuffer", how, 2**10, 32) for how in ("scan", "eager", "scaling"))


def _mesh(devices: int) -> jax.sharding.Mesh:
    return jax.sharding.Mesh(np.array(jax.devices()[:devices]), ("data",))


def _on(devices: int, buffer: str, capacity: int, batch_size: int) -> ScanProgram:
    """The step of a buffer on so many devices, each of which does as much."""
    setting = Setting(capacity=capacity * devices, batch_size=batch_size * devices, num_added=16 * devices)
    return scan_program(functools.partial(MAKERS[buffer], mesh=_mesh(devices)), setting)


class RemoteProgram:
    """The same in a process of its own, which has so many CPU devices.

    The number of CPU devices is set before JAX starts. It also is the number of threads among which XLA splits the work
    of each device, so in a process with more devices than are used one device would be slower.
    """

    _program: ScanProgram  # in that process

    def __init__(self, devices: int, *args: Any):
        context = multiprocessing.get_context("spawn")
        self._process = ProcessPoolExecutor(1, context, RemoteProgram._start, (devices, *args))
        self.steps = self._do("steps")

    @staticmethod
    def _start(devices: int, *args: Any) -> None:
        jax.config.update("jax_num_cpu_devices", devices)
        RemoteProgram._program = _on(devices, *args)

    @staticmethod
    def _perform(name: str, *args: Any) -> Any:
        found = getattr(RemoteProgram._program, name)
        return found(*args) if callable(found) else found

    def _do(self, name: str, *args: Any) -> Any:
        done: Future = self._process.submit(RemoteProgram._perform, name, *args)
        return done.result(START_SECONDS)

    def __call__(self) -> float:
        return self._do("__call__")

    def calibrate(self, run_seconds: float) -> None:
        self._do("calibrate", run_seconds)
        self.steps = self._do("steps")

    def facts(self) -> dict[str, Any]:
        return self._do("facts")


def _cost(buffer: str, how: str, capacity: int, batch_size: int) -> tuple[dict, Any]:
    setting = Setting(capacity=capacity, batch_size=batch_size)
    program = functools.partial(eager_program, jitted=False) if how == "eager" else scan_program
    plain = MAKERS[buffer]
    makers = {"jaxreplay": plain, "Sharded": functools.partial(plain, mesh=_mesh(1))}
    return {name: functools.partial(program, make, setting) for name, make in makers.items()}, lambda key: "jaxreplay"


def _scaling(buffer: str, capacity: int, batch_size: int, smoke: bool) -> tuple[dict, Any]:
    on_cpu = jax.default_backend() == "cpu"
    program = RemoteProgram if on_cpu else _on
    most = 2 if smoke else DEVICES[-1] if on_cpu else jax.device_count()
    counts = [count for count in DEVICES if count <= most]
    return {str(n): functools.partial(program, n, buffer, capacity, batch_size) for n in counts}, lambda key: "1"


def run(found: dict[str, Any], smoke: bool, deadline: float, bar: tqdm) -> None:
    """Measure into `found`: rows of "cost" by library, rows of "scaling" by number of devices; cells "not_run"."""
    on_cpu = jax.default_backend() == "cpu"
    scales = on_cpu or jax.device_count() > 1
    runs, run_seconds = (2, 0.005) if smoke else (41, 0.04)
    found |= {"date": datetime.date.today().isoformat(), "runs": runs, "cores": os.cpu_count() if on_cpu else None}
    found |= {"cost": [], "scaling": [], "not_run": []}
    if not scales:
        found["skipped"] = "there is one accelerator"
    for buffer, how, capacity, batch_size in SMOKE if smoke else CELLS:
        name = f"i {buffer} {how} N={capacity} B={batch_size}"
        if how == "scaling" and not scales:
            continue
        if time.perf_counter() > deadline:
            found["not_run"].append(name)
            continue
        bar.set_description(name)
        row = {"buffer": buffer, "how": how, "capacity": capacity, "batch_size": batch_size}
        if how == "scaling":
            makers, base = _scaling(buffer, capacity, batch_size, smoke)
            found["scaling"].append(row | {"devices": measure(makers, base, runs, run_seconds, QUARTILES)})
        else:
            makers, base = _cost(buffer, how, capacity, batch_size)
            found["cost"].append(row | {"libraries": measure(makers, base, runs, run_seconds, QUARTILES)})
