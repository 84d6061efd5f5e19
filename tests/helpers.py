"""Helpers of several test modules: recorded cases, meshes, checks of trees, and readings of compiled programs."""

import contextlib
import dataclasses
import functools
import importlib
import itertools
import json
import os
import pathlib
import re
import signal
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh

import jaxreplay as jr
from jaxreplay import sum_tree
from jaxreplay._common import checks
from jaxreplay.sum_tree import _tree

NO_LLVM_PASSES = {"xla_backend_optimization_level": 0}  # tests read only what XLA decides before these passes
TARGET = os.environ.get("JAXREPLAY_COMPILE_FOR")  # a device that is not there, or None
if TARGET:
    sys.path.append(str(pathlib.Path(__file__).parent / "benchmarks"))
run_once = functools.partial(jax.jit, compiler_options=NO_LLVM_PASSES)
run_for_long = functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 3})


def rarely(case):
    """Mark a case of a parametrised test slow, where other cases are of its kind."""
    return pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=pytest.mark.slow)


def interruptible():
    """Let a process hear each signal: Python drops what a handler raises in a callback, such as JAX's of each garbage
    collection, so it comes again as an alarm. A shell lets what it runs in the background ignore Ctrl-C."""
    for number in (signal.SIGINT, signal.SIGALRM):
        signal.signal(number, signal.default_int_handler)
    interrupts = KeyboardInterrupt, SystemExit
    sys.unraisablehook = lambda x: isinstance(x.exc_value, interrupts) and signal.setitimer(signal.ITIMER_REAL, 0.05)


@dataclasses.dataclass(frozen=True)
class Ranked(jr.samplers.Index):
    """Masses are 1 / rank."""

    def masses(self, state):
        leaves = super().masses(state)
        return jnp.where(leaves > 0, 1 / (1.0 + jnp.argsort(jnp.argsort(-leaves))), 0.0)


@checks.config
class ByRank(jr.samplers.ByPriority):
    """A sampler as an author writes one, of which the probabilities are not in proportion to the leaves."""

    index = Ranked()
    by_rank = True


def pointers(tree):
    """Addresses of all arrays, of each device's part."""
    arrays = [x for x in jax.tree.leaves(tree) if isinstance(x, jax.Array) and x.size]
    arrays = [jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x for x in arrays]
    return [shard.data.unsafe_buffer_pointer() for x in arrays for shard in x.addressable_shards]


def rejects(message, function, *arguments, error=ValueError, **named):
    """Check that a call raises an error with this message, a regular expression."""
    with pytest.raises(error, match=message):
        function(*arguments, **named)


def check_happened(happened, least, count=None):
    """Check that each event in `least` happened at least that often per hundred of `count`, or of steps."""
    count = happened["steps"] if count is None else count
    short = {name: (happened[name], x) for name, x in least.items() if happened[name] < x * count / 100}
    assert not short, f"happened less often than it should: {short}; all: {dict(happened)}"


def cases(name):
    """Recorded behaviour of a replaced or compared system, from `vectors`."""
    return json.loads((pathlib.Path(__file__).parent / "vectors" / f"{name}.json").read_text())["cases"]


def mesh(num_shards, devices=None, kind=AxisType.Auto):
    return Mesh(np.array((devices or jax.devices("cpu"))[:num_shards]), ("data",), axis_types=(kind,))


def over_devices(buffer, num_shards, kind=AxisType.Auto):
    """The buffer in so many shards; itself for 0."""
    return jr.Sharded(buffer=buffer, mesh=mesh(num_shards, kind=kind)) if num_shards else buffer


def no_ends(buffer, steps):
    """The argument `ends` of `add`, of steps that end no episode, if the buffer needs it."""
    whole = getattr(buffer, "buffer", buffer)
    if getattr(whole, "windows", "any") == "any" and not getattr(whole, "hindsight", False):
        return {}
    return {"ends": np.zeros(jax.tree.leaves(steps)[0].shape[:2], bool)}


def numbers(first, count):
    return np.arange(first, first + count, dtype=np.int32)


def items(ids):
    """Identifiable items, numbered `ids` [...]."""
    like = jnp if isinstance(ids, jax.Array) else np
    ids = like.asarray(ids, np.int32)
    return {"id": ids, "x": (ids[..., None] * np.array([1, -1], np.int32)).astype(np.float32)}


def stack(*trees):
    """Stack leaves on the host, along a new leading axis."""
    return jax.tree.map(lambda *leaves: np.stack(leaves), *trees)


def at(tree, i):
    """Index `i` of every leaf, on the host."""
    return jax.tree.map(lambda leaf: leaf[i], jax.device_get(tree))


def types(tree):
    return jax.tree.map(lambda x: (x.shape, x.dtype, x.weak_type), tree)


def leaves_of(tree):
    """Leaves of a sum tree, on the host."""
    return sum_tree.leaves(jax.device_get(tree))


def check_tree(tree):
    """Check that every node above the leaves is the sum (and minimum, maximum) of its children; padding is empty."""
    fading = tree.fading
    tree = jax.tree.map(lambda nodes: np.asarray(nodes).reshape(-1), tree)
    if fading is not None:
        return check_fading(tree, fading)
    assert len(tree.sums[0]) <= (4 * 64 if tree.fanout == 64 else tree.fanout)
    for parents, children in itertools.pairwise(tree.sums):
        sums = children.reshape(-1, tree.fanout).sum(axis=1, dtype=np.float64)
        np.testing.assert_allclose(parents, np.pad(sums, (0, len(parents) - len(sums))), rtol=1e-6)
    assert not np.any(tree.sums[-1][tree.capacity :])
    if tree.maxima is not None:
        for parents, children in itertools.pairwise((*tree.maxima, tree.sums[-1])):
            maxima = children.reshape(-1, tree.fanout).max(axis=1)
            np.testing.assert_array_equal(parents, np.pad(maxima, (0, len(parents) - len(maxima))))
    if tree.minima is not None:
        np.testing.assert_array_equal(tree.minima[-1], np.where(tree.sums[-1] > 0, tree.sums[-1], _tree.NONE))
        for parents, children in itertools.pairwise(tree.minima):
            minima = children.reshape(-1, tree.fanout).min(axis=1)
            padding = (0, len(parents) - len(minima))
            np.testing.assert_array_equal(parents, np.pad(minima, padding, constant_values=_tree.NONE))


def check_fading(tree, fading):
    """Check that every node is the faded sum (and minimum) of its leaves, relative to the newest of them."""
    row, num_rows = np.arange(tree.capacity) // fading.streams, tree.capacity // fading.streams
    age = fading.newest // fading.streams - row + np.where(np.arange(tree.capacity) > fading.newest, num_rows, 0)
    leaf = tree.sums[-1][: tree.capacity].astype(float)
    for height, nodes in enumerate(reversed(tree.sums)):
        starts = np.arange(0, tree.capacity, tree.fanout**height)
        newest = np.minimum.reduceat(age, starts)
        its = np.repeat(newest, np.diff([*starts, tree.capacity]))
        masses = leaf * 2.0 ** ((its - age) / fading.half_life)
        np.testing.assert_allclose(nodes[: len(starts)], np.add.reduceat(masses, starts), rtol=1e-5)
        assert not np.any(nodes[len(starts) :])
        if tree.minima is not None:
            least = np.minimum.reduceat(np.where(leaf > 0, masses.clip(2.0**-126), _tree.NONE), starts)
            np.testing.assert_allclose(tree.minima[-1 - height][: len(starts)], least, rtol=1e-5)


@functools.partial(jax.jit, static_argnames=("fanout", "track_minimum"))
def _tree_of(leaves, **settings):
    return sum_tree.update(sum_tree.init(leaves.size, **settings), np.arange(leaves.size), leaves, unique_indices=True)


def tree_of(leaves, **settings):
    return _tree_of(np.array(leaves, np.float32), **settings)


def compiled(function, *arguments):
    """Compile a jitted function for these arguments, which may be abstract; for `TARGET` if there is one."""
    if TARGET is None:
        return function.lower(*arguments).compile(NO_LLVM_PASSES)
    return importlib.import_module("programs").compile_jitted(TARGET, function, arguments)


def big_copies(hlo, num_elements):
    """Lines of the HLO that copy, convert or transpose an array of at least `num_elements` elements."""
    found = []
    for line in hlo.splitlines():
        match = re.search(r"= \w+\[([\d,]+)\]\S* (copy|convert|copy-start|transpose)\(", line)
        if match and np.prod([int(axis) for axis in match.group(1).split(",")]) >= num_elements:
            found.append(line.strip())
    return found


_COLLECTIVE = re.compile(r"= (.*?) (all-reduce|all-gather|all-to-all|collective-permute|reduce-scatter)(-start)?\(")


def collectives(hlo):
    """Sizes, in elements, of the results of the collectives in a program."""
    sizes = []
    for line in hlo.splitlines():
        found = _COLLECTIVE.search(line)
        if found:
            for axes in re.findall(r"\[([\d,]*)\]", found.group(1)):
                sizes.append(int(np.prod([int(axis) for axis in axes.split(",") if axis])))
    return sizes


_listening: list[list[str]] = []


def _hear(event, *_, **__):
    if "backend_compile" in event:
        for heard in _listening:
            heard.append(event)


jax.monitoring.register_event_duration_secs_listener(_hear)  # once: JAX 0.7 cannot unregister it


@contextlib.contextmanager
def compilations():
    """A list that grows by one with every program compiled in the context."""
    _listening.append([])
    try:
        yield _listening[-1]
    finally:
        _listening.pop()
