"""(a) Trees alone: sample a batch of leaves, write new values to them."""

import jax
import jax.numpy as jnp
import numpy as np
from harness import LoopProgram, ScanProgram
from jax_buffers import flashbax_device, naive_draw
from settings import Setting

from jaxreplay import sum_tree


def tree_program(setting: Setting) -> ScanProgram:
    """Sample and update jaxreplay's tree alone."""

    def step(carry, key):
        tree, _ = carry
        drawn, _ = sum_tree.sample(tree, key, setting.batch_size, stratified=True)
        return sum_tree.update(tree, drawn, new_values(setting, key)), drawn

    every = jnp.arange(setting.capacity)
    tree = sum_tree.init(setting.capacity)
    tree = sum_tree.update(tree, every, first_values(setting), unique_indices=True)
    return ScanProgram(step, (jax.tree.map(jnp.copy, tree), jnp.zeros(setting.batch_size, jnp.int32)))


def flashbax_tree(setting: Setting) -> ScanProgram:
    from flashbax.buffers import sum_tree as tree
    from flashbax.buffers.prioritised_trajectory_buffer import SET_BATCH_FN

    set_batch = SET_BATCH_FN[flashbax_device()]

    def step(carry, key):
        state, _ = carry
        drawn = tree.stratified_sample(state, setting.batch_size, key)
        return set_batch(state, drawn, new_values(setting, key)), drawn

    state = jax.jit(lambda values: set_batch(tree.init(setting.capacity), jnp.arange(setting.capacity), values))
    return ScanProgram(step, (state(first_values(setting)), jnp.zeros(setting.batch_size, jnp.int32)))


def naive_table(setting: Setting) -> ScanProgram:
    def step(carry, key):
        priorities, _ = carry
        drawn, _ = naive_draw(priorities, key, setting.batch_size)
        return priorities.at[drawn].set(new_values(setting, key)), drawn

    return ScanProgram(step, (first_values(setting), jnp.zeros(setting.batch_size, jnp.int32)))


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


def dopamine_tree(setting: Setting) -> LoopProgram:
    from dopamine.jax.replay_memory import sum_tree

    tree, rng = sum_tree.SumTree(setting.capacity), np.random.default_rng(0)
    tree.set(np.arange(setting.capacity), rng.uniform(0.1, 1, setting.capacity))

    def step():
        drawn = tree.query(rng.uniform(0, tree.root, setting.batch_size))
        tree.set(drawn, rng.uniform(0.1, 1, setting.batch_size))

    return LoopProgram(step)
