"""A look-up returns arrays of its own: they can be read after a later call has donated the state."""

import functools
import inspect
import re

import jax
import numpy as np
import pytest
from helpers import over_devices, rarely

import jaxreplay as jr
from jaxreplay.testing._buffers import _adder

KEY, ROWS = jax.random.key(0), np.arange(4)
CHANGES = {"init", "add", "end_streams", "clear", "update", "set", "recycle", "remap", "reset_metrics"}
ARGUMENTS = {
    "sample": (KEY, 4),
    "epoch": (KEY, 4),
    "num_batches": (4,),
    "newest": (4,),
    "later": (KEY, ROWS),
    **dict.fromkeys(("get", "handles", "slots", "priorities", "age"), (ROWS,)),
}
REPLAY = jr.ReplayBuffer(capacity=8)
PRIORITIZED = jr.ReplayBuffer(capacity=8, sampler=jr.Prioritized(normalize="global"), count_updates=True)
SEQUENCE = jr.SequenceBuffer(length=8, num_envs=4, sequence_length=1)
RESERVOIR = jr.ReservoirBuffer(capacity=8)
BUFFERS = {
    "replay": REPLAY,
    "prioritized": PRIORITIZED,
    "sequence": SEQUENCE,
    "reservoir": RESERVOIR,
    "one shard": over_devices(REPLAY, 1),
    "shards": over_devices(PRIORITIZED, 2),
    "shards of streams": over_devices(SEQUENCE, 2),
    "mixture": jr.Mixture(buffers=(REPLAY, PRIORITIZED)),
    "one source": jr.Mixture(buffers=(RESERVOIR,)),
    "mixture of shards": jr.Mixture(buffers=(over_devices(REPLAY, 2), REPLAY)),
}
RARE = {"replay", "one shard", "shards", "shards of streams", "one source", "mixture of shards"}
MISSING = "a ReservoirBuffer keeps no order|`later` needs|has no attribute 'stored_steps'"  # not for this buffer


def kinds(tree):
    return {(x.shape, x.dtype) for x in jax.tree.leaves(tree)}


def look_ups(config, state):
    """Results of methods that take a state and return none, by name, where one may be an array of the state.

    The others have no shape and dtype of the state's arrays; they are not run.
    """
    found, of_state = {}, kinds(state)
    for name, method in inspect.getmembers(config, callable):
        if name.startswith("_") or name in CHANGES or next(iter(inspect.signature(method).parameters), "") != "state":
            continue
        named = {"step": 0} if name == "epoch" else {}
        source = (0,) if name == "handles" and isinstance(config, jr.Mixture) else ()
        call = functools.partial(method, state, *source, *ARGUMENTS.get(name, ()), **named)
        try:
            if kinds(jax.eval_shape(call)) & of_state:
                found[name] = call()
        except (ValueError, AttributeError) as error:
            if not re.search(MISSING, str(error)):
                raise
    return found


@pytest.mark.parametrize("name", [rarely(name) if name in RARE else name for name in BUFFERS])
def test_a_look_up_outlives_the_state(name):
    buffer, rows = BUFFERS[name], np.arange(4, dtype=np.float32)
    add, rows = _adder(buffer), rows[None] if "stream" in name or name == "sequence" else rows
    state = add(buffer.init(rows), rows, KEY)
    found = look_ups(buffer, state)
    found["diagnostics"] = jr.diagnostics(buffer, state)
    found["bound"] = jr.bind(buffer, state).size()
    add(state, rows, KEY)  # which donates it
    jax.tree.map(np.asarray, found)
    assert int(found["bound"]) == 4 * len(getattr(buffer, "buffers", [buffer]))


def test_a_look_up_of_stacked_states_outlives_them():
    states = jax.jit(jax.vmap(REPLAY.init))(np.zeros((3, 4), np.float32))
    found = jax.vmap(REPLAY.size)(states)
    jax.vmap(lambda state: REPLAY.add(state, np.zeros(4, np.float32)))(states)
    assert found.tolist() == [0, 0, 0]


def test_a_look_up_of_pools_outlives_the_state():
    pools = jr.DifficultyPools(tasks_per_env=(4, 3), easy_threshold=0.9, hard_threshold=0.1)
    state = pools.init()
    found = look_ups(pools, state), jr.diagnostics(pools, state)
    pools.update(state, ROWS, np.ones((4, 2), np.float32))
    jax.tree.map(np.asarray, found)
