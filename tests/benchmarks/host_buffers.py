"""Replay buffers of host libraries (cpprb, torchrl) as Python loops."""

import jax
from harness import LoopProgram
from settings import Setting


def cpprb_program(setting: Setting, prioritized: bool = True) -> LoopProgram:
    import cpprb

    spec = {name: {"shape": shape or 1, "dtype": dtype} for name, (shape, dtype) in setting.spec.items()}
    added, rows = setting.batch(setting.num_added), setting.fill_rows()

    def make():
        if prioritized:
            buffer = cpprb.PrioritizedReplayBuffer(setting.capacity, spec, alpha=0.6, eps=1e-6)
        else:
            buffer = cpprb.ReplayBuffer(setting.capacity, spec)
        filling = setting.batch(rows, seed=1)
        for _ in range(setting.capacity // rows):
            buffer.add(**filling)
        return buffer

    buffers = [make() for _ in range(setting.seeds)]

    def step():
        for buffer in buffers:
            buffer.add(**added)
            if prioritized:
                sample = buffer.sample(setting.batch_size, beta=0.4)
                buffer.update_priorities(sample["indexes"], sample["reward"][:, 0])
            else:
                buffer.sample(setting.batch_size)

    return LoopProgram(step)


def torchrl_program(setting: Setting, prioritized: bool = True) -> LoopProgram:
    import torch
    from tensordict import TensorDict
    from torchrl.data import LazyTensorStorage, PrioritizedSampler, RandomSampler, ReplayBuffer

    device = "cuda" if jax.default_backend() == "gpu" and torch.cuda.is_available() else "cpu"
    sampler = PrioritizedSampler(setting.capacity, alpha=0.6, beta=0.4) if prioritized else RandomSampler()
    storage = LazyTensorStorage(setting.capacity, device=device)
    buffer = ReplayBuffer(storage=storage, sampler=sampler, batch_size=setting.batch_size)

    def tensors(rows, seed=0):
        items = {name: torch.as_tensor(x, device=device) for name, x in setting.batch(rows, seed=seed).items()}
        return TensorDict(items, [rows], device=device)

    rows = setting.fill_rows()
    filling, added = tensors(rows, seed=1), tensors(setting.num_added)
    for _ in range(setting.capacity // rows):
        buffer.extend(filling)

    def step():
        buffer.extend(added)
        if prioritized:
            items, info = buffer.sample(return_info=True)
            buffer.update_priority(info["index"], items["reward"])
        else:
            buffer.sample()
        if device == "cuda":
            torch.cuda.synchronize()

    return LoopProgram(step)
