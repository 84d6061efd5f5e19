"""What the tests of checkpoints run in processes of their own.

`python checkpoint_runs.py FOLDER` restores the runs saved in FOLDER, goes on with them and prints their digests.
Without FOLDER it writes the checkpoint in `recorded` anew, for a new format.
"""

import functools
import hashlib
import io
import itertools
import json
import pathlib
import shutil
import signal
import sys
from typing import Any, NamedTuple

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import optax
from helpers import interruptible, over_devices

import jaxreplay as jr
from jaxreplay._common import files
from jaxreplay.checkpoint import _files

STEPS = 1000
NUM_ENVS = 4


class Run(NamedTuple):
    """`config`, what `init(config)` makes of it, and `step(config, carry, key)`, a step of the loop."""

    config: dict
    init: object
    step: object


class Pair(NamedTuple):
    first: Any
    second: Any


@flax.struct.dataclass
class Flax:
    x: Any
    name: str = flax.struct.field(pytree_node=False)
    settings: tuple = flax.struct.field(pytree_node=False, default=(1, 0.1, None, True, ("a", np.dtype("int8"))))


@jax.tree_util.register_pytree_node_class
class Custom:
    def __init__(self, x, size):
        self.x, self.size = x, size

    def tree_flatten(self):
        return (self.x,), self.size

    @classmethod
    def tree_unflatten(cls, size, children):
        return cls(*children, size)


def bits(leaf):
    """All that there is to a leaf: dtype, shape and bytes."""
    if isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        return str(leaf.dtype), *bits(jax.random.key_data(leaf))
    array = np.asarray(leaf)
    return str(array.dtype), array.shape, array.tobytes()


def assert_same(got, expected):
    assert jax.tree.structure(got) == jax.tree.structure(expected)
    named = jax.tree_util.tree_leaves_with_path(expected)
    for (path, leaf), found in zip(named, jax.tree.leaves(got), strict=True):
        assert isinstance(found, type(leaf) if isinstance(leaf, int | float | complex) else jax.Array), path
        assert bits(found) == bits(leaf), path


def digest(tree):
    named = [(jax.tree_util.keystr(path), bits(leaf)) for path, leaf in jax.tree_util.tree_leaves_with_path(tree)]
    return hashlib.sha256(repr(named).encode()).hexdigest()


def environment_step(key):
    """What `NStep.add` takes: bytes as observations."""
    keys = jax.random.split(key, 4)
    s, s_next = (jax.random.bits(k, (NUM_ENVS, 5), jnp.uint8) for k in keys[:2])
    terminated, truncated = jax.random.bernoulli(keys[2], 0.1, (2, NUM_ENVS))
    return s, s[:, 0], jax.random.normal(keys[3], (NUM_ENVS,)), terminated, truncated, s_next


def learn(buffer, replay, key):
    """Draw, and update with TD errors that come of what was drawn."""
    sample = buffer.sample(replay, key, 8)
    found = sum(jnp.sum(leaf.astype(jnp.float32)) for leaf in jax.tree.leaves(sample.items))
    return buffer.update(replay, sample.indices, jnp.sin(found) * sample.weights)


def init_traced(config):
    batch = config["tracer"].spec(*environment_step(jax.random.key(0)))
    return {
        "tracer": config["tracer"].init(*environment_step(jax.random.key(0))),
        "replay": config["replay"].init(batch),
    }


def step_traced(config, carry, key):
    keys = jax.random.split(key)
    tracer, batch, _ = config["tracer"].add(carry["tracer"], *environment_step(keys[0]))
    replay = config["replay"].add(carry["replay"], batch)
    return {"tracer": tracer, "replay": learn(config["replay"], replay, keys[1])}


def rows(key):
    steps = {"frame": jax.random.bits(key, (1, NUM_ENVS, 4), jnp.uint8)}
    return steps | {"value": steps["frame"][..., 0].astype(jnp.bfloat16)}


def init_sequence(config):
    return {"replay": config["replay"].init(jax.eval_shape(rows, jax.random.key(0)))}


def step_sequence(config, carry, key):
    keys = jax.random.split(key, 3)
    ends = jax.random.bernoulli(keys[1], 0.1, (1, NUM_ENVS))
    replay = config["replay"].add(carry["replay"], rows(keys[0]), ends=ends)
    return {"replay": learn(config["replay"], replay, keys[2])}


def step_windows(config, carry, key):
    """`step_sequence` with rows that may not be drawn."""
    keys = jax.random.split(key, 4)
    ends, drawable = jax.random.bernoulli(keys[1], jnp.array([0.1, 0.8])[:, None, None], (2, 1, NUM_ENVS))
    replay = config["replay"].add(carry["replay"], rows(keys[0]), ends=ends, drawable=drawable)
    return {"replay": learn(config["replay"], replay, keys[2])}


def values(key):
    return {"value": jax.random.normal(key, (NUM_ENVS, 3))}


def init_mixture(config):
    return {"replay": config["replay"].init(jax.eval_shape(values, jax.random.key(0)))}


def step_mixture(config, carry, key):
    keys = jax.random.split(key, 3)
    replay = config["replay"].add(carry["replay"], 0, values(keys[0]))
    replay = config["replay"].add(replay, 1, values(keys[0]), keys[1])
    return {"replay": learn(config["replay"], replay, keys[2])}


def init_pools(config):
    return {"pools": config["pools"].init()}


def step_pools(config, carry, key):
    keys = jax.random.split(key)
    tasks, _ = config["pools"].sample(carry["pools"], keys[0], 4)
    rewards = jax.random.bernoulli(keys[1], (tasks % 11)[:, None] / 10, (4, 3)).astype(jnp.float32)
    return {"pools": config["pools"].update(carry["pools"], tasks, rewards)[0]}


def replay_run(sampler, tracer, num_shards=0):
    buffer = jr.ReplayBuffer(capacity=52, sampler=sampler)
    return Run({"replay": in_shards(buffer, num_shards), "tracer": tracer}, init_traced, step_traced)


def sequence_run(sampler, num_shards=0):
    buffer = jr.SequenceBuffer(
        length=20, num_envs=NUM_ENVS, sequence_length=4, stride=2, sampler=sampler, windows="cut"
    )
    return Run({"replay": in_shards(buffer, num_shards)}, init_sequence, step_sequence)


def windows_run(windows, sampler):
    settings = {"length": 20, "num_envs": NUM_ENVS, "sequence_length": 4, "sampler": sampler}
    buffer = jr.SequenceBuffer(**settings, windows=windows, gaps=True, hindsight=True)
    return Run({"replay": buffer}, init_sequence, step_windows)


def in_shards(buffer, num_shards):
    return over_devices(buffer, num_shards) if num_shards else buffer


PRIORITIZED = jr.Prioritized(beta=optax.linear_schedule(0.4, 1.0, 2 * STEPS), normalize="global")
N_STEP = jr.NStep(n=3, gamma=0.9, num_envs=NUM_ENVS)


MIXTURE = jr.Mixture(
    buffers=(jr.ReplayBuffer(capacity=52, sampler=PRIORITIZED), jr.ReservoirBuffer(capacity=20, sampler=PRIORITIZED))
)


@functools.cache
def runs():
    """By name; those that are sharded want four devices on the CPU."""
    return {
        "replay, prioritized, Monte Carlo": replay_run(
            PRIORITIZED, jr.MonteCarlo(gamma=0.9, max_length=6, num_envs=NUM_ENVS)
        ),
        "replay, sharded": replay_run(PRIORITIZED, N_STEP, 4),
        "sequences, sharded": sequence_run(PRIORITIZED, 2),
        "windows inside, gaps, hindsight": windows_run("inside", PRIORITIZED),
        "windows of episodes, uniform": windows_run("episodes", jr.Uniform()),
        "mixture with a reservoir": Run({"replay": MIXTURE}, init_mixture, step_mixture),
        "pools": Run(
            {"pools": jr.DifficultyPools(tasks_per_env=(30, 20), easy_threshold=1.0, hard_threshold=0.0)},
            init_pools,
            step_pools,
        ),
    }


def begin(run):
    return run.init(run.config) | {"key": jax.random.key(7)}


@functools.partial(jax.jit, static_argnums=0, compiler_options={"xla_backend_optimization_level": 0})
def _advance(name, carry):
    run = runs()[name]

    def body(carry, _):
        key, step_key = jax.random.split(carry["key"])
        rest = {field: value for field, value in carry.items() if field != "key"}
        return run.step(run.config, rest, step_key) | {"key": key}, None

    return jax.lax.scan(body, carry, length=STEPS)[0]


def advance(name, carry):
    """`STEPS` steps of a run, in one scan."""
    return _advance(name, carry)


def filled(number):
    """A state in which everything says `number`."""
    names = ["small", "bytes", "words"]
    shapes = [(), (2**16,), (4, 2**12)]
    dtypes = [jnp.int32, jnp.uint8, jnp.float32]
    return {name: jnp.asarray(np.full(*x)) for name, *x in zip(names, shapes, [number] * 3, dtypes, strict=True)}


def numbers_in(state):
    """The numbers of all leaves."""
    return {int(x) for leaf in jax.tree.leaves(state) for x in np.unique(np.asarray(leaf))}


def save_until_signalled(path, first, goes_on, connection):
    """Save states of growing numbers, and tell of each save when it begins, returns, and is on the disk.

    A signal raises an error, by which the program ends unless it `goes_on`.
    """
    jax.config.update("jax_platforms", "cpu")
    sys.stderr = io.StringIO()  # of the error by which it ends
    interruptible()
    inside = False

    def handler(number, _):
        if inside or not goes_on:  # one that comes between two saves would end the program
            raise KeyboardInterrupt if number == signal.SIGINT else SystemExit(1)

    signal.signal(signal.SIGINT, handler)  # a shell may ignore it in what runs in the background
    signal.signal(signal.SIGTERM, handler)
    for number in itertools.count(first):
        state = filled(number % 128)  # NumPy may end by a SystemError where it is interrupted
        try:
            inside = True
            connection.send(("begin", number))
            finish = jr.save(path, None, state, step=number, wait=number % 2 > 0, keep=2)
            connection.send(("returned", number))
            finish()
            connection.send(("end", number))
            inside = False
        except (KeyboardInterrupt, SystemExit):
            inside = False
            if not goes_on:
                raise


def rewrite(folder, change):
    """Change what the newest checkpoint says of itself, as one may who knows that its digest has no key."""
    path = pathlib.Path(folder, f"checkpoint_{_files.numbers(folder)[0]}")
    content = _files.description(str(path))
    change(content)
    files.describe(str(path), content)


def recorded():
    """The configuration and state of the checkpoint in `recorded`: small numbers in every leaf."""
    buffer = jr.ReplayBuffer(capacity=4)
    state = buffer.init({"half": np.zeros(1, jnp.bfloat16), "frame": np.zeros((1, 3), np.uint8)})
    state = jax.tree.map(lambda x: jax.device_put((np.arange(x.size) % 2).reshape(x.shape).astype(x.dtype)), state)
    return {"replay": buffer}, {"replay": state, "key": jax.random.key(7), "steps": 5}


def main():
    jax.config.update("jax_num_cpu_devices", 8)
    if len(sys.argv) == 1:  # the format has changed
        folder = pathlib.Path(__file__).with_name("recorded")
        shutil.rmtree(folder, ignore_errors=True)
        jr.save(folder, *recorded(), step=3)
        return
    folder = pathlib.Path(sys.argv[1])
    imported = [name for name in sys.modules if name.partition(".")[0] in ("orbax", "tensorstore")]
    digests = {}
    for path in sorted(folder.iterdir()):
        run = runs()[path.name]
        carry = advance(path.name, jr.restore(path, run.config, begin(run)))
        jr.save(path, run.config, carry)
        digests[path.name] = digest(carry)
    sys.stdout.write(json.dumps({"imported": imported, "digests": digests}))


if __name__ == "__main__":
    main()
