"""A run of two sharded buffers over four devices, of one process or of several, each with its environments."""

import contextlib
import os
import signal
import socket

import jax
import numpy as np
from helpers import over_devices
from jax.experimental import multihost_utils

import jaxreplay as jr

STEPS, SAVED_EVERY, DIES_AT = 24, 10, 16
NUM_ENVS = 8


def buffers():
    sampler = jr.Prioritized(alpha=0.7, beta=0.5, normalize="global")
    replay = jr.ReplayBuffer(capacity=64, sampler=sampler)
    sequence = jr.SequenceBuffer(length=6, num_envs=NUM_ENVS, sequence_length=3, sampler=sampler)
    return {"replay": over_devices(replay, 4), "sequence": over_devices(sequence, 4)}


def own_rows(buffer, step, time_axis):
    """What this process's environments give at a step, as its part of a global array."""
    process, num_processes = jax.process_index(), jax.process_count()
    envs = np.split(np.arange(NUM_ENVS, dtype=np.int32), num_processes)[process]
    rows = {"id": NUM_ENVS * step + envs, "x": np.sin(NUM_ENVS * step + envs).astype(np.float32)}
    if time_axis:
        rows = jax.tree.map(lambda x: x[None], rows)
    return jax.tree.map(lambda x: jax.make_array_from_process_local_data(buffer.items_sharding, x), rows)


def begin(configs):
    states = {name: buffer.init(own_rows(buffer, 0, name == "sequence")) for name, buffer in configs.items()}
    return {"states": states, "step": 0}


def run(path, dies=False):
    """Run to the end from the checkpoint at `path`, if there is one; all states and the last draws, on the host.

    If it `dies`, the last process is killed on the way.
    """
    configs = buffers()
    carry = begin(configs)
    with contextlib.suppress(FileNotFoundError):
        carry = jr.restore(path, configs, carry)
    states, drawn = carry["states"], {}
    for step in range(carry["step"], STEPS):
        if dies and step == DIES_AT and jax.process_index() == jax.process_count() - 1:
            os.kill(os.getpid(), signal.SIGKILL)
        for name, buffer in configs.items():
            state = buffer.add(states[name], own_rows(buffer, step, name == "sequence"))
            if buffer.can_sample(state):
                sample = buffer.sample(state, jax.random.key(step), 16)
                state = buffer.update(state, sample.indices, sample.items["x"].reshape(16, -1)[:, 0] * sample.weights)
                drawn[name] = sample, buffer.get(state, sample.indices), buffer.size(state), buffer.is_full(state)
            states[name] = state
        if (step + 1) % SAVED_EVERY == 0:
            jr.save(path, configs, {"states": states, "step": step + 1})
    return jax.tree.map(on_host, (states, drawn, carry["step"]))


def on_host(x):
    return np.asarray(x) if isinstance(x, int) or x.is_fully_addressable else allgather(x)


def allgather(x):
    return multihost_utils.process_allgather(x, tiled=True)


def migrated(path, new_capacity):
    """The replay state of the checkpoint, migrated; by all processes together."""
    configs = buffers()
    new = jr.Sharded(buffer=jr.ReplayBuffer(capacity=new_capacity), mesh=configs["replay"].mesh)
    state = jr.migrate(configs["replay"], jr.restore(path, configs, begin(configs))["states"]["replay"], new)
    return jax.tree.map(on_host, state)


def free_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def process(index, port, path, dies, connection):
    """One of two processes; sends what the run comes to."""
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 2)
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(f"127.0.0.1:{port}", 2, index)
    assert len(jax.devices()) == 4
    assert len(jax.local_devices()) == 2
    result = run(path, dies)
    connection.send((result, migrated(path, 32)))
    jax.distributed.shutdown()
