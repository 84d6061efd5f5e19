"""The largest leaf of a tree."""

import functools

import jax
import numpy as np
import seeds
from helpers import check_tree, rejects

from jaxreplay import sum_tree


@jax.jit
def update_tree(tree, indices, values):
    tree = sum_tree.update(tree, indices, values)
    return tree, sum_tree.maximum(tree)


@functools.partial(jax.jit, static_argnums=1)
def refan(tree, fanout):
    tree = sum_tree.with_fanout(tree, fanout)
    return tree, sum_tree.maximum(tree)


def test_the_maximum_of_a_tree():
    rng = seeds.rng(0)
    for capacity, fanout in ((1, 2), (5, 8), (300, 8), (6000, 128)):
        tree = sum_tree.init(capacity, fanout=fanout, track_maximum=True, track_minimum=True)
        leaves = np.zeros(capacity, np.float32)
        for _ in range(6):
            indices, values = rng.integers(capacity, size=9), rng.exponential(size=9).astype(np.float32)
            tree, largest = update_tree(tree, indices, values)
            for index, value in zip(indices, values, strict=True):
                leaves[index] = value
            assert np.asarray(largest) == leaves.max()
            check_tree(tree)
        other, largest = refan(tree, 64 if fanout == 8 else 8)
        assert np.asarray(largest) == leaves.max()
        check_tree(other)
    without = sum_tree.init(3, fanout=2)
    for tree in (without, sum_tree.with_fanout(without, 8)):
        rejects("track_maximum=False", sum_tree.maximum, tree)
