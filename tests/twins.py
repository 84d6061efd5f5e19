"""Random operations on a buffer and its twin, compared after each step, for the tests of all buffers.

A step adds items, updates and sets some, and draws. Steps run jitted, eagerly, or under `jax.vmap` in several lanes,
each with its own twin.
"""

import collections
import contextlib
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import oracles
import seeds
from helpers import at, check_tree, items, leaves_of, numbers, over_devices, rejects

import jaxreplay as jr
from jaxreplay._common.random import random_bits

DRAWS, TOLD, SET, PASS = 8, 8, 4, 4  # rows of a draw, an update, a set and a batch of an epoch
BETA = 0.75
bits_of = jax.jit(random_bits, static_argnums=1)


def PER(alpha=0.6, **settings):
    return jr.Prioritized(**{"alpha": alpha, "beta": 0.7, "epsilon": 0.01, **settings})


SAMPLERS = {
    "uniform": jr.Uniform(),
    "distinct": jr.Uniform(replacement=False),
    "batch": PER(floor=0.2),
    "global": PER(normalize="global", stratified=False, epsilon=0.0),
    "plain": PER(1.0, normalize=None, max_priority="stored", beta=optax.linear_schedule(0.4, 1.0, 50)),
    "number": PER(0.0, max_priority=2.0, floor=0.5),
    "uniform, max_uses": jr.Uniform(),
    "distinct, max_uses": jr.Uniform(replacement=False),
    "max_uses": PER(normalize=None, epsilon=0.0),
    "global, max_uses": PER(1.0, normalize="global"),
    "recent": jr.Recent(half_life=2.5, beta=0.6),
    "fading": PER(half_life=3.0, epsilon=0.0),
    "fading global": PER(1.0, half_life=4.0, normalize="global", max_priority="stored", stratified=False),
    "fading, max_uses": PER(half_life=0.7, normalize=None),
    "floor": PER(1.0, max_priority=0.0, floor=1.0, epsilon=0.0, normalize="global"),
    "stored global": PER(normalize="global", max_priority="stored", epsilon=0.0, stratified=False),
    "stored global, max_uses": PER(normalize="global", max_priority="stored", epsilon=0.0),
}
COUNTING = {name: {"max_uses": 2} for name in SAMPLERS if name.endswith("max_uses")}
COUNTING |= {name: {"count_updates": True} for name in ("distinct", "batch")}


def choices(sampler):
    """The sampler of this name, and the uses that a buffer counts with it."""
    return {"sampler": SAMPLERS[sampler], **COUNTING.get(sampler, {})}


def stack(*trees):
    """Stack leaves along a new leading axis; keys too."""
    return jax.tree.map(lambda *x: (jnp if isinstance(x[0], jax.Array) else np).stack(x), *trees)


def unsharded(buffer):
    return getattr(buffer, "buffer", buffer)


def num_shards(buffer):
    return getattr(buffer, "num_shards", 1)


def over(buffer, count):
    """The buffer in `count` shards; itself for one."""
    return buffer if count == 1 else over_devices(buffer, count)


def twin_shards(buffer, reservoir=oracles.keep_evenly, **names):
    """Twins of the empty shards of a buffer."""
    whole, count = unsharded(buffer), num_shards(buffer)
    settings = {"alpha": "alpha", "epsilon": "epsilon", "floor": "floor", "max_priority": "new_priority"}
    law = {mine: getattr(whole.sampler, name) for name, mine in settings.items() if hasattr(whole.sampler, name)}
    if isinstance(whole, jr.SequenceBuffer):
        sizes = whole.length, whole.num_envs // count, whole.sequence_length, whole.stride, whole.windows, whole.gaps
        make = functools.partial(oracles.SequenceTwin, *sizes)
    else:
        keep = reservoir if isinstance(whole, jr.ReservoirBuffer) else oracles.keep_newest
        make = functools.partial(oracles.Ring, whole.capacity // count, keep=keep)
    return [oracles.Shard(make(**names), whole.max_uses, **law) for _ in range(count)]


def twin_of(buffer, state):
    """The twin of a buffer and its empty state, whose counters may be anywhere."""
    whole, period = unsharded(buffer), state.ring.period
    shards = twin_shards(buffer, first=int(np.asarray(state.ring.inserted).reshape(-1)[0]), period=period)
    if isinstance(whole, jr.ReservoirBuffer):
        for shard, handles in zip(shards, np.asarray(state.handles).reshape(len(shards), -1), strict=True):
            shard.ring.count = int(np.asarray(state.count).reshape(-1)[1])
            shard.ring.last = {slot: handle for slot, handle in enumerate(handles.tolist()) if handle >= 0}
    age_step = len(shards) if isinstance(whole, jr.ReplayBuffer) else 1
    return oracles.ShardedTwin(shards, period, whole.sampler, age_step)


def batches(sizes, keyed=False):
    """Turns of masked batches with TD errors, and of whole ones without; `keyed` for a reservoir."""

    def add(lane, number):
        (rows, told), rng, shards = sizes[number % len(sizes)], lane.rng, len(lane.twin.shards)
        ids = numbers(1 + lane.happened["rows added"], rows)
        mask = rng.random(rows) < rng.choice([0.0, 0.3, 0.8, 1.0]) if told else None
        errors = td_errors(rng, rows, nan=0.4) if told else None
        keys, draws = (), ()
        if keyed:
            key = jax.random.key(int(rng.integers(2**31)))
            own = [key] if shards == 1 else [jax.random.fold_in(key, k) for k in range(shards)]
            keys, draws = (key,), (np.concatenate([np.array(draws_of(one, rows // shards), object) for one in own]),)
        new = lane.twin.add(records(ids), *draws, mask, errors)
        lane.happened["rows added"] += rows
        lane.happened["rows stored"] += sum(map(len, new))
        lane.happened["rows masked"] += 0 if mask is None else int(np.sum(~mask))
        given = errors if told else []
        told_of = [x for its in new for x in its.values()] if keyed else given
        lane.happened["rows told of"] += int(np.sum(np.isfinite(told_of)))
        return (items(ids), *keys), {"mask": mask, "td_errors": errors}

    return add


def draws_of(key, size):
    """Random bits of an `add`, 64 per row, as Python integers."""
    upper, lower = (np.asarray(x).tolist() for x in bits_of(key, size))
    return [high << 32 | low for high, low in zip(upper, lower, strict=True)]


def td_errors(rng, shape, *, nan=0.15, extreme=0.0):
    """Random TD errors of either sign; some are 0, large or not finite."""
    values = rng.normal(size=shape) * rng.choice([0.1, 1.0, 5.0], shape)
    values = np.where(rng.random(shape) < 0.1, rng.choice([0.0, -0.0], shape), values)
    values = np.where(rng.random(shape) < extreme, rng.choice([1e30, 1e-30, 3e38, 1e-45], shape), values)
    return np.where(rng.random(shape) < nan, rng.choice([np.nan, np.inf, -np.inf], shape), values).astype(np.float32)


def records(ids):
    """Mutable items for a twin, numbered `ids` [...]."""
    found = np.empty(ids.shape, object)
    found.reshape(-1)[:] = [{"id": int(i), "x": float(i)} for i in ids.reshape(-1)]
    return found


def check_items(got, expected):
    """Compare `got` [B, ...] with lists of records; None for an item that is no longer stored."""
    shape = got["id"].shape
    for row, its in enumerate(expected):
        blank = [{"id": 0, "x": 0.0}] * int(np.prod(shape[1:]))
        its = blank if its is None else its
        np.testing.assert_array_equal(got["id"][row].reshape(-1), [record["id"] for record in its])
        x = np.array([record["x"] for record in its], np.float32)
        np.testing.assert_array_equal(got["x"][row].reshape(-1, 2), np.stack([x, -x], axis=1))


def key_data(rng):
    return np.asarray(jax.random.key_data(jax.random.key(int(rng.integers(2**31)))))


def about_to_wrap(state, *names):
    """An empty state of which these rings have their counters at the end."""
    rings = {name: getattr(state, name) for name in names}
    last = {name: jnp.full_like(x.inserted, x.period - 2 * x.capacity) for name, x in rings.items()}
    return state.replace(**{name: x.replace(inserted=last[name]) for name, x in rings.items()})


class Lane:
    """A twin, the names seen so far in its buffer, and counts of events."""

    def __init__(self, twin, rng):
        self.twin, self.rng, self.happened = twin, rng, collections.Counter()
        self.seen = [[] for _ in twin.shards]
        self.drawn = np.full(DRAWS, -1)

    def names(self, count, stored=0.5):
        """Random names for rows of a call: stored, just drawn, stale, none, impossible, of another shard, repeated."""
        share, twin, rng = count // len(self.twin.shards), self.twin, self.rng
        found = []
        for row in range(count):
            shard = row // share
            own = twin.names(shard, twin.shards[shard].handles)
            kind, start = rng.random(), stored
            if kind < start and own:
                found.append(rng.choice(own))
            elif kind < start + 0.1:
                found.append(self.drawn[row % len(self.drawn)])
            elif kind < start + 0.2 and self.seen[shard]:
                found.append(rng.choice(self.seen[shard]))
            elif kind < start + 0.3:
                found.append(rng.choice([-1, -(2**31), 2**31 - 1, (shard + 1) * twin.period - 1, 0, twin.period]))
            else:
                found.append(found[-1] if row % share else -1)
        return np.array(found).clip(-(2**31), 2**31 - 1).astype(np.int32)

    def close(self, buffer):
        """Arguments of what comes before an addition, by name."""
        return {}

    def remember(self):
        for shard, twin in enumerate(self.twin.shards):
            self.seen[shard] = (self.seen[shard] + self.twin.names(shard, twin.handles))[-60:]

    def count_update(self, names, errors):
        rows = self.twin.rows(names)
        stored = [(id(twin), handle) for twin, handle in rows if twin.has(handle)]
        self.happened["updates of stored items"] += len(set(stored))
        self.happened["of an item twice"] += len(stored) - len(set(stored))
        self.happened["updates of stale items"] += sum(handle is None for _, handle in rows)
        self.happened["rows without a name"] += sum(handle == -1 for _, handle in rows)
        refused = [twin.has(h) and not np.isfinite(x) for (twin, h), x in zip(rows, errors, strict=True)]
        self.happened["TD errors refused"] += sum(refused)
        self.happened["updates of nothing"] += not stored

    def tell(self, names, errors):
        self.count_update(names, errors)
        self.twin.update(names, errors)

    def update(self):
        names, errors = self.names(TOLD), td_errors(self.rng, TOLD)
        if self.happened["steps"] % 7 == 4:
            names[:] = -1
        self.tell(names, errors)
        return names, errors

    def set(self, length):
        """Set one leaf in some rows; `length` is that of sequences, None for items."""
        names, shape = self.names(SET), (SET,) if length is None else (SET, length)
        mask = self.rng.random(shape) < 0.7
        values = self.rng.integers(-1000, 1000, shape).astype(np.float32)
        self.write(names, values, mask)
        return names, {"id": None, "x": np.stack([values, -values], axis=-1)}, mask

    def write(self, names, values, mask):
        for row, (twin, handle) in enumerate(self.twin.rows(names)):
            if not twin.has(handle):
                self.happened["sets of nothing"] += 1
                continue
            records = twin.ring.items(handle)
            for record, value, flag in zip(records, np.ravel(values[row]), np.ravel(mask[row]), strict=True):
                record["x"] = float(value) if flag else record["x"]
                self.happened["rows set" if flag else "rows not set"] += 1

    # --- comparisons

    def check_draw(self, sample, max_age=None, beta=None, normalize=..., weights=True):
        """Check a draw: names, items, ages, masks, probabilities and weights, and the strata of its rows."""
        twin, batch_size = self.twin, len(sample.indices)
        laws, share = twin.draw_law(max_age), batch_size // len(twin.shards)
        nothing_left = [bool(shard.handles) and not shard.unspent for shard in twin.shards]
        self.happened["draws with nothing left in a shard"] += any(nothing_left)
        drawn, of_row = [], []
        for row, (name, (shard, handle)) in enumerate(zip(sample.indices, twin.rows(sample.indices), strict=True)):
            k = row // share
            exists = len(laws[k]) > 0
            if not getattr(twin.sampler, "replacement", True):
                exists = row % share < len(laws[k])
            assert (name >= 0) == exists, f"row {row} has the handle {name}, of shard {k} with {len(laws[k])} items"
            if not exists:
                assert (sample.probabilities[row], sample.weights[row], sample.age[row]) == (0, 0, -1)
                assert sample.mask is None or not sample.mask[row].any()
                self.happened["rows of no item"] += 1
                continue
            assert handle in laws[k], f"row {row} has the handle {name}, which is not drawable"
            assert laws[k][handle] > 0, f"row {row} has the handle {name}, of probability 0"
            assert sample.age[row] == shard.ring.age(handle) * twin.age_step
            if sample.mask is not None:
                np.testing.assert_array_equal(sample.mask[row], shard.ring.mask(handle))
                self.happened["steps masked out"] += int(np.sum(~sample.mask[row]))
            drawn.append((k, handle))
            of_row.append(row)
        check_items(at(sample.items, of_row), [twin.shards[k].ring.items(handle) for k, handle in drawn])
        probabilities = [laws[k][handle] for k, handle in drawn]
        np.testing.assert_allclose(sample.probabilities[of_row], probabilities, rtol=1e-5)
        if drawn and weights:
            expected = twin.draw_weights(laws, drawn, batch_size, beta, normalize)
            np.testing.assert_allclose(sample.weights[of_row], expected, rtol=2e-5)
            self.happened["different weights"] += len(set(np.float32(expected))) > 1
        for k, law in enumerate(laws):
            rows = [(row % share, handle) for row, (d, handle) in zip(of_row, drawn, strict=True) if d == k]
            if not getattr(twin.sampler, "replacement", True):
                assert len({handle for _, handle in rows}) == len(rows)
            stratified = getattr(twin.sampler, "stratified", False) and max_age is None
            if stratified and any(map(twin.shards[k].priorities.leaf.get, law)):
                behind = np.cumsum(twin.shards[k].by_slot(law)) * len(laws)
                for row, handle in rows:
                    end = behind[twin.shards[k].ring.slot(handle)]
                    assert row / share - 1e-5 <= end, f"row {row} is before its stratum"
                    assert (row + 1) / share + 1e-5 >= end - law[handle] * len(laws), f"row {row} is after its stratum"
            self.happened["draws with unequal priorities"] += len({round(np.log(p), 3) for p in law.values() if p}) > 1
            self.happened["draws of several items"] += len({handle for _, handle in rows}) > 1
        self.happened["young draws"] += max_age is not None and any(
            0 < len(law) < len(shard.handles) for law, shard in zip(laws, twin.shards, strict=True)
        )
        return drawn

    def check_pass(self, batches):
        """Check all batches of an epoch, and one after its end; leaves [K, B, ...]."""
        twin, found = self.twin, [[] for _ in self.twin.shards]
        share = batches.indices.shape[1] // len(twin.shards)
        for step in range(batches.indices.shape[0]):
            batch = at(batches, step)
            for row, (name, (shard, handle)) in enumerate(zip(batch.indices, twin.rows(batch.indices), strict=True)):
                k = row // share
                exists = step * share + row % share < len(shard.handles)
                if exists and shard.uses.most:
                    exists = name >= 0  # a spent item has no row
                assert (name >= 0) == exists
                assert batch.weights[row] == exists
                np.testing.assert_allclose(batch.probabilities[row], exists / max(1, len(shard.handles)), rtol=1e-6)
                if exists:
                    found[k].append(handle)
                    check_items(at(batch.items, [row]), [shard.ring.items(handle)])
        for shard, handles in zip(twin.shards, found, strict=True):
            assert sorted(handles) == sorted(shard.unspent)
        self.happened["items of whole passes"] += twin.size

    def check_sampler(self, shard, state):
        """Check a shard's counters and leaves."""
        if hasattr(state, "tree"):
            check_tree(state.tree)
            twin = shard.priorities
            np.testing.assert_allclose(leaves_of(state.tree), shard.by_slot(twin.leaf), rtol=5e-6)
            np.testing.assert_allclose(state.max_priority, twin.max_priority, rtol=1e-6)
            assert (state.updates, state.rejected) == (twin.updates, twin.rejected)

    def check_uses(self, shard, uses):
        if uses is None:
            return
        np.testing.assert_array_equal(uses.of_slots, shard.by_slot(shard.uses.counts))
        if shard.uses.most:
            check_tree(uses.unspent)
            unspent = shard.by_slot(dict.fromkeys(shard.unspent, 1.0))
            np.testing.assert_array_equal(leaves_of(uses.unspent), unspent)

    def check_late(self, uses):
        """Check the counts of late rows; of a mixture's source their sum: an item that is gone has no known shard."""
        found, expected = np.ravel(uses.late), [shard.uses.late for shard in self.twin.shards]
        if getattr(self.twin, "in_order", True):
            np.testing.assert_array_equal(found, expected)
        assert sum(found) == sum(expected)

    def check_state(self, buffer, state):
        if state.uses is not None:
            self.check_late(state.uses)
        for k, shard in enumerate(self.twin.shards):
            own = at(state, k) if isinstance(buffer, jr.Sharded) else state
            self.check_sampler(shard, own.sampler)
            self.check_uses(shard, own.uses)
            self.check_shard(buffer, own, shard)

    def check_shard(self, buffer, state, shard):
        assert state.ring.size == len(shard.handles)

    def check_look_ups(self, seen, names, rows):
        """Check slots, ages, priorities and handles of the items with these `names`."""
        alpha = getattr(self.twin.sampler, "alpha", 0)
        for row, (shard, handle) in enumerate(rows):
            if not shard.has(handle):
                assert (seen["slots"][row], seen["age"][row], seen["priorities"][row]) == (shard.ring.num_slots, -1, 0)
                assert seen["handles"][row] == -1
                continue
            self.happened["items looked up"] += 1
            assert seen["slots"][row] == shard.ring.slot(handle)
            assert seen["handles"][row] == names[row]
            assert seen["age"][row] == shard.ring.age(handle) * self.twin.age_step
            is_spent = shard.uses.is_spent(handle)
            leaf = shard.priorities.leaf[handle] if hasattr(self.twin.sampler, "alpha") else float(not is_spent)
            self.happened["spent items looked up"] += is_spent
            priority = leaf ** (1 / alpha) if alpha > 0 else float(leaf > 0)
            np.testing.assert_allclose(seen["priorities"][row], priority, rtol=1e-4)

    def check_sizes(self, seen, counts):
        """Check sizes, whether so many rows can be drawn, and the newest items."""
        twin = self.twin
        assert (seen["size"], seen["is_empty"]) == (twin.size, twin.size == 0)
        assert seen["is_full"] == all(shard.ring.is_full for shard in twin.shards)
        for can_sample, count in zip(seen["can_sample"], counts, strict=False):  # those that the buffer can hold
            assert can_sample == (twin.size >= count)
        if "newest" in seen:
            own = len(seen["newest"]) // len(twin.shards)
            for k, part in enumerate(np.split(seen["newest"], len(twin.shards))):
                assert part.tolist() == ([-1] * own + twin.names(k, twin.shards[k].handles))[-own:]

    def check_seen(self, seen, given):
        """Check the values read from the buffer after a step."""
        self.check_sizes(seen, COUNTS)
        rows = [(shard, handle) for shard, handle in self.twin.rows(given["read"])]
        check_items(seen["read"], [shard.ring.items(h) if shard.has(h) else None for shard, h in rows])
        self.check_look_ups(seen, given["read"], rows)
        self.check_draw(seen["sample"])
        self.drawn = np.asarray(seen["sample"].indices)
        if "young" in seen:
            self.check_draw(seen["young"], given["max_age"], BETA)


COUNTS = (0, 1, 2, 5)


def counts_of(buffer):
    """The COUNTS that the buffer can hold; `can_sample` refuses others."""
    return [count for count in COUNTS if count <= buffer.num_slots * num_shards(buffer)]


def rows_of(buffer):
    """DRAWS, or as many as can be drawn if each is drawn once."""
    return min(DRAWS, unsharded(buffer).num_slots) if unsharded(buffer).sampler.is_distinct else DRAWS


def change(buffer, state, given):
    items, named = given["add"]
    if "closed" in given:
        state = buffer.end_streams(state, mask=given["closed"])
    state = buffer.add(state, *items, **named)
    state = buffer.update(state, *given["update"])
    indices, values, mask = given["set"]
    return buffer.set(state, indices, values, mask=mask)


def look_up(buffer, state, names):
    """What the state tells of itself, and of the items of these names."""
    seen = {name: getattr(buffer, name)(state) for name in ("size", "is_empty", "is_full")}
    seen |= {name: getattr(buffer, name)(state, names) for name in ("slots", "age", "priorities")}
    return seen | {"read": buffer.get(state, names)}


def look(buffer, state, given):
    first, second = jax.random.split(given["key"])
    seen = look_up(buffer, state, given["read"])
    seen["handles"] = buffer.handles(state, seen["slots"])
    seen["can_sample"] = jnp.stack([buffer.can_sample(state, count) for count in counts_of(buffer)])
    seen["sample"] = buffer.sample(state, first, rows_of(buffer))
    if hasattr(unsharded(buffer), "stored_steps"):
        seen["stored_steps"] = buffer.stored_steps(state)
    if getattr(unsharded(buffer), "hindsight", False):
        seen |= {law: buffer.later(state, first, given["read"], law=law) for law in ("last", "uniform")}
    if not isinstance(unsharded(buffer), jr.ReservoirBuffer):  # which keeps no order
        seen["newest"] = buffer.newest(state, buffer.num_slots * num_shards(buffer))
        seen["young"] = buffer.sample(state, second, rows_of(buffer), beta=BETA, max_age=given["max_age"])
    return seen


def whole_pass(buffer, num_batches, state, key):
    return jax.lax.map(lambda step: buffer.epoch(state, key, PASS, step=step), jnp.arange(num_batches))


def in_turn(buffer, num_batches, state, key):
    return stack(*[buffer.epoch(state, key, PASS, step=step) for step in range(num_batches)])


@contextlib.contextmanager
def strict():
    """Settings that some users have: what JAX would broadcast or promote by itself is an error."""
    with jax.numpy_rank_promotion("raise"), jax.numpy_dtype_promotion("strict"):
        yield


class Run:
    """Runs steps of one configuration under strict settings; `mode` is "jit", "eager" or "vmap".

    Attributes:
      buffer, state: the buffer, and an empty state.
      add: add(lane, step number) -> the arguments of the buffer's `add` after the state, by position and by name; it
        also adds them to the twin.
    """

    def __init__(self, buffer, state, add, *names, mode="jit", seed=seeds.SEED, lane=Lane):
        self.buffer, self.add, self.mode, self.names, self.seed = buffer, add, mode, names, seed
        num_lanes = 2 if mode == "vmap" else 1
        self.lanes = [lane(twin_of(buffer, state), seeds.rng(*map(str, names), k, seed=seed)) for k in range(num_lanes)]
        self.state = jax.tree.map(lambda x: jnp.stack([x] * num_lanes), state) if mode == "vmap" else state
        capacity = max(shard.ring.num_slots for shard in self.lanes[0].twin.shards)
        assert buffer.num_slots == capacity
        num_batches = -(-capacity // (PASS // num_shards(buffer))) + 1
        wrap = {"jit": jax.jit, "vmap": lambda f: jax.jit(jax.vmap(f)), "eager": lambda f: f}[mode]
        self.change = wrap(functools.partial(change, buffer))
        self.clear = wrap(buffer.clear)
        self.look = wrap(functools.partial(look, buffer))
        self.whole_pass = wrap(functools.partial(whole_pass if mode != "eager" else in_turn, buffer, num_batches))

    def given(self, lane, number):
        length = getattr(unsharded(self.buffer), "sequence_length", None)
        full = all(shard.ring.is_full for shard in lane.twin.shards)
        given = lane.close(self.buffer)
        given["add"] = self.add(lane, number)
        lane.happened["steps"] += 1
        lane.happened["on a full buffer"] += full
        lane.remember()
        given["update"] = lane.update()
        given["set"] = lane.set(length)
        read, oldest = lane.names(DRAWS, 0.4), max([1, *map(lane_oldest, lane.twin.shards)]) * lane.twin.age_step
        return given, {"read": read, "max_age": np.int32(lane.rng.integers(1, 2 + oldest)), "key": key_data(lane.rng)}

    @strict()
    def step(self, number):
        if number % 60 == 5:
            off = np.any(np.asarray(self.state.ring.inserted) % self.state.ring.capacity)
            self.state = self.clear(self.state)
            for lane in self.lanes:
                lane.twin.clear()
                lane.happened["clears off slot 0"] += bool(off)
        given, looked = zip(*(self.given(lane, number) for lane in self.lanes), strict=True)
        stacked = (stack(*x) if self.mode == "vmap" else x[0] for x in (given, looked))
        given, asked = stacked
        asked = asked | {"key": jax.random.wrap_key_data(asked["key"])}
        self.state = self.change(self.state, given)
        state, lanes = jax.device_get(self.state), self.lanes
        of_lane = (lambda tree, k: at(tree, k)) if self.mode == "vmap" else (lambda tree, k: tree)
        for k, lane in enumerate(lanes):
            lane.check_state(self.buffer, of_lane(state, k))
        if self.mode == "eager" and not any(shard.handles for shard in lanes[0].twin.shards):
            rejects("cannot sample", self.look, self.state, asked)
            return
        seen = jax.device_get(self.look(self.state, asked))
        for k, lane in enumerate(lanes):
            lane.check_seen(of_lane(seen, k), looked[k])
        if number % 4 == 3:
            batches = jax.device_get(self.whole_pass(self.state, asked["key"]))
            for k, lane in enumerate(lanes):
                lane.check_pass(of_lane(batches, k))

    def run(self, num_steps):
        """Run steps; returns the counts of events in the first lane, by name."""
        for number in range(num_steps):
            try:
                self.step(number)
            except BaseException as error:
                error.add_note(f"step {number} of {self.names} ({self.mode}), JAXREPLAY_SEED={self.seed}")
                raise
        return self.lanes[0].happened


def lane_oldest(shard):
    return max((shard.ring.age(handle) for handle in shard.handles), default=0)


LEAST = {
    "updates of stored items": 200,
    "updates of stale items": 40,
    "of an item twice": 10,
    "rows without a name": 60,
    "updates of nothing": 5,
    "rows set": 80,
    "rows not set": 25,
    "sets of nothing": 30,
    "rows masked": 60,
    "on a full buffer": 70,
    "young draws": 40,
    "items of whole passes": 100,
    "items looked up": 200,
    "draws of several items": 80,
}
LEAST_PRIORITIZED = LEAST | {
    "TD errors refused": 30,
    "draws with unequal priorities": 80,
    "different weights": 80,
    "rows told of": 60,
}


def least(sampler):
    if "max_uses" in COUNTING.get(sampler, {}):
        fewer = {"items of whole passes": 30, "draws of several items": 20}
        return LEAST | fewer | {"spent items looked up": 10}
    if not isinstance(SAMPLERS[sampler], jr.Prioritized):
        return LEAST
    equal = {"draws with unequal priorities": 0, "different weights": 0}
    return LEAST_PRIORITIZED | (equal if SAMPLERS[sampler].alpha == 0 else {})
