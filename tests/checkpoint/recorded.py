"""States of every kind, as one checkpoint that stays readable; run as a program, records it in `vectors`.

`checkpoint_1.zip` is a checkpoint of file format 1. It is never recorded anew: what it holds must come back in every
later version. A new kind of state is recorded in another file.
"""

import pathlib
import tempfile
import unittest.mock
import zipfile

import jax
import jax.numpy as jnp
import numpy as np

import jaxreplay as jr
from jaxreplay._common import layouts

FILE = pathlib.Path(__file__).parents[1] / "vectors" / "checkpoint_1.zip"
PER = jr.Prioritized(alpha=0.7, normalize="global", max_priority="stored", count_updates=True)
SEQUENCES = {"length": 6, "num_envs": 2, "sequence_length": 3, "sampler": PER}
CONFIG = {
    "replay": jr.ReplayBuffer(capacity=5, sampler=PER),
    "uniform": jr.ReplayBuffer(capacity=3, sampler=jr.Uniform(count_updates=True)),
    "reservoir": jr.ReservoirBuffer(capacity=4, sampler=PER),
    "every sequence": jr.SequenceBuffer(**SEQUENCES, windows="cut", stride=2),
    "chosen sequences": jr.SequenceBuffer(**SEQUENCES, windows="inside", gaps=True, hindsight=True),
    "transitions": jr.ReplayBuffer(capacity=4),
    "mixture": jr.Mixture(buffers=(jr.ReplayBuffer(capacity=3), jr.ReplayBuffer(capacity=2))),
    "tracer": jr.NStep(n=2, gamma=0.5, num_envs=2),
    "pools": jr.DifficultyPools(tasks_per_env=(3, 2), easy_threshold=0.9, hard_threshold=0.1),
}


def items(*leading):
    number = np.arange(np.prod(leading), dtype=np.int32).reshape(leading)
    return {
        "frame": np.broadcast_to(number[..., None, None], (*leading, 2, 3)).astype(np.uint8),
        "half": jnp.asarray(number, jnp.bfloat16),
        "small": jnp.asarray(number % 7, jnp.int4),
    }


def filled(buffer, *key, **settings):
    state = buffer.add(buffer.init(items(4), **settings), items(4), *key)
    state = buffer.add(state, items(3), *key, mask=np.array([True, False, True]))
    return buffer.update(state, np.array([1, 3, -1, 0]), np.array([0.5, 8.0, 1.0, np.nan], np.float32))


def streams(buffer):
    ends = np.arange(14).reshape(7, 2) % 5 == 4
    named = {"drawable": np.arange(14).reshape(7, 2) != 9} if buffer.gaps else {}
    state = buffer.init(items(1, 2))
    for part in (slice(0, 4), slice(4, 7)):
        rows = jax.tree.map(lambda x, part=part: x[part], items(7, 2))
        state = buffer.add(state, rows, ends=ends[part], **{name: x[part] for name, x in named.items()})
    return state


def traced(tracer):
    x, no = np.arange(2, dtype=np.float32), np.zeros(2, bool)
    state = tracer.init(x, x, x, no, no, x)
    state, *_ = tracer.add(state, x, x, x, no, no, x + 1)
    _, batch, _ = tracer.add(state, x + 1, x, x, x > 0, no, x + 2)
    return state, batch


def states():
    """By name; the arrays do not depend on random numbers, nor on 64-bit types."""
    numbers, key = np.arange(4, dtype=np.float32), jax.random.key(3)
    two, one_each = jnp.arange(2, dtype=jnp.int32), jnp.ones(2, jnp.float32)
    replay = filled(CONFIG["replay"])
    mixture = CONFIG["mixture"]
    both = mixture.add(mixture.init(numbers), 1, numbers[:2])
    tracing, batch = traced(CONFIG["tracer"])
    pools, _ = CONFIG["pools"].update(CONFIG["pools"].init(), np.array([0, 3, 4]), np.array([[1.0], [0.0], [0.5]]))
    env = jr.NextStepAutoreset(env_step=lambda key, state, action: (state, state, 1.0, False, False, state))
    with unittest.mock.patch.object(layouts, "stores_rows", return_value=True):
        of_a_tpu = filled(CONFIG["replay"])
        rows = layouts.zeros(jax.ShapeDtypeStruct((3,), jnp.float32), (2,), 0)
    return {
        "replay": replay,
        "replay of a TPU": of_a_tpu,
        "uniform": CONFIG["uniform"].add(CONFIG["uniform"].init(numbers), numbers[:2]),
        "reservoir": CONFIG["reservoir"].add(CONFIG["reservoir"].init(numbers), numbers, key),
        "every sequence": streams(CONFIG["every sequence"]),
        "chosen sequences": streams(CONFIG["chosen sequences"]),
        "transitions": CONFIG["transitions"].add(CONFIG["transitions"].init(batch), batch),
        "mixture": both,
        "tracer": tracing,
        "batch": batch,
        "pools": pools,
        "autoreset": env.init(jnp.int32(7), jnp.ones(2, jnp.float32)),
        "sample": jr.Sample(items(2), two, one_each, one_each, None, two),
        "bound": jr.bind(CONFIG["tracer"], tracing),
        "bound buffer": jr.bind(CONFIG["replay"], replay),
        "data set": jr.datasets.Steps({"reward": jnp.ones((2, 1), jnp.float32)}, jnp.array([[False], [True]])),
        "run of leaves": jr.sum_tree.restrict(replay.sampler.tree, jnp.int32(4), jnp.int32(2)),
        "rows": rows,
        "key": key,
    }


LATER_CONFIG = {
    "recent": jr.ReplayBuffer(capacity=5, sampler=jr.Recent(power=2.0)),
    "spent": jr.ReplayBuffer(capacity=5, sampler=jr.Uniform(max_uses=1)),
    "spent by priority": jr.ReplayBuffer(capacity=5, sampler=jr.Prioritized(max_uses=2)),
    "open": jr.ReplayBuffer(capacity=5, sampler=jr.Prioritized(alpha=None)),
    "tasks": jr.Tasks(num_tasks=5, decay=0.5),
}
LEVELS_CONFIG = {"levels": jr.Levels(capacity=3)}


def later_states():
    tasks = LATER_CONFIG["tasks"]
    counted, _ = tasks.update(tasks.init(), np.array([0, 3, 9]), np.array([[1.0], [0.0], [0.5]]))
    buffers = {name: buffer for name, buffer in LATER_CONFIG.items() if name != "tasks"}
    settings = {"open": {"alpha": 0.7}}
    return {name: filled(buffer, **settings.get(name, {})) for name, buffer in buffers.items()} | {"tasks": counted}


def levels_states():
    levels = LEVELS_CONFIG["levels"]
    state, _ = levels.insert(levels.init(jax.tree.map(lambda x: x[0], items(1))), items(4), np.array([3, 1, np.nan, 2]))
    return {"levels": levels.update(state, np.array([1]), np.array([4]))}


# What came later, of the same format: one file after the other.
LATER = {
    FILE.with_name("checkpoint_2.zip"): (LATER_CONFIG, later_states),
    FILE.with_name("checkpoint_3.zip"): (LEVELS_CONFIG, levels_states),
}


def record(file, config, states):
    with tempfile.TemporaryDirectory() as folder, zipfile.ZipFile(file, "x", zipfile.ZIP_DEFLATED) as archive:
        jr.save(folder, config, states())
        for path in sorted(pathlib.Path(folder).rglob("*")):
            archive.write(path, path.relative_to(folder))


if __name__ == "__main__":
    *_, (newest, (of_newest, make)) = LATER.items()
    record(newest, of_newest, make)
