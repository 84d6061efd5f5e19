"""Two processes, each with actors, a Shared of its own and a part of one learner."""

import functools
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import two_processes
from helpers import items, numbers
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding, PartitionSpec

import jaxreplay as jr

UPDATES, RATIO, BATCH, ROWS = 60, 4, 64, (4, 2)  # rows of an actor's call, by process: one is faster than the other


def global_weights(probabilities, sizes, beta=1.0):
    """Weights of a batch with equal parts from all processes, by the law over all items (as in the guide)."""
    return jr.importance_weights(probabilities / jax.process_count(), sizes.sum(), beta)


def run():
    index, mesh = jax.process_index(), jax.sharding.Mesh(jax.devices(), ("data",))
    put = functools.partial(jax.make_array_from_process_local_data, NamedSharding(mesh, PartitionSpec("data")))
    buffer = jr.ReplayBuffer(capacity=256, sampler=jr.Prioritized(alpha=1.0, epsilon=0.0))
    rows = ROWS[index]
    shared = jr.Shared(buffer, buffer.init(items(numbers(0, rows))), ratio=RATIO, min_size=32, slack=128)

    def act():
        rng = np.random.default_rng(index)
        with shared.worker():
            for first in range(10**6 * index, 10**9, rows):
                shared.add(items(numbers(first, rows)), td_errors=rng.exponential(size=rows).astype(np.float32))

    @functools.partial(jax.jit, out_shardings=NamedSharding(mesh, PartitionSpec()))
    def learn(mean, weights, x):
        return 0.9 * mean + 0.1 * jnp.sum(weights * x) / jnp.sum(weights)

    actor, mean, seen = threading.Thread(target=act), jnp.zeros(()), set()
    actor.start()
    with shared:
        for update in range(UPDATES):
            drawn = shared.sample(jax.random.fold_in(jax.random.key(index), update), BATCH // 2, timeout=60)
            assert abs(RATIO * shared.added - shared.drawn) <= 128
            sizes = put(np.array([shared.size()], np.float32))
            probabilities, x = (put(np.asarray(leaf)) for leaf in (drawn.probabilities, drawn.items["x"][:, 0]))
            mean = learn(mean, jax.jit(global_weights)(probabilities, sizes), x)
            seen |= set((np.asarray(drawn.items["id"]) // 10**6).tolist())
    actor.join(60)
    assert not actor.is_alive()
    assert shared.drawn == UPDATES * BATCH // 2
    assert seen == {index}  # of its own rows
    return float(mean), multihost_utils.process_allgather(np.array([shared.added, shared.drawn])).tolist()


@pytest.mark.slow
def test_processes_that_keep_the_ratio_each_keep_it_together(children):
    found, other = two_processes.results(two_processes.start(children, 1, run))
    assert found == other  # one learner
    added, drawn = np.sum(found[1], axis=0)
    assert abs(RATIO * added - drawn) <= 2 * 128


def test_weights_of_parts_are_those_of_the_whole(monkeypatch):
    """Of equal parts from processes that hold different numbers of items, with other totals of priorities.

    The expected weighted value of a row is a sum over all items, so nothing is drawn: it is their mean.
    """
    rng = np.random.default_rng(0)
    priorities = [rng.exponential(size=n) * scale for n, scale in ((100, 1.0), (300, 7.0))]
    values = np.concatenate([rng.normal(k, size=len(p)) for k, p in enumerate(priorities)])
    rows = np.concatenate([p / p.sum() for p in priorities])  # of a part
    weights = jax.jit(lambda rows: jr.importance_weights(rows / 2, 400, 1.0, normalize=None))(rows)
    weights = np.asarray(weights, np.float64)
    np.testing.assert_allclose(np.sum(rows / 2 * weights * values), values.mean(), rtol=1e-5)
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    found = jax.jit(global_weights)(rows, np.array([100, 300]))
    np.testing.assert_allclose(found, weights / weights.max(), rtol=1e-5)
