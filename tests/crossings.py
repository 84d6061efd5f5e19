"""Configurations of options that meet, and a twin that knows rows by their handles alone, for `test_crossings`.

A configuration is a function of its number. Each pair of options is on together in `TIMES` configurations, or is in
`IMPOSSIBLE`. The twin numbers items in its own way. It learns the buffer's names of them from what is added, and no
handle may ever name another item.
"""

import collections
import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import oracles
import seeds
import test_sequence_twin as sequence
import twins
from helpers import at, items, over_devices, stack, types
from jax.sharding import AxisType

import jaxreplay as jr

TIMES, NUMBER = 20, 115
ROWS, BATCH = 4, 16  # of an addition (to each of as many streams), and of a draw, at most
STEPS = 8  # of a segment

# Options of one buffer, and of a whole program; a plain ReplayBuffer that is jitted has none.
OF_SAMPLER = ("distinct", "prioritized", "recent")
OF_BUFFER = (
    *("sequence", "reservoir", *OF_SAMPLER, "windows", "gaps", "hindsight", "max_uses", "count_updates"),
    *("sharded", "explicit", "devices", "migrate"),
)
OF_PROGRAM = ("mixture", "joint", "tracer", "eager", "scan", "vmap", "max_age", "clear", "restore")
OPTIONS = (*OF_BUFFER, *OF_PROGRAM)

TRACER = jr.NStep(n=2, gamma=0.9, num_envs=ROWS)


def _step(observations):
    """A step of environments, of zeros but for the observations."""
    floats, flags = np.zeros(ROWS, np.float32), np.zeros(ROWS, bool)
    return observations, floats, floats, flags, flags, observations


# Pairs that no program can have; the tests of buffers, wrappers and checkpoints have their errors.
IMPOSSIBLE = {
    frozenset(("recent", "max_uses")),
    *(frozenset(("tracer", name)) for name in ("sequence", "windows", "gaps", "hindsight")),
    *(frozenset(("reservoir", name)) for name in ("sequence", "windows", "gaps", "hindsight", "recent", "max_age")),
    *(frozenset(("reservoir", name)) for name in ("devices", "migrate")),
}
NEEDS = {"windows": "sequence", "gaps": "sequence", "hindsight": "sequence", "explicit": "sharded", "joint": "mixture"}


@dataclasses.dataclass(frozen=True)
class Configuration:
    """Options of each source, and of the program."""

    sources: tuple[frozenset, ...]
    program: frozenset

    @functools.cached_property
    def pairs(self):
        """Pairs of options that are on together: in one buffer, or one of each sampler in two."""
        found = set()
        for options in self.sources:
            found.update(map(frozenset, itertools.combinations(sorted(options | self.program), 2)))
        samplers = [options & {*OF_SAMPLER} for options in self.sources]
        found.update(frozenset(pair) for pair in itertools.product(*map(sorted, samplers)) if len({*pair}) == 2)
        return frozenset(found)

    @property
    def cost(self):
        """About how long it takes to compile."""
        moves = bool({"devices", "migrate"} & frozenset.union(*self.sources))
        programs = 1 + (moves or {"eager", "scan"} <= self.program) + 0.5 * ("eager" in self.program)
        sources = sum(1 + 0.6 * ("sharded" in options) for options in self.sources)
        return programs * sources * (1 + 0.3 * ("vmap" in self.program))


def _fits(name, options):
    own_sampler = name in OF_SAMPLER and options & {*OF_SAMPLER}
    return not own_sampler and not any(frozenset((name, other)) in IMPOSSIBLE for other in options)


def _drawn(rng):
    """Random options that go together."""
    program = {str(name) for name in OF_PROGRAM if rng.random() < 0.55}
    program |= {"mixture"} if "joint" in program else set()
    of_sequences = "tracer" not in program and rng.random() < 0.6
    sources = []
    for _ in range(1 + ("mixture" in program)):
        options = {"sequence"} if of_sequences else set()
        for name in map(str, rng.permutation([x for x in OF_BUFFER if x != "sequence"])):
            # In a mixture `max_age` is for all sources.
            if (NEEDS.get(name) == "sequence" and not of_sequences) or (name == "reservoir" and of_sequences):
                continue
            if rng.random() < 0.6 and _fits(name, options | program):
                options |= {name, NEEDS.get(name, name)}
        sources.append(options)
    if any("devices" in options for options in sources):  # all shards of a mixture are on the same ones
        for options in sources:
            options ^= options & {"sharded", "explicit"} if "reservoir" in options else set()
            options |= set() if "reservoir" in options else {"devices", "sharded"}
    return Configuration(tuple(map(frozenset, sources)), frozenset(program))


@functools.cache
def configurations():
    """Each is of 50 random ones that with the most pairs, for its cost, that were together less than `TIMES`."""
    found, times = [], collections.Counter()
    for number in range(NUMBER):
        rng = seeds.rng("configurations", number, seed=0)
        drawn = [_drawn(rng) for _ in range(50)]
        best = max(drawn, key=lambda x: sum(max(0, TIMES - times[pair]) ** 2 for pair in x.pairs) / x.cost)
        times.update(best.pairs)
        found.append(best)
    return found, times


# --- what is run


def _sampler(options, rng, normalize):
    if "recent" in options:
        return jr.Recent(half_life=2.5, beta=0.6, normalize=normalize if normalize != "global" else "batch")
    if "prioritized" not in options:
        return jr.Uniform(replacement="distinct" not in options)
    chosen = {
        "alpha": (0.6, 1.0, 0.0),
        "stratified": (True, False),
        "max_priority": ("ever", "stored", 2.0),
        "floor": (0.0, 0.3),
        "epsilon": (0.0, 0.01),
        "half_life": (None,) if "reservoir" in options else (2.5, None),
    }
    chosen = {name: values[rng.integers(len(values))] for name, values in chosen.items()}
    return twins.PER(**chosen, normalize=normalize)


def _buffer(options, rng, normalize):
    named = {"sampler": _sampler(options, rng, normalize), "count_updates": "count_updates" in options}
    named |= {"max_uses": 2 if "max_uses" in options else None, "donate": bool(rng.integers(2))}
    if "sequence" not in options:
        kind = jr.ReservoirBuffer if "reservoir" in options else jr.ReplayBuffer
        return kind(capacity=int(rng.choice([8, 12])), **named)
    windows = str(rng.choice(["cut", "inside", "episodes"])) if "windows" in options else "any"
    stride = 1 if windows == "episodes" else int(rng.integers(1, 3))
    named |= {"windows": windows, "stride": stride, "gaps": "gaps" in options, "hindsight": "hindsight" in options}
    return jr.SequenceBuffer(length=int(rng.integers(5, 9)), num_envs=ROWS, sequence_length=3, **named)


@dataclasses.dataclass(frozen=True)
class Plan:
    """What is run until the next event."""

    sources: tuple[jr.ReplayBuffer | jr.Sharded, ...]
    mixture: jr.Mixture | None
    tracer: jr.NStep | None
    order: tuple[str, ...]  # of the operations of a step
    max_age: bool
    num_steps: int = 1  # T of a rollout

    @property
    def buffer(self):
        return self.mixture or self.sources[0]

    @property
    def wholes(self):
        return [twins.unsharded(source) for source in self.sources]

    @functools.cached_property
    def batch(self):
        """Rows of a draw: fewer than BATCH where a source draws each item once and has fewer."""

        def fits(batch):
            both = zip(self.sources, self.wholes, strict=True)
            most = [x.num_slots if whole.sampler.is_distinct else BATCH for x, whole in both]
            shards = map(twins.num_shards, self.sources)
            return all(
                n > 0 and n % d == 0 and n // d <= x for n, d, x in zip(self.counts(batch), shards, most, strict=True)
            )

        return max(filter(fits, range(1, BATCH + 1)))

    def counts(self, num_rows):
        """Rows of each source in a draw."""
        return self.mixture.counts(num_rows) if self.mixture else (num_rows,)

    def method_of(self, name, k):
        """A method of source k, which takes and returns the whole state."""
        method = getattr(self.buffer, name)
        return (lambda state, *x, **named: method(state, k, *x, **named)) if self.mixture else method

    @property
    def config(self):
        """What is saved, beside the states."""
        return {"replay": self.buffer, "tracers": [self.tracer] * len(self.sources)}

    def init(self):
        shape = (1, ROWS) if isinstance(self.wholes[0], jr.SequenceBuffer) else ROWS
        rows, tracers = items(np.zeros(shape)), []
        if self.tracer is not None:
            tracers = [self.tracer.init(*_step(rows)) for _ in self.sources]
            rows = self.tracer.spec(*_step(rows))
        has_counter = jr.buffers.ReplayState, jr.buffers.SequenceState  # each slot of a reservoir has one
        states = self.each(self.buffer.init(rows))
        states = [twins.about_to_wrap(x, "ring") if isinstance(x, has_counter) else x for x in states]
        return {"replay": self.whole(states), "tracers": tracers}

    def each(self, states):
        """The states of the sources."""
        return states if self.mixture else (states,)

    def whole(self, states):
        return tuple(states) if self.mixture else states[0]


def first_plan(config, rng):
    """The plan of a configuration, and a function that makes the next one for an event."""
    rules = ("batch", None) if "joint" in config.program else ("batch", None, "global")
    normalize = rules[rng.integers(len(rules))]
    wholes = [_buffer(options, rng, normalize) for options in config.sources]
    counts = [int(x) for x in rng.permutation([2, 4])]  # of shards, before and after `devices`

    def made(wholes, count, plan):
        sources = tuple(
            over_devices(
                whole,
                count if "sharded" in options else 0,
                AxisType.Explicit if "explicit" in options else AxisType.Auto,
            )
            for whole, options in zip(wholes, config.sources, strict=True)
        )
        weights = "joint" if "joint" in config.program else "own"
        mixture = jr.Mixture(buffers=sources, shares=shares, weights=weights) if "mixture" in config.program else None
        return dataclasses.replace(plan, sources=sources, mixture=mixture)

    used, shares = frozenset().union(*config.sources), (0.62, 0.38, 0.5)
    if "sharded" in used:  # shards get equal numbers of rows, and three quarters of 16 may be above all slots
        choices = ((1, 1), (3, 1)) if len(wholes) < 3 else ((1, 1, 2), (2, 1, 1))
        shares = choices[rng.integers(2) if "distinct" not in used else 0]
    shares = shares[: len(wholes)]
    tracer = TRACER if "tracer" in config.program else None
    order = [str(x) for x in rng.permutation(["add", "update", "draw"])]
    order.insert(rng.integers(order.index("add") + 1), "set")  # an addition may replace everything
    plan = Plan((), None, tracer, tuple(order), "max_age" in config.program, int(rng.integers(2, 5)))
    plan = made(wholes, counts[0], plan)

    def after(plan, event):
        wholes, count = plan.wholes, max(twins.num_shards(source) for source in plan.sources)
        if event == "devices":
            remaining = [x for x in (0, 1, 2, 4) if x != count]
            return made(wholes, int(rng.choice(remaining)), plan)
        changed = []
        for whole, options in zip(wholes, config.sources, strict=True):
            if "migrate" in options:
                name, sizes = ("length", range(5, 10)) if "sequence" in options else ("capacity", (4, 8, 16))
                size = int(rng.choice(sizes))
                whole = dataclasses.replace(whole, **{name: size}, sampler=_sampler(options, rng, normalize))
            changed.append(whole)
        return made(changed, count, plan)

    return plan, after


def every(plan, state):
    """Names and items in all slots of each source."""
    found = []
    for k, source in enumerate(plan.sources):
        slots = np.tile(np.arange(source.num_slots), twins.num_shards(source))
        names = plan.method_of("handles", k)(state, slots)
        found.append((names, plan.buffer.get(state, names)))
    return found


def draw(plan, state, given):
    """A sample; None where an eager call says that the buffer is empty."""
    named = {"max_age": given["max_age"], "beta": twins.BETA} if plan.max_age else {}
    try:
        return plan.buffer.sample(state, jax.random.wrap_key_data(given["key"]), plan.batch, **named)
    except ValueError as error:
        if "cannot sample" not in str(error):
            raise
        return None


def step(plan, carry, given):
    """All operations in the order of the plan, and what is read after them."""
    state, tracers, seen = carry["replay"], list(carry["tracers"]), {}
    for operation in plan.order:
        if operation == "add":
            seen["valid"] = []
            for k, arguments in enumerate(given["add"]):
                if "closed" in arguments:
                    state = plan.method_of("end_streams", k)(state, mask=arguments["closed"])
                rows, key = arguments.get("rows"), arguments.get("key")
                if plan.tracer is not None:
                    tracers[k], rows, valid = plan.tracer.add(tracers[k], *arguments["step"])
                    seen["valid"].append(valid)
                keys = () if key is None else (jax.random.wrap_key_data(key),)
                state = plan.method_of("add", k)(state, rows, *keys, **arguments["named"])
            seen["every"] = every(plan, state)
        elif operation == "update":
            state = plan.buffer.update(state, *given["update"])
        elif operation == "set":
            names, values, mask = given["set"]
            values = {"id": None, "x": values}
            if plan.tracer is not None:
                empty = dict.fromkeys(("A", "logP", "Rn", "In", "S_next"))
                values = jr.TransitionBatch(S=values, **empty)
            state = plan.buffer.set(state, names, values, mask=mask)
        else:
            seen["sample"] = draw(plan, state, given)
            if seen["sample"] is not None:
                state = plan.buffer.update(state, seen["sample"].indices, given["td_errors"])
    seen["look"] = look(plan, state, given)
    return {"replay": state, "tracers": tracers}, seen


def look(plan, state, given):
    buffer, names = plan.buffer, given["read"]
    seen = twins.look_up(buffer, state, names) | {"can_sample": buffer.can_sample(state, 3)[None]}
    whole = plan.wholes[0]
    if plan.mixture is None and not isinstance(whole, jr.ReservoirBuffer):
        seen["newest"] = buffer.newest(state, whole.num_slots)
    if all(getattr(whole, "hindsight", False) for whole in plan.wholes):
        key = jax.random.wrap_key_data(given["key"])
        seen |= {law: buffer.later(state, key, names, law=law) for law in ("last", "uniform")}
    return seen


# --- the twin


def keep_seen(ring, items, seen, mask=None, td_errors=None):
    """Keep those that a reservoir keeps: of the items ever added any, as many as there is room for.

    `seen`: numbers of the items that are stored after the addition, -1 for none.
    """
    rows = {item["id"]: row for row, item in enumerate(items) if mask is None or mask[row]}
    ring.count += len(rows)
    seen = {int(number) for number in seen if number >= 0}
    old = {item["id"]: (handle, item) for handle, item in ring.stored}
    assert len(seen) == min(ring.num_slots, ring.count), "stored as many as there is room for"
    assert seen <= old.keys() | rows.keys(), "stored something that was never added, or was replaced"
    assert len(old.keys() & seen) == len(old) or len(seen) == ring.num_slots, "replaced while there was room"
    kept = [entry for number, entry in old.items() if number in seen]
    ring.stored, new = kept, sorted(rows[number] for number in seen & rows.keys())
    return oracles.keep_newest(ring, [items[row] for row in new], None, None if td_errors is None else td_errors[new])


class Source(oracles.ShardedTwin):
    """Twins of shards, and the names that the buffer was seen to give their items."""

    def __init__(self, source, in_order):
        whole = twins.unsharded(source)
        step = twins.num_shards(source) if isinstance(whole, jr.ReplayBuffer) else 1
        super().__init__(twins.twin_shards(source, keep_seen), 2**30 // twins.num_shards(source), whole.sampler, step)
        self.source, self.in_order = source, in_order
        self.named, self.item_of, self.slots = {}, {}, {}
        for k, shard in enumerate(self.shards):
            shard.ring.slot = functools.partial(lambda k, handle: self.slots[k, handle], k)

    def names(self, shard, handles):
        return [self.named[shard, handle] for handle in handles]

    def find(self, name):
        """Shard number and handle of what is stored under this name; None if it is no more, or never was."""
        k, handle = self.item_of.get(int(name), (None, None))
        return (k, handle) if k is not None and self.shards[k].has(handle) else None

    def rows(self, names):
        share, found = len(names) // len(self.shards), []
        for row, name in enumerate(names):
            k, item = row // share if self.in_order else 0, self.find(name)
            k = k if self.in_order or item is None else item[0]
            handle = item[1] if item is not None and item[0] == k else None
            found.append((self.shards[k], -1 if name < 0 else handle))
        return found

    def clear(self):
        super().clear()
        self.named, self.item_of = {}, dict.fromkeys(self.item_of, (0, None))  # none of these names comes back

    def learn(self, names, numbers):
        """Check that these items [D * slots] are those stored, under the names that they have had before."""
        share = len(names) // len(self.shards)
        for k, shard in enumerate(self.shards):
            left = {shard.ring.items(handle)[0]["id"]: handle for handle in shard.handles}
            for slot in range(share):
                name, number = int(names[k * share + slot]), int(numbers[k * share + slot])
                if name < 0:
                    continue
                assert number in left, f"{name} of shard {k} names item {number}, which is not stored there"
                item = k, left.pop(number)
                assert self.named.setdefault(item, name) == name, f"item {number} has another name than before"
                assert self.item_of.setdefault(name, item) == item, f"{name} named another item before {number}"
                self.slots[item] = slot
            assert not left, f"items {sorted(left)} of shard {k} have no name"

    def moved(self, source):
        """The twin after a migration to another buffer of the same kind, or to another number of shards."""
        new, old_sampler = Source(source, self.in_order), self.sampler
        pairs = _moved_sequences if isinstance(twins.unsharded(source), jr.SequenceBuffer) else _moved_items
        rings = ([shard.ring for shard in source.shards] for source in (self, new))
        pairs = [*pairs(*rings, twins.unsharded(source))]
        was, is_ = (isinstance(x, jr.Prioritized) for x in (old_sampler, new.sampler))
        priorities = [shard.priorities for shard in self.shards]
        for shard in new.shards if was and is_ else []:
            shard.priorities.max_priority = max(each.max_priority for each in priorities)
            shard.priorities.updates = max(each.updates for each in priorities)
            shard.priorities.rejected = sum(each.rejected for each in priorities) if shard is new.shards[0] else 0
        new.shards[0].uses.late = sum(old.uses.late for old in self.shards)
        for (k, before), (to, after) in pairs:
            old, moved, uses = priorities[k], new.shards[to].priorities, new.shards[to].uses
            leaf = moved.to_leaf(moved.max_priority)
            if was and is_ and old.alpha > 0 and not self.shards[k].uses.is_spent(before):
                leaf = old.leaf[before]
                leaf = leaf if old.alpha == moved.alpha else moved.to_leaf(leaf ** (1 / old.alpha))
            uses.counts[after] = self.shards[k].uses.counts[before]
            moved.leaf[after] = 0.0 if uses.is_spent(after) else leaf
        return new


def _moved_items(old, new, whole):
    every = [[(k, handle) for handle in shard.handles] for k, shard in enumerate(old)]
    for k, dealt in enumerate(oracles.migrate_items(every, len(new), whole.capacity)):
        for before in dealt:
            yield before, (k, new[k].next_handle)
            new[k].stored.append((new[k].next_handle, old[before[0]].item(before[1])))
            new[k].next_handle += 1


def _moved_sequences(old, new, whole):
    of_old, of_new = old[0].num_envs, new[0].num_envs
    total = len(old[0].steps)
    for name in ("steps", "ends", "gaps", "runs"):
        rows = [np.concatenate([getattr(shard, name)[t] for shard in old]) for t in range(total)]
        for k, shard in enumerate(new):
            setattr(shard, name, [row[k * of_new : (k + 1) * of_new] for row in rows])
    run, lost = np.concatenate([shard.run for shard in old]), max(old[0].lost, total - min(old[0].length, whole.length))
    for k, shard in enumerate(new):
        shard.run, shard.lost = run[k * of_new : (k + 1) * of_new].copy(), lost
    every = [(h // of_old, k * of_old + h % of_old, (k, h)) for k, shard in enumerate(old) for h in shard.handles]
    for start, env, before in sorted(every):
        k, handle = env // of_new, start * of_new + env % of_new
        if new[k].is_stored(handle):
            new[k].ever[handle] = len(new[k].ever)
            yield before, (k, handle)


class Tracer:
    """Twin of `NStep`: all steps of each environment."""

    def __init__(self, n, gamma):
        self.n, self.gamma, self.steps = n, gamma, []

    def add(self, step):
        """Records of the transitions that are emitted, and a mask of those that are."""
        self.steps.append(step)
        now, found, valid = len(self.steps) - 1, [], []
        for env in range(ROWS):
            stream = {name: [step[name][env] for step in self.steps] for name in ("r", "terminated", "truncated")}
            stream["mask"] = [True] * (now + 1)
            window = oracles.n_step_window(stream, now - self.n + 1, self.n, self.gamma, now + 1)
            valid.append(window is not None)
            start, last, Rn, In = window or (0, 0, 0.0, 0.0)
            number, after = (int(self.steps[time]["s"]["id"][env]) for time in (start, last))
            found.append({"id": number, "x": float(number), "Rn": Rn, "In": In, "next": after + FAR})
        records = np.empty(ROWS, object)
        records[:] = found
        return records, np.array(valid)


FAR = 10**6  # from the number of an observation to that of the next one


class Twin:
    """The sources, the share of each, and their tracers."""

    def __init__(self, plan):
        self.sources = [Source(source, plan.mixture is None) for source in plan.sources]
        self.shares, self.age_step = plan.mixture.shares if plan.mixture else (1.0,), 1
        self.tracers = [Tracer(plan.tracer.n, plan.tracer.gamma) for _ in plan.sources] if plan.tracer else []

    @property
    def shards(self):
        return [shard for source in self.sources for shard in source.shards]

    def names(self, shard, handles):
        """Of a buffer that is no mixture."""
        return self.sources[0].names(shard, handles)

    def rows(self, names):
        """Twin of each row's shard, and the handle there: None if it is not stored there, -1 without a name."""
        if len(self.sources) == 1:
            return self.sources[0].rows(names)
        found = []
        for name in map(int, names):
            holders = [source.shards[item[0]] for source in self.sources if (item := source.find(name)) is not None]
            handle = [item[1] for source in self.sources if (item := source.find(name)) is not None]
            assert len(holders) < 2, f"{name} names items of two sources"
            other = self.sources[name % len(self.sources)].shards[0]
            found.append((holders[0], handle[0]) if holders else (other, None if name >= 0 else -1))
        return found

    def of_source(self, k, rows):
        """Numbers of the rows whose items are of source k."""
        return [row for row, (twin, _) in enumerate(rows) if twin in self.sources[k].shards]

    def update(self, names, td_errors):
        rows = self.rows(names)
        for k, source in enumerate(self.sources):
            own = self.of_source(k, rows)
            source.update_rows([rows[row] for row in own], td_errors[own])

    def clear(self):
        for source in self.sources:
            source.clear()

    @property
    def size(self):
        return sum(source.size for source in self.sources)


class Lane(twins.Lane):
    """One twin of all, its operations, and a `twins.Lane` for each source."""

    def __init__(self, plan, rng):
        super().__init__(Twin(plan), rng)
        self.number = 0
        self.enter(plan)

    def enter(self, plan):
        """Go on with a plan, and with the sources of `self.twin`."""
        self.plan, twin = plan, self.twin
        kinds = [sequence.Lane if isinstance(whole, jr.SequenceBuffer) else twins.Lane for whole in plan.wholes]
        self.parts = [kind(source, self.rng) for kind, source in zip(kinds, twin.sources, strict=True)]
        for lane in self.parts:
            lane.happened = self.happened

    def names(self, count, stored=0.5):
        found = [lane.names(count, stored) for lane in self.parts]
        return np.choose(self.rng.integers(len(found), size=count), found)

    # --- operations

    def given(self):
        """Arguments of a step."""
        for lane in self.parts:
            lane.remember()
        rng, whole = self.rng, self.plan.wholes[0]
        length = (3,) if isinstance(whole, jr.SequenceBuffer) else ()
        values = rng.integers(-1000, 1000, (twins.SET, *length)).astype(np.float32)
        oldest = max(map(twins.lane_oldest, self.twin.shards)) * max(source.age_step for source in self.twin.sources)
        return {
            "add": [self.given_rows(k) for k in range(len(self.parts))],
            "update": (self.names(twins.TOLD), twins.td_errors(rng, twins.TOLD)),
            "set": (self.names(twins.SET), np.stack([values, -values], axis=-1), rng.random(values.shape) < 0.7),
            "td_errors": twins.td_errors(rng, self.plan.batch),
            "read": self.names(twins.DRAWS, 0.4),
            "max_age": np.int32(rng.integers(1, 2 + max(1, oldest))),
            "key": twins.key_data(rng),
        }

    def numbers(self, *shape):
        first, self.number = self.number + 1, self.number + int(np.prod(shape))
        return np.arange(first, self.number + 1, dtype=np.int32).reshape(shape)

    def given_rows(self, k):
        """Arguments of the addition to source k."""
        rng, whole = self.rng, self.plan.wholes[k]
        if isinstance(whole, jr.SequenceBuffer):
            numbers = self.numbers(self.plan.num_steps, ROWS)
            named = {"td_errors": twins.td_errors(rng, (whole.completed(len(numbers)), ROWS), nan=0.4)}
            if whole.windows != "any" or whole.hindsight:
                named["ends"] = rng.random(numbers.shape) < rng.choice([0.0, 0.1, 0.3])
            if whole.gaps:
                named["drawable"] = rng.random(numbers.shape) < 0.9
            named["mask"] = np.array(rng.random() < 0.9)
            closes = whole.gaps or whole.windows in ("inside", "episodes")
            return {"rows": items(numbers), "named": named} | ({"closed": rng.random(ROWS) < 0.1} if closes else {})
        numbers, mask = self.numbers(ROWS), rng.random(ROWS) < rng.choice([0.0, 0.6, 1.0, 1.0])
        found = {"named": {"mask": mask, "td_errors": twins.td_errors(rng, ROWS, nan=0.4)}}
        if isinstance(whole, jr.ReservoirBuffer):
            found["key"] = twins.key_data(rng)
        if self.plan.tracer is None:
            return found | {"rows": items(numbers)}
        flags = [rng.random(ROWS) < 0.2 for _ in range(2)]
        floats = [x.astype(np.float32) for x in (numbers, rng.normal(size=ROWS))]
        return found | {"step": (items(numbers), *floats, *flags, items(numbers + FAR))}

    def follow(self, given, seen):
        """Do all operations of a step, and check what was seen."""
        self.happened["steps"] += 1
        self.happened["on a full buffer"] += any(shard.ring.is_full for shard in self.twin.shards)
        for operation in self.plan.order:
            getattr(self, operation)(given, seen)
        self.check_look(given, seen["look"], seen["every"])

    def add(self, given, seen):
        for k, (source, arguments) in enumerate(zip(self.twin.sources, given["add"], strict=True)):
            named = arguments["named"]
            names, found = seen["every"][k]
            numbers = _observed(found)["id"].reshape(len(names), -1)[:, 0]
            if "closed" in arguments:
                source.end_streams(arguments["closed"])
                self.happened["streams closed"] += int(np.sum(arguments["closed"]))
            if isinstance(self.plan.wholes[k], jr.SequenceBuffer):
                if not named["mask"]:
                    self.happened["rollouts masked"] += 1
                    continue
                rows, ends = twins.records(arguments["rows"]["id"]), named.get("ends")
                new = source.add(rows, ends, named["td_errors"], named.get("drawable"), axis=1)
            else:
                if self.plan.tracer is None:
                    rows, mask = twins.records(arguments["rows"]["id"]), named["mask"]
                else:
                    fields = dict(zip(("s", "a", "r", "terminated", "truncated"), arguments["step"], strict=False))
                    rows, valid = self.twin.tracers[k].add(fields)
                    np.testing.assert_array_equal(seen["valid"][k], valid)
                    mask = named["mask"] & valid
                kept = (np.where(names >= 0, numbers, -1),) if not source.shards[0].ring.in_order else ()
                new = source.add(rows, *kept, mask, named["td_errors"])
            self.happened["items added"] += sum(map(len, new))
            self.happened["rows told of"] += sum(bool(np.isfinite(x)) for part in new for x in part.values())
        self.check_every(seen["every"])

    def update(self, given, seen):
        self.tell(*given["update"])

    def set(self, given, seen):
        names, values, mask = given["set"]
        self.write(names, values[..., 0], mask)

    def draw(self, given, seen):
        sample, joint = seen["sample"], self.plan.mixture is not None and self.plan.mixture.weights == "joint"
        if sample is None:
            assert not any(shard.handles for shard in self.twin.shards)
            return
        max_age, beta = (int(given["max_age"]), twins.BETA) if self.plan.max_age else (None, None)
        self.check_records(sample.items, sample.indices)
        if isinstance(sample.items, jr.TransitionBatch):
            np.testing.assert_array_equal(sample.items.idx, sample.indices)
            np.testing.assert_allclose(sample.items.W, sample.weights, rtol=1e-6)
        sample = sample.replace(items=_observed(sample.items))
        expected, stops = np.zeros(self.plan.batch), np.cumsum(self.plan.counts(self.plan.batch))
        rows_of_each = np.split(np.arange(self.plan.batch), stops[:-1])
        for lane, share, rows in zip(self.parts, self.twin.shares, rows_of_each, strict=True):
            source, own = lane.twin, at(sample, rows)
            in_order, source.in_order = source.in_order, True
            drawn = lane.check_draw(own, max_age, beta, weights=not joint)
            source.in_order, lane.drawn = in_order, own.indices
            self.happened["items drawn"] += len(drawn)
            if drawn and joint:
                weights = source.draw_weights(source.draw_law(max_age), drawn, len(own.indices), beta, None)
                number = len(drawn) if len(source.shards) == 1 else len(own.indices)  # shards correct for empty rows
                expected[rows[own.indices >= 0]] = share * self.plan.batch / number * weights
        if joint:
            normalize = {getattr(source.sampler, "normalize", None) for source in self.twin.sources} & {"batch"}
            expected /= expected.max() if normalize and expected.max() > 0 else 1
            np.testing.assert_allclose(sample.weights, expected, rtol=2e-5)
        self.tell(sample.indices, given["td_errors"])

    # --- comparisons

    def check_records(self, found, names):
        """Check what is stored of transitions, beside their observations."""
        if not isinstance(found, jr.TransitionBatch):
            return
        for row, name in enumerate(names):
            holders = [(source, item) for source in self.twin.sources if (item := source.find(name)) is not None]
            if holders:
                ((source, (k, handle)),) = holders
                record = source.shards[k].ring.item(handle)
                assert (found.A[row], found.S_next["id"][row]) == (record["id"], record["next"])
                np.testing.assert_allclose([found.Rn[row], found.In[row]], [record["Rn"], record["In"]], rtol=1e-5)
                self.happened["transitions compared"] += 1

    def check_every(self, found):
        """Check the names and items in all slots."""
        for source, (names, stored_items) in zip(self.twin.sources, found, strict=True):
            self.check_records(stored_items, names)
            stored_items = _observed(stored_items)
            source.learn(names, stored_items["id"].reshape(len(names), -1)[:, 0])
            stored = [source.find(name) if name >= 0 else None for name in names]
            twins.check_items(
                stored_items,
                [None if place is None else source.shards[place[0]].ring.items(place[1]) for place in stored],
            )

    def check_look(self, given, seen, every):
        twin, names = self.twin, given["read"]
        self.check_sizes(seen, [3])
        rows = twin.rows(names)
        items = [shard.ring.items(handle) if shard.has(handle) else None for shard, handle in rows]
        twins.check_items(_observed(seen["read"]), items)
        for k, (lane, source) in enumerate(zip(self.parts, twin.sources, strict=True)):
            own_rows = twin.of_source(k, rows)
            own = {name: seen[name][own_rows] for name in ("slots", "age", "priorities")}
            shards = [source.shards.index(rows[row][0]) for row in own_rows]
            number = source.shards[0].ring.num_slots
            in_slots = np.pad(every[k][0].reshape(len(source.shards), number), ((0, 0), (0, 1)), constant_values=-1)
            own["handles"] = in_slots[shards, own["slots"]]
            lane.check_look_ups(own, names[own_rows], [rows[row] for row in own_rows])
        for law in {"last", "uniform"} & seen.keys():
            sequence.Lane.check_later(self, names, *seen[law], last=law == "last")

    def check_diagnostics(self, found):
        for k, source in enumerate(self.twin.sources):
            numbers = {name.removeprefix(f"{k}/"): x for name, x in found.items() if name.startswith(f"{k}/")}
            numbers = numbers or found
            stored = sum(len(shard.handles) for shard in source.shards)
            assert numbers["size"] == source.size
            if "late" in numbers:
                assert numbers["late"] == sum(shard.uses.late for shard in source.shards)
                counts = [count for shard in source.shards for count in shard.uses.counts.values()]
                np.testing.assert_allclose(numbers["never_updated"], np.mean(np.array(counts) == 0) if counts else 0)
                np.testing.assert_allclose(numbers["updates_per_item"], np.mean(counts) if counts else 0, rtol=1e-6)
            if "spent" in numbers:
                assert numbers["spent"] == stored - source.size
            if "rejected" not in numbers:
                continue
            priorities = [shard.priorities for shard in source.shards]
            assert numbers["rejected"] == sum(each.rejected for each in priorities)
            assert numbers["updates"] == max(each.updates for each in priorities)
            leaves = [leaf for each in priorities for leaf in each.leaf.values()]
            masses = [sum(source.masses(shard, shard.priorities.leaf)) for shard in source.shards]
            np.testing.assert_allclose(numbers["total_priority"], sum(masses), rtol=2e-5)
            largest = max(each.max_priority for each in priorities)
            if source.sampler.max_priority == "stored":
                top = max(leaves, default=0)
                largest = top ** (1 / source.sampler.alpha) if top > 0 and source.sampler.alpha > 0 else 1.0
            np.testing.assert_allclose(numbers["max_priority"], largest, rtol=1e-5)


def _observed(found):
    return found.S if isinstance(found, jr.TransitionBatch) else found


class Run:
    """Runs a configuration, with its details and operations from a seed; `name` tells it from others.

    A segment has `steps` steps.
    """

    def __init__(self, config, name, seed=seeds.SEED, steps=STEPS):
        self.name, self.seed, self.config, self.steps = name, seed, config, steps
        self.rng = seeds.rng("crossings", name, seed=seed)
        self.plan, self.after = first_plan(self.config, self.rng)
        self.vmap, self.eager = ("vmap" in self.config.program), "eager" in self.config.program
        self.lanes = [Lane(self.plan, seeds.rng("lane", name, k, seed=seed)) for k in range(1 + self.vmap)]
        self.carry = self.joined([self.plan.init() for _ in self.lanes])
        self.programs = {}

    def joined(self, carries):
        return jax.tree.map(lambda *x: jnp.stack(x), *carries) if self.vmap else carries[0]

    def parts(self):
        return [jax.tree.map(lambda x, k=k: x[k] if self.vmap else x, self.carry) for k in range(len(self.lanes))]

    def wrapped(self, function, mode):
        function = jax.vmap(function) if self.vmap else function
        if mode == "scan":
            return jax.jit(lambda carry, given: jax.lax.scan(function, carry, given))
        return function if self.eager else jax.jit(function)

    def program(self, mode):
        key = self.plan, mode
        if key not in self.programs:
            self.programs[key] = self.wrapped(functools.partial(step, self.plan), mode)
        return self.programs[key]

    @twins.strict()
    def segment(self, mode):
        """Some steps, one by one or in two scans."""
        length = self.steps // 2 if mode == "scan" else 1
        for _ in range(self.steps // length):
            given = [[lane.given() for _ in range(length)] for lane in self.lanes]
            of_steps = [stack(*x) if self.vmap else x[0] for x in zip(*given, strict=True)]
            arguments = stack(*of_steps) if mode == "scan" else of_steps[0]
            self.carry, seen = self.program(mode)(self.carry, arguments)
            seen = jax.device_get(seen)
            for time in range(len(of_steps)):
                now = at(seen, time) if mode == "scan" else seen
                for k, lane in enumerate(self.lanes):
                    lane.follow(given[k][time], at(now, k) if self.vmap else now)

    def event(self, name, folder):
        getattr(self, name)(folder)
        for lane, carry in zip(self.lanes, self.parts(), strict=True):
            lane.happened[name] += 1
            lane.check_every(jax.device_get(jax.jit(every, static_argnums=0)(self.plan, carry["replay"])))
            states = self.plan.each(jax.device_get(carry["replay"]))
            for part, source, state in zip(lane.parts, self.plan.sources, states, strict=True):
                part.check_state(source, state)

    def clear(self, folder):
        clear = self.wrapped(self.plan.buffer.clear, "")
        self.carry = self.carry | {"replay": clear(self.carry["replay"])}
        for lane in self.lanes:
            lane.twin.clear()

    def restore(self, folder):
        config, state = {"lanes": [self.plan.config]}, {"lanes": self.parts()}
        before = jax.device_get(state)
        jr.save(folder, config, state)
        state = jr.restore(folder, config, state)
        jax.tree.map(np.testing.assert_array_equal, before, jax.device_get(state))
        self.carry = self.joined(state["lanes"])

    def devices(self, folder):
        old, new = self.plan, self.after(self.plan, "devices")
        jr.save(folder, {"run": old.config}, {"lanes": self.parts()})
        like = {"lanes": [new.init() for _ in self.lanes]}
        found = jr.restore(folder, {"run": new.config}, like)["lanes"]
        self.enter(new, found)

    def migrate(self, folder):
        old, new, found = self.plan, self.after(self.plan, "migrate"), []
        before, carries = jax.device_get(self.carry), self.parts()
        for carry in carries:
            sources = zip(old.sources, old.each(carry["replay"]), new.sources, strict=True)
            states = [state if own == to else jr.migrate(own, state, to) for own, state, to in sources]
            found.append(carry | {"replay": new.whole(states)})
        jax.tree.map(np.testing.assert_array_equal, before, jax.device_get(self.joined(carries)))
        self.enter(new, found)

    def enter(self, plan, carries):
        for lane in self.lanes:
            sources = zip(lane.twin.sources, self.plan.sources, plan.sources, strict=True)
            lane.twin.sources = [twin if old == new else twin.moved(new) for twin, old, new in sources]
            lane.enter(plan)
        assert all(types(carry) == types(plan.init()) for carry in carries)
        self.plan, self.carry = plan, self.joined(carries)

    def run(self, folder):
        """Run segments with events between them; returns how often things happened.

        A program takes seconds to compile: one of each mode, and one before and one after the state moves.
        """
        rng, modes = self.rng, [*({"eager", "scan"} & self.config.program)] or ["jit"]
        modes = [str(mode) for mode in rng.permutation(modes)]
        events = [str(x) for x in rng.permutation(sorted({"clear", "restore"} & self.config.program))]
        moves = [
            str(x) for x in rng.permutation(sorted({"devices", "migrate"} & frozenset.union(*self.config.sources)))
        ]
        first = int(rng.integers(len(events) + 1))
        try:
            self.segment(modes[0])
            for event in (*events[:first], *moves):
                self.event(event, folder)
                if event not in moves:
                    self.segment(modes[0])
            if moves or len(modes) > 1:
                self.segment(modes[-1])
            for event in events[first:]:
                self.event(event, folder)
                self.segment(modes[-1])
            carry = self.parts()[0]
            found = jr.diagnostics(self.plan.buffer, carry["replay"], thorough=True)
            self.lanes[0].check_diagnostics(jax.device_get(found))
        except BaseException as error:
            error.add_note(f"configuration {self.name}: {self.config}; JAXREPLAY_SEED={self.seed}\n{self.plan}")
            raise
        return self.lanes[0].happened
