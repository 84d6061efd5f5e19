"""Eight threads of random operations on a Shared lose, repeat and mix nothing."""

import collections
import contextlib
import threading
import time

import jax
import numpy as np
import pytest
import seeds
from helpers import check_happened, items, over_devices, rarely, rejects

import jaxreplay as jr

ROWS, DRAWN, NUM_ENVS = 4, 8, 2
LIMIT = 60  # seconds, for all threads to end
PER = jr.Prioritized(alpha=0.7, epsilon=0.01)


def kinds():
    replay = jr.ReplayBuffer(capacity=64, sampler=PER)
    streams = jr.SequenceBuffer(length=24, num_envs=NUM_ENVS, sequence_length=3, sampler=PER)
    return {
        "replay": replay,
        "reservoir": jr.ReservoirBuffer(capacity=64, sampler=PER),
        "sequences": jr.Mixture(buffers=(streams,) * 2, weights="joint"),  # of each thread that adds
        "mixture": jr.Mixture(buffers=(replay,) * 2),
        "sharded": over_devices(replay, 2),
    }


def recording(buffer, log):
    """The same buffer, which also appends its calls to `log`: name, arguments, and the result of a draw."""

    def recorded(name):
        method = getattr(type(buffer), name)
        method = method.dispatch if name == "sample" else method

        def call(self, state, *arguments, **named):
            given = jax.tree.map(lambda x: x.copy() if isinstance(x, np.ndarray) else x, (arguments, named))
            result = method(self, state, *arguments, **named)
            log.append((name, *given, result if name == "sample" else None))
            return result

        call.dispatch = call
        return call

    calls = {name: recorded(name) for name in ("add", "update", "set", "sample")}
    made = object.__new__(type("Recording", (type(buffer),), calls))
    vars(made).update(vars(buffer))
    return made


class Storm:
    """Eight threads: four that add (or one for each source of streams), others that learn, two that do anything.

    Attributes:
      log: all calls of the buffer in their order.
      own: by thread, the rows that it knows to be added: numbers and mask.
      balances: balance and slack after each call.
      counted: number of added items.
    """

    def __init__(self, name, seconds, seed):
        self.seconds, self.name, self.seed = seconds, name, seed
        self.log, self.balances, self.counted = [], [], 0
        self.own, self.happened = collections.defaultdict(list), collections.Counter()
        buffer, self.has_streams = kinds()[name], name == "sequences"
        self.num_sources = len(getattr(buffer, "buffers", ()))
        self.start = lambda: buffer.init(self.rows(np.arange(ROWS, dtype=np.int32)))
        self.shared = jr.Shared(recording(buffer, self.log), self.start(), ratio=2, min_size=12)
        limiter = self.shared._turns.limiter
        count = limiter.count

        def counted(added, drawn):
            count(added, drawn)
            self.counted += added
            self.balances.append((limiter.balance, limiter.slack))

        limiter.count = counted

    def rows(self, ids):
        """Rows of the numbers `ids`: [ROWS], or the steps of both streams of a source."""
        return items(np.stack([ids] * NUM_ENVS, axis=1) if self.has_streams else ids)

    def add(self, thread, rng, timeout=None):
        """Add the thread's next rows, numbered thread * 10^6 + k; the arrays are overwritten at once."""
        own = self.own[thread]
        first = thread * 10**6 + len(own) * ROWS
        ids = np.arange(first, first + ROWS, dtype=np.int32)
        mask = np.ones(ROWS, bool) if self.has_streams else rng.random(ROWS) < 0.8
        rows, given_mask = self.rows(ids.copy()), mask.copy()
        named = {} if self.has_streams else {"mask": given_mask if rng.random() < 0.5 else jax.numpy.asarray(mask)}
        key = (jax.random.key(first),) if self.name == "reservoir" else ()
        source = thread % max(self.num_sources, 1)
        add = self.shared.actor(source).add if self.num_sources else self.shared.add
        add(rows, *key, timeout=timeout, **named)
        own.append((ids, mask, source))
        jax.tree.map(lambda x: x.fill(-1), rows)
        given_mask[:] = True

    def learn(self, thread, rng, timeout=None):
        key = jax.random.key(int(rng.integers(2**31)))
        drawn = self.shared.sample(key, DRAWN, timeout=timeout)
        td_errors = rng.normal(size=DRAWN).astype(np.float32)
        self.shared.update(np.asarray(drawn.indices) if rng.random() < 0.5 else drawn.indices, td_errors)
        if rng.random() < 0.3:
            self.shared.set(drawn.indices, {"id": None, "x": drawn.items["x"]})
        if self.has_streams:
            found = np.asarray(drawn.items["id"])[np.asarray(drawn.indices) >= 0]
            np.testing.assert_array_equal(found, found[:, :1] + np.arange(3))

    def anything(self, thread, rng):
        """Any call, with timeouts, errors of arguments and errors in blocks."""
        shared, what = self.shared, rng.integers(8)
        try:
            if what == 0 and not self.has_streams:  # which belong to the threads that add
                self.add(thread, rng, timeout=float(rng.choice([0, 0.001, 0.05])))
            elif what == 1:
                self.learn(thread, rng, timeout=float(rng.choice([0, 0.001, 0.05])))
            elif what == 2:
                assert shared.size() >= 0
            elif what == 3:
                with shared.state() as cell:
                    jr.diagnostics(shared.buffer, cell.state)
            elif what == 4:
                with contextlib.suppress(KeyError), shared.state(added=1, drawn=2) as cell:
                    assert len(jax.tree.leaves(cell.state)) > 3
                    raise KeyError
            elif what == 5:
                rejects("indices", shared.update, np.zeros(8, np.float32), np.zeros(8, np.float32))
            elif what == 6:
                with shared.state(drawn=DRAWN, timeout=0.05) as cell:
                    key = jax.random.key(int(rng.integers(2**31)))
                    drawn = shared.buffer.sample(cell.state, key, DRAWN, None, None)
                    cell.state = shared.buffer.update(cell.state, drawn.indices, drawn.weights)
            else:
                time.sleep(float(rng.random() * 0.002))
            self.happened[f"operation {what}"] += 1
        except TimeoutError:
            self.happened["timeouts"] += 1

    def body(self, thread, errors):
        rng = seeds.rng("storm", self.name, thread, seed=self.seed)
        num_actors = self.num_sources if self.has_streams else 4
        work = self.add if thread < num_actors else self.learn if thread < 6 else self.anything
        try:
            with self.shared.worker():
                while True:
                    work(thread, rng)
        except BaseException as error:
            errors[thread] = error

    def run(self):
        """Until it is closed: at random by the main thread, or by an error of one of the threads."""
        errors = {}
        threads = [threading.Thread(target=self.body, args=(k, errors), daemon=True) for k in range(8)]
        for thread in threads:
            thread.start()
        end = time.monotonic() + LIMIT
        while len(self.log) < 100 and not errors and time.monotonic() < end:
            time.sleep(0.01)  # programs are being compiled
        time.sleep(self.seconds)
        cause = RuntimeError("injected") if seeds.rng("storm", self.name, seed=self.seed).random() < 0.5 else None
        self.shared.close(cause)
        for thread in threads:
            thread.join(LIMIT)
        assert not any(thread.is_alive() for thread in threads), "a thread hangs"
        for error in errors.values():
            if not isinstance(error, jr.Closed) or error.__cause__ is not cause:
                raise error
        assert len(errors) == (8 if cause else 0)
        with self.shared.state() as cell:
            self.state = cell.state

    def check_order(self):
        """All rows that a thread added, and no others, are in the log once, in its order."""
        found = collections.defaultdict(list)
        for name, arguments, named, _ in self.log:
            if name == "add":
                source, rows = arguments[:2] if self.num_sources else (0, arguments[0])
                ids = np.asarray(rows["id"]).reshape(ROWS, -1)[:, 0]
                mask = np.asarray(named.get("mask", np.ones(ROWS, bool)))
                found[int(ids[0]) // 10**6].append((ids, mask, source))
        jax.tree.map(np.testing.assert_array_equal, {**found}, {k: calls for k, calls in self.own.items() if calls})

    def check_twin(self):
        """A single thread that repeats the log gets the same bits."""
        buffer, state = self.shared.buffer, self.start()
        for name, arguments, named, drawn in [*self.log]:
            result = getattr(buffer, name)(state, *arguments, **named)
            if name == "sample":
                jax.tree.map(np.testing.assert_array_equal, result, drawn)
            else:
                state = result
            self.happened[name] += 1
        jax.tree.map(np.testing.assert_array_equal, self.state, state)

    def check_ratio(self):
        """The counts are those of the calls, and the balance was never outside the slack."""
        shared, rows = self.shared, ROWS * (NUM_ENVS if self.has_streams else 1)
        assert self.counted == rows * sum(map(len, self.own.values()))
        assert shared.drawn == DRAWN * self.happened["sample"]
        assert all(abs(balance) <= slack for balance, slack in self.balances)
        assert max(slack for _, slack in self.balances) <= 2 * rows + DRAWN
        assert abs(2 * shared.added - shared.drawn) <= shared.slack


def run(name, seconds, seed):
    threads = Storm(name, seconds, seed)
    try:
        threads.run()
        threads.check_order()
        threads.check_twin()
        threads.check_ratio()
    except BaseException as error:
        error.add_note(f"{name}, JAXREPLAY_SEED={seed}; {dict(threads.happened)}")
        raise
    return threads.happened


@pytest.mark.parametrize("name", [x if x in ("sequences", "sharded") else rarely(x) for x in kinds()])
def test_threads_do_what_one_thread_does(name):
    check_happened(run(name, 1.0, seeds.SEED), {"add": 21, "sample": 21, "operation 4": 1}, 100)


@pytest.mark.slow
@pytest.mark.parametrize("name", kinds())
def test_long_storms_with_a_new_seed(name):
    least = {"add": 1_001, "sample": 1_001, "timeouts": 11, **{f"operation {k}": 101 for k in range(1, 8)}}
    check_happened(run(name, 60.0, seeds.fresh()), least, 100)
