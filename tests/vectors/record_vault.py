"""Records two small vaults and what flashbax reads from them: `python tests/vectors/record_vault.py`.

Needs flashbax with its vault. One is of an agent in two environments, one of two agents as in OG-MARL's data sets.
Their names are not those of a step in the second, and episodes go on over the ends of writes.
"""

import os
import tarfile
import tempfile
from pathlib import Path

import flashbax
import jax
import jax.numpy as jnp
import numpy as np
from flashbax.vault import Vault

LENGTH, WRITES = 8, (6, 6)  # of the ring, and of each write


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


def record(name, steps, num_envs):
    buffer = flashbax.make_trajectory_buffer(
        add_batch_size=num_envs, sample_batch_size=1, sample_sequence_length=2, period=1,
        min_length_time_axis=2, max_length_time_axis=LENGTH,
    )  # fmt: skip
    state = buffer.init(jax.tree.map(lambda x: jnp.asarray(x[0, 0]), steps(np.arange(1))))
    vault, time = Vault(name, state.experience, vault_uid="recorded"), 0
    for count in WRITES:
        state = buffer.add(state, jax.tree.map(jnp.asarray, steps(np.arange(time, time + count))))
        vault.write(state)
        time += count
    leaves = jax.tree_util.tree_leaves_with_path(Vault(name, vault_uid="recorded").read().experience)
    return {jax.tree_util.keystr(path): np.asarray(x) for path, x in leaves}


def main():
    path = Path(__file__).with_name("vaults.tar.xz").absolute()
    with tempfile.TemporaryDirectory() as folder, tarfile.open(path, "w:xz") as file:
        os.chdir(folder)
        for name, steps, num_envs in (("single.vlt", single, 2), ("several.vlt", several, 1)):
            np.savez(f"vaults/{name}.npz", **record(name, steps, num_envs))
        file.add("vaults")


if __name__ == "__main__":
    main()
