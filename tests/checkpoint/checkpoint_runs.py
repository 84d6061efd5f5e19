"""What the tests of checkpoints share, and run in processes of their own.

`python checkpoint_runs.py` writes the checkpoint in `recorded` anew, for a new format.
"""

import pathlib
import shutil
from typing import Any, NamedTuple

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

import jaxreplay as jr
from jaxreplay._common import files
from jaxreplay.checkpoint import _files


class Pair(NamedTuple):
    first: Any
    second: Any


@flax.struct.dataclass
class Flax:
    x: Any
    name: str = flax.struct.field(pytree_node=False)
    settings: tuple = flax.struct.field(pytree_node=False, default=(1, 0.1, None, True, ("a", np.dtype("int8"))))


class Custom:
    def __init__(self, x, size):
        self.x, self.size = x, size


jax.tree_util.register_pytree_node(Custom, lambda x: ((x.x,), x.size), lambda size, children: Custom(*children, size))


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


def filled(number):
    """A state in which everything says `number`."""
    return jax.device_put({"small": np.full(3, number, np.int8), "words": np.full((4, 2**12), number, np.float32)})


def numbers_in(state):
    """The numbers of all leaves."""
    return {int(x) for leaf in jax.tree.leaves(state) for x in np.unique(np.asarray(leaf))}


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


if __name__ == "__main__":
    path = pathlib.Path(__file__).with_name("recorded")
    shutil.rmtree(path, ignore_errors=True)
    jr.save(path, *recorded(), step=3)
