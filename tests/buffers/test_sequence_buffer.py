import functools
import itertools
import re

import jax
import numpy as np
import pytest
from helpers import cases, no_ends, rarely, rejects

import jaxreplay as jr


def stream(first, num_steps, num_envs):
    """Steps that say where they come from: 1000 * environment + time."""
    times = np.arange(first, first + num_steps, dtype=np.int32)
    return times[:, None] + 1000 * np.arange(num_envs, dtype=np.int32)


def filled(buffer, num_steps, rollout=1):
    state = buffer.init(stream(0, 1, buffer.num_envs))
    for t in range(0, num_steps, rollout):
        state = buffer.add(state, stream(t, min(rollout, num_steps - t), buffer.num_envs))
    return state


@pytest.mark.parametrize("some", [slice(0, None, 2), rarely(slice(1, None, 2))], ids=["even", "odd"])
def test_sequences_are_those_of_flashbax(some):
    """While the ring is not wrapped the same; after that flashbax counts strides from the oldest step still stored.

    Its starts so move against the stream by the steps that were overwritten, modulo the stride, and are ours wherever
    that is 0; here a start stays one for as long as it is stored, which is what a priority and a handle need.
    """
    shifted = 0
    for case in cases("flashbax_trajectory")[some]:
        sizes = {name: case[name] for name in ("length", "num_envs", "sequence_length", "stride")}
        buffer, (length, num_envs, _, stride) = jr.SequenceBuffer(**sizes), sizes.values()
        state, time = filled(buffer, 0), 0
        for rollout, drawn in zip(case["rollouts"], case["drawn"], strict=True):
            state = buffer.add(state, stream(time, rollout, num_envs))
            time += rollout
            handles = np.asarray(buffer.newest(state, buffer.num_slots))
            found = np.asarray(buffer.get(state, handles))[handles >= 0]
            ours = {tuple(steps) for steps in found.tolist()}
            theirs = {tuple(1000 * env + t for t in times) for env, *times in drawn}
            overwritten = max(0, time - length)
            if overwritten % stride == 0:
                assert ours == theirs
            else:
                assert {steps[0] % 1000 % stride for steps in theirs} == {overwritten % stride}
                shifted += 1
            assert all(steps[0] % 1000 % stride == 0 for steps in ours)
    assert shifted > 0


def test_a_buffer_is_refused_that_would_at_times_hold_no_whole_sequence():
    """Of all small configurations: those for which it is so of some number of rows, and no others."""
    refused, made = [], []
    for length, sequence_length, stride in itertools.product(range(1, 11), repeat=3):
        if max(sequence_length, stride) > length:
            continue
        holds_one = [
            any(start % stride == 0 for start in range(max(0, rows - length), rows - sequence_length + 1))
            for rows in range(sequence_length, 4 * length + 1)
        ]
        sizes = {"length": length, "num_envs": 2, "sequence_length": sequence_length}
        if all(holds_one):
            made.append(jr.SequenceBuffer(**sizes, stride=stride))
            continue
        with pytest.raises(ValueError, match="would at times hold no whole sequence") as error:
            jr.SequenceBuffer(**sizes, stride=stride)
        for name in ("length", "stride"):  # either remedy is one, and no more than needed
            value = int(re.search(rf"(?:raise|lower) {name} to (\d+)", str(error.value))[1])
            sizes_then = {**sizes, "stride": stride, name: value}
            made.append(jr.SequenceBuffer(**sizes_then))
            with pytest.raises(ValueError, match="would at times"):
                jr.SequenceBuffer(**{**sizes_then, name: value + (1 if name == "stride" else -1)})
        refused.append(sizes)
    assert len(refused) > 100
    assert len(made) > 400


@pytest.mark.parametrize("sampler", [rarely(jr.Uniform()), jr.Prioritized()])
def test_until_a_sequence_is_complete_nothing_can_be_drawn(sampler):
    buffer = jr.SequenceBuffer(length=8, num_envs=2, sequence_length=3, sampler=sampler)
    rejects("cannot sample from an empty buffer; add items", buffer.sample, filled(buffer, 0), jax.random.key(0), 4)
    state = filled(buffer, 2)
    message = "sequence_length=3 steps, and the buffer has 2 of each stream; add 1 more first"
    for draw in (buffer.sample, lambda state, key, count: buffer.epoch(state, key, count, step=0)):
        rejects(f"cannot sample: a sequence takes {message}", draw, state, jax.random.key(0), 4)
    sample = jax.device_get(jax.jit(lambda s: buffer.sample(s, jax.random.key(0), 4))(state))
    np.testing.assert_array_equal(sample.indices, -1)
    np.testing.assert_array_equal(sample.weights, 0)
    assert not np.any(sample.mask)
    state = buffer.add(buffer.update(state, sample.indices, np.ones(4)), stream(2, 1, 2))
    assert buffer.size(state) == 2
    assert np.all(np.asarray(buffer.sample(state, jax.random.key(0), 4).mask))


def test_a_draw_where_no_sequence_may_be_drawn_says_so():
    ends = np.array([[False], [True], [False], [True]])
    for kind, rule in (({"windows": "inside"}, "windows='inside'"), ({"gaps": True}, "windows='any', gaps=True")):
        buffer = jr.SequenceBuffer(length=4, num_envs=1, sequence_length=3, **kind)
        told = {"ends": ends} if "windows" in kind else {"drawable": ~ends}
        state = buffer.add(buffer.init(stream(0, 1, 1)), stream(0, 4, 1), **told)
        rejects(rf"no stored sequence may be drawn \({rule}\); add steps", buffer.sample, state, jax.random.key(0), 4)


def test_storage_costs_one_observation_a_step():
    """A million 84x84 frames, of which stacks of 4 and 3-step transitions are drawn, cost 7 GB."""
    steps = {name: jax.ShapeDtypeStruct((1, 64, *x), np.uint8) for name, x in (("frame", (84, 84)), ("rest", (11,)))}
    sizes = {"length": 2**20 // 64, "num_envs": 64, "sequence_length": 7}
    buffer = jr.SequenceBuffer(**sizes, sampler=jr.Prioritized(), windows="cut")
    total = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(jax.eval_shape(buffer.init, steps)))
    assert total / 2**20 <= 1.02 * 84 * 84 + 11
    assert total < 7.5e9


@pytest.mark.versions
def test_construction_errors():
    def refused(message, **settings):
        rejects(message, jr.SequenceBuffer, **{"length": 8, "num_envs": 2, "sequence_length": 3, **settings})

    refused("length=0: must be an integer from 1 to 268435456", length=0)
    refused("length=536870912: must be an integer from 1 to 268435456, the number of steps kept", length=2**29)
    refused("num_envs=0: must be an integer from 1 to 536870912, the number of streams", num_envs=0)
    refused("sequence_length=9: must be an integer from 1 to 8, at most length", sequence_length=9)
    refused("sequence_length=0: must be", sequence_length=0)
    refused("stride=0: must be an integer from 1 to 8", stride=0)
    refused("stride=9: must be an integer from 1 to 8", stride=9)
    remedies = "the buffer would at times hold no whole sequence; raise length to 9, or lower stride to 6"
    refused(f"length=8, sequence_length=3, stride=7: {remedies}", stride=7)


@pytest.mark.versions
def test_wrong_arguments():
    def zeros(*shape):
        return np.zeros(shape, np.float32)

    buffer = jr.SequenceBuffer(length=8, num_envs=2, sequence_length=3)
    state, steps = buffer.init({"x": zeros(1, 2, 4)}), {"x": zeros(3, 2, 4)}
    for shape, message in (
        ((1, 3, 4), r"num_envs=2: got steps with leading axes \[1, 3\], expected \[T, 2\]"),
        ((), r"leaf \['x'\]: got float32\[\], a rollout needs 2 leading axes"),
        ((2, 4), r"num_envs=2: got steps with leading axes \[2, 4\], expected \[T, 2\]"),
        ((2,), r"leaf \['x'\]: got float32\[2\], a rollout needs 2 leading axes; x\[None\] adds one\."),
        ((3,), r"leaf \['x'\]: got float32\[3\], a rollout needs 2 leading axes; x\[:, None\] adds one\."),
        ((9, 2, 4), "a rollout of 9 steps: expected 1 to length=8; add it in parts"),
        ((0, 2, 4), "a rollout of 0 steps"),
    ):
        rejects(message, buffer.add, state, {"x": zeros(*shape)})
    rejects(r"wrong structure: give the tuple's element \[1\] alone", buffer.add, state, (1.0, {"x": zeros(1, 2, 4)}))
    rejects(r"ends: got bool\[3\], expected bool\[3, 2\]", buffer.add, state, steps, ends=np.zeros(3, bool))
    one = jr.SequenceBuffer(length=8, num_envs=1, sequence_length=3)
    rejects(r"leading axes \[5, 4\], expected \[T, 1\]", one.add, one.init(zeros(1, 1, 4)), zeros(5, 4))
    rejects(r"num_envs=2: got steps with leading axes \[1, 3\]", buffer.init, {"x": zeros(1, 3, 4)})
    stacked = jax.tree.map(lambda x: np.stack([x] * 5), jax.device_get(state))
    rejects(r"length=8, num_envs=2: this state has leading axes \[5, 8\]; .* jax.vmap", buffer.add, stacked, steps)


def test_a_state_of_other_windows_is_refused():
    """Before anything is compiled; a state of its own is not."""
    kinds = ("any", "cut", "inside", "episodes")
    steps, sizes = np.zeros((4, 2), np.float32), {"length": 8, "num_envs": 2, "sequence_length": 3}
    buffers = {windows: jr.SequenceBuffer(**sizes, windows=windows) for windows in kinds}
    states = {windows: jax.eval_shape(buffer.init, steps) for windows, buffer in buffers.items()}
    for windows, buffer in buffers.items():
        none = no_ends(buffer, steps)
        assert jax.eval_shape(functools.partial(buffer.add, **none), states[windows], steps).storage.shape == (8, 2)
        for other in {*kinds} - {windows}:
            message = f"windows='{windows}', gaps=False: this state is of a buffer with other windows or gaps; use the"
            rejects(message, jax.eval_shape, functools.partial(buffer.add, **none), states[other], steps)
            rejects(message, jax.eval_shape, functools.partial(buffer.newest, n=2), states[other])
            draw = functools.partial(buffer.sample, key=jax.random.key(0), batch_size=2)
            rejects(message, jax.eval_shape, draw, states[other])
