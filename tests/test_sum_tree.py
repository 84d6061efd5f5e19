import functools
import itertools
import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax
from oracles import TreeTwin
from scipy import stats

from jaxreplay import sum_tree

FANOUTS = (2, 3, 8, 16)
VECTORS = pathlib.Path(__file__).parent / "vectors"


def tree_of(leaves, **kwargs):
    leaves = jnp.asarray(leaves, jnp.float32)
    tree = sum_tree.init(leaves.shape[0], **kwargs)
    return sum_tree.update(tree, jnp.arange(leaves.shape[0]), leaves, unique_indices=True)


def leaves_of(tree):
    return np.asarray(sum_tree.get(tree, jnp.arange(tree.capacity)))


def check_valid(tree):
    """Every node above the leaves is the sum (and the smallest positive leaf) of its children; padding is empty."""
    assert len(tree.sums[0]) <= tree.fanout
    for parents, children in itertools.pairwise(tree.sums):
        sums = children.reshape(-1, tree.fanout).sum(axis=1, dtype=np.float64)
        np.testing.assert_allclose(parents, np.pad(sums, (0, len(parents) - len(sums))), rtol=1e-6)
    assert not np.any(tree.sums[-1][tree.capacity :])
    if tree.minima is not None:
        np.testing.assert_array_equal(tree.minima[-1], np.where(tree.sums[-1] > 0, tree.sums[-1], np.inf))
        for parents, children in itertools.pairwise(tree.minima):
            minima = children.reshape(-1, tree.fanout).min(axis=1)
            padding = (0, len(parents) - len(minima))
            np.testing.assert_array_equal(parents, np.pad(minima, padding, constant_values=np.inf))


def test_sumtree_basic_total():
    assert sum_tree.total(tree_of([1, 2, 3, 4])) == 10


def test_sumtree_get_returns_correct_leaf():
    tree = tree_of([1, 2, 3, 4])
    prefixes = jnp.array([0, 0.5, 1, 2.5, 3, 7])
    np.testing.assert_array_equal(sum_tree.find(tree, prefixes), [0, 0, 1, 1, 2, 3])
    np.testing.assert_array_equal(sum_tree.get(tree, jnp.array([3, 0, 4, -1])), [4, 1, 0, 0])


def test_sumtree_update_propagates():
    tree = sum_tree.update(tree_of(np.ones(4)), jnp.array([0]), jnp.array([5.0]))
    assert sum_tree.total(tree) == 8


def test_sumtree_circular_overwrite():
    tree = sum_tree.init(3)
    for write, value in enumerate([1.0, 2.0, 3.0, 10.0]):
        tree = sum_tree.update(tree, jnp.array([write % 3]), jnp.array([value]))
    np.testing.assert_array_equal(leaves_of(tree), [10, 2, 3])
    assert sum_tree.total(tree) == 15


@pytest.mark.parametrize("fanout", FANOUTS)
def test_every_capacity_keeps_natural_order_and_finds_every_boundary(fanout):
    @functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})
    def probe(leaves, prefixes):  # one program a capacity, which runs once: to keep compilation short
        tree = tree_of(leaves, fanout=fanout, track_minimum=True)
        leaves = sum_tree.get(tree, jnp.arange(tree.capacity))
        return leaves, sum_tree.total(tree), sum_tree.minimum(tree), sum_tree.find(tree, prefixes)

    around_powers = [fanout**k + d for k in (1, 2, 3) for d in (-1, 0, 1) if 70 < fanout**k + d < 5000]
    small = range(1, 71) if fanout in (2, sum_tree.DEFAULT_FANOUT) else range(1, 71, 6)
    for capacity in [*small, *around_powers]:
        rng = np.random.default_rng(capacity)
        twin = TreeTwin(capacity)
        twin.leaves[:] = rng.integers(0, 4, capacity)  # integers: sums and boundaries are exact
        twin.leaves[rng.integers(capacity)] = 2
        boundaries = np.unique(np.cumsum(twin.leaves))[-60:]
        prefixes = np.concatenate([[0, -1, twin.total, np.inf, 2 * twin.total], boundaries]).astype(np.float32)
        prefixes = np.concatenate([prefixes, np.nextafter(prefixes, np.float32(np.inf)), np.nextafter(prefixes, 0)])
        prefixes = np.concatenate([prefixes, np.full(195 - len(prefixes), np.nan, np.float32)])
        leaves, total, minimum, found = map(np.asarray, probe(twin.leaves, prefixes))
        np.testing.assert_array_equal(leaves, twin.leaves)
        assert (total, minimum) == (twin.total, twin.minimum)
        assert np.all(leaves[found] > 0), capacity
        exact = ~np.isnan(prefixes)
        np.testing.assert_array_equal(found[exact], [twin.find(p) for p in prefixes[exact]])


@settings(max_examples=40)
@given(capacity=st.sampled_from([1, 9, 64, 65]), fanout=st.sampled_from([2, 3, 8]), seed=st.integers(0, 2**31 - 1))
def test_random_updates_match_twin(capacity, fanout, seed):
    rng = np.random.default_rng(seed)
    tree, twin = sum_tree.init(capacity, fanout=fanout, track_minimum=True), TreeTwin(capacity)
    for _ in range(4):
        indices = rng.integers(-2, capacity + 2, 16)
        values = (rng.random(16) * 10.0 ** rng.integers(-6, 6, 16) * (rng.random(16) < 0.7)).astype(np.float32)
        mask = rng.random(16) < 0.8
        tree = sum_tree.update(tree, jnp.asarray(indices), jnp.asarray(values), jnp.asarray(mask))
        twin.update(indices, values, mask)
        np.testing.assert_array_equal(leaves_of(tree), twin.leaves)
        np.testing.assert_allclose(sum_tree.total(tree), twin.total, rtol=1e-6)
        assert sum_tree.minimum(tree) == np.float32(twin.minimum)
        check_valid(jax.tree.map(np.asarray, tree))
        if twin.total > 0:
            prefixes = np.concatenate([rng.random(60) * 1.1, [0, 1, np.nextafter(1, 2), 2]]) * twin.total
            found = np.asarray(sum_tree.find(tree, jnp.asarray(prefixes, jnp.float32)))
            assert np.all(twin.leaves[found] > 0)


@pytest.mark.parametrize("fanout", FANOUTS)
def test_total_does_not_drift_in_a_million_updates(fanout):
    capacity, updates = 1000, 1_000_000

    def step(tree, key):
        index_key, value_key = jax.random.split(key)
        indices = jax.random.randint(index_key, (4,), 0, capacity)
        values = jnp.exp(3 * jax.random.normal(value_key, (4,), jnp.float32))
        return sum_tree.update(tree, indices, values), None

    @jax.jit
    def run(tree):
        return lax.scan(lambda t, i: step(t, jax.random.fold_in(jax.random.key(0), i)), tree, jnp.arange(updates))[0]

    tree = run(sum_tree.init(capacity, fanout=fanout))
    exact = leaves_of(tree).astype(np.float64).sum()
    assert abs(float(sum_tree.total(tree)) - exact) <= 1e-6 * exact
    empty = sum_tree.update(tree, jnp.arange(capacity), jnp.zeros(capacity))
    assert sum_tree.total(empty) == 0
    assert all(np.all(np.asarray(nodes) == 0) for nodes in empty.sums)


def test_overwritten_poison_leaves_no_trace():
    clean = tree_of(np.arange(1, 101), track_minimum=True)
    for poison in (np.nan, np.inf, -np.inf, 1e38, 1e17):
        bad = sum_tree.update(clean, jnp.arange(0, 100, 3), jnp.full(34, poison))
        mended = sum_tree.update(bad, jnp.arange(100), jnp.arange(1.0, 101.0))
        for a, b in zip(jax.tree.leaves(mended), jax.tree.leaves(clean), strict=True):
            np.testing.assert_array_equal(a, b)
    tree = sum_tree.update(tree_of([1, 1e17]), jnp.array([1]), jnp.array([1.0]))
    assert sum_tree.total(tree) == 2


def test_last_duplicate_wins_eager_jit_scan_and_vmap():
    rng = np.random.default_rng(0)
    indices, values = rng.integers(0, 10, (5, 200)), rng.random((5, 200)).astype(np.float32)
    indices[:, ::7] = -1
    twins = []
    for i, v in zip(indices, values, strict=True):
        twin = TreeTwin(10)
        twin.update(i, v)
        twins.append(twin.leaves)
    expected = np.stack(twins).astype(np.float32)
    tree = sum_tree.init(10)
    eager = [sum_tree.update(tree, jnp.asarray(i), jnp.asarray(v)) for i, v in zip(indices, values, strict=True)]
    np.testing.assert_array_equal(np.stack([leaves_of(t) for t in eager]), expected)
    batched = jax.vmap(sum_tree.update, in_axes=(None, 0, 0))(tree, jnp.asarray(indices), jnp.asarray(values))
    _, scanned = lax.scan(lambda t, x: (t, sum_tree.update(t, *x)), tree, (jnp.asarray(indices), jnp.asarray(values)))
    for array, (batched_nodes, scanned_nodes) in enumerate(zip(batched.sums, scanned.sums, strict=True)):
        np.testing.assert_array_equal(batched_nodes, np.stack([t.sums[array] for t in eager]))
        np.testing.assert_array_equal(scanned_nodes, batched_nodes)


def test_functions_take_any_shape_and_are_vmappable():
    tree = tree_of([1, 2, 3, 4])
    assert sum_tree.find(tree, 2.5) == 1
    assert sum_tree.find(tree, jnp.ones((2, 3))).shape == (2, 3)
    assert sum_tree.get(tree, jnp.zeros((2, 3), int)).shape == (2, 3)
    stacked = jax.tree.map(lambda *x: jnp.stack(x), tree, tree_of([4, 3, 2, 1]))
    np.testing.assert_array_equal(jax.vmap(sum_tree.find)(stacked, jnp.array([3.5, 3.5])), [2, 0])
    np.testing.assert_array_equal(sum_tree.total(stacked), [10, 10])
    assert jax.eval_shape(lambda: sum_tree.init(9)).sums[-1].dtype == jnp.float32


def groups_p_value(draws, groups, masses):
    counts = np.bincount(groups[draws], minlength=len(masses))
    expected = masses / masses.sum() * len(draws)
    return stats.chisquare(counts[expected > 0], expected[expected > 0]).pvalue


@pytest.mark.parametrize("stratified", [False, True])
@pytest.mark.parametrize("capacity", [10, 1000, 2**20])
def test_sampling_law(capacity, stratified):
    rng = np.random.default_rng(capacity)
    leaves = rng.exponential(size=capacity).astype(np.float32)
    leaves[rng.random(capacity) < 0.1] = 0
    tree = tree_of(leaves)
    keys = jax.random.split(jax.random.key(7), 400)
    draws = jax.lax.map(lambda key: sum_tree.sample(tree, key, 1024, stratified=stratified)[0], keys)
    draws = np.asarray(draws).reshape(-1)
    assert np.all(leaves[draws] > 0)
    bins = min(capacity, 1000)
    for groups in (np.arange(capacity) * bins // capacity, np.arange(capacity) % bins):
        masses = np.bincount(groups, leaves.astype(np.float64), minlength=bins)
        assert groups_p_value(draws, groups, masses) > 1e-4


def test_sampling_law_test_rejects_a_wrong_law():
    leaves = np.ones(1000)
    draws = np.random.default_rng(0).integers(0, 990, 400 * 1024)
    assert groups_p_value(draws, np.arange(1000), leaves) < 1e-4


@pytest.mark.parametrize("capacity", [1, 7, 64, 256, 1000])
def test_stratified_draws_come_one_from_each_stratum(capacity):
    tree = tree_of(np.ones(capacity))
    for seed in range(5):
        draws, values = sum_tree.sample(tree, jax.random.key(seed), capacity, stratified=True)
        np.testing.assert_array_equal(values, 1)
        np.testing.assert_array_equal(draws, np.arange(capacity))


@pytest.mark.slow
@pytest.mark.parametrize("sigma", [0, 2, 4])
def test_sampling_law_at_2_24_leaves(sigma):
    capacity, batches, batch_size = 2**24, 256, 2**16
    rng = np.random.default_rng(sigma)
    leaves = np.exp(sigma * rng.standard_normal(capacity)).astype(np.float32)
    tree = tree_of(leaves)

    @jax.jit
    def draw(counts, key):
        draws, _ = sum_tree.sample(tree, key, batch_size)
        return counts.at[draws].add(1), None

    counts, _ = jax.jit(lambda keys: lax.scan(draw, jnp.zeros(capacity, jnp.int32), keys))(
        jax.random.split(jax.random.key(1), batches)
    )
    counts, draws = np.asarray(counts, np.float64), batches * batch_size
    probability = leaves / leaves.sum(dtype=np.float64)
    expected = probability * draws
    groups = np.argsort(np.argsort(leaves, kind="stable")) * 64 // capacity
    mass = np.bincount(groups, probability, minlength=64)
    found = np.bincount(groups, counts, minlength=64)
    spread = np.sqrt(draws * mass * (1 - mass))
    assert np.all(np.abs(found - draws * mass) <= 4 * spread)
    often = expected >= 0.9
    ratio = (counts[often] - expected[often]) ** 2 / expected[often]
    assert ratio.mean() <= 1 + 4 * ratio.std() / np.sqrt(often.sum())


def test_labml_traces():
    for case in json.loads((VECTORS / "labml_per.json").read_text())["cases"]:
        capacity, alpha = case["capacity"], case["alpha"]
        tree, max_priority, cursor = sum_tree.init(capacity, track_minimum=True), 1.0, 0
        for op in case["ops"]:
            if op["op"] == "add":
                slots = (cursor + np.arange(op["count"])) % capacity
                values, cursor = np.full(op["count"], max_priority**alpha), (cursor + op["count"]) % capacity
            else:
                slots, values = np.array(op["idx"]), np.array(op["priority"]) ** alpha
                max_priority = max(max_priority, *op["priority"])
            rows = 8 - len(slots)
            tree = sum_tree.update(
                tree, jnp.asarray(np.pad(slots, (0, rows), constant_values=-1)), jnp.asarray(np.pad(values, (0, rows)))
            )
            np.testing.assert_allclose(leaves_of(tree), op["leaves"], rtol=1e-5)
            np.testing.assert_allclose(sum_tree.total(tree), op["total"], rtol=1e-5)
            np.testing.assert_allclose(sum_tree.minimum(tree), op["min"], rtol=1e-5)
            fractions, found = zip(*op["find"], strict=True)
            prefixes = jnp.asarray(np.array(fractions) * op["total"], jnp.float32)
            np.testing.assert_array_equal(sum_tree.find(tree, prefixes), found)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"capacity": 0}, r"capacity=0: must be an integer from 1 to 536870912, the number of leaves"),
        ({"capacity": 2**29 + 1}, r"capacity=536870913"),
        ({"capacity": 1e3}, r"capacity=1000\.0: must be an integer"),
        ({"capacity": 4, "fanout": 1}, r"fanout=1: must be an integer from 2 to 1024, the number of children"),
    ],
)
def test_construction_errors(arguments, message):
    with pytest.raises(ValueError, match=message):
        sum_tree.init(**arguments)


def test_errors_of_the_functions():
    tree = sum_tree.init(4)
    with pytest.raises(ValueError, match="track_minimum=False: this tree keeps no minimum"):
        sum_tree.minimum(tree)
    rows = jax.ShapeDtypeStruct((2**24 + 1,), jnp.int32)
    with pytest.raises(ValueError, match="batch of 16777217 rows"):
        jax.eval_shape(sum_tree.update, tree, rows, rows)
