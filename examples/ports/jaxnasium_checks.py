"""Checks of jaxnasium's buffers and of the ports, in numbers: what each gets right and wrong.

jaxnasium distinguishes truncation from termination, and never draws a step whose next observation is not in its buffer.
So all its draws are correct, but it learns nothing from steps that reach a time limit. The port with `NStep` does.

Its prioritized buffer draws without replacement, but computes weights for draws with replacement, so its weighted mean
is too small. One NaN TD error makes all weights of the next batch NaN; the port's sampler rejects and counts it. By
default the agent makes 8 updates every 256 steps, so at 50,000 items its buffer has little influence on the time.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxnasium.algorithms.core import PrioritizedTransitionBuffer, Transition
from jaxnasium_adapter import FINAL, Replay, TracedReplay

import jaxreplay as jr

LIMIT, NUM_ENVS, STEPS, LENGTH, BATCH_SIZE = 5, 2, 47, 32, 24
TRACED = {"gamma": 0.9}


def stream() -> Transition:
    """Steps [STEPS, NUM_ENVS] of episodes that end only at a time limit. Each observation is one more than the last."""
    t, env = np.arange(STEPS)[:, None], np.arange(NUM_ENVS)[None]
    obs = (1000 * env + 100 * (t // LIMIT) + t % LIMIT).astype(np.float32)
    cut = np.broadcast_to(t % LIMIT == LIMIT - 1, obs.shape)
    leaves = obs[..., None], np.zeros(obs.shape, np.int32), np.ones(obs.shape, np.float32), np.zeros_like(cut), cut
    return Transition(*map(jnp.asarray, leaves), info={FINAL: jnp.asarray(obs[..., None] + 1)})


def filled(buffer: Any, **settings: Any) -> Any:
    """A buffer filled row by row until it has wrapped."""
    rows = stream()
    result = buffer(max_size=LENGTH * NUM_ENVS, sample_batch_size=BATCH_SIZE, data_sample=rows, **settings)
    insert = jax.jit(lambda buffer, row: buffer.insert(row))
    for t in range(STEPS):
        result = insert(result, jax.tree.map(lambda leaf, t=t: leaf[t : t + 1], rows))
    return result


def next_observations() -> dict[str, list[str]]:
    """Checks of drawn steps, and of their next observations."""
    newest = np.asarray(stream().observation)[-LENGTH : 1 - 3]  # with 3 steps, the earlier ones are in the buffer
    wrong, limits, stored = [], [], newest[newest % 100 == LIMIT - 1]
    ways = [(PrioritizedTransitionBuffer, {}, 1), (Replay, {"sampler": jr.Prioritized()}, 1), (TracedReplay, TRACED, 3)]
    for buffer, settings, n in ways:
        replay = filled(buffer, **settings)
        keys = jax.random.split(jax.random.key(0), 200)
        drawn = jax.jit(jax.vmap(lambda key, replay=replay: replay.sample(key, with_next_obs=True)))(keys)
        obs, after = (np.asarray(x).ravel() for x in (drawn.observation, drawn.next_observation))
        steps = np.minimum(n, LIMIT - obs % 100)  # a window ends with its episode
        wrong.append(f"{np.sum(after != obs + steps)} of {len(obs)}")
        limits.append(f"{np.isin(stored, obs).sum()} of {len(stored)}")
    whats = {
        "drawn steps with a wrong next observation, from a ring that has wrapped": wrong,
        "steps that reach the time limit and are ever drawn": limits,
    }
    return {what: [original, f"{port}; 3-step {traced}"] for what, (original, port, traced) in whats.items()}


def filled_with(errors: np.ndarray, batch_size: int) -> tuple[Any, Any]:
    """Prioritized buffers of jaxnasium and of the port, with items numbered from 0 and these TD errors; beta is 1."""
    count = len(errors)
    numbers, no = jnp.arange(count + 1, dtype=jnp.float32)[:, None], jnp.zeros((count + 1, 1), bool)
    rows = Transition(numbers[..., None], no.astype(jnp.int32), numbers, no, no)
    sizes = {"max_size": 2 * count, "sample_batch_size": batch_size, "data_sample": rows}
    original = PrioritizedTransitionBuffer(**sizes, alpha=0.6, beta=1.0).insert(rows)
    original = original.update_priorities(jnp.arange(count), jnp.asarray(errors))
    port = Replay(**sizes, sampler=jr.Prioritized(alpha=0.6, beta=1.0)).insert(rows)
    return original, port.update_priorities(port.buffer.newest(port.state, count), jnp.asarray(errors))


def weighted_means() -> dict[str, list[str]]:
    """A check of the weights: with beta = 1, a weighted mean over a batch estimates the mean of all items."""
    count, batch_size = 500, 256
    errors = np.random.default_rng(0).lognormal(sigma=2.0, size=count).astype(np.float32)
    values = jnp.asarray(errors**0.3)
    keys = jax.random.split(jax.random.key(0), 4_000)

    def estimate(replay: Any) -> str:
        def one(key: jax.Array) -> jax.Array:
            batch = replay.sample(key, with_next_obs=True)
            found = values[batch.reward.astype(jnp.int32)]
            return jnp.sum(batch.PER_weight * found) / jnp.sum(batch.PER_weight)

        means = np.asarray(jax.jit(lambda keys: jax.lax.map(one, keys))(keys))
        return f"{means.mean():.3f} ± {2 * means.std() / np.sqrt(len(means)):.3f}"

    what = f"weighted mean over batches of {batch_size} of {count} items, {np.mean(values):.3f} if correct"
    return {what: [estimate(replay) for replay in filled_with(errors, batch_size)]}


def after_nan() -> dict[str, list[str]]:
    """A check of the weights of a batch after a single NaN TD error."""
    errors, batch_size = np.ones(500, np.float32), 256
    errors[7] = np.nan
    batches = [x.sample(jax.random.key(0), with_next_obs=True) for x in filled_with(errors, batch_size)]
    what = f"weights that are NaN in a batch of {batch_size}, after one TD error that was NaN"
    return {what: [str(np.isnan(batch.PER_weight).sum()) for batch in batches]}


def check() -> dict[str, list[str]]:
    return {**next_observations(), **weighted_means(), **after_nan()}
