"""Storage as rows of 128 numbers, which a TPU wants, holds the same as storage as it is."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import seeds
from helpers import at, rarely, stack
from jax import lax

import jaxreplay as jr
from jaxreplay._common import layouts

ITEMS = {
    "numbers": ((), jnp.float32),
    "flags": ((), jnp.bool_),
    "vectors": ((5,), jnp.float32),
    "halves": ((3, 7), jnp.bfloat16),
    "rows": ((376,), jnp.float32),
    "rows of bytes": ((9, 28), jnp.uint8),
    "not quite rows": ((2, 70), jnp.int32),
    "tiles": ((10, 10, 10), jnp.float32),
    "tiles of bytes": ((64, 63), jnp.uint8),
    "tiles of halves": ((2000,), jnp.float16),
    "complex numbers": ((3,), jnp.complex64),
    "four bits": ((6,), jnp.int4),
}


@pytest.fixture
def as_rows(monkeypatch):
    """Makes what is made in it be stored as rows, or as it is with False."""

    def choose(rows):
        monkeypatch.setattr(layouts, "stores_rows", lambda backend: rows)

    choose(True)
    return choose


def some(rng, shape, dtype):
    return rng.integers(0, 7 if dtype == jnp.int4 else 100, shape).astype(dtype)


def same(found, expected):
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert x.dtype == y.dtype
        np.testing.assert_array_equal(x, y)


@pytest.mark.parametrize(
    ("kind", "leading"),
    [
        ("flags", (70,)),
        ("rows", (35, 2)),  # padded to whole rows
        *(rarely((kind, leading)) for kind, leading in zip(ITEMS, itertools.cycle([(70,), (35, 2)]), strict=False)),
    ],
)
def test_written_items_are_read_in_a_scan_and_under_vmap(as_rows, kind, leading):
    shape, dtype = ITEMS[kind]
    rng, num = seeds.rng(0), leading[0]
    slots = np.stack([rng.permutation(num + 6)[:11] - 3 for _ in range(6)])  # some dropped
    slots = np.pad(slots, ((0, 0), (0, 1)), constant_values=-(2**31)).astype(np.int32)  # 0 if it overflows
    new = some(rng, (6, 12, *leading[1:], *shape), dtype)
    read_at = rng.integers(0, 70, (4, 6)).astype(np.int32)
    outside = np.array([0, 69, 70, 71, 5, 3, -1, -2, -70, -71, -(2**31), 2**31 - 1], np.int32)
    slots, new, read_at, outside = jax.device_put((slots, new, read_at, outside))

    @jax.jit
    def run(storage):
        storage, _ = lax.scan(lambda s, x: (layouts.write(s, *x), None), storage, (slots, new))
        merged = storage if len(leading) == 1 else layouts.merge_axes(storage)
        return storage, (layouts.read(merged, read_at), layouts.read(merged, outside, fill=True))

    spec = jax.ShapeDtypeStruct(shape, dtype)
    as_rows(False)
    plain = layouts.zeros(spec, leading, 0)
    written_plain, expected = run(plain)
    as_rows(True)
    storage = layouts.zeros(spec, leading, 0)
    assert isinstance(storage.bits if hasattr(storage, "bits") else storage, layouts.Rows)
    assert (storage.shape, storage.dtype) == (plain.shape, plain.dtype)
    written, found = run(storage)
    same(found, expected)
    same(layouts.plain(written), written_plain)
    two = stack(storage, written)
    same(at(jax.jit(jax.vmap(run))(two)[1], 0), expected)
    # To another backend and back, also a stack of them.
    as_rows(False)
    unpacked = layouts.on_backend(two, len(leading), 1, "cpu")
    same(at(unpacked, 1), written_plain)
    same(layouts.plain(two), unpacked)
    as_rows(True)
    same(layouts.on_backend(unpacked, len(leading), 1, "tpu"), two)


@pytest.mark.parametrize(
    ("kind", "leading"), [("halves", (7,)), ("rows of bytes", (5, 3)), *map(rarely, [("four bits", (5, 3))])]
)
def test_parts_of_each_layout_are_written_in_turn(as_rows, kind, leading):
    """Of two leaves one is left alone; of a place that is named again the last is written."""
    shape, dtype = ITEMS[kind]
    rng, num_places = seeds.rng(1), int(np.prod(leading))
    old, new = (some(rng, (n, *shape), dtype) for n in (num_places, 12))
    places = rng.integers(-2, num_places + 2, 12)
    expected = old.copy()
    places[6:] = places[5::-1]  # each is named again, once at least with the last row masked
    mask = np.arange(12) < 8
    for place, value, is_written in zip(places, new, mask, strict=True):
        if 0 <= place < num_places and is_written:
            expected[place] = value
    assert len(set(places)) < 12
    spec = jax.ShapeDtypeStruct(shape, dtype)
    both = jax.device_put({name: old.reshape(*leading, *shape) for name in "ab"})
    where = places.astype(np.int32).reshape(4, 3), mask.reshape(4, 3)
    given = jax.device_put((*where, [None, new.reshape(4, 3, *shape)]))
    everywhere = jax.device_put(np.arange(leading[0], dtype=np.int32))

    def run(storage, everywhere, both, places, mask, values):
        written = layouts.write_parts(layouts.write(storage, everywhere, both), len(leading), places, mask, values)
        return layouts.read(written, everywhere)

    for rows in (False, True):
        as_rows(rows)
        storage = layouts.zeros({"a": spec, "b": spec}, leading, 0)
        found = jax.jit(run)(storage, everywhere, both, *given)
        same(found, both | {"b": expected.reshape(*leading, *shape)})


@pytest.mark.parametrize("kind", ITEMS)
def test_rows_take_little_more_than_their_items(as_rows, kind):
    shape, dtype = ITEMS[kind]
    storage = jax.eval_shape(lambda: layouts.zeros(jax.ShapeDtypeStruct(shape, dtype), (2**15,), 0))
    payload = 2**15 * np.prod(shape, dtype=int) * max(np.dtype(dtype).itemsize, 1)
    assert payload <= sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(storage)) <= 1.25 * payload


@pytest.mark.parametrize("stride", [5, 140, 409])
def test_places_of_packed_items_do_not_overflow(stride):
    num_items = 2**23 + 5
    rows = jax.ShapeDtypeStruct((-(-num_items * stride // 128), 128), jnp.uint8)
    items = np.array([0, 1, 127, 128, 2**20 + 77, num_items - 1])
    row, lane = jax.jit(lambda items: layouts._rows_and_lanes(rows, items, stride))(items.astype(np.int32))
    place = items[:, None] * stride + np.arange(stride)  # int64
    np.testing.assert_array_equal(row, place // 128)
    np.testing.assert_array_equal(lane, place % 128)


@pytest.mark.parametrize(
    ("shape", "dtype"), [((0,), jnp.float32), ((3, 0), jnp.int4), ((2,), jax.random.key(0).dtype)], ids=str
)
def test_what_cannot_be_rows_is_stored_as_it_is(as_rows, shape, dtype):
    items = {"x": np.arange(4, dtype=np.float32)}
    is_key = jnp.issubdtype(dtype, jax.dtypes.prng_key)
    items["y"] = jax.random.split(jax.random.key(3), (4, *shape)) if is_key else np.zeros((4, *shape), dtype)
    buffer = jr.ReplayBuffer(capacity=6)
    state = buffer.add(buffer.init(items), items)
    assert not any(isinstance(x, layouts.Rows) for x in jax.tree.leaves(state.storage["y"], is_leaf=layouts.is_leaf))
    found = buffer.get(state, np.arange(4))
    same(*(jax.tree.map(lambda x: jax.random.key_data(x) if is_key else x, x["y"]) for x in (found, items)))
    np.testing.assert_array_equal(found["x"], items["x"])
