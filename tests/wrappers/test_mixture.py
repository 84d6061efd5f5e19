"""Batches from several buffers: rows, handles and weights of each source, against a naive twin."""

import dataclasses
import functools
import itertools
from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import big_copies, compiled, items, mesh, numbers, over_devices, rarely, rejects, run_once
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import AxisType, Mesh

import jaxreplay as jr

PER = functools.partial(jr.Prioritized, alpha=0.7, beta=0.6, epsilon=0.01)
REPLAY = functools.partial(jr.ReplayBuffer, donate=False)


def once(function, *arguments):
    """The result of one program, on the host: calls one by one would be as many programs."""
    return jax.device_get(run_once(function)(*arguments))


def by_largest_remainders(parts, batch_size):
    quotas = [Fraction(part, sum(parts)) * batch_size for part in parts]
    counts = [quota.numerator // quota.denominator for quota in quotas]
    while sum(counts) < batch_size:
        left = [quota - count for quota, count in zip(quotas, counts, strict=True)]
        counts[left.index(max(left))] += 1
    return tuple(counts)


@settings(max_examples=60)
@given(parts=st.lists(st.integers(1, 1000), min_size=1, max_size=4), batch_size=st.integers(0, 3000))
def test_counts_are_by_largest_remainders(parts, batch_size):
    mixture = jr.Mixture(buffers=(REPLAY(capacity=1),) * len(parts), shares=[0.1 * part for part in parts])
    assert mixture.counts(batch_size) == by_largest_remainders(parts, batch_size)
    assert mixture.shares == pytest.approx([part / sum(parts) for part in parts])


def test_remainders_that_tie_go_to_the_earlier_buffer():
    """All small shares, most of which are no floats: rounding decides no tie."""
    for parts in itertools.product(range(1, 7), repeat=3):
        mixture = jr.Mixture(buffers=(REPLAY(capacity=1),) * 3, shares=[part / sum(parts) for part in parts])
        found = [mixture.counts(batch_size) for batch_size in range(12)]
        assert found == [by_largest_remainders(parts, batch_size) for batch_size in range(12)], parts


def test_counts_that_are_known():
    def mixture(*shares):
        return jr.Mixture(buffers=[REPLAY(capacity=1)] * len(shares), shares=np.array(shares))

    assert mixture(1, 1, 1).counts(8) == (3, 3, 2)  # of equal remainders the earlier buffer's first
    assert mixture(1e-300, 1e300).counts(2**29) == (0, 2**29)
    assert jr.Mixture(buffers=(REPLAY(capacity=1),) * 2) == mixture(3, 3)


DISTINCT = jr.Uniform(replacement=False)


@dataclasses.dataclass(frozen=True)
class Halves(jr.Uniform):
    """A law of one's own that leaves every other row empty."""

    def sample(self, state, key, batch_size, live):
        slots, probabilities = super().sample(state, key, batch_size, live)
        return slots, jnp.where(jnp.arange(batch_size) % 2 == 0, probabilities, 0.0)


@pytest.mark.law
@pytest.mark.parametrize("normalize", [None, rarely("batch")])
def test_joint_weights_where_rows_hold_no_item(normalize):
    """Rows of sources without replacement, of their shards, of empty shards, and of a sampler of one's own.

    All items of the sources without replacement are drawn, so the weighted sums are known exactly.
    """
    buffers = (
        REPLAY(capacity=16, sampler=DISTINCT),
        over_devices(REPLAY(capacity=16, sampler=DISTINCT), 2),
        over_devices(REPLAY(capacity=16), 2),
        REPLAY(capacity=8, sampler=Halves()),
        REPLAY(capacity=8, sampler=PER(beta=1.0, normalize=normalize)),
    )
    shares = (2, 2, 2, 1, 3)
    mixture = jr.Mixture(buffers=buffers, shares=shares, weights="joint")

    @run_once
    def draw(counts, max_age):
        state = mixture.init(items(numbers(0, 2)))
        for k, count in enumerate(counts):  # of each shard
            capacity = getattr(buffers[k], "buffer", buffers[k]).capacity
            shard, place = np.divmod(np.arange(capacity), capacity // len(count))
            state = mixture.add(state, k, items(numbers(0, capacity)), mask=place < count[shard])
        return mixture.sample(state, jax.random.key(0), 81, max_age=max_age)

    for counts in ((1,), (2, 8), (0, 5), (4,), (3,)), ((8,), (8, 8), (3, 1), (8,), (8,)):
        for max_age in (1000, 2):
            drawn = jax.device_get(draw([np.array(x, np.int32) for x in counts], max_age))
            held, source = drawn.indices >= 0, np.repeat(np.arange(5), mixture.counts(81))
            np.testing.assert_array_equal(drawn.weights > 0, held)
            assert not np.any(held[source == 3][1::2])
            part = drawn.weights / (np.sum(drawn.weights) if normalize else 81)
            for k, count in enumerate(counts):
                np.testing.assert_allclose(part[source == k].sum(), shares[k] / 10, rtol=1e-5)
                if k < 2:  # all items, and each of them alike
                    its = held & (source == k)
                    size = np.minimum(count, max_age // len(count)).sum()
                    assert len(set(drawn.items["id"][its])) == its.sum() == size
                    np.testing.assert_allclose(part[its], shares[k] / 10 / size, rtol=1e-5)
            if normalize:
                assert drawn.weights.max() == 1
    assert mixture.counts(81) == (16, 16, 16, 8, 25)  # one share was no whole number of rows


@pytest.mark.parametrize("kind", ["joint", rarely("own")])
def test_each_step_of_a_sequence_has_the_handle_and_the_weight(kind):
    """The weight of the draw in the mixture, times the step's own. Each source draws with a key of its own."""
    buffers = [jr.SequenceBuffer(length=8, num_envs=2, sequence_length=3, sampler=PER()) for _ in range(2)]
    mixture = jr.Mixture(buffers=buffers, shares=(2, 1), weights=kind)
    ids = np.arange(16, dtype=np.float32).reshape(8, 2)

    def draw():
        W = (2 + ids).astype(jnp.bfloat16)  # whole numbers, so exact
        batch = jr.TransitionBatch(S=ids, A=ids, logP=None, Rn=ids, In=ids, S_next=ids, W=W)
        state = mixture.init(batch)
        for k in range(2):
            state = mixture.add(state, k, batch, td_errors=ids)
        key = jax.random.key(0)
        own = [buffers[k].sample(state[k], jax.random.split(key)[k], (5, 3)[k]).indices for k in range(2)]
        return mixture.sample(state, key, 8), own

    drawn, own = once(draw)
    assert drawn.indices.tolist() == [2 * handle + k for k in range(2) for handle in own[k].tolist()]
    assert len(np.unique(drawn.weights)) > 2
    np.testing.assert_array_equal(drawn.items.idx, np.repeat(drawn.indices[:, None], 3, axis=1))
    assert drawn.items.W.dtype == np.float32
    np.testing.assert_allclose(drawn.items.W, (2 + drawn.items.S) * drawn.weights[:, None], rtol=1e-6)


def test_empty_mixtures():
    mixture, rows = jr.Mixture(buffers=(REPLAY(capacity=8),) * 2), items(numbers(0, 8))
    empty = mixture.init(rows)
    rejects("cannot sample from a mixture of empty buffers; add items", mixture.sample, empty, jax.random.key(0), 4)
    for normalize in (None, "batch"):  # the second source counts its rows with items, which are none
        buffers = REPLAY(capacity=8, sampler=PER(normalize=normalize)), REPLAY(capacity=8, sampler=DISTINCT)
        joint, ones = jr.Mixture(buffers=buffers, weights="joint"), np.ones(4, np.float32)
        batch = jr.TransitionBatch(S=ones, A=ones, logP=None, Rn=ones, In=ones, S_next=ones, W=ones)
        drawn = once(lambda joint=joint, batch=batch: joint.sample(joint.init(batch), jax.random.key(0), 4))
        for x in (drawn.indices + 1, drawn.age + 1, drawn.probabilities, drawn.weights, drawn.items.W):
            np.testing.assert_array_equal(x, [0] * 4)  # NaN is not 0

    def fill():
        """What it says while it holds nothing, one item, one full source, and two."""
        one = mixture.add(empty, 1, rows, mask=np.arange(8) < 1)
        states = empty, one, mixture.add(empty, 1, rows), mixture.add(mixture.add(empty, 1, rows), 0, rows)
        found = [(mixture.is_empty(x), mixture.can_sample(x, 8), mixture.is_full(x)) for x in states]
        return found, mixture.sample(states[2], jax.random.key(0), 4)

    found, drawn = once(fill)
    assert found == [(True, False, False), (False, False, False), (False, True, False), (False, True, True)]
    np.testing.assert_array_equal(drawn.indices[:2], [-1, -1])
    np.testing.assert_array_equal(drawn.weights, [0, 0, 1, 1])


def test_sizes_that_do_not_fit_int32_saturate():
    """Five sources of 2**29 items each hold more than the largest int32; four hold one more."""
    mixture = jr.Mixture(buffers=(REPLAY(capacity=1),) * 5)
    full = mixture.init(numbers(0, 1))[0]
    full = full.replace(ring=full.ring.replace(size=np.int32(2**29)))
    empty = full.replace(ring=full.ring.replace(size=np.int32(0)))
    for num_full, expected in ((5, 2**31 - 1), (4, 2**31 - 1), (3, 3 * 2**29)):
        state = (empty,) * (5 - num_full) + (full,) * num_full
        assert int(mixture.size(state)) == expected
        assert mixture.can_sample(state, 5)
        assert not mixture.is_empty(state)


def test_donation():
    buffers = (jr.ReplayBuffer(capacity=4),) * 2
    mixture, rows = jr.Mixture(buffers=buffers), items(numbers(0, 2))
    state = mixture.init(rows)
    added = mixture.add(state, 1, rows)
    assert [part.storage["id"].is_deleted() for part in state] == [False, True]
    indices = np.arange(2, dtype=np.int32)
    updated = mixture.update(added, indices, np.ones(2))
    mixture.set(updated, indices, rows)
    assert all(part.storage["id"].is_deleted() for old in (added, updated) for part in old)
    rejects("state: was donated to an earlier call and is gone", mixture.update, added, indices, np.ones(2))
    partly = jr.Mixture(buffers=(buffers[0], REPLAY(capacity=4)))
    assert (mixture.donate, partly.donate) == (True, False)
    state = partly.init(rows)
    partly.update(state, indices, np.ones(2))
    assert not state[0].storage["id"].is_deleted()


SMALL = REPLAY(capacity=4)
SHORT, SHORTER = (jr.SequenceBuffer(length=8, num_envs=1, sequence_length=length) for length in (3, 2))
PAIR, LARGE, JOINT = (SMALL, SMALL), REPLAY(capacity=2**29), {"weights": "joint"}
GLOBAL, PLAIN, BATCH = (REPLAY(capacity=4, sampler=PER(normalize=x)) for x in ("global", None, "batch"))
REFUSED = {
    r"buffers=\(\): must be a tuple of at least one buffer": {"buffers": ()},
    r"buffers=ReplayBuffer\(.*\): must be a tuple": {"buffers": SMALL},
    r"buffers\[1\]=3: must be a buffer or Sharded": {"buffers": (SMALL, 3)},
    r"buffers\[0\]=Mixture.*: .* give the buffers of another Mixture": {"buffers": (jr.Mixture(buffers=PAIR),)},
    r"buffers\[1\]=Seq.*: draws sequences of 3 steps, but buffers\[0\] draws items": {"buffers": (SMALL, SHORT)},
    r"\[1\]=.*: draws sequences of 2 steps, but buffers\[0\] draws sequences of 3": {"buffers": (SHORT, SHORTER)},
    r"shares=\(1,\): must be one positive number for each of 2 buffers": {"buffers": PAIR, "shares": (1,)},
    r"shares=0.5: must be one positive number": {"buffers": PAIR, "shares": 0.5},
    r"shares=\(1, 0\): must be positive; leave out": {"buffers": PAIR, "shares": (1, 0)},
    r"shares\[0\]=-1: must be a finite number of at least 0; leave out": {"buffers": PAIR, "shares": (-1, 1)},
    r"shares\[0\]=nan: must be a finite number": {"buffers": PAIR, "shares": (np.nan, 1)},
    r'weights=\'both\': must be "own" or "joint"': {"buffers": PAIR, "weights": "both"},
    r"of buffers\[1\] has normalize='global'; must be \"batch\" or None": {"buffers": (SMALL, GLOBAL), **JOINT},
    r"buffers \[0, 2\] have normalize=\['batch', None\]; they must": {"buffers": (BATCH, SMALL, PLAIN), **JOINT},
    r"slots of buffers\[0\]=536870912: must be .* to 268435456, as handles of": {"buffers": (LARGE, SMALL)},
}


@pytest.mark.parametrize("second", [slice(2, 4), slice(0, 4), slice(1, None, -1)], ids=["others", "more", "turned"])
def test_meshes_of_other_devices_are_refused(second):
    devices = jax.devices("cpu")
    sources = [jr.Sharded(buffer=REPLAY(capacity=8), mesh=mesh(4, devices[its])) for its in (slice(0, 2), second)]
    message = r"Sharded over axes and devices \[\({'data': 2}, \[0, 1\]\).*\]; give all of them one mesh"
    rejects(message, jr.Mixture, buffers=sources)


def test_meshes_of_other_explicit_axes_are_refused():
    """Of automatic axes the devices alone count."""

    def sources(kind):
        devices = np.array(jax.devices("cpu")[:4]).reshape(2, 2)
        meshes = mesh(4, kind=kind), Mesh(devices, ("data", "model"), axis_types=(kind,) * 2)
        return [jr.Sharded(buffer=REPLAY(capacity=8), mesh=its) for its in meshes]

    message = r"axes and devices .*{'data': 4}.*{'data': 2, 'model': 2}.*; give all of them one mesh"
    rejects(message, jr.Mixture, buffers=sources(AxisType.Explicit))
    jr.Mixture(buffers=sources(AxisType.Auto))


@pytest.mark.parametrize("message", REFUSED)
def test_configurations_that_are_refused(message):
    rejects(message, jr.Mixture, **REFUSED[message])


@pytest.mark.parametrize(
    ("shares", "batch_size", "source", "least"),
    [((0.99, 0.01), 8, 1, 100), ((1, 2, 4), 2, 0, 7), ((3, 2), 1, 1, 3), ((1e-300, 1e300), 8, 0, 10**9)],
)
def test_a_share_without_a_row_is_an_error(shares, batch_size, source, least):
    mixture, one = jr.Mixture(buffers=(REPLAY(capacity=8),) * len(shares), shares=shares), items(numbers(0, 1))
    message = rf"batch_size={batch_size}: buffers\[{source}\], .* gets no row .* give at least {least} rows"
    rejects(message, mixture.sample, mixture.init(one), jax.random.key(0), batch_size)
    if least < 1000:
        assert 0 not in mixture.counts(least)


def test_calls_that_are_refused():
    mixture, one, key = jr.Mixture(buffers=(REPLAY(capacity=8),) * 2), items(numbers(0, 1)), jax.random.key(0)
    state, three, wide = mixture.init(one), np.zeros(3, np.int32), one | {"x": np.zeros((1, 3), np.float32)}
    rejects("source=2: must be an integer from 0 to 1, the position", mixture.add, state, 2, one)
    rejects("source=2: must be an integer from 0 to 1", mixture.handles, state, 2, three)
    rejects(r"source=.*: is traced, .* give it from outside", jax.jit(mixture.add), state, 1, one)
    rejects(r"leaf \['x'\]: got float32\[3\], the buffer stores float32\[2\]", mixture.add, state, 0, wide)
    rejects("state: got a tuple of 1, expected 2 states, one of each", mixture.sample, state[:1], key, 2)
    others = state[0], mixture.buffers[1].init(wide)
    message = r"buffers\[1\] stores other items than buffers\[0\]: leaf \['x'\]: got float32\[3\], buffers\[0\] stores"
    rejects(message, mixture.sample, others, key, 2)
    others = state[0], mixture.buffers[1].init({"id": one["id"]})
    message = r"buffers\[1\] stores other items.* wrong structure: missing \['x'\]"
    rejects(message, mixture.update, others, three[:2], np.zeros(2))
    rejects("batch_size=0: must be an integer from 1", mixture.sample, state, key, 0)
    rejects(r"td_errors: got .* a row for each", mixture.update, state, three, np.zeros(2))
    values = {"id": three[:2], "x": None}
    rejects(r"got int32\[2\], expected a row for each of the 3 indices", mixture.set, state, three, values)
    larger = state[0], REPLAY(capacity=9).init(one)
    rejects("capacity=8: this state has a leading axis of 9", mixture.get, larger, three)
    mixture = jr.Mixture(buffers=(over_devices(REPLAY(capacity=8), 2), jr.ReservoirBuffer(capacity=6)), shares=(2, 1))
    state = jax.eval_shape(lambda: mixture.init(items(numbers(0, 2))))
    message = r"batch_size=4: buffers\[0\] gets 3 of these rows, but needs a multiple of 2"
    rejects(message, jax.eval_shape, lambda state: mixture.sample(state, key, 4), state)
    message = "max_age: a ReservoirBuffer keeps no order"
    rejects(message, jax.eval_shape, lambda state: mixture.sample(state, key, 6, max_age=3), state)


@pytest.mark.slow
@pytest.mark.hlo
@pytest.mark.usefixtures("compiled_afresh")
def test_a_training_step_copies_no_storage():
    """The first source grows; the other is a data set, which is only drawn from and updated."""
    num_items = 4096
    mixture = jr.Mixture(buffers=(REPLAY(capacity=num_items, sampler=PER()),) * 2, weights="joint")
    state = jax.eval_shape(mixture.init, {"x": jax.ShapeDtypeStruct((1, 8), jnp.float32)})

    def step(state, key):
        state = mixture.add(state, 0, {"x": jax.random.normal(key, (4, 8), jnp.float32)})
        sample = mixture.sample(state, key, 8)
        return mixture.update(state, sample.indices, jnp.sum(sample.items["x"], axis=1)), sample.weights

    scan = jax.jit(lambda state, keys: jax.lax.scan(step, state, keys), donate_argnums=0)
    program = compiled(scan, state, jax.eval_shape(lambda: jax.random.split(jax.random.key(0), 5)))
    assert big_copies(program.as_text(), num_items) == []
