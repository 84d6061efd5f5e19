import signal

import chex
import jax
import numpy as np
import pytest
import two_processes
from jax.experimental import multihost_utils

from jaxreplay.checkpoint import _processes


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


def start(children, path, dies):
    port, started = two_processes.free_port(), []
    for index in range(2):
        ours, theirs = children.Pipe(duplex=False)
        process = children.Process(target=two_processes.process, args=(index, port, path, dies, theirs))
        process.start()
        theirs.close()
        started.append((process, ours))
    return started


@pytest.mark.slow
def test_two_processes_one_of_them_killed_and_both_resumed_equal_one_process(tmp_path, children):
    (first, _), (second, _) = start(children, tmp_path / "two", dies=True)
    second.join(120)
    assert second.exitcode == -signal.SIGKILL
    first.kill()  # it waits for the other
    first.join()

    again = start(children, tmp_path / "two", dies=False)
    results = [connection.recv() for _, connection in again]
    for process, _ in again:
        process.join(60)
        assert process.exitcode == 0

    alone = two_processes.run(tmp_path / "one"), two_processes.migrated(tmp_path / "one", 32)
    for (states, drawn, resumed_at), moved in results:
        assert resumed_at == two_processes.SAVED_EVERY
        chex.assert_trees_all_equal((states, drawn), alone[0][:2])
        chex.assert_trees_all_equal(moved, alone[1])
    sample, items, size, full = alone[0][1]["replay"]
    assert (size, full) == (64, True)
    assert set(np.unique(sample.items["id"])) <= set(range(128, 192))
    chex.assert_trees_all_equal(items, sample.items)
