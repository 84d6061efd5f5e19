"""Naive NumPy twins of the package's modules, in float64 and with Python loops."""

import collections
import functools
import itertools
import math

import numpy as np


class TreeTwin:
    """Leaves in a flat array; every query scans all of them."""

    def __init__(self, capacity):
        self.leaves = np.zeros(capacity)

    def update(self, indices, values, mask=None):
        for row, (i, value) in enumerate(zip(indices, values, strict=True)):
            if 0 <= i < len(self.leaves) and (mask is None or mask[row]):
                self.leaves[i] = value

    @property
    def total(self):
        return self.leaves.sum()

    @property
    def minimum(self):
        return self.leaves[self.leaves > 0].min(initial=np.inf)

    def find(self, prefix):
        positive = np.flatnonzero(self.leaves > 0)
        above = positive[np.cumsum(self.leaves)[positive] > prefix]
        return int(above[0]) if len(above) else int(positive[-1])


def importance_weights(probabilities, size, beta, normalize="batch", min_probability=None):
    weights = (size * np.asarray(probabilities, np.float64)) ** -beta
    if normalize == "batch":
        return weights / weights.max()
    if normalize == "global":
        return weights / (size * min_probability) ** -beta
    return weights


def recent_law(size, half_life):
    """Probabilities of `Recent`, oldest first."""
    weights = np.exp2(-np.arange(size)[::-1] / half_life)
    return weights / weights.sum()


class Priorities:
    """Twin of `Prioritized`: leaves by handle."""

    def __init__(self, num_slots, alpha=0.6, epsilon=1e-6, floor=0.0, new_priority="ever"):
        self.num_slots, self.alpha, self.epsilon = num_slots, alpha, epsilon
        self.floor, self.new_priority, self.leaf = floor, new_priority, {}
        self.max_priority, self.updates, self.rejected = 1.0, 0, 0

    def insert(self, handles, td_errors, beside=(), leaves=()):
        """Insert `td_errors` by handle, NaN for unknown; with the known priorities and old leaves of all shards.

        `handles` are then stored.
        """
        priorities = {handle: self._priority(td_error) for handle, td_error in td_errors.items()}
        self.rejected += sum(bool(np.isinf(td_error)) for td_error in td_errors.values())
        known = [*(x for x in priorities.values() if x is not None), *beside]
        self.max_priority = max([self.max_priority, *known])
        new = self.to_leaf(self.max_priority)
        if self.new_priority == "stored":
            new = max([*self.leaf.values(), *leaves, *map(self.to_leaf, known)], default=0) or self.to_leaf(1.0)
        elif self.new_priority != "ever":
            new = self.to_leaf(self.new_priority)
        self.leaf |= {handle: new if x is None else self.to_leaf(x) for handle, x in priorities.items()}
        self.leaf = {handle: self.leaf[handle] for handle in handles}

    def known(self, td_errors):
        """Known priorities of new items, for other shards."""
        return [x for x in map(self._priority, td_errors.values()) if x is not None]

    def update(self, handles, td_errors):
        """Update priorities; the call does not count if no row names a stored item."""
        self.updates += any(handle in self.leaf for handle in handles)
        for handle, td_error in zip(handles, td_errors, strict=True):
            if handle not in self.leaf:
                continue
            if not np.isfinite(td_error):
                self.rejected += 1
            else:
                priority = self._priority(td_error)
                self.max_priority = max(self.max_priority, priority)
                self.leaf[handle] = self.to_leaf(priority)

    def _priority(self, td_error):
        """Priority before alpha; None if the TD error is not finite."""
        if not np.isfinite(td_error):
            return None
        return float(max(np.float32(abs(td_error)), np.float32(self.floor)) + np.float32(self.epsilon))

    def to_leaf(self, priority):
        largest = 2.0 ** (63 - (self.num_slots - 1).bit_length())
        return min(max(priority**self.alpha, 2.0**-63), largest) if priority > 0 or self.alpha == 0 else 0.0


class Uses:
    """Updates of each stored item, by handle, of which `most` spend it, and late ones."""

    def __init__(self, most=None):
        self.most, self.counts, self.late = most, {}, 0

    def insert(self, handles, new):
        self.counts = {handle: 0 if handle in new else self.counts[handle] for handle in handles}

    def update(self, handles):
        for handle in handles:
            if handle in self.counts:
                self.counts[handle] += 1
            else:
                self.late += handle is None or handle >= 0

    def is_spent(self, handle):
        return self.most is not None and self.counts[handle] >= self.most


def keep_newest(ring, items, mask=None, td_errors=None):
    """Store items in a `Ring`; returns TD errors by new handle."""
    new = {}
    for row, item in enumerate(items):
        if mask is not None and not mask[row]:
            continue
        ring.stored.append((ring.next_handle, item))
        new[ring.next_handle] = np.nan if td_errors is None else td_errors[row]
        ring.next_handle += 1
        if ring.period is not None:
            ring.next_handle %= ring.period
    ring.stored = ring.stored[-ring.num_slots :]
    return new


def keep_evenly(ring, items, draws, mask=None, td_errors=None):
    """Algorithm R of Vitter 1985, item by item; a slot taken twice in one call changes its handle once.

    `draws`: 64 random bits for each row, as an integer.
    """
    stored, rows = {handle % ring.num_slots: (handle, item) for handle, item in ring.stored}, {}
    for row in range(len(items)):
        if mask is not None and not mask[row]:
            continue
        ring.count = min(ring.count + 1, 2**64 - 1)
        filled = len(stored.keys() | rows.keys())
        slot = int(draws[row]) * ring.count >> 64
        if filled < ring.num_slots:
            slot = (ring.next_handle + filled) % ring.num_slots
        ring.taken_again += slot in rows
        if slot < ring.num_slots:
            rows[slot] = row
    new = {}
    for slot, row in rows.items():
        handle = (ring.last[slot] + ring.num_slots) % ring.period if slot in ring.last else slot
        stored[slot], ring.last[slot] = (handle, items[row]), handle
        new[handle] = np.nan if td_errors is None else td_errors[row]
    ring.stored = list(stored.values())
    return new


class Ring:
    """A list of (handle, item), newest last; `keep` stores items in it."""

    def __init__(self, num_slots, first=0, period=None, keep=keep_newest):
        self.num_slots, self.next_handle, self.period = num_slots, first, period
        self.stored, self.in_order, self.store = [], keep is keep_newest, functools.partial(keep, self)
        self.count, self.taken_again, self.last = 0, 0, {}  # of a reservoir; the last handle of each slot

    def clear(self):
        self.next_handle += 0 if self.in_order else len(self.stored)  # of a reservoir the slot of the first item
        self.stored, self.count = [], 0

    @property
    def handles(self):
        return [handle for handle, _ in self.stored]

    @property
    def is_full(self):
        return len(self.stored) == self.num_slots

    def slot(self, handle):
        return handle % self.num_slots

    def name(self, handle):
        """The buffer's name of a stored item, within its shard."""
        return handle

    def item(self, handle):
        return dict(self.stored)[handle]

    def items(self, handle):
        """All items drawn with a handle."""
        return [self.item(handle)]

    def age(self, handle):
        return len(self.stored) - 1 - self.handles.index(handle) if self.in_order else -1

    fading_age = age


class Shard:
    """A ring of items or of sequences, their priorities and their uses."""

    def __init__(self, ring, max_uses=None, **law):
        self.ring, self.uses, self.priorities = ring, Uses(max_uses), Priorities(ring.num_slots, **law)

    def insert(self, new, beside=(), leaves=()):
        """Insert TD errors by handle, of what the ring has just stored."""
        self.priorities.insert(self.ring.handles, new, beside, leaves)
        self.uses.insert(self.ring.handles, new)

    def update(self, handles, td_errors):
        self.uses.update(handles)
        self.priorities.update(handles, td_errors)
        self.priorities.leaf |= {handle: 0.0 for handle in self.uses.counts if self.uses.is_spent(handle)}

    def clear(self):
        """Forget all items; counters and handles go on."""
        self.ring.clear()
        self.priorities.leaf, self.uses.counts = {}, {}

    @property
    def handles(self):
        return self.ring.handles

    @property
    def unspent(self):
        return [handle for handle in self.handles if not self.uses.is_spent(handle)]

    def has(self, handle):
        return handle in self.uses.counts

    def by_slot(self, values):
        """Array by slot of `values` by handle."""
        found = np.zeros(self.ring.num_slots)
        for handle, value in values.items():
            found[self.ring.slot(handle)] = value
        return found

    def by_name(self):
        """Handles by name."""
        return {self.ring.name(handle): handle for handle in self.handles}

    def young(self, max_age=None):
        """Handles of age less than `max_age`, oldest first."""
        return [handle for handle in self.handles if max_age is None or self.ring.age(handle) < max_age]


def reservoir_law(capacity, num_items):
    """Probabilities of the final slots of algorithm R, by tuple of item numbers."""
    law = {(): 1.0}
    for item in range(num_items):
        after = collections.defaultdict(float)
        for slots, probability in law.items():
            if len(slots) < capacity:
                after[(*slots, item)] += probability
                continue
            for j in range(item + 1):
                after[(*slots[:j], item, *slots[j + 1 :]) if j < capacity else slots] += probability / (item + 1)
        law = after
    return law


class ShardedTwin:
    """Twins of shards; shard k takes part k of every batch, and its names start at k * period.

    A single shard is the buffer itself. Items of a shard are `age_step` insertions into the buffer apart.
    """

    def __init__(self, shards, period, sampler=None, age_step=1):
        self.shards, self.period, self.sampler, self.age_step = shards, period, sampler, age_step

    def add(self, *arguments, axis=0):
        """Add to all shards; the arguments of `store`, arrays or None, are split along an axis."""
        num_shards = len(self.shards)
        parts = [[None] * num_shards if x is None else np.split(x, num_shards, axis) for x in arguments]
        new = [twin.ring.store(*own) for twin, own in zip(self.shards, zip(*parts, strict=True), strict=True)]
        beside = [x for twin, its in zip(self.shards, new, strict=True) for x in twin.priorities.known(its)]
        leaves = [leaf for twin in self.shards for leaf in twin.priorities.leaf.values()]
        for twin, its in zip(self.shards, new, strict=True):
            twin.insert(its, beside, leaves)
        return new

    def clear(self):
        for twin in self.shards:
            twin.clear()

    def end_streams(self, closed):
        for twin, own in zip(self.shards, np.split(closed, len(self.shards)), strict=True):
            twin.ring.end_streams(own)

    def rows(self, names):
        """Twin of each row's shard, and the handle there: None if it is not stored there, -1 without a name."""
        by_name, share = [twin.by_name() for twin in self.shards], len(names) // len(self.shards)
        own = [(row // share, int(name)) for row, name in enumerate(names)]
        return [(self.shards[k], by_name[k].get(name - k * self.period) if name >= 0 else -1) for k, name in own]

    def update(self, names, td_errors):
        self.update_rows(self.rows(names), td_errors)

    def update_rows(self, rows, td_errors):
        """Update from rows (shard, handle), in any order."""
        priorities = [twin.priorities for twin in self.shards]
        updates = max(its.updates for its in priorities) + any(twin.has(handle) for twin, handle in rows)
        for twin in self.shards:
            own = [row for row, (shard, _) in enumerate(rows) if shard is twin]
            twin.update([rows[row][1] for row in own], td_errors[own])
        for its in priorities:
            its.max_priority, its.updates = max(other.max_priority for other in priorities), updates

    def names(self, shard, handles):
        return [shard * self.period + self.shards[shard].ring.name(handle) for handle in handles]

    @property
    def size(self):
        """Number of drawable items."""
        return sum(len(twin.unspent) for twin in self.shards)

    def masses(self, twin, handles):
        """What a shard's draws are in proportion to, if any is positive."""
        leaves = [twin.priorities.leaf[handle] if hasattr(self.sampler, "alpha") else 1.0 for handle in handles]
        if half_life := getattr(self.sampler, "half_life", None):
            ages = [twin.ring.fading_age(handle) * self.age_step for handle in handles]
            leaves = [leaf * 2.0 ** (-age / half_life) for leaf, age in zip(leaves, ages, strict=True)]
        return leaves

    def draw_law(self, max_age=None):
        """Probabilities of drawable handles in the whole batch, per shard."""
        laws = []
        for twin in self.shards:
            handles = twin.young(max_age and -(-max_age // self.age_step))
            handles = [handle for handle in handles if not twin.uses.is_spent(handle)]
            masses = self.masses(twin, handles)
            masses = masses if any(masses) else [1.0] * len(handles)
            laws.append({handle: x / sum(masses) / len(self.shards) for handle, x in zip(handles, masses, strict=True)})
        return laws

    def draw_weights(self, laws, drawn, batch_size, beta=None, normalize=...):
        """Weights of rows `drawn`, pairs of a shard's number and a handle, by `draw_law`."""
        sizes = [len(law) for law in laws]
        if hasattr(self.sampler, "replacement"):
            share = [
                batch_size / len(laws) if self.sampler.replacement else sum(k == d for k, _ in drawn)
                for d in range(len(laws))
            ]
            if len(laws) == 1:
                return np.ones(len(drawn))
            return np.array([sizes[k] * batch_size / (sum(sizes) * share[k]) for k, _ in drawn])
        if beta is None:
            beta = self.sampler.beta
            beta = float(beta(self.shards[0].priorities.updates)) if callable(beta) else beta
        least = min(p for law in laws for p in law.values() if p > 0)
        normalize = self.sampler.normalize if normalize is ... else normalize
        return importance_weights([laws[k][handle] for k, handle in drawn], sum(sizes), beta, normalize, least)


def migrate_items(shards, num_shards, capacity):
    """Deal lists of items, oldest first, from shards to `num_shards` shards of `capacity` items in all."""
    newest_first = []
    for age in range(max(len(shard) for shard in shards)):
        newest_first += [shard[-1 - age] for shard in reversed(shards) if age < len(shard)]
    new = [[] for _ in range(num_shards)]
    for rank, item in enumerate(newest_first[:capacity]):
        new[-1 - rank % num_shards].insert(0, item)
    return new


class SequenceTwin:
    """All steps ever added to each stream, and the starts of the sequences that can be drawn."""

    def __init__(self, length, num_envs, sequence_length, stride, windows="any", gaps=False, first=0, period=0):
        self.num_slots = ((length - sequence_length) // stride + 1) * num_envs
        self.first, self.period = first, period
        self.windows, self.every = windows, windows in ("any", "cut") and not gaps
        self.length, self.num_envs = length, num_envs
        self.sequence_length, self.stride = sequence_length, stride
        self.steps, self.ends, self.gaps, self.runs = [], [], [], []  # by time: rows [num_envs]
        self.run = np.zeros(num_envs, int)  # how often each stream was closed
        self.lost = 0  # number of first steps that are no longer stored, whatever the length
        self.ever = {}  # by handle: its number among all drawable sequences ever completed

    def store(self, steps, ends=None, td_errors=None, drawable=None):
        """Store steps; returns TD errors by handle that becomes drawable."""
        before, new = self.num_complete, {}
        ends = np.zeros(steps.shape[:2], bool) if ends is None else ends
        gaps = np.zeros_like(ends) if drawable is None else ~drawable
        self.steps += list(steps)
        self.ends += list(ends | gaps)
        self.gaps += list(gaps)
        self.runs += [self.run.copy() for _ in steps]
        for start in range(before, self.num_complete):
            for handle in range(start * self.num_envs, (start + 1) * self.num_envs):
                if not self.may_be_drawn(handle):
                    continue
                self.ever[handle] = len(self.ever)
                if self.is_stored(handle):
                    new[handle] = np.nan if td_errors is None else td_errors[start - before, handle % self.num_envs]
        return new

    def clear(self):
        self.first += len(self.ever)
        self.steps, self.ends, self.gaps, self.runs, self.lost, self.ever = [], [], [], [], 0, {}

    def end_streams(self, closed):
        """Close streams: no sequence has rows of two runs, and the next run starts an episode."""
        self.run[closed] += 1

    def may_be_drawn(self, handle):
        times, env = self.times(handle), handle % self.num_envs
        if len({self.runs[t][env] for t in times}) > 1:
            return False
        if not self.every and times[0] < len(self.steps) - self.length:
            return False  # overwritten by the steps that complete it
        if self.gaps[times[0]][env] or (self.windows != "episodes" and any(self.gaps[t][env] for t in times)):
            return False
        if self.windows == "episodes":
            before = times[0] - 1
            return times[0] == 0 or self.ends[before][env] or self.runs[before][env] < self.runs[times[0]][env]
        return self.windows in ("any", "cut") or not any(self.ends[t][env] for t in times[:-1])

    @property
    def num_complete(self):
        return max(0, len(self.steps) - self.sequence_length + self.stride) // self.stride

    def is_stored(self, handle):
        return self.times(handle)[0] >= max(self.lost, len(self.steps) - self.length)

    @property
    def handles(self):
        """Drawable handles: sequence number * num_envs + environment."""
        return [handle for handle in self.ever if self.is_stored(handle)]

    @property
    def is_full(self):
        return len(self.steps) - self.lost >= self.length

    def name(self, handle):
        number = self.first + self.ever[handle]
        return number % self.period if self.period else number

    def slot(self, handle):
        return self.name(handle) % self.num_slots

    def age(self, handle):
        return self.num_complete - 1 - handle // self.num_envs

    def fading_age(self, handle):
        """The age; by the drawable sequences of all streams if some are not drawable."""
        return self.age(handle) if self.every else (len(self.ever) - 1 - self.ever[handle]) / self.num_envs

    def times(self, handle):
        start = handle // self.num_envs * self.stride
        return range(start, start + self.sequence_length)

    def sequence(self, handle):
        return [self.steps[t][handle % self.num_envs] for t in self.times(handle)]

    def items(self, handle):
        """All items drawn with a handle."""
        return self.sequence(handle)

    def num_later(self, time, env):
        """Number of rows after `time` in the same episode."""
        count = 0
        while not self.ends[time + count][env] and time + count + 1 < len(self.steps):
            if self.gaps[time + count + 1][env] or self.runs[time + count + 1][env] > self.runs[time][env]:
                break
            count += 1
        return count

    def mask(self, handle):
        if self.windows == "any":
            return [True] * self.sequence_length
        ends, gaps = ([x[t][handle % self.num_envs] for t in self.times(handle)] for x in (self.ends, self.gaps))
        return [not any(ends[:i]) and not gaps[i] for i in range(self.sequence_length)]


def later_law(law, count, gamma):
    """Probabilities of 1 to `count` steps."""
    steps = np.arange(1, count + 1)
    mass = {"uniform": steps * 0.0 + 1, "geometric": np.float64(gamma) ** (steps - 1), "last": steps == count}[law]
    return mass / mass.sum()


def hindsight(rows, goals, relabelled, reward, terminated=None):
    """Relabel the sequences `relabelled`, leaves [B, L, ...], row by row."""
    rows = {name: np.array(x) for name, x in rows.items()}
    for sequence in np.flatnonzero(relabelled):
        goal = goals[sequence]
        for t in range(rows["reward"].shape[1] - 1):
            achieved = rows["achieved_goal"][sequence, t + 1]
            rows["reward"][sequence, t] = reward(achieved, goal)
            if terminated is not None:
                rows["terminated"][sequence, t] = terminated(achieved, goal)
        rows["desired_goal"][sequence] = goal
    return rows


def stack_frames(frames, ends, k):
    """Frame stacks of one sequence: frames [L, ...], ends [L]."""
    stacks = []
    for now in range(k - 1, len(frames)):
        stack = []
        for time in range(now - k + 1, now + 1):
            same_episode = not any(ends[time:now])
            stack.append(frames[time] if same_episode else np.zeros_like(frames[time]))
        stacks.append(np.stack(stack, axis=-1))
    return np.stack(stacks)


def n_step_window(steps, start, n, gamma, end):
    """Window (start, last step, Rn, In) that opens at `start` in one environment, from steps before `end`; or None.

    `steps` maps "r", "terminated", "truncated" and "mask" (True where there was a step) to sequences over time, and
    "discount" if each step has its own: then it multiplies what comes after it. Only the flags end a window.
    """
    if start < 0 or not steps["mask"][start]:
        return None
    Rn, discount, last = 0.0, 1.0, start
    for time in range(start, min(start + n, end)):
        if not steps["mask"][time]:
            break
        last = time
        Rn += discount * steps["r"][time]
        discount *= steps["discount"][time] if "discount" in steps else gamma
        if steps["terminated"][time] or steps["truncated"][time]:
            break
    return start, last, Rn, 0.0 if steps["terminated"][last] else discount


def n_step_emissions(steps, n, gamma, next_action):
    """Windows that each step of one environment emits, and windows that a flush emits; None for no window.

    `gamma` is a number, or one per step and one for the flush.
    """
    length, latency = len(steps["r"]), n - 1 + next_action
    gammas = np.broadcast_to(gamma, length + 1)

    def emit(start, now, gamma):
        window = n_step_window(steps, start, n, gamma, now + 1)
        return window if not next_action or _has_sarsa_target(window, steps, n, now) else None

    emitted = [emit(now - latency, now, gammas[now]) for now in range(length)]
    flushed = [emit(start, length - 1, gammas[-1]) for start in range(max(0, length - latency), length)]
    return emitted, flushed


def _has_sarsa_target(window, steps, n, now):
    if window is None:
        return False
    start, last, _, _ = window
    if steps["terminated"][last]:
        return True
    complete = last == start + n - 1 and not steps["truncated"][last]
    return complete and start + n <= now and steps["mask"][start + n]


class PoolsTwin:
    """A dict of lists: the tasks of each environment's pools in order of entry."""

    POOLS = ("normal", "easy", "hard")

    def __init__(self, tasks_per_env, easy=None, hard=None, caps=(0.5, 0.4), online_difficulty_filtering=False):
        self.thresholds, self.filtering = (easy, hard), online_difficulty_filtering
        self.pools, self.caps, first = [], [], 0
        for n in tasks_per_env:
            self.pools.append({"normal": list(range(first, first + n)), "easy": [], "hard": []})
            easy = math.floor(n * caps[0])
            self.caps.append({"easy": easy, "hard": max(0, min(math.floor(n * caps[1]), n - 1 - easy))})
            first += n
        self.reset_metrics()

    def reset_metrics(self):
        self.groups = [dict.fromkeys(self.POOLS, 0) for _ in self.pools]
        self.rollouts = [dict.fromkeys(self.POOLS, 0) for _ in self.pools]

    def classify(self, mean):
        easy, hard = self.thresholds
        if easy is not None and mean >= easy:
            return "easy"
        return "hard" if hard is not None and mean <= hard else "normal"

    def update(self, groups):
        """Process groups, pairs (task, rewards); returns True for groups that are kept."""
        return [self._update_group(task, rewards) for task, rewards in groups]

    def _update_group(self, task, rewards):
        env = next((e for e, pools in enumerate(self.pools) if any(task in pool for pool in pools.values())), None)
        if env is None or not rewards or not np.all(np.isfinite(rewards)):
            return False
        pools, mean = self.pools[env], sum(rewards) / len(rewards)
        label = self.classify(mean)
        old = next(name for name in self.POOLS if task in pools[name])
        if label != old == "normal":
            pools[old].remove(task)
            pools[label].append(task)
            self._bring_under_cap(env, label)
        self.groups[env][label] += 1
        dropped = {0.0: "hard", 1.0: "easy"}.get(mean) if self.filtering else None
        self.rollouts[env][dropped or "normal"] += len(rewards)
        return dropped is None

    def _bring_under_cap(self, env, label):
        pools = self.pools[env]
        while len(pools[label]) > self.caps[env][label]:
            pools["normal"].append(pools[label].pop(0))

    def bring_under_caps(self):
        for env in range(len(self.pools)):
            for label in ("easy", "hard"):
                self._bring_under_cap(env, label)

    def metrics(self, names):
        """Shares of the counts; a share of nothing is left out."""
        envs = range(len(self.pools))
        found = {}
        for prefix, chosen in [("", envs), *[(f"/{names[e]}", [e]) for e in envs]]:
            for name, counts in (("evicted_examples", self.groups), ("filtered_rollouts", self.rollouts)):
                total = sum(sum(counts[e].values()) for e in chosen)
                if total:
                    for label in ("easy", "hard"):
                        found[f"{name}{prefix}/{label}"] = sum(counts[e][label] for e in chosen) / total
            sizes = {label: sum(len(self.pools[e][label]) for e in chosen) for label in self.POOLS}
            total = sum(sizes.values())
            if total:
                found |= {f"pool{prefix}/{label}": size / total for label, size in sizes.items()}
        return found


def time_limit_values(n, gamma, limit, first_reward, first_differs, *, as_termination, one_gamma, reset_obs, no_end):
    """Fixed point of n-step TD, [2]: values of an ordinary step and of an episode's first step.

    A step pays 1; an episode's first step pays `first_reward` if `first_differs`. Episodes are cut after `limit` steps.
    The flags are mistakes; without them the result is the true value.
    """
    observation = [1 if first_differs and t % limit == 0 else 0 for t in range(3 * limit)]
    reward = [first_reward if first else 1.0 for first in observation]
    bootstrap, returns, count = np.zeros((2, 2)), np.zeros(2), np.zeros(2)
    for t in range(limit, 2 * limit):
        total, ended, m = 0.0, False, 0
        while m < n and not ended:
            total += gamma**m * reward[t + m]
            ended = (t + m) % limit == limit - 1 and not no_end
            m += 1
        factor = 0.0 if ended and as_termination else gamma if one_gamma else gamma**m
        s_next = 0 if ended and not reset_obs else observation[t + m]
        bootstrap[observation[t], s_next] += factor
        returns[observation[t]] += total
        count[observation[t]] += 1
    count = np.maximum(count, 1)
    return np.linalg.solve(np.eye(2) - bootstrap / count[:, None], returns / count)


def permutation(bits, size, places=None):
    """Entries of a swap-or-not permutation of 0..size-1, from the random words of its rounds (two uint32 [rounds])."""
    order = list(range(size) if places is None else places)
    for high, low in zip(*(words.tolist() for words in bits), strict=True):
        pivot = ((high << 32 | low) * size) >> 64
        for place, number in enumerate(order):
            partner = (pivot - number) % size
            mix = max(number, partner) ^ low
            for shift, factor in ((16, 0x21F0AAAD), (15, 0x735A2D97)):
                mix = (mix ^ mix >> shift) * factor % 2**32
            if mix >= 2**31:
                order[place] = partner
    return order


def swap_or_not_distance(size, rounds):
    """Total variation distance between swap-or-not with independent decisions and a uniform permutation."""
    orders = list(itertools.permutations(range(size)))
    number_of = {order: i for i, order in enumerate(orders)}

    def swapped(a, b):
        names = {a: b, b: a}
        return np.array([number_of[tuple(names.get(x, x) for x in order)] for order in orders])

    swaps = [[swapped(x, (k - x) % size) for x in range(size) if x < (k - x) % size] for k in range(size)]
    law = np.zeros(len(orders))
    law[0] = 1
    for _ in range(rounds):
        after = []
        for pairs in swaps:
            one = law
            for pair in pairs:
                one = (one + one[pair]) / 2
            after.append(one)
        law = np.mean(after, axis=0)
    return np.abs(law - 1 / len(orders)).sum() / 2


class Dataset:
    """Episodes laid end to end, converted step by step to rows and transitions."""

    def __init__(self, observations, actions, rewards, terminals, timeouts, next_observations):
        self.observations, self.actions, self.rewards = observations, actions, rewards
        self.terminals, self.timeouts, self.next_observations = terminals, timeouts, next_observations

    def rows(self):
        rows, episode = [], []
        for t in range(len(self.rewards)):
            episode.append(t)
            if self.is_last(t):
                rows += self._episode_rows(episode)
                episode = []
        return rows

    def is_last(self, t):
        return bool(self.terminals[t] or self.timeouts[t] or t == len(self.rewards) - 1)

    def has_next(self, t):
        """True if a transition may start at step `t`."""
        return self.next_observations is not None or not self.is_last(t) or bool(self.terminals[t])

    def transitions(self, n, gamma):
        """(observation, Rn, In, observation to bootstrap from), by step."""
        found = {}
        for start in filter(self.has_next, range(len(self.rewards))):
            Rn, m, t = 0.0, 0, start
            while True:
                Rn, m = Rn + gamma**m * self.rewards[t], m + 1
                if m == n or self.is_last(t) or not self.has_next(t + 1):
                    break
                t += 1
            found[start] = _at(self.observations, start), Rn, 0.0 if self.terminals[t] else gamma**m, self._following(t)
        return found

    def _following(self, t):
        if self.next_observations is not None:
            return _at(self.next_observations, t)
        return _at(self.observations, t if self.terminals[t] else t + 1)

    def _episode_rows(self, episode):
        steps = [t for t in episode if self.has_next(t)]
        if not steps:
            return []
        rows = []
        for t in steps:
            terminated = bool(self.terminals[t])
            rows.append(_row(_at(self.observations, t), self.actions[t], self.rewards[t], terminated, True))
            rows[-1]["truncated"] = t == steps[-1] and not terminated
        return [*rows, _row(self._following(steps[-1]), 0, 0, False, False)]


def _row(observation, action, reward, terminated, step):
    row = {"observation": observation, "action": action, "reward": reward, "terminated": terminated}
    return row | {"truncated": False, "step": step}


def _at(tree, t):
    return {name: x[t] for name, x in tree.items()}


def quantile(values, tenths):
    """The smallest value that `tenths` / 10 of the values do not exceed."""
    values = sorted(values)
    return float(values[-(-len(values) * tenths // 10) - 1]) if values else 0.0


def top_masses(law):
    """Shares of the mass that the top items have, interpolated, of the probabilities of all."""
    curve = np.append(0, np.cumsum(np.sort(law[law > 0])[::-1] / law.sum()))
    parts = {"top_1pct_mass": 0.01, "top_10pct_mass": 0.1}
    return {name: np.interp(part * (len(curve) - 1), np.arange(len(curve)), curve) for name, part in parts.items()}


def diagnostics(probabilities, ages, priorities, size, every):
    """Diagnostics estimated from draws, from the most probable down, at one in `every` draws."""
    probabilities = np.asarray(probabilities, np.float64)
    items = 1 / (len(probabilities) * size * probabilities)
    curve = {(items[probabilities >= p].sum(), np.mean(probabilities >= p)) for p in probabilities[::every]}
    x, y = zip(*sorted({(0.0, 0.0), *curve}), strict=True)
    found = {f"top_{int(100 * part)}pct_mass": np.interp(part, x, y) for part in (0.01, 0.1)}
    for what, values in (("age", ages), ("priority", priorities)):
        for tenths in (1, 5, 9):
            below = [x for x in values[::every] if x <= quantile(values, tenths)]
            found[f"draws/{what}_q{tenths}0"] = max(below)
    return found


def thorough_diagnostics(priorities, alpha):
    """Diagnostics from all priorities."""
    found = top_masses(np.asarray(priorities, np.float64) ** alpha)
    found["stored/priority_max"] = max(priorities)
    found["stored/priority_zero"] = float(np.mean(np.asarray(priorities) == 0))
    return found | {f"stored/priority_q{t}0": quantile(priorities, t) for t in (1, 5, 9)}


class TasksTwin:
    """Twin of `Tasks`: successes, trials and latest updates. The caller scores them."""

    def __init__(self, num_tasks, prior, decay):
        self.prior, self.decay = prior, decay
        self.successes, self.trials = np.zeros(num_tasks), np.zeros(num_tasks)
        self.last, self.updates, self.rejected = np.zeros(num_tasks, int), 0, 0

    def update(self, tasks, rewards, mask):
        kept, found = [], {}
        for task, row, exists in zip(tasks, rewards, mask, strict=True):
            row = row[exists]
            known = row.size > 0 and 0 <= task < self.trials.size and bool(np.all((row >= 0) & (row <= 1)))
            self.rejected += row.size > 0 and not known
            kept.append(known)
            if known:
                found.setdefault(int(task), []).extend(row)
        for task, row in found.items():
            self.successes[task] = self.decay * self.successes[task] + sum(row)
            self.trials[task] = self.decay * self.trials[task] + len(row)
            self.last[task] = self.updates
        self.updates += bool(found)
        return kept

    def counts(self, tasks):
        won, lost = self.prior
        return self.successes[tasks] + won, self.trials[tasks] + won + lost


def distinct_law(mass, n):
    """Probabilities of `n` different draws in order, each in proportion to the mass of those left; mass 0 last."""
    law = {(): 1.0}
    for _ in range(n):
        after = collections.defaultdict(float)
        for drawn, probability in law.items():
            left = {i: m for i, m in enumerate(mass) if i not in drawn}
            total = sum(left.values())
            for i, m in left.items():
                after[(*drawn, i)] += probability * (m / total if total > 0 else 1 / len(left))
        law = {drawn: probability for drawn, probability in after.items() if probability > 0}
    return law


class LevelsTwin:
    """Twin of `Levels` with integers as levels, in lists."""

    def __init__(self, capacity):
        self.capacity, self.count, self.rejected = capacity, 0, 0
        self.levels, self.scores, self.last = [], [], []

    def insert(self, levels, scores, mask):
        """The slot where each level is now, -1 for none."""
        counts, self.count = self.count + np.cumsum(mask), self.count + int(np.sum(mask))
        self.rejected += int(np.sum(mask & np.isnan(scores)))
        held = self.scores + [-np.inf] * (self.capacity - len(self.scores))
        best = sorted(np.flatnonzero(mask & (scores > -np.inf)), key=lambda row: -scores[row])
        lowest, places = np.argsort(held, kind="stable"), [-1] * len(levels)
        kept = [row for row, slot in zip(best, lowest, strict=False) if scores[row] > held[slot]]
        for row, slot in zip(sorted(kept), lowest, strict=False):
            places[row], new = slot, (int(levels[row]), float(scores[row]), counts[row])
            for part, x in zip((self.levels, self.scores, self.last), new, strict=True):
                part[slot : slot + 1] = [x]
        return places

    def update(self, slots, scores, mask):
        for slot, score, exists in zip(slots, scores, mask, strict=True):
            if exists and 0 <= slot < len(self.scores):
                if np.isnan(score):
                    self.rejected += 1
                else:
                    self.scores[slot] = float(score)

    def drew(self, slots):
        for slot in slots:
            self.count += 1
            self.last[slot] = self.count

    def law(self, prioritization, temperature, staleness):
        """Probabilities of the stored levels."""
        scores = np.array(self.scores, float)
        if prioritization == "rank":
            ranks = np.empty(scores.size)
            ranks[np.argsort(-scores, kind="stable")] = np.arange(1, scores.size + 1)
            h = 1 / ranks
        else:
            h = np.maximum(scores, 0)
        by_score, stale = h ** (1 / temperature), self.count - np.array(self.last, float)
        by_score, stale = (x if x.sum() > 0 else np.ones_like(x) for x in (by_score, stale))
        return (1 - staleness) * by_score / by_score.sum() + staleness * stale / stale.sum()
