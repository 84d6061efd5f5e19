import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import NO_LLVM_PASSES

import jaxreplay as jr
from jaxreplay._common import eager

pytestmark = pytest.mark.versions
KEY = jax.random.key(0)


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
    assert eager.few_added(pictures, state, {"x": small})
    assert not eager.few_added(pictures, state, large)
    assert not eager.few_added(pictures, state, np.zeros(5000, np.int8))
    assert eager.few_drawn(pictures, state, KEY, 2**20 // (84 * 84 * 4))
    assert not eager.few_drawn(pictures, state, KEY, 2**20 // (84 * 84 * 4) + 1)
    rows = 2**20 // (20 * 84 * 4 * 4)
    assert eager.few_named(sequences, steps, np.arange(rows))
    assert not eager.few_named(sequences, steps, np.arange(rows + 1))
    assert eager.few_told(pictures, state, jnp.arange(4096), None)
    assert not eager.few_told(pictures, state, jnp.arange(4097), None)
    flat = jr.ReplayBuffer(capacity=4)
    rows = flat.init(np.zeros((1, 2**8), np.float32))  # 2**10 bytes each
    assert eager.few_drawn(flat, rows, KEY, 2**10)
    assert not eager.few_drawn(flat, rows, KEY, 2**10 + 1)
    mixture = jr.Mixture(buffers=(pictures, flat))
    assert eager.few_drawn_of_all(mixture, (state, rows), KEY, 2**20 // (84 * 84 * 4))
    assert not eager.few_drawn_of_all(mixture, (state, rows), KEY, 2**10)  # too many pictures


def test_wrong_arguments_are_left_to_the_program():
    for brief, arguments in ((eager.few_drawn, (None, 8)), (eager.few_added, ("x",)), (eager.few_added, ((),))):
        assert not eager.on_one_thread(brief, jr.ReplayBuffer(capacity=4), None, *arguments)
    assert eager.on_one_thread(lambda x: x, True)
    assert not eager.on_one_thread(lambda x: x, False)


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
