"""Records which sequences flashbax's trajectory buffer can draw: `python tests/vectors/record_flashbax.py`.

Needs flashbax. Every step says which environment and time it comes from; after each add the sequences in 5,000 draws
are collected, as (environment, time of the first step).
"""

import importlib.metadata
import json
from pathlib import Path

import flashbax
import jax
import jax.numpy as jnp
import numpy as np

NAMES = "length", "num_envs", "sequence_length", "stride", "rollouts"  # flashbax: a stride is a period
CASES = [
    (8, 1, 3, 1, [1] * 20),
    (8, 2, 3, 2, [2, 3, 1, 2, 5, 3, 2, 4]),
    (12, 3, 4, 4, [4] * 8),
    (12, 2, 5, 3, [1, 2, 3, 4, 5, 1, 6, 7, 2, 3]),
    (10, 1, 4, 2, [5, 5, 5, 5]),
]


def record(length, num_envs, sequence_length, stride, rollouts):
    buffer = flashbax.make_trajectory_buffer(
        add_batch_size=num_envs,
        sample_batch_size=5_000,
        sample_sequence_length=sequence_length,
        period=stride,
        min_length_time_axis=sequence_length,
        max_length_time_axis=length,
    )
    state = buffer.init({"env": jnp.int32(0), "time": jnp.int32(0)})
    time, after = 0, []
    for rollout in rollouts:
        times = np.broadcast_to(np.arange(time, time + rollout), (num_envs, rollout))
        envs = np.broadcast_to(np.arange(num_envs)[:, None], (num_envs, rollout))
        state = buffer.add(state, {"env": jnp.asarray(envs), "time": jnp.asarray(times)})
        time += rollout
        if not buffer.can_sample(state):
            after.append([])
            continue
        drawn = jax.tree.map(np.asarray, buffer.sample(state, jax.random.key(time)).experience)
        of_draws = zip(drawn["env"], drawn["time"], strict=True)
        after.append(sorted({(int(env[0]), *map(int, steps)) for env, steps in of_draws}))
    return after


def main():
    source = f"flashbax {importlib.metadata.version('flashbax')}, make_trajectory_buffer"
    document = {"source": source, "cases": []}
    for case in CASES:
        document["cases"].append(dict(zip(NAMES, case, strict=True)) | {"drawn": record(*case)})
    Path(__file__).with_name("flashbax_trajectory.json").write_text(json.dumps(document) + "\n")


if __name__ == "__main__":
    main()
