"""Replay buffers of host libraries (cpprb, torchrl, dopamine) as Python loops."""

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


def dopamine_program(setting: Setting) -> LoopProgram:
    """dopamine's replay buffer of its JAX agents, uncompressed; it takes one step at a time, with next states.

    Its capacity is one less: at a power of two it overruns its tree as soon as it is full (4.1.2).
    """
    from dopamine.jax.replay_memory import accumulator, elements, replay_buffer, samplers

    capacity = setting.capacity - 1
    buffer = replay_buffer.ReplayBuffer(
        accumulator.TransitionAccumulator(stack_size=1, update_horizon=1, gamma=0.99),
        samplers.PrioritizedSamplingDistribution(0, priority_exponent=0.6, max_capacity=capacity),
        batch_size=setting.batch_size,
        max_capacity=capacity,
        compress=False,
    )
    name = next(iter(setting.spec))
    items = setting.batch(setting.num_added)
    steps = [elements.TransitionElement(items[name][i], 0, items["reward"][i], False) for i in range(setting.num_added)]

    def add(count):
        for i in range(count):
            largest = buffer._sampling_distribution._sum_tree.max_recorded_priority
            buffer.add(steps[i % setting.num_added], priority=largest or 1.0)

    add(setting.capacity + 1)

    def step():
        add(setting.num_added)
        batch, drawn = buffer.sample(setting.batch_size, with_sample_metadata=True)
        weights = (capacity * drawn.probabilities) ** -0.4
        buffer.update(drawn.keys, priorities=batch.reward + 1e-6)
        return weights / weights.max()

    return LoopProgram(step)
