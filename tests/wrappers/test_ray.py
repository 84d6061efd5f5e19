"""A `Shared` in an actor of Ray, whose callers are other processes. It needs the extra `ray`."""

import os
import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[2]
PROGRAM = """
import jax, numpy as np, ray
import jaxreplay as jr
ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False, object_store_memory=10**8)


@ray.remote(max_concurrency=8)
class Replay:
    def __init__(self, rows):
        buffer = jr.ReplayBuffer(capacity=100_000, sampler=jr.Prioritized())
        self.shared = jr.Shared(buffer, buffer.init(rows), ratio=8, min_size=40)

    def add(self, rows):
        self.shared.add(rows)  # read-only arrays in memory that processes share

    def sample(self, seed):
        sample = self.shared.sample(jax.random.key(seed), batch_size=256)
        return jax.tree.map(np.asarray, (sample.indices, sample.weights, sample.items))

    def update(self, indices, td_errors):
        self.shared.update(indices, td_errors)

    def close(self):
        self.shared.close()


@ray.remote
def act(replay, number):
    last = 1_000_000.0 * number
    try:
        while True:  # until the replay is closed
            last += 8
            ray.get(replay.add.remote(last + np.arange(8, dtype=np.float32)))
    except jr.Closed:
        return number
    finally:
        replay.close.remote()


replay = Replay.remote(np.zeros(8, np.float32))
actors, learned = [act.remote(replay, number) for number in range(2)], []
for update in range(20):
    indices, weights, items = ray.get(replay.sample.remote(update))
    learned.append(items)
    replay.update.remote(indices, np.ones(256, np.float32))
ray.get(replay.close.remote())
assert sorted(ray.get(actors)) == [0, 1]  # both have ended
exists = np.unique(np.concatenate(learned))
assert np.all(exists % 1 == 0) and np.all(exists % 1_000_000 >= 8)
assert {0, 1} == set(exists // 1_000_000)
print("learned", len(learned))
"""


@pytest.mark.slow
def test_an_actor_of_ray_owns_the_replay(tmp_path):
    (program := tmp_path / "with_ray.py").write_text(PROGRAM)
    environment = {**os.environ, "RAY_USAGE_STATS_ENABLED": "0", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, program]
    found = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment)
    assert found.returncode == 0, found.stderr
    assert "learned 20" in found.stdout
