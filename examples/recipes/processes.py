"""Actors in processes: each sends rows by a pipe; the learner owns the replay."""

import multiprocessing
import signal
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import jax
import jax.numpy as jnp
import numpy as np

import jaxreplay as jr


def act(pipe, seed):  # a process of NumPy alone: eight walkers in a corridor
    rng, q, place = np.random.default_rng(seed), np.zeros((6, 2)), np.zeros(8, int)
    with suppress(EOFError, ConnectionError):  # the learner has ended
        while True:
            rows = []
            for _ in range(16):
                action = np.argmax(q[place] + rng.gumbel(0, 0.02, (8, 2)), axis=1)
                next_place = np.clip(place + 2 * action - 1, 0, 5)
                terminated = next_place == 5
                rows.append((place, action, terminated, next_place))
                place = np.where(terminated, 0, next_place)
            pipe.send([np.concatenate(leaves) for leaves in zip(*rows, strict=True)])
            q = pipe.recv()


def serve(pipe):  # the learner's thread for one actor; if the actor dies, all ends
    with shared.worker(), pipe:
        while True:
            rows = pipe.recv()
            rewards.append(rows[2].mean())
            shared.add(rows)  # waits while ahead
            pipe.send(np.asarray(q))


@jax.jit
def learn(q, place, action, terminated, next_place):
    target = terminated + 0.9 * ~terminated * q[next_place].max(axis=1)
    return q.at[place, action].add(0.1 * (target - q[place, action]))


if __name__ == "__main__":  # actors import this file too
    buffer, one = jr.ReplayBuffer(capacity=10_000), np.zeros(1, int)
    shared = jr.Shared(buffer, buffer.init([one, one, one > 0, one]), ratio=8)
    q, rewards, spawn = jnp.zeros((6, 2)), [], multiprocessing.get_context("spawn")
    # Only the learner hears Ctrl-C: a child goes on ignoring what its parent ignored.
    heard = signal.signal(signal.SIGINT, signal.SIG_IGN)
    pipes, ends = zip(spawn.Pipe(), spawn.Pipe(), strict=True)
    for seed, end in enumerate(ends):
        spawn.Process(target=act, args=(end, seed), daemon=True).start()
        end.close()
    with ThreadPoolExecutor() as threads, shared, suppress(KeyboardInterrupt):
        signal.signal(signal.SIGINT, heard)
        threads.map(serve, pipes)
        for t in range(1_000):
            q = learn(q, *shared.sample(jax.random.key(t), batch_size=64).items)
    print(f"mean reward {rewards[0]:.2f}, then {np.mean(rewards[-9:]):.2f} of 0.2")
