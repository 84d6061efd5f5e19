import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import NO_LLVM_PASSES

import jaxreplay as jr
from jaxreplay._common import eager

pytestmark = pytest.mark.versions


@pytest.mark.hlo
@pytest.mark.usefixtures("compiled_afresh")
@pytest.mark.parametrize("name", ["add", "update"])
def test_a_brief_call_is_not_divided_among_threads(name):
    buffer = jr.ReplayBuffer(capacity=2**18, sampler=jr.Prioritized())
    rows = np.zeros((16, 2), np.float32)
    state = jax.eval_shape(buffer.init, rows)
    arguments = {"add": (rows, None, None), "update": (np.arange(16, dtype=np.int32), rows[:, 0])}[name]
    method = getattr(jr.ReplayBuffer, name)

    def divided(programs):
        compiled = programs[1].lower(buffer, state, *arguments).compile(NO_LLVM_PASSES)
        return "outer_dimension_partitions" in compiled.as_text()

    assert not divided(method.programs_on_one_thread)
    assert divided(method.programs)  # or XLA does it no more, and there is nothing to turn off


def test_which_calls_are_brief():
    small, large = np.zeros((8, 4), np.float32), np.zeros((12, 84, 84, 4), np.float32)
    pictures = jr.ReplayBuffer(capacity=100)
    state = pictures.init(large[:1].astype(np.uint8))
    sequences = jr.SequenceBuffer(length=100, num_envs=2, sequence_length=20)
    steps = sequences.init(large[:1, :2])  # rows of 84 * 4 numbers
    adds, draws = (functools.partial(eager.on_one_thread, moves_items=moves) for moves in (False, True))
    assert adds(pictures, state, {"x": small})
    assert not adds(pictures, state, large)
    assert not adds(pictures, state, np.zeros(5000, np.int8))
    rollouts = dataclasses.replace(pictures, axes=2)
    assert adds(rollouts, state, np.zeros((64, 64), np.int8))
    assert not adds(rollouts, state, np.zeros((64, 65), np.int8))
    assert draws(pictures, state, 2**20 // (84 * 84 * 4))
    assert not draws(pictures, state, 2**20 // (84 * 84 * 4) + 1)
    both = jr.Mixture(buffers=(jr.ReplayBuffer(capacity=4), pictures))
    parts = (both.buffers[0].init(small), state)
    assert draws(both, parts, 2**20 // (84 * 84 * 4))
    assert not draws(both, parts, 2**20 // (84 * 84 * 4) + 1)
    rows = 2**20 // (20 * 84 * 4 * 4)
    assert draws(sequences, steps, np.arange(rows))
    assert not draws(sequences, steps, np.arange(rows + 1))
    flat = jr.ReplayBuffer(capacity=4)
    thin = flat.init(np.zeros((1, 2**8), np.float32))  # 2**10 bytes each
    assert draws(flat, thin, 2**10)
    assert not draws(flat, thin, 2**10 + 1)
    pools = jr.DifficultyPools(tasks_per_env=(4,))
    for config in (pictures, both, pools):
        assert adds(config, state, jnp.arange(4096))
        assert not adds(config, state, jnp.arange(4097))
        assert adds(config, state, 4096)
        assert not adds(config, state, 4097)


def test_wrong_arguments_are_left_to_the_program():
    for rows, moves_items in ((8, True), (None, False), ("x", False), ((), False)):
        assert not eager.on_one_thread(jr.ReplayBuffer(capacity=4), None, rows, moves_items)


def test_what_is_a_part_of_another_program_has_no_options_of_its_own():
    """Also where nothing is traced but the whole."""
    buffer = jr.ReplayBuffer(capacity=4, donate=False)
    items = np.arange(3.0, dtype=np.float32)
    expected = buffer.add(buffer.init(items), items)

    def fill(scale):
        return buffer.add(buffer.init(items), scale * items)

    seen = []
    for found in (
        jax.jit(fill)(np.float32(1)),
        jax.jit(lambda: (seen.append(eager.is_tracing()), buffer.add(buffer.init(items), items))[1])(),
        jax.tree.map(lambda x: x[0], jax.vmap(fill)(np.ones(2, np.float32))),
        jax.jvp(fill, (np.float32(1),), (np.float32(1),))[0],
    ):
        for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
            np.testing.assert_array_equal(a, b)
    assert seen == [True]
    assert not eager.is_tracing()
