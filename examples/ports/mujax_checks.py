"""Checks of mujax's replay and of the port, in numbers, with mujax's own code.

All drawn sequences of mujax are correct. It writes a chunk only when every actor has delivered one. So an actor's steps
wait for the slowest actor, in a queue without a limit. In the port each actor has its own source, and its steps can be
drawn at once. mujax uses the policies and values that reanalysis finds for one batch and then drops them.
`KeepingReanalyzer` stores them with `Shared.set`. The port needs more time. Its actors add every step instead of every
16th, and it writes back; the two were not timed apart.
"""

import itertools
import threading
import types
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from mujax.reanalyze import Reanalyzer
from mujax.replay import Buffer
from mujax.replay import _item_template as item_template
from mujax.types import EnvironmentSpec, SearchOutput, Transition
from mujax_adapter import KeepingReanalyzer, SharedReplay

SPEC, NUM_ENVS, LENGTH, T, B = EnvironmentSpec(obs_dim=2, num_actions=2), 2, 20, 4, 64
SEARCHED, FOUND = 2, 7.0  # steps of a sequence that are searched, and the value that each search finds


def transition(actor: int, step: int) -> Transition:
    """Observations hold the environment's number and the step's."""
    zeros = jax.tree.map(lambda x: np.zeros((NUM_ENVS, *x.shape), x.dtype), item_template(SPEC))
    obs = [(actor * NUM_ENVS + env, step) for env in range(NUM_ENVS)]
    return zeros._replace(observation=np.array(obs, np.float32), discount=zeros.discount + 1)


def filled(replay: type, *steps: int) -> Any:
    """A replay of 2 actors with 2 environments. Actor k has added `steps`[k] steps, in turn as far as both had some."""
    sizes = {"num_envs": NUM_ENVS, "max_size": LENGTH * NUM_ENVS * 2, "sample_batch_size": B, "sequence_length": T}
    result = replay(SPEC, num_actors=2, **sizes)
    for step, actor in itertools.product(range(max(steps)), range(2)):
        if step < steps[actor]:
            result.adder(actor).add(transition(actor, step))
    return result


def draw(replay: Any, times: int) -> np.ndarray:
    """Environment and step of drawn sequences, [times * B, T, 2]."""
    drawn = [replay.sample(jax.random.key(time)).experience.observation for time in range(times)]
    return np.concatenate([np.asarray(x) for x in drawn])


def mixed(replay: type) -> str:
    """Sequences whose steps are not consecutive steps of one environment, from rings that have wrapped."""
    drawn = draw(filled(replay, 52, 52), 20)
    wrong = np.any(np.diff(drawn, axis=1) != [0, 1], axis=(1, 2))
    return f"{wrong.sum()} of {wrong.size:,}"


def of_fast_actor(replay: type) -> str:
    """Different steps drawn from an environment whose actor has added 20, while the other has added 4."""
    drawn = draw(filled(replay, 20, 4), 20).reshape(-1, 2)
    return f"{len(np.unique(drawn[drawn[:, 0] == 0], axis=0))}"


def kept(replay: type, reanalyzer: type) -> str:
    """Share of the searched steps whose search result is found again in later draws of the same steps."""
    made, stop = filled(replay, 20, 20), threading.Event()
    config = types.SimpleNamespace(batch_size=B, reanalyze_ratio=0.5, num_unroll_steps=SEARCHED - 1, sequence_length=T)

    def policy(params: Any, obs: jax.Array, *others: Any) -> SearchOutput:
        probs = jnp.tile(jnp.array([0.25, 0.75]), (len(obs), 1))
        return SearchOutput(jnp.zeros(len(obs), jnp.int32), probs, jnp.full(len(obs), FOUND))

    batches = reanalyzer(
        made,
        config=config,
        policy=policy,
        value_fn=lambda params, obs: jnp.zeros(len(obs)),
        get_params=lambda: (None, 0),
        device=None,
        random_key=jax.random.PRNGKey(0),
        stop_event=stop,
    )
    first = jax.tree.map(np.asarray, next(batches).experience)
    searched = {tuple(row) for row in first.observation[: B // 2, :SEARCHED].reshape(-1, 2)}
    again = [made.sample(jax.random.key(number)).experience for number in range(60)]
    again = jax.tree.map(lambda *x: np.concatenate(x).reshape(60 * B * T, -1), *again)
    steps = [tuple(row) for row in again.observation]
    right = (again.value[:, 0] == FOUND) & (again.policy_probs[:, 1] == 0.75)
    assert searched <= {*steps}, "some searched steps were not drawn"
    assert all(step in searched for step, value in zip(steps, again.value, strict=True) if value), "a stray value"
    return f"{len(searched & {step for step, found in zip(steps, right, strict=True) if found})} of {len(searched)}"


def check() -> dict[str, list[str]]:
    """Findings in both versions."""
    sizes = f"rings of {LENGTH} steps, sequences of {T}"
    plain = {
        f"drawn sequences that mix environments or times, from full {sizes}": mixed,
        "steps of an environment that are drawn, if its actor has added 20 and the other 4": of_fast_actor,
    }
    found = f"buffer only: {kept(SharedReplay, Reanalyzer)}, keeps: {kept(SharedReplay, KeepingReanalyzer)}"
    both = {what: [of(Buffer), of(SharedReplay)] for what, of in plain.items()}
    return {**both, "searched steps whose found policy and value are in later draws": [kept(Buffer, Reanalyzer), found]}
