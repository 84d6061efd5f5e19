import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import compilations, compiled, rejects
from jax import lax

import jaxreplay as jr
from jaxreplay._common import calls
from jaxreplay._common.xla import after, copy_numpy, full, materialize

ARRAYS = jax.device_put(
    (np.arange(6, dtype=np.float32).reshape(3, 2), np.arange(3, dtype=np.int32), np.array([True, False, True]))
)


def check_same(found, expected):
    for a, b in zip(found, expected, strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(a, b)


def test_materialize_changes_nothing_eager_jit_scan_and_vmap():
    check_same(materialize(*ARRAYS), ARRAYS)
    check_same(jax.jit(materialize)(*ARRAYS), ARRAYS)
    check_same(jax.vmap(materialize)(*ARRAYS), ARRAYS)
    check_same(lax.scan(lambda carry, x: (carry, materialize(*x)), 0, ARRAYS)[1], ARRAYS)


@pytest.mark.hlo
@pytest.mark.versions
@pytest.mark.usefixtures("compiled_afresh")
def test_xla_keeps_what_materialize_puts_in_its_way():
    """Should XLA:CPU learn to see through the call, replay becomes several times slower; this would tell."""

    def run(x):
        (y,) = materialize(x * 2)
        return jnp.sin(y) + y[::-1]

    compiled = jax.jit(run).lower(jax.ShapeDtypeStruct((1000,), jnp.float32)).compile().as_text()
    assert " call(" in compiled or jax.default_backend() != "cpu"


@pytest.mark.hlo
@pytest.mark.versions
@pytest.mark.usefixtures("compiled_afresh")
@pytest.mark.parametrize("name", ["add", "update"])
def test_few_calls_of_a_small_program_have_no_kernel(name):
    """All of them start at once, and XLA:CPU hands operations to another thread if more than 8 can start."""
    buffer = jr.ReplayBuffer(capacity=2**20, sampler=jr.Prioritized())
    rows, numbers = np.zeros((32, 4), np.float32), np.zeros(32, np.int32)
    arguments = {"add": (rows,), "update": (numbers, rows[:, 0])}[name]
    text = compiled(jax.jit(getattr(buffer, name)), jax.eval_shape(buffer.init, rows), *arguments).as_text()
    bodies = dict(re.findall(r"^%([\w.-]+) \(.*\{\n((?: .*\n)*)\}", text, re.MULTILINE))
    called = [bodies[body] for body in re.findall(r" call\(.*?to_apply=%([\w.-]+)", text)]
    kinds = [set(re.findall(r" ([a-z-]+)\(", body)) for body in called]
    assert sum("fusion" in of for of in kinds) >= 8 or jax.default_backend() != "cpu"
    assert sum(of <= {"parameter", "tuple"} for of in kinds) <= 5


def test_after_changes_nothing():
    numbers, words = np.array([-1, 5], np.int32), np.arange(4, dtype=np.uint32).reshape(2, 2)
    others = [np.float32(np.nan), -np.ones(3), np.array([True]), np.zeros((2, 0)), np.complex64(1j)]

    @jax.jit
    def run(numbers, *others, words):
        return [after(numbers, {"other": other}) for other in (*others, jax.random.wrap_key_data(words))]

    check_same(run(numbers, *others, words=words), [numbers] * 6)


@pytest.mark.hlo
@pytest.mark.usefixtures("compiled_afresh")
def test_what_after_costs():
    """On a CPU a look at one element of an array with two axes; for a GPU and a TPU it compiles to nothing."""
    numbers, other = np.zeros(4, np.int32), np.zeros((100, 100), np.float32)
    assert compiled(jax.jit(after), numbers, other).cost_analysis().get("flops", 0) < 100  # a GPU counts none
    for platform in ("cuda", "tpu"):
        elsewhere = [jax.export.DisabledSafetyCheck.platform()]
        exported = jax.export.export(jax.jit(after), platforms=[platform], disabled_checks=elsewhere)(numbers, other)
        program = compiled(jax.jit(exported.call), numbers, other).as_text()
        assert set(re.findall(r" ([a-z-]+)\(%", program)) <= {"copy"}


def test_own_copies_numpy_arrays_alone():
    given = {"numpy": np.ones(3), "jax": jax.device_put(np.ones(3)), "number": 1.0, "none": None}
    owned = copy_numpy(given)
    assert not np.shares_memory(owned["numpy"], given["numpy"])
    check_same([owned["numpy"]], [given["numpy"]])
    assert [owned[name] is given[name] for name in ("jax", "number", "none")] == [True] * 3


@pytest.fixture(params=["one device", "several"])
def buffer_and_state(request, monkeypatch):
    """One device refuses an array that is given twice. With several we look for it, as some would wait for others."""
    monkeypatch.setattr(calls, "_are_several_devices", lambda: request.param == "several")
    buffer = jr.ReplayBuffer(capacity=4, sampler=jr.Prioritized())
    return buffer, buffer.add(buffer.init(np.ones((4, 2), np.float32)), np.ones((4, 2), np.float32))


def test_a_state_that_was_donated_is_named(buffer_and_state, tmp_path, capfd):
    buffer, gone = buffer_and_state
    indices, ones = np.arange(4, dtype=np.int32), np.ones(4, np.float32)
    state = buffer.update(gone, indices, ones)
    for call in (
        lambda: buffer.add(gone, np.ones((4, 2), np.float32)),
        lambda: buffer.sample(gone, jax.random.key(0), 4),
        lambda: buffer.update(gone, indices, ones),
        lambda: buffer.get(gone, indices),
        lambda: buffer.size(gone),
        lambda: buffer.is_empty(gone),
        lambda: buffer.is_full(gone),
        lambda: buffer.can_sample(gone),
        lambda: buffer.num_batches(gone, 2),
        lambda: jr.save(tmp_path, buffer, {"replay": gone}),
        lambda: jr.diagnostics(buffer, gone),
        lambda: jr.migrate(buffer, gone, buffer),
        lambda: jr.plot(buffer, gone),
    ):
        rejects("state: was donated to an earlier call and is gone; rebind it", call)
    assert "INVALID_ARGUMENT" not in capfd.readouterr().err  # XLA logs what it cannot donate
    assert int(buffer.size(state)) == 4


def test_an_array_that_is_given_twice_is_not_donated(buffer_and_state):
    buffer, state = buffer_and_state
    twice = jr.Mixture(buffers=(buffer, buffer))
    new = twice.update((state, state), np.array([0, 1], np.int32), np.array([2, 3], np.float32))
    found = [np.asarray(x.sampler.max_priority) for x in new]
    np.testing.assert_allclose(found, [2, 3], rtol=1e-5)
    stored = buffer.add(state, state.storage)
    assert not state.storage.is_deleted()
    np.testing.assert_array_equal(stored.ring.inserted, 8)
    buffer.add(state, np.ones((4, 2), np.float32))
    assert state.storage.is_deleted()


@jax.jit
def times(scale, x):  # one program, where an eager derivative has one for each of its operations
    return scale * x[:, 0] if x.ndim == 2 else jnp.sum(scale * x)


def test_what_is_differentiated_is_not_donated(buffer_and_state):
    """A derivative needs what the state was made of."""
    buffer, state = buffer_and_state

    def loss(scale, state):
        drawn = buffer.sample(state, jax.random.key(0), 4)
        state = buffer.update(state, drawn.indices, times(scale, drawn.items))
        return times(scale, buffer.sample(state, jax.random.key(1), 4).weights), state

    gradient, new = jax.grad(loss, has_aux=True)(np.float32(2), state)
    assert float(gradient) == 4
    assert float(new.sampler.max_priority) > 2
    assert not state.storage.is_deleted()


@pytest.mark.parametrize("outer", ["grad", "vmap"])
def test_what_is_mapped_and_differentiated_is_not_donated(outer):
    """In either order: the states are mapped, and what is added is differentiated too."""
    buffer = jr.ReplayBuffer(capacity=4)
    states = jax.jit(jax.vmap(lambda _: buffer.init(np.ones(3, np.float32))))(np.arange(2))
    three, total = jax.jit(lambda scale: jnp.full(3, scale)), jax.jit(jnp.sum)

    def stored(scale, state):
        return total(buffer.add(state, three(scale)).storage)

    scales = np.array([2.0, 3.0], np.float32)
    if outer == "grad":
        found = jax.grad(lambda scales: total(jax.vmap(stored)(scales, states)))(scales)
    else:
        found = jax.vmap(jax.grad(stored))(scales, states)
    np.testing.assert_array_equal(found, [3, 3])
    assert not any(x.is_deleted() for x in jax.tree.leaves(states))


@pytest.mark.parametrize("dtype", [bool, np.int8, np.float32, jnp.bfloat16])
def test_small_arrays_of_init_need_no_program_and_can_be_donated(dtype):
    """A CPU shares the memory of an aligned NumPy array, and copies it when it is donated."""
    write = jax.jit(lambda given: [x ^ x if x.dtype == bool else x - 1 for x in given], donate_argnums=0)
    shapes = [(n, 24) for n in (1, 2, 3)]
    with compilations() as compiled:
        new = [[full(shape, 1, dtype) for shape in shapes] for _ in range(8)]
    assert compiled == []
    jax.block_until_ready([write(given) for given in new])  # compiled
    held = []  # so that NumPy makes each in another place
    with compilations() as compiled:
        for _ in range(8):
            held.append([np.ones(shape, dtype) for shape in shapes])
            check_same([full(shape, 1, dtype) for shape in shapes], held[-1])
            given = [full(shape, 1, dtype) for shape in shapes]  # which NumPy has not seen: its view would keep it
            places = [x.unsafe_buffer_pointer() for x in given]
            assert [x.unsafe_buffer_pointer() for x in write(given)] == places
    assert compiled == []


def test_large_arrays_of_init_and_traced_ones():
    found = full((2**15, 1), 1, np.int8), jax.jit(lambda: full((3,), 1, np.int8))()
    check_same(found, (np.ones((2**15, 1), np.int8), np.ones(3, np.int8)))
