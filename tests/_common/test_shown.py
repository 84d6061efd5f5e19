"""Texts of states: at most six lines, nothing fetched but counters, no error; and what `help` shows."""

import inspect
import pydoc
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import over_devices

import jaxreplay as jr
from jaxreplay._common import xla

FRAMES = {"obs": np.zeros((4, 84, 84), np.uint8), "reward": np.zeros(4, np.float32)}
REPLAY = jr.ReplayBuffer(capacity=1000, sampler=jr.Prioritized())
SEQUENCES = jr.SequenceBuffer(length=8, num_envs=2, sequence_length=2, windows="inside")
ROWS, NO = np.zeros(8, np.float32), np.zeros(8, bool)
STEPS = np.zeros((3, 2, 5), np.float32)
ITEMS = "obs uint8[84, 84], reward float32[]"


def batch(size):
    return jr.TransitionBatch(S=ROWS[:size], A=ROWS[:size], logP=None, Rn=ROWS[:size], In=ROWS[:size], S_next=None)


def drawn():
    return REPLAY.sample(REPLAY.add(REPLAY.init(FRAMES), FRAMES), jax.random.key(0), 2)


def as_jax_may_put(leaf):
    state = jax.eval_shape(REPLAY.init, FRAMES)
    return jax.tree.map(lambda _: leaf, state)


def traced(show=repr):
    texts = []
    jax.eval_shape(lambda state: texts.append(show(state)), jax.eval_shape(REPLAY.init, FRAMES))
    return texts[0]


def donated():
    state = REPLAY.init(FRAMES)
    REPLAY.add(state, FRAMES)
    return state


def lanes(*sizes):
    state = jr.ReplayBuffer(capacity=8).init(ROWS)
    return jax.tree.map(lambda x: jnp.stack([x.at[...].set(size) for size in sizes]), state)


TRACER = jr.NStep(n=3, gamma=0.9, num_envs=8)
SHARDED = over_devices(jr.ReplayBuffer(capacity=16), 2)
# Each text begins with what is given here.
TEXTS = {
    "items": (
        lambda: REPLAY.add(REPLAY.init(FRAMES), FRAMES),
        f"ReplayState(4 of 1,000 items, 7.06 MB; {ITEMS}, sampler",
    ),
    "sampler": (
        lambda: REPLAY.init(FRAMES).sampler,
        "PrioritizedState(4.61 kB; tree SumTree",
    ),
    "steps": (
        lambda: SEQUENCES.add(SEQUENCES.init(STEPS), STEPS, ends=np.zeros((3, 2), bool)),
        "SequenceState(4 of 14 sequences, 404 bytes; items float32[8, 2, 5], wait int32[], windows",
    ),
    "reservoir": (
        lambda: jr.ReservoirBuffer(capacity=9).init(ROWS),
        "ReservoirState(0 of 9 items, 88 bytes; items float32[]",
    ),
    "sample": (drawn, "Sample(14.2 kB; items.obs uint8[2, 84, 84], items.reward float32[2], indices int32[2]"),
    "batch": (lambda: batch(5), "TransitionBatch(80 bytes; S float32[5], A float32[5], Rn float32[5], In float32[5])"),
    "tracer": (
        lambda: TRACER.init(ROWS, ROWS, ROWS, NO, NO, ROWS),
        "NStepState(0 of 3 steps, 464 bytes; s float32[3, 8]",
    ),
    "levels": (lambda: jr.Levels(capacity=3).init(ROWS), "LevelsState(0 of 3 levels, 132 bytes; levels float32[3, 8]"),
    "tasks": (lambda: jr.Tasks(num_tasks=4).init(), "TasksState(72 bytes; tree SumTree"),
    "pools": (lambda: jr.DifficultyPools(tasks_per_env=(4,)).init(), "PoolsState(128 bytes; pool int8[4]"),
    "shards": (
        lambda: SHARDED.add(SHARDED.init(ROWS), ROWS),
        "ReplayState(4 of 8 items in each of 2 shards, 80 bytes; items float32[])",
    ),
    "lanes": (lambda: lanes(2, 7, 5), "ReplayState(2 to 7 of 8 items in each of 3 lanes, 120 bytes; items float32[])"),
    "shapes": (lambda: jax.eval_shape(REPLAY.init, FRAMES), f"ReplayState(? of 1,000 items, 7.06 MB; {ITEMS}"),
    "host": (lambda: jax.device_get(REPLAY.init(FRAMES)), f"ReplayState(0 of 1,000 items, 7.06 MB; {ITEMS}"),
    "donated": (donated, f"ReplayState(? of 1,000 items, 7.06 MB (donated); {ITEMS}"),
    "sentinels": (lambda: as_jax_may_put(object()), "ReplayState(0 bytes; storage.obs <object object at"),
    "nothing": (lambda: as_jax_may_put(None), "ReplayState(0 bytes; ring Ring"),
    "axes": (lambda: as_jax_may_put(0), "ReplayState(0 bytes; storage.obs 0"),
}


@pytest.mark.parametrize("name", TEXTS)
def test_a_state_is_short_and_only_counters_are_fetched(monkeypatch, name):
    make, expected = TEXTS[name]
    state = jax.block_until_ready(make()) if name != "donated" else make()
    kind, fetched, on_host = type(jnp.zeros(())), [], xla.on_host
    value = kind._value
    monkeypatch.setattr(kind, "_value", property(lambda x: fetched.append(x.nbytes) or value.__get__(x)))
    monkeypatch.setattr(xla, "on_host", lambda x: fetched.append(x.nbytes) or on_host(x))
    text = repr(state)
    assert " ".join(text.split()).startswith(expected)
    assert len(text.splitlines()) <= 6
    assert sum(fetched) <= 64
    assert bool(fetched) == bool(re.search(r"\([0-9].* of ", text))


def test_a_traced_state_and_one_that_is_not_computed_yet_are_not_waited_for(monkeypatch):
    assert traced().startswith(f"ReplayState(? of 1,000 items, 7.06 MB (traced); {ITEMS}")
    state = REPLAY.init(FRAMES)
    monkeypatch.setattr(type(state.ring.size), "is_ready", lambda _: False)
    assert repr(state).startswith("ReplayState(? of 1,000 items, 7.06 MB; obs")


def test_many_leaves_are_cut():
    items = {f"a_leaf_with_a_long_name_{i}": ROWS for i in range(100)}
    lines = repr(jr.ReplayBuffer(capacity=8).init(items)).splitlines()
    assert len(lines) == 6
    assert lines[-1].endswith(" ...)")


def test_shared_is_its_buffer_and_counts():
    buffer = jr.ReplayBuffer(capacity=8)
    with jr.Shared(buffer, buffer.init(ROWS)) as shared:
        assert repr(shared) == "Shared(ReplayBuffer(capacity=8))"
    counted = jr.Shared(buffer, buffer.init(ROWS), ratio=4, added=1234, drawn=5)
    counted.close()
    assert repr(counted) == "Shared(ReplayBuffer(capacity=8), ratio=4, added=1,234, drawn=5, closed)"


CONFIGS = {
    jr.ReplayBuffer: "capacity", jr.ReservoirBuffer: "capacity", jr.SequenceBuffer: "length", jr.Sharded: "buffer",
    jr.Mixture: "buffers", jr.Prioritized: "alpha", jr.Tasks: "num_tasks", jr.Levels: "capacity", jr.NStep: "n",
}  # fmt: skip


@pytest.mark.parametrize("kind", [*CONFIGS, jr.Sample, jr.TransitionBatch, jr.buffers.ReplayState, jr.Bound])
def test_signature_and_help_show_the_public_fields(kind):
    parameters = [*inspect.signature(kind).parameters]
    assert parameters[0] == CONFIGS.get(kind, parameters[0])
    assert not [x for x in parameters if x.startswith("_")]
    assert "__dataclass" not in pydoc.render_doc(kind)
