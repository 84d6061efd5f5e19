import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import seeds
from helpers import at, check_tree, leaves_of, rarely, rejects, run_for_long, run_once, stack, tree_of
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax
from oracles import TreeTwin
from scipy import stats

from jaxreplay import sum_tree
from jaxreplay.sum_tree import _levels, _tree
from jaxreplay.sum_tree._fading import Fading

pytestmark = pytest.mark.versions
FANOUTS = (2, 3, 8, 16, 64, 128)


def written(leaves, **settings):
    """A tree, for use inside a program."""
    tree = sum_tree.init(leaves.size, **settings)
    return sum_tree.update(tree, np.arange(leaves.size), leaves, unique_indices=True)


def all_capacities(fanout):
    """One to three levels, wholly and partly filled."""
    around_powers = {fanout**k + d for k in (1, 2, 3, 4) for d in (-1, 0, 1) if fanout**k + d < 5000}
    small = range(1, 71, 3 if fanout in (2, sum_tree.default_fanout()) else 12)
    return [*small, *sorted(c for c in around_powers if c > 70)]


@pytest.mark.parametrize(
    ("fanout", "capacities"),
    [
        (sum_tree.default_fanout(), [1, 2, 3, 5, 7, 8, 9, 63, 64, 65, 511, 512, 513]),
        (64, [65, 150, 257]),  # two and three groups of roots, and a level below five roots
        (128, [129, 300]),
        *(rarely((fanout, all_capacities(fanout))) for fanout in FANOUTS),
    ],
)
def test_every_capacity_keeps_natural_order_and_finds_every_boundary(fanout, capacities):
    def probe(leaves, prefixes):
        tree = written(leaves, fanout=fanout, track_minimum=True, track_maximum=True)
        leaves = sum_tree.get(tree, jnp.arange(tree.capacity))
        ends = sum_tree.total(tree), sum_tree.minimum(tree), sum_tree.maximum(tree)
        return leaves, ends, sum_tree.find(tree, prefixes)

    def case(capacity):
        rng = seeds.rng(capacity)
        twin = TreeTwin(capacity)
        twin.leaves[:] = rng.integers(0, 4, capacity)  # integers: sums and boundaries are exact
        twin.leaves[rng.integers(capacity)] = 2
        boundaries = np.unique(np.cumsum(twin.leaves))[-60:]
        prefixes = np.concatenate([[0, -1, twin.total, np.inf, 2 * twin.total], boundaries]).astype(np.float32)
        prefixes = np.concatenate([prefixes, np.nextafter(prefixes, np.float32(np.inf)), np.nextafter(prefixes, 0)])
        return twin, np.concatenate([prefixes, np.full(195 - len(prefixes), np.nan, np.float32)])

    given = [case(capacity) for capacity in capacities]
    probed = []
    for start in range(0, len(given), 16):  # programs of so many capacities, which run once
        arguments = [(twin.leaves, prefixes) for twin, prefixes in given[start : start + 16]]
        probed += jax.device_get(run_once(lambda of_each: [probe(*x) for x in of_each])(arguments))
    for capacity, (twin, prefixes), (leaves, ends, found) in zip(capacities, given, probed, strict=True):
        np.testing.assert_array_equal(leaves, twin.leaves)
        assert ends == (twin.total, twin.minimum, twin.leaves.max())
        assert np.all(leaves[found] > 0), capacity
        exact = ~np.isnan(prefixes)
        np.testing.assert_array_equal(found[exact], [twin.find(p) for p in prefixes[exact]])


@pytest.mark.parametrize("fanout", [64, 128])
def test_rounding_never_leads_to_an_empty_child(fanout):
    """Nodes that end in leaves of 0, and roots of 0 at the end: a prefix beyond them finds the last positive leaf."""

    @run_once
    def find(leaves, prefixes):
        return sum_tree.find(written(leaves, fanout=fanout), prefixes)

    leaves, number = seeds.rng(fanout).exponential(size=700).astype(np.float32), np.arange(700)
    leaves[(number % 64 < 3) | (number % 64 >= 40) | (number >= 500)] = 0
    edges = np.cumsum(leaves, dtype=np.float64)
    ends = np.unique(edges[63::64])[:, None] * (1 + np.arange(-6, 7) * 2.0**-24)  # of each node, and next to it
    prefixes = np.concatenate([ends.ravel(), np.linspace(0, edges[-1], 100), [2 * edges[-1], np.inf]])
    prefixes = prefixes.astype(np.float32)
    found = np.asarray(find(leaves, prefixes))
    assert np.all(leaves[found] > 0)
    least, most = (np.searchsorted(edges, prefixes * (1 + error), side="right") for error in (-(2.0**-20), 2.0**-20))
    last = np.flatnonzero(leaves)[-1]
    assert np.all((found >= least.clip(max=last)) & (found <= most.clip(max=last)))
    edges = np.cumsum(np.ceil(leaves), dtype=np.float64)  # integers: all sums are exact
    prefixes = np.resize(edges[edges < edges[-1]], prefixes.shape).astype(np.float32)
    found = np.asarray(find(np.ceil(leaves), prefixes))
    np.testing.assert_array_equal(found, np.searchsorted(edges, prefixes, side="right"))


@pytest.mark.parametrize(("fanout", "capacity"), [(3, 70), (8, 70), (64, 70), (128, 300)])
def test_a_tree_restricted_to_a_run_is_one_whose_other_leaves_are_empty(fanout, capacity):
    sizes = (0, 1, 2, 6, 7, 9, 63, 64, 65, 69, capacity)
    runs = [(start, size) for start in (0, 1, 7, 8, 63, 64, capacity - 1) for size in sizes]
    leaves = seeds.rng(fanout).integers(0, 4, capacity).astype(np.float32)  # sums and boundaries are exact
    prefixes = np.arange(leaves.sum(), dtype=np.float32)

    @jax.vmap
    def look(start, size):
        both = [written(leaves, fanout=fanout, track_minimum=tracks) for tracks in (True, False)]
        restricted, plain = (sum_tree.restrict(tree, start, size) for tree in both)
        return sum_tree.total(restricted), sum_tree.minimum(restricted), sum_tree.find(plain, prefixes)

    totals, minima, found = jax.device_get(run_once(look)(*np.array(runs, np.int32).T))
    for (start, size), total, minimum, slots in zip(runs, totals, minima, found, strict=True):
        twin = TreeTwin(capacity)
        inside = (start + np.arange(size)) % capacity
        twin.leaves[inside] = leaves[inside]
        assert (total, minimum) == (twin.total, twin.minimum)
        expected = np.searchsorted(np.cumsum(twin.leaves), prefixes[: int(total)], side="right")
        np.testing.assert_array_equal(slots[: int(total)], expected)


@jax.jit
def updated(tree, indices, values, mask, prefixes):
    tree = sum_tree.update(tree, indices, values, mask=mask)
    return tree, sum_tree.total(tree), sum_tree.minimum(tree), sum_tree.maximum(tree), sum_tree.find(tree, prefixes)


@settings(max_examples=40)
@given(sizes=st.sampled_from([(9, 2), (65, 8), (1030, 3)]), seed=st.integers(0, 2**31 - 1))
def test_random_updates_match_twin(sizes, seed):
    (capacity, fanout), rng = sizes, seeds.rng(seed)
    tree = sum_tree.init(capacity, fanout=fanout, track_minimum=True, track_maximum=True)
    twin = TreeTwin(capacity)
    for _ in range(4):
        indices = rng.integers(-2, capacity + 2, 16)
        values = (rng.random(16) * 10.0 ** rng.integers(-6, 6, 16) * (rng.random(16) < 0.7)).astype(np.float32)
        mask = rng.random(16) < 0.8
        twin.update(indices, values, mask)
        prefixes = np.concatenate([rng.random(60) * 1.1, [0, 1, np.nextafter(1, 2), 2]]) * twin.total
        tree, *results = updated(tree, indices, values, mask, prefixes.astype(np.float32))
        total, minimum, maximum, found = jax.device_get(results)
        np.testing.assert_array_equal(leaves_of(tree), twin.leaves)
        np.testing.assert_allclose(total, twin.total, rtol=1e-6)
        assert (minimum, maximum) == (np.float32(twin.minimum), twin.leaves.max())
        check_tree(tree)
        if twin.total > 0:
            assert np.all(twin.leaves[found] > 0)


def test_overwritten_poison_leaves_no_trace():
    clean = tree_of(np.arange(1, 101), track_minimum=True)
    for poison in (np.nan, np.inf, -np.inf, 1e38, 1e17):
        bad = sum_tree.update(clean, np.arange(0, 100, 3), np.full(34, poison))
        mended = sum_tree.update(bad, np.arange(100), np.arange(1.0, 101.0))
        for a, b in zip(jax.tree.leaves(mended), jax.tree.leaves(clean), strict=True):
            np.testing.assert_array_equal(a, b)
    tree = tree_of(np.append([1, 1e17], np.zeros(98)), track_minimum=True)
    tree = sum_tree.update(tree, np.append(1, np.full(33, -1)), np.full(34, 1.0))
    assert float(sum_tree.total(tree)) == 2


def test_last_duplicate_wins_under_vmap():
    rng = seeds.rng(0)
    indices, values = rng.integers(0, 10, (5, 200)), rng.random((5, 200)).astype(np.float32)
    indices[:, ::7] = -1
    trees = jax.vmap(sum_tree.update, in_axes=(None, 0, 0))(sum_tree.init(10), indices, values)
    for lane, rows in enumerate(zip(indices, values, strict=True)):
        twin, tree = TreeTwin(10), at(trees, lane)
        twin.update(*rows)
        np.testing.assert_array_equal(leaves_of(tree), np.float32(twin.leaves))
        check_tree(tree)


def test_functions_take_any_shape_and_are_vmappable():
    tree = tree_of([1, 2, 3, 4])
    np.testing.assert_array_equal(sum_tree.find(tree, np.array([[0, 0.5, 1], [2.5, 3, 7]])), [[0, 0, 1], [1, 2, 3]])
    np.testing.assert_array_equal(sum_tree.get(tree, np.array([[3, 0], [4, -1]])), [[4, 1], [0, 0]])
    assert jax.eval_shape(sum_tree.find, tree, 2.5).shape == ()
    stacked = stack(tree, tree_of([4, 3, 2, 1]))
    np.testing.assert_array_equal(jax.vmap(sum_tree.find)(stacked, np.array([3.5, 3.5])), [2, 0])
    np.testing.assert_array_equal(sum_tree.total(stacked), [10, 10])
    assert jax.eval_shape(lambda: sum_tree.init(9)).sums[-1].dtype == jnp.float32


@pytest.mark.law
@pytest.mark.parametrize(
    ("capacity", "ways", "fanout"),  # `stratified`, each way in one program
    [
        (10, (False, True), None),
        (2**20, (False, True), None),
        (1000, (True,), 128),
        rarely((1000, (False, True), None)),
        *map(rarely, [(1000, (False,), 128), (2**20, (False,), 64), (10_000, (True,), 64)]),
    ],
)
def test_sampling_law(capacity, ways, fanout):
    rng = seeds.rng(capacity)
    leaves = rng.exponential(size=capacity).astype(np.float32)
    leaves[rng.random(capacity) < 0.1] = 0

    @(run_for_long if fanout == 128 else jax.jit)
    def draw(leaves, keys):
        tree = written(leaves, fanout=fanout)
        return lax.map(lambda key: [sum_tree.sample(tree, key, 1024, stratified=way)[0] for way in ways], keys)

    bins = min(capacity, 1000)
    for way, draws in zip(ways, jax.device_get(draw(leaves, jax.random.split(seeds.key(7), 400))), strict=True):
        assert np.all(leaves[draws] > 0), way
        for groups in (np.arange(capacity) * bins // capacity, np.arange(capacity) % bins):
            masses = np.bincount(groups, leaves.astype(np.float64), minlength=bins)
            counts, held = np.bincount(groups[draws.reshape(-1)], minlength=bins), masses > 0
            expected = masses / masses.sum() * draws.size
            assert stats.chisquare(counts[held], expected[held]).pvalue > 1e-4, way


@pytest.mark.parametrize(("capacity", "fanout"), [(1, 2), (150, 8), (5_000, 64), (300, 128)])
def test_a_tree_of_leaves_is_one_that_all_were_written_to(capacity, fanout):
    leaves = seeds.rng(capacity).exponential(size=capacity).astype(np.float32) * (np.arange(capacity) % 7 > 0)
    leaves = leaves if jax.default_backend() == "cpu" else np.round(leaves)  # others may add in another order
    leaves[-2:-1] = np.nan
    made, tracks = functools.partial(sum_tree.of_leaves, fanout=fanout), {"track_minimum": capacity != 150}
    found = made(leaves, **tracks)
    empty = sum_tree.init(capacity, fanout=fanout, track_maximum=True, **tracks)
    full = sum_tree.update(empty, np.arange(capacity), np.ones(capacity))
    chex.assert_trees_all_equal(_tree.emptied(full), empty)
    jitted, expected = jax.jit(lambda x: (made(x, **tracks), written(x, fanout=fanout, **tracks)))(leaves)
    chex.assert_trees_all_equal(found, expected)
    chex.assert_trees_all_equal(jitted, found)
    assert sum_tree.of_leaves([1, -1, 3]).sums[-1][:3].tolist() == [1, np.inf, 3]
    for wrong in (leaves[:0], leaves[None], 1.0):
        rejects(r"leaves: got shape .*, expected a vector", sum_tree.of_leaves, wrong)


@pytest.mark.parametrize(("before", "after"), [(2, 128), (128, None), (8, 64)])
def test_the_same_leaves_in_a_tree_of_another_fanout(before, after):
    leaves = seeds.rng(0).exponential(size=150).astype(np.float32) * (np.arange(150) % 7 > 0)

    @jax.jit
    def run(leaves):
        trees = [written(x, fanout=before, track_minimum=True, track_maximum=True) for x in (leaves, 2 * leaves)]
        assert sum_tree.with_fanout(trees[0], before) is trees[0]
        stacked = sum_tree.with_fanout(jax.tree.map(lambda *x: jnp.stack(x), *trees), after)
        others = sum_tree.with_fanout(trees[0], after), jax.tree.map(lambda x: x[1], stacked)
        return others, [(sum_tree.minimum(other), sum_tree.maximum(other)) for other in others]

    on_gpu = jax.eval_shape(lambda: _tree.on_backend(sum_tree.init(4, fanout=before), None, "gpu"))
    assert on_gpu.fanout == sum_tree.default_fanout("gpu")
    for other, ends, expected in zip(*run(leaves), (leaves, 2 * leaves), strict=True):
        assert other.fanout == (after or sum_tree.init(1).fanout)
        np.testing.assert_array_equal(leaves_of(other), expected)
        assert jax.device_get(ends) == (expected[expected > 0].min(), expected.max())
        check_tree(other)


@pytest.mark.parametrize(("before", "after", "streams"), [(2, 128, 3), (64, 8, 1), (8, 3, 3)])
def test_fading_leaves_in_a_tree_of_another_fanout(before, after, streams):
    """Those of a run too, of two shards that differ in the newest leaf and the half-life."""
    leaves = seeds.rng(1).exponential(size=150).astype(np.float32)
    leaves[60 if streams == 1 else 149 :] = 0  # old nodes without a leaf, whose minimum must not fade
    sizes = np.int32([1, 6, 100, 150])

    @jax.jit
    @jax.numpy_rank_promotion("raise")
    def run(leaves):
        ages = Fading(jnp.int32([53, 149]), jnp.float32([0.5, 20.0]), 150, streams)
        empty = sum_tree.init(150, fanout=before, track_minimum=True)
        one = jax.vmap(lambda fading: sum_tree.update(empty.replace(fading=fading), jnp.arange(150), leaves))(ages)
        other = sum_tree.with_fanout(one, after)

        def ends(tree, size):
            part = sum_tree.restrict(tree, jnp.int32(40), size)
            slots = sum_tree.find(part, sum_tree.total(part) * jnp.float32([0.3, 0.7]))
            return sum_tree.total(part), sum_tree.minimum(part), slots

        whole = jax.vmap(lambda tree: (sum_tree.total(tree), sum_tree.minimum(tree)))(other)
        return one, other, whole, jax.vmap(lambda tree: jax.vmap(lambda size: ends(tree, size))(sizes))(other)

    one, other, whole, (totals, minima, slots) = jax.device_get(run(leaves))
    np.testing.assert_allclose(whole, (totals[:, -1], minima[:, -1]), rtol=1e-5)
    for k, half_life in enumerate((0.5, 20.0)):
        assert at(other, k).fanout == after
        check_tree(at(one, k))
        check_tree(at(other, k))
        age = ((53, 149)[k] // streams - np.arange(150) // streams) % (150 // streams)
        masses = leaves * np.exp2(-age / half_life)
        for i, size in enumerate(sizes):
            inside = np.where((np.arange(150) - 40) % 150 < size, masses, 0)
            np.testing.assert_allclose(totals[k, i], inside.sum(), rtol=1e-5)
            np.testing.assert_allclose(minima[k, i], inside[inside > 0].min().clip(2.0**-126), rtol=1e-5)
            behind = np.cumsum(inside) / inside.sum()
            np.testing.assert_array_equal(slots[k, i], np.searchsorted(behind, [0.3, 0.7], side="right"))


@pytest.mark.parametrize("stratified", [False, True])
def test_fresh_bits_choose_among_leaves_that_the_first_have_no_room_for(stratified):
    """Two like halves: 64 leaves of 2^-13 in all, before a giant; all sums are exact.

    Each draw is at the start of its half plus less than 2^-13.
    """
    rng, leaves = seeds.rng("fresh bits"), np.zeros(4096, np.float32)
    units = 1 + rng.multinomial(2**20 - 64, np.full(64, 1 / 64))
    for half in (0, 2048):
        leaves[half : half + 64], leaves[half + 1000] = units * 2.0**-33, 2.0**11 - 2.0**-13
    fine = np.repeat(rng.permuted(np.tile(np.cumsum(units)[:-1], (2, 1)), axis=1).T, 2, axis=0).astype(np.uint32) << 12
    fine[::2] -= 256  # one of the 24 bits that count before the start of each leaf, and at its start
    coarse = np.broadcast_to(np.array([0, 0 if stratified else 2**31], np.uint32), fine.shape)
    tree = tree_of(leaves)
    draws, _ = jax.vmap(lambda *bits: sum_tree.sample_with(tree, bits, stratified=stratified))(coarse, fine)
    expected = np.searchsorted(np.cumsum(units), fine / 2**32 * 2**20, side="right")
    np.testing.assert_array_equal(draws, expected + np.array([0, 2048]))


def test_what_is_promised_of_a_batch_with_repeated_indices_is_true(monkeypatch):
    """Scatters are told that their indices are distinct; on a CPU a broken promise would not show."""
    ascend, seen = _levels.ascend, []

    def spy(levels, target, *rest):
        seen.append(target)
        return ascend(levels, target, *rest)

    monkeypatch.setattr(_levels, "ascend", spy)
    indices = np.array([3, 3, 0, 7, 3, 0, -1, 9])

    @jax.jit
    def run(indices, values):
        with jax.disable_jit():  # what is seen belongs to this program
            sum_tree.update(sum_tree.init(8, track_minimum=True), indices, values)
        return seen

    targets = jax.device_get(run(indices, np.arange(8.0)))
    assert len(targets) == 2
    for target in targets:
        written = target[target < 8]
        assert sorted(written) == [0, 3, 7]
        np.testing.assert_array_equal(np.flatnonzero(target < 8), [3, 4, 5])  # the last of each


@jax.jit
def draws_of_equal_leaves(seed, leaves):
    """As many stratified draws as there are leaves."""
    return sum_tree.sample(written(leaves), jax.random.key(seed), leaves.size, stratified=True)


@pytest.mark.parametrize("capacity", [1, 41, 64, 107, 1000])
def test_as_many_draws_as_equal_leaves_find_each_once(capacity):
    for seed in range(4):
        draws, values = draws_of_equal_leaves(np.uint32(seed), np.ones(capacity, np.float32))
        np.testing.assert_array_equal(values, 1)
        np.testing.assert_array_equal(draws, np.arange(capacity))


@run_for_long
def over_all_values(tree, word, other):
    """How often each leaf comes, float32 [capacity], if one word of a draw takes all of its 2^24 values."""

    def count(counts, start):
        values = (start + jnp.arange(2**18, dtype=jnp.uint32)) << 8
        others = jnp.full_like(values, other)
        bits = jnp.where(word == 0, jnp.stack([values, others]), jnp.stack([others, values]))
        return counts.at[sum_tree.sample_with(tree, bits)[0]].add(1), None

    starts = jnp.arange(0, 2**24, 2**18, dtype=jnp.uint32)
    return lax.scan(count, jnp.zeros(tree.capacity, jnp.int32), starts)[0].astype(jnp.float32) / 2**24


@pytest.mark.law
@pytest.mark.slow
@pytest.mark.parametrize(
    "kind", ["giant", "giant at the end", "lognormal 4", "lognormal 10", "equal", "2^24 equal", "2^24 lognormal 4"]
)
def test_how_far_the_law_holds(kind):
    """A leaf's probability is right to within 2^-21, and those of equal leaves to within 0.1%.

    It is within 2^-22 unless one leaf has nearly all of the total: then each sum above it is rounded at that size.
    """
    number, normal = np.arange(4096), seeds.rng(0).standard_normal(4096)
    leaves = {
        "giant": lambda: np.where(number == 2000, 1e9, 1),
        "giant at the end": lambda: np.where(number == 4095, 1e9, 1),
        "lognormal 4": lambda: np.exp(4 * normal),
        "lognormal 10": lambda: np.exp(10 * normal),
        "equal": lambda: np.full(3000, 0.1),
        "2^24 equal": lambda: np.full(2**24 - 5, 0.7),
        "2^24 lognormal 4": lambda: np.exp(4 * seeds.rng(0).standard_normal(2**24 - 5)),
    }[kind]()
    tree, law = tree_of(leaves), np.float32(leaves).astype(np.float64)
    law /= law.sum()
    atol = 2**-21 if kind == "lognormal 10" else 2**-22
    levels_below = len(tree.sums) - 1
    width = tree.fanout ** (levels_below - levels_below // 2)
    block = np.arange(len(law)) // width
    found, expected = (np.bincount(block, x) for x in (over_all_values(tree, 0, 0), law))
    np.testing.assert_allclose(found, expected, rtol=0, atol=atol)
    if kind == "giant":
        ratio = np.delete(found / expected, 2000 // width)
        np.testing.assert_allclose([ratio.min(), ratio.max()], [0.93, 1.86], atol=0.01)
    drawn = np.flatnonzero(found)
    for b in {*drawn[[0, len(drawn) // 2, -1]], found.argmax()}:
        coarse = int((found[:b].sum() + found[b] / 2) * 2**24)  # leads to the block
        within = np.asarray(over_all_values(tree, 1, np.uint32(coarse << 8)), np.float64)[block == b]
        assert within.sum() == 1
        if "equal" in kind:
            np.testing.assert_allclose(found[b] * within, law[block == b], rtol=1e-3)
        np.testing.assert_allclose(found[b] * within, law[block == b], rtol=0, atol=atol)


def test_construction_errors():
    rejects("capacity=0: must be an integer from 1 to 536870912, the number of leaves", sum_tree.init, 0)
    rejects("capacity=536870913", sum_tree.init, 2**29 + 1)
    rejects(r"capacity=1000\.0: must be an integer", sum_tree.init, 1e3)
    rejects("fanout=1: must be an integer from 2 to 1024, the number of children", sum_tree.init, 4, fanout=1)


def test_indices_are_integers_of_any_width():
    tree = sum_tree.init(4)
    for function in (sum_tree.get, lambda tree, indices: sum_tree.update(tree, indices, np.ones(1))):
        rejects(r"indices: got float.*\[1\], expected integers", jax.eval_shape, function, tree, np.array([1.7]))
    if jax.config.jax_enable_x64:
        tree = sum_tree.update(tree, np.array([1, 2**32 + 2, 3 - 2**32]), np.ones(3))
        np.testing.assert_array_equal(sum_tree.get(tree, np.array([1, 2, 3, 2**32 + 1])), [1, 0, 0, 0])


def test_errors_of_the_functions():
    tree = sum_tree.init(4)
    for without in (tree, sum_tree.with_fanout(tree, 2)):
        rejects("track_minimum=False: this tree keeps no minimum", sum_tree.minimum, without)
        rejects("track_maximum=False", sum_tree.maximum, without)
    rows = jax.ShapeDtypeStruct((2**24 + 1,), jnp.int32)
    rejects("batch of 16777217 rows", jax.eval_shape, sum_tree.update, tree, rows, rows)
    for mask in (np.full(3, 2), np.ones(3, np.float32), np.ones((3, 1), bool), np.True_):
        rejects(r"mask: got .*, expected bool\[3\],", sum_tree.update, tree, np.arange(3), np.ones(3), mask=mask)
