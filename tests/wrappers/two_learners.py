"""Two processes, each with actors, a Shared of its own and a part of one learner."""

import functools
import socket
import threading

import jax
import jax.numpy as jnp
import numpy as np
from helpers import items, numbers
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding, PartitionSpec

import jaxreplay as jr

UPDATES, RATIO, BATCH, ROWS = 60, 4, 64, (4, 2)  # rows of an actor's call, by process: one is faster than the other


def global_weights(probabilities, sizes, beta=1.0):
    """Weights of a batch with equal parts from all processes, by the law over all items (as in the guide)."""
    return jr.importance_weights(probabilities / jax.process_count(), sizes.sum(), beta)


def run(index):
    mesh = jax.sharding.Mesh(jax.devices(), ("data",))
    over_processes = NamedSharding(mesh, PartitionSpec("data"))
    put = functools.partial(jax.make_array_from_process_local_data, over_processes)
    buffer = jr.ReplayBuffer(capacity=256, sampler=jr.Prioritized(alpha=1.0, epsilon=0.0))
    rows = ROWS[index]
    shared = jr.Shared(buffer, buffer.init(items(numbers(0, rows))), ratio=RATIO, min_size=32, slack=128)

    def act():
        rng = np.random.default_rng(index)
        with shared.worker():
            for first in range(10**6 * index, 10**9, rows):
                ids = numbers(first, rows)
                shared.add(items(ids), td_errors=rng.exponential(size=rows).astype(np.float32))

    @functools.partial(jax.jit, out_shardings=NamedSharding(mesh, PartitionSpec()))
    def learn(mean, weights, x):
        return 0.9 * mean + 0.1 * jnp.sum(weights * x) / jnp.sum(weights)

    actor, mean, balances, seen = threading.Thread(target=act), jnp.zeros(()), [], set()
    actor.start()
    with shared:
        for update in range(UPDATES):
            drawn = shared.sample(jax.random.fold_in(jax.random.key(index), update), BATCH // 2, timeout=60)
            balances.append(RATIO * shared.added - shared.drawn)
            sizes = put(np.array([shared.size()], np.float32))
            probabilities, x = (put(np.asarray(leaf)) for leaf in (drawn.probabilities, drawn.items["x"][:, 0]))
            mean = learn(mean, jax.jit(global_weights)(probabilities, sizes), x)
            seen |= set((np.asarray(drawn.items["id"]) // 10**6).tolist())
    actor.join(60)
    assert not actor.is_alive()
    total = np.asarray(multihost_utils.process_allgather(np.array([shared.added, shared.drawn])))
    return {"drawn": shared.drawn, "balances": balances, "seen": seen, "mean": float(mean), "all": total}


def free_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def process(index, port, connection):
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 1)
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(f"127.0.0.1:{port}", 2, index)
    connection.send(run(index))
    jax.distributed.shutdown()
