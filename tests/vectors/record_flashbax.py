"""Records what flashbax draws, and two vaults with what it reads from them: `python tests/vectors/record_flashbax.py`.

Needs flashbax with its vault. The first record is of the sequences that a trajectory buffer can draw: every step says
which environment and time it comes from; after each add the sequences in 5,000 draws are collected, as (environment,
time of the first step). One vault is of an agent in two environments, one of two agents as in OG-MARL's data sets.
Their names are not those of a step in the second, and episodes go on over the ends of writes.
"""

import importlib.metadata
import itertools
import json
import os
import tarfile
import tempfile
from pathlib import Path

import flashbax
import jax
import jax.numpy as jnp
import numpy as np
from flashbax.vault import Vault

FOLDER = Path(__file__).absolute().parent
NAMES = "length", "num_envs", "sequence_length", "stride", "rollouts"  # flashbax: a stride is a period
CASES = [
    (8, 1, 3, 1, [1] * 20),
    (8, 2, 3, 2, [2, 3, 1, 2, 5, 3, 2, 4]),
    (12, 3, 4, 4, [4] * 8),
    (12, 2, 5, 3, [1, 2, 3, 4, 5, 1, 6, 7, 2, 3]),
    (10, 1, 4, 2, [5, 5, 5, 5]),
]
LENGTH, WRITES = 8, (6, 6)  # of the ring of a vault, and of each write


def states(steps, num_envs, rollouts, *, sequence_length, stride, length, batch_size=1):
    """A buffer, and its states: empty, and after each rollout of `steps(times)`."""
    buffer = flashbax.make_trajectory_buffer(
        add_batch_size=num_envs, sample_batch_size=batch_size, sample_sequence_length=sequence_length, period=stride,
        min_length_time_axis=sequence_length, max_length_time_axis=length,
    )  # fmt: skip
    found = [buffer.init(jax.tree.map(lambda x: jnp.asarray(x[0, 0]), steps(np.arange(1))))]
    for start, stop in itertools.pairwise(np.cumsum([0, *rollouts])):
        found.append(buffer.add(found[-1], jax.tree.map(jnp.asarray, steps(np.arange(start, stop)))))
    return buffer, found


def sequences(*, num_envs, rollouts, **sizes):
    """What is drawn after each rollout."""
    after, env = [], np.arange(num_envs)[:, None]

    def steps(times):
        return {"env": env + 0 * times, "time": times + 0 * env}

    buffer, (_, *later) = states(steps, num_envs, rollouts, batch_size=5_000, **sizes)
    for state, time in zip(later, np.cumsum(rollouts), strict=True):
        drawn = {"env": [], "time": []}
        if buffer.can_sample(state):
            drawn = jax.device_get(buffer.sample(state, jax.random.key(time)).experience)
        of_draws = zip(drawn["env"], drawn["time"], strict=True)
        after.append(sorted({(int(env[0]), *map(int, steps)) for env, steps in of_draws}))
    return after


def single(time):
    """Two environments; episodes of 4 steps that are terminated, and of 6 that are cut off."""
    env = np.arange(2)[:, None]
    end = (time + 1) % np.array([[4], [6]]) == 0
    return {
        "observation": {"place": np.float32(100 * env + time)[..., None], "env": np.uint8(env + 0 * time)},
        "action": (time + env).astype(np.int32),
        "reward": (time / 2 + env).astype(np.float32),
        "terminated": end & (env == 0),
        "truncated": end & (env == 1),
    }


def several(time):
    """Two agents; the first is done a step before the second."""
    left = 5 - time % 6
    done = np.stack([left <= 1, left <= 0], -1)[None].astype(np.float32)
    agents = np.arange(2)
    return {
        "observations": (time[:, None] + 10 * agents)[None, ..., None].astype(np.float32),
        "actions": (time[:, None] + agents)[None].astype(np.int32),
        "rewards": (time[:, None] * agents)[None].astype(np.float32),
        "terminals": done,
        "truncations": 0 * done,
        "infos": {"state": time[None, :, None].astype(np.float32)},
    }


def vault(name, steps, num_envs):
    """What flashbax reads from a vault that it has written."""
    _, (empty, *later) = states(steps, num_envs, WRITES, sequence_length=2, stride=1, length=LENGTH)
    written = Vault(name, empty.experience, vault_uid="recorded")
    for state in later:
        written.write(state)
    leaves = jax.tree_util.tree_leaves_with_path(Vault(name, vault_uid="recorded").read().experience)
    return {jax.tree_util.keystr(path): np.asarray(x) for path, x in leaves}


def main():
    source = f"flashbax {importlib.metadata.version('flashbax')}, make_trajectory_buffer"
    named = [dict(zip(NAMES, case, strict=True)) for case in CASES]
    document = {"source": source, "cases": [case | {"drawn": sequences(**case)} for case in named]}
    (FOLDER / "flashbax_trajectory.json").write_text(json.dumps(document) + "\n")
    with tempfile.TemporaryDirectory() as folder, tarfile.open(FOLDER / "vaults.tar.xz", "w:xz") as file:
        os.chdir(folder)
        for name, steps, num_envs in (("single.vlt", single, 2), ("several.vlt", several, 1)):
            np.savez(f"vaults/{name}.npz", **vault(name, steps, num_envs))
        file.add("vaults")


if __name__ == "__main__":
    main()
