"""Naive numpy twins: each does what a module of the package does, the plain way, in float64 and with Python loops."""

import numpy as np


class TreeTwin:
    """Leaves in a flat array; every query looks at all of them."""

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


class ReplayTwin:
    """A list of (handle, item), newest last, and a dict of priorities."""

    def __init__(self, capacity, alpha=0.6, epsilon=1e-6, first_handle=0, period=None):
        self.capacity, self.alpha, self.epsilon = capacity, alpha, epsilon
        self.next_handle, self.period = first_handle, period
        self.stored = []
        self.leaf = {}
        self.max_priority, self.updates, self.rejected = 1.0, 0, 0

    def add(self, items, mask=None):
        for row, item in enumerate(items):
            if mask is not None and not mask[row]:
                continue
            self.stored.append((self.next_handle, item))
            self.leaf[self.next_handle] = self.max_priority**self.alpha
            self.next_handle += 1
            if self.period is not None:
                self.next_handle %= self.period
            if len(self.stored) > self.capacity:
                old, _ = self.stored.pop(0)
                del self.leaf[old]

    def update(self, handles, td_errors):
        self.updates += 1
        for handle, td_error in zip(handles, td_errors, strict=True):
            if handle not in self.leaf:
                continue
            if not np.isfinite(td_error):
                self.rejected += 1
                continue
            priority = float(np.float32(np.float32(abs(td_error)) + np.float32(self.epsilon)))
            self.max_priority = max(self.max_priority, priority)
            self.leaf[handle] = priority**self.alpha

    @property
    def handles(self):
        return [handle for handle, _ in self.stored]

    def item(self, handle):
        return dict(self.stored)[handle]

    def leaves_by_slot(self):
        leaves = np.zeros(self.capacity)
        for handle, leaf in self.leaf.items():
            leaves[handle % self.capacity] = leaf
        return leaves

    def probability(self, handle):
        total = sum(self.leaf.values())
        return self.leaf[handle] / total if total > 0 else 1 / len(self.stored)

    @property
    def min_probability(self):
        positive = [leaf for leaf in self.leaf.values() if leaf > 0]
        return min(positive) / sum(positive) if positive else 1 / len(self.stored)


def n_step_windows(r, terminated, truncated, n, gamma, end=None):
    """For one environment: (start, last step, Rn, In) of every window, cut at time `end`."""
    end = len(r) if end is None else end
    windows = []
    for start in range(end):
        Rn, discount = 0.0, 1.0
        for last in range(start, min(start + n, end)):
            Rn += discount * r[last]
            discount *= gamma
            if terminated[last] or truncated[last]:
                break
        windows.append((start, last, Rn, 0.0 if terminated[last] else discount))
    return windows


def n_step_emissions(r, terminated, truncated, n, gamma, next_action):
    """For one environment: what each step emits, then what a flush emits, as windows or None."""
    length, latency = len(r), n - 1 + next_action
    emitted = []
    for now in range(length):
        start = now - latency
        window = n_step_windows(r, terminated, truncated, n, gamma, now + 1)[start] if start >= 0 else None
        emitted.append(_with_next_action(window, terminated, truncated, n, now) if next_action else window)
    pending = n_step_windows(r, terminated, truncated, n, gamma)[max(0, length - latency) :]
    flushed = [
        _with_next_action(window, terminated, truncated, n, length - 1) if next_action else window for window in pending
    ]
    return emitted, flushed


def _with_next_action(window, terminated, truncated, n, now):
    """The window if a SARSA target can be made of it at time `now`, else None."""
    if window is None:
        return None
    start, last, _, _ = window
    complete = last == start + n - 1 and not truncated[last] and start + n <= now
    return window if terminated[last] or complete else None
