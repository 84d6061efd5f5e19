"""No hidden copies: temporary memory and copies are read off the compiled programs, nothing is timed or allocated."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import TARGET, big_copies, compiled, no_ends, rarely
from jax import lax

import jaxreplay as jr
from jaxreplay import sum_tree

ROWS = 50_000  # items of 4 KiB and more: 205 MB and more of storage
BATCH = 8
ITEMS = {
    "frame": jax.ShapeDtypeStruct((BATCH, 64, 64), jnp.uint8),
    "reward": jax.ShapeDtypeStruct((BATCH,), jnp.float32),
    "done": jax.ShapeDtypeStruct((BATCH,), jnp.bool_),
}
NARROW = ["int4", "uint4", *(name for name in ("int2", "float4_e2m1fn", "float8_e8m0fnu") if hasattr(jnp, name))]
DTYPES = ["bool", "uint8", "int8", "int16", "float16", "float32", "bfloat16", "float8_e4m3fn", "complex64", *NARROW]
ITEMS_OF_ALL_DTYPES = {
    **{name: jax.ShapeDtypeStruct((BATCH, 4096 // jnp.dtype(name).itemsize), name) for name in DTYPES},
    "key": jax.eval_shape(lambda: jax.random.split(jax.random.key(0), (BATCH, 512))),
}
SAMPLERS = {"uniform": jr.Uniform(), "prioritized": jr.Prioritized(), "global": jr.Prioritized(normalize="global")}

pytestmark = [pytest.mark.usefixtures("compiled_afresh"), pytest.mark.hlo, pytest.mark.versions]


def often(cases, all_cases):
    """Of all cases those that are run always; the others are of their kind."""
    return [case if case in cases else rarely(case) for case in all_cases]


OPERATIONS = ["add", "sample", "update", "step"]
ALWAYS = [
    ("replay", "uniform", "step", 0),  # a step has all three
    ("replay", "global", "step", 8),
    ("replay", "prioritized", "update", 0),
    ("replay", "global", "part", 8),
    ("replay", "prioritized", "minibatches", 8),
    ("sequence", "uniform", "step", 0),
    ("inside", "prioritized", "step", 8),
    ("hindsight", "uniform", "later", 0),
]
OPERATIONS_OF_BUFFERS = [
    *itertools.product(["replay", "sequence"], SAMPLERS, [*OPERATIONS, "step without weights"], (0, 8)),
    *itertools.product(["replay"], SAMPLERS, ["part", "minibatches"], (0, 8)),
    *itertools.product(["inside", "episodes", "strided"], SAMPLERS, ["step"], (0, 8)),
    *itertools.product(["hindsight"], ["uniform"], ["later"], (0, 8)),
]


def check(program, state):
    storage = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(state.storage))
    assert storage >= 200e6
    assert program.memory_analysis().temp_size_in_bytes < 0.01 * storage
    smallest = min(leaf.size for leaf in jax.tree.leaves(state.storage) if leaf.size * 100 > storage)
    assert big_copies(program.as_text(), smallest) == []


def abstract(buffer, items, seeds):
    if isinstance(buffer, jr.SequenceBuffer):
        items = jax.tree.map(lambda x: jax.ShapeDtypeStruct((1, *x.shape), x.dtype), items)
    one = jax.eval_shape(buffer.init, items)
    return stacked(one, seeds) if seeds else one


def stacked(state, seeds):
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct((seeds, *x.shape), x.dtype), state)


def compiled_scan(step, carry, seeds, **settings):
    def run(carry, key):
        return lax.scan(step, carry, jax.random.split(key, 4), **settings)

    if seeds:
        carry, run = stacked(carry, seeds), jax.vmap(run)
    key = jax.eval_shape(lambda: jax.random.split(jax.random.key(0), (seeds,) if seeds else ()))
    return compiled(jax.jit(run, donate_argnums=0), carry, key)


def temporary_bytes_of_scan(step, state, seeds):
    return compiled_scan(step, state, seeds).memory_analysis().temp_size_in_bytes


def operations(buffer):
    """By name: functions of a state, items, a mask and a key."""

    def add(state, items, mask, key=None):
        if isinstance(buffer, jr.SequenceBuffer):  # the batch is a step of so many streams
            return buffer.add(state, jax.tree.map(lambda x: x[None], items), ends=mask[None])
        return buffer.add(state, items, mask=mask)

    def sample(state, items, mask, key):
        return state, buffer.sample(state, key, BATCH)

    def update(state, items, mask, key):
        return buffer.update(state, jnp.arange(BATCH), jax.random.normal(key, (BATCH,)))

    def in_scan(learn):
        def run(state, items, mask, key):
            return lax.scan(lambda x, key: learn(add(x, items, mask), key), state, jax.random.split(key, 10))

        return run

    def step(state, key, weighted=True):
        drawn = buffer.sample(state, key, BATCH)
        read = [leaf for leaf in jax.tree.leaves(drawn.items) if leaf.dtype != key.dtype]
        loss = sum(jnp.sum(jnp.real(leaf).astype(jnp.float32)) for leaf in read)
        td_errors = drawn.weights + loss if weighted else jnp.full(BATCH, loss)
        return buffer.update(state, drawn.indices, td_errors), loss

    def part(state, key):
        young = buffer.sample(state, key, BATCH, max_age=1000)
        each = buffer.epoch(state, key, BATCH, step=3)
        td_errors = young.weights + young.items["reward"] + each.items["reward"]
        return buffer.update(state, young.indices, td_errors), young.age

    def later(state, key):
        drawn = buffer.sample(state, key, BATCH)
        found, steps = buffer.later(state, jax.random.fold_in(key, 1), drawn.indices, law="geometric")
        return buffer.update(state, drawn.indices, drawn.weights + found["reward"]), steps

    def minibatches(state, items, mask, key):
        state = add(state, items, mask)
        drawn = jax.vmap(lambda key: buffer.sample(state, key, BATCH))(jax.random.split(key, 4))

        def learn(state, x):
            return buffer.update(state, x.indices, x.weights + x.items["reward"]), None

        return lax.scan(learn, state, drawn)[0]

    found = {"add": add, "sample": sample, "update": update, "minibatches": minibatches}
    found |= {"step": in_scan(step), "step without weights": in_scan(functools.partial(step, weighted=False))}
    return found | {"part": in_scan(part), "later": in_scan(later)}


def replay(sampler, seeds):
    return jr.ReplayBuffer(capacity=ROWS // max(seeds, 1), sampler=sampler)


def sequences(sampler, seeds, **settings):
    length = 5 * ROWS // max(seeds, 1) // BATCH  # as many sequences apart from one another
    sizes = {"length": length, "num_envs": BATCH, "sequence_length": 5}
    return jr.SequenceBuffer(**sizes, sampler=sampler, **{"windows": "cut", **settings})


LARGE = {
    "replay": replay,
    "sequence": sequences,
    "inside": functools.partial(sequences, windows="inside"),
    "episodes": functools.partial(sequences, windows="episodes"),
    "strided": functools.partial(sequences, stride=3),
    "hindsight": functools.partial(sequences, hindsight=True),
}


@pytest.mark.parametrize(("kind", "sampler", "operation", "seeds"), often(ALWAYS, OPERATIONS_OF_BUFFERS))
def test_no_copy(kind, sampler, operation, seeds):
    check(*compiled_operation(LARGE[kind](SAMPLERS[sampler], seeds), ITEMS, operation, seeds))


def test_no_copy_where_an_added_leaf_is_made_of_another_stored_one():
    """The write of frames comes after the read that a reward is made of, although no frame depends on it."""
    buffer = jr.ReplayBuffer(capacity=ROWS)

    def step(state, items, key):
        drawn = buffer.sample(state, key, BATCH).items
        return buffer.add(state, items | {"reward": jnp.mean(drawn["frame"], axis=(1, 2), dtype=jnp.float32)})

    state, key = abstract(buffer, ITEMS, 0), jax.eval_shape(lambda: jax.random.key(0))
    check(compiled(jax.jit(step, donate_argnums=0), state, ITEMS, key), state)


@pytest.mark.parametrize("seeds", [0, rarely(8)])
@pytest.mark.parametrize("kind", ["replay", "sequence"])
def test_no_copy_whatever_the_dtype(kind, seeds):
    check(*compiled_operation(LARGE[kind](jr.Uniform(), seeds), ITEMS_OF_ALL_DTYPES, "step", seeds))


CLOSING = often([("episodes", 8)], list(itertools.product(["episodes", "inside", "cut"], (0, 8))))


@pytest.mark.parametrize(("windows", "seeds"), CLOSING)
def test_no_copy_where_streams_are_closed(windows, seeds):
    """Neither of rows nor of their flags and numbers, between an update and an addition that a mask may leave out."""

    def temporary(length):
        sizes = {"length": length, "num_envs": BATCH, "sequence_length": 4}
        buffer = jr.SequenceBuffer(**sizes, windows=windows, gaps=True, hindsight=True)

        def step(state, key):
            drawn = buffer.sample(state, key, BATCH)
            seen = drawn.weights + drawn.items.sum(axis=1) + drawn.mask.sum(axis=1)
            state = buffer.update(state, drawn.indices, seen)
            state = buffer.end_streams(state, mask=jax.random.bernoulli(key, 0.5, (BATCH,)))
            mask = jax.random.bernoulli(jax.random.fold_in(key, 1))
            return buffer.add(state, jnp.ones((1, BATCH)), ends=jnp.zeros((1, BATCH), bool), mask=mask), seen

        return temporary_bytes_of_scan(step, jax.eval_shape(buffer.init, np.zeros((1, BATCH), np.float32)), seeds)

    assert temporary(2**18) < 1.1 * temporary(2**12) + 4096


@pytest.mark.parametrize("windows", ["episodes", rarely("inside")])
def test_work_and_memory_of_closing_streams_do_not_grow_with_their_length(windows):
    def costs(length):
        buffer = jr.SequenceBuffer(length=length, num_envs=BATCH, sequence_length=4, windows=windows, hindsight=True)
        state = jax.eval_shape(buffer.init, np.zeros((1, BATCH), np.float32))
        program = compiled(buffer.end_streams.programs[True], buffer, state, np.zeros(BATCH, bool))
        memory = program.memory_analysis()
        not_in_place = memory.output_size_in_bytes - memory.alias_size_in_bytes
        return program.cost_analysis()["flops"], memory.temp_size_in_bytes, not_in_place

    assert costs(2**18) == costs(2**10)
    assert costs(2**10)[2] < 1024


USES = often(
    [("replay", "step", 0), ("sequence", "step", 8)],
    list(itertools.product(["replay", "sequence"], OPERATIONS, (0, 8))),
)


@pytest.mark.parametrize(("kind", "operation", "seeds"), USES)
def test_no_copy_of_uses(kind, operation, seeds):
    """Neither of the counts nor of the tree of what may be drawn; these are small beside the items of other tests."""

    def temporary(capacity):
        uses = {"sampler": jr.Prioritized(), "count_updates": True, "max_uses": 3}
        buffer = jr.ReplayBuffer(capacity=capacity, **uses)
        if kind == "sequence":
            sizes = {"length": capacity // BATCH, "num_envs": BATCH, "sequence_length": 4}
            buffer = jr.SequenceBuffer(**sizes, **uses, windows="inside")
        program, _ = compiled_operation(buffer, {"x": ITEMS["reward"]}, operation, seeds)
        return program.memory_analysis().temp_size_in_bytes

    draws = max(seeds, 1) if TARGET or jax.default_backend() == "gpu" else 1
    assert temporary(2**18) < 1.1 * temporary(2**12) + 4096 * draws  # of each level a GPU keeps numbers of each draw


def compiled_operation(buffer, items, operation, seeds):
    """The program of one of `operations` for so many seeds, or none, and its abstract state."""
    function, mask = operations(buffer)[operation], jax.ShapeDtypeStruct((BATCH,), jnp.bool_)
    key, state = jax.eval_shape(lambda: jax.random.key(0)), abstract(buffer, items, seeds)
    if seeds:
        function, key = jax.vmap(function, in_axes=(0, None, None, 0)), stacked(key, seeds)
    return compiled(jax.jit(function, donate_argnums=0), state, items, mask, key), state


def cycle(length, names=("update", "add", "sample")):
    """A cycle of operations in which each sequence of `length` occurs once (de Bruijn)."""
    letters = [names[-1]] * length
    seen = {tuple(letters)}
    while len(seen) < len(names) ** length:
        last = tuple(letters[len(letters) - length + 1 :])
        letters.append(next(x for x in names if (*last, x) not in seen))
        seen.add((*last, letters[-1]))
    return letters[: len(names) ** length]


def check_order(buffer, order, seeds=0, same_items=False, **scan):
    """Check that a scan whose steps are the operations in `order` copies neither the storage nor a tree."""
    items = np.zeros((2, BATCH, 2) if isinstance(buffer, jr.SequenceBuffer) else (BATCH, 2), np.float32)
    is_reservoir = isinstance(buffer, jr.ReservoirBuffer)

    def step(carry, key):
        state, indices, td_errors = carry
        for number, operation in enumerate(order):
            new, own_key = items + td_errors[:, None], functools.partial(jax.random.fold_in, key, number)
            keys, named = (own_key(),) if is_reservoir else (), no_ends(buffer, items)
            if is_reservoir and not same_items:
                named["mask"] = jax.random.bernoulli(key, 0.5, (BATCH,))
            if operation == "insert":  # with TD errors
                named["td_errors"] = jnp.broadcast_to(td_errors, items.shape[:-1])
            if operation in ("add", "insert"):
                state = buffer.add(state, items if same_items else new, *keys, **named)
            elif operation == "clear":
                state = buffer.clear(state)
            elif operation == "update":
                state = buffer.update(state, indices, td_errors)
            elif operation == "set":
                state = buffer.set(state, indices, buffer.get(state, indices) + td_errors[0])
            elif operation == "newest":
                indices = buffer.newest(state, BATCH)
            else:
                drawn = buffer.sample(state, own_key(), BATCH)
                indices, td_errors = drawn.indices, td_errors + drawn.weights + drawn.items.reshape(BATCH, -1)[:, 0]
        return (state, indices, td_errors), None

    state = jax.eval_shape(buffer.init, items)
    program = compiled_scan(step, (state, np.zeros(BATCH, np.int32), np.zeros(BATCH, np.float32)), seeds, **scan)
    assert big_copies(program.as_text(), max(seeds, 1) * jax.tree.leaves(state.storage)[0].size // 32) == []
    whole = max(seeds, 1) * sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(state))
    assert program.memory_analysis().temp_size_in_bytes < 0.01 * whole


BUFFERS = {
    "replay": lambda sampler: jr.ReplayBuffer(capacity=2**18, sampler=sampler),
    "sequence": lambda sampler: jr.SequenceBuffer(
        length=2**18 // BATCH, num_envs=BATCH, sequence_length=3, sampler=sampler, windows="cut"
    ),
    "reservoir": lambda sampler: jr.ReservoirBuffer(capacity=2**18, sampler=sampler),
}

PAIRS, PAIRS_WITH_SET = cycle(2), cycle(2, ("set", "update", "add", "sample"))
STEPS = ["add", "sample", "update"], ["sample", "update", "add"]
CLEARED = ["add", "sample", "update", "clear", "add", "update", "sample", "clear", "clear", "sample"]
WRITES = ["insert", "sample", "set", "update", "newest"]
SAME = {"same_items": True}  # which do not depend on what was drawn
ORDERS = [
    ("sequence", "global", PAIRS, 4, {}),
    ("sequence", "uniform", CLEARED, 4, {}),  # priorities are written anew in any case
    ("replay", "prioritized", STEPS[0], 0, SAME | {"unroll": 2}),
    ("reservoir", "uniform", STEPS[1], 4, SAME),
    ("reservoir", "uniform", ["sample", "set", "add", "sample", "add"], 0, {}),
    ("sequence", "prioritized", WRITES, 0, {}),
]
RARE_ORDERS = [
    *itertools.product(["replay", "sequence"], SAMPLERS, [PAIRS], (0, 4), [{}]),
    ("replay", "prioritized", cycle(3), 0, {}),
    ("sequence", "prioritized", cycle(3), 4, {}),
    *itertools.product(["replay"], ["uniform"], [CLEARED], (0, 4), [{}]),
    *itertools.product(["replay", "sequence"], ["uniform", "prioritized"], STEPS, (0,), [SAME | {"unroll": 2}]),
    *itertools.product(["reservoir"], SAMPLERS, [PAIRS_WITH_SET], (0, 4), [{}]),
    *itertools.product(["reservoir"], ["prioritized"], STEPS, (0, 4), [SAME]),
    ("reservoir", "prioritized", ["sample", "add", "sample", "update", "add"], 0, {}),
    ("replay", "stored", WRITES, 0, {}),
]


@pytest.mark.parametrize(
    ("buffer", "sampler", "order", "seeds", "settings"),
    [*ORDERS, *(rarely(case) for case in RARE_ORDERS if case not in ORDERS)],
)
def test_no_copy_in_any_order_of_operations(buffer, sampler, order, seeds, settings):
    """What is drawn is used in what comes after it; in a cycle all sequences of so many operations follow another."""
    sampler = {**SAMPLERS, "stored": jr.Prioritized(max_priority="stored")}[sampler]
    check_order(BUFFERS[buffer](sampler), order, seeds, **settings)


def flops(function, state, *arguments):
    """Of a program that takes the state."""
    return compiled(jax.jit(function, donate_argnums=0), state, *arguments).cost_analysis()["flops"]


@pytest.mark.parametrize("operation", ["add", "sample"])
def test_uniform_sequences_cost_the_same_at_any_length(operation):
    def work(length):
        buffer = jr.SequenceBuffer(length=length, num_envs=BATCH, sequence_length=4, stride=3)
        state = jax.eval_shape(buffer.init, np.zeros((1, BATCH), np.float32))
        arguments = np.zeros(BATCH, np.float32), np.zeros(BATCH, bool), jax.random.key(0)
        return flops(operations(buffer)[operation], state, *arguments)

    assert work(2**18) == work(2**10) > 0


@pytest.mark.parametrize("seeds", often([], [0, 8]))
def test_pools_of_a_million_tasks_are_not_copied(seeds):
    """In a scan of draws and of two updates each."""

    def pool_bytes(num_tasks):
        pools = jr.DifficultyPools(tasks_per_env=(num_tasks // 2,) * 2, easy_threshold=0.9, hard_threshold=0.1)

        def step(state, key):
            tasks, _ = pools.sample(state, key, 64)
            for _ in range(2):
                state, kept = pools.update(state, tasks, jax.random.bernoulli(key, 0.5, (64, 2)))
            return state, (kept.sum(), pools.metrics(state))

        return temporary_bytes_of_scan(step, jax.eval_shape(pools.init), seeds)

    assert pool_bytes(2**20) < 1.1 * pool_bytes(2**14) + 4096 * max(seeds, 1)


def test_an_eager_update_of_pools_copies_nothing_if_it_donates():
    def copied(donate):
        pools = jr.DifficultyPools(tasks_per_env=(2**20,), easy_threshold=0.9, donate=donate)
        groups = np.zeros(64, np.int32), np.zeros((64, 2), np.float32), np.ones((64, 2), bool)
        program = compiled(jr.DifficultyPools._update.programs[donate], pools, jax.eval_shape(pools.init), *groups)
        memory = program.memory_analysis()
        return memory.temp_size_in_bytes + memory.output_size_in_bytes - memory.alias_size_in_bytes

    assert copied(donate=True) < 2**16
    assert copied(donate=False) > 2**24  # the check sees a copy


@pytest.mark.parametrize(("operation", "growth"), [("update", 4), rarely(("sample", 8 / 5))])
def test_work_on_pools_grows_with_the_levels_of_the_tree(operation, growth):
    """2^15 tasks and 2^24, as below."""

    def work(num_tasks):
        pools = jr.DifficultyPools(tasks_per_env=(num_tasks,), easy_threshold=0.9)
        tasks, rewards = np.zeros(64, np.int32), np.zeros((64, 2), np.float32)
        operations = {
            "sample": lambda state: (state, pools.sample(state, jax.random.key(0), 64)),
            "update": lambda state: pools.update(state, tasks, rewards),
        }
        return flops(operations[operation], jax.eval_shape(pools.init))

    assert work(2**24) <= growth * work(2**15)


@pytest.mark.parametrize(("operation", "growth"), [("update", 4), *map(rarely, [("unique", 4), ("sample", 8 / 5)])])
def test_work_on_the_tree_grows_with_its_levels(operation, growth):
    """2^15 leaves have 5 levels, 2^24 have 8; of those above the leaves 1 and 4 are updated row by row."""

    def run(tree, key):
        indices = jax.random.randint(key, (256,), 0, tree.capacity)
        if operation == "sample":
            return tree, sum_tree.sample(tree, key, 256, stratified=True)
        return sum_tree.update(tree, indices, jnp.ones(256), unique_indices=operation == "unique"), indices

    def costs(capacity):
        tree = jax.eval_shape(lambda: sum_tree.init(capacity))
        program = compiled(jax.jit(run, donate_argnums=0), tree, jax.random.key(0))
        return program.memory_analysis().temp_size_in_bytes, program.cost_analysis()["flops"]

    (small_bytes, small_work), (large_bytes, large_work) = costs(2**15), costs(2**24)
    assert large_work <= growth * small_work
    assert large_bytes <= 2 * small_bytes


def test_a_large_batch_of_a_wide_tree_is_not_compared_row_by_row():
    """To find the last of each index: all pairs would be 4 times the work for twice the rows."""

    def work(rows):
        tree = jax.eval_shape(lambda: sum_tree.init(2**20, fanout=128))
        arguments = jax.ShapeDtypeStruct((rows,), jnp.int32), jax.ShapeDtypeStruct((rows,), jnp.float32)
        return flops(sum_tree.update, tree, *arguments)

    assert work(4096) < 2.5 * work(2048)


def test_a_draw_from_a_wide_tree_is_not_unrolled_over_siblings():
    """128 of them, and 1024, are reduced in a few operations."""

    def operations(fanout):
        tree = jax.eval_shape(lambda: sum_tree.init(2**14, fanout=fanout))
        assert len(tree.sums) == 2
        return jax.jit(sum_tree.find).lower(tree, jax.ShapeDtypeStruct((8,), jnp.float32)).as_text().count(" = ")

    assert operations(1024) < 1.5 * operations(128)


def test_the_check_sees_a_copy():
    """Storage inside lax.cond under vmap is copied: the trap that masks avoid."""
    buffer = jr.ReplayBuffer(capacity=ROWS // 8)
    state = abstract(buffer, ITEMS, 8)

    def add(state, flag, items):
        return lax.cond(flag, lambda s: buffer.add(s, items), lambda s: s, state)

    flags = jax.ShapeDtypeStruct((8,), jnp.bool_)
    program = compiled(jax.jit(jax.vmap(add, in_axes=(0, 0, None)), donate_argnums=0), state, flags, ITEMS)
    with pytest.raises(AssertionError):
        check(program, state)
