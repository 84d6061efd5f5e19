"""Every block of Python in README.md and in the documentation runs, with stand-ins for what is left to the user."""

import contextlib
import functools
import importlib.util
import inspect
import io
import itertools
import os
import pathlib
import re
import subprocess
import sys
import threading
import time
import types

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import struct
from helpers import at, leaves_of, rarely, run_once

import jaxreplay as jr
from jaxreplay import testing
from jaxreplay.__main__ import main as print_checkpoint
from jaxreplay._common import devices

ROOT = pathlib.Path(__file__).parent.parent
DOCS = ".docs/pages/"
NAMES = ["README.md", "examples/README.md", *(str(x.relative_to(ROOT)) for x in sorted(ROOT.glob(DOCS + "**/*.md")))]
PAGES = {name: (ROOT / name).read_text() for name in NAMES}
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
FENCES = [(name, fence) for name, page in PAGES.items() for fence in FENCE.finditer(page)]
BLOCKS = [(name, fence) for name, fence in FENCES if fence[1] == "python"]  # recipes are files: see test_recipes.py
IMPORTS = {"jax": jax, "jnp": jnp, "jr": jr, "optax": optax}  # by the first block, for all
NUM_ENVS = 16


def run(block, names, **numbers):
    """The names that a block binds, run with `names` and other numbers than the page's; it makes use of them all."""
    page, fence = block
    source = fence[2]
    for name in names:
        assert re.search(rf"\b{name}\b", source), f"{name}: not in the block"
    for number, (old, new) in numbers.items():
        assert old in source, f"{number}={old}: not in the block"
        source = source.replace(old, new)
    first_line = PAGES[page].count("\n", 0, fence.start(2))  # so that errors name the page's lines
    namespace = {**IMPORTS, **names}
    exec(compile("\n" * first_line + source, page, "exec"), namespace)
    return namespace


class Signs:
    """Pays 1 if the action names the sign of the observation; cut off after 10 steps. With the interface of gymnax."""

    def reset(self, key):
        return jax.random.normal(key, (4,)), (jnp.int32(0), jnp.zeros(()), jnp.float32(0))

    def step(self, key, state, action):
        (time, obs, total), (next_obs, _) = state, self.reset(key)
        reward = (action == (obs > 0)).astype(jnp.float32)
        truncated = time == 9
        info = {"terminated": jnp.bool_(False), "truncated": truncated, "final_observation": next_obs}
        info["returned_episode_returns"] = total = total + reward
        state = jnp.where(truncated, 0, time + 1), next_obs[0], jnp.where(truncated, 0.0, total)
        return next_obs, state, reward, info["terminated"], truncated, info


def first_program(block, monkeypatch):
    """The environment is a stand-in: gymnax may not know the newest JAX. `.ci/run examples` runs the program whole."""
    gymnax, wrappers = types.ModuleType("gymnax"), types.ModuleType("gymnax.wrappers")
    gymnax.make, wrappers.LogWrapper = (lambda name: (Signs(), None)), (lambda env: env)
    monkeypatch.setitem(sys.modules, "gymnax", gymnax)
    monkeypatch.setitem(sys.modules, "gymnax.wrappers", wrappers)
    monkeypatch.setattr("sys.stdout", printed := io.StringIO())
    found = run(block, {}, steps=("8_000", "600"))
    ends = np.asarray(found["returns"])[:, 9::10]  # of whole episodes, that all end at once
    assert ends.shape == (4, 60)
    assert np.all(ends[:, 0] < 7)
    assert np.all(ends[:, -1] > 9)
    assert pathlib.Path("quickstart.png").stat().st_size > 10_000
    assert "by seed: [" in printed.getvalue()
    assert all(found[name] is module for name, module in IMPORTS.items())


def test_the_first_program_is_the_same_everywhere():
    program = (ROOT / "examples/quickstart.py").read_text()
    (block,) = [fence for name, fence in BLOCKS if name == "README.md"]
    assert program.endswith(f'"""\n\n{block[2]}')
    assert sum(bool(line.strip()) for line in block[2].splitlines()) <= 60
    assert max(map(len, block[2].splitlines())) <= 88


@pytest.mark.parametrize("name", PAGES)
def test_code_fits_beside_the_contents(name):
    """A block of the site shows 88 columns in a window of 1,280 pixels."""
    for fence in FENCE.finditer(PAGES[name]):
        too_long = [line for line in fence[2].splitlines() if fence[1] == "python" and len(line) > 88]
        assert not too_long


def test_the_readme_is_short():
    assert len(PAGES["README.md"].split()) <= 900


def test_the_rule_for_ends_is_the_same_everywhere():
    rule = (
        "True for the last row of {} episode{} If the stream has a row for the final observation, that row is the "
        "last: `ends=~step`. If it has none, the last row is the terminated or truncated one: "
        "`ends=terminated | truncated`."
    )
    for page in ("guides/sequences.md", "guides/recurrent.md", "recipes/sequences.md"):
        assert rule.format("each", ".") in " ".join(PAGES[DOCS + page].split())
    assert rule.format("an", "; None if no row is.") in " ".join(jr.SequenceBuffer.add.__doc__.split())


def calls(text):
    """Calls `jr.Name(...)`, `buffer.name(...)` and `tracer.name(...)` of a text, as their place, name and keywords."""
    for found in re.finditer(r"\b(jr|buffer|tracer)\.(\w+)\(", text):
        depth, keywords, rest = 1, [], text[found.end() :]
        for token in re.finditer(r"[()]|(\w+)=", rest):
            depth += {"(": 1, ")": -1}.get(token[0], 0)
            if depth == 0:
                break
            if token[1] and depth == 1:
                keywords.append(token[1])
        yield found[1], found[2], keywords


@pytest.mark.parametrize("page", [name for name in PAGES if "coming_from" in name])
def test_names_of_tables_exist(page):
    owners = {"jr": [jr], "buffer": [jr.ReplayBuffer, jr.SequenceBuffer], "tracer": [jr.NStep]}
    rows = [row.strip("|").split(" | ") for row in PAGES[page].splitlines() if row.startswith("|")]
    ours, seen = "\n".join(row[1] for row in rows), 0
    for place, name, keywords in calls(ours):
        found = [getattr(owner, name) for owner in owners[place] if hasattr(owner, name)]
        assert found, f"{place}.{name}"
        names = {x for function in found for x in inspect.signature(function).parameters}
        assert set(keywords) <= names, f"{place}.{name}: {keywords}"
        seen += 1
    assert seen >= 4
    for name in re.findall(r"`jr\.(\w+)`", PAGES[page]):
        assert hasattr(jr, name), name


@struct.dataclass
class Envs:
    """Environments whose observations count their steps."""

    obs: jax.Array


def stand_ins():
    """For what the training loops leave to the user."""

    def act(agent, obs, key):
        return jax.random.randint(key, obs.shape, 0, 2, jnp.int32)

    def step(env, action, key):
        over = jnp.zeros(NUM_ENVS, bool)
        return Envs(env.obs + 1), env.obs + action.astype(env.obs.dtype), over, over, env.obs + 1

    def learn(agent, batch):
        return agent + 1, batch.W * (1 + batch.S)

    return act, step, learn


def training_loop(block, monkeypatch):
    act, step, learn = stand_ins()
    found = run(block, {"act": act, "step": step, "learn": learn}, length=("100_000", "6"), capacity=("2**17", "128"))
    tracer, buffer = found["tracer"], found["buffer"]
    obs, flags = jnp.zeros(NUM_ENVS), jnp.zeros(NUM_ENVS, bool)
    one = obs, jnp.zeros(NUM_ENVS, jnp.int32), obs, flags, flags, obs
    carry = jnp.zeros(()), Envs(obs), tracer.init(*one), buffer.init(tracer.spec(*one)), jax.random.key(0)
    (agent, env, _, replay, _), rewards = found["train"](carry)
    assert (agent, buffer.size(replay), replay.sampler.updates) == (6, (6 - 2) * NUM_ENVS, 6 - 2)
    assert np.all(np.asarray(env.obs) == 6)
    assert rewards.shape == (6, NUM_ENVS)
    assert len(np.unique(leaves_of(replay.sampler.tree))) > 3  # 0, that of new items, and those of TD errors
    assert carry[3].ring.size.is_deleted()  # the carry is donated


def first_carry(block, monkeypatch):
    tracer, obs, flags = (
        jr.NStep(n=3, gamma=0.99, num_envs=NUM_ENVS),
        jnp.zeros((NUM_ENVS, 4)),
        jnp.zeros(NUM_ENVS, bool),
    )
    one = {"obs": obs, "action": flags, "reward": obs[:, 0], "terminated": flags, "truncated": flags, "final_obs": obs}
    names = {**one, "tracer": tracer, "buffer": jr.ReplayBuffer(capacity=64), "agent": 0, "env": 1}
    *_, tracing, replay, _ = run(block, names)["carry"]
    assert tracing.steps.s.shape == (3, NUM_ENVS, 4)
    assert replay.storage.S.shape == (64, 4)


def when_ready(block, monkeypatch):
    buffer = jr.ReplayBuffer(capacity=16, sampler=jr.Prioritized())
    found = run(block, {"buffer": buffer, "learn": lambda agent, x: (agent + 1, x)}, ready=("10_000", "8"))
    replay, advance = buffer.init(jnp.zeros(4)), jax.jit(found["learn_when_ready"])
    for count in (4, 8):
        replay = buffer.add(replay, jnp.arange(1.0, 5.0))
        agent, replay = advance(0, replay, buffer.sample(replay, jax.random.key(count), 256))
        found = agent, len(np.unique(leaves_of_slots(buffer, replay))), replay.sampler.updates
        assert found == ((0, 2, 0) if count == 4 else (1, 5, 1))


def several_updates(block, monkeypatch):
    buffer = jr.ReplayBuffer(capacity=16, sampler=jr.Prioritized())
    found = run(block, {"buffer": buffer, "learn": lambda agent, x: (agent + 1, x)})
    replay = buffer.add(buffer.init(jnp.zeros(4)), jnp.arange(1.0, 5.0))
    (agent, replay), ages = jax.jit(found["updates"])(0, replay, jax.random.key(0))
    assert (agent, ages.shape, replay.sampler.updates) == (4, (4,), 4)


def one_object(block, monkeypatch):
    buffer, items = jr.ReplayBuffer(capacity=16, sampler=jr.Prioritized()), jnp.arange(1.0, 5.0)
    names = {"buffer": buffer, "items": items, "key": jax.random.key(0), "td_errors": lambda items: items}
    replay = run(block, names)["replay"]
    assert (replay.size(), replay.state.sampler.updates) == (4, 1)


def sequences(block, monkeypatch):
    seen = []

    def learn(agent, batch, mask):
        seen.append((batch, mask))
        return agent + 1, jnp.where(mask, jnp.arange(1.0, 33.0), jnp.nan)

    draw = jr.SequenceBuffer.sample
    weighted = jnp.arange(1.0, 33.0)  # of items that are new they would all be 1
    monkeypatch.setattr(
        jr.SequenceBuffer, "sample", lambda *args, **settings: draw(*args, **settings).replace(weights=weighted)
    )
    rng, shape = np.random.default_rng(0), (20, 4)
    step = rng.random(shape) < 0.8
    rows = {
        "frame": rng.integers(1, 256, (*shape, 3, 2), np.uint8),
        "action": rng.integers(0, 4, shape, np.int32),
        "reward": rng.random(shape, np.float32),
        "terminated": np.zeros(shape, bool),
        "truncated": np.zeros(shape, bool),
        "step": step,
    }
    names = {"rows": rows, "key": jax.random.key(0), "agent": 0, "learn": learn}
    found = run(block, names, length=("20_000", "24"), num_envs=("num_envs=50", "num_envs=4"))
    buffer, sample = found["buffer"], found["sample"]
    ((batch, mask),) = seen
    assert found["agent"] == 1
    assert found["items"]["action"].shape == (32, 7)
    assert found["stacks"].shape == (32, 4, 3, 2, 4)
    assert batch.Rn.shape == mask.shape == (32,)
    np.testing.assert_array_equal(mask, found["items"]["step"][:, 3])
    assert 0 < mask.sum() < 32
    np.testing.assert_array_equal(batch.W, weighted)
    drawn, last = np.unique(np.asarray(sample.indices)[::-1], return_index=True)
    td_errors = np.where(mask, 1.0 + np.arange(32), 0.0)[::-1][last]  # of each sequence, the last that was given
    leaves = leaves_of(found["replay"].sampler.tree)
    np.testing.assert_allclose(leaves[drawn % buffer._num_slots], (td_errors + 1e-6) ** 0.6, rtol=1e-5)
    assert not np.array_equal(jax.random.key_data(found["key"]), jax.random.key_data(names["key"]))


def random_walk(key, time, action):
    """A step with same-step autoreset: truncated after 60 steps, terminated if a random number is high."""
    after, first = jax.random.normal(key, (2, 1))
    terminated, truncated = after[0] > 2.2, time == 59
    over = terminated | truncated
    reward = after[0] * (1.0 + action)
    return jnp.where(over, first, after), jnp.where(over, 0, time + 1), reward, terminated, truncated, after


def errors_of(rows, q, start, cut):
    """TD errors [37] of a sequence of one stream, and which of them count, by the definitions."""
    errors, counts, over = np.zeros(37), np.zeros(37, bool), rows["terminated"] | rows["truncated"]
    for i, t in enumerate(range(start + 40, start + 77)):
        counts[i] = rows["step"][t] and not (cut and np.any(~rows["step"][start:t]))
        if counts[i]:
            m = next((m for m in (1, 2) if over[t + m - 1]), 3)
            bootstrap = 0.0 if rows["terminated"][t + m - 1] else 0.99**m * q[t + m].max()
            target = sum(0.99**k * rows["reward"][t + k] for k in range(m)) + bootstrap
            errors[i] = target - q[t, rows["action"][t]]
    return errors, counts


def recurrent_agent(block, monkeypatch):
    """Parameters do not change, so stored states, values and TD errors follow from the streams alone."""
    seen, update = [], jr.SequenceBuffer.update

    def record(buffer, replay, indices, priorities):
        jax.debug.callback(lambda *given: seen.append(jax.tree.map(np.asarray, given)), indices, priorities)
        return update(buffer, replay, indices, priorities)

    monkeypatch.setattr(jr.SequenceBuffer, "update", record)
    names = {
        "env_step": random_walk,
        "network": lambda params, h, obs: (h + obs, (h + obs) * jnp.stack([params, 1 - params])),
        "explore": lambda q, key: jax.random.randint(key, 16, 0, 2),
        "optimizer": optax.sgd(0.0),
    }
    keys = jax.random.split(jax.random.key(0), 4)
    for windows in ("any", "cut"):
        found = run(block, names, length=("10_000", "200"), windows=('"any"', f'"{windows}"'))
        obs, buffer = jnp.zeros((16, 1)), found["buffer"]
        actor = jnp.float32(2.0), jax.vmap(found["env"].init)(jnp.arange(16) * 3, obs), obs, jnp.zeros((16, 1))
        rollout = jax.eval_shape(lambda a=actor, act=found["act"]: jax.lax.scan(act, a, jnp.tile(keys, 10))[1])
        carry = actor, names["optimizer"].init(actor[0]), buffer.init(rollout)
        rows = jax.jit(lambda carry, step=found["train_step"]: jax.lax.scan(step, carry, keys))(carry)[1]
        jax.effects_barrier()
        rows = {name: np.asarray(x).reshape(160, 16, *x.shape[3:]) for name, x in rows.items()}
        h = np.zeros((161, 16, 1))
        for t in range(160):
            np.testing.assert_allclose(rows["h"][t], h[t], atol=1e-4)
            h[t + 1] = (h[t] + rows["obs"][t]) * rows["step"][t][:, None]
        q = (h[:-1] + rows["obs"]) * np.array([2.0, -1.0])
        drawn = [pair for indices, priorities in seen for pair in zip(indices, priorities, strict=True) if pair[0] >= 0]
        assert len(drawn) == 3 * 32
        for handle, priority in drawn:
            number, env = divmod(int(handle), 16)
            stream = {name: x[:, env] for name, x in rows.items()}
            errors, counts = errors_of(stream, q[:, env], 40 * number, windows == "cut")
            expected = 0.9 * np.abs(errors).max() + 0.1 * np.abs(errors).sum() / max(counts.sum(), 1)
            np.testing.assert_allclose(priority, expected, rtol=1e-3, atol=1e-5)
        seen.clear()


def data_sets(block, monkeypatch):
    count = 30
    x, last = np.arange(count, dtype=np.float32), np.arange(count) % 7 == 6
    names = {"observations": x, "actions": x, "rewards": x, "terminals": last & (x > 15), "timeouts": last}
    found = run(block, {**names, "next_observations": x + 1, "key": jax.random.key(0)})
    every, batch, valid = found["every"], found["batch"], np.asarray(found["valid"])
    np.testing.assert_array_equal(every.A, x)
    assert found["buffer"].is_full(found["replay"])
    rows = np.asarray(batch.A).astype(int)[valid]
    assert set(rows) == set(range(count))  # with the last two
    for name in ("S", "A", "Rn", "In", "S_next"):
        np.testing.assert_array_equal(np.asarray(getattr(batch, name))[valid], getattr(every, name)[rows])


def newest_sequences_once(block, monkeypatch):
    batches = []

    def learn(agent, batch):
        jax.debug.callback(lambda batch: batches.append(jax.tree.map(np.asarray, batch)), batch, ordered=True)
        return agent + 1

    found = run(block, {"learn": learn})
    rows = jnp.arange(8 * 64 * 4).reshape(8, 64, 4)  # of 8 steps; a row's number
    carry = 0, found["buffer"].init(rows[0]), jax.random.key(0)
    (agent, _, _), ages = jax.jit(lambda carry: jax.lax.scan(found["train_step"], carry, rows))(carry)
    assert agent == len(batches) == 8
    for new, batch, age in zip(rows, batches, ages, strict=True):
        newest = batch.items[:4]
        np.testing.assert_array_equal(newest[np.argsort(newest[:, 0])], new.T)  # all of these steps, each once
        np.testing.assert_array_equal(age[:4], 0)
        assert len(np.unique(batch.indices[4:])) == (12 if batch is not batches[0] else 5)  # 4 of them, and -1
        np.testing.assert_array_equal(batch.weights, batch.indices >= 0)
    assert ages[-1, 4:].max() > 64  # the rest is not only the newest


def recent_experience(block, monkeypatch):
    buffer, num_updates = jr.ReplayBuffer(capacity=20_000), 500
    replay = buffer.add(buffer.init(np.arange(20_000)), np.arange(20_000))

    def learn(agent, sample):
        return agent + 1

    found = run(block, {"buffer": buffer, "learn": learn})
    phase = jax.jit(lambda replay: found["update_phase"](0, replay, jax.random.key(0), num_updates))
    updates, ages = phase(replay)
    k = np.arange(1, num_updates + 1)
    c_k = np.maximum(20_000 * 0.996 ** (1_000 * k / num_updates), 5_000)
    assert (updates, ages.shape) == (num_updates, (num_updates, 256))
    assert np.all((ages >= 0) & (ages < c_k[:, None]))
    np.testing.assert_allclose(np.mean((ages + 0.5) / c_k[:, None]), 0.5, atol=0.01)  # uniform below it
    assert c_k[0] > c_k[-1] == 5_000


def staleness(block, monkeypatch):
    buffer = jr.ReplayBuffer(capacity=2_000)
    seen = []

    def roll_out(policy, key):
        return jnp.full(128, policy)

    def learn(policy, made_by, staleness):
        jax.debug.callback(lambda *drawn: seen.append(np.asarray(drawn)), jnp.full(64, policy), made_by, staleness)
        return policy + 1

    found = run(block, {"buffer": buffer, "roll_out": roll_out, "learn": learn})
    carry = jnp.int32(0), buffer.init(roll_out(jnp.int32(0), None))
    (policy, _), means = jax.lax.scan(found["train_step"], carry, jax.random.split(jax.random.key(0), 20))
    assert policy == len(means) == len(seen) == 20
    now, made_by, stale = np.stack(seen, axis=1)
    np.testing.assert_array_equal(stale, now - made_by)
    assert set(stale.flat) == {0, 1, 2, 3}


def epochs(block, monkeypatch):
    def clone(policy, items, weights):
        return policy.at[items["id"]].add(weights.astype(jnp.int32))

    demonstrations = {"id": np.arange(1_000)}
    buffer = jr.ReplayBuffer(capacity=1_000)
    names = {"buffer": buffer, "demonstrations": demonstrations, "clone": clone}
    found = run(block, {**names, "policy": jnp.zeros(1_000, jnp.int32), "key": jax.random.key(0)})
    np.testing.assert_array_equal(found["policy"], 10)  # each item once in each epoch
    assert found["indices"].shape == (10, found["num_batches"], 256) == (10, 4, 256)
    orders = np.asarray(found["indices"]).reshape(10, -1)
    np.testing.assert_array_equal(np.sort(orders)[:, 24:], np.broadcast_to(np.arange(1_000), (10, 1_000)))
    assert len(np.unique(orders, axis=0)) == 10


def recent(block, monkeypatch):
    found = run(block, {"items": np.arange(3_000), "key": jax.random.key(0)}, capacity=("1_000_000", "3_000"))
    sample, corrected = found["sample"], found["corrected"]
    np.testing.assert_allclose(sample.probabilities, (2 * sample.items + 1) / 3_000**2, rtol=1e-5)
    np.testing.assert_array_equal(sample.items, corrected.items)
    np.testing.assert_array_equal(sample.weights, 1)
    np.testing.assert_allclose(corrected.weights, (2 * min(sample.items) + 1) / (2 * sample.items + 1), rtol=1e-5)
    assert 0.2 < np.mean(sample.items < 3_000 * 0.5**0.5) / 2 < 0.3  # half of the draws are from the newest 29%


def large_batches(block, monkeypatch):
    items = np.linspace(-3, 3, 1_000, dtype=np.float32)
    buffer = jr.ReplayBuffer(capacity=1_000)
    replay = buffer.add(buffer.init(items), items)

    def learn(agent, items, weights):
        return items, weights

    found = run(block, {"buffer": buffer, "find_td_errors": lambda agent, x: agent * x, "learn": learn})
    step = jax.jit(jax.vmap(found["train_step"], in_axes=(None, None, 0)))
    kept, weights = step(2.0, replay, jax.random.split(jax.random.key(0), 400))
    assert kept.shape == weights.shape == (400, 64)
    assert 1.9 < np.mean(np.abs(kept)) < 2.1  # 1.5 if drawn evenly, 2 in proportion to their sizes
    for moment, of_all in ((np.ones_like(kept), 1.0), (kept**2, 3.0)):
        estimates = np.mean(weights * moment, axis=1)
        error = np.std(estimates) / np.sqrt(400)
        assert abs(np.mean(estimates) - of_all) < 4 * error < 0.1
    few = buffer.add(buffer.init(items), items[:3])
    kept, _ = found["train_step"](1.0, few, jax.random.key(1))
    assert set(kept.tolist()) <= set(items[:3].tolist())


def uses(block, monkeypatch):
    found = run(block, {"items": {"reward": jnp.arange(1_000.0)}, "key": jax.random.key(0)})
    again = found["buffer"].sample(found["replay"], jax.random.key(1), 1_000)
    assert int(found["buffer"].size(found["replay"])) == 744
    assert not set(again.indices.tolist()) & set(found["sample"].indices.tolist())


def without_replacement(block, monkeypatch):
    def learn(agent, minibatch):
        return agent + 1, jnp.sort(minibatch.items)

    names = {"items": np.arange(3_000), "key": jax.random.key(0), "agent": 0, "learn": learn}
    found = run(block, names)
    assert (found["agent"], found["losses"].shape) == (4, (4, 256))
    assert len(np.unique(found["losses"])) == 1_024
    assert np.all(np.ptp(found["losses"], axis=1) > 2_000)  # each of them from all over the buffer


def minibatches(block, monkeypatch):
    def learn(agent, items, weights):
        assert weights.shape == (256,)
        return agent + 1, items + 1.0

    names = {"items": np.arange(3_000.0), "key": jax.random.key(0), "agent": 0, "learn": learn}
    found = run(block, names)
    buffer, replay, sample = found["buffer"], found["replay"], found["sample"]
    assert found["agent"] == 4
    assert np.all(np.ptp(sample.items, axis=1) > 2_900)  # each of them from all over the buffer
    priorities = buffer.priorities(replay, sample.indices.reshape(-1))
    np.testing.assert_allclose(priorities, sample.items.reshape(-1) + 1, rtol=1e-4)


def look_ups(block, monkeypatch):
    buffer = jr.ReplayBuffer(capacity=100_000)
    replay = buffer.add(buffer.init(jnp.zeros(8)), jnp.zeros(8))
    keys = jax.random.split(jax.random.key(0))
    sample = jax.vmap(lambda key: buffer.sample(replay, key, 4))(keys)
    found = run(block, {"buffer": buffer, "replay": replay, "sample": sample})
    assert found["visits"].sum() == 4
    assert found["oldest"] == 7 - np.min(sample.indices[0])


def leaves_of_slots(buffer, replay):
    """What `Prioritized` has stored of each slot: priority^alpha."""
    return np.asarray(leaves_of(replay.sampler.tree))[: buffer.capacity]


def recomputed(block, monkeypatch):
    """Also where the last batch is not full."""
    buffer, items = jr.ReplayBuffer(capacity=32, sampler=jr.Prioritized()), jnp.arange(20.0)
    replay = buffer.add(buffer.init(items), items)
    names = {"buffer": buffer, "replay": replay, "agent": 2.0, "key": jax.random.key(0)}
    found = run(block, names | {"find_td_errors": lambda agent, x: -agent * x}, batch_size=("1_024", "8"))
    handles = buffer.newest(found["replay"], 20)
    np.testing.assert_allclose(buffer.priorities(found["replay"], handles), 2 * items + 1e-6, rtol=1e-5)
    assert found["num_batches"] == 3


def priorities_from_actors(block, monkeypatch):
    rng, q_values, num_envs = np.random.default_rng(0), np.float32([[1, 2], [3, 5], [8, 4], [2, 9]]), 3
    tracer, buffer = jr.NStep(n=2, gamma=0.5, num_envs=num_envs), jr.ReplayBuffer(capacity=64, sampler=jr.Prioritized())
    found = run(block, {"tracer": tracer, "buffer": buffer})
    insert, expected = jax.jit(found["insert"]), []
    obs = rng.integers(0, 4, (10, num_envs), np.int32)
    action, reward = rng.integers(0, 2, (9, num_envs), np.int32), rng.random((9, num_envs), np.float32)
    never = np.zeros(num_envs, bool)
    seen = [{"obs": x, "q": q_values[x]} for x in obs]
    tracing = tracer.init(seen[0], action[0], reward[0], never, never, seen[0])
    spec = tracer.spec(seen[0], action[0], reward[0], never, never, seen[0])
    replay = buffer.init(spec.replace(S=spec.S["obs"], S_next=spec.S_next["obs"]))
    for t in range(9):
        tracing, replay = insert(tracing, replay, seen[t], action[t], reward[t], never, never, seen[t + 1])
    for t in range(8):
        target = reward[t] + 0.5 * reward[t + 1] + 0.25 * q_values[obs[t + 2]].max(axis=1)
        expected.extend(target - q_values[obs[t], action[t]])
    np.testing.assert_array_equal(replay.storage.S[:24], obs[:8].reshape(-1))
    np.testing.assert_allclose(
        leaves_of_slots(buffer, replay)[:24], (np.abs(expected) + 1e-6) ** 0.6, rtol=1e-4, atol=1e-5
    )


class Verdict:
    """A future of the rewards of `rows`."""

    def __init__(self, rows):
        self.rows = rows

    def result(self):
        return self.rows["tokens"][:, 0].astype(np.float32)


def later_rewards(block, monkeypatch):
    batches = []

    def learn(policy, items):
        batches.append(jax.tree.map(np.asarray, items))
        return policy + 1

    tokens = np.arange(1, 1 + 8 * 64 * 2).reshape(8, 64, 2)
    rollouts = [{"tokens": x, "reward": np.full(64, -1, np.float32)} for x in tokens]
    names = {"rollouts": rollouts, "judge": Verdict, "learn": learn, "policy": 0, "key": jax.random.key(0)}
    found = run(block, names, capacity=("4_096", "350"))  # so that items are overwritten
    assert found["policy"] == len(batches) == 5
    for number, items in enumerate(batches):
        np.testing.assert_array_equal(items["reward"], items["tokens"][:, 0])  # none without its reward
        rollout = items["tokens"][:, 0] // 128
        assert rollout.max() == number
    assert rollout.min() == 2  # of 8 rollouts of 64, 350 are kept
    known = leaves_of_slots(found["buffer"], found["replay"])
    np.testing.assert_array_equal(np.sort(known), np.repeat([0.0, 1.0], [3 * 64, 350 - 3 * 64]))


def prioritized(block, monkeypatch):
    def learn(agent, items, weights):
        return agent + 1, weights * items

    found = run(block, {"learn": learn}, capacity=("2**17", "512"))
    buffer = found["buffer"]
    replay = buffer.add(buffer.init(jnp.zeros(512)), jnp.arange(1.0, 513.0))
    step = run_once(lambda carry: jax.lax.scan(found["train_step"], carry, jax.random.split(jax.random.key(0), 4)))
    (agent, replay), sizes = step((0, replay))
    assert (agent, replay.sampler.updates) == (4, 4)
    assert 256 == sizes[0] > sizes[3] > 50  # at first all are drawn alike


def lap(block, monkeypatch):
    items = np.linspace(-4.0, 4.0, 512, dtype=np.float32)
    seen = []

    def find_td_errors(params, batch):
        return batch - params

    def descend(params, grads):
        return params - grads

    found = run(block, {"find_td_errors": find_td_errors, "descend": descend}, capacity=("1_000_000", "1024"))
    buffer, params = found["buffer"], jnp.float32(0.5)
    replay = buffer.add(buffer.init(items), items)
    for key in jax.random.split(jax.random.key(0), 3):
        drawn = buffer.sample(replay, key, 256)
        seen.append(drawn.items)
        np.testing.assert_array_equal(drawn.weights, 1)
        before = params
        (params, replay), td_errors = jax.jit(found["train_step"])((params, replay), key)
        np.testing.assert_array_equal(td_errors, seen[-1] - before)
        np.testing.assert_allclose(params, before + np.clip(td_errors, -1, 1).mean(), rtol=1e-5)
        leaves = leaves_of_slots(buffer, replay)[np.asarray(drawn.indices)]
        np.testing.assert_allclose(leaves, np.maximum(np.abs(td_errors), 1) ** 0.4, rtol=1e-5)
    largest = leaves_of_slots(buffer, replay).max()
    replay = buffer.add(replay, items[:1])
    np.testing.assert_array_equal(leaves_of_slots(buffer, replay)[512], largest)


def rollouts(block, monkeypatch):
    tracer, no = jr.NStep(n=3, gamma=0.9, num_envs=4), jnp.zeros(4, bool)

    def roll_out(agent, env, tracing, key):
        def step(carry, _):
            obs, tracing = carry
            tracing, batch, _ = tracer.add(tracing, obs, obs % 2, jnp.ones(4), no, no, obs + 10)
            return (obs + 10, tracing), batch

        (env, tracing), batch = jax.lax.scan(step, (env, tracing), length=32)
        return env, tracing, batch

    def learn(agent, batch):
        return agent + 1, batch.Rn

    found = run(block, {"roll_out": roll_out, "learn": learn}, capacity=("2**17", "512"))
    env = jnp.arange(4)
    tracing = tracer.init(env, env, jnp.ones(4), no, no, env)
    spec = jax.eval_shape(roll_out, 0, env, tracing, None)[2]
    assert spec.Rn.shape == (32, 4)
    carry, keys = (0, env, tracing, found["buffer"].init(spec)), jax.random.split(jax.random.key(0), 3)
    (agent, env, _, replay), ages = jax.lax.scan(found["train_step"], carry, keys)
    assert (agent, ages.shape, found["buffer"].size(replay)) == (3, (3, 256), (3 * 32 - 2) * 4)
    order = np.arange(4) + 10 * np.arange(3 * 32 - 2)[:, None]  # of time
    np.testing.assert_array_equal(replay.storage.S[: order.size], order.reshape(-1))


def host_loop(block, monkeypatch):
    tracer, buffer, one = jr.NStep(n=3, gamma=0.9, num_envs=4), jr.ReplayBuffer(capacity=64), np.ones(4, np.float32)
    acted, calls, no = [], [], np.zeros(4, bool)

    def act(agent, obs):
        acted.append(int(agent))
        return obs % 2

    def step_envs(action):
        obs = acted[-1] + 10 * np.arange(4)
        np.testing.assert_array_equal(action, obs % 2)
        return obs + 1, (obs, action, one, no, no, obs + 1)

    def learn(agent, batch):
        calls.append(None)
        return agent + 1, batch.W

    obs = 10 * np.arange(4)
    row = obs, obs, one, no, no, obs
    carry = jnp.zeros((), int), tracer.init(*row), buffer.init(tracer.spec(*row)), jax.random.key(0)
    names = {"tracer": tracer, "buffer": buffer, "act": act, "step_envs": step_envs, "learn": learn}
    found = run(block, {**names, "obs": obs, "carry": carry}, steps=("100_000", "12"))
    replay = found["carry"][2]
    assert acted == list(range(12))
    assert len(calls) == 1  # compiled once
    assert carry[2].ring.size.is_deleted()  # the carry is donated
    assert buffer.size(replay) == 4 * 10
    np.testing.assert_array_equal(replay.storage.S[:40], (np.arange(10)[:, None] + obs).reshape(-1))


def both_ends(block, monkeypatch):
    found = run(block, {})
    batch, table = found["batch"], re.findall(r"^\| (\d) \|.*\| ([\d.]+) \| ([\d.]+) \|", PAGES[block[0]], re.MULTILINE)
    rows = np.stack([batch.S, batch.Rn, batch.In], axis=-1)[found["valid"]]
    np.testing.assert_array_equal(rows, np.array(table, float))
    np.testing.assert_array_equal(batch.S_next[found["valid"]][3:], 5)


def same_step(block, monkeypatch):
    import gymnasium as gym

    tracer, mode = jr.NStep(n=1, gamma=0.9, num_envs=2), gym.vector.AutoresetMode.SAME_STEP
    envs = gym.make_vec("CartPole-v1", 2, vectorization_mode="sync", vector_kwargs={"autoreset_mode": mode})
    obs, _ = envs.reset(seed=0)
    action, one, no = np.ones(2, np.int32), np.ones(2, np.float32), np.zeros(2, bool)
    names = {"np": np, "envs": envs, "tracer": tracer, "action": action}
    tracing, ended = tracer.init(obs, action, one, no, no, obs), 0
    for _ in range(12):
        found = run(block, {**names, "obs": obs, "tracing": tracing})
        obs, tracing, batch = found["next_obs"], found["tracing"], found["batch"]
        over = found["terminated"]
        ended += over.sum()
        np.testing.assert_array_equal(np.abs(batch.S_next[:, 2]) > 12 / 180 * np.pi * (1 + 1e-6), over)  # it has fallen
        np.testing.assert_array_equal(batch.In, np.where(over, 0, np.float32(0.9)))
    assert ended > 1


def one_step_late(block, monkeypatch):
    """The calls bring observations; what they complete is what is traced with each step's own next observation."""
    tracer, emitted, expected = jr.NStep(n=2, gamma=0.9, num_envs=2), [], []
    rows = np.arange(14.0, dtype=np.float32).reshape(7, 2)
    terminated, truncated = rows == 6, rows == 9
    state = tracing = tracer.init(rows[0], rows[0], rows[0], terminated[0], truncated[0], rows[0])
    names = {"tracer": tracer, "pending": None, "batch": None}
    for t in range(7):
        step = {"obs": rows[t], "action": rows[t], "reward": rows[t], "terminated": terminated[t]}
        found = run(block, {**names, **step, "truncated": truncated[t], "tracing": tracing})
        names["pending"], tracing = found["pending"], found["tracing"]
        if t:
            emitted.append(found["batch"])
            state, batch, _ = tracer.add(state, *[rows[t - 1]] * 3, terminated[t - 1], truncated[t - 1], rows[t])
            expected.append(batch)
    jax.tree.map(np.testing.assert_array_equal, emitted, expected)
    assert np.all(expected[-1].valid)
    assert "tracer.add(tracing, *pending, obs)[1]" in PAGES[block[0]]


def several_seeds(block, monkeypatch):
    obs, no = jnp.zeros((2, 4)), jnp.zeros(2, bool)
    names = {"one_step": (obs, no, obs[:, 0], no, no, obs), "init_agent": jax.random.bits, "reset": jax.random.bits}
    names |= {"tracer": jr.NStep(n=3, gamma=0.9, num_envs=2), "buffer": jr.ReplayBuffer(capacity=16)}
    monkeypatch.setattr("sys.stdout", printed := io.StringIO())
    found = run(block, {**names, "train": lambda carry: (carry, carry[0])})
    assert len(np.unique(found["rewards"])) == 8
    assert found["carry"][3].storage.S.shape == (8, 16, 4)
    assert found["replay_of_seed_3"].storage.S.shape == (16, 4)
    assert printed.getvalue() == "0\n"


def sweeps(block, monkeypatch):
    """With alpha 0 all draw alike; the learning rate and the number of updates set how far a lane comes."""
    items = np.random.default_rng(0).normal(3.0, 1.0, 200).astype(np.float32)
    found = run(block, {"items": items}, capacity=("10_000", "256"))
    np.testing.assert_array_equal(found["replay"].sampler.alpha, found["alpha"].ravel())
    assert found["curves"].shape == (16, 50)
    rate, updates = np.asarray(found["learning_rate"]).ravel(), np.asarray(found["updates"]).ravel()
    np.testing.assert_array_equal(found["replay"].sampler.updates, 50 * updates)
    slow, twice, fast = ((rate == r) & (updates == u) for r, u in ((0.01, 1), (0.01, 2), (0.1, 2)))
    last = np.asarray(found["params"])
    assert last[slow].max() < 1.5 < last[twice].min()
    np.testing.assert_allclose(last[fast], items.mean(), atol=0.5)


class Host:
    """An environment of Gymnasium, or a vector of them. Observations count its steps; every fifth is truncated."""

    observation_space = action_space = None

    def __init__(self, *num_envs):
        self.shape, self.steps = num_envs, 0

    def reset(self, seed=None):
        return np.full((*self.shape, 4), self.steps, np.float32), {}

    def step(self, action):
        assert np.shape(action) == self.shape
        self.steps += 1
        flags = np.full(self.shape, self.steps % 5 == 0)
        return self.reset()[0], np.full(self.shape, 0.5), ~flags & False, flags, {}


def gymnasium(block, monkeypatch):
    def learn(batch):
        learned.append(batch)
        return batch.Rn

    learned, envs = [], Host(8)
    names = {"np": np, "envs": envs, "act": lambda obs: np.zeros(8, np.int32), "learn": learn, "key": jax.random.key(0)}
    found = run(block, names, steps=("range(100_000)", "range(12)"), wait=("1_000", "10"))
    assert envs.steps == 12
    assert found["buffer"].size(found["replay"]) == 9 * 8  # of 12 calls two only reset, and the last step waits
    assert len(learned) == found["replay"].sampler.updates == 2
    np.testing.assert_array_equal(learned[0].In.max(), np.float32(0.99))  # a window cut short bootstraps with gamma^m
    assert set(np.asarray(learned[1].S[:, 0])) <= set(range(10))


def elsewhere(*modules, **names):
    """A program of another library. It runs where that is installed, as in the benchmark's environment."""

    def check(block, monkeypatch):
        compile(block[1][2], block[0], "exec")
        if all(importlib.util.find_spec(module) for module in modules):
            run(block, names, steps=("range(100_000)", "range(120)"), wait=("1_000", "100"))

    return check


def flat_buffer(block, monkeypatch):
    """The loop as it was with flashbax, where that is installed."""
    compile(block[1][2], block[0], "exec")
    if not importlib.util.find_spec("flashbax"):
        return
    act, step, _ = stand_ins()

    def learn(agent, first, next_obs, weights):
        return agent + 1, weights * (1 + first["obs"] + next_obs)

    found = run(block, {"act": act, "step": step, "learn": learn}, capacity=("2**17", "2**10"))
    obs, buffer = jnp.zeros(NUM_ENVS), found["buffer"]
    one = {"obs": obs[0], "action": jnp.int32(0), "reward": obs[0], "done": obs[0] > 0}
    carry = jnp.zeros(()), Envs(obs), buffer.init(one), jax.random.key(0)
    (agent, env, _, _), rewards = run_once(lambda carry: jax.lax.scan(found["train_step"], carry, length=4))(carry)
    assert (agent, rewards.shape) == (4, (4, NUM_ENVS))
    assert np.all(np.asarray(env.obs) == 4)


def roll_out_sequences(agent, env):
    """Four steps of 16 environments; a reward names its row."""
    number = env + jnp.arange(4) + 1_000 * jnp.arange(16)[:, None]
    return env + 4, {"obs": jnp.zeros((16, 4, 3)), "reward": number.astype(jnp.float32)}


def errors_of_rewards(agent, items, weights):
    return agent + 1, items["reward"] % 7 - 3


SEQUENCES = {
    "one_step": {"obs": jnp.zeros(3), "reward": jnp.float32(0)},
    "roll_out": roll_out_sequences,
    "learn": errors_of_rewards,
}


def trajectories(block, monkeypatch):
    """The loop as it was with flashbax, where that is installed; it waits for as many rows as here."""
    compile(block[1][2], block[0], "exec")
    if not importlib.util.find_spec("flashbax"):
        return
    found = run(block, SEQUENCES)
    step = jax.jit(lambda carry: found["train_step"](carry, jax.random.key(0))[0])
    carry, ready = (0, jnp.int32(0), found["replay"]), []
    for _ in range(21):
        carry = step(carry)
        ready.append(bool(found["buffer"].can_sample(carry[2])))
    assert ready == [False] * 19 + [True] * 2


def sequences_of_trajectories(block, monkeypatch):
    found, ready = run(block, SEQUENCES), re.search(r"can_sample\(replay, (.*)\)  #", block[1][2])[1]
    assert not found["ready"]
    buffer, carry = found["buffer"], (0, jnp.int32(0), found["replay"])
    step = jax.jit(lambda carry, key: found["train_step"](carry, key)[0])
    enough = []
    for t in range(21):
        carry = step(carry, jax.random.key(t))
        enough.append(bool(buffer.can_sample(carry[2], eval(ready))))
    assert enough == [False] * 19 + [True] * 2  # as flashbax does
    replay = carry[2]
    assert buffer.size(replay) == 16 * ((84 - 8) // 4 + 1)
    handles = buffer.newest(replay, 16 * 20)
    errors = np.abs(np.asarray(buffer.get(replay, handles)["reward"]) % 7 - 3)
    expected = 0.9 * errors.max(axis=1) + 0.1 * errors.mean(axis=1) + 1e-6
    leaves = np.asarray(leaves_of(replay.sampler.tree))[np.asarray(handles)]
    drawn = np.isclose(leaves, expected**0.9, rtol=1e-4)
    assert drawn.mean() > 0.5
    assert np.all(drawn | np.isclose(leaves, leaves[-1]) | (leaves == 1))  # or as new as they came


def half_online(block, monkeypatch):
    batches = []

    def act(agent, key):
        return -agent * jnp.ones(8, jnp.int32)  # the agent's own: the numbers of its versions, from -1 on

    def learn(agent, sample):
        jax.debug.callback(lambda items: batches.append(np.asarray(items)), sample.items, ordered=True)
        return agent + 1, jnp.ones(256)

    found = run(
        block, {"data": jnp.arange(5_000, dtype=jnp.int32), "act": act, "learn": learn}, small=("50_000", "5_000")
    )
    carry = jnp.int32(1), found["replay"]
    (agent, replay), sizes = jax.lax.scan(found["train_step"], carry, jax.random.split(jax.random.key(0), 5))
    assert agent == 6
    np.testing.assert_array_equal(sizes, 5_000 + 8 * np.arange(1, 6))
    assert found["buffer"].sizes(replay) == (40, 5_000)
    for step, batch in enumerate(batches):
        assert set(batch[:128]) <= set(range(-step - 1, 0))
        assert np.all(batch[128:] >= 0)
    assert set(batches[4][:128]) == {-1, -2, -3, -4, -5}


def bytes_of_a_state(block, monkeypatch):
    monkeypatch.setattr("sys.stdout", printed := io.StringIO())
    run(block, {})
    assert printed.getvalue() in [fence[2] for name, fence in FENCES if (name, fence[1]) == (block[0], "text")]


def beyond_the_device(block, monkeypatch):
    """With another device of the CPU for an accelerator."""
    host, accelerator = jax.devices("cpu")[:2]
    learned = []

    def learn(agent, batch):
        assert batch["x"].devices() == {accelerator}
        learned.append(batch["x"].shape)
        return agent + 1, jax.jit(jnp.abs)(batch["x"])

    buffer, rows = jr.ReplayBuffer(capacity=64, sampler=jr.Prioritized()), {"x": jnp.arange(1.0, 9.0)}
    names = {"buffer": buffer, "rows": rows, "key": jax.random.key(0), "agent": 0, "learn": learn}
    replay = run(block, names, accelerator=("jax.devices()[0]", "jax.devices()[1]"), draws=("10", "3"))["replay"]
    assert learned == [(256,)] * 3
    assert all(x.devices() == {host} and x.committed for x in jax.tree.leaves(replay))
    assert buffer.size(replay) == 24
    assert replay.sampler.max_priority == pytest.approx(8.0)


def pools(block, monkeypatch):
    drawn, kept, logged = [], [], {}

    def roll_out(policy, tasks):
        drawn.append(np.asarray(tasks))
        return (np.arange(8) < np.arange(64)[:, None] % 9).astype(np.float32)  # 0 to 8 of 8 are solved

    def learn(policy, tasks, rewards, mask):
        kept.append(np.asarray(mask))
        return policy + 1

    names = {"steps": 3, "key": jax.random.key(0), "policy": 0, "roll_out": roll_out, "learn": learn}
    found = run(block, {**names, "log": logged.update})
    assert found["policy"] == 3
    assert np.isin(drawn, np.arange(19_500)).all()
    assert all(len(np.intersect1d(a, b)) < 8 for a, b in itertools.pairwise(drawn))
    np.testing.assert_array_equal(kept, [(np.arange(64) % 9 > 0) & (np.arange(64) % 9 < 8)] * 3)
    assert 0 < logged["evicted_examples/math/easy"] < 1
    assert {"filtered_rollouts/hard", "pool/code/normal"} <= logged.keys()
    easy = drawn[0][np.arange(64) % 9 == 8]
    assert np.all(found["pools"].pool_of(found["state"])[easy] == 1)


def tasks(block, monkeypatch):
    drawn, logged = [], {}

    def roll_out(policy, tasks):
        drawn.append(np.asarray(tasks))
        return (np.arange(8) < np.arange(64)[:, None] % 9).astype(np.float32)  # 0 to 8 of 8 are solved

    def learn(policy, tasks, rewards, mask):
        assert mask.all()
        return policy + 1

    names = {"steps": 3, "key": jax.random.key(0), "policy": 0, "roll_out": roll_out, "learn": learn}
    found = run(block, {**names, "log": logged.update})
    assert found["policy"] == 3
    assert np.isin(drawn, np.arange(19_500)).all()
    assert logged["tried"] == pytest.approx(len(np.unique(drawn)) / 19_500)
    assert 0.4 < logged["success"] < 0.6
    law = found["tasks"].probabilities(found["state"])
    assert law[drawn[0][8]] < 0.6 * law[drawn[0][4]]


def levels(block, monkeypatch):
    def random_level(key):
        return {"walls": jax.random.bernoulli(key, 0.5, (5, 5))}

    def play(agent, played):
        """Two episodes of two steps; the advantage is the share of walls."""
        share = jnp.mean(played["walls"], axis=(1, 2))
        ends = jnp.broadcast_to(jnp.array([False, True, False, True])[:, None], (4, 32))
        return jnp.broadcast_to(share, (4, 32)), ends, agent + 1

    names = {"key": jax.random.key(0), "random_level": random_level, "play": play}
    found = run(block, names, capacity=("4_000", "256"))
    carry, keys = (jnp.int32(0), found["state"]), jax.random.split(jax.random.key(1), 40)
    (agent, state), replayed = jax.jit(lambda *x: jax.lax.scan(found["train_step"], *x))(carry, keys)
    assert int(state.size) == 256
    assert not replayed[:8].any()  # a full buffer takes 8 insertions of 32
    assert 5 < int(agent) == int(replayed.sum()) < 30
    np.testing.assert_allclose(state.scores, state.levels["walls"].mean(axis=(1, 2)), rtol=1e-6)
    assert state.scores.min() > 0.5  # of about 700 random levels, whose mean is a half, the best 256


def largest_returns(block, monkeypatch):
    levels = jr.Levels(capacity=2)
    new, returns = jnp.array([7, 8, 9]), jnp.array([0.25, 0.5, 0.75])
    names = {"levels": levels, "state": levels.init(0), "new": new, "scores": jnp.array([1, 0, 2]), "returns": returns}
    assert run(block, names)["best"].tolist() == [0.25, 0.75]


def own_sampler(block, monkeypatch):
    found = run(block, {}, length=("1_000", "12"), num_envs=("16", "2"), sequence_length=("=8", "=3"))
    curious = found["buffer"].sampler
    testing.check_sampler(curious)
    buffers = found["buffer"], jr.ReplayBuffer(capacity=20, sampler=curious)

    def learn(buffer, rows, key):
        """The number of visits of each slot, and what was drawn, in a scan; each row is twice as bad as the last."""

        def step(replay, x):
            rows, key = x
            replay = buffer.add(replay, rows)
            drawn = buffer.sample(replay, key, 4)
            seen = replay.sampler.visits[drawn.indices % buffer._num_slots]
            newest = buffer.sample(replay, key, 4, max_age=1)
            return buffer.update(replay, drawn.indices, 2.0**drawn.age), (drawn, seen, newest)

        return jax.lax.scan(step, buffer.init(jax.tree.map(lambda x: x[0], rows)), (rows, jax.random.split(key, 30)))

    for buffer in buffers:
        ids = jnp.arange(60.0).reshape(30, *((1, 2) if buffer is buffers[0] else (2,)))
        keys = jax.random.split(jax.random.key(0), 2)
        replay, (drawn, seen, newest) = jax.jit(jax.vmap(lambda key, b=buffer, x=ids: learn(b, x, key)))(keys)
        exists = np.asarray(drawn.indices) >= 0
        assert exists.sum() >= 2 * 27 * 4
        np.testing.assert_array_equal(np.asarray(drawn.probabilities) > 0, exists)
        np.testing.assert_array_equal(drawn.weights, exists)
        assert np.all(np.asarray(newest.age)[exists] == 0)
        assert np.mean(np.asarray(seen)[exists] == 0) > 0.4  # of uniform draws about a fifth
        capacity = replay.sampler.visits.shape[1]
        leaves, visits = leaves_of(replay.sampler.tree), np.asarray(replay.sampler.visits)
        assert visits.max() > 1
        np.testing.assert_allclose(leaves[(visits == 0) & (leaves > 0)], 1e4)
        expected = 1e4 * 0.7 ** visits[0].astype(float)  # and an error's part, from 1 to 2^20 to the power of 0.7
        assert np.all((leaves[0] >= 0.999 * expected) | (leaves[0] == 0))
        assert capacity == buffer._num_slots
    alone = jax.jit(lambda key: learn(buffer, ids, key))(keys[1])
    chex.assert_trees_all_close(at((replay, drawn), 1), (alone[0], alone[1][0]), rtol=1e-5)
    with pytest.raises(ValueError, match="empty buffer"):
        buffers[1].sample(buffers[1].init(jnp.zeros(1)), jax.random.key(0), 2)


def looking_inside(block, monkeypatch):
    monkeypatch.setattr("sys.stdout", printed := io.StringIO())
    monkeypatch.setattr(jr, "plot", lambda buffer, state: plotted.append((buffer, state)))  # tested by itself
    plotted, items = [], {"x": jnp.arange(1_000.0)}

    def learn(agent, sample):
        return agent + 1, sample.items["x"]

    names = {"items": items, "learn": learn, "agent": jnp.int32(0), "key": jax.random.key(0)}
    found = run(block, names, steps=("key, 1_000", "key, 20"))
    logged = found["logged"]
    assert found["agent"] == 20
    np.testing.assert_array_equal(logged["updates"], np.arange(20))
    assert logged["top_10pct_mass"][0] < 0.15 < logged["top_10pct_mass"][-1]
    assert "'draws/age_q50'" in printed.getvalue()
    assert plotted == [(found["buffer"], found["replay"])]
    assert print_checkpoint(["run/checkpoint"]) == 0
    assert "replay: ReplayBuffer" in printed.getvalue()


def goals(block, monkeypatch):
    ends = jnp.arange(16)[None] % 4 == jnp.arange(20)[:, None] % 4  # episodes of three steps and a row without one

    def act(agent, env, key):
        place = jnp.full((1, 16), env, jnp.float32)[..., None]
        over = ends[env % 20][None]
        rows = dict.fromkeys(("observation", "achieved_goal", "action"), place) | {"step": ~over}
        rows |= {"desired_goal": -jnp.ones((1, 16, 1), jnp.float32), "reward": -jnp.ones((1, 16), jnp.float32)}
        return env + 1, rows | {"terminated": jnp.zeros((1, 16), bool), "truncated": ends[(env + 1) % 20][None]}, over

    def learn(agent, batch, mask):
        return agent.append((batch, mask)) or agent

    found = run(block, {"act": act, "learn": learn}, length=("100_000", "8"))
    buffer = found["buffer"]
    replay, env = buffer.init(act(None, 0, None)[1]), 0
    for env in range(10):
        _, rows, over = act(None, env, None)
        replay = buffer.add(replay, rows, ends=over)
    (((batch, valid),), env, replay), mean = found["train_step"](([], 10, replay), jax.random.key(0))
    goal, place = np.asarray(batch.S["desired_goal"][:, 0]), np.asarray(batch.S["achieved_goal"][:, 0])
    new = goal >= 0
    assert np.all(valid)
    assert 0.7 < new.mean() < 0.9
    assert 1 <= mean <= 3
    assert np.all((goal > place)[new] & (goal <= place + 3)[new])
    np.testing.assert_array_equal(batch.Rn, np.where(new & (goal == place + 1), 0.0, -1.0))


def one_device_to_eight(block, monkeypatch):
    found = run(block, {})
    assert found["buffer"].num_shards == 8
    assert found["buffer"].buffer.capacity == 2**20


def explicit_axes(block, monkeypatch):
    tracer, obs, no = jr.NStep(n=3, gamma=0.99, num_envs=8), np.zeros((8, 2), np.float32), np.zeros(8, bool)
    mesh = jax.sharding.Mesh(
        jax.devices("cpu"), ("data",), axis_types=(jax.sharding.AxisType.Explicit,)
    )  # that of jax.make_mesh, on any JAX
    step = obs, no, obs[:, 0], no, no, obs
    tracing = run(block, {"mesh": mesh, "tracer": tracer, "step": step})["tracing"]
    rows = jax.device_put(step, jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data")))
    tracing, batch, _ = tracer.add(tracing, *rows)
    assert {part.data.shape for part in tracing.steps.s.addressable_shards} == {(3, 1, 2)}
    assert {part.data.shape for part in batch.S.addressable_shards} == {(1, 2)}


def several_processes(block, monkeypatch):
    initialized = []
    monkeypatch.setattr(jax.distributed, "initialize", lambda: initialized.append(True))
    found = run(block, {"rows": {"id": np.arange(16)}}, capacity=("2**20", "64"))
    assert initialized
    replay, sharding = found["replay"], found["buffer"].items_sharding
    assert found["buffer"].size(replay) == 16
    assert found["rows"]["id"].sharding == sharding
    np.testing.assert_array_equal(np.asarray(replay.storage["id"])[:, :2], np.arange(16).reshape(8, 2))


def run_with_eight_shards(capacity):
    """A run's configuration, and all there is to it."""
    buffer = jr.Sharded(
        buffer=jr.ReplayBuffer(capacity=capacity, sampler=jr.Prioritized()),
        mesh=jax.sharding.Mesh(jax.devices("cpu"), ("data",)),
    )
    tracer = jr.NStep(n=3, gamma=0.99)
    rows = {"id": jax.device_put(np.arange(16), buffer.items_sharding)}
    one = np.zeros(1, np.float32)
    tracing = tracer.init(one, one, one, one > 0, one > 0, one)
    return buffer, tracer, buffer.add(buffer.init(rows), rows), tracing


def checkpoints(block, monkeypatch):
    buffer, tracer, replay, tracing = run_with_eight_shards(64)
    optimizer = optax.adam(1e-3)
    state = {
        "replay": replay,
        "tracing": tracing,
        "params": {"w": jnp.arange(3.0)},
        "opt": optimizer.init({"w": jnp.arange(3.0)}),
        "key": jax.random.key(1),
    }
    waits, save = [], jr.save

    def record(*arguments, wait=True):
        waits.append(wait)
        finish = save(*arguments, wait=wait)
        return lambda: (finish(), waits.append("finished"))

    monkeypatch.setattr(jr, "save", record)
    found = run(block, {"buffer": buffer, "tracer": tracer, "optimizer": optimizer, **state})
    assert waits == [True, False, "finished"]
    state["tracer"] = state.pop("tracing")
    again = jr.restore("run/checkpoint", {"replay": buffer, "tracer": tracer}, allow=optax)
    for restored in (found["carry"], again):
        assert jax.tree.structure(restored) == jax.tree.structure(state)
        for a, b in zip(jax.tree.leaves(restored), jax.tree.leaves(state), strict=True):
            if jnp.issubdtype(a.dtype, jax.dtypes.prng_key):
                a, b = jax.random.key_data(a), jax.random.key_data(b)
            np.testing.assert_array_equal(a, b)


def resumed(block, _):
    """Killed twice: what is drawn has observations of one life alone, and of all lives."""
    tracer, replay = jr.NStep(n=3, gamma=1.0, num_envs=2), jr.ReplayBuffer(capacity=2**10)
    streams = jr.SequenceBuffer(length=2**9, num_envs=2, sequence_length=3, windows="inside")
    no, told = np.zeros(2, bool), np.zeros((1, 2), bool)

    def step_from(obs):
        return obs, obs, obs, no, no, obs + 1

    def begin(obs):
        states = {"tracer": tracer.init(*step_from(obs)), "replay": replay.init(tracer.spec(*step_from(obs)))}
        return states | {"streams": streams.init(obs[None]), "params": jnp.zeros(()), "step": 0}

    for life in range(3):
        left = itertools.chain(range(130), [None]) if life < 2 else itertools.count()

        def act(envs, params, obs, left=left):
            if next(left) is None:
                raise KeyboardInterrupt
            return obs + 1, step_from(obs), obs[None], told

        envs = types.SimpleNamespace(reset=lambda life=life: np.full(2, 1_000.0 * life, np.float32))
        names = {"tracer": tracer, "replay": replay, "streams": streams, "envs": envs, "begin": begin, "act": act}
        with contextlib.suppress(KeyboardInterrupt):
            found = run(block, names, last=("1_000", "300"))
    carry = found["carry"]
    transitions = replay.get(carry["replay"], replay.newest(carry["replay"], int(replay.size(carry["replay"]))))
    sequences = np.asarray(streams.get(carry["streams"], streams.newest(carry["streams"], 1_200))) // 1_000
    sequences = sequences[-int(streams.size(carry["streams"])) :]
    np.testing.assert_array_equal(transitions.S // 1_000, transitions.S_next // 1_000)
    np.testing.assert_array_equal(sequences[:, 0], sequences[:, -1])
    for lives in (transitions.S // 1_000, sequences):
        assert set(np.unique(lives)) == {0, 1, 2}


def another_buffer(block, monkeypatch):
    buffer, tracer, replay, tracing = run_with_eight_shards(64)
    jr.save("run/checkpoint", {"replay": buffer, "tracer": tracer}, {"replay": replay, "tracer": tracing})
    settings = []
    monkeypatch.setattr(jax.config, "update", lambda *setting: settings.append(setting))  # devices are there already
    found = run(block, {"tracer": tracer}, old=("2**20", "64"), new=("2**18", "8"))
    assert settings == [("jax_num_cpu_devices", 8)]
    replay = found["carry"]["replay"]
    assert found["new"].size(replay) == 8
    np.testing.assert_array_equal(replay.storage["id"], np.arange(1, 16, 2))  # the newer of the two in each shard


def repeats(page, number, old="", new=""):
    """The block is one that another page has, where it runs, but for one change."""

    def check(block, monkeypatch):
        source = [fence[2] for name, fence in BLOCKS if name == page][number]
        assert old in source
        assert block[1][2] == source.replace(old, new)

    return check


HOST_LOOP = repeats(DOCS + "guides/host.md", 1)


class Counting:
    """Environments of an actor, whose observations count their steps; they wait a little, as real ones do.

    As in Gymnasium, the call after the end of an episode of 7 steps only resets, here to the next multiple of 100.
    """

    def __init__(self, num_envs, steps=10**6):
        self.num_envs, self.steps, self.number = num_envs, steps, 0

    def reset(self):
        return np.zeros(self.num_envs, np.float32), {}

    def step(self, action):
        if self.number >= self.steps:
            raise OSError("the robot is gone")
        resets = self.number % 100 == 7
        self.number += 93 if resets else 1
        time.sleep(0.001)
        obs, no = np.full(self.num_envs, self.number, np.float32), np.zeros(self.num_envs, bool)
        return obs, np.where(resets, np.nan, obs.astype(float)), no, no | (self.number % 100 == 7), {}


def one_row(num_envs):
    x, no = np.zeros(num_envs, np.float32), np.zeros(num_envs, bool)
    return x, np.zeros(num_envs, np.int32), x, no, no, x


def threads_of(block, second_envs):
    num_envs, learnt = 4, []

    def learn(params, batch):
        learnt.append(np.asarray(batch.Rn))
        return params + 1, jnp.ones(batch.Rn.shape)

    names = {
        "np": np,
        "tracer": jr.NStep(n=2, gamma=0.5, num_envs=num_envs),
        "step": one_row(num_envs),
        "policy": lambda params, obs: np.zeros(num_envs, np.int32),
        "learn": learn,
        "params": 0,
        "first_envs": Counting(num_envs),
        "second_envs": second_envs,
        "key": jax.random.key(0),
    }
    numbers = {
        "number": ("10_000", "20"),
        "least": ("min_size=1_000", "min_size=40"),
        "every": ("1_000 == 0", "10 == 9"),
    }
    return run(block, names, **numbers), learnt


def actors_and_a_learner(block, monkeypatch):
    found, learnt = threads_of(block, Counting(4))
    shared, actors = found["shared"], found["actors"]
    assert found["params"] == len(learnt) == 20
    assert shared.closed
    assert [actor.result() for actor in actors] == [None, None]
    assert shared.drawn == 20 * 256
    assert abs(8 * shared.added - shared.drawn) <= shared.slack
    rewards = 100 * np.arange(1_000)[:, None] + np.arange(1, 8)  # of one actor, by episode
    returns = {*(rewards[:, :-1] + 0.5 * rewards[:, 1:]).flat, *rewards[:, -1]}
    assert set(np.concatenate(learnt)) <= returns
    saved = jr.restore("run/checkpoint", {"replay": found["buffer"]})
    assert (saved["params"], saved["update"], saved["drawn"]) == (20, 19, 20 * 256)
    assert abs(8 * saved["added"] - saved["drawn"]) <= shared.slack
    with pytest.raises(jr.Closed, match="robot") as caught:
        threads_of(block, Counting(4, steps=115))
    assert isinstance(caught.value.__cause__, OSError)


def a_block_of_the_state(block, monkeypatch):
    buffer = jr.ReplayBuffer(capacity=64, sampler=jr.Prioritized())
    shared = jr.Shared(buffer, buffer.init(jnp.zeros(8)), ratio=8)
    shared.add(jnp.arange(8.0))

    @jax.jit
    def draw_learn_update(params, state, key):
        drawn = buffer.sample(state, key, 256)
        return params + 1, buffer.update(state, drawn.indices, drawn.items)

    names = {"shared": shared, "draw_learn_update": draw_learn_update, "params": 0, "key": jax.random.key(0)}
    assert run(block, names)["params"] == 1
    with shared.state() as cell:
        assert (shared.drawn, float(jr.diagnostics(buffer, cell.state)["updates"])) == (256, 1)


def a_shared_is_restored(block, monkeypatch):
    buffer = jr.ReplayBuffer(capacity=64)
    saved = {"replay": buffer.add(buffer.init(jnp.zeros(8)), jnp.arange(8.0)), "added": 5, "drawn": 35}
    jr.save("run/checkpoint", {"replay": buffer}, saved | {"params": jnp.ones(2), "update": 7})
    found = run(block, {"buffer": buffer}, least=("min_size=1_000", "min_size=4"))
    assert (found["shared"].size(), found["params"].tolist(), found["update"]) == (8, [1, 1], 7)
    assert (found["shared"].added, found["shared"].drawn) == (5, 35)


def actors_with_streams(block, monkeypatch):
    def roll_out(envs):
        time.sleep(0.002 * envs["wait"])
        envs["number"] += 4
        steps = envs["first"] + envs["number"] + np.arange(4)[:, None] + 10_000 * np.arange(8)
        return steps.astype(np.int32), np.zeros((4, 8), bool)

    numbers = {"length": ("10_000", "100"), "sequence": ("sequence_length=32", "sequence_length=5")}
    found = run(block, {"steps": np.zeros((4, 8), np.int32), "roll_out": roll_out}, **numbers)
    shared, envs = found["shared"], [{"number": 0, "wait": k, "first": 10**6 * k} for k in range(2)]
    actors = [threading.Thread(target=found["act"], args=(k, envs[k]), daemon=True) for k in range(2)]
    with shared:
        for actor in actors:
            actor.start()
        for number in range(20):
            drawn = shared.sample(jax.random.key(number), 64, timeout=60)
            exists = np.asarray(drawn.indices) >= 0
            rows = np.asarray(drawn.items)[exists]
            np.testing.assert_array_equal(rows, rows[:, :1] + np.arange(5))
            np.testing.assert_array_equal(rows[:, 0] // 10**6, np.repeat([0, 1], 32)[exists])
    for actor in actors:
        actor.join(60)
        assert not actor.is_alive()


def actors_on_another_device(block, monkeypatch):
    monkeypatch.setattr(jax, "devices", functools.partial(lambda given: given, jax.devices("cpu")[:5]))

    def next_rows(envs):
        if not envs:
            raise jr.Closed("no more rows")
        return jnp.arange(8.0, dtype=jnp.float32) + envs.pop()

    @jax.jit
    def draw_learn_update(params, state, key):
        return params + jnp.sum(found["buffer"].sample(state, key, 256).items), state

    names = {"rows": np.zeros(8, np.float32), "next_rows": next_rows, "draw_learn_update": draw_learn_update}
    found = run(block, names)
    shared = found["shared"]
    actor = threading.Thread(target=found["act"], args=([100.0, 200.0, 300.0],), daemon=True)
    actor.start()
    params = found["update"](jnp.zeros(()), jax.random.key(0))
    actor.join(60)
    assert not actor.is_alive()
    assert params.sharding.device_set == set(found["learner_devices"])
    assert shared.size() == 24


def parts_of_a_batch(block, monkeypatch):
    """Of two processes that are one, to which `put` gives twice what it has."""
    buffer = jr.ReplayBuffer(capacity=64, sampler=jr.Prioritized(alpha=1.0, epsilon=0.0))
    shared = jr.Shared(buffer, buffer.init(np.zeros(8)))
    shared.add(jnp.arange(1.0, 9.0), td_errors=jnp.arange(1.0, 9.0))
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    monkeypatch.setattr(
        jax, "make_array_from_process_local_data", lambda sharding, x: jnp.concatenate([jnp.asarray(x)] * 2)
    )

    def learn(params, items, weights):
        expected = (16 * items / 72) ** -0.4
        np.testing.assert_allclose(weights, expected / expected.max(), rtol=1e-5)
        return params + 1, 2 * items[:128]

    names = {
        "functools": functools,
        "np": np,
        "mesh": jax.sharding.Mesh(jax.devices()[:1], ("data",)),
        "shared": shared,
        "own_key": jax.random.key(0),
        "learn": learn,
        "params": 0,
    }
    found = run(block, names)
    assert (found["params"], found["items"].shape, found["sizes"].sum()) == (1, (256,), 16)
    with shared.state() as cell:
        assert float(jr.diagnostics(buffer, cell.state)["max_priority"]) == 16


RAY_BEFORE = """
import jax, numpy as np, ray
import jaxreplay as jr
ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False, object_store_memory=10**8)
rows, params, learnt = np.zeros(8, np.float32), 0, []

def make_envs(number):
    return [1_000_000.0 * number]

def next_rows(envs):
    envs[0] += 8
    return envs[0] + np.arange(8, dtype=np.float32)

def learn(params, items, weights):
    learnt.append(items)
    return params + 1, np.ones(256, np.float32)
"""
RAY_AFTER = """
drawn, exists = np.concatenate(learnt), np.unique(np.concatenate(learnt))
assert sorted(ray.get(actors)) == [0, 1]  # both have ended
assert params == len(learnt) == 20 and drawn.shape == (20 * 256,)
assert np.all(exists % 1 == 0) and np.all(exists % 1_000_000 >= 8)
assert {0, 1} == set(exists // 1_000_000)
print("learnt", len(learnt))
"""


def rows_through_ray(block, monkeypatch):
    """In a process of its own, which starts those of Ray; its slow case needs the extra `ray`."""
    source = block[1][2]
    for old, new in (("10_000", "20"), ("min_size=1_000", "min_size=40")):
        assert old in source
        source = source.replace(old, new)
    script = pathlib.Path("with_ray.py")
    script.write_text(RAY_BEFORE + source + RAY_AFTER)
    environment = {**os.environ, "RAY_USAGE_STATS_ENABLED": "0", "PYTHONPATH": str(ROOT)}
    found = subprocess.run(
        [sys.executable, script], capture_output=True, text=True, timeout=300, env=environment, check=False
    )
    assert found.returncode == 0, found.stderr
    assert "learnt 20" in found.stdout


def object_in_a_train_state(block, monkeypatch):
    items = {"obs": jnp.arange(16.0).reshape(4, 4), "action": jnp.array([0, 1, 0, 1], jnp.int32)}
    found = run(block, {"items": items}, capacity=("10_000", "16"))
    agent = found["agent"]
    assert (agent.step, agent.replay.size(), agent.replay.state.sampler.updates) == (1, 4, 1)
    assert found["train_step"](agent, items, jax.random.key(2)).replay.size() == 8


class Brax:
    """With the interface of a brax environment of `episode_length` 5; terminates at 3."""

    def reset(self, key):
        zero = jnp.zeros(())
        return Thrown(obs=zero, done=zero, reward=zero, info={"truncation": zero, "steps": zero})

    def step(self, state, action):
        steps, obs = state.info["steps"] + 1, state.obs + action
        fell = obs >= 3
        info = {"truncation": jnp.where((steps >= 5) & ~fell, 1.0, 0.0), "steps": steps}
        return Thrown(obs=obs, done=jnp.where(fell | (steps >= 5), 1.0, 0.0), reward=action, info=info)


@struct.dataclass
class Thrown:
    obs: jax.Array
    done: jax.Array
    reward: jax.Array
    info: dict


BUFFER, ITEMS = (
    jr.ReplayBuffer(capacity=16, sampler=jr.Prioritized()),
    {"obs": np.arange(16, dtype=np.float32).reshape(4, 4), "reward": np.arange(4, dtype=np.float32)},
)


def shuffled_minibatches(block, monkeypatch):
    def learn(agent, part):
        spread.append(part.items)
        return agent + 1, part.items.astype(jnp.float32)

    spread, items = [], jnp.arange(1_000)
    buffer = jr.ReplayBuffer(capacity=1_000, sampler=jr.Prioritized(alpha=1.0, epsilon=0.0))
    found = run(block, {"buffer": buffer, "learn": learn})
    replay = buffer.add(buffer.init(items), items)
    agent, replay = found["learn_from_minibatches"](0, replay, jax.random.key(0))
    assert agent == 4
    leaves = leaves_of_slots(buffer, replay)
    changed = np.flatnonzero(leaves != 1)
    assert len(changed) > 200  # draws of their own may share items
    np.testing.assert_array_equal(leaves[changed], changed)  # each TD error reached its item
    parts = []
    with monkeypatch.context() as patched:
        patched.setattr(jax.lax, "scan", lambda learn, agent, x: parts.append(x) or (agent, jnp.zeros((4, 64))))
        found["learn_from_minibatches"](0, replay, jax.random.key(0))
    assert np.all(np.ptp(parts[0].items, axis=1) > 800)  # each part from all over the buffer


def ends_one_row_late(block, monkeypatch):
    buffer = jr.SequenceBuffer(length=20, num_envs=2, sequence_length=2, windows="inside")
    found = run(block, {"buffer": buffer})
    first = np.zeros((10, 2), bool)
    first[[0, 4, 7], 0] = first[[0, 5], 1] = True
    rows = {"id": jnp.arange(20).reshape(10, 2), "first": jnp.asarray(first)}
    carry = jax.tree.map(lambda x: x[0], rows), buffer.init(rows)
    _, replay = jax.lax.scan(found["add_previous"], carry, jax.tree.map(lambda x: x[1:], rows))[0]
    drawn = buffer.get(replay, buffer.newest(replay, int(buffer.size(replay))))["id"]
    expected = [[t, t + 1] for t in range(8) for env in (0, 1) if not first[t + 1, env]]
    assert len(drawn) == len(expected) == 13
    np.testing.assert_array_equal(np.sort(drawn[:, 0] // 2), np.sort([t for t, _ in expected]))


def hidden_outcomes(block, monkeypatch):
    tracer, obs, no = jr.NStep(n=3, gamma=0.5), jnp.zeros(1), jnp.zeros(1, bool)
    names, emitted = {"tracer": tracer, "tracing": tracer.init(obs, obs, obs, no, no, obs)}, []
    for t in (0, 1, 2, 3, 10, 11, 12, 13, 14):
        names |= {"obs": obs + t, "action": obs, "reward": obs + 1, "has_final_obs": no, "terminated": obs + t == 12}
        truncated = (obs + t == 3) | (obs + t == 12)
        found = run(block, {**names, "truncated": truncated, "final_obs": obs + t + 1})
        names["tracing"] = found["tracing"]
        if found["valid"][0]:
            emitted.append([float(x[0]) for x in (found["batch"].S, found["batch"].Rn, found["batch"].In)])
            if found["batch"].In[0]:
                assert found["batch"].S_next[0] == 3  # where the hidden step started
    assert emitted == [[0, 1.75, 0.125], [1, 1.5, 0.25], [2, 1, 0.5], [10, 1.75, 0], [11, 1.5, 0], [12, 1, 0]]


def trailing_size(block, monkeypatch):
    obs, no = np.zeros(8), np.zeros(8, bool)
    for over in (no, ~no):
        buffer = jr.ReplayBuffer(capacity=200)
        found = run(block, {"buffer": buffer, "step": (obs, obs, obs, no, over, obs)})
        assert (found["size"], buffer.size(found["replay"])) == (8 * 8, 10 * 8)


def single_environment(block, monkeypatch):
    import gymnasium as gym

    env, buffer = gym.make("CartPole-v1"), jr.ReplayBuffer(capacity=100)
    names = {"np": np, "env": env, "act": lambda obs: np.int32(1), "buffer": buffer}
    replay = run(block, names, steps=("100_000", "42"))["replay"]
    assert buffer.size(replay) == 42 - 2
    batch = buffer.get(replay, buffer.newest(replay, 40))
    starts = np.flatnonzero(np.abs(batch.S[:, 1]) < 0.05)  # cart's speed: it is pushed one way
    assert len(starts) >= 3
    np.testing.assert_array_equal(np.asarray(batch.In)[starts[1:] - 1], 0)  # of the last steps before


def in_nnx(block, monkeypatch):
    donated, add = [], jr.ReplayBuffer.init
    monkeypatch.setattr(jr.ReplayBuffer, "init", lambda *args: donated.append(add(*args)) or donated[-1])
    found = run(block, {"buffer": BUFFER, "items": ITEMS})
    replay = found["agent"].replay.get_value()
    assert (BUFFER.size(replay), replay.sampler.updates, found["td_errors"].shape) == (4, 1, (32,))
    assert donated[0].storage["obs"].is_deleted()
    assert len(jax.tree.leaves(found["params"])) == 2


def in_a_train_state(block, monkeypatch):
    learner = run(block, {"buffer": BUFFER, "items": ITEMS})["learner"]
    learner = learner.apply_gradients(grads=learner.params)
    assert (learner.step, BUFFER.size(learner.replay)) == (1, 4)


def in_equinox(block, monkeypatch):
    compile(block[1][2], block[0], "exec")
    if importlib.util.find_spec("equinox"):
        found = run(block, {"buffer": BUFFER, "items": ITEMS})
        replay = found["agent"].replay
        assert (BUFFER.size(replay), replay.sampler.updates) == (4, 1)
        assert not np.array_equal(found["agent"].q.weight, found["q"].weight)


def in_orbax(block, monkeypatch):
    replay = BUFFER.add(BUFFER.init(ITEMS), ITEMS)
    found = run(block, {"buffer": BUFFER, "items": ITEMS, "replay": replay, "folder": pathlib.Path("orbax").absolute()})
    chex.assert_trees_all_equal(found["carry"]["replay"], replay)
    assert jnp.array_equal(jax.random.key_data(found["carry"]["key"]), jax.random.key_data(jax.random.key(0)))


def on_another_backend(block, monkeypatch):
    """The state that is saved is laid out as on a TPU."""
    items = {"obs": ITEMS["obs"].repeat(32, axis=1)}
    with monkeypatch.context() as patched:
        patched.setattr(devices, "backend_of", lambda arrays=(): "tpu")
        saved = BUFFER.add(BUFFER.init(items), items)
    restored = run(block, {"buffer": BUFFER, "replay": saved})["replay"]
    assert jax.tree.structure(saved) != jax.tree.structure(restored)
    assert jax.tree.structure(restored) == jax.tree.structure(BUFFER.init(items))
    np.testing.assert_array_equal(BUFFER.get(restored, BUFFER.newest(restored, 4))["obs"], items["obs"])


def loggers(block, monkeypatch):
    written, wandb, tensorboard = [], types.ModuleType("wandb"), types.ModuleType("torch.utils.tensorboard")

    class SummaryWriter:
        def __init__(self, log_dir):
            self.close = lambda: written.append(log_dir)

        def add_scalar(self, tag, scalar_value, global_step=None):
            written.append((global_step, tag, scalar_value))

    tensorboard.SummaryWriter, sent = SummaryWriter, []
    wandb.init = lambda *, mode, project: sent.append((mode, project))
    wandb.log = lambda data, step: sent.append((step, data))
    wandb.finish = lambda: sent.append("finish")
    for name in ("torch", "torch.utils"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", tensorboard)
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    replay = BUFFER.add(BUFFER.init(ITEMS), ITEMS)
    found = run(block, {"buffer": BUFFER, "replay": replay, "key": jax.random.key(0)})
    assert (sent[0], sent[-1], written[-1]) == (("offline", "replay"), "finish", "run/tensorboard")
    assert [step for step, _ in sent[1:-1]] == list(range(0, 100, 10))
    assert written[:-1] == [(t, name, x) for t, scalars in sent[1:-1] for name, x in scalars.items()]
    assert sent[3][1]["replay/updates"] == found["logged"]["updates"][20] == 20


def rows_of(env_step, state, obs, actions):
    """Observations, and the flags terminated, truncated and step, of these actions with next-step autoreset."""
    env, rows = jr.NextStepAutoreset(env_step=env_step), []
    state = env.init(state, obs)
    for action in actions:
        state, obs, _, *flags = env.step(state, jnp.float32(action), jax.random.key(0))
        rows.append((float(obs), "".join(name for name, x in zip("TUs", flags, strict=True) if x)))
    return rows


def gymnax_step(block, monkeypatch):
    def step(key, state, action, params):
        over = state + action >= params
        info = {"final_observation": state + action}
        after = jnp.where(over, 0.0, state + action)
        return after, after, action, over, jnp.bool_(False), info

    env_step = run(block, {"env": types.SimpleNamespace(step=step), "env_params": 3})["env_step"]
    zero = jnp.zeros(())
    assert rows_of(env_step, zero, zero, [2, 1, 2, 1]) == [(2, "s"), (3, "Ts"), (0, ""), (1, "s")]


def brax_step(block, monkeypatch):
    env_step, first = run(block, {"env": Brax()})["env_step"], Brax().reset(None)
    expected = [(2, "s"), (3, "Ts"), (0, ""), (0, "s"), (0, "s"), (0, "s"), (1, "s"), (2, "Us"), (0, "")]
    assert rows_of(env_step, first, first.obs, [2, 1, 9, 0, 0, 0, 1, 1, 9]) == expected


def rows_of_gymnasium(block, monkeypatch):
    import gymnasium as gym

    envs, buffer = gym.make_vec("CartPole-v1", 8, vectorization_mode="sync"), jr.SequenceBuffer
    buffer = buffer(length=64, num_envs=8, sequence_length=2, windows="inside")
    names = {"np": np, "envs": envs, "buffer": buffer, "act": lambda obs: np.ones(8, np.int64)}
    found = run(block, names, steps=("range(100_000)", "range(40)"))
    rows = {name: np.asarray(x)[:40] for name, x in found["replay"].storage.items()}
    over, step = rows["terminated"] | rows["truncated"], rows["step"]
    np.testing.assert_array_equal(~step[1:], over[:-1])
    assert over.sum() > 8
    assert np.all(np.abs(rows["obs"][~step][:, 2]) > 0.2)  # it has fallen
    assert np.all(np.abs(rows["obs"][1:][~step[:-1]]) < 0.06)  # and starts anew
    assert buffer.size(found["replay"]) == np.sum(step[:-1])


def a_traced_discount(block, monkeypatch):
    obs, flags = jnp.zeros((6, 8)), jnp.zeros((6, 8), bool)
    found = run(block, {"steps": (obs, obs, obs + 1, flags, flags, obs)})["of_each"]
    assert found.shape == (3, 6, 8)
    for gamma, returns in zip((0.9, 0.99, 0.999), found, strict=True):
        np.testing.assert_allclose(returns[2:], 1 + gamma + gamma**2, rtol=1e-6)


@struct.dataclass
class Corridor:
    """With the interface of gymnax 0.0.9: ends at place 3, or after the limit; starts anew from 0."""

    time: jax.Array
    place: jax.Array

    def step_env(self, key, state, action, params):
        state = Corridor(state.time + 1, state.place + action)
        done = (state.place >= 3) | (state.time >= params.max_steps_in_episode)
        return state.place, state, 1.0, done, {}

    def reset_env(self, key, params):
        return jnp.int32(0), Corridor(jnp.int32(0), jnp.int32(0))


@struct.dataclass
class CorridorParams:
    max_steps_in_episode: int = 5


def one_done(block, monkeypatch):
    env, params = Corridor(0, 0), CorridorParams()
    env_step = run(block, {"env": env, "env_params": params})["env_step"]

    def step(state, action):
        obs, state, _, *rest = env_step(jax.random.key(0), state, action)
        return state, (obs, *rest)

    actions = jnp.array([1, 1, 1, 0, 0, 0, 0, 0, 1, 0, 1, 0, 1], jnp.int32)
    _, (obs, terminated, truncated, final_obs) = jax.lax.scan(step, env.reset_env(None, params)[1], actions)
    assert np.flatnonzero(terminated).tolist() == [2, 12]  # the last one is also at the limit
    assert np.flatnonzero(truncated).tolist() == [7]
    assert obs.tolist() == [1, 2, 0, 0, 0, 0, 0, 0, 1, 1, 2, 2, 0]
    assert final_obs[np.array([2, 7, 12])].tolist() == [3, 0, 3]
    autoreset = jr.NextStepAutoreset(env_step=env_step)
    state = autoreset.init(env.reset_env(None, params)[1], jnp.int32(0))
    assert autoreset.step(state, jnp.int32(1), jax.random.key(0))[1] == 1


def rows_that_may_not_be_drawn(block, monkeypatch):
    obs, flags = np.arange(16.0, dtype=np.float32).reshape(2, 8), np.zeros((2, 8), bool)
    rollout = {"obs": obs, "done": flags, "was_reset": obs == 3}
    found = run(
        block, {"rollout": rollout}, length=("1_000", "4"), sequence_length=("sequence_length=16", "sequence_length=2")
    )
    assert found["buffer"].size(found["replay"]) == 7


def bounded_versions(block, monkeypatch):
    def roll_out(policy, key):
        kept = jax.random.bernoulli(key, jax.random.uniform(jax.random.fold_in(key, 1), maxval=0.5), (128,))
        return {"by": jnp.full(128, policy)}, kept

    found = run(block, {"roll_out": roll_out, "learn": lambda policy, items, weights: policy + 1})
    groups, _ = roll_out(jnp.int32(0), jax.random.key(0))
    replay = found["buffer"].init({**groups, "version": groups["by"]})
    carry = jnp.int32(0), replay, found["newest"], jnp.int32(0)
    keys = jax.random.split(jax.random.key(0), 40)
    (policy, replay, _, _), (stale, weights) = jax.lax.scan(found["train_step"], carry, keys)
    assert set(stale[weights > 0].tolist()) == {0, 1, 2, 3}
    assert np.all(weights.sum(axis=1)[:20] > 0)
    np.testing.assert_array_equal(replay.storage["by"], replay.storage["version"])
    uses = np.asarray(replay.uses.of_slots)
    assert uses.max() >= 2  # a group that was drawn twice in a batch may have more
    assert policy == 40


def mark_of_a_version(block, monkeypatch):
    for capacity, before in ((64, 0), (64, 5), (8, 5)):
        buffer = jr.ReplayBuffer(capacity=capacity)
        replay = buffer.init(jnp.zeros(4))
        if before:
            replay = buffer.add(replay, jnp.zeros(before))
        names = {"buffer": buffer, "replay": replay, "groups": jnp.arange(1.0, 5.0), "num_versions": 3}
        found = run(block, names | {"kept": jnp.arange(4) > 0, "key": jax.random.key(0)})
        assert found["since"] == (9 if (capacity, before) == (64, 5) else -1)
        assert set(found["sample"].items.tolist()) == {2, 3, 4}


def advantages(block, monkeypatch):
    found = run(block, {})
    buffer, rewards = found["buffer"], (jnp.arange(4.0) < jnp.arange(5.0)[:, None]).astype(jnp.float32)
    replay = buffer.init({"rewards": rewards, "advantage": rewards})
    replay, sample = jax.jit(found["add_and_draw"])(replay, {"rewards": rewards}, jax.random.key(0))
    mean = rewards.mean(axis=1)
    priorities = buffer.priorities(replay, jnp.arange(5))
    np.testing.assert_allclose(priorities, 2 * np.sqrt(mean * (1 - mean)), atol=1e-4)
    assert set(sample.indices.tolist()) == {1, 2, 3}
    np.testing.assert_allclose(np.sum(sample.items["advantage"], axis=1), 0, atol=1e-5)
    p = priorities / priorities.sum()
    np.testing.assert_allclose(sample.weights, 1 / (5 * p[sample.indices]), rtol=1e-4)


def short_rows(block, monkeypatch):
    found = run(block, {"token_losses": lambda policy, items: items["loss"]})
    buffer, rng = found["buffer"], np.random.default_rng(0)
    items = {"mask": rng.random((10, 3, 6)) < 0.5, "loss": rng.random((10, 3, 6), np.float32)}
    replay = buffer.add(buffer.init(items), 1, items)
    for filled in ([0, 16], [48, 16]):
        sample = buffer.sample(replay, jax.random.key(0), 64)
        groups, tokens = found["numbers_of"](sample)
        np.testing.assert_array_equal(groups, filled)
        mask = np.asarray(sample.items["mask"]) & (np.asarray(sample.indices) >= 0)[:, None, None]
        np.testing.assert_array_equal(tokens, [mask[:48].sum(), mask[48:].sum()])
        assert tokens[1] > 0
        mean = np.asarray(sample.items["loss"])[mask].mean()
        np.testing.assert_allclose(found["loss_of"](0, sample), mean, rtol=1e-5)
        replay = buffer.add(replay, 0, items)
    weights = rng.random(64, np.float32)
    expected = np.average(np.asarray(sample.items["loss"]), weights=mask * weights[:, None, None])
    np.testing.assert_allclose(found["loss_of"](0, sample.replace(weights=weights)), expected, rtol=1e-5)


def in_time(block, monkeypatch):
    learned = []

    def learn(policy, by, weights):
        learned.append(by[weights > 0].tolist())
        return policy + 1

    found = run(block, {"learn": learn})
    buffer = found["buffer"]
    replay = buffer.init(jnp.zeros(8, jnp.int32))
    state = jnp.int32(0), replay, jnp.int32(0)
    for version, (count, oldest, after) in enumerate([(7, 0, 0), (1, 0, 1), (8, -3, 1), (8, -2, 2), (7, 0, 2)]):
        policy, replay, before = state
        replay = buffer.add(replay, jnp.full(count, version, jnp.int32))
        state = found["learn_in_time"](policy, replay, jax.random.key(0), before, jnp.array([5, oldest]))
        assert state[0] == state[2] == after
    assert [sorted(x) for x in learned] == [[0] * 7, [0] * 7 + [1], [2] * 8, [2] * 8 + [3] * 8, [4] * 7]


def preempted_run(block, monkeypatch):
    buffer = jr.ReplayBuffer(capacity=128, sampler=jr.Uniform(replacement=False), max_uses=1)
    learned, die_at = [], [None]

    def generate(state):
        if state["step"] == die_at[0]:
            raise KeyboardInterrupt
        cursor = state["cursor"] + 2
        return {
            "replay": buffer.add(state["replay"], state["flight"]),
            "flight": jnp.array([cursor, cursor + 1], jnp.int32),
            "cursor": cursor,
        }

    def learn(state, groups):
        there = state["drawn"] >= 0
        learned.append((state["step"], np.asarray(groups)[np.asarray(there)].tolist()))
        indices = jnp.where(there, state["drawn"], -1)
        return {"replay": buffer.update(state["replay"], indices, jnp.zeros(64)), "policy": state["policy"] + 1}

    names = {"buffer": buffer, "tasks": jr.Tasks(num_tasks=4), "optimizer": optax.adam(0.1), "generate": generate}
    names |= {"policy": jnp.zeros(3), "flight": jnp.int32([0, 1]), "key": jax.random.key(0), "learn": learn}
    steps, ends, save = {"steps": ("1_000", "24")}, [], jr.save
    monkeypatch.setattr(jr, "save", lambda *arguments, wait: save(*arguments, wait=not wait))  # complete when it dies
    for die_at[0] in (3, 17, None):
        with contextlib.suppress(KeyboardInterrupt):
            ends.append(run(block, names, **steps)["state"])
    (end,) = ends
    assert {step for step, _ in learned[4:22]} == {*range(18)}  # it begins anew, as there was no save
    assert learned[22][0] == 10  # the last save
    of_steps = dict(learned)
    assert [sorted(of_steps[step]) for step in range(24)] == [[], *([2 * k, 2 * k + 1] for k in range(23))]
    assert sum(len(groups) for groups in of_steps.values()) == len(np.unique(np.concatenate([*of_steps.values()])))
    assert (end["step"], end["cursor"]) == (24, 48)


COVERED = {  # a function for each block of Python, in the page's order
    "README.md": [first_program],
    "index.md": [repeats("README.md", 0)],
    "guides/checkpoints.md": [checkpoints, resumed, another_buffer],
    "guides/datasets.md": [data_sets],
    "guides/devices.md": [one_device_to_eight, explicit_axes, several_processes],
    "guides/diagnostics.md": [looking_inside],
    "guides/draws.md": [
        newest_sequences_once,
        recent_experience,
        recent,
        large_batches,
        uses,
        staleness,
        epochs,
        without_replacement,
        minibatches,
        look_ups,
    ],
    "guides/goals.md": [goals],
    "coming_from/coax.md": [elsewhere("coax"), HOST_LOOP],
    "coming_from/cpprb.md": [
        elsewhere("cpprb", env=Host(), act=lambda obs: np.int32(0), learn=lambda batch: batch["rew"][:, 0]),
        HOST_LOOP,
    ],
    "coming_from/flashbax.md": [
        flat_buffer,
        repeats(DOCS + "guides/scan.md", 0, "n=3", "n=1"),
        trajectories,
        sequences_of_trajectories,
    ],
    "coming_from/stable_baselines3.md": [elsewhere("stable_baselines3"), HOST_LOOP],
    "coming_from/torchrl.md": [elsewhere("torchrl"), HOST_LOOP],
    "guides/host.md": [host_loop, gymnasium],
    "guides/memory.md": [bytes_of_a_state, beyond_the_device],
    "guides/mixtures.md": [half_online],
    "guides/rollouts.md": [bounded_versions, mark_of_a_version, advantages, short_rows, in_time, preempted_run],
    "guides/own_sampler.md": [own_sampler],
    "guides/pools.md": [pools],
    "guides/tasks.md": [tasks, levels, largest_returns],
    "guides/porting.md": [
        object_in_a_train_state,
        a_traced_discount,
        one_done,
        rows_that_may_not_be_drawn,
        shuffled_minibatches,
        ends_one_row_late,
        hidden_outcomes,
        trailing_size,
        single_environment,
    ],
    "guides/recurrent.md": [recurrent_agent],
    "guides/priorities.md": [prioritized, lap, priorities_from_actors, recomputed],
    "guides/scan.md": [training_loop, first_carry, when_ready, several_updates, one_object],
    "guides/seeds.md": [several_seeds],
    "guides/sweeps.md": [sweeps],
    "guides/sequences.md": [sequences],
    "guides/stack.md": [
        in_nnx,
        in_a_train_state,
        in_equinox,
        in_orbax,
        on_another_backend,
        loggers,
        gymnax_step,
        brax_step,
        rows_of_gymnasium,
    ],
    "guides/threads.md": [
        actors_and_a_learner,
        a_block_of_the_state,
        a_shared_is_restored,
        actors_with_streams,
        actors_on_another_device,
        parts_of_a_batch,
        rows_through_ray,
    ],
    "guides/truncation.md": [both_ends, same_step, one_step_late],
    "guides/writes.md": [rollouts, later_rewards],
}
CHECKS = {
    f"{page}-{number}": (name, number, check)
    for page, checks in COVERED.items()
    for number, check in enumerate(checks)
    for name in [page if page == "README.md" else DOCS + page]
}


def test_every_block_is_covered():
    assert {fence[1] for _, fence in FENCES} <= {"sh", "python", "text"}
    for name, page in PAGES.items():
        assert page.count("```") == 2 * sum(found == name for found, _ in FENCES), name
        checked = sum(name == covered for covered, _, _ in CHECKS.values())
        assert sum(found == name for found, _ in BLOCKS) == checked, f"{name}: a function for each block of Python"


DEAR = {"own_sampler.md-0", "goals.md-0", "diagnostics.md-0", "draws.md-0", "sequences.md-0", "pools.md-0", "host.md-1"}
DEAR |= {"writes.md-0", "priorities.md-0", "memory.md-0", "datasets.md-0", "porting.md-0", "recurrent.md-0"}
DEAR |= {"threads.md-0", "threads.md-6", "stack.md-0", "porting.md-4", "draws.md-7"}


@pytest.mark.parametrize("case", [rarely(case) if case.removeprefix("guides/") in DEAR else case for case in CHECKS])
def test_block(case, monkeypatch, tmp_path):
    name, number, check = CHECKS[case]
    monkeypatch.chdir(tmp_path)
    check([block for block in BLOCKS if block[0] == name][number], monkeypatch)


def anchors(page):
    """What a link may name: headings in lower case, without punctuation, with hyphens in place of blanks."""
    headings = re.findall(r"^#+ (.*)$", FENCE.sub("", page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading).lower().replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("name", [*PAGES, "tests/benchmarks/README.md"])
def test_links(name):
    page = (ROOT / name).read_text()
    for link in re.findall(r"\]\(([^)\s]+)\)", FENCE.sub("", page)):
        if link.startswith("https://"):
            continue
        path, _, anchor = link.partition("#")
        target = (ROOT / name).parent / path if path else ROOT / name
        assert target.exists(), link
        assert not anchor or anchor in anchors(target.read_text()), link
