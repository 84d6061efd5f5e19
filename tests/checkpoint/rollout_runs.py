"""A run that makes groups of rollouts, learns from each of them once, and goes on from its last save."""

import jax
import jax.numpy as jnp
from helpers import run_once

import jaxreplay as jr

STEPS, SAVE_EVERY = 63, 2
NUM_PROMPTS, IN_FLIGHT, GROUP, BATCH = 40, 6, 4, 8
BUFFER = jr.ReplayBuffer(capacity=64, sampler=jr.Uniform(replacement=False), max_uses=1)
CONFIG = {"replay": BUFFER}


def start(policy, numbers, key):
    """Groups of rollouts with these numbers (of the prompts that were ever started), and ticks until each is done."""
    prompts = numbers % NUM_PROMPTS
    logp = jax.nn.log_softmax(policy[prompts])
    tokens = jax.random.categorical(key, logp[:, None], shape=(len(numbers), GROUP)).astype(jnp.int32)
    rewards = (tokens == prompts[:, None] % 5).astype(jnp.float32)
    rows = {"number": numbers, "prompt": prompts, "tokens": tokens, "rewards": rewards}
    return rows, 1 + jax.random.randint(jax.random.fold_in(key, 1), (len(numbers),), 0, 5, jnp.int32)


@run_once
def begin():
    policy, numbers, key = jnp.zeros((NUM_PROMPTS, 5)), jnp.arange(IN_FLIGHT, dtype=jnp.int32), jax.random.key(7)
    flight, left = start(policy, numbers, key)
    return {
        "replay": BUFFER.init(flight),
        "policy": policy,
        "flight": flight,
        "left": left,
        "cursor": jnp.int32(IN_FLIGHT),  # of the list of prompts
        "drawn": jnp.full(BATCH, -1, jnp.int32),  # handles of groups that were drawn, and not yet learned from
        "key": key,
        "version": jnp.int32(0),  # of the policy, which is the number of steps
        "learned": jnp.zeros(STEPS * IN_FLIGHT, jnp.int32),  # how often, of each group ever started
    }


@run_once
def learn(state):
    """Learn from the groups that an earlier step has drawn, perhaps in a process that is no more."""
    items = BUFFER.get(state["replay"], state["drawn"])
    there = state["drawn"] >= 0
    advantage = there[:, None] * (items["rewards"] - items["rewards"].mean(axis=1, keepdims=True))
    number = jnp.where(there, items["number"], len(state["learned"]))
    return state | {
        "policy": (0.9 * state["policy"]).at[items["prompt"][:, None], items["tokens"]].add(advantage),
        "replay": BUFFER.update(state["replay"], state["drawn"], jnp.zeros(BATCH)),
        "drawn": jnp.full(BATCH, -1, jnp.int32),
        "version": state["version"] + 1,
        "learned": state["learned"].at[number].add(1, mode="drop"),
    }


@run_once
def generate(state):
    """Add the groups that are done, and start the next prompts of the list in their places."""
    key, new_key = jax.random.split(state["key"])
    done = state["left"] == 1
    numbers = state["cursor"] + jnp.cumsum(done, dtype=jnp.int32) - 1
    rows, left = start(state["policy"], numbers, new_key)

    def choose(new, old):
        return jnp.where(done.reshape(-1, *[1] * (new.ndim - 1)), new, old)

    return state | {
        "replay": BUFFER.add(state["replay"], state["flight"], mask=done),
        "flight": jax.tree.map(choose, rows, state["flight"]),
        "left": choose(left, state["left"] - 1),
        "cursor": state["cursor"] + jnp.sum(done, dtype=jnp.int32),
        "key": key,
    }


@run_once
def draw(state):
    key, draw_key = jax.random.split(state["key"])
    return state | {"drawn": BUFFER.sample(state["replay"], draw_key, BATCH).indices, "key": key}


def resumed(path):
    """The state of the last save at `path`, or a new one if there is none."""
    try:
        return jr.restore(path, CONFIG, begin())
    except FileNotFoundError:
        return begin()


def run(path, state, reached=lambda step: None, steps=STEPS, wait=False):
    """The last state of a run that goes on from `state` and is saved at `path`; calls `reached` at many moments."""
    for step in range(int(state["version"]), steps):
        for part in (learn, generate, draw):
            state = part(state)
            reached(step)
        if (step + 1) % SAVE_EVERY == 0 or step + 1 == steps:
            finish = jr.save(path, CONFIG, state, wait=wait)  # all of it, in one call
            reached(step + 1)
    finish()
    return state


def run_until_killed(path, connection):
    jax.config.update("jax_platforms", "cpu")
    run(path, resumed(path), lambda step: connection.send(("step", step)))
    connection.send(("done", 1))
