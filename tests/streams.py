"""Streams of episodes, as environments with either kind of autoreset give them."""

import numpy as np
import seeds

NUM_ENVS = 3
FLAGS = ("terminated", "truncated")


def make_episodes(seed, num_steps):
    """For each environment: episodes of random lengths and endings, `num_steps` steps or more in all."""
    rng = seeds.rng(seed)
    streams = []
    for env in range(NUM_ENVS):
        episodes, count = [], 0
        while count < num_steps:
            length = int(rng.integers(1, 9))
            ends = np.zeros((2, length), bool)
            ends[rng.integers(2), -1] = True
            episodes.append(
                {
                    "frame": rng.integers(1, 256, (length + 1, 2, 2)).astype(np.uint8),
                    "action": (1000 * env + count + np.arange(length)).astype(np.int32),  # names the step
                    "reward": rng.normal(size=length).astype(np.float32),
                    "terminated": ends[0],
                    "truncated": ends[1],
                }
            )
            count += length
        streams.append(episodes)
    return streams


def as_rows(streams, num_rows, final_rows):
    """What a SequenceBuffer is given, [num_rows, num_envs, ...]: with a row for each final observation, or without."""
    envs = []
    for episodes in streams:
        rows = {name: [] for name in ("frame", "action", "reward", *FLAGS, "step")}
        for episode in episodes:
            length = len(episode["reward"])
            total = length + final_rows
            rows["frame"] += list(episode["frame"][:total])
            for name in ("action", "reward", *FLAGS):
                rows[name] += list(episode[name]) + [0] * (total - length)
            rows["step"] += [True] * length + [False] * (total - length)
        envs.append({name: values[:num_rows] for name, values in rows.items()})
    dtypes = {name: x.dtype for name, x in streams[0][0].items()} | {"step": bool}
    return {name: np.stack([np.array(env[name], dtypes[name]) for env in envs], axis=1) for name in envs[0]}
