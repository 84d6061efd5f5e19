"""Gymnasium in processes without JAX; each sends rows by a pipe to the learner."""

import multiprocessing
import signal
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import numpy as np


def act(pipe, seed):  # a process of NumPy alone: eight walks on a frozen lake
    import gymnasium as gym

    rng, q, resets = np.random.default_rng(seed), np.zeros((16, 4)), np.zeros(8, bool)
    kwargs = {"vectorization_mode": "sync", "is_slippery": False}
    envs = gym.make_vec("FrozenLake-v1", 8, **kwargs)
    place, _ = envs.reset(seed=seed)
    with suppress(EOFError, ConnectionError):  # the learner has ended
        while True:
            rows = []
            for _ in range(16):
                action = np.argmax(q[place] + rng.gumbel(0, 0.02, (8, 4)), axis=1)
                next_place, reward, terminated, truncated, _ = envs.step(action)
                # A call after an end only resets.
                rows.append((place, action, reward, terminated, next_place, ~resets))
                place, resets = next_place, terminated | truncated
            pipe.send([np.concatenate(leaves) for leaves in zip(*rows, strict=True)])
            q = pipe.recv()


if __name__ == "__main__":  # actors import this file too, but not what is below
    import jax
    import jax.numpy as jnp

    import jaxreplay as jr

    @jax.jit
    def learn(q, place, action, reward, terminated, next_place):
        target = reward + 0.9 * ~terminated * q[next_place].max(axis=1)
        return q.at[place, action].add(0.1 * (target - q[place, action]))

    def serve(pipe):  # the learner's thread for one actor; if the actor dies, all ends
        with shared.worker(), pipe:
            while True:
                *rows, mask = pipe.recv()
                rewards.append(rows[2].sum() / max(rows[3].sum(), 1))
                shared.add(rows, mask=mask)  # waits while ahead
                pipe.send(np.asarray(q))

    buffer, one = jr.ReplayBuffer(capacity=10_000), np.zeros(1, int)
    rows = one, one, np.zeros(1), one > 0, one
    shared = jr.Shared(buffer, buffer.init([*rows]), ratio=8)
    q, rewards, spawn = jnp.zeros((16, 4)), [], multiprocessing.get_context("spawn")
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
    last = np.mean(rewards[-9:])
    print(f"episodes that reach the goal: {rewards[0]:.2f}, then {last:.2f}")
