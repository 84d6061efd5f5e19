"""(a) Trees alone: sample a batch of leaves, write new values to them."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from harness import LoopProgram, ScanProgram
from jax_buffers import flashbax_device
from settings import Setting

from jaxreplay import sum_tree


def _program(setting: Setting, tree: Any, draw: Callable, write: Callable) -> ScanProgram:
    """`draw(tree, key)` leaves and `write(tree, leaves, values)`; in it are the first values of all leaves."""

    def step(carry, key):
        drawn = draw(carry[0], key)
        return write(carry[0], drawn, new_values(setting, key)), drawn

    return ScanProgram(step, (jax.tree.map(jnp.copy, tree), jnp.zeros(setting.batch_size, jnp.int32)))


def tree_program(setting: Setting) -> ScanProgram:
    """Sample and update jaxreplay's tree alone."""

    def draw(tree, key):
        return sum_tree.sample(tree, key, setting.batch_size, stratified=True)[0]

    return _program(setting, sum_tree.of_leaves(first_values(setting)), draw, sum_tree.update)


def flashbax_tree(setting: Setting) -> ScanProgram:
    from flashbax.buffers import sum_tree as tree
    from flashbax.buffers.prioritised_trajectory_buffer import SET_BATCH_FN

    set_batch = SET_BATCH_FN[flashbax_device()]

    def draw(state, key):
        return tree.stratified_sample(state, setting.batch_size, key)

    full = jax.jit(lambda values: set_batch(tree.init(setting.capacity), jnp.arange(setting.capacity), values))
    return _program(setting, full(first_values(setting)), draw, set_batch)


def naive_table(setting: Setting) -> ScanProgram:
    """A table of priorities; every draw makes the cumulative sum of all of it."""

    def draw(priorities, key):
        cumulative = jnp.cumsum(priorities)
        targets = jax.random.uniform(key, (setting.batch_size,), jnp.float32, 0.0, cumulative[-1])
        return jnp.minimum(jnp.searchsorted(cumulative, targets, side="right"), priorities.size - 1)

    return _program(setting, first_values(setting), draw, lambda x, drawn, values: x.at[drawn].set(values))


def first_values(setting: Setting) -> jax.Array:
    return jax.random.uniform(jax.random.key(0), (setting.capacity,), jnp.float32, 0.1, 1.0)


def new_values(setting: Setting, key: jax.Array) -> jax.Array:
    return jax.random.uniform(key, (setting.batch_size,), jnp.float32, 0.1, 1.0)


def torchrl_tree(setting: Setting) -> LoopProgram:
    """torchrl's sum segment tree alone, on the GPU where its build has one."""
    import torch
    from torchrl import _torchrl

    if jax.default_backend() == "gpu" and hasattr(_torchrl, "CudaSumSegmentTreeFp32"):
        tree, device = _torchrl.CudaSumSegmentTreeFp32(setting.capacity), "cuda"
    else:
        tree, device = _torchrl.SumSegmentTreeFp32(setting.capacity), "cpu"
    tree[torch.arange(setting.capacity, device=device)] = torch.rand(setting.capacity, device=device)

    def step():
        total = tree.query(0, setting.capacity)
        drawn = tree.scan_lower_bound(torch.rand(setting.batch_size, device=device) * total)
        tree[drawn.clamp_max(setting.capacity - 1)] = torch.rand(setting.batch_size, device=device)
        if device == "cuda":
            torch.cuda.synchronize()

    return LoopProgram(step)
