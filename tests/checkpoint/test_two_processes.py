"""A run of two sharded buffers over four devices, of one process or of two, each with its environments."""

import contextlib
import os
import signal
import socket

import chex
import jax
import numpy as np
import pytest
from faults import LONG, Child
from helpers import over_devices
from jax.experimental import multihost_utils

import jaxreplay as jr
from jaxreplay.checkpoint import _processes

STEPS, SAVED_EVERY, DIES_AT = 24, 10, 16
NUM_ENVS = 8


def buffers():
    sampler = jr.Prioritized(alpha=0.7, beta=0.5, normalize="global")
    replay = jr.ReplayBuffer(capacity=64, sampler=sampler)
    sequence = jr.SequenceBuffer(length=6, num_envs=NUM_ENVS, sequence_length=3, sampler=sampler)
    return {"replay": over_devices(replay, 4), "sequence": over_devices(sequence, 4)}


def own_rows(buffer, step, time_axis):
    """What this process's environments give at a step, as its part of a global array."""
    envs = np.split(np.arange(NUM_ENVS, dtype=np.int32), jax.process_count())[jax.process_index()]
    ids = NUM_ENVS * step + (envs[None] if time_axis else envs)
    rows = {"id": ids, "x": np.sin(ids).astype(np.float32)}
    return jax.tree.map(lambda x: jax.make_array_from_process_local_data(buffer.items_sharding, x), rows)


def begin(configs):
    states = {name: buffer.init(own_rows(buffer, 0, name == "sequence")) for name, buffer in configs.items()}
    return {"states": states, "step": 0}


def run(path, dies=False):
    """Run to the end from the checkpoint at `path`, if there is one: at which step, all states, the last draws, and the
    saved replay state of half the capacity, on the host.

    If it `dies`, the last process is killed on the way.
    """
    configs = buffers()
    carry, drawn = begin(configs), {}
    with contextlib.suppress(FileNotFoundError):
        carry = jr.restore(path, configs, carry)
    first, states = carry["step"], carry["states"]
    for step in range(first, STEPS):
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
    new = jr.Sharded(buffer=jr.ReplayBuffer(capacity=32), mesh=configs["replay"].mesh)
    moved = jr.migrate(configs["replay"], jr.restore(path, configs, begin(configs))["states"]["replay"], new)
    return first, jax.tree.map(on_host, (states, drawn, moved))


def on_host(x):
    return np.asarray(x) if x.is_fully_addressable else multihost_utils.process_allgather(x, tiled=True)


def send_result(index, port, path, dies, connection):
    """In one of two processes of `jax.distributed`, of two devices each."""
    jax.config.update("jax_num_cpu_devices", 2)
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(f"127.0.0.1:{port}", 2, index)
    assert (len(jax.devices()), len(jax.local_devices())) == (4, 2)
    connection.send(run(path, dies))
    jax.distributed.shutdown()


def start(children, path, dies=False):
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    return [Child(children, send_result, index, port, path, dies) for index in range(2)]


@pytest.mark.slow
def test_two_processes_one_of_them_killed_and_both_resumed_equal_one_process(tmp_path, children):
    first, second = start(children, tmp_path / "two", dies=True)
    assert second.ended() == -signal.SIGKILL
    first.process.kill()  # it waits for the other
    first.process.join()
    both = start(children, tmp_path / "two")
    _, alone = run(tmp_path / "one")
    for child in both:
        assert child.ours.poll(LONG), "hangs"
        resumed_at, found = child.ours.recv()
        assert resumed_at == SAVED_EVERY
        chex.assert_trees_all_equal(found, alone)
    assert [child.ended() for child in both] == [0, 0]
    sample, items, size, full = alone[1]["replay"]
    assert (size, full) == (64, True)
    assert set(np.unique(sample.items["id"])) <= set(range(128, 192))
    chex.assert_trees_all_equal(items, sample.items)


@pytest.mark.parametrize("numbers", [[], [7], [7, 2**32 - 1]])
def test_all_processes_get_the_numbers_of_each(monkeypatch, numbers):
    assert _processes.gather(numbers).tolist() == [numbers]

    def process_allgather(x):  # as of a process whose numbers are all 0, and this one
        assert x.size > 0
        return np.stack([np.zeros_like(x), x])

    monkeypatch.setattr(multihost_utils, "process_allgather", process_allgather)
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    found = _processes.gather(numbers)
    assert found.dtype == np.uint32
    assert found.tolist() == [[0] * len(numbers), numbers]
