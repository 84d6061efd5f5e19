"""A buffer that was cleared is empty; that no handle from before names what is added then, the twins tell."""

import jax
import numpy as np
from helpers import items, numbers

import jaxreplay as jr


def test_wrappers_clear_too():
    """All sources of a mixture, what threads share, and what is bound; and stacked states."""
    replay, its = jr.ReplayBuffer(capacity=12), items(numbers(1, 8))
    mixture = jr.Mixture(buffers=(replay, jr.ReservoirBuffer(capacity=4)))
    state = mixture.add(mixture.init(its), 0, its)
    shared = jr.Shared(mixture, mixture.add(state, 1, its, jax.random.key(0)))
    assert shared.size() == 12
    shared.clear()
    assert shared.size() == 0
    shared.add(0, its)
    with shared.state() as cell:
        bound = jr.bind(mixture, cell.state)
        assert bound.get(np.arange(6, 14, dtype=np.int32))["id"][:2].tolist() == [0, 0]
        assert len(bound) == 8
        stacked = jax.tree.map(lambda x: x[None], cell.state[0])
        assert jax.vmap(replay.size)(jax.vmap(replay.clear)(stacked)).tolist() == [0]
        bound = bound.clear()
        assert (type(bound.state), len(bound)) == (tuple, 0)
        cell.state = bound.state
