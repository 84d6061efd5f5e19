"""Programs of buffers and tracers, compiled for a GPU or a TPU that this machine lacks, or for its CPU.

Import this before jax: what it sets is read then.
"""

import contextlib
import dataclasses
import functools
import math
import os
import unittest.mock
from collections.abc import Callable, Iterator
from typing import Any

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ |= {"TPU_SKIP_MDS_QUERY": "1", "TPU_WORKER_HOSTNAMES": "localhost", "TPU_ACCELERATOR_TYPE": "v5litepod-4"}
os.environ["XLA_FLAGS"] = "--xla_gpu_autotune_level=0"

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding
from jax_buffers import flashbax_item_buffer

import jaxreplay as jr

SEQUENCE_LENGTH = 5
MAX_AGE = 1000
KEY = jax.eval_shape(lambda: jax.random.key(0))
STEPS = 1000  # of a scan: what comes before and after it does not count
H100 = """gpu_device_info {
  threads_per_block_limit: 1024 threads_per_warp: 32 shared_memory_per_block: 49152 shared_memory_per_core: 233472
  threads_per_core_limit: 2048 core_count: 132 fpus_per_core: 128 block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535 block_dim_limit_z: 65535 memory_bandwidth: 3352320000000 l2_cache_size: 52428800
  clock_rate_ghz: 1.98 device_memory_size: 84942979072 shared_memory_per_block_optin: 232448
  cuda_compute_capability { major: 9 minor: 0 } registers_per_core_limit: 65536 registers_per_block_limit: 65536
}
platform_name: "CUDA" dnn_version_info { major: 9 minor: 10 } device_description_str: "NVIDIA H100 80GB HBM3"
"""
TARGETS = {
    "h100": lambda n: ("cuda", {"topology_name": "h100", "target_config": H100, "topology": f"1x1x{n}"}),
    "tpu-v5e": lambda n: ("tpu", {"topology_name": "v5e:2x2" if n <= 4 else "v5e:2x4"}),
    "tpu-v6e": lambda n: ("tpu", {"topology_name": "v6e:2x2" if n <= 4 else "v6e:2x4"}),
}
ITEMS = {
    "5 floats": ((5,), np.float32),
    "17 floats": ((17,), np.float32),
    "64 bfloat16": ((64,), jnp.bfloat16),
    "376 floats": ((376,), np.float32),
    "84x84x4 bytes": ((84, 84, 4), np.uint8),
    "64x64x3 bytes": ((64, 64, 3), np.uint8),
    "10x10x4 floats": ((10, 10, 4), np.float32),
}
SAMPLERS = {
    "uniform": jr.Uniform(),
    "distinct": jr.Uniform(replacement=False),
    "prioritized": jr.Prioritized(),
    "global": jr.Prioritized(normalize="global"),
    "stored": jr.Prioritized(max_priority="stored"),
    "recent": jr.Recent(half_life=1000.0),
    "fading": jr.Prioritized(half_life=1e5),
    "uniform max_uses": jr.Uniform(),
    "max_uses": jr.Prioritized(),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cell:
    """What is compiled.

    Attributes:
      kind: "replay", "sequence", "reservoir", "mixture" (of two `ReplayBuffer`), "joint mixture" (of their items),
        "tracer", "pools", "tasks", "levels", "levels by rank", "sharded" (a `ReplayBuffer` over 8 devices) or
        "flashbax".
      items: a key of ITEMS.
      capacity: N, items, steps of all streams or tasks.
      batch_size: B, items, sequences or groups.
      seeds: buffers that are mapped over.
      sampler: a key of SAMPLERS.
      windows: of a sequence buffer.
      gaps: of a sequence buffer that is told of rows that may not be drawn.
      draw: "sample", "max_age" (the newest MAX_AGE alone), "epoch", "later" (sequences and a later row of each) or
        "diagnostics" (a step also returns the numbers of its batch, in one array).
      writes: TD errors come with what is added, and what was drawn is written back.
      closes: a step also closes the streams in which the first item's first number is positive.
      n: steps of a tracer's window.
      orders: also a scan in which the operations follow each other in every order.
    """

    kind: str = "replay"
    items: str = "5 floats"
    capacity: int = 2**20
    batch_size: int = 256
    seeds: int = 1
    sampler: str = "prioritized"
    windows: str = "any"
    gaps: bool = False
    draw: str = "sample"
    writes: bool = False
    closes: bool = False
    n: int = 3
    orders: bool = dataclasses.field(default=False, compare=False)

    def __str__(self):
        power = self.capacity.bit_length() - 1
        name = f"{self.kind}, {self.sampler}, {self.items}, N=2^{power}, B={self.batch_size}"
        name += f", windows {self.windows}" if self.windows != "any" else ""
        name += ", gaps" if self.gaps else ""
        name += f", {self.draw}" if self.draw != "sample" else ""
        name += ", writes" if self.writes else ""
        name += ", closes" if self.closes else ""
        name += f", n={self.n}" if self.n != 3 else ""
        return name + (f", {self.seeds} seeds" if self.seeds > 1 else "")

    @property
    def num_devices(self) -> int:
        return 8 if self.kind == "sharded" else 1

    @property
    def item_bytes(self) -> int:
        shape, dtype = ITEMS[self.items]
        return math.prod(shape) * np.dtype(dtype).itemsize

    @property
    def batch_bytes(self) -> int:
        """Bytes of what is drawn at a time."""
        return self.seeds * self.batch_size * (SEQUENCE_LENGTH if self.kind == "sequence" else 1) * self.item_bytes

    @property
    def payload(self) -> int:
        """Bytes of what the user stores."""
        return self.seeds * self.capacity * self.item_bytes


@dataclasses.dataclass
class Operations:
    """The functions of a cell: `init() -> state`, the others `(state, *arguments) -> state, ...`.

    `arguments` gives the abstract arguments of each operation after the state.
    """

    init: Callable[[], Any]
    functions: dict[str, Callable[..., Any]]
    arguments: dict[str, tuple[Any, ...]]


def operations(cell: Cell, target: str, mesh: Mesh) -> Operations:
    """What a user does with a buffer: each of its methods, and a step that has them all."""
    if cell.kind == "tracer":
        return _tracer(cell)
    if cell.kind in ("pools", "tasks"):
        return _curriculum(cell)
    if cell.kind.startswith("levels"):
        return _levels(cell)
    shape, dtype = ITEMS[cell.items]
    added = (1, 16) if cell.kind == "sequence" else (16,)
    items = jax.ShapeDtypeStruct((*added, *shape), dtype)
    floats, handles = (jax.ShapeDtypeStruct((cell.batch_size,), kind) for kind in (jnp.float32, jnp.int32))
    buffer = _buffer(cell, target, mesh)

    def sample(state, key):
        drawn = buffer.sample(state, key)
        return state, drawn if hasattr(drawn, "items") else (drawn.experience, getattr(drawn, "indices", None))

    def step(state, items, key):
        state = buffer.add(state, items)
        drawn = buffer.sample(state, key)
        if cell.kind == "flashbax":
            values, weights = drawn.experience, getattr(drawn, "probabilities", 1.0)
            handles = getattr(drawn, "indices", None)
        else:
            values, weights, handles = drawn.items, drawn.weights, drawn.indices
        if cell.writes:
            state = buffer.set(state, handles, values + jnp.ones((), values.dtype))
        rows = values.reshape(cell.batch_size, -1)
        shown = buffer.numbers(state, drawn) if cell.draw == "diagnostics" else rows[0, 0]
        if cell.closes:
            state = buffer.end_streams(state, mask=_first_numbers(items)[0] + shown > 0)
        return buffer.update(state, handles, weights + jnp.sum(rows[:, :4].astype(jnp.float32), axis=1)), shown

    def orders(state, items, key):
        handles, td_errors = jnp.zeros(cell.batch_size, jnp.int32), jnp.zeros(cell.batch_size)
        for number, letter in enumerate("aasaussuu"):  # a cycle in which each pair occurs
            if letter == "a":
                state = buffer.add(state, items + jnp.mean(td_errors).astype(items.dtype))
            elif letter == "u":
                state, handles, td_errors = buffer.update(state, handles, td_errors), handles ^ 1, td_errors + 1
            else:
                drawn = buffer.sample(state, jax.random.fold_in(key, number))
                rows = drawn.items.reshape(cell.batch_size, -1)
                handles, td_errors = drawn.indices, td_errors + drawn.weights + rows[:, 0]
        return state, jnp.mean(td_errors)

    functions = {"add": lambda *x: buffer.add(*x), "sample": sample, "update": lambda *x: buffer.update(*x)}
    functions |= {"step": step, "orders": orders, "set": lambda *x: buffer.set(*x)}
    drawn_axes = (SEQUENCE_LENGTH,) if cell.kind == "sequence" else ()
    values = jax.ShapeDtypeStruct((cell.batch_size, *drawn_axes, *shape), dtype)
    arguments = {"add": (items,), "sample": (KEY,), "update": (handles, floats), "set": (handles, values)}
    arguments |= {"step": (items, KEY), "orders": (items, KEY)}
    wanted = {"add": cell.draw == "sample", "update": cell.draw == "sample", "orders": cell.orders, "set": cell.writes}
    functions = {name: x for name, x in functions.items() if wanted.get(name, True)}
    return Operations(lambda: buffer.init(items), functions, arguments)


class _Bound:
    """A buffer that draws as a cell says.

    With `windows`, episodes end where an item's first number is positive. With `gaps`, where it is above 2 the row may
    not be drawn.
    """

    def __init__(self, buffer: Any, cell: Cell):
        self.init, self.add, self.update, self.set = buffer.init, buffer.add, buffer.update, buffer.set
        self.end_streams = getattr(buffer, "end_streams", None)
        if cell.writes:
            self.add = lambda state, items: buffer.add(state, items, td_errors=items[..., 0])
        if cell.kind == "reservoir":
            self.add = lambda state, items: buffer.add(state, items, jax.random.key(state.ring.inserted))
        if cell.kind.endswith("mixture"):
            self.add = lambda state, items: buffer.add(state, 0, items)
        if cell.windows != "any" or cell.draw == "later":
            self.add = lambda state, items: buffer.add(state, items, ends=_first_numbers(items) > 0)
        if cell.gaps:
            self.add = lambda state, items: buffer.add(
                state, items, ends=_first_numbers(items) > 0, drawable=_first_numbers(items) <= 2
            )
        self.sample = {
            "sample": lambda state, key: buffer.sample(state, key, cell.batch_size),
            "diagnostics": lambda state, key: buffer.sample(state, key, cell.batch_size),
            "max_age": lambda state, key: buffer.sample(state, key, cell.batch_size, max_age=MAX_AGE),
            "epoch": lambda state, key: buffer.epoch(state, key, cell.batch_size, step=_number(key)),
            "later": lambda state, key: _with_later(buffer, state, key, cell.batch_size),
        }[cell.draw]
        self.numbers = lambda state, drawn: jnp.stack([*jr.diagnostics(buffer, state, sample=drawn).values()])


def _first_numbers(items: jax.Array) -> jax.Array:
    return items.reshape(*items.shape[:2], -1)[..., 0]


def _with_later(buffer: Any, state: Any, key: jax.Array, batch_size: int) -> Any:
    """A batch whose weights depend on a later row of each sequence."""
    drawn = buffer.sample(state, key, batch_size)
    later, steps = buffer.later(state, jax.random.fold_in(key, 1), drawn.indices, law="geometric")
    return dataclasses.replace(drawn, weights=drawn.weights + later[:, 0] + steps)


def _number(key: jax.Array) -> jax.Array:
    """Some batch of an epoch."""
    return (jax.random.key_data(key)[-1] % 8).astype(jnp.int32)


def _buffer(cell: Cell, target: str, mesh: Mesh) -> Any:
    sampler = SAMPLERS[cell.sampler]
    if cell.kind == "flashbax":
        return _flashbax(cell, target)
    if cell.kind == "sequence":
        buffer = jr.SequenceBuffer(
            length=cell.capacity // 16,
            num_envs=16,
            sequence_length=SEQUENCE_LENGTH,
            sampler=sampler,
            windows=cell.windows,
            gaps=cell.gaps,
            hindsight=cell.draw == "later",
        )
    elif cell.kind == "reservoir":
        buffer = jr.ReservoirBuffer(capacity=cell.capacity, sampler=sampler)
    elif cell.kind.endswith("mixture"):
        sources = (jr.ReplayBuffer(capacity=cell.capacity // 2, sampler=sampler),) * 2
        buffer = jr.Mixture(buffers=sources, weights="joint" if cell.kind.startswith("joint") else "own")
    else:
        max_uses = 8 if "max_uses" in cell.sampler else None
        buffer = jr.ReplayBuffer(capacity=cell.capacity, sampler=sampler, max_uses=max_uses)
    return _Bound(jr.Sharded(buffer=buffer, mesh=mesh) if cell.kind == "sharded" else buffer, cell)


def _flashbax(cell: Cell, target: str) -> Any:
    uniform, device = cell.sampler == "uniform", "tpu" if target.startswith("tpu") else "gpu"
    with unittest.mock.patch.object(jax, "devices", return_value=[]):  # it asks whether the device is there
        buffer = flashbax_item_buffer(cell.capacity, cell.batch_size, uniform, device)

    class Adapted:
        init = staticmethod(lambda items: buffer.init(jnp.zeros(items.shape[1:], items.dtype)))
        add, sample = staticmethod(buffer.add), staticmethod(buffer.sample)

        @staticmethod
        def update(state, handles, td_errors):
            return state if uniform else buffer.set_priorities(state, handles, td_errors)

    return Adapted


def _tracer(cell: Cell) -> Operations:
    tracer = jr.NStep(n=cell.n, gamma=0.99, num_envs=cell.batch_size)
    floats = jax.ShapeDtypeStruct((cell.batch_size,), jnp.float32)
    flags = jax.ShapeDtypeStruct((cell.batch_size,), jnp.bool_)
    shape, dtype = ITEMS[cell.items]
    observations = jax.ShapeDtypeStruct((cell.batch_size, *shape), dtype)
    step = (observations, floats, floats, flags, flags, observations)

    def add(state, *step):
        state, batch, _ = tracer.add(state, *step)  # the last is a part of the batch; a program would copy it
        return state, batch

    def in_step(state, step, key):
        observations, action, reward, *flags, _ = step
        shown = observations + jax.random.uniform(key).astype(dtype)
        state, batch, _ = tracer.add(state, shown, action, reward + 1, *flags, shown)
        return state, (jnp.sum(batch.S_next[0].astype(jnp.float32)), batch.Rn)

    # With one step, `add` returns its arguments, which a program alone would copy.
    functions = {"step": in_step} if cell.n == 1 else {"add": add, "step": in_step}
    return Operations(lambda: tracer.init(*step), functions, {"add": step, "step": (step, KEY)})


def _curriculum(cell: Cell) -> Operations:
    if cell.kind == "tasks":
        tasks = jr.Tasks(num_tasks=cell.capacity, exploration=0.1)
    else:
        tasks = jr.DifficultyPools(tasks_per_env=(cell.capacity,), easy_threshold=0.9, hard_threshold=0.1)
    groups = jax.ShapeDtypeStruct((cell.batch_size,), jnp.int32)
    rewards = jax.ShapeDtypeStruct((cell.batch_size, 4), jnp.float32)

    def sample(state, key):
        return state, tasks.sample(state, key, cell.batch_size)

    def step(state, rewards, key):
        state, kept = tasks.update(state, tasks.sample(state, key, cell.batch_size)[0], rewards)
        return state, kept[0]

    functions = {"sample": sample, "update": lambda *x: tasks.update(*x), "step": step}
    return Operations(tasks.init, functions, {"sample": (KEY,), "update": (groups, rewards), "step": (rewards, KEY)})


def _levels(cell: Cell) -> Operations:
    by = "rank" if cell.kind == "levels by rank" else "proportional"
    levels = jr.Levels(capacity=cell.capacity, prioritization=by, staleness=0.3)
    shape, dtype = ITEMS[cell.items]
    new = jax.ShapeDtypeStruct((cell.batch_size, *shape), dtype)
    slots, scores = (jax.ShapeDtypeStruct((cell.batch_size,), kind) for kind in (jnp.int32, jnp.float32))

    def replay(state, scores, key):
        state, slots, drawn = levels.sample(state, key, cell.batch_size)
        return levels.update(state, slots, scores), jnp.sum(drawn[0])

    functions = {
        "sample": lambda state, key: levels.sample(state, key, cell.batch_size),
        "insert": lambda *x: levels.insert(*x),
        "update": lambda *x: levels.update(*x),
        "step": replay,
    }
    arguments = {"sample": (KEY,), "insert": (new, scores), "update": (slots, scores), "step": (scores, KEY)}
    return Operations(lambda: levels.init(jax.ShapeDtypeStruct(shape, dtype)), functions, arguments)


@functools.cache
def mesh_of(target: str, num_devices: int) -> Mesh:
    """Devices that are not there; or those of the CPU."""
    if target == "cpu":
        return Mesh(np.array(jax.devices()[:num_devices]), ("data",))
    platform, topology = TARGETS[target](num_devices)
    with _quiet():
        devices = topologies.get_topology_desc(platform=platform, **topology).devices[:num_devices]
    return Mesh(np.array(devices), ("data",))


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without what libraries say about a machine that has no accelerator."""
    error = os.dup(2)
    with open(os.devnull, "w") as nothing:
        os.dup2(nothing.fileno(), 2)
        try:
            yield
        finally:
            os.dup2(error, 2)


def arrays_of(target: str, cell: Cell) -> list[jax.ShapeDtypeStruct]:
    """Shapes and dtypes of the arrays of its state."""
    mesh = mesh_of(target, cell.num_devices)
    return jax.tree.leaves(_state_of(operations(cell, target, mesh), mesh))


def _state_of(made: Operations, mesh: Mesh) -> Any:
    with jax.default_device(mesh.devices.flat[0]):
        return jax.eval_shape(made.init)


def compile_for(target: str, cell: Cell, only: str = "") -> Iterator[tuple[str, Any, int]]:
    """The name of each operation, or of the `only` one, its program with the state donated, and the steps it makes."""
    mesh = mesh_of(target, cell.num_devices)
    made = operations(cell, target, mesh)
    whole = (
        SingleDeviceSharding(mesh.devices.flat[0]) if cell.num_devices == 1 else NamedSharding(mesh, PartitionSpec())
    )
    parts = whole if cell.num_devices == 1 else NamedSharding(mesh, PartitionSpec("data"))

    def placed(x):
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=parts if x.ndim else whole)

    def stacked(tree):
        return jax.tree.map(lambda x: jax.ShapeDtypeStruct((cell.seeds, *x.shape), x.dtype), tree)

    state = _state_of(made, mesh)
    for name, function in made.functions.items():
        if only not in ("", name):
            continue
        arguments = made.arguments[name]
        if cell.seeds > 1:
            function = jax.vmap(function)
        in_scan = name in ("step", "orders")
        if in_scan:
            function = _scanned(function, cell.seeds)
        args = [stacked(x) if cell.seeds > 1 else x for x in (state, *arguments)]
        if in_scan:
            args[-1] = arguments[-1]
        yield name, compile_on(mesh, function, jax.tree.map(placed, args)), STEPS if in_scan else 1


def compile_on(mesh: Mesh, function: Callable[..., Any], arguments: Any) -> Any:
    """A function compiled for the devices of a mesh, with its first argument donated."""
    return _compile(mesh.devices.flat[0], jax.jit(function, donate_argnums=0), arguments)


def compile_jitted(target: str, function: Any, arguments: Any) -> Any:
    """A jitted function compiled for one device of a target. Its arrays may be abstract."""
    device = mesh_of(target, 1).devices.flat[0]

    def placed(x: Any) -> Any:
        if not hasattr(x, "shape"):
            return x
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=SingleDeviceSharding(device))

    return _compile(device, function, jax.tree.map(placed, arguments))


def _compile(device: jax.Device, function: Any, arguments: Any) -> Any:
    options = {"xla_backend_optimization_level": 0} if device.platform == "cpu" else {}  # of machine code
    with jax.default_device(device):  # a tracer chooses by it
        traced = function.trace(*arguments)
    lowered = traced.lower(lowering_platforms=("cuda" if device.platform == "gpu" else device.platform,))
    with _quiet():
        return lowered.compile(compiler_options=options)


def _scanned(function: Callable[..., Any], seeds: int) -> Callable[..., Any]:
    def run(state, items, key):
        keys = jax.random.split(key, STEPS * seeds).reshape(STEPS, *([seeds] if seeds > 1 else []))
        return lax.scan(lambda state, key: function(state, items, key), state, keys)

    return run
